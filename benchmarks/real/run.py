"""Does the tiny verifier rank drafters as a language model does? All drafters, equal training FLOPs, both verifiers.

    make real                                     once: fetches SmolLM2-135M-Instruct, makes features, trains a drafter
    python benchmarks/real/run.py                 then this; two hours on two idle cores, continues where it stopped
    python benchmarks/real/run.py --add domino    train and measure this one; the other drafters stay as they are
    python benchmarks/real/run.py --only page     the page again, from the stored counts

Method: a budget is what EAGLE-3 needs for so many packed rows of 1,024 positions, counted in FLOPs of training
(`experiment.steps_within`); every other drafter trains for as many steps as the same budget holds, three seeds each,
with the settings of `experiment.settings`. Each then drafts four tokens a step, greedily, on the same held-out
questions. Kendall's tau compares the two orders; its interval resamples the questions, and the seeds of each drafter.
Results: benchmarks/real/results/.
"""

import argparse
import os
import sys
from datetime import date
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
from transformers.utils.logging import disable_progress_bar

from speculators_nb.lab.experiment import CONTENDERS, settings, shipped_features, steps_within
from speculators_nb.lab.grid import announce, experiment
from speculators_nb.lab.paired import LENGTH, differences, measures, rank_correlation, results_table, t_interval

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REAL = ROOT / "output/real"  # of `make real`
WITHOUT = {"mtp"}  # a head of the verifier's own family, and SmolLM2's has none
WHOLE = {"dflash2", "eagle", "lilicorr", "medusa", "mlp", "query_only"}  # drafters of the verifier's whole vocabulary
K, ROW = 4, 1024


def side(drafters, name, rows, n_prompts):
    "What an experiment with one verifier is given."
    if name == "toy":
        features, own, verifier = shipped_features(), {}, None
    else:
        features, verifier = REAL / "features", str(REAL / "verifier")
        own = dict(features=features, heldout=REAL / "prepared", max_new_tokens=96)
        if not (features / "data_config.json").is_file():
            sys.exit(f"{features}: no features; run `make real` first")

    def arguments(algorithm, given):
        size = {} if verifier is None or algorithm in WHOLE else dict(draft_vocab_size=8000)
        return size | given | dict(total_seq_len=ROW)

    def share(budget, algorithm, given):
        every = settings(algorithm, K) | arguments(algorithm, given)
        return steps_within(budget, algorithm, features, verifier, **every)

    one = share(1e12, "eagle3", {})
    budget = 1e12 * rows / one.steps
    compared = {}
    for drafter in drafters:
        algorithm, given = CONTENDERS[drafter]
        if drafter not in WITHOUT:
            steps = share(budget, algorithm, given).steps
            compared[drafter] = algorithm, arguments(algorithm, given) | dict(max_steps=steps)
    return compared, own | dict(n_prompts=n_prompts)


def comparison(counts):
    "drafter -> rank, mean length with its interval over seeds, and the difference from EAGLE-3."
    tables = []
    for name, own in counts.items():
        lengths = measures(own, K)[LENGTH]
        rows = {drafter: t_interval(of.to_numpy()) for drafter, of in lengths.groupby("setting")}
        table = pd.DataFrame(rows, index=["mean_length", "low", "high"]).T.sort_values("mean_length", ascending=False)
        gap = differences(own, "eagle3", K).query("measure == @LENGTH").set_index("setting")
        table["minus_eagle3"] = gap.difference
        table[["minus_low", "minus_high"]] = gap[["low", "high"]]
        table.insert(0, "rank", range(1, len(table) + 1))
        table.insert(0, "verifier", name)
        tables.append(table.rename_axis("drafter").reset_index())
    return pd.concat(tables).round(6)


def page(rows, counts, alike):
    "The stored results as a page."
    tables = {}
    for name, own in counts.items():
        table = results_table(own, K, "eagle3").rename_axis("drafter")
        tables[name] = table.to_markdown()
    prompts = {name: own.prompt.nunique() for name, own in counts.items()}
    return f"""# Drafters with two verifiers, {date.today()}

Every drafter has the training FLOPs that EAGLE-3 needs for {rows} packed rows of {ROW} positions with that verifier,
{counts["real"].seed.nunique()} seeds; four tokens drafted in a step, greedily. Written by
`python benchmarks/real/run.py`.

**Kendall's tau of the two orders of {len(alike.names)} drafters:
{alike.tau:.2f} [{alike.low:.2f}, {alike.high:.2f}].**

## SmolLM2-135M-Instruct, its own answers (`data/smollm2`), {prompts["real"]} held-out questions

{tables["real"]}

## The tiny verifier, its own answers (`data/answers`), {prompts["toy"]} held-out questions

{tables["toy"]}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=80, help="packed rows that EAGLE-3 trains on; the others' budget")
    parser.add_argument("--prompts", type=int, default=48, help="held-out questions")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--add", nargs="+", choices=CONTENDERS, help="train and measure these; the others stay")
    parser.add_argument("--only", choices=("toy", "real", "page"))
    args = parser.parse_args()
    os.chdir(ROOT)
    disable_progress_bar()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for name in ("toy", "real") if args.only is None else {args.only} - {"page"}:
        contenders, own = side(args.add or CONTENDERS, name, args.rows, args.prompts)
        folder, file = ROOT / "output/drafters_of" / name, results / f"{name}.csv.gz"
        stored = pd.read_csv(file) if args.add else None
        if stored is not None and set(stored.rows) != {args.rows}:
            sys.exit(f"--rows {args.rows}: the stored drafters have {stored.rows[0]}; write that, or leave --add out")
        options = dict(seeds=args.seeds, k=K, workers=args.workers, after_each=announce(folder))
        found = experiment(folder, contenders, **options, **own)
        for run, error in found.failed.items():
            print(f"{run}: {error}")
        counts = found.counts.assign(rows=args.rows)
        if stored is not None:
            counts = pd.concat([stored[~stored.setting.isin(args.add)], counts])
        counts.to_csv(file, index=False)
    files = {name: results / f"{name}.csv.gz" for name in ("toy", "real")}
    if all(file.is_file() for file in files.values()):
        counts = {name: pd.read_csv(file) for name, file in files.items()}
        comparison(counts).to_csv(results / "comparison.csv", index=False)
        alike = rank_correlation(counts["toy"], counts["real"], K)
        (rows,) = pd.concat(counts.values()).rows.unique()  # both of one budget
        row = dict(drafters=len(alike.names), tau=alike.tau, low=alike.low, high=alike.high, rows=rows)
        pd.DataFrame([row | dict(seeds=counts["real"].seed.nunique())]).round(4).to_csv(
            results / "rank_correlation.csv", index=False
        )
        text = page(rows, counts, alike)
        (results / "README.md").write_text(text, encoding="utf-8")
        print(text)
