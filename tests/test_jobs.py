"""What the processes of a job share, piece by piece: ranks, claims, servers, and the start on a Ray cluster. Whole jobs
are in test_shared_jobs.py, servers that end in test_servers.py."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from speculators_nb.core.concurrency import EndpointError, concurrently
from speculators_nb.core.files import writable_folder
from speculators_nb.jobs import servers, shared_job
from speculators_nb.jobs.ranks import is_first, ranks_of
from speculators_nb.jobs.shared_job import SharedJob, Worker, on_ray, one_writer


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({}, (0, 1, 0)),
        (dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"), (1, 2, 1)),
        (dict(SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_LOCALID="1"), (3, 4, 1)),
        (dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID="0"), (1, 2, 0)),
        (dict(SLURM_NTASKS="4"), (0, 1, 0)),  # salloc, and nothing started
        # srun that has started torchrun on each node
        (dict(SLURM_PROCID="1", SLURM_NTASKS="2", RANK="11", WORLD_SIZE="16", LOCAL_RANK="3"), (11, 16, 3)),
        (dict(RANK="1"), "RANK='1': WORLD_SIZE is not set"),
        (dict(WORLD_SIZE="2"), "WORLD_SIZE='2': RANK is not set"),
        (dict(RANK="2", WORLD_SIZE="2"), "RANK=2: must be less than WORLD_SIZE=2"),
        (dict(RANK="first", WORLD_SIZE="2"), "RANK='first': must be a whole number"),
        (dict(SLURM_PROCID="0"), "SLURM_PROCID='0': SLURM_NTASKS is not set"),
    ],
)
def test_ranks_as_launchers_announce_them(environ, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ranks_of(environ)
    else:
        assert ranks_of(environ) == expected and is_first(environ) == (expected[0] == 0)


BEGIN = """
import sys, time
from pathlib import Path
from speculators_nb.jobs.shared_job import Worker
Worker(Path(sys.argv[1]), "b").begin()
print("working", flush=True)
time.sleep(60)
"""


def test_who_is_alive(tmp_path):
    us, other = Worker(tmp_path, "a"), Worker(tmp_path, "b")
    us.begin()
    process = subprocess.Popen([sys.executable, "-c", BEGIN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    assert us.sees(other)
    process.kill()
    process.communicate()
    assert not us.sees(other)
    other.host.write_text("another machine")
    assert us.sees(other)
    os.utime(other.host, (time.time() - 120,) * 2)
    assert not us.sees(other)
    other.host.unlink()
    assert not us.sees(other)
    us.end()


def test_the_races_of_claims(tmp_path, monkeypatch):
    "Two see that a third is gone; a unit is settled between a look and a claim; a job ends while a worker was stopped."

    def job():
        return SharedJob(tmp_path / "job", tmp_path / "out.jsonl", "output", {"seed": 0})

    with job() as a, job() as b, job() as c:
        assert a.is_primary and not b.is_primary
        assert c.claim(0) and not a.claim(0) and not b.claim(0)
        c.me.end()  # as if it were killed
        assert not a._is_in_work(0) and not b._is_in_work(0)
        assert a.claim(0) and not b.claim(0) and b._is_in_work(0)
        a.settle(0, rows=7)
        assert not b.claim(0) and b.settled == {0: 7}
        assert b.wait([0, 1]) and not b.wait([0])
        with monkeypatch.context() as patch, pytest.raises(BlockingIOError, match="others have finished its work"):
            patch.setattr(b, "folder", tmp_path / "gone")
            b.claim(1)
        c.me.begin()
    alone = SharedJob(tmp_path / "job", tmp_path / "out.jsonl", "output", None)
    with alone, pytest.raises(BlockingIOError, match="out.jsonl: another process is writing it; wait"):
        job().__enter__()
    assert not (tmp_path / "job").exists()


def test_the_ranks_of_one_launch_are_one_writer(tmp_path, monkeypatch):
    with one_writer(tmp_path / "run"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with one_writer(tmp_path / "run"):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(BlockingIOError, match="run: another process"):
            one_writer(tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


class RayTaskError(Exception):
    "What a task raised."

    def __init__(self, cause):
        self.cause = cause


def ray_of(nodes=2, gpus=0):
    "In place of Ray: each task runs when its result is requested. tests/jobs/check_ray.py has a real cluster."

    def get(task):
        try:
            return task()
        except Exception as e:
            raise RayTaskError(e) from e

    def remote(function):
        return SimpleNamespace(options=lambda **needs: SimpleNamespace(remote=partial(partial, function)))

    return SimpleNamespace(
        init=lambda **options: None,
        shutdown=lambda: None,
        is_initialized=lambda: False,
        nodes=lambda: [{"Alive": True}] * nodes + [{"Alive": False}],
        cluster_resources=lambda: {"GPU": float(gpus)} if gpus else {},
        remote=remote,
        wait=lambda tasks, **options: (tasks[:1], tasks[1:]),
        get=get,
        cancel=lambda task, force: None,
        exceptions=SimpleNamespace(RayTaskError=RayTaskError, WorkerCrashedError=KeyError),
    )


def test_a_function_on_ray(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ImportError, match=r"pip install 'speculators_nb\[ray\]'"):
        patch.setattr(shared_job, "find_spec", lambda name: None)
        on_ray(writable_folder, {"folder": "answers"}, "folder")
    monkeypatch.setattr(shared_job, "_import_ray", ray_of)
    made = on_ray(writable_folder, {"folder": Path("answers")}, "folder")
    assert made == tmp_path / "answers" and list(made.iterdir()) == []
    Path("file").touch()
    with pytest.raises(OSError, match="file/answers"):
        on_ray(writable_folder, {"folder": Path("file/answers")}, "folder")
    tasks = shared_job._tasks(ray_of(), writable_folder, {"folder": "x"}, Path("no/sign"))
    with pytest.raises(ValueError, match="does not see this folder of the driver; name one on"):
        shared_job._first_result(ray_of(), tasks)


@pytest.mark.parametrize("nodes,gpus,tasks", [(1, 0, 1), (2, 0, 2), (1, 8, 8), (4, 32, 32)])
def test_a_task_for_each_gpu_or_node(nodes, gpus, tasks):
    assert len(shared_job._tasks(ray_of(nodes, gpus), writable_folder, {}, "sign")) == tasks


def test_addresses_of_servers():
    assert servers.addresses_of("http://a:8000/v1") == ["http://a:8000"]
    assert servers.one_or_several(["http://a:8000", "http://b:8000/"]) == ["http://a:8000", "http://b:8000"]
    assert servers.one_or_several(("http://a:8000",)) == "http://a:8000" and servers.one_or_several(None) is None
    with pytest.raises(ValueError, match="'http://a:8000': is given twice"):
        servers.addresses_of(["http://a:8000", "http://a:8000/v1"])
    with pytest.raises(ValueError, match="names no server"):
        servers.addresses_of([])


def test_what_speaks_against_a_server():
    statuses = (None, 400, 404, 413, 422, 429, 500, 503)
    assert [s for s in statuses if servers.is_servers_fault(EndpointError("", s))] == [None, 404, 429, 500, 503]
    assert not servers.is_servers_fault(ValueError("of the caller"))


def test_pauses_grow_with_failures_in_a_row():
    member = servers.Member("http://a:8000", connect=object, client=object())
    for n in range(4):
        now = time.monotonic()
        member.leave_out(EndpointError("status 500:\n  the engine is dead"))
        assert 2**n / 4 <= member.due - now <= 2**n / 2 + 0.1
    assert (member.client, member.trouble) == (None, "status 500: the engine is dead")


class Imitation:
    "A server that answers after a while."

    def __init__(self, url, seconds=0.0):
        self.url, self.seconds, self.dead, self.lock = url, seconds, False, threading.Lock()

    def answer(self, i):
        self.opened()
        with self.lock:
            time.sleep(self.seconds)
        return i * i

    def opened(self):
        if self.dead:
            raise EndpointError("connection refused")
        return self


def pool_of(group):
    return servers.ServerPool({s.url: s.opened for s in group}, identity=lambda s: "tiny")


def test_servers_of_a_pool_end_and_come_back():
    group = [Imitation(f"http://gpu{i}:8000", seconds) for i, seconds in enumerate((0.002, 0.004, 0.016))]
    pool, results = pool_of(group), []
    for i, result in concurrently(lambda i: pool.call(lambda s: s.answer(i)), range(300), 12):
        results.append((i, result))
        if len(results) == 50:
            group[0].dead = group[1].dead = True
            before = [m.answered for m in pool.members]
        if len(results) == 80:
            group[0].dead = False
    assert sorted(results) == [(i, i * i) for i in range(300)]
    gained = [m.answered - n for m, n in zip(pool.members, before)]
    assert gained[0] > 0 and gained[1] <= 12 and gained[2] > 0  # 12 were on their way
    assert [m.client is None for m in pool.members] == [False, True, False]
    assert [m.in_flight for m in pool.members] == [0, 0, 0]
    for s in group:
        s.dead = True
    pool.patience = 0.3
    with pytest.raises(servers.NoServerLeft) as none_left:
        pool.call(lambda s: s.answer(1))
    assert all(f"{s.url}: connection refused" in str(none_left.value) for s in group)
    group[2].dead, pool.patience = False, 20
    assert pool.call(lambda s: s.answer(7)) == 49


@pytest.mark.parametrize("status,tries", [(400, 1), (500, 4)])
def test_a_request_that_fails_everywhere(status, tries):
    "The request is wrong, and the server stays; or it fails on each server in turn, and is given up."
    pool, sent = pool_of([Imitation(f"http://gpu{i}") for i in range(3)]), []
    pool.tries = 4

    def refuse(server):
        sent.append(server.url)
        raise EndpointError("no answer", status)

    with pytest.raises(EndpointError, match="no answer"):
        pool.call(refuse)
    assert len(sent) == tries and (tries == 1 or len(set(sent)) == 3)
    assert sum(m.failures for m in pool.members) == (0 if tries == 1 else 4)


def test_servers_of_other_models_are_no_pool():
    models = iter(("tiny", "large"))
    with pytest.raises(ValueError, match="all servers of a job must serve the same"):
        servers.ServerPool(dict.fromkeys(["http://a", "http://b"], object), lambda _: next(models))
    dead, live = Imitation("http://a"), Imitation("http://b")
    dead.dead = True
    pair = pool_of([dead, live])
    assert [pair.call(lambda s: s.url) for _ in range(3)] == [live.url] * 3


class Reply(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, data):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def do_GET(self):
        self.answer({"data": [{"id": self.server.model}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.count += 1
        self.answer({"choices": ["yes"]} if self.server.sane else {"detail": "starting"})


@pytest.fixture
def listen():
    running = []

    def start(model, sane=True):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Reply)
        server.model, server.sane, server.count = model, sane, 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def has_choices(answer):
    if "choices" not in answer:
        raise ValueError(f"no choices in {answer}")


def test_a_pool_of_endpoints(listen):
    (sane, a), (insane, b), (_, c) = listen("tiny"), listen("tiny", sane=False), listen("big")
    both = servers.EndpointPool([a, b], check=has_choices)
    replies = [both.post("/v1/completions", {"prompt": "?"}) for _ in range(4)]
    assert replies == [{"choices": ["yes"]}] * 4 and both.models() == ["tiny"] and both.url == f"{a}, {b}"
    assert sane.count == 4 and insane.count >= 1 and "no choices" in both.members[1].trouble
    for options, message in (({}, "all servers of a job must"), ({"model": "tiny"}, "model='tiny': http://127.0.0.1")):
        with pytest.raises(ValueError, match=message):
            servers.EndpointPool([a, c], **options)
    copy = pickle.loads(pickle.dumps(servers.EndpointPool([a])))
    assert copy.post("/v1/completions", {"prompt": "?"}) == {"choices": ["yes"]}
