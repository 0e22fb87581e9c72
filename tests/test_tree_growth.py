"""Trees against brute force over all paths, and sampled ones against the exact law of the output, all random outcomes
enumerated as fractions."""

import functools
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from by_day import by_day
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_rules import PAIRS, scripted, verifier_law

from speculators_nb.decode.acceptance_rules import RULES, continued, exact, outcomes
from speculators_nb.decode.tree import Sampling
from speculators_nb.decode.tree_growth import (
    draw_greedy_plus_one,
    draw_without_replacement,
    dynamic_tree,
    independent_log_probs,
    parse_tree,
    product_tree,
    recurrent_log_probs,
    shaped_tree,
    static_shape,
    static_tree,
)


def path_law(path, vocab):
    "Some law after a path of tokens, the same for the same path."
    g = torch.Generator().manual_seed(hash(path) % 2**31)
    return (2 * torch.randn(vocab, generator=g)).log_softmax(-1)


def paths_of(tokens, parents):
    paths = {-1: ()}
    for i, (t, p) in enumerate(zip(tokens.tolist(), parents.tolist())):
        paths[i] = (*paths[p], t)
    return paths


@pytest.mark.parametrize(
    "vocab,top_k,depth,total", [(3, 3, 3, 9), (4, 2, 3, 6), (5, 2, 4, 11), (3, 1, 4, 4), (4, 3, 2, 100)]
)
@pytest.mark.parametrize("seed", range(3))
def test_tree_is_brute_force(vocab, top_k, depth, total, seed):
    "Layer by layer over all paths, as the paper says it; with top_k = V, simply the likeliest of all paths."

    def law(nodes, tokens, parents):
        paths = paths_of(tokens, parents)
        return torch.stack([path_law((seed, *paths[i]), vocab) for i in nodes.tolist()])

    tree, scores = dynamic_tree(law, top_k, depth, total)
    pool, frontier = {}, {(): 0.0}
    for _ in range(depth):
        layer = {}
        for path, score in frontier.items():
            after = path_law((seed, *path), vocab).tolist()
            for v in sorted(range(vocab), key=lambda v: -after[v])[:top_k]:
                layer[*path, v] = score + after[v]
        pool |= layer
        frontier = dict(sorted(layer.items(), key=lambda x: -x[1])[:top_k])
    want = dict(sorted(pool.items(), key=lambda x: -x[1])[:total])
    paths = paths_of(tree.tokens, tree.parents)
    got = {paths[i]: s for i, s in enumerate(scores.tolist())}
    assert got.keys() == want.keys() and all(got[p] == pytest.approx(want[p], abs=1e-5) for p in want)
    if top_k == vocab and total <= vocab:
        every = {
            p: sum(path_law((seed, *p[:i]), vocab)[p[i]].item() for i in range(len(p)))
            for d in range(1, depth + 1)
            for p in itertools.product(range(vocab), repeat=d)
        }
        assert set(got) == set(sorted(every, key=lambda p: -every[p])[:total])


def test_certain_laws_make_a_chain():
    "Equal scores (probability 1): a parent is kept before its child."
    sure = torch.tensor([0.0, -1e9, -1e9])
    tree, _ = dynamic_tree(lambda nodes, tokens, parents: sure.expand(len(nodes), 3), 2, 5, 4)
    assert tree.tokens.tolist() == [0, 0, 0, 0] and tree.parents.tolist() == [-1, 0, 1, 2]
    for name in ("top_k", "depth", "total_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            dynamic_tree(lambda *a: sure[None], **dict(top_k=2, depth=1, total_tokens=4) | {name: 0})


def law_of(seed, vocab):
    def law(nodes, tokens, parents):
        paths = paths_of(tokens, parents)
        return torch.stack([path_law((seed, *paths[i]), vocab) for i in nodes.tolist()])

    return law


def said(tree):
    paths = paths_of(tree.tokens, tree.parents)
    return [paths[i] for i in range(len(tree))]


@pytest.mark.parametrize("initial,factor,depth", [(1, 1, 4), (3, 2, 3), (2, 3, 2), (4, 1, 3), (5, 5, 2), (7, 2, 2)])
def test_static_tree_is_brute_force(initial, factor, depth):
    "The likeliest children of every node, level by level; a factor beyond the vocabulary of 5 takes all of it."

    def level(path):
        width = factor if path else initial
        return [(*path, v) for v in path_law((0, *path), 5).argsort(descending=True)[:width].tolist()]

    want, front = [], [()]
    for _ in range(depth):
        front = [p for path in front for p in level(path)]
        want += front
    tree = static_tree(law_of(0, 5), initial, factor, depth)
    assert said(tree) == want and tree.probs is None


shapes = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6).map(
    lambda paths: sorted({p[:n] for p in paths for n in range(1, len(p) + 1)}, key=str)
)


@settings(max_examples=50, deadline=None)
@given(shape=shapes)
def test_any_shape(shape):
    "Written as text in any order, parsed, grown: node for node the word of its choices."
    parsed = parse_tree(str(shape))
    assert set(parsed) == set(shape) and sorted(map(len, parsed)) == list(map(len, parsed))

    def words(choices):
        path = ()
        for c in choices:
            path += (int(path_law((1, *path), 4).argsort(descending=True)[c]),)
        return path

    assert said(shaped_tree(law_of(1, 4), parsed)) == [words(p) for p in parsed]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[(0,), (1,)",
        "5",
        "(0,)",
        "{}",
        "[]",
        "[0]",
        "[(0)]",
        "[()]",
        "[(0.5,)]",
        "[(True,)]",
        "[('a',)]",
        "[(-1,)]",
        "[(0,), (0,)]",
        "[(0, 0)]",
        "[(0,), (1, 0)]",
        "__import__('os')",
        "[(" * 5000,
        "[(0,)] * 3",
        "[[0], [1]]",
        "\x00",
    ],
)
def test_malformed_trees(text):
    with pytest.raises(ValueError, match="tree .*write paths of choices"):
        parse_tree(text)


@pytest.mark.parametrize(
    "field,arguments", [("initial_branching_factor", (0, 1, 1)), ("branching_factor", (1, 0, 1)), ("depth", (1, 1, 0))]
)
def test_static_shape_refuses(field, arguments):
    with pytest.raises(ValueError, match=f"^{field}=0"):
        static_shape(*arguments)


@pytest.mark.parametrize("sizes", [(10**9, 1, 1), (1, 10**9, 2), (2, 2, 10**9), (1, 1, 10**9)], ids=str)
def test_a_static_tree_is_refused_before_it_fills_the_memory(sizes):
    first, later, depth = sizes
    with pytest.raises(ValueError, match=f"depth={depth}: .*factor={first} and .*factor={later} .* more than"):
        static_shape(*sizes)
    with pytest.raises(ValueError, match="depth=1.5 must be a whole number"):
        static_shape(2, 1, 1.5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 3), total=st.integers(1, 30))
def test_product_tree_is_the_best(seed, slots, total):
    "Of all sets of paths that hold their own beginnings, the one of the highest sum is that of the likeliest paths."
    laws = torch.randn(slots, 4, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
    every = {
        p: math.fsum(laws[i, v].item() for i, v in enumerate(p))
        for n in range(1, slots + 1)
        for p in itertools.product(range(4), repeat=n)
    }
    assert set(said(product_tree(laws, total))) == set(sorted(every, key=lambda p: -every[p])[:total])


def test_nothing_impossible_is_proposed():
    "A token of probability 0 and whatever would follow it; slots that the drafter does not have."
    laws = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0]]).log()
    draws = Sampling(1.0, torch.Generator().manual_seed(0))
    for sampling in (None, draws):
        tree = static_tree(independent_log_probs(laws), 3, 3, 4, sampling)
        assert sorted(said(tree)) == [(0,), (0, 0), (0, 1)]
    assert sorted(said(dynamic_tree(independent_log_probs(laws), 5, 4, 50)[0])) == [(0,), (0, 0), (0, 1)]
    assert (
        len(static_tree(independent_log_probs(laws[:0]), 2, 2, 2, draws))
        == len(dynamic_tree(independent_log_probs(laws[:0]), 2, 2, 2)[0])
        == 0
    )


def test_filters_hold_for_siblings():
    "With top_k = 2 no third child is drawn; the two are the likeliest, in either order, the second from a point mass."
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0]).log_softmax(-1)
    sampling, orders = Sampling(0.5, torch.Generator().manual_seed(0), top_k=2), Counter()
    for _ in range(200):
        (tokens,), (laws,) = draw_without_replacement(sampling.probabilities(logits)[None], 3, sampling)
        orders[tuple(tokens[laws.sum(-1) > 0].tolist())] += 1
        assert laws[1, tokens[1]] == 1
    # sigmoid(2), five standard deviations at n = 200
    assert set(orders) == {(0, 2), (2, 0)} and abs(orders[0, 2] / 200 - 0.881) < 0.115


# ------------------------------------------------------------------------------------------------ losslessness


def sampled_output(shape, p, q, choose, rule, grow=shaped_tree):
    "One outcome of a step: grow a tree from the drafter's law q, apply the rule."
    sampling = SimpleNamespace(
        temperature=1.0,
        probabilities=torch.exp,
        draw=lambda laws: torch.tensor([choose(fractions(law)) for law in laws]),
    )

    def law(nodes, tokens, parents):
        paths = paths_of(tokens, parents)
        return torch.tensor([[float(v) for v in q[paths[i]]] for i in nodes.tolist()], dtype=torch.float64).log()

    tree = grow(law, shape, sampling)
    assert tree.probs is not None and len(set(said(tree))) == len(tree)
    target = torch.tensor([[float(v) for v in p[path]] for path in [(), *said(tree)]], dtype=torch.float64)
    path, token = rule(tree, target, scripted(choose))
    return (*(int(tree.tokens[i]) for i in path), token)


def fractions(law):
    law = [exact(w) for w in law.tolist()]
    return [w / sum(law) for w in law]


SHAPES = {
    (2, 3): ["[(0,), (1,), (0, 0), (0, 0, 0)]", "[(0,), (0, 0), (0, 1)]"],
    (3, 2): ["[(0,), (1,), (0, 0)]", "[(0,), (1,), (1, 0)]", "[(0,), (1,), (2,)]"],
    (4, 1): ["[(0,), (1,)]", "[(0,), (1,), (2,)]"],
    (5, 1): ["[(0,), (1,)]"],
}


# three siblings of three words are there by day; of four, and two of five, take longest
CASES = [(size, text) for size, texts in SHAPES.items() for text in texts]
DAY = [case for case in CASES if case not in [((4, 1), "[(0,), (1,), (2,)]"), ((5, 1), "[(0,), (1,)]")]]


@pytest.mark.parametrize("size,text", by_day(CASES, DAY), ids=str)
@pytest.mark.parametrize(
    "name,draw",
    [
        *((name, draw_without_replacement) for name in ("standard", "strict", "traversal")),
        *((name, draw_greedy_plus_one) for name in ("standard", "traversal")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_drawn_trees_keep_the_verifiers_law(name, draw, size, text):
    "Equal as fractions, over all outcomes of growing and accepting."
    (p, q), shape = PAIRS[size], parse_tree(text)
    depth = min(size[1], 2)
    shape = [path for path in shape if len(path) <= depth]
    grow = functools.partial(shaped_tree, draw=draw)
    law = outcomes(lambda choose: sampled_output(shape, p, q, choose, RULES[name].decide, grow))
    assert continued(law, p.__getitem__, depth + 1) == verifier_law(p, depth)


def test_reporting_the_undiminished_law_is_caught():
    "The test has teeth: siblings drawn without putting back that all claim the whole law are not lossless."

    def wrong(law, shape, sampling):
        tree = shaped_tree(law, shape, sampling)
        first = tree.probs[0]
        tree.probs = torch.stack([first if int(p) == -1 else row for p, row in zip(tree.parents, tree.probs)])
        return tree

    (p, q), shape = PAIRS[3, 2], [(0,), (1,)]
    for grow, kept in ((wrong, False), (shaped_tree, True)):
        law = outcomes(lambda choose: sampled_output(shape, p, q, choose, RULES["standard"].decide, grow))
        assert (continued(law, p.__getitem__, 2) == verifier_law(p, 1)) is kept


# ------------------------------------------------------------------------------------------------ recurrent laws


@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize(
    "build",
    [
        lambda law: static_tree(law, 3, 2, 3),
        lambda law: dynamic_tree(law, 3, 4, 11)[0],
        lambda law: shaped_tree(law, parse_tree("[(0,), (2,), (0, 1), (2, 0), (2, 0, 1)]")),
    ],
)
def test_a_node_sees_decided_keys_its_ancestors_and_itself(keys, build):
    "A toy whose state is what it was shown; its laws hang on nothing else, so the tree is that of the path laws."
    cache = list(range(100, 100 + keys))

    def step(tokens, states, sees):
        cache.extend(tokens.tolist())
        assert sees.shape == (len(tokens), len(cache))
        out = []
        for state, row in zip(states, sees):
            shown = [v for v, seen in zip(cache, row.tolist()) if seen]
            # the parent's state, and this token
            assert shown[:keys] == list(range(100, 100 + keys)) and shown[keys:-1] == [int(v) for v in state if v >= 0]
            out.append(torch.tensor(shown[keys:] + [-1] * (len(state) - len(shown) + keys)))
        return torch.stack(out)

    def logits(states):
        return torch.stack([path_law((0, *(int(v) for v in s if v >= 0)), 5) for s in states])

    assert said(build(recurrent_log_probs(step, logits, torch.full((6,), -1), keys))) == said(build(law_of(0, 5)))
