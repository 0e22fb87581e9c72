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


def greedy_answers(
    verifier: Verifier,  # taps the layers that the drafters read
    prompts: list[list[int]],  # token ids of each request
    max_new_tokens: int,  # output limit
    eos_token_ids: Collection[int] = (),  # token ids that end an output
    beyond: int = 8,  # the longest draft that will be replayed
) -> list[Answer]:
    "Answer every prompt, and keep what drafters read."
    taps, found = HiddenStates(verifier.aux_layer_ids), []
    for prompt in prompts:
        written = _decoded(verifier, taps, prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids).tokens
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
            states = answer.states[read : n - 1] if drafter.aux_layer_ids else None
            tree = drafter.propose(tokens[:n], states, requested, Sampling())
            read, draft = n - 1, tree.cut(requested).tokens.tolist()
        accepted = _agreeing(draft, known[n:])
        new = known[n : min(n + accepted + 1, end)]
        steps.append(Step(requested, draft, accepted, new))
        n += len(new)
    full = len(answer.tokens) == answer.limit
    return Generation(answer.prompt, answer.tokens, steps, "length" if full else "stop")
