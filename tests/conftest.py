"""What a test process has imported stays out of the garbage collector's sight: a million objects, among which every
training (accelerate collects when it begins) would look for garbage longer than for three small steps."""

import gc

gc.disable()  # until all is imported: there is no garbage yet


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
