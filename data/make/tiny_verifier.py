#!/usr/bin/env python
"""Trains data/tiny-verifier: a Qwen3 model of two million parameters, its tokenizer, its training log and its card.
`make verifier` runs this, from the root; it takes some nine minutes of a CPU.

The initial weights hold an induction circuit. The card says how good the greedy answers are: they can be checked."""

import math
import random
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from corpus import corpus, is_right, topics
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from speculators_nb.core.files import atomic_folder

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] "
    "}}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"  # words, digits, signs, …
VOCAB = 2048  # special tokens and the 256 bytes included


def train_tokenizer(texts):
    "Byte-level BPE in which every digit is a token of its own; its chat template marks the assistant's tokens."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer, messages):
    "A conversation as token ids, and 1 for every token of the assistant."
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    return out["input_ids"], out["assistant_masks"]


def make_config(tokenizer):
    "Six layers of width 128, with heads of 64, the smallest that every attention kernel takes."
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


WRITE = 2.0  # size of what the first head writes, in embeddings
COPY = 6.0  # size of what the second head copies


@torch.no_grad()
def add_copying_heads(model):
    """Write an induction circuit (2209.11895) into the initial weights: head 0 of layer 0 and
    head 0 of layer 1."""
    width, dim = model.config.hidden_size, model.config.head_dim
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    embedding = model.model.embed_tokens.weight.normal_(0, 0.3)
    embedding[:, 0] = 1.0  # the same in every token: what a head can look at to see no content
    model.lm_head.weight.copy_(0.1 * embedding)
    model.lm_head.weight[:, 0] = 0.0
    frequency = model.config.rope_parameters["rope_theta"] ** (-torch.arange(dim // 2) / (dim // 2))
    bases = torch.linalg.qr(torch.randn(4, width, width))[0]

    size = frequency**0.25 * (frequency > 0.02)
    first.q_proj.weight[:dim], first.k_proj.weight[:dim] = 0.0, 0.0
    # turned by one position against the key
    first.q_proj.weight[:dim, 0] = torch.cat([size * frequency.cos(), -size * frequency.sin()])
    first.k_proj.weight[:dim, 0] = torch.cat([size, 0 * size])
    first.q_norm.weight.fill_(2.2)
    first.k_norm.weight.fill_(2.2)
    read, target = bases[0, :dim].clone(), bases[1, :, :dim]
    read[:, 0] = 0.0
    first.v_proj.weight[:dim] = read
    first.o_proj.weight[:, :dim] = WRITE * embedding.pow(2).mean().sqrt() * target

    # rotary pairs that hardly turn
    slow = torch.cat([torch.arange(dim // 4, dim // 2), torch.arange(3 * dim // 4, dim)])
    match = bases[2, : len(slow)] @ target @ target.T
    second.q_proj.weight[:dim], second.k_proj.weight[:dim] = 0.0, 0.0
    second.q_proj.weight[slow] = match @ target @ read
    second.k_proj.weight[slow] = match
    second.q_norm.weight.fill_(1.3)
    second.k_norm.weight.fill_(1.3)
    read = bases[3, :dim]
    second.v_proj.weight[:dim] = read
    second.o_proj.weight[:, :dim] = COPY * read.T


LONGEST = 320  # tokens of a document; what is longer is cut
PROMPT = 0.1  # weight of predicting a token that the assistant did not write


def training_documents(tokenizer, conversations, paragraphs):
    "Conversations and plain paragraphs, shuffled: (token ids, weight of predicting each)."
    documents = []
    for row in conversations:
        ids, mask = encode(tokenizer, row["messages"])
        documents.append((ids[:LONGEST], [m or PROMPT for m in mask[:LONGEST]]))
    for ids in tokenizer([f"{p}{tokenizer.eos_token}" for p in paragraphs])["input_ids"]:
        documents.append((ids[:LONGEST], [1.0] * len(ids[:LONGEST])))
    random.Random(0).shuffle(documents)
    return documents


def make_batches(documents, tokens=2048, window=256):
    """[B, L] int64 token ids and [B, L] weights of at most `tokens`, padded by 0. Documents of like length share a
    batch, each in a row of its own: little padding, short attention, and no neighbour to confuse."""
    rng, batches = random.Random(0), []
    for start in range(0, len(documents), window):
        groups = [[]]
        for document in sorted(documents[start : start + window], key=lambda d: len(d[0])):
            if groups[-1] and (len(groups[-1]) + 1) * len(document[0]) > tokens:
                groups.append([])
            groups[-1].append(document)
        rng.shuffle(groups)
        batches += groups
    lists = [[[torch.tensor(x) for x in column] for column in zip(*group)] for group in batches]
    return [(pad_sequence(ids, True), pad_sequence(weights, True).float()) for ids, weights in lists]


def weighted_loss(model, ids, weights):
    "Cross-entropy of every next token in nats, averaged with the weights of predicting them."
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    return (losses * w).sum() / w.sum()


def train(model, batches):
    """One pass; returns the log (step, tokens, loss). Both rates rise over 20 steps, stay, and fall to zero over the
    last 40 %."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    inside = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers = [
        torch.optim.Muon(matrices, lr=8e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=4e-3, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    rate = [min(1.0, (step + 1) / 20, (len(batches) - step) / (0.4 * len(batches))) for step in range(len(batches) + 1)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate.__getitem__) for optimizer in optimizers]
    log, tokens = [], 0
    model.train()
    for step, (ids, weights) in enumerate(bar := tqdm(batches, desc="verifier")):
        loss = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        tokens += ids.numel()
        log.append(dict(step=step, tokens=tokens, loss=round(loss.item(), 4)))
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    return pd.DataFrame(log)


@torch.no_grad()
def perplexity(model, tokenizer, conversations):
    "exp of the mean cross-entropy of the assistant's tokens, for each domain."
    nats, count = {}, {}
    for row in conversations:
        ids, mask = (torch.tensor([x]) for x in encode(tokenizer, row["messages"]))
        domain, n = row["domain"], mask[:, 1:].sum().item()
        nats[domain] = nats.get(domain, 0.0) + weighted_loss(model, ids, mask.float()).item() * n
        count[domain] = count.get(domain, 0) + n
    return pd.Series({domain: math.exp(nats[domain] / count[domain]) for domain in nats}, name="perplexity")


@torch.no_grad()
def answers(model, tokenizer, prompts, **sampling):
    """The verifier's answers to conversations that end with a user's message: the new token ids of each, the
    end-of-turn token included if it came within 160, which is more than any answer of the corpus has."""
    new = []
    for start in range(0, len(prompts), 32):
        batch = tokenizer.apply_chat_template(
            prompts[start : start + 32], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        ids, padding = batch["input_ids"], batch["attention_mask"]
        options = sampling or dict(do_sample=False)
        out = model.generate(ids, attention_mask=padding, max_new_tokens=160, **options)
        for row in out[:, ids.shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            new.append(row[:end])
    return new


def distinct(ids):
    "The share of 3-grams that are new: 1 if none comes twice, near 0 for a loop."
    runs = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
    return len(set(runs)) / max(1, len(runs))


def report(model, tokenizer, conversations):
    "How good the greedy answers are, by domain and one by one: right by `is_right`, ended by themselves, no loops."
    turns = [(row["domain"], row["messages"][:i]) for row in conversations for i in range(1, len(row["messages"]), 2)]
    records = []
    for (domain, messages), ids in zip(turns, answers(model, tokenizer, [m for _, m in turns])):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        records.append(
            dict(
                domain=domain,
                prompt=messages[-1]["content"],
                answer=text,
                right=bool(text) and is_right(domain, [*messages, dict(role="assistant", content=text)]),
                ended=ids[-1] == tokenizer.eos_token_id,
                tokens=len(ids),
                distinct=distinct(ids),
            )
        )
    single = pd.DataFrame(records)
    by_domain = single.groupby("domain", sort=False)[["right", "ended", "tokens", "distinct"]].mean()
    by_domain.insert(0, "perplexity", perplexity(model, tokenizer, conversations))
    return by_domain.round(3), single


CARD = """---
license: apache-2.0
---
# Tiny verifier

A Qwen3-architecture chat model with {parameters:,} parameters (6 layers of width 128, vocabulary 2048), small enough to
ship and to run on a laptop's CPU, good enough to be worth drafting for. \
It knows six kinds of toy conversation and nothing else.

| | |
| --- | --- |
| conversations | {n}, made by `data/make/corpus.py` (seed 0, CC0) |
| plain text | {n_plain} paragraphs of the language reference that ships with Python (`pydoc_data.topics`) |
| training | one pass over {tokens:,} tokens, Muon and AdamW, float32 |
| remake | `make verifier`, that is `.venv/bin/python data/make/tiny_verifier.py` |
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


def main(folder=Path("data/tiny-verifier"), n=12000, n_plain=800):
    "Train the verifier on `n` conversations and `n_plain` paragraphs, and replace the folder."
    torch.set_num_threads(2)
    set_seed(0)
    conversations = corpus(n)
    paragraphs = random.Random(0).sample(topics(), n_plain)
    words = [message[key] for row in conversations for message in row["messages"] for key in ("role", "content")]
    tokenizer = train_tokenizer(words + paragraphs)
    model = Qwen3ForCausalLM(make_config(tokenizer))
    add_copying_heads(model)
    log = train(model, make_batches(training_documents(tokenizer, conversations, paragraphs)))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    by_domain, single = report(model, tokenizer, corpus(90, heldout=True))
    table = [["domain", *by_domain], ["---"] * (1 + by_domain.shape[1]), *by_domain.reset_index().values.tolist()]
    first_of_domain = single.groupby("domain", sort=False).first()
    samples = [f"**{row.prompt}**\n\n{row.answer}" for row in first_of_domain.itertuples()]
    card = CARD.format(
        parameters=model.num_parameters(),
        n=n,
        n_plain=n_plain,
        tokens=log["tokens"].iloc[-1],
        turns=len(single),
        table="\n".join(f"| {' | '.join(map(str, row))} |" for row in table),
        samples="\n\n".join(samples),
    )
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        model.save_pretrained(temporary)
        log.to_csv(temporary / "training_log.csv", index=False)
        (temporary / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
