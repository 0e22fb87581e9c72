"""Folders of hidden states, written by one verifier (target model) for one table of rows.
They are resumed after any interruption, and read in our layout and in those of upstream speculators."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock
from tqdm.auto import tqdm

from ..core.files import DiskError, disk_errors, read_object, write_object
from ..data.chat_encoding import save_prepared
from ..data.messages import picture_digests
from ..data.prepared_folder import config_of, read_data_config
from ..data.sources import load_table
from ..verifier.folders import layout_of, legacy_files, refuse_model
from .feature_rows import (
    FOLDER,
    FeatureError,
    FeatureRow,
    FeatureRows,
    FeatureShards,
    ShardWriter,
    feature_path,
    legacy_layer_ids,
    read_features,
    read_legacy,
    remove_half_files,
    remove_unfinished,
    stored_dtype,
    write_features,
)


class RowTokens:
    "The token ids of each row of a table, read when they are asked for."

    def __init__(self, dataset: Dataset):
        self.table = dataset.select_columns(["input_ids"]).with_format("numpy")

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i: int) -> np.ndarray:  # [n]
        row: Any = self.table[int(i)]
        return row["input_ids"]

    def __iter__(self) -> Iterator[np.ndarray]:
        "All rows in turn, a thousand at a time."
        batch: Any
        for batch in self.table.iter(1000):
            yield from batch["input_ids"]


def split_of(dataset: Dataset) -> dict:
    """Which rows were held out when a table was prepared, the last m: {"split": {"train": n, "val": m}} where its
    folder says so, else {}."""
    split = config_of(dataset).get("split")
    return {"split": split} if split and sum(split.values()) == len(dataset) else {}


def table_of(rows: Dataset | str | os.PathLike) -> Dataset:
    "A prepared table, or that of a folder, with a column seq_len. FileNotFoundError: there is none."
    if not isinstance(rows, Dataset):
        folder = Path(rows).expanduser()
        folders = [f for f in (folder, folder / "rows") if (f / "state.json").is_file()]
        if not folders:
            raise FileNotFoundError(f"rows={str(rows)!r}: no prepared table there; make one with prepare_data")
        rows = load_table(folders[0]).with_format(None)
    if "seq_len" in rows.column_names:
        return rows
    return rows.add_column("seq_len", [len(ids) for ids in RowTokens(rows)])


def origin(model: dict, layer_ids: list[int], dataset: Dataset, dtype: torch.dtype | str) -> dict:
    """What a feature folder is made of, the content of data_config.json: what is known of the verifier, of which
    "fingerprint" is compared, the layers of the stored slots, the last one included, rows with input_ids and seq_len,
    and pictures, dtype of the states."""
    rows = hashlib.sha256()
    for ids in RowTokens(dataset):
        rows.update(len(ids).to_bytes(4, "little") + ids.astype(np.int64).tobytes())
    if "messages" in dataset.column_names:
        row: Any
        for row in dataset.select_columns(["messages"]).with_format(None):
            for digest in picture_digests(row["messages"]):
                rows.update(digest.encode())
    versions = {p: version(p) for p in ("torch", "transformers", "safetensors")}
    return {
        "version": "3.0",
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "reproducibility": {"package_versions": versions},
        "model": model,
        "data": {
            "num_samples": len(dataset),
            "num_tokens": int(sum(dataset["seq_len"])),
            "fingerprint": rows.hexdigest()[:16],
            **split_of(dataset),
        },
        "hidden_states": {
            "layer_ids": [int(i) for i in layer_ids],
            "dtype": str(stored_dtype(dtype)).removeprefix("torch."),
            "description": ("residual stream entering each layer; the last slot is the stream before the final norm"),
        },
        "format": {
            "file_pattern": "hs_{i}.safetensors",
            "schema": {"hidden_states": ["seq", "A+1", "H"], "token_ids": ["seq"]},
        },
    }


ORIGIN = [  # part and field that must not change
    ("model", "fingerprint"),
    ("hidden_states", "layer_ids"),
    ("hidden_states", "dtype"),
    ("data", "fingerprint"),
]


def check_origin(path: str | os.PathLike, config: dict) -> None:
    """ValueError if the folder of this data_config.json was made by another verifier, of other layers or rows, or in
    another dtype than `config` of `origin` says."""
    folder = Path(path).parent
    recorded = read_data_config(folder)
    compared = [(f"{part}.{field}", recorded.get(part, {}).get(field), config[part][field]) for part, field in ORIGIN]
    if changed := [f"{name} was {was}, is {now}" for name, was, now in compared if was != now]:
        raise ValueError(
            f"{folder} holds features of another origin: {'; '.join(changed)}. Choose a new folder, or delete this one"
        )


def _same_masks(*tables):
    "Whether two tables of the same tokens are trained at the same positions."
    columns = [table.select_columns(["loss_mask"]).with_format("arrow").iter(1000) for table in tables]
    return all(ours.equals(theirs.cast(ours.schema)) for ours, theirs in zip(*columns))


def _set_up(folder, dataset, config):
    "Write the rows and their record into a folder; one process at a time."
    refuse_model(folder, drafters=True)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / "data_config.json"
    with disk_errors(folder), FileLock(folder / ".setup.lock"):
        for unfinished in folder.glob(".rows.*"):  # of a process that was killed here
            shutil.rmtree(unfinished, ignore_errors=True)
        if file.exists():
            check_origin(file, config)
            was = read_data_config(folder)["data"].get("split")
            split = config["data"].get("split", was)
            if split == was and _same_masks(load_table(folder / "rows"), dataset):
                return
            log.warning("%s: its rows get the loss mask and the split that they have now; their features stay", folder)
            config = config | {"data": config["data"] | ({"split": split} if split else {})}
        save_prepared(dataset.with_format("torch"), folder / "rows")  # as upstream reads it
        write_object(file, config)


log = logging.getLogger(__name__)


def row_files(folder: str | os.PathLike) -> set[int]:
    "The rows that have a file of their own, by one look at the folder; none is opened."
    names = [entry.name for entry in os.scandir(folder) if entry.name.startswith("hs_")]
    numbers = (name[3:-12] for name in names if name.endswith(".safetensors"))
    return {int(n) for n in numbers if n.isdecimal()}


class FeatureFolder:
    "A folder that is being filled with the features of `dataset`. As a context manager it closes the last shard."

    def __init__(
        self,
        out_dir: str | os.PathLike,  # gets data_config.json, rows/, and files or shards
        dataset: Dataset,  # from `prepare`: input_ids, loss_mask, seq_len
        config: dict,  # from `origin`
        indices: Iterable[int] | None = None,  # rows to make, e.g. from `shard(…)`; None: all
        alone: bool = True,  # nobody else writes into the folder
        shard_gb: float | None = None,  # GB of a file of many rows; None: a file for each row
    ):
        self.path = Path(out_dir)
        self.config = config
        self.dtype = stored_dtype(config["hidden_states"]["dtype"])
        self.tokens = RowTokens(dataset)
        self.lengths = [int(n) for n in dataset["seq_len"][:]]
        self.wanted = sorted(set(range(len(dataset)) if indices is None else indices))
        _set_up(self.path, dataset, config)
        remove_half_files(self.path, {*self.wanted}, alone)
        remove_unfinished(self.path / FOLDER, alone)
        self.shards = FeatureShards(self.path, len(dataset))
        for e in self.shards.damaged:
            log.warning("removed, its rows are made again: %s", e)
            e.path.unlink(missing_ok=True)
        files = row_files(self.path)
        self.todo = [i for i in self.wanted if not self._is_stored(i, files)]
        self.writer: ShardWriter | None = None
        if shard_gb is not None:
            self.writer = ShardWriter(self.path, self.dtype, shard_gb)

    def _is_stored(self, i, files):
        "Whether a row is stored complete and of its tokens; the states are checked when they are read."
        if 0 < self.lengths[i] == self.shards.tokens_in(i):
            return True
        try:
            return i in files and bool(read_features(feature_path(self.path, i), self.tokens[i], load=False))
        except FeatureError:
            return False

    def progress(self) -> tqdm:  # over the tokens of the missing rows
        "A progress bar."
        total = sum(self.lengths[i] for i in self.todo)
        return tqdm(total=total, desc="features", unit="tok", unit_scale=True, delay=1)

    def write(self, i: int, states: torch.Tensor) -> None:
        """Write the features [seq, A+1, H] of row i; with shards they are there when their shard is closed. DiskError:
        the disk is full, read-only or gone."""
        with disk_errors(self.path):
            if self.writer is not None:
                self.writer.write(i, states, self.tokens[i])
            else:
                write_features(feature_path(self.path, i), states, self.tokens[i], self.dtype)

    def close(self) -> None:
        "Finish the last shard. DiskError: the disk is full, read-only or gone."
        if self.writer is not None:
            self.writer.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def disk_error(folder: FeatureFolder, e: DiskError, hidden_size: int) -> DiskError:
    """Add to an error of the disk, while a folder was filled, how many rows are complete, and how many bytes all need,
    of states [seq, A+1, hidden_size]."""
    stored = FeatureShards(folder.path, len(folder.lengths))
    files = row_files(folder.path)
    done = sum(i in stored or i in files for i in folder.wanted)
    tokens = sum(folder.lengths[i] for i in folder.wanted)
    slots = len(folder.config["hidden_states"]["layer_ids"])
    size = tokens * slots * hidden_size * folder.dtype.itemsize
    error = DiskError(e.errno, e.strerror, str(folder.path))
    error.kept = f"{done} of {len(folder.wanted)} rows are complete and kept; all of them need {size / 1e9:.3g} GB"
    return error


class _StoredRows:
    "Rows of a table, each with a file `hs_{i}.safetensors`, or in a shard."

    def __init__(self, folder, rows):
        self.folder = folder
        self.rows = rows.with_format("torch")
        self.lengths = self.rows["seq_len"][:].tolist()
        self.shards = FeatureShards(folder, len(rows))

    def path(self, i):
        if i in self.shards:
            return self.shards.shard(i).path
        path = feature_path(self.folder, i)
        if self.shards.damaged and not path.exists():
            raise self.shards.damaged[0]
        return path

    def read(self, i) -> FeatureRow:
        row = self.rows[i]
        ids = row["input_ids"].long()
        read: Any = self.shards.read(i, ids) if i in self.shards else read_features(self.path(i), ids)
        return FeatureRow(ids, row["loss_mask"].bool(), read)

    def shape(self, i):
        if i in self.shards:
            return [self.lengths[i], *self.shards.shard(i).shape]
        return read_features(self.path(i), load=False)


class _LegacyRows:
    "Samples `data_{i}.pt` of upstream 0.3 and 0.4."

    rows = None

    def __init__(self, folder):
        self.files = legacy_files(folder)
        stored = folder / "sample_lengths.json"
        known = read_object(stored) if stored.is_file() else {}
        self.lengths = [int(known[p.stem[5:]]) if p.stem[5:] in known else len(read_legacy(p)[0]) for p in self.files]

    def path(self, i):
        return self.files[i]

    def read(self, i) -> FeatureRow:
        return FeatureRow(*read_legacy(self.path(i)))

    def shape(self, i):
        return read_legacy(self.path(i))[2].shape


class FeatureDataset(FeatureRows):
    "Samples from a folder of feature files; `rows=` names the table where the folder has none."

    def __init__(
        self,
        data_dir: str | os.PathLike,  # feature files: our layout, or one of upstream's
        on_bad: str = "raise",  # "raise": FeatureError; "skip": not trained, named and counted
        rows: Dataset | None = None,  # input_ids, loss_mask, seq_len; None: the folder's own
        layers: list[int] | None = None,  # for `hidden_states`; None: all stored but the last
        layer_ids: list[int] | None = None,  # stored, last included; None: data_config.json's
    ):
        self.data_dir = data_dir = Path(data_dir).expanduser()
        self.where = f"data_dir {str(data_dir)!r}"
        layout = "ours" if rows is not None else layout_of(data_dir)
        if layout == "legacy":
            self.files = _LegacyRows(self.data_dir)
        else:
            folder = self.data_dir / "hidden_states" if layout == "upstream" else self.data_dir
            self.files = _StoredRows(folder, table_of(self.data_dir if rows is None else rows))
        self.rows = self.files.rows
        config = read_data_config(self.data_dir)
        self.made_by = config.get("model", {})
        if layer_ids is None and "layer_ids" in config.get("hidden_states", {}):
            layer_ids = config["hidden_states"]["layer_ids"]
            if layout == "legacy":
                layer_ids = legacy_layer_ids(config)
        super().__init__(self.files.lengths, layer_ids, None, on_bad)
        self.shape = self.slots, self.hidden_size = self._first_shape()
        self.split = config.get("data", {}).get("split")
        if layer_ids is not None and len(layer_ids) != self.slots:
            raise ValueError(
                f"layer_ids={list(layer_ids)}: {len(layer_ids)} layers, but the files of "
                f"{data_dir} hold {self.slots}; name all of them, the last one included"
            )
        if layers is not None:
            self.choose(layers)

    def place(self, i: int) -> str:
        return str(self.files.path(i))

    def read(self, i: int) -> FeatureRow:
        return self.files.read(i)

    def _first_shape(self) -> Any:
        "Slots and hidden size, from the first file that is valid."
        first = FeatureError(self.data_dir, "holds no rows")
        for i in range(len(self)):
            try:
                return tuple(self.files.shape(i))[1:]
            except FeatureError as e:
                if self.on_bad == "raise":
                    raise
                first = e
        raise FeatureError(first.path, f"{first.reason}, and so is every other file of the folder")
