"""What `pip install` of a built wheel gives: every subpackage, the commands, the licence, the public names."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


# the public names first: they are imported when they are asked for, and later everything is
IMPORTED = """
import importlib, json, pkgutil, speculators_nb
names = {n: getattr(speculators_nb, n).__name__ for n in speculators_nb._public_names()}
from speculators_nb.cli.demo import demo
try: demo(output_dir="out")
except FileNotFoundError as error: message = str(error)
failed = {}
for module in pkgutil.walk_packages(speculators_nb.__path__, "speculators_nb."):
    try: importlib.import_module(module.name)
    except Exception as error: failed[module.name] = repr(error)
print(json.dumps(dict(file=speculators_nb.__file__, names=names, failed=failed, message=message)))
"""


@pytest.fixture(scope="module")
def imported(wheel, tmp_path_factory):
    "What Python finds in the wheel's package, ahead of this repository's editable install"
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
        capture_output=True,
    )
    env = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    p = subprocess.run([sys.executable, "-c", IMPORTED], cwd=site.parent, env=env, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
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
    assert imported["failed"] == {}


def test_demo_without_the_clone_says_what_it_needs(imported):
    """data/ is no part of the wheel."""
    assert imported["message"].startswith("data/corpus/train.jsonl") and "clone" in imported["message"]
