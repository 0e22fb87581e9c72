#!/usr/bin/env python
"""What drafting and verifying costs with the tiny verifier: the record that tutorials 7 and 8 draw.

    python benchmarks/costs/run.py    some three minutes on an idle core; trains EAGLE for twenty seconds once

Method: `verify_costs` for passes over 1 to 7 tokens, `draft_cost` for six draft tokens and `measured_speedup`
for whole answers, on six held-out prompts, one of each kind. The clock is this process's processor time in one thread,
and every number is a ratio to plain passes timed in turn with it; still, do not run it beside other work.
Results: benchmarks/costs/results/. Tutorials 7 and 8 and the notebook on speed measure the same on the reader's
machine.
"""

import os
import platform
from datetime import date
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.evaluate.cost import draft_cost
from speculators_nb.evaluate.speedup import measured_speedup, verify_costs
from speculators_nb.lab.experiment import heldout_setting, train_equally
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel

RESULTS = Path(__file__).resolve().parent / "results"
K = 6
CHAINS = {"eagle"}  # pays for every draft token; the others look up a block at one price


def costs(verifier, drafters, prompts):
    "Of reading n + 1 tokens and of drafting n tokens, in plain passes of the verifier"
    block = {name: draft_cost(verifier, d, prompts[:3], K)["time"] for name, d in drafters.items()}
    made = {name: [c * (n / K if name in CHAINS else n > 0) for n in range(K + 1)] for name, c in block.items()}
    return pd.DataFrame({"verifier": verify_costs(verifier, K, rounds=200), **made}).rename_axis("n")


def speedups(verifier, drafters, prompts, stop):
    "Of whole answers, with 1 to 6 draft tokens in a step: median over prompts, quartiles"
    rows = []
    for name in ("n-gram", "eagle"):
        for k in range(1, K + 1):
            found = measured_speedup(
                verifier, drafters[name], prompts, k=k, max_new_tokens=48, eos_token_ids=stop, rounds=4
            )
            rows.append({"drafter": name, "k": k, **found})
    return pd.DataFrame(rows)


def main():
    torch.set_num_threads(1)
    disable_progress_bar()
    folder = shipped_data().parent / "output/tutorials"
    train_equally(folder, 4.5e11, {"eagle": ("eagle", {})})
    eagle = SpeculatorModel.from_pretrained(folder / "eagle", verifier=shipped_data() / "tiny-verifier").drafter()
    eagle.trained_tokens = K
    drafters = {"n-gram": NgramDrafter(), "suffix": SuffixDrafter(factor=K), "eagle": eagle}
    verifier, prompts, _, stop = heldout_setting(drafters, 6)
    table, clocked = costs(verifier, drafters, prompts), speedups(verifier, drafters, prompts, stop)
    RESULTS.mkdir(exist_ok=True)
    table.round(3).to_csv(RESULTS / "costs.csv")
    clocked.round(3).to_csv(RESULTS / "speedups.csv", index=False)
    (RESULTS / "README.md").write_text(
        f"""# Costs of drafting and verifying, {date.today()}

Verifier `data/tiny-verifier`, one thread, torch {torch.__version__}, {platform.machine()}. Everything is in
passes of the verifier over one token. Written by `python benchmarks/costs/run.py`; drawn by tutorials 7 and 8.

{table.round(2).to_markdown()}

## Whole answers: how many times faster

{clocked.round(2).to_markdown(index=False)}
""",
        encoding="utf-8",
    )
    print(table.round(2).to_string(), clocked.round(2).to_string(index=False), sep="\n\n")


if __name__ == "__main__":
    main()
