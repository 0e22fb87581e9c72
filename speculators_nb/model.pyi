from .models.base import *
