"""Suffix decoding against the counted tree that it stands for and against Arctic Inference, and what a drafter
remembers."""

import copy
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.suffix_index import Followers, Part, SuffixIndex
from speculators_nb.decode.tree import Sampling
from speculators_nb.verifier.tapped_model import Verifier


def first_of_equals(nexts):
    "The first of Arctic's list: sorted by count, a token moves as little as it must."
    order, count, more = [], Counter(), Counter()  # more[c]: how many tokens were counted more than c times
    for t in nexts:
        c = count[t]
        if c:
            place = order.index(t, more[c])
            order.insert(more[c + (place == more[c])], order.pop(place))
        else:
            order.append(t)
        count[t] += 1
        more[c] += 1
    return order[0]


class Counted:
    "Every part of up to `depth` tokens: how often it occurs, and what followed it, in the order of time."

    def __init__(self, sequences, log, depth):
        self.count, self.nexts, texts = {}, {}, dict.fromkeys(sequences, ())
        for s, t in log:
            if s in texts:
                texts[s] += (t,)
                for n in range(1, min(depth, len(texts[s])) + 1):
                    part = texts[s][-n:]
                    self.count[part] = self.count.get(part, 0) + 1
                    self.nexts.setdefault(part[:-1], []).append(t)

    def propose(self, context, k, factor, min_prob, depth):
        context, best = context[-depth:], ([], 0.0, 0)
        for m in range(1, len(context)):
            said, tokens, score, p = tuple(context[-m:]), [], np.float32(0), np.float32(1)
            while said in self.nexts and len(tokens) < min(k, int(m * factor + 1e-6)):
                t = first_of_equals(self.nexts[said])
                p *= np.float32(self.nexts[said].count(t)) / np.float32(self.count[said])
                if p < np.float32(min_prob):
                    break
                said, score = (*said, t), score + p
                tokens.append(t)
            if tokens and score >= best[1]:
                best = (tokens, float(score), m)
        return best


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_proposals_are_those_of_the_counted_tree(data):
    words, depth = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 8))
    k = data.draw(st.integers(1, 6))
    factor = data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.5]))
    min_prob = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    text = st.lists(st.integers(0, words - 1), max_size=20)
    index, log, kept = SuffixIndex(depth), [], []
    index.most_places = data.draw(st.sampled_from([1, 2, 5, 64]))  # parts are told apart early, or never
    for _ in range(data.draw(st.integers(1, 4))):
        grown = {index.start(): iter(data.draw(text)) for _ in range(data.draw(st.integers(1, 3)))}
        kept += grown
        for s in data.draw(st.lists(st.sampled_from([*grown]), max_size=30)):  # side by side
            part = [t for _, t in zip(range(3), grown[s])]
            index.extend(s, part)
            log += [(s, t) for t in part]
            if data.draw(st.booleans()):
                index.propose(data.draw(text), k)  # asking changes nothing
        if len(kept) > 3:
            index.forget()
            index.extend(kept.pop(0), [0, 1])  # and what is forgotten grows no more
        for context in ([t for s, t in log if s == kept[-1]], data.draw(text)):
            got = index.propose(context, k, factor, min_prob)
            tokens, score, match = Counted(kept, log, depth).propose(context, k, factor, min_prob, depth)
            assert (got.tokens, got.score, got.match) == (tokens, score, match)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=60))
def test_followers_are_sorted_as_first_of_equals_sorts_them(nexts):
    followers = Followers()
    for n, t in enumerate(nexts, 1):
        followers.add(t)
        assert followers.first() == first_of_equals(nexts[:n])


TEXTS = {
    "one token": [7],
    "two by turns": [7, 8],
    "equals by turns": [7, 8, 7, 9],
    "a table": [1, 5, 1, 6, 1, 5, 1, 6, 2],
}


@pytest.mark.parametrize("period", TEXTS)
def test_a_proposal_looks_at_few_places_however_often_a_text_repeats_itself(period, monkeypatch):
    text, k = (TEXTS[period] * 5_000)[:5_000], 8
    index, most, steps = SuffixIndex(), 0, 0
    index.extend(sequence := index.start(), text[:-1])

    def places(self, places, m):
        nonlocal most
        most = max(most, len(places))
        return starts(self, places, m)

    def first(self, part):
        nonlocal steps
        steps += 1
        return firsts(self, part)

    starts, firsts = SuffixIndex._starts, SuffixIndex.first
    monkeypatch.setattr(SuffixIndex, "_starts", places)
    monkeypatch.setattr(SuffixIndex, "first", first)
    monkeypatch.setattr(SuffixIndex, "_all", None)  # all places are looked through only after something was forgotten
    proposal = index.propose(text[:-1], k)
    assert proposal.tokens[0] == text[-1] and most <= index.most_places and 0 < steps <= 24 * k
    touched = []
    monkeypatch.setattr(Followers, "add", lambda self, t: touched.append(t))
    index.extend(sequence, text[-1:])
    assert 0 < len(touched) < 24
    stored, parts = 0, list(index.parts.values())
    while parts:
        part = parts.pop()
        assert isinstance(part, Part) and part.count
        stored += len(part.places)
        parts += (part.longer or {}).values()
    assert stored == len(text) == len(index)  # a place is in one part only


def test_forgetting_frees_memory():
    index = SuffixIndex(4)
    for i in range(300):
        index.extend(index.start(), [i % 7, *range(20), i % 5])
        if len(index.ends) > 10:
            index.forget()
    assert len(index.tokens) < 1300 and len(index.ends) == 10 and len(index) == 220
    assert index.propose([3, 4, 5], 4).tokens == [6, 7]


def arctic():
    "Arctic's own cache, where it is installed, in the environment of tests/vllm too; it needs NumPy only."
    if "arctic_inference" not in sys.modules and not importlib.util.find_spec("arctic_inference"):
        here = "lib/python{}.{}/site-packages/arctic_inference".format(*sys.version_info)
        home = Path(__file__).resolve().parents[1] / ".venv-vllm" / here
        if not home.is_dir():
            pytest.skip("arctic-inference is not installed (tests/vllm/check_vllm.py builds it)")
        spec = importlib.util.spec_from_file_location(
            "arctic_inference", home / "__init__.py", submodule_search_locations=[str(home)]
        )
        sys.modules["arctic_inference"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["arctic_inference"])
    return pytest.importorskip("arctic_inference.suffix_decoding").SuffixDecodingCache


def beside_arctic(seed, keep):
    "Both write the same random texts, up to three requests at a time; yields what each proposes."
    rng = np.random.default_rng(seed)
    words, depth, k = (int(rng.integers(*r)) for r in ((2, 7), (2, 25), (1, 9)))
    factor, min_prob = float(rng.choice([0, 0.5, 1, 1.5, 3])), float(rng.choice([0, 0.1, 0.3, 0.5]))
    ours, theirs = SuffixDrafter(depth, keep, factor, min_prob), arctic()(depth, keep)
    for wave in range(4):
        requests = []
        for i in range(rng.integers(1, 4)):
            drafter, prompt = copy.copy(ours), rng.integers(0, words, rng.integers(1, 30)).tolist()
            drafter.reset()
            requests.append((drafter, (wave, i), prompt, []))
        for _ in range(rng.integers(1, 15)):
            for drafter, request, prompt, answer in requests:
                new = rng.integers(0, words, rng.integers(1, 5) if answer else 1).tolist()
                if not answer:
                    theirs.start_request(request, prompt)
                theirs.add_active_response(request, new)
                answer += new
                text = prompt + answer
                wanted = theirs.speculate(
                    request, text[-depth:], max_spec_tokens=k, max_spec_factor=factor, min_token_prob=min_prob
                )
                yield propose(drafter, text, k), wanted.token_ids
        for drafter, request, prompt, answer in requests:
            drafter.finish(torch.tensor(prompt + answer))
            theirs.stop_request(request)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_drafts_are_those_of_arctic_inference(first):
    pairs = [pair for seed in range(first, first + 30) for pair in beside_arctic(seed, keep=10_000 if seed % 10 else 0)]
    assert sum(len(b) for _, b in pairs) > 1000
    assert all(a == b for a, b in pairs)


def test_only_ties_differ_from_arctic_inference_once_answers_are_forgotten():
    """Forgetting moves tokens within Arctic's lists, and which of equally frequent ones leads then is not kept here:
    one draft in a thousand."""
    pairs = [pair for seed in range(80) for pair in beside_arctic(seed, keep=2 + seed % 3)]
    differ = sum(a != b for a, b in pairs)
    assert len(pairs) > 3000 and differ <= len(pairs) / 250
    assert sum(len(a) for a, _ in pairs) == pytest.approx(sum(len(b) for _, b in pairs), rel=0.005)


def propose(drafter, tokens, k=4):
    return drafter.propose(torch.tensor(tokens), None, k, Sampling()).tokens.tolist()


def test_a_drafter_learns_from_answers_not_from_prompts():
    drafter = SuffixDrafter()
    assert propose(drafter, [1, 2, 3, 9]) == []
    drafter.finish(torch.tensor([1, 2, 3, 9, 8, 7, 6]))  # the prompt is 1 2 3
    drafter.reset()
    assert propose(drafter, [5, 9, 8]) == [7, 6]  # match of two, two tokens
    drafter.reset()
    assert propose(drafter, [5, 1, 2]) == []  # prompts are not remembered


@pytest.mark.parametrize("limit, k", [(12, 3), (12, lambda steps: 3 * (len(steps) > 2)), (12, 0), (1, 3)])
def test_an_answer_is_learned_whole(limit, k):
    "Also where the first steps, or all of them, have no draft."
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    verifier, drafter = Verifier(LlamaForCausalLM(config).eval(), [1]), SuffixDrafter()
    for prompt in ([1, 2, 3], [4, 5]):
        plain = generate(verifier, NoDrafter(), prompt, max_new_tokens=limit)
        assert generate(verifier, drafter, prompt, max_new_tokens=limit, k=k).tokens == plain.tokens
        assert drafter.text.tokens.tolist() == prompt + plain.tokens
        assert drafter.answers.tokens.tolist()[-limit:] == plain.tokens
    assert len(drafter.answers) == 2 * limit


def test_requests_that_run_side_by_side_learn_from_each_other():
    first = SuffixDrafter()
    second = copy.copy(first)
    first.reset()
    second.reset()
    propose(first, [0, 4])
    propose(first, [0, 4, 5, 6, 7])
    assert propose(second, [1, 4, 5]) == [6, 7]


def test_the_oldest_answer_gives_way_to_a_new_request():
    drafter = SuffixDrafter(max_requests=1)
    propose(drafter, [0, 4])
    drafter.finish(torch.tensor([0, 4, 5]))
    drafter.reset()
    assert propose(drafter, [1, 4]) == []


def test_the_own_text_wins_a_tie():
    drafter = SuffixDrafter(min_prob=0.0)
    propose(drafter, [0, 4])
    drafter.finish(torch.tensor([0, 4, 5, 4, 5]))
    drafter.reset()
    assert propose(drafter, [4, 5, 4, 5, 4], k=1) == [5]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(depth=1), "^depth=1: must be at least 2"),
        (dict(max_requests=-1), "^max_requests=-1: must be"),
        (dict(factor=-0.5), "^factor=-0.5: must be"),
        (dict(min_prob=1.5), "^min_prob=1.5: must be"),
    ],
)
def test_refused_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(**options)
