#!/usr/bin/env python
"""Tokens a second with each drafter and each K, and, timed apart from them, the parts of a step: the record in which
the notebook on speed-up compares what it predicts with what is measured.

    python benchmarks/predicted_speed/run.py    ten minutes of one core; trains DFlash for one epoch

The shipped EAGLE-3 (a chain), DFlash (blocks) and n-gram with the tiny verifier in our decoder, greedily, on twelve
held-out prompts, two of each domain; K from 1 to 5, and 0 is no drafter. Everything takes its turn in every round, and
of each prompt the median of the rounds counts, so that whatever else the machine does meets all alike. The clock is
this process's processor time in one thread. Results: benchmarks/predicted_speed/results/.

answers.csv: seconds of all answers; `prompt` is answers of one token. costs.csv, in plain steps: of reading n + 1
tokens where nothing else runs (`verify_costs`), of drafting n, and of what else a step takes that drafts n; the last
two were timed in answers with 1 and with 5, and are on a line between.
positions.csv: the share of the steps with K = 5 that proposed, and that accepted, at least so many tokens. caches.csv:
milliseconds of a step with n draft tokens that cost nothing, where so many megabytes are read between two steps, which
takes the weights of the verifier (8 MB) out of the processor's caches.
"""

import argparse
import os
import platform
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from speculators_nb.decode.generate import NoDrafter, generate, seconds
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.tree import TokenTree
from speculators_nb.evaluate.cost import Metered
from speculators_nb.evaluate.speedup import step_costs, verify_costs
from speculators_nb.lab.experiment import heldout_setting, shipped_drafter, train_on_shipped
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel

RESULTS = Path(__file__).resolve().parent / "results"
K = 5
MEGABYTES = (0, 1, 4, 16, 64)


def make_drafters(folder: Path):
    "EAGLE-3 as shipped; DFlash trained here in blocks of five"
    path = shipped_drafter(folder / "eagle3")
    eagle3 = SpeculatorModel.from_pretrained(path, verifier=shipped_data() / "tiny-verifier").drafter()
    eagle3.trained_tokens = K  # a chain can go on beyond what it was trained for
    dflash = train_on_shipped("dflash", folder / "dflash", k=K, eval_strategy="no").model.eval()
    return {"n-gram": NgramDrafter(), "eagle3": eagle3, "dflash": dflash.drafter()}


def position_rows(drafter, steps):
    "Of steps with K = 5: the share of them that proposed, that accepted, at least 1, 2, … tokens"
    proposed, accepted = np.array([(len(s.draft), s.accepted) for s in steps]).T
    shares = [(n[:, None] >= np.arange(1, K + 1)).mean(0) for n in (proposed, accepted)]
    return [dict(drafter=drafter, position=i, proposed=p, accepted=a) for i, (p, a) in enumerate(zip(*shares), 1)]


class Reads(NoDrafter):
    "Proposes the last token again, k times, and reads so much memory before."

    def __init__(self, megabytes):
        self.memory = torch.ones(megabytes * 250_000)

    def propose(self, tokens, features, k, sampling):
        self.memory.sum()
        return TokenTree.chain(tokens[-1:].expand(k))


def beside_memory(verifier, prompts, stop, rounds):
    "Milliseconds of a step that reads 1 + n tokens, what the drafter takes left out, by megabytes read before it"
    times = defaultdict(list)
    for _ in range(rounds):
        for megabytes in MEGABYTES:
            for n in (1, K):
                metered, done = Metered(Reads(megabytes), seconds), []
                options = dict(k=n, max_new_tokens=80, eos_token_ids=stop)
                whole = seconds(lambda: done.extend(generate(verifier, metered, p, **options) for p in prompts))
                rest = whole - sum(cost for _, cost in metered.costs)
                times[megabytes, n].append(1000 * rest / sum(len(answer.steps) for answer in done))
    rows = [dict(megabytes=mb, n=n, milliseconds=np.median(ms)) for (mb, n), ms in times.items()]
    return pd.DataFrame(rows)


def measure(verifier, drafters, prompts, stop, rounds):
    "Answers with every drafter and K, and the parts of a step, in turn: the tables"
    took = defaultdict(lambda: np.zeros((rounds, len(prompts))))
    drafting, reading, steps, counted = took.copy(), [], defaultdict(list), defaultdict(int)

    def answered(drafter, i, k, limit=160):
        done = []
        options = dict(k=k, max_new_tokens=limit, eos_token_ids=stop)
        time = seconds(lambda: done.append(generate(verifier, drafter, prompts[i], **options)))
        return time, done[0]

    plain = [answered(NoDrafter(), i, 0)[1].tokens for i in range(len(prompts))]
    for drafter in drafters.values():
        answered(drafter, 0, K)  # the first time is slower
    for turn in range(rounds):
        reading.append(verify_costs(verifier, K, rounds=8))
        for i in range(len(prompts)):
            took["prompt", 0][turn, i] = answered(NoDrafter(), i, 0, limit=1)[0]
            took["no drafter", 0][turn, i] = answered(NoDrafter(), i, 0)[0]
            for name, drafter in drafters.items():
                for k in range(1, K + 1):
                    took[name, k][turn, i], answer = answered(drafter, i, k)
                    assert answer.tokens == plain[i], (name, k, i)
                    if k == K and turn == 0:
                        steps[name] += answer.steps
                for k in (1, K):
                    metered = Metered(drafter, seconds)
                    took[f"{name}, metered", k][turn, i], answer = answered(metered, i, k)
                    drafting[name, k][turn, i] = sum(cost for _, cost in metered.costs)
                    counted[name, k] += len(answer.steps) if turn == 0 else 0
    whole = {key: np.median(times, 0).sum() for key, times in took.items()}
    written, n = sum(map(len, plain)), len(prompts)
    step = (whole["no drafter", 0] - whole["prompt", 0]) / (written - n)  # the first token comes with the prompt
    alone = np.median(reading, 0)
    columns = {"verifier": alone}
    rows = {name: position_rows(name, own) for name, own in steps.items()}
    for name in drafters:
        proposed = [row["proposed"] for row in rows[name]]
        draft_costs, others = [], []
        for k in (1, K):
            drafts = np.median(drafting[name, k], 0).sum()
            rest = whole.pop((f"{name}, metered", k)) - drafts - whole["prompt", 0]
            draft_costs.append(drafts / counted[name, k] / step)
            others.append(rest / counted[name, k] / step - step_costs(k, 0, alone, proposed=proposed)[-1])
        columns[name] = [0, *np.linspace(*draft_costs, K)]
        columns[f"other, {name}"] = [0, *np.linspace(*others, K)]
    answers = [
        dict(drafter=name, k=k, requests=n, tokens=n if name == "prompt" else written, seconds=time)
        for (name, k), time in whole.items()
    ]
    positions = [row for own in rows.values() for row in own]
    return pd.DataFrame(answers), pd.DataFrame(columns).rename_axis("n").reset_index(), pd.DataFrame(positions)


def page(answers):
    "Tokens a second by drafter and K"
    answers = answers.query("drafter != 'prompt'").assign(speed=answers.tokens / answers.seconds)
    table = answers.pivot(index="drafter", columns="k", values="speed").round(1).astype(object).fillna("")
    return f"""# Tokens a second, to be predicted, {date.today()}

Of processor time in one thread, on {platform.machine()}, torch {torch.__version__}. Written by
`python benchmarks/predicted_speed/run.py`, whose head says how; the notebook on speed-up predicts these numbers from
`costs.csv` and `positions.csv`. By the number of draft tokens, 0 without a drafter:

{table.to_markdown()}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        drafters = make_drafters(Path(folder))
        verifier, prompts, _, stop = heldout_setting(drafters, 12)
        tables = [*measure(verifier, drafters, prompts, stop, rounds), beside_memory(verifier, prompts, stop, rounds)]
    RESULTS.mkdir(exist_ok=True)
    for name, table in zip(("answers", "costs", "positions", "caches"), tables):
        table.round(5).to_csv(RESULTS / f"{name}.csv", index=False)
    (RESULTS / "README.md").write_text(page(tables[0]), encoding="utf-8")
    print(page(tables[0]))


if __name__ == "__main__":
    main()
