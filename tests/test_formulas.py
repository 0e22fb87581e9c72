"""docs/web/formulas.py: LaTeX as MathML, and what fails the build."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("latex2mathml", reason="the extra 'docs' has it")
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from web.formulas import mathml

NOTEBOOKS = Path(__file__).parents[1] / "nbs"


def elements(tex):
    "(tag, text) of the formula's leaves"
    tree = ElementTree.fromstring(mathml(tex))
    return [(e.tag.split("}")[1], e.text) for e in tree.iter() if not len(e)]


def test_a_function_has_a_space_before_its_argument_and_none_before_a_parenthesis():
    assert elements(r"\max(0)") == [("mi", "max"), ("mo", "("), ("mn", "0"), ("mo", ")")]
    assert elements(r"\tanh o") == [("mi", "tanh"), ("mspace", None), ("mi", "o")]
    assert elements(r"\min_v p") == [("mi", "min"), ("mi", "v"), ("mspace", None), ("mi", "p")]


@pytest.mark.parametrize(
    "tex, leaves",
    [
        (r"\mathbf{1}_T", [("mn", "\U0001d7cf"), ("mi", "T")]),
        (r"x \sim q", [("mi", "x"), ("mo", "\u223c"), ("mi", "q")]),
        (r"\Vert p\Vert", [("mi", "‖"), ("mi", "p"), ("mi", "‖")]),
        (r"\mathbb{E}|a|", [("mi", "\U0001d53c"), ("mo", "|"), ("mi", "a"), ("mo", "|")]),
        ("a < b", [("mi", "a"), ("mo", "<"), ("mi", "b")]),
    ],
)
def test_symbols(tex, leaves):
    assert elements(tex) == leaves


def test_tables_and_display():
    assert mathml(r"\begin{cases} a & b \\ c & d \end{cases}").count("<mtr>") == 2
    assert 'display="block"' in mathml("a", "block")


@pytest.mark.parametrize("tex", [r"\nosuchcommand x", r"\frac{a", r"\frac{a}", "x^", r"\begin{cases} a"])
def test_what_cannot_be_read_is_an_error_that_shows_it(tex):
    with pytest.raises(ValueError, match="latex2mathml does not know|missing|Error") as error:
        mathml(tex)
    assert repr(tex) in str(error.value)


def test_the_formulas_of_every_notebook():
    "Without the minutes that building the site takes."
    wrong = []
    for path in sorted(NOTEBOOKS.rglob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        text = re.sub(r"`[^`\n]+`", "", text)  # code may hold a dollar
        for block, inline in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, flags=re.S):
            try:
                mathml(block or inline)
            except ValueError as e:
                wrong.append(f"{path.name}: {e}")
    assert not wrong
