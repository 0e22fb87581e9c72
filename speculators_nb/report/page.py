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

from ..core.files import atomic_write


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


def image(
    shows: str,  # what the figure shows, for those who cannot see it
    figure: Figure | str | PathLike | bytes,  # of matplotlib, or a PNG: its path or its bytes
) -> str:  # an img element
    "A figure as an element that needs no other file. ValueError: no PNG."
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


_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--warn:#d55e00;
--ground:light-dark(#fff,#17191c);--text:light-dark(#1f2328,#e4e6e9);
--muted:light-dark(#57606a,#a2a9b1);--accent:light-dark(#0060a0,#6cb8f0)}
body{font:16px/1.6 system-ui,sans-serif;max-width:62rem;margin:2.5rem auto 4rem;padding:0 1rem;
background:var(--ground);color:var(--text)}
h1{font-size:1.9rem;line-height:1.25;margin:0 0 .6rem}
h2{font-size:1.3rem;margin:3rem 0 .6rem;border-top:1px solid var(--line);padding-top:1.2rem}
main>p,h2~p{max-width:46rem}
a{color:var(--accent)}
.lead{font-size:1.1rem;color:var(--muted);max-width:46rem;margin:.4rem 0}
nav{display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;margin:1.4rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem;margin:1.4rem 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
ul.warnings,ul.numbers{list-style:none;margin:1.4rem 0;padding:0}
ul.warnings li{border-left:4px solid var(--warn);background:var(--soft);margin:.4rem 0;
padding:.4rem .8rem}
ul.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,15rem),1fr));
gap:1rem}
ul.numbers li{border:1px solid var(--line);border-top:4px solid var(--accent);
border-radius:6px;background:var(--soft);padding:.8rem 1rem}
ul.numbers strong{display:block;font-size:2.4rem;line-height:1.2;
font-variant-numeric:tabular-nums}
ul.numbers span{font-weight:600}ul.numbers p{margin:.4rem 0 0;font-size:.9rem;
color:var(--muted)}
figure{margin:1.4rem 0}figcaption{font-weight:600;margin-bottom:.3rem}
.wide{overflow-x:auto}.short td{white-space:nowrap}
table{border-collapse:collapse;font-size:.94rem;font-variant-numeric:tabular-nums}
td,th{padding:.25rem 1rem .25rem 0;text-align:right;border-bottom:1px solid var(--line)}
thead th{font-weight:500;color:var(--muted);white-space:nowrap}
tbody th,td:first-child,th:first-child{text-align:left;font-weight:400}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));
gap:1rem;margin:1rem 0;align-items:start}
img{display:block;max-width:100%;height:auto;border-radius:4px}
pre{overflow-x:auto;background:var(--soft);border-radius:6px;padding:.8rem 1rem;
font:.88rem/1.5 ui-monospace,monospace}
details{margin:.8rem 0}
summary{cursor:pointer;padding:.3rem 0;white-space:pre-line;overflow-wrap:anywhere}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
@media(max-width:30rem){dl{grid-template-columns:1fr}dd{margin-bottom:.5rem}}
@media(prefers-color-scheme:dark){img{filter:invert(.9) hue-rotate(180deg)}}
"""


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
    return f"{head}{_element('title', title)}<style>{_STYLE}</style>{shown}</html>\n"


def write_page(
    path: str | PathLike,  # of the HTML file; is made, or replaced as a whole
    title: str,  # of the page
    sections: Iterable[Section],  # in the order of reading
    facts: Mapping[str, object] = {},  # what the page is about: name -> value
    warnings: Iterable[str] = (),  # what the reader must know first
    lead: str = "",  # what the page is about, in a sentence or two
    numbers: Iterable[Headline] = (),  # at most three or four
) -> Path:  # the file
    "Write a page of `page_html`. OSError: the file cannot be written, with its path."
    page = page_html(title, sections, facts, warnings, lead, numbers)
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    return Path(path)
