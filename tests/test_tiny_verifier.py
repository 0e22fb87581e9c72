"""The shipped verifier: the architecture it promises, a mask of exactly what the assistant said, answers that are right
and end."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM, set_seed

DATA = Path(__file__).parent.parent / "data"
FOLDER = DATA / "tiny-verifier"
sys.path.insert(0, str(DATA / "make"))
import tiny_verifier as tv  # noqa: E402
from corpus import corpus  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_architecture(model, tokenizer):
    config = model.config
    assert isinstance(model, Qwen3ForCausalLM) and 1e6 <= model.num_parameters() <= 3e6
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (
        64,
        4,
        2,
        6,
    )
    assert config.vocab_size == len(tokenizer) == 2048 and config.max_position_embeddings >= 1024
    assert not config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_folder_is_small_complete_and_documented():
    files = {p.name: p.stat().st_size for p in FOLDER.iterdir()}
    assert sum(files.values()) <= 12e6
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "training_log.csv",
        "README.md",
    } <= set(files)
    card = (FOLDER / "README.md").read_text()
    assert all(word in card for word in ("tiny_verifier", "Apache-2.0", "CC0", "perplexity"))
    log = pd.read_csv(FOLDER / "training_log.csv")
    assert log["loss"].tail(50).mean() < 0.2 * log["loss"].head(5).mean()


def test_special_tokens_differ(tokenizer, model):
    ids = [
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.mask_token_id,
        tokenizer.convert_tokens_to_ids("<|im_start|>"),
    ]
    assert len(set(ids)) == 4 and None not in ids
    assert tokenizer.eos_token == "<|im_end|>" == tokenizer.decode(model.generation_config.eos_token_id)


def test_digits_are_single_tokens_and_text_survives(tokenizer):
    text = "12 + 345 = 357,\n\n    naïve → 東京 [1, 2]\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(sum(c.isdigit() for c in tokenizer.decode([i])) <= 1 for i in range(len(tokenizer)))


@pytest.mark.parametrize("system", [False, True])
def test_mask_covers_exactly_the_answers_and_their_end_tokens(tokenizer, system):
    rows = [row for row in corpus(60, heldout=True) if len(row["messages"]) > 2]
    assert rows
    for row in rows:
        messages = ([dict(role="system", content="Be brief.")] if system else []) + row["messages"]
        ids, mask = tv.encode(tokenizer, messages)
        spans = [
            (i, next((j for j in range(i, len(ids)) if not mask[j]), len(ids)))
            for i in range(len(ids))
            if mask[i] and not mask[i - 1]
        ]
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        assert [tokenizer.decode(ids[a:b]) for a, b in spans] == [text + tokenizer.eos_token for text in said]


def test_generation_prompt_is_a_prefix_of_the_whole(tokenizer):
    messages = corpus(1)[0]["messages"]
    whole, mask = tv.encode(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole[: len(prompt)] == prompt and mask[len(prompt)] == 1 and mask[len(prompt) - 1] == 0


def test_greedy_answers_are_right_end_and_do_not_loop(model, tokenizer):
    by_domain, single = tv.report(model, tokenizer, corpus(18, heldout=True))
    assert single["ended"].mean() >= 0.97, single[~single["ended"]].answer.tolist()
    assert single["distinct"].mean() > 0.8 and single["distinct"].min() > 0.3
    # sums and sorted lists are right about every second time and table look-ups are not: see the notebook; these three
    # it can do
    assert by_domain.loc[["copying", "code", "free"], "right"].min() > 0.8, by_domain
    assert single["right"].mean() > 0.55, by_domain
    assert by_domain["perplexity"].max() < 2


def test_sampled_answers_end(model, tokenizer):
    prompts = [row["messages"][:1] for row in corpus(24, heldout=True)]
    set_seed(0)
    ids = tv.answers(model, tokenizer, prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    assert sum(row[-1] == tokenizer.eos_token_id for row in ids) >= 23
    assert sum(map(tv.distinct, ids)) / len(ids) > 0.8


def test_batches_hold_every_document_once():
    documents = [([i + 1] * n, [1.0] * n) for i, n in enumerate([3, 9, 2, 9, 30, 1, 5])]
    batches = tv.make_batches(documents, tokens=20)
    rows = sorted([i for i in row if i] for ids, _ in batches for row in ids.tolist())
    assert rows == sorted(ids for ids, _ in documents)
    for ids, weights in batches:
        assert torch.equal(weights > 0, ids > 0)
        assert ids.numel() <= 20 or len(ids) == 1


def test_distinct_tells_a_loop_from_a_text():
    assert tv.distinct(list(range(20))) == 1 and tv.distinct([1, 2] * 20) < 0.1


def test_the_maker_writes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tv, "train", lambda model, batches: pd.DataFrame([dict(step=0, tokens=1, loss=1.0)]))
    table = pd.DataFrame(dict(domain=["code"], prompt=["Why?"], answer=["So."], right=[1.0])).set_index("domain")
    monkeypatch.setattr(tv, "report", lambda *args: (table[["right"]], table.reset_index()))
    tv.main(tmp_path / "verifier", n=60, n_plain=400)
    assert {p.name for p in (tmp_path / "verifier").iterdir()} == {p.name for p in FOLDER.iterdir()}
    card = (tmp_path / "verifier/README.md").read_text()
    assert (
        card.split("| plain")[0].replace("| 60,", "| 12000,") == (FOLDER / "README.md").read_text().split("| plain")[0]
    )
    assert "| code | 1.0 |" in card and "**Why?**\n\nSo." in card
