"""The verifier's KV cache, of attention layers and recurrent layers.
The former keep every position, so that a rejected draft can be cut off; the latter keep one state, from which
nothing can be cut."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ..nn.target_head import text_config


ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def recurrent_kinds(config: PretrainedConfig) -> list[str]:
    "Kinds of layers of a verifier, sorted, whose cache is not a list of positions; empty: attention alone."
    kinds = getattr(text_config(config), "layer_types", None) or ()
    return sorted({*kinds} - ATTENTION)


class LightningCache(MiniMaxCache):
    "The cache of MiniMax-Text-01: keys and values of full layers, a state of linear ones."

    def get_seq_length(self, layer_idx: int = 0) -> int:
        "Positions in the full layers."
        layers: Any = self.layers
        return max((layer.get_seq_length() for layer in layers), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        "Keys of the full layers, and the position of the first."
        return query_length + self.get_seq_length(), 0

    def reorder_cache(self, beam_idx: torch.LongTensor):
        "Keep these rows of the batch, in every layer."
        super().reorder_cache(beam_idx)
        self.linear_cache = [state[beam_idx] if len(state) else state for state in self.linear_cache]


def new_cache(config: PretrainedConfig) -> DynamicCache:
    """An empty cache for a verifier, with a state for each layer that needs one. Without recurrent layers it keeps
    every position, and can be cut back."""
    if text_config(config).model_type == "minimax":
        return LightningCache()
    return DynamicCache(config=config) if recurrent_kinds(config) else DynamicCache()


def crop_cache(cache: DynamicCache, length: int):
    "Forget, in place, all but the first `length` positions. ValueError where a layer has a state."
    remove = cache.get_seq_length() - length
    states = any(hasattr(layer, "recurrent_states") for layer in cache.layers)
    if remove > 0 and (states or isinstance(cache, LightningCache)):
        raise ValueError(f"no {remove} tokens can be cut from a recurrent state: read again")
    if remove > 0:
        cache.crop(-remove)


@lru_cache(None)
def cache_keyword(takes: Callable[..., Any]) -> str:
    """The keyword, "cache" or "past_key_values", by which a class of models (its `forward`) or of outputs of
    transformers takes its KV cache."""
    return "cache" if "cache" in inspect.signature(takes).parameters else "past_key_values"


def positions_of_mask(attention_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Positions [B, L] int64 of the last L (`length`) tokens, that count real tokens alone, from 0 in each row: the
    mask [B, past + L] is 0 at padding, which has position 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


def text_positions(
    input_ids: torch.Tensor,  # [B, L]
    position_ids: torch.Tensor | None,  # [B, L]; None: those after the cache
    cache: DynamicCache | None,  # with `position_shift` where it holds pictures
) -> torch.Tensor:  # [B, L], or [3, B, L] where the shift has that shape
    "Positions of text in a vision-language model, after the pictures in the same cache."
    if position_ids is None:
        past = cache.get_seq_length() if cache is not None else 0
        positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        position_ids = positions.expand_as(input_ids)
    shift = getattr(cache, "position_shift", None)
    return position_ids if shift is None else position_ids + shift.to(position_ids.device)


@contextmanager
def scaled_by_position(layers: Iterable[nn.Module], position_ids: torch.Tensor | None) -> Iterator[None]:
    """Within the block, Llama 4 scales each query of its decoder layers by the position of its token [B, L]; None: by
    slots, as transformers does it."""

    def hook_for(attention):
        def hook(module, args, queries):  # [B, L, heads·head_dim]
            steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
            scales = torch.log1p(steps) * attention.attn_scale + 1.0
            return (queries * scales[..., None].to(queries.device)).to(queries.dtype)

        return hook

    positions: Any = position_ids
    tuned: list[Any] = []
    if positions is not None:
        attentions = [getattr(layer, "self_attn", None) for layer in layers]
        tuned = [a for a in attentions if getattr(a, "attn_temperature_tuning", False)]
    with ExitStack() as stack:
        for attention in tuned:
            if not attention.use_rope:
                hook = attention.q_proj.register_forward_hook(hook_for(attention))
                stack.enter_context(hook)
                attention.attn_temperature_tuning = False  # its own
                stack.callback(setattr, attention, "attn_temperature_tuning", True)
        yield


FEW = 64  # folded queries of a head; a prefill has more, and there the copies are a small part


def folded_attention(
    module: nn.Module,  # an attention layer of transformers
    query: torch.Tensor,  # [B, heads, L, head_dim]
    key: torch.Tensor,  # [B, key heads, S, head_dim]
    value: torch.Tensor,  # [B, key heads, S, head_dim]
    attention_mask: torch.Tensor | None,  # [B, 1, L, S] bool, or added to the scores
    dropout: float = 0.0,
    scaling: float | None = None,  # of the scores; None: 1/sqrt(head_dim)
    **kwargs: Any,  # of transformers' function
) -> tuple[torch.Tensor, None]:  # [B, L, heads, head_dim], as transformers' function
    "`sdpa` of transformers, without copies of keys where few queries share them under a mask."
    (B, heads, L, _), shared = query.shape, key.shape[1]
    few = shared < heads and L * heads // shared <= FEW and query.device.type == "cpu"
    plain = dropout == 0 and kwargs.get("position_bias") is None
    if attention_mask is None or attention_mask.shape[1] != 1 or not (few and plain):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    mask = attention_mask.repeat(1, 1, heads // shared, 1) if L > 1 else attention_mask
    folded = query.reshape(B, shared, -1, query.shape[-1])
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(B, heads, L, -1).transpose(1, 2).contiguous(), None


@contextmanager
def folded_heads() -> Iterator[None]:
    "Within the block, models whose attention is `sdpa` use `folded_attention`."
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = folded_attention  # of this process, as transformers offers
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


SPARE = 64  # columns that are written in place before the buffers are made anew


class ColumnLayer(DynamicLayer):
    "Keys and values of rows that end in the same column, in buffers with columns to spare; first those of a prefill."

    keys: Any  # [B, heads, width, head_dim], the last columns of its buffer
    values: Any

    def __init__(self, read: Any):
        super().__init__()
        self.is_initialized = True
        self.keys, self.values = read.keys.to(read.values.dtype), read.values
        self.buffers = [self.keys, self.values]  # each [B, heads, columns, head_dim]
        self.end = self.keys.shape[2]  # columns of the buffers that are written

    def show(self, width: int):
        "Forget the columns before the longest text, of so many columns, which no row has any more."
        self.keys, self.values = (b[:, :, self.end - width : self.end] for b in self.buffers)

    def _move(self, rows, end):
        "Make buffers of these rows whose last written column is number `end`."
        width = self.keys.shape[2]
        for i, states in enumerate((self.keys, self.values)):
            heads, dim = states.shape[1], states.shape[3]
            self.buffers[i] = states.new_zeros(len(rows), heads, end + SPARE, dim)
            self.buffers[i][:, :, end - width : end] = states[rows]
        self.end = end
        self.show(width)

    def reorder_cache(self, beam_idx: torch.LongTensor):
        "Take these rows; one may be taken several times."
        self._move(beam_idx.to(self.keys.device), self.keys.shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        "Write new columns [B, heads, L, head_dim] of keys and values; gives them with those before."
        (rows, _, width, _), new = self.keys.shape, key_states.shape[2]
        if self.end + new > self.buffers[0].shape[2]:
            self._move(torch.arange(rows), width)
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, self.end : self.end + new] = states
        self.end += new
        self.show(width + new)
        return self.keys, self.values

    def put(self, rows: list[int], read: Any):
        "Replace n rows of the batch by those of n prompts (`read`: their DynamicLayer)."
        length = read.keys.shape[2]
        if length > self.end:
            self._move(torch.arange(len(self.keys)), length)
        for buffer, states in zip(self.buffers, (read.keys, read.values)):
            buffer[rows, :, self.end - length : self.end] = states.to(buffer.dtype)
        self.show(max(length, self.keys.shape[2]))
