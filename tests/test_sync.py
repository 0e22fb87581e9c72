"""The notebooks are the source: exporting and cleaning them must change nothing. Run on a copy, so that a failure
leaves the tree alone."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = ("nbs", "speculators_nb")


def nbdev(command, cwd):
    "Run one nbdev command as this environment's own executable, in `cwd`"
    env = {**os.environ, "HOME": str(cwd)}  # nbdev looks into ~/.config and ~/.jupyter
    p = subprocess.run(
        [Path(sys.executable).with_name(f"nbdev-{command}")], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert p.returncode == 0, p.stdout + p.stderr


def snapshot(root):
    "Every file under the exported and the authored tree: path -> bytes"
    files = (p for k in KEPT for p in (root / k).rglob("*") if p.is_file())
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in files
        if not {"__pycache__", ".ipynb_checkpoints"} & set(p.parts)
    }


def changed(before, after):
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


@pytest.fixture
def copy(tmp_path):
    for k in KEPT:
        shutil.copytree(ROOT / k, tmp_path / k, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for f in ("pyproject.toml", "settings.ini"):
        shutil.copy(ROOT / f, tmp_path)
    return tmp_path


def test_export_and_clean_change_nothing(copy):
    before = snapshot(copy)
    nbdev("export", copy)
    nbdev("clean", copy)
    assert changed(before, snapshot(copy)) == [], "run `make export` and commit what it writes"


def test_update_changes_nothing(copy):
    """`nbdev-update` carries edits of the package back into the notebooks; where there are none, it must write what is
    there. (It turns `from .. import x`, which is what the export makes of `from speculators_nb import x` in a module of
    a subpackage, into an import from that subpackage.)"""
    before = snapshot(copy)
    nbdev("update", copy)
    assert changed(before, snapshot(copy)) == [], (
        "import from the module that defines the name, not from speculators_nb"
    )


def test_hand_edit_of_the_package_is_seen(copy):
    """The check above can fail: a hand edit of an exported module does not survive the export."""
    module = next(p for p in sorted((copy / "speculators_nb/core").glob("*.py")) if p.name[0] != "_")
    module.write_text(module.read_text() + "\nHAND_EDIT = True\n")
    edited = snapshot(copy)
    nbdev("export", copy)
    assert changed(edited, snapshot(copy)) == [str(module.relative_to(copy))]


def test_an_import_of_ours_is_exported_in_one_form():
    """nbdev makes a one-line import relative, and leaves one of several lines as it is. (Of imports inside of functions
    it makes either.)"""
    forms = {}
    for path in sorted((ROOT / "speculators_nb").glob("*/*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("speculators_nb")):
                one_line = node.lineno == node.end_lineno
                forms.setdefault((one_line, node.level > 0), []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert set(forms) == {(True, True), (False, False)}, {form: lines[:3] for form, lines in forms.items()}
