"""Live view of a training run, in a terminal and in a notebook: one row an evaluation.
The decoded acceptance is beside the loss."""

import html
import io
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from ..nn.supervision import by_position

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported only to draw

SHOWN_POSITIONS = 3  # so that a row fits a terminal


def evaluation_table(log_history: list[dict]) -> pd.DataFrame:
    """A Trainer's log history as a table: step, epoch, loss, held-out loss, mean length, accuracy 1 to 3, learning
    rate; one row an evaluation, or a log where there is none; positions count from one."""
    logs = [row for row in log_history if "train_runtime" not in row]
    evaluated = any("eval_loss" in row for row in logs)
    rows, last = [], {}
    for log in logs:
        last |= {name: log[name] for name in ("loss", "learning_rate") if name in log}
        if evaluated and "eval_loss" not in log:
            continue
        row = {"step": log["step"], "epoch": log.get("epoch"), "loss": last.get("loss")}
        if evaluated:
            row["held-out loss"] = log["eval_loss"]
            if "eval_mean_length" in log:
                row["mean length"] = log["eval_mean_length"]
            positions = enumerate(by_position(log, "eval_")[:SHOWN_POSITIONS], 1)  # counted from one
            row |= {f"accuracy {n}": log[name] for n, name in positions}
        rows.append(row | {"learning rate": last.get("learning_rate")})
    return pd.DataFrame(rows)


def log_table(trainer: Trainer) -> pd.DataFrame:
    """The history of any Trainer that has run as a table, a row for each logged step: epoch, loss, grad_norm,
    learning_rate, metrics, eval_*."""
    rows = [row for row in trainer.state.log_history if "train_runtime" not in row]
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows).groupby("step").first()
    first = ["epoch", "loss", "eval_loss", "learning_rate", "grad_norm"]
    timings = ("runtime", "per_second", "preparation_time")
    rest = [c for c in map(str, table) if c not in first and not c.endswith(timings)]
    rest.sort(key=lambda c: (c.startswith("eval_"), c))
    return table[[c for c in first if c in table] + rest]


def _text(name, value):
    "A number of a row, as wide as its column."
    digits = {"step": "g", "epoch": ".2f", "learning rate": ".1e"}.get(name, ".3f")
    text = "" if value is None or value != value else format(value, digits)
    return text.rjust(max(len(name), 6))


def row_line(row: Mapping) -> str:
    "A row of `evaluation_table` as a line of aligned columns; None or NaN is left empty."
    return "  ".join(_text(name, value) for name, value in row.items())


def header_line(row: Mapping) -> str:
    "The names of the columns of a row of `evaluation_table`, above them."
    return "  ".join(name.rjust(6) for name in row)


class TableCallback(ProgressCallback):
    "transformers' progress bar, with the rows of `evaluation_table` above it."

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.header = None
        self.evaluates = args.eval_strategy != "no"
        if self.training_bar is not None:
            self.training_bar.set_description("train", refresh=False)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None or "train_runtime" in (logs or {}):
            return
        if self.evaluates and "eval_loss" not in (logs or {}):
            return
        row = evaluation_table(state.log_history).iloc[-1].to_dict()
        if self.header != list(row):
            self.training_bar.write(header_line(row))
        self.header = list(row)
        self.training_bar.write(row_line(row))


def _table_of(run) -> pd.DataFrame:
    "The logged steps of a trainer, a folder or a table, with a column `step`."
    if isinstance(run, (str, os.PathLike)):
        return pd.read_csv(Path(run) / "training_log.csv")
    table = run if isinstance(run, pd.DataFrame) else log_table(run)
    return table.reset_index() if "step" not in table else table


def plot_runs(runs: Mapping[str, Any]) -> Figure:
    """Training runs laid over each other, one colour each: the losses, and the mean acceptance length where it was
    measured. A run, by its name (may be empty), is a trainer, its output folder, or a `log_table`."""
    from ..core.plot import closed_axes, look, plot_loss  # here: most training draws nothing

    tables = {name: _table_of(run) for name, run in runs.items()}
    log = pd.concat(table.assign(drafter=name) for name, table in tables.items())
    decoded = "eval_mean_length" in log
    fig, axes = closed_axes(4.2, 2.8, 1 + decoded, squeeze=False)
    plot_loss(log, "Losses", axes[0, 0])
    if decoded:
        looks = look(list(tables))
        for name, rows in log.dropna(subset=["eval_mean_length"]).groupby("drafter", sort=False):
            colour, marker = looks[str(name)]
            lengths = rows.set_index("step").eval_mean_length
            axes[0, 1].plot(lengths, color=colour, marker=marker, label=name)
        axes[0, 1].set(xlabel="optimizer step", ylabel="mean acceptance length")
        axes[0, 1].set_title("Tokens a verification step, decoded")
        if any(tables):
            axes[0, 1].legend(frameon=False)
    return fig


class StopRequest:
    "Whether somebody wants a run to end: by `set`, or by the kernel's Interrupt."

    def __init__(self):
        self.wanted = self.interrupted = False

    def set(self, *_):
        "Stop after the step at hand."
        self.wanted = True

    def _interrupted(self, *_):
        signal.signal(signal.SIGINT, self.before)  # the second one breaks off
        self.interrupted = True
        self.set()

    def catch_interrupts(self):
        "From now on an Interrupt is a request; in the main thread alone."
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._interrupted)

    def release(self):
        "Leave interrupts to Python again."
        if getattr(self, "before", None) is not None:
            signal.signal(signal.SIGINT, self.before)


class LiveView(TrainerCallback):
    """A widget under the cell that trains: bar, rows of `evaluation_table`, curve, button. The
    run ends after a step, with a checkpoint, once its `StopRequest` is set."""

    def __init__(self):
        self.request = StopRequest()
        self.bar: Any = None  # made when training begins

    def on_train_begin(self, args, state, control, **kwargs):
        import ipywidgets  # here: training outside a kernel does without both
        from IPython.display import display

        self.request = StopRequest()
        self.request.catch_interrupts()
        self.bar = ipywidgets.IntProgress(max=state.max_steps, description="train")
        self.count = ipywidgets.Label()
        self.button = ipywidgets.Button(description="Stop and save", icon="stop")
        self.button.on_click(self._pressed)
        # ipykernel 7.4 hands a comm's messages to the shell that opened it, which is busy; the
        # front end sends them to a subshell
        comm: Any = self.button.comm
        comm._reply_subshell_for = lambda data, default: default
        self.rows, self.curve = ipywidgets.HTML(), ipywidgets.HTML()
        self.curve.layout.display = "none"
        top = ipywidgets.HBox([self.bar, self.count, self.button])
        display(ipywidgets.VBox([top, self.rows, self.curve]))

    def _pressed(self, button):
        self.request.set()
        button.disabled, button.description = True, "Stopping …"

    def on_step_end(self, args, state, control, **kwargs):
        if self.request.wanted:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = False  # it may take longer than a reader waits
        self.bar.value = state.global_step
        self.count.value = f"{state.global_step} of {state.max_steps} steps"

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.request.wanted:
            control.should_evaluate = control.should_save = False

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if self.bar is None or "train_runtime" in (logs or {}):
            return
        table = evaluation_table(state.log_history)
        if table.empty or table.step.iloc[-1] != state.global_step:
            return
        rows = table.to_dict("records")
        text = "\n".join([header_line(rows[-1]), *map(row_line, rows)])
        self.rows.value = f"<pre>{html.escape(text)}</pre>"
        picture = io.StringIO()
        log = pd.DataFrame(state.log_history).groupby("step").first()
        drafter = getattr(getattr(model, "config", None), "speculators_model_type", "")  # keeps its colour
        plot_runs({drafter: log}).savefig(picture, format="svg")  # crisp at any width
        _, _, svg = picture.getvalue().partition("<svg ")
        self.curve.value = f'<svg style="max-width: 100%; height: auto" {svg}'
        self.curve.layout.display = None

    def on_train_end(self, args, state, control, **kwargs):
        self.request.release()
        self.button.disabled = True
        self.button.description = "Stopped" if self.request.wanted else "Finished"


def was_stopped(trainer: Trainer) -> bool:
    "Whether the run of a trainer ended by a `StopRequest`, before its last step."
    return trainer.state.global_step < trainer.state.max_steps and any(r.wanted for r in _requests(trainer))


def was_interrupted(trainer: Trainer) -> bool:
    "Whether it was stopped by an Interrupt, which is for the cells after this one too."
    return was_stopped(trainer) and any(request.interrupted for request in _requests(trainer))


def _requests(trainer):
    return [c.request for c in trainer.callback_handler.callbacks if isinstance(c, LiveView)]
