"""Acceptance numbers: which steps count, what the intervals resample, what `evaluate` writes."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from speculators_nb.decode.generate import Generation, NoDrafter, Step, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.acceptance import acceptance_summary, acceptance_table, count, evaluate, expected_length
from speculators_nb.verifier.tapped_model import Verifier

K = 3


def request(*accepted, k=K):
    "A request whose steps proposed k tokens and kept so many of them."
    return Generation([0], [0], [Step(k, [5] * k, a, [5] * (a + 1)) for a in accepted], "length")


runs = st.lists(st.lists(st.integers(0, K), min_size=1, max_size=12), min_size=1, max_size=8)


@pytest.mark.statement("release-44")
@settings(max_examples=60, deadline=None)
@given(runs)
def test_definitions(rows):
    """Against the definitions read aloud, on any steps."""
    generations, kept = [request(*r) for r in rows], [a for r in rows for a in r]
    table, summary = acceptance_table(generations, K, draws=20), acceptance_summary(generations, K, draws=20)
    for i in range(1, K + 1):
        reached, before = sum(a >= i for a in kept), sum(a >= i - 1 for a in kept)
        assert table.unconditional[i - 1] == pytest.approx(reached / len(kept))
        assert (
            table.conditional[i - 1] == pytest.approx(reached / before)
            if before
            else math.isnan(table.conditional[i - 1])
        )
    assert (
        summary["mean_length"]
        == pytest.approx(1 + sum(kept) / len(kept))
        == pytest.approx(1 + table.unconditional.sum())
    )
    assert summary["draft_acceptance"] == pytest.approx(sum(kept) / (K * len(kept)))
    assert summary["tokens_per_step"] == pytest.approx(summary["mean_length"])  # nothing was cut here


def test_a_step_without_a_proposal_counts_and_the_other_convention_stands_beside():
    g = Generation([0], [0], [Step(K, [], 0, [4]), Step(K, [5, 5, 5], 2, [5, 5, 7])], "length")
    s = acceptance_summary([g], K)
    assert (s["mean_length"], s["mean_length_drafted"], s["steps"], s["proposed"], s["accepted"]) == (2.0, 3.0, 2, 3, 2)


def test_a_step_near_the_length_limit_is_left_out():
    g = Generation([0], [0], [Step(K, [5, 5, 5], 3, [5] * 4), Step(2, [5, 5], 0, [6]), Step(0, [], 0, [6])], "length")
    assert count(g, K).tolist() == [1, 1, 3, 3, 1, 1, 1]
    s = acceptance_summary([g], K)
    assert s["mean_length"] == 4 and s["steps"] == 1
    assert s["tokens_per_step"] == pytest.approx(6 / 3)  # what the user got, all steps


def test_a_stop_token_in_the_run_counts_what_the_rule_kept():
    g = Generation([0], [0], [Step(K, [5, 1, 5], 3, [5, 1])], "stop")
    s = acceptance_summary([g], K)
    assert s["mean_length"] == 4 and s["tokens_per_step"] == 2


def test_short_proposals_count_against_the_positions_they_did_not_reach():
    g = Generation([0], [0], [Step(K, [5], 1, [5, 6]), Step(K, [5, 5, 5], 3, [5] * 4)], "length")
    assert acceptance_table([g], K).unconditional.tolist() == [1, 0.5, 0.5]
    assert acceptance_summary([g], K)["draft_acceptance"] == 1


def test_intervals_resample_prompts():
    """Against a bootstrap written as a loop over prompts. Both use 4000 resamplings of 8 prompts: their ends may differ
    by the noise of a 2.5 % quantile, about 0.02."""
    rng = np.random.default_rng(0)
    rows = [[min(K, int(rng.geometric(p)) - 1) for _ in range(30)] for p in rng.uniform(0.2, 0.8, 8)]
    means = []
    for _ in range(4000):
        pick = [rows[i] for i in rng.integers(len(rows), size=len(rows))]
        means.append(1 + np.mean([a for r in pick for a in r]))
    s = acceptance_summary([request(*r) for r in rows], K, draws=4000)
    assert [s["mean_length_low"], s["mean_length_high"]] == pytest.approx(
        np.quantile(means, [0.025, 0.975]).tolist(), abs=0.03
    )
    as_steps = acceptance_summary([request(a) for r in rows for a in r], K, draws=4000)
    assert as_steps["mean_length_high"] - as_steps["mean_length_low"] < 0.7 * (
        s["mean_length_high"] - s["mean_length_low"]
    )


def test_intervals_are_reproducible_and_hold_their_value():
    rng = np.random.default_rng(1)
    generations = [request(*rng.integers(0, K + 1, 10)) for _ in range(12)]
    a, b = acceptance_table(generations, K), acceptance_table(generations, K)
    pd.testing.assert_frame_equal(a, b)
    for name in ("unconditional", "conditional"):
        assert (a[f"{name}_low"] <= a[name]).all() and (a[name] <= a[f"{name}_high"]).all()
        assert a[[f"{name}_low", f"{name}_high"]].stack().between(0, 1).all()


def test_one_prompt_has_no_interval():
    s = acceptance_summary([request(1, 2, 3)], K)
    assert s["mean_length"] == 3 and math.isnan(s["mean_length_low"]) and math.isnan(s["mean_length_high"])


def test_positions_never_reached_are_nan_not_zero():
    table = acceptance_table([request(1, 0), request(1, 1)], K)
    assert table.unconditional.tolist() == [0.75, 0, 0]
    assert table.conditional[1] == 0 and math.isnan(table.conditional[2]) and math.isnan(table.conditional_low[2])


@pytest.mark.parametrize(
    "generations, k, message",
    [
        ([], K, "no generations"),
        ([request(1)], 0, "k=0"),
        ([request(1)], 5, "raise max_new_tokens above 6"),
    ],
)
def test_refuses_what_cannot_be_measured(generations, k, message):
    with pytest.raises(ValueError, match=message):
        acceptance_table(generations, k)


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(0, 1), gamma=st.integers(0, 12))
def test_expected_length_is_the_geometric_sum(alpha, gamma):
    """1e-6: near alpha = 1 the quotient subtracts almost equal numbers."""
    assert expected_length(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)), rel=1e-6)


@pytest.fixture(scope="module")
def verifier():
    torch.manual_seed(0)
    return Verifier(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=12,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                initializer_range=0.4,
            )
        )
    )


def test_evaluate(verifier, tmp_path):
    prompts, domains = [[1, 2, 3, 1, 2], [4], [5, 5, 6, 5, 5]], ["a", "b", "a"]
    drafters = {"no drafter": NoDrafter(), "n-gram": NgramDrafter()}
    kwargs = dict(k=2, temperatures=(0.0, 1.0), max_new_tokens=16, domains=domains, seed=3)
    result = evaluate(verifier, drafters, prompts, **kwargs)
    assert len(result.summary) == 2 * 2 * 3 and len(result.positions) == 2 * 2 * 2
    assert list(result.positions.columns[:3]) == ["drafter", "temperature", "position"]
    row = result.summary.query("drafter == 'n-gram' and temperature == 1 and domain == 'a'").iloc[0]
    chosen = [g for g, d in zip(result.generations["n-gram", 1.0], domains) if d == "a"]
    assert row.mean_length == acceptance_summary(chosen, 2)["mean_length"] and row.requests == 2
    assert (result.summary.query("drafter == 'no drafter'").mean_length == 1).all()
    assert [g.tokens for g in result.generations["n-gram", 0.0]] == [
        g.tokens for g in result.generations["no drafter", 0.0]
    ]
    for prompt, g in zip(prompts, result.generations["n-gram", 0.0]):
        assert g == generate(verifier, NgramDrafter(), prompt, k=2, max_new_tokens=16)
    again = evaluate(verifier, drafters, prompts, **kwargs)
    pd.testing.assert_frame_equal(result.summary, again.summary)
    other = evaluate(verifier, drafters, prompts, **kwargs | dict(seed=4))
    assert [g.tokens for g in other.generations["n-gram", 1.0]] != [g.tokens for g in result.generations["n-gram", 1.0]]

    folder = result.save(tmp_path / "new" / "folder")
    assert {f.name for f in folder.iterdir()} == {"summary.csv", "positions.csv", "acceptance.png"}
    pd.testing.assert_frame_equal(pd.read_csv(folder / "summary.csv"), result.summary, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "positions.csv"), result.positions, check_dtype=False)
    assert (folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_evaluate_refuses_domains_that_do_not_fit(verifier):
    with pytest.raises(ValueError, match="1 domains for 2 prompts"):
        evaluate(verifier, {"n-gram": NgramDrafter()}, [[1], [2]], domains=["a"])
