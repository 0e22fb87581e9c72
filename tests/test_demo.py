"""The demo for a family that vLLM does not read from our folder and that has no attention: everything else must be
there."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from small_report import small_report
from test_experiment import names_taken

from speculators_nb.cli.demo import demo, real
from speculators_nb.core.options import algorithms
from speculators_nb.evaluate import acceptance
from speculators_nb.lab.demo_report import trained_step_weights, training_figures
from speculators_nb.lab.experiment import settings
from speculators_nb.models.base import SpeculatorModel

ROOT = Path(__file__).parents[1]


def headings(page):
    return re.findall(r'<h2 id="\d+">([^<]+)<', page)


def test_a_report_has_all_that_a_colleague_needs(tmp_path):
    "Of a drafter with attention and fixed step weights; nothing is loaded from anywhere."
    page, answers = small_report(tmp_path)
    weights, mask = "Loss weights of the steps", "What a query attends to"
    assert headings(page) == [
        *("Decoding, step by step", "Acceptance by position", "Training", weights, mask, "Cost", "Make it again")
    ]
    assert re.findall(r"<strong>([^<]+)</strong> <span>([^<]+)", page)[2] == ("2 of 2", "greedy texts unchanged")
    assert "Step 2 weighs 0.36 of step 0" in page and "3.00e+09" in page and "<pre tabindex=0>make demo</pre>" in page
    states = [json.loads(s)["state"] for s in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert [len(s["runs"][0]["steps"]) for s in states[:2]] == [len(a.steps) for a in answers]
    explored = states[2]["masks"]["m0"]
    assert (explored["queries"], explored["keys"], explored["documents"]) == (11, 33, [0] * 6 + [1] * 5)
    assert page.count('src="data:image/png') >= 5 and not re.search(r"(src|href)=.?(http|/)|@import|url\(", page)
    assert len(page) < 1_500_000


def test_a_family_without_mask_and_without_vllm(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    measured = demo(tmp_path, algorithm="medusa", n_prompts=8, n_heldout=2, k=2, epochs=1)
    assert set(measured.summary.drafter) == {"no drafter", "n-gram", "medusa"}
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["acceptance.png", "decoded.png", "loss.png"]
    page, said = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    assert headings(page) == ["Decoding, step by step", "Acceptance by position", "Training", "Cost", "Make it again"]
    assert "save_native" in page and "save_native" in said and "speculators-nb serve" not in page
    assert page.count('data-widget="debugger"><script') == 2 and page.count("data:image/png") == 4
    assert "--algorithm medusa --n-prompts 8 --n-heldout 2 --k 2 --epochs 1" in page.replace("\n", " ")
    assert [*json.loads((tmp_path / "seconds.json").read_text())] == [
        *("answers", "features", "training", "check", "decoding", "report")
    ]
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


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [("eagle3", 8000), ("dspark", 8000), *((a, None) for a in ("medusa", "eagle", "dflash2", "lilicorr"))],
)
def test_a_real_drafter_that_must_know_all_tokens_does(tmp_path, monkeypatch, algorithm, size):
    monkeypatch.setattr("speculators_nb.cli.demo._from_features", lambda training, **_: training)
    training = real(tmp_path, ROOT / "data/tiny-verifier", ROOT / "data/answers/train.jsonl", algorithm, max_samples=3)
    assert training.get("draft_vocab_size") == size


@pytest.mark.nightly
def test_the_demo_of_a_real_verifier_holds_out_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    "With the tiny verifier and its shipped answers in the place of those that are fetched."
    monkeypatch.chdir(ROOT)
    given = dict(verifier="data/tiny-verifier", data="data/answers/train.jsonl", k=2, epochs=1, draft_vocab_size=512)
    given |= dict(max_samples=60, n_heldout=2)
    with monkeypatch.context() as patched:
        patched.setattr("speculators_nb.cli.demo.check_vllm_contract", lambda folder: 1 / 0)
        patched.setattr("speculators_nb.cli.demo.faster_dtype", lambda verifier: torch.bfloat16)
        with pytest.raises(ZeroDivisionError):  # after training
            real(tmp_path, **given)
    assert json.loads((tmp_path / "drafter/run.json").read_text())["settings"]["bf16"]
    weights = (tmp_path / "drafter/model.safetensors").stat().st_mtime_ns
    decoded_by = []

    def evaluate(verifier, *rest, **options):
        decoded_by.append(verifier.dtype)
        return acceptance.evaluate(verifier, *rest, **options)

    monkeypatch.setattr("speculators_nb.cli.demo.evaluate", evaluate)
    monkeypatch.setattr("speculators_nb.cli.demo.faster_dtype", lambda verifier: None)  # a CPU too busy to say so
    measured = real(tmp_path, **given)
    assert decoded_by == [torch.float32]  # one greedy text, whatever drafts it
    assert (tmp_path / "drafter/model.safetensors").stat().st_mtime_ns == weights
    assert set(measured.performance.drafter) == {"no drafter", "n-gram", "eagle3"}
    page, said = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    assert "as fast as without a drafter" in page and "times as fast as without a drafter" in said
    assert f"speculators-nb evaluate {tmp_path / 'drafter'} {tmp_path / 'prepared'}" in page
    split = json.loads((tmp_path / "features/data_config.json").read_text())["data"]["split"]
    assert split == {"train": 57, "val": 3}
    asked = [json.loads(line)["text"] for line in (tmp_path / "prepared/heldout.jsonl").read_text().splitlines()]
    shown = re.findall(r"<summary>([^<]+)</summary>", page)
    assert len(asked) == 3 and len(shown) == 2 and all(any(q in text for text in asked) for q in shown)
    with pytest.raises(FileExistsError, match="seed"):
        real(tmp_path, **given, seed=1)
