"""Comparison of evaluations in one table and one figure. Acceptance is counted by this library's decoder as vLLM
counts it, beside results of engine runs; nbs/evaluate/04_comparison.ipynb shows it at work."""

# Near the length limit an engine continues to draft K tokens and counts all that the verifier accepts, while `generate`
# requests only as many as can still be written. So a generation gets K tokens more than the limit, and its steps are
# counted that begin before the limit.

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from ..core.options import check_options
from ..decode.generate import Generation
from ..decode.step_counts import COUNTS, count_steps, steps_of
from ..decode.tree import Drafter
from ..verifier.tapped_model import Verifier
from .acceptance import Evaluation, Refused, acceptance_summary, acceptance_table, bootstrap, check_drafters
from .acceptance import check_measurement, decode_prompts, measurable
from .engine import TABLES, EngineEvaluation, read_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported only to draw


def as_engine_counts(generation: Generation, k: int, limit: int) -> np.ndarray:
    """Count one request as vLLM does, [4 + k] as `acceptance.count`: of a generation with k tokens, the draft length,
    more than the limit of the output."""
    steps = steps_of(generation)
    counted = steps.written < limit
    return count_steps(steps.accepted[counted], steps.drafted[counted], k)


def evaluate_as_engine(
    verifier: Verifier,  # taps every layer that a drafter reads
    drafters: dict[str, Drafter],
    prompts: Sequence[list[int] | Refused],  # token ids of each request
    *,
    k: int = 3,  # tokens to draft in each step
    temperatures: Sequence[float] = (0.0,),  # one evaluation each
    max_new_tokens: int = 64,  # output limit of a request
    eos_token_ids: Collection[int] = (),  # token ids that end an output
    domains: list[str] | None = None,  # the domain of each prompt
    rule: str = "standard",  # acceptance rule
    top_p: float = 1.0,  # keep the likeliest tokens until they hold this mass; 1: all
    top_k: int = 0,  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0,  # drop tokens less likely than this share of the likeliest; 0: none
    seed: int = 0,  # of sampling and of the bootstrap
    kv_cache: str = "dynamic",  # as of `generate`
    decode: Callable[..., Iterator[dict]] = decode_prompts,  # or of a `SharedPrompts`
) -> EngineEvaluation:  # without performance; `requests` has the counts of each
    "Decode with our own decoder and count as vLLM counts. Errors: ValueError as of `evaluate`."
    filters = dict(top_p=top_p, top_k=top_k, min_p=min_p)
    check_options(dict(temperatures=temperatures, max_new_tokens=max_new_tokens) | filters)
    check_measurement(k, prompts, rule=rule, seed=seed)
    check_drafters(drafters, prompts, domains)
    options: dict[str, Any] = dict(k=k, eos_token_ids=eos_token_ids, rule=rule, seed=seed)
    options |= filters | dict(max_new_tokens=max_new_tokens + k, kv_cache=kv_cache)
    numbers, skipped = measurable(verifier, prompts)
    prompts = [prompts[i] for i in numbers]
    domains = domains and [domains[i] for i in numbers]
    parts = []
    with tqdm(total=len(drafters) * len(temperatures) * len(prompts), unit="request") as bar:
        for name, drafter in drafters.items():
            for t in temperatures:
                generations = []
                for answers in decode(verifier, {name: drafter}, prompts, t, **options):
                    generations.append(answers[name])
                    bar.update()
                key = dict(drafter=name, temperature=t)
                parts.append(_engine_tables(generations, k, max_new_tokens, domains, seed, key))
    summary, positions, requests = (pd.concat(t, ignore_index=True) for t in zip(*parts))
    requests["prompt"] = [numbers[i] for i in requests.prompt]
    speed = pd.DataFrame(columns=["k", "concurrency", "temperature", "domain"])
    return EngineEvaluation(summary, positions, speed, requests, dict(skipped=skipped) if skipped else {})


def _engine_tables(generations, k, limit, domains, seed, key):
    "Summary, positions and requests of one drafter at one temperature."
    counts = np.stack([as_engine_counts(g, k, limit) for g in generations])
    texts = [g.tokens[:limit] for g in generations]
    domain_of = np.array(domains or ["all"] * len(texts), dtype=object)
    summary = []
    for domain in ["all", *dict.fromkeys(domains or ())]:
        own = np.flatnonzero((domain_of == domain) | (domain == "all"))
        if domain != "all" and not counts[own, 0].any():  # it has no step to count
            continue
        written = sum(len(texts[i]) for i in own)
        sizes = [len(own), written, written - len(own), max(counts[own, 0].sum(), 1)]
        found = acceptance_summary(counts[own], k, seed=seed, sizes=sizes)
        summary.append(key | dict(domain=domain) | found | dict(k=k, concurrency=1))
    table = acceptance_table(counts, k, seed=seed)
    positions = table.assign(**key, k=k, concurrency=1)[[*key, *table.columns, "k", "concurrency"]]
    requests = []
    for i, (text, row) in enumerate(zip(texts, counts)):
        request = key | dict(k=k, concurrency=1, prompt=i, domain=domain_of[i], tokens=len(text), token_ids=text)
        request |= dict(prompt_tokens=len(generations[i].prompt))
        request |= dict(zip(("steps", "drafts", "proposed", "accepted"), row))
        requests.append(request | dict(accepted_at=row[len(COUNTS) :].tolist()))
    return pd.DataFrame(summary), positions, pd.DataFrame(requests)


KEY = ["run", "drafter", "temperature", "k", "concurrency"]  # of a row of a comparison


def length_differences(requests: pd.DataFrame) -> pd.DataFrame:
    """Mean acceptance length less that of the first drafter of the first run at the same temperature, by KEY, with a
    95 % interval (difference, difference_low, difference_high): a bootstrap over prompts that both have answered, of
    the requests of all runs (`run` in front) whose own steps were counted. What has other prompts is left out."""
    numbers = ["temperature", "k", "concurrency", "prompt", "prompt_tokens", "steps", "accepted"]
    requests = requests.assign(prompt_tokens=requests.get("prompt_tokens"))
    if not {*KEY, *numbers} <= set(requests):
        return pd.DataFrame()
    counted = requests[list(dict.fromkeys([*KEY, *numbers]))].astype({"drafter": str})
    counted[numbers] = counted[numbers].apply(pd.to_numeric, errors="coerce")
    counted = counted[counted.k > 0].dropna(subset=["prompt", "steps", "accepted"])
    first, rows = {}, []
    for key, table in counted.groupby(KEY, sort=False):
        own = table.set_index("prompt").sort_index()
        base = first.setdefault(key[2], own)
        if base is own or not own.index.is_unique or not own.index.equals(base.index):
            continue
        if (own.prompt_tokens - base.prompt_tokens).any():  # other prompts have the same numbers
            continue
        counts = np.hstack([t[["steps", "accepted"]].to_numpy(float) for t in (base, own)])
        found = bootstrap(counts, lambda c: c[..., 3:] / c[..., 2:3] - c[..., 1:2] / c[..., :1])
        difference = dict(difference=found.value[0], difference_low=found.low[0], difference_high=found.high[0])
        rows.append(dict(zip(KEY, key)) | difference)
    return pd.DataFrame(rows).set_index(KEY) if rows else pd.DataFrame()


@dataclass
class Comparison:
    "Runs side by side: their tables, one below the other, with `run` in front."

    summary: pd.DataFrame
    positions: pd.DataFrame
    performance: pd.DataFrame  # of the runs that have times
    requests: pd.DataFrame = field(default_factory=pd.DataFrame)

    def table(self, domain: str = "all") -> pd.DataFrame:
        """The most important numbers of each run in a domain, by run and drafter: length, difference, acceptance at
        each position, tokens a second. Differences, as of `length_differences`, are of all domains together."""
        columns = ["mean_length", "mean_length_low", "mean_length_high", "draft_acceptance", "steps"]
        rows = self.summary[self.summary.domain == domain].set_index(KEY)[columns]
        if domain == "all":
            if len(differences := length_differences(self.requests)):
                rows = rows.join(differences)
            at = self.positions.pivot_table("unconditional", index=KEY, columns="position")
            rows = rows.join(at.add_prefix("at "))
        if len(self.performance):
            columns = ["tokens_per_second", "first_token_ms", "between_tokens_ms", "speedup"]
            speed = self.performance[self.performance.domain == domain]
            rows = rows.join(speed.set_index(KEY)[columns])
        return rows.reset_index()

    def plot(self, title: str | None = None) -> Figure:
        """Acceptance per position of all runs, in the picture of the in-process evaluation, a panel for each
        temperature. title: None: how far the runs are apart."""
        from ..core.plot import plot_acceptance  # matplotlib, only to draw

        table = self.positions.copy()
        table["drafter"] = table.run + ": " + table.drafter
        several = table.groupby("drafter")[["k", "concurrency"]].nunique().max()
        for name, label in (("k", "K="), ("concurrency", "at once: ")):
            if several[name] > 1:
                table["drafter"] += f", {label}" + table[name].astype(str)
        rates = table.groupby(["temperature", "k", "position"]).unconditional
        finding = "The same acceptance at every position"
        if apart := (rates.max() - rates.min()).max():
            finding = f"At no position are the runs further apart than {apart:.3f}"
        return plot_acceptance(table, title or finding)


Run = EngineEvaluation | Evaluation | str | os.PathLike


def _is_in_process(run: Run) -> bool:
    "Whether a run, or the folder of one, was counted by our own decoder in its own way."
    if isinstance(run, (str, os.PathLike)):
        return (Path(run) / "summary.csv").is_file() and not (Path(run) / "settings.json").is_file()
    return isinstance(run, Evaluation)


def _with_setting(summary: pd.DataFrame, positions: pd.DataFrame, requests: pd.DataFrame) -> EngineEvaluation:
    "Tables of an `Evaluation` with the columns of an engine's: k is the number of positions, requests come one by one."
    k = int(positions.position.max())
    summary, positions, requests = (table.assign(k=k, concurrency=1) for table in (summary, positions, requests))
    return EngineEvaluation(summary, positions, pd.DataFrame(), requests)


def _read_in_process(folder: str | os.PathLike) -> EngineEvaluation:
    names = ["summary", "positions", "requests"]
    if not (Path(folder) / "requests.csv").is_file():  # of an older release
        names.remove("requests")
    tables = {name: read_table(Path(folder) / f"{name}.csv", k=1, concurrency=1) for name in names}
    return _with_setting(tables["summary"], tables["positions"], tables.get("requests", pd.DataFrame()))


def read_any_run(run: Run, in_process: bool) -> EngineEvaluation:
    """An evaluation, or the folder of a saved one, by an engine or in process, with the columns of an engine's. Errors:
    FileNotFoundError, ValueError."""
    if isinstance(run, EngineEvaluation):
        return run
    if isinstance(run, Evaluation):
        return _with_setting(run.summary, run.positions, run.requests)
    return _read_in_process(run) if in_process else EngineEvaluation.read(run)


def compare_runs(runs: Mapping[str, Run]) -> Comparison:
    """Put runs (name -> evaluation, or the folder of a saved one) together. Folders of runs that were counted in
    process are compared with each other, not with an engine's, which counts otherwise. Errors: ValueError,
    FileNotFoundError."""
    if not runs:
        raise ValueError("runs is empty: give a name and an evaluation, or its folder, for each")
    in_process = all(map(_is_in_process, runs.values()))
    found = {name: read_any_run(run, in_process) for name, run in runs.items()}
    tables = []
    for table in (*TABLES, "requests"):
        parts = {name: part for name, run in found.items() if len(part := getattr(run, table))}
        joined = pd.concat(parts.values(), keys=parts.keys(), names=["run", None]) if parts else pd.DataFrame()
        tables.append(joined.reset_index("run").reset_index(drop=True) if parts else joined)
    return Comparison(*tables)
