"""Counting what training and drafting cost: against hand counts, on shapes small enough to count."""

import pandas as pd
import pytest
import torch
from small_verifier import small_verifier
from torch import nn
from torch.nn import functional as F

from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.tree import TokenTree
from speculators_nb.evaluate.cost import (
    count_flops,
    draft_cost,
    expected_speedup,
    training_flops,
    verifier_cost,
    weights_read,
)


@pytest.fixture(scope="module")
def verifier():
    return small_verifier([1, 2], num_hidden_layers=3)


def test_products_of_every_kind_are_counted():
    a, b, out = torch.ones(3, 5), torch.ones(5, 7), torch.zeros(3, 7)
    q = torch.ones(1, 2, 4, 8)
    for run, flops in [
        (lambda: a @ b, 2 * 3 * 5 * 7),
        (lambda: torch.mm(a, b, out=out), 210),
        (lambda: out.addmm_(a, b), 210),
        (lambda: F.linear(a, b.T), 210),
        (lambda: torch.einsum("ij,jk->ik", a, b), 210),
        (lambda: F.scaled_dot_product_attention(q, q, q), 2 * 2 * 2 * 4 * 4 * 8),
        (lambda: a + 1, 0),
    ]:
        assert count_flops(run) == flops
    with torch.inference_mode():
        assert count_flops(lambda: a @ b) == 210


def test_the_backward_pass_is_counted():
    layer, x = nn.Linear(5, 7, bias=False), torch.ones(3, 5)
    assert count_flops(lambda: layer(x).sum().backward()) == 2 * 2 * 3 * 5 * 7  # nothing before it wants a gradient
    assert count_flops(lambda: layer(x.clone().requires_grad_()).sum().backward()) == 3 * 2 * 3 * 5 * 7


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, document_ids, twice=False):
        for _ in range(1 + twice):
            x = self.b(self.a(x))
        return None, x.sum(), {}


def test_training_flops_are_per_position_and_leave_no_gradient():
    model = Toy().eval()
    batch = dict(x=torch.ones(10, 4), document_ids=torch.tensor([[0] * 8 + [-1] * 2]))
    once = 10 * 2 * 16 * (2 + 3)
    assert training_flops(model, batch) == once / 8
    assert training_flops(model, batch, twice=True) == (once + 10 * 2 * 16 * 6) / 8
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_weights_read_wherever_they_are_multiplied():
    model, x = Toy(), torch.ones(9, 4)
    assert weights_read(model, lambda: model(x, None, twice=True)) == 64
    w = model.a.weight
    for run, read in [
        (lambda: x[0] @ w.T, 16),
        (lambda: F.linear(x, w[:2]), 8),
        (lambda: torch.einsum("ni,oi->no", x, w), 16),
        (lambda: x @ x.T, 0),
        (lambda: x.addmm_(x.clone(), w), 16),
        (lambda: F.embedding(torch.tensor([1]), w), 0),
    ]:
        assert weights_read(model, run) == read
        with torch.inference_mode():
            assert weights_read(model, run) == read


class Scale(nn.Module):
    def forward(self, w, x):
        return x * w.mean()


def test_a_module_that_is_handed_a_weight_in_inference_mode():
    "As the rotary embedding of a draft layer is, for its dtype: torch's bookkeeping by module fails there."
    model, scale = Toy(), Scale()
    with torch.inference_mode():
        assert count_flops(lambda: model.a(scale(model.a.weight, torch.ones(3, 4)))) == 2 * 3 * 16


def test_verifier_cost_by_hand(verifier):
    c = verifier.model.config
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
    weights = 3 * layer + 50 * 16
    attention = 3 * 2 * 2 * 2 * 8 * 33  # layers, heads, two products, 2 FLOPs, width, keys
    one = verifier_cost(verifier, context=32, repeats=1)
    assert one["weights"] == weights
    angles = one["flops"] - (2 * weights + attention)
    assert angles in (0, 8)  # transformers before 5.19 forms the rotary angles by a matrix product
    assert verifier_cost(verifier, context=32, tokens=3, repeats=1)["weights"] == weights
    assert c.num_hidden_layers == 3


class OneLayer:
    "Drafts k tokens, its layer once for each."

    aux_layer_ids, trained_tokens = (), 4

    def __init__(self):
        self.model = nn.Linear(8, 8, bias=False)

    def reset(self):
        pass

    def propose(self, tokens, features, k, sampling):
        for _ in range(k):
            self.model(torch.ones(1, 8))
        return TokenTree.chain([1] * k)


@pytest.mark.parametrize("k", [2, 4])
def test_draft_cost_counts_whole_blocks_only(verifier, k):
    one = verifier_cost(verifier, repeats=1)
    found = draft_cost(verifier, OneLayer(), [[1, 2, 3]], k=k, max_new_tokens=9)
    assert found["weights"] * one["weights"] == pytest.approx(64 * k)
    assert found["flops"] * one["flops"] == pytest.approx(128 * k)
    assert found["time"] > 0


def test_a_drafter_without_weights_reads_none(verifier):
    found = draft_cost(verifier, NgramDrafter(), [[1, 2, 1, 2, 1]], k=2, max_new_tokens=8)
    assert found["flops"] == found["weights"] == 0


def test_expected_speedup():
    assert expected_speedup(3, 0.5) == 2 and expected_speedup(3, 0.5, verify=1.5) == 1.5
    assert expected_speedup(torch.tensor(3.0), 0.5, torch.tensor(1.5)) == 1.5
    table = pd.DataFrame(dict(length=[3.0, 2.0], cost=[0.5, float("nan")]))
    assert expected_speedup(table.length, table.cost).dropna().tolist() == [2]  # one that was not measured stays so
    with pytest.raises(ValueError, match="the row is all padding"):
        training_flops(Toy(), dict(x=torch.ones(1, 4), document_ids=torch.full((1, 4), -1)))
