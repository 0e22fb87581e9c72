"""Acceptance rules: every random outcome is enumerated with exact fractions, so a rule either keeps the verifier's law or it does not."""
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculators_nb.decode import accept
from speculators_nb.decode.accept import RULES, draw, flip, greedy, run_length, standard

V, DEPTH = 3, 2


def outcomes(run):
    """The exact law of run(choose): replay `run` with every script of outcomes, and add up the scripts' probabilities."""
    law, todo = Counter(), [[]]
    while todo:
        script, chance, step = todo.pop(), Fraction(1), 0

        def choose(probs):
            nonlocal chance, step
            if step == len(script):
                branches = [i for i, p in enumerate(probs) if p]
                todo.extend(script + [b] for b in branches[1:])
                script.append(branches[0])
            step += 1
            chance *= probs[script[step - 1]]
            return script[step - 1]

        result = run(choose)
        law[result] += chance
    assert sum(law.values()) == 1
    return law


def exact(x):
    # every probability below is a small fraction, and so is every chance or residual weight made of two of them
    return [Fraction(v).limit_denominator(100_000) for v in x.tolist()]


@pytest.fixture
def scripted(monkeypatch):
    """Put the enumeration in the place of the two random primitives; the "generator" is then `choose`."""
    def flips(chance, choose): return torch.tensor([choose([1 - c, c]) == 1 for c in exact(chance.clamp(0, 1))], dtype=torch.bool)
    def draws(weights, choose):
        w = exact(weights)
        return choose([v / sum(w) for v in w])
    monkeypatch.setattr(accept, "flip", flips)
    monkeypatch.setattr(accept, "draw", draws)


def speculate(rule, p, q, onehot, choose):
    """Draft DEPTH tokens, apply the rule, let the verifier go on alone until DEPTH + 1 tokens stand."""
    draft = []
    for _ in range(DEPTH):
        law = q[tuple(draft)]
        draft.append(law.index(max(law)) if onehot else choose(law))
    target = torch.tensor([[float(v) for v in p[tuple(draft[:i])]] for i in range(DEPTH + 1)], dtype=torch.float64)
    probs = torch.tensor([[float(v) for v in q[tuple(draft[:i])]] for i in range(DEPTH)], dtype=torch.float64)
    n, token = rule(torch.tensor(draft), None if onehot else probs, target, choose)
    out = [*draft[:n], token]
    while len(out) <= DEPTH:
        out.append(choose(p[tuple(out)]))
    return n, tuple(out)


def output_law(rule, p, q, onehot=False):
    law = Counter()
    for (_, out), chance in outcomes(lambda choose: speculate(rule, p, q, onehot, choose)).items():
        law[out] += chance
    return law


def verifier_law(p):
    def run(choose):
        out = []
        while len(out) <= DEPTH:
            out.append(choose(p[tuple(out)]))
        return tuple(out)
    return outcomes(run)


CONTEXTS = [(), *((a,) for a in range(V)), *((a, b) for a in range(V) for b in range(V))]
law_of_twelfths = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).map(
    lambda c: [Fraction(c[0], 12), Fraction(c[1] - c[0], 12), Fraction(12 - c[1], 12)])
laws = st.lists(law_of_twelfths, min_size=len(CONTEXTS), max_size=len(CONTEXTS)).map(lambda rows: dict(zip(CONTEXTS, rows)))
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

P = {c: [[Fraction(w, 12) for w in row] for row in ((6, 4, 2), (1, 8, 3), (3, 3, 6), (0, 5, 7), (4, 4, 4))][(2 * sum(c) + len(c)) % 5] for c in CONTEXTS}
Q = {c: [[Fraction(w, 12) for w in row] for row in ((2, 9, 1), (5, 5, 2), (12, 0, 0), (1, 4, 7))][(sum(c) + 3 * len(c)) % 4] for c in CONTEXTS}


@few
@given(p=laws, q=laws, onehot=st.booleans())
def test_standard_keeps_the_law_of_the_verifier(scripted, p, q, onehot):
    assert output_law(standard, p, q, onehot) == verifier_law(p)


def wrong_residual(draft_tokens, draft_probs, target_probs, generator):
    "Draws from p after a rejection."
    rows = torch.arange(len(draft_tokens))
    n = run_length(accept.flip(target_probs[rows, draft_tokens] / draft_probs[rows, draft_tokens], generator))
    return n, accept.draw(target_probs[n], generator)


def wrong_onehot(draft_tokens, draft_probs, target_probs, generator):
    "Accepts with p/q but leaves out only the rejected token, as if the draft were one-hot."
    rows = torch.arange(len(draft_tokens))
    n = run_length(accept.flip(target_probs[rows, draft_tokens] / draft_probs[rows, draft_tokens], generator))
    rest = target_probs[n].clone()
    if n < len(draft_tokens) and rest[draft_tokens[n]] < 1:
        rest[draft_tokens[n]] = 0
    return n, accept.draw(rest, generator)


@pytest.mark.parametrize("rule", [wrong_residual, wrong_onehot, greedy])
def test_a_wrong_rule_is_caught(scripted, rule):
    assert output_law(rule, P, Q) != verifier_law(P)


def forgets_q(draft_tokens, draft_probs, target_probs, generator):
    return standard(draft_tokens, None, target_probs, generator)


def strict(draft_tokens, draft_probs, target_probs, generator):
    "Draw y from p and keep the draft while y agrees."
    ys = [accept.draw(row, generator) for row in target_probs]
    n = run_length(torch.tensor(ys[:-1]) == draft_tokens)
    return n, ys[n]


@pytest.mark.parametrize("rule", [forgets_q, strict])
def test_lossless_rules_that_keep_less(scripted, rule):
    """Treating a drawn draft as one-hot, and comparing with a token drawn from p, are lossless too (acceptance: sum of p q): the enumeration
    accepts rules other than ours, so it does not merely repeat our formula."""
    def mean(r): return sum(n * c for (n, _), c in outcomes(lambda choose: speculate(r, P, Q, False, choose)).items())
    assert output_law(rule, P, Q) == verifier_law(P)
    assert mean(rule) < mean(standard)


def test_mean_accepted_tokens_exact(scripted):
    p = dict.fromkeys(CONTEXTS, [Fraction(1, 3), Fraction(2, 3), Fraction(0)])
    q = dict.fromkeys(CONTEXTS, [Fraction(2, 3), Fraction(1, 3), Fraction(0)])
    law = outcomes(lambda choose: speculate(standard, p, q, False, choose))
    assert sum(n * chance for (n, _), chance in law.items()) == Fraction(10, 9)


def test_temperature_zero_is_greedy():
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        target = torch.eye(5)[torch.randint(5, (4,), generator=g)]
        draft = torch.randint(2, (3,), generator=g)
        probs = torch.rand(3, 5, generator=g).softmax(-1)
        assert standard(draft, None, target, g) == standard(draft, probs, target, g) == greedy(draft, None, target)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_empty_draft_is_plain_decoding(rule):
    target = torch.tensor([[0., 0., 1.]])
    assert rule(torch.empty(0, dtype=torch.long), None, target, torch.Generator().manual_seed(0)) == (0, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_all_dtypes_and_a_perfect_drafter(dtype):
    """q = p is accepted always, in every dtype: p/q is exactly 1 and a uniform is below 1."""
    g = torch.Generator().manual_seed(1)
    p = torch.rand(4, 7, generator=g).softmax(-1).to(dtype)
    for _ in range(300):
        draft = torch.multinomial(p[:3].float(), 1, generator=g)[:, 0]
        assert standard(draft, p[:3], p, g)[0] == 3


def test_rejection_with_an_empty_residual_still_answers():
    p = torch.tensor([[.5, .5]])
    q = p + torch.tensor([[1e-2, 0]])   # q >= p everywhere, as rounding can leave it
    g = torch.Generator().manual_seed(0)
    results = [standard(torch.tensor([0]), q, p.repeat(2, 1), g) for _ in range(2000)]
    assert {n for n, _ in results} == {0, 1} and {t for n, t in results if n == 0} == {0, 1}


def test_same_seed_same_answer():
    p, q = torch.rand(6, 9).softmax(-1), torch.rand(5, 9).softmax(-1)
    draft = torch.arange(5)
    assert len({standard(draft, q, p, torch.Generator().manual_seed(3)) for _ in range(5)}) == 1


def test_primitives_frequencies():
    """200 000 coins and draws: five standard deviations of a frequency are at most 0.0056."""
    g = torch.Generator().manual_seed(0)
    chance = torch.tensor([0., .2, .7, 1., 1.7])
    rate = flip(chance.expand(200_000, 5), g).double().mean(0)
    assert (rate - chance.clamp(max=1)).abs().max() < .0056 and rate[0] == 0 and rate[3] == rate[4] == 1
    weights = torch.tensor([2., 0., 6., 4.])
    counts = torch.bincount(torch.tensor([draw(weights, g) for _ in range(20_000)]), minlength=4) / 20_000
    assert (counts - weights / 12).abs().max() < .018 and counts[1] == 0   # five standard deviations at n = 20 000
