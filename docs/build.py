#!/usr/bin/env python
"""Build the site: nbs/ -> docs/_src -> Sphinx (myst-nb, furo) -> docs/_site. Nothing is executed and nothing is
fetched.

A page is its notebook with the stored outputs. Below a module's notebook stands its reference: real Python objects for
links and search, read from the exported module by `ast`, so that annotations and defaults appear as they were written.
"""

import ast
import io
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from importlib.metadata import files
from pathlib import Path

import commands
import conformance
import migration
import yaml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SRC, SITE = DOCS / "_src", DOCS / "_site"
LIB = "speculators_nb"
PAGES = {
    "docs/glossary.md": "glossary.md",
    "docs/architecture.md": "architecture.md",
    "docs/verifiers.md": "verifiers.md",
    "docs/differences.md": "differences.md",
    "docs/conformance.md": "conformance.md",
    "docs/release.md": "release.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}  # beside the notebooks
GUIDES = {
    f"docs/{page}.md": f"{page}.md"
    for page in (
        "which_drafter",
        "first_run",
        "how_much_data",
        "low_acceptance",
        "coming_from_speculators",
        "coming_from_specforge",
    )
}  # a group of the sidebar, after Start
MADE = {
    "docs/conformance.md": conformance.page,  # no file holds it
    "docs/coming_from_speculators.md": migration.page,  # numbers are filled in
}
FILES = "files"  # on the site: files of the repository that pages link to
FOLD = 45  # an exported cell with more lines than this starts folded
# empty: the project has no address yet
GIT_URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]["git_url"]


# ---- the reference: objects of an exported module


def comments(source):
    "line number -> the comment that ends it"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        t.start[0]: t.string.lstrip("# ").strip()
        for t in tokens
        if t.type == tokenize.COMMENT and t.line.strip()[0] != "#"
    }


def decorators(node):
    return {ast.unparse(d).split("(")[0] for d in node.decorator_list}


def parameters(fn, notes, drop=()):
    "[(name as shown, name, annotation, default, comment)] of a function, in order"
    a, rows = fn.args, []
    plain = a.posonlyargs + a.args
    defaults = [None] * (len(plain) - len(a.defaults)) + a.defaults
    for arg, default in zip(plain, defaults):
        rows.append((arg.arg, arg, default))
    if a.vararg:
        rows.append(("*" + a.vararg.arg, a.vararg, None))
    elif a.kwonlyargs:
        rows.append(("*", None, None))
    rows += [(arg.arg, arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg:
        rows.append(("**" + a.kwarg.arg, a.kwarg, None))
    # a comment belongs to its line's only parameter
    ends = [n.end_lineno for _, arg, d in rows if arg for n in [d or arg]]
    return [
        (
            shown,
            arg,
            default,
            notes.get((default or arg).end_lineno) if arg and ends.count((default or arg).end_lineno) == 1 else None,
        )
        for shown, arg, default in rows
        if shown not in drop
    ]


def shown_type(node):
    "An annotation without the quotes of a forward reference"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def signature(rows, returns=None):
    def one(shown, arg, default):
        text = shown + (f": {shown_type(arg.annotation)}" if arg is not None and arg.annotation else "")
        return text + (f" = {ast.unparse(default)}" if default is not None else "")

    return "(" + ", ".join(one(*r[:3]) for r in rows) + ")" + (f" -> {shown_type(returns)}" if returns else "")


def fields(rows, returned=None):
    out = [f":param {shown.replace('*', chr(92) + '*')}: {note}" for shown, _, _, note in rows if note]
    return out + ([f":returns: {returned}"] if returned else [])


def directive(kind, head, body, options=(), fence="```"):
    return "\n".join([f"{fence}{{py:{kind}}} {head}", *options, "", *body, fence, ""])


def docstring(node):
    return [ast.get_docstring(node) or "", ""]


def function(node, notes, kind="function", fence="```"):
    deco = decorators(node)
    drop = ("self",) if kind == "method" and "staticmethod" not in deco else ()
    rows = parameters(node, notes, drop + (("cls",) if "classmethod" in deco else ()))
    if kind == "method" and deco & {"property", "cached_property"}:
        options = [f":type: {shown_type(node.returns)}"] if node.returns else []
        return directive("property", node.name, docstring(node), options, fence)
    # the comment after `) -> Type:` describes what is returned
    end = max(
        [node.lineno]
        + [n.end_lineno for n in ast.walk(node.args) if hasattr(n, "end_lineno")]
        + ([node.returns.end_lineno] if node.returns else [])
    )
    returned = (
        notes.get(end)
        if node.returns and node.returns.end_lineno == end and not any(n == notes.get(end) for *_, n in rows)
        else None
    )
    options = [f":{d[:-6]}method:" for d in ("classmethod", "staticmethod") if d in deco and kind == "method"]
    head = node.name + signature(rows, node.returns)
    return directive(kind, head, [*docstring(node), *fields(rows, returned)], options, fence)


def klass(node, notes, patched):
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)] + patched
    init = next((m for m in methods if m.name == "__init__"), None)
    annotated = [
        n
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and n.target.id[0] != "_"
        and "ClassVar" not in ast.unparse(n.annotation)
    ]
    if init:
        rows = parameters(init, notes, ("self",))
    else:  # dataclass, NamedTuple, pydantic
        rows = [(n.target.id, n, n.value, notes.get(n.end_lineno)) for n in annotated]
    inner = [function(m, notes, "method") for m in methods if m.name[0] != "_" or m.name == "__call__"]
    return directive("class", node.name + signature(rows), [*docstring(node), *fields(rows), "", *inner], fence="`````")


def reference(module):
    "The reference of one exported module as MyST text, and its public names"
    source = (ROOT / LIB / f"{module.replace('.', '/')}.py").read_text()
    tree, notes = ast.parse(source), comments(source)
    public = next(
        (
            ast.literal_eval(n.value)
            for n in tree.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ),
        [],
    )
    patches = {}
    for n in tree.body:
        if isinstance(n, ast.FunctionDef) and "patch" in decorators(n):
            patches.setdefault(ast.unparse(n.args.args[0].annotation), []).append(n)
    out, names = [], []
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in public:
            names.append(n.name)
            if isinstance(n, ast.ClassDef):
                names += [f"{n.name}.{m.name}" for m in n.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_"]
            out.append(klass(n, notes, patches.get(n.name, [])) if isinstance(n, ast.ClassDef) else function(n, notes))
        elif isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id in public:
            names.append(n.targets[0].id)
            value = ast.unparse(n.value)
            options = [f":value: {json.dumps(value, ensure_ascii=False)}"] if len(value) < 70 else []
            out.append(directive("data", names[-1], [notes.get(n.end_lineno, "")], options))
    head = f"## Reference\n\nWhat `{LIB}.{module}` exports.\n\n```{{py:module}} {LIB}.{module}\n```\n"
    return "\n".join([head, *out]) if out else "", names


# ---- the pages: a notebook becomes what Sphinx reads


def directives(cell):
    "`#| name: value` lines at the top of a code cell"
    return dict(m.groups() for m in re.finditer(r"^#\|\s*([\w-]+):?[ \t]*(.*)$", cell["source"], flags=re.M))


def relink(text, here, where):
    """Relative links of a page that lies at `here` in the repository, as links from its place on the site. A file that
    is no page is linked at the project's address; where it has none, the file is put on the site, and the link to a
    folder becomes plain text."""

    def link(m):
        target, _, anchor = m[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return m[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if path in where:
            new = posixpath.relpath(where[path], posixpath.dirname(where[here]) or ".")
        elif GIT_URL:
            new = f"{GIT_URL}/blob/main/{path}"
        elif (ROOT / path).is_dir():
            return m[1][1:-1]
        else:
            copy = SRC / FILES / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
            return f"{m[1]}(path:{posixpath.relpath(f'{FILES}/{path}', posixpath.dirname(where[here]) or '.')})"
        return f"{m[1]}({new}{'#' + anchor if anchor else ''})"

    return re.sub(r"(\[[^\]]*\])\(([^)\s]+)\)", link, text)


def crosslink(text, symbols):
    "`name` in prose becomes a link, where exactly one module exports that name"

    def link(m):
        return f"{{py:obj}}`{m[1]} <{symbols[m[1]]}>`" if m[1] in symbols else m[0]

    parts = re.split(r"(^```.*?^```|^#.*?$)", text, flags=re.M | re.S)  # fenced blocks and headings stay
    return "".join(p if i % 2 else re.sub(r"(?<![`}\w])`([A-Za-z_][\w.]*)`(?!`)", link, p) for i, p in enumerate(parts))


def mathematics(text):
    """What JupyterLab does not need and MyST does: `$$` lines as paragraphs of their own, no `\\|` (it ends a table's
    cell)"""
    text = re.sub(r"\$[^$\n]+\$", lambda m: m[0].replace(r"\|", r"\Vert "), text)
    return re.sub(r"^\$\$(.+?)\$\$[ \t]*$", r"\n$$\n\1\n$$\n", text, flags=re.M | re.S)


def stage_cell(cell):
    "The cell as the site shows it, or None"
    if cell["cell_type"] != "code":
        return {**cell, "source": mathematics(cell["source"])}
    flags = directives(cell)
    source = re.sub(r"^#\|.*\n?", "", cell["source"], flags=re.M).strip("\n")
    if not source or {"hide", "exporti"} & flags.keys() or flags.get("include") == "false":
        return None
    tags = ["hide-input"] if is_imports(source) or ("export" in flags and source.count("\n") >= FOLD) else []
    tags += ["remove-input"] if "hide_input" in flags or flags.get("echo") == "false" else []
    tags += ["remove-output"] if "hide_output" in flags or flags.get("output") == "false" else []
    fold = {
        "code_prompt_show": "imports" if is_imports(source) else source.split("\n")[0].rstrip("(:"),
        "code_prompt_hide": "fold",
    }
    return {**cell, "source": source, "metadata": {"tags": tags, "mystnb": fold}}


def is_imports(source):
    "Does the cell hold nothing but imports?"
    return all(
        isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M)).body
    )


def join_imports(cells):
    "One folded cell for the exported imports and those of the examples"
    out = []
    for c in cells:
        if out and all(x["cell_type"] == "code" and is_imports(x["source"]) for x in (c, out[-1])):
            out[-1]["source"] += "\n" + c["source"]
        else:
            out.append(c)
    return out


def load(path):
    nb = json.loads(path.read_text())
    for c in nb["cells"]:
        c["source"] = "".join(c["source"])
    return nb


def exported(nb):
    return next(
        (
            d["default_exp"]
            for c in nb["cells"]
            if c["cell_type"] == "code"
            for d in [directives(c)]
            if "default_exp" in d
        ),
        None,
    )


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


def mathjax():
    "MathJax 3 as one file, from the Python package that carries it"
    wheel = files("sphinx-mathjax-offline") or sys.exit(
        "docs need the Python package sphinx-mathjax-offline: make env-dev"
    )
    target = DOCS / "_static/mathjax/tex-svg.js"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(next(f for f in wheel if f.match("static/mathjax/tex-svg.js")).locate(), target)


def widgets():
    "The modules of the widgets and their style, which docs/conf.py puts on the pages that have a widget"
    shutil.copytree(ROOT / LIB / "widgets/js", DOCS / "_static/widgets", dirs_exist_ok=True)


def main():
    mathjax()
    widgets()
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-j",
        "auto",
        "-b",
        "html",
        "-c",
        DOCS,
        "-d",
        DOCS / "_src/.doctrees",
        SRC,
        SITE,
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    shutil.rmtree(DOCS / "jupyter_execute", ignore_errors=True)  # myst-nb's copies, which no page needs
    if done.returncode:
        sys.exit("docs: Sphinx found the problems above")
    print(
        f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}: open "
        f"{(SITE / 'index.html').relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
