"""docs/statements.yml and the marks of the tests belong together: each statement that applies has a test."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("conformance", ROOT / "docs/conformance.py")
conformance = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conformance)


def test_every_statement_has_its_test():
    assert conformance.problems(conformance.statements(), conformance.holders()) == []


def test_the_check_can_fail():
    def of(name, status="held", reason=""):
        return conformance.Statement(name, "text", status, reason)

    pages = {"page": [of("a-1"), of("a-1"), of("a-2"), of("a-3", "in part", "later"), of("a-4", "does not apply")]}
    found = conformance.problems(pages, {"a-1": ["tests/test_x.py::test_x"], "b-9": ["tests/test_x.py::test_y"]})
    assert [problem.split(":")[0] for problem in found] == ["a-1", "b-9", "a-2", "a-3", "a-4"]
    source = "import pytest\n@pytest.mark.statement('a-1', 'a-2')\n@pytest.mark.slow\ndef test_x(): pass\n"
    assert list(conformance.marked(source)) == [("test_x", ["a-1", "a-2"])]


def test_the_page_has_every_line():
    page = conformance.page()
    every = [one for lines in conformance.statements().values() for one in lines]
    assert len(every) > 320 and all(f"| {one.id} | {one.text} |" in page for one in every)
    held = sum(one.status == "held" for one in every)
    assert f"{held} held by a test" in page


def test_the_site_makes_the_page():
    build = (ROOT / "docs/web/places.py").read_text()
    assert "conformance.page" in build and '"docs/conformance.md": "conformance.md"' in build
