"""Cases of LiLiCorr that NVIDIA ModelOpt's code was run on, and what it made of them: weights and inputs are drawn by
seed, so that the fixture (`modelopt_lilicorr.safetensors`) holds results alone. tests/parity/make_lilicorr_cases.py
writes it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

FIXTURE = Path(__file__).parent / "fixtures/modelopt_lilicorr.safetensors"
V, H, MASK_TOKEN, EPS = 40, 16, 39, 1e-6
STEPS = 4


class Case(NamedTuple):
    "A configuration, by ModelOpt's names."

    block_size: int = 4
    candidate_topk: int = 16
    hidden_size: int = 12  # 0: that of the draft layers
    factor_dim: int = 10
    num_layers: int = 2
    num_heads: int = 4
    mlp_ratio: float = 2.0
    logit_scale: float = 8.0
    vector_eps: float = 1e-4
    w_ce: float = 0.25
    w_margin: float = 0.0
    w_pen: float = 0.25
    margin: float = 2.0
    num_hidden_layers: int = 1
    window: int | None = None  # of all draft layers; None: they do not slide
    causal: bool = False  # inside a block
    features: int = 2  # layers of the verifier that are read
    lengths: tuple[int, ...] = (17, 12)  # of the texts; the batch is padded to the longest
    anchors: int = 6  # of each text
    loss_decay_factor: float = 7.0
    trained: float = 1.0  # share of the positions with loss


CASES = {
    "base": Case(),
    "margin": Case(w_ce=0.125, w_margin=0.125),
    "every_token": Case(candidate_topk=V, block_size=5, lengths=(20,), anchors=9),
    "one_candidate": Case(candidate_topk=1, w_margin=0.125, margin=1.0),
    "one_slot": Case(block_size=2, candidate_topk=20),
    "as_wide": Case(hidden_size=0, num_heads=2, num_layers=1, mlp_ratio=1.5, candidate_topk=32),
    "two_layers": Case(num_hidden_layers=2, features=3, block_size=6, candidate_topk=32, lengths=(19, 15)),
    "causal": Case(num_hidden_layers=2, causal=True, candidate_topk=32, loss_decay_factor=2.0),
    "window": Case(window=5, lengths=(20,), candidate_topk=32, anchors=10),
    "holes": Case(trained=0.8, candidate_topk=32, anchors=8, lengths=(18, 16)),
    "sharp": Case(logit_scale=20.0, vector_eps=0.3, candidate_topk=32, margin=5.0, w_margin=0.5, w_pen=1.0),
    "no_penalty": Case(w_pen=0.0, w_ce=1.0, candidate_topk=32, factor_dim=3),
}
HEAD = ("candidate_topk", "hidden_size", "factor_dim", "num_layers", "num_heads", "mlp_ratio", "logit_scale")
HEAD = (*HEAD, "vector_eps")
LAYER = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=EPS,
)


def head_fields(case):
    "The scorer's fields, as a checkpoint has them."
    return {f"lilicorr_{name}": getattr(case, name) for name in HEAD}


def drawing(name):
    "A function that draws a tensor of a shape, the same on every machine (this stream of numpy is frozen)."
    stream = np.random.RandomState(1 + list(CASES).index(name))
    return lambda *shape: torch.from_numpy(stream.standard_normal(shape)).float(), stream


def drawn_weights(name, shapes):
    "Tensor name -> weights, in the order of the names; those of norms are around 1."
    draw, _ = drawing(name)
    weights = {n: draw(*s) * 0.3 for n, s in sorted(shapes.items())}
    return {n: w / 3 + 1 if n.endswith("norm.weight") else w for n, w in weights.items()}


def drawn_batch(name):
    """What a step gets: input_ids, hidden_states, loss_mask, the verifier's last states before its final norm, anchors:
    [texts, …]."""
    case = CASES[name]
    draw, stream = drawing(name)
    texts, longest = len(case.lengths), max(case.lengths)
    inside = torch.arange(longest) < torch.tensor(case.lengths)[:, None]
    anchors = [np.sort(stream.choice(n - case.block_size + 1, case.anchors, replace=False)) for n in case.lengths]
    return dict(
        input_ids=torch.from_numpy(stream.randint(0, V - 1, (texts, longest))),
        hidden_states=draw(texts, longest, case.features * H),
        loss_mask=(inside & torch.from_numpy(stream.random_sample((texts, longest)) < case.trained)).float(),
        last_hidden=draw(texts, longest, H),
        anchors=torch.from_numpy(np.stack(anchors)),
    )
