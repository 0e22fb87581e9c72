"""What a drafter will be trained on, as a page: lengths, languages, duplicates, coverage.
And turns, the trained share, domains, and what was left out. What should be mended comes first."""

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..core.files import write_text
from ..core.options import check_options
from ..core.plot import closed_axes
from ..data.chat_encoding import token_frequencies
from ..data.chat_template import open_tokenizer
from ..data.prepared_folder import COLOURS, Prepared, load_prepared
from ..regenerate.language import language_of
from .page import Section, page_html, write_page


def turns_in(mask: np.ndarray) -> int:
    "How many answers of a row are trained: runs of trained tokens in its mask [n]."
    return int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1))


_SHINGLE, _HASHES, _AGREE = 8, 8, 6
_RANDOM = np.random.default_rng(0)
_ODD = _RANDOM.integers(1 << 62, size=(_HASHES + _SHINGLE, 1), dtype=np.uint64) * 2 + 1


def signature(ids: np.ndarray) -> np.ndarray | None:
    """What two texts share as often as they share sequences of eight tokens: [8] uint64, the smallest hashes of token
    ids [n]; None: fewer than eight tokens."""
    if len(ids) < _SHINGLE:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + 1, _SHINGLE)
    mixed = (windows * _ODD[_HASHES:, 0]).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    return (mixed * _ODD[:_HASHES]).min(axis=1)


class Repeats:
    "Counts what was there before: rows, prompts, answers, and answers nearly the same."

    def __init__(self):
        self.n = Counter()
        self._seen = {name: set() for name in ("rows", "questions", "answers")}
        self._near = [{} for _ in range(_HASHES)]

    def add(self, ids: np.ndarray, mask: np.ndarray, held_out: bool) -> None:
        "Count a row: ids and mask (bool) [n]. Those of validation come after all training rows."
        question = ids[: mask.argmax()] if mask.any() else ids
        parts = {"rows": ids, "questions": question, "answers": ids[mask]}
        before = {name: self._known(name, part) for name, part in parts.items()}
        for name in before:
            self.n[name] += before[name]
        self.n["held-out questions"] += held_out and before["questions"]
        self.n["nearly"] += self._nearly(parts["answers"]) and not before["answers"]

    def _known(self, name, ids):
        key = hashlib.blake2b(ids.astype(np.int32).tobytes(), digest_size=12).digest()
        known = key in self._seen[name]
        self._seen[name].add(key)
        return known

    def _nearly(self, ids):
        "Whether an earlier answer has six of the eight hashes; this one is kept by its own."
        hashes = signature(ids)
        if hashes is None:
            return False
        found = Counter(table[h] for table, h in zip(self._near, hashes.tolist()) if h in table)
        self.n["signed"] += 1
        for table, h in zip(self._near, hashes.tolist()):
            table.setdefault(h, self.n["signed"])
        return bool(found) and max(found.values()) >= _AGREE


_SAMPLE, _TEXT = 1000, 600  # rows whose language is looked at, and tokens of each


def languages(prepared: Prepared, tokenizer) -> pd.DataFrame:
    "The languages of the answers in a sample of the rows: language -> rows, share."
    chosen = np.unique(np.linspace(0, len(prepared) - 1, _SAMPLE).astype(int))
    found = Counter()
    rows: Any = prepared.rows.with_format("numpy")
    for row in rows.select(chosen.tolist()):
        ids = np.asarray(row["input_ids"])[np.asarray(row["loss_mask"]).astype(bool)]
        text = tokenizer.decode(ids[:_TEXT].tolist(), skip_special_tokens=True)
        found[language_of(text)] += 1
    table = pd.DataFrame(found.most_common(), columns=["language", "rows"])
    table["share"] = table["rows"] / max(len(chosen), 1)
    return table.set_index("language")


def coverage(prepared: Prepared) -> pd.DataFrame:
    """How much of the trained tokens the most frequent ones of the training rows are: draft vocabulary size -> share of
    train, held out."""
    train = token_frequencies(prepared.train)
    counts = np.array(sorted(train.values(), reverse=True), float)
    order = sorted(train, key=lambda token: (-train[token], token))
    known = prepared.config.get("model", {}).get("vocab_size") or 0
    full = max(known, len(order), 1)
    sizes = [size for size in (1 << k for k in range(9, 18)) if size < full] + [full]
    table = pd.DataFrame(index=pd.Index(sizes, name="draft vocabulary"))
    table["train"] = [counts[:size].sum() / max(counts.sum(), 1) for size in sizes]
    if len(prepared.val):
        val = token_frequencies(prepared.val)
        held_out = np.cumsum([val.get(token, 0) for token in order] or [0])
        total = max(sum(val.values()), 1)
        table["held out"] = [held_out[min(size, len(held_out)) - 1] / total for size in sizes]
    return table


_WORTH = 0.01  # share from which a warning is given


def cut_answers(prepared: Prepared) -> int:
    "Rows that end inside an answer because `max_length` cut them."
    origin = prepared.config.get("origin", {})
    if not any(stage.get("what") == "cut" for stage in prepared._reported("stages")):
        return 0
    full = prepared.lengths == origin.get("max_length")
    return sum(bool(mask[-1]) for (_, mask), at in zip(prepared.arrays(), full) if at)


def data_warnings(prepared: Prepared, cut: int, repeats: Counter) -> list[str]:
    """What should be mended before a drafter is trained on a folder, the worst first, by the rows that were cut
    (`cut_answers`) and what `Repeats` has counted."""
    rows, val = max(len(prepared), 1), max(len(prepared.val), 1)
    trained = int(prepared.trained.sum())
    share = trained / max(int(prepared.lengths.sum()), 1)
    stages = {stage.get("what"): stage for stage in prepared._reported("stages")}
    read = stages.get("read", {}).get("conversations", 0)
    lost = stages.get("without a row", {}).get("conversations", 0)
    reasons = prepared._reported("dropped")
    length = prepared.config.get("origin", {}).get("max_length")
    spelled = prepared._reported("control_tokens")
    same = repeats["answers"] + repeats["nearly"]
    lines = [
        (trained == 0, "No token is trained: a drafter learns nothing from this folder."),
        (
            repeats["held-out questions"],
            f"{repeats['held-out questions'] / val:.0%} of the validation rows have a question "
            "of the training rows: validation measures memory. Remove the duplicates.",
        ),
        (
            cut / rows >= _WORTH,
            f"{cut / rows:.0%} of the rows end inside an answer, cut at "
            f"max_length={length}. Prepare with a larger max_length.",
        ),
        (
            read and lost / read >= _WORTH,
            f"{lost / max(read, 1):.0%} of the conversations gave no row"
            f"{': ' + reasons[0]['reason'] if reasons else ''}.",
        ),
        (
            repeats["rows"] / rows >= _WORTH,
            f"{repeats['rows'] / rows:.0%} of the rows are there twice. Prepare with dedup.",
        ),
        (
            same / rows >= 0.1,
            f"{same / rows:.0%} of the rows have the answer "
            "of an earlier row, or nearly: the data are smaller than they look.",
        ),
        (0 < share < 0.1, f"Only {share:.0%} of the tokens are trained; the rest is computed for their sake."),
        (
            spelled,
            f"{sum(line.get('conversations', 0) for line in spelled)} conversations spell "
            "control tokens, which are read as such: see the table at the end.",
        ),
        (not len(prepared.val), "There are no validation rows: prepare with val_fraction."),
    ]
    return [text for given, text in lines if given]


def plot_coverage(table: pd.DataFrame) -> Figure:
    "`coverage` against the size of the draft vocabulary."
    fig, ax = closed_axes(5.5, 3)
    last = table.columns[-1]
    for name, colour in zip(table, (COLOURS["trained"], "#0072b2")):
        ax.plot(table.index, 100 * table[name], marker="o", markersize=4, color=colour, label=name)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="draft vocabulary, most frequent tokens", ylabel="% of the trained tokens")
    ax.set_xticks(list(table.index), [f"{size:,}" for size in table.index], rotation=45)
    enough = table.index[table[last] >= 0.99]
    finding = f"All {table.index[-1]:,} tokens cover {table[last].iloc[-1]:.1%}"
    if len(enough):
        finding = f"{enough[0]:,} tokens cover {table[last][enough[0]]:.1%} ({last})"
    ax.set_title(finding, loc="left")
    ax.legend(frameon=False)
    return fig


def plot_domains(table: pd.DataFrame) -> Figure:
    "Tokens of each of `Prepared.domains`, trained and context; the ten largest."
    top = table.head(10).iloc[::-1]
    fig, ax = closed_axes(5.5, 1.1 + 0.28 * len(top))
    whole = max(int(table["tokens"].sum()), 1)
    trained, context = top["trained"] / whole, (top["tokens"] - top["trained"]) / whole
    names = [str(name).replace("$", r"\$") for name in top.index]  # no formula
    ax.barh(names, 100 * trained, color=COLOURS["trained"], label="trained")
    ax.barh(names, 100 * context, left=100 * trained, color=COLOURS["context"], label="context")
    ax.set(xlabel="% of all tokens")
    most = str(table["trained"].idxmax()).replace("$", r"\$")
    share = table["trained"].max() / max(int(table["trained"].sum()), 1)
    ax.set_title(f"{most} is {share:.0%} of what is trained", loc="left")
    fig.legend(loc="outside lower center", ncols=2, frameon=False)
    return fig


def _lengths(prepared, turns):
    "Tables of lengths and of turns."
    at = [5, 25, 50, 75, 95, 99, 100]
    rows = {"tokens": prepared.lengths, "trained": prepared.trained}
    percentiles = pd.DataFrame(
        {name: np.percentile(v, at).astype(int) if len(v) else 0 for name, v in rows.items()},
        index=pd.Index([f"{p} %" for p in at[:-1]] + ["longest"], name="of the rows, up to"),
    )
    several = pd.Series(turns, dtype=int).clip(upper=5).value_counts().sort_index()
    several.index = pd.Index([f"{n} or more" if n == 5 else str(n) for n in several.index])
    answers = pd.DataFrame({"rows": several, "share": several / max(len(turns), 1)})
    return {"Lengths, in tokens": percentiles, "Trained answers in a row": answers.round(3)}


def _tokenizer(prepared, verifier):
    "(tokenizer or None, why there is none)."
    verifier = verifier or prepared.config.get("model", {}).get("target_model_path")
    if not verifier:
        return None, "languages are left out: the folder does not record its verifier"
    try:
        return open_tokenizer(verifier), ""
    except (OSError, ValueError) as e:
        return None, f"languages are left out: {e}"


def _facts(prepared):
    "What the folder says of itself."
    origin, model = prepared.config.get("origin", {}), prepared.config.get("model", {})
    given = {"folder": prepared.folder, "verifier": model.get("target_model_path")}
    tokens, trained = int(prepared.lengths.sum()), int(prepared.trained.sum())
    given["rows"] = f"{len(prepared.train):,} for training, {len(prepared.val):,} held out"
    given["tokens"] = f"{tokens:,}, {trained:,} of them ({trained / max(tokens, 1):.0%}) trained"
    given |= {name: origin.get(name) for name in ("max_length", "rows of", "seed")}
    for name in ("reasoning", "tool_calls"):
        if f"train_{name}" in origin:
            trains = "trained" if origin[f"train_{name}"] else "not trained"
            given[name.replace("_", " ")] = trains
    return {name: value for name, value in given.items() if value is not None}


class DataReport:
    """What is in a prepared folder: `facts`, `warnings`, `sections`, and all tables by name. The verifier is for its
    tokenizer; None: as recorded."""

    def __init__(self, prepared: Prepared, verifier: str | Path | None = None):
        repeats, turns = Repeats(), []
        for i, (ids, mask) in enumerate(prepared.arrays()):
            repeats.add(ids, mask, i >= len(prepared.train))
            turns.append(turns_in(mask))
        self.facts = _facts(prepared)
        self.warnings = data_warnings(prepared, cut_answers(prepared), repeats.n)
        covered, domains = coverage(prepared), prepared.domains
        lengths = _lengths(prepared, turns)
        figure = prepared.plot()
        plt.close(figure)
        self.sections = [
            Section("Lengths and turns", "", lengths, {"lengths and shares": figure}),
            Section(
                "Vocabulary coverage",
                "The share of the trained tokens that a draft vocabulary of the most frequent "
                "tokens covers. What it does not cover is never drafted.",
                {"Share covered": covered.round(4)},
                {"coverage by size": plot_coverage(covered)},
            ),
        ]
        if len(domains):
            share = (domains["trained"] / domains["tokens"].clip(lower=1)).round(3)
            figures = {"tokens by domain": plot_domains(domains)}
            tables = {"Domains, before the split": domains.assign(**{"trained share": share})}
            self.sections.append(Section("Domains", "", tables, figures))
        tokenizer, why = _tokenizer(prepared, verifier)
        text = "Of the trained tokens of a sample of the rows." if tokenizer else why
        found = {"Languages": languages(prepared, tokenizer).round(3)} if tokenizer else {}
        self.sections.append(Section("Languages", text, found))
        self.sections.append(_repeated(prepared, repeats.n))
        self.sections.append(Section("What was left out", "", left_out(prepared)))

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        "All tables, by their captions."
        return {name: table for part in self.sections for name, table in part.tables.items()}


def _repeated(prepared, n):
    "The section of duplicates."
    names = {
        "rows": "the whole row",
        "questions": "the question, up to the first answer",
        "answers": "the answers",
        "nearly": "the answers, nearly",
        "held-out questions": "a question of the training rows, in a validation row",
    }
    total = pd.Series(len(prepared), index=list(names))
    total["held-out questions"] = len(prepared.val)
    found = [n[name] for name in names]
    table = pd.DataFrame({"rows": found}, index=pd.Index(names.values(), name="seen before"))
    table["share"] = (table["rows"] / total.clip(lower=1).to_numpy()).round(3)
    return Section("Duplicates", "Rows that repeat an earlier one.", {"Seen before": table})


def left_out(prepared: Prepared) -> dict[str, pd.DataFrame]:
    "What a folder was made from, what was left out, and control tokens: caption -> table."
    tables = {
        "From conversations to rows": prepared.table.astype(object),
        "Left out, and the first of each": prepared.dropped,
        "Left out of conversations that are kept": prepared.omitted,
        "Control tokens that messages spell": prepared.control_tokens,
    }
    return {caption: table for caption, table in tables.items() if len(table)}


def report(
    prepared: Path,  # a prepared folder, from `prepare` or the upstream library
    output_dir: Path | None = None,  # for report.html and the tables; default: PREPARED-report
    verifier: str | None = None,  # whose tokenizer reads the answers; default: as recorded
) -> Path:  # report.html
    "Write what is in a prepared folder as a page with figures, and its tables as CSV."
    check_options({"prepared": prepared, "output_dir": output_dir, "verifier": verifier})
    prepared = Path(prepared)
    if prepared.name in ("", ".."):  # `.` has no name
        prepared = Path(os.path.abspath(prepared))
    folder = Path(output_dir or prepared.with_name(f"{prepared.name}-report"))
    made = DataReport(load_prepared(prepared), verifier)
    for name, table in made.tables.items():
        file = "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())
        write_text(folder / f"{file}.csv", table.to_csv())
    title = f"Training data: {prepared.name}"
    return write_page(folder / "report.html", page_html(title, made.sections, made.facts, made.warnings))
