"""Drafters for llama.cpp: what it would refuse or read otherwise, and the GGUF file that it drafts with.
The tokenizer comes out of the verifier's GGUF file."""

import logging
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig

from ..core.checkpoints import resolve_checkpoint
from ..core.config import SpeculatorModelConfig, import_models
from ..core.files import atomic_folder
from ..core.provenance import write_provenance
from ..nn.layers import ROPE, Rotary, head_dim, rope_parameters
from ..verifier.folders import new_folder
from ..verifier.from_gguf import open_gguf
from .base import SpeculatorModel
from .convert import check_sizes, saved_tensors
from .formats import Target, Tensors
from .serving_rules import LAYER

# llama.cpp has a converter of its own, which wants a Hugging Face folder of the verifier and refuses a tokenizer that
# it does not know by a hash. Who runs llama.cpp has the verifier as a GGUF file, and that has the tokenizer as
# llama.cpp reads it. `tests/llama_cpp` compares our file with the converter's, and drafts with it.

log = logging.getLogger(__name__)
FILE = "drafter.gguf"
MAPPING = ("t2d", "d2t")  # between the tokens of drafter and verifier
RATIO_ROPES = ("default", "linear", "llama3")  # frequencies that are those of "default" divided by constants
NAMES = {  # our tensor -> llama.cpp's; * is the number of a layer
    f"{ours}.weight": f"{theirs}.weight"
    for ours, theirs in (
        ("embed_tokens", "token_embd"),
        ("fc", "fc"),
        ("norm", "output_norm"),
        ("lm_head", "output"),
        ("layers.*.input_layernorm", "blk.*.attn_norm"),
        ("layers.*.self_attn.q_proj", "blk.*.attn_q"),
        ("layers.*.self_attn.k_proj", "blk.*.attn_k"),
        ("layers.*.self_attn.v_proj", "blk.*.attn_v"),
        ("layers.*.self_attn.o_proj", "blk.*.attn_output"),
        ("layers.*.post_attention_layernorm", "blk.*.ffn_norm"),
        ("layers.*.mlp.gate_proj", "blk.*.ffn_gate"),
        ("layers.*.mlp.up_proj", "blk.*.ffn_up"),
        ("layers.*.mlp.down_proj", "blk.*.ffn_down"),
    )
}


Limits = list[tuple[bool, str]]  # whether a drafter has what llama.cpp needs; else a sentence with the remedy


@dataclass(frozen=True)
class GGUFDraft:
    "How llama.cpp reads the drafters of one algorithm."

    model_type: str  # `speculators_model_type`
    architecture: str  # in the file
    spec_type: str  # the method, as `--spec-type` names it
    names: dict[str, str]  # tensors beside `NAMES`
    fields: Callable[[Any], dict[str, Any]]  # config -> metadata beside `layer_fields`
    limits: Callable[[Any], Limits]  # of a config, beside `layer_limits`
    neighbours: bool = False  # rotates channels 2i and 2i+1; here and elsewhere i and i + R/2


GGUF_DRAFTS: dict[str, GGUFDraft] = {}


def register_gguf(entry: GGUFDraft):
    "Enter an algorithm."
    GGUF_DRAFTS[entry.model_type] = entry


def gguf_name(entry: GGUFDraft, name: str) -> str | None:  # None: there is no place for it
    "llama.cpp's name of a tensor."
    layer = re.match(r"layers\.(\d+)\.", name)
    known = (NAMES | entry.names).get(f"layers.*.{name[layer.end() :]}" if layer else name)
    return known.replace("*", layer[1]) if known and layer else known


def layer_limits(layer: PretrainedConfig) -> Limits:
    "What draft layers need."
    slides = "sliding_attention" in (getattr(layer, "layer_types", None) or ())
    kind, activation = rope_parameters(layer)["rope_type"], layer.hidden_act
    return [
        (activation == "silu", f"{LAYER}.hidden_act is {activation!r}; llama.cpp's draft layers have silu alone"),
        (not slides, f"{LAYER}.layer_types has sliding_attention; train without a sliding window"),
        (kind in RATIO_ROPES, f"{ROPE}.rope_type is {kind!r}; train with one of {', '.join(RATIO_ROPES)}"),
    ]


def check_llama_cpp(
    folder: str | os.PathLike,  # a checkpoint
) -> list[str]:  # violations, each a sentence with the remedy; empty: llama.cpp drafts with it
    """Everything in a checkpoint that llama.cpp would refuse or leave out. What changes drafts but not the text is
    logged as a warning. Errors: ValueError for a folder that is no checkpoint of this library."""
    config = SpeculatorModelConfig.from_pretrained(resolve_checkpoint(folder))
    import_models()
    kind = config.speculators_model_type
    entry = GGUF_DRAFTS.get(kind)
    if entry is None:
        return [f"speculators_model_type is {kind!r}; llama.cpp drafts with {', '.join(sorted(GGUF_DRAFTS))}"]
    with torch.device("meta"):
        model = SpeculatorModel.registered_model_class_from_config(config)(config)
    if getattr(config, "norm_output", False):
        log.warning(
            "warning: norm_output is True; in llama.cpp a step reads the state before the norm, so drafts after the "
            "first token may differ, and fewer are accepted: train with norm_output=False"
        )
    limits = [*layer_limits(config.sizes), *entry.limits(config)]
    stored = [name for name in model.state_dict() if not name.startswith(model.not_saved) and name not in MAPPING]
    return [otherwise for kept, otherwise in limits if not kept] + [
        f"tensor {name}: llama.cpp's {entry.architecture} has no place for it; train without it"
        for name in stored
        if gguf_name(entry, name) is None
    ]


def layer_fields(layer: PretrainedConfig, rotary: Rotary) -> dict[str, Any]:  # metadata
    "Sizes of the draft layers, as llama.cpp reads them."
    return {
        "block_count": layer.num_hidden_layers,
        "context_length": layer.max_position_embeddings,
        "embedding_length": layer.hidden_size,
        "feed_forward_length": layer.intermediate_size,
        "vocab_size": layer.vocab_size,
        "attention.head_count": layer.num_attention_heads,
        "attention.head_count_kv": layer.num_key_value_heads,
        "attention.key_length": head_dim(layer),
        "attention.value_length": head_dim(layer),
        "attention.layer_norm_rms_epsilon": float(layer.rms_norm_eps),
        "rope.dimension_count": rotary.rotated,
        "rope.freq_base": float(rotary.config.rope_parameters["rope_theta"]),
    }


def neighbouring_rows(weight: torch.Tensor, heads: int, rotated: int) -> torch.Tensor:  # [heads·D, I]
    "Rows whose channels i and i + R/2 are rotated together, moved to 2i and 2i+1."
    by_head = weight.unflatten(0, (heads, -1))
    pairs = by_head[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, by_head[:, rotated:]], 1).flatten(0, 1)


def gguf_tensors(entry: GGUFDraft, layer: PretrainedConfig, state: Tensors, rotary: Rotary) -> Tensors:
    "A drafter's tensors in llama.cpp's names and order of rows."
    found = {}
    heads = {"q_proj.weight": layer.num_attention_heads, "k_proj.weight": layer.num_key_value_heads}
    for name, weight in state.items():
        projection = ".".join(name.split(".")[-2:])
        if entry.neighbours and projection in heads:
            weight = neighbouring_rows(weight, heads[projection], rotary.rotated)
        if name not in MAPPING:
            found[gguf_name(entry, name)] = weight
    if "d2t" in state:  # there token ids, here differences
        found["d2t"] = state["d2t"] + torch.arange(len(state["d2t"]))
    rope = rotary.config.rope_parameters
    if rope["rope_type"] != "default":
        plain = rope["rope_theta"] ** -(torch.arange(0, rotary.rotated, 2) / rotary.rotated)
        found["rope_freqs.weight"] = plain / rotary.inv_freq
    return found


def write_gguf(file: Path, entry: GGUFDraft, config: SpeculatorModelConfig, state: Tensors, verifier: Any):
    "Write a drafter as llama.cpp reads it, matrices in the dtype that they are stored in."
    gguf = import_module("gguf")
    kinds = gguf.GGMLQuantizationType
    kind_of = {torch.float32: kinds.F32, torch.float16: kinds.F16, torch.bfloat16: kinds.BF16}
    layer = config.sizes
    rotary = Rotary(layer)
    writer = gguf.GGUFWriter(file, entry.architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in (layer_fields(layer, rotary) | entry.fields(config)).items():
        add[type(value)](f"{entry.architecture}.{name}", value)
    mask = getattr(config, "mask_token_id", None)
    if mask is not None:
        writer.add_mask_token_id(mask)
    for name, field in verifier.fields.items():
        if name.startswith("tokenizer.") and not (mask is not None and name.endswith("mask_token_id")):
            kind, *of = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=of[-1] if of else None)
    for name, weight in gguf_tensors(entry, layer, state, rotary).items():
        kind = kind_of[weight.dtype] if weight.ndim > 1 else kinds.F32
        if weight.dtype == torch.int64:
            writer.add_tensor(name, weight.numpy())
        else:
            writer.add_tensor(name, gguf.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def target_of(verifier: Any, name: str) -> Target:  # a `gguf.GGUFReader`, the file
    "The sizes of a verifier that is a GGUF file."
    architecture = verifier.fields["general.architecture"].contents()
    width = verifier.fields[f"{architecture}.embedding_length"].contents()
    sizes: Any = SimpleNamespace(hidden_size=width, vocab_size=len(verifier.fields["tokenizer.ggml.tokens"].data))
    return Target(name, sizes)


def export_llama_cpp(
    checkpoint: str | os.PathLike,  # a drafter of this library or of upstream's
    output_dir: str | os.PathLike,  # the new folder; must not exist
    verifier: str | os.PathLike,  # the GGUF file that llama.cpp serves
) -> str:  # the command that serves them
    """Write `drafter.gguf`, which llama.cpp drafts with. Errors: FileExistsError; FileNotFoundError; ImportError: the
    package gguf is missing; ValueError: what `check_llama_cpp` finds, another verifier, no GGUF file."""
    output, folder = new_folder(output_dir), resolve_checkpoint(checkpoint)
    if violations := check_llama_cpp(folder):
        raise ValueError(f"{checkpoint}: llama.cpp cannot draft with it: {'; '.join(violations)}")
    config = SpeculatorModelConfig.from_pretrained(folder)
    entry = GGUF_DRAFTS[config.speculators_model_type]
    reader = open_gguf(Path(verifier), str(verifier))
    check_sizes(config, target_of(reader, str(verifier)), str(checkpoint))
    state = saved_tensors(config, folder, checkpoint)
    with atomic_folder(output, replace=False) as new:
        write_gguf(new / FILE, entry, config, state, reader)
        write_provenance(new, "export", dict(to="llama.cpp"), dict(checkpoint=checkpoint, verifier=verifier))
    models = ["-m", str(verifier), "-md", str(output / FILE)]
    method = ["--spec-type", entry.spec_type, "--spec-draft-n-max", str(config.proposed_tokens or 4)]
    return shlex.join(["llama-server", *models, *method])
