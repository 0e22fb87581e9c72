"""What the site is made of: papers with titles, figures with words, search words, tables of notebooks."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from web import address, books, extras, figures, overview, pages, papers, places  # noqa: E402
from web.cells import has_widget, widget_first  # noqa: E402
from web.links import crosslink, relink  # noqa: E402

SECTIONS = books.groups()
BOOKS = [book for section in SECTIONS.values() for book in section]


def cell(source, outputs=()):
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def test_every_cited_paper_has_a_title():
    assert papers.cited(BOOKS).keys() == papers.titles().keys()


def test_a_number_that_is_no_arxiv_id_is_no_paper():
    text = "[1](https://doi.org/10.1145/3147.3165), 10.48550/2401.00001, 2211.17192, 12211.171923"
    assert papers.ARXIV.findall(text) == ["2211.17192"]


def test_the_paper_page_leads_to_notebooks():
    page = papers.papers(BOOKS)
    row = next(line for line in page.splitlines() if "| 2211.17192 |" in line)
    assert row.startswith("| 2022 |") and "(/decode/02_acceptance_rules.ipynb)" in row


@pytest.mark.parametrize(
    "source,expected",
    [
        ('plot.plot_loss(log, "Most of it is learnt early")', "Most of it is learnt early"),
        ('ax.set_title(f"{n} of {m} tokens are right")', "… of … tokens are right"),
        (
            'draw(a, title="First of the two")\ndraw(b, title="Second of the two")',
            "First of the two; Second of the two",
        ),
        ("result.plot()", "Figure: The heading"),
        ('#| fig-alt: What it shows\nplot("Another title of it")', "What it shows"),
        ('print("not a title at all")', "Figure: The heading"),
    ],
)
def test_a_figure_is_described_by_its_title(source, expected):
    assert figures.alt_text(cell(source), "The heading") == expected


def test_every_stored_figure_is_in_the_gallery(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "EXTRA", tmp_path)
    some = {"Tutorials": SECTIONS["Tutorials"][:2]}
    page = figures.gallery(some)
    stored = sum(len(figures.pictures(c)) for b in some["Tutorials"] for c in b.nb["cells"])
    assert page.count("<img ") == page.count('alt="') == stored == len(list(tmp_path.rglob("*.webp"))) > 0


def test_search_words_come_from_the_glossary():
    terms = {term["names"][0]: term["names"] for term in extras.glossary()}
    assert len(terms) == (ROOT / "docs/glossary.md").read_text().count("\n### ")
    assert "target model" in terms["Verifier"] and all(len(names) > 1 for names in terms.values())


def test_the_drafters_are_notebooks_that_exist():
    assert set(places.DRAFTERS) <= {book.page for book in BOOKS}


def test_every_page_is_in_one_group():
    text = {place: f"# {place}\n\nA sentence." for place in places.PAGES.values()}
    text |= {f"commands/{name}.md": "# c\n\nIt runs." for name in overview.commands.entered()}
    made = overview.overviews(SECTIONS, text)
    entries = re.findall(r"^/(\S+)$", "\n".join(made.values()), flags=re.M)
    assert len(entries) == len(set(entries))
    pages = [b.page for b in BOOKS if b.page != "index.ipynb"] + list(text) + list(made)
    pages += [m.page for m in books.modules()]
    listed = {*entries, *overview.GROUPS}
    assert {page.rsplit(".", 1)[0] for page in pages} == listed


def test_times_are_of_notebooks_and_targets_that_exist():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert books.times().keys() <= {book.here for book in BOOKS} | {f"make {target}" for target in targets}


@pytest.mark.parametrize("book", [b for b in BOOKS if b.here.startswith("nbs/widgets/")], ids=lambda b: b.here)
def test_a_widget_is_the_first_that_its_page_shows(book):
    cells = widget_first(book.nb["cells"])
    assert cells[0]["source"].startswith("# ") and cells[1]["metadata"]["tags"] == ["remove-input"]
    before, after = (sum(map(has_widget, part)) for part in (book.nb["cells"], cells))
    assert before == after > 0 and has_widget(cells[1]), "it is moved, and stands there once"


def test_the_first_sentence_of_a_command_is_what_it_does():
    page = "# speculators-nb x\n\n> Train a drafter. More.\n\n```bash\nx\n```\n\nFor example:\n"
    assert books.first_sentence(page) == "Train a drafter."


def test_a_value_of_an_option_is_no_link():
    symbols = {"local": "distributed.sharding.local", "train": "train.train"}
    text = "See `train`.\n\n| option | values |\n| --- | --- |\n| `--engine` | `local`, `ray` |\n"
    assert crosslink(text, symbols) == text.replace("`train`", "{py:obj}`train <train.train>`")


def test_one_setting_links_pages_to_the_address(monkeypatch):
    "Notebooks open elsewhere, files can be edited, problems reported, and a link to the site has its picture."
    monkeypatch.setattr(places, "GIT_URL", "https://github.com/Owner/name")
    note = pages.note(next(b for b in BOOKS if b.page == "tutorials/04_write_your_own_drafter.ipynb"))
    here = "nbs/tutorials/04_write_your_own_drafter.ipynb"
    for link in (
        f"(https://colab.research.google.com/github/Owner/name/blob/main/{here})",
        f"(https://mybinder.org/v2/gh/Owner/name/main?labpath={here.replace('/', '%2F')})",
        f"(https://github.com/Owner/name/edit/main/{here})",
        f"(https://github.com/Owner/name/issues/new?title={here.replace('/', '%2F')})",
    ):
        assert link in note
    assert "/edit/main/docs/glossary.md)" in pages.text_page("docs/glossary.md", "# Glossary")
    assert "edit/main/speculators_nb/cli/run.py" in pages.module_page(books.Module("cli.run", "A run."), "")
    assert "issues/new" not in pages.text_page("docs/commands/train.md", "# train")  # made: no file holds it
    assert address.site_address() == "https://owner.github.io/name/"
    linked = relink("[r](../data/recipes)", "docs/from_chats.md", {"docs/from_chats.md": "from_chats.md"})
    assert linked == "[r](https://github.com/Owner/name/blob/main/data/recipes)"


def test_without_an_address_pages_link_to_no_other_site(monkeypatch):
    monkeypatch.setattr(places, "GIT_URL", "")
    notes = [pages.note(book) for book in BOOKS if book.page != "index.ipynb"]
    notes += [pages.text_page("docs/glossary.md", "# Glossary")]
    notes += [pages.module_page(books.Module("cli.run", "A run."), "")]
    assert not any("http" in note for note in notes) and address.site_address() == ""


def test_a_page_says_when_its_file_was_last_changed(monkeypatch):
    monkeypatch.setattr(address, "changes", lambda: {"docs/glossary.md": "2026-11-27"})
    assert "last changed on 2026-11-27" in pages.text_page("docs/glossary.md", "# Glossary")
    assert pages.text_page("docs/commands/train.md", "# train") == "# train"


def test_a_notebook_as_markdown_has_its_text_and_code():
    book = next(b for b in BOOKS if b.page == "tutorials/20_your_own_loss.ipynb")
    text = pages.as_markdown(book)
    assert text.startswith("# Write your own loss") and '```python\n@register_loss_weight("until_wrong")' in text


def test_the_search_has_a_sentence_of_every_page():
    said = {"a/b.ipynb": "A [claim](x.ipynb) with `code`.", "c.md": "A sentence."}
    words = extras.search_words([], said)
    assert '"pages": {"a/b": "A claim with code.", "c": "A sentence."}' in words


def test_a_broken_link_is_seen(tmp_path):
    sys.path.insert(0, str(ROOT / "tests/browser"))
    import links

    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there">1</a><a href="#here">2</a><img src="c.png">')
    (tmp_path / "b.html").write_text('<a href="https://example.org/x">3</a><a href="/a.html#gone">4</a><b id="there">')
    found = list(links.faults(tmp_path))
    assert found == ["a.html: c.png: no such file", "b.html: /a.html#gone: no such anchor"]
