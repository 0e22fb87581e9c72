"What every drafter does alike: a row without loss, a head in bfloat16, a copy, a pickle."

import copy
import io
import pickle

import pytest
import torch
from matrix import DRAFTERS, batch_for, drafter, family_of, full_gradient, train_step

every_drafter = pytest.mark.parametrize("name", DRAFTERS)


@every_drafter
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "dense"])
def test_a_row_without_loss(name, lean):
    "Loss 0, no gradient and finite metrics, also where all of the row is padding."
    model = drafter(name, family_of(name)).train()
    arguments = model.get_trainer_kwargs(**DRAFTERS[name][2])[0]
    batch = batch_for(model, family_of(name))
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    for documents in (batch["document_ids"], torch.full_like(batch["document_ids"], -1)):
        _, loss, metrics = model(**batch | dict(document_ids=documents), **arguments, lean=lean)
        loss.backward()
        assert loss == 0 and all(torch.isfinite(v) for v in metrics.values())
        assert not any(full_gradient(p).any() for p in model.parameters() if p.requires_grad)


@every_drafter
def test_a_head_in_bfloat16(name):
    "Products of the head alone, or the whole model: the loss moves by a few percent."
    model = drafter(name, family_of(name))
    batch = batch_for(model, family_of(name))
    full = train_step(model, batch, name)[0]
    assert train_step(model, batch, name, gemm_dtype=torch.bfloat16)[0] == pytest.approx(full, rel=2e-2)
    assert train_step(model.bfloat16(), batch, name)[0] == pytest.approx(full, rel=5e-2)


def by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = dict(copy=copy.deepcopy, pickle=lambda model: pickle.loads(pickle.dumps(model)), torch=by_torch)


@every_drafter
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_the_drafter(name, copied):
    "As torch's users make one; what drafts for it is copied too."
    model = drafter(name, family_of(name))
    twin, batch = copied(model), batch_for(model, family_of(name))
    (loss, gradient), (again, its) = (train_step(each, batch, name) for each in (model, twin))
    assert loss == again and torch.equal(gradient, its)
    assert twin.config.to_dict() == model.config.to_dict()
    copied(model.drafter()).reset()
