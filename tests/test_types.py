"""What a type checker of a user sees: the marker, the public names, the documented paths."""

import sys

import pytest
import typecheck
from test_aliases import DOCUMENTED, ROOT

import speculators_nb
from speculators_nb import _aliases

sys.path.insert(0, str(ROOT / "docs"))
import stubs

PACKAGE = ROOT / "speculators_nb"
# A module of today is a file, and no checker looks for a module below a file: these work at run time only.
RUN_TIME_ONLY = {path for path in _aliases.DOCUMENTED if path.startswith("models.")}


def stub_of(path):
    file = PACKAGE / path.replace(".", "/")
    return file / "__init__.pyi" if file.is_dir() else file.with_suffix(".pyi")


def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_each_documented_path_has_a_stub_with_all_names_of_its_module():
    wanted = {path: module for path, module in _aliases.DOCUMENTED.items() if path not in RUN_TIME_ONLY}
    assert {stub_of(path) for path in wanted} | {stubs.STUB} == set(PACKAGE.rglob("*.pyi"))
    for path, module in wanted.items():
        up = "." * (path.count(".") + (stub_of(path).name == "__init__.pyi") + 1)
        assert stub_of(path).read_text() == f"from {up}{module} import *\n"


def test_the_drafters_stub_is_what_their_notebooks_register():
    assert stubs.STUB.read_text() == stubs.stub(), "run `make export` and commit what it writes"


def test_a_user_s_imports_are_found_and_typed(tmp_path):
    """Every documented path but those that are below a file; and a wrong name is an error in each."""
    paths = [(path, name) for path, name in DOCUMENTED if path not in RUN_TIME_ONLY and path != "train.trainer"]
    paths += [("", name) for name in speculators_nb._public_names()]
    right = [f"from speculators_nb{'.' * bool(p)}{p} import {name} as x{i}" for i, (p, name) in enumerate(paths)]
    wrong = [f"from speculators_nb{'.' * bool(p)}{p} import Nothing as y{i}" for i, (p, _) in enumerate(paths)]
    shown = [f"a{i}: int = x{i}" for i in range(len(paths))]  # an Unknown would pass
    source = tmp_path / "user.py"
    source.write_text("\n".join(right + wrong + shown) + "\n")
    lines = {line: rule for _, line, rule, _ in typecheck.check(source)}
    n = len(paths)
    assert {right[line - 1] for line in lines if line <= n} == set()
    assert set(range(n + 1, 3 * n + 1)) - set(lines) == set(), "names without a type, or that every module has"


def test_one_finding_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["typecheck.py"])
    monkeypatch.setattr(typecheck, "check", lambda *paths: [])
    typecheck.main()
    found = (str(PACKAGE / "core/files.py"), 3, "reportCallIssue", "text")
    monkeypatch.setattr(typecheck, "check", lambda *paths: [found])
    with pytest.raises(SystemExit, match="1 findings"):
        typecheck.main()
    assert capsys.readouterr().out == "speculators_nb/core/files.py:3: reportCallIssue: text\n"
