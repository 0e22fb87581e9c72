"""P-EAGLE against upstream's recorded numbers, and the lean path against the dense definition."""
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_nb.config import SpeculatorModelConfig
from speculators_nb.model import SpeculatorModel
from speculators_nb.models.peagle import PEagleDraftModel

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(p.name for p in FIXTURES.glob("peagle*") if (p / "inputs.safetensors").exists())


def load_case(name):
    folder = FIXTURES / name
    config = SpeculatorModelConfig.from_pretrained(folder / "saved_pretrained")
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    model.load_state_dict(load_file(folder / "state_dict.safetensors"))
    info = json.loads((folder / "outputs.json").read_text())
    kwargs, _ = PEagleDraftModel.get_trainer_kwargs(**info["training_args"] | {k: v for k, v in info["call_kwargs"].items() if k != "loss_config"})
    return model, load_file(folder / "inputs.safetensors"), kwargs, info, folder


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_upstream(name, lean):
    """Loss and metrics to 1e-5 relative, gradients to 1e-3 relative per tensor norm: the noise between upstream's own attention back ends is 1e-6."""
    model, batch, kwargs, info, folder = load_case(name)
    model.train()
    _, loss, metrics = model(**batch, **kwargs, cross_document_targets=True, lean=lean)
    assert loss.item() == pytest.approx(info["loss"], rel=1e-5)
    for key, value in info["metrics"].items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-5), key
    loss.backward()
    for key, want in load_file(folder / "grads.safetensors").items():
        got = model.get_parameter(key).grad
        assert (got - want).norm() <= 1e-3 * want.norm() + 1e-5, key
