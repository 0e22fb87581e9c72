"""Attention by draft step of EAGLE-3 drafters with and without the norms of EAGLE-3.1.

    python benchmarks/attention_drift/run.py    two drafters, one epoch each: some four minutes of a core

Both are trained on the shipped answers from one seed, to draft four tokens; they differ in `fc_norm` and `norm_output`.
The shipped drafter, three epochs with one norm over all features and `norm_output`, is measured beside them. Each
drafts eight tokens a step along the verifier's greedy answers to 24 held-out prompts. results/ gets shares.csv (what
each draft step attends to, one row for each drafter, prompt and step) and positions.csv (acceptance at each position).
A drafter that is trained is kept in output/attention_drift.
"""

import os
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch

from speculators_nb.core.files import atomic_write
from speculators_nb.evaluate.acceptance import acceptance_table
from speculators_nb.lab.experiment import heldout_setting, train_on_shipped
from speculators_nb.lab.greedy_replay import greedy_answers, replay
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3_attention import AttentionRecorder

RESULTS = Path(__file__).resolve().parent / "results"
NORMS = {
    "eagle3 without norms": dict(norm_before_fc=False, fc_norm=False, norm_output=False),
    "eagle3 with norms": dict(norm_before_fc=False, fc_norm=True, norm_output=True),
}
SHIPPED = "eagle3 shipped"
TRAINED, K = 4, 8
PROMPTS = 24


def drafters(folder):
    "name -> model: the two trained here, and the shipped one."
    folders = {name: folder / name.replace(" ", "-") for name in NORMS}
    for name, own in folders.items():
        if not (own / "config.json").is_file():
            train_on_shipped("eagle3", own, TRAINED, eval_strategy="no", **NORMS[name])
    folders[SHIPPED] = shipped_data() / "tiny-drafter"
    verifier = shipped_data() / "tiny-verifier"
    return {
        name: SpeculatorModel.from_pretrained(own, verifier=verifier, dtype=torch.float32)
        for name, own in folders.items()
    }


def main():
    models = drafters(shipped_data().parent / "output/attention_drift")
    setting = heldout_setting({name: model.drafter() for name, model in models.items()}, PROMPTS)
    answers = greedy_answers(setting.verifier, setting.prompts, 160, setting.eos_token_ids, K)
    shares, positions = [], []
    for name, model in models.items():
        recorder, decoded = AttentionRecorder(model), []
        for i, answer in enumerate(answers):
            recorder.records = []
            decoded.append(replay(recorder, answer, K))
            shares.append(recorder.shares().reset_index().assign(drafter=name, prompt=i))
        positions.append(acceptance_table(decoded, K).assign(drafter=name))
    RESULTS.mkdir(exist_ok=True)
    for file, tables in (("shares.csv", shares), ("positions.csv", positions)):
        table = pd.concat(tables)
        with atomic_write(RESULTS / file) as tmp:
            table[["drafter", *table.columns.drop("drafter")]].round(4).to_csv(tmp, index=False)


if __name__ == "__main__":
    main()
