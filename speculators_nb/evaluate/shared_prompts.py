"""Several processes decode the prompts of one evaluation, each the next one when it is free.
All of them return the tables of one process that decoded every prompt."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.files import disk_errors, read_object
from ..core.provenance import identify
from ..decode.generate import Generation, Step
from ..decode.tree import Drafter
from ..jobs.ranks import ranks_of
from ..jobs.shared_job import LEASE, SharedJob, one_writer
from ..verifier.tapped_model import Verifier
from .acceptance import decode_prompts


class SharedPrompts(SharedJob):
    """A context: the prompts of one evaluation, shared by all processes that open it. Answers are on the disk, each
    under the number of its unit. It ends when the ranks of the launch were all there."""

    def __init__(
        self,
        output_dir: str | os.PathLike,  # of the evaluation, seen by all processes
        about: dict,  # what all must agree on (JSON)
    ):
        super().__init__(Path(output_dir) / ".work", output_dir, "output_dir", about)
        self.answers: dict[int, dict] = {}  # unit -> tokens, steps, finish_reason
        self.over = True  # whether nobody needs the files any more
        self.units_before = 0  # prompts of earlier calls of `decode`

    def recover(self):
        "Read the answers of workers that are gone, if they had the same to do."
        with contextlib.suppress(OSError, ValueError, KeyError):
            if read_object(self.folder / "job.json")["about"] == self.about:
                self.read()

    def at_start(self):
        "The units whose answers former workers have left."
        if self.answers:
            self.write(self.answers)
        return sorted(self.answers)

    def write(self, answers):
        "Add answers to this worker's file. DiskError."
        path = self.folder / f"{self.me.name}.answers"
        with disk_errors(self.folder), path.open("a") as file:
            file.writelines(f"{json.dumps(pair)}\n" for pair in answers.items())
            file.flush()
            os.fsync(file.fileno())

    def read(self):
        "Read what was added to the files since the last time."
        self.answers |= dict(map(json.loads, self._added("*.answers")))

    def _clear(self):
        "Remove all files but the lock, and the answers of an evaluation that is not over."
        for path in self.folder.iterdir():
            kept = path.name == "job.json" or path.suffix == ".answers"
            if path.name != ".lock" and not (kept and not self.over):
                path.unlink(missing_ok=True)

    def __enter__(self):
        super().__enter__()
        self.settled |= dict.fromkeys(self.start, 1)
        (self.folder / f"{ranks_of().rank}.rank").touch()
        self.over = False
        return self

    def finish(self, function: Callable[[], Any]) -> Any:
        "Run the end of an evaluation once, after all prompts; its result in the process that ran it."
        end = time.monotonic() + LEASE
        while len([*self.folder.glob("*.rank")]) < ranks_of().world_size:
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        result = super().finish(function)
        self.over = True
        return result

    def decode(
        self,
        verifier: Verifier,
        drafters: Mapping[str, Drafter],  # name -> drafter
        prompts: list[list[int]],  # token ids of each request
        temperature: float,
        *,
        seed: int = 0,  # of the first prompt's sampling; each has its own
        **options: Any,  # further arguments of `decode_prompts`
    ) -> Iterator[dict[str, Generation]]:
        "Answers to all prompts in their order, each when it is there, whoever decoded it."
        if any(hasattr(drafter, "finish") for drafter in drafters.values()):
            options["seed"] = seed
            yield from decode_prompts(verifier, drafters, prompts, temperature, **options)
            return
        first, n = self.units_before, 0
        self.units_before += len(prompts)
        for unit in self.units(range(first, first + len(prompts))):
            if unit is not None:
                options["seed"] = seed + unit - first
                only = [prompts[unit - first]]
                answers = decode_prompts(verifier, drafters, only, temperature, **options)
                self.write({unit: _as_json(next(answers))})
                self.settle(unit)
            self.read()
            while n < len(prompts) and first + n in self.answers:
                yield _from_json(prompts[n], self.answers[first + n])
                n += 1
        self.read()
        for i in range(n, len(prompts)):
            yield _from_json(prompts[i], self.answers[first + i])


_STORED = ("tokens", "steps", "finish_reason", "seconds")  # of an answer


def _as_json(answers):
    return {n: {k: v for k, v in asdict(a).items() if k in _STORED} for n, a in answers.items()}


def _from_json(prompt, answers):
    return {
        name: Generation(prompt, **answer | {"steps": [Step(**s) for s in answer["steps"]]})
        for name, answer in answers.items()
    }


SAME = (  # options that decide what is measured
    *("method", "k", "temperature", "top_p", "top_k", "min_p", "max_samples"),
    *("max_new_tokens", "ngram", "baseline", "as_engine", "rule", "seed"),
)


class Alone:
    "The job of a process that shares nothing."

    decode = staticmethod(decode_prompts)

    def finish(self, function: Callable[[], Any]) -> Any:
        "Run the end of an evaluation, after all prompts."
        return function()


@contextlib.contextmanager
def evaluation_job(
    output_dir: str | os.PathLike | None,  # of the evaluation; None: it is only printed
    options: Mapping,  # of the command `evaluate`
) -> Iterator[SharedPrompts | Alone]:
    "Errors: ValueError for several ranks without `output_dir`; BlockingIOError."
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
