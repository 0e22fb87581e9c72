"""Reading conversations: JSONL, JSON and Parquet files, folders, Arrow tables, the hub, memory; streaming, with
bounded memory. A bad line is counted, a wrong file is an error; a conversation has its place."""

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import read_errors, read_object
from .messages import BadRow, brief

if TYPE_CHECKING:  # imported where a table is opened, not where a name is looked up
    from datasets import Dataset


# JSON is read here and not by `datasets`, which reads a list as a whole, stops at a bad line, keeps one of two equal
# keys without a word, and knows no line numbers.

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
LINE = 32 << 20  # bytes of a line, or characters of an item of a list, that are read at most
PIECE = 1 << 20  # characters of a list that are read at once, or more
TOO_LONG = f"longer than {LINE >> 20} MiB; split the conversation"


def _once(pairs):
    "An object of JSON, in which every key is once."
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise BadRow("a key is there twice, so one value would be lost", detail=brief(twice))
    return value


STRICT, LOOSE = json.JSONDecoder(object_pairs_hook=_once), json.JSONDecoder()


def _value(text, at=0):
    "(value, where its text ends) of JSON; a BadRow in place of a value that would lose something."
    try:
        return STRICT.raw_decode(text, at)
    except BadRow as e:
        return e, LOOSE.raw_decode(text, at)[1]


def as_row(value) -> dict | BadRow:
    "A line of JSON, or an item of a list, as a conversation: an object, or the bare list of its messages."
    value = {"messages": value} if isinstance(value, list) else value
    if isinstance(value, (dict, BadRow)):
        return value
    return BadRow(
        f"holds a {type(value).__name__}, expected a conversation: an object with 'messages' or 'conversations', or "
        "with 'input_ids' and 'loss_mask', or a list of messages",
        detail=brief(value),
    )


def row_of_table(row: dict) -> dict:
    """A row of a table, whose objects all have the fields of all: without the None that fills in those that an object
    lacked, such as the arguments that another call of a tool has."""
    return {name: _without_none(value) for name, value in row.items()}


def _without_none(value):
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):  # none of token ids
        return [_without_none(v) for v in value]
    return value


def _odd(error):
    "What Python's reader of JSON does not read, though it is JSON."
    if isinstance(error, RecursionError):
        return BadRow("lists or objects are nested too deep")
    return BadRow("a number of thousands of digits")


def read_lines(file) -> Iterator[tuple[bytes, bool]]:
    """Lines of at most `LINE` bytes, with their end, and whether each is whole: the rest of a longer one is passed
    over, and not kept. The file is open for reading bytes."""
    while raw := file.readline(LINE + 1):
        whole = len(raw) <= LINE or raw.endswith(b"\n")
        yield raw, whole
        del raw
        while not whole and (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass


def _parsed(raw):
    "One conversation from the bytes of a line, or a BadRow; None: the line is empty."
    try:
        text = raw.decode("utf-8-sig").strip()
        if not text:
            return None
        value, end = _value(text)
    except UnicodeDecodeError as e:
        return BadRow("not UTF-8", detail=f"{e.reason} at byte {e.start}")
    except json.JSONDecodeError as e:
        return BadRow("not JSON", detail=f"{e.msg}: column {e.colno}")
    except (ValueError, RecursionError) as e:
        return _odd(e)
    if end < len(text):
        return BadRow("not JSON", detail=f"more after its end, at column {end + 1}")
    return as_row(value)


_BLANK = re.compile(r"[ \t\r\n]*")


class _Text:
    "A text in UTF-8, read piece by piece."

    def __init__(self, path, file):
        self.path = path
        self.file = io.TextIOWrapper(file, "utf-8-sig", newline="")
        self.text, self.at = "", 0  # the text read so far, and how much of it was used
        self.line, self.start = 1, 0  # the line and the character at which `text` begins

    def more(self):
        "Forget what was used, and read on; False at the end."
        self.line += self.text.count("\n", 0, self.at)
        self.start += self.at
        self.text, self.at = self.text[self.at :], 0
        n = len(self.text)
        try:
            piece = self.file.read(min(max(PIECE, n), max(LINE + 1 - n, 1)))
        except UnicodeDecodeError as e:
            raise self.error(f"not UTF-8 ({e.reason})", n) from None
        self.text += piece
        return bool(piece)

    def peek(self):
        "The next character that is not blank; empty at the end."
        while True:
            blank = _BLANK.match(self.text, self.at)  # of length 0 where there is none
            self.at = blank.end() if blank else self.at
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self):
        "The next JSON value, or a BadRow for one that would lose something."
        self.peek()
        while True:
            try:
                value, end = _value(self.text, self.at)
            except json.JSONDecodeError as e:
                wrong = self.error(f"not JSON ({e.msg})", e.pos)
                if len(self.text) - self.at > LINE:
                    wrong = self.error(f"an item has no end, or is {TOO_LONG}", self.at)
                elif self.more():
                    continue
                raise wrong from None
            except (ValueError, RecursionError) as e:
                raise self.error(_odd(e).reason, self.at) from None
            if end < len(self.text) or not self.more():
                self.at = min(end, len(self.text))
                return value

    def error(self, what, at):
        line = self.line + self.text.count("\n", 0, at)
        return ValueError(
            f"{self.path}, line {line}: {what}. Expected one list of conversations. "
            "In a file of one conversation a line (.jsonl), only one would be lost."
        )


def _read_json(text):
    "(place, row) of a list of conversations, or of one; returns whether the file holds lines instead."
    n, messages, size = 0, None, 0
    sign = text.peek()
    if not sign:
        raise ValueError(f"{text.path}: is empty, expected one list of conversations")
    if sign != "[":
        row = text.value() if sign == "{" else None
        if row is None or text.peek():
            return True
        yield "item 0", as_row(row)
        return False
    text.at += 1
    sign = text.peek()
    text.at += sign == "]"
    while sign != "]":
        begin, value = text.start + text.at, text.value()
        if n == 0 and isinstance(value, dict) and {"role", "from"} & value.keys():
            messages = []  # the list is one conversation
        if messages is None:
            yield f"item {n}", as_row(value)
        else:
            messages.append(value)
            size += text.start + text.at - begin
            if size > LINE:
                raise text.error(f"one conversation is {TOO_LONG}", text.at)
        n, sign = n + 1, text.peek()
        if sign not in ("]", ","):
            raise text.error("not JSON (a comma or the end of the list is missing)", text.at)
        text.at += 1
    if text.peek():
        if n and messages is None:
            raise text.error("there is more after the end of the list", text.at)
        return True
    if messages is not None:
        yield "item 0", next((m for m in messages if isinstance(m, BadRow)), {"messages": messages})
    return False


def _read_parquet(path):
    "(place, row) of a Parquet file."
    import pyarrow.parquet as pq

    n = 0
    try:
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            widest = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
            for batch in file.iter_batches(max(1, min(256, LINE // max(widest, 1)))):
                for row in batch.to_pylist():
                    yield f"row {(n := n + 1)}", row_of_table(row)
    except Exception as e:  # pyarrow has many kinds; its OSError for damage has no number
        if isinstance(e, OSError) and e.errno:
            raise
        why = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(f"{path}, after row {n}: damaged, or no Parquet file ({why}). Copy it again.") from None


def read_rows(path):
    "(place, row or BadRow) of each conversation in one file. ValueError: it begins like something else."
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with gzip.GzipFile(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        raw = file.peek(64)
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(
                f"{path}, line 1: begins like UTF-16, expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8"
            )
        if len(raw) >= 64 and not raw[:64].strip(b"\0"):
            raise ValueError(f"{path}, line 1: begins with zero bytes, expected text. Copy the file again.")
        if raw[:2] == b"\x1f\x8b":
            raise ValueError(f"{path}: is compressed by gzip; give it a name that ends in .gz")
        if path.name.endswith((".json", ".json.gz")):
            text = _Text(path, file)
            if not (yield from _read_json(text)):
                return
            text.file.detach().seek(0)
        for n, (raw, whole) in enumerate(read_lines(file), 1):
            row = _parsed(raw) if whole else BadRow(TOO_LONG)
            del raw  # before the next is read
            if row is not None:
                yield f"line {n}", row
            del row


def read_file(path: Path) -> Iterator[tuple[str, dict | BadRow]]:
    "(file and line, conversation) of each conversation in a file. ValueError: it is not what it claims to be."
    n, bad, first, place = 0, 0, None, "line 0"
    shown = str(path).encode("utf-8", "backslashreplace").decode()  # a file name may be any bytes
    try:
        with read_errors(path):
            for n, (place, row) in enumerate(read_rows(path), 1):
                if isinstance(row, BadRow):
                    bad, first = bad + 1, first or f"{shown}, {place}: {row}"
                yield f"{shown}, {place}", row
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(
            f"{path}, after {place}: the compressed file is cut off or damaged ({e}). Copy it again."
        ) from None
    if bad and (bad == n or bad > max(10, n / 10)):
        raise ValueError(
            f"{path}: {bad} of {n} conversations cannot be read, so this is no file "
            f"of conversations. The first is {first}"
        )


RECORDS = (
    "data_config.json",
    "provenance.json",
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
    "sample_lengths.json",
    "token_freq.json",
    "errors.jsonl",
)  # what tools write beside conversations; in a folder, names that end so are passed over


HELD_OUT = "heldout.jsonl"  # in a prepared folder: what the held-out conversations ask


def table_files(folder: str | Path) -> list[str]:
    """Names of the files of a table that `Dataset.save_to_disk` wrote, as it lists them. FileNotFoundError: there is no
    table; ValueError: it has no list of files."""
    folder, state = Path(folder), Path(folder) / "state.json"
    if not state.is_file():
        raise FileNotFoundError(
            f"{folder}: no state.json, so this is no table of `datasets`. Make one with prepare_data, or save_to_disk."
        )
    try:
        return [f["filename"] for f in read_object(state)["_data_files"]]
    except (KeyError, TypeError) as e:
        raise ValueError(
            f"{state}: does not list the table's files ({type(e).__name__}: {e}). Make the folder again."
        ) from None


def load_table(folder: str | Path) -> "Dataset":
    """Open an Arrow table that `Dataset.save_to_disk` wrote, memory-mapped. FileNotFoundError: there is none, or a file
    of its list is missing; ValueError: its list of files leads out of the folder, or a file is damaged."""
    folder = Path(folder).expanduser()
    names = table_files(folder)
    from datasets import load_from_disk

    from ..core.checkpoints import inside

    for name in names:
        if not inside(folder, name).is_file():
            raise FileNotFoundError(
                f"{folder / name}: no such file, and state.json names it. Make or copy the folder again."
            )
    try:
        table: Any = load_from_disk(str(folder))
        table.data.table.validate(full=True)  # damaged offsets lead out of its memory
        return table
    except Exception as e:
        raise ValueError(
            f"{folder}: the table cannot be read ({type(e).__name__}: {e}). It was probably "
            "cut off: make or copy it again."
        ) from e


PRESETS = {  # word -> data set of the hub
    "sharegpt": "hf:Aeala/ShareGPT_Vicuna_unfiltered",
    "ultrachat": "hf:HuggingFaceH4/ultrachat_200k:train_sft",
    "gsm8k": "hf:openai/gsm8k:main",
    "magpie": "hf:Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
    "nemotron": "hf:nvidia/Llama-Nemotron-Post-Training-Dataset:SFT:chat",
    "sharegpt4v_coco": "hf:Lin-Chen/ShareGPT4V:ShareGPT4V",
    "open-perfectblend": "hf:mlabonne/open-perfectblend",
    "hermes-fc": "hf:NousResearch/hermes-function-calling-v1:func_calling",
}
# rows that are taken, where not all are
ONLY = {"sharegpt4v_coco": lambda row: str(row.get("image")).startswith("coco/")}
_FILE_OF = re.compile(r"([\w.-]+/[\w.-]+):([^:]+)")


def hub_name(data: str | Path) -> str | None:
    """Where on the hub a source is (`hf:…`): written so, by a word of `PRESETS`, or as org/name:file. None: it is
    elsewhere."""
    text = str(data)
    if text.startswith("hf:"):
        return text
    if os.path.exists(os.path.expanduser(text)):
        return None
    match = _FILE_OF.fullmatch(text)
    if match and text.endswith(SUFFIXES):
        return f"hf://datasets/{match[1]}/{match[2]}"
    return PRESETS.get(text)


_SPLIT = re.compile(r"(train|test|val|dev|eval)")


def files_of(data) -> list[Path] | None:
    """The files that a source of `read_conversations` reads, in order; None: it is no file or folder.
    FileNotFoundError: there is nothing, or nothing readable."""
    if not isinstance(data, (str, Path)) or hub_name(data):
        return None
    path = Path(data).expanduser()
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ValueError(
                f"{path}: cannot read this kind of file; the name must end in one of {', '.join(SUFFIXES)}."
            )
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such file or folder. A dataset of the hub is written hf:{data}, one "
            f"file of it org/name:file.jsonl; known by a name are {', '.join(PRESETS)}"
        )
    if (path / "state.json").is_file():
        names = table_files(path)  # beside them `datasets` caches what it made of the table
        return sorted(file for file in path.glob("*.arrow") if file.name in names)
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(p.parent.name for p in path.glob("*/state.json")))
        raise ValueError(f"{path}: holds several tables ({splits}); name the folder of one")
    rest = [
        p.relative_to(path)
        for p in path.rglob("*")
        if p.is_file() and p.name.endswith(SUFFIXES) and not p.name.endswith(RECORDS)
    ]
    files = [path / p for p in sorted(rest) if not any(part.startswith(".") for part in p.parts)]
    if not files:
        raise FileNotFoundError(f"{path}: holds no file that ends in {', '.join(SUFFIXES)}.")
    return files


def _fetched(spec):
    "The file of `hf://…`."
    from huggingface_hub import hf_hub_download

    match = re.fullmatch(r"hf://datasets/([^/]+/[^/]+)/(.+)", spec)
    if not match:
        raise ValueError(f"{spec!r}: expected hf://datasets/<org>/<name>/<file>.")
    try:
        return Path(hf_hub_download(match[1], match[2], repo_type="dataset"))
    except Exception as e:  # the hub's errors are of many kinds
        problem = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise ValueError(f"{spec}: cannot be fetched ({problem}); check the names of data set and file") from e


def _hub(spec):
    "The rows of `hf:…`, streamed."
    from datasets import load_dataset

    if spec.startswith("hf://"):
        yield from read_file(_fetched(spec))
        return
    name, *rest = spec.removeprefix("hf:").split(":")
    if not name or len(rest) > 2 or "" in rest:
        raise ValueError(f"{spec!r}: expected hf:<id>[:<subset>[:<split>]].")
    if len(rest) == 1:  # one word is a split if it is spelt like one
        rest = [None, *rest] if _SPLIT.match(rest[0]) else [*rest, "train"]
    subset, split = rest or (None, "train")
    n = -1
    try:
        for n, row in enumerate(load_dataset(name, subset, split=split, streaming=True)):
            yield f"{spec}, row {n}", row_of_table(row)
    except Exception as e:
        after = f" after row {n}" if n >= 0 else ""
        raise ValueError(
            f"{spec}: subset {subset!r}, split {split!r} cannot be loaded{after} ({type(e).__name__}: {e})."
        ) from e


class Located(list):
    "What `located` gave of a source that is read once, in memory: a source itself."


def located(data: str | Path | Iterable) -> Iterator[tuple[str, dict | BadRow]]:
    """(where it is, conversation) of a source, as in `read_conversations`. A BadRow: a conversation that cannot be
    read."""
    if isinstance(data, Located):
        yield from data
        return
    columns = isinstance(data, dict) or hasattr(data, "iterrows")  # a DataFrame, which gives the names of its columns
    if columns or isinstance(data, bytes) or not isinstance(data, (str, Path, Iterable)):
        raise ValueError(
            f"data={' '.join(brief(data).split())} is a {type(data).__name__}; expected a file, "
            "a folder, hf:<id>, or a list of conversations"
        )
    if isinstance(data, (str, Path)):
        if name := hub_name(data):
            rows = _hub(name)
            only = ONLY.get(str(data))
            yield from rows if only is None else (row for row in rows if only(row[1]))
        elif (path := Path(data).expanduser() / "state.json").is_file():
            table: Any = load_table(path.parent).with_format(None)
            yield from ((f"{data}, row {n}", row_of_table(row)) for n, row in enumerate(table))
        else:
            for path in files_of(data) or ():
                yield from read_file(path)
        return
    read = row_of_table if hasattr(data, "features") else as_row  # only tables of `datasets` have features
    for n, row in enumerate(data):
        if isinstance(row, (str, Path)):
            yield from located(row)
        else:
            yield f"conversation {n}", read(row)


def read_conversations(
    # a path; hf:<id>[:<subset>[:<split>]], org/name:file.jsonl, a name of `PRESETS`;
    # conversations; or a list of these
    data: str | Path | Iterable,
    limit: int | None = None,  # stop after so many
) -> Iterator[dict]:  # as written: "messages", "conversations" or "input_ids" and "loss_mask"
    "Stream conversations. Whatever is wrong is a ValueError that names the file and the line."
    for where, row in islice(located(data), limit):
        if isinstance(row, BadRow):
            raise ValueError(f"{where}: {row}")
        yield row


def conversation_count(data: str | Path | Iterable, limit: int | None = None) -> int | None:
    """How many conversations a source of `read_conversations` holds, bad ones included, `limit` at most. None: it is
    not known before all are read."""
    try:
        if not isinstance(data, (str, Path)):
            named = isinstance(data, list) and any(isinstance(r, (str, Path)) for r in data)
            if named or not isinstance(data, Sized):
                return None
            n = len(data)
        elif (path := Path(data).expanduser() / "state.json").is_file():
            n = len(load_table(path.parent))
        else:
            files, n = files_of(data), 0
            if files is None or not all(path.suffix in (".jsonl", ".parquet") for path in files):
                return None
            for path in files:
                if path.suffix == ".parquet":
                    import pyarrow.parquet as pq

                    n += pq.read_metadata(path).num_rows
                    continue
                with open(path, "rb") as file:
                    n += sum(bool(line.strip()) for line, _ in read_lines(file))
    except (OSError, ValueError):  # `located` names what is wrong
        return None
    return n if limit is None else min(n, limit)
