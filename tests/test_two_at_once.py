"""Two processes that are given the same output at once: one whole result, that of a run alone. Either both end well, or
one is refused in one line that names the output and what to do."""

import re
from pathlib import Path

import forked
import pytest
from by_day import by_day
from typer.testing import CliRunner

from speculators_nb.cli import main as cli

ROOT = Path(__file__).parents[1]
VERIFIER, CORPUS = ROOT / "data/tiny-verifier", ROOT / "data/corpus/train.jsonl"
FEW = ("--max-samples", 8)
STEPS = ("--total-seq-len", 128, "--max-steps", 2, "--draft-vocab-size", 256, "--extra", "ttt_steps=2")
# command -> its words, with {out} for its output and names of earlier ones' outputs; the files that must be the same
COMMANDS = {
    "regenerate": ((CORPUS, "{out}.jsonl", "--verifier", VERIFIER, *FEW, "--max-new-tokens", 8), "out.jsonl"),
    "prepare": ((CORPUS, "{out}", "--verifier", VERIFIER, *FEW, "--max-length", 96, "--num-proc", 1), "out/*.arrow"),
    "features": (("{prepare}", "{out}", "--verifier", VERIFIER, "--dtype", "float32"), "out/*.safetensors"),
    "train": (("{features}", "{out}", *STEPS), "out/model.safetensors"),
    "evaluate": (("{train}", CORPUS, *FEW[:1], 2, "--max-new-tokens", 8, "--output-dir", "{out}"), "out/positions.csv"),
    "vocab": (("{features}", 256, "--output-dir", "{out}"), "out/*.npy"),
    "export": (("{train}", "{out}"), "out/*.safetensors"),
    "convert": (("{export}", "{out}", "--verifier", VERIFIER), "out/*.safetensors"),
}


def words_of(command, folder, made):
    others = {name: made / name / "out" for name in COMMANDS}
    return [command, *(str(word).format(out=folder / "out", **others) for word in COMMANDS[command][0])]


def run(words):
    done = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200", "NO_COLOR": "1", "TQDM_DISABLE": "1"})
    return done.exit_code, done.output


def work(words, start, results):
    start.wait(60)
    results.put(run(words))


def names(folder):
    "All that lies there, but for locks."
    found = (str(p.relative_to(folder)) for p in folder.rglob("*"))
    return sorted(name for name in found if not name.endswith(".lock"))


def content(folder, pattern):
    return {p.name: p.read_bytes() for p in sorted(folder.glob(pattern))}


# the others write files and folders as `prepare` and `train` do
BY_DAY = ("regenerate", "prepare", "features", "train", "evaluate")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A function: all outputs up to a command's, each made alone; (their folder, command -> what lies there)."
    folder, there = tmp_path_factory.mktemp("made"), {}

    def up_to(last):
        for command in [*COMMANDS][len(there) : [*COMMANDS].index(last) + 1]:
            (folder / command).mkdir()
            words = words_of(command, folder / command, folder)
            code, output = forked.ask(lambda words=words: run(words))()
            assert code == 0, (command, output)
            there[command] = names(folder / command)
        return folder, there

    return up_to


@pytest.mark.parametrize("command", by_day(COMMANDS, BY_DAY))
def test_one_whole_result(command, made, tmp_path):
    (made, there), start, results = made(command), forked.FORK.Barrier(2), forked.FORK.Queue()
    words = words_of(command, tmp_path, made)
    both = [forked.begin(work, words, start, results) for _ in range(2)]
    found = sorted(results.get(timeout=120) for _ in both)
    [process.join(60) for process in both]
    assert found[0][0] == 0, found
    for code, output in found:
        if code:
            line = output.strip().splitlines()[-1]
            assert code == 2 and "Traceback" not in output and str(tmp_path / "out") in line, output
            assert re.search("wait|another|overwrite|other", line), line
    pattern = COMMANDS[command][1]
    right = content(made / command, pattern)
    assert right and content(tmp_path, pattern) == right
    assert names(tmp_path) == there[command]
