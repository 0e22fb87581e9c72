"""Everything that a user can get wrong is refused in one line that names the field, the value and the remedy, or
counted in a report: the tables of tests/bad."""

import importlib
import os
import re
from pathlib import Path

import pytest
from bad import commands, light
from bad.harness import Case, complaint, run, run_process

import speculators_nb.cli.data_commands
import speculators_nb.cli.demo
import speculators_nb.cli.drafter_commands  # noqa: F401  imported before the first fork, so that a case does not pay for it

os.environ["TOKENIZERS_PARALLELISM"] = "false"
MODULES = {
    p.stem: importlib.import_module(f"bad.{p.stem}") for p in sorted((Path(__file__).parent / "bad").glob("*.py"))
}
TABLES = {name: module.CASES for name, module in MODULES.items() if hasattr(module, "CASES")}
ALL = [(table, case) for table, cases in TABLES.items() for case in cases]
PROCESSES = commands.CASES[:: len(commands.CASES) // 3][:3]


def names(cases):
    return [f"{t}: {c.where}: {c.name}" for t, c in cases]


@pytest.fixture(scope="module")
def light_outcomes(request):
    "Of the command lines that are run today."
    given = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    return light.outcomes({case.name for case in [light.CONTROL, *given] if isinstance(case, Case)})


# what only a class, a config of transformers or a table can refuse; every other command line is refused before torch,
# transformers or datasets are imported, which takes ten seconds of a processor
HEAVY = {
    'train: extra lr_scheduler_kwargs={"a": 1}',
    'train: extra accelerator_config={"even_batch": 1}',
    "train: extra bf16_full_eval=True",
    "evaluate: a drafter of another method",
    "a verifier without heads",
    "a device that is not here",
    "convert a verifier",
    "stitch what is no MTP head",
}


def is_light(table, case):
    return table == "commands" and case.name not in HEAVY


# by day every light command line, and every twentieth of all others
DAILY = {i for i, of in enumerate(ALL) if is_light(*of) or i % 20 == 0}
EACH = enumerate(zip(ALL, names(ALL)))


@pytest.mark.parametrize(
    "table,case", [pytest.param(*a, id=b, marks=() if i in DAILY else pytest.mark.nightly) for i, (a, b) in EACH]
)
def test_bad(table, case, light_outcomes):
    outcome = light_outcomes[case.name] if is_light(table, case) else run(case)
    assert outcome, "it imports something heavy before it is refused"
    assert not (wrong := complaint(case, outcome)), wrong


def test_a_heavy_one_is_seen(light_outcomes):
    assert {case.name for case in commands.CASES} > HEAVY
    assert light_outcomes[light.CONTROL.name] is None


@pytest.mark.parametrize("case", PROCESSES, ids=[f"{c.where}: {c.name}" for c in PROCESSES])
def test_real_process(case):
    assert not (wrong := complaint(case, run_process(case))), wrong


def test_names_are_unique():
    assert len(set(names(ALL))) == len(ALL)


def test_each_case_expects_words_of_its_own():
    "What any answer would match holds nothing."
    said = (
        "",
        "Error: something went wrong; see the documentation",
        "ValueError: invalid value",
        "{'rows': 1, 'kept': 0}",
    )
    assert not [
        (t, c.name, c.expect) for t, c in ALL for text in said if re.search(c.expect, text, re.IGNORECASE | re.DOTALL)
    ]


def test_the_harness_sees_what_is_wrong(tmp_path):
    """A test of the test: what passes silently, a traceback, a line that says something else and too much memory are
    each noticed."""

    def memory(folder):
        return len(bytearray(4 << 30))

    def wrong(folder):
        raise ValueError("something else")

    def crash(folder):
        raise KeyError("x")

    for what in (lambda folder: "all well", crash, wrong, memory):
        case = Case("x", what, "a field")
        assert complaint(case, run(case))
