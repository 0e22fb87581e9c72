#!/usr/bin/env python
"""Tokens a step against the nodes that the verifier reads: chains, product trees and trees whose nodes know their path,
of the same drafters. What the notebook on growing trees plots.

    python benchmarks/tree_budgets/run.py    some ten minutes on an idle core; more than half of it trains

Method: DFlash, DSpark and Domino, blocks of eight, two epochs on the shipped answers each. At every position of the
tiny verifier's greedy answers to 48 held-out prompts, eight of each kind, at most 160 tokens each, a drafter grows one
tree of 32 nodes of each sort; its n likeliest nodes are the tree of n nodes, the best of all there are. A step then
goes on behind what agrees with the answer, so the steps are those of greedy decoding. Intervals by bootstrap over
prompts. Results: benchmarks/tree_budgets/results/.
"""

import os
import platform
import tempfile
from datetime import date
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import pandas as pd
import torch
from transformers.utils.logging import disable_progress_bar

from speculators_nb.decode.generate import NoDrafter, feature_columns, generate
from speculators_nb.decode.tree import GreedyWithProbs
from speculators_nb.decode.tree_growth import dynamic_tree, independent_log_probs
from speculators_nb.evaluate.acceptance import bootstrap
from speculators_nb.lab.experiment import heldout_setting, train_on_shipped
from speculators_nb.models.dflash import DFlashDrafter

RESULTS = Path(__file__).resolve().parent / "results"
DRAFTERS, DEPTH, NODES, PROMPTS = ("dflash", "dspark", "domino"), 8, (1, 2, 4, 8, 16, 32), 48
DDTREE = "product of slots (DDTree)"


def agreeing(scored, truth):
    "[len(NODES)] how many tokens agree with the text, if the n likeliest nodes are verified"
    tree, scores = scored
    rank = scores.argsort(descending=True, stable=True).argsort().tolist()
    node_of = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parent_of, tree.tokens.tolist()))}
    node, ranks = -1, []
    for token in truth:
        node = node_of.get((node, token))
        if node is None:
            break
        ranks.append(rank[node])
    return [sum(place < n for place in ranks) for n in NODES]


def sorts(drafter, slots, tokens, features):
    "name -> scored tree"
    chain = drafter.propose(tokens, features, DEPTH, GreedyWithProbs())
    rows = independent_log_probs(chain.probs.log())
    with slots.grow(tokens, features, DEPTH) as alone, drafter.grow(tokens, features[:0], DEPTH) as behind_path:
        laws = {DDTREE: alone, "product of the chain's rows": rows, "each node behind its path": behind_path}
        trees = {name: dynamic_tree(law, max(NODES), DEPTH, max(NODES)) for name, law in laws.items()}
    return {"chain": dynamic_tree(rows, 1, DEPTH, DEPTH)} | trees


@torch.inference_mode()
def steps_of(verifier, drafter, prompt, stop):
    "name -> [len(NODES)] steps of one greedy answer, and its tokens behind the first one"
    answer = generate(verifier, NoDrafter(), prompt, k=0, max_new_tokens=160, eos_token_ids=stop)
    ids = torch.tensor([*prompt, *answer.tokens])
    features = verifier(ids[None]).hidden_states[0][:, feature_columns(verifier, drafter)]
    slots = DFlashDrafter(drafter.model)
    drafter.reset()
    accepted, read = {}, 0
    for end in range(len(prompt) + 1, len(ids)):
        scored = sorts(drafter, slots, ids[:end], features[read : end - 1])
        read = end - 1
        for name, tree in scored.items():
            accepted.setdefault(name, []).append(agreeing(tree, ids[end:].tolist()))
    steps = {name: np.zeros(len(NODES), int) for name in accepted}
    for name, rows in accepted.items():
        for i in range(len(NODES)):
            at = 0
            while at < len(rows):
                at += rows[at][i] + 1
                steps[name][i] += 1
    return steps, len(ids) - len(prompt) - 1


def ratio(counts):
    return counts[..., :1] / counts[..., 1:]


def table_of(name, measured):
    "A row for each sort of tree and number of nodes"
    tokens = np.array([n for _, n in measured])
    steps = {sort: np.stack([one[sort] for one, _ in measured]) for sort in measured[0][0]}
    rows = []
    for sort, by_nodes in steps.items():
        for i, nodes in enumerate(NODES):
            length = bootstrap(np.stack([tokens, by_nodes[:, i]], 1), ratio)
            against = bootstrap(np.stack([steps[DDTREE][:, i], by_nodes[:, i]], 1), ratio)
            rows.append(
                dict(drafter=name, tree=sort, nodes=nodes)
                | {f"tokens_a_step{end}": x[0] for end, x in zip(("", "_low", "_high"), length)}
                | {f"times_ddtree{end}": x[0] for end, x in zip(("", "_low", "_high"), against)}
            )
    return pd.DataFrame(rows)


def write(table):
    "The table, and a page"
    RESULTS.mkdir(exist_ok=True)
    table.round(4).to_csv(RESULTS / "tree_budgets.csv", index=False)
    wide = table.pivot(index=["drafter", "tree"], columns="nodes", values="tokens_a_step").round(2)
    (RESULTS / "README.md").write_text(
        f"""# Tokens a step by nodes, {date.today()}

Verifier `data/tiny-verifier`, greedy answers to {PROMPTS} held-out prompts; one thread, torch {torch.__version__},
{platform.machine()}. Written by `python benchmarks/tree_budgets/run.py`; the notebook on growing trees plots it.
`tree_budgets.csv` has 95 % intervals over prompts, and the ratio to the product tree of the slots alone, as many nodes.

DFlash's slots are independent: its three trees are one, DDTree as it was proposed. Of DSpark and Domino *slots* has the
logits that the head has not corrected; they are trained together with it.

{wide.reset_index().to_markdown(index=False)}
""",
        encoding="utf-8",
    )


def main():
    torch.set_num_threads(1)
    disable_progress_bar()
    tables = []
    for name in DRAFTERS:
        with tempfile.TemporaryDirectory() as folder:
            trained = train_on_shipped(name, folder, k=DEPTH, num_train_epochs=2, eval_strategy="no").model
        drafter = trained.eval().drafter()
        verifier, prompts, _, stop = heldout_setting({name: drafter}, PROMPTS)
        tables.append(table_of(name, [steps_of(verifier, drafter, prompt, stop) for prompt in prompts]))
        print(tables[-1].round(2).to_string(), flush=True)
    write(pd.concat(tables))


if __name__ == "__main__":
    main()
