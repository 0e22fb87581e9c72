"""The n-gram drafter against its definition, spelled out."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.decode.ngram import NgramDrafter, lookup
from speculators_nb.tree import Drafter, Sampling


def brute_force(tokens, min_n, max_n, k):
    """Longest suffix first; of its earlier occurrences the leftmost; what followed it, up to the end of the text."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start:start + n] == tokens[-n:]:
                return tokens[start + n:start + n + k]
    return []


@settings(max_examples=400, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), min_n=st.integers(1, 5), more=st.integers(0, 5), k=st.integers(1, 8))
def test_lookup_equals_the_definition(tokens, min_n, more, k):
    assert lookup(torch.tensor(tokens), min_n, min_n + more, k).tolist() == brute_force(tokens, min_n, min_n + more, k)


@pytest.mark.parametrize("tokens, min_n, max_n, k, want", [
    ([1, 2, 3, 1, 2, 4, 1, 2], 2, 2, 3, [3, 1, 2]),         # earliest occurrence, not the latest
    ([1, 2, 3, 9, 2, 4, 1, 2], 1, 2, 1, [3]),               # longest suffix wins
    ([5, 1, 2, 7, 2, 8, 3, 2], 2, 4, 3, []),                # "3 2" is new, and min_n forbids "2"
    ([5, 1, 2, 7, 2, 8, 3, 2], 1, 4, 3, [7, 2, 8]),
    ([4, 4, 4, 4], 1, 2, 5, [4, 4]),                        # overlap; the copy ends with the text
    ([4], 1, 5, 5, []),
])
def test_examples(tokens, min_n, max_n, k, want):
    assert lookup(torch.tensor(tokens), min_n, max_n, k).tolist() == want


def test_speaks_the_protocol():
    drafter = NgramDrafter(1, 3)
    assert isinstance(drafter, Drafter) and len(drafter.aux_layer_ids) == 0
    drafter.reset()
    tree = drafter.propose(torch.tensor([1, 2, 3, 1, 2]), None, 2, Sampling(1.0))
    assert tree.tokens.tolist() == [3, 1] and tree.parents.tolist() == [-1, 0] and tree.probs is None
    assert len(drafter.propose(torch.tensor([1, 2, 3]), None, 2, Sampling())) == 0


@pytest.mark.parametrize("min_n, max_n", [(0, 3), (-1, 3), (4, 3)])
def test_refuses_impossible_lengths(min_n, max_n):
    with pytest.raises(ValueError, match=f"min_n={min_n}, max_n={max_n}"):
        NgramDrafter(min_n, max_n)
