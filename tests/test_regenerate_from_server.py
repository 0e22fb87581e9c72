"""Answers from a server that fails, dies and comes back: everything once, in the file that `prepare` reads, and never
the key."""

import json
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_openai import MODEL, FakeServer, reply
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from speculators_nb.core import http_client as module
from speculators_nb.core.concurrency import TooManyFailures
from speculators_nb.core.http_client import Endpoint
from speculators_nb.data.prepare import prepare
from speculators_nb.regenerate.from_server import regenerate_from_server
from speculators_nb.regenerate.journal import read_regenerated

FOLDER = Path(__file__).parents[1] / "data/tiny-verifier"
KEY = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "pause", lambda failures, asked=None: 0.01)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def server():
    with FakeServer(tokenizer=FOLDER) as server:
        yield server


def talk(i, turns=1, **more):
    return {
        "id": f"t{i}",
        "messages": [
            {"role": r, "content": f"question {i}, part {t}"} for t in range(turns) for r in ("user", "assistant")
        ],
    } | more


def asked(server, since=0):
    return [s for s in server.seen()[since:] if s["path"] == "/v1/chat/completions"]


def errors(path):
    return {e["id"]: e for e in map(json.loads, path.with_suffix(".errors.jsonl").read_text().splitlines())}


@pytest.mark.statement("release-01", "release-03")
def test_rows_are_what_the_server_read_and_said(server, tokenizer, tmp_path):
    rows, path, since = [talk(i, 1 + i % 3) for i in range(12)], tmp_path / "out.jsonl", len(server.seen())
    report = regenerate_from_server(server.url, rows, path, temperature=0.7, max_new_tokens=64, concurrency=4)
    lines = {line["primary_id"]: line for line in read_regenerated(path)}
    assert (report["written"], report["answers"], report["failed"].total(), report["retokenised"]) == (12, 24, 0, 0)
    assert report["finish_reasons"] == {"stop": 24} and report["tokens"] == sum(
        sum(line["loss_mask"]) for line in read_regenerated(path)
    )
    for row in rows:
        line = lines[row["id"]]
        questions = [m["content"] for m in row["messages"][::2]]
        assert [m["content"] for m in line["messages"][::2]] == questions
        requests = {r["messages"][-1]["content"]: r for r in asked(server, since)}
        for n, (q, a) in enumerate(zip(questions, line["messages"][1::2])):
            request = requests[q]
            # the history is the new one
            assert a["content"] == reply(q, request["seed"]) and request["messages"] == line["messages"][: 2 * n + 1]
            assert (request["model"], request["temperature"], request["max_tokens"], request["return_token_ids"]) == (
                MODEL,
                0.7,
                64,
                True,
            )
        spoken = tokenizer.decode([t for t, m in zip(line["input_ids"], line["loss_mask"]) if m]).split(
            tokenizer.eos_token
        )
        assert spoken[:-1] == [m["content"] for m in line["messages"][1::2]][-len(spoken) + 1 :]
        assert (
            line["metadata"]["endpoint"] == server.url
            and line["metadata"]["sampling_params"] == {"temperature": 0.7}
            and line["metadata"]["model"] == MODEL
        )
    assert len({r["seed"] for r in asked(server, since)}) == 24  # every answer has its own
    made = prepare(read_regenerated(path), tokenizer, 4096)
    assert [r["input_ids"] for r in made] == [line["input_ids"] for line in read_regenerated(path)]


def test_what_fails_is_named_and_tried_again(server, tmp_path):
    path, rows = tmp_path / "out.jsonl", [talk(i, 2) for i in range(8)]
    server.fault("400", -1, "question 3, part 0")
    server.fault("400", -1, "question 7, part 1")  # after an answer, which is kept
    server.fault("500", 40, "question 5, part 0")
    for i, kind in {0: "429", 1: "reset", 2: "garbage", 4: "torn", 6: "503"}.items():
        server.fault(kind, 3, f"question {i}, part 0")  # these pass
    report = regenerate_from_server(server.url, rows, path, concurrency=3)
    assert (report["written"], report["failed"].total()) == (6, 2)
    assert report["truncated"] == {"a refused prompt, status 400": 1}
    failed = errors(path)
    assert (
        failed.keys() == {"t3", "t5"}
        and failed["t3"]["status"] == 400
        and "fault 400" in failed["t3"]["error"]
        and "4 tries" in failed["t5"]["error"]
    )
    server.set(faults=[])
    since = len(server.seen())
    again = regenerate_from_server(server.url, rows, path, concurrency=3)
    assert (again["kept"], again["written"], again["failed"].total()) == (6, 2, 0) and not path.with_suffix(
        ".errors.jsonl"
    ).exists()
    # the rest is not asked again
    assert {r["messages"][0]["content"] for r in asked(server, since)} == {"question 3, part 0", "question 5, part 0"}
    assert sorted(line["primary_id"] for line in read_regenerated(path)) == sorted(r["id"] for r in rows)


def test_what_was_answered_before_a_failure(server, tmp_path):
    """It is kept where the next answer cannot be used, as in this process; a conversation whose server fails on the way
    is asked again from its first question."""
    path, rows = tmp_path / "out.jsonl", [talk(i, 3) for i in range(4)]
    server.fault("ends:content_filter", -1, "question 0, part 1")
    server.fault("ends:content_filter", -1, "question 1, part 0")
    server.fault("500", -1, "question 2, part 2")
    report = regenerate_from_server(server.url, rows, path)
    assert report["truncated"] == {"ValueError: the answer ended for the reason 'content_filter'": 1}
    kept = {line["primary_id"]: line["metadata"]["finish_reasons"] for line in read_regenerated(path)}
    assert kept == {"t0": ["stop"], "t3": ["stop"] * 3} and errors(path).keys() == {"t1", "t2"}
    server.set(faults=[])
    since = len(server.seen())
    assert regenerate_from_server(server.url, rows, path)["written"] == 2
    questions = sorted(request["messages"][-1]["content"] for request in asked(server, since))
    assert questions == [f"question {i}, part {t}" for i in (1, 2) for t in range(3)]


@pytest.mark.parametrize("fault", ["ends:abort", "ends:error", 'says:{"error": {"message": "overloaded"}}'])
def test_an_answer_that_the_server_breaks_off_is_asked_for_again(fault, server, tmp_path):
    "As a server does that is paused or shut down, and a gateway before it: the conversation is not cut there for good."
    path = tmp_path / "out.jsonl"
    server.fault(fault, -1, "question 0, part 1")
    report = regenerate_from_server(server.url, [talk(0, 3)], path)
    assert report["failed"].total() == 1 and not report["truncated"] and not path.read_bytes()
    server.set(faults=[])
    assert regenerate_from_server(server.url, [talk(0, 3)], path)["answers"] == 3


def test_a_row_of_failures_stops_the_job(server, tmp_path):
    server.fault("404", -1, "lost")
    with pytest.raises(TooManyFailures, match="status 404: fault 404"):
        regenerate_from_server(
            server.url,
            (talk(i) if i < 4 else {"messages": [{"role": "user", "content": f"lost {i}"}]} for i in range(10**6)),
            tmp_path / "o.jsonl",
            max_failures=7,
            concurrency=3,
        )
    assert len(list(read_regenerated(tmp_path / "o.jsonl"))) == 4 and 7 <= len(errors(tmp_path / "o.jsonl")) <= 7 + 3


def test_input_is_read_as_work_proceeds(server, tmp_path):
    path, lead = tmp_path / "o.jsonl", []

    def source():
        for i in range(60):
            lead.append(i - (path.read_bytes().count(b"\n") if path.exists() else 0))
            yield talk(i)

    assert regenerate_from_server(server.url, source(), path, concurrency=4)["written"] == 60
    assert max(lead) <= 2 * 4
    assert regenerate_from_server(server.url, source(), path, concurrency=4, limit=10)["kept"] == 10


def test_tools_are_paired(server, tmp_path):
    tools = [
        {
            "type": "function",
            "function": {"name": n, "description": n, "parameters": {"type": "object", "properties": {}}},
        }
        for n in ("weather", "clock")
    ]

    def used(name, content):
        return [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "old", "type": "function", "function": {"name": name, "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "old", "content": content},
        ]

    user = lambda text: {"role": "user", "content": text}
    rows = [
        {
            "id": "paired",
            "tools": tools,
            "messages": [
                user("use weather"),
                *used("weather", "18 degrees"),
                {"role": "assistant", "content": "18"},
                user("thanks"),
            ],
        },
        {
            "id": "other",
            "tools": tools,
            "messages": [
                user("use clock"),
                *used("weather", "18 degrees"),
                {"role": "assistant", "content": "18"},
                user("thanks"),
            ],
        },
        {
            "id": "two",
            "tools": json.dumps(tools),
            "messages": [user("use weather and clock"), *used("weather", "18 degrees"), user("thanks")],
        },
    ]
    since = len(server.seen())
    report = regenerate_from_server(server.url, rows, tmp_path / "o.jsonl")
    lines = {line["primary_id"]: line for line in read_regenerated(tmp_path / "o.jsonl")}
    messages = lines["paired"]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert (
        messages[2]["content"] == "18 degrees"
        and messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"] != "old"
    )
    assert messages[3]["content"] == reply(
        "18 degrees", next(r["seed"] for r in asked(server, since) if r["messages"][-1]["content"] == "18 degrees")
    )
    assert lines["paired"]["metadata"]["finish_reasons"] == ["tool_calls", "stop", "stop"]
    assert (
        "other than" in lines["other"]["metadata"]["truncated"]
        and "2 tool calls" in lines["two"]["metadata"]["truncated"]
    )
    # the call itself is the verifier's
    assert all(len(lines[k]["messages"]) == 2 and any(lines[k]["loss_mask"]) for k in ("other", "two"))
    assert report["truncated"].total() == 2 and all(r["tools"] == tools for r in asked(server, since))


def test_sampling_and_languages(server, tmp_path):
    rows = [talk(i) for i in range(40)] + [
        talk(40, temperature=0.25, chat_template_kwargs={"enable_thinking": False}),
        {"id": "de", "messages": [{"role": "user", "content": "Was ist das für ein Tier und wie alt ist es?"}]},
        talk(41, language="French"),
    ]
    since = len(server.seen())
    report = regenerate_from_server(
        server.url,
        rows,
        tmp_path / "o.jsonl",
        sampling={"temperature": [[0, 1], [1.0, 1]], "reasoning_effort": [["low", 1], ["high", 1]], "top_p": 0.9},
        languages="en,und",
    )
    requests = {r["messages"][0]["content"]: r for r in asked(server, since)}
    assert (
        {r["temperature"] for r in requests.values()} == {0, 0.25, 1.0}
        and {r["reasoning_effort"] for r in requests.values()} == {"low", "high"}
        and {r["top_p"] for r in requests.values()} == {0.9}
    )
    assert requests["question 40, part 0"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert report["skipped"] == {"de": 1, "fr": 1} and report["written"] == 41
    for line in read_regenerated(tmp_path / "o.jsonl"):
        request = requests[line["messages"][0]["content"]]
        assert line["metadata"]["sampling_params"] == {
            k: request[k] for k in ("temperature", "reasoning_effort", "top_p", "chat_template_kwargs") if k in request
        }
    with pytest.raises(ValueError, match="sampling was .* is {'temperature': 0.5}"):
        regenerate_from_server(server.url, rows, tmp_path / "o.jsonl", temperature=0.5)


def test_cut_answers_and_long_prompts(server, tmp_path):
    report = regenerate_from_server(server.url, [talk(0, 3)], tmp_path / "cut.jsonl", max_new_tokens=5)
    (line,) = read_regenerated(tmp_path / "cut.jsonl")
    assert (
        report["cut"] == 1
        and line["metadata"]["finish_reasons"] == ["length"]
        and sum(line["loss_mask"]) == 5
        and len(line["messages"]) == 2
    )
    length = len(line["input_ids"]) - 5
    long = regenerate_from_server(server.url, [talk(0, 3)], tmp_path / "long.jsonl", max_length=length + 1)
    (line,) = read_regenerated(tmp_path / "long.jsonl")
    assert (
        long["truncated"] == {f"a prompt beyond {length + 1} tokens": 1}
        and len(line["messages"]) == 2
        and line["metadata"]["finish_reasons"] == ["stop"]
    )
    none = regenerate_from_server(server.url, [talk(0, 3)], tmp_path / "none.jsonl", max_length=length)
    assert none["written"] == 0 and "beyond" in errors(tmp_path / "none.jsonl")["t0"]["error"]


def test_a_server_that_gives_no_token_ids(server, tokenizer, tmp_path):
    rows = [talk(i, 2) for i in range(4)]
    regenerate_from_server(server.url, rows, tmp_path / "ids.jsonl", max_new_tokens=64)
    server.set(mute=True, thinks=True)
    report = regenerate_from_server(server.url, rows, tmp_path / "text.jsonl", max_new_tokens=64, tokenizer=str(FOLDER))
    assert (report["retokenised"], report["other_tokens"]) == (8, 0)
    cut = regenerate_from_server(server.url, rows[:1], tmp_path / "cut.jsonl", max_new_tokens=5, tokenizer=tokenizer)
    alone = regenerate_from_server(server.url, rows, tmp_path / "none.jsonl")
    server.set(mute=False, thinks=False)
    rows_of = lambda name: {
        line["id"]: (line["input_ids"], line["loss_mask"]) for line in read_regenerated(tmp_path / name)
    }
    assert rows_of("ids.jsonl") == rows_of("text.jsonl")
    assert all(
        m["reasoning_content"].startswith("because")
        for line in read_regenerated(tmp_path / "text.jsonl")
        for m in line["messages"]
        if m["role"] == "assistant"
    )
    (line,) = read_regenerated(tmp_path / "cut.jsonl")
    assert (
        cut["cut"] == 1
        and sum(line["loss_mask"]) == 5
        and tokenizer.eos_token_id not in line["input_ids"][-5:]
        and line["metadata"]["token_ids"] == "from text"
    )
    assert alone["written"] == 0 and "tokenizer=<folder or hub id>" in errors(tmp_path / "none.jsonl")["t0"]["error"]


def test_the_key_is_not_written_down(server, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server.fault("401", 2, "secret")
    report = regenerate_from_server(
        server.url, [talk(0), {"messages": [{"role": "user", "content": "secret"}]}], tmp_path / "o.jsonl"
    )
    assert report["failed"].total() == 1 and server.seen()[-1]["authorization"] == f"Bearer {KEY}"
    assert "***" in errors(tmp_path / "o.jsonl").popitem()[1]["error"]
    written = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert (
        KEY.encode() not in written and KEY not in caplog.text and KEY not in str(report) + "".join(capfd.readouterr())
    )


def test_model_is_named_or_the_only_one(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module.Endpoint, "models", lambda self: ["a", "b"])
    with pytest.raises(ValueError, match="serves a, b; name one"):
        regenerate_from_server(server.url, [], tmp_path / "o.jsonl")


def client(url, path, pause):
    "150 conversations of two turns."
    tqdm.set_lock(threading.RLock())  # the one that is inherited is the parent's too, and a kill would leave it locked
    module.pause = lambda failures, asked=None: pause
    rows = (
        {
            "id": f"t{i}",
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "?"},
                {"role": "user", "content": f"and {i}?"},
            ],
        }
        for i in range(150)
    )
    try:
        regenerate_from_server(Endpoint(url, tries=10), rows, path, concurrency=4, max_failures=10)
    except TooManyFailures as e:
        sys.exit(3 if "10 failures in a row" in str(e) else 4)


def test_kill_9_of_client_and_server(tmp_path):
    """The client is killed, then the server under the next client (which stops), then the server again, which comes
    back in time."""
    path = tmp_path / "o.jsonl"

    def done():
        return {line["primary_id"] for line in read_regenerated(path)} if path.exists() else set()

    def start(pause=0.01):
        process = multiprocessing.get_context("fork").Process(target=client, args=(server.url, path, pause))
        process.start()
        return process

    def until(process, n):
        deadline = time.time() + 60
        while len(done()) < n:
            assert process.is_alive() and time.time() < deadline
            time.sleep(0.01)

    def ends_with(process, code):
        process.join(60)
        assert process.exitcode == code

    with FakeServer(tokenizer="letters", delay=0.02) as server:
        first = start()
        until(first, 20)
        first.kill()
        ends_with(first, -signal.SIGKILL)
        kept = done()
        path.write_bytes(path.read_bytes() + b'{"id": "t149_gen0", "primary')  # and the disk took half of one more line
        since = len(asked(server))

        second = start()
        until(second, len(kept) + 20)
        again = {r["messages"][0]["content"].replace("question ", "t") for r in asked(server)[since:]}
        assert again and not kept & again  # what was finished is not asked again
        server.kill()
        ends_with(second, 3)
        kept = done()

        server.restart()
        third = start(pause=0.5)
        until(third, len(kept) + 20)
        server.kill()
        server.restart()
        ends_with(third, 0)
        again = {r["messages"][0]["content"].replace("question ", "t") for r in asked(server)}
        assert again and not kept & again
    lines = list(read_regenerated(path))
    assert path.read_bytes().count(b"\n") == len(lines)
    assert Counter(line["primary_id"] for line in lines if line["part"][0] == 0) == Counter(f"t{i}" for i in range(150))
    assert len({line["id"] for line in lines}) == len(lines) and all(len(line["messages"]) == 4 for line in lines)
