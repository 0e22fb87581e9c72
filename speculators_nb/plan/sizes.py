"""Sizes of a verifier (target model) from its config.json, and of a drafter before it is made (on a meta device).
Weights, bytes of features and cache, FLOPs. A mixture of experts is counted by the experts that a token uses."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from ..models.base import SpeculatorModel
from ..nn.layers import first_layer, head_dim
from ..nn.target_head import text_config
from ..train.optimizers import parameter_kinds
from ..train.train_drafter import check_layers_given, draft_layers, layer_arguments
from ..verifier.identity import VerifierInfo, meta_model


class VerifierSizes(NamedTuple):
    "What costs follow from."

    weights: int  # all of them, experts that a token does not use included
    active: float  # of the decoder layers, that a token is multiplied with
    hidden: int  # H
    layers: int  # decoder layers
    query_width: int  # heads times their width
    caches: tuple[tuple[float, int], ...]  # of each layer: tokens that its KV cache keeps, numbers of one
    vocab: int  # V
    expert_weights: int = 0  # of all experts among which a token's are chosen
    experts: int = 1  # of a layer
    experts_used: int = 1  # of them, by a token


def expert_counts(text: PretrainedConfig) -> tuple[int, int]:
    "A language model's experts in a layer, and those that a token uses; 1, 1: a dense model."
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = ("num_experts_per_tok", "moe_topk", "top_k_experts")
    n = next((getattr(text, name) for name in counts if getattr(text, name, None)), None)
    k = next((getattr(text, name) for name in chosen if getattr(text, name, None)), None)
    return (n, k) if n and k else (1, 1)


UNCACHED = ("linear_attention", "conv", "mlp", "moe")  # kinds of layers; the former two keep a state


def layer_cache(text: Any, index: int) -> tuple[float, int]:
    """Tokens that the KV cache of a layer keeps (infinite: all of a text), and numbers of one. Latent attention keeps
    one short vector; the last layers of Gemma-3n share the cache of another one."""
    kinds = getattr(text, "layer_types", None)
    kind = kinds[index] if kinds else None
    borrows = index >= text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    if kind in UNCACHED or borrows or not getattr(text, "num_attention_heads", None):
        return math.inf, 0
    if getattr(text, "kv_lora_rank", None):
        return math.inf, text.kv_lora_rank + (getattr(text, "qk_rope_head_dim", None) or 0)
    layers = getattr(text, "per_layer_config", None)
    layer = layers[index] if layers else text
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    windows = dict(sliding_attention="sliding_window", chunked_attention="attention_chunk_size")
    kept = getattr(layer, windows.get(str(kind), ""), None) or math.inf
    return kept, heads * (head_dim(layer) + (getattr(layer, "v_head_dim", None) or head_dim(layer)))


def verifier_sizes(config: PretrainedConfig) -> VerifierSizes:
    """The sizes of a verifier, by the config of it or of its language model; no weight is read. Errors: ValueError for
    a config that transformers cannot build a model from."""
    text: Any = first_layer(text_config(config))
    model = meta_model(config)
    if model is None:
        raise ValueError(
            f"model_type={text.model_type!r}: transformers cannot build this model from its config.json, so that its "
            "weights cannot be counted; update transformers"
        )
    (n, k), active, total, routed = expert_counts(text), 0.0, 0, 0
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}  # rows are looked up
    if (head := model.get_output_embeddings()) is not None:
        tables.add(id(head.weight))
    for name, weight in model.named_parameters():
        total += weight.numel()
        is_expert = ".experts." in name or (weight.ndim == 3 and len(weight) == n > 1)
        in_decoder = id(weight) not in tables and not any(part in name for part in ("vision", "visual", "audio"))
        if in_decoder and weight.ndim > 1:
            active += weight.numel() * (k / n if is_expert else 1)
            routed += weight.numel() * is_expert
    heads = getattr(text, "num_attention_heads", None) or 0  # Mamba has none
    return VerifierSizes(
        total,
        active,
        text.hidden_size,
        text.num_hidden_layers,
        heads and heads * head_dim(text),
        tuple(layer_cache(text_config(config), i) for i in range(text.num_hidden_layers)),
        text.vocab_size,
        routed,
        n,
        k,
    )


def cache_bytes(sizes: VerifierSizes, tokens: float = 1) -> float:
    "Bytes that a text takes in a KV cache in bfloat16."
    return 2 * sum(min(tokens, kept) * numbers for kept, numbers in sizes.caches)


def forward_flops(sizes: VerifierSizes, context: int = 2048) -> float:
    "FLOPs of a token in the verifier's forward pass over a row of `context` tokens, without its head."
    return 2 * sizes.active + sizes.layers * 4 * sizes.query_width * context / 2


def empty_drafter(
    algorithm: str,  # a registered `speculators_model_type`
    info: VerifierInfo,  # of the verifier
    draft_arch: str | None = None,  # family of the draft layers; None: llama
    num_layers: int | None = None,  # how many; None: 1
    draft_vocab_size: int | None = None,  # None: the verifier's whole vocabulary
    device: str = "meta",  # where its tensors are
    **model_args: Any,  # those of `draft_layers` and of the class's `from_training_args`
) -> SpeculatorModel:
    """A fresh drafter with the shapes that it has beside its verifier, of which no weight is read. Errors: as of
    `new_drafter`."""
    drafter: Any = SpeculatorModel.registered_class(algorithm)

    def unweighted(cls: Any, config: Any, *_: Any) -> Any:
        return cls.class_of(config)(config)

    fresh: Any = classmethod(unweighted)
    names: dict[str, Any] = dict(with_first_weights=fresh, for_verifier=fresh)
    empty: Any = type(drafter.__name__, (drafter,), names)
    shape, model_args = layer_arguments(model_args)
    check_layers_given(drafter, shape | dict(draft_arch=draft_arch, num_layers=num_layers))
    fixed = bool(drafter.fixed_layers)
    layers = info.text if fixed else draft_layers(info, draft_arch or "llama", num_layers or 1, **shape)
    if draft_vocab_size is not None:
        model_args["draft_vocab_size"] = draft_vocab_size
    with torch.device(device):
        model = empty.from_training_args(layers, verifier_name_or_path=info.name, **model_args)
        model.verifier_layers = info.text.num_hidden_layers
        V, H = info.text.vocab_size, info.text.hidden_size
        if getattr(model, "verifier_attachment_mode", "") == "detached":  # it has no place for them
            model.embed_tokens = nn.Embedding(V, H).requires_grad_(False)
            model.lm_head = nn.Linear(H, V, bias=False).requires_grad_(False)
            model.verifier_attachment_mode = "train_only"
        if not model.own_heads and model.target_head.weight is None:
            rows = model.lm_head.weight
            if rows.shape[-1] != H:  # a head of the draft layers' width: the verifier's is beside it
                rows = nn.Parameter(torch.empty(V, H), requires_grad=False)
            model.target_head.set_rows(rows)
        if hasattr(model, "make_key_layers"):
            model.make_key_layers(info.name)
    return model


class DrafterSizes(NamedTuple):
    "Numbers that memory follows from."

    trained: int  # weights
    frozen: int  # weights, those of embedding and head
    matrices: int  # trained weights in hidden matrices, which Muon updates
    rows: int  # of the head over which the loss is taken: the draft vocabulary
    states: int  # of a token that training reads: those of its layers, and the last
    text: Any  # config of the draft layers, else of the verifier's language model
    layer: int = 0  # weights of the largest layer
    rest: int = 0  # trained weights outside of layers
    muon_flops: int = 0  # of one update of the matrices by Muon


def muon_flops(rows: int, columns: int) -> int:
    """FLOPs of Muon's update of a matrix, in bfloat16: five Newton-Schulz iterations of three products
    (torch.optim.Muon)."""
    short, long = sorted((rows, columns))
    return 5 * (4 * short**2 * long + 2 * short**3)


def drafter_sizes(model: SpeculatorModel, info: VerifierInfo) -> DrafterSizes:
    "Count the weights of a drafter from `empty_drafter`."
    kinds, config, text = parameter_kinds(model), cast(Any, model.config), cast(Any, info.text)
    trained = {name: w.numel() for name, w in model.named_parameters() if kinds.get(name, "frozen") != "frozen"}
    layers: Any = getattr(model, "layers", ())
    groups = [list(part.parameters()) for part in dict.fromkeys(layers)]
    inside = {id(weight) for group in groups for weight in group}
    return DrafterSizes(
        trained=sum(trained.values()),
        frozen=sum(w.numel() for w in model.parameters()) - sum(trained.values()),
        matrices=sum(n for name, n in trained.items() if kinds[name] == "hidden"),
        rows=getattr(config, "draft_vocab_size", None) or text.vocab_size,
        states=len({*model.drafter().aux_layer_ids, text.num_hidden_layers}),
        text=getattr(config, "transformer_layer_config", None) or text,
        layer=max((sum(w.numel() for w in group) for group in groups), default=0),
        rest=sum(w.numel() for w in model.parameters() if w.requires_grad and id(w) not in inside),
        muon_flops=sum(muon_flops(*w.shape) for name, w in model.named_parameters() if kinds.get(name) == "hidden"),
    )
