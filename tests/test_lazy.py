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


def test_all_models_need_neither_figures_nor_tables():
    code = """import json, sys
from speculators_nb.core.config import import_models
import_models()
print(json.dumps([m for m in ("matplotlib", "pandas", "datasets") if m in sys.modules]))"""
    assert probe(code) == []


def test_a_command_imports_what_it_uses():
    "One process, from the command that needs least: what is imported beside it in vain would make each start later."
    unused = {
        "cli.serving": "matplotlib pandas datasets speculators_nb.train speculators_nb.evaluate speculators_nb.lab",
        "cli.data_commands": "matplotlib speculators_nb.train speculators_nb.plan.requirements",
        "data.prepare": "matplotlib",
        "cli.drafter_commands": "matplotlib ipywidgets IPython",
    }
    code = f"""import json, sys
from importlib import import_module
found = {{}}
for module, names in {unused}.items():
    import_module("speculators_nb." + module)
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


WINDOWS = """
import builtins, importlib, json, pkgutil
real = builtins.__import__
def without(name, globals=None, locals=None, fromlist=(), level=0):
    ours = str((globals or {}).get("__name__")).startswith("speculators_nb")
    if ours and not level and name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = without
import speculators_nb
wrong = {}
for module in pkgutil.walk_packages(speculators_nb.__path__, "speculators_nb."):
    try: importlib.import_module(module.name)
    except ImportError as e: wrong[module.name] = str(e)
print(json.dumps(wrong))
"""


def test_imports_need_no_module_that_windows_lacks():
    """All but the connector, which runs inside of vLLM. (Other packages' own imports of such modules stand behind a
    look at the platform.)"""
    assert probe(WINDOWS) == {"speculators_nb.serve.vllm_connector": "No module named 'fcntl'"}
