"""Packing keeps every sample exactly once and every row within its capacity; collate loses nothing that fits."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from speculators_nb.data.packing import PackedBatchSampler, collate, pack
from speculators_nb.nn.supervision import shift_by_one

LENGTHS = st.lists(st.integers(1, 60), max_size=80)


def sample(n, doc=0, A=3, H=2):
    "Values tell where they came from."
    x = 1000 * (doc + 1) + torch.arange(n)
    return dict(
        input_ids=x,
        loss_mask=torch.arange(n) % 3 == doc % 3,
        hidden_states=x[:, None].repeat(1, A * H) + torch.arange(A * H) / 100.0,
        verifier_last_hidden_states=x[:, None].repeat(1, H) + torch.arange(H) / 10.0,
    )


@given(LENGTHS, st.integers(1, 70), st.integers(0, 3), st.integers(0, 3))
def test_pack_each_sample_once_within_capacity(lengths, capacity, seed, epoch):
    rows = pack(lengths, capacity, seed, epoch)
    assert sorted(i for r in rows for i in r) == list(range(len(lengths)))
    clipped = [min(n, capacity) for n in lengths]
    assert all(r and sum(clipped[i] for i in r) <= capacity for r in rows)
    # the number of rows is a property of the lengths
    assert len(rows) == len(pack(lengths, capacity, seed + 1, epoch + 5))
    assert rows == pack(lengths, capacity, seed, epoch)


@given(LENGTHS, st.integers(1, 70))
def test_pack_is_not_wasteful(lengths, capacity):
    """A row is opened only when a sample did not fit into the emptiest one, so at most one row is less than half full
    when no sample exceeds half."""
    half = [min(n, max(1, capacity // 2)) for n in lengths]
    rows = pack(half, capacity)
    if capacity > 1 and half:
        assert len(rows) <= 2 * sum(half) / capacity + 1


def test_pack_epochs_differ_and_numbers_are_checked():
    lengths = [5 + i % 17 for i in range(200)]
    assert pack(lengths, 64, epoch=0) != pack(lengths, 64, epoch=1) != pack(lengths, 64, seed=1, epoch=1)
    assert pack([], 8) == []
    with pytest.raises(ValueError, match=r"lengths\[1\]=0"):
        pack([3, 0], 8)
    with pytest.raises(ValueError, match="capacity=0"):
        pack([3], 0)


@given(LENGTHS.filter(len), st.integers(8, 70))
def test_sampler_length_never_changes(lengths, capacity):
    sampler = PackedBatchSampler(lengths, capacity, seed=3)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        rows = list(sampler)
        assert len(rows) == len(sampler) and rows == pack(lengths, capacity, 3, epoch)
        seen.append(rows)
    for length in (1, 60):  # of rows that were made anew
        sampler.lengths = [length] * len(lengths)
        rows = pack(sampler.lengths, capacity, 3, 2)
        assert len(list(sampler)) == len(sampler) and list(sampler)[: len(rows)] == rows[: len(sampler)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 80))
def test_collate_is_invertible(lengths, L):
    samples = [sample(n, doc) for doc, n in enumerate(lengths)]
    row, start = collate(samples, L), 0
    for doc, s in enumerate(samples):
        here = row["document_ids"][0] == doc
        kept = min(len(s["input_ids"]), max(0, L - start))
        assert int(here.sum()) == kept
        for key, value in s.items():
            assert torch.equal(row[key][0, here], value[:kept]), key
        assert row["position_ids"][0, here].tolist() == list(range(kept))
        start += kept
    padding = row["document_ids"][0] == -1
    assert int(padding.sum()) == L - start and padding[start:].all()
    for key in row.keys() - {"document_ids"}:
        assert not row[key][0, padding].any(), key


@pytest.mark.statement("release-24")
def test_collate_shapes_and_dtypes():
    row = collate([sample(4), sample(3, 1)], 10, dtype=torch.bfloat16)
    assert {k: (tuple(v.shape), v.dtype) for k, v in row.items()} == {
        "input_ids": ((1, 10), torch.int64),
        "hidden_states": ((1, 10, 6), torch.bfloat16),
        "verifier_last_hidden_states": ((1, 10, 2), torch.bfloat16),
        "loss_mask": ((1, 10), torch.bool),
        "position_ids": ((1, 10), torch.int64),
        "document_ids": ((1, 10), torch.int64),
    }
    integers = sample(4) | {"loss_mask": torch.tensor([0, 1, 1, 0])}  # masks of other tools are integers
    mask = collate([integers], 5)["loss_mask"]
    assert mask.dtype == torch.bool and mask.tolist() == [[False, True, True, False, False]]


def test_collate_refuses_uneven_samples():
    bad = sample(4) | {"hidden_states": torch.zeros(3, 6)}
    with pytest.raises(ValueError, match=r"sample 1: \{'hidden_states': 3\} rows beside 4"):
        collate([sample(2), bad], 10)
    with pytest.raises(ValueError, match="no samples"):
        collate([], 10)


@given(st.integers(2, 30))
def test_shift_pairs_token_with_the_state_before_it(n):
    s, out = sample(n), shift_by_one(sample(n))
    assert {len(v) for v in out.values()} == {n - 1}
    for i in range(n - 1):
        assert (
            out["input_ids"][i] == s["input_ids"][i + 1]
            and out["position_ids"][i] == i + 1
            and out["loss_mask"][i] == s["loss_mask"][i + 1]
        )
        assert torch.equal(out["hidden_states"][i], s["hidden_states"][i])
        assert torch.equal(out["verifier_last_hidden_states"][i], s["verifier_last_hidden_states"][i + 1])


def test_shift_of_one_token_is_empty_and_harmless():
    row = collate([sample(1), sample(5, 1)], 6, shift=shift_by_one)
    assert row["document_ids"].tolist() == [[1, 1, 1, 1, -1, -1]] and row["position_ids"].tolist() == [
        [1, 2, 3, 4, 0, 0]
    ]


def test_loader_sees_every_token_once():
    lengths = [3 + (7 * i) % 23 for i in range(60)]
    data = [sample(n, doc) for doc, n in enumerate(lengths)]
    loader = DataLoader(
        data,
        batch_sampler=PackedBatchSampler([n - 1 for n in lengths], 64),
        collate_fn=partial(collate, total_seq_len=64, shift=shift_by_one),
    )
    batches = list(loader)
    assert len(batches) == len(loader)
    seen = torch.cat([b["input_ids"][b["document_ids"] >= 0] for b in batches])
    assert sorted(seen.tolist()) == sorted(int(t) for s in data for t in s["input_ids"][1:])
