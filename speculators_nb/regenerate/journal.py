"""The output file of a regeneration run, which is also the record of what is done.
It is resumable after a kill and appended to by any number of ranks, with counts and errors by reason."""

import contextlib
import errno
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

import pandas as pd
from filelock import FileLock

from ..core.files import atomic_write, disk_errors
from ..core.provenance import without_secrets
from ..data.chat_template import ControlTokens
from ..data.messages import REASONS, BadRow, brief, reason_of
from ..data.sources import located, read_lines
from ..jobs.shared_output import append_lines, is_held, share_writer, whole_end
from .language import language_of_row, wanted_languages
from .replay import Replay

# Answers of two verifiers or settings never mix in a file. Opening it cuts off what is torn; each conversation is
# appended whole, under a lock. A rank answers every `world_size`-th conversation that is not in the file; whoever finds
# that none is missing puts the file in the order of the input.

BEGIN = b'{"id": '  # of every line


def complete_conversations(path: str | Path) -> Iterator[tuple[list[dict], int, int]]:
    """Read a run's JSONL, finished or not: lines of a conversation, its first byte, where it ends. One that a kill has
    left incomplete is left out. ValueError names a damaged line."""
    lines, start, end = [], 0, 0
    with open(path, "rb") as file:
        for n, (raw, whole) in enumerate(read_lines(file), 1):
            begin, end = end, end + len(raw)
            torn = whole and not raw.endswith(b"\n")
            if torn and raw[: len(BEGIN)] == BEGIN[: len(raw)]:
                return  # by a kill
            try:
                line = _line(raw)
                if line["part"][0] == 0:
                    lines, start = [], begin
                lines.append(line)
                k, parts = len(lines) - 1, lines[0]["part"][1]
                if not isinstance(parts, int) or line["part"] != [k, parts] or parts <= k:
                    raise ValueError(f"part is {brief(line['part'])}, expected {[k, parts]}")
                if line["primary_id"] != lines[0]["primary_id"]:
                    raise ValueError(f"belongs to another conversation than part {k - 1}")
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                raise ValueError(
                    f"{path}, line {n}: no regenerated row ({type(e).__name__}: "
                    f"{str(e)[:200]}); remove the line, or choose another file"
                ) from e
            if len(lines) == lines[0]["part"][1]:
                yield lines, start, end
                lines = []


def _line(raw):
    "A line of the file."
    line = json.loads(raw)
    if not isinstance(line["metadata"], dict) or not isinstance(line["primary_id"], str):
        raise ValueError("metadata must be an object, and primary_id text")
    return line


def read_regenerated(path: str | Path) -> Iterator[dict]:
    "The lines of complete conversations in a run's JSONL, finished or not. ValueError names a damaged line."
    for lines, _, _ in complete_conversations(path):
        yield from lines


def put_in_order(path: str | Path, order: Collection[str]) -> None:
    """Sort the conversations of a run's JSONL, each once, as the input has them, by identity. The file is replaced as a
    whole, or not at all."""
    places = {}  # identity -> first byte, and where it ends
    for lines, start, end in complete_conversations(path):
        places.setdefault(lines[0]["primary_id"], (start, end))
    wanted = [key for key in places if key not in order]
    wanted += [key for key in order if key in places]
    has_more = sum(end - start for start, end in places.values()) < Path(path).stat().st_size
    if wanted == list(places) and not has_more:
        return
    with atomic_write(path) as temporary, temporary.open("wb") as new, open(path, "rb") as old:
        for start, end in (places[key] for key in wanted):
            old.seek(start)
            new.write(old.read(end - start))


_WORDS = {
    "written": "conversations written",
    "kept": "conversations that were there",
    "duplicates": "duplicates in the input",
    "answers": "answers",
    "cut": "conversations whose last answer was cut",
    "tokens": "tokens answered",
    "finish_reasons": "answers, by finish reason",
    "retokenised": "answers whose tokens were made from text",
    "other_tokens": "of these, by another count than the server's",
    "truncated": "conversations ended early",
    "left_out": "messages of the input left out",
    "skipped": "conversations in other languages",
    "failed": "conversations failed",
    "control_tokens": "conversations that spell a control token",
}


class Report(dict):
    "What became of the conversations; made by one process, and read by others."

    def __init__(self):
        super().__init__(
            written=0,
            kept=0,
            cut=0,
            answers=0,
            tokens=0,
            duplicates=0,
            seconds=0.0,
            finish_reasons=Counter(),
            truncated=Counter(),
            left_out=Counter(),
            skipped=Counter(),
            failed=Counter(),
            control_tokens=Counter(),
        )
        self.first: dict[tuple[str, str], str] = {}  # (count, reason) -> the place of the first case

    def table(self) -> pd.DataFrame:
        "One row per count; of the reasons, the most frequent first."
        rows = [
            (_WORDS.get(k, k), "", v, "")
            for k, v in self.items()
            if isinstance(v, int) and (v or k in ("written", "tokens"))
        ]
        rows += [
            (_WORDS.get(k, k), reason, n, self.first.get((k, reason), ""))
            for k, v in self.items()
            if isinstance(v, Counter)
            for reason, n in v.most_common()
        ]
        table = pd.DataFrame(rows, columns=["what", "why", "number", "first"])
        return table if self.first else table.drop(columns="first")

    def _repr_html_(self):
        return self.table().to_html(index=False)

    def __repr__(self):
        lines = []
        for row in self.table().to_dict("records"):
            first = f"first: {row['first']}" if row.get("first") else ""
            about = "; ".join(filter(None, (row["why"], first)))
            lines.append(f"{row['what']}: {row['number']}" + (f" ({about})" if about else ""))
        return "\n".join(lines)

    @property
    def done(self) -> int:
        "Conversations of the input that are settled, whatever became of them."
        settled = self["written"] + self["kept"] + self["duplicates"]
        return settled + self["skipped"].total() + self["failed"].total()

    def add(self, name: str, reason: str, where: str, n: int = 1) -> None:
        "Count cases; more than `REASONS` reasons are counted as one."
        if reason not in self[name] and len(self[name]) >= REASONS:
            reason = "other reasons"
        self[name][reason] += n
        self.first.setdefault((name, reason), where)

    def count(self, line: dict) -> None:
        "Count a conversation that is written."
        about = line["metadata"]
        finish, usage = about["finish_reasons"], about["usage"]
        self["written"] += 1
        self["cut"] += finish[-1] == "length"
        self["answers"] += len(finish)
        self["tokens"] += usage["answered"]
        self["finish_reasons"].update(finish)
        for name in ("retokenised", "other_tokens"):
            if name in self:
                self[name] += usage.get(name, 0)
        if "truncated" in about:
            self.add("truncated", about["truncated"], line["primary_id"])
        for reason, n in about.get("left_out", {}).items():
            self.add("left_out", reason, line["primary_id"], n)

    def add_report(self, other: "Report") -> None:
        "Add the counts of another share of the same job."
        for name, count in other.items():
            if name == "seconds":
                self[name] = max(self[name], count)
            elif isinstance(count, Counter):
                self[name].update(count)
            else:
                self[name] = self.get(name, 0) + count
        self.first = other.first | self.first


log = logging.getLogger(__name__)


def _reasons(counts):
    "The most frequent reasons, on one line."
    return "; ".join(f"{n} × {why}" for why, n in counts.most_common(10))


def _warn(report, errors):
    "Warn of control tokens, of messages left out, and of conversations that failed."
    if control := report["control_tokens"]:
        first = report.first
        spelled = ", ".join(
            f"{token!r} in {n} (first: {first['control_tokens', token]})" for token, n in control.items()
        )
        log.warning("conversations spell control tokens, which are read as such: %s", spelled)
    if left_out := report["left_out"]:
        reasons = _reasons(left_out)
        log.warning("%d messages of the input were left out: %s", left_out.total(), reasons)
    if failed := report["failed"]:
        reasons = _reasons(failed)
        log.warning("%d conversations failed, see %s: %s", failed.total(), errors, reasons)


class Journal:
    """A context: the output of a run, a JSONL that is continued if it exists, and what runs before it have done.
    Settings go into every line, and must be what is in the file. Other ranks, of `world_size`, may append to it
    meanwhile."""

    def __init__(self, path: str | Path, settings: dict, rank: int = 0, world_size: int = 1):
        self.path, self.settings = Path(path).expanduser(), json.loads(json.dumps(settings))
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        self.rank, self.world_size = rank, world_size
        share = f".{rank}-of-{world_size}" if world_size > 1 else ""
        self.errors = self.path.with_suffix(f"{share}.errors.jsonl")
        self.report, self.done, self._seen = Report(), {}, {}
        self._failed: set[str] = set()
        self._size = 0  # bytes of the file up to which every line has these settings
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.append.lock"))
        self._held = contextlib.ExitStack()

    def _disk(self):
        return disk_errors(self.path, "conversations that are complete are kept")

    def __enter__(self):
        own = self.path.with_name(f".{self.path.name}")
        self._held.enter_context(share_writer(self.path, own, self.rank, self.world_size))
        try:
            with self._disk():
                for lines, _, end in complete_conversations(self.path) if self.path.exists() else ():
                    self._check_settings(lines[0])
                    self.done[lines[0]["primary_id"]] = lines[0]["metadata"].get("content")
                    self._size = end
                former = self._beside(self.path.stem, r"(\.\d+-of-\d+)?\.errors\.jsonl")
                for file in [self.errors] if self.world_size > 1 else former:
                    file.unlink(missing_ok=True)
        except BaseException:
            self._held.close()
            raise
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind, *_):
        self._held.close()
        if kind is None:
            with self._disk(), self._lock:
                self.path.touch()  # also where nothing could be answered
                with open(self.path, "rb") as file:
                    os.fsync(file.fileno())
                if not any(map(is_held, self._beside(f".{self.path.name}", r"\.\d+-of-\d+\.lock"))):
                    self._put_in_order()  # nobody else is at work
                if self.world_size == 1:
                    Path(self._lock.lock_file).unlink(missing_ok=True)
        self.report["seconds"] = time.perf_counter() - self._start
        _warn(self.report, self.errors)

    def _beside(self, name, ending):
        "Files beside the output: the failures of ranks, or the locks of their shares."
        pattern = re.compile(re.escape(name) + ending)
        return [file for file in self.path.parent.iterdir() if pattern.fullmatch(file.name)]

    def _put_in_order(self):
        "Where no rank has left anything undone."
        missing = self._seen.keys() - self.done.keys() - self._failed
        if missing and self.world_size > 1:
            failures = self._beside(self.path.stem, r"\.\d+-of-\d+\.errors\.jsonl")
            for line in (line for file in failures for line in file.read_bytes().splitlines(True)):
                missing -= {json.loads(line)["id"]} if line.endswith(b"\n") else set()
            missing -= {line["primary_id"] for line in read_regenerated(self.path)}
        if not missing:
            put_in_order(self.path, self._seen)

    def write(self, replay: Replay, **metadata) -> None:
        "Keep a conversation. ValueError: another process has written with other settings meanwhile."
        lines = replay.lines(self.settings | metadata)
        try:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except RecursionError as e:  # arguments of a call that the verifier wrote
            self.fail(replay.key, e, replay.where)
            return
        with self._disk(), self._lock:
            self._check_last_line()
            append_lines(self.path, text.encode("utf-8", "surrogatepass"))
            self._size = self.path.stat().st_size
        self.done[replay.key] = replay.content
        self.report.count(lines[0])

    def _check_last_line(self):
        "What others have appended is made as this is: each looks at the line before its own."
        if not self.path.exists() or self.path.stat().st_size == self._size:
            return
        if end := whole_end(self.path):
            with open(self.path, "rb") as file:
                file.seek(whole_end(self.path, end - 1))
                self._check_settings(_line(file.readline()))

    def _check_settings(self, line):
        "ValueError: a line of the file was made otherwise."
        was = line["metadata"]
        changed = [f"{k} was {was.get(k)}, is {now}" for k, now in self.settings.items() if was.get(k) != now]
        if changed:
            raise ValueError(f"{self.path} was made with other settings: {', '.join(changed)}; choose another file")

    def fail(self, key: str, error: Exception, where: str | None = None) -> None:
        "Name a conversation that cannot be done."
        reason = without_secrets(reason_of(error))
        self.report.add("failed", reason, where or key)
        self._failed.add(key)
        text = str(error) if isinstance(error, BadRow) else f"{type(error).__name__}: {error}"
        about = {
            "id": key,
            "error": " ".join(without_secrets(text).split())[:2000],
            "status": getattr(error, "status", None),
            "reason": reason,
        } | ({"where": where} if where else {})
        with self._disk(), open(self.errors, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(about, ensure_ascii=False) + "\n")

    def is_new(self, replay: Replay, mine: bool = True) -> bool:
        """Whether a conversation of the input, which is noted, is still to be done; one of this rank's share is
        counted. ValueError: its id belongs to another one."""
        key = replay.key
        known = self._seen if key in self._seen else self.done
        if known.get(key, replay.content) != replay.content:
            raise ValueError("its id belongs to another conversation already; give ids that differ, or none")
        if key in known and mine:
            self.report["duplicates" if known is self._seen else "kept"] += 1
        self._seen[key] = replay.content
        return key not in known


def _check_json(replay):
    "BadRow for what could not be written after it was answered."
    try:
        json.dumps([replay.original, replay.tools, replay.sampling])
    except (TypeError, ValueError, RecursionError) as e:
        raise BadRow("holds what cannot be written as JSON", detail=str(e)[:100]) from None


def still_to_do(
    conversations: str | Path | Iterable,
    journal: Journal,
    sampling: dict,
    seed: int,
    languages=None,
    limit: int | None = None,
    control: ControlTokens | None = None,
) -> Iterator[Replay]:
    """The conversations of `sources.read_conversations` that are not done yet and that this process is to answer, ready
    for their requests, by the arguments of `regenerate`; `control` tokens of the verifier are looked for. One that
    cannot be read or sent is noted in the open journal and passed over."""
    wanted = wanted_languages(languages)
    for i, (where, row) in enumerate(islice(located(conversations), limit)):
        mine = i % journal.world_size == journal.rank
        try:
            if isinstance(row, BadRow):
                raise row
            replay = Replay(row, sampling, seed, where)
            _check_json(replay)
            language, good = language_of_row(row, replay.original, wanted) if wanted else (None, True)
            new = good and journal.is_new(replay, mine)
        except Exception as e:
            if mine:
                name = row.get("id") if isinstance(row, dict) else None
                journal.fail(where if name is None else str(name), e, where)
            continue
        if mine and not good:
            journal.report["skipped"][language] += 1
        if mine and new:
            for token, n in (control.spelled(replay.original, replay.tools) if control else {}).items():
                journal.report.add("control_tokens", token, f"{where}, message {n}")
            yield replay
