"""Import paths that differ from the layout: those of the documentation work for good, those of 0.1 with a warning."""

import ast
import importlib
import json
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import pytest

from speculators_nb import _aliases

ROOT = Path(__file__).parents[1]
NAMES_0_1 = json.loads((ROOT / "tests/fixtures/compat/0.1.0-names.json").read_text())

# what the public documentation of speculators and its class pages import
DOCUMENTED = [
    ("", "SpeculatorsConfig"),
    ("", "VerifierConfig"),
    ("", "SpeculatorModel"),
    ("", "SpeculatorModelConfig"),
    ("config", "SpeculatorModelConfig"),
    ("config", "SpeculatorsConfig"),
    ("config", "VerifierConfig"),
    ("convert", "convert"),
    ("data_generation", "prepare_data"),
    ("model", "SpeculatorModel"),
    ("models", "DFlashDraftModel"),
    ("models", "DFlashSpeculatorConfig"),
    ("models", "Eagle3DraftModel"),
    ("models", "Eagle3SpeculatorConfig"),
    ("models", "EagleSpeculator"),
    ("models", "EagleSpeculatorConfig"),
    ("models", "MLPSpeculatorConfig"),
    ("models", "MTPDraftModel"),
    ("models", "MTPSpeculatorConfig"),
    ("models", "PEagleDraftModel"),
    ("models", "PEagleSpeculatorConfig"),
    ("models.dflash.config", "DFlashSpeculatorConfig"),
    ("models.dflash.core", "DFlashDraftModel"),
    ("models.eagle", "EagleSpeculator"),
    ("models.eagle", "EagleSpeculatorConfig"),
    ("models.eagle3.config", "Eagle3SpeculatorConfig"),
    ("models.eagle3.core", "Eagle3DraftModel"),
    ("models.mtp.core", "MTPDraftModel"),
    ("models.peagle.core", "PEagleDraftModel"),
    ("proposals", "GreedyTokenProposalConfig"),
    ("proposals", "TokenProposalConfig"),
    ("proposals.greedy", "GreedyTokenProposalConfig"),
    ("models.base_components", "DecoderLayer"),
    ("models.mlp", "MLPSpeculatorConfig"),
    ("train.trainer", "SpeculatorTrainer"),
    ("utils", "ClassRegistryMixin"),
    ("utils", "PydanticClassRegistryMixin"),
    ("utils", "ReloadableBaseModel"),
]


def python(code):
    done = subprocess.run(
        [sys.executable, "-W", "default::FutureWarning", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done


def test_documented_paths_work_without_a_warning():
    "Each in the form that the documentation uses, all in one process that imports nothing of ours before."
    lines = [f"from speculators_nb{'.' * bool(path)}{path} import {name}" for path, name in DOCUMENTED]
    lines += [
        "import speculators_nb.models.eagle3.core as core, speculators_nb.models.eagle3",
        "assert core is speculators_nb.models.eagle3",
    ]
    lines += [
        "import speculators_nb.proposals.greedy as greedy",
        "assert greedy.GreedyTokenProposalConfig is GreedyTokenProposalConfig",
    ]
    assert "speculators_nb" not in python("\n".join(lines)).stderr


def test_the_documentation_s_paths_are_all_listed():
    listed = {path for path, _ in DOCUMENTED}
    assert set(_aliases.DOCUMENTED) <= listed
    # those of upstream's code are named by its own files, but for two packages that the record leaves out
    record = json.loads((ROOT / "tests/fixtures/upstream_names.json").read_text())["modules"]
    assert {p for p in _aliases.UPSTREAM if not p.startswith(("utils.", "train."))} <= record.keys()
    for path, name in [("train.config", "SpeculatorTrainingArguments"), ("utils.loading", "load_tensors")]:
        assert hasattr(importlib.import_module(f"speculators_nb.{path}"), name)


@pytest.mark.parametrize("module", NAMES_0_1)
def test_paths_of_0_1_have_their_names(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = importlib.import_module(f"speculators_nb.{module}")
        missing = [name for name in NAMES_0_1[module] if not hasattr(old, name)]
    targets = _aliases.PATHS.get(module) or _aliases.MOVED.get(module) or (module,)
    dropped = {name for target in targets for name in _aliases.DROPPED.get(target, "").split()}
    assert set(missing) <= dropped


def test_paths_of_0_1_warn():
    """Of each kind: a module that moved, one whose names are in two, a package that was a module, a name that left its
    module."""
    said = python("""
import speculators_nb
from speculators_nb.masks import Mask
from speculators_nb.nn import masks
assert Mask is masks.Mask and speculators_nb.masks is masks
from speculators_nb.decode.accept import Rule
from speculators_nb.data_generation.features import FeatureDataset, extract_features
from speculators_nb.verifier import Verifier
from speculators_nb.cli import app
from speculators_nb.serve import Server
from speculators_nb.evaluate.load import read_counters
""").stderr
    lines = [line for line in said.splitlines() if "FutureWarning: speculators_nb." in line]
    assert [line.split("FutureWarning: ")[1] for line in lines] == [
        "speculators_nb.masks is now speculators_nb.nn.masks; the old path goes with version 0.3",
        "speculators_nb.decode.accept is now speculators_nb.decode.acceptance_rules; "
        "the old path goes with version 0.3",
        "speculators_nb.data_generation.features is now speculators_nb.features.in_process "
        "and features.feature_folder and features.feature_file; "
        "the old path goes with version 0.3",
        "speculators_nb.verifier.Verifier is now speculators_nb.verifier.tapped_model.Verifier; "
        "the old path goes with version 0.3",
        "speculators_nb.cli.app is now speculators_nb.cli.main.app; the old path goes with version 0.3",
        "speculators_nb.serve.Server is now speculators_nb.serve.server.Server; the old path goes with version 0.3",
        "speculators_nb.evaluate.load.read_counters is now speculators_nb.evaluate.vllm_metrics.read_counters; "
        "the old path goes with version 0.3",
    ]
    assert all(line.startswith("<string>:") for line in lines), "a warning names the line that imports"


def test_every_target_exists_and_no_old_path_hides_a_module():
    for path, targets in (_aliases.PATHS | _aliases.MOVED | _aliases.FORMER_NAMES).items():
        for target in targets:
            assert (ROOT / "speculators_nb" / f"{target.replace('.', '/')}.py").exists(), (path, target)
    for path in _aliases.PATHS | _aliases.MOVED:
        assert not (ROOT / "speculators_nb" / f"{path.replace('.', '/')}.py").exists(), path


def own_names(file):
    "What a module defines or imports."
    for node in ast.parse(file.read_text()).body:
        yield getattr(node, "name", None)  # of a function or class
        yield from (target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name))
        yield from (found.asname or found.name for found in getattr(node, "names", ()))


def test_no_path_takes_the_place_of_a_name():
    "Importing `a.b` sets `b` in module `a`, which may have no name of its own there."
    for path in _aliases.PATHS:
        parent, _, name = path.rpartition(".")
        file = ROOT / "speculators_nb" / f"{parent.replace('.', '/')}.py"
        assert not file.exists() or name not in own_names(file), path


@pytest.mark.parametrize(
    "path", ["speculators_nb.nothing", "speculators_nb.models.eagle3.nothing", "speculators_nb.data_generation.nothing"]
)
def test_an_unknown_path_is_an_import_error(path):
    with pytest.raises(ModuleNotFoundError, match=path):
        importlib.import_module(path)


@pytest.mark.parametrize("package", ["models", "verifier", "utils", "data_generation"])
def test_an_unknown_name_is_an_attribute_error(package):
    module = importlib.import_module(f"speculators_nb.{package}")
    with pytest.raises(AttributeError, match=f"module 'speculators_nb.{package}' has no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


@pytest.mark.parametrize("path,name", [("utils", "ClassRegistryMixin"), ("verifier", "Verifier"), ("cli", "app")])
def test_a_star_import_has_the_names(path, name):
    python(f"from speculators_nb.{path} import *; {name}")


def test_a_renamed_name_warns_and_is_the_new_one():
    said = python("""
from speculators_nb.decode.tree_growth import independent_log_probs, product_law
assert product_law is independent_log_probs
""").stderr
    assert (
        "speculators_nb.decode.tree_growth.product_law is now speculators_nb.decode.tree_growth.independent_log_probs; "
        "the old path goes with version 0.3" in said
    )
    for old, new in _aliases.RENAMED.items():
        module, _, name = new.rpartition(".")
        today = importlib.import_module(f"speculators_nb.{module}")
        assert name in vars(today), f"{old} -> {new}"


def test_a_dropped_name_is_gone():
    for module, names in _aliases.DROPPED.items():
        today = vars(importlib.import_module(f"speculators_nb.{module}"))
        assert [name for name in names.split() if name in today] == []


def test_an_old_path_is_not_run_but_named():
    done = subprocess.run(
        [sys.executable, "-m", "speculators_nb.data_generation.corpus"], capture_output=True, text=True, cwd=ROOT
    )
    assert (
        done.returncode and "run python -m speculators_nb.lab.corpus" in done.stderr and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("path,name", [("nn.masks", "Mask"), ("decode.tree", "TokenTree")])
def test_type_hints_resolve_without_matplotlib(path, name):
    "What nbdev's show_doc asks for."
    drawn = getattr(importlib.import_module(f"speculators_nb.{path}"), name).draw
    assert "return" in typing.get_type_hints(drawn)
