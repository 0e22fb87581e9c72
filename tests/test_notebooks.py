"""What every notebook in its final form has in common. `tests/notebooks.py` runs them."""

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
IMPORTS = (ast.Import, ast.ImportFrom)


@cache
def cells(path, kind="code"):
    found = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]
    return [{**c, "source": "".join(c["source"])} for c in found]


@cache
def statements(source):
    "The nodes of a cell's code, without magics."
    return ast.parse(re.sub(r"^\s*[%!].*", "", source, flags=re.M)).body


def printed(cell):
    "Everything textual that a cell's stored outputs hold"
    for out in cell["outputs"]:
        yield "".join(out.get("text", []))
        yield from ("".join(v) for k, v in out.get("data", {}).items() if k.startswith("text/"))


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT / "nbs")))


@every_notebook
def test_title_and_claim(path):
    first = json.loads(path.read_text())["cells"][0]
    lines = [line for line in "".join(first["source"]).splitlines() if line.strip()]
    assert first["cell_type"] == "markdown" and re.match(r"# \S", lines[0]) and re.match(r"> \S", lines[1])


def for_types_only(node):
    "`if TYPE_CHECKING:` with imports below it, and stand-ins for the run time"
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and all(isinstance(n, ast.Assign) for n in node.orelse)
        and all(isinstance(n, IMPORTS) for n in node.body)
    )


@every_notebook
def test_imports_stand_alone(path):
    """nbdev's documentation runs any cell that imports, so such a cell must hold imports only, and no wildcard."""
    for c in cells(path):
        if "eval: false" in c["source"]:
            continue
        body = statements(c["source"])
        kinds = {isinstance(n, IMPORTS) or for_types_only(n) for n in body}
        assert len(kinds) < 2, f"cell {c['id']} mixes imports with other code"
        assert not any(a.name == "*" for n in body if isinstance(n, ast.ImportFrom) for a in n.names), (
            f"cell {c['id']}: import *"
        )


@every_notebook
def test_outputs_are_stored_and_clean(path):
    code = cells(path)
    assert any(c["outputs"] for c in code), "no stored outputs: `make notebooks`"
    for c in code:
        assert c["execution_count"] is None, "run nbdev_clean"
        assert not any(o["output_type"] == "error" for o in c["outputs"]), f"cell {c['id']} holds an error"
        text = "\n".join(printed(c))
        assert not (found := unstable(c["outputs"])), (
            f"cell {c['id']} stores {found}: `make notebooks` leaves it out, or mend the cell"
        )
        text = WIDGET_STATE.sub("", text)  # whose limit is widgets.widget.MOST_FROZEN
        assert len(text) < 30_000, f"cell {c['id']} prints {len(text)} characters"


WIDGET_STATE = re.compile(r'<script type="application/json">.*?</script>')
# what is another in the next run, or on the next machine
UNSTABLE = {
    "a path of the machine that ran it": (
        r"(?<![\w.])/(home|root|tmp|work|Users|opt|mnt|private|var/folders)/|\b[A-Z]:\\\\\w"
    ),
    "a memory address": r"\b0x[0-9a-f]{7,}\b",
    "a progress bar": r"\d%\|.*\||<progress\b|\b(it/s|s/it)\]|jupyter-widgets|\[\d\d:\d\d[<,]",
    "a random id of a pandas Styler": r"\bT_[0-9a-f]{5}(_|\b)",
    "a duration": (
        r"\b(in|after|took) \d+(\.\d+)? "
        r"?(s|sec|seconds|ms|min|minutes)\b|\b(seconds|elapsed|duration|runtime)\b['\"]?[:=] ?\d|_per_second['\"]?[:=]"
    ),
}


def unstable(outputs):
    "The first thing among a cell's outputs that two runs do not share, or None"
    for out in outputs:
        if out.get("name") == "stderr" or any("widget" in kind for kind in out.get("data", {})):
            return "standard error or a widget"
        for text in printed({"outputs": [out]}):
            for what, pattern in UNSTABLE.items():
                if found := re.search(pattern, text):
                    return f"{what} ({found[0]!r})"


@pytest.mark.parametrize(
    "text, what",
    [
        ("<module at 0x7f12ab34cd56>", "a memory address"),
        ("0x7f12ab34cd56", "a memory address"),
        ("kept in /tmp/tmpab12/x", "a path"),
        (r"C:\\Users\\me", "a path"),
        ("Loading weights: 100%|██████████| 69/69 [00:00<00:00, 27824.92it/s]", "a progress bar"),
        ("<progress value='3' max='9'>", "a progress bar"),
        ("#T_3fa91_row0_col0 {", "a random id"),
        ("done in 12.5 s", "a duration"),
        ("{'written': 2, 'seconds': 0.02}", "a duration"),
        ("train_samples_per_second: 3.2", "a duration"),
    ],
)
def test_what_is_not_stored_would_be_found(text, what):
    assert unstable([{"output_type": "stream", "name": "stdout", "text": [text]}]).startswith(what)
    assert unstable([{"output_type": "display_data", "data": {"text/html": [text]}}]).startswith(what)
    assert unstable([{"output_type": "stream", "name": "stderr", "text": ["-"]}]) and not unstable(
        [{"output_type": "stream", "name": "stdout", "text": ["97 %, 0x1f, T_cost"]}]
    )


@every_notebook
def test_figures_are_stored_as_pictures(path):
    "Axes print themselves as text, and so does a figure that nobody draws."
    for c in cells(path):
        for o in c["outputs"]:
            text = "".join(o.get("data", {}).get("text/plain", ""))
            assert not text.startswith("<Axes"), f"cell {c['id']} shows {text}: end it with the figure"
            assert not text.startswith("<Figure") or "image/png" in o["data"], (
                f"cell {c['id']} shows {text} without a picture"
            )


@every_notebook
def test_what_must_fail_is_called(path):
    "`expect_fail` is a context manager: without `with` it calls nothing and cannot fail; `test_fail` takes a function."
    for c in cells(path):
        if "expect_fail(" in c["source"]:
            calls = [n.value for part in statements(c["source"]) for n in ast.walk(part) if isinstance(n, ast.Expr)]
            assert not any(ast.unparse(call).startswith("expect_fail(") for call in calls), f"cell {c['id']}"


@every_notebook
def test_relative_links_lead_somewhere(path):
    for c in cells(path, "markdown"):
        for target in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)|(?:src|href)=\"(?![a-z]+:|#)([^\"#]+)", c["source"]):
            assert (path.parent / "".join(target)).exists(), f"cell {c['id']} links to {''.join(target)}"


@every_notebook
def test_pictures_are_small(path):
    for c in cells(path):
        for o in c["outputs"]:
            png = "".join(o.get("data", {}).get("image/png", ""))
            assert len(png) * 3 / 4 <= 100_000, f"cell {c['id']}: a picture of {len(png) * 3 // 4000} kB"


@pytest.mark.parametrize(
    "path", [p for p in NOTEBOOKS if "default_exp" in p.read_text()], ids=lambda p: str(p.relative_to(ROOT / "nbs"))
)
def test_module_notebook_shows_and_asserts(path):
    """A module notebook is documentation and test: it displays something, and something in it can fail."""
    code = [c["source"] for c in cells(path) if not re.search(r"^#\| *export", c["source"], flags=re.M)]
    assert any(re.search(r"\btest_\w+\(|\bassert\b|\bexpect_fail\b", s) for s in code)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "speculators_nb").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_package_does_not_speak_of_the_page(path):
    "A module has no prose around its definitions: its comments and docstrings stand alone."
    found = re.search(
        (
            r"\b(as|see|described|given) (above|below)\b|\bthe "
            r"(rule|text|formula|figure|table|word|section|cell|example)s? (above|below)\b"
        ),
        path.read_text(),
    )
    assert not found, f"{found[0]!r}: say it"


@every_notebook
def test_what_is_imported_is_there(path):
    "Seen here in a second, and not after the minutes that a notebook runs."
    for c in cells(path):
        for node in (n for part in statements(c["source"]) for n in ast.walk(part)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("speculators_nb"):
                module = importlib.import_module(node.module)
                for name in (a.name for a in node.names):
                    there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert there, f"cell {c['id']}: {node.module} has no {name}"
