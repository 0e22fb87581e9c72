"""Refusals that need neither torch nor its like: command lines of commands.py, each in a process that is forked
from one without them. `python -m bad.light`, from tests/, reads their names and prints the outcome of each."""

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


def outcomes(names) -> dict[str, Outcome | None]:
    "What became of these cases of commands.py; None: it imports something heavy."
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    command = [sys.executable, "-m", "bad.light"]
    done = subprocess.run(command, input=json.dumps([*names]), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {name: Outcome(*rest) for name, *rest in map(json.loads, done.stdout.splitlines())}
    return {name: None if out[:2] == ("killed", "no report") else out for name, out in found.items()}


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    typed(["check", ""])  # imports what is light, once for all
    for case in (*commands.CASES, CONTROL):
        if case.name in wanted:
            print(json.dumps([case.name, *run(case, first=lambda: sys.meta_path.insert(0, Ends))]), flush=True)
