from .models.convert import *
