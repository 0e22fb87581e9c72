"""Verification steps as numbers: place in the output, draft tokens proposed and accepted.
They are summed over ranges of output position or context length."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.options import MOST_TOKENS, ascending_problem, several, shown, whole
from .step import Generation


class Steps(NamedTuple):
    "The verification steps of one request, in order."

    written: np.ndarray  # [n] int, output tokens before each step
    accepted: np.ndarray  # [n] int, draft tokens that it accepted
    drafted: np.ndarray  # [n] int, draft tokens that it proposed
    requested: np.ndarray  # [n] int, draft tokens that it could propose


def steps_of(generation: Generation) -> Steps:
    "Where the steps of an output are, and what they accepted."
    rows = [(len(s.tokens), s.accepted, len(s.draft), s.requested) for s in generation.steps]
    added, *rest = np.array(rows, dtype=int).reshape(-1, 4).T
    return Steps(1 + added.cumsum() - added, *rest)  # the first token comes with the prompt


COUNTS = ["steps", "steps_drafted", "proposed", "accepted"]


def count_steps(accepted: np.ndarray, drafted: np.ndarray, k: int) -> np.ndarray:
    """Sums [4 + k] over n steps, of the draft tokens that each accepted and proposed, [n] int: `COUNTS`, then the steps
    that accepted at least 1, … k tokens, of a draft length k that was requested."""
    reached = (accepted[:, None] >= np.arange(1, k + 1)).sum(0)
    totals = [len(accepted), (drafted > 0).sum(), drafted.sum(), accepted.sum()]
    return np.array([*totals, *reached], dtype=float)


OUTPUT_EDGES = (128, 512, 2048)  # output positions at which a range begins, after the first
CONTEXT_EDGES = (512, 2048, 8192, 32768)  # likewise context lengths
EDGES = several(whole(128, 1, MOST_TOKENS), "128 512", test=ascending_problem)


def check_edges(edges: Sequence[int], name: str) -> None:
    "Errors: ValueError for edges, an argument of this name, that are no ascending positive whole numbers."
    if wrong := EDGES.problem(edges):
        raise ValueError(f"{name}={shown(edges)}: {wrong}")


def range_names(edges: Sequence[int]) -> list[str]:
    "Names of ranges, one more than edges, as in 0-127, 128-511, 512+."
    closed = [f"{low}-{high - 1}" for low, high in itertools.pairwise([0, *edges])]
    return [*closed, f"{edges[-1]}+"]


def count_ranges(
    places: np.ndarray, accepted: np.ndarray, drafted: np.ndarray, k: int, edges: Sequence[int]
) -> np.ndarray:
    """Sums [ranges, 4 + k] over the steps of each range, as `count_steps`, by where each step is, [n] int. A step at an
    edge, of ascending ones, is in the range that begins there."""
    own = np.searchsorted(edges, places, side="right")
    return np.stack([count_steps(accepted[own == i], drafted[own == i], k) for i in range(len(edges) + 1)])
