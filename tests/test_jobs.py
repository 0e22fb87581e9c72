"""What the processes of a job share, piece by piece: ranks, an output, servers, and the start on a Ray cluster. Whole
jobs are in test_shared_jobs.py, servers that end in test_servers.py."""

import json
import os
import pickle
import resource
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
from speculators_nb.jobs import on_ray, servers
from speculators_nb.jobs.ranks import is_first, ranks_of, shard
from speculators_nb.jobs.shared_output import append_lines, one_writer, share_writer, whole_end


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({}, (0, 1, 0)),
        (dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"), (1, 2, 1)),
        (dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID="0"), (1, 2, 0)),
        (dict(SLURM_PROCID="3", SLURM_NTASKS="8", SLURM_STEP_NUM_TASKS="4", SLURM_LOCALID="1"), (3, 4, 1)),
        (dict(SLURM_NTASKS="4"), (0, 1, 0)),  # salloc, and nothing started
        # a batch script, without srun: one process, however many tasks the job may start, and of an unknown number
        (dict(SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_LOCALID="0"), (0, 1, 0)),
        (dict(SLURM_PROCID="0", SLURM_LOCALID="0"), (0, 1, 0)),
        # srun that has started torchrun on each node
        (dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", RANK="11", WORLD_SIZE="16", LOCAL_RANK="3"), (11, 16, 3)),
        (dict(RANK="1"), "RANK='1': WORLD_SIZE is not set"),
        (dict(SLURM_PROCID="1", SLURM_NTASKS="4"), "SLURM_PROCID='1': SLURM_STEP_NUM_TASKS is not set"),
        (dict(WORLD_SIZE="2"), "WORLD_SIZE='2': RANK is not set"),
        (dict(RANK="2", WORLD_SIZE="2"), "RANK=2: must be less than WORLD_SIZE=2"),
        (dict(RANK="first", WORLD_SIZE="2"), "RANK='first': must be a whole number"),
    ],
)
def test_ranks_as_launchers_announce_them(environ, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ranks_of(environ)
    else:
        assert ranks_of(environ) == expected and is_first(environ) == (expected[0] == 0)


HOLD = """
import sys, time
from pathlib import Path
from speculators_nb.jobs.shared_output import one_writer
with one_writer(Path(sys.argv[1])):
    print("writing", flush=True)
    time.sleep(60)
"""


def test_one_writer_until_it_ends_however(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    with pytest.raises(BlockingIOError, match="run: another process is writing it; wait for it, or choose another fol"):
        one_writer(run).__enter__()
    process.kill()
    process.communicate()
    with one_writer(run):
        pass
    assert [*run.iterdir()] == []


def test_the_first_rank_writes_for_all_and_each_share_has_a_writer(tmp_path, monkeypatch):
    run, lock = tmp_path / "run", tmp_path / "run/.writer"
    with one_writer(run), share_writer(run, lock, 0, 2), share_writer(run, lock, 1, 2):
        with pytest.raises(BlockingIOError, match="another process is writing rank 1 of 2 of it"):
            share_writer(run, lock, 1, 2).__enter__()
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with one_writer(run):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(BlockingIOError, match="run: another process"):
            one_writer(run).__enter__()
    assert not run.exists()


def test_lines_are_appended_whole(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    append_lines(path, b"1\n22\n")
    for torn in (b"", b"3", b"3" * 200_000):  # by a kill
        with path.open("ab") as file:
            file.write(torn)
        append_lines(path, b"4\n")
        assert path.read_bytes() == b"1\n22\n4\n" and whole_end(path) == 7 and whole_end(path, 6) == 5
        os.truncate(path, 5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))
    try:
        with pytest.raises(OSError):
            append_lines(path, b"too long a line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert path.read_bytes() == b"1\n22\n"


@pytest.mark.parametrize("n,world_size", [(0, 1), (5, 1), (5, 2), (3, 5)])
def test_shares_are_disjoint_and_cover_all(n, world_size):
    shares = [shard(n, rank, world_size) for rank in range(world_size)]
    assert sorted(i for share in shares for i in share) == list(range(n))
    with pytest.raises(ValueError, match="ranks count from 0"):
        shard(n, world_size, world_size)


class RayTaskError(Exception):
    "What a task raised."

    def __init__(self, cause):
        self.cause = cause


def ray_of(nodes=2, gpus=0):
    "In place of Ray: each task runs when its result is requested. tests/jobs/check_ray.py has a real cluster."

    def get(tasks):
        try:
            return [task() for task in tasks]
        except Exception as e:
            raise RayTaskError(e) from e

    def remote(function):
        return SimpleNamespace(options=lambda **needs: SimpleNamespace(remote=partial(partial, function)))

    return SimpleNamespace(
        init=lambda **options: None,
        shutdown=lambda: None,
        is_initialized=lambda: False,
        nodes=lambda: [dict(Alive=True, Resources=dict(CPU=4.0, GPU=gpus / nodes))] * nodes + [{"Alive": False}],
        remote=remote,
        get=get,
        cancel=lambda task, force: None,
        exceptions=SimpleNamespace(RayTaskError=RayTaskError, WorkerCrashedError=KeyError),
    )


def made_share(folder, rank, world_size):
    "A function of a module, as `on_ray` takes one."
    return writable_folder(folder), rank, world_size


def test_a_function_on_ray(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ImportError, match=r"pip install 'speculators_nb\[ray\]'"):
        patch.setattr(on_ray, "find_spec", lambda name: None)
        on_ray.on_ray(made_share, {"folder": "answers"}, "folder")
    monkeypatch.setattr(on_ray, "_import_ray", ray_of)
    made = on_ray.on_ray(made_share, {"folder": Path("answers")}, "folder")
    assert made == [(tmp_path / "answers", rank, 8) for rank in range(8)]  # four for each node
    assert [*(tmp_path / "answers").iterdir()] == []
    Path("file").touch()
    with pytest.raises(OSError, match="file/answers"):
        on_ray.on_ray(made_share, {"folder": Path("file/answers")}, "folder")
    tasks = on_ray._tasks(ray_of(), made_share, {"folder": "x"}, Path("no/sign"))
    with pytest.raises(ValueError, match="does not see this folder of the driver; name one on"):
        on_ray._results(ray_of(), tasks)


def test_a_word_on_ray_is_no_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vllm").mkdir()
    given = on_ray._absolute("source", "vllm"), on_ray._absolute("data", "vllm"), on_ray._absolute("data", "gsm8k")
    assert given == ("vllm", str(tmp_path / "vllm"), "gsm8k")


@pytest.mark.parametrize("nodes,gpus,tasks", [(1, 0, 4), (2, 0, 8), (1, 8, 32), (4, 32, 128)])
def test_four_tasks_for_each_gpu_or_node(nodes, gpus, tasks):
    assert len(on_ray._tasks(ray_of(nodes, gpus), made_share, {}, "sign")) == tasks


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
