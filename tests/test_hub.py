"Loading from a hub: the files of `hub/`, run once in a process of their own with a hub on this machine."

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [Path(__file__).parent / "hub" / name for name in ("cases.py", "protocol.py")]
NAMES = [
    n.name
    for file in CASES
    for n in ast.parse(file.read_text()).body
    if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"
]


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
            *map(str, CASES),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_hub(outcome, name):
    became = re.findall(rf"^(\w+) \S+::{name}(?:\[.*\])?(?: - .*)?$", outcome, flags=re.M)
    assert became and {*became} == {"PASSED"}, outcome[-6000:]
