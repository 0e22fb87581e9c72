"""Public names of speculators 0.9.0 under our package: importable, one call of each answers what upstream's answered
(record_names.py made the record), and those without a place are on the page for people who come from there."""

import importlib
import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from speculators_nb.cli.main import app
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/parity"), str(ROOT / "docs")]
import migration  # noqa: E402
import named_calls  # noqa: E402

RECORD = json.loads((ROOT / "tests/fixtures/upstream_names.json").read_text())
NAMES = {f"{module}.{name}" for module, entry in RECORD["modules"].items() for name in entry["names"]}
FURTHER = {f"{module}.{name}" for module, names in RECORD["further"].items() for name in names}


def ours(path):
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return getattr(importlib.import_module(f"speculators_nb.{module}"), name)


def found(path):
    try:
        return ours(path) is not None
    except (ModuleNotFoundError, AttributeError):
        return False


def assert_alike(answer, recorded):
    "Equal, but for the last of the five decimals that the record keeps: processors sum in different orders."
    if isinstance(recorded, dict):
        assert isinstance(answer, dict) and answer.keys() == recorded.keys()
        answer, recorded = [answer[key] for key in recorded], list(recorded.values())
    if isinstance(recorded, list):
        assert len(answer) == len(recorded)
        for one, other in zip(answer, recorded, strict=True):
            assert_alike(one, other)
    elif isinstance(recorded, float):
        assert answer == pytest.approx(recorded, rel=0, abs=2e-5)
    else:
        assert answer == recorded


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", named_calls.CALLS)
def test_one_call(name):
    named_calls.use_losses(importlib.import_module("speculators_nb.losses.eager"))
    assert_alike(named_calls.call(name, ours(name)), RECORD["answers"][name])


def test_names_without_a_place_are_on_the_page():
    listed = dict(migration.rows(migration.NO_PLACE))
    missing = {name for name in NAMES if not found(name)}
    assert {name for name, said in listed.items() if not said.startswith("found, ")} == missing
    assert listed.keys() == NAMES - RECORD["answers"].keys()


def test_the_page_counts_them():
    counts = migration.counts()
    assert counts["importable"] == sum(map(found, NAMES)) and counts["called"] == len(named_calls.CALLS)
    assert counts["called"] >= 0.95 * counts["total"] and counts["total"] == len(NAMES)
    page = migration.page()
    for number in counts.values():
        assert f" {number} " in page
    assert not re.search("{(total|importable|called|share)}", page)


def test_further_names_are_found_or_on_the_page():
    listed = [name for name, _ in migration.rows(migration.FURTHER)]
    of_ours = {name for name in FURTHER if found(name) and ours(name).__module__.startswith("speculators_nb.")}
    assert sorted(listed) == sorted(FURTHER - of_ours) and len(of_ours) > 5


def test_what_the_page_names_of_ours_is_there():
    text = migration.PAGE.read_text().split("## Names\n")[1]
    for path in set(re.findall(r"`speculators_nb\.([\w.]+)`", text)):
        try:
            importlib.import_module(f"speculators_nb.{path}")
        except ModuleNotFoundError:
            assert found(path), path
    known = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert set(re.findall(r"`speculators-nb (\w+)", text)) <= set(known)


def test_what_the_documentation_names():
    part = migration.PAGE.read_text().split("## What the documentation names")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", part, flags=re.M)
    assert len(rows) == part.count("\n| `") and all("speculators" in here for _, here in rows)
    of_0_9 = [name for there, _ in rows for name in re.findall(r"`(utils\.\w+)`", there)]
    assert len(of_0_9) == 3 and set(of_0_9) <= FURTHER and all(map(found, of_0_9))


def test_what_upstream_refuses_or_warns_of():
    "Sizes that no head has, a width of three times the hidden size, a mask that is a bool of Python."
    from speculators_nb.models.dspark.model_definitions import ConfidenceHead, MarkovHead
    from speculators_nb.models.eagle3.attention import extend_mask_for_draft_tokens
    from speculators_nb.models.utils import resolve_draft_intermediate_size

    sizes = dict(verifier_vocab_size=9, draft_vocab_size=9, hidden_size=4)
    for wrong in (dict(markov_rank=0), dict(markov_rank=2, head_type="x")):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            MarkovHead(**sizes, **wrong)
    assert ConfidenceHead(input_dim=4).proj.in_features == 4
    with pytest.warns(UserWarning, match="3 x hidden_size = 12"):
        assert resolve_draft_intermediate_size(SimpleNamespace(hidden_size=4)) == 12
    with pytest.raises(ValueError, match="hidden_size are missing"):
        resolve_draft_intermediate_size(SimpleNamespace())

    def everything(b, h, q, kv):
        return True

    block = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), BLOCK_SIZE=128, mask_mod=everything
    )
    assert extend_mask_for_draft_tokens(block).mask_mod is everything


def test_a_model_registered_under_another_name_is_found_by_its_config():
    class Config(SpeculatorModelConfig):
        speculators_model_type: str = "config_of_names"

    class Model(SpeculatorModel):
        config_class = Config

    try:
        SpeculatorModel.register("model_of_names")(Model)
        assert SpeculatorModel.registered_model_class_from_config(Config()) is Model
    finally:
        SpeculatorModel.registry.pop("model_of_names", None)
