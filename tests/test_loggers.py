"""Loggers: TensorBoard here; W&B, MLflow and trackio are heavy, and are read back by `make loggers-test`, whose results
are committed."""

import json
import os
from pathlib import Path

import pytest
from loggers.read_back import NAMES, NEEDED, problems, train_line

from speculators_nb.train.training_arguments import LOGGER_FOLDERS, SpeculatorTrainingArguments, place_loggers

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clean(monkeypatch):
    "No variable of a logger, before and after."
    from speculators_nb.train import training_arguments as module

    monkeypatch.setattr(module, "_placed", {})
    for variable in [*(v for v, _ in LOGGER_FOLDERS.values()), "WANDB_MODE", "WANDB_API_KEY"]:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    return monkeypatch


def test_tensorboard_stores_the_history(tmp_path, tmp_path_factory, clean):
    "By the command: every number of the trainer's log, decoded acceptance too, and nothing beside the run's folder."
    from bad.harness import typed

    line = train_line("tensorboard", Path("run"), tmp_path_factory.mktemp("prompts"))
    clean.chdir(tmp_path)
    code, said, wrong = typed(line)
    assert code == 0, said + wrong
    assert problems("tensorboard", tmp_path / "run") == []
    assert "eval_mean_length" in (tmp_path / "run/training_log.csv").read_text().splitlines()[0].split(",")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_each_logger_writes_into_the_folder_of_its_run(tmp_path, clean):
    place_loggers([*NAMES], tmp_path / "a")
    assert all(str(tmp_path / "a") in os.environ[variable] for variable, _ in LOGGER_FOLDERS.values())
    assert os.environ["WANDB_MODE"] == "offline"
    place_loggers([*NAMES], tmp_path / "b")
    assert all(str(tmp_path / "b") in os.environ[variable] for variable, _ in LOGGER_FOLDERS.values())


def test_what_the_user_set_stays(tmp_path, clean):
    clean.setenv("WANDB_MODE", "online")
    clean.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    place_loggers([*NAMES], tmp_path)
    assert (os.environ["WANDB_MODE"], os.environ["MLFLOW_TRACKING_URI"]) == ("online", "http://tracking:5000")


@pytest.mark.parametrize("key", ["variable", "file"])
def test_wandb_with_a_key_is_online(tmp_path, clean, key):
    clean.setenv("NETRC", str(tmp_path / "netrc"))
    if key == "variable":
        clean.setenv("WANDB_API_KEY", "0" * 40)
    else:
        (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0\n")
    place_loggers(["wandb"], tmp_path)
    assert "WANDB_MODE" not in os.environ


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_logger_that_is_not_installed(tmp_path, name):
    from importlib.util import find_spec

    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(ValueError, match=f"report_to='{name}': this logger is not installed; pip install {name}") as e:
        SpeculatorTrainingArguments(str(tmp_path), report_to=name, use_cpu=True)
    assert "\n" not in str(e.value)


def test_the_committed_results_are_of_all_loggers_and_hold():
    results = json.loads((ROOT / "tests/loggers/results.json").read_text())
    assert results.keys() == {*NAMES}
    assert all(r["values"] > 20 and r["wrong"] == [] for r in results.values())
    assert all(r["needed"] == [*NEEDED] for r in results.values()), "make loggers-test"


def test_the_reader_sees_what_is_missing(tmp_path, clean):
    "A test of the test: one value changed in the history is noticed."
    from torch.utils.tensorboard import SummaryWriter

    decoded = {"eval_mean_length": 1.5, "eval_accepted_1": 0.4}
    rows = [{"step": 1, "loss": 2.0, "eval_loss": 1.0, "learning_rate": 0.1, "acc_1": 0.5} | decoded]
    (tmp_path / "checkpoint-1").mkdir()
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for name, value in (
            ("train/loss", 2.0),
            ("eval/loss", 1.0),
            ("train/learning_rate", 0.1),
            ("train/acc_1", 0.5),
            ("eval/mean_length", 1.5),
            ("eval/accepted_1", 0.4),
        ):
            writer.add_scalar(name, value, 1)
    state = tmp_path / "checkpoint-1/trainer_state.json"
    state.write_text(json.dumps({"log_history": rows}))
    assert problems("tensorboard", tmp_path) == []
    state.write_text(json.dumps({"log_history": [rows[0] | {"loss": 2.1, "grad_norm": 1.0}]}))
    assert [p.split(":")[1] for p in problems("tensorboard", tmp_path)] == [" loss at step 1", " grad_norm at step 1"]
    without = {name: value for name, value in rows[0].items() if name != "eval_mean_length"}
    state.write_text(json.dumps({"log_history": [without]}))
    assert [p.split(":")[0] for p in problems("tensorboard", tmp_path)] == ["the history has no eval_mean_length"]
