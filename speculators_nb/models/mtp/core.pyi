from ..mtp import *
