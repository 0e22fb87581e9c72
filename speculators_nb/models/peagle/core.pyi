from ..peagle import *
