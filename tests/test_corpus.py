"""The corpus: the same bytes for the same seed, well-formed conversations, answers that are right, two parts that never
meet."""

import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.lab.shipped import read_corpus

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "data" / "corpus"
sys.path.insert(0, str(ROOT / "data/make"))
from corpus import DOMAINS, conversation, corpus, is_heldout, is_right, main, spin, topics  # noqa: E402


def turns(row):
    messages = row["messages"]
    return [messages[:i] for i in range(2, len(messages) + 1, 2)]


@given(seed=st.integers(0, 10**6), domain=st.sampled_from(list(DOMAINS)))
@settings(max_examples=300, deadline=None)
def test_every_conversation_is_well_formed_and_right(seed, domain):
    row = conversation(random.Random(seed), domain)
    roles = [m["role"] for m in row["messages"]]
    assert roles == ["user", "assistant"] * (len(roles) // 2) and 1 <= len(roles) // 2 <= 3
    for m in row["messages"]:
        assert m["content"] == m["content"].strip() and m["content"]
        assert not re.search(r"\{|\}|\[[^\]]*\|", m["content"]), "a slot or a choice was left open"
        assert not re.search(r"\b[Aa] [aeo]\w", m["content"].split("```")[0]) or domain != "free"
    for messages in turns(row):
        assert is_right(domain, messages), messages


def spoil(domain, text):
    "The same answer with one thing wrong."
    if domain == "free":
        return text[:-1]
    if domain == "code":
        head, body = text.split("    ", 1)
        return head + "    " + re.sub(r"(\* |\+ |> |< |== )(\d)", lambda m: m[1] + str(9 - int(m[2])), body, count=1)
    if domain == "copying":
        return text.replace(" saw a", " saw a very", 1)
    if domain == "sorting" and " words" in text:
        head, words = text.rsplit(" ", 1)
        return f"{head} x{words}"
    spot = list(re.finditer(r"\d", text))[-1]
    return text[: spot.start()] + str((int(spot[0]) + 1) % 10) + text[spot.end() :]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_wrong_answer_is_noticed(domain):
    noticed = total = 0
    for seed in range(60):
        row = conversation(random.Random(seed), domain)
        for messages in turns(row):
            wrong = [*messages[:-1], dict(role="assistant", content=spoil(domain, messages[-1]["content"]))]
            if wrong[-1]["content"] != messages[-1]["content"]:
                total += 1
                noticed += not is_right(domain, wrong)
    assert total > 60 and noticed == total


TASKS = {
    r"(?:multiplies|scales).* (\d)": lambda v, k: [x * k for x in v],
    r"(?:adds|raises).* ?(\d)": lambda v, k: [x + k for x in v],
    r"(?:above|up to) (\d)": lambda v, k: [x for x in v if x > k],
    r"(?:below|from) (\d)": lambda v, k: [x for x in v if x < k],
    "keeps the even|drops the odd": lambda v, k: [x for x in v if x % 2 == 0],
    "keeps the odd|drops the even": lambda v, k: [x for x in v if x % 2 == 1],
}


def test_the_code_runs_and_does_what_was_asked():
    for seed in range(80):
        for messages in turns(conversation(random.Random(seed), "code")):
            space = {}
            exec(re.search(r"```python\n(.*?)\n```", messages[-1]["content"], re.S)[1], space)
            made = next(f for name, f in space.items() if name != "__builtins__")
            found, task = next(
                (m, f) for pattern, f in TASKS.items() if (m := re.search(pattern, messages[-2]["content"]))
            )
            k = int(found[1]) if found.re.groups else 0
            assert made(list(range(12))) == task(list(range(12)), k), messages


def test_same_seed_same_corpus_and_a_prefix_for_a_smaller_n():
    assert corpus(30, seed=7) == corpus(30, seed=7)
    assert corpus(30, seed=7)[:12] == corpus(12, seed=7)
    assert corpus(30, seed=7) != corpus(30, seed=8)


def test_domains_are_balanced_and_ids_differ():
    rows = corpus(120)
    assert set(Counter(r["domain"] for r in rows).values()) == {20}
    assert len({r["domain"] for r in rows[::2]}) == len({r["domain"] for r in rows[::6]}) == 6, (
        "a stride through the file misses domains"
    )
    assert len({r["id"] for r in rows}) == 120
    assert set(rows[0]) == {"id", "domain", "messages"}


def test_no_prompt_is_in_both_parts():
    train, heldout = corpus(1200), corpus(120, heldout=True)
    assert not any(map(is_heldout, train)) and all(map(is_heldout, heldout))
    first = {r["messages"][0]["content"] for r in train}
    assert not first & {r["messages"][0]["content"] for r in heldout}


def test_spin_takes_every_branch_and_leaves_lists_alone():
    seen = {spin(random.Random(s), "[a|b[c|d]] [1, 2]") for s in range(50)}
    assert seen == {"a [1, 2]", "bc [1, 2]", "bd [1, 2]"}


def test_shipped_files_are_what_the_program_makes(tmp_path):
    main(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes(), (
            f"{name} is stale: run the command in data/corpus/README.md"
        )
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) <= 1.5e6
    assert read_corpus(SHIPPED / "heldout.jsonl") == corpus(180, heldout=True)


def test_topics_are_plain_english():
    paragraphs = topics()
    assert len(paragraphs) > 500 and sum(map(len, paragraphs)) > 150_000
    assert all(len(p.split()) >= 12 and "\n" not in p for p in paragraphs)
    assert any("exception" in p for p in paragraphs)
