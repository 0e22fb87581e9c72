"""On-policy regeneration, one conversation at a time.
Its user turns and recorded tool results are sent to the verifier, whose answers replace the old ones; sampling
parameters are drawn per conversation."""

import hashlib
import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from ..data.chat_encoding import add_turn
from ..data.chat_template import reach, template_errors
from ..data.messages import THOUGHT, brief, content_hash, domain_of, identity, messages_alone, tools_of

# No tools are executed: the i-th call of a turn gets the i-th recorded result if both name the same tool and the call
# is the only one in its answer. Otherwise the conversation ends with that answer, which is the verifier's own and is
# kept; so it does with an answer that was cut, since what a user would reply to half a sentence is not in the data.


@dataclass
class Turn:
    "The messages between two answers, and results of tools that the old answer called."

    messages: list[dict] = field(default_factory=list)  # system and user messages
    results: list[tuple] = field(default_factory=list)  # (tool's name or None, content)

    def has_user(self) -> bool:
        "Whether somebody asks something."
        return any(m["role"] == "user" for m in self.messages)


def turns_to_ask(messages: list[dict]) -> list[Turn]:
    "The turns that are replayed, one per answer to a user, of messages of `normalize`. ValueError: no user message."
    turns = [Turn()]
    answered = False
    calls = []  # of the last answer, without a result so far
    for message in messages:
        if message["role"] == "assistant":
            answered = True
            calls = _calls(message)
        elif message["role"] == "tool":
            turns[-1].results.append((_take_name(message, calls), message["content"]))
        else:
            if answered and turns[-1].has_user():
                turns.append(Turn())
            answered = False
            turns[-1].messages.append(message)
    if not turns[-1].has_user():
        turns.pop()
    if not turns:
        raise ValueError("no user message")
    return turns


def questions_of(messages: list[dict]) -> list[list[dict]]:
    "The user's turns, without tools, of messages of `normalize`: for each answer the messages that ask for it."
    return [turn.messages for turn in turns_to_ask(messages)]


_NAME = re.compile(r'<tool_(?:call|response)>[^<]*?"name"\s*:\s*"([^"]+)"')


def _calls(message):
    "(id, name) of each tool call in an assistant's message."
    calls = message.get("tool_calls") or []
    if not calls:
        return [(None, name) for name in _NAME.findall(str(message["content"]))]
    return [(call.get("id"), (call.get("function") or call).get("name")) for call in calls]


def _take_name(message, calls):
    "The name of the tool of a result; its call is removed from `calls`."
    wanted = message.get("tool_call_id")
    places = [i for i, (known, _) in enumerate(calls) if not wanted or known == wanted]
    _, called = calls.pop(places[0]) if places else (None, None)
    written = _NAME.findall(str(message["content"]))
    return message.get("name") or (written[0] if written else called)


PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "chat_template_kwargs",
)


def check_sampling(sampling: dict | None, known: tuple[str, ...] = PARAMETERS) -> dict:
    """The parameters: name, one of `known`, -> value, or pairs [value, weight]. ValueError names one that is unknown,
    or whose value is out of range."""
    for name, value in (sampling or {}).items():
        if name not in known:
            raise ValueError(f"sampling: {name!r} is not known here; known are {', '.join(known)}")
        values = [value]
        if _is_distribution(value):
            values = [one for one, _ in value]
            weights = [weight for _, weight in value]
            if min(weights) < 0 or sum(weights) <= 0:
                raise ValueError(
                    f"sampling: the weights of {name} must not be negative, and one must be positive: {value}"
                )
        for one in values:
            try:
                _check(name, one)
            except ValueError as e:
                raise ValueError(f"sampling: {e}") from None
    return dict(sampling or {})


def _is_distribution(value):
    "Whether a value is a list of pairs [value, weight]."
    return bool(isinstance(value, (list, tuple)) and value) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], (int, float)) and abs(pair[1]) < 1e6
        for pair in value
    )


_KINDS = {  # type, its name, an example
    "chat_template_kwargs": (dict, "object", '{"enable_thinking": false}'),
    "reasoning_effort": (str, "text", '"low"'),
}


def _check(name, value):
    "ValueError: the value of a parameter cannot be used."
    kind, what, example = _KINDS.get(name, ((int, float), "number", "0.7"))
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name}: {brief(value)} is no {what}; write for instance {example}")
    if what == "number" and not abs(value) < 1e6:
        raise ValueError(f"{name}: {brief(value)} is no finite number of a usual size")
    if name == "temperature" and value < 0:
        raise ValueError(f"temperature: {value} is out of range; 0 is greedy")
    if name == "top_p" and not 0 < value <= 1:
        raise ValueError(f"top_p: {value} is out of range; 1 keeps every token")


def seed_of(*names) -> int:
    "A seed of 60 bits that depends on nothing but names, of what it is for."
    return int(hashlib.sha256("/".join(map(str, names)).encode()).hexdigest()[:15], 16)


def draw_sampling(row, key: str, sampling: dict, seed: int) -> dict:
    """The sampling parameters, name -> value, of one conversation with this identity: those of `check_sampling`, drawn
    by the seed; its own fields of these names take precedence."""
    drawn = {}
    for name, value in sampling.items():
        if _is_distribution(value):
            value = _draw(value, seed_of(seed, key, name))
        drawn[name] = value
    fields = row if isinstance(row, dict) else {}
    for name in PARAMETERS:
        value = fields.get(name)
        if value is None:
            continue
        if name == "chat_template_kwargs" and isinstance(value, str):
            value = json.loads(value)
        _check(name, value)
        drawn[name] = value
    return drawn


def _draw(pairs, seed):
    "The value at which the cumulated weights exceed a uniform number."
    u = seed / 16**15 * sum(weight for _, weight in pairs)
    ends = itertools.accumulate(weight for _, weight in pairs)
    return next(value for (value, _), end in zip(pairs, ends) if u < end)


def _spelled(message):
    "A message whose reasoning has every name that templates read."
    thought = message.get("reasoning_content")
    return message | dict.fromkeys(THOUGHT, thought) if thought else message


class Replay:
    """One conversation, of file and line `where`, while it is being regenerated: sampling is that of the call, as from
    `check_sampling`, and everything random follows from the seed."""

    def __init__(self, row: dict | list[dict], sampling: dict | None = None, seed: int = 0, where: str = ""):
        row = row if isinstance(row, dict) else {"messages": row}
        self.original = messages_alone(row)
        self.seed, self.where = seed, where
        self.key, self.content = identity(row), content_hash(row)
        definitions = [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools_of(row) or []
        ]
        self.tools, self.domain = definitions or None, domain_of(row)
        self.sampling = draw_sampling(row, self.key, sampling or {}, seed)
        self.turns = turns_to_ask(self.original)
        self.messages = []  # all so far
        self.rows = []  # (input_ids, loss_mask)
        self.finish = []  # finish reason of each answer
        self.usage = Counter()
        self.about = {}
        self.prompt: list[int] = []  # token ids of the question that is to be answered
        self.turns_read = self.results_read = 0  # turns, and results of tools, that the verifier has read
        self._turn = self._calls = 0  # the current turn, and its calls so far
        self._next = self.turns[0].messages  # what comes before the next answer

    @property
    def template_kwargs(self) -> dict:
        "Arguments of the chat template."
        kwargs = dict(self.sampling.get("chat_template_kwargs") or {})
        if effort := self.sampling.get("reasoning_effort"):
            kwargs["reasoning_effort"] = effort
        return kwargs

    def render(self, messages: list[dict], tokenizer, prompt: bool = True, limit: int | None = None) -> list[int]:
        """A history as the verifier reads it. Of one with more than `limit` tokens only as many as show that it is too
        long."""
        messages = [_spelled(message) for message in messages]
        apply = partial(
            tokenizer.apply_chat_template,
            messages,
            tools=self.tools,
            add_generation_prompt=prompt,
            **self.template_kwargs,
        )
        if limit and sum(len(str(m["content"])) for m in messages) > reach(limit):
            with template_errors(tokenizer.name_or_path):
                text = apply(tokenize=False)
            end = reach(limit)
            while end < len(text):
                ids = tokenizer(text[:end], add_special_tokens=False)["input_ids"]
                if len(ids) > limit + 100:  # the cut changes few tokens
                    return ids
                end *= 4
        with template_errors(tokenizer.name_or_path):
            encoded = apply(return_dict=True)
        return encoded["input_ids"]

    def next_seed(self) -> int:
        "The seed of the next answer."
        return seed_of(self.seed, self.key, len(self.finish))

    def end(self, reason: str) -> None:
        "End the conversation before all turns are replayed."
        self.about["truncated"] = reason
        self._next = []

    def left_out(self) -> dict[str, int]:
        "What of the input the verifier has not read, but for the old answers."
        early = self.about.get("truncated", "the answer before was cut")
        sizes = [len(turn.messages) + len(turn.results) for turn in self.turns]
        results = sum(len(turn.results) for turn in self.turns[: self.turns_read])
        roles = [message["role"] for message in self.original]
        counts = {
            early: sum(sizes[self.turns_read :]),
            "results of tools that were not called": results - self.results_read,
            "no question follows": len(roles) - roles.count("assistant") - sum(sizes),
            "said before the first question": roles[: roles.index("user")].count("assistant"),
        }
        return {reason: n for reason, n in counts.items() if n}

    def lines(self, metadata: dict) -> list[dict]:
        "The conversation's lines of the output file."
        own = {
            "content": self.content,
            "finish_reasons": self.finish,
            "sampling_params": self.sampling,
            "usage": dict(self.usage),
        }
        about = metadata | self.about | own
        if self.tools:
            about["tools"] = self.tools
        if left_out := self.left_out():
            about["left_out"] = left_out
        domain = {"domain": self.domain} if self.domain else {}
        return [
            {
                "id": f"{self.key}_gen{k}",
                "primary_id": self.key,
                "part": [k, len(self.rows)],
                "input_ids": ids,
                "loss_mask": mask,
                "messages": self.messages,
                "metadata": about,
            }
            | domain
            for k, (ids, mask) in enumerate(self.rows)
        ]

    def pending(self) -> list[dict] | None:  # the whole history; None: the conversation is over
        "The messages to be answered next."
        return [*self.messages, *self._next] if self._next else None

    def add_answer(self, prompt: list[int], ids: list[int], message: dict, finish: str) -> None:
        """Take an answer into the conversation: token ids of its prompt, its own, the message that they are, and why it
        ended ("stop", "tool_calls", "length", …). ValueError: it is empty."""
        if not ids:
            raise ValueError(f"answer {len(self.finish)} has no tokens (finish reason {finish!r})")
        add_turn(self.rows, [*prompt, *ids], len(prompt))
        self.turns_read = self._turn + 1
        self.messages += [*self._next, message]
        self.finish.append(finish)
        self.usage["answered"] += len(ids)
        self._next = []
        if finish == "length":
            return
        if calls := message.get("tool_calls"):
            self._answer_call(calls)
        else:
            self._turn, self._calls = self._turn + 1, 0
            if self._turn < len(self.turns):
                self._next = self.turns[self._turn].messages

    def _answer_call(self, calls):
        "The recorded result of a tool call, or the end of the conversation."
        call = calls[0]
        name = (call.get("function") or call).get("name")
        results = self.turns[self._turn].results[self._calls :]
        if len(calls) != 1:
            self.end(f"{len(calls)} tool calls at once")
        elif not results:
            self.end("a tool call without a result at hand")
        elif results[0][0] != name:
            self.end("a tool call other than the one whose result is at hand")
        else:
            self._calls += 1
            self.results_read += 1
            result = {"role": "tool", "name": name, "content": results[0][1]}
            if call.get("id"):
                result["tool_call_id"] = call["id"]
            self._next = [result]
