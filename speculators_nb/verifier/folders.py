"""What a folder holds: a drafter, a verifier, data, features; seen from names and one JSON file.
The name of a folder is the most frequent mistake in a command, and torch is not imported for it: a refusal takes
less than a second."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.files import disk_errors, read_object

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)  # one of them is there


def check_tokenizer(folder: str | os.PathLike) -> None:
    "Errors: FileNotFoundError where the folder of a verifier has no tokenizer."
    folder = Path(folder)
    if not any((folder / name).is_file() for name in TOKENIZER):
        raise FileNotFoundError(
            f"{folder}: has no tokenizer (none of {', '.join(TOKENIZER)}); save the verifier's "
            "there: AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )


def named_verifier(config: Mapping[str, Any], checkpoint: str | os.PathLike) -> str:
    """The verifier (folder or hub id) that the config of a drafter names; messages call the drafter `checkpoint`.
    Errors: ValueError where it names none."""
    block = config.get("speculators_config") or {}
    verifier = block.get("verifier") or {} if isinstance(block, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else 0
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"{checkpoint}: speculators_config.verifier.name_or_path in config.json is no "
            "name; give verifier= (--verifier)"
        )
    if not name:
        raise ValueError(
            f"{checkpoint}: names no verifier in speculators_config.verifier.name_or_path; give verifier= (--verifier)"
        )
    return name


@contextlib.contextmanager
def named_by(folder: str | os.PathLike, verifier: str | None = None) -> Iterator[None]:
    """Say in a FileNotFoundError which drafter, or which data, names the verifier that is missing, and how to name
    another place. `verifier`: that name, where other files may be missing too."""
    try:
        yield
    except FileNotFoundError as e:
        if not str(e).startswith(verifier or ""):
            raise
        raise FileNotFoundError(
            f"{e}; {folder} names it as its verifier: give verifier= (--verifier), its folder on this machine"
        ) from None


def check_not_empty(folder: str | os.PathLike) -> None:
    "Errors: FileNotFoundError for a checkpoint that is to be converted and is a folder without files."
    if not any(Path(folder).iterdir()):
        raise FileNotFoundError(f"{folder}: is an empty folder; name one that holds weights")


def refuse_own(config: Mapping[str, Any], name: str) -> None:
    """Errors: ValueError where the config of what is to be converted, called `name`, is that of a drafter of this
    library."""
    if kind := config.get("speculators_model_type"):
        raise ValueError(
            f"{name} is a checkpoint of this library already "
            f"(speculators_model_type={kind!r}); there is nothing to convert"
        )


def layout_of(data_dir) -> str:
    """Which layout a folder has: "ours", "upstream", "legacy" or "rows" (a prepared table without features).
    FileNotFoundError: none of them."""
    folder = Path(data_dir)
    if (folder / "rows").is_dir():
        return "ours"
    if (folder / "dataset_info.json").is_file():
        return "upstream" if (folder / "hidden_states").is_dir() else "rows"
    recorded = (folder / "data_config.json").is_file() and legacy_files(folder)
    if recorded or (folder / "data_0.pt").is_file():
        return "legacy"
    raise FileNotFoundError(
        f"{data_dir}: no folder 'rows' with the prepared dataset, no Arrow table, and no "
        "data_0.pt; make features (speculators-nb features), or pass rows="
    )


def legacy_files(folder: Path) -> list[Path]:
    "Samples data_{i}.pt of upstream 0.3 or 0.4 in the order of their numbers."
    files = [p for p in folder.glob("data_*.pt") if p.stem[5:].isdecimal()]
    return sorted(files, key=lambda p: int(p.stem[5:]))


def new_folder(path: str | os.PathLike) -> Path:
    "An output folder that replaces nothing: it does not exist, or is empty. Errors: FileExistsError."
    path = Path(path)
    with disk_errors(path):
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if taken:
        raise FileExistsError(f"{path} exists already; choose another output folder, or remove it")
    return path


MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pth", "*.pt")
# a run that was ended before it had a config.json, features, and what a trainer keeps
OWN_RECORDS = "run.json", "data_config.json", "dataset_info.json", "trainer_state.json"


def foreign_model(folder: str | os.PathLike) -> str | None:
    """The file that shows that a folder, perhaps not there yet, holds a model that no run of this library has written:
    a verifier, an adapter; None: it holds none. Links are followed."""
    folder = Path(folder)
    for name in ("config.json", "adapter_config.json", "model_index.json"):
        if (folder / name).is_file():
            try:
                return None if "speculators_model_type" in read_object(folder / name) else name
            except (OSError, ValueError):
                return name
    if any((folder / name).is_file() for name in OWN_RECORDS):
        return None
    found = (file.name for pattern in MODEL_FILES for file in sorted(folder.glob(pattern)))
    return next((name for name in found if not name.startswith(("hs_", ".hs_"))), None)


def refuse_model(output_dir: str | os.PathLike | None, name: str = "output_dir", drafters: bool = False) -> None:
    """Errors: ValueError where a command would write, by the argument `name`, to the folder of a model that no run of
    this library has written, or, with `drafters`, of any model."""
    if output_dir is None:
        return
    file = foreign_model(output_dir)
    if drafters and (Path(output_dir) / "config.json").is_file():
        file = "config.json"
    if file:
        raise ValueError(
            f"{name}={str(output_dir)!r}: is the folder of a model ({file}), which is never "
            "replaced or added to; name another folder"
        )


EVALUATION = (  # files of an evaluation, ours or an engine's
    "summary.csv",
    "positions.csv",
    "performance.csv",
    "ranges.csv",
    "requests.csv",
    "requests.jsonl",
    "skipped.csv",
    "settings.json",
    "acceptance.png",
    "ranges.png",
    "speed.png",
)
COMPARISON = ("comparison.csv", "comparison.png")
CALIBRATION = ("calibration.json", "calibration.png")
DIAGNOSIS = ("index.html",)


def refuse_overwriting(output_dir: str | os.PathLike | None, overwrite: bool, names: tuple[str, ...]) -> None:
    """Errors: FileExistsError, before any work, if a result of files with these names would replace an older one,
    unless it may (`overwrite`)."""
    if output_dir is None or overwrite:
        return
    there = [name for name in names if (Path(output_dir) / name).exists()]
    if there:
        raise FileExistsError(
            f"output_dir={str(output_dir)!r}: holds a result already ({', '.join(there[:3])}); "
            "name another folder, or pass overwrite=True"
        )


def is_trained(output_dir: str | os.PathLike) -> bool:
    "Whether training there would replace something: a drafter, or checkpoints."
    folder = Path(output_dir)
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json"))
    steps = (p for p in folder.glob("checkpoint-*") if p.is_dir())
    return bool(weights) or any(re.match(r"checkpoint-\d", p.name) for p in steps)


def check_output_dir(output_dir: str | os.PathLike, overwrite: bool = False, resume: bool | str | None = None) -> None:
    """Errors: ValueError where a run would replace something and neither `overwrite`, to train anew, nor `resume`, to
    continue the run that is there, or a checkpoint, is given; for a model of others also with both."""
    refuse_model(output_dir)
    if overwrite and resume:
        raise ValueError("overwrite and resume: choose one of them, to train anew or to continue")
    if is_trained(output_dir) and not overwrite and not resume:
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds a drafter or checkpoints of an earlier run: choose another folder, "
            "or give overwrite (--overwrite) to replace them, or resume (--resume) to continue that run"
        )


def check_evaluation(folder: str | os.PathLike) -> None:
    "Errors: FileNotFoundError for a folder without the result of `evaluate`."
    if not any((Path(folder) / name).is_file() for name in ("settings.json", "summary.csv")):
        raise FileNotFoundError(
            f"{folder}: no settings.json and no summary.csv; name the output of evaluate --output-dir"
        )


def origin_of(folder: str | os.PathLike) -> dict[str, Any] | None:
    """What a folder that `prepare` wrote, or will write, was made from; None: it is empty, or not there. Errors:
    ValueError for a folder that holds something else."""
    folder = Path(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        return read_object(folder / "data_config.json")["origin"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"output_dir {str(folder)!r} exists and is not a prepared folder; choose a new one.") from None
