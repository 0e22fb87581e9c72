"""One project, two configurations: pyproject.toml (pip, nbdev 3) and settings.ini (nbdev 2.4) must say the same."""

import ast
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import speculators_nb

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, NBDEV = PYPROJECT["project"], PYPROJECT["tool"]["nbdev"]
ini = ConfigParser()
ini.read(ROOT / "settings.ini")
INI = ini["DEFAULT"]


@pytest.mark.parametrize("key", ["lib_path", "nbs_path", "doc_path", "branch", "git_url", "title", "tst_flags"])
def test_nbdev_keys_agree(key):
    assert INI[key] == NBDEV[key]


@pytest.mark.parametrize("key", ["recursive", "custom_sidebar", "jupyter_hooks"])
def test_nbdev_switches_agree(key):
    assert INI.getboolean(key) == NBDEV[key]


def test_project_agrees():
    assert INI["lib_name"] == PROJECT["name"] == speculators_nb.__name__
    assert INI["description"] == PROJECT["description"]
    assert INI["keywords"].split() == PROJECT["keywords"]
    assert f">={INI['min_python']}" == PROJECT["requires-python"]
    author = {"name": INI["author"]} | ({"email": INI["author_email"]} if INI["author_email"] else {})
    assert [author] == PROJECT["authors"]
    assert INI["version"] == speculators_nb.__version__


def test_the_address_is_in_three_files_and_the_same():
    """settings.ini, pyproject.toml and nbs/nbdev.yml; the rest of the repository does not spell it, and no address of a
    stranger stands in for it."""
    url = INI["git_url"]
    assert NBDEV["git_url"] == PROJECT.get("urls", {}).get("Repository", "") == url
    assert re.findall(r"repo-url: *[\"']?([^\"'\s]*)", (ROOT / "nbs/nbdev.yml").read_text()) == [url]
    holds = {"settings.ini", "pyproject.toml", "nbs/nbdev.yml", "speculators_nb/_modidx.py"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = [re.escape(url)] if url else [r"github\.com[/:][\w-]*/speculators[_-]nb", r"users\.noreply"]
    for name in set(tracked) - holds - {"tests/test_settings.py"}:
        if (ROOT / name).suffix in (
            ".py",
            ".md",
            ".ipynb",
            ".toml",
            ".ini",
            ".yml",
            ".yaml",
            ".json",
            ".txt",
            ".cfg",
            "",
        ):
            text = (ROOT / name).read_text(errors="replace") if (ROOT / name).is_file() else ""
            assert not re.search("|".join(words), text), name


def test_requirements_agree():
    assert INI["requirements"].split() == PROJECT["dependencies"]
    assert INI["dev_requirements"].split() == PROJECT["optional-dependencies"]["dev"]


def test_exports_stay_byte_identical():
    """What nbdev 2 and 3 would otherwise write differently into the package."""
    assert "Documentation" not in PROJECT.get("urls", {}), "nbdev 3 would add a Docs: line to every module docstring"
    assert INI["doc_host"] == "" and INI["doc_baseurl"] == "/" and not INI.getboolean("update_pyproject")
    assert PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["speculators_nb*"], (
        "subpackages must be in the wheel"
    )


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        r.name.lower().replace("_", "-"): r for r in (Requirement(line) for line in lines if line and line[0] != "#")
    }


def test_constraints_satisfy_the_requirements():
    """Every pin lies within the declared bounds; torch is chosen by the Makefile's knob alone."""
    found = pins()
    assert "torch" not in found
    assert [name for name, r in found.items() if not re.fullmatch(r"==[^+]+", str(r.specifier))] == [], (
        "pins are ==, no local versions"
    )
    wanted = [
        Requirement(r)
        for r in PROJECT["dependencies"] + sum((PROJECT["optional-dependencies"][x] for x in ("dev", "docs")), [])
    ]
    for r in wanted:
        if r.name != "torch":
            pin = found[r.name.lower().replace("_", "-")].specifier
            assert r.specifier.contains(str(pin)[2:]), f"{r} against {pin}"


def test_fastcore_bound_suits_both_nbdevs():
    """nbdev 2.4.14 runs with fastcore 1.14 (< 2) only, nbdev 3 with 2.x: the bound must let both in."""
    bound = next(Requirement(r) for r in PROJECT["dependencies"] if r.startswith("fastcore")).specifier
    assert "1.14.5" in bound and str(pins()["fastcore"].specifier)[2:] in bound


def test_makefile_default_torch_is_supported():
    default = re.search(r"torch==([\d.]+)\)", (ROOT / "Makefile").read_text())[1]
    bound = next(Requirement(r) for r in PROJECT["dependencies"] if r.startswith("torch")).specifier
    assert Version(default) in SpecifierSet(str(bound))


OPTIONAL = {
    Requirement(r).name.replace("-", "_")
    for extra in ("vllm", "loggers", "ray", "mooncake")
    for r in PROJECT["optional-dependencies"][extra]
}
COMES_WITH = {
    "pydantic_core": "pydantic",
    "mooncake": "mooncake_transfer_engine",
    "IPython": "ipywidgets",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "pyarrow": "datasets",
    "ipykernel": "jupyterlab",
    "nbformat": "nbclient",
    "jupyter_client": "nbclient",
    "traitlets": "anywidget",
}


def third_party(path):
    "Top-level names of everything that `path` imports and that is neither ours nor the standard library's."
    tree = ast.parse(path.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
    return {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"speculators_nb", "benchmarks"}


@pytest.mark.parametrize(
    "files,extras", [("speculators_nb/**/*.py", []), ("tests/*.py", ["dev", "docs"]), ("docs/*.py", ["dev", "docs"])]
)
def test_imports_are_declared(files, extras):
    """What the code imports is what pyproject.toml asks for."""
    declared = PROJECT["dependencies"] + sum((PROJECT["optional-dependencies"][x] for x in extras), [])
    declared = {Requirement(r).name.replace("-", "_") for r in declared} | OPTIONAL
    files = list(ROOT.glob(files))
    beside = [found for where in ("docs/*.py", "tests/*/*.py", "data/make/*.py") for found in ROOT.glob(where)]
    local = {p.stem for p in [*files, *beside]} | {
        p.name for folder in ("tests", "docs") for p in (ROOT / folder).iterdir() if p.is_dir()
    }
    unknown = {COMES_WITH.get(name, name): path.name for path in files for name in third_party(path) - local}
    assert files and {name: path for name, path in unknown.items() if name not in declared} == {}
