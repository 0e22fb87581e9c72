"""At temperature 0 the answer to a prompt is the same with every drafter.
So the verifier answers once, and many drafters are measured against its answers without it."""

from collections.abc import Collection
from typing import NamedTuple, cast

import torch

from ..decode.generate import Generation, HiddenStates, Step, generate
from ..decode.tree import Drafter, Sampling
from ..verifier.tapped_model import Verifier


class Answer(NamedTuple):
    "The verifier's greedy answer to a prompt."

    prompt: list[int]  # token ids
    tokens: list[int]  # of the output, a stop token included
    following: list[int]  # greedy tokens after it, `beyond` many at least
    states: torch.Tensor  # [n, A·H] hidden states of all tokens but the last
    limit: int  # of the output


def _decoded(verifier, taps, prompt, **options) -> Generation:
    "The verifier's own output for one prompt."
    return cast(Generation, generate(verifier, taps, prompt, k=0, **options))


def greedy_texts(
    verifier: Verifier,
    prompts: list[list[int]],  # token ids of each request
    max_new_tokens: int,  # output limit
    eos_token_ids: Collection[int] = (),  # token ids that end an output
) -> list[list[int]]:  # token ids of each output, a stop token included
    "What the verifier writes: the slow part of `greedy_answers`, whatever a drafter reads."
    taps = HiddenStates(verifier.aux_layer_ids)
    return [
        _decoded(verifier, taps, prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids).tokens
        for prompt in prompts
    ]


def greedy_answers(
    verifier: Verifier,  # taps the layers that the drafters read
    prompts: list[list[int]],  # token ids of each request
    max_new_tokens: int,  # output limit
    eos_token_ids: Collection[int] = (),  # token ids that end an output
    beyond: int = 8,  # the longest draft that will be replayed
    texts: list[list[int]] | None = None,  # of `greedy_texts`; None: they are written here
) -> list[Answer]:
    "Answer every prompt, and keep what drafters read."
    if texts is None:
        texts = greedy_texts(verifier, prompts, max_new_tokens, eos_token_ids)
    taps, found = HiddenStates(verifier.aux_layer_ids), []
    for prompt, written in zip(prompts, texts, strict=True):
        more = _decoded(verifier, taps, [*prompt, *written], max_new_tokens=beyond + 1)
        states = cast(torch.Tensor, more.hidden_states)  # `taps` keeps them
        found.append(Answer(prompt, written, more.tokens, states, max_new_tokens))
    return found


def _agreeing(draft, text):
    "How many tokens of a draft are those of the text, from the first on."
    for i, (a, b) in enumerate(zip(draft, text)):
        if a != b:
            return i
    return min(len(draft), len(text))


def _draft(drafter, answer, tokens, n, read, requested) -> list[int]:
    "What the drafter proposes after n tokens; `read` states were given to it before."
    states = answer.states[read : n - 1] if drafter.aux_layer_ids else None
    return drafter.propose(tokens[:n], states, requested, Sampling()).cut(requested).tokens.tolist()


@torch.inference_mode()
def replay(
    drafter: Drafter,  # reads the layers of the answer's states, all of them
    answer: Answer,  # from `greedy_answers`
    k: int,  # tokens drafted in a step, at most `beyond`
) -> Generation:  # that of `generate` at temperature 0
    "The steps in which a drafter that proposes chains would have written an answer."
    drafter.reset()
    known = [*answer.prompt, *answer.tokens, *answer.following]
    tokens, end = torch.tensor(known), len(answer.prompt) + len(answer.tokens)
    n, read, steps = len(answer.prompt) + 1, 0, []  # the first token comes with the prompt
    while n < end:
        left = answer.limit - (n - len(answer.prompt))
        requested, draft = min(k, left - 1), []
        if requested:
            draft = _draft(drafter, answer, tokens, n, read, requested)
            read = n - 1
        accepted = _agreeing(draft, known[n:])
        new = known[n : min(n + accepted + 1, end)]
        steps.append(Step(requested, draft, accepted, new))
        n += len(new)
    full = len(answer.tokens) == answer.limit
    return Generation(answer.prompt, answer.tokens, steps, "length" if full else "stop")


@torch.inference_mode()
def accepted_along(
    drafter: Drafter,  # reads the layers of the answer's states, all of them
    answer: Answer,  # from `greedy_answers`
    k: int,  # tokens drafted at each position, at most `beyond`
) -> list[int]:  # of each token of the answer but the first
    "How many tokens of a draft would be accepted if a step began with this token."
    drafter.reset()
    known = [*answer.prompt, *answer.tokens, *answer.following]
    tokens, first, accepted = torch.tensor(known), len(answer.prompt) + 1, []
    for n in range(first, first + len(answer.tokens) - 1):
        read = 0 if n == first else n - 2
        accepted.append(_agreeing(_draft(drafter, answer, tokens, n, read, k), known[n:]))
    return accepted
