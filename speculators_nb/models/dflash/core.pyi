from ..dflash import *
