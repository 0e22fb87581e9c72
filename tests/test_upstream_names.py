"""Public names of speculators 0.9.0 under our package: importable, one call of each answers what upstream's answered
(record_names.py made the record), and those without a place are on the page for people who come from there."""

import importlib
import json
import re
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/parity"))
import named_calls  # noqa: E402

RECORD = json.loads((ROOT / "tests/fixtures/upstream_names.json").read_text())
PAGE = (ROOT / "docs/coming_from_speculators.md").read_text()


def ours(path):
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return getattr(importlib.import_module(f"speculators_nb.{module}"), name)


@pytest.mark.parametrize("name", named_calls.CALLS)
def test_one_call(name):
    named_calls.use_losses(importlib.import_module("speculators_nb.losses.eager"))
    assert named_calls.call(name, ours(name)) == RECORD["answers"][name]


def has(module, name):
    try:
        return hasattr(importlib.import_module(f"speculators_nb.{module}"), name)
    except ModuleNotFoundError:
        return False


def test_names_without_a_place_are_on_the_page():
    missing = {f"{m}.{name}" for m, entry in RECORD["modules"].items() for name in entry["names"] if not has(m, name)}
    table = PAGE.split("## Names that have no place here")[1]
    rows = re.findall(r"^\| `([\w.]+)`: (.*?) \| (.+) \|$", table, flags=re.M)
    listed = {f"{module}.{name}" for module, names, why in rows if why for name in re.findall(r"`(\w+)`", names)}
    assert listed == missing
    # what an `__all__` of upstream lists: the interface
    interface = {f"{m}.{name}" for m, entry in RECORD["modules"].items() if entry["listed"] for name in entry["names"]}
    assert len(interface - missing) / len(interface) > 0.7
