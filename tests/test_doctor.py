"""The doctor: the committed results of every spoilt drafter (`make doctor` makes them), and the faults that are found
without training anything."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from doctor.run import CASES, RESULTS
from doctor.spoil import SPOILT
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from speculators_nb.cli.main import app
from speculators_nb.core.provenance import write_provenance
from speculators_nb.doctor.data_checks import STAGES
from speculators_nb.doctor.doctor import examine, find_sources
from speculators_nb.doctor.drafter_checks import data_check, learned_check

ROOT = Path(__file__).parents[1]
TINY, SHIPPED = ROOT / "data/tiny-verifier", ROOT / "data/tiny-drafter"


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr("speculators_nb.doctor.doctor.DECODED", 1)


def test_results_name_the_planted_fault_first():
    results = json.loads(RESULTS.read_text())
    assert list(results) == CASES, "make doctor"
    sound = [case for case in CASES if case not in SPOILT]
    assert len(sound) >= 3 and len(SPOILT) >= 12
    assert {case: results[case]["first"] for case in sound} == dict.fromkeys(sound)
    missed = [case for case, (_, stage) in SPOILT.items() if results[case]["first"] != stage]
    assert len(missed) <= len(SPOILT) // 12, missed


def test_the_pages_of_the_stages_are_there():
    assert {page for page in STAGES.values() if not (ROOT / page).is_file()} == set()


def spoilt(folder, config=None, weights=None):
    "The shipped drafter with another config or other weights."
    shutil.copytree(SHIPPED, folder)
    raw = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    if config:
        config(raw)
    if weights:
        weights(state)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def not_a_number(state):
    state["fc.weight"][3, 3] = torch.nan


def eight_bits(state):
    for name, w in state.items():
        if name.startswith("layers") and w.ndim == 2:
            state[name] = w.to(torch.float8_e5m2).to(w.dtype)


def as_before_training(state):
    for name, w in state.items():
        if name.startswith("layers") and w.ndim == 1:
            state[name] = torch.ones_like(w)


@pytest.mark.parametrize("fault", [not_a_number, as_before_training])
def test_weights_are_looked_at_without_features(tmp_path, fault):
    found = examine(spoilt(tmp_path / "d", weights=fault), TINY)
    assert found.first.stage == "weights"
    assert {f.stage for f in found.findings} == set(STAGES)
    assert all(f.evidence for f in found.findings) and all(f.remedy for f in found.findings if f.state == "finding")


def test_a_verifier_of_another_shape_is_the_first_finding(tmp_path):
    other = tmp_path / "verifier"
    shutil.copytree(ROOT / "tests/fixtures/compat/0.1.0/verifier", other)
    assert examine(SHIPPED, other).first.stage == "verifier"


def test_sources_come_from_the_provenance(tmp_path):
    drafter = spoilt(tmp_path / "d")
    features = tmp_path / "f"
    features.mkdir()
    write_provenance(drafter, "train", dict(eval_share=0.1, seed=3), dict(features=features, verifier=TINY))
    found = find_sources(drafter, TINY)
    assert found.features == features and found.split == dict(eval_share=0.1, seed=3)
    features.rmdir()
    assert find_sources(drafter, TINY).features is None


def test_the_command_ends_with_a_verdict_and_code_one(tmp_path):
    "Of weights in eight bits."
    line = ["doctor", str(spoilt(tmp_path / "d", weights=eight_bits)), "--verifier", str(TINY)]
    result = CliRunner().invoke(app, [*line, "--output-dir", str(tmp_path / "page")])
    assert result.exit_code == 1, result.output
    assert "First loss: weights. " in result.stdout and "Read: nbs/models/02_base.ipynb" in result.stdout
    assert "not checked  no features were found; give --features" in result.stdout
    assert "First loss: weights" in (tmp_path / "page/index.html").read_text()
    again = CliRunner().invoke(app, [*line, "--output-dir", str(tmp_path / "page")])
    assert again.exit_code == 2 and "--overwrite" in again.output


@pytest.mark.parametrize(
    "settings, norms, evidence, remedy",
    [
        ({"learning_rate": 2e-3}, None, "9 steps, learning rate 0.002", "train for more steps: "),
        (None, None, "at 50%; 9 steps", "train for more steps: "),
        ({"learning_rate": 2e-3}, [1.0, 3.0], "learning rate 0.002", "lower the learning rate"),
    ],
)
def test_a_run_that_ended_before_its_first_log(settings, norms, evidence, remedy):
    history = pd.DataFrame({"step": [5, 9], "eval_loss": [9.0, 8.0], "eval_position_0_acc": [0.0, 0.01]})
    history = history if norms is None else history.assign(grad_norm=norms)
    found = learned_check(history, 0.5, settings)
    assert found.state == "finding" and found.evidence.endswith(evidence) and found.remedy.startswith(remedy)
    assert data_check(history).evidence == "the history has no training loss: the run was shorter than logging_steps"
    assert data_check(history.drop(columns="eval_loss")).evidence == "the history has no held-out loss"


def test_a_high_learning_rate_is_not_raised():
    history = pd.DataFrame({"step": [900], "learning_rate": [2e-3], "eval_position_0_acc": [0.0]})
    assert learned_check(history, 0.5).remedy.startswith("train for more steps: ")
    assert learned_check(history.assign(learning_rate=3e-5), 0.5).remedy.startswith("raise the learning rate tenfold")
