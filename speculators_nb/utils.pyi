from .core.checkpoints import *
from .core.files import *
from .core.registry import *
