#!/usr/bin/env python
"""The type checker finds nothing in the package, and a user's checker finds every documented path, with types.
`make types` runs this.

    python tests/typecheck.py                          all of it, in one run of the checker
    python tests/typecheck.py speculators_nb/decode    only these paths

The checker is basedpyright in pyright's basic mode, set up in pyproject.toml.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from test_aliases import DOCUMENTED

import speculators_nb
from speculators_nb import _aliases

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


# A module of today is a file, and no checker looks for a module below a file: these work at run time only.
RUN_TIME_ONLY = {path for path in _aliases.DOCUMENTED if path.startswith("models.")}


def users_code():
    "(lines that are right, lines that are wrong): an import of every public name; a wrong name, a wrong type of each."
    paths = [(path, name) for path, name in DOCUMENTED if path not in RUN_TIME_ONLY and path != "train.trainer"]
    paths += [("", name) for name in speculators_nb._public_names()]
    modules = [(f"speculators_nb{'.' * bool(path)}{path}", name) for path, name in paths]
    right = [f"from {module} import {name} as x{i}" for i, (module, name) in enumerate(modules)]
    wrong = [f"from {module} import Nothing as y{i}" for i, (module, _) in enumerate(modules)]
    return right, wrong + [f"a{i}: int = x{i}" for i in range(len(paths))]  # an Unknown would pass


def package_and_user(folder):
    "What is to be mended, as `check` says it."
    right, wrong = users_code()
    user = Path(folder).resolve() / "user.py"
    user.write_text("\n".join(right + wrong) + "\n")
    found = check(ROOT / "speculators_nb", user)
    lines = {line for file, line, _, _ in found if Path(file) == user}
    passed = [i for i in range(len(right) + 1, len(right + wrong) + 1) if i not in lines]
    why = "has no type, or its module has any name"
    return [x for x in found if Path(x[0]) != user or x[1] <= len(right)] + [
        (str(user), i, "passed", f"{(right + wrong)[i - 1]}: {why}") for i in passed
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="*", help="a file or folder of the package")
    paths = parser.parse_args().path
    with tempfile.TemporaryDirectory() as folder:
        found = check(*paths) if paths else package_and_user(folder)
    for file, line, rule, text in found:
        print(f"{Path(file).relative_to(ROOT) if ROOT in Path(file).parents else file}:{line}: {rule}: {text}")
    if found:
        raise SystemExit(f"{len(found)} findings: mend each at its cause")


if __name__ == "__main__":
    main()
