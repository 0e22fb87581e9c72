"""One train step (forward, backward, clipping, AdamW) of ours or of upstream's, timed while no other process runs.

Weights, packed batches and random choices are those of benchmarks/train_step, drawn on the device from one seed, so
that both sides compute the same loss on the first batch. Both train in bf16 autocast over float32 weights. Upstream
runs what it runs best on CUDA: compiled forward, flex attention, fused losses. Ours reads document ids and the loss
mask on the host, where its trainer leaves them. Steps are timed some at a time, without a look at their loss between
them, as between two logs of a trainer: on the first batch again and again, and over batches that differ in their
documents and loss masks, as a trainer's do. Graphs that torch compiles are counted.
"""

import json
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.device import pick, wait
from benchmarks.gpu.process import first_line
from benchmarks.train_step import worker

QWEN3_8B = dict(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, window=None)
TOY = dict(hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, window=None)
DRAFT_VOCAB, ANCHORS = {"device": 32000, "toy": 256}, {"device": 512, "toy": 8}
# (lengths of the documents of 2048 positions, share of each outside the loss mask); other rows have as many documents,
# longer or shorter
PACKINGS = (
    ((704, 512, 384, 256, 192), 0.25),
    ((1024, 640, 384), 0.2),
    ((512, 512, 512, 512), 0.35),
    ((896, 320, 320, 256, 160, 96), 0.1),
)
SETTINGS = {  # name -> algorithm, training arguments beside those of benchmarks/train_step
    "EAGLE-3 K=3": ("eagle3", {}),
    "P-EAGLE": ("peagle", {}),
    "DFlash 512x16": ("dflash", {}),
    "MTP": ("mtp", {}),
    "EAGLE-3 K=7": ("eagle3", dict(ttt_steps=7)),
}
WARM_UP, PASSES = {"device": 3, "toy": 1}, {"device": 2, "toy": 1}  # untimed steps, and passes over all packings
TOGETHER = {"device": 3, "toy": 1}  # steps of one batch between two waits for the device
SECONDS, TIMES = {"device": 1.0, "toy": 0.0}, {"device": (2, 4), "toy": (1, 1)}  # of timing; least and most times


def case(name, length, size, packing=0):
    """A case of benchmarks/train_step."""
    algorithm, training = SETTINGS[name]
    shape = TOY if size == "toy" else QWEN3_8B
    documents, prompt = PACKINGS[packing]
    of = dict(
        algorithm=algorithm,
        shape=shape,
        layers=1,
        prompt=prompt,
        documents=[n * length // 2048 for n in documents],
        training=training,
        draft_vocab=shape["vocab"] if algorithm == "mtp" else DRAFT_VOCAB[size],
    )
    return of | (dict(anchors=ANCHORS[size]) if algorithm == "dflash" else {})


class Setup:
    """One side's model, the arguments of its forward, and the packed batch that the next step takes.

    Weights, batches and random choices are the same on every side."""

    def __init__(self, side, name, length, size, device):
        self.side, self.of, self.device = side, (name, length, size), device
        cuda, self.generator = device.type == "cuda", torch.Generator(device).manual_seed(worker.SEED)
        of = case(*self.of)
        self.config = worker.configuration(of)
        state = worker.weights(of, self.config, self.generator)
        batch = self.drawn(of)
        with tempfile.TemporaryDirectory() as folder, torch.device(device):
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            if side == "upstream":
                best = dict(attention=None, losses="fused") if cuda else dict(attention="sdpa", losses="eager")
                self.model, self.call, _ = worker.load_upstream(Path(folder), of, dict(batch), **best)
            else:
                self.model, self.call, _ = worker.load_ours_bf16(Path(folder), of, batch)
        self.model.load_state_dict(state)
        self.model.to(device).train()
        self.batches, self.batch, self.choices = [self.placed(batch)], {}, {}
        self.use(0)
        if side == "upstream":
            worker.give_choices(self.choices)

    def drawn(self, of):
        batch = worker.packed_batch(of, self.config, self.generator)
        return {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}

    def placed(self, batch):
        """Where each side's trainer leaves it."""
        return batch | {name: batch[name].cpu() for name in getattr(self.model, "read_on_host", ())}

    def draw_others(self):
        """The other packings: after the memory of a step is measured, which has no place for them."""
        packings = range(1, 2 if self.of[-1] == "toy" else len(PACKINGS))
        self.batches += [self.placed(self.drawn(case(*self.of, packing=i))) for i in packings]

    def use(self, number):
        """The next step takes this batch."""
        self.batch.update(self.batches[number])
        if self.side == "upstream":
            self.choices.update(worker.take_choices(self.batch))

    def stepper(self):
        """A function that makes one train step on the batch in use."""
        adamw = worker.torch_adamw(self.model, fused=self.device.type == "cuda")
        return worker.stepper(self.model, self.call, self.batch, *adamw, autocast=torch.bfloat16)


def model_flops(model, call, batch):
    """FLOPs of the products of a step, forward and backward, as `evaluate.cost` counts them.

    They are those of our blocked attention, the same for every side: work that only one side does earns nothing."""
    from speculators_nb.evaluate.cost import count_flops

    arguments = {**call, "attn_impl": "blocked"}

    def run():
        with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):
            loss = model(**batch, **arguments)[1]
        loss.backward()

    flops = count_flops(run)
    model.zero_grad(set_to_none=True)
    return flops


def counted(setup):
    """{"flops": number} of the first batch, or what went wrong: a step is timed all the same."""
    setup.use(0)
    try:
        return dict(flops=model_flops(setup.model, setup.call, setup.batch))
    except Exception as error:
        return dict(flops_error=first_line(error))


def peak_memory(step, device):
    """(bytes allocated before a step, most bytes during one): of the device's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return before, torch.cuda.max_memory_allocated()
    before = worker.settle()
    step()
    return int(before * 2**20), int(worker.resident()[1] * 2**20)


def measure(steps, device, size):
    """(median seconds of a step, number of steps). `steps`: what is called between two waits for the device."""
    times, (least, most) = [], TIMES[size]
    while len(times) < least or (sum(times) < SECONDS[size] and len(times) < most):
        began = time.perf_counter()
        for step in steps:
            step()
        wait(device)
        times.append(time.perf_counter() - began)
    return median(times) / len(steps), len(steps) * len(times)


def waits(call, device):
    """How often the host waits for the device in a call, by torch's own count; None on a CPU."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in found)


def graphs():
    """Graphs that torch has compiled in this process, those of a function's other shapes among them."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def run(cell, turn):
    """The row of one cell: {setting, length, side, size}; then what changing batches add to it."""
    device, size, length = pick(), cell["size"], cell["length"]
    setup, compiled = Setup(cell["side"], cell["setting"], length, size, device), graphs()
    step = setup.stepper()
    began = time.perf_counter()
    first = worker.numbers(step())
    first_seconds, first_graphs = time.perf_counter() - began, graphs() - compiled
    for _ in range(WARM_UP[size] - 1):
        step()
    held, peak = peak_memory(step, device)
    with turn():
        seconds, steps = measure([step] * TOGETHER[size], device, size)
    yield dict(
        cell["labels"],
        seconds=seconds,
        tokens_per_second=length / seconds,
        held_bytes=held,
        peak_bytes=peak,
        steps=steps,
        first_seconds=first_seconds,
        first_graphs=first_graphs,
        first_loss=first["loss"],
        first_gradient_norm=first["grad_norm"],
        waits=waits(step, device),
    )
    yield dict(cell["labels"], **changing(setup, step, turn, size))
    if cell["side"] == "ours":
        yield dict(cell["labels"], **counted(setup))  # at the end: nothing runs compiled while it counts


def changing(setup, step, turn, size):
    """Steps that take the packings in turn: the time of one, and graphs compiled before and while it is timed."""

    def on(number):
        setup.use(number)
        step()

    setup.draw_others()
    packings = [partial(on, i) for i in range(len(setup.batches))]
    compiled, began = graphs(), time.perf_counter()
    for each in packings * PASSES[size]:
        each()
    wait(setup.device)
    other_seconds, other_graphs = time.perf_counter() - began, graphs() - compiled
    with turn():
        seconds, _ = measure(packings, setup.device, size)
    return dict(
        changing_seconds=seconds,
        other_seconds=other_seconds,
        other_graphs=other_graphs,
        last_graphs=graphs() - compiled - other_graphs,
    )
