"""Sharded checkpoints: each rank writes its rows to a safetensors file of its own.
Any number of ranks reads them again; there is no pickle."""

import json
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

from ..core.checkpoints import load_tensors
from ..core.files import atomic_write, read_object
from .sharding import local

SHARDS = "shards"  # the folder inside a checkpoint
INDEX = "shards.json"  # in that folder: the size of each file, the learning rate of each weight


def model_tensors(
    model: Any,  # sharded or not
) -> dict[str, Tensor]:  # "model.{name}" -> tensor
    "What a checkpoint keeps of a model."
    saved = model.saved_state() if hasattr(model, "saved_state") else model.state_dict()
    return {f"model.{name}": weight for name, weight in saved.items()}


def _updated(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor, dict]]:
    "Name, weight and group of what the optimizer updates."
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield names[id(p)], p, group


def optimizer_tensors(
    model: nn.Module,  # sharded or not
    optimizer: torch.optim.Optimizer,  # of its parameters
) -> dict[str, Tensor]:  # "optimizer.{moment}.{name of the weight}" -> tensor
    "What a checkpoint keeps of an optimizer."
    return {
        f"optimizer.{key}.{name}": value
        for name, p, _ in _updated(model, optimizer)
        for key, value in optimizer.state.get(p, {}).items()
        if torch.is_tensor(value)
    }


def save_shards(
    folder: str | os.PathLike,  # a new one, which all ranks see
    model: nn.Module,  # sharded or not
    optimizer: torch.optim.Optimizer,  # of its parameters
) -> None:
    "Write model and optimizer, each rank its part; on every rank at the same time."
    folder = Path(folder)
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    distributed = torch.distributed.is_initialized()
    save(tensors, storage_writer=writer, no_dist=not distributed)
    if distributed and torch.distributed.get_rank() != 0:
        return
    index = {
        "files": {f.name: f.stat().st_size for f in sorted(folder.glob("*.safetensors"))},
        "learning_rates": {name: g["lr"] for name, _, g in _updated(model, optimizer)},
    }
    with atomic_write(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1), encoding="utf-8")


def has_shards(
    checkpoint: str | os.PathLike,  # a checkpoint-N folder
) -> bool:
    "Whether a checkpoint is a sharded one."
    return (Path(checkpoint) / SHARDS).is_dir()


def shards_problem(
    checkpoint: str | os.PathLike,  # a checkpoint-N folder that `has_shards`
) -> str | None:  # what is missing or cut off; None: nothing
    "Check that every file is there and whole, without reading tensors."
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


def stored_tensors(
    checkpoint: str | os.PathLike,  # a checkpoint-N folder that `has_shards`
) -> dict[str, Tensor]:  # on the meta device: shapes and dtypes
    "What a sharded checkpoint holds, without reading it."
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


def load_model_shards(
    checkpoint: str | os.PathLike,  # a checkpoint-N folder that `has_shards`
    model: nn.Module,  # sharded over any number of ranks, or not
) -> None:
    "Read the weights; on every rank at the same time."
    with torch.no_grad():
        _read(checkpoint, model_tensors(model), stored_tensors(checkpoint))


def load_optimizer_shards(
    checkpoint: str | os.PathLike,  # a checkpoint-N folder that `has_shards`
    model: nn.Module,  # sharded over any number of ranks, or not
    optimizer: torch.optim.Optimizer,  # of its parameters
) -> None:
    "Read moments and learning rates; on every rank at the same time."
    stored, wanted = stored_tensors(checkpoint), {}
    rates = read_object(Path(checkpoint) / SHARDS / INDEX).get("learning_rates", {})
    for name, p, group in _updated(model, optimizer):
        group["lr"] = rates.get(name, group["lr"])
        for full_name, like in stored.items():
            kind, _, rest = full_name.partition(".")
            key, _, of = rest.partition(".")
            if kind != "optimizer" or of != name:
                continue
            new = torch.zeros_like(p) if like.shape == p.shape else torch.zeros(like.shape)
            optimizer.state[p][key] = wanted[full_name] = new.detach()
    _read(checkpoint, wanted, stored)
