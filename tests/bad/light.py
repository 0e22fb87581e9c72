"""Refusals that need neither torch nor its like: the command lines of commands.py, each in a process that is forked
from one without them. `python -m bad.light`, from tests/, prints the outcome of each."""

import functools
import json
import os
import subprocess
import sys

from . import commands
from .harness import ROOT, Case, Outcome, run, typed

HEAVY = ("torch", "transformers", "datasets", "numpy", "pandas", "pyarrow")
CONTROL = Case("a heavy module", "check nope --import {here}/mine.py", "nope", {"mine.py": "import numpy"})


class Ends:
    "In `sys.meta_path`: the import of a heavy module ends the process."

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in HEAVY:
            os._exit(0)


@functools.cache
def answers() -> dict[str, Outcome]:
    "The outcomes of all cases, by name."
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    done = subprocess.run([sys.executable, "-m", "bad.light"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Outcome(*rest) for name, *rest in map(json.loads, done.stdout.splitlines())}


def outcome(case: Case) -> Outcome | None:
    "What became of a case of commands.py; None: it imports something heavy."
    found = answers()[case.name]
    return None if found[:2] == ("killed", "no report") else found


if __name__ == "__main__":
    typed(["check", ""])  # imports what is light, once for all
    for case in (*commands.CASES, CONTROL):
        print(json.dumps([case.name, *run(case, first=lambda: sys.meta_path.insert(0, Ends))]), flush=True)
