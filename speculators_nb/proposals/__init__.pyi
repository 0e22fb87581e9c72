from ..core.registry import *
