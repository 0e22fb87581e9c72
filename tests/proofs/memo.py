"""Fifty thousand texts from one prompt meet the same few hundred contexts again and again. Here what is a function of
the context is computed once, by the real networks, and remembered; what is random is not: every token is drawn, every
proposal sampled and every rule applied anew, inside the real `generate`.

Remembered are the verifier's logits for a text and a proposal (from passes of the real `Context` over many ragged
requests, tree masks and all), its laws after temperature and filters, and a drafter's laws along a path of drafted
tokens."""

import copy

import torch

from speculators_nb.decode.proposal_setup import grow_tree
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.decode.verification import Context


def inverse(weights, generator=None):
    """`decode.tree.draw_tokens` by the cumulated law in float64: the same law, a tenth of the time at 2048 tokens."""
    total = weights.double().cumsum(-1)
    u = torch.rand((*total.shape[:-1], 1), dtype=torch.float64, generator=generator) * total[..., -1:]
    return torch.searchsorted(total, u, right=True).clamp(max=total.shape[-1] - 1)[..., 0]


ROOM, BATCH = 8_000, 64  # passes remembered of one memory; texts read at a time


class Memory:
    "What the verifier says after one prompt. Its texts are tuples of token ids, the prompt included."

    def __init__(self, verifier, prompt):
        self.verifier = verifier
        self.prompt = tuple(prompt)
        self.passes = {}
        self.laws = {}
        self.states = {}
        self.read_texts = 0
        self.start = Context(verifier)
        self.start.read([torch.tensor(prompt[:-1])], [TokenTree.chain([])])
        self.start.keep([[]])
        self.start_states = verifier(torch.tensor([prompt[:-1]])).hidden_states[0]

    def _pass(self, texts, trees):
        """One pass over texts that begin with the prompt: logits [N+1, V] and states of what lies behind the prompt's
        last token, itself included."""
        context, self.read_texts = Context(self.verifier, len(texts)), self.read_texts + len(texts)
        context.cache = copy.deepcopy(self.start.cache)
        context.slots, context.lengths = self.start.slots, self.start.lengths * len(texts)
        context.cache.batch_repeat_interleave(len(texts))
        return context.read([torch.tensor(t[len(self.prompt) - 1 :]) for t in texts], trees)

    def read(self, texts, trees):
        "Logits [N+1, V] after the last token of each text and after each node of its tree."
        keys = [(text, tuple(tree.tokens.tolist()), tuple(tree.parents.tolist())) for text, tree in zip(texts, trees)]
        new = list({key: (text, tree) for key, text, tree in zip(keys, texts, trees) if key not in self.passes}.items())
        found = {}
        for at in range(0, len(new), BATCH):
            part = new[at : at + BATCH]
            for (key, (text, tree)), (logits, _) in zip(part, self._pass(*zip(*[pair for _, pair in part]))):
                found[key] = logits[-len(tree) - 1 :].clone()
        for key in list(found)[: max(0, ROOM - len(self.passes))]:
            self.passes[key] = found[key]
        return [self.passes[key] if key in self.passes else found[key] for key in keys]

    def features(self, text, layers):
        "The verifier's states of `text`, the columns of some layers."
        if text not in self.states:
            behind = (
                self._pass([text], [TokenTree.chain([])])[0][1]
                if len(text) >= len(self.prompt)
                else torch.empty(0, self.start_states.shape[1])
            )
            self.states[text] = torch.cat([self.start_states, behind])[: len(text)]
        have, h = list(self.verifier.aux_layer_ids), self.verifier.hidden_size
        return self.states[text][:, [c for i in layers for c in range(have.index(i) * h, (have.index(i) + 1) * h)]]

    def context_class(memory):
        "A `decode.verification.Context` that looks its passes up."

        class Remembered:
            def __init__(self, verifier, requests=1, *how):
                self.verifier, self.texts = verifier, [()] * requests

            def read(self, unread, trees):
                self.texts, self.trees = [text + tuple(new.tolist()) for text, new in zip(self.texts, unread)], trees
                empty = [torch.empty(len(new) + len(tree), 0) for new, tree in zip(unread, trees)]
                return list(zip(memory.read(self.texts, trees), empty))

            def keep(self, paths, requests=None):
                going = range(len(paths)) if requests is None else requests
                self.texts = [self.texts[b] + tuple(self.trees[b].tokens[paths[b]].tolist()) for b in going]

        return Remembered

    def sampling(self, temperature, seed, **filters):
        "A `Sampling` that computes the law of remembered logits once; draws are real."
        memory, generator = self, torch.Generator().manual_seed(seed)

        class Remembered(Sampling):
            def probabilities(self, logits):
                key = logits.data_ptr(), temperature, self.top_k, self.top_p, self.min_p
                if key not in memory.laws:
                    law = super().probabilities(logits)
                    if len(memory.laws) >= 4 * ROOM:
                        return law
                    memory.laws[key] = law, logits  # the logits are kept alive: no other tensor gets their address
                return memory.laws[key][0]

        return Remembered(temperature, generator, **filters)


class Remembered:
    """Base: a drafter asked once for what it says in a context. It reads features from the memory, and none from
    `generate`."""

    aux_layer_ids = ()

    def __init__(self, drafter, memory):
        self.drafter, self.memory, self.known = drafter, memory, {}

    def __copy__(self):
        return self

    def reset(self):
        pass

    def fresh(self, text):
        "The drafter at the beginning of a request, and what it is handed then."
        layers = self.drafter.aux_layer_ids
        if not len(layers):
            return None  # a draft model finds by itself how much of the text it has read
        self.drafter.reset()
        return self.memory.features(text[:-1], layers)


class Deterministic(Remembered):
    "One whose proposal follows from the context: it is remembered as it is."

    def propose(self, tokens, features, k, sampling):
        key = tuple(tokens.tolist()), k
        if key not in self.known:
            self.known[key] = self.drafter.propose(tokens, self.fresh(key[0]), k, sampling)
        return self.known[key]


class Independent(Remembered):
    "One whose laws do not depend on what it drew: they are remembered, and drawn from each time."

    def propose(self, tokens, features, k, sampling):
        key = tuple(tokens.tolist()), k, sampling.temperature
        if key not in self.known:
            self.known[key] = self.drafter.propose(tokens, self.fresh(key[0]), k, sampling).probs
        return TokenTree.chain(sampling.draw(self.known[key]), self.known[key])


class Sequential(Remembered):
    """One that draws token after token. A path that is not known yet is drawn again by the drafter itself, from the
    same random numbers, and comes out the same."""

    def propose(self, tokens, features, k, sampling):
        text, path, before = tuple(tokens.tolist()), (), sampling.generator.get_state()
        here = text, k, sampling.temperature
        while len(path) < k and (*here, path) in self.known:
            path += (int(sampling.draw(self.known[*here, path])),)
        if (*here, path) in self.known:
            return self.known[*here, path]  # a whole tree is known by its whole path
        sampling.generator.set_state(before)
        tree = self.drafter.propose(tokens, self.fresh(text), k, sampling)
        drawn = tuple(tree.tokens.tolist())
        assert drawn[: len(path)] == path, (drawn, path)
        if len(self.known) < 4 * ROOM:
            for i in range(k):
                self.known[*here, drawn[:i]] = tree.probs[i : i + 1]
            self.known[*here, drawn] = tree
        return tree


class Grown(Remembered):
    """A `TreeDrafter`: the laws of nodes are remembered by the path to them; the tree is grown from these. An unknown
    node lets the drafter grow it, from the same random numbers."""

    def propose(self, tokens, features, k, sampling):
        text, before, depth = tuple(tokens.tolist()), sampling.generator.get_state(), min(k, self.drafter.depth)

        def paths_of(words, parents):
            paths = {-1: ()}
            for i, (word, parent) in enumerate(zip(words.tolist(), parents.tolist())):
                paths[i] = (*paths[parent], word)
            return paths

        def remembered(nodes, words, parents):
            paths = paths_of(words, parents)
            return torch.stack([self.known[text, depth, paths[n]] for n in nodes.tolist()])

        # rows of a new tensor: their laws are not worth remembering
        plain = Sampling(sampling.temperature, sampling.generator, sampling.top_k, sampling.top_p, sampling.min_p)
        try:
            return grow_tree(self.drafter.method, remembered, depth, plain, self.drafter.draw)
        except KeyError:
            sampling.generator.set_state(before)
        with torch.inference_mode(), self.drafter.drafter.grow(tokens, self.fresh(text), depth) as law:

            def noting(nodes, words, parents):
                rows, paths = law(nodes, words, parents), paths_of(words, parents)
                if len(self.known) < 4 * ROOM:
                    self.known |= {(text, depth, paths[n]): row.clone() for n, row in zip(nodes.tolist(), rows)}
                return rows

            return grow_tree(self.drafter.method, noting, depth, plain, self.drafter.draw)
