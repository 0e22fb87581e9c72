#!/usr/bin/env python
"""Kill -9 at random moments of regenerate and features, in one process and in two ranks: `make shared-jobs`, part of
`make nightly`. Three minutes.

    python tests/jobs/run.py [--kills 20] [--seed 17]        results in tests/jobs/results.json

Each trial begins anew: one process or two ranks work on one output, one of them or all are killed after a random share
of the time that the job takes, and the same call in one process makes what is missing. The output must then be that of
a run which nobody disturbed, byte for byte, and nothing but it may be there."""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_shared_jobs import FORK, JOBS, begin, content, left_behind  # noqa: E402


def all_files(path):
    "Names of whatever lies beside an output or in it, but for locks."
    return sorted(str(p.relative_to(path.parent)) for p in path.parent.rglob("*") if p.suffix != ".lock")


def seconds_of(function, path):
    "Of an undisturbed run in a process of its own; its output stays."
    results, began = FORK.Queue(), time.monotonic()
    process = begin(function, path, 0.005, results)
    results.get(timeout=120), process.join(60)
    return time.monotonic() - began


def trial(function, path, processes, killed, moment):
    "Problems after a kill; and how many of the killed processes were at work."
    results = FORK.Queue()
    shares = [dict(rank=rank, world_size=processes) for rank in range(processes)]
    working = [begin(function, path, 0.005, results, **share) for share in shares]
    time.sleep(moment)
    caught = 0
    for process in working[:killed]:
        caught += process.is_alive()
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    [p.join(120) for p in working]
    wrong = [f"exit code {p.exitcode}" for p in working[killed:] if p.exitcode]
    again = begin(function, path, 0.0, FORK.Queue())
    again.join(120)
    return wrong + ([f"exit code {again.exitcode} of the call that goes on"] if again.exitcode else []), caught


def series(name, processes, killed, kills, draw, work):
    "One row of the results."
    function, output, _ = JOBS[name]
    right = work / "right" / output
    right.parent.mkdir()
    seconds = seconds_of(function, right) / processes
    wrong, caught, names = [], 0, all_files(right)
    for n in range(kills):
        path = work / str(n) / output
        path.parent.mkdir()
        found, hit = trial(function, path, processes, killed, draw.uniform(0.0, 1.0) * seconds)
        caught += hit
        if content(path) != content(right):
            found.append("the output is another")
        if all_files(path) != names or left_behind(path):
            found.append(f"files: {sorted(set(all_files(path)) ^ set(names))}")
        wrong += [f"trial {n}: {problem}" for problem in found]
        shutil.rmtree(path.parent)
    shutil.rmtree(right.parent)
    row = dict(job=name, processes=processes, killed=killed, trials=kills, caught_at_work=caught, wrong=wrong)
    print(row, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=17)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a forked process would wait for the threads of its parent
    draw, rows = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for name in JOBS:
            for processes, killed in ((1, 1), (2, 1), (2, 2)):
                rows.append(series(name, processes, killed, given.kills, draw, Path(folder)))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    RESULTS.write_text(json.dumps(dict(seed=given.seed, machine=machine, series=rows), indent=1) + "\n")
    return any(row["wrong"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
