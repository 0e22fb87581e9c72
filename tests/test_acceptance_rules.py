"""Acceptance rules: every random outcome is enumerated with exact fractions, so a rule either keeps the verifier's law
or it does not."""

import functools
import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculators_nb.decode import acceptance_rules as accept
from speculators_nb.decode.acceptance_rules import (
    RULES,
    SIBLINGS,
    Rule,
    continued,
    drafts,
    draw,
    emitted,
    exact,
    flip,
    fly,
    last_row,
    lenient,
    outcomes,
    stop_at_first,
    synthetic,
    tokens_per_step,
    tolerant,
    traversal_chances,
    typical,
    walk,
)
from speculators_nb.decode.tree import Sampling, TokenTree

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]
standard, greedy = (RULES[n].decide for n in ("standard", "greedy"))

block = RULES["block"].decide


def scripted(choose):
    "The enumeration in the place of a generator."
    return accept.Choices(choose, exact)


def shape_of(widths):
    "Paths of the tree whose nodes of each depth have so many children."
    levels = [list(itertools.product(*map(range, widths[: n + 1]))) for n in range(len(widths))]
    return [path for level in levels for path in level]


def step_output(rule, p, q, widths, siblings):
    "What one step writes, and its continuation by the verifier to one token more than the draft is deep."
    written = emitted(rule, p.__getitem__, drafts(q.__getitem__, shape_of(widths), siblings))
    assert sum(written.values()) == 1
    return written, continued(written, p.__getitem__, len(widths) + 1)


def output_law(rule, p, q, widths=(1, 1), siblings="without replacement"):
    return step_output(rule, p, q, widths, siblings)[1]


def mean_kept(rule, p, q, widths=(1, 1), siblings="without replacement"):
    return tokens_per_step(step_output(rule, p, q, widths, siblings)[0]) - 1


def verifier_law(p, depth=2):
    return continued(Counter({(): Fraction(1)}), p.__getitem__, depth + 1)


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
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_all_drafts_are_counted():
    "Each with its probability, by hand: of three siblings, the pair that is drawn in either order."
    q = [Fraction(w, 6) for w in (3, 2, 1)]
    of = {s: drafts({(): q}.__getitem__, [(0,), (1,)], s) for s in SIBLINGS}
    chance = {s: {tuple(t for (t,) in draft.texts): c for draft, c in of[s].items()} for s in SIBLINGS}
    assert chance["with replacement"] == {(x, y): q[x] * q[y] for x in range(3) for y in range(3)}
    assert chance["without replacement"][0, 1] == Fraction(3, 6) * Fraction(2, 3)
    assert chance["greedy+1"] == {(1, 0): Fraction(2, 3), (2, 0): Fraction(1, 3)}
    assert chance["likeliest"] == {(0, 1): 1}
    assert {s: next(iter(of[s])).tree().probs is None for s in SIBLINGS} == {s: s == "likeliest" for s in SIBLINGS}


@pytest.mark.parametrize("size", PAIRS, ids=str)
@pytest.mark.parametrize("width,siblings", [(1, "without replacement"), (1, "likeliest"), *((2, s) for s in SIBLINGS)])
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless(name, size, width, siblings):
    "The law of the output is the verifier's, equal as fractions: chains and trees, drawn and deterministic proposals."
    if name == "block" and width > 1:
        with pytest.raises(ValueError, match="chains"):
            block(TokenTree(torch.tensor([0, 1]), torch.tensor([-1, -1])), torch.ones(3, 2) / 2)
        return
    (vocabulary, depth), (p, q) = size, PAIRS[size]
    # outcomes multiply: thousands, not millions
    widths = [1] * depth if width == 1 else [2, 2] if vocabulary == 2 else [2, 1][:depth]
    assert output_law(RULES[name].decide, p, q, widths, siblings) == verifier_law(p, len(widths))


@pytest.mark.parametrize("siblings", ["without replacement", "likeliest"])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if name != "typical"])
def test_padding_leaves_a_rule_as_it_is(name, siblings):
    """A drafter on a device drafts all slots and says later which are real: the step writes what it writes for the
    chain without them."""
    for draft in drafts(Q.__getitem__, shape_of((1, 1)), siblings):
        tree = draft.tree()
        padded = TokenTree.chain(tree.tokens, tree.probs, torch.tensor([True, False]))
        cut = TokenTree.chain(tree.tokens[:1], None if tree.probs is None else tree.probs[:1])
        rows = accept.rows_of([P[text] for text in ((), *draft.texts)])

        def run(choose, tree=padded, rows=rows):
            path, token = RULES[name].decide(tree, rows, scripted(choose))
            return tuple(path), token

        assert outcomes(run) == outcomes(functools.partial(run, tree=cut, rows=rows[:2]))


law_of_twelfths = (
    st.tuples(st.integers(0, 12), st.integers(0, 12))
    .map(sorted)
    .map(lambda c: [Fraction(c[0], 12), Fraction(c[1] - c[0], 12), Fraction(12 - c[1], 12)])
)
laws = st.lists(law_of_twelfths, min_size=13, max_size=13).map(lambda rows: dict(zip(contexts(3, 2), rows)))


@few
@given(p=laws, q=laws, how=st.sampled_from(["without replacement", "likeliest"]), name=st.sampled_from(LOSSLESS))
def test_lossless_for_any_laws(p, q, how, name):
    assert output_law(RULES[name].decide, p, q, (1, 1), how) == verifier_law(p)


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


def top_down(tree, target_probs, generator):
    "Wrong: the walk of traversal from the other end, with the chances of the right one."
    left = target_probs.clone()
    chance = traversal_chances(tree, left)
    node = next((i for i in range(len(tree)) if flip(chance[i], generator)), None)
    path = tree.ancestors[node] if node is not None else torch.zeros(len(tree), dtype=torch.bool)
    return accept.Decision(path, draw(left[last_row(path)][0], generator))


def no_residual_of_a_path(tree, target_probs, generator):
    "Wrong: traversal that draws the next token from the verifier's own distribution."
    path = stop_at_first(tree, traversal_chances(tree, target_probs.clone()), generator)
    return accept.Decision(path, draw(target_probs[last_row(path)][0], generator))


WRONG = {
    "traversal from the root": Rule(top_down, False, "").decide,
    "traversal without a residual": Rule(no_residual_of_a_path, False, "").decide,
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
    widths = (1, 1) if width == 1 else (2, 1)
    assert output_law(WRONG[name], P, Q, widths) != verifier_law(P)


def test_a_drafter_that_names_another_distribution_is_caught():
    "Siblings with replacement that claim to be drawn without, and the drawn one of greedy+1 that claims all of q."
    for siblings, change in {
        "with replacement": lambda q, tree: torch.cat(
            [tree.probs[:1], accept.residual_probs(q, q * (q == q[tree.tokens[0]]))[None]]
        ),
        "greedy+1": lambda q, tree: torch.cat([q[None], tree.probs[1:]]),
    }.items():
        q = accept.rows_of([Q[()]])[0]

        def rule(tree, target_probs, generator, change=change, q=q):
            return standard(TokenTree(tree.tokens, tree.parents, change(q, tree)), target_probs, generator)

        assert output_law(rule, P, Q, (2,), siblings) != verifier_law(P, 1)
        assert output_law(standard, P, Q, (2,), siblings) == verifier_law(P, 1)


def test_lossy_rules_are_marked():
    assert [n for n, r in RULES.items() if not r.lossless] == ["typical", "fly"]
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
    assert kept["strict"] < kept["standard"] < kept["block"] == kept["traversal"]
    tree = {name: mean_kept(RULES[name].decide, P, Q, (2, 1)) for name in LOSSLESS if name != "block"}
    assert kept["standard"] < tree["standard"] < tree["traversal"]
    assert len({mean_kept(RULES[name].decide, P, Q, (2, 1), "likeliest") for name in tree}) == 1


def test_mean_accepted_tokens_exact():
    p = {c: [Fraction(1, 3), Fraction(2, 3)] for c in contexts(2, 2)}
    q = {c: [Fraction(2, 3), Fraction(1, 3)] for c in contexts(2, 2)}
    assert mean_kept(standard, p, q) == Fraction(10, 9)
    assert mean_kept(block, p, q) == Fraction(11, 9)


def test_synthetic_rates_are_what_comes_out():
    rule = synthetic([Fraction(3, 4), Fraction(1, 4)]).decide
    law = Counter()
    for text, chance in step_output(rule, P, Q, (1, 1), "without replacement")[0].items():
        law[len(text) - 1] += chance
    assert law == {0: Fraction(1, 4), 1: Fraction(1, 2), 2: Fraction(1, 4)}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: synthetic([0.5, 0.6]), r"\[0.5, 0.6\].*not increase"),
        (lambda: synthetic([1.2]), "lie in"),
        (lambda: lenient(0), "accept_lenience=0"),
        (lambda: fly(0), "window_size=0: must be at least 1"),
        (lambda: fly(2, -0.1), "entropy_threshold=-0.1: must not be negative"),
        (lambda: fly(2, math.nan), "entropy_threshold=nan"),
        (lambda: fly(2, 0.3, 0), "entropy_top_k=0"),
        (lambda: tolerant(0), "accept_k=0: must be at least 1"),
        (lambda: tolerant(1, -1), "tolerance=-1: must not be negative"),
        (lambda: typical(-0.1), "epsilon=-0.1 and delta=0.09 must not be negative"),
        (lambda: typical(0.3, math.nan), "delta=nan must not be negative"),
    ],
)
def test_refused_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_of_equal_tokens_the_first_is_greedys():
    "Without slack a draft token as likely as the verifier's, but not its first, is refused, as by greedy."
    target = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    for token in range(3):
        chain = TokenTree.chain([token])
        assert tolerant().decide(chain, target) == greedy(chain, target)
    assert tolerant().decide(TokenTree.chain([1]), target) == ([], 0)
    assert tolerant(2).decide(TokenTree.chain([1]), target) == ([0], 1)


@pytest.mark.parametrize("rule", [tolerant(3), tolerant(2), tolerant(1, math.inf), tolerant(4, 0.5)])
def test_slack_never_reaches_what_is_impossible(rule):
    "Filters, and a distribution with fewer tokens than the k likeliest, leave tokens of probability 0."
    target = torch.tensor([[1.0, 0, 0, 0], [0.6, 0.4, 0, 0], [0, 0, 1, 0]])
    assert rule.decide(TokenTree.chain([3]), target[:2]) == ([], 0)
    assert rule.decide(TokenTree(torch.tensor([2, 0]), torch.tensor([-1, -1])), target) == ([1], 2)


FOR_CHAINS = ("block", "fly")


@pytest.mark.parametrize("name", [n for n in RULES if n not in FOR_CHAINS])
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


@pytest.mark.parametrize("name", FOR_CHAINS)
def test_a_rule_for_chains_at_temperature_zero_is_greedy(name):
    "FLy too, as long as the verifier has no doubt."
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        target = torch.eye(3)[torch.randint(3, (4,), generator=g)]
        draft = torch.randint(2, (3,), generator=g)
        for probs in (None, torch.rand(3, 3, generator=g).softmax(-1)):
            tree = TokenTree.chain(draft, probs)
            assert RULES[name].decide(tree, target, g) == greedy(tree, target)


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

    def run(choose):
        path, token = RULES[name].decide(TokenTree.chain([0], q), p.repeat(2, 1), scripted(choose))
        return len(path), token

    assert outcomes(run).keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}


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
    assert typical(0.9, 0.0).decide(tree, laws)[0] == [1, 3, 4]  # nothing is asked for


def test_typical_asks_for_a_share_of_the_perplexity():
    "p > delta exp(-H): of equally likely tokens with delta 1 none, below it each."
    tree, laws = TokenTree.chain([2]), torch.full((2, 4), 0.25)
    assert typical(1.0, 0.99).decide(tree, laws)[0] == [0]
    assert typical(1.0, 1.01).decide(tree, laws)[0] == []


def walk_of_fly(accepted, in_doubt, window):
    "How many tokens are accepted, as vLLM's kernel finds it: a rejection is pending until the window is over."
    kept, pending = 0, None
    for i, yes in enumerate(accepted):
        if pending is not None:
            if not yes:
                break
            if i - pending == window:
                kept, pending = i + 1, None
        elif yes:
            kept = i + 1
        elif in_doubt[i] and i + window < len(accepted):
            pending = i
        else:
            break
    return kept


SURE, DOUBT = [0.98, 0.01, 0.01], [0.4, 0.35, 0.25]  # 0.11 and 1.08 nats


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=9), st.sampled_from([None, 1, 2, 3, 6]))
def test_fly_by_a_walk(tokens, window):
    "At temperature 0: a token is the verifier's likeliest or its second choice, of which it is sure or in doubt."
    accepted, in_doubt = [yes for yes, _ in tokens], [doubt for _, doubt in tokens]
    tree = TokenTree.chain([0 if yes else 1 for yes in accepted])
    likeliest = torch.eye(3)[[0] * (len(tokens) + 1)]
    raw = torch.tensor([DOUBT if doubt else SURE for doubt in [*in_doubt, True]])
    found = fly(window).decide(tree, likeliest, None, raw)
    kept = walk_of_fly(accepted, in_doubt, window or min(6, max(1, len(tokens) - 1)))
    assert found == ([*range(kept)], 0)
    assert fly(window, math.inf).decide(tree, likeliest, None, raw) == greedy(tree, likeliest)


@few
@given(p=laws, q=laws, how=st.sampled_from(["without replacement", "likeliest"]))
def test_fly_without_doubt_is_lossless(p, q, how):
    assert output_law(fly(1, math.inf).decide, p, q, (1, 1), how) == verifier_law(p)


@few
@given(p=laws, q=laws, threshold=st.sampled_from([0, 0.3, 0.6, 1]))
def test_fly_accepts_no_fewer(p, q, threshold):
    assert mean_kept(fly(1, threshold).decide, p, q) >= mean_kept(standard, p, q)


def test_fly_exactly():
    """The verifier tosses a coin for each token and 0 is drafted twice. Both are accepted if the second coin is right,
    whatever the first: three of four texts begin with 0, and not one of two."""
    coin = {c: [Fraction(1, 2)] * 2 for c in contexts(2, 2)}
    drafter = {c: [Fraction(2, 3), Fraction(1, 3)] for c in contexts(2, 2)}
    written, _ = step_output(fly(1).decide, coin, drafter, (1, 1), "likeliest")
    assert written == dict.fromkeys([(0, 0, 0), (0, 0, 1), (0, 1), (1,)], Fraction(1, 4))
    assert mean_kept(fly(1).decide, coin, drafter, (1, 1), "likeliest") == Fraction(5, 4)
    assert mean_kept(standard, coin, drafter, (1, 1), "likeliest") == Fraction(3, 4)
    assert step_output(fly(1, 0.7).decide, coin, drafter, (1, 1), "likeliest")[1] == verifier_law(coin)  # ln 2 is less
    with pytest.raises(ValueError, match="FLy is defined for chains"):
        fly(1).decide(TokenTree(torch.tensor([0, 1]), torch.tensor([-1, -1])), torch.ones(3, 2) / 2)


def test_fly_accepts_nothing_that_is_ruled_out():
    "Token 2 has no probability, as behind a filter; token 1 has."
    raw = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0]])
    likeliest = torch.eye(3)[[0, 0, 0]]
    assert fly(1).decide(TokenTree.chain([1, 0]), likeliest, None, raw) == ([0, 1], 0)
    assert fly(1).decide(TokenTree.chain([2, 0]), likeliest, None, raw) == ([], 0)


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
    drawn = "without replacement"
    for widths, how in (((1, 1), drawn), ((1, 1), "likeliest"), ((2,), drawn))[: 2 if name == "block" else 3]:
        assert output_law(RULES[name].decide, p, q, widths, how) == verifier_law(p, len(widths))
