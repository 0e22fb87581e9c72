"""Acceptance against the training budget: every family of drafters at a smaller and a larger budget than run.py's.

    python benchmarks/drafters/budgets.py                       22 runs; an hour of one core
    python benchmarks/drafters/budgets.py --only eagle3 dflash  these drafters alone

The method is that of run.py beside this file, whose results are the points between: equal training FLOPs of every
drafter, the same answers, the same held-out prompts, greedy decoding with four draft tokens a step. Each point is a run
of its own, whose learning rate falls to zero at its end. A point is a row of results/budgets.csv; one that is there is
not made again.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.lab.experiment import BUDGET, CONTENDERS, measure_heldout, train_equally
from speculators_nb.models.base import SpeculatorModel

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results/budgets.csv"
BUDGETS = (1.25 * BUDGET, 15 * BUDGET)  # run.py's is 5
ROW = 1024  # positions in a packed row
LENGTH = ["mean_length", "mean_length_low", "mean_length_high"]


def point(name, budget, n_prompts):
    "Train one drafter and decode: a row of the table."
    disable_progress_bar()
    folder = HERE.parents[1] / f"output/budgets/{budget:.4g}"
    trained = train_equally(folder, budget, {name: CONTENDERS[name]}, total_seq_len=ROW)
    drafter = SpeculatorModel.from_pretrained(folder / name).drafter()
    summary = measure_heldout({name: drafter}, n_prompts=n_prompts, ngram=False).summary
    length = summary[summary.domain == "all"].iloc[0][LENGTH]
    run = trained.loc[name, ["steps", "epochs", "parameters"]]
    return dict(drafter=name, budget=budget) | run.to_dict() | length.to_dict() | dict(prompts=n_prompts)


def finished():
    "The rows that are there."
    return pd.read_csv(RESULTS) if RESULTS.is_file() else pd.DataFrame(columns=["drafter", "budget"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="these drafters")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts, at most 180")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    there = set(zip(finished().drafter, finished().budget))
    missing = [(name, budget) for budget in BUDGETS for name in args.only if (name, budget) not in there]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(point, *which, args.prompts) for which in missing]):
            table = pd.concat([finished(), pd.DataFrame([done.result()])]).sort_values(["budget", "drafter"])
            with atomic_write(RESULTS) as tmp:
                table.to_csv(tmp, index=False, float_format="%.6g")
            print(f"{len(table)} points: {done.result()['drafter']} at {done.result()['budget']:.3g} FLOPs", flush=True)
