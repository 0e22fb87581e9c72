"""An answer's tokens become the message that a server makes of them, and later turns are rendered from it."""

# ruff: noqa: E501, RUF001

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
from test_regenerate_in_process import make_verifier
from test_regenerate_in_process import tokenizer as bytes_tokenizer

from speculators_nb.regenerate import in_process
from speculators_nb.regenerate.answer_parser import AnswerParser, UnreadableAnswer
from speculators_nb.regenerate.in_process import regenerate
from speculators_nb.regenerate.journal import read_regenerated

# ------------------------------------------------------------------------------------------------ templates, by shape
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}BODY{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST = "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
EACH = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
HERMES = (
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
TAGS = "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
GLM = "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
MISTRAL = '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}]'
DEEPSEEK = "<|calls|><|call|>function<|sep|>{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<|/call|><|/calls|>"
LLAMA = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
PYTHON = "<|calls|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ \"'\" + v + \"'\" if v is string else v | tojson }}{% endfor %})]<|/calls|>"
OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% elif m.thinking and not messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if loop.last and not add_generation_prompt and m.thinking %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}{% elif m.role == 'tool' %}<|start|>functions.f"
    " to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:f{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>{% else %}"
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% if loop.last and m.reasoning %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name }}{ {%- for k, v in c.function.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:"
    "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{% endfor -%} }<tool_call|>{% endfor %}{{ m.content or '' }}"
    "{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
SPECIAL = "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|> <|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|>"
SPECIAL += " <|tool_response> <tool_response|> <|constrain|> <|calls|> <|/calls|> <|sep|> <|/call|> [TOOL_CALLS]"
ENDS = ("<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<turn|>", "<|tool_response>")
SHAPES = {
    "think, Hermes": CHATML.replace("BODY", LAST + EACH.replace("CALL", HERMES)),
    "think, tags": CHATML.replace("BODY", LAST + EACH.replace("CALL", TAGS)),
    "think, GLM": CHATML.replace("BODY", LAST + EACH.replace("CALL", GLM)),
    "Mistral": CHATML.replace("BODY", LAST + EACH.replace("CALL", MISTRAL)),
    "DeepSeek": CHATML.replace("BODY", LAST + EACH.replace("CALL", DEEPSEEK)),
    "Llama": CHATML.replace("BODY", "{{ m.content or '' }}" + EACH.replace("CALL", LLAMA)),
    "Python": CHATML.replace("BODY", LAST + EACH.replace("CALL", PYTHON)),
    "gpt-oss": OSS,
    "Gemma 4": GEMMA,
}
ARGUMENTS = {"city": 'Bern, "CH"', "days": 3, "more": {"a": [1, True]}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
            },
        },
    }
]


def tokenizer_with(template):
    tok = bytes_tokenizer()
    tok.add_special_tokens({"extra_special_tokens": SPECIAL.split()})
    tok.chat_template = template
    return tok


def ids_of(tok, text):
    return tok(text, add_special_tokens=False)["input_ids"]


def parser_of(tok):
    return AnswerParser(tok, {tok.convert_tokens_to_ids(t) for t in ENDS})


def render(tok, messages, prompt=True):
    return tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, tools=TOOLS)


def say(role, content="", **more):
    return {"role": role, "content": content} | more


def call(arguments=None):
    return {
        "id": "callabc12",
        "type": "function",
        "function": {"name": "f", "arguments": arguments or {"city": "Bern"}},
    }


# --------------------------------------------------------------------------------------------------------- one answer
@pytest.mark.parametrize(
    "shape, thought, content, arguments",
    [
        (shape, thought, content, arguments)
        for shape, thought, content, arguments in itertools.product(
            SHAPES, ("", "they add\nup"), ("", "four,\n\nof course"), (None, ARGUMENTS)
        )
        if (content or arguments)
        and not (thought and shape == "Llama")
        and not (content and arguments and shape in ("gpt-oss", "Gemma 4", "Llama"))
    ],
)
def test_what_a_template_writes_is_read_back(shape, thought, content, arguments):
    tok = tokenizer_with(SHAPES[shape])
    parser = parser_of(tok)
    message = say("assistant", content)
    if arguments:
        message["tool_calls"] = [call(json.dumps(arguments) if parser.marks.arguments_as_text else arguments)]
    names = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought) if thought else {}
    prompt = render(tok, [say("user", "?")])
    full = render(tok, [say("user", "?"), message | names], prompt=False)
    assert full.startswith(prompt)
    found = parser(ids_of(tok, full[len(prompt) :].rstrip("\n")), ids_of(tok, prompt), TOOLS)
    for made in found.get("tool_calls", []):
        made["id"] = "callabc12"
    assert found == message | ({"reasoning_content": thought} if thought else {})


@pytest.mark.parametrize(
    "shape, answer, message",
    [
        ("gpt-oss", "<|channel|>final<|message|>4<|end|>", {"content": "4"}),
        (
            "gpt-oss",  # as the model writes a call; its template writes it otherwise
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Bern"}<|call|>',
            {"content": "", "reasoning_content": "a\nb", "tool_calls": [call()]},
        ),
        ("think, Hermes", "they add\n</think>\n\n4<|im_end|>", {"content": "4", "reasoning_content": "they add"}),
        ("think, Hermes", "<think>\n\n</think>\n\n4<|im_end|>", {"content": "4"}),
        ("think, Hermes", "<think>I will never<|im_end|>", {"content": "", "reasoning_content": "I will never"}),
        (
            "think, Hermes",
            '<tool_call>{"name":"f","arguments":{"city":"Bern"}}',
            {"content": "", "tool_calls": [call()]},
        ),
        (
            "Mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Bern"}}]<|im_end|>',
            {"content": "", "tool_calls": [call()]},
        ),
        ("Llama", '{"name": "Bern", "canton": "Bern"}<|im_end|>', {"content": '{"name": "Bern", "canton": "Bern"}'}),
        ("Gemma 4", "<|channel>thought\n<channel|>4<turn|>", {"content": "4"}),
    ],
)
def test_answers_as_models_write_them(shape, answer, message):
    tok = tokenizer_with(SHAPES[shape])
    found = parser_of(tok)(ids_of(tok, answer), ids_of(tok, render(tok, [say("user", "?")])), TOOLS)
    for made in found.get("tool_calls", []):
        made["id"] = "callabc12"
    assert found == {"role": "assistant"} | message


@pytest.mark.parametrize(
    "shape, answer, why",
    [
        ("gpt-oss", "4<|return|>", "outside of channels"),
        ("gpt-oss", "<|channel|>secret<|message|>4<|end|>", "a channel besides"),
        (
            "gpt-oss",
            "<|channel|>final<|message|>4<|end|><|start|>assistant to=f<|channel|>commentary<|message|>{}<|call|>",
            "beside",
        ),
        ("gpt-oss", "<|channel|>commentary to=f<|message|>[1<|call|>", "no object"),
        ("think, Hermes", "4<|channel|>5<|im_end|>", "<|channel|> where the template writes none"),
        ("think, Hermes", "<think>a</think>4</think>5<|im_end|>", "</think> where the template writes none"),
        ("think, Hermes", "<tool_call>f(1)</tool_call><|im_end|>", "begins no tool call"),
        ("think, Hermes", '<tool_call>{"name": "f"}</tool_call><|im_end|>', "damaged"),
        ("think, Hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>and<|im_end|>', "text after"),
        ("Gemma 4", '<|tool_call>call:f{city:<|"|>Bern}<tool_call|>', "damaged"),
        ("think, Hermes", f"<tool_call>{'[' * 5000}]</tool_call><|im_end|>", "damaged (RecursionError)"),
        ("gpt-oss", f"<|channel|>commentary to=f<|message|>{'[' * 5000}<|call|>", "no object"),
    ],
)
def test_what_is_not_read_is_named(shape, answer, why):
    tok = tokenizer_with(SHAPES[shape])
    with pytest.raises(UnreadableAnswer) as e:
        parser_of(tok)(ids_of(tok, answer), ids_of(tok, render(tok, [say("user", "?")])), TOOLS)
    assert why in str(e.value)


def test_json_without_tools_is_no_call():
    tok, answer = tokenizer_with(SHAPES["Llama"]), '{"name": "Bern", "parameters": {"canton": "BE"}}'
    assert parser_of(tok)(ids_of(tok, answer), []) == say("assistant", answer)
    assert "tool_calls" in parser_of(tok)(ids_of(tok, answer), [], TOOLS)


def test_reasoning_that_nothing_closes_stays_in_the_answer():
    tok = tokenizer_with(CHATML.replace("BODY", "{{ m.reasoning_content or '' }}\n{{ m.content }}"))
    assert parser_of(tok)(ids_of(tok, "So: 4<|im_end|>"), []) == say("assistant", "So: 4")


def test_an_end_token_that_the_tokenizer_does_not_have():
    tokenizer = bytes_tokenizer()
    message = AnswerParser(tokenizer, [len(tokenizer) + 5])(tokenizer("hi")["input_ids"], [1])
    assert message == {"role": "assistant", "content": "hi"}


def test_an_open_thought_of_the_prompt_is_part_of_the_answer():
    prompt = SHAPES["think, Hermes"].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tok = tokenizer_with(prompt)
    parser, ids = parser_of(tok), ids_of(tok, render(tok, [say("user", "?")]))
    assert parser(ids_of(tok, "add\n</think>\n\n4<|im_end|>"), ids) == say("assistant", "4", reasoning_content="add")
    assert parser(ids_of(tok, "add"), ids) == say("assistant", "", reasoning_content="add")  # cut, or never ended


def test_a_response_template_is_used_where_it_reads_the_chat_template():
    tok = tokenizer_with(SHAPES["think, Hermes"])
    fields = {"thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|im_end|>"}}
    tok.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    answer, prompt = ids_of(tok, "<think>add</think>4<|im_end|>"), ids_of(tok, render(tok, [say("user", "?")]))
    parser = parser_of(tok)
    assert parser.template and parser(answer, prompt) == say("assistant", "4", reasoning_content="add")
    tok.response_template = tok.response_template | {"fields": {"content": {"open": "<answer>", "close": "</answer>"}}}
    parser = parser_of(tok)
    assert not parser.template and parser(answer, prompt) == say("assistant", "4", reasoning_content="add")


# --------------------------------------------------------------------------------------- the history of a later turn
CALLED = "<tool_call>" + json.dumps({"name": "f", "arguments": {"city": "Bern"}}) + "</tool_call><|im_end|>"
OSS_CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Bern"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>they add<|end|><|start|>assistant"
HISTORIES = {  # shape, answers of the verifier, what a server keeps of them
    "gpt-oss: channels": (
        "gpt-oss",
        [THOUGHT + "<|channel|>final<|message|>four<|return|>", "<|channel|>final<|message|>six<|return|>"],
        [{"content": "four"}],
    ),
    "gpt-oss: a call": (
        "gpt-oss",
        [THOUGHT + OSS_CALLED, "<|channel|>final<|message|>four<|return|>", "<|channel|>final<|message|>six<|return|>"],
        [{"content": "", "thinking": "they add", "tool_calls": [call()]}, {"content": "four"}],
    ),
    "Gemma 4: channels": (
        "Gemma 4",
        ["<|channel>thought\nthey add\n<channel|>four<turn|>", "six<turn|>"],
        [{"content": "four"}],
    ),
    "Gemma 4: a call": (
        "Gemma 4",
        ['<|tool_call>call:f{city:<|"|>Bern<|"|>}<tool_call|><|tool_response>', "four<turn|>", "six<turn|>"],
        [{"content": "", "tool_calls": [call()]}, {"content": "four"}],
    ),
    "think": (
        "think, Hermes",
        ["<think>\nthey add\n</think>\n\nfour<|im_end|>", "six<|im_end|>"],
        [{"content": "four"}],
    ),
    "think: a call": (
        "think, Hermes",
        [CALLED, "four<|im_end|>", "six<|im_end|>"],
        [{"content": "", "tool_calls": [call()]}, {"content": "four"}],
    ),
    "no tools in the template": ("plain", ["four<|im_end|>", "six<|im_end|>"], [{"content": "four"}]),
}
TALK = [
    say("user", "2+2?"),
    say("assistant", None, tool_calls=[call()]),
    say("tool", "4", name="f"),
    say("assistant", "4."),
    say("user", "3+3?"),
]


def answered(tmp_path, monkeypatch, template, answers, talk=TALK):
    "A conversation answered in this process by given texts: the prompts, its line, and the report."
    tok, prompts, queue = tokenizer_with(template), [], [*answers]
    verifier = make_verifier()
    verifier.model.resize_token_embeddings(len(tok))
    verifier.model.generation_config.eos_token_id = [tok.convert_tokens_to_ids(t) for t in ENDS]

    def script(_, take, *args):
        while request := take():
            prompts.append(request.prompt)
            request.tokens = ids_of(tok, queue.pop(0))
            yield request

    monkeypatch.setattr(in_process, "answers", script)
    row = {"id": "a", "tools": TOOLS, "messages": talk}
    report = regenerate(verifier, tok, [row], tmp_path / "o.jsonl", max_length=4000)
    *_, line = read_regenerated(tmp_path / "o.jsonl")
    return tok, prompts, line, report


@pytest.mark.parametrize("case", HISTORIES)
def test_the_prompt_of_a_later_turn_is_what_serving_renders(tmp_path, monkeypatch, case):
    shape, answers, kept = HISTORIES[case]
    template = SHAPES.get(shape) or CHATML.replace("BODY", "{{ m.content }}")
    tok, prompts, line, report = answered(tmp_path, monkeypatch, template, answers)
    history = [say("user", "2+2?")]
    for message in kept:
        history.append({"role": "assistant"} | message)
        history.append(
            say("tool", "4", name="f", tool_call_id="callabc12") if message.get("tool_calls") else say("user", "3+3?")
        )
    assert len(prompts) == len(answers)
    assert tok.decode(prompts[-1]) == render(tok, history)
    assert not report["failed"] and not report["truncated"]
    called = any("tool_calls" in message for message in kept)
    assert report["left_out"] == ({} if called else {"results of tools that were not called": 1})
    spoken = "".join(tok.decode([i]) for i, m in zip(line["input_ids"], line["loss_mask"]) if m)
    assert spoken.endswith(answers[-1])  # every token of an answer is trained, marks and all


@pytest.mark.parametrize(
    "answer, reason, left",
    [
        (
            "four<|channel|>five<|im_end|>",
            "an answer that cannot be read: <|channel|> where the template writes none",
            2,
        ),
        ("four", "the answer before was cut", 2),
        (
            "<tool_call>" + json.dumps({"name": "g", "arguments": {}}) + "</tool_call><|im_end|>",
            "a tool call other than",
            2,
        ),
    ],
)
def test_turns_that_are_not_asked_are_counted_and_named(tmp_path, monkeypatch, caplog, answer, reason, left):
    talk = [say("assistant", "Hello."), *TALK, say("assistant", "6."), say("user", "And 4+4?")]
    _, prompts, line, report = answered(tmp_path, monkeypatch, SHAPES["think, Hermes"], [answer], talk)
    (counted,) = (why for why in line["metadata"]["left_out"] if why.startswith(reason))
    assert line["metadata"]["left_out"] == {
        counted: left,
        "results of tools that were not called": 1,
        "said before the first question": 1,
    }
    assert report["left_out"] == line["metadata"]["left_out"] and len(prompts) == 1
    assert "4 messages of the input were left out" in caplog.text and reason in caplog.text and counted in str(report)
    assert len(line["input_ids"]) == len(prompts[0]) + sum(line["loss_mask"])  # the answer is kept


def test_a_later_question_that_cannot_be_rendered_keeps_what_was_answered(tmp_path, monkeypatch):
    template = (
        "{% for m in messages if m.content == 'forbidden' %}{{ raise_exception('not this') }}{% endfor %}"
        + SHAPES["think, Hermes"]
    )
    talk = [say("user", "2+2?"), say("assistant", "4."), say("user", "forbidden")]
    _, _, line, report = answered(tmp_path, monkeypatch, template, ["four<|im_end|>"], talk)
    assert [m["content"] for m in line["messages"]] == ["2+2?", "four"] and not report["failed"]
    assert "not this" in line["metadata"]["truncated"] and sum(report["left_out"].values()) == 1


# ------------------------------------------------------------------------------------- templates of other packages
def field_templates():
    for package, folder in (("trl", "chat_templates"), ("axolotl", "utils/chat_templates/templates")):
        found = importlib.util.find_spec(package)
        places = found.submodule_search_locations if found else ()
        yield from sorted(path for place in places or () for path in (Path(place) / folder).glob("*.jinja"))


@pytest.mark.skipif(not [*field_templates()], reason="neither trl nor axolotl is installed")
def test_field_templates_are_read_back():
    "Answers as each template writes them; templates that do not write a part are passed over."
    read = 0
    for path in field_templates():
        tok, text = bytes_tokenizer(), path.read_text()
        marks = set(re.findall(r"<\|[\w|:/ -]{1,30}\|?>|<\w+\|>|\[/?[A-Z_]{3,}\]|<｜[^｜]{1,30}｜>", text))
        tok.add_special_tokens(
            {"extra_special_tokens": sorted({*marks, "<|stop|>"}), "bos_token": "<|bos|>", "eos_token": "<|stop|>"}
        )
        tok.chat_template = text
        parser = AnswerParser(tok, {tok.eos_token_id})
        for thought, content, arguments in (
            (None, "four", None),
            ("they add", "four", None),
            (None, "", {"city": "Bern"}),
        ):
            message = say("assistant", content or parser.marks.no_content)
            message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought) if thought else {}
            message |= (
                {"tool_calls": [call(json.dumps(arguments) if parser.marks.arguments_as_text else arguments)]}
                if arguments
                else {}
            )
            try:
                prompt = render(tok, [say("user", "?")])
                full = render(tok, [say("user", "?"), message], prompt=False)
            except Exception:
                continue
            if not full.startswith(prompt) or any(
                part not in full for part in ("Bern" if arguments else content, thought or "")
            ):
                continue
            answer = full[len(prompt) :].replace(parser.marks.content[1] or "<|stop|>", "<|stop|>").split("<|stop|>")[0]
            try:
                found = parser(ids_of(tok, answer + "<|stop|>"), ids_of(tok, prompt), TOOLS)
            except UnreadableAnswer as e:
                assert arguments, (path.name, answer, e)
                continue
            read += 1
            assert found.get("reasoning_content") == thought, (path.name, answer, found)
            assert (found["content"] or "").strip() == content, (path.name, answer, found)
            if arguments and (parser.marks.calls or parser.marks.channels):
                assert [c["function"] for c in found["tool_calls"]] == [message["tool_calls"][0]["function"]]
    assert read > 150
