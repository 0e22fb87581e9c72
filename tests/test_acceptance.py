"""Acceptance numbers: which steps count, what the intervals resample, what `evaluate` writes."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_verifier import small_verifier
from transformers import LlamaConfig, LlamaForCausalLM

from speculators_nb.decode.generate import Generation, NoDrafter, Step, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.tree import Sampling
from speculators_nb.evaluate.acceptance import (
    Evaluation,
    acceptance_summary,
    acceptance_table,
    count,
    evaluate,
    expected_length,
    range_table,
)
from speculators_nb.evaluate.comparison import evaluate_as_engine
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
    table, summary = acceptance_table(generations, K), acceptance_summary(generations, K, draws=20)
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


def test_the_interval_of_a_rate_is_around_it_and_holds_rates():
    rng = np.random.default_rng(1)
    table = acceptance_table([request(*rng.integers(0, K + 1, 10)) for _ in range(12)], K)
    for name in ("unconditional", "conditional"):
        low, high = table[f"{name}_low"], table[f"{name}_high"]
        assert (low >= 0).all() and (low <= table[name]).all() and (table[name] <= high).all() and (high <= 1).all()


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
    return short_verifier(64)


def short_verifier(context):
    return small_verifier(vocab_size=12, max_position_embeddings=context, initializer_range=0.4)


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

    requests = result.requests.query("drafter == 'n-gram' and temperature == 1")
    assert requests.domain.tolist() == domains and requests.prompt_tokens.tolist() == [5, 1, 5]
    overall = result.summary.query("drafter == 'n-gram' and temperature == 1 and domain == 'all'").iloc[0]
    assert requests[["steps", "accepted"]].sum().tolist() == [overall.steps, overall.accepted]
    assert set(result.ranges.range) == {"0-127", "0-511"} and len(result.ranges) == 2 * 2 * 2

    folder = result.save(tmp_path / "new" / "folder")
    names = {"summary.csv", "positions.csv", "ranges.csv", "requests.csv", "acceptance.png"}
    assert {f.name for f in folder.iterdir()} == names  # and no picture of ranges: each text is in one of them
    pd.testing.assert_frame_equal(pd.read_csv(folder / "ranges.csv"), result.ranges, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "requests.csv"), result.requests, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "summary.csv"), result.summary, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "positions.csv"), result.positions, check_dtype=False)
    assert (folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_speed_beside_no_drafter(monkeypatch, tmp_path):
    "By a clock that counts the verifier's forward passes: each drafter's tokens, steps and ratio are its own."
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    verifier, passes = Verifier(LlamaForCausalLM(config).eval(), [1]), [0]
    verifier.decoder.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def counted(run):
        before = passes[0]
        run()
        return 2.0 * (passes[0] - before)

    monkeypatch.setattr("speculators_nb.evaluate.acceptance.seconds", counted)
    prompts = torch.randint(0, 8, (5, 12)).tolist()
    drafters = {"n-gram": NgramDrafter(), "suffix": SuffixDrafter()}
    given = dict(k=3, max_new_tokens=24)
    result = evaluate(verifier, drafters, prompts, baseline=True, **given)
    table = result.performance.set_index("drafter")
    assert table.index.tolist() == ["no drafter", "n-gram", "suffix"] and set(result.summary.drafter) == {*drafters}
    assert table.loc["no drafter", ["tokens_per_step", "speedup", "speedup_low", "speedup_high"]].eq(1).all()
    assert table.tokens.eq(5 * 24).all() and table.loc["no drafter", "seconds"] == 2 * 5 * 24
    for name in drafters:
        row, answers = table.loc[name], result.generations[name, 0.0]
        assert row.seconds == 2 * sum(1 + len(g.steps) for g in answers) == sum(g.seconds for g in answers)
        assert row.tokens_per_second == row.tokens / row.seconds and row.speedup == 240 / row.seconds > 1
        assert row.speedup_low < row.speedup < row.speedup_high and row.tokens_per_step > 1
    again = {"n-gram": NgramDrafter(), "suffix": SuffixDrafter()}  # suffixes of finished answers are remembered
    plain = evaluate(verifier, again, prompts, **given)
    assert plain.performance.empty and plain.generations["n-gram", 0.0] == result.generations["n-gram", 0.0]
    pd.testing.assert_frame_equal(plain.summary, result.summary)
    assert (result.save(tmp_path) / "performance.csv").is_file()


@settings(max_examples=60, deadline=None)
@given(runs, st.integers(0, 9), st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True).map(sorted))
def test_ranges_against_a_loop(rows, prompt, edges):
    "Each step is in the range of its own place, once by output position and once by context length."
    generations = [replace(request(*r), prompt=[0] * prompt) for r in rows]
    table = range_table(generations, K, edges, edges)
    want = {}
    for i, r in enumerate(rows):
        written = 1
        for accepted in r:
            for by, place in (("output", written), ("context", prompt + written)):
                low = max([0, *(e for e in edges if e <= place)])
                want.setdefault((by, low), []).append((i, accepted))
            written += accepted + 1
    got = {(row["by"], int(row.range.rstrip("+").split("-")[0])): row for _, row in table.iterrows()}
    assert got.keys() == want.keys()
    for key, row in got.items():
        kept = [a for _, a in want[key]]
        assert (row.steps, row.accepted, row.requests) == (len(kept), sum(kept), len({i for i, _ in want[key]}))
        assert row.mean_length == pytest.approx(1 + sum(kept) / len(kept))


def test_long_outputs_are_drawn_by_range(tmp_path):
    "Two prompts, of which one begins in the second range of the context and leaves the first of the output."
    verifier, drafters = short_verifier(1024), {"n-gram": NgramDrafter()}
    result = evaluate(verifier, drafters, [[1, 2], [3] * 600], k=3, max_new_tokens=140, temperatures=(0.0, 1.0))
    assert result.compared_ranges().equals(result.ranges)
    first = result.ranges[result.ranges.temperature == 0]
    assert first.range.tolist() == ["0-127", "128-511", "0-511", "512-2047"]
    assert first.requests.tolist() == [2, 2, 1, 1] and first.mean_length_low.isna().tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert (result.save(tmp_path) / "ranges.png").stat().st_size > 5000
    figure = result.plot_ranges()
    assert [ax.get_xlabel() for ax in figure.axes] == ["output tokens before the step", "context tokens"]
    assert figure.axes[0].get_legend_handles_labels()[1] == ["n-gram, T=0", "n-gram, T=1"]
    short = evaluate(verifier, drafters, [[1, 2]], k=3, max_new_tokens=16)
    with pytest.raises(ValueError, match="ranges is empty: all steps share a range"):
        short.plot_ranges()


@pytest.mark.statement("release-43")
def test_filters_are_those_of_generate(verifier):
    "Drafter and verifier sample from the filtered distribution; the likeliest token alone is greedy decoding."
    prompts, drafters = [[1, 2, 3, 1, 2], [4]], {"n-gram": NgramDrafter()}
    kwargs = dict(k=2, temperatures=(1.0,), max_new_tokens=12, seed=3)
    filters = dict(top_p=0.8, top_k=5, min_p=0.05)
    result = evaluate(verifier, drafters, prompts, **kwargs, **filters)
    counted = evaluate_as_engine(verifier, drafters, prompts, **kwargs, **filters)
    for i, (prompt, g) in enumerate(zip(prompts, result.generations["n-gram", 1.0])):
        sampling = Sampling(1.0, torch.Generator().manual_seed(3 + i), **filters)
        assert g == generate(verifier, NgramDrafter(), prompt, k=2, max_new_tokens=12, sampling=sampling)
        assert counted.requests.token_ids[i] == g.tokens
    greedy = evaluate(verifier, drafters, prompts, **kwargs | dict(temperatures=(0.0,))).generations["n-gram", 0.0]
    for name, value in (("top_p", 1e-6), ("top_k", 1), ("min_p", 1.0)):
        alone = evaluate(verifier, drafters, prompts, **kwargs, **{name: value})
        assert [g.tokens for g in alone.generations["n-gram", 1.0]] == [g.tokens for g in greedy], name


@pytest.mark.parametrize("measure", [evaluate, evaluate_as_engine])
def test_a_domain_whose_answers_end_at_once_leaves_the_others(verifier, measure):
    prompts = [[1, 2, 3, 1, 2], [4]]
    first = [generate(verifier, NoDrafter(), prompt, k=0, max_new_tokens=8).tokens for prompt in prompts]
    assert first[1][0] not in first[0][:4]
    options = dict(k=2, max_new_tokens=8, eos_token_ids=first[1][:1], domains=["a", "b"])
    found = measure(verifier, {"n-gram": NgramDrafter()}, prompts, **options)
    assert found.summary.domain.tolist() == ["all", "a"] and found.summary.requests.tolist() == [2, 1]
    assert found.requests.domain.tolist() == ["a", "b"] and found.requests.steps.tolist()[1] == 0


def test_evaluate_refuses_domains_that_do_not_fit(verifier):
    with pytest.raises(ValueError, match="1 domains for 2 prompts"):
        evaluate(verifier, {"n-gram": NgramDrafter()}, [[1], [2]], domains=["a"])


def test_a_drafter_that_was_not_measured_is_not_the_best():
    summary = pd.DataFrame(dict(drafter=["a", "b"], domain="all", temperature=0.0, mean_length=[2.5, math.nan]))
    positions = pd.DataFrame(dict(drafter=["a", "b"], position=1, unconditional=[0.8, math.nan]))
    assert (
        Evaluation(summary, positions, {}).plot().get_suptitle()
        == "a goes furthest: 2.50 tokens a step at temperature 0"
    )
