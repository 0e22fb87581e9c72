"""Limits of a row: the verifier's context and the packed row are the same limits where rows are made, read, trained
and decoded; what exceeds one is counted and named, and nothing that was done is lost."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from test_trainer import samples, toy
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from speculators_nb.data.prepare import prepare_data
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.acceptance import Refused, evaluate
from speculators_nb.evaluate.comparison import evaluate_as_engine
from speculators_nb.evaluate.prompts import Prompt, encode_each
from speculators_nb.evaluate.while_training import decoded_acceptance
from speculators_nb.features.checks import check_features
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.features.in_process import extract_features
from speculators_nb.regenerate.in_process import regenerate
from speculators_nb.train.trainer import train
from speculators_nb.verifier.row_limits import RowLimits
from speculators_nb.verifier.tapped_model import Verifier

TINY = Path(__file__).parents[1] / "data/tiny-verifier"
SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=4)


def small(folder, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Verifier.from_pretrained(folder, [1, 2, 3])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = LlamaConfig(**SIZES, max_position_embeddings=32, num_key_value_heads=1, initializer_range=0.4)
    return small(tmp_path_factory.mktemp("llama"), config)


def table(*lengths):
    masks = [[i >= n // 2 for i in range(n)] for n in lengths]
    ids = [[i % 60 for i in range(n)] for n in lengths]
    return Dataset.from_dict(dict(input_ids=ids, loss_mask=masks, seq_len=lengths)).with_format("torch")


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# --- prepare -----------------------------------------------------------------------------------------------------


@pytest.fixture
def short_context(tmp_path):
    "The shipped tokenizer with a verifier of 64 positions; no weights are read."
    folder = tmp_path / "verifier"
    folder.mkdir()
    for file in (f for f in TINY.iterdir() if f.suffix in (".json", ".jinja")):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def chat(words, turns=1):
    asked = [{"role": "user", "content": "Tell it."}, {"role": "assistant", "content": "The cat sat. " * words}]
    return {"messages": asked * turns}


@pytest.mark.parametrize(
    "settings, rows, beyond",
    [
        (dict(max_length=4096), 3, 2),
        (dict(max_length=65), 3, 2),  # cut, and still beyond
        (dict(max_length=64), 3, 0),
        (dict(max_length=4096, rows="turn"), 4, 3),  # the second turn of the last is beyond as well
        (dict(max_length=100, too_long="drop"), 1, 0),
    ],
)
def test_rows_beyond_the_context_are_counted_where_they_are_made(
    short_context, tmp_path, caplog, settings, rows, beyond
):
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(c) for c in (chat(3), chat(60), chat(40, turns=2))))
    prepared = prepare_data(file, short_context, tmp_path / "prepared", num_proc=1, **settings)
    assert len(prepared) == rows
    name = "longer than the verifier's context of 64 tokens"
    counts = {what: n for what, n in prepared.table["rows"].items() if what == name}
    assert counts == ({name: beyond} if beyond else {})
    said = warnings_of(caplog)
    assert len(said) == bool(beyond)
    for text in said:
        assert f"{beyond} of {rows} rows" in text and "line 2" in text and "max_length=64 (--max-length)" in text


# --- features ----------------------------------------------------------------------------------------------------


def test_rows_beyond_the_context_are_counted_where_they_are_read(llama, tmp_path, caplog):
    folder = tmp_path / "features"
    assert extract_features(llama, table(10, 40, 33), folder)["written"] == 3
    (said,) = warnings_of(caplog)
    assert "2 of 3 rows are longer than the verifier's context of 32 tokens" in said and "number 1" in said
    caplog.clear()
    data = FeatureDataset(folder)
    check_features(data, llama.model.name_or_path)  # as `train` does
    (said,) = warnings_of(caplog)
    assert "2 of 3 rows" in said and "the longest has 40" in said


def test_a_row_beyond_learned_positions_is_an_error_with_a_remedy(tmp_path):
    config = GPT2Config(vocab_size=64, n_embd=16, n_head=2, n_layer=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    verifier = small(tmp_path / "gpt2", config)
    with pytest.raises(ValueError, match=r"a row of 40 tokens: .* positions for 32; .*--max-length"):
        extract_features(verifier, table(10, 40), tmp_path / "features")
    assert extract_features(verifier, table(10, 32), tmp_path / "fitting")["written"] == 2


# --- train -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, late, limit, expected",
    [
        ((20, 8, 30), 0, 32, None),
        ((20, 8, 30), 0, 18, "2 of 3 rows are longer than a packed row (total_seq_len=18): the first is number 0"),
        ((20, 8, 30), 24, 18, None),  # nothing of it can be trained: refused below
        ((9, 8, 30), 7, 12, "1 of 3 rows is longer"),
    ],
)
def test_samples_longer_than_a_packed_row_are_counted(tmp_path, caplog, lengths, late, limit, expected):
    rows = [
        {k: v[:n] if len(v) >= n else v.repeat(n, *[1] * (v.ndim - 1))[:n] for k, v in s.items()}
        for n, s in zip(lengths, samples(3))
    ]
    rows = [s | dict(loss_mask=torch.arange(len(s["input_ids"])) >= late) for s in rows]
    given = dict(output_dir=str(tmp_path / "run"), num_train_epochs=1, total_seq_len=limit, disable_tqdm=True)
    if late >= limit:
        with pytest.raises(ValueError, match=r"total_seq_len=18: the rows have up to 29 .*total_seq_len=29"):
            train(toy(), rows, None, **given)
        return
    train(toy(), rows, None, **given)
    said = [text for text in warnings_of(caplog) if "packed row" in text]
    assert [text.split(": ", 1)[1].startswith(expected) for text in said] == [True] * bool(expected)


def test_samples_that_keep_no_loss_are_counted(tmp_path, caplog):
    rows = [s | dict(loss_mask=torch.arange(len(s["input_ids"])) >= 10) for s in samples(12)]
    train(toy(), rows, rows[:4], output_dir=str(tmp_path), num_train_epochs=2, total_seq_len=10, disable_tqdm=True)
    said = [text for text in warnings_of(caplog) if "packed row" in text]
    long = sum(len(s["input_ids"]) > 11 for s in rows)
    lost = sum(len(s["input_ids"]) > 11 and not s["loss_mask"][1:11].any() for s in rows)
    assert [text.split(":")[0] for text in said] == ["evaluation", "training"]  # each once in two epochs
    assert f"{long} of 12 rows" in said[1] and (
        f"{lost} of them keep no" in said[1] if lost else "keeps some" in said[1]
    )


# --- evaluate ----------------------------------------------------------------------------------------------------

GOOD = [[1, 2, 3, 1, 2], [4], [5, 5, 6, 5, 5]]
BAD = {
    "beyond the context": [7] * 32,
    "empty": [],
    "not of its vocabulary": [64],
    "not whole": [7.5, 8.0],
    "template": Refused("it fails"),
}


@pytest.mark.parametrize("run", [evaluate, evaluate_as_engine])
@pytest.mark.parametrize("name", BAD)
def test_a_prompt_that_cannot_be_measured_is_skipped_and_named(llama, tmp_path, caplog, run, name):
    drafters, given = {"n-gram": NgramDrafter()}, dict(k=2, max_new_tokens=8)
    prompts = [GOOD[0], BAD[name], *GOOD[1:]]
    found = run(llama, drafters, prompts, domains=["a", "b", "a", "c"], **given)
    without = run(llama, drafters, GOOD, domains=["a", "a", "c"], **given)
    assert found.summary.equals(without.summary) and found.positions.equals(without.positions)
    assert found.requests.prompt.tolist() == [0, 2, 3] and found.skipped.prompt.tolist() == [1]
    assert [text.startswith("prompt 1 of 4 is skipped: ") for text in warnings_of(caplog)] == [True]
    found.save(tmp_path)
    kept = (tmp_path / ("skipped.csv" if run is evaluate else "settings.json")).read_text()
    assert found.skipped.why[0].split()[0] in kept
    with pytest.raises(ValueError, match="none of 1 prompts can be measured"):
        run(llama, drafters, [BAD[name]], **given)


def test_the_longest_prompt_that_leaves_a_token_is_measured(llama):
    found = evaluate(llama, {"n-gram": NgramDrafter()}, [[7] * 31, [7] * 32, GOOD[0]], k=2, max_new_tokens=8)
    assert found.requests.tokens.tolist() == [1, 8] and found.skipped.prompt.tolist() == [1]


def test_a_prompt_that_is_too_long_does_not_end_a_training(llama):
    measure = decoded_acceptance(llama, [GOOD[0], [7] * 40], k=2, max_new_tokens=8)

    class Model:
        device = torch.device("cpu")
        drafter = staticmethod(NgramDrafter)

    assert measure(Model())["mean_length"] >= 1
    with pytest.raises(ValueError, match="none of 1 prompts can be measured"):
        decoded_acceptance(llama, [[7] * 40], k=2)


def test_a_prompt_that_the_template_refuses_is_skipped():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    user, system = ([{"role": role, "content": "hello"}] for role in ("user", "system"))
    good, bad, text = encode_each([Prompt("all", user), Prompt("all", system), Prompt("all", text="hello")], tokenizer)
    assert good and text and isinstance(bad, Refused) and "no system" in bad.why


@pytest.mark.parametrize(
    "config, context",
    [
        (dict(max_position_embeddings=512, rope_scaling={"type": "linear", "factor": 4.0}), 2048),
        (dict(n_positions=99), 99),
        (dict(max_position_embeddings=8192, rope_parameters={"rope_type": "yarn", "factor": 4.0}), 8192),
        (
            dict(
                max_position_embeddings=131072, original_max_position_embeddings=4096, rope_scaling={"type": "longrope"}
            ),
            131072,
        ),
        ({}, None),
    ],
)
def test_the_context_of_a_config(config, context):
    class Text:
        def __init__(self):
            vars(self).update(config)

        def get_text_config(self):
            return self

    assert RowLimits.of(Text()) == (context, None)
    fits = RowLimits.of(Text(), total_seq_len=50).exceeded
    assert fits(50) == [] and fits(51) == ["total_seq_len"]


# --- regenerate ------------------------------------------------------------------------------------------------------


def test_answers_end_with_the_context_and_longer_prompts_are_named(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = GPT2Config(vocab_size=2048, n_embd=16, n_head=2, n_layer=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    verifier = small(tmp_path / "gpt2", config)
    chats = [{"id": str(n), "messages": [{"role": "user", "content": "cat " * n}]} for n in (1, 5, 60)]
    report = regenerate(verifier, tokenizer, chats, tmp_path / "answers.jsonl", max_new_tokens=64)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == [32, 32] and report["finish_reasons"] == {"length": 2}
    assert sum(report["failed"].values()) == 1 and "prompt of 32 tokens or more" in str(report["failed"])
