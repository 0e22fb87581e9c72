"""tests/notebooks.py: what it runs, what it calls a failure, what it stores. Small notebooks, each about one thing, in
a project of their own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = """
[project]
name = "toy"
version = "0.1"
[tool.nbdev]
nbs_path = "nbs"
lib_path = "toy"
tst_flags = "cuda slow"
"""
DRAW = "fig, ax = new_axes(2, 1)\nax.plot([1, 2]);"
IMPORT = "from speculators_nb.core.plot import new_axes"

# name -> sources of its cells; "md:---" begins front matter
NOTEBOOKS = {
    "first_figure": [IMPORT, DRAW, DRAW],
    "figures": [
        IMPORT,
        "import matplotlib.pyplot as plt",
        "fig, ax = new_axes(2, 1)\nax.axis('off');",
        "fig = plt.figure(figsize=(1, 1))",
        f"{DRAW}\nplt.close(fig)\nax",
        "fig, ax = new_axes(2, 1)\nax.plot([1, 2])\nfig",
    ],
    "lost": [IMPORT, "import matplotlib.pyplot as plt", f"{DRAW}\nplt.close(fig)"],
    "fails": ["x = 1", "assert x == 2, 'x is not two'", "x = 3"],
    "hangs": ["import time", "time.sleep(600)"],
    "dies": ["import os", "os._exit(3)"],
    "skips": [
        "ran = []",
        "#| eval: false\nraise SystemError",
        "#| slow\nran.append('slow')\n'slow ran'",
        "#| cuda\nraise SystemError",
        "#| eval: true\nran.append('eval')",
        "print(*ran)",
    ],
    "skips_all": ["md:---\nskip_exec: true\n---", "raise SystemError"],
    "defaults": ["md:---\neval: false\n---", "raise SystemError", "#| eval: true\nprint('only this')"],
    "unstable": [
        "import sys, time, warnings\nfrom IPython.display import HTML, display",
        "from tqdm.auto import tqdm\nfrom tqdm import tqdm as text_bar",
        "for _ in tqdm(range(3)): time.sleep(.01)\nfor _ in text_bar(range(3), file=sys.stdout): time.sleep(.01)",
        "for _ in text_bar(range(3), file=sys.stdout): time.sleep(.01)\nprint('after the bar')",
        "warnings.warn('noise')\nprint('noise', file=sys.stderr)",
        "bar = display(HTML('<progress value=1>'), display_id=True)\nbar.update(HTML('<progress value=2>'))",
        "object()",
        "print(object())",
        "print('a\\rb')\nsys.stdout.flush()\nprint('c')",
        IMPORT,
        DRAW,
        "print('a')\ndisplay(HTML('<progress value=1>'))\nprint('b')",
    ],
    "place": [
        "from pathlib import Path",
        "Path.cwd().name, Path('place.ipynb').exists(), __name__, get_ipython().__class__.__name__",
    ],
}


def write(path, sources):
    cells = []
    for i, source in enumerate(sources):
        kind = "markdown" if source.startswith("md:") else "code"
        cell = {"cell_type": kind, "id": f"c{i}", "metadata": {}, "source": source.removeprefix("md:").splitlines(True)}
        if source.startswith("md:---"):
            cell["cell_type"] = "raw"
        cells.append({**cell, "execution_count": None, "outputs": []} if cell["cell_type"] == "code" else cell)
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    nb = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(nb))


def outputs(path):
    "cell id -> its stored outputs"
    return {c["id"]: c["outputs"] for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"}


def texts(outs):
    "What a reader sees of a cell's outputs"
    return ["".join(o.get("text") or o["data"].get("text/plain", "")) for o in outs]


# what the toys import, and not what ours import
RUN = """
import sys, notebooks
notebooks.WARM = ["ipykernel.kernelapp", "matplotlib.pyplot", "nbclient", "nbdev.test"]
sys.exit(notebooks.main())
"""


def run(*arguments):
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}  # ipykernel captures less where it is set
    env["PYTHONPATH"] = str(ROOT / "tests")
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)


def store_a_picture(path, cell):
    "As if the cell had shown one more picture when it was stored"
    nb = json.loads(path.read_text())
    data = {"image/png": "iVBORw0KGgo=", "text/plain": ["<Figure>"]}
    nb["cells"][cell]["outputs"].append({"output_type": "display_data", "metadata": {}, "data": data})
    path.write_text(json.dumps(nb))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    "The notebooks after one run that stores: (their folder, what the run said)"
    root = tmp_path_factory.mktemp("toy")
    (root / "pyproject.toml").write_text(SETTINGS)
    nbs = root / "nbs"
    nbs.mkdir()
    for name, sources in NOTEBOOKS.items():
        write(nbs / f"{name}.ipynb", sources)
    store_a_picture(nbs / "lost.ipynb", 2)
    (nbs / "untested").mkdir()
    (nbs / "untested/.notest").touch()
    write(nbs / "untested/broken.ipynb", ["raise SystemError"])
    return nbs, run(nbs, "--save", "--minutes", "0.25", "--flags", "slow")


@pytest.fixture(scope="module")
def again(project):
    "What a run that stores nothing says of them afterwards"
    nbs, _ = project
    store_a_picture(nbs / "place.ipynb", 1)
    write(nbs / "defaults.ipynb", NOTEBOOKS["defaults"])  # nothing is stored
    before = {p: p.read_bytes() for p in nbs.glob("*.ipynb")}
    said = run(*(nbs / f"{name}.ipynb" for name in ("first_figure", "skips", "unstable", "place", "defaults")))
    assert {p: p.read_bytes() for p in nbs.glob("*.ipynb")} == before, "it was not asked to store"
    return said


def verdict(said, name):
    "The lines about one notebook"
    return re.search(rf"^(?:passed|FAILED)[^\n]*\b{name}\.ipynb\n(?:    [^\n]*\n)*", said.stdout, flags=re.M)[0]


@pytest.mark.parametrize("name", ["first_figure", "lost", "skips", "skips_all", "defaults", "unstable", "place"])
def test_passes(project, name):
    assert verdict(project[1], name).startswith("passed"), project[1].stdout


@pytest.mark.parametrize(
    "name, why",
    [
        ("figures", r"cell 2 \(c2\) picture 0 is blank"),
        ("figures", r"cell 3 \(c3\) shows <Figure size 100x100 with 0 Axes> and no picture"),
        ("figures", r"cell 4 \(c4\) shows <Axes: > and no picture"),
        ("figures", r"cell 5 \(c5\) shows <Figure size 144x72 with 1 Axes> twice"),
        ("fails", r"cell 1 \(c1\) failed(.|\n)*AssertionError: x is not two"),
        ("hangs", r"cell 1 \(c1\) was running when the notebook's 0.25 minutes were over"),
        ("dies", r"cell 1 \(c1\): the kernel died"),
    ],
)
def test_fails_with_notebook_cell_and_reason(project, name, why):
    nbs, said = project
    assert said.returncode == 1 and "\x1b" not in said.stdout
    assert verdict(said, name).startswith("FAILED") and re.search(why, verdict(said, name)), said.stdout
    assert re.search(rf"11 notebooks, .*4 FAILED: .*{name}\.ipynb", said.stdout), said.stdout
    assert not any(outputs(nbs / f"{name}.ipynb").values()), "a notebook that fails is not stored"


def test_a_figure_is_shown_in_every_cell_of_a_session(project):
    stored = outputs(project[0] / "first_figure.ipynb")
    assert [sum("image/png" in o["data"] for o in stored[c]) for c in ("c1", "c2")] == [1, 1]


def test_nbdev_decides_which_cells_run(project):
    nbs, said = project
    skips = outputs(nbs / "skips.ipynb")
    assert texts(skips["c5"]) == ["slow eval\n"] and texts(skips["c2"]) == ["'slow ran'"]
    assert texts(outputs(nbs / "defaults.ipynb")["c2"]) == ["only this\n"]
    assert re.search(r" 0 cells .*skips_all", said.stdout) and "broken" not in said.stdout


@pytest.mark.nightly
def test_a_skipped_cell_keeps_its_outputs(project, again):
    "The second run has no flag, so the slow cell is skipped, and its stored output stays."
    assert verdict(again, "skips").startswith("passed"), again.stdout
    assert texts(outputs(project[0] / "skips.ipynb")["c2"]) == ["'slow ran'"]


@pytest.mark.nightly
def test_what_is_stored_and_not_shown_or_shown_and_not_stored_is_a_failure(again):
    assert again.returncode == 1
    assert "cell 1 (c1) shows 0 pictures in a kernel, 1 are stored" in verdict(again, "place"), again.stdout
    assert "cell 2 (c2) shows something, and nothing is stored" in verdict(again, "defaults")
    assert "2 FAILED" in again.stdout


def test_a_kernel_as_in_jupyter(project):
    assert texts(outputs(project[0] / "place.ipynb")["c1"][:1]) == ["('nbs', True, '__main__', 'ZMQInteractiveShell')"]


def test_what_differs_from_run_to_run_is_not_stored(project):
    stored = outputs(project[0] / "unstable.ipynb")
    assert stored["c2"] == stored["c4"] == stored["c5"] == []
    assert texts(stored["c3"]) == ["after the bar\n"]
    assert texts(stored["c6"]) == ["<object>"] and texts(stored["c7"]) == ["<object object>\n"]
    assert texts(stored["c8"]) == ["b\nc\n"] and texts(stored["c11"]) == ["a\nb\n"]
    raw = (project[0] / "unstable.ipynb").read_text()
    assert "widget" not in raw and not re.search(r'"execution_count": \d', raw)


@pytest.mark.nightly
def test_a_second_run_stores_the_same_bytes(project):
    nbs, _ = project
    names = [nbs / f"{name}.ipynb" for name in ("first_figure", "unstable")]
    before = [p.read_bytes() for p in names]
    assert run("--save", *names).returncode == 0
    assert [p.read_bytes() for p in names] == before
    # and nbdev would write them so too
    env = {**os.environ, "HOME": str(nbs.parent)}
    subprocess.run([Path(sys.executable).with_name("nbdev-clean")], cwd=nbs.parent, check=True, env=env)
    assert [p.read_bytes() for p in names] == before


@pytest.mark.nightly
def test_nbdev_test_runs_ours_too():
    "Without a kernel, for the assertions; a contributor may use either."
    before = (ROOT / "nbs/core/01_plot.ipynb").read_bytes()
    command = [Path(sys.executable).with_name("nbdev-test"), "nbs/core/01_plot.ipynb", "--n-workers", "0"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0 and "Success" in said.stdout, said.stdout + said.stderr
    assert (ROOT / "nbs/core/01_plot.ipynb").read_bytes() == before
