"Adaptive draft lengths: policies and oracles against loops, and greedy text through the real decoder."

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from by_day import by_day
from small_verifier import small_verifier

from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.tree import TokenTree
from speculators_nb.evaluate.speedup import step_costs
from speculators_nb.evaluate.when_to_stop import (
    Drafts,
    FixedLength,
    LengthByConfidence,
    LengthByRates,
    StoppingDrafter,
    least_costs,
    record_drafts,
    simulate,
)

PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [7, 1, 2, 7], [9, 9]]
COSTS = [1.0, 1.9, 2.1, 2.2]  # the first draft token is the dearest, as with experts


def random_text(rng, n=8, k=3):
    "As many draft tokens agree as the text has left, at most."
    accepted = np.minimum(rng.integers(0, k + 1, n), np.arange(n, 0, -1))
    return Drafts(accepted, rng.normal(0, 3, (n, k)))


def cheapest(accepted, costs):
    "By trying every sequence of lengths"
    if not len(accepted):
        return 0.0
    return min(c + cheapest(accepted[min(n, accepted[0]) + 1 :], costs) for n, c in enumerate(costs))


@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_is_the_best_of_all_sequences_and_no_policy_beats_it(seed):
    rng = np.random.default_rng(seed)
    texts = [random_text(rng) for _ in range(4)]
    bound = least_costs(texts, COSTS)
    assert bound[:, 1] == pytest.approx([cheapest(t.accepted, COSTS) for t in texts])
    for policy in [*map(FixedLength, range(4)), LengthByRates(COSTS), LengthByConfidence(COSTS)]:
        counts = simulate(texts, policy, COSTS)
        assert (counts[:, 0] == 8).all() and (counts[:, 1] >= bound[:, 1] - 1e-9).all()


def test_steps_of_a_fixed_length_by_hand():
    text = Drafts(np.array([3, 0, 1, 2, 0, 0]), np.zeros((6, 3)))
    # 3 tokens (2 accepted of 3 that agree), then 3
    assert simulate([text], FixedLength(2), COSTS).tolist() == [[6, pytest.approx(4.2), 2]]
    # 4 tokens, 1, 1
    assert simulate([text], FixedLength(3), COSTS).tolist() == [[6, pytest.approx(6.6), 3]]


def test_rates_count_what_was_tried_and_forget():
    policy = LengthByRates(COSTS, memory=10)
    policy.learn(2, 1)  # the first accepted, the second rejected, the third not tried
    assert policy.rates() == pytest.approx([1, 1 / 2, 1])
    policy.learn(3, 0)
    assert policy.rates() == pytest.approx([1.9 / 2.9, 1 / 1.9, 1])
    for _ in range(200):
        policy.learn(0, 0)
    assert policy.rates() == pytest.approx([1, 1, 1], abs=1e-6)


def test_slots_behind_an_accepted_stop_token_are_not_judged():
    "Texts of two tokens, whose first draft token is the stop token: the second slot is never tried, nor the third."
    policy = LengthByRates(COSTS)
    simulate([Drafts(np.array([1]), np.zeros((1, 3)))] * 20, policy, COSTS)
    assert policy.rates() == pytest.approx([1, 1, 1]) and policy.tried[1:].tolist() == [0, 0]
    # a stop token that the verifier writes itself: the draft's first token is rejected
    simulate([Drafts(np.array([0]), np.zeros((1, 3)))], policy, COSTS)
    assert policy.rates()[0] < 1 and policy.tried[1:].tolist() == [0, 0]


def test_a_length_that_does_not_pay_is_given_up_and_tried_again():
    policy = LengthByRates(COSTS)
    chosen = []
    for _ in range(300):
        chosen.append(policy.length())
        policy.learn(chosen[-1], 0)
    assert chosen[0] == 3 and chosen.count(0) > 250
    assert any(n and not before for before, n in pairwise(chosen))


@pytest.mark.parametrize("parallel", [False, True])
def test_a_length_depends_on_no_confidence_behind_it(parallel):
    """What is drawn for a token shows in the confidences behind it: a length that read them would not be lossless. A
    drafter of blocks knows the confidence in the first token that it leaves out."""
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(200):
        policy = LengthByConfidence(step_costs(6, 0.1), parallel)
        policy.learn(6, int(rng.integers(0, 7)), np.zeros(6))
        logits = rng.normal(1, 3, 6)
        n = policy.length(logits)
        lengths.add(n)
        changed = logits.copy()
        changed[n + parallel :] = rng.normal(1, 3, len(changed[n + parallel :]))
        assert policy.length(changed) == n
    assert len(lengths) > 3


def test_a_dear_first_token_is_drafted_where_those_behind_it_pay():
    "One token would not pay (2 tokens for 1.9 passes, 4 for 2.2): a rule that looks one token ahead stops at 0."
    costs = [1.0, 2.1, 2.15, 2.2]
    assert LengthByConfidence(costs).length(np.full(3, 10.0)) == 3


def test_confidences_are_calibrated_online():
    rng = np.random.default_rng(1)
    policy = LengthByConfidence(step_costs(2, 0.1))
    for _ in range(1000):
        logits = rng.normal(0, 2, 2)
        happened = rng.random(2) < 1 / (1 + np.exp(-(2 * logits - 1)))
        policy.learn(2, int(happened.cumprod().sum()), logits)
    assert policy.weights == pytest.approx([2, -1, -1], abs=0.5)


@pytest.fixture(scope="module")
def verifier():
    return small_verifier(vocab_size=20)


class Wrong(NoDrafter):
    def propose(self, tokens, features, k, sampling):
        return TokenTree.chain([0] * k)


@pytest.mark.parametrize("drafter, lengths", [(NgramDrafter(), {4}), (Wrong(), {4, 0})])
def test_greedy_text_stays_and_useless_drafts_end(verifier, drafter, lengths):
    "The random verifier's greedy text repeats itself: n-gram is nearly always right."
    plain = generate(verifier, NoDrafter(), PROMPTS, k=0, max_new_tokens=24)
    adaptive = generate(verifier, drafter, PROMPTS, k=LengthByRates(step_costs(4, 0.3)), max_new_tokens=24)
    assert [g.tokens for g in adaptive] == [g.tokens for g in plain]
    assert lengths <= {step.requested for g in adaptive for step in g.steps}


class Told(NoDrafter):
    "Drafts the text, with one wrong token at every third position"

    def __init__(self, text):
        self.text = text

    def propose(self, tokens, features, k, sampling):
        ids = torch.tensor(self.text[len(tokens) : len(tokens) + k] + [0] * k)[:k]
        wrong = torch.arange(len(tokens), len(tokens) + k) % 3 == 0
        ids = torch.where(wrong, (ids + 1) % 20, ids)
        probs = torch.full((k, 20), 0.5 / 19).scatter(1, ids[:, None], 0.5)
        return TokenTree.chain(ids, probs)


def test_what_is_recorded_is_what_a_decoder_accepts(verifier):
    prompt = [3, 4, 5]
    text = generate(verifier, NoDrafter(), prompt, k=0, max_new_tokens=14).tokens
    drafter = Told(prompt + text)
    drafts = record_drafts(verifier, drafter, prompt, 4, max_new_tokens=14)
    # the next multiple of 3 is wrong; the text has 17 tokens
    assert drafts.accepted.tolist() == [min(-end % 3, 17 - end) for end in range(4, 17)]
    assert drafts.logits == pytest.approx(0, abs=1e-5)  # log-odds of 1/2
    decoded = generate(verifier, drafter, prompt, k=2, max_new_tokens=14)
    assert len(decoded.steps) == simulate([drafts], FixedLength(2), [1, 1, 1])[0, 2]


def noisy(verifier, noise):
    "A draft model: the verifier with some noise in its weights."
    model = copy.deepcopy(verifier.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(noise * p.std() * torch.randn(p.shape, generator=generator))
    return DraftModel(model, verifier)


@pytest.mark.parametrize("prompt", by_day(PROMPTS, [PROMPTS[1]]))
def test_a_stopping_draft_model_takes_the_steps_that_the_simulator_counts(verifier, prompt):
    costs, drafter = step_costs(4, 0.2), noisy(verifier, 0.2)
    text = record_drafts(verifier, drafter, prompt, 4, max_new_tokens=60)
    simulated = simulate([text], LengthByConfidence(costs), costs)
    decoded = generate(verifier, StoppingDrafter(drafter, LengthByConfidence(costs)), prompt, k=4, max_new_tokens=60)
    assert decoded.tokens == generate(verifier, NoDrafter(), prompt, k=0, max_new_tokens=60).tokens
    assert len(decoded.steps) == simulated[0, 2]
    assert len({len(s.draft) for s in decoded.steps}) > 2


def test_a_drafter_that_is_always_right_has_no_token_rejected(verifier):
    "A stop token inside its last draft ends the text, in the decoder as in the simulator; the same is learned."
    costs, drafter, prompt = step_costs(4, 0.0), noisy(verifier, 0.0), PROMPTS[1]
    text = generate(verifier, NoDrafter(), prompt, k=0, max_new_tokens=30).tokens
    # steps write five tokens after the first one, the last of which is the verifier's
    stop = next(t for i, t in enumerate(text) if t not in text[:i] and i % 5 in (1, 2, 3))
    decoding = dict(max_new_tokens=30, eos_token_ids={stop})
    decoded, simulated = LengthByConfidence(costs), LengthByConfidence(costs)
    answer = generate(verifier, StoppingDrafter(drafter, decoded), prompt, k=4, **decoding)
    assert answer.finish_reason == "stop" and len(answer.steps[-1].tokens) < len(answer.steps[-1].draft)
    simulate([record_drafts(verifier, drafter, prompt, 4, **decoding)], simulated, costs)
    for policy in (decoded, simulated):
        assert policy.counted.tried.tolist() == policy.counted.kept.tolist() and policy.counted.tried[0]
        assert all(accepted for _, _, accepted in policy.outcomes)
    assert decoded.counted.tried.tolist() == simulated.counted.tried.tolist()


def test_requests_of_a_batch_stop_apart_and_learn_together(verifier):
    policy = LengthByConfidence(step_costs(4, 0.2))
    stopping = StoppingDrafter(noisy(verifier, 0.2), policy)
    plain = generate(verifier, NoDrafter(), PROMPTS, k=0, max_new_tokens=24)
    decoded = generate(verifier, stopping, PROMPTS, k=4, max_new_tokens=24)
    assert [g.tokens for g in decoded] == [g.tokens for g in plain]
    assert policy.steps == sum(s.requested > 0 for g in decoded for s in g.steps)


def test_the_drafter_alone_still_drafts_all(verifier):
    drafter = noisy(verifier, 0.2)
    costs = step_costs(4, 0.9)
    stopping = StoppingDrafter(drafter, LengthByConfidence(costs))
    short = generate(verifier, stopping, PROMPTS[0], k=4, max_new_tokens=40)
    text = record_drafts(verifier, drafter, PROMPTS[0], 4, max_new_tokens=40)
    assert len(short.steps) == simulate([text], LengthByConfidence(costs), costs)[0, 2]
    assert {len(s.draft) for s in short.steps} >= {0, 1}  # where a token is dear, some steps draft none
    stopping.policy.goes_on = lambda n, logits: n > 0
    assert not any(s.draft for s in generate(verifier, stopping, PROMPTS[0], k=4, max_new_tokens=6).steps)
    whole = generate(verifier, drafter, PROMPTS[0], k=4, max_new_tokens=40)
    assert all(len(s.draft) == s.requested for s in whole.steps)


def test_a_drafter_that_cannot_stop_is_refused(verifier):
    stopping = StoppingDrafter(NgramDrafter(), LengthByConfidence(COSTS))
    with pytest.raises(ValueError, match="NgramDrafter does not draft one token after the other"):
        generate(verifier, stopping, PROMPTS[0], k=3, max_new_tokens=9)
    with pytest.raises(ValueError, match="parallel=True"):
        StoppingDrafter(NgramDrafter(), LengthByConfidence(COSTS, parallel=True))
    with pytest.raises(ValueError, match="k=-1"):
        FixedLength(-1)
