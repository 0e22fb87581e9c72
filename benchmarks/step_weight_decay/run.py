"""Step-weight decay: what becomes of early and late draft positions when late steps weigh less in the loss.

    python benchmarks/step_weight_decay/run.py                    65 runs, some 90 seconds of one core each
    python benchmarks/step_weight_decay/run.py --seeds 1          one seed of each setting first

EAGLE-3 with four decays of the steps of training-time test, DFlash with four of its slots' decay and with D-PACE,
FastMTP with four of its steps' beta; five seeds each. Every drafter of a kind takes the same steps on the same
answers and is trained to draft eight tokens. Each then writes the same held-out answers greedily with two, four and
eight draft tokens a step. Runs are stored below output/ and taken seed by seed; an interrupted call goes on where it
was. After each run, results/ gets what is finished: counts.csv (one row for each run and draft length, prompts summed),
prompts.csv.gz (one row for each prompt) and settings.json; the tutorial on step weights reads them.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.lab.grid import experiment

HERE = Path(__file__).resolve().parent
K = 8
LENGTHS = (2, 4, 8)
# 594 tokens occur in the answers, so a draft vocabulary of 640 leaves none out
SMALL = dict(total_seq_len=512, optimizer="adamw", learning_rate=3e-3)
EAGLE3 = dict(SMALL, draft_vocab_size=640, max_steps=200)
DFLASH = dict(SMALL, optimizer="muon", draft_vocab_size=640, max_steps=250, max_anchors=64)
MTP = dict(SMALL, max_steps=100)


def contenders():
    "Every setting, by name."
    found = {}
    for decay in (0.6, 0.8, 1.0, 1.2):
        found[f"eagle3, decay {decay}"] = "eagle3", dict(EAGLE3, ttt_step_loss_decay=decay)
    fixed = dict(DFLASH, per_position_loss_weight="fixed-exp-decay")
    for gamma in (2.0, 4.0, 8.0, 16.0):
        found[f"dflash, gamma {gamma:g}"] = "dflash", dict(fixed, dflash_decay_gamma=gamma)
    found["dflash, D-PACE"] = "dflash", dict(DFLASH, per_position_loss_weight="dpace")
    for beta in (0.3, 0.6, 0.8, 1.0):
        found[f"mtp, beta {beta}"] = "mtp", dict(MTP, step_weight_beta=beta)
    return found


def save(results, settings, n_prompts):
    "Write what is finished."
    sums = results.counts.drop(columns=["prompt", "domain"])
    sums = sums.groupby(["setting", "seed", "k"], sort=False).sum(min_count=1).reset_index()
    whole = sums.columns[2:]
    sums[whole] = sums[whole].astype("Int64")
    about = dict(k=K, draft_lengths=LENGTHS, prompts=n_prompts, settings=settings)
    for name, write in {
        "counts.csv": lambda tmp: sums.to_csv(tmp, index=False),
        "prompts.csv.gz": lambda tmp: results.counts.astype(dict.fromkeys(results.counts.columns[5:], "Int64")).to_csv(
            tmp, index=False, compression=dict(method="gzip", mtime=0)
        ),
        "settings.json": lambda tmp: tmp.write_text(json.dumps(about, indent=1) + "\n"),
    }.items():
        with atomic_write(HERE / "results" / name) as tmp:
            write(tmp)
    last = results.runs.iloc[-1]
    print(f"{len(results.runs)} runs finished: {last.setting}, seed {last.seed}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="of initial weights and order")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts, at most 180")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    disable_progress_bar()
    settings = contenders()
    folder = Path("output/step_weight_decay")
    results = experiment(
        folder,
        settings,
        seeds=args.seeds,
        k=K,
        draft_lengths=LENGTHS,
        n_prompts=args.prompts,
        workers=args.workers,
        after_each=lambda found: save(found, settings, args.prompts),
    )
    save(results, settings, args.prompts)
