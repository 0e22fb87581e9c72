"""Start vLLM (or another engine) as a process group, wait until it answers, read its log, and end all of it."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm.auto import tqdm

from ..core.http_client import Endpoint, EndpointError
from ..core.provenance import without_secrets
from .serve_command import serve_environment
from .vllm_contract import find_executable

# It ends when the program that started it ends. Told to end, it waits for all that it has started, as nobody else may:
# the first process of a container often does not, and what nobody has waited for counts as one of the group.
GUARD = """
import ctypes, os, signal, subprocess, sys, threading
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(36, 1)       # PR_SET_CHILD_SUBREAPER
def alone():
    while os.read(0, 1): pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=alone, daemon=True).start()
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
try:
    while told: os.wait()
except ChildProcessError: pass
sys.exit(code if code >= 0 else 128 - code)
"""


class ServerError(RuntimeError):
    "A server that did not start, or ended."


def free_port() -> int:  # on the loopback
    """A port that nobody listens on now. One connection was made to it and closed from this side: for a minute (TCP's
    TIME_WAIT) the system gives it to nobody who asks for any port, only to a server that asks for this one."""
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        client.connect(listening.getsockname())
        with listening.accept()[0]:
            return listening.getsockname()[1]


def option_value(command: Sequence[str], name: str) -> str | None:
    "The value of an option, written as `--port 1` or `--port=1`; None: it is not among the arguments."
    for argument, following in zip(command, [*command[1:], ""]):
        option, _, value = argument.partition("=")
        if option == name:
            return value or following
    return None


def log_lines(log: Path) -> list[str]:
    "The lines of a log that are not empty."
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = text.replace("\r", "\n").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


class Server:
    """A server that runs as long as a `with` block, with all processes that it starts, under the guard. Errors:
    ServerError with the end of its log; FileNotFoundError where there is no such program."""

    process: subprocess.Popen | None = None  # the guard, which leads the group

    def __init__(
        self,
        command: Sequence[str],  # from `serve_command`; without --port a free one is taken
        env: Mapping | None = None,  # variables to add; None: `serve_environment()`
        timeout: float = 900,  # seconds until it must answer
        log: str | os.PathLike | None = None,  # file for its output; None: a temporary one
        vllm: str | os.PathLike | None = None,  # executable; None: from `find_executable`
    ):
        self.timeout = timeout
        self._keep_log = log is not None
        if log is None:
            with tempfile.NamedTemporaryFile(prefix="server-", suffix=".log", delete=False) as file:
                log = file.name
        self.log = Path(log)
        self.command = list(map(str, command))
        self.env = dict(serve_environment() if env is None else env)
        if vllm or os.sep not in self.command[0]:
            self.command[0] = find_executable(Path(self.command[0]).name, vllm)
        port = option_value(self.command, "--port")
        self.port = int(port or free_port())
        if not port:
            self.command += ["--port", str(self.port)]
        host = option_value(self.command, "--host") or "127.0.0.1"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # all addresses: the one that is reached from here
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self) -> "Server":
        with contextlib.suppress(OSError), socket.create_connection((urlsplit(self.url).hostname, self.port)):
            raise ServerError(
                f"port {self.port} is taken: something answers on it already; choose another one, or leave it out"
            )
        self.start()
        try:
            wait_for(self)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        if not self._keep_log:
            self.log.unlink(missing_ok=True)

    def start(self):
        "Start it in a process group of its own."
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", GUARD, *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | self.env,
                start_new_session=True,
            )

    def check(self):
        "Errors: ServerError if it has ended."
        code = None if self.process is None else self.process.poll()
        if code is not None:
            raise ServerError(f"{shlex.join(self.command[:3])} ended with code {code}:\n{self.tail()}")

    def _signal(self, number) -> bool:
        if self.process is None:
            return False
        self.process.poll()  # a guard that has ended counts as one of the group until then
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def stop(self, patience: float = 20):
        "End every process of the group; `patience`: seconds until it is killed."
        for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5)):
            if not self._signal(number):
                break
            end = time.monotonic() + wait
            while time.monotonic() < end and self._signal(0):
                time.sleep(0.05)
        if self.process is not None:
            self.process.communicate()  # closes its input, and waits for it

    def tail(self, n: int = 20) -> str:
        """The part of the log that a person wants to read after a failure, without secrets: exceptions, then the last n
        lines."""
        lines = without_secrets(log_lines(self.log))
        exception = re.compile(r"((?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b: .*)")
        found = filter(None, map(exception.search, lines[:-n]))
        raised = list(dict.fromkeys(match[1] for match in found))[:5]
        if raised:
            raised.append("…")
        return "\n".join([*raised, *lines[-n:]])


def wait_for(server: Server):
    "Return when a server that was started answers. Errors: ServerError if it ends first, or not within its timeout."
    endpoint = Endpoint(server.url, api_key_env="VLLM_API_KEY", timeout=5, tries=1)
    start = time.monotonic()
    with tqdm(bar_format="{desc} {elapsed}", desc="starting the server") as bar:
        limit = f"at most {server.timeout:g} s"
        while True:
            server.check()
            try:
                endpoint.get("/health")
                return
            except EndpointError:
                pass
            if time.monotonic() - start > server.timeout:
                raise ServerError(
                    f"{shlex.join(server.command[:3])} did not answer within {server.timeout:g} s; give it a longer "
                    f"timeout, or see why:\n{server.tail()}"
                )
            last_line = without_secrets((log_lines(server.log) or [""])[-1])
            bar.set_description(f"starting the server ({limit}): {last_line}"[:100])
            time.sleep(0.25)


def print_log(server: Server):
    "Print what a server writes, without secrets, until it ends. Errors: ServerError."
    process: Any = server.process
    with server.log.open(errors="replace") as log:
        rest = ""
        while process.poll() is None:
            *lines, rest = (rest + log.read()).split("\n")
            for line in lines:
                print(without_secrets(line), flush=True)
            time.sleep(0.2)
    server.check()
