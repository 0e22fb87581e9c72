"""docs/coming_from_specforge.md: whatever it names of this library is there."""

import inspect
import json
import re
from pathlib import Path

import pytest
from test_coming_from_speculators import extras

from speculators_nb.cli.drafter_commands import train
from speculators_nb.cli.main import app
from speculators_nb.core.config import import_models
from speculators_nb.data.messages import normalize
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.formats import formats
from speculators_nb.nn.losses import parse_loss
from speculators_nb.train.training_arguments import LEARNING_RATES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming_from_specforge.md").read_text()


def table(title):
    part = re.split(r"^## ", PAGE.split(f"## {title}\n")[1], flags=re.M)[0]
    return re.findall(r"^\| `([^`]+)`[^|]* \| `([^`]+)` \|(.*)\|$", part, flags=re.M)


def test_every_row_is_read():
    read = sum(len(table(title)) for title in ("Commands", "Strategies", "Fields of a run config"))
    assert PAGE.count("\n| `") == read and read > 50


@pytest.mark.parametrize("there,here,_", table("Commands"))
def test_commands(there, here, _):
    known = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert here.split()[0] == "speculators-nb" and here.split()[1] in known


@pytest.mark.parametrize("there,here,said", table("Fields of a run config"))
def test_fields(there, here, said):
    parameters = inspect.signature(train).parameters
    if match := re.fullmatch(r"--extra (\w+)=", here):
        assert match[1] in extras()
    else:
        assert here.removeprefix("--").replace("-", "_") in parameters


def test_strategies_and_what_convert_reads():
    import_models()
    readable = {entry.model_type for entry in formats()}
    for _, here, said in table("Strategies"):
        assert here in SpeculatorModel.registry
        assert said.strip().startswith("yes") == (here in readable), here


def test_defaults_that_the_page_compares():
    import_models()
    arguments = {kind: drafter.training_arguments() for kind, drafter in SpeculatorModel.registry.items()}
    parameters = inspect.signature(train).parameters
    assert parameters["num_train_epochs"].default == 3 and LEARNING_RATES == {"muon": 3e-3, "adamw": 1e-4}
    assert parameters["seed"].default == 0 and arguments["eagle3"]["ttt_steps"] == 3
    assert arguments["dflash"]["block_size"] == 8 and arguments["dflash"]["max_anchors"] == 512
    assert arguments["peagle"]["down_sample_ratio"] == 0.7
    assert [parse_loss(name) for name in ("lk_hybrid", "nla", "tv")]


@pytest.mark.parametrize("role,content", [("role", "content"), ("from", "value")])
def test_its_conversations_are_read(role, content):
    row = {"id": "a", "conversations": [{role: "user", content: "Hi"}, {role: "assistant", content: "Ho"}]}
    found = normalize(json.loads(json.dumps(row)))
    assert [(m["role"], m["content"]) for m in found] == [("user", "Hi"), ("assistant", "Ho")]
