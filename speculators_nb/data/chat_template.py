"""Rendering conversations with a chat template, and finding what the assistant wrote and what of it is trained.
The assistant's characters are found with and without generation marks."""

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ..verifier.folders import check_tokenizer
from .messages import THOUGHT, BadRow, Misread


Spans = list[tuple[int, int]]  # (first character, the one after the last) of parts of a text


def texts_in(value) -> Iterator[str]:
    "Every text in lists and objects, however deep, keys of objects too."
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            left += value


class ControlTokens:
    "The tokenizer's control tokens, and where texts spell them."

    def __init__(self, tokenizer):
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.ids = sorted(added)  # of tokens that are taken out of a text whole
        self.tokens = {str(t) for t in added.values() if t.special and str(t)}
        self.lengths = sorted({len(t) for t in self.tokens}, reverse=True)
        starts = sorted({re.escape(t[:2]) for t in self.tokens})
        self.start = re.compile("|".join(starts)) if starts else None

    def inside(self, text: str) -> set[str]:
        "Which control tokens the text of a message would be tokenised to."
        if not self.start:
            return set()
        places = [match.start() for match in self.start.finditer(text)]
        return {text[i : i + n] for i in places for n in self.lengths} & self.tokens

    def spelled(self, messages: list[dict], tools: list[dict] | None = None) -> dict[str, int]:
        """Control token -> first message that spells it: in messages of `normalize`, in tool calls, and in the
        definitions of tools, which are placed before the first message."""
        found = {}
        for i, message in enumerate(messages):
            content = message["content"]
            parts = content if isinstance(content, list) else [content]
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            texts += [message.get(k) for k in ("reasoning_content", "name", "tool_calls")]
            if i == 0:
                texts.append(tools)
            for text in texts_in(texts):
                for token in self.inside(text):
                    found.setdefault(token, i)
        return found


@contextlib.contextmanager
def tokenizer_errors(verifier):
    "Name the verifier (folder or hub id) whose tokenizer is read. Errors: FileNotFoundError; ValueError."
    try:
        yield
    except ImportError:
        raise
    except Exception as e:  # of the library behind it, which may raise anything
        why = " ".join(str(e).split())[:300]
        if isinstance(e, OSError):
            raise FileNotFoundError(f"{verifier}: its tokenizer cannot be read: {why}") from e
        raise ValueError(f"{verifier}: its tokenizer cannot be read: {type(e).__name__}: {why}") from e


def open_tokenizer(verifier: str | os.PathLike, trust_remote_code: bool = False):
    """A verifier's tokenizer. Errors: FileNotFoundError where the folder has none; ValueError for one that cannot be
    read."""
    if Path(verifier).is_dir():
        check_tokenizer(verifier)
    with tokenizer_errors(verifier):
        return AutoTokenizer.from_pretrained(verifier, trust_remote_code=trust_remote_code)


def load_processor(path: str | Path, trust_remote_code: bool = False):
    """What turns conversations into the inputs of a verifier (folder or hub id): its processor if it takes pictures,
    else, and where a folder has none, its tokenizer. Videos need torchvision, pictures do not."""
    with tokenizer_errors(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if getattr(config, "vision_config", None) is None:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        try:
            return _processor(path, config, trust_remote_code)
        except OSError:
            files = (Path(path) / name for name in ("processor_config.json", "preprocessor_config.json"))
            if not Path(path).is_dir() or any(file.is_file() for file in files):
                raise
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def _processor(path, config, trust_remote_code):
    "The processor of a verifier that takes pictures. OSError: it has none."
    try:
        return AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ImportError:
        auto = transformers.models.auto.processing_auto  # every release has the names there
        names = auto.PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
        kind = getattr(transformers, names.get(config.model_type) or "", None)
        if kind is None:
            raise
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        pictures = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        return without_video(kind)(pictures, tokenizer, None, chat_template=tokenizer.chat_template)


def without_video(kind: type) -> type:
    "A processor class of transformers that is content without a video processor."

    def check(self, name, part):
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check, "__module__": kind.__module__})


def reads_parts_alone(tokenizer, template: str | None = None) -> bool:
    """Whether a chat template (None: the tokenizer's own) reads a text only where it is a part of a list, as those of
    LLaVA and SmolVLM do. ValueError where it leaves out the user's message: every question would be the same text."""
    probe = "Is this read?"
    for content in (probe, [{"type": "text", "text": probe}]):
        question = [{"role": "user", "content": content}]
        try:
            text = tokenizer.apply_chat_template(question, chat_template=template, tokenize=False)
        except Exception:  # it needs more than a question, or fails: rendering reports it
            return False
        if probe.lower() in text.lower():
            return content is not probe
    raise ValueError(
        f"verifier {tokenizer.name_or_path!r}: its chat template leaves out what a person "
        f"says, it renders {text[:60]!r}; take the chat_template.jinja that belongs to the "
        "model"
    )


def in_parts(messages: list[dict]) -> list[dict]:
    "Messages whose texts are parts, for a template that `reads_parts_alone`."
    return [
        m | {"content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@contextlib.contextmanager
def template_errors(name: str):
    "What the chat template of a tokenizer raises, which may be anything, as a BadRow that names it."
    try:
        yield
    except (RecursionError, MemoryError) as e:
        raise BadRow(
            f"the chat template of {name} calls itself without end or makes a text without "
            f"end, or a message is nested too deep ({type(e).__name__})"
        ) from e
    except Exception as e:
        why = (str(e).splitlines() or [""])[0][:160]
        raise Misread(f"the chat template of {name} fails: {type(e).__name__}: {why}") from e


WHOLE = 1 << 17  # characters of a text that is tokenised whole, whatever is needed of it
PER_TOKEN = 32  # characters that a token has at most, on average over the beginning of a text


def reach(first: int) -> int:
    "How many characters of a text are tokenised for its first tokens."
    return max(WHOLE, PER_TOKEN * first)


class ChatTemplate:
    """The chat template of a fast HF tokenizer or a processor: `template(messages)` gives the text, and where in it the
    marks are; `tokens` tokenises it. `kwargs` are for the template, e.g. enable_thinking=False."""

    def __init__(self, tokenizer: Any, **kwargs):
        self.owner = tokenizer
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.kwargs = kwargs
        self.multimodal = self.owner is not self.tokenizer
        self.name = self.tokenizer.name_or_path
        self.backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        after = getattr(self.backend, "post_processor", None)
        if after is not None and b'"trim_offsets":true' in after.__getstate__().replace(b" ", b""):
            # a copy, whose offsets contain the spaces of its tokens
            self.backend = Tokenizer.from_str(self.backend.to_str())
            self.backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        self.special = dict(self.tokenizer.special_tokens_map)
        self.control = ControlTokens(self.tokenizer)
        self.parts_alone = reads_parts_alone(self.tokenizer, self._text(None))

    def _text(self, tools):
        "The template's text; some tokenizers have one of their own for tools."
        own = getattr(self.owner, "chat_template", None)
        own = own or getattr(self.tokenizer, "chat_template", None)
        if isinstance(own, dict):
            return own["tool_use"] if tools and "tool_use" in own else own.get("default")
        return own

    def render(
        self, messages: list[dict], tools: list[dict] | None = None, prompt: bool = False
    ) -> tuple[str, Spans | None]:
        """A conversation as transformers renders it, with `prompt` to the end of the generation prompt: the text, and
        the characters that are marked in it; None: the template has no marks. Misread: what the template raises."""
        text = self._text(tools)
        if not text:
            raise ValueError(
                f"tokenizer {self.name!r} has no chat_template; set tokenizer.chat_template "
                "(chat_template.jinja beside the model)"
            )
        if self.backend is None:
            raise ValueError(
                f"tokenizer {self.name!r} is a {type(self.tokenizer).__name__}, which cannot "
                "say where its tokens begin; load the fast one (tokenizer.json)"
            )
        marked = bool(MARK.search(text))
        with template_errors(self.name):
            rendered: Any = render_jinja_template(
                conversations=[in_parts(messages) if self.parts_alone else messages],
                tools=None if tools is None else [*tools],
                chat_template=text,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **(self.special | self.kwargs),
            )
        (text,), marks = rendered  # lists; transformers' type is that of one conversation
        return text, marks[0] if marked else None

    def __call__(
        self, messages: list[dict], tools: list[dict] | None = None, prompt: bool = False
    ) -> tuple[str, Spans | None]:
        "A conversation as later turns continue it: `render` without what is `unasked`."
        text, marks = self.render(messages, tools, prompt)
        end = len(text) - len(self.unasked)
        marked = marks and marks[-1][1] > end  # whoever marked it wants it
        if prompt or marked or not text.endswith(self.unasked):
            return text, marks
        return text[:end], marks

    @cached_property
    def unasked(self) -> str:  # empty for most templates
        """What the template writes after every conversation, though no generation prompt was
        requested, and not where a conversation continues."""
        question, answer = _PROBE
        try:
            question, text, longer = (
                self.render(m)[0] for m in ([question], [question, answer], [question, answer, question])
            )
        except BadRow:
            return ""
        first = len(text) - common_prefix(text[::-1], question[::-1])  # here, or after it
        ours, theirs = self.tokens([text, longer])
        k = common_prefix(ours.ids, theirs.ids)
        last = ours.offsets[k][0] if k < len(ours.ids) else len(text)  # here, or before it
        # the next header may begin with the same characters, as the first header does
        begin = longer.removeprefix(self.special.get("bos_token") or "")
        same = [n for n in range(last - first + 1) if begin.startswith(text[last - n : last])]
        if not same:  # earlier turns are rewritten
            return ""
        start = last - max(same)
        end_of_turn = text[text.rfind(answer["content"]) + len(answer["content"]) : start]
        ends = self.control.inside(end_of_turn)
        if text[start:].strip() == self.special.get("eos_token") and not ends:
            return ""  # the only token that ends an answer
        return text[start:]

    def tokens(self, texts: list[str], first: int | None = None) -> list:
        """Tokenise rendered texts, an Encoding (ids, offsets) each: nothing is added or padded. A longer text may be
        cut after the `first` tokens, which are all that is needed of it."""
        if not texts:
            return []
        self.backend.no_padding()
        self.backend.no_truncation()
        ends = [len(text) if first is None else min(len(text), reach(first)) for text in texts]
        out = self.backend.encode_batch([text[:end] for text, end in zip(texts, ends)], add_special_tokens=False)
        for i, (text, end) in enumerate(zip(texts, ends)):
            while end < len(text) and not _settled(out[i], first, end):
                end *= 4
                (out[i],) = self.backend.encode_batch([text[:end]], add_special_tokens=False)
        return out

    @cached_property
    def marks_prompt(self) -> bool:
        "Whether its marks contain the generation prompt, which the verifier does not write."
        try:
            text, marks = self(list(_PROBE))
            return bool(marks) and marks[0][0] < _border(_PROBE, 1, self, None, text)
        except BadRow:
            return False


_PROBE = ({"role": "user", "content": "Is this read?"}, {"role": "assistant", "content": "It is."})


def common_prefix(a, b) -> int:
    "How many first elements of two texts or lists agree: a binary search over slices."
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _settled(encoding, first, end):
    "Whether the first tokens are in the first half of a text that was cut at `end`."
    return len(encoding.ids) > first and encoding.offsets[first][1] <= end // 2


def fingerprint_template(template: ChatTemplate) -> str:
    "Hash everything that turns a conversation into token ids: 16 hex digits."
    backend = template.backend
    h = hashlib.sha256((template.name if backend is None else backend.to_str()).encode())
    texts = [template._text(None), template._text([{}]), template.special]
    h.update(json.dumps(texts, sort_keys=True, default=str).encode())
    return h.hexdigest()[:16]


# (opening, closing) tags of reasoning; only what is on its own may begin in the prompt
_TAGS = [(f"<{n}>", f"</{n}>") for n in ("think", "thinking", "thought", "reasoning")]
_TAGS += [("[THINK]", "[/THINK]"), ("<|begin_of_thought|>", "<|end_of_thought|>")]
_TAGS += [("<|channel>thought", "<channel|>"), ("<|START_THINKING|>", "<|END_THINKING|>")]
_REASONING = [rf"{re.escape(a)}.*?(?:{re.escape(b)}\s*|\Z)" for a, b in _TAGS]
_REASONING += [r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)"]
_CALLS = [
    r"\s*<tool_call>.*?(?:</tool_call>|\Z)",
    r"\[TOOL_CALLS\][^<]*",
    r"<\|python_tag\|>.*?(?=<\||\Z)",
    r"<\|channel\|>commentary to=.*?(?:<\|call\|>|\Z)",
    r"<\|tool_calls_section_begin\|>.*?(?:<\|tool_calls_section_end\|>|\Z)",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>.*?(?:<\uff5ctool\u2581calls\u2581end\uff5c>|\\Z)",
    r"<\|START_ACTION\|>.*?(?:<\|END_ACTION\|>|\Z)",
    r"<\|tool_call>.*?(?:<tool_call\|>|\Z)",
    r"<\|tool_call_start\|>.*?(?:<\|tool_call_end\|>|\Z)",
]
_REASONING, _CALLS = (re.compile("|".join(p), re.S) for p in (_REASONING, _CALLS))


def _marked(text, pattern, opened=()):
    "(first, last) characters of what a pattern finds, and of a tag that the prompt opened."
    found = [m.span() for m in pattern.finditer(text)]
    for begin, end in opened:
        place = text.find(end)
        if place >= 0 and not 0 <= text.find(begin) < place:
            rest = text[place + len(end) :]
            found.append((0, len(text) - len(rest.lstrip())))
    return found


def _without(spans, left_out):
    "Spans of characters without others."
    for a, b in left_out:
        parts = ([(s, min(e, a)), (max(s, b), e)] for s, e in spans)
        spans = [(s, e) for pair in parts for s, e in pair if s < e]
    return spans


class Trained(NamedTuple):
    "What of the assistant's turns is trained, besides the text of answers."

    reasoning: bool = True  # what it thought
    tool_calls: bool = True  # calls of tools

    def spans(
        self, template: ChatTemplate, tools: list[dict] | None, messages: list[dict], text: str, spans: Spans
    ) -> Spans:
        """Trained characters of a turn, the last of the messages, of its characters `spans` in the rendered text.
        BadRow: it says nothing."""
        turn = messages[-1]
        calls = turn.get("tool_calls")
        if turn.get("content") == "" and not calls and not turn.get("reasoning_content"):
            raise BadRow("an answer is empty", f"message {len(messages) - 1} (assistant)")
        if turn.get("weight") == 0 or not spans:
            return []
        if all(self):
            return spans
        left_out = []
        if calls and not self.tool_calls:
            left_out += _calls_in(template, tools, messages, text, spans[0][0])
        if not self.reasoning and turn.get("reasoning_content"):
            left_out += _reasoning_in(template, tools, messages, text, spans[0][0])
        return self.tagged(text, _without(spans, left_out))

    def tagged(self, text: str, spans: Spans) -> Spans:
        "What is trained of the assistant's characters in the text of a whole row, by the tags in it."
        left_out = []
        for a, b in spans:
            part = text[a:b]
            found = [] if self.tool_calls else _marked(part, _CALLS)
            if not self.reasoning:
                found += _marked(part, _REASONING, _TAGS)
            left_out += [(a + s, a + e) for s, e in found]
        return _without(spans, left_out)


ALL = Trained()


def _calls_in(template, tools, messages, text, start):
    "[(first, last)] characters of what a turn, from `start`, says because of its calls."
    content = messages[-1].get("content") or ""
    turn = {k: v for k, v in messages[-1].items() if k != "tool_calls"}
    try:
        bare = template([*messages[:-1], turn | {"content": content}], tools)[0][start:]
    except BadRow:  # such a turn cannot do without its calls
        return [(start, len(text))]
    end = len(text) - common_prefix(text[start:][::-1], bare[::-1])
    first = start + common_prefix(text[start:], bare)
    more = len(text) - start - len(bare)
    if more > 0 and end - first <= more:  # they are put in between, at `first` or before it
        (tokens,) = template.tokens([text])
        begins = {a for a, _ in tokens.offsets} | {len(text)}
        places = range(first, end - more - 1, -1)
        whole = (i for i in places if i in begins and i + more in begins)
        place = next(whole, first)
        return [(place, place + more)]
    at = text.find(content.strip(), start) if content.strip() else end
    return _without([(first, end)], [(at, at + len(content.strip()))])


def _reasoning_in(template, tools, messages, text, start):
    "[(first, last)] characters of what a turn, from `start`, thinks, with the tags around it."
    thought = messages[-1]["reasoning_content"].strip()
    place = text.find(thought, start)
    if place < 0:
        return []
    end = place + len(thought)
    closing = _closing(template, tools, messages, thought, start)
    end += common_prefix(text[end:], closing)
    return [(start, len(text) - len(text[end:].lstrip()))]


def _closing(template, tools, messages, thought, start):
    "What follows reasoning because of it, before an answer."
    answer = "It is."
    turn = {"role": "assistant", "content": answer}
    thinks = turn | {k: v for k, v in messages[-1].items() if k in THOUGHT}
    try:
        before = len(template(messages[:-1], tools)[0])
        texts = (template([*messages[:-1], t], tools)[0][before:] for t in (thinks, turn))
        with_thought, without = (text.rpartition(answer)[0] for text in texts)
    except BadRow:
        return ""
    opening, found, between = with_thought.partition(thought)
    if not found or without.startswith(opening):  # an empty block is written without reasoning
        return between
    header = min(start - before, common_prefix(opening, without))  # it begins both
    ours, theirs = template.tokens([between, without[header:]])
    same = common_prefix(ours.ids[::-1], theirs.ids[::-1])
    return between[: ours.offsets[-same][0]] if same else between


WORK = 1 << 27  # characters that are rendered for one conversation at most


class Turns(list):
    """Assistant turns. `partial`: later ones were left out. `messages`: the conversation in the
    spelling that was rendered. `omitted`: what of it is in no row, or is not trained."""

    partial = False
    messages: list[dict]
    omitted: dict[str, int]  # what -> the first such message


def turns_of(
    messages: list[dict],
    template: ChatTemplate,
    tools: list[dict] | None = None,
    first: int | None = None,
    trained: Trained | None = None,
) -> Turns:
    """Render the context and the text of each assistant turn, of messages of `normalize` and tools of `tools_of`: (text
    through the turn, trained characters); with `first`, but for turns after so many tokens. `trained`: what of the
    answers; None: all that they say. ValueError if no border is certain; BadRow: too many turns; Misread: the template
    reads calls of tools in another spelling (`in_a_spelling`)."""
    turns = Turns()
    turns.messages, turns.omitted = messages, {}
    answers = [j for j, m in enumerate(messages) if m["role"] == "assistant"]
    seen = 0  # messages that were looked for in a text
    rendered = 0  # characters of work
    looked = reach(first) if first else 0  # characters of the messages up to which later turns may be needed
    for k, j in enumerate(answers):
        if not j:  # an answer to nobody
            turns.omitted["an answer before the first question, which is not trained"] = 0
            continue
        read = messages[: j + 1]
        full, marks = template(read, tools)
        rendered += len(full) + PER_TOKEN * j
        if rendered > WORK:
            raise BadRow("too many turns to be rendered one by one; split the conversation")
        for what, i in _unread(read, seen, full):
            turns.omitted.setdefault(what, i)
        seen = j + 1
        if marks is None:
            spans = [(_border(messages, j, template, tools, full), len(full))]
        elif len(marks) == k + 1:  # one mark a turn
            spans = marks[k:]
        else:  # another answer has the same history, and the marks before it
            other = template([*messages[:j], _PROBE[1]], tools)[0]
            same = common_prefix(other, full)
            spans = [(a, b) for a, b in marks if b > same]
        if marks is not None and template.marks_prompt:
            with contextlib.suppress(BadRow):  # else the marks are all that is known
                start = _border(messages, j, template, tools, full)
                spans = [(max(a, start), b) for a, b in spans if b > start]
        if messages[j].get("tool_calls"):
            check_calls(lambda m: template(m, tools)[0], read, full, spans)
        turns.append((full, trained.spans(template, tools, read, full, spans) if trained else spans))
        if not first or j == answers[-1]:
            continue
        kept = "\n".join(_parts_of(m)[1] for m in read)  # in the history of every later turn: not the reasoning
        if j + 1 > first:  # each message is a token or more
            turns.partial = True
            break
        if len(kept) > looked:
            looked = 2 * len(kept)
            (tokens,) = template.tokens([kept], 2 * first)
            if len(kept) <= len(full) and len(tokens.ids) > 2 * first:  # else the template shows less
                turns.partial = True
                break
    if turns and answers[-1] + 1 < len(messages):
        turns.omitted["messages after the last answer"] = answers[-1] + 1
    return turns


def _unread(messages, seen, text) -> Iterator[tuple[str, int]]:
    """(what, message) that a template leaves out, from message `seen` to the last, an answer. BadRow: a template that
    knows texts alone was given pictures."""
    for i, message in enumerate(messages[seen:], seen):
        content = message.get("content")
        if isinstance(content, list):
            texts = [part["text"].strip() for part in content if part.get("type") == "text"]
            if str(content) in text or any(words not in text for words in texts):
                raise BadRow("the chat template does not read content that is made of parts", f"message {i}")
        elif message["role"] != "tool" and not _holds(text, _parts_of(message)[1]):
            yield "text that the chat template leaves out", i  # results of tools may be quoted
    before = _parts_of(messages[-2])[1].strip()
    if not _holds(text[max(text.rfind(before), 0) :], _parts_of(messages[-1])[0]):
        yield "reasoning that the chat template leaves out", len(messages) - 1


def _parts_of(message) -> tuple[str, str]:
    "What was thought, and what is said; some write both as content."
    content = message.get("content")
    if not isinstance(content, str):
        content = ""
    thought, _, spoken = content.rpartition("</think>")
    return message.get("reasoning_content") or thought.rpartition("<think>")[2], spoken


def _holds(text, words):
    "Whether a text holds these words, with any spaces between them, in capitals or not."
    if words.strip() in text:
        return True
    plain, rest = (" ".join(t.lower().split()) for t in (words, text))
    return plain in rest


def _border(messages, j, template, tools, full):
    "The character of `full` at which the assistant's turn j begins."
    prompt = template(messages[:j], tools, prompt=True)[0]
    if full.startswith(prompt):
        return len(prompt)
    history = template(messages[:j], tools)[0]
    skip = 0
    if len(full) > WHOLE:  # tokenise only around the difference
        skip = max(0, common_prefix(prompt, full) - WHOLE // 2)
    ours, theirs = template.tokens([prompt[skip:], full[skip:]], 0)
    k = common_prefix(ours.ids, theirs.ids)
    start = skip + theirs.offsets[k][0] if k < len(theirs.ids) else len(full)
    if start < len(history) or not full.startswith(history):
        raise _unmarked(template, j)
    return start


def _unmarked(template, j):
    return BadRow(
        "an answer does not continue the rendering of the messages before it, so its tokens "
        "cannot be distinguished. Mark them in the chat template: {% generation %} before what "
        "the assistant says, {% endgeneration %} after its end token",
        detail=f"tokenizer {template.name!r}: message {j} (assistant) does not continue what "
        f"is before it. The template is:\n{template._text(None)[:1500]}",
    )


def check_calls(render: Callable[[list[dict]], str], messages: list[dict], text: str, spans: Spans) -> None:
    """Misread: a text that the template (`render`) makes of messages through a turn that calls tools, in one spelling,
    lacks a call or what is said beside it, in the characters `spans` of the turn, or writes them as nobody would."""
    turn = messages[-1]
    calls = [call.get("function") or call for call in turn.get("tool_calls") or ()]
    spoken = turn.get("content")
    written = "".join(text[a:b] for a, b in spans)
    at = f"message {len(messages) - 1} (assistant)"
    for name, n in Counter(str(call["name"]) for call in calls).items():
        if written.count(name) < n:
            reason = "the chat template leaves out calls of tools, so they cannot be trained"
            raise Misread(reason, at, name)
    if calls and isinstance(spoken, str) and spoken.strip():
        words = spoken.rpartition("</think>")[2].split()
        if " ".join(words) not in " ".join(written.split()):
            reason = "the chat template leaves out what is said beside calls of tools"
            raise Misread(reason, at, spoken)
    for wrong in (_misspelled(call.get("arguments")) for call in calls):
        if wrong and wrong in written:
            reason = "the chat template writes arguments of calls otherwise than as JSON"
            raise Misread(reason, at, wrong)
    if calls and spoken is None and _written_for_null(render, messages, text):
        raise Misread("the chat template writes None for content that is empty", at)


def _misspelled(arguments):
    "How a template writes arguments that are of the other kind; None: it cannot be told."
    as_json = json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        return as_json  # a text in quotation marks
    return str(arguments) if arguments and str(arguments) != as_json else None


def _written_for_null(render, messages, text):
    "Whether a word stands where the content of the last message would."
    if not re.search("None|null", text):
        return False
    content = _PROBE[0]["content"]
    try:
        other = render([*messages[:-1], messages[-1] | {"content": content}])
    except Misread:
        return False
    first = common_prefix(text, other)
    last = len(text) - common_prefix(text[first:][::-1], other[first:][::-1])
    return text[first:last].strip() in ("None", "null")


ROWS = ("conversation", "turn")


def merge_turns(turns: Turns, rows: str = "conversation") -> Turns:
    """(text, trained characters) of rows, one for as many turns of `turns_of` as continue each other: every token is
    computed once, and every answer follows the context that the verifier had. rows="turn": a row per assistant turn,
    only that turn trained. BadRow: there is no turn."""
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r}: choose 'conversation' or 'turn'")
    if not turns:
        raise BadRow("no assistant message that answers another")
    if rows == "turn":
        return turns
    out = Turns()
    out.partial, out.messages, out.omitted = turns.partial, turns.messages, turns.omitted
    for text, spans in turns:
        if out and text.startswith(out[-1][0]):
            out[-1] = (text, out[-1][1] + spans)
        else:
            out.append((text, spans))
    return out
