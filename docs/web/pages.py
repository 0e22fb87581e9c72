"""Every page of the site and its table of contents, as Sphinx reads them (docs/_src)."""

import json
import shutil

import commands

from web.address import file_links, last_changed, notebook_links
from web.books import duration, first_sentence, groups, modules, times
from web.cells import join_imports, stage_cell, widget_first
from web.extras import extras
from web.figures import anchor, figures, gallery
from web.links import crosslink, relink
from web.overview import all_notebooks, landing, overviews
from web.papers import papers
from web.places import FILES, LIB, MADE, PAGES, ROOT, SRC
from web.reference import reference


def about(said, more=""):
    "Small print of a page"
    return f":::{{container}} about-page\n{', '.join(said)}.\n{more}:::\n"


def note(book):
    "The lines under a page's title: how to get the notebook, how long it runs, with which versions"
    up = "../" * (book.here.count("/") + 1)
    said = [f"Notebook: {{download}}`{book.here} <{up}{book.here}>`"]
    said.append(f"as {{download}}`Markdown </{FILES}/{markdown_place(book)}>`")
    said += [f"exports {{py:mod}}`{LIB}.{book.module}`"] if book.module else []
    if time := duration(book.here):
        said.append(f"runs in {time} on a CPU core ({times()[book.here]['versions']})")
    said += [*notebook_links(book.here), *file_links(book.here), *last_changed(book.here)]
    lab = f"```{{code-block}} bash\n:class: open-lab\n\n.venv/bin/jupyter lab {book.here}\n```\n"
    return about(said, f"\n{lab}")


def markdown_place(book):
    return book.here.removesuffix(".ipynb") + ".md"


def as_markdown(book):
    "A notebook's text and code, without outputs"
    fence = {"code": "```python\n{}\n```", "markdown": "{}", "raw": "{}"}
    return "\n\n".join(fence[c["cell_type"]].format(c["source"]) for c in book.nb["cells"] if c["source"]) + "\n"


def text_pages(sections, books):
    "file of the repository -> (place on the site, text) of all that is no notebook"
    pages = {f"docs/{place}": (place, text) for place, text in commands.pages().items()}
    made = MADE | {
        "docs/gallery.md": lambda: gallery(sections),
        "docs/papers.md": lambda: papers(books),
        "docs/notebooks.md": lambda: all_notebooks((ROOT / "docs/notebooks.md").read_text(), sections),
    }
    for here, place in PAGES.items():
        pages[here] = place, made[here]() if here in made else (ROOT / here).read_text()
    return pages


def write(place, content):
    target = SRC / place
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content) if isinstance(content, bytes) else target.write_text(content)


def markdown(name, text):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def stage_book(book, where, symbols, refs):
    "A notebook as the site shows it, with the reference of its module"
    shown = {i: alt for i, alt, _ in figures(book.nb)}
    staged = []
    for i, cell in enumerate(book.nb["cells"]):
        if (c := stage_cell(cell)) and i in shown:
            staged.append(markdown(f"figure-{i}", f'<span id="{anchor(i)}"></span>'))
            c["metadata"]["mystnb"]["image"] = {"alt": shown[i]}
        staged += [c] if c else []
    cells = join_imports(staged)
    for c in cells:
        if c["cell_type"] == "markdown":
            c["source"] = crosslink(relink(c["source"], book.here, where), symbols)
    if book.here.startswith("nbs/widgets/"):
        cells = widget_first(cells)
    cells.insert(1, markdown("about-page", note(book)))
    if book.module and refs[book.module][0]:
        cells.append(markdown("reference", refs[book.module][0]))
    metadata = book.nb["metadata"] | {"language_info": {"name": "python", "pygments_lexer": "python"}}
    return json.dumps(book.nb | {"cells": cells, "metadata": metadata})


def module_page(module, reference_text):
    "A module that is written by hand: what it says of itself, its source, its reference"
    up = "../" * (module.page.count("/") + 2)
    said = [f"Source: {{download}}`{module.here} <{up}{module.here}>`", *file_links(module.here)]
    source = about([*said, *last_changed(module.here)])
    return f"# {module.name}\n\n{source}\n{module.docstring}\n\n{reference_text}"


def text_page(here, text):
    "A page that is no notebook, with what is known of its file"
    said = [*last_changed(here), *file_links(here)]
    return f"{text}\n{about([f'This page: {said[0]}', *said[1:]])}" if said else text


def stage():
    "Write every page and the table of contents to docs/_src"
    shutil.rmtree(SRC, ignore_errors=True)
    sections = groups()
    books = [b for section, found in sections.items() if section != "Start" for b in found]
    pages = text_pages(sections, books)
    home, pictures = landing()
    pages["README.md"] = "index.md", home
    where = {b.here: b.page for b in books} | {here: place for here, (place, _) in pages.items()}
    where["nbs/index.ipynb"] = "index.md"
    where |= {m.here: m.page for m in modules()}
    refs = {name: reference(name) for name in [*(b.module for b in books if b.module), *(m.name for m in modules())]}
    seen = [n for _, names in refs.values() for n in names]
    symbols = {n: f"{LIB}.{m}.{n}" for m, (_, names) in refs.items() for n in names if seen.count(n) == 1}
    symbols |= {n: f"{LIB}.{m}" for m in refs for n in (m, f"{LIB}.{m}") if n not in seen}
    for here, (place, text) in pages.items():
        write(place, crosslink(text_page(here, relink(text, here, where)), symbols))
    for path, png in pictures.items():
        write(path, png)
    said = {place: first_sentence(text) for here, (place, text) in pages.items() if here != "README.md"}
    said |= {book.page: book.claim for book in books} | {m.page: m.docstring.splitlines()[0] for m in modules()}
    extras(books, said, sections["Start"][0].claim, SRC / next(iter(pictures)))
    for place, text in overviews(sections, dict(pages.values())).items():
        write(place, text)
    for module in modules():
        local = {n: f"{LIB}.{module.name}.{n}" for n in refs[module.name][1]}
        write(module.page, crosslink(module_page(module, refs[module.name][0]), symbols | local))
    for book in books:
        write(f"{FILES}/{markdown_place(book)}", as_markdown(book))
        local = {n: f"{LIB}.{book.module}.{n}" for n in refs[book.module][1]} if book.module else {}
        write(book.page, stage_book(book, where, symbols | local, refs))
