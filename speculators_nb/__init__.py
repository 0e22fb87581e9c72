"""A notebook-centric research workbench for speculative decoding.

The package is exported from the notebooks in `nbs/`. Importing it costs nothing: public names are resolved on first use.
"""
__version__ = "0.2.0"

from importlib import import_module

from speculators_nb import _aliases

# public name -> the module that defines it (the names that a user of the upstream library expects at the top level)
_PUBLIC = {
    "SpeculatorModelConfig": "core.config", "SpeculatorsConfig": "core.config", "VerifierConfig": "core.config", "reload_schemas": "core.config",
    "TokenProposalConfig": "core.proposals", "GreedyTokenProposalConfig": "core.proposals", "SamplingTokenProposalConfig": "core.proposals",
    "StaticTreeTokenProposalConfig": "core.proposals", "DynamicTreeTokenProposalConfig": "core.proposals",
    "SpeculatorModel": "models.base", "SpeculativeConfig": "serve.speculative_config",
    "EagleSpeculator": "models.eagle", "EagleSpeculatorConfig": "models.eagle",
    "Eagle3DraftModel": "models.eagle3", "Eagle3SpeculatorConfig": "models.eagle3",
    "DFlashDraftModel": "models.dflash", "DFlashSpeculatorConfig": "models.dflash",
    "DSparkDraftModel": "models.dspark", "DSparkSpeculatorConfig": "models.dspark",
    "PEagleDraftModel": "models.peagle", "PEagleSpeculatorConfig": "models.peagle",
    "MLPSpeculator": "models.mlp_speculator", "MLPSpeculatorConfig": "models.mlp_speculator",
    "MedusaModel": "models.medusa", "MedusaSpeculatorConfig": "models.medusa",
    "MTPDraftModel": "models.mtp", "MTPSpeculatorConfig": "models.mtp",
}

_aliases.install()

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name):
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__():
    return sorted([*globals(), *_PUBLIC])
