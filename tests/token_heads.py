"What the tests of Medusa and of MLP speculators share: a random verifier, and a packed row."

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from speculators_nb.nn.layers import draft_layer_config

V, H, LAYERS = 40, 16, 3
SIZES = dict(vocab_size=V, hidden_size=H, num_attention_heads=2, num_key_value_heads=1, head_dim=8)


def write_verifier(folder):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=24, num_hidden_layers=LAYERS))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


def layer():
    return draft_layer_config(Qwen3Config(**SIZES))


def row(seed, lengths=(13, 9), padding=4, holes=0.3):
    "A packed row of random documents with holes in the loss mask."
    g = torch.Generator().manual_seed(seed)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    L = len(documents)
    return dict(
        input_ids=torch.randint(V, (1, L), generator=g),
        document_ids=documents[None],
        loss_mask=torch.rand(1, L, generator=g) > holes,
        verifier_last_hidden_states=torch.randn(1, L, H, generator=g),
        hidden_states=torch.randn(1, L, H, generator=g),
        position_ids=torch.zeros(1, L, dtype=torch.long),
    )
