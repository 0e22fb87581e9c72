"Token trees: relations by brute force on random trees, refusals, sampling laws, the drafter protocol."

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculators_nb.core.plot import plot_tree
from speculators_nb.decode.tree import Drafter, Sampling, TokenTree, probabilities

trees = st.lists(st.integers(0, 10**6), max_size=12).map(lambda draws: [d % (i + 1) - 1 for i, d in enumerate(draws)])
quick = settings(max_examples=80, deadline=None)


@quick
@given(
    st.integers(0, 10**6), st.integers(0, 8), st.sampled_from([1.0, 0.95, 0.6, 0.1]), st.sampled_from([0.0, 0.02, 0.4])
)
def test_filters_are_those_of_transformers(seed, top_k, top_p, min_p):
    "Its warpers in vLLM's order: temperature, min_p, top_k, top_p. (transformers itself has min_p last.)"
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    want = TemperatureLogitsWarper(0.7)(None, logits)
    steps = [MinPLogitsWarper(min_p)] * (min_p > 0) + [TopKLogitsWarper(top_k or 1)] * (top_k > 0)
    for step in [*steps, TopPLogitsWarper(top_p)]:
        want = step(None, want)
    torch.testing.assert_close(probabilities(logits, 0.7, top_k, top_p, min_p), want.softmax(-1))


def path(parents, i):
    return [*path(parents, parents[i]), i] if i >= 0 else []


@quick
@given(trees)
def test_relations(parents):
    n = len(parents)
    tree = TokenTree(torch.arange(n), torch.tensor(parents, dtype=torch.long))
    assert len(tree) == n and tree.depth.tolist() == [len(path(parents, i)) for i in range(n)]
    assert tree.ancestors.tolist() == [[j in path(parents, i) for j in range(n)] for i in range(n)]
    assert all(tree.children(i) == [c for c in range(n) if parents[c] == i] for i in range(-1, n))
    leaves = [i for i in range(n) if i not in parents]
    assert sorted(tree.paths()) == sorted(path(parents, i) for i in leaves)


@quick
@given(st.lists(st.integers(0, 6), max_size=6))
def test_a_chain_has_one_path(tokens):
    tree = TokenTree.chain(tokens, torch.full((len(tokens), 7), 1 / 7))
    assert tree.parents.tolist() == list(range(-1, len(tokens) - 1)) and tree.tokens.dtype == torch.int64
    assert tree.paths() == ([list(range(len(tokens)))] if tokens else []) and tree.depth.tolist() == list(
        range(1, len(tokens) + 1)
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: TokenTree(torch.tensor([1, 2]), torch.tensor([-1, 1])),
            r"parents\[1\]=1 must be -1 or smaller than 1",
        ),
        (lambda: TokenTree(torch.tensor([1, 2]), torch.tensor([-2, 0])), r"parents\[0\]=-2"),
        (lambda: TokenTree(torch.tensor([1, 2]), torch.tensor([-1])), "one parent for each"),
        (lambda: TokenTree(torch.tensor([[1, 2]]), torch.tensor([[-1, 0]])), r"row of integers.*\(1, 2\)"),
        (lambda: TokenTree(torch.tensor([1.0]), torch.tensor([-1])), "torch.float32"),
        (
            lambda: TokenTree.chain([1, 7], torch.ones(2, 7) / 7),
            r"tokens\[1\]=7 is outside the vocabulary of 7.*mapped to verifier ids",
        ),
        (lambda: TokenTree.chain([-1]).check_vocabulary(7), r"tokens\[0\]=-1"),
        (lambda: TokenTree.chain([1, 2], torch.ones(1, 7) / 7), "one row"),
        (lambda: TokenTree.chain([1, 2], torch.ones(2)), "one row"),
        (lambda: TokenTree([1, 2], torch.tensor([-1, 0])), "tokens is a list: give a tensor of integers"),
        (lambda: TokenTree(torch.tensor([1, 2]), (-1, 0)), "parents is a tuple"),
        (lambda: TokenTree.chain([1.5, 2]), "tokens must be a row of integers, got torch.float32"),
        (lambda: TokenTree.chain(torch.tensor(5)), r"tokens must be a row of integers, got torch.int64 of shape \(\)"),
        (
            lambda: TokenTree.chain([1], real=torch.tensor([True, False])),
            r"real has shape \(2,\), but there are 1 tokens",
        ),
        (lambda: Sampling(-0.1), "temperature=-0.1"),
        (lambda: Sampling(float("nan")), "temperature=nan"),
        (lambda: Sampling(float("inf")), "temperature=inf"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@quick
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0, 3.0]))
def test_laws(seed, temperature):
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    p = Sampling(temperature).probabilities(logits)
    assert p.dtype == torch.float32 and p.shape == logits.shape and torch.equal(p, probabilities(logits, temperature))
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 2))
    if temperature == 0:
        assert torch.equal(p.argmax(-1), logits.argmax(-1)) and torch.equal(p.max(-1).values, torch.ones(3, 2))
    else:
        torch.testing.assert_close(p, torch.softmax(logits.float() / temperature, -1))


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-44, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    "A logit divided by less than about 1e-37 is infinite, and infinity less infinity is no probability."
    logits = torch.tensor([[30.0, -2, 29.5], [0, 0, 0], [-torch.inf, 1, -80]])
    expected = torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1, 0]])
    torch.testing.assert_close(Sampling(temperature).probabilities(logits), expected)


def test_drawing_follows_the_law_and_the_seed():
    law = torch.tensor([0.5, 0.3, 0.2, 0.0])

    def drawn(seed):
        return Sampling(1.0, torch.Generator().manual_seed(seed)).draw(law.expand(5000, 4))

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    share = drawn(1).bincount(minlength=4) / 5000
    # 0.03: more than 4 standard errors of a share of 5000
    assert share[3] == 0 and float((share - law).abs().max()) < 0.03
    assert Sampling(1.0).draw(law.expand(2, 3, 4)).shape == (2, 3)


def test_greedy_uses_no_random_numbers():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    greedy = Sampling(0.0, generator)
    assert greedy.draw(greedy.probabilities(torch.tensor([[0.0, 2.0, 1.0]]))).tolist() == [1]
    assert torch.equal(generator.get_state(), state)


def test_protocol():
    class Good:
        aux_layer_ids = ()

        def reset(self): ...
        def propose(self, tokens, features, k, sampling): ...

    class NoReset:
        aux_layer_ids = ()

        def propose(self, tokens, features, k, sampling): ...

    assert isinstance(Good(), Drafter) and not isinstance(NoReset(), Drafter)


@pytest.mark.parametrize("parents", [[], [-1], [-1, -1, 0, 0, 1, 2], list(range(-1, 6))])
def test_pictures_of_all_shapes(parents):
    figure = plot_tree(parents, accepted=range(len(parents)), title="t")
    axes = figure.axes[0]
    assert axes.get_title("left") == "t" and len(axes.texts) == len(parents) + 1 and len(axes.lines) == len(parents)
