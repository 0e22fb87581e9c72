"Forward passes and decoding make each tensor on the device of their inputs: shown on a CPU, by pretending."

import copy
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from on_device import PretendCuda, on_cuda

import speculators_nb.nn.attention as attention_module
from benchmarks.gpu.decode import prompts
from benchmarks.gpu.equal import DRAFTERS, HEAD_WAYS, HEADS, VERIFIER, WAYS, batch, drafter
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.decode.tree import Sampling
from speculators_nb.verifier.tapped_model import Verifier

CPU = torch.device("cpu")
CASES = [(name, way) for name in DRAFTERS for way in (HEAD_WAYS if name in HEADS else WAYS)]
every_case = pytest.mark.parametrize("name,way", CASES, ids=[f"{name}-{way}" for name, way in CASES])
every_drafter = pytest.mark.parametrize("name", DRAFTERS)


@lru_cache(None)
def case(name):
    "A drafter, a packed row and the training arguments."
    model, training = drafter(name, CPU)
    return model, batch(model, CPU, "toy"), training


def arguments(name, way):
    return case(name)[2] | (HEAD_WAYS if name in HEADS else WAYS)[way]


def by_definition(q, k, v, block_mask, scale, enable_gqa, return_aux):
    "Flex attention in tensor operations: there is no device to compile it for. Its mask is on the queries' device."
    zero = torch.zeros((), dtype=torch.long, device=q.device)
    rows, columns = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    allowed = block_mask.mask_mod(zero, zero, rows[:, None], columns)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None].clamp_min(-1e30)).exp() @ v, SimpleNamespace(lse=lse)


@every_case
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_forward_makes_every_tensor_on_its_device(name, way, training, monkeypatch):
    (model, row, _), options = case(name), arguments(name, way)
    monkeypatch.setattr(attention_module, "_flex_on", lambda device_type: by_definition)
    model = copy.deepcopy(model).train(training)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = model(**row, **options)[1]
    torch.manual_seed(3)
    with PretendCuda(), torch.no_grad():
        there = {k: v.to("cuda") for k, v in row.items()}
        _, loss, metrics = on_cuda(model)(**there, **options)
        devices = {str(x.device) for x in (loss, *metrics.values())}
    assert devices == {"cuda:0"}
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@every_drafter
def test_decoding_makes_every_tensor_on_its_device(name):
    "Greedily, by chains and by trees; and sampled, two requests at a time."
    model = copy.deepcopy(case(name)[0])
    proposer = model.drafter()
    verifier = Verifier.from_pretrained(str(VERIFIER), list(proposer.aux_layer_ids))
    asked = prompts(2)
    expected = generate(verifier, NoDrafter(), asked[0], k=0, max_new_tokens=6).tokens
    on_cuda(model), on_cuda(verifier.model)
    drafters = [proposer, *([TreeDrafter(proposer, [(0,), (1,), (0, 0)])] if proposer.grow else [])]
    with PretendCuda():
        assert verifier.device.type == "cuda"
        texts = [
            generate(verifier, d, torch.tensor(asked[0]).to("cuda"), k=2, max_new_tokens=6).tokens for d in drafters
        ]
        sampled = generate(verifier, proposer, asked, k=2, max_new_tokens=6, sampling=Sampling(temperature=0.8))
    assert texts == [expected] * len(drafters)
    assert [len(g.tokens) for g in sampled] == [6, 6]


class MakesOnTheCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.arange(len(x))

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.zeros(1)]),
        lambda x: x.add_(torch.ones(3)),
        lambda x: torch.ones(3)[x.long()],
        MakesOnTheCPU.apply,
        lambda x: torch.nn.Linear(3, 2)(x),
        lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
        lambda x: x.new_zeros(3) + torch.empty(3),
    ],
)
def test_what_cuda_refuses_is_found(wrong):
    with PretendCuda(), pytest.raises(AssertionError, match="CPU"):
        wrong(torch.zeros(3, device="cuda"))


@pytest.mark.parametrize(
    "right",
    [
        lambda x: x + torch.ones(()),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x + torch.ones(3).to(x.device),
        lambda x: x + torch.ones(3).to(x),
        lambda x: x + torch.ones_like(x),
        lambda x: torch.zeros(3, device="cpu").copy_(x).to("cuda") + x,
        lambda x: x.cpu().to("cuda") + x.new_ones(3),
        lambda x: x * torch.arange(3, device=x.device),
    ],
)
def test_what_cuda_does_is_let_through(right):
    with PretendCuda():
        assert right(torch.zeros(3, device="cuda")).is_cuda
