"""A class or function of a notebook as a hash of what it computes.
A changed line or a changed constant gives another hash, a cell that is run again in another process the same."""

import hashlib
import json
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import torch


def _packages(own):
    "The module that a class or function is from, as the first part of its name."
    return (getattr(own, "__module__", None) or "").partition(".")[0]


PLAIN = (str, bytes, int, float, complex, bool, type(None), slice, torch.dtype)


def _of_code(code: CodeType, scope: Mapping, home: str, seen: tuple) -> list:
    "Bytecode, constants, names, and the values of names that are of the same package."
    constants = [
        _of_code(c, scope, home, seen) if isinstance(c, CodeType) else _described(c, home, seen) for c in code.co_consts
    ]
    values = [_described(scope[n], home, seen) for n in code.co_names if n in scope]
    return [code.co_code.hex(), constants, list(code.co_names), values]


def _of_function(function: FunctionType, home: str, seen: tuple) -> list:
    "A function with its defaults and the variables that it closes over."
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    closed = {
        name: _described(cell.cell_contents, home, seen)
        for name, cell in cells
        if name != "__class__"  # the class that is being described
    }
    defaults = [function.__defaults__, function.__kwdefaults__]
    code = _of_code(function.__code__, function.__globals__, home, seen)
    return [code, _described(defaults, home, seen), closed]


def _of_class(own: type, home: str, seen: tuple) -> list:
    "A class with its functions and values, and its bases of the same package."
    members = {}
    for name, value in sorted(vars(own).items()):
        if name.endswith("_cached_value"):
            continue  # transformers keeps on the class what it found out about it
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not name.startswith("__") or (isinstance(function, FunctionType) and _packages(function) == home):
            members[name] = _described(function, home, seen)
    return [own.__qualname__, members, [_described(b, home, seen) for b in own.__bases__]]


def _described(value: Any, home: str, seen: tuple = ()) -> Any:
    "What JSON takes: the code of this package, the names of others."
    if any(value is other for other in seen):
        return "again"
    seen = (*seen, value)
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().cpu().tolist()]
    if isinstance(value, Mapping):
        return [[str(k), _described(v, home, seen)] for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_described(v, home, seen)) for v in value)  # each process has another order
    if isinstance(value, (list, tuple)):
        return [_described(v, home, seen) for v in value]
    if isinstance(value, (type, FunctionType)) and _packages(value) == home:
        if isinstance(value, type):
            return _of_class(value, home, seen)
        return _of_function(value, home, seen)
    if name := getattr(value, "__qualname__", getattr(value, "__name__", None)):
        return f"{getattr(value, '__module__', '')}.{name}"
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__


def code_digest(value: Any) -> str:
    "A hash, 16 hex digits, of what a class or a function, or each of a list of them, computes."
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    text = json.dumps(_described(value, _packages(first)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
