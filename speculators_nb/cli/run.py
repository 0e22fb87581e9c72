"""The command `run`: every section of a recipe in order, from conversations to a report.
What is done is skipped, what was interrupted continues, and what has changed is made again with all that follows
it."""

import contextlib
import inspect
import multiprocessing
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from ..core.files import writable_folder
from ..core.options import HERE, typed
from ..core.provenance import without_secrets
from .plan import (
    Planned,
    RunRecord,
    Stage,
    depends_on,
    folder_of,
    is_there,
    missing_inputs,
    plan_of,
    plan_text,
    refuse_overwriting,
    stages_of,
)


class Tee:
    "Standard output that is also remembered."

    def __init__(self, stream):
        self.stream, self.text = stream, ""

    def write(self, text):
        self.text = (self.text + text)[-10_000:]
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def in_child(perform: Callable, command: str, values: dict, sender: Any):
    "What the process of a stage does; its exit code is the command's."
    sys.stdout = Tee(sys.stdout)
    code = 0
    try:
        perform(command, values)
    except typer.Exit as e:
        code = e.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sender.send(sys.stdout.text)
    os._exit(code)  # not a second time what the parent has registered for its end


def start(perform: Callable, function: Callable, command: str, values: dict) -> tuple[Any, Any]:
    "Start the process of a stage; what it printed comes through the connection."
    import torch

    fresh = torch.accelerator.is_available() or sys.platform != "linux"
    if not fresh:
        import_module(function.__module__)
    context: Any = multiprocessing.get_context("spawn" if fresh else "fork")
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    process = context.Process(target=in_child, args=(perform, command, values, sender))
    process.start()
    sender.close()
    return process, receiver


class StageFailed(RuntimeError):
    "A stage has ended without its result."


def wait_for_stage(process: Any, receiver: Any, name: str) -> tuple[int, str]:
    """The exit code of a stage, and what it printed. Errors: StageFailed for a process that was killed;
    KeyboardInterrupt once it has ended."""
    text = ""
    try:
        with contextlib.suppress(EOFError):
            text = receiver.recv()
        process.join()
    except KeyboardInterrupt:  # the stage has received it, too
        process.join(10)
        process.kill()
        raise
    if process.exitcode == 130:
        raise KeyboardInterrupt
    if process.exitcode < 0:
        raise StageFailed(
            f"{name}: its process was ended by signal {-process.exitcode} (9 is also what a "
            "machine does that is out of memory); run the same command again to continue"
        )
    return process.exitcode, text


FINDINGS = "check", "doctor"  # exit code 1 is a finding, and the run goes on


def arguments_for(planned: Planned, function: Callable, begun: bool, fresh: bool) -> dict:
    """The arguments of a stage, with what is to become of its output. What a command cannot
    replace by itself is removed. Errors: FileExistsError where that is not the stage's own."""
    stage, takes = planned.stage, inspect.signature(function).parameters
    values = dict(stage.values)
    if planned.state == "will continue":
        if "resume" in takes:
            values["resume"] = True
        elif "overwrite" in takes and begun:
            values["overwrite"] = True
    if planned.state == "will run again" and stage.output is not None:
        if "overwrite" in takes:
            values["overwrite"] = fresh
        elif is_there(stage.output) and not fresh:
            raise FileExistsError(
                f"{stage.name}: {stage.output} holds what this run did not make, and is not "
                "removed; name another place in the recipe, or remove it"
            )
        elif stage.output.is_dir() and not stage.output.is_symlink():
            shutil.rmtree(stage.output)
        else:
            stage.output.unlink(missing_ok=True)
    return values


@contextlib.contextmanager
def alone_in(folder: Path):
    "Errors: BlockingIOError where another run, or a stage that survived one, is at work."
    from filelock import FileLock, Timeout

    writable_folder(folder)
    lock = FileLock(folder / ".run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(f"{folder}: another run is at work there; wait for it, or end it") from None
    try:
        yield
    finally:
        lock.release()


def addresses(stage: Stage) -> list[str]:
    "The addresses of the servers that a stage reads from, if it needs any."
    if stage.values.get("source", "vllm") != "vllm":
        return []
    given = stage.values.get("server") or (HERE if stage.command == "features" else [])
    return [given] if isinstance(given, str) else list(given)


def host_and_port(address: str) -> tuple[str, int]:
    "Where to connect."
    place = urlsplit(address)
    return place.hostname or "127.0.0.1", place.port or (443 if place.scheme == "https" else 80)


def serve_line(stage: Stage, address: str) -> str:
    "What a person types to start a server that a stage reads from."
    from ..evaluate.vllm_metrics import PER_REQUEST

    values = stage.values
    host, port = host_and_port(address)
    drafter, verifier = values.get("drafter"), values.get("verifier")
    words = ["serve", typed(drafter or verifier or "VERIFIER")]
    given = {"hidden_states": values.get("storage")}
    if stage.command == "evaluate":
        given["verifier"] = verifier if drafter else None
        given |= {name: values.get(name) for name in ("dtype", "max_model_len")}
    if host not in ("127.0.0.1", "localhost", "::1"):
        given["host"] = host
    given["port"] = port
    for name, value in given.items():
        if value not in (None, "auto"):
            words += [f"--{name.replace('_', '-')}", value]
    for layer in (values.get("aux_layer_ids") if values.get("storage") else None) or ():
        words += ["--aux-layer-ids", layer]
    extra = [*(values.get("extra") or ()), *(PER_REQUEST if drafter else ())]
    words += [f"--extra={argument}" for argument in extra]
    return "speculators-nb " + shlex.join(map(str, [*words, "--run"]))


def answers(address: str) -> bool:
    "Whether something listens there."
    with contextlib.suppress(OSError), socket.create_connection(host_and_port(address), 5):
        return True
    return False


def server_problem(stage: Stage) -> str | None:
    """What to type where no server that a stage reads from answers (None: one does, or it needs none); some absent ones
    are named."""
    named = addresses(stage)
    silent = [address for address in named if not answers(address)]
    if len(silent) < len(named):
        for address in silent:
            typer.echo(f"server={address!r} does not answer: {stage.name} begins without it")
    if not silent or len(silent) < len(named):
        return None
    return (
        f"server={', '.join(silent)!r} does not answer; start it in another terminal "
        f"({serve_line(stage, silent[0])}), and run the same command again"
    )


def servers_text(planned: list[Planned]) -> str:  # "": no stage that will run needs one
    "The servers that must be up while their stage runs, each with its command."
    lines = [
        f"  {p.stage.name}: {address}  {serve_line(p.stage, address)}"
        for p in planned
        if p.runs
        for address in addresses(p.stage)
    ]
    heading = "\nA run starts no server; each must be up while its stage runs:"
    return "\n".join([heading, *lines]) if lines else ""


def run_stage(planned, stages, record, commands, perform):
    "Run one stage to its end, and note it."
    stage, function = planned.stage, commands[planned.stage.command]
    after = [s for s in stages[stages.index(stage) + 1 :] if depends_on(s, stage)]
    if problem := server_problem(stage):
        if after or stage.command != "evaluate":
            raise ConnectionError(f"{stage.name}: {problem}")
        record.skip(stage, problem)
        typer.echo(f"skipped: {problem}")
        return
    values = arguments_for(planned, function, record.has_begun(stage), fresh=record.is_fresh(stage))
    record.begin(stage, after)
    began = time.monotonic()
    process, receiver = start(perform, function, stage.command, values)
    code, text = wait_for_stage(process, receiver, stage.name)
    if code and not (stage.command in FINDINGS and code == 1):
        raise StageFailed(
            f"{stage.name}: ended with exit code {code}; mend what it says, and run the same "
            "command again: what is done is kept"
        )
    kept = {"text": without_secrets(text.strip())} if stage.output is None else {}
    record.end(stage, time.monotonic() - began, code=code, **kept)


def checked_plan(
    recipe: str | os.PathLike,
    stages: list[Stage],
    record: RunRecord,
    commands: Mapping[str, Callable],
    overwrite: bool = False,
) -> list[Planned]:
    "Print the plan. Errors: ValueError, FileExistsError where it cannot be carried out."
    planned = plan_of(stages, record, commands)
    typer.echo(plan_text(planned) + servers_text(planned))
    if problems := missing_inputs(stages, [p.stage for p in planned if p.runs]):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{recipe}: {problems[0]}{more}")
    refuse_overwriting(planned, overwrite)
    return planned


def run_recipe(
    recipe: str | os.PathLike,  # YAML or JSON, with a section for each command to run
    commands: Mapping[str, Callable],  # every command's function
    outputs: Mapping[str, str | None],  # command -> the argument that names its output
    perform: Callable,  # (command, values): runs one; at the top of a module
    output_dir: Path | None = None,  # for the record and the report; None: as in `folder_of`
    dry_run: bool = False,  # print the plan, and do nothing
    overwrite: bool = False,  # make again what has changed, though it is there
    imports: list[str] | None = None,  # modules and files that register drafters
) -> list[str]:  # stages that have run
    """Run every section of a recipe. Errors: ValueError for a recipe that cannot run;
    FileExistsError for an output that would be replaced; StageFailed."""
    stages, own = stages_of(recipe, commands, outputs, imports)
    folder = output_dir or folder_of(stages, own)
    planned = checked_plan(recipe, stages, RunRecord(folder), commands, overwrite)
    page = folder / "report.html"
    if dry_run or (page.is_file() and not any(p.runs for p in planned)):
        return []
    ran = []
    with alone_in(folder):
        record = RunRecord(folder)
        for i, stage in enumerate(stages):
            next_one = plan_of(stages, record, commands)[i]
            if next_one.state == "skipped":
                record.skip(stage, next_one.why)
            entry = record.stages.get(stage.name, {})
            if next_one.state == "done" and "arguments" in entry and not entry.get("done"):
                record.end(stage)  # killed between its last file and this note
            if next_one.runs:
                typer.echo(f"\n[{i + 1}/{len(stages)}] {stage.name}: {next_one.state}")
                run_stage(next_one, stages, record, commands, perform)
                if record.stages[stage.name].get("done"):
                    ran.append(stage.name)
        report = import_module("speculators_nb.report.run_report")  # pandas, matplotlib
        typer.echo(f"\nReport: {report.write_run_report(folder)}")
    return ran
