"""How fast a drafter learns from what it serves: its users change to a kind of question that it was never trained on.

    python benchmarks/online/run.py tiny        the tiny verifier; code is new. A quarter of an hour of one core a seed
    python benchmarks/online/run.py real        SmolLM2 with the features of `make real`; code is new. 1.5 hours a seed

Two drafters are trained with the same steps: `before` on everything but the new kind, `both` on everything. `before`
then serves questions of the new kind, 4,000 tokens of greedy answers, and learns after each one:

    with earlier     from what it served, and every second sample from its first training
    served           from what it served alone
    where wrong      from what it served, at the positions that it drafted wrongly (online speculative decoding)
    and rejected     from what it served, and from the tokens that were rejected, whose loss has as much weight as the
                     other one (Draft-OPD; DFlash alone); "a tenth": a tenth of it
    ordinary         no serving: as many steps over the same answers, in random order, all known from the beginning
    half-OPD         as ordinary, and from what it drafts along these answers, as the verifier reads it (DFlash alone),
                     with as much weight; "a tenth": a tenth of it

Measured on held-out questions, four draft tokens a step, by replaying greedy answers (the same for every drafter). The
greedy text does not depend on the drafter, so serving is a replay too; `real` also serves once with `generate`, to
count processor seconds and to compare its text with the verifier's own. Rows that are in results/ stay.
"""

import argparse
import collections
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch
from torch.utils.data import Subset
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.lab.experiment import COMMON, heldout_prompts, settings, shipped_features
from speculators_nb.lab.greedy_replay import Answer, greedy_answers, replay
from speculators_nb.lab.shipped import read_corpus, shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.draft_vocabulary import vocab_mapping_from_frequencies
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.train.online import OnlineDrafter
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.train.trainer import train
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REAL = ROOT / "output/real"  # of `make real`
K, TOKENS, HELDOUT = 4, 4000, 24  # draft length, tokens served, questions of each kind
ROW = 512  # tokens of a step of learning
VARIANTS = ("with earlier", "served", "where wrong")
REJECTED = {"and rejected": 1.0, "and rejected, a tenth": 0.1}  # weight of their loss
HALF = {"half-OPD": 1.0, "half-OPD, a tenth": 0.1}
NOT_SERVED = ("ordinary", *HALF)


class Scene(NamedTuple):
    "A verifier, its training rows, and questions with greedy answers."

    verifier: Path
    data: FeatureDataset
    new: list[int]  # training rows of the new kind
    old: list[int]  # the others
    epochs: int
    vocabulary: int | None  # tokens that the drafter knows; None: all
    serve: list[Answer]  # of the new kind
    rate: float  # of learning
    steps: int  # after each request
    points: tuple[int, ...]  # tokens served when it is measured
    heldout: dict[str, list[Answer]]  # new, old


def tiny() -> Scene:
    "The shipped verifier: code is new, the five other kinds are known."
    path = shipped_data() / "tiny-verifier"
    data = FeatureDataset(shipped_features())
    lines = (shipped_data() / "answers/train.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = {tuple(row["input_ids"]): row["domain"] for row in map(json.loads, lines)}
    kind = [kinds[tuple(torch.as_tensor(data.tokens(i)[0]).tolist())] for i in range(len(data))]
    verifier = Verifier.from_pretrained(path, list(data.layer_ids or ()), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)

    def answers(conversations, n):
        prompts = heldout_prompts(conversations, tokenizer, n)[0]
        return greedy_answers(verifier, prompts, 160, eos_ids_of(verifier, tokenizer))

    unread = read_corpus(shipped_data() / "corpus/train.jsonl")[1000:]
    heldout = read_corpus(shipped_data() / "corpus/heldout.jsonl")
    return Scene(
        verifier=path,
        data=data,
        new=[i for i, name in enumerate(kind) if name == "code"],
        old=[i for i, name in enumerate(kind) if name != "code"],
        epochs=3,
        vocabulary=None,
        serve=answers([c for c in unread if c["domain"] == "code"], 100),
        rate=1e-3,
        steps=2,
        points=(500, 1000, 2000, TOKENS),
        heldout=dict(
            new=answers([c for c in heldout if c["domain"] == "code"], HELDOUT),
            old=answers([c for c in heldout if c["domain"] != "code"], HELDOUT),
        ),
    )


def real() -> Scene:
    "SmolLM2: answers with a block of code are new."
    data = FeatureDataset(REAL / "features")
    lines = (ROOT / "data/smollm2/answers.jsonl").read_text(encoding="utf-8").splitlines()
    code = {tuple(r["input_ids"]) for r in map(json.loads, lines) if "```" in r["messages"][-1]["content"]}
    new = [i for i in range(len(data)) if tuple(torch.as_tensor(data.tokens(i)[0]).tolist()) in code]
    old = sorted({*range(len(data))} - {*new})

    def answer(i):
        row = data[i]
        tokens, first = row["input_ids"].tolist(), row["loss_mask"].int().argmax().item()
        states = torch.cat([row["hidden_states"], row["verifier_last_hidden_states"]], -1).float()
        return Answer(tokens[:first], tokens[first:], [], states[: len(tokens) - 1], len(tokens))

    return Scene(
        verifier=REAL / "verifier",
        data=data,
        new=new[100:],
        old=old[:1000],
        epochs=2,
        vocabulary=8000,
        serve=[answer(i) for i in new[:50]],
        rate=3e-4,
        steps=6,
        points=(2000, TOKENS),
        heldout=dict(
            new=[answer(i) for i in new[50 : 50 + HELDOUT]],
            old=[answer(i) for i in old[-HELDOUT:]],
        ),
    )


def arguments(algorithm) -> dict[str, Any]:
    "What an algorithm is trained with, besides sizes of a whole training."
    return {name: value for name, value in settings(algorithm, K).items() if name not in COMMON}


def trained(scene, algorithm, name, seed, folder) -> SpeculatorModel:
    "`before` without the new kind, `both` with it, as many rows; or what an earlier run left."
    place = folder / f"{algorithm}-{name}-{seed}"
    if not (place / "config.json").is_file():
        rows = scene.old if name == "before" else [*scene.old[: -len(scene.new)], *scene.new]
        vocabulary = {}
        if scene.vocabulary and algorithm == "eagle3":
            counts = collections.Counter()
            for i in [*scene.old, *scene.new]:  # it cannot change later
                tokens, mask = map(torch.as_tensor, scene.data.tokens(i))
                counts.update(tokens[mask.bool()].tolist())
            size = AutoTokenizer.from_pretrained(scene.verifier).vocab_size
            mapping = vocab_mapping_from_frequencies(counts, scene.vocabulary, size)
            vocabulary = dict(draft_vocab_size=scene.vocabulary, mapping=mapping)
        layers = list(scene.data.layer_ids or ())[:-1]
        given = arguments(algorithm) | dict(target_layer_ids=layers, seed=seed)
        model = new_drafter(algorithm, scene.verifier, **given, **vocabulary)
        sizes = COMMON | dict(num_train_epochs=scene.epochs, seed=seed)
        once = dict(output_dir=str(place), save_strategy="no", disable_tqdm=True)
        own = {name: x for name, x in arguments(algorithm).items() if name not in ("draft_arch", "num_layers")}
        train(model, Subset(scene.data, rows), None, **own, **sizes, **once)
    return SpeculatorModel.from_pretrained(place, verifier=str(scene.verifier), dtype=torch.float32)


def only_where_wrong(row, generation):
    "The row with a loss at the tokens that were drafted wrongly alone."
    at, wrong = len(generation.prompt) + 1, []
    for step in generation.steps:
        if step.accepted < len(step.draft):
            wrong.append(at + step.accepted)
        at += len(step.tokens)
    mask = torch.zeros_like(row["loss_mask"])
    mask[[i for i in wrong if i < len(mask)]] = True
    return row | dict(loss_mask=mask)


def measured(drafter, scene, about) -> list[dict]:
    "A row for each held-out question."
    return [
        about | dict(kind=kind, prompt=i, steps=len(g.steps), accepted=sum(s.accepted for s in g.steps))
        for kind, answers in scene.heldout.items()
        for i, g in enumerate(replay(drafter, answer, K) for answer in answers)
    ]


def online(scene, algorithm, variant, seed, folder) -> list[dict]:
    "Serve and learn: rows of the table."
    model = trained(scene, algorithm, "before", seed, folder)
    earlier = Subset(scene.data, scene.old) if variant == "with earlier" else ()
    learning: dict[str, Any] = dict(learning_rate=scene.rate, total_seq_len=ROW, earlier=earlier, seed=seed)
    learning["rejected_weight"] = (REJECTED | HALF).get(variant, 0.0)
    if variant in HALF:
        learning["verifier"] = Verifier.from_pretrained(scene.verifier, dtype="float32")
    drafter = OnlineDrafter(model, **learning, **arguments(algorithm))
    verifier = None
    if variant in REJECTED:  # what it says of rejected tokens is in no record of answers
        verifier = Verifier.from_pretrained(scene.verifier, drafter.aux_layer_ids, dtype="float32")
    answers = random.Random(seed).sample(scene.serve, len(scene.serve))
    about = dict(algorithm=algorithm, seed=seed, variant=variant)
    served, spent, rows, points = 0, 0.0, [], [*scene.points]
    for answer in answers:
        if verifier:
            options = dict(k=K, max_new_tokens=len(answer.tokens), record=1)
            generation = generate(verifier, drafter, answer.prompt, **options)
        else:
            generation = replace(replay(drafter, answer, K), hidden_states=answer.states)
        served += len(generation.tokens)
        drafter.keep(generation)
        if variant == "where wrong":
            drafter.rows[-1] = only_where_wrong(drafter.rows[-1], generation)
        if variant not in NOT_SERVED:
            began = time.process_time()
            drafter.learn(scene.steps)
            spent += time.process_time() - began
        if points and served >= points[0] and variant not in NOT_SERVED:
            point = dict(served=points.pop(0), updates=drafter.steps, learning_s=round(spent, 1))
            rows += measured(drafter, scene, about | point)
        if served >= TOKENS:
            break
    if variant in NOT_SERVED:
        began = time.process_time()
        for _ in range(scene.steps * len(drafter.rows)):
            drafter.draws.shuffle(drafter.rows)
            drafter.learn()
        spent = time.process_time() - began
        point = dict(served=TOKENS, updates=drafter.steps, learning_s=round(spent, 1))
        rows += measured(drafter, scene, about | point)
    return rows


def not_learning(scene, algorithm, name, seed, folder) -> list[dict]:
    "A trained drafter as it is."
    drafter = OnlineDrafter(trained(scene, algorithm, name, seed, folder), **arguments(algorithm))
    about = dict(algorithm=algorithm, seed=seed, variant=name, served=0, updates=0, learning_s=0.0)
    return measured(drafter, scene, about)


def serve_once(scene, algorithm, folder) -> dict[str, Any]:
    "The variant `with earlier` with `generate`: processor seconds, and whether the text is the verifier's."
    model = trained(scene, algorithm, "before", 0, folder)
    earlier = Subset(scene.data, scene.old)
    learning: dict[str, Any] = dict(learning_rate=scene.rate, total_seq_len=ROW, earlier=earlier)
    drafter = OnlineDrafter(model, **learning, **arguments(algorithm))
    verifier = Verifier.from_pretrained(scene.verifier, drafter.aux_layer_ids, dtype="float32")
    stop = eos_ids_of(verifier, AutoTokenizer.from_pretrained(scene.verifier))
    options = dict(max_new_tokens=160, eos_token_ids=stop)
    times, texts, served = collections.Counter(), [], 0
    for answer in random.Random(0).sample(scene.serve, len(scene.serve)):
        began = time.process_time()
        generation = generate(verifier, drafter, answer.prompt, k=K, **options)
        times["serving"] += time.process_time() - began
        began = time.process_time()
        drafter.keep(generation)
        drafter.learn(scene.steps)
        times["learning"] += time.process_time() - began
        texts.append((answer.prompt, generation.tokens))
        served += len(generation.tokens)
        if served >= TOKENS:
            break
    plain, same = Verifier(verifier.model), 0
    for prompt, tokens in texts:
        began = time.process_time()
        same += generate(plain, NoDrafter(), prompt, k=0, **options).tokens == tokens
        times["without a drafter"] += time.process_time() - began
    seconds = {name: round(value, 1) for name, value in times.items()}
    about = dict(rate=scene.rate, steps=scene.steps, requests=len(texts), served=served, same_text=same)
    return about | seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("scene", choices=("tiny", "real"))
    parser.add_argument("--algorithm", default="eagle3")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    disable_progress_bar()
    results = HERE / f"results/{args.scene}.csv.gz"
    scene = dict(tiny=tiny, real=real)[args.scene]()
    folder = ROOT / f"output/online/{args.scene}"
    table = pd.read_csv(results) if results.is_file() else pd.DataFrame(columns=["algorithm", "seed", "variant"])
    for seed in range(args.seeds):
        drafted = (*REJECTED, *HALF) if args.algorithm == "dflash" else ()
        for variant in ("before", "both", *VARIANTS, "ordinary", *drafted):
            if len(table.query("algorithm == @args.algorithm and seed == @seed and variant == @variant")):
                continue
            run = not_learning if variant in ("before", "both") else online
            rows = pd.DataFrame(run(scene, args.algorithm, variant, seed, folder))
            for (served, kind), part in rows.groupby(["served", "kind"]):
                length = 1 + part.accepted.sum() / part.steps.sum()
                print(f"{args.algorithm} {seed} {variant}: {served} tokens, {kind}: {length:.3f}", flush=True)
            table = pd.concat([table, rows], ignore_index=True) if len(table) else rows
            with atomic_write(results) as tmp:
                table.to_csv(tmp, index=False, compression=dict(method="gzip", mtime=0))
    once = HERE / f"results/{args.scene}_{args.algorithm}_served.json"
    if not once.is_file():
        with atomic_write(once) as tmp:
            tmp.write_text(json.dumps(serve_once(scene, args.algorithm, folder), indent=1) + "\n")
    print(once.read_text())
