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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    "A run of Python that finds the wheel's package ahead of this repository's editable install"
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
        capture_output=True,
    )

    def run(code):
        env = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
        p = subprocess.run([sys.executable, "-c", code], cwd=site.parent, env=env, capture_output=True, text=True)
        assert p.returncode == 0, p.stderr
        return json.loads(p.stdout.splitlines()[-1])

    assert Path(run("import json, speculators_nb; print(json.dumps(speculators_nb.__file__))")).is_relative_to(site)
    return run


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


def test_public_names_import(installed):
    names = installed(
        "import json, speculators_nb as s; print(json.dumps({n: getattr(s, n).__name__ for n in s._public_names()}))"
    )
    import speculators_nb

    assert names == {name: name for name in speculators_nb._public_names()}


def test_every_module_imports(installed):
    failed = installed("""
import importlib, json, pkgutil, speculators_nb
failed = {}
for m in pkgutil.walk_packages(speculators_nb.__path__, "speculators_nb."):
    try: importlib.import_module(m.name)
    except Exception as e: failed[m.name] = repr(e)
print(json.dumps(failed))""")
    assert failed == {}


def test_demo_without_the_clone_says_what_it_needs(installed):
    """data/ is no part of the wheel."""
    message = installed("""
import json
from speculators_nb.cli.demo import demo
try: demo(output_dir="out")
except FileNotFoundError as e: print(json.dumps(str(e)))""")
    assert message.startswith("data/corpus/train.jsonl") and "clone" in message
