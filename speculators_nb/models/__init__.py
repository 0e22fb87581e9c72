from typing import TYPE_CHECKING

if TYPE_CHECKING:  # resolved on first use by ../_aliases.py
    from .base import SpeculatorModel as SpeculatorModel
    from .dflash import DFlashDraftModel as DFlashDraftModel
    from .dflash import DFlashSpeculatorConfig as DFlashSpeculatorConfig
    from .dflash2 import DFlash2DraftModel as DFlash2DraftModel
    from .dflash2 import DFlash2SpeculatorConfig as DFlash2SpeculatorConfig
    from .dspark import DSparkDraftModel as DSparkDraftModel
    from .dspark import DSparkSpeculatorConfig as DSparkSpeculatorConfig
    from .eagle import EagleSpeculator as EagleSpeculator
    from .eagle import EagleSpeculatorConfig as EagleSpeculatorConfig
    from .eagle3 import Eagle3DraftModel as Eagle3DraftModel
    from .eagle3 import Eagle3SpeculatorConfig as Eagle3SpeculatorConfig
    from .medusa import MedusaModel as MedusaModel
    from .medusa import MedusaSpeculatorConfig as MedusaSpeculatorConfig
    from .mlp_speculator import MLPSpeculator as MLPSpeculator
    from .mlp_speculator import MLPSpeculatorConfig as MLPSpeculatorConfig
    from .mtp import MTPDraftModel as MTPDraftModel
    from .mtp_network import MTPSpeculatorConfig as MTPSpeculatorConfig
    from .peagle import PEagleDraftModel as PEagleDraftModel
    from .peagle import PEagleSpeculatorConfig as PEagleSpeculatorConfig
    from .xpress import XPressDraftModel as XPressDraftModel
    from .xpress import XPressSpeculatorConfig as XPressSpeculatorConfig
