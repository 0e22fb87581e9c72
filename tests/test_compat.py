"""Checkpoints of earlier releases (tests/compat/make.py): drafters load, and a run that an earlier release began is
resumed to the weights at which that release arrived."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import train_drafter

RUNS = sorted(p.parent for p in (Path(__file__).parent / "fixtures/compat").glob("*/*/run.json"))
IDS = [f"{p.parent.name}-{p.name}" for p in RUNS]


def test_all_drafters_have_a_run():
    from speculators_nb.core.config import SpeculatorModelConfig, import_models

    import_models()
    releases = {p.parent.name for p in RUNS}
    assert releases
    first = {json.loads((p / "run.json").read_text())["algorithm"] for p in RUNS if p.parent.name == "0.1.0"}
    assert (
        first
        == {"eagle", "eagle3", "peagle", "dflash", "dspark", "mtp", "mlp", "medusa"}
        <= set(SpeculatorModelConfig.registry)
    )


@pytest.mark.parametrize("release", sorted({p.parent for p in RUNS}), ids=lambda p: p.name)
def test_features_load(release):
    data = FeatureDataset(release / "features")
    assert (len(data), data.layer_ids) == (8, [1, 2, 3, 4])
    assert all(data[i]["hidden_states"].isfinite().all() for i in range(len(data)))


@pytest.mark.parametrize("run", RUNS, ids=IDS)
@pytest.mark.parametrize("which", [".", "checkpoint-2"])
def test_drafter_loads(run, which):
    "Every stored tensor arrives, bit for bit."
    model = SpeculatorModel.from_pretrained(run / which, verifier=run.parent / "verifier")
    state = model.state_dict()
    for name, tensor in load_file(run / which / "model.safetensors").items():
        assert torch.equal(state[name], tensor), name


DRAWN = {"eagle", "hass", "peagle", "dflash", "dspark"}  # whose training steps draw random numbers


@pytest.mark.parametrize("run", RUNS, ids=IDS)
def test_run_is_resumed(run, tmp_path):
    """Steps 3 and 4 of the same run: the recorded losses, the recorded weights. Where a step draws (noise, anchors,
    rollouts), it draws other numbers since each packed row has a seed of its own: the losses are near."""
    told = json.loads((run / "run.json").read_text())
    out = tmp_path / "run"
    out.mkdir()
    shutil.copytree(run / "checkpoint-2", out / "checkpoint-2")
    trainer = train_drafter(
        run.parent / "features",
        out,
        run.parent / "verifier",
        told["algorithm"],
        resume_from_checkpoint=True,
        **dict(optimizer="adamw", lr_scheduler_type="linear") | told["args"],  # the defaults of that release
    )
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert trainer.state.global_step == 4
    want, got = load_file(run / "model.safetensors"), load_file(out / "model.safetensors")
    assert want.keys() == got.keys()
    tolerance = 3e-3 if told["args"].get("bf16") else 1e-4  # release 0.1.0 formed more of the loss in bfloat16
    if told["algorithm"] in DRAWN:
        assert losses == pytest.approx(told["losses"], rel=0.25)
        assert all(got[name].shape == want[name].shape and got[name].isfinite().all() for name in want)
        return
    assert losses == pytest.approx(told["losses"], rel=tolerance)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
