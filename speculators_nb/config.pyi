from .core.config import *
