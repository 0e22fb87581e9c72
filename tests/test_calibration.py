"Confidence calibration: fits and errors against loops, what is recorded, and the command."

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from speculators_nb.cli import main as cli
from speculators_nb.evaluate.calibration import (
    Confidences,
    all_accepted,
    calibration_file,
    expected_calibration_error,
    fit_temperatures,
    record_confidences,
    survival,
    within_text,
)
from speculators_nb.lab.experiment import heldout_setting, settings
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.train.train_drafter import new_drafter

VERIFIER, CORPUS = shipped_data() / "tiny-verifier", shipped_data() / "corpus/heldout.jsonl"


@pytest.mark.parametrize("says, of_100", [(0.9, 75), (0.6, 90), (0.2, 35), (0.8, 80)])
def test_a_constant_forecast_becomes_the_share(says, of_100):
    "Sigmoid(logit / T) = share has one solution, and the second position counts only steps that accepted the first."
    logit = math.log(says / (1 - says))
    accepted = torch.tensor([2] * of_100 + [1] * (100 - of_100) + [0] * 40)
    wanted = logit / math.log(of_100 / (100 - of_100))
    found = fit_temperatures(torch.full((140, 2), logit), accepted, accepted + 1)[1]
    assert abs(math.log(found / wanted)) < 0.012  # half the distance of neighbours


def test_a_fit_is_the_best_of_all_temperatures():
    torch.manual_seed(1)
    logits, accepted = torch.randn(200, 3) * 2 + 1, torch.randint(4, (200,))
    stopped = torch.rand(200) < 0.2  # the last accepted token is a stop token: none behind it was judged

    def loss(position, temperature):
        rows = [i for i in range(200) if accepted[i] >= position + stopped[i]]
        signs = [-1 if accepted[i] > position else 1 for i in rows]
        return sum(math.log1p(math.exp(s * logits[i, position] / temperature)) for i, s in zip(rows, signs))

    for position, fitted in enumerate(fit_temperatures(logits, accepted, accepted + ~stopped).tolist()):
        assert loss(position, fitted) <= min(loss(position, 10 ** (e / 20)) for e in range(-20, 21)) + 1e-3


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_the_error_by_loops(bins):
    torch.manual_seed(2)
    forecast, happened = torch.rand(60), torch.rand(60) < 0.5
    forecast[0] = 1.0  # the last bin is closed
    error = 0.0
    for b in range(bins):
        inside = [i for i in range(60) if b == min(int(forecast[i] * bins), bins - 1)]
        if inside:
            mean = sum(float(forecast[i]) for i in inside) / len(inside)
            error += abs(mean - sum(bool(happened[i]) for i in inside) / len(inside)) * len(inside) / 60
    assert expected_calibration_error(forecast, happened, bins) == pytest.approx(error, abs=1e-6)


@pytest.fixture(scope="module")
def fresh():
    "A drafter that has learned nothing. At temperature 100 all distributions are alike, and it is accepted."
    return new_drafter("dspark", VERIFIER, **{n: settings("dspark", 3)[n] for n in ("block_size", "markov_rank")})


def test_what_is_recorded(fresh):
    "A row a step that could reach the last position, of its own prompt; the logits do not depend on the threshold."
    drafter = fresh.drafter(confidence_threshold=0.0)
    verifier, prompts, _, _ = heldout_setting({"dspark": drafter}, 3)
    steps = record_confidences(verifier, drafter, prompts, 3, 100.0, max_new_tokens=17)
    again = record_confidences(verifier, drafter, prompts[1:], 3, 100.0, max_new_tokens=17, seed=1)
    own = steps.prompt > 0
    assert steps.logits[own].equal(again.logits) and steps.accepted[own].equal(again.accepted)
    assert steps.prompt.unique().tolist() == [0, 1, 2] and 0 < steps.accepted.max() <= 3
    written = calibration_file(steps, torch.tensor([1.0, 2.0, 3.0]))
    happened = all_accepted(steps.accepted, 3)
    assert written["num_samples"] == len(steps.accepted)
    for position in range(3):
        forecast = survival(steps.logits, torch.tensor([1.0, 2.0, 3.0]))[:, position]
        error = expected_calibration_error(forecast, happened[:, position])
        assert written["ece_after"][position] == pytest.approx(error, abs=1e-4)
    with pytest.raises(ValueError, match="max_new_tokens=2: no step drafted k=3 tokens"):
        record_confidences(verifier, drafter, prompts, 3, max_new_tokens=2)
    assert isinstance(steps, Confidences)


def test_slots_behind_a_stop_token_are_not_judged(fresh):
    "At temperature 100 any token may be drawn: with a quarter of them stop tokens, some are accepted and end the text."
    drafter = fresh.drafter(confidence_threshold=0.0)
    verifier, prompts, _, _ = heldout_setting({"dspark": drafter}, 30)
    stop = set(range(0, 2048, 4))
    steps = record_confidences(verifier, drafter, prompts, 3, 100.0, max_new_tokens=17, eos_token_ids=stop)
    known = within_text(steps.accepted, steps.written, 3)
    ended = steps.written == steps.accepted
    assert 0 < ended.sum() < len(ended) and (steps.written[~ended] == steps.accepted[~ended] + 1).all()
    for accepted, stopped, row in zip(steps.accepted.tolist(), ended.tolist(), known.tolist()):
        assert row == [not stopped or i < accepted for i in range(3)]
    changed = steps._replace(logits=torch.where(known, steps.logits, 9.0))  # what is behind a stop token is not read
    assert calibration_file(changed, torch.ones(3)) == calibration_file(steps, torch.ones(3))


def test_the_command(fresh, tmp_path):
    "A file as SGLang reads it: one positive number for each token of a block, and no field that it does not know."
    fresh.save_pretrained(tmp_path / "drafter")

    def calibrate(*more):
        line = ["calibrate", tmp_path / "drafter", CORPUS, tmp_path / "out", "--max-samples", 4, *more]
        return CliRunner().invoke(cli.app, [str(word) for word in line], env={"COLUMNS": "200", "NO_COLOR": "1"})

    few = calibrate("--max-new-tokens", 8)
    assert few.exit_code == 2 and "was reached by" in few.output and "max_samples" in few.output
    done = calibrate("--temperature", 100, "--max-new-tokens", 100)
    assert done.exit_code == 0 and "temperatures" in done.output, done.output
    found = json.loads((tmp_path / "out/calibration.json").read_text())
    assert set(found) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert len(found["temperatures"]) == fresh.config.speculative_tokens and min(found["temperatures"]) > 0
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"calibration.png", "provenance.json"}
    assert "holds a result already" in calibrate().output
    config = json.loads((tmp_path / "drafter/config.json").read_text()) | {"enable_confidence_head": False}
    (tmp_path / "drafter/config.json").write_text(json.dumps(config))
    headless = calibrate("--overwrite")
    assert headless.exit_code == 2 and "type dspark without a confidence head" in headless.output
