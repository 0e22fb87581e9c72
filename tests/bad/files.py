"Files and folders that cannot be written or read: each command says which, why, and what helps."

from pathlib import Path

from .disk import closed, full, read_only, small_files
from .harness import GOOD, ROOT, Case, _type

WRITERS = {  # command -> its line; {out} is a place that cannot be written
    "prepare": "prepare {corpus} {out} --verifier {tiny} --max-samples 40 --num-proc 1",
    "features": "features {corpus} {out} --verifier {tiny} --max-samples 4 --max-length 64",
    "train": (
        "train {features} {out} --verifier {verifier} --extra max_steps=1 --extra save_steps=1 --extra "
        "disable_tqdm=true"
    ),
    "regenerate": "regenerate {corpus} {out}/answers.jsonl --verifier {tiny} --max-samples 8 --max-new-tokens 32",
    "convert": "convert {native} {out} --verifier {verifier}",
    "export": "export {drafter} {out} --verifier {verifier}",
    "evaluate": (
        "evaluate {shipped} {corpus} --verifier {tiny} --output-dir {out} --max-new-tokens 4 --k 1 --max-samples 1 "
        "--no-ngram"
    ),
}


def on(disk, name):
    "Type the command of that name with an output on `disk`."

    def what(folder: Path):
        from speculators_nb.models.convert import export_native

        line = WRITERS[name].replace("{shipped}", str(ROOT / "data/tiny-drafter"))
        if "{native}" in line:
            line = line.replace(
                "{native}", export_native(GOOD["drafter"], folder / "native", verifier=GOOD["verifier"])
            )
        out = disk(folder / "disk")
        return _type(line.replace("{out}", str(out or folder / "disk/out")), folder)

    return what


# What the line must say after the path: the reason and the remedy. Where nothing can be mounted, `full` and `read_only`
# are made otherwise.
ANSWERS = {
    full: "(No space left on device. Make room and run the same call again|File too large. Raise the limit .*ulimit)",
    small_files: "File too large. Raise the limit .*ulimit",
    read_only: (
        "(Read-only file system. Choose a folder on a disk that can be written|Permission denied. Choose a folder "
        ".*chmod)"
    ),
    closed: "Permission denied. Choose a folder .*chmod",
}
KEPT = {
    "train": "; checkpoints that are complete are kept, --resume",
    "regenerate": "; conversations that are complete are kept",
}  # if any work was done
CASES = [
    Case(f"{disk.__name__}: {name}", on(disk, name), f"^Error: /.*/disk/out.*: {answer}")
    for disk, answer in ANSWERS.items()
    for name in WRITERS
]
CASES += [Case(f"{name} says what is kept", on(small_files, name), kept) for name, kept in KEPT.items()]
