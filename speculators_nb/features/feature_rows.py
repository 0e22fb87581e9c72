"""Rows of hidden states: files (safetensors; bfloat16 or fp8), one for each row or shards of many, written whole,
with a checksum that every read checks. `FeatureRows` is a source of features: a PyTorch dataset of samples."""

import contextlib
import logging
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from ..core.checkpoints import FP8, load_pickle, save_tensors, to_fp8
from ..core.files import writable_folder


class FeatureError(ValueError):
    "A feature file that must not be trained on: `path` and `reason`."

    def __init__(
        self, path: str | os.PathLike, reason: str, remedy: str = "delete the file and extract the features again"
    ):
        super().__init__(f"{path}: {reason}; {remedy}")
        self.path = Path(path)
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self):  # a loader's worker sends it to the main process
        return FeatureError, (self.path, self.reason, self.remedy)


def feature_path(data_dir: str | os.PathLike, i: int) -> Path:
    "Where the features of row i are: hs_{i}.safetensors."
    return Path(data_dir) / f"hs_{i}.safetensors"


STATES = (torch.bfloat16, torch.float16, torch.float32)  # that a file can hold besides
# what is written, and another spelling that is read
SCALES = "hidden_states_scales", "hidden_states_scale"


def from_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    "codes [seq, A+1, H] e4m3 · scales, as bfloat16: multiplied in float32, rounded once."
    return (codes.float() * scales).to(torch.bfloat16)


def stored_dtype(dtype: torch.dtype | str) -> torch.dtype:
    "A dtype that a feature file can have, also by name (float8_e4m3fn, fp8). ValueError: files are not written in it."
    found = dtype
    if isinstance(dtype, str):
        found = FP8 if dtype == "fp8" else getattr(torch, dtype, None)
    if found not in (*STATES, FP8):
        raise ValueError(f"dtype={dtype!r}: features are stored as bfloat16, float16, float32 or float8_e4m3fn (fp8)")
    return found


LARGEST = 1e18  # the final norm squares a state in float32, which ends at 3.4e38


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """A checksum (CRC-32, 8 hex digits) over the bytes of the tensors that are stored of a row, on the CPU, in the
    order of their names."""
    crc = 0
    for _, t in sorted(tensors.items()):
        data: Any = t.contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(data, crc)
    return f"{crc:08x}"


def _usable(x):
    "Whether all numbers are finite and can be squared; one pass, no mask of the same size."
    return not x.numel() or bool((torch.stack(x.aminmax()).float().abs() <= LARGEST).all())


def encode_row(
    path: str | os.PathLike, states: torch.Tensor, token_ids, dtype: torch.dtype | str = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """What is stored of a row, on the CPU: token_ids [seq], hidden_states [seq, A+1, H] in `dtype`, scales of fp8.
    FeatureError, which names `path`: the states are not finite in `dtype`."""
    dtype = stored_dtype(dtype)
    tensors = {"token_ids": torch.as_tensor(token_ids, dtype=torch.long).cpu()}
    if dtype is FP8:
        tensors["hidden_states"], tensors[SCALES[0]] = (t.cpu() for t in to_fp8(states))
        checked = tensors[SCALES[0]]
    else:
        checked = tensors["hidden_states"] = states.detach().to("cpu", dtype)
    if not _usable(checked):
        raise FeatureError(
            path,
            f"the verifier's states are not finite in {dtype}, or larger than {LARGEST:g}",
            "look for damaged weights of the verifier, or store another dtype",
        )
    return tensors


def write_features(
    path: str | os.PathLike, states: torch.Tensor, token_ids, dtype: torch.dtype | str = torch.bfloat16
) -> None:
    """Write hs_{i}.safetensors, whole or not at all: states [seq, A+1, H] float, in `dtype`, of token_ids [seq].
    FeatureError: the states are not finite in `dtype`."""
    tensors = encode_row(path, states, token_ids, dtype)
    save_tensors(tensors, path, {"crc32": checksum_of(tensors)})


_WRITING = re.compile(r"\.tmp\w{6}")  # as safetensors' own writer names a file until it is whole


def remove_half_files(folder: str | os.PathLike, rows: Collection[int], alone: bool) -> None:
    """Delete files that killed processes have left half written: of these rows, which nobody is writing, or of any
    where nobody else writes."""
    for name in os.listdir(folder):
        row = re.fullmatch(r"\.hs_(\d+)\..*", name)
        if int(row[1]) in rows if row else alone and _WRITING.fullmatch(name):
            with contextlib.suppress(OSError):
                Path(folder, name).unlink(missing_ok=True)


def _check_tokens(path, shape, tokens, token_ids):
    "FeatureError where shape or tokens are not those of the row."
    if tokens.ndim != 1 or tokens.dtype.is_floating_point or tokens.dtype.is_complex:
        raise FeatureError(path, f"token_ids {list(tokens.shape)} of {tokens.dtype}, expected whole numbers [seq]")
    if len(shape) != 3 or shape[0] != len(tokens):
        raise FeatureError(path, f"hidden_states {list(shape)} for {len(tokens)} tokens, expected [seq, A+1, H]")
    if token_ids is None:
        return
    wanted = torch.as_tensor(token_ids)
    if len(tokens) != len(wanted):
        raise FeatureError(path, f"has {len(tokens)} tokens, the dataset's row {len(wanted)}")
    if (differs := (tokens != wanted).nonzero()).numel():
        raise FeatureError(path, f"other tokens than the dataset's row, first at position {int(differs[0])}")


def _check_numbers(path, states):
    if not _usable(states):
        at = (~(states.float().abs() <= LARGEST)).nonzero()[0].tolist()
        raise FeatureError(path, f"{states[tuple(at)].item()} at [position, layer slot, channel] {at}")


def _decoded(path, states, scales):
    "States as numbers to calculate with: fp8 as bfloat16. FeatureError: dtype or scales."
    if states.dtype not in (*STATES, FP8):
        expected = ", ".join(str(d) for d in STATES)
        raise FeatureError(path, f"hidden_states of {states.dtype}, expected {expected} or {FP8}")
    if scales is None:
        if states.dtype is FP8:
            raise FeatureError(path, f"fp8 states without {SCALES[0]}")
        return states
    sizes = zip(scales.shape[::-1], states.shape[::-1])
    fits = scales.ndim <= 3 and all(a in (1, b) for a, b in sizes)
    if not fits or not scales.is_floating_point() or not bool((scales > 0).all()):
        raise FeatureError(
            path, f"scales {list(scales.shape)} of {scales.dtype}, expected positive numbers [seq, 1, 1]"
        )
    return from_fp8(states, scales)


def decode_row(
    path: str | os.PathLike,  # where the row is from, for messages
    tensors: dict[str, torch.Tensor],  # as stored: token_ids, hidden_states, scales of fp8
    token_ids=None,  # [seq] what the row must be about; None: not compared
    checksum: str | None = None,  # when it was written; None: not known
) -> torch.Tensor:  # states [seq, A+1, H], fp8 as bfloat16
    "States of a stored row, checked. FeatureError: tokens, length, checksum, not finite."
    _check_tokens(path, tensors["hidden_states"].shape, tensors["token_ids"], token_ids)
    if checksum and checksum != checksum_of(tensors):
        raise FeatureError(path, "the checksum is another than when the file was written")
    scales = next((tensors[k] for k in SCALES if k in tensors), None)
    states = _decoded(path, tensors["hidden_states"], scales)
    _check_numbers(path, states)
    return states


def read_features(
    path: str | os.PathLike,  # hs_{i}.safetensors
    token_ids=None,  # [seq] what the file must be about; None: not compared
    load: bool = True,  # False: check keys, shape and tokens, leave the states unread
) -> torch.Tensor | list[int]:  # states [seq, A+1, H], fp8 as bfloat16; load=False: shape
    """Read one feature file and check all of it. FeatureError: missing, cut off, keys, tokens,
    length, checksum, not finite."""
    if not Path(path).is_file():
        raise FeatureError(path, "missing")
    try:
        with safe_open(path, "pt") as f:
            keys = set(f.keys())
            if absent := sorted({"hidden_states", "token_ids"} - keys):
                raise FeatureError(path, f"has no {' and no '.join(absent)}")
            checksum = (f.metadata() or {}).get("crc32")
            shape = f.get_slice("hidden_states").get_shape()
            wanted = ("token_ids", "hidden_states", *SCALES) if load else ("token_ids",)
            tensors = {name: f.get_tensor(name) for name in wanted if name in keys}
    except FeatureError:
        raise
    except Exception as e:
        raise FeatureError(path, f"cut off or not a safetensors file ({e})") from e
    if load:
        return decode_row(path, tensors, token_ids, checksum)
    _check_tokens(path, shape, tensors["token_ids"], token_ids)
    return shape


def read_legacy(path: str | os.PathLike) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "Read and check data_{i}.pt of speculators 0.3 and 0.4: ids, mask [seq], states [seq, A+1, H]."
    try:
        data = load_pickle(path)
    except FileNotFoundError:
        raise FeatureError(path, "missing") from None
    except ValueError as e:
        raise FeatureError(path, str(e).removeprefix(f"{path}: ")) from None
    if not isinstance(data, dict):
        raise FeatureError(path, f"a {type(data).__name__}, expected a dict")
    if absent := sorted({"input_ids", "loss_mask", "hidden_states"} - data.keys()):
        raise FeatureError(path, f"has no {' and no '.join(absent)}")
    ids, mask, states = data["input_ids"], data["loss_mask"], data["hidden_states"]
    shapes = {tuple(s.shape) for s in states} if isinstance(states, (list, tuple)) else set()
    if len(shapes) != 1 or not states[0].shape[:1] == ids.shape == mask.shape:
        raise FeatureError(
            path, "input_ids [seq], loss_mask [seq] and a list of hidden states [seq, H] must be of one length"
        )
    states = torch.stack(list(states), 1)
    _check_tokens(path, states.shape, ids, None)
    _check_numbers(path, states)
    return ids.long(), mask.bool(), states


def legacy_layer_ids(config: dict) -> list[int]:
    'Layers of data_config.json, version "2.0", which counts them by their output: i there is i+1 here.'
    return [i + 1 for i in config["hidden_states"]["layer_ids"]]


class FeatureRow(NamedTuple):
    "One row as a source of features stores it."

    input_ids: torch.Tensor  # [n] int64
    loss_mask: torch.Tensor  # [n] bool
    states: torch.Tensor  # [n, A+1, H] floating, as stored; fp8 as bfloat16


def sample_of(
    input_ids: torch.Tensor,  # [n]
    loss_mask: torch.Tensor,  # [n]
    states: torch.Tensor,  # [n, A+1, H]
    columns: list[int] | None = None,  # slots that the drafter reads; None: all but the last
) -> dict[str, torch.Tensor]:  # what `packing.collate` takes
    "The slots that are read side by side, the last state apart."
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "hidden_states": (states[:, :-1] if columns is None else states[:, columns]).flatten(1),
        "verifier_last_hidden_states": states[:, -1],
    }


log = logging.getLogger(__name__)


def row_problem(row: FeatureRow, shape: Sequence[int] | None, vocab_size: int | None) -> str | None:
    """What does not fit in a row: its lengths, slots and hidden size (`shape`, of the other rows), token ids of a
    verifier with `vocab_size`; None, for these: not known."""
    input_ids, loss_mask, states = row
    if not len(input_ids) == len(loss_mask) == len(states):
        return f"the row has {len(input_ids)} tokens, a loss mask of {len(loss_mask)} and states of {len(states)}"
    if shape is not None and tuple(states.shape[1:]) != tuple(shape):
        return f"hidden_states {list(states.shape)}, the other rows have {['seq', *shape]}"
    if vocab_size is not None and len(input_ids):
        for token in (int(input_ids.min()), int(input_ids.max())):
            if not 0 <= token < vocab_size:
                return f"token id {token}, the verifier has {vocab_size}"


class FeatureRows(torch.utils.data.Dataset):
    "Samples with features. A source defines `read(i)`, and sets `shape` and `split` when it knows them."

    where = "the source of features"  # its name in messages
    rows: Any = None  # the prepared table, where the source has one
    made_by: dict[str, Any] = {}  # recorded about the verifier: fingerprint, hidden_size, …

    def __init__(
        self,
        lengths: list[int],  # tokens of each row
        layer_ids: Sequence[int] | None = None,  # verifier layers of the slots; None: not known
        layers: Sequence[int] | None = None,  # for `hidden_states`; None: all but the last slot
        on_bad: str = "raise",  # "raise": FeatureError; "skip": not trained, named and counted
    ):
        if on_bad not in ("raise", "skip"):
            raise ValueError(f"on_bad={on_bad!r}: choose 'raise' or 'skip'")
        self.lengths = lengths
        self.layer_ids = layer_ids
        self.on_bad = on_bad
        self.columns: list[int] | None = None  # slots of `hidden_states`
        self.shape: tuple[int, ...] | None = None  # slots A+1, hidden size H
        self.split: dict[str, Any] | None = None  # rows to train on, rows held out
        self.vocab_size: int | None = None  # where token ids shall be compared with it
        self.bad = torch.zeros(len(lengths), dtype=torch.bool).share_memory_()
        if layers is not None:
            self.choose(layers)

    def choose(self, layers: Sequence[int]) -> None:
        """From now on `hidden_states` holds these layers of the verifier. ValueError: one is not stored, or the stored
        layers are not known."""
        if self.layer_ids is None:
            raise ValueError(
                f"{self.where}: nothing says which layers the features are of; pass "
                "layer_ids=, or layers=None to take all"
            )
        stored, layers = list(self.layer_ids), list(layers)
        if absent := sorted(set(layers) - set(stored)):
            raise ValueError(
                f"{self.where} holds layers {stored}, the drafter reads {layers}; extract the features of {absent} too"
            )
        self.columns = [stored.index(i) for i in layers]

    @property
    def verifier_fingerprint(self) -> str | None:  # None: not recorded
        "Which verifier made the features."
        return self.made_by.get("fingerprint")

    def __len__(self):
        return len(self.lengths)

    def read(self, i: int) -> FeatureRow:
        "To be defined by the source. FeatureError: this row is not available."
        raise NotImplementedError

    def tokens(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        "input_ids [n] and loss_mask [n] of row i, without its states."
        i = range(len(self))[i]  # a number from 0, whatever counts rows: -1, NumPy's, a tensor. IndexError
        row = self.read(i)._asdict() if self.rows is None else self.rows[i]
        return row["input_ids"], row["loss_mask"]

    def place(self, i: int) -> str:
        "Where row i is from, for messages."
        return f"row {i} of {self.where}"

    def __getitem__(self, i: int) -> dict:
        i = range(len(self))[i]
        try:
            return self.sample(i, self.read(i))
        except FeatureError as e:
            return self.skipped(i, e)

    def sample(self, i: int, row: FeatureRow) -> dict[str, torch.Tensor]:
        """A sample of row i, as from `sample_of`, checked. FeatureError: another length, other slots or another hidden
        size than the rows before, a token id outside the vocabulary."""
        problem = row_problem(row, self.shape, self.vocab_size)
        if not problem and len(row.input_ids) != self.lengths[i]:  # by which rows are packed
            problem = f"the row has {len(row.input_ids)} tokens, {self.lengths[i]} by the table's seq_len"
        if problem:
            raise FeatureError(self.place(i), problem)
        return sample_of(*row, self.columns)

    def skipped(self, i: int, e: FeatureError) -> dict[str, torch.Tensor]:
        "By `on_bad`, raise, or count row i and give a sample of its length that trains nothing."
        if self.on_bad == "raise" or self.shape is None:
            raise e
        if not self.bad[i]:
            log.warning("skipped: %s", e)
        self.bad[i] = True
        n = self.lengths[i]
        ids, mask = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.bool)
        states = torch.zeros(n, *self.shape, dtype=torch.bfloat16)
        return sample_of(ids, mask, states, self.columns)


FOLDER = "shards"  # in a feature folder
KIND = "speculators_nb feature shard 1"


def index_checksum(tensors: dict[str, Any]) -> str:
    "Checksum, 8 hex digits, of a shard's index: rows, starts, checksums."
    return checksum_of({name: tensors[name] for name in ("rows", "starts", "checksums")})


class ShardWriter:
    """Collects rows in memory and writes shards of about one size, each whole or not at all; as a context manager it
    writes the last one. May be used by several threads."""

    def __init__(
        self,
        data_dir: str | os.PathLike,  # feature folder; shards go to its folder `shards`
        dtype: torch.dtype | str = torch.bfloat16,  # of the states
        shard_gb: float = 2.0,  # GB of a shard, and of memory
    ):
        self.folder = Path(data_dir) / FOLDER
        self.dtype = stored_dtype(dtype)
        self.limit = shard_gb * 1e9
        self.lock = threading.Lock()
        self.rows: list[tuple[int, str, dict[str, torch.Tensor]]] = []  # row, checksum, what is stored of it
        self.nbytes = 0  # of their states
        writable_folder(self.folder)

    def write(self, i: int, states: torch.Tensor, token_ids) -> None:
        """Add row i: states [seq, A+1, H], token_ids [seq]. FeatureError: not finite, or of another size than the
        shard's; DiskError: the disk is full, read-only or gone, and the rows of the shard that was to be written are
        lost."""
        tensors = encode_row(f"row {i}", states, token_ids, self.dtype)
        checksum = checksum_of(tensors)
        states = tensors["hidden_states"] = tensors["hidden_states"].clone()  # not a view of a whole batch
        with self.lock:
            others = self.rows[0][2]["hidden_states"] if self.rows else states
            size, its = (", ".join(map(str, x.shape[1:])) for x in (states, others))
            if size != its:
                raise FeatureError(f"row {i}", f"states [seq, {size}], the shard has [seq, {its}]")
            if self.rows and self.nbytes + states.nbytes > self.limit:
                self._write_shard()
            self.rows.append((i, checksum, tensors))
            self.nbytes += states.nbytes

    def _write_shard(self):
        "DiskError."
        rows, self.rows, self.nbytes = self.rows, [], 0
        starts = np.cumsum([0, *(len(tensors["token_ids"]) for _, _, tensors in rows)])
        index = {"rows": [i for i, _, _ in rows], "starts": starts, "checksums": [int(crc, 16) for _, crc, _ in rows]}
        out = {name: torch.tensor(x, dtype=torch.long) for name, x in index.items()}
        metadata = {"kind": KIND, "index": index_checksum(out)}
        first = rows[0][2]["hidden_states"]
        states = torch.empty(int(starts[-1]), *first.shape[1:], dtype=first.dtype)
        for start, (_, _, tensors) in zip(starts, rows):  # row by row: they are in memory once
            row = tensors.pop("hidden_states")
            states[start : start + len(row)] = row
        out |= {name: torch.cat([tensors[name] for _, _, tensors in rows]) for name in rows[0][2]}
        save_tensors(out | {"hidden_states": states}, self.folder / f"{secrets.token_hex(8)}.safetensors", metadata)

    def close(self) -> None:
        "Write the last shard. DiskError: the disk is full, read-only or gone."
        with self.lock:
            if self.rows:
                self._write_shard()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def remove_unfinished(folder: Path, alone: bool) -> None:
    """Delete the hidden files that killed processes have left in a folder of shards: all of them if nobody else writes
    there, or else those that are older than a day."""
    for path in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if alone or time.time() - path.stat().st_mtime > 86400:
                path.unlink()


HANDLES = 16  # shards that are open at once, in each process


class Shard(NamedTuple):
    "One whole shard: its index, no states."

    path: Path
    shape: tuple[int, ...]  # A+1, H
    rows: np.ndarray  # [n]
    starts: np.ndarray  # [n+1]
    checksums: np.ndarray  # [n]
    scales: bool  # whether the states are fp8


class ForeignShard(FeatureError):
    "A file among the shards that is none, or of another table."


def open_shard(path: Path) -> Shard:
    "Read the index of a shard. FeatureError: cut off or damaged; ForeignShard: another file."
    try:
        with safe_open(path, "pt") as f:
            keys, metadata = set(f.keys()), f.metadata() or {}
            names = ("rows", "starts", "checksums")
            lacks = {"hidden_states", "token_ids", *names} - keys
            if metadata.get("kind") != KIND or lacks:
                raise ForeignShard(path, "is no shard of features", "move it elsewhere")
            index = {name: f.get_tensor(name) for name in names}
            shape = f.get_slice("hidden_states").get_shape()
    except FeatureError:
        raise
    except Exception as e:
        raise FeatureError(path, f"cut off or not a safetensors file ({e})") from e
    rows, starts, checksums = (index[name].numpy() for name in names)
    if metadata.get("index") != index_checksum(index):
        raise FeatureError(path, "its index does not agree with its checksum")
    if len(shape) != 3 or int(starts[-1]) != shape[0] or len(starts) != len(rows) + 1:
        raise FeatureError(path, f"hidden_states {shape} for {int(starts[-1])} tokens")
    return Shard(path, tuple(shape[1:]), rows, starts, checksums, SCALES[0] in keys)


class FeatureShards:
    "The shards of a feature folder, where each of its n rows is, and rows read from them. May be sent to processes."

    def __init__(self, data_dir: str | os.PathLike, n: int):
        self.folder = Path(data_dir) / FOLDER
        self.shards: list[Shard] = []
        self.damaged: list[FeatureError] = []
        self.shard_of = np.full(n, -1, np.int32)  # [n] row -> shard; -1: in none
        self.place_of = np.zeros(n, np.int32)  # [n] row -> place in the shard
        self.handle = lru_cache(HANDLES)(_open)
        for path in sorted(self.folder.glob("[!.]*.safetensors")):
            try:
                self._take(open_shard(path))
            except ForeignShard as e:
                log.warning("not read: %s", e)
            except FeatureError as e:
                self.damaged.append(e)

    def _take(self, shard):
        "Note the rows of a shard."
        n = len(self.shard_of)
        if len(shard.rows) and not 0 <= shard.rows.min() <= shard.rows.max() < n:
            reason = f"has row {shard.rows.max()}, the table has {n}"
            raise ForeignShard(shard.path, reason, "move it elsewhere")
        self.shard_of[shard.rows] = len(self.shards)
        self.place_of[shard.rows] = np.arange(len(shard.rows))
        self.shards.append(shard)

    def __contains__(self, i: int) -> bool:
        return bool(self.shard_of[i] >= 0)

    def shard(self, i: int) -> Shard:
        "The shard of a row that is in one."
        return self.shards[self.shard_of[i]]

    def tokens_in(self, i: int) -> int:
        "Tokens that are stored of row i; 0: it is in no shard."
        if i not in self:
            return 0
        k, starts = self.place_of[i], self.shard(i).starts
        return int(starts[k + 1] - starts[k])

    def read(self, i: int, token_ids=None) -> torch.Tensor:
        """States [seq, A+1, H] of a row, fp8 as bfloat16, all of it checked, also that it is about `token_ids` [seq].
        FeatureError names the shard, the row and the reason."""
        shard, k = self.shard(i), self.place_of[i]
        start, end = int(shard.starts[k]), int(shard.starts[k + 1])
        names = ("hidden_states", "token_ids", *(SCALES[:1] if shard.scales else ()))
        try:
            handle = self.handle(shard.path)
            tensors = {name: handle.get_slice(name)[start:end] for name in names}
        except FileNotFoundError:
            raise FeatureError(shard.path, "missing", "extract the features again") from None
        except Exception as e:
            raise FeatureError(shard.path, f"row {i}: cannot be read ({e})") from e
        try:
            return decode_row(shard.path, tensors, token_ids, f"{int(shard.checksums[k]):08x}")
        except FeatureError as e:
            remedy = "delete this file and extract the features again: only its rows are made"
            raise FeatureError(shard.path, f"row {i}: {e.reason}", remedy) from None

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "handle"}

    def __setstate__(self, state):
        vars(self).update(state, handle=lru_cache(HANDLES)(_open))


def _open(path) -> Any:
    return safe_open(path, "pt")
