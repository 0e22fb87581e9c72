"""Bad input as a table: each case says what is given, to what, and what must be answered. tests/test_bad.py runs the
tables of this folder.

A case runs in a process of its own, forked after the imports, with a limit on memory and on time. It passes if the
input is refused in one line that matches `expect` (exit code 2 in the shell), or, where `counted` is set, if the run
succeeds and its report matches `expect`."""

import contextlib
import functools
import importlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "tests/fixtures/compat/0.1.0"
GOOD = {  # what a case can name in braces, besides {here}, its own folder
    "verifier": RELEASE / "verifier",  # four layers, 64 tokens, no tokenizer
    "features": RELEASE / "features",  # of its eight rows
    "drafter": RELEASE / "eagle3",  # trained on them
    "tiny": ROOT / "data/tiny-verifier",  # with a tokenizer and a chat template
    "corpus": ROOT / "data/corpus/heldout.jsonl",  # conversations
}
MEMORY, SECONDS = 2 << 30, 60  # that a case may take beyond what the imports took
# how a function of the library refuses; a TypeError only where `expect` says TypeError
ANSWERS = ValueError, OSError, ImportError, FloatingPointError


class Case(NamedTuple):
    "One bad input: a command line, or a call of a function."

    name: str  # what is bad; unique within its table
    # what is typed after `speculators-nb`, with names of GOOD in braces; or a function of the case's folder that
    # returns a report or raises
    what: str | Callable[[Path], object]
    # regular expression, found in the error line or in the report: the field, the value, a word of the remedy
    expect: str
    # name -> text, bytes, a function of the path, or anything else, which is written as JSON; {here} is filled in texts
    files: dict = {}
    counted: bool = False  # True: the run must succeed, and say so in its report; False: it must be refused

    @property
    def where(self):
        "The command or the function that is given bad input."
        return self.what.split()[0] if isinstance(self.what, str) else self.name.split(":")[0]


class Outcome(NamedTuple):
    "What became of a case."

    kind: str  # "refused", "done", "traceback", "killed"
    text: str  # the error line, the report, the traceback, or the signal
    megabytes: int  # peak of the case's own memory
    seconds: float


class _Refused(Exception):
    "A command ended with exit code 2; the text is what it wrote to stderr."


def _fill(text, folder):
    for name, path in {"here": folder, **GOOD}.items():
        text = text.replace("{" + name + "}", str(path))
    return text


def write_files(case: Case, folder: Path):
    "Put the case's own files into its folder."
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            text = _fill(content, folder) if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8", errors="surrogatepass")


def error_line(text):
    """The one line in which a command refuses: it begins with Error: and is the last; None if there is no such line, or
    more than one."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error: ")]
    return (
        errors[0]
        if len(errors) == 1 and lines[-1] == errors[0] and "Traceback (most recent call last)" not in text
        else None
    )


@functools.cache
def program():
    "The commands, made once and not anew for each case."
    import typer

    from speculators_nb.cli import main as cli

    return typer.main.get_command(cli.app)


def typed(words):
    "Run a command in this process, without a limit. Returns (exit code, stdout, stderr)."
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+", errors="backslashreplace") as err,
    ):  # as of a real process
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = program()(words)
            except SystemExit as e:
                code = e.code
        out.seek(0), err.seek(0)
        return code or 0, out.read(), err.read()


def _type(line, folder):
    "Run a command in this process. Returns all that it printed."
    code, printed, wrong = typed(shlex.split(_fill(line, folder)))
    if code not in (0, 2):
        raise RuntimeError(f"exit code {code}: {wrong}")
    if code == 2:
        raise _Refused(wrong)
    return printed + wrong


def _try(case, folder):
    "(kind, text) of a case, in this process."
    try:
        return "done", str(_type(case.what, folder) if isinstance(case.what, str) else case.what(folder))
    except _Refused as e:
        line = error_line(str(e))
        return ("refused", line) if line else ("traceback", str(e))
    except Exception as e:
        named = isinstance(e, ANSWERS) or (isinstance(e, TypeError) and "TypeError" in case.expect)
        text = f"{type(e).__name__}: {e}".strip()
        return ("refused", text) if named and "\n" not in text else ("traceback", traceback.format_exc())


def _kilobytes(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def run(case: Case, first: Callable[[], object] = lambda: None) -> Outcome:
    "Run a case in a child of this process, which calls `first` before that."
    with tempfile.TemporaryDirectory() as tmp:
        folder, report = Path(tmp) / "case", Path(tmp) / "report.json"
        folder.mkdir()
        write_files(case, folder)
        began, before = time.monotonic(), _kilobytes("VmRSS") // 1024
        if isinstance(case.what, str):
            program()
        sys.stdout.flush(), sys.stderr.flush()
        pid = os.fork()
        if not pid:
            try:
                if "torch" in sys.modules:  # a light case has not imported it
                    importlib.import_module("forked").without_cuda()
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1), os.dup2(quiet, 2)
                limit = _kilobytes("VmSize") * 1024 + MEMORY
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(SECONDS)
                os.chdir(folder)
                first()
                report.write_text(json.dumps(_try(case, folder)), encoding="utf-8", errors="backslashreplace")
            finally:
                os._exit(0)
        _, status, usage = os.wait4(pid, 0)
        seconds, megabytes = time.monotonic() - began, max(0, usage.ru_maxrss // 1024 - before)
        if os.WIFSIGNALED(status) or not report.exists():
            return Outcome(
                "killed",
                signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no report",
                megabytes,
                seconds,
            )
        return Outcome(*json.loads(report.read_text(encoding="utf-8")), megabytes, seconds)


def run_process(case: Case) -> Outcome:
    "Run a command as a user does: in a real process."
    with tempfile.TemporaryDirectory() as tmp:
        folder, began = Path(tmp), time.monotonic()
        write_files(case, folder)
        command = [Path(sys.executable).with_name("speculators-nb"), *shlex.split(_fill(case.what, folder))]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=2 * SECONDS)
        line = error_line(done.stderr)
        kind = "done" if done.returncode == 0 else "refused" if done.returncode == 2 and line else "traceback"
        return Outcome(kind, line or done.stdout + done.stderr, 0, time.monotonic() - began)


def complaint(case: Case, outcome: Outcome) -> str | None:
    "None if the case passes, else what is wrong."
    if outcome.kind != (want := "done" if case.counted else "refused"):
        return f"{case.where}: {case.name}: {outcome.kind}, must be {want}: {outcome.text[-3000:]}"
    if not re.search(case.expect, outcome.text, re.IGNORECASE | re.DOTALL):
        return f"{case.where}: {case.name}: {outcome.text!r} does not match {case.expect!r}"
    return None
