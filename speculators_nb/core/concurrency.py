"""Long jobs: retries, a circuit breaker, a map in threads, progress bars.
They know which failures are worth a retry, end a job whose requests all fail, read a source as work proceeds,
and log whole lines where there is no terminal."""

import contextlib
import io
import multiprocessing
import os
import queue
import random
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any
from unittest.mock import patch

# A client that waits needs threads and no more. Items are taken from their source only as far as work is ahead, so that
# it may be longer than memory; an error is a result; no thread keeps a program from ending, as those of
# `concurrent.futures` would.


class EndpointError(RuntimeError):
    "A request that was not answered; `status` is the HTTP status, or None where there was none."

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    def __reduce__(self):
        return EndpointError, (*self.args, self.status)


def worth_retrying(status: int) -> bool:
    "Whether a status is a timeout, a conflict with other requests, or the server's own failure."
    return status in (408, 409, 425, 429) or status >= 500


def pause(failures: int, retry_after: str | None = None, longest: float = 60.0) -> float:
    "Seconds: exponential back-off with equal jitter, or what the server requests if that is longer; at most `longest`."
    wait = 2 ** (min(failures, 20) - 1) / 2 * random.uniform(0.5, 1)
    try:
        wait = max(wait, float(retry_after or 0))
    except ValueError:
        pass  # a date
    return min(wait, longest)


class TooManyFailures(RuntimeError):
    "A job was stopped because everything failed."


class Breaker:
    "Counts failures in a row."

    def __init__(self, limit: int = 20):
        self.limit, self.failures = limit, 0

    def see(self, result: Any) -> bool:
        """Note how one item ended: whether it is a result, and no exception. TooManyFailures at the limit, with the
        last reason."""
        if not isinstance(result, BaseException):
            self.failures = 0
            return True
        self.failures += 1
        if self.failures >= self.limit:
            raise TooManyFailures(
                f"{self.failures} failures in a row, so the job was stopped; what was finished is kept, and the same "
                f"call goes on from there. The last reason: {type(result).__name__}: {result}"
            )
        return False


def concurrently(
    function: Callable[[Any], Any],  # of one item; runs in `concurrency` threads
    items: Iterable,  # read as work proceeds
    concurrency: int,  # items in work at once
) -> Generator[tuple[Any, Any], None, None]:  # (item, result or exception), as completed
    "Map in threads. An error of `items` itself is raised after what was begun has come out."
    if concurrency < 1:
        raise ValueError(f"concurrency: {concurrency}; it must be 1 or more")
    waiting = queue.SimpleQueue()
    finished = queue.SimpleQueue()
    stopped = threading.Event()

    def work():
        while (item := waiting.get()) and not stopped.is_set():
            try:
                result = function(item[0])
            except BaseException as e:
                result = e
            finished.put((item[0], result))

    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    source = iter(items)
    unfinished = 0
    more = True
    broken = None  # the error of `items`
    try:
        while more or unfinished:
            while more and unfinished < 2 * concurrency:  # one waits for each one in work
                try:
                    waiting.put((next(source),))
                    unfinished += 1
                except StopIteration:
                    more = False
                except Exception as e:
                    more, broken = False, e
            if unfinished:
                yield finished.get()
                unfinished -= 1
        if broken:
            raise broken
    finally:
        stopped.set()
        for _ in range(concurrency):
            waiting.put(None)


def _exit_after(process):
    process.join()
    os._exit(1)


def end_with_parent() -> None:
    "End this process as soon as the one that started it ends; an initializer of a pool."
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_exit_after, args=[parent], daemon=True).start()


PARTS, PAUSE, SHORT = 10, 30.0, 1.0  # lines of a bar; seconds between lines; of a short job
WIDTH = 200  # characters of a line


def _is_due(bar, now) -> bool:
    "Whether a bar has news: another tenth of its work, or half a minute has passed."
    when, part = getattr(bar, "plain_line", (getattr(bar, "start_t", now), 0))
    new = bool(bar.total) and int(PARTS * bar.n / bar.total) > part
    return (new and now - when >= SHORT) or now - when >= PAUSE


def _write_line(bar, now):
    "Done, total, elapsed and remaining time."
    bar.plain_line = now, int(PARTS * bar.n / bar.total) if bar.total else 0
    bar.plain_n = bar.n
    bar.fp.write(" ".join(str(bar).split())[:WIDTH] + "\n")


@contextlib.contextmanager
def plain_progress():
    "Progress bars that write to a file or a pipe write whole lines, in this block."
    from tqdm.std import tqdm

    display, clear, close = tqdm.display, tqdm.clear, tqdm.close

    def is_plain(bar):
        return not bar.gui and not bar.fp.isatty()

    def display_line(bar, msg=None, pos=None):
        if not is_plain(bar):
            return display(bar, msg, pos)
        if msg is None and _is_due(bar, bar._time()):
            _write_line(bar, bar._time())
        return True

    def clear_nothing(bar, nolock=False):
        if not bar.disable and not is_plain(bar):
            clear(bar, nolock)

    def close_line(bar):
        if not getattr(bar, "disable", True) and is_plain(bar):
            now, shown = bar._time(), getattr(bar, "plain_n", 0)
            if bar.n > shown and now - bar.start_t >= SHORT:
                _write_line(bar, now)
            bar.fp = io.StringIO()  # what else a bar writes at its end moves the cursor
        close(bar)

    with patch.multiple(tqdm, display=display_line, clear=clear_nothing, close=close_line):
        yield
