"""Fresh answers every second epoch against as many steps on the same answers, for the tiny verifier.

    python benchmarks/fresh_answers/run.py              some ten minutes of one core for three seeds

Two EAGLE-3 drafters begin with the shipped answers, which the verifier drew at temperature 0.7, and take the same
number of steps:

    fixed    every epoch reads the same answers
    fresh    before every second epoch but the first, the verifier answers again at that temperature, and the drafter in
             training drafts (`train --regenerate-every 2`)

Measured on held-out questions at temperatures 0 and 1, four draft tokens a step; and what answering takes with the
drafter of the first seed and without one. What is in results/ stays, so that a run may be interrupted.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.data.chat_encoding import save_prepared, to_dataset
from speculators_nb.decode.generate import NoDrafter
from speculators_nb.decode.tree import Sampling
from speculators_nb.evaluate.acceptance import count
from speculators_nb.lab.experiment import measure_heldout, settings
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.train.fresh_answers import BATCH, answer_again, parts_of
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
RESULTS, OUTPUT = HERE / "results", HERE.parents[1] / "output/fresh_answers"
VERIFIER = shipped_data() / "tiny-verifier"
K, TEMPERATURE, EVERY = 4, 0.7, 2


def given(n) -> list[dict]:
    "Shipped rows, of which only the questions are used."
    lines = (shipped_data() / "answers/train.jsonl").read_text(encoding="utf-8").splitlines()[:n]
    return [{name: line[name] for name in ("input_ids", "loss_mask")} for line in map(json.loads, lines)]


def answered(verifier, drafter, rows, k, batch) -> dict:
    "Tokens and forward passes of fresh answers, and the processor's seconds."
    longest = max(len(part) for row in rows for part in parts_of(row)[1::2])
    stop = eos_ids_of(verifier, AutoTokenizer.from_pretrained(VERIFIER))
    sampling = Sampling(TEMPERATURE, torch.Generator().manual_seed(0))
    options = dict(k=k, max_new_tokens=longest, eos_token_ids=stop, sampling=sampling)
    fresh, began = [], time.process_time()
    for i in range(0, len(rows), batch):
        fresh += answer_again(verifier, drafter, rows[i : i + batch], **options)
    return dict(seconds=round(time.process_time() - began, 2)) | sums(fresh)


def sums(fresh) -> dict:
    return dict(tokens=sum(sum(r["loss_mask"]) for r in fresh), passes=sum(r["forward_passes"] for r in fresh))


def trained(name, args, seed) -> dict:
    "Train a drafter: a row of runs.csv, and one of epochs.csv for each epoch with fresh answers."
    place, began = OUTPUT / f"{name}-{args.prompts}-{args.epochs}-{seed}", time.process_time()
    own = dict(regenerate_every=EVERY, regenerate_temperature=TEMPERATURE) if name == "fresh" else {}
    sizes = dict(num_train_epochs=args.epochs, total_seq_len=512, eval_share=0, save_strategy="no")
    once = dict(disable_tqdm=True, overwrite=True)
    rows = OUTPUT / f"rows-{args.prompts}"
    if not rows.is_dir():
        save_prepared(to_dataset([(row["input_ids"], row["loss_mask"]) for row in given(args.prompts)]), rows)
    trainer = train_drafter(rows, place, VERIFIER, "eagle3", seed=seed, **(settings("eagle3", K) | sizes | once | own))
    about, epochs = dict(setting=name, seed=seed), []
    for file in sorted(place.glob("fresh_answers/*.jsonl")):
        fresh = list(map(json.loads, file.read_text().splitlines()))
        epochs.append(about | dict(epoch=int(file.stem.removeprefix("epoch-"))) | sums(fresh))
    seconds = round(time.process_time() - began, 1)
    return dict(run=about | dict(steps=trainer.state.global_step, seconds=seconds), epochs=epochs, place=place)


def heldout(name, place, args, seed) -> list[dict]:
    "A row of heldout.csv.gz for each temperature and held-out question."
    drafter = SpeculatorModel.from_pretrained(place, verifier=VERIFIER, dtype=torch.float32).drafter()
    measured = measure_heldout(
        {name: drafter}, k=K, n_prompts=args.heldout, temperatures=(0.0, 1.0), max_new_tokens=48, ngram=False
    )
    rows = []
    for temperature in (0.0, 1.0):
        for i, generation in enumerate(measured.generations[name, temperature]):
            steps, _, _, accepted, *at = map(int, count(generation, K))
            about = dict(setting=name, seed=seed, temperature=temperature, k=K, prompt=i)
            positions = {f"at_{position}": n for position, n in enumerate(at, 1)}
            rows.append(about | dict(steps=steps, accepted=accepted) | positions)
    return rows


def cost(place) -> list[dict]:
    "Answering with a drafter and without one, in turn, one by one and together: rows of cost.csv."
    drafter = SpeculatorModel.from_pretrained(place, verifier=VERIFIER, dtype=torch.float32).drafter()
    tapped = Verifier.from_pretrained(VERIFIER, drafter.aux_layer_ids, dtype="float32")
    ways = {"drafter": (tapped, drafter, K), "none": (Verifier(tapped.model), NoDrafter(), 0)}
    return [
        dict(decoder=name, batch=batch) | answered(verifier, drafts, given(BATCH), k, batch)
        for batch in (1, BATCH)
        for name, (verifier, drafts, k) in ways.items()
    ]


def added(name, rows):
    "Append rows to a table of results."
    file = RESULTS / name
    table = pd.DataFrame(rows)
    if file.is_file():
        table = pd.concat([pd.read_csv(file), table], ignore_index=True)
    with atomic_write(file) as temporary:
        compressed = dict(method="gzip", mtime=0) if file.suffix == ".gz" else None
        table.to_csv(temporary, index=False, compression=compressed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=48, help="questions")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--heldout", type=int, default=24, help="held-out questions, at most 180")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights, order and answers")
    args = parser.parse_args()
    disable_progress_bar()
    for seed in args.seeds:
        for name in ("fixed", "fresh"):
            file = RESULTS / "runs.csv"
            if file.is_file() and len(pd.read_csv(file).query("setting == @name and seed == @seed")):
                continue
            made = trained(name, args, seed)
            rows = heldout(name, made["place"], args, seed)
            added("heldout.csv.gz", rows)
            if made["epochs"]:
                added("epochs.csv", made["epochs"])
            added("runs.csv", [made["run"]])
            for temperature, part in pd.DataFrame(rows).groupby("temperature"):
                length = 1 + part.accepted.sum() / part.steps.sum()
                print(f"{name} {seed} T={temperature}: {length:.3f} tokens a step; {made['run']}", flush=True)
    if not (RESULTS / "cost.csv").is_file():
        added("cost.csv", cost(OUTPUT / f"fresh-{args.prompts}-{args.epochs}-{args.seeds[0]}"))
    print(pd.read_csv(RESULTS / "cost.csv").to_string(index=False))
