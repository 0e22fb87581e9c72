"""Plain words (docs/glossary.md): no name in the package uses words that only this project used, no docstring points to
an "above" that the API page does not have, and each module says on one line what it is."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for p in (ROOT / "speculators_nb").rglob("*.py") if p.name != "_modidx.py")  # generated
NOT_NAMES = {
    "law",
    "laws",
    "guess",
    "guesses",
    "guessed",
    "told",
    "said",
    "hears",
    "asked",
    "standing",
    "tally",
    "room",
}
NOT_NAMES |= {"interview", "driven"}
ALLOWED: dict[str, set[str]] = {}  # module -> exact names, each with its reason


def words(name):
    "A name's words: at underscores and at capitals."
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


@cache
def parsed(path):
    return ast.parse(path.read_text())


def names(text):
    "Every name of a module: of variables, attributes, arguments, functions and classes; a string is none."
    return {t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.NAME}


def test_the_words_of_a_name():
    assert words("check_said") == ["check", "said"] and words("_SuffixGuess2") == ["suffix", "guess"]
    assert words("HTTPRoom") == ["http", "room"] and words("classroom") == ["classroom"]
    assert names("x.law = f(told=1)  # said\n'guess'\n") == {"x", "law", "f", "told"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_are_plain(path):
    found = {name for name in names(path.read_text()) if NOT_NAMES & set(words(name))}
    assert not found - ALLOWED.get(str(path.relative_to(ROOT)), set())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_as_above(path):
    above = [line for line in path.read_text().splitlines() if re.search(r"\bas above\b", line, re.I)]
    docs = [ast.get_docstring(n) or "" for n in ast.walk(parsed(path)) if isinstance(n, DOCUMENTED)]
    assert not above and not [doc for doc in docs if re.search(r"\bas\s+above\b", doc, re.I)]


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_module_says_on_one_line_what_it_is(path):
    doc = ast.get_docstring(parsed(path))
    assert doc and 20 < len(doc.splitlines()[0]) <= 114
