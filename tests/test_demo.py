"""The demo for a family that vLLM does not read from our folder and that has no attention: everything else must be there."""
from pathlib import Path

import pytest
from test_experiment import names_taken

from speculators_nb.demo import demo
from speculators_nb.experiment import SETTINGS, settings
from speculators_nb.model import SpeculatorModel

ROOT = Path(__file__).parents[1]


def test_a_family_without_mask_and_without_vllm(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    measured = demo(tmp_path, algorithm="medusa", n_prompts=8, n_heldout=2, k=2, epochs=1)
    assert set(measured.summary.drafter) == {"no drafter", "n-gram", "medusa"}
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["acceptance.png", "loss.png"]
    page, said = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    assert "mask.png" not in page and "save_native" in page and "save_native" in said
    assert SpeculatorModel.from_pretrained(tmp_path / "drafter").drafter().trained_tokens == 2


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_every_family_drafts_as_many_tokens_as_it_is_asked_for(algorithm):
    "The number of tokens has another name in each family's arguments."
    from speculators_nb.train.drafter import new_drafter
    for k in (2, 4):
        model = new_drafter(algorithm, ROOT / "data/tiny-verifier", **settings(algorithm, k))
        assert model.drafter().trained_tokens == k
        assert settings(algorithm, k).keys() <= names_taken(type(model))
