#!/usr/bin/env python
"""The conformance page: what the documentation says (statements.yml), and the tests that hold it. Tests name the
statements with `@pytest.mark.statement(id, ...)`, and are read by `ast`; nothing is run."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
NOT_HELD = ("in part", "does not apply")  # beside them stands the reason
HEAD = """# What the documentation says, and the tests that hold it

The public documentation of `speculators` (0.1 to 0.5) and of vLLM's `SpeculativeConfig`, statement by statement, in our
words. Each line names the tests that fail where it is no longer so. This page is made from the tests' marks:
a statement without a test fails the build.

{counts}
"""


class Statement(NamedTuple):
    id: str
    text: str
    status: str  # "held", or one of NOT_HELD
    reason: str  # empty where it is held


@cache
def statements():
    "page -> its statements"
    return {
        part["page"]: [statement(entry) for entry in part["statements"]]
        for part in yaml.safe_load((ROOT / "docs/statements.yml").read_text())
    }


def statement(entry):
    name, text = next(iter(entry.items()))
    for status in NOT_HELD:
        if status in entry:
            return Statement(name, text, status, entry[status])
    return Statement(name, text, "held", "")


def marked(source):
    "(test, ids that its marks name) of a test file's source"
    for node in ast.parse(source).body:
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.statement":
                yield node.name, [ast.literal_eval(arg) for arg in mark.args]


@cache
def holders():
    "statement -> [file::test]"
    found = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for test, ids in marked(file.read_text()):
            for name in ids:
                found[name].append(f"{file.relative_to(ROOT)}::{test}")
    return found


def problems(pages, tests):
    "What is wrong with them, in sentences."
    every = [one for page in pages.values() for one in page]
    known = [one.id for one in every]
    found = [f"{name}: stands twice in statements.yml" for name in sorted({n for n in known if known.count(n) > 1})]
    found += [
        f"{name}: is in no line of statements.yml, see {tests[name][0]}" for name in sorted(set(tests) - set(known))
    ]
    for one in every:
        if one.status == "held" and one.id not in tests:
            found.append(f"{one.id}: no test holds it; mark one, or write in statements.yml why there is none")
        if one.status != "held" and len(one.reason.split()) < 3:
            found.append(f"{one.id}: is {one.status!r} without a reason")
    return found


def links(tests):
    "The tests of a line, without their folder."
    return ", ".join(f"`{test.removeprefix('tests/')}`" for test in tests)


def row(one, tests):
    cell = links(tests) if one.status == "held" else f"*{one.status}*: {one.reason} {links(tests)}".rstrip()
    return f"| {one.id} | {one.text} | {cell} |"


def page():
    "The page as Markdown."
    pages, tests = statements(), holders()
    every = [one for lines in pages.values() for one in lines]
    number = {status: sum(one.status == status for one in every) for status in ("held", *NOT_HELD)}
    counts = (
        f"{len(every)} statements: {number['held']} held by a test, {number['in part']} in part, "
        f"{number['does not apply']} do not apply."
    )
    parts = [HEAD.format(counts=counts)]
    for title, lines in pages.items():
        rows = [row(one, tests.get(one.id, [])) for one in lines]
        parts.append("\n".join([f"## {title}\n", "| | statement | held by |", "| --- | --- | --- |", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(page())
