"""Acceptance rules: every random outcome is enumerated with exact fractions, so a rule either keeps the verifier's law
or it does not."""

import functools
import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculators_nb.decode import acceptance_rules as accept
from speculators_nb.decode.acceptance_rules import RULES, draw, flip, lenient, synthetic, tolerant, typical, walk
from speculators_nb.decode.tree import Sampling, TokenTree

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]
standard, strict, greedy = (RULES[n].decide for n in ("standard", "strict", "greedy"))

block = RULES["block"].decide


def outcomes(run):
    """The exact law of run(choose): replay `run` with every script of outcomes, and add up the scripts'
    probabilities."""
    law, todo = Counter(), [[]]
    while todo:
        script, chance, step = todo.pop(), Fraction(1), 0

        def choose(probs):
            nonlocal chance, step
            if step == len(script):
                branches = [i for i, p in enumerate(probs) if p]
                todo.extend([*script, b] for b in branches[1:])
                script.append(branches[0])
            step += 1
            chance *= probs[script[step - 1]]
            return script[step - 1]

        result = run(choose)
        law[result] += chance
    assert sum(law.values()) == 1
    return law


def exact(x):
    # every probability below is a fraction of small numbers, products of a few of them included; float64 holds them to
    # 1e-15
    return [Fraction(v).limit_denominator(10_000_000) for v in x.flatten().tolist()]


def scripted(choose):
    "The enumeration in the place of a generator."
    return accept.Choices(choose, lambda x: exact(torch.tensor(x, dtype=torch.float64))[0])


# How a tree is proposed: children of every node, drawn with putting back, drawn without, or the likeliest
def propose(q, depth, width, how, choose):
    words, parents, laws, level = [], [], [], [(-1, ())]
    for _ in range(depth):
        below = []
        for parent, said in level:
            law = q[said]
            for _ in range(width):
                if not sum(law):
                    break
                law = [w / sum(law) for w in law]
                token = law.index(max(law)) if how == "likeliest" else choose(law)
                words.append((*said, token))
                parents.append(parent)
                laws.append(law)
                below.append((len(words) - 1, words[-1]))
                if how != "drawn with putting back":
                    law = [0 if i == token else w for i, w in enumerate(law)]
        level = below
    probs = None if how == "likeliest" else torch.tensor([[float(v) for v in law] for law in laws], dtype=torch.float64)
    return TokenTree(torch.tensor([w[-1] for w in words]), torch.tensor(parents), probs), words


def speculate(rule, p, q, depth, width, how, choose):
    """Propose, apply the rule, let the verifier go on alone until depth + 1 tokens stand."""
    tree, words = propose(q, depth, width, how, choose)
    target = torch.tensor([[float(v) for v in p[said]] for said in [(), *words]], dtype=torch.float64)
    path, token = rule(tree, target, scripted(choose))
    assert [-1, *path][: len(path)] == tree.parents[path].tolist()
    out = [*(int(tree.tokens[i]) for i in path), token]
    while len(out) <= depth:
        out.append(choose(p[tuple(out)]))
    return len(path), tuple(out)


def output_law(rule, p, q, depth=2, width=1, how="drawn"):
    law = Counter()
    for (_, out), chance in outcomes(lambda choose: speculate(rule, p, q, depth, width, how, choose)).items():
        law[out] += chance
    return law


def mean_kept(rule, p, q, depth=2, width=1, how="drawn"):
    return sum(n * c for (n, _), c in outcomes(lambda choose: speculate(rule, p, q, depth, width, how, choose)).items())


def verifier_law(p, depth=2):
    def run(choose):
        out = []
        while len(out) <= depth:
            out.append(choose(p[tuple(out)]))
        return tuple(out)

    return outcomes(run)


def contexts(v, depth):
    return [c for n in range(depth + 1) for c in itertools.product(range(v), repeat=n)]


def cyclic(rows, v, depth, a, b):
    "A law for each context, from a list of integer weights."
    laws = [[Fraction(w, sum(row)) for w in row] for row in rows]
    return {c: laws[(a * sum(c) + b * len(c)) % len(laws)] for c in contexts(v, depth)}


TWELFTHS = ((6, 4, 2), (1, 8, 3), (3, 3, 6), (0, 5, 7), (4, 4, 4)), ((2, 9, 1), (5, 5, 2), (12, 0, 0), (1, 4, 7))
P, Q = cyclic(TWELFTHS[0], 3, 2, 2, 1), cyclic(TWELFTHS[1], 3, 2, 1, 3)
PAIRS = {  # vocabulary and depth -> (verifier, drafter); larger vocabularies are shallower, to count all outcomes
    (2, 3): (cyclic(((1, 3), (2, 2), (4, 0), (3, 1)), 2, 3, 1, 1), cyclic(((3, 1), (1, 1), (1, 3)), 2, 3, 2, 1)),
    (3, 2): (P, Q),
    (4, 1): (
        cyclic(((1, 2, 4, 1), (4, 0, 2, 2), (2, 2, 2, 2)), 4, 1, 1, 1),
        cyclic(((4, 2, 1, 1), (0, 4, 4, 0)), 4, 1, 1, 0),
    ),
    (5, 1): (
        cyclic(((1, 2, 4, 1, 2), (4, 0, 2, 2, 2)), 5, 1, 1, 1),
        cyclic(((4, 2, 1, 1, 2), (0, 4, 4, 0, 2)), 5, 1, 1, 0),
    ),
}
WAYS = [(1, "drawn"), (1, "likeliest"), (2, "drawn"), (2, "drawn with putting back"), (2, "likeliest")]
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("size", PAIRS, ids=str)
@pytest.mark.parametrize("width,how", WAYS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless(name, size, width, how):
    "The law of the output is the verifier's, equal as fractions: chains and trees, drawn and deterministic proposals."
    if name == "block" and width > 1:
        with pytest.raises(ValueError, match="chains"):
            block(TokenTree(torch.tensor([0, 1]), torch.tensor([-1, -1])), torch.ones(3, 2) / 2)
        return
    (_, depth), (p, q) = size, PAIRS[size]
    # outcomes multiply: thousands, not millions
    depth = depth if width == 1 else min(depth, 2 if size[0] == 2 or how == "likeliest" else 1)
    assert output_law(RULES[name].decide, p, q, depth, width, how) == verifier_law(p, depth)


law_of_twelfths = (
    st.tuples(st.integers(0, 12), st.integers(0, 12))
    .map(sorted)
    .map(lambda c: [Fraction(c[0], 12), Fraction(c[1] - c[0], 12), Fraction(12 - c[1], 12)])
)
laws = st.lists(law_of_twelfths, min_size=13, max_size=13).map(lambda rows: dict(zip(contexts(3, 2), rows)))


@few
@given(p=laws, q=laws, how=st.sampled_from(["drawn", "likeliest"]), name=st.sampled_from(LOSSLESS))
def test_lossless_for_any_laws(p, q, how, name):
    assert output_law(RULES[name].decide, p, q, 2, 1, how) == verifier_law(p)


def step_of(keeps_residual, onehot=False):
    def step(p, children, tree, generator):
        for i in children:
            x = tree.tokens[i]
            if accept.flip(p[x] / tree.probs[i][x], generator):
                return i, p
            if keeps_residual and onehot and p[x] < 1:
                p = p.index_fill(0, x, 0)
        return None, p

    return functools.partial(walk, step)


WRONG = {
    "draws from p after a rejection": step_of(False),
    "leaves out only the rejected token": step_of(True, onehot=True),
    "greedy": greedy,
    "typical": typical().decide,
    "lenient": lenient(0.5).decide,
    "tolerant": tolerant(2).decide,
    "synthetic": synthetic([0.9, 0.5]).decide,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("width", [1, 2])
def test_a_wrong_or_lossy_rule_is_caught(name, width):
    assert output_law(WRONG[name], P, Q, 3 - width, width) != verifier_law(P, 3 - width)


def test_lossy_rules_are_marked():
    assert [n for n, r in RULES.items() if not r.lossless] == ["typical"]
    assert (
        lenient(1).lossless
        and not lenient(0.9).lossless
        and tolerant().lossless
        and not tolerant(1, 0.1).lossless
        and not synthetic([1.0]).lossless
    )


def test_rules_in_order_of_what_they_keep():
    """Strict wastes the drafter's law, standard does not, block verification makes up for what one token lacks with
    what the next has; siblings help."""
    kept = {name: mean_kept(RULES[name].decide, P, Q) for name in LOSSLESS}
    assert kept["strict"] < kept["standard"] < kept["block"]
    assert mean_kept(standard, P, Q, 2, 2) > kept["standard"]
    assert mean_kept(strict, P, Q, 2, 1, "likeliest") == mean_kept(standard, P, Q, 2, 1, "likeliest")


def test_mean_accepted_tokens_exact():
    p = {c: [Fraction(1, 3), Fraction(2, 3)] for c in contexts(2, 2)}
    q = {c: [Fraction(2, 3), Fraction(1, 3)] for c in contexts(2, 2)}
    assert mean_kept(standard, p, q) == Fraction(10, 9)
    assert mean_kept(block, p, q) == Fraction(11, 9)


def test_synthetic_rates_are_what_comes_out():
    rule = synthetic([Fraction(3, 4), Fraction(1, 4)]).decide
    law = Counter()
    for (n, _), chance in outcomes(lambda choose: speculate(rule, P, Q, 2, 1, "drawn", choose)).items():
        law[n] += chance
    assert law == {0: Fraction(1, 4), 1: Fraction(1, 2), 2: Fraction(1, 4)}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: synthetic([0.5, 0.6]), r"\[0.5, 0.6\].*not increase"),
        (lambda: synthetic([1.2]), "lie in"),
        (lambda: lenient(0), "accept_lenience=0"),
        (lambda: tolerant(0), "verifier_accept_k=0"),
        (lambda: tolerant(1, -1), "accept_tolerance=-1"),
    ],
)
def test_refused_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", [n for n in RULES if n != "block"])
def test_temperature_zero_is_greedy(name):
    "With a one-hot law every rule of the table is the greedy one, on trees too."
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        parents = torch.tensor([-1] + [int(torch.randint(-1, i, (1,), generator=g)) for i in range(1, 6)])
        target = torch.eye(7)[torch.randint(7, (7,), generator=g)]
        taken, tokens = {}, []
        for p in parents.tolist():  # siblings differ
            tokens.append(next(t for t in torch.randperm(7, generator=g).tolist() if t not in taken.get(p, ())))
            taken.setdefault(p, []).append(tokens[-1])
        tree = TokenTree(torch.tensor(tokens), parents)
        assert RULES[name].decide(tree, target, g) == greedy(tree, target)


def test_block_at_temperature_zero_is_greedy():
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        target = torch.eye(3)[torch.randint(3, (4,), generator=g)]
        draft = torch.randint(2, (3,), generator=g)
        for probs in (None, torch.rand(3, 3, generator=g).softmax(-1)):
            tree = TokenTree.chain(draft, probs)
            assert block(tree, target, g) == greedy(tree, target)


@pytest.mark.parametrize("name", RULES)
def test_empty_draft_is_plain_decoding(name):
    assert RULES[name].decide(
        TokenTree.chain([]), torch.tensor([[0.0, 0.0, 1.0]]), torch.Generator().manual_seed(0)
    ) == ([], 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["standard", "block"])
def test_all_dtypes_and_a_perfect_drafter(dtype, name):
    """q = p is accepted always, in every dtype: p/q is exactly 1 and a uniform is below 1."""
    g = torch.Generator().manual_seed(1)
    p = torch.rand(4, 7, generator=g).softmax(-1).to(dtype)
    for _ in range(300):
        draft = torch.multinomial(p[:3].float(), 1, generator=g)[:, 0]
        assert RULES[name].decide(TokenTree.chain(draft, p[:3]), p, g)[0] == [0, 1, 2]


@pytest.mark.parametrize("name", ["standard", "block"])
def test_rejection_with_an_empty_residual_still_answers(name):
    p = torch.tensor([[0.5, 0.5]])
    q = p + torch.tensor([[1e-2, 0]])  # q >= p everywhere, as rounding can leave it
    g = torch.Generator().manual_seed(0)
    results = [RULES[name].decide(TokenTree.chain([0], q), p.repeat(2, 1), g) for _ in range(2000)]
    assert {len(path) for path, _ in results} == {0, 1} and {t for path, t in results if not path} == {0, 1}


def test_same_seed_same_answer():
    p, tree = torch.rand(6, 9).softmax(-1), TokenTree.chain(torch.arange(5), torch.rand(5, 9).softmax(-1))
    for rule in RULES.values():
        assert len({str(rule.decide(tree, p, torch.Generator().manual_seed(3))) for _ in range(5)}) == 1


def test_typical_takes_the_longest_then_likeliest_path():
    tree = TokenTree(torch.tensor([0, 1, 0, 1, 2]), torch.tensor([-1, -1, 1, 1, 3]))
    laws = torch.tensor(
        [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.1, 0.8, 0.1], [0.98, 0.01, 0.01], [0.0, 0.0, 1.0]]
    )
    # 1 -> 1, likelier than 1 -> 0; its child 2 has probability .01
    assert typical(0.3, 0.09).decide(tree, laws) == ([1, 3], 0)
    assert typical(0.001, 1.0).decide(tree, laws)[0] == [1, 3, 4]  # less is asked for
    assert typical(0.6, 1.0).decide(tree, laws) == ([], 0)  # more than the first two have


def test_primitives_frequencies():
    """200 000 coins and draws: five standard deviations of a frequency are at most 0.0056."""
    g = torch.Generator().manual_seed(0)
    chance = torch.tensor([0.0, 0.2, 0.7, 1.0, 1.7])
    rate = flip(chance.expand(200_000, 5), g).double().mean(0)
    assert (rate - chance.clamp(max=1)).abs().max() < 0.0056 and rate[0] == 0 and rate[3] == rate[4] == 1
    weights = torch.tensor([2.0, 0.0, 6.0, 4.0])
    counts = torch.bincount(torch.tensor([draw(weights, g) for _ in range(20_000)]), minlength=4) / 20_000
    assert (counts - weights / 12).abs().max() < 0.018 and counts[1] == 0  # five standard deviations at n = 20 000


def filtered(law, top_k=0, top_p=Fraction(1), min_p=Fraction(0)):
    "The filters read aloud, in vLLM's order: min_p, top_k, top_p, then what is left is brought to one."
    law = [w if w >= min_p * max(law) else Fraction(0) for w in law]
    if top_k:
        law = [w if w >= sorted(law)[-top_k] else Fraction(0) for w in law]
    total, dropped = sum(law), Fraction(0)
    law = [w / total for w in law]
    for i in sorted(range(len(law)), key=lambda i: law[i])[:-1]:
        dropped += law[i]
        if dropped > 1 - top_p:
            break
        law[i] = Fraction(0)
    return [w / sum(law) for w in law]


FILTERS = {
    "top_k": dict(top_k=2),
    "top_p": dict(top_p=Fraction(3, 5)),
    "min_p": dict(min_p=Fraction(9, 20)),
    "all": dict(top_k=2, top_p=Fraction(7, 10), min_p=Fraction(1, 6)),
}


@pytest.mark.parametrize("drafted", ["as the verifier", "from all"])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_with_filters(name, filters, drafted):
    """The law of the output is the verifier's filtered one, whether the drafter's own draws are filtered or not: as
    fractions, on chains and (but for block) trees."""
    sampling = Sampling(1.0, None, **{n: v if n == "top_k" else float(v) for n, v in FILTERS[filters].items()})

    def after(law):
        got = sampling.probabilities(torch.tensor([float(w) for w in law]).log())
        got = [Fraction(v).limit_denominator(500) for v in got.tolist()]
        assert sorted(got) == sorted(filtered(law, **FILTERS[filters]))  # of equal ones either may be left out
        return got

    p = {context: after(law) for context, law in P.items()}
    q = {context: after(law) for context, law in Q.items()} if drafted == "as the verifier" else Q
    assert any(0 in law for law in p.values()) and p != P
    for depth, width, how in ((2, 1, "drawn"), (2, 1, "likeliest"), (1, 2, "drawn"))[: 2 if name == "block" else 3]:
        assert output_law(RULES[name].decide, p, q, depth, width, how) == verifier_law(p, depth)
