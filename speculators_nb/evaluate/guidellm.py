"""GuideLLM, the load generator of the vLLM project, sends our prompts: its command line, and its JSON report.
The report is read into the tables of this package."""

import json
import subprocess
from pathlib import Path
from typing import Any

from ..core.files import read_object, write_text
from ..data.messages import holds_pictures
from ..serve.server import find_executable
from .load import Reply
from .prompts import Prompt


def check_guidellm(prompts: list[Prompt]) -> None:
    """Errors: FileNotFoundError where GuideLLM is not installed; ValueError for prompts that are token ids, or have
    tools or pictures."""
    find_executable("guidellm")
    if any(isinstance(p.text, list) or p.tools or holds_pictures(p.messages) for p in prompts):
        raise ValueError(
            "prompts: token ids, tools and pictures cannot be handed to GuideLLM, it asks in text; give messages or "
            "texts, or use load='requests'"
        )


def write_dataset(prompts: list[Prompt], path: Path) -> Path:
    "Prompts as GuideLLM reads them, to a .jsonl file."
    rows = [{"messages": p.messages} if p.messages else {"prompt": p.text} for p in prompts]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _kind(kind: str, **fields: Any) -> str:
    "An argument of GuideLLM: JSON with a kind."
    return json.dumps(dict(kind=kind) | fields)


def guidellm_command(
    url: str,  # of the server
    report: Path,  # to write, .json
    model: str,  # as the server names it
    tokenizer: str,  # folder or hub id
    dataset: Path,  # from `write_dataset`
    *,
    max_tokens: int,  # of an answer
    streams: int,  # requests at once
    max_requests: int,  # then it ends
    seed: int,  # of the order
    **body: Any,  # of each request: temperature, top_p, top_k, min_p
) -> list[str]:  # arguments
    "The command for one load."
    options = {
        "--profile": _kind("concurrent", streams=streams),
        "--constraint": _kind("max_requests", count=max_requests),
        "--backend": _kind("openai_http", target=url, model=model, extras={"body": body}, max_tokens=max_tokens),
        "--tokenizer": _kind("huggingface_auto", model=tokenizer),
        "--data": _kind("json_file", path=str(dataset)),
        "--seed": _kind("static", value=seed),
        "--output": _kind("json", path=str(report)),
    }
    arguments = [part for option in options.items() for part in option]
    return [find_executable("guidellm"), "run", *arguments, "--disable-console-interactive"]


def run_guidellm(command: list[str], report: Path, requests: int) -> dict[str, Any]:
    """Run a command of `guidellm_command`, at most an hour, and read the benchmark of its report. Errors: RuntimeError
    with its output, or where not all of so many `requests` were answered; ValueError for a file that is no report."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    found = read_object(report)
    if "benchmarks" not in found:
        raise ValueError(f"{report}: has no benchmarks; is guidellm of version 0.8?")
    benchmark = found["benchmarks"][0]
    answered, failed = (len(benchmark["requests"][name] or []) for name in ("successful", "errored"))
    if failed or answered < requests:
        raise RuntimeError(
            f"guidellm: {requests} requests were to be sent, {answered} were answered, {failed} have failed; numbers "
            "without them would be of other prompts. Use load='requests', which names a prompt that the server refuses"
        )
    return benchmark


def replies_of(benchmark: dict[str, Any], domain: str = "all") -> list[Reply]:
    """The completed requests of a report's benchmark. Its count of iterations is not that of the engine's steps, so it
    is left out."""
    return [
        Reply(
            domain,
            seconds=r["request_latency"],
            first=(r["time_to_first_token_ms"] or float("nan")) / 1000,
            tokens=r["output_tokens"] or 0,
            text=r["output"] or "",
            finish_reason="unknown",
        )
        for r in benchmark["requests"]["successful"]
    ]
