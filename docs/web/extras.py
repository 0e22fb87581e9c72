"""What the site has besides pages: words for its search, the card that other sites show, a page for wrong addresses."""

import json
import re

import matplotlib.pyplot as plt

from web.books import plain
from web.papers import anchor, cited, titles
from web.places import EXTRA, MADE_STATIC, ROOT

NAME = "speculators_nb"


def glossary():
    "The terms of docs/glossary.md: names (the heading first), anchor, sentence"
    text = (ROOT / "docs/glossary.md").read_text()
    for name, also, sentence in re.findall(r"^### (.+)\n\*Also: (.+)\.\*\n(.+) \[Shown here\]", text, flags=re.M):
        slug = "#" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        yield {"names": [name, *also.split(", ")], "anchor": slug, "sentence": re.sub(r"[`*$]", "", sentence)}


def search_words(books, said):
    "Synonyms, papers and what pages say of themselves (place -> sentence), as docs/_static/search.js reads them"
    known = titles()
    papers = {
        number: {
            "title": known[number],
            "anchor": f"#{anchor(number)}",
            "notebooks": [[book.page.removesuffix(".ipynb"), book.title] for book in where],
        }
        for number, where in cited(books).items()
    }
    pages = {place.rsplit(".", 1)[0]: re.sub(r"[`*$]", "", plain(text)) for place, text in said.items()}
    words = {"terms": list(glossary()), "papers": papers, "pages": pages}
    return f"const SEARCH_WORDS = {json.dumps(words, ensure_ascii=False)};\n"


def card(claim, picture):
    "The picture that a link to the site shows elsewhere: name, claim and the figure of the landing page, 1200 by 630"
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    figure.text(0.05, 0.86, NAME, fontsize=44, weight="bold", color="#0b7a5b")
    figure.text(0.05, 0.8, claim, fontsize=19, color="#333333", va="top", wrap=True)
    axes = figure.add_axes((0.05, 0.04, 0.9, 0.58))
    axes.imshow(plt.imread(picture))
    axes.axis("off")
    figure.savefig(EXTRA / "card.png")
    plt.close(figure)


def extras(books, said, claim, picture):
    "Write all of them; `said` as in `search_words`"
    for folder in (EXTRA, MADE_STATIC):
        folder.mkdir(parents=True, exist_ok=True)
    (MADE_STATIC / "search_words.js").write_text(search_words(books, said))
    (EXTRA / "404.html").write_text((ROOT / "docs/_templates/404.html").read_text())
    card(claim, picture)
