"The page of each command: made from the command, complete, and with an example that the command takes."

import importlib.util
import shlex
from pathlib import Path

import pytest
import typer

from speculators_nb.cli.command import GROUP_OF
from speculators_nb.cli.main import app
from speculators_nb.cli.recipe import resolve
from speculators_nb.core.options import check_options

ROOT = Path(__file__).parents[1]
COMMANDS = typer.main.get_command(app).commands


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("command_pages", ROOT / "docs/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_has_a_page(made):
    pages = made.pages()
    assert set(pages) == {f"commands/{name}.md" for name in app.functions} and len(pages) > 12
    for name, text in zip(app.functions, pages.values()):
        assert text.startswith(f"# speculators-nb {name}\n") and text.count("\n# ") == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_what_help_has(made, name):
    "Every argument, option, comment, default and heading; and nothing that the command does not take."
    text, command = made.page(name), COMMANDS[name]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| `")]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    assert sorted(row for row in rows if row.startswith("`--")) == sorted(map(made.spelt, options))
    assert {p.metavar for p in command.params if p.param_type_name == "argument" and p.metavar} == {
        row.strip("`") for row in rows if not row.startswith("`--")
    }
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings)) and {o.rich_help_panel or "Options" for o in options} <= set(headings)
    comments = {made.cell(p.help) for p in options}
    assert all(comment and comment in text for comment in comments)
    for linked in made.readings(name):
        assert f"](../../{linked})" in text and (ROOT / linked).is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_is_a_valid_line(made, name):
    "It parses, and the rules take every value."
    words = made.example(name)
    assert words[:2] == ["speculators-nb", name] and shlex.join(words) in made.page(name)
    context = COMMANDS[name].make_context(name, words[2:])
    given = {n: v for n, v in context.params.items() if context.get_parameter_source(n).name == "COMMANDLINE"}
    check_options(resolve(app.functions[name], given, None), name)


def test_no_name_of_a_group_is_stale():
    visible = {
        (name, p.name)
        for name, command in COMMANDS.items()
        for p in command.params
        if p.param_type_name == "option" and not p.hidden and p.name != "help"
    }
    known = {o for _, o in visible} | {f"{n}.{o}" for n, o in visible}
    assert not GROUP_OF.keys() - known


@pytest.mark.parametrize("name", app.verdicts)
def test_a_verdict_is_on_its_page(made, name):
    assert app.verdicts[name] in made.page(name)
