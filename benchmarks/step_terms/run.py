"""Seconds of an EAGLE-3 training step on the CPU, term by term: the record that the notebook on a step's cost draws.

    python benchmarks/step_terms/run.py    a minute; writes results/<processor>.json

Method: one thread; every operation of forward and backward pass is timed where it is dispatched, by the processor's
clock, so that other programs do not count (median of nine steps); AdamW is torch's. Beside it the rate of a product of
1024 x 1024 matrices in float32 and that of a copy of 64 MB, which predict the products and AdamW (28 bytes a weight).
"""

import json
import platform
import re
import sys
from datetime import date
from pathlib import Path
from statistics import median

import torch

from speculators_nb.core.files import atomic_write
from speculators_nb.decode.generate import seconds

sys.path.insert(0, str(Path(__file__).parent))
from terms import StepShape, TermMeter, shaped_step, term_flops

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "laptop": StepShape((100,) * 5, 128, 4, 2, 64, 320, 2048),
    "512 wide": StepShape((100,) * 5, 512, 8, 4, 64, 1280, 2048),
}
WARM_UP, STEPS = 2, 9
ADAMW = 28  # bytes that it reads and writes for a weight


def processor():
    "What the processor is called."
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def rates():
    "FLOPs a second of a product, bytes a second of a copy."
    a, b = (torch.randn(1024, 1024) for _ in range(2))
    x, y = torch.zeros(2, 1 << 24)
    product = median(seconds(lambda: a @ b) for _ in range(STEPS))
    copy = median(seconds(lambda: y.copy_(x)) for _ in range(STEPS))
    return 2 * 1024**3 / product, 2 * 4 * (1 << 24) / copy


def step_seconds(shape):
    "Seconds by term, medians over steps; those of AdamW too."
    torch.manual_seed(0)
    model, batch, arguments = shaped_step("eagle3", shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    found = []
    for _ in range(WARM_UP + STEPS):
        with TermMeter(shape) as meter:
            model(**batch, **arguments)[1].backward()
        assert dict(meter.flops) == term_flops(shape)  # each product is in its term
        found.append(dict(meter.seconds) | dict(optimizer=seconds(optimizer.step)))
        optimizer.zero_grad()
    terms = {term: median(step[term] for step in found[WARM_UP:]) for term in found[0]}
    return terms, sum(p.numel() for p in trained)


def main():
    torch.set_num_threads(1)
    product, copy = rates()
    rows = []
    for name, shape in SHAPES.items():
        measured, weights = step_seconds(shape)
        predicted = {term: flops / product for term, flops in term_flops(shape).items()}
        predicted |= dict(optimizer=ADAMW * weights / copy)
        rows.append(dict(shape=name, predicted=predicted, measured=measured))
        print(name, {k: (round(1e3 * predicted.get(k, 0), 1), round(1e3 * s, 1)) for k, s in measured.items()})
    facts = dict(processor=processor(), date=str(date.today()), torch=torch.__version__)
    facts |= dict(product_flops=product, copy_bytes=copy, rows=rows)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["processor"].lower()).strip("-")
    RESULTS.mkdir(exist_ok=True)
    with atomic_write(RESULTS / f"{slug}.json") as file:
        file.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
