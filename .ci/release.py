#!/usr/bin/env python
"""Build the wheel of this tree and check it, as docs/release.md says.

    python .ci/release.py build                    dist/speculators_nb-<version>-py3-none-any.whl
    python .ci/release.py check --tag v0.2.0       versions, changelog, content, installation

`make wheel` and `make release-check` call it.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from configparser import ConfigParser
from email.parser import HeaderParser
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
RELEASE = r"^## (\d+\.\d+\.\d+)(?: - (\d{4}-\d\d-\d\d))?$"


def versions(root=ROOT):
    "Where a version is written -> that version"
    ini = ConfigParser()
    ini.read(root / "settings.ini")
    init = re.search(r'^__version__ = "(.*)"', (root / "speculators_nb/__init__.py").read_text(), flags=re.M)
    newest = re.search(RELEASE, (root / "CHANGELOG.md").read_text(), flags=re.M)
    return {
        "settings.ini": ini["DEFAULT"]["version"],
        "speculators_nb/__init__.py": init and init[1],
        "CHANGELOG.md": newest and newest[1],
        "CITATION.cff": yaml.safe_load((root / "CITATION.cff").read_text())["version"],
    }


def unreleased(changelog):
    "What stands under Unreleased, headings left out"
    part = re.search(r"^## Unreleased$(.*?)(?=^## |\Z)", changelog, flags=re.M | re.S)
    return [line for line in (part[1] if part else "").splitlines() if line.strip() and not line.startswith("#")]


def faults_of_versions(found, tag, changelog, released):
    "What the versions, the changelog and the tag disagree about; `released`: the date in CITATION.cff"
    version = found["settings.ini"]
    yield from (f"{where} says {other}, settings.ini {version}" for where, other in found.items() if other != version)
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"the tag is {tag}, the version {version}"
    if unreleased(changelog):
        yield "CHANGELOG.md: there is something under Unreleased; it belongs to this release"
    date = next((d for v, d in re.findall(RELEASE, changelog, flags=re.M) if v == version), None)
    if not date:
        yield f"CHANGELOG.md: {version} has no date"
    if date != str(released):
        yield f"CITATION.cff says date-released {released}, CHANGELOG.md {date or 'none'}"


def build():
    "The wheel, from a copy, with the time of the last commit: the same commit gives the same bytes"
    shutil.rmtree(DIST, ignore_errors=True)
    when = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as tmp:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp)
        shutil.copytree(ROOT / "speculators_nb", f"{tmp}/speculators_nb", ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", DIST, tmp]
        subprocess.run(command, check=True, env=os.environ | {"SOURCE_DATE_EPOCH": when or "315532800"})
    return next(DIST.glob("*.whl"))


def faults_of_content(inside, metadata, modules, version):
    "What is wrong with the wheel: the files in it, its METADATA"
    package = {name for name in inside if ".dist-info/" not in name}
    yield from (f"the wheel lacks {name}" for name in sorted(modules - package))
    yield from (f"the wheel has {name}, which is no part of the package" for name in sorted(package - modules))
    said = HeaderParser().parsestr(metadata)
    if said["Version"] != version:
        yield f"the wheel says version {said['Version']}, settings.ini {version}"
    if said["License-Expression"] != "Apache-2.0" or not any(name.endswith("/licenses/LICENSE") for name in inside):
        yield "the wheel lacks its licence"
    if not said.get_payload().strip():
        yield "the wheel has no README"


def faults_of_installation(wheel, version):
    "What is wrong where the wheel alone is installed: the import, the version, the command"
    with tempfile.TemporaryDirectory() as tmp:
        site, env = Path(tmp) / "site", os.environ | {"PYTHONPATH": f"{tmp}/site", "HF_HUB_OFFLINE": "1"}
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site]
        subprocess.run([*pip, wheel], check=True)
        code = "import speculators_nb as s; print(s.__file__, s.__version__); [getattr(s, n) for n in s.__all__]"
        for command in ([sys.executable, "-c", code], [sys.executable, site / "bin/speculators-nb", "--help"]):
            done = subprocess.run(command, cwd=tmp, env=env, capture_output=True, text=True)
            if done.returncode:
                yield f"installed, {' '.join(map(str, command[1:]))} fails:\n{done.stderr.strip()[-1000:]}"
            elif command[1] == "-c" and done.stdout.split() != [str(site / "speculators_nb/__init__.py"), version]:
                yield f"installed, the package is {done.stdout.strip()}"


def check(tag=None):
    wheels = list(DIST.glob("*.whl"))
    if len(wheels) != 1:
        return [f"dist/ holds {len(wheels)} wheels: `make wheel` makes one"]
    wheel, found, status = wheels[0], versions(), ["git", "status", "--porcelain"]
    released = yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"]
    faults = list(faults_of_versions(found, tag, (ROOT / "CHANGELOG.md").read_text(), released))
    if tag and (changes := subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout):
        faults.append(f"not committed:\n{changes.rstrip()}")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = archive.read(next(name for name in inside if name.endswith(".dist-info/METADATA"))).decode()
    kept = (p for p in (ROOT / "speculators_nb").rglob("*") if p.suffix in (".py", ".pyi") or p.name == "py.typed")
    modules = {str(p.relative_to(ROOT)) for p in kept}
    faults += faults_of_content(inside, metadata, modules, found["settings.ini"])
    return faults + list(faults_of_installation(wheel, found["settings.ini"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["build", "check"])
    parser.add_argument("--tag", help="the tag of the release, v and the version")
    args = parser.parse_args()
    if args.what == "build":
        wheel = build()
        print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.relative_to(ROOT)}")
        return 0
    faults = check(args.tag)
    print(*(faults or [f"{next(DIST.glob('*.whl')).name}: all as docs/release.md says"]), sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
