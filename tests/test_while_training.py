"""Decoded acceptance at each evaluation of a run: the numbers are those of `evaluate`, the training is the one without
them, and every rank has them."""

import json
import re
from functools import partial
from pathlib import Path

import forked
import pandas as pd
import pytest
from sharded import as_torchrun_says, free_port
from test_trainer import arguments, samples, toy
from transformers import AutoTokenizer

from speculators_nb.cli.main import _trained
from speculators_nb.data.prepare import prepare
from speculators_nb.evaluate.acceptance import evaluate
from speculators_nb.evaluate.prompts import encode_prompts, read_prompts
from speculators_nb.evaluate.while_training import decoded_acceptance
from speculators_nb.features.in_process import extract_features
from speculators_nb.lab.experiment import settings
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.train.trainer import log_table, train
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]
TINY = ROOT / "data/tiny-verifier"
K = 2


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    "Features of eight answers, and two prompts."
    folder, verifier = tmp_path_factory.mktemp("features") / "f", Verifier.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    lines = (ROOT / "data/answers/train.jsonl").read_text().splitlines()[:8]
    extract_features(verifier, prepare(map(json.loads, lines), tokenizer, 256), folder)
    prompts = encode_prompts(read_prompts("shipped", first=2), tokenizer)
    return folder, verifier, prompts, {tokenizer.eos_token_id}


def run(shipped, output, algorithm="eagle3", **more):
    features, verifier, prompts, stop = shipped
    measure = decoded_acceptance(verifier, prompts, K, 16, stop)
    given = settings(algorithm, K) | dict(
        max_steps=2, eval_share=0.25, eval_strategy="steps", eval_steps=1, save_steps=2, save_strategy="steps"
    )
    given |= dict(logging_steps=1, disable_tqdm=True, measure=measure, total_seq_len=256) | more
    return train_drafter(features, output, TINY, algorithm, **given)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "mtp"])
def test_the_last_numbers_are_those_of_evaluate(shipped, algorithm, tmp_path):
    "On the drafter that was saved, to the last digit; and training goes on after decoding."
    trainer = run(shipped, tmp_path, algorithm, load_best_model_at_end=False)
    _, verifier, prompts, stop = shipped
    drafter = SpeculatorModel.from_pretrained(tmp_path, verifier=TINY).drafter()
    tapped = Verifier(verifier.model, drafter.aux_layer_ids or None)
    found = evaluate(tapped, {"a": drafter}, prompts, k=K, max_new_tokens=16, eos_token_ids=stop)
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["eval_mean_length"] == found.summary.mean_length.item()
    assert [rows[-1][f"eval_accepted_{i}"] for i in (1, 2)] == found.positions.unconditional.to_list()


def test_training_is_the_one_without(shipped, tmp_path):
    "The same losses to the last bit, in bfloat16 too."
    with_it = log_table(run(shipped, tmp_path / "a", bf16=True))
    without = log_table(run(shipped, tmp_path / "b", bf16=True, measure=None))
    more = {"eval_mean_length", "eval_accepted_1", "eval_accepted_2"}
    assert set(with_it) - set(without) == more
    pd.testing.assert_frame_equal(with_it[list(without)], without, check_exact=True)


def test_the_best_checkpoint_by_decoded_length(tmp_path):
    "The second of four evaluations decodes best, where the loss falls on."
    lengths = iter([1.0, 3.0, 2.0, 1.5])
    kwargs = dict(num_train_epochs=4, metric_for_best_model="eval_mean_length")
    trainer = train(
        toy(),
        samples(),
        samples(3, 1),
        arguments(tmp_path, **kwargs),
        measure=lambda model: {"mean_length": next(lengths)},
    )
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.state.best_global_step == evaluations[1]["step"] and trainer.state.best_metric == 3.0
    assert evaluations[1]["eval_loss"] > evaluations[3]["eval_loss"]
    assert re.search(r"The best evaluation:\n.*\n.* 3\.000 ", _trained(trainer))


@pytest.mark.nightly
def test_every_rank_has_the_numbers(tmp_path):
    "Of two, the first alone decodes."
    port = free_port()

    def one_rank(rank):
        as_torchrun_says(rank, 2, port)
        lengths = iter([2.0, 1.0])

        def measure(model):
            assert rank == 0, "the second rank decodes too"
            return {"mean_length": next(lengths)}

        kwargs = dict(metric_for_best_model="eval_mean_length", ddp_backend="gloo")
        trainer = train(toy(), samples(), samples(3, 1), arguments(tmp_path, **kwargs), measure=measure)
        found = [row["eval_mean_length"] for row in trainer.state.log_history if "eval_loss" in row]
        return found, trainer.state.best_metric

    ranks = [forked.ask(partial(one_rank, rank)) for rank in (0, 1)]
    assert [answer() for answer in ranks] == [([2.0, 1.0], 2.0)] * 2
