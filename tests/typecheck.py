#!/usr/bin/env python
"""What a type checker finds in the package, as a number that may only fall. `make types` runs this.

    python tests/typecheck.py            compare with tests/typecheck.json; more than it says is an error
    python tests/typecheck.py --record   write the number down, after it fell
    python tests/typecheck.py decode/tree  only list what is found in paths that contain this

The checker is basedpyright in pyright's basic mode, set up in pyproject.toml.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/typecheck.json"
PACKAGE = ROOT / "speculators_nb"


def check(*paths, root=ROOT):
    "The checker's report on `paths` (none: as in pyproject.toml): version, findings as (file, line, rule, text)"
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(root), *map(str, paths)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: there are errors
        raise SystemExit(f"basedpyright failed:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    found = [
        (x["file"], x["range"]["start"]["line"] + 1, x.get("rule", "syntax"), x["message"])
        for x in report["generalDiagnostics"]
        if x["severity"] == "error"
    ]
    return report["version"], found


def per_file(found, package=PACKAGE):
    "path below the package -> number of findings"
    return dict(sorted(Counter(Path(file).relative_to(package).as_posix() for file, *_ in found).items()))


def risen(files, recorded):
    "Paths with more findings than are recorded -> (recorded, now)"
    return {f: (recorded.get(f, 0), n) for f, n in files.items() if n > recorded.get(f, 0)}


def compare(files, version, record):
    "What to say, and whether it is an error"
    now, before = sum(files.values()), sum(record["files"].values())
    said = [f"{now} findings of basedpyright {version}, {before} are recorded in tests/typecheck.json"]
    if now > before:
        said += [f"  {f}: {b} -> {n}" for f, (b, n) in risen(files, record["files"]).items()]
        said += ["python tests/typecheck.py PATH lists them"]
        if version != record["version"]:
            said += [f"the record is of version {record['version']}: --record takes this one's number"]
    elif now < before:
        said += ["fewer: python tests/typecheck.py --record"]
    return "\n".join(said), now > before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="list what is found in paths that contain this")
    parser.add_argument("--record", action="store_true", help="write the number down")
    a = parser.parse_args()
    version, found = check()
    if a.path:
        for file, line, rule, text in found:
            if a.path in file:
                print(f"{Path(file).relative_to(ROOT)}:{line}: {rule}: {text}")
        return
    files = per_file(found)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"version": version, "files": files}
    said, worse = compare(files, version, record)
    if a.record and not (worse and version == record["version"]):
        RECORD.write_text(json.dumps({"version": version, "files": files}, indent=1) + "\n")
        print(f"recorded {sum(files.values())} findings of basedpyright {version}")
        return
    print(said)
    if worse:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
