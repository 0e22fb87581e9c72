#!/usr/bin/env python
"""Sharded training (FSDP2) on gloo ranks, at length: `make distributed`, part of `make nightly`. Twenty minutes.

    python tests/distributed/run.py [WORK]     results in tests/distributed/results.json; WORK: output/distributed
    python tests/distributed/run.py --only drafters     (or: ranks, kills)

drafters: each one on 4 ranks, beside one process. ranks: checkpoints of 4 ranks, whole and in shards, resumed by 2 and
by 1. kills: 2 ranks are killed (SIGKILL) at random moments and resumed, until they have finished: the drafter is that
of a run that nobody killed, to the bit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = Path(__file__).with_name("results.json")
os.environ["SHARDED_STEPS"] = "10"  # and a checkpoint at the fifth
KILLS, SEED = 5, 17
SAVED = "eagle3 qwen3"
FORMATS = ("full", "sharded")


def settings_of(kind, **more):
    return dict(save_strategy="steps", save_steps=5, checkpoint_format=kind) | more


def alone(job, root):
    "What one process makes of a job."
    from sharded import Job, run

    settings = {k: v for k, v in job.settings.items() if k != "checkpoint_format"}
    run(Job(job.name, job.folder, settings, job.resume), root, 1, False)
    return root / job.folder


def difference(a, b):
    """`distance` of two drafters, without the bias of keys: it adds the same to all scores of a query, so that its
    gradient is rounding alone, of which AdamW makes steps as large as any."""
    from safetensors.torch import load_file
    from sharded import distance

    states = [load_file(folder / "model.safetensors") for folder in (a, b)]
    for state in states:
        for name, bias in state.items():
            if name.endswith(".in_proj_bias"):
                bias.chunk(3)[1].zero_()
    return distance(*states)


def drafters(work):
    "Distance of each drafter trained on 4 ranks from the one of one process."
    from matrix import DRAFTERS
    from sharded import Job, launch

    jobs = [Job(name, name.replace(" ", "_")) for name in DRAFTERS]
    launch(work / "four", jobs, ranks=4)
    found = {job.name: difference(work / "four" / job.folder, alone(job, work / "one")) for job in jobs}
    return {name: float(f"{d:.1e}") for name, d in found.items()}, max(found.values()) < 1e-6


def ranks(work):
    "Distance of a drafter that fewer ranks finish from the one that 4 ranks finish."
    from sharded import Job, launch

    root, found = work / "ranks", {}
    launch(root, [Job(SAVED, kind, settings_of(kind)) for kind in FORMATS], ranks=4)
    jobs = [Job(SAVED, f"{kind}_two", settings_of(kind), resume=f"{kind}/checkpoint-5") for kind in FORMATS]
    launch(root, jobs, ranks=2)
    for kind in FORMATS:
        found[f"{kind}, 4 to 2"] = difference(root / f"{kind}_two", root / kind)
        job = Job(SAVED, f"{kind}_one", settings_of(kind), resume=f"{kind}/checkpoint-5")
        found[f"{kind}, 4 to 1"] = difference(alone(job, root), root / kind)
    return {name: float(f"{d:.1e}") for name, d in found.items()}, max(found.values()) < 1e-6


def long_job(kind, folder):
    from sharded import Job

    more = dict(save_steps=1, save_total_limit=2, max_steps=40, eval_steps=20, resume_from_checkpoint=True)
    return Job(SAVED, folder, settings_of(kind, **more))


def begin(root, kind, folder):
    command = [sys.executable, __file__, str(root), "--train", kind, folder]
    with open(root / "log.txt", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def newest(folder):
    "The last checkpoint's step; 0: none."
    return max((int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")), default=0)


def killed_run(root, kind, draw):
    "Kill a run some seconds after it went on, again and again; the steps at which it was killed."
    folder, steps = f"{kind}_killed", []
    for _ in range(KILLS):
        before, process = newest(root / folder), begin(root, kind, folder)
        while process.poll() is None and newest(root / folder) == before:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 2))
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        steps.append(newest(root / folder))
    if begin(root, kind, folder).wait():
        raise SystemExit(f"a resume failed; the end of {root}/log.txt:\n{(root / 'log.txt').read_text()[-3000:]}")
    return steps


def kills(work):
    "Where each kill fell, and whether the drafter is that of a run that nobody killed."
    root, draw, found = work / "kills", random.Random(SEED), {}
    for kind in FORMATS:
        if begin(root, kind, f"{kind}_whole").wait():
            raise SystemExit(f"a run failed; the end of {root}/log.txt:\n{(root / 'log.txt').read_text()[-3000:]}")
        steps = killed_run(root, kind, draw)
        a, b = ((root / f"{kind}_{which}/model.safetensors").read_bytes() for which in ("whole", "killed"))
        found[kind] = dict(killed_after_steps=steps, same_bytes=a == b)
    return found, all(kind["same_bytes"] and kind["killed_after_steps"] for kind in found.values())


PARTS = dict(drafters=drafters, ranks=ranks, kills=kills)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", type=Path, default=ROOT / "output/distributed")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        from sharded import launch

        return launch(args.work, [long_job(*args.train)])
    results, fine = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}, True
    for name, part in PARTS.items():
        if args.only in (None, name):
            work = args.work.resolve()
            for folder in dict(drafters=("four", "one")).get(name, (name,)):
                shutil.rmtree(work / folder, ignore_errors=True)
                (work / folder).mkdir(parents=True)
            began = time.monotonic()
            found, holds = part(work)
            results[name] = dict(holds=holds, seconds=round(time.monotonic() - began), found=found)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            fine &= holds
    print(json.dumps(results, indent=1))
    return not fine


if __name__ == "__main__":
    sys.exit(main())
