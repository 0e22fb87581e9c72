"""Ways to spoil a file: each takes a random generator and a good file, and says what then stands there, and which words
an answer must name one of."""

import copy
import io
import json
import math
import os
import pickle
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save


class Spoilt(NamedTuple):
    "A spoilt file."

    story: str  # what was done
    content: bytes | Callable[[Path], object]  # new bytes, or a function that spoils the file at a path
    names: tuple = ()  # besides the file's own name: the field, the value, the line
    excuse: str = ""  # why another result would be right; empty: it would be wrong


class Owned:
    "Leaves a file where it is unpickled."

    def __reduce__(self):
        return (os.mkdir, ("OWNED",))


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


WRONG = (
    None,
    [],
    {},
    "",
    " ",
    "x",
    "16",
    -1,
    -2,
    10**30,
    -(10**30),
    0.5,
    True,
    math.nan,
    math.inf,
    -math.inf,
    [1],
    [None],
    {"a": {}},
    {"": None},
    "\ud800",
    "１６",  # noqa: RUF001 - digits that int() takes
    "a\nb",
    "../../etc/passwd",
    nested(60),
    [[]],
    "é" * 5000,
    2**31,
    2**63,
)


def said(value):
    "How a message may show a value."
    home = os.path.expanduser(value)[:30] if isinstance(value, str) else ""
    return {repr(value)[:30], str(value)[:30], json.dumps(value, default=str)[:30], home} - {""}


def paths_of(tree, at=()):
    "Every place in a tree of dictionaries and lists, its root not."
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from paths_of(value, (*at, key))


def spoil_tree(rng: random.Random, tree, optional=False):
    """A copy with one place changed: (story, tree, names, excuse). With `optional` a field may be missing, and then has
    its default."""
    tree = copy.deepcopy(tree)
    wide = list(paths_of(tree))
    groups = sorted({tuple("#" if isinstance(k, int) or len(str(k)) > 40 else str(k) for k in p[:2]) for p in wide})
    if not wide:
        return "left as it is", tree, (), ""
    head = rng.choice(groups)  # a large list or dictionary does not take every case
    place = rng.choice(
        [p for p in wide if tuple("#" if isinstance(k, int) or len(str(k)) > 40 else str(k) for k in p[:2]) == head]
    )
    parent = tree
    for key in place[:-1]:
        parent = parent[key]
    key, old = place[-1], parent[place[-1]]
    dotted = ".".join(map(str, place))
    fields = tuple(str(k) for k in place if not isinstance(k, int))
    act = rng.choice(("wrong",) * 8 + ("delete", "extra", "rename", "text"))
    if act == "delete" and isinstance(parent, dict):
        del parent[key]
        return f"{dotted} is missing", tree, fields, "a field that is left out has its default" if optional else ""
    if act == "extra" and isinstance(parent, dict):
        parent["ünknown field"] = rng.choice(WRONG)
        return f"beside {dotted} stands a field that nobody knows", tree, ("ünknown field",), ""
    if act == "rename" and isinstance(parent, dict):
        parent[str(key).upper() + "_"] = parent.pop(key)
        return (
            f"{dotted} is called {str(key).upper()}_",
            tree,
            (*fields, str(key).upper() + "_"),
            "a field that is left out has its default" if optional else "",
        )
    new = str(old) if act == "text" else rng.choice(WRONG)
    if (isinstance(old, float) and isinstance(new, float) and math.isfinite(new)) or (
        type(old) is type(new) is int and 0 <= new < 2 * old
    ):
        new = math.nan
    parent[key] = new
    return f"{dotted} is {str(new)[:40]!r}, was {str(old)[:40]!r}", tree, (*fields, *said(new)), ""


def whole(rng: random.Random, source: Path, others: list) -> Spoilt:
    "What can happen to any file."
    content = source.read_bytes()
    size = len(content)

    def remove(path):
        path.unlink()

    def folder(path):
        path.unlink(), path.mkdir()

    def loop(path):
        path.unlink(), path.symlink_to(path.name)

    def dangling(path):
        path.unlink(), path.symlink_to("nowhere/at all")

    def fifo(path):
        path.unlink(), os.mkfifo(path)

    def unreadable(path):
        path.chmod(0)

    def listening(path):
        path.unlink()
        socket.socket(socket.AF_UNIX).bind(str(path))

    def memory(path):
        path.unlink(), path.symlink_to("/proc/self/mem")

    def endless(path):
        path.unlink(), path.symlink_to("/dev/zero")

    def huge(path):
        path.write_bytes(b"")
        os.truncate(path, 6 << 30)  # a hole: it takes no room on the disk

    ways = {
        "is missing": remove,
        "is a folder": folder,
        "is a link to itself": loop,
        "is a dangling link": dangling,
        "is a pipe": fifo,
        "is a socket": listening,
        "may not be read": unreadable,
        "is a link to the memory": memory,
        "is a link to /dev/zero": endless,
        "is 6 GB of nothing": huge,
        "is empty": b"",
        "is noise": rng.randbytes(rng.choice((1, 7, 300, 70000))),
        "is one zero byte": b"\0",
        "is zeros": bytes(size),
        "is a picture": b"\x89PNG\r\n\x1a\n" + rng.randbytes(200),
        "is a pickle with code": pickle.dumps(Owned()),
        "is HTML": b"<!doctype html><title>404</title>Not found",
    }
    if source.suffix in (".safetensors", ".arrow"):  # these are mapped into memory, as large as they are
        del ways["is 6 GB of nothing"]
    if size > 1:
        cut = rng.choice((1, size // 2, size - 1, min(size - 1, 8), rng.randrange(1, size)))
        ways[f"is cut to {cut} bytes"] = content[:cut]
    if others:
        other = rng.choice(others)
        ways[f"is {other.name} instead"] = other.read_bytes()
    story = rng.choice(list(ways))
    return Spoilt(story, ways[story])


def json_file(rng: random.Random, source: Path) -> Spoilt:
    tree = json.loads(source.read_bytes())
    raw = source.read_bytes()
    odd = {
        "begins with a byte order mark": b"\xef\xbb\xbf" + raw,
        "is UTF-16": raw.decode().encode("utf-16"),
        "stands there twice": raw + raw,
        "is null": b"null",
        "is a number": b"5",
        "is a text": b'"text"',
        "is a list of itself": b"[" + raw + b"]",
        "is empty object": b"{}",
        "is empty list": b"[]",
        "is 100,000 levels deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "is brackets": b"[" * 200_000,
        "has a comma too many": raw.rstrip()[:-1] + b",}",
        "holds a byte that is no UTF-8": raw.replace(b'"', b'"\xff', 1),
        "has a number of 10,000 digits": b'{"a":' + b"9" * 10_000 + b"}",
    }
    if rng.random() < 0.25:
        story = rng.choice(list(odd))
        return Spoilt(story, odd[story])
    story, tree, names, excuse = spoil_tree(rng, tree, optional="config.json" in source.name)
    if source.name == "config.json" and story.startswith(("label2id", "id2label")):
        excuse = "labels of a classifier are passed on, and nothing reads them"
    return Spoilt(story, json.dumps(tree).encode(), names, excuse)


def jsonl_file(rng: random.Random, source: Path) -> Spoilt:
    lines = source.read_bytes().splitlines()
    i = rng.randrange(len(lines))
    line = lines[i]
    names = (f"line {i + 1}",)
    odd = {
        "is cut": line[: rng.randrange(1, len(line))],
        "is no UTF-8": line.replace(b'"', b'"\xff\xfe', 1),
        "is null": b"null",
        "is a number": b"7",
        "is a list": b"[" + line + b"]",
        "is noise": rng.randbytes(90).replace(b"\n", b" "),
        "is a brace": b"{",
        "is deep": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "has a zero byte": line[:20] + b"\0" + line[20:],
        "is 60 MB of text": b'{"messages":[{"role":"user","content":"'
        + b"a" * 60_000_000
        + b'"},{"role":"assistant","content":"b"}]}',
        "is 30 MB that never ends": b'{"messages": "' + b"x" * 30_000_000,
        "holds two rows": line + line,
        "is {}": b"{}",
        "has no messages": b'{"messages": []}',
        "has a key twice": b'{"messages": 5, ' + line[1:],
        "has 200,000 messages": b'{"messages":['
        + b",".join([b'{"role":"user","content":"a"},{"role":"assistant","content":"b"}'] * 100_000)
        + b"]}",
        "is empty": b"",
        "is Markdown": b"# heading",
        "is followed by an empty one": line + b"\n",
        "ends with CR": line + b"\r",
        "has blanks before": b"   " + line,
    }
    if rng.random() < 0.35:
        story = rng.choice(list(odd))
        lines[i] = odd[story]
        harmless = "no row stands there" if story == "is empty" else ""
        return Spoilt(f"line {i + 1} {story}", b"\n".join(lines) + b"\n", names, harmless)
    story, row, more, _ = spoil_tree(rng, json.loads(line))
    lines[i] = json.dumps(row).encode()
    return Spoilt(f"line {i + 1}: {story}", b"\n".join(lines) + b"\n", names + more)


def safetensors_file(rng: random.Random, source: Path) -> Spoilt:
    raw = source.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    tensors = load_file(source)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    act = rng.choice(
        (
            "flip",
            "flip",
            "length",
            "header",
            "header",
            "dtype",
            "value",
            "value",
            "value",
            "shape",
            "shape",
            "rename",
            "remove",
            "extra",
            "scalar",
            "none",
        )
    )
    if act == "flip":
        at, bit = rng.randrange(8 + size), rng.randrange(8)
        flipped = bytearray(raw)
        flipped[at] ^= 1 << bit
        return Spoilt(f"bit {bit} of byte {at} of the header is flipped", bytes(flipped), tuple(sorted(tensors)))
    if act == "length":
        length = rng.choice((0, 1, 2**63 - 1, 2**40, size - 1, size + 1, len(raw)))
        return Spoilt(f"its header claims {length} bytes", struct.pack("<Q", length) + raw[8:])
    if act == "header":
        story, header, names, _ = spoil_tree(rng, header)
        text = json.dumps(header).encode()
        return Spoilt(f"header: {story}", struct.pack("<Q", len(text)) + text + body, names)
    if act == "none":
        return Spoilt("holds no tensor", save({}), tuple(sorted(tensors)))
    if act == "remove":
        del tensors[name]
    elif act == "rename":
        tensors[name.upper() + "."] = tensors.pop(name)
    elif act == "extra":
        tensors["layers.99.unknown.weight"] = torch.zeros(3)
    elif act == "scalar":
        tensors[name] = torch.tensor(1)
    elif act == "dtype":
        kind = rng.choice((torch.int64, torch.float64, torch.bool, torch.uint8, torch.complex64, torch.int8))
        tensors[name] = tensor.to(kind)
        act = f"{kind}"
    elif act == "shape":
        shapes = {
            "without its last row": tensor[:-1],
            "with a row more": torch.cat([tensor, tensor[-1:]]) if tensor.dim() else tensor,
            "with an axis more": tensor[None],
            "flat": tensor.flatten(),
            "without elements": tensor[:0],
            "with one element a row": tensor[..., :1],
        }
        shapes = {k: v for k, v in shapes.items() if v.shape != tensor.shape}
        if not shapes:
            return Spoilt("left as it is", raw)
        act = rng.choice(list(shapes))
        tensors[name] = shapes[act].contiguous()
    elif tensor.dtype.is_floating_point:
        act = rng.choice((math.nan, math.inf, -math.inf))
        flat = tensor.flatten().clone()
        flat[rng.randrange(len(flat))] = act
        tensors[name] = flat.view(tensor.shape)
    elif tensor.dtype == torch.bool:
        tensors[name] = ~tensor
        act = "inverted"
    else:
        act = rng.choice((-1, -(2**40), 2**31 + 5, 10**9, 64, 2048))
        flat = tensor.flatten().clone()
        flat[rng.randrange(len(flat))] = act
        tensors[name] = flat.view(tensor.shape)
    return Spoilt(
        f"{name}: {act}",
        save({k: v.clone() for k, v in tensors.items()}, {"format": "pt"}),
        (name, name.split(".")[-1]),
    )


def npy_file(rng: random.Random, source: Path) -> Spoilt:
    array = np.load(source)
    ways = {
        "other dtype": array.astype(rng.choice(("float64", "U5", "complex64", "int8"))),
        "shorter": array[:-1],
        "longer": np.append(array, array[-1:]),
        "two axes": array[None],
        "out of range": np.where(np.arange(len(array)) == 1, 10**6, array),
        "negative": -array.astype(int) - 5,
        "all zero": array * 0,
        "objects": np.array([None, {}]),
        "scalar": np.array(3),
    }
    story = rng.choice(list(ways))
    file = io.BytesIO()
    np.save(file, ways[story], allow_pickle=True)
    return Spoilt(story, file.getvalue())


def table_file(rng: random.Random, source: Path) -> Spoilt:
    "A CSV file with a header."
    rows = [line.split(",") for line in source.read_text().splitlines()]
    i, j = rng.randrange(1, max(2, len(rows))), rng.randrange(len(rows[0]))
    names = (rows[0][j], f"line {i + 1}", f"row {i}")
    act = rng.choice(("cell", "cell", "cell", "column", "names", "short", "nothing"))
    if act == "cell" and len(rows) > 1:
        rows[i][j] = rng.choice(("abc", "-1", "inf", "1e999", "{}", '"a""', "１", "[1]"))  # noqa: RUF001
        names += (rows[i][j],)
        act = f"{rows[0][j]} in row {i} is {rows[i][j]}"
    elif act == "column":
        act = f"without column {rows[0][j]}"
        rows = [r[:j] + r[j + 1 :] for r in rows]
    elif act == "names":
        rows = rows[1:]
    elif act == "short" and len(rows) > 1:
        rows[i] = rows[i][:j]
    else:
        rows = rows[:1]
    return Spoilt(act, "\n".join(map(",".join, rows)).encode() + b"\n", names)


def template_file(rng: random.Random, source: Path) -> Spoilt:
    "A chat template."
    ways = {
        "is not closed": "{% for m in messages %}",
        "calls what is not there": "{{ nobody(messages) }}",
        "never ends": "{% for i in range(10**9) %}x{% endfor %}",
        "is nothing": "{# nothing #}",
        "asks for a class": "{{ ''.__class__.__mro__ }}",
        "raises": "{{ raise_exception('no') }}",
        "divides by zero": "{{ 1 // 0 }}",
        "multiplies text": "{{ 'x' * 10**10 }}",
        "calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "includes a file": "{% include '/etc/passwd' %}",
        "says the same of all": "hello",
        "powers": "{{ 9**9**9 }}",
    }
    story = rng.choice(list(ways))
    return Spoilt(
        story,
        ways[story].encode(),
        excuse="a template may say what it likes" if story in ("says the same of all", "powers") else "",
    )


def pytorch_file(rng: random.Random, source: Path) -> Spoilt:
    "What torch.save wrote: the state of an optimizer, a schedule, random generators, or counts."
    act = rng.choice(("code", "list", "empty", "nan", "key", "type"))
    tree = torch.load(source, weights_only=False)
    if act == "code":
        tree = {"state": Owned()}
    elif act == "list":
        tree = [tree]
    elif act == "empty" or not isinstance(tree, dict) or not tree:
        tree = {}
    elif act == "key":
        key = rng.choice(sorted(tree, key=str))
        tree.pop(key)
        act = f"without {key}"
    elif act == "type":
        key = rng.choice(sorted(tree, key=str))
        tree[key] = rng.choice((None, "x", -1, [], torch.zeros(2)))
        act = f"{key} is {tree[key]!r}"
    else:
        found = 0
        for part in tree.get("state", {}).values() if isinstance(tree.get("state"), dict) else ():
            for value in part.values():
                if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.numel() > 1:
                    value.view(-1)[0], found = math.nan, found + 1
        act = f"{found} tensors hold nan"
    file = io.BytesIO()
    torch.save(tree, file)
    return Spoilt(act, file.getvalue())


KINDS = {
    ".json": json_file,
    ".jsonl": jsonl_file,
    ".safetensors": safetensors_file,
    ".npy": npy_file,
    ".csv": table_file,
    ".jinja": template_file,
    ".pt": pytorch_file,
    ".pth": pytorch_file,
}


def spoil(rng: random.Random, source: Path, others: list) -> Spoilt:
    "Spoil a file in a way that fits its kind, or in one that fits all. `others`: files that may stand in its place."
    kind = KINDS.get(source.suffix)
    if kind is None or rng.random() < 0.3:
        return whole(rng, source, others)
    return kind(rng, source)


def apply(spoilt: Spoilt, path: Path):
    "Spoil the file at a path, which may be spoilt already."
    if path.is_symlink() or not path.is_file():
        return
    if callable(spoilt.content):
        spoilt.content(path)
    else:
        path.write_bytes(spoilt.content)


def copy_of(source: Path, target: Path):
    "A file or a folder, writable."
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
