"""What upstream computed (tests/fixtures/README.md), as tests read it."""

import json
from pathlib import Path

from safetensors.torch import load_file

from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel

FIXTURES = Path(__file__).parent / "fixtures"


def cases(algorithm):
    "Names of its folders."
    folders = [p for pattern in (algorithm, f"{algorithm}_*") for p in FIXTURES.glob(pattern)]
    return sorted(p.name for p in folders if (p / "inputs.safetensors").exists())


def load_case(name):
    "(model, batch, forward arguments, outputs.json, folder)"
    folder = FIXTURES / name
    config = SpeculatorModelConfig.from_pretrained(folder / "saved_pretrained")
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    model.load_state_dict(load_file(folder / "state_dict.safetensors"))
    info = json.loads((folder / "outputs.json").read_text())
    kwargs, _ = model.get_trainer_kwargs(
        **info["training_args"] | {k: v for k, v in info["call_kwargs"].items() if k != "loss_config"}
    )
    return model, load_file(folder / "inputs.safetensors"), kwargs, info, folder
