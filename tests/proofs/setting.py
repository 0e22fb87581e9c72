"""What the proofs run on: the shipped verifier, every proposer, the prompts, and the exact law of what the verifier
writes."""

import copy
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from memo import Deterministic, Grown, Independent, Memory, Sequential, inverse
from transformers import AutoTokenizer

import speculators_nb.decode.generate as decoder
from speculators_nb.core.registry import DynamicTreeTokenProposalConfig, StaticTreeTokenProposalConfig
from speculators_nb.decode import acceptance_rules, tree
from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.tree import probabilities
from speculators_nb.decode.tree_growth import draw_greedy_plus_one, parse_tree
from speculators_nb.evaluate.speedup import step_costs
from speculators_nb.evaluate.when_to_stop import LengthByConfidence, StoppingDrafter
from speculators_nb.lab.experiment import CONTENDERS, heldout_prompts, train_equally
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.serve.speculative_config import ServedDrafter
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).resolve().parents[2]
SHIPPED, TRAINED = ROOT / "data/tiny-verifier", ROOT / "output/drafters"
LEARNED = list(CONTENDERS)
PARALLEL = ("peagle", "dflash", "medusa")  # the law of a slot does not depend on what was drawn before it
LOOKUPS = ("n-gram", "suffix")
TREES = {
    "static": StaticTreeTokenProposalConfig(initial_branching_factor=2, branching_factor=2, depth=2),
    "dynamic": DynamicTreeTokenProposalConfig(speculative_tokens=7, expansion_factor=3, depth=3),
    "Medusa's": parse_tree("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"),
}


def learned(name):
    "A trained drafter; what `make compare` trained is taken, what is missing is trained and kept."
    if not (TRAINED / name / "model.safetensors").is_file():
        train_equally(TRAINED, contenders={name: CONTENDERS[name]})
    return SpeculatorModel.from_pretrained(TRAINED / name, verifier=SHIPPED).drafter()


def draft_model(verifier, layers=3):
    "The first layers of the verifier."
    small = copy.deepcopy(verifier.model)
    small.model.layers = small.model.layers[:layers]
    small.config.num_hidden_layers = layers
    small.config.layer_types = small.config.layer_types[:layers]
    return DraftModel(small, verifier)


def make(name, drafters, verifier):
    "A proposer by its name: 'eagle', 'eagle argmax', 'eagle static', 'n-gram' ..."
    base, _, kind = name.partition(" ")
    if base == "n-gram":
        return NgramDrafter()
    if base == "suffix":
        return SuffixDrafter(max_requests=50)
    drafter = draft_model(verifier) if base == "draft-model" else drafters[base]
    if kind == "argmax":
        return ServedDrafter(drafter, greedy=True)
    if kind == "stopping":
        return StoppingDrafter(drafter, LengthByConfidence(step_costs(3, 0.2)))
    if kind == "greedy+1":
        return TreeDrafter(drafter, TREES["static"], draw_greedy_plus_one)
    return TreeDrafter(drafter, TREES[kind]) if kind else drafter


def remembered(name, drafter, memory):
    """The same, with its deterministic part remembered; nothing of what learns from text to text (suffix decoding, and
    when to stop)."""
    base, _, kind = name.partition(" ")
    if base == "suffix" or kind == "stopping":
        return drafter
    if kind in ("argmax", "dynamic") or base == "n-gram":
        return Deterministic(drafter, memory)
    if kind:
        return Grown(drafter, memory)
    return (Independent if base in PARALLEL else Sequential)(drafter, memory)


def shipped(layers):
    "The verifier, its tokenizer, and the held-out prompts with their domains."
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    return (
        Verifier.from_pretrained(SHIPPED, layers),
        tokenizer,
        heldout_prompts(list(read_corpus(ROOT / "data/corpus/heldout.jsonl")), tokenizer)[0],
    )


def stories(verifier, prompts):
    """Two prompts within a story, where the verifier has choices. `once`: sixteen words into its answer to the eighth
    held-out prompt. `retold`: that answer whole, the prompt again, and fourteen words into the second telling; here
    look-up has something to find."""
    ask = prompts[7]

    def greedy(n):
        return verifier.model.generate(torch.tensor([ask]), do_sample=False, max_new_tokens=n)[0, len(ask) :].tolist()

    story = greedy(60)
    return {"once": ask + story[:16], "retold": ask + story + ask + story[:14]}


@torch.inference_mode()
def exact_law(model, prompt, n, temperature, **filters):
    """Probability of every text of n tokens that the verifier can write, {tokens: probability}, by plain forward passes
    of the Hugging Face model without any cache."""
    cells = {(): 1.0}
    for _ in range(n):
        longer, texts = {}, list(cells)
        for at in range(0, len(texts), 128):
            part = texts[at : at + 128]
            rows = probabilities(
                model(torch.tensor([[*prompt, *t] for t in part]), logits_to_keep=1).logits[:, -1],
                temperature,
                **filters,
            ).double()
            for t, row in zip(part, rows):
                longer |= {(*t, int(x)): cells[t] * float(row[x]) for x in row.nonzero()[:, 0]}
        cells = longer
    return cells


def chi_square(counts, law):
    """(statistic, degrees of freedom, p) of {tokens: count} under {tokens: probability}. Cells that expect fewer than 5
    are pooled; a text that the verifier cannot write has p = 0."""
    n = sum(counts.values())
    if set(counts) - set(law):
        return float("inf"), len(law) - 1, 0.0
    seen, want = (torch.tensor([x.get(t, 0) for t in law], dtype=torch.float64) for x in (counts, law))
    want *= n / want.sum()
    rare = want < 5
    if rare.any():
        seen, want = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, want))
    stat, free = float(((seen - want) ** 2 / want).sum()), len(want) - 1
    return (
        stat,
        free,
        float(
            torch.special.gammaincc(
                torch.tensor(free / 2, dtype=torch.float64), torch.tensor(stat / 2, dtype=torch.float64)
            )
        ),
    )


class Sampler:
    """Texts of `new` tokens after one prompt, through `generate`, with the verifier's memory in the place of its cache.
    `fast` draws tokens by `memo.inverse`."""

    def __init__(self, verifier, prompt, new=5, k=3, fast=True):
        self.verifier = verifier
        self.prompt = prompt
        self.new = new
        self.k = k
        self.fast = fast
        self.memory = Memory(verifier, prompt)

    def draw(self, drafter, n, sampling, rule, batch=500):
        "n generations. `drafter` is `remembered`."
        with ExitStack() as stack:
            stack.enter_context(patch.object(decoder, "context_for", self.memory.context_class()))
            for module in (tree, acceptance_rules) if self.fast else ():
                stack.enter_context(patch.object(module, "draw_tokens", inverse))
            return [
                g
                for at in range(0, n, batch)
                for g in decoder.generate(
                    self.verifier,
                    drafter,
                    [self.prompt] * min(batch, n - at),
                    max_new_tokens=self.new,
                    k=self.k,
                    sampling=sampling,
                    rule=rule,
                )
            ]
