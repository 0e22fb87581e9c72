"""The release notes 0.1 to 0.4, statement by statement (docs/statements.yml), where no other test holds one."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from documented import H, V, batch, layer, write_verifier
from packaging.requirements import Requirement
from transformers import Qwen2_5_VLConfig
from typer.testing import CliRunner

from speculators_nb.cli.main import app
from speculators_nb.core.config import SpeculatorModelConfig, import_models
from speculators_nb.models import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, export_native
from speculators_nb.nn.target_head import text_config

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.statement("release-07")
def test_the_trainer_names_no_algorithm():
    import_models()
    source = "".join(file.read_text() for file in (ROOT / "speculators_nb/train").glob("*.py"))
    assert {"dflash", "mtp"} <= SpeculatorModel.registry.keys()
    assert not [name for name in SpeculatorModel.registry if f'"{name}"' in source or f"'{name}'" in source]


@pytest.mark.statement("release-11")
def test_torch():
    (torch_line,) = [Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == "torch"]
    assert torch_line.specifier.contains("2.10.0")


@pytest.mark.statement("release-31", "release-33")
def test_metrics_of_each_step(tmp_path):
    verifier = write_verifier(tmp_path)
    model = Eagle3DraftModel.from_training_args(layer(layers=2), verifier_name_or_path=str(verifier))
    metrics = model(**batch(), ttt_steps=3)[2]
    for step in range(3):
        assert any("loss" in name and str(step) in name for name in metrics), metrics.keys()
        assert any("acc" in name and str(step) in name for name in metrics), metrics.keys()


@pytest.mark.statement("release-54")
def test_target_vocabulary():
    assert Eagle3SpeculatorConfig(transformer_layer_config=layer(), draft_vocab_size=12).target_vocab_size == V
    nested = Qwen2_5_VLConfig(text_config=dict(vocab_size=99, hidden_size=H))
    assert text_config(nested).vocab_size == 99


@pytest.mark.statement("release-50")
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_three_tokens_are_drafted(tmp_path, algorithm):
    "Of a new drafter, and of a converted one whose config does not say how many."
    verifier = write_verifier(tmp_path / "verifier")
    fresh = SpeculatorModel.registered_class(algorithm).from_training_args(layer(), verifier_name_or_path=str(verifier))
    fresh.save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "native", verifier=verifier)
    file = tmp_path / "native/config.json"
    raw = json.loads(file.read_text())
    raw.pop("speculative_tokens", None)
    file.write_text(json.dumps(raw))
    convert(tmp_path / "native", tmp_path / "again", verifier)
    for config in (fresh.config, SpeculatorModelConfig.from_pretrained(tmp_path / "again")):
        assert config.speculators_config.speculative_tokens == 3


@pytest.mark.statement("release-36")
def test_one_recipe_is_run_from_data_to_training(monkeypatch):
    "`speculators-nb run RECIPE`: here the plan; tests of the command run it."
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["run", "data/recipes/laptop.yaml", "--dry-run"])
    assert done.exit_code == 0, done.output
    places = [
        re.search(rf"\b{stage}\b", done.output) for stage in ("regenerate", "prepare", "features", "train", "evaluate")
    ]
    assert all(places) and [m.start() for m in places] == sorted(m.start() for m in places)
