"Pictures: what is drawn is what the table says, and the errors name the missing columns."

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from speculators_nb.core.plot import (
    COLOURS,
    STYLE,
    colour,
    look,
    new_axes,
    plot_acceptance,
    plot_loss,
    plot_mask,
    plot_step_weights,
    plot_tree,
    styled,
)
from speculators_nb.nn.attention import causal

matplotlib.use("Agg")


def table(**columns):
    return pd.DataFrame(
        {
            "drafter": ["eagle3", "eagle3", "n-gram", "n-gram"],
            "position": [1, 2, 1, 2],
            "unconditional": [0.8, 0.6, 0.5, 0.2],
            **columns,
        }
    )


def test_acceptance_bars_whiskers_and_lines():
    low, high = np.array([0.7, 0.5, 0.4, 0.1]), np.array([0.9, 0.7, 0.6, 0.3])
    axes = plot_acceptance(
        table(unconditional_low=low, unconditional_high=high, conditional=[0.8, 0.75, 0.5, 0.4]), "finding"
    ).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.8, 0.6, 0.5, 0.2]
    assert [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in axes.patches] == [COLOURS["eagle3"]] * 2 + [
        COLOURS["n-gram"]
    ] * 2
    ends = np.concatenate([segment[:, 1] for whiskers in axes.collections for segment in whiskers.get_segments()])
    np.testing.assert_allclose(sorted(ends), sorted([*low, *high]))
    assert [
        list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) == 2 and line.get_marker() in "os"
    ] == [[0.8, 0.75], [0.5, 0.4]]


def test_every_marker_is_seen():
    "A marker without a surface is not drawn in the white of the ground; the six spare looks have some of these."
    for name in ("no drafter", "eagle3", *(f"variant {i}" for i in range(6))):
        axes = plot_acceptance(table(drafter=name, conditional=0.5)).axes[0]
        (line,) = [line for line in axes.lines if line.get_marker() == look([name])[name][1]]
        filled = matplotlib.markers.MarkerStyle(line.get_marker()).is_filled()
        assert line.get_markeredgecolor() == ("white" if filled else line.get_color()), name


def test_one_panel_per_temperature():
    both = pd.concat([table(temperature=0.0), table(temperature=1.0)])
    assert [axes.get_title("left") for axes in plot_acceptance(both).axes] == ["temperature 0", "temperature 1"]


def test_one_colour_per_drafter_and_none_twice():
    assert colour("eagle3") == colour("eagle3 (7 steps)") == COLOURS["eagle3"] != colour("eagle")
    assert colour("mine") == colour("mine") and colour("mine") not in COLOURS.values()
    assert len(set(look([f"variant {i}" for i in range(6)]).values())) == 6
    # more names than spare looks: they repeat, nothing breaks
    assert len(look([f"variant {i}" for i in range(40)])) == 40


def test_a_mask_keeps_its_pixels():
    dense = np.array([[1, 0, 0], [1, 1, 0]], dtype=bool)
    pixels = plot_mask(dense).axes[0].images[0].get_array()
    assert np.array_equal((pixels < 0.99).any(-1), dense)


def drawings(ax):
    "Every function that draws, on axes of the caller or (None) on a figure of its own"
    log, square = pd.DataFrame({"step": [1, 2], "loss": [3.0, 2.0]}), np.eye(3, dtype=bool)
    given = [
        plot_loss(log, ax=ax),
        plot_step_weights({"a": [1, 0.5]}, ax=ax),
        plot_mask(square, ax=ax),
        causal().draw(4, documents=[0, 0, 1, -1], ax=ax),
    ]
    return given if ax else [*given, plot_acceptance(table()), plot_tree([-1, 0])]


def test_what_draws_returns_a_figure():
    """In a notebook a figure shows itself and Axes print `<Axes: ...>`. A figure of the function's own is closed, or it
    would be shown twice."""
    open_before = plt.get_fignums()
    assert all(isinstance(f, matplotlib.figure.Figure) for f in drawings(None))
    assert plt.get_fignums() == open_before
    fig, ax = new_axes()
    assert all(f is fig for f in drawings(ax))
    plt.close(fig)


def test_blanks_of_a_tokens_text_can_be_seen_in_a_tree():
    "A label that begins with a blank would stand beside its box's middle, a line break would make two lines."
    (ax,) = plot_tree([-1, 0], [" cat", "\n"], root=" a").axes
    assert [text.get_text() for text in ax.texts] == ["␣a", "␣cat", "⏎"]
    assert [text.get_text() for text in plot_tree([-1], [7]).axes[0].texts] == ["…", "7"]  # a token id


def test_the_style_is_gone_afterwards_and_nothing_else():
    """The back end that a first figure loads changes parameters of its own, above all `interactive`; without that no
    figure is shown."""
    before = dict(plt.rcParams)
    with styled():
        assert all(plt.rcParams[key] == value for key, value in STYLE.items())
        plt.rcParams["interactive"] = not before["interactive"]
    assert {key for key, value in plt.rcParams.items() if value != before[key]} == {"interactive"}
    plt.rcParams["interactive"] = before["interactive"]


def test_a_trainer_log_with_gaps():
    log = pd.DataFrame(
        {"step": [1, 2, 2, 4], "loss": [3.0, 2.0, np.nan, 1.0], "eval_loss": [np.nan, np.nan, 2.5, np.nan]}
    )
    axes = plot_loss(log).axes[0]
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        "training": [3.0, 2.0, 1.0],
        "held-out": [2.5],
    }
