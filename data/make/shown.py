"""The answer of SmolLM2-135M-Instruct that the first page steps through: `data/smollm2/shown.json`.

    make real                      once: the drafter
    python data/make/shown.py      then this; some seconds

One of the questions that were held out, 72 tokens, greedily in float32, four tokens drafted in a step; every step with
its distributions, and the texts of its tokens.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer

from speculators_nb.core.files import atomic_write
from speculators_nb.decode.generate import generate
from speculators_nb.evaluate.prompts import encode_prompts, read_prompts
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.verifier.tapped_model import Verifier

DATA = Path(__file__).resolve().parents[1]
REAL = DATA.parent / "output/real"  # of `make real`
ASKED = "launch a new non-profit organization"


def rounded(value):
    "The same with four decimals, and keys that are text."
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def ids_in(value):
    "The token ids of a record: the keys of its distributions."
    if isinstance(value, dict):
        return {key for key, each in value.items() if isinstance(key, int)}.union(*map(ids_in, value.values()))
    return set().union(*map(ids_in, value)) if isinstance(value, list) else set()


if __name__ == "__main__":
    drafter = SpeculatorModel.from_pretrained(REAL / "drafter").drafter()
    verifier = Verifier.from_pretrained(REAL / "verifier", list(drafter.aux_layer_ids), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(REAL / "verifier", trust_remote_code=False)
    prompts = encode_prompts(read_prompts(REAL / "prepared"), tokenizer)
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    (chosen,) = [i for i, text in enumerate(texts) if ASKED in text]
    answer = generate(verifier, drafter, prompts[chosen], k=4, max_new_tokens=72, record=3)
    records = [record._asdict() for record in answer.records]
    tokens = {*answer.tokens}.union(*(step.draft for step in answer.steps), ids_in(records))
    shown = dict(
        question=texts[chosen].rsplit("user\n")[-1].partition("<|im_end|>")[0],
        answer=dict(
            tokens=answer.tokens,
            steps=[asdict(step) for step in answer.steps],
            finish_reason=answer.finish_reason,
            records=rounded(records),
        ),
        words={str(token): tokenizer.decode([token]) for token in sorted(tokens)},
    )
    with atomic_write(DATA / "smollm2/shown.json") as tmp:
        tmp.write_text(json.dumps(shown, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(answer.tokens)} tokens in {1 + len(answer.steps)} forward passes")
