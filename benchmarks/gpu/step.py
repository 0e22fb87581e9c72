"""One train step (forward, backward, clipping, AdamW) of ours or of upstream's, timed while no other process runs.

Weights, packed batch and random choices are those of benchmarks/train_step, drawn on the device from one seed, so that
both sides compute the same loss. Both train in bf16 autocast over float32 weights. Upstream runs what it runs best on
CUDA: compiled forward, flex attention, fused losses. `ours-compiled` is what the trainer's `torch_compile` does:
torch.compile around the model. Ours reads document ids and the loss mask on the host, where its trainer leaves them.
Steps are timed some at a time, without a look at their loss between them, as between two logs of a trainer.
"""

import gc
import json
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.device import pick, wait
from benchmarks.gpu.process import first_line
from benchmarks.train_step import worker

QWEN3_8B = dict(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, window=None)
TOY = dict(hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, window=None)
DRAFT_VOCAB, ANCHORS = {"device": 32000, "toy": 256}, {"device": 512, "toy": 8}
# of 2048 positions; other rows have as many, longer or shorter
DOCUMENTS = {"device": (704, 512, 384, 256, 192), "toy": (1024, 512, 512)}
SETTINGS = {  # name -> algorithm, training arguments beside those of benchmarks/train_step
    "EAGLE-3 K=3": ("eagle3", {}),
    "EAGLE-3 K=7": ("eagle3", dict(ttt_steps=7)),
    "P-EAGLE": ("peagle", {}),
    "DFlash 512x16": ("dflash", {}),
    "MTP": ("mtp", {}),
}
WARM_UP, SECONDS = {"device": 3, "toy": 1}, {"device": 1.0, "toy": 0.0}
TOGETHER, LEAST_TIMES, MOST_TIMES = 3, 2, 4  # steps between two waits for the device; how often they are timed


def case(name, length, size):
    """A case of benchmarks/train_step."""
    algorithm, training = SETTINGS[name]
    shape = TOY if size == "toy" else QWEN3_8B
    of = dict(
        algorithm=algorithm,
        shape=shape,
        layers=1,
        prompt=0.25,
        documents=[n * length // 2048 for n in DOCUMENTS[size]],
        training=training,
        draft_vocab=shape["vocab"] if algorithm == "mtp" else DRAFT_VOCAB[size],
    )
    return of | (dict(anchors=ANCHORS[size]) if algorithm == "dflash" else {})


def build(side, of, device):
    """(model, arguments of its forward, batch) with the same weights, batch and random choices on every side."""
    cuda, g = device.type == "cuda", torch.Generator(device).manual_seed(worker.SEED)
    config = worker.configuration(of)
    state = worker.weights(of, config, g)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in worker.packed_batch(of, config, g).items()}
    with tempfile.TemporaryDirectory() as folder, torch.device(device):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if side == "upstream":
            best = dict(attention=None, losses="fused") if cuda else dict(attention="sdpa", losses="eager")
            model, call, batch = worker.load_upstream(Path(folder), of, batch, **best)
        else:
            model, call, batch = worker.load_ours_bf16(Path(folder), of, batch)
            batch |= {name: batch[name].cpu() for name in model.read_on_host}
    model.load_state_dict(state)
    return model.to(device).train(), call, batch


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


def counted(model, call, batch):
    """{"flops": number}, or what went wrong: a step is timed all the same."""
    try:
        return dict(flops=model_flops(model, call, batch))
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


def measure(step, device, least):
    """(median seconds, number) of steps, TOGETHER of them between two waits; `least` seconds, if not too many."""
    times = []
    while len(times) < LEAST_TIMES or (sum(times) < least and len(times) < MOST_TIMES):
        began = time.perf_counter()
        for _ in range(TOGETHER):
            step()
        wait(device)
        times.append(time.perf_counter() - began)
    return median(times) / TOGETHER, TOGETHER * len(times)


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


def run(cell, turn):
    """The row of one cell: {setting, length, side, size}."""
    device, side, length = pick(), cell["side"], cell["length"]
    of = case(cell["setting"], length, cell["size"])
    model, call, batch = build(side, of, device)
    forward = torch.compile(model) if side == "ours-compiled" else None
    adamw = worker.torch_adamw(model, fused=device.type == "cuda")
    step = worker.stepper(model, call, batch, *adamw, forward, torch.bfloat16)
    began = time.perf_counter()
    first = worker.numbers(step())
    first_seconds = time.perf_counter() - began
    for _ in range(WARM_UP[cell["size"]] - 1):
        step()
    held, peak = peak_memory(step, device)
    with turn():
        seconds, steps = measure(step, device, SECONDS[cell["size"]])
    waited = waits(step, device)
    flops = counted(model, call, batch) if side == "ours" else {}  # at the end: nothing runs compiled while it counts
    yield dict(
        cell["labels"],
        seconds=seconds,
        tokens_per_second=length / seconds,
        held_bytes=held,
        peak_bytes=peak,
        steps=steps,
        first_seconds=first_seconds,
        first_loss=first["loss"],
        first_gradient_norm=first["grad_norm"],
        waits=waited,
        **flops,
    )
    del model, call, batch, adamw, step, forward
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes beside this one
