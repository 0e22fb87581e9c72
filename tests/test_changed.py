"""`make quick` picks what to run by what changed (tests/changed.py)."""

import subprocess
import sys
import time
from pathlib import Path

import changed
import pytest

ROOT = Path(__file__).parents[1]
ATTENTION = "nbs/nn/02_attention.ipynb"
NOTEBOOKS = [ATTENTION, "nbs/nn/06a_losses.ipynb", "nbs/tutorials/01_first.ipynb", "nbs/index.ipynb"]
SOURCES = {
    "tests/test_masks.py": "from speculators_nb.nn.attention import ttt",
    "tests/test_late.py": "def test():\n    import speculators_nb.nn.attention as m",
    "tests/test_other.py": "from speculators_nb.nn import attention_of_others\nfrom speculators_nb import nn",
    "tests/test_named.py": "from speculators_nb.nn import attention",
    "tests/test_matrix.py": "from matrix import V\nfrom bad.draw import draw",
    "tests/test_pages.py": "TEXT = (ROOT / 'docs/differences.md').read_text() + open('Makefile').read()",
    "tests/test_corpus.py": "FOLDER = ROOT / 'data/corpus'",
}


@pytest.mark.parametrize(
    "path, module",
    [
        (ATTENTION, "speculators_nb.nn.attention"),
        ("nbs/index.ipynb", None),
        ("speculators_nb/nn/attention.py", "speculators_nb.nn.attention"),
        ("speculators_nb/nn/__init__.py", "speculators_nb.nn"),
        ("benchmarks/gpu/equal.py", "benchmarks.gpu.equal"),
        ("Makefile", None),
    ],
)
def test_the_module_of_a_file(path, module):
    assert changed.module_of(path) == module


def test_files_of_tests_have_short_names_too():
    assert changed.names_of("tests/bad/draw.py") == {"tests.bad.draw", "bad.draw", "draw"}
    assert changed.names_of("speculators_nb/nn/attention.py") == {"speculators_nb.nn.attention"}


@pytest.mark.parametrize(
    "paths, tasks",
    [
        (["tests/test_masks.py"], ["tests/test_masks.py"]),
        ([ATTENTION], [ATTENTION, "tests/test_masks.py", "tests/test_late.py", "tests/test_named.py"]),
        (
            ["speculators_nb/nn/attention.py"],
            [ATTENTION, "tests/test_masks.py", "tests/test_late.py", "tests/test_named.py"],
        ),
        (["nbs/tutorials/01_first.ipynb"], ["nbs/tutorials/01_first.ipynb"]),
        (["speculators_nb/nn/__init__.py"], ["tests/test_other.py", "tests/test_named.py"]),
        (["tests/matrix.py"], ["tests/test_matrix.py"]),
        (["tests/bad/draw.py"], ["tests/test_matrix.py"]),
        (["docs/differences.md"], ["tests/test_pages.py"]),
        (["Makefile"], ["tests/test_pages.py"]),
        (["data/corpus/train.jsonl"], ["tests/test_corpus.py"]),
        (["data/corpus2/train.jsonl", "LICENSE", "nbs/gone/01_gone.ipynb", "tests/test_gone.py"], []),
        (
            [ATTENTION, "tests/test_named.py"],
            ["tests/test_named.py", ATTENTION, "tests/test_masks.py", "tests/test_late.py"],
        ),
    ],
)
def test_what_is_run_for_a_change(paths, tasks):
    assert changed.chosen(paths, SOURCES, NOTEBOOKS) == tasks


def test_this_repository():
    sources = {"tests/test_changed.py": Path(__file__).read_text()}
    assert changed.chosen(["tests/changed.py"], sources, []) == ["tests/test_changed.py"]
    notebooks = [str(p.relative_to(ROOT)) for p in (ROOT / "nbs").rglob("*.ipynb")]
    modules = [n for n in notebooks if (m := changed.module_of(n)) and (ROOT / f"{m.replace('.', '/')}.py").exists()]
    assert len(modules) > 50, "a notebook's name says which module it is the source of"


def test_the_longest_come_last():
    times = {"a": 90, "b": 60, "c": 40}
    assert changed.ordered(["a", "b", "c", "new"], times, 100) == ["c", "new", "b", "a"]
    assert changed.ordered(["a", "b", "c", "new"], times, 1000) == ["a", "b", "c", "new"]


def python(task):
    return [sys.executable, "-c", task]


def test_what_has_no_time_is_left_out(capfd):
    began = time.monotonic()
    tasks = [
        "print('fine')",
        "import time; time.sleep(60)",
        "raise SystemExit('broken')",
        "import time; time.sleep(61)",
    ]
    results = changed.run([*tasks, "print('late')"], 6, 2, python)
    assert time.monotonic() - began < 30
    assert {task: r[0] for task, r in results.items()} == {tasks[0]: 0, tasks[1]: None, tasks[2]: 1, tasks[3]: None}
    lines, fine = changed.report([*tasks, "print('late')"], results, 6)
    assert not fine and "2 of 5 ran: FAILED: raise" in lines[0]
    assert "left out" in lines[1] and all(task in lines[1] for task in (tasks[1], tasks[3], "print('late')"))
    assert "broken" in capfd.readouterr().out, "a failure is shown"


def test_all_is_well():
    results = changed.run(["pass", "raise SystemExit(5)"], 60, 2, python)  # 5: pytest found nothing to run
    assert changed.report(list(results), results, 60) == (["2 of 2 ran: all passed"], True)
    assert changed.report([], {}, 60)[1]


def test_times_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(changed, "TIMES", tmp_path / "made/changed.json")
    assert changed.remembered() == {}
    changed.remember({"a": (0, 3.0, ""), "b": (None, 9.0, "")})
    changed.remember({"b": (None, 2.0, ""), "c": (1, 1.0, "")})
    assert changed.remembered() == {"a": 3.0, "b": 9.0, "c": 1.0}
    changed.TIMES.write_text("[broken")
    assert changed.remembered() == {}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    def git(*arguments):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(**files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git("init", "-b", "main")
    write(kept="1", edited="1", gone="1", **{".gitignore": "ignored"})
    git("add", ".")
    git("commit", "-m", "one")
    return git, write, tmp_path


def test_what_changed(repository):
    git, write, folder = repository
    assert changed.changed_files() == []
    write(edited="2", new="1", ignored="1")
    (folder / "gone").unlink()
    assert changed.changed_files() == ["edited", "gone", "new"]
    git("checkout", "-b", "branch")
    git("add", ".")
    git("commit", "-m", "two")
    git("checkout", "main")
    write(kept="2")
    git("commit", "-am", "three")
    git("checkout", "branch")
    write(added="1")
    assert changed.changed_files() == ["added"]
    assert changed.changed_files("main") == ["added", "edited", "gone", "new"], "what main did since is not ours"
    with pytest.raises(SystemExit, match="nowhere"):
        changed.changed_files("nowhere")
