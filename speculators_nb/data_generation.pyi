from .data.prepare import *
