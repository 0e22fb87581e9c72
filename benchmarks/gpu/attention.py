"""Causal attention within documents, forward and backward, by each back end that a drafter's layers could use, with
Qwen3-8B's heads (32 of queries, 8 of keys, 128 channels) in bf16.

`varlen` is torch's FlashAttention over documents laid end to end. It has no mask: it computes every row of the packed
row, and has no place for the keys of a block or of a later step. Its keys are repeated, since torch 2.11 has no grouped
heads for it.
"""

from functools import partial
from itertools import accumulate

import torch

from benchmarks.gpu.device import pick, wait
from benchmarks.gpu.process import failure
from benchmarks.gpu.step import DOCUMENTS, measure

HEADS = {"device": (32, 8, 128), "toy": (4, 2, 16)}
BACK_ENDS = ("flex", "varlen", "blocked", "sdpa")
SECONDS = {"device": 0.3, "toy": 0.0}


def varlen(q, k, v, lengths):
    """FlashAttention over documents. q [1, Hq, L, D], k and v [1, Hkv, L, D] -> [1, Hq, L, D]."""
    from torch.nn.attention.varlen import varlen_attn

    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(q.device)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    out = varlen_attn(*rows, borders, borders, max(lengths), max(lengths), window_size=(-1, 0))
    return out.transpose(0, 1)[None]


def computed_by(name, lengths, device):
    """A function of q, k and v."""
    from speculators_nb.nn.attention import attention, prefix_attention
    from speculators_nb.nn.masks import causal, same_document

    if name == "varlen":
        return partial(varlen, lengths=lengths)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    mask, rows = causal() & same_document(documents), torch.arange(sum(lengths), device=device)
    if name == "blocked":
        return lambda q, k, v: prefix_attention(q[0], k[0], v[0], [], rows, mask, "blocked")[None]
    return lambda q, k, v: attention(q, k, v, mask, name)


def run(cell, turn):
    """A row for each back end."""
    device, size, length = pick(), cell["size"], cell["length"]
    lengths = [n * length // 2048 for n in DOCUMENTS[size]]
    heads, kv_heads, d = HEADS[size]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, up = (
        torch.randn(1, h, length, d, generator=generator, device=device, dtype=dtype).requires_grad_(i < 3)
        for i, h in enumerate((heads, kv_heads, kv_heads, heads))
    )
    expected = None
    for name in BACK_ENDS if device.type == "cuda" else ("blocked", "sdpa"):
        call = computed_by(name, lengths, device)

        def forward(call=call):
            with torch.no_grad():
                call(q, k, v)

        def both(call=call):
            torch.autograd.grad(call(q, k, v), (q, k, v), up)

        try:
            for warm_up in (forward, both, both):
                warm_up()
            with torch.no_grad():
                out = call(q, k, v).float()
            expected = out if expected is None else expected
            wait(device)
            with turn():
                times = [measure(part, device, SECONDS[size])[0] for part in (forward, both)]
        except Exception as error:
            yield dict(cell["labels"], back_end=name, **failure(error))
            continue
        apart = float((out - expected).abs().max())
        yield dict(
            cell["labels"], back_end=name, forward_seconds=times[0], seconds=times[1], apart=apart, ok=apart < 0.05
        )
