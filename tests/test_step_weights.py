"Step weights: the formulas, an independent implementation's values, and D-PACE against autograd."

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from speculators_nb.nn.supervision import block_decay, dpace, exponential, normalised_steps

FIXTURE = Path(__file__).parent / "fixtures/losses/decays.safetensors"
blocks = st.tuples(st.integers(1, 3), st.integers(1, 10), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
quick = settings(max_examples=60, deadline=None)


def sample(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, width, generator=generator) * 4, torch.rand(rows, width, generator=generator) > 0.3


def test_fixture():
    "float32 values from the library speculators 0.9.0; both sides round a handful of float32 operations, hence 1e-6."
    ref = load_file(FIXTURE)
    k = ref["pos_idx"]
    close = dict(atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(exponential(0.8, k), ref["exp_gamma0.8"], **close)
    torch.testing.assert_close(block_decay(k), ref["dflash_gamma4"], **close)
    torch.testing.assert_close(
        block_decay(k, sample_from_anchor=True), ref["dflash_gamma4_sample_from_anchor"], **close
    )
    torch.testing.assert_close(
        dpace(ref["elementwise_loss"].view(3, 8), ref["loss_mask"].view(3, 8)).view(1, 24),
        ref["dpace_block8_alpha0.5"],
        **close,
    )


@quick
@given(st.integers(1, 20), st.floats(0.05, 1.0))
def test_normalised_steps(steps, beta):
    w = normalised_steps(steps, beta)
    assert abs(float(w.sum()) - 1) < 1e-5 and bool((w[1:] <= w[:-1] + 1e-7).all())
    torch.testing.assert_close(w[1:] / w[:-1], torch.full((steps - 1,), beta), atol=1e-4, rtol=1e-4)


@quick
@given(blocks)
def test_dpace_by_definition(case):
    rows, width, seed, alpha = case
    loss, mask = sample(rows, width, seed)
    expected = torch.zeros(rows, width, dtype=torch.float64)
    for r in range(rows):
        s = [(1 - alpha) * float(torch.exp(-loss[r, k].double())) + alpha if mask[r, k] else 1.0 for k in range(width)]
        for k in range(width):
            for j in range(k, width):
                product = 1.0
                for i in range(j + 1):
                    product *= s[i]
                expected[r, k] += product * bool(mask[r, k]) * bool(mask[r, j])
    torch.testing.assert_close(dpace(loss, mask, alpha).double(), expected, atol=1e-5, rtol=1e-5)


@quick
@given(blocks)
def test_dpace_is_the_gradient_of_the_expected_length(case):
    rows, width, seed, alpha = case
    loss, mask = sample(rows, width, seed)
    log_s = torch.log((1 - alpha) * torch.exp(-loss) + alpha).requires_grad_()
    (mask * torch.where(mask, log_s.exp(), 1.0).cumprod(-1)).sum().backward()
    torch.testing.assert_close(dpace(loss, mask, alpha), log_s.grad, atol=1e-5, rtol=1e-5)


def test_dpace_ignores_what_masked_slots_hold_and_carries_no_gradient():
    loss, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 1])
    for junk in (0.0, 50.0, float("inf"), float("nan")):
        assert torch.equal(dpace(torch.tensor([1.0, junk, 3.0]), mask), dpace(loss, mask))
    assert not dpace(loss.requires_grad_(), mask).requires_grad


def test_variants_of_the_block_decay():
    k = torch.arange(6)
    assert block_decay(k)[0] == 0 and block_decay(k)[1] == 1
    torch.testing.assert_close(block_decay(k, 7.0)[1:], block_decay(k, 7.0, sample_from_anchor=True)[:-1])
    assert torch.equal(exponential(1.0, k), torch.ones(6)) and float(exponential(0.5, 3)) == 0.125


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: exponential(0.0, 1), "gamma=0.0"),
        (lambda: block_decay(1, -1.0), "gamma=-1.0"),
        (lambda: normalised_steps(0), "steps=0"),
        (lambda: normalised_steps(3, 0.0), "beta=0.0"),
        (lambda: dpace(torch.ones(2), torch.ones(2), 1.1), "alpha=1.1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
