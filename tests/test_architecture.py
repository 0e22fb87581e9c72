"""The floors of docs/architecture.md, held to the code: the table is read from that page, the imports by `ast`."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "speculators_nb"
PAGE = (ROOT / "docs/architecture.md").read_text()


def expand(word):
    "`train/{optim,trainer}` -> train.optim, train.trainer"
    m = re.fullmatch(r"(?:(\w+)/)?(?:\{([\w, ]+)\}|(\w+))", word)
    assert m, f"docs/architecture.md: cannot read the module list {word!r}"
    return [f"{m[1]}.{x.strip()}" if m[1] else x.strip() for x in (m[2] or m[3]).split(",")]


def floors(page=PAGE):
    "module -> (floor, place on it), as the table of the page lists them"
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", page, flags=re.M)
    return {m: (int(floor), i) for floor, cell in rows
            for i, m in enumerate(m for word in re.findall(r"`([^`]+)`", cell) for m in expand(word))}


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FLOOR = floors()
MODULES = {name_of(p): p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("__init__.py", "_modidx.py")}
ALGORITHMS = sorted(m.split(".")[1] for m in FLOOR if m.startswith("models."))


def internal_imports(source, module):
    "Modules of this package that `source` imports, anywhere in it; relative imports resolved"
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ["speculators_nb", *module.split(".")][:-node.level] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{a.name}" for a in node.names}
    found = {m.removeprefix("speculators_nb.") for m in found if m.startswith("speculators_nb.")}
    return {m for m in found if m in FLOOR or m in MODULES}


def may_import(user, used):
    "Lower floor, or further left on the same floor; training and decoding stay apart"
    if {user.split(".")[0], used.split(".")[0]} == {"train", "decode"}:
        return False
    return FLOOR[used][0] < FLOOR[user][0] or (FLOOR[used][0] == FLOOR[user][0] and FLOOR[used][1] < FLOOR[user][1])


def code_words(source):
    "Identifiers and string constants, docstrings and comments left out"
    tree = ast.parse(source)
    docs = {id(n.body[0].value) for n in ast.walk(tree)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(n, clean=False) is not None}
    for n in ast.walk(tree):
        if isinstance(n, ast.Name):
            yield n.id
        elif isinstance(n, ast.Attribute):
            yield n.attr
        elif isinstance(n, (ast.ClassDef, ast.FunctionDef)):
            yield n.name
        elif isinstance(n, ast.arg):
            yield n.arg
        elif isinstance(n, ast.alias):
            yield n.name
        elif isinstance(n, ast.keyword) and n.arg:
            yield n.arg
        elif isinstance(n, ast.ImportFrom) and n.module:
            yield n.module
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs:
            yield n.value


def test_table_is_read():
    assert set(n for n, _ in FLOOR.values()) == {1, 2, 3, 4, 5}
    assert floors("| 2 | `a`, `b/{c,d}` | x |\n| 1 | `e` | y |") == {"a": (2, 0), "b.c": (2, 1), "b.d": (2, 2), "e": (1, 0)}


def test_every_module_has_a_floor():
    assert sorted(set(MODULES) - set(FLOOR)) == [], "name it in the table of docs/architecture.md"


def test_every_listed_module_exists():
    assert sorted(set(FLOOR) - set(MODULES)) == [], "listed in docs/architecture.md, but not in the package"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    used = internal_imports(MODULES[module].read_text(), module)
    assert sorted(m for m in used if not may_import(module, m)) == []


@pytest.mark.parametrize("source,user,wrong", [
    ("from ..utils import seed", "models.eagle3", set()),
    ("def f():\n    from speculators_nb.demo import x", "models.eagle3", {"demo"}),
    ("from .. import demo", "models.eagle3", {"demo"}),
    ("import speculators_nb.decode.accept as a", "train.trainer", {"decode.accept"}),
    ("from .trainer import Trainer", "train.optim", {"train.trainer"}),
])
def test_a_wrong_import_is_seen(source, user, wrong):
    assert {m for m in internal_imports(source, user) if not may_import(user, m)} == wrong


# `plot` gives every drafter one colour everywhere, so its palette must spell their names; the engine's method words, which
# `decode.methods` and `decode.speculative_config` read and write, are such names, and so is a key of its extraction; on the top floor a person chooses one
SPELLS_NAMES = {"plot", "options", "data_generation.connector", "data_generation.extraction", "decode.methods", "decode.speculative_config"}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("models.") and m not in SPELLS_NAMES and FLOOR.get(m, (0,))[0] < 5])
def test_algorithms_are_named_in_their_own_modules_only(module):
    names = re.compile("|".join(ALGORITHMS), re.I)
    assert sorted({w[:60] for w in code_words(MODULES[module].read_text()) if names.search(w)}) == []


def test_an_algorithm_does_not_name_another():
    for module in (m for m in MODULES if m.startswith("models.")):
        own = module.split(".")[1]
        bases = {m.split(".")[1] for m in internal_imports(MODULES[module].read_text(), module) if m.startswith("models.")}
        others = [a for a in ALGORITHMS if a not in {own, *bases} and a not in own]
        for word in code_words(MODULES[module].read_text()):
            assert not any(re.search(rf"(?<![a-z]){a}", word, re.I) for a in others), f"{module} names another algorithm: {word[:60]!r}"
