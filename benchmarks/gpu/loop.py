"""The decode loop of a random verifier of a billion parameters with an EAGLE-3 drafter: where a step's time goes.

`draft`, `verification` and `rule` are timed apart, the device waited for after each; `step` is what `generate` takes
for a step as it is, which waits once: the middle of three runs. The overhead is what `step` takes beyond draft and
verification.
A random drafter's tokens are hardly ever accepted, so a step writes one token; its time does not depend on that.
Each is done with a growing KV cache, with a static one (`static`: all steps have one shape), and with a static one
whose verification is replayed as a CUDA graph (`graphs`; on a CPU the same as `static`). Their texts are compared.
"""

import gc
import tempfile
import time
from functools import partial
from itertools import product

import torch

from benchmarks.gpu.decode import first_difference, near_tie
from benchmarks.gpu.device import pick, wait
from benchmarks.gpu.step import waits

SIZES = {  # the device's: those of Llama-3.2-1B
    "device": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, heads=32, vocab=128256),
    "toy": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, heads=4, vocab=512),
}
PROMPT, STEPS, DRAFTED = {"device": 512, "toy": 16}, {"device": 24, "toy": 6}, 5
TREE = dict(speculative_tokens=59, expansion_factor=10, depth=6)
DRAFT_VOCAB = {"device": 32000, "toy": 256}
RUNS = 3
PROPOSALS = ("chain", "tree")
KV_CACHES = ("dynamic", "static", "graphs")


def models(size, device):
    """A verifier in bf16 (float32 on a CPU) and a drafter of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from speculators_nb.nn.draft_vocabulary import vocab_mapping_from_frequencies
    from speculators_nb.train.train_drafter import new_drafter
    from speculators_nb.verifier.tapped_model import Verifier

    shape = dict(SIZES[size])
    vocab, heads = shape.pop("vocab"), shape.pop("heads")
    heads = dict(num_attention_heads=heads, num_key_value_heads=heads // 4)
    config = LlamaConfig(vocab_size=vocab, max_position_embeddings=4096, tie_word_embeddings=True, **heads, **shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        mapping = vocab_mapping_from_frequencies(torch.ones(config.vocab_size), DRAFT_VOCAB[size], config.vocab_size)
        drafter = new_drafter("eagle3", folder, draft_vocab_size=DRAFT_VOCAB[size], mapping=mapping)
        drafter = drafter.to(device, dtype).drafter()
    return Verifier(model, list(drafter.aux_layer_ids)), drafter


class Parts:
    """Seconds of draft and verification, the device waited for after each."""

    def __init__(self, device):
        self.device, self.seconds = device, dict(draft=[], verification=[], rule=[])

    def timed(self, name, call):
        def run(*args, **kwargs):
            wait(self.device)
            began = time.perf_counter()
            result = call(*args, **kwargs)
            wait(self.device)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        return run

    def of(self, name):
        """The middle of its times, the first step's left out."""
        found = sorted(self.seconds[name][1:])
        return found[len(found) // 2]


def timed_parts(verifier, drafter, options):
    """Decode once with each part timed."""
    from unittest.mock import patch

    from speculators_nb.decode import generate as module

    parts, context_for, contexts = Parts(verifier.device), module.context_for, []

    def context(*args):
        made = context_for(*args)
        made.read = parts.timed("verification", made.read)
        contexts.append(made)
        return made

    with (
        patch.object(module, "context_for", context),
        patch.object(module, "propose", parts.timed("draft", module.propose)),
        patch.object(module, "choose", parts.timed("rule", module.choose)),
    ):
        module.generate(verifier, drafter, **options)
    for made in contexts:
        del made.read  # it refers to its context, which would keep its buffers until a garbage collection
    return {name: parts.of(name) for name in parts.seconds}


def verdict_of(verifier, prompt, plain, tokens, temperature):
    """How a text compares with that of the growing KV cache; in bf16 the last bits of a logit depend on the kernel."""
    at = first_difference(plain, tokens)
    if at is None:
        return "equal"
    tie = not temperature and near_tie(verifier, [*prompt, *plain[:at]])
    return f"equal up to token {at}" + (", a near tie" if tie else "")


def measured(verifier, drafter, options):
    """The generation, and seconds of a step in each of some runs; the prompt's pass counts as one."""
    from speculators_nb.decode.generate import generate

    seconds = []
    for _ in range(RUNS):
        given = options()
        gc.collect()
        wait(verifier.device)
        began = time.perf_counter()
        done = generate(verifier, drafter, **given)
        wait(verifier.device)
        seconds.append((time.perf_counter() - began) / (len(done.steps) + 1))
    return done, seconds


def run(cell, turn):
    """A row for a chain and one for a tree, greedy and sampled, with every KV cache."""
    from speculators_nb.core.registry import DynamicTreeTokenProposalConfig
    from speculators_nb.decode.generate import generate
    from speculators_nb.decode.proposal_setup import TreeDrafter
    from speculators_nb.decode.tree import Sampling

    device, size = pick(), cell["size"]
    verifier, chain = models(size, device)
    prompt = torch.randint(verifier.vocab_size, (PROMPT[size],), generator=torch.Generator().manual_seed(1)).tolist()
    drafters = dict(zip(PROPOSALS, (chain, TreeDrafter(chain, DynamicTreeTokenProposalConfig(**TREE)))))
    plain = None
    for proposal, temperature, kv_cache in product(PROPOSALS, (0.0, 1.0), KV_CACHES):
        drafter = drafters[proposal]

        def options(temperature=temperature, kv_cache=kv_cache):
            sampling = Sampling(temperature, torch.Generator(device).manual_seed(1))
            more = dict(max_new_tokens=STEPS[size], kv_cache=kv_cache)
            return dict(prompt_ids=prompt, k=DRAFTED, sampling=sampling, **more)

        with turn():  # a turn for each row: a longer one would end within it, and the others would go on
            generate(verifier, drafter, **options())  # warm up; a graph is recorded
            done, runs = measured(verifier, drafter, options)
            parts = timed_parts(verifier, drafter, options())
            waited = waits(partial(generate, verifier, drafter, **options()), device)
        if kv_cache == "dynamic":
            plain = done.tokens
        step = sorted(runs)[len(runs) // 2]
        yield dict(
            proposal=proposal,
            temperature=temperature,
            kv_cache=kv_cache,
            steps=len(done.steps),
            seconds=step,
            runs=runs,
            **{f"{name}_seconds": value for name, value in parts.items()},
            overhead=step / (parts["draft"] + parts["verification"]) - 1,
            waits_a_step=waited and waited / (len(done.steps) + 1),
            text=verdict_of(verifier, prompt, plain, done.tokens, temperature),
        )
