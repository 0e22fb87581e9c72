"""What a type checker of a user sees: the marker, the public names, the documented paths."""

import sys

import pytest
import typecheck
from test_aliases import ROOT

from speculators_nb import _aliases

sys.path.insert(0, str(ROOT / "docs"))
import stubs

PACKAGE = ROOT / "speculators_nb"


def stub_of(path):
    file = PACKAGE / path.replace(".", "/")
    return file / "__init__.pyi" if file.is_dir() else file.with_suffix(".pyi")


def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_each_documented_path_has_a_stub_with_all_names_of_its_module():
    wanted = {path: module for path, module in _aliases.DOCUMENTED.items() if path not in typecheck.RUN_TIME_ONLY}
    assert {stub_of(path) for path in wanted} | {stubs.STUB} == set(PACKAGE.rglob("*.pyi"))
    for path, module in wanted.items():
        up = "." * (path.count(".") + (stub_of(path).name == "__init__.pyi") + 1)
        assert stub_of(path).read_text() == f"from {up}{module} import *\n"


def test_the_drafters_stub_is_what_their_notebooks_register():
    assert stubs.STUB.read_text() == stubs.stub(), "run `make export` and commit what it writes"


def test_a_users_code_is_checked_with_the_package(monkeypatch, tmp_path):
    "An import that is not found, and a wrong line that passes, are findings; all other lines are as they must be."
    right, wrong = typecheck.users_code()
    user = str(tmp_path.resolve() / "user.py")
    must = [(user, line, "reportGeneral", "") for line in range(len(right) + 1, len(right + wrong) + 1)]
    monkeypatch.setattr(typecheck, "check", lambda *paths: must)
    assert typecheck.package_and_user(tmp_path) == []
    monkeypatch.setattr(typecheck, "check", lambda *paths: [(user, 1, "reportMissing", "no module"), *must[1:]])
    assert [(line, rule) for _, line, rule, _ in typecheck.package_and_user(tmp_path)] == [
        (1, "reportMissing"),
        (len(right) + 1, "passed"),
    ]


def test_one_finding_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["typecheck.py", "speculators_nb/core"])
    monkeypatch.setattr(typecheck, "check", lambda *paths: [])
    typecheck.main()
    found = (str(PACKAGE / "core/files.py"), 3, "reportCallIssue", "text")
    monkeypatch.setattr(typecheck, "check", lambda *paths: [found])
    with pytest.raises(SystemExit, match="1 findings"):
        typecheck.main()
    assert capsys.readouterr().out == "speculators_nb/core/files.py:3: reportCallIssue: text\n"
