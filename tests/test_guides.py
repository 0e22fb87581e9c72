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


@pytest.mark.parametrize(
    "tiny, real, expected",
    [
        ((0.1, 0.2), (0.01, 0.1), "same sign"),
        ((0.1, 0.2), (-0.1, -0.01), "opposite sign"),
        ((-0.2, -0.1), (-0.1, 0.1), "not seen"),
        ((-0.1, 0.1), (0.1, 0.2), "with SmolLM2 alone"),
        ((-0.1, 0.1), (-0.1, 0.2), "no difference in either"),
    ],
)
def test_what_two_intervals_say(tiny, real, expected):
    assert guides.verdict(*(pd.Series(interval, ["low", "high"]) for interval in (tiny, real))) == expected


def test_numbers_in_prose_are_those_of_the_results():
    for page, phrases in guides.quotes().items():
        text = (ROOT / page).read_text()
        assert not {name: phrase for name, phrase in phrases.items() if phrase not in text}, page


def test_the_time_of_make_real_is_that_of_its_record():
    times = yaml.safe_load((ROOT / "docs/times.yml").read_text())
    seconds = guides.make_real()["seconds from nothing"]["value"]
    assert times["make real"]["seconds"] == round(float(seconds))


def no_numbers(text, phrases=()):
    "What is left of a page without made blocks, quoted phrases, code, link targets and versions."
    for phrase in phrases:
        text = text.replace(phrase, "")
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", guides.MADE.sub("", text))
    return re.sub(r"(speculators`?|EAGLE-|vLLM|DFlash) ?\d[\d.]*", "", text)


def test_no_number_of_the_measured_claims_is_typed():
    "A number that no result changes would outlive its result."
    readme = (ROOT / "README.md").read_text()
    (claims,) = re.findall(r"^## Three results\n(.*?)^## ", readme, flags=re.M | re.S)
    left = no_numbers(claims, guides.quotes()["README.md"].values()) + no_numbers(PAGES["measured"])
    assert re.findall(r".{,30}\d.{,30}", left.replace(" 0.9.0", "")) == []


STAMP = dict(date="2026-11-27", torch="2.11.0", commit="abc1234")
ROWS = dict(
    device=[STAMP | dict(device="NVIDIA X1", peak_flops=1e15)],
    equal=[STAMP | row for row in (dict(ok=True), dict(ok=False), dict(error="out of time"))],
    decode=[STAMP | dict(different=0)],
    step=[
        STAMP | dict(setting=setting, length=length, side=side) | row
        for setting, length, side, row in (
            ("MTP", 8192, "upstream", dict(seconds=0.3, peak_bytes=4e9)),
            ("MTP", 8192, "ours", dict(seconds=0.2, peak_bytes=1e9, flops=1e14)),
            ("MTP", 8192, "ours", dict(seconds=0.1, peak_bytes=1e9, flops=1e14, torch="2.13.0")),
            ("MTP", 2048, "ours", dict(seconds=0.1, peak_bytes=1e9, flops=1e13)),
            ("DFlash", 8192, "upstream", dict(error="AssertionError")),
        )
    ],
)


def test_what_ran_on_an_accelerator_is_read_from_the_results(tmp_path):
    assert "Nothing here has been run on an accelerator" in guides.on_devices(tmp_path)
    for name, size in {"x1": "device", "toy": "toy"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(dict(size=size, rows=ROWS)))
    made = guides.on_devices(tmp_path)
    assert "run on NVIDIA X1. " in made and "results/x1/" in made and "results/toy/" not in made
    assert "definition: 1 of 2." in made and "verifier's: 1 of 1." in made
    at = "2026-11-27 | abc1234 |"
    assert f"| MTP | 8,192 | 1.50 | 0.25 | 50 % | {at} 2.11.0 |" in made
    assert f"| MTP | 8,192 | not measured | not measured | 100 % | {at} 2.13.0 |" in made, "another torch"
    assert f"| MTP | 2,048 | not measured | not measured | 10 % | {at} 2.11.0 |" in made


def test_no_page_says_that_nothing_ran_where_results_are():
    pages = {
        path: guides.MADE.sub("", path.read_text()) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    }
    denial = r"(?i)(nothing|never|not)[^.|]{0,40}\b(run|ran|measured)\b[^.|]{0,20}\b(accelerators?|GPUs?)\b"
    assert not {path.name: found[0] for path, text in pages.items() if (found := re.search(denial, text))}


def test_the_plan_promises_no_more_than_was_measured():
    from speculators_nb.plan.requirements import Machine

    found = guides.devices().values()
    best = max(
        float(line[4].rstrip(" %")) for rows in found for line in guides.step_pairs(rows) if line[0][:7] == "EAGLE-3"
    )
    copied = max(row["copy_bytes"] for rows in found for row in rows["device"] if "H100" in row["device"])
    assert 100 * Machine().mfu <= best + 0.5 and Machine().bandwidth <= copied / 1e12


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


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["drafters", "runs", "verifiers", "published"])
def test_the_plan_is_computed_again(tables, name):
    stored = pd.read_csv(PLAN / f"results/{name}.csv", keep_default_na=False)
    assert json.loads(pd.DataFrame(tables[name]).to_json(orient="records")) == json.loads(
        stored.to_json(orient="records")
    )


@pytest.mark.nightly
def test_what_the_pages_say_of_the_plan(tables):
    "Sentences with numbers of the plan in them."
    rows = {row["drafter"]: row for row in tables["drafters"]}
    assert all(row["trees"] for row in rows.values())
    assert [round(16 * rows[name]["trained_millions"] / 1e3) for name in ("eagle3", "dflash")] == [4, 16]
    assert 3.5 < rows["dflash2"]["trained_millions"] / rows["eagle3"]["trained_millions"] < 4.5


def test_the_site_and_the_readme_have_the_pages():
    from web import places

    assert {f"docs/{page}.md" for page in PAGES} <= places.PAGES.keys()
    readme = (ROOT / "README.md").read_text()
    assert all(f"(docs/{page}.md)" in readme for page in PAGES)


def test_the_guides_speak_of_commands_that_exist():
    from speculators_nb.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    text = "".join(PAGES.values())
    assert set(re.findall(r"speculators-nb ([\w-]+)", text)) <= known
