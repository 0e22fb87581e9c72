"""A command line interface made from functions. A signature gives the options, the comments beside its parameters
the help texts, a recipe file any argument; names and comments are read from the source, and an error is one line."""

import ast
import contextlib
import errno
import gc
import inspect
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

import speculators_nb

from ..core import files
from ..core.options import RULES, algorithms, check_options, near, printable, rule_of, shown, typed
from ..core.provenance import hide_secrets, without_secrets
from ..verifier.folders import refuse_model
from .inputs import check_inputs
from .recipe import (
    import_drafters,
    loads_drafters,
    read_recipe,
    resolve,
    sections_of,
    with_home,
    without_default,
    write_recipe,
)

SHELL = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "Path": Path,
    "os.PathLike": str,
    "list": list[str],
    "dict": dict,
    **{f"{kind}[{of.__name__}]": list[of] for kind in ("list", "Iterable", "Sequence") for of in (str, int, float)},
}


def shell_type(annotation: ast.expr | None) -> type | None:
    "The first alternative of a union that can be typed on a command line; None: none can."
    alternatives = ast.unparse(annotation).split(" | ") if annotation else ["str"]
    kinds = [str if a.startswith("Literal[") else SHELL.get(a) for a in alternatives]
    kind = float if float in kinds else next(filter(None, kinds), None)
    return kind | None if kind and "None" in alternatives else kind


def _imported(name):
    "A module. Its import makes a million objects that stay; to look for garbage among them would take a fifth longer."
    enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if enabled:
            gc.enable()


def library(module: str, name: str) -> Callable:
    """A function of a module of this package, e.g. of "data.prepare", that is imported when it is called. It has the
    function's docstring, `comments` (parameter -> what is beside it), and its signature without what a shell cannot
    give (and has a default)."""
    file = Path(speculators_nb.__file__).parent / f"{module.replace('.', '/')}.py"
    source = file.read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ValueError(f"there is no function {name}")
    node, lines = functions[name], source.splitlines()
    required: list[ast.expr | None] = [None] * (len(node.args.args) - len(node.args.defaults))
    defaults = [*required, *node.args.defaults, *node.args.kw_defaults]
    parameters, comments = [], {}
    for arg, default in zip([*node.args.args, *node.args.kwonlyargs], defaults):
        # on the line where the parameter ends, as `ruff format` lays it out
        comments[arg.arg] = lines[((default or arg).end_lineno or 1) - 1].partition("  # ")[2]
        kind, value = shell_type(arg.annotation), inspect.Parameter.empty
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except ValueError:
                continue
            if isinstance(value, tuple):
                value = list(value)
                kind = kind or (list[type(value[0])] if value else None)
        elif not kind:
            raise ValueError(
                f"speculators_nb.{module}.{name}: {arg.arg} has no default, and a type that cannot be typed in a shell"
            )
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if arg in node.args.kwonlyargs:
            place = inspect.Parameter.KEYWORD_ONLY
        if kind:
            parameters.append(inspect.Parameter(arg.arg, place, default=value, annotation=kind))

    def call(*args, **kwargs):
        return getattr(_imported(f"speculators_nb.{module}"), name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = ast.get_docstring(node)
    call.__module__ = f"speculators_nb.{module}"
    call.__signature__ = inspect.Signature(parameters)
    call.comments = comments
    return call


# mistakes of the caller or of the data; so are the library's own
EXPECTED = ValueError, OSError, ImportError, FloatingPointError
REMEDIES = files.REMEDIES | {  # of what is read, too
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Change its permissions, or name another place"),
    errno.ENOENT: "Check the spelling",
    errno.EISDIR: "This is a folder: name a file",
}


def _in_one_line(text):
    "A message for the terminal, without secrets: an argument may be an address with a password."
    return printable(" ".join(without_secrets(text).split()))[:1000]


def _say(e, message, code):
    "Why a command has ended; a rank of several says which one it is."
    if "RANK" in os.environ:
        from ..distributed.torchrun import end_rank

        message = end_rank(e, message, code)
    typer.echo(f"Error: {message}", err=True)


def failure(e: Exception) -> tuple[str, int]:
    "An exception as one line for the terminal, and its exit code."
    text, code = str(e), 2
    if isinstance(e, OSError) and text.startswith("[Errno"):  # of the system: path, reason, remedy
        path, remedy = e.filename2 or e.filename, REMEDIES.get(e.errno or 0, "Look at the path and at the disk")
        text = f"{(e.strerror or type(e).__name__).lower()}. {remedy}"
        if path is not None and not isinstance(path, int):  # neither a write nor the system always says which
            text = f"{os.fsdecode(path)}: {text}"
        try:
            os.getcwd()
        except FileNotFoundError:
            if e.errno == errno.ENOENT:
                text = "the working folder has been removed; change into one that is there (cd)"
    text = _in_one_line(text) or type(e).__name__
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError":
        text = f"not enough memory ({text}); lower max_length, max_tokens, total_seq_len or concurrency"
    elif type(e).__module__.partition(".")[0] != "speculators_nb" and not isinstance(e, EXPECTED):
        code = 1
        text = (
            f"{type(e).__name__}: {text}. This is a fault of speculators-nb: please report it, "
            "with the output of the same command as `speculators-nb --traceback`"
        )
    return text, code


def takes_training_arguments(names, command):
    "Whether `--extra` of a command, of whose parameters these are the names, gives arguments of training."
    return "extra" in names and rule_of("extra", command) is RULES["extra"]


def usage(e: Any) -> str:  # one line
    "The message for a command line that cannot be read."
    context, kind, message = e.ctx, type(e).__name__, e.message.rstrip(".")
    command = context.info_name if context else ""
    takes = [p.name.removesuffix("_") for p in context.command.params] if context else []
    if kind == "NoSuchOption":
        name = e.option_name.lstrip("-").partition("=")[0].replace("-", "_")
        meant = near(e.option_name, [f"--{p.replace('_', '-')}" for p in takes])
        extra = rule_of("extra", command) if "extra" in takes else None
        if takes_training_arguments(takes, command) and name in RULES:
            meant = f"write --extra {name}={RULES[name].example}"
        elif extra and not meant.startswith("Did"):
            meant = f"another argument is given by --extra, e.g. --extra={extra.example}"
        elif not meant.startswith("Did"):
            meant = f"`{command} --help` lists the options"
        return f"{e.option_name}: {command} has no such option; {meant}"
    if kind == "BadOptionUsage":
        rule = rule_of(e.option_name.lstrip("-").replace("-", "_"), command)
        return f"{message}; write {e.option_name} {rule.example}" if rule and "requires" in message else message
    if kind == "BadParameter":
        return message if "=" in message else f"{getattr(e.param, 'name', command)}: {message}"
    if message.startswith("No such command"):
        word = message.split("'")[1] if "'" in message else message
        return f"{word!r}: there is no such command. {near(word, context.command.commands)}"
    if message.startswith("Got unexpected extra"):
        places = [p.metavar for p in context.command.params if p.param_type_name == "argument"]
        return f"{message}; {command} takes {', '.join(filter(None, places)) or 'options alone'}"
    return f"{message}; `{command} --help` says what there is"


# what Typer's parser raises; the class itself is private, and has moved before
USAGE_ERROR: Any = typer.BadParameter.__base__


class Program(TyperGroup):
    "Commands whose failures are one line; Ctrl-C prints nothing, and its exit code is 130."

    def main(self, *args, standalone_mode=True, **kwargs):
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
            try:
                if sys.stdout is not None:
                    sys.stdout.flush()
            except BrokenPipeError:
                raise
            except OSError as e:  # a disk that refuses the output
                self.drop_output()
                if not code:  # else it has been said
                    typer.echo(f"Error: standard output: {failure(e)[0]}", err=True)
                code = code or 2
        except BrokenPipeError:  # the reader of the output (`head`, for example) has ended
            self.drop_output()
            code = 1
        except USAGE_ERROR as e:
            code = e.exit_code
            if type(e).__name__ == "NoArgsIsHelpError":
                e.show()
            else:
                _say(e, _in_one_line(usage(e)), code)
        if standalone_mode:
            sys.exit(code or 0)
        return code

    @staticmethod
    def drop_output():
        "What standard output still holds is not written."
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def one_line(function: Callable):
    "An error becomes one line and an exit code (`typer.Exit`), unless `--traceback` is given."
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as e:
        cause: BaseException | None = e
        while cause is not None:  # Ctrl-C: an interrupted import raises an unrelated ImportError
            if isinstance(cause, KeyboardInterrupt):
                raise typer.Exit(130) from None
            cause = cause.__cause__ or cause.__context__
        if os.environ.get("SPECULATORS_NB_TRACEBACK"):
            raise
        message, code = failure(e)
        for name in inspect.signature(function).parameters:  # a remedy for Python, as it is typed in a shell
            message = message.replace(f"pass {name}=True", f"give --{name.replace('_', '-')}")
        _say(e, message, code)
        raise typer.Exit(code) from None


class Echo(logging.Handler):
    "Log messages of the library go to the terminal, apart from the results."

    def emit(self, record):
        typer.echo(printable(self.format(record)), err=True)


class App(typer.Typer):
    "A program, and what is known of its commands by their names."

    def __init__(self, **kwargs: Any):  # of Typer
        super().__init__(**kwargs)
        self.functions: dict[str, Callable] = {}
        self.outputs: dict[str, str | None] = {}  # the parameter that names the output
        self.verdicts: dict[str, str] = {}  # exit status 1 of a command that gives a verdict
        self.perform: dict[str, Callable] = {}  # runs a command on checked values


def new_app(name: str, help: str) -> App:  # without commands
    "A program: `--traceback` shows where an error was raised."
    app = App(
        name=name,
        cls=Program,
        no_args_is_help=True,
        context_settings=dict(help_option_names=["-h", "--help"]),
        pretty_exceptions_enable=False,
        help=help,
    )

    def show_version(wanted: bool):
        if wanted:
            typer.echo(f"{name} {speculators_nb.__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ):
        ours = logging.getLogger("speculators_nb")
        ours.handlers, ours.level = [Echo()], logging.INFO
        os.environ["SPECULATORS_NB_TRACEBACK"] = "1" if traceback else ""
        hide_secrets()

    return app


NAMED = ("verifier",)  # options in every command, also without a default
READERS: dict[Any, tuple[str, Callable]] = {  # type -> what help calls it, and what reads it
    int: ("INTEGER", int),
    float: ("FLOAT", float),
    dict: ("JSON", json.loads),
    Path: ("PATH", lambda text: Path(text) if text.strip() else text),  # no text is none, and not this folder
}


def _reader(name, annotation, command) -> dict[str, Any]:
    "How Typer reads a number or an object; text that is none is answered by the option's rule."
    kinds = {annotation, *get_args(annotation)}
    kinds |= {inner for kind in kinds for inner in get_args(kind)}
    kind = next((k for k in READERS if k in kinds), None)
    if kind is None:
        return {}
    metavar, parse = READERS[kind]

    def read(text):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            rule = rule_of(name, command)
            wrong = (rule and (rule.of or rule).problem(text)) or f"is no {metavar.lower()}"
            raise typer.BadParameter(f"{name}={shown(text)}: {wrong}") from None

    return dict(parser=read, metavar=metavar)


GROUPS = {  # heading -> options below it; all others are below "Options"
    "Verifier and drafter": """verifier model method algorithm draft_arch num_layers aux_layer_ids
    draft_vocab_size vocab_size from_pretrained native to format config speculative_tokens
    attn_implementation""",
    "Data": """data self_prompts prompts heldout max_samples n_prompts n_heldout max_length rows
    too_long min_trained dedup shuffle val_fraction template_kwargs train_reasoning train_tool_calls
    image_folder allow_urls languages features evaluation eval_share on_bad trust_features conversations
    tokens_each""",
    "Training": """num_train_epochs epochs total_seq_len gradient_accumulation_steps optimizer
    learning_rate lora_rank lora_alpha bf16 fsdp checkpoint_format context_parallel_size
    early_stopping_patience decode_prompts regenerate_every train.extra""",
    "Decoding": """k temperature top_p top_k min_p sampling max_new_tokens rule ngram as_engine kv_cache""",
    "Engine and server": """engine source server storage patience hidden_states concurrency baseline
    load host port evaluate.dtype serve.dtype max_model_len enforce_eager vllm run engine_version extra""",
    "Machines": "devices memory disk tflops bandwidth mfu",
    "Output": "output_dir features.dtype shard_gb save_dtype overwrite resume dry_run link",
}
GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}
FEW = 8  # options of a command that need no groups


def _shell_parameters(function, command) -> list[inspect.Parameter]:
    """The function's parameters for Typer, and those that every command has. A parameter without a default is an
    argument, and an option as well; it may also come from a recipe, so that Typer requires neither."""
    parameters, options = [], []
    takes, comments = inspect.signature(function).parameters, getattr(function, "comments", {})
    optional = without_default(function)[1]

    def add(name, kind, info, default=None):
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
        )
        if isinstance(info, OptionInfo) and not info.hidden:
            options.append((name, info))

    for name, parameter in takes.items():
        kind, comment, reader = parameter.annotation, comments.get(name), _reader(name, parameter.annotation, command)
        flag, metavar = f"--{name.replace('_', '-')}", f"[{name.upper()}]" if name in optional else name.upper()
        place: dict[str, Any] = dict(reader, metavar=metavar, help=comment, show_default=False)
        if name == "import_":
            continue
        if parameter.default is not parameter.empty:
            shows = parameter.default not in (None, [])
            add(name, kind, typer.Option(help=comment, show_default=shows, **reader), parameter.default)
        elif name in NAMED:
            add(name, kind | None, typer.Option(flag, **place))
        else:
            add(name, kind | None, typer.Argument(**place))
            add(f"{name}_", kind | None, typer.Option(flag, hidden=True, **reader))
    if loads_drafters(function):
        comment = "Module or .py file that registers drafters of your own (repeatable)."
        if takes_training_arguments(takes, command):
            comment += " An argument of such a drafter is given by --extra NAME=VALUE."
        add("import_", list[str] | None, typer.Option("--import", metavar="MODULE", show_default=False, help=comment))
    if "recipe" not in takes:
        comment = "YAML or JSON file with arguments; what is typed here goes before it."
        add("recipe", Path | None, typer.Option("--recipe", metavar="FILE", show_default=False, help=comment))
    for name, info in options if len(options) > FEW else ():
        info.rich_help_panel = GROUP_OF.get(f"{command}.{name}") or GROUP_OF.get(name, "Options")
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    return [*parameters, context]


def further_options(args: list[str], known: set[str]) -> list[str]:
    """Training arguments that have a rule, and no option of the command, as `--extra name=value`: a switch without a
    value is true, `--no-` before it false."""
    out, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        rule, opposite = RULES.get(name), RULES.get(name.removeprefix("no_"))
        if flag in known or not flag.startswith("--"):
            out.append(word)
        elif rule and (equals or rule.kind == "switch" or rest):
            out += ["--extra", f"{name}={value if equals else 'true' if rule.kind == 'switch' else rest.pop(0)}"]
        elif name.startswith("no_") and opposite and opposite.kind == "switch":
            out += ["--extra", f"{name.removeprefix('no_')}=false"]
        else:
            out.append(word)
    return out


def drafter_options(algorithm: str) -> list[str]:
    "What `train` takes for a drafter and has no option for, as it is typed: `--ttt-steps=3` where 3 is the default."
    from ..models.base import SpeculatorModel  # here: torch
    from ..train.train_drafter import LAYER_ARGUMENTS

    drafter = SpeculatorModel.registered_class(algorithm)
    defaults = drafter.training_arguments() | dict.fromkeys(() if drafter.fixed_layers else LAYER_ARGUMENTS)
    defaults.pop("target_layer_ids", None)  # --aux-layer-ids
    options = []
    for name, value in defaults.items():
        flag, value = f"--{name.replace('_', '-')}", str(value).lower() if isinstance(value, bool) else value
        options.append(flag if value is None else f"{flag}={shlex.quote(str(value))}")
    return options


def further_help(line: str) -> str:
    "What the help of `train` says of options beside its own; those of a drafter where the line names an algorithm."
    named = re.search(r"--algorithm[ =](\S+)", line)
    fields = "fields of transformers.TrainingArguments, such as --warmup-steps 100"
    if named and named[1] in algorithms():
        options = " ".join(drafter_options(named[1]))
        return f"Further options, of {named[1]} (behind = is the default): {options}. And {fields}."
    return f"Further options: those of a drafter, listed by `train --algorithm NAME --help`, and {fields}."


class ShellCommand(TyperCommand):
    "Its help shows what it cannot do without as required, though a recipe may give it."

    needed: Sequence[str] = ()  # parameters without a default that may not be None

    def collect_usage_pieces(self, ctx):
        arguments = [p for p in self.params if p.param_type_name == "argument" and p.metavar]
        places = [f"{p.metavar}{'...' * (p.nargs != 1)}" for p in arguments]
        options = [f"--{name} {name.upper()}" for name in self.needed if name in NAMED]
        return [self.options_metavar, *places, *options]

    def parse_args(self, ctx, args):
        known = {flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}
        if takes_training_arguments([p.name for p in self.params], self.name or ""):
            if {"-h", "--help"} & {*args}:
                self.epilog = further_help(" ".join(args))
            args = further_options(args, known)
        return super().parse_args(ctx, args)

    def format_help(self, ctx, formatter):
        shown = [p for p in self.params if p.name in self.needed]
        for parameter in shown:
            parameter.required = True
        super().format_help(ctx, formatter)
        for parameter in shown:
            parameter.required = False


def _next_line(steps, recipe, app, own) -> str:
    "What to type next, with the drafters of one's own; a step that has a section in the recipe is read from there."
    written, lines = sections_of(recipe) if recipe else (), []
    for name, *words in steps:
        function = app.functions[name]
        flags = {f"--{parameter.replace('_', '-')}" for parameter in inspect.signature(function).parameters}
        words = [word if word in {"--import", *flags} else typed(word) for word in words]
        if loads_drafters(function):
            words += [word for module in own for word in ("--import", module)]
        if name in written:
            words = ["--recipe", typed(recipe)]
        lines.append(shlex.join([app.info.name, name, *words]))
    return "Next: " + "; ".join(lines)


def _is_first_rank():
    "Whether this is the only process of the command, or the first of torchrun's or Slurm's."
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    return rank == "0"


def _print(text):
    "Print a text without secrets, if there is one."
    if not text:
        return
    try:
        typer.echo(printable(without_secrets(text)))
    except BrokenPipeError:
        raise
    except OSError as e:
        e.filename = "standard output"
        raise


def command(
    function: Callable,
    report: Callable,
    app: App,
    name: str | None = None,
    group: str | None = None,
    output: str | None = "output_dir",
    then: Callable | None = None,
    verdict: str | None = None,
) -> Callable:
    """Enter a function, or its placeholder from `library`, as a command of an app, by its own name or `name`; `report`:
    what it returned -> the text to print, or None; `group`: heading under which --help lists it; `output`: the
    parameter that names the output, where the recipe is left; `then`: (what it returned, its arguments) -> commands to
    type next; `verdict`: what exit status 1 says, of a command that judges. The function itself is returned."""
    name = name or function.__name__
    parameters = _shell_parameters(function, name)
    takes = inspect.signature(function).parameters
    every, optional = without_default(function)
    needed = [name for name in every if name not in optional]

    def perform(values):
        own = values.get("import", [])
        import_drafters(own)  # once in a process; this one may be the child of another
        given = {n: v for n, v in values.items() if n != "import"}
        refuse_model(values.get("output_dir"))
        from ..core.concurrency import plain_progress

        with plain_progress():
            result = function(**given | ({"import_": own} if "import_" in takes else {}))
        if _is_first_rank():
            _print(report(result))
            place = values.get(output)
            if place is not None and Path(place).exists():
                write_recipe(place, name, values)
        return result

    def run(context: typer.Context, **line):
        recipe = line.pop("recipe") if "recipe" not in takes else None
        with one_line(function):
            line, recipe = with_home(line), with_home(recipe)
            source: Any = context.get_parameter_source
            given = {n for n in line if source(n).name == "COMMANDLINE"}
            if twice := [n for n in given if f"{n}_" in given]:
                value = shown(line[twice[0]])
                raise ValueError(f"{twice[0]}={value}: given as an argument and as an option; leave one out")
            flags = {n.removesuffix("_"): line[n] for n in sorted(given)}
            import_drafters(flags.get("import", ()))
            # every argument, from the command line, the recipe, or its default
            in_file = read_recipe(recipe, name, app.functions, flags) if recipe else {}
            values = resolve(function, flags, in_file)
            try:
                check_options(values, name)
            except ValueError as e:
                field = str(e).partition("=")[0]
                if field in in_file.keys() - flags.keys():
                    raise ValueError(f"{recipe}: {e}") from None
                raise
            check_inputs(values, name)
            result = perform(values)
            own = values.get("import", ())
            if then and _is_first_rank():
                _print(_next_line(then(result, values), recipe, app, own))

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    help_text = " ".join((function.__doc__ or "").split())
    app.command(
        name=name,
        help=help_text,
        short_help=help_text.split(". ")[0].rstrip("."),
        rich_help_panel=group,
        cls=type("Entered", (ShellCommand,), dict(needed=needed)),
    )(run)
    app.functions[name], app.outputs[name] = function, output
    if verdict:
        app.verdicts[name] = verdict
    app.perform[name] = perform
    return function
