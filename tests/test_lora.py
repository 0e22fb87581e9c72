"""Adapters of low rank (LoRA) on drafters: what is trained, what is stored, what PEFT reads of it and writes."""

import json
import shutil

import pytest
import torch
from matrix import DRAFTERS, batch_for, drafter, family_of, train_step, verifier
from safetensors.torch import load_file, save_file
from test_warm_start import KINDS, RELEASE, RUN, old

from speculators_nb.decode.generate import generate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.lora import adapted, add_adapter, load_adapter, remove_adapter, save_adapter
from speculators_nb.train.run_record import read_record
from speculators_nb.train.train_drafter import hidden_layers, train_drafter
from speculators_nb.verifier.tapped_model import Verifier

every_drafter = pytest.mark.parametrize("name", DRAFTERS)


def moved(model, seed=2, rank=2):
    "A drafter with an adapter whose B is not zero."
    add_adapter(model, hidden_layers(model), rank)
    torch.manual_seed(seed)
    with torch.no_grad():
        for difference in adapted(model).values():
            difference.B.normal_(0, 0.1)
    return model


@torch.no_grad()
def loss_of(model, batch, name):
    torch.manual_seed(0)
    return model.train()(**batch, **model.get_trainer_kwargs(**DRAFTERS[name][2])[0])[1].item()


def greedy(model, name):
    "A text that the verifier wrote with a drafter."
    _, target, samples = verifier(family_of(name))
    trained = model.eval().drafter()
    target = Verifier(target.model, list(trained.aux_layer_ids) or None)
    return generate(target, trained, samples[0]["input_ids"][:9].tolist(), k=3, max_new_tokens=16)


@every_drafter
def test_every_drafter_trains_an_adapter_and_nothing_else(name):
    """A fresh adapter changes nothing, to the bit. Gradients reach A and B of every layer and nothing else. Merged, the
    loss and the drafts are the same; taken off, the weights are the drafter's, to the bit. The text never changes."""
    plain = drafter(name, family_of(name))
    batch = batch_for(plain, family_of(name))
    loss, layers, text = loss_of(plain, batch, name), hidden_layers(plain), greedy(plain, name)
    model = drafter(name, family_of(name))
    add_adapter(model, layers, rank=2)
    assert adapted(model).keys() == {*layers} and loss_of(model, batch, name) == loss


    model = moved(drafter(name, family_of(name)))
    train_step(model, batch, name)
    for parameter, p in model.named_parameters():
        assert p.requires_grad == parameter.endswith((".A", ".B")) == (p.grad is not None)
        assert p.grad is None or p.grad.any(), parameter
    loss_with, text_with = loss_of(model, batch, name), greedy(model, name)
    assert loss_with != loss and text_with.tokens == text.tokens

    merged = moved(drafter(name, family_of(name)))
    remove_adapter(merged, merge=True)
    assert loss_of(merged, batch, name) == loss_with and greedy(merged, name).steps == text_with.steps
    remove_adapter(model, merge=False)
    of_plain = plain.state_dict()
    assert model.state_dict().keys() == of_plain.keys()
    assert all(torch.equal(w, of_plain[n]) for n, w in model.state_dict().items())
