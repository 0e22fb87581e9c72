"""Numbers: configurations of draft layers that say what a draft layer does not do, RoPE parameters that do not fit,
precisions and attention that are not there."""

import copy
import json
import shutil

import torch
from transformers import Qwen3Config

from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.attention import block_attention, causal
from speculators_nb.nn.layers import Rotary, draft_layer_config
from speculators_nb.nn.target_head import target_head_for

from .harness import GOOD, Case

RAW = {
    kind: json.loads((GOOD["drafter"].parent / kind / "config.json").read_text())
    for kind in ("eagle", "eagle3", "peagle", "dflash", "dspark", "mtp")
}
LAYER = "transformer_layer_config"


def build(kind, **change):
    "A drafter of a config with other entries for its layers."

    def run(folder):
        raw = copy.deepcopy(RAW[kind])
        raw[LAYER].update(change)
        config = SpeculatorModelConfig.from_dict(raw)
        return SpeculatorModel.registered_model_class_from_config(config)(config)

    return run


def rope(**given):
    return dict(rope_parameters=dict(rope_theta=10000.0) | given)


def long(**given):
    return rope(
        rope_type="longrope",
        original_max_position_embeddings=32,
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        **given,
    )


LAYERS = {  # what is bad -> (entries of the layers' config, what is said); head_dim is 8, num_hidden_layers 1
    "attention_dropout": (dict(attention_dropout=0.1), r"attention_dropout=0\.1.*set it to 0"),
    "soft-cap on scores": (dict(attn_logit_softcapping=50.0), r"attn_logit_softcapping=50\.0.*remove it"),
    "scale on queries": (dict(query_pre_attn_scalar=64), r"query_pre_attn_scalar=64.*set it to 8"),
    "clipped projections": (dict(clip_qkv=8.0), r"clip_qkv=8\.0.*remove it"),
    "attention_multiplier": (dict(attention_multiplier=0.01), r"attention_multiplier=0\.01.*remove it"),
    "residual_multiplier": (dict(residual_multiplier=0.2), r"residual_multiplier=0\.2.*set it to 1"),
    "embedding_multiplier": (dict(embedding_multiplier=12.0), r"embedding_multiplier=12\.0.*set it to 1"),
    "logit_scale": (dict(logit_scale=0.0625), r"logit_scale=0\.0625.*set it to 1"),
    "chunked attention": (dict(attention_chunk_size=128), r"attention_chunk_size=128.*remove it"),
    "interleaved rotation": (dict(rope_interleaved=True), r"rope_interleaved=True.*set it to False"),
    "interleaved rotation, vLLM's word": (dict(is_neox_style=False), r"is_neox_style=False.*set it to True"),
    "biases of projections alone": (dict(qkv_bias=True), r"qkv_bias=True.*set it to False"),
    "unknown activation": (dict(hidden_act="swishy"), r"hidden_act='swishy': is not known; choose .*silu"),
    "heads that do not divide": (dict(num_attention_heads=3), r"number of attention heads \(3\)"),
    "a family that is no draft layer": (dict(model_type="gemma2"), r"gemma2.*choose from llama, qwen3"),
    "unknown kind of layer": (
        dict(layer_types=["chunked_attention"]),
        r"layer_types.*'chunked_attention' is unknown; choose from full_attention, sliding_attention",
    ),
    "kinds for another number of layers": (dict(layer_types=["full_attention"] * 3), r"num_hidden_layers|layer_types"),
    "sliding without a window": (
        dict(layer_types=["sliding_attention"], sliding_window=None),
        r"sliding_window=None.*give a number of positions, or full_attention",
    ),
    "a window of 0": (
        dict(layer_types=["sliding_attention"], sliding_window=0),
        r"sliding_window=0.*give a number of positions",
    ),
    "a window of words": (dict(layer_types=["sliding_attention"], sliding_window="wide"), r"sliding_window.*wide"),
    "unknown rope_type": (rope(rope_type="ntk"), r"rope_type='ntk' is unknown; choose from default, .*llama3"),
    "rope_type of pictures": (
        rope(rope_type="mrope", mrope_section=[1, 1, 2]),
        r"rope_type='mrope' is unknown; choose from default",
    ),
    "dynamic without factor": (
        rope(rope_type="dynamic"),
        r"transformer_layer_config: .*Missing required keys in .rope_parameters. for 'rope_type'='dynamic': ..factor",
    ),
    "longrope without factors": (rope(rope_type="longrope"), r"short_factor|long_factor"),
    "longrope, three factors for four frequencies": (
        long() | rope(**long()["rope_parameters"] | dict(short_factor=[1.0] * 3)),
        r"longrope.*8 rotated channels",
    ),
    "longrope, words for factors": (
        long() | rope(**long()["rope_parameters"] | dict(short_factor=["a"] * 4)),
        r"short_factor.*\['a'|do not fit",
    ),
    "yarn by factor 0": (
        rope(rope_type="yarn", factor=0.0, original_max_position_embeddings=32),
        r"factor.*0\.0.*(do not fit|finite)",
    ),
    "linear by factor 0": (rope(rope_type="linear", factor=0.0), r"factor.*0\.0.*(do not fit|finite)"),
    "linear by a word": (
        rope(rope_type="linear", factor="two"),
        r"transformer_layer_config.rope_parameters=.*'factor': 'two'. do not fit rope_type='linear'",
    ),
    "rope_theta of 0": (rope(rope_type="default", rope_theta=0.0, partial_rotary_factor=3), r"partial_rotary_factor=3"),
    "rotating half a channel pair": (
        rope(rope_type="default", partial_rotary_factor=0.4),
        r"partial_rotary_factor=0\.4 rotates 3 of 8 channels.*even",
    ),
    "rotating nothing": (
        rope(rope_type="default", partial_rotary_factor=0.0),
        r"partial_rotary_factor=0\.0 rotates 0 of 8.*choose",
    ),
    "rotating more than all": (
        rope(rope_type="linear", factor=2.0, partial_rotary_factor=1.5),
        r"partial_rotary_factor=1\.5.*choose a share",
    ),
    "rotating backwards": (
        rope(rope_type="default", partial_rotary_factor=-0.5),
        r"partial_rotary_factor=-0\.5.*choose a share",
    ),
    "a share in words": (rope(rope_type="default", partial_rotary_factor="half"), r"partial_rotary_factor.*half"),
    "parameters of unknown kinds of layers": (
        dict(rope_parameters={"local": dict(rope_theta=1.0), "global": dict(rope_theta=2.0)}),
        r"rope_parameters.*one set of parameters",
    ),
    "a sliding entry that is none": (
        dict(rope_parameters={"sliding_attention": None, "full_attention": dict(rope_type="default", rope_theta=1e4)}),
        r"rope_parameters.*one set",
    ),
}
QWEN3 = {  # likewise for Qwen3 layers of DFlash; two layers
    "no norm where Qwen3 has one": (dict(use_qk_norm=False), r"use_qk_norm=False.*set it to True"),
    "biases in the MLP": (dict(mlp_bias=True), r"mlp_bias=True.*qwen3.*set it to False"),
    "a window that is switched off": (
        dict(
            layer_types=["sliding_attention"] * RAW["dflash"][LAYER]["num_hidden_layers"],
            sliding_window=8,
            use_sliding_window=False,
        ),
        r"sliding_window=None.*use_sliding_window=False",
    ),
}


def in_folder(kind, change):
    "Files of a drafter's folder with other entries for its layers."
    raw = copy.deepcopy(RAW[kind])
    raw[LAYER].update(change)
    return {
        "drafter/config.json": raw,
        "drafter/model.safetensors": lambda path: shutil.copy(
            GOOD["drafter"].parent / kind / "model.safetensors", path
        ),
    }


def impl(name):
    def run(folder):
        q, k, own = torch.randn(2, 3, 1, 8), torch.randn(2, 4, 8), torch.randn(2, 3, 1, 8)
        return block_attention(q, k, k, own, own, causal(), impl=name)

    return run


def far_head(folder):
    raw = copy.deepcopy(RAW["eagle3"])
    raw["speculators_config"]["verifier"] = dict(name_or_path="someone/gemma", architectures=["Gemma2ForCausalLM"])
    return target_head_for(SpeculatorModelConfig.from_dict(raw)).finish(torch.zeros(2))


TRAIN = "train {features} {here}/d --verifier {verifier}"
CASES = [
    *(
        Case(f"{kind} layer: {name}", build(kind, **change), said)
        for name, (change, said) in LAYERS.items()
        for kind in ("eagle3",)
    ),
    *(Case(f"dflash layer: {name}", build("dflash", **change), said) for name, (change, said) in QWEN3.items()),
    *(
        Case(f"{kind} layer: {name}", build(kind, **LAYERS[name][0]), LAYERS[name][1])
        for kind in ("eagle", "peagle")
        for name in (
            "attention_dropout",
            "unknown rope_type",
            "rotating half a channel pair",
            "soft-cap on scores",
            "unknown kind of layer",
        )
    ),
    *(
        Case(f"mtp layer: {name}", build("mtp", **LAYERS[name][0]), LAYERS[name][1])
        for name in ("attention_dropout", "unknown rope_type", "rotating half a channel pair", "rotating nothing")
    ),
    *(
        Case(
            f"from_pretrained: {name}",
            f"{TRAIN} --algorithm eagle3 --from-pretrained {{here}}/drafter",
            LAYERS[name][1],
            in_folder("eagle3", LAYERS[name][0]),
        )
        for name in (
            "attention_dropout",
            "unknown rope_type",
            "dynamic without factor",
            "rotating half a channel pair",
            "clipped projections",
            "unknown kind of layer",
            "unknown activation",
        )
    ),
    Case("float16", f"{TRAIN} --algorithm eagle3 --extra fp16=true", "fp16=True.*bf16=True"),
    Case(
        "block_attention: eager",
        impl("eager"),
        "attn_impl='eager' is unknown; choose from blocked, flex .*lean=False from eager",
    ),
    Case(
        "target head: soft-cap of a verifier that is not here",
        far_head,
        "someone/gemma.*final_logit_softcapping.*load_verifier_weights",
    ),
    Case(
        "draft_layer_config: parameters of unknown kinds of layers",
        lambda folder: Rotary(
            draft_layer_config(
                Qwen3Config(
                    num_hidden_layers=1, rope_parameters={"local": dict(rope_theta=1.0), "rope_type": "default"}
                )
            )
        ),
        "rope_parameters.*one set of parameters",
    ),
]
