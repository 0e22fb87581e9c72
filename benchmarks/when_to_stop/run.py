#!/usr/bin/env python
"""Drafts at every position of the tiny verifier's greedy answers, and what drafting and reading them costs: the record
that the notebook on when to stop simulates with.

    python benchmarks/when_to_stop/run.py    some six minutes on an idle core; trains DSpark for two

Method: the shipped EAGLE-3 drafter, eight tokens at a position, and DSpark as its notebook trains it, in blocks of
seven, on 90 held-out prompts, 15 of each kind, at most 160 tokens each. Costs by `verify_costs` and `draft_cost`: the
clock is this process's processor time in one thread, and every number is a ratio to plain passes timed in turn with it.
Results: benchmarks/when_to_stop/results/.
"""

import os
import platform
import tempfile
from datetime import date
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from speculators_nb.evaluate.cost import draft_cost
from speculators_nb.evaluate.speedup import verify_costs
from speculators_nb.evaluate.when_to_stop import record_drafts
from speculators_nb.lab.experiment import heldout_setting, shipped_drafter, train_on_shipped
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel

RESULTS = Path(__file__).resolve().parent / "results"
LENGTHS = {"eagle3": 8, "dspark": 7}
PROMPTS = 90


def make_drafters(folder: Path):
    "EAGLE-3 as shipped; DSpark trained, with a threshold at which it computes confidences and never stops"
    shipped = shipped_drafter(folder / "eagle3")
    eagle3 = SpeculatorModel.from_pretrained(shipped, verifier=shipped_data() / "tiny-verifier")
    dspark = train_on_shipped("dspark", folder / "dspark", k=LENGTHS["dspark"], num_train_epochs=2).model.eval()
    drafters = {"eagle3": eagle3.drafter(), "dspark": dspark.drafter(confidence_threshold=0.0)}
    drafters["eagle3"].trained_tokens = LENGTHS["eagle3"]  # a chain can go on beyond what it was trained for
    return drafters


def record(verifier, drafters, prompts, domains, stop):
    "A row for each drafter and position"
    rows = []
    for name, drafter in drafters.items():
        for i, (prompt, domain) in enumerate(zip(prompts, domains)):
            accepted, logits = record_drafts(verifier, drafter, prompt, LENGTHS[name], eos_token_ids=stop)
            for a, f in zip(accepted, logits.round(2)):
                confidences = {f"f{j}": value for j, value in enumerate(f, 1)}
                rows.append(dict(drafter=name, domain=domain, prompt=i, accepted=a) | confidences)
    return pd.DataFrame(rows)


def costs(verifier, drafters, prompts):
    "Of reading n + 1 tokens and of drafting n, in plain passes of the verifier"
    most = max(LENGTHS.values())
    chain = draft_cost(verifier, drafters["eagle3"], prompts[:3], LENGTHS["eagle3"])["time"] / LENGTHS["eagle3"]
    block = draft_cost(verifier, drafters["dspark"], prompts[:3], LENGTHS["dspark"])["time"]
    made = {"eagle3": [chain * n for n in range(most + 1)], "dspark": [block * bool(n) for n in range(most + 1)]}
    return pd.DataFrame({"verifier": verify_costs(verifier, most)} | made).rename_axis("n")


def main():
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        drafters = make_drafters(Path(folder))
        verifier, prompts, domains, stop = heldout_setting(drafters, PROMPTS)
        table = costs(verifier, drafters, prompts)
        drafts = record(verifier, drafters, prompts, domains, stop)
    RESULTS.mkdir(exist_ok=True)
    drafts.to_csv(RESULTS / "drafts.csv.gz", index=False, compression=dict(method="gzip", mtime=0))
    table.round(3).to_csv(RESULTS / "costs.csv")
    counts = drafts.groupby(["drafter", "domain"]).accepted.agg(["size", "mean"]).unstack("drafter").round(2)
    counts.columns = [f"{name}, {what}" for what, name in counts.columns]
    (RESULTS / "README.md").write_text(
        f"""# Drafts at every position, {date.today()}

Verifier `data/tiny-verifier`, greedy answers to {PROMPTS} held-out prompts; one thread, torch {torch.__version__},
{platform.machine()}. Written by `python benchmarks/when_to_stop/run.py`; the notebook on stopping simulates with it.
`drafts.csv.gz`: for each position of the answers how many draft tokens agree with the text, and the confidence in each.

Costs in passes of the verifier over one token, of reading n + 1 tokens and of drafting n:

{table.round(2).to_markdown()}

Positions, and the mean number of tokens that agree:

{counts.rename(columns=lambda c: c.replace("size", "positions")).to_markdown()}
""",
        encoding="utf-8",
    )
    print((RESULTS / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
