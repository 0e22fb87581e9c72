"""Several processes on one output: one result, that of an undisturbed run; each row once; nothing is left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_features import make_rows
from test_features import make_verifier as feature_verifier
from test_regenerate_in_process import make_verifier, talks, tokenizer

from speculators_nb.core.provenance import read_provenance
from speculators_nb.features.in_process import extract_features
from speculators_nb.jobs.shared_job import SharedJob
from speculators_nb.regenerate.in_process import regenerate
from speculators_nb.regenerate.journal import read_regenerated

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
TALKS = talks(40)


def answers(path, pause=0.0):
    "All answers of 40 conversations, in batches of two; how many were written."
    verifier = make_verifier(eos_bias=6.0)
    if pause:
        verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    return regenerate(verifier, tokenizer(), TALKS, path, max_new_tokens=12, temperature=1.0, batch_size=2)


def states(path, pause=0.0):
    "Features of 60 rows in batches of at most 80 tokens; counts."
    verifier = feature_verifier()
    if pause:
        verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    return extract_features(verifier, make_rows(60), path, max_tokens=80, writers=1)


def content(path):
    "Every file of an output: name -> bytes."
    files = [path] if path.is_file() else sorted(path.glob("hs_*")) + sorted(path.glob("rows/*.arrow"))
    return {file.name: file.read_bytes() for file in files}


def work(function, path, pause, results):
    torch.set_num_threads(1)
    results.put(dict(function(path, pause)))


def begin(function, path, pause, results):
    process = FORK.Process(target=work, args=(function, path, pause, results), daemon=True)
    process.start()
    return process


def wait_until(condition, process):
    "Errors: AssertionError where it does not happen while a process lives, or within a minute."
    end = time.monotonic() + 60
    while not condition():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.01)


def left_behind(path):
    return [p.name for p in path.parent.rglob("*") if p.suffix in (".claim", ".settled", ".host") or ".work" in p.name]


JOBS = {"regenerate": (answers, "out.jsonl", "written", 40), "features": (states, "features", "written", 60)}


@pytest.mark.parametrize("name", JOBS)
def test_processes_share_the_work(tmp_path, name):
    "Two begin together and a third joins: each returns the whole job's counts, and the output is the same."
    function, output, count, n = JOBS[name]
    torch.set_num_threads(1)  # a forked process would wait for the threads of its parent
    function(tmp_path / f"alone-{output}")
    path, results = tmp_path / output, FORK.Queue()
    processes = [begin(function, path, 0.1, results) for _ in range(2)]
    wait_until(lambda: any(tmp_path.rglob("*.settled")), processes[0])
    processes.append(begin(function, path, 0.0, results))
    found = [results.get(timeout=120) for _ in processes]
    [p.join(60) for p in processes]
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert [f[count] for f in found] == [n] * 3
    assert list(content(path).values()) == list(content(tmp_path / f"alone-{output}").values())
    assert left_behind(path) == []


@pytest.mark.parametrize("name", JOBS)
def test_the_work_of_a_killed_process_is_done_by_another(tmp_path, name):
    "The slow one is killed with a unit in work; the other takes it over without waiting for a lease."
    function, output, count, n = JOBS[name]
    torch.set_num_threads(1)
    function(tmp_path / f"alone-{output}")
    path, results = tmp_path / output, FORK.Queue()
    slow = begin(function, path, 0.3, results)
    wait_until(lambda: any(tmp_path.rglob("*.claim")), slow)
    other = begin(function, path, 0.01, results)
    wait_until(lambda: len({p.stem for p in tmp_path.rglob("*.host")}) == 2, slow)
    os.kill(slow.pid, signal.SIGKILL)
    began = time.monotonic()
    # at once, since it was on this host; after the lease of 60 s if it was killed before its name was in its claim
    assert results.get(timeout=150)[count] == n
    other.join(60)
    assert time.monotonic() - began < 150 and other.exitcode == 0
    assert list(content(path).values()) == list(content(tmp_path / f"alone-{output}").values())
    assert left_behind(path) == []


@pytest.mark.parametrize("name", JOBS)
def test_all_are_killed_and_one_begins_again(tmp_path, name):
    function, output, _, n = JOBS[name]
    torch.set_num_threads(1)
    function(tmp_path / f"alone-{output}")
    path, results = tmp_path / output, FORK.Queue()
    processes = [begin(function, path, 0.1, results) for _ in range(2)]
    wait_until(lambda: len([*tmp_path.rglob("*.settled")]) >= 2, processes[0])
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    found = function(path)
    assert 0 < found["kept"] < n and found["kept"] + found["written"] == n
    assert list(content(path).values()) == list(content(tmp_path / f"alone-{output}").values())
    assert left_behind(path) == []


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    path = tmp_path / "features"
    (path / ".rows.0a1b2c3d").mkdir(parents=True)
    for name in (".rows.0a1b2c3d/state.json", ".hs_7.0a1b2c3d.safetensors", ".tmpa1B2c3"):
        (path / name).touch()
    states(path)
    assert [p.name for p in path.iterdir() if p.name.startswith((".rows", ".hs_", ".tmp", ".work"))] == []


def test_who_would_do_otherwise_is_refused_in_one_line(tmp_path):
    verifier = make_verifier()
    about = {"verifier": "x", "seed": 0, "data": "y"}
    with (
        SharedJob(tmp_path / "o.jsonl.work", tmp_path / "o.jsonl", "output", about),
        pytest.raises(BlockingIOError, match=r"another process is writing output='.*o\.jsonl' with") as refused,
    ):
        regenerate(verifier, tokenizer(), talks(2), tmp_path / "o.jsonl", max_new_tokens=4)
    assert "\n" not in str(refused.value) and "name another output" in str(refused.value)
    folder = tmp_path / "features"
    with (
        SharedJob(folder / ".work", folder, "output_dir", {"max_tokens": 8192}),
        pytest.raises(BlockingIOError, match="max_tokens=80: another process is writing output_dir="),
    ):
        states(folder)
    assert left_behind(folder) == [] and not (tmp_path / "o.jsonl").exists()


def test_conversations_that_can_be_read_once_are_for_one_process(tmp_path):
    path = tmp_path / "o.jsonl"
    report = regenerate(make_verifier(), tokenizer(), iter(talks(12)), path, max_new_tokens=4)
    assert report["written"] == 12
    with (
        SharedJob(tmp_path / "o.jsonl.work", path, "output", {"seed": 0}),
        pytest.raises(BlockingIOError, match=r"o\.jsonl: another process is writing it"),
    ):
        regenerate(make_verifier(), tokenizer(), iter(talks(12)), path, max_new_tokens=4)


def test_failures_of_all_processes_are_named_once(tmp_path):
    "A row that cannot be read is met by every process; one that cannot be answered, by one."
    bad = [{"id": "x", "messages": [{"role": "narrator", "content": "?"}]}]
    long = [{"id": f"z{i}", "messages": [{"role": "user", "content": "?" * 300}]} for i in range(3)]
    mixed, path, results = bad + TALKS[:20] + long, tmp_path / "o.jsonl", FORK.Queue()

    def both(path, pause):
        return regenerate(make_verifier(), tokenizer(), mixed, path, max_new_tokens=4, max_length=200, batch_size=1)

    torch.set_num_threads(1)
    processes = [begin(both, path, 0, results) for _ in range(2)]
    found = [results.get(timeout=120) for _ in processes]
    [p.join(60) for p in processes]
    named = [json.loads(line)["id"] for line in path.with_suffix(".errors.jsonl").read_text().splitlines()]
    assert sorted(named) == ["x", "z0", "z1", "z2"]
    assert [(f["written"], f["failed"].total()) for f in found] == [(20, 4)] * 2
    assert len([*read_regenerated(path)]) >= 20


def test_torchrun_shares_the_rows(tmp_path):
    "The command, started by torchrun: two ranks, one record, the files of one process."
    data, program = ROOT / "data", Path(sys.executable).with_name("speculators-nb")
    words = ["features", "--verifier", str(data / "tiny-verifier"), "--max-tokens", "512", "--max-samples", "24"]
    words += [str(data / "corpus/heldout.jsonl"), str(tmp_path / "features")]
    launch = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "--master-port", "0"]
    env = os.environ | dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([*launch, program, *words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    record = read_provenance(tmp_path / "features")
    first, *others = [*record.get("earlier", []), record]
    assert first["results"] == {"written": 24, "kept": 0}
    assert [other["results"] for other in others] in ([], [{"written": 0, "kept": 24}])  # a rank came when all was done
    assert len([*(tmp_path / "features").glob("hs_*")]) == 24 and left_behind(tmp_path / "features") == []
