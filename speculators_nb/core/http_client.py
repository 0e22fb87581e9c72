"""HTTP client for OpenAI-compatible servers: retries, limits on time and size, streaming.
The key appears in no log and goes to no other address."""

import contextlib
import ipaddress
import json
import logging
import math
import os
import time
import urllib.request
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import httpx

from .concurrency import EndpointError, pause, worth_retrying
from .options import address_problem, printable
from .provenance import without_secrets

# Requests are httpx's. Added is what neither httpx, the `openai` client nor `stamina` has: a limit on the time and size
# of a whole answer (others limit the time between two packets, by which a server that sends a byte a minute is never
# late), and errors that do not hold the request with its key. The key is read from the environment at each request;
# redirects are not followed, so that it goes to no other server.

LARGEST = 256 << 20  # bytes of one reply
# when the exchange that this thread is in must be over, by time.monotonic
_END: ContextVar[float | None] = ContextVar("end", default=None)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    "Inside, an exchange must be over in time, as `time_left` says. A limit inside another one never ends later."
    end, outer = time.monotonic() + seconds, _END.get()
    token = _END.set(end if outer is None else min(end, outer))
    try:
        yield
    finally:
        _END.reset(token)


def time_left(most: float = math.inf) -> float:
    "Seconds that a request may take, at most `most`. httpx.ReadTimeout: the time of `time_limit` is over."
    end = _END.get()
    left = most if end is None else min(most, end - time.monotonic())
    if left <= 0:
        raise httpx.ReadTimeout("the time for the whole answer is over")
    return left


class BadReply(ValueError):
    "A reply that is no answer: a refusal, one that does not end, or what no server writes."

    def __init__(self, problem: str, status: int | None = None, retry_after: str | None = None):
        super().__init__(problem)
        self.status, self.retry_after = status, retry_after  # HTTP status and header, where they say what to do


def read_reply(response: httpx.Response, largest: int = LARGEST) -> bytes:
    """Read a body to its end, decompressed. BadReply: it is larger than `largest` bytes; httpx.ReadTimeout: as of
    `time_left`. The rest is not read."""
    parts, size = [], 0
    for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > largest:
            raise BadReply(f"the reply is larger than {largest >> 20} MiB", response.status_code)
        time_left()
    return b"".join(parts)


log = logging.getLogger(__name__)


def _key(variable):
    "What the environment holds now; it is not stored."
    return os.environ.get(variable or "", "").strip()


def _is_local(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_for(url: httpx.URL) -> str | None:
    """The proxy that the environment names (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY); None: none, as for this
    machine."""
    found = urllib.request.getproxies()
    if _is_local(url.host) or urllib.request.proxy_bypass(url.host):
        return None
    return found.get(url.scheme) or found.get("all")


def _address(url, variable):
    "The parsed address of a server. ValueError, without repeating it: no address, or one with a secret in it."
    if problem := address_problem(str(url)):
        raise ValueError(f"url: {problem}")
    parsed, key = httpx.URL(url), _key(variable)
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{variable}: the key holds characters that no HTTP header can carry; set it to the key alone, in one line"
        )
    if key and parsed.scheme == "http" and not _is_local(parsed.host):
        log.warning("%s is neither https nor this machine: the key in %s travels in the clear", parsed.host, variable)
    return parsed


def _request(body):
    "Arguments of httpx for a body. Errors: ValueError for what has no JSON, such as NaN."
    if body is None:
        return {}
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    headers = {"Content-Type": "application/json"}
    return {"content": text.encode("utf-8", "replace"), "headers": headers}


def _refusal(response, data):
    "What a server writes about its refusal, in the forms of OpenAI, vLLM and FastAPI."
    if response.has_redirect_location:
        return f"it redirects to {response.headers['location'][:200]!r}, which is not followed; give that address"
    try:
        message = json.loads(data)
        if isinstance(message, dict):
            message = message.get("error", message)
        if isinstance(message, dict):
            message = message.get("message") or message.get("detail") or message
    except (ValueError, RecursionError):
        message = data.decode("utf-8", "replace")
    return " ".join(str(message).split())[:500] or response.reason_phrase


def _answer(method, response):
    "JSON of a POST; of a GET also text, where the server does not call it JSON. Errors: BadReply."
    data, status = read_reply(response), response.status_code
    if not response.is_success:
        raise BadReply(f"status {status}: {_refusal(response, data)}", status, response.headers.get("retry-after"))
    if method == "GET" and "json" not in response.headers.get("content-type", ""):
        return data.decode("utf-8", "replace")
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise BadReply(f"the answer is not JSON: {_excerpt(data)}") from None
    if method == "POST" and not isinstance(answer, dict):
        raise BadReply(f"status {status}: the answer is no JSON object: {str(answer)[:100]!r}", status)
    return answer


def _excerpt(data):
    return repr(data[:100].decode("utf-8", "replace"))


def _lines(response):
    "Lines of a stream; httpx's `iter_lines` would also end one at a character within a text, such as U+2028."
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
        if len(rest) > LARGEST >> 4:
            raise BadReply(f"a piece is larger than {LARGEST >> 24} MiB")
    yield rest


def _pieces(response):
    "The objects of a stream. Errors: BadReply for another line, and for a stream that ends before its answer does."
    complete = False
    for line in _lines(response):
        text = line.removeprefix(b"data:").strip()
        if text == line or not text:  # no data
            continue
        if text == b"[DONE]":
            complete = True
            continue
        try:
            piece = json.loads(text)
        except (ValueError, RecursionError):
            raise BadReply(f"a piece is not JSON: {_excerpt(line)}") from None
        if not isinstance(piece, dict):
            raise BadReply(f"a piece is no JSON object: {_excerpt(text)}")
        choices = piece.get("choices")
        for choice in choices if isinstance(choices, list) else ():  # the last one says why the answer has ended
            complete = complete or (isinstance(choice, dict) and bool(choice.get("finish_reason")))
        yield piece
    if not complete:
        raise BadReply("the server broke off: the stream ended before the answer did")


class Endpoint:
    """Requests to an OpenAI-compatible server at `url`, with or without a final /v1, with retries. May be shared by
    threads, and sent to other processes. `api_key_env`: the key's environment variable, which may be unset; `timeout`:
    seconds that an answer may take (of a stream, the pause before each piece); `tries`: requests made before giving up.
    Messages lose the key before they leave this class, and httpx's exceptions, which hold the request with its headers,
    never do."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key_env: str | None = "OPENAI_API_KEY",
        timeout: float = 600.0,
        tries: int = 4,
    ):
        parsed = _address(url, api_key_env)
        if tries < 1:
            raise ValueError(f"tries: {tries}; it must be 1 or more")
        self.url = str(parsed).rstrip("/").removesuffix("/v1")
        self.api_key_env = api_key_env
        self.timeout = timeout
        self.tries = tries
        self._client = httpx.Client(
            auth=self._sign,
            proxy=proxy_for(parsed),
            verify=httpx.create_ssl_context(),  # with the certificates that SSL_CERT_FILE names
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self._process = os.getpid()

    def __repr__(self):
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self):
        return type(self), (self.url, self.api_key_env, self.timeout, self.tries)

    def _sign(self, request):
        if key := _key(self.api_key_env):
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    def _clean(self, text):
        key = _key(self.api_key_env)
        return printable(without_secrets(text.replace(key, "***") if key else text))

    def _open(self, method, path, body):
        if self._process != os.getpid():  # forked: connections are not shared with the parent
            self.__init__(self.url, self.api_key_env, self.timeout, self.tries)
        left = time_left(self.timeout)
        timeout = httpx.Timeout(left, connect=min(left, 10))
        return self._client.stream(method, self.url + path, timeout=timeout, **_request(body))

    def _failure(self, method, path, e):
        "What is raised for an exception, after it: httpx's holds the request with the key."
        trouble = f"{type(e).__name__}: {e}" if isinstance(e, httpx.HTTPError) else str(e)
        if isinstance(e, httpx.TimeoutException):
            trouble = f"no answer in time ({type(e).__name__})"
        return EndpointError(self._clean(f"{method} {self.url}{path}: {trouble}"), getattr(e, "status", None))

    def stream(self, path: str, body: dict) -> Iterator[dict]:
        """Request work, with a body that asks for a stream, and read the pieces of the answer as they are written
        (server-sent events). One try: what was yielded cannot be taken back. EndpointError: the server refused, or
        broke off."""
        try:
            with self._open("POST", path, body) as response:
                if not response.is_success:
                    _answer("POST", response)
                for piece in _pieces(response):
                    if piece.get("error"):  # a failure after the first piece has no status
                        raise BadReply(str(piece["error"])[:500])
                    yield piece
            return
        except (httpx.HTTPError, BadReply) as e:
            failure = self._failure("POST", path, e)
        raise failure

    def get(self, path: str) -> Any:
        """Request something: JSON where the server calls it so, else text. EndpointError: refused (at once), or failed
        `tries` times."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict) -> dict:  # the answer
        "Request work. EndpointError: refused (at once), or failed `tries` times."
        return self._ask("POST", path, body)

    def served(self) -> list[dict]:  # as the server lists them: {"id": name, …}
        "What the server serves. EndpointError: its list is none."
        answer = self.get("/v1/models")
        with contextlib.suppress(ValueError, RecursionError):  # JSON that is not called so
            answer = json.loads(answer) if isinstance(answer, str) else answer
        listed: Any = answer.get("data") if isinstance(answer, dict) else None
        named = isinstance(listed, list) and all(
            isinstance(model, dict) and isinstance(model.get("id"), str) for model in listed
        )
        if not named:
            problem = f"no list of models ({str(answer)[:100]!r}); is this the address of an OpenAI-compatible server?"
            raise self._failure("GET", "/v1/models", BadReply(problem))
        return listed

    def models(self) -> list[str]:  # names
        "What the server serves."
        return [model["id"] for model in self.served()]

    def _ask(self, method, path, body) -> Any:
        for tries in range(1, self.tries + 1):
            try:
                with time_limit(self.timeout), self._open(method, path, body) as response:
                    return _answer(method, response)
            except (httpx.HTTPError, BadReply) as e:
                failure, retry_after = self._failure(method, path, e), getattr(e, "retry_after", None)
            if failure.status is not None and not worth_retrying(failure.status):
                raise failure
            if tries < self.tries:
                log.info("%s; try %d of %d", failure, tries, self.tries)
                time.sleep(pause(tries, retry_after))
        raise EndpointError(f"{failure} ({tries} {'try' if tries == 1 else 'tries'})", failure.status)
