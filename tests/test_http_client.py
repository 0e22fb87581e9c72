"""The HTTP client against a server that fails in every way it can, in a process of its own; and nowhere the key."""

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback

import pytest
from fake_openai import FakeServer, reply

from speculators_nb.core import http_client as module
from speculators_nb.core.concurrency import Breaker, TooManyFailures, concurrently
from speculators_nb.core.http_client import Endpoint, EndpointError

KEY = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "pause", lambda failures, asked=None: 0.01)


@pytest.fixture(scope="module")
def shared():
    with FakeServer() as server:
        yield server


def ask(endpoint, text="hello"):
    return endpoint.post("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": text}]})[
        "choices"
    ][0]["message"]["content"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_addresses(shared, suffix):
    endpoint = Endpoint(shared.url + suffix)
    assert endpoint.url == shared.url and endpoint.models() == ["fake"] and ask(endpoint) == reply("hello")


@pytest.mark.parametrize("kind", ["429", "500", "503", "reset", "garbage", "torn"])
def test_what_passes_is_asked_again(shared, kind):
    endpoint, before = Endpoint(shared.url), len(shared.seen())
    shared.fault(kind, 3)
    assert ask(endpoint) == reply("hello") and len(shared.seen()) == before + 4
    shared.fault(kind, 4)
    with pytest.raises(EndpointError, match="4 tries"):
        ask(endpoint)
    assert ask(endpoint) == reply("hello")  # nothing was left over


@pytest.mark.parametrize("kind", ["400", "401", "403", "404", "422"])
def test_what_is_wrong_is_said_at_once(shared, kind):
    before = len(shared.seen())
    shared.fault(kind)
    with pytest.raises(EndpointError, match=f"POST {shared.url}/v1/chat/completions: status {kind}: fault {kind}") as e:
        ask(Endpoint(shared.url))
    assert e.value.status == int(kind) and len(shared.seen()) == before + 1
    assert pickle.loads(pickle.dumps(e.value)).status == int(kind)


def test_too_slow(shared):
    shared.fault("slow:2", 2)
    with pytest.raises(EndpointError, match="no answer in time"):
        ask(Endpoint(shared.url, timeout=0.2, tries=2))


def test_a_server_that_dies_and_comes_back():
    with FakeServer() as server:
        endpoint = Endpoint(server.url, tries=1000)
        assert ask(endpoint) == reply("hello")
        server.fault("kill")
        threading.Timer(0.3, lambda: (server.process.wait(), server.restart())).start()
        assert ask(endpoint) == reply("hello")
        server.kill()
        with pytest.raises(EndpointError, match="ConnectError") as e:
            ask(Endpoint(server.url, tries=2))
        assert e.value.status is None


def test_the_key_goes_to_the_server_and_nowhere_else(shared, monkeypatch, caplog, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")  # as from a file
    caplog.set_level(logging.DEBUG)
    endpoint = Endpoint(shared.url, tries=2)
    ask(endpoint)
    assert shared.seen()[-1]["authorization"] == f"Bearer {KEY}"
    texts = [repr(endpoint), str(endpoint), repr(pickle.dumps(endpoint)), repr(vars(endpoint))]
    for fault, count in {"401": 1, "500": 2, "reset": 2, "garbage": 2, "429": 2}.items():
        shared.fault(fault, count)
        try:
            ask(endpoint)
        except EndpointError as e:
            seen = e
            while seen:  # what a traceback with local variables would print, chained exceptions included
                texts += [
                    str(seen),
                    *traceback.TracebackException.from_exception(seen, capture_locals=True).format(),
                    repr(vars(seen)),
                ]
                seen = seen.__cause__ or seen.__context__
    assert any("***" in t for t in texts)
    assert KEY not in "".join(texts) and KEY not in caplog.text and KEY not in "".join(capfd.readouterr())
    monkeypatch.delenv("OPENAI_API_KEY")
    ask(endpoint)
    assert shared.seen()[-1]["authorization"] is None


def test_an_address_with_a_secret_is_refused_without_repeating_it():
    for url in (f"http://user:{KEY}@127.0.0.1:1", f"https://api.example.com/v1?key={KEY}", f"ftp://{KEY}", KEY, None):
        with pytest.raises(ValueError, match="url: ") as e:
            Endpoint(url)
        assert KEY not in str(e.value)
    with pytest.raises(ValueError, match="tries: 0"):
        Endpoint(tries=0)


def test_a_key_in_the_clear_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (
        Endpoint("http://127.0.0.1:1"),
        Endpoint("http://localhost:1"),
        Endpoint("http://[::1]:1"),
        Endpoint("https://api.example.com"),
        Endpoint("http://api.example.com", None),
    )
    assert not caplog.records
    Endpoint("http://api.example.com")
    assert "in the clear" in caplog.text and KEY not in caplog.text


def test_loopback_needs_no_proxy(shared, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert ask(Endpoint(shared.url, tries=1)) == reply("hello")
    with pytest.raises(EndpointError):
        Endpoint("http://api.example.com", None, timeout=1, tries=1).models()


def in_child(endpoint, out):
    out.put(ask(endpoint, "child"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(shared, method):
    endpoint, context = Endpoint(shared.url, tries=2), multiprocessing.get_context(method)
    ask(endpoint)  # a connection is open
    out = context.Queue()
    children = [context.Process(target=in_child, args=(endpoint, out)) for _ in range(2)]
    for c in children:
        c.start()
    assert [out.get(timeout=30) for _ in children] == [reply("child")] * 2 and ask(endpoint) == reply("hello")
    for c in children:
        c.join()


def test_threads_share_an_endpoint(shared):
    endpoint = Endpoint(shared.url)
    texts = [f"question {i}" for i in range(200)]
    shared.fault("500", 5)
    shared.fault("reset", 5)
    assert dict(concurrently(lambda t: ask(endpoint, t), texts, 16)) == {t: reply(t) for t in texts}


def test_as_many_at_once_as_asked_for():
    running, most, lock = 0, 0, threading.Lock()

    def work(_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    assert len(list(concurrently(work, range(60), 6))) == 60 and most == 6


def test_the_source_is_read_as_work_proceeds():
    read = []
    for n, _ in enumerate(concurrently(lambda i: i, (read.append(i) or i for i in range(10**9)), 3), 1):
        assert len(read) <= n - 1 + 6
        if n == 50:
            break


def test_errors_are_results_and_a_broken_source_loses_nothing():
    def source():
        yield from range(20)
        raise ValueError("line 21")

    out = []
    with pytest.raises(ValueError, match="line 21"):
        for item, result in concurrently(lambda i: 1 / (i % 5), source(), 4):
            out.append((item, result))
    assert sorted(i for i, _ in out) == list(range(20))
    assert all(isinstance(r, ZeroDivisionError) == (i % 5 == 0) for i, r in out)
    assert list(concurrently(str, [None, 0, ()], 2)) != []  # items that are false are items
    with pytest.raises(ValueError, match="concurrency: 0"):
        next(concurrently(str, [], 0))


def test_threads_go_when_the_consumer_goes():
    before = threading.active_count()
    for _ in concurrently(lambda i: i, range(10**6), 8):
        break
    deadline = time.time() + 5
    while threading.active_count() > before and time.time() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_long_answer_does_not_keep_the_program():
    code = (
        "import time\nfrom speculators_nb.core.concurrency import concurrently\nfor _ in concurrently(time.sleep, [0, "
        "600], 2): break"
    )
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True, env=os.environ)


def test_breaker():
    breaker = Breaker(2)
    for result in (OSError(), 1, OSError(), None, OSError()):
        breaker.see(result)
    with pytest.raises(TooManyFailures, match="2 failures in a row.*OSError: no"):
        breaker.see(OSError("no"))
