"""What every notebook in its final form has in common."""
import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
IMPORTS = (ast.Import, ast.ImportFrom)


def cells(path, kind="code"):
    for c in json.loads(path.read_text())["cells"]:
        if c["cell_type"] == kind:
            yield {**c, "source": "".join(c["source"])}


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


@every_notebook
def test_imports_stand_alone(path):
    """nbdev's documentation runs any cell that imports, so such a cell must hold imports only, and no wildcard."""
    for c in cells(path):
        if "eval: false" in c["source"]:
            continue
        body = ast.parse(re.sub(r"^\s*[%!].*", "", c["source"], flags=re.M)).body
        kinds = {isinstance(n, IMPORTS) for n in body}
        assert len(kinds) < 2, f"cell {c['id']} mixes imports with other code"
        assert not any(a.name == "*" for n in body if isinstance(n, ast.ImportFrom) for a in n.names), f"cell {c['id']}: import *"


@every_notebook
def test_outputs_are_stored_and_clean(path):
    code = list(cells(path))
    assert any(c["outputs"] for c in code), "no stored outputs: `make notebooks`"
    for c in code:
        assert c["execution_count"] is None, "run nbdev_clean"
        assert not any(o["output_type"] == "error" for o in c["outputs"]), f"cell {c['id']} holds an error"
        text = "\n".join(printed(c))
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|opt)/", text), f"cell {c['id']} shows a path of the machine that ran it"
        assert " object at 0x" not in text, f"cell {c['id']} shows a memory address"
        assert len(text) < 30_000, f"cell {c['id']} prints {len(text)} characters"


@every_notebook
def test_pictures_are_small(path):
    for c in cells(path):
        for o in c["outputs"]:
            png = "".join(o.get("data", {}).get("image/png", ""))
            assert len(png) * 3 / 4 <= 100_000, f"cell {c['id']}: a picture of {len(png) * 3 // 4000} kB"


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "default_exp" in p.read_text()], ids=lambda p: str(p.relative_to(ROOT / "nbs")))
def test_module_notebook_shows_and_asserts(path):
    """A module notebook is documentation and test: it displays something, and something in it can fail."""
    code = [c["source"] for c in cells(path) if not re.search(r"^#\| *export", c["source"], flags=re.M)]
    assert any(re.search(r"\btest_\w+\(|\bassert\b|\bexpect_fail\b", s) for s in code)
