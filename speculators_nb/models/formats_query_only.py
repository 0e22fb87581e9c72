"""Gemma 4's assistants: reading and writing the layout of transformers' `Gemma4AssistantForCausalLM`.
Its tensors have our names, but for a prefix and a head that is stored as an embedding."""

from typing import Any

from ..core.config import layer_config_from_dict
from .formats import (
    FieldsAndTensors,
    Folder,
    NativeCheckpoint,
    NativeFormat,
    Target,
    Tensors,
    inverse,
    register_format,
    rename,
    write_native,
)
from .query_only import QueryOnlySpeculatorConfig, from_verifier

# The layout's `model.embed_tokens` is the draft head alone (`tie_word_embeddings`): what is embedded is embedded by the
# verifier. Which of the verifier's layers gives the keys is written nowhere: it follows from the verifier's config.

KINDS_OF_MODEL = ("gemma4_assistant", "gemma4_unified_assistant")
NAMES = {"lm_head.": "model.embed_tokens.", "layers.": "model.layers.", "norm.": "model.norm."}
CENTROIDS = {"centroids.": "masked_embedding.centroids.", "token_ordering": "masked_embedding.token_ordering"}


def is_assistant(config: dict, names: set[str]) -> bool:
    "Whether a config.json is that of one of Gemma 4's assistants."
    return config.get("model_type") in KINDS_OF_MODEL


def read_assistant(native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    "Read an assistant. Errors: ValueError for a verifier that shares no keys as Gemma 4 does."
    if target.config.model_type != "gemma4_text":
        raise ValueError(
            f"{native.name} reads the keys of a Gemma 4, and {target.path!r} is a {target.config.model_type}; give "
            "the verifier that it was trained for"
        )
    layers: Any = layer_config_from_dict(native.config["text_config"] | dict(model_type="gemma4_text"))
    fields = from_verifier(target.config, layers) | dict(
        hidden_size=native.config_value("backbone_hidden_size"),
        vocab_size=layers.vocab_size,
        speculative_tokens=4,
    )
    if native.config_value("use_ordered_embeddings", False):
        fields |= {name: native.config[name] for name in ("num_centroids", "centroid_intermediate_top_k")}
    tensors = native.tensors()
    head = tensors.pop("lm_head.weight", None)  # a copy, where they are tied
    if head is not None and not native.config_value("tie_word_embeddings", True):
        tensors["model.embed_tokens.weight"] = head
    return fields, rename(tensors, inverse(NAMES | CENTROIDS))


def write_assistant(config: QueryOnlySpeculatorConfig, tensors: Tensors, folder: Folder, target: Target | None = None):
    """Write the layout that transformers, vLLM and SGLang read. Errors: ValueError for a drafter that reads the keys of
    another family."""
    if config.attention_scale != 1:
        raise ValueError(
            f"attention_scale={config.attention_scale:g}: an engine reads the keys of Gemma 4, whose scores have no "
            "factor, and this drafter is for another family; draft with `generate` here"
        )
    raw = dict(
        model_type="gemma4_assistant",
        architectures=["Gemma4AssistantForCausalLM"],
        backbone_hidden_size=config.hidden_size,
        tie_word_embeddings=True,
        use_ordered_embeddings=config.num_centroids is not None,
        text_config=config.transformer_layer_config.to_dict(),
    )
    if config.num_centroids is not None:
        raw |= {name: getattr(config, name) for name in ("num_centroids", "centroid_intermediate_top_k")}
    write_native(folder, raw, rename(tensors, NAMES | CENTROIDS))


register_format(
    NativeFormat(
        name="gemma4_assistant",
        model_type="query_only",
        about="the assistants of Gemma 4",
        looks_for="a config.json with model_type gemma4_assistant",
        recognises=is_assistant,
        read=read_assistant,
        write=write_assistant,
    )
)
