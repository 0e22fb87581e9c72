"""Periodic on-policy training: fresh answers are the verifier's own whatever drafts, a killed run continues to the bit,
and what cannot work is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from test_trainer import Stop
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import speculators_nb.train.fresh_answers as fresh_answers
from speculators_nb.data.chat_encoding import save_prepared, to_dataset
from speculators_nb.data.prepare import prepare
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.features.feature_folder import table_of
from speculators_nb.features.in_process import LiveFeatures, extract_features
from speculators_nb.lab.experiment import settings
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.regenerate.in_process import answer
from speculators_nb.train.fresh_answers import FreshAnswers, answer_again, parts_of
from speculators_nb.train.train_drafter import new_drafter, train_drafter
from speculators_nb.train.trainer import log_table
from speculators_nb.verifier.tapped_model import Verifier

PATH = shipped_data() / "tiny-verifier"
STOP = 2


def rows(n, longest=10**6):
    "The first shipped answers that are not longer."
    lines = map(json.loads, (shipped_data() / "answers/train.jsonl").read_text().splitlines())
    short = (line for line in lines if len(line["input_ids"]) <= longest)
    return [{name: line[name] for name in ("input_ids", "loss_mask")} for _, line in zip(range(n), short)]


@pytest.fixture(scope="module")
def tiny():
    "The shipped verifier, and a drafter that nobody has trained."
    drafter = new_drafter("eagle3", PATH).eval().drafter()
    return Verifier.from_pretrained(PATH, drafter.aux_layer_ids, dtype="float32"), drafter


def test_the_parts_of_a_row():
    row = dict(input_ids=[1, 2, 3, 4, 5, 6, 7], loss_mask=[0, 1, 1, 0, 0, 1, 0])
    assert parts_of(row) == [[1], [2, 3], [4, 5], [6], [7]]
    assert parts_of(row | dict(loss_mask=[0] * 7)) == [[1, 2, 3, 4, 5, 6, 7]]
    assert parts_of(row | dict(loss_mask=[True] * 7)) == [[], [1, 2, 3, 4, 5, 6, 7], []]


def test_greedy_answers_are_those_without_a_drafter(tiny):
    "Token for token, turn by turn, by another decoder; and what is not trained stays."
    verifier, drafter = tiny
    given = rows(3)
    plain = Verifier(verifier.model)
    fresh = answer_again(verifier, drafter, given, k=3, max_new_tokens=48, eos_token_ids=[STOP])
    turns = []
    for row, new in zip(given, fresh):
        text, mask, between = [], [], parts_of(row)[::2]
        for i, part in enumerate(between):
            text, mask = text + part, mask + [0] * len(part)
            if i + 1 < len(between):
                (own,) = answer(plain, [text], 48, [STOP])
                text, mask = text + own, mask + [1] * len(own)
                if own[-1] != STOP:
                    break
        turns.append(i)
        assert (new["input_ids"], new["loss_mask"]) == (text, mask)
        assert len(text) > len(between[0])
    assert {*turns} == {0, 1, 2}, "rows that are cut in the first turn, in the second, and not at all"


def test_sampled_answers_have_the_verifier_s_distribution():
    "Chi-square of the token behind a draft, against the exact distribution; a drafter that nobody has trained."
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=6, initializer_range=0.2, **sizes)).eval()
    drafter = SimpleNamespace(aux_layer_ids=(), reset=lambda: None, propose=always_the_first)
    n = 2000
    given = [dict(input_ids=[1, 3, 5], loss_mask=[0, 0, 1])] * n
    sampling = Sampling(1.0, torch.Generator().manual_seed(0))
    fresh = answer_again(Verifier(model), drafter, given, k=1, max_new_tokens=3, sampling=sampling)
    counts = np.zeros((6, 6))
    for row in fresh:
        assert row["loss_mask"] == [0, 0, 1, 1, 1]
        counts[row["input_ids"][2], row["input_ids"][3]] += 1
    with torch.no_grad():
        first = model(torch.tensor([[1, 3]])).logits[0, -1].softmax(-1)
        ids = torch.tensor([[1, 3, token] for token in range(6)])
        joint = first[:, None] * model(ids).logits[:, -1].softmax(-1)
    expected = n * joint.double().numpy()
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 70  # 35 degrees of freedom: one in 2,000 is above
    assert min(row["forward_passes"] for row in fresh) == 2, "no draft was accepted"


def always_the_first(tokens, features, k, sampling):
    return TokenTree.chain(torch.zeros(k, dtype=torch.long))


def test_rows_that_cannot_be_answered_stay_and_the_context_ends_a_row(tiny):
    _, drafter = tiny
    begins = dict(input_ids=[5, 6, 7], loss_mask=[True, True, False])
    untrained = dict(input_ids=[5, 6, 7], loss_mask=[0, 0, 0])
    model = Verifier.from_pretrained(PATH, drafter.aux_layer_ids, dtype="float32")
    model.model.config.max_position_embeddings = 6
    long = dict(input_ids=[5, 6, 7, 8, 9], loss_mask=[0, 0, 1, 0, 1])
    kept, same, cut = answer_again(model, drafter, [begins, untrained, long], k=2, max_new_tokens=16)
    assert kept == dict(input_ids=[5, 6, 7], loss_mask=[1, 1, 0], forward_passes=0)
    assert same == dict(input_ids=[5, 6, 7], loss_mask=[0, 0, 0], forward_passes=0)
    assert len(cut["input_ids"]) == 6 and cut["loss_mask"] == [0, 0, 1, 1, 1, 1]


# --- in a training ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "rows"
    save_prepared(to_dataset([(row["input_ids"], row["loss_mask"]) for row in rows(6, longest=56)]), folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def two_batches():
    "Of the 5 rows that are trained on."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fresh_answers, "BATCH", 3)
        yield


def trained(prepared, output, **given):
    common = dict(total_seq_len=128, num_train_epochs=3, logging_steps=1, disable_tqdm=True, eval_share=0.2)
    often = dict(save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1)
    own = settings("eagle3") | common | often | dict(regenerate_every=1) | given
    return train_drafter(prepared, output, PATH, "eagle3", **own)


@pytest.fixture(scope="module")
def whole(prepared, two_batches, tmp_path_factory):
    "A run that was not interrupted."
    output = tmp_path_factory.mktemp("whole")
    return trained(prepared, output), output


def stored(output, epoch):
    return [json.loads(line) for line in (output / f"fresh_answers/epoch-{epoch}.jsonl").read_text().splitlines()]


def test_the_rows_are_answered_again_and_the_held_out_ones_stay(prepared, whole):
    trainer, output = whole
    assert sorted(p.name for p in (output / "fresh_answers").iterdir()) == ["epoch-2.jsonl", "epoch-3.jsonl"]
    source, indices = trainer.train_dataset.dataset, trainer.train_dataset.indices
    given, last = LiveFeatures(Verifier.from_pretrained(PATH), table_of(prepared)), stored(output, 3)
    assert len(indices) == len(last) == 5 and len(source) == 6
    for i, row in zip(indices, last):
        ids, mask = source.tokens(i)
        assert ids.tolist() == row["input_ids"] and mask.tolist() == [bool(x) for x in row["loss_mask"]]
        assert parts_of(row)[0] == parts_of(dict(zip(("input_ids", "loss_mask"), given.tokens(i))))[0]
    for i in {*range(6)} - {*indices}:
        assert torch.equal(source.tokens(i)[0], given.tokens(i)[0])
    assert [row["input_ids"] for row in last] != [row["input_ids"] for row in stored(output, 2)]
    assert trainer.state.global_step % 3 == 0 and trainer.state.epoch == 3
    again = prepare(last, AutoTokenizer.from_pretrained(PATH), 512)  # as any answers
    assert list(again["input_ids"]) == [row["input_ids"] for row in last]


@pytest.mark.parametrize("where", ["while answering", "in mid-epoch"])
def test_a_killed_run_continues_to_the_bit(prepared, whole, tmp_path, monkeypatch, where):
    "What was finished is kept: the batch that the kill has torn is answered again, and no other."
    reference, folder = whole
    append, batches = fresh_answers.append_lines, []

    def killed_once(file, lines):
        batches.append(file.name)
        if where == "while answering" and len(batches) == 2:
            with open(file, "ab") as torn:
                torn.write(lines[: len(lines) * 2 // 3])  # some whole lines, and a part of one
            raise KeyboardInterrupt
        append(file, lines)

    monkeypatch.setattr(fresh_answers, "append_lines", killed_once)
    callbacks = [Stop(reference.state.global_step - 1)] if where == "in mid-epoch" else []
    with pytest.raises(KeyboardInterrupt):
        trained(prepared, tmp_path, callbacks=callbacks)
    before = len(batches)
    resumed = trained(prepared, tmp_path, resume_from_checkpoint=True)
    left = ["epoch-2.jsonl", "epoch-3.jsonl", "epoch-3.jsonl"]
    assert batches[before:] == (left if where == "while answering" else [])
    assert all(stored(tmp_path, epoch) == stored(folder, epoch) for epoch in (2, 3))
    pd.testing.assert_frame_equal(log_table(resumed), log_table(reference), check_exact=True)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), reference.model.parameters()))


def test_answers_last_for_so_many_epochs_and_greedy_ones_are_the_same(prepared, tmp_path):
    (tmp_path / "fresh_answers").mkdir()
    (tmp_path / "fresh_answers/epoch-9.jsonl").touch()  # of a run before
    rare = dict(save_strategy="no", eval_strategy="no", eval_share=0, regenerate_every=2)
    trained(prepared, tmp_path, num_train_epochs=5, regenerate_temperature=0.0, overwrite=True, **rare)
    assert sorted(p.name for p in (tmp_path / "fresh_answers").iterdir()) == ["epoch-3.jsonl", "epoch-5.jsonl"]
    texts = [[row["input_ids"] for row in stored(tmp_path, epoch)] for epoch in (3, 5)]
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_a_resume_with_other_answers_is_refused(prepared, whole):
    for other, words in (
        (dict(regenerate_every=2), "regenerate_every was 1, is 2"),
        (dict(regenerate_temperature=0.5), "regenerate_temperature was 1.0, is 0.5"),
    ):
        with pytest.raises(ValueError, match=f"another run: {words}"):
            trained(prepared, whole[1], num_train_epochs=6, resume_from_checkpoint=True, **other)


# --- what cannot work -------------------------------------------------------------------------------------------------


def test_stored_features_are_refused(prepared, tmp_path):
    extract_features(Verifier.from_pretrained(PATH), prepared, tmp_path / "features")
    with pytest.raises(ValueError, match=r"regenerate_every=1: the verifier must run in this process.*its rows/"):
        trained(tmp_path / "features", tmp_path / "drafter")


def test_a_run_that_ends_before_is_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match="regenerate_every=3: the run has 3 epochs.*lower it"):
        trained(prepared, tmp_path, regenerate_every=3)


def test_ranks_and_pictures_are_refused(prepared):
    source = LiveFeatures(Verifier.from_pretrained(PATH), table_of(prepared))
    with pytest.raises(ValueError, match="regenerate_every=1: one process writes the answers, and there are 2 ranks"):
        FreshAnswers(source, SimpleNamespace(regenerate_every=1, world_size=2))
    source.rows = source.rows.add_column("messages", [[]] * len(source))
    with pytest.raises(ValueError, match="regenerate_every=1: the rows hold pictures"):
        FreshAnswers(source, SimpleNamespace(regenerate_every=1, world_size=1))
