"Muon + AdamW behind one optimizer: who gets which parameter, the arithmetic, state, schedules, clipping, accelerate."

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from speculators_nb.train import optimizers as rows
from speculators_nb.train.optimizers import Muon, build_optimizer, parameter_groups, parameter_kinds


class Net(nn.Module):
    def __init__(self, hidden=8, vocab=20):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.fc = nn.Linear(hidden, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, 1)
        self.markov_w1 = nn.Linear(vocab, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.table = nn.Embedding(4, hidden)  # a table whose name says nothing
        self.frozen = nn.Linear(hidden, hidden).requires_grad_(False)

    def forward(self, ids):
        x = self.norm(self.fc(self.embed_tokens(ids) + self.table(ids % 4) + self.markov_w1.weight.T[ids]))
        return self.lm_head(self.frozen(x) * self.gate(x))


def step(net, opt, seed):
    ids = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(seed))
    torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    opt.zero_grad()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_every_parameter_has_one_kind(net):
    kinds = parameter_kinds(net)
    assert set(kinds) == {n for n, _ in net.named_parameters()}
    assert [n for n, k in kinds.items() if k == "hidden"] == ["fc.weight"]
    assert {n for n, k in kinds.items() if k == "lookup"} == {
        "embed_tokens.weight",
        "markov_w1.weight",
        "lm_head.weight",
        "table.weight",
    }
    assert {n for n, k in kinds.items() if k == "frozen"} == {"frozen.weight", "frozen.bias"}


def test_tied_weights_are_listed_and_stepped_once(net):
    net.lm_head.weight = net.embed_tokens.weight
    assert "lm_head.weight" not in parameter_kinds(net)
    assert sum(len(g["params"]) for g in build_optimizer(net, "muon").param_groups) == sum(
        p.requires_grad for p in net.parameters()
    )


def test_table_says_what_the_optimizer_does(net):
    table = parameter_groups(net, "muon")
    decay = {
        id(p): (g["kind"], g["weight_decay"] > 0)
        for g in build_optimizer(net, "muon").param_groups
        for p in g["params"]
    }
    for name, p in net.named_parameters():
        row = table.loc[name]
        assert (row["optimizer"], bool(row["decay"])) == decay.get(id(p), ("-", False)), name
        assert row["size"] == p.numel()
    assert set(parameter_groups(net, "adamw")["optimizer"]) == {"adamw", "-"}


class Products(TorchDispatchMode):
    "Notes in which number formats matrices are multiplied."

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("native", [False, True])
def test_muon_multiplies_in_bfloat16_only_where_the_cpu_can(net, native, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native}, raising=False)
    opt = build_optimizer(net, "muon")
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with Products() as products:
        opt.step()
    assert products.dtypes == {torch.bfloat16 if native else torch.float32}


def test_muon_in_float32_moves_a_matrix_as_torchs_does():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(24, 40)) for _ in range(2)]
    ours, theirs = Muon(weights[:1], 1e-2), torch.optim.Muon(weights[1:], 1e-2, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        weights[0].grad = weights[1].grad = torch.randn(24, 40)
        ours.step()
        theirs.step()
    assert (weights[0] - weights[1]).norm() < 0.02 * weights[1].norm()


def test_same_arithmetic_as_torchs_two_optimizers(net, monkeypatch):
    monkeypatch.setattr(rows, "product_dtype", lambda device: torch.bfloat16)
    twin = copy.deepcopy(net)
    both = build_optimizer(net, "muon", lr=1e-2, muon_lr=3e-2, weight_decay=0.1)
    kinds, named = parameter_kinds(twin), dict(twin.named_parameters())

    def of(kind):
        return [named[n] for n, k in kinds.items() if k == kind]

    muon = torch.optim.Muon(of("hidden"), 3e-2, 0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": of("vector"), "weight_decay": 0.0}, {"params": of("lookup")}], 1e-2, weight_decay=0.1, fused=True
    )

    class Two:
        def step(self):
            muon.step()
            adamw.step()

        def zero_grad(self):
            muon.zero_grad()
            adamw.zero_grad()

    for i in range(4):
        step(net, both, i)
        step(twin, Two(), i)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_survives_a_round_trip_to_the_bit(net, name, tmp_path):
    opt = build_optimizer(net, name, lr=1e-2)
    schedule = LambdaLR(opt, lambda i: 0.9**i)
    for i in range(3):
        step(net, opt, i)
        schedule.step()
    torch.save([opt.state_dict(), schedule.state_dict()], tmp_path / "state.pt")
    twin = copy.deepcopy(net)
    opt2 = build_optimizer(twin, name, lr=1e-2)
    schedule2 = LambdaLR(opt2, lambda i: 0.9**i)
    for part, state in zip([opt2, schedule2], torch.load(tmp_path / "state.pt", weights_only=True)):
        part.load_state_dict(state)
    for i in range(3, 6):
        step(net, opt, i)
        step(twin, opt2, i)
        schedule.step()
        schedule2.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters()))
    assert [g["lr"] for g in opt.param_groups] == [g["lr"] for g in opt2.param_groups]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_copy_goes_on_to_the_bit(net, name, copied):
    opt = build_optimizer(net, name, lr=1e-2, row_updates=True, row_gradients=True)
    step(net, opt, 0)
    twin, opt2 = copied((net, opt))
    for i in range(1, 3):
        step(net, opt, i)
        step(twin, opt2, i)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters()))


def test_a_parameter_without_gradient_stays(net):
    opt, before = build_optimizer(net, "muon", lr=1.0, weight_decay=0.5), copy.deepcopy(net)
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before.parameters()))
    assert not opt.state


def test_closure_and_clipping(net):
    opt = build_optimizer(net, "muon")
    ids = torch.arange(6)[None]

    def closure():
        opt.zero_grad()
        loss = net(ids).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        return loss

    first = opt.step(closure)
    assert first.requires_grad and opt.step(closure) < first


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_accelerate_prepares_it(net, name):
    from accelerate import Accelerator

    twin = copy.deepcopy(net)
    plain, accelerator = build_optimizer(twin, name, lr=1e-2), Accelerator(cpu=True)
    prepared, opt = accelerator.prepare(net, build_optimizer(net, name, lr=1e-2))
    for i in range(3):
        step(prepared, opt, i)
        step(twin, plain, i)
    assert all(torch.equal(p, q) for p, q in zip(prepared.parameters(), twin.parameters()))


def test_errors_name_the_remedy(net):
    with pytest.raises(ValueError, match="optimizer='sgd'.*adamw, muon"):
        build_optimizer(net, "sgd")
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(net.requires_grad_(False))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_tables_by_rows_are_the_same_arithmetic(net, optimizer, monkeypatch):
    """Row gradients, a few table rows at a time, clipped and accumulated over two batches: the weights of ordinary
    AdamW after eight steps, to float32 rounding."""
    monkeypatch.setattr(rows, "SLICE_BYTES", 3 * 8 * 4)
    twin, nets = copy.deepcopy(net), []
    for model, by_rows in ((net, False), (twin, True)):
        opt = build_optimizer(model, optimizer, lr=1e-2, weight_decay=0.1, row_gradients=by_rows)
        norms = []
        for i in range(8):
            for j in range(2):
                # rows 19 on: only at the end
                ids = torch.randint(0, 12 + i, (2, 3), generator=torch.Generator().manual_seed(10 * i + j))
                torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            assert model.embed_tokens.weight.grad.is_sparse == by_rows
            norms.append(rows.clip_gradients(model.parameters(), 0.5).item())
            opt.step()
            opt.zero_grad()
        nets.append((dict(model.named_parameters()), norms))
    (a, norms_a), (b, norms_b) = nets
    assert norms_a == pytest.approx(norms_b, rel=1e-5) and max(norms_a) > 0.5
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


def test_clipping_is_torchs_and_infinity_only_measures(net):
    twin = copy.deepcopy(net)
    for model in (net, twin):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    assert torch.equal(rows.clip_gradients(net.parameters(), 0.5), norm) and norm > 0.5
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters()))
    net.embed_tokens.weight.grad[0, 0] = float("inf")
    assert rows.clip_gradients(net.parameters(), float("inf")).isinf() and rows.clip_gradients([], 0.5) == 0
    assert all(torch.equal(p.grad, q.grad) for p, q in list(zip(net.parameters(), twin.parameters()))[1:])


def test_row_state_travels_through_a_checkpoint(net, tmp_path):
    opt = build_optimizer(net, "muon", row_gradients=True)
    step(net, opt, 0)
    torch.save(opt.state_dict(), tmp_path / "o.pt")
    twin = copy.deepcopy(net)
    again = build_optimizer(twin, "muon", row_gradients=True)
    again.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    for model, o in ((net, opt), (twin, again)):
        step(model, o, 1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters()))


def test_a_tied_table_has_an_ordinary_gradient(net):
    "Read by rows below and used whole above: the sum is dense, and the optimizer takes it."
    net.lm_head.weight = net.embed_tokens.weight
    opt = build_optimizer(net, "adamw", row_gradients=True)
    before = net.embed_tokens.weight.detach().clone()
    step(net, opt, 0)
    assert not torch.equal(before, net.embed_tokens.weight)
