"""Token ids and loss masks of conversations.
The chat template marks the assistant's tokens, and only those are trained."""

import html
import json
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, Sequence, Value

from ..core.files import atomic_folder
from .chat_template import ALL, ChatTemplate, Spans, Trained, Turns, merge_turns, reach, turns_of
from .messages import (
    BadRow,
    Conversation,
    brief,
    check_text,
    domain_of,
    holds_pictures,
    in_a_spelling,
    normalize,
    tools_of,
)


def read_conversation(row: dict | list | BadRow | Conversation, vocab_size: int | None = None) -> Conversation:
    """A conversation as it is written, one of `sources.located`, in one form; tokens are below the verifier's
    `vocab_size`, if it is known. BadRow: it cannot be used."""
    if isinstance(row, Conversation):
        return row
    if isinstance(row, BadRow):
        raise row
    columns = row if isinstance(row, dict) else {"messages": row}
    domain = domain_of(columns)
    images = columns.get("images") or columns.get("image")
    if columns.get("input_ids") is not None:
        if images or holds_pictures(columns.get("messages")):
            raise BadRow(
                "is tokenised, and has pictures, which would be lost; leave out input_ids and loss_mask, so that its "
                "messages are tokenised with them"
            )
        ids, mask = ready_row(columns, vocab_size)
        whole = columns.get("primary_id")  # as `regenerate` and upstream's regeneration write it
        primary_id = whole if whole and isinstance(whole, str) else None
        return Conversation(input_ids=ids, loss_mask=mask, domain=domain, primary_id=primary_id)
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
    out: list[Any] = []
    for row in conversations:
        try:
            conversation = read_conversation(row, vocab_size)
            if conversation.input_ids is not None:
                ids, mask = conversation.input_ids, conversation.loss_mask
                out.append(Rows([(ids, _ready_mask(ids, mask, trained, template))]))
                continue
            if conversation.pictured:
                reason = "holds more than text: prepare it with the processor of a vision-language verifier"
                raise BadRow(reason, conversation.pictured[0])
            messages, tools = conversation.messages, conversation.tools
            turns = in_a_spelling(messages, lambda m: turns_of(m, template, tools, first, trained))
            turns = merge_turns(turns, rows)
            for text, _ in turns:
                check_text(text)
            out.append(turns)
        except Exception as e:  # a template may raise anything
            out.append(e)
    texts = [text for made in out if isinstance(made, Turns) for text, _ in made]
    try:
        encodings = iter(template.tokens(texts, first))
    except Exception as e:  # a tokenizer may raise anything; for which conversation did it?
        if len(conversations) == 1:
            return [e]
        return [encode_batch([row], template, rows, first, vocab_size, trained)[0] for row in conversations]
    for i, turns in enumerate(out):
        if not isinstance(turns, Turns):  # tokenised already, or an error
            continue
        out[i] = made = Rows()
        made.partial, made.omitted = turns.partial, turns.omitted
        for (text, spans), encoding in zip(turns, [*islice(encodings, len(turns))]):
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


def add_trained(counts: np.ndarray, table: pa.Table) -> np.ndarray:
    """Trained occurrences of token ids 0, 1, … [n], with those in a table with input_ids and loss_mask added; longer if
    it has larger ids. ValueError: an id is no token's."""
    mask, ids = (pc.call_function("list_flatten", [table[x]]).to_numpy() for x in ("loss_mask", "input_ids"))
    ids = ids[mask.astype(bool)]
    if len(ids) and not 0 <= ids.min() <= ids.max() < LARGEST:
        raise ValueError(
            f"input_ids go from {ids.min()} to {ids.max()}, expected token ids from 0 on. Prepare the data again."
        )
    more = np.bincount(ids, minlength=len(counts))
    more[: len(counts)] += counts
    return more


def token_frequencies(dataset: Dataset) -> dict[int, int]:
    "Token id -> trained occurrences in a table, as of `add_trained`, in ascending ids; absent: none."
    counts = np.zeros(0, np.int64)
    tables: Any = dataset.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    for table in tables.iter(1000):
        counts = add_trained(counts, table)
    return {int(i): int(counts[i]) for i in counts.nonzero()[0]}


def save_prepared(dataset: Dataset, folder) -> None:
    """Write an Arrow table, as from `to_dataset`, and `token_freq.json`; the folder, replaced as a whole if it is
    there, appears complete or not at all."""
    counts = json.dumps(token_frequencies(dataset))
    with atomic_folder(folder) as tmp:
        dataset.save_to_disk(tmp)
        (tmp / "token_freq.json").write_text(counts, encoding="utf-8")
