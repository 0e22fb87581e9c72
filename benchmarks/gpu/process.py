"""A process that does cells of the benchmark and answers in lines of JSON (pool.py says which).

python -m benchmarks.gpu.process CELLS_JSON

A cell's kind is the module here that has run(cell, turn), which yields its rows.
"""

import json
import os
import sys
from contextlib import contextmanager
from importlib import import_module


class Line:
    """The way to the pool. Whatever else is printed goes to the log."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **what):
        print(json.dumps(what), file=self.out, flush=True)

    @contextmanager
    def turn(self):
        """The device for this process alone."""
        self.say(turn="ask")
        if not sys.stdin.readline():
            raise SystemExit("the pool is gone")
        yield
        self.say(turn="done")


def first_line(error):
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def failure(error):
    """The row of an exception. `memory`: the device's was too small."""
    import torch

    memory = isinstance(error, torch.OutOfMemoryError)
    return {"error": first_line(error), **({"kind": "memory"} if memory else {})}


def device_is_broken():
    """After an illegal access or a failed assertion on the device, no later call in this process succeeds."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main():
    line = Line()
    for cell in json.loads(sys.argv[1]):
        line.say(began=cell["name"])
        try:
            for row in import_module(f"benchmarks.gpu.{cell['kind']}").run(cell, line.turn):
                line.say(row=row)
        except Exception as error:
            import traceback

            traceback.print_exc()
            line.say(row={**cell.get("labels", {}), **failure(error)})
        line.say(ended=cell["name"])
        if device_is_broken():
            os._exit(0)  # the pool starts another process for the cells that are left


if __name__ == "__main__":
    main()
