"""Packed documents do not know of each other: with a loss on one of them, the other has no gradient, and whatever
stands in it changes neither loss nor gradients."""

import json
from pathlib import Path

import pytest
import torch

from speculators_nb.data.packing import collate
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.models.base import SpeculatorModel

RELEASE = Path(__file__).parent / "fixtures/compat/0.1.0"
DRAFTERS = ["eagle", "hass", "eagle3", "peagle", "dflash", "dspark", "mtp", "mlp", "medusa"]


def load(name):
    "(model, what its forward is called with, two samples)"
    model = SpeculatorModel.from_pretrained(RELEASE / name, verifier=RELEASE / "verifier", dtype=torch.float32).train()
    kwargs, _ = model.get_trainer_kwargs(
        **{
            k: v
            for k, v in json.loads((RELEASE / name / "run.json").read_text())["args"].items()
            if k in ("ttt_steps", "forward_num_total", "num_depths", "max_anchors", "num_speculative_steps")
        }
    )
    data = FeatureDataset(RELEASE / "features", layers=list(model.drafter().aux_layer_ids))
    return model, kwargs, [data[5], data[2]]


def step(model, kwargs, samples, trained):
    "(loss, gradients of the parameters, gradient of the features at each position) with a loss on one document alone."
    samples = [{**s, "loss_mask": s["loss_mask"] & (i == trained)} for i, s in enumerate(samples)]
    batch = collate(samples, 40, model.shift, torch.float32)
    batch["hidden_states"].requires_grad_(True)
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch, **kwargs)[1]
    loss.backward()
    reach = batch["hidden_states"].grad[0].abs().sum(-1) if batch["hidden_states"].grad is not None else None
    return (
        loss.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        reach,
        batch["document_ids"][0],
    )


def changed(sample, seed=0):
    "Other tokens and other states of the same length."
    g = torch.Generator().manual_seed(seed)
    noise = {k: torch.randn(sample[k].shape, generator=g) for k in ("hidden_states", "verifier_last_hidden_states")}
    return {**sample, **noise, "input_ids": torch.randint(3, 60, sample["input_ids"].shape, generator=g)}


@pytest.mark.parametrize("trained", [0, 1], ids=["the first is trained", "the second is trained"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_other_document_is_not_seen(name, trained):
    model, kwargs, samples = load(name)
    loss, grads, reach, documents = step(model, kwargs, samples, trained)
    assert loss > 0 and any(g.abs().sum() > 0 for g in grads.values())
    if reach is not None:
        assert reach[documents == trained].sum() > 0
        assert not reach[documents != trained].any(), "a gradient reaches the features of the other document"
    other = list(samples)
    other[1 - trained] = changed(samples[1 - trained])
    loss2, grads2, *_ = step(model, kwargs, other, trained)
    torch.testing.assert_close(loss2, loss, rtol=1e-6, atol=0)
    assert grads.keys() == grads2.keys()
    for key in grads:
        assert (grads2[key] - grads[key]).norm() <= 1e-5 * grads[key].norm() + 1e-7, key
    other[trained] = changed(samples[trained])
    # what stands in its own document does count
    assert not torch.allclose(step(model, kwargs, other, trained)[0], loss)
