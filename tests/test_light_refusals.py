"""What needs no model to be refused is refused before torch, transformers or datasets are imported, which takes ten
seconds of a processor."""

import json
import os
import subprocess
import sys

import pytest
from bad import commands
from bad.harness import ROOT, Case

# rows of tests/bad/commands.py that are refused by what a class, a config of transformers or a table says
READS = {
    "a verifier without heads",
    "a device that is not here",
    "convert a verifier",
    "stitch what is no MTP head",
}
LIGHT = {row[0] for row in commands.WRONG} - READS | {f"experiment: {row[0]}" for row in commands.EXPERIMENTS}
CASES = [case for case in commands.CASES if case.name in LIGHT]
CONTROL = Case("a heavy module", "check nope --import {here}/mine.py", "nope", {"mine.py": "import numpy"})
# each line in a process of its own, forked from one that has imported the program
PROBE = f"""
import json, os, sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests")!r})
from bad import commands, harness
import test_light_refusals as table
harness.program()
for case in [*table.CASES, table.CONTROL]:
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        harness.write_files(case, folder)
        sys.stdout.flush()
        if pid := os.fork():
            os.waitpid(pid, 0)
            continue
        os.chdir(folder)
        kind, text = harness._try(case, folder)
        heavy = [m for m in ("torch", "transformers", "datasets", "numpy", "pandas", "pyarrow") if m in sys.modules]
        print(json.dumps([case.name, kind, heavy, text]))
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.fixture(scope="module")
def answers():
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_refused_before_anything_heavy(case, answers):
    kind, heavy, text = answers[case.name]
    assert (kind, heavy) == ("refused", []), text


def test_most_refusals_are_light_and_the_probe_sees_a_heavy_one(answers):
    assert len(CASES) >= 50 and {row[0] for row in commands.WRONG} > READS
    assert answers[CONTROL.name][:2] == ["refused", ["numpy"]]
