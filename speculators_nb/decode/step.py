"""One step of a request: what a drafter proposes, what the acceptance rule decides, and what both add to the text.
The host waits for the device once: when it looks at the decision."""

import copy
import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .acceptance_rules import Decision, Rule, follow, greedy, rejection_sampling, residual_probs, strict
from .tree import (
    Check,
    Drafter,
    GreedyWithProbs,
    Sampling,
    TokenTree,
    checks_later,
    fetch,
    require,
    long_tensor,
)


class StepRecord(NamedTuple):
    """The distributions of one verification step over N draft tokens. p is the verifier's, q
    the drafter's; at temperature 0 both are those of temperature 1."""

    p: list[float]  # [N] of each draft token, after its parent
    q: list[float]  # [N] of each draft token; 1 where it was proposed without a distribution
    chance: list[float]  # [N] that rejection sampling accepts it, its siblings before rejected
    top_p: list[dict[int, float]]  # [N+1] likeliest tokens after the last decided one, each node
    top_q: list[dict[int, float]]  # [N] likeliest tokens where each was proposed
    residual: dict[int, float]  # likeliest tokens of what rejection sampling draws the next from


@dataclass
class Step:
    "One verification step: a forward pass of the verifier over a proposal."

    requested: int  # tokens the drafter could propose: k, or fewer near the length limit
    draft: list[int]  # the draft tokens, at most `requested` deep
    accepted: int  # how many of them the rule accepted
    tokens: list[int]  # added to the output: accepted and verifier's, cut after a stop token
    parents: list[int] | None = None  # of each draft token, where the proposal had branches
    path: list[int] | None = None  # the accepted ones, where the proposal had branches


@dataclass
class Generation:
    "The output of one request and how it came about."

    prompt: list[int]  # token ids
    tokens: list[int]  # the output, a stop token included; tokens[0] is from the prompt's pass
    steps: list[Step]  # in order
    finish_reason: str  # "stop": at a stop token; "length": at max_new_tokens or context end
    hidden_states: Tensor | None = None  # [n, A·H] of all but the last token, by `HiddenStates`
    records: list[StepRecord] | None = None  # one for each step, where `record` requests it
    seconds: float | None = field(default=None, compare=False)  # it took, where it was timed


@dataclass
class Request:
    """One request while it is decoded. Its tokens are decided; the verifier has read all of them but the last one, and
    its KV cache has what it has read."""

    prompt: list[int]  # token ids
    tokens: Tensor  # [n] decided; the verifier has read the first `read`
    on_host: Tensor  # [n] the same on the host
    remaining: int  # tokens that may still be written
    drafter: Drafter  # its own, with its own state
    sampling: Sampling
    read: int = 0
    features: list[Tensor] = field(default_factory=list)  # [m, A·H] of each step, new to the drafter
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None  # None: not finished
    states: list[Tensor] = field(default_factory=list)  # all features so far, for a drafter that asks to keep them
    record: int = 0  # likeliest tokens to keep of each distribution; 0: no records
    records: list[StepRecord] = field(default_factory=list)

    def generation(self) -> Generation:
        "The result."
        return Generation(
            self.prompt,
            self.on_host.tolist()[len(self.prompt) :],
            self.steps,
            self.finish_reason or "length",
            torch.cat(self.states) if self.states else None,
            self.records if self.record else None,
        )


class Proposal(NamedTuple):
    "What a drafter proposed for one step."

    requested: int  # how deep it could go
    tree: TokenTree


def check_proposal(draft: TokenTree, depth: int, vocab_size: int, device: str | torch.device = "cpu") -> TokenTree:
    """What a drafter proposed, on the verifier's device and cut to the depth that is wanted. Errors: TypeError for
    anything but a tree, ValueError for tokens that the verifier does not have."""
    if not hasattr(draft, "parents"):
        raise TypeError(
            f"the drafter proposed a {type(draft).__name__}: `propose` must return a "
            "TokenTree, for example TokenTree.chain(tokens)"
        )
    draft.check_vocabulary(vocab_size)
    if draft.probs is not None and draft.probs.shape[1] != vocab_size:
        raise ValueError(
            f"the proposal has probabilities over {draft.probs.shape[1]} tokens, the verifier "
            f"has {vocab_size}: map draft ids to verifier ids first"
        )
    return draft.cut(depth).to(device)


def wanted_depth(k: int | Callable[[list[Step]], int], steps: list[Step]) -> int:
    """How deep a draft may be after these steps. Errors: ValueError for a function that gives no whole number from 0
    on."""
    if not callable(k):
        return k
    depth = k(steps)
    try:
        depth = operator.index(depth)
    except TypeError:
        depth, given = -1, depth
    else:
        given = depth
    if depth < 0:
        raise ValueError(f"k={given!r}: a function of the steps must give a whole number from 0 on")
    return depth


def propose(
    request: Request, k: int | Callable[[list[Step]], int], vocab_size: int, longest: int = sys.maxsize
) -> Proposal:
    """Ask the drafter for draft tokens of the verifier's vocabulary: `k` deep, or as deep as a function of the steps so
    far says, and at most `longest`; the last token before the limit is left to the verifier. The prompt is read without
    a draft."""
    requested = 0
    if request.read:
        requested = min(wanted_depth(k, request.steps), request.remaining - 1, longest)
    if not requested:
        return Proposal(requested, TokenTree.chain(request.tokens[:0]))
    drafter, sampling = request.drafter, request.sampling
    if request.record and not sampling.temperature:
        sampling = GreedyWithProbs()
    tokens = request.on_host if getattr(drafter, "reads_host_tokens", False) else request.tokens

    def named(error: Exception) -> ValueError:
        return ValueError(f"{type(drafter).__name__}: {error}")

    with checks_later() as checks:
        try:
            features = torch.cat(request.features) if request.features else None
            request.features.clear()
            draft = drafter.propose(tokens, features, requested, sampling)
        except ValueError as e:
            raise named(e) from e
    for check in checks:
        require(check.holds, lambda check=check: named(check.error()))
    draft = check_proposal(draft, requested, vocab_size, request.tokens.device)
    return Proposal(requested, draft.settled() if request.record else draft)


# the rules that at temperature 0 accept what the verifier's likeliest tokens lead to
BY_TOKEN = (greedy, strict, rejection_sampling)


def choose(request: Request, rule: Rule, tree: TokenTree, logits: Tensor) -> tuple[Decision, Tensor | None]:
    """Apply the rule to N nodes and the verifier's logits [N+1, V] without looking at the result: its decision, and the
    distributions [N+1, V] float32 that it received, if any."""
    best, argmax = logits.max(-1)
    error = ValueError(
        f"the verifier's logits are NaN or infinite after token {len(request.tokens)}: "
        f"check weights and dtype {logits.dtype}"
    )
    require(best.isfinite().all(), lambda: error)
    sampling, greedily = request.sampling, not request.sampling.temperature
    by_token = rule.lossless and getattr(rule.choose, "func", rule.choose) in BY_TOKEN
    if by_token and greedily and not request.record:
        return follow(tree, argmax), None  # one-hot distributions would say the same
    if request.record and greedily:
        tree = copy.copy(tree)
        tree.probs = None  # its distributions are for the record
    probs = logits.float().softmax(-1) if rule.raw and greedily else sampling.probabilities(logits)
    if rule.raw_too and greedily:
        decision = rule.choose(tree, probs, sampling.generator, logits.float().softmax(-1))
    else:
        decision = rule.choose(tree, probs, sampling.generator)
    if not isinstance(decision, Decision):  # a rule that has looked
        path, token = decision
        accepted = long_tensor([node in path for node in range(len(tree))], logits.device)
        decision = Decision(accepted.bool(), long_tensor([token], logits.device)[0])
    return decision, probs


class Looked(NamedTuple):
    "What the host needs of a step."

    tree: TokenTree  # without padding
    draft: list[int]  # its tokens
    path: list[int]  # accepted nodes of it
    nodes: list[int]  # the same, counted with padding
    token: int  # the verifier's


def look(trees: list[TokenTree], decisions: list[Decision], checks: list[Check]) -> list[Looked]:
    """Copy what the host needs of a step, for B requests at once, and raise what a check that was put off has found:
    the one wait of a step."""
    rows = []
    for tree, (accepted, token) in zip(trees, decisions):
        empty = accepted[:0]
        parents = empty if tree.known else tree.parents
        real = empty if tree.real is None else tree.real
        rows += [accepted, token, tree.tokens, parents, real]
    found = fetch(rows, checks)
    looked = []
    for tree, *parts in zip(trees, *(found[i::5] for i in range(5))):
        accepted, (token,), draft, parents, real = parts
        if not tree.known:
            tree.parent_of = parents
        nodes = [node for node, yes in enumerate(accepted) if yes]
        kept = [node for node, yes in enumerate(real) if yes] if real else range(len(tree))
        path = [list(kept).index(node) for node in nodes] if real else nodes
        settled = tree.part(list(kept)) if real else tree
        looked.append(Looked(settled, [draft[i] for i in kept], path, nodes, token))
    return looked


def add_step(
    request: Request, proposal: Proposal, looked: Looked, token: Tensor, hidden: Tensor, stop: Collection[int]
):
    """Add to the request, in place, what was accepted, the verifier's `token` [], and the hidden states of decided
    tokens, of `hidden` [m+N, A·H], whose columns the drafter reads; a stop token ends the text. A drafter never
    receives hidden states of a rejected token."""
    tree, draft, path, nodes, last = looked
    unread = len(request.tokens) - request.read
    accepted = long_tensor(nodes, hidden.device)
    if nodes == list(range(len(nodes))):
        accepted = slice(0, len(nodes))
    if len(request.drafter.aux_layer_ids):
        features = torch.cat([hidden[:unread], hidden[unread:][accepted]])
        request.features.append(features)
        if getattr(request.drafter, "keeps_states", False):
            request.states.append(features)

    new = [*(draft[node] for node in path), last]
    end = next((i + 1 for i, t in enumerate(new) if t in stop), None)
    new = new[:end]
    if request.read:
        step = Step(proposal.requested, draft, len(path), new)
        if not tree.is_chain:
            step.parents, step.path = tree.parent_of, path
        request.steps.append(step)
    written = torch.cat([proposal.tree.tokens[accepted], token.view(1)])[: len(new)]
    request.read = len(request.tokens) + len(path)
    request.tokens = torch.cat([request.tokens, written])
    request.on_host = torch.cat([request.on_host, torch.tensor(new)])
    request.remaining -= len(new)
    if end:
        request.finish_reason = "stop"
    elif not request.remaining:
        request.finish_reason = "length"


def likeliest_tokens(probs: Tensor, n: int) -> dict[int, float]:
    "The n likeliest tokens of a distribution [V]: token id -> probability, likeliest first, without those of 0."
    best = probs.topk(min(n, len(probs)))
    return {t: p for t, p in zip(best.indices.tolist(), best.values.tolist()) if p > 0}


def step_record(tree: TokenTree, target: Tensor, shown: Tensor, path: list[int], n: int) -> StepRecord:
    """The numbers that decided a step over N nodes: `target` [N+1, V], as the rule received the verifier's
    distributions, `shown` [N+1, V], of temperature 1 where the rule's are of 0, the accepted nodes, and how many
    likeliest tokens to keep. What rejection sampling does is computed from them and not by the rule, so that the two
    can be compared."""
    q = torch.nn.functional.one_hot(tree.tokens, target.shape[1]) if tree.probs is None else tree.probs
    q = q.double()  # [N, V]
    chance = [0.0] * len(tree)
    residual: dict[int, float] = {}
    for parent in range(-1, len(tree)):
        rest = target[parent + 1].double()
        for node in tree.children(parent):
            token = tree.tokens[node]
            chance[node] = float((rest[token] / q[node, token]).clamp(max=1))
            rest = residual_probs(rest, q[node])
        if parent == (path[-1] if path else -1):
            residual = likeliest_tokens(rest, n)
    return StepRecord(
        p=shown[tree.parents + 1, tree.tokens].tolist(),
        q=q.gather(1, tree.tokens[:, None])[:, 0].tolist(),
        chance=chance,
        top_p=[likeliest_tokens(row, n) for row in shown],
        top_q=[likeliest_tokens(row, n) for row in q],
        residual=residual,
    )


def recorded(request: Request, looked: Looked, target: Tensor | None, logits: Tensor) -> StepRecord:
    "As `step_record`, from the distributions [N+1, V] that the rule received and the verifier's logits [N+1, V]."
    assert target is not None, "a record needs the distributions"
    shown = target if request.sampling.temperature else logits.float().softmax(-1)
    return step_record(looked.tree, target, shown, looked.path, request.record)
