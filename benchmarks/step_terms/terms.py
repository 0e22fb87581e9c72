"""FLOPs, and seconds, of an EAGLE-3 training step by term: by formula, and measured operation by operation.
nbs/plan/01_step_memory.ipynb has the formulas as a table, and draws what run.py records."""

import math
import time
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import Qwen3Config

from speculators_nb.evaluate.cost import ALSO_COUNTED
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.plan.step_memory import step_of


class StepShape(NamedTuple):
    "What the products of an EAGLE-3 step follow from."

    documents: tuple[int, ...]  # tokens of each
    hidden: int  # H
    heads: int  # q
    kv_heads: int  # g
    head_dim: int  # D
    intermediate: int  # I
    vocab: int  # V, rows of the head over which the loss is taken
    features: int = 3  # A, states of the verifier that are read
    steps: int = 3  # K, of training-time test
    prompt: float = 0.0  # share of a document without loss: its beginning


def layer_of(shape: StepShape) -> Qwen3Config:
    "The config of a verifier, and of its drafter's layer."
    return Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        num_hidden_layers=6,
        tie_word_embeddings=False,
    )


BLOCK = 128  # rows that attend to the keys up to the last of them, in one product


def term_flops(shape: StepShape) -> dict[str, int]:
    "Term -> FLOPs of its products in a step, forward and backward."
    H, K, queries = shape.hidden, shape.steps, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    found = Counter(fc=4 * sum(shape.documents) * shape.features * H * H)
    for n in shape.documents:
        m = math.ceil(shape.prompt * n)
        found["projections"] += 4 * n * H * (queries + 2 * keys)  # of the embeddings, once
        found["head"] += 2 * shape.vocab * H * (n - m)
        for k in range(K):
            rows, scored = n - k - max(0, m - K + 1), n - max(m, k)
            fed = rows if k else n  # whose keys and values are made
            found["projections"] += 12 * rows * queries * H + 12 * fed * H * keys
            first = n - k - rows
            ends = [min(end, rows) for end in range(BLOCK, rows + BLOCK, BLOCK)]
            scores = sum((b - a) * (first + b) for a, b in pairwise([0, *ends]))
            found["attention"] += queries * (14 * scores + 12 * rows * k)
            found["mlp"] += 18 * rows * H * shape.intermediate
            found["head"] += 4 * shape.vocab * H * scored
    return dict(found)


class TermMeter(TorchDispatchMode):
    "FLOPs and seconds of all operations inside the block, by term."

    def __init__(self, shape: StepShape):
        "shape: its terms differ in size."
        super().__init__()
        self.shape = shape
        self.flops: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)  # of the processor

    def term(self, sizes: set[int], product: bool) -> str:
        "The term of an operation, by the sizes of all its operands."
        shape = self.shape
        if shape.vocab in sizes:
            return "head" if product else "loss"
        if not product:
            return "rest"
        if shape.intermediate in sizes:
            return "mlp"
        if shape.features * shape.hidden in sizes:
            return "fc"
        own = {shape.hidden, 2 * shape.hidden}  # of a state; of embedding and state
        return "projections" if sizes & own else "attention"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        began = time.process_time()
        out = function(*args, **(kwargs or {}))
        took = time.process_time() - began
        count = (flop_registry | ALSO_COUNTED).get(function)
        count = count or flop_registry.get(function._overloadpacket)
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
        term = self.term({n for x in tensors for n in x.shape}, count is not None)
        self.seconds[term] += took
        if count is not None:
            self.flops[term] += count(*args, out_val=out)
        return out


def shaped_step(algorithm: str, shape: StepShape) -> tuple[SpeculatorModel, dict[str, torch.Tensor], dict[str, Any]]:
    """A drafter of a shape in training mode, on the CPU (EAGLE-3, or one of its network), a random row for it, and the
    other arguments of its forward pass."""
    layer, length = layer_of(shape), sum(shape.documents)
    model, step = step_of(
        algorithm,
        layer,
        shape.vocab,
        layer.num_hidden_layers,
        length,
        each=shape.documents[0],
        supervised=1 - shape.prompt,
        ttt_steps=shape.steps,
    )
    return model, step.pop("batch"), {n: v for n, v in step.items() if n != "bf16"}
