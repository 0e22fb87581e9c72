"""A drafter is what its class says. EAGLE-3 with a gate on each verifier layer, once as a module of somebody's package
and once as a module of ours, is known everywhere without another line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators_nb.train.train_drafter import train_drafter

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "tests/fixtures/compat/0.1.0"
HEAD = """
import torch
from torch import nn
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
"""
FORMAT = """
    served_as = "eagle3", False


from speculators_nb.models.formats import NativeFormat, register_format

register_format(
    NativeFormat("gated", "gated", "ours", "tensor gate.weight", lambda c, names: "gate.weight" in names, dict, dict)
)
"""


GATED = """
@SpeculatorModelConfig.register("gated")
class GatedConfig(Eagle3SpeculatorConfig):
    speculators_model_type: str = "gated"


@SpeculatorModel.register("gated")
class GatedDraftModel(Eagle3DraftModel):
    config_class = GatedConfig

    def __init__(self, config: GatedConfig):
        super().__init__(config)
        self.gate = nn.Linear(self.fc.in_features, config.num_aux)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def scales(
        self, features: torch.Tensor
    ) -> torch.Tensor:  # [..., A·H] -> [..., A], 1 before training
        return 2 * torch.sigmoid(self.gate(features))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:  # [..., A·H] -> [..., H]
        layers = features.unflatten(-1, (self.config.num_aux, -1))
        return super().fuse((layers * self.scales(features)[..., None]).flatten(-2))
"""


def python(folder, code, *arguments):
    "What a fresh process prints last, with `folder` in front of the path."
    env = os.environ | dict(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=folder, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IN_A_PACKAGE = """
import json, sys
from pathlib import Path
from speculators_nb.core.options import algorithms
light = "gated" in algorithms() and "torch" not in sys.modules
from typer.testing import CliRunner
from speculators_nb.cli.main import app
features, verifier, out = sys.argv[1:]
def command(*words):
    done = CliRunner().invoke(app, list(words), env=dict(COLUMNS="300", NO_COLOR="1", TERM="dumb"))
    return done.exit_code, done.output
small = "--total-seq-len 32 --num-train-epochs 1 --eval-share 0 --extra ttt_steps=2 --extra disable_tqdm=true"
code, said = command("train", features, out, "--algorithm", "gated", "--verifier", verifier, *small.split())
assert code == 0, said
found = dict(light=light, unknown=command("train", features, out, "--algorithm", "gatd")[1])
found["check"] = command("check", out)
import torch
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.lab.experiment import COMMON, CONTENDERS, settings
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import detect
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.serve.vllm_methods import method_of_types
from speculators_nb.verifier.tapped_model import Verifier
model = SpeculatorModel.from_pretrained(out, dtype=torch.float32)
drafter = model.drafter()
target, prompt = Verifier.from_pretrained(verifier, drafter.aux_layer_ids), torch.tensor([5, 6, 7, 8])
drafted = generate(target, drafter, prompt, k=2, max_new_tokens=9)
found["decode"] = drafted.tokens == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=9).tokens
found["type"] = type(model).__name__, type(model.config).__name__, type(model).__module__
found["served"] = SpeculativeConfig(model=out).method, method_of_types()["gated"]
own = settings("gated", 3)
found["lab"] = {name: own[name] for name in own if name not in COMMON}, CONTENDERS["gated"]
foreign = Path(out).parent / "foreign"
foreign.mkdir()
(foreign / "config.json").write_text("{}")
from safetensors.torch import save_file
save_file({"gate.weight": torch.zeros(2)}, foreign / "model.safetensors")
found["format"] = detect(foreign)
print(json.dumps(found))
"""


def test_in_a_package_of_its_own(tmp_path):
    "One entry point: known to options, commands, training, loading, decoding, the contract, the lab and conversion."
    (tmp_path / "my_drafters.py").write_text(HEAD + GATED + "\n" + FORMAT)
    (tmp_path / "my_drafters-1.dist-info").mkdir()
    (tmp_path / "my_drafters-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: my_drafters\nVersion: 1\n")
    entry = "[speculators_nb.drafters]\ngated = my_drafters\n"
    (tmp_path / "my_drafters-1.dist-info/entry_points.txt").write_text(entry)
    found = python(tmp_path, IN_A_PACKAGE, RELEASE / "features", RELEASE / "verifier", tmp_path / "out")
    assert found["light"] and found["decode"] and found["format"] == "gated"
    assert "gated" in found["unknown"] and "eagle3" in found["unknown"]
    assert found["check"] == [0, "vLLM can serve this drafter.\n"]
    assert found["type"] == ["GatedDraftModel", "GatedConfig", "my_drafters"]
    assert found["served"] == ["eagle3", ["eagle3", False]]
    assert found["lab"] == [
        dict(ttt_steps=3, norm_before_fc=True, norm_output=True, ttt_step_loss_decay=0.6),
        ["gated", {}],
    ]


IN_OURS = """
import json, sys
import speculators_nb
from speculators_nb.core.options import algorithms
sys.path.insert(0, sys.argv[1])
import stubs
found = dict(listed="GatedDraftModel" in dir(speculators_nb), kinds="gated" in algorithms(), stub=stubs.stub())
found["light"] = "torch" not in sys.modules
from speculators_nb import GatedConfig, GatedDraftModel
from speculators_nb.models import GatedDraftModel as same
from speculators_nb.models.base import SpeculatorModel
found["same"] = same is GatedDraftModel is SpeculatorModel.registered_class("gated")
found["module"] = GatedConfig.__module__
from benchmarks.gpu.equal import DRAFTERS
found["benchmark"] = "gated" in DRAFTERS
print(json.dumps(found))
"""


@pytest.fixture
def copy(tmp_path):
    "A copy of our package with a further module, as a notebook would export it."
    for source in (ROOT / "speculators_nb").rglob("*.py*"):
        if "__pycache__" not in source.parts:
            place = tmp_path / source.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
    (tmp_path / "speculators_nb/models/gated.py").write_text(HEAD + GATED + "\n")
    return tmp_path


def test_in_ours(copy):
    "A module in models/: its public names, what a type checker sees of them, and the benchmark on a device."
    found = python(copy, IN_OURS, ROOT / "docs")
    assert found["listed"] and found["kinds"] and found["light"] and found["same"] and found["benchmark"]
    assert found["module"] == "speculators_nb.models.gated"
    assert "from .gated import GatedDraftModel as GatedDraftModel\n" in found["stub"]


def test_a_forward_that_passes_its_arguments_on_has_those_of_its_base(tmp_path):
    def register_and_train():
        @SpeculatorModelConfig.register("halved")
        class HalvedConfig(Eagle3SpeculatorConfig):
            speculators_model_type: str = "halved"

        @SpeculatorModel.register("halved")
        class HalvedDraftModel(Eagle3DraftModel):
            config_class = HalvedConfig

            def forward(self, *args, share=1.0, **kwargs):
                tokens, loss, metrics = super().forward(*args, **kwargs)
                return tokens, loss * share, metrics

        how = dict(total_seq_len=32, max_steps=1, eval_share=0, disable_tqdm=True, ttt_steps=2, save_strategy="no")
        losses = {}
        for name, own in dict(eagle3={}, halved=dict(share=0.5)).items():
            trainer = train_drafter(RELEASE / "features", tmp_path / name, RELEASE / "verifier", name, **how, **own)
            losses[name] = trainer.state.log_history[-1]["train_loss"]
        return losses

    losses = forked.ask(register_and_train)()  # whose registry ends with it
    assert losses["halved"] == pytest.approx(losses["eagle3"] / 2, rel=1e-6)
