#!/usr/bin/env python
"""The versions that `make` installs: constraints.txt, with other versions where PINS asks for them.

    python .ci/pins.py                                                       constraints.txt as it is
    python .ci/pins.py "transformers==5.16.0" "huggingface_hub==1.33.0"      with these two instead
    python .ci/pins.py --newest                                              the names of all requirements, no bounds
    python .ci/pins.py --raise transformers==5.25.0                         a new upper bound in every file that has it

Runs before anything is installed, so it imports the standard library alone.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


# file -> what stands before the newest transformers; "<": its next minor version is meant, "to": its minor version
BOUNDS = {
    "pyproject.toml": r"transformers>=[\d.]+,<",
    "settings.ini": r"transformers>=[\d.]+,<",
    ".github/workflows/ci.yml": r"versions: newest\n.*\n +pins: transformers==",
    "docs/installation.md": r"transformers [\d.]+ to ",
    "benchmarks/gpu/README.md": r"transformers [\d.]+ to ",
}


def name_of(requirement):
    "`Jinja2>=3` -> jinja2"
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def constraints(text, pins=()):
    "The lines of constraints.txt; those of packages that `pins` names are replaced by the pins."
    for pin in pins:
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s*]+", pin):
            raise SystemExit(f"PINS: {pin!r} is no pin: write name==version, words apart by spaces")
        if name_of(pin) == "torch":
            raise SystemExit("PINS: torch is chosen by TORCH, for example TORCH='torch==2.10.0'")
    others = {name_of(pin) for pin in pins}
    lines = [line for line in text.splitlines() if line and line[0] != "#" and name_of(line) not in others]
    return [*lines, *pins]


def requirements(project):
    "The names of what the library, its tests and its docs ask for, without torch"
    extras = project["optional-dependencies"]
    names = {name_of(r) for r in [*project["dependencies"], *extras["dev"], *extras["docs"]]}
    return sorted(names - {"torch"})


def raised(newest):
    "Every file of BOUNDS as it is when this is the newest transformers that is let in"
    if not re.fullmatch(r"\d+\.\d+\.\d+", newest):
        raise SystemExit(f"--raise: {newest!r} is no release: write transformers==5.25.0")
    major, minor, _ = newest.split(".")
    texts = {}
    for file, before in BOUNDS.items():
        said = {"<": f"{major}.{int(minor) + 1}", " ": f"{major}.{minor}", "=": newest}[before[-1]]
        texts[file], found = re.subn(f"({before})[\\d.]*\\d", rf"\g<1>{said}", (ROOT / file).read_text())
        if found != 1:
            raise SystemExit(f"--raise: {file} has {found} places like {before!r}; there must be one")
    return texts


def main(arguments):
    if arguments == ["--newest"]:
        print(*requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]))
    elif arguments[:1] == ["--raise"]:
        for file, text in raised(arguments[-1].removeprefix("transformers==")).items():
            (ROOT / file).write_text(text)
    else:
        print(*constraints((ROOT / "constraints.txt").read_text(), arguments), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
