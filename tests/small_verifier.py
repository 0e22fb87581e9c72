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
