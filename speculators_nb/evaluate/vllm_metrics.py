"""vLLM's counts of speculative decoding: drafts, draft tokens, accepted tokens by position.
Of one request they are in its own answer; of all requests, in the Prometheus counters at `/metrics`, read before
and after them."""

import re
import time
from typing import Any, NamedTuple

from ..core.http_client import Endpoint

COUNTERS = {
    "drafts": "spec_decode_num_drafts",
    "proposed": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
    "requests": "request_success",
    "tokens": "generation_tokens",
}
LINE = re.compile(r"vllm:(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$")


class MetricsError(RuntimeError):
    "Counters that do not say what these requests did."


def read_counters(text: str) -> dict[str, float | list]:
    "COUNTERS of all engines in the text of /metrics, and `positions`: accepted by position, or []."
    found = dict.fromkeys(COUNTERS, 0.0)
    positions: dict[int, float] = {}
    names = {name: key for key, name in COUNTERS.items()}
    for line in text.splitlines():
        m = LINE.match(line)
        if not m:
            continue
        if m[1] in names:
            found[names[m[1]]] += float(m[3])
        elif m[1] == "spec_decode_num_accepted_tokens_per_pos":
            place = int((m[2] or "").partition('position="')[2].partition('"')[0])
            positions[place] = positions.get(place, 0.0) + float(m[3])
    return found | {"positions": [positions[i] for i in sorted(positions)]}


def counted(before: dict, after: dict) -> dict:
    "What was added between two results of `read_counters`. Errors: MetricsError where a counter went down."
    grown = {key: after[key] - before[key] for key in COUNTERS}
    new = after["positions"]
    old = before["positions"] or [0.0] * len(new)
    grown["positions"] = [b - a for a, b in zip(old, new)]
    fell = any(grown[key] < 0 for key in COUNTERS) or any(n < 0 for n in grown["positions"])
    if fell or len(old) > len(new):
        raise MetricsError("the server's counters went down: it was started again between two readings; measure again")
    return grown


class Meter:
    "Reads a server's counters around some requests."

    def __init__(self, endpoint: Endpoint, patience: float = 10):
        "patience: seconds that the counters at the endpoint's /metrics may lag behind the answers."
        self.endpoint, self.patience = endpoint, patience
        self.last: dict[str, Any] = {}
        self.k = len(self.start()["positions"])

    def start(self) -> dict:
        "Begin to count; the counters now."
        self.last = read_counters(self.endpoint.get("/metrics"))
        return self.last

    def stop(self, requests: int | None = None, tokens: int | None = None) -> dict:
        """What was added since the last `start` or `stop`, as in `read_counters`. The engine counts a step after it has
        sent its tokens, so this waits until it has counted so many requests and tokens; None: some. Errors:
        MetricsError."""
        end = time.monotonic() + self.patience
        while True:
            now = read_counters(self.endpoint.get("/metrics"))
            grown = counted(self.last, now)
            if requests is None or grown["requests"] >= requests:
                break
            if time.monotonic() > end:
                raise MetricsError(
                    f"the server counts {grown['requests']:g} finished requests, {requests} "
                    "were answered: are its /metrics those of this server?"
                )
            time.sleep(0.02)
        if requests is not None and (grown["requests"] != requests or tokens not in (None, grown["tokens"])):
            raise MetricsError(
                f"the server counts {grown['requests']:g} requests and {grown['tokens']:g} tokens, {requests} and "
                f"{tokens} are ours: somebody else uses it, so its counters say nothing about these prompts; measure "
                "on a server of your own"
            )
        self.last = now
        return grown


PER_REQUEST = ("--per-request-spec-decode-metrics", "detailed")  # arguments of `vllm serve`


class RequestCounts(NamedTuple):
    "What a server counted for one request."

    counts: dict[str, Any]  # as in `read_counters`
    step_proposed: list[int]  # of each step that verified a draft; empty: not reported
    step_accepted: list[int]  # of each step that verified a draft; empty: not reported


def request_counts(answer: dict, tokens: int) -> RequestCounts | None:
    """The counts of a request that wrote so many tokens, from its response or a piece of the stream (JSON); None: there
    are none, or they have another form."""
    reported = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    try:
        histogram = [int(n) for n in reported["acceptance_histogram"]]
        drafts, proposed = int(reported["num_spec_steps"]), int(reported["num_draft_tokens"])
        accepted = int(reported["num_accepted_draft_tokens"])
        step_proposed = reported.get("per_step_drafted") or []
        step_accepted = reported.get("per_step_accepted") or []
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    at_least = [sum(histogram[n:]) for n in range(1, len(histogram))]
    if sum(histogram) != drafts or sum(at_least) != accepted:
        return None
    counts = dict(drafts=drafts, proposed=proposed, accepted=accepted, requests=1)
    counts |= dict(tokens=tokens, positions=at_least)
    return RequestCounts(counts, step_proposed, step_accepted)
