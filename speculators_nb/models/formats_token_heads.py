"""Reading and writing MLP speculators and Medusa heads of other projects.
The former as IBM and Snowflake publish them, the latter under the names of serving engines and of the original
repository."""

import re
from typing import Any

import torch

from .formats import (
    NO_SCALE,
    FieldsAndTensors,
    Folder,
    NativeCheckpoint,
    NativeFormat,
    Target,
    Tensors,
    check_neutral,
    count_layers,
    register_format,
    rename,
    write_native,
)
from .medusa import MedusaSpeculatorConfig
from .mlp_speculator import MLPSpeculatorConfig

# The tensors of these drafters say nearly all of their configuration. A published MLP speculator stores a part that
# heads share once or for each head; copies that are not equal are an error. FasterDecoding's Medusa numbers instead of
# naming: in head 2, block 0 is `2.0.linear.weight`, and what follows the last block is the head's matrix.


def storing_head(part: str, head: int, tied: bool) -> int:  # "emb", "proj", "ln" or "head"
    "Which head's tensor a head uses for this part."
    if not tied:
        return head
    return min(head, 1) if part == "proj" else 0


def is_mlp_speculator(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of an MLP speculator."
    needed = "emb.0.weight", "proj.0.weight", "head.0.weight"
    return any(all(prefix + name in names for name in needed) for prefix in ("", "speculator."))


def tied_tensors(native: NativeCheckpoint, tensors: Tensors, tied: bool) -> Tensors:  # each shared part once
    "Leave out copies of shared parts. Errors: ValueError for copies that are not equal."
    kept: Tensors = {}
    for name, weight in tensors.items():
        part, head, leaf = name.split(".", 2)
        first = f"{part}.{storing_head(part, int(head), tied)}.{leaf}"
        if not torch.equal(weight, tensors.get(first, weight)):
            raise ValueError(
                f"{native.name}: tie_weights is true, but {name} differs from {first}; write "
                "tie_weights=false in its config.json"
            )
        kept[first] = weight
    return kept


def read_mlp_speculator(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    "Read a published MLP speculator. Errors: ValueError for tied heads that differ."
    tensors = rename(native.tensors(), {"speculator.": ""})
    heads = native.config_value("n_predict")
    if heads is None:
        heads = sum(name.startswith("ln.") and name.endswith("weight") for name in tensors)
    tied = bool(native.config_value("tie_weights", False)) and heads > 1
    tensors = tied_tensors(native, tensors, tied)
    intermediate_size, hidden_size = tensors["proj.0.weight"].shape
    vocab_size = len(tensors["head.0.weight"])
    if native.config:
        hidden_size, vocab_size = native.config_value("emb_dim"), native.config_value("vocab_size")
        intermediate_size = native.config_value("inner_dim") or hidden_size
    fields = dict(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        num_layers=heads,
        tie_weights=tied,
        inputs_hidden_states_normalized=bool(native.config_value("scale_input", False)),
        speculative_tokens=heads,
    )
    return fields, tensors


def write_mlp_speculator(config: MLPSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    "Write a published MLP speculator: each part for each head, tied or not, as vLLM's loader."
    heads, tied = config.num_layers, config.tie_weights
    kinds = {(part, leaf) for part, _, leaf in (name.split(".", 2) for name in tensors)}
    stored = {}
    for part, leaf in sorted(kinds):
        for head in range(heads):
            own = tensors[f"{part}.{storing_head(part, head, tied)}.{leaf}"]
            stored[f"speculator.{part}.{head}.{leaf}"] = own.clone()
    raw = dict(
        model_type="mlp_speculator",
        architectures=["MLPSpeculatorPreTrainedModel"],
        vocab_size=config.vocab_size,
        emb_dim=config.hidden_size,
        inner_dim=config.intermediate_size,
        n_predict=heads,
        top_k_tokens_per_head=[1] * heads,
        n_candidates=1,
        tie_weights=tied,
        scale_input=config.inputs_hidden_states_normalized,
    )
    write_native(folder, raw, stored)


register_format(
    NativeFormat(
        name="mlp_speculator",
        model_type="mlp",
        about="MLP speculators of IBM's accelerators and Arctic",
        looks_for=("tensors emb.0.weight, proj.0.weight and head.0.weight, with or without speculator. before them"),
        recognises=is_mlp_speculator,
        read=read_mlp_speculator,
        write=write_mlp_speculator,
    )
)


def is_medusa(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of an engine's Medusa heads."
    return {"blocks.0.layers.0.weight", "lm_heads.0.weight"} <= names


def write_medusa(config: MedusaSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    "Write what vLLM serves with method medusa."
    raw = dict(
        model_type="medusa",
        architectures=["MedusaModel"],
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_hidden_layers=config.num_hidden_layers,
        medusa_fc_bias=config.medusa_fc_bias,
    )
    write_native(folder, raw, tensors)


ORIGINAL_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<block>linear\.)?(?P<leaf>weight|bias)")


def from_original(name: str) -> str:  # "2.0.linear.weight" -> "blocks.2.layers.0.weight"
    "Our name of a tensor of the original repository; another name stays."
    found = ORIGINAL_NAME.fullmatch(name)
    if found is None:
        return name
    head, layer, block, leaf = found.group("head", "layer", "block", "leaf")
    return f"blocks.{head}.layers.{layer}.{leaf}" if block else f"lm_heads.{head}.{leaf}"


def to_original(name: str, num_blocks: int) -> str:
    "The inverse."
    kind, head, *rest = name.split(".")
    if kind == "blocks":
        _, layer, leaf = rest
        return f"{head}.{layer}.linear.{leaf}"
    return f"{head}.{num_blocks}.{rest[0]}"


def is_medusa_original(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of the original repository's heads."
    prefixes = "", "medusa_head.", "medusa_heads."
    return any(prefix + "0.0.linear.weight" in names for prefix in prefixes)


def write_medusa_original(
    config: MedusaSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None
):
    "Write what the original repository reads, as safetensors."
    num_blocks = config.num_hidden_layers
    raw: dict[str, Any] = dict(
        medusa_num_heads=config.num_heads,
        medusa_num_layers=num_blocks,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    if target is not None:
        raw["base_model_name_or_path"] = target.path
    stored = {to_original(name, num_blocks): weight for name, weight in tensors.items()}
    write_native(folder, raw, stored, "medusa_lm_head.safetensors")


def medusa_tensors(native: NativeCheckpoint) -> Tensors:
    "Medusa heads under our names. Errors: ValueError for a restricted vocabulary."
    prefixes = ("medusa_heads.", "medusa_head.")
    used = [p for p in prefixes if any(name.startswith(p) for name in native.index)]
    prefix = used[0] if used else ""
    stored = rename(native.tensors(prefix), {prefix: ""})
    tensors = {from_original(name): weight for name, weight in stored.items()}
    if "token_map" in tensors:
        raise ValueError(
            f"{native.name}: token_map restricts the heads to {len(tensors['token_map'])} "
            "tokens; Medusa heads here have the whole vocabulary"
        )
    if native.config_value("original_lm_head"):
        for head in range(count_layers(tensors, r"blocks\.(\d+)\.")):
            tensors[f"lm_heads.{head}.weight"] = tensors["lm_heads.0.weight"].clone()
    return tensors


def read_medusa(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read Medusa heads under an engine's or the original names. Errors: ValueError for heads
    of a part of the vocabulary, with a factor on their logits, or with names of neither kind."""
    if native.config.get("model_type") == "medusa":  # not that of the verifier that the heads are in
        check_neutral(native, NO_SCALE)
    tensors = medusa_tensors(native)
    names = set(tensors)
    if not is_medusa(native.config, names):
        raise ValueError(f"{native.name}: a head is a block and a matrix; found {', '.join(sorted(names)[:4])}")
    vocab_size, hidden_size = tensors["lm_heads.0.weight"].shape
    heads = count_layers(names, r"blocks\.(\d+)\.")
    fields = dict(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=heads,
        num_hidden_layers=count_layers(names, r"blocks\.0\.layers\.(\d+)\."),
        medusa_fc_bias="blocks.0.layers.0.bias" in names,
        speculative_tokens=heads,
    )
    return fields, tensors


register_format(
    NativeFormat(
        name="medusa",
        model_type="medusa",
        about="Medusa heads under the names of serving engines",
        looks_for="tensors blocks.0.layers.0.weight and lm_heads.0.weight",
        recognises=is_medusa,
        read=read_medusa,
        write=write_medusa,
    )
)
register_format(
    NativeFormat(
        name="medusa_original",
        model_type="medusa",
        about="Medusa heads of the original repository",
        looks_for="tensors 0.0.linear.weight, with or without medusa_head. before them",
        recognises=is_medusa_original,
        read=read_medusa,
        write=write_medusa_original,
        files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    )
)
