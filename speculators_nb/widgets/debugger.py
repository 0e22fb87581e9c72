"""A step debugger for speculative decoding.
It shows each verification step of a text, with the two probabilities that decided about each draft token."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from ..decode.generate import Generation, Trace
from .widget import Widget


def proposal_tree(step) -> tuple[list[int], list[int]]:
    "Parents [N] and accepted nodes of a step; those of a chain are not written in it."
    parents = [*range(-1, len(step.draft) - 1)] if step.parents is None else step.parents
    path = [*range(step.accepted)] if step.path is None else step.path
    return parents, path


def rejected_nodes(step) -> Iterator[int]:
    "Draft tokens that the rule came to and did not accept."
    parents, path = proposal_tree(step)
    for parent, accepted in zip([-1, *path], [*path, len(step.draft)]):
        for node, above in enumerate(parents):
            if above == parent and node < accepted:
                yield node


def worst_rejections(generation: Generation, n: int = 10) -> pd.DataFrame:
    """Rejected draft tokens, n at most, of a generation with records, of which the drafter was sure and the verifier
    was not: step and node (from 0), token id, p, q; the largest q - p first."""
    rows = [
        dict(step=i, node=node, token=step.draft[node], p=record.p[node], q=record.q[node])
        for i, (step, record) in enumerate(zip(generation.steps, generation.records or []))
        for node in rejected_nodes(step)
    ]
    table = pd.DataFrame(rows, columns=["step", "node", "token", "p", "q"])
    worst = (table.p - table.q).argsort(kind="stable")
    return table.iloc[worst].head(n).reset_index(drop=True)


def run_state(name: str, generation: Generation) -> dict[str, Any]:
    "What JavaScript draws of one generation with records, by the name of its drafter, as JSON."

    def likeliest(tokens):
        return [[t, round(p, 4)] for t, p in tokens.items()]

    steps = []
    for step, record in zip(generation.steps, generation.records or []):
        parents, path = proposal_tree(step)
        values = {name: [round(x, 4) for x in getattr(record, name)] for name in ("p", "q", "chance")}
        steps.append(
            dict(draft=step.draft, parents=parents, path=path, tokens=step.tokens)
            | values
            | dict(
                top_p=[likeliest(tokens) for tokens in record.top_p],
                top_q=[likeliest(tokens) for tokens in record.top_q],
                residual=likeliest(record.residual),
            )
        )
    return dict(name=name, first=generation.tokens[0], steps=steps)


def used_tokens(run: dict[str, Any]) -> set[int]:
    "All token ids of a run."
    ids = {run["first"]}
    for step in run["steps"]:
        ids |= {*step["draft"], *step["tokens"]}
        pairs = sum([*step["top_p"], *step["top_q"], step["residual"]], [])
        ids |= {t for t, _ in pairs}
    return ids


class Debugger(Widget):
    """The steps of one generation with records, or of several on one prompt (drafter -> generation), and a list of so
    many worst rejections."""

    name = "debugger"

    def __init__(self, generations: Mapping[str, Generation], tokenizer, worst: int = 10):
        self.generations = generations
        self.decode = lambda token: tokenizer.decode([token])
        runs = [run_state(name, g) for name, g in generations.items()]
        used = set().union(*map(used_tokens, runs))
        words = {str(token): self.decode(token) for token in sorted(used)}
        state = dict(runs=runs, words=words, worst=self.worst_of_all(worst))
        super().__init__(state=state, controls=dict(position=1, run=0, node=0))

    def worst_of_all(self, n: int) -> list[dict[str, Any]]:
        "The list to jump by: n rejections of all runs, the worst first."
        rows = [
            row | {"run": i, "drafter": name}
            for i, (name, g) in enumerate(self.generations.items())
            for row in worst_rejections(g, n).to_dict("records")
        ]
        rows.sort(key=lambda row: row["p"] - row["q"])
        several = len(self.generations) > 1
        return [
            {key: row[key] for key in ("run", "step", "node")}
            | {
                "text": (f"{row['drafter']}, " if several else "")
                + f"step {row['step'] + 1}: {self.decode(row['token'])!r}, "
                f"q {row['q']:.2f}, p {row['p']:.2f}"
            }
            for row in rows[:n]
        ]

    def fallback(self) -> str:
        "The traces, and what is in the list of worst rejections."
        parts = []
        for name, g in self.generations.items():
            table = worst_rejections(g, 5)
            table["token"] = [repr(self.decode(t)) for t in table["token"]]
            table["step"] += 1
            parts.append(f"<p>{name}: {len(g.steps)} steps</p>{Trace(g, self.decode)._repr_html_()}")
            parts.append(table.drop(columns="node").round(3).to_html(border=0, index=False))
        return "".join(parts)


def debug(generation: Generation | Mapping[str, Generation], tokenizer) -> Debugger:
    """Step through a generation, or through several on one prompt (drafter -> its generation). Errors: ValueError for a
    generation without records, and for different prompts."""
    generations = generation if isinstance(generation, Mapping) else {"this drafter": generation}
    if not generations:
        raise ValueError("generation={}: is empty; pass a generation, or drafter -> generation")
    for name, g in generations.items():
        if g.records is None:
            raise ValueError(f"{name}: has no records; make it with generate(..., record=5)")
    if len({tuple(g.prompt) for g in generations.values()}) > 1:
        raise ValueError(f"{', '.join(generations)}: have different prompts; debug each by itself")
    return Debugger(generations, tokenizer)
