"""The prompts of one evaluation, decoded by several ranks: the tables of one process, written once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bad.harness import typed
from forked import FORK
from test_shared_jobs import ROOT, begin, wait_until

from speculators_nb.core.provenance import read_provenance
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.acceptance import evaluate
from speculators_nb.evaluate.shared_prompts import SharedPrompts
from speculators_nb.lab.experiment import heldout_setting

TABLES = ("summary.csv", "positions.csv", "ranges.csv", "requests.csv")


def measured(path, pause=0.0, rank=0, world_size=1):
    "Acceptance of n-gram drafting on 12 prompts at two temperatures; how many requests, and how many were there."
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    setting = heldout_setting({"n-gram": NgramDrafter()}, 12)
    if pause:
        setting.verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    given = dict(k=3, temperatures=(0.0, 1.0), max_new_tokens=12)
    with SharedPrompts(path, {"seed": 0}) as job:
        known = len(job.answers)
        found = evaluate(setting.verifier, {"n-gram": NgramDrafter()}, setting.prompts, **given, decode=job.decode)
        job.finish(lambda: found.save(path))
    return {"requests": len(found.requests), "known": known}


def tables(path):
    return {name: (path / name).read_bytes() for name in TABLES}


def lines(path, rank):
    "Answers that a rank has written."
    return sum(file.read_bytes().count(b"\n[") for file in path.glob(f".*.{rank}.answers"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)  # a forked process would wait for the threads of its parent
    folder, results = tmp_path_factory.mktemp("alone") / "evaluation", FORK.Queue()
    begin(measured, folder, 0.0, results).join(120)
    assert results.get(timeout=10) == {"requests": 24, "known": 0} and not [*folder.glob(".*")]
    return tables(folder)


def test_the_prompts_of_a_killed_rank_are_decoded_by_another(tmp_path, alone):
    path, results = tmp_path / "evaluation", FORK.Queue()
    killed = begin(measured, path, 0.1, FORK.Queue(), rank=1, world_size=2)
    wait_until(lambda: lines(path, 1), killed)  # before the other begins: it would take every prompt meanwhile
    first = begin(measured, path, 0.02, results, rank=0, world_size=2)
    wait_until(lambda: lines(path, 0), killed)
    os.kill(killed.pid, signal.SIGKILL)
    assert results.get(timeout=150)["requests"] == 24
    first.join(60)
    assert first.exitcode == 0 and tables(path) == alone and not [*path.glob(".*")]


def test_all_are_killed_and_the_same_call_continues(tmp_path, alone):
    path, results = tmp_path / "evaluation", FORK.Queue()
    processes = [begin(measured, path, 0.02, FORK.Queue(), rank=rank, world_size=2) for rank in (0, 1)]
    wait_until(lambda: lines(path, 0) and lines(path, 1), processes[0])
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    for file in path.glob(".*.0.answers"):  # torn by the kill
        file.write_bytes(file.read_bytes() + b"\n[3, {")
    begin(measured, path, 0.0, results).join(120)
    assert 0 < results.get(timeout=10)["known"] < 24
    assert tables(path) == alone and not [*path.glob(".*")]


@pytest.mark.nightly
def test_torchrun_shares_the_prompts(tmp_path):
    "The command on two ranks, counting as vLLM counts: the files of one process, and one record."
    words = ["evaluate", "shipped", "--method", "ngram", "--verifier", str(ROOT / "data/tiny-verifier")]
    words += ["--max-samples", "8", "--max-new-tokens", "16", "--temperature", "1", "--no-baseline", "--as-engine"]
    words += ["--output-dir"]
    program = Path(sys.executable).with_name("speculators-nb")
    launch = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "--master-port", "0"]
    env = os.environ | dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
    line = [*launch, program, *words, tmp_path / "two"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    code, printed, _ = typed([*words, str(tmp_path / "one")])
    assert (done.returncode, code) == (0, 0), done.stderr[-2000:]
    assert done.stdout.replace("/two", "/one") == printed  # by one rank
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).glob("*.csv")} for n in ("one", "two")]
    assert files[0] == files[1] and files[0]
    assert "earlier" not in read_provenance(tmp_path / "two")
    assert not [*(tmp_path / "two").glob(".*")]
