"""Plain words (docs/glossary.md): no name in the package uses words that only this project used, no docstring points to
an "above" that the API page does not have, and each module says on one line what it is."""

import ast
import io
import re
import tokenize
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


def names(text):
    "Every name of a module: of variables, attributes, arguments, functions and classes; a string is none."
    return {t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.NAME}


def test_the_words_of_a_name():
    assert words("check_said") == ["check", "said"] and words("_SuffixGuess2") == ["suffix", "guess"]
    assert words("HTTPRoom") == ["http", "room"] and words("classroom") == ["classroom"]
    assert names("x.law = f(told=1)  # said\n'guess'\n") == {"x", "law", "f", "told"}


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_in_plain_words(path):
    'Its names; nothing that is "as above"; and one line that says what it is.'
    text = path.read_text()
    tree = ast.parse(text)
    found = {name for name in names(text) if NOT_NAMES & set(words(name))}
    assert not found - ALLOWED.get(str(path.relative_to(ROOT)), set())
    above = [line for line in text.splitlines() if re.search(r"\bas above\b", line, re.I)]
    docs = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    assert not above and not [doc for doc in docs if re.search(r"\bas\s+above\b", doc, re.I)]
    assert path.name == "__init__.py" or (docs[0] and 20 < len(docs[0].splitlines()[0]) <= 114)
