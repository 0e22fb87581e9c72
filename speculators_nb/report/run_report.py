"""One page about a whole run: stages, data, training curves, acceptance.
With intervals, what vLLM says, and the digest of every input."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..core.files import read_object
from ..core.options import pairs
from ..core.plot import closed_axes, plot_loss
from ..core.provenance import RECORDS, provenance_path
from ..data.prepared_folder import load_prepared
from ..nn.supervision import by_position
from .data_report import left_out
from .page import Section, page_html, write_page


def plot_accuracy(log: pd.DataFrame) -> Figure | None:
    "Held-out accuracy at each drafted position against steps, from a Trainer's log; None: it has no accuracy."
    names = by_position(log, "eval_")
    rows = log.dropna(subset=names) if names else log[:0]
    if not len(rows):
        return None
    fig, ax = closed_axes()
    for position, name in enumerate(names, 1):  # a block's slot 0 is no draft token, and has no accuracy
        ax.plot(rows["step"], rows[name], marker="o", label=f"position {position}")
    ax.set(xlabel="step", ylabel="accuracy on held-out rows", ylim=(0, None))
    ax.set_title(f"Position 1 ends at {rows[names[0]].iloc[-1]:.0%}", loc="left")
    ax.legend()
    return fig


def training_section(name: str, folder: Path, arguments: Mapping) -> Section:
    "The curves of a training run and its best checkpoint, by the drafter's folder and the arguments of the stage."
    file = folder / "training_log.csv"
    log = pd.read_csv(file) if file.stat().st_size > 1 else pd.DataFrame()
    state = read_object(folder / "trainer_state.json")
    logged = {"loss", "eval_loss"} & {*log}  # a short run logs nothing
    figures = {"loss": plot_loss(log) if logged else None, "accuracy": plot_accuracy(log)}
    best = state.get("best_global_step")
    text = f"{state.get('global_step')} steps, {state.get('num_train_epochs')} epochs."
    text += "" if logged else " No loss was logged: the run was shorter than logging_steps."
    if best:
        metric = pairs(arguments.get("extra")).get("metric_for_best_model", "loss").removeprefix("eval_")
        text += f" The best checkpoint is that of step {best} ({metric} {state['best_metric']:.4f})."
    shown = ("algorithm", "learning_rate", "total_seq_len", "draft_vocab_size", "seed", "extra")
    given = {k: str(arguments[k]) for k in shown if arguments.get(k) is not None}
    table = pd.DataFrame(given.items(), columns=["argument", "value"])
    return Section(
        f"Training ({name})",
        text,
        {"Arguments": table},
        {shows: figure for shows, figure in figures.items() if figure is not None},
    )


_KEYS = ("drafter", "temperature", "k", "concurrency", "domain", "position")


def readable(table: pd.DataFrame) -> pd.DataFrame:
    "Estimates, some with columns _low and _high, as text with their intervals, three digits."
    shown: dict[Any, Any] = {c: table[c] for c in _KEYS if c in table}
    for c in map(str, table):
        if c in shown or c.endswith(("_low", "_high")):
            continue
        if not pd.api.types.is_numeric_dtype(table[c]):
            shown[c] = table[c]
            continue
        whole = (table[c].dropna() % 1 == 0).all()
        texts = table[c].map(lambda v: "" if pd.isna(v) else f"{v:.0f}" if whole else f"{v:.3f}")
        if f"{c}_low" in table:
            ends = zip(table[f"{c}_low"], table[f"{c}_high"])
            texts = [t if pd.isna(a) else f"{t} [{a:.3f}, {b:.3f}]" for t, (a, b) in zip(texts, ends)]
        shown[c] = texts
    return pd.DataFrame(shown)


def evaluation_section(name: str, folder: Path) -> Section:
    "The tables and pictures of the folder of an evaluation."
    captions = {
        "summary": "Mean acceptance length",
        "positions": "Acceptance at each position",
        "performance": "Throughput and latency",
        "skipped": "Prompts that were not measured",
    }
    files = {c: folder / f"{n}.csv" for n, c in captions.items()}
    # a domain may be called NA
    plain: dict[str, Any] = dict(keep_default_na=False, na_values=[""])
    tables = {c: pd.read_csv(file, **plain) for c, file in files.items() if file.is_file() and file.stat().st_size > 1}
    tables = {c: readable(table) for c, table in tables.items() if len(table)}
    pictures = ("acceptance", "speed")
    figures = {n: folder / f"{n}.png" for n in pictures if (folder / f"{n}.png").is_file()}
    return Section(f"Acceptance ({name})", "", tables, figures)


def _stages_table(stages):
    rows = [
        {
            "stage": name,
            "output": s.get("output") or "",
            "state": s.get("skipped") or ("done" if s.get("done") else "not finished"),
            "time": f"{s['seconds']:.1f} s" if "seconds" in s else "",
        }
        for name, s in stages.items()
    ]
    return pd.DataFrame(rows)


def _record_of(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    "What the output of a stage says of its making; without one what the run has noted."
    output = stage.get("output")
    files = [provenance_path(output), Path(output) / RECORDS[1]] if output else []
    return next((read_object(f) for f in files if f.is_file()), stage)


def _inputs_table(stages):
    "What each stage has read, by its digest."
    rows = []
    for name, stage in stages.items():
        for role, found in _record_of(stage).get("inputs", {}).items():
            digest = found.get("sha256") or found.get("commit") or ""
            rows.append((name, role, found["path"], digest[:16]))
    return pd.DataFrame(rows, columns=["stage", "input", "path", "digest"])


def _versions_table(stages):
    "The commit and the packages that each stage was made with, which need not be those of today."
    made = {name: _record_of(stage).get("reproducibility") for name, stage in stages.items()}
    rows = {name: {"commit": m["git_commit"]} | m["package_versions"] for name, m in made.items() if m}
    return pd.DataFrame.from_dict(rows, orient="index")


def _section_of(name, stage) -> Section | None:
    "What a stage has to tell; None: nothing."
    output = Path(stage["output"]) if stage.get("output") else None
    if not stage.get("done"):
        return None
    if stage["command"] == "prepare" and output is not None:
        prepared = load_prepared(output)
        return Section(f"Data ({name})", f"{prepared!r}.", left_out(prepared))
    if stage["command"] == "train" and output is not None:
        return training_section(name, output, stage["arguments"])
    if stage["command"] == "evaluate" and output is not None:
        return evaluation_section(name, output)
    if stage.get("text"):
        return Section(name, stage["text"])
    return None


def write_run_report(folder: str | PathLike, names: Sequence[str]) -> Path:
    """Write report.html, the page of a run, into its folder, which has its run.json. `names`: the stages of the recipe,
    in order; others that were in it before are left out. OSError, ValueError: a file of a stage that cannot be read."""
    folder = Path(folder)
    known: dict[str, dict[str, Any]] = read_object(folder / "run.json")["stages"]
    stages = {name: known[name] for name in names if name in known}
    found = {name: _section_of(name, stage) for name, stage in stages.items()}
    sections = [
        Section("Stages", "", {"In the order of the recipe": _stages_table(stages)}),
        *(section for section in found.values() if section is not None),
        Section("Inputs", "", {"What each stage has read": _inputs_table(stages)}),
        Section("Versions", "", {"What each stage was made with": _versions_table(stages)}),
    ]
    given = [s["arguments"] for s in stages.values() if "arguments" in s]
    facts = {field: next((a[field] for a in given if a.get(field)), None) for field in ("verifier", "algorithm")}
    left = [name for name, s in stages.items() if not s.get("done")]
    bad = [name for name, s in stages.items() if s.get("code")]
    warnings = [f"{name}: {stages[name].get('skipped') or 'has not finished'}" for name in left]
    warnings += [f"{name}: has findings" for name in bad]
    facts = {k: v for k, v in facts.items() if v is not None}
    return write_page(folder / "report.html", page_html("A run", sections, facts, warnings))
