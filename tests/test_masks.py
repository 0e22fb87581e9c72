"Masks: every factory against a triple loop written from its sentence; algebra; block counts; flex attention."

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from speculators_nb.nn.attention import (
    Mask,
    anchored_blocks,
    causal,
    itself,
    key_prefix,
    repeated_diagonal,
    rollouts,
    same_document,
    sliding_window,
    ttt,
)

packings = st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4)).map(
    lambda p: [d for d, n in enumerate(p[0]) for _ in range(n)] + [-1] * p[1]
)
windows = st.none() | st.integers(1, 8)
quick = settings(max_examples=60, deadline=None)


def loop(rule, q_len, kv_len):
    return torch.tensor([[bool(rule(q, kv)) for kv in range(kv_len)] for q in range(q_len)])


@quick
@given(packings, windows, st.integers(1, 4))
def test_each_sentence(ids, window, passes):
    L, kv = len(ids), passes * len(ids)
    documents = torch.tensor(ids)
    assert torch.equal(causal().dense(L, kv), loop(lambda q, k: k <= q, L, kv))
    assert torch.equal(itself().dense(L, kv), loop(lambda q, k: k == q, L, kv))
    assert torch.equal(
        same_document(documents).dense(L, kv), loop(lambda q, k: ids[q] != -1 and ids[q] == ids[k % L], L, kv)
    )
    assert torch.equal(repeated_diagonal(L).dense(L, kv), loop(lambda q, k: k >= L and k % L == q, L, kv))
    if window:
        assert torch.equal(sliding_window(window).dense(L, kv), loop(lambda q, k: k > q - window, L, kv))

    def step_rule(q, k):
        return (k <= q and ids[q] != -1 and ids[q] == ids[k] and (window is None or k > q - window)) or k % L == q

    assert torch.equal(ttt(documents, L, window).dense(L, kv), loop(step_rule, L, kv))


@pytest.mark.statement("release-34")
@quick
@given(packings, windows, st.integers(1, 3))
def test_every_row_sees_itself_and_no_real_row_sees_padding_or_another_document(ids, window, passes):
    L = len(ids)
    seen = ttt(torch.tensor(ids)[None], L, window).dense(L, passes * L)  # [1, L] ids are accepted too
    assert seen.diagonal().all()
    for q, k in seen.nonzero().tolist():
        assert ids[q] == ids[k % L] and (ids[q] != -1 or k % L == q) and k % L <= q


@quick
@given(packings, st.integers(1, 5))
def test_algebra_is_that_of_the_dense_masks(ids, window):
    L = len(ids)
    a, b = same_document(torch.tensor(ids)), sliding_window(window)
    A, B = a.dense(L, L), b.dense(L, L)
    bare = replace(b, ranges=None)  # as a mask of one's own
    joined = [(a & b, A & B), (a | b, A | B), (~a, ~A)]
    for x, y in ((a, bare), (bare, a)):
        joined += [(x & y, A & B), (x | y, A | B)]
    some = random_rows(ids, window)[0].flip(0)
    for mask, dense in joined:
        assert torch.equal(mask.dense(L, L), dense) and torch.equal(mask.blocks(L, L, 1).allowed, dense.long())
        part = mask.of_queries(some)
        assert torch.equal(part.dense(len(some), L), dense[some]) and (part.ranges is None) == (mask.ranges is None)
    assert torch.equal((~(a & b)).dense(L, L), (~a | ~b).dense(L, L))


def random_rows(ids, seed):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(len(ids), generator=g) < 0.4).nonzero()[:, 0], g


@quick
@given(packings, st.integers(0, 2**31), st.integers(1, 4), st.none() | st.integers(1, 5), st.booleans())
def test_blocks_at_anchors(ids, seed, block, window, inside):
    anchors, _ = random_rows(ids, seed)
    L, n = len(ids), len(anchors) * block
    dense = (
        anchored_blocks(anchors, torch.tensor(ids), block, window, inside).dense(n, L + n) if n else torch.zeros(0, L)
    )
    for q, row in enumerate(dense):
        anchor, slot = int(anchors[q // block]), q % block
        before = {j for j in range(anchor) if ids[j] == ids[anchor] != -1 and (window is None or anchor - j <= window)}
        own = {L + q - slot + k for k in range(slot + 1 if inside else block)}
        assert set(row.nonzero()[:, 0].tolist()) == before | own


@quick
@given(packings, st.integers(0, 2**31), st.integers(1, 4), st.none() | st.integers(1, 5))
def test_rollouts(ids, seed, depths, window):
    L, at = len(ids), []
    for d in range(1, depths):
        at += [(a, d) for a in random_rows(ids, seed)[0].tolist()]
    at = [(i, 0) for i in range(L)] + at
    mask = rollouts(torch.tensor([a for a, _ in at]), torch.tensor([d for _, d in at]), torch.tensor(ids), window)
    dense = mask.dense(len(at), len(at))
    assert mask.ranges and torch.equal(mask.blocks(len(at), len(at), 1).allowed, dense.long())
    for q, (a, d) in enumerate(at):
        past = {(j, 0) for j in range(a + 1) if window is None or j > a + d - window} | {(a, e) for e in range(d + 1)}
        want = {kv for kv, (j, e) in enumerate(at) if (j, e) in past and ids[j] == ids[a] != -1}
        assert set(dense[q].nonzero()[:, 0].tolist()) == want


@pytest.mark.statement("release-35")
@quick
@given(packings, st.integers(1, 7), st.integers(1, 3))
def test_block_counts_against_the_dense_mask(ids, block, passes):
    L, kv = len(ids), passes * len(ids)
    dense = ttt(torch.tensor(ids), L).dense(L, kv)
    counts = ttt(torch.tensor(ids), L).block_counts(L, kv, block)
    tiles = [dense[i : i + block, j : j + block] for i in range(0, L, block) for j in range(0, kv, block)]
    touched = [t for t in tiles if t.any()]
    assert counts == dict(
        allowed=int(dense.sum()),
        full=sum(bool(t.all()) for t in tiles),
        partial=sum(bool(t.any() and not t.all()) for t in tiles),
        empty=sum(not bool(t.any()) for t in tiles),
        useful=int(dense.sum()) / sum(t.numel() for t in touched),
    )


def test_dense_in_bands():
    mask = ttt(torch.tensor([0, 0, 1, 1, -1]), 5)
    assert torch.equal(torch.cat([mask.dense(2, 10), mask.dense(3, 10, first=2)]), mask.dense(5, 10))


def test_flex_attention_agrees_with_the_dense_mask():
    """Same predicate under vmap and evaluated; 300 positions so that whole blocks are empty. Tolerance: float32 sums
    over <= 300 terms."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([0] * 130 + [1] * 140 + [-1] * 30)
    q, k, v = (torch.randn(1, 1, n, 8, generator=generator) for n in (300, 600, 600))
    mask = ttt(ids, 300, window=20)
    flex = flex_attention(q, k, v, block_mask=create_block_mask(mask, None, None, 300, 600, device="cpu"))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(300, 600))
    torch.testing.assert_close(flex, dense, atol=2e-5, rtol=1e-4)


def test_errors_and_drawing():
    with pytest.raises(ValueError, match="window=0"):
        sliding_window(0)
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        same_document(torch.zeros(2, 3))
    figure = Mask(lambda b, h, q, kv: kv <= q).draw(
        4, documents=torch.tensor([[0, 0, 1, -1]]), title="t", xlabel="x", ylabel="y"
    )
    axes = figure.axes[0]
    assert (axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()) == ("t", "x", "y")
    assert len(axes.lines) == 4  # two borders, each a row line and a column line


@quick
@given(packings, windows, st.integers(0, 2**31))
def test_a_mask_without_ranges_has_the_prefix_of_its_predicate(ids, window, seed):
    "A mask of one's own; with ranges or without, each query has the same keys."
    mask, rows = ttt(torch.tensor(ids), len(ids), window), random_rows(ids, seed)[0]
    prefixes = [key_prefix(m, rows[:, None], len(ids)) for m in (mask, replace(mask, ranges=None))]
    key = torch.arange(len(ids))
    inside = [(key >= first[..., None]) & (key < stop[..., None]) for first, stop in prefixes]
    assert torch.equal(*inside) and torch.equal(inside[0][:, 0], mask.dense(len(ids), len(ids))[rows])


def test_a_gap_is_named():
    with pytest.raises(ValueError, match="leaves a gap .* attn_impl='blocked'"):
        key_prefix(Mask(lambda b, h, q, kv: kv % 2 == 0), torch.arange(4), 4)
