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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import typer

from ..core.files import read_object, write_object
from ..core.options import HERE, check_options, shown, typed
from ..core.provenance import identify, without_secrets
from .command import one_line
from .main import app
from .recipe import command_of, loads_drafters, read_sections, recipe_section

# ---- the stages of a recipe


class Stage(NamedTuple):
    "A section of a recipe."

    name: str  # of the section
    command: str
    values: dict  # every argument
    output: Path | None  # folder or file that it writes; None: it prints
    function: Callable  # of the command


def same_place(a: str | os.PathLike, b: str | os.PathLike) -> bool:
    "Whether two places are the same, or one is inside the other, by their names; nothing has to exist."
    a, b = (os.path.abspath(p) for p in (a, b))
    return os.path.commonpath((a, b)) in (a, b)


def paths_of(stage: Stage) -> dict[str, str]:  # argument -> text
    "The arguments that may name something that the stage reads."
    written = app.outputs[stage.command]
    given = {k: v for k, v in stage.values.items() if isinstance(v, (str, Path)) and k != written}
    for name in ("runs", "evaluation"):
        for i, text in enumerate(stage.values.get(name) or (), 1):
            given[f"{name} {i}"] = text.rpartition("=")[2]
    return {k: str(v) for k, v in given.items()}


def depends_on(stage: Stage, earlier: Stage) -> list[str]:
    "The arguments of a stage that name the output of an earlier one."
    if earlier.output is None:
        return []
    return [name for name, place in paths_of(stage).items() if same_place(place, earlier.output)]


NOT_A_STAGE = "run", "demo", "real", "experiment"


def _run_section(output_dir: Path | None = None, import_: list[str] | None = None):
    "What a section `run` may set."


def stages_of(path: str | os.PathLike, imports: list[str] | None = None) -> tuple[list[Stage], dict]:
    """The stages of a recipe in order (`imports`: modules that register drafters, for every stage), and the arguments
    of its section `run`. Errors: ValueError as of `read_sections`; for a recipe without a stage; for an output that a
    stage would lose when another is made again."""
    sections = read_sections(path, {**app.functions, "run": _run_section})
    own = sections.pop("run", {})
    stages: list[Stage] = []
    for name, values in sections.items():
        if name in NOT_A_STAGE:
            raise ValueError(f"{path}: section {name}: is no stage of a run; leave it out")
        command = command_of(name)
        function = app.functions[command]
        if imports and loads_drafters(function):
            values["import"] = list(dict.fromkeys([*values.get("import", []), *imports]))
        place = values.get(app.outputs[command] or "") or (values["data_dir"] if command == "vocab" else None)
        output = Path(place) if place else None
        stage = Stage(name, command, values, output, function)
        if output and Path.cwd().is_relative_to(output.resolve()):
            raise ValueError(
                f"{path}: {name} writes to {output}, which holds the working folder; give the stage a folder of its own"
            )
        for other in stages if output else ():
            if output == other.output and command == other.command:
                raise ValueError(
                    f"{path}: {name} and {other.name} both write to {output}; name another folder for one of them"
                )
            inside = output and other.output and output != other.output and same_place(output, other.output)
            if inside and not depends_on(stage, other):
                raise ValueError(
                    f"{path}: the outputs of {name} ({output}) and {other.name} ({other.output}) are one inside the "
                    "other; name a folder apart"
                )
        stages.append(stage)
    if not stages:
        names = ", ".join(n for n in app.functions if n not in NOT_A_STAGE)
        raise ValueError(f"{path}: has no section to run; write one of {names}")
    return stages, own


def folder_of(stages: list[Stage], own: dict) -> Path:
    "Where the record and the report go: as the recipe says, else the outputs' common folder."
    if own.get("output_dir"):
        return Path(own["output_dir"])
    outputs = [os.path.abspath(s.output) for s in stages if s.output is not None]
    if not outputs:
        raise ValueError("the recipe writes nothing; name a folder: run: {output_dir: FOLDER}")
    common = os.path.commonpath(outputs)
    folder = Path(os.path.relpath(common if len(outputs) > 1 else os.path.dirname(common)))
    return folder.parent if folder in [s.output for s in stages] else folder


# arguments that a stage reads; another text is a number, a name, or where it writes
READS = (
    *("data", "data_dir", "drafter", "folder", "checkpoint", "from_pretrained", "prepared"),
    *("features", "runs", "evaluation"),
)


def missing_inputs(stages: list[Stage], wanted: list[Stage]) -> list[str]:  # one line for each
    "What a stage reads that is not there, and that no stage before it makes."
    problems = []
    for i, stage in enumerate(stages):
        made = {name for other in stages[:i] for name in depends_on(stage, other)}
        for name, place in paths_of(stage).items() if stage in wanted else ():
            if name.split()[0] not in READS or name in made or os.path.exists(place):
                continue
            # `org/name` may be a hub id, and `gsm8k` a data set
            is_path = place.startswith((".", "/", "~")) or place.count("/") > 1 or Path(place).suffix
            if not is_path or place.startswith(("hf:", "http://", "https://")):
                continue
            later = [other.name for other in stages[i:] if name in depends_on(stage, other)]
            before = [other for other in stages[:i] if other.output is not None][-1:]
            why = "there is no such file or folder, and no section before it makes it"
            if later:
                why = f"is made by {later[0]}, which comes after; move that section up"
            elif before:
                why += f" ({before[0].name} makes {before[0].output})"
            problems.append(f"{stage.name}.{name}={shown(place)}: {why}")
    return problems


# ---- what is done: the record of a run

# arguments of a command that do not change what comes out
SHARED = "server", "concurrency", "patience", "engine", "device"
HOW = {
    "regenerate": (*SHARED, "batch_size"),
    "prepare": ("num_proc",),
    "features": (*SHARED, "storage", "max_tokens"),
    "train": ("server", "storage", "patience"),
}


def is_there(output: Path) -> bool:
    "Whether it is a file, or a folder that holds something."
    return any(output.iterdir()) if output.is_dir() else output.exists()


def inputs_of(stage: Stage) -> dict[str, dict]:  # argument -> what `identify` says
    "What a stage reads, and its result depends on, as it is now."
    paths = {name: place for name, place in paths_of(stage).items() if name not in HOW.get(stage.command, ())}
    return {name: identify(place) for name, place in paths.items() if os.path.exists(place)}


class RunRecord:
    "The file `run.json` of a run, written as a whole at each change. Errors: ValueError for one that is none."

    def __init__(self, folder: Path):
        self.file = folder / "run.json"
        stages = read_object(self.file).get("stages") if self.file.is_file() else {}
        if not isinstance(stages, dict) or not all(isinstance(stage, dict) for stage in stages.values()):
            raise ValueError(
                f"{self.file}: is no record of a run; name another folder in the recipe, as run: {{output_dir: FOLDER}}"
            )
        self.stages: dict[str, dict[str, Any]] = stages

    def write(self):
        write_object(self.file, {"stages": self.stages})

    def entry(self, stage: Stage) -> dict[str, Any]:
        "What is known of a stage; of one that wrote elsewhere before, whether it is outdated."
        entry = self.stages.get(stage.name, {})
        # what from-gguf and stitch-mtp write was recorded as an argument alone
        place = entry.get("output") or entry.get("arguments", {}).get(app.outputs[stage.command] or "")
        here = (place and Path(place)) == stage.output
        return entry if here else {k: v for k, v in entry.items() if k == "outdated"}

    def begin(self, stage: Stage, after: list[Stage]):
        "Note that a stage has begun: until it ends, nothing after it is done."
        self.stages[stage.name] = {
            "command": stage.command,
            "output": stage.output and str(stage.output),
            "fresh": self.is_fresh(stage),
            "arguments": recipe_section(stage.values),
            "inputs": inputs_of(stage),
        }
        self.outdate(stage, after)

    def outdate(self, stage: Stage, after: list[Stage]):
        "Note that later stages have read what a stage makes again."
        for later in after:
            entry = self.stages.setdefault(later.name, {})
            if entry.get("done") or (later.output is not None and later.output.exists()):
                entry["outdated"] = stage.name
        self.write()

    def is_fresh(self, stage: Stage) -> bool:
        "Whether all that is in a stage's output is its own, so that it may be removed."
        return stage.output is None or not is_there(stage.output) or self.entry(stage).get("fresh", False)

    def skip(self, stage: Stage, why: str):
        "Note that a stage does not run on this machine; what is known of an earlier result is kept, but that it fits."
        known = {name: v for name, v in self.entry(stage).items() if name not in ("done", "seconds", "code", "text")}
        self.stages[stage.name] = known | {"command": stage.command, "skipped": why}
        self.write()

    def end(self, stage: Stage, seconds: float, **found: Any):
        "Note that a stage has ended. What it read is as it was at the beginning, but for what it has written into."
        entry, now, written = self.stages[stage.name], inputs_of(stage), depends_on(stage, stage)
        inputs = entry["inputs"] | {name: now[name] for name in written if name in now}
        entry |= {"done": True, "inputs": inputs, "seconds": round(seconds, 1), **found}
        self.write()


def changes_of(stage: Stage, entry: Mapping) -> list[str]:
    "What differs between the record of a stage and the recipe."
    defaults = inspect.signature(stage.function).parameters
    new, old, changed = recipe_section(stage.values), entry["arguments"], []
    for name in {**new, **old}:
        default = defaults[name].default if name in defaults else None
        was, now = old.get(name, default), new.get(name)
        if name not in HOW.get(stage.command, ()) and was != now:
            changed.append(f"{name} was {shown(was)}, is {shown(now)}")
    inputs = entry.get("inputs", {}).items()
    return changed or [f"{role} has changed" for role, was in inputs if identify(was["path"]) != was]


# ---- what is to be done


class Planned(NamedTuple):
    "A stage, and what is to be done for it."

    stage: Stage
    state: str  # done, will run, will continue, will reuse, will run again, skipped
    why: str

    @property
    def runs(self) -> bool:
        return self.state.startswith("will")


def plan_of(stages: list[Stage], record: RunRecord) -> list[Planned]:
    "What is to be done, stage by stage, and why."
    planned, remade = [], []
    for stage in stages:
        entry, output = record.entry(stage), stage.output
        there, begun = output is not None and is_there(output), "arguments" in entry
        follows = [entry["outdated"]] if "outdated" in entry else [s.name for s in remade if depends_on(stage, s)]
        changed = changes_of(stage, entry) if begun else []
        if output is not None and not there:
            state, why = "will run", f"{output} is not there"
        elif follows and (there or entry.get("done")):
            state, why = "will run again", f"{follows[0]} is made again"
        elif changed:
            state, why = "will run again", "; ".join(changed)
        elif entry.get("done"):
            state, why = "done", "nothing changed"
        elif not there:
            state, why = "will run", "it has not run"
        elif begun:
            state, why = "will continue", "it has not finished"
        else:
            state = "will reuse"
            why = "what is there was not made by this run: what fits is kept and completed, else refused"
        if state != "done" and (missing := _not_here(stage)):
            state, why = "skipped", missing
        if state in ("will run", "will run again", "will continue"):
            remade.append(stage)
        planned.append(Planned(stage, state, why))
    return planned


def _not_here(stage) -> str | None:
    "Why a stage cannot run on this machine, if it is one that measures vLLM."
    if stage.command != "evaluate" or stage.values.get("engine") != "vllm" or stage.values.get("server"):
        return None
    from ..serve.server import find_executable

    try:
        find_executable("vllm", stage.values.get("vllm"))
    except FileNotFoundError as e:
        drafter = stage.values.get("drafter") or stage.values.get("verifier")
        return (
            f"{str(e).partition('.')[0]}; make vllm, or start it on another machine "
            f"(speculators-nb serve {drafter} --run) and give its address as server"
        )


def checked_plan(recipe: str | os.PathLike, stages: list[Stage], record: RunRecord, overwrite: bool) -> list[Planned]:
    """Print the plan. Errors: ValueError where something that a stage reads is missing; FileExistsError where something
    that is there would be made again."""
    planned = plan_of(stages, record)
    rows = [(p.stage.name, p.state, str(p.stage.output or "-"), p.why) for p in planned]
    rows = [("stage", "state", "output", "why"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(row, widths)), row[3]]).rstrip() for row in rows]
    typer.echo("\n".join(lines) + servers_text(planned))
    for stage, sharing in ((p.stage, p.stage.values.get("context_parallel_size", 1)) for p in planned if p.runs):
        if sharing > 1:  # also in the child process of a stage there is one rank
            raise ValueError(
                f"{stage.name}.context_parallel_size={sharing}: a run trains in one process; leave it out, or put the "
                f"section into a recipe of its own: speculators-nb-torchrun --nproc-per-node {sharing} train --recipe …"
            )
    if problems := missing_inputs(stages, [p.stage for p in planned if p.runs]):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{recipe}: {problems[0]}{more}")
    again = [p for p in planned if p.state == "will run again" and p.stage.output and not overwrite]
    if again:
        first, rest = again[0], ", ".join(p.stage.name for p in again[1:])
        raise FileExistsError(
            f"{first.stage.name}: {first.stage.output} was made otherwise ({first.why}). Give --overwrite to make it "
            f"again{f', with {rest}' if rest else ''}; or name another folder in the recipe"
        )
    return planned


# ---- servers that stages read from: a run starts none


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
    if host not in ("127.0.0.1", "localhost", "::1"):
        given["host"] = host
    given["port"] = port
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", value]
    for layer in (values.get("aux_layer_ids") if values.get("storage") else None) or ():
        words += ["--aux-layer-ids", layer]
    if drafter:
        words += [f"--extra={argument}" for argument in PER_REQUEST]
    return "speculators-nb " + shlex.join(map(str, [*words, "--run"]))


def server_problem(stage: Stage) -> str | None:
    """What to type where no server that a stage reads from answers (None: one does, or it needs none); some absent ones
    are named."""
    named, silent = addresses(stage), []
    for address in named:
        try:
            socket.create_connection(host_and_port(address), 5).close()
        except OSError:
            silent.append(address)
    if silent and silent == named:
        return (
            f"server={', '.join(silent)!r} does not answer; start it in another terminal "
            f"({serve_line(stage, silent[0])}), and run the same command again"
        )
    for address in silent:
        typer.echo(f"server={address!r} does not answer: {stage.name} begins without it")
    return None


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


# ---- a stage at work


def in_child(command: str, values: dict, sender: Any):
    "What the process of a stage does: its exit code is the command's, and what it printed is sent."
    import torch

    # torch makes its threads anew after a fork, and fails where two threads are the first to ask for them
    torch.set_num_threads(torch.get_num_threads())
    printed, write, code = [], sys.stdout.write, 0

    def tee(text):
        count = write(text)
        printed.append(text)
        return count

    sys.stdout.write = tee
    try:
        with one_line(app.functions[command]):
            try:
                app.perform[command](values)
            except typer.Exit as verdict:
                code = verdict.exit_code
    except typer.Exit as e:  # 1 is a verdict's alone
        code = max(e.exit_code, 2)
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sender.send("".join(printed)[-10_000:])
    os._exit(code)  # not a second time what the parent has registered for its end


class StageFailed(RuntimeError):
    "A stage has ended without its result."


def in_process(stage: Stage, values: dict) -> tuple[int, str]:
    """Run a stage in a process of its own: its exit code, and what it printed. Errors: StageFailed for a process that
    was killed; KeyboardInterrupt once it has ended."""
    import torch

    fresh = torch.accelerator.is_available() or sys.platform != "linux"
    if not fresh:
        import_module(stage.function.__module__)
    context: Any = multiprocessing.get_context("spawn" if fresh else "fork")
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    process = context.Process(target=in_child, args=(stage.command, values, sender))
    process.start()
    sender.close()
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
            f"{stage.name}: its process was ended by signal {-process.exitcode} (9 is also what a "
            "machine does that is out of memory); run the same command again to continue"
        )
    return process.exitcode, text


FINDINGS = "check", "doctor"  # exit code 1 is a finding, and the run goes on


def arguments_for(planned: Planned, begun: bool, fresh: bool) -> dict:
    """The arguments of a stage, with what is to become of its output. What a command cannot
    replace by itself is removed. Errors: FileExistsError where that is not the stage's own."""
    stage, values = planned.stage, dict(planned.stage.values)
    takes = inspect.signature(stage.function).parameters
    if planned.state in ("will continue", "will reuse"):
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


def run_stage(planned, stages, record):
    "Run one stage to its end, and note it."
    stage = planned.stage
    after = [s for s in stages[stages.index(stage) + 1 :] if depends_on(s, stage)]
    if problem := server_problem(stage):
        if after or stage.command != "evaluate":
            raise ConnectionError(f"{stage.name}: {problem}")
        record.skip(stage, problem)
        typer.echo(f"skipped: {problem}")
        return
    values = arguments_for(planned, begun="arguments" in record.entry(stage), fresh=record.is_fresh(stage))
    reused = stage.output if planned.state == "will reuse" else None
    before = reused and identify(reused)
    record.begin(stage, [] if reused else after)
    began = time.monotonic()
    code, text = in_process(stage, values)
    if code and not (stage.command in FINDINGS and code == 1):
        raise StageFailed(
            f"{stage.name}: ended with exit code {code}; mend what it says, and run the same "
            "command again: what is done is kept"
        )
    kept = {"text": without_secrets(text.strip())} if stage.output is None else {}
    record.end(stage, time.monotonic() - began, code=code, **kept)
    if reused and identify(reused) != before:  # it was not complete
        record.outdate(stage, after)


def run(
    recipe: Path,  # YAML or JSON, with a section for each command to run
    output_dir: Path | None = None,  # for report.html, run.json; default: where the outputs are
    dry_run: bool = False,  # print what is done and what would run, and do nothing
    overwrite: bool = False,  # make again what has changed, with all that follows it
    import_: list[str] | None = None,  # modules or .py files that register drafters
) -> list[str]:  # stages that have run
    """Run a recipe: every section in order, from conversations to a report. Run it again to
    continue: what is done is skipped."""
    # ValueError: the recipe cannot run; FileExistsError: an output would be replaced; BlockingIOError: another run, or
    # a stage that survived one, is at work; StageFailed
    from ..jobs.shared_output import share_writer

    stages, own = stages_of(recipe, import_)
    folder = output_dir or folder_of(stages, own)
    planned = checked_plan(recipe, stages, RunRecord(folder), overwrite)
    page = folder / "report.html"
    if dry_run or (page.is_file() and not any(p.runs for p in planned)):
        return []
    ran = []
    with share_writer(folder, folder / ".run"):
        record = RunRecord(folder)
        for i, stage in enumerate(stages):
            next_one = plan_of(stages, record)[i]
            if next_one.state == "skipped":
                record.skip(stage, next_one.why)
            if next_one.runs:
                typer.echo(f"\n[{i + 1}/{len(stages)}] {stage.name}: {next_one.state}")
                run_stage(next_one, stages, record)
                if record.stages[stage.name].get("done"):
                    ran.append(stage.name)
        report = import_module("speculators_nb.report.run_report")  # pandas, matplotlib
        typer.echo(f"\nReport: {report.write_run_report(folder, [stage.name for stage in stages])}")
    return ran


def plan(
    recipe: Path,  # YAML or JSON, with sections features and train, or one of them
    verifier: str | None = None,  # folder or hub id of another; only config.json is read
    conversations: int | None = None,  # default: as prepared, else of the recipe, else 50,000
    tokens_each: int = 1000,  # of a conversation, where no prepared folder is there to count
    devices: int = 1,  # that train
    memory: float | None = None,  # GB of one; default: of this machine's, if it has any
    disk: float | None = None,  # GB free for features; default: where the recipe writes them
    tflops: float | None = None,  # of one device in bfloat16; default: an H100's, or measured here
    mfu: float | None = None,  # share of it that is reached; default: as measured with the drafter
    bandwidth: float | None = None,  # of a device's memory, TB/s; default: as tflops
) -> Any:  # plan.requirements.Requirements
    """What a recipe needs: disk, memory of a training step, the time of each stage, servers; what
    does not fit, and the option that makes it fit. No stage is started, no weights are read. Without
    an option that describes a machine it is about this one."""
    check_options(locals(), "plan")
    stages = stages_of(recipe)[0]
    # after a wrong recipe is refused: this imports torch
    from ..plan.requirements import GB, machine_of, requirements, training_values

    sections = {stage.name: stage.values for stage in stages}
    train = sections.get("train", {})
    start = train.get("from_pretrained")
    others = (stage.output for stage in stages if stage.output and stage.command != "train")
    if start and not Path(start).exists() and any(same_place(start, output) for output in others):
        # another stage makes it: nothing is known of it but what the recipe says
        sections["train"] = train | {"from_pretrained": None}
    read = (train | sections.get("features", {})).get("verifier")
    if verifier is None and read and not Path(read).exists():
        makers = [stage for stage in stages if stage.output and same_place(read, stage.output)]
        if makers:
            raise ValueError(
                f"{recipe}: verifier={read!r}: is not there yet, {makers[0].name} makes it; run speculators-nb "
                f"{makers[0].command} --recipe {recipe} first, or name a model of the same sizes (--verifier)"
            )
    algorithm = training_values(sections["train"])["algorithm"] if "train" in sections else ""
    place = None if memory is None else memory * GB
    machine = machine_of(algorithm, devices, place, tflops, mfu, bandwidth)
    free = None if disk is None else disk * GB
    return requirements(sections, verifier, conversations, tokens_each, machine, free)
