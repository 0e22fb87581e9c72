"""What is too long for CI of training on ranks: every drafter on 1, 2 and 4 ranks for ten steps, runs that continue on
another number of ranks, and kills at random moments with a resume that must be equal to the bit.

    python tests/ranks/run.py [--kills 20] [--seed 0] [--parts equal,resume,kills]

The numbers go to results.json beside this file."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from ranks.job import Job  # noqa: E402
from ranks.worker import NAMES  # noqa: E402

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RANKS_STEPS": "10"}
MOVES = [(2, 1), (1, 2), (4, 2)]


def work(ranks, *arguments):
    "The worker on so many ranks, to its end."
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / "worker.py"), *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{ranks} ranks, {arguments}: exit code {done.returncode}\n{done.stderr[-4000:]}")


def distance(one, other):
    "The largest relative distance of a tensor, and of a logged loss."
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert list(a) == list(b) and all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape for n in a)
    weights = max(float((a[n] - b[n]).norm() / a[n].norm().clamp_min(1e-12)) for n in a)
    logs = [pd.read_csv(folder / "training_log.csv", index_col="step")["loss"] for folder in (one, other)]
    return {"weights": weights, "loss": float(((logs[0] - logs[1]) / logs[0]).abs().max())}


def equal(place):
    "Every drafter on 2 and 4 ranks against one process."
    for ranks in (1, 2, 4):
        work(ranks, place / str(ranks))
    found = {}
    for ranks in (2, 4):
        for name in [*NAMES, "muon/dspark rnn"]:
            folder = name.replace(" ", "-")
            found[f"{name}, {ranks} ranks"] = distance(place / "1" / folder, place / str(ranks) / folder)
    return found


def resume(place):
    "Cut at step 5 on some ranks, continued with the same command on others, against the run that was never cut."
    name, found = "peagle", {}
    work(1, place / "whole", name)
    for was, now in MOVES:
        folder = place / f"{was}to{now}" / name
        work(was, folder.parent, name)
        for made_later in ("checkpoint-10", "model.safetensors", "config.json"):
            path = folder / made_later
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        record = json.loads((folder / "run.json").read_text())
        del record["finished"]
        (folder / "run.json").write_text(json.dumps(record))
        work(now, folder.parent, name, "", "", "", "resume", 4 // was)
        found[f"{was} to {now} ranks"] = distance(place / "whole" / name, folder)
    return found


def finished(job):
    "Wait until a job has ended well."
    if job.ends():
        sys.exit(job.error[-4000:])


def kills(place, n, seed):
    "Killed at random moments, resumed until it ends: the weights and the log to the bit."
    more, draw, found = ("--extra", "max_steps=8", "--extra", "save_steps=1"), random.Random(seed), {}
    for ranks in (1, 2):
        whole = place / f"whole{ranks}"
        whole.mkdir(parents=True)
        began = time.monotonic()
        finished(Job(whole, *more, ranks=ranks))
        seconds, same = time.monotonic() - began, 0
        for i in range(n):
            cut = place / f"cut{ranks}-{i}"
            cut.mkdir()
            job = Job(cut, *more, ranks=ranks)
            time.sleep(draw.uniform(0, seconds))
            job.kill_all()
            finished(Job(cut, *more, "--resume", ranks=ranks))
            files = [(place / "drafter" / "model.safetensors").read_bytes() for place in (whole, cut)]
            logs = [pd.read_csv(place / "drafter/training_log.csv")["loss"].tolist() for place in (whole, cut)]
            same += files[0] == files[1] and logs[0] == logs[1]
            shutil.rmtree(cut)
        found[f"{ranks} ranks"] = {"kills": n, "equal to the bit": same}
    return found


def faults(found):
    "What is not as it must be."
    out = [f"{name}: {case}" for name, case in found.get("equal", {}).items() if max(case.values()) > 1e-6]
    out += [f"{name}: {case}" for name, case in found.get("resume", {}).items() if max(case.values()) > 1e-6]
    cases = found.get("kills", {}).items()
    return out + [f"{name}: {case}" for name, case in cases if case["kills"] != case["equal to the bit"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default="equal,resume,kills")
    given = parser.parse_args()
    results = HERE / "results.json"
    found = json.loads(results.read_text()) if results.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts.split(","):
            place = Path(folder) / part
            if part == "kills":
                found[part] = kills(place, given.kills, given.seed)
            else:
                found[part] = {"equal": equal, "resume": resume}[part](place)
            results.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(found[part], indent=1), flush=True)
    if wrong := faults(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
