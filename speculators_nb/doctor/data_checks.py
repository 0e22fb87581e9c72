"""A finding names the stage that loses, its number, the remedy, and the page that explains it; and checks of data.
These are prompt, loss mask, on-policy answers, draft vocabulary, and hidden states against the verifier that serves."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.chat_template import common_prefix
from ..features.feature_folder import FeatureDataset
from ..features.in_process import states_of
from ..verifier.identity import VerifierInfo, head_of, same_weights
from ..verifier.tapped_model import Verifier

STAGES = {  # in the order of the chain -> the notebook that explains it
    "verifier": "speculators_nb/verifier/identity.py",
    "template": "nbs/data/01_chat_template.ipynb",
    "loss mask": "nbs/data/02_chat_encoding.ipynb",
    "answers": "nbs/tutorials/11_on_policy_or_not.ipynb",
    "shift": "nbs/tutorials/10_hidden_states.ipynb",
    "features": "speculators_nb/features/checks.py",
    "vocabulary": "nbs/nn/08_draft_vocabulary.ipynb",
    "weights": "nbs/models/02_base.ipynb",
    "head": "nbs/nn/05_target_head.ipynb",
    "convention": "nbs/nn/06_layers.ipynb",
    "draft length": "nbs/tutorials/07_how_many_tokens.ipynb",
    "training": "nbs/train/02_trainer.ipynb",
    "data size": "nbs/tutorials/09_from_your_chats.ipynb",
    "domains": "nbs/tutorials/08_when_ngram_wins.ipynb",
    "acceptance": "nbs/evaluate/01_acceptance.ipynb",
    "tree": "nbs/tutorials/05_a_tree_grows.ipynb",
    "engine": "nbs/evaluate/04_comparison.ipynb",
}


class Finding(NamedTuple):
    "What one check says about one stage."

    stage: str  # a key of STAGES
    state: str  # ok, finding, note or not checked
    evidence: str  # what was measured, with its number; of `not checked`: what is missing
    remedy: str = ""  # of a finding: what to do

    @property
    def page(self) -> str:
        "The notebook or module that explains the stage."
        return STAGES[self.stage]


def judged(stage: str, bad: bool, evidence: str, remedy: str) -> Finding:
    "A finding where a number is beyond its threshold, else `ok` with the same evidence."
    return Finding(stage, "finding", evidence, remedy) if bad else Finding(stage, "ok", evidence)


def unchecked(stage: str, missing: str) -> Finding:
    "A stage that could not be looked at."
    return Finding(stage, "not checked", missing)


class DataRow(NamedTuple):
    "One training row without its features."

    input_ids: np.ndarray  # [n]
    loss_mask: np.ndarray  # [n] bool


Rows = list[DataRow]


def rows_of(table: Any) -> Rows:
    "The rows of a table with input_ids and loss_mask."
    return [DataRow(np.array(row["input_ids"]), np.array(row["loss_mask"]).astype(bool)) for row in table]


def generation_prompt(tokenizer) -> list[int]:
    "Token ids that the verifier's chat template puts before an answer; empty: it adds nothing."
    question = [{"role": "user", "content": "Why?"}]
    texts = [
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=more) for more in (False, True)
    ]
    without, whole = tokenizer(texts, add_special_tokens=False)["input_ids"]  # by itself it may have other tokens
    return whole[common_prefix(without, whole) :]


def places_after(ids: np.ndarray, prompt: list[int]) -> list[int]:
    "Where answers begin in a row: the places after each generation prompt."
    n = len(prompt)
    return [i for i in range(n, len(ids)) if ids[i - n : i].tolist() == prompt]


def template_check(rows: Rows, tokenizer) -> Finding:
    "Whether the training rows spell the verifier's generation prompt."
    prompt = generation_prompt(tokenizer)
    if not prompt:
        return unchecked("template", "the template has no generation prompt")
    share = float(np.mean([bool(places_after(row.input_ids, prompt)) for row in rows]))
    text = tokenizer.decode(prompt)
    return judged(
        "template",
        share < 0.5,
        f"{share:.0%} of {len(rows)} training rows hold the verifier's generation prompt {text!r}",
        "prepare the data with the template that the verifier serves, and train again; or "
        "serve the template that was trained (chat_template.jinja)",
    )


def mask_check(rows: Rows, tokenizer) -> Finding:
    "Whether the answers are trained, all of them and nothing else."
    prompt = generation_prompt(tokenizer)
    prompts, late = [], []
    for ids, mask in rows:
        starts = places_after(ids, prompt) if prompt else []
        prompts += [mask[i - len(prompt) : i].all() for i in starts]
        begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        late += [any(0 < b - i <= 3 for i in starts) and b not in starts for b in begins]
    trained = sum(int(mask.sum()) for _, mask in rows) / max(sum(len(ids) for ids, _ in rows), 1)
    share = f"{trained:.0%} of the tokens are trained"
    if not trained:
        return judged("loss mask", True, share, "mark the assistant's tokens, and prepare again")
    if prompts and (of_prompts := np.mean(prompts)) > 0.5:
        evidence = f"{share}; the generation prompt itself is, in {of_prompts:.0%} of the turns"
        remedy = "train the answers alone: prepare the data again with a template that has {% generation %} marks"
        return judged("loss mask", True, evidence, remedy)
    of_answers = np.mean(late) if late else 0.0
    return judged(
        "loss mask",
        bool(of_answers > 0.5),
        f"{share}; {of_answers:.0%} of the answers lack their first token",
        "begin the mask at the first token of the answer: the shift carries the mask of the next position",
    )


class Agreement(NamedTuple):
    "How the verifier finds the trained tokens."

    greedy: float  # share that is its likeliest token
    surprise: float  # mean negative log-likelihood minus mean entropy, nats a token
    tokens: int  # trained tokens looked at


@torch.no_grad()
def agreement(verifier: Verifier, rows: Rows) -> Agreement:
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
    hits, surprise = torch.cat(greedy), torch.cat(nll) - torch.cat(entropy)
    return Agreement(hits.float().mean().item(), surprise.mean().item(), len(hits))


MOST_SURPRISE = 0.3  # nats a token


def answers_check(verifier: Verifier, rows: Rows) -> Finding:
    "Whether the verifier itself would write the training answers."
    found = agreement(verifier, rows)
    if not found.tokens:
        return unchecked("answers", "no trained token in the rows looked at")
    return judged(
        "answers",
        found.surprise > MOST_SURPRISE,
        f"the verifier's likeliest token is the trained one at {found.greedy:.0%} of {found.tokens} positions; "
        f"surprise {found.surprise:+.2f} nats a token (its own answers: 0 or less)",
        "let the verifier answer the questions itself: speculators-nb regenerate, then "
        "prepare, features and train again",
    )


LEAST_KNOWN = 0.95


def vocabulary_check(t2d: torch.Tensor | None, rows: Rows, written: Sequence[list[int]] = ()) -> Finding:
    """Whether the draft vocabulary t2d ([V] bool; None: the whole one) limits the draft, by the trained tokens and by
    what the verifier wrote to other prompts."""
    if t2d is None:
        return Finding("vocabulary", "ok", "the whole vocabulary is drafted")
    tokens = {
        "of the trained tokens": [int(t) for ids, mask in rows for t in ids[mask]],
        "of what the verifier writes": [t for text in written for t in text],
    }
    known = {name: t2d.cpu()[ids].float().mean().item() for name, ids in tokens.items() if ids}
    if not known:
        return unchecked("vocabulary", "no training rows and no prompts")
    numbers = ", ".join(f"{share:.1%} {name}" for name, share in known.items())
    return judged(
        "vocabulary",
        min(known.values()) < LEAST_KNOWN,
        f"{int(t2d.sum())} of {len(t2d)} tokens: {numbers}",
        "train with a larger draft_vocab_size, or choose the tokens by answers like those that "
        "are served (speculators-nb vocab)",
    )


def verifier_check(recorded: str | None, verifier: str | os.PathLike) -> Finding:
    "Whether the drafter was trained for the verifier that serves, by the fingerprint recorded in its run.json."
    same = same_weights(recorded, verifier)
    if same is None:
        return unchecked("verifier", "run.json has no fingerprint" if recorded is None else f"{verifier} has none")
    return judged(
        "verifier",
        not same,
        f"trained for weights {recorded}, served with {recorded if same else VerifierInfo.of(verifier).fingerprint}",
        "serve the verifier that the drafter was trained for, or make features of the one that "
        "serves and train on (speculators-nb train --from-pretrained)",
    )


OFFSETS = (-1, 0, 1, 2, 3)
CLEARLY = 0.1  # more agreement than at the right offset; a verifier that knows nothing has none


def offset_agreement(verifier: Verifier, features: FeatureDataset, rows: list[int]) -> dict[int, float]:
    "Offset -> share of the trained tokens there that the head gives on the stored states of these rows."
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


def shift_check(verifier: Verifier, features: FeatureDataset, rows: list[int]) -> Finding:
    "Whether the state of a position predicts the next token."
    if head_of(verifier) is None:
        return unchecked("shift", "the verifier has no output embedding")
    found = offset_agreement(verifier, features, rows)
    if any(share != share for share in found.values()):
        return unchecked("shift", "no trained token in the rows looked at")
    best = max(found, key=lambda o: found[o])
    return judged(
        "shift",
        found[best] > found[1] + CLEARLY,
        f"the head on the state of position i gives token i+1 at {found[1]:.0%} of the trained "
        f"positions, and agrees most with token i{best:+d} ({found[best]:.0%})",
        "extract the features again: states and tokens are stored with different positions",
    )


MOST_ERROR = 0.06  # of the norm of the states


def slot_errors(verifier: Verifier, features: FeatureDataset, rows: list[int]) -> np.ndarray:
    "Relative error [slots, n+1] of each stored slot of these rows, to each layer's states."
    tapped = Verifier(verifier.model, range(verifier.num_layers))  # the same model, every layer tapped
    gaps, norms = [], []
    for i in rows:
        ids, _, stored = features.read(i)
        now = states_of(tapped, [ids], torch.float32)[0]  # [n, layers+1, H]
        gaps.append((stored.float()[:, :, None] - now[:, None]).square().sum((0, 3)))
        norms.append(now.square().sum((0, 2)))
    return torch.as_tensor(sum(gaps) / sum(norms)).sqrt().numpy()


def features_check(
    verifier: Verifier, features: FeatureDataset, rows: list[int], read: tuple[int, ...] = ()
) -> Finding:
    "Whether the states stored for these rows are those of this verifier, and of the layers that the drafter reads."
    layers = list(features.layer_ids or ())
    remedy = "extract the features again with the verifier that serves, and train on them"
    if not layers:
        return unchecked("features", "the folder does not say which layers it has")
    if absent := sorted(set(read) - set(layers)):
        stated = f"the drafter reads layers {list(read)}, the features it was trained on are of {layers}"
        return judged(
            "features", True, f"{stated}: {absent} not among them", "write the trained layers into config.json"
        )
    errors = slot_errors(verifier, features, rows)
    worst = max(errors[slot, layer] for slot, layer in enumerate(layers))
    evidence = f"stored states differ from the verifier's by {worst:.1%} in {len(rows)} rows"
    misplaced = [
        f"layer {layer} is layer {near}'s"
        for slot, (layer, near) in enumerate(zip(layers, errors.argmin(1)))
        if near != layer and errors[slot, near] < MOST_ERROR <= errors[slot, layer]
    ]
    if misplaced:
        evidence += f"; {', '.join(misplaced)}"
        remedy = f"extract the features again: their layer ids {layers} are wrong"
    return judged("features", worst > MOST_ERROR, evidence, remedy)
