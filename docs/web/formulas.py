"""Formulas as MathML, written when the site is built: a page needs no script and no font to show one."""

import html
import re
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert_to_element
from sphinx.util import logging

THIN = "0.167em"  # TeX's space between a function and an argument without parentheses
OPERATORS = {"~": "\u223c", ";": ";"}  # latex2mathml makes identifiers of them, which have no space around
PARTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
log = logging.getLogger(__name__)


def mend(parent):
    """What latex2mathml writes and browsers set otherwise than TeX, mended in place: functions (`max`, `tanh`), bold
    digits, `\\sim` and `;`."""
    for at, child in reversed(list(enumerate(parent))):
        mend(child)
        text = child.text or ""
        if child.tag in ("mo", "mi") and re.fullmatch("[a-z]{2,}", text):
            child.tag = "mi"
        if child.tag == "mn" and child.attrib.pop("mathvariant", "") == "bold":
            child.text = "".join(chr(0x1D7CE + int(d)) if d.isdigit() else d for d in text)
        if child.tag == "mi" and text in OPERATORS:
            child.tag, child.text = "mo", OPERATORS[text]
        base = child[0] if child.tag in ("msub", "munder", "msup") else child
        after = parent[at + 1] if at + 1 < len(parent) and parent.tag == "mrow" else None
        if (
            base.tag == "mi"
            and re.fullmatch("[a-z]{2,}", base.text or "")
            and after is not None
            and after.tag not in ("mo", "mspace")
        ):
            parent.insert(at + 1, ElementTree.Element("mspace", width=THIN))


def mathml(tex: str, display: str = "inline") -> str:
    "A formula of LaTeX as a MathML element; ValueError where a command is unknown"
    try:
        formula = convert_to_element(tex, display=display)
    except Exception as error:
        raise ValueError(f"{tex!r}: {type(error).__name__} {error}") from error
    for e in formula.iter():
        e.text = html.unescape(e.text or "")  # latex2mathml holds "(" as "&#x00028;"
        if len(e) != PARTS.get(e.tag, len(e)):
            raise ValueError(f"{tex!r}: a brace or an argument is missing")
    if unknown := [e.text for e in formula.iter() if e.text.startswith("\\")]:
        raise ValueError(f"{tex!r}: latex2mathml does not know {', '.join(unknown)}")
    mend(formula)
    return ElementTree.tostring(formula, encoding="unicode")


def visit(self, node):
    "Write the formula; one that cannot be read is a warning, with which the build fails"
    block = isinstance(node, nodes.math_block)
    try:
        text = mathml(node.astext(), "block" if block else "inline")
    except ValueError as error:
        log.warning("formula %s", error, location=node)
        text = ""
    self.body.append(f'<div class="formula">{text}</div>\n' if block else text)  # a wide one scrolls in its box
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit, None), (visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
