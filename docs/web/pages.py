"""Every page of the site and its table of contents, as Sphinx reads them (docs/_src)."""

import json
import shutil
import sys

import commands
import yaml

from web.cells import exported, join_imports, load, stage_cell
from web.links import crosslink, relink
from web.places import GUIDES, LIB, MADE, PAGES, ROOT, SRC
from web.reference import reference


def note(path, module):
    "The line under a page's title"
    up = "../" * (path.count("/") + 1)
    made = f"exports {{py:mod}}`{LIB}.{module}`" if module else f"`jupyter lab {path}` runs it"
    return f"Notebook: {{download}}`{path} <{up}{path}>`, {made}\n"


def groups():
    "(title, notebooks) in the order of nbs/sidebar.yml, which Quarto reads too"
    contents = yaml.safe_load((ROOT / "nbs/sidebar.yml").read_text())["website"]["sidebar"]["contents"]
    for entry in contents:
        patterns = [entry["contents"]] if isinstance(entry["contents"], str) else entry["contents"]
        yield entry["section"], [p for x in patterns for p in sorted((ROOT / "nbs").glob(x))]


def stage():
    "Write every page and the table of contents to docs/_src"
    shutil.rmtree(SRC, ignore_errors=True)
    toc = list(groups())
    if (
        left := set((ROOT / "nbs").rglob("[!.]*.ipynb"))
        - {p for _, paths in toc for p in paths}
        - set((ROOT / "nbs").rglob(".ipynb_checkpoints/*"))
    ):
        sys.exit(f"nbs/sidebar.yml lists no place for {sorted(map(str, left))}")
    books = {p: load(p) for _, paths in toc for p in paths}
    where = {f"nbs/{p.relative_to(ROOT / 'nbs')}": str(p.relative_to(ROOT / "nbs")) for p in books}
    pages = {f"docs/{place}": text for place, text in commands.pages().items()}
    where |= PAGES | GUIDES | {here: here.removeprefix("docs/") for here in pages}
    pages |= {here: MADE[here]() if here in MADE else (ROOT / here).read_text() for here in PAGES | GUIDES}
    refs = {m: reference(m) for m in map(exported, books.values()) if m}
    seen = [n for _, names in refs.values() for n in names]
    symbols = {n: f"{LIB}.{m}.{n}" for m, (_, names) in refs.items() for n in names if seen.count(n) == 1}
    symbols |= {n: f"{LIB}.{m}" for m in refs for n in (m, f"{LIB}.{m}") if n not in seen}
    for here, text in pages.items():
        target = SRC / where[here]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(crosslink(relink(text, here, where), symbols))
    for path, nb in books.items():
        here, module = str(path.relative_to(ROOT)), exported(nb)
        local = symbols | {n: f"{LIB}.{module}.{n}" for n in refs[module][1]} if module else symbols
        cells = join_imports(c for c in map(stage_cell, nb["cells"]) if c)
        for c in cells:
            if c["cell_type"] == "markdown":
                c["source"] = crosslink(relink(c["source"], here, where), local)
        extra = refs[module][0] if module else ""
        if here == "nbs/index.ipynb":
            trees = [
                (
                    t,
                    (["Overview <self>", *PAGES.values()] if t == "Start" else [])
                    + [where[str(p.relative_to(ROOT))] for p in ps if p != path],
                )
                for t, ps in toc
            ]
            trees.insert(1, ("Guides", list(GUIDES.values())))
            trees.insert(2, ("Commands", [f"{name} <commands/{name}>" for name in commands.entered()]))
            extra = "\n".join(
                f"```{{toctree}}\n:hidden:\n:caption: {t}\n\n" + "\n".join(ps) + "\n```\n" for t, ps in trees if ps
            )
        else:
            cells.insert(1, {"cell_type": "markdown", "id": "about-page", "metadata": {}, "source": note(here, module)})
        if extra:
            cells.append({"cell_type": "markdown", "id": "reference", "metadata": {}, "source": extra})
        nb["cells"] = cells
        nb["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "python"}
        target = SRC / where[here]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(nb))
