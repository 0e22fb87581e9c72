"""Expected speed-up: against the formula written out; the simulator through the real decoder; the measurements on a
tiny verifier."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_verifier import small_verifier

from speculators_nb.decode.acceptance_rules import synthetic
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.tree import TokenTree
from speculators_nb.evaluate import cost
from speculators_nb.evaluate.acceptance import acceptance_summary, expected_length
from speculators_nb.evaluate.speedup import (
    batch_verify,
    best_gamma,
    draft_schedule,
    lengths,
    measured_speedup,
    speedups,
    step_costs,
    verify_costs,
)
from speculators_nb.serve.speculative_config import SpeculativeConfig


@pytest.fixture(scope="module")
def verifier():
    return small_verifier()


class Anything(NoDrafter):
    def propose(self, tokens, features, k, sampling):
        return TokenTree.chain([5] * k)


@pytest.mark.parametrize("alpha, gamma, speedup", [(0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)])
def test_best_gamma_at_a_twentieth(alpha, gamma, speedup):
    curve = speedups([expected_length(alpha, n) for n in range(40)], 0.05)
    assert best_gamma(curve) == gamma and curve[gamma] == pytest.approx(speedup, abs=0.005)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 10), st.booleans())
def test_the_formula_with_fractions(tenths, c, v, parallel):
    alpha, cost_, n = Fraction(tenths, 10), Fraction(c, 20), 6
    E = [sum(alpha**i for i in range(g + 1)) for g in range(n + 1)]
    verify = [1 + Fraction(v * g, 20) for g in range(n + 1)]
    exact = [e / ((cost_ if parallel else g * cost_) * (g > 0) + verify[g]) for g, e in enumerate(E)]
    ours = speedups(
        lengths([float(alpha) ** i for i in range(1, n + 1)]), float(cost_), [float(x) for x in verify], parallel
    )
    assert ours == pytest.approx([float(x) for x in exact], rel=1e-12)
    assert ours[0] == 1
    if not parallel and not v:
        assert (max(exact) > 1) == (alpha > cost_)  # improves if and only if a guess is kept more often than it costs


def test_equal_speeds_take_the_fewest_guesses():
    assert best_gamma([1.0, 1.5, 1.5, 1.2]) == 1 and best_gamma([1.0, 0.9]) == 0


def test_too_few_verifier_costs():
    with pytest.raises(ValueError, match="2 costs for 3 lengths.*1 … 3 tokens"):
        speedups([1, 1.5, 1.8], 0.1, [1, 1])


def test_a_step_without_a_draft_reads_one_token():
    "By hand: of four steps two propose two tokens, one proposes one."
    costs = step_costs(2, 0.1, [1, 1.4, 1.6], parallel=True, proposed=[0.75, 0.5])
    assert costs == pytest.approx([1, (3 * 1.4 + 1) / 4 + 0.1, (2 * 1.6 + 1.4 + 1) / 4 + 0.1])
    assert step_costs(2, 0.1, [1, 1.4, 1.6], proposed=[1, 1]) == pytest.approx(step_costs(2, 0.1, [1, 1.4, 1.6]))
    with pytest.raises(ValueError, match="1 shares for 2 draft tokens.*k=2"):
        step_costs(2, 0.1, [1, 1.4, 1.6], proposed=[1])


def test_the_prompt_is_read_once():
    assert speedups([1, 2], 0, prompt=0.2) == pytest.approx([1, 1 / (0.2 + 0.8 / 2)])


def test_a_long_cache_is_read_once_for_all_tokens():
    assert batch_verify(1, 300, 300) == [1, 2]
    assert batch_verify(1, 300, 300, cache=1 / 300) == [1, 1]  # two passes' time of reading hide the computing
    assert batch_verify(3, 16, 1e9, 0.8, 64, 8, cache=1e6) == pytest.approx([1] * 4)


@pytest.mark.parametrize("rates", [[0.8, 0.64, 0.512], [0.9, 0.2, 0.0], [1.0, 0.5, 0.5]])
def test_the_simulator_gives_the_predicted_length(verifier, rates):
    torch.manual_seed(1)
    s = acceptance_summary(
        generate(verifier, Anything(), [[3, i] for i in range(20)], k=3, max_new_tokens=120, rule=synthetic(rates)), 3
    )
    # a step keeps 0 to 3 guesses: its deviation is at most 1.5, and five standard errors of the mean are allowed
    assert abs(s["mean_length"] - lengths(rates)[-1]) < 5 * 1.5 / s["steps"] ** 0.5 < 0.3


def test_verifier_costs_are_ratios_of_medians_within_a_round(verifier, monkeypatch):
    widths = []

    class Watched:
        device, config = verifier.device, verifier.config

        def __call__(self, ids, past_key_values):
            widths.append(ids.shape[1])
            return verifier(ids, past_key_values=past_key_values)

    def ticks(run):  # a machine that is slower in every second round: ratios do not notice
        ticks.calls += 1
        run()
        return widths[-1] * (3 if (ticks.calls - 1) // 4 % 2 else 1)

    ticks.calls = 0
    monkeypatch.setattr("speculators_nb.evaluate.speedup.seconds", ticks)
    assert verify_costs(Watched(), 3, context=8, rounds=4) == [1, 2, 3, 4]
    assert widths == [8] + [1, 2, 3, 4] * 5


def test_measured_speedup_is_plain_over_drafted_per_token(verifier, monkeypatch):
    def ticks(run):
        made = []
        monkeypatch.setattr(
            "speculators_nb.evaluate.speedup.generate",
            lambda *a, **k: made.append((a[1], out := generate(*a, **k))) or out,
        )
        run()
        return (6.0 if isinstance(made[0][0], NoDrafter) else 2.0) * len(made[0][1].tokens)

    monkeypatch.setattr("speculators_nb.evaluate.speedup.seconds", ticks)
    got = measured_speedup(verifier, NgramDrafter(), [[1, 2, 1], [7, 7]], k=2, max_new_tokens=6, temperature=1.0)
    assert got == pytest.approx(dict(low=3, speedup=3, high=3))


def test_one_thread_is_timed_by_the_processor(monkeypatch):
    import time

    if torch.cuda.is_available():
        pytest.skip("a device is timed by the wall clock")

    def nap():
        time.sleep(0.05)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cost.seconds(nap) < 0.03
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert cost.seconds(nap) >= 0.05


def test_a_schedule_of_large_batches_begins_at_one():
    "vLLM wants a number for every size; smaller batches draft as the smallest one that was measured."
    fields = draft_schedule({8: 4, 64: 2})
    assert fields["num_speculative_tokens_per_batch_size"] == [[1, 63, 4], [64, 64, 2]]
    assert SpeculativeConfig(method="ngram", **fields).tokens_for(2, 4) == 4
