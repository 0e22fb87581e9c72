"""The shipped verifier of two million parameters: perplexity, answers, model card.
Its greedy answers can be checked, and one command makes it again."""

import math
import random
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fastcore.script import call_parse
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed

from ..core.files import atomic_folder
from .corpus import corpus, is_right, topics
from .tiny_model import (
    add_copying_heads,
    encode,
    make_batches,
    make_config,
    train,
    train_tokenizer,
    training_documents,
    weighted_loss,
)


@torch.no_grad()
def perplexity(
    model: Qwen3ForCausalLM,  # the verifier
    tokenizer: PreTrainedTokenizerFast,  # its tokenizer
    conversations: list[dict],  # held out
) -> pd.Series:  # by domain, over the assistant's tokens
    "exp of the mean cross-entropy of the assistant's tokens, for each domain."
    by_domain = {}
    for row in conversations:
        ids, mask = encode(tokenizer, row["messages"])
        by_domain.setdefault(row["domain"], []).append((ids, mask))
    values = {}
    for domain, documents in by_domain.items():
        nats = count = 0.0
        for ids, mask in documents:
            ids, mask = torch.tensor([ids]), torch.tensor([mask], dtype=torch.float)
            nats = nats + weighted_loss(model, ids, mask).item() * mask[:, 1:].sum().item()
            count = count + mask[:, 1:].sum().item()
        values[domain] = math.exp(nats / count)
    return pd.Series(values, name="perplexity")


@torch.no_grad()
def answers(
    model: Any,  # the verifier; transformers' types give a Qwen3ForCausalLM no `generate`
    tokenizer: PreTrainedTokenizerFast,  # its tokenizer
    prompts: list[list[dict]],  # conversations that end with a user message
    temperature: float = 0.0,  # 0 is greedy; above it, plain sampling from the whole vocabulary
    max_new_tokens: int = 160,  # more than any answer of the corpus
    seed: int = 0,  # of the sampling
    batch_size: int = 32,  # conversations at once
) -> list[list[int]]:  # the new token ids of each, the end-of-turn token included if it came
    "The verifier's answers."
    set_seed(seed)
    sampling = (
        dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    )
    new = []
    for start in range(0, len(prompts), batch_size):
        batch: Any = tokenizer.apply_chat_template(
            prompts[start : start + batch_size],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        )
        out = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            **sampling,
        )
        for row in out[:, batch["input_ids"].shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            new.append(row[:end])
    return new


def distinct(
    ids: list[int],  # a text
    n: int = 3,  # length of the runs compared
) -> float:  # 1 if no run of n tokens comes twice; near 0 for a loop
    "The share of n-grams that are new."
    runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(runs)) / max(1, len(runs))


def report(
    model: Qwen3ForCausalLM,  # the verifier
    tokenizer: PreTrainedTokenizerFast,  # its tokenizer
    conversations: list[dict],  # held out
) -> tuple[pd.DataFrame, pd.DataFrame]:  # rows by domain; greedy answers (right, tokens, …)
    "How good the greedy answers are: right by `is_right`, ended by themselves, no loops."
    turns = [(row["domain"], row["messages"][:i]) for row in conversations for i in range(1, len(row["messages"]), 2)]
    records = []
    for (domain, messages), ids in zip(turns, answers(model, tokenizer, [m for _, m in turns])):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        right = bool(text) and is_right(domain, [*messages, dict(role="assistant", content=text)])
        records.append(
            dict(
                domain=domain,
                prompt=messages[-1]["content"],
                answer=text,
                right=right,
                ended=ids[-1] == tokenizer.eos_token_id,
                tokens=len(ids),
                distinct=distinct(ids),
            )
        )
    single = pd.DataFrame(records)
    by_domain = single.groupby("domain", sort=False)[["right", "ended", "tokens", "distinct"]].mean()
    by_domain.insert(0, "perplexity", perplexity(model, tokenizer, conversations))
    return by_domain.round(3), single


def as_markdown(
    frame: pd.DataFrame,  # small
) -> str:  # a Markdown table, the index first
    "A table for the card (`DataFrame.to_markdown` would want another package)."
    rows = [
        [frame.index.name or "", *frame.columns],
        ["---"] * (1 + frame.shape[1]),
        *frame.reset_index().values.tolist(),
    ]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


CARD = """---
license: apache-2.0
---
# Tiny verifier

A Qwen3-architecture chat model with {parameters:,} parameters \
({layers} layers of width {width}, vocabulary {vocab}), \
small enough to
ship and to run on a laptop's CPU, good enough to be worth drafting for. \
It knows six kinds of toy conversation and nothing else.

| | |
| --- | --- |
| conversations | {n}, made by `speculators_nb.lab.corpus` (seed {seed}, CC0) |
| plain text | {n_plain} paragraphs of the language reference that ships with Python \
(`pydoc_data.topics`) |
| training | one pass over {tokens:,} tokens, Muon and AdamW, float32 |
| remake | `make verifier`, that is `.venv/bin/python -m speculators_nb.lab.tiny_verifier` |
| licence | weights and code Apache-2.0, corpus CC0-1.0 |

Retraining gives the same quality, not the same bytes: sums of floats depend \
on the machine, and Python's language reference on its version.

## Greedy answers to {turns} held-out prompts

`right`: the answer agrees with a solver that reads the prompt \
(a free answer: keeps to its subject and ends). `ended`: within 160 tokens.
`distinct`: share of 3-grams that are new within an answer.

{table}

## Samples (greedy)

{samples}
"""


def model_card(
    model: Qwen3ForCausalLM,  # the verifier
    by_domain: pd.DataFrame,  # from `report`
    single: pd.DataFrame,  # likewise
    **made_from: Any,  # n, n_plain, seed and tokens of the training
) -> str:
    "The card: what the verifier is, how it was made, how good its answers are."
    first_of_domain = single.groupby("domain", sort=False).first()
    samples = [f"**{row.prompt}**\n\n{row.answer}" for row in first_of_domain.itertuples()]
    return CARD.format(
        parameters=model.num_parameters(),
        layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        vocab=model.config.vocab_size,
        turns=len(single),
        table=as_markdown(by_domain),
        samples="\n\n".join(samples),
        **made_from,
    )


@call_parse
def main(
    folder: Path = Path("data/tiny-verifier"),  # replaced when everything is written
    n: int = 12000,  # conversations
    n_plain: int = 800,  # paragraphs of Python's language reference
    seed: int = 0,  # of everything
    threads: int = 2,  # CPU threads
) -> None:
    "Train the verifier and write it with its tokenizer, training log and card."
    torch.set_num_threads(threads)
    set_seed(seed)
    conversations = corpus(n, seed)
    paragraphs = random.Random(seed).sample(topics(), n_plain)
    messages = [message for row in conversations for message in row["messages"]]
    words = [message[key] for message in messages for key in ("role", "content")]
    tokenizer = train_tokenizer(words + paragraphs)
    model = Qwen3ForCausalLM(make_config(tokenizer))
    add_copying_heads(model)
    documents = training_documents(tokenizer, conversations, paragraphs, seed=seed)
    log = train(model, make_batches(documents, seed=seed))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    by_domain, single = report(model, tokenizer, corpus(90, seed, heldout=True))
    made_from = dict(n=n, n_plain=n_plain, seed=seed, tokens=log["tokens"].iloc[-1])
    card = model_card(model, by_domain, single, **made_from)
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        model.save_pretrained(temporary)
        log.to_csv(temporary / "training_log.csv", index=False)
        (temporary / "README.md").write_text(card, encoding="utf-8")
