"""Training checkpoints that are complete or absent, and a resume that is checked.
A run continues with the settings, data and model that it was started with, or not at all."""

import contextlib
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import EarlyStoppingCallback, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, sort_checkpoints

from ..core.checkpoints import checkpoint_index, load_tensors, read_state
from ..core.files import atomic_write, read_object
from ..core.options import shown
from ..distributed.sharded_training import (
    has_shards,
    load_model_shards,
    load_training_shards,
    plain_optimizer,
    save_model_config,
    save_training_state,
    shards_problem,
    split_states,
)
from ..distributed.sharding import gather, is_sharded, load_whole, local
from ..models.base import SpeculatorModel
from ..nn.lora import adapter_record, adapted, load_adapter
from ..verifier.folders import check_output_dir, is_trained
from .run_record import (
    accumulation,
    data_record,
    differences,
    flat,
    layers_record,
    read_record,
    run_changes,
    run_record,
    write_record,
)

log = logging.getLogger(__name__)
log.addFilter(lambda record: os.environ.get("RANK", "0") == "0")  # all ranks would say the same


def _state_problem(folder: Path) -> str | None:
    "Check the fields of trainer_state.json. Errors: OSError, ValueError."
    file = folder / TRAINER_STATE_NAME
    state = read_object(file)
    if "global_step" not in state:
        return f"{file}: has no global_step"
    expected = vars(TrainerState())
    for name, value in state.items():
        kinds = {type(expected.get(name)), type(value)}
        if len(kinds) > 1 and type(None) not in kinds and kinds != {int, float}:
            return f"{file}: {name}={shown(value)} is of another type; take an older checkpoint"


def checkpoint_problem(folder: str | os.PathLike) -> str | None:
    """What of a checkpoint-N folder is missing or incomplete, without reading its tensors; None: training can resume
    from it."""
    folder = Path(folder)
    try:
        if problem := _state_problem(folder):
            return problem
        in_shards = has_shards(folder)
        if in_shards and (problem := shards_problem(folder)):
            return problem
        for file in set() if in_shards else set(checkpoint_index(folder).values()):
            load_tensors(file, [])
    except (OSError, ValueError) as e:
        return str(e)
    for name in ("scheduler.pt",) if in_shards else ("optimizer.pt", "scheduler.pt"):
        if not zipfile.is_zipfile(folder / name):
            return f"{folder / name}: missing or cut off"


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The newest checkpoint of an output folder that is complete, to resume from; None: there is none. Incomplete ones,
    and those of an earlier run, are named in a warning and passed over."""
    run = read_record(output_dir).get("run")
    for folder in reversed(sort_checkpoints(str(output_dir))):
        if problem := checkpoint_problem(folder):
            log.warning(f"Not resuming from {folder}, it is incomplete: {problem}")
        elif run and read_record(folder).get("run") != run:
            log.warning(f"Not resuming from {folder}, it is of an earlier run.")
        else:
            return folder


def surplus_checkpoints(folder: str | os.PathLike, state: TrainerState, limit: int | None) -> list[str]:
    """Checkpoints of a folder beyond save_total_limit (None: no limit), to delete in this order: first those of an
    earlier run, which are ahead of this one, then the oldest; never the last, that of the state's step, or the best."""
    present = sort_checkpoints(str(folder))
    if not limit:
        return []
    last = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    now = [Path(c).name for c in present].index(last)
    kept = {present[now], state.best_model_checkpoint} & set(present)
    removable = [c for c in present[now + 1 :] + present[:now] if c not in kept]
    surplus = len(present) - max(limit, len(kept))
    return removable[: max(0, surplus)]


@contextlib.contextmanager
def _readable(checkpoint, what):
    "Name the checkpoint whose state cannot be read. Errors: ValueError."
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError, pickle.UnpicklingError) as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise ValueError(
            f"cannot resume from {checkpoint}: {what} cannot be read, or is of another run "
            f"({reason}); resume from an older checkpoint, by its folder"
        ) from e


def newest_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The checkpoint of `resume=True`; None: training starts at step 0, and nothing is lost by that. Errors: ValueError
    for a drafter without a checkpoint."""
    checkpoint = last_checkpoint(output_dir)
    if checkpoint is not None:
        return checkpoint
    if is_trained(output_dir) and not read_record(output_dir):
        present = sort_checkpoints(str(output_dir))
        why = f" ({checkpoint_problem(present[-1])})" if present else ""
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds a drafter and no complete checkpoint{why}: there is nothing to "
            "resume. Choose another folder, or give overwrite (--overwrite) to train anew"
        )
    log.warning(f"No complete checkpoint in {output_dir}: training starts at step 0.")


def named_checkpoint(checkpoint: str | os.PathLike, output_dir: str | os.PathLike) -> str:
    "The checkpoint itself. Errors: ValueError for an incomplete one, and for an output folder that holds another run."
    if problem := checkpoint_problem(checkpoint):
        raise ValueError(f"cannot resume from {checkpoint}: {problem}")
    elsewhere = Path(checkpoint).resolve().parent != Path(output_dir).resolve()
    if elsewhere and is_trained(output_dir):
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds a drafter or checkpoints of another run "
            f"than {checkpoint}: choose another folder"
        )
    return str(checkpoint)


def config_changes(checkpoint: str | os.PathLike, config: Any) -> list[str]:
    """Fields of a checkpoint's config.json that differ from the model's config (None: nothing is compared), as
    `differences`."""
    file = Path(checkpoint) / "config.json"
    if config is None or not file.is_file():
        return []
    old, new = read_object(file), config.to_diff_dict()
    for side in (old, new):
        # a folder may have been moved
        side.get("speculators_config", {}).get("verifier", {}).pop("name_or_path", None)
        for name in ("speculators_version", "transformers_version", "dtype", "torch_dtype"):
            side.pop(name, None)
    return differences(old, new)


def check_same_run(checkpoint: str | os.PathLike, record: Mapping, config: Any) -> None:
    """Errors: ValueError naming what has changed since the checkpoint was made: the record of the call at hand, or the
    model's config, if any."""
    old = read_record(checkpoint)
    if changed := run_changes(old, record) + config_changes(checkpoint, config):
        raise ValueError(
            f"cannot resume from {checkpoint}, this is another run: {'; '.join(changed)}. Give the same as then, or "
            "train in another folder, with from_pretrained (--from-pretrained) for its weights"
        )
    if not old.get("data"):
        log.warning(
            f"{checkpoint} is of a release that did not record the data: whether they are the same is not checked."
        )


def check_ranks(seen: Mapping) -> None:
    """Compare what the ranks have before they train: the record of the run, and what they found to resume. On every
    rank at the same time. Errors: ValueError, on all of them, naming what one rank has otherwise than the first."""
    first, *others = (flat({**record, "run": None}) for record in gather_object([seen]))
    for rank, other in enumerate(others, 1):
        pairs = {name: (other.get(name), first.get(name)) for name in first | other}
        changed = [f"{name} is {b!r} there and {a!r} on rank 0" for name, (b, a) in pairs.items() if a != b]
        if changed:
            raise ValueError(
                f"rank {rank} has begun another run than rank 0: {'; '.join(changed)}. Give all ranks the same "
                "command, and an output_dir and data that all of them see"
            )


def close_progress_bars(trainer: Trainer) -> None:
    "So that an error message begins on a line of its own. The lower bar is closed first."
    for callback in trainer.callback_handler.callbacks:
        for name in ("prediction_bar", "training_bar"):
            bar: Any = getattr(callback, name, None)
            if hasattr(bar, "close"):
                bar.close()


@contextlib.contextmanager
def replaced_drafter(folder: Path) -> Iterator[Path]:
    """Put a drafter into an output folder as a whole or not at all: it is written to the temporary folder in it that
    this gives. On an exception the drafter that is there stays; its adapter goes where the new one has none."""
    staging = folder / ".saving"
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    try:
        yield staging
        files = [file for file in staging.rglob("*") if file.is_file()]
        (folder / "config.json").unlink(missing_ok=True)  # no loader takes the folder until the new one is there
        weights = [*folder.glob("model.safetensors*"), *folder.glob("model-*.safetensors")]
        if weights:  # also of one whose replacement was killed here
            shutil.rmtree(folder / "adapter", ignore_errors=True)
        for file in weights:  # shards, and their index
            file.unlink()
        for file in sorted(files, key=lambda file: file.name == "config.json"):
            place = folder / file.relative_to(staging)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class WholeCheckpoints(Trainer):
    """transformers' Trainer whose checkpoint folders are complete or absent, and which
    continues a run only with the settings, data and model that it was started with. Drafters
    that are sharded are saved whole or in shards, and both are read, whatever wrote them."""

    args: Any  # SpeculatorTrainingArguments whose `output_dir` is set
    model: Any  # a drafter
    train_kwargs: dict[str, Any]  # further arguments of the model's forward
    record: Mapping = {}  # written into each checkpoint, from `run_record`
    saving = False  # a checkpoint is being written
    outdated: Sequence[str] = ()  # checkpoints of the replaced run, deleted at the first save
    done = False  # the run had finished before, and nothing was left to do

    def run_record(self) -> dict:
        "The settings, the model's training arguments, the data and the verifier that made them."
        dataset: Any = self.train_dataset
        source = getattr(dataset, "dataset", dataset)
        return run_record(
            self.args,
            data_record(dataset),
            verifier=getattr(source, "verifier_fingerprint", None),
            arguments=self.train_kwargs | layers_record(self.model) | adapter_record(self.model),
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> TrainOutput:
        """Train. `True` resumes from the newest complete checkpoint in output_dir, and starts at step 0 where the
        folder is empty. A run that has finished is left as it is. Errors: ValueError where something was trained there
        already, where a checkpoint is incomplete, or where it belongs to a run with other settings or data."""
        folder, record = self.args.output_dir, self.run_record()
        check_output_dir(folder, getattr(self.args, "overwrite", False), resume_from_checkpoint)
        checkpoint, seen = None, dict(record)
        if resume_from_checkpoint:
            checkpoint = self._checkpoint(resume_from_checkpoint, record)
            seen["checkpoint"] = checkpoint and Path(checkpoint).name
            seen["finished"] = "finished" in read_record(folder)
        check_ranks(seen)
        if resume_from_checkpoint:
            result = self._result_of(checkpoint)
            if result is not None:
                return result
        if checkpoint:
            record["run"] = read_record(checkpoint).get("run") or record["run"]
        self.outdated = [] if checkpoint else sort_checkpoints(str(folder))
        self.record = record
        self.accelerator.wait_for_everyone()  # every rank has read the folder
        if self.args.should_save:
            write_record(folder, record)
            if checkpoint:
                write_record(checkpoint, record)  # one of release 0.1 had none
        try:
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)
        finally:
            close_progress_bars(self)

    def _checkpoint(self, resume_from_checkpoint, record):
        "The checkpoint to continue from, checked; None: start at step 0."
        folder = self.args.output_dir
        if resume_from_checkpoint is True:
            checkpoint = newest_checkpoint(folder)
        else:
            checkpoint = named_checkpoint(resume_from_checkpoint, folder)
        if checkpoint:
            check_same_run(checkpoint, record, getattr(self.model, "config", None))
        self._keep_rows(read_record(checkpoint or folder), record)
        return checkpoint

    def _keep_rows(self, old, record):
        "A step keeps its rows on another number of ranks: each accumulates more or fewer."
        steps, args = accumulation(old, record), self.args
        if steps is None or not old:
            return
        record["rows_in_step"] = steps * args.data_ranks
        if steps != args.gradient_accumulation_steps:
            args.gradient_accumulation_steps = steps
            log.warning(
                f"The run was on {old['world_size']} ranks, and is on {args.world_size}: "
                f"gradient_accumulation_steps={steps} here, so that a step keeps its {record['rows_in_step']} rows."
            )

    def _result_of(self, checkpoint) -> TrainOutput | None:
        """The trained model, where no step is left to take; None: training continues from the
        checkpoint, if any. Errors: ValueError where it would have to, and there is none."""
        folder: Any = self.args.output_dir
        finished = read_record(folder).get("finished")
        if not checkpoint and not finished:
            return None
        state_file = os.path.join(folder if finished else checkpoint, TRAINER_STATE_NAME)
        state = TrainerState.load_from_json(state_file)
        planned = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        step = state.global_step
        if finished and (finished["planned"] == planned or finished["step"] >= planned):
            self.done = True
            message = f"{folder}: the run has finished at step {step}; nothing is left to do."
            return self._take(state, folder, message)
        self.state = state
        self._load_callback_state()
        if checkpoint and (step >= planned or (not finished and self._patience_ended())):
            state.max_steps = planned  # by this call; the checkpoint may be of a longer run
            best = state.best_model_checkpoint if self.args.load_best_model_at_end else None
            source = best or checkpoint
            message = f"all {step} steps were taken before; the drafter is that of {source}."
            return self._take(state, source, f"{folder}: {message}")
        if finished and not checkpoint:
            raise ValueError(
                f"output_dir={str(folder)!r}: that run has finished at step {finished['step']} and kept no checkpoint "
                "to continue from; train in another folder, with from_pretrained (--from-pretrained) for its weights"
            )

    def _take(self, state, source, message):
        self.state = state
        self._load_from_checkpoint(source)
        log.warning(message)
        return TrainOutput(state.global_step, 0.0, {})

    def _patience(self):
        return [c for c in self.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]

    def _patience_ended(self):
        return any(c.early_stopping_patience_counter >= c.early_stopping_patience for c in self._patience())

    def has_ended(self) -> bool:
        "Whether all steps were taken, or patience has ended; else a callback, or a user, has stopped the run before."
        return self.state.global_step >= self.state.max_steps or self._patience_ended()

    def finish(self) -> None:
        "Record in the output folder that the run has ended, and at which step."
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir))
        with atomic_write(folder / TRAINER_STATE_NAME) as temporary:
            self.state.save_to_json(str(temporary))
        finished = {"step": self.state.global_step, "planned": self.state.max_steps}
        write_record(folder, read_record(folder) | {"finished": finished})

    # ---- saves

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, ".saving") if self.saving else folder

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staging = folder / ".saving"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.saving = False
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder / name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(staging / name / TRAINER_STATE_NAME))
            write_record(staging / name, self.record)
            self._publish(staging, folder / name)
        self.accelerator.wait_for_everyone()

    def _publish(self, staging, final):
        "Rename the new checkpoint to its place, then delete old ones: each is renamed first."
        replaced, self.outdated = self.outdated, ()
        for old in map(Path, replaced):
            old.rename(staging / f"outdated-{old.name}")
        if final.exists():
            final.rename(staging / "replaced")
        (staging / final.name).rename(final)
        limit = self.args.save_total_limit
        for old in map(Path, surplus_checkpoints(final.parent, self.state, limit)):
            old.rename(staging / old.name)
        shutil.rmtree(staging)

    def _determine_best_metric(self, metrics, trial):
        "Only what is saved can be the best: it is loaded at the end."
        at_end = self.args.load_best_model_at_end and self.args.save_strategy != SaveStrategy.BEST
        return (self.control.should_save or not at_end) and super()._determine_best_metric(metrics, trial)

    @property
    def _in_shards(self):
        "Whether what is being saved is a checkpoint of which each rank writes its part."
        sharded = self.saving and is_sharded(self.model)
        return sharded and self.args.checkpoint_format == "sharded"

    def save_model(self, output_dir=None, _internal_call=False):
        "Save the drafter, gathered if it is sharded; on every rank."
        if not is_sharded(self.model):
            return super().save_model(output_dir, _internal_call)
        state = {}
        if not self._in_shards:
            saved = getattr(self.model, "saved_state", self.model.state_dict)
            state = gather(saved(), keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir=None, state_dict=None):
        if self._in_shards:
            save_model_config(output_dir or self.args.output_dir, self.model)
        else:
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        if not is_sharded(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        save_training_state(
            output_dir,
            self.model,
            self.optimizer,
            self.lr_scheduler,
            in_shards=self._in_shards,
            keep=self.args.should_save,
        )

    # ---- loads

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Load all weights, or the adapter where the others are frozen. Errors: ValueError naming the tensors that are
        missing or differ."""
        if adapted(self.model):
            load_adapter(self.model, Path(resume_from_checkpoint) / "adapter")
            return
        if has_shards(resume_from_checkpoint):
            load_model_shards(resume_from_checkpoint, self.model)
            return
        if isinstance(self.model, SpeculatorModel):
            self.model.check_state(read_state(resume_from_checkpoint), resume_from_checkpoint)
        if is_sharded(self.model):
            load_whole(self.model, read_state(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        best: Any = self.state.best_model_checkpoint
        if is_sharded(self.model) or has_shards(best) or adapted(self.model):
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint):
        with _readable(checkpoint, "optimizer.pt or scheduler.pt"):
            if checkpoint and has_shards(checkpoint):
                load_training_shards(checkpoint, self.model, self.optimizer, self.lr_scheduler)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
                if checkpoint and is_sharded(self.model):
                    split_states(plain_optimizer(self.optimizer))
        optimizer: Any = self.optimizer
        state = optimizer.state_dict()["state"] if checkpoint else {}
        tensors = (t for part in state.values() for t in part.values() if torch.is_tensor(t))
        if not all(bool(local(t).isfinite().all()) for t in tensors):
            raise ValueError(
                f"cannot resume from {checkpoint}: optimizer.pt holds values that are not "
                "finite; resume from an older checkpoint, by its folder"
            )

    def _load_callback_state(self):
        "Evaluations are counted on; how many to wait is what this call says."
        given = self._patience()
        super()._load_callback_state()
        for callback, new in zip(self._patience(), given):
            callback.early_stopping_patience = new.early_stopping_patience
            callback.early_stopping_threshold = new.early_stopping_threshold

    def _load_rng_state(self, checkpoint):
        with _readable(checkpoint, "its random state (rng_state*.pth)"):
            super()._load_rng_state(checkpoint)

    def _init_training_state(self, *args):
        steps_taken = super()._init_training_state(*args)
        state = self.state
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        best = Path(str(self.args.output_dir)) / name
        if state.best_global_step and state.best_model_checkpoint is None and best.is_dir():
            state.best_model_checkpoint = str(best)  # the folder was moved
        return steps_taken
