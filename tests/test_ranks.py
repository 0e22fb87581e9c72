"""Training on two ranks (gloo) is training in one process: the same weights, metrics and folders, the same after a
resume on another number of them; and a rank that dies ends the job, named in the last line. `make ranks` does it with
every drafter, and on four."""

import json
import logging
import re
import signal
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache, partial

import forked
import pandas as pd
import pytest
import torch
from bad.harness import typed
from ranks import worker
from ranks.job import Job, processes_of, train_words
from ranks.worker import SAVE, STEPS
from safetensors.torch import load_file
from sharded import as_torchrun_says, free_port
from test_trainer import arguments, toy
from test_trainer import samples as rows_of_toy
from torch import distributed as dist

from speculators_nb.train import trainer

THREE = ["eagle", "peagle", "dflash"]  # noise; a subset of rollouts and gradients by rows; a subset of anchors
FOUR = [*THREE, "dspark rnn"]  # whose worker trains it by Muon too


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def one_rank(rank, world_size, port, log, arguments):
    with open(log, "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        logging.basicConfig(force=True)  # to the file, not to the test that was forked
        if world_size > 1:
            as_torchrun_says(rank, world_size, port)
        worker.main(*map(str, arguments))
        if world_size > 1:
            dist.destroy_process_group()


def train(world_size, folder, *arguments):
    "What the ranks of a training by the worker print."
    log = folder.with_name(f"{folder.name}.log")
    given = world_size, free_port(), log, (folder, *arguments)
    processes = [forked.begin(one_rank, rank, *given) for rank in range(world_size)]
    for process in processes:
        process.join(900)
    assert [p.exitcode for p in processes] == [0] * world_size, log.read_text()[-4000:]
    return log.read_text()


@pytest.fixture(scope="module")
def runs(place):
    "World size -> folder of its drafters."
    for world_size in (1, 2):
        train(world_size, place / str(world_size), ",".join(FOUR))
    return {world_size: place / str(world_size) for world_size in (1, 2)}


@lru_cache(None)
def tensors(file):
    return load_file(file)


def check_equal(one, other):
    "Same files, keys, shapes and dtypes; each tensor within 1e-6 of its norm."
    files = [sorted(p.name for p in folder.iterdir() if p.is_file()) for folder in (one, other)]
    assert files[0] == files[1] and "model.safetensors" in files[0]
    a, b = tensors(one / "model.safetensors"), tensors(other / "model.safetensors")
    assert list(a) == list(b)
    for name in a:
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert (a[name] - b[name]).norm() <= 1e-6 * a[name].norm(), name


@pytest.mark.parametrize("name", FOUR)
def test_ranks_equal_one_process(runs, name):
    "The weights after the last step, the losses, metrics and evaluations of each step, the files."
    one, other = (runs[n] / name.replace(" ", "-") for n in (1, 2))
    check_equal(one, other)
    logs = [pd.read_csv(folder / "training_log.csv", index_col="step") for folder in (one, other)]
    assert logs[0]["eval_loss"].count() == STEPS // SAVE and len(logs[0]) == STEPS
    assert list(logs[0]) == list(logs[1])
    pd.testing.assert_frame_equal(*logs, rtol=1e-5, atol=1e-7)


def test_muon_on_ranks_equals_one_process(runs):
    "And layers that are computed again: the rank whose last row has no loss reaches none of the weights."
    check_equal(*(runs[n] / "muon/dspark-rnn" for n in (1, 2)))


def test_the_random_choices_matter(runs):
    "Without them the equality would show nothing: the loss of a row depends on its seed."
    for name in THREE:
        once = dict(max_steps=1, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
        trainer = worker.train_one(runs[1].parent / "draws", name, 1, **once)
        rows = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))[0]
        first, again, other = (
            trainer.compute_loss(trainer.model, rows[0] | dict(row_seed=seed)).item() for seed in (1, 1, 2)
        )
        assert first == again != other, name


def test_a_run_continues_on_another_number_of_ranks(runs, place):
    "From step 5 of two ranks in one process with the same command: the accumulation is converted, the weights equal."
    name = "peagle"
    cut = place / "cut" / name
    cut.parent.mkdir()
    subprocess.run(["cp", "-r", runs[2] / name, cut], check=True)
    for made_later in [cut / f"checkpoint-{STEPS}", cut / "model.safetensors"]:
        subprocess.run(["rm", "-r", made_later], check=True)
    record = json.loads((cut / "run.json").read_text())
    record.pop("finished")
    (cut / "run.json").write_text(json.dumps(record))
    output = train(1, cut.parent, name, "", "", "", "resume", "2")
    assert "The run was on 2 ranks, and is on 1: gradient_accumulation_steps=4 here" in output
    check_equal(runs[1] / name, cut)
    logs = [pd.read_csv(folder / name / "training_log.csv")["loss"] for folder in (runs[1], cut.parent)]
    assert logs[0].tolist() == pytest.approx(logs[1].tolist(), rel=1e-6)
    record = json.loads((cut / f"checkpoint-{STEPS}/run.json").read_text())
    assert (record["world_size"], record["rows_in_step"], record["gradient_accumulation_steps"]) == (1, 4, 2)


def test_ranks_that_begin_other_runs_are_told(tmp_path):
    "Data, arguments or a checkpoint of its own on one rank: not a hang, and no weights that drift apart."
    given = dict(max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="no", load_best_model_at_end=False)
    port, folder, new = free_port(), tmp_path / "all see it", dict(place=tmp_path / "new")
    cases = {  # message -> what is given to the first rank, to the other
        "data.rows is 3 there and 6 on rank 0": (new, new | dict(samples=3)),
        "settings.learning_rate is 0.5 there and 0.01 on rank 0": (new, new | dict(learning_rate=0.5)),
        "checkpoint is None there and 'checkpoint-1' on rank 0": ({}, dict(place=tmp_path / "of rank 1")),
    }

    def begin(samples=6, place=folder, **more):
        args = arguments(place, **given | more, resume_from_checkpoint=True)
        try:
            return trainer.train(toy(), rows_of_toy(samples), None, args).state.global_step
        except ValueError as e:
            return str(e)

    def run(rank):
        as_torchrun_says(rank, 2, port)
        given["max_steps"] = 1
        told = [begin()]
        given["max_steps"] = 2  # one step is left
        told += [begin(**case[rank]) for case in cases.values()]
        dist.destroy_process_group()
        return told

    ranks = [forked.ask(partial(run, rank)) for rank in (0, 1)]
    for told in [answer() for answer in ranks]:
        assert told[0] == 1
        for words, message in zip(cases, told[1:], strict=True):
            assert message.startswith(f"rank 1 has begun another run than rank 0: {words}"), message
            assert message.endswith("an output_dir and data that all of them see")


# ---- a job of the command


def test_a_job_reports_once(tmp_path):
    "Two ranks, as torchrun starts them: one result, one record, which knows the ranks."
    port = free_port()

    def command(rank):
        as_torchrun_says(rank, 2, port)
        return typed(train_words(tmp_path / "drafter", "--extra", "max_steps=4"))

    ranks = [forked.ask(partial(command, rank)) for rank in (0, 1)]
    codes, outputs, errors = zip(*(answer() for answer in ranks))
    assert codes == (0, 0), errors
    output = "".join(outputs)
    assert output.count("Drafter, history and checkpoints are in") == output.count("Next: ") == 1
    record = json.loads((tmp_path / "drafter/provenance.json").read_text())
    assert "earlier" not in record
    assert record["results"] == {"steps": 4, "world_size": 2, "gradient_accumulation_steps": 1}


def test_a_killed_rank_ends_the_job(tmp_path):
    "The other rank loses its connection and fails too; the last line and the error file name the one that was killed."
    job = Job(tmp_path, "--extra", "max_steps=100000", "--extra", "save_steps=2")
    job.wait_for("checkpoint-2")
    pid = job.kill(rank=1)
    began = time.monotonic()
    assert job.ends() == 128 + signal.SIGKILL
    assert time.monotonic() - began < 60
    line = job.error.splitlines()[-1]
    assert re.fullmatch(rf"Error: rank 1 on \S+ \(pid {pid}\) was killed by signal 9 \(SIGKILL.*--resume.*", line), line
    left = json.loads(job.error_file.read_text())["message"]
    assert left["message"] == line and left["extraInfo"]["rank"] == 1
    assert not processes_of(job.process.pid)
