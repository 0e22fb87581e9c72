"""A notebook-centric research workbench for speculative decoding.

The package is exported from the notebooks in `nbs/`. Importing it costs nothing: public names are resolved on first
use.
"""

__version__ = "0.2.0"

from importlib import import_module
from typing import TYPE_CHECKING

from speculators_nb import _aliases

# public name -> the module that defines it; beside them, the model and the config of every drafter in models/
_PUBLIC = {
    "SpeculatorModelConfig": "core.config",
    "SpeculatorsConfig": "core.config",
    "VerifierConfig": "core.config",
    "reload_schemas": "core.config",
    "TokenProposalConfig": "core.registry",
    "GreedyTokenProposalConfig": "core.registry",
    "SamplingTokenProposalConfig": "core.registry",
    "StaticTreeTokenProposalConfig": "core.registry",
    "DynamicTreeTokenProposalConfig": "core.registry",
    "SpeculatorModel": "models.base",
    "SpeculativeConfig": "serve.speculative_config",
}

if TYPE_CHECKING:  # the same names, for those who read and do not run
    from .core.config import SpeculatorModelConfig as SpeculatorModelConfig
    from .core.config import SpeculatorsConfig as SpeculatorsConfig
    from .core.config import VerifierConfig as VerifierConfig
    from .core.config import reload_schemas as reload_schemas
    from .core.registry import DynamicTreeTokenProposalConfig as DynamicTreeTokenProposalConfig
    from .core.registry import GreedyTokenProposalConfig as GreedyTokenProposalConfig
    from .core.registry import SamplingTokenProposalConfig as SamplingTokenProposalConfig
    from .core.registry import StaticTreeTokenProposalConfig as StaticTreeTokenProposalConfig
    from .core.registry import TokenProposalConfig as TokenProposalConfig
    from .models import *  # its stub is written by docs/stubs.py
    from .serve.speculative_config import SpeculativeConfig as SpeculativeConfig

_aliases.install()


def _public_names():
    "Public name -> the module that defines it."
    from .core.options import shipped_drafters

    return _PUBLIC | {name: module for classes in shipped_drafters().values() for name, module in classes.items()}


def _resolve(name):
    if name == "__all__":
        return ["__version__", *sorted(_public_names())]
    if place := _PUBLIC.get(name) or _public_names().get(name):
        return getattr(import_module(f"{__name__}.{place}"), name)
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


if not TYPE_CHECKING:  # with it, a type checker would let every name pass
    __getattr__ = _resolve


def __dir__():
    return sorted([*globals(), *_public_names()])
