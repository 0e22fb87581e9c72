"""Long jobs: retries, a circuit breaker, a map in threads, progress bars.
They know which failures are worth a retry, end a job whose requests all fail, read a source as work proceeds,
and log whole lines where there is no terminal."""

import contextlib
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

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


def pause(failures: int, retry_after: str | None = None) -> float:
    "Seconds: exponential back-off with equal jitter, or what the server requests if that is longer; at most a minute."
    wait = 2 ** (min(failures, 20) - 1) / 2 * random.uniform(0.5, 1)
    try:
        wait = max(wait, float(retry_after or 0))
    except ValueError:
        pass  # a date
    return min(wait, 60.0)


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
    function: Callable[[Any], Any], items: Iterable, concurrency: int
) -> Generator[tuple[Any, Any], None, None]:
    """Map in so many threads at once: (item, result or exception), as completed; the items are read as work proceeds.
    An error of `items` itself is raised after what was begun has come out."""
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


def end_with_parent() -> None:
    "End this process as soon as the one that started it ends; an initializer of a pool."
    if parent := multiprocessing.parent_process():

        def exit_after():
            parent.join()
            os._exit(1)

        threading.Thread(target=exit_after, daemon=True).start()


# seconds until the first line of a progress bar, and between the next; characters of a line
FIRST, PAUSE, WIDTH = 5.0, 30.0, 200


class WholeLines:
    """Standard error where it is no terminal: of what a progress bar writes over and over into one line, a line comes
    after five seconds, every half minute, and at the end; what moves the cursor is left out."""

    def __init__(self, stream: Any):
        self.stream, self.in_bar, self.written = stream, False, time.monotonic()
        self.due = self.written + FIRST

    def write(self, text: str) -> int:
        if self.in_bar and not text.strip("\n\x1b[A"):  # its end, or the way to the bar above
            return len(text)
        self.in_bar = text.startswith("\r")
        now = time.monotonic()
        if not self.in_bar:
            self.due = min(self.due, now + FIRST)  # what is printed may begin another stage
            return self.stream.write(text)
        line = " ".join(text.split())[:WIDTH]
        done = "100%" in line
        if now >= self.due or (done and now - self.written >= 1):
            self.written, self.due = now, now + (FIRST if done else PAUSE)
            self.stream.write(line + "\n")
        return len(text)

    def flush(self):
        self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


@contextlib.contextmanager
def plain_progress():
    "Progress bars that write to a file or a pipe write whole lines, in this block."
    if sys.stderr is None or sys.stderr.isatty():
        yield
    else:
        with contextlib.redirect_stderr(WholeLines(sys.stderr)):
            yield
