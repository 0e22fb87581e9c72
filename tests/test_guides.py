"""The guides: their tables are those of the committed results and of docs/published.yml, what is computed is computed
again, every published number has a source, and the site lists the pages."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import guides  # noqa: E402

PAGES = {page: (ROOT / f"docs/{page}.md").read_text() for page in guides.PAGES}
PLAN = ROOT / "benchmarks/plan"


def module(path):
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_the_results(page):
    assert guides.render(PAGES[page]) == PAGES[page], "python docs/guides.py"


def test_every_block_is_on_one_page():
    used = [name for page in PAGES.values() for _, name, _ in guides.MADE.findall(page)]
    assert sorted(used) == sorted(guides.BLOCKS)


def test_a_changed_result_changes_its_page(monkeypatch):
    changed = [row | {"mean_length": "9.99"} for row in guides.results("drafters", "comparison")]
    monkeypatch.setattr(guides, "results", lambda *_: changed)
    assert "9.99" in guides.interval()


def entries(part):
    "The entries of a part of docs/published.yml: each has a source."
    return part if isinstance(part, list) else [part]


def test_every_published_number_has_a_source():
    parts = yaml.safe_load((ROOT / "docs/published.yml").read_text()).values()
    found = [entry for part in parts for entry in entries(part)]
    assert len(found) > 20
    for entry in found:
        assert re.match(r"https://\S+$", entry["url"]) and len(entry["source"]) > 3, entry
    text = "".join(PAGES.values())
    assert not {entry["url"] for entry in found} - set(re.findall(r"\]\((https://[^)\s]+)\)", text))


def test_every_table_row_says_how_it_is_known():
    "Rows with a source column: published, computed or measured here."
    for page in PAGES.values():
        for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
            head, _, *rows = table.splitlines()
            if re.search(r"\| (source|how we know) \|$", head):
                assert all(re.search(r"\*(published|computed|measured here)\*", row) for row in rows)


@pytest.fixture(scope="module")
def tables():
    return module(PLAN / "run.py").tables()


@pytest.mark.parametrize("name", ["drafters", "runs", "verifiers"])
def test_the_plan_is_computed_again(tables, name):
    stored = pd.read_csv(PLAN / f"results/{name}.csv", keep_default_na=False)
    assert json.loads(pd.DataFrame(tables[name]).to_json(orient="records")) == json.loads(
        stored.to_json(orient="records")
    )


def test_what_the_pages_say_of_the_plan(tables):
    "Sentences with numbers of the plan in them."
    rows = {row["drafter"]: row for row in tables["drafters"]}
    assert all(row["trees"] for row in rows.values())
    assert [round(16 * rows[name]["trained_millions"] / 1e3) for name in ("eagle3", "dflash")] == [4, 16]
    assert 3.5 < rows["dflash2"]["trained_millions"] / rows["eagle3"]["trained_millions"] < 4.5
    hours = {row["conversations"]: row for row in tables["runs"]}[50_000]
    # a tenth of it, with five epochs for three; published: 143 and 327 seconds on two devices
    longer = [
        2 * 143 / 3600 / (hours["extraction_device_hours"] / 10),
        2 * 327 / 3600 / (hours["training_device_hours"] / 10 * 5 / 3),
    ]
    assert [round(ratio, 1) for ratio in longer] == [1.7, 1.7]


def test_the_site_and_the_readme_have_the_pages():
    from web import places

    assert {f"docs/{page}.md" for page in PAGES} <= places.GUIDES.keys()
    readme = (ROOT / "README.md").read_text()
    assert all(f"(docs/{page}.md)" in readme for page in PAGES)


def test_the_guides_speak_of_commands_that_exist():
    from speculators_nb.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    text = "".join(PAGES.values())
    assert set(re.findall(r"speculators-nb ([\w-]+)", text)) <= known
