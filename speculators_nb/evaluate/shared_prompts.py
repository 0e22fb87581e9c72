"""The prompts of one evaluation, decoded by the ranks of a launch: each its share, then whatever is missing.
All of them return the tables of one process that decoded every prompt."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from ..core.files import disk_errors
from ..core.provenance import identify
from ..decode.generate import Generation, Step
from ..decode.tree import Drafter
from ..jobs.ranks import ranks_of
from ..jobs.shared_output import one_writer
from ..verifier.tapped_model import Verifier
from .acceptance import decode_prompts

# Each rank has a file of its own in the output folder, to which it appends its answers, and reads those of all others.
# Who has done its share decodes what is not there yet, from the end, so that a rank that was killed is not waited for.
# An evaluation that was interrupted continues with the files; the first rank removes them once the tables are written.

PATIENCE = 60.0  # seconds that the first rank waits for others to begin


class SharedPrompts:
    "A context: the answers to the prompts of one evaluation, by all ranks that open it."

    def __init__(self, output_dir: str | os.PathLike, about: dict):
        """output_dir: of the evaluation, seen by all ranks; about: what decides the answers (JSON), others in the
        folder are not used."""
        self.folder = Path(output_dir)
        self.job = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.ranks = ranks_of()
        self.answers: dict[int, dict] = {}  # number of the prompt, over all calls of `decode` -> its answers
        self.prompts = 0  # of earlier calls of `decode`
        self._files: dict[Path, BinaryIO] = {}  # open for reading, also once they are removed
        self._ends: dict[Path, int] = {}  # bytes that were read

    def __enter__(self):
        self._held = contextlib.ExitStack()
        self._held.enter_context(one_writer(self.folder))
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.own = self.folder / f".{self.job}.{self.ranks.rank}.answers"
            self._own = self._held.enter_context(self.own.open("ab"))
        self.read()
        return self

    def __exit__(self, kind, *_):
        if kind and not self._own.tell():  # nothing came of it
            self.own.unlink(missing_ok=True)
        self._held.close()

    def read(self) -> None:
        "Read what all ranks have added since the last time; a line that is not whole is read later, or never."
        for path in self.folder.glob(f".{self.job}.*.answers"):
            if path not in self._files:
                with contextlib.suppress(FileNotFoundError):
                    self._files[path] = self._held.enter_context(path.open("rb"))
        for path, file in self._files.items():
            file.seek(self._ends.get(path, 0))
            lines, end, _ = file.read().rpartition(b"\n")
            self._ends[path] = self._ends.get(path, 0) + len(lines + end)
            for line in lines.splitlines():
                with contextlib.suppress(ValueError):  # torn by a kill
                    number, answers = json.loads(line)
                    self.answers[number] = answers

    def _write(self, number, answers):
        "Add answers to this rank's file, on a line of their own. DiskError."
        with disk_errors(self.folder):
            self._own.write(b"\n" + json.dumps([number, answers]).encode() + b"\n")
            self._own.flush()

    def decode(
        self,
        verifier: Verifier,
        drafters: Mapping[str, Drafter],
        prompts,
        temperature: float,
        *,
        seed=0,
        **options: Any,
    ) -> Iterator[dict[str, Generation]]:
        """As `decode_prompts`: answers to all prompts in their order, each when it is there, whoever decoded it."""
        if any(hasattr(drafter, "finish") for drafter in drafters.values()):  # it learns from each answer
            yield from decode_prompts(verifier, drafters, prompts, temperature, seed=seed, **options)
            return
        first, self.prompts = self.prompts, self.prompts + len(prompts)
        mine = range(self.ranks.rank, len(prompts), self.ranks.world_size)
        others = [i for i in reversed(range(len(prompts))) if i not in mine]
        n = 0
        for i in [*mine, *others]:
            self.read()
            if first + i not in self.answers:
                (answers,) = decode_prompts(verifier, drafters, [prompts[i]], temperature, seed=seed + i, **options)
                self.answers[first + i] = _as_json(answers)
                self._write(first + i, self.answers[first + i])
            while n < len(prompts) and first + n in self.answers:
                yield _from_json(prompts[n], self.answers[first + n])
                n += 1

    def finish(self, function: Callable[[], Any]) -> None:
        "Run the end of an evaluation once, in the first rank, after all ranks have begun."
        if self.ranks.rank > 0:
            return
        end = time.monotonic() + PATIENCE
        while len([*self.folder.glob(f".{self.job}.*.answers")]) < self.ranks.world_size:
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        function()
        for path in self.folder.glob(".*.*.answers"):
            path.unlink(missing_ok=True)


def _as_json(answers):
    stored = ("tokens", "steps", "finish_reason", "seconds")
    return {n: {k: v for k, v in asdict(a).items() if k in stored} for n, a in answers.items()}


def _from_json(prompt, answers):
    steps = {n: [Step(**s) for s in answer["steps"]] for n, answer in answers.items()}
    return {n: Generation(prompt, **answer | {"steps": steps[n]}) for n, answer in answers.items()}


SAME = (  # options that decide what is measured
    *("method", "k", "temperature", "top_p", "top_k", "min_p", "max_samples"),
    *("max_new_tokens", "ngram", "baseline", "as_engine", "rule", "seed"),
    *("device", "attn_implementation", "kv_cache"),  # the times, if not the text
)


class Alone:
    "The job of a process that shares nothing."

    decode = staticmethod(decode_prompts)

    def finish(self, function: Callable[[], Any]) -> None:
        "Run the end of an evaluation, after all prompts."
        function()


@contextlib.contextmanager
def evaluation_job(output_dir: str | os.PathLike | None, options: Mapping) -> Iterator[SharedPrompts | Alone]:
    """The job of the command `evaluate` with these options; output_dir None: it is only printed. Errors: ValueError for
    several ranks without `output_dir`; BlockingIOError."""
    if options["engine"] != "reference" or output_dir is None:
        n = ranks_of().world_size
        if options["engine"] == "reference" and n > 1:
            raise ValueError(
                f"output_dir is missing: {n} ranks share the prompts in that folder; name one that all of them see"
            )
        with one_writer(output_dir):
            yield Alone()
        return
    about = {name: options[name] for name in SAME}
    named = {name: options[name] for name in ("drafter", "verifier", "data")}
    about |= {name: identify(value) for name, value in named.items() if value is not None}
    with SharedPrompts(output_dir, about) as job:
        yield job
