"""Training with weights that are split over the ranks (FSDP2).
They are gathered for the drafter's folder, and checkpoints are written and read whole or in shards: each rank writes
its rows to a safetensors file of its own, any number of ranks reads them again, and there is no pickle."""

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..core.checkpoints import load_tensors
from ..core.files import read_object, write_object
from .sharding import gather, is_sharded, local, part_of, shard, split_again, unsharded_class

SHARDS = "shards"  # the folder inside a checkpoint
INDEX = "shards.json"  # in that folder: the size of each file, the learning rate of each weight


def model_tensors(model: Any) -> dict[str, Tensor]:
    "What a checkpoint keeps of a model, sharded or not: model.{name} -> tensor."
    saved = model.saved_state() if hasattr(model, "saved_state") else model.state_dict()
    return {f"model.{name}": weight for name, weight in saved.items()}


def _updated(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor, dict]]:
    "Name, weight and group of what the optimizer updates."
    split_again(model)
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield names[id(p)], p, group


def save_shards(folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    "Write model and optimizer to a new folder that all ranks see, each rank its part; on every rank at the same time."
    folder = Path(folder)
    moments = {  # optimizer.{moment}.{name of the weight} -> tensor
        f"optimizer.{key}.{name}": value
        for name, p, _ in _updated(model, optimizer)
        for key, value in optimizer.state.get(p, {}).items()
        if torch.is_tensor(value)
    }
    tensors = model_tensors(model) | moments
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    distributed = torch.distributed.is_initialized()
    save(tensors, storage_writer=writer, no_dist=not distributed)
    if distributed and torch.distributed.get_rank() != 0:
        return
    index = {
        "files": {f.name: f.stat().st_size for f in sorted(folder.glob("*.safetensors"))},
        "learning_rates": {name: g["lr"] for name, _, g in _updated(model, optimizer)},
    }
    write_object(folder / INDEX, index)


def has_shards(checkpoint: str | os.PathLike) -> bool:
    "Whether a checkpoint-N folder is a sharded one."
    return (Path(checkpoint) / SHARDS).is_dir()


def shards_problem(checkpoint: str | os.PathLike) -> str | None:
    """What is missing or cut off in a checkpoint that `has_shards`, found without reading tensors; None: every file is
    there and whole."""
    folder = Path(checkpoint) / SHARDS
    try:
        files = read_object(folder / INDEX).get("files")
        if not isinstance(files, dict) or not files:
            return f"{folder / INDEX}: names no files"
        for name, size in files.items():
            file = folder / Path(name).name
            load_tensors(file, [])
            if file.stat().st_size != size:
                return f"{file}: has {file.stat().st_size} bytes, {size} were written"
    except (OSError, ValueError) as e:
        return str(e)


def stored_tensors(checkpoint: str | os.PathLike) -> dict[str, Tensor]:
    "Shapes and dtypes, on the meta device, of what a checkpoint that `has_shards` holds, without reading it."
    metadata = HuggingFaceStorageReader(str(Path(checkpoint) / SHARDS)).read_metadata()
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _read(checkpoint, wanted: dict[str, Tensor], stored: Mapping[str, Tensor]):
    "Fill tensors in place. Errors: ValueError naming what is missing, or of another shape."
    missing = sorted(wanted.keys() - stored.keys())
    wrong = [n for n in wanted.keys() & stored.keys() if wanted[n].shape != stored[n].shape]
    for what, names in (("misses", missing), ("has another shape of", sorted(wrong))):
        if names:
            raise ValueError(
                f"cannot resume from {checkpoint}: it {what} {', '.join(names[:5])}; it is of "
                "another model, take another checkpoint"
            )
    reader = HuggingFaceStorageReader(str(Path(checkpoint) / SHARDS))
    load(wanted, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    floats = {name: local(t) for name, t in wanted.items() if t.is_floating_point()}
    if bad := [name for name, t in floats.items() if not t.isfinite().all()]:
        raise ValueError(
            f"cannot resume from {checkpoint}: {bad[0]} holds values that are not finite; "
            "resume from an older checkpoint, by its folder"
        )


def load_model_shards(checkpoint: str | os.PathLike, model: nn.Module) -> None:
    """Read the weights of a checkpoint that `has_shards` into a model that is sharded over any number of ranks, or not;
    on every rank at the same time."""
    with torch.no_grad():
        _read(checkpoint, model_tensors(model), stored_tensors(checkpoint))


def for_first_rank(model: Any, args: TrainingArguments) -> Any:
    """The drafter itself, or a sharded one gathered into a copy that one rank can use alone, on the first rank, and
    None on the others; on every rank at the same time."""
    first = args.process_index == 0
    if not is_sharded(model):
        return model if first else None
    state = gather(model.state_dict(), first)
    if not first:
        return None
    whole = copy.deepcopy(model._skeleton[0])
    whole.load_state_dict(state, assign=True)
    return whole.to(next(model.parameters()).device).eval()


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    "The optimizer itself, which may be in accelerate's wrapper."
    return getattr(optimizer, "optimizer", optimizer)


def split_states(optimizer: torch.optim.Optimizer) -> None:
    "Let each rank keep its rows of every state of sharded parameters, in place."
    for p, state in optimizer.state.items():
        for key, value in state.items():
            whole = torch.is_tensor(value) and not isinstance(value, DTensor)
            if isinstance(p, DTensor) and whole and value.shape == p.shape:
                state[key] = part_of(value, p)


def save_model_config(folder: str | os.PathLike, model: Any) -> None:
    "Write a sharded drafter's config.json, of the class that it has without shards, into a folder, which is made."
    os.makedirs(folder, exist_ok=True)
    config = getattr(model, "config", None)
    if config is not None:
        config.architectures = [unsharded_class(model).__name__]
        config.save_pretrained(folder)


def save_training_state(
    folder: str | os.PathLike, model: Any, optimizer: Any, scheduler: Any, in_shards: bool, keep: bool
) -> None:
    """Write what a resume needs beside the drafter; on every rank at the same time. In shards each rank writes its
    part, of the weights too; `keep`: this rank writes what is whole."""
    folder, optimizer = Path(folder), plain_optimizer(optimizer)
    if in_shards:
        save_shards(folder / SHARDS, model, optimizer)
    else:
        state = gather(optimizer.state_dict(), keep)
        if keep:
            torch.save(state, folder / OPTIMIZER_NAME)
    if keep:
        torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_training_shards(checkpoint: str | os.PathLike, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Read moments, learning rates and the scheduler's state, which `save_training_state` has written in shards, for a
    model that is sharded over any number of ranks, or not; on every rank at the same time."""
    optimizer = plain_optimizer(optimizer)
    stored, wanted = stored_tensors(checkpoint), {}
    rates = read_object(Path(checkpoint) / SHARDS / INDEX).get("learning_rates", {})
    for name, p, group in _updated(model, optimizer):
        group["lr"] = rates.get(name, group["lr"])
        for full_name, like in stored.items():
            kind, _, rest = full_name.partition(".")
            key, _, of = rest.partition(".")
            if kind != "optimizer" or of != name:
                continue
            new = torch.zeros_like(p) if like.shape == p.shape else torch.zeros(like.shape, device=p.device)
            optimizer.state[p][key] = wanted[full_name] = new.detach()
    _read(checkpoint, wanted, stored)
    scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


LAUNCHER = {  # what accelerate's configuration may switch on -> what to do instead
    "fsdp": "drafters are sharded by the trainer; leave it out there, and give fsdp (--fsdp)",
    "deepspeed": (
        "it was never tried with these models; leave it out, several devices train with DDP "
        "or, with fsdp (--fsdp), sharded (speculators-nb-torchrun)"
    ),
}


def shard_model(trainer: Any) -> None:
    """Split the weights of a Trainer's model over the ranks if its arguments have `fsdp`; before an optimizer is made.
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
