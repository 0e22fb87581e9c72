"""`import speculators_nb` costs nothing: no torch; names arrive on first use."""

import json
import subprocess
import sys

import pytest

import speculators_nb

PROBE = """
import json, sys
import speculators_nb
dir(speculators_nb)
known = ("torch", "transformers", "numpy", "pandas", "matplotlib", "datasets", "pydantic")
print(json.dumps([m for m in known if m in sys.modules]))
"""


def probe(code=PROBE):
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_import_is_light():
    assert probe() == []


def test_the_probe_sees_a_heavy_import():
    assert probe(PROBE.replace("import speculators_nb\n", "import speculators_nb, numpy\n", 1)) == ["numpy"]


def test_a_command_imports_what_it_uses():
    """One process, from the command that needs least: what is imported beside it in vain would make each start later.
    All models need neither figures nor tables."""
    unused = {
        "cli.serving": "matplotlib pandas datasets speculators_nb.train speculators_nb.evaluate speculators_nb.lab",
        "core.config": "matplotlib pandas datasets",
        "cli.data_commands": "matplotlib speculators_nb.train speculators_nb.plan.requirements",
        "data.prepare": "matplotlib",
        "cli.drafter_commands": "matplotlib ipywidgets IPython",
    }
    code = f"""import gc, json, sys
gc.disable()  # a third of the time
from importlib import import_module
found = {{}}
for module, names in {unused}.items():
    imported = import_module("speculators_nb." + module)
    if module == "core.config": imported.import_models()
    found[module] = [name for name in names.split() if name in sys.modules]
print(json.dumps(found))"""
    assert probe(code) == {module: [] for module in unused}


@pytest.mark.parametrize("name", sorted(speculators_nb._public_names()))
def test_public_name_resolves(name):
    value = getattr(speculators_nb, name)
    assert value.__name__ == name
    assert value.__module__ == f"speculators_nb.{speculators_nb._public_names()[name]}"
    assert name in dir(speculators_nb) and name in speculators_nb.__all__


def test_submodules_are_attributes():
    code = "import speculators_nb, json; print(json.dumps(speculators_nb.models.__name__))"
    assert probe(code) == "speculators_nb.models"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'EagleFive'"):
        _ = speculators_nb.EagleFive
    with pytest.raises(ImportError):
        from speculators_nb import EagleFive  # noqa: F401
