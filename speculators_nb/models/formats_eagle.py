"""Reading and writing checkpoints of EAGLE and P-EAGLE, of HASS, SpecForge, NVIDIA ModelOpt and AngelSlim.
The tensors are ours under other names."""

import re
from functools import partial
from typing import Any

from ..nn.layers import ALIKE_FAMILIES, layer_window
from ..nn.target_head import logit_scale
from ..verifier.parts import load_verifier_tensors
from ..verifier.tapped_model import check_aux_layer_ids, default_aux_layer_ids
from .eagle import EagleSpeculatorConfig
from .eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
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
from .llama_cpp import GGUFDraft, Limits, register_gguf
from .peagle import PEagleSpeculatorConfig
from .serving_rules import LAYER

# EAGLE's and HASS's repositories share one layout: the decoder layer's configuration is in the top level of
# `config.json`, a bias and extra norms show in the tensors' names. EAGLE-3's repository, SpecForge, ModelOpt and
# AngelSlim store the same tensors; which layers of the verifier are read is in a block `eagle_config`, or nowhere: then
# the width of `fc.weight` gives their number, and three are vLLM's default three. P-EAGLE's have `mask_hidden` besides.

EAGLE_NAMES = {
    "fc.": "fusion_fc.",
    "hidden_layernorm.": "transformer.input_layernorm.",
    "layers.0.": "transformer.",
    "post_embedding_layernorm.": "embedding_layernorm.",
    # of the two names for this norm, the one that is written
    "embed_layernorm.": "embedding_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}  # prefix in their checkpoint -> in ours


def read_eagle(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read an EAGLE-1, EAGLE-2 or HASS checkpoint, whose head is the verifier's with its factor. Errors: ValueError for
    an embedding or head that is not the verifier's."""
    check_neutral(native, {"logit_scale": (None, logit_scale(target.config))})
    tensors = rename(native.tensors(), EAGLE_NAMES)
    layernorms = "embedding_layernorm.weight" in tensors
    if not layernorms:
        tensors.pop("transformer.input_layernorm.weight", None)
    tensors = without_borrowed(tensors, target, native.name)
    fields = dict(
        transformer_layer_config=layer_config(native, target, list(tensors), num_hidden_layers=1),
        layernorms=layernorms,
        fusion_bias="fusion_fc.bias" in tensors,
        speculative_tokens=native.config_value("speculative_tokens", 3),
    )
    return fields, tensors


def check_served_layer(config: EagleSpeculatorConfig) -> None:
    "Raise ValueError for what vLLM's EAGLE-1 layer has no place for."
    extra = [name for name in ("layernorms", "fusion_bias") if getattr(config, name)]
    if extra:
        raise ValueError(
            f"{' and '.join(extra)}=True: vLLM's EAGLE layer has no place for it; train "
            f"with {'=False, '.join(extra)}=False"
        )
    layer = config.transformer_layer_config
    if layer.model_type not in ("llama", *ALIKE_FAMILIES):
        raise ValueError(
            f"transformer_layer_config.model_type is {layer.model_type!r}: vLLM's EAGLE-1 "
            "has a Llama layer; train with draft_arch='llama'"
        )
    if layer_window(layer, 0) is not None:
        raise ValueError(
            "transformer_layer_config.layer_types has a sliding window: vLLM's EAGLE-1 "
            "attends to everything; train with full attention"
        )


def write_eagle(
    config: EagleSpeculatorConfig,
    tensors: Tensors,  # our names
    folder: Folder,
    target: Target | None = None,  # the verifier, whose embedding is written too
    served: bool = False,  # refuse what vLLM cannot serve from this layout
    scale: float = 1.0,  # of the verifier's logits, where there is no `target`
):
    """Write the layout of the EAGLE repository. vLLM serves it with method "eagle" if
    `check_served_layer` finds nothing. Errors: ValueError from that check, where served."""
    if served:
        check_served_layer(config)
    if target is not None and "embed_tokens.weight" not in tensors:
        embedding = load_verifier_tensors(target.path)["embeddings"]
        dtype = tensors["fusion_fc.weight"].dtype
        tensors = tensors | {"embed_tokens.weight": embedding.to(dtype)}
    if target is not None:
        scale = logit_scale(target.config)
    layer = config.transformer_layer_config
    raw = flat_config(
        layer,
        architectures=["Qwen3ForCausalLM" if layer.model_type == "qwen3" else "LlamaForCausalLM"],
        num_hidden_layers=1,
        bias=config.fusion_bias,
        speculative_tokens=config.proposed_tokens,
    )
    if scale != 1:
        raw["logit_scale"] = scale
    if layer_window(layer, 0) is None:
        for name in ("layer_types", "sliding_window", "use_sliding_window"):
            raw.pop(name, None)
    write_native(folder, raw, rename(tensors, inverse(EAGLE_NAMES)))


def is_eagle(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of an EAGLE-1 checkpoint."
    has_layer = any(name.startswith("layers.0.") for name in names)
    has_hidden_norm = any("hidden_norm." in name for name in names)
    return "fc.weight" in names and has_layer and not has_hidden_norm


register_format(
    NativeFormat(
        name="eagle",
        model_type="eagle",
        about="EAGLE-1, EAGLE-2 and HASS research checkpoints",
        looks_for="tensors fc.weight and layers.0.*, without hidden_norm",
        recognises=is_eagle,
        read=read_eagle,
        write=write_eagle,
    )
)


EAGLE3_CLASSES = {"qwen3": "Eagle3Qwen3ForCausalLM", "deepseek_v3": "Eagle3DeepseekV2ForCausalLM"}
EAGLE3_NAMES = {"midlayer.": "layers.0.", "model.midlayer.": "layers.0.", "model.": ""}


def eagle3_layer_ids(native: NativeCheckpoint, target: Target, count: int) -> list[int]:  # count: that fc reads
    """Ids of the verifier's layers that an EAGLE-3 checkpoint reads. Errors: ValueError for the
    last layer alone, for ids that are not given, not ascending or no layers."""
    value = partial(native.config_value, block="eagle_config")
    if not value("use_aux_hidden_state", True):
        raise ValueError(
            f"{native.name}: use_aux_hidden_state is False, so it reads the verifier's last "
            "state alone; an EAGLE-3 drafter here reads several layers"
        )
    num_layers = target.config.num_hidden_layers
    layer_ids = value("eagle_aux_hidden_state_layer_ids")
    if not layer_ids and count != 3:
        raise ValueError(
            f"{native.name}: fc.weight reads {count} layers and config.json does not say "
            f"which; give config={{'eagle_aux_hidden_state_layer_ids': [...]}}"
        )
    return check_aux_layer_ids(layer_ids or default_aux_layer_ids(num_layers), num_layers)


def read_eagle3(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read an EAGLE-3 research checkpoint. Errors: ValueError for one without fc.weight, a factor on its logits, a
    vocabulary that is not the verifier's, or layers as in `eagle3_layer_ids`."""
    value = partial(native.config_value, block="eagle_config")
    check_neutral(native, NO_SCALE)
    tensors = rename(native.tensors(), EAGLE3_NAMES)
    mapping = vocab_mapping(tensors, target.config.vocab_size, native.name)
    tensors = {n: w for n, w in tensors.items() if n not in ("t2d", "d2t")} | mapping
    layer = layer_config(
        native,
        target,
        list(tensors),
        num_hidden_layers=count_layers(tensors),
        vocab_size=len(mapping["t2d"]) if mapping else native.config_value("vocab_size"),
    )
    if "fc.weight" not in tensors:
        raise ValueError(f"{native.name}: there is no fc.weight, which mixes the verifier's features")
    target_hidden_size = value("target_hidden_size")
    read_width = tensors["fc.weight"].shape[1]
    layers_read = read_width // (target_hidden_size or layer.hidden_size)
    fields = dict(
        transformer_layer_config=layer,
        draft_vocab_size=len(mapping["d2t"]) if mapping else layer.vocab_size,
        target_hidden_size=target_hidden_size,
        eagle_aux_hidden_state_layer_ids=eagle3_layer_ids(native, target, layers_read),
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_before_residual=bool(value("norm_before_residual")),
        norm_output=bool(value("norm_output")),
        embed_requires_grad=bool(value("embed_requires_grad")),
        speculative_tokens=value("speculative_tokens", 3),
    )
    return fields, tensors


def eagle3_config_json(config: Eagle3SpeculatorConfig) -> dict[str, Any]:
    "The config of the layout."
    layer = config.transformer_layer_config
    raw = flat_config(
        layer,
        architectures=[EAGLE3_CLASSES.get(layer.model_type, "LlamaForCausalLMEagle3")],
        speculative_tokens=config.proposed_tokens,
        draft_vocab_size=config.draft_vocab_size,
        **{name: getattr(config, name) for name in Eagle3DraftModel.config_arguments},
    )
    if layer.model_type == "deepseek_v3":  # of which vLLM takes any drafter for the verifier's MTP head
        raw["model_type"] = "deepseek_v2"  # the layer is the same
    if config.target_hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if layer_ids := config.eagle_aux_hidden_state_layer_ids:
        raw["eagle_config"] = dict(eagle_aux_hidden_state_layer_ids=layer_ids, use_aux_hidden_state=True)
    return raw


def write_eagle3(config: Eagle3SpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    'Write an EAGLE-3 research checkpoint. vLLM serves it with method "eagle3".'
    write_native(folder, eagle3_config_json(config), rename(tensors, {"layers.0.": "midlayer."}))


def is_eagle3(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of an EAGLE-3 checkpoint."
    first_layer = re.compile(r"(model\.)?(midlayer\.|layers\.0\.hidden_norm\.)")
    return "mask_hidden" not in names and any(first_layer.match(name) for name in names)


register_format(
    NativeFormat(
        name="eagle3",
        model_type="eagle3",
        about="EAGLE-3 checkpoints of SafeAILab, SpecForge, NVIDIA ModelOpt, AngelSlim",
        looks_for="tensors midlayer.*, or layers.0.hidden_norm.weight",
        recognises=is_eagle3,
        read=read_eagle3,
        write=write_eagle3,
    )
)


MASK_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")  # as vLLM looks for it
DRAWN = ("num_depths", "down_sample_ratio", "down_sample_ratio_min")  # of training alone


def read_peagle(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    """Read a P-EAGLE checkpoint. Errors: as from `read_eagle3`; ValueError for one without a mask token."""
    fields, tensors = read_eagle3(native, target)
    tokens = [native.config_value(name) for name in MASK_FIELDS]
    token = next((token for token in tokens if token is not None), None)
    if token is None:
        raise ValueError(
            f"{native.name}: {', '.join(MASK_FIELDS)}: none is in config.json; write there the token that is read "
            "where one is not known yet"
        )
    fields |= {name: native.config_value(name, getattr(PEagleSpeculatorConfig, name)) for name in DRAWN}
    fields |= dict(
        mask_token_id=token,
        embed_requires_grad=native.config_value("embed_requires_grad", True),
        speculative_tokens=native.config_value("speculative_tokens", fields["num_depths"]),
    )
    return fields, tensors | {"mask_hidden": tensors["mask_hidden"].view(1, 1, -1)}


def write_peagle(config: PEagleSpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    'Write EAGLE-3\'s layout with `mask_hidden`. vLLM serves it with method "eagle3" and parallel_drafting.'
    raw = eagle3_config_json(config) | {name: getattr(config, name) for name in DRAWN}
    raw |= dict(mask_token_id=config.mask_token_id, ptd_token_id=config.mask_token_id)
    write_native(folder, raw, rename(tensors, {"layers.0.": "midlayer."}))


def is_peagle(config: dict, names: set[str]) -> bool:
    "Whether tensor names are those of a P-EAGLE checkpoint."
    return "mask_hidden" in names and is_eagle3(config, names - {"mask_hidden"})


register_format(
    NativeFormat(
        name="peagle",
        model_type="peagle",
        about="P-EAGLE checkpoints as Amazon releases them",
        looks_for="EAGLE-3's tensors and mask_hidden",
        recognises=is_peagle,
        read=read_peagle,
        write=write_peagle,
    )
)


def llama_cpp_limits(config: Eagle3SpeculatorConfig) -> Limits:
    "What llama.cpp's EAGLE-3 needs."
    count, ids = config.transformer_layer_config.num_hidden_layers, config.eagle_aux_hidden_state_layer_ids
    three = ids is not None and len(ids) == 3
    return [
        (count == 1, f"{LAYER}.num_hidden_layers is {count}; llama.cpp's EAGLE-3 has one layer, train with one"),
        (three, f"eagle_aux_hidden_state_layer_ids is {ids}; llama.cpp's EAGLE-3 reads three, train with three"),
    ]


register_gguf(
    GGUFDraft(
        model_type="eagle3",
        architecture="eagle3",
        spec_type="draft-eagle3",
        names={
            "input_norm.weight": "enc.output_norm.weight",
            "layers.*.hidden_norm.weight": "blk.*.attn_norm_2.weight",
        },
        fields=lambda config: dict(
            target_layers=config.eagle_aux_hidden_state_layer_ids,
            target_hidden_size=config.target_hidden_size or config.transformer_layer_config.hidden_size,
            norm_before_residual=config.norm_before_residual,
            norm_before_fc=config.norm_before_fc,
        ),
        limits=llama_cpp_limits,
        neighbours=True,
    )
)
