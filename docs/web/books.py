"""The notebooks as the site's pages name them: place, module, title, claim, what a run of them takes."""

import re
import sys
from functools import cache
from typing import NamedTuple

import yaml

from web.cells import exported, load
from web.places import DOCS, ROOT

NBS = ROOT / "nbs"


class Book(NamedTuple):
    "A notebook"

    page: str  # its place on the site, and below nbs/
    nb: dict  # its content; the source of a cell is one text
    module: str | None  # what it exports: "nn.masks"
    title: str
    claim: str  # the line under the title

    @property
    def here(self):
        "Its place in the repository"
        return f"nbs/{self.page}"


def read_book(path):
    nb = load(path)
    head = nb["cells"][0]["source"]
    title = re.search(r"^# (.+)$", head, flags=re.M)[1]
    claim = re.search(r"^> ?(.+(?:\n> ?.+)*)", head, flags=re.M)
    text = re.sub(r"\n> ?", " ", claim[1]) if claim else ""
    return Book(str(path.relative_to(NBS)), nb, exported(nb), title, text)


def groups():
    "section -> its notebooks, in the order of nbs/sidebar.yml, which Quarto reads too"
    found = {}
    for entry in yaml.safe_load((NBS / "sidebar.yml").read_text())["website"]["sidebar"]["contents"]:
        patterns = [entry["contents"]] if isinstance(entry["contents"], str) else entry["contents"]
        found[entry["section"]] = [read_book(p) for x in patterns for p in sorted(NBS.glob(x))]
    listed = {book.page for books in found.values() for book in books}
    there = {p.relative_to(NBS) for p in NBS.rglob("[!.]*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    if left := {str(p) for p in there} - listed:
        sys.exit(f"nbs/sidebar.yml lists no place for {sorted(left)}")
    return found


@cache
def times():
    "What `python tests/notebooks.py --times` measured: notebook -> seconds and versions"
    file = DOCS / "times.yml"
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def duration(here):
    "How long a notebook runs, in words; empty where nobody has measured it"
    row = times().get(here)
    if not row:
        return ""
    seconds = row["seconds"]
    return f"{max(5, 5 * round(seconds / 5))} s" if seconds < 90 else f"{round(seconds / 60)} minutes"


def plain(claim):
    "A claim on another page: without links, which are relative to its own"
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", claim)


def first_sentence(text):
    "Of the prose of a page: of its first paragraph after the title"
    text = re.sub(r"^> ", "", re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.M | re.S), flags=re.M)
    paragraphs = re.split(r"\n\s*\n", text)
    prose = next(p for p in paragraphs[1:] if re.match(r"[A-Z*`\[]", p))
    return re.split(r"(?<=[.?])\s", " ".join(prose.split()))[0]


def title_of(text):
    return re.search(r"^# (.+)$", text, flags=re.M)[1]
