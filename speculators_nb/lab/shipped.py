"""Where the verifier, the corpus and the answers of this repository are, and how the corpus is read."""

import json
import os
from importlib.resources import files
from pathlib import Path

from ..core.files import not_only_ours


def shipped_data() -> Path:
    """The folder `data` of the clone, where the shipped verifier, corpus and answers are: upwards from the working
    folder, in this package's clone or a folder that nobody else can write to. Errors: FileNotFoundError outside a
    clone."""
    own_clone = Path(str(files("speculators_nb"))).parent / "data"
    doubts = []
    for folder in (Path.cwd(), *Path.cwd().parents):
        data = folder / "data"
        if not (data / "tiny-verifier").is_dir():
            continue
        if data.resolve() == own_clone.resolve():
            return data
        doubt = not_only_ours(data, data / "tiny-verifier")
        if doubt is None:
            return data
        doubts.append(doubt)
    only_yours = f" that is only yours: {'; '.join(doubts)}" if doubts else ""
    raise FileNotFoundError(
        f"{Path.cwd()}: neither here nor above is a folder data/tiny-verifier{only_yours}. "
        "The verifier and its answers come with the repository: work in a clone of it."
    )


def read_corpus(path: str | os.PathLike) -> list[dict]:
    "Conversations {id, domain, messages: [{role, content}, …]} from a .jsonl file, one a line."
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
