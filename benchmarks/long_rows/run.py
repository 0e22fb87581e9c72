"""A row of 131,072 positions through EAGLE-3 and DFlash, in one process and split over four (gloo, on a CPU): memory of
a rank, and whether the gradient is that of one process. The notebook on long rows draws the record.

    python benchmarks/long_rows/run.py [--length 131072]    half an hour; writes results/<processor>.json

Method: width 128, 8 query and 4 key heads, a vocabulary of 512; one document in which the last 128 of every 4,096
tokens carry loss. A rank makes the features of its own positions and never sees the others. Its memory is the highest
resident set in a step less the one before the row was made, after a step with a short row; one thread a process.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing
from transformers import Qwen3Config

from speculators_nb.core.files import atomic_write
from speculators_nb.distributed.long_rows import RowPart
from speculators_nb.plan.step_memory import step_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from step_terms.run import processor  # noqa: E402
from train_step.worker import resident, settle  # noqa: E402

VOCAB, BLOCK, TURN, ANSWER = 512, 1024, 4096, 128
LAYERS = Qwen3Config(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=VOCAB,
    num_hidden_layers=1,
    max_position_embeddings=1 << 18,
)
SETTINGS = {"eagle3": dict(ttt_steps=3), "dflash": dict(block_size=8, max_anchors=512)}


def features(length, width, start, stop):
    "States [1, stop - start, width] at positions of a row, drawn block by block: every rank draws the same."
    states = torch.empty(1, stop - start, width)
    for first in range(start // BLOCK * BLOCK, stop, BLOCK):
        drawn = torch.randn(BLOCK, width, generator=torch.Generator().manual_seed(first + width))
        a, b = max(first, start), min(first + BLOCK, stop)
        states[0, a - start : b - start] = drawn[a - first : b - first]
    return states


def part_of_row(length, hidden, start, stop, ahead):
    "A Batch with the features of a part."
    position = torch.arange(length)[None]
    return dict(
        input_ids=torch.randint(64, (1, length), generator=torch.Generator().manual_seed(0)),
        loss_mask=position % TURN >= TURN - ANSWER,
        document_ids=torch.zeros_like(position),
        position_ids=position,
        hidden_states=features(length, 3 * hidden, start, stop),
        verifier_last_hidden_states=features(length, hidden, start, min(stop + ahead, length)),
    )


def one_rank(rank, ranks, port, algorithm, length, folder):
    "A step of a rank; its loss, memory and seconds, and on the first rank the gradient of the row, go to a file."
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    group = dist.group.WORLD if ranks > 1 else None
    torch.manual_seed(0)
    model, given = step_of(algorithm, LAYERS, VOCAB, 6, 64, **SETTINGS[algorithm])
    model.target_head.norm.weight.data.fill_(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    del given["batch"], given["bf16"]

    def step(length):
        part = RowPart(length, dist.group.WORLD)
        batch = part_of_row(length, LAYERS.hidden_size, part.start, part.stop, model.targets_ahead(**given))
        torch.manual_seed(0)  # ranks draw the same anchors
        loss = model(**batch, **given, row_group=group)[1]
        loss.backward()
        return loss.detach()

    step(2 * TURN)
    for p in trained:
        p.grad.zero_()
    before, began = settle(), time.monotonic()
    loss = step(length)
    found = dict(peak_mb=resident()[1] - before, seconds=time.monotonic() - began)
    grad = torch.cat([p.grad.flatten() for p in trained])
    for x in (loss, grad):
        dist.all_reduce(x)
    torch.save(found | dict(loss=loss, grad=grad), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def measure(algorithm, length, ranks):
    "What the ranks found: the largest memory of a rank, loss, gradient, seconds."
    with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        given = (ranks, port, algorithm, length, folder)
        multiprocessing.start_processes(one_rank, given, nprocs=ranks, start_method="spawn")
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    return found[0] | {name: max(x[name] for x in found) for name in ("peak_mb", "seconds")}


def rows(algorithm, length, ranks=(1, 4)):
    "A row of the record for each number of ranks; the first is one process."
    one, made = None, []
    for n in ranks:
        found = measure(algorithm, length, n)
        one = one or found
        error = float((found["grad"] - one["grad"]).norm() / one["grad"].norm())
        row = dict(algorithm=algorithm, length=length, ranks=n, loss=float(found["loss"]))
        row |= {name: round(found[name], 1) for name in ("peak_mb", "seconds")}
        made.append(row | dict(gradient_error=error))
        print(made[-1], flush=True)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--length", type=int, default=1 << 17)
    length = parser.parse_args().length
    facts = dict(processor=processor(), date=str(date.today()), torch=torch.__version__)
    facts["rows"] = [row for algorithm in SETTINGS for row in rows(algorithm, length)]
    slug = "-".join("".join(c if c.isalnum() else " " for c in facts["processor"].lower()).split())
    (HERE / "results").mkdir(exist_ok=True)
    with atomic_write(HERE / "results" / f"{slug}.json") as file:
        file.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
