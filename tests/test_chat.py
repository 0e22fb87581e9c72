"""Loss masks: what the template marks, what its renderings betray, and what must be refused."""
import json
import re

import pytest
from datasets import load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from speculators_nb.data_generation.chat import add_turn, encode, prepare, save_prepared, show_mask, token_frequencies
from speculators_nb.data_generation.messages import normalize

MARKED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
          "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
PLAIN = re.sub(r"\{% (end)?generation %\}", "", MARKED)
# history without reasoning, the last turn with an empty think block: Qwen3's way
THINKING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
            "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# the generation prompt opens a think tag that the rendering of a finished turn lacks
OPENED = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def tokenizer(template):
    "Bytes, and the two markers: every border is a token border."
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


def trained(tok, row): return tok.decode([i for i, m in zip(*row) if m])


def talk(*texts): return [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]


def test_marks():
    tok = tokenizer(MARKED)
    (row,) = encode([{"role": "system", "content": "be brief"}, *talk("2+2?", "4", "3+3?", "6")], tok)
    assert trained(tok, row) == "4<|im_end|>\n6<|im_end|>\n"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=12), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_prefixes_find_what_the_marks_say(texts):
    assert encode(talk(*texts), tokenizer(PLAIN)) == encode(talk(*texts), tokenizer(MARKED))


def test_rewritten_history_gives_one_row_per_turn():
    tok = tokenizer(THINKING)
    rows = encode(talk("a?", "b", "c?", "d"), tok)
    assert [trained(tok, r) for r in rows] == ["<think>\n\n</think>\n\nb<|im_end|>\n", "<think>\n\n</think>\n\nd<|im_end|>\n"]
    assert "<think>" not in tok.decode(rows[1][0]).split("c?")[0]


def test_opened_tag_in_the_generation_prompt():
    tok = tokenizer(OPENED)
    (row,) = encode(talk("a?", "b"), tok)
    assert trained(tok, row) == "b<|im_end|>\n"


@pytest.mark.parametrize("template", ["{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
                                      "{% for m in messages | reverse %}{{ m.role }}{{ m.content }}{% endfor %}"])
def test_no_border_no_guess(template):
    with pytest.raises(ValueError, match="Mark them in the chat template") as e: encode(talk("a?", "b"), tokenizer(template))
    assert template in str(e.value) and "{% generation %}" in str(e.value)


def test_no_template():
    with pytest.raises(ValueError, match="has no chat_template"): encode(talk("a?", "b"), tokenizer(None))


@pytest.mark.parametrize("row", [{"messages": talk("hi", "ho")}, {"conversations": talk("hi", "ho")}, talk("hi", "ho"),
                                 {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}])
def test_dialects(row): assert normalize(row) == talk("hi", "ho")


@pytest.mark.parametrize("row, words", [([{"role": "narrator", "content": "x"}], "'narrator' is unknown"), ([{"role": "user"}], "no content"),
                                        ({"text": "x"}, r"no messages.*\['text'\]"), ([], "no messages")])
def test_malformed_conversations(row, words):
    with pytest.raises(ValueError, match=words): normalize(row)


def test_tool_calls_are_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "score": 1}
    assert normalize([call]) == [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]


def test_prepare_counts_what_it_drops(caplog):
    tok = tokenizer(MARKED)
    good, long = talk("2+2?", "4"), talk("?" * 80, "too late")
    data = prepare([good, {"messages": long}, talk("nobody answers"), [{"role": "x", "content": ""}], {"id": 1}], tok, 64)
    assert len(data) == 1 and data[0]["seq_len"] == len(data[0]["input_ids"]) == len(data[0]["loss_mask"])
    text = data.info.description
    assert "5 conversations, 1 rows" in text and "1 × no trained token in the first 64" in text and "1 × ValueError: no assistant message" in text and "'x' is unknown" in text and "no messages" in text
    assert text in caplog.text
    with pytest.raises(ValueError, match="no row left of 1 conversations"): prepare([long], tok, 64)
    with pytest.raises(ValueError, match="there were none"): prepare([], tok, 64)


def test_prepare_truncates():
    tok = tokenizer(MARKED)
    (whole,) = encode(talk("2+2?", "four, as ever"), tok)
    row = prepare([talk("2+2?", "four, as ever")], tok, 30)[0]
    assert row == {"input_ids": whole[0][:30], "loss_mask": [bool(m) for m in whole[1][:30]], "seq_len": 30}


def test_tokenised_rows_pass_and_are_checked():
    tok = tokenizer(MARKED)
    data = prepare([{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "id": 7}, {"input_ids": [1, 2], "loss_mask": [1]}, {"input_ids": [1]}], tok, 8)
    assert data.to_list() == [{"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "seq_len": 3}]
    assert "2 tokens, loss_mask 1" in data.info.description


def test_saved_with_frequencies(tmp_path):
    data = prepare([{"input_ids": [5, 5, 9], "loss_mask": [0, 1, 1]}, {"input_ids": [5, 2], "loss_mask": [1, 0]}], tokenizer(MARKED), 8)
    assert token_frequencies(data) == {5: 2, 9: 1}
    save_prepared(data, tmp_path / "rows")
    assert json.loads((tmp_path / "rows" / "token_freq.json").read_text()) == {"5": 2, "9": 1}
    again = load_from_disk(str(tmp_path / "rows"))
    assert again.to_list() == data.to_list() and again.info.description == data.info.description


def test_add_turn():
    rows = []
    add_turn(rows, [1, 2, 3], 2)
    add_turn(rows, [1, 2, 3, 4, 5], 4)
    assert rows == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]
    add_turn(rows, [1, 9, 9], 1)
    assert rows[1:] == [([1, 9, 9], [0, 1, 1])]


def test_show_mask_escapes():
    tok = tokenizer(MARKED)
    page = show_mask(*encode(talk("<b>", "x\ny"), tok)[0], tok)._repr_html_()
    assert "&lt;" in page and "<b>" not in page and "⏎" in page
