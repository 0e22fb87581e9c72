"""Reads embedding, final norm and head of a verifier (target model), without the rest of it.
From its folder, or from a hub by HTTP range requests."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import (
    cached_assets_path,
    constants,
    hf_hub_download,
    hf_hub_url,
    hf_raise_for_status,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, http_backoff, http_stream_backoff
from torch import Tensor

from ..core.checkpoints import (
    checkpoint_index,
    current_hub_access,
    hub_errors,
    inside,
    load_tensors,
    model_file,
    read_index,
    tensor_names,
)
from ..core.files import atomic_write, read_object, write_object
from ..nn.target_head import text_config, verifier_config

PIECE = 2**26  # bytes in a request
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


class NoRanges(Exception):
    "A storage that sends the whole file for a range of it."


def range_request(start: int, stop: int, headers: dict[str, str] | None) -> dict[str, Any]:
    "Options of `http_backoff`, with the hub's headers, that request bytes [start, stop) of a file."
    wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    return dict(headers=(headers or {}) | wanted, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)


def read_range(url: str, start: int, stop: int, headers: dict[str, str] | None = None) -> bytes:
    "Bytes [start, stop) of a file. Errors: ValueError for fewer or more."
    response = http_backoff("GET", url, **range_request(start, stop, headers))
    hf_raise_for_status(response)
    if response.status_code != 206 or len(response.content) != stop - start:
        sent = f"{len(response.content)} bytes of {stop - start}"
        raise ValueError(f"{url}: sent {sent}; the file was changed or cut off, try again")
    return response.content


def header_length(url: str, headers: dict[str, str] | None = None) -> int:
    "The first number of a safetensors file: bytes of its header. Errors: NoRanges before the file is sent."
    with http_stream_backoff("GET", url, **range_request(0, 8, headers)) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise NoRanges(url)
    # a stream that breaks off is not requested again; this is
    return int.from_bytes(read_range(url, 0, 8, headers), "little")


def remote_header(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The header of a safetensors file: "start" of the tensors' bytes; "tensors": name -> dtype, shape, offsets.
    Errors: NoRanges; ValueError for another kind of file."""
    length = header_length(url, headers)
    if not 2 <= length <= LONGEST_HEADER:
        raise ValueError(f"{url}: not a safetensors file (a header of {length} bytes)")
    try:
        tensors = json.loads(read_range(url, 8, 8 + length, headers))
        tensors.pop("__metadata__", None)
        for entry in tensors.values():
            first, last = entry["data_offsets"]
            if not 0 <= first <= last:
                raise ValueError(f"data_offsets={first, last}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f"{url}: not a safetensors file ({type(e).__name__}: {e})") from e
    return {"start": 8 + length, "tensors": tensors}


def save_remote_tensor(
    url: str, name: str, header: dict[str, Any], file: Path, headers: dict[str, str] | None = None
) -> None:
    """Copy one tensor of a safetensors file with this `remote_header` to a file of its own, a piece at a time. Errors:
    ValueError."""
    entry = header["tensors"][name]
    first, last = entry["data_offsets"]
    own = json.dumps({name: entry | {"data_offsets": [0, last - first]}}).encode()
    own += b" " * (-len(own) % 8)  # the bytes behind it are aligned
    with atomic_write(file) as temporary, temporary.open("wb") as out:
        out.write(len(own).to_bytes(8, "little") + own)
        end = header["start"] + last
        for start in range(header["start"] + first, end, PIECE):
            out.write(read_range(url, start, min(start + PIECE, end), headers))


class HubIndex(Mapping[str, Path]):
    """The tensors of a model on a hub, at one commit: name -> file that holds it, which is fetched when it is looked
    up. Errors: FileNotFoundError where there is no config."""

    def __init__(self, name: str):
        self.name, self.commit = name, model_file(name).parent.name  # the folder in the cache is named so
        single = "model.safetensors"
        if listing := self.listing():
            self.shards = {tensor: file.name for tensor, file in read_index(listing).items()}
        else:
            self.shards = dict.fromkeys(self.names(single), single)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)

    def download(self, file: str) -> Path:
        "A whole file of this commit."
        options = current_hub_access().arguments(self.name, file)
        options["revision"] = self.commit
        return Path(hf_hub_download(self.name, file, **options))

    def listing(self) -> Path | None:  # the index of shards; None: there are no shards
        "Fetch the index."
        file = "model.safetensors.index.json"
        cache_dir = current_hub_access().cache_dir
        if not self._again(file):
            cached = try_to_load_from_cache(self.name, file, cache_dir, self.commit)
            if cached is not None:
                return Path(cached) if isinstance(cached, str) else None
        with hub_errors(self.name, file):
            try:
                return self.download(file)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return None

    def _again(self, file):
        "Whether `force_download` has this file fetched anew."
        access = current_hub_access()
        return access.force_download and (self.name, file) not in access.fetched

    def kept(self, file: str) -> Path:
        "Where something of this commit is kept that is not a file of the hub."
        base = current_hub_access().cache_dir
        assets = Path(base) / "assets" if base else None
        folder = cached_assets_path("speculators_nb", self.name, self.commit, assets_dir=assets)
        return inside(folder, file)

    def request(self, file: str) -> tuple[str, dict[str, str]]:  # URL and headers
        "Where a file of this commit is. Errors: LocalEntryNotFoundError."
        access = current_hub_access()
        if access.local_files_only or constants.HF_HUB_OFFLINE:
            raise LocalEntryNotFoundError(file)
        url = hf_hub_url(self.name, file, revision=self.commit)
        return url, build_hf_headers(token=access.token)

    def whole(self, shard: str) -> Path | None:  # None: not in the cache
        "A shard that was fetched before."
        cache_dir = current_hub_access().cache_dir
        found = try_to_load_from_cache(self.name, shard, cache_dir, self.commit)
        return Path(found) if isinstance(found, str) and not self._again(shard) else None

    def header(self, shard: str) -> dict[str, Any]:  # as `remote_header`
        "A shard's header, fetched once."
        kept = self.kept(f"{shard}.json")
        if self._again(kept.name) or not kept.is_file():
            header = remote_header(*self.request(shard))
            write_object(kept, header, indent=None)
            current_hub_access().fetched.add((self.name, kept.name))
        return read_object(kept)

    def names(self, shard: str) -> list[str]:
        "The tensors of a shard."
        with hub_errors(self.name, shard):
            if file := self.whole(shard):
                return tensor_names(file)
            try:
                return list(self.header(shard)["tensors"])
            except NoRanges:
                return tensor_names(self.download(shard))

    def __getitem__(self, tensor: str) -> Path:
        "Fetch one tensor to a file of its own; its whole shard where the storage knows no ranges."
        shard = self.shards[tensor]
        if file := self.whole(shard):
            return file
        kept = self.kept(f"{tensor}.safetensors")
        if kept.is_file() and not self._again(kept.name):
            return kept
        with hub_errors(self.name, shard):
            try:
                header = self.header(shard)
                if tensor not in header["tensors"]:
                    raise ValueError(f"{self.name}: {shard} does not hold {tensor}, as its index says")
                url, headers = self.request(shard)
                save_remote_tensor(url, tensor, header, kept, headers)
            except NoRanges:
                return self.download(shard)
        current_hub_access().fetched.add((self.name, kept.name))
        return kept


def tensor_index(name_or_path: str | os.PathLike) -> Mapping[str, Path]:
    """Name -> safetensors file of the tensors of a model (folder or hub id). Errors: FileNotFoundError; ValueError for
    an index that leads out of its folder."""
    if Path(name_or_path).is_dir():
        return checkpoint_index(name_or_path)
    return HubIndex(str(name_or_path))


NORM_NAMES = (
    "model.norm",
    "model.final_layernorm",
    "model.final_norm",
    "model.embedding_norm",
    "transformer.ln_f",
    "gpt_neox.final_layer_norm",
    "model.decoder.final_layer_norm",
    "backbone.norm_f",
    "llm.norm",
    "language_model.norm",
    "norm",
)
HEAD_NAMES = ("lm_head", "embed_out", "output", "llm.unembed")
EMBEDDING_NAMES = (
    "embed_tokens",
    "wte",
    "gpt_neox.embed_in",
    "tok_embeddings",
    "llm.embed",
    "backbone.embeddings",
    "word_embeddings",
)
TENSOR_NAMES = {
    "norm_weight": [f"{stem}.weight" for stem in NORM_NAMES],
    "head": [f"{stem}.weight" for stem in HEAD_NAMES],
    "embeddings": [f"{stem}.weight" for stem in EMBEDDING_NAMES],
}


def _find(names, suffixes) -> str | None:
    """The tensor that the first matching suffix names; of several the shortest name, which is
    the language model's own rather than an attached head's."""
    for suffix in suffixes:
        hits = [name for name in names if name == suffix or name.endswith("." + suffix)]
        if hits:
            return min(hits, key=len)
    return None


def _quantised(path, what):
    return ValueError(
        f"verifier {str(path)!r}: {what} is quantised, and a drafter needs its numbers; name "
        "the checkpoint that was not quantised, or one that leaves the head as it is"
    )


def _check_packed(path, names, own_head):
    # lm_head.weight_packed, lm_head.qweight, ...
    packed = [name for name in names if re.search(r"(^|\.)(lm_head|embed_out)\.q?weight", name)]
    if packed and not own_head:
        raise _quantised(path, packed[0])


def _check_stored(path, tensors):
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise _quantised(path, f"{name} ({tensor.dtype})")


def _check_tie(path, own_head, found):
    # a folder without config.json is believed
    try:
        config = verifier_config(path)
    except FileNotFoundError:
        return
    parts = config, text_config(config)
    tied = {getattr(part, "tie_word_embeddings", None) for part in parts} - {None}
    if tied == {False} and not own_head:
        raise ValueError(
            f"verifier {str(path)!r}: its weights hold no head ({', '.join(HEAD_NAMES)}), and by its config it has one "
            "of its own (tie_word_embeddings is false); take both from one checkpoint"
        )
    if tied == {True} and own_head and not torch.equal(found["head"], found["embeddings"]):
        raise ValueError(
            f"verifier {str(path)!r}: its head differs from its embeddings, and by its config "
            "(tie_word_embeddings) they are one; take both from one checkpoint"
        )


def load_verifier_tensors(
    path: str | os.PathLike,  # the verifier's folder, or a hub id
    rows: Tensor | None = None,  # bool [V]: head rows of the draft vocabulary; None: all
) -> dict[str, Any]:  # norm_weight [H], head [Vd, H], embeddings [V, H], norm_bias, head_bias
    """The verifier's final norm, head rows and embedding table, and nothing else of its files;
    a bias that it lacks is None. A head that the checkpoint does not hold is the embedding
    table. Errors: FileNotFoundError; ValueError naming what is missing."""
    index = tensor_index(path)
    name_of = {part: _find(index, suffixes) for part, suffixes in TENSOR_NAMES.items()}
    own_head = name_of["head"] is not None
    _check_packed(path, index, own_head)
    for part in ("norm", "head"):  # a bias is that of the same module
        weight = name_of["norm_weight" if part == "norm" else "head"]
        bias = (weight or "").removesuffix("weight") + "bias"
        name_of[f"{part}_bias"] = bias if bias in index else None
    name_of["head"] = name_of["head"] or name_of["embeddings"]
    for part in ("norm_weight", "head", "embeddings"):
        if name_of[part] is None:
            raise ValueError(
                f"verifier {str(path)!r}: found no tensor for its {part}; is this the "
                "checkpoint of a causal language model?"
            )
    names = sorted({name for name in name_of.values() if name})
    tensors = {name: load_tensors(index[name], [name])[name] for name in names}
    _check_stored(path, tensors)
    found: dict[str, Any] = dict.fromkeys(name_of)
    found |= {part: tensors[name] for part, name in name_of.items() if name}
    _check_tie(path, own_head, found)
    if rows is None:
        return found
    if len(rows) != len(found["head"]):
        raise ValueError(
            f"verifier {str(path)!r}: its head has {len(found['head'])} rows, but t2d has "
            f"{len(rows)}; they belong to different verifiers"
        )
    for part in ("head", "head_bias"):
        if found[part] is not None:
            found[part] = found[part][rows]
    return found


def load_layer_tensors(
    path: str | os.PathLike,  # the verifier's folder, or a hub id
    layer: int,
    names: Iterable[str],  # within the layer, e.g. self_attn.k_proj.weight
) -> dict[str, Tensor]:  # by these names
    "Some tensors of one decoder layer, and nothing else. Errors: FileNotFoundError; ValueError naming what is missing."
    index, found = tensor_index(path), {}
    for name in names:
        stored = _find(index, [f"layers.{layer}.{name}"])
        if stored is None:
            raise ValueError(f"verifier {str(path)!r}: its weights hold no layers.{layer}.{name}; fetch it again")
        found[name] = load_tensors(index[stored], [stored])[stored]
        _check_stored(path, {stored: found[name]})
    return found
