"""Dynamic work sharing: units of a job, claimed one by one in a folder that all processes see.
A slow worker does few, and the units of a worker that is gone are taken over. Ray starts the workers on a cluster."""

import contextlib
import importlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..core.concurrency import plain_progress
from ..core.files import atomic_write, disk_errors, read_object, writable_folder
from ..core.options import shown
from .ranks import is_first

# Fixed shares would make a job as long as its slowest process, and lose the share of one that is killed. So rows come
# in small units, and a process that is free claims the next. All that is needed is a folder that all see: `job.json`
# says what is done, so that nobody joins who would do something else; each worker has a file of the units it has
# settled; a claim is a file that the file system lets one process make (O_EXCL). A claim saves work and does not guard
# the result: what two do at the same time is done twice and is the same. What outlives the processes is the output
# alone.

log = logging.getLogger(__name__)
LEASE = 60.0  # seconds without a sign of life after which a worker on another host is gone


@cache
def this_host() -> str:
    "The machine, as it is since its last start: containers on one kernel share it."
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else socket.gethostname()


def _is_held(path: Path) -> bool:
    "Whether a process of this machine holds the lock of a file."
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except FileNotFoundError:
        return False
    lock.release()
    return False


class Worker:
    "One process of a shared job: files in its folder whose names begin with `name`."

    def __init__(
        self,
        folder: Path,  # of the job
        name: str,  # of the worker; no two are the same
        lease: float = LEASE,  # seconds without a sign of life, on another host
    ):
        self.folder, self.name, self.lease = folder, name, lease
        self.host = folder / f"{name}.host"  # its content: where it runs; touched while it does
        self.lock = FileLock(folder / f"{name}.alive")

    def begin(self) -> None:
        "Give signs of life from now on, until `end`."
        self.lock.acquire(timeout=0)
        self.host.write_text(this_host())
        self.over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        while not self.over.wait(self.lease / 6):
            with contextlib.suppress(OSError):
                os.utime(self.host)

    def end(self) -> None:
        self.over.set()
        self.host.unlink(missing_ok=True)
        self.lock.release()
        Path(self.lock.lock_file).unlink(missing_ok=True)

    def sees(
        self,
        other: "Worker",  # of the same job
    ) -> bool:
        "Whether another worker is alive."
        try:
            if other.host.read_text() == this_host():
                return _is_held(Path(other.lock.lock_file))
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.host)
            now = (self.host if self.host.exists() else self.folder).stat().st_mtime
            return now - other.host.stat().st_mtime < self.lease
        except FileNotFoundError:  # it has left
            return False


class SharedJob:
    "A context: the work on one output, shared by all processes that open it."

    start: Any = None  # what the first worker has found

    def __init__(
        self,
        folder: str | os.PathLike,  # of the job; removed when the last worker leaves
        output: str | os.PathLike,  # what is made, for messages
        field: str,  # the option that names it
        about: dict | None,  # what all workers must agree on (JSON); None: one worker alone
        lease: float = LEASE,  # seconds without a sign of life, on another host
    ):
        self.folder, self.output, self.field, self.lease = Path(folder), output, field, lease
        self.about = about and json.loads(json.dumps(about))
        self.me = Worker(self.folder, secrets.token_hex(6), lease)
        self.is_primary = False  # whether nobody was there when this worker came
        self._read: dict[Path, int] = {}  # file of another worker -> bytes read
        self.settled: dict[int, int] = {}  # unit -> rows, by anybody

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        "Alone in the folder; its lock may be that of a folder that was removed meanwhile."
        path = self.folder / ".lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            with contextlib.suppress(FileNotFoundError):
                path.touch()
                before = path.stat().st_ino
                lock.acquire()
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_ino == before:
                        break
                lock.release()
        try:
            yield
        finally:
            lock.release()

    def others(self) -> list[Worker]:  # alive, this one not among them
        "Who else works on the job."
        names = (path.stem for path in self.folder.glob("*.host"))
        found = [Worker(self.folder, n, self.lease) for n in names if n != self.me.name]
        return [worker for worker in found if self.me.sees(worker)]

    def _added(self, pattern: str) -> Iterator[bytes]:
        "Lines that workers have added to files of this name since the last call."
        for path in self.folder.glob(pattern):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]  # the end may be in the making
            self._read[path] = self._read.get(path, 0) + len(lines)
            yield from lines.splitlines()

    def _check_about(self):
        "BlockingIOError: the others do something else."
        theirs = read_object(self.folder / "job.json")["about"]
        if theirs is None or self.about is None:
            raise BlockingIOError(
                f"{self.output}: another process is writing it; wait for it, or choose another "
                + ("file" if Path(self.output).suffix else "folder")
            )
        names = dict.fromkeys([*self.about, *theirs])
        for name in (n for n in names if self.about.get(n) != theirs.get(n)):
            mine, other = shown(self.about.get(name)), shown(theirs.get(name))
            raise BlockingIOError(
                f"{name}={mine}: another process is writing {self.field}={shown(str(self.output))} with "
                f"{name}={other}; give the same to share its work, or name another {self.field}"
            )

    def _clear(self):
        "Remove all files but the lock."
        for path in self.folder.iterdir():
            if path.name != ".lock":
                path.unlink(missing_ok=True)

    def _path(self, unit):
        return self.folder / f"{unit}.claim"

    def refresh(self) -> dict[int, int]:  # unit -> rows
        "Read what the others have settled since the last time."
        found = map(bytes.split, self._added("*.settled"))
        self.settled |= {int(unit): int(rows) for unit, rows in found}
        return self.settled

    def claim(
        self,
        unit: int,  # from 0
    ) -> bool:
        "Take a unit, unless it is settled or in work. DiskError."
        if unit in self.settled:
            return False
        with disk_errors(self.folder):
            try:
                with self._path(unit).open("x") as file:
                    file.write(self.me.name)
            except FileExistsError:
                return False
            except FileNotFoundError:
                raise BlockingIOError(
                    f"{self.output}: this process gave no sign of life for {self.lease:g} "
                    "seconds, and others have finished its work; run the same command again"
                ) from None
        if unit in self.refresh():  # between the last look and the claim
            self._path(unit).unlink(missing_ok=True)
            return False
        return True

    def settle(
        self,
        unit: int,  # claimed by this worker, its results are on the disk
        rows: int = 1,  # in it
    ) -> None:
        "Note that a unit is done. DiskError."
        path = self.folder / f"{self.me.name}.settled"
        with disk_errors(self.folder), path.open("ab") as file:
            file.write(b"%d %d\n" % (unit, rows))
            file.flush()
            os.fsync(file.fileno())
        self.settled[unit] = rows
        self._path(unit).unlink(missing_ok=True)

    def _is_in_work(self, unit):
        "Whether its holder is alive. A claim of one that is gone is removed."
        path = self._path(unit)
        try:
            holder = Worker(self.folder, path.read_text(), self.lease)
            if not holder.name:  # it is just being made, or its maker was killed then
                return time.time() - path.stat().st_mtime < self.lease
            if holder.name == self.me.name or self.me.sees(holder):
                return True
            with self._locked():
                if path.read_text() == holder.name:
                    path.unlink()
        except FileNotFoundError:
            pass
        return False

    def wait(
        self,
        units: Sequence[int],  # of the job
        meanwhile: Callable[[], Any] = lambda: None,  # called now and then, e.g. for progress
    ) -> bool:  # False: all are settled
        "Wait until a unit is free or all are settled."
        pause = 0.02
        while left := [u for u in units if u not in self.settled]:
            free = [u for u in left if not self._is_in_work(u)]
            self.refresh()
            if any(u not in self.settled for u in free):
                return True
            meanwhile()
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
        return False

    def units(
        self,
        units: Sequence[int],  # of the job
        meanwhile: Callable[[], Any] = lambda: None,  # called now and then while waiting
    ) -> Iterator[int | None]:  # claimed, to be settled; None: settle what is in hand
        "The units for this process to do, until all are settled by anybody."
        while True:
            for unit in units:
                if self.claim(unit):
                    yield unit
            yield None
            if not self.wait(units, meanwhile):
                return

    def recover(self) -> None:
        "Keep the results of workers that are gone; for kinds of jobs that have some."

    def at_start(self) -> Any:
        "What the first worker finds, for all as `start` (JSON); for kinds of jobs that look."

    def __enter__(self):
        with disk_errors(self.output), self._locked():
            if self.others():
                self._check_about()
            else:
                self._begin()
            self.start = read_object(self.folder / "job.json")["start"]
            self.me.begin()
        return self

    def _begin(self):
        "The first worker: what former ones have left is kept, and their claims are removed."
        self.is_primary = True
        try:
            self.recover()
            self._clear()
            record = json.dumps({"about": self.about, "start": self.at_start()})
            with atomic_write(self.folder / "job.json") as temporary:
                temporary.write_text(record)
        except BaseException:
            self._remove()
            raise

    def __exit__(self, *_):
        with self._locked():
            self.me.end()
            if self.others():
                return
            try:
                self.recover()
                self._clear()
            finally:
                self._remove()

    def _remove(self):
        "Remove the folder, unless it has results that could not be kept."
        names = {path.name for path in self.folder.iterdir()}
        if names <= {".lock"}:
            (self.folder / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody has come meanwhile
                self.folder.rmdir()

    def _once(self, name, function):
        "What a function returns that one worker alone calls (JSON)."
        file = self.folder / name
        with self._locked():
            if not file.is_file():
                result = json.dumps(function())
                with atomic_write(file) as temporary:
                    temporary.write_text(result)
            return json.loads(file.read_text())

    def agree(
        self,
        value: Any,  # JSON
    ) -> Any:
        "The value that the first worker has given."
        return self._once("start.json", lambda: value)

    def finish(
        self,
        function: Callable[[], Any],  # what is to be done once, after all units; returns JSON
    ) -> Any:  # what it returned, in the process that ran it
        "Run the end of a job once; where the process is killed in it, another runs it."
        return self._once("result.json", function)


@contextlib.contextmanager
def one_writer(
    folder: str | os.PathLike | None,  # an output; None: there is none
) -> Iterator[None]:
    "Keep other processes from writing a folder meanwhile. BlockingIOError: one does already."
    if folder is None or not is_first():
        yield
        return
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        with SharedJob(folder / ".work", folder, "output_dir", None):
            yield
    finally:
        if is_new:  # and nothing came of it
            with contextlib.suppress(OSError):
                folder.rmdir()


# On a Ray cluster: a task for each GPU, and where there is none, for each node. Ray starts a killed process again;
# claims and output are as without Ray, so the output must be on a file system that all nodes see. Each task looks for a
# file that the driver has made there before it begins.
RETRIES = 3  # starts of a task after its process was killed


def _run(module, name, arguments, sign):
    "In a task: the function, if the output is seen from here."
    if not Path(sign).is_file():
        raise ValueError(
            f"{Path(sign).parent}: the node {os.uname().nodename} does not see this folder of "
            "the driver; name one on a file system that all nodes share"
        )
    with plain_progress():
        return getattr(importlib.import_module(module), name)(**arguments)


def _import_ray() -> Any:
    "ImportError: Ray is not installed."
    if find_spec("ray") is None:
        raise ImportError(
            "engine='ray': Ray is not installed; install it on every node with "
            "pip install 'speculators_nb[ray]', or leave engine out"
        )
    return importlib.import_module("ray")


def _absolute(value):
    "A path as every node reads it: one that is to be made, or text that names what is here."
    is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).exists())
    return type(value)(Path(value).absolute()) if is_path else value


def _tasks(ray, function, arguments, sign) -> list:
    "A task for each GPU, or for each node where there is none."
    gpus = int(ray.cluster_resources().get("GPU", 0))
    nodes = sum(node["Alive"] for node in ray.nodes())
    needs = dict(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=RETRIES)
    task = ray.remote(_run).options(scheduling_strategy="SPREAD", **needs)
    log.info("Ray: %d tasks on %d nodes", gpus or nodes, nodes)
    given = {name: _absolute(value) for name, value in arguments.items()}
    call = dict(module=function.__module__, name=function.__name__, arguments=given, sign=str(sign))
    return [task.remote(**call) for _ in range(gpus or nodes)]


def _first_result(ray, tasks):
    "What the first task returns: it ends when the whole job is done. Its own error, if any."
    done, others = ray.wait(tasks, num_returns=1)
    try:
        return ray.get(done[0])
    except ray.exceptions.RayTaskError as e:
        raise (e.cause if isinstance(e.cause, Exception) else e) from None
    except ray.exceptions.WorkerCrashedError:
        raise ChildProcessError(
            f"a task of Ray was killed {RETRIES + 1} times, perhaps for want of memory; what "
            "is done is kept: run the same command again"
        ) from None
    finally:
        if others:  # the others are at their end, too
            ray.wait(others, num_returns=len(others), timeout=30)
        for other in others:
            ray.cancel(other, force=True)


def on_ray(
    function: Callable,  # of a module of this library: a command on rows
    arguments: dict[str, Any],  # of it
    output: str,  # the argument that names what is made
) -> Any:  # what it returns
    """Run a command on a Ray cluster. Errors: ImportError without Ray; ConnectionError without
    the cluster of RAY_ADDRESS; those of the function."""
    ray = _import_ray()
    folder = Path(arguments[output]).absolute()
    folder = writable_folder(folder.parent if folder.suffix else folder)
    started = not ray.is_initialized()
    try:
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    except ConnectionError:
        address = shown(os.environ.get("RAY_ADDRESS"))
        raise ConnectionError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there; start one with "
            "ray start --head, or unset RAY_ADDRESS"
        ) from None
    sign = folder / f".{secrets.token_hex(6)}.driver"
    sign.touch()
    try:
        return _first_result(ray, _tasks(ray, function, arguments, sign))
    finally:
        sign.unlink(missing_ok=True)
        if started:
            ray.shutdown()
