"""Single changes to a train step of ours, one after the other in one process on one card: what each of them is worth.

VARIANTS names them, for each setting. A variant is a function that returns patches (`unittest.mock.patch`) under which
the model is built and trains; what a patch names is looked up when the variant runs, so that one whose target is gone
is a row with its error. Each variant compiles anew, and starts from the same weights and batch.
"""

import gc
import time
from contextlib import ExitStack
from importlib import import_module
from unittest.mock import patch

import torch
from torch.nn.utils import get_total_norm

from benchmarks.gpu import kernels
from benchmarks.gpu import step as train_step
from benchmarks.gpu.device import pick, wait
from benchmarks.gpu.process import failure
from benchmarks.train_step import worker

LAST = 30  # seconds that a variant needs: with less, it is left out
NN = "speculators_nb.nn."


def flex(**options):
    """Block sizes of flex attention's kernels."""
    real = import_module(NN + "attention")._compiled_flex
    return [patch(NN + "attention._compiled_flex", lambda *a, **o: real(*a, kernel_options=options, **o))]


def flex_backward(rows, columns):
    return flex(bwd_BLOCK_M1=rows, bwd_BLOCK_N1=columns, bwd_BLOCK_M2=columns, bwd_BLOCK_N2=rows)


def tile_eager():
    """No part of the loss takes its compiled form."""
    return [patch(NN + "losses.is_compiled_for", lambda x: False)]


def only_flex_compiled():
    real = import_module(NN + "compiled")._compile

    def compiled(call):
        return real(call) if "flex" in getattr(call, "__name__", "") else call

    fresh = patch.dict(NN + "compiled._compiled", clear=True)
    return [*tile_eager(), patch(NN + "compiled._compile", compiled), fresh]


def embeddings_at_every_step():
    layer = import_module(NN + "layers").DecoderLayer
    return [patch.object(layer, "project_embeds", lambda layer, embeds: embeds)]


def log_sum_exp_by_a_pass():
    """The largest logit and the largest probability are searched for; they are those of the likeliest token."""
    losses = import_module(NN + "losses")

    class Distribution(losses.Distribution):
        def __init__(self, logits, label=None, softmax=True):
            super().__init__(logits, label, softmax)
            if softmax:
                self.lse = self.logits.amax(-1) - self.probs.amax(-1).log()

    return [patch(NN + "losses.Distribution", Distribution)]


def clipping_in_the_optimizer():
    """No pass over the gradients: fused AdamW divides by the factor, and stores what it divided."""
    real = worker.torch_adamw

    def adamw(model, **_):
        optimizer, _ = real(model, fused=True)

        def clip(params, max_norm):
            norm = get_total_norm([p.grad for p in params if p.grad is not None])
            optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
            return norm

        return optimizer, clip

    return [patch.object(worker, "torch_adamw", adamw)]


def table_by_rows(slice_bytes):
    """The gradient of the embedding table lists the rows that were read; AdamW is over slices of the table."""
    return [
        patch.object(worker, "torch_adamw", lambda model, **_: worker.own_adamw(model)),
        patch("speculators_nb.train.optimizers.CUDA_SLICE_BYTES", slice_bytes),
    ]


COMMITTED, AGAIN = {"as committed": list}, {"as committed, again": list}  # how far two runs of the same are apart
VARIANTS = {
    "EAGLE-3 K=3": COMMITTED
    | {
        "each slot of a tile by itself": lambda: [patch(NN + "losses.SLOTS_AT_ONCE", 1)],
        "log-sum-exp by a pass of its own": log_sum_exp_by_a_pass,
        "embeddings projected at every step": embeddings_at_every_step,
        "tile of the loss eager": tile_eager,
        "flex backward 32x128": lambda: flex_backward(32, 128),
        "flex backward 64x64": lambda: flex_backward(64, 64),
        "clipping in the optimizer's kernel": clipping_in_the_optimizer,
        "all eager but flex": only_flex_compiled,
    }
    | AGAIN,
    "P-EAGLE": COMMITTED
    | {
        "table by rows, 256 MiB a slice": lambda: table_by_rows(256 << 20),
        "table by rows, 32 MiB a slice": lambda: table_by_rows(32 << 20),  # the gradient stays in the L2 cache
        "clipping in the optimizer's kernel": clipping_in_the_optimizer,
    }
    | AGAIN,
}


def forget_compiled():
    """No graph of the variant before is used."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(setting, length, size, device, turn):
    """Times, memory and parts of a step, as the code is now."""
    compiled = train_step.graphs()
    step = train_step.Setup("ours", setting, length, size, device).stepper()
    began = time.perf_counter()
    first = worker.numbers(step())
    first_seconds = time.perf_counter() - began
    for _ in range(train_step.WARM_UP[size] - 1):
        step()
    held, peak = train_step.peak_memory(step, device)
    with turn():
        seconds, _ = train_step.measure([step] * train_step.TOGETHER[size], device, size)
        began = time.perf_counter()
        step()
        launched = time.perf_counter() - began  # the device may still work
        wait(device)
        found = kernels.profiled(step, device, 1)
    parts = kernels.summed(kernels.kernels(found.events(), device), 1, seconds, device)
    return dict(
        seconds=seconds,
        launched_seconds=launched,
        held_bytes=held,
        peak_bytes=peak,
        first_seconds=first_seconds,
        first_graphs=train_step.graphs() - compiled,
        first_loss=first["loss"],
        first_gradient_norm=first["grad_norm"],
        **{f"{row['share_of']}_seconds": row["seconds"] for row in parts if "share_of" in row},
    )


def run(cell, turn):
    """A row for each variant: {setting, length, size}, and the time at which all must have ended (`ends`)."""
    for name, patches in VARIANTS[cell["setting"]].items():
        labels = cell["labels"] | dict(variant=name)
        if time.time() > cell.get("ends", float("inf")) - LAST:
            yield labels | dict(left_out=True)
            continue
        try:
            forget_compiled()
            with ExitStack() as stack:
                for each in patches():
                    stack.enter_context(each)
                row = measured(cell["setting"], cell["length"], cell["size"], pick(), turn)
            yield labels | row
        except Exception as error:
            yield labels | failure(error)
