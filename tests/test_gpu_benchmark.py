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

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.gpu import bundle, decode, equal, loop, step
from benchmarks.gpu import run as benchmark
from benchmarks.gpu.device import table_peak
from benchmarks.gpu.notebooks import flagged, run_notebook
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.report import Report
from speculators_nb.decode import proposal_setup
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.cost import training_flops
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.verifier.static_pass import StaticBuffers
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]

# what a worker does with a cell, instead of benchmarks/gpu/process.py; `alone` is set where the pool tries a cell again
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
    if do == "memory" and not cell.get("alone"): wait("clock runs"); say(row=dict(error="too large", kind="memory"))
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


def cells(*what):
    return [dict(name=f"{i} {do}", do=do, labels=dict(number=i)) for i, do in enumerate(what)]


def pool_run(tmp_path, jobs, **options):
    "(rows, cells left, log, seconds)"
    script, rows, began = tmp_path / "worker.py", [], time.monotonic()
    script.write_text(WORKER)
    with open(tmp_path / "log.txt", "w") as log:
        left = Pool(jobs, rows.append, log, dict(os.environ), command=(sys.executable, str(script)), **options).run()
    return rows, left, (tmp_path / "log.txt").read_text(), time.monotonic() - began


# ------------------------------------------------------------- processes
def test_a_cell_that_hangs_or_dies_is_a_row_and_the_next_ones_are_done(tmp_path):
    rows, left, log, _ = pool_run(
        tmp_path, [cells("row", "sleep", "row", "die", "kill", "row")], cell_seconds=5.0, seconds=60
    )
    assert not left
    assert [row.get("done") for row in rows] == ["row", None, "row", None, None, "row"]
    assert rows[1] == {"cell": "1 sleep", "number": 1, "error": "killed after 5 s"}
    assert rows[3] == {"cell": "3 die", "number": 3, "error": "the process ended with code 7: no such device"}
    assert rows[4]["error"].startswith("the process was ended by SIGKILL")
    assert "first\nno such device" in log


def test_the_stage_ends_at_its_limit_and_names_what_is_left(tmp_path):
    rows, left, _, seconds = pool_run(tmp_path, [cells("row", "sleep", "row"), cells("sleep")], workers=1, seconds=4.0)
    assert [row["cell"] for row in rows] == ["0 row"]
    assert [cell["name"] for cell in left] == ["1 sleep", "2 row", "0 sleep"]
    assert seconds < 15
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [c for c in commands if str(tmp_path).encode() in c], "a process is left"


def test_while_one_has_its_turn_the_others_stand_still(tmp_path):
    rows, left, _, _ = pool_run(tmp_path, [cells("clock"), cells("turn", "turn", "end")], workers=2, seconds=60)
    assert not left
    ticks = next(row["ticks"] for row in rows if "ticks" in row)
    turns = [row["turn"] for row in rows if "turn" in row]
    assert len(turns) == 2
    for began, ended in turns:
        assert not [t for t in ticks if began + 0.05 < t < ended - 0.05]
        assert any(t < began for t in ticks) and any(t > ended for t in ticks)


def test_what_runs_out_of_memory_beside_others_is_tried_again_alone(tmp_path):
    rows, left, _, _ = pool_run(tmp_path, [cells("clock"), cells("memory", "end")], workers=2, seconds=60)
    assert not left and [row["done"] for row in rows if "done" in row] == ["end", "memory"]
    assert not any("error" in row for row in rows)


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


# ------------------------------------------------------------- notebooks
def test_flagged_cells_of_a_notebook_are_run(tmp_path):
    sources = [
        "x = 1",
        "%matplotlib inline\nx += 1",
        "#| eval: false\nraise SystemExit",
        "#| slow\nx = 100",
        "#| cuda\nimport os\nassert x == 2 and os.path.exists('a.ipynb')",
        "#| cuda\nx += 1\nassert x == 3",
        "raise SystemExit",
    ]
    book = dict(
        cells=[dict(cell_type="markdown", source="#| cuda")] + [dict(cell_type="code", source=s) for s in sources]
    )
    (tmp_path / "a.ipynb").write_text(json.dumps(book))
    (tmp_path / "b.ipynb").write_text(json.dumps(dict(cells=book["cells"][:2])))
    assert flagged(tmp_path) == [tmp_path / "a.ipynb"] and run_notebook(tmp_path / "a.ipynb") == 2
    book["cells"][2]["source"] = "x += 5"
    (tmp_path / "a.ipynb").write_text(json.dumps(book))
    with pytest.raises(AssertionError):
        run_notebook(tmp_path / "a.ipynb")


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
    model, call, batch = step.build("ours", step.case("EAGLE-3 K=3", 256, "toy"), torch.device("cpu"))
    counted = step.model_flops(model, call, batch)
    whole = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    assert counted == training_flops(model, whole, **call) * 256
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_cases_are_of_the_shapes_that_the_page_names(length):
    for name in step.SETTINGS:
        of = step.case(name, length, "device")
        assert sum(of["documents"]) == length and of["shape"]["hidden"] == 4096 and of["layers"] == 1
    assert step.case("EAGLE-3 K=7", length, "device")["training"] == dict(ttt_steps=7)
    assert (
        step.case("MTP", length, "device")["draft_vocab"] == 151936
        and step.case("DFlash 512x16", length, "device")["anchors"] == 512
    )


def test_every_drafter_has_its_cells():
    named = {
        cell["drafter"] for job in benchmark.equality_jobs("device") for cell in job if cell["kind"] != "notebooks"
    }
    assert named == set(equal.DRAFTERS)
    assert {algorithm for algorithm, _ in equal.DRAFTERS.values()} == set(SpeculatorModel.registered_classes())


def test_the_order_of_the_cells():
    "What takes longest to compile begins first, and each train step is made once."
    jobs = benchmark.device_jobs(True)
    steps = [(c["setting"], c["length"], c["side"]) for job in jobs for c in job if c["kind"] == "step"]
    assert [c["side"] for c in jobs[0]] == ["upstream"] * 2 and steps[2] == ("EAGLE-3 K=3", 8192, "ours")
    assert len(set(steps)) == len(steps) == 29
    alone = [c for job in benchmark.device_jobs(False) for c in job if c["kind"] == "step"]
    assert {c["side"] for c in alone} == {"ours", "ours-compiled"}


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
    tokens_per_second=4096,
    held_bytes=2**30,
    peak_bytes=2**31,
    steps=3,
    first_seconds=9.0,
    first_gradient_norm=1.0,
)


def test_the_report_counts_failures_and_leaves_out_what_was_not_measured(tmp_path):
    report = Report(tmp_path, date="2026-01-01", size="device", not_run=["A sentence."])
    report.add(
        "device",
        dict(
            cell="device",
            device="Some | device",
            peak_flops=1e15,
            peak_from="data sheet",
            gemm_flops=8e14,
            copy_bytes=4e12,
        ),
    )
    report.add("step", dict(cell="s", side="upstream", first_loss=2.0, **STEP))
    report.add(
        "step", dict(cell="s", side="ours", first_loss=2.01, flops=1e14, **STEP | dict(seconds=0.25, peak_bytes=2**30))
    )
    report.add(
        "step",
        dict(cell="s", setting="MTP", length=32768, side="upstream", error="OutOfMemoryError: no", kind="memory"),
    )
    report.add(
        "equal",
        dict(
            cell="e",
            drafter="mtp",
            dtype="fp32",
            pair="flex vs dense",
            loss=1e-7,
            angle=0.0,
            gradient=1e-6,
            ok=True,
            seconds_first=1.0,
        ),
    )
    assert report.failed() == 0
    report.add("step", dict(cell="s", side="ours-compiled", first_loss=2.1, **STEP))
    report.add("equal", dict(cell="e", drafter="eagle", dtype="fp32", error="killed after 9 s"))
    report.add(
        "decode",
        dict(cell="d", drafter="eagle", dtype="fp32", texts=2, near_ties=0, different=1, accepted_a_step=0.5, ok=False),
    )
    report.stage("train steps", 3.0, 180, ["MTP, 8192 positions, ours"])
    assert report.failed() == json.loads((tmp_path / "results.json").read_text())["failed"] == 3
    page = (tmp_path / "README.md").read_text()
    assert "| MTP | 2048 | ours | 250 | 4,096 | 2 | 1 | 0.5 | 40 | 9 | – | 5.00e-03 |  |" in page
    assert (
        "losses differ" in page
        and "out of memory: OutOfMemoryError: no" in page
        and "killed after 9 s" in page
        and "**no**" in page
    )
    assert "- A sentence." in page and "- MTP, 8192 positions, ours: no time was left" in page
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("equality", "speed"))
    assert not list(tmp_path.glob("*.part*"))


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


def test_toy_run(tmp_path):
    "Each drafter, dtype and pair is there, in fp32 within a tenth of its tolerance; texts are equal, steps timed."
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu/run.py", "--toy", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        env=os.environ | dict(OMP_NUM_THREADS="1"),
    )
    print(f"toy run: {time.monotonic() - began:.0f} s")
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert done.returncode == 0, [
        row for rows in found["rows"].values() for row in rows if "error" in row or row.get("ok") is False
    ]
    assert found["failed"] == 0 and not found["not_measured"]
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
    assert {r["setting"] for r in found["rows"]["step"] if r["side"] == "ours" and r["flops"] > 1e6} == set(
        step.SETTINGS
    ) - {"EAGLE-3 K=7"}
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
        "equality.png",
        "speed.png",
        "shares.png",
        "log.txt",
    }
    assert not re.search(
        r"/(home|root|tmp|work|Users|opt)/",
        (tmp_path / "out/results.json").read_text() + (tmp_path / "out/README.md").read_text(),
    )
