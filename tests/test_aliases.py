"""Import paths that differ from the layout: those of the public documentation. `test_wheel.py` imports each."""

import ast
import importlib
import typing
from pathlib import Path

import pytest

from speculators_nb import _aliases

ROOT = Path(__file__).parents[1]

# what the public documentation of speculators and its class pages import
DOCUMENTED = [
    ("", "SpeculatorsConfig"),
    ("", "VerifierConfig"),
    ("", "SpeculatorModel"),
    ("", "SpeculatorModelConfig"),
    ("config", "SpeculatorModelConfig"),
    ("config", "SpeculatorsConfig"),
    ("config", "VerifierConfig"),
    ("config", "reload_schemas"),
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
    ("models.dflash", "DFlashDraftModel"),
    ("models.dflash", "DFlashSpeculatorConfig"),
    ("models.dflash.config", "DFlashSpeculatorConfig"),
    ("models.dflash.core", "DFlashDraftModel"),
    ("models.eagle", "EagleSpeculator"),
    ("models.eagle", "EagleSpeculatorConfig"),
    ("models.eagle3", "Eagle3DraftModel"),
    ("models.eagle3", "Eagle3SpeculatorConfig"),
    ("models.eagle3.config", "Eagle3SpeculatorConfig"),
    ("models.eagle3.core", "Eagle3DraftModel"),
    ("models.mtp", "MTPDraftModel"),
    ("models.mtp", "MTPSpeculatorConfig"),
    ("models.mtp.core", "MTPDraftModel"),
    ("models.peagle", "PEagleDraftModel"),
    ("models.peagle", "PEagleSpeculatorConfig"),
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


def test_the_documentation_s_paths_are_all_listed():
    assert set(_aliases.DOCUMENTED) <= {path for path, _ in DOCUMENTED}


def test_no_path_hides_a_module():
    for path in _aliases.DOCUMENTED:
        assert not (ROOT / "speculators_nb" / f"{path.replace('.', '/')}.py").exists(), path


def own_names(file):
    "What a module defines or imports."
    for node in ast.parse(file.read_text()).body:
        yield getattr(node, "name", None)  # of a function or class
        yield from (target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name))
        yield from (found.asname or found.name for found in getattr(node, "names", ()))


def test_no_path_takes_the_place_of_a_name():
    "Importing `a.b` sets `b` in module `a`, which may have no name of its own there."
    for path in _aliases.DOCUMENTED:
        parent, _, name = path.rpartition(".")
        file = ROOT / "speculators_nb" / f"{parent.replace('.', '/')}.py"
        assert not file.exists() or name not in own_names(file), path


@pytest.mark.parametrize(
    "path", ["speculators_nb.nothing", "speculators_nb.models.eagle3.nothing", "speculators_nb.utils.nothing"]
)
def test_an_unknown_path_is_an_import_error(path):
    with pytest.raises(ModuleNotFoundError, match=path):
        importlib.import_module(path)


@pytest.mark.parametrize("package", ["models", "proposals"])
def test_an_unknown_name_is_an_attribute_error(package):
    module = importlib.import_module(f"speculators_nb.{package}")
    with pytest.raises(AttributeError, match=f"module 'speculators_nb.{package}' has no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


@pytest.mark.parametrize("path,name", [("nn.attention", "Mask"), ("decode.tree", "TokenTree")])
def test_type_hints_resolve_without_matplotlib(path, name):
    "What nbdev's show_doc asks for."
    drawn = getattr(importlib.import_module(f"speculators_nb.{path}"), name).draw
    assert "return" in typing.get_type_hints(drawn)
