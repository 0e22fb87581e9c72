"""Loss masks: what the template marks, what its renderings betray, and what must be refused."""

import json
import re

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from speculators_nb.data import chat_template as template_module
from speculators_nb.data.chat_encoding import (
    encode,
    encode_batch,
    save_prepared,
    show_mask,
    token_frequencies,
)
from speculators_nb.data.chat_template import ChatTemplate, turns_of
from speculators_nb.data.messages import BadRow, normalize
from speculators_nb.data.prepare import prepare
from speculators_nb.evaluate.prompts import Prompt, encode_prompts
from speculators_nb.lab.shipped import read_corpus, shipped_data

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content "
    "}}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
PLAIN = re.sub(r"\{% (end)?generation %\}", "", MARKED)
# history without reasoning, the last turn with an empty think block: Qwen3's way
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n"
    "\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the generation prompt opens a think tag that the rendering of a finished turn lacks
OPENED = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def tokenizer(template):
    "Bytes, and the two markers: every border is a token border."
    bpe = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


def trained(tok, row):
    return tok.decode([i for i, m in zip(*row) if m])


def talk(*texts):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_a_turn_of_weight_0_is_read_and_not_trained(template):
    tok = tokenizer(template)
    chat = talk("2+2?", "5", "3+3?", "6")
    chat[1]["weight"] = 0
    (row,) = encode(chat, tok)
    assert trained(tok, row) == "6<|im_end|>\n" and "5<|im_end|>" in tok.decode(row[0])


def test_rewritten_history_gives_one_row_per_turn():
    tok = tokenizer(THINKING)
    rows = encode(talk("a?", "b", "c?", "d"), tok)
    assert [trained(tok, r) for r in rows] == [
        "<think>\n\n</think>\n\nb<|im_end|>\n",
        "<think>\n\n</think>\n\nd<|im_end|>\n",
    ]
    assert "<think>" not in tok.decode(rows[1][0]).split("c?")[0]


def test_opened_tag_in_the_generation_prompt():
    tok = tokenizer(OPENED)
    (row,) = encode(talk("a?", "b"), tok)
    assert trained(tok, row) == "b<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.role }}{{ m.content }}{% endfor %}",
    ],
)
def test_no_border_no_guess(template):
    with pytest.raises(ValueError, match="Mark them in the chat template") as e:
        encode(talk("a?", "b"), tokenizer(template))
    assert template in str(e.value) and "{% generation %}" in str(e.value)


HELLO, CALLED = talk("hi", "ho"), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"messages": HELLO}, HELLO),
        ({"conversations": HELLO}, HELLO),
        (HELLO, HELLO),
        ({"messages": json.dumps(HELLO)}, HELLO),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, HELLO),
        ([{"from": "human", "value": ["h", {"type": "text", "text": "i"}]}], HELLO[:1]),
        ([CALLED | {"score": 1}], [CALLED]),
        ([{"role": "developer", "content": "x"}], [{"role": "system", "content": "x"}]),
        ([{"role": "observation", "content": {"a": 1}}], [{"role": "tool", "content": '{"a": 1}'}]),
        ([HELLO[1] | {"reasoning": "y"}], [HELLO[1] | {"reasoning_content": "y", "thinking": "y"}]),
    ],
)
def test_dialects(row, messages):
    assert normalize(row) == messages


def test_saved_with_frequencies(tmp_path):
    data = prepare(
        [{"input_ids": [5, 5, 9], "loss_mask": [0, 1, 1]}, {"input_ids": [5, 2], "loss_mask": [1, 0]}],
        tokenizer(MARKED),
        8,
    )
    assert token_frequencies(data) == {5: 2, 9: 1}
    save_prepared(data, tmp_path / "rows")
    assert json.loads((tmp_path / "rows" / "token_freq.json").read_text()) == {"5": 2, "9": 1}
    again = load_from_disk(str(tmp_path / "rows"))
    assert again.to_list() == data.to_list() and again.info.description == data.info.description


def test_show_mask_escapes():
    tok = tokenizer(MARKED)
    page = show_mask(*encode(talk("<b>", "x\ny"), tok)[0], tok)._repr_html_()
    assert "&lt;" in page and "<b>" not in page and "⏎" in page


# ---- against a mask made by hand: the text is put together in Python, the assistant's characters are known, and a
# token is trained if it holds one of them

PROSE = "the sun is up and I said so , no ? 2+2=4 naïve 日本 🙂 <b> <think>"
WORDS = [*PROSE.split(), "\n", "\n\n", "", "tab\t"]
SAYS = (
    st.lists(st.sampled_from([*WORDS, " ", "\n", "  "]), min_size=1, max_size=8).map(" ".join).map(lambda t: t or " ")
)
TALK = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), SAYS), min_size=2, max_size=7
).filter(lambda turns: any(r == "assistant" for r, _ in turns[1:]) and turns[0][0] != "assistant")


def subwords(kind, template=PLAIN):
    "Tokenizers with merges: bytes with offsets as they are or trimmed, and sentence pieces with a space in front."
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "pieces"))
    if kind == "pieces":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bpe.decoder = decoders.Replace("▁", " ")
    else:
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "greedy")
        bpe.decoder = decoders.ByteLevel()
        bpe.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
    special = ["<unk>", "<|im_start|>", "<|im_end|>", *(f"<0x{i:02X}>" for i in range(256))]
    bpe.train_from_iterator(
        [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))] + ["user\nassistant\n\n system\n"] * 9,
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=[] if kind == "pieces" else pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


KINDS = {kind: subwords(kind) for kind in ("plain", "trimmed", "greedy", "pieces")}


def by_hand(turns, tok):
    "(ids, mask) through the last assistant turn."
    text, said = "", set()
    last = max(i for i, (r, _) in enumerate(turns) if r == "assistant")
    for i, (role, content) in enumerate(turns[: last + 1]):
        text += f"<|im_start|>{role}\n"
        start = len(text)
        text += f"{content}<|im_end|>\n"
        said |= set(range(start, len(text))) if role == "assistant" else set()
    backend = Tokenizer.from_str(tok.backend_tokenizer.to_str())
    if backend.post_processor is not None:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    out = backend.encode(text, add_special_tokens=False)
    return out.ids, [int(any(c in said for c in range(a, max(b, a + 1)))) for a, b in out.offsets]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(turns=TALK, marked=st.booleans())
def test_masks_against_characters(kind, turns, marked):
    tok = KINDS[kind]
    tok.chat_template = MARKED if marked else PLAIN
    (row,) = encode([{"role": r, "content": t} for r, t in turns], tok)
    assert row == by_hand(turns, tok)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(turns=TALK)
def test_marks_as_transformers_reads_them(turns):
    tok, messages = KINDS["plain"], [{"role": r, "content": t} for r, t in turns]
    tok.chat_template = MARKED
    theirs = tok.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ((ids, mask),) = encode(messages, tok)
    assert theirs["input_ids"][: len(ids)] == ids and not any(theirs["assistant_masks"][len(ids) :])
    assert theirs["assistant_masks"][: len(ids)] == mask


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(turns=TALK)
def test_a_row_per_turn_trains_that_turn_alone_and_together_they_train_the_same(turns):
    tok, messages = KINDS["plain"], [{"role": r, "content": t} for r, t in turns]
    tok.chat_template = PLAIN
    rows, ((ids, mask),) = encode(messages, tok, rows="turn"), encode(messages, tok)
    answers = [j for j, (r, _) in enumerate(turns) if r == "assistant"]
    assert len(rows) == len(answers)
    for j, row in zip(answers, rows):
        # "\n" of the prompt and " " of the answer may be one token, which is then trained
        said = f"{turns[j][1]}<|im_end|>\n"
        assert (
            row[0] == ids[: len(row[0])]
            and trained(tok, row).endswith(said)
            and not trained(tok, row).removesuffix(said).strip()
        )
    assert sum(sum(m) for _, m in rows) == sum(mask)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(TALK, min_size=1, max_size=6), rows=st.sampled_from(["conversation", "turn"]))
def test_a_batch_is_its_conversations_one_by_one(batch, rows):
    tok = KINDS["greedy"]
    tok.chat_template = THINKING
    chats = [[{"role": r, "content": t} for r, t in turns] for turns in batch]
    made = encode_batch(chats, ChatTemplate(tok), rows)
    for chat, part in zip(chats, made):
        if isinstance(
            part, Exception
        ):  # this template takes the reasoning out of an answer that another answer follows
            with pytest.raises(ValueError, match=r"message \d \(assistant\) does not continue"):
                encode(chat, tok, rows=rows)
        else:
            assert [(i.tolist(), m.astype(int).tolist()) for i, m in part] == encode(chat, tok, rows=rows)


# ---- a template that does what Qwen3's does: tools, tool calls, tool answers, reasoning since the last question

QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif "
    "%}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% "
    "endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ (m.reasoning_content or '') }}\n"
    "</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson "
    "}}</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n{% else "
    "%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking "
    "%}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_MARKED = QWEN.replace(
    "<|im_start|>assistant\n{% if loop", "<|im_start|>assistant\n{% generation %}{% if loop"
).replace("{% endfor %}<|im_end|>\n{% elif", "{% endfor %}<|im_end|>\n{% endgeneration %}{% elif")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
AGENT = [
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "a sum",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4.", "reasoning_content": "done"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "so.", "thinking": "hm"},
]


@pytest.mark.parametrize("template", [QWEN, QWEN_MARKED])
def test_reasoning_is_trained_where_the_verifier_saw_it(template):
    tok = tokenizer(template)
    rows = encode(normalize(AGENT), tok, TOOLS)
    assert [trained(tok, r) for r in rows] == [
        (
            '<think>\na sum\n</think>\n\n<tool_call>add {"a": 2}</tool_call><|im_end|>\n<think>\ndone\n</think>\n\n'
            "4.<|im_end|>\n"
        ),
        "<think>\nhm\n</think>\n\nso.<|im_end|>\n",
    ]
    texts = [tok.decode(ids) for ids, _ in rows]
    assert all(t.startswith('<|im_start|>system\n# Tools\n{"type": "function"') for t in texts)
    assert "a sum" not in texts[1] and "<tool_response>4</tool_response>" in texts[1]
    assert len(encode(normalize(AGENT), tok, TOOLS, rows="turn")) == 3


def test_template_arguments_move_the_border():
    tok = tokenizer(QWEN)
    assert trained(tok, encode(talk("a?", "b"), tok)[0]) == "<think>\n\n</think>\n\nb<|im_end|>\n"
    assert trained(tok, encode(talk("a?", "b"), tok, enable_thinking=False)[0]) == "b<|im_end|>\n"


def test_a_template_for_tools():
    tok = tokenizer({"default": PLAIN, "tool_use": QWEN})
    with_tools, without = (tok.decode(encode(talk("a?", "b"), tok, tools)[0][0]) for tools in (TOOLS, None))
    assert "# Tools" in with_tools and "# Tools" not in without


def test_what_a_tokenizer_begins_a_text_with_is_not_added():
    "As Llama's token of the beginning, which its chat template writes."
    tok, plain = tokenizer(PLAIN), tokenizer(PLAIN)
    begin = ("<|im_start|>", plain.convert_tokens_to_ids("<|im_start|>"))
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[begin]
    )
    assert tok("a").input_ids[0] == begin[1]
    assert encode(talk("a b", "c d"), tok) == encode(talk("a b", "c d"), plain)


def test_the_users_tokenizer_is_left_as_it_was():
    tok = KINDS["trimmed"]
    tok.chat_template = PLAIN
    before = tok("so so  so", return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    encode(talk("a b", "c d"), tok)
    # still trimmed
    assert tok("so so  so", return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"] == before
    assert before != [(o.item(0), o.item(1)) for o in np.array(ChatTemplate(tok).tokens(["so so  so"])[0].offsets)]


# ---- what lies behind the limit is not read, and nobody can tell


def cut(made, n):
    return [(ids[:n].tolist(), mask[:n].tolist()) for ids, mask in made if mask[:n].any()]


def same_with_a_limit(chats, tok, n, rows):
    """The rows of conversations, cut at n tokens, whether or not the limit is known before they are tokenised. Returns
    how many were read in part."""
    part = encode_batch(chats, ChatTemplate(tok), rows, n + 1)
    for chat, whole, first in zip(chats, encode_batch(chats, ChatTemplate(tok), rows), part):
        assert isinstance(whole, Exception) or not isinstance(first, Exception), (whole, first)
        if not isinstance(whole, Exception):  # else a later turn may be to blame
            assert cut(whole, n) == cut(first, n)
            assert first.partial or [len(i) for i, _ in first] == [len(i) for i, _ in whole]
    return sum(getattr(made, "partial", False) for made in part)


@pytest.mark.parametrize("template", [MARKED, PLAIN, THINKING])
@pytest.mark.parametrize("rows", ["conversation", "turn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_changes_no_token_of_the_corpus(kind, rows, template, monkeypatch):
    tok = KINDS[kind]
    tok.chat_template = template
    chats = [c["messages"] for c in read_corpus(shipped_data() / "corpus/train.jsonl")[:20]]
    assert same_with_a_limit(chats, tok, 40, rows) == 0  # they are short, and tokenised as ever
    monkeypatch.setattr(template_module, "WHOLE", 300)
    monkeypatch.setattr(template_module, "PER_TOKEN", 2)
    assert sum(same_with_a_limit(chats, tok, n, rows) for n in (20, 40, 80)) > 10


@pytest.mark.parametrize("kind", KINDS)
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    turns=st.one_of(TALK, TALK.map(lambda turns: [(r, t * (1 + 30 * (i % 3 == 1))) for i, (r, t) in enumerate(turns)])),
    n=st.integers(2, 60),
    template=st.sampled_from([MARKED, PLAIN, THINKING, OPENED]),
)
def test_the_limit_changes_no_token(kind, turns, n, template, monkeypatch):
    tok = KINDS[kind]
    tok.chat_template = template
    monkeypatch.setattr(template_module, "WHOLE", 120)
    monkeypatch.setattr(template_module, "PER_TOKEN", 2)
    same_with_a_limit([[{"role": r, "content": t} for r, t in turns * 5]], tok, n, "conversation")


def test_agents_that_think_long_keep_their_later_rows(monkeypatch):
    "Reasoning of the turns before goes from the history: a row may be short behind one that was long."
    tok = tokenizer(QWEN)
    monkeypatch.setattr(template_module, "WHOLE", 200)
    monkeypatch.setattr(template_module, "PER_TOKEN", 2)
    long = [dict(m) for m in AGENT]
    long[1] = long[1] | {"reasoning_content": "sum " * 500}
    messages = normalize(long)
    for n in (60, 100, 300):
        assert same_with_a_limit([messages], tok, n, "conversation") >= 0
    assert any("so." in tok.decode(ids) for ids, _ in encode_batch([messages], ChatTemplate(tok), first=300)[0])


def test_runs_of_one_letter_are_read_until_there_are_enough_tokens(monkeypatch):
    tok = KINDS["plain"]
    tok.chat_template = PLAIN
    monkeypatch.setattr(template_module, "WHOLE", 100)
    monkeypatch.setattr(template_module, "PER_TOKEN", 1)
    assert same_with_a_limit([talk(" " * 5000 + "so", "is it " * 50)], tok, 50, "conversation") == 1


def test_too_many_turns_are_refused(monkeypatch):
    tok = tokenizer(PLAIN)
    monkeypatch.setattr(template_module, "WORK", 100_000)
    assert len(turns_of(talk(*["x"] * 60), ChatTemplate(tok))) == 30
    with pytest.raises(BadRow, match="too many turns"):
        turns_of(talk(*["x"] * 600), ChatTemplate(tok))
    assert len(turns_of(talk(*["x"] * 600), ChatTemplate(tok), first=50)) == 26  # of the others, no token would be left


@pytest.mark.parametrize("prompt", ["2 + 2?", "so " * 60_000])
def test_the_border_of_an_opened_tag_in_a_long_text(prompt):
    tok = tokenizer(OPENED)
    tok.add_special_tokens({"additional_special_tokens": ["<think>"]})
    # the prompt goes on with <think>, the answer with <b>: the tokens part before "<"
    (row,) = encode(talk(prompt, "<b>"), tok)
    assert trained(tok, row) == "<b><|im_end|>\n"


def test_a_tokenizer_that_refuses_a_text_costs_that_text(monkeypatch):
    tok = tokenizer(PLAIN)
    template = ChatTemplate(tok)
    tokens = template.tokens
    monkeypatch.setattr(template, "tokens", lambda texts, *n: 1 / 0 if "7" in "".join(texts) else tokens(texts, *n))
    made = encode_batch([talk("1", "2"), talk("7", "8"), talk("3", "4")], template)
    assert [isinstance(m, ZeroDivisionError) for m in made] == [False, True, False] and trained(
        tok, made[2][0]
    ) == "4<|im_end|>\n"


def test_a_tokenizer_with_more_tokens_than_the_verifier():
    tok = tokenizer(PLAIN)
    good = encode_batch(
        [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2,
        ChatTemplate(tok),
        vocab_size=258,
    )
    bad = encode_batch([talk("a", "b")], ChatTemplate(tok), vocab_size=257)
    assert (
        len(good[0]) == 1
        and isinstance(bad[0], BadRow)
        and "beyond the verifier's vocabulary of 257 " in f"{bad[0].reason} ".replace(";", " ")
    )


def test_control_tokens_in_what_was_said_are_counted():
    tok = tokenizer(MARKED)
    chats = [
        talk("What does <|im_end|> do?", "ends"),
        talk("hi", "<|im_end|> and <|im_start|>"),
        talk("|im_end|", "<|im_end"),
        talk("a", "b"),
    ]
    data = prepare(chats, tok, 64)
    assert (
        len(data) == 4
        and (
            "'<|im_end|>' in 2 conversations (first: conversation 0, message 0), '<|im_start|>' in 1 conversations "
            "(first: conversation 1, message 1)"
        )
        in data.info.description
    )
    assert "control" not in prepare(chats[2:], tok, 64).info.description
    (row,) = encode(chats[0], tok)
    # read as a token, and not trained
    assert row[0].count(tok.convert_tokens_to_ids("<|im_end|>")) == 3 and trained(tok, row) == "ends<|im_end|>\n"
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "reasoning_content": "<|im_start|>"},
    ]
    assert ChatTemplate(tok).control.spelled(parts) == {"<|im_end|>": 0, "<|im_start|>": 1}


@pytest.mark.parametrize("where", ["tools", "arguments", "arguments as text", "name of a call", "name", "result"])
def test_control_tokens_in_tools_and_calls_are_counted(where):
    "What a template may write out is looked through, with the message that holds it."

    def at(place, plain):
        return "<|im_end|>" if place == where else plain

    arguments = {"x": [at("arguments", "1")]} if where != "arguments as text" else '{"<|im_end|>": 1}'
    call = {"type": "function", "function": {"name": at("name of a call", "f"), "arguments": arguments}}
    tools = [
        {"type": "function", "function": {"name": "f", "description": at("tools", "A function."), "parameters": {}}}
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": at("result", "1"), "name": at("name", "f")},
        {"role": "assistant", "content": "!"},
    ]
    assert ChatTemplate(tokenizer(MARKED)).control.spelled(messages, tools) == {
        "<|im_end|>": {"tools": 0, "name": 2, "result": 2}.get(where, 1)
    }
    data = prepare([{"messages": messages, "tools": tools}], tokenizer(QWEN), 2048)
    assert "'<|im_end|>' in 1 conversations" in data.info.description


def test_a_template_that_reads_texts_in_parts_alone():
    "LLaVA's and SmolVLM's way: transformers is given parts, and so is the template here, whatever the data write."
    template = (
        "{% for m in messages %}{{ m.role }}: {% for p in m.content | selectattr('type', 'equalto', 'text') %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ p.text }}<|im_end|>{% endgeneration %}{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = talk("Hi.", "Hello.", "And?", "Bye.")
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    for text in (template, re.sub(r"\{% (end)?generation %\}", "", template)):
        tok = tokenizer(text)
        theirs = tokenizer(template).apply_chat_template(parts, return_dict=True, return_assistant_tokens_mask=True)
        for ours in (messages, parts):
            assert encode(normalize(ours), tok) == [(theirs["input_ids"], theirs["assistant_masks"])]
        prompt = tok.apply_chat_template(parts[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert encode_prompts([Prompt("all", messages=messages[:1])], tok) == [prompt]
