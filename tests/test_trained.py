"""Which tokens of an answer carry loss, with reasoning and calls of tools trained and not, on five chat templates."""

import json
import re
from pathlib import Path

import pytest
from test_chat_encoding import PLAIN, QWEN, QWEN_MARKED, tokenizer
from transformers import AutoTokenizer

from speculators_nb.data.chat_encoding import encode, encode_batch
from speculators_nb.data.chat_template import ChatTemplate, Trained
from speculators_nb.data.messages import normalize
from speculators_nb.data.prepare import prepare, prepare_data

TINY = Path(__file__).parents[1] / "data/tiny-verifier"
# Llama 3.1's way: a call is JSON without any tag, in place of the content
BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# gpt-oss' way: channels
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|><|start|>assistant{% endif %}{% if m.tool_calls %}<|channel|>commentary to=functions.add <|constrain|>json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
CALL = [{"type": "function", "function": {"name": "plus", "arguments": {"a": 2}}}]
ASK = {"role": "user", "content": "2 + 2?"}
THOUGHT = {"role": "assistant", "content": "It is 4.", "reasoning_content": "a sum"}
CALLED = {"role": "assistant", "content": "", "tool_calls": CALL}
SAID_AND_CALLED = {"role": "assistant", "content": "Let me add.", "tool_calls": CALL}
QWEN_CALL = '<tool_call>plus {"a": 2}</tool_call>'
NO_THOUGHT = "<think>\n\n</think>\n\n"
END = "<|im_end|>\n"
ALL, NO_REASONING, NO_CALLS = Trained(), Trained(reasoning=False), Trained(tool_calls=False)


def trained(tok, messages, what, **more):
    "The text of the trained tokens of the last row."
    *_, (ids, mask) = encode(normalize([ASK, *messages]), tok, trained=what, **more)
    return tok.decode([i for i, m in zip(ids, mask) if m])


@pytest.mark.parametrize(
    "template, answer, what, expected",
    [
        (QWEN, THOUGHT, ALL, f"<think>\na sum\n</think>\n\nIt is 4.{END}"),
        (QWEN, THOUGHT, NO_CALLS, f"<think>\na sum\n</think>\n\nIt is 4.{END}"),
        (QWEN, THOUGHT, NO_REASONING, f"It is 4.{END}"),
        (QWEN_MARKED, THOUGHT, NO_REASONING, f"It is 4.{END}"),
        (QWEN, SAID_AND_CALLED, ALL, f"{NO_THOUGHT}Let me add.{QWEN_CALL}{END}"),
        (QWEN, SAID_AND_CALLED, NO_CALLS, f"{NO_THOUGHT}Let me add.{END}"),
        (QWEN, SAID_AND_CALLED, Trained(False, False), f"Let me add.{END}"),
        (QWEN_MARKED, CALLED, Trained(False, False), END),
        (BARE, CALLED, ALL, '{"name": "plus", "parameters": {"a": 2}}' + END),
        (BARE, CALLED, NO_REASONING, '{"name": "plus", "parameters": {"a": 2}}' + END),
        (BARE, CALLED, NO_CALLS, END),
        (
            CHANNELS,
            THOUGHT,
            ALL,
            "<|channel|>analysis<|message|>a sum<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
        ),
        (CHANNELS, THOUGHT, NO_REASONING, "<|channel|>final<|message|>It is 4.<|return|>"),
        (
            PLAIN,
            {"role": "assistant", "content": "<think>\na sum\n</think>\n\nIt is 4."},
            NO_REASONING,
            f"It is 4.{END}",
        ),
        (PLAIN, {"role": "assistant", "content": "Is <tool_call>\n{}\n</tool_call> all?"}, NO_CALLS, f"Is all?{END}"),
        (PLAIN, {"role": "assistant", "content": "It is 4.", "weight": 0}, ALL, ""),
    ],
)
def test_exactly_these_tokens_carry_loss(template, answer, what, expected):
    "Each token of this tokenizer is a byte or a marker, so the text says which tokens they are."
    assert trained(tokenizer(template), [answer], what) == expected


def test_a_tag_that_the_prompt_opened():
    tok = tokenizer(PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    said = {"role": "assistant", "content": "<think>\na sum\n</think>\n\nIt is 4."}
    assert trained(tok, [said], ALL) == f"a sum\n</think>\n\nIt is 4.{END}"
    assert trained(tok, [said], NO_REASONING) == f"It is 4.{END}"


def shipped():
    return AutoTokenizer.from_pretrained(TINY)


def test_the_shipped_template():
    tok, said = shipped(), {"role": "assistant", "content": "<think>a sum</think> It is 4."}
    assert trained(tok, [said], ALL) == "<think>a sum</think> It is 4.<|im_end|>"
    # a token is trained if it holds a trained character
    assert trained(tok, [said], NO_REASONING) in ("It is 4.<|im_end|>", " It is 4.<|im_end|>")


@pytest.mark.parametrize("how", [ALL, NO_REASONING, NO_CALLS, Trained(False, False)])
def test_rows_that_are_tokenised_already_have_the_same_mask(how):
    "What `regenerate` writes: token ids, and a mask of everything that the verifier wrote."
    tok = tokenizer(QWEN)
    (ids, whole), (_, mask) = (encode(normalize([ASK, THOUGHT]), tok, trained=what)[0] for what in (ALL, how))
    ready = {"input_ids": ids, "loss_mask": whole}
    (((again, masked),),) = encode_batch([ready], ChatTemplate(tok), trained=how)
    assert again.tolist() == ids and masked.astype(int).tolist() == mask


def test_a_switch_makes_another_data_set(tmp_path):
    talk = {"messages": [ASK, {"role": "assistant", "content": "<think>a sum</think> It is 4."}]}
    given = dict(max_length=64, num_proc=1)
    first = prepare_data([talk], TINY, tmp_path / "p", **given)
    assert first.config["origin"]["train_reasoning"] is True
    with pytest.raises(ValueError, match="train_reasoning was True, is False"):
        prepare_data([talk], TINY, tmp_path / "p", train_reasoning=False, **given)
    other = prepare_data([talk], TINY, tmp_path / "q", train_reasoning=False, **given)
    assert other.config["origin"]["train_reasoning"] is False
    assert 0 < other.trained.sum() < first.trained.sum() and other.lengths.tolist() == first.lengths.tolist()


def test_a_folder_of_an_earlier_version_is_opened(tmp_path):
    "It has no record of the switch, and everything in it is trained."
    talk = {"messages": [ASK, {"role": "assistant", "content": "4"}]}
    prepare_data([talk], TINY, tmp_path / "p", max_length=64, num_proc=1)
    record = tmp_path / "p/data_config.json"
    config = json.loads(record.read_text())
    del config["origin"]["train_reasoning"], config["origin"]["train_tool_calls"]
    record.write_text(json.dumps(config))
    before = record.stat().st_mtime_ns
    prepare_data([talk], TINY, tmp_path / "p", max_length=64, num_proc=1)
    assert record.stat().st_mtime_ns == before


def test_calls_that_a_template_leaves_out_are_counted():
    with pytest.raises(ValueError, match=re.escape("leaves out calls of tools")):
        prepare([[ASK, SAID_AND_CALLED]], shipped(), 64)
    assert "leaves out calls" in prepare([[ASK, SAID_AND_CALLED], [ASK, THOUGHT]], shipped(), 64).info.description
