"""Which verifiers are pretrained with a multi-token prediction (MTP) head: one record a family.
It says how checkpoints name the head's tensors, and what its layer is made of."""

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen2ForCausalLM

# A native head is an extra decoder layer that the verifier was pretrained with (DeepSeek-V3, 2412.19437, section 2.2).
# All families do the same: a norm of the verifier's state, a norm of the next token's embedding, one projection of
# both, a decoder layer, a final norm. They differ in the names of the tensors, in the layer, and in five details.
# transformers ignores these tensors when it loads a verifier, so they are read by name. transformers builds a layer by
# its number, so that the number decides between attention and linear attention, and between a mixture of experts and a
# plain MLP.

FOUR_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)


def layer_zero(config: PretrainedConfig) -> int:
    "The layer that most heads are like, as all layers are the same."
    return 0


class HeadFamily(NamedTuple):
    """How the checkpoints of a family store an MTP head, and what its layer is. Names and
    details are those of vLLM 0.32's loaders (`vllm/model_executor/models/*_mtp.py`)."""

    module: str  # of transformers, which has the layer's classes
    prefix: str  # of these classes
    stem: str  # begins the names of the head's tensors; {n}: the verifier's layers
    names: dict[str, str]  # behind the stem -> behind "mtp_layers.0." in ours
    copies: tuple[str, ...] = ()  # behind the stem: copies of the verifier's embedding, head
    index: Callable[[PretrainedConfig], int] = layer_zero  # the layer that it is like
    changes: dict[str, Any] = {}  # fields of the config that are different for this layer
    norms: tuple[str | None, ...] = FOUR_NORMS  # before and after attention, before, after MLP
    hidden_first: bool = False  # the projection reads [state, embedding], not the reverse
    masks_first: bool = False  # the embedding that is read at position 0 is replaced by zeros
    carries_plain: bool = False  # the next step reads the output before the final norm
    final_norm: bool = True  # False: the head reads the layer's output as it is
    pairs: bool = False  # rotates channels (0, 1), (2, 3) ..., not two halves
    unserved: str = ""  # why vLLM 0.32 serves no such head; "": it does


AS_MODULE = {
    "fc.": "input_proj.",
    "norm.": "final_layernorm.",
    "pre_fc_norm_hidden.": "hidden_layernorm.",
    "pre_fc_norm_embedding.": "token_layernorm.",
    "layers.0.": "",
}  # Qwen3-Next, Qwen3.5, EXAONE
AS_LAYER = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "shared_head.norm.": "final_layernorm.",
    "": "",
}  # DeepSeek-V3, GLM
ERNIE = {
    "emb_norm.0.": "token_layernorm.",
    "hidden_norm.0.": "hidden_layernorm.",
    "linear_proj.0.": "input_proj.",
    "block.0.": "",
}
LONGCAT = {
    "layers.0.enorm.m.": "token_layernorm.",
    "layers.0.hnorm.m.": "hidden_layernorm.",
    "layers.0.eh_proj.": "input_proj.",
    "layers.0.transformer_layer.mlp.": "mlp.",
    "layers.0.": "",
    "norm.": "final_layernorm.",
}
NEMOTRON = {
    "layers.0.enorm.": "token_layernorm.",
    "layers.0.hnorm.": "hidden_layernorm.",
    "layers.0.eh_proj.": "input_proj.",
    "layers.0.norm.": "input_layernorm.",
    "layers.0.mixer.": "self_attn.",
    "layers.1.norm.": "post_attention_layernorm.",
    "layers.1.mixer.": "mlp.",
    "layers.1.final_layernorm.": "final_layernorm.",
}  # an attention layer and a layer of experts, which together are one decoder layer
COPIES = ("embed_tokens.", "shared_head.head.")


def full_attention_layer(config: PretrainedConfig) -> int:
    "The last layer with softmax attention. Errors: ValueError where there is none."
    kinds = list(getattr(config, "layer_types", None) or [])
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        raise ValueError(f"layer_types={kinds}: an MTP head needs a verifier with a full_attention layer")
    return full[-1]


def layer_behind(config: PretrainedConfig) -> int:
    "The layer behind the last one, which has experts where most layers have."
    return config.num_hidden_layers


def sparse_layer(config: PretrainedConfig) -> int:
    "The last layer with experts. Errors: ValueError where there is none."
    kinds = list(config.mlp_layer_types)
    if "sparse" not in kinds:
        raise ValueError(f"mlp_layer_types={kinds}: an MTP head needs a verifier with a sparse layer")
    return len(kinds) - 1 - kinds[::-1].index("sparse")


MODULE: dict[str, Any] = dict(stem="mtp.", names=AS_MODULE)
LAYER: dict[str, Any] = dict(names=AS_LAYER, copies=COPIES, masks_first=True)
NOT_QWEN3 = "it serves those of qwen3_next, qwen3_5 and qwen3_5_moe"
FAMILIES: dict[str, HeadFamily] = {
    "qwen3": HeadFamily("qwen3", "Qwen3", **MODULE, unserved=NOT_QWEN3),
    "qwen3_next": HeadFamily("qwen3_next", "Qwen3Next", **MODULE, index=full_attention_layer),
    "qwen3_5_text": HeadFamily("qwen3_5", "Qwen3_5", **MODULE, index=full_attention_layer),
    "qwen3_5_moe_text": HeadFamily("qwen3_5_moe", "Qwen3_5Moe", **MODULE, index=full_attention_layer),
    "deepseek_v3": HeadFamily("deepseek_v3", "DeepseekV3", "model.layers.{n}.", **LAYER, index=layer_behind),
    "glm4_moe": HeadFamily("glm4_moe", "Glm4Moe", "model.layers.{n}.", **LAYER, index=layer_behind, carries_plain=True),
    "glm4_moe_lite": HeadFamily(
        "glm4_moe_lite", "Glm4MoeLite", "model.layers.{n}.", **LAYER, index=sparse_layer, carries_plain=True
    ),
    "glm_ocr_text": HeadFamily(
        "glm_ocr",
        "GlmOcr",
        "model.language_model.layers.{n}.",
        **LAYER,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        carries_plain=True,
        pairs=True,
    ),
    "mimo": HeadFamily("qwen2", "Qwen2", "model.mtp_layers.0.", {"": ""}, hidden_first=True, masks_first=True),
}


FAMILIES |= {
    "ernie4_5_moe": HeadFamily(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        "model.mtp_",
        ERNIE,
        changes={"moe_layer_start_index": 2**30},
        masks_first=True,
        final_norm=False,
    ),
    "exaone4": HeadFamily(
        "exaone4", "Exaone4", **MODULE, norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    ),
    "exaone_moe": HeadFamily("exaone_moe", "ExaoneMoe", **MODULE, changes={"mlp_layer_types": ["dense"]}),
    "longcat_flash": HeadFamily("longcat_flash", "LongcatFlash", "model.mtp.", LONGCAT, ("embed_tokens.",), pairs=True),
    "nemotron_h": HeadFamily(
        "nemotron_h", "NemotronH", "mtp.", NEMOTRON, changes={"layers_block_type": ["full_attention", "moe"]}
    ),
}  # `model_type` of a verifier's language model -> its head


def layers_of_transformers(config: PretrainedConfig) -> int:  # of a language model
    """How many layers an MTP head has that transformers computes (`models.mtp_transformers`): of a family without a
    record, or several. 0: the one layer of `models.mtp_layer`."""
    layers = getattr(config, "num_mtp_layers", None) or 0
    return layers if layers > 1 or config.model_type not in FAMILIES else 0


def head_family(config: PretrainedConfig) -> HeadFamily:  # of a language model
    "The record of a verifier's family. Errors: ValueError for a family without one."
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"transformer_layer_config.model_type is {config.model_type!r}; MTP heads are "
            f"known for {', '.join(FAMILIES)}, and for configs with num_mtp_layers. Give the config of such a "
            "verifier"
        )
    return FAMILIES[config.model_type]


def family_part(config: PretrainedConfig, *names: str) -> Any:  # "RMSNorm", ...; the first one there is
    "A class of the verifier's family. Errors: ValueError for a family without MTP heads."
    family = head_family(config)
    module = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    classes = [getattr(module, family.prefix + name, None) for name in names]
    return next(found for found in classes if found is not None)


def head_stem(config: PretrainedConfig) -> str:  # of a verifier's language model
    "What the names of its head's tensors begin with in its checkpoint."
    return head_family(config).stem.format(n=config.num_hidden_layers)


def from_native(name: str, config: PretrainedConfig) -> str | None:  # None: a copy
    "Our name of a verifier's MTP tensor. Errors: ValueError for one that a head of one layer does not have."
    family, stem = head_family(config), head_stem(config)
    rest = name.removeprefix(stem)
    if rest.startswith(family.copies or ("\n",)):
        return None
    for theirs in sorted(family.names, key=len, reverse=True):
        if rest.startswith(theirs):
            return "mtp_layers.0." + family.names[theirs] + rest.removeprefix(theirs)
    raise ValueError(
        f"{name}: not a tensor of an MTP head of one layer, which has "
        f"{', '.join(stem + prefix + '*' for prefix in family.names)}"
    )


def to_native(name: str, config: PretrainedConfig) -> str:
    "The verifier's name of one of our tensors."
    family = head_family(config)
    rest = name.removeprefix("mtp_layers.0.")
    ours_first = sorted(family.names.items(), key=lambda pair: len(pair[1]), reverse=True)
    theirs, ours = next(pair for pair in ours_first if rest.startswith(pair[1]))
    return head_stem(config) + theirs + rest.removeprefix(ours)


def layer_parts(config: PretrainedConfig) -> dict[str, nn.Module]:  # self_attn, mlp and the norms
    "The parts of the head's decoder layer, with fresh weights, as transformers builds them."
    family = head_family(config)
    if family.changes:
        config = copy.deepcopy(config)
        for field, value in family.changes.items():
            setattr(config, field, value)
    if config.model_type == "nemotron_h":
        attention, experts = (family_part(config, "Block")(config, i) for i in (0, 1))
        return {
            "input_layernorm": attention.norm,
            "self_attn": attention.mixer,
            "post_attention_layernorm": experts.norm,
            "mlp": experts.mixer,
        }
    if config.model_type == "longcat_flash":
        norm, size, eps = (family_part(config, "RMSNorm"), config.hidden_size, config.rms_norm_eps)
        return {
            "input_layernorm": norm(size, eps=eps),
            "self_attn": family_part(config, "MLA")(config, 0),
            "post_attention_layernorm": norm(size, eps=eps),
            "mlp": family_part(config, "MLP")(config),
        }
    layer = family_part(config, "DecoderLayer", "TextDecoderLayer")(config, family.index(config))
    return dict(layer.named_children())


class Reach(NamedTuple):
    "How far a head's attention reaches, and whether queries and keys are rotated."

    window: int | None = None  # positions of a sliding window, the query's own included
    rotates: bool = True


def head_reach(config: PretrainedConfig) -> Reach:  # of the verifier's language model
    "What vLLM 0.32 serves: EXAONE's head is like the first layer, Nemotron-H has no RoPE."
    if config.model_type == "nemotron_h":
        return Reach(rotates=False)
    if config.model_type not in ("exaone4", "exaone_moe"):
        return Reach()
    kinds = getattr(config, "mtp_layer_types", None) or config.layer_types
    slides = kinds[0] == "sliding_attention"
    always = config.model_type == "exaone_moe" or "sliding_attention" not in config.layer_types
    return Reach(config.sliding_window if slides else None, slides or always)


class MiMoConfig(Qwen2Config):
    "The config of MiMo-7B: Qwen2's, and the number of layers of the MTP head."

    model_type = "mimo"
    num_nextn_predict_layers: int = 0


class MiMoForCausalLM(Qwen2ForCausalLM):
    "MiMo-7B without its MTP head."

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"model\.mtp_layers\..*"]


AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
