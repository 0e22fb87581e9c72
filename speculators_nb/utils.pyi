from .core.registry import *
