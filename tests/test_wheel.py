"""What `pip install` of a built wheel gives: every subpackage, the commands, the licence, the public names, and the
import paths of the public documentation."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_aliases import DOCUMENTED

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel of this tree, built from a copy so that no build folder appears beside the sources"
    tmp = tmp_path_factory.mktemp("wheel")
    for f in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / f, tmp)
    shutil.copytree(ROOT / "speculators_nb", tmp / "speculators_nb", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp / "out", tmp],
        check=True,
        capture_output=True,
    )
    return next((tmp / "out").glob("*.whl"))


DOCUMENTED_PATHS = "\n".join(
    [f"from speculators_nb{'.' * bool(path)}{path} import {name}" for path, name in DOCUMENTED]
    + [
        "import speculators_nb.models.eagle3.core as core, speculators_nb.models.eagle3",
        "assert core is speculators_nb.models.eagle3",
        "import speculators_nb.proposals.greedy as greedy",
        "assert greedy.GreedyTokenProposalConfig is GreedyTokenProposalConfig",
        "from speculators_nb.proposals import *",
        "assert TokenProposalConfig is greedy.TokenProposalConfig",
    ]
)
# One process, in this order: what the documentation imports, which imports nothing of ours before; the public names,
# which are imported when they are asked for; then everything. Ours finds no module that Windows lacks. (Other packages'
# own imports of such modules stand behind a look at the platform.)
IMPORTED = """
import builtins, importlib, json, pkgutil, sys
real = builtins.__import__
def as_on_windows(name, globals=None, locals=None, fromlist=(), level=0):
    ours = str((globals or {}).get("__name__")).startswith("speculators_nb")
    if ours and not level and name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = as_on_windows
exec(sys.argv[1], {})
import speculators_nb
names = {n: getattr(speculators_nb, n).__name__ for n in speculators_nb._public_names()}
from speculators_nb.cli.demo import demo
try: demo(output_dir="out")
except FileNotFoundError as error: message = str(error)
def failures(modules):
    failed = {}
    for name in modules:
        try: importlib.import_module(name)
        except Exception as error: failed[name] = repr(error)
    return failed
windows = failures(m.name for m in pkgutil.walk_packages(speculators_nb.__path__, "speculators_nb."))
builtins.__import__ = real
found = dict(file=speculators_nb.__file__, names=names, windows=windows, failed=failures(windows), message=message)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported(wheel, tmp_path_factory):
    "What Python finds in the wheel's package, ahead of this repository's editable install"
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)  # as pip does
    env = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", IMPORTED, DOCUMENTED_PATHS]
    p = subprocess.run(command, cwd=site.parent, env=env, capture_output=True, text=True)
    assert p.returncode == 0 and "speculators_nb" not in p.stderr, p.stderr
    found = json.loads(p.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(site)
    return found


def test_every_module_is_inside(wheel):
    files = [
        p
        for kind in ("*.py", "*.pyi", "py.typed", "*.jsonl", "*.js", "*.css")
        for p in (ROOT / "speculators_nb").rglob(kind)
    ]
    ours = {str(p.relative_to(ROOT)) for p in files}
    assert {"speculators_nb/py.typed", "speculators_nb/config.pyi", "speculators_nb/proposals/greedy.pyi"} <= ours
    assert {"speculators_nb/widgets/js/common.js", "speculators_nb/widgets/js/widget.css"} <= ours
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert ours <= inside
    assert {n for n in inside if ".dist-info/" not in n} == ours, "nothing but the package is installed"


def test_metadata(wheel):
    z = zipfile.ZipFile(wheel)
    info = {n.split(".dist-info/")[1]: z.read(n).decode() for n in z.namelist() if ".dist-info/" in n}
    assert "licenses/LICENSE" in info
    assert "Requires-Dist: torch>=" in info["METADATA"] and "Requires-Python: >=3.11" in info["METADATA"]
    assert "speculators-nb = speculators_nb.cli.main:app" in info["entry_points.txt"]
    assert "speculators_nb = speculators_nb._modidx:d" in info["entry_points.txt"], (
        "nbdev of other projects links to our docs by it"
    )


def test_public_names_import(imported):
    import speculators_nb

    assert imported["names"] == {name: name for name in speculators_nb._public_names()}


def test_every_module_imports(imported):
    "On Windows all but the connector, which runs inside of vLLM."
    assert imported["failed"] == {}
    no_fcntl = """ModuleNotFoundError("No module named 'fcntl'")"""
    assert imported["windows"] == {"speculators_nb.serve.vllm_connector": no_fcntl}


def test_demo_without_the_clone_says_what_it_needs(imported):
    """data/ is no part of the wheel."""
    assert imported["message"].startswith("data/corpus/train.jsonl") and "clone" in imported["message"]
