from ..eagle3 import *
