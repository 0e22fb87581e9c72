#!/usr/bin/env python
"""Write speculators_nb/models/__init__.pyi: what a type checker sees of the names that are resolved on first use."""

from web.places import ROOT

from speculators_nb.core.options import shipped_drafters

STUB = ROOT / "speculators_nb/models/__init__.pyi"


def stub():
    "The model and the config of every drafter, as its notebook registers them."
    places = {"SpeculatorModel": "models.base"}
    for classes in shipped_drafters().values():
        places |= classes
    lines = {f"from .{place.removeprefix('models.')} import {name} as {name}\n" for name, place in places.items()}
    return "".join(sorted(lines))


if __name__ == "__main__":
    STUB.write_text(stub())
