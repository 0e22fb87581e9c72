"""Evaluation by vLLM: acceptance, throughput and latency by draft length and load, as tables and figures.
A server is started for each draft length, and gets prompts under each load, with and without a drafter."""

# A server reports what each step with a draft accepted, and not where it was. Where every step verified a draft the
# place follows: a step writes what it accepted and one token more. With n-grams some steps draft nothing, the tokens
# do not add up, and a request has no places. Intervals are over requests, so they need requests that were counted one
# by one.

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from ..core.files import read_object, save_figure, write_object, write_text
from ..core.http_client import Endpoint
from ..core.options import check_options
from ..core.provenance import without_secrets, write_provenance
from ..decode.step_counts import OUTPUT_EDGES, check_edges
from ..serve.serve_command import accelerated, as_shell, find_verifier, read_config
from ..serve.serve_command import serve_command, serve_environment, what_to_serve
from ..serve.server import Server
from ..verifier.folders import check_evaluation
from .acceptance import acceptance_summary, acceptance_table, compared_ranges, forget, rows_of_ranges, skipped_table
from .guidellm import check_guidellm, guidellm_command, replies_of, run_guidellm, write_dataset
from .load import Load, Reply, performance, rows_of, run_load, steps_of
from .prompts import Prompt, read_prompts
from .vllm_metrics import PER_REQUEST, Meter

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported only to draw

TABLES = ("summary", "positions", "performance")
MEASURED = {  # columns of each that are numbers in every row
    "summary": ("k", "temperature", "concurrency"),
    "positions": ("k", "temperature", "concurrency", "position", "unconditional"),
    "performance": ("k", "concurrency"),
    "requests": ("k", "temperature", "concurrency", "prompt", "steps", "accepted"),
}
SHOWN = {  # further columns of each that a comparison shows
    "summary": (
        *("drafter", "domain", "mean_length", "mean_length_low", "mean_length_high"),
        *("draft_acceptance", "steps"),
    ),
    "positions": ("drafter",),
    "requests": ("drafter",),
    "performance": ("drafter", "domain", "tokens_per_second", "first_token_ms", "between_tokens_ms", "speedup"),
}


def read_table(file: Path, **setting: int) -> pd.DataFrame:
    """Read a table of an evaluation, the CSV of summary, positions, performance or requests; empty where nothing was
    measured. `setting`: k and concurrency, where all rows have the same and the file none. Errors: FileNotFoundError;
    ValueError naming file, row and column."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; evaluate again")
    if file.stem == "performance" and file.stat().st_size <= 1:
        return pd.DataFrame()  # our own decoder is not timed
    if file.stat().st_size == 1:  # as `save` writes it
        raise ValueError(f"{file}: nothing was drafted in this run, so it has no acceptance; name one with a drafter")
    try:
        # a domain may be called NA, a drafter 1
        names: Any = dict(drafter=str, domain=str)
        table = pd.read_csv(file, dtype=names, keep_default_na=False, na_values=[""]).assign(**setting)
    except ValueError as e:
        problem = " ".join(str(e).split())
        raise ValueError(f"{file}: is no table ({problem}); evaluate again") from e
    required = MEASURED[file.stem] + (SHOWN[file.stem] if len(table) else ())
    absent = [name for name in required if name not in table]
    if absent:
        raise ValueError(f"{file}: has no column {', '.join(absent)}; evaluate again")
    if file.stem != "performance" and not len(table):
        raise ValueError(f"{file}: has no row; evaluate again")
    for name in table.columns.difference(["drafter", "domain", "finish_reason"], sort=False):
        values = pd.to_numeric(table[name], errors="coerce").to_numpy(float)
        valid = np.isfinite(values) & (values >= 0)
        if name not in MEASURED[file.stem]:
            valid |= table[name].isna().to_numpy()
        if not valid.all():
            row = int(np.argmin(valid))
            raise ValueError(
                f"{file}, row {row + 1}: {name}={table[name][row]} is no number of at least 0; evaluate again"
            )
    return table


def _lightest(table):
    return table[table.concurrency == table.concurrency.min()]


def _placed(answer) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    "As `count_ranges` takes them: where the steps of an answer are, what each accepted."
    if not isinstance(answer.step_accepted, list) or not answer.step_accepted:
        return None
    accepted = np.array(answer.step_accepted)
    written = accepted.cumsum() + np.arange(1, len(accepted) + 1) - accepted  # before each step
    rest = answer.tokens - written[-1]  # of the last step, which a limit may cut
    if not 0 < rest <= accepted[-1] + 1:
        return None
    return written, accepted, np.array(answer.step_proposed)


def output_ranges(requests: pd.DataFrame, edges: Sequence[int] = OUTPUT_EDGES, seed: int = 0) -> pd.DataFrame:
    """Mean acceptance length by output position (`edges`: output tokens before a step), where every step of every
    request of an `EngineEvaluation` has a place: rows as of `range_table`, for each drafter, temperature, k,
    concurrency. `seed`: of the bootstrap. Errors: ValueError for edges that do not ascend."""
    check_edges(edges, "edges")
    setting, table = ["drafter", "temperature", "k", "concurrency"], []
    if "step_accepted" not in requests:
        return pd.DataFrame()
    for key, answers in requests[requests.k > 0].groupby(setting, sort=False):
        placed = [_placed(answer) for answer in answers.itertuples()]
        if all(own is not None for own in placed):
            k = int(answers["k"].iloc[0])
            rows = rows_of_ranges("output", [p for p in placed if p], k, edges, seed=seed)
            table += [{**dict(zip(setting, key)), **row} for row in rows]
    return pd.DataFrame(table)


@dataclass
class EngineEvaluation:
    "What `evaluate_engine` measured."

    summary: pd.DataFrame  # columns of `Evaluation.summary`, and k, concurrency
    positions: pd.DataFrame  # columns of `Evaluation.positions`, and k, concurrency
    performance: pd.DataFrame  # speed by k (0: no drafting), concurrency, temperature, domain
    # one row for each answer; with its own counts where the server gave them, or at 1 at once
    requests: pd.DataFrame = field(default_factory=pd.DataFrame)
    settings: dict = field(default_factory=dict)  # how it was measured: commands, prompts

    @property
    def ranges(self) -> pd.DataFrame:
        "As `output_ranges`; empty where a server did not report each step."
        return output_ranges(self.requests, seed=self.settings.get("seed", 0))

    def compared_ranges(self) -> pd.DataFrame:  # empty where all steps share a range
        "The rows of `ranges`, if there is more than one range."
        return compared_ranges(self.ranges)

    @property
    def skipped(self) -> pd.DataFrame:  # prompt, why
        "Prompts that were not measured."
        return skipped_table(self.settings.get("skipped", {}))

    def plot(self, title: str | None = None) -> Figure:
        """Acceptance per position, a panel for each temperature, as `Evaluation.plot`: of several loads the lightest,
        of several draft lengths all. title: None: the longest mean acceptance length. Errors: ValueError where nothing
        was drafted."""
        from ..core.plot import plot_acceptance  # matplotlib, only to draw

        if self.positions.empty:
            raise ValueError("nothing was drafted in this run, so there is no acceptance to draw")
        table = _lightest(self.positions)
        if table.k.nunique() > 1:
            table = table.assign(drafter=table.drafter + ", K=" + table.k.astype(str))
        overall = _lightest(self.summary[self.summary.domain == "all"])
        best = overall.sort_values("mean_length", na_position="first").iloc[-1]
        finding = f"{best.drafter}, K={best.k}, in the engine: {best.mean_length:.2f} tokens a step"
        return plot_acceptance(table, title or f"{finding} at temperature {best.temperature:g}")

    def plot_speed(self, title: str | None = None) -> Figure:
        """What drafting brings: throughput and time between tokens over draft length, a line per load, whose left end
        is the engine without drafting. title: None: the best and its speed-up."""
        from ..core.plot import closed_axes  # matplotlib, only to draw

        table = self.performance[self.performance.domain == "all"]
        loads = sorted(table.concurrency.unique())
        columns = "tokens_per_second", "between_tokens_ms"
        labels = "output tokens per second", "time between tokens, ms (median)"
        fig, axes = closed_axes(4.6, 3.4, 2, squeeze=False)
        for ax, name, label in zip(axes[0], columns, labels):
            for i, load in enumerate(loads):
                mean = table[table.concurrency == load].groupby("k")[name].mean()
                grey = 0.65 * (1 - i / (len(loads) - 1)) if len(loads) > 1 else 0
                ax.plot(mean.index, mean, label=f"{load} at once", color=str(grey), marker="osD^v"[i % 5], markersize=5)
            ax.set(xlabel="draft tokens a step, K (0: none)", ylabel=label, ylim=(0, None))
            ax.set_xticks(range(int(table.k.min()), int(table.k.max()) + 1))
        axes[0][0].legend(frameon=False)
        drafted, finding = table[table.k > 0], ""
        if "speedup" in table and not drafted.speedup.isna().all():
            best = drafted.sort_values("speedup", na_position="first").iloc[-1]
            finding = f"K={best.k} with {best.concurrency} at once: {best.speedup:.2f} times the tokens per second"
        fig.suptitle(title or finding, x=0.01, ha="left", fontsize=11)
        return fig

    def save(self, folder: str | os.PathLike) -> Path:
        """Write summary.csv, positions.csv, performance.csv, requests.jsonl, settings.json, acceptance.png and
        speed.png; ranges.csv and ranges.png where there are several, skipped.csv where there are some."""
        folder = Path(folder)
        forget(folder)
        tables = {name: getattr(self, name) for name in TABLES}
        if len(self.skipped):
            tables["skipped"] = self.skipped
        if len(ranges := self.compared_ranges()):
            tables["ranges"] = ranges
        for name, table in tables.items():
            write_text(folder / f"{name}.csv", table.to_csv(index=False))
        write_text(folder / "requests.jsonl", self.requests.to_json(orient="records", lines=True))
        write_object(folder / "settings.json", without_secrets(self.settings))
        if len(self.positions):
            save_figure(folder / "acceptance.png", self.plot())
        if len(self.performance):
            save_figure(folder / "speed.png", self.plot_speed())
        if len(ranges):
            from ..core.plot import plot_ranges  # matplotlib, only to draw

            save_figure(folder / "ranges.png", plot_ranges(_lightest(ranges)))
        return folder

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "EngineEvaluation":
        "Read what `save` wrote. Errors: FileNotFoundError; ValueError naming the file."
        folder = Path(folder)
        check_evaluation(folder)
        if not (folder / "settings.json").is_file():
            raise ValueError(
                f"{folder}: is an evaluation by our own decoder, which counts otherwise than "
                "an engine; evaluate again as_engine=True (--as-engine), and compare that"
            )
        found: dict[str, Any] = dict(settings=read_object(folder / "settings.json"))
        file = folder / "requests.jsonl"
        if not file.is_file():  # a pipe would never end
            raise FileNotFoundError(f"{file}: no such file; evaluate again")
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
            found["requests"] = pd.DataFrame(map(json.loads, lines))
        except (ValueError, TypeError, RecursionError) as e:
            raise ValueError(f"{file}: not one request a line ({e}); evaluate again") from e
        found |= {name: read_table(folder / f"{name}.csv") for name in TABLES}
        return cls(**found)


class LoadRows(NamedTuple):
    "One load as rows of the four tables."

    summary: list[dict[str, Any]]  # one for each domain, and for all; empty without drafting
    positions: pd.DataFrame | None  # a row for each position; None without drafting
    performance: list[dict[str, Any]]  # one for each domain, and for all
    requests: list[dict[str, Any]]  # one for each request


def tables_of(load: Load, seed: int = 0, **key: Any) -> LoadRows:
    """One load as rows of the four tables. `seed`: of the bootstrap; `key`: what else identifies the rows, drafter and
    temperature."""
    names = list(dict.fromkeys(r.domain for r in load.replies))
    domains = [None] if names == ["all"] else [None, *names]
    setting = dict(k=load.k, concurrency=load.concurrency)
    seconds = {None: sum(load.seconds.values()), **load.seconds}

    summary, speed = [], []
    drafted = load.k and sum(c["drafts"] for c in load.counts.values())
    for domain in domains:
        replies = [r for r in load.replies if domain in (None, r.domain)]
        row = {**key, "domain": domain or "all", **setting}
        speed.append(row | performance(replies, seconds[domain]))
        rows, sizes = rows_of(load, domain) if drafted else (np.zeros((0, 2)), None)
        if rows[:, 1].any():
            numbers = acceptance_summary(rows, load.k, seed=seed, sizes=sizes)
            summary.append({**key, "domain": domain or "all", **numbers, **setting})
    positions = None
    if drafted:
        table = acceptance_table(rows_of(load)[0], load.k, seed=seed)
        columns = [*key, *table.columns, *setting]
        positions = table.assign(**key, k=load.k, concurrency=load.concurrency)[columns]
    requests = [{**key, **setting, "prompt": i, **request_row(r)} for i, r in zip(load.numbers, load.replies)]
    return LoadRows(summary, positions, speed, requests)


def request_row(reply: Reply) -> dict[str, Any]:
    "One answer as a row of the table of requests, with its own counts where it has some."
    row = asdict(reply)
    counts = row.pop("counts")
    if counts is not None:
        row["steps"] = steps_of([reply], counts)
        row |= {name: counts[name] for name in ("drafts", "proposed", "accepted")}
        row["accepted_at"] = counts["positions"]
    return row


def gather(loads: list[LoadRows], settings: dict) -> EngineEvaluation:
    "Put loads together, and compare the speed of each with the engine without drafting under the same load."
    speed = pd.DataFrame([row for load in loads for row in load.performance])
    same = ["concurrency", "temperature", "domain"]
    plain = speed[speed.k == 0].drop_duplicates(same).set_index(same).tokens_per_second
    baseline = [plain.get(tuple(row), np.nan) for row in speed[same].itertuples(index=False)]
    speed["speedup"] = speed.tokens_per_second / np.array(baseline, dtype=float)
    positions = [load.positions for load in loads if load.positions is not None]
    return EngineEvaluation(
        pd.DataFrame([row for load in loads for row in load.summary]),
        pd.concat(positions, ignore_index=True) if positions else pd.DataFrame(),
        speed,
        pd.DataFrame([row for load in loads for row in load.requests]),
        settings,
    )


def load_by_guidellm(
    endpoint: Endpoint,
    prompts: list[Prompt],
    concurrency: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    model: str | None = None,
    tokenizer: str | None = None,
    **filters: Any,
) -> Load:
    """As `load.run_load`, with GuideLLM; every prompt must be answered. `tokenizer`: folder or hub id; None: the
    model's name. Errors: as of `run_guidellm`."""
    model = model or endpoint.models()[0]
    meter = Meter(endpoint)
    replies: list[Reply] = []
    seconds, counts = {}, {}
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        for domain in dict.fromkeys(p.domain for p in prompts):
            own_prompts = [p for p in prompts if p.domain == domain]
            command = guidellm_command(
                endpoint.url,
                report,
                model,
                tokenizer or model,
                write_dataset(own_prompts, Path(tmp) / "prompts.jsonl"),
                max_tokens=max_tokens,
                streams=concurrency,
                max_requests=len(own_prompts),
                temperature=temperature,
                seed=seed,
                **filters,
            )
            meter.start()
            benchmark = run_guidellm(command, report, len(own_prompts))
            replies += replies_of(benchmark, domain)
            seconds[domain] = benchmark["duration"]
            counts[domain] = meter.stop()
    unknown = [None] * len(replies)  # they are in the order in which they were answered
    return Load(concurrency, replies, unknown, seconds, counts, meter.k)


NO_MIN_P = (
    "min_p={}: vLLM 0.32 does not take it with speculative decoding; leave it out, or measure with engine=reference"
)
UNSET_SAMPLING = (
    "temperatures above 0: on processors vLLM 0.32 reads unset memory for the temperature, top_p and top_k of draft "
    "tokens; texts and acceptance are not the verifier's, and top_k can end the engine. Measure with engine=reference"
)
GENERATORS = {"requests": run_load, "guidellm": load_by_guidellm}


def draft_lengths(k: int | Sequence[int] | None, baseline: bool) -> list[int | None]:
    "The draft lengths of a sweep, each once, in order; 0: no drafting, None: the checkpoint's."
    lengths = [0] if baseline else []
    lengths += [k] if k is None or isinstance(k, int) else k
    return list(dict.fromkeys(lengths))


def drafter_name(checkpoint: str | os.PathLike, serve: Mapping[str, Any]) -> str:
    "What the drafter is called in tables, by the checkpoint and the arguments of `serve_command`."
    config = read_config(checkpoint)
    speculative = serve.get("speculative_config") or {}
    name = config.get("speculators_model_type") or serve.get("method") or speculative.get("method")
    name = name or (what_to_serve(checkpoint)[1] or {}).get("method") or "no drafter"
    return {"ngram": "n-gram", "draft_model": "draft model"}.get(name, name)


def _command(checkpoint, k, arguments) -> list[str]:
    "The command of a server, which reports the counts of each request if it drafts."
    command = serve_command(checkpoint, k, **arguments)
    drafter_is_served = k != 0 and "speculators_model_type" in read_config(command[2])
    drafts = drafter_is_served or "--speculative-config" in command
    if not drafts or any(PER_REQUEST[0] in argument for argument in command):
        return command
    return [*command, *PER_REQUEST]


@dataclass
class Sweep:
    "Measurements of servers that it starts."

    prompts: list[Prompt]
    concurrency: list[int]  # requests at once, each a load
    temperatures: Sequence[float]  # 0: greedy
    max_new_tokens: int  # output limit of a request
    seed: int  # of sampling and of the bootstrap
    generator: str  # a key of `GENERATORS`
    name: str  # of the drafter in tables
    model: str | None = None  # as the server names it; None: the first that it names
    tokenizer: str | None = None  # for GuideLLM
    filters: Mapping[str, Any] = field(default_factory=dict)  # top_p, top_k, min_p
    rows: list[LoadRows] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # that started servers
    skipped: dict[int, str] = field(default_factory=dict)  # prompts that are not measured: why

    def measure(self, url: str, loads: list[int]):
        "Measure a running server under each of these loads, at each temperature."
        endpoint = Endpoint(url, api_key_env="VLLM_API_KEY")
        send = GENERATORS[self.generator]
        if send is load_by_guidellm:
            send = partial(send, tokenizer=self.tokenizer)
        for requests in loads:
            for t in self.temperatures:
                load = send(
                    endpoint, self.prompts, requests, self.max_new_tokens, t, self.seed, self.model, **self.filters
                )
                drafter = self.name if load.k else "no drafter"
                self.skipped |= load.refused
                self.rows.append(tables_of(load, self.seed, drafter=drafter, temperature=t))

    def settings(self, checkpoint: str | os.PathLike) -> dict[str, Any]:
        "How it was measured, for settings.json."
        domains = pd.Series([p.domain for p in self.prompts]).value_counts(sort=False)
        return dict(
            checkpoint=str(checkpoint),
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            **self.filters,
            load=self.generator,
            commands=self.commands,
            prompts=len(self.prompts),
            domains=domains.to_dict(),
        )

    def serve(self, checkpoint, lengths: list[int | None], arguments: Mapping[str, Any], logs, env, **server: Any):
        """Start a server for each draft length (`draft_lengths`), by the arguments of `serve_command`, and measure it.
        `logs`: folder for server logs, None: none are kept; `env`: None: `serve_environment()`; `server`: timeout and
        vllm of `Server`."""
        # an error in any command is found before the first server starts
        commands = {k: _command(checkpoint, k, arguments) for k in lengths}
        drafts = any(PER_REQUEST[0] in command for command in commands.values())
        if drafts and any(self.temperatures) and not accelerated():
            warnings.warn(UNSET_SAMPLING, stacklevel=3)
        speculative = arguments.get("speculative_config") or {}
        remembers = arguments.get("method", speculative.get("method")) == "suffix"
        for k, command in tqdm(commands.items(), desc="draft lengths"):
            log = None if logs is None else Path(logs) / f"server{'' if k is None else f'-k{k}'}.log"
            groups = [[load] for load in self.concurrency] if remembers and k != 0 else [self.concurrency]
            for loads in groups:
                with Server(command, env, log=log, **server) as running:
                    environment = serve_environment() if env is None else env
                    self.commands.append(as_shell(command, environment))
                    self.measure(running.url, loads)


def evaluate_engine(
    checkpoint: str | os.PathLike,  # what to serve, as in `serve_command`, or a server's URL
    data: str | Path | Mapping | Iterable,  # prompts, as in `prompts.read_prompts`
    *,
    k: int | Sequence[int] | None = None,  # tokens to draft, or several; None: the checkpoint's
    concurrency: int | Sequence[int] = 1,  # requests at once, or several
    baseline: bool = True,  # measure without drafting too
    temperatures: Sequence[float] = (0.0,),  # 0: greedy
    top_p: float = 1.0,  # keep the likeliest tokens until they hold this mass; 1: all
    top_k: int = 0,  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0,  # drop tokens less likely than this share of the likeliest; 0: none
    max_new_tokens: int = 64,  # output limit of a request
    max_samples: int | None = None,  # prompts of each domain; None: all
    name: str | None = None,  # of the drafter in tables; None: what the checkpoint says
    model: str | None = None,  # as the server names it; None: the first that it names
    load: str = "requests",  # load generator: "requests", or "guidellm"
    tokenizer: str | None = None,  # for GuideLLM; None: the verifier's
    seed: int = 0,  # of sampling and of the bootstrap
    output_dir: str | os.PathLike | None = None,  # for tables, pictures, server logs; None: off
    timeout: float = 900,  # seconds until a server must answer
    vllm: str | os.PathLike | None = None,  # executable; None: from `server.find_executable`
    env: Mapping | None = None,  # variables for the server; None: `serve_environment()`
    **serve: Any,  # of `serve_command`: verifier, method, native, dtype, max_model_len, extra …
) -> EngineEvaluation:  # tables, `plot()`, `plot_speed()`, `save(folder)`
    """Start a server for each K, or use one that runs; send it the prompts; read its counters.
    Errors: those of `serve`, `load` and `endpoint`; ValueError."""
    given = dict(k=k, concurrency=concurrency, baseline=baseline, temperatures=temperatures)
    given |= dict(max_new_tokens=max_new_tokens, max_samples=max_samples, load=load)
    filters = dict(top_p=top_p, top_k=top_k, min_p=min_p)
    check_options(given | filters | dict(seed=seed, timeout=timeout))
    running = str(checkpoint).startswith(("http://", "https://"))
    if running and (serve or k is not None):
        raise ValueError(
            f"k and {sorted(serve) or 'other arguments of serve_command'} are decided when a "
            f"server starts, {checkpoint} runs already: leave them out"
        )
    if min_p and not running:
        raise ValueError(NO_MIN_P.format(min_p))
    loads = sorted([concurrency] if isinstance(concurrency, int) else concurrency)
    prompts = read_prompts(data, max_samples)
    if load == "guidellm":
        check_guidellm(prompts)
    name = name or ("served" if running else drafter_name(checkpoint, serve))
    sweep = Sweep(
        prompts,
        loads,
        temperatures,
        max_new_tokens,
        seed,
        load,
        name,
        model=model,
        tokenizer=tokenizer,
        filters=filters,
    )
    settings = sweep.settings(checkpoint)
    if running:
        sweep.measure(str(checkpoint), loads)
    else:
        settings["tokenizer"] = find_verifier(checkpoint, serve.get("verifier"))
        sweep.tokenizer = tokenizer or settings["tokenizer"]
        lengths = draft_lengths(k, baseline)
        sweep.serve(checkpoint, lengths, serve, output_dir, env, timeout=timeout, vllm=vllm)
    if sweep.skipped:
        settings["skipped"] = sweep.skipped
    evaluation = gather(sweep.rows, settings)
    if output_dir is not None:
        evaluation.save(output_dir)
        source = data if isinstance(data, (str, os.PathLike)) else None  # only paths are recorded
        inputs = dict(checkpoint=None if running else str(checkpoint), data=source)
        write_provenance(output_dir, "evaluate --engine vllm", evaluation.settings, inputs)
    return evaluation
