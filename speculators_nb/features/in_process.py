"""Extraction of hidden states with a verifier (target model) in this process.
They go to a folder, resumed after any interruption, or live into training."""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset

from ..core.files import DiskError
from ..core.options import check_options
from ..data.images import RowInputs
from .feature_folder import FeatureFolder, disk_error, origin, split_of, table_of
from .feature_rows import FP8, FeatureError, FeatureRow, FeatureRows, stored_dtype
from ..jobs.shared_output import share_writer
from ..verifier.identity import check_verifier_head, checkpoint_fingerprint, fingerprint
from ..verifier.row_limits import RowLimits
from ..verifier.tapped_model import Verifier, computing


def token_batches(lengths, indices, max_tokens: int) -> list[list[int]]:
    """Group rows of similar length into batches of a bounded padded size: rows × longest row is at most `max_tokens` (a
    longer row runs alone). The longest batch comes first, so that lack of memory shows at once."""
    batches = []
    for i in sorted(indices, key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


log = logging.getLogger(__name__)


def _forward(verifier, ids, dtype, mask=None, inputs=None):
    "States of rows [B, L] on the CPU, [B, L, A+1, H]: auxiliary layers, then the last."
    mask = None if mask is None else mask.long().to(verifier.device)
    out = verifier(ids.to(verifier.device), mask, want_logits=False, use_cache=False, inputs=inputs)
    states = torch.cat([out.hidden_states.to(dtype), out.last_hidden_states.to(dtype)], -1)
    return states.unflatten(-1, (-1, verifier.hidden_size)).cpu()


def states_of(
    verifier: Verifier,  # the tapped model
    rows: list,  # token ids of each row
    dtype: torch.dtype = torch.bfloat16,  # of the result
    inputs: list[dict] | None = None,  # per row, picture inputs (`images.RowInputs`); {}: none
) -> list[torch.Tensor]:  # [seq, A+1, H] per row, on the CPU
    """One forward pass over right-padded rows, without the head; a row with pictures has a
    forward pass of its own, and so has one whose length decides how it is rotated. Errors:
    ValueError for a row beyond learned positions."""
    tokens = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    inputs = inputs or [{}] * len(rows)
    text, states = [i for i, x in enumerate(inputs) if not x and len(tokens[i]) <= verifier.border], {}
    try:
        if text:
            ids = torch.nn.utils.rnn.pad_sequence([tokens[i] for i in text], batch_first=True)
            lengths = torch.tensor([len(tokens[i]) for i in text])
            padded = _forward(verifier, ids, dtype, torch.arange(ids.shape[1]) < lengths[:, None])
            states = {i: s[: len(tokens[i])] for i, s in zip(text, padded)}
        for i in range(len(rows)):
            if i not in states:
                given = {
                    k: v.to(verifier.device, verifier.dtype if v.is_floating_point() else None)
                    for k, v in inputs[i].items()
                }
                states[i] = _forward(verifier, tokens[i][None], dtype, inputs=given)[0]
    except (IndexError, RuntimeError) as e:  # a lookup beyond the verifier's learned positions
        longest, limits = max(map(len, rows)), RowLimits.of(verifier.model.config)
        if not limits.exceeded(longest):
            raise
        raise ValueError(
            f"a row of {longest} tokens: {type(verifier.model).__name__} has positions for "
            f"{limits.context}; prepare with max_length={limits.context} (--max-length)"
        ) from e
    return [states[i] for i in range(len(rows))]


def model_of(verifier: Verifier) -> dict[str, Any]:
    'Name, sizes and fingerprints of a verifier, the "model" part of data_config.json.'
    path: Any = verifier.model.name_or_path
    model = {
        "target_model_path": path,
        "architecture": type(verifier.model).__name__,
        "hidden_size": verifier.hidden_size,
        "num_hidden_layers": verifier.num_layers,
        "fingerprint": fingerprint(verifier.model),
    }
    if (Path(path) / "config.json").is_file():
        model["checkpoint"] = checkpoint_fingerprint(path)
    return model


def check_tokens(dataset: Dataset, vocab_size: int) -> None:
    "Errors: ValueError naming the first row of a table with a token id outside of the verifier's vocabulary."
    column: Any = dataset.with_format("arrow")["input_ids"]
    ends = [pc.call_function("min_max", [x.flatten()]).as_py() for x in column.chunks]
    if all(e["min"] is None or 0 <= e["min"] <= e["max"] < vocab_size for e in ends):
        return
    for i, row in enumerate(dataset.with_format(None)["input_ids"]):
        outside = [t for t in row if not 0 <= t < vocab_size]
        if outside:
            raise ValueError(
                f"row {i} has token id {outside[0]}, the verifier has {vocab_size}: "
                "prepare the rows with this verifier's tokenizer"
            )


def _write_missing(folder, batches, compute, writers):
    """Compute the batches that have missing rows, and write these in threads; at most one batch
    waits in memory."""
    todo, pending = set(folder.todo), []
    with folder, ThreadPoolExecutor(writers) as pool, folder.progress() as bar:
        try:
            for batch in (b for b in batches if todo.intersection(b)):
                states = compute(batch)
                for future in pending:
                    future.result()
                rows = [(i, s) for i, s in zip(batch, states) if i in todo]
                pending = [pool.submit(folder.write, i, s) for i, s in rows]
                bar.update(sum(folder.lengths[i] for i, _ in rows))
            for future in pending:
                future.result()
        except DiskError:
            pool.shutdown(cancel_futures=True)
            raise


def extract_features(
    verifier: Verifier,  # the tapped model
    dataset: Dataset | str | Path,  # from `prepare` (input_ids, loss_mask, seq_len), or folder
    out_dir: str | Path,  # gets data_config.json, rows/ (the dataset), files or shards
    dtype: torch.dtype | str = torch.bfloat16,  # stored states; "float8_e4m3fn": half the disk
    max_tokens: int = 8192,  # padded tokens in one forward pass
    indices: Iterable[int] | None = None,  # rows to make, in batches of their own; None: all
    writers: int = 4,  # threads that write
    processor=None,  # of a vision verifier, for rows with pictures; None: from its folder
    rank: int = 0,  # of this process, which makes every `world_size`-th batch
    world_size: int = 1,  # processes that share the batches
    shard_gb: float | None = None,  # GB of a file of many rows; None: a file for each row
    compute_dtype: torch.dtype | None = None,  # of products; None: the verifier's
) -> dict[str, int]:  # counts of this share: written, kept
    """Write the features of rows that have no valid file. ValueError: another origin;
    FeatureError: not finite; DiskError: the rest is kept; BlockingIOError: another process
    makes this share."""
    check_options(dict(max_tokens=max_tokens, rank=rank, world_size=world_size, shard_gb=shard_gb))
    dtype, dataset = stored_dtype(dtype), table_of(dataset)
    out_dir = Path(out_dir).expanduser()  # as `datasets` where it writes the table
    check_tokens(dataset, verifier.vocab_size)
    layer_ids = [*verifier.aux_layer_ids, verifier.num_layers]
    config = origin(model_of(verifier), layer_ids, dataset, dtype)
    lengths = [int(n) for n in dataset["seq_len"][:]]
    chosen = sorted(set(range(len(lengths)) if indices is None else indices))
    batches = token_batches(lengths, chosen, max_tokens)[rank::world_size]
    rows = sorted(i for batch in batches for i in batch)
    RowLimits.of(verifier.model.config).warn(log, "features", lengths)
    name = verifier.model.name_or_path
    inputs_of = RowInputs(dataset, processor or name)
    computed = verifier.dtype if dtype is FP8 else dtype

    def compute(batch):
        tokens = [folder.tokens[i] for i in batch]
        with computing(verifier, compute_dtype):
            return states_of(verifier, tokens, computed, [inputs_of(i) for i in batch])

    with share_writer(out_dir, out_dir / ".writer", rank, world_size):
        folder = FeatureFolder(out_dir, dataset, config, rows, world_size == 1, shard_gb)
        written = len(folder.todo)
        if folder.todo:
            check_verifier_head(verifier, torch.as_tensor(folder.tokens[folder.todo[0]]))
        try:
            _write_missing(folder, batches, compute, writers)
            return {"written": written, "kept": len(rows) - written}
        except FeatureError as e:  # only here is the verifier known
            remedy = f"look for damaged weights in {name}, or store another dtype"
            raise FeatureError(e.path, e.reason, remedy) from e
        except DiskError as e:
            raise disk_error(folder, e, verifier.hidden_size) from e


class LiveFeatures(FeatureRows):
    """Samples without a disk: the verifier runs when samples are read (keep the loader's
    workers at 0)."""

    def __init__(
        self,
        verifier: Verifier,  # the tapped model
        rows: Dataset,  # from `prepare`
        dtype: torch.dtype = torch.bfloat16,  # of the features
        max_tokens: int = 8192,  # padded tokens in one forward pass
        processor=None,  # of a vision verifier, for rows with pictures; None: from its folder
        **kwargs,  # layers (for `hidden_states`), on_bad ("raise" or "skip")
    ):
        self.inputs = RowInputs(rows, processor or verifier.model.name_or_path)
        self.verifier = verifier
        self.rows = rows.with_format("torch")
        self.dtype = dtype
        self.max_tokens = max_tokens
        layer_ids = [*verifier.aux_layer_ids, verifier.num_layers]
        super().__init__([int(n) for n in self.rows["seq_len"][:]], layer_ids, **kwargs)
        self.shape = (len(layer_ids), verifier.hidden_size)
        self.split = split_of(rows).get("split")
        self.made_by = model_of(verifier)
        check_tokens(self.rows, verifier.vocab_size)
        if len(self):
            check_verifier_head(verifier, self.tokens(0)[0])

    def read(self, i: int) -> FeatureRow:
        return self._read([i])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        indices, samples = [range(len(self))[i] for i in indices], {}
        for batch in token_batches(self.lengths, set(indices), self.max_tokens):
            for i, row in zip(batch, self._read(batch)):
                samples[i] = self.sample(i, row)
        return [samples[i] for i in indices]

    def _read(self, indices):
        rows = [self.rows[i] for i in indices]
        tokens, inputs = [row["input_ids"] for row in rows], [self.inputs(i) for i in indices]
        states = states_of(self.verifier, tokens, self.dtype, inputs)
        return [FeatureRow(row["input_ids"].long(), row["loss_mask"].bool(), s) for row, s in zip(rows, states)]
