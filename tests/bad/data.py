"""Data that others made: rows, files, tables and folders through `prepare`, `features`, `regenerate` and `vocab`. A row
that cannot be used is counted with its file and line; a file that is not what it claims to be is refused."""

import functools
import gzip
import io
import json
import multiprocessing
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer

from speculators_nb.data.chat_encoding import ready_row
from speculators_nb.data.prepare import prepare, prepare_data
from speculators_nb.data.prepared_folder import load_prepared
from speculators_nb.data.sources import read_conversations
from speculators_nb.nn.draft_vocabulary import (
    count_tokens,
    load_vocab_mapping,
    save_vocab_mapping,
    vocab_mapping_from_frequencies,
)
from speculators_nb.regenerate.in_process import regenerate
from speculators_nb.regenerate.journal import Journal, read_regenerated
from speculators_nb.verifier.tapped_model import Verifier

from .harness import GOOD, Case

disable_progress_bars()
ASK, SAY = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TALK = {"messages": [ASK, SAY]}


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(GOOD["tiny"])


@functools.cache
def verifier():
    return Verifier.from_pretrained(str(GOOD["tiny"]))


def line(row):
    return row if isinstance(row, (str, bytes)) else json.dumps(row)


def lines(*rows):
    return b"\n".join(r if isinstance(r, bytes) else line(r).encode("utf-8", "surrogatepass") for r in rows) + b"\n"


def asked(content, **more):
    return {"messages": [ASK | {"content": content} | more, SAY]}


def said(**more):
    return {"messages": [ASK, SAY | more]}


def ids(input_ids, loss_mask=(0, 1)):
    return {"input_ids": input_ids, "loss_mask": list(loss_mask) if isinstance(loss_mask, tuple) else loss_mask}


# ----------------------------------------------------------------------------------------------------------------- rows
DEEP = '{"messages": ' + "[" * 3000 + "]" * 3000 + "}"
READ = [  # what no line may be: (name, line, reason)
    ("torn line", '{"messages": [{"role": "us', "not JSON"),
    ("line in Latin-1", '{"messages": "café"}'.encode("latin-1"), "not UTF-8"),
    ("line of zero bytes", b"\0" * 40, "not JSON"),
    ("zero byte in a text", b'{"messages": [{"role": "user", "content": "a\0b"}]}', "not JSON"),
    ("nested 3000 deep", DEEP, "nested too deep"),
    ("number of 5000 digits", '{"id": ' + "9" * 5000 + "}", "thousands of digits"),
    ("key twice", '{"messages": [], "messages": []}', "a key is there twice"),
    (
        "key twice in a message",
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        "a key is there twice",
    ),
    ("a number", "7", "holds a int"),
    ("a text", '"hello"', "holds a str"),
    ("null", "null", "holds a NoneType"),
    ("true", "true", "holds a bool"),
    ("two objects in a line", '{"a": 1} {"b": 2}', "not JSON"),
    ("single quotes", "{'messages': []}", "not JSON"),
    ("comma at the end", '{"messages": [],}', "not JSON"),
    ("longer than 32 MiB", lambda: b'{"messages": "' + b"x" * (33 << 20) + b'"}', "longer than 32 MiB"),
]
MESSAGES = [  # what no conversation may be: (name, row, reason)
    ("no fields", {}, "no messages"),
    ("another field", {"text": "hello"}, "no messages"),
    ("messages null", {"messages": None}, "no messages"),
    ("messages empty", {"messages": []}, "no messages"),
    ("messages a number", {"messages": 7}, "messages must be a list of objects"),
    ("messages a text", {"messages": "hello"}, "messages must be a list of objects"),
    ("messages an object", {"messages": {"role": "user"}}, "messages must be a list of objects"),
    ("messages broken JSON", {"messages": "[{"}, "messages: not JSON"),
    ("message a text", {"messages": ["hello"]}, "messages must be a list of objects"),
    ("message null", {"messages": [ASK, None]}, "messages must be a list of objects"),
    ("role unknown", {"messages": [{"role": "narrator", "content": "x"}]}, "role 'narrator' is unknown"),
    ("role of another case", {"messages": [{"role": "User", "content": "x"}]}, "role 'User' is unknown"),
    ("role missing", {"messages": [{"content": "x"}]}, "role None is unknown"),
    ("role null", asked("x", role=None), "role None is unknown"),
    ("role a number", asked("x", role=1), "role 1 is unknown"),
    ("role a list", asked("x", role=["user"]), r"role \['user'\] is unknown"),
    ("role of a megabyte", asked("x", role="u" * 1_000_000), r"role 'uuu.{0,70}\.\.\..{0,70}' is unknown"),
    ("content missing", {"messages": [{"role": "user"}, SAY]}, "no content"),
    ("content null", asked(None), "no content"),
    ("content a number", asked(4), "content is a int, expected text"),
    ("content true", asked(True), "content is a bool, expected text"),
    ("content NaN", asked(float("nan")), "content is a float, expected text"),
    ("content a list of numbers", asked([1, 2]), "a part of type 1; known are text"),
    (
        "part of an unknown kind",
        asked([{"type": "audio", "path": "x.wav"}]),
        "a part of type 'audio'; known are text, image, image_url",
    ),
    ("part without a kind", asked([{"text": "x"}]), "a part of type None"),
    ("part null", asked([None]), "a part of type None"),
    ("part of a list's kind", asked([{"type": ["text"], "text": "x"}]), r"a part of type \['text'\]"),
    ("text part without text", asked([{"type": "text"}]), "a part of type 'text' without text"),
    ("text part of a number", asked([{"type": "text", "text": 3}]), "a part of type 'text' without text"),
    ("half a character", asked("so \ud83d"), "half of a surrogate pair"),
    ("half a character in an answer", said(content="\udc4d"), "half of a surrogate pair"),
    ("half a character in a part", asked([{"type": "text", "text": "\ud83d"}]), "half of a surrogate pair"),
    ("half a character in reasoning", said(reasoning_content="\ud83d"), "half of a surrogate pair"),
    ("reasoning a list", said(reasoning_content=["hm"]), "reasoning is a list, expected text"),
    ("thinking an object", said(thinking={"a": 1}), "reasoning is a dict, expected text"),
    ("name an object", asked("x", name={"first": "Ada"}), "name is a dict, expected text"),
    ("id of a call a list", asked("x", tool_call_id=[1]), "tool_call_id is a list, expected text"),
    ("calls a number", said(tool_calls=7), "tool_calls: expected a list or an object, not int"),
    ("calls broken JSON", said(tool_calls="[{"), "tool_calls: not JSON"),
    ("calls an object", said(tool_calls={"name": "f"}), "tool_calls must be a list of objects"),
    ("call a number", said(tool_calls=[7]), "a tool call must be an object"),
    ("call without a name", said(tool_calls=[{"function": {"arguments": "{}"}}]), "a tool call has no name"),
    ("call named by a number", said(tool_calls=[{"name": 7}]), "a tool call has no name"),
    ("tools a number", TALK | {"tools": 7}, "tools: expected a list or an object, not int"),
    ("tools broken JSON", TALK | {"tools": "{["}, "tools: not JSON"),
    ("tools an object", TALK | {"tools": {"name": "f"}}, "tools: expected a list of objects"),
    ("tool a number", TALK | {"tools": [7]}, "tools: expected a list or an object, not int"),
    ("tool a list", TALK | {"tools": [["f"]]}, "tools: expected a list of objects"),
    ("tools nested too deep", TALK | {"tools": "[" * 3000 + "]" * 3000}, "tools: not JSON"),
]
SHAPES = [  # tables of questions, dialogues and calls that are not what they claim to be
    ("answers in a list", {"question": "2 + 2?", "answer": ["4", "four"]}, "answer is a list, expected one text"),
    ("answers in a list of lists", {"prompt": "2 + 2?", "response": [["4"]]}, "response is a list, expected one text"),
    ("questions in a list", {"question": ["2 + 2?", "3 + 3?"], "answer": "4"}, "question is a list, expected one text"),
    ("answer a number", {"question": "2 + 2?", "answer": 4}, "content is a int, expected text"),
    ("answer without a question", {"answer": "4", "solution": "2 + 2 is 4"}, "no messages: expected.*or a question"),
    ("half of one shape, half of another", {"messages": [ASK, {"from": "narrator", "value": "4"}]}, "role 'narrator'"),
    ("a text among messages", {"conversations": [ASK, "4"]}, "messages must be a list of objects"),
    ("a number among texts", {"data": ["2 + 2?", 4]}, "messages must be a list of objects"),
    ("preferences alone", {"chosen": "4", "rejected": "5"}, "no messages: expected 'messages' or 'conversations'"),
    (
        "a call that is no JSON",
        {"messages": [ASK, {"from": "function_call", "value": "f(x)"}]},
        "function_call: not JSON",
    ),
    ("a call without a name", {"messages": [ASK, {"from": "function_call", "value": "{}"}]}, "no content"),
    ("a call of a number", said(content=None, function_call=7), "function_call: expected a list or an object, not int"),
    ("a call of nothing", said(content=None, function_call={"arguments": "{}"}), "a tool call has no name"),
    ("functions an object", TALK | {"functions": {"name": "f"}}, "tools: expected a list of objects"),
    ("a thought of a number", said(content=[{"type": "thinking", "thinking": 7}]), "reasoning is a int, expected text"),
    ("weight of a half", said(weight=0.5), "weight is 0.5, expected 0 or 1"),
    ("weight a text", said(weight="high"), "weight is 'high', expected 0 or 1"),
]
LEFT_OUT = [  # what cannot be trained, though it can be read
    ("an empty answer", said(content=""), "an answer is empty"),
    ("an empty answer before another", {"messages": [ASK, SAY | {"content": ""}, ASK, SAY]}, "an answer is empty"),
    (
        "an empty column",
        {"question": "2 + 2?", "answer": ""},
        "no assistant message that answers another",
    ),
    ("calls that the template omits", said(tool_calls=[{"name": "add"}]), "chat template leaves out calls of tools"),
    ("every answer has weight 0", said(weight=0), "no trained token in the first 2048"),
]
TEXT_ONLY = [
    ("a picture", asked([{"type": "image", "path": "x.png"}]), "holds more than text"),
    ("a picture in a column", TALK | {"images": ["x.png"]}, "holds more than text|its pictures are in a column"),
]
UNANSWERED = [
    ("nobody answers", {"messages": [ASK]}, "no assistant message that answers another"),
    ("only an answer", {"messages": [{"role": "system", "content": "x"}]}, "no assistant message that answers another"),
]
WHOLE = "input_ids must be one list of token ids, whole numbers from 0 on"
MASK = "loss_mask must be one list of 0 and 1"
IDS = [  # what no tokenised row may be
    ("id of 2**32 + 5", ids([2**32 + 5, 6]), "whole numbers from 0 on, and below 2"),
    ("id of 10**400", ids([10**400, 6]), "whole numbers from 0 on, and below 2"),
    ("id beyond the vocabulary", ids([5, 3000]), "a token id beyond the verifier's vocabulary of 2048"),
    ("id negative", ids([-1, 6]), "whole numbers from 0 on, and below 2"),
    ("ids floats", ids([5.0, 6.0]), WHOLE),
    ("ids NaN", ids([5, float("nan")]), WHOLE),
    ("ids texts", ids(["5", "6"]), WHOLE),
    ("ids booleans", ids([True, False]), WHOLE),
    ("one id a boolean", ids([5, True]), WHOLE),
    ("one id null", ids([5, None]), WHOLE),
    ("ids nested", ids([[5, 6]]), WHOLE),
    ("ids nested unevenly", ids([[5], [6, 7]]), WHOLE),
    ("ids an object", ids({"a": 5}), WHOLE),
    ("ids a number", ids(5), WHOLE),
    ("ids a text", ids("56"), WHOLE),
    ("mask missing", {"input_ids": [5, 6]}, "loss_mask has another length than input_ids"),
    ("mask too short", ids([5, 6], (1,)), "loss_mask has another length than input_ids"),
    ("mask too long", ids([5, 6], (0, 1, 1)), "loss_mask has another length than input_ids"),
    ("mask NaN", ids([5, 6], [float("nan")] * 2), MASK),
    ("mask texts", ids([5, 6, 7], ["0", "0", "1"]), MASK),
    ("mask of 2", ids([5, 6], (0, 2)), MASK),
    ("mask of -1", ids([5, 6], (0, -1)), MASK),
    ("mask of a half", ids([5, 6], (0, 0.5)), MASK),
    ("mask with null", ids([5, 6], (0, None)), MASK),
    ("mask nested", ids([5, 6], ([0, 1],)), MASK),
    ("mask nested unevenly", ids([5, 6], ([0], [1, 1])), MASK),
    ("mask a number", ids([5, 6], 1), MASK),
    ("mask a text", ids([5, 6], "01"), MASK),
    ("mask an object", ids([5, 6], {"0": 1}), MASK),
    ("nothing trained", ids([5, 6], (0, 0)), "no trained token in the first 2048"),
    ("empty row", ids([], ()), "no trained token in the first 2048"),
]


def prepared(folder, name="c.jsonl", **options):
    "The report of `prepare_data` on a file of the case."
    options = dict(num_proc=1, val_fraction=0.0) | options
    made = prepare_data(folder / name, tokenizer(), folder / "out", **options)
    return "\n".join(
        [
            repr(made),
            *(f"{r['count']} × {r['reason']} (first: {r['first']})" for r in made.config["report"]["dropped"]),
            str(made.control_tokens.to_dict()),
        ]
    )


def tokenised(folder, name="c.jsonl"):
    "What `features` says of a file of conversations before it computes anything."
    return prepare(folder / name, tokenizer(), 2048).info.description


def answered(folder, name="c.jsonl", **options):
    "The report of `regenerate` on a file of the case."
    options = dict(max_new_tokens=2) | options
    return regenerate(verifier(), tokenizer(), folder / name, folder / "o.jsonl", **options).table().to_csv()


def rows_of(how, table, ways, good=TALK):
    "A case for each row: it is the second line of three, and is counted with file and line."
    for name, row, reason in table:
        content = (
            (lambda path, row=row: path.write_bytes(lines(good, row(), good)))
            if callable(row)
            else lines(good, row, good)
        )
        yield Case(f"{how}: {name}", ways, rf"{reason}.*c\.jsonl, line 2\b", {"c.jsonl": content}, counted=True)


CASES = [
    *rows_of("prepare", READ + MESSAGES + SHAPES + LEFT_OUT + TEXT_ONLY + UNANSWERED + IDS, prepared),
    *rows_of("features", READ[:6] + MESSAGES[::4] + TEXT_ONLY + UNANSWERED + IDS[::3], tokenised),
    *rows_of(
        "regenerate", READ[:8] + MESSAGES[::3] + SHAPES[::4] + TEXT_ONLY, answered, good={"messages": [SAY]}
    ),  # which cannot be asked: nothing is computed
]

# ---------------------------------------------------------------------------------------------------------------- files
GZ = gzip.compress(lines(*[TALK | {"id": i} for i in range(500)]), mtime=0)


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


def utf16(path):
    path.write_bytes(lines(TALK).decode().encode("utf-16"))


def parquet(table, cut=None):
    with io.BytesIO() as file:
        pq.write_table(pa.table(table), file)
        return file.getvalue()[:cut]


def table(rows, change=lambda folder: None):
    "Writes an Arrow table, and damages it."

    def write(path):
        Dataset.from_list(rows).save_to_disk(str(path))
        change(path)

    return write


def state(content):
    return lambda folder: (folder / "state.json").write_text(content)


def arrow(change):
    def damage(folder):
        (file,) = folder.glob("*.arrow")
        change(file)

    return damage


def flip_offsets(file):
    "Set a byte in the middle of the file of each column's offsets, until reading would lead out of it."
    data = bytearray(file.read_bytes())
    place = data.index(np.arange(0, 60, 2, dtype=np.int32).tobytes())  # offsets of rows of two tokens
    data[place + 40 : place + 44] = b"\xff\xff\xff\x7f"
    file.write_bytes(data)


ROWS = [{"input_ids": [5, 6], "loss_mask": [False, True]}] * 29
DAMAGED = r"c\.jsonl\.gz, after line \d+: the compressed file is cut off or damaged.*Copy it again"
FILES = [  # (name, file, content, error)
    ("gzip cut off", "c.jsonl.gz", GZ[:-30], DAMAGED),
    ("gzip cut off in its head", "c.jsonl.gz", GZ[:5], DAMAGED),
    ("gzip with a wrong byte", "c.jsonl.gz", flipped(GZ, len(GZ) // 2), DAMAGED),
    ("gzip with a wrong checksum", "c.jsonl.gz", flipped(GZ, len(GZ) - 6), DAMAGED),
    ("gzip that is none", "c.jsonl.gz", lines(TALK), DAMAGED),
    ("gzip with more behind it", "c.jsonl.gz", GZ + b"garbage", DAMAGED),
    ("gzip by another name", "c.jsonl", GZ, r"c\.jsonl: is compressed by gzip; give it a name that ends in \.gz"),
    ("UTF-16", "c.jsonl", utf16, r"c\.jsonl, line 1: begins like UTF-16, expected UTF-8.*iconv"),
    ("list in UTF-16", "c.json", utf16, r"c\.json, line 1: begins like UTF-16, expected UTF-8.*iconv"),
    (
        "no line is JSON",
        "c.jsonl",
        "to do:\n- everything\n",
        r"c\.jsonl: 2 of 2 conversations cannot be read.*first is .*line 1: not JSON",
    ),
    (
        "eleven of a hundred lines are broken",
        "c.jsonl",
        lines(*[TALK | {"id": i} for i in range(89)], *["{"] * 11),
        r"c\.jsonl: 11 of 100 conversations cannot be read.*line 90",
    ),
    ("no line holds an object", "c.jsonl", "1\n2\n3\n", r"c\.jsonl: 3 of 3 conversations cannot be read.*holds a int"),
    ("no file", "d.jsonl", "", r"c\.jsonl: no such file or folder"),
    ("an empty file", "c.jsonl", "", "no row left of 0 conversations.*there were none"),
    ("blank lines only", "c.jsonl", "\n \n\r\n", "no row left of 0 conversations.*there were none"),
    ("a file of text", "c.txt", "hello", r"c\.txt: cannot read this kind of file; the name must end in .*\.jsonl"),
    ("an empty list file", "c.json", "", r"c\.json: is empty, expected one list of conversations"),
    ("list cut off", "c.json", json.dumps([TALK, TALK])[:-5], r"c\.json, line 1: not JSON.*Expected one list"),
    (
        "list without its end",
        "c.json",
        json.dumps([TALK, TALK])[:-1],
        r"c\.json, line 1: not JSON \(a comma or the end of the list is missing\)",
    ),
    (
        "list without a comma",
        "c.json",
        f"[{json.dumps(TALK)}\n{json.dumps(TALK)}]",
        r"c\.json, line 2: not JSON \(a comma",
    ),
    ("list with a comma too many", "c.json", f"[{json.dumps(TALK)},\n]", r"c\.json, line 2: not JSON"),
    (
        "list with more behind it",
        "c.json",
        f"[{json.dumps(TALK)}]\n[1]",
        r"c\.json, line 2: there is more after the end of the list",
    ),
    (
        "item nested too deep",
        "c.json",
        f"[{json.dumps(TALK)},\n{DEEP}]",
        r"c\.json, line 2: lists or objects are nested too deep.*conversation a line \(\.jsonl\)",
    ),
    (
        "number of 5000 digits in a list",
        "c.json",
        f"[{json.dumps(TALK)},\n{'9' * 5000}]",
        r"c\.json, line 2: a number of thousands of digits",
    ),
    ("list not in UTF-8", "c.json", b"[\n" + '"café"'.encode("latin-1") + b"]", r"c\.json, line 1: not UTF-8"),
    ("list of numbers", "c.json", "[1, 2, 3]", r"c\.json: 3 of 3 conversations cannot be read.*item 0: holds a int"),
    (
        "messages with a key twice",
        "c.json",
        '[{"role": "user", "role": "user", "content": "x"}]',
        "a key is there twice",
    ),
    (
        "messages, then a key twice",
        "c.json",
        '[{"role": "user", "content": "x"}, {"a": 1, "a": 2}]',
        "a key is there twice",
    ),
    ("Parquet of nothing", "c.parquet", b"", r"c\.parquet, after row 0: damaged, or no Parquet file.*Copy it again"),
    ("Parquet that is none", "c.parquet", b"PAR1 hello PAR1", r"c\.parquet, after row 0: damaged, or no Parquet file"),
    (
        "Parquet cut off",
        "c.parquet",
        parquet({"messages": [[ASK, SAY]] * 9}, -20),
        r"c\.parquet, after row 0: damaged, or no Parquet file",
    ),
    (
        "Parquet with a wrong page",
        "c.parquet",
        flipped(flipped(parquet({"messages": [[ASK, SAY]] * 9}), 6), 8),
        r"c\.parquet, after row \d+: damaged, or no Parquet file",
    ),
    (
        "Parquet of other columns",
        "c.parquet",
        parquet({"text": ["a", "b"]}),
        r"no row left of 2 conversations.*no messages.*\['text'\].*c\.parquet, row 1",
    ),
    (
        "Parquet without rows",
        "c.parquet",
        parquet({"messages": pa.array([], pa.string())}),
        "no row left of 0 conversations",
    ),
    ("an empty folder named like a file", "c.jsonl/.keep", "", r"c\.jsonl: holds no file that ends in .*\.jsonl"),
    ("a folder of records", "c/x.errors.jsonl", "{}", r"c: holds no file that ends in"),
    ("a folder with a broken file", "c/b.jsonl", "{\n{", r"b\.jsonl: 2 of 2 conversations cannot be read"),
    (
        "tables of several splits",
        "c",
        lambda p: (p.mkdir(), (p / "dataset_dict.json").write_text("{}"), table(ROWS)(p / "train")),
        r"c: holds several tables \(train\); name the folder of one",
    ),
    ("table: its record is a list", "c", table(ROWS, state("[]")), r"state\.json: holds a list"),
    (
        "table: its record is nested too deep",
        "c",
        table(ROWS, state("[" * 3000)),
        r"state\.json: not JSON \(nested too deeply\)",
    ),
    (
        "table: its files are elsewhere",
        "c",
        table(ROWS, state('{"_data_files": [{"filename": "../x.arrow"}]}')),
        "leads out of the folder",
    ),
    (
        "table: its file is missing",
        "c",
        table(ROWS, arrow(lambda f: f.unlink())),
        r"data-00000-of-00001\.arrow: no such file, and state\.json names it.*Make or copy the folder again",
    ),
    ("table: its file is empty", "c", table(ROWS, arrow(lambda f: f.write_bytes(b""))), r"c: the table cannot be read"),
    (
        "table: its file is cut off",
        "c",
        table(ROWS, arrow(lambda f: f.write_bytes(f.read_bytes()[:400]))),
        r"c: the table cannot be read",
    ),
    ("table: its offsets lead out of it", "c", table(ROWS, arrow(flip_offsets)), r"c: the table cannot be read"),
    (
        "table of other columns",
        "c",
        table([{"text": "a"}]),
        r"no row left of 1 conversations.*no messages.*\['text'\].*row 0",
    ),
]


def source(name):
    return "c" + name.removeprefix("c").partition("/")[0] if name.startswith("c") else "c.jsonl"


for how, way, table_of in (
    ("prepare", prepared, FILES),
    ("features", tokenised, FILES[:38:4]),
    ("regenerate", answered, FILES[1:8:2]),
):
    CASES += [
        Case(f"{how}: {name}", functools.partial(way, name=source(file)), error, {file: content})
        for name, file, content, error in table_of
    ]
ODD = [  # what looks odd and is a conversation all the same: (name, file, content, report)
    ("byte order mark", "c.jsonl", b"\xef\xbb\xbf" + lines(TALK), "out: 1 training"),
    (
        "byte order mark in the middle",
        "c.jsonl",
        lines(TALK) + b"\xef\xbb\xbf" + lines(said(content="5")),
        "out: 2 training",
    ),
    (
        "ends of lines as on Windows",
        "c.jsonl",
        lines(TALK, said(content="5")).replace(b"\n", b"\r\n"),
        "out: 2 training",
    ),
    ("no end of the last line", "c.jsonl", lines(TALK)[:-1], "out: 1 training"),
    (
        "blank lines between",
        "c.jsonl",
        b"\n\n" + lines(TALK) + b"\n   \n" + lines(said(content="5")),
        "out: 2 training",
    ),
    ("zero character, written out", "c.jsonl", lines(asked("a\0b")), "out: 1 training"),
    ("NaN beside the messages", "c.jsonl", lines(TALK | {"score": float("nan")}), "out: 1 training"),
    ("messages as JSON", "c.jsonl", lines({"messages": json.dumps([ASK, SAY])}), "out: 1 training"),
    ("lines by the name of a list", "c.json", lines(TALK, said(content="5")), "out: 2 training"),
    ("one conversation over several lines", "c.json", json.dumps(TALK, indent=2), "out: 1 training"),
    ("a list of messages", "c.json", json.dumps([ASK, SAY], indent=2), "out: 1 training"),
    ("a list of lists", "c.json", json.dumps([[ASK, SAY], [ASK, SAY | {"content": "5"}]]), "out: 2 training"),
    ("number in a list", "c.json", json.dumps([TALK, 7]), r"holds a int.*c\.json, item 1, 7"),
    (
        "key twice in an item of a list",
        "c.json",
        f'[{json.dumps(TALK)}, {{"id": 1, "id": 2}}]',
        r"a key is there twice.*c\.json, item 1, 'id'",
    ),
    (
        "two gzip members",
        "c.jsonl.gz",
        gzip.compress(lines(TALK)) + gzip.compress(lines(said(content="5"))),
        "out: 2 training",
    ),
    (
        "mask of booleans",
        "c.jsonl",
        lines(ids([5, 6], [False, True])),
        "out: 1 training and 0 validation rows, 2 tokens, 1",
    ),
    ("mask of floats", "c.jsonl", lines(ids([5, 6], [0.0, 1.0])), "out: 1 training and 0 validation rows, 2 tokens, 1"),
    (
        "one chat in two spellings",
        "c.jsonl",
        lines(
            TALK,
            {
                "conversations": [
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "chatgpt", "value": [{"type": "text", "text": "4"}]},
                ]
            },
        ),
        "out: 1 training",
    ),
    (
        "control token of a user",
        "c.jsonl",
        lines(TALK, asked("What does <|im_end|> do?")),
        r"'<\|im_end\|>': 1}.*c\.jsonl, line 2, message 0",
    ),
    (
        "control token of an answer",
        "c.jsonl",
        lines(TALK, said(content="so <|im_start|>")),
        r"'<\|im_start\|>': 1}.*c\.jsonl, line 2, message 1",
    ),
    (
        "a line of 300 MB in a megabyte",
        "c.jsonl.gz",
        lambda p: p.write_bytes(
            gzip.compress(lines(TALK) + b'{"messages": "')
            + gzip.compress(b"x" * (10 << 20)) * 30
            + gzip.compress(b'"}\n')
        ),
        r"longer than 32 MiB.*c\.jsonl\.gz, line 2",
    ),
    (
        "thirty megabytes of text",
        "c.jsonl",
        lambda p: p.write_bytes(lines(TALK, asked("word " * 6_000_000))),
        r"no trained token in the first 2048 \(first: .*c\.jsonl, line 2",
    ),
    (
        "twenty megabytes of empty objects",
        "c.jsonl",
        lambda p: p.write_bytes(lines(TALK, b'{"messages": [' + b"{}," * 7_000_000 + b"{}]}")),
        r"role None is unknown.*c\.jsonl, line 2",
    ),
    (
        "a list of 64 MB",
        "c.json",
        lambda p: p.write_bytes(b"[" + b",".join([json.dumps(TALK | {"id": "x" * 999}).encode()] * 60_000) + b"]"),
        "out: 1 training",
    ),
]
CASES += [
    Case(f"prepare: {name}", functools.partial(prepared, name=file), report, {file: content}, counted=True)
    for name, file, content, report in ODD
]
CASES += [
    Case(
        "features: control token of a user",
        tokenised,
        r"text is read as control tokens: '<\|im_end\|>' in 1 conversations \(first: .*line 2, message 0\)",
        {"c.jsonl": lines(TALK, asked("<|im_end|>"))},
        counted=True,
    ),
    Case(
        "regenerate: control token of a user",
        answered,
        r"spell a control token,<\|im_end\|>,1,.*c\.jsonl, line 2, message 0",
        {"c.jsonl": lines(TALK, asked("<|im_end|>"))},
        counted=True,
    ),
    Case(
        "prepare: twelve long conversations",
        prepared,
        "out: 12 training",
        {
            "c.jsonl": lambda p: p.write_bytes(
                lines(*[{"messages": [ASK, SAY | {"content": f"{i} " * 200_000}]} for i in range(12)])
            )
        },
        counted=True,
    ),
    *(
        Case(f"prepare: {name}", lambda folder, data=data: prepare_data(data, tokenizer(), folder / "out"), error)
        for name, data, error in [
            ("data is a number", 5, "data=5 is a int; expected a file, a folder, hf:<id>, or a list"),
            ("data is one conversation", TALK, "data={.*} is a dict; expected a file"),
            ("data is a DataFrame", pd.DataFrame([TALK]), "data=.* is a DataFrame; expected a file"),
            ("data is None", None, "data=None is a NoneType; expected a file"),
            ("half a name on the hub", "hf:a::b", "'hf:a::b': expected hf:<id>"),
            ("a path with a zero character", "a\0b.jsonl", "no such file or folder"),
        ]
    ),
    Case(
        "read_conversations: a torn line",
        lambda folder: list(read_conversations(folder / "c.jsonl")),
        r"c\.jsonl, line 2: not JSON \(Unterminated string",
        {"c.jsonl": lines(TALK, '{"mess')},
    ),
]

# ---------------------------------------------------------------------------------------------- answers of the verifier
PARAMETERS = [  # fields of a row that decide how it is answered: (field, value, error)
    ("temperature", float("nan"), "temperature: nan is no finite number"),
    ("temperature", -1, "temperature: -1 is out of range; 0 is greedy"),
    ("temperature", 10**400, "temperature: 1000.* is no finite number"),
    ("top_p", 1.5, "top_p: 1.5 is out of range"),
    ("top_k", 5, "top_k: only a server knows"),
    ("chat_template_kwargs", "{", "JSONDecodeError"),
    ("reasoning_effort", 3, "reasoning_effort: 3 is no text"),
]
CASES += [
    Case(
        f"regenerate: {field} of {str(value)[:9]!r}",
        answered,
        rf"failed,.*{error}.*c\.jsonl, line 1",
        {"c.jsonl": lines(TALK | {field: value})},
        counted=True,
    )
    for field, value, error in PARAMETERS
]
GOOD_LINE = {
    "id": "a_gen0",
    "primary_id": "a",
    "part": [0, 1],
    "input_ids": [5, 6],
    "loss_mask": [0, 1],
    "messages": [ASK, SAY],
    "metadata": {},
}
JOURNALS = [  # (name, content of the output file, error)
    ("output is a list", "[]\n", r"o\.jsonl, line 1: no regenerated row.*remove the line, or choose another file"),
    ("output is a conversation", lines(TALK), r"o\.jsonl, line 1: no regenerated row"),
    ("output is a text without an end", "years of work", r"o\.jsonl, line 1: no regenerated row"),
    ("output in another code", "é\n".encode("latin-1"), r"o\.jsonl, line 1: no regenerated row"),
    ("output of zero bytes", b"\0" * 99 + b"\n", r"o\.jsonl, line 1: no regenerated row"),
    ("output nested too deep", "[" * 3000 + "\n", r"o\.jsonl, line 1: no regenerated row"),
    (
        "output without metadata",
        lines({k: v for k, v in GOOD_LINE.items() if k != "metadata"}),
        "no regenerated row.*metadata",
    ),
    (
        "output whose metadata is a list",
        lines(GOOD_LINE | {"metadata": []}),
        "no regenerated row.*metadata must be an object",
    ),
    ("output whose id is a number", lines(GOOD_LINE | {"primary_id": 7}), "no regenerated row.*primary_id text"),
    ("output whose part is text", lines(GOOD_LINE | {"part": "01"}), "no regenerated row.*part is '01'"),
    (
        "output whose part is beyond",
        lines(GOOD_LINE | {"part": [3, 2]}),
        r"no regenerated row.*part is \[3, 2\], expected \[0, 2\]",
    ),
    ("output whose part is negative", lines(GOOD_LINE | {"part": [0, -1]}), r"no regenerated row.*part is \[0, -1\]"),
    (
        "output whose parts are of two",
        lines(GOOD_LINE | {"part": [0, 2]}, GOOD_LINE | {"part": [1, 2], "primary_id": "b"}),
        "line 2: no regenerated row.*another conversation than part 0",
    ),
    (
        "output of another verifier",
        lines(GOOD_LINE | {"metadata": {"verifier": "x"}}),
        "was made with other settings: verifier was x, is .*choose another file",
    ),
    ("output is a folder", lambda path: path.mkdir(), r"o\.jsonl.*is a directory.*(choose another name|remove it)"),
]
CASES += [
    Case(f"regenerate: {name}", answered, error, {"c.jsonl": lines(TALK), "o.jsonl": content})
    for name, content, error in JOURNALS
]
CASES += [
    Case(
        f"read_regenerated: {name}",
        lambda folder: list(read_regenerated(folder / "o.jsonl")),
        error,
        {"o.jsonl": content},
    )
    for name, content, error in [
        *JOURNALS[:6:2],
        ("damaged in the middle", lines(GOOD_LINE, b'{"id": torn', GOOD_LINE), r"o\.jsonl, line 2: no regenerated row"),
    ]
]


def while_another_writes(folder):
    context = multiprocessing.get_context("fork")
    held = context.Event()

    def hold():
        with Journal(folder / "o.jsonl", {}):
            held.set(), context.Event().wait(30)

    other = context.Process(target=hold, daemon=True)
    other.start()
    held.wait(20)
    try:
        return answered(folder)
    finally:
        other.kill()


def untouched(folder):
    "A file of somebody else's is refused, and is what it was."
    before = (folder / "o.jsonl").read_bytes()
    try:
        answered(folder)
    finally:
        assert (folder / "o.jsonl").read_bytes() == before, "the file was changed"


CASES += [
    Case(
        "regenerate: another process writes",
        while_another_writes,
        r"o\.jsonl: another process is writing it; wait for it, or choose another file",
        {"c.jsonl": lines(TALK)},
    ),
    Case(
        "regenerate: a file that is not ours stays",
        untouched,
        "no regenerated row",
        {"c.jsonl": lines(TALK), "o.jsonl": "years of work, one line"},
    ),
    *(
        Case(f"regenerate: {name}", functools.partial(answered, **options), error, {"c.jsonl": content}, counted=True)
        for name, options, content, error in [
            (
                "an id for two conversations",
                {},
                lines(TALK | {"id": 1}, asked("5?") | {"id": 1}),
                "failed,.*its id belongs to another conversation.*line 2",
            ),
            ("no user", {}, lines({"messages": [SAY]}), "failed,.*no user message.*line 1"),
            (
                "a prompt beyond max_length",
                dict(max_length=20),
                lines(TALK, asked("word " * 99)),
                "failed,.*prompt of 20 tokens or more.*line 2",
            ),
            (
                "a prompt of ten megabytes",
                {},
                lambda p: p.write_bytes(lines(TALK, asked("word " * 2_000_000))),
                "failed,.*prompt of 2048 tokens or more.*line 2",
            ),
        ]
    ),
    *(
        Case(f"regenerate: {name}", functools.partial(answered, **options), error, {"c.jsonl": lines(TALK)})
        for name, options, error in [
            ("max_new_tokens 0", dict(max_new_tokens=0), "max_new_tokens=0: must be at least 1"),
            ("batch_size 0", dict(batch_size=0), "batch_size=0: must be at least 1"),
            ("weights NaN", dict(sampling={"temperature": [[0, float("nan")]]}), "temperature: .*nan.* is no number"),
            ("language unknown", dict(languages=["elvish"]), "languages: elvish not known"),
        ]
    ),
    Case(
        "regenerate: torn line in a shell",
        "regenerate {here}/c.jsonl {here}/o.jsonl --verifier {tiny} --max-new-tokens 2",
        r"failed: 1 \(not JSON; first: .*c\.jsonl, line 2\)",
        {"c.jsonl": lines(TALK, '{"mess')},
        counted=True,
    ),
]


# ----------------------------------------------------------------------------------------------------- prepared folders
def folder_of(change, rows=ROWS):
    return table(rows, change)


def record(name, content):
    text = content if isinstance(content, str) else json.dumps(content)
    return folder_of(lambda f: (f / name).write_text(text))


def config(content):
    return record("data_config.json", content)


def freq(content):
    return record("token_freq.json", content)


def into(name, **options):
    "What `prepare_data` says of a conversation; `template`: of a tokenizer with this chat template."

    def what(folder):
        given, tok = dict(options), tokenizer()
        if "template" in given:
            tok = AutoTokenizer.from_pretrained(GOOD["tiny"])
            tok.chat_template = given.pop("template")
        return prepare_data([TALK], tok, folder / name, **given)

    return what


AGAIN = ".*(Make the folder again|make or fetch it again)"
PREPARED = [  # (name, folder, error)
    ("record a list", config("[]"), r"data_config\.json: holds a list, and must hold an object" + AGAIN),
    (
        "record whose model is a text",
        config({"model": "Qwen"}),
        r"data_config\.json: model='Qwen', expected an object" + AGAIN,
    ),
    (
        "record whose split is a text",
        config({"split": "train"}),
        r"data_config\.json: split='train', expected an object" + AGAIN,
    ),
    (
        "record whose split counts texts",
        config({"split": {"train": "29", "val": 0}}),
        r"data_config\.json: split=.*expected numbers of rows" + AGAIN,
    ),
    (
        "record whose split lacks a part",
        config({"split": {"train": 29}}),
        r"data_config\.json: split=.*expected numbers of rows, train and val" + AGAIN,
    ),
    (
        "record whose split is negative",
        config({"split": {"train": 30, "val": -1}}),
        r"split=.*expected numbers of rows" + AGAIN,
    ),
    (
        "record of another run",
        config({"split": {"train": 28, "val": 0}}),
        "data_config.json counts 28 rows, the table has 29.*prepare again",
    ),
    ("record whose report is a list", config({"report": []}), r"report=\[\], expected an object" + AGAIN),
    (
        "record whose stages are a text",
        config({"report": {"stages": "all"}}),
        r"report\.stages='all', expected a list of objects" + AGAIN,
    ),
    ("counts null", freq("null"), r"token_freq\.json: holds a NoneType; expected token id -> count. Delete it"),
    ("counts of words", freq({"the": 3}), r"token_freq\.json: holds .*'the'.*; expected token id -> count"),
    ("counts negative", freq({"6": -29}), r"token_freq\.json: holds -29 for token 6; expected token id -> count"),
    (
        "counts of negative ids",
        freq({"-6": 29}),
        r"token_freq\.json: holds 29 for token -6; expected token id -> count",
    ),
    ("counts that are texts", freq({"6": "29"}), r"token_freq\.json: holds .*str.*; expected token id -> count"),
    (
        "counts of ids beyond the vocabulary",
        freq({"3000": 29}),
        "counts has token ids from 3000 to 3000, but vocab_size=2048",
    ),
    (
        "no mask",
        table([{"input_ids": [5]}]),
        "the table has no column loss_mask.*Is this a prepared folder",
    ),
    (
        "ids of texts",
        table([{"input_ids": ["5"], "loss_mask": [1]}]),
        "column input_ids holds list<.*string>.*expected lists of integers.*Prepare the data again",
    ),
    (
        "mask of texts",
        table([{"input_ids": [5], "loss_mask": ["1"]}]),
        "column loss_mask holds list<.*string>.*expected lists of booleans or integers",
    ),
    (
        "ids without lists",
        table([{"input_ids": 5, "loss_mask": 1}]),
        "column input_ids holds int.*expected lists of integers",
    ),
    (
        "mask of another length",
        folder_of(
            lambda f: None, [{"input_ids": [5, 6], "loss_mask": [1, 1]}, {"input_ids": [5, 6], "loss_mask": [1]}]
        ),
        "row 1 has 2 tokens in input_ids, 1 by loss_mask.*Prepare the data again",
    ),
    (
        "length of another row",
        table([{"input_ids": [5, 6], "loss_mask": [1, 1], "seq_len": 3}]),
        "row 0 has 2 tokens in input_ids, 3 by seq_len",
    ),
    (
        "a row without ids",
        table([{"input_ids": [5], "loss_mask": [1]}, {"input_ids": None, "loss_mask": [1]}]),
        "column input_ids holds .*or nothing in some rows",
    ),
    (
        "ids negative",
        table([{"input_ids": [-5], "loss_mask": [1]}]),
        "input_ids go from -5 to -5, expected token ids from 0 on",
    ),
    (
        "ids beyond any vocabulary",
        table([{"input_ids": [2**32 + 5], "loss_mask": [1]}]),
        "input_ids go from 4294967301 to 4294967301, expected token ids",
    ),
    (
        "ids beyond the vocabulary",
        table([{"input_ids": [3000], "loss_mask": [1]}]),
        "counts has token ids from 3000 to 3000, but vocab_size=2048",
    ),
    ("no table", lambda path: path.mkdir(), r"p: no state\.json, so this is no table"),
]
CASES += [
    Case(f"vocab: {name}", lambda folder: load_prepared(folder / "p").add_vocab_mapping(4, 2048), error, {"p": write})
    for name, write, error in PREPARED
]
CASES += [
    Case(
        "vocab: record null in a shell",
        "vocab {here}/p 4 --vocab-size 2048",
        r"data_config\.json: holds null",
        {"p": config("null")},
    ),
    Case(
        "vocab: model a text in a shell",
        "vocab {here}/p 4",
        r"data_config\.json: model='Qwen', expected an object",
        {"p": config({"model": "Qwen"})},
    ),
    Case(
        "vocab: size unknown",
        "vocab {here}/p 4",
        "the verifier's vocabulary size is not recorded; pass vocab_size",
        {"p": table(ROWS)},
    ),
    Case(
        "vocab: another size than recorded",
        "vocab {here}/p 4 --vocab-size 4096",
        "vocab_size=4096: .* was prepared for a verifier of 2048 tokens; leave it out",
        {"p": config({"model": {"vocab_size": 2048}})},
    ),
    Case(
        "vocab: more than there are",
        "vocab {here}/p 4096 --vocab-size 2048",
        "draft_vocab_size=4096 must lie between 1 and the verifier's vocabulary, 2048",
        {"p": table(ROWS)},
    ),
    *(
        Case(f"prepare: {name}", into("p"), "output_dir .* exists and is not a prepared folder" + more, files)
        for name, files, more in [
            ("a folder that is not prepared", {"p/thesis.tex": "years"}, "; choose a new one"),
            ("into a file", {"p": "years"}, "; choose a new one"),
            ("a record that is a list", {"p": config("[]")}, ""),
        ]
    ),
    Case("prepare: max_length 0", into("p", max_length=0), "max_length=0: must be at least 2"),
    Case("prepare: train_reasoning a text", into("p", train_reasoning="no"), r"train_reasoning='no'"),
    *(
        Case(f"prepare: {name}", into("p", template=template), f"no row left of 1 conversations.*{error}")
        for name, template, error in [
            ("a tokenizer without a template", None, "has no chat_template"),
            (
                "a template that hides the answer",
                "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
                "no trained token",
            ),
            (
                "a template whose answers cannot be told apart",
                "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
                "Mark them in the chat template: {% generation %}",
            ),
        ]
    ),
    Case(
        "prepare: torn line in a shell",
        "prepare {here}/c.jsonl {here}/out --verifier {tiny}",
        r"1 conversation: not JSON \(first: .*c\.jsonl, line 2",
        {"c.jsonl": lines(TALK, '{"mess')},
        counted=True,
    ),
    Case(
        "prepare: control token in a shell",
        "prepare {here}/c.jsonl {here}/out --verifier {tiny}",
        r"1 conversation: <\|im_end\|> \(first: .*c\.jsonl, line 2, message 0",
        {"c.jsonl": lines(TALK, asked("<|im_end|>"))},
        counted=True,
    ),
    Case(
        "prepare: cut gzip in a shell",
        "prepare {here}/c.jsonl.gz {here}/out --verifier {tiny}",
        DAMAGED,
        {"c.jsonl.gz": GZ[:-30]},
    ),
    Case(
        "features: torn line in a shell",
        "features {here}/c.jsonl {here}/out --verifier {tiny}",
        r"1 × not JSON \(first: .*c\.jsonl, line 2",
        {"c.jsonl": lines(TALK, '{"mess')},
        counted=True,
    ),
    Case(
        "features: ids beyond the vocabulary in a shell",
        "features {here}/c.jsonl {here}/out --verifier {tiny}",
        r"1 × a token id beyond the verifier's vocabulary of 2048.*\(first: .*c\.jsonl, line 2",
        {"c.jsonl": lines(TALK, ids([5, 3000]))},
        counted=True,
    ),
]

CASES += [
    Case(
        "report: a table of texts",
        "report {here}/p",
        r"p: the table has no column input_ids, loss_mask, only text\. Is this a prepared folder",
        {"p": table([{"text": "a"}])},
    ),
    Case(
        "report: into the prepared folder",
        "report {here}/p --output-dir {here}/p",
        r"output_dir='.*p': is prepared itself; name another place",
        {"p": table(ROWS)},
    ),
    Case(
        "prepare: a mix with a missing member",
        lambda folder: prepare_data([folder / "a.jsonl", folder / "b.jsonl"], tokenizer(), folder / "p"),
        r"b\.jsonl: no such file or folder",
        {"a.jsonl": lines(TALK)},
    ),
    Case(
        "prepare: a mix with a broken member",
        lambda folder: prepare_data([folder / "a.jsonl", folder / "b.jsonl"], tokenizer(), folder / "p", num_proc=1),
        r"b\.jsonl: 2 of 2 conversations cannot be read",
        {"a.jsonl": lines(TALK), "b.jsonl": "{\n{"},
    ),
]


# --------------------------------------------------------------------------------------------------- draft vocabularies
T2D, D2T = torch.tensor([False, True, False, True]), torch.tensor([1, 2])


def mapping(name, change):
    "Reads a mapping of which one file was changed."

    def what(folder):
        save_vocab_mapping(folder, T2D, D2T)
        file = folder / f"{name}-2.npy"
        content = change(file)
        if content is not None:
            np.save(file, content) if isinstance(content, np.ndarray) else file.write_bytes(content)
        return load_vocab_mapping(folder, 2, 4)

    return what


LYING = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117)
    + b"\n"
)
ARRAYS = [
    ("t2d empty", "t2d", lambda f: b"", r"t2d-2\.npy: no array of numbers.*speculators-nb vocab"),
    ("t2d of text", "t2d", lambda f: b"hello", r"t2d-2\.npy: no array of numbers"),
    ("t2d that promises a terabyte", "d2t", lambda f: LYING, r"d2t-2\.npy: no array of numbers"),
    ("t2d of texts", "t2d", lambda f: np.array(["a", "b"]), r"t2d-2\.npy: no array of numbers"),
    ("t2d of numbers", "t2d", lambda f: np.array([0, 2, 0, 1]), "t2d holds 2, expected 0 and 1"),
    ("t2d of NaN", "t2d", lambda f: np.array([0, np.nan, 0, 1]), "t2d holds nan, expected 0 and 1"),
    ("d2t of halves", "d2t", lambda f: np.array([1.0, 1.5]), "d2t holds 1.5, expected whole numbers"),
    ("d2t of NaN", "d2t", lambda f: np.array([1.0, np.nan]), "d2t holds nan, expected whole numbers"),
    ("d2t of booleans", "d2t", lambda f: np.array([True, True]), "d2t holds torch.bool, expected whole numbers"),
]
CASES += [Case(f"load_vocab_mapping: {name}", mapping(file, change), error) for name, file, change, error in ARRAYS]
COUNTED = [  # (name, ids, mask, error)
    ("lengths differ", [1, 2], [1], "input_ids has 2 tokens, but loss_mask 1"),
    ("ids of halves", [1.5], [1], "input_ids holds 1.5, expected whole numbers"),
    ("ids of booleans", [True], [1], "input_ids holds torch.bool, expected whole numbers"),
    ("mask NaN", [1], [float("nan")], "loss_mask holds nan, expected 0 and 1"),
    ("mask of 3", [1], [3], "loss_mask holds 3, expected 0 and 1"),
]
FREQUENCIES = [  # (name, counts, vocabulary, error)
    ("negative", {1: -3}, 9, "counts has -3 for token 1, expected whole numbers from 0 on"),
    ("a half", {1: 1.5}, 9, "counts has 1.5 for token 1, expected whole numbers"),
    ("NaN", torch.tensor([1.0, float("nan")]), 2, "counts holds nan, expected whole numbers"),
    ("an id of a half", {1.5: 1}, 9, "counts has 1 for token 1.5, expected whole numbers"),
]
READY = [  # (name, input_ids, error)
    ("a tensor of floats", torch.tensor([1.0]), WHOLE),
    ("an array of two rows", np.ones((1, 2), int), WHOLE),
    ("an array beyond the vocabulary", np.array([9]), r"beyond the verifier's vocabulary of 9.*input_ids has 9"),
]
CASES += [
    *(
        Case(
            f"count_tokens: {name}",
            lambda folder, row=(row, mask): count_tokens([tuple(map(torch.tensor, row))], 9),
            error,
        )
        for name, row, mask, error in COUNTED
    ),
    *(
        Case(
            f"vocab_mapping_from_frequencies: {name}",
            lambda folder, counts=counts, size=size: vocab_mapping_from_frequencies(counts, 2, size),
            error,
        )
        for name, counts, size, error in FREQUENCIES
    ),
    *(
        Case(f"ready_row: {name}", lambda folder, row=row: ready_row({"input_ids": row, "loss_mask": [1]}, 9), error)
        for name, row, error in READY
    ),
]
assert os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
