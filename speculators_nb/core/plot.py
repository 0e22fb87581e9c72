"""Figures: one palette and seven kinds of picture, from acceptance to attention masks.
A drafter has the same colour in every figure, and a figure has its finding as the title."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Patch
from matplotlib.rcsetup import cycler


COLOURS = {
    "no drafter": "#bbbbbb",
    "n-gram": "#e69f00",
    "eagle3": "#0072b2",
    "peagle": "#56b4e9",
    "dflash": "#d55e00",
    "mtp": "#009e73",
    "eagle": "#332288",
    "hass": "#882255",
    "medusa": "#cc79a7",
    "mlp": "#999933",
    "dflash2": "#7fdc5a",
    "dspark": "#f0c800",
    "xpress": "#b266ff",
    "domino": "#ff8fa3",
    "query_only": "#00a5a5",
    "suffix": "#8c564b",
    "draft model": "#000000",
    "lilicorr": "#2000f0",
}
MARKERS = dict(zip(COLOURS, "xsovD^<>Phd*H81pX2"))
# colours of series that are no drafters; colour and marker of names that are not in the palette
SERIES = ["#44aa99", "#aa4499", "#117733", "#ddcc77", "#661100", "#6699cc", "#cc6677", "#88ccee"]
_SPARE = list(zip(SERIES, "4+8123"))
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 72,
    "savefig.dpi": 144,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "font.size": 10,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.prop_cycle": cycler(color=SERIES),
}


def look(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """How to draw each drafter of a figure: name -> (hex colour, matplotlib marker); "eagle3 (3 steps)" looks like
    eagle3. A name not in the palette gets a spare look by its letters, and another one only where two collide."""
    looks, free = {}, list(_SPARE)
    for name in names:
        known = max((k for k in COLOURS if name == k or name.startswith(f"{k} ")), key=len, default=None)
        if known:
            looks[name] = COLOURS[known], MARKERS[known]
        elif name not in looks:
            looks[name] = free.pop(sum(map(ord, name)) % len(free))
            free = free or list(_SPARE)
    return looks


def colour(name: str) -> str:
    "The hex colour of one drafter, as in `look`."
    return look([name])[name][0]


@contextmanager
def styled() -> Iterator[None]:
    "Figures made inside have the workbench's style, the first one of a session too."
    before: dict[Any, Any] = {key: plt.rcParams[key] for key in STYLE}
    plt.rcParams.update(STYLE)
    try:
        yield
    finally:
        # these only: plt.rc_context would also undo the interactive mode, which Jupyter turns
        # on when the first figure loads its back end, and no figure would be shown any more
        plt.rcParams.update(before)


def new_axes(width: float = 5.5, height: float = 3.4, columns: int = 1, **kwargs) -> tuple[Figure, Any]:
    """A figure in the workbench's style, with one Axes or an array of them (panels side by side, each of a width and
    height in inches): white ground (readable on a dark page), title at the left, no box. `kwargs` are passed on to
    `plt.subplots`."""
    with styled():
        return plt.subplots(1, columns, figsize=(width * columns, height), **kwargs)


def closed_axes(width: float = 5.5, height: float = 3.4, columns: int = 1, **kwargs) -> tuple[Figure, Any]:
    "As `new_axes`, of a figure that is shown where it is returned and nowhere else."
    fig, axes = new_axes(width, height, columns, **kwargs)
    plt.close(fig)
    return fig, axes


def _whole_ticks(axis) -> None:
    axis.get_major_locator().set_params(integer=True)


def _finish(ax: Axes, title: str | None, xlabel: str, ylabel: str) -> Figure:
    ax.set_title(title or "", loc="left")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    assert isinstance(ax.figure, Figure)
    return ax.figure


def plot_acceptance(table: pd.DataFrame, title: str | None = None) -> Figure:
    """Acceptance per draft position, a panel for each temperature: bars unconditional, line conditional, whiskers the
    95 % interval. The table has drafter, position, unconditional, and maybe _low/_high, conditional, temperature; the
    title is the finding. Errors: ValueError for a column that is missing."""
    columns = set(table.columns)
    if missing := {"drafter", "position", "unconditional"} - columns:
        raise ValueError(f"the acceptance table lacks the columns {sorted(missing)}; it has {list(table.columns)}")
    panels = list(table.groupby("temperature", sort=True)) if "temperature" in table else [(None, table)]
    drafters = look(list(dict.fromkeys(table["drafter"])))
    width = 0.8 / len(drafters)
    # of the legend: a key and its letters, in inches
    lines = math.ceil(sum(0.58 + 0.072 * len(name) for name in drafters) / (5.5 * len(panels)))
    fig, axes = closed_axes(5.5, 3.35 + 0.25 * lines, len(panels), sharey=True, squeeze=False)
    for ax, (temperature, rows) in zip(axes[0], panels):
        for i, (name, (colour, marker)) in enumerate(drafters.items()):
            own = rows[rows["drafter"] == name].sort_values("position")
            x, rate = own["position"].to_numpy() + (i - (len(drafters) - 1) / 2) * width, own["unconditional"]
            ax.bar(x, rate, width * 0.92, color=colour, alpha=0.85)
            if {"unconditional_low", "unconditional_high"} <= columns:
                ends = [rate - own["unconditional_low"], own["unconditional_high"] - rate]
                whiskers = np.clip(np.stack(ends), 0, None)
                ax.errorbar(x, rate, whiskers, fmt="none", ecolor="#222222", elinewidth=1, capsize=2)
            if "conditional" in columns:
                edge = "white" if MarkerStyle(marker).is_filled() else colour  # a cross is all edge
                style: dict[str, Any] = dict(color=colour, marker=marker, markersize=6, markeredgecolor=edge)
                ax.plot(x, own["conditional"], linewidth=1.5, **style)
        ax.set(ylim=(0, 1.02), xticks=sorted(table["position"].unique()), xlabel="draft position k")
        heading = "" if temperature is None else f"temperature {temperature:g}"
        ax.set_title(heading, loc="left", fontsize=10)
    axes[0][0].set_ylabel("acceptance rate\n(bar: unconditional, line: conditional)")
    patches = [Patch(color=colour) for colour, _ in drafters.values()]
    ncols = min(math.ceil(len(drafters) / lines), 6)
    fig.legend(patches, drafters, loc="outside lower center", ncols=ncols, frameon=False)
    fig.suptitle(title or "", x=0.01, ha="left", fontsize=11)
    return fig


def _ranges_finding(table) -> str:
    "What the first drafter gains or loses from the first to the last range of the first panel."
    first = table.iloc[0]
    rows = table[(table.drafter == first.drafter) & (table["by"] == first["by"])]
    if "temperature" in rows:
        rows = rows[rows.temperature == first.temperature]
    begin, end = rows.iloc[0], rows.iloc[-1]
    if {"mean_length_low", "mean_length_high"} <= {*rows.columns}:
        falls = begin.mean_length_low > end.mean_length_high
        rises = begin.mean_length_high < end.mean_length_low
        if not (falls or rises):  # nor where an interval is not known
            return f"{first.drafter} from {begin.range} to {end.range} ({begin['by']}): no change beyond the intervals"
    change = end.mean_length - begin.mean_length
    return (
        f"{first.drafter} {'gains' if change > 0 else 'loses'} {abs(change):.2f} tokens a step "
        f"from {begin.range} to {end.range} ({begin['by']})"
    )


def plot_ranges(table: pd.DataFrame, title: str | None = None) -> Figure:
    """Mean acceptance length over ranges of a length, a panel for each value of `by`, a line for each drafter (and
    temperature, dashed from the second one on), whiskers the 95 % interval. The table has drafter, by, range,
    mean_length, and maybe _low/_high, temperature; `title` None: the change from the first to the last range. Errors:
    ValueError for none."""
    if table.empty:
        raise ValueError("ranges is empty: all steps share a range, so there is none to draw")
    if "temperature" not in table:
        table = table.assign(temperature=0.0)
    panels = list(table.groupby("by", sort=False))
    drafters = look(list(dict.fromkeys(table.drafter)))
    lines = table[["drafter", "temperature"]].drop_duplicates().to_numpy().tolist()
    hottest = table.temperature.nunique() > 1
    xlabels = {"output": "output tokens before the step", "context": "context tokens"}
    fig, axes = closed_axes(5.0, 3.6, len(panels), sharey=True, squeeze=False)
    for ax, (by, rows) in zip(axes[0], panels):
        names = list(dict.fromkeys(rows.range))
        for i, (name, t) in enumerate(lines):
            own = rows[(rows.drafter == name) & (rows.temperature == t)]
            shift = (i - (len(lines) - 1) / 2) * 0.06
            x = np.array([names.index(r) for r in own.range]) + shift
            label = f"{name}, T={t:g}" if hottest else name
            colour, marker = drafters[name]
            style: dict[str, Any] = dict(color=colour, marker=marker, markersize=6)
            style["linestyle"] = "-" if t == lines[0][1] else "--"
            ax.plot(x, own.mean_length, label=label, **style)
            if {"mean_length_low", "mean_length_high"} <= {*own.columns}:
                ends = np.stack([own.mean_length_low, own.mean_length_high])
                whiskers = np.abs(ends - own.mean_length.to_numpy())
                ax.errorbar(x, own.mean_length, whiskers, fmt="none", ecolor=colour, capsize=2)
        ax.set(xlabel=xlabels.get(str(by), by), xticks=range(len(names)), xticklabels=names)
        ax.set_ylim(bottom=1)
    axes[0][0].set_ylabel("mean acceptance length, tokens a step")
    axes[0][0].legend(frameon=False)
    fig.suptitle(title or _ranges_finding(table), x=0.01, ha="left", fontsize=11)
    return fig


def plot_mask(
    dense: Any,
    documents: Sequence[int] | None = None,
    key_documents: Sequence[int] | None = None,
    title: str | None = None,
    xlabel: str = "key position",
    ylabel: str = "query position",
    fill: str = COLOURS["eagle3"],
    ax: Axes | None = None,
) -> Figure:
    """Draw an attention mask, [Q, KV] bool, True where the query (row) may see the key (column): allowed entries
    filled, document borders as lines, padding rows and columns shaded. `documents`: of each query row, -1 is padding;
    `key_documents` None: these, repeated to KV; `title`: the finding; `fill`: the colour of an allowed entry; `ax`
    None: a figure of its own."""
    dense = np.asarray(dense, dtype=bool)
    rows, columns = dense.shape
    if ax is None:
        scale = 4.2 / max(dense.shape)
        width, height = max(2.5, columns * scale) + 0.9, max(1.6, rows * scale) + 0.9
        ax = cast(Axes, closed_axes(width, height)[1])
    with styled():
        image = np.full((rows, columns, 3), 1.0)
        image[dense] = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        if key_documents is None and documents is not None and columns % rows == 0:
            key_documents = list(documents) * (columns // rows)
        for ids, stripe, line in (
            (documents, lambda i: np.s_[i, :], ax.axhline),
            (key_documents, lambda i: np.s_[:, i], ax.axvline),
        ):
            if ids is None:
                continue
            ids = np.asarray(ids)
            for i in np.flatnonzero(ids < 0):
                image[stripe(i)] = np.where(dense[stripe(i)][:, None], image[stripe(i)], 0.88)
            for i in np.flatnonzero(ids[1:] != ids[:-1]):
                line(i + 0.5, color=COLOURS["dflash"], linewidth=1.2)
        ax.imshow(image, interpolation="nearest", aspect="equal")
        if max(dense.shape) <= 64:
            ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
            ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
            ax.grid(which="minor", color="#dddddd", linewidth=0.5)
            ax.tick_params(which="minor", length=0)
        _whole_ticks(ax.xaxis)
        _whole_ticks(ax.yaxis)
        return _finish(ax, title, xlabel, ylabel)


def plot_loss(log: pd.DataFrame, title: str | None = None, ax: Axes | None = None) -> Figure:
    """Training loss against steps, one colour per drafter; the held-out loss dashed. The log has step, loss, and
    maybe eval_loss, drafter, with gaps as in a Trainer's; `ax` None: a figure of its own."""
    ax = ax or cast(Axes, closed_axes()[1])
    groups: list[tuple[Any, pd.DataFrame]] = [("", log)]
    looks = {"": (COLOURS["eagle3"], MARKERS["eagle3"])}
    if "drafter" in log:
        groups = list(log.groupby("drafter", sort=False))
        looks = look([name for name, _ in groups])
    columns = ("loss", "training", "-"), ("eval_loss", "held-out", "--")
    for name, rows in groups:
        for column, label, line in columns:
            if column in rows and (kept := rows.dropna(subset=[column])).size:
                colour, marker = looks[name]
                style: dict[str, Any] = dict(color=colour, label=f"{name} {label}".strip())
                style |= dict(marker=marker, markersize=4) if len(kept) < 15 else {}
                ax.plot(kept["step"], kept[column], line, **style)
    ax.legend(frameon=False)
    return _finish(ax, title, "optimizer step", "loss (nats a position)")


def plot_step_weights(
    weights: Mapping[str, Sequence[float]], title: str | None = None, xlabel: str = "step k", ax: Axes | None = None
) -> Figure:
    """Loss weight of each draft step or slot, from 0 on, one line per scheme, by its label; `xlabel` says what is
    counted; `ax` None: a figure of its own."""
    ax = ax or cast(Axes, closed_axes()[1])
    for name, (colour, marker) in look(list(weights)).items():
        values = np.asarray(weights[name], dtype=float)
        ax.plot(np.arange(len(values)), values, color=colour, marker=marker, label=name)
    _whole_ticks(ax.xaxis)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return _finish(ax, title, xlabel, "loss weight")


class TreeLayout(NamedTuple):
    "Where the nodes of a tree are drawn; node -1 is the last decided token."

    order: list[int]  # nodes, parents first, leaves in reading order
    depth: dict[int, int]  # node -> steps from the root
    height: dict[int, float]  # node -> place across; leaves have 0, 1, 2, ...
    leaves: int  # how many


def tree_layout(parents: Sequence[int]) -> TreeLayout:
    """Leaves evenly spread, every parent centred on its children. `parents` [N], parents first; -1: the last decided
    token."""
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parents))}
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        children[parent].append(node)
        depth[node] = depth[parent] + 1
    height: dict[int, float] = {}
    leaves = 0
    order = []
    stack = [-1]
    while stack:  # depth first, so that leaves come in reading order
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
        if not children[node]:
            height[node] = leaves
            leaves += 1
    for node in reversed(order):
        if children[node]:
            height[node] = sum(height[child] for child in children[node]) / len(children[node])
    return TreeLayout(order, depth, height, leaves)


def plot_tree(
    parents: Sequence[int],
    labels: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    accepted: Sequence[int] = (),
    root: str = "…",
    title: str | None = None,
) -> Figure:
    """Draw a draft tree from left to right, as `tree_layout` lays it out: the labels [N] in its nodes (None: their
    indices), their blanks and line breaks as signs, the probability of each, weights [N], on its edge, nodes on the
    accepted path filled, `root` for the last decided token."""
    parents = [int(p) for p in parents]
    order, depth, height, leaves = tree_layout(parents)
    texts = {node: str(node) for node in order} if labels is None else dict(enumerate(labels))
    texts[-1] = root
    texts = {node: str(text).replace(" ", "␣").replace("\n", "⏎") for node, text in texts.items()}
    path = {-1, *(int(i) for i in accepted)}
    deepest = max(depth.values())
    _, ax = closed_axes(1.1 + 1.15 * deepest, 0.9 + 0.42 * leaves)
    for node in order:
        kept = node in path
        if node >= 0:
            x = np.array([depth[parents[node]], depth[node]])
            y = np.array([height[parents[node]], height[node]])
            colour, width = (COLOURS["eagle3"], 2.5) if kept else ("#aaaaaa", 1)
            ax.plot(x, y, zorder=1, color=colour, linewidth=width)
            if weights is not None:
                text = f"{float(weights[node]):.2f}"
                ground = dict(fc="white", ec="none", pad=0.5)
                x, y = x @ [1 / 3, 2 / 3], y @ [1 / 3, 2 / 3]
                ax.text(x, y, text, fontsize=7, zorder=2, bbox=ground, ha="center", va="center")
        box = dict(boxstyle="round,pad=0.3", fc=COLOURS["eagle3"] if kept else "#eeeeee", ec="none")
        colour = "white" if kept else "#222222"
        x, y = depth[node], height[node]
        ax.text(x, y, texts[node], fontsize=9, zorder=3, color=colour, bbox=box, ha="center", va="center")
    ax.set(xticks=range(deepest + 1), yticks=[])
    ax.set(xlim=(-0.4, deepest + 0.5), ylim=(leaves - 0.4, -0.6))
    ax.spines["left"].set_visible(False)
    return _finish(ax, title, "depth (0: the last decided token)", "")
