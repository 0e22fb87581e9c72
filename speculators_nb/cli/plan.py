"""The stages of a recipe: what is done, what was interrupted, what has changed.
They are compared with what their outputs say of how they were made."""

import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..core.files import atomic_write, read_object
from ..core.options import shown
from ..core.provenance import RECORDS, identify, provenance_path
from .own_drafters import loads_drafters
from .recipe import command_of, read_sections, recipe_path, recipe_section


class Stage(NamedTuple):
    "A section of a recipe."

    name: str  # of the section
    command: str
    values: dict  # every argument
    output: Path | None  # folder or file that it writes; None: it prints


def same_place(a: str | os.PathLike, b: str | os.PathLike) -> bool:
    "Whether two places are the same, or one is inside the other, by their names; nothing has to exist."
    a, b = (os.path.abspath(p) for p in (a, b))
    return os.path.commonpath((a, b)) in (a, b)


def paths_of(stage: Stage) -> dict[str, str]:  # argument -> text
    "The arguments that may name something that the stage reads."
    given = {k: v for k, v in stage.values.items() if isinstance(v, (str, Path))}
    lists = {k: v for k, v in stage.values.items() if k in ("runs", "data", "evaluations")}
    for name, texts in lists.items():
        if isinstance(texts, list):
            given |= {f"{name} {i}": t.rpartition("=")[2] for i, t in enumerate(texts, 1)}
    return {k: str(v) for k, v in given.items() if Path(v) != stage.output}


def depends_on(stage: Stage, earlier: Stage) -> list[str]:
    "The arguments of a stage that name the output of an earlier one."
    if earlier.output is None:
        return []
    places = paths_of(stage).items()
    return [name for name, place in places if same_place(place, earlier.output)]


def _check_place(path, stage, earlier):
    "Errors: ValueError for an output that a stage would lose when another is made again."
    if stage.output is None:
        return
    if Path.cwd().is_relative_to(stage.output.resolve()):
        raise ValueError(
            f"{path}: {stage.name} writes to {stage.output}, which holds the working folder; "
            "give the stage a folder of its own"
        )
    for other in earlier:
        if stage.output == other.output and stage.command == other.command:
            raise ValueError(
                f"{path}: {stage.name} and {other.name} both write to {stage.output}; name "
                "another folder for one of them"
            )
        apart = other.output is None or not same_place(stage.output, other.output)
        if not apart and not depends_on(stage, other) and stage.output != other.output:
            raise ValueError(
                f"{path}: the outputs of {stage.name} ({stage.output}) and {other.name} "
                f"({other.output}) are one inside the other; name a folder apart"
            )


# arguments that a stage reads; another text is a number, a name, or where it writes
READS = (
    *("data", "data_dir", "drafter", "folder", "checkpoint", "from_pretrained", "prepared"),
    *("features", "runs", "evaluations"),
)
NOT_A_STAGE = "run", "demo", "real", "experiment"


def stages_of(
    path: str | os.PathLike,  # a recipe
    commands: Mapping[str, Callable],  # every command's function
    outputs: Mapping[str, str | None],  # command -> the argument that names its output
    imports: list[str] | None = None,  # for every stage: modules that register drafters
) -> tuple[list[Stage], dict]:  # the stages in order; the arguments of the section `run`
    """The stages of a recipe. Errors: ValueError as of `read_sections`; for a recipe without a
    stage; for two stages that write to one place."""
    sections = read_sections(path, {n: f for n, f in commands.items() if n != "run"} | _OWN)
    own = sections.pop("run", {})
    stages = []
    for name, values in sections.items():
        if name in NOT_A_STAGE:
            raise ValueError(f"{path}: section {name}: is no stage of a run; leave it out")
        command = command_of(name)
        if imports and loads_drafters(commands[command]):
            names = [*values.get("import", []), *imports]
            values["import"] = list(dict.fromkeys(names))
        output = values.get(outputs.get(command) or "")
        if command == "vocab" and output is None:
            output = values["data_dir"]
        stages.append(Stage(name, command, values, Path(output) if output else None))
    if not stages:
        names = ", ".join(n for n in commands if n not in NOT_A_STAGE)
        raise ValueError(f"{path}: has no section to run; write one of {names}")
    for i, stage in enumerate(stages):
        _check_place(path, stage, stages[:i])
    return stages, own


def _run_section(output_dir: Path | None = None, import_: list[str] | None = None): ...


_OWN = {"run": _run_section}  # what a section `run` may set


def missing_inputs(stages: list[Stage], wanted: list[Stage]) -> list[str]:  # one line for each
    "What a stage reads that is not there, and that no stage before it makes."
    problems = []
    for i, stage in enumerate(stages):
        for name, place in paths_of(stage).items():
            made = any(name in depends_on(stage, other) for other in stages[:i])
            known = made or os.path.exists(place) or not _is_path(place)
            if stage not in wanted or name.split()[0] not in READS or known:
                continue
            later = [other for other in stages[i:] if name in depends_on(stage, other)]
            near = [other for other in stages[:i] if other.output is not None][-1:]
            why = "there is no such file or folder, and no section before it makes it"
            if later:
                why = f"is made by {later[0].name}, which comes after; move that section up"
            elif near:
                why += f" ({near[0].name} makes {near[0].output})"
            problems.append(f"{stage.name}.{name}={shown(place)}: {why}")
    return problems


def _is_path(text):
    "Whether a text can only be a path: `org/name` may be a hub id, and `gsm8k` a data set."
    hub = text.startswith(("hf:", "http://", "https://"))
    pathlike = text.startswith((".", "/", "~")) or text.count("/") > 1 or Path(text).suffix
    return not hub and bool(pathlike)


# arguments of a command that do not change what comes out
HOW = {
    "regenerate": ("server", "concurrency", "batch_size", "device"),
    "prepare": ("num_proc",),
    "features": ("server", "storage", "concurrency", "max_tokens", "device"),
    "train": ("server", "storage"),
}


class Made(NamedTuple):
    "How something was made."

    arguments: dict  # as a recipe stores them
    inputs: dict[str, dict]  # role -> what `identify` found


def made_by(stage: Stage) -> Made | None:
    "What the output of a stage says of how it was made; None: the stage has not finished there."
    if stage.output is None:
        return None
    recipe = recipe_path(stage.output, stage.command)
    files = [stage.output / name for name in RECORDS]
    records = [f for f in (provenance_path(stage.output), *files) if f.is_file()]
    if not recipe.is_file() or not records:
        return None
    try:
        arguments = yaml.safe_load(recipe.read_text(encoding="utf-8"))[stage.command]
        record = read_object(records[0])
        for old in [*record.get("earlier", []), record]:
            if old["command"].startswith(stage.command):
                return Made(dict(arguments), dict(old["inputs"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        pass  # a file that is none of ours
    return None


def now(stage: Stage) -> Made:
    "How the stage would be made now."
    places = {n: p for n, p in paths_of(stage).items() if os.path.exists(p)}
    return Made(recipe_section(stage.values), {n: identify(p) for n, p in places.items()})


def changes_of(stage: Stage, made: Made, function: Callable) -> list[str]:
    "What differs between an output and the recipe."
    defaults = inspect.signature(function).parameters
    new, changed = recipe_section(stage.values), []
    for name in {**new, **made.arguments}:
        default = defaults[name].default if name in defaults else None
        old = made.arguments.get(name, default)
        if name not in HOW.get(stage.command, ()) and old != new.get(name):
            changed.append(f"{name} was {shown(old)}, is {shown(new.get(name))}")
    if changed:
        return changed
    inputs = made.inputs.items()
    return [f"{role} has changed" for role, old in inputs if identify(old["path"]) != old]


RECORD = "run.json"


def is_there(output: Path) -> bool:
    "Whether it is a file, or a folder that holds something."
    return any(output.iterdir()) if output.is_dir() else output.exists()


def stages_in(file: Path) -> dict[str, dict[str, Any]]:  # name of a stage -> what is known of it
    "Errors: ValueError for a file of this name that is no record of a run."
    stages = read_object(file).get("stages") if file.is_file() else {}
    if not isinstance(stages, dict) or not all(isinstance(s, dict) for s in stages.values()):
        raise ValueError(
            f"{file}: is no record of a run; name another folder in the recipe, as run: {{output_dir: FOLDER}}"
        )
    return stages


class RunRecord:
    "The file `run.json` of a run, written as a whole at each change."

    def __init__(self, folder: Path):
        self.file = folder / RECORD
        self.stages = stages_in(self.file)

    def write(self):
        with atomic_write(self.file) as temporary:
            text = json.dumps({"stages": self.stages}, indent=1, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8")

    def begin(self, stage: Stage, after: list[Stage]):
        "Note that a stage has begun: until it ends, nothing after it is done."
        made, fresh = now(stage), self.is_fresh(stage)
        output = stage.output and str(stage.output)
        about = {"command": stage.command, "output": output, "fresh": fresh}
        self.stages[stage.name] = about | made._asdict()
        for later in after:
            entry = self.stages.setdefault(later.name, {})
            there = later.output is not None and later.output.exists()
            if there or entry.get("done"):
                entry["outdated"] = stage.name
        self.write()
        if stage.output is not None:
            recipe_path(stage.output, stage.command).unlink(missing_ok=True)

    def has_begun(self, stage: Stage) -> bool:
        "Whether this run has begun the stage, where the recipe says now."
        entry = self.stages.get(stage.name, {})
        here = entry.get("output") == (stage.output and str(stage.output))
        return here and bool(entry.get("arguments"))

    def is_fresh(self, stage: Stage) -> bool:
        "Whether all that is in a stage's output is its own, so that it may be removed."
        if stage.output is None or not is_there(stage.output):
            return True
        if self.has_begun(stage):
            return self.stages[stage.name].get("fresh", made_by(stage) is not None)
        return made_by(stage) is not None

    def skip(self, stage: Stage, why: str):
        "Note that a stage does not run on this machine."
        self.stages[stage.name] = {"command": stage.command, "skipped": why}
        self.write()

    def end(self, stage: Stage, seconds: float | None = None, **found):
        "Note that a stage has ended."
        if seconds is not None:
            found["seconds"] = round(seconds, 1)
        self.stages[stage.name] |= {"done": True, **found}
        self.write()


class Planned(NamedTuple):
    "A stage, and what is to be done for it."

    stage: Stage
    state: str  # done, will run, will continue, will run again, skipped
    why: str

    @property
    def runs(self) -> bool:
        return self.state.startswith("will")


def _state(stage, entry, function, remade) -> tuple[str, str]:
    "What is to be done for one stage, and why."
    output = stage.output
    there = output is not None and is_there(output)
    elsewhere = entry.get("output") != (output and str(output))  # the recipe names another now
    entry = {k: v for k, v in entry.items() if not (elsewhere and k != "outdated")}
    begun = Made(entry.get("arguments", {}), entry.get("inputs", {}))
    made = made_by(stage) if there else None
    if stage.output is None and entry.get("done"):
        made = begun
    if stage.output is not None and not there:
        return "will run", f"{stage.output} is not there"
    if made is None and "outdated" not in entry:
        changed = changes_of(stage, begun, function) if begun.arguments else []
        if changed:
            return "will run again", "; ".join(changed)
        if there:
            return "will continue", "it has not finished"
        return "will run", "it has not run"
    follows = [other.name for other in remade if depends_on(stage, other)]
    if "outdated" in entry:
        follows = [entry["outdated"], *follows]
    if follows:
        return "will run again", f"{follows[0]} is made again"
    changed = changes_of(stage, made, function) if made else []
    return ("will run again", "; ".join(changed)) if changed else ("done", "nothing changed")


def plan_of(stages: list[Stage], record: RunRecord, commands: Mapping[str, Callable]) -> list[Planned]:
    "What is to be done, stage by stage."
    planned, remade = [], []
    for stage in stages:
        if why := _not_here(stage):
            planned.append(Planned(stage, "skipped", why))
            continue
        entry = record.stages.get(stage.name, {})
        state, why = _state(stage, entry, commands[stage.command], remade)
        planned.append(Planned(stage, state, why))
        if planned[-1].runs:
            remade.append(stage)
    return planned


def _not_here(stage) -> str | None:
    "Why a stage cannot run on this machine, if it is one that measures vLLM."
    if stage.values.get("engine") != "vllm" or stage.values.get("server"):
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
    return None


def plan_text(planned: list[Planned]) -> str:
    "The plan as a table."
    rows = [(p.stage.name, p.state, str(p.stage.output or "-"), p.why) for p in planned]
    rows = [("stage", "state", "output", "why"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(text.ljust(w) for text, w in zip(row, widths)), row[3]]).rstrip() for row in rows)


def refuse_overwriting(planned: list[Planned], overwrite: bool):
    "Errors: FileExistsError where something that is there would be made again."
    again = [p for p in planned if p.state == "will run again" and p.stage.output and not overwrite]
    if again:
        first = again[0]
        rest = ", ".join(p.stage.name for p in again[1:])
        raise FileExistsError(
            f"{first.stage.name}: {first.stage.output} was made otherwise ({first.why}). Give --overwrite to make it "
            f"again{f', with {rest}' if rest else ''}; or name another folder in the recipe"
        )


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
