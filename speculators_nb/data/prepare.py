"""From conversations to a training set, with a report of everything that was left out.
Read, each once, sampled, tokenised in processes, limited, shuffled, split, written: every conversation becomes rows, or
is counted with the file and line of the first such case. `prepare` works in memory."""

import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import shutil
import sqlite3
import tempfile
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetInfo, Features, Json
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from tqdm.auto import tqdm

from ..core.concurrency import end_with_parent
from ..core.files import DiskError, atomic_folder, disk_errors, file_digest
from ..core.options import check_options
from ..core.provenance import provenance
from .chat_encoding import FEATURES, add_trained, arrow_columns, encode_batch, read_conversation
from .chat_template import ChatTemplate, Trained, fingerprint_template, load_processor, texts_in
from .images import changed_picture, encode_images, resolve_images
from .messages import REASONS, BadRow, brief, content_hash, reason_of
from .prepared_folder import Prepared, changes
from .sources import HELD_OUT, Located, conversation_count, files_of, load_table, located
from ..nn.target_head import verifier_config
from ..verifier.folders import origin_of
from ..verifier.row_limits import Excess, RowLimits

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


class Encoder(NamedTuple):
    "What turns a conversation into rows."

    template: ChatTemplate
    settings: Settings
    vocab_size: int  # token ids are below it
    pictures: dict | None = None  # arguments of `resolve_images`; None: text only
    limits: RowLimits = RowLimits()  # of the verifier; rows beyond it are counted


class Made(NamedTuple):
    "What became of one conversation."

    domain: str | None  # that it names
    rows: list[tuple] = []  # that stay
    dropped: list[str] = []  # why others do not
    cut: int = 0  # tokens that were cut off
    partial: bool = False  # whether only a beginning was tokenised
    error: BadRow | None = None  # why there is no row at all
    control: dict[str, int] = {}  # control token -> first message that spells it
    omitted: dict[str, int] = {}  # what is in no row, or not trained -> first such message
    primary_id: str | None = None  # of the conversation that it is a part of, if it is


def _distinct(data, counts, encoder, limit):
    "(where, conversation) of what can be used, each once."
    # a temporary database, which is moved to the disk as it grows: in Python's own set a hash takes 110 bytes of memory
    seen = sqlite3.connect("", isolation_level=None)
    seen.execute("PRAGMA journal_mode = OFF")
    seen.execute("CREATE TABLE seen (hash BLOB PRIMARY KEY) WITHOUT ROWID")
    for where, row in islice(located(data), limit):
        counts.n["read"] += 1
        try:
            conversation = read_conversation(row, encoder.vocab_size)
        except Exception as e:  # also RecursionError
            counts.refuse(where, e)
            continue
        if encoder.settings.dedup:
            key = bytes.fromhex(content_hash(conversation))
            if not seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount:
                counts.repeat(where)
                continue
        yield where, conversation


def _sampled(stream, counts, settings):
    "`max_samples` of a stream: a random sample, each subset as likely as any other, or the first; in their order."
    most = settings.max_samples
    if most is None:
        return stream
    chosen = [*enumerate(islice(stream, most))]
    if settings.shuffle:
        rng = np.random.default_rng(settings.seed)
        for i, item in enumerate(stream, most):
            if (place := int(rng.integers(i + 1))) < most:
                chosen[place] = (i, item)
    passed = counts.n["duplicates"] + counts.n["without rows"] + len(chosen)
    counts.n["not chosen"] = counts.n["read"] - passed
    return [item for _, item in sorted(chosen, key=lambda pair: pair[0])]


BATCH = 1 << 20  # characters of the conversations that are tokenised together


def _size(conversation):
    "How large a conversation is: characters, or what takes as much memory."
    ids, messages = conversation.input_ids, conversation.messages
    return 8 * len(ids) if ids is not None else sum(map(len, texts_in(messages)))


def _batches(stream):
    "(where, conversation) in batches of a bounded size: 64, or as many as fit in `BATCH` characters; at least one."
    batch, size = [], 0
    for where, conversation in stream:
        more = _size(conversation)
        if batch and (len(batch) == 64 or size + more > BATCH):
            yield batch
            batch, size = [], 0
        batch.append((where, conversation))
        size += more
    if batch:
        yield batch


def _encode(batch, encoder):
    "(where, Made) for each (where, conversation) of a batch."
    template, settings, vocab_size, pictures, _ = encoder
    first, trained = settings.max_length + 1, Trained(settings.train_reasoning, settings.train_tool_calls)
    pictured = [pictures is not None and template.multimodal and bool(c.pictured) for _, c in batch]
    text = [conversation for (_, conversation), has in zip(batch, pictured) if not has]
    encoded = iter(encode_batch(text, template, settings.rows, first, vocab_size, trained))
    out = []
    for (where, conversation), has in zip(batch, pictured):
        try:
            if has:
                messages, tools = resolve_images(conversation, **pictures or {}), conversation.tools
                rows: Any = encode_images(messages, template, tools, settings.rows, first, vocab_size, trained)
            else:
                rows = next(encoded)
        except DiskError:  # pictures that cannot be stored: not the conversation's fault
            raise
        except Exception as e:  # as in encode_batch
            rows = e
        out.append((where, _made(conversation, rows, template, settings)))
    return out


def _made(conversation, encoded, template, settings) -> Made:
    "The rows of one conversation, from `encode_batch`, within the limits of the settings."
    domain, most = conversation.domain, settings.max_length
    if isinstance(encoded, Exception):  # of a template or tokenizer; not all can be pickled
        error = encoded if isinstance(encoded, BadRow) else BadRow(reason_of(encoded))
        return Made(domain, error=error)
    rows, dropped, cut = [], [], 0
    for ids, mask, *messages in encoded:
        trained = int(np.count_nonzero(mask[:most]))
        if len(ids) > most and (settings.too_long == "drop" or messages):
            dropped.append(f"longer than {most} tokens")
        elif trained < settings.min_trained:
            few = f"fewer than {settings.min_trained} trained tokens" if trained else "no trained token"
            dropped.append(f"{few} in the first {most}")
        else:
            cut += max(len(ids) - most, 0)
            rows.append((ids[:most], mask[:most], *messages))
    return Made(
        domain,
        rows,
        dropped,
        0 if encoded.partial else cut,
        encoded.partial,
        control=template.control.spelled(conversation.messages, conversation.tools),
        omitted=encoded.omitted if rows else {},
        primary_id=conversation.primary_id,
    )


_encoder: Encoder  # of a child process, which inherits it: neither a tokenizer nor a template is copied


def _start_child(encoder):
    global _encoder
    _encoder = encoder
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    torch.set_num_threads(1)  # threads of the parent are not here: a processor of pictures would wait for them


def _encode_in_child(batch):
    return _encode(batch, _encoder)


def _encode_all(stream, encoder, num_proc):
    """(where, Made) for each (where, conversation) of a stream, in order; in processes if there
    are enough of them."""
    stream = _batches(stream)
    if num_proc > 1 and "fork" in multiprocessing.get_all_start_methods():
        first = [*islice(stream, 8)]
        stream = chain(first, stream)
        if len(first) == 8:
            yield from _encode_in_processes(stream, encoder, num_proc)
            return
    for batch in stream:
        yield from _encode(batch, encoder)


def _encode_in_processes(stream, encoder, num_proc):
    "(where, Made) for each conversation of the batches, in order; one that is a batch by itself is encoded here."
    waiting, fork = deque(), multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(num_proc, fork, _start_child, (encoder,)) as pool:
            for batch in stream:
                large = len(batch) == 1 and _size(batch[0][1]) > BATCH
                waiting.append(_encode(batch, encoder) if large else pool.submit(_encode_in_child, batch))
                if len(waiting) > 8:
                    yield from _result(waiting.popleft())
            while waiting:
                yield from _result(waiting.popleft())
    except BrokenProcessPool as e:
        raise ChildProcessError(
            "a process that tokenises died, most likely because memory ran out; pass a smaller num_proc, or num_proc=1"
        ) from e


def _result(work):
    return work if isinstance(work, list) else work.result()


NAMED = 5  # duplicates, by their places
TABLES = {  # of the report: the first field of a line, and the one by which they are ordered
    "dropped": ("reason", "count"),
    "omitted": ("what", "conversations"),
    "control_tokens": ("token", "conversations"),
    "domains": ("domain", "tokens"),
}


@dataclass
class Counts:
    "What became of conversations: numbers, reasons, and the place of the first case of each."

    n: Counter[str] = field(default_factory=Counter)
    duplicates: list[str] = field(default_factory=list)  # where the first of them are
    _lines: dict[str, dict[str, dict]] = field(default_factory=lambda: defaultdict(dict))  # table -> by first field

    def _line(self, table, case, **fields):
        "The line of a case, made of these fields if there is none; cases beyond `REASONS` have one in common."
        lines, (name, _) = self._lines[table], TABLES[table]
        if case not in lines and len(lines) >= REASONS:
            case = f"other {name}s"
        return lines.setdefault(case, {name: case, **fields})

    def lines(self, table: str) -> list[dict]:
        "The lines of one of `TABLES`, the largest first."
        _, name = TABLES[table]
        return sorted(self._lines[table].values(), key=lambda line: -line[name])

    def repeat(self, where: str) -> None:
        "Count a conversation with the same messages as one before it, by its file and line."
        self.n["duplicates"] += 1
        if len(self.duplicates) < NAMED:
            self.duplicates.append(where)

    def refuse(self, where: str, error: Exception) -> None:
        "Count a conversation that cannot be used, by its file and line."
        at = ": ".join(filter(None, (getattr(error, "at", ""), getattr(error, "detail", ""))))
        at = (at.splitlines() or [""])[0][:120]
        first = f"{where}, {at}" if at else where
        self._line("dropped", reason_of(error), count=0, unit="conversations", first=first)["count"] += 1
        self.n["without rows"] += 1

    def add(self, where: str, made: Made) -> None:
        "Count what became of a conversation, by its file and line."
        numbers = {
            "conversations": 1,
            "without rows": int(not made.rows),
            "rows": len(made.rows),
            "tokens": sum(len(row[0]) for row in made.rows),
            "trained": sum(int(np.count_nonzero(row[1])) for row in made.rows),
        }
        domain = self._line("domains", made.domain or "unnamed", **dict.fromkeys(numbers, 0))
        for name, n in numbers.items():
            domain[name] += n
        if made.error is not None:
            self.refuse(where, made.error)
            return
        for reason in made.dropped:
            self._line("dropped", reason, count=0, unit="rows", first=where)["count"] += 1
        self.n["without rows"] += not made.rows
        self.n["tokens cut"] += made.cut
        self.n["read in part"] += made.partial
        for table, places in (("control_tokens", made.control), ("omitted", made.omitted)):
            for case, i in places.items():
                self._line(table, case, conversations=0, first=f"{where}, message {i}")["conversations"] += 1

    def why(self) -> str:  # on one line
        "Why conversations and rows were left out, for a message."
        return "; ".join(f"{r['count']} × {r['reason']} (first: {r['first']})" for r in self.lines("dropped"))

    def spelled(self) -> str:  # on one line
        "The control tokens that messages spell, for a message."
        return "text is read as control tokens: " + ", ".join(
            f"{c['token']!r} in {c['conversations']} conversations (first: {c['first']})"
            for c in self.lines("control_tokens")
        )

    def report(self, kept: int, beyond: list[Excess]) -> dict:
        "What `data_config.json` records: domains, stages, tokens cut off, reasons, control tokens."
        n = self.n
        stages: list[dict] = [{"what": "read", "conversations": n["read"]}]
        if n["duplicates"]:
            stages.append({"what": "duplicates", "conversations": n["duplicates"], "first": self.duplicates})
        for what, name in (
            ("not chosen", "not chosen"),
            ("without a row", "without rows"),
            ("tokenised in part", "read in part"),
        ):
            stages += [{"what": what, "conversations": n[name]}] if n[name] else []
        if n["rows cut"]:
            stages.append({"what": "cut", "rows": n["rows cut"], "tokens": n["tokens cut"]})
        else:
            stages.append({"what": "kept", "conversations": kept})
        stages += [{"what": f"longer than {excess.words}", "rows": excess.rows} for excess in beyond]
        named = self._lines["domains"].keys() - {"unnamed"}
        return ({"domains": self.lines("domains")} if named else {}) | {
            "stages": stages,
            "tokens_cut": n["tokens cut"],
            **{table: self.lines(table) for table in ("dropped", "omitted", "control_tokens")},
        }


SPOOLED = Features(FEATURES | {"messages": Json(), "tools": Json()})
AT_ONCE, BYTES_AT_ONCE = 1000, 100_000_000  # of a table that is written


class RowSpool:
    "Rows that wait in a file, which can be written and read, by conversation in any order."

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.writer = pa.ipc.new_file(self.file, SPOOLED.arrow_schema)
        self.counts = array("q")  # rows of each conversation
        self.lengths = array("q")  # tokens of each row
        self.nbytes, self.pictures, self.tools = 0, False, False  # rows with messages, tools

    def append(self, rows: list[tuple]) -> None:
        "Add the rows of a conversation; with pictures also its messages and tools. OSError: the disk is full."
        more = [row[2:] or ([], None) for row in rows]
        self.pictures |= any(len(row) > 2 for row in rows)
        self.tools |= any(tools for _, tools in more)
        encoded = [[Json().encode_example(value) for value in pair] for pair in more]
        texts = [pa.array(column, pa.json_()) for column in zip(*encoded)]
        columns = arrow_columns([row[:2] for row in rows])
        batch = pa.record_batch([*columns, *texts], schema=SPOOLED.arrow_schema)
        self.writer.write_batch(batch)
        self.counts.append(len(rows))
        self.lengths.extend(len(ids) for ids, *_ in rows)
        self.nbytes += batch.nbytes

    def finish(self) -> None:
        """From here on rows are read, as a table of `features`: messages and tools are columns where a row has some.
        OSError: the disk is full."""
        self.writer.close()
        self.file.flush()
        names = [*FEATURES, *["messages"] * self.pictures, *["tools"] * (self.pictures and self.tools)]
        self.features = Features({name: SPOOLED[name] for name in names})

    def tables(self, order: np.ndarray, most: int | None = None) -> Iterator[pa.Table]:
        """The rows of the conversations in this order, so many conversations at a time; None: a thousand, or as many as
        take 100 MB."""
        reader, names = pa.ipc.open_file(self.file), [*self.features]
        most = most or max(1, min(AT_ONCE, len(self.counts) * BYTES_AT_ONCE // self.nbytes))
        for start in range(0, len(order), most):
            batches = [reader.get_batch(int(i)).select(names) for i in order[start : start + most]]
            yield pa.Table.from_batches(batches).combine_chunks()


class Result(NamedTuple):
    "What became of a source."

    rows: RowSpool  # as they were made
    lengths: np.ndarray  # [rows] int64: tokens of each, in the order of the table
    order: np.ndarray  # [conversations that have rows], those for training first
    split: dict[str, int]  # rows for "train" and "val"
    counts: Counts  # what was left out, and why
    beyond: list[Excess] = []  # rows that are longer than the verifier's context
    first_beyond: str = ""  # where the first of them is
    held_out: int = 0  # conversations for validation: the last of the order

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


def _split(wholes, settings) -> tuple[np.ndarray, int]:
    """The order of conversations, those for training first, and how many at its end are held out. Those of one number
    in `wholes` [conversations] stay together: what one of them teaches, another would be measured on."""
    _, firsts, group = np.unique(wholes, return_index=True, return_inverse=True)
    n = len(firsts)
    order = np.random.default_rng([settings.seed, 1]).permutation(n) if settings.shuffle else np.arange(n)
    place_of = np.empty(n, np.int64)
    place_of[firsts.argsort()[order]] = np.arange(n)
    places = place_of[group]
    held_out = min(max(1, round(n * settings.val_fraction)), n - 1) if settings.val_fraction else 0
    return places.argsort(kind="stable"), int(np.count_nonzero(places >= n - held_out))


def run_pipeline(
    data,  # a source, as `sources.located` takes it
    encoder: Encoder,  # how rows are made
    num_proc: int = 1,  # processes
    limit: int | None = None,  # stop after so many conversations
    file: IO[bytes] | None = None,  # in which the rows wait for their order; None: in memory
) -> Result:  # rows, their order, split, counts
    "Make rows of a source. ValueError: no row is left."
    settings, counts = encoder.settings, Counts()
    stream = _sampled(_distinct(data, counts, encoder, limit), counts, settings)
    sampled = isinstance(stream, list)
    total = len(stream) if sampled else conversation_count(data, limit)
    spool, first_beyond = RowSpool(file or io.BytesIO()), ""
    wholes = array("q")  # of each conversation: a number that the parts of one have in common
    with tqdm(total=total, desc="prepare", unit="conversation", leave=False, delay=1) as bar:
        for where, made in _encode_all(stream, encoder, num_proc):
            bar.update(1 if sampled else counts.n["read"] - bar.n)  # duplicates count as done
            counts.add(where, made)
            if made.rows:
                wholes.append(len(wholes) if made.primary_id is None else hash(made.primary_id))
                spool.append(made.rows)
            lengths = [len(ids) for ids, *_ in made.rows]
            if made.cut or made.partial:
                counts.n["rows cut"] += lengths.count(settings.max_length)
            if not first_beyond and any(map(encoder.limits.exceeded, lengths)):
                first_beyond = where
    spool.finish()
    n = len(spool.counts)  # conversations
    if not n:
        named = f" in {brief(str(data))}" if isinstance(data, (str, Path)) else ""
        why = counts.why() or f"there were none{named}"
        if "no assistant message" in why:
            why += "; `regenerate` lets the verifier answer questions"
        if f"in the first {settings.max_length}" in why:
            why += "; raise max_length"
        raise ValueError(f"no row left of {counts.n['read']} conversations ({why})")
    order, held_out = _split(np.asarray(wholes), settings)
    val = sum(spool.counts[i] for i in order[n - held_out :])
    split = {"train": len(spool.lengths) - val, "val": val}
    lengths, rows = map(np.asarray, (spool.lengths, spool.counts))  # as they were made; rows of each conversation
    firsts, rows = (rows.cumsum() - rows)[order], rows[order]
    lengths = lengths[np.repeat(firsts - (rows.cumsum() - rows), rows) + np.arange(len(lengths))]
    beyond = encoder.limits.count(spool.lengths)
    return Result(spool, lengths, order, split, counts, beyond, first_beyond, held_out)


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
    settings = Settings(max_length, rows=rows, dedup=False, shuffle=False)
    template = ChatTemplate(tokenizer, **template_kwargs)
    result = run_pipeline(
        conversations, Encoder(template, settings, vocab_size or len(template.tokenizer)), limit=limit
    )
    counts = result.counts
    table = Dataset(pa.concat_tables(result.rows.tables(result.order)), info=DatasetInfo(features=result.rows.features))
    masks = pc.call_function("list_flatten", [table.data.table["loss_mask"]])
    trained = pc.call_function("sum", [masks]).as_py()
    text = (
        f"{counts.n['read']} conversations, {len(table)} rows, {result.lengths.sum()} tokens, "
        f"{trained} trained; dropped: {counts.why() or 'nothing'}"
    )
    dropped, omitted, control = map(counts.lines, ("dropped", "omitted", "control_tokens"))
    if omitted:
        text += "; left out of those that are kept: " + "; ".join(
            f"{r['what']} in {r['conversations']} conversations (first: {r['first']})" for r in omitted
        )
    if control:
        text += f"; {counts.spelled()}"
    table.info.description = text
    log.log(logging.WARNING if dropped or omitted or control else logging.INFO, text)
    return table


def fingerprint_data(data) -> tuple[str, Any]:
    """Hash a source of `located`, 16 hex digits: the bytes of its files, or the messages of its conversations, which
    are kept in memory; and the data, which can be read (again)."""
    h = hashlib.sha256()
    sources = data if isinstance(data, (list, tuple)) else [data]
    files = [files_of(d) for d in sources]
    if None not in files:
        for file in chain.from_iterable(filter(None, files)):
            h.update(file_digest(file))
    else:
        data = Located(located(data))
        for _, row in data:
            try:
                content = content_hash(row)
            except Exception:
                content = brief(row)  # it cannot be read
            h.update(content.encode("utf-8", "surrogatepass"))
    return h.hexdigest()[:16], data


def write_table(folder: Path, result: Result, fingerprint: str) -> dict[int, int]:
    """Write rows into an empty folder as `Dataset.save_to_disk` writes a table, with a part of them in memory at a
    time; the fingerprint names them in the caches of `datasets`. Returns token id -> trained occurrences, ascending
    ids."""
    features = result.rows.features
    empty = pa.table([pa.nulls(1, t) for t in features.arrow_schema.types], features.arrow_schema)
    # state.json and dataset_info.json, and a file of one row for that which follows
    Dataset(empty, fingerprint=fingerprint).with_format("torch").save_to_disk(folder)
    (file,) = folder.glob("*.arrow")
    counts, bar = np.zeros(0, np.int64), tqdm(total=len(result.lengths), desc="write", unit="row", leave=False, delay=1)
    with bar, ArrowWriter(features=features, path=str(file)) as writer:
        for table in result.rows.tables(result.order):
            writer.write_table(table)
            counts = add_trained(counts, table)
            bar.update(len(table))
        writer.finalize()
    return {int(i): int(counts[i]) for i in counts.nonzero()[0]}


def _make(folder, data, paths, encoder, verifier, vocab_size, origin, num_proc):
    """Make the folder, everything at once or nothing: of data, which has these paths, for the verifier of this path, if
    it has one. Temporary folders of runs that were killed are removed."""
    template, settings, place = encoder.template, encoder.settings, folder.absolute()
    with tempfile.TemporaryFile(dir=place.parent) as file:
        result = run_pipeline(data, encoder, num_proc, file=file)
        if result.counts.lines("control_tokens"):
            log.warning("prepare: %s", result.counts.spelled())
        for excess in result.beyond:
            log.warning("prepare: %s. %s", excess.text(first=result.first_beyond), excess.remedy)
        if not result.rows.pictures:  # how they would be read is in no row
            origin = {name: value for name, value in origin.items() if name != "image_processor"}
        name = str(verifier or template.name)
        record = provenance(
            "prepare_data",
            {
                "data": paths or f"{result.counts.n['read']} conversations in memory",
                "verifier": name,
                "output_dir": str(folder),
                **settings._asdict(),
            },
            {f"data {i}" if i else "data": path for i, path in enumerate(paths)} | {"verifier": verifier},
        )
        config = {
            "version": "3.0",
            **record,
            # with the fields of the upstream library
            "model": {"target_model_path": name, "vocab_size": vocab_size},
            "data": {
                "num_samples": len(result.lengths),
                "num_tokens": int(result.lengths.sum()),
                "seq_length": settings.max_length,
                "seed": settings.seed,
            },
            "split": result.split,
            "origin": origin,
            "report": result.counts.report(len(result.order), result.beyond),
            "format": {"schema": {"input_ids": ["seq"], "loss_mask": ["seq"], "seq_len": []}},
        }
        left = re.compile(rf"\.{re.escape(place.stem)}\.[0-9a-f]{{8}}{re.escape(place.suffix)}")
        for path in place.parent.glob(f".{place.stem}.*"):
            if left.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path)
        fingerprint = hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:16]
        with atomic_folder(folder) as tmp:
            freq = write_table(tmp, result, fingerprint)
            with open(tmp / "sample_lengths.json", "w", encoding="utf-8") as lengths:
                for i, n in enumerate(result.lengths):
                    lengths.write(f'{", " if i else "{"}"{i}": {n}')
                lengths.write("}")
            if result.held_out:
                with open(tmp / HELD_OUT, "w", encoding="utf-8", errors="backslashreplace") as questions:
                    for row in result.questions():
                        if "prompt" in row:
                            row["text"] = template.tokenizer.decode(row["prompt"])  # for a reader
                        questions.write(json.dumps(row, ensure_ascii=False) + "\n")
            (tmp / "token_freq.json").write_text(json.dumps(freq), encoding="utf-8")
            torch.save(freq, tmp / "token_freq.pt")  # numbers; for the upstream library
            text = json.dumps(config, indent=1, ensure_ascii=False)
            (tmp / "data_config.json").write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace", newline="")


BEFORE = {  # what origins do not say that were recorded before there was a choice
    "train_reasoning": True,
    "train_tool_calls": True,
    "image_folder": None,
    "allow_urls": False,
}


def prepare_data(
    data: str | Path | Iterable,  # conversations: a path, hf:<id>, a name: gsm8k; or themselves
    verifier,  # folder or hub id of the verifier; or its tokenizer or processor
    output_dir: str | Path,  # the folder to make
    max_length: int = 2048,  # tokens in a row
    max_samples: int | None = None,  # so many conversations, a random sample; None: all
    rows: str = "conversation",  # or "turn": a row per assistant turn, only that turn trained
    too_long: str = "cut",  # or "drop": what happens to a row that is longer
    min_trained: int = 1,  # trained tokens that a row must have
    dedup: bool = True,  # drop conversations with the same messages as another
    shuffle: bool = True,  # False: keep the order of conversations, max_samples takes the first
    val_fraction: float = 0.05,  # share of the conversations that are held out of training
    seed: int = 0,  # of the sample and the order
    draft_vocab_size: int | None = None,  # also choose a draft vocabulary of this size
    template_kwargs: dict | None = None,  # for the template, e.g. {"enable_thinking": False}
    train_reasoning: bool = True,  # train what answers think before they answer
    train_tool_calls: bool = True,  # train the calls of tools in answers
    image_folder: str | Path | None = None,  # root of picture paths; None: the data's folder
    allow_urls: bool = False,  # fetch pictures from the network
    num_proc: int | None = None,  # processes; None: as many as there are processors, up to 8
    overwrite: bool = False,  # replace a prepared folder that was made from something else
    trust_remote_code: bool = False,  # run code that comes with the verifier's tokenizer
) -> Prepared:  # the folder, open; displays its report
    """Tokenise, mask, filter, shuffle, split and store conversations. What held-out ones ask is
    in `heldout.jsonl`, which `evaluate` reads. The same call again does nothing. Pictures that
    come as bytes or from the network go to `{output_dir}-images`. Conversations that cannot be
    used are counted in the report, with file and line of the first. ValueError: a setting, a
    file that is not what it claims to be (by file and line), a folder that was made from
    something else, or nothing left. OSError: the disk is full, or may not be written, with the
    path."""
    settings = Settings(
        max_length=max_length,
        max_samples=max_samples,
        rows=rows,
        too_long=too_long,
        min_trained=min_trained,
        dedup=dedup,
        shuffle=shuffle,
        val_fraction=val_fraction,
        seed=seed,
        template_kwargs=template_kwargs or {},
        train_reasoning=train_reasoning,
        train_tool_calls=train_tool_calls,
    )
    other = {"draft_vocab_size": draft_vocab_size, "num_proc": num_proc}
    check_options(settings._asdict() | other | {"output_dir": output_dir}, "prepare")
    if val_fraction and not dedup:
        log.warning(
            "dedup=False with val_fraction=%g: equal conversations may be on both sides, and "
            "what is measured on them was trained; leave dedup on",
            val_fraction,
        )
    path, config, owner = None, None, verifier
    if isinstance(verifier, (str, Path)):
        path, config = verifier, verifier_config(verifier, trust_remote_code)
        owner = load_processor(verifier, trust_remote_code)
    template = ChatTemplate(owner, **settings.template_kwargs)
    vocab_size = config.get_text_config().vocab_size if config else None
    data_hash, readable = fingerprint_data(data)
    if image_folder is not None:
        image_folder = str(Path(image_folder).expanduser().absolute())
    origin = {"data": data_hash, "tokenizer": fingerprint_template(template)} | settings._asdict()
    pictures = getattr(owner, "image_processor", None)  # how many tokens has one of some size?
    pictures = pictures and json.dumps(pictures.to_dict(), sort_keys=True, default=str)
    pictures = pictures and hashlib.sha256(pictures.encode()).hexdigest()[:16]
    origin |= {"image_folder": image_folder, "allow_urls": allow_urls, "image_processor": pictures}
    folder = Path(output_dir).expanduser()  # as `datasets` where it writes the table
    sources = data if isinstance(data, (list, tuple)) else [data]
    paths = [str(d) for d in sources if isinstance(d, (str, Path))]
    place = folder.absolute()
    root = next((path for path in (Path(name).expanduser() for name in paths) if path.exists()), Path("."))
    find_pictures = {
        "folder": image_folder or (root.parent if root.is_file() else root),
        "store": place.with_name(f"{place.name}-images"),
        "allow_urls": allow_urls,
    }
    limits = RowLimits.of(config) if config else RowLimits()
    encoder = Encoder(template, settings, vocab_size or len(template.tokenizer), find_pictures, limits)
    if num_proc is None:
        num_proc = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_proc = min(num_proc, 8)
    with disk_errors(folder):
        place.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), FileLock(place.with_name(f".{place.name}.lock")):
        old = origin_of(folder)
        changed = old and changes(BEFORE | {"image_processor": pictures} | old, origin)
        if old and not changed:
            made_at = (folder / "data_config.json").stat().st_mtime
            picture = changed_picture(load_table(folder), made_at)
            changed = [f"there is another picture {picture}"] if picture else []
        if changed and not overwrite:
            raise ValueError(
                f"output_dir {str(folder)!r} was prepared from something else: "
                f"{'; '.join(changed)}. Choose a new folder, or pass overwrite=True."
            )
        if old is None or changed:
            _make(folder, readable, paths, encoder, path, vocab_size, origin, num_proc)
        prepared = Prepared(folder)
    if draft_vocab_size:
        prepared.add_vocab_mapping(draft_vocab_size, vocab_size)
    return prepared
