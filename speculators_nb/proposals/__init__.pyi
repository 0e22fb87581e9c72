from ..core.proposals import *
