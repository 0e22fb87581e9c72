"""Rules at the optimum: every rule on every draft, in fractions, against the linear programme that no lossless rule
can pass."""

import functools
import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from test_acceptance_rules import shape_of

from speculators_nb.decode import rules_at_the_optimum as optimum
from speculators_nb.decode.acceptance_rules import (
    RULES,
    SIBLINGS,
    continued,
    drafts,
    emitted,
    exact,
    outcomes,
    rows_of,
    sibling_probs,
    tokens_per_step,
)
from speculators_nb.decode.tree_growth import draw_greedy_plus_one


def language(name, vocabulary):
    "A distribution in sixths for each text."

    @functools.cache
    def probs(text):
        cuts = sorted(random.Random(f"{name} {text}").choices(range(7), k=vocabulary - 1))
        return [Fraction(b - a, 6) for a, b in pairwise([0, *cuts, 6])]

    return probs


def pairs(vocabulary, n):
    return [(language(f"p{i}", vocabulary), language(f"q{i}", vocabulary)) for i in range(n)]


def rules_for(siblings):
    rules = {name: RULES[name] for name in ("strict", "standard", "traversal")}
    if siblings.endswith("replacement"):
        rules["composition"] = optimum.composed(optimum.flow_plan(siblings))
    if siblings == "with replacement":
        rules["k-SEQ"] = optimum.composed(optimum.k_seq)
    return rules


def steps(shape, siblings, vocabulary, n):
    "For some pairs: the optimum, and the tokens a step of each rule, which is lossless."
    for p, q in pairs(vocabulary, n):
        drafted = drafts(q, shape, siblings)
        alone = continued({(): Fraction(1)}, p, 3)
        tokens = {}
        for name, rule in rules_for(siblings).items():
            written = emitted(rule.decide, p, drafted)
            assert continued(written, p, 3) == alone, name
            tokens[name] = tokens_per_step(written)
        yield optimum.most_tokens_per_step(p, drafted), tokens


FIVE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("siblings", SIBLINGS)
@pytest.mark.parametrize("vocabulary,n,shape", [(2, 3, FIVE), (3, 1, FIVE), (4, 1, FIVE[:3])], ids=str)
def test_trees(siblings, vocabulary, n, shape):
    "Lossless as fractions, and none above the optimum; a tree that is not drawn has it under every rule."
    for best, tokens in steps(shape, siblings, vocabulary, n):
        assert 1 <= tokens["strict"] <= tokens["standard"] <= tokens["traversal"] <= best
        assert max(tokens.values()) <= best
        assert siblings != "likeliest" or tokens["strict"] == best


@pytest.mark.parametrize("vocabulary,n", [(2, 6), (3, 4), (4, 2)])
def test_on_chains_traversal_and_composition_are_the_optimum(vocabulary, n):
    for best, tokens in steps(shape_of((1, 1)), "with replacement", vocabulary, n):
        assert tokens["traversal"] == tokens["composition"] == tokens["k-SEQ"] == best


@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_step(k):
    "The programme, the flow and the cut are one number; with greedy+1 the standard rule has it, k-SEQ has a share."
    shape = [(rank,) for rank in range(k)]
    for p, q in ((p(()), q(())) for p, q in pairs(4, 12)):
        for siblings in SIBLINGS:
            tuples = optimum.sibling_tuples(q, siblings, k)
            most = optimum.most_accepted(p, tuples)
            assert sum(tuples.values()) == 1 and sum(optimum.max_flow(p, tuples).values()) == most
            drafted = drafts(lambda text, q=q: q, shape, siblings)
            assert optimum.most_tokens_per_step(lambda text, p=p: p, drafted) == 1 + most
            if siblings == "greedy+1":
                written = emitted(RULES["standard"].decide, lambda text, p=p: p, drafted)
                assert tokens_per_step(written) == 1 + most
            if siblings == "with replacement":
                assert optimum.most_accepted_with_replacement(p, q, k) == most
                accepted = sum(w * sum(optimum.k_seq(p, q, S).accepted) for S, w in tuples.items())
                assert (1 - (1 - Fraction(1, k)) ** k) * most <= accepted <= most


def test_the_simplex_method_on_a_textbook_case():
    rows = [({"x": 1, "y": 1}, 4), ({"x": 1, "y": 3}, 6), ({"x": 1}, 3)]
    rows = [({name: Fraction(c) for name, c in row.items()}, Fraction(bound)) for row, bound in rows]
    assert optimum.maximum({"x": Fraction(3), "y": Fraction(2)}, rows) == 11


WRONG = {
    "k-SEQ that spends more than there is": (functools.partial(optimum.k_seq, rho=Fraction(1)), "with replacement"),
    "the plan of another scheme": (optimum.flow_plan("with replacement"), "without replacement"),
    "what was spent is forgotten": (
        lambda p, q, S: optimum.flow_plan("without replacement")(p, q, S)._replace(spent=[Fraction(0)] * len(p)),
        "without replacement",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_caught(name):
    plan, siblings = WRONG[name]
    p, q = language("p3", 3), language("q1", 3)
    written = emitted(optimum.composed(plan).decide, p, drafts(q, FIVE[:2], siblings))
    assert continued(written, p, 2) != continued({(): Fraction(1)}, p, 2)


def test_gumbel_coupling():
    """Both tokens have their distribution, as fractions; equal ones lie within the bounds of the paper; the joint
    distribution is that of 20 000 races, within five standard deviations."""
    for p, q in ((p(()), q(())) for p, q in pairs(4, 30)):
        joint = optimum.race_coupling(p, q)
        assert [sum(w for (i, _), w in joint.items() if i == x) for x in range(4)] == q
        assert [sum(w for (_, j), w in joint.items() if j == x) for x in range(4)] == p
        equal, ratio = sum(w for (i, j), w in joint.items() if i == j), sum(map(min, p, q))
        assert ratio / (2 - ratio) <= equal <= ratio
    p, q = [Fraction(w, 6) for w in (3, 2, 1)], [Fraction(w, 6) for w in (1, 2, 3)]
    times = torch.empty(20_000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    drawn = [(times / torch.tensor([float(w) for w in side])).argmin(1).tolist() for side in (q, p)]
    counts = Counter(zip(*drawn))
    joint = optimum.race_coupling(p, q)
    assert counts.keys() <= joint.keys()
    assert all(abs(counts[pair] / 20_000 - w) < 5 * (w * (1 - w) / 20_000) ** 0.5 for pair, w in joint.items())


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_greedy_plus_one_is_drawn_as_it_is_counted(n):
    "The decoder's draw, enumerated: tokens in the same order, from the same distributions; none where nothing is left."
    for weights in ((3, 2, 1), (4, 2, 0), (6, 0, 0)):
        q = [Fraction(w, 6) for w in weights]

        def run(choose, q=q):
            def draw(rows):
                return torch.tensor([choose([exact(w) for w in row]) for row in rows.tolist()])

            sampling = SimpleNamespace(draw=draw)
            tokens, probs = draw_greedy_plus_one(rows_of([q]), n, sampling)
            for rank, (token, row) in enumerate(zip(tokens[0].tolist(), probs[0].tolist())):
                counted = sibling_probs(q, "greedy+1", n, (), rank)
                assert row == pytest.approx([float(w) for w in counted or [0] * 3])
            return tuple(token for token, row in zip(tokens[0].tolist(), probs[0]) if row.sum() > 0)

        assert dict(outcomes(run)) == optimum.sibling_tuples(q, "greedy+1", n)
