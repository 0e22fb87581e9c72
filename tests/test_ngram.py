"""The n-gram drafter against its definition, spelled out."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.decode import ngram
from speculators_nb.decode.ngram import FirstPlaces, NgramDrafter, lookup
from speculators_nb.decode.tree import Drafter, Sampling


def brute_force(tokens, min_n, max_n, k):
    """Longest suffix first; of its earlier occurrences the leftmost; what followed it, up to the end of the text."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    min_n=st.integers(1, 5),
    more=st.integers(0, 5),
    k=st.integers(1, 8),
)
def test_lookup_equals_the_definition(tokens, min_n, more, k):
    assert lookup(torch.tensor(tokens), min_n, min_n + more, k).tolist() == brute_force(tokens, min_n, min_n + more, k)


@pytest.mark.parametrize(
    "tokens, min_n, max_n, k, want",
    [
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 2, 3, [3, 1, 2]),  # earliest occurrence, not the latest
        ([1, 2, 3, 9, 2, 4, 1, 2], 1, 2, 1, [3]),  # longest suffix wins
        ([5, 1, 2, 7, 2, 8, 3, 2], 2, 4, 3, []),  # "3 2" is new, and min_n forbids "2"
        ([5, 1, 2, 7, 2, 8, 3, 2], 1, 4, 3, [7, 2, 8]),
        ([4, 4, 4, 4], 1, 2, 5, [4, 4]),  # overlap; the copy ends with the text
        ([4], 1, 5, 5, []),
    ],
)
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
    with pytest.raises(ValueError, match=f"^min_n={min_n}: must be at "):
        NgramDrafter(min_n, max_n)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_drafter_that_remembers_proposes_what_looking_through_the_text_does(data):
    """A text that grows, is set back, is another request's with and without reset, or is in a buffer that is written
    over; copies of the drafter beside it."""
    min_n, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    drafter, tokens, buffer = (
        NgramDrafter(min_n, max_n := min_n + data.draw(st.integers(0, 4))),
        [],
        torch.zeros(200, dtype=torch.long),
    )
    part = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for _ in range(data.draw(st.integers(1, 12))):
        how = data.draw(st.sampled_from(["grow", "grow", "grow", "reset", "another", "set back", "copy"]))
        if how == "reset":
            drafter.reset(), tokens.clear()
        if how == "another":
            tokens = data.draw(st.lists(st.integers(0, 2), max_size=30))
        if how == "set back":
            tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
        if how == "copy":
            copy.copy(drafter).propose(torch.tensor(data.draw(part)), None, k, Sampling())
        tokens = tokens + data.draw(part)
        buffer[: len(tokens)] = torch.tensor(tokens)
        text = buffer[: len(tokens)] if data.draw(st.booleans()) else torch.tensor(tokens)
        assert drafter.propose(text, None, k, Sampling()).tokens.tolist() == brute_force(tokens, min_n, max_n, k)


@pytest.mark.parametrize("n", [1_000, 32_000])
def test_a_step_does_not_depend_on_the_length_of_the_text(n, monkeypatch):
    "What is read and written for one more token: its own run of each length."
    text = torch.randint(0, 50, (n + 1,), generator=torch.Generator().manual_seed(0))
    drafter = NgramDrafter(1, 5)
    drafter.propose(text[:n], None, 4, Sampling())

    class Watched(dict):
        asked = 0

        def get(self, *a):
            Watched.asked += 1
            return super().get(*a)

        def setdefault(self, *a):
            Watched.asked += 1
            return super().setdefault(*a)

    drafter.places.first = [Watched(d) for d in drafter.places.first]
    monkeypatch.setattr(ngram, "lookup", None)  # is not gone back to
    drafter.propose(text, None, 4, Sampling())
    assert 5 < Watched.asked <= 10


def test_places_are_those_of_the_first_occurrence():
    places = FirstPlaces(2, 3)
    for n in range(1, 9):
        places.read(torch.tensor([1, 2, 3, 1, 2, 4, 1, 2][:n]))
    assert places.place() == 2 and places.first[0] == {(1, 2): 2, (2, 3): 3, (3, 1): 4, (2, 4): 6, (4, 1): 7}
