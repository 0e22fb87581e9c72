"""Paired comparison of trained drafters: acceptance length and acceptance by position.
The prompts and the seeds are the same, the intervals are of 95 %."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..core.options import near, shown
from ..evaluate.acceptance import bootstrap

LENGTH = "mean length"  # the measure; the others are "position 1", "position 2", …
KEYS = ["setting", "seed"]


def _sums(counts, k):
    "[rows, 2 + k]: steps, accepted, steps that accepted at least 1, … k tokens."
    columns = ["steps", "accepted", *(f"at_{i}" for i in range(1, k + 1))]
    return counts[columns].to_numpy(float)


def _ratios(sums):
    "Mean acceptance length, then the acceptance rate at each position: [..., 2 + k] -> [..., 1 + k]."
    steps = sums[..., :1]
    return np.concatenate([1 + sums[..., 1:2] / steps, sums[..., 2:] / steps], -1)


def measures(counts: pd.DataFrame, k: int) -> pd.DataFrame:
    """Acceptance of every run at k tokens drafted in a step, its prompts pooled: (setting, seed) -> `LENGTH`, "position
    1", … "position k". The counts have a row for each setting, seed, k and prompt. Errors: ValueError for a `k` not
    measured."""
    own = counts[counts.k == k]
    if own.empty:
        lengths = ", ".join(map(str, sorted(counts.k.unique())))
        raise ValueError(f"k={k}: the runs were measured at {lengths}; choose one of these")
    names = [LENGTH, *(f"position {i}" for i in range(1, k + 1))]
    rows = {key: _ratios(_sums(run, k).sum(0)) for key, run in own.groupby(KEYS, sort=False)}
    index = pd.MultiIndex.from_tuples(rows, names=KEYS)
    return pd.DataFrame(list(rows.values()), index, names)


def t_quantile(df: int, level: float = 0.95) -> float:
    "t such that Student's t of `df` degrees of freedom, at least 1, is between -t and t with probability `level`."
    angle = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos(angle) ** (df - 1)
    share = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(df) * np.tan(np.interp(level, share / share[-1], angle)))


def t_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    "The mean of values, one for each seed, with its 95 % interval: mean, low, high; NaN bounds for a single value."
    values = np.asarray(values, float)
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return mean, float("nan"), float("nan")
    half = t_quantile(n - 1) * float(values.std(ddof=1)) / n**0.5
    return mean, mean - half, mean + half


def _common(counts, baseline, setting, k):
    "Counts of both at k by seed: {seed: (baseline's, setting's)}, prompts in the same order."
    both = {}
    own = counts[counts.k == k]
    for seed in sorted(own.seed.unique()):
        runs = [own[(own.setting == name) & (own.seed == seed)].sort_values("prompt") for name in (baseline, setting)]
        if not all(map(len, runs)):
            continue
        if runs[0].prompt.tolist() != runs[1].prompt.tolist():
            raise ValueError(
                f"seed {seed}: {baseline} and {setting} were measured on different prompts; measure both on the same"
            )
        both[seed] = tuple(_sums(run, k) for run in runs)
    return both


def _difference(both, k):
    "Rows [1 + k] of (difference, low, high), and how the interval was made."
    if len(both) == 1:
        [(base, own)] = both.values()
        found = bootstrap(np.hstack([base, own]), lambda c: _ratios(c[..., 2 + k :]) - _ratios(c[..., : 2 + k]))
        return np.stack(found, -1), f"bootstrap over {len(base)} prompts, 1 seed"
    by_seed = np.stack([_ratios(own.sum(0)) - _ratios(base.sum(0)) for base, own in both.values()])
    return np.array([t_interval(d) for d in by_seed.T]), f"t over {len(both)} seeds"


def differences(counts: pd.DataFrame, baseline: str, k: int) -> pd.DataFrame:
    """Every setting minus the baseline at k tokens drafted in a step, on the prompts and seeds that both have: setting,
    measure, difference, low, high, seeds, interval. The counts are as of `measures`. A setting without a seed in common
    is left out. Errors: ValueError for a baseline that is none of the settings, a `k` not measured, or different
    prompts."""
    names = list(measures(counts, k).index.get_level_values("setting").unique())
    if baseline not in names:
        raise ValueError(f"baseline={shown(baseline)}: is none of the settings. {near(baseline, names)}")
    rows = []
    for setting in names:
        both = {} if setting == baseline else _common(counts, baseline, setting, k)
        if not both:
            continue
        found, interval = _difference(both, k)
        for i, (value, low, high) in enumerate(found):
            measure = f"position {i}" if i else LENGTH
            row = dict(setting=setting, measure=measure, difference=value, low=low, high=high)
            rows.append(row | dict(seeds=len(both), interval=interval))
    columns = ["setting", "measure", "difference", "low", "high", "seeds", "interval"]
    return pd.DataFrame(rows, columns=columns)


def as_text(value: float, low: float, high: float, sign: bool = False) -> str:
    "An estimate and its interval (NaN: not known), with a plus where it is positive if `sign`: +0.21 [0.12, 0.30]."
    number = f"{value:+.2f}" if sign else f"{value:.2f}"
    return number if np.isnan(low) else f"{number} [{low:.2f}, {high:.2f}]"


def results_table(counts: pd.DataFrame, k: int, baseline: str | None = None) -> pd.DataFrame:
    """Mean acceptance length of every setting over its seeds, at positions 1 and k as well, and its paired difference
    from the baseline (None: the first setting), the longest first. The counts are as of `measures`."""
    found = measures(counts, k)
    baseline = baseline or str(found.index[0][0])
    pairs = differences(counts, baseline, k)
    lengths = pairs[pairs.measure == LENGTH].to_dict("records")
    paired = {pair["setting"]: pair for pair in lengths}
    rows = {}
    for name, own in found.groupby("setting", sort=False):
        mean = own.mean()
        row = {"seeds": len(own), LENGTH: as_text(*t_interval(own[LENGTH].to_numpy()))}
        row |= {c: f"{mean[c]:.2f}" for c in (f"position {i}" for i in sorted({1, k}))}
        row[f"minus {baseline}"] = ""
        if pair := paired.get(name):
            difference = as_text(pair["difference"], pair["low"], pair["high"], sign=True)
            one = pair["interval"].startswith("bootstrap")
            row[f"minus {baseline}"] = f"{difference}, " + ("1 seed: over prompts" if one else f"{pair['seeds']} seeds")
        rows[name] = row
    best = found[LENGTH].groupby("setting").mean().sort_values(ascending=False).index
    return pd.DataFrame.from_dict(rows, "index").loc[list(best)].rename_axis("setting")


class RankCorrelation(NamedTuple):
    "Kendall's tau of two orders of the same settings, with its 95 % interval."

    names: list[str]  # settings that both have
    tau: float
    low: float
    high: float


def _tau(a, b):
    pairs = combinations(range(len(a)), 2)
    signs = [np.sign((a[i] - a[j]) * (b[i] - b[j])) for i, j in pairs]
    return float(np.mean(signs))


def _resampled(counts, names, k, draws, rng):
    "[draws, settings]: mean lengths of resampled prompts, and of resampled seeds of each setting."
    own = counts[counts.k == k].sort_values(["seed", "prompt"])
    by_seed = [[_sums(run, k) for _, run in own[own.setting == name].groupby("seed")] for name in names]
    sums = np.array(by_seed)  # [settings, seeds, prompts, 2 + k]
    settings, seeds, prompts, _ = sums.shape
    found = []
    for _ in range(draws):
        of_prompts = sums[:, :, rng.integers(prompts, size=prompts)].sum(2)
        chosen = rng.integers(seeds, size=(settings, seeds))
        lengths = _ratios(of_prompts)[..., 0]
        found.append(np.take_along_axis(lengths, chosen, 1).mean(1))
    return np.array(found)


def rank_correlation(first: pd.DataFrame, second: pd.DataFrame, k: int, draws: int = 2000) -> RankCorrelation:
    """Whether two experiments order their settings alike, by mean acceptance length at k tokens drafted in a step; the
    interval is of `draws` resampled prompts and seeds. The counts, as of `measures`, have every seed on every
    prompt."""
    both = [measures(counts, k)[LENGTH].groupby("setting").mean() for counts in (first, second)]
    names = [str(name) for name in both[0].index if name in both[1].index]
    rng = np.random.default_rng(0)
    drawn = [_resampled(counts, names, k, draws, rng) for counts in (first, second)]
    spread = [_tau(a, b) for a, b in zip(*drawn)]
    low, high = np.quantile(spread, (0.025, 0.975))
    return RankCorrelation(names, _tau(*(lengths[names].to_numpy() for lengths in both)), float(low), float(high))
