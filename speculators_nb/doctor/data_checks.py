"""A finding names the stage that loses, its number, the remedy, and the page that explains it; and checks of data.
These are prompt, loss mask, on-policy answers, draft vocabulary, and hidden states against the verifier that serves."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ..features.feature_folder import FeatureDataset
from ..features.in_process import states_of
from ..verifier.identity import head_of, same_weights, stored_fingerprint
from ..verifier.tapped_model import Verifier

STAGES = {  # in the order of the chain -> the notebook that explains it
    "verifier": "speculators_nb/verifier/identity.py",
    "template": "nbs/data/01_chat_template.ipynb",
    "loss mask": "nbs/data/02_chat_encoding.ipynb",
    "answers": "nbs/tutorials/11_on_policy_or_not.ipynb",
    "shift": "nbs/tutorials/10_hidden_states.ipynb",
    "features": "speculators_nb/features/checks.py",
    "vocabulary": "nbs/nn/11_draft_vocabulary.ipynb",
    "weights": "nbs/models/04_base.ipynb",
    "head": "nbs/nn/04_target_head.ipynb",
    "convention": "nbs/nn/05_layers.ipynb",
    "draft length": "nbs/tutorials/07_how_many_tokens.ipynb",
    "training": "nbs/train/02_trainer.ipynb",
    "data size": "nbs/tutorials/09_from_your_chats.ipynb",
    "domains": "nbs/tutorials/08_when_ngram_wins.ipynb",
    "acceptance": "nbs/evaluate/01_acceptance.ipynb",
    "tree": "nbs/tutorials/05_a_tree_grows.ipynb",
    "engine": "nbs/evaluate/04_comparison.ipynb",
}

STATES = ("ok", "finding", "note", "not checked")


class Finding(NamedTuple):
    "What one check says about one stage."

    stage: str  # a key of STAGES
    state: str  # one of STATES
    evidence: str  # what was measured, with its number; of `not checked`: what is missing
    remedy: str = ""  # of a finding: what to do

    @property
    def page(self) -> str:  # of the repository
        "The notebook that explains the stage."
        return STAGES[self.stage]


def judged(
    stage: str,  # a key of STAGES
    bad: bool,  # whether the number is beyond its threshold
    evidence: str,  # the number, and what it is of
    remedy: str,  # where it is bad
) -> Finding:
    "A finding, or `ok` with the same evidence."
    return Finding(stage, "finding", evidence, remedy) if bad else Finding(stage, "ok", evidence)


def in_order(
    findings: list[Finding],
) -> list[Finding]:
    """By stage; those of a stage in the order of the checks. Errors: ValueError for a stage or
    a state that there is none of."""
    order = list(STAGES)
    for finding in findings:
        if finding.stage not in STAGES or finding.state not in STATES:
            raise ValueError(
                f"finding {finding.stage!r}, {finding.state!r}: stages are {', '.join(order)}; "
                f"states are {', '.join(STATES)}"
            )
    return sorted(findings, key=lambda f: order.index(f.stage))


def first_finding(
    findings: list[Finding],
) -> Finding | None:  # None: nothing was found
    "The stage to mend first."
    return next((f for f in in_order(findings) if f.state == "finding"), None)


def findings_table(
    findings: list[Finding],
) -> pd.DataFrame:  # stage, state, number, remedy, page
    "All stages in the order of the chain; the page is named where something was found."
    rows = [
        (f.stage, f.state, f.evidence, f.remedy, f.page if f.state == "finding" else "") for f in in_order(findings)
    ]
    return pd.DataFrame(rows, columns=["stage", "state", "number", "remedy", "page"])


class DataRow(NamedTuple):
    "One training row without its features."

    input_ids: np.ndarray  # [n]
    loss_mask: np.ndarray  # [n] bool


def sample_rows(
    rows: Any,  # a table with input_ids and loss_mask
    n: int = 48,  # how many
) -> list[DataRow]:  # evenly spread over the table
    "Some rows of a table."
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(n, len(rows))).astype(int))
    part = rows.select(chosen.tolist()).with_format(None)
    return [DataRow(np.array(row["input_ids"]), np.array(row["loss_mask"]).astype(bool)) for row in part]


def generation_prompt(
    tokenizer,  # of the verifier, with a chat template
) -> list[int]:  # token ids; empty: the template adds nothing
    "What the template puts before an answer."
    question = [{"role": "user", "content": "Why?"}]
    texts = [
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=more) for more in (False, True)
    ]
    same = 0
    while same < len(texts[0]) and texts[0][same] == texts[1][same]:
        same += 1
    return tokenizer(texts[1][same:], add_special_tokens=False)["input_ids"]


def places_after(
    ids: np.ndarray,  # [n]
    prompt: list[int],  # the generation prompt
) -> list[int]:  # where the token after each of its occurrences is
    "Where answers begin in a row."
    n = len(prompt)
    return [i for i in range(n, len(ids)) if ids[i - n : i].tolist() == prompt]


def template_check(
    rows: list[DataRow],  # some training rows
    tokenizer,  # of the verifier that serves
) -> Finding:
    "Whether the training rows spell the verifier's generation prompt."
    prompt = generation_prompt(tokenizer)
    if not prompt:
        return Finding("template", "not checked", "the template has no generation prompt")
    share = float(np.mean([bool(places_after(row.input_ids, prompt)) for row in rows]))
    text = tokenizer.decode(prompt)
    return judged(
        "template",
        share < 0.5,
        f"{share:.0%} of {len(rows)} training rows hold the verifier's generation prompt {text!r}",
        "prepare the data with the template that the verifier serves, and train again; or "
        "serve the template that was trained (chat_template.jinja)",
    )


def mask_numbers(
    rows: list[DataRow],  # some training rows
    prompt: list[int],  # the generation prompt
) -> dict[str, float]:  # shares: trained (of tokens), prompt, late (of answers)
    "Where the loss mask is, beside where answers begin."
    prompts, late, spans = [], [], 0
    for ids, mask in rows:
        starts = places_after(ids, prompt)
        prompts += [mask[i - len(prompt) : i].all() for i in starts]
        begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        spans += len(begins)
        late += [any(0 < b - i <= 3 for i in starts) and b not in starts for b in begins]
    tokens = sum(len(ids) for ids, _ in rows)
    return {
        "trained": sum(int(mask.sum()) for _, mask in rows) / max(tokens, 1),
        "prompt": float(np.mean(prompts)) if prompts else 0.0,
        "late": float(np.mean(late)) if late else 0.0,
    }


def mask_check(
    rows: list[DataRow],  # some training rows
    tokenizer,  # of the verifier
) -> Finding:
    "Whether the answers are trained, all of them and nothing else."
    found = mask_numbers(rows, generation_prompt(tokenizer))
    share = f"{found['trained']:.0%} of the tokens are trained"
    if not found["trained"]:
        return judged("loss mask", True, share, "mark the assistant's tokens, and prepare again")
    if found["prompt"] > 0.5:
        return judged(
            "loss mask",
            True,
            f"{share}; the generation prompt itself is, in {found['prompt']:.0%} of the turns",
            "train the answers alone: prepare the data again with a template that has {% generation %} marks",
        )
    return judged(
        "loss mask",
        found["late"] > 0.5,
        f"{share}; {found['late']:.0%} of the answers lack their first token",
        "begin the mask at the first token of the answer: the shift carries the mask of the next position",
    )


class Agreement(NamedTuple):
    "How the verifier finds the trained tokens."

    greedy: float  # share that is its likeliest token
    surprise: float  # mean negative log-likelihood minus mean entropy, nats a token
    tokens: int  # trained tokens looked at


@torch.no_grad()
def agreement(
    verifier: Verifier,
    rows: list[DataRow],  # some training rows
) -> Agreement:
    "Run the verifier over rows, one at a time."
    greedy, nll, entropy = [], [], []
    for ids, mask in rows:
        at = np.flatnonzero(mask[1:])
        if not len(at):
            continue
        tokens = torch.as_tensor(ids, dtype=torch.long, device=verifier.device)
        logits = verifier(tokens[None], use_cache=False).logits
        assert logits is not None
        log_probs = logits[0, torch.as_tensor(at, device=logits.device)].float().log_softmax(-1)
        target = tokens[1:][torch.as_tensor(at, device=tokens.device)]
        greedy.append(log_probs.argmax(-1) == target)
        nll.append(-log_probs.gather(-1, target[:, None])[:, 0])
        entropy.append(-(log_probs.exp() * log_probs).nansum(-1))
    if not greedy:
        return Agreement(0.0, 0.0, 0)
    hits, nll, entropy = torch.cat(greedy), torch.cat(nll), torch.cat(entropy)
    return Agreement(hits.float().mean().item(), (nll - entropy).mean().item(), len(hits))


MOST_SURPRISE = 0.3  # nats a token


def answers_check(
    verifier: Verifier,
    rows: list[DataRow],  # some training rows
) -> Finding:
    "Whether the verifier itself would write the training answers."
    found = agreement(verifier, rows)
    if not found.tokens:
        return Finding("answers", "not checked", "no trained token in the rows looked at")
    return judged(
        "answers",
        found.surprise > MOST_SURPRISE,
        f"the verifier's likeliest token is the trained one at {found.greedy:.0%} of "
        f"{found.tokens} positions; surprise {found.surprise:+.2f} nats a token (its own "
        "answers: 0 or less)",
        "let the verifier answer the questions itself: speculators-nb regenerate, then "
        "prepare, features and train again",
    )


LEAST_KNOWN = 0.95


def known_share(
    t2d: torch.Tensor,  # [V] bool
    tokens: Iterable[int],  # token ids
) -> float:  # NaN: there are none
    "Share of tokens that the draft vocabulary has."
    ids = torch.as_tensor(list(tokens), dtype=torch.long)
    return t2d.cpu()[ids].float().mean().item()


def vocabulary_check(
    t2d: torch.Tensor | None,  # [V] bool; None: the whole vocabulary
    rows: list[DataRow],  # some training rows; may be none
    written: Sequence[list[int]] = (),  # what the verifier wrote to other prompts
) -> Finding:
    "Whether the draft vocabulary limits the draft."
    if t2d is None:
        return Finding("vocabulary", "ok", "the whole vocabulary is drafted")
    shares = {
        "of the trained tokens": [int(t) for ids, mask in rows for t in ids[mask]],
        "of what the verifier writes": [t for text in written for t in text],
    }
    known = {name: known_share(t2d, tokens) for name, tokens in shares.items() if tokens}
    if not known:
        return Finding("vocabulary", "not checked", "no training rows and no prompts")
    worst = min(known.values())
    numbers = ", ".join(f"{share:.1%} {name}" for name, share in known.items())
    return judged(
        "vocabulary",
        worst < LEAST_KNOWN,
        f"{int(t2d.sum())} of {len(t2d)} tokens: {numbers}",
        "train with a larger draft_vocab_size, or choose the tokens by answers like those that "
        "are served (speculators-nb vocab)",
    )


def verifier_check(
    recorded: str | None,  # fingerprint in the drafter's run.json
    verifier: str | os.PathLike,  # folder or hub id of the model that serves
) -> Finding:
    "Whether the drafter was trained for the verifier that serves."
    same, now = same_weights(recorded, verifier), stored_fingerprint(verifier)
    if same is None:
        absent = "run.json has no fingerprint" if recorded is None else f"{verifier} has none"
        return Finding("verifier", "not checked", absent)
    return judged(
        "verifier",
        not same,
        f"trained for weights {recorded}, served with {recorded if same else now}",
        "serve the verifier that the drafter was trained for, or make features of the one that "
        "serves and train on (speculators-nb train --from-pretrained)",
    )


OFFSETS = (-1, 0, 1, 2, 3)
CLEARLY = 0.1  # more agreement than at the right offset; a verifier that knows nothing has none


def offset_agreement(
    verifier: Verifier,
    features: FeatureDataset,
    rows: list[int],  # which to read
) -> dict[int, float]:  # offset -> share of trained tokens that the head gives at it
    "Where in the text the tokens are that the stored states predict."
    head: Any = head_of(verifier)
    right: dict[int, list[torch.Tensor]] = {o: [] for o in OFFSETS}
    for i in rows:
        ids, mask, states = features.read(i)
        last = states[:, -1].to(verifier.device, torch.float32)
        tokens = head(last).argmax(-1).cpu()
        position = torch.arange(len(ids))
        for o in OFFSETS:
            at = position + o
            valid = (at >= 0) & (at < len(ids))
            at = at[valid]
            right[o].append((tokens[valid] == ids[at])[mask[at]])
    return {o: torch.cat(hits).float().mean().item() for o, hits in right.items()}


def shift_check(
    verifier: Verifier,
    features: FeatureDataset,
    rows: list[int],  # which to read
) -> Finding:
    "Whether the state of a position predicts the next token."
    if head_of(verifier) is None:
        return Finding("shift", "not checked", "the verifier has no output embedding")
    found = offset_agreement(verifier, features, rows)
    best = max(found, key=lambda o: found[o])
    return judged(
        "shift",
        found[best] > found[1] + CLEARLY,
        f"the head on the state of position i gives token i+1 at {found[1]:.0%} of the trained "
        f"positions, and agrees most with token i{best:+d} ({found[best]:.0%})",
        "extract the features again: states and tokens are stored with different positions",
    )


MOST_ERROR = 0.06  # of the norm of the states


def all_layers(
    verifier: Verifier,
) -> Verifier:  # the same model, every layer tapped
    "A second view of a verifier, for comparison with any layer."
    return Verifier(verifier.model, range(verifier.num_layers))


def slot_errors(
    verifier: Verifier,
    features: FeatureDataset,
    rows: list[int],  # which to compute again
) -> np.ndarray:  # [slots, n+1] relative error of each stored slot, to each layer's states
    "Stored states against the states of every layer."
    tapped = all_layers(verifier)
    gaps, norms = [], []
    for i in rows:
        ids, _, stored = features.read(i)
        now = states_of(tapped, [ids], torch.float32)[0]  # [n, layers+1, H]
        stored = stored.float()
        gaps.append((stored[:, :, None] - now[:, None]).square().sum((0, 3)))
        norms.append(now.square().sum((0, 2)))
    return torch.as_tensor(sum(gaps) / sum(norms)).sqrt().numpy()


def _misplaced(errors, layers):
    "Layer -> the layer that its slot really holds, where that is another."
    nearest = errors.argmin(1)
    return {
        layer: int(near)
        for slot, (layer, near) in enumerate(zip(layers, nearest))
        if near != layer and errors[slot, near] < MOST_ERROR <= errors[slot, layer]
    }


def features_check(
    verifier: Verifier,
    features: FeatureDataset,
    rows: list[int],  # which to compute again
    read: tuple[int, ...] = (),  # layers that the drafter reads
) -> Finding:
    "Whether the stored states are those of this verifier, and of the layers that are read."
    layers = list(features.layer_ids or ())
    remedy = "extract the features again with the verifier that serves, and train on them"
    if not layers:
        return Finding("features", "not checked", "the folder does not say which layers it has")
    if absent := sorted(set(read) - set(layers)):
        return judged(
            "features",
            True,
            f"the drafter reads layers {list(read)}, the features it was trained on are of "
            f"{layers}: {absent} not among them",
            "write the trained layers into config.json",
        )
    errors = slot_errors(verifier, features, rows)
    worst = max(errors[slot, layer] for slot, layer in enumerate(layers))
    evidence = f"stored states differ from the verifier's by {worst:.1%} in {len(rows)} rows"
    if found := _misplaced(errors, layers):
        evidence += "; " + ", ".join(f"layer {a} is layer {b}'s" for a, b in found.items())
        remedy = f"extract the features again: their layer ids {layers} are wrong"
    return judged("features", worst > MOST_ERROR, evidence, remedy)
