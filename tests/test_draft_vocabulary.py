"The draft vocabulary: choosing, checking, translating, keeping."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.nn.draft_vocabulary import (
    check_vocab_mapping,
    count_tokens,
    draft_to_verifier,
    load_vocab_mapping,
    save_vocab_mapping,
    scatter_probs,
    verifier_to_draft,
    vocab_mapping_from_frequencies,
)

# (counts of each of V tokens, Vd)
cases = st.lists(st.integers(0, 5), min_size=1, max_size=30).flatmap(
    lambda c: st.tuples(st.just(c), st.integers(1, len(c)))
)
quick = settings(max_examples=100, deadline=None)


@pytest.mark.statement("release-30")
@quick
@given(cases)
def test_mapping_by_definition(case):
    counts, size = case
    V = len(counts)
    t2d, d2t = vocab_mapping_from_frequencies(torch.tensor(counts), size, V)
    expected = sorted(sorted(range(V), key=lambda v: (-counts[v], v))[:size])
    assert (torch.arange(size) + d2t).tolist() == expected == t2d.nonzero().flatten().tolist()
    check_vocab_mapping(t2d, d2t, V, size)
    sparse = {v: c for v, c in enumerate(counts) if c}
    assert all(torch.equal(a, b) for a, b in zip(vocab_mapping_from_frequencies(sparse, size, V), (t2d, d2t)))


@quick
@given(cases, st.integers(0, 2**31))
def test_translations_are_inverse_and_keep_probability(case, seed):
    counts, size = case
    t2d, d2t = vocab_mapping_from_frequencies(torch.tensor(counts), size, len(counts))
    ids = torch.arange(size)
    assert torch.equal(verifier_to_draft(draft_to_verifier(ids, d2t), t2d), ids)
    back = verifier_to_draft(torch.arange(len(counts)), t2d)
    assert torch.equal(back >= 0, t2d) and torch.equal(draft_to_verifier(back[t2d], d2t), t2d.nonzero().flatten())
    probs = torch.rand(2, 3, size, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    full = scatter_probs(probs, d2t, len(counts))
    assert full.shape == (2, 3, len(counts)) and torch.equal(full[..., t2d], probs) and not full[..., ~t2d].any()


@pytest.mark.statement("release-21")
def test_full_vocabulary_needs_no_mapping():
    ids, probs = torch.tensor([3, 1]), torch.rand(2, 4)
    assert (
        draft_to_verifier(ids, None) is ids
        and verifier_to_draft(ids, None) is ids
        and scatter_probs(probs, None, 4) is probs
    )
    check_vocab_mapping(None, None, 4, 4)
    check_vocab_mapping(torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 4, 4)


def test_counting():
    samples = [
        (torch.tensor([1, 2, 2]), torch.tensor([True, True, False])),
        (torch.tensor([[3, 2]]), torch.tensor([[0, 1]])),
        (torch.tensor([], dtype=torch.int64), torch.tensor([])),
    ]
    assert count_tokens(samples, 5).tolist() == [0, 1, 2, 0, 0]
    assert count_tokens([], 3).tolist() == [0, 0, 0]
    for bad in (-1, 5):
        with pytest.raises(ValueError, match="another tokenizer"):
            count_tokens([(torch.tensor([0, bad]), torch.ones(2))], 5)
    assert count_tokens([(torch.tensor([9]), torch.tensor([0]))], 5).sum() == 0  # outside the mask nothing is looked at


T2D, D2T = torch.tensor([1, 0, 1, 0]).bool(), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((T2D, None, 4, 2), "d2t is missing: give both"),
        ((None, D2T, 4, 2), "t2d is missing: give both"),
        ((None, None, 4, 2), "knows only 2 of the verifier's 4"),
        ((T2D, D2T, 5, 2), r"t2d has shape \(4,\), but the verifier has 5"),
        ((T2D, D2T, 4, 3), r"d2t has shape \(2,\), but draft_vocab_size=3"),
        ((T2D, D2T, 4, 5), "draft_vocab_size=5 must lie between 1 and the verifier's vocabulary, 4"),
        ((T2D, D2T, 4, 0), "draft_vocab_size=0"),
        ((~T2D | T2D, D2T, 4, 2), "t2d keeps 4 tokens"),
        (
            (T2D, torch.tensor([0, 2]), 4, 2),
            r"d2t\[1\]=2 maps draft id 1 to verifier id 3, but by t2d it is 2. d2t holds offsets",
        ),
        ((T2D, torch.tensor([2, -1]), 4, 2), "ascending"),
    ],
)
def test_wrong_mappings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_vocab_mapping(*arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.ones(4), 5, 4), "draft_vocab_size=5"),
        ((torch.ones(3), 2, 4), "counts has 3 entries"),
        (({4: 1}, 2, 4), "counts has token ids from 4"),
    ],
)
def test_wrong_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        vocab_mapping_from_frequencies(*arguments)


def test_files(tmp_path, monkeypatch):
    save_vocab_mapping(tmp_path, T2D, D2T)
    t2d, d2t = load_vocab_mapping(tmp_path, 2, 4)
    assert torch.equal(t2d, T2D) and torch.equal(d2t, D2T) and (t2d.dtype, d2t.dtype) == (torch.bool, torch.int64)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d2t-2.npy", "t2d-2.npy"]
    with pytest.raises(FileNotFoundError, match=r"t2d-3.npy: no draft vocabulary of this size \(found: t2d-2.npy\)"):
        load_vocab_mapping(tmp_path, 3, 4)
    with pytest.raises(ValueError, match="another verifier"):
        load_vocab_mapping(tmp_path, 2, 5)
    np.save(tmp_path / "d2t-2.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="d2t-2.npy: no array of numbers .*Python objects"):
        load_vocab_mapping(tmp_path, 2, 4)
    with pytest.raises(ValueError, match="d2t holds offsets"):
        save_vocab_mapping(tmp_path, T2D, torch.tensor([0, 2]))
