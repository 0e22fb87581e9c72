"Loading from a hub: `hub/cases.py`, run once in a process of its own with a hub on this machine."

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "hub/cases.py"
NAMES = [n.name for n in ast.parse(CASES.read_text()).body if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"]


@pytest.fixture(scope="module")
def outcome():
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rA",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            str(CASES),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_hub(outcome, name):
    assert re.search(rf"^PASSED \S+::{name}$", outcome, flags=re.M), outcome[-6000:]
