"""N-gram lookup and suffix decoding of your own text, step by step.
A box for a prompt, one for the verifier's answer, and what both copy from the text. Neither has weights, so a
page can run them."""

import re
from html import escape
from typing import Any, NamedTuple

import torch

from ..decode.ngram import NgramDrafter
from ..decode.suffix import SuffixDrafter
from ..decode.tree import Sampling
from .widget import Widget


def words(text: str) -> list[str]:
    """The tokens of this widget: words with the blanks before them, and signs of punctuation; blanks at the end are
    left out."""
    return re.findall(r"\s*(?:[A-Za-z0-9_]+|[^A-Za-z0-9_\s])", text)


class CopyStep(NamedTuple):
    "A verification step."

    draft: list[str]  # what the drafter proposed
    accepted: int  # how many of these agree with the answer


def copy_steps(drafter: NgramDrafter | SuffixDrafter, prompt: str, answer: str, k: int) -> list[CopyStep]:
    """The steps, of k drafted tokens, that write an answer, the verifier's, whose first token comes from the prompt's
    forward pass."""
    text = words(prompt) + words(answer)
    vocabulary = list(dict.fromkeys(text))
    ids = torch.tensor([vocabulary.index(word) for word in text], dtype=torch.long)
    written, steps = len(words(prompt)) + 1, []
    while written < len(text):
        proposal = drafter.propose(ids[:written], None, k, Sampling(0))
        draft = [vocabulary[token] for token in proposal.tokens]
        pairs = list(zip(draft, text[written:]))
        wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
        steps.append(CopyStep(draft, wrong[0] if wrong else len(pairs)))
        written += steps[-1].accepted + 1
    return steps


PROMPT = "Correct the line: for row in table: print(row.name, row.price, row.name)"
ANSWER = "The line is: for row in table: print(row.name, row.price, row.count)"


class PromptLookup(Widget):
    "Two texts, and the steps in which a copying drafter writes the second; see `look_up`."

    name = "prompt_lookup"

    def steps(self) -> list[CopyStep]:
        "The steps as the boxes and sliders are now."
        c: dict[str, Any] = self.controls
        drafter = NgramDrafter(1, c["max_n"])
        if c["drafter"] == "suffix":
            drafter = SuffixDrafter(max_requests=0)  # it copies from this text alone
        return copy_steps(drafter, c["prompt"], c["answer"], c["k"])

    def fallback(self) -> str:
        "The steps as a table."
        rows = [
            f"<tr><td>{i}</td><td>{escape(''.join(step.draft))}</td><td>{step.accepted}</td></tr>"
            for i, step in enumerate(self.steps(), 1)
        ]
        head = "<tr><th>step</th><th>draft</th><th>accepted</th></tr>"
        return f"<table>{head}{''.join(rows)}</table>"


def look_up(prompt: str = PROMPT, answer: str = ANSWER, k: int = 4) -> PromptLookup:
    """What n-gram lookup and suffix decoding, with k tokens drafted in a step, copy from a text; the answer is the
    verifier's."""
    drafter = SuffixDrafter()
    return PromptLookup(
        state=dict(depth=drafter.text.depth, least=drafter.min_prob),
        controls=dict(prompt=prompt, answer=answer, drafter="n-gram", max_n=5, k=k, step=3),
    )
