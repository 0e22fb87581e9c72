"""Losses: upstream's recorded values and gradients, closed forms against autograd, edges."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from speculators_nb.nn.losses import LOSSES, Distribution, overlap, parse_loss, row_loss, score_rows

RECORDED = load_file(Path(__file__).parent / "fixtures/losses/losses.safetensors")


def loss_and_grad(target, draft, mixture):
    scored = score_rows(target, draft, mixture)
    return scored.losses, scored.grad


@pytest.mark.parametrize("name", [name for name in LOSSES if f"{name}.loss" in RECORDED])
def test_upstream(name):
    "Value and gradient of each row, float32, to 1e-5 relative."
    target, draft = Distribution(RECORDED["targets"][0]), Distribution(RECORDED["logits"][0])
    terms, grad = loss_and_grad(target, draft, {name: 1.0})
    torch.testing.assert_close(terms[name], RECORDED[f"{name}.loss"][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        grad * RECORDED["grad_output"][0][:, None], RECORDED[f"{name}.grad_logits"][0], rtol=1e-4, atol=2e-6
    )


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 5.0]), vocab=st.integers(2, 40))
@settings(max_examples=25, deadline=None)
def test_gradient_is_autograds(name, seed, scale, vocab):
    "In float64, to 1e-10: nothing but rounding separates them."
    g = torch.Generator().manual_seed(seed)
    z, t = (scale * torch.randn(4, vocab, generator=g, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    value = row_loss(z, t, {name: 1.0})[name]
    (auto,) = torch.autograd.grad(value.sum(), z)
    terms, grad = loss_and_grad(Distribution(t), Distribution(z.detach()), {name: 1.0})
    assert torch.allclose(terms[name], value.detach(), rtol=0, atol=1e-10)
    assert torch.allclose(grad, auto, rtol=0, atol=1e-10)
    # a constant on all logits changes nothing
    assert torch.allclose(grad.sum(-1), torch.zeros(4, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_scored_in_float32(name):
    z, t = 3 * torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    low, full = (
        loss_and_grad(Distribution(t.to(d)), Distribution(z.to(d)), {name: 1.0}) for d in (z.dtype, torch.float32)
    )
    assert torch.equal(low[0][name], full[0][name]) and torch.equal(low[1].float(), full[1])


@given(st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_overlap_is_the_acceptance_rate(seed):
    "Between 0 and 1, symmetric, 1 for equal laws, and 1 - total variation."
    g = torch.Generator().manual_seed(seed)
    p, q = (Distribution(3 * torch.randn(5, 11, generator=g, dtype=torch.float64)) for _ in range(2))
    alpha = overlap(p, q)
    assert ((alpha >= 0) & (alpha <= 1)).all() and torch.equal(alpha, overlap(q, p))
    assert torch.allclose(alpha, 1 - (p.probs - q.probs).abs().sum(-1) / 2) and torch.allclose(
        overlap(p, p), torch.ones(5, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits_stay_finite(name):
    "Laws without any overlap, and probabilities that underflow to 0."
    target, draft = (
        Distribution(torch.tensor([[200.0, 0.0, 0.0, -200.0]])),
        Distribution(torch.tensor([[-200.0, 0.0, 200.0, 0.0]])),
    )
    terms, grad = loss_and_grad(target, draft, {name: 1.0})
    assert terms[name].isfinite().all() and grad.isfinite().all() and terms[name] > 0


def test_mixture_is_the_weighted_sum():
    g = torch.Generator().manual_seed(0)
    p, q = (Distribution(torch.randn(6, 9, generator=g)) for _ in range(2))
    parts = {name: loss_and_grad(p, q, {name: 1.0})[1] for name in ("kl_div", "tv")}
    torch.testing.assert_close(
        loss_and_grad(p, q, {"kl_div": 0.3, "tv": 2.0})[1], 0.3 * parts["kl_div"] + 2 * parts["tv"]
    )


def test_cross_entropies_by_hand():
    """soft_ce is KL plus the target's entropy; topk_ce sums its ten largest terms, and is soft_ce where there are no
    more tokens."""
    g = torch.Generator().manual_seed(1)
    t, z = (3 * torch.randn(6, 40, generator=g, dtype=torch.float64) for _ in range(2))
    p, logq = t.softmax(-1), z.log_softmax(-1)
    terms, _ = loss_and_grad(Distribution(t), Distribution(z), {"soft_ce": 1.0, "topk_ce": 1.0, "kl_div": 1.0})
    assert torch.allclose(terms["soft_ce"], terms["kl_div"] - (p * p.log()).sum(-1))
    for i in range(6):
        best = sorted(range(40), key=lambda v: -p[i, v])[:10]
        assert terms["topk_ce"][i].item() == pytest.approx(-sum((p[i, v] * logq[i, v]).item() for v in best), rel=1e-12)
    few = loss_and_grad(Distribution(t[:, :7]), Distribution(z[:, :7]), {"soft_ce": 1.0, "topk_ce": 1.0})[0]
    assert torch.allclose(few["soft_ce"], few["topk_ce"])


@pytest.mark.parametrize(
    "spec,message",
    [
        ("hinge", "unknown name 'hinge'"),
        ({"tv": "a"}, "weight of 'tv'"),
        ({}, "empty"),
        ('{"tv": true}', "weight of 'tv'"),
        ({"tv": float("inf")}, "weight of 'tv' is inf"),
        ('{"tv": }', r"loss: '\{\"tv\": \}' is no JSON .*write one as"),
        (["tv"], r"loss: \['tv'\] is no mixture; give a name or"),
    ],
)
def test_bad_specifications(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_loss(spec)
