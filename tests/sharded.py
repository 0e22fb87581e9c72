"""Drafters trained on several ranks whose weights are sharded (FSDP2), beside one process: what `test_sharded.py` and
`tests/distributed/run.py` share. A rank is a process of its own on gloo, as torchrun would start it."""

import json
import os
import shutil
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import forked
import torch
from accelerate.state import AcceleratorState
from matrix import DRAFTERS, H, V, drafter, family_of, verifier

from speculators_nb.serve.server import free_port
from speculators_nb.train import optimizers
from speculators_nb.train.trainer import SpeculatorTrainingArguments, train

STEPS, ROWS_IN_STEP = int(os.environ.get("SHARDED_STEPS", "4")), 4  # more than an epoch, whose last step lacks a row
SAVE = STEPS // 2
LIMIT = 400, 60  # seconds for a launch, and for each of its jobs


@dataclass
class Job:
    "One training run: a drafter, how it is trained, and the folder that it leaves."

    name: str  # of `DRAFTERS`
    folder: str  # below the launch's
    settings: dict = field(default_factory=dict)  # of the trainer
    resume: str = ""  # a checkpoint that is copied to the folder first, below the launch's folder
    fails: str = ""  # what the error says that ends it


def norms(model):
    "What an evaluation measures: the drafter is whole, and is of its own class."
    assert not type(model).__name__.startswith("FSDP")
    return {"norm": sum(float(p.detach().square().sum()) for p in model.parameters() if p.requires_grad) ** 0.5}


def samples_for(model, family, n, seed=0):
    "Random rows with the features of the layers that the drafter reads."
    target, g, made = verifier(family)[1], torch.Generator().manual_seed(seed), []
    for _ in range(n):
        length = int(torch.randint(14, 24, (), generator=g))
        ids = torch.randint(V - 1, (1, length), generator=g)
        out = target(ids, want_logits=False, use_cache=False)
        states = [out.hidden_states[0][:, i * H : (i + 1) * H] for i in model.drafter().aux_layer_ids]
        made.append(
            dict(
                input_ids=ids[0],
                loss_mask=torch.arange(length) >= length // 4,
                hidden_states=torch.cat(states, -1) if states else out.hidden_states[0][:, :0],
                verifier_last_hidden_states=out.last_hidden_states[0],
            )
        )
    return made


def run(job, root, ranks, fsdp):
    """Train as `job` says; the trainer, after the run. Muon multiplies in float32: in bfloat16 another order of sums
    alone makes 8e-4."""
    family = family_of(job.name)
    model = drafter(job.name, family)
    settings, folder = {"measure": norms} | job.settings, Path(root) / job.folder
    measure = settings.pop("measure")
    rows = samples_for(model, family, ROWS_IN_STEP * (SAVE + 1) - 1)
    held_out = samples_for(model, family, 3, seed=1)
    if job.resume:
        if int(os.environ.get("RANK", 0)) == 0:
            shutil.copytree(Path(root) / job.resume, folder / Path(job.resume).name)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        settings["resume_from_checkpoint"] = str(folder / Path(job.resume).name)
    base = dict(total_seq_len=26, max_steps=STEPS, learning_rate=1e-3, warmup_steps=0, logging_steps=1, seed=3)
    base |= dict(save_strategy="no", eval_strategy="steps", eval_steps=STEPS, load_best_model_at_end=False)
    base |= dict(disable_tqdm=True, save_total_limit=None, fsdp=fsdp)
    base["gradient_accumulation_steps"] = ROWS_IN_STEP // ranks
    args = SpeculatorTrainingArguments(str(folder), **base | settings)
    try:
        with mock.patch.object(optimizers, "product_dtype", lambda device: torch.float32):
            trainer = train(model, rows, held_out, args, measure=measure, **DRAFTERS[job.name][2])
    except FloatingPointError as e:
        assert job.fails and job.fails in str(e), e
        return None
    assert not job.fails, job.fails
    return trainer


def report_of(trainer):
    "What two runs are compared by: the logs without clocks and counts of work."
    clocks = ("runtime", "per_second", "total_flos")
    return [{k: v for k, v in log.items() if not k.endswith(clocks)} for log in trainer.state.log_history]


def as_torchrun_says(rank, ranks, port):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    AcceleratorState._reset_state(reset_partial_state=True)  # of a training in the process that was forked


def one_rank(rank, ranks, port, root, jobs, fsdp):
    "What a rank does; its report is a file, folder of a job -> what went wrong, or None."
    as_torchrun_says(rank, ranks, port)
    for job in jobs:
        verifier(family_of(job.name))  # before the ranks know of each other: then only the first would save
    report = {}
    for job in jobs:
        report[job.folder] = None
        try:
            trainer = run(job, root, ranks, fsdp)
            if trainer is not None and rank == 0:
                (root / job.folder / "report.json").write_text(json.dumps(report_of(trainer)))
        except Exception:
            report[job.folder] = traceback.format_exc()
            break  # the other ranks may be waiting in another place
        finally:
            torch.save(report, root / f"rank{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(root, jobs, ranks=2, fsdp=True):
    "Run jobs on ranks. AssertionError naming what went wrong."
    given = (ranks, free_port(), Path(root), jobs, fsdp)
    processes = [forked.begin(one_rank, rank, *given) for rank in range(ranks)]
    seconds = LIMIT[0] + LIMIT[1] * len(jobs)
    until = time.monotonic() + seconds
    try:
        while any(p.is_alive() for p in processes):
            assert time.monotonic() < until, f"{ranks} ranks are not through {len(jobs)} jobs after {seconds} seconds"
            time.sleep(0.1)
            if any(p.exitcode for p in processes):
                time.sleep(2)  # the others may say more
                break
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [Path(root) / f"rank{rank}.pt" for rank in range(ranks)]
    reports = [torch.load(file) if file.exists() else {} for file in files]
    problems = [f"{name}: {error}" for report in reports for name, error in report.items() if error]
    assert not problems, "\n".join(problems)
    done = [job.folder for job in jobs]
    assert [list(report) for report in reports] == [done] * ranks, f"a rank ended early: {[*map(list, reports)]}"


def distance(a, b):
    "Of two state dicts: the norm of the difference by the norm."
    assert a.keys() == b.keys()
    pairs = [(a[name].double(), b[name].double()) for name in a]
    assert all(x.shape == y.shape for x, y in pairs) and all(a[name].dtype == b[name].dtype for name in a)
    norm = sum(float(y.square().sum()) for _, y in pairs) ** 0.5
    return sum(float((x - y).square().sum()) for x, y in pairs) ** 0.5 / norm
