"""GuideLLM, the load generator of the vLLM project: its command line, and its JSON report as tables.
It gets our prompts, and its report is read into the tables of this package."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..core.files import read_object, write_text
from ..core.options import check_options
from ..serve.server import find_executable
from .load import Reply, performance
from .prompts import Prompt


def write_dataset(prompts: list[Prompt], path: str | os.PathLike) -> Path:
    "Prompts as GuideLLM reads them, to a .jsonl file. Errors: ValueError for prompts that are token ids."
    rows = [{"messages": p.messages} if p.messages else {"prompt": p.text} for p in prompts]
    if any(isinstance(r.get("prompt"), list) for r in rows):
        raise ValueError(
            "prompts: token ids cannot be handed to GuideLLM, it asks in text; give messages "
            "or texts, or use load='requests'"
        )
    lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in rows]
    write_text(path, "".join(lines))
    return Path(path)


def _kind(kind: str, **fields: Any) -> str:
    "An argument of GuideLLM: JSON with a kind."
    return json.dumps(dict(kind=kind) | fields)


def _load_arguments(streams, rate, max_requests, max_seconds, endless):
    "How requests are sent, and when it ends."
    if (streams is None) == (rate is None):
        raise ValueError(f"streams={streams}, rate={rate}: give one of them, and None for the other")
    if max_requests is None and max_seconds is None and endless:
        raise ValueError("max_requests and max_seconds are None, and synthetic prompts never end: give one of them")
    arguments = ["--profile", _kind("concurrent", streams=streams) if rate is None else _kind("poisson", rate=rate)]
    if max_requests is not None:
        arguments += ["--constraint", _kind("max_requests", count=max_requests)]
    if max_seconds is not None:
        arguments += ["--constraint", _kind("max_duration", seconds=max_seconds)]
    return arguments


def guidellm_command(
    url: str,  # of the server
    output: str | os.PathLike,  # report to write, .json
    model: str,  # as the server names it
    tokenizer: str | None = None,  # folder or hub id; None: the model's name
    dataset: str | os.PathLike | None = None,  # from `write_dataset`; None: synthetic prompts
    prompt_tokens: int = 256,  # of synthetic prompts
    max_tokens: int = 128,  # of an answer; answers to synthetic prompts have exactly so many
    streams: int | None = 1,  # requests at once; None: by rate
    rate: float | None = None,  # requests a second, in place of streams
    max_requests: int | None = None,  # then it ends
    max_seconds: float | None = None,  # then it ends
    temperature: float = 0.0,  # of the sampling
    seed: int = 0,  # of synthetic prompts and arrivals
    top_p: float = 1.0,  # keep the likeliest tokens until they hold this mass; 1: all
    top_k: int = 0,  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0,  # drop tokens less likely than this share of the likeliest; 0: none
    extra: Sequence[str] = (),  # further arguments of guidellm run
    guidellm: str | os.PathLike | None = None,  # the executable; None: the bare name
) -> list[str]:  # arguments
    "The command for one load. Errors: ValueError for a load that never ends or is given twice."
    given = dict(url=url, prompt_tokens=prompt_tokens, max_new_tokens=max_tokens)
    body = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    given |= dict(streams=streams, rate=rate, seed=seed) | body
    check_options(given | dict(max_requests=max_requests, max_seconds=max_seconds))
    load = _load_arguments(streams, rate, max_requests, max_seconds, endless=dataset is None)
    backend: dict[str, Any] = dict(target=url, model=model, extras={"body": body})
    if dataset:
        backend["max_tokens"] = max_tokens
        data = _kind("json_file", path=str(dataset))
    else:
        data = _kind("synthetic_text", prompt_tokens=prompt_tokens, output_tokens=max_tokens)
    options = {
        "--backend": _kind("openai_http", **backend),
        "--tokenizer": _kind("huggingface_auto", model=tokenizer or model),
        "--data": data,
        "--seed": _kind("static", value=seed),
        "--output": _kind("json", path=str(output)),
    }
    arguments = [part for option in options.items() for part in option]
    end = ["--disable-console-interactive", *map(str, extra)]
    return [str(guidellm or "guidellm"), "run", *load, *arguments, *end]


def read_report(path: str | os.PathLike) -> pd.DataFrame:
    """Read the JSON report of guidellm run, a row for each load: concurrency or rate, errors, columns of `performance`.
    Errors: ValueError for another file, or a load in which nothing was answered."""
    report = read_object(path)
    if "benchmarks" not in report:
        raise ValueError(f"{path}: has no benchmarks; give the JSON report of guidellm run, version 0.8")
    rows = []
    for load in report["benchmarks"]:
        replies, strategy = replies_of(load), load["config"]["strategy"]
        failed = len(load["requests"]["errored"] or []) + len(load["requests"]["incomplete"] or [])
        if not replies:
            raise ValueError(f"{path}: none of {failed} requests was answered in the load {strategy.get('type_')!r}")
        row = dict(concurrency=strategy.get("streams"), rate=strategy.get("rate"), errors=failed)
        rows.append(row | performance(replies, load["duration"]))
    return pd.DataFrame(rows)


def replies_of(load: dict[str, Any], domain: str = "all") -> list[Reply]:
    """The completed requests of one of a report's benchmarks. Its count of iterations is not that of the engine's
    steps, so it is left out."""
    return [
        Reply(
            domain,
            seconds=r["request_latency"],
            first=(r["time_to_first_token_ms"] or float("nan")) / 1000,
            tokens=r["output_tokens"] or 0,
            text=r["output"] or "",
            finish_reason="unknown",
        )
        for r in load["requests"]["successful"]
    ]


def run_guidellm(command: Sequence[str]) -> pd.DataFrame:
    """Run a command of `guidellm_command`, at most an hour, and read its report. Errors: FileNotFoundError where it is
    not installed; RuntimeError with its output."""
    command = list(command)
    if os.sep not in command[0]:
        command[0] = find_executable("guidellm")
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return read_report(json.loads(command[command.index("--output") + 1])["path"])
