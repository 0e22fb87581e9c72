"Which cases of a test CI runs; the others are the night's."

import pytest


def by_day(cases, chosen):
    "The cases as parameters; `nightly` marks those that are not chosen. A case of several arguments is a tuple."
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]), marks=() if case in chosen else pytest.mark.nightly
        )
        for case in cases
    ]
