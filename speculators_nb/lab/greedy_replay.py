"""At temperature 0 the answer to a prompt is the same with every drafter.
So the verifier answers once, and many drafters are measured against its answers without it."""

from collections.abc import Collection
from typing import NamedTuple, cast

import torch

from ..data.chat_template import common_prefix
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
    verifier: Verifier, prompts: list[list[int]], max_new_tokens: int, eos_token_ids: Collection[int] = ()
) -> list[list[int]]:
    """What the verifier writes to prompts (token ids), at most `max_new_tokens` or up to an id that ends an output,
    which is kept: the slow part of `greedy_answers`, whatever a drafter reads."""
    taps = HiddenStates(verifier.aux_layer_ids)
    return [
        _decoded(verifier, taps, prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids).tokens
        for prompt in prompts
    ]


def greedy_answers(
    verifier: Verifier,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    beyond: int = 8,
    texts: list[list[int]] | None = None,
) -> list[Answer]:
    """Answer every prompt, and keep what drafters read, whose layers the verifier taps. `beyond` is the longest draft
    that will be replayed; `texts` are of `greedy_texts` (None: they are written here)."""
    if texts is None:
        texts = greedy_texts(verifier, prompts, max_new_tokens, eos_token_ids)
    taps, found = HiddenStates(verifier.aux_layer_ids), []
    for prompt, written in zip(prompts, texts, strict=True):
        more = _decoded(verifier, taps, [*prompt, *written], max_new_tokens=beyond + 1)
        states = cast(torch.Tensor, more.hidden_states)  # `taps` keeps them
        found.append(Answer(prompt, written, more.tokens, states, max_new_tokens))
    return found


def _draft(drafter, answer, tokens, n, read, requested) -> list[int]:
    "What the drafter proposes after n tokens; `read` states were given to it before."
    states = answer.states[read : n - 1] if drafter.aux_layer_ids else None
    return drafter.propose(tokens[:n], states, requested, Sampling()).cut(requested).tokens.tolist()


@torch.inference_mode()
def replay(drafter: Drafter, answer: Answer, k: int) -> Generation:
    """The steps in which a drafter that proposes chains, and reads all layers of the answer's states, would have
    written an answer of `greedy_answers`, with k tokens drafted in a step, at most `beyond`: what `generate` returns at
    temperature 0."""
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
        accepted = common_prefix(draft, known[n:])
        new = known[n : min(n + accepted + 1, end)]
        steps.append(Step(requested, draft, accepted, new))
        n += len(new)
    full = len(answer.tokens) == answer.limit
    return Generation(answer.prompt, answer.tokens, steps, "length" if full else "stop")
