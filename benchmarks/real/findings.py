"""Do the findings of tutorials 13 to 19 hold for a language model? EAGLE-3 for SmolLM2-135M-Instruct.

    make real                                       once: fetches the model, makes features, trains a drafter
    python benchmarks/real/findings.py              then this; half an hour of one core a seed, continues
    python benchmarks/real/findings.py --only drafter    what is measured along the drafter of `make real`
    python benchmarks/real/findings.py --only weights    weights of the loss, Spec-AUF's among them

Method: every setting differs in one thing (norms: both of them) from the settings of `make real`, in float32, takes
the same number of packed rows of 1,024 positions, and drafts four tokens a step, greedily, on the same held-out
questions. The drafter of `make real`
itself is measured by length of the answer and of the context, and by what it attends to. The tutorials read results/.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas as pd
import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from speculators_nb.core.files import atomic_write
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.step_counts import COUNTS
from speculators_nb.evaluate.acceptance import count, range_table
from speculators_nb.lab.greedy_replay import greedy_answers, replay
from speculators_nb.lab.grid import announce, experiment
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3_attention import AttentionRecorder
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/wrong_mask"))
from run import CONTENDERS as MASKS  # noqa: E402

REAL = ROOT / "output/real"  # of `make real`
K, ROW, VOCABULARY, NEW_TOKENS = 4, 1024, 8000, 96
EARLIER = (0, 2, 5)  # conversations before a question
SETTINGS = {
    "usual": ("eagle3", {}),
    "future visible": MASKS["future visible"],
    "1 step": ("eagle3", dict(ttt_steps=1)),
    "tv": ("eagle3", dict(loss_fn="tv")),
    "decay 1.0": ("eagle3", dict(ttt_step_loss_decay=1.0)),
    "1/16 of the conversations": ("eagle3", dict(eval_share=15 / 16)),
    "2 steps": ("eagle3", dict(ttt_steps=2)),
    "across documents": MASKS["across documents"],
    "without norms": ("eagle3", dict(norm_before_fc=False, norm_output=False)),
    "ce": ("eagle3", dict(loss_fn="ce")),
    "no diagonal": MASKS["no diagonal"],
    "decay 1.2": ("eagle3", dict(ttt_step_loss_decay=1.2)),
    "1/4 of the conversations": ("eagle3", dict(eval_share=3 / 4)),
    "kl_div + tv": ("eagle3", dict(loss_fn=dict(kl_div=0.5, tv=0.5))),
}
EVEN = dict(eagle3=dict(ttt_step_loss_decay=1.0), dflash=dict(step_weights=[1.0] * (K + 1)))
DECAY = dict(eagle3={}, dflash=dict(per_position_loss_weight="fixed-exp-decay"))  # DFlash's default is D-PACE with ce
WEIGHTS = {
    f"{drafter}, {name}": (drafter, dict(loss_fn="ce") | arguments)
    for drafter in EVEN
    for name, arguments in {
        "even": EVEN[drafter],
        "decay": DECAY[drafter],
        "D-PACE": dict(per_position_loss_weight="dpace"),
        "AUF": dict(per_position_loss_weight="auf"),
    }.items()
}


def write(table, name):
    "A table of results/, whole or not at all."
    with atomic_write(HERE / "results" / name) as tmp:
        compression = dict(method="gzip", mtime=0) if name.endswith(".gz") else None
        table.round(4).to_csv(tmp, index=False, compression=compression)


def in_training(run):
    "What a run's log says at its end: the share of positions whose first 1, 2, … draft tokens are all right."
    log = pd.read_csv(Path(run.folder) / "drafter/training_log.csv")
    last = log.filter(like="full_acc_").dropna(how="all").iloc[-1].dropna()
    return dict(setting=run.setting, seed=run.seed) | {f"position {i}": value for i, value in enumerate(last, 1)}


def settings(name, contenders, rows, n_prompts, seeds, workers):
    "Train and measure every setting."
    folder = ROOT / "output" / name
    each = announce(folder)

    def save(found):
        each(found)
        write(found.counts, f"{name}.csv.gz")
        if contenders is SETTINGS:  # EAGLE-3 all of them
            write(pd.DataFrame(map(in_training, found.runs.itertuples())), f"{name}_training.csv")

    found = experiment(
        folder,
        contenders,
        seeds=seeds,
        k=K,
        n_prompts=n_prompts,
        max_new_tokens=NEW_TOKENS,
        workers=workers,
        features=REAL / "features",
        heldout=REAL / "prepared",
        after_each=save,
        total_seq_len=ROW,
        draft_vocab_size=VOCABULARY,
        max_steps=rows,
        logging_steps=min(20, rows),
    )
    save(found)


def drafter_of_real():
    "The model, its drafter beside n-gram, the verifier, and the tokens that end an answer."
    model = SpeculatorModel.from_pretrained(REAL / "drafter", verifier=REAL / "verifier", dtype=torch.float32)
    drafters = {"eagle3": model.drafter(), "n-gram": NgramDrafter()}
    verifier = Verifier.from_pretrained(REAL / "verifier", drafters["eagle3"].aux_layer_ids)
    return model, drafters, verifier, eos_ids_of(verifier, AutoTokenizer.from_pretrained(REAL / "verifier"))


def questions(n):
    "Token ids of the first held-out questions."
    lines = (REAL / "prepared/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:n]]


def along_answers(n_prompts):
    "Acceptance by position in an answer, and what the drafter attends to."
    model, drafters, verifier, stop = drafter_of_real()
    answers = greedy_answers(verifier, questions(n_prompts), 320, stop)
    tables = []
    for name, drafter in drafters.items():
        table = range_table([replay(drafter, a, K) for a in answers], K, (50, 100, 150, 200))
        tables.append(table[table.by == "output"].assign(drafter=name))
    write(pd.concat(tables), "length.csv")
    recorder, shares = AttentionRecorder(model), []
    for i, answer in enumerate(answers):
        recorder.records = []
        replay(recorder, answer, 8)
        shares.append(recorder.shares().reset_index().assign(prompt=i))
    write(pd.concat(shares), "attention.csv")


def after_others(n_prompts):
    "Acceptance on the same questions after other conversations, in the form of an experiment's counts."
    _, drafters, verifier, stop = drafter_of_real()
    lines = (ROOT / "data/smollm2/answers.jsonl").read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line)["input_ids"] for line in lines]
    pairs = [(q, conversations[i * 5 :][: max(EARLIER)]) for i, q in enumerate(questions(n_prompts))]
    # a question that stands among the others would be answered by copying
    pairs = [(q, others) for q, others in pairs if all(other[: len(q)] != q for other in others)]
    rows = []
    for before in EARLIER:
        prompts = []
        for question, others in pairs:
            system = question.index(2) + 2  # its turn, and the line break after it
            turns = [token for other in others[:before] for token in [*other[system:], 198]]
            prompts.append(question[:system] + turns + question[system:])
        answers = greedy_answers(verifier, prompts, 64, stop)
        tokens = round(sum(map(len, prompts)) / len(prompts))
        for name, drafter in drafters.items():
            for i, answer in enumerate(answers):
                counts = count(replay(drafter, answer, K), K).astype(int).tolist()
                about = dict(drafter=name, setting=f"{tokens} tokens", seed=0, k=K, prompt=i)
                rows.append(about | dict(zip([*COUNTS, *(f"at_{j + 1}" for j in range(K))], counts)))
    write(pd.DataFrame(rows), "context.csv.gz")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=80, help="packed rows that every setting trains on")
    parser.add_argument("--prompts", type=int, default=48, help="held-out questions; a third along the drafter")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=("settings", "weights", "drafter"))
    args = parser.parse_args()
    os.chdir(ROOT)
    disable_progress_bar()
    if not (REAL / "features/data_config.json").is_file():
        sys.exit(f"{REAL / 'features'}: no features; run `make real` first")
    how = args.rows, args.prompts, args.seeds, args.workers
    if args.only in (None, "drafter"):
        along_answers(args.prompts // 3)
        after_others(args.prompts // 3)
    if args.only in (None, "settings"):
        settings("findings", SETTINGS, *how)
    if args.only in (None, "weights"):
        settings("weights", WEIGHTS, *how)
