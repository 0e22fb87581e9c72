"""README.md is nbs/index.ipynb, and what both say about the repository is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from readme import readme  # noqa: E402
from web import books, overview  # noqa: E402

TEXT, PICTURES = readme()
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def test_readme_is_the_index_notebook():
    assert (ROOT / "README.md").read_text() == TEXT, "run `make export`"
    for path, png in PICTURES.items():
        assert (ROOT / path).read_bytes() == png, f"{path}: run `make export`"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_relative_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", (ROOT / page).read_text())
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


def test_the_readme_is_short():
    assert len(TEXT) <= 6000
    assert TEXT.count("![") == len(PICTURES) == 1 and "![None]" not in TEXT


def test_every_notebook_is_on_the_page_of_notebooks():
    sections = books.groups()
    page = overview.all_notebooks((ROOT / "docs/notebooks.md").read_text(), sections)
    assert [p for p in NOTEBOOKS if p.name != "index.ipynb" and f"](/{p.relative_to(ROOT / 'nbs')})" not in page] == []
    folders = {p.parent.name for p in NOTEBOOKS} - {"nbs"}
    assert set(re.findall(r"\(\.\./nbs/(\w+)\) \|", (ROOT / "docs/notebooks.md").read_text())) == folders


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/installation.md"])
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    used = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", (ROOT / page).read_text(), flags=re.M))
    assert used and used <= targets


def test_shell_commands_exist():
    """Every `speculators-nb` line of the way to a served drafter names a command with these options."""
    from typer.main import get_command

    from speculators_nb.cli.main import app

    commands = get_command(app).commands
    lines = re.findall(r"^speculators-nb (\w+)(.*)$", (ROOT / "docs/from_chats.md").read_text(), flags=re.M)
    assert lines
    for name, rest in lines:
        options = {o for p in commands[name].params for o in p.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= options, name


def test_ci_runs_the_test_line_of_the_readme():
    steps = re.findall(r"^step (.+)$", (ROOT / ".ci/run").read_text(), flags=re.M)
    (line,) = re.findall(r"^(make test\b.*?) *#", TEXT, flags=re.M)
    assert line in steps and any("browser-test" in step for step in steps)
    assert f"\n{line} " in (ROOT / "docs/installation.md").read_text()


def test_quarto_files_parse_and_agree():
    """`nbdev_docs` renders with Quarto where it is installed; here its three files are read."""
    quarto, nbdev, sidebar = (
        yaml.safe_load((ROOT / f"nbs/{f}.yml").read_text()) for f in ("_quarto", "nbdev", "sidebar")
    )
    assert quarto["metadata-files"] == ["nbdev.yml", "sidebar.yml"]
    assert nbdev["project"]["output-dir"] == "_docs" and nbdev["website"]["title"] == "speculators_nb"
    listed = [
        p for section in sidebar["website"]["sidebar"]["contents"] for p in (ROOT / "nbs").glob(section["contents"])
    ]
    assert sorted(listed) == NOTEBOOKS, "every notebook has one place in the sidebar"


def test_nbdev_leaves_the_quarto_files_alone(tmp_path):
    """nbdev writes nbdev.yml itself before it renders; ours must be what it would write."""
    import shutil

    for f in ("pyproject.toml", "settings.ini"):
        shutil.copy(ROOT / f, tmp_path)
    (tmp_path / "nbs").mkdir()
    subprocess.run(
        [sys.executable, "-c", "from nbdev.quarto import refresh_quarto_yml; refresh_quarto_yml()"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "nbs/nbdev.yml").read_text() == (ROOT / "nbs/nbdev.yml").read_text()
