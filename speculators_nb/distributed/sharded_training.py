"""Training with weights that are split over the ranks (FSDP2).
They are gathered for the drafter's folder, and checkpoints are written and read whole or in shards."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .shard_files import SHARDS, load_optimizer_shards, save_shards
from .sharding import gather, is_sharded, part_of, shard, unsharded_class


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


def save_model_config(
    folder: str | os.PathLike,  # of a checkpoint in shards; it is made
    model: Any,  # a sharded drafter
) -> None:
    "Write the drafter's config.json, of the class that it has without shards."
    os.makedirs(folder, exist_ok=True)
    config = getattr(model, "config", None)
    if config is not None:
        config.architectures = [unsharded_class(model).__name__]
        config.save_pretrained(folder)


def save_training_state(
    folder: str | os.PathLike,  # of a checkpoint
    model: Any,  # a sharded drafter
    optimizer: Any,  # of its parameters, maybe in accelerate's wrapper
    scheduler: Any,  # of the learning rate
    in_shards: bool,  # each rank writes its part, of the weights too
    keep: bool,  # whether this rank writes what is whole
) -> None:
    "Write what a resume needs beside the drafter; on every rank at the same time."
    folder, optimizer = Path(folder), plain_optimizer(optimizer)
    if in_shards:
        save_shards(folder / SHARDS, model, optimizer)
    else:
        state = gather(optimizer.state_dict(), keep)
        if keep:
            torch.save(state, folder / OPTIMIZER_NAME)
    if keep:
        torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_training_shards(
    checkpoint: str | os.PathLike,  # a checkpoint-N folder that `has_shards`
    model: Any,  # sharded or not
    optimizer: Any,  # of its parameters, maybe in accelerate's wrapper
    scheduler: Any,  # of the learning rate
) -> None:
    "Read what `save_training_state` has written in shards; on every rank at the same time."
    load_optimizer_shards(checkpoint, model, plain_optimizer(optimizer))
    scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


LAUNCHER = {  # what accelerate's configuration may switch on -> what to do instead
    "fsdp": "drafters are sharded by the trainer; leave it out there, and give fsdp (--fsdp)",
    "deepspeed": (
        "it was never tried with these models; leave it out, several devices train with DDP "
        "or, with fsdp (--fsdp), sharded (speculators-nb-torchrun)"
    ),
}


def shard_model(
    trainer: Any,  # a transformers.Trainer whose arguments have `fsdp`
) -> None:
    """Split its weights over the ranks, if that is wanted; before an optimizer is made.
    Errors: ValueError where accelerate's own configuration switches it on."""
    for name, remedy in LAUNCHER.items():
        if getattr(trainer, f"is_{name}_enabled"):
            raise ValueError(f"{name} is switched on by accelerate's configuration: {remedy}.")
    model = trainer.model
    if not trainer.args.fsdp:
        return
    if not is_sharded(model):
        shard(model)
    if not getattr(model, "_is_accelerate_prepared", False):
        # autocast, and no DDP
        trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        model._is_accelerate_prepared = True
