"""Load on a server: streamed requests with times, one or several at once.
What the server counted for each gives throughput, latency and acceptance by domain."""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from tqdm.auto import tqdm

from ..core.concurrency import EndpointError, concurrently
from ..core.http_client import Endpoint
from ..data.messages import BadRow, map_parts
from .prompts import Prompt
from .vllm_metrics import COUNTERS, Meter, request_counts

log = logging.getLogger(__name__)


@dataclass
class Reply:
    "An answer, and when it came."

    domain: str
    seconds: float = 0.0  # from asking to the end
    first: float = float("nan")  # to the first token
    prompt_tokens: int | None = None  # read; None: not told
    tokens: int = 0  # written
    pieces: int = 0  # in which they came
    token_ids: list = field(default_factory=list)  # empty where the server does not tell
    text: str = ""
    finish_reason: str | None = None
    counts: dict | None = None  # what the server counted for it alone, as in `read_counters`
    # of each step that verified a draft, where the server reports them
    step_proposed: list[int] = field(default_factory=list)
    step_accepted: list[int] = field(default_factory=list)

    @property
    def between(self) -> float:  # seconds
        "Mean time between two tokens after the first."
        return (self.seconds - self.first) / (self.tokens - 1) if self.tokens > 1 else float("nan")


def _as_sent(part):
    "A part of a message, with the picture of a file of this machine inside, as held-out rows name it."
    address = part.get("image_url") if isinstance(part, dict) else None
    url = urlsplit(str(address.get("url"))) if isinstance(address, dict) else None
    if url is None or url.scheme != "file" or url.netloc or not Path(unquote(url.path)).is_file():
        return part  # other pictures are read by the server
    from ..data.images import picture_inside  # torch, datasets

    return picture_inside(part)


def ask(
    endpoint: Endpoint,
    model: str,
    prompt: Prompt,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    salt: str | None = None,
    **filters: Any,
) -> Reply:
    """Send one request and read the stream of its answer. `model`: as the server names it; `seed`: of the sampling at a
    temperature (0: greedy); `salt`: prompts with different ones share no prefix cache; `filters`: top_p, top_k, min_p.
    Errors: EndpointError."""
    body: dict[str, Any] = dict(top_p=1.0, top_k=0, min_p=0.0) | filters
    body |= dict(model=model, max_tokens=max_tokens, temperature=temperature, seed=seed)
    body |= dict(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    body |= dict(cache_salt=salt) if salt else {}
    body |= dict(messages=map_parts(prompt.messages, _as_sent)) if prompt.messages else dict(prompt=prompt.text)
    body |= dict(tools=prompt.tools) if prompt.tools else {}
    path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
    reply = Reply(prompt.domain)
    start = time.perf_counter()
    for piece in endpoint.stream(path, body):
        now = time.perf_counter() - start
        usage = piece.get("usage") or {}
        reply.tokens = usage.get("completion_tokens", reply.tokens)
        reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
        if found := request_counts(piece, reply.tokens):
            reply.counts, reply.step_proposed, reply.step_accepted = found
        for choice in piece.get("choices") or []:
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            ids = choice.get("token_ids") or []
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            other = ("tool_calls", "reasoning", "reasoning_content")
            if not (text or ids or any(delta.get(name) for name in other)):
                continue  # the role, or the end
            if not reply.pieces:
                reply.first = now
            reply.pieces += 1
            reply.text += text
            reply.token_ids += ids
            reply.seconds = now
    reply.tokens = reply.tokens or len(reply.token_ids) or reply.pieces
    reply.seconds = reply.seconds or time.perf_counter() - start
    return reply


@dataclass
class Load:
    "What a number of requests took."

    concurrency: int  # requests at once
    replies: list[Reply]
    numbers: Sequence[int | None]  # of the prompt of each reply; None: not known
    seconds: dict[str, float]  # of all requests of a domain; one at a time: no counter reads
    counts: dict[str, dict]  # domain -> what the server counted, as in `read_counters`
    k: int  # tokens that the server drafts; 0: none
    refused: dict[int, str] = field(default_factory=dict)  # prompt -> why it has no reply


def run_load(
    endpoint: Endpoint,
    prompts: list[Prompt],
    concurrency: int = 1,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    model: str | None = None,
    **filters: Any,
) -> Load:
    """Send all prompts to a server without other users, domain by domain, so many requests at once. `max_tokens`: of an
    answer; `seed`: of the sampling, each prompt has its own; `model`: None: the first that the server names; `filters`:
    as of `ask`. A prompt that the server does not take (status 400, 413 or 422, as for one beyond its context) is left
    out and named. Errors: EndpointError of the first other failure, or where none is taken; MetricsError."""
    model = model or endpoint.models()[0]
    salt = uuid.uuid4().hex
    hello = Prompt("warm", text="Hello.")
    if any(prompt.messages for prompt in prompts):  # which a model without a template refuses
        hello = Prompt("warm", messages=[{"role": "user", "content": "Hello."}])
    ask(endpoint, model, hello, 4, salt=salt)  # unmeasured: the first request is slower
    meter = Meter(endpoint)
    replies: dict[int, Reply] = {}
    refused: dict[int, str] = {}
    seconds, counts = {}, {}

    def one(i):
        try:
            return ask(endpoint, model, prompts[i], max_tokens, temperature, seed + i, salt, **filters)
        except BadRow as e:  # its picture is damaged, or another one
            return e
        except EndpointError as e:
            if e.status not in (400, 413, 422):
                raise
            return e

    with tqdm(total=len(prompts), unit="request") as bar:
        for domain in dict.fromkeys(p.domain for p in prompts):
            mine = [i for i, p in enumerate(prompts) if p.domain == domain]
            while meter.last != meter.start():  # until earlier requests are counted
                time.sleep(0.02)
            start, metered = time.perf_counter(), False
            if concurrency == 1:  # threads begin the next request before this one is counted
                answers = ((i, one(i)) for i in mine)
            else:
                answers = concurrently(one, mine, concurrency)
            for i, reply in answers:
                bar.update()
                if isinstance(reply, (EndpointError, BadRow)) and len(refused) + 1 < len(prompts):
                    refused[i] = str(reply)
                    log.warning("prompt %d of %d is skipped: %s", i, len(prompts), reply)
                    continue
                if isinstance(reply, BaseException):
                    raise reply
                replies[i] = reply
                metered = concurrency == 1 and reply.counts is None
                if metered:
                    reply.counts = meter.stop(1, reply.tokens)
            own = [replies[i] for i in mine if i in replies]
            if not own:
                continue
            seconds[domain] = sum(r.seconds for r in own) if concurrency == 1 else time.perf_counter() - start
            if metered:
                counts[domain] = sum_counts([r.counts for r in own if r.counts is not None])
            else:
                counts[domain] = meter.stop(len(own), sum(r.tokens for r in own))
    numbers = sorted(replies)
    return Load(concurrency, [replies[i] for i in numbers], numbers, seconds, counts, meter.k, refused)


def sum_counts(counts: list[dict[str, Any]]) -> dict[str, Any]:
    "Counts of several requests or domains (`read_counters`) together."
    total: dict[str, Any] = {key: sum(c[key] for c in counts) for key in COUNTERS}
    return total | {"positions": [sum(p) for p in zip(*(c["positions"] for c in counts))]}


def steps_of(replies: list[Reply], counts: dict[str, Any]) -> float:
    "Verification steps of replies, by the counts of all of them, those without a draft included."
    pieces = sum(max(r.pieces - 1, 0) for r in replies)
    undrafted = counts["tokens"] - counts["requests"] - counts["accepted"]
    return max(counts["drafts"], pieces, undrafted)


def rows_of(load: Load, domain: str | None = None) -> tuple[np.ndarray, list]:
    """Counts for `acceptance_table` and `acceptance_summary`: ([R, 4 + k] of `count`, [requests, tokens, step tokens,
    steps]); a row for each request that has counts of its own, else one for the domain (None: all together). Where the
    stream merged pieces of a request that ends at the limit, up to k steps without a draft are lost."""
    replies = [r for r in load.replies if domain in (None, r.domain)]
    parts = [(r.counts, [r]) for r in replies if r.counts]
    if len(parts) < len(replies):
        groups = [c for d, c in load.counts.items() if domain in (None, d)]
        parts = [(sum_counts(groups), replies)]
    rows = []
    for counts, own in parts:
        totals = [counts[name] for name in ("drafts", "proposed", "accepted")]
        rows.append([steps_of(own, counts), *totals, *counts["positions"]])
    tokens = sum(r.tokens for r in replies)
    steps = max(sum(row[0] for row in rows), 1)
    return np.array(rows, dtype=float), [len(replies), tokens, tokens - len(replies), steps]


def performance(replies: list[Reply], seconds: float) -> dict:
    """Throughput and latency as a row of a table: medians and 95th percentiles over requests, times in milliseconds.
    `seconds`: the clock for all of them."""

    def spread(name, values):
        known = np.array([v for v in values if v == v]) * 1000
        median, p95 = np.quantile(known, [0.5, 0.95]) if len(known) else (np.nan, np.nan)
        return {f"{name}_ms": median, f"{name}_p95_ms": p95}

    tokens = sum(r.tokens for r in replies)
    return dict(
        requests=len(replies),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        requests_per_second=len(replies) / seconds,
        **spread("first_token", [r.first for r in replies]),
        **spread("between_tokens", [r.between for r in replies]),
        **spread("request", [r.seconds for r in replies]),
    )
