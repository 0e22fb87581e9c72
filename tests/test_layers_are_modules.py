"""Every module of a drafter's `layers` is called as a module, in training and in drafting: hooks fire, and FSDP2
(`fully_shard`) of each layer and then of the drafter gives the gradients of one process."""

import multiprocessing
import time
import traceback
from datetime import timedelta

import pytest
import torch
from matrix import DRAFTERS, V, batch_for, drafter, train_step, verifier
from torch import distributed as dist

from speculators_nb.decode.tree import Sampling
from speculators_nb.decode.tree_growth import dynamic_tree

RANKS = 2
LIMIT = 300  # seconds for both ranks and all drafters, which need about 20
STUCK = 60  # seconds that a rank waits for the other


def family_of(name):
    return "qwen3" if name == "mtp" else "llama"


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
    "In a training step, lean and by the dense definition, in a chain of draft tokens, and in a tree where one grows."
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
    if drafting.grow is not None:
        drafting.reset()
        with drafting.grow(tokens, features, 3) as next_log_probs, torch.inference_mode():
            dynamic_tree(next_log_probs, top_k=2, depth=3, total_tokens=6)
        counted["grow"] = calls.since()
    assert all(all(count) for count in counted.values()), counted
    assert counted["lean"] == counted["dense"]


# ---- sharded by layer


def batch_of(model, family, rank):
    "Another batch on each rank: one document less to train on."
    batch = batch_for(model, family)
    return batch | {"loss_mask": batch["loss_mask"] & (batch["document_ids"] != rank)}


def compare(name, rank, mesh):
    "Raise unless loss and gradients are those of one process: the gradients' mean over the batches of all ranks."
    from torch.distributed.fsdp import fully_shard

    family = family_of(name)
    model = drafter(name, family)
    batches = [batch_of(model, family, r) for r in range(RANKS)]
    expected = {}
    for lean in (True, False):
        steps = [train_step(model, batch, name, seed=r, lean=lean) for r, batch in enumerate(batches)]
        assert not torch.allclose(steps[0][1], steps[1][1], rtol=1e-3)
        expected[lean] = steps[rank][0], torch.stack([step[1] for step in steps]).mean(0)
    model.zero_grad(set_to_none=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    for lean, (loss, grad) in expected.items():
        sharded_loss, sharded_grad = train_step(model, batches[rank], name, seed=rank, lean=lean)
        assert sharded_loss == pytest.approx(loss, rel=1e-5), lean
        torch.testing.assert_close(sharded_grad, grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())


def one_rank(rank, folder):
    "What a rank does; its report is a file, name -> what went wrong, or None."
    torch.set_num_threads(1)
    for name in DRAFTERS:
        verifier(family_of(name))  # before the ranks know of each other: then only the first would save
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=STUCK),
    )
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    report = {}
    for name in DRAFTERS:
        report[name] = None
        try:
            compare(name, rank, mesh)
        except Exception:
            report[name] = traceback.format_exc()
        torch.save(report, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.statement("api-48")
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo")
def test_layers_can_be_sharded(tmp_path):
    "Two processes, each layer sharded, then the rest: the gradients of all drafters are those of one process."
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=one_rank, args=(rank, tmp_path), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT
    try:
        for process in ranks:
            process.join(max(0, until - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    files = [tmp_path / f"{rank}.pt" for rank in range(RANKS)]
    reports = [torch.load(file) if file.exists() else {} for file in files]
    problems = [f"{name}: {error}" for report in reports for name, error in report.items() if error]
    assert not problems, "\n".join(problems)
    assert [list(report) for report in reports] == [list(DRAFTERS)] * RANKS, "a rank ended early, or was too slow"
    assert [process.exitcode for process in ranks] == [0] * RANKS
