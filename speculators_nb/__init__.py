"""A notebook-centric research workbench for speculative decoding.

The package is exported from the notebooks in `nbs/`. Importing it costs nothing: public names are resolved on first
use.
"""

__version__ = "0.2.0"

from importlib import import_module
from typing import TYPE_CHECKING

from speculators_nb import _aliases

# public name -> the module that defines it (the names that a user of the upstream library expects at the top level)
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
    "EagleSpeculator": "models.eagle",
    "EagleSpeculatorConfig": "models.eagle",
    "Eagle3DraftModel": "models.eagle3",
    "Eagle3SpeculatorConfig": "models.eagle3",
    "DFlashDraftModel": "models.dflash",
    "DFlashSpeculatorConfig": "models.dflash",
    "DFlash2DraftModel": "models.dflash2",
    "DFlash2SpeculatorConfig": "models.dflash2",
    "DSparkDraftModel": "models.dspark",
    "DSparkSpeculatorConfig": "models.dspark",
    "XPressDraftModel": "models.xpress",
    "XPressSpeculatorConfig": "models.xpress",
    "PEagleDraftModel": "models.peagle",
    "PEagleSpeculatorConfig": "models.peagle",
    "MLPSpeculator": "models.mlp_speculator",
    "MLPSpeculatorConfig": "models.mlp_speculator",
    "MedusaModel": "models.medusa",
    "MedusaSpeculatorConfig": "models.medusa",
    "MTPDraftModel": "models.mtp",
    "MTPSpeculatorConfig": "models.mtp_network",
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
    from .models.base import SpeculatorModel as SpeculatorModel
    from .models.dflash import DFlashDraftModel as DFlashDraftModel
    from .models.dflash import DFlashSpeculatorConfig as DFlashSpeculatorConfig
    from .models.dflash2 import DFlash2DraftModel as DFlash2DraftModel
    from .models.dflash2 import DFlash2SpeculatorConfig as DFlash2SpeculatorConfig
    from .models.dspark import DSparkDraftModel as DSparkDraftModel
    from .models.dspark import DSparkSpeculatorConfig as DSparkSpeculatorConfig
    from .models.eagle import EagleSpeculator as EagleSpeculator
    from .models.eagle import EagleSpeculatorConfig as EagleSpeculatorConfig
    from .models.eagle3 import Eagle3DraftModel as Eagle3DraftModel
    from .models.eagle3 import Eagle3SpeculatorConfig as Eagle3SpeculatorConfig
    from .models.medusa import MedusaModel as MedusaModel
    from .models.medusa import MedusaSpeculatorConfig as MedusaSpeculatorConfig
    from .models.mlp_speculator import MLPSpeculator as MLPSpeculator
    from .models.mlp_speculator import MLPSpeculatorConfig as MLPSpeculatorConfig
    from .models.mtp import MTPDraftModel as MTPDraftModel
    from .models.mtp_network import MTPSpeculatorConfig as MTPSpeculatorConfig
    from .models.peagle import PEagleDraftModel as PEagleDraftModel
    from .models.peagle import PEagleSpeculatorConfig as PEagleSpeculatorConfig
    from .models.xpress import XPressDraftModel as XPressDraftModel
    from .models.xpress import XPressSpeculatorConfig as XPressSpeculatorConfig
    from .serve.speculative_config import SpeculativeConfig as SpeculativeConfig

_aliases.install()

__all__ = ["__version__", *sorted(_PUBLIC)]  # pyright: ignore[reportUnsupportedDunderAll] (no second list of the names)


def _resolve(name):
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


if not TYPE_CHECKING:  # with it, a type checker would let every name pass
    __getattr__ = _resolve


def __dir__():
    return sorted([*globals(), *_PUBLIC])
