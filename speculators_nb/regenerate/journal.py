"""The output file of a regeneration run, which is also the record of what is done.
It is resumable after a kill and shared by any number of processes, with counts and errors by reason."""

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pandas as pd

from ..core.files import atomic_write, disk_errors
from ..core.provenance import without_secrets
from ..data.chat_template import ControlTokens
from ..data.sources import read_lines
from ..data.messages import BadRow, brief
from ..data.row_filter import REASONS, reason_of
from ..data.sources import located
from ..jobs.shared_job import SharedJob
from .language import language_of_row, wanted_languages
from .replay import Replay

# Answers of two verifiers or settings never mix in a file. Opening it cuts off what is torn; each conversation is one
# write. Of several processes the first writes the output, each further one a part in `NAME.work`; the last puts them
# together in the order of the input, and so does the next run where all were killed.

BEGIN = b'{"id": '  # of every line


def complete_conversations(
    path: str | Path,  # the JSONL of a run, finished or not
) -> Iterator[tuple[list[dict], int]]:  # lines of a conversation, and where they end in bytes
    "Read a run's output up to the first conversation that is not complete. ValueError names a damaged line."
    lines, end = [], 0
    with open(path, "rb") as file:
        for n, (raw, whole) in enumerate(read_lines(file), 1):
            end += len(raw)
            torn = whole and not raw.endswith(b"\n")
            if torn and raw[: len(BEGIN)] == BEGIN[: len(raw)]:
                return  # by a kill
            try:
                lines.append(_line(raw, len(lines), lines[0] if lines else None))
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                raise ValueError(
                    f"{path}, line {n}: no regenerated row ({type(e).__name__}: "
                    f"{str(e)[:200]}); remove the line, or choose another file"
                ) from e
            if len(lines) == lines[0]["part"][1]:
                yield lines, end
                lines = []


def _line(raw, k, before):
    "A line of the file: the k-th of its conversation."
    line = json.loads(raw)
    if not isinstance(line["metadata"], dict) or not isinstance(line["primary_id"], str):
        raise ValueError("metadata must be an object, and primary_id text")
    part = [k, before["part"][1] if before else line["part"][1]]
    if not isinstance(part[1], int) or line["part"] != part or part[1] <= k:
        raise ValueError(f"part is {brief(line['part'])}, expected {part}")
    if before and line["primary_id"] != before["primary_id"]:
        raise ValueError(f"belongs to another conversation than part {k - 1}")
    return line


def read_regenerated(
    path: str | Path,  # the JSONL of a run, finished or not
) -> Iterator[dict]:  # the lines of complete conversations
    "Read a run's output up to the first conversation that is not complete. ValueError names a damaged line."
    for lines, _ in complete_conversations(path):
        yield from lines


def put_in_order(
    path: str | Path,  # JSONL; need not be there
    order: Collection[str],  # identities of the input, in its order
    parts: Iterable[str | Path] = (),  # files of further processes, added to it
) -> None:
    "Merge files into one, each conversation once. It is replaced as a whole, or not at all."
    places = {}  # identity -> file, first byte, bytes
    files = [Path(file) for file in (path, *parts) if Path(file).is_file()]
    for file in files:
        start = 0
        for lines, end in complete_conversations(file):
            places.setdefault(lines[0]["primary_id"], (file, start, end - start))
            start = end
    wanted = [key for key in places if key not in order]
    wanted += [key for key in order if key in places]
    if wanted == list(places) and files[1:] == []:
        return
    with atomic_write(path) as temporary, temporary.open("wb") as new:
        opened = {file: file.open("rb") for file in files}
        for file, start, size in (places[key] for key in wanted):
            opened[file].seek(start)
            new.write(opened[file].read(size))
        for file in opened.values():
            file.close()


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

    first: dict[tuple[str, str], str]  # (count, reason) -> the place of the first case

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
        self.first = {}  # (count, reason) -> the place of the first case

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

    def forget_work(self) -> None:
        "Drop what is counted of answers and of failures, before all are counted again."
        fresh = type(self)()
        forgotten = ["written", "cut", "answers", "tokens", "finish_reasons"]
        forgotten += ["truncated", "left_out", "failed"]
        for name in forgotten:
            self[name] = fresh[name]
        self |= {name: 0 for name in ("retokenised", "other_tokens") if name in self}
        self.first = {k: where for k, where in self.first.items() if k[0] not in forgotten}

    def as_json(self) -> dict:
        "For `read`, in another process."
        return dict(self) | {"first": [[*key, where] for key, where in self.first.items()]}

    def read(
        self,
        found: dict,  # as from `as_json`
    ) -> None:
        "Become the report of another process."
        first = found.pop("first")
        self.first = {(name, reason): where for name, reason, where in first}
        self |= {k: Counter(v) if isinstance(v, dict) else v for k, v in found.items()}


log = logging.getLogger(__name__)


def _done_in(path, settings, until=None):
    "What is complete in a file up to a byte: identity -> content hash; and where that ends."
    done, complete = {}, 0
    for lines, end in complete_conversations(path) if path.exists() else ():
        if until is not None and end > until:
            break
        old = lines[0]["metadata"]
        names = [name for name, value in settings.items() if old.get(name) != value]
        if names:
            changed = [f"{k} was {old.get(k)}, is {settings[k]}" for k in names]
            raise ValueError(f"{path} was made with other settings: {', '.join(changed)}; choose another file")
        done[lines[0]["primary_id"]] = old.get("content")
        complete = end
    return done, complete


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


class _Parts(SharedJob):
    "The work on one output file, each worker but the first with a part of its own."

    def __init__(self, path: Path, settings: dict, about: dict | None):
        super().__init__(path.with_name(f"{path.name}.work"), path, "output", about)
        self.path, self.settings = path, settings
        self.errors = path.with_suffix(".errors.jsonl")

    def files(self, suffix) -> list[Path]:
        "The parts that there are, `.jsonl` of answers or `.errors` of failures."
        return sorted(self.folder.glob(f"*{suffix}"))

    def at_start(self):
        "Bytes of the output that earlier runs have left, its torn end cut off."
        self.errors.unlink(missing_ok=True)
        end = _done_in(self.path, self.settings)[1]
        if self.path.exists():
            os.truncate(self.path, end)
        return end

    def recover(self):
        if parts := self.files(".jsonl"):
            put_in_order(self.path, (), parts)
        self.gather_errors()

    def gather_errors(self, written=()):
        "One file of failures: each once, without those that another worker has answered."
        parts = [f for f in (self.errors, *self.files(".errors")) if f.is_file()]
        if parts in ([], [self.errors]):
            return
        lines = [line for file in parts for line in file.read_bytes().splitlines(True)]
        found = {}
        for row in (json.loads(line) for line in lines if line.endswith(b"\n")):
            if row["id"] not in written:
                found.setdefault(row.get("where", row["id"]), row)
        with atomic_write(self.errors) as temporary, temporary.open("wb") as file:
            for row in found.values():
                file.write(_error_line(row))


def _error_line(about):
    return (json.dumps(about, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


UNIT = 8  # conversations that are claimed together


class Journal:
    "A context: the output of a run, and what runs before it have done."

    def __init__(
        self,
        path: str | Path,  # JSONL; continued if it exists
        settings: dict,  # goes into every line, and must be what is in the file
        share: dict | None = None,  # what processes agree on that share the work; None: alone
        then: Callable[[Report], Any] | None = None,  # gets the report, once, when all is done
    ):
        self.path, self.settings = Path(path), json.loads(json.dumps(settings))
        self.job = _Parts(self.path, self.settings, share and self.settings | share)
        self.alone, self.then = share is None, then
        self.report, self.done, self._seen = Report(), {}, {}
        self._mine: set[int] = set()  # units that this process has claimed
        self.over = self.alone  # whether all is settled, by whomever
        self._units: dict[str, int] = {}  # identity -> its unit, of those in work
        self._open: dict[int, set] = {}  # unit -> identities in work
        self._sizes: dict[int, int] = {}  # unit -> conversations that are to be answered
        self._again: set | None = None  # after the first round: identities that are done

    def _disk(self):
        return disk_errors(self.path, "conversations that are complete are kept")

    def __enter__(self):
        with self._disk():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.job.__enter__()
            try:
                self.done, _ = _done_in(self.path, self.settings, self.job.start)
                mine = self.job.folder / f"{self.job.me.name}.jsonl"
                first = self.job.is_primary
                self.errors = self.job.errors if first else mine.with_suffix(".errors")
                self._file = open(self.path if first else mine, "ab")
            except BaseException:
                self.job.__exit__()
                raise
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind, *_):
        try:
            self._close(kind)
            if kind is None and self.over:
                with self._disk():
                    self.report.read(self.job.finish(self._end))
        finally:
            self.job.__exit__()
        self.report["seconds"] = time.perf_counter() - self._start
        _warn(self.report, self.job.errors)

    def _close(self, kind):
        try:
            with self._disk():
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError:  # what a full disk did not take is cut off by the next run
            if kind is None:
                raise
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    def _end(self):
        "The report of the whole job as JSON; the output is then one file in order."
        parts = self.job.files(".jsonl")
        put_in_order(self.path, self._seen, parts)
        if parts or not self.job.is_primary:
            self._recount()
        if self.then:
            self.report["seconds"] = time.perf_counter() - self._start
            self.then(self.report)
        return self.report.as_json()

    def _recount(self):
        "Counts of answers and failures by whatever worker."
        self.report.forget_work()
        written = set()
        for lines, _ in complete_conversations(self.path):
            key = lines[0]["primary_id"]
            if key in self._seen and key not in self.done:
                self.report.count(lines[0])
                written.add(key)
        self.job.gather_errors(written)
        if self.job.errors.is_file():
            for row in map(json.loads, self.job.errors.read_bytes().splitlines()):
                self.report.add("failed", row["reason"], row.get("where", row["id"]))

    def progress(self) -> int:
        "Conversations that are settled, by whatever worker."
        others = sum(n for unit, n in self.job.settled.items() if unit not in self._mine)
        return self.report.done + others

    @property
    def in_first_round(self) -> bool:
        "Whether the input is read for the first time, and its conversations are counted."
        return self._again is None

    def claim(self, unit: int, replays: list[Replay]) -> bool:
        "Whether this process is to answer them."
        self._sizes[unit] = len(replays)
        if not self.job.claim(unit):
            return False
        self._mine.add(unit)
        self._open[unit] = {replay.key for replay in replays}
        self._units |= dict.fromkeys(self._open[unit], unit)
        return True

    def next_round(self, meanwhile: Callable[[], Any] = lambda: None) -> bool:
        "After a round: whether the work of others is to be done, since they are gone."
        for unit, keys in self._open.items():
            if keys:  # given out, and neither answered nor failed
                self.job.settle(unit, self._sizes[unit])
        self._open, self._units = {}, {}
        if self.alone or not self.job.wait(list(self._sizes), meanwhile):
            self.over = True
            return False
        files = [self.path, *self.job.files(".jsonl")]
        self._again = {row["primary_id"] for f in files for row in read_regenerated(f)}
        return True

    def write(self, replay: Replay, **metadata) -> None:
        "Keep a conversation."
        lines = replay.lines(self.settings | metadata)
        with self._disk():
            self._file.write(
                "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "surrogatepass")
            )
            self._file.flush()
        self.report.count(lines[0])
        self._settle(replay.key)

    def fail(self, key: str, error: Exception, where: str | None = None) -> None:
        "Name a conversation that cannot be done."
        reason = without_secrets(reason_of(error))
        self.report.add("failed", reason, where or key)
        text = str(error) if isinstance(error, BadRow) else f"{type(error).__name__}: {error}"
        about = {
            "id": key,
            "error": " ".join(without_secrets(text).split())[:2000],
            "status": getattr(error, "status", None),
            "reason": reason,
        } | ({"where": where} if where else {})
        with self._disk(), open(self.errors, "ab") as file:
            file.write(_error_line(about))
        self._settle(key)

    def _settle(self, key):
        "A conversation is over. Where it was the last one of its unit, the unit is settled."
        unit = self._units.pop(key, None)
        if unit is not None:
            self._open[unit].discard(key)
            if not self._open[unit]:
                self.job.settle(unit, self._sizes[unit])

    def is_new(
        self,
        replay: Replay,  # a conversation of the input
    ) -> bool:  # whether it is still to be done
        "Note a conversation of the input. ValueError: its id belongs to another one."
        if self._again is not None:  # it was noted in the first round
            new = replay.key not in self._again
            self._again.add(replay.key)
            return new
        for known, count in ((self.done, "kept"), (self._seen, "duplicates")):
            if replay.key in known:
                if known[replay.key] != replay.content:
                    raise ValueError("its id belongs to another conversation already; give ids that differ, or none")
                if replay.key not in self._seen:
                    self._seen[replay.key] = replay.content
                else:
                    count = "duplicates"
                self.report[count] += 1
                return False
        self._seen[replay.key] = replay.content
        return True


class _Reader:
    "Makes a replay of each conversation that is to be answered, and counts the others."

    def __init__(self, journal, sampling, seed, languages=None, control=None):
        self.journal, self.sampling, self.seed = journal, sampling, seed
        self.wanted, self.control = wanted_languages(languages), control

    def __call__(self, where, row):
        "None: it is done, or left out."
        journal = self.journal
        try:
            if isinstance(row, BadRow):
                raise row
            replay = Replay(row, self.sampling, self.seed, where)
            _check_json(replay)
            language, good = language_of_row(row, replay.original, self.wanted) if self.wanted else (None, True)
            new = good and journal.is_new(replay)
        except Exception as e:
            if journal.in_first_round:
                name = row.get("id") if isinstance(row, dict) else None
                journal.fail(where if name is None else str(name), e, where)
            return None
        if not good and journal.in_first_round:
            journal.report["skipped"][language] += 1
        if new and journal.in_first_round:
            self._count_control(replay, where)
        return replay if new else None

    def _count_control(self, replay, where):
        spelled = self.control.spelled(replay.original, replay.tools) if self.control else {}
        for token, i in spelled.items():
            self.journal.report.add("control_tokens", token, f"{where}, message {i}")


def _check_json(replay):
    "BadRow for what could not be written after it was answered."
    try:
        json.dumps([replay.original, replay.tools, replay.sampling])
    except (TypeError, ValueError, RecursionError) as e:
        raise BadRow("holds what cannot be written as JSON", detail=str(e)[:100]) from None


def still_to_do(
    conversations: str | Path | Iterable,  # as `sources.read_conversations` takes them
    journal: Journal,  # is open; counts what is left out
    sampling: dict,  # as from `replay.check_sampling`
    seed: int,  # of everything random
    languages=None,  # as in `language.wanted_languages`; None: all
    limit: int | None = None,  # stop after so many conversations of the input
    control: ControlTokens | None = None,  # the verifier's, to be looked for; None: not known
) -> Iterator[Replay]:  # ready for its requests
    """The conversations that are not done yet and that this process is to answer. One that
    cannot be read or sent is noted and passed over."""
    read = _Reader(journal, sampling, seed, languages, control)
    rows = enumerate(islice(located(conversations), limit))
    if journal.alone:
        for _, row in rows:
            if replay := read(*row):
                yield replay
        return
    for unit, group in groupby(rows, key=lambda numbered: numbered[0] // UNIT):
        new = [replay for _, row in group if (replay := read(*row))]
        if new and journal.claim(unit, new):
            yield from new


def rounds(
    conversations: str | Path | Iterable,  # of `still_to_do`; read again in each round
    journal: Journal,  # is open
    *args,  # further arguments of `still_to_do`
    meanwhile: Callable[[], Any] = lambda: None,  # called now and then while others work
    **kwargs,
) -> Iterator[Iterator[Replay]]:  # conversations for this process, until all are settled
    "Rounds through the input: the first one, and one more each time that a worker is gone."
    yield still_to_do(conversations, journal, *args, **kwargs)
    while journal.next_round(meanwhile):
        yield still_to_do(conversations, journal, *args, **kwargs)
