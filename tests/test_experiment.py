"""Same data, same measure: the shipped answers, features made once, and budgets that agree."""

import contextlib
import dataclasses
import inspect
import json
from pathlib import Path

import forked
import pytest
from transformers import AutoTokenizer

from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.lab import experiment
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.train.trainer import SpeculatorTrainingArguments

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path):
    "A clone of its own: nothing is written into the real one."
    (tmp_path / "data").symlink_to(ROOT / "data")
    with contextlib.chdir(tmp_path):
        yield tmp_path


def test_answers_belong_to_the_corpus_and_the_verifier():
    questions = {row["id"]: row for row in read_corpus(ROOT / "data/corpus/train.jsonl")}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny-verifier")
    rows = [json.loads(line) for line in (ROOT / "data/answers/train.jsonl").read_text().splitlines()]
    assert len(rows) == 1000 and [r["id"] for r in rows] == list(questions)[:1000]
    for row in rows[:50]:
        asked = questions[row["id"]]
        assert row["domain"] == asked["domain"]
        prompt = tokenizer.apply_chat_template(asked["messages"][:1], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert row["input_ids"][: len(prompt)] == prompt
        assert (
            set(row["loss_mask"]) == {0, 1}
            and not any(row["loss_mask"][: len(prompt)])
            and row["loss_mask"][len(prompt)] == 1
        )
    held = {row["messages"][0]["content"] for row in read_corpus(ROOT / "data/corpus/heldout.jsonl")}
    assert not held & {questions[r["id"]]["messages"][0]["content"] for r in rows}


def test_features_are_made_once_by_however_many_ask(clone):
    "Two processes ask at once; one builds, both get the same complete folder, and a third call touches nothing."
    other = forked.ask(lambda: experiment.shipped_features(n=12))
    folder = experiment.shipped_features(n=12)
    assert other() == folder and folder.samefile(clone / "output" / folder.name)
    assert len(FeatureDataset(folder)) == 12
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert experiment.shipped_features(n=12).samefile(folder)
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    assert not list(folder.parent.glob("*.building"))
    assert experiment.shipped_features(n=11) != experiment.shipped_features([1, 5], n=11)


def test_an_interrupted_build_is_gone_on_with(clone, monkeypatch):
    def torn(verifier, rows, out, **kwargs):
        real(verifier, rows, out, indices=range(3))
        raise KeyboardInterrupt

    real = experiment.extract_features
    monkeypatch.setattr(experiment, "extract_features", torn)
    with pytest.raises(KeyboardInterrupt):
        experiment.shipped_features(n=8)
    assert not [p for p in (clone / "output").iterdir() if p.is_dir() and p.suffix != ".building"]
    monkeypatch.setattr(experiment, "extract_features", real)
    assert len(FeatureDataset(experiment.shipped_features(n=8))) == 8


def test_outside_a_clone(tmp_path):
    with contextlib.chdir(tmp_path), pytest.raises(FileNotFoundError, match="clone"):
        experiment.shipped_data()


def names_taken(klass):
    """The training arguments that somebody reads when a drafter of this class is trained. (The models' functions also
    let unknown names pass: each takes what is its own.)"""
    takers = [
        inspect.signature(f).parameters.values()
        for f in (klass.from_training_args, klass.get_trainer_kwargs, train_drafter)
    ]
    named = {p.name for parameters in takers for p in parameters if p.kind is not p.VAR_KEYWORD}
    named |= klass.training_arguments().keys()
    return named | {f.name for f in dataclasses.fields(SpeculatorTrainingArguments)}


@pytest.mark.parametrize("name", experiment.CONTENDERS)
def test_every_setting_is_taken(name):
    algorithm, own = experiment.CONTENDERS[name]
    klass, given = SpeculatorModel.registered_class(algorithm), experiment.settings(algorithm) | own
    assert klass.get_trainer_kwargs(**given) and given.keys() <= names_taken(klass)


def test_equal_budgets(clone):
    features, few = experiment.shipped_features(n=12), {name: experiment.CONTENDERS[name] for name in ("eagle3", "mlp")}
    table = experiment.train_equally(clone / "drafters", 3e9, few, k=2, features=features, total_seq_len=256)
    spent = table.mflops_per_token * 1e6 * table.epochs * sum(FeatureDataset(features).lengths)
    assert (abs(spent / 3e9 - 1) < 0.15).all(), spent  # a whole number of steps
    assert table.steps["mlp"] > table.steps["eagle3"]
    weights = clone / "drafters/mlp/model.safetensors"
    before = weights.stat().st_mtime_ns
    again = experiment.train_equally(clone / "drafters", 3e9, few, k=2, features=features, total_seq_len=256)
    assert again.equals(table) and weights.stat().st_mtime_ns == before  # kept
    drafter = SpeculatorModel.from_pretrained(clone / "drafters/eagle3").drafter()
    assert drafter.trained_tokens == 2
    measured = experiment.measure_heldout(
        {"eagle3": drafter}, k=2, n_prompts=2, max_new_tokens=12, domains=(experiment.FREE_CHOICE,)
    )
    assert set(measured.summary.domain) == {"all", "free"} and set(measured.summary.drafter) == {"n-gram", "eagle3"}
    assert list(experiment.summary_table(measured).columns) == ["mean length", "on free-choice turns", "first position"]
    prices = experiment.drafting_cost({"eagle3": drafter, "n-gram": NgramDrafter()}, k=2, n_prompts=1)
    assert prices.flops["n-gram"] == 0 and 0 < prices.deep["eagle3"] < prices.weights["eagle3"]
