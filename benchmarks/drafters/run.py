"""Every family of drafters on the tiny verifier: same answers, same training FLOPs, same held-out prompts.

    make compare                                         all of them; some ten minutes on two idle cores
    python benchmarks/drafters/run.py --only medusa mlp  train these and stop
    python benchmarks/drafters/run.py --add dflash2      train and measure this one; the other rows stay as they are
    python benchmarks/drafters/run.py --budget 4e12      more training for each

Method: `experiment.compare` counts the FLOPs of one training step of each family on the shipped answers, forward,
backward, heads and
targets included, and trains for as many steps as the budget holds, with the settings of `experiment.settings`. All are
then decoded on the
same held-out prompts, greedily and at temperature 1, and the price of a block of drafts is counted beside it. A drafter
that is
trained is kept in output/drafters, so that a run may be interrupted. Results: benchmarks/drafters/results/.
"""

import argparse
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
from transformers.utils.logging import disable_progress_bar

from speculators_nb.evaluate.cost import expected_speedup
from speculators_nb.lab.experiment import BUDGET, CONTENDERS, compare, settings, train_equally

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TITLES = {
    "mean_length": "mean length",
    "free_choice": "free choice",
    "mflops_per_token": "training MFLOPs a token",
    "flops": "draft, FLOPs",
    "weights": "draft, weights",
    "deep": "draft, weights, 36 layers",
    "time": "draft, time",
    "verify": "verify, time",
    "speedup": "speed-up here",
    "speedup_deep": "speed-up, 36 layers",
}


def page(table, positions, budget, row, n_prompts):
    "The results as a page."
    shown = table.rename(columns=TITLES).round({"training MFLOPs a token": 1, "epochs": 1, "seconds": 0})
    columns = [c for c in shown if c not in ("mean_length_low", "mean_length_high")]
    rates = positions.pivot(index=["temperature", "drafter"], columns="position", values="unconditional")
    given = pd.Series({name: str(settings(algorithm) | own) for name, (algorithm, own) in CONTENDERS.items()})
    return f"""# Drafters compared, {date.today()}

Verifier `data/tiny-verifier`, training answers `data/answers`, {budget:.3g} training FLOPs each in rows of {row},
{n_prompts} held-out prompts, 4 tokens drafted in a step. Lengths are tokens a step, greedy; `draft` columns are a block
of four in passes of the verifier over one token (36 layers: were the verifier that deep); times are of this machine,
one thread, and swing with what else it does. Written by `make compare`; `--add` measures some rows and leaves the rest.

{shown[columns].sort_values("mean length", ascending=False).to_markdown(floatfmt=".2f")}

## Acceptance at each position

{rates.round(3).to_markdown()}

## Settings

{given.rename("arguments of train_drafter").to_markdown()}
"""


def with_the_others(rows, old):
    "New rows among those that stay, drafters in one order."
    order = ["n-gram", *CONTENDERS]
    both = pd.concat([old[~old.drafter.isin(rows.drafter)], rows], ignore_index=True)
    return both.sort_values("drafter", key=lambda names: names.map(order.index), kind="stable")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--budget", type=float, default=5 * BUDGET, help="training FLOPs of each drafter")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts, at most 180")
    parser.add_argument(
        "--row", type=int, default=1024, help="positions in a packed row: half as many, twice the steps"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that share the training")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="train these and stop")
    parser.add_argument("--add", nargs="+", choices=CONTENDERS, help="train and measure these; the other rows stay")
    args = parser.parse_args()
    os.chdir(ROOT)
    disable_progress_bar()
    folder = ROOT / "output/drafters"
    if args.only:
        print(
            train_equally(
                folder, args.budget, {name: CONTENDERS[name] for name in args.only}, total_seq_len=args.row
            ).to_string()
        )
    else:
        names = args.add or list(CONTENDERS)
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--budget",
                    str(args.budget),
                    "--row",
                    str(args.row),
                    "--only",
                    *names[i :: args.workers],
                ]
            )
            for i in range(min(args.workers, len(names)))
        ]
        if any([w.wait() for w in workers]):  # noqa: C419 - all are waited for, whether one fails or not
            sys.exit("a worker failed: its message is above")
        contenders = {name: CONTENDERS[name] for name in names}
        table, measured = compare(
            folder, args.budget, contenders, n_prompts=args.prompts, temperatures=(0.0, 1.0), total_seq_len=args.row
        )
        results = HERE / "results"
        results.mkdir(exist_ok=True)
        parts = {"comparison": table.reset_index(), "summary": measured.summary, "positions": measured.positions}
        for name, data in parts.items():
            file = results / f"{name}.csv"
            if args.add:
                data = with_the_others(data[data.drafter != "n-gram"].round(4), pd.read_csv(file))
            if args.add and name == "comparison":  # a verification step takes what it took for the others
                added, verify = data.drafter.isin(names), data.verify[data.drafter == "n-gram"].item()
                data.loc[added, "verify"] = verify
                data.loc[added, "speedup"] = expected_speedup(data.mean_length, data.time, verify)[added]
            data.round(4).to_csv(file, index=False)
            parts[name] = data
        table = parts["comparison"].set_index("drafter")
        (results / "README.md").write_text(
            page(table, parts["positions"], args.budget, args.row, args.prompts), encoding="utf-8"
        )
        print(table.round(2).to_string())
