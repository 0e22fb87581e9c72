"""What the tests of the documentation's statements share: tiny verifiers on disk and a packed batch."""

import copy
from functools import lru_cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

H, V = 16, 24
SHAPE = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.2,
)
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def write_verifier(folder, family="llama", **shape):
    "A random model, saved as a checkpoint."
    config, model = FAMILIES[family]
    torch.manual_seed(0)
    model(config(**SHAPE | shape)).save_pretrained(folder)
    return Path(folder)


def layer(family="llama", layers=1, **shape):
    "The config of draft layers."
    return FAMILIES[family][0](**SHAPE | dict(num_hidden_layers=layers) | shape)


@lru_cache
def _batch(width, documents):
    g = torch.Generator().manual_seed(1)
    n = sum(documents)
    return dict(
        input_ids=torch.randint(0, V - 1, (1, n), generator=g),
        hidden_states=torch.randn(1, n, width * H, generator=g),
        verifier_last_hidden_states=torch.randn(1, n, H, generator=g),
        loss_mask=torch.ones(1, n, dtype=torch.bool),
        position_ids=torch.cat([torch.arange(d) for d in documents])[None],
        document_ids=torch.cat([torch.full((d,), i) for i, d in enumerate(documents)])[None],
    )


def batch(width=3, documents=(11, 9)):
    "A packed row: states of `width` layers, every position trained."
    return copy.deepcopy(_batch(width, documents))
