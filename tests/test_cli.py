"The command line: light, helpful, one line per mistake, and the same functions as in a notebook."

import ast
import gc
import inspect
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import yaml
from datasets import Dataset
from fastcore.docments import docments
from typer.testing import CliRunner

import speculators_nb
from speculators_nb.cli import drafter_commands as drafter_steps
from speculators_nb.cli import main as cli
from speculators_nb.cli.command import command, drafter_options, further_options, library, new_app
from speculators_nb.cli.recipe import read_recipe, read_sections, resolve
from speculators_nb.core import concurrency
from speculators_nb.core.options import check_options, shipped_drafters
from speculators_nb.core.provenance import read_provenance
from speculators_nb.data.chat_encoding import save_prepared
from speculators_nb.data.sources import read_conversations
from speculators_nb.serve.server import free_port

ROOT = Path(__file__).parents[1]
VERIFIER, CORPUS = ROOT / "data/tiny-verifier", ROOT / "data/corpus"
OF_TINY = "--verifier", VERIFIER
COMMANDS = cli.app.functions
FEATURES = "--max-samples 16 --max-length 192 --dtype float32"
TRAIN = (
    "--total-seq-len 256 --draft-vocab-size 512 --save-dtype bfloat16 --learning-rate 1e-3 "
    "--extra disable_tqdm=true --extra ttt_steps=2"
)


def run(*args):
    "A command; several options may be one text."
    words = [word for a in args for word in (a.split() if str(a).startswith("--") else [str(a)])]
    return CliRunner().invoke(
        cli.app, words, prog_name="speculators-nb", env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    )


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


# --- light and helpful ------------------------------------------------------------------------------------------------


def test_help_waits_for_nothing_heavy():
    """What makes a command slow to answer is what it imports."""
    got = python("""import sys
sys.argv = ['speculators-nb', '--help']
from speculators_nb.cli.main import app
try: app()
except SystemExit: pass
print(sorted({'torch', 'transformers', 'datasets', 'matplotlib', 'pandas', 'numpy'} & set(sys.modules)))""")
    assert got.returncode == 0 and "evaluate" in got.stdout
    assert got.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_is_this_one():
    from importlib.metadata import entry_points

    assert {e.value for e in entry_points(group="console_scripts", name="speculators-nb")} == {
        "speculators_nb.cli.main:app"
    }


def test_no_arguments_shows_help():
    assert all(name in run().output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_an_option_with_help(name):
    "An argument or option for each parameter of the function, with the comment beside it as its help."
    function, result = COMMANDS[name], run(name, "--help")
    assert result.exit_code == 0 and " ".join(function.__doc__.split())[:60] in " ".join(
        result.output.replace("\n", " ").split()
    )
    for p in inspect.signature(function).parameters.values():
        spelt = p.name.upper() if p.default is p.empty else f"--{p.name.rstrip('_').replace('_', '-')}"
        assert spelt in result.output
    assert all(function.comments[p] for p in inspect.signature(function).parameters), (
        "a parameter without a comment has no help"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_library_s_function(name):
    """What was read from the source is what Python sees; only what a shell cannot type is missing, and that has a
    default."""
    stand_in = COMMANDS[name]
    real = getattr(import_module(stand_in.__module__), stand_in.__name__)
    shell, library_ = inspect.signature(stand_in).parameters, inspect.signature(real).parameters
    same = {
        n: list(p.default) if isinstance(p.default, tuple) else p.default for n, p in library_.items() if n in shell
    }
    assert {n: p.default for n, p in shell.items()} == same
    assert all(p.default is not p.empty for n, p in library_.items() if n not in shell)
    assert {n: docments(real)[n] or "" for n in shell} == {n: stand_in.comments[n] for n in shell}


def test_heavy_imports_are_inside():
    light = {"data.sources", "evaluate.prompts", "verifier.folders", "core", "speculators_nb", "typer", "yaml"}
    names = "inputs", "recipe", "command", "run", "main"
    for module in (import_module(f"speculators_nb.cli.{name}") for name in names):
        tree = ast.parse(Path(module.__file__).read_text())
        tops = {
            name if name in light else name.split(".")[0]
            for n in tree.body
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for name in [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name]
        }
        assert tops <= light | {*names, *sys.stdlib_module_names}


@pytest.mark.parametrize("words", [("train", ".", "out"), ("vocab", ".", "9"), ("plan", "recipe.yaml")])
def test_data_that_name_a_verifier_that_is_not_here_say_so(words, tmp_path, monkeypatch):
    "A relative name, seen from another folder: nobody has written it now."
    tokens = Dataset.from_list([dict(input_ids=[5, 6], loss_mask=[0, 1])])
    save_prepared(tokens, tmp_path / "rows")
    (tmp_path / "data_config.json").write_text('{"model": {"target_model_path": "../verifier/"}}')
    (tmp_path / "recipe.yaml").write_text("train: {data_dir: ., output_dir: out}")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2 and "../verifier" in result.output, result.output
    assert "; . names it as its verifier: give verifier= (--verifier)" in result.output


@pytest.mark.parametrize(
    "algorithm,given,arch",
    [
        ("eagle3", (), None),
        ("dflash", (), "qwen3"),
        ("dflash", ("--draft-arch", "llama"), "llama"),
        ("medusa", (), None),
    ],
)
def test_layers_that_an_algorithm_needs_are_its_default(tmp_path, monkeypatch, algorithm, given, arch):
    asked = {}
    (tmp_path / "data_config.json").write_text('{"model": {"target_model_path": "somewhere"}}')
    (tmp_path / "rows").mkdir()
    monkeypatch.setattr(drafter_steps, "train_drafter", lambda **arguments: asked.update(arguments))
    run("train", tmp_path, tmp_path / "out", "--algorithm", algorithm, *given)
    assert (asked["draft_arch"], asked["verifier"]) == (arch, "somewhere")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def conversations(tmp_path):
    def write(text, name="c.jsonl"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def one_line(result, *words):
    assert result.exit_code == 2, result.output
    error = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(error) == 1 and all(w in error[0] for w in words), result.output
    assert "Traceback" not in result.output and not result.stdout.strip()


def test_bad_data_is_named(conversations, tmp_path):
    one_line(
        run("features", conversations('{"messages": []}\n{"mess'), tmp_path / "out", *OF_TINY),
        "1 × not JSON (first: ",
        "c.jsonl, line 2, Unterminated string",
    )


def test_traceback_on_request(tmp_path):
    result = run("--traceback", "train", tmp_path / "none", tmp_path / "out")
    assert isinstance(result.exception, FileNotFoundError)
    # the switch does not stick
    assert not isinstance(run("train", tmp_path / "none", tmp_path / "out").exception, FileNotFoundError)


def test_a_bug_is_not_hidden():
    "It is no mistake of the caller: another exit code, and the line says whose fault it is; `--traceback` shows it."

    def broken():
        "Raise what no caller can mend."
        raise RuntimeError("a bug")

    app = new_app("x", "x")
    command(broken, str, app)
    result = CliRunner().invoke(app, ["broken"])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert re.fullmatch(
        r"Error: RuntimeError: a bug\. This is a fault of speculators-nb.* --traceback`", result.stderr.strip()
    )
    assert isinstance(CliRunner().invoke(app, ["--traceback", "broken"]).exception, RuntimeError)


@pytest.mark.parametrize(
    "error,words",
    [
        (MemoryError("could not allocate 10 GiB"), ("not enough memory (could not allocate 10 GiB)", "lower")),
        (
            PermissionError(13, "Permission denied", "/some/where"),
            ("/some/where: permission denied. Change its permissions",),
        ),
        (OSError(28, "No space left on device", "/full/disk"), ("/full/disk: no space left on device. Make room",)),
        (
            OSError(30, "Read-only file system", b"/read/only"),
            ("/read/only: read-only file system. Choose a folder on a disk",),
        ),
        (OSError("with words of its own"), ("Error: with words of its own",)),
        (ValueError(), ("Error: ValueError",)),
    ],
)
def test_failures_of_the_machine_have_a_remedy(error, words):
    def fail():
        "Raise."
        raise error

    app = new_app("x", "x")
    command(fail, str, app)
    one_line(CliRunner().invoke(app, ["fail"]), *words)


def test_nobody_looks_for_garbage_while_a_command_is_imported(monkeypatch):
    looks = []

    def imported(name):
        looks.append(gc.isenabled())
        raise ImportError(name)

    monkeypatch.delitem(sys.modules, "speculators_nb.nn.draft_vocabulary", raising=False)
    monkeypatch.setattr("speculators_nb.cli.command.import_module", imported)
    with pytest.raises(ImportError, match="draft_vocabulary"):
        library("nn.draft_vocabulary", "load_vocab_mapping")()
    assert looks == [False] and gc.isenabled()


def test_ctrl_c_is_quiet():
    """Also where it cuts an import off, which then fails for another reason. A shell's background job ignores Ctrl-C;
    here nobody does."""

    def cut():
        "Be interrupted."
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot import name 'x' from partially initialized module 'y'") from None

    def stopped():
        "Be interrupted."
        signal.raise_signal(signal.SIGINT)

    app, before = new_app("x", "x"), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for function in (cut, stopped):
            command(function, str, app)
            result = CliRunner().invoke(app, [function.__name__])
            assert result.exit_code == 130 and result.output == ""
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_goes_away_is_no_error():
    "`speculators-nb … | head -1`"
    program = Path(sys.executable).with_name("speculators-nb")
    for _ in range(3):
        process = subprocess.Popen(
            [program, "check", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() in (0, 1)


def test_what_a_shell_cannot_type():
    with pytest.raises(ValueError, match="no function nothing"):
        library("nn.draft_vocabulary", "nothing")
    with pytest.raises(ValueError, match="verifier has no default, and a type"):
        library("features.in_process", "extract_features")


# --- one place for the verifier ---------------------------------------------------------------------------------------


NAMED = [n for n, f in COMMANDS.items() if "verifier" in inspect.signature(f).parameters]


@pytest.mark.parametrize("name", NAMED)
def test_the_verifier_is_an_option_everywhere(name):
    """No command has a place for it, and what a command cannot do without is required in its help."""
    shown = " ".join(run(name, "--help").output.split())
    usage = shown[: shown.index("╭")]
    taken = {n: p for n, p in inspect.signature(COMMANDS[name]).parameters.items() if p.default is p.empty}
    needed = [n for n, p in taken.items() if type(None) not in getattr(p.annotation, "__args__", ())]
    places = [n.upper() if n in needed else f"[{n.upper()}]" for n in taken if n != "verifier"]
    wanted = ["--verifier VERIFIER"] * ("verifier" in needed)
    line = " ".join(["[OPTIONS]", *places, *wanted])
    assert re.search(rf"Usage: speculators-nb {name} {re.escape(line)}(?! [A-Z]+ )", usage), usage
    assert shown.count("[required]") == len(needed)
    one_line(run(name, *places, "one more"), "unexpected extra argument(s) (one more)")


def test_any_training_argument_is_an_option(features, tmp_path):
    """Also a switch, and its opposite; what is none is misspelt as before."""
    given = ("--max-steps", 1, "--no-remove-unused-columns", "--disable-tqdm", "--ttt-steps=2")
    result = run("train", features, tmp_path / "d", "--total-seq-len", 256, *given)
    assert result.exit_code == 0, result.output
    written = yaml.safe_load((tmp_path / "d/train.recipe.yaml").read_text())["train"]["extra"]
    wanted = {"max_steps=1", "remove_unused_columns=false", "disable_tqdm=true", "ttt_steps=2"}
    assert set(written) == wanted
    one_line(run("train", features, tmp_path / "e", "--tt-steps", 2), "--tt-steps: train has no such option")


def test_help_names_the_training_arguments_without_an_option():
    """It says how they are listed; the line that it lists can be typed."""
    said = " ".join(run("train", "--help").output.split())
    assert "listed by `train --algorithm NAME --help`" in said and "TrainingArguments" in said
    for algorithm in shipped_drafters():
        options = drafter_options(algorithm)
        assert " ".join(options) in " ".join(run("train", "--algorithm", algorithm, "-h").output.split()), algorithm
        given = further_options([option if "=" in option else f"{option}=1" for option in options], known=set())
        assert given[::2] == ["--extra"] * len(options)
    assert {"--ttt-steps=3", "--loss-fn=kl_div", "--step-weights", "--draft-config"} <= set(drafter_options("eagle3"))
    assert "Further options" not in run("serve", "--help").output


def test_short_help_and_version():
    assert run("-h").output == run("--help").output and run("train", "-h").output == run("train", "--help").output
    assert run("--version").stdout == f"speculators-nb {speculators_nb.__version__}\n"


def test_a_shell_completes():
    """Typer's completion: the commands and their options."""
    program = Path(sys.executable).with_name("speculators-nb")
    for words, number, wanted in (
        ("speculators-nb tr", 1, "train"),
        ("speculators-nb train --learn", 2, "--learning-rate"),
    ):
        there = {"_SPECULATORS_NB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        got = subprocess.run([program], env={**os.environ, **there}, capture_output=True, text=True)
        assert wanted in got.stdout.split(), got


@pytest.mark.parametrize(
    "name, recipe, wanted",
    [
        ("prepare", None, "Next: speculators-nb features {out} FEATURES --verifier {v}"),
        ("prepare", "features: {max_length: 64}", "Next: speculators-nb features --recipe {recipe}"),
    ],
)
def test_what_is_next_has_the_values_that_are_known(tmp_path, name, recipe, wanted):
    there = dict(out=tmp_path / "prepared", v=VERIFIER, recipe=tmp_path / "r.yaml")
    there["recipe"].write_text(recipe or "{}")
    given = ("--recipe", there["recipe"]) if recipe else ()
    line = (CORPUS / "heldout.jsonl", there["out"], "--verifier", VERIFIER, "--max-samples", 4, "--num-proc", 1)
    result = run(name, *line, *given)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == wanted.format(**there)


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    def write(content, name="recipe.yaml"):
        (tmp_path / name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
        return tmp_path / name

    return write


def echo():
    "A program with one command that prints what it was called with."

    def show(
        data: str,
        n: int = 1,
        top_p: float = 0.5,
        on: bool = False,
        ids: list[int] | None = None,
        more: dict | None = None,
    ):
        "Show."
        return dict(data=data, n=n, top_p=top_p, on=on, ids=ids, more=more)

    app = new_app("x", "x")
    command(show, json.dumps, app)

    def other(folder: str):
        "Another."

    command(other, str, app)
    return lambda *args: CliRunner().invoke(
        app, ["show", *map(str, args)], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    )


@pytest.mark.statement("release-45")
@pytest.mark.parametrize("name", ["r.yaml", "r.json"])
def test_flag_before_file_before_default(recipe, name):
    show = echo()
    file = recipe(
        {
            "n": 2,
            "top_p": 0.25,
            "folder": "f",
            "show": {"data": "d", "top_p": 0.75, "ids": [1, 2], "more": {"a": 1}},
            "other": {},
        },
        name,
    )
    default = dict(data="d", n=2, top_p=0.75, on=False, ids=[1, 2], more={"a": 1})
    assert json.loads(show("--recipe", file).stdout) == default
    assert json.loads(
        show("--recipe", file, "--n", 1, "--on", "--ids", 3, "--more", '{"b": 2}').stdout
    ) == default | dict(n=1, on=True, ids=[3], more={"b": 2})
    assert (
        json.loads(show("e", "--recipe", file).stdout)
        == json.loads(show("--data", "e", "--recipe", file).stdout)
        == default | dict(data="e")
    )


@pytest.mark.parametrize(
    "content, flags, message",
    [
        ({"seed": 1, "lora_rank": 4, "lora_alpha": 8.0}, "", "{}: lora_rank=4: an adapter is for a drafter that is "),
        ({"train": {"seed": 1}, "eval_share": 0, "early_stopping_patience": 2}, "", "{}: early_stopping_patience=2: "),
        ({"train": {"eval_share": 0}, "early_stopping_patience": 2}, "", "{}: early_stopping_patience=2: needs eval"),
        ({"eval_share": 0}, "--early-stopping-patience 2", "early_stopping_patience=2: needs evaluations, and "),
        ({"early_stopping_patience": 2}, "--early-stopping-patience 3 --eval-share 0", "early_stopping_patience=3: "),
    ],
)
def test_values_that_do_not_go_together_are_named_with_their_file(recipe, tmp_path, content, flags, message):
    "Shared values, or one of a section beside one; not with a file where the value that is refused is a flag."
    file = recipe(content)
    result = run("train", tmp_path / "f", tmp_path / "d", "--recipe", file, *flags.split())
    one_line(result, f"Error: {message.format(file)}")
    assert (str(file) in result.output) == message.startswith("{}")


def test_a_recipe_names_no_secret(tmp_path):
    from speculators_nb.cli.recipe import write_recipe

    text = write_recipe(
        tmp_path,
        "x",
        {"api_key": "secret-word", "api_key_env": "KEY", "url": "http://u:secret-word@h/?token=secret-word"},
    ).read_text()
    assert "secret-word" not in text and "api_key_env: KEY" in text


def test_shared_values_that_one_section_does_not_read_are_fine(tmp_path):
    file = tmp_path / "recipe.yaml"
    shared = "verifier: v\ndevice: cpu\nserver: http://127.0.0.1:8000\nmodel: m"
    sections = "regenerate: {data: a.jsonl, output: b.jsonl}\nfeatures: {data: b.jsonl, output_dir: f}"
    file.write_text(f"{shared}\n{sections}")
    read = read_sections(file, COMMANDS)
    assert read["regenerate"]["device"] == read["features"]["device"] == "cpu"
    assert read["features"]["source"] == "hf"


def test_a_shared_value_without_effect_in_one_section_is_left_out_there_and_refused_where_it_stands_alone(tmp_path):
    file = tmp_path / "recipe.yaml"
    running = "drafter: d, data: shipped, engine: vllm, server: http://a:1"
    file.write_text(
        "device: cpu\ndtype: float32\nmax_model_len: 64\nfeatures: {data: a, output_dir: f, verifier: v}\n"
        f"serve: {{checkpoint: d}}\nevaluate: {{drafter: d, data: shipped}}\nevaluate.vllm: {{{running}}}\n"
        "evaluate.started: {data: shipped, drafter: d, engine: vllm}"
    )
    read = read_sections(file, COMMANDS)
    names = ("device", "dtype", "max_model_len")
    values = {section: [read[section][name] for name in names if name in read[section]] for section in read}
    assert values == {
        "serve": ["float32", 64],
        "features": ["cpu", "float32"],
        "evaluate": ["cpu", "auto", None],
        "evaluate.vllm": [None, "auto", None],
        "evaluate.started": [None, "float32", 64],
    }
    for recipe, flags in (
        (f"evaluate: {{{running}, dtype: half}}\nserve: {{checkpoint: d}}", {}),
        ("drafter: d\ndata: shipped\nengine: vllm\nserver: http://a:1\ndtype: half", {}),
        (f"evaluate: {{{running}}}\nserve: {{checkpoint: d}}", {"dtype": "half"}),
    ):
        file.write_text(recipe)
        with pytest.raises(ValueError, match="dtype='half': is decided when a server starts"):
            check_options(
                resolve(COMMANDS["evaluate"], flags, read_recipe(file, "evaluate", COMMANDS, flags)), "evaluate"
            )
    file.write_text(f"dtype: half\nevaluate.a: {{{running}}}\nevaluate.b: {{{running}}}")
    with pytest.raises(ValueError, match="dtype='half': is decided when a server starts"):
        read_sections(file, COMMANDS)  # it would have no effect anywhere
    file.write_text("dtype: half\nserve: {checkpoint: d}\nevaluate: {drafter: d, data: shipped}")
    for flags, dtype in (({}, "auto"), ({"engine": "vllm"}, "half")):
        values = resolve(COMMANDS["evaluate"], flags, read_recipe(file, "evaluate", COMMANDS, flags))
        assert values["dtype"] == dtype


@pytest.mark.statement("release-37")
@pytest.mark.parametrize("file", sorted((ROOT / "data/recipes").glob("*.yaml")), ids=lambda f: f.stem)
def test_shipped_recipes_are_right(file, tmp_path, monkeypatch):
    "Every section, field and type; every command's arguments are complete; a dry run needs no hub, and is quick."
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "prompts.jsonl", "data/corpus/train.jsonl", "data/corpus/heldout.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    dry = run("run", file, "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.count("will run") >= 6, dry.output
    assert not set(os.listdir()) - {"chats.jsonl", "prompts.jsonl", "data"}
    given = read_sections(file, COMMANDS)
    sections = ["regenerate", "prepare", "features", "train", "evaluate", "check", "serve"]
    assert [name for name in given if name != "evaluate.vllm"] == sections
    for user, made in (
        ("prepare.data", "regenerate.output"),
        ("features.data", "prepare.output_dir"),
        ("train.data_dir", "features.output_dir"),
        ("evaluate.drafter", "train.output_dir"),
        ("serve.checkpoint", "train.output_dir"),
        ("check.folder", "train.output_dir"),
    ):
        (a, b), (c, d) = user.split("."), made.split(".")
        assert str(given[a][b]) == str(given[c][d]), f"{file.name}: {user} is not {made}"
    assert {v["seed"] for v in given.values() if "seed" in v} == {0}


# --- the whole way ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "features"
    result = run("features", CORPUS / "train.jsonl", folder, *OF_TINY, FEATURES)
    assert result.exit_code == 0, result.output
    assert "16 rows" in result.stdout and "16 feature files written, 0 kept" in result.stdout
    return folder


@pytest.fixture(scope="module")
def drafter(features):
    folder = features.parent / "drafter"
    result = run("train", features, folder, TRAIN + " --num-train-epochs 1 --extra logging_steps=1")
    assert result.exit_code == 0, result.output
    assert "held-out loss  accuracy 1  accuracy 2" in result.stdout and "accuracy 0" not in result.stdout
    assert "Next: speculators-nb evaluate" in result.stdout
    return folder


def test_features_are_kept_when_asked_again(features):
    result = run("features", CORPUS / "train.jsonl", features, *OF_TINY, FEATURES)
    assert "0 feature files written, 16 kept" in result.stdout
    one_line(
        run("features", CORPUS / "train.jsonl", features, *OF_TINY, "--max-samples", 15, "--max-length", 192),
        "another origin",
    )


def test_redirected_output_is_plain_lines(features, tmp_path, monkeypatch):
    """Progress, a row an evaluation, no carriage return, and no dictionary."""
    seconds = itertools.count()  # one for every update of a bar
    monkeypatch.setattr(concurrency, "time", SimpleNamespace(monotonic=seconds.__next__))
    line = "--total-seq-len 128 --num-train-epochs 2 --draft-vocab-size 512"
    got = run("train", features, tmp_path / "d", line)
    shown = got.output.splitlines()
    assert got.exit_code == 0 and "\r" not in got.output and "\x1b" not in got.output
    assert not [text for text in shown if "{" in text], shown
    rows = [text for text in shown if re.match(r" +\d+ +\d\.\d\d ", text)]
    assert len(rows) == 3 and rows[-1] in rows[:2]  # two evaluations, and the better one again
    bars = [text for text in shown if text.startswith("train:")]
    assert max(map(len, bars)) <= 200 and 1 <= len(bars) <= 10
    assert all(re.search(r"\d+/\d+ \[[\d:]+<", text) for text in bars), shown


def test_trained_as_asked(drafter):
    config = json.loads((drafter / "config.json").read_text())
    assert config["draft_vocab_size"] == 512 and config["dtype"] == "bfloat16"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert {"loss_0", "loss_1"} <= set((drafter / "training_log.csv").read_text().splitlines()[0].split(","))


def test_check(drafter, tmp_path):
    assert run("check", drafter).stdout == "vLLM can serve this drafter.\n"
    import shutil

    shutil.copytree(drafter, tmp_path / "d", ignore=shutil.ignore_patterns("checkpoint-*"))
    config = json.loads((tmp_path / "d/config.json").read_text()) | {"model_type": "llama"}
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    result = run("check", tmp_path / "d")
    assert result.exit_code == 1 and result.stdout.startswith("- ") and "model_type" in result.stdout


@pytest.mark.statement("release-16")
def test_evaluate(drafter, tmp_path):
    result = run(
        "evaluate",
        drafter,
        CORPUS / "heldout.jsonl",
        "--max-samples 2 --max-new-tokens 12 --output-dir",
        tmp_path,
        "--temperature 0 --temperature 1",
    )
    assert result.exit_code == 0, result.output
    first, *rows = result.stdout.split("\n\n")[0].splitlines()
    assert " ".join(first.split()) == "drafter temperature tokens per step tokens per second speedup"
    assert [row.strip().split("  ")[0] for row in rows] == ["no drafter"] * 2 + ["eagle3"] * 2 + ["n-gram"] * 2
    assert "mean length" in result.stdout
    assert all(row["domain"] in result.stdout for row in read_conversations(CORPUS / "heldout.jsonl", 2))
    assert {p.name for p in tmp_path.iterdir()} == {
        "summary.csv",
        "positions.csv",
        "ranges.csv",
        "requests.csv",
        "performance.csv",
        "acceptance.png",
        "provenance.json",
        "evaluate.recipe.yaml",
    }


def test_resume_goes_on(features, drafter):
    before = set(os.listdir(drafter))
    result = run("train", features, drafter, TRAIN + " --num-train-epochs 2 --resume")
    assert result.exit_code == 0, result.output
    first = min(int(n.split("-")[1]) for n in before if n.startswith("checkpoint-"))
    assert f"checkpoint-{2 * first}" in os.listdir(drafter)


def test_prepare_says_what_it_made_once(tmp_path):
    asked = {"role": "user", "content": "What is 2 + 2?"}
    chats = [{"messages": [asked, {"role": "assistant", "content": answer}]} for answer in ("4.", "4.", "4.", "5", "6")]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, [*chats, {"messages": [asked]}])))
    result = run("prepare", tmp_path / "chats.jsonl", tmp_path / "prepared", *OF_TINY, "--num-proc", 1)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)) and sum("duplicates" in line for line in lines) == 1, result.output
    assert sum(line.startswith("prepared: ") for line in lines) == 1 and "Dropped" in lines
    assert "chats.jsonl, line 2; line 3)" in result.output  # which ones


QUICK = ("--total-seq-len", 64, "--eval-share", 0, "--extra", "disable_tqdm=true", "--extra", "max_steps=2")


def shape(*words):
    "Options --extra name=value."
    return [part for word in words for part in ("--extra", word)]


def far_rows_change(drafter, algorithm, window):
    """Whether a state of the first position reaches a prediction beyond the window, in the rows that training
    computes."""
    import torch

    from speculators_nb.models.base import SpeculatorModel

    model = SpeculatorModel.from_pretrained(drafter, verifier=VERIFIER).eval()
    g = torch.Generator().manual_seed(0)
    length, layers = 48, len(model.target_layer_ids)
    batch = dict(
        input_ids=torch.randint(4, 500, (1, length), generator=g),
        hidden_states=torch.randn(1, length, layers * model.hidden_size, generator=g),
        document_ids=torch.zeros(1, length, dtype=torch.int64),
        loss_mask=(torch.arange(length) >= length - 8)[None],
        verifier_last_hidden_states=torch.randn(1, length, model.hidden_size, generator=g),
    )
    how = dict(anchor_positions=torch.tensor([length - 6])) if algorithm == "dflash" else dict(ttt_steps=1)
    losses = []
    for scale in (1.0, -3.0):
        batch["hidden_states"][:, : length - 8 - 2 * window] *= scale
        losses.append(model(**batch, **how).loss.item())
    return losses[0] != losses[1]


@pytest.mark.statement("release-06")
@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_sliding_window_from_the_shell(features, tmp_path, algorithm):
    block = shape("block_size=4", "max_anchors=8") if algorithm == "dflash" else []
    asked = shape("sliding_window=8", "draft_hidden_act=gelu"), shape("sliding_window=8", "full_attention_indices=[1]")
    for folder, extra in zip(("near", "far"), asked):
        line = ("train", features, tmp_path / folder, "--algorithm", algorithm, "--num-layers", 2, *QUICK)
        result = run(*line, *block, *extra)
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / folder / "config.json").read_text())["speculators_model_type"] == algorithm
    near, far = (
        json.loads((tmp_path / name / "config.json").read_text())["transformer_layer_config"]
        for name in ("near", "far")
    )
    assert near["layer_types"] == ["sliding_attention"] * 2 and near["use_sliding_window"]
    assert near["sliding_window"] == far["sliding_window"] == 8
    assert (near["hidden_act"], far["hidden_act"]) == ("gelu", "silu")
    assert far["layer_types"] == ["sliding_attention", "full_attention"]
    assert not far_rows_change(tmp_path / "near", algorithm, 8)
    assert far_rows_change(tmp_path / "far", algorithm, 8)
    if algorithm == "eagle3":
        wider = shape("sliding_window=16", "draft_hidden_act=gelu")
        line = ("train", features, tmp_path / "near", "--num-layers", 2, *QUICK[:-1], "max_steps=3", "--resume")
        one_line(run(*line, *wider), "sliding_window was 8, is 16")


def test_draft_layers_from_a_file(features, tmp_path):
    size = json.loads((Path(VERIFIER) / "config.json").read_text())["hidden_size"]
    layers = dict(model_type="llama", hidden_size=size, intermediate_size=48, num_hidden_layers=2, vocab_size=99)
    layers |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(layers))
    result = run("train", features, tmp_path / "d", *QUICK, *shape(f"draft_config={file}"))
    assert result.exit_code == 0, result.output
    stored = json.loads((tmp_path / "d/config.json").read_text())["transformer_layer_config"]
    assert (stored["intermediate_size"], stored["num_hidden_layers"], stored["head_dim"]) == (48, 2, 16)
    assert stored["vocab_size"] != 99  # the verifier's
    again = run("train", features, tmp_path / "e", *QUICK, *shape(f"draft_config={tmp_path / 'd'}"))
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "e/config.json").read_text())["transformer_layer_config"] == stored
    both = shape(f"draft_config={file}", "sliding_window=8")
    one_line(run("train", features, tmp_path / "f", *both), "sliding_window=8", "describes the layers", "leave")
    one_line(run("train", features, tmp_path / "f", "--num-layers", 3, *both[:2]), "num_layers=3", "leave")
    one_line(
        run("train", features, tmp_path / "f", "--from-pretrained", tmp_path / "d", *both[2:]),
        *("sliding_window=8", "from_pretrained", "leave"),
    )
    for wrong, words in (
        (dict(hidden_size=8), ("draft_config=", "hidden_size is 8", "write")),
        (dict(model_type="mamba"), ("draft_config=", "mamba", "choose")),
        (dict(hidden_act="silly"), ("draft_config=", "hidden_act='silly'", "choose")),
    ):
        file.write_text(json.dumps(layers | wrong))
        one_line(run("train", features, tmp_path / "f", *both[:2]), *words)


@pytest.mark.parametrize(
    "line, words",
    [
        ("--sliding-window 0", ("sliding_window=0", "at least 1")),
        ("--draft-config nowhere", ("nowhere", "config.json")),
        ("--extra full_attention_indices=0,2", ("full_attention_indices='0,2'", "[0, 2]")),
        ("--extra full_attention_indices=[3]", ("full_attention_indices=[3]", "num_layers is 1", "from 0 to 0")),
        ("--extra draft_hidden_act=silly", ("draft_hidden_act='silly'", "choose")),
        ("--algorithm mtp --extra sliding_window=8", ("sliding_window=8", "verifier's own kind", "leave")),
        ("--algorithm medusa --extra sliding_window=8", ("sliding_window=8", "no decoder layers", "leave")),
        ("--algorithm medusa --num-layers 2", ("num_layers=2", "no decoder layers", "leave")),
        ("--algorithm mlp --draft-arch qwen3", ("draft_arch='qwen3'", "no decoder layers", "leave")),
        ("--algorithm mtp --num-layers 2", ("num_layers=2", "verifier's own kind", "leave")),
        ("--algorithm eagle --num-layers 2", ("num_layers=2", "one draft layer", "leave")),
    ],
)
def test_wrong_shapes_of_draft_layers(features, tmp_path, line, words):
    one_line(run("train", features, tmp_path / "d", *line.split()), *words)


@pytest.mark.statement("release-02")
def test_questions_are_answered_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai/gsm8k/main").mkdir(parents=True)  # what the hub's id finds first
    rows = [dict(question=f"What is {n} + {n}?", answer=f"It is {2 * n}.") for n in range(3)]
    (tmp_path / "openai/gsm8k/main/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    about = "---\nconfigs:\n- config_name: main\n  data_files: main/*.jsonl\n---\n"
    (tmp_path / "openai/gsm8k/README.md").write_text(about)
    other = [dict(instruction="Add.", input="2, 2", output="4"), dict(prompt="Say hi."), dict(text="nothing asked")]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, other)))
    for data, written in (("gsm8k", 3), ("other.jsonl", 2)):
        line = ("regenerate", data, f"{data}.out.jsonl", "--verifier", VERIFIER, "--max-new-tokens", 4)
        result = run(*line)
        assert result.exit_code == 0 and "conversations written" in result.stdout, result.output
        answered = [row["messages"] for row in read_conversations(f"{data}.out.jsonl")]
        assert len(answered) == written and all(m[-1]["role"] == "assistant" for m in answered)
        assert any(m[0]["content"] in ("What is 2 + 2?", "Add.\n\n2, 2") for m in answered)
    result = run("prepare", "gsm8k", tmp_path / "p", *OF_TINY, "--num-proc", 1)
    assert result.exit_code == 0 and "2 training and 1 validation rows" in result.stdout, result.output
    one_line(run("prepare", "gsm9k", tmp_path / "q", *OF_TINY), "gsm9k: no such file", "hf:gsm9k", "gsm8k")


def test_the_temperature_reaches_the_answers(tmp_path):
    texts = []
    for temperature in (0, 2):
        out = tmp_path / f"{temperature}.jsonl"
        given = f"--max-samples 2 --max-new-tokens 12 --temperature {temperature}"
        result = run("regenerate", CORPUS / "train.jsonl", out, "--verifier", VERIFIER, given)
        assert result.exit_code == 0, result.output
        texts.append([row["messages"] for row in read_conversations(out)])
    assert texts[0] != texts[1]


def test_regenerated_answers_are_prepared(tmp_path):
    result = run(
        "regenerate",
        CORPUS / "train.jsonl",
        tmp_path / "a.jsonl",
        "--verifier",
        VERIFIER,
        "--max-samples 3 --max-new-tokens 24",
    )
    assert result.exit_code == 0 and "conversations written" in result.stdout, result.output
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) >= 3
    assert "conversations that were there" in run("regenerate", "--recipe", tmp_path / "a.jsonl.recipe.yaml").stdout
    result = run("prepare", tmp_path / "a.jsonl", tmp_path / "p", "--verifier", VERIFIER, "--num-proc", 1)
    assert result.exit_code == 0 and "Next: speculators-nb features" in result.stdout, result.output
    one_line(
        run("prepare", tmp_path / "a.jsonl", tmp_path / "p", "--verifier", VERIFIER, "--num-proc 1 --max-length 100"),
        "max_length",
    )
    result = run("features", tmp_path / "p", tmp_path / "f", "--verifier", VERIFIER)
    assert result.exit_code == 0 and "0 kept" in result.stdout, result.output
    one_line(run("regenerate", CORPUS / "train.jsonl", tmp_path / "b.jsonl"), "nothing would write the answers")
    one_line(
        run("regenerate", CORPUS / "train.jsonl", tmp_path / "a.jsonl", "--verifier", VERIFIER, "--temperature", 1),
        "other settings",
    )


def test_a_key_is_nowhere(tmp_path, monkeypatch):
    "It is sent, and is in no file, no output and no error."
    from fake_openai import FakeServer

    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-secret-that-is-mine")
    with FakeServer(tokenizer="letters") as server:
        ok = run(
            "regenerate",
            CORPUS / "train.jsonl",
            tmp_path / "a.jsonl",
            "--server",
            server.url,
            "--max-samples 4 --max-new-tokens 8",
        )
        assert ok.exit_code == 0, ok.output
        assert {body["authorization"] for body in server.seen()} == {"Bearer sk-a-secret-that-is-mine"}
        server.fault("400")
        bad = run(
            "regenerate", CORPUS / "heldout.jsonl", tmp_path / "b.jsonl", "--server", server.url, "--max-samples", 2
        )
    assert read_provenance(tmp_path / "a.jsonl")["inputs"]["server"]["path"] == server.url
    texts = [ok.output, bad.output, *(p.read_text() for p in tmp_path.iterdir() if p.is_file())]
    assert len(texts) >= 5 and not any("secret-that-is-mine" in t for t in texts)


def test_vocab(features, tmp_path):
    before = sorted(features.rglob("*"))
    result = run("vocab", features, 256, "--output-dir", tmp_path)
    assert result.exit_code == 0 and "256 of 2048 tokens" in result.stdout, result.output
    assert {"d2t-256.npy", "t2d-256.npy", "vocab.recipe.yaml", "provenance.json"} == {
        p.name for p in tmp_path.iterdir()
    }
    assert sorted(features.rglob("*")) == before  # nothing but what --output-dir names
    one_line(run("vocab", features, 4096, "--output-dir", tmp_path), "draft_vocab_size=4096")
    one_line(run("vocab", tmp_path, 16), str(tmp_path))


def test_what_made_it_lies_beside(features, drafter, tmp_path):
    assert (
        read_provenance(features)["command"] == "features" and read_provenance(drafter)["inputs"]["features"]["record"]
    )
    recipe = yaml.safe_load((drafter / "train.recipe.yaml").read_text())["train"]
    assert recipe["draft_vocab_size"] == 512 and recipe["num_layers"] is None and "ttt_steps=2" in recipe["extra"]


def test_its_recipe_repeats_a_run(features, tmp_path):
    result = run(
        "train",
        features,
        tmp_path / "one",
        "--total-seq-len 256 --extra disable_tqdm=true --extra max_steps=2 --seed 3",
    )
    assert result.exit_code == 0, result.output
    result = run("train", "--recipe", tmp_path / "one/train.recipe.yaml", "--output-dir", tmp_path / "two")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_serve_prints_the_command(drafter):
    result = run("serve", drafter, "--port", 8123)
    assert (
        result.exit_code == 0
        and f"vllm serve {drafter}" in result.stdout
        and "--host 127.0.0.1 --port 8123" in result.stdout
    ), result.output
    result = run("serve", VERIFIER, "--hidden-states", drafter / "states", "--aux-layer-ids", 1, "--aux-layer-ids", 3)
    assert (
        "extract_hidden_states" in result.stdout
        and "[1, 3, 6]" in result.stdout
        and str(drafter / "states") in result.stdout
    ), result.output
    one_line(run("serve", drafter.parent / "none"), "none")
    one_line(run("serve", VERIFIER, "--hidden-states", drafter / "states", "--aux-layer-ids", 9), "outside [0, 6]")


def program(folder, python):
    "A stand-in for vLLM."
    (folder / "vllm").write_text(
        f"#!{sys.executable}\nimport sys\nport = int(sys.argv[sys.argv.index('--port') + 1])\n{python}"
    )
    (folder / "vllm").chmod(0o755)
    return folder / "vllm"


def test_a_server_that_cannot_run(drafter, tmp_path):
    one_line(run("serve", drafter, "--run", "--port", free_port(), "--vllm", tmp_path / "none"), "none: no program")
    one_line(
        run("serve", drafter, "--run", "--port", free_port(), "--vllm", program(tmp_path, "sys.exit('no memory')")),
        "ended with code 1",
        "no memory",
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_a_server_lives_as_long_as_its_command(drafter, tmp_path, number):
    vllm = program(
        tmp_path,
        "import http.server\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self): "
        "self.send_response(200); self.end_headers()\n"
        "print('ready', flush=True)\nhttp.server.HTTPServer(('127.0.0.1', port), H).serve_forever()",
    )
    port, said = free_port(), tmp_path / "said"

    def typed():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
        with open(said, "w", buffering=1) as sys.stdout:
            cli.app(list(map(str, ["serve", drafter, "--run", "--port", port, "--vllm", vllm])))

    process = forked.begin(typed)
    try:
        while f"at http://127.0.0.1:{port}" not in (said.read_text() if said.exists() else ""):
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.join(20)
    finally:
        process.kill()
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    else:
        raise AssertionError("the server outlives its command")


@pytest.mark.statement("release-57")
def test_out_and_in_again(drafter, tmp_path):
    result = run("export", drafter, tmp_path / "theirs")
    assert result.exit_code == 0, result.output
    result = run("convert", tmp_path / "theirs", tmp_path / "ours", "--verifier", VERIFIER)
    assert result.exit_code == 0, result.output
    assert run("check", tmp_path / "ours").exit_code == 0
    one_line(run("convert", tmp_path / "theirs", tmp_path / "ours", "--verifier", VERIFIER), "exists already")
    one_line(run("convert", VERIFIER, tmp_path / "new", "--verifier", VERIFIER), "no known format")
    one_line(run("stitch-mtp", drafter, tmp_path / "s", "--verifier", VERIFIER), "only an MTP head")


def test_as_functions_in_a_notebook(features, tmp_path):
    "The same calls without a shell give objects, and their mistakes are ordinary exceptions."
    trainer = cli.train(
        features,
        tmp_path / "out",
        eval_share=0,
        total_seq_len=256,
        num_train_epochs=1,
        extra=["disable_tqdm=true", "max_steps=1"],
    )
    assert trainer.state.global_step == 1 and trainer.eval_dataset is None
    assert cli.check(tmp_path / "out").violations == []
    with pytest.raises(FileNotFoundError):
        cli.train(tmp_path / "none", tmp_path / "out")


def test_a_recipe_does_not_decide_what_becomes_of_the_output(tmp_path):
    "To repeat a recipe must not train over the run that it stands beside."
    from speculators_nb.cli.recipe import write_recipe

    text = write_recipe(
        tmp_path, "train", {"data_dir": "f", "overwrite": True, "resume": True, "seed": 0, "rank": 1, "world_size": 2}
    ).read_text()
    assert text.endswith("train:\n  data_dir: f\n  seed: 0\n")


# --- drafters of one's own --------------------------------------------------------------------------------------------


def in_a_process(folder, *lines):
    "(exit code, output) of command lines that are typed in a folder, one after the other in one process."

    def typed():
        os.chdir(folder)
        done = [run(*line.split()) for line in lines]
        return [(result.exit_code, result.output) for result in done]

    return forked.ask(typed)()


def test_help_says_how_an_argument_of_such_a_drafter_is_given():
    said = {name: " ".join(run(name, "--help").output.split()) for name in ("train", "check", "serve")}
    assert "An argument of such a drafter is given by --extra NAME=VALUE." in said["train"]
    assert all("--import" in text for text in said.values())
    assert "such a drafter" not in said["check"] + said["serve"]  # whose --extra is vLLM's


def test_a_drafter_of_one_s_own_is_imported(tmp_path):
    """`--import` and `import:` make a registered drafter a word of `algorithm`, also in the process of a stage, and its
    checkpoints loadable; the recipe that is left beside the drafter imports it again."""
    own = import_module("test_own_drafter")
    gated = own.GATED.replace('str = "gated"\n', 'str = "gated"\n    gate_start: float = 0.0\n')
    field = '    config_arguments = (*Eagle3DraftModel.config_arguments, "gate_start")\n'
    gated = gated.replace("    config_class = GatedConfig\n", f"    config_class = GatedConfig\n{field}")
    (tmp_path / "my_gated.py").write_text(own.HEAD + gated + "\n" + own.FORMAT)
    text = f"verifier: {own.RELEASE / 'verifier'}\ntrain: {{data_dir: {own.RELEASE / 'features'}, output_dir: new, "
    text += "algorithm: gated, total_seq_len: 32, num_train_epochs: 1, eval_share: 0, "
    text += "extra: [ttt_steps=2, disable_tqdm=true, gate_start=0.5]}\n"
    text += "check: {folder: new}\nrun: {output_dir: run}\n"
    (tmp_path / "plain.yaml").write_text(text)
    (tmp_path / "import.yaml").write_text(f"import: my_gated.py\n{text}")
    train = f"train {own.RELEASE / 'features'} out --algorithm gated --verifier {own.RELEASE / 'verifier'}"
    unknown, in_recipe, ran = in_a_process(tmp_path, train, "run plain.yaml --dry-run", "run import.yaml")
    assert unknown[0] == 2 and "algorithm='gated'" in unknown[1]
    assert in_recipe[0] == 2 and "plain.yaml: train.algorithm='gated'" in in_recipe[1]
    assert ran[0] == 0 and (tmp_path / "run/report.html").is_file(), ran
    left = yaml.safe_load((tmp_path / "new/train.recipe.yaml").read_text())["train"]
    assert left["import"] == ["my_gated.py"] and left["algorithm"] == "gated"
    assert json.loads((tmp_path / "new/config.json").read_text())["gate_start"] == 0.5  # an argument of its own

    unknown, checked, typed, exported = in_a_process(
        tmp_path,
        "check new",
        "check new --import my_gated.py",
        "run plain.yaml --dry-run --import my_gated.py",
        "export new native --format gatd --import my_gated.py",
    )
    assert unknown[0] == 1 and "gated" in unknown[1]
    assert checked == (0, "vLLM can serve this drafter.\n")
    assert typed[0] == 0 and typed[1].count("done") == 2, typed
    assert exported[0] == 2 and "can be written as gated" in exported[1], exported
