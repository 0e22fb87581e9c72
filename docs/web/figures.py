"""The figures of the notebooks: what each shows, in words, and the gallery of all."""

import ast
import base64
import html
import io
import re

from PIL import Image

from web.cells import directives
from web.places import EXTRA

WIDTH = 320  # of a thumbnail, in pixels
TITLES = {"title", "suptitle", "set_title"}  # a keyword or a method that gives a figure its title
DRAWS = re.compile(r"plot|draw|picture|show|heat", flags=re.I)  # functions whose text is a title


def words(node):
    "A string in the source, `…` for what is filled in"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def titles(source):
    "Titles that a cell gives to its figures, in order"
    tree = ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M))
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        found += [(k.value.lineno, words(k.value)) for k in call.keywords if k.arg in TITLES]
        if name in TITLES or DRAWS.search(name):
            found += [(a.lineno, words(a)) for a in call.args if " " in words(a)]
    return [" ".join(text.split()) for _, text in sorted(found) if len(re.findall(r"[A-Za-z]{2,}", text)) > 2]


def alt_text(cell, heading):
    "What a cell's figure shows: its own words, its titles, or the heading that it stands under"
    given = directives(cell).get("fig-alt")
    return given or "; ".join(dict.fromkeys(titles(cell["source"]))) or f"Figure: {heading}"


def pictures(cell):
    "The PNG figures among a cell's stored outputs"
    found = (out["data"]["image/png"] for out in cell.get("outputs", ()) if "image/png" in out.get("data", {}))
    return [base64.b64decode("".join(data)) for data in found]


def figures(nb):
    "(index of the cell, what it shows, PNG) of every stored figure of a notebook"
    heading = ""
    for i, cell in enumerate(nb["cells"]):
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.+)$", cell["source"], flags=re.M) or [heading])[-1]
        elif cell["cell_type"] == "code":
            for png in pictures(cell):
                yield i, alt_text(cell, heading), png


def anchor(i):
    "Where the figures of cell i are on their page"
    return f"figure-{i}"


def thumbnail(png):
    "A small WebP of it, and its size"
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.save(out, "webp", quality=60, method=6)
    return out.getvalue(), picture.size


def gallery(sections):
    "The page of all figures; writes their thumbnails"
    (EXTRA / "thumbs").mkdir(parents=True, exist_ok=True)
    parts = ["# Gallery\n\nEvery figure that a notebook has stored: a click leads to the cell that draws it.\n"]
    for section, books in sections.items():
        tiles = []
        for book in books:
            for number, (i, alt, png) in enumerate(figures(book.nb)):
                small, (width, height) = thumbnail(png)
                name = f"thumbs/{book.page.replace('/', '-').removesuffix('.ipynb')}-{number}.webp"
                (EXTRA / name).write_bytes(small)
                link = f"{book.page.removesuffix('.ipynb')}.html#{anchor(i)}"
                tiles.append(
                    f'<a href="{link}"><img src="{name}" width="{width}" height="{height}" loading="lazy" '
                    f'alt="{html.escape(alt)}"><span>{html.escape(book.title)}</span></a>'
                )
        if tiles and section != "Start":
            parts.append(f'## {section}\n\n<div class="gallery">\n' + "\n".join(tiles) + "\n</div>\n")
    return "\n".join(parts)
