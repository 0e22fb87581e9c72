"""A verifier's own questions: what is dropped, a run that is continued, and the command."""

import json

import pytest
from test_cli import VERIFIER, one_line, run
from transformers import AutoTokenizer

from speculators_nb.data.chat_template import ControlTokens
from speculators_nb.regenerate import self_prompts
from speculators_nb.regenerate.journal import read_regenerated
from speculators_nb.regenerate.self_prompts import QuestionFilter, user_turn, write_self_prompts
from speculators_nb.verifier.tapped_model import Verifier


@pytest.fixture(scope="module")
def pair():
    return Verifier.from_pretrained(str(VERIFIER)), AutoTokenizer.from_pretrained(VERIFIER)


def test_the_prompt_ends_where_a_message_begins(pair):
    assert pair[1].decode(user_turn(pair[1])) == "<|im_start|>user\n"
    tokenizer = AutoTokenizer.from_pretrained(VERIFIER)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="self_prompts: .* has nothing before a user's message"):
        user_turn(tokenizer)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("I\u2019m sorry, I can't help with that.", "a refusal, or an assistant's words"),
        ("As an AI language model, I have no home.", "a refusal, or an assistant's words"),
        ("I'm happy to hear that you are going to move to another town", "a refusal, or an assistant's words"),
        ("Can you tell me why the sky is blue at noon, please?", "a duplicate"),
        ("Was ist der Unterschied zwischen einer Katze und einem Hund?", "another language"),
        ("What does <|im_end|> mean?", "a control token is spelled in it"),
        ("Can you say why the sky is red in the evening?", None),
    ],
)
def test_what_is_dropped(pair, text, reason):
    questions = QuestionFilter(ControlTokens(pair[1]), "en")
    assert questions.keep("Can you tell me why the sky is blue?")
    assert questions.reason(text, tokens=9, ended=True) == reason


def test_an_interrupted_run_writes_the_same_file(pair, tmp_path):
    whole, torn = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_self_prompts(*pair, whole, 6, batch_size=4)
    lines = whole.read_bytes().splitlines(True)
    assert len({json.loads(line)["messages"][0]["content"] for line in lines}) == len(lines) == 6
    torn.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    write_self_prompts(*pair, torn, 5, batch_size=4)
    assert torn.read_bytes() == b"".join(lines[:5])
    write_self_prompts(*pair, torn, 6, batch_size=4)
    assert torn.read_bytes() == whole.read_bytes()
    with pytest.raises(ValueError, match="was made with another seed; name another file"):
        write_self_prompts(*pair, torn, 6, seed=1)
    torn.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="line 1 is no question that --self-prompts wrote"):
        write_self_prompts(*pair, torn, 6)


def test_nothing_that_can_be_used(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(self_prompts, "LONGEST", 8)
    monkeypatch.setattr(self_prompts, "MOST_USELESS", 40)
    with pytest.raises(ValueError, match="none can be used .*no end within.*; name a file of prompts"):
        write_self_prompts(*pair, tmp_path / "a.jsonl", 1, languages="th", batch_size=4)


def test_a_verifier_that_repeats_itself_ends(pair, tmp_path, monkeypatch):
    one = [*pair[1]("Can you tell me why the sky is blue?")["input_ids"], pair[1].eos_token_id]
    monkeypatch.setattr(self_prompts, "answer", lambda verifier, prompts, *_: [one] * len(prompts))
    with pytest.raises(ValueError, match="last 960 questions .*963 × a duplicate.*; ask for the 1 that are written"):
        write_self_prompts(*pair, tmp_path / "a.jsonl", 3, batch_size=4)


def test_the_command_answers_its_own_questions(tmp_path):
    line = ["regenerate", tmp_path / "q.jsonl", tmp_path / "a.jsonl", "--verifier", VERIFIER]
    line += ["--self-prompts", 6, "--batch-size", 8, "--max-new-tokens", 8]
    assert run(*line).exit_code == 0
    answers = [json.loads(text) for text in (tmp_path / "a.jsonl").read_text().splitlines()]
    questions = [json.loads(text) for text in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [a["messages"][0] for a in answers] == [q["messages"][0] for q in questions] and len(answers) == 6
    assert "conversations that were there" in run(*line).stdout
    one_line(run(*line, "--server", "http://127.0.0.1:1"), "self_prompts=6: are written in this process")


def test_what_ships_of_smollm2_is_what_its_page_says():
    folder = VERIFIER.parent / "smollm2"
    page, rows = (folder / "README.md").read_text(), [*read_regenerated(folder / "answers.jsonl")]
    questions = [json.loads(line)["messages"] for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert [row["messages"][:1] for row in rows] == questions
    tokens, answered = (sum(map(f, rows)) for f in (lambda r: len(r["input_ids"]), lambda r: sum(r["loss_mask"])))
    assert f"{len(questions):,} questions" in page and f"{tokens:,} tokens, {answered:,}" in page
