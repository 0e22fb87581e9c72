"""The demo for a family that vLLM does not read from our folder and that has no attention: everything else must be
there."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from test_experiment import names_taken

from speculators_nb.cli.demo import demo, trained_step_weights, training_figures
from speculators_nb.core.options import algorithms
from speculators_nb.lab.experiment import settings
from speculators_nb.models.base import SpeculatorModel

ROOT = Path(__file__).parents[1]


def test_a_family_without_mask_and_without_vllm(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    measured = demo(tmp_path, algorithm="medusa", n_prompts=8, n_heldout=2, k=2, epochs=1)
    assert set(measured.summary.drafter) == {"no drafter", "n-gram", "medusa"}
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["acceptance.png", "loss.png"]
    page, said = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    assert (
        "the mask of" not in page
        and page.count("data:image/png") == 2
        and "save_native" in page
        and "save_native" in said
    )
    assert SpeculatorModel.from_pretrained(tmp_path / "drafter").drafter().trained_tokens == 2


@pytest.mark.parametrize("algorithm", algorithms())
def test_every_family_drafts_as_many_tokens_as_it_is_asked_for(algorithm):
    "The number of tokens has another name in each family's arguments."
    from speculators_nb.train.train_drafter import new_drafter

    for k in (2, 4):
        model = new_drafter(algorithm, ROOT / "data/tiny-verifier", **settings(algorithm, k))
        assert model.drafter().trained_tokens == k
        assert settings(algorithm, k).keys() <= names_taken(type(model))


@pytest.mark.parametrize(
    "algorithm, given, weights",
    [
        ("eagle3", dict(ttt_steps=4), [1, 1, 1, 1]),
        ("eagle3", dict(ttt_steps=3, ttt_step_loss_decay=0.5), [1, 0.5, 0.25]),
        ("eagle3", dict(ttt_steps=2, ttt_step_loss_decay=0.8), [1, 0.8]),
        ("mtp", dict(num_speculative_steps=2, step_weight_beta=0.25), [0.8, 0.2]),
        ("mtp", dict(step_weights=[0.5, 0.3, 0.2]), [0.5, 0.3, 0.2]),
        ("dflash", {}, None),  # depends on the drafter's own probabilities
        ("peagle", {}, None),
    ],
    ids=str,
)
def test_the_report_draws_the_weights_of_the_run(algorithm, given, weights, tmp_path):
    "From the arguments of the command line to the line in the figure."
    from speculators_nb.models.base import SpeculatorModel

    kwargs, _ = SpeculatorModel.registered_class(algorithm).get_trainer_kwargs(**given)
    assert trained_step_weights(kwargs) == (weights and pytest.approx(weights))
    model = SimpleNamespace(config=SimpleNamespace(speculators_model_type=algorithm))
    log = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0]}).set_index("step")
    figures = training_figures(tmp_path, model, None, log, **kwargs)
    assert (
        {p.stem for p in tmp_path.glob("*.png")} == set(figures) == ({"loss", "step_weights"} if weights else {"loss"})
    )
    if weights:
        lines = figures["step_weights"].axes[0].lines
        assert len(lines) == 1
        np.testing.assert_allclose(lines[0].get_ydata(), weights, rtol=1e-6)
