"""Packed documents do not know of each other: with a loss on one of them, the other has no gradient, and whatever
stands in it changes neither loss nor gradients."""

import pytest
import torch
from matrix import DRAFTERS, V, drafter, family_of, rows_for, train_step

from speculators_nb.data.packing import collate


def step(model, name, rows, trained):
    "(loss, gradients of the parameters, gradient of the features at each position) with a loss on one document alone."
    rows = [row | {"loss_mask": row["loss_mask"] & (i == trained)} for i, row in enumerate(rows)]
    batch = collate(rows, 40, shift=model.shift)
    features = batch["hidden_states"].requires_grad_(True)
    loss, grads = train_step(model, batch, name)
    reach = None if features.grad is None else features.grad[0].abs().sum(-1)
    return loss, grads, reach, batch["document_ids"][0]


def changed(row, seed=0):
    "Other tokens and other states of the same length."
    g = torch.Generator().manual_seed(seed)
    noise = {k: torch.randn(row[k].shape, generator=g) for k in ("hidden_states", "verifier_last_hidden_states")}
    return row | noise | {"input_ids": torch.randint(V - 1, row["input_ids"].shape, generator=g)}


@pytest.mark.parametrize("trained", [0, 1], ids=["the first is trained", "the second is trained"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_other_document_is_not_seen(name, trained):
    model = drafter(name, family_of(name))
    rows = rows_for(model, family_of(name))[:2]
    loss, grads, reach, documents = step(model, name, rows, trained)
    assert loss > 0 and grads.any()
    if reach is not None:
        assert reach[documents == trained].sum() > 0
        assert not reach[documents != trained].any(), "a gradient reaches the features of the other document"
    other = list(rows)
    other[1 - trained] = changed(rows[1 - trained])
    loss2, grads2, *_ = step(model, name, other, trained)
    assert loss2 == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(grads2, grads, rtol=1e-3, atol=1e-6 * grads.abs().max().item())
    other[trained] = changed(rows[trained])
    # what stands in its own document does count
    assert step(model, name, other, trained)[0] != pytest.approx(loss, rel=1e-5)
