"""Of two drafters, each can be right about tokens that the other misses.
Here are those tokens; and, for two checkpoints, the settings and weights that differ."""

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from torch import nn

from ..decode.tree import Drafter
from .greedy_replay import Answer, accepted_along
from ..models.base import SpeculatorModel
from ..train.run_record import flat


SHADES = {  # predicted by the first, by the second -> background
    (True, True): "#8884",
    (True, False): "#0072b288",
    (False, True): "#e69f0088",
    (False, False): "none",
}


@dataclass(frozen=True, repr=False)
class DrafterDiff:
    "What two drafters would have had accepted at each token of the verifier's greedy answers."

    names: tuple[str, str]
    texts: list[list[str]]  # of each answer: its tokens but the first
    accepted: list[list[tuple[int, int]]]  # of each token: by either drafter, 0 to k
    k: int  # tokens drafted at each

    def table(self) -> pd.DataFrame:  # one row for each of the two
        "Share of tokens that each predicts, also alone, and what is accepted of its drafts."
        pairs = pd.DataFrame([pair for answer in self.accepted for pair in answer])
        predicted, alone = pairs > 0, (pairs > 0).sum(axis=1) == 1
        columns = {
            "predicted": predicted.mean(),
            "by it alone": predicted[alone].sum() / len(pairs),
            "accepted of a draft": pairs.mean(),
        }
        return pd.DataFrame(columns).set_axis(list(self.names))

    def _token(self, text: str, first: int, second: int) -> str:
        about = f"accepted of {self.k}: {self.names[0]} {first}, {self.names[1]} {second}"
        background = SHADES[first > 0, second > 0]
        return f'<span title="{html.escape(about)}" style="background:{background}">{html.escape(text)}</span>'

    def __repr__(self) -> str:
        return repr(self.table().round(2))

    def _repr_html_(self) -> str:
        meanings = {
            (True, True): "predicted by both",
            (True, False): f"by {self.names[0]} alone",
            (False, True): f"by {self.names[1]} alone",
            (False, False): "by neither",
        }
        legend = ", ".join(
            f'<span style="background:{SHADES[key]}">{html.escape(meaning)}</span>' for key, meaning in meanings.items()
        )
        parts = [f"<p>{legend}</p>"]
        for text, pairs in zip(self.texts, self.accepted):
            tokens = (self._token(token, *pair) for token, pair in zip(text, pairs))
            style = "white-space:pre-wrap;font-family:monospace;margin:.6em 0"
            parts.append(f'<div style="{style}">{"".join(tokens)}</div>')
        return "".join(parts)


def drafter_diff(
    drafters: Mapping[str, Drafter], answers: list[Answer], decode: Callable[[int], str], k: int = 4
) -> DrafterDiff:
    """Let two drafters, by name, which read the layers of the answers, draft k tokens at every token of the same
    answers (`greedy_answers`); `decode` makes text of a token id. Errors: ValueError: not two drafters, or no
    answer."""
    if len(drafters) != 2 or not answers:
        raise ValueError(f"drafters={list(drafters)}, {len(answers)} answers: give two, and an answer")
    accepted = [list(zip(*(accepted_along(drafter, answer, k) for drafter in drafters.values()))) for answer in answers]
    texts = [[decode(token) for token in answer.tokens[1:]] for answer in answers]
    first, second = drafters
    return DrafterDiff((first, second), texts, accepted, k)


def changed_settings(one: SpeculatorModel, other: SpeculatorModel) -> pd.DataFrame:
    "The settings of two drafters' configs that differ, by their path in config.json; None: it has none."
    first, second = flat(one.config.to_dict()), flat(other.config.to_dict())
    rows = {
        name: (first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["one", "other"])


def changed_weights(one: nn.Module, other: nn.Module) -> pd.DataFrame:
    """Relative change of each parameter, |other - one| / |one|, the largest first; NaN where the shapes differ, or one
    of the models has none."""
    first, second = (dict(model.named_parameters()) for model in (one, other))
    rows = []
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        change = float("nan")
        if a is not None and b is not None and a.shape == b.shape:
            a, b = a.detach().double().cpu(), b.detach().double().cpu()
            change = ((b - a).norm() / a.norm()).item()
        shapes = {label: "" if p is None else " x ".join(map(str, p.shape)) for label, p in (("one", a), ("other", b))}
        rows.append(dict(parameter=name, change=change, **shapes))
    table = pd.DataFrame(rows).sort_values("change", ascending=False, kind="stable")
    return table.reset_index(drop=True)
