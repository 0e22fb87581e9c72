"""Proposal methods: every drafter that grows trees, every method, greedy text token for token the verifier's; sampled
text by its law; what is refused."""

import copy
import functools

import pytest
import torch
from by_day import by_day
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from speculators_nb.core.registry import (
    DynamicTreeTokenProposalConfig,
    GreedyTokenProposalConfig,
    SamplingTokenProposalConfig,
    StaticTreeTokenProposalConfig,
    TokenProposalConfig,
)
from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.proposal_setup import TreeDrafter, proposal_setup
from speculators_nb.decode.tree import Drafter, GreedyWithProbs, Sampling, TokenTree
from speculators_nb.decode.tree_growth import dynamic_tree, parse_tree, static_tree
from speculators_nb.nn.draft_vocabulary import vocab_mapping_from_frequencies
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier

V, H = 24, 16
SHAPE = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=20,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=256,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
METHODS = {
    "greedy": GreedyTokenProposalConfig(speculative_tokens=3),
    "sampling": SamplingTokenProposalConfig(speculative_tokens=3),
    "static": StaticTreeTokenProposalConfig(initial_branching_factor=3, branching_factor=2, depth=3),
    "dynamic": DynamicTreeTokenProposalConfig(speculative_tokens=9, expansion_factor=3, depth=4),
}
BLOCKS = dict(draft_arch="qwen3", mask_token_id=V - 1)
LEARNED = {  # name -> (algorithm, arguments of `new_drafter`)
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3, two layers, norm_output": ("eagle3", dict(num_layers=2, norm_output=True)),
    "eagle3, half the vocabulary": ("eagle3", dict(draft_vocab_size=V // 2)),
    "peagle": ("peagle", dict(mask_token_id=V - 1, num_depths=4)),
    "peagle, half the vocabulary": ("peagle", dict(mask_token_id=V - 1, num_depths=4, draft_vocab_size=V // 2)),
    "dflash": ("dflash", dict(draft_arch="qwen3", mask_token_id=V - 1, block_size=5)),
    "dflash, from the anchor": (
        "dflash",
        dict(draft_arch="qwen3", mask_token_id=V - 1, block_size=4, sample_from_anchor=True, draft_vocab_size=V // 2),
    ),
    "mtp": ("mtp", dict(fresh_head=True, num_speculative_steps=4)),
    "medusa": ("medusa", dict(num_heads=3)),
    "mlp": ("mlp", dict(num_heads=4, intermediate_size=20)),
    "mlp, untied": ("mlp", dict(num_heads=4, tie_weights=False)),
    "dspark": ("dspark", BLOCKS | dict(block_size=5, markov_rank=5)),
    "dspark, rnn": (
        "dspark",
        BLOCKS | dict(block_size=6, markov_rank=5, markov_head_type="rnn", sample_from_anchor=False),
    ),
    "dspark, gated, half the vocabulary": (
        "dspark",
        BLOCKS | dict(block_size=5, markov_rank=5, markov_head_type="gated", draft_vocab_size=V // 2),
    ),
    "domino": ("domino", BLOCKS | dict(block_size=5, emb_dim=6, gru_hidden_dim=7)),
    "domino, half the vocabulary": (
        "domino",
        BLOCKS
        | dict(block_size=6, emb_dim=6, gru_hidden_dim=7, sample_from_anchor=False, draft_vocab_size=V // 2)
        | dict(pure_draft_prefix_len=0),
    ),
    "dflash2": ("dflash2", BLOCKS | dict(block_size=6, selector_rank=5, selector_top_k=7)),
    "lilicorr": (
        "lilicorr",
        BLOCKS | dict(block_size=6, lilicorr_hidden_size=8, lilicorr_factor_dim=4, lilicorr_num_heads=2),
    ),
    "lilicorr, convolutions": (
        "lilicorr",
        BLOCKS
        | dict(block_size=5, lilicorr_hidden_size=8, lilicorr_factor_dim=4, lilicorr_num_heads=2)
        | dict(is_causal=True, slot_convolutions=True, conv_group_size=4),
    ),
    "xpress": ("xpress", BLOCKS | dict(block_size=6, xpress_rank=6)),
    "xpress, half the vocabulary": (
        "xpress",
        BLOCKS | dict(block_size=5, xpress_rank=6, sample_from_anchor=True, draft_vocab_size=V // 2),
    ),
}
LAST_STATE = ("eagle", "mtp", "medusa", "mlp")  # read the verifier's last state, and no layers of a choice
PARALLEL = [name for name in LEARNED if name.startswith(("peagle", "dflash", "medusa")) and name != "dflash2"]
PATHS = [name for name in LEARNED if name.startswith(("mlp", "dspark", "domino", "dflash2", "xpress", "lilicorr"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("verifier")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    return folder


PROMPTS = [torch.randint(2, V, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 3)]
NEW = 20


@pytest.fixture(scope="module")
def plain(folder):
    "What the verifier writes alone."
    verifier = Verifier.from_pretrained(folder, [0])
    return [generate(verifier, NoDrafter(), p, max_new_tokens=NEW, k=0).tokens for p in PROMPTS]


@pytest.fixture(scope="module")
def drafter_of(folder):
    made = {}

    def make(name):
        if name not in made:
            if name == "draft model":
                torch.manual_seed(5)
                made[name] = DraftModel(
                    LlamaForCausalLM(LlamaConfig(**SHAPE | dict(num_hidden_layers=2))).eval(),
                    Verifier.from_pretrained(folder, [0]),
                )
            else:
                algorithm, args = LEARNED[name]
                mapping = (
                    vocab_mapping_from_frequencies({t: 1 + t % 5 for t in range(V)}, n, V)
                    if (n := args.get("draft_vocab_size"))
                    else None
                )
                model = new_drafter(
                    algorithm,
                    folder,
                    mapping=mapping,
                    target_layer_ids=[0, 2, 4] if algorithm not in LAST_STATE else None,
                    **args,
                )
                g = torch.Generator().manual_seed(1)
                with torch.no_grad():
                    for p in model.parameters():
                        if p.requires_grad:
                            p.add_(torch.randn(p.shape, generator=g) * 0.2)
                made[name] = model.drafter()
        return made[name]

    return make


EVERY = [*LEARNED, "draft model"]


# each drafter by one method a day, and in turn by each
BY_DAY = [(name, [*METHODS][i % len(METHODS)]) for i, name in enumerate(EVERY)]


@pytest.mark.parametrize("name, method", by_day([(name, method) for name in EVERY for method in METHODS], BY_DAY))
def test_greedy_text_is_the_verifiers(folder, plain, drafter_of, name, method):
    setup = proposal_setup(drafter_of(name), METHODS[method])
    assert isinstance(setup.drafter, Drafter) and setup.rule.lossless
    verifier = Verifier.from_pretrained(folder, setup.drafter.aux_layer_ids or [0])
    one = generate(verifier, prompt_ids=PROMPTS[0], max_new_tokens=NEW, **setup._asdict())
    assert one.tokens == plain[0] and len(one.steps) > 1
    assert (method in ("static", "dynamic")) == any(s.parents is not None for s in one.steps)
    # a batch: each its own state
    assert [g.tokens for g in generate(verifier, prompt_ids=PROMPTS, max_new_tokens=NEW, **setup._asdict())] == plain


def paths_of(tree):
    paths = {-1: ()}
    for i, (t, p) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
        paths[i] = (*paths[p], t)
    return paths


def text_for(folder, drafter):
    "Nine tokens, and the states of all but the last."
    return text_of(folder, tuple(drafter.aux_layer_ids) or (0,))


@functools.cache
def text_of(folder, layers):
    verifier = Verifier.from_pretrained(folder, layers)
    tokens = torch.randint(2, V, (9,), generator=torch.Generator().manual_seed(2))
    return tokens, verifier(tokens[None, :-1]).hidden_states[0]


class Forced(Sampling):
    "Draws the tokens of a path, and then any."

    def __init__(self, drafter, path):
        super().__init__(1.0)
        self.drafter, self.script = drafter, iter(path)

    def draw(self, probs):
        ids = torch.arange(probs.shape[-1])
        if len(ids) != V:
            ids = self.drafter.model.to_verifier(ids)
        return (ids == next(self.script, 0)).long().argmax()[None]


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_slots_make_a_product(folder, drafter_of, name):
    """Below every node of a level stands the law of the next slot, which is that of `propose`; the cache is left for
    the next step."""
    drafter = drafter_of(name)
    tokens, states = text_for(folder, drafter)
    drafter.reset()
    laws = drafter.propose(tokens, states, 3, Sampling(1.0, torch.Generator().manual_seed(0))).probs
    drafter.reset()
    with torch.inference_mode(), drafter.grow(tokens[:5], states[:4], 3):
        pass
    with torch.inference_mode(), drafter.grow(tokens, states[4:], 3) as law:
        tree = static_tree(law, 2, 2, 3)
        rows = law(torch.arange(-1, 6), tree.tokens[:6], tree.parents[:6]).exp()
    torch.testing.assert_close(rows, laws[[0, 1, 1, 2, 2, 2, 2]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in EVERY if n not in PARALLEL])
def test_a_nodes_law_is_that_of_a_chain_along_its_path(folder, drafter_of, name):
    """Force the chain of `propose` along the path of each node, with a Sampling that says what to draw: float32
    rounding alone lies between the laws (the largest seen is 6e-5, behind logits of 20 and more). Before and after, the
    drafter's chains are the same: growing leaves no trace."""
    drafter = drafter_of(name)
    tokens, states = text_for(folder, drafter)
    drafter.reset()
    drafter.propose(tokens[:5], states[:4], 2, Sampling())
    asked = {}
    with torch.inference_mode(), drafter.grow(tokens, states[4:], 4) as law:

        def noting(nodes, words, parents):
            rows, paths = law(nodes, words, parents), paths_of(TokenTree(words, parents))
            asked.update({paths[i]: row.exp() for i, row in zip(nodes.tolist(), rows)})
            return rows

        dynamic_tree(noting, 3, 4, 20)
    after = drafter.propose(torch.cat([tokens, tokens[:1]]), states[:1], 3, Sampling())
    drafter.reset()
    assert torch.equal(
        after.tokens,
        drafter.propose(torch.cat([tokens, tokens[:1]]), torch.cat([states, states[:1]]), 3, Sampling()).tokens,
    )
    assert len(asked) == 1 + 3 * 3
    for path, got in asked.items():
        drafter.reset()
        chain = drafter.propose(tokens, states, 4, Forced(drafter, path))
        torch.testing.assert_close(chain.probs[len(path)], got, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PATHS)
def test_a_tree_of_one_child_a_level_is_the_chain(folder, drafter_of, name):
    "Bit for bit: the head gets the same tokens and states, and gives the same logits."
    drafter = copy.copy(drafter_of(name))
    tokens, states = text_for(folder, drafter)
    head, given = drafter.head, []

    def noting(*request):
        made = head(*request)

        def step(*of_paths):
            given.append(made.step(*of_paths))
            return given[-1]

        return made._replace(step=step)

    drafter.head = noting
    chain = drafter.propose(tokens, states, 4, GreedyWithProbs())
    by_chain, given = given, []
    drafter.reset()
    with torch.inference_mode(), drafter.grow(tokens, states, 4) as law:
        tree = static_tree(law, 1, 1, 4)
    assert tree.is_chain and len(tree) == 4 and torch.equal(tree.tokens, chain.tokens)
    for (one, before), (other, after) in zip(by_chain, given, strict=True):
        assert torch.equal(one, other) and all(map(torch.equal, before, after))
    drafter.reset()  # as greedy decoding drafts
    assert torch.equal(drafter.propose(tokens, states, 4, Sampling()).tokens, chain.tokens)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", PATHS)
def test_random_trees(folder, drafter_of, name, seed):
    "Nodes drawn at random, of any token: the law behind each is that of the chain that is forced along its path."
    drafter = drafter_of(name)
    tokens, states = text_for(folder, drafter)
    g = torch.Generator().manual_seed(seed)
    laws, level, ids, parents = {}, [-1], [], []
    drafter.reset()
    with torch.inference_mode(), drafter.grow(tokens, states, 4) as law:
        for _ in range(4):
            tree = TokenTree(torch.tensor(ids).long(), torch.tensor(parents).long())
            rows = law(torch.tensor(level), tree.tokens, tree.parents)
            paths = paths_of(tree)
            laws |= {paths[node]: row.exp() for node, row in zip(level, rows)}
            words = [torch.multinomial(row.exp(), 2, generator=g).tolist() for row in rows]
            children = [(node, word) for node, pair in zip(level, words) for word in pair]
            kept = [children[i] for i in torch.randperm(len(children), generator=g)[:3]]
            level = list(range(len(ids), len(ids) + len(kept)))
            ids, parents = ids + [word for _, word in kept], parents + [node for node, _ in kept]
    assert len(laws) >= 9
    for path, got in laws.items():
        drafter.reset()
        chain = drafter.propose(tokens, states, 4, Forced(drafter, path))
        torch.testing.assert_close(chain.probs[len(path)], got, rtol=1e-3, atol=1e-4)


def test_window(folder):
    "A drafter with a sliding window of 4: the law of each node is that of the chain along its path."
    model = new_drafter("eagle3", folder, target_layer_ids=[0, 2, 4])
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g) * 0.2)
    for layer in model.layers:
        layer.window = 4
    drafter, verifier = model.drafter(), Verifier.from_pretrained(folder, [0, 2, 4])
    tokens = torch.randint(2, V, (9,), generator=g)
    states = verifier(tokens[None, :-1]).hidden_states[0]
    with torch.inference_mode(), drafter.grow(tokens, states, 4) as law:
        chain = dynamic_tree(law, 1, 6, 6)[0]
    drafter.reset()
    assert chain.is_chain and torch.equal(chain.tokens, drafter.propose(tokens, states, 6, Sampling()).tokens)
    for layer in model.layers:
        layer.window = None
    drafter.reset()
    # the window matters here
    assert not torch.equal(chain.tokens, drafter.propose(tokens, states, 6, Sampling()).tokens)


def test_rules():
    drafter = NgramDrafter()
    for method, lossless in (
        (GreedyTokenProposalConfig(), True),
        (GreedyTokenProposalConfig(verifier_accept_k=2), False),
        (GreedyTokenProposalConfig(accept_tolerance=0.1), False),
        (SamplingTokenProposalConfig(), True),
        (SamplingTokenProposalConfig(accept_lenience=0.5), False),
    ):
        setup = proposal_setup(drafter, method)
        assert setup.drafter is drafter and setup.rule.lossless == lossless and setup.k == 5


def test_the_tree_is_the_methods(drafter_of):
    "Depth is the smaller of the method's and what is asked for."
    drafter = TreeDrafter(drafter_of("draft model"), METHODS["static"])
    tokens = torch.tensor([3, 4, 5])
    assert (
        len(drafter.propose(tokens, None, 9, Sampling())) == 3 + 6 + 12
        and len(drafter.propose(tokens, None, 2, Sampling())) == 3 + 6
    )
    drawn = drafter.propose(tokens, None, 2, Sampling(1.0, torch.Generator().manual_seed(0)))
    assert len(drawn) == 9 and drawn.probs is not None
    assert len(TreeDrafter(drafter_of("draft model"), METHODS["dynamic"]).propose(tokens, None, 9, Sampling(1.0))) == 9


@pytest.mark.parametrize("name", ["medusa", "mlp", "mlp, untied", "domino", "lilicorr", "xpress"])
def test_nothing_follows_the_last_head(folder, drafter_of, name):
    "Asked for a deeper tree than it has heads or slots, a drafter proposes one as deep as these."
    drafter = drafter_of(name)
    tokens, states = text_for(folder, drafter)
    for sampling in (Sampling(), Sampling(1.0, torch.Generator().manual_seed(0))):
        deep = TreeDrafter(
            drafter, StaticTreeTokenProposalConfig(initial_branching_factor=1, branching_factor=2, depth=6)
        ).propose(tokens, states, 6, sampling)
        assert len(deep) == 2**drafter.trained_tokens - 1 and int(deep.depth.max()) == drafter.trained_tokens
    assert (
        int(TreeDrafter(drafter, METHODS["dynamic"]).propose(tokens, states, 6, Sampling()).depth.max())
        <= drafter.trained_tokens
    )


SHAPE_OF_MEDUSA = parse_tree("[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]")


@pytest.mark.parametrize("name", ["medusa", "mtp", "eagle3"])
def test_a_shape_of_ones_own(folder, plain, drafter_of, name):
    drafter = TreeDrafter(drafter_of(name), SHAPE_OF_MEDUSA)
    verifier = Verifier.from_pretrained(folder, drafter.aux_layer_ids)
    got = generate(verifier, drafter, PROMPTS, k=drafter.depth, max_new_tokens=NEW)
    assert [g.tokens for g in got] == plain and {len(s.draft) for g in got for s in g.steps[:5]} == {7}
    # (0, 0, 0) lies deeper
    assert [len(s.draft) for s in generate(verifier, drafter, PROMPTS[0], k=2, max_new_tokens=8).steps[:1]] == [6]


def test_refused(drafter_of):
    for name in ("static", "dynamic"):
        with pytest.raises(TypeError, match="NgramDrafter drafts chains only"):
            proposal_setup(NgramDrafter(), METHODS[name])
    with pytest.raises(ValueError, match="'greedy' grows no tree"):
        TreeDrafter(drafter_of("draft model"), METHODS["greedy"])
    with pytest.raises(ValueError, match="accept_lenience=0"):
        proposal_setup(NgramDrafter(), SamplingTokenProposalConfig(accept_lenience=0))

    class Other(TokenProposalConfig):
        pass

    with pytest.raises(ValueError, match="proposal_type='other' is not known"):
        proposal_setup(NgramDrafter(), Other(proposal_type="other"))


def test_copies_share_weights_not_state(drafter_of):
    drafter = TreeDrafter(drafter_of("eagle3"), METHODS["dynamic"])
    other = copy.copy(drafter)
    assert (
        other.drafter is not drafter.drafter
        and other.drafter.model is drafter.drafter.model
        and other.trained_tokens == drafter.trained_tokens
    )
