"""Parsing a verifier's answer: token ids become reasoning, content and tool calls by the marks of its chat template.
Marks are found by rendering probes; an answer that they do not take apart is refused by name."""

import ast
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..data.chat_template import ControlTokens, common_prefix
from ..data.messages import THOUGHT

# Most templates leave old reasoning out of the next prompt, so that an answer must be taken apart as a server would;
# who only decodes its tokens trains on contexts that no served model reads. Every chat template writes answers: it is
# given one of each kind, of words that occur nowhere else, and the characters around those words are the marks.


class UnreadableAnswer(ValueError):
    "An answer that the marks of its chat template do not take apart; its text is the reason."


# for templates that leave old reasoning out, and so never write the marks around it
REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_QUESTION, _REASON, _ANSWER = "questionprobe", "thoughtprobe", "textprobe"
_NAME = "callprobe"  # a tool's name, and the id of a call: nine letters, as Mistral's ids have
_ARGUMENTS = {"keyone": "valueone", "keytwo": "valuetwo"}
_PROPERTIES = {key: {"type": "string", "description": key} for key in _ARGUMENTS}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": [*_ARGUMENTS]}
_FUNCTION = {"name": _NAME, "description": _NAME, "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}


def _call(name, arguments, id=None):
    "A tool call as messages hold it. TypeError: it has no name, or no object of arguments."
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("expected a name and an object")
    written = re.fullmatch(r"(?:functions\.)?(.+?):\d+", name)  # Kimi's ids hold the name
    if written:
        name, id = written[1], name
    named = {"id": id} if id else {}
    return named | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _read_calls(match, argument, tools):
    "Calls that are JSON: one, or a list."
    found = json.loads(match["calls"])
    made = []
    for call in found if isinstance(found, list) else [found]:
        inner = call.get("function", call)
        inner = inner if isinstance(inner, dict) else call | {"name": inner}
        name = inner.get("name", inner.get("tool_name"))
        (arguments,) = (inner[k] for k in ("arguments", "parameters") if k in inner)
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        made.append(_call(name, arguments, call.get("id", call.get("tool_call_id"))))
    return made


class _Constants(ast.NodeTransformer):
    "JSON's names of constants, among Python's values."

    def visit_Name(self, node):
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _read_python(match, argument, tools):
    "A list of calls as Python writes it."
    calls: Any = _Constants().visit(ast.parse(match["calls"], mode="eval")).body
    return [_call(call.func.id, {k.arg: ast.literal_eval(k.value) for k in call.keywords}) for call in calls.elts]


def _read_gemma(match, argument, tools):
    'JSON with bare keys, where <|"|> is a quotation mark.'
    texts = re.findall(r'<\|"\|>(.*?)<\|"\|>', match["arguments"], re.S)
    bare = re.sub(r'<\|"\|>.*?<\|"\|>', "\0", match["arguments"], flags=re.S)
    bare = re.sub(r'(?<=[{,])\s*([^{},:\[\]\s"]+)\s*:', r'"\1":', bare)
    pieces = bare.split("\0")
    written = [json.dumps(text) + piece for text, piece in zip(texts, pieces[1:], strict=True)]
    return [_call(match["name"], json.loads("".join([pieces[0], *written])))]


def _read_json(match, argument, tools):
    "A name, and its arguments as JSON."
    return [_call(match["name"], json.loads(match["arguments"]))]


def _read_tags(match, argument, tools):
    "A name, and each argument between tags."
    functions = [tool.get("function", tool) for tool in tools or []]
    declared = [f["parameters"]["properties"] for f in functions if f["name"] == match["name"]]
    arguments = {}
    for found in argument.finditer(match["arguments"] or ""):
        schema = declared[0].get(found["key"], {}) if declared else {}
        arguments[found["key"]] = _typed(found["value"], schema.get("type", "string"))
    return [_call(match["name"], arguments)]


def _typed(value, kind):
    "A value that is written without quotation marks; text where it is none of its kind."
    if kind != "string":
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value


_READ = {"calls": _read_calls, "python": _read_python, "gemma": _read_gemma, "json": _read_json, "tags": _read_tags}


class CallMarks(NamedTuple):
    "How a template writes calls of tools."

    begin: str  # precedes each call; empty: a call is the whole answer
    pattern: re.Pattern  # of a call; its groups are among name, arguments and calls
    kind: str  # of arguments: json, tags, gemma; of calls: json, python
    argument: re.Pattern | None = None  # one of the tags: key and value

    def read(self, text: str, tools: list[dict] | None) -> tuple[str, list[dict]]:
        """What precedes the calls in an answer, and the calls; types of arguments in tags are those of `tools_of`.
        UnreadableAnswer: a call is begun and not ended as the template does, or text follows."""
        match = self.pattern.search(text) if self.begin else self.pattern.fullmatch(text)
        before = text[: match.start()] if match else text
        if self.begin and self.begin in before:
            raise UnreadableAnswer(f"{self.begin} begins no tool call of the template's form")
        if not match:
            return text, []
        calls, rest = [], text
        while match:
            try:
                calls += _READ[self.kind](match, self.argument, tools)
            except (ValueError, SyntaxError, LookupError, TypeError, AttributeError, RecursionError) as e:
                if not self.begin:
                    return text, []  # an answer that is JSON, and no call
                reason = f"a tool call whose {self.kind} is damaged ({type(e).__name__})"
                raise UnreadableAnswer(reason) from e
            rest = rest[match.end() :].lstrip()
            match = self.pattern.match(rest)
        if rest:
            raise UnreadableAnswer("text after a tool call")
        return before.rstrip(), calls

    def reads(self, text: str) -> bool:
        "Whether the call of `_TOOL` that a template wrote is read as it was given to the template."
        try:
            _, calls = self.read(text, [_TOOL])
        except UnreadableAnswer:
            return False
        return [call["function"] for call in calls] == [{"name": _NAME, "arguments": _ARGUMENTS}]


def _literal(text):
    "A pattern of what a template writes, for any whitespace, numbers, and id of a call."
    text = re.escape(re.sub(r"\s+", " ", text.strip())).replace(_NAME, r"\S+?")
    return re.sub(r"\d+", r"\\d+", text.replace(r"\ ", r"\s*"))


def _closed(after):
    "A pattern of what ends a call; the end of an answer does, too."
    after = _literal(after)
    return rf"\s*(?:{after}|\Z)" if after else r"\s*\Z"


def _json_at(text, inside):
    "(first, last) character of the outermost JSON value around a place; None: there is none."
    for found in re.finditer(r"[\[{]", text[:inside]):
        try:
            _, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        if end > inside:
            return found.start(), end
    return None


def call_marks(text: str) -> CallMarks | None:
    """How a template writes calls of tools, by what it wrote for a call of `_TOOL` with `_ARGUMENTS`, without its end;
    None: it has no form that is known here."""
    place = text.find(_NAME)
    begin = text[:place].strip()
    name = r"(?P<name>[^\s<>{}()\[\]|\"']+?)"
    if place < 0:
        return None
    if text[:place].endswith("<|tool_call>call:"):
        form = rf"<\|tool_call>call:{name}(?P<arguments>\{{.*?\}})<tool_call\|>"
        form += r"(?:<\|tool_response>)?"
        return CallMarks("<|tool_call>", re.compile(form, re.S), "gemma")
    if text[place + len(_NAME) :].startswith("(keyone="):
        begin, _, after = text[:place].rpartition("[")
        _, _, after = text[place:].partition(")]")
        form = rf"{_literal(begin)}\s*(?P<calls>\[\w+\(.*?\)\]){_closed(after)}"
        return CallMarks(begin.strip(), re.compile(form, re.S), "python")
    if found := _json_at(text, place):
        begin = text[: found[0]].strip()
        form = rf"{_literal(begin)}\s*(?P<calls>[\[{{].*?[\]}}]){_closed(text[found[1] :])}"
        if not begin:
            form = r'\s*(?P<calls>\{\s*"(?:name|type|function)"\s*:.*\})\s*'
        return CallMarks(begin, re.compile(form, re.S), "calls")
    if found := _json_at(text, text.find("keyone")):
        between = _literal(text[place + len(_NAME) : found[0]])
        form = rf"{_literal(begin)}\s*{name}\s*{between}\s*(?P<arguments>\{{.*?\}})"
        form += _closed(text[found[1] :])
        return CallMarks(begin, re.compile(form, re.S), "json")
    return _tagged_call(text, place, begin, name)


def _tagged_call(text, place, begin, name):
    "The marks of a call with tags around each argument."
    parts = re.search("keyone(.*?)valueone(.*?)keytwo(.*?)valuetwo", text, re.S)
    if not parts or parts.start() < place or parts[1] != parts[3]:
        return None
    before = text[place + len(_NAME) : parts.start()]
    same = common_prefix(before[::-1], parts[2][::-1])
    opens, closes = parts[2][len(parts[2]) - same :], parts[2][: len(parts[2]) - same]
    if not opens.strip() or not closes.strip():
        return None
    newline = r"\n?" if parts[1].endswith("\n") else ""
    after = text[parts.end() :].strip().removeprefix(closes.strip())
    argument = rf"{_literal(opens)}(?P<key>[^<>\n]+?){_literal(parts[1])}{newline}"
    argument += rf"(?P<value>.*?){newline}{_literal(closes)}"
    form = rf"{_literal(begin)}\s*{name}\s*{_literal(before[: len(before) - same])}\s*"
    form += rf"(?P<arguments>{_literal(opens)}.*?)?{_closed(after)}"
    return CallMarks(begin, re.compile(form, re.S), "tags", re.compile(argument, re.S))


_CHANNEL = re.compile(
    r"(?P<header>[^<]*)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.S,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+)")


class Marks(NamedTuple):
    "How a chat template writes an assistant's turn."

    header: str  # begins a turn; with channels: each message of it
    content: tuple[str, str] = ("", "")  # before and after the content
    reasoning: tuple[str, str] | None = None  # before and after the reasoning; None: none
    channels: bool = False  # in gpt-oss's channels
    calls: CallMarks | None = None  # None: it writes no calls of tools, or in an unknown form
    call_begin: str = ""  # what begins a call of an unknown form
    no_content: str | None = ""  # content of a message that has calls alone
    arguments_as_text: bool = False  # of a call, as JSON


def _say(content, **more):
    "An assistant's message."
    return {"role": "assistant", "content": content} | more


def _without_empty(text):
    "A text without reasoning that has nothing in it."
    for opens, closes in REASONING:
        text = re.sub(re.escape(opens) + r"\s*" + re.escape(closes), "", text)
    return text


class AnswerParser:
    """Reads an answer's tokens as a message, by the tokenizer's `response_template` or else by the marks that its chat
    template, with these arguments, writes around reasoning, content and calls. `eos_ids` end an answer, besides the
    tokenizer's."""

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] = (), **template_kwargs):
        self.tokenizer = tokenizer
        self.eos_ids = {*eos_ids, tokenizer.eos_token_id} - {None}
        self.ends = [text for text in map(self._decode, [[i] for i in sorted(self.eos_ids)]) if text]
        self.kwargs = template_kwargs
        self.control = ControlTokens(tokenizer)
        self.marks = self._marks()
        self.template = getattr(tokenizer, "response_template", None)
        if self.marks.channels or not self._template_reads():
            self.template = None

    def __call__(self, ids: list[int], prompt: list[int], tools: list[dict] | None = None) -> dict[str, Any]:
        """An answer to a prompt, token ids with the one that ended it, as a message: role, content; reasoning_content
        and tool_calls where it has them. UnreadableAnswer: its marks are not those of the template."""
        text = self._decode(ids[:-1] if ids and ids[-1] in self.eos_ids else ids)
        if self.template:
            message: dict[str, Any] = self._by_template(ids, prompt, tools)
        else:
            message = self._by_marks(text, self._decode(prompt[-64:]).rstrip(), tools)
        calls = message.get("tool_calls") or []
        if calls and not message["content"]:
            message["content"] = self.marks.no_content
        for text in (message["content"], message.get("reasoning_content")):
            self._check(text or "")
        if self.marks.arguments_as_text:
            for function in (call["function"] for call in calls):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return message

    def _decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _check(self, text):
        "UnreadableAnswer: a mark is left in a text."
        marks = {*(self.marks.reasoning or ()), *self.marks.content, self.marks.call_begin}
        left = sorted(self.control.inside(text) | {m for m in marks if m and m in text})
        if left:
            raise UnreadableAnswer(f"{left[0]} where the template writes none")

    def _by_template(self, ids, prompt, tools):
        "By the tokenizer's response template."
        try:
            found = self.tokenizer.parse_response(ids, self.template, prefix=prompt, tools=tools)
        except Exception as e:  # a parser of the library behind it may raise anything
            reason = f"the tokenizer's response_template fails ({type(e).__name__})"
            raise UnreadableAnswer(reason) from e
        message = {"role": "assistant", "content": found.get("content") or ""}
        thought = next((found[name] for name in THOUGHT if found.get(name)), None)
        more = {"reasoning_content": thought, "tool_calls": found.get("tool_calls")}
        return message | {name: value for name, value in more.items() if value}

    def _by_marks(self, text, prompt, tools):
        "By the marks of the chat template."
        marks = self.marks
        if marks.channels:
            return self._by_channels(text, prompt)
        before, after = marks.content
        text = text.rstrip().removesuffix(after) if after else text
        message: dict[str, Any] = {"role": "assistant"}
        if marks.reasoning:
            opens, closes = marks.reasoning
            begun = bool(opens) and prompt.endswith(opens)
            thought, closed, rest = text.partition(closes)
            if not closed and (begun or (opens and text.lstrip().startswith(opens))):
                thought, closed, rest = text, closes, ""
            if closed:
                thought = thought.strip()
                thought = thought if begun else thought.removeprefix(opens).strip()
                text = rest.lstrip()
                if thought:
                    message["reasoning_content"] = thought
        calls = []
        if marks.calls and (tools or marks.calls.begin):  # bare JSON is a call where there are tools
            text, calls = marks.calls.read(text, tools)
        if before:
            text = text.lstrip().removeprefix(before)
        message["content"] = text
        return message | ({"tool_calls": calls} if calls else {})

    def _by_channels(self, text, prompt):
        "By gpt-oss's channels; several messages of a kind are lines of one, as in vLLM."
        opened = re.search(r"<\|channel\|>[^<]*<\|message\|>$", prompt)
        text = (opened[0] if opened else "") + text
        thoughts, contents, calls, end = [], [], [], 0
        while end < len(text):
            rest = text[end:].removeprefix(self.marks.header)
            match = _CHANNEL.match(rest)
            if not match:
                raise UnreadableAnswer("text outside of channels")
            end = len(text) - len(rest) + match.end()
            channel, *more = match["channel"].split(maxsplit=1) or [""]
            called = _RECIPIENT.search(" ".join([match["header"], *more]))
            if called:
                try:
                    calls.append(_call(called[1], json.loads(match["body"])))
                except (ValueError, TypeError, RecursionError) as e:
                    raise UnreadableAnswer("a tool call whose arguments are no object") from e
            elif channel in ("analysis", "final", "commentary"):
                (thoughts if channel == "analysis" else contents).append(match["body"])
            else:
                raise UnreadableAnswer("a channel besides analysis, commentary and final")
        if contents and calls:
            raise UnreadableAnswer("text beside a tool call, which the template writes as reasoning")
        message = {"role": "assistant", "content": "\n".join(contents)}
        message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        return message | ({"tool_calls": calls} if calls else {})

    def _render(self, *messages, tools=None, prompt=False):
        "What the template writes after a question; nothing where it fails."
        kwargs = {"tools": tools, "add_generation_prompt": prompt} | self.kwargs
        question = {"role": "user", "content": _QUESTION}
        try:
            text: Any = self.tokenizer.apply_chat_template([question, *messages], tokenize=False, **kwargs)
        except Exception:  # a template may raise anything
            return ""
        return text.rpartition(_QUESTION)[2]

    def _template_reads(self):
        "Whether there is a response template that reads what the chat template writes."
        if not self.template:
            return False
        answer, prompt = self._render(_say(_ANSWER)), self._render(prompt=True)
        answer = answer.removeprefix(prompt)
        for last in self.ends:
            answer = answer[: answer.find(last) + len(last)] if last in answer else answer
        try:
            found = self.tokenizer.parse_response(answer, prefix=prompt)
        except Exception:
            return False
        return found.get("content") == _ANSWER

    def _marks(self):
        "What the template writes around an answer, a thought, and a call."
        prompt, plain = self._render(prompt=True), self._render(_say(_ANSWER))
        if _ANSWER not in plain:
            return Marks("")
        header = prompt[: common_prefix(prompt, plain)]
        for opens, _ in REASONING:
            header = header.partition(opens)[0]
        before, _, after = plain.removeprefix(header).partition(_ANSWER)
        before = _without_empty(before).strip()
        call, no_content, as_text = self._called()
        call = _without_empty(call.partition(header)[2] if header else call)
        for last in self.ends:
            place = call.rfind("valuetwo")
            after, call = (after.partition(last)[0], call[:place] + call[place:].partition(last)[0])
        call = call.rstrip().removesuffix(after.strip())
        marks = Marks(
            header=header,
            content=(before, after.strip()),
            reasoning=self._reasoning(header, before),
            call_begin=call.partition(_NAME)[0].strip(),
            no_content=no_content,
            arguments_as_text=as_text,
        )
        if "<|channel|>" in before and "<|message|>" in before:
            header = header.strip().removeprefix("<|end|>")
            return marks._replace(header=header, channels=True, call_begin="")
        calls = call_marks(call)
        if calls and calls.reads(call):
            marks = marks._replace(calls=calls, call_begin=calls.begin)
        if marks.call_begin and not re.search(r"[<\[]", marks.call_begin):
            marks = marks._replace(calls=None, call_begin="")  # words that any answer may have
        return marks

    def _reasoning(self, header, before):
        "What opens and closes reasoning; None: nothing is known to."
        for name in THOUGHT:
            text = self._render(_say(_ANSWER, **{name: _REASON}))
            if _REASON in text:
                opens, _, rest = text.removeprefix(header).partition(_REASON)
                closes = rest.partition(_ANSWER)[0].strip().removesuffix(before).strip()
                known = [pair for pair in REASONING if pair[1] in closes]
                return known[0] if known else (opens.strip(), closes) if closes else None
        source = str(self.tokenizer.chat_template)
        vocabulary = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        known = (pair for pair in REASONING if pair[1] in source or pair[1] in vocabulary)
        return next(known, None)

    def _called(self):
        "A call as the template writes it, the content that it needs beside, arguments as text?"
        for content in ("", None):
            for as_text in (False, True):
                arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
                call = _TOOL | {"id": _NAME, "function": {"name": _NAME, "arguments": arguments}}
                text = self._render(_say(content, tool_calls=[call]), tools=[_TOOL])
                if _NAME in text and "valueone" in text and "None" not in text:
                    return text, content, as_text
        return "", "", False
