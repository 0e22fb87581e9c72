"""A grid of training settings and seeds, on the shipped verifier or on any features.
Every run is stored under a key of its content, an interrupted experiment goes on where it was, and all runs end
in one table with paired intervals."""

import hashlib
import inspect
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import dill
import pandas as pd
import torch
from filelock import FileLock
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from ..core import plot
from ..core.concurrency import end_with_parent
from ..core.config import SpeculatorModelConfig
from ..core.files import atomic_folder, read_object, write_object
from ..core.options import check_options, duration, shown
from ..core.provenance import identify, read_provenance, write_provenance
from ..data.prepared_folder import read_data_config
from ..decode.step_counts import COUNTS
from ..evaluate.acceptance import count
from ..jobs.shared_output import one_writer
from ..models.base import SpeculatorModel
from ..nn.losses import LOSSES, RowLoss, parse_loss, register_loss
from ..nn.supervision import LOSS_WEIGHTS, LossWeight, register_loss_weight
from ..train.train_drafter import train_drafter
from ..verifier.identity import fingerprint, same_weights
from .code_digest import code_digest
from .experiment import HeldoutSetting, heldout_setting, settings, shipped_features, train_on_shipped
from .greedy_replay import Answer, greedy_answers, greedy_texts, replay
from .paired import LENGTH, differences, measures, results_table, t_interval
from .shipped import shipped_data

Contenders = Mapping[str, tuple[str, dict[str, Any]]]  # name -> (algorithm, arguments)


def grid(algorithm: str, **factors: Sequence | Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every combination of the factors' values (argument -> its values, or name -> value) of a registered algorithm:
    name -> (algorithm, arguments), for `experiment`. Errors: ValueError for a factor without values."""
    if empty := [name for name, values in factors.items() if not len(values)]:
        raise ValueError(f"{empty[0]} has no values: give at least one")
    named = [
        [(f"{name}={v}", name, values[v] if isinstance(values, Mapping) else v) for v in values]
        for name, values in factors.items()
    ]
    found = {}
    for combination in itertools.product(*named):
        label = ", ".join(text for text, _, _ in combination) or algorithm
        found[label] = algorithm, {name: value for _, name, value in combination}
    return found


class Measured(NamedTuple):
    "What is decoded after training, at temperature 0."

    draft_lengths: tuple[int, ...] = (4,)  # tokens drafted in a step, one measurement each
    n_prompts: int = 24  # held-out prompts, from the first on
    max_new_tokens: int = 160  # of one answer


def is_shipped(record: Mapping[str, Any]) -> bool:
    "Whether features, by the record of their verifier, are of the shipped one, by its weights, wherever it was."
    try:
        verifier = shipped_data() / "tiny-verifier"
    except FileNotFoundError:  # outside a clone there is none, nor its prompts
        return False
    return any(same_weights(record.get(name), verifier) for name in ("fingerprint", "checkpoint"))


class Subject(NamedTuple):
    "What an experiment is about: the verifier, what drafters learn from, what they are asked."

    features: str  # folder of the hidden states
    verifier: str | None = None  # that made them, folder or hub id; None: the shipped one
    heldout: str | None = None  # prompts, as of `read_prompts`; None: the shipped ones

    @classmethod
    def of(cls, features: str | Path, heldout: str | Path | None) -> "Subject":
        "Features of the shipped verifier, or of another with prompts for it. Errors: ValueError where one is missing."
        where = f"features={shown(str(features))}"
        if not Path(features).is_dir():
            raise ValueError(f"{where}: there is no such folder; name one that `speculators-nb features` has made")
        record = read_data_config(features).get("model", {})
        verifier = record.get("target_model_path")
        if heldout is None and not is_shipped(record):
            raise ValueError(
                f"heldout is missing: {where} are of {verifier or 'a verifier that they do not name'}; name prompts to "
                "measure on, e.g. the prepared folder (its held-out part)"
            )
        if heldout is None:
            return cls(str(features))
        if not verifier:
            raise ValueError(f"{where}: data_config.json does not say which verifier made them")
        return cls(str(features), str(verifier), str(heldout))

    def described(self) -> dict[str, Any]:
        """What a result depends on, by name. The shipped features' name is a hash of their content; others bring their
        record, and prompts theirs."""
        about: dict[str, Any] = dict(features=Path(self.features).name)
        if self.heldout is not None:
            prompts = identify(self.heldout)
            about |= dict(record=read_data_config(self.features), heldout=prompts.get("sha256", prompts["path"]))
        return about


class Run(NamedTuple):
    "One training run of an experiment."

    setting: str  # its name
    algorithm: str
    arguments: dict[str, Any]  # of `train_on_shipped`, without the seed
    k: int  # tokens that the drafter is trained to draft
    seed: int
    subject: Subject
    measured: Measured

    def described(self) -> dict[str, Any]:
        "What the result depends on, by name, without the setting's; the code of what is not this library's as a hash."
        drafter = SpeculatorModel.registered_class(self.algorithm)
        own = not drafter.__module__.startswith("speculators_nb.")
        losses = [function for function, *_ in own_losses([self]).values()]
        about = dict(
            algorithm=self.algorithm,
            code=code_digest([drafter, drafter.config_class]) if own else None,
            arguments=settings(self.algorithm, self.k) | self.arguments,
            seed=self.seed,
            measured=self.measured,
        )
        about |= self.subject.described()
        return about | (dict(losses=code_digest(losses)) if losses else {})

    def effective(self) -> dict[str, Any]:
        "As `described`, with what a training step is called with, and without arguments that repeat a default."
        drafter = SpeculatorModel.registered_class(self.algorithm)
        defaults = {p.name: p.default for p in inspect.signature(train_drafter).parameters.values()}
        defaults |= drafter.training_arguments()
        about = self.described()
        others = {n: v for n, v in about["arguments"].items() if n not in drafter.forward_arguments()}
        changed = {n: v for n, v in others.items() if n not in defaults or defaults[n] != v}
        step, _ = drafter.get_trainer_kwargs(**about["arguments"])
        return about | dict(arguments=changed, step=step)

    @property
    def key(self) -> str:
        "The name of its folder: 16 hex digits."
        text = json.dumps(self.described(), sort_keys=True, default=code_digest)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        "In messages."
        return f"{self.setting}, seed {self.seed}"


def written_once(setting: HeldoutSetting, max_new_tokens: int, file: Path) -> list[list[int]]:
    "The verifier's answers to the prompts, kept in a file: they are the same for every run and worker."
    request = dict(verifier=fingerprint(setting.verifier.model), eos_token_ids=sorted(setting.eos_token_ids))
    request |= dict(prompts=setting.prompts, max_new_tokens=max_new_tokens)
    with FileLock(file.with_name(f".{file.name}.lock")):
        kept = read_object(file) if file.is_file() else {}
        if request.items() <= kept.items():
            return kept["texts"]
        texts = greedy_texts(setting.verifier, setting.prompts, max_new_tokens, setting.eos_token_ids)
        write_object(file, request | dict(texts=texts), indent=None)
    return texts


@lru_cache(maxsize=2)
def _answers(
    measured: Measured, subject: Subject, layers: tuple[int, ...], kept: Path
) -> tuple[list[Answer], list[str]]:
    "The verifier's answers with the states of the features' layers, and the domain of each prompt."
    reads = type("Reads", (), {"aux_layer_ids": layers})
    setting = heldout_setting({"any": reads}, measured.n_prompts, verifier=subject.verifier, heldout=subject.heldout)
    limit, beyond = measured.max_new_tokens, max(measured.draft_lengths)
    texts = written_once(setting, limit, kept)
    answers = greedy_answers(setting.verifier, setting.prompts, limit, beyond=beyond, texts=texts)
    return answers, setting.domains


def counts_of(drafter: Any, measured: Measured, subject: Subject, kept: Path) -> pd.DataFrame:
    """Steps and accepted tokens of a drafter (`model.drafter()`) on every held-out prompt: k, prompt, domain, steps,
    steps_drafted, proposed, accepted, at_1, at_2, …; the verifier's answers are in the file `kept`, written by the
    first run."""
    stored = read_data_config(subject.features)["hidden_states"]["layer_ids"]
    layers = sorted({*stored, *drafter.aux_layer_ids})
    answers, domains = _answers(measured, subject, tuple(layers), kept)
    reads = [layers.index(i) for i in drafter.aux_layer_ids]
    rows = []
    for k in measured.draft_lengths:
        names = [*COUNTS, *(f"at_{i}" for i in range(1, k + 1))]
        for i, (answer, domain) in enumerate(zip(answers, domains)):
            states = answer.states.unflatten(-1, (len(layers), -1))[:, reads].flatten(1)
            numbers = count(replay(drafter, answer._replace(states=states), k), k).astype(int).tolist()
            rows.append(dict(k=k, prompt=i, domain=domain) | dict(zip(names, numbers)))
    return pd.DataFrame(rows)


class Pace(TrainerCallback):
    "Says once, a few seconds into the first run, how long the training of all runs takes at its pace, so many at once."

    def __init__(self, runs: int, at_once: int):
        self.runs, self.at_once = runs, at_once
        self.began: float | None = None  # when the first step ended; None: before, and once it is said

    def on_step_end(self, args, state, control, **_):
        now, steps = time.perf_counter(), state.global_step - 1
        if steps == 0:  # the first one is slower than the others
            self.began = now
        elif self.began is not None and steps >= 3 and now - self.began >= 3:
            step = (now - self.began) / steps
            whole = duration(step * state.max_steps * self.runs / self.at_once)
            _say(f"training takes about {whole}: {state.max_steps} steps a run, {duration(step)} each; then measuring")
            self.began = None


def _say(text):
    tqdm.write(text, file=sys.stderr)


def do_run(run: Run, folder: Path, pace: Pace | None = None) -> None:
    """Train, measure and store in a folder that appears when all is done; `pace` is of the first run, where no other
    says how long one takes."""
    start = time.perf_counter()
    once: dict[str, Any] = dict(eval_share=0.0, eval_strategy="no", seed=run.seed, callbacks=[pace] if pace else None)
    with atomic_folder(folder) as building:
        drafter_folder = building / "drafter"
        features, verifier = Path(run.subject.features), run.subject.verifier
        train_on_shipped(run.algorithm, drafter_folder, run.k, features, verifier, **once | run.arguments)
        drafter = SpeculatorModel.from_pretrained(drafter_folder).drafter()
        counts = counts_of(drafter, run.measured, run.subject, folder.with_name("answers.json"))
        counts.to_csv(building / "counts.csv", index=False)
        given = {name: getattr(value, "__name__", None) or str(value) for name, value in run.arguments.items()}
        about = dict(setting=run.setting, seed=run.seed, algorithm=run.algorithm, arguments=given)
        write_object(building / "setting.json", about)
        inputs = dict(features=features, verifier=verifier or shipped_data() / "tiny-verifier")
        record = run._asdict() | dict(arguments=given, measured=run.measured._asdict())
        record |= dict(heldout=run.subject.heldout)
        del record["subject"]
        seconds = round(time.perf_counter() - start, 1)
        write_provenance(building, "experiment", record, inputs, seconds=seconds)


def _own_classes(runs) -> list[tuple[str, type, type]]:
    "(name, config, drafter) of the algorithms that are not this library's."
    found = {run.algorithm: SpeculatorModel.registered_class(run.algorithm) for run in runs}
    return [
        (name, drafter.config_class, drafter)
        for name, drafter in found.items()
        if not drafter.__module__.startswith("speculators_nb.")
    ]


def own_losses(runs: list[Run]) -> dict[str, RowLoss | LossWeight]:
    "Losses and weights of losses that runs name and that are not this library's."
    found: dict[str, RowLoss | LossWeight] = {}
    for run in runs:
        loss, weight = run.arguments.get("loss_fn"), run.arguments.get("per_position_loss_weight")
        found |= {name: LOSSES[name] for name in (parse_loss(loss) if loss else ())}
        found |= {weight: LOSS_WEIGHTS[weight]} if weight in LOSS_WEIGHTS else {}
    return {name: own for name, own in found.items() if not own[0].__module__.startswith("speculators_nb.")}


@contextmanager
def _importable(definitions):
    "A fresh process has this one's path: what was imported from a file is found there, too."
    modules = {sys.modules.get(own.__module__) for own in definitions}
    files = {getattr(m, "__file__", None) for m in modules if m and "." not in m.__name__}
    folders = {str(Path(file).parent) for file in files if file} - set(sys.path)
    sys.path += folders
    try:
        yield
    finally:
        sys.path[:] = [folder for folder in sys.path if folder not in folders]


def _in_worker(sent: bytes) -> None:
    "Register the notebook's classes and losses in this process, and do a run."
    disable_progress_bar()  # of loading weights
    classes, losses, run, folder, threads, pace = dill.loads(sent)
    torch.set_num_threads(threads)
    for name, config, drafter in classes:
        SpeculatorModelConfig.register(name)(config)
        SpeculatorModel.register(name)(drafter)
    for name, own in losses.items():
        if isinstance(own, RowLoss):
            register_loss(name, own.grad)(own.value)
        else:
            register_loss_weight(name, own.reads_accept)(own.weigh)
    do_run(run, folder, pace)


def _finishing(runs: list[Run], folder: Path, workers: int, pace: Pace | None) -> Iterator[tuple[Run, str | None]]:
    "Each run as it ends, with its error."
    if min(workers, len(runs)) < 2:
        for run in runs:
            try:
                do_run(run, folder / run.key, pace if run is runs[0] else None)
                yield run, None
            except Exception as e:
                yield run, f"{type(e).__name__}: {e}"
        return
    classes, losses = _own_classes(runs), own_losses(runs)
    definitions = [kind for _, *both in classes for kind in both] + [function for function, *_ in losses.values()]
    threads = max(1, torch.get_num_threads() // workers)
    n, context = min(workers, len(runs)), get_context("spawn")
    with _importable(definitions), ProcessPoolExecutor(n, context, end_with_parent) as pool:
        sent = {}
        for run in runs:
            first = pace if run is runs[0] else None
            work = dill.dumps((classes, losses, run, folder / run.key, threads, first), recurse=True)
            sent[pool.submit(_in_worker, work)] = run
        try:
            for future in as_completed(sent):
                error = future.exception()
                yield sent[future], error and f"{type(error).__name__}: {error}"
        finally:
            pool.shutdown(cancel_futures=True)


def _values(runs, factor):
    "The factor's values in the order of the runs, and what else varies, as text for each run."
    others = [c for c in runs.columns if c not in ("setting", "seed", "folder", factor)]
    others = [c for c in others if factor != "setting" and runs[c].nunique(dropna=False) > 1]
    text = runs[[factor, *others]].map(lambda v: "usual" if pd.isna(v) else str(v))
    rest = text[others].agg(", ".join, axis=1) if others else ""
    return runs.assign(value=text[factor], rest=rest)


@dataclass
class Experiment:
    "Finished runs."

    runs: pd.DataFrame  # setting, seed, algorithm, folder, a column for each argument
    counts: pd.DataFrame  # setting, seed, then as `counts_of`
    failed: dict[str, str] = field(default_factory=dict)  # run -> its error

    def table(self, k: int | None = None, baseline: str | None = None) -> pd.DataFrame:
        """Mean acceptance length of every setting, with paired differences from the baseline (None: the first setting),
        at k tokens drafted in a step (None: the most); as `results_table`."""
        return results_table(self.counts, k or int(self.counts.k.max()), baseline)

    def plot(self, factor: str = "setting", k: int | None = None, title: str | None = None) -> Figure:
        """Mean acceptance length by a factor, an argument that varies or the settings as they are: seeds as dots, means
        with their 95 % intervals. `k`: tokens drafted in a step (None: the most); `title` None: the best value, where
        it is ahead of all others beyond the intervals of the paired differences."""
        k = k or int(self.counts.k.max())
        runs = _values(self.runs, factor)
        lengths = measures(self.counts, k)[LENGTH].rename("length").reset_index()
        table = runs.merge(lengths, on=["setting", "seed"])
        order = list(dict.fromkeys(table.value))
        fig, ax = plot.closed_axes(max(4.5, 1.1 * len(order)), 3.4)
        looks = plot.look([rest or self.runs.algorithm.iloc[0] for rest in dict.fromkeys(table.rest)])
        for (name, (colour, marker)), (_, line) in zip(looks.items(), table.groupby("rest", sort=False)):
            _draw_line(ax, line, order, colour, marker, name)
            if factor == "setting":  # names have no order
                ax.lines[0].set_linestyle("none")
        ax.set_xticks(range(len(order)), order)
        ax.set(xlabel=factor, ylabel=f"mean acceptance length, K = {k}")
        best = table.groupby("value").length.mean()
        found = f"{best.idxmax()} is longest: {best.max():.2f} tokens a step"
        if not _is_ahead(self.counts, table, best.idxmax(), k):
            found = f"None is ahead beyond the intervals: {best.min():.2f} to {best.max():.2f}"
        ax.set_title(title or found, loc="left")
        if len(looks) > 1:
            ax.legend()
        return fig


def _is_ahead(counts, table, value, k):
    "Whether a factor's value is ahead of each other one by their paired differences, whatever else varies."
    for _, line in table.drop_duplicates("setting").groupby("rest"):
        own, others = line.setting[line.value == value], line.setting[line.value != value]
        if own.empty:
            return False
        for setting in own:
            behind = differences(counts[counts.setting.isin([setting, *others])], setting, k).query(
                "measure == @LENGTH"
            )
            if len(behind) < len(others) or (behind.high >= 0).any():
                return False
    return True


def _draw_line(ax, line, order, colour, marker, label):
    "One line of a factor's picture."
    by_value = line.groupby("value").length
    at = [i for i, value in enumerate(order) if value in by_value.groups]
    found = [t_interval(by_value.get_group(order[i])) for i in at]
    mean, low, high = map(list, zip(*found))
    whiskers = [[m - a for m, a in zip(mean, low)], [b - m for m, b in zip(mean, high)]]
    ax.scatter([order.index(v) for v in line.value], line.length, s=14, color=colour, alpha=0.5)
    ax.errorbar(at, mean, whiskers, marker=marker, color=colour, capsize=3, label=label)


def read_run(folder: Path, setting: str | None = None) -> tuple[dict[str, Any], pd.DataFrame]:
    """A run's row of the tables: setting (None: its stored name), seed, algorithm, arguments, folder; and its counts.
    Errors: FileNotFoundError where there is no finished run."""
    if not (folder / "setting.json").is_file():
        raise FileNotFoundError(f"{folder}: is no finished run: it has no setting.json")
    about = read_object(folder / "setting.json")
    name = about["setting"] if setting is None else setting
    row = dict(setting=name, seed=about["seed"], algorithm=about["algorithm"])
    counts = pd.read_csv(folder / "counts.csv")
    counts.insert(0, "seed", about["seed"])
    counts.insert(0, "setting", name)
    return row | about["arguments"] | dict(folder=str(folder)), counts


def _together(found, failed=None) -> Experiment:
    rows, counts = zip(*found)
    return Experiment(pd.DataFrame(rows), pd.concat(counts, ignore_index=True), failed or {})


def read_experiment(folder: str | os.PathLike) -> Experiment:
    """Every finished run of a folder that `experiment` wrote, those of other calls too; runs of one name and seed have
    their keys in the name. Errors: FileNotFoundError where there is none."""
    runs = sorted(Path(folder).glob("[!.]*/setting.json"))
    if not runs:
        raise FileNotFoundError(f"{folder}: has no finished run; name the folder of an experiment")
    found = [read_run(run.parent) for run in runs]
    alike = Counter((row["setting"], row["seed"]) for row, _ in found)
    for row, counts in found:
        if alike[row["setting"], row["seed"]] > 1:  # the setting had other arguments before
            row["setting"] += f" ({Path(row['folder']).name})"
            counts["setting"] = row["setting"]
    return _together(sorted(found, key=lambda pair: (pair[0]["setting"], pair[0]["seed"])))


def seconds_to_go(runs: Sequence[Run], folder: Path, failed: Mapping[str, str], workers: int) -> float | None:
    """How long the missing runs of an experiment's folder take: as those of the same setting took that are there, else
    as all of them did; runs that have failed are not tried again. None: no run is there that says how long one
    takes."""
    took: dict[str, list[float]] = {}
    for run in runs:
        if (folder / run.key).is_dir():
            with suppress(FileNotFoundError, KeyError):  # a run of another version
                seconds = read_provenance(folder / run.key)["results"]["seconds"]
                took.setdefault(run.setting, []).append(seconds)
    missing = [run for run in runs if not (folder / run.key).is_dir() and run.name not in failed]
    if not took:
        return None
    usual = [seconds for setting in took.values() for seconds in setting]
    return sum(fmean(took.get(run.setting, usual)) for run in missing) / max(1, min(workers, len(missing)))


class EveryRunFailed(RuntimeError):
    "An experiment has no run to show."


def planned(
    contenders: Contenders, seeds: int, k: int, measured: Measured, subject: Subject, args: dict[str, Any]
) -> list[Run]:
    """The runs of an experiment, seed by seed. Errors: ValueError for an option out of its range, and for two settings
    that are the same once defaults are filled in."""
    if not contenders:
        raise ValueError("contenders is empty: give a name, an algorithm and arguments")
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: must be at least 1")
    for algorithm, own in contenders.values():
        check_options(dict(algorithm=algorithm, k=k) | args | own)
    limit = measured.max_new_tokens
    check_options(dict(n_prompts=measured.n_prompts, max_new_tokens=limit))
    for length in measured.draft_lengths:
        check_options(dict(k=length))
        if limit < length + 2:  # the first token comes with the prompt, the last one from the verifier
            raise ValueError(
                f"max_new_tokens={limit}: no step of such an answer drafts {length} tokens; give at least {length + 2}"
            )
    if taken := {"seed", "overwrite", "output_dir"} & {
        name for own in (args, *(own for _, own in contenders.values())) for name in own
    }:
        raise ValueError(f"{min(taken)}: is the experiment's own; leave it out")
    runs = [
        Run(name, algorithm, args | own, k, seed, subject, measured)
        for seed in range(seeds)
        for name, (algorithm, own) in contenders.items()
    ]
    known: dict[str, str] = {}
    for run in runs[: len(contenders)]:
        content = json.dumps(run.effective(), sort_keys=True, default=code_digest)
        if content in known:
            raise ValueError(
                f"contenders: {known[content]!r} and {run.setting!r} are the same setting once "
                "defaults are filled in; leave one out"
            )
        known[content] = run.setting
    return runs


def experiment(
    folder: str | os.PathLike,  # gets a folder for each run
    contenders: Contenders,  # name -> (algorithm, arguments), as from `grid`
    seeds: int = 3,  # each setting is trained with seeds 0, 1, …
    k: int = 4,  # tokens that each drafter is trained to draft
    draft_lengths: Sequence[int] | None = None,  # measured, one decoding each; None: k
    n_prompts: int = 24,  # held-out prompts
    max_new_tokens: int = 160,  # of one answer
    workers: int = 1,  # processes; 1: this one
    features: str | Path | None = None,  # None: `shipped_features()`
    heldout: str | Path | None = None,  # prompts, needed with features of one's own
    after_each: Callable[[Experiment], None] | None = None,  # called with what is finished
    **args,  # of `train_drafter`, for all
) -> Experiment:
    """Train every setting with every seed, on the shipped data or on features of one's own, and measure greedy
    acceptance on the same held-out prompts. How many runs are kept and how long the others take is printed first, and
    again as runs end. Errors: ValueError for settings that cannot be run; BlockingIOError: another process is at work
    in the folder; the first error where every run fails."""
    folder = Path(folder)
    measured = Measured(tuple(draft_lengths or (k,)), n_prompts, max_new_tokens)
    subject = Subject("unknown") if features is None else Subject.of(features, heldout)
    runs = planned(contenders, seeds, k, measured, subject, args)
    if features is None:  # made only once the settings are known to be right
        runs = [run._replace(subject=Subject(str(shipped_features()))) for run in runs]
    failed: dict[str, str] = {}

    def finished() -> Experiment:
        done = [run for run in runs if (folder / run.key).is_dir()]
        return _together([read_run(folder / run.key, run.setting) for run in done], failed)

    with one_writer(folder):
        missing = [run for run in runs if not (folder / run.key).is_dir()]
        left = seconds_to_go(runs, folder, failed, workers)
        first = Pace(len(missing), min(workers, len(missing))) if missing and left is None else None
        when = "; a few steps of the first say how long" if left is None else f" in about {duration(left)}"
        kept = f"{len(runs)} runs: {len(runs) - len(missing)} kept"
        _say(f"{kept}, {len(missing)} to do{when}" if missing else kept)
        form = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} runs in {elapsed}{postfix}"
        with tqdm(total=len(runs), initial=len(runs) - len(missing), bar_format=form, mininterval=0) as bar:
            for run, error in _finishing(missing, folder, workers, first):
                if error:
                    failed[run.name] = error
                left = seconds_to_go(runs, folder, failed, workers)
                bar.set_description(run.name, refresh=False)
                bar.set_postfix_str(f"about {duration(left)} to go" if left else "", refresh=False)
                bar.update()
                if error:
                    tqdm.write(f"{run.name}: {error}")
                elif after_each:
                    after_each(finished())
    if len(failed) == len(runs):
        raise EveryRunFailed(f"every run failed; {next(iter(failed))}: {next(iter(failed.values()))}")
    return finished()


def announce(folder: str | os.PathLike) -> Callable[[Experiment], None]:
    "For `after_each`: print one line for every run that is not in the experiment's folder now."
    before = {str(path.parent) for path in Path(folder).glob("[!.]*/setting.json")}

    def finished(found):
        lengths = measures(found.counts, int(found.counts.k.max()))[LENGTH]
        for run in found.runs.itertuples():
            if run.folder not in before:
                before.add(run.folder)
                length = lengths[run.setting, run.seed]
                tqdm.write(f"{run.setting}, seed {run.seed}: {length:.2f} tokens a step")

    return finished
