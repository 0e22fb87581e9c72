"""The prompts of one evaluation, decoded by several processes: the tables of one process, written once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_shared_jobs import FORK, ROOT, begin, wait_until

from speculators_nb.core.provenance import read_provenance
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.acceptance import evaluate
from speculators_nb.evaluate.shared_prompts import SharedPrompts
from speculators_nb.lab.experiment import heldout_setting

TABLES = ("summary.csv", "positions.csv", "ranges.csv", "requests.csv")


def measured(path, pause=0.0):
    "Acceptance of n-gram drafting on 12 prompts at two temperatures; how many this process decoded."
    setting = heldout_setting({"n-gram": NgramDrafter()}, 12)
    if pause:
        setting.verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    given = dict(k=3, temperatures=(0.0, 1.0), max_new_tokens=12)
    with SharedPrompts(path, {"seed": 0}) as job:
        found = evaluate(setting.verifier, {"n-gram": NgramDrafter()}, setting.prompts, **given, decode=job.decode)
        job.finish(lambda: str(found.save(path)))
    return {"requests": len(found.requests)}


def tables(path):
    return {name: (path / name).read_bytes() for name in TABLES}


def test_the_prompts_of_a_killed_process_are_decoded_by_another(tmp_path):
    torch.set_num_threads(1)
    measured(tmp_path / "alone")
    path, results = tmp_path / "evaluation", FORK.Queue()
    killed = begin(measured, path, 0.02, results)
    wait_until(lambda: any(path.glob(".work/*.settled")), killed)
    other = begin(measured, path, 0.0, results)
    wait_until(lambda: len([*path.glob(".work/*.host")]) == 2, killed)
    os.kill(killed.pid, signal.SIGKILL)
    assert results.get(timeout=150) == {"requests": 24}
    other.join(60)
    assert other.exitcode == 0 and tables(path) == tables(tmp_path / "alone")
    assert not (path / ".work").exists()


def test_all_are_killed_and_the_same_call_continues(tmp_path):
    torch.set_num_threads(1)
    measured(tmp_path / "alone")
    path = tmp_path / "evaluation"
    processes = [begin(measured, path, 0.02, FORK.Queue()) for _ in range(2)]
    wait_until(lambda: len([*path.glob(".work/*.settled")]) == 2, processes[0])
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with SharedPrompts(path, {"seed": 0}) as job:
        assert 0 < len(job.answers) < 24
    measured(path)
    assert tables(path) == tables(tmp_path / "alone") and not (path / ".work").exists()


@pytest.mark.parametrize("options", [[], ["--as-engine"]])
def test_torchrun_shares_the_prompts(tmp_path, options):
    "The command on two ranks: the files of one process, and one record."
    words = ["evaluate", "shipped", "--method", "ngram", "--verifier", str(ROOT / "data/tiny-verifier")]
    words += ["--max-samples", "8", "--max-new-tokens", "16", "--temperature", "1", "--no-baseline", *options]
    words += ["--output-dir"]
    program = Path(sys.executable).with_name("speculators-nb")
    launch = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "--master-port", "0"]
    env = os.environ | dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
    outputs = {}
    for name, start in (("one", []), ("two", launch)):
        line = [*start, program, *words, tmp_path / name]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs[name] = done.stdout
    assert outputs["two"].replace("/two", "/one") == outputs["one"]  # printed by one rank
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).glob("*.csv")} for n in outputs]
    assert files[0] == files[1] and files[0]
    assert "earlier" not in read_provenance(tmp_path / "two")
    assert not (tmp_path / "two/.work").exists()
