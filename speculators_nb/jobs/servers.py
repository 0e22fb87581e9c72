"""A pool of servers of one model: the least busy gets the next request.
One that fails is left out for growing pauses, and taken back when it answers again."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from ..core.concurrency import EndpointError, pause, worth_retrying
from ..core.http_client import Endpoint, time_limit
from ..core.options import shown

# Refused connections, time-outs, broken answers and 5xx are the server's fault, and another may answer; so are 401,
# 403, 404 and 405, by which a server says that it is another one than it was. Every other 4xx is about the request.
# Requests that were in flight when a server failed count as one failure, or eight of them would make a pause of a
# minute.

log = logging.getLogger(__name__)


def addresses_of(server: str | Iterable[str] | None) -> list[str]:
    """The addresses that an option names, each without a final slash or /v1; None: no server. ValueError: one is named
    twice, or none is."""
    if server is None:
        return []
    given = [server] if isinstance(server, str) else list(server)
    if not given:
        raise ValueError("server=[]: names no server; give an address, or leave it out")
    found = [address.rstrip("/").removesuffix("/v1") for address in given]
    if twice := [address for i, address in enumerate(found) if address in found[:i]]:
        raise ValueError(f"server={shown(twice[0])}: is given twice; name each server once")
    return found


def one_or_several(server: str | Iterable[str] | None) -> str | list[str] | None:
    "What an option names, as records hold it: one address as text."
    found = addresses_of(server)
    return found[0] if len(found) == 1 else found or None


def is_servers_fault(error: Exception) -> bool:
    "Whether a failure speaks against the server, not against the request, which another server may answer."
    if not isinstance(error, EndpointError):
        return False
    status = error.status
    return status is None or worth_retrying(status) or status in (401, 403, 404, 405)


Client = TypeVar("Client")


class NoServerLeft(ConnectionError):
    "No server of a pool has answered for as long as the pool is patient."


@dataclass(eq=False)
class Member(Generic[Client]):
    "One server of a pool."

    url: str  # its address
    connect: Callable[[], Client]  # opens and checks it: a cheap request
    client: Client | None = None  # None: it is left out
    in_flight: int = 0  # requests
    answered: int = 0  # requests so far
    failures: int = 0  # in a row
    trouble: str = "no answer yet"  # its last failure
    due: float = 0.0  # when a request opens it again, by time.monotonic; infinite: one is at it

    def leave_out(self, error: Exception) -> None:
        "Leave it out for a pause that grows with its failures in a row."
        if self.client is not None:
            log.warning("%s is left out for a while: %s", self.url, error)
        self.failures += 1
        self.client, self.trouble = None, " ".join(str(error).split())
        self.due = time.monotonic() + pause(min(self.failures, 10))


PROBE = 10.0  # seconds that it may take to open a server


class ServerPool(Generic[Client]):
    """Servers of one model: address -> what opens and checks that server; `identity` gives what all must have in
    common, e.g. the model's name. While none answers, `patience` seconds are waited. Shared by threads; a copy in
    another process has counts of its own."""

    def __init__(
        self, connect: Mapping[str, Callable[[], Client]], identity: Callable[[Client], Any], patience: float = 120.0
    ):
        self.members = [Member(url, opens) for url, opens in connect.items()]
        self.identity = identity
        self.patience = patience
        self.agreed: tuple[str, Any] | None = None  # the first server, and its identity
        self.none_since: float | None = None  # when the last server was left out
        self.lock, self.process = threading.Lock(), os.getpid()
        with ThreadPoolExecutor(len(self.members)) as threads:
            for error in [*threads.map(self._open, self.members)]:
                if error and not is_servers_fault(error):
                    raise error

    def __getstate__(self):
        return {k: v for k, v in vars(self).items() if k != "lock"}

    def __setstate__(self, state):
        vars(self).update(state)
        self.lock, self.process = threading.Lock(), os.getpid()
        for member in self.members:
            member.in_flight, member.due = 0, 0.0

    def _open(self, member) -> Exception | None:
        "Open a server, and see that it is as the first one; the error that keeps it out."
        try:
            with time_limit(PROBE):
                client = member.connect()
                what = self.identity(client)
            with self.lock:
                first, agreed = self.agreed = self.agreed or (member.url, what)
                if what != agreed:
                    raise ValueError(
                        f"server={member.url!r}: serves {what}, and {first} serves {agreed}; all servers of a job must "
                        "serve the same"
                    )
                if member.failures:
                    log.warning("%s answers again", member.url)
                member.client, self.none_since = client, None
        except Exception as e:
            with self.lock:
                member.leave_out(e)
            return e
        return None

    def take(self, avoid: Iterable[Member] = ()) -> tuple[Member, Client]:
        """The least busy server, with one more request in flight; one whose pause is over is opened first.
        NoServerLeft: none has answered for `patience` seconds."""
        if self.process != os.getpid():  # forked: locks and counts are the parent's
            self.__setstate__(self.__getstate__())
        while True:
            with self.lock:
                now = time.monotonic()
                due = next((m for m in self.members if m.client is None and m.due <= now), None)
                ready = [(m, m.client) for m in self.members if m.client is not None]
                if due:
                    due.due = math.inf  # for other requests
                elif ready:
                    chosen, client = min(ready, key=lambda r: (r[0] in avoid, r[0].in_flight, r[0].answered))
                    chosen.in_flight += 1
                    return chosen, client
                if not ready:
                    self.none_since = self.none_since or now
                left = (self.none_since or now) + self.patience - now
                soonest = min(m.due for m in self.members) - now
            if due:
                self._open(due)
            elif left <= 0 and soonest < math.inf:
                each = "; ".join(f"{m.url}: {m.trouble}" for m in self.members)
                raise NoServerLeft(
                    f"no server has answered for {self.patience:g} s ({each}). Start them, and run the "
                    "same command again: what is done is kept"
                )
            else:
                time.sleep(min(max(0.05, min(left, soonest)), 0.5))

    tries = 8  # requests for one answer, if there are fewer servers

    def at_fault(self, error: Exception) -> bool:
        "As in `is_servers_fault`; a pool of other clients may know more."
        return is_servers_fault(error)

    def call(self, request: Callable[[Client], Any]) -> Any:
        """Send a request to the least busy server, by its client, elsewhere when that one fails. NoServerLeft; the last
        failure of a request that fails everywhere."""
        failed: list[Member] = []
        while True:
            member, client = self.take(failed)
            error = None
            try:
                answer = request(client)
            except BaseException as e:
                error = e
            fault = error if isinstance(error, Exception) and self.at_fault(error) else None
            with self.lock:
                member.in_flight -= 1
                if member.client is client:  # else it is left out already
                    if error is None:
                        member.failures = 0
                    elif fault:
                        member.leave_out(fault)
                member.answered += error is None
            if error is None:
                return answer
            failed.append(member)
            if not fault or len(failed) >= max(self.tries, len(self.members)):
                raise error


def open_endpoint(url: str, model: str | None = None, timeout: float = 600.0) -> Endpoint:
    """A client that does not try again by itself, and waits for an answer for `timeout` seconds. Errors: EndpointError;
    ValueError for a server without this model."""
    endpoint = Endpoint(url, timeout=timeout, tries=1)
    names = endpoint.models()
    if model is not None and model not in names:
        raise ValueError(
            f"model={model!r}: {endpoint.url} serves {', '.join(names) or 'nothing'}; name a "
            "model that all servers have"
        )
    return endpoint


class EndpointPool(ServerPool[Endpoint]):
    """Several OpenAI-compatible servers, as one, which serve `model`, or else the same. An answer may take `timeout`
    seconds; `check` raises ValueError for one of another form."""

    def __init__(
        self,
        urls: Iterable[str],
        model: str | None = None,
        timeout: float = 600.0,
        patience: float = 120.0,
        check: Callable[[dict], Any] | None = None,
    ):
        found = addresses_of(urls)
        self.url = ", ".join(found)
        self.model, self.check = model, check
        opens = {url: partial(open_endpoint, url, model, timeout) for url in found}
        super().__init__(opens, self._names, patience)

    def _names(self, endpoint) -> Any:
        return self.model or ", ".join(sorted(endpoint.models())) or "nothing"

    def models(self) -> list[str]:  # names
        "What all of them serve."
        return self.call(Endpoint.models)

    def post(self, path: str, body: dict) -> dict:
        "Request work of the least busy server, e.g. of /v1/completions. Errors: as of `call`."
        return self.call(partial(self._post, path=path, body=body))

    def _post(self, endpoint, path, body):
        answer = endpoint.post(path, body)
        try:
            if self.check:
                self.check(answer)
        except ValueError as e:
            raise EndpointError(f"POST {endpoint.url}{path}: {e}") from None
        return answer
