"""A loss says that a drafter learns, an accuracy what it would have proposed at positions of a given text.
How many tokens a step it saves only decoding says: eight prompts at each evaluation are enough to see it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..decode.tree import Drafter
from ..verifier.tapped_model import Verifier
from .acceptance import Refused, acceptance_summary, acceptance_table, check_measurement, decode_prompts, measurable

LENGTH = 3  # tokens drafted where neither the caller nor the drafter has a number


def draft_length(drafter: Drafter) -> int:
    "How many tokens a drafter was trained to draft; `LENGTH` where it does not say."
    return getattr(drafter, "trained_tokens", None) or LENGTH


PROMPTS = 8  # prompts decoded at each evaluation, where a caller does not choose


def decoded_acceptance(
    verifier: Verifier,  # the target model; moved to the drafter's device when it decodes
    prompts: Sequence[list[int] | Refused],  # token ids of each request
    k: int | None = None,  # tokens to draft in each step; None: `draft_length`
    max_new_tokens: int = 64,  # output limit of a request
    eos_token_ids: Collection[int] = (),  # token ids that end an output
) -> Callable[[Any], dict[str, float]]:  # model -> mean_length, accepted_1, …, accepted_k
    """A function that decodes the prompts greedily with a model's drafter: mean acceptance
    length (verifier's token included), share of steps that accept position 1, …, k. Errors:
    ValueError for prompts or options with which acceptance cannot be measured."""
    check_measurement(LENGTH if k is None else k, prompts, max_new_tokens=max_new_tokens)
    kept: Any = [prompts[i] for i in measurable(verifier, prompts)[0]]

    def measure(model) -> dict[str, float]:
        drafter = model.drafter()
        depth = k or draft_length(drafter)
        tapped = Verifier(verifier.model.to(model.device), drafter.aux_layer_ids or None)
        answers = decode_prompts(
            tapped,
            {"drafter": drafter},
            kept,
            temperature=0.0,
            k=depth,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
        )
        decoded = [answer["drafter"] for answer in answers]
        rates = acceptance_table(decoded, depth).set_index("position").unconditional
        length = acceptance_summary(decoded, depth)["mean_length"]
        return {"mean_length": float(length)} | {f"accepted_{i}": float(r) for i, r in rates.items()}

    return measure
