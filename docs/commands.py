#!/usr/bin/env python
"""A page for each command, made from what `--help` is made from: signature, comments, groups and rules of its options.
`python docs/commands.py train` prints one.

No line here names a command: one that is entered in `speculators_nb.cli.main` has a page."""

import inspect
import re
import shlex
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import typer

from speculators_nb.cli.command import drafter_options, takes_training_arguments
from speculators_nb.cli.main import app
from speculators_nb.cli.recipe import recipe_path
from speculators_nb.core.options import check_options, range_of, rule_of, shipped_drafters

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = app.info.name
STATUSES = {  # exit status -> what has happened
    0: "It is done.",
    1: "A fault of speculators-nb, in one line; `--traceback` before the command shows where.",
    2: "A mistake in the line, in a recipe or in the data, or a machine that cannot: one line names it and the remedy.",
    130: "Ctrl-C; what was finished is kept.",
}
NOTEBOOK = re.compile(r"File to edit: \.\./\.\./(nbs/\S+\.ipynb)")
READINGS = ("nbs/tutorials/*.ipynb", "docs/*.md")  # what may show a command at work
UNBOUNDED = 2**31  # a limit from here on is none to a reader


@cache
def entered():
    "name -> the command, in the order of `--help`"
    return typer.main.get_command(app).commands


def visible(command, kind):
    "Arguments or options as a reader sees them."
    return [p for p in command.params if p.param_type_name == kind and not p.hidden and p.name != "help"]


def spelt(option):
    "`--dedup`, `--no-dedup`"
    return ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))


def cell(text):
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head, rows):
    "Markdown."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


# ---- values


def kind_of(rule):
    "What a rule allows, in words."
    if rule.kind == "list":
        return f"{kind_of(rule.of)}; may be repeated"
    if rule.kind == "word":
        words = rule.words() if callable(rule.words) else rule.words
        return ", ".join(f"`{word}`" for word in words)
    if rule.high and rule.high >= UNBOUNDED:
        rule = replace(rule, high=None)
    limits = re.sub(r"\d{5,}", lambda m: f"{int(m[0]):,}", range_of(rule))
    names = {
        "whole": "whole number",
        "number": "number",
        "switch": "",
        "mapping": "JSON",
        "path": "path",
        "text": "text",
    }
    return ", ".join(filter(None, (names.get(rule.kind, rule.kind), limits)))


def values(parameter, name):
    "What an option may be."
    if getattr(parameter, "is_flag", False):
        return ""
    rule = rule_of(parameter.name, name)
    return kind_of(rule) if rule else (parameter.metavar or parameter.type.name).lower()


def default(parameter):
    if parameter.default is None or parameter.default == []:
        return ""
    return f"`{str(parameter.default).lower() if isinstance(parameter.default, bool) else parameter.default}`"


# ---- an example


def words_of(name, field):
    "An example of a value, as words of a shell."
    example = rule_of(field, name).example
    return shlex.split(example) if isinstance(example, str) else [str(example)]


def example(name):
    "A line that the command takes: what it needs, and the verifier where it refuses to start without."
    command, function = entered()[name], app.functions[name]
    places = [p.name for p in visible(command, "argument")]
    needed = {p: words_of(name, p) for p in places}
    options = {p: words_of(name, p) for p in command.needed if p not in places}
    if not places and "output_dir" in inspect.signature(function).parameters:
        options["output_dir"] = words_of(name, "output_dir")
    if not accepts(name, needed | options):
        options["verifier"] = words_of(name, "verifier")
    flags = [word for option, words in options.items() for word in (f"--{option.replace('_', '-')}", *words)]
    return [PROGRAM, name, *(word for words in needed.values() for word in words), *flags]


def accepts(name, given):
    "Whether the rules take these values, and defaults for the rest."
    defaults = {p.name: p.default for p in inspect.signature(app.functions[name]).parameters.values()}
    values = {n: None if value is inspect.Parameter.empty else value for n, value in defaults.items()}
    rules = {n: rule_of(n, name) for n in given}
    read = {n: words if rules[n].kind == "list" else rules[n].example for n, words in given.items()}
    try:
        check_options(values | read, name)
    except ValueError:
        return False
    return True


# ---- the page


def source_of(function):
    "The notebook that defines a command, or its module, where that is written by hand."
    file = ROOT / f"{function.__module__.replace('.', '/')}.py"
    notebook = NOTEBOOK.search(file.read_text())
    return notebook[1] if notebook else str(file.relative_to(ROOT))


def title_of(path):
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        return path.removesuffix(".py").split("/", 1)[1].replace("/", ".")
    return re.search(r'^\s*"?# (.+?)(?:\\n)?",?$' if path.endswith(".ipynb") else r"^# (.+)$", text, flags=re.M)[1]


def readings(name):
    "Tutorials and guides in whose text the command is typed."
    typed = re.compile(rf"{PROGRAM} {name}\b")
    files = [file for pattern in READINGS for file in sorted(ROOT.glob(pattern)) if typed.search(file.read_text())]
    return [str(file.relative_to(ROOT)) for file in files]


def link(path):
    return f"[{title_of(path)}](../../{path})"


def option_tables(name):
    "The options, a table for each heading, in the order of `--help`."
    groups = {}
    for option in visible(entered()[name], "option"):
        groups.setdefault(option.rich_help_panel or "Options", []).append(option)
    parts = []
    for title, options in groups.items():
        needed = entered()[name].needed
        rows = [
            [spelt(o), o.help, values(o, name), "**required**" if o.name in needed else default(o)] for o in options
        ]
        parts += [f"## {title}\n", table(["option", "what it is", "values", "default"], rows)]
    return parts


def further_options(name):
    "What `train` takes beside its own options: those of each drafter."
    if not takes_training_arguments(inspect.signature(app.functions[name]).parameters, name):
        return []
    rows = [[drafter, " ".join(f"`{o}`" for o in drafter_options(drafter))] for drafter in shipped_drafters()]
    fields = "fields of `transformers.TrainingArguments`, such as `--warmup-steps 100`"
    text = f"Those of a drafter (behind = is the default), and {fields}.\n"
    return ["## Further options\n", text, table(["algorithm", "options"], rows)]


def written(name):
    "What is there afterwards."
    comments, output = app.functions[name].comments, app.outputs[name]
    places = [p for p in (output, "output_dir", "out", "native", "hidden_states") if p in comments]
    lines = [f"- `{place}`: {comments[place]}" for place in dict.fromkeys(places)]
    if output in comments:
        recipe = recipe_path("OUTPUT", name).name if output != "output" else f"{output.upper()}.recipe.yaml"
        lines.append(f"- `{recipe}` there: every argument, so that `{PROGRAM} {name} --recipe {recipe}` repeats it")
    return lines or ["Nothing: it prints what it finds."]


@cache
def page(name):
    "A command's page as Markdown."
    command, function = entered()[name], app.functions[name]
    context = typer.Context(command, info_name=f"{PROGRAM} {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    arguments = [[f"`{p.metavar}`", p.help, values(p, name)] for p in visible(command, "argument")]
    statuses = STATUSES | ({1: f"{app.verdicts[name]} Or: {STATUSES[1]}"} if name in app.verdicts else {})
    shown = link(source_of(function))
    parts = [f"# {PROGRAM} {name}\n", f"> {command.help}\n", f"```bash\n{PROGRAM} {name} {usage}\n```\n"]
    parts += ["For example:\n", f"```bash\n{shlex.join(example(name))}\n```\n"]
    parts += ["## Arguments\n", table(["argument", "what it is", "values"], arguments)] if arguments else []
    parts += option_tables(name) + further_options(name)
    parts += ["## What it writes\n", "\n".join(written(name)) + "\n"]
    parts += ["## Exit status\n", table(["status", "meaning"], sorted(statuses.items()))]
    parts += ["## Read on\n", f"- The function {{py:obj}}`{function.__module__}.{function.__name__}`: {shown}"]
    parts += [f"- {link(path)}" for path in readings(name)]
    return "\n".join([*parts, ""])


def pages():
    "path on the site -> its text"
    return {f"commands/{name}.md": page(name) for name in entered()}


if __name__ == "__main__":
    print(page(sys.argv[1]))
