"A verifier of a few thousand random weights, for tests that need no more than one."

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speculators_nb.verifier.tapped_model import Verifier


def small_verifier(aux_layer_ids: Sequence[int] | None = None, **sizes) -> Verifier:
    "A Llama, the same every time, whose layers are tapped; `sizes`: fields of its config."
    torch.manual_seed(0)
    usual = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    usual |= dict(num_attention_heads=2, num_key_value_heads=1)
    return Verifier(LlamaForCausalLM(LlamaConfig(**usual | sizes)).eval(), aux_layer_ids)


LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4, factor=8.0)
TURNING = {  # RoPE whose angles depend on a text's length, from 24 tokens on
    "longrope": dict(max_position_embeddings=192, rope_parameters=LONGROPE | dict(original_max_position_embeddings=24)),
    "dynamic": dict(max_position_embeddings=24, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=8.0)),
}


def turning_verifier(kind: str) -> Verifier:
    "One whose greedy text is another where keys keep the angles of a shorter text."
    return small_verifier([0, 1], initializer_range=1.0, **TURNING[kind])


def read_whole(verifier: Verifier, prompt: list[int], n: int) -> list[int]:
    "The greedy answer to a prompt, read from its beginning for each of n tokens."
    text = list(prompt)
    for _ in range(n):
        text.append(int(verifier(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
