"""Checkpoints of DFlash and DFlash2 in z-lab's layout, DSpark and Domino as released, XPress and LiLiCorr for vLLM.
DSpark's releases are DeepSeek's and NVIDIA's, Domino's are its authors' and SpecForge's. The tensors have our names;
layer ids differ by one."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from ..nn.layers import SINKS
from ..verifier.tapped_model import check_aux_layer_ids
from .dflash import DFlashSpeculatorConfig
from .dflash2 import NEW_FIELDS
from .domino import DominoSpeculatorConfig
from .dspark import DSparkSpeculatorConfig
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
    flat_config,
    inverse,
    layer_config,
    register_format,
    rename,
    vocab_mapping,
    without_borrowed,
    write_native,
)
from .lilicorr import LILICORR_FIELDS, LILICORR_LAYOUT_RULES, LiLiCorrSpeculatorConfig
from .llama_cpp import GGUFDraft, Limits, register_gguf
from .xpress import XPRESS_LAYOUT_RULES, XPressSpeculatorConfig

# z-lab's checkpoints (2602.06036) keep DFlash's fields in a block `dflash_config` of `config.json` or beside it. Their
# layer id is the layer whose output is read, ours (vLLM's) the layer that this output enters, so ours is one more. The
# output of the verifier's last layer is refused: z-lab's code takes it after the final norm, ours before. Inside a
# block, layers attend as vLLM reads it: `is_causal`, then `causal` (JetSpec, 2606.18394, writes `causal_head`) is for
# all layers; where neither is written, layers with a sliding window are causal and full ones are not.

NEUTRAL_VALUES = {
    "input_embedding_scale": (None, 1),
    "attention_value_scale": (None, 1),
    "draft_shift": (None, False),
    "hidden_dim_adapter": (None, False),
    "is_neox_style": (None, True),
} | NO_SCALE  # option that this drafter does not have -> values with which it has no effect
NEUTRAL_VALUES_OF_LOGITS = {
    "output_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
}  # the same, of DFlash2 alone


OWN_HEAD = "has_own_lm_head"  # in vLLM (0.32): a head over the whole vocabulary is the drafter's own


def check_no_unknown_options(native: NativeCheckpoint):
    "Errors: ValueError for an option that changes the drafter and that ours does not have."
    check_neutral(native, NEUTRAL_VALUES, "dflash_config")
    if (native.folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{native.name}: mask_embedding.pt replaces the embedding of the mask token; a "
            "DFlash drafter here uses the verifier's"
        )


def dflash_layer_ids(native: NativeCheckpoint, target: Target) -> list[int]:  # ours
    """Ids of the verifier's layers that a DFlash checkpoint reads. Errors: ValueError where the
    config has none, or has the last layer."""
    ids = native.config_value("target_layer_ids", block="dflash_config")
    num_layers = target.config.num_hidden_layers
    if not ids:
        raise ValueError(
            f"{native.name}: target_layer_ids is not in config.json; write there the layers "
            "of the verifier whose outputs the drafter reads"
        )
    if max(ids) + 1 >= num_layers:
        raise ValueError(
            f"{native.name}: target_layer_ids={ids} reads the last of the verifier's {num_layers} layers, which "
            "z-lab's code takes after the final norm and DFlash drafters here before it"
        )
    return check_aux_layer_ids([i + 1 for i in ids], num_layers)


def dflash_layers(native: NativeCheckpoint, target: Target, names: list[str]) -> tuple[PretrainedConfig, bool]:
    "Configuration of a DFlash checkpoint's layers, and our `sliding_window_non_causal`."
    value = partial(native.config_value, block="dflash_config")
    count = count_layers(names)
    fields: dict[str, Any] = dict(num_hidden_layers=count)
    slides = "sliding_attention" in (native.config_value("layer_types") or ())
    all_slide = value("use_swa") and not slides
    if all_slide:
        fields["layer_types"] = ["sliding_attention"] * count
    if slides or all_slide:
        window = value("swa_window_size", native.config_value("sliding_window"))
        fields |= dict(sliding_window=window, use_sliding_window=True)
    layer = layer_config(native, target, names, **fields)
    if value("attention_sink_bias", native.config_value(SINKS)):
        setattr(layer, SINKS, True)
    for_all = native.config_value("is_causal")
    causal = for_all if for_all is not None else value("causal", value("causal_head"))
    if for_all is not None or (causal and "full_attention" in layer.layer_types):
        layer.is_causal = causal
    if causal is None:
        causal = "sliding_attention" in layer.layer_types and not all_slide
    return layer, not causal


def dflash_tensors(native: NativeCheckpoint, target: Target) -> Tensors:  # our names
    """Tensors of a DFlash checkpoint: its own head is of a part of the vocabulary, or config.json says so in vLLM's
    word. Errors: ValueError for a copy that is not the verifier's."""
    tensors = native.tensors()
    mapping = vocab_mapping(tensors, target.config.vocab_size, native.name)
    own = dict(mapping)
    if "lm_head.weight" in tensors and (mapping or native.config_value(OWN_HEAD, block="dflash_config")):
        own["lm_head.weight"] = tensors["lm_head.weight"]
    others = {n: w for n, w in tensors.items() if n not in {"t2d", "d2t", *own}}
    return without_borrowed(others, target, native.name) | own


def read_dflash(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read a DFlash checkpoint of z-lab's layout. Errors: ValueError for what this drafter
    cannot do, and for an embedding or head that is not the verifier's."""
    value = partial(native.config_value, block="dflash_config")
    check_no_unknown_options(native)
    tensors = dflash_tensors(native, target)
    layer, non_causal = dflash_layers(native, target, list(tensors))
    block_size = value("block_size", 16)
    fields = dict(
        transformer_layer_config=layer,
        draft_vocab_size=len(tensors["d2t"]) if "d2t" in tensors else layer.vocab_size,
        block_size=block_size,
        mask_token_id=value("mask_token_id"),
        aux_hidden_state_layer_ids=dflash_layer_ids(native, target),
        target_hidden_size=value("target_hidden_size"),
        sliding_window_non_causal=non_causal,
        sample_from_anchor=bool(value("sample_from_anchor")),
        speculative_tokens=value("speculative_tokens", block_size - 1 + bool(value("sample_from_anchor"))),
    )
    return fields, tensors


def sizes_of(native: NativeCheckpoint, names: Iterable[str], **defaults: Any) -> dict[str, Any]:
    "Fields that shape the network or its scores. Errors: ValueError for one that is missing and has no default."
    sizes = {name: native.config_value(name, defaults.get(name), block="dflash_config") for name in names}
    for name, size in sizes.items():
        if size is None:
            raise ValueError(
                f"{native.name}: {name} is not in config.json; write there what the drafter was trained with"
            )
    return sizes


def read_dflash2(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    "Read a DFlash2 checkpoint. Errors: as from `read_dflash`; ValueError for a missing size."
    check_neutral(native, NEUTRAL_VALUES_OF_LOGITS, "dflash_config")
    fields, tensors = read_dflash(native, target)
    return fields | sizes_of(native, NEW_FIELDS), tensors


def dflash_config_json(config: DFlashSpeculatorConfig, tensors: Tensors, target: Target | None) -> dict[str, Any]:
    """The config of z-lab's layout. Errors: ValueError for a drafter that samples from the
    anchor, which the layout has no field for."""
    if config.sample_from_anchor:
        raise ValueError(
            "sample_from_anchor is True: z-lab's layout has no field for it; train with sample_from_anchor=False"
        )
    return block_config_json(config, tensors, target)


def block_config_json(config: DFlashSpeculatorConfig, tensors: Tensors, target: Target | None) -> dict[str, Any]:
    "What the layouts of block drafters have in common."
    layer = config.transformer_layer_config
    block: dict[str, Any] = dict(
        mask_token_id=config.mask_token_id, target_layer_ids=[i - 1 for i in config.aux_hidden_state_layer_ids or ()]
    )
    new = {name: getattr(config, name) for name in NEW_FIELDS if hasattr(config, name)}
    slides = "sliding_attention" in (layer.layer_types or ())
    if (slides and config.sliding_window_non_causal) or getattr(layer, "is_causal", None) is not None:
        block["causal"] = not config.sliding_window_non_causal
    if getattr(layer, SINKS, None):
        block["attention_sink_bias"] = True
    whole = "lm_head.weight" in tensors and config.draft_vocab_size == config.target_vocab_size
    optional = {OWN_HEAD: whole or None} | dict(
        target_hidden_size=config.target_hidden_size,
        speculative_tokens=config.proposed_tokens,
        num_target_layers=target and target.config.num_hidden_layers,
    )
    return flat_config(
        layer,
        architectures=config.architectures,
        block_size=config.block_size,
        dflash_config=block | new,
        draft_vocab_size=config.draft_vocab_size,
        **{name: value for name, value in optional.items() if value is not None},
    )


def write_dflash(config: DFlashSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    """Write z-lab's layout; vLLM serves it with method "dflash". Errors: as of `dflash_config_json`."""
    write_native(folder, dflash_config_json(config, tensors, target), tensors)


def read_dspark(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read a DSpark checkpoint. The anchor's slot predicts unless its config says otherwise. Errors: as from
    `read_dflash`."""
    fields, tensors = read_dflash(native, target)
    value = partial(native.config_value, block="dflash_config")
    from_anchor = value("sample_from_anchor", not value("dspark_bonus_anchor", False))
    rank = tensors["markov_head.markov_w1.weight"].shape[1]
    reads = tensors.get("confidence_head.proj.weight")
    fields |= dict(
        sample_from_anchor=from_anchor,
        speculative_tokens=value("speculative_tokens", fields["block_size"] - (not from_anchor)),
        markov_rank=rank,
        markov_head_type=value("markov_head_type", "vanilla"),
        enable_confidence_head=reads is not None,
        confidence_head_with_markov=reads is not None
        and reads.shape[1] > fields["transformer_layer_config"].hidden_size,
    )
    return fields, tensors


def write_dspark(config: DSparkSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    """Write the layout of the released ones; vLLM serves it with method "dspark". Errors: ValueError for a drafter
    without a Markov head, which the layout always has."""
    if not config.markov_rank:
        raise ValueError("markov_rank is 0: the layout always has a Markov head; train with markov_rank > 0, or dflash")
    raw = block_config_json(config, tensors, target)
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    anchor = dict(sample_from_anchor=config.sample_from_anchor, dspark_bonus_anchor=not config.sample_from_anchor)
    raw |= dict(architectures=["Qwen3DSparkModel"]) | anchor | {name: getattr(config, name) for name in heads}
    raw |= {name: raw["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    write_native(folder, raw, tensors)


DOMINO_FIELDS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
EARLY_HEAD = {"logit_head.": ""}  # where SpecForge's first drafters have their heads


def read_domino(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read a Domino checkpoint of SpecForge's layout. Errors: as from `read_dflash`; ValueError for a missing size.
    SpecForge and SGLang draft one token less than a block has slots, whether or not the anchor's slot predicts."""
    fields, tensors = read_dflash(native, target)
    value = partial(native.config_value, block="dflash_config")
    fields |= sizes_of(native, DOMINO_FIELDS, pure_draft_prefix_len=0)
    fields |= dict(
        sample_from_anchor=bool(value("shift_label")),
        speculative_tokens=value("speculative_tokens", fields["block_size"] - 1),
    )
    return fields, rename(tensors, EARLY_HEAD)


def write_domino(config: DominoSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    """Write SpecForge's layout; SGLang serves it. Errors: ValueError for a reduced vocabulary, which the layout has no
    place for."""
    if config.draft_vocab_size < config.target_vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size} of {config.target_vocab_size}: the layout has the verifier's "
            "whole vocabulary; train with that"
        )
    raw = block_config_json(config, tensors, target)
    head = dict(projector_type="domino", shift_label=config.sample_from_anchor)
    head |= {name: getattr(config, name) for name in DOMINO_FIELDS}
    raw |= dict(architectures=["DFlashDraftModel"], dflash_config=raw["dflash_config"] | head)
    write_native(folder, raw, tensors)


XPRESS_NAMES = {  # prefix of our name -> of vLLM's; the first that fits
    "refiner_head.token_embed.": "xpress_head.w1.",
    "refiner_head.mix_l": "xpress_head.mix.L",
    "refiner_head.mlp_gate.": "xpress_head.mlp.gate_proj.",
    "refiner_head.mlp_up.": "xpress_head.mlp.up_proj.",
    "refiner_head.mlp_down.": "xpress_head.mlp.down_proj.",
    "refiner_head.readout.": "xpress_head.w2.",
    "refiner_head.": "xpress_head.",
}
XPRESS_TOPC = 512  # tokens of a slot that vLLM's refiner scores


def write_xpress(config: XPressSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    """Write the layout that vLLM 0.33 serves with method "dflash". Errors: ValueError for a reduced vocabulary, a
    drafter that samples from the anchor, and shapes that vLLM's kernels do not have."""
    if problems := [line for rule in XPRESS_LAYOUT_RULES for line in rule(config.to_dict(), None)]:
        raise ValueError("; ".join(problems))
    raw = dflash_config_json(config, tensors, target) | dict(
        architectures=["Qwen3XPressModel"],
        sample_from_anchor=False,
        xpress_block_size=config.block_size,
        xpress_rank=config.xpress_rank,
        xpress_mlp_hidden=config.xpress_rank * config.xpress_mlp_ratio,
        xpress_num_passes=config.num_jacobi_passes,
        xpress_topc=min(XPRESS_TOPC, config.draft_vocab_size),
    )
    write_native(folder, raw, rename(tensors, XPRESS_NAMES))


def read_xpress(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    "Read what vLLM 0.33 serves as XPress. Errors: as from `read_dflash`; ValueError."
    fields, tensors = read_dflash(native, target)
    rank = native.config_value("xpress_rank", 256)
    ratio, rest = divmod(native.config_value("xpress_mlp_hidden", 512), rank)
    if rest:
        raise ValueError(
            f"{native.name}: xpress_mlp_hidden is no multiple of xpress_rank={rank}, as it is in an XPress drafter here"
        )
    block_size = native.config_value("xpress_block_size", fields["block_size"])
    fields |= dict(
        block_size=block_size,
        speculative_tokens=block_size - 1,
        xpress_rank=rank,
        xpress_mlp_ratio=ratio,
        num_jacobi_passes=native.config_value("xpress_num_passes", 6),
    )
    return fields, rename(tensors, inverse(XPRESS_NAMES))


CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
SEQUENTIAL_NAMES = {  # where NVIDIA ModelOpt has the scorer's MLPs -> where vLLM looks for them
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}


def named_mlps(name: str) -> str:
    "vLLM's name of a tensor of the scorer."
    for old, new in SEQUENTIAL_NAMES.items():
        name = name.replace(old, new)
    return name


def read_lilicorr(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read a LiLiCorr checkpoint as ModelOpt writes it or vLLM serves it. Errors: as from `read_dflash`; ValueError for
    a missing size: two of them change the scores and no shape."""
    fields, tensors = read_dflash(native, target)
    value = partial(native.config_value, block="dflash_config")
    convolutions = {name: value(name) for name in CONVOLUTIONS if value(name)}
    fields |= sizes_of(native, LILICORR_FIELDS) | convolutions | dict(slot_convolutions=bool(convolutions))
    return fields, {named_mlps(n) if n.startswith("lilicorr.") else n: w for n, w in tensors.items()}


def write_lilicorr(config: LiLiCorrSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    """Write the layout that vLLM serves with method "dflash". Errors: ValueError for a drafter that samples from the
    anchor, and for candidates that vLLM's kernel does not take."""
    if problems := [line for rule in LILICORR_LAYOUT_RULES for line in rule(config.to_dict(), None)]:
        raise ValueError("; ".join(problems))
    raw = dflash_config_json(config, tensors, target)
    block = raw["dflash_config"] | {name: getattr(config, name) for name in LILICORR_FIELDS}
    if not config.slot_convolutions:
        block = {name: value for name, value in block.items() if name not in CONVOLUTIONS}
    block |= dict(projector_type="lilicorr", lilicorr_enabled=True)
    write_native(folder, raw | dict(architectures=["LiLiCorrDraftModel"], dflash_config=block), tensors)


# a tensor of each drafter that is made of DFlash's blocks, and of no other
OWN_TENSORS = {
    "dflash2": "candidate_selector.predecessor_codebook",
    "dspark": "markov_head.markov_w1.weight",
    "domino": "prefix_gru.weight_ih_l0",  # SpecForge's first ones have it in their `logit_head`
    "xpress": "xpress_head.mix.L",
    "lilicorr": "lilicorr.slot_embedding",
}


def has_own(tensor: str, config: dict, names: set[str]) -> bool:  # one of `OWN_TENSORS`
    "Whether tensor names are those of the drafter that has this one."
    return "fc.weight" in names and any(name.endswith(tensor) for name in names)


def is_dflash(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of a DFlash checkpoint."
    own = {"fc.weight", "hidden_norm.weight"} <= names
    return own and not any(has_own(tensor, config, names) for tensor in OWN_TENSORS.values())


register_format(
    NativeFormat(
        name="dflash",
        model_type="dflash",
        about="DFlash checkpoints of z-lab's layout",
        looks_for="tensors fc.weight and hidden_norm.weight",
        recognises=is_dflash,
        read=read_dflash,
        write=write_dflash,
    )
)


def register_block(name: str, about: str, read: Callable, write: Callable):  # as in `NativeFormat`
    "Enter the format of a drafter of `OWN_TENSORS`, whose name is that of its algorithm."
    tensor = OWN_TENSORS[name]
    looks_for = f"tensors fc.weight and {tensor}"
    register_format(NativeFormat(name, name, about, looks_for, partial(has_own, tensor), read, write))


register_block("dflash2", "DFlash2 checkpoints of z-lab's layout", read_dflash2, write_dflash)
register_block("dspark", "DSpark checkpoints as DeepSeek and NVIDIA release them", read_dspark, write_dspark)
register_block("domino", "Domino checkpoints of SpecForge's layout, which SGLang serves", read_domino, write_domino)
register_block("lilicorr", "LiLiCorr checkpoints of ModelOpt and vLLM", read_lilicorr, write_lilicorr)
register_block("xpress", "XPress checkpoints that vLLM 0.33 serves", read_xpress, write_xpress)


BLOCK_NAMES = {
    "hidden_norm.weight": "enc.output_norm.weight",
    "layers.*.self_attn.q_norm.weight": "blk.*.attn_q_norm.weight",
    "layers.*.self_attn.k_norm.weight": "blk.*.attn_k_norm.weight",
}
HEAD_NAMES = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def block_limits(config: DFlashSpeculatorConfig) -> Limits:
    "What llama.cpp's DFlash and DSpark need."
    width, read = config.transformer_layer_config.hidden_size, config.target_hidden_size
    why = f"the draft layers' is {width}, and llama.cpp has one width: train with that"
    return [(read in (None, width), f"target_hidden_size is {read}; {why}")]


def dflash_limits(config: DFlashSpeculatorConfig) -> Limits:
    "What llama.cpp's DFlash needs."
    why = "llama.cpp's DFlash drafts from the masks alone, train with sample_from_anchor=False"
    return [*block_limits(config), (not config.sample_from_anchor, f"sample_from_anchor is True; {why}")]


def dspark_limits(config: DSparkSpeculatorConfig) -> Limits:
    "What llama.cpp's DSpark needs."
    kind, rank = config.markov_head_type, config.markov_rank
    reads_markov = config.confidence_head_with_markov or not config.enable_confidence_head
    why = "llama.cpp's confidence head reads the Markov head's embedding, train with True"
    return [
        *block_limits(config),
        (rank > 0, "markov_rank is 0; llama.cpp's DSpark has always a Markov head: train with one, or dflash"),
        (kind == "vanilla", f"markov_head_type is {kind!r}; llama.cpp has vanilla alone, train with that"),
        (reads_markov, f"confidence_head_with_markov is False; {why}"),
    ]


def block_fields(config: DFlashSpeculatorConfig) -> dict[str, Any]:
    "Metadata of a block drafter."
    causal = getattr(config.transformer_layer_config, "is_causal", None)
    fields = dict(block_size=config.block_size, target_layers=config.aux_hidden_state_layer_ids)
    return fields if causal is None else fields | {"attention.causal": causal}


register_gguf(GGUFDraft("dflash", "dflash", "draft-dflash", BLOCK_NAMES, block_fields, dflash_limits))
register_gguf(
    GGUFDraft(
        model_type="dspark",
        architecture="dflash",
        spec_type="draft-dspark",
        names=BLOCK_NAMES | HEAD_NAMES,
        fields=lambda config: (
            block_fields(config)
            | dict(sample_from_anchor=config.sample_from_anchor, has_confidence_head=config.enable_confidence_head)
        ),
        limits=dspark_limits,
    )
)
