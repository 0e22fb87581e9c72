"""Decoding: ours beside transformers' own, on the same models and prompts, in one run; and suffix look-up at a million
tokens.

    python benchmarks/decode/run.py              all of it, about three minutes
    python benchmarks/decode/run.py --rounds 1   less of it

Method: a random llama (hidden 512, 8 layers, vocabulary 8000, float32, one thread) decodes greedily; its first two
layers are the draft model, and the others
add little, so that it is right at times. Greedy text of a random model soon repeats itself, so look-up has something to
find. Each prompt is decoded by every side in turn, in CPU time; both write the same tokens, which is checked. `bare` is
the verifier reading the very same passes
(as many tokens each, the same cache), and the draft model its own, without anything around them: what no decoder can
save. Results: benchmarks/decode/results/.
"""

import argparse
import copy
import os
import platform
import time
import warnings
from datetime import date
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.suffix_index import SuffixIndex
from speculators_nb.verifier.cache import cache_keyword, crop_cache
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
K, NEW, DAMP = 4, 96, 0.15


def models():
    torch.manual_seed(0)
    big = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8000,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            initializer_range=0.02,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    with torch.no_grad():
        for layer in big.model.layers[2:]:
            layer.self_attn.o_proj.weight *= DAMP
            layer.mlp.down_proj.weight *= DAMP
    small = copy.deepcopy(big)
    small.model.layers, small.config.num_hidden_layers = small.model.layers[:2], 2
    return big, small


def clock(run):
    start = time.process_time()
    out = run()
    return time.process_time() - start, out


def bare(verifier, generation, draft=None):
    "Only the passes of a generation, with the same cache handling: the verifier's, and a draft model's."
    cache, own, ids = DynamicCache(), DynamicCache(), torch.tensor([generation.prompt + generation.tokens])
    keyword = cache_keyword(LlamaForCausalLM.forward)
    read, own_cache = {keyword: cache}, {keyword: own}
    with torch.inference_mode():
        verifier.model(ids[:, : len(generation.prompt)], **read, logits_to_keep=1)
        for step in generation.steps:
            at, drafted = cache.get_seq_length(), torch.tensor(step.draft, dtype=torch.long)
            if draft is not None and len(drafted):
                draft(ids[:, own.get_seq_length() : at + 1], **own_cache, logits_to_keep=1)
                for token in drafted[:-1]:
                    draft(token.view(1, 1), **own_cache)
            verifier.model(torch.cat([ids[0, at : at + 1], drafted])[None], **read)
            crop_cache(cache, at + len(step.tokens))
            if draft is not None:
                crop_cache(own, min(own.get_seq_length(), at + len(step.tokens)))


def decoding(rounds):
    big, small = models()
    verifier, g = Verifier(big), torch.Generator().manual_seed(1)
    prompts = [torch.randint(8000, (n,), generator=g).tolist() for n in (24, 64, 160)]
    draft = DraftModel(small, verifier)
    hf = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    assistant = copy.deepcopy(small)
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0

    def theirs(prompt, **kwargs):
        return big.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **hf, **kwargs
        )[0, len(prompt) :].tolist()

    sides = {
        "plain": (lambda p: generate(verifier, NoDrafter(), p, k=0, max_new_tokens=NEW), lambda p: theirs(p)),
        "n-gram": (
            lambda p: generate(verifier, NgramDrafter(1, 2), p, k=10, max_new_tokens=NEW),
            lambda p: theirs(p, prompt_lookup_num_tokens=10),
        ),
        "draft model": (
            lambda p: generate(verifier, draft, p, k=K, max_new_tokens=NEW),
            lambda p: theirs(p, assistant_model=assistant),
        ),
    }
    rows = {name: dict(ours=[], theirs=[], bare=[], length=[]) for name in sides}
    for i in range(rounds + 1):
        for prompt in prompts:
            for name, (us, them) in sides.items():
                seconds, made = clock(lambda: us(prompt))
                other, text = clock(lambda: them(prompt))
                least, _ = clock(lambda: bare(verifier, made, small if name == "draft model" else None))
                assert made.tokens == text, name
                if i:  # the first round warms up
                    for key, x in (
                        ("ours", seconds),
                        ("theirs", other),
                        ("bare", least),
                        ("length", len(made.tokens) / (len(made.steps) + 1)),
                    ):
                        rows[name][key].append(x)
    return pd.DataFrame(
        {
            name: {
                "tokens a pass": np.mean(r["length"]),
                "ours / theirs, tokens per second": median(np.divide(r["theirs"], r["ours"])),
                "all around the passes, over bare": median(np.divide(r["ours"], r["bare"])) - 1,
            }
            for name, r in rows.items()
        }
    ).T


def suffix_lookup(total=1_000_000, vocab=32_000):
    rng = np.random.default_rng(0)
    law = 1 / np.arange(1, vocab + 1)
    law /= law.sum()
    phrases = [rng.choice(vocab, size=rng.integers(5, 40), p=law).tolist() for _ in range(3000)]
    texts, size = [], 0
    while size < total:
        text = []
        while len(text) < 400:
            text += (
                phrases[min(int(rng.exponential(200)), 2999)]
                if rng.random() < 0.5
                else rng.choice(vocab, size=20, p=law).tolist()
            )
        texts.append(text)
        size += len(text)
    index = SuffixIndex(24)

    def ingest():
        for text in texts:
            index.extend(index.start(), text)

    seconds, _ = clock(ingest)
    asked = [texts[rng.integers(len(texts))][: rng.integers(30, 400)] for _ in range(500)]
    times = [clock(lambda: index.propose(context, 16))[0] * 1e3 for context in asked]
    return {
        "tokens": size,
        "ingested tokens per second": round(size / seconds, -3),
        "ms a proposal, median": median(times),
        "ms a proposal, mean": np.mean(times),
        "ms a proposal, 99 %": np.quantile(times, 0.99),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    table, suffix = decoding(rounds), suffix_lookup()
    text = f"""# Decoding, {date.today()}

torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, one thread, CPU time,
{rounds} rounds of 3 prompts x {NEW} tokens; written by `benchmarks/decode/run.py`, whose head says how.

{table.to_markdown(floatfmt=".2f")}

Suffix look-up: {"; ".join(f"{name} {value:,.2f}".removesuffix(".00") for name, value in suffix.items())}.
"""
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/README.md").write_text(text)
    print(text)
