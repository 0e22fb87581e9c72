"""The page "On a cluster": every command on it is one of the program's, and its torchrun lines are run, at night, as
they are on the page, with folders, numbers of processes and the address of this machine in place of the page's."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

from speculators_nb.cli.main import app
from speculators_nb.serve.server import free_port

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/on_a_cluster.md").read_text().replace(" \\\n    ", " ")  # one line for each command
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
LINES = [line for block in BLOCKS for line in block.splitlines() if "speculators-nb" in line]
COMMANDS = get_command(app).commands
PROGRAM = Path(sys.executable).with_name("speculators-nb")


def words_of(line):
    "The options of torchrun (None: one process alone), and the command with its words."
    words = shlex.split(line)
    if words[0] == "srun":
        words = words[next(i for i, word in enumerate(words) if word.startswith("speculators-nb")) :]
    if words[0] == "speculators-nb":
        return None, words[1:]
    assert words[0] == "speculators-nb-torchrun"
    at = next(i for i, word in enumerate(words) if word in COMMANDS)
    return words[1:at], words[at:]


def section(title):
    "The lines below a heading of the page."
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line for line in text.splitlines() if "speculators-nb" in line and not line.startswith("`")]


def check(line):
    "Errors: what a command, an option or a number of arguments is not."
    launch, (name, *words) = words_of(line)
    if launch is not None:
        get_args_parser().parse_args([*launch, "script"])
    command = COMMANDS[name]
    options = {flag: p for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")}
    used = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert set(used) <= options.keys(), (name, sorted(set(used) - options.keys()))
    command.make_context(name, words)


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page_is_one_of_the_program(line):
    check(line)


@pytest.mark.parametrize("wrong", ["--no-such-option", "--total-seq-len many"])
def test_a_wrong_command_is_seen(wrong):
    line = f"speculators-nb-torchrun --standalone train features drafter {wrong}"
    with pytest.raises(Exception, match="no_such_option|no-such-option|many"):
        check(line)


def test_the_page_is_in_the_site_and_in_the_readme():
    sys.path.insert(0, str(ROOT / "docs"))
    from web.places import PAGES

    assert "docs/on_a_cluster.md" in PAGES
    for file in ("README.md", "docs/first_run.md"):
        assert "on_a_cluster.md" in (ROOT / file).read_text(), file


def started(line, processes, **instead):
    "The page's line as a process, on this machine's CPU, with other words for some of its own."
    launch, words = words_of(line.replace("$HEAD:29500", f"127.0.0.1:{PORT}"))
    launch[launch.index("--nproc-per-node") + 1] = str(processes)
    words = [str(instead.pop(word, word)) for word in words]
    if words[0] == "train":
        words[words.index("--total-seq-len") + 1] = "256"
        words += ["--max-steps", "3", "--verifier", str(ROOT / "data/tiny-verifier")]
    command = [sys.executable, "-c", TORCHRUN, *launch, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


TORCHRUN = "from speculators_nb.distributed.torchrun import main; main()"
PORT = free_port()


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    from speculators_nb.cli.data_commands import features as extract

    folder = tmp_path_factory.mktemp("cluster") / "features"
    extract(str(ROOT / "data/tiny-verifier"), str(ROOT / "data/answers/train.jsonl"), folder, max_samples=24)
    return folder


def ended(jobs):
    outputs = [job.communicate(timeout=500)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), "\n".join(outputs)[-6000:]


@pytest.mark.nightly
def test_the_line_for_one_machine_trains(features, tmp_path):
    "By day a shorter line does so: test_ranks.py."
    (line,) = section("Training: one machine")
    ended([started(line, 2, features=features, drafter=tmp_path / "drafter")])
    assert (tmp_path / "drafter/model.safetensors").is_file()


@pytest.mark.nightly
def test_the_line_for_two_machines_trains(features, tmp_path):
    "Two agents, each as a machine would start it, with one process each."
    (line,) = section("Training: two machines")
    ended([started(line, 1, features=features, drafter=tmp_path / "drafter") for _ in range(2)])
    assert (tmp_path / "drafter/model.safetensors").is_file()


@pytest.mark.nightly
def test_the_line_for_long_rows_trains(features, tmp_path):
    (line,) = section("Rows that do not fit a device")
    ended([started(line, 4, features=features, drafter=tmp_path / "drafter")])
    assert (tmp_path / "drafter/model.safetensors").is_file()


@pytest.mark.nightly
def test_the_line_for_split_weights_trains(features, tmp_path):
    (line,) = section("Weights that do not fit a device")
    ended([started(line, 2, features=features, drafter=tmp_path / "drafter")])
    assert (tmp_path / "drafter/model.safetensors").is_file()


@pytest.mark.nightly
def test_the_line_for_shared_features_writes_each_row_once(features, tmp_path):
    line = section("Row-wise jobs")[0].replace("features prepared features", "features prepared output")
    verifier = {"Qwen/Qwen3-8B": ROOT / "data/tiny-verifier"}
    ended([started(line, 2, prepared=features / "rows", output=tmp_path / "features", **verifier)])
    names = [sorted(f.name for f in folder.glob("hs_*")) for folder in (features, tmp_path / "features")]
    assert names[0] == names[1] != []
