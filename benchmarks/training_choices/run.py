"""Choices in training, measured: losses, the depth of training-time test, and the defaults of the lab.

    python benchmarks/training_choices/run.py losses        30 runs: EAGLE-3 with ten losses, three seeds each
    python benchmarks/training_choices/run.py ttt_depth     12 runs: EAGLE-3 with 1, 2, 4 and 8 steps, three seeds each
    python benchmarks/training_choices/run.py defaults      12 runs: EAGLE-3 and MTP, two step weights, three seeds

A run takes half a minute to two minutes of one core. All settings of an experiment get the same steps on the
same answers, and write the same held-out answers greedily; those of `losses` also at temperature 1. Runs are stored
below output/training_choices; an interrupted call goes on where it was. After each run results/NAME.csv.gz gets what
is finished: a row for each run, temperature, draft length and prompt. The tutorials on losses and on training-time
test read them.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.decode.step_counts import COUNTS
from speculators_nb.evaluate.acceptance import count
from speculators_nb.lab.experiment import measure_heldout
from speculators_nb.lab.grid import experiment
from speculators_nb.models.base import SpeculatorModel

HERE = Path(__file__).resolve().parent
# 594 tokens occur in the answers, so a draft vocabulary of 640 leaves none out
SMALL = dict(
    total_seq_len=512,
    optimizer="adamw",
    learning_rate=3e-3,
    draft_vocab_size=640,
    max_steps=150,
    ttt_step_loss_decay=0.8,  # of EAGLE-3's released code
)
LOSSES = {name: name for name in ("kl_div", "rkl", "jsd", "ce", "topk_ce", "tv", "nla", "lk_hybrid")}
LOSSES |= {"kl_div + tv": dict(kl_div=0.5, tv=0.5), "0.1 ce + 0.9 tv": dict(ce=0.1, tv=0.9)}


def losses():
    "soft_ce is left out: it has the gradient of kl_div."
    return {name: ("eagle3", dict(SMALL, loss_fn=loss)) for name, loss in LOSSES.items()}


def ttt_depth():
    "The steps are the same, so eight steps of training-time test take the most FLOPs."
    return {f"{depth} steps": ("eagle3", dict(SMALL, ttt_steps=depth)) for depth in (1, 2, 4, 8)}


def defaults():
    "One epoch with the lab's own settings."
    found = {f"eagle3, decay {decay}": ("eagle3", dict(ttt_step_loss_decay=decay)) for decay in (1.0, 0.6)}
    for beta in (0.6, 0.3):
        found[f"mtp, beta {beta}"] = "mtp", dict(step_weight_beta=beta)
    return found


# name -> settings, seeds, draft tokens in training, and when measured
EXPERIMENTS = {
    "losses": (losses, 3, 4, (4,)),
    "ttt_depth": (ttt_depth, 3, 4, (1, 2, 4, 8)),
    "defaults": (defaults, 3, 4, (4,)),
}


def sampled(folder, k, n_prompts):
    "Counts of every held-out prompt at temperature 1, made once for each run."
    place = Path(folder) / "sampled.csv"
    if not place.is_file():
        drafter = SpeculatorModel.from_pretrained(Path(folder) / "drafter").drafter()
        measured = measure_heldout({"it": drafter}, k, n_prompts, temperatures=(1.0,), ngram=False)
        names = [*COUNTS, *(f"at_{i}" for i in range(1, k + 1))]
        rows = [count(generation, k).astype(int) for generation in measured.generations["it", 1.0]]
        with atomic_write(place) as tmp:
            pd.DataFrame(rows, columns=names).to_csv(tmp, index_label="prompt")
    return pd.read_csv(place)


def save(name, results, n_prompts, lengths):
    "Write what is finished."
    table = results.counts.assign(temperature=0)
    if name == "losses":
        domains = table.drop_duplicates("prompt").set_index("prompt").domain
        for run in results.runs.itertuples():
            there = sampled(run.folder, lengths[0], n_prompts)
            more = there.assign(setting=run.setting, seed=run.seed, k=lengths[0], temperature=1)
            table = pd.concat([table, more.assign(domain=more.prompt.map(domains))])
    numbers = table.columns.difference(["setting", "domain"])
    table[numbers] = table[numbers].astype("Int64")
    with atomic_write(HERE / f"results/{name}.csv.gz") as tmp:
        table.to_csv(tmp, index=False, compression=dict(method="gzip", mtime=0))
    last = results.runs.iloc[-1]
    print(f"{len(results.runs)} runs finished: {last.setting}, seed {last.seed}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=EXPERIMENTS, help="which experiment")
    parser.add_argument("--seeds", type=int, help="of initial weights and order; default: those that are stored")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts, at most 180")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    disable_progress_bar()
    contenders, seeds, k, lengths = EXPERIMENTS[args.name]
    experiment(
        Path("output/training_choices") / args.name,
        contenders(),
        seeds=args.seeds or seeds,
        k=k,
        draft_lengths=lengths,
        n_prompts=args.prompts,
        workers=args.workers,
        after_each=lambda results: save(args.name, results, args.prompts, lengths),
    )
