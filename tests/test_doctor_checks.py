"""The doctor's checks one by one, on the shipped verifier and drafter: each finds what it is for, and is content with
what is sound. Whole diagnoses are in test_doctor.py."""

import copy
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from speculators_nb.data.prepare import prepare
from speculators_nb.decode.generate import Generation
from speculators_nb.decode.step import Step
from speculators_nb.decode.tree import TokenTree
from speculators_nb.doctor import data_checks as data
from speculators_nb.doctor import drafter_checks as checks
from speculators_nb.doctor.doctor import DECODED, Diagnosis, Examination, answered_rows, find_sources
from speculators_nb.evaluate.acceptance import Evaluation, acceptance_summary, acceptance_table, request_table
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.features.feature_rows import feature_path, read_features, write_features
from speculators_nb.features.in_process import extract_features
from speculators_nb.lab.experiment import heldout_prompts
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.verifier.identity import VerifierInfo
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]
TINY, SHIPPED = ROOT / "data/tiny-verifier", ROOT / "data/tiny-drafter"
ANSWERS = [json.loads(line) for line in (ROOT / "data/answers/train.jsonl").read_text().splitlines()]


def rows_of(answers):
    return [data.DataRow(np.array(r["input_ids"]), np.array(r["loss_mask"], bool)) for r in answers]


ROWS = rows_of(ANSWERS[:48])


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def verifier():
    return Verifier.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return SpeculatorModel.from_pretrained(SHIPPED, verifier=TINY, dtype=torch.float32)


@pytest.fixture(scope="module")
def stored(verifier, tokenizer, tmp_path_factory):
    "A folder of features."
    folder = tmp_path_factory.mktemp("features")
    extract_features(verifier, prepare(copy.deepcopy(ANSWERS[:12]), tokenizer, 2048), folder)
    return folder


@pytest.fixture
def features(stored):
    return FeatureDataset(stored)


def test_the_first_finding_is_that_of_the_first_stage():
    good, bad = data.judged("loss mask", False, "46 %", ""), data.judged("shift", True, "token i", "extract again")
    later = data.judged("engine", True, "1.9 tokens a step", "look above")
    assert (good.state, bad.state, bad.page) == ("ok", "finding", data.STAGES["shift"])
    found = Diagnosis([later, good, bad])
    assert found.first == bad and Diagnosis([good]).first is None
    assert found.table()["page"].tolist() == ["", bad.page, later.page]


def test_template_and_mask(tokenizer):
    prompt = data.generation_prompt(tokenizer)
    starts = data.places_after(ROWS[0].input_ids, prompt)
    assert len(starts) and ROWS[0].loss_mask[starts].all()
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}### {{m['role']}}: {{m['content']}}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant: {% endif %}"
    )
    assert [data.template_check(ROWS, tok).state for tok in (tokenizer, other)] == ["ok", "finding"]
    everything = [data.DataRow(ids, np.ones_like(mask)) for ids, mask in ROWS]
    late = [data.DataRow(ids, mask & np.concatenate([[False], mask[:-1]])) for ids, mask in ROWS]
    states = [data.mask_check(rows, tokenizer).state for rows in (ROWS, everything, late)]
    assert states == ["ok", "finding", "finding"]
    other.chat_template = "{% for m in messages %}{{m['content']}}\n{% endfor %}"  # as of Mistral: no generation prompt
    assert data.template_check(ROWS, other).state == "not checked" and data.mask_check(ROWS, other).state == "ok"


def test_a_generation_prompt_has_the_tokens_that_it_has_in_a_text():
    "A tokenizer that puts a blank before a text, as Llama 2's, spells the same words otherwise where a text begins."
    spelling = Tokenizer(models.BPE())
    spelling.pre_tokenizer = pre_tokenizers.Metaspace()
    spelling.train_from_iterator(["Why?\nBot: Because."] * 9, trainers.BpeTrainer(vocab_size=99))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling)
    tokenizer.chat_template = (
        "{% for m in messages %}{{'\n' if m['role'] == 'assistant'}}{{'Bot: ' if m['role'] == 'assistant'}}"
        "{% generation %}{{m['content']}}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}{{'\n'}}Bot:{% endif %}"
    )
    talk = [dict(role="user", content="Why?"), dict(role="assistant", content="Because.")]
    rows = rows_of(prepare([{"messages": talk}], tokenizer, 99))
    assert tokenizer("\nBot:")["input_ids"] != data.generation_prompt(tokenizer)
    assert data.template_check(rows, tokenizer).state == "ok"


def test_answers_of_the_verifier_and_of_others(verifier, tokenizer):
    rng, replaced = np.random.default_rng(0), []
    for ids, mask in ROWS[:24]:
        ids, at = ids.copy(), np.flatnonzero(mask)[::10]
        ids[at] = rng.integers(3, 2048, len(at))
        replaced.append(data.DataRow(ids, mask))
    prompt = data.generation_prompt(tokenizer)
    prose = tokenizer("A mapping object maps hashable values to arbitrary objects. " * 2)["input_ids"]
    ids = np.array(prompt + prose)
    foreign = [data.DataRow(ids, np.arange(len(ids)) >= len(prompt))]
    assert data.agreement(verifier, ROWS[:24]).surprise < 0.1
    assert data.agreement(verifier, replaced).surprise > data.MOST_SURPRISE
    assert data.answers_check(verifier, ROWS[:24]).state == "ok"
    assert data.answers_check(verifier, foreign).state == "finding"


def test_a_draft_vocabulary_that_is_too_small():
    counts = np.bincount(np.concatenate([r.input_ids[r.loss_mask] for r in ROWS]), minlength=2048)
    t2d = torch.zeros(2048, dtype=torch.bool)
    t2d[torch.as_tensor(np.argsort(-counts)[:64].copy())] = True
    assert [data.vocabulary_check(mapping, ROWS).state for mapping in (None, t2d)] == ["ok", "finding"]


def test_features_of_another_verifier_shift_or_layer(verifier, stored, features, tmp_path):
    everywhere = list(range(len(features)))
    assert data.verifier_check(VerifierInfo.of(TINY).fingerprint, TINY).state == "ok"
    assert data.verifier_check("0" * 16, TINY).state == "finding"
    shares = data.offset_agreement(verifier, features, everywhere)
    assert max(shares, key=shares.get) == 1 and data.shift_check(verifier, features, everywhere).state == "ok"
    untrained, read = FeatureDataset(stored), features.read
    untrained.read = lambda i: (read(i)[0], torch.zeros_like(read(i)[1], dtype=torch.bool), read(i)[2])
    assert data.shift_check(verifier, untrained, everywhere).state == "not checked"
    moved = FeatureDataset(shutil.copytree(stored, tmp_path / "moved"))
    for i in everywhere:
        ids = features.tokens(i)[0]
        states = read_features(feature_path(stored, i), ids)
        write_features(feature_path(tmp_path / "moved", i), states.roll(1, 0), ids, states.dtype)
    assert data.shift_check(verifier, moved, everywhere).state == "finding"
    assert data.features_check(verifier, features, everywhere[:4], (2, 3, 4)).state == "ok"
    assert data.features_check(verifier, features, everywhere[:2], (2, 3, 5)).state == "finding"
    other, generator = Verifier.from_pretrained(TINY), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (p for p in other.model.parameters() if p.ndim == 2):
            p += 0.1 * p.std() * torch.randn(p.shape, generator=generator)
    assert data.features_check(other, features, everywhere[:4]).state == "finding"
    misnamed = FeatureDataset(stored)
    misnamed.layer_ids = [1, 2, 3, 6]
    assert "layer 1 is layer 2's" in data.features_check(verifier, misnamed, everywhere[:4]).evidence


def test_weights_flags_and_head(model, features):
    state, options = model.saved_state(), dict(ttt_steps=4)
    batches = checks.heldout_batches(model, features, [0, 1, 2, 3])
    now = checks.measure(model, batches, options)
    assert [f.state for f in checks.repair_checks(model, state, TINY, batches, options)] == ["ok", "ok"]
    config = copy.deepcopy(model.config)
    config.norm_before_residual = not config.norm_before_residual
    flipped = type(model).from_pretrained(config=config, state_dict=state, verifier=TINY)
    assert checks.repair_checks(flipped, state, TINY, batches, options)[1].state == "finding"
    shuffled = copy.deepcopy(model)
    shuffled.lm_head.weight = torch.nn.Parameter(state["lm_head.weight"].flip(0), requires_grad=False)
    assert checks.repair_checks(shuffled, shuffled.saved_state(), TINY, batches, options)[0].state == "finding"
    recorded = pd.DataFrame({"eval_full_acc_0": [None, now.first + 0.01]})
    assert checks.history_check(now, recorded).state == "ok"
    assert checks.history_check(checks.measure(shuffled, batches, options), recorded).state == "finding"
    assert checks.history_check(now, pd.DataFrame()).state == "not checked"
    assert now.tokens == sum(int(batch["loss_mask"][:, 1:].sum()) for batch in batches)


def test_a_token_more_or_less_is_no_finding():
    "One of 69 held-out tokens was right; of 600 tokens here 7 are."
    history = pd.DataFrame({"eval_full_acc_0": [1 / 69]})
    states = [checks.history_check(checks.Measurement(9.0, 7 / 600, 1.0, n), history).state for n in (600, 60_000, 0)]
    assert states == ["ok", "finding", "not checked"]


def test_mapping_and_draft_length(model):
    ids, cut, state = torch.arange(100, 1100), copy.deepcopy(model.config), model.saved_state()
    cut.draft_vocab_size = len(ids)

    def reduced(named):
        t2d = torch.zeros(2048, dtype=torch.bool).index_fill_(0, named, True)
        weights = state | dict(t2d=t2d, d2t=named - torch.arange(len(ids)))
        weights["lm_head.weight"] = state["lm_head.weight"][ids]
        return type(model).from_pretrained(config=cut, state_dict=weights, verifier=TINY)

    states = [checks.mapping_check(m, TINY).state for m in (model, reduced(ids), reduced(ids + 1))]
    assert states == ["ok", "ok", "finding"]
    trained = [checks.length_check(model, record).state for record in (dict(ttt_steps=4), dict(ttt_steps=2), {})]
    assert trained == ["ok", "finding", "not checked"]


def test_what_a_history_shows():
    rows = rows_of(ANSWERS)
    table = checks.pair_accuracy(rows[:950], rows[950:])
    assert 0.3 < table < 0.45
    logged = dict(step=[60, 120], learning_rate=3e-5, grad_norm=[3.9, 3.7])
    states = [
        checks.learned_check(pd.DataFrame(logged | dict(eval_position_0_acc=[None, accuracy])), table).state
        for accuracy in (0.4, 0.02)
    ]
    assert states == ["ok", "finding"]
    steps = dict(step=[40, 80, 120, 127])
    held = [None, None, None, 5.33]
    many = pd.DataFrame(steps | dict(epoch=[0.3, 0.6, 0.9, 1], loss=[13.7, 6.5, 5.5, None], eval_loss=held))
    held = [9.9, 6.0, 6.5, 6.8]
    few = pd.DataFrame(steps | dict(epoch=[8, 16, 24, 30], loss=[9.7, 3.0, 1.1, None], eval_loss=held))
    assert [checks.data_check(history, 40).state for history in (many, few)] == ["ok", "finding"]
    assert checks.learning_curve(few).doubling == pytest.approx(1 - 6.8 / 9.9)
    assert math.isnan(checks.learning_curve(many).doubling)


def test_gaps_are_those_that_were_measured():
    runs = pd.read_csv(ROOT / "benchmarks/data_size/results/data_size.csv").query("seed == 0")
    runs = runs.sort_values("epochs", ascending=False)
    gaps = 1 - runs.train_loss / runs.held_out_loss
    assert dict(zip(runs.epochs.round(1), gaps.round(2))) == checks.MEASURED_GAPS
    runs = runs.rename(columns={"train_loss": "loss", "held_out_loss": "eval_loss"}).assign(step=300)
    states = [checks.data_check(runs.iloc[[i]]).state for i in range(len(runs))]
    assert states == ["finding", "finding", "ok", "ok"]


def test_acceptance_domains_and_engine(model, tokenizer, tmp_path):
    drafter = model.drafter()
    verifier = Verifier.from_pretrained(TINY, drafter.aux_layer_ids)
    ids, domains = heldout_prompts(read_corpus(ROOT / "data/corpus/heldout.jsonl"), tokenizer, 4)
    decoded = checks.decode(verifier, drafter, "eagle3", ids, 4, {2}, domains)
    assert checks.acceptance_check(decoded, decoded.length).state == "ok" and checks.cliff(decoded) is None
    assert checks.acceptance_check(decoded, 2 * decoded.length).state == "finding"

    class TwoPositions:
        "From the third position on its tokens are others."

        aux_layer_ids, reset = drafter.aux_layer_ids, drafter.reset

        def propose(self, tokens, features, k, sampling):
            tree = drafter.propose(tokens, features, k, sampling)
            wrong = (tree.tokens + 1) % 2048
            return TokenTree(torch.where(tree.depth > 2, wrong, tree.tokens), tree.parents, tree.probs)

    short = checks.decode(verifier, TwoPositions(), "two", ids, 4, {2}, domains)
    found = checks.acceptance_check(short, math.nan, 2)
    assert checks.cliff(short) == 3 and found.state == "finding" and found.remedy.startswith("draft 2 tokens")

    def without(domain):
        return rows_of(r for r in ANSWERS if r["domain"] != domain)

    table = checks.seen_by_domain(decoded, without(None))
    absent = min(set(domains) - {table.mean_length.idxmax()})
    less = checks.domains_check(checks.seen_by_domain(decoded, without(absent)))
    assert checks.domains_check(table).state == "ok" and less.state == "finding" and absent in less.remedy
    assert checks.tree_note(verifier, drafter, decoded, ids[:2], {2}).state == "note"
    with pytest.raises(FileNotFoundError, match=r"summary\.csv"):
        checks.engine_check(tmp_path, decoded)
    decoded.evaluation.save(tmp_path)
    run = pd.read_csv(tmp_path / "summary.csv").assign(k=4, concurrency=1)
    for factor, state in ((1.0, "ok"), (0.6, "finding")):
        run.assign(mean_length=run.mean_length * factor).to_csv(tmp_path / "summary.csv", index=False)
        assert checks.engine_check(tmp_path, decoded).state == state
    # of several drafters, lengths and temperatures the one that is comparable
    others = [run.assign(mean_length=1.0, **{name: v}) for name, v in (("k", 1), ("drafter", "a"), ("temperature", 1))]
    pd.concat([others[0], others[1], run, others[2]]).to_csv(tmp_path / "summary.csv", index=False)
    assert checks.engine_check(tmp_path, decoded).state == "ok"
    others[2].to_csv(tmp_path / "summary.csv", index=False)
    assert "at temperature 1; here 0: not comparable" in checks.engine_check(tmp_path, decoded).evidence
    # a prompt beyond the context is left out, and its domain and its answer with it
    skipping = checks.decode(verifier, drafter, "eagle3", [[5] * 9999, *ids], 4, {2}, ["long", *domains])
    assert checks.seen_by_domain(skipping, without(None)).equals(table)
    assert answered_rows(skipping.answers)[0]["input_ids"] == ids[0] + decoded.answers[0].tokens


def test_a_sound_drafter_has_no_cliff_and_no_lost_length():
    "Neither where few drafts come as far as the position before, nor where fewer are drafted than trained."

    def decoded(accepted):
        answers = [
            Generation([1], [1], [Step(3, [1] * 3, n, [1] * (n + 1)) for n in row], "length") for row in accepted
        ]
        summary = pd.DataFrame([acceptance_summary(answers, 3) | dict(domain="all")])
        tables = dict(positions=acceptance_table(answers, 3), requests=request_table(answers, 3))
        return checks.Decoded(Evaluation(summary, generations={}, **tables), 3, "eagle3")

    few = decoded([[0, 0, 1, 0, 2, 0, 1, 1], [0, 1, 0, 0, 2, 1, 0, 0]])  # two of two end behind position 2
    assert few.rates == [7 / 16, 2 / 7, 0] and checks.cliff(few) is None
    assert checks.cliff(decoded([[0, 2] * 20] * 2)) == 3, "none of forty"
    history = {f"eval_full_acc_{i}": 0.8**i for i in (1, 2, 3, 4, 5)}
    assert checks.predicted_length(history, "eval_") == pytest.approx(1 + sum(history.values()))
    assert checks.predicted_length(history, "eval_", 2) == pytest.approx(2.44)
    block = dict(eval_eal=3.0, eval_position_1_acc=0.8, eval_position_2_acc=0.7, eval_position_3_acc=0.5)
    assert checks.predicted_length(block, "eval_") == checks.predicted_length(block, "eval_", 3) == 3
    assert math.isnan(checks.predicted_length(block, "eval_", 2)), "of a part of a block it is not known"


def test_an_examination_with_features_and_without(stored):
    answer = Generation([5, 6], [7], [], "stop")
    assert answered_rows([answer])[0] == dict(input_ids=[5, 6, 7], loss_mask=[0, 0, 1], seq_len=3)
    with pytest.raises(ValueError, match="no drafter"):
        find_sources(TINY)
    e = Examination(find_sources(SHIPPED, TINY, stored))
    assert len(e.rows) == len(e.some) == 12 and len(e.to_decode) == len(e.split[1]) > 0
    e = Examination(find_sources(SHIPPED, TINY))
    assert e.features is None and len(e.to_decode) == 4 * DECODED
