"Which of our functions run: how much of the project a reader walks through to follow something."

import sys
from pathlib import Path

import speculators_nb

OURS = str(Path(speculators_nb.__file__).parent)  # a clone may have the package's name, too


def calls_of(function):
    "(file, function, depth) of each call of ours while `function()` runs."
    calls = []

    def note(frame, event, _):
        code, depth = frame.f_code, 0
        if event != "call" or not code.co_filename.startswith(OURS) or code.co_name.startswith("<"):
            return
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(OURS)
            frame = frame.f_back
        calls.append((code.co_filename.removeprefix(OURS), code.co_qualname, depth))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
