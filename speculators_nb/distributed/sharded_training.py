"""transformers' Trainer with weights that are split over the ranks (FSDP2).
It gathers them for the drafter's folder, and writes and reads checkpoints whole or in shards."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..core.checkpoints import read_state
from .shard_files import SHARDS, has_shards, load_model_shards, load_optimizer_shards, save_shards
from .sharding import gather, is_sharded, load_whole, part_of, shard, unsharded_class


def whole_copy(
    model: Any,  # a sharded drafter
    keep: bool,  # whether this rank gets the copy
) -> Any:  # a drafter that is not sharded; None without `keep`
    "Gather a drafter into a copy that one rank can use alone; on every rank at the same time."
    state = gather(model.state_dict(), keep)
    if not keep:
        return None
    whole = copy.deepcopy(model._skeleton[0])
    whole.load_state_dict(state, assign=True)
    return whole.to(next(model.parameters()).device).eval()


def for_first_rank(
    model: Any,  # a drafter, sharded or not
    args: TrainingArguments,  # which rank this is
) -> Any:  # a drafter that the first rank can use alone; None on the others
    "The drafter itself, or a copy of a sharded one; on every rank at the same time."
    first = args.process_index == 0
    if is_sharded(model):
        return whole_copy(model, first)
    return model if first else None


def plain_optimizer(
    optimizer: Any,  # maybe in accelerate's wrapper
) -> torch.optim.Optimizer:
    "The optimizer itself."
    return getattr(optimizer, "optimizer", optimizer)


def split_states(
    optimizer: torch.optim.Optimizer,  # of sharded parameters, with whole states
) -> None:
    "Let each rank keep its rows of every state, in place."
    for p, state in optimizer.state.items():
        for key, value in state.items():
            whole = torch.is_tensor(value) and not isinstance(value, DTensor)
            if isinstance(p, DTensor) and whole and value.shape == p.shape:
                state[key] = part_of(value, p)


class ShardedSaves(Trainer):
    "transformers' Trainer that writes a sharded drafter's checkpoints, whole or in shards."

    args: Any  # with `fsdp` and `checkpoint_format`
    model: Any  # a drafter
    saving: bool  # a checkpoint is being written

    @property
    def _in_shards(self):
        return self.saving and self.args.checkpoint_format == "sharded"

    def save_model(self, output_dir=None, _internal_call=False):
        "Gather the drafter and save it; on every rank."
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
        if not (is_sharded(self.model) and self._in_shards):
            return super()._save(output_dir, state_dict)
        folder: Any = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        config = getattr(self.model, "config", None)
        if config is not None:
            config.architectures = [unsharded_class(self.model).__name__]
            config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir):
        if not is_sharded(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        folder, optimizer = Path(output_dir), plain_optimizer(self.optimizer)
        if self._in_shards:
            save_shards(folder / SHARDS, self.model, optimizer)
        else:
            state = gather(optimizer.state_dict(), keep=self.args.should_save)
            if self.args.should_save:
                torch.save(state, folder / OPTIMIZER_NAME)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)


class ShardedLoads(ShardedSaves):
    "It reads both kinds, whatever wrote them."

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if has_shards(resume_from_checkpoint):
            load_model_shards(resume_from_checkpoint, self.model)
        elif is_sharded(self.model):
            load_whole(self.model, read_state(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        best: Any = self.state.best_model_checkpoint
        if is_sharded(self.model) or has_shards(best):
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint):
        if not checkpoint or not has_shards(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint and is_sharded(self.model):
                split_states(plain_optimizer(self.optimizer))
            return
        load_optimizer_shards(checkpoint, self.model, plain_optimizer(self.optimizer))
        scheduler: Any = self.lr_scheduler
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        scheduler.load_state_dict(state)


LAUNCHER = {  # what accelerate's configuration may switch on -> what to do instead
    "fsdp": "drafters are sharded by the trainer; leave it out there, and give fsdp (--fsdp)",
    "deepspeed": (
        "it was never tried with these models; leave it out, several devices train with DDP "
        "or, with fsdp (--fsdp), sharded (speculators-nb-torchrun)"
    ),
}


class ShardedTraining(ShardedLoads):
    """transformers' Trainer that shards its drafter where `fsdp` is set, and reads and writes
    checkpoints both ways."""

    def shard_model(self) -> None:
        """Split the weights over the ranks, if that is wanted; before an optimizer is made.
        Errors: ValueError where accelerate's own configuration switches it on."""
        for name, remedy in LAUNCHER.items():
            if getattr(self, f"is_{name}_enabled"):
                raise ValueError(f"{name} is switched on by accelerate's configuration: {remedy}.")
        if not self.args.fsdp:
            return
        if not is_sharded(self.model):
            shard(self.model)
        if not getattr(self.model, "_is_accelerate_prepared", False):
            options: dict = dict(device_placement=False, evaluation_mode=True)
            self.accelerator.prepare_model(self.model, **options)  # autocast, and no DDP
            self.model._is_accelerate_prepared = True
