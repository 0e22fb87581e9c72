"""Validation of conversations and tokenised rows, length limits, and counts by reason.
Every conversation becomes rows, or is counted with the file and line of the first such case."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .messages import BadRow, brief, normalize, tools_of
from .sources import located


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
    return array.astype(np.int32), _ready_mask(row.get("loss_mask"), len(array))


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


def _ready_mask(mask, n):
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


def domain_of(row: dict) -> str | None:
    "The domain, source or category that a conversation names, if any: a mix has columns for it."
    names = (row.get(column) for column in ("domain", "source", "category", "dataset"))
    return next((name for name in names if isinstance(name, str) and name), None)


def used(row: dict, vocab_size: int | None = None) -> dict:
    """What is used of a conversation, in one spelling: "messages" and "tools" (and pictures), or "input_ids" and
    "loss_mask"; and "domain". BadRow: it cannot be used."""
    domain = {"domain": name} if (name := domain_of(row)) else {}
    if row.get("input_ids") is not None:
        return dict(zip(("input_ids", "loss_mask"), ready_row(row, vocab_size))) | domain
    pictures = {k: row[k] for k in ("images", "image") if row.get(k) is not None}
    return {"messages": normalize(row), "tools": tools_of(row), **pictures} | domain


def read_rows(
    data: str | Path | Iterable, vocab_size: int | None = None, limit: int | None = None
) -> Iterator[tuple[str, dict | Exception]]:
    "The conversations of a source of `located`, `limit` at most: (where, as from `used`, or why it cannot be used)."
    source = data if isinstance(data, Located) else located(data)
    for where, row in islice(source, limit):
        try:
            yield where, row if isinstance(row, BadRow) else used(row, vocab_size)
        except Exception as e:  # also RecursionError
            yield where, e


def in_data(data) -> str:
    'Where nothing was found, for a message: " in NAME"; empty for a source that has no name.'
    return f" in {brief(str(data))}" if isinstance(data, (str, Path)) else ""


class Located(list):
    "(where, conversation) pairs that `located` has read."


def size_of(row: dict) -> int:
    "How large a conversation of `used` is: characters, or what takes as much memory."
    if "input_ids" in row:
        return 8 * len(row["input_ids"])
    return sum(100 + _content_size(m["content"]) for m in row["messages"])


def _content_size(content):
    "Characters of a message: of its text, or of all the texts in its parts."
    if isinstance(content, str):
        return len(content)
    size = 0
    for part in content or ():
        texts = [part] if isinstance(part, str) else part.values()
        size += 100 + sum(len(text) for text in texts if isinstance(text, str))
    return size


BATCH = 1 << 20  # characters of the conversations that are tokenised together


def batches(stream: Iterable) -> Iterator[list]:
    """A stream of (where, conversation as from `used`) in batches of a bounded size: 64, or as many as fit in `BATCH`
    characters; at least one."""
    batch, size = [], 0
    for where, row in stream:
        more = size_of(row)
        if batch and (len(batch) == 64 or size + more > BATCH):
            yield batch
            batch, size = [], 0
        batch.append((where, row))
        size += more
    if batch:
        yield batch


def filter_rows(
    made: list[tuple] | Exception, max_length: int, too_long: str = "cut", min_trained: int = 1
) -> tuple[list[tuple], list[str], int]:
    """Apply the limits, in tokens, to the rows of one conversation of `encode_batch`: those that are kept, why others
    are not, tokens that were cut off. too_long="drop": a row that is longer goes as a whole."""
    if isinstance(made, Exception):
        return [], [reason_of(made)], 0
    kept, why, cut = [], [], 0
    for ids, mask, *messages in made:
        trained = int(np.count_nonzero(mask[:max_length]))
        if len(ids) > max_length and (too_long == "drop" or messages):
            why.append(f"longer than {max_length} tokens")
        elif trained < min_trained:
            few = f"fewer than {min_trained} trained tokens" if trained else "no trained token"
            why.append(f"{few} in the first {max_length}")
        else:
            cut += max(len(ids) - max_length, 0)
            kept.append((ids[:max_length], mask[:max_length], *messages))
    return kept, why, cut


def reason_of(error: Exception) -> str:
    "Under which words, on one line, errors of `encode_batch` that are alike are counted."
    if isinstance(error, BadRow):
        return error.reason
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deep"
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "it", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {text[:120]}"


class Made(NamedTuple):
    "What became of one conversation."

    rows: list[tuple] = []  # that stay
    dropped: list[str] = []  # why others do not
    cut: int = 0  # tokens that were cut off
    partial: bool = False  # whether only a beginning was tokenised
    error: Exception | None = None  # why there is no row at all
    control: dict[str, int] = {}  # control token -> first message that spells it
    domain: str | None = None  # that the conversation names
    omitted: dict[str, int] = {}  # what is in no row, or not trained -> first such message


def made_of(row: dict, encoded: list[tuple] | Exception, control, settings) -> Made:
    """Apply the limits of `pipeline.Settings` to the rows of a conversation of `used`, from `encode_batch`, and look
    for control tokens (`ChatTemplate.control`) in its messages."""
    domain = row.get("domain")
    if isinstance(encoded, BadRow):
        return Made(error=encoded, domain=domain)
    if isinstance(encoded, Exception):  # of a template or tokenizer; not all can be pickled
        return Made(error=BadRow(reason_of(encoded)), domain=domain)
    rows, dropped, cut = filter_rows(encoded, settings.max_length, settings.too_long, settings.min_trained)
    partial = getattr(encoded, "partial", False)
    spelled = control.spelled(row["messages"], row.get("tools")) if "messages" in row else {}
    return Made(
        rows,
        dropped,
        0 if partial else cut,
        partial,
        control=spelled,
        domain=domain,
        omitted=getattr(encoded, "omitted", {}) if rows else {},
    )


REASONS = 50  # counted separately
NAMED = 5  # duplicates, by their places


class Counts:
    "What became of conversations: numbers, reasons, and the place of the first case of each."

    def __init__(self):
        self.n, self._domains, self._dropped, self._control, self._omitted = Counter(), {}, {}, {}, {}
        self.duplicates = []  # where the first of them are

    def repeat(self, where: str) -> None:
        "Count a conversation with the same messages as one before it, by its file and line."
        self.n["duplicates"] += 1
        if len(self.duplicates) < NAMED:
            self.duplicates.append(where)

    def refuse(self, where: str, error: Exception) -> None:
        "Count a conversation that cannot be used, by its file and line."
        at = ": ".join(filter(None, (getattr(error, "at", ""), getattr(error, "detail", ""))))
        at = (at.splitlines() or [""])[0][:120]
        self._drop(reason_of(error), "conversations", f"{where}, {at}" if at else where)
        self.n["without rows"] += 1

    def add(self, where: str, made: Made) -> None:
        "Count what became of a conversation, by its file and line."
        self._count_domain(made)
        if made.error is not None:
            self.refuse(where, made.error)
            return
        for reason in made.dropped:
            self._drop(reason, "rows", where)
        self.n["without rows"] += not made.rows
        self.n["tokens cut"] += made.cut
        self.n["read in part"] += made.partial
        for token, i in made.control.items():
            new = {"token": token, "conversations": 0, "first": f"{where}, message {i}"}
            self._control.setdefault(token, new)["conversations"] += 1
        for what, i in made.omitted.items():
            new = {"what": what, "conversations": 0, "first": f"{where}, message {i}"}
            self._omitted.setdefault(what, new)["conversations"] += 1

    def _drop(self, reason, unit, where):
        if reason not in self._dropped and len(self._dropped) >= REASONS:
            reason = "other reasons"
        new = {"reason": reason, "count": 0, "unit": unit, "first": where}
        self._dropped.setdefault(reason, new)["count"] += 1

    @property
    def dropped(self) -> list[dict]:  # reason, count, unit, first; the most frequent first
        "Why conversations and rows were left out."
        return sorted(self._dropped.values(), key=lambda r: -r["count"])

    @property
    def omitted(self) -> list[dict]:  # what, conversations, first; the most frequent first
        "What was left out of conversations that are kept."
        return sorted(self._omitted.values(), key=lambda r: -r["conversations"])

    @property
    def control(self) -> list[dict]:  # token, conversations, first; the most frequent first
        "Control tokens that messages spell."
        return sorted(self._control.values(), key=lambda r: -r["conversations"])

    def _count_domain(self, made):
        name = made.domain or "unnamed"
        if name not in self._domains and len(self._domains) >= REASONS:
            name = "other domains"
        counts = self._domains.setdefault(name, Counter())
        counts["conversations"] += 1
        counts["without rows"] += not made.rows
        for ids, mask, *_ in made.rows:
            counts["rows"] += 1
            counts["tokens"] += len(ids)
            counts["trained"] += int(np.count_nonzero(mask))

    @property
    def domains(self) -> list[dict]:  # the largest first; empty: no conversation names one
        "Domain, conversations, those without rows, rows, tokens, trained tokens."
        if self._domains.keys() <= {"unnamed"}:
            return []
        names = ("conversations", "without rows", "rows", "tokens", "trained")
        lines = [
            {"domain": domain} | {name: counts[name] for name in names} for domain, counts in self._domains.items()
        ]
        return sorted(lines, key=lambda line: -line["tokens"])

    def why(self) -> str:  # on one line
        "Why conversations and rows were left out, for a message."
        reasons = (f"{r['count']} × {r['reason']} (first: {r['first']})" for r in self.dropped)
        return "; ".join(reasons)

    def left_out(self) -> str:  # on one line
        "What was left out of conversations that are kept, for a message."
        return "; ".join(
            f"{r['what']} in {r['conversations']} conversations (first: {r['first']})" for r in self.omitted
        )

    def spelled(self) -> str:  # on one line
        "The control tokens that messages spell, for a message."
        return "text is read as control tokens: " + ", ".join(
            f"{c['token']!r} in {c['conversations']} conversations (first: {c['first']})" for c in self.control
        )
