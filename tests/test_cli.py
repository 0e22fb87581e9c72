"The command line: light, helpful, one line per mistake, and the same functions as in a notebook."
import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fastcore.docments import docments
from typer.testing import CliRunner

from speculators_nb import cli

ROOT = Path(__file__).parents[1]
VERIFIER, CORPUS = ROOT / "data/tiny-verifier", ROOT / "data/corpus"
COMMANDS = {c.name: c for c in cli.app.registered_commands}


def run(*args):
    return CliRunner().invoke(cli.app, [str(a) for a in args], prog_name="speculators-nb", env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


# --- light and helpful ------------------------------------------------------------------------------------------------

def test_help_needs_no_heavy_module():
    got = python("import sys, speculators_nb.cli; print([m for m in ('torch', 'transformers', 'pandas', 'matplotlib', 'datasets', 'numpy') if m in sys.modules])")
    assert got.stdout.strip() == "[]", got.stdout + got.stderr


def test_help_waits_for_nothing_heavy():
    """What makes a command slow to answer is what it imports."""
    got = python("""import sys
sys.argv = ['speculators-nb', '--help']
from speculators_nb.cli import app
try: app()
except SystemExit: pass
print(sorted({'torch', 'transformers', 'datasets', 'matplotlib', 'pandas'} & set(sys.modules)))""")
    assert got.returncode == 0 and "evaluate" in got.stdout
    assert got.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_is_this_one():
    from importlib.metadata import entry_points
    assert {e.value for e in entry_points(group="console_scripts", name="speculators-nb")} == {"speculators_nb.cli:app"}


def test_no_arguments_shows_help():
    assert all(name in run().output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_an_option_with_help(name):
    "An option for each parameter of the function, with the comment beside it as its help."
    function, result = getattr(cli, name), run(name, "--help")
    assert result.exit_code == 0 and function.__doc__ in result.output
    for p in inspect.signature(function).parameters.values():
        spelt = p.name if p.default is p.empty else f"--{p.name.replace('_', '-')}"
        assert spelt in result.output
    assert all(comment for p, comment in docments(function).items() if p != "return"), "a parameter without a comment has no help"


def test_heavy_imports_are_inside():
    tree = ast.parse(Path(cli.__file__).read_text())
    tops = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))}
    assert tops <= {"functools", "inspect", "json", "logging", "os", "pathlib", "typing", "typer", "fastcore"}


def test_demo_mirrors_the_library():
    from speculators_nb.demo import demo
    shell, library = (list(inspect.signature(f).parameters.values()) for f in (cli.demo, demo))
    assert [(p.name, p.default) for p in shell] == [(p.name, p.default) for p in library]


@pytest.mark.parametrize("algorithm,given,arch", [("eagle3", (), "llama"), ("dflash", (), "qwen3"), ("dflash", ("--draft-arch", "llama"), "llama"), ("medusa", (), "llama")])
def test_layers_that_an_algorithm_needs_are_its_default(tmp_path, monkeypatch, algorithm, given, arch):
    from speculators_nb.train import drafter
    asked = {}
    (tmp_path / "data_config.json").write_text('{"model": {"target_model_path": "somewhere"}}')
    monkeypatch.setattr(drafter, "train_drafter", lambda data, out, verifier, algorithm, draft_arch, *args, **kwargs: asked.update(arch=draft_arch, verifier=verifier))
    run("train", tmp_path, tmp_path / "out", "--algorithm", algorithm, *given)
    assert asked == dict(arch=arch, verifier="somewhere")


# --- mistakes -----------------------------------------------------------------------------------------------------------

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


def test_missing_paths(tmp_path):
    one_line(run("train", tmp_path / "none", tmp_path / "out"), "no data_config.json", "speculators-nb features")
    one_line(run("check", tmp_path / "none"), "none")
    one_line(run("features", tmp_path / "none", CORPUS / "heldout.jsonl", tmp_path / "out"), "none")
    one_line(run("features", VERIFIER, tmp_path / "none.jsonl", tmp_path / "out"), "No such file", "none.jsonl")
    one_line(run("evaluate", tmp_path / "none", CORPUS / "heldout.jsonl"), "none")


def test_bad_data_is_named(conversations, tmp_path):
    one_line(run("features", VERIFIER, conversations('{"messages": []}\n{"mess'), tmp_path / "out"), "c.jsonl, line 2: not JSON")
    one_line(run("features", VERIFIER, conversations('{"a": 1}', "c.json"), tmp_path / "out"), "holds a dict, expected a list")
    one_line(run("features", VERIFIER, conversations('{"messages": []}'), tmp_path / "out"), "no row left of 1 conversations")
    one_line(run("features", VERIFIER, CORPUS / "heldout.jsonl", tmp_path / "out", "--dtype", "bf61", "--max-samples", 1), "dtype='bf61'")


def test_traceback_on_request(tmp_path):
    result = run("--traceback", "train", tmp_path / "none", tmp_path / "out")
    assert isinstance(result.exception, FileNotFoundError)
    assert not isinstance(run("train", tmp_path / "none", tmp_path / "out").exception, FileNotFoundError)   # the switch does not stick


def test_a_bug_is_not_hidden():
    app = typer.Typer()

    @cli.command(report=str, app=app)
    def broken():
        "Raise what no caller can mend."
        raise RuntimeError("a bug")
    assert isinstance(CliRunner().invoke(app, []).exception, RuntimeError)


# --- reading -------------------------------------------------------------------------------------------------------------

def test_read_conversations(conversations):
    rows = [{"messages": [i]} for i in range(3)]
    lines = conversations("\n\n".join(map(json.dumps, rows)) + "\n")
    whole = conversations(json.dumps(rows, indent=1), "c.json")
    for path in (lines, whole):
        assert cli.read_conversations(path) == rows and cli.read_conversations(path, 2) == rows[:2]


def test_extra_pairs():
    assert cli._pairs(["warmup-steps=100", "loss_fn={\"ce\": 0.1}", "family=qwen3", "a=b=c"]) == {
        "warmup_steps": 100, "loss_fn": {"ce": 0.1}, "family": "qwen3", "a": "b=c"}
    with pytest.raises(ValueError, match="write name=value"):
        cli._pairs(["warmup_steps"])


# --- the whole way -----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "features"
    result = run("features", VERIFIER, CORPUS / "train.jsonl", folder, "--max-samples", 16, "--max-length", 192, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "16 rows" in result.stdout and "16 feature files written, 0 kept" in result.stdout
    return folder


@pytest.fixture(scope="module")
def drafter(features):
    folder = features.parent / "drafter"
    result = run("train", features, folder, "--total-seq-len", 256, "--num-train-epochs", 1, "--draft-vocab-size", 512, "--save-dtype", "bfloat16",
                 "--learning-rate", "1e-3", "--extra", "disable_tqdm=true", "--extra", "ttt_steps=2", "--extra", "logging_steps=1")
    assert result.exit_code == 0, result.output
    assert "eval_loss" in result.stdout and "Next: speculators-nb evaluate" in result.stdout
    return folder


def test_features_are_kept_when_asked_again(features):
    result = run("features", VERIFIER, CORPUS / "train.jsonl", features, "--max-samples", 16, "--max-length", 192, "--dtype", "float32")
    assert "0 feature files written, 16 kept" in result.stdout
    one_line(run("features", VERIFIER, CORPUS / "train.jsonl", features, "--max-samples", 15, "--max-length", 192), "another origin")


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


def test_evaluate(drafter, tmp_path):
    result = run("evaluate", drafter, CORPUS / "heldout.jsonl", "--max-samples", 2, "--max-new-tokens", 12, "--output-dir", tmp_path,
                 "--temperatures", 0, "--temperatures", 1)
    assert result.exit_code == 0, result.output
    assert "mean_length" in result.stdout and "n-gram" in result.stdout
    assert all(row["domain"] in result.stdout for row in cli.read_conversations(CORPUS / "heldout.jsonl", 2))
    assert {p.name for p in tmp_path.iterdir()} == {"summary.csv", "positions.csv", "acceptance.png"}


def test_resume_goes_on(features, drafter):
    before = set(os.listdir(drafter))
    result = run("train", features, drafter, "--total-seq-len", 256, "--num-train-epochs", 2, "--draft-vocab-size", 512, "--resume",
                 "--extra", "disable_tqdm=true", "--extra", "ttt_steps=2")
    assert result.exit_code == 0, result.output
    first = min(int(n.split("-")[1]) for n in before if n.startswith("checkpoint-"))
    assert f"checkpoint-{2 * first}" in os.listdir(drafter)


def test_misspelt_extra(features, tmp_path):
    one_line(run("train", features, tmp_path, "--extra", "ttt_step=3"), "ttt_step=3", "Did you mean ttt_steps?")
    one_line(run("train", features, tmp_path, "--algorithm", "eagel"), "eagel")
    one_line(run("train", features, tmp_path, "--eval-share", "1.5"), "eval_share=1.5")
    one_line(run("train", features, tmp_path, "--optimizer", "sgd"), "adamw, muon")


def test_regenerated_answers(tmp_path):
    result = run("features", VERIFIER, CORPUS / "train.jsonl", tmp_path / "f", "--max-samples", 3, "--regenerate", "--max-new-tokens", 24)
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "f/regenerated.jsonl").read_text().splitlines()) >= 3


def test_as_functions_in_a_notebook(features, tmp_path):
    "The same calls without a shell give objects, and their mistakes are ordinary exceptions."
    trainer = cli.train(features, tmp_path / "out", eval_share=0, total_seq_len=256, num_train_epochs=1, extra=["disable_tqdm=true", "max_steps=1"])
    assert trainer.state.global_step == 1 and trainer.eval_dataset is None
    assert cli.check(tmp_path / "out") == []
    with pytest.raises(FileNotFoundError):
        cli.train(tmp_path / "none", tmp_path / "out")
