"""A report as one self-contained HTML page of text, tables, figures and widgets.
Warnings and headline numbers come first. Nothing beside the file is needed to read it."""

import base64
import html
import io
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from ..core.files import write_text


class Section(NamedTuple):
    "A part of a page: heading, then text, figures, tables and elements, those that there are."

    heading: str
    text: str = ""  # paragraphs, with an empty line between
    tables: Mapping[str, pd.DataFrame] = {}  # caption -> table, its index in the first columns
    # what it shows -> a figure of matplotlib, or a PNG: its path or its bytes
    figures: Mapping[str, Figure | str | PathLike | bytes] = {}
    html: str = ""  # elements, put in as they are: whoever writes them escapes what is data


class Headline(NamedTuple):
    "One of the numbers that a page is about."

    number: str  # as it is shown: "2.87", "71 %"
    counts: str  # what it counts, in a few words
    meaning: str = ""  # a sentence, with its interval or what it is compared with


def _element(tag, text, more=""):
    "An HTML element of plain text."
    return f"<{tag}{more}>{html.escape(str(text))}</{tag}>"


def _paragraphs(text):
    return "".join(_element("p", part.strip()) for part in text.split("\n\n") if part.strip())


def _table(caption, table):
    "A table; a wide one scrolls by itself."
    named = not isinstance(table.index, pd.RangeIndex)
    table = table.astype(object).where(table.notna(), "")
    short = max((len(str(v)) for v in table.to_numpy().flat), default=0) <= 30  # no prose
    body = table.to_html(border=0, index=named, index_names=named)
    region = f'tabindex=0 role=group aria-label="{html.escape(caption)}"'  # for the keyboard
    wide = f'<div class="wide{" short" * short}" {region}>{body}</div>'
    return f"<figure>{_element('figcaption', caption)}{wide}</figure>"


def _headlines(numbers):
    cards = "".join(
        f"<li>{_element('strong', n.number)} {_element('span', n.counts)}{_paragraphs(n.meaning)}</li>" for n in numbers
    )
    return cards and f"<ul class=numbers>{cards}</ul>"


def image(shows: str, figure: Figure | str | PathLike | bytes) -> str:
    """A figure of matplotlib, or a PNG (its path or its bytes), as an img element that needs no other file; `shows`:
    what it shows, for those who cannot see it. ValueError: no PNG."""
    if isinstance(figure, Figure):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        plt.close(figure)
        figure = buffer.getvalue()
    elif not isinstance(figure, bytes):
        figure = Path(figure).read_bytes()
    if not figure.startswith(b"\x89PNG"):
        raise ValueError(f"figure {shows!r}: no PNG; save it as one")
    data = base64.b64encode(figure).decode()
    return f'<img alt="{html.escape(shows)}" src="data:image/png;base64,{data}">'


STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page_html(
    title: str,  # of the page
    sections: Iterable[Section],  # in the order of reading
    facts: Mapping[str, object] = {},  # what the page is about: name -> value
    warnings: Iterable[str] = (),  # what the reader must know first
    lead: str = "",  # what the page is about, in a sentence or two
    numbers: Iterable[Headline] = (),  # at most three or four
) -> str:  # a whole document
    "One HTML page. ValueError: a figure that is no PNG; OSError: one that cannot be read."
    sections = list(sections)
    warned = "".join(_element("li", text) for text in warnings)
    known = "".join(_element("dt", k) + _element("dd", v) for k, v in facts.items())
    links = (_element("a", part.heading, f' href="#{i}"') for i, part in enumerate(sections, 1))
    body = [
        _element("h1", title),
        lead and _element("p", lead, " class=lead"),
        warned and f"<ul class=warnings>{warned}</ul>",
        _headlines(numbers),
        known and f"<dl>{known}</dl>",
        f"<nav>{''.join(links)}</nav>" if len(sections) > 3 else "",
    ]
    for i, part in enumerate(sections, 1):
        body.append(_element("h2", part.heading, f' id="{i}"') + _paragraphs(part.text))
        drawn = "".join(image(shows, figure) for shows, figure in part.figures.items())
        body.append(drawn and f"<div class=figures>{drawn}</div>")
        body += [_table(caption, table) for caption, table in part.tables.items()]
        body.append(part.html)
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
    )
    shown = f"<main>{''.join(body)}</main>"
    return f"{head}{_element('title', title)}<style>\n{STYLE}</style>{shown}</html>\n"


def write_page(path: str | PathLike, page: str) -> Path:
    "Write a page of `page_html`, made or replaced as a whole. OSError: the file cannot be written, with its path."
    write_text(path, page, errors="backslashreplace")
    return Path(path)
