"""docs/coming_from_speculators.md, line by line: what it says of upstream is in the record of 0.9.0, and what it
says of us is there."""

import importlib
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from speculators_nb.cli.drafter_commands import train
from speculators_nb.cli.main import app
from speculators_nb.core.config import import_models
from speculators_nb.data.sources import PRESETS
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import LAYER_ARGUMENTS
from speculators_nb.train.training_arguments import NOT_SUPPORTED, SpeculatorTrainingArguments

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming_from_speculators.md").read_text()
UPSTREAM = json.loads((ROOT / "tests/fixtures/upstream_names.json").read_text())
NAMES = "Names that have no place here", "Names of train, data_generation and utils"  # tables of the page


def table(title):
    part = re.split(r"^## ", PAGE.split(f"## {title}\n")[1], flags=re.M)[0]
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", part, flags=re.M)


def attribute(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_there_is_no_line_that_no_test_reads():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    read = sum(len(table(title)) for title in ("Commands", "Options of training", "Data sets", "In Python"))
    read += len(without_counterpart())
    names = PAGE.split("## Names that have no place here")[1].count("\n| `")
    assert len(rows) == read + names and read > 30


@pytest.mark.parametrize("there,here", table("Commands"))
def test_commands(there, here):
    known = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert there.split()[0] == "speculators" and here.split()[0] == "speculators-nb" and here.split()[1] in known


def without_counterpart():
    part = PAGE.split("## Options of training without a counterpart\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(--[\w-]+)` \| \S.* \|$", part, flags=re.M)


def extras():
    "Every name that `--extra` takes, for some drafter."
    import_models()
    drafters = [set(drafter.training_arguments()) for drafter in SpeculatorModel.registry.values()]
    settings = {field.name for field in fields(SpeculatorTrainingArguments)} - NOT_SUPPORTED.keys()
    named = inspect.signature(SpeculatorModel.from_training_args).parameters
    return set().union(settings, LAYER_ARGUMENTS, named, *drafters)


@pytest.mark.parametrize("there,here", table("Options of training"))
def test_options(there, here):
    if match := re.fullmatch(r"--extra (\w+)=", here):
        assert match[1] in extras()
    else:
        assert here.removeprefix("--").replace("-", "_") in inspect.signature(train).parameters


def test_every_option_has_one_line():
    lines = [there for there, _ in table("Options of training")] + without_counterpart()
    assert sorted(lines) == UPSTREAM["options"]


@pytest.mark.parametrize("there", without_counterpart())
def test_what_has_no_counterpart_is_no_option_here(there):
    name = there.removeprefix("--").replace("-", "_")
    assert name not in extras() | inspect.signature(train).parameters.keys()


def test_data_sets():
    assert dict(table("Data sets")) == PRESETS and PRESETS.keys() == UPSTREAM["presets"].keys()
    for name, (hub_id, subset, split) in UPSTREAM["presets"].items():
        wanted = [hub_id, *([subset] if subset else []), *([split] if split != "train" else [])]
        assert PRESETS[name] == ":".join(["hf", *wanted])


@pytest.mark.parametrize("there,here", table("In Python"))
def test_python(there, here):
    assert there.startswith("speculators.") and callable(attribute(here))


def rows(title):
    "[(module.name, what is said of it)] of a table of names."
    part = re.split(r"^## ", PAGE.split(f"## {title}\n")[1], flags=re.M)[0]
    lines = re.findall(r"^\| `([\w.]+)`: (.*?) \| (.+) \|$", part, flags=re.M)
    return [(f"{module}.{name}", said) for module, names, said in lines for name in re.findall(r"`(\w+)`", names)]


def found(path):
    "Whether the name is ours: not of another library that the module imports."
    try:
        value = attribute(f"speculators_nb.{path}")
    except (ModuleNotFoundError, AttributeError):
        return False
    return getattr(value, "__module__", "speculators_nb").startswith("speculators_nb")


def test_a_name_is_found_or_on_the_page():
    listed = [name for title in NAMES for name, _ in rows(title)]
    names = [f"{module}.{name}" for module, names in UPSTREAM["names"].items() for name in names]
    assert sorted(listed) == [name for name in sorted(names) if not found(name)]
    assert len(names) - len(listed) > 40


def test_what_the_page_names_of_ours_is_there():
    text = PAGE.split("## Names\n")[1]
    for path in set(re.findall(r"`speculators_nb\.([\w.]+)`", text)):
        try:
            importlib.import_module(f"speculators_nb.{path}")
        except ModuleNotFoundError:
            assert attribute(f"speculators_nb.{path}") is not None, path
    known = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert set(re.findall(r"`speculators-nb (\w+)", text)) <= set(known)


def test_what_the_documentation_names():
    part = PAGE.split("## What the documentation names")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", part, flags=re.M)
    assert len(rows) == part.count("\n| `") and all("speculators" in here for _, here in rows)
    of_0_9 = [name for there, _ in rows for name in re.findall(r"`(utils\.\w+)`", there)]
    assert len(of_0_9) == 3 and all(map(found, of_0_9))
