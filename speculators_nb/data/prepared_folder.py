"""Reading a prepared data set: token ids, loss masks, token counts, draft vocabulary, origin.
It may have our layout or the upstream library's."""

import json
import operator
import os
from collections.abc import Iterator
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from ..core.checkpoints import load_pickle
from ..core.files import read_object
from ..core.options import check_options
from ..nn.draft_vocabulary import save_vocab_mapping, vocab_mapping_from_frequencies
from .chat_encoding import token_frequencies
from .messages import brief
from .sources import load_table


def read_token_freq(folder: str | os.PathLike, trained: int | None = None) -> dict[int, int] | None:
    """Token id -> trained occurrences of a prepared folder, ours or upstream's: `token_freq.json`, else `token_freq.pt`
    (as data: ValueError for a pickle of anything but numbers). None: there is none, or its sum is not `trained`."""
    files = [Path(folder) / name for name in ("token_freq.json", "token_freq.pt")]
    files = [file for file in files if file.is_file()]
    if not files:
        return None
    file = files[0]
    freq = load_pickle(file) if file.suffix == ".pt" else None
    try:
        if freq is None:
            freq = json.loads(file.read_text(encoding="utf-8"))
        freq = _checked_counts(freq)
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(
            f"{file}: holds {e}; expected token id -> count. Delete it: it can be counted again."
        ) from None
    return freq if trained is None or sum(freq.values()) == trained else None


def _checked_counts(freq):
    "Counts by token id, both whole numbers from 0 on. TypeError, ValueError: they are not."
    if not isinstance(freq, dict):
        raise TypeError(f"a {type(freq).__name__}")
    freq = {int(token): operator.index(count) for token, count in freq.items()}
    for token, count in freq.items():
        if token < 0 or count < 0:
            raise ValueError(f"{brief(count)} for token {token}")
    return freq


class _Split(BaseModel):
    "Numbers of rows."

    train: NonNegativeInt
    val: NonNegativeInt


RECORDED: tuple[tuple[str, Any, str], ...] = (  # of data_config.json what is read: what it must be, where it is there
    ("an object", dict, "model origin report split data hidden_states"),
    (
        "a list of objects",
        list[dict],
        "report.stages report.dropped report.omitted report.control_tokens report.domains",
    ),
    ("a list of layer numbers", list[NonNegativeInt], "hidden_states.layer_ids"),
    ("numbers of rows, train and val", _Split, "split data.split"),
    ("a string", str | None, "model.target_model_path model.fingerprint"),
)


def read_data_config(folder: str | Path) -> dict:
    """data_config.json of a prepared folder or a feature folder, ours or upstream's; empty: there is none. ValueError
    names the file and the field that is not as it was written."""
    file = Path(folder) / "data_config.json"
    if not file.is_file():
        return {}
    config = read_object(file)
    for expected, kind, fields in RECORDED:
        for field in fields.split():
            part, _, name = field.rpartition(".")
            there = config.get(part, {}) if part else config
            if name not in there:
                continue
            try:
                TypeAdapter(kind).validate_python(there[name], strict=True)
            except ValidationError:
                raise ValueError(
                    f"{file}: {field}={brief(there[name])}, expected {expected}. Make the folder again, or copy the "
                    "file again."
                ) from None
    return config


def config_of(dataset: Dataset) -> dict:
    "`read_data_config` of the folder that a table was opened from; empty: there is none, or several."
    folders = {Path(file["filename"]).parent for file in dataset.cache_files}
    configs = [config for config in map(read_data_config, folders) if config]
    return configs[0] if len(configs) == 1 else {}


def changes(old: dict, new: dict) -> list[str]:
    'What differs between two origins of a folder: "max_length was 2048, is 1024" for each difference.'
    names = [*new, *(old.keys() - new.keys())]
    return [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]


def _check_columns(folder, rows):
    "ValueError unless the rows are lists of whole numbers, and of one length each."
    if missing := {"input_ids", "loss_mask"} - set(rows.column_names):
        raise ValueError(
            f"{folder}: the table has no column {', '.join(sorted(missing))}, only "
            f"{', '.join(rows.column_names)}. Is this a prepared folder?"
        )
    table = rows.data.table
    for name, expected in (("input_ids", "integers"), ("loss_mask", "booleans or integers")):
        column = table.column(name)
        kind = getattr(column.type, "value_type", pa.null())  # of a list
        numbers = pa.types.is_integer(kind) or (name == "loss_mask" and pa.types.is_boolean(kind))
        if not numbers or column.null_count:
            raise ValueError(
                f"{folder}: column {name} holds {column.type}, or nothing in some rows; "
                f"expected lists of {expected}. Prepare the data again."
            )
    lengths, marks = (
        pc.call_function("list_value_length", [table.column(name)]).to_numpy() for name in ("input_ids", "loss_mask")
    )
    others = {"loss_mask": marks}
    if "seq_len" in rows.column_names:
        others["seq_len"] = table.column("seq_len").to_numpy()
    for name, values in others.items():
        if len(wrong := np.flatnonzero(values != lengths)):
            row = int(wrong[0])
            raise ValueError(
                f"{folder}: row {row} has {lengths[row]} tokens in input_ids, "
                f"{values[row]} by {name}. Prepare the data again."
            )


def _count(n, unit):
    "A number with its unit: 1 row, 2 rows."
    return f"{n} {unit}{'s' * (n != 1)}"


def _places(places, n) -> str:
    "The first places of n, each without the file that the one before it names."
    if not places:
        return ""
    heads = [place.rpartition(", ")[0] for place in places]
    shown = [
        place.removeprefix(f"{head}, ") if head == before else place
        for place, head, before in zip(places, heads, [None, *heads])
    ]
    return f" ({'; '.join([*shown, *['…'] * (n > len(places))])})"


COLOURS = {"context": "#c9c9c9", "trained": "#e69f00", "cut off": "#d55e00"}


def _plot_lengths(ax, prepared):
    "How many tokens are in rows of which length."
    edges = np.linspace(0, max(int(prepared.lengths.max(initial=1)), 1), 31)
    centres = (edges[1:] + edges[:-1]) / 2
    for name, tokens in (("context", prepared.lengths), ("trained", prepared.trained)):
        heights, _ = np.histogram(prepared.lengths, edges, weights=tokens)
        ax.bar(centres, heights, edges[1] * 0.92, color=COLOURS[name], label=name)
    if limit := prepared.config.get("origin", {}).get("max_length"):
        at = min(limit, edges[-1])
        ax.axvline(at, ls=":", color="#555555", label=f"max_length {limit}")
    ax.set(xlabel="length of the row, tokens", ylabel="tokens in such rows")
    median = int(np.median(prepared.lengths)) if len(prepared) else 0
    ax.set_title(f"{len(prepared)} rows; the median has {median} tokens", loc="left")
    ax.legend(frameon=False)


def _plot_shares(ax, prepared):
    "Which share of the tokens is trained, is context, was cut off."
    tokens = int(prepared.lengths.sum())
    trained = int(prepared.trained.sum())
    cut = prepared.config.get("report", {}).get("tokens_cut", 0)
    whole = max(tokens + cut, 1)
    start = 0
    for name, count in (("trained", trained), ("context", tokens - trained), ("cut off", cut)):
        ax.barh(0, count / whole, left=start / whole, color=COLOURS[name], height=0.5)
        if count:
            centre = (start + count / 2) / whole
            text = f"{name}\n{count / whole:.0%}"
            ax.text(centre, 0.34, text, ha="center", va="bottom", fontsize=9)
        start += count
    ax.set(xlim=(0, 1), ylim=(-0.5, 1), xlabel=f"share of {whole} tokens", yticks=[])
    ax.spines["left"].set_visible(False)
    ax.set_title(f"{trained / whole:.0%} of the tokens are trained", loc="left")


class Prepared:
    """An open prepared folder: `rows`, `train`, `val`, `token_freq`, `config`; `table`, `dropped` and `plot()` show
    what is in it, as it does itself in a notebook."""

    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder).expanduser()
        rows = load_table(folder)
        _check_columns(folder, rows)
        self.config = read_data_config(folder)
        if "seq_len" not in rows.column_names:
            lengths = [len(ids) for ids in rows.with_format("numpy")["input_ids"]]
            rows = rows.add_column("seq_len", lengths)
        self.rows: Dataset = rows.with_format("torch")
        split = self.config.get("split", {"train": len(rows), "val": 0})
        if sum(split.values()) != len(rows):
            raise ValueError(
                f"{folder}: data_config.json counts {sum(split.values())} rows, the table has "
                f"{len(rows)}. One of them is of another run: prepare again."
            )
        self.train = self.rows.select(range(split["train"]) or [])
        self.val = self.rows.select(range(split["train"], len(rows)) or [])

    def __len__(self):
        return len(self.rows)

    @cached_property
    def lengths(self) -> np.ndarray:  # [rows] tokens
        "Length of each row."
        column: Any = self.rows.with_format("arrow")["seq_len"]
        return column.to_numpy().astype(np.int64)

    def arrays(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        "The rows, training rows first: input_ids [n], loss_mask [n] bool."
        flat: Any = partial(pc.call_function, "list_flatten")
        columns: Any = self.rows.select_columns(["input_ids", "loss_mask"])
        for batch in columns.with_format("arrow").iter(1000):
            lengths = pc.call_function("list_value_length", [batch["input_ids"]]).to_numpy()
            ids = flat([batch["input_ids"]]).to_numpy()
            mask = flat([batch["loss_mask"]]).to_numpy(zero_copy_only=False).astype(bool)
            ends = lengths.cumsum()[:-1]
            yield from zip(np.split(ids, ends), np.split(mask, ends))

    @cached_property
    def trained(self) -> np.ndarray:  # [rows] tokens inside the mask
        "Trained tokens of each row."
        return np.array([np.count_nonzero(mask) for _, mask in self.arrays()], np.int64)

    @cached_property
    def token_freq(self) -> dict[int, int]:
        "Token id -> trained occurrences: the folder's counts, or new ones where it has none of this table."
        stored = read_token_freq(self.folder, int(self.trained.sum()))
        return stored or token_frequencies(self.rows)

    def _reported(self, name):
        return self.config.get("report", {}).get(name, [])

    @property
    def table(self) -> pd.DataFrame:  # one line a stage: conversations, rows, tokens, trained
        "What came in, what was left out, what is left; a stage has NA for what it does not count."
        split = len(self.train)
        left = [("train", slice(0, split)), ("val", slice(split, None))]
        lines = [
            {
                "what": name,
                "rows": len(self.lengths[part]),
                "tokens": int(self.lengths[part].sum()),
                "trained": int(self.trained[part].sum()),
            }
            for name, part in left
            if len(self.lengths[part])
        ]
        frame = pd.DataFrame([*self._reported("stages"), *lines]).set_index("what")
        frame = frame.reindex(columns=["conversations", "rows", "tokens", "trained"])
        frame = frame.astype("Int64")
        frame["trained share"] = (frame["trained"] / frame["tokens"]).astype("Float64").round(3)
        return frame

    def _listed(self, name, columns) -> pd.DataFrame:  # by the first of these columns
        return pd.DataFrame(self._reported(name), columns=columns).set_index(columns[0])

    @property
    def dropped(self) -> pd.DataFrame:  # reason -> count, unit, the place of the first
        "Why conversations and rows are not in the table."
        return self._listed("dropped", ["reason", "count", "unit", "first"])

    @property
    def omitted(self) -> pd.DataFrame:  # what -> conversations, place of the first
        "What was left out of conversations that are kept, or is not trained."
        return self._listed("omitted", ["what", "conversations", "first"])

    @property
    def control_tokens(self) -> pd.DataFrame:  # token -> conversations, place of the first
        "Control tokens that messages spell: the tokenizer reads their names as tokens."
        return self._listed("control_tokens", ["token", "conversations", "first"])

    @property
    def domains(self) -> pd.DataFrame:  # domain -> conversations, rows, tokens, trained
        "What each domain gave, before the split; empty where no conversation names one."
        return self._listed("domains", ["domain", "conversations", "without rows", "rows", "tokens", "trained"])

    def __repr__(self):
        tokens = int(self.lengths.sum())
        trained = int(self.trained.sum())
        return (
            f"{self.folder.name}: {len(self.train)} training and {len(self.val)} validation "
            f"rows, {tokens} tokens, {trained} of them ({trained / max(tokens, 1):.0%}) trained"
        )

    def summary(self) -> str:  # lines
        "The same tables as text: what came in, what was left out and why, what is left."
        lines = [repr(self), ""]
        places = {stage["what"]: stage.get("first") for stage in self._reported("stages")}
        width = max(map(len, self.table.index))
        for what, numbers in self.table.iterrows():
            counts = [
                _count(numbers[unit], unit.removesuffix("s"))
                for unit in ("conversations", "rows", "tokens")
                if pd.notna(numbers[unit])
            ]
            counts += [f"{numbers['trained share']:.0%} trained"] if pd.notna(numbers["trained share"]) else []
            named = _places(places.get(what) or (), numbers["conversations"])
            lines.append(f"{what:<{width}}  {', '.join(counts)}{named}")
        for title, table in (
            ("Dropped", self.dropped),
            ("Left out of conversations that are kept", self.omitted),
            ("Control tokens that messages spell", self.control_tokens),
        ):
            lines += ["", title] if len(table) else []
            for what, case in table.iterrows():
                unit = case.get("unit", "conversations").removesuffix("s")
                n = _count(case.get("count", case.get("conversations")), unit)
                lines.append(f"  {n}: {what} (first: {case['first']})")
        return "\n".join(lines)

    def _repr_html_(self):
        tables = (self.dropped, self.omitted, self.control_tokens)
        tables = [t.to_html() for t in tables if len(t)]
        stages = self.table.astype(object).fillna("")  # `na_rep` is not for columns of pandas' own dtypes
        return f"<p>{escape(repr(self), quote=False)}</p>" + stages.to_html() + "".join(tables)

    def add_vocab_mapping(
        self,
        draft_vocab_size: int,  # Vd
        vocab_size: int | None = None,  # V, the verifier's; None: as recorded
        folder: str | Path | None = None,  # to write to; None: this one
    ) -> tuple[torch.Tensor, torch.Tensor]:  # t2d [V] bool, d2t [Vd] int64
        "Choose a draft vocabulary by the counts; write `t2d-{Vd}.npy` and `d2t-{Vd}.npy`."
        check_options({"draft_vocab_size": draft_vocab_size, "vocab_size": vocab_size})
        recorded = self.config.get("model", {}).get("vocab_size")
        if vocab_size and recorded and vocab_size != recorded:
            raise ValueError(
                f"vocab_size={vocab_size}: {self.folder} was prepared for a verifier of {recorded} tokens; leave it out"
            )
        vocab_size = vocab_size or recorded
        if not vocab_size:
            raise ValueError(
                f"{self.folder}: the verifier's vocabulary size is not recorded; pass "
                "vocab_size (vocab_size in the verifier's config.json)"
            )
        mapping = vocab_mapping_from_frequencies(self.token_freq, draft_vocab_size, vocab_size)
        save_vocab_mapping(folder or self.folder, *mapping)
        return mapping

    def plot(self):  # -> a figure: lengths, and what the tokens are used for
        "Two panels: how long the rows are, and what their tokens are used for."
        from ..core.plot import new_axes  # matplotlib, only to draw

        fig, (left, right) = new_axes(4.6, 2.8, 2)
        _plot_lengths(left, self)
        _plot_shares(right, self)
        return fig


def load_prepared(folder: str | Path) -> Prepared:
    """Open and check a prepared folder, ours or upstream's. FileNotFoundError: no table; ValueError: damaged, or its
    parts are of different runs."""
    return Prepared(folder)
