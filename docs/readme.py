#!/usr/bin/env python
"""Write README.md from nbs/index.ipynb: its prose, its code and its stored outputs."""

import base64
import posixpath
import re

from web.cells import directives, load, stage_cell
from web.places import ROOT

PICTURES = "docs/readme"  # where the README finds its pictures


def output(out, name, alt, widgets):
    "One stored output as (markdown, PNG bytes or None)"
    if out["output_type"] == "stream":
        return ("```text\n" + "".join(out["text"]).rstrip() + "\n```", None) if out["name"] == "stdout" else ("", None)
    data = out.get("data", {})
    html = "".join(data.get("text/html", ""))
    if "snb-widget" in html:
        return f"```{{raw}} html\n{html}\n```" if widgets else "", None
    if "image/png" in data:
        return f"![{alt}]({PICTURES}/{name}.png)", base64.b64decode("".join(data["image/png"]))
    if "text/markdown" in data:
        return "".join(data["text/markdown"]), None
    return "```text\n" + "".join(data.get("text/plain", "")).rstrip() + "\n```", None


def readme(widgets=False):
    "The text of README.md, and its pictures as {path: bytes}; with widgets, for a page that has JavaScript"
    parts, pictures = ["<!-- made from nbs/index.ipynb by docs/readme.py: edit the notebook -->"], {}
    for cell in load(ROOT / "nbs/index.ipynb")["cells"]:
        shown = stage_cell(cell)
        if shown is None:
            continue
        if cell["cell_type"] != "code":
            # links are relative to nbs/; the README stands above it
            parts.append(
                re.sub(
                    r"\]\((?![a-z]+:|#)([^)\s]+)\)", lambda m: f"]({posixpath.normpath('nbs/' + m[1])})", cell["source"]
                )
            )
            continue
        if "echo" not in directives(cell):
            parts.append(f"```python\n{shown['source']}\n```")
        for out in cell["outputs"]:
            text, png = output(out, f"{len(pictures) + 1}", directives(cell).get("fig-alt"), widgets)
            parts.append(text)
            if png:
                pictures[f"{PICTURES}/{len(pictures) + 1}.png"] = png
    return "\n\n".join(p for p in parts if p) + "\n", pictures


def main():
    text, pictures = readme()
    for path, png in pictures.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_bytes(png)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    main()
