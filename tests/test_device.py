"Forward passes and decoding make each tensor on the device of their inputs: shown on a CPU, by pretending."

import copy
import os
from functools import lru_cache
from types import SimpleNamespace

import forked
import pytest
import torch
from on_device import PretendCuda, marked, on_cuda
from torch.utils._python_dispatch import TorchDispatchMode

import speculators_nb.nn.attention as attention_module
import speculators_nb.nn.compiled as compiled_module
from benchmarks.gpu.decode import prompts
from benchmarks.gpu.equal import DRAFTERS, HEAD_WAYS, HEADS, VERIFIER, WAYS, batch, drafter
from speculators_nb.core.registry import DynamicTreeTokenProposalConfig
from speculators_nb.decode.acceptance_rules import RULES, lenient, synthetic, tolerant
from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.tree import Sampling, TokenTree, likeliest
from speculators_nb.verifier.tapped_model import Verifier

CPU = torch.device("cpu")
TRAINED = ("flex", "lean")  # how a drafter is trained on CUDA: with attention, and without
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


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    "What is compiled hides its operations, and takes half a minute."
    monkeypatch.setattr(compiled_module, "COMPILED_ON", ())


@pytest.fixture
def no_kernel(monkeypatch):
    "Flex attention by definition; of a BlockMask, made under vmap, the predicate alone."

    def lists(*blocks, mask_mod, **options):
        assert all(x.device.type == "cuda" for x in blocks) or not any(map(marked, blocks))
        return SimpleNamespace(mask_mod=mask_mod)

    monkeypatch.setattr(attention_module, "_compiled_flex", by_definition)
    monkeypatch.setattr(attention_module.BlockMask, "from_kv_blocks", lists)


@every_case
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_forward_makes_every_tensor_on_its_device(name, way, training, no_kernel):
    (model, row, _), options = case(name), arguments(name, way)
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


NEW = 3  # tokens that are decoded


@lru_cache(None)
def decoding(name):
    "A drafter and its verifier, on the device; and what the verifier writes behind the second prompt."
    model = copy.deepcopy(case(name)[0])
    proposer = model.drafter()
    verifier = Verifier.from_pretrained(str(VERIFIER), list(proposer.aux_layer_ids))
    alone = generate(verifier, NoDrafter(), prompts(2)[1], k=0, max_new_tokens=NEW).tokens
    on_cuda(model), on_cuda(verifier.model)
    return proposer, verifier, alone


def wait_once(verifier, drafter, prompt, **options):
    "Decode; the prompt is copied to the host and to the device, and each forward pass is looked at once."
    with PretendCuda() as device:
        assert verifier.device.type == "cuda"
        ids = torch.tensor(prompt).to("cuda") if isinstance(prompt[0], int) else prompt
        device.copies.clear()
        done = generate(verifier, drafter, ids, max_new_tokens=NEW, **options)
    batch = done if isinstance(done, list) else [done]
    passes = 1 + max(len(g.steps) for g in batch)
    looks = [wait for wait in device.waits if "to the CPU" not in wait]
    assert len(looks) == passes and len(device.waits) <= passes + 1, device.waits
    assert len(device.copies) <= len(batch), device.copies
    return batch


GROWN = ([(0,), (1,), (0, 0)], DynamicTreeTokenProposalConfig(speculative_tokens=5, expansion_factor=2, depth=2))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_of_one_shape_waits_once(temperature):
    "With a static KV cache, whatever is moved in it."
    drafter, verifier, alone = decoding("eagle3")
    texts = []
    for d in (drafter, *(TreeDrafter(drafter, method) for method in GROWN)):
        options = dict(k=2, sampling=Sampling(temperature), kv_cache="static")
        texts += wait_once(verifier, d, prompts(2)[1], **options)
        texts += wait_once(verifier, d, prompts(2), **options)[1:]
    assert temperature or all(g.tokens == alone for g in texts)


@every_drafter
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decoding_step_waits_for_the_device_once(name, temperature):
    """Every tensor is made on the device. Chains, trees of a given shape and trees that grow; greedily one request, and
    sampled two, which accept different numbers of tokens."""
    drafter, verifier, alone = decoding(name)
    for d in (drafter, *(TreeDrafter(drafter, method) for method in GROWN)):
        asked = prompts(2) if temperature else prompts(2)[1]
        found = wait_once(verifier, d, asked, k=2, sampling=Sampling(temperature))
        assert {len(g.tokens) for g in found} == {NEW} and (temperature or found[0].tokens == alone)
    if not temperature:
        assert wait_once(verifier, drafter, prompts(2), k=2, sampling=Sampling(0.0))[1].tokens == alone


@pytest.mark.parametrize(
    "rule",
    [*RULES, lenient(0.5), tolerant(2, 0.1), synthetic([0.7, 0.3])],
    ids=lambda r: r if isinstance(r, str) else r.about,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_rule_waits_once(rule, temperature):
    drafter, verifier, _ = decoding("eagle3")
    branches = [TreeDrafter(drafter, GROWN[0])] * (rule not in ("block", "fly"))
    for d in (drafter, *branches):
        wait_once(verifier, d, prompts(1)[0], k=3, rule=rule, sampling=Sampling(temperature))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_proposers_without_training_wait_once(temperature):
    _, verifier, _ = decoding("eagle3")
    model = copy.deepcopy(verifier.model)
    on_cuda(model)
    draft_model = DraftModel(model, verifier)
    for d in (NgramDrafter(), SuffixDrafter(), draft_model, *(TreeDrafter(draft_model, m) for m in GROWN)):
        wait_once(verifier, d, prompts(1)[0], k=3, sampling=Sampling(temperature))


def test_what_is_wrong_is_refused_at_the_end_of_the_step():
    "Without waiting for it: tokens outside of the vocabulary, and logits that are no numbers."
    _, verifier, _ = decoding("eagle3")

    class Wrong(NoDrafter):
        def propose(self, tokens, features, k, sampling):
            return TokenTree.chain(torch.full((2,), 5000, device=tokens.device))

    class NotANumber(NoDrafter):
        def propose(self, tokens, features, k, sampling):
            return TokenTree.chain(likeliest(torch.full((1, 9), torch.nan, device=tokens.device)))

    for wrong, message in ((Wrong(), r"tokens\[0\]=5000 is outside"), (NotANumber(), "NotANumber: the logits .* NaN")):
        with PretendCuda(), pytest.raises(ValueError, match=message):
            generate(verifier, wrong, prompts(1)[0], k=2)


def test_a_forked_process_sees_no_device(monkeypatch):
    "Nor does one that it starts, where its parent has some."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = forked.ask(
        lambda: (torch.cuda.is_available(), torch.cuda.device_count(), os.environ["CUDA_VISIBLE_DEVICES"])
    )
    assert asked() == (False, 0, "") and torch.cuda.is_available()


class Waits(TorchDispatchMode):
    """Counts operators that need a value of a tensor, or a size that depends on one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2")
        return func(*args, **(kwargs or {}))


@every_drafter
def test_a_training_step_waits_for_the_device_three_times_at_most(name, no_kernel):
    "Which rows carry loss is fetched in one copy; what follows from it is found on the host."
    model, row, options = copy.deepcopy(case(name)[0]), case(name)[1], arguments(name, TRAINED[name in HEADS])
    model.train()
    with PretendCuda() as device:
        there = {k: v.to("cuda") for k, v in row.items()}
        device.copies.clear()
        loss = on_cuda(model)(**there, **options)[1]
    assert len(device.waits) <= 3, device.waits
    assert not device.copies, device.copies
    with Waits() as backward:
        loss.backward()
    assert backward.count == 0


@every_drafter
def test_a_training_step_does_not_wait_where_its_masks_are_on_the_host(name, no_kernel):
    "As a trainer hands them over: what decides shapes is read where it is."
    model, row, options = copy.deepcopy(case(name)[0]), case(name)[1], arguments(name, TRAINED[name in HEADS])
    model.train()
    assert {"document_ids", "loss_mask"} == {*model.read_on_host}
    losses = []
    for stays in ((), model.read_on_host):
        torch.manual_seed(3)
        with PretendCuda() as device, torch.no_grad():
            there = {k: v if k in stays else v.to("cuda") for k, v in row.items()}
            device.copies.clear()
            losses.append(on_cuda(model)(**there, **options)[1])
    assert not device.waits and not device.copies, (device.waits, device.copies)
    assert losses[0] == losses[1] and marked(losses[1])


@pytest.mark.parametrize("wait", [
    lambda x: float(x[0]), lambda x: bool(x.any()), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.tolist(),
    lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: torch.equal(x, x), lambda x: x.long().bincount(),
    lambda x: torch.arange(3, device="cuda")[x.long()[0]] and None, lambda x: x.repeat_interleave(x.long()),
])  # fmt: skip
def test_a_wait_is_found(wait):
    with PretendCuda() as device:
        x = torch.ones(3, device="cuda")
        assert not device.waits
        wait(x)
    assert device.waits


@pytest.mark.parametrize("copy", [
    lambda x, host: x[host], lambda x, host: x[[0, 2]], lambda x, host: x.__setitem__(x.long(), 1.0),
    lambda x, host: x.__setitem__(slice(0, 2), host.float()), lambda x, host: x[:2].copy_(host),
    lambda x, host: x.__setitem__(x.long(), torch.tensor(1.0)), lambda x, host: host.to("cuda"),
    lambda x, host: torch.tensor([1, 2], device="cuda"),
])  # fmt: skip
def test_a_copy_to_the_device_is_found(copy):
    with PretendCuda() as device:
        x, host = torch.ones(3, device="cuda"), torch.tensor([0, 2])
        assert not device.copies
        copy(x, host)
    assert len(device.copies) == 1


def test_what_does_not_wait():
    with PretendCuda() as device:
        x, host = torch.ones(3, device="cuda"), torch.tensor([0, 2])
        there = host.to("cuda", non_blocking=True)
        x[there].sum(), host.tolist(), x.masked_fill(x > 0, 0.0), x.repeat_interleave(2)
        x[0], x[1:], x[:2], x[there] = 5, 1.0, x[1:].clone(), x[1:].clone()
        x[:2].copy_(host, non_blocking=True)
    assert not device.waits and not device.copies


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
