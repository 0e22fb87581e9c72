"""The packages of docs/architecture.md, held to the code: the table is read from that page, the imports by `ast`."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "speculators_nb"
PAGE = (ROOT / "docs/architecture.md").read_text()
BY_HAND = {"_aliases"}  # the only module without a notebook


def packages(page=PAGE):
    "package -> packages that the table says it imports, in the table's order"
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", page.split("\n## Three walks")[0], flags=re.M)
    found = {}
    for package, cell in rows:
        named = re.findall(r"`(\w+)`", cell)
        found[package] = set(found) - set(named) if cell.startswith("all above") else set(named)
    return found


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def numbered():
    "module -> number of its notebook"
    books = (
        re.fullmatch(r"nbs/(\w+)/(\d\d)_(\w+)\.ipynb", p.relative_to(ROOT).as_posix())
        for p in (ROOT / "nbs").glob("*/*.ipynb")
    )
    return {f"{m[1]}.{m[3]}": int(m[2]) for m in books if m and m[1] != "tutorials"}


TABLE = packages()
NUMBER = numbered()
MODULES = {
    name_of(p): p
    for p in sorted(PACKAGE.rglob("*.py"))
    if p.name not in ("__init__.py", "_modidx.py") and name_of(p) not in BY_HAND
}
ALGORITHMS = sorted(
    m.split(".")[1]
    for m, p in MODULES.items()
    if m.startswith("models.") and re.search(r"^@SpeculatorModel.register\(", p.read_text(), flags=re.M)
)
# a part of a drafter is named after it: `mtp_network`, `peagle_rollouts`
PARTS = {m for m in MODULES if m.startswith(tuple(f"models.{a}_" for a in ALGORITHMS))}
# modules that read and write the checkpoints of other projects -> the drafters whose formats they register
FORMATS = {
    m: set(re.findall(r'model_type="(\w+)"', p.read_text()))
    for m, p in MODULES.items()
    if m.startswith("models.")
    and m.split(".")[1] not in ALGORITHMS
    and re.search(r"^register_format\(", p.read_text(), flags=re.M)
}


def internal_imports(source, module):
    "Modules of this package that `source` imports, anywhere in it; relative imports resolved"
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ["speculators_nb", *module.split(".")][: -node.level] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{a.name}" for a in node.names}
    found = {m.removeprefix("speculators_nb.") for m in found if m.startswith("speculators_nb.")}
    return {m for m in found if m in MODULES}


def may_import(user, used):
    "A package that the table names, or a lower number in the same package"
    a, b = user.split(".")[0], used.split(".")[0]
    return NUMBER[used] < NUMBER[user] if a == b else b in TABLE[a]


def code_words(source):
    "Identifiers and string constants, docstrings and comments left out"
    tree = ast.parse(source)
    docs = {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(n, clean=False) is not None
    }
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
    assert packages("| `a` | x | |\n| `b` | y | `a` |\n| `c` | z | all above but `a` |\n| `d` | z | all above |\n") == {
        "a": set(),
        "b": {"a"},
        "c": {"b"},
        "d": {"a", "b", "c"},
    }
    assert next(iter(TABLE)) == "core" and list(TABLE)[-1] == "cli"


def test_every_notebook_is_the_source_of_the_module_of_its_name():
    said = {
        f"{p.parent.name}.{p.stem.partition('_')[2]}": re.search(r"#\| default_exp ([\w.]+)", p.read_text())[1]
        for p in (ROOT / "nbs").glob("*/*.ipynb")
        if p.parent.name != "tutorials"
    }
    assert said == {m: m for m in said}
    assert sorted(said) == sorted(MODULES)
    assert not any("default_exp" in p.read_text() for p in (ROOT / "nbs").glob("tutorials/*.ipynb"))


def test_numbers_have_no_gaps_and_no_repeats():
    folders = {p.parent.name for p in (ROOT / "nbs").glob("*/*.ipynb")}
    for folder in folders:
        numbers = sorted(int(p.name[:2]) for p in (ROOT / "nbs" / folder).glob("*.ipynb"))
        assert numbers == list(range(1, len(numbers) + 1)), folder


def test_every_package_has_a_row_in_the_table():
    assert set(TABLE) == {m.split(".")[0] for m in MODULES}, (
        "a package without a row in the table of docs/architecture.md, or the reverse"
    )


def test_no_line_of_the_package_is_longer_than_120():
    """But nbdev's own, `__all__` and the file's index, and what a pragma for the type checker adds."""
    long = {}
    for module, path in MODULES.items():
        text = re.sub(r"^__all__ = \[.*?\]$", "", path.read_text(), flags=re.M | re.S)
        lines = [re.sub(r" +# pyright: .*", "", line) for line in text.splitlines()]
        long |= {f"{module}: {line[:60]}": len(line) for line in lines if len(line) > 120}
    assert long == {}, "shorten it; a claim of several sentences has several lines that begin with `> `"


def test_the_table_has_one_direction():
    above = set()
    for package, used in TABLE.items():
        assert used <= above, package
        above.add(package)


@pytest.mark.parametrize("module", MODULES)
def test_imports_have_one_direction(module):
    used = internal_imports(MODULES[module].read_text(), module)
    assert sorted(m for m in used if not may_import(module, m)) == []


def test_the_table_names_no_import_that_is_not_there():
    used = {package: set() for package in TABLE}
    for module, path in MODULES.items():
        package = module.split(".")[0]
        used[package] |= {m.split(".")[0] for m in internal_imports(path.read_text(), module)} - {package}
    assert used == TABLE


@pytest.mark.parametrize(
    "source,user,wrong",
    [
        ("from ..core.files import atomic_write", "models.eagle3", set()),
        ("def f():\n    from speculators_nb.cli.demo import x", "models.eagle3", {"cli.demo"}),
        ("from ..cli import demo", "models.eagle3", {"cli.demo"}),
        ("import speculators_nb.decode.generate as g", "train.trainer", {"decode.generate"}),
        ("from .trainer import Trainer", "train.optimizers", {"train.trainer"}),
    ],
)
def test_a_wrong_import_is_seen(source, user, wrong):
    assert {m for m in internal_imports(source, user) if not may_import(user, m)} == wrong


def test_every_path_on_the_page_exists():
    words = re.findall(r"`([a-z_]+\.[a-z_]+)(?:\.\w+)?`", PAGE)
    named = {w for w in words if w.split(".")[0] in TABLE}
    assert sorted(named - set(MODULES)) == []
    assert len(named) > 15


# `plot` gives every drafter one colour everywhere, so its palette must spell their names; the engine's method words,
# which modules of `serve` read and write, are such names, and so is a key of its extraction; `cli` and `lab` have a
# default, and HASS
SPELLS_NAMES = {
    "cli.inputs",  # the command stitch-mtp; so does `cli.main`
    "cli.main",
    "core.plot",
    "core.option_relations",
    "core.options",
    "serve.vllm_connector",
    "serve.mooncake_connector",
    "features.extraction_client",
    "serve.vllm_methods",
    "serve.speculative_fields",
    "serve.draft_method",
    "serve.draft_and_target",
    "serve.checked_fields",
    "serve.speculative_config",
}


@pytest.mark.parametrize(
    "module",
    [m for m in MODULES if m not in SPELLS_NAMES | PARTS | set(FORMATS) and m.split(".")[1] not in ALGORITHMS],
)
def test_algorithms_are_named_in_their_own_modules_only(module):
    names = re.compile("|".join(ALGORITHMS), re.I)
    default = {"eagle", "eagle3"} if module.split(".")[0] in ("cli", "lab") else set()
    found = {w[:60] for w in code_words(MODULES[module].read_text()) if names.search(w)}
    assert sorted(found - default) == []


def test_an_algorithm_does_not_name_another():
    for module in (f"models.{a}" for a in ALGORITHMS):
        own = module.split(".")[1]
        used = internal_imports(MODULES[module].read_text(), module)
        assert not any(m.startswith("models.formats_") for m in used), "formats import drafters, not the reverse"
        bases = {m.split(".")[1] for m in used if m.startswith("models.")}
        others = [a for a in ALGORITHMS if a not in {own, *bases} and a not in own]
        for word in code_words(MODULES[module].read_text()):
            assert not any(re.search(rf"(?<![a-z]){a}", word, re.I) for a in others), (
                f"{module} names another algorithm: {word[:60]!r}"
            )


@pytest.mark.parametrize("module", FORMATS)
def test_a_format_names_only_the_drafters_whose_checkpoints_it_reads(module):
    own = FORMATS[module]
    others = [a for a in ALGORITHMS if not any(a == kind or a.startswith(kind + "_") for kind in own)]
    words = set(code_words(MODULES[module].read_text()))
    assert own and not [w[:60] for w in words for a in others if re.search(rf"(?<![a-z]){a}", w, re.I)]


def test_the_formats_are_found():
    assert {"models.formats_eagle", "models.formats_dflash", "models.formats_token_heads"} <= set(FORMATS)


def test_workers_end_with_their_parent():
    "Every pool of processes begins with `end_with_parent`: its workers would outlive a parent that is killed."
    pools = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        functions = {n.name: ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            if ast.unparse(call.func).endswith("ProcessPoolExecutor"):
                first = ast.unparse(call.args[2]) if len(call.args) > 2 else ""
                pools[module] = "end_with_parent" in functions.get(first, first)
    assert pools == dict.fromkeys(pools, True) and {"data.pipeline", "lab.grid"} <= pools.keys()
