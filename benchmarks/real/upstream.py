"""EAGLE-3 for a real verifier: upstream's trainer beside ours on the same features, and what settings do.

    python benchmarks/real/upstream.py                  reads output/real, which `make real` leaves
    python benchmarks/real/upstream.py --real FOLDER --upstream-python PATH

Every run packs the same features into rows of 1,024 positions, drafts the same 8,000 tokens and takes the same number
of steps; the last setting instead as many as fit into the CPU seconds that upstream took. A run is a process of its own
on one thread; its CPU seconds are those of the training loop. Upstream's checkpoint is loaded here as it is. The
verifier answers the held-out questions once, greedily, and every drafter is replayed against these answers. Runs are
kept in output/upstream: an interrupted call continues. Results: results/upstream.csv.gz, a row for each run and
question, and results/UPSTREAM.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
K, LENGTH, DRAFT_VOCAB, QUESTIONS, NEW_TOKENS = 4, 1024, 8000, 40, 96
UPSTREAM, OURS, EQUAL_TIME = "upstream, its defaults", "ours, `make real`", "ours, `make real`, equal time"
SETTINGS = {  # arguments of `train_drafter`; None: other than these
    UPSTREAM: None,
    OURS: None,
    EQUAL_TIME: None,
    "ours, default command line": {},
    "ours, AdamW 1e-4 linear": dict(optimizer="adamw", lr_scheduler_type="linear"),
    "ours, upstream's settings": dict(
        learning_rate=1e-3, lr_scheduler_type="linear", norm_before_fc=True, norm_output=True
    ),
}
ONCE = list(SETTINGS)[4:]  # with the first seed alone: what made the defaults, and what they are not
ABOUT = """# Beside upstream on a real verifier

EAGLE-3 for SmolLM2-135M-Instruct, draft vocabulary {vocabulary:,}, packed rows of {length:,} positions; greedy, K={k},
{questions} held-out questions of at most {new} new tokens; seeds: {seeds}. `accepted`: tokens a step minus one.
Intervals of 95 %: over seeds (t), with one seed over questions; in the last column over questions (bootstrap, seeds
pooled). CPU seconds of the training loop on one thread. The steps are the beginning of a training; how much of a
difference a long one keeps is not measured. Again with `make real`, then `python benchmarks/real/upstream.py`.

| setting | steps | CPU s | tokens a step | by seed | accepted | minus upstream | accepted more |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def timed(method, seconds):
    "The method, which also appends the CPU seconds of a call."

    def run(*args, **kwargs):
        start = time.process_time()
        result = method(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return result

    return run


def train_upstream(real, folder, steps, seed):
    """In upstream's environment. Its trainer expects an accelerator: here the device is the CPU, and bfloat16 autocast,
    its default, is that of the CPU; its own attention and losses have no backward there (so: sdpa, eager)."""
    import torch
    from speculators.train import cli
    from speculators.train import trainer as module
    from speculators.train.config import TrainConfig

    shutil.copytree(real / "features/rows", folder / "rows")
    counts = json.loads((folder / "rows/token_freq.json").read_text())
    torch.save({int(token): n for token, n in counts.items()}, folder / "rows/token_freq.pt")
    split = json.loads((real / "features/data_config.json").read_text())["data"]["split"]
    seconds = []
    module.Trainer.train_epoch = timed(module.Trainer.train_epoch, seconds)
    module.Trainer.val_epoch = lambda *_: None
    module.Trainer.device_type = property(lambda _: "cpu", lambda *_: None)
    module.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    words = ["--verifier-name-or-path", real / "verifier", "--data-path", folder / "rows", "--log-dir", folder]
    words += ["--hidden-states-path", real / "features", "--save-path", folder / "checkpoints", "--epochs", 1]
    words += ["--max-steps", steps, "--seed", seed, "--total-seq-len", LENGTH, "--draft-vocab-size", DRAFT_VOCAB]
    words += ["--train-data-ratio", (split["train"] + 0.5) / sum(split.values()), "--num-workers", 0]
    words += ["--on-missing", "raise", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
    cli.main(TrainConfig.resolve(list(map(str, words))))
    (folder / "checkpoints/0").rename(folder / "drafter")
    return sum(seconds)


def train_ours(setting, real, folder, steps, seed):
    "What the command `train` does with these arguments, without evaluations and checkpoints."
    from speculators_nb.lab.experiment import settings
    from speculators_nb.train.train_drafter import train_drafter
    from speculators_nb.train.trainer import SpeculatorTrainer

    seconds = []
    SpeculatorTrainer.train = timed(SpeculatorTrainer.train, seconds)
    given = settings("eagle3", K) if SETTINGS[setting] is None else SETTINGS[setting]
    same = dict(total_seq_len=LENGTH, draft_vocab_size=DRAFT_VOCAB, max_steps=steps, seed=seed)
    once = dict(eval_strategy="no", save_strategy="no", load_best_model_at_end=False, disable_tqdm=True)
    train_drafter(real / "features", folder / "drafter", real / "verifier", "eagle3", **given | same | once)
    return sum(seconds)


def trained(setting, real, folder, steps, seed, python):
    "Train in a process of its own unless that is done; {steps, cpu_seconds}."
    if not (folder / "run.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = [python if setting == UPSTREAM else sys.executable, __file__, "--worker", setting, "--real", real]
        words += ["--folder", folder, "--steps", steps, "--seeds", seed]
        quiet = dict(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
        with (folder / "log.txt").open("w") as log:
            subprocess.run([*map(str, words)], check=True, env=os.environ | quiet, stdout=log, stderr=log)
    return json.loads((folder / "run.json").read_text())


def answers_of(real, file):
    "The verifier's greedy answers to the first held-out questions, kept in a file."
    import torch
    from transformers import AutoTokenizer

    from speculators_nb.lab.greedy_replay import greedy_answers
    from speculators_nb.regenerate.in_process import eos_ids_of
    from speculators_nb.verifier.tapped_model import Verifier

    if not file.exists():
        verifier = Verifier.from_pretrained(real / "verifier", dtype="bfloat16")  # as its features were made
        lines = (real / "prepared/heldout.jsonl").read_text().splitlines()[:QUESTIONS]
        stop = eos_ids_of(verifier, AutoTokenizer.from_pretrained(real / "verifier"))
        prompts = [json.loads(line)["prompt"] for line in lines]
        torch.save(greedy_answers(verifier, prompts, NEW_TOKENS, stop, beyond=K), file)
    return torch.load(file, weights_only=False)


def counts_of(folder, answers, real):
    "Steps and accepted tokens of a run's drafter on each question, kept in the run's folder."
    import pandas as pd
    import torch

    from speculators_nb.decode.step_counts import COUNTS
    from speculators_nb.evaluate.acceptance import count
    from speculators_nb.lab.greedy_replay import replay
    from speculators_nb.models.base import SpeculatorModel

    file = folder / "counts.csv"
    if not file.exists():
        model = SpeculatorModel.from_pretrained(folder / "drafter", verifier=real / "verifier", dtype=torch.float32)
        drafter, names = model.drafter(), [*COUNTS, *(f"at_{i + 1}" for i in range(K))]
        rows = [count(replay(drafter, answer, K), K).astype(int) for answer in answers]
        pd.DataFrame(rows, columns=names).rename_axis("prompt").to_csv(file)
    return pd.read_csv(file)


def rows_of_page(table):
    "A row of the page for each setting."
    import numpy as np

    from speculators_nb.evaluate.acceptance import bootstrap
    from speculators_nb.lab.paired import LENGTH as TOKENS
    from speculators_nb.lab.paired import as_text, differences, measures, t_interval

    pairs = differences(table, UPSTREAM, K)
    pairs = pairs[pairs.measure == TOKENS].set_index("setting")
    for setting, own in measures(table, K).groupby("setting", sort=False):
        runs, tokens = table[table.setting == setting].drop_duplicates("seed"), own[TOKENS].to_numpy()
        row = [
            setting,
            f"{runs.train_steps.mean():.0f}",
            f"{runs.cpu_seconds.mean():.0f}",
            as_text(*t_interval(tokens)),
        ]
        row += [", ".join(f"{n:.3f}" for n in tokens), f"{tokens.mean() - 1:.3f}", "", ""]
        if setting != UPSTREAM:
            row[-2] = as_text(*pairs.loc[setting, ["difference", "low", "high"]], sign=True)
            sums = table[table.seed.isin(runs.seed)].groupby(["setting", "prompt"])[["steps", "accepted"]].sum()
            both = np.hstack([sums.loc[UPSTREAM], sums.loc[setting]])
            more = bootstrap(both, lambda c: 100 * (c[..., 3:] / c[..., 2:3] / (c[..., 1:2] / c[..., :1]) - 1))
            row[-1] = "{:+.0f} % [{:.0f}, {:.0f}]".format(*(x.item() for x in more))
        yield f"| {' | '.join(row)} |\n"


def main(opt):
    import pandas as pd

    sys.path.insert(0, str(HERE.parent))
    from upstream import upstream_python

    real, python = opt.real.resolve(), opt.upstream_python or upstream_python()
    opt.folder.mkdir(parents=True, exist_ok=True)
    answers = answers_of(real, opt.folder / "answers.pt")
    found, runs = [], {}
    for seed in range(opt.seeds):
        for setting in [name for name in SETTINGS if seed == 0 or name not in ONCE]:
            folder, steps = opt.folder.resolve() / re.sub(r"\W+", "-", f"{setting} {seed}"), opt.steps
            if setting == EQUAL_TIME:
                steps = round(steps * runs[UPSTREAM]["cpu_seconds"] / runs[OURS]["cpu_seconds"])
            run = runs[setting] = trained(setting, real, folder, steps, seed, python)
            print(f"{setting}, seed {seed}: {run['steps']} steps, {run['cpu_seconds']:.0f} CPU seconds", flush=True)
            about = dict(setting=setting, seed=seed, k=K, train_steps=run["steps"], cpu_seconds=run["cpu_seconds"])
            found.append(counts_of(folder, answers, real).assign(**about))
            table = pd.concat(found, ignore_index=True)
            table.to_csv(HERE / "results" / "upstream.csv.gz", index=False, compression=dict(method="gzip", mtime=0))
            sizes = dict(vocabulary=DRAFT_VOCAB, length=LENGTH, k=K, questions=QUESTIONS, new=NEW_TOKENS)
            page = ABOUT.format(**sizes, seeds=seed + 1) + "".join(rows_of_page(table))
            (HERE / "results" / "UPSTREAM.md").write_text(page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--real", type=Path, default="output/real", help="the folder that `make real` leaves")
    parser.add_argument("--folder", type=Path, default="output/upstream", help="of the runs")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--upstream-python", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    opt = parser.parse_args()
    if opt.worker is None:
        main(opt)
    else:
        given = opt.real, opt.folder, opt.steps, opt.seeds
        spent = train_upstream(*given) if opt.worker == UPSTREAM else train_ours(opt.worker, *given)
        record = dict(steps=opt.steps, cpu_seconds=round(spent, 1))
        (opt.folder / "run.json").write_text(json.dumps(record) + "\n")
