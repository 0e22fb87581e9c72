"""Greedy decoding with a drafter writes what the verifier writes alone, token for token.

In float32 every token must be equal. In bf16 the verifier's rows differ in the last bits with the number of tokens in a
pass, so a text may part from the other at a near tie: the first differing token passes if the two best logits there are
closer than four steps of bf16.
"""

import json

import torch

from benchmarks.gpu.device import pick
from benchmarks.gpu.equal import DTYPES, ROOT, VERIFIER, drafter

TRAINED = {"eagle3": ROOT / "data/tiny-drafter"}  # has learned its verifier, so that tokens are accepted
TEXTS, TOKENS, DRAFTED = {"toy": 2, "device": 16}, {"toy": 10, "device": 64}, 3
TIE = 4 * 2.0**-8


def prompts(count):
    """Token ids of the first questions of the corpus."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(VERIFIER)
    with open(ROOT / "data/corpus/heldout.jsonl") as lines:
        chats = [json.loads(next(lines))["messages"][:1] for _ in range(count)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def near_tie(verifier, ids):
    """Whether the verifier hardly prefers its best next token to its second best."""
    first, second = verifier(torch.tensor([ids], device=verifier.device)).logits[0, -1].float().topk(2).values.tolist()
    return first - second <= TIE * abs(first)


def first_difference(a, b):
    """Index of the first differing token, or None."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def run(cell, turn):
    """A row with the growing KV cache, and one with CUDA graphs for a trained drafter: texts compared,
    those that part at a near tie, those that differ otherwise."""
    from speculators_nb.decode.generate import NoDrafter, generate
    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.verifier.tapped_model import Verifier

    device, name, dtype = pick(), cell["drafter"], DTYPES[cell["dtype"]] or torch.float32
    model = (
        SpeculatorModel.from_pretrained(TRAINED[name], verifier=VERIFIER).to(device)
        if name in TRAINED
        else drafter(name, device)[0]
    )
    proposer = model.to(dtype).drafter()
    verifier = Verifier.from_pretrained(str(VERIFIER), list(proposer.aux_layer_ids), dtype=dtype, device=device)
    options, asked = dict(max_new_tokens=TOKENS[cell["size"]], eos_token_ids=(2,)), prompts(TEXTS[cell["size"]])
    alone = [generate(verifier, NoDrafter(), ids, k=0, **options).tokens for ids in asked]
    for kv_cache in ("dynamic", "graphs") if name in TRAINED else ("dynamic",):
        tied = wrong = kept = steps = 0
        for ids, text in zip(asked, alone):
            ours = generate(verifier, proposer, ids, k=DRAFTED, kv_cache=kv_cache, **options)
            at = first_difference(text, ours.tokens)
            steps, kept = steps + len(ours.steps), kept + sum(step.accepted for step in ours.steps)
            if at is not None:
                tie = dtype != torch.float32 and near_tie(verifier, [*ids, *text[:at]])
                tied, wrong = tied + tie, wrong + (not tie)
        yield dict(
            drafter=name,
            dtype=cell["dtype"],
            kv_cache=kv_cache,
            texts=len(asked),
            near_ties=tied,
            different=wrong,
            accepted_a_step=kept / max(steps, 1),
            ok=not wrong,
        )
