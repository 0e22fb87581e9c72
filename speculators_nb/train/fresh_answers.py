"""Periodic on-policy training: every few epochs the verifier answers the training prompts again.
The drafter in training drafts, so that answering takes fewer forward passes; the text keeps the verifier's
distribution."""

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset
from transformers import TrainerCallback

from ..core.checkpoints import current_hub_access
from ..core.files import write_text
from ..data.chat_encoding import to_dataset
from ..data.chat_template import open_tokenizer
from ..decode.generate import generate
from ..decode.tree import Drafter, Sampling
from ..features.in_process import LiveFeatures
from ..features.prefetch import source_of
from ..jobs.shared_output import append_lines
from ..regenerate.in_process import AnswersBar, eos_ids_of
from ..verifier.row_limits import RowLimits
from ..verifier.tapped_model import Verifier
from .packed_loaders import row_seed

log = logging.getLogger(__name__)


def parts_of(row: dict) -> list[list[int]]:  # an odd number; the first and the last may be empty
    "The tokens of a row: before the first answer, the first answer, …, the last answer, behind it."
    edges = np.flatnonzero(np.diff(np.asarray(row["loss_mask"], dtype=int), prepend=0, append=0))
    return [part.tolist() for part in np.split(np.asarray(row["input_ids"]), edges)]


def answer_again(verifier: Verifier, drafter: Drafter, rows: list[dict], **options: Any) -> list[dict]:
    """Rows (input_ids, loss_mask) with fresh answers, turn by turn, each behind the fresh answers before it, and the
    verifier's forward_passes; it taps what the drafter reads, and `options` are of `generate`. A row ends where an
    answer was cut or the context is full; one that begins with an answer stays as it is."""
    between = [parts_of(row)[::2] for row in rows]
    answered = [i for i, parts in enumerate(between) if parts[0]]
    fresh: list[dict[str, Any]] = [
        dict(input_ids=[], loss_mask=[], forward_passes=0)
        if parts[0]
        else dict(input_ids=[*row["input_ids"]], loss_mask=[*map(int, row["loss_mask"])], forward_passes=0)
        for row, parts in zip(rows, between)
    ]
    limits, turn = RowLimits.of(verifier.config), 0
    while answered:
        for i in answered:
            _extend(fresh[i], between[i][turn], 0)
        turn += 1
        asks = [i for i in answered if turn < len(between[i]) and not limits.exceeded(len(fresh[i]["input_ids"]) + 1)]
        prompts = [list(fresh[i]["input_ids"]) for i in asks]
        answers: Any = generate(verifier, drafter, prompts, **options) if asks else []
        for i, answer in zip(asks, answers):
            _extend(fresh[i], answer.tokens, 1)
            fresh[i]["forward_passes"] += 1 + len(answer.steps)
        answered = [i for i, answer in zip(asks, answers) if answer.finish_reason == "stop"]
    return fresh


def _extend(row, tokens, trained):
    row["input_ids"] += tokens
    row["loss_mask"] += [trained] * len(tokens)


BATCH = 16  # rows answered together; a resumed run has the same batches, and so the same answers
FOLDER = "fresh_answers"  # in the output folder of a run


class FreshAnswers(TrainerCallback):
    """Before every `regenerate_every`-th epoch but the first: answer the training rows of `LiveFeatures`, perhaps a
    `Subset` of it, again. An epoch keeps its number of steps. Errors: ValueError where the verifier cannot answer
    beside the training."""

    def __init__(self, dataset: Any, args: Any):
        self.every, self.source = args.regenerate_every, source_of(dataset)
        name = f"regenerate_every={self.every}"
        if args.world_size > 1:
            raise ValueError(
                f"{name}: one process writes the answers, and there are {args.world_size} ranks; train on one, or "
                "answer with `speculators-nb regenerate` on all of them before"
            )
        if not isinstance(self.source, LiveFeatures):
            raise ValueError(
                f"{name}: the verifier must run in this process, on prepared rows; as data_dir name the folder of "
                "`prepare` (of a feature folder: its rows/) and no server, or leave regenerate_every out"
            )
        if "messages" in self.source.rows.column_names:
            raise ValueError(f"{name}: the rows hold pictures, which are not answered here; leave it out")
        self.indices = list(dataset.indices) if isinstance(dataset, Subset) else range(len(dataset))
        self.given, self.since = self.source.rows.with_format(None), 0

    def on_train_begin(self, args, state, control, **kwargs):
        if state.num_train_epochs <= self.every:
            raise ValueError(
                f"regenerate_every={self.every}: the run has {state.num_train_epochs} epochs, so that nothing would be "
                "answered again; lower it, or raise num_train_epochs"
            )
        if not state.global_step:
            shutil.rmtree(Path(str(args.output_dir)) / FOLDER, ignore_errors=True)  # of a run before this one

    def on_epoch_begin(self, args, state, control, model: Any = None, train_dataloader: Any = None, **kwargs):
        since = int(state.epoch or 0) // self.every * self.every  # epochs before these answers
        if since == self.since:
            return
        self.since, sampler = since, train_dataloader.batch_sampler
        dropped = self.source.lengths[self.indices[0]] - sampler.lengths[0]  # by the model's shift
        ids, masks = self.given["input_ids"][:], self.given["loss_mask"][:]
        rows = [dict(input_ids=ids[i], loss_mask=masks[i]) for i in self.indices]
        for i, row in zip(self.indices, self._answered(rows, args, model)):
            ids[i], masks[i] = row["input_ids"], row["loss_mask"]
        self.source.rows = to_dataset(list(zip(ids, masks))).with_format("torch")
        self.source.lengths = [len(row) for row in ids]
        sampler.lengths = [self.source.lengths[i] - dropped for i in self.indices]

    def _answered(self, rows, args, model):
        "The rows with fresh answers; those that an interrupted run has finished are read."
        file = Path(args.output_dir) / FOLDER / f"epoch-{self.since + 1}.jsonl"
        fresh, began = _finished(file, len(rows)), time.monotonic()
        drafter = model.eval().drafter()
        verifier = Verifier(self.source.verifier.model.to(model.device), drafter.aux_layer_ids or None)
        name = str(verifier.model.name_or_path)
        tokenizer = open_tokenizer(name, current_hub_access().remote_code)
        options: dict[str, Any] = dict(
            max_new_tokens=max(len(answer) for row in rows for answer in parts_of(row)[1::2]),
            eos_token_ids=eos_ids_of(verifier, tokenizer),
        )
        desc = f"answers for epoch {self.since + 1}"
        with AnswersBar(total=len(rows), desc=desc, disable=args.disable_tqdm) as bar:

            def length(steps):  # is called before each draft, so that the bar moves during long answers
                bar.answered(len(steps[-1].tokens) if steps else 1)
                return getattr(drafter, "trained_tokens", None) or 3

            while len(fresh) < len(rows):
                seed = row_seed(args.seed, -self.since, len(fresh))  # no packed row has it
                sampling = Sampling(args.regenerate_temperature, torch.Generator(verifier.device).manual_seed(seed))
                batch = rows[len(fresh) : len(fresh) + BATCH]
                new = answer_again(verifier, drafter, batch, k=length, sampling=sampling, **options)
                append_lines(file, "".join(json.dumps(row) + "\n" for row in new).encode())
                fresh += new
                bar.settled(len(fresh))
        tokens, passes = sum(sum(r["loss_mask"]) for r in fresh), sum(r["forward_passes"] for r in fresh)
        speed = f"{tokens / max(1, passes):.2f} a forward pass of the verifier, {time.monotonic() - began:.0f} s"
        log.info("%s: %d rows, %d tokens in answers, %s", file, len(fresh), tokens, speed)
        return fresh


def _finished(file, n):
    "The rows of whole batches that are in a file, which holds nothing else afterwards."
    lines = file.read_text().splitlines(True) if file.is_file() else []
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < n:
        del whole[len(whole) // BATCH * BATCH :]
        write_text(file, "".join(whole))
    return [json.loads(line) for line in whole]
