#!/usr/bin/env python
"""The laptop recipe whole, timed, and again with three kills: `make laptop`, part of `make nightly`. Ten minutes.

    python tests/laptop/run.py [WORK]            results in tests/laptop/results.json; WORK: output/laptop_runs
    python tests/laptop/run.py --only whole      only the timed run (or: killed)

The second run is killed at three random times, each between a tenth and four tenths of the first run's time after it
began or continued, and must end with the same report page but for clocks. Time it with nothing beside it.
"""

import argparse
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
RECIPE = "data/recipes/laptop.yaml"
PROGRAM = Path(sys.executable).with_name("speculators-nb")
KILLS, SEED = 3, 15


def fresh(folder):
    "An empty working folder in which the recipe's paths hold."
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def begin(folder):
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(
            [PROGRAM, "run", RECIPE], cwd=folder, stdout=log, stderr=log, start_new_session=True, env=dict(os.environ)
        )


def finish(process, folder):
    if process.wait():
        raise SystemExit(f"the run failed; the end of {folder}/log.txt:\n{(folder / 'log.txt').read_text()[-3000:]}")


def report(folder):
    "The page without its clocks and the place of its folder."
    page = (folder / "output/laptop/report.html").read_text().replace(str(folder), "")
    return re.sub(r"<td>[\d.]+ s</td>", "<td></td>", page)


def under_way(folder):
    "The stage that a run has begun and not ended: the last one that its log names."
    named = re.findall(r"^\[\d+/\d+\] (\w+): will", (folder / "log.txt").read_text(), re.M)
    return named[-1] if named else "none yet"


def whole(work):
    "Seconds of a run from nothing, on the clock and of processors."
    folder, began = fresh(work / "whole"), time.monotonic()
    finish(begin(folder), folder)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return dict(seconds=round(time.monotonic() - began), cpu_seconds=round(used.ru_utime + used.ru_stime))


def killed(work, seconds):
    "Where each kill fell, and whether the report is that of the run that nobody killed."
    folder, draw, stages = fresh(work / "killed"), random.Random(SEED), []
    for _ in range(KILLS):
        process = begin(folder)
        time.sleep(draw.uniform(0.1, 0.4) * seconds)
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        stages.append(under_way(folder))
    finish(begin(folder), folder)
    return dict(killed_in=stages, same_report=report(work / "whole") == report(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", type=Path, default=ROOT / "output/laptop_runs")
    parser.add_argument("--only", choices=("whole", "killed"))
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.only != "killed":
        found |= whole(args.work.resolve()) | dict(cores=os.cpu_count(), python=platform.python_version())
    if args.only != "whole":
        found |= killed(args.work.resolve(), found["seconds"])
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(not found.get("same_report", True))
