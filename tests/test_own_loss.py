"""A loss and loss weights of one's own, in every drafter and by the commands: the page "Write your own loss"."""

import gc
import json
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from speculators_nb.cli.inputs import read_experiment_file
from speculators_nb.cli.main import app
from speculators_nb.core import options
from speculators_nb.core.options import algorithms, check_options
from speculators_nb.data.packing import collate
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.lab.experiment import settings, shipped_features
from speculators_nb.lab.grid import Measured, Run, Subject, experiment, planned
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn import losses, supervision
from speculators_nb.nn.losses import Distribution, parse_loss, register_loss, row_loss, score_rows
from speculators_nb.nn.supervision import register_loss_weight
from speculators_nb.train.train_drafter import new_drafter

ROOT = Path(__file__).resolve().parents[1]
VERIFIER = ROOT / "data/tiny-verifier"
PAGE = json.loads((ROOT / "nbs/tutorials/20_your_own_loss.ipynb").read_text(encoding="utf-8"))
TEXT = "\n".join("".join(cell["source"]) for cell in PAGE["cells"] if cell["cell_type"] == "markdown")
(MODULE,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.fixture(autouse=True)
def registered():
    "What a test registers is forgotten after it; the tables stay the same objects."
    tables, words = (losses.LOSSES, supervision.LOSS_WEIGHTS), (options.LOSSES, options.LOSS_WEIGHTS)
    kept = [dict(table) for table in tables], [list(names) for names in words]
    yield
    for table, before in zip(tables, kept[0]):
        table.clear()
        table.update(before)
    for names, before in zip(words, kept[1]):
        names[:] = before


def until_wrong(drafted):
    wrong = (drafted.scored & ~drafted.correct).int()
    return wrong.cumsum(-1) - wrong == 0


def test_the_page_has_ten_lines():
    lines = [line for line in MODULE.splitlines() if line.strip()]
    cells = ["".join(cell["source"]) for cell in PAGE["cells"]]
    assert len(lines) <= 10 and "\n".join(lines[1:]) in cells


@pytest.fixture(scope="module")
def features():
    return shipped_features(n=20)


def fresh(algorithm, features):
    "A fresh drafter, and a packed row for it."
    drafter = new_drafter(algorithm, VERIFIER, **settings(algorithm)).eval()
    data = FeatureDataset(features, layers=list(drafter.drafter().aux_layer_ids))
    return drafter, collate([data[i] for i in range(3)], 384, drafter.shift, torch.float32)


@pytest.mark.parametrize("algorithm", algorithms())
def test_weights_of_what_was_scored_in_every_drafter(algorithm, features):
    """The lean step and the definition agree; every row weighs what the function says of its run. The shipped `auf` is
    this function."""
    drafter, row = fresh(algorithm, features)
    seen = []

    def watched(drafted):
        seen.append(drafted)
        return until_wrong(drafted)

    lean, dense = (drafter(**row, lean=lean, per_position_loss_weight=watched)[1] for lean in (True, False))
    torch.testing.assert_close(lean, dense, rtol=1e-4, atol=1e-6)
    assert all(drafted.correct.shape == drafted.scored.shape for drafted in seen)
    assert all(not (drafted.correct & ~drafted.scored).any() for drafted in seen)
    ones = drafter(**row, per_position_loss_weight=lambda drafted: torch.ones(drafted.scored.shape))[1]
    several = seen[0].scored.sum(-1).max() > 1  # EAGLE's runs have one token
    assert 0 < lean <= ones and (lean < ones) == several
    torch.testing.assert_close(drafter(**row, per_position_loss_weight="auf")[1], lean)


def test_one_may_read_the_acceptance(features):
    drafter, row = fresh("dflash", features)
    seen = []

    @register_loss_weight("by_acceptance", reads_accept=True)
    def by_acceptance(drafted):
        seen.append(drafted.accept)
        return drafted.accept

    for weight in ("by_acceptance", by_acceptance):  # a registered function is what its name says
        drafter.train()(**row, per_position_loss_weight=weight, generator=torch.Generator().manual_seed(0))
    assert seen[0].shape[1] == drafter.config.block_size and 0 < seen[0].max() <= 1
    assert torch.equal(*seen)


@pytest.mark.parametrize("mixture", [{"gap": 1.0}, {"gap": 0.3, "kl_div": 0.7}])
def test_a_loss_without_a_gradient_is_differentiated(mixture):
    @register_loss("gap")
    def gap(p, q):
        return (p.probs - q.probs).square().sum(-1)

    check_options({"loss_fn": mixture}, "train")
    generator = torch.Generator().manual_seed(0)
    target, logits = (torch.randn(6, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    scored = score_rows(Distribution(target), Distribution(logits), parse_loss(mixture))
    logits.requires_grad_()
    rows = row_loss(logits, target, mixture)
    expected = torch.autograd.grad(sum(w * rows[name].sum() for name, w in mixture.items()), logits)[0]
    torch.testing.assert_close(scored.grad, expected)


def swapped(p, q):
    "The helpers and losses with the drafter's distribution in the place of the verifier's."
    return 1 - losses.overlap(q, p) + losses.mass_below(q, p) + losses.LOSSES["jsd"].value(q, p)


@pytest.mark.parametrize("mixture", [{"swapped": 1.0}, {"swapped": 0.5, "tv": 0.3, "rkl": 0.2}])
@pytest.mark.parametrize("chunk", [4, 100])
def test_a_loss_may_swap_its_arguments(chunk, mixture, monkeypatch):
    """It is what the definition says, and no distribution of a chunk outlives it: each would keep its logits until
    Python collects its circles."""
    register_loss("swapped")(swapped)
    made, init = [], Distribution.__init__

    def noted(self, *given, **named):
        made.append(weakref.ref(self))
        init(self, *given, **named)

    monkeypatch.setattr(Distribution, "__init__", noted)
    generator = torch.Generator().manual_seed(0)
    head, own_head, targets = (torch.randn(n, 8, generator=generator) for n in (50, 50, 9))
    hidden = torch.randn(23, 8, generator=generator, requires_grad=True)
    target_head = losses.TargetHead(8)
    target_head.norm.weight.data.fill_(1.0)
    target_head.set_rows(head)
    of_row, weight = torch.randint(0, 9, (23,), generator=generator), torch.rand(23, generator=generator)
    found = []
    gc.disable()
    try:
        for lean in (True, False):
            given = hidden, own_head, target_head, targets, of_row, weight, mixture
            out = losses.head_loss(*given, chunk=chunk, want_accept=True, lean=lean)
            found.append((out.loss, *torch.autograd.grad(out.loss, hidden), out.rows["swapped"], out.accept))
            assert made and not any(one() for one in made), lean
    finally:
        gc.enable()
    for lean, dense in zip(*found):
        torch.testing.assert_close(lean, dense, rtol=1e-4, atol=1e-6)


def test_names_that_are_taken():
    for register, name in (
        (register_loss, "ce"),
        (register_loss_weight, "dpace"),
        (register_loss_weight, "fixed-exp-decay"),
    ):
        with pytest.raises(ValueError, match=f"'{name}'"):
            register(name)(lambda *_: None)
    register_loss_weight("mine")(until_wrong)
    register_loss_weight("mine")(until_wrong)  # as a cell that is run twice
    with pytest.raises(ValueError, match="per_position_loss_weight='until_right'"):
        check_options({"per_position_loss_weight": "until_right"}, "train")


def test_by_the_command(tmp_path, features):
    "With a rollout and with blocks, from a file."
    (tmp_path / "own_loss.py").write_text(MODULE)
    for algorithm in ("eagle3", "dflash"):
        line = ["train", features, tmp_path / algorithm, "--algorithm", algorithm, "--max-steps", "2"]
        line += ["--total-seq-len", "512", "--verifier", VERIFIER, "--import", tmp_path / "own_loss.py"]
        line += ["--per-position-loss-weight", "until_wrong"]
        done = CliRunner().invoke(app, [str(word) for word in line])
        assert done.exit_code == 0, done.output
        assert SpeculatorModel.from_pretrained(tmp_path / algorithm, verifier=VERIFIER) is not None


def test_a_changed_function_is_another_run():
    def run():
        return Run("x", "dflash", {"per_position_loss_weight": "mine"}, 4, 0, Subject("features"), Measured()).key

    register_loss_weight("mine")(until_wrong)
    first = run()
    supervision.LOSS_WEIGHTS.pop("mine")
    register_loss_weight("mine")(lambda drafted: drafted.correct)
    assert run() != first


def test_settings_that_are_one_are_refused():
    def planned_with(**arguments):
        contenders = {"usual": ("eagle3", {}), "other": ("eagle3", arguments)}
        return planned(contenders, 1, 4, Measured(), Subject("features"), {})

    assert len(planned_with(loss_fn="ce")) == 2
    with pytest.raises(ValueError, match="'usual' and 'other' are the same setting"):
        planned_with(loss_fn="kl_div")
    of_dflash = {"decay": ("dflash", dict(loss_fn="ce")), "D-PACE": ("dflash", dict(per_position_loss_weight="dpace"))}
    common = dict(loss_fn="ce")  # is weighed by D-PACE where nothing else is asked for
    with pytest.raises(ValueError, match="'decay' and 'D-PACE' are the same setting"):
        planned(of_dflash, 1, 4, Measured(), Subject("features"), common)


def test_a_file_is_looked_for_beside_the_experiment(tmp_path, monkeypatch):
    "From any working folder, and with features and prompts of one's own."
    (tmp_path / "loss_beside.py").write_text(MODULE)
    lines = ["import: loss_beside.py", "algorithm: dflash", "features: features", "heldout: prepared"]
    lines += ["grid: {per_position_loss_weight: [dpace, until_wrong]}"]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    what = read_experiment_file(tmp_path / "own.yaml")
    assert what.modules == [str(tmp_path / "loss_beside.py")] and "until_wrong" in supervision.LOSS_WEIGHTS
    assert what.given == dict(features="features", heldout="prepared")
    (tmp_path / "own.yaml").write_text("\n".join([*lines, "max_new_tokens: 0"]))
    with pytest.raises(ValueError, match="max_new_tokens=0: must be at least 1"):
        read_experiment_file(tmp_path / "own.yaml")


def test_an_experiment_on_a_verifier_of_ones_own(tmp_path, features):
    "Its features say which verifier, by its weights and not by its name; its prompts are missing by name."
    own = tmp_path / "features"
    shutil.copytree(features, own)
    record = json.loads((own / "data_config.json").read_text())
    record["model"]["target_model_path"] = str(tmp_path / "verifier")
    (own / "data_config.json").write_text(json.dumps(record))
    shutil.copytree(VERIFIER, tmp_path / "verifier")
    assert Subject.of(own, None).verifier is None, "the shipped one, in another folder"
    (tmp_path / "others").mkdir()
    other = dict(target_model_path=str(tmp_path / "tiny-verifier"), fingerprint="0" * 16)
    (tmp_path / "others/data_config.json").write_text(json.dumps(dict(model=other)))
    with pytest.raises(ValueError, match="heldout is missing"):
        experiment(tmp_path / "out", {"usual": ("medusa", {})}, features=tmp_path / "others")
    given = dict(max_steps=2, total_seq_len=512, seeds=1, k=2, n_prompts=2, max_new_tokens=8)
    heldout = ROOT / "data/corpus/heldout.jsonl"
    found = experiment(tmp_path / "out", {"usual": ("medusa", {})}, features=own, heldout=heldout, **given)
    assert len(found.runs) == 1 and found.counts.prompt.nunique() == 2
    inputs = json.loads(next((tmp_path / "out").glob("*/provenance.json")).read_text())["inputs"]
    assert str(tmp_path / "verifier") in json.dumps(inputs)
