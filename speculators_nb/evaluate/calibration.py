"""Confidence calibration: one temperature per draft position, fitted on held-out prompts.
nbs/evaluate/06_calibration.ipynb shows it at work, and what a draft that stops by it gains."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from ..core.options import check_options
from ..core.plot import closed_axes
from ..verifier.tapped_model import Verifier
from .acceptance import check_measurement, decode_prompts
from .cost import Metered

# among which a fit chooses; neighbours differ by 2.3 %
TEMPERATURES = torch.logspace(-1, 1, 201)
FEWEST = 30  # steps at a position, for a fit of its temperature


def fit_temperatures(logits: Tensor, accepted: Tensor, written: Tensor) -> Tensor:
    """For each position the temperature, [k], of least binary cross-entropy between sigmoid(logit / T) and acceptance,
    over the steps that accepted all before: logits [N, k] of the confidence head, accepted [N] draft tokens of each
    step, and written [N] tokens, as of `Confidences`. Errors: ValueError where too few steps got there."""
    temperatures = []
    for position, logit in enumerate(logits.T):
        reached = written > position
        if (steps := int(reached.sum())) < FEWEST:
            raise ValueError(
                f"position {position + 1} was reached by {steps} steps, and a temperature needs {FEWEST}; raise "
                "max_samples or max_new_tokens"
            )
        scaled = logit[reached] / TEMPERATURES[:, None]
        happened = (accepted[reached] > position).float().expand_as(scaled)
        errors = F.binary_cross_entropy_with_logits(scaled, happened, reduction="none")
        temperatures.append(TEMPERATURES[errors.mean(-1).argmin()])
    return torch.stack(temperatures)


def survival(logits: Tensor, temperatures: Tensor) -> Tensor:
    "The forecast [N, k] that a token and all before it are accepted, by logits [N, k], temperatures [k] or one."
    return (logits / temperatures).sigmoid().cumprod(-1)


def all_accepted(accepted: Tensor, k: int) -> Tensor:
    "What `survival` forecasts: [N, k] bool, of accepted [N]."
    return accepted[:, None] > torch.arange(k)


def within_text(accepted: Tensor, written: Tensor, k: int) -> Tensor:
    "Where it is known what became of a forecast: [N, k] bool, all but what is behind an accepted stop token."
    return all_accepted(written, k) | (written > accepted)[:, None]


def reliability_table(forecast: Tensor, happened: Tensor, bins: int = 10) -> pd.DataFrame:
    """Forecasts (probabilities of any shape) beside what happened, [same shape]: forecast, accepted, n of each bin that
    is not empty; bins are of equal width. Errors: ValueError for no forecast."""
    check_options(dict(bins=bins), "reliability_table")
    if not forecast.numel():
        raise ValueError("forecast is empty: there is nothing to measure")
    forecast, happened = forecast.flatten(), happened.flatten().float()
    bin_of = (forecast * bins).long().clamp_max(bins - 1)
    table = pd.DataFrame(dict(bin=bin_of, forecast=forecast, accepted=happened))
    means = table.groupby("bin")[["forecast", "accepted"]].mean()
    return means.assign(n=table.groupby("bin").size())


def expected_calibration_error(forecast: Tensor, happened: Tensor, bins: int = 15) -> float:
    "Mean distance between a bin's forecast and what happened (1706.04599); as many bins as SGLang counts."
    table = reliability_table(forecast, happened, bins)
    return float(np.average((table.forecast - table.accepted).abs(), weights=table.n))


def plot_reliability(forecasts: Mapping[str, Tensor], happened: Tensor) -> Figure:
    """A reliability diagram of named forecasts, each of the shape of `happened`: on the diagonal a forecast is honest.
    Whiskers: 95 %. Bins of fewer than 20 forecasts are left out."""
    fig, ax = closed_axes(4.6, 3.8)
    ax.plot([0, 1], [0, 1], color="#888888", lw=1)
    errors = []
    for name, forecast in forecasts.items():
        table = reliability_table(forecast, happened).query("n >= 20")
        spread = 1.96 * (table.accepted * (1 - table.accepted) / table.n) ** 0.5
        ax.errorbar(table.forecast, table.accepted, spread, fmt="o-", capsize=2, label=name)
        errors.append(f"{name} {expected_calibration_error(forecast, happened):.3f}")
    ax.legend(frameon=False)
    ax.set(xlabel="forecast: all accepted so far", ylabel="share that was", xlim=(0, 1), ylim=(0, 1))
    ax.set_title(f"Calibration error: {', '.join(errors)}", loc="left")
    return fig


class Confidences(NamedTuple):
    "Steps of a drafter with a confidence head."

    logits: Tensor  # [N, k], before any temperature
    accepted: Tensor  # [N] draft tokens that were accepted, none behind a stop token
    written: Tensor  # [N] tokens of the text: one more, the verifier's, unless a stop token was accepted
    prompt: Tensor  # [N] number of the step's prompt


def record_confidences(
    verifier: Verifier,  # taps the drafter's layers
    drafter: Any,  # has `confidence_logits` of its last draft; stops nowhere
    prompts: list,  # token ids of each request, held out from training
    k: int,  # tokens drafted in a step
    temperature: float = 1.0,  # of the answers
    max_new_tokens: int = 64,  # of each
    eos_token_ids: Collection[int] = (),  # token ids that end an answer
    seed: int = 0,  # of the sampling
) -> Confidences:
    "Decode prompts, and keep what the head said of each step."
    check_measurement(k, prompts, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)

    def logits_of(propose):
        propose()
        return drafter.confidence_logits.cpu()

    recorded = Metered(drafter, logits_of)
    answers = decode_prompts(
        verifier,
        {"drafter": recorded},
        prompts,
        temperature,
        seed=seed,
        k=k,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
    )
    logits, accepted, written, prompt = [], [], [], []
    for i, answer in enumerate(answers):
        steps = [step for step in answer["drafter"].steps if step.requested]
        for step, (_, logit) in zip(steps, recorded.costs, strict=True):
            if step.requested == k:
                logits.append(logit)
                accepted.append(min(step.accepted, len(step.tokens)))
                written.append(len(step.tokens))
                prompt.append(i)
        recorded.costs.clear()
    if not logits:
        raise ValueError(f"max_new_tokens={max_new_tokens}: no step drafted k={k} tokens; raise it")
    return Confidences(torch.stack(logits), torch.tensor(accepted), torch.tensor(written), torch.tensor(prompt))


def calibration_file(steps: Confidences, temperatures: Tensor, dataset: str = "") -> dict[str, Any]:
    """Temperatures [k] of `fit_temperatures`, and the calibration error of each position's product before and after, as
    SGLang's `DSparkStsCalibration` reads them. `dataset`: what was decoded."""
    k = steps.logits.shape[1]
    happened = all_accepted(steps.accepted, k)
    known = within_text(steps.accepted, steps.written, k)

    def errors(temperatures):
        positions = zip(survival(steps.logits, temperatures).T, happened.T, known.T)
        return [round(expected_calibration_error(f[there], h[there]), 4) for f, h, there in positions]

    return dict(
        temperatures=[round(t, 4) for t in temperatures.tolist()],
        dataset=dataset,
        num_samples=len(steps.accepted),
        ece_before=errors(torch.ones_like(temperatures)),
        ece_after=errors(temperatures),
    )
