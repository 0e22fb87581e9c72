"""The papers that the notebooks cite, with title and year (docs/papers.yml), and where each is used."""

import re

import yaml

from web.places import DOCS

ARXIV = re.compile(r"(?<![\d.])(?<!\d/)(\d{4}\.\d{5})(?!\d)")


def titles():
    "arXiv id -> title"
    return yaml.safe_load((DOCS / "papers.yml").read_text())


def cited(books):
    "arXiv id -> the notebooks that cite it"
    found = {}
    for book in books:
        text = "\n".join(c["source"] for c in book.nb["cells"])
        for number in dict.fromkeys(ARXIV.findall(text)):
            found.setdefault(number, []).append(book)
    return dict(sorted(found.items()))


def anchor(number):
    return f"arxiv-{number.replace('.', '-')}"


def papers(books):
    "The page of all papers, oldest first"
    known, rows = titles(), []
    for number, where in cited(books).items():
        links = ", ".join(f"[{book.title}](/{book.page})" for book in where)
        paper = f'<span id="{anchor(number)}"></span>[{known[number]}](https://arxiv.org/abs/{number})'
        rows.append(f"| 20{number[:2]} | {paper} | {number} | {links} |")
    head = "# Papers\n\nEvery paper that a notebook cites, and the notebooks in which it is implemented or used.\n"
    return "\n".join([head, "| year | paper | arXiv | notebooks |", "| --- | --- | --- | --- |", *rows]) + "\n"
