"""A notebook's cells as the site shows them."""

import ast
import json
import re


def load(path):
    nb = json.loads(path.read_text())
    for c in nb["cells"]:
        c["source"] = "".join(c["source"])
    return nb


def directives(cell):
    "`#| name: value` lines at the top of a code cell"
    return dict(m.groups() for m in re.finditer(r"^#\|\s*([\w-]+):?[ \t]*(.*)$", cell["source"], flags=re.M))


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


def mathematics(text):
    """What JupyterLab does not need and MyST does: `$$` lines as paragraphs of their own, no `\\|` (it ends a table's
    cell)"""
    text = re.sub(r"\$[^$\n]+\$", lambda m: m[0].replace(r"\|", r"\Vert "), text)
    return re.sub(r"^\$\$(.+?)\$\$[ \t]*$", r"\n$$\n\1\n$$\n", text, flags=re.M | re.S)


def is_imports(source):
    "Does the cell hold nothing but imports?"
    return all(
        isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M)).body
    )


def stage_cell(cell):
    "The cell as the site shows it, or None"
    if cell["cell_type"] != "code":
        return {**cell, "source": mathematics(cell["source"])}
    flags = directives(cell)
    source = re.sub(r"^#\|.*\n?", "", cell["source"], flags=re.M).strip("\n")
    if not source or {"hide", "exporti"} & flags.keys() or flags.get("include") == "false":
        return None
    tags = ["hide-input"] if is_imports(source) else []  # nothing else is folded: the page is about its code
    tags += ["remove-input"] if "hide_input" in flags or flags.get("echo") == "false" else []
    tags += ["remove-output"] if "hide_output" in flags or flags.get("output") == "false" else []
    fold = {"code_prompt_show": "imports", "code_prompt_hide": "fold"}
    return {**cell, "source": source, "metadata": {"tags": tags, "mystnb": fold}}


def join_imports(cells):
    "One folded cell for the exported imports and those of the examples"
    out = []
    for c in cells:
        if out and all(x["cell_type"] == "code" and is_imports(x["source"]) for x in (c, out[-1])):
            out[-1]["source"] += "\n" + c["source"]
        else:
            out.append(c)
    return out


def has_widget(cell):
    return any("data-widget=" in "".join(o.get("data", {}).get("text/html", "")) for o in cell.get("outputs", ()))


def widget_first(cells):
    "The page of a widget with the widget under its first cell, the claim; the code that makes it stays where it is"
    cells = list(cells)
    at = next((i for i, cell in enumerate(cells) if has_widget(cell)), None)
    if at is None:
        return cells
    made = cells[at]
    shown = {**made, "id": "widget", "metadata": {"tags": ["remove-input"]}}
    cells[at] = {**made, "outputs": []}
    return [cells[0], shown, *cells[1:]]
