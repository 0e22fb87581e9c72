"""Checkpoint files of models: safetensors, shard indexes, pickles as data. A weight file runs no code."""

import contextlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .files import atomic_write, check_no_gguf, read_object

# A foreign file is data. Nothing in a safetensors file can run; a pickle names functions for its reader to call, so
# that `load_pickle` reads tensors out of it and refuses the rest. An index came with its model: a name or a link in it
# that leads out of the folder is refused. How hub ids are fetched, and whether a model's own code may run, is set once
# around a call, which may read several models.

LFS_POINTER = b"version https://git-lfs"  # what a clone without Git LFS has in a file's place


@contextlib.contextmanager
def _open_tensors(path: str | os.PathLike) -> Iterator[Any]:
    "Open a safetensors file for reading; errors name the file."
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        handle = safe_open(path, "pt")
    except SafetensorError as e:
        with path.open("rb") as f:
            pointer = f.read(len(LFS_POINTER)) == LFS_POINTER
        if pointer:
            raise ValueError(
                f"{path}: is a pointer of Git LFS, not the file itself; fetch that: git lfs pull, or hf download"
            ) from e
        raise ValueError(
            f"{path}: not a complete safetensors file ({e}). It was probably cut off while it "
            "was written or copied: make or fetch it again."
        ) from e
    with handle:
        yield handle


def save_tensors(tensors: dict[str, Tensor], path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
    "Write tensors to a safetensors file, atomically; `metadata` is for its header."
    with atomic_write(path) as temporary:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, metadata)


def tensor_names(path: str | os.PathLike) -> list[str]:  # in the order in which they are stored
    "What a safetensors file holds, without reading any of it."
    with _open_tensors(path) as handle:
        return list(handle.keys())


def load_tensors(path: str | os.PathLike, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read tensors of a safetensors file, all or those of some names, to the CPU. Errors: ValueError: truncated, a name
    is missing."""
    with _open_tensors(path) as handle:
        present = list(handle.keys())
        names = present if names is None else list(names)
        missing = sorted(set(names) - set(present))
        if missing:
            raise ValueError(
                f"{path}: no tensor named {', '.join(missing)}. The file holds: {', '.join(sorted(present))}"
            )
        return {name: handle.get_tensor(name) for name in names}


def load_pickle(path: str | os.PathLike) -> Any:  # tensors and plain containers, on the CPU
    """Read a pickle as data: torch's `weights_only` reader knows tensors, numbers, strings and containers, and calls
    nothing that the file names. Errors: FileNotFoundError; ValueError saying what else the file asks for, or that it is
    damaged."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as e:  # the reader has no error of its own for what it refuses
        named = re.search(r"(?:GLOBAL |class |function |global )`?([\w.]+\.[\w.]+)", str(e))
        first_line = str(e).splitlines()[0][:160] if str(e) else "empty"
        what = f"{type(e).__name__}: {first_line}"
        if named:
            what = f"it asks for {named[1]}, which could be anything"
        raise ValueError(
            f"{path}: refused, this is not a pickle of plain tensors ({what}). Nothing in it was run. Ask for the same "
            "weights as safetensors, or write them again where you trust the file"
        ) from None


@dataclass
class HubAccess:
    "How models are read that are named within a call; the words are those of `huggingface_hub`."

    cache_dir: str | Path | None = None  # None: HF_HUB_CACHE
    force_download: bool = False  # fetch again what is in the cache, once in a `hub_access`
    local_files_only: bool = False  # the cache alone
    token: str | bool | None = None  # None: the stored one; False: none
    revision: str | None = None  # branch, tag or commit; None: main
    remote_code: bool = False  # whether a verifier may bring code of its own; transformers never asks "run it? y/N"
    fetched: set[tuple[str, str]] = field(default_factory=set)  # (hub id, file)

    def arguments(self, name: str, file: str) -> dict[str, Any]:
        "Keywords of a download."
        again = self.force_download and (name, file) not in self.fetched
        self.fetched.add((name, file))
        words = ("cache_dir", "local_files_only", "token", "revision")
        return {word: getattr(self, word) for word in words} | {"force_download": again}


_ACCESS: ContextVar[HubAccess | None] = ContextVar("hub_access", default=None)


def current_hub_access() -> HubAccess:  # the innermost `hub_access`; outside of any: defaults
    "How hub ids are fetched at present."
    return _ACCESS.get() or HubAccess()


@contextlib.contextmanager
def hub_access(**changes: Any) -> Iterator[HubAccess]:
    "Inside, models are read in this way; fields that are absent or None stay as they are."
    changes = {name: value for name, value in changes.items() if value is not None}
    if not isinstance(revision := changes.get("revision", ""), str):
        raise ValueError(f"revision={revision!r}: must be text, a branch, tag or commit")
    if changes.get("force_download"):
        changes["fetched"] = set()  # of what is inside, not around
    token = _ACCESS.set(replace(current_hub_access(), **changes))
    try:
        yield current_hub_access()
    finally:
        _ACCESS.reset(token)


def first_cause(error: Exception) -> Exception:
    """The answer of the hub behind an error of its client, which falls back to the cache where
    the hub does not answer as it should, and then misses the file there."""
    from huggingface_hub import errors

    cause = error.__cause__
    answered = isinstance(cause, (errors.HfHubHTTPError, errors.FileMetadataError))
    if answered and isinstance(error, (errors.LocalEntryNotFoundError, ValueError)):
        return cause
    return error


def hub_problem(error: Exception, name: str, file: str) -> str:  # one line: id, field, remedy
    "What a failed download means, and what to do."
    from huggingface_hub import constants, errors  # imported for a hub id alone

    error = first_cause(error)
    access, page = current_hub_access(), f"{constants.ENDPOINT}/{name}"
    missing = f"{name}: neither a local folder nor a model"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        remedy = f"fetch it where there is a network: hf download {name}"
        why = f"the hub {constants.ENDPOINT} cannot be reached (HF_ENDPOINT)"
        if access.local_files_only:
            why = "local_files_only=True allows no download"
        elif constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE=1 allows no download"
        return f"{missing} in the cache ({file}), and {why}; check the spelling, or {remedy}"
    if isinstance(error, errors.GatedRepoError):
        return f"{name}: gated; ask for access at {page}, then give token= (or hf auth login)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{missing} of the hub {page}; check the spelling, or give token= if private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: revision={access.revision!r} is not a branch, tag or commit of {page}"
    if isinstance(error, errors.EntryNotFoundError):
        return f"{name}: has no file {file}; see {page}, or name another revision="
    if isinstance(error, errors.HFValidationError):
        return f"{missing} of the hub, whose names are owner/model; check the spelling"
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"{name}: token= is refused by {page} ({what}); give another (hf auth login)"
    if isinstance(error, errors.FileMetadataError):
        what += f"; does HF_ENDPOINT={constants.ENDPOINT} name a hub, and no proxy a page?"
    return f"{missing} whose {file} could be fetched from the hub ({what}); try again, or give a folder"


@contextlib.contextmanager
def hub_errors(name: str, file: str) -> Iterator[None]:
    "Errors of a download in one line. Errors: FileNotFoundError; OSError of the disk."
    try:
        yield
    except Exception as e:
        # a fault of a file, or of the disk
        ours = type(e) is ValueError and first_cause(e) is e
        if ours or (isinstance(e, OSError) and e.errno):
            raise
        raise FileNotFoundError(hub_problem(e, name, file)) from e


@contextlib.contextmanager
def push_errors(name: str) -> Iterator[None]:
    "Errors of an upload in one line; nothing was committed. Errors: OSError."
    from huggingface_hub import constants, errors

    try:
        yield
    except (errors.HfHubHTTPError, errors.HFValidationError, RuntimeError, OSError) as e:
        cause = e.__cause__ if isinstance(e.__cause__, errors.HfHubHTTPError) else e
        what = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
        status = getattr(getattr(cause, "response", None), "status_code", None)
        remedy = "run the same call again"
        if status in (401, 403, 404) or isinstance(e, errors.LocalTokenNotFoundError):
            remedy = "give a token= that may write there (hf auth login)"
        elif isinstance(e, errors.HFValidationError):
            remedy = "a name is owner/model"
        elif constants.HF_HUB_OFFLINE:
            remedy = "HF_HUB_OFFLINE=1 allows no upload"
        place = f"{constants.ENDPOINT}/{name}"
        raise OSError(f"{name}: not pushed to {place} ({what}); {remedy}") from e


def model_file(name_or_path: str | os.PathLike, file: str = "config.json") -> Path:
    """One file of a model's folder, whether it is there or not, or of a hub id, of which nothing else is fetched.
    Errors: FileNotFoundError for a hub id."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path) / file
    if file == "config.json":
        check_no_gguf(name_or_path)
    from huggingface_hub import hf_hub_download

    name = str(name_or_path)
    with hub_errors(name, file):
        return Path(hf_hub_download(name, file, **current_hub_access().arguments(name, file)))


def resolve_checkpoint(
    name_or_path: str | os.PathLike, patterns: tuple[str, ...] = ("*.json", "*.safetensors")
) -> Path:
    """Find a model's folder. Of a hub id all files of these patterns are fetched that the cache does not hold.
    Errors: FileNotFoundError."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    check_no_gguf(name_or_path)
    from huggingface_hub import snapshot_download

    name, files = str(name_or_path), ", ".join(patterns)
    options = current_hub_access().arguments(name, files)
    with hub_errors(name, files):
        return Path(snapshot_download(name, allow_patterns=list(patterns), **options))


def inside(folder: str | os.PathLike, name: str) -> Path:
    """A file of a foreign folder. Errors: ValueError for a name, or a link behind it, that leads out of the folder.
    (The hub's cache keeps a snapshot as links to the blobs of the same repository, which counts as inside.)"""
    folder, home = Path(folder), Path(os.path.realpath(folder))
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(
            f"{folder}: the file name {name!r} leads out of the folder. Files of a model must be beside each other."
        )
    for parent in home.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            home = parent.parent  # the repository in the hub's cache
            break
    # unlike Path.resolve it takes a link to itself, which reading refuses
    place = os.path.realpath(folder / name)
    if not Path(place).is_relative_to(home):
        raise ValueError(
            f"{folder / name}: a link that leads out of the folder, to {place}. If that is "
            "what you want, copy the file here."
        )
    return folder / name


def read_index(file: str | os.PathLike) -> dict[str, Path]:  # tensor name -> the shard that holds it
    """Where a sharded checkpoint keeps its tensors. Errors: ValueError for a file that is no
    index, or a shard outside of its folder."""
    file = Path(file)
    try:
        weight_map = read_object(file)["weight_map"]
        shards = {shard: inside(file.parent, shard) for shard in set(weight_map.values())}
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{file}: not an index of shards ({type(e).__name__}); it must hold an object "
            "weight_map, tensor name -> file name"
        ) from e
    return {name: shards[shard] for name, shard in weight_map.items()}


def checkpoint_index(name_or_path: str | os.PathLike) -> dict[str, Path]:
    "List a checkpoint's tensors, for a single-file or an index-sharded model folder, without reading any of them."
    folder = resolve_checkpoint(name_or_path)
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        return read_index(index)
    if single.is_file():
        inside(folder, single.name)
        return dict.fromkeys(tensor_names(single), single)
    pickles = sorted(f.name for f in folder.glob("*.bin"))
    remedy = "Is this a model folder?"
    if pickles:
        remedy = (
            f"It holds {', '.join(pickles[:3])}: pickles can run code when read, so they are refused. A drafter's are "
            "read as data by use_safetensors=False; convert a verifier's once, where you trust them: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise FileNotFoundError(f"{folder}: no model.safetensors and no model.safetensors.index.json. {remedy}")


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of stored weights
FP8 = torch.float8_e4m3fn


def to_fp8(numbers: torch.Tensor, dims: tuple[int, ...] = (1, 2)) -> tuple[torch.Tensor, torch.Tensor]:
    """numbers ≈ codes · scales: codes e4m3 of the same shape, and one scale float32 for all numbers along `dims`: for
    each token of hidden states [seq, A+1, H] by default, for each row of a weight [O, I] along (1,)."""
    wide = numbers.float()
    scales = (wide.abs().amax(dims, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)
    return (wide / scales).to(FP8), scales


def tensor_problem(name: str, found: torch.Tensor, wanted: torch.Tensor) -> str | None:  # a sentence; None: it is right
    "What is wrong with a tensor of a checkpoint: its shape, its kind of numbers, its values."
    if found.shape != wanted.shape:
        return f"tensor {name} has shape {tuple(found.shape)}, the config describes {tuple(wanted.shape)}"
    if wanted.is_floating_point():
        fits = found.dtype in FLOATS
    else:
        fits = not (found.is_floating_point() or found.is_complex())
    if not fits:
        return f"tensor {name} holds {found.dtype}, the config describes {wanted.dtype}"
    if wanted.is_floating_point() and not found.isfinite().all():
        return f"tensor {name} holds NaN or infinity"


def read_state(path: str | os.PathLike) -> dict:  # name -> tensor
    """All tensors of a checkpoint. Errors: FileNotFoundError or ValueError naming the file:
    none, one that the index names and that is not there or does not hold what it should, an
    index beside weights of another time."""
    folder = resolve_checkpoint(path)
    index = checkpoint_index(folder)
    files = sorted(set(index.values()))
    single = folder / "model.safetensors"
    listing = folder / "model.safetensors.index.json"
    if listing.is_file() and single.is_file() and single not in files:
        raise ValueError(
            f"{folder}: holds {single.name} and {listing.name}, which names other files; remove whichever is the older"
        )
    if absent := [f for f in files if not f.is_file()]:
        raise FileNotFoundError(
            f"{absent[0]}: no such file, and {listing.name} says that it holds "
            f"{', '.join(n for n in index if index[n] == absent[0])}; the checkpoint is incomplete, fetch it again"
        )
    found: dict[str, Tensor] = {}
    for file in files:  # each is opened once
        found |= load_tensors(file, [name for name in index if index[name] == file])
    return found
