#!/usr/bin/env python
"""The page for people who come from speculators, with its numbers: how many of upstream's public names are found here
and answer a call as upstream's did. Nothing is imported: the names are those of the record of 0.9.0, what is missing is
in the page's own table, and tests/test_upstream_names.py holds both to the package."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/coming_from_speculators.md"
RECORD = ROOT / "tests/fixtures/upstream_names.json"
NO_PLACE = "Names that have no place here"
FURTHER = "Names of train, data_generation and utils"


def rows(title, text=None):
    "[(module.name, what is said of it)] of a table of names."
    part = re.split(r"^## ", (text or PAGE.read_text()).split(f"## {title}\n")[1], flags=re.M)[0]
    lines = re.findall(r"^\| `([\w.]+)`: (.*?) \| (.+) \|$", part, flags=re.M)
    return [(f"{module}.{name}", said) for module, names, said in lines for name in re.findall(r"`(\w+)`", names)]


def counts():
    "Of the names: all, those that can be imported, those that are called."
    record = json.loads(RECORD.read_text())
    names = {f"{module}.{name}" for module, entry in record["modules"].items() for name in entry["names"]}
    missing = {name for name, said in rows(NO_PLACE) if not said.startswith("found, ")}
    called = record["answers"].keys() & names
    share = int(100 * len(called) / len(names))
    return dict(total=len(names), importable=len(names - missing), called=len(called), share=share)


def page():
    "The page's text."
    text = PAGE.read_text()
    for name, number in counts().items():
        text = text.replace("{" + name + "}", str(number))
    return text
