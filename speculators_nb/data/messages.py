"""Chat messages in one form, from OpenAI, ShareGPT and table dialects.
Roles, contents, tool calls, reasoning and tools are checked; what cannot be read is refused by name. A conversation
has a hash, whatever its spelling."""

import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def brief(value) -> str:
    "Anything as text for an error message: on one line, shortened."
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write whole numbers of more than 4300 digits
        return "a number of thousands of digits"


class BadRow(ValueError):
    "A conversation that cannot be used: `reason` (the same for like cases), `at`, `detail`."

    def __init__(self, reason: str, at: str = "", detail: str = ""):
        super().__init__(reason, at, detail)
        self.reason, self.at, self.detail = reason, at, detail

    def __str__(self):
        text = f"{self.at}: {self.reason}" if self.at else self.reason
        return f"{text} ({self.detail})" if self.detail else text


class Conversation(NamedTuple):
    "What is used of a conversation, in one form: messages, or the tokens of one that is tokenised already."

    messages: list[dict] = []  # as from `normalize`
    tools: list[dict] | None = None  # as from `tools_of`
    images: Any = None  # pictures that a column holds: one, or those for the places in the messages in their order
    input_ids: Any = None  # [n] token ids
    loss_mask: Any = None  # [n]
    domain: str | None = None  # that it names
    primary_id: str | None = None  # of the conversation that it is a part of, if it is

    @property
    def pictured(self) -> list[str]:
        'Where it holds more than text: "message 3", or "" for a column.'
        places = [f"message {i}" for i, m in enumerate(self.messages) if isinstance(m["content"], list)]
        return places or [""] * bool(self.images)


REASONS = 50  # that are counted separately


def reason_of(error: Exception) -> str:
    "Under which words, on one line, errors of `encode_batch` that are alike are counted."
    if isinstance(error, BadRow):
        return error.reason
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deep"
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "it", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {text[:120]}"


def check_text(text: str, at: str = "") -> str:
    """The text itself. BadRow, naming the place `at`, for half of a surrogate pair: what is left of a character that
    was cut in two."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            where = f"{text[e.start]!r} at character {e.start}"
            reason = "half of a surrogate pair, which is no character; repair the text"
            raise BadRow(reason, at, where) from None
    return text


ROLES = {
    role: name
    for name, roles in {
        "user": "user human",
        "assistant": "assistant gpt model chatgpt bot function_call",
        "system": "system developer",
        "tool": "tool function observation ipython environment",
    }.items()
    for role in roles.split()
}
# what templates read besides role, content, tool calls and reasoning
KEPT = "tool_call_id", "name"
THOUGHT = ("reasoning_content", "thinking", "reasoning")
PARTS = ("text", "image", "image_url")  # kinds of parts that a message may hold
SYSTEMS = ("system", "system_prompt")  # columns of what precedes the first message
CONVERSATIONS = ("messages", "conversations", "conversation", "dialog", "dialogue", "data")


# columns of data sets of questions; a question without an answer is a prompt
QUESTIONS = ("question", "instruction", "prompt", "query", "problem", "inputs", "input")
ANSWERS = ("solution", "generated_solution", "answer", "output", "response", "completion", "targets")


def question_and_answer(row: dict) -> list:
    """The messages, as they are written, of a row with columns of `QUESTIONS` and perhaps `ANSWERS`; a list in one is
    of messages. Empty: there is no question."""
    column, answered = (next((k for k in names if row.get(k) is not None), None) for names in (QUESTIONS, ANSWERS))
    question = row.get(column)
    if column == "instruction" and isinstance(question, str):
        context = _first(row, "input", "context")
        if isinstance(context, str) and context.strip():
            question = f"{question}\n\n{context}"
    messages = _as_messages("user", question, column)
    answers = _as_messages("assistant", row.get(answered), answered)
    thought = _first(row, *THOUGHT)  # before the answer; some tables have a switch of that name
    if answers and isinstance(thought, str) and thought not in ("", "on", "off"):
        answers = [{"reasoning_content": thought} | answers[0], *answers[1:]]
    return messages + answers if messages else []


def _as_messages(role, content, column):
    "A column as messages of this role; a list of messages as it is."
    content = content.tolist() if hasattr(content, "tolist") else content
    if isinstance(content, list):
        if not all(isinstance(m, dict) for m in content):
            reason = f"{column} is a list, expected one text, or messages"
            raise BadRow(reason, detail=brief(content))
        return content
    return [] if content in (None, "") else [{"role": role, "content": content}]


def messages_of(row) -> list[dict[str, Any]]:
    """The messages of a conversation (as in `normalize`), as they are written, a system prompt of its own column in
    front. BadRow: there are none, or they are no list of objects."""
    columns: dict = row if isinstance(row, dict) else {"messages": row}
    found: list[Any] = [columns.get(name) for name in CONVERSATIONS]
    found = [t.tolist() if hasattr(t, "tolist") else t for t in found]
    # a column of the other names may be something else, such as a text
    found = found[:2] + [t for t in found[2:] if isinstance(t, list)]
    turns: Any = next((t for t in found if t), None) or question_and_answer(columns)
    if isinstance(turns, str) and turns[:1] == "[":
        turns = as_json(turns, "messages")
    if not turns:
        there = brief(sorted(map(str, row)) if isinstance(row, dict) else row)
        raise BadRow(
            f"no messages: expected 'messages' or 'conversations', or a question ({', '.join(QUESTIONS)}), in {there}"
        )
    texts = isinstance(turns, list) and len(turns) > 1 and {*map(type, turns)} == {str}
    if isinstance(row, dict) and texts:  # a dialogue
        roles = itertools.cycle(("user", "assistant"))
        turns = [{"role": role, "content": text} for role, text in zip(roles, turns)]
    wrong = turns if not isinstance(turns, list) else [m for m in turns if not isinstance(m, dict)]
    if wrong:
        raise BadRow("messages must be a list of objects with 'role' and 'content'", detail=f"not {brief(wrong)}")
    messages: Any = turns
    system, first = _first(columns, *SYSTEMS), ROLES.get(str(_first(messages[0], "role", "from")))
    if not isinstance(system, str) or not system.strip() or first == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def normalize(
    row,  # {"messages": […]}, {"conversations": […]}, a list, or {"question": …, "answer": …}
) -> list[dict]:  # [{"role", "content", …}]
    "One conversation in role/content form. BadRow names the message and what is wrong with it."
    return [_message(m, i) for i, m in enumerate(messages_of(row))]


def _message(m, i):
    "One message in role/content form."
    role, content = _first(m, "role", "from"), _first(m, "content", "value")
    if not isinstance(role, str) or role not in ROLES:
        reason = f"role {brief(role)} is unknown; known are {', '.join(ROLES)}"
        raise BadRow(reason, f"message {i}")
    at = f"message {i} ({role})"
    calls = _calls_in(m, role, content, at)
    if role == "function_call":
        content = None
    thought = next((m[k] for k in THOUGHT if m.get(k)), None)
    if isinstance(content, list) and ROLES[role] == "assistant":
        thought, content = _thought_parts(thought, content, at)
    if content is None and not calls:
        raise BadRow("no content", at)
    out = {"role": ROLES[role], "content": _text(content, at, ROLES[role])}
    if calls:
        out["tool_calls"] = [_call(c, at) for c in calls]
    if thought:
        if not isinstance(thought, str):
            raise _not_text("reasoning", thought, at)
        out["reasoning_content"] = out["thinking"] = check_text(thought, at)
    for name in KEPT:
        if (value := m.get(name)) is not None:
            if not isinstance(value, (str, int)):
                raise _not_text(name, value, at)
            out[name] = value
    if out["role"] == "assistant" and (weight := m.get("weight")) is not None:
        if weight not in (0, 1):
            raise BadRow(f"weight is {brief(weight)}, expected 0 or 1", at)
        out |= {} if weight else {"weight": 0}
    return out


def _calls_in(m, role, content, at):
    "The calls of tools of a message, as they are written."
    calls = as_json(m.get("tool_calls"), "tool_calls", at)
    if isinstance(calls, dict):
        raise BadRow("tool_calls must be a list of objects", at, f"not {brief(calls)}")
    if calls:
        return calls
    old = content if role == "function_call" else m.get("function_call")
    call = as_json(old, "function_call", at)
    calls = call if isinstance(call, list) or not call else [call]
    # templates look for the name in "function"
    return calls and [{"type": "function", "function": c} for c in calls]


def _thought_parts(thought, parts, at):
    "(reasoning, the other parts): some write what was thought as parts of the content."
    thoughts: list[Any] = [
        p.get(p["type"], p.get("text"))
        for p in parts
        if isinstance(p, dict) and p.get("type") in ("thinking", "reasoning")
    ]
    if not thoughts:
        return thought, parts
    for one in thoughts:
        if not isinstance(one, str):
            raise _not_text("reasoning", one, at)
    rest = [p for p in parts if not (isinstance(p, dict) and p.get("type") in THOUGHT)]
    return thought or "\n".join(thoughts), rest


def _not_text(name, value, at):
    return BadRow(f"{name} is a {type(value).__name__}, expected text", at, brief(value))


def _first(m, *names):
    "The value of the first of these fields that is there. (Tables fill in None where a row lacks a field.)"
    return next((m[k] for k in names if m.get(k) is not None), None)


def _text(content, at, role):
    "A message's text; a list that holds more than text is left to `images`."
    if isinstance(content, dict) or (role == "tool" and isinstance(content, (int, float))):
        content = json.dumps(content, ensure_ascii=False)  # what a tool gave back
    if content is None or isinstance(content, str):
        return content and check_text(content, at)
    if not isinstance(content, list):
        raise _not_text("content", content, at)
    texts: list[Any] = [_part(p, at) for p in content]
    return content if None in texts else "".join(texts)


def _part(part, at):
    "The text of a part; None: it is a picture."
    if isinstance(part, str):
        return check_text(part, at)
    kind = part.get("type") if isinstance(part, dict) else part
    if kind not in PARTS:
        raise BadRow(f"a part of type {brief(kind)}; known are {', '.join(PARTS)}", at)
    if kind != "text":
        return None
    if not isinstance(part.get("text"), str):
        raise BadRow("a part of type 'text' without text", at, brief(part.get("text")))
    return check_text(part["text"], at)


def _call(call, at):
    "A tool call, checked; its arguments stay as they are written."
    if not isinstance(call, dict):
        raise BadRow("a tool call must be an object with 'name' and 'arguments'", at, f"not {brief(call)}")
    call = {k: v for k, v in call.items() if v is not None}
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"], at)}
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise BadRow("a tool call has no name", at, brief(call))
    return call


def tools_of(row) -> list[dict] | None:
    """What could be called: "tools" of a conversation, a list or, as tables store it, a string of JSON. BadRow:
    unreadable; a prompt without its tools is another prompt."""
    given = _first(row, "tools", "functions") if isinstance(row, dict) else None
    tools: Any = as_json(given, "tools")
    if isinstance(tools, list):
        tools = [as_json(t, "tools") for t in tools]
    if tools and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise BadRow("tools: expected a list of objects", detail=f"not {brief(tools)}")
    return tools or None


def parts_of(messages) -> list[dict]:
    """The parts of messages whose content is a list, as they are written, also as a string of JSON, texts aside; empty:
    they are no messages."""
    try:
        messages = as_json(messages, "messages")
    except BadRow:
        return []
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def map_parts(messages: list[dict], change: Callable) -> list[dict]:
    "Messages, each part of a content that is a list as `change` makes it."
    contents = [m.get("content") for m in messages]
    return [m | {"content": [*map(change, c)]} if isinstance(c, list) else m for m, c in zip(messages, contents)]


def holds_pictures(messages) -> bool:
    "Whether a part of a message, as it is written, is a picture; False for what are no messages."
    return any(part.get("type") in ("image", "image_url") for part in parts_of(messages))


def picture_digests(messages) -> list[str]:
    "SHA-256 of each picture, where a prepared row has recorded it (`images.resolve_images`); tables fill in None."
    return [digest for part in parts_of(messages) if (digest := part.get("sha256"))]


def messages_alone(row) -> list[dict]:
    "`normalize`, for those who read nothing but messages. BadRow: the conversation has pictures beside them."
    if isinstance(row, dict) and (row.get("images") or row.get("image")):
        raise BadRow(
            "its pictures are in a column, which is not read here; put them into the messages, as parts of type "
            "image_url"
        )
    return normalize(row)


def domain_of(row: dict) -> str | None:
    "The domain, source or category that a conversation names, if any: a mix has columns for it."
    names = (row.get(column) for column in ("domain", "source", "category", "dataset"))
    return next((name for name in names if isinstance(name, str) and name), None)


def as_json(value, what: str, at: str = "") -> list | dict | None:
    """A list or an object, also where it is written as a string of JSON; None: there is nothing. BadRow, naming the
    field `what` and the place `at`: it is neither."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise BadRow(f"{what}: not JSON", at, str(e)) from None
    if value and not isinstance(value, (list, dict)):
        reason = f"{what}: expected a list or an object, not {type(value).__name__}"
        raise BadRow(reason, at, brief(value))
    return value or None


def content_hash(row: dict | list | Conversation) -> str:
    """32 hex digits of a conversation in any spelling: of its roles, contents, tools and their calls, reasoning,
    images; or of the token ids and the mask. Ids and metadata do not count."""
    read = row if isinstance(row, Conversation) else None
    columns: Any = read._asdict() if read else row if isinstance(row, dict) else {"messages": row}
    if columns.get("input_ids") is not None:
        mask = columns.get("loss_mask")
        content = [list(map(int, column)) for column in (columns["input_ids"], [] if mask is None else mask)]
    else:
        try:
            messages, tools = (read.messages, read.tools) if read else (normalize(columns), tools_of(columns))
        except BadRow:  # as it is written
            turns, tools = next(filter(None, map(columns.get, CONVERSATIONS)), []), columns.get("tools") or None
        else:
            turns = [{k: v for k, v in m.items() if v is not None and k != "thinking"} for m in messages]
            for turn in turns:
                if isinstance(turn.get("content"), list):  # pictures; tables fill in None
                    parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in turn["content"]]
                    turn["content"] = [{k: v for k, v in part.items() if v is not None} for part in parts]
        content = [turns, tools, columns.get("images") or columns.get("image") or None]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=_raw)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _raw(value):
    "What JSON does not know (bytes, an image): its bytes, hashed."
    if hasattr(value, "tobytes"):
        value = value.tobytes()
    data = value if isinstance(value, bytes) else str(value).encode()
    return hashlib.sha256(data).hexdigest()


def identity(row: dict) -> str:
    "The name under which a job resumes a conversation: its id or uuid, else the hash of its content."
    names = (row.get(k) for k in ("id", "uuid"))
    name = next((str(n) for n in names if n not in (None, "") and n == n), None)
    return name or content_hash(row)


EMPTY = ({"content": ""}, {"content": None}, {})  # of a turn that only calls tools


class Misread(BadRow):
    "A chat template cannot read a conversation as it is spelled."


def in_a_spelling(messages: list[dict], attempt: Callable[[list[dict]], Any]) -> Any:
    """What the first attempt gives that succeeds, with the calls of tools in messages of `normalize` spelled in one way
    after another, of all that templates read; as they are written comes first. It raises Misread for a spelling that is
    not read. Misread: the template reads none."""
    tried, errors = [], []
    called = any(m.get("tool_calls") for m in messages)
    for empty, arguments in itertools.product((None, *EMPTY), (None, _as_object, _as_text)):
        spelled = [_spelled(m, empty, arguments) for m in messages] if called else messages
        if spelled in tried:
            continue
        tried.append(spelled)
        try:
            return attempt(spelled)
        except Misread as e:
            errors.append(e)
    raise max(errors, key=lambda e: bool(e.at))  # what is left out says more


def as_served(messages: list[dict]) -> list[dict]:
    "Arguments of calls as objects: vLLM parses them before it renders a request."
    return [_spelled(m, None, _as_object) for m in messages]


def _spelled(message, empty, arguments):
    "A message in one spelling; None: as it is written."
    calls = message.get("tool_calls")
    if calls and empty is not None and not message["content"]:
        message = {k: v for k, v in message.items() if k != "content"} | empty
    if calls and arguments is not None:
        message = message | {"tool_calls": [_spelled_call(call, arguments) for call in calls]}
    return message


def _spelled_call(call, arguments):
    function = call.get("function") or call
    about = {"type": "function"} | {k: v for k, v in call.items() if k in ("id", "type")}
    function = {k: v for k, v in function.items() if k not in about}
    function["arguments"] = arguments(function.get("arguments"))
    return about | {"function": function}


def _as_object(arguments):
    "Arguments as an object; what is no JSON stays as it is written."
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, (dict, list)) else arguments


def _as_text(arguments):
    "Arguments as JSON."
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
