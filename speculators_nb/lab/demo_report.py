"""The demo's report: headline numbers, answers to step through, acceptance with intervals.
And what was trained: curves, step weights, mask, cost, and the commands that make it again."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure

from ..core.files import save_figure
from ..core.plot import closed_axes, plot_acceptance, plot_loss, plot_step_weights
from ..core.provenance import versions
from ..data.packing import collate
from ..decode.generate import Generation
from ..evaluate.acceptance import PLAIN, Evaluation
from ..nn.supervision import exponential
from ..report.page import Headline, Section
from ..widgets.debugger import debug
from ..widgets.mask_explorer import explore_mask
from ..widgets.widget import embed
from .experiment import with_interval


def headlines(evaluation: Evaluation, name: str) -> list[Headline]:
    """Mean acceptance length, first acceptance and identical texts, and tokens a second where they were timed, at
    temperature 0, of a drafter; the evaluation is of it and of decoding without one."""
    summary, positions = (
        t[(t.drafter == name) & (t.temperature == 0)] for t in (evaluation.summary, evaluation.positions)
    )
    total = summary[summary.domain == "all"].iloc[0]
    first, last = positions.iloc[0], positions.iloc[-1]
    answers, plain = (evaluation.generations[n, 0.0] for n in (name, PLAIN))
    same = sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True))
    interval = f"[{total.mean_length_low:.2f}, {total.mean_length_high:.2f}]"
    ends = f"[{first.unconditional_low:.0%}, {first.unconditional_high:.0%}]"
    numbers = [
        Headline(
            f"{total.mean_length:.2f}",
            "tokens a step",
            f"Written by one forward pass of the verifier, greedily; 95 % interval {interval}. "
            "Without a drafter it is 1.",
        ),
        Headline(
            f"{first.unconditional:.0%}",
            "of first draft tokens accepted",
            f"95 % interval {ends}; {last.unconditional:.0%} of steps accept all {last.position} draft tokens.",
        ),
        Headline(
            f"{same} of {len(answers)}",
            "greedy texts unchanged",
            "Token for token those of the verifier alone: a drafter changes how many forward "
            "passes a text takes, and not the text.",
        ),
    ]
    speed = evaluation.performance
    if len(speed):
        speed = speed[(speed.drafter == name) & (speed.temperature == 0)].iloc[0]
        numbers.append(
            Headline(
                f"{speed.speedup:.2f} ×",
                "as fast as without a drafter",
                f"{speed.tokens_per_second:.0f} tokens a second in this process; 95 % interval "
                f"[{speed.speedup_low:.2f}, {speed.speedup_high:.2f}].",
            )
        )
    return numbers


def one_of_each(domains: Sequence[str] | None, n: int) -> list[int]:
    """The first prompt of each domain, at most n, ascending; None: there are no domains, and these are the first
    prompts."""
    first = {d: i for i, d in reversed([*enumerate(domains)])} if domains else range(n)
    return sorted(first.values() if isinstance(first, dict) else first)[:n]


def answers_section(answers: Mapping[str, Generation], tokenizer, name: str) -> Section:
    "Answers with records, by their questions, to step through; the first one unfolded."
    parts = []
    for i, (question, answer) in enumerate(answers.items()):
        heading = f"<summary>{escape(question)}</summary>"
        parts.append(f"<details{'' if i else ' open'}>{heading}")
        parts += [debug({name: answer}, tokenizer), "</details>"]
    text = (
        "A step is one forward pass of the verifier: the drafter proposes a few tokens, the "
        "verifier checks all of them at once, and those that it agrees with are written "
        "together with one token of its own. These are the answers to questions that no "
        "training has seen, decoded greedily.\n\n"
        "Green tokens were drafted and accepted, struck out ones drafted and rejected, bold "
        "ones are the verifier's. Click a step, or move the slider: p is the verifier's "
        "probability of a draft token, q the drafter's. “Worst rejections” leads to where the "
        "drafter was sure of a token that the verifier did not want."
    )
    return Section("Decoding, step by step", text, html=embed(*parts))


def readable_tables(evaluation: Evaluation) -> dict:
    "The tables of an evaluation by their titles as a person reads them: estimates with their intervals."
    is_total = evaluation.summary.domain == "all"
    total, by_domain = evaluation.summary[is_total], evaluation.summary[~is_total]
    positions = evaluation.positions[evaluation.positions.unconditional > 0]

    def per_position(name):
        return positions.assign(rate=with_interval(positions, name)).pivot(
            index=["drafter", "temperature"], columns="position", values="rate"
        )

    setting = ["drafter", "temperature"]
    speed = evaluation.performance
    if len(speed):
        names = {"tokens_per_second": "tokens a second", "faster": "times as fast as without a drafter"}
        speed = speed.assign(faster=with_interval(speed, "speedup")).set_index(setting)
        speed = speed[[*names]].rename(columns=names).round(1)
    lengths = total.assign(length=with_interval(total, "mean_length")).set_index(setting)
    lengths = lengths[["length", "tokens", "steps"]].rename(columns={"length": "mean acceptance length"})
    return {
        "Mean acceptance length": lengths,
        **({"Speed": speed} if len(speed) else {}),
        "Acceptance at each position": per_position("unconditional"),
        "Acceptance at each position, the ones before it accepted": per_position("conditional"),
        "Mean acceptance length by domain": by_domain.pivot_table(
            index=["temperature", "domain"], columns="drafter", values="mean_length"
        ).round(2),
    }


def acceptance_section(evaluation: Evaluation) -> Section:
    "Acceptance at each draft position: a figure for each temperature, and the tables."
    drafts = evaluation.positions.groupby("drafter").unconditional.transform("max") > 0
    figures = {}
    for temperature, rows in evaluation.positions[drafts].groupby("temperature"):
        first = rows[rows.position == 1].sort_values("unconditional").iloc[-1]
        finding = f"{first.drafter}: {first.unconditional:.0%} of first draft tokens accepted"
        alt = f"acceptance at each draft position, temperature {temperature:g}"
        figures[alt] = plot_acceptance(rows, finding)
    text = (
        "How often is a draft token accepted? One at position k helps only if all before it were accepted: bars are "
        "the share of all steps, the line the share of those steps that came so far. Whiskers and brackets are 95 % "
        "intervals over the prompts. At temperature 0 the verifier writes its likeliest token, at temperature 1 it "
        "samples; n-gram drafting copies from the text so far and needs no training."
    )
    return Section("Acceptance by position", text, readable_tables(evaluation), figures)


def trained_step_weights(kwargs: dict) -> list[float] | None:
    """The loss weight of each step, from step 0, that a run trained with, read from the arguments of the model's
    forward pass in training; None: no weight is a fixed number."""
    if "step_weights" in kwargs:
        return list(kwargs["step_weights"])
    if "ttt_step_loss_decay" in kwargs:
        return exponential(kwargs["ttt_step_loss_decay"], torch.arange(kwargs["ttt_steps"])).tolist()
    return None


def weights_finding(weights: Sequence[float]) -> str:
    "What the weights of a run's steps say, in a few words."
    if max(weights) == min(weights):
        return "Every step weighs the same"
    return f"Step {len(weights) - 1} weighs {weights[-1] / weights[0]:.2g} of step 0"


def plot_decoded(log: pd.DataFrame) -> Figure:
    "The mean acceptance length at each evaluation of a training (step, eval_mean_length; gaps as in a Trainer's log)."
    lengths = log.dropna(subset=["eval_mean_length"]).set_index("step").eval_mean_length
    fig, ax = closed_axes()
    ax.plot(lengths, color="#009e73", marker="o")
    ax.axhline(1, color="#777777", linewidth=1, linestyle=":")
    ax.set(xlabel="step", ylabel="mean acceptance length", ylim=(0.9, None))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_title(f"{lengths.iloc[0]:.2f} → {lengths.iloc[-1]:.2f} tokens a step", loc="left")
    return fig


def training_figures(folder: Path, model, sample_row: dict, log: pd.DataFrame, **kwargs) -> dict:
    """What training used, as figures by name that are also saved in the folder: the loss curve and the acceptance that
    was decoded meanwhile (`log` as from `log_table`), the weight of each step where it unrolls steps, the mask of a
    packed row where the drafter has attention; `kwargs` are of the model's forward pass in training."""
    log = log.reset_index()
    figures = {"loss": plot_loss(log, "Loss in training, and on rows held out of it")}
    if "eval_mean_length" in log:
        figures["decoded"] = plot_decoded(log)
    if weights := trained_step_weights(kwargs):
        named = {model.config.speculators_model_type: weights}
        figures["step_weights"] = plot_step_weights(named, weights_finding(weights))
    if hasattr(model, "training_mask"):
        few = kwargs | ({"max_anchors": 12} if "max_anchors" in kwargs else {})  # enough to see
        mask, queries, keys = model.training_mask(sample_row, **few)
        documents = sample_row["document_ids"][0]
        figures["mask"] = mask.draw(
            queries,
            keys,
            documents=documents if queries == len(documents) else None,
            title="Which keys a query attends to in training",
            xlabel="key",
            ylabel="query",
        )
    for name, fig in figures.items():
        save_figure(folder / f"{name}.png", fig, bbox_inches="tight")
    return figures


PIECE = 6  # positions of each sample in the mask that is explored


def last_positions(samples: Sequence[dict], shift) -> dict:
    """A short packed row: the last positions of each sample, which carry a loss, laid out by the model's shift (None:
    it has none)."""
    pieces = [{name: values[-PIECE - 1 :] for name, values in s.items()} for s in samples]
    longest = sum(len(piece["input_ids"]) for piece in pieces)
    row = collate(pieces, longest, shift)
    used = int((row["document_ids"][0] >= 0).sum())
    return {name: values[:, :used] for name, values in row.items()}


def training_sections(folder: Path, model, short_row: dict, **kwargs) -> list[Section]:
    """The curves of a training, its step weights and its mask, a packed row of few positions: those of which
    `training_figures` has left a figure in the folder."""
    there = {n: folder / f"{n}.png" for n in ("loss", "decoded", "step_weights", "mask")}
    there = {name: file for name, file in there.items() if file.exists()}
    curves = {"loss": "loss against steps", "decoded": "mean acceptance length against steps"}
    curves = {shows: there[name] for name, shows in curves.items() if name in there}
    sections = [Section("Training", TRAINING, figures=curves)]
    if "step_weights" in there:
        weights = trained_step_weights(kwargs) or []
        text = f"{WEIGHTS} {weights_finding(weights)}."
        figure = {"loss weight of each step": there["step_weights"]}
        sections.append(Section("Loss weights of the steps", text, figures=figure))
    if "mask" in there:
        few = kwargs | ({"max_anchors": 3} if "max_anchors" in kwargs else {})
        size = model.training_mask(short_row, **few)
        explorer = explore_mask(size, documents=short_row["document_ids"][0])
        picture = {"attention mask of a packed row": there["mask"]}
        html = f"<p>{escape(EXPLORER)}</p>{embed(explorer)}"
        sections.append(Section("What a query attends to", MASK, figures=picture, html=html))
    return sections


TRAINING = (
    "What did training do? The loss says how far the drafter's distributions are from the verifier's, on rows it "
    "trains on and on rows held out. The decoded curve is what the loss stands for: at each evaluation a few held-out "
    "prompts are answered with the drafter of that moment, and the tokens that one forward pass writes are counted. "
    "The dotted line is decoding without a drafter."
)
WEIGHTS = (
    "A draft token helps only if all before it are accepted, so a training may let later steps weigh less in the loss. "
    "These are the weights that this training multiplied its losses with, read from the arguments of its forward pass."
)
MASK = (
    "Which earlier positions does a drafter read while it trains? Several conversations share "
    "one packed row, and all draft steps of all positions are computed at once. The attention "
    "mask keeps them apart: a query may use what would be known when it drafts, and nothing "
    "else. The picture is the mask of this training on three of its shortest conversations."
)
EXPLORER = (
    "The same mask on the last tokens of each, to touch: point at an entry to read which "
    "clause decides about it, and take a clause away to see what would leak."
)


class Budget(NamedTuple):
    "What a run of the demo took."

    conversations: int  # answered by the verifier, to train on
    tokens: int  # of them, questions included
    steps: int  # of the optimizer
    positions: float  # that were trained on, over all epochs
    flops: float  # of training, for each position
    trained: int  # parameters of the drafter that training changes
    verifier: int  # parameters
    seconds: dict[str, float]  # of each stage


def budget_section(budget: Budget) -> Section:
    "Sizes, steps and FLOPs, and the seconds of each stage."
    b = budget
    amounts = {
        "verifier": f"{b.verifier / 1e6:.2f} million parameters",
        "drafter": f"{b.trained / 1e6:.2f} million trained parameters",
        "training answers": f"{b.conversations:,} conversations, {b.tokens:,} tokens",
        "training": f"{b.steps:,} optimizer steps, {b.positions:,.0f} positions",
        "training FLOPs": f"{b.flops * b.positions:.2e} ({b.flops:.2e} a position)",
    }
    seconds = {stage: f"{s:.0f} s" for stage, s in b.seconds.items()}
    seconds["all stages"] = f"{sum(b.seconds.values()):.0f} s"
    tables = {
        "Sizes": pd.DataFrame(amounts.items(), columns=["what", "amount"]),
        "Time on this machine": pd.DataFrame(seconds.items(), columns=["stage", "time"]),
    }
    text = (
        "What did it take? FLOPs are those of the matrix products of forward and backward passes of the drafter in "
        "training. A stage that was interrupted counts from its last start."
    )
    return Section("Cost", text, tables)


def again_section(commands: Sequence[str], commit: str | None) -> Section:
    """The commands, in the order of typing, that make the same again, in a clone at a commit (None: not known), and the
    versions it was made with."""
    lines = [f"git checkout {commit}"] if commit and "-dirty" not in commit else []
    typed = escape("\n".join([*lines, *commands]))
    used = versions().items()
    tables = {"Versions": pd.DataFrame(used, columns=["package", "version"])}
    text = (
        "The first command writes this report again, in a clone of the project; the others use the drafter. Seeds are "
        "fixed: the same versions on the same kind of processor give the same numbers."
    )
    return Section("Make it again", text, tables, html=f"<pre tabindex=0>{typed}</pre>")
