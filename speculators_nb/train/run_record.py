"""The record of a training run (`run.json`): settings, fingerprint of the data, verifier.
A resume compares it, and an error names what has changed."""

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from ..core.files import read_object, write_object
from .packed_loaders import lengths_of

SAMPLED_ROWS = 256  # rows whose tokens are hashed


def data_fingerprint(lengths: list[int], tokens: Callable) -> str:
    """A hash, 16 hex digits, of the lengths of all rows, and of the tokens and masks (`tokens`: row -> input_ids [n],
    loss_mask [n]) of at most `SAMPLED_ROWS` of them."""
    h = hashlib.sha256(np.asarray(lengths, np.int64).tobytes())
    for i in np.unique(np.linspace(0, len(lengths) - 1, SAMPLED_ROWS).astype(int)):
        input_ids, loss_mask = tokens(int(i))
        h.update(np.asarray(input_ids, np.int64).tobytes())
        h.update(np.asarray(loss_mask, bool).tobytes())
    return h.hexdigest()[:16]


def data_record(dataset: Any) -> dict:
    "What a run was trained on: rows and fingerprint of samples, perhaps a `Subset`; empty without samples."
    if not dataset:
        return {}
    lengths = lengths_of(dataset)
    source, indices = dataset, range(len(lengths))
    if isinstance(dataset, Subset):
        source, indices = dataset.dataset, dataset.indices

    def tokens(row):
        if read := getattr(source, "tokens", None):
            return read(indices[row])
        sample = source[indices[row]]
        return sample["input_ids"], sample["loss_mask"]

    return {"rows": len(lengths), "fingerprint": data_fingerprint(lengths, tokens)}


def layers_record(model: Any) -> dict:
    "What a drafter's layers, if it has any, attend to: weights of the same shapes fit any window."
    layer = getattr(getattr(model, "config", None), "transformer_layer_config", None)
    names = ("layer_types", "sliding_window", "hidden_act") if layer is not None else ()
    return {name: getattr(layer, name, None) for name in names}


RECORD = "run.json"
SETTINGS = (
    *("seed", "data_seed", "total_seq_len", "regenerate_every", "regenerate_temperature", "optimizer"),
    *("learning_rate", "muon_learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "bf16", "fp16"),
)


def _plain(value) -> Any:
    "A value as JSON keeps it."
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", str(value))  # of another process


def run_record(
    args: Any, data: Mapping | None = None, verifier: str | None = None, arguments: Mapping | None = None
) -> dict:
    """What `run.json` holds of a run that begins now: how to train, the data (`data_record`), the fingerprint of the
    verifier that made the features, which evaluation is the best, the model's own training arguments, e.g. the loss."""
    return {
        "run": secrets.token_hex(6),
        "data": dict(data or {}),
        "verifier": verifier,
        "metric_for_best_model": (args.metric_for_best_model or "").removeprefix("eval_"),
        "world_size": args.world_size,
        "context_parallel_size": args.context_parallel_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "rows_in_step": args.data_ranks * args.gradient_accumulation_steps,
        "settings": {name: _plain(getattr(args, name)) for name in SETTINGS if hasattr(args, name)},
        "model": _plain(arguments or {}),
    }


def flat(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    "Nested mappings as {dotted name: value}."
    out = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and value
        out |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return out


def differences(old: Mapping, new: Mapping) -> list[str]:
    """What differs between nested mappings of plain values, among the names that both have: learning_rate was 0.001, is
    0.01."""
    a, b = flat(_plain(old)), flat(_plain(new))
    return [f"{name} was {a[name]!r}, is {b[name]!r}" for name in a if name in b and a[name] != b[name]]


def _readers(record) -> int:
    "How many rows are read at a time."
    return record["world_size"] // record.get("context_parallel_size", 1)


def _rows_in_step(record):
    return record.get("rows_in_step", record["world_size"] * record["gradient_accumulation_steps"])


def accumulation(old: Mapping, new: Mapping) -> int | None:
    """`gradient_accumulation_steps` with which a step of the call at hand has as many rows as one of a checkpoint, by
    their records; None: it would take other rows."""
    steps, ranks = new["gradient_accumulation_steps"], _readers(new)
    if not old.get("world_size"):
        return steps
    rows = _rows_in_step(old)
    if steps * ranks == rows:
        return steps
    same_command = steps == old["gradient_accumulation_steps"]
    return rows // ranks if same_command and rows % ranks == 0 else None


def _rows_change(old, new):
    "Why a step cannot keep its rows, and what would keep them."
    rows, readers, ranks = _rows_in_step(old), _readers(new), new["world_size"]
    steps, rest = divmod(rows, readers)
    remedy = f"give gradient_accumulation_steps={steps}"
    if rest:
        sharing = ranks // readers  # a row
        fitting = ", ".join(str(n * sharing) for n in range(1, rows + 1) if rows % n == 0)
        remedy = f"continue on a number of ranks that divides {rows * sharing}: {fitting}"
    now = readers * new["gradient_accumulation_steps"]
    return f"rows in a step was {rows}, is {now} on {ranks} ranks ({remedy})"


def run_changes(old: Mapping, new: Mapping) -> list[str]:
    """Why a call at hand cannot continue a checkpoint, by their records; empty: it can. What only one of them knows is
    not compared."""
    changes = differences(old.get("settings", {}), new["settings"])
    changes += differences(old.get("model", {}), new["model"])
    names = {"rows": "training rows", "fingerprint": "training data"}
    data = [{names[key]: value for key, value in record.get("data", {}).items()} for record in (old, new)]
    changes += differences(*data)[:1]
    for name in ("verifier", "metric_for_best_model"):
        if old.get(name) and new.get(name):
            changes += differences({name: old[name]}, {name: new[name]})
    if accumulation(old, new) is None:
        changes.append(_rows_change(old, new))
    return changes


def write_record(folder: str | os.PathLike, record: Mapping) -> None:
    "Write `run.json` of an output folder or a checkpoint, atomically."
    write_object(Path(folder) / RECORD, record)


def read_record(folder: str | os.PathLike) -> dict[str, Any]:
    """Read `run.json` of an output folder or a checkpoint, or what `training_args.json` of release 0.1 knows; empty:
    there is no record. Errors: ValueError for a damaged file."""
    for name in (RECORD, "training_args.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        record = read_object(file)
        for part in ("settings", "data", "model"):
            if not isinstance(record.get(part) or {}, dict):
                raise ValueError(f"{file}: {part}={record[part]!r} must be an object; take another checkpoint")
        if name == RECORD:
            return record
        return {"settings": {n: record[n] for n in SETTINGS if n in record}, "model": record.get("model") or {}}
    return {}
