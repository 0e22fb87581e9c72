"""Cases of Domino that SpecForge's code was run on, and what it made of them: weights and inputs are drawn by seed, so
that the fixture (`specforge_domino.safetensors`) holds results alone. tests/parity/make_domino_cases.py writes it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

FIXTURE = Path(__file__).parent / "fixtures/specforge_domino.safetensors"
V, H, MASK_TOKEN = 40, 16, 39
STEPS, TOTAL_STEPS = 5, 10
GRADIENTS_AT = 3  # the step of the schedule whose weight of the base loss the gradients are taken with


class Case(NamedTuple):
    "A configuration, by SpecForge's names."

    block_size: int = 4
    shift_label: bool = True
    pure_draft_prefix_len: int = 1
    emb_dim: int = 6
    gru_hidden_dim: int = 10
    num_hidden_layers: int = 1
    sliding_window: int | None = None  # of the last layer; None: it does not slide
    features: int = 2  # layers of the verifier that are read
    lengths: tuple[int, ...] = (17, 12)  # of the texts; the batch is padded to the longest
    anchors: int = 5  # of each text
    loss_decay_gamma: float | None = 7.0
    lambda_start: float = 1.0
    decay_ratio: float = 0.5
    trained: float = 1.0  # share of the positions with loss


CASES = {
    "released": Case(),
    "masks_alone": Case(shift_label=False),
    "no_prefix": Case(pure_draft_prefix_len=0, block_size=3),
    "masks_alone_no_prefix": Case(shift_label=False, pure_draft_prefix_len=0, loss_decay_gamma=2.0),
    "long_prefix": Case(block_size=6, pure_draft_prefix_len=3, loss_decay_gamma=4.0),
    "two_layers": Case(num_hidden_layers=2, features=3, block_size=5),
    "window": Case(num_hidden_layers=2, sliding_window=5, lengths=(20,), anchors=7),
    "masks_alone_window": Case(shift_label=False, sliding_window=4, features=1, lengths=(19, 9)),
    "no_decay": Case(loss_decay_gamma=None, lengths=(14, 11, 9), anchors=3),
    "slow_curriculum": Case(decay_ratio=1.0, lambda_start=0.7, emb_dim=3, gru_hidden_dim=5),
    "final_alone": Case(lambda_start=0.0),
    "holes": Case(trained=0.6, block_size=5, anchors=6),
}
LAYER = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)


def layer_fields(case):
    "Fields of a Qwen3Config."
    kinds = ["full_attention"] * case.num_hidden_layers
    if case.sliding_window:
        kinds[-1] = "sliding_attention"
    window = dict(use_sliding_window=bool(case.sliding_window), sliding_window=case.sliding_window)
    return LAYER | window | dict(num_hidden_layers=case.num_hidden_layers, layer_types=kinds)


def drawing(name):
    "A function that draws a tensor of a shape, the same on every machine (this stream of numpy is frozen)."
    stream = np.random.RandomState(1 + list(CASES).index(name))
    return lambda *shape: torch.from_numpy(stream.standard_normal(shape)).float(), stream


def drawn_weights(name, shapes):
    "Tensor name -> weights, in the order of the names; vectors are around 1."
    draw, _ = drawing(name)
    return {n: draw(*s) * 0.1 + 1 if len(s) == 1 else draw(*s) * 0.3 for n, s in sorted(shapes.items())}


def drawn_batch(name):
    "What SpecForge's model gets, and the anchors: input_ids, hidden_states, loss_mask, anchors [texts, …]."
    case = CASES[name]
    draw, stream = drawing(name)
    texts, longest = len(case.lengths), max(case.lengths)
    inside = torch.arange(longest) < torch.tensor(case.lengths)[:, None]
    anchors = [np.sort(stream.choice(n - 1, case.anchors, replace=False)) for n in case.lengths]
    return dict(
        input_ids=torch.from_numpy(stream.randint(0, V - 1, (texts, longest))),
        hidden_states=draw(texts, longest, case.features * H),
        loss_mask=(inside & torch.from_numpy(stream.random_sample((texts, longest)) < case.trained)).float(),
        anchors=torch.from_numpy(np.stack(anchors)),
    )
