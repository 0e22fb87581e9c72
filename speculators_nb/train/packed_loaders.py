"""Data loaders: samples are packed into rows of a fixed length (sequence packing).
Ranks take turns. An evaluation has the same rows every time, and a row's random choices depend on the row alone."""

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Subset
from transformers import Trainer

from ..data.packing import PackedBatchSampler, collate
from ..features.prefetch import follow_order, prefetched, tokens_of, without_states
from ..verifier.row_limits import RowLimits
from .training_arguments import SpeculatorTrainingArguments

log = logging.getLogger(__name__)


def lengths_of(dataset: Any) -> list[int]:
    """Tokens of each sample: the dataset's own `lengths`, those of the parent for a `Subset`; without them each sample
    is read once."""
    if isinstance(dataset, Subset):
        parent = lengths_of(dataset.dataset)
        return [parent[i] for i in dataset.indices]
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        return [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    return lengths


def row_seed(seed: int, epoch: int, row: int) -> int:
    "The seed, of 63 bits, of a packed row's random choices, by its index in the order of an epoch, from 0."
    digest = hashlib.sha256(f"{seed}/{epoch}/{row}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextlib.contextmanager
def kept_rng(device: torch.device, seed: int | None = None):
    """Restore torch's random state, of the CPU and of the device, at the end of the block; `seed` is of the draws in it
    (None: they continue)."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    cpu_state = torch.get_rng_state()
    device_state = module.get_rng_state() if module else None
    if seed is not None:
        torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if module:
            module.set_rng_state(device_state)


def collated(samples: list[dict], cut: Callable[[dict], dict] | None, **given: Any) -> dict[str, torch.Tensor]:
    "`collate`, and of the row what this rank has."
    row = collate(samples, **given)
    return cut(row) if cut else row


def _reference(dataset):
    "What gives a dataset as long as somebody else has it; a list, which knows no weak references, for good."
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: dataset


class PackedLoaders(Trainer):
    "transformers' Trainer that packs a dataset into rows of `total_seq_len`."

    if TYPE_CHECKING:  # as `Trainer.__init__` leaves them
        args: SpeculatorTrainingArguments
        train_dataset: Any
        eval_dataset: Any

    train_rows: PackedBatchSampler  # of the training, as its loader has them
    n_eval_rows = 0  # rows of the current evaluation set that count
    looked_at: tuple = ()  # evaluation sets so far, as of `_reference`
    shift: Any = None  # sample -> the sample as it is laid out in a row; None: as it is
    feature_dtype: torch.dtype | None = None  # of hidden states in a batch; None: as stored
    cut: Callable[[dict], dict] | None = None  # a row -> the part of this rank; None: all of it

    def rows(self, dataset) -> PackedBatchSampler:
        "Pack a dataset by its samples' lengths."
        if not len(dataset):
            raise ValueError("the dataset is empty: there is nothing to pack.")
        first = without_states(dataset, 0)
        dropped = len(first["input_ids"]) - len(self._laid_out(first)["input_ids"])
        lengths = [n - dropped for n in lengths_of(dataset)]
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        return PackedBatchSampler(lengths, args.total_seq_len, seed)

    def _laid_out(self, sample):
        return self.shift(sample) if self.shift else sample

    def warn_cut(self, dataset: Any, rows: PackedBatchSampler, name: str) -> None:
        """Log how many samples of a dataset, named and packed into rows, are cut to `total_seq_len`, and what is left
        of their loss."""
        longest = self.args.total_seq_len
        for excess in RowLimits(total_seq_len=longest).count(rows.lengths):
            cut = [i for i, n in enumerate(rows.lengths) if n > longest]
            masks = (self._laid_out(tokens_of(dataset, i))["loss_mask"] for i in cut)
            empty = sum(not mask[:longest].any() for mask in masks)
            kept = f"{empty} of them keep no trained token" if empty else "each keeps some loss"
            log.warning("%s: %s; %s. %s", name, excess.text(), kept, excess.remedy)

    def _row_of(self):
        "What makes a row of samples; a process that loads rows may be sent it."
        length = self.args.total_seq_len
        return partial(collated, cut=self.cut, total_seq_len=length, shift=self.shift, dtype=self.feature_dtype)

    def _loader(self, dataset, rows):
        args = self.args
        return DataLoader(
            dataset if args.dataloader_num_workers else prefetched(dataset),
            batch_sampler=rows,
            collate_fn=self._row_of(),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )

    def get_train_dataloader(self) -> DataLoader:
        "Packed rows, another shuffle in each epoch; with several ranks, each takes every n-th row."
        if self.train_dataset is None:
            raise ValueError("train_dataset=None: this trainer can only evaluate.")
        self.train_rows = self.rows(self.train_dataset)
        loader = self._loader(self.train_dataset, self.train_rows)
        self._check_loss(self.train_dataset, self.train_rows, "training", "learn from")
        if self.args.should_log:
            self.warn_cut(self.train_dataset, self.train_rows, "training")
        # rows come on the host: the trainer copies them to the device without waiting for it
        if self.args.context_parallel_size == 1:
            return follow_order(self.accelerator.prepare(loader, device_placement=[False]))
        args = self.args
        shared = prepare_data_loader(loader, args.device, args.data_ranks, args.data_rank, put_on_device=False)
        return follow_order(shared)

    def _check_loss(self, dataset: Any, rows: PackedBatchSampler, name: str, use: str) -> None:
        "ValueError where no position of the packed rows carries loss: all of it is cut away, or there was none."
        row_of = self._row_of()
        batches = (row_of([without_states(dataset, i) for i in row]) for row in rows)
        if any(batch["loss_mask"].any() for batch in batches):
            return
        n, longest = len(dataset), max(rows.lengths)
        masks = (self._laid_out(tokens_of(dataset, i))["loss_mask"] for i in range(n))
        if any(mask.any() for mask in masks):
            raise ValueError(
                f"total_seq_len={self.args.total_seq_len}: the rows have up to {longest} tokens, and all trained "
                f"tokens of the {n} {name} samples are beyond it, so there is nothing to {use}. Pass "
                f"total_seq_len={longest} (--total-seq-len)"
            )
        raise ValueError(
            f"no position of the {n} {name} samples has loss_mask=True, so there is nothing to {use}. Look at "
            "the chat template and at which turns were marked as the assistant's."
        )

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """The same packed rows at every evaluation; ranks take turns, and the last turn is
        filled up with rows that are not counted."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        name = "evaluation"
        if isinstance(dataset, str):
            name, dataset = f"evaluation ({dataset})", self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("eval_dataset=None: there is nothing to evaluate on.")
        packed = self.rows(dataset)
        if not any(dataset is other() for other in self.looked_at):  # once, and not at each evaluation
            self.looked_at += (_reference(dataset),)
            self._check_loss(dataset, packed, name, "evaluate")
            if self.args.should_log:
                self.warn_cut(dataset, packed, name)
        rows = list(packed)
        self.n_eval_rows = len(rows)
        ranks = self.args.data_ranks
        turns = -(-len(rows) // ranks)
        taken = range(self.args.data_rank, turns * ranks, ranks)
        return follow_order(self._loader(dataset, [rows[i % len(rows)] for i in taken]))

    def place_of(self, step: int) -> tuple[int, int]:
        "The epoch of the step after some optimizer steps, and the first row that it takes there."
        in_step = self.args.gradient_accumulation_steps * self.args.data_ranks
        epoch, step = divmod(step, -(-len(self.train_rows) // in_step))
        return epoch, step * in_step

    def epoch_after(self, step: int) -> float:
        "Epochs after one or more optimizer steps, by rows: the same on any number of ranks."
        epoch, row = self.place_of(step - 1)
        row += self.args.gradient_accumulation_steps * self.args.data_ranks
        return epoch + min(1, row / len(self.train_rows))
