"""What `make release-check` and the other scripts of .ci/ would let through, and what they would not."""

import importlib.util
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, proofs = script("release"), script("proofs")
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n## 0.2.0 - 2026-11-22\n\n- all\n\n## 0.1.0\n\nold\n"
SAME = dict.fromkeys(["settings.ini", "CHANGELOG.md", "CITATION.cff"], "0.2.0")


def test_this_tree_says_one_version():
    found = release.versions()
    assert len(found) == 4 and len(set(found.values())) == 1, found
    released = yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"]
    assert f"## {found['settings.ini']} - {released}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "found, tag, changelog, released, faults",
    [
        (SAME, "v0.2.0", CHANGELOG, "2026-11-22", []),
        (SAME, None, CHANGELOG.replace("### Added", "- more"), "2026-11-22", []),  # no tag: work goes on
        (SAME | {"CITATION.cff": "0.1.0"}, None, CHANGELOG, "", ["CITATION.cff says 0.1.0"]),
        (SAME, "v0.2", CHANGELOG, "2026-11-22", ["the tag is v0.2"]),
        (SAME, "v0.2.0", CHANGELOG.replace("### Added", "- more"), "2026-11-22", ["under Unreleased"]),
        (SAME, "v0.2.0", CHANGELOG, "2026-11-21", ["date-released 2026-11-21"]),
        (SAME, "v0.2.0", CHANGELOG.replace(" - 2026-11-22", ""), "2026-11-22", ["has no date", "date-released"]),
    ],
)
def test_versions(found, tag, changelog, released, faults):
    said = list(release.faults_of_versions(found, tag, changelog, released))
    assert len(said) == len(faults) and all(fault in text for fault, text in zip(faults, said))


METADATA = "Metadata-Version: 2.4\nName: a\nVersion: 0.2.0\nLicense-Expression: Apache-2.0\n\n# README\n"
INSIDE = {"a/__init__.py", "a-0.2.0.dist-info/METADATA", "a-0.2.0.dist-info/licenses/LICENSE"}


@pytest.mark.parametrize(
    "inside, metadata, fault",
    [
        (INSIDE, METADATA, None),
        (INSIDE - {"a/__init__.py"}, METADATA, "lacks a/__init__.py"),
        (INSIDE | {"tests/test_a.py"}, METADATA, "tests/test_a.py, which is no part"),
        (INSIDE, METADATA.replace("0.2.0", "0.1.0"), "version 0.1.0"),
        (INSIDE, METADATA.replace("Apache-2.0", "MIT"), "licence"),
        (INSIDE - {"a-0.2.0.dist-info/licenses/LICENSE"}, METADATA, "licence"),
        (INSIDE, METADATA.replace("# README", ""), "README"),
    ],
)
def test_content(inside, metadata, fault):
    said = list(release.faults_of_content(inside, metadata, {"a/__init__.py"}, "0.2.0"))
    assert len(said) == (fault is not None) and all(fault in text for text in said)


def test_no_wheel_is_no_release(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "DIST", tmp_path)
    assert "holds 0 wheels" in release.check()[0]


def law(rule, p):
    return dict(proposer="eagle", rule=rule, temperature="1.0", filters="{}", p=p)


def test_proofs_that_fail_are_named():
    wrong = {"wrong: lenient"}.__contains__
    text = dict(proposer="eagle", batch="8", identical="200", prompts="200")
    fine = [law("standard", "0.3"), law("wrong: lenient", "0")]
    assert list(proofs.verdict(fine, [text], 100, wrong)) == []
    bad = [law("standard", "1e-9"), law("wrong: lenient", "0.2")]
    said = list(proofs.verdict(bad, [text | dict(identical="199")], 100, wrong))
    assert len(said) == 3 and "not the verifier's" in said[0] and "not caught" in said[1] and "199 of 200" in said[2]
