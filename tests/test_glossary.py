"""docs/glossary.md: each term has its synonyms, one sentence and a notebook that exists; the site lists the page; and
the words that readers search for are in the prose of the notebooks that explain them."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from web import places  # noqa: E402

PAGE = (ROOT / "docs/glossary.md").read_text()
TERMS = re.findall(r"^### (.+)\n\*Also: (.+)\*\n(.+) \[Shown here\]\((.+)\)$", PAGE, flags=re.M)


def prose(notebook):
    cells = json.loads((ROOT / "nbs" / notebook).read_text())["cells"]
    return " ".join(" ".join("".join(c["source"]).split()) for c in cells if c["cell_type"] == "markdown").lower()


def test_every_term_is_written_in_the_same_way():
    assert len(TERMS) == PAGE.count("\n### ") == PAGE.count("[Shown here]") > 25
    names = [name for name, *_ in TERMS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name,synonyms,sentence,link", TERMS, ids=[name for name, *_ in TERMS])
def test_a_term_is_one_sentence_with_a_notebook(name, synonyms, sentence, link):
    assert (ROOT / "docs" / link).resolve().is_file()
    assert sentence.endswith(".") and not re.search(r"\. [A-Z]", sentence) and len(sentence) < 250
    assert synonyms.endswith(".") and name.lower() not in synonyms.lower().rstrip(".").split(", ")


SEARCHED = """target model, draft model, speculator, proposer, speculative sampling, residual distribution, bonus token,
tree attention, KV cache, TTT, d2t, t2d, on-policy, hidden state, mean acceptance length, self-generated"""


@pytest.mark.parametrize("word", re.split(r",\s", SEARCHED))
def test_the_words_that_are_searched_for_are_there(word):
    assert word.lower() in PAGE.lower()


def test_the_page_is_part_of_the_site():
    assert places.PAGES["docs/glossary.md"] == "glossary.md"
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "word,notebooks",
    {
        "rejection sampling": ["decode/02_acceptance_rules.ipynb"],
        "residual distribution": ["decode/02_acceptance_rules.ipynb"],
        "target model": ["verifier/02_tapped_model.ipynb"],
        "tree attention": ["decode/03_verification.ipynb"],
        "KV cache": ["decode/11_generate.ipynb", "nn/02_attention.ipynb"],
    }.items(),
)
def test_a_notebook_that_explains_a_term_uses_its_name(word, notebooks):
    assert any(word.lower() in prose(notebook) for notebook in notebooks), f"{word!r}: in the prose of {notebooks}"
