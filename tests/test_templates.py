"""Chat templates as the field uses them: spellings of calls, what is written unasked, borders inside control tokens."""

import json

import pytest
from template_matrix import SHAPES, cells, families, installed, tokenizer_of

from speculators_nb.data.chat_encoding import encode, encode_batch
from speculators_nb.data.chat_template import ChatTemplate, Trained
from speculators_nb.data.messages import normalize

NO_CALLS, NO_REASONING = Trained(tool_calls=False), Trained(reasoning=False)
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = (
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
)
APPENDED = (
    "{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}"
)
PRINTED = CALL.replace(" | tojson", "")
CONTENT = {
    "writes None": "{{ m.content }}" + CALL,
    "writes None in a text": "{{ 'so ' ~ m.content | trim }}".replace("so ", "") + CALL,
    "writes null": "{{ m.content if m.content is string else m.content | tojson }}" + CALL,
    "fails on null": "{% if '<x>' in m.content %}x{% endif %}{{ m.content }}" + CALL,
    "leaves a call out unless content is null": "{% if m.content is not none %}{{ m.content }}{% else %}"
    + CALL
    + "{% endif %}",
    "leaves a call out unless content is missing": "{% if 'content' in m %}{{ m.content or '' }}{% else %}"
    + CALL
    + "{% endif %}",
}


def call(arguments="{}", **content):
    function = {"name": "rain", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]} | content


def talk(turn):
    return [{"role": "user", "content": "Rain?"}, turn, {"role": "tool", "content": "yes"}]


def trained(template, messages, **more):
    "What is trained in each row."
    tok = tokenizer_of(template)
    rows = encode(normalize(messages), tok, **more)
    return [tok.decode([i for i, on in zip(*row) if on]) for row in rows]


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "missing"])
@pytest.mark.parametrize("template", CONTENT.values(), ids=CONTENT)
def test_a_call_without_content_is_read_in_the_spelling_that_a_template_knows(template, content):
    assert trained(TURN + template + END, talk(call(**content))) == ["<call>rain {}</call><|im_end|>\n"]


def test_a_call_may_stand_without_an_object_around_it():
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "rain", "arguments": {}}]}
    template = TURN + "{{ m.content or '' }}" + CALL.replace("c.function.", "c.") + END
    assert trained(template, talk(flat)) == ["<call>rain {}</call><|im_end|>\n"]


@pytest.mark.parametrize("word", ["None", "null"])
def test_a_call_may_spell_the_word_that_is_wrong_as_content(word):
    turn = call(json.dumps({"of": word}), content=None)
    for template in (
        "{{ m.content or '' }}" + CALL,
        CONTENT["writes None"],
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + CALL,
    ):
        assert trained(TURN + template + END, talk(turn)) == [f'<call>rain {{"of": "{word}"}}</call><|im_end|>\n']


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}], ids=["text", "object"])
@pytest.mark.parametrize("template", [CALL, APPENDED, PRINTED], ids=["tojson", "appended", "printed"])
def test_arguments_are_read_as_text_or_as_an_object(template, arguments):
    turn = call(arguments, content="")
    assert trained(TURN + "{{ m.content or '' }}" + template + END, talk(turn)) == [
        '<call>rain {"city": "Oslo"}</call><|im_end|>\n'
    ]


def test_arguments_that_a_template_reads_are_left_as_the_model_wrote_them():
    turn = call('{"city":"Oslo"}', content="")
    kept = "{{ m.content }}" + CALL.replace(
        "c.function.arguments | tojson", "c.function.arguments if c.function.arguments is string else 1 / 0"
    )
    assert trained(TURN + kept + END, talk(turn)) == ['<call>rain {"city":"Oslo"}</call><|im_end|>\n']
    assert trained(TURN + "{{ m.content }}" + APPENDED + END, talk(call("city=", content=""))) == [
        "<call>rain city=</call><|im_end|>\n"
    ]
    with pytest.raises(ValueError, match="arguments of calls otherwise than as JSON"):
        trained(TURN + "{{ m.content }}" + CALL + END, talk(call("city=", content="")))


def test_what_a_template_leaves_out_is_refused_and_named():
    two = call(content=None)
    two["tool_calls"] *= 2
    first_alone = (
        "{{ m.content or '' }}{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% endif %}"
    )
    with pytest.raises(ValueError, match=r"message 1 \(assistant\): the chat template leaves out calls of tools"):
        trained(TURN + first_alone + END, talk(two))
    instead = "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + CALL
    with pytest.raises(ValueError, match="leaves out what is said beside calls"):
        trained(TURN + instead + END, talk(call(content="Let me look.")))
    with pytest.raises(
        ValueError, match="1 / 0|ZeroDivisionError"
    ):  # the template's own error, where no call is to blame
        trained(TURN + "{{ 1 / 0 }}" + END, talk(call(content="")))


SAID = [m for i in range(2) for m in ({"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."})]


@pytest.mark.parametrize(
    "family, end",
    [
        ("prompt_is_always_written", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("header_is_always_written", "<|eot_id|>"),
        ("an_end_of_everything", "<|end|>\n"),
    ],
)
def test_what_is_written_unasked_is_not_trained_and_does_not_split_rows(family, end):
    template = families()[f"ours/{family}"]
    (row,) = trained(template, SAID)
    assert row.replace("<|START_RESPONSE|>", "") == f"0.{end}1.{end}"
    assert trained(template, SAID, rows="turn") == [row[: len(row) // 2], row[len(row) // 2 :]]


def test_an_end_of_everything_is_trained_where_nothing_else_ends_an_answer():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
    )
    assert trained(template, SAID[:2]) == ["0.\n<eos>"]


def test_a_generation_prompt_inside_the_marks_is_not_trained():
    marks = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|{{ m.role }}|>{{ m.content }}<eos>"
        "{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert trained(marks + "{# <|assistant|> #}", SAID) == ["0.<eos>1.<eos>"]


def test_several_marks_in_a_turn_that_continues_another():
    template = families()["ours/marked_piecewise"]
    twice = [SAID[0], {"role": "assistant", "content": "A."}, {"role": "assistant", "content": "B."}]
    assert trained(template, twice) == ["A.<turn|>\n", "B.<turn|>\n"]


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# <tool_call></tool_call> #}"
)
THINKS = [SAID[0], {"role": "assistant", "content": "four", "reasoning_content": "they add"}]


@pytest.mark.parametrize(
    "template, messages, what, expected",
    [
        (GLM, talk(call(content="")), NO_CALLS, "<think></think>"),
        (GLM, talk(call(content="Look.")), NO_CALLS, "<think></think>Look."),
        ("ours/thought_channel", THINKS, NO_REASONING, "four<turn|>\n"),
        ("ours/thought_channel", talk(call({"city": "Oslo"}, content="")), NO_CALLS, "<turn|>\n"),
        (
            "ours/prompt_is_always_written",
            THINKS,
            NO_REASONING,
            "<|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ),
        ("ours/prompt_is_always_written", talk(call({}, content="")), NO_CALLS, "<|END_OF_TURN_TOKEN|>"),
        ("ours/reasoning_leaves_history", THINKS, NO_REASONING, "four<|im_end|>\n"),
        ("ours/channels", THINKS, NO_REASONING, "<|channel|>final<|message|>four<|return|>"),
        ("ours/marked", THINKS, NO_REASONING, "four<|im_end|>"),
        # tags that nobody has listed are found by rendering, where an empty block is written and where none is
        (
            TURN + "{% if m.thinking %}<|muse|>{{ m.thinking }}<|/muse|>\n{% endif %}{{ m.content }}" + END,
            THINKS,
            NO_REASONING,
            "four<|im_end|>\n",
        ),
        (
            TURN + "{% if m.role == 'assistant' %}<|muse|>{{ m.thinking }}<|/muse|>\n{% endif %}{{ m.content }}" + END,
            THINKS,
            NO_REASONING,
            "four<|im_end|>\n",
        ),
        (
            TURN
            + "{{ m.content }}{% for c in m.tool_calls or [] %}<|do|>{{ c.function.name }}<|done|>{% endfor %}"
            + END,
            talk(call(content="Look.")),
            NO_CALLS,
            "Look.<|im_end|>\n",
        ),
    ],
)
def test_a_switch_leaves_no_half_of_a_control_token(template, messages, what, expected):
    assert trained(families().get(template, template), messages, trained=what)[0] == expected


@pytest.mark.parametrize("family", ["thought_channel", "prompt_is_always_written", "channels"])
def test_rows_that_are_tokenised_already_lose_the_same_reasoning(family):
    tok = tokenizer_of(families()[f"ours/{family}"])
    (ids, whole), (_, mask) = (encode(normalize(THINKS), tok, trained=what)[0] for what in (Trained(), NO_REASONING))
    ready = {"input_ids": ids, "loss_mask": whole}
    (((_, made),),) = encode_batch([ready], ChatTemplate(tok), trained=NO_REASONING)
    assert made.astype(int).tolist() == mask


@pytest.mark.parametrize("name", families())
def test_the_matrix(name):
    "Every shape and switch of a family: the oracle agrees, or refuses as well."
    made = [*cells(name, families()[name])]
    assert [cell for cell in made if cell[2] == "disagree"] == []
    assert ("one answer", "all", "agree", "") in made and len(made) == 4 * len(SHAPES)


@pytest.mark.skipif(not installed(), reason="neither trl nor axolotl is installed")
@pytest.mark.parametrize("name", installed())
def test_installed_templates(name):
    assert [cell for cell in cells(name, installed()[name], switches=["all"]) if cell[2] == "disagree"] == []
