"""The shipped Qwen3 model of two million parameters: tokenizer, architecture, weights, training.
The initial weights hold an induction circuit; some nine CPU-minutes train it."""

import random
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] "
    "}}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"  # words, digits, signs, …


def train_tokenizer(
    texts: list[str],  # what the merges are learned from
    vocab_size: int = 2048,  # special tokens and the 256 bytes included
) -> PreTrainedTokenizerFast:  # with a chat template that marks the assistant's tokens
    "Byte-level BPE in which every digit is a token of its own."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}, but these texts gave only {found} tokens; pass more text")
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


def encode(
    tokenizer: PreTrainedTokenizerFast,  # with the chat template
    messages: list[dict],  # one conversation
) -> tuple[list[int], list[int]]:  # token ids; 1 for every assistant token
    "A conversation as ids and assistant mask."
    out: Any = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    return out["input_ids"], out["assistant_masks"]


def make_config(
    tokenizer: PreTrainedTokenizerFast,  # gives the vocabulary size and the special ids
) -> Qwen3Config:  # six layers of width 128
    """The architecture: Qwen3 with heads of 64, the smallest that every attention kernel takes;
    embeddings and head are not tied."""
    special: dict[str, Any] = dict(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
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
        **special,
    )


@torch.no_grad()
def add_copying_heads(
    model: Qwen3ForCausalLM,  # untrained; changed in place
    write: float = 2.0,  # size of what the first head writes, in embeddings
    copy: float = 6.0,  # size of what the second head copies
) -> None:
    """Write an induction circuit (2209.11895) into the initial weights: head 0 of layer 0 and
    head 0 of layer 1."""
    width, dim = model.config.hidden_size, model.config.head_dim
    heads: list[Any] = [layer.self_attn for layer in model.model.layers[:2]]
    first, second = heads
    embedding = model.model.embed_tokens.weight.normal_(0, 0.3)
    embedding[:, 0] = 1.0  # the same in every token: what a head can look at to see no content
    model.lm_head.weight.copy_(0.1 * embedding)
    model.lm_head.weight[:, 0] = 0.0
    rope: Any = model.config.rope_parameters
    frequency = rope["rope_theta"] ** (-torch.arange(dim // 2) / (dim // 2))
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
    first.o_proj.weight[:, :dim] = write * embedding.pow(2).mean().sqrt() * target

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
    second.o_proj.weight[:, :dim] = copy * read.T


def make_batches(
    documents: list[tuple[list[int], list[float]]],  # token ids, weight of predicting each
    tokens: int = 2048,  # most tokens in a batch, padding included
    pad: int = 0,  # token id of the padding
    seed: int = 0,  # order of the batches
    window: int = 256,  # documents that are sorted by length together
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # [B, L] int64 ids, [B, L] float weights, 0: pad
    """Documents of like length share a batch, each in a row of its own: little padding, short
    attention, and no neighbour to confuse."""
    rng, batches = random.Random(seed), []
    for start in range(0, len(documents), window):
        groups = [[]]
        for document in sorted(documents[start : start + window], key=lambda d: len(d[0])):
            if groups[-1] and (len(groups[-1]) + 1) * len(document[0]) > tokens:
                groups.append([])
            groups[-1].append(document)
        rng.shuffle(groups)
        batches += groups
    lists = [[[torch.tensor(x) for x in column] for column in zip(*group)] for group in batches]
    return [(pad_sequence(ids, True, pad), pad_sequence(weights, True).float()) for ids, weights in lists]


def training_documents(
    tokenizer: PreTrainedTokenizerFast,  # the verifier's
    conversations: list[dict],  # from `corpus`
    paragraphs: list[str],  # from `topics`
    prompt_weight: float = 0.1,  # of a token that the assistant did not write
    longest: int = 320,  # tokens; what is longer is cut
    seed: int = 0,  # order of the documents
) -> list[tuple[list[int], list[float]]]:  # token ids and weights
    "Conversations and plain paragraphs, shuffled."
    documents = []
    for row in conversations:
        ids, mask = encode(tokenizer, row["messages"])
        documents.append((ids[:longest], [m or prompt_weight for m in mask[:longest]]))
    for ids in tokenizer([f"{p}{tokenizer.eos_token}" for p in paragraphs])["input_ids"]:
        documents.append((ids[:longest], [1.0] * len(ids[:longest])))
    random.Random(seed).shuffle(documents)
    return documents


def weighted_loss(
    model: Qwen3ForCausalLM,  # any causal LM
    ids: torch.Tensor,  # [B, L] int64
    weights: torch.Tensor,  # [B, L]: weight of predicting the token at that position
) -> torch.Tensor:  # scalar, nats per unit of weight
    "Cross-entropy of every next token, averaged with weights."
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    return (losses * w).sum() / w.sum()


def train(
    model: Qwen3ForCausalLM,  # trained in place
    batches: list[tuple[torch.Tensor, torch.Tensor]],  # from `make_batches`
    muon_lr: float = 8e-3,  # peak, for the layers' matrices
    adamw_lr: float = 4e-3,  # peak, for everything else
) -> pd.DataFrame:  # step, tokens, loss
    """One pass. Both rates rise over 20 steps, stay, and fall to zero over the last 40 %.
    Returns the training log."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    inside = set(map(id, matrices))
    optimizers = [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in inside],
            lr=adamw_lr,
            weight_decay=0.0,
            betas=(0.9, 0.95),
        ),
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
