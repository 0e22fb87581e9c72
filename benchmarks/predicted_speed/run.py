#!/usr/bin/env python
"""Tokens a second with each drafter and each K, and, timed apart from them, the parts of a step: the record in which
the notebook on speed-up compares what it predicts with what is measured.

    python benchmarks/predicted_speed/run.py    a quarter of an hour of one core; trains DFlash for one epoch

The shipped EAGLE-3 (a chain), DFlash (blocks) and n-gram with the tiny verifier in our decoder, greedily, on twelve
held-out prompts, two of each domain; K from 1 to 5, and 0 is no drafter. Everything takes its turn in every round, and
of each prompt the median of the rounds counts, so that whatever else the machine does meets all alike. The clock is
this process's processor time in one thread. Results: benchmarks/predicted_speed/results/.

answers.csv: seconds of all answers; `prompt` is answers of one token. costs.csv: of reading n + 1 tokens
(`verify_costs`) and of drafting n (timed with 1 and with 5, and on a line between), in plain steps. positions.csv: the
share of the steps with K = 5 that proposed, and that accepted, at least so many tokens.
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
from speculators_nb.evaluate.cost import Metered
from speculators_nb.evaluate.speedup import verify_costs
from speculators_nb.lab.experiment import heldout_setting, shipped_drafter, train_on_shipped
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel

RESULTS = Path(__file__).resolve().parent / "results"
K = 5


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


def measure(verifier, drafters, prompts, stop, rounds):
    "Answers with every drafter and K, and the parts of a step, in turn: the three tables"
    took = defaultdict(lambda: np.zeros((rounds, len(prompts))))
    drafting, reading, steps = defaultdict(list), [], defaultdict(list)

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
                    answered(metered, i, k)
                    # the first draft reads the prompt; near its end an answer requests fewer tokens
                    drafting[name, k] += [cost for requested, cost in metered.costs[1:] if requested == k]
    whole = {key: np.median(times, 0).sum() for key, times in took.items()}
    written, n = sum(map(len, plain)), len(prompts)
    step = (whole["no drafter", 0] - whole["prompt", 0]) / (written - n)  # the first token comes with the prompt
    columns = {"verifier": np.median(reading, 0)}
    for name in drafters:
        ends = [np.median(drafting[name, k]) / step for k in (1, K)]
        columns[name] = [0, *np.linspace(*ends, K)]
    answers = [
        dict(drafter=name, k=k, requests=n, tokens=n if name == "prompt" else written, seconds=time)
        for (name, k), time in whole.items()
    ]
    positions = [row for name, own in steps.items() for row in position_rows(name, own)]
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
        tables = measure(verifier, drafters, prompts, stop, rounds)
    RESULTS.mkdir(exist_ok=True)
    for name, table in zip(("answers", "costs", "positions"), tables):
        table.round(5).to_csv(RESULTS / f"{name}.csv", index=False)
    (RESULTS / "README.md").write_text(page(tables[0]), encoding="utf-8")
    print(page(tables[0]))


if __name__ == "__main__":
    main()
