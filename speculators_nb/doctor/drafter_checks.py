"""Checks of a drafter: its weights, head, config flags and draft length, its training history, and its acceptance.
The history predicts that, the decoder measures it and an engine counts it, by position and domain."""

import copy
import inspect
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from ..core.config import SpeculatorModelConfig
from ..core.plot import plot_loss
from ..core.registry import DynamicTreeTokenProposalConfig
from ..data.packing import collate
from ..decode.generate import Generation
from ..decode.proposal_setup import TreeDrafter
from ..evaluate.acceptance import Evaluation, evaluate
from ..evaluate.engine import read_table
from ..features.feature_rows import FeatureRows
from ..models.base import SpeculatorModel
from ..nn.supervision import by_position
from ..verifier.parts import load_verifier_tensors
from ..verifier.tapped_model import Verifier
from .data_checks import Finding, Rows, judged, unchecked

FEW_VALUES = 256  # of eight bits
LOOKED_AT = 1 << 16  # values of a matrix


def coarse_matrices(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    "Matrices of a checkpoint that went through a low precision: name -> different values."
    found = {}
    for name, w in state.items():
        if w.ndim == 2 and w.is_floating_point() and w.numel() >= 16 * FEW_VALUES:
            values = w.flatten()[:LOOKED_AT].float().unique().numel()
            if 1 < values <= FEW_VALUES:
                found[name] = values
    return found


def is_untrained(layer: torch.nn.Module) -> bool:
    "Whether all norms are of exact ones, or all matrices of exact zeros."
    weights = [p.detach() for p in layer.parameters()]
    norms = [bool((w == 1).all()) for w in weights if w.ndim == 1]
    matrices = [bool((w == 0).all()) for w in weights if w.ndim == 2]
    return any(same and all(same) for same in (norms, matrices))


def weights_check(model: SpeculatorModel, state: Mapping[str, torch.Tensor]) -> Finding:
    "Whether the weights are trained, and stored in full in the checkpoint `state`."
    layers: Any = getattr(model, "layers", ())
    if untrained := [f"layer {i}" for i, layer in enumerate(layers) if is_untrained(layer)]:
        exact = f"{', '.join(untrained)} of {len(layers)}: norms of exact ones or matrices of exact zeros"
        remedy = "save the trained checkpoint again; look at the keys that were renamed or merged"
        return judged("weights", True, f"{exact}, as before training", remedy)
    coarse = coarse_matrices(state)
    dtypes = sorted({str(w.dtype).removeprefix("torch.") for w in state.values() if w.ndim == 2})
    few = f"{len(coarse)} matrices have {min(coarse.values(), default=0)} different values or a few more"
    return judged(
        "weights",
        bool(coarse),
        few if coarse else f"{len(state)} tensors, {', '.join(dtypes)}, all trained and of full precision",
        "save the checkpoint from the training run in bfloat16 or more (save_dtype)",
    )


def forward_options(model: SpeculatorModel, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `forward` that the drafter was evaluated with, by "model" of run.json; none that only says how to
    compute."""
    takes = inspect.signature(type(model).forward).parameters
    names = takes.keys() - {"gemm_dtype", "attn_impl", "lean", "step_weights"}
    return {name: value for name, value in recorded.items() if name in names}


Batch = dict[str, torch.Tensor]
BATCHES, LENGTH = 2, 1024  # held-out batches, positions in each


def heldout_batches(model: SpeculatorModel, features: FeatureRows, rows: list[int]) -> list[Batch]:
    "The first of these rows that fill the batches, packed as training packs them."
    features.choose(list(model.drafter().aux_layer_ids))
    packs, used = [[]], 0
    for i in rows:
        sample = features[i]
        used += len(sample["input_ids"])
        if packs[-1] and used > LENGTH:
            if len(packs) == BATCHES:
                break
            packs.append([])
            used = len(sample["input_ids"])
        packs[-1].append(sample)
    return [collate(pack, LENGTH, model.shift, torch.float32) for pack in packs if pack]


class Measurement(NamedTuple):
    "A drafter on held-out rows."

    loss: float  # mean over the batches
    first: float  # share of right tokens at the first draft position; NaN: not known
    length: float  # mean acceptance length that the accuracies predict; NaN: not known
    tokens: float = math.inf  # at the first draft position


def first_name(metrics: Iterable[str], prefix: str = "") -> str | None:
    """Of metrics the accuracy at the first draft position, whatever the drafter calls it; None: there is none.
    `prefix`: of the names, "eval_" in a history."""
    return next(iter(by_position(metrics, prefix, "full_acc|position")), None)


def first_accuracy(metrics: Mapping[Any, float], prefix: str = "") -> float:
    "The value of `first_name`; NaN: there is none."
    name = first_name(metrics, prefix)
    return math.nan if name is None else float(metrics[name])


def predicted_length(metrics: Mapping[Any, float], prefix: str = "", k: int | None = None) -> float:
    """Mean acceptance length (tokens a step, the bonus token counted) of k draft tokens (None: of all that were
    trained) if they were accepted as often as they are right on the rows; NaN: not known."""
    if f"{prefix}eal" in metrics:  # of whole blocks
        block = len(by_position(metrics, prefix, "position"))
        return float(metrics[f"{prefix}eal"]) if k is None or k >= block else math.nan
    chain = by_position(metrics, prefix, "full_acc")
    return 1 + float(sum(metrics[name] for name in chain[:k])) if chain else math.nan


@torch.no_grad()
def measure(model: SpeculatorModel, batches: list[Batch], options: Mapping[str, Any]) -> Measurement:
    "Loss and accuracy on held-out batches, with these arguments of `forward`."
    losses, sums = [], {}
    for batch in batches:
        torch.manual_seed(0)  # anchors are drawn
        out = model(**batch, **options)
        losses.append(float(out.loss))
        for name, value in out.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    means = {
        n.removesuffix("_sum"): value / max(sums[f"{n.removesuffix('_sum')}_total"], 1e-9)
        for n, value in sums.items()
        if n.endswith("_sum")
    }
    loss = sum(losses) / max(len(losses), 1)
    tokens = sums.get(f"{first_name(means)}_total", math.inf)
    return Measurement(loss, first_accuracy(means), predicted_length(means), tokens)


GAIN = 0.97  # loss after a repair over the loss before it


def repairs(
    model: SpeculatorModel, state: Mapping[str, torch.Tensor], verifier: str | os.PathLike
) -> Iterator[tuple[str, str, SpeculatorModel]]:
    """Everything that can be put right without training, one thing at a time: the stage (head or convention), what was
    changed, and the drafter with it. `state`: of its checkpoint; `verifier`: folder or hub id."""
    if not model.own_heads:
        parts = load_verifier_tensors(verifier, model.t2d)
        for name, part in (("lm_head.weight", "head"), ("embed_tokens.weight", "embeddings")):
            if not torch.equal(model.get_parameter(name).float(), parts[part].float()):
                changed = copy.deepcopy(model)
                changed.get_parameter(name).data.copy_(parts[part].to(model.dtype))
                yield "head", f"the verifier's {part}", changed
    fields = set(type(model.config).__dataclass_fields__)
    fields -= {*SpeculatorModelConfig.__dataclass_fields__, "embed_requires_grad"}
    for name in sorted(fields):
        value = getattr(model.config, name)
        if not isinstance(value, bool):
            continue
        config: Any = copy.deepcopy(model.config)
        setattr(config, name, not value)
        try:
            config.check()
            changed = type(model).from_pretrained(config=config, state_dict=dict(state), verifier=verifier)
        except (ValueError, TypeError):  # the flag brings or takes weights: it is as trained
            continue
        yield "convention", f"{name}={not value}", changed.to(model.dtype).eval()


def repair_checks(model: SpeculatorModel, state, verifier, batches: list[Batch], options) -> list[Finding]:
    """Whether one of `repairs` makes the drafter better on held-out batches, with these arguments of `forward`: a
    finding of head, one of convention."""
    before = measure(model, batches, options).loss
    best: dict[str, tuple[float, str]] = {}
    for stage, what, changed in repairs(model, state, verifier):
        loss = measure(changed, batches, options).loss
        best[stage] = min(best.get(stage, (loss, what)), (loss, what))
    own = "its heads are its own" if model.own_heads else "head and embedding are the verifier's"
    flags = "no flag of the config could be another"
    found = []
    for stage, fine, remedy in (
        ("head", own, "copy {} into the checkpoint, or train again"),
        ("convention", flags, "write {} into config.json: it was trained so"),
    ):
        loss, what = best.get(stage, (before, ""))
        evidence = f"held-out loss {before:.3f}; with {what} {loss:.3f}" if what else fine
        found.append(judged(stage, loss < GAIN * before, evidence, remedy.format(what)))
    return found


LEAST_KEPT = 0.85  # accuracy now over accuracy in the history


def last_evaluation(history: pd.DataFrame) -> dict[Any, Any]:
    "The last held-out metrics of a training_log.csv; empty: it has none."
    evals = history.filter(regex="^eval_").dropna(how="all")
    return evals.iloc[-1].to_dict() if len(evals) else {}


def history_check(now: Measurement, history: pd.DataFrame) -> Finding:
    """Whether the folder does what its history (training_log.csv) says. Other rows were looked at than here, so
    two standard errors are chance."""
    then = first_accuracy(last_evaluation(history), "eval_")
    if not then > 0 or now.first != now.first or not now.tokens:
        return unchecked("convention", "the history has no held-out accuracy")
    chance = 2 * math.sqrt(max(then * (1 - then), 0) / now.tokens)
    return judged(
        "convention",
        now.first < min(LEAST_KEPT * then, then - chance),
        f"first draft token right at {now.first:.0%} of held-out positions, {then:.0%} when it was saved",
        "weights or config are not those of this run: take its checkpoint again",
    )


def mapping_check(model: SpeculatorModel, verifier: str | os.PathLike) -> Finding:
    "Whether the rows of a reduced head are those that the mapping names."
    if model.t2d is None:
        return Finding("vocabulary", "ok", "no mapping: the whole vocabulary is drafted")
    head = torch.nn.functional.normalize(load_verifier_tensors(verifier)["head"].float(), dim=-1)
    rows = torch.linspace(0, model.draft_vocab_size - 1, 256).long().unique()
    own = torch.nn.functional.normalize(model.lm_head.weight.detach()[rows].float(), dim=-1)
    nearest = (own @ head.T).max(-1)
    named = model.to_verifier(rows)
    right = (nearest.indices == named).float().mean().item()
    alike = nearest.values.mean().item()
    if alike < 0.9:
        return Finding("vocabulary", "note", f"the head is its own (cosine {alike:.2f})")
    return judged(
        "vocabulary",
        right < 0.5,
        f"{right:.0%} of {len(rows)} head rows are the verifier's rows of the tokens that d2t names",
        "take t2d and d2t of the data that the drafter was trained on (d2t-N.npy beside it)",
    )


def trained_length(model: SpeculatorModel, recorded: Mapping[str, Any]) -> int | None:
    'How many tokens the drafter was trained to draft, by "model" of run.json; None: not known.'
    known = vars(model.config) | dict(recorded)
    if type(model).drafted_by not in known:
        return None
    return type(model).tokens_to_draft(type(model).training_arguments() | known)


def length_check(model: SpeculatorModel, recorded: Mapping[str, Any]) -> Finding:
    'Whether the engine would draft more tokens than were trained, by "model" of run.json.'
    served = model.config.speculators_config.speculative_tokens
    trained = trained_length(model, recorded)
    if trained is None:
        return unchecked("draft length", "run.json does not say the trained steps")
    return judged(
        "draft length",
        served > trained,
        f"config.json asks for {served} draft tokens, {trained} were trained",
        f"set speculative_tokens to {trained} in config.json (or k={trained} when serving), or "
        f"train with {type(model).drafted_by} for {served}",
    )


AHEAD = 2  # positions from the state that is read to the first draft token


def _pairs(rows: Rows) -> Iterator[tuple[int, int]]:
    "(token, the trained token two positions later)."
    for ids, mask in rows:
        trained = mask[AHEAD:]
        yield from zip(ids[:-AHEAD][trained].tolist(), ids[AHEAD:][trained].tolist())


def pair_accuracy(rows: Rows, heldout: Rows) -> float:
    """How often the commonest token of `rows` two positions after a token is the right one: share of the trained tokens
    of `heldout`; NaN: none."""
    counts: dict[int, Counter] = defaultdict(Counter)
    for token, later in _pairs(rows):
        counts[token][later] += 1
    commonest = {token: c.most_common(1)[0][0] for token, c in counts.items()}
    right = [commonest.get(token) == later for token, later in _pairs(heldout)]
    return float(np.mean(right)) if right else math.nan


def column(history: pd.DataFrame, name: str) -> pd.Series:
    "The values of a column that are known; empty: there is no such column."
    return history[name].dropna() if name in history else pd.Series(dtype=float)


def last_of(history: pd.DataFrame, name: str) -> float:
    "The last value of a column; NaN: there is none."
    values = column(history, name)
    return float(values.iloc[-1]) if len(values) else math.nan


LEAST_LEARNED = 0.5  # of the table's accuracy
FEW_STEPS = 100  # steps that say nothing about a learning rate
HIGH_RATE = 1e-3  # a learning rate that is not raised tenfold


def learned_check(history: pd.DataFrame, table: float, settings: Mapping[str, Any] | None = None) -> Finding:
    """Whether the drafter knows what a table of token pairs knows (`pair_accuracy`), by the training_log.csv and
    settings of its run."""
    metrics, logged = last_evaluation(history), history.dropna(how="all")
    reached = first_accuracy(metrics, "eval_")
    if not metrics and len(logged):
        reached = first_accuracy(logged.iloc[-1].to_dict())
    if reached != reached or table != table:
        return unchecked("training", "no accuracy in the history, or no rows")
    rate = column(history, "learning_rate").max()
    if rate != rate:  # the run ended before `logging_steps`
        rate = (settings or {}).get("learning_rate") or math.nan
    steps = int(history["step"].max()) if "step" in history else len(history)
    norms = column(history, "grad_norm")
    grown = norms.iloc[-1] / norms.iloc[0] if len(norms) > 1 else 1.0
    if grown > 2 or not np.isfinite(norms).all():
        remedy = f"lower the learning rate: the gradient norm grew {grown:.1f} times"
    elif steps < FEW_STEPS or rate >= HIGH_RATE:
        remedy = "train for more steps: a larger num_train_epochs, or more conversations"
    else:
        remedy = "raise the learning rate tenfold, and look at the first hundred steps; then train for more steps"
    shown = "" if rate != rate else f", learning rate {rate:.1g}"
    return judged(
        "training",
        not reached > LEAST_LEARNED * table,
        f"first draft token right at {reached:.0%} of held-out positions, a table of token "
        f"pairs at {table:.0%}; {steps} steps{shown}",
        remedy,
    )


MOST_GAP = 0.25  # of the held-out loss
# epochs -> gap, of docs/how_much_data.md
MEASURED_GAPS = {17.6: 0.71, 8.8: 0.31, 4.6: 0.13, 2.4: -0.02}


class Curve(NamedTuple):
    "Where a run ended."

    train: float  # last training loss
    last: float  # held-out loss at the end
    fall: float  # share by which the training loss fell in the second half of the steps
    doubling: float  # share by which the held-out loss fell after the first half; NaN: not known

    @property
    def gap(self) -> float:  # of the held-out loss
        return 1 - self.train / self.last if self.last else math.nan


def learning_curve(history: pd.DataFrame) -> Curve:
    "The ends of the two curves of a training_log.csv."
    trained = column(history, "loss")
    middle = trained.iloc[len(trained) // 2] if len(trained) > 2 else math.nan
    end, last = last_of(history, "loss"), last_of(history, "eval_loss")
    half = math.nan
    if "step" in history:
        half = last_of(history[history["step"] <= history["step"].max() / 2], "eval_loss")
    return Curve(end, last, 1 - end / middle, 1 - last / half)


def data_check(history: pd.DataFrame, n: int | None = None, tokens: int | None = None) -> Finding:
    """Whether there are enough data for the steps of a training_log.csv, beside the measured curve. `n`: conversations
    that were trained on, `tokens`: of their answers; None: not known."""
    curve = learning_curve(history)
    if curve.last != curve.last:
        return unchecked("data size", "the history has no held-out loss")
    if curve.gap != curve.gap:
        return unchecked("data size", "the history has no training loss: the run was shorter than logging_steps")
    rows = f"{n} conversations, " if n is not None else ""
    rows += f"{tokens} trained tokens, " if tokens is not None else ""
    measured = ", ".join(f"{gap:.0%} at {e:g} epochs" for e, gap in MEASURED_GAPS.items())
    way = "fell" if curve.doubling >= 0 else "rose"
    slope = f"; the held-out loss {way} by {abs(curve.doubling):.0%} since the last evaluation of the first half"
    slope = "" if math.isnan(curve.doubling) else slope
    epochs = last_of(history, "epoch")
    return judged(
        "data size",
        curve.gap > MOST_GAP,
        f"{rows}{epochs:.3g} epochs: loss {curve.train:.3g} on trained rows, {curve.last:.3g} "
        f"on held-out ones (gap {curve.gap:.0%}; the guide's curve: {measured}); the former "
        f"fell by {curve.fall:.0%} in the second half{slope}",
        "more conversations and fewer epochs; let the verifier answer more questions (speculators-nb regenerate)",
    )


def plot_history(history: pd.DataFrame) -> Figure:
    "Training and held-out loss of a training_log.csv over steps."
    fall = learning_curve(history).fall
    fell = f"The loss fell by {fall:.0%} in the second half of the run"
    log = history if "step" in history else history.assign(step=range(len(history)))
    return plot_loss(log, "The loss over the training steps" if math.isnan(fall) else fell)


MOST_NEW = 48  # tokens written for a prompt


class Decoded(NamedTuple):
    "What the decoder of this library accepted."

    evaluation: Evaluation  # greedy, by position and domain
    k: int  # tokens drafted a step
    name: str  # of the drafter

    @property
    def length(self) -> float:
        "Mean acceptance length over all prompts."
        table = self.evaluation.summary
        return float(table[table.domain == "all"].mean_length.iloc[0])

    @property
    def answers(self) -> list[Generation]:
        "What the verifier wrote to the prompts that it could read."
        return self.evaluation.generations[self.name, 0.0]

    @property
    def rates(self) -> list[float]:
        "Share of the tried draft tokens that is accepted, by position."
        return self.evaluation.positions.conditional.tolist()


def decode(
    verifier: Verifier, drafter: Any, name: str, prompts: list[list[int]], k: int, eos_token_ids=(), domains=None
) -> Decoded:
    "Greedy decoding of a few prompts, k tokens a step, as by `evaluate`; the verifier taps what the drafter reads."
    most, stop = max(MOST_NEW, k + 2), set(eos_token_ids)
    evaluation = evaluate(
        verifier, {name: drafter}, prompts, k=k, max_new_tokens=most, domains=domains, eos_token_ids=stop
    )
    return Decoded(evaluation, k, name)


LEAST_ACCEPTED = 0.6  # accepted draft tokens a step over those predicted
LEAST_HELD = 0.25  # acceptance at a position, over that at the one before


def cliff(decoded: Decoded) -> int | None:
    """The first position (from 1) that is accepted much less often than the one before: the upper end of its 95 %
    interval counts, of drafts that were right up to there, and no less than 3 / n, which is that of none of n. None:
    there is none."""
    table, steps = decoded.evaluation.positions, decoded.evaluation.requests.steps.sum()
    rates, high = table.conditional.tolist(), table.conditional_high.tolist()
    for i in range(1, len(rates)):
        reached = table.unconditional[i - 1] * steps
        if reached and max(high[i], 3 / reached) < LEAST_HELD * rates[i - 1]:
            return i + 1
    return None


def acceptance_check(decoded: Decoded, predicted: float, trained: int | None = None) -> Finding:
    """Whether decoding accepts what training promised, and where drafts end. `predicted`: mean acceptance length from
    held-out accuracy, NaN: not known; `trained`: tokens that it was trained to draft, None: not known."""
    rates = ", ".join(f"{rate:.2f}" for rate in decoded.rates if rate == rate)
    steps = f"{decoded.k} drafted" + (f", {trained} trained" if trained else "")
    measured = f"{decoded.length:.2f} tokens a step here (accepted by position: {rates}; {steps})"
    if position := cliff(decoded):
        return judged(
            "acceptance",
            True,
            f"{measured}; position {position} is accepted less than a quarter as often as the one before",
            f"draft {position - 1} tokens, or train the later positions: more steps of "
            "training-time test, a larger weight for them",
        )
    if predicted != predicted:
        return Finding("acceptance", "note", measured)
    return judged(
        "acceptance",
        decoded.length - 1 < LEAST_ACCEPTED * (predicted - 1),
        f"{measured}, {predicted:.2f} predicted by held-out accuracy",
        "compare the prompts with the training data (--data), and the drafter's features in "
        "decoding with those it was trained on",
    )


LEAST_SEEN = 0.5  # share of triples, over that of the best domain


def triples(tokens: list[int]) -> set[tuple[int, int, int]]:
    "Every three tokens in a row."
    return set(zip(tokens, tokens[1:], tokens[2:]))


def seen_by_domain(decoded: Decoded, rows: Rows) -> pd.DataFrame:
    """How much of what the verifier writes in a domain the training answers hold: domain -> seen (share of triples),
    mean_length, prompts. `rows`: all training rows."""
    known = {triple for ids, mask in rows for triple in triples(ids[mask].tolist())}
    domains = decoded.evaluation.requests.domain  # of each answer
    lengths = decoded.evaluation.summary.set_index("domain").mean_length  # one without a step has none
    lines = {}
    for domain in sorted({*domains} & {*lengths.index}):
        own = [g for g, d in zip(decoded.answers, domains, strict=True) if d == domain]
        written = [t for g in own for t in triples(g.tokens)]
        seen = sum(t in known for t in written) / max(len(written), 1)
        lines[domain] = dict(seen=seen, mean_length=lengths[domain], prompts=len(own))
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("domain")


def domains_check(table: pd.DataFrame) -> Finding:
    "Whether a domain is missing from the training data, by `seen_by_domain`."
    if len(table) < 2:
        return unchecked("domains", "prompts of one domain, or of unknown ones")
    unseen = table[table.seen < LEAST_SEEN * table.seen.max()]
    weak = unseen[unseen.mean_length < table.mean_length.max()]
    shown = ", ".join(f"{name} {row.mean_length:.2f} ({row.seen:.0%} seen)" for name, row in table.iterrows())
    return judged(
        "domains",
        len(weak) > 0,
        f"tokens a step, and share of the verifier's triples in the training answers: {shown}",
        f"add conversations like these to the training data: {', '.join(map(str, weak.index))}",
    )


def tree_note(
    verifier: Verifier, drafter: Any, decoded: Decoded, prompts: list[list[int]], eos_token_ids=()
) -> Finding:
    "The prompts that were decoded as a chain with a dynamic tree of four nodes for each of its tokens."
    if not callable(getattr(drafter, "grow", None)):
        return unchecked("tree", "this drafter drafts chains only")
    nodes = 4 * decoded.k
    method = DynamicTreeTokenProposalConfig(speculative_tokens=nodes, expansion_factor=4, depth=decoded.k)
    grown = decode(verifier, TreeDrafter(drafter, method), decoded.name, prompts, decoded.k, eos_token_ids)
    tree = f"a tree of {nodes} nodes accepts {grown.length:.2f} tokens a step"
    return Finding("tree", "note", f"{tree}, a chain of {decoded.k} {decoded.length:.2f}")


LEAST_SERVED = 0.85  # the engine's mean length over the one here


def engine_check(folder: str | os.PathLike, decoded: Decoded | None) -> Finding:
    """Whether an engine, by the folder of its evaluation, accepts what the decoder here accepts (None: not measured):
    the row of this drafter and draft length where there is one, of the lowest temperature. Errors: as from
    `read_table`."""
    table = read_table(Path(folder) / "summary.csv")
    total = table[table.domain == "all"].sort_values(["temperature", "concurrency"], kind="stable")
    wanted = [total.k > 0]
    if decoded is not None:
        wanted += [total.drafter == decoded.name, total.k == decoded.k]
    for alike in wanted:
        best = total[alike.loc[total.index]]
        total = best if len(best) else total
    row = total.iloc[0]
    k, length = int(row.k), float(row.mean_length)
    evidence = f"{Path(folder).name}: {length:.2f} tokens a step" + (f" with k={k}" if k else "")
    if decoded is None:
        return Finding("engine", "note", evidence)
    if k != decoded.k:
        return Finding("engine", "note", f"{evidence}; here k={decoded.k}: not comparable")
    if row.temperature:
        return Finding("engine", "note", f"{evidence} at temperature {row.temperature:g}; here 0: not comparable")
    return judged(
        "engine",
        length < LEAST_SERVED * decoded.length,
        f"{evidence}, {decoded.length:.2f} here",
        "serve with the dtype and config that were trained, on the same prompts: "
        "speculators-nb check, then evaluate --as-engine to compare to the digit",
    )
