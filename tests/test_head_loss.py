"""Chunked head and loss against whole tensors and autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.nn.losses import LOSSES, Distribution, TargetHead, dense_head_loss, head_loss, target_slots
from speculators_nb.nn.supervision import loss_weight
from speculators_nb.nn.token_loss import dense_token_loss, token_loss


def case(seed, n=23, targets=9, vocab=40, hidden=12, softcap=None, shared=True):
    g = torch.Generator().manual_seed(seed)
    head = torch.nn.Parameter(torch.randn(vocab, hidden, generator=g), requires_grad=False)
    target = TargetHead(hidden, softcap=softcap)
    target.norm.weight.data = torch.rand(hidden, generator=g) + 0.5
    target.set_rows(head if shared else torch.randn(vocab, hidden, generator=g))
    return dict(
        hidden=torch.randn(n, hidden, generator=g, requires_grad=True),
        head=head,
        target_head=target,
        target_hidden=3 * torch.randn(targets, hidden, generator=g),
        target_of_row=torch.randint(targets, (n,), generator=g),
        weight=torch.rand(n, generator=g),
    )


@pytest.mark.parametrize(
    "mixture",
    [{name: 1.0} for name in LOSSES] + [{"ce": 0.1, "tv": 0.9}, {"kl_div": 0.5, "rkl": 2.0, "jsd": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_equals_whole_tensors(mixture, chunk):
    "Float32 closed forms against float32 autograd: 1e-5 of the gradient's norm."
    for seed, options in enumerate([{}, dict(softcap=2.0), dict(shared=False)]):
        c = case(seed, **options)
        want = dense_head_loss(**c, mixture=mixture)
        got = head_loss(**c, mixture=mixture, chunk=chunk, want_accept=True)
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
        a, b = (torch.autograd.grad(3 * out.loss, c["hidden"])[0] for out in (want, got))
        assert (a - b).norm() <= 1e-5 * a.norm()
        for name in mixture:
            torch.testing.assert_close(got.rows[name], want.rows[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(got.correct, want.correct)
        torch.testing.assert_close(got.accept, want.accept, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_given_labels_and_likeliest_tokens(chunk):
    "`labels` are the right tokens of ce alone; `tokens` are those of the whole logits."
    for mixture in ({"ce": 1.0}, {"ce": 0.3, "tv": 0.7}):
        c, labels = case(5), torch.arange(9) % 40
        e, w = torch.randn(23, 3), torch.randn(40, 3)
        got = head_loss(**c, mixture=mixture, bias=(e, w), labels=labels, want_tokens=True, chunk=chunk)
        want = dense_head_loss(**c, mixture=mixture, bias=(e, w), labels=labels)
        logits = c["hidden"] @ c["head"].T + e @ w.T
        ce = torch.nn.functional.cross_entropy(logits, labels[c["target_of_row"]], reduction="none")
        torch.testing.assert_close(got.rows["ce"], ce, rtol=1e-5, atol=1e-5)
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
        a, b = (torch.autograd.grad(out.loss, c["hidden"])[0] for out in (want, got))
        assert (a - b).norm() <= 1e-5 * a.norm()
        assert torch.equal(got.tokens, logits.argmax(-1)) and torch.equal(want.tokens, got.tokens)
        assert torch.equal(got.correct, want.correct)
    assert head_loss(**c, mixture=mixture).tokens is None


@given(st.lists(st.integers(0, 6), max_size=30))
@settings(max_examples=100, deadline=None)
def test_slots_hold_every_row_once(targets):
    order, slots = target_slots(torch.tensor(targets, dtype=torch.long), 7)
    assert sorted(r for s in slots for r in s.tolist()) == list(range(len(targets)))
    for slot in slots:
        assert [targets[r] for r in slot.tolist()] == order[: len(slot)].tolist()


def test_no_rows():
    c = case(0, n=0)
    out = head_loss(**c, mixture={"kl_div": 1.0})
    out.loss.backward()
    assert out.loss == 0 and c["hidden"].grad.shape == (0, 12)


def test_low_precision_products_stay_close():
    "bfloat16 products round to 2^-8: loss within 1 %, gradient direction kept to 0.1 % of its square."
    c = case(1, n=200, targets=80, vocab=400, hidden=32)
    full = head_loss(**c, mixture={"kl_div": 1.0})
    low = head_loss(**c, mixture={"kl_div": 1.0}, gemm_dtype=torch.bfloat16)
    assert low.loss.item() == pytest.approx(full.loss.item(), rel=1e-2)
    a, b = (torch.autograd.grad(out.loss, c["hidden"])[0].flatten() for out in (full, low))
    assert torch.cosine_similarity(a, b, dim=0) > 0.999


@pytest.mark.parametrize("vocab", [17, 64, 100, 130, 193])
def test_the_likeliest_token_is_that_of_argmax(vocab):
    "Also of equal logits, of NaN and of infinite ones, in the first block of a row and behind the last whole one."
    logits = torch.randint(-2, 3, (200, vocab), generator=torch.Generator().manual_seed(0)).float()
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row, vocab - 2], logits[3 + row, 1], logits[6 + row] = value, value, value
    logits[9, [1, vocab - 1]] = torch.inf
    assert torch.equal(Distribution(logits).argmax, logits.argmax(-1))


def equal_logits(vocab, n=60, hidden=12):
    "States and a head of small whole numbers: several tokens of most rows have the largest logit, exactly."
    g = torch.Generator().manual_seed(0)
    head, states = (torch.randint(-1, 2, (size, hidden), generator=g).float() for size in (vocab, n))
    tied = ((states @ head.T) == (states @ head.T).amax(-1, keepdim=True)).sum(-1) > 1
    assert tied.float().mean() > 0.3
    return states.requires_grad_(), torch.nn.Parameter(head, requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("chunk,vocab", [(7, 40), (100, 40), (100, 128), (100, 150)])
def test_of_equal_logits_the_first_is_drafted(chunk, vocab, dtype):
    """Of logits that were rounded several are often equal. A token that shares the largest one and is not drafted is
    not right."""
    states, head = equal_logits(vocab)
    target = TargetHead(12)
    target.norm.weight.data.fill_(1.0)
    target.set_rows(head)
    hidden = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))
    c = dict(
        hidden=states,
        head=head,
        target_head=target,
        target_hidden=hidden,
        target_of_row=torch.arange(60) % 20,
        weight=torch.ones(60),
    )
    drafted, right = (states @ head.T).argmax(-1), target(hidden).argmax(-1)[c["target_of_row"]]
    for wanted in (False, True):
        out = head_loss(**c, mixture={"ce": 1.0}, gemm_dtype=dtype, chunk=chunk, want_tokens=wanted)
        assert torch.equal(out.correct, drafted == right)
        assert torch.equal(out.tokens, drafted) if wanted else out.tokens is None
    of_tokens = token_loss(states, head, right, torch.ones(60), gemm_dtype=dtype, chunk=chunk)
    assert torch.equal(of_tokens.correct, drafted == right)
    assert (states @ head.T).gather(1, right[:, None])[:, 0].ge((states @ head.T).amax(-1)).sum() > (
        drafted == right
    ).sum()


def confident_count_more(n):
    "Weights of n rows that depend on their losses."
    row = torch.arange(n)
    by = loss_weight(lambda drafted: torch.exp(-drafted.losses["ce"]))
    return by.of_rows(run=row, step=0 * row, runs=n, steps=1)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("by_loss", [False, True])
def test_low_rank_term_and_weights_from_losses(chunk, by_loss):
    "Gradients in the hidden rows and in both factors; weights given, or a function of the row losses."
    c, g = case(3, n=31), torch.Generator().manual_seed(4)
    bias = [torch.randn(31, 5, generator=g, requires_grad=True), torch.randn(40, 5, generator=g, requires_grad=True)]
    if by_loss:
        c["weight"] = confident_count_more(31)
    for extra in (None, bias):
        leaves = [c["hidden"], *(extra or [])]
        want, got = (
            f(**c, mixture={"ce": 0.3, "kl_div": 1.0}, bias=extra, **o)
            for f, o in ((dense_head_loss, {}), (head_loss, dict(chunk=chunk)))
        )
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
        for a, b in zip(*(torch.autograd.grad(2 * out.loss, leaves) for out in (want, got))):
            assert (a - b).norm() <= 1e-5 * a.norm()


@pytest.mark.parametrize("chunk,tile", [(1, 1), (5, 2), (100, 3), (100, 100)])
@pytest.mark.parametrize("by_loss", [False, True])
def test_low_rank_term_of_targets(chunk, tile, by_loss, monkeypatch):
    """One row of the low-rank term for each target: what rows that share it give it back is added up; targets that
    nothing asks for get no gradient."""
    monkeypatch.setattr("speculators_nb.nn.losses.TILE_BYTES", 4 * 40 * tile)
    c, g = case(3, n=31), torch.Generator().manual_seed(4)
    bias = [
        torch.randn(len(c["target_hidden"]), 5, generator=g, requires_grad=True),
        torch.randn(40, 5, generator=g, requires_grad=True),
    ]
    if by_loss:
        c["weight"] = confident_count_more(31)
    want, got = (
        f(**c, mixture={"ce": 0.3, "kl_div": 1.0}, bias=bias, bias_by_target=True, **o)
        for f, o in ((dense_head_loss, {}), (head_loss, dict(chunk=chunk)))
    )
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5) and torch.equal(got.correct, want.correct)
    for a, b in zip(*(torch.autograd.grad(2 * out.loss, [c["hidden"], *bias]) for out in (want, got))):
        assert (a - b).norm() <= 1e-5 * a.norm()


@pytest.mark.parametrize("n,chunk", [(0, 5), (1, 1), (23, 7), (23, 64)])
@pytest.mark.parametrize("trained_head", [False, True])
def test_token_loss_equals_whole_tensors(n, chunk, trained_head):
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 12, generator=g, requires_grad=True)
    head = torch.randn(40, 12, generator=g).requires_grad_(trained_head)
    tokens, weight = torch.randint(40, (n,), generator=g), torch.rand(n, generator=g)
    want, got = dense_token_loss(hidden, head, tokens, weight), token_loss(hidden, head, tokens, weight, chunk=chunk)
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
    torch.testing.assert_close(got.rows["ce"], want.rows["ce"], rtol=1e-5, atol=1e-5)
    assert torch.equal(got.correct, want.correct)
    leaves = [hidden, head] if trained_head else [hidden]
    for a, b in zip(*(torch.autograd.grad(3 * out.loss, leaves) for out in (want, got))):
        assert (a - b).norm() <= 1e-5 * a.norm()


def test_tiles_do_not_change_token_loss(monkeypatch):
    g = torch.Generator().manual_seed(9)
    case = (
        torch.randn(23, 12, generator=g),
        torch.randn(40, 12, generator=g),
        torch.randint(40, (23,), generator=g),
        torch.rand(23, generator=g),
    )
    whole = token_loss(*case, chunk=10)
    monkeypatch.setattr("speculators_nb.nn.losses.TILE_BYTES", 4 * 40 * 3)  # three rows at a time
    assert torch.equal(token_loss(*case, chunk=10).rows["ce"], whole.rows["ce"])


def test_nothing_vocabulary_sized_is_saved():
    "What autograd keeps between forward and backward is hidden-sized."
    c, kept = case(2, vocab=5000), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        head_loss(**c, mixture={"jsd": 1.0}, chunk=4)
    assert max(kept) <= c["hidden"].numel()
