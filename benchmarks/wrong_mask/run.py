"""Training under a wrong mask: what a leak does to the accuracy in training, and to the acceptance in decoding.

    python benchmarks/wrong_mask/run.py                    20 runs, some 60 seconds of one core each
    python benchmarks/wrong_mask/run.py --seeds 1          one seed of each mask first

EAGLE-3 with four masks, the same answers, steps and seeds. A decoder has one mask, the right one: it cannot attend to
what was not written. Runs are stored below output/; an interrupted call goes on where it was. After each run results/
gets what is finished: accuracy.csv (the last logged training accuracy of each run) and prompts.csv.gz (accepted tokens
of each run on each held-out prompt).
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.core.files import atomic_write
from speculators_nb.lab.grid import experiment
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators_nb.nn.attention import KeyRange, Mask, causal, itself, same_document

HERE = Path(__file__).resolve().parent
BUDGET = dict(total_seq_len=512, optimizer="adamw", learning_rate=3e-3, draft_vocab_size=640, max_steps=150)
COUNTED = ["steps", "steps_drafted", "proposed", "accepted"]


@SpeculatorModelConfig.register("eagle3_across")
class AcrossConfig(Eagle3SpeculatorConfig):
    speculators_model_type: str = "eagle3_across"


@SpeculatorModel.register("eagle3_across")
class AcrossDocuments(Eagle3DraftModel):
    "A row attends to the documents before its own in the packed row, too."

    config_class = AcrossConfig

    def mask(self, layer, document_ids):
        return causal() | super().mask(layer, document_ids)


@SpeculatorModelConfig.register("eagle3_future")
class FutureConfig(Eagle3SpeculatorConfig):
    speculators_model_type: str = "eagle3_future"


@SpeculatorModel.register("eagle3_future")
class SeesTheFuture(Eagle3DraftModel):
    "A row attends to what follows in its document, too: the answer is among its keys."

    config_class = FutureConfig

    def mask(self, layer, document_ids):
        length = len(document_ids)
        first_pass = Mask(lambda b, h, q, kv: (kv < length) & (q >= 0), lambda q, n: [KeyRange(0 * q, 0 * q + length)])
        return (same_document(document_ids) & first_pass) | super().mask(layer, document_ids)


@SpeculatorModelConfig.register("eagle3_no_diagonal")
class NoDiagonalConfig(Eagle3SpeculatorConfig):
    speculators_model_type: str = "eagle3_no_diagonal"


@SpeculatorModel.register("eagle3_no_diagonal")
class NoDiagonal(Eagle3DraftModel):
    "A row does not attend to its own keys of later steps, which decoding has in its cache."

    config_class = NoDiagonalConfig

    def mask(self, layer, document_ids):
        return (causal() & same_document(document_ids)) | itself()


CONTENDERS = {
    "right mask": ("eagle3", {}),
    "across documents": ("eagle3_across", {}),
    "future visible": ("eagle3_future", {}),
    "no diagonal": ("eagle3_no_diagonal", {}),
}


def training_accuracy(folder):
    "The last logged accuracy of a run in training: share of positions whose first 1, 2, … draft tokens are all right."
    log = pd.read_csv(Path(folder) / "drafter/training_log.csv")
    columns = [name for name in log if name.startswith("full_acc_")]
    last = log[columns].dropna().iloc[-1]
    return {f"position {i}": value for i, value in enumerate(last, 1)}


def save(results):
    "Write what is finished."
    accuracy = pd.DataFrame(
        [dict(setting=run.setting, seed=run.seed) | training_accuracy(run.folder) for run in results.runs.itertuples()]
    )
    counts = results.counts.astype({name: "Int64" for name in results.counts if name in COUNTED or name[:3] == "at_"})
    compressed = dict(method="gzip", mtime=0)
    with atomic_write(HERE / "results/accuracy.csv") as tmp:
        accuracy.to_csv(tmp, index=False, float_format="%.5f")
    with atomic_write(HERE / "results/prompts.csv.gz") as tmp:
        counts.to_csv(tmp, index=False, compression=compressed)
    last = results.runs.iloc[-1]
    print(f"{len(results.runs)} runs finished: {last.setting}, seed {last.seed}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="of initial weights and order")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts, at most 180")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    disable_progress_bar()
    save(
        experiment(
            "output/wrong_mask",
            CONTENDERS,
            seeds=args.seeds,
            n_prompts=args.prompts,
            workers=args.workers,
            after_each=save,
            **BUDGET,
        )
    )
