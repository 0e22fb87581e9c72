"""One rank of a training run of tests: every drafter of the matrix, tiny, one after the other in one launch. Random
choices are on (noise, fewer anchors than positions, conditional drop), and no count of rows is a multiple of four."""

import os
import random
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from matrix import DRAFTERS, H, V, drafter, verifier
from transformers import TrainerCallback

from speculators_nb.train import optimizers
from speculators_nb.train.trainer import train

NAMES = (
    "eagle",
    "eagle3",
    "peagle",
    "dflash",
    "dspark rnn",
    "dflash2",
    "xpress",
    "domino",
    "lilicorr",
    "query_only",
    "mtp",
    "mlp",
    "medusa",
)
RANDOM = {
    "eagle": dict(noise_std=0.2),
    "peagle": dict(down_sample_ratio=0.6, max_anchors=5),
    **{name: dict(max_anchors=3) for name in ("dflash", "dspark rnn", "dflash2", "xpress", "domino", "lilicorr")},
}
ROWS_IN_STEP = 4
STEPS = int(os.environ.get("RANKS_STEPS", "4"))  # in two epochs, whose last steps lack a row
SAVE = STEPS // 2
ROWS = 2 * STEPS - 1


def samples(model, n, seed):
    "Random samples with the features that a drafter reads."
    g = torch.Generator().manual_seed(seed)
    layers, out = len(model.drafter().aux_layer_ids), []
    for i in range(n):
        length = int(torch.randint(19, 25, (), generator=g))  # two in a row
        out.append(
            dict(
                input_ids=torch.randint(V - 1, (length,), generator=g),
                loss_mask=torch.rand(length, generator=g) < 0.4 + 0.2 * (i % 3),
                hidden_states=torch.randn(length, layers * H, generator=g),
                verifier_last_hidden_states=torch.randn(length, H, generator=g),
            )
        )
    return out


class At(TrainerCallback):
    "Calls a function at the end of a step."

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def train_one(folder, name, world_size, optimizer="adamw", callbacks=None, **more):
    "Train a drafter of the matrix; (the trainer, its rows in an epoch)."
    torch.manual_seed(0)
    family = "qwen3" if name == "mtp" else "llama"
    verifier(family)
    model = drafter(name, family)
    given = dict(
        total_seq_len=48,
        gradient_accumulation_steps=ROWS_IN_STEP // world_size,
        learning_rate=1e-3,
        optimizer=optimizer,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=SAVE,
        save_steps=SAVE,
        lr_scheduler_type="cosine",
        seed=3,
        disable_tqdm=True,
    )
    torch.manual_seed(1000 + int(os.environ.get("RANK", "0")))  # the process's own state decides nothing
    place = str(Path(folder) / name.replace(" ", "-"))
    model_arguments = DRAFTERS[name][2] | RANDOM.get(name, {})
    data = samples(model, 2 * ROWS, 1), samples(model, 5, 2)
    trainer = train(model, *data, callbacks=callbacks, output_dir=place, **model_arguments, **given | more)
    assert (len(trainer.train_rows), trainer.n_eval_rows) in ((ROWS, 3), (ROWS, 0))
    return trainer


def fail(how):
    "The function that ends a rank: `kill`, or the name of an exception."
    if how == "kill":
        return lambda: os.kill(os.getpid(), signal.SIGKILL)

    def give_up():
        raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[how](f"{how} of this rank, at step 4")

    return give_up


def main(folder, names="", how="", rank="", step="", resume="", accumulation=""):
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    more = {"resume_from_checkpoint": True} if resume else {}
    if accumulation:
        more["gradient_accumulation_steps"] = int(accumulation)
    ends = [At(int(step), fail(how))] if how and os.environ.get("RANK", "0") == rank else []
    # in bfloat16 two ways to add the same gradients up alone move a weight by 8e-4
    optimizers.product_dtype = lambda device: torch.float32
    torch.use_deterministic_algorithms(True)
    random.seed(0)
    for family in ("llama", "qwen3"):
        verifier(family)  # before the ranks meet: from then on transformers saves on the first rank alone
    for name in names.split(",") if names else NAMES:
        train_one(folder, name, world_size, callbacks=ends, **more)
        if not how and not resume and not accumulation and name == "dspark rnn":
            train_one(Path(folder) / "muon", name, world_size, "muon", eval_strategy="no", save_strategy="no",
                      load_best_model_at_end=False, gradient_checkpointing=True)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
