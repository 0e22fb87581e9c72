"""How many conversations a drafter needs: the same training steps on 125, 250, 500 and all 1000 shipped answers.

    python benchmarks/data_size/run.py                                      some ten minutes of one core
    python benchmarks/data_size/run.py --algorithm eagle3 --steps 140       another drafter beside it

Every run takes the same steps, so that a smaller set is read more often: what differs is how many different
conversations are read, not how long training lasts. The smaller sets are the first answers of the larger ones. Each
drafter then writes the same held-out answers greedily, with four draft tokens a step. A row that is in
results/data_size.csv stays, so that a run may be interrupted; the guide on the amount of data shows the table.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.lab.experiment import COMMON, measure_heldout, shipped_features, train_on_shipped
from speculators_nb.models.base import SpeculatorModel

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results/data_size.csv"
KEY = ["drafter", "conversations", "seed", "steps"]


def last(history, name):
    "The last value that was logged under a name; None: never logged."
    return next((entry[name] for entry in reversed(history) if name in entry), None)


def measured(algorithm, conversations, seed, steps, n_prompts):
    "Train on the first so many answers and decode: a row of the table."
    features = shipped_features(n=conversations)
    tokens = sum(FeatureDataset(features).lengths)
    with tempfile.TemporaryDirectory() as folder:
        trainer = train_on_shipped(algorithm, folder, features=features, max_steps=steps, seed=seed)
        drafter = SpeculatorModel.from_pretrained(folder).drafter()
        found = measure_heldout({algorithm: drafter}, n_prompts=n_prompts, ngram=False)
    length = found.summary[found.summary.domain == "all"].iloc[0]
    first = found.positions[found.positions.position == 1].iloc[0]
    history = trainer.state.log_history
    return dict(
        drafter=algorithm,
        conversations=conversations,
        seed=seed,
        steps=steps,
        tokens=tokens,
        epochs=last(history, "epoch"),
        train_loss=last(history, "loss"),
        held_out_loss=last(history, "eval_loss"),
        first_position=first.unconditional,
        mean_length=length.mean_length,
        mean_length_low=length.mean_length_low,
        mean_length_high=length.mean_length_high,
        prompts=n_prompts,
        row=COMMON["total_seq_len"],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--algorithm", default="dflash2", help="which drafter")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 125, 500, 250], help="conversations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of initial weights and order")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts, at most 180")
    args = parser.parse_args()
    disable_progress_bar()
    RESULTS.parent.mkdir(exist_ok=True)
    for seed in args.seeds:
        for size in args.sizes:
            table = pd.read_csv(RESULTS) if RESULTS.is_file() else pd.DataFrame(columns=KEY)
            if (table[KEY] == [args.algorithm, size, seed, args.steps]).all(axis=1).any():
                continue
            row = pd.DataFrame([measured(args.algorithm, size, seed, args.steps, args.prompts)]).round(4)
            table = pd.concat([table, row], ignore_index=True) if len(table) else row
            with atomic_write(RESULTS) as tmp:
                table.sort_values(KEY, kind="stable").to_csv(tmp, index=False)
            print(row.to_string(index=False), flush=True)
