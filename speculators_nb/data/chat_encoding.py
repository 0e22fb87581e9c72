"""Token ids and loss masks of conversations.
The chat template marks the assistant's tokens, and only those are trained."""

import html
import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, Sequence, Value

from ..core.files import atomic_folder
from .chat_template import ChatTemplate, Spans, Turns, common_prefix, merge_turns, reach, turns_of
from .messages import THOUGHT, BadRow, Conversation, brief, check_text, domain_of, normalize, tools_of


def read_conversation(row: dict | list | BadRow | Conversation, vocab_size: int | None = None) -> Conversation:
    """A conversation as it is written, one of `sources.located`, in one form; tokens are below the verifier's
    `vocab_size`, if it is known. BadRow: it cannot be used."""
    if isinstance(row, Conversation):
        return row
    if isinstance(row, BadRow):
        raise row
    columns = row if isinstance(row, dict) else {"messages": row}
    domain = domain_of(columns)
    if columns.get("input_ids") is not None:
        ids, mask = ready_row(columns, vocab_size)
        whole = columns.get("primary_id")  # as `regenerate` and upstream's regeneration write it
        primary_id = whole if whole and isinstance(whole, str) else None
        return Conversation(input_ids=ids, loss_mask=mask, domain=domain, primary_id=primary_id)
    images = columns.get("images") or columns.get("image")
    return Conversation(normalize(columns), tools_of(columns), images, domain=domain)


def ready_row(row: dict, vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A row that is tokenised already ("input_ids", "loss_mask"), checked: input_ids int32 [n], loss_mask bool [n].
    BadRow says what is wrong with it."""
    ids = row["input_ids"]
    array = np.asarray(ids) if _whole_numbers(ids) else np.zeros((0, 0))
    if array.ndim != 1:
        raise BadRow("input_ids must be one list of token ids, whole numbers from 0 on", detail=brief(ids))
    low = int(array.min(initial=0))
    high = int(array.max(initial=0))
    if not 0 <= low <= high < 2**31:
        raise BadRow(
            "input_ids must be whole numbers from 0 on, and below 2**31",
            detail=f"they go from {brief(int(array.min()))} to {brief(high)}",
        )
    check_ids(array, vocab_size)
    return array.astype(np.int32), _checked_mask(row.get("loss_mask"), len(array))


def check_ids(ids: np.ndarray, vocab_size: int | None) -> None:
    "BadRow if one of the ids [n] is beyond the verifier's vocabulary; None: it is not known."
    if vocab_size and len(ids) and (high := int(ids.max())) >= vocab_size:
        raise BadRow(
            f"a token id beyond the verifier's vocabulary of {vocab_size}; tokenise it for this verifier",
            detail=f"input_ids has {high}",
        )


def _whole_numbers(ids):
    "Whether ids are of a kind that can be token ids; True and 2.0 are not."
    if isinstance(ids, (list, tuple)):
        kinds = set(map(type, ids)) - {int}
        return all(issubclass(k, (int, np.integer)) and k is not bool for k in kinds)
    return hasattr(ids, "dtype") and np.asarray(ids).dtype.kind in "iu"


def _checked_mask(mask, n):
    "A loss mask of n tokens, as bool [n]."
    try:
        array = np.asarray([] if mask is None else mask)
    except ValueError:  # lists of different lengths
        array = np.zeros((n, 0))
    if array.ndim == 1 and len(array) != n:
        raise BadRow(
            "loss_mask has another length than input_ids", detail=f"input_ids has {n} tokens, loss_mask {len(array)}"
        )
    zeros_and_ones = n == 0 or (array.dtype.kind in "biuf" and np.isin(array, (0, 1)).all())
    if array.ndim != 1 or not zeros_and_ones:
        raise BadRow("loss_mask must be one list of 0 and 1", detail=brief(mask))
    return array.astype(bool)


def mask_of(
    offsets: np.ndarray,  # [n, 2] first character of each token, and the one after its last
    spans: Spans,  # trained characters
    control: np.ndarray | None = None,  # [n] bool: control tokens; None: there are none
    text: str = "",  # that the offsets refer to; a control token may hold spaces around it
) -> np.ndarray:  # [n] bool
    "A token is trained if it holds a trained character; a control token if all of it is."
    start = offsets[:, 0]
    end = np.maximum(offsets[:, 1], start + 1)
    mask = np.zeros(len(offsets), bool)
    inside = np.zeros(len(offsets), bool)
    for first, last in spans:
        mask |= (end > first) & (start < last)
        inside |= (start >= first) & (end <= last)
    if control is None:
        return mask
    for i in np.flatnonzero(mask & control & ~inside):
        token = text[start[i] : end[i]]
        first = start[i] + len(token) - len(token.lstrip())
        last = end[i] - len(token) + len(token.rstrip())
        mask[i] = any(a <= first and last <= b for a, b in spans)
    return mask


def token_mask(template: ChatTemplate, encoding: Any, spans: Spans, text: str) -> np.ndarray:
    "`mask_of` [n] bool for an Encoding of `ChatTemplate.tokens` of a text, by its trained characters."
    control = np.isin(encoding.ids, template.control.ids)
    return mask_of(np.array(encoding.offsets).reshape(-1, 2), spans, control, text)


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


def _ready_mask(ids, mask, trained, template):
    "The mask of a row that is tokenised already, without what is not to be trained."
    if all(trained):
        return mask
    texts = [template.tokenizer.decode([i]) for i in ids.tolist()]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    offsets = np.stack([ends - [len(text) for text in texts], ends], axis=1)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    runs = [(int(offsets[a, 0]), int(offsets[b - 1, 1])) for a, b in edges.reshape(-1, 2)]
    text = "".join(texts)
    control = np.isin(ids, template.control.ids)
    return mask & mask_of(offsets, trained.tagged(text, runs), control, text)


class Rows(list):
    """The rows of one conversation. `partial`: only the beginning of one was tokenised.
    `omitted`: what of the conversation is in no row, or is not trained."""

    partial = False
    omitted: dict[str, int] = {}  # what -> the first such message


def encode_batch(
    conversations: list,  # conversations in any format, or rows with input_ids and loss_mask
    template: ChatTemplate,  # renders and tokenises
    rows: str = "conversation",  # "turn": a row per assistant turn, only that turn trained
    first: int | None = None,  # tokens of a row that are needed; None: all
    vocab_size: int | None = None,  # the verifier's; None: unknown
    trained: Trained = ALL,  # what of the answers is trained
) -> list[Rows | Exception]:  # (input_ids int32 [n], loss_mask bool [n]) per row, or the error
    """Token ids and loss masks, tokenised together. The error of a bad conversation is in its
    place."""
    out: list[Any] = [_render(row, template, rows, first, vocab_size, trained) for row in conversations]
    texts = [text for made in out if isinstance(made, Turns) for text, _ in made]
    encodings = iter(_tokens(template, texts, first))
    for i, turns in enumerate(out):
        if not isinstance(turns, Turns):  # tokenised already, or an error
            continue
        out[i] = made = Rows()
        made.partial, made.omitted = turns.partial, turns.omitted
        for (text, spans), encoding in zip(turns, [*islice(encodings, len(turns))]):
            if isinstance(encoding, Exception):
                out[i] = encoding
                break
            most = first if first and len(text) > reach(first) else None
            made.partial |= most is not None
            ids, mask = np.array(encoding.ids, np.int32)[:most], token_mask(template, encoding, spans, text)[:most]
            try:
                check_ids(ids, vocab_size)
            except BadRow as e:
                out[i] = e
                break
            made.append((ids, mask))
    return out


def _render(row, template, rows, first, vocab_size, trained):
    "The rows of a conversation as text, `Turns`; of one that is tokenised already, as `Rows`; or the error."
    try:
        conversation = read_conversation(row, vocab_size)
        if conversation.input_ids is not None:
            ids, mask = conversation.input_ids, conversation.loss_mask
            return Rows([(ids, _ready_mask(ids, mask, trained, template))])
        if conversation.pictured:
            reason = "holds more than text: prepare it with the processor of a vision-language verifier"
            raise BadRow(reason, conversation.pictured[0])
        spans = partial(trained.spans, template, conversation.tools)
        turns = merge_turns(turns_of(conversation.messages, template, conversation.tools, first, spans), rows)
        if not turns:
            raise BadRow("no assistant message that answers another")
        for text, _ in turns:
            check_text(text)
        return turns
    except Exception as e:  # a template may raise anything
        return e


def _tokens(template, texts, first):
    "An Encoding for each text, or the error."
    try:
        return template.tokens(texts, first)
    except Exception as e:  # a tokenizer may raise anything; for which text did it?
        if len(texts) == 1:
            return [e]
    return [_tokens(template, [text], first)[0] for text in texts]


def encode(
    messages: list[dict],  # as from `normalize`
    tokenizer,  # a fast HF tokenizer with a chat template
    tools: list[dict] | None = None,  # as from `tools_of`
    rows: str = "conversation",  # "turn": a row per assistant turn, only that turn trained
    trained: Trained = ALL,  # what of the answers is trained
    **template_kwargs,  # for the template
) -> list[tuple[list[int], list[int]]]:  # (input_ids, loss_mask) rows; more if history changes
    """Token ids and loss mask (1: the assistant's) by the template's marks, or by rendering
    prefixes. ValueError if no border is certain."""
    template = ChatTemplate(tokenizer, **template_kwargs)
    (made,) = encode_batch([{"messages": messages, "tools": tools}], template, rows, trained=trained)
    if isinstance(made, Exception):
        raise made
    return [(ids.tolist(), mask.astype(int).tolist()) for ids, mask in made]


def add_turn(rows: list[tuple[list[int], list[int]]], ids: list[int], start: int) -> None:
    """Continue, in place, the last of the rows (input_ids, loss_mask) if `ids`, everything through an assistant turn
    that begins at `start`, continue it, else begin a new one."""
    if not rows or ids[: len(rows[-1][0])] != rows[-1][0]:
        rows.append(([], []))
    _, mask = rows[-1]
    context = [0] * (start - len(mask))
    answer = [1] * (len(ids) - start)
    rows[-1] = (ids, mask + context + answer)


class show_mask:
    "The tokens of a row, input_ids and loss_mask [n], the trained ones coloured; displays itself in a notebook."

    def __init__(self, input_ids, loss_mask, tokenizer):
        self.tokens = [tokenizer.decode([int(i)]) for i in input_ids]
        self.mask = [bool(m) for m in loss_mask]

    def _repr_html_(self):
        body = "".join(map(_token_html, self.tokens, self.mask))
        return (
            f'<div style="font-family:monospace;line-height:1.7">{body}<br>trained: '
            f"{sum(self.mask)} of {len(self.mask)} tokens</div>"
        )

    def __repr__(self):
        return "".join(f"[{t}]" if m else t for t, m in zip(self.tokens, self.mask))


def _token_html(token, trained):
    colour = "#f6c667" if trained else "#e4e4e4"
    style = f"background:{colour};color:#111;border-left:1px solid #fff;padding:1px 0"
    text = html.escape(token).replace("\n", "⏎").replace(" ", "&nbsp;")
    return f'<span style="{style}">{text}</span><wbr>' + "<br>" * token.count("\n")


FEATURES = Features(
    {"input_ids": Sequence(Value("int32")), "loss_mask": Sequence(Value("bool")), "seq_len": Value("int32")}
)


def to_dataset(rows: list[tuple], description: str = "") -> Dataset:
    """An Arrow table (input_ids, loss_mask, seq_len) of rows (input_ids [n], loss_mask [n]); the description is kept as
    `info.description`."""
    table = pa.table(arrow_columns(rows), schema=FEATURES.arrow_schema)
    return Dataset(table, info=DatasetInfo(features=FEATURES, description=description))


def arrow_columns(rows: list[tuple]) -> list[pa.Array]:
    """Rows (input_ids [n], loss_mask [n]), fewer than 2**31 tokens in all, as columns input_ids, loss_mask, seq_len of
    `FEATURES`."""
    lengths = np.array([len(ids) for ids, _ in rows], np.int32)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    columns = []
    for k, dtype in ((0, np.int32), (1, bool)):
        flat = np.concatenate([row[k] for row in rows]) if rows else np.zeros(0)
        values = pa.array(flat.astype(dtype, copy=False))
        columns.append(pa.ListArray.from_arrays(offsets, values))
    return [*columns, pa.array(lengths)]


LARGEST = 1 << 24  # tokens, of any vocabulary


def count_trained(tables: Iterable[pa.Table]) -> dict[int, int]:
    """Token id -> number of trained occurrences in tables with input_ids and loss_mask, in ascending ids; absent: none.
    ValueError: an id is no token's."""
    counts = np.zeros(0, np.int64)
    for table in tables:
        lists = (table["loss_mask"], table["input_ids"])
        mask, ids = (pc.call_function("list_flatten", [x]).to_numpy() for x in lists)
        ids = ids[mask.astype(bool)]
        if len(ids) and not 0 <= ids.min() <= ids.max() < LARGEST:
            raise ValueError(
                f"input_ids go from {ids.min()} to {ids.max()}, expected token ids from 0 on. Prepare the data again."
            )
        new = np.bincount(ids, minlength=len(counts))
        new[: len(counts)] += counts
        counts = new
    return {int(i): int(counts[i]) for i in counts.nonzero()[0]}


def token_frequencies(dataset: Dataset) -> dict[int, int]:
    "Count the trained tokens of a table with input_ids and loss_mask, as `count_trained`."
    tables: Any = dataset.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    return count_trained(tables.iter(1000))


def save_prepared(dataset: Dataset, folder) -> None:
    """Write an Arrow table, as from `to_dataset`, and `token_freq.json`; the folder, replaced as a whole if it is
    there, appears complete or not at all."""
    counts = json.dumps(token_frequencies(dataset))
    with atomic_folder(folder) as tmp:
        dataset.save_to_disk(tmp)
        (tmp / "token_freq.json").write_text(counts, encoding="utf-8")
