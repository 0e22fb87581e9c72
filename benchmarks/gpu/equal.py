"""One training step of each drafter, computed in several ways that must agree: loss and gradients of

    dense    every row at every step, scaled_dot_product_attention under the mask: the definition
    blocked  only the rows that carry loss, attention in blocks of plain tensor operations
    flex     the same with flex attention: what trains on CUDA
    masked   the definition with flex attention under the same mask

Drafters without attention have `dense` and `lean` (only the rows that carry loss). In bf16 (autocast) each way is
compared with the definition in bf16, and `flex` also with the definition in fp32.
"""

import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from benchmarks.gpu.device import pick, wait
from benchmarks.gpu.process import failure
from speculators_nb.core.options import algorithms

ROOT = Path(__file__).resolve().parents[2]
VERIFIER = ROOT / "data/tiny-verifier"
# the rest of the row is padding
LENGTH = {"toy": 64, "device": 1024}
DOCUMENTS = {"toy": [24, 18, 14], "device": [400, 250, 200, 120]}

# Arguments of a new drafter and of its training; each takes its own of them. Noise is left out: its draws differ
# between devices.
ARGUMENTS = dict(
    mask_token_id=3,
    max_anchors=24,
    noise_std=0.0,
    markov_rank=16,
    selector_rank=16,
    xpress_rank=16,
    emb_dim=16,
    gru_hidden_dim=16,
    lilicorr_hidden_size=16,
    lilicorr_factor_dim=16,
)
DRAFTERS = {name: (name, {}) for name in algorithms()} | {"hass": ("eagle", dict(forward_num_total=3))}
HEADS = ("mlp", "medusa")
WAYS = dict(
    dense=dict(lean=False, attn_impl="sdpa"),
    blocked=dict(attn_impl="blocked"),
    flex=dict(attn_impl="flex"),
    masked=dict(lean=False, attn_impl="flex"),
)
HEAD_WAYS = dict(dense=dict(lean=False), lean={})
DTYPES = dict(fp32=None, bf16=torch.bfloat16)

# Largest that may be: the loss's relative difference, 1 - cosine of all gradients, and of any parameter the largest
# difference over its largest gradient.
TOLERANCE = dict(fp32=dict(loss=1e-5, angle=1e-6, gradient=1e-3), bf16=dict(loss=1e-2, angle=1e-3, gradient=1e-1))


@contextmanager
def flex_trains(device):
    """Torch refuses the backward pass of flex attention on a CPU; the operator, uncompiled, has one."""
    from torch.nn.attention import flex_attention as flex

    with mock.patch.object(flex, "_validate_device", lambda *_: None) if device.type == "cpu" else nullcontext():
        yield


def drafter(name, device):
    """A fresh drafter for the tiny verifier; its training arguments."""
    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.train.train_drafter import new_drafter

    algorithm, own = DRAFTERS[name]
    kind = SpeculatorModel.registered_class(algorithm)
    arguments = kind.lab_arguments | kind.arguments_to_draft(4) | ARGUMENTS | own
    layers = 2 if "draft_arch" in arguments else 1
    model = new_drafter(algorithm, VERIFIER, num_layers=layers, seed=5, **arguments).to(device).train()
    return model, kind.get_trainer_kwargs(**arguments)[0]


def batch(model, device, size):
    """One packed row: random tokens, the verifier's states; the first quarter of a document carries no loss."""
    from speculators_nb.data.packing import collate
    from speculators_nb.verifier.tapped_model import Verifier

    g, samples = torch.Generator().manual_seed(11), []
    layers = list(model.drafter().aux_layer_ids)
    model.train()
    verifier = Verifier.from_pretrained(str(VERIFIER), layers, device=device)
    for n in DOCUMENTS[size]:
        ids = torch.randint(4, verifier.vocab_size, (n,), generator=g).to(device)
        seen = verifier(ids[None])
        samples.append(
            dict(
                input_ids=ids,
                loss_mask=torch.arange(n, device=device) >= n // 4,
                hidden_states=seen.hidden_states[0],
                verifier_last_hidden_states=seen.last_hidden_states[0],
            )
        )
    return {k: v.to(device) for k, v in collate(samples, LENGTH[size], getattr(model, "shift", None)).items()}


def step(model, row, arguments, dtype, device):
    """(loss, {parameter: gradient}) of one step; random choices are the same in every call."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
        loss = model(**row, **arguments)[1]
    loss.backward()
    return float(loss.detach()), {
        n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.grad is not None
    }


def timed(call, device, calls):
    """(result, seconds of each call)."""
    took = []
    for _ in range(calls):
        wait(device)
        began = time.perf_counter()
        result = call()
        wait(device)
        took.append(time.perf_counter() - began)
    return result, took


def differences(a, b):
    """How far two (loss, gradients) are apart. Errors: ValueError where one has gradients that the other lacks."""
    if a[1].keys() != b[1].keys():
        raise ValueError(f"gradients of {sorted(a[1].keys() ^ b[1].keys())} are there in one only")
    flat = [torch.cat([g[n].flatten().double() for n in sorted(g)]) for g in (a[1], b[1])]
    largest = max(float((a[1][n] - b[1][n]).abs().max() / b[1][n].abs().max().clamp_min(1e-20)) for n in b[1])
    angle = 1 - float(torch.nn.functional.cosine_similarity(*flat, dim=0))
    return dict(loss=abs(a[0] / b[0] - 1), angle=angle, gradient=largest)


def within(found, dtype):
    """Whether all differences are; NaN is not."""
    return all(found[key] <= limit for key, limit in TOLERANCE[dtype].items())


def compare(name, dtype, left, right, results, times):
    """The row of two ways."""
    labels = dict(
        drafter=name, dtype=dtype, pair=f"{left[1]} vs {right[1]}" + ("" if left[0] == right[0] else f" in {right[0]}")
    )
    wrong = next((results[k] for k in (left, right) if isinstance(results[k], Exception)), None)
    if wrong is not None:
        return labels | failure(wrong)
    found = differences(results[left], results[right])
    more = dict(zip(("seconds_first", "seconds_again"), times[left]))
    return labels | found | dict(ok=within(found, dtype)) | more


def run(cell, turn):
    """The rows of one drafter and dtype."""
    device, name, dtype = pick(), cell["drafter"], cell["dtype"]
    toy = cell["size"] == "toy"
    model, call = drafter(name, device)
    ways = (
        HEAD_WAYS
        if name in HEADS
        else {w: a for w, a in WAYS.items() if not (toy and dtype == "bf16" and w == "masked")}
    )
    row = batch(model, device, cell["size"])
    results, times, calls = {}, {}, 1 if toy else 2

    def compute(dtype, way):
        try:
            with flex_trains(device):
                results[dtype, way], times[dtype, way] = timed(
                    lambda: step(model, row, call | ways[way], DTYPES[dtype], device), device, calls
                )
        except Exception as error:
            import traceback

            traceback.print_exc()
            results[dtype, way] = error

    trains = "lean" if name in HEADS else "flex"
    for way in ways:
        compute(dtype, way)
        if way != "dense":
            yield compare(name, dtype, (dtype, way), (dtype, "dense"), results, times)
        if way == "flex":
            yield compare(name, dtype, (dtype, "flex"), (dtype, "blocked"), results, times)
        if way == trains and dtype != "fp32":
            compute("fp32", "dense")
            yield compare(name, dtype, (dtype, trains), ("fp32", "dense"), results, times)
