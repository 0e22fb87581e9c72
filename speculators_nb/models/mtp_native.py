"""Reads a native MTP head out of its verifier's checkpoint and writes a trained one back.
It goes into a copy, and nothing else in the checkpoint changes."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from ..core.checkpoints import checkpoint_index, inside, load_tensors, resolve_checkpoint, save_tensors, tensor_problem
from ..core.config import SpeculatorModelConfig, layer_config_from_dict
from ..core.files import atomic_folder, write_object
from ..core.provenance import write_provenance
from ..nn.target_head import text_config, verifier_config
from ..verifier.folders import new_folder
from .base import SpeculatorModel, commonest_dtype, stored_state
from .draft_network import misfits
from .formats import (
    FieldsAndTensors,
    Folder,
    NativeCheckpoint,
    NativeFormat,
    Target,
    Tensors,
    read_tensors,
    register_format,
)
from .mtp_families import FAMILIES, from_native, head_stem, layers_of_transformers, to_native
from .mtp_transformers import load_stack, stack_names, stored_stack

# A mixture of experts is stored with a tensor for each projection of each expert (most families) or stacked (Qwen3.5),
# as transformers and our checkpoints have it; Nemotron-H's experts have no gate. A new head gets the dtype of the
# verifier's norms, and where the verifier is in shards a file of its own.

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def stacked(block: str, parts: dict[tuple[int, str], torch.Tensor]) -> Tensors:  # parts: (expert, projection) -> tensor
    "Stack the experts of one block. Errors: ValueError naming those that are missing."
    experts = range(1 + max(expert for expert, _ in parts))
    gated = any(projection == "gate_proj" for _, projection in parts)
    projections = PROJECTIONS if gated else PROJECTIONS[1:]
    missing = [
        f"{block}.{expert}.{projection}.weight"
        for expert in experts
        for projection in projections
        if (expert, projection) not in parts
    ]
    if missing:
        raise ValueError(
            f"the verifier's MTP head lacks {', '.join(missing[:3])}{' …' if missing[3:] else ''} ({len(missing)} of "
            f"{len(projections) * len(experts)} expert tensors)"
        )
    down = {f"{block}.down_proj": torch.stack([parts[e, "down_proj"] for e in experts])}
    up = [parts[e, "up_proj"] for e in experts]
    if not gated:
        return {f"{block}.up_proj": torch.stack(up)} | down
    gate_up = [torch.cat([parts[e, "gate_proj"], up[e]]) for e in experts]
    return {f"{block}.gate_up_proj": torch.stack(gate_up)} | down


def fuse_experts(tensors: Tensors) -> Tensors:  # each by itself, or all stacked already
    """Stack a mixture's experts as transformers stores them: gate_up_proj [E, 2I, H] and down_proj [E, H, I]. Errors:
    ValueError naming an expert or a projection that is missing."""
    fused: Tensors = {}
    blocks: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            fused[name] = tensor
        else:
            block, expert, projection = found.groups()
            blocks.setdefault(block, {})[int(expert), projection] = tensor
    for block, parts in blocks.items():
        fused |= stacked(block, parts)
    return fused


def split_experts(tensors: Tensors) -> Tensors:  # stacked
    "Each expert by itself, as Qwen3-Next's checkpoints store them."
    split: Tensors = {}
    for name, tensor in tensors.items():
        block, _, part = name.rpartition(".")
        if not block.endswith(".experts"):
            split[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = weight.chunk(2)
                split[f"{block}.{expert}.gate_proj.weight"] = gate
                split[f"{block}.{expert}.up_proj.weight"] = up
            else:
                split[f"{block}.{expert}.{part}.weight"] = weight
    return split


def ours_of(tensors: Tensors, config: PretrainedConfig) -> Tensors:  # under the verifier's names -> mtp_layers.0.*
    "A native head under our names, its experts stacked."
    ours = {from_native(name, config): tensor for name, tensor in tensors.items()}
    return fuse_experts({name: tensor for name, tensor in ours.items() if name})


def native_head(verifier: str | os.PathLike, config: PretrainedConfig) -> Tensors:  # as stored; {}: there is none
    """A verifier's own MTP head; nothing else is read. Copies of embedding and head are left
    out. Errors: ValueError for a family that has none, and for quantised layers of transformers."""
    index = checkpoint_index(verifier)
    if layers_of_transformers(config):
        head = read_tensors({name: index[name] for name in stack_names(verifier, index)})
        if packed := [f"{name} ({weight.dtype})" for name, weight in head.items() if weight.itemsize < 2]:
            raise ValueError(
                f"verifier {str(verifier)!r}: {packed[0]} of its MTP layers is quantised; name the checkpoint that was "
                "not quantised"
            )
        return head
    stem = head_stem(config)
    return read_tensors({n: file for n, file in index.items() if n.startswith(stem) and from_native(n, config)})


def extract_mtp(verifier: str | os.PathLike) -> Tensors:  # our names; as stored
    "A verifier's own MTP head; nothing else is read. Errors: ValueError where it has none, naming the remedy."
    config = text_config(verifier_config(verifier))
    head, layers = native_head(verifier, config), layers_of_transformers(config)
    if not head:
        names = f"those of {layers} MTP layers" if layers else f"{head_stem(config)}*"
        raise ValueError(
            f"verifier {str(verifier)!r} has no MTP head (no tensor {names}), as "
            "most have not. Train a fresh one with fresh_head=True, or take a verifier that "
            "was pretrained with one, such as Qwen3.5 or GLM-4.5"
        )
    if layers:  # a router's bias may be float32 beside weights in bfloat16
        widest = reduce(torch.promote_types, {weight.dtype for weight in head.values()})
        loaded, common = load_stack(verifier, resolve_checkpoint(verifier), widest), commonest_dtype(head)
        return {name: w.to(common) if torch.equal(w, w.to(common).to(widest)) else w for name, w in loaded.items()}
    return ours_of(head, config)


def check_head(head: Tensors, expected: Tensors, drafter: str | os.PathLike, verifier: str | os.PathLike):
    "Errors: ValueError naming what keeps a head from replacing the verifier's."
    for fault, names in misfits(expected, head).items():
        raise ValueError(
            f"drafter {str(drafter)!r} {fault} {', '.join(names[:4])}{' …' if names[4:] else ''}: it was trained "
            f"for another verifier than {str(verifier)!r}"
        )
    problems = [tensor_problem(name, head[name], expected[name]) for name in sorted(head)]
    wrong = [problem for problem in problems if problem]
    if wrong:
        raise ValueError(
            f"drafter {str(drafter)!r}: {'; '.join(wrong[:3])}{' …' if wrong[3:] else ''}; "
            "train it anew, or take an earlier checkpoint"
        )


class Splice(NamedTuple):
    "A trained head that replaces or joins what a verifier's checkpoint has."

    head: Tensors  # the verifier's names and dtypes
    file_of: dict[str, Path]  # name -> file of the verifier's folder, or a new one
    is_new: bool  # whether the verifier had no head


def prepare_splice(
    config: SpeculatorModelConfig,  # of the drafter
    head: Tensors,  # our names
    source: Path,  # the verifier's folder
    drafter: Folder,  # for messages
    verifier: Folder,  # for messages
) -> Splice:
    "Check a head against a verifier, and bring it into the verifier's layout and dtype."
    layer, index = text_config(verifier_config(source)), checkpoint_index(source)
    layers = layers_of_transformers(layer)
    fields: dict[str, Any] = {"transformer_layer_config": layer, "num_nextn_predict_layers": layers or 1}
    fresh = type(config)(**fields)
    with torch.device("meta"):
        model = SpeculatorModel.registered_model_class_from_config(fresh)(fresh)
    check_head(head, model.saved_state(), drafter, verifier)
    replaced = native_head(source, layer)
    if layers and not replaced:
        raise ValueError(
            f"verifier {str(verifier)!r} has no MTP head, whose tensors would say what a head of "
            f"{layer.model_type!r} is called; stitch into a verifier that has one"
        )
    if layers:
        head = stored_stack(head, replaced, source)
        replaced = {name: weight for name, weight in replaced.items() if name in head}  # the others are copies
    else:
        if any(map(EXPERT.fullmatch, replaced)) or not replaced:
            head = split_experts(head)
        head = {to_native(name, layer): weight for name, weight in head.items()}
    if replaced:
        if lost := sorted(head.keys() - replaced.keys()):
            raise ValueError(
                f"verifier {str(verifier)!r} lacks {', '.join(lost[:4])}"
                f"{' …' if lost[4:] else ''} of its own MTP head; fetch or save it again"
            )
        check_head(head, replaced, drafter, verifier)
        cast = {name: weight.to(replaced[name].dtype) for name, weight in head.items()}
        return Splice(cast, {name: index[name] for name in head}, False)
    norm = next((name for name in index if name.endswith("norm.weight")), None)
    if norm is None:
        raise ValueError(
            f"{source}: its weights hold no norm.weight, so this is no language model; fetch or save the verifier again"
        )
    dtype = load_tensors(index[norm], [norm])[norm].dtype
    sharded = (source / "model.safetensors.index.json").is_file()
    home = source / ("model-mtp.safetensors" if sharded else "model.safetensors")
    cast = {name: weight.to(dtype) for name, weight in head.items()}
    return Splice(cast, dict.fromkeys(head, home), True)


def copy_entry(source: Path, target: Path, link: bool):  # both files or folders
    "Copy a part of a foreign folder. Errors: ValueError for a link that leads out of it."
    if source.is_dir():
        for entry in source.rglob("*"):
            inside(entry.parent, entry.name)
        shutil.copytree(source, target)
        return
    if link:
        try:
            os.link(source.resolve(), target)
            return
        except OSError:
            pass  # another file system
    shutil.copy2(source, target)


def write_spliced_files(splice: Splice, folder: Path):  # of the new checkpoint
    "Write the weight files that have a part of the head, with all that is in them."
    for file in set(splice.file_of.values()):
        tensors = {name: w for name, w in splice.head.items() if splice.file_of[name] == file}
        metadata = {"format": "pt"}
        if file.is_file():
            with safe_open(file, "pt") as f:
                metadata = f.metadata()
            tensors = load_tensors(file) | tensors
        save_tensors(tensors, folder / file.name, metadata)


def rewrite_json(file: Path, change: Callable[[dict], Any]):  # in place
    "Replace a JSON file by a changed one; the old file may be a link, and stays as it is."
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    write_object(file, content, indent=2)


def announce_head(folder: Path, splice: Splice, family: str):  # `model_type` of the verifier
    "Enter a head that is new to a checkpoint in its index and its config.json."
    index_file = folder / "model.safetensors.index.json"
    of_qwen3_5 = family in ("qwen3_5_text", "qwen3_5_moe_text")
    field = "mtp_num_hidden_layers" if of_qwen3_5 else "num_nextn_predict_layers"

    def add_to_index(index):
        index["weight_map"] |= {name: file.name for name, file in splice.file_of.items()}
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] += sum(w.nbytes for w in splice.head.values())

    def add_to_config(config):
        text = config.get("text_config", config)
        text[field] = 1
        if field == "num_nextn_predict_layers":  # vLLM reads it outside of text_config too
            config[field] = 1
        if family == "nemotron_h":
            text["mtp_hybrid_override_pattern"] = "*E"

    if index_file.is_file():
        rewrite_json(index_file, add_to_index)
    if family != "qwen3":
        rewrite_json(folder / "config.json", add_to_config)


def stitch_into(
    folder: Path,  # there and empty
    config: SpeculatorModelConfig,  # of the drafter
    tensors: Tensors,  # of the drafter, our names
    verifier: Folder,  # folder or hub id
    drafter: Folder,  # for messages
    link: bool = False,  # as in `stitch_mtp`
):
    "Fill a folder with the verifier and this head."
    source = resolve_checkpoint(verifier)
    head = {name: w for name, w in tensors.items() if name.startswith("mtp_layers.")}
    splice = prepare_splice(config, head, source, drafter, verifier)
    rewritten: Collection[Path] = splice.file_of.values()
    for entry in source.iterdir():
        if entry not in rewritten:
            copy_entry(inside(source, entry.name), folder / entry.name, link)
    write_spliced_files(splice, folder)
    if splice.is_new:
        announce_head(folder, splice, text_config(verifier_config(source)).model_type)


def stitch_mtp(
    drafter: str | os.PathLike,  # an MTP checkpoint of ours or upstream's
    verifier: str | os.PathLike,  # folder or hub id of the verifier that it was trained for
    out: str | os.PathLike,  # the new folder; must not exist
    link: bool = False,  # hard-link untouched files to save space; then edit neither folder
) -> Path:  # `out`: the verifier with this head, for vLLM's method "mtp"
    """The inverse of `extract_mtp`: a copy of the verifier whose mtp.* tensors are the drafter's, in the verifier's own
    layout and dtype. All other files stay as they are, except that config.json names the head where the verifier had
    none. Errors: FileExistsError; ValueError for a drafter that does not fit."""
    out, checkpoint = new_folder(out), resolve_checkpoint(drafter)
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    if config.speculators_model_type != "mtp":
        raise ValueError(
            f"drafter {str(drafter)!r} is of type {config.speculators_model_type!r}; only an "
            "MTP head is a part of its verifier"
        )
    tensors = stored_state(checkpoint)
    with atomic_folder(out, replace=False) as folder:
        stitch_into(folder, config, tensors, verifier, drafter, link)
        sources = {"drafter": drafter, "verifier": verifier}
        write_provenance(folder, "stitch_mtp", dict(link=link), sources)
    return out


def read_head(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    "Read a native head as a drafter of its own; of a sharded verifier nothing else is read."
    raw = native.config.get("text_config") or native.config
    layer = layer_config_from_dict(raw) if "model_type" in raw else target.config
    fields = dict(transformer_layer_config=layer, speculative_tokens=native.config_value("speculative_tokens", 3))
    if layers := layers_of_transformers(layer):
        return fields | dict(num_nextn_predict_layers=layers, verifier_norm=True), extract_mtp(native.folder)
    return fields, ours_of(native.tensors(head_stem(layer)), layer)


def has_head(config: dict[str, Any], names: Collection[str]) -> bool:
    "Whether a checkpoint holds a native head: by its family's names, or by `mtp.`"
    raw = config.get("text_config") or config
    layers = raw.get("num_mtp_layers") or raw.get("num_nextn_predict_layers") or 0
    if raw.get("model_type") in FAMILIES and layers in (0, 1):
        stem = re.escape(head_stem(layer_config_from_dict(raw)))
    else:
        behind = rf"layers\.{raw.get('num_hidden_layers')}|" if layers else ""
        stem = rf"(.*\.)?({behind}mtp)\."
    return any(re.match(stem, name) for name in names)


def write_head(config: SpeculatorModelConfig, tensors: Tensors, folder: Path, target: Target | None = None):
    "Write the whole verifier with this head, as `stitch_mtp` does."
    if target is None:
        raise ValueError(
            "an MTP head is stored in its verifier, and the verifier that config.json names is not here; give verifier="
        )
    stitch_into(folder, config, tensors, target.path, "of this type")


register_format(
    NativeFormat(
        name="mtp",
        model_type="mtp",
        about="MTP heads inside their verifier (Qwen3.5, DeepSeek-V3, GLM-4.5, ...)",
        looks_for="tensors mtp.*, or those of the family's head",
        recognises=has_head,
        read=read_head,
        write=write_head,
    )
)
