"""A training run never lies: what is not finite is not saved, nothing is trained over, a resume continues the same run
or says why it cannot."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from test_trainer import Stop, Toy, arguments, samples, toy, weights
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from speculators_nb.train.checkpoint import last_checkpoint
from speculators_nb.train.run_record import accumulation, run_changes, run_record
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.train.trainer import SpeculatorTrainer, log_table, train
from speculators_nb.train.training_arguments import SpeculatorTrainingArguments, check_sharding

RELEASE = Path(__file__).parent / "fixtures/compat/0.1.0"
STEPS = dict(save_strategy="steps", eval_strategy="steps", save_steps=2, eval_steps=2, save_total_limit=None)


class Diverges(Toy):
    "Its loss is finite, then it is not."

    def __init__(self, step, value=float("nan")):
        super().__init__()
        self.step, self.value, self.calls = step, value, 0

    def forward(self, **batch):
        tokens, loss, metrics = super().forward(**batch)
        self.calls += self.training
        return tokens, loss * (self.value if self.training and self.calls >= self.step else 1), metrics


# --- finiteness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(logging_steps=100, save_strategy="no", load_best_model_at_end=False),  # nobody looks before the end
        dict(logging_steps=100, **STEPS),  # seen at a save
        dict(logging_steps=1),  # seen at a log
    ],
    ids=["end", "save", "log"],
)
def test_a_loss_that_is_not_finite_stops_the_run_before_anything_is_saved(tmp_path, value, kwargs):
    torch.manual_seed(0)
    with pytest.raises(FloatingPointError, match="loss.*not finite.*learning_rate=0.01"):
        train(Diverges(4, value), samples(), samples(3, 1), arguments(tmp_path, max_grad_norm=0.0, **kwargs))
    assert not (tmp_path / "model.safetensors").exists()
    for checkpoint in tmp_path.glob("checkpoint-*"):
        assert all(t.isfinite().all() for t in load_file(checkpoint / "model.safetensors").values())


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    "The loss of every step is finite; the last update is not."

    class Spoil(Stop):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == self.step:
                model.fc.weight.data[0, 0] = float("inf")

    with pytest.raises(FloatingPointError, match=r"fc\.weight.*not finite"):
        train(
            toy(),
            samples(),
            samples(3, 1),
            arguments(tmp_path, max_steps=4, eval_strategy="no", load_best_model_at_end=False),
            callbacks=[Spoil(4)],
        )
    assert not (tmp_path / "model.safetensors").exists() and not list(tmp_path.glob("checkpoint-*"))


def test_an_evaluation_that_is_not_finite_is_an_error(tmp_path):
    held = samples(3, 1)
    held[0]["hidden_states"][2, 3] = float("nan")
    with pytest.raises(FloatingPointError, match="evaluation loss.*not finite"):
        train(toy(), samples(), held, arguments(tmp_path))
    assert not (tmp_path / "model.safetensors").exists()


def test_a_learning_rate_of_a_thousand_million(tmp_path):
    "The measured case: 12 of 14 tensors were NaN and the exit code was 0."
    with pytest.raises(FloatingPointError, match="not finite"):
        train_drafter(
            RELEASE / "features",
            tmp_path / "d",
            RELEASE / "verifier",
            "eagle3",
            ttt_steps=2,
            total_seq_len=32,
            learning_rate=1e9,
            max_steps=3,
            lr_scheduler_type="constant",
            warmup_steps=0,
            disable_tqdm=True,
            eval_share=0.0,
        )
    assert not (tmp_path / "d/model.safetensors").exists()


# --- a folder is never trained over ---------------------------------------------------------------------------------


def test_a_drafter_is_not_trained_over(tmp_path):
    first = train(toy(), samples(), samples(3, 1), arguments(tmp_path))
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=f"output_dir={str(tmp_path)!r}.*overwrite.*resume"):
        train(toy(), samples(seed=7), samples(3, 1), arguments(tmp_path))
    assert files == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    second = train(toy(), samples(seed=7), samples(3, 1), arguments(tmp_path, overwrite=True))
    assert not torch.equal(weights(first.model), weights(second.model))


@pytest.mark.parametrize("what", ["checkpoint", "drafter"])
def test_what_counts_as_trained(tmp_path, what):
    train(toy(), samples(), samples(3, 1), arguments(tmp_path))
    for p in tmp_path.iterdir():
        if p.name.startswith("checkpoint") != (what == "checkpoint"):
            shutil.rmtree(p) if p.is_dir() else p.unlink()
    with pytest.raises(ValueError, match="overwrite"):
        train(toy(), samples(), samples(3, 1), arguments(tmp_path))


def test_a_folder_with_other_files_is_free(tmp_path):
    (tmp_path / "d2t-40.npy").touch()
    train(toy(), samples(), samples(3, 1), arguments(tmp_path, num_train_epochs=1))


def test_an_overwritten_run_keeps_the_old_drafter_until_it_saves_and_mixes_no_checkpoints(tmp_path):
    """Killed before its first save: the old drafter is whole. Resumed: the old run's checkpoints are not taken. Saved:
    they are gone."""
    train(toy(), samples(), samples(3, 1), arguments(tmp_path, **STEPS))
    old, drafter = sorted(p.name for p in tmp_path.glob("checkpoint-*")), (tmp_path / "model.safetensors").read_bytes()
    other = samples(seed=7)
    with pytest.raises(KeyboardInterrupt):
        train(toy(), other, samples(3, 1), arguments(tmp_path, overwrite=True, **STEPS), callbacks=[Stop(1)])
    assert (tmp_path / "model.safetensors").read_bytes() == drafter and sorted(
        p.name for p in tmp_path.glob("checkpoint-*")
    ) == old
    with pytest.raises(KeyboardInterrupt):
        train(
            toy(), other, samples(3, 1), arguments(tmp_path, resume_from_checkpoint=True, **STEPS), callbacks=[Stop(3)]
        )
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    whole = train(toy(), other, samples(3, 1), arguments(tmp_path / "whole", **STEPS))
    resumed = train(toy(), other, samples(3, 1), arguments(tmp_path, resume_from_checkpoint=True, **STEPS))
    assert torch.equal(weights(resumed.model), weights(whole.model))


# --- a resume continues the same run --------------------------------------------------------------------------------


def cut(folder, step=5, n=16, **kwargs):
    "A run that was killed after a step."
    given = dict(STEPS, num_train_epochs=4) | kwargs
    with pytest.raises(KeyboardInterrupt):
        train(toy(), samples(n), samples(4, 1), arguments(folder, **given), callbacks=[Stop(step)])
    return given


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    "One, and its settings. It is only looked at."
    folder = tmp_path_factory.mktemp("killed")
    return folder, cut(folder)


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(learning_rate=2e-2), "learning_rate was 0.01, is 0.02"),
        (dict(optimizer="adamw"), "optimizer was 'muon', is 'adamw'"),
        (dict(seed=4), "seed was 3, is 4"),
        (dict(total_seq_len=48), "total_seq_len was 32, is 48"),
        (dict(gradient_accumulation_steps=2), "rows in a step was 1, is 2"),
        (dict(lr_scheduler_type="linear"), "lr_scheduler_type was 'cosine', is 'linear'"),
        (dict(bf16=True), "bf16 was False, is True"),
        (dict(weight_decay=0.5), "weight_decay was 0.01, is 0.5"),
        (dict(metric_for_best_model="acc"), "metric_for_best_model was 'loss', is 'acc'"),
    ],
)
def test_other_settings_are_refused(killed, change, words):
    folder, given = killed
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=f"cannot resume.*{words}"):
        train(toy(), samples(16), samples(4, 1), arguments(folder, **(given | change), resume_from_checkpoint=True))
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_other_data_are_refused(killed):
    folder, given = killed
    for data, words in (
        (samples(17), "training rows was 16, is 17"),
        (samples(16, seed=5), "training data was .*, is "),
    ):
        with pytest.raises(ValueError, match=f"cannot resume.*{words}"):
            train(toy(), data, samples(4, 1), arguments(folder, **given, resume_from_checkpoint=True))


def test_other_loss_is_refused(killed):
    folder, given = killed
    with pytest.raises(ValueError, match="cannot resume.*noise was 0.0, is 0.5"):
        train(toy(), samples(16), samples(4, 1), arguments(folder, **given, resume_from_checkpoint=True), noise=0.5)


def test_what_may_change(tmp_path):
    "More epochs, other logging, another number of checkpoints kept, the best of which is not taken."
    given = cut(tmp_path, metric_for_best_model="eval_acc")
    more = given | dict(num_train_epochs=5, logging_steps=3, save_total_limit=3, eval_steps=4, save_steps=4)
    more |= dict(metric_for_best_model=None, load_best_model_at_end=False)
    trainer = train(toy(), samples(16), samples(4, 1), arguments(tmp_path, **more, resume_from_checkpoint=True))
    assert trainer.state.global_step == 5 * len(trainer.train_rows)


AS_TWO = dict(world_size=2, gradient_accumulation_steps=1, rows_in_step=2)


def test_ranks_are_converted_where_a_step_keeps_its_rows(tmp_path, caplog):
    """A checkpoint of two ranks continues in one process that accumulates two rows, also with the same command; with
    another number of rows in a step it is refused."""
    given = cut(tmp_path / "a", step=4, gradient_accumulation_steps=2)
    for checkpoint in (tmp_path / "a").glob("checkpoint-*"):  # as two ranks would have written it
        record = json.loads((checkpoint / "run.json").read_text())
        assert (record["world_size"], record["gradient_accumulation_steps"]) == (1, 2)
        (checkpoint / "run.json").write_text(json.dumps(record | AS_TWO))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole = train(toy(), samples(16), samples(4, 1), arguments(tmp_path / "whole", **given))
    resumed = train(toy(), samples(16), samples(4, 1), arguments(tmp_path / "a", **given, resume_from_checkpoint=True))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    given |= dict(resume_from_checkpoint=True, gradient_accumulation_steps=1)  # the command that the two ranks had
    caplog.clear()
    for folder in ("b", "b"):  # the second time, its own record says so: nothing is left to do
        same = train(toy(), samples(16), samples(4, 1), arguments(tmp_path / folder, **given))
        assert torch.equal(weights(same.model), weights(whole.model))
    assert "The run was on 2 ranks, and is on 1: gradient_accumulation_steps=2" in caplog.messages[0]
    assert json.loads((tmp_path / "b/run.json").read_text())["rows_in_step"] == 2
    with pytest.raises(ValueError, match="rows in a step was 2, is 3.*gradient_accumulation_steps=2"):
        given["gradient_accumulation_steps"] = 3
        train(toy(), samples(16), samples(4, 1), arguments(tmp_path / "c", **given))


def test_a_record_says_of_an_argument_nothing_that_another_process_says_otherwise(tmp_path):
    "Where an object is in memory: ranks would be of other runs, and no resume would be of the same."
    objects = [partial(Stop(1).on_step_end), partial(Stop(1).on_step_end)]
    one, other = (run_record(arguments(tmp_path), arguments={"per_position_loss_weight": x}) for x in objects)
    assert one["model"] == other["model"] and "Stop" in str(one["model"])


def test_ranks_that_share_a_row_read_one_at_a_time():
    def of(ranks, sharing, steps):
        counts = dict(world_size=ranks, context_parallel_size=sharing, gradient_accumulation_steps=steps)
        return counts | dict(verifier=None, settings={}, model={}, rows_in_step=ranks // sharing * steps)

    four = of(4, 2, 2)
    assert accumulation(four, of(8, 2, 2)) == accumulation(four, of(4, 1, 2)) == 1
    assert not run_changes(four, of(2, 2, 4))
    (change,) = run_changes(four, of(6, 2, 2))
    assert change == "rows in a step was 4, is 6 on 6 ranks (continue on a number of ranks that divides 8: 2, 4, 8)"


def test_a_checkpoint_knows_its_run(killed):
    folder = killed[0]
    record = json.loads((Path(last_checkpoint(folder)) / "run.json").read_text())
    assert {
        "run",
        "model",
        "data",
        "verifier",
        "world_size",
        "gradient_accumulation_steps",
        "settings",
    } <= record.keys()
    assert record["data"]["rows"] == 16 and record["settings"]["total_seq_len"] == 32
    assert record["run"] == json.loads((folder / "run.json").read_text())["run"]


def test_a_checkpoint_that_is_named_must_fit_too(killed, tmp_path):
    folder, given = killed
    with pytest.raises(ValueError, match="cannot resume.*learning_rate"):
        train(
            toy(),
            samples(16),
            samples(4, 1),
            arguments(
                tmp_path / "b",
                **(given | dict(learning_rate=1.0)),
                resume_from_checkpoint=last_checkpoint(folder),
            ),
        )


class Waits(TrainerCallback):
    "Behind its second step, until it may go on."

    def __init__(self, here, go):
        self.here, self.go = here, go

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.here.set()
            self.go.wait(60)


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    "It would be told of the other's files, and its checkpoints would be those of an earlier run."
    here, go = forked.FORK.Event(), forked.FORK.Event()
    given = dict(save_total_limit=None, max_steps=4, save_strategy="steps", save_steps=1, eval_strategy="no")
    given |= dict(load_best_model_at_end=False)

    def other():
        return train(toy(), samples(), args=arguments(tmp_path, **given), callbacks=[Waits(here, go)]).state.global_step

    answer = forked.ask(other)
    assert here.wait(60)
    for more in (dict(overwrite=True), dict(resume_from_checkpoint=True)):
        with pytest.raises(
            BlockingIOError, match="another process is writing it; wait for it, or choose another folder"
        ):
            train(toy(), samples(), args=arguments(tmp_path, **given | more))
    go.set()
    assert answer() == 4
    run = json.loads((tmp_path / "run.json").read_text())["run"]
    assert {json.loads(p.read_text())["run"] for p in tmp_path.glob("checkpoint-*/run.json")} == {run}
    assert not list(tmp_path.glob(".*"))


# --- a finished run is finished -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(
            max_steps=6, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2
        ),  # ended inside an epoch
        dict(num_train_epochs=1.5),
        dict(num_train_epochs=2),
        dict(
            learning_rate=0.3, num_train_epochs=30, early_stopping_patience=2, lr_scheduler_type="constant"
        ),  # ended early
        dict(num_train_epochs=1, save_strategy="no", load_best_model_at_end=False),  # left no checkpoint
    ],
    ids=["max_steps", "half an epoch", "epochs", "early stopping", "no checkpoints"],
)
def test_a_finished_run_resumed_does_nothing(tmp_path, kwargs):
    first = train(toy(), samples(), samples(5, 1), arguments(tmp_path, **kwargs))
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    again = train(toy(), samples(), samples(5, 1), arguments(tmp_path, **kwargs, resume_from_checkpoint=True))
    assert files == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert again.state.global_step == first.state.global_step
    assert torch.equal(weights(again.model), weights(first.model))
    assert log_table(again).equals(log_table(first))


def test_a_finished_run_goes_on_with_more_epochs(tmp_path):
    train(toy(), samples(), samples(5, 1), arguments(tmp_path, num_train_epochs=1))
    more = train(toy(), samples(), samples(5, 1), arguments(tmp_path, num_train_epochs=2, resume_from_checkpoint=True))
    assert more.state.global_step == 2 * len(more.train_rows)


def test_a_run_that_was_killed_between_its_last_step_and_its_end_is_finished(tmp_path, monkeypatch):
    "All steps are done, the drafter is not saved: a resume takes no further step and saves the best."
    whole = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "whole"))
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(
            SpeculatorTrainer,
            "save_model",
            lambda self, folder=None, **kw: (
                super(SpeculatorTrainer, self).save_model(folder, **kw)
                if folder
                else (_ for _ in ()).throw(KeyboardInterrupt)
            ),
        )
        train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut"))
    assert not (tmp_path / "cut/model.safetensors").exists()
    resumed = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", resume_from_checkpoint=True))
    assert resumed.state.global_step == whole.state.global_step
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert load_file(tmp_path / "cut/model.safetensors").keys()


EARLY = dict(learning_rate=0.3, num_train_epochs=30, early_stopping_patience=2, lr_scheduler_type="constant")


class Ends(TrainerCallback):
    "A kill behind the last step."

    def on_train_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_a_run_that_was_killed_when_its_patience_had_ended_is_finished(tmp_path):
    given = EARLY | dict(load_best_model_at_end=False, metric_for_best_model="loss")
    whole = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "whole", **given))
    assert whole.state.global_step < whole.state.max_steps
    with pytest.raises(KeyboardInterrupt):
        train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", **given), callbacks=[Ends()])
    for _ in range(2):
        args = arguments(tmp_path / "cut", **given, resume_from_checkpoint=True)
        resumed = train(toy(), samples(), samples(5, 1), args)
        assert resumed.state.global_step == whole.state.global_step
        assert torch.equal(weights(resumed.model), weights(whole.model))


def test_more_patience_after_a_resume_is_what_counts(tmp_path):
    more = EARLY | dict(early_stopping_patience=4)
    whole = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "whole", **more))
    with pytest.raises(KeyboardInterrupt):
        train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", **EARLY), callbacks=[Ends()])
    resumed = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", **more, resume_from_checkpoint=True))
    assert resumed.state.global_step == whole.state.global_step
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_a_run_of_fewer_epochs_than_its_checkpoint_has_seen_is_finished(tmp_path):
    "And goes on where it is given more again."
    with pytest.raises(KeyboardInterrupt):
        train(toy(), samples(), samples(5, 1), arguments(tmp_path, num_train_epochs=3), callbacks=[Stop(7)])
    for epochs, step in ((1, 6), (1, 6), (3, 18)):
        args = arguments(tmp_path, num_train_epochs=epochs, resume_from_checkpoint=True)
        assert train(toy(), samples(), samples(5, 1), args).state.global_step == step
        assert json.loads((tmp_path / "run.json").read_text())["finished"] == {"step": step, "planned": step}


class Stops(TrainerCallback):
    "A checkpoint, and the end of the run, as transformers' callback for SIGTERM asks for."

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_save = control.should_training_stop = True


def test_a_run_that_was_told_to_stop_is_not_finished(tmp_path, capsys):
    whole = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "whole"))
    stopped = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut"), callbacks=[Stops()])
    assert f"Stopped at step {stopped.state.global_step}: " in capsys.readouterr().out
    resumed = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", resume_from_checkpoint=True))
    assert resumed.state.global_step == whole.state.global_step
    assert torch.equal(weights(resumed.model), weights(whole.model))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason="transformers 5.16 records the best checkpoint by its full path",
)
def test_a_moved_folder_keeps_its_best_checkpoint(tmp_path):
    given = dict(learning_rate=0.3, num_train_epochs=6, lr_scheduler_type="constant", save_total_limit=None)
    whole = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "whole", **given))
    with pytest.raises(KeyboardInterrupt):
        train(
            toy(),
            samples(),
            samples(5, 1),
            arguments(tmp_path / "here", **given),
            callbacks=[Stop(whole.state.max_steps - 1)],
        )
    shutil.move(tmp_path / "here", tmp_path / "there")
    resumed = train(
        toy(), samples(), samples(5, 1), arguments(tmp_path / "there", **given, resume_from_checkpoint=True)
    )
    assert resumed.state.best_model_checkpoint == str(tmp_path / f"there/checkpoint-{whole.state.best_global_step}")
    assert torch.equal(weights(resumed.model), weights(whole.model))


# --- refused by name ------------------------------------------------------------------------------------------------


def test_ranks_do_not_stop_at_a_signal(tmp_path, monkeypatch):
    "Each would at a step of its own; one process may."
    assert arguments(tmp_path, enable_jit_checkpoint=True).enable_jit_checkpoint
    monkeypatch.setattr(SpeculatorTrainingArguments, "world_size", 2)
    with pytest.raises(
        ValueError, match="^enable_jit_checkpoint=True: each of 2 ranks .*; leave it out, and save more"
    ):
        arguments(tmp_path, enable_jit_checkpoint=True)


def test_fsdp_names_the_torch_that_it_needs(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    with pytest.raises(ValueError, match=r"fsdp=True: torch \S+ .*2\.13 or newer.*--fsdp"):
        check_sharding(SimpleNamespace(fsdp=True, checkpoint_format="full"))


@pytest.mark.parametrize(
    "kwargs,words",
    [
        (dict(fsdp="full_shard"), "fsdp='full_shard'.*true or false"),
        (dict(fsdp=True), "fsdp=True.*torchrun"),
        (dict(checkpoint_format="sharded"), "checkpoint_format='sharded'.*--fsdp"),
        (dict(context_parallel_size=2), "context_parallel_size=2: 1 ranks .*--nproc-per-node 2"),
        (dict(checkpoint_format="dcp"), "checkpoint_format='dcp'.*full.*sharded"),
        (dict(fsdp_config={"min_num_params": 1}), "fsdp_config=.*leave it out"),
        (dict(adam_beta1=1.5), "adam_beta1=1.5"),
        (dict(save_only_model=True), "save_only_model=True"),
        (dict(auto_find_batch_size=True), "auto_find_batch_size=True"),
    ],
)
def test_training_arguments_that_make_no_sense(tmp_path, kwargs, words):
    with pytest.raises(ValueError, match=words):
        arguments(tmp_path, **kwargs)
