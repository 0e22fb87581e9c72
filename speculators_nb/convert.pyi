from .models.convert import *
from .train.upstream_functions import *
