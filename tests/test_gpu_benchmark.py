"benchmarks/gpu: its processes and their limits, its bundle of wheels, its tables, and a run at toy sizes."

import gc
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.gpu import ab, bundle, decode, equal, loop, step
from benchmarks.gpu import run as benchmark
from benchmarks.gpu.device import table_peak
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.report import Report
from speculators_nb.decode import proposal_setup
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.cost import training_flops
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.verifier.static_pass import StaticBuffers
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]

# what a worker does with a cell, instead of benchmarks/gpu/process.py; `gib` is 64 where the pool tries a cell again
WORKER = r"""
import json, os, sys, time
from pathlib import Path
folder = Path(__file__).parent
def say(**what): print(json.dumps(what), flush=True)
def wait(name):
    while not (folder / name).exists(): time.sleep(0.01)
for cell in json.loads(sys.argv[1]):
    say(began=cell["name"])
    do = cell["do"]
    if do == "sleep": time.sleep(60)
    if do == "die": sys.stderr.write("first\nno such device\n"); os._exit(7)
    if do == "kill": os.kill(os.getpid(), 9)
    if do == "memory" and cell.get("gib") != 64: wait("clock runs"); say(row=dict(error="too large", kind="memory"))
    elif do == "turn":
        wait("clock runs"); time.sleep(0.3)
        say(turn="ask"); sys.stdin.readline()
        began = time.time(); time.sleep(0.6); ended = time.time()
        say(turn="done"); say(row=dict(turn=[began, ended])); time.sleep(0.3)
    elif do == "clock":
        ticks = []
        (folder / "clock runs").touch()
        while not (folder / "clock ends").exists(): ticks.append(time.time()); time.sleep(0.01)
        time.sleep(1)  # it ends after all that was said before is read
        say(row=dict(ticks=ticks))
    else:
        if do == "end": (folder / "clock ends").touch()
        say(row=dict(done=do))
    say(ended=cell["name"])
"""


def cells(*what, **more):
    return [dict(name=f"{i} {do}", do=do, labels=dict(number=i), **more) for i, do in enumerate(what)]


def pool_run(tmp_path, jobs, **options):
    "(rows, cells left, log, seconds)"
    script, rows, began = tmp_path / "worker.py", [], time.monotonic()
    script.write_text(WORKER)
    with open(tmp_path / "log.txt", "w") as log:
        left = Pool(jobs, rows.append, log, dict(os.environ), command=(sys.executable, str(script)), **options).run()
    return rows, left, (tmp_path / "log.txt").read_text(), time.monotonic() - began


# ------------------------------------------------------------- processes
@pytest.mark.nightly
def test_a_cell_that_hangs_or_dies_is_a_row_and_the_next_ones_are_done(tmp_path):
    rows, left, log, _ = pool_run(tmp_path, [cells("row", "sleep", "row", "die", "kill", "row", limit=5.0)], seconds=60)
    assert not left
    assert [row.get("done") for row in rows] == ["row", None, "row", None, None, "row"]
    assert rows[1] == {"cell": "1 sleep", "number": 1, "error": "killed after 5 s"}
    assert rows[3] == {"cell": "3 die", "number": 3, "error": "the process ended with code 7: no such device"}
    assert rows[4]["error"].startswith("the process was ended by SIGKILL")
    assert "first\nno such device" in log


@pytest.mark.nightly
def test_the_stage_ends_at_its_limit_and_names_what_is_left(tmp_path):
    rows, left, _, seconds = pool_run(tmp_path, [cells("row", "sleep", "row"), cells("sleep")], workers=1, seconds=4.0)
    assert [row["cell"] for row in rows] == ["0 row"]
    assert [cell["name"] for cell in left] == ["1 sleep", "2 row", "0 sleep"]
    assert seconds < 15
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [c for c in commands if str(tmp_path).encode() in c], "a process is left"


@pytest.mark.nightly
def test_while_one_has_its_turn_the_others_stand_still(tmp_path):
    rows, left, _, _ = pool_run(tmp_path, [cells("clock"), cells("turn", "turn", "end")], workers=2, seconds=60)
    assert not left
    ticks = next(row["ticks"] for row in rows if "ticks" in row)
    turns = [row["turn"] for row in rows if "turn" in row]
    assert len(turns) == 2
    for began, ended in turns:
        assert not [t for t in ticks if began + 0.05 < t < ended - 0.05]
        assert any(t < began for t in ticks) and any(t > ended for t in ticks)


@pytest.mark.nightly
def test_what_runs_out_of_memory_beside_others_is_tried_again_alone(tmp_path):
    jobs = [cells("clock"), cells("memory", "end")]
    rows, left, _, _ = pool_run(tmp_path, jobs, workers=2, seconds=60, memory=64)
    assert not left and [row["done"] for row in rows if "done" in row] == ["end", "memory"]
    assert not any("error" in row for row in rows)


def test_cells_begin_in_their_order_as_memory_and_time_allow():
    "What does not fit is overtaken; fillers are few; what takes longer than the time left is named."
    pool, late = Pool([], None, None, None, memory=64, seconds=100.0), cells("late", needs=200.0)
    jobs = {name: cells(name, gib=size) for name, size in dict(first=40.0, second=40.0, third=20.0).items()}
    jobs |= {name: cells(name, gib=1.0, filler=True) for name in "abc"}
    pool.waiting = [list(job) for job in (late, *jobs.values())]
    begun = []
    while job := pool.next_job():
        begun.append(job[0]["do"])
        pool.running.append(SimpleNamespace(cells=job))
    assert begun == ["first", "third", "a", "b"] and pool.left == late
    pool.running.pop(0)
    assert [pool.next_job()[0]["do"], pool.next_job()] == ["second", None]


# ---------------------------------------------------------------- bundle
def test_the_bundle_and_the_machine_have_what_the_package_requires():
    pins = bundle.pins((ROOT / "benchmarks/gpu/bundle.txt").read_text())
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert list(pins) == sorted(pins) and not set(pins) & set(bundle.EXPECTED)
    wheel = ("speculators-nb", "0", needed)
    assert not bundle.unmet([wheel, *((name, version, []) for name, version in pins.items())])
    for requirement in map(Requirement, needed):  # in one list, and no more
        name = bundle.name_of(requirement.name)
        assert sum(name in names for names in (pins, bundle.EXPECTED, bundle.LEFT_OUT)) == 1, name


def test_the_bundle_is_not_tracked():
    assert subprocess.run(["git", "check-ignore", "-q", "output/gpu-bundle/a.whl"], cwd=ROOT).returncode == 0


def test_the_bundle_has_the_upstream_release_that_is_measured():
    pins = bundle.pins((ROOT / "benchmarks/gpu/bundle.txt").read_text())
    upstream = (ROOT / "benchmarks/upstream.py").read_text()
    assert all(f'"{name}=={pins[name]}"' in upstream for name in ("speculators", "hs-connectors"))


def test_the_bundle_differs_from_the_tested_versions_only_where_upstream_asks_for_it():
    pins = bundle.pins((ROOT / "benchmarks/gpu/bundle.txt").read_text())
    tested = bundle.pins((ROOT / "constraints.txt").read_text())
    # datasets<=5.1.0, and its bound on fsspec
    assert {name for name in pins if name in tested and pins[name] != tested[name]} == {"datasets", "fsspec"}


@pytest.mark.parametrize(
    "wheels,complaint",
    [
        ([("a", "1", ["b>=2"])], "a needs b>=2: neither in bundle.txt nor expected"),
        ([("a", "1", ["b>=2"]), ("b", "1.9", [])], "a needs b>=2: there is 1.9"),
        ([("a", "1", ["torch>=2.12"])], "there is 2.11.0"),
        ([("a", "1", ["B_c"])], "B_c"),
    ],
)
def test_an_unmet_requirement_is_named(wheels, complaint):
    (wrong,) = bundle.unmet(wheels)
    assert complaint in wrong


@pytest.mark.parametrize(
    "wanted",
    [
        ["torch>=2.6"],
        ["win; sys_platform == 'win32'"],
        ["old; python_version < '3.7'"],
        ["torchvision"],
        ["pandas"],
        [],
    ],
)
def test_requirements_of_other_systems_and_expected_ones_are_met(wanted):
    assert not bundle.unmet([("a", "1", wanted)])


def test_wheels_are_read_and_unpacked(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "some_thing-1.2-py3-none-any.whl", "w") as z:
        z.writestr("some_thing/__init__.py", "x = 1")
        z.writestr(
            "some_thing-1.2.dist-info/METADATA",
            "Name: Some.thing\nVersion: 1.2\nRequires-Dist: a>1\nRequires-Dist: b; extra == 'dev'\n\ntext",
        )
    assert bundle.metadata(tmp_path / "some_thing-1.2-py3-none-any.whl") == ("some-thing", "1.2", ["a>1"])
    bundle.unpack(tmp_path, tmp_path / "site")
    assert (tmp_path / "site/some_thing/__init__.py").read_text() == "x = 1"


def test_a_bundle_for_another_python_is_not_used(tmp_path, monkeypatch):
    mine = f"{sys.version_info[0]}{sys.version_info[1]}"
    (tmp_path / "pure-1-py3-none-any.whl").touch()
    assert bundle.python_of(tmp_path) is None and benchmark.bundle_fits(tmp_path)
    (tmp_path / f"mine-1-cp{mine}-cp{mine}-manylinux2014_x86_64.whl").touch()
    assert benchmark.bundle_fits(tmp_path)
    (tmp_path / f"mine-1-cp{mine}-cp{mine}-manylinux2014_x86_64.whl").rename(
        tmp_path / "its-1-cp39-cp39-manylinux2014_x86_64.whl"
    )
    assert bundle.python_of(tmp_path) == "3.9" and not benchmark.bundle_fits(tmp_path)
    monkeypatch.setattr(benchmark, "missing", lambda: ["pydantic"])
    with pytest.raises(SystemExit, match="wheels for Python 3.9, this is 3.*bundle.py fetch"):
        benchmark.bundle_fits(tmp_path)


@pytest.mark.parametrize("most,wrong", [("MOST", "more than 0; send a slim copy"), ("MOST_SLIM", "shorten READ")])
def test_what_is_too_large_to_travel_is_refused(tmp_path, monkeypatch, most, wrong):
    (tmp_path / "a.whl").touch()
    bundle.size(tmp_path)
    monkeypatch.setattr(bundle, most, 0)
    with pytest.raises(SystemExit, match=wrong):
        bundle.size(tmp_path) if most == "MOST" else bundle.slim(tmp_path / "copy", tmp_path)


def test_a_slim_copy_needs_wheels_and_a_new_folder(tmp_path):
    with pytest.raises(SystemExit, match="make gpu-bundle"):
        bundle.slim(tmp_path / "copy", tmp_path)
    with pytest.raises(SystemExit, match="there already"):
        bundle.slim(tmp_path, tmp_path)


# ----------------------------------------------------------- comparisons
def test_differences_see_a_loss_a_direction_a_size_and_a_missing_gradient():
    one = 2.0, dict(a=torch.tensor([1.0, 0.0]), b=torch.tensor([2.0]))
    assert equal.differences(one, one) == pytest.approx(dict(loss=0, angle=0, gradient=0), abs=1e-12) and equal.within(
        equal.differences(one, one), "fp32"
    )
    for other in [
        (2.1, one[1]),
        (2.0, one[1] | dict(a=torch.tensor([1.0, 0.3]))),
        (2.0, one[1] | dict(b=torch.tensor([2.5]))),
        (float("nan"), one[1]),
        (2.0, one[1] | dict(b=torch.tensor([torch.nan]))),
    ]:
        assert not equal.within(equal.differences(other, one), "bf16")
    with pytest.raises(ValueError, match=r"gradients of \['b'\]"):
        equal.differences((2.0, dict(a=one[1]["a"])), one)


def test_texts_part_where_they_first_differ():
    assert decode.first_difference([1, 2], [1, 2]) is None
    assert decode.first_difference([1, 2, 3], [1, 4, 3]) == 1 and decode.first_difference([1, 2], [1, 2, 3]) == 2


def test_a_near_tie_is_seen():
    class Model:
        device = torch.device("cpu")

        def __init__(self, *logits):
            self.said = torch.tensor([[logits]])

        def __call__(self, ids):
            return type("Out", (), dict(logits=self.said))

    assert decode.near_tie(Model(8.0, 7.95, 1.0), [1]) and not decode.near_tie(Model(8.0, 7.0, 1.0), [1])


def test_flops_are_those_of_evaluate_cost():
    setup = step.Setup("ours", "EAGLE-3 K=3", 256, "toy", torch.device("cpu"))
    counted = step.model_flops(setup.model, setup.call, setup.batch)
    whole = {k: v.float() if v.is_floating_point() else v for k, v in setup.batch.items()}
    assert counted == training_flops(setup.model, whole, **setup.call) * 256
    assert all(p.grad is None for p in setup.model.parameters())


@pytest.mark.parametrize("length", [8192, 32768])
def test_cases_are_of_the_shapes_that_the_page_names(length):
    for name in step.SETTINGS:
        for packing in range(len(step.PACKINGS)):
            of = step.case(name, length, "device", packing)
            assert sum(of["documents"]) == length and of["shape"]["hidden"] == 4096 and of["layers"] == 1
    assert step.case("EAGLE-3 K=7", length, "device")["training"] == dict(ttt_steps=7)
    assert (
        step.case("MTP", length, "device")["draft_vocab"] == 151936
        and step.case("DFlash 512x16", length, "device")["anchors"] == 512
    )


def test_packings_have_one_length_and_each_its_own_documents_and_loss():
    setup = step.Setup("ours", "DFlash 512x16", 256, "toy", torch.device("cpu"))
    setup.draw_others()
    first, second = setup.batches
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    names = ("document_ids", "loss_mask", "input_ids", "anchor_positions")
    assert all(not first[k].equal(second[k]) for k in names)
    for number, batch in ((1, second), (0, first)):
        setup.use(number)
        assert all(setup.batch[k] is v for k, v in batch.items())


def test_graphs_of_other_shapes_are_counted():
    compiled, before = torch.compile(lambda x: x + 1, backend="eager", dynamic=False), step.graphs()
    for n in (3, 3, 4):
        compiled(torch.zeros(n))
    assert step.graphs() - before == 2


def test_a_variant_whose_target_is_gone_is_a_row_and_the_next_is_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(ab, "measured", lambda *_: dict(seconds=measured.append(equal.step) or 1.0))
    gone = lambda: [ab.patch("benchmarks.gpu.equal.no_more", 1)]
    other = lambda: [ab.patch("benchmarks.gpu.equal.step", "other")]
    monkeypatch.setattr(ab, "VARIANTS", {"MTP": {"gone": gone, "other": other, "plain": list}})
    of = dict(setting="MTP", length=256, size="toy")
    rows = list(ab.run(dict(of, labels={}), None))
    assert [row["variant"] for row in rows] == ["gone", "other", "plain"] and "no_more" in rows[0]["error"]
    assert measured == ["other", equal.step] and equal.step != "other"
    (row, *_) = ab.run(dict(of, labels={}, ends=time.time() + 1), None)
    assert row == dict(variant="gone", left_out=True)


@pytest.mark.parametrize("loss, rows", [("kl_div", 9), ("tv", 12)])
def test_a_tile_of_the_loss_is_one_kernel_for_a_device_that_is_not_there(loss, rows):
    "It reads as few rows of logits as the page says."
    rows_read = pytest.importorskip("benchmarks.gpu.rows_read", exc_type=ImportError)  # loads torch's compiler
    if not torch.__version__.startswith(rows_read.KNOWN):
        pytest.skip(f"it calls internals of torch {rows_read.KNOWN}")
    assert rows_read.reads(rows_read.tile(loss, 3)) == [rows]
    assert f"| `{loss}`, one target and three drafts | 1 | {rows} |" in (ROOT / "benchmarks/gpu/README.md").read_text()
    assert torch.cuda.is_available.__module__ == "torch.cuda"  # nothing is pretended any more


def names(jobs):
    return [each["name"] for job in jobs for each in job]


def test_every_drafter_has_its_cells_and_each_cell_one_name():
    jobs = benchmark.device_jobs()
    for kind in ("equal", "decode"):
        found = [(c["drafter"], c["dtype"]) for job in jobs for c in job if c["kind"] == kind]
        assert sorted(found) == sorted((name, dtype) for name in equal.DRAFTERS for dtype in ("fp32", "bf16"))
    assert {algorithm for algorithm, _ in equal.DRAFTERS.values()} == set(SpeculatorModel.registered_classes())
    assert len(set(names(jobs))) == len(names(jobs)) and not any("," in name for name in names(jobs))


def test_the_order_of_the_cells():
    kinds = [name.split()[0] for name in names(benchmark.device_jobs())]
    first = names(benchmark.device_jobs())[:13:2]
    assert kinds[:6] == ["ab", "step", "step", "equal", "equal", "kernels"]
    assert first[0] == "ab EAGLE-3 K=3 8192" and first[-1] == "step MTP 8192 upstream"
    assert kinds[14:16] == ["ab", "loop"]


def test_cells_are_chosen_by_a_part_of_their_name_or_a_glob():
    jobs = benchmark.device_jobs()
    assert benchmark.chosen(jobs, None) is jobs
    assert names(benchmark.chosen(jobs, "loop,AB eagle")) == ["ab EAGLE-3 K=3 8192", "loop"]
    assert names(benchmark.chosen(jobs, "step *32768*")) == [
        "step EAGLE-3 K=3 32768 upstream",
        "step EAGLE-3 K=3 32768 ours",
    ]
    with pytest.raises(SystemExit, match="no cell is named like 'nothing'; `--list`"):
        benchmark.chosen(jobs, "loop,nothing")


@pytest.mark.parametrize(
    "name,peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Radeon", None),
    ],
)
def test_peaks_of_known_devices(name, peak):
    assert table_peak(name) == peak


# ---------------------------------------------------------------- report
STEP = dict(
    setting="MTP",
    length=2048,
    seconds=0.5,
    changing_seconds=0.6,
    tokens_per_second=4096,
    held_bytes=2**30,
    peak_bytes=2**31,
    steps=3,
    first_seconds=9.0,
    first_graphs=7,
    other_graphs=2,
    last_graphs=0,
    first_gradient_norm=1.0,
)
DEVICE = dict(
    cell="device", device="A | card", peak_flops=1e15, peak_from="data sheet", gemm_flops=8e14, copy_bytes=4e12
)
ABOUT = dict(card="A | card", torch="2.11.0", date="2026-01-01", commit="abc", versions={"python": "3.12"})


def report_of(folder, **about):
    report = Report.at(folder, ABOUT | about, "device")
    report.begin(["e", "loop"], ["A sentence."])
    return report


def lines(folder, part):
    return [line for line in (folder / "README.md").read_text().splitlines() if part in line]


def test_the_report_counts_failures_and_names_what_was_left_out(tmp_path):
    report = report_of(tmp_path)
    report.add("device", DEVICE)
    report.add("step", dict(cell="u", side="upstream", first_loss=2.0, **STEP))
    half = dict(seconds=0.25, changing_seconds=0.2, peak_bytes=1.5 * 2**30)
    report.add("step", dict(cell="o", side="ours", first_loss=2.01, flops=1e14, **STEP | half))
    away = dict(setting="MTP", length=32768, side="upstream", error="OutOfMemoryError: no", kind="memory")
    report.add("step", dict(cell="m", **away))
    close = dict(drafter="mtp", dtype="fp32", pair="flex vs dense", loss=1e-7, angle=0.0, gradient=1e-6, ok=True)
    report.add("equal", dict(cell="e", **close))
    assert report.failed() == 0
    stamped = "abc | 2.11.0 | 2026-01-01 |"
    assert lines(tmp_path, "| MTP | 2,048 | ours | 250 | 200 | 4,096 | 2 | 3 | 1.5 | 0.5 | 0.75 | 40 | 9 | 7 + 2 + 0 |")
    assert lines(tmp_path, f"{stamped} out of memory: OutOfMemoryError: no |")
    report.add("step", dict(cell="s", side="ours", first_loss=2.1, **STEP | dict(length=4096)))
    report.add("step", dict(cell="t", side="upstream", first_loss=2.0, **STEP | dict(length=4096)))
    report.add("equal", dict(cell="k", drafter="eagle", dtype="fp32", error="killed after 9 s"))
    text = dict(drafter="eagle", dtype="fp32", texts=2, near_ties=0, different=1, accepted_a_step=0.5, ok=False)
    report.add("decode", dict(cell="d", **text))
    report.note(["loop"])
    assert report.failed() == 3
    assert lines(tmp_path, f"{stamped} **losses differ** |") and lines(tmp_path, f"{stamped} killed after 9 s |")
    assert lines(tmp_path, f"{stamped} **not within tolerance** |") and lines(tmp_path, "A sentence.")
    assert lines(tmp_path, "no time: loop.") and not lines(tmp_path, "no time: e, loop.")
    assert not list(tmp_path.glob("*.part*"))


def test_a_later_run_replaces_its_cells_and_each_row_says_what_it_is_of(tmp_path):
    report = report_of(tmp_path)
    for cell, side in (("u", "upstream"), ("o", "ours")):
        report.add("step", dict(cell=cell, side=side, first_loss=2.0, **STEP))
    report.add("equal", dict(cell="e", drafter="mtp", dtype="fp32", error="no"))
    later = report_of(tmp_path, commit="def", date="2026-02-02")
    later.add("step", dict(cell="o", side="ours", first_loss=2.0, **STEP | dict(seconds=0.25)))
    assert later.failed() == 0  # of this run
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    found = {r["cell"]: (r["commit"], r["card"], r["torch"], r["date"]) for rs in rows.values() for r in rs}
    old, new = ("abc", "A | card", "2.11.0", "2026-01-01"), ("def", "A | card", "2.11.0", "2026-02-02")
    assert found == dict(u=old, o=new, e=old)
    (line,) = lines(tmp_path, "| MTP | 2,048 | ours |")
    assert "| 250 | 600 | 4,096 | 2 | 1 |" in line and "| def | 2.11.0 | 2026-02-02 |" in line


def test_a_train_step_keeps_its_first_row_when_changing_batches_fail(tmp_path):
    report = report_of(tmp_path)
    report.add("step", dict(cell="o", side="ours", first_loss=2.0, **STEP))
    report.add("step", dict(cell="o", setting="MTP", length=2048, side="ours", changing_seconds=0.7))
    report.add("step", dict(cell="o", setting="MTP", length=2048, side="ours", error="killed after 9 s"))
    assert lines(tmp_path, "| MTP | 2,048 | ours | 500 | 700 |")[0].endswith("killed after 9 s |")
    assert report.failed() == 1


def test_results_of_elsewhere_are_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "HERE", tmp_path)
    there = report_of(tmp_path / "there")
    there.add("equal", dict(cell="e", drafter="mtp", dtype="fp32", error="no"))
    here = report_of(tmp_path / "results/a-card", commit="old")
    for cell in "ef":
        here.add("equal", dict(cell=cell, drafter="mtp", dtype="fp32", error="no"))
    benchmark.merge(tmp_path / "there")
    benchmark.merge(tmp_path / "there")
    found = json.loads((tmp_path / "results/a-card/results.json").read_text())
    assert [(r["cell"], r["commit"]) for r in found["rows"]["equal"]] == [("f", "old"), ("e", "abc")]
    assert [run["commit"] for run in found["runs"]] == ["old", "abc"]


def test_what_another_torch_measured_is_not_compared_and_another_card_has_a_folder_of_its_own(tmp_path):
    report_of(tmp_path).add("step", dict(cell="u", side="upstream", first_loss=2.0, **STEP))
    later = report_of(tmp_path, torch="2.12.0")
    later.add("step", dict(cell="o", side="ours", first_loss=9.0, **STEP))
    assert later.failed() == 0
    with pytest.raises(SystemExit, match=r"has results of A \| card \(device\), this is B .* by --out"):
        report_of(tmp_path, card="B")


def test_variants_are_compared_with_the_code_as_committed_in_their_run(tmp_path):
    report = report_of(tmp_path)
    for variant, seconds in (("as committed", 0.5), ("other", 0.25)):
        report.add("ab", dict(cell="a", setting="MTP", length=8, variant=variant, seconds=seconds))
    assert lines(tmp_path, "| MTP | 8 | other | 250 | 0.5 | abc |")


@pytest.mark.nightly
def test_each_row_of_the_decode_loop_has_a_turn_of_its_own(monkeypatch):
    """One for all rows was longer than the pool allows: the last rows would be measured beside other processes. And
    what is measured leaves no context behind, whose buffers the next row could not use."""
    chain, plain = Verifier.from_pretrained(str(equal.VERIFIER), [1, 2, 3]), NgramDrafter()
    monkeypatch.setattr(loop, "models", lambda size, device: (chain, plain))
    monkeypatch.setattr(proposal_setup, "TreeDrafter", lambda drafter, method: drafter)
    turns, made = [], []

    @contextmanager
    def turn():
        turns.append("began")
        yield
        turns.append("ended")

    init = StaticBuffers.__init__

    def seen(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(StaticBuffers, "__init__", seen)
    gc.disable()
    try:
        rows = list(loop.run(dict(size="toy"), turn))
    finally:
        gc.enable()
    assert len(rows) == 12 and turns == ["began", "ended"] * 12
    assert all(len(row["runs"]) == 3 and row["seconds"] == sorted(row["runs"])[1] for row in rows)
    assert len(made) == 1  # of all rows


# --------------------------------------------------------------- the run
@pytest.mark.nightly
def test_without_a_device_it_says_what_to_run(tmp_path):
    if torch.cuda.is_available():
        pytest.fail("this test is about machines without a device")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu/run.py", "--out", tmp_path], capture_output=True, text=True
    )
    assert (
        done.returncode == 1
        and done.stderr.strip().splitlines()[-1] == "torch sees no CUDA device; on a CPU run `make gpu-toy`"
    )


@pytest.mark.nightly
def test_toy_run(tmp_path):
    """Each drafter, dtype and pair is there, in fp32 within a tenth of its tolerance; texts are equal, steps timed.
    From a slim copy, which has all that it needs."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").touch()
    bundle.slim(tmp_path / "tree", tmp_path / "wheels")
    done = subprocess.run(
        [sys.executable, tmp_path / "tree/benchmarks/gpu/run.py", "--toy", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path / "tree")),
    )
    found = json.loads((tmp_path / "out/results.json").read_text())
    every = [row for rows in found["rows"].values() for row in rows]
    assert done.returncode == 0, [row for row in every if "error" in row or row.get("ok") is False]
    (run,) = found["runs"]
    assert not run["left_out"] and {r["commit"] for r in every} == {(tmp_path / "tree/COMMIT").read_text().strip()}
    rows = {(r["drafter"], r["dtype"], r["pair"]): r for r in found["rows"]["equal"]}
    pairs = {
        "fp32": ["blocked vs dense", "flex vs dense", "flex vs blocked", "masked vs dense"],
        "bf16": ["blocked vs dense", "flex vs dense", "flex vs blocked", "flex vs dense in fp32"],
    }
    heads = {"fp32": ["lean vs dense"], "bf16": ["lean vs dense", "lean vs dense in fp32"]}
    assert set(rows) == {
        (name, dtype, pair)
        for name in equal.DRAFTERS
        for dtype in pairs
        for pair in (heads if name in equal.HEADS else pairs)[dtype]
    }
    for (_, dtype, _), row in rows.items():
        assert dtype == "bf16" or all(row[key] <= limit / 10 for key, limit in equal.TOLERANCE["fp32"].items()), row
    assert {r["drafter"] for r in found["rows"]["decode"]} == set(equal.DRAFTERS) and max(
        r["accepted_a_step"] for r in found["rows"]["decode"]
    ) > 1
    timed = [r["setting"] for r in found["rows"]["step"] if min(r["flops"], r["seconds"], r["changing_seconds"]) > 0]
    assert set(timed) == set(step.SETTINGS) - {"EAGLE-3 K=7"}
    for setting, variants in ab.VARIANTS.items():
        of = [row for row in found["rows"]["ab"] if row["setting"] == setting]
        losses = [row["first_loss"] for row in of]
        assert [row["variant"] for row in of] == list(variants)
        assert max(losses) / min(losses) < 1.001  # on a CPU nothing is compiled; products are rounded to bf16
    looped = found["rows"]["loop"]
    kinds = {(p, t, c) for p in ("chain", "tree") for t in (0.0, 1.0) for c in ("dynamic", "static", "graphs")}
    assert {(r["proposal"], r["temperature"], r["kv_cache"]) for r in looped} == kinds
    assert all(r["text"] == "equal" for r in looped)  # float32 on a CPU
    assert {r["kv_cache"] for r in found["rows"]["decode"] if r["drafter"] == "eagle3"} == {"dynamic", "graphs"}
    assert all(min(r["draft_seconds"], r["verification_seconds"], r["rule_seconds"]) > 0 for r in looped)
    kernels = found["rows"]["kernels"]
    assert len([r for r in kernels if "kernel" in r]) == 30
    shares = {r["share_of"]: r["share"] for r in kernels if "share_of" in r}
    assert sum(shares.values()) == pytest.approx(1) and min(shares[x] for x in ("flex", "product", "loss")) > 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "results.json",
        "README.md",
        "log.txt",
    }
    assert not re.search(
        r"/(home|root|tmp|work|Users|opt)/",
        (tmp_path / "out/results.json").read_text() + (tmp_path / "out/README.md").read_text(),
    )
