"""Run the cells of the notebooks that carry nbdev's flag `cuda`, each after the cells before it, as plain Python.

A notebook runs in its own folder, as nbdev runs it. There is no IPython: magics are left out, `display` shows nothing.
"""

import json
import re
from contextlib import chdir
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = re.compile(r"^\s*#\|\s*(eval:\s*false|slow\b|vllm\b)", re.M)
FLAG = re.compile(r"^\s*#\|\s*cuda\b", re.M)


def code_cells(path):
    """Sources of the code cells, without IPython's magics."""
    cells = json.loads(Path(path).read_text())["cells"]
    sources = ("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return [re.sub(r"^\s*[%!].*$", "", source, flags=re.M) for source in sources]


def flagged(folder=ROOT / "nbs"):
    """Notebooks with at least one such cell."""
    return [
        path
        for path in sorted(Path(folder).rglob("*.ipynb"))
        if any(FLAG.search(source) for source in code_cells(path))
    ]


def run_notebook(path):
    """How many flagged cells ran. What a cell before them raises is raised."""
    sources, ran = code_cells(path), 0
    last = max(i for i, source in enumerate(sources) if FLAG.search(source))
    space = {"__name__": "__main__", "display": lambda *_, **__: None}
    with chdir(path.parent):
        for source in sources[: last + 1]:
            if not SKIPPED.search(source):
                exec(compile(source, str(path), "exec"), space)
                ran += bool(FLAG.search(source))
    return ran


def run(cell, turn):
    """The row of one notebook."""
    yield dict(notebook=cell["labels"]["notebook"], cells=run_notebook(ROOT / cell["labels"]["notebook"]), ok=True)
