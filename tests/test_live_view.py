"""A run that is watched: what its view shows, and that a press of its button or an Interrupt ends it with everything
saved."""

import signal
from types import SimpleNamespace

import pytest
import torch
from test_trainer import arguments, samples, toy

from speculators_nb.core.plot import COLOURS
from speculators_nb.lab.experiment import settings, shipped_features
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.train.live_view import LiveView, TableCallback, header_line, plot_runs
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.train.trainer import SpeculatorTrainer, log_table, train


class Reader(LiveView):
    "Somebody who does this at a step."

    def __init__(self, step, act):
        super().__init__()
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(self)
        super().on_step_end(args, state, control, **kwargs)


def press(view):
    view.button.click()


def interrupt(view):
    signal.raise_signal(signal.SIGINT)


def run(folder, *callbacks, **more):
    given = dict(num_train_epochs=3, measure=lambda model: {"mean_length": 1.5}) | more
    measure = given.pop("measure")
    return train(
        toy(), samples(), samples(3, 1), arguments(folder, **given), callbacks=list(callbacks), measure=measure
    )


def test_what_is_shown(tmp_path):
    view = Reader(0, None)
    trainer = run(tmp_path, view)
    assert header_line({"step": 0, "mean length": 0}).split()[0] in view.rows.value and "mean length" in view.rows.value
    assert view.rows.value.count("\n") == 3 and "1.500" in view.rows.value
    curve = view.curve.value
    assert curve.startswith("<svg style=") and curve.rstrip().endswith("</svg>")
    assert "<!-- training -->" in curve  # a model without a config has no name
    drafter = SimpleNamespace(config=SimpleNamespace(speculators_model_type="dflash"))
    view.on_log(trainer.args, trainer.state, trainer.control, {}, model=drafter)
    assert "<!-- dflash training -->" in view.curve.value and COLOURS["dflash"] in view.curve.value
    assert view.bar.value == view.bar.max == trainer.state.max_steps
    assert view.button.description == "Finished"


def test_an_evaluation_without_training_shows_no_view(tmp_path):
    "There is no run to watch, and the numbers are returned."
    given = arguments(tmp_path), samples(), samples(3, 1)
    trainer = SpeculatorTrainer(toy(), *given, callbacks=[LiveView(), TableCallback()])
    assert "eval_loss" in trainer.evaluate()


def test_a_stopped_run_is_saved_and_resumed(tmp_path, capsys):
    "By the button: no evaluation after it, a checkpoint of that step, the drafter; resumed, it is the unbroken run."
    view = Reader(2, press)
    trainer = run(tmp_path / "stopped", view)
    assert trainer.state.global_step == 2 < trainer.state.max_steps
    assert not [row for row in trainer.state.log_history if "eval_loss" in row]
    names = {p.name for p in (tmp_path / "stopped").iterdir()}
    assert {"checkpoint-2", "model.safetensors", "training_log.csv", "run.json"} <= names
    assert view.button.description == "Stopped" and "Stopped at step 2: the drafter is in" in capsys.readouterr().out
    resumed, whole = run(tmp_path / "stopped", resume_from_checkpoint=True), run(tmp_path / "whole")
    assert resumed.state.global_step == whole.state.global_step
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))


def test_an_interrupt_is_a_press(tmp_path):
    "The first one; Python's own handler is back after it, and after the run."
    before = signal.getsignal(signal.SIGINT)
    handlers = []

    def act(view):
        interrupt(view)
        handlers.append(signal.getsignal(signal.SIGINT))

    trainer = run(tmp_path, Reader(2, act), save_strategy="no", load_best_model_at_end=False)
    assert trainer.state.global_step == 2 and (tmp_path / "model.safetensors").is_file()
    assert handlers == [before] and signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_for_the_next_cells_too(tmp_path):
    "The drafter is there, and Run All ends."
    features, verifier = shipped_features(n=12), shipped_data() / "tiny-verifier"
    given = settings("eagle3") | dict(total_seq_len=256, max_steps=4, eval_share=0.0, draft_vocab_size=64)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 2; .* has the drafter"):
        train_drafter(features, tmp_path, verifier, "eagle3", callbacks=[Reader(2, interrupt)], **given)
    assert {"model.safetensors", "t2d-64.npy"} <= {path.name for path in tmp_path.iterdir()}


def test_runs_are_laid_over_each_other(tmp_path):
    trainer = run(tmp_path)
    for a_run in (trainer, tmp_path, log_table(trainer)):
        losses, lengths = plot_runs({"a": a_run, "b": trainer}).axes
        assert [list(line.get_ydata()) for line in lengths.lines] == [[1.5] * 3] * 2 and len(losses.lines) == 4
