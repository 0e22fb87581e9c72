#!/usr/bin/env python
"""The type checker finds nothing in the package. `make types` runs this.

    python tests/typecheck.py                          the package
    python tests/typecheck.py speculators_nb/decode    only these paths

The checker is basedpyright in pyright's basic mode, set up in pyproject.toml.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def check(*paths, root=ROOT):
    "What the checker finds in `paths` (none: as in pyproject.toml), as (file, line, rule, text)"
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(root), *map(str, paths)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: there are errors
        raise SystemExit(f"basedpyright failed:\n{done.stdout}{done.stderr}")
    return [
        (x["file"], x["range"]["start"]["line"] + 1, x.get("rule", "syntax"), x["message"])
        for x in json.loads(done.stdout)["generalDiagnostics"]
        if x["severity"] == "error"
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="*", help="a file or folder of the package")
    found = check(*parser.parse_args().path)
    for file, line, rule, text in found:
        print(f"{Path(file).relative_to(ROOT)}:{line}: {rule}: {text}")
    if found:
        raise SystemExit(f"{len(found)} findings: mend each at its cause")


if __name__ == "__main__":
    main()
