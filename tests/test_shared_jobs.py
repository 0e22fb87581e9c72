"""Ranks that share one output, and a second run after kills: one result, that of an undisturbed run; each row once."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from bad.harness import typed
from forked import FORK
from sharded import as_torchrun_says, free_port
from test_features import make_rows
from test_features import make_verifier as feature_verifier
from test_regenerate_in_process import make_verifier, talks, tokenizer

from speculators_nb.core.provenance import read_provenance
from speculators_nb.features.in_process import extract_features
from speculators_nb.jobs.shared_output import share_writer
from speculators_nb.regenerate.in_process import regenerate
from speculators_nb.regenerate.journal import read_regenerated

ROOT = Path(__file__).parents[1]
TALKS = talks(24)


def answers(path, pause=0.0, rank=0, world_size=1):
    "All answers of 24 conversations, in batches of two; how many were written."
    verifier = make_verifier(eos_bias=6.0)
    if pause:
        verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    given = dict(max_new_tokens=12, temperature=1.0, batch_size=2, rank=rank, world_size=world_size)
    return regenerate(verifier, tokenizer(), TALKS, path, **given)


def states(path, pause=0.0, rank=0, world_size=1):
    "Features of 60 rows in batches of at most 80 tokens; counts."
    verifier = feature_verifier()
    if pause:
        verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    return extract_features(verifier, make_rows(60), path, max_tokens=80, writers=1, rank=rank, world_size=world_size)


def content(path):
    "Every file of an output: name -> bytes."
    files = [path] if path.is_file() else sorted(path.glob("hs_*")) + sorted(path.glob("rows/*.arrow"))
    return {file.name: file.read_bytes() for file in files}


def begin(function, path, pause, results, **share):
    return forked.begin(lambda: results.put(dict(function(path, pause, **share))))


def wait_until(condition, process):
    "Errors: AssertionError where it does not happen while a process lives, or within a minute."
    end = time.monotonic() + 60
    while not condition():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.01)


def left_behind(path):
    "Hidden files but locks, of which nobody holds one."
    return [p.name for p in path.parent.rglob(".*") if p.is_file() and p.suffix != ".lock"]


def rows_in(path):
    "Complete ones."
    if not path.suffix:
        return len([*path.glob("hs_*")])
    return len({line["primary_id"] for line in read_regenerated(path)}) if path.exists() else 0


JOBS = {"regenerate": (answers, "out.jsonl", 24), "features": (states, "features", 60)}


@pytest.mark.parametrize("name", JOBS)
def test_ranks_share_the_rows(tmp_path, name):
    "Three, one of which comes when another has ended."
    function, output, n = JOBS[name]
    torch.set_num_threads(1)  # a forked process would wait for the threads of its parent
    function(tmp_path / f"alone-{output}")
    path, results = tmp_path / output, FORK.Queue()
    given = dict(function=function, path=path, results=results, world_size=3)
    processes = [begin(**given, pause=pause, rank=rank) for rank, pause in ((0, 0.02), (2, 0.0))]
    processes[1].join(120)
    processes.append(begin(**given, pause=0.0, rank=1))
    found = [results.get(timeout=120) for _ in processes]
    [p.join(60) for p in processes]
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert sum(f["written"] for f in found) == n and [f["kept"] for f in found] == [0] * 3
    assert list(content(path).values()) == list(content(tmp_path / f"alone-{output}").values())
    assert left_behind(path) == []


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("killed", [1, 2])
def test_a_second_run_takes_the_rows_of_killed_processes(tmp_path, name, killed):
    "One of two ranks is killed at work, or both are; the same command again, in one process, makes what is missing."
    function, output, n = JOBS[name]
    torch.set_num_threads(1)
    function(tmp_path / f"alone-{output}")
    path, results = tmp_path / output, FORK.Queue()
    processes = [begin(function, path, 0.03, results, rank=rank, world_size=2) for rank in (0, 1)]
    wait_until(lambda: rows_in(path) > 2, processes[0])
    for process in processes[:killed]:
        os.kill(process.pid, signal.SIGKILL)
    [process.join(120) for process in processes]
    assert [p.exitcode for p in processes[killed:]] == [0] * (2 - killed)
    before = rows_in(path)
    assert 0 < before < n
    found = function(path)
    assert found["kept"] + found["written"] == n and abs(found["kept"] - before) <= 1  # a torn row is made again
    assert list(content(path).values()) == list(content(tmp_path / f"alone-{output}").values())
    assert left_behind(path) == []


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    path = tmp_path / "features"
    (path / ".rows.0a1b2c3d").mkdir(parents=True)
    for name in (".rows.0a1b2c3d/state.json", ".hs_7.0a1b2c3d.safetensors", ".tmpa1B2c3"):
        (path / name).touch()
    states(path)
    assert [p.name for p in path.iterdir() if p.name.startswith((".rows", ".hs_", ".tmp", ".work"))] == []


@pytest.mark.parametrize("name", JOBS)
def test_a_share_has_one_process_at_a_time(tmp_path, name):
    function, output, _ = JOBS[name]
    path = tmp_path / output
    lock = path.with_name(f".{output}") if path.suffix else path / ".writer"
    with (
        share_writer(path, lock),
        pytest.raises(BlockingIOError, match=f"{output}: another process is writing it; wait"),
    ):
        function(path)
    assert left_behind(path) == [] and not path.exists()


def test_failures_of_each_share_are_named_once(tmp_path):
    "A row that cannot be read, and rows that cannot be answered; a run in one process names all of them."
    bad = [{"id": "x", "messages": [{"role": "narrator", "content": "?"}]}]
    long = [{"id": f"z{i}", "messages": [{"role": "user", "content": "?" * 300}]} for i in range(3)]
    mixed, path = bad + TALKS[:20] + long, tmp_path / "o.jsonl"

    def share(rank, world_size):
        given = dict(max_new_tokens=4, max_length=200, batch_size=1, rank=rank, world_size=world_size)
        report = regenerate(make_verifier(), tokenizer(), mixed, path, **given)
        return report["written"], report["failed"].total()

    def named(file):
        return [json.loads(line)["id"] for line in (tmp_path / file).read_text().splitlines()]

    assert (share(0, 2), share(1, 2)) == ((10, 2), (10, 2))
    assert named("o.0-of-2.errors.jsonl") == ["x", "z1"] and named("o.1-of-2.errors.jsonl") == ["z0", "z2"]
    ids = [line["primary_id"] for line in read_regenerated(path)]
    assert list(dict.fromkeys(ids)) == [str(talk["id"]) for talk in TALKS[:20]]
    assert share(0, 1) == (0, 4) and named("o.errors.jsonl") == ["x", "z0", "z1", "z2"]
    assert len([*tmp_path.glob("*.errors.jsonl")]) == 1


def test_the_command_shares_the_rows(tmp_path):
    "Two ranks, as torchrun starts them, which does so at night (test_on_a_cluster.py): one result, one record."
    words = ["features", "--verifier", str(ROOT / "data/tiny-verifier"), "--max-tokens", "512", "--max-samples", "24"]
    words += [str(ROOT / "data/corpus/heldout.jsonl"), str(tmp_path / "features")]
    port = free_port()

    def command(rank):
        as_torchrun_says(rank, 2, port)
        sys.exit(typed(words)[0])

    processes = [forked.begin(command, rank) for rank in (0, 1)]
    [process.join(120) for process in processes]
    assert [p.exitcode for p in processes] == [0, 0]
    record = read_provenance(tmp_path / "features")
    assert record["results"]["kept"] == 0 and record["results"]["world_size"] == 2 and "earlier" not in record
    assert len([*(tmp_path / "features").glob("hs_*")]) == 24 and left_behind(tmp_path / "features") == []
