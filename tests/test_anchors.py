"""Anchors against a loop over positions, and upstream's draw."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.nn.anchors import block_supervision, select_anchors


@st.composite
def rows(draw):
    "A packed row with padding behind it, and a block size that fits."
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    padding = draw(st.integers(0, 5))
    documents = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    mask = [draw(st.booleans()) and d >= 0 for d in documents]
    return (
        torch.tensor(mask),
        torch.tensor(documents),
        draw(st.integers(1, min(6, len(documents)))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def scored(a, k, mask, documents, shifted, cross):
    "The row whose verifier state slot k of a block at a is scored against, or None."
    p = a + k
    if (
        p >= len(mask)
        or not mask[p]
        or (k == 0 and not shifted)
        or documents[a] < 0
        or (documents[p] != documents[a] and not cross)
    ):
        return None
    return p if shifted else p - 1


@settings(max_examples=200, deadline=None)
@given(rows())
def test_supervision_is_the_sentence(row):
    mask, documents, B, shifted, cross = row
    anchors = torch.arange(len(mask))
    targets, supervised = block_supervision(anchors, mask, documents, B, shifted, cross)
    for a in range(len(mask)):
        for k in range(B):
            want = scored(a, k, mask, documents, shifted, cross)
            assert bool(supervised[a, k]) == (want is not None)
            assert want is None or targets[a, k] == want
    assert targets.min() >= 0 and targets.max() < len(mask)
    assert torch.equal(block_supervision(anchors, mask[None], documents[None], B, shifted, cross)[1], supervised)


@settings(max_examples=200, deadline=None)
@given(rows(), st.integers(1, 12), st.integers(0, 9))
def test_anchors_are_places_that_can_be_trained(row, n, seed):
    mask, documents, B, shifted, cross = row
    positions, valid = select_anchors(mask, documents, B, n, torch.Generator().manual_seed(seed), shifted, cross)
    places = [
        a
        for a in range(len(mask))
        if mask[a]
        and (
            a < len(mask) - B
            if cross
            else any(scored(a, k, mask, documents, shifted, False) is not None for k in range(B))
        )
    ]
    chosen = positions[valid].tolist()
    assert len(positions) == len(valid) == n and len(chosen) == min(n, len(places))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(places)
    assert valid[: len(chosen)].all() and not positions[len(chosen) :].any()


def test_upstreams_draw():
    """With torch's own generator and `cross_document`, the anchors that the recorded cases were made with: a
    permutation of the places, cut and sorted."""
    mask = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.5
    documents = torch.zeros(60, dtype=torch.long)
    torch.manual_seed(3)
    positions, valid = select_anchors(mask, documents, 8, 10, cross_document=True)
    torch.manual_seed(3)
    places = mask[:52].nonzero()[:, 0]
    assert torch.equal(positions, places[torch.randperm(len(places))[:10]].sort().values) and valid.all()


@pytest.mark.parametrize(
    "change,text",
    [
        (dict(block_size=11), "block_size=11 does not fit into a row of 10"),
        (dict(block_size=0), "block_size=0"),
        (dict(max_anchors=0), "max_anchors=0"),
    ],
)
def test_bad_input(change, text):
    with pytest.raises(ValueError, match=text):
        select_anchors(torch.ones(10), torch.zeros(10), **dict(block_size=4, max_anchors=3) | change)
