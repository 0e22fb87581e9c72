"""The preparation pipeline: deduplication, sample, tokenisation in processes, shuffle, validation split.
`prepare` runs it in memory."""

import io
import json
import logging
import multiprocessing
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, Json
from tqdm.auto import tqdm

from ..core.concurrency import end_with_parent
from ..core.files import DiskError
from ..core.options import check_options
from ..verifier.row_limits import Excess, RowLimits
from .chat_encoding import FEATURES, Rows, Trained, arrow_columns, encode_batch
from .chat_template import ChatTemplate
from .images import encode_images, has_pictures, resolve_images
from .row_filter import BATCH, Counts, batches, check_ids, in_data, made_of, read_rows, size_of
from .sources import SeenHashes, content_hash, conversation_count

log = logging.getLogger(__name__)


class Settings(NamedTuple):
    "The settings of `prepare_data` that decide which rows are made."

    max_length: int
    max_samples: int | None = None
    rows: str = "conversation"
    too_long: str = "cut"
    min_trained: int = 1
    dedup: bool = True
    shuffle: bool = True
    val_fraction: float = 0.05
    seed: int = 0
    template_kwargs: dict = {}
    train_reasoning: bool = True
    train_tool_calls: bool = True

    @property
    def trained(self) -> Trained:
        "What of the answers is trained."
        return Trained(self.train_reasoning, self.train_tool_calls)


class Encoder(NamedTuple):
    "What turns a conversation into rows."

    template: ChatTemplate
    settings: Settings
    vocab_size: int  # token ids are below it
    pictures: dict | None = None  # arguments of `resolve_images`; None: text only
    limits: RowLimits = RowLimits()  # of the verifier; rows beyond it are counted


def _encode(batch, encoder):
    "(where, Made) for each (where, conversation) of a batch."
    template, settings, vocab_size = encoder.template, encoder.settings, encoder.vocab_size
    first = settings.max_length + 1
    with_pictures = [_has_pictures(row, encoder) for _, row in batch]
    text = [row for (_, row), pictured in zip(batch, with_pictures) if not pictured]
    encoded = iter(
        encode_batch(text, template, rows=settings.rows, first=first, vocab_size=vocab_size, trained=settings.trained)
    )
    out = []
    for (where, row), pictured in zip(batch, with_pictures):
        rows = _encode_pictures(row, encoder) if pictured else next(encoded)
        out.append((where, made_of(row, rows, template.control, settings)))
    return out


def _has_pictures(row, encoder):
    return encoder.pictures is not None and encoder.template.multimodal and has_pictures(row)


def _encode_pictures(row, encoder):
    "The rows of a conversation with pictures, or the error."
    template, settings, pictures = encoder.template, encoder.settings, encoder.pictures
    tools = row["tools"]
    try:
        messages = resolve_images(row, **pictures)
        first = settings.max_length + 1
        rows = encode_images(messages, template, tools, rows=settings.rows, first=first, trained=settings.trained)
        for ids, *_ in rows:
            check_ids(ids, encoder.vocab_size)
        made = Rows((*made_row, tools) for made_row in rows)
        made.omitted = rows.omitted
        return made
    except DiskError:  # pictures that cannot be stored: not the conversation's fault
        raise
    except Exception as e:  # as in encode_batch
        return e


_STATE = {}  # what child processes inherit: neither a tokenizer nor a template is copied


def _start_child():
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def _encode_in_child(batch):
    return _encode(batch, _STATE["encoder"])


def _is_large(batch):
    return len(batch) == 1 and size_of(batch[0][1]) > BATCH


def _encode_all(stream, encoder, num_proc):
    """(where, Made) for each (where, conversation) of a stream, in order; in processes if there
    are enough of them."""
    stream = batches(stream)
    alone = num_proc == 1 or "fork" not in multiprocessing.get_all_start_methods()
    head = []
    for batch in stream:
        head.append(batch)
        if alone or _is_large(batch):
            for ready in head:
                yield from _encode(ready, encoder)
            head = []
        elif len(head) == 8:
            yield from _encode_in_processes(chain(head, stream), encoder, num_proc)
            return
    for ready in head:
        yield from _encode(ready, encoder)


def _encode_in_processes(stream, encoder, num_proc):
    "(where, Made) for each conversation of the batches, in order."
    _STATE["encoder"] = encoder
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(num_proc, context, _start_child) as pool:
            waiting = deque()
            for batch in stream:
                if _is_large(batch):
                    waiting.append(_encode(batch, encoder))
                else:
                    waiting.append(pool.submit(_encode_in_child, batch))
                if len(waiting) > 8:
                    yield from _result(waiting.popleft())
            while waiting:
                yield from _result(waiting.popleft())
    except BrokenProcessPool as e:
        raise ChildProcessError(
            "a process that tokenises died, most likely because memory ran out; pass a smaller num_proc, or num_proc=1"
        ) from e
    finally:
        _STATE.clear()


def _result(work):
    return work if isinstance(work, list) else work.result()


def _distinct(data, counts, encoder, limit):
    "(where, conversation) of what can be used, each once."
    seen = SeenHashes()
    for where, row in read_rows(data, encoder.vocab_size, limit):
        counts.n["read"] += 1
        if isinstance(row, Exception):
            counts.refuse(where, row)
            continue
        if encoder.settings.dedup and not seen.add(bytes.fromhex(content_hash(row))):
            counts.repeat(where)
            continue
        yield where, row


def _reservoir(stream, n, seed):
    "n items of a stream, each subset as likely as any other, in the order of the stream."
    rng = np.random.default_rng(seed)
    chosen = []
    for i, item in enumerate(stream):
        if i < n:
            chosen.append((i, item))
        elif (place := int(rng.integers(i + 1))) < n:
            chosen[place] = (i, item)
    chosen.sort(key=lambda pair: pair[0])
    return [item for _, item in chosen]


def _sampled(stream, counts, settings):
    "`max_samples` of a stream: a random sample, or the first."
    limit = settings.max_samples
    if limit is None:
        return stream
    if settings.shuffle:
        chosen = _reservoir(stream, limit, settings.seed)
    else:
        chosen = list(islice(stream, limit))
    passed = counts.n["duplicates"] + counts.n["without rows"] + len(chosen)
    counts.n["not chosen"] = counts.n["read"] - passed
    return chosen


SPOOLED = Features(FEATURES | {"messages": Json(), "tools": Json()})
SCHEMA = SPOOLED.arrow_schema


class RowSpool:
    "Rows that wait in a file, which can be written and read, by conversation in any order."

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.writer = pa.ipc.new_file(self.file, SCHEMA)
        self.counts = array("q")  # rows of each conversation
        self.lengths = array("q")  # tokens of each row
        self.nbytes, self.pictures, self.tools = 0, False, False  # rows with messages, tools

    def append(self, rows: list[tuple]) -> None:
        "Add the rows of a conversation; with pictures also its messages and tools. OSError: the disk is full."
        pictured = [row[2:] for row in rows if len(row) > 2]
        self.pictures |= bool(pictured)
        self.tools |= any(tools for _, tools in pictured)
        more = (row[2:] if len(row) > 2 else ([], None) for row in rows)
        encoded = [[Json().encode_example(value) for value in pair] for pair in more]
        texts = [pa.array(column, pa.json_()) for column in zip(*encoded)]
        columns = arrow_columns([row[:2] for row in rows])
        batch = pa.record_batch([*columns, *texts], schema=SCHEMA)
        self.writer.write_batch(batch)
        self.counts.append(len(rows))
        self.lengths.extend(len(ids) for ids, *_ in rows)
        self.nbytes += batch.nbytes

    @property
    def features(self) -> Features:  # of the table that is made of the rows
        "Messages and tools are columns where a row has some."
        names = [*FEATURES, *["messages"] * self.pictures]
        names += ["tools"] * (self.pictures and self.tools)
        return Features({name: SPOOLED[name] for name in names})

    def finish(self) -> None:
        "From here on rows are read. OSError: the disk is full."
        self.writer.close()
        self.file.flush()

    def tables(self, order: np.ndarray, most: int | None = None) -> Iterator[pa.Table]:
        """The rows of the conversations in this order, so many conversations at a time; None: a thousand, or as many as
        take 100 MB."""
        reader, names = pa.ipc.open_file(self.file), [*self.features]
        most = most or max(1, min(AT_ONCE, len(self.counts) * BYTES_AT_ONCE // self.nbytes))
        for start in range(0, len(order), most):
            batches = [reader.get_batch(int(i)).select(names) for i in order[start : start + most]]
            yield pa.Table.from_batches(batches).combine_chunks()


AT_ONCE, BYTES_AT_ONCE = 1000, 100_000_000  # of a table that is written


class Result(NamedTuple):
    "What became of a source."

    rows: RowSpool  # as they were made
    order: np.ndarray  # [conversations that have rows], those for training first
    split: dict[str, int]  # rows for "train" and "val"
    counts: Counts  # what was left out, and why
    beyond: list[Excess] = []  # rows that are longer than the verifier's context
    first_beyond: str = ""  # where the first of them is
    held_out: int = 0  # conversations for validation: the last of the order

    @property
    def lengths(self) -> np.ndarray:  # [rows] int64
        "Tokens of each row, in the order of the table."
        counts, lengths = map(np.asarray, (self.rows.counts, self.rows.lengths))
        firsts, n = (counts.cumsum() - counts)[self.order], counts[self.order]
        before = np.repeat(firsts - (n.cumsum() - n), n)
        return lengths[before + np.arange(len(before))]

    def questions(self) -> Iterator[dict]:
        """What the held-out conversations ask: a prompt, the token ids before the first answer;
        of one with pictures messages and tools."""
        order = self.order[len(self.order) - self.held_out :]
        for table in self.rows.tables(order, 1):
            row = table.slice(0, 1).to_pylist()[0]
            messages, tools = (json.loads(row.get(name) or "null") for name in ("messages", "tools"))
            prompt = row["input_ids"][: row["loss_mask"].index(True)]
            if messages:
                yield {"messages": messages, "tools": tools}
            elif prompt:
                yield {"prompt": prompt}

    def report(self) -> dict:
        "What `data_config.json` records: stages, tokens cut off, reasons, control tokens."
        n = self.counts.n
        names = {
            "duplicates": "duplicates",
            "not chosen": "not chosen",
            "without a row": "without rows",
            "tokenised in part": "read in part",
        }
        stages: list[dict] = [{"what": "read", "conversations": n["read"]}]
        stages += [{"what": k, "conversations": n[v]} for k, v in names.items() if n[v]]
        for stage in stages:
            if stage["what"] == "duplicates":
                stage["first"] = self.counts.duplicates
        if n["rows cut"]:
            stages.append({"what": "cut", "rows": n["rows cut"], "tokens": n["tokens cut"]})
        else:
            stages.append({"what": "kept", "conversations": len(self.order)})
        for excess in self.beyond:
            stages.append({"what": f"longer than {excess.words}", "rows": excess.rows})
        domains = self.counts.domains
        return ({"domains": domains} if domains else {}) | {
            "stages": stages,
            "tokens_cut": n["tokens cut"],
            "dropped": self.counts.dropped,
            "omitted": self.counts.omitted,
            "control_tokens": self.counts.control,
        }


def run_pipeline(
    data,  # a source, as `sources.located` takes it
    encoder: Encoder,  # how rows are made
    num_proc: int = 1,  # processes
    limit: int | None = None,  # stop after so many conversations
    file: IO[bytes] | None = None,  # in which the rows wait for their order; None: in memory
) -> Result:  # rows, their order, split, counts
    "Make rows of a source. ValueError: no row is left."
    settings = encoder.settings
    counts = Counts()
    stream = _sampled(_distinct(data, counts, encoder, limit), counts, settings)
    sampled = isinstance(stream, list)
    total = len(stream) if sampled else conversation_count(data, limit)
    bar = tqdm(total=total, desc="prepare", unit="conversation", leave=False, delay=1)
    spool, first_beyond = RowSpool(file or io.BytesIO()), ""
    for where, made in _encode_all(stream, encoder, num_proc):
        bar.update(1 if sampled else counts.n["read"] - bar.n)  # duplicates count as done
        counts.add(where, made)
        if made.rows:
            spool.append(made.rows)
        lengths = [len(ids) for ids, *_ in made.rows]
        if made.cut or made.partial:
            counts.n["rows cut"] += lengths.count(settings.max_length)
        if not first_beyond and any(map(encoder.limits.exceeded, lengths)):
            first_beyond = where
    bar.close()
    spool.finish()
    if not spool.counts:
        why = counts.why() or f"there were none{in_data(data)}"
        if "no assistant message" in why:
            why += "; `regenerate` lets the verifier answer questions"
        if f"in the first {settings.max_length}" in why:
            why += "; raise max_length"
        raise ValueError(f"no row left of {counts.n['read']} conversations ({why})")
    train, val = _split(len(spool.counts), settings)
    val_rows = sum(spool.counts[i] for i in val)
    split = {"train": len(spool.lengths) - val_rows, "val": val_rows}
    beyond = encoder.limits.count(spool.lengths)
    order = np.concatenate([train, val])
    return Result(spool, order, split, counts, beyond, first_beyond, len(val))


def _split(n, settings):
    "Indices of the conversations for training and for validation, shuffled."
    order = np.arange(n)
    if settings.shuffle:
        order = np.random.default_rng([settings.seed, 1]).permutation(n)
    held_out = 0
    if settings.val_fraction:
        held_out = min(max(1, round(n * settings.val_fraction)), n - 1)
    return order[: n - held_out], order[n - held_out :]


def prepare(
    conversations: str | Path | Iterable,  # as in `sources.located`; also input_ids, loss_mask
    tokenizer,  # a fast HF tokenizer with a chat template
    max_length: int,  # longer rows are cut
    rows: str = "conversation",  # "turn": a row per assistant turn, only that turn trained
    limit: int | None = None,  # stop after so many conversations
    vocab_size: int | None = None,  # the verifier's; None: as many as the tokenizer has
    **template_kwargs,  # for the chat template
) -> Dataset:  # input_ids, loss_mask, seq_len; `info.description` says what was dropped
    """Tokenise in memory. What cannot be used is dropped and counted; ValueError if no row is
    left."""
    check_options({"max_length": max_length, "rows": rows, "max_samples": limit})
    settings = Settings(max_length, rows=rows, dedup=False, shuffle=False, val_fraction=0.0)
    template = ChatTemplate(tokenizer, **template_kwargs)
    encoder = Encoder(template, settings, vocab_size or len(template.tokenizer))
    result = run_pipeline(conversations, encoder, limit=limit)
    counts = result.counts
    rows_in_order = pa.concat_tables(result.rows.tables(result.order))
    table = Dataset(rows_in_order, info=DatasetInfo(features=result.rows.features))
    masks = pc.call_function("list_flatten", [table.data.table["loss_mask"]])
    trained = pc.call_function("sum", [masks]).as_py()
    text = (
        f"{counts.n['read']} conversations, {len(table)} rows, {result.lengths.sum()} tokens, "
        f"{trained} trained; dropped: {counts.why() or 'nothing'}"
    )
    if counts.omitted:
        text += f"; left out of those that are kept: {counts.left_out()}"
    if counts.control:
        text += f"; {counts.spelled()}"
    table.info.description = text
    noted = counts.dropped or counts.omitted or counts.control
    log.log(logging.WARNING if noted else logging.INFO, text)
    return table
