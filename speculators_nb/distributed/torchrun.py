"""The processes (ranks) of one training job, started by torchrun's elastic agent.
Where a rank fails, the job ends and the last line names it, its signal or exception, and the remedy."""

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PROGRAM = "speculators-nb"


def torchrun_line(devices: int, argv: list[str]) -> str:
    """The command, as it is typed in a shell, that runs this program (argv: its name first) with one rank for each
    device of this machine."""
    name = Path(argv[0]).name
    if "ipykernel" in name or name in ("", "-c"):  # a notebook, or python -c
        return f"torchrun --nproc-per-node {devices} SCRIPT.py"
    if name == PROGRAM:
        return f"{PROGRAM}-torchrun --nproc-per-node {devices} {shlex.join(argv[1:])}"
    return f"torchrun --nproc-per-node {devices} {shlex.join(argv)}"


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LOST = re.compile("gloo|nccl|connection (closed|reset)|broken pipe|socket|process group", re.IGNORECASE)
PATIENCE = 40.0  # seconds in which torchrun ends the other ranks


def this_rank() -> int:
    "The rank of this process; 0 outside of a job."
    return int(os.environ.get("RANK") or 0)


def is_lost_connection(e: BaseException) -> bool:
    "Whether an error that ends this rank is of a collective operation that failed because another rank is gone."
    kind = type(e)
    if kind.__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    return kind is RuntimeError and bool(LOST.search(str(e)))


def write_error(message: str, trace: str = "", **more: Any) -> None:
    """Write why this process ends, with the trace if a reader needs it and further fields, where torchrun or a
    scheduler has named a file for it."""
    file = os.environ.get(ERROR_FILE)
    if file:
        extra = {"py_callstack": trace or message, "timestamp": str(int(time.time())), **more}
        content = {"message": {"message": message, "extraInfo": extra}}
        Path(file).write_text(json.dumps(content), encoding="utf-8")


def end_rank(e: BaseException, message: str, code: int) -> str:
    """Leave the error of a rank for torchrun; its message is returned, with the rank. Exit code 2 is a mistake of the
    caller, 1 a fault of the program. A rank whose error another has caused waits for torchrun to end it."""
    rank = this_rank()
    if is_lost_connection(e):
        time.sleep(PATIENCE)
        message = "lost its connection to another rank, whose own error is the cause"
    trace = "".join(traceback.format_exception(e)) if code == 1 else ""
    write_error(message, trace, rank=rank)
    return f"rank {rank}: {message}"


def failure_line(rank: int, failure: Any, host: str) -> str:
    "Which rank, on which host, ended a job by failing first (torch's ProcessFailure), and why, in one line."
    who = f"rank {rank} on {host} (pid {failure.pid})"
    if failure.exitcode < 0:
        name = failure.signal_name()
        memory = ", as by a machine that is out of memory" if name == "SIGKILL" else ""
        why = f"was killed by signal {-failure.exitcode} ({name}{memory})"
    else:
        report = failure.message
        text = report.get("message", "") if isinstance(report, dict) else ""
        text = " ".join(str(text).split())[:1000]
        why = f"failed: {text}" if text else f"ended with exit code {failure.exitcode}"
    if failure.exitcode == 2:  # a mistake of the caller, with its remedy
        return f"Error: {who} {why}"
    return f"Error: {who} {why}. The job has ended; the same command with --resume continues it"


def first_failure(failures: dict[int, Any]) -> tuple[int, Any]:
    "The rank that failed first, with its failure; one that was ended by torchrun (SIGTERM) only if none else."
    ended = -signal.SIGTERM

    def order(rank):
        return failures[rank].exitcode == ended, failures[rank].timestamp, rank

    rank = min(failures, key=order)
    return rank, failures[rank]


def launch(args: list[str]) -> int:
    """Run torchrun's options and a command of speculators-nb on several ranks: the exit code. Where one fails, the last
    line on stderr names it."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = run.get_args_parser()
    own = parser.parse_args(args)
    before = args[: len(args) - len(own.training_script_args) - 1]
    words = [own.training_script, *own.training_script_args]
    program = "from speculators_nb.cli.main import app; app()"
    started = [*before, "--no-python", sys.executable, "-c", program, *words]
    try:
        run.run(run.parse_args(started))
    except ChildFailedError as e:
        rank, failure = first_failure(e.failures)
        line = failure_line(rank, failure, socket.gethostname())
        write_error(line, rank=rank, exitcode=failure.exitcode)
        print(line, file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as e:
        return 128 + e.sigval.value
    return 0


def main() -> None:
    "The program `speculators-nb-torchrun`."
    sys.exit(launch(sys.argv[1:]))
