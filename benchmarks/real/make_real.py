"""What `make real` took and reached, and what its drafter brings in the two precisions.

    make real                              once; 22 minutes on two idle cores
    python benchmarks/real/make_real.py    then this: its files, and its questions decoded again; five minutes

The same for more training and more questions, hours:

    speculators-nb real --output-dir output/longer --epochs 6 --n-heldout 48
    python benchmarks/real/make_real.py output/longer longer.csv

Reads the folder: the seconds of each stage (added up over interruptions), the tables, the training log. The questions
are decoded in float32, where the text must be the verifier's own, and in bfloat16, which is faster on processors that
have it, with and without the drafter in turn. Results: benchmarks/real/results.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pandas as pd
import torch
from transformers import AutoTokenizer

from speculators_nb.evaluate.acceptance import PLAIN, evaluate
from speculators_nb.evaluate.prompts import encode_prompts, read_prompts
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
K, LIMIT = 4, 96  # as `make real` decodes


def kept(folder):
    "Rows from the files of `make real`."
    seconds = json.loads((folder / "seconds.json").read_text())
    yield "seconds from nothing", sum(seconds.values())
    yield from ((f"seconds of {stage}", seconds[stage]) for stage in ("features", "training", "decoding"))
    summary = pd.read_csv(folder / "summary.csv").query("domain == 'all'").set_index("drafter")
    yield "held-out questions", summary.requests["eagle3"]
    for drafter, what in {"eagle3": "tokens a step", "n-gram": "tokens a step of n-gram"}.items():
        yield what, *summary.loc[drafter, ["mean_length", "mean_length_low", "mean_length_high"]]
    log = pd.read_csv(folder / "drafter/training_log.csv")
    yield "training loss at the end", log.loss.dropna().iloc[-1]
    for row in log.dropna(subset="eval_mean_length").itertuples():
        yield f"tokens a step after {row.step} steps", row.eval_mean_length
        yield f"held-out loss after {row.step} steps", row.eval_loss


def decoded(folder, questions, dtype):
    "Rows from decoding the questions in this precision."
    drafter = SpeculatorModel.from_pretrained(folder / "drafter").drafter()
    verifier = Verifier.from_pretrained(folder / "verifier", list(drafter.aux_layer_ids), dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "verifier")
    measured = evaluate(
        verifier,
        {"eagle3": drafter},
        encode_prompts(read_prompts(folder / "prepared", first=questions), tokenizer),
        k=K,
        max_new_tokens=LIMIT,
        eos_token_ids=eos_ids_of(verifier, tokenizer),
        baseline=True,
    )
    speed = measured.performance.set_index("drafter")
    name = str(dtype).removeprefix("torch.")
    yield f"tokens a second in {name}", speed.tokens_per_second["eagle3"]
    yield f"tokens a second in {name} without a drafter", speed.tokens_per_second[PLAIN]
    yield f"speed-up in {name}", *speed.loc["eagle3", ["speedup", "speedup_low", "speedup_high"]]
    texts = zip(measured.generations["eagle3", 0.0], measured.generations[PLAIN, 0.0])
    yield f"texts equal in {name}", sum(drafted.tokens == plain.tokens for drafted, plain in texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE.parents[1] / "output/real", help="of `make real`")
    parser.add_argument("result", nargs="?", default="make_real.csv", help="file in results/")
    args = parser.parse_args()
    if not (args.folder / "report.html").is_file():
        sys.exit(f"{args.folder}: is not finished; run `make real` first")
    torch.set_num_threads(os.cpu_count())
    rows = list(kept(args.folder))
    questions = next(int(row[1]) for row in rows if row[0] == "held-out questions")
    for dtype in (torch.float32, torch.bfloat16):
        rows += decoded(args.folder, questions, dtype)
    table = pd.DataFrame(rows, columns=["what", "value", "low", "high"]).round(3)
    table.to_csv(HERE / "results" / args.result, index=False)
    print(table.fillna("").to_string(index=False))
