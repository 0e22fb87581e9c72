"""Pages that lead to other pages: the landing page (README.md), one for each group of the sidebar, all notebooks."""

import re

import commands
from readme import readme

from web.books import duration, first_sentence, modules, plain, title_of
from web.places import DRAFTERS, GUIDES, INTERNALS, START, STARTS

GROUPS = ["start", "tutorials", "guides", "commands", "drafters", "internals"]  # pages, in the order of the sidebar
BROWSE = (
    "- **Browse**: [figures](/gallery.md), [widgets to try](/internals/widgets.md), [papers](/papers.md), "
    "<a href='genindex.html'>the library by name</a>."
)


def toctree(places):
    return "```{toctree}\n:hidden:\n\n" + "\n".join(places) + "\n```\n"


def landing():
    "README.md as the first page of the site, and its pictures"
    text, pictures = readme(widgets=True)
    text = re.sub(r"^<!--.*-->\n", "", text)
    text = re.sub(r"^- .*`make docs` builds.*$", BROWSE, text, flags=re.M)
    return f"---\nhide-toc: true\n---\n{text}\n{toctree(GROUPS)}", pictures


def table(books):
    "Notebooks with what they claim and how long they run"
    rows = [f"| [{b.title}](/{b.page}) | {plain(b.claim)} | {duration(b.here)} |" for b in books]
    return "\n".join(["| notebook | what it shows | runs in |", "| --- | --- | --- |", *rows]) + "\n"


def module_table(package):
    "Modules of a package that are written by hand, with what they say of themselves"
    rows = [f"| [{m.name}](/{m.page}) | {' '.join(m.docstring.split())} |" for m in in_package(package)]
    return "\n".join(["| module | what it holds |", "| --- | --- |", *rows]) + "\n" if rows else ""


def in_package(package):
    return [m for m in modules() if m.name.split(".")[0] == package]


def overviews(sections, pages):
    "place -> text of every group's page; `sections` of notebooks, `pages` of the site as place -> text"
    every = [b for books in sections.values() for b in books]
    drafters = [b for page in DRAFTERS for b in every if b.page == page]
    out = {}

    def listed(own):
        return "\n".join(f"- [{title_of(pages[p])}](/{p}): {plain(first_sentence(pages[p]))}" for p in own)

    def group(place, title, own, text="", below=()):
        entries = ["/" + p.rsplit(".", 1)[0] for p in [*own, *below]]
        out[f"{place}.md"] = "\n\n".join([f"# {title}", text or listed(own), toctree(entries)])

    parts = [f"## {why}\n\n{listed(f'{page}.md' for page in own)}" for why, own in STARTS.items()]
    group("start", "Start", START.values(), "\n\n".join(parts))
    group("tutorials", "Tutorials", [], table(sections["Tutorials"]), [b.page for b in sections["Tutorials"]])
    group("guides", "Guides", GUIDES.values())
    names = [f"commands/{name}.md" for name in commands.entered()]
    group("commands", "Commands", names)
    group("drafters", "Drafters", [], table(drafters), [b.page for b in drafters])
    packages = []
    for section, books in sections.items():
        name, _, what = section.partition(": ")
        rest = [b for b in books if b not in drafters]
        if what:
            packages.append(f"internals/{name}.md")
            text = f"{what[0].upper()}{what[1:]}.\n\n{table(rest) if rest else ''}\n{module_table(name)}"
            group(f"internals/{name}", name, [], text, [page.page for page in [*rest, *in_package(name)]])
    lines = "\n".join(f"- [{p[10:-3]}](/{p}): {out[p].split(chr(10))[2]}" for p in packages)
    group("internals", "Internals", INTERNALS.values(), f"{listed(INTERNALS.values())}\n\n{lines}", packages)
    return out


def all_notebooks(text, sections):
    "docs/notebooks.md with a table of notebooks for each section in place of its table of folders"
    tables = [f"## {section}\n\n{table(books)}" for section, books in sections.items() if section != "Start"]
    return re.sub(r"^\| folder .*\Z", "\n".join(tables), text, flags=re.M | re.S)
