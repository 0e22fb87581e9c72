"""Checks of the folders that a command reads.
Whether a folder is there, and what it is, is known before torch is imported: a misspelt path is answered in less
than a second."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..core.files import check_folder, check_no_gguf, model_object, read_object, verifier_object
from ..core.options import FIRST_CHOICE, IN, RULES, check_options, near, pairs, shipped_drafters, shown, typed
from ..data.sources import files_of, table_files
from ..evaluate.prompts import sources_of
from ..verifier.folders import (
    CALIBRATION,
    COMPARISON,
    DIAGNOSIS,
    EVALUATION,
    check_evaluation,
    check_not_empty,
    check_output_dir,
    check_tokenizer,
    layout_of,
    named_by,
    named_verifier,
    new_folder,
    origin_of,
    refuse_model,
    refuse_overwriting,
    refuse_own,
)
from .recipe import import_first, read_plain, spelt


def check_features(data_dir: str | os.PathLike, verifier: str | None = None):
    "Errors: FileNotFoundError or ValueError if `data_dir` is no folder of features."
    path, model = Path(data_dir), verifier or "VERIFIER"
    if path.is_file():
        raise ValueError(
            f"data_dir={str(path)!r}: is a file, and a drafter is trained on features. Make them: speculators-nb "
            f"features {typed(path)} FEATURES --verifier {model}; then speculators-nb train FEATURES DRAFTER"
        )
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such folder. Make one: speculators-nb features DATA {typed(path)} --verifier {model}"
        )
    if (path / "config.json").is_file():
        kind = "a drafter" if "speculators_model_type" in read_object(path / "config.json") else "a model"
        raise ValueError(
            f"data_dir={str(path)!r}: is {kind}, and features are wanted. Make them: "
            f"speculators-nb features DATA FEATURES --verifier {model}"
        )
    layout_of(path)


MODELS = ("verifier", "drafter", "checkpoint", "folder", "from_pretrained")  # or hub ids
FILES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".zst", ".arrow")


def _check_model(field, value, command):
    "Errors: FileNotFoundError or ValueError if a model is not here and cannot be fetched."
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    path = Path(value)
    if path.is_dir():
        return
    check_no_gguf(path)
    if path.is_file() and path.suffix in FILES and field != "source":
        raise ValueError(
            f"{field}={shown(str(value))}: is a file, and a model's folder is needed; "
            f"`{command} --help` shows the order"
        )
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(value)) and str(value)[0].isalnum()
    cached = Path(HF_HUB_CACHE) / f"models--{str(value).replace('/', '--')}"
    if not path.exists() and not (is_id and (not HF_HUB_OFFLINE or cached.is_dir())):
        raise FileNotFoundError(
            f"{value}: neither a local folder nor a model in the cache; check the spelling"
            + (f", or fetch it where there is a network: hf download {value}" if is_id else "")
        )


# their verifier is read as a model; the first ones, and `evaluate` here, read its tokenizer
TOKENISES = ("regenerate", "features", "calibrate", "demo", "real")
READS = (*TOKENISES, "prepare", "train", "evaluate", "doctor", "serve", "convert", "stitch-mtp")


def check_confidence_head(drafter: str | os.PathLike, config: dict[str, Any]):
    "Errors: ValueError for the config of a drafter that has no confidences to calibrate."
    if not config.get("enable_confidence_head"):
        raise ValueError(
            f"drafter={shown(str(drafter))}: a drafter of type {config.get('speculators_model_type')} without a "
            "confidence head has nothing to calibrate; give one trained with enable_confidence_head=true"
        )


def _check_data(field, value, command):
    "Errors: FileNotFoundError or ValueError if conversations are not there."
    path = Path(value)
    if not path.exists() and path.suffix in FILES and "://" not in str(value):
        raise FileNotFoundError(f"{value}: no such file; check the spelling")
    if (path / "config.json").is_file():
        raise ValueError(
            f"{field}={shown(str(value))}: is a model, and conversations are needed; "
            f"`{command} --help` shows the order, and a verifier goes into --verifier"
        )
    tables = [(path / name / "dataset_info.json").is_file() for name in (".", "rows")]
    if command in ("evaluate", "calibrate", "doctor"):
        sources_of(value)
    elif command in ("regenerate", "prepare") or (command == "features" and not any(tables)):
        files_of(value)


def check_clone(*paths: str | os.PathLike) -> None:
    "Errors: FileNotFoundError naming what is not there, and the clone."
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"{path}: no such file. The demo reads the data and the verifier in data/ of "
                "the repository: run it in a clone, or name files of your own."
            )


def named_runs(runs: Iterable[str]) -> dict[str, str]:  # name -> folder
    "The runs of `compare`. Errors: ValueError for two of one name; FileNotFoundError."
    folders: dict[str, str] = {}
    for run in runs:
        name, equals, folder = run.partition("=")
        name, folder = (name, folder) if equals else (Path(name).name, name)
        if name in folders:
            raise ValueError(f"runs={folder!r}: another run is called {name!r}, too; write name=folder for each")
        folders[name] = folder
    for folder in folders.values():
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; name the output of evaluate --output-dir")
    return folders


class ExperimentFile(NamedTuple):
    "What the file of an experiment says."

    algorithm: str  # of settings that name none
    settings: dict[str, tuple[str, dict[str, Any]]]  # name -> (algorithm, arguments); of a grid: {}
    factors: dict[str, Any]  # of a grid: argument -> values, or name -> value
    common: dict[str, Any]  # training arguments of all
    given: dict[str, Any]  # `SIZES` and `DATA` in the file
    modules: list[str]  # that register drafters


SIZES = "seeds", "k", "draft_lengths", "n_prompts", "max_new_tokens", "workers"
DATA = "features", "heldout"  # of one's own: paths from the working folder, as in commands
FIELDS = (*SIZES, *DATA, "algorithm", "settings", "grid", "common", "import")
# no training arguments
DECIDED = {"seed", "overwrite", "output_dir", "folder", "output", "data_dir", "verifier", *FIELDS}


def _training_arguments(values, algorithm, where) -> dict[str, Any]:
    "Arguments by their names in Python, checked. Errors: ValueError naming the option, its value, and what to write."
    arguments = spelt(values, f"{where}.")
    for name, value in arguments.items():
        if name in DECIDED:
            raise ValueError(f"{where}.{name}={shown(value)}: is no training option; leave it out")
        if algorithm in shipped_drafters() and name not in RULES:  # a drafter of one's own may have others
            meant = near(name, RULES)
            meant = meant if meant.startswith("Did") else "docs/commands lists those of train"
            raise ValueError(f"{where}.{name}={shown(value)}: there is no such option. {meant}")
    check_options(dict(algorithm=algorithm) | arguments, before=f"{where}.")
    return arguments


def read_experiment_file(path: str | os.PathLike) -> ExperimentFile:
    """Read and check the file of an experiment; what `import` names is imported. Errors:
    FileNotFoundError, ValueError naming the field, its value and what to write."""
    where = f"{path}: "
    fields = spelt(read_plain(Path(path), "experiment", "settings, or a grid"), where)
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(f"{where}{name}={shown(value)}: an experiment has no such field. {near(name, FIELDS)}")
    if ("settings" in fields) == ("grid" in fields):
        what = "both are given" if "grid" in fields else "one of them is missing"
        raise ValueError(
            f"{where}settings, grid: {what}; write settings: {{NAME: {{OPTION: VALUE}}}}, or "
            "grid: {OPTION: [VALUE, VALUE]}"
        )
    modules = {"import": fields.get("import", [])}
    import_first(Path(path), modules)
    algorithm = fields.get("algorithm", FIRST_CHOICE)
    rules = {name: value for name, value in fields.items() if f"experiment.{name}" in IN}
    check_options(dict(algorithm=algorithm) | rules, "experiment", before=where)
    kind = "grid" if "grid" in fields else "settings"
    if not fields[kind]:
        raise ValueError(f"{where}{kind}={{}}: is empty")
    common = _training_arguments(fields.get("common", {}), algorithm, f"{where}common")
    settings = {}
    for name, values in fields.get("settings", {}).items():
        if not isinstance(values, dict | None):
            example = f"{name}: {{max_steps: 100}}"
            raise ValueError(f"{where}settings.{name}={shown(values)}: must be a mapping, e.g. {example}")
        own = dict(values or {})
        uses = own.pop("algorithm", algorithm)
        settings[str(name)] = uses, _training_arguments(own, uses, f"{where}settings.{name}")
    factors = spelt(fields.get("grid", {}), f"{where}grid.")
    for name, values in factors.items():
        if not isinstance(values, (list, dict)) or not values:
            raise ValueError(
                f"{where}grid.{name}={shown(values)}: must be a list of values, or a mapping of "
                f"names and values; write {name}: [VALUE, VALUE]"
            )
        for value in values.values() if isinstance(values, dict) else values:
            _training_arguments({name: value}, algorithm, f"{where}grid")
    given = {name: fields[name] for name in (*SIZES, *DATA) if name in fields}
    return ExperimentFile(algorithm, settings, factors, common, given, modules["import"])


def check_settings(record: Path, settings: dict[str, Any]) -> None:
    """A folder is continued by a call with the settings that began it. Errors: FileExistsError
    naming the setting that differs."""
    before = read_object(record) if record.is_file() else settings
    changed = [name for name, value in settings.items() if before.get(name, value) != value]
    if changed:
        name = changed[0]
        raise FileExistsError(
            f"{name}={settings[name]!r}: {record.parent} was begun with "
            f"{name}={before.get(name)!r}; name another output_dir, or remove that folder"
        )


RESULTS = {"evaluate": EVALUATION, "calibrate": CALIBRATION, "compare": COMPARISON, "doctor": DIAGNOSIS}


def check_inputs(values: dict, command: str):
    "Errors: FileNotFoundError, FileExistsError or ValueError for an input or output that is not what is needed."
    get = values.get
    match command:  # what has a better answer than a missing model
        case "demo":
            check_clone(values["prompts"], values["heldout"])
        case "real" if values["data"].startswith("data/"):
            check_clone(values["data"])
        case "experiment":
            read_experiment_file(values["file"])
        case "train":
            check_features(values["data_dir"], values["verifier"])
    for field, value in values.items():
        if not isinstance(value, (str, os.PathLike)) or str(value).startswith("hf:"):
            continue
        if field == "verifier" and get("to") == "llama.cpp":
            if not Path(value).is_file():
                raise FileNotFoundError(f"{value}: no such file; with --to llama.cpp the verifier is its GGUF file")
        elif field in MODELS or (command, field) == ("convert", "source"):
            _check_model(field, value, command)
        elif field == "data" and get("self_prompts") is None:
            _check_data(field, value, command)
    _check_output(values, command)

    verifier = get("verifier")
    drafter = os.fspath(get("drafter") or get("folder") or get("checkpoint") or "")
    if verifier is not None and Path(verifier).is_dir() and command in READS:
        if not (command == "regenerate" and get("server") is not None):
            verifier_object(verifier)
        here = command == "evaluate" and get("engine") != "vllm" and get("method") is None
        if here or command in TOKENISES:
            check_tokenizer(verifier)
    there = drafter != "" and Path(drafter).exists()
    match command:
        case "check" | "doctor" | "export" | "stitch-mtp" if there:
            check_folder(drafter)
        case "evaluate" | "calibrate" if there and get("method") is None:
            has_config = (Path(drafter) / "config.json").is_file()
            if verifier is None or not has_config:  # or it is read as a foreign one
                config = check_folder(drafter)
                if verifier is None and get("server") is None:
                    name = named_verifier(config, drafter)
                    with named_by(drafter):
                        _check_model("verifier", name, command)
            if command == "calibrate" and has_config:
                check_confidence_head(drafter, model_object(drafter))
        case "serve" if Path(drafter).is_dir():
            config = model_object(drafter)
            if "speculators_model_type" in config and verifier is None:
                named_verifier(config, drafter)
        case "vocab" | "report":
            folder = Path(values["data_dir" if command == "vocab" else "prepared"])
            table_files(folder / "rows" if command == "vocab" and (folder / "rows").is_dir() else folder)
        case "train":
            start = get("from_pretrained")
            if start and Path(start).exists() and not (Path(start) / "config.json").is_file():
                check_folder(start)
        case "compare":
            for folder in named_runs(values["runs"]).values():
                check_evaluation(folder)
        case "convert" if Path(source := values["source"]).is_dir():
            check_not_empty(source)
            file = Path(source) / "config.json"
            if file.is_file() and get("format") is None:
                refuse_own(read_object(file), str(source))
    if command == "doctor":
        if get("features") is not None:
            layout_of(values["features"])
        for folder in get("evaluation") or ():
            check_evaluation(folder)


def _check_output(values, command):
    "Errors: FileExistsError or ValueError for an output that would replace another, or what it is made from."
    output, overwrite = values.get("output_dir"), values.get("overwrite", False)
    if command in ("convert", "export", "from-gguf", "stitch-mtp"):
        new_folder(values["out"] if command == "stitch-mtp" else output)
        return
    refuse_model(output, drafters=command == "features")
    refuse_overwriting(output, overwrite, RESULTS.get(command, ()))
    match command:
        case "serve":
            refuse_model(values.get("hidden_states"), "hidden_states")
        case "train":
            resume = pairs(values.get("extra")).get("resume_from_checkpoint", values.get("resume"))
            check_output_dir(output, overwrite, resume)
        case "prepare":
            origin_of(output)
        case "demo" | "real":
            given = {n: v for n, v in values.items() if n not in ("output_dir", "import")}
            check_settings(Path(output) / f"{command}.json", given)
