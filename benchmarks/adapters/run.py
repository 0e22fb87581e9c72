"""An adapter of low rank for each domain against training all weights on it: acceptance there and elsewhere, bytes.

    python benchmarks/adapters/run.py rates     which learning rate suits each variant; minutes of one core
    python benchmarks/adapters/run.py           the comparison; a quarter of an hour of one core

A drafter is trained for the tiny verifier on its 1,000 shipped answers of six domains. Then it is trained for as many
steps again, on the 167 answers of one domain:

    all weights       as `train --from-pretrained` does, at Muon's rate of a fresh drafter, 3e-3; and at 1e-3
    rank 16, rank 4   an adapter alone, `--lora-rank`, at 3e-3
    all domains       all weights, on all six domains, at 1e-3: what more steps give without a choice

Measured on held-out questions of that domain and of the five others, four draft tokens a step, by replaying greedy
answers. `rates` uses questions that neither is trained nor measured on. Rows that are in results/ stay.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch
from torch.utils.data import Subset
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.lab.experiment import COMMON, heldout_prompts, settings, shipped_features
from speculators_nb.lab.greedy_replay import Answer, greedy_answers, replay
from speculators_nb.lab.shipped import read_corpus, shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.lora import adapter_tensors, add_adapter
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.train.train_drafter import hidden_layers, new_drafter
from speculators_nb.train.trainer import train
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = ROOT / "output/adapters"
VERIFIER = shipped_data() / "tiny-verifier"
DOMAINS = "code", "free"
K, STEPS = 4, 60
OWN, OTHER = 24, 6  # questions of the domain, and of each other one
RANKS = {"rank 4": 4, "rank 16": 16}
RATES = {  # variant -> optimizer, learning rate: by `rates`
    "all weights": ("muon", 3e-3),
    "all weights, 1e-3": ("muon", 1e-3),
    "rank 16": ("muon", 3e-3),
    "rank 4": ("muon", 3e-3),
    "all domains": ("muon", 1e-3),
}


class Scene(NamedTuple):
    "The shipped rows, and questions with greedy answers."

    data: FeatureDataset
    rows: dict[str, list[int]]  # domain -> training rows
    answers: dict[str, list[Answer]]  # domain -> those to the questions of the measurement


def scene(unread: bool) -> Scene:
    data = FeatureDataset(shipped_features())
    lines = (shipped_data() / "answers/train.jsonl").read_text(encoding="utf-8").splitlines()
    domain_of = {tuple(row["input_ids"]): row["domain"] for row in map(json.loads, lines)}
    rows: dict[str, list[int]] = {}
    for i in range(len(data)):
        rows.setdefault(domain_of[tuple(torch.as_tensor(data.tokens(i)[0]).tolist())], []).append(i)
    verifier = Verifier.from_pretrained(VERIFIER, list(data.layer_ids or ())[:-1], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(VERIFIER)

    def answers(conversations):
        found = {}
        for domain in rows:
            n = (2 * OTHER if unread else OWN) if domain in DOMAINS else OTHER
            prompts = heldout_prompts([c for c in conversations if c["domain"] == domain], tokenizer, n)[0]
            found[domain] = greedy_answers(verifier, prompts, 160, eos_ids_of(verifier, tokenizer))
        return found

    file = "corpus/train.jsonl" if unread else "corpus/heldout.jsonl"
    questions = read_corpus(shipped_data() / file)
    return Scene(data, rows, answers(questions[1000:] if unread else questions))


def arguments(algorithm) -> dict[str, Any]:
    "What an algorithm is trained with, besides sizes of a whole training."
    return {name: value for name, value in settings(algorithm, K).items() if name not in COMMON}


def run(model, scene, rows, algorithm, seed, folder, **how) -> SpeculatorModel:
    own = {name: x for name, x in arguments(algorithm).items() if name not in ("draft_arch", "num_layers")}
    once: dict[str, Any] = dict(output_dir=str(folder), save_strategy="no", disable_tqdm=True, overwrite=True)
    given = own | dict(COMMON) | dict(seed=seed) | once | how
    return train(model, Subset(scene.data, rows), None, **given).model


def base(scene, algorithm, seed) -> SpeculatorModel:
    "The drafter of all domains, or what an earlier run left of it."
    folder = PLACE / f"{algorithm}-{seed}"
    if not (folder / "config.json").is_file():
        given = arguments(algorithm) | dict(target_layer_ids=list(scene.data.layer_ids or ())[:-1], seed=seed)
        everything = sorted(i for rows in scene.rows.values() for i in rows)
        run(new_drafter(algorithm, VERIFIER, **given), scene, everything, algorithm, seed, folder, num_train_epochs=3)
    return SpeculatorModel.from_pretrained(folder, verifier=str(VERIFIER), dtype=torch.float32)


def further(scene, algorithm, domain, variant, seed, optimizer, rate) -> tuple[SpeculatorModel, float]:
    "The drafter after more steps, and the seconds of a processor that they took."
    model, rows = base(scene, algorithm, seed), scene.rows[domain]
    if variant == "all domains":
        rows = sorted(i for rows in scene.rows.values() for i in rows)
    if variant in RANKS:
        torch.manual_seed(seed)
        add_adapter(model, hidden_layers(model), RANKS[variant])
    began, how = time.process_time(), dict(max_steps=STEPS, optimizer=optimizer, learning_rate=rate)
    folder = PLACE / f"{algorithm}-{domain}-{variant.replace(', ', '-').replace(' ', '-')}-{seed}"
    model = run(model, scene, rows, algorithm, seed, folder, **how)
    return model.eval(), time.process_time() - began


def measured(model, answers: dict[str, list[Answer]], domain, about) -> list[dict]:
    "A row for each question."
    drafter, rows = model.drafter(), []
    for of, part in answers.items():
        for i, answer in enumerate(part if of == domain else part[:OTHER]):
            generation = replay(drafter, answer, K)
            accepted = sum(s.accepted for s in generation.steps)
            kind = "own" if of == domain else "other"
            rows.append(about | dict(kind=kind, of=of, prompt=i, steps=len(generation.steps), accepted=accepted))
    return rows


def sizes(model, algorithm) -> list[dict]:
    "Bytes in float32: the whole drafter as it is saved, its matrices, and adapters of them."
    whole = sum(t.numel() for t in model.saved_state().values()) * 4
    layers = hidden_layers(model)
    matrices = sum(model.get_submodule(name).weight.numel() for name in layers) * 4
    rows = [dict(algorithm=algorithm, what="drafter", bytes=whole), dict(what="matrices", bytes=matrices)]
    for variant, rank in RANKS.items():
        fresh = SpeculatorModel.from_pretrained(PLACE / f"{algorithm}-0", verifier=str(VERIFIER), dtype=torch.float32)
        add_adapter(fresh, layers, rank)
        rows.append(dict(what=variant, bytes=sum(t.numel() for t in adapter_tensors(fresh).values()) * 4))
    return [row | dict(algorithm=algorithm) for row in rows]


def write(table, name):
    with atomic_write(HERE / "results" / name) as tmp:
        if name.endswith(".gz"):
            table.to_csv(tmp, index=False, compression=dict(method="gzip", mtime=0))
        else:
            table.to_csv(tmp, index=False)


def read(name, columns):
    file = HERE / "results" / name
    return pd.read_csv(file) if file.is_file() else pd.DataFrame(columns=columns)


def length(rows):
    "Tokens a step."
    return 1 + sum(row["accepted"] for row in rows) / sum(row["steps"] for row in rows)


def choose_rates(algorithm):
    "One seed, the domain of code: tokens a step there and elsewhere at each rate."
    table, seen = read("rates.csv", ["algorithm", "variant", "optimizer", "rate"]), scene(unread=True)
    for variant in ("all weights", "rank 16"):
        for optimizer in ("muon", "adamw"):
            for rate in (3e-4, 1e-3, 3e-3, 1e-2)[optimizer == "muon" :]:
                about = dict(algorithm=algorithm, variant=variant, optimizer=optimizer, rate=rate)
                if len(table) and (table[list(about)] == pd.Series(about)).all(axis=1).any():
                    continue
                model, _ = further(seen, algorithm, "code", variant, 0, optimizer, rate)
                rows = measured(model, seen.answers, "code", {})
                about |= {kind: round(length([r for r in rows if r["kind"] == kind]), 3) for kind in ("own", "other")}
                print(about, flush=True)
                table = (
                    pd.concat([table, pd.DataFrame([about])], ignore_index=True)
                    if len(table)
                    else pd.DataFrame([about])
                )
                write(table, "rates.csv")


def compare(algorithm, seeds):
    columns = ["algorithm", "domain", "seed", "variant"]
    table, seen = read("adapters.csv.gz", columns), scene(unread=False)
    for seed in range(seeds):
        for domain in DOMAINS:
            for variant in ("before", *RATES):
                about = dict(algorithm=algorithm, domain=domain, seed=seed, variant=variant)
                if len(table) and (table[columns] == pd.Series(about)).all(axis=1).any():
                    continue
                model, seconds = base(seen, algorithm, seed), 0.0
                if variant != "before":
                    model, seconds = further(seen, algorithm, domain, variant, seed, *RATES[variant])
                rows = measured(model, seen.answers, domain, about | dict(train_s=round(seconds, 1)))
                of = {kind: length([r for r in rows if r["kind"] == kind]) for kind in ("own", "other")}
                print(
                    f"{algorithm} {domain} {seed} {variant}: {of['own']:.3f} there, {of['other']:.3f} elsewhere",
                    flush=True,
                )
                table = pd.concat([table, pd.DataFrame(rows)], ignore_index=True) if len(table) else pd.DataFrame(rows)
                write(table, "adapters.csv.gz")
    known = read("sizes.csv", ["algorithm"])
    if algorithm not in set(known.algorithm):
        found = pd.DataFrame(sizes(base(seen, algorithm, 0), algorithm))
        write(pd.concat([known, found], ignore_index=True) if len(known) else found, "sizes.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="?", default="compare", choices=("compare", "rates"))
    parser.add_argument("--algorithm", default="eagle3")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    disable_progress_bar()
    PLACE.mkdir(parents=True, exist_ok=True)
    if args.what == "rates":
        choose_rates(args.algorithm)
    else:
        compare(args.algorithm, args.seeds)
