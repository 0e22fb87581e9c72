"""EAGLE-2's dynamic draft tree with sliders: how it grows with the drafter's confidence.
Which nodes the budget keeps, what the verifier accepts of it, and of a chain with as many tokens."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from ..core.options import shown
from ..decode.generate import NoDrafter, generate
from ..decode.tree import Drafter
from ..decode.tree_growth import dynamic_tree
from ..verifier.tapped_model import Verifier
from .widget import Widget


MOST_DEPTH, MOST_NODES = 6, 24  # of the sliders
Nodes = dict[str, list]  # of a tree: tokens, parents (-1: the last decided token), scores


def all_nodes(drafter: Any, text: Tensor, features: Tensor | None, top_k: int, depth: int) -> Nodes:
    """A dynamic tree, with `top_k` nodes expanded in a level, and children of each, before the re-ranking; scores are
    the log-probability of each node's path. The drafter is a `tree.Drafter` with `grow`; `text` [n]: decided tokens,
    `features` [n-1, A·H]: of all but the last of them; `depth`: levels."""
    drafter.reset()
    with torch.inference_mode(), drafter.grow(text, features, depth) as log_probs:
        tree, scores = dynamic_tree(log_probs, top_k, depth, 10**6)
    drafter.reset()
    numbers = [float(f"{score:.9g}") for score in scores.tolist()]  # float32, exactly
    return dict(tokens=tree.tokens.tolist(), parents=tree.parents.tolist(), scores=numbers)


def depths(nodes: Nodes) -> list[int]:
    "Levels of the nodes; children of the last decided token have 1."
    levels: list[int] = []
    for parent in nodes["parents"]:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return levels


def kept_nodes(nodes: Nodes, depth: int, budget: int) -> list[int]:
    """The nodes, ascending, of a tree of so many levels that the re-ranking keeps within a budget: `dynamic_tree` of
    that size."""
    level, scores = depths(nodes), nodes["scores"]
    shallow = [node for node in range(len(level)) if level[node] <= depth]
    return sorted(sorted(shallow, key=lambda node: -scores[node])[:budget])


def accepted_path(nodes: Nodes, kept: Sequence[int], truth: Sequence[int]) -> list[int]:
    """The nodes, of those that are kept for verification, that greedy verification accepts; `truth`: the verifier's
    tokens."""
    path, node = [], -1
    for token in truth:
        children = [i for i in kept if nodes["parents"][i] == node]
        node = next((i for i in children if nodes["tokens"][i] == token), -1)
        if node < 0:
            break
        path.append(node)
    return path


def tree_counts(nodes: Nodes, kept: Sequence[int], truth: Sequence[int]) -> dict[str, float]:
    """Numbers of a proposal, as of `accepted_path`: nodes verified, accepted tokens as the drafter expects them (the
    sum of its path probabilities) and as they were, its forward passes (levels)."""
    level = depths(nodes)
    return dict(
        nodes=len(kept),
        expected=sum(math.exp(nodes["scores"][node]) for node in kept),
        accepted=len(accepted_path(nodes, kept, truth)),
        passes=max((level[node] for node in kept), default=0),
    )


WIDTHS = [3, 2, 4, 5, 8]  # top_k; the first three are in the page


class TreeGrowth(Widget):
    "A tree that grows, and a chain, at the positions of an answer; see `grow`."

    name = "tree_growth"

    def __init__(self, drafter: Any, verifier: Verifier, prompt: Tensor, answer: list, words):
        self.drafter, self.words = drafter, words
        self.prompt, self.answer = prompt, answer
        everything = torch.cat([prompt, torch.tensor(answer)])[None]
        self.features = verifier(everything).hidden_states[0] if drafter.aux_layer_ids else None
        places = list(range(0, len(answer) - 1, max(1, len(answer) // 24)))
        super().__init__(state=dict(places={}, words={}, positions=places, widths=WIDTHS))
        in_page = places[:: max(1, -(-len(places) // 6))]  # six of them
        self.state = self._with([(place, k) for place in in_page for k in WIDTHS[:3]])
        self.controls = dict(position=in_page[0], top_k=WIDTHS[0], depth=4, budget=10)
        self.controls = self.controls | dict(position=max(in_page, key=self._gain))
        self.observe(self._request, "controls")

    def _with(self, wanted) -> dict:
        "The state with the trees of (position, top_k)."
        places, words = dict(self.state["places"]), dict(self.state["words"])
        for position, top_k in wanted:
            text = torch.cat([self.prompt, torch.tensor(self.answer[:position]).long()])
            features = None if self.features is None else self.features[: len(text) - 1]
            place = dict(places.get(str(position), dict(trees={})))
            if "chain" not in place:
                place["chain"] = all_nodes(self.drafter, text, features, 1, MOST_NODES)
                place["truth"] = self.answer[position : position + MOST_NODES]
                place["text"] = self.words(text[-24:].tolist())
            tree = all_nodes(self.drafter, text, features, top_k, MOST_DEPTH)
            place["trees"] = place["trees"] | {str(top_k): tree}
            places[str(position)] = place
            for token in [*tree["tokens"], *place["chain"]["tokens"], *place["truth"]]:
                words.setdefault(str(token), self.words([token]))
        return self.state | dict(places=places, words=words)

    def _request(self, change) -> None:
        position, top_k = change["new"].get("position"), change["new"].get("top_k")
        if position not in self.state["positions"] or top_k not in WIDTHS:
            return
        if str(top_k) not in self.state["places"].get(str(position), dict(trees={}))["trees"]:
            self.state = self._with([(position, top_k)])

    def _gain(self, position):
        "Accepted tokens by which the tree is ahead of the chain."
        self.controls = self.controls | dict(position=position)
        counts = self.counts()
        return counts["tree"]["accepted"] - counts["chain"]["accepted"]

    def counts(self) -> dict[str, dict[str, float]]:
        "`tree_counts` of the tree and of the chain as the sliders are now."
        c = self.controls
        place = self.state["places"][str(c["position"])]
        tree, chain, truth = place["trees"][str(c["top_k"])], place["chain"], place["truth"]
        kept = kept_nodes(tree, c["depth"], c["budget"])
        straight = kept_nodes(chain, MOST_NODES, c["budget"])
        return dict(tree=tree_counts(tree, kept, truth), chain=tree_counts(chain, straight, truth))

    def fallback(self) -> str:
        "The nodes of the first tree as a table."
        c = self.controls
        place, words = self.state["places"][str(c["position"])], self.state["words"]
        tree = place["trees"][str(c["top_k"])]
        kept = kept_nodes(tree, c["depth"], c["budget"])
        path = accepted_path(tree, kept, place["truth"])
        level = depths(tree)
        rows = [
            f"<tr><td>{level[i]}</td><td>{escape(words[str(tree['tokens'][i])])}</td>"
            f"<td>{math.exp(tree['scores'][i]):.2f}</td>"
            f"<td>{'accepted' if i in path else ''}</td></tr>"
            for i in kept
        ]
        head = "<tr><th>depth</th><th>token</th><th>path probability</th><th></th></tr>"
        return f"<table>{head}{''.join(rows)}</table>"


def grow(
    drafter: Drafter, verifier: Verifier, prompt: Sequence[int], tokenizer: Any, max_new_tokens: int = 48
) -> TreeGrowth:
    """The drafter's dynamic tree at the positions of the verifier's greedy answer to a prompt (token ids). The drafter
    has probabilities at any node (`grow`), and the verifier taps its layers; the tokenizer is of both. Errors:
    TypeError for a drafter that cannot grow trees, ValueError for an answer that is too short."""
    if not callable(getattr(drafter, "grow", None)):
        raise TypeError(
            f"{type(drafter).__name__} drafts chains only: it has no `grow`; take a drafter "
            "with probabilities at any node"
        )
    written: Any = generate(verifier, NoDrafter(), list(prompt), k=0, max_new_tokens=max_new_tokens)
    answer = written.tokens
    if len(answer) < 2:
        raise ValueError(f"max_new_tokens={shown(max_new_tokens)}: at least 2 are needed")

    def words(tokens):
        text = tokenizer.decode(tokens)
        return text.replace("\n", "⏎").replace(" ", "␣") if len(tokens) == 1 else text

    return TreeGrowth(drafter, verifier, torch.tensor(list(prompt)), list(answer), words)
