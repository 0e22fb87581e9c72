#!/usr/bin/env python
"""Writes data/answers/train.jsonl: the shipped verifier answers the first 1,000 training prompts at temperature 0.7.
`make answers` runs this, from the root; it takes about a minute."""

import json
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from speculators_nb.core.files import atomic_write
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.regenerate.in_process import regenerate
from speculators_nb.regenerate.journal import read_regenerated
from speculators_nb.verifier.tapped_model import Verifier

DATA = Path("data")


def main():
    verifier = Verifier.from_pretrained(DATA / "tiny-verifier")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tiny-verifier")
    questions = read_corpus(DATA / "corpus/train.jsonl")[:1000]
    with tempfile.TemporaryDirectory() as tmp:
        file = Path(tmp) / "answers.jsonl"
        regenerate(verifier, tokenizer, questions, file, max_new_tokens=160, temperature=0.7, seed=0)
        by_id = {row["primary_id"]: row for row in read_regenerated(file)}
    lines = []
    for question in questions:
        if row := by_id.get(question["id"]):
            answer = {name: question[name] for name in ("id", "domain")}
            answer |= {name: row[name] for name in ("input_ids", "loss_mask")}
            lines.append(json.dumps(answer, ensure_ascii=False, separators=(",", ":")) + "\n")
    with atomic_write(DATA / "answers/train.jsonl") as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
