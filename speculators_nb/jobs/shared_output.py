"""An output that several processes write: a lock for each share of the rows, and lines that are appended whole.
There is no service and no lease: what is on the disk is done, and a second run of the same command does the rest."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..core.files import disk_errors
from .ranks import is_first


@contextlib.contextmanager
def one_writer(folder: str | os.PathLike | None, lock: str = ".writer") -> Iterator[None]:
    """Keep other processes from writing an output folder, if there is one, meanwhile; for a launch of several ranks its
    first one does. The function that a command calls takes a `lock` of another name."""
    if folder is None or not is_first():
        yield
        return
    with share_writer(folder, Path(folder) / lock):
        yield


@contextlib.contextmanager
def share_writer(output: str | os.PathLike, lock: Path, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Keep other processes from making a share of an output meanwhile, by a hidden lock file in it or beside it, whose
    name gets a suffix. BlockingIOError: one does already; DiskError. The lock goes with its process, however that
    ends."""
    part = f"rank {rank} of {world_size} of it" if world_size > 1 else "it"
    file = lock.with_name(f"{lock.name}{f'.{rank}-of-{world_size}' if world_size > 1 else ''}.lock")
    is_new = not file.parent.exists()
    with disk_errors(output):
        file.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(file)
        try:
            held.acquire(timeout=0)
        except Timeout:
            raise BlockingIOError(
                f"{output}: another process is writing {part}; wait for it, or choose another "
                + ("folder" if file.parent == Path(output) else "file")
            ) from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: who has opened it sees that it is gone
        held.release()
        if is_new:  # and nothing came of it
            with contextlib.suppress(OSError):
                file.parent.rmdir()


def is_held(file: Path) -> bool:
    "Whether a process makes the share with this lock. A lock that a killed one has left is removed."
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    file.unlink(missing_ok=True)
    lock.release()
    return False


def append_lines(path: str | os.PathLike, lines: bytes) -> None:
    """Add whole lines to a file, all or none of them; half a line that a killed process has left is cut off first. The
    caller keeps others from appending meanwhile. OSError: the disk; what was there stays."""
    with open(path, "ab", buffering=0) as file:
        end = whole_end(path)
        file.truncate(end)
        try:
            while lines:
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(end)
            raise


def whole_end(path: str | os.PathLike, before: int | None = None) -> int:
    "Where the last whole line of a file, or of its first `before` bytes, ends; 0: there is no whole line."
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END) if before is None else before
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0
