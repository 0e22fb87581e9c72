"""Every module of a drafter's `layers` is called as a module, in training and in drafting: hooks fire. (FSDP2 wraps
these modules: test_sharded.py.)"""

import pytest
import torch
from matrix import DRAFTERS, V, batch_for, drafter, family_of, train_step

from speculators_nb.decode.tree import Sampling
from speculators_nb.decode.tree_growth import dynamic_tree


class Calls:
    "Counts the forward calls of each module in a list."

    def __init__(self, layers):
        self.count = [0] * len(layers)
        self.handles = [layer.register_forward_hook(self.hook(i)) for i, layer in enumerate(layers)]

    def hook(self, i):
        def count(module, inputs, output):
            self.count[i] += 1

        return count

    def since(self):
        "The calls since the last time."
        count, self.count = self.count, [0] * len(self.count)
        return count


@pytest.mark.parametrize("name", DRAFTERS)
def test_hooks_of_layers_fire(name):
    "In a training step, lean and by the dense definition, in a chain of draft tokens, and in a tree."
    family = family_of(name)
    model = drafter(name, family)
    layers = list(model.layers)
    assert layers and all(again is layer for again, layer in zip(model.layers, layers))
    assert {id(layer) for layer in layers} <= {id(module) for module in model.modules()}
    calls = Calls(layers)
    batch = batch_for(model, family)
    counted = {}
    for lean in (True, False):
        train_step(model, batch, name, lean=lean)
        counted["lean" if lean else "dense"] = calls.since()
    drafting = model.drafter()
    tokens, features = torch.randint(V - 1, (6,)), batch["hidden_states"][0, :5]
    if name in ("mlp", "medusa"):  # they read the last states alone
        features = batch["verifier_last_hidden_states"][0, :5]
    drafting.propose(tokens, features, 3, Sampling())
    counted["propose"] = calls.since()
    drafting.reset()
    with drafting.grow(tokens, features, 3) as next_log_probs, torch.inference_mode():
        dynamic_tree(next_log_probs, top_k=2, depth=3, total_tokens=6)
    counted["grow"] = calls.since()
    assert all(all(count) for count in counted.values()), counted
    assert counted["lean"] == counted["dense"]
