"""Suffix decoding against the counted tree that it stands for, and what a drafter remembers."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.decode.suffix import SuffixDrafter, SuffixIndex
from speculators_nb.tree import Sampling


def counted(sequences, depth):
    "How often each part of up to `depth` tokens occurs."
    counts = {}
    for text in sequences:
        for i in range(len(text)):
            for n in range(1, min(depth, len(text) - i) + 1):
                part = tuple(text[i:i + n])
                counts[part] = counts.get(part, 0) + 1
    return counts


def expected(counts, context, k, factor, min_prob, depth, words):
    context, best = context[-depth:], ([], 0.0, 0)
    for m in range(1, len(context)):
        said, tokens, score, p = tuple(context[-m:]), [], 0.0, 1.0
        while len(tokens) < min(k, int(m * factor + 1e-6)):
            following = [(counts.get((*said, t), 0), -t) for t in range(words)]
            n, t = max(following)
            if not n or (p := p * n / counts[said]) < min_prob:
                break
            said, score = (*said, -t), score + p
            tokens.append(-t)
        if tokens and score >= best[1] - 1e-12:
            best = (tokens, score, m)
    return best


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_guesses_are_those_of_the_counted_tree(data):
    words, depth = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 8))
    k, factor, min_prob = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.5])), data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    text = st.lists(st.integers(0, words - 1), max_size=20)
    index, kept = SuffixIndex(depth), []
    for sequence in data.draw(st.lists(text, min_size=1, max_size=8)):
        index.start()
        for part in (sequence[:7], sequence[7:]):
            index.extend(part)
        kept.append(sequence)
        if data.draw(st.booleans()):
            index.guess(sequence, k)          # asking changes nothing
        if len(kept) > 3:
            index.forget()
            kept.pop(0)
    for context in (kept[-1], data.draw(text)):
        got = index.guess(context, k, factor, min_prob)
        tokens, score, match = expected(counted(kept, depth), context, k, factor, min_prob, depth, words)
        assert (got.tokens, got.match) == (tokens, match) and got.score == pytest.approx(score, abs=1e-9)


def test_forgetting_frees_memory():
    index = SuffixIndex(4)
    for i in range(300):
        index.start()
        index.extend([i % 7, *range(20), i % 5])
        if len(index.starts) > 10:
            index.forget()
    assert len(index.tokens) < 1300 and len(index.starts) == 10
    assert index.guess([3, 4, 5], 4).tokens == [6, 7]


def propose(drafter, tokens, k=4):
    return drafter.propose(torch.tensor(tokens), None, k, Sampling()).tokens.tolist()


def test_a_drafter_learns_from_finished_answers_only():
    drafter = SuffixDrafter()
    assert propose(drafter, [1, 2, 3, 9]) == []
    drafter.finish(torch.tensor([1, 2, 3, 9, 8, 7, 6]))      # the prompt is 1 2 3
    drafter.reset()
    assert propose(drafter, [5, 9, 8]) == [7, 6]             # match of two, two tokens
    drafter.reset()
    assert propose(drafter, [5, 1, 2]) == []                 # prompts are not remembered


def test_the_own_text_wins_a_tie():
    drafter = SuffixDrafter(min_prob=0.0)
    propose(drafter, [0, 4])
    drafter.finish(torch.tensor([0, 4, 5, 4, 5]))
    drafter.reset()
    assert propose(drafter, [4, 5, 4, 5, 4], k=1) == [5]


@pytest.mark.parametrize("options, message", [(dict(depth=1), "max_tree_depth=1"), (dict(max_requests=-1), "max_cached_requests=-1"),
                                              (dict(factor=-0.5), "max_spec_factor=-0.5"), (dict(min_prob=1.5), "min_token_prob=1.5")])
def test_refused_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(**options)
