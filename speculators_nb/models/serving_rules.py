"""Rules for what vLLM would refuse in a drafter's config.json, or read differently.
Each is one small rule about what was trained, shared by the drafters that need it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers import PretrainedConfig

from ..nn.layers import LATENT_FAMILIES, LAYER_FAMILIES, ROPE

# A drafter may be trained with more than a serving engine implements: a sliding window on one layer of two, another
# activation, longer rotary angles. vLLM reads `config.json` with defaults of its own, so a field that is missing, or
# one that it does not know, changes the drafts in silence: the text stays the verifier's, acceptance falls. A rule
# reads the stored JSON, and the verifier's config where there is one, and yields sentences that name field, value and
# remedy.

Rule = Callable[[dict[str, Any], PretrainedConfig | None], Iterable[str]]
LAYER = "transformer_layer_config"


def layer_of(raw: dict[str, Any]) -> dict[str, Any]:  # config.json -> its draft layers
    "The stored config of the draft layers."
    return raw.get(LAYER) or {}


def layer_types_of(raw: dict[str, Any]) -> set[str]:  # config.json -> kinds of attention
    "The kinds of attention of the draft layers."
    return set(layer_of(raw).get("layer_types") or ["full_attention"])


def first_proposal(raw: dict[str, Any]) -> dict[str, Any]:  # config.json -> proposal method
    "The first proposal method of a stored config."
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0]


def rope_as_trained(raw: dict[str, Any], verifier: Any = None) -> Iterator[str]:
    "vLLM (0.32) must rotate draft layers by the angles of training."
    rope = layer_of(raw).get("rope_parameters") or {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if any(isinstance(v, dict) for v in rope.values()):
        yield (
            f"{ROPE} are given by layer type; vLLM's draft layers read rope_theta "
            "beside them (10000 where there is none): write the parameters that were "
            "trained with in their place, those of sliding_attention if there are any"
        )
    if kind == "proportional" and rope.get("factor", 1) != 1:
        yield f"{ROPE}.factor is {factor}; vLLM's proportional RoPE has no factor, train with 1"
    if kind == "yarn" and not factor:
        yield f"{ROPE}.factor is {factor!r}; vLLM's yarn needs a number, write what was trained with"


def rope_of_some_requests(raw: dict[str, Any], verifier: Any = None) -> Iterator[str]:
    "For which vLLM (0.32) rotates draft layers by other angles than those of training."
    layer = layer_of(raw)
    rope, length = layer.get("rope_parameters") or {}, layer.get("max_position_embeddings", 0)
    kind, factor, n = (rope.get(name) for name in ("rope_type", "factor", "original_max_position_embeddings"))
    if kind == "dynamic":
        yield (
            f"{ROPE}.rope_type is dynamic: vLLM never scales its angles, training scales those "
            "of texts longer than max_position_embeddings; drafts for such texts differ"
        )
    if kind == "yarn" and factor and n and n * factor < length:
        yield (
            f"{ROPE}.factor is {factor:g}: vLLM's yarn has angles for {n * factor:g} positions, less than "
            f"max_position_embeddings={length}; serve with max_model_len up to that"
        )
    if kind == "longrope":
        reach, attention_factor = length / (n or 1), rope.get("attention_factor")
        if attention_factor or (factor and n and factor != reach):
            yield (
                f"{ROPE} have {factor=} and {attention_factor=}; vLLM's longrope reads neither, but "
                f"max_position_embeddings / original_max_position_embeddings; train with that factor, {reach:g}"
            )
        yield (
            f"{ROPE}.rope_type is longrope: vLLM takes the long factors for every text where max_model_len is above "
            f"{n}, training takes them for longer texts alone; serve with max_model_len up to {n} for drafts as trained"
        )
    if "mrope_section" in rope:
        yield (
            f"{ROPE}.mrope_section: vLLM counts three coordinates for a picture's "
            "tokens, the drafter was trained with one; drafts after pictures differ"
        )


def silu_only(raw: dict[str, Any], verifier: Any = None) -> Iterator[str]:
    "vLLM's draft layers have one activation."
    activation = layer_of(raw).get("hidden_act", "silu")
    if activation != "silu":
        yield f"{LAYER}.hidden_act is {activation!r}; vLLM's draft layers have silu alone"


def known_layer_family(raw: dict[str, Any], verifier: Any = None) -> Iterator[str]:
    "The draft layers are of a kind that vLLM serves."
    family = layer_of(raw).get("model_type")
    if family not in LAYER_FAMILIES:
        yield f"{LAYER}.model_type is {family!r}; vLLM serves {' and '.join(LAYER_FAMILIES)}"


def as_latent_attention_is_served(raw: dict[str, Any], verifier: Any = None) -> Iterator[str]:
    "What vLLM's latent attention (0.32) leaves out, or reads differently."
    layer = layer_of(raw)
    if layer.get("model_type") not in LATENT_FAMILIES:
        return
    rope, theirs = layer.get("rope_parameters") or {}, "vLLM's latent attention"
    if raw.get("norm_before_fc"):
        yield f"norm_before_fc is True; {theirs} comes with a norm for each feature alone, train with fc_norm"
    if layer.get("rope_interleave") is False:
        yield f"{LAYER}.rope_interleave is False; {theirs} rotates neighbours, train with True"
    if "sliding_attention" in layer_types_of(raw):
        yield f"{LAYER}.layer_types has sliding_attention; {theirs} has no window, train without"
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        yield f"{ROPE}.rope_type is {kind!r}; {theirs} takes any other type for yarn, train with default or yarn"
    if kind != "yarn":
        return
    for name in ("attention_factor", "truncate"):
        if rope.get(name) is not None:
            yield f"{ROPE}.{name} is {rope[name]}; {theirs} does not read it, train without"
    scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    if bool(scales[0]) != bool(scales[1]):
        yield (
            f"{ROPE} have mscale={scales[0]} and mscale_all_dim={scales[1]}; where one of them is missing, {theirs} "
            "takes another factor for cosines and sines: train with both or without"
        )
    trained, length = rope.get("original_max_position_embeddings"), layer.get("max_position_embeddings", 4096)
    if not trained:
        yield f"{ROPE}.original_max_position_embeddings is missing; vLLM needs it, write what was trained with"
    elif trained * rope.get("factor", 1) < length:
        yield (
            f"{ROPE}.factor is {rope.get('factor')}; {theirs} has angles for {trained} times as many positions, less "
            f"than max_position_embeddings={length}: train with {length / trained:g}"
        )


def reaches_as_far(raw: dict[str, Any], verifier: Any = None) -> Iterator[str]:
    "The drafter takes as many positions as the verifier."
    draft, target = layer_of(raw).get("max_position_embeddings"), verifier and verifier.max_position_embeddings
    if target and (draft or 0) < target:
        yield f"{LAYER}.max_position_embeddings is {draft}, the verifier's {target}; vLLM stops drafting beyond it"


def written(*fields: str, why: str, none_counts: bool = True) -> Rule:
    "A rule: these fields are written (null is, or is not), because a default would decide: `why`, in words."

    def rule(raw, verifier=None):
        for name in fields:
            if name not in raw or (raw[name] is None and not none_counts):
                yield f"{name} is not written; {why}"

    return rule


# Verifiers of which vLLM (0.32, deepseek_v2.py) returns a layer's input plus its residual: before layer 0 there is none
WITHOUT_FIRST_STATE = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def layers_returned(field: str) -> Rule:  # of config.json: layers of the verifier that are read
    "A rule: the verifier has the layers that are read, and vLLM returns their states."

    def rule(raw, verifier=None):
        ids = raw.get(field)
        if verifier is None or not ids:
            return
        if max(ids) > verifier.num_hidden_layers:
            yield f"{field}={ids}, but the verifier has {verifier.num_hidden_layers} layers"
        elif 0 in ids and verifier.model_type in WITHOUT_FIRST_STATE:
            yield (
                f"{field}={ids}: vLLM fails at the state that enters layer 0 of a verifier of "
                f"model_type={verifier.model_type!r}; train with layers from 1 on"
            )

    return rule


def refused(sentence: str) -> Rule:
    "A rule: vLLM serves it in no case, or not from this folder."
    return lambda raw, verifier=None: [sentence]


def own_layout(drafters: str) -> Rule:  # in words
    "A rule: vLLM reads them in another layout than a speculators folder."
    return refused(
        f"vLLM reads {drafters} in their own layout alone; write it with model.save_native(folder) "
        "(`speculators-nb export`) and serve that"
    )


def short_window(raw: dict[str, Any], needed: int, why: str) -> Iterator[str]:  # positions that must be reached
    "Where a sliding layer reaches less."
    window = layer_of(raw).get("sliding_window")
    if "sliding_attention" in layer_types_of(raw) and isinstance(window, int) and window < needed:
        yield f"{LAYER}.sliding_window is {window}, less than the {why}"


def one_kind_of_attention(why: str) -> Rule:  # what vLLM does with a mixture
    "A rule: all draft layers attend in the same way."

    def rule(raw, verifier=None):
        if len(layer_types_of(raw)) > 1:
            yield f"{LAYER}.layer_types mixes kinds of attention; {why}, use one kind"

    return rule
