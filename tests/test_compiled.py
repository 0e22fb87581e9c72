"What a device runs compiled, compiled on a CPU: the same numbers, no graph break, few graphs."

import copy
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.utils import counters

import speculators_nb.nn.attention as attention_module
import speculators_nb.nn.compiled as compiled_module
from benchmarks.gpu.equal import HEADS, WAYS, batch, differences, drafter, flex_trains, step
from speculators_nb.nn.losses import LOSSES, Distribution, RowLoss, mass_below, overlap, score_logits, score_rows
from speculators_nb.nn.token_loss import score_tokens

CPU = torch.device("cpu")
PARTS = {"rotated_heads", "after_attention", "gated"}  # of a layer


@pytest.fixture
def compiles(monkeypatch):
    "As on a device, by the compiler's front end alone: kernels for a CPU take minutes."
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled_module, "_compiled", {})
    monkeypatch.setattr(compiled_module, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(attention_module, "_compiled_flex", attention_module.flex_attention)
    return compiled_module._compiled


@pytest.mark.parametrize(
    "name", ["eagle3", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("dflash", "peagle", "mtp", "medusa"))]
)
def test_a_compiled_step_is_the_plain_step(name, request):
    model, training = drafter(name, CPU)
    row = batch(model, CPU, "toy")
    arguments = training | ({} if name in HEADS else WAYS["flex"])
    with flex_trains(CPU):
        plain = step(model, row, arguments, None, CPU)
        made = request.getfixturevalue("compiles")
        compiled = step(model, row, arguments, None, CPU)
        graphs = counters["stats"]["unique_graphs"]
        step(copy.deepcopy(model), row, arguments, None, CPU)
    found = differences(compiled, plain)
    assert found["loss"] < 1e-6 and found["gradient"] < 1e-5
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs  # another model of the same shapes shares them
    names = {call.__name__ for call in made}
    assert names & {"_scores", "score_tokens"} and (name not in ("eagle3", "dflash", "peagle") or names >= PARTS)


# by day a gradient by formula, a target that is a token, and one that is cut; all are compiled below
TILES = [pytest.param(n, marks=() if n in ("kl_div", "ce", "topk_ce") else pytest.mark.nightly) for n in LOSSES]


def swapped(p, q):
    return 1 - overlap(q, p) + 0 * mass_below(q, p)


@pytest.mark.parametrize("loss", [*TILES, "swapped"])
def test_a_compiled_tile_is_one_graph(loss, compiles, monkeypatch):
    "Of every loss, also one of one's own that swaps its arguments; a second graph serves all other numbers of rows."
    monkeypatch.setitem(LOSSES, "swapped", RowLoss(swapped, LOSSES["tv"].grad))
    for rows in (6, 9, 5, 7):
        target, draft = torch.randn(2, rows, 40, generator=torch.Generator().manual_seed(rows))
        wanted = dict(mixture={loss: 1.0}, want_accept=True, want_tokens=True)
        by_hand = score_rows(Distribution(target), Distribution(draft), **wanted)
        compiled = score_logits(target, [draft, target], None, None, **wanted)
        for a, b in zip((compiled.losses[loss], *compiled[1:]), (by_hand.losses[loss], *by_hand[1:])):
            torch.testing.assert_close(a[:rows], b)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2


def test_a_compiled_tile_of_tokens(compiles):
    logits, tokens = torch.randn(6, 40).bfloat16(), torch.arange(6)
    losses, correct, grad = score_tokens(logits, tokens, True)
    assert torch.equal(correct, logits.argmax(-1) == tokens)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none"))
    assert grad.dtype == torch.bfloat16 and not counters["graph_break"] and len(compiles) == 1


def test_layers_are_plain_without_gradients(compiles):
    "Drafting calls them with a new length each time."
    model, _ = drafter("eagle3", CPU)
    with torch.no_grad():
        model.layers[0].finish(torch.randn(4, 3, model.layers[0].self_attn.d), torch.randn(3, model.fc.out_features))
    assert not compiles


def test_many_shapes_stay_compiled(compiles):
    "Beyond torch's limit of eight graphs a function would run uncompiled."
    for columns in range(4, 14):
        score_tokens(
            torch.randn(3, columns, dtype=(torch.float32, torch.bfloat16)[columns % 2]),
            torch.arange(3),
            columns % 3 > 0,
        )
    for i, loss in enumerate(LOSSES):
        term = torch.zeros(3, 8) if i % 2 else None
        wanted = dict(mixture={loss: 1.0}, want_accept=True, want_tokens=True)
        score_logits(torch.randn(3, 8), [torch.randn(3, 8)], None, term, **wanted)
    assert counters["stats"]["unique_graphs"] > len(LOSSES) > 8 and not counters["graph_break"]
    assert not [reason for reason in counters["unimplemented"] if "limit" in str(reason)]
    assert torch._dynamo.config.recompile_limit >= compiled_module.RECOMPILE_LIMIT


def test_a_machine_that_cannot_compile_is_told_so(compiles, monkeypatch):
    def without_triton(graph, inputs):
        raise RuntimeError("Cannot find a working triton installation.\nMore.")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=without_triton))
    with pytest.raises(RuntimeError, match="score_tokens cannot be compiled for cpu .*TORCH_COMPILE_DISABLE=1") as e:
        score_tokens(torch.randn(3, 8), torch.arange(3), True)
    assert "\n" not in str(e.value)


@compiled_module.compiled_in_training
def part(x, weight):
    return torch.relu(x @ weight.T)


class OnePart(torch.nn.Linear):
    def forward(self, x):
        return part(x, self.weight).sum()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo")
@torch._dynamo.config.patch(optimize_ddp=True)  # monkeypatch cannot put it back
def test_ddp_with_small_buckets(compiles, tmp_path):
    "torch would cut the graph of a part at DDP's buckets, and refuses where one is below 1 MB."
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model, x = torch.nn.parallel.DistributedDataParallel(OnePart(8, 4), bucket_cap_mb=0.5), torch.randn(3, 8)
        model(x).backward()
    finally:
        dist.destroy_process_group()
    inner = model.module
    expected = torch.autograd.grad(torch.relu(x @ inner.weight.T).sum(), inner.weight)[0]
    torch.testing.assert_close(inner.weight.grad, expected)
    assert len(compiles) == 1 and not counters["graph_break"]
