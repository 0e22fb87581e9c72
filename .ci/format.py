#!/usr/bin/env python
"""`ruff format` for the files of a commit (pre-commit gives their names).

A new file is formatted, and a file that was formatted before stays so. Older files wait until somebody formats
them on purpose: a commit should show what was changed in it.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUFF = Path(sys.executable).with_name("ruff")


def before(path):
    "The file as the last commit has it, or None where it has none"
    shown = subprocess.run(["git", "show", f"HEAD:./{path}"], cwd=ROOT, capture_output=True)
    return shown.stdout if shown.returncode == 0 else None


def was_formatted(path):
    text = before(path)
    if text is None:
        return True
    check = [RUFF, "format", "--check", "--quiet", "--stdin-filename", path, "-"]
    return subprocess.run(check, cwd=ROOT, input=text, capture_output=True).returncode == 0


def main(paths):
    chosen = [path for path in paths if was_formatted(path)]
    return subprocess.run([RUFF, "format", "--quiet", "--force-exclude", *chosen], cwd=ROOT).returncode if chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
