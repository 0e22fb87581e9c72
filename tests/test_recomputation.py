"""Gradient checkpointing: layers that are computed again give the same loss and gradients, and hold less."""

import pytest
import torch
from by_day import by_day
from matrix import DRAFTERS, batch_for, drafter, family_of, rows_for, train_step

from speculators_nb.plan.step_memory import measured_step
from speculators_nb.train.trainer import train

every_drafter = pytest.mark.parametrize("name", DRAFTERS)


@pytest.fixture
def calls(monkeypatch):
    "How often a layer's attention or step was computed for a gradient."
    count = []
    original = torch.utils.checkpoint.checkpoint

    def counted(function, *args, **options):
        def run(*given):
            if torch.is_grad_enabled():
                count.append(function)
            return function(*given)

        return original(run, *args, **options)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted)
    return count


@every_drafter
@pytest.mark.parametrize("lean,autocast", [(True, torch.bfloat16), (False, None)], ids=["lean, bf16", "dense, fp32"])
def test_the_same_step(name, lean, autocast, calls):
    "Bit for bit, and each layer runs twice as often."
    model = drafter(name, family_of(name))
    batch = batch_for(model, family_of(name))
    expected = train_step(model, batch, name, autocast=autocast, lean=lean)
    assert not calls
    model.gradient_checkpointing_enable()
    found = train_step(model, batch, name, autocast=autocast, lean=lean)
    once = len(set(map(id, calls)))
    assert calls and len(calls) == 2 * once
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])


@every_drafter
def test_nothing_is_computed_again_in_evaluation(name, calls):
    model = drafter(name, family_of(name))
    model.gradient_checkpointing_enable()
    with torch.no_grad():
        model.eval()(**batch_for(model, family_of(name)))
    assert not calls


# by day one of a kind: a rollout, blocks, a stack of layers, heads; that each layer runs again is shown for all above
@pytest.mark.parametrize("name", by_day(DRAFTERS, ["eagle3", "dflash", "mtp", "medusa"]))
def test_less_is_held(name):
    "The heads of Medusa and of an MLP speculator are trained: their gradients are held too."
    model = drafter(name, family_of(name))
    batch = batch_for(model, family_of(name))
    model.train()  # making a proposer ended it
    arguments = type(model).get_trainer_kwargs(**DRAFTERS[name][2])[0]
    plain = measured_step(model, batch, **arguments).held
    model.gradient_checkpointing_enable()
    assert measured_step(model, batch, **arguments).held < (0.9 if name in ("mlp", "medusa") else 0.45) * plain


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_the_flag_of_the_trainer(name, tmp_path, calls):
    "gradient_checkpointing=True: the same weights after three steps."
    trained = []
    for way in (False, True):
        model = drafter(name, family_of(name))
        settings = dict(total_seq_len=32, max_steps=3, gradient_checkpointing=way, disable_tqdm=True)
        train(model, rows_for(model, family_of(name)), output_dir=str(tmp_path / str(way)), **settings)
        assert bool(calls) == way
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(*trained)


def test_the_reentrant_way_is_refused():
    model = drafter("eagle3", "llama")
    with pytest.raises(ValueError, match="use_reentrant=True loses the gradients .*; leave it out"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
