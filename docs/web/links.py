"""Links between the pages of the site."""

import posixpath
import re
import shutil

from web import places
from web.address import BRANCH
from web.places import FILES, ROOT, SRC


def relink(text, here, where):
    """Relative links of a page that lies at `here` in the repository, as links from its place on the site. A file that
    is no page is linked at the project's address; where it has none, the file is put on the site, and the link to a
    folder becomes plain text. Pictures and links from the site's root stay as they are."""

    def link(m):
        target, _, anchor = m[2].partition("#")
        if not target or re.match(r"[a-z]+:|/", target):
            return m[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if path in where:
            new = posixpath.relpath(where[path], posixpath.dirname(where[here]) or ".")
        elif places.GIT_URL:
            new = f"{places.GIT_URL}/blob/{BRANCH}/{path}"
        elif (ROOT / path).is_dir():
            return m[1][1:-1]
        else:
            copy = SRC / FILES / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
            return f"{m[1]}(path:{posixpath.relpath(f'{FILES}/{path}', posixpath.dirname(where[here]) or '.')})"
        return f"{m[1]}({new}{'#' + anchor if anchor else ''})"

    return re.sub(r"(?<!!)(\[[^\]]*\])\(([^)\s]+)\)", link, text)


def crosslink(text, symbols):
    "`name` in prose becomes a link, where exactly one module exports that name"

    def link(m):
        return f"{{py:obj}}`{m[1]} <{symbols[m[1]]}>`" if m[1] in symbols else m[0]

    # fenced blocks, headings and the tables of a command's options and arguments stay
    parts = re.split(r"(^```.*?^```|^#.*?$|^\| `(?:--|[A-Z_]+`).*?$)", text, flags=re.M | re.S)
    return "".join(p if i % 2 else re.sub(r"(?<![`}\w])`([A-Za-z_][\w.]*)`(?!`)", link, p) for i, p in enumerate(parts))
