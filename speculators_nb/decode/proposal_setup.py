"""Proposal methods of a checkpoint's config (greedy, sampling, static and dynamic tree) for decoding.
They become what `generate` takes: the drafter, the acceptance rule and the draft length."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.registry import (
    DynamicTreeTokenProposalConfig,
    GreedyTokenProposalConfig,
    SamplingTokenProposalConfig,
    StaticTreeTokenProposalConfig,
    TokenProposalConfig,
)
from .acceptance_rules import RULES, Rule, lenient, tolerant
from .tree import Drafter, Sampling, TokenTree
from .tree_growth import NextLogProbs, draw_without_replacement, dynamic_tree, shaped_tree, static_tree

TreeMethod = StaticTreeTokenProposalConfig | DynamicTreeTokenProposalConfig | list  # of paths: a shape


def grow_tree(
    method: Any, log_probs: Callable, depth: int, sampling: Sampling, draw: Callable = draw_without_replacement
) -> TokenTree:
    """The tree of a `TreeMethod`, at most `depth` deep, from a drafter's log-probabilities, (nodes [F], tokens [N],
    parents [N]) -> [F, V]; `draw` draws the children of a node in a tree of a shape."""
    if isinstance(method, list):
        paths = [path for path in method if len(path) <= depth]
        return shaped_tree(log_probs, paths, sampling, draw)
    if isinstance(method, StaticTreeTokenProposalConfig):
        first, later = method.initial_branching_factor, method.branching_factor
        return static_tree(log_probs, first, later, depth, sampling, draw)
    tree, _ = dynamic_tree(log_probs, method.expansion_factor, depth, method.speculative_tokens)
    return tree


@runtime_checkable
class GrowsTrees(Protocol):
    "What a drafter has besides the drafter protocol, where trees can be grown from it."

    def grow(self, tokens: Tensor, features: Tensor | None, depth: int) -> AbstractContextManager[NextLogProbs]:
        """Log-probabilities of what follows nodes of a tree, at most `depth` deep, while the context is open; tokens
        [n] and features [m, A·H] as `propose` gets them."""
        ...


class TreeDrafter:
    """Any drafter that has `grow`, proposing trees (the `tree.Drafter` protocol). The tree is
    no deeper than the method says."""

    def __init__(
        self,
        drafter: Drafter,  # with `grow`
        method: TreeMethod,  # a proposal method, or a shape: a list of paths
        draw: Callable = draw_without_replacement,  # or `draw_greedy_plus_one`
    ):
        "Errors: TypeError for a drafter that cannot grow trees, ValueError for a method that is not one."
        if not isinstance(drafter, GrowsTrees):
            raise TypeError(
                f"{type(drafter).__name__} drafts chains only: it has no `grow`; use "
                "proposal_type 'greedy' or 'sampling', or a drafter with probabilities at any node"
            )
        if not isinstance(method, TreeMethod):
            raise ValueError(
                f"proposal_type={method.proposal_type!r} grows no tree; static_tree and "
                "dynamic_tree do, and the paths of a shape"
            )
        self.drafter, self.method, self.draw = drafter, method, draw
        self.aux_layer_ids = drafter.aux_layer_ids
        self.depth = max(map(len, method)) if isinstance(method, list) else method.depth
        self.trained_tokens: int | None = getattr(drafter, "trained_tokens", None)
        self.reads_host_tokens: bool = getattr(drafter, "reads_host_tokens", False)

    def __copy__(self):
        # requests of a batch share weights, not state
        return TreeDrafter(copy.copy(self.drafter), self.method, self.draw)

    def reset(self):
        "Start a new request."
        self.drafter.reset()

    @torch.inference_mode()
    def propose(self, tokens: Tensor, features: Tensor | None, k: int, sampling: Sampling) -> TokenTree:
        "Grow a tree."
        depth = min(k, self.depth)
        with self.drafter.grow(tokens, features, depth) as log_probs:
            return grow_tree(self.method, log_probs, depth, sampling, self.draw)


class ProposalSetup(NamedTuple):
    "What `generate` needs to know of a proposal method, under the names that it takes."

    drafter: Drafter
    rule: Rule
    k: int  # the deepest node


def proposal_setup(drafter: Drafter, method: TokenProposalConfig) -> ProposalSetup:
    """A drafter used as a proposal method says, e.g. one of `config.speculators_config.proposal_methods`:
    `generate(verifier, prompt_ids=..., **proposal_setup(drafter, method)._asdict())`. Errors: as in `TreeDrafter`,
    `tolerant` and `lenient`; ValueError for a method of another kind."""
    if isinstance(method, GreedyTokenProposalConfig):
        rule = tolerant(method.verifier_accept_k, method.accept_tolerance)
        return ProposalSetup(drafter, rule, method.speculative_tokens)
    if isinstance(method, SamplingTokenProposalConfig):
        return ProposalSetup(drafter, lenient(method.accept_lenience), method.speculative_tokens)
    if isinstance(method, TreeMethod):
        return ProposalSetup(TreeDrafter(drafter, method), RULES["standard"], method.depth)
    raise ValueError(
        f"proposal_type={method.proposal_type!r} is not known to the decoder; it knows greedy, sampling, static_tree, "
        "dynamic_tree"
    )
