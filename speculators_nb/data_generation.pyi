from .data.prepare import *
from .data.prepared_folder import *
