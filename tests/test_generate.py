"The generation loop against transformers' own greedy decoding, which knows nothing of it. Drawn texts: test_proofs."

import warnings
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_verifier import TURNING, read_whole, small_verifier, turning_verifier
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from speculators_nb.core.config import SpeculatorsConfig, VerifierConfig
from speculators_nb.core.registry import DynamicTreeTokenProposalConfig, GreedyTokenProposalConfig
from speculators_nb.decode import acceptance_rules as accept
from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import HiddenStates, NoDrafter, Trace, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.verifier.tapped_model import Verifier

EOS, VOCAB = 1, 40
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=EOS,
    pad_token_id=0,
)
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, sliding_window=8)
    ),  # soft-caps, and a window that the text outgrows
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=96,
            n_embd=32,
            n_layer=4,
            n_head=4,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    ),  # learned positions
}


@pytest.fixture(scope="module")
def verifiers():
    torch.manual_seed(0)
    return {name: Verifier(make().eval(), [0, 2, 4]) for name, make in FAMILIES.items()}


@pytest.fixture(scope="module")
def verifier(verifiers):
    return verifiers["llama"]


class Scripted:
    """Proposes what `guess(tokens, k)` says, and notes what it was handed."""

    def __init__(self, guess, aux_layer_ids=()):
        self.guess, self.aux_layer_ids, self.calls, self.resets = guess, aux_layer_ids, [], 0

    def reset(self):
        self.resets += 1

    def propose(self, tokens, features, k, sampling):
        self.calls.append((tokens.clone(), features, k))
        return TokenTree.chain(self.guess(tokens.tolist(), k))


def oracle(text, wrong_every=0):
    """Knows the answer, and is wrong at every n-th place of it."""

    def guess(tokens, k):
        truth = text[len(tokens) : len(tokens) + k]
        return [
            (t + 1) % VOCAB if wrong_every and (len(tokens) + i) % wrong_every == 0 else t for i, t in enumerate(truth)
        ]

    return guess


@cache
def written(verifier, prompt, n):
    "What transformers writes behind a prompt."
    out = verifier.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=n, eos_token_id=EOS)
    return out[0, len(prompt) :].tolist()


def hf_greedy(verifier, prompt, n):
    return [*written(verifier, tuple(map(int, prompt)), n)]


PROMPTS = [[5, 9, 2, 7, 9, 2], [3], [30, 31, 30, 31, 30, 31, 8]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_greedy_is_what_transformers_generates(verifiers, family, prompt):
    """Token for token in float32, for drafters from perfect to useless."""
    v = verifiers[family]
    truth = hf_greedy(v, prompt, 16)
    drafters = {
        "none": NoDrafter(),
        "n-gram": NgramDrafter(1, 4),
        "perfect": Scripted(oracle(prompt + truth)),
        "wrong at 3": Scripted(oracle(prompt + truth, 3)),
        "always wrong": Scripted(oracle(prompt + truth, 1)),
    }
    for name, k, rule in [*((name, 4, "standard") for name in drafters), ("wrong at 3", 1, "greedy")]:
        g = generate(v, drafters[name], prompt, max_new_tokens=16, k=k, eos_token_ids=[EOS], rule=rule)
        assert g.tokens == truth, (name, k, rule)
        assert g.finish_reason == ("stop" if truth[-1] == EOS else "length")
        assert g.tokens == g.tokens[:1] + [t for s in g.steps for t in s.tokens]


def test_the_window_of_fly_is_that_of_the_drafts_that_were_asked_for(verifier):
    """As in vLLM's dictionary. A wrong token with two right ones behind it is accepted by a window of 2, the longest of
    three tokens; of six drafted ones the window is 5."""
    prompt = PROMPTS[0]

    def guess(tokens, k):
        wrong = (hf_greedy(verifier, tokens, 1)[0] + 1) % VOCAB
        return [wrong, *hf_greedy(verifier, [*tokens, wrong], 2)]

    def text(rule, k):
        return generate(verifier, Scripted(guess), prompt, max_new_tokens=12, k=k, rule=rule).tokens

    dictionary = dict(method="ngram", num_speculative_tokens=6, rejection_sample_method="fly", engine_version="0.33")
    assert text("fly", 6) == text(SpeculativeConfig(**dictionary).rule(), 6) == hf_greedy(verifier, prompt, 12)
    by_draft, short = text(accept.fly(), 6)[:8], text("fly", 3)[:8]  # behind that drafts are cut to the limit
    assert by_draft == short != text("fly", 6)[:8]
    for n in range(2, 10):
        window = SpeculativeConfig(**dictionary | dict(num_speculative_tokens=n)).fly_window_size
        assert window == int(accept.fly_window(n)) == min(6, n - 1)
    for one in (lambda: text("fly", 1), lambda: SpeculativeConfig(**dictionary | dict(num_speculative_tokens=1))):
        with pytest.raises(ValueError, match="looks at the tokens after a doubtful one"):
            one()
    assert text("fly", 0) == hf_greedy(verifier, prompt, 12)  # plain decoding


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_drafter_leaves_greedy_output_alone(verifier, data):
    """Proposals of any length, also longer than asked, with true and false tokens mixed."""
    prompt, n = data.draw(st.sampled_from(PROMPTS)), data.draw(st.integers(1, 20))
    truth = hf_greedy(verifier, prompt, 24)

    def guess(tokens, k):
        right = (prompt + truth)[len(tokens) :]
        length = data.draw(st.integers(0, min(len(right), k + 2)))
        return [t if data.draw(st.booleans()) else data.draw(st.integers(0, VOCAB - 1)) for t in right[:length]]

    g = generate(
        verifier, Scripted(guess), prompt, max_new_tokens=n, k=data.draw(st.integers(0, 6)), eos_token_ids=[EOS]
    )
    assert g.tokens == truth[:n]
    assert all(s.accepted <= len(s.draft) <= s.requested for s in g.steps)


@pytest.mark.parametrize("k", [3, lambda steps: (3, 0, 0, 2)[len(steps) % 4]], ids=["drafted", "some steps not"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_rows_of_decided_tokens(verifiers, family, k):
    """All rows ever handed over, in order, are those of one pass over the final text: no rejected token, no gap (also
    where a step drafts nothing), no repetition. Float32 sums in another order: 1e-4 relative to rows of size about 1 to
    10."""
    v, prompt = verifiers[family], PROMPTS[0]
    truth = generate(v, NoDrafter(), prompt, max_new_tokens=30, k=0).tokens
    drafter = Scripted(oracle(prompt + truth, 3), aux_layer_ids=(0, 4))
    g = generate(v, drafter, prompt, max_new_tokens=30, k=k)
    assert 0 < sum(s.accepted for s in g.steps) < sum(len(s.draft) for s in g.steps)
    for _, features, asked in drafter.calls:
        assert features.shape[0] > 0 and features.shape[1] == 2 * v.hidden_size and 1 <= asked <= 3
    rows = torch.cat([f for _, f, _ in drafter.calls])
    assert len(rows) == len(drafter.calls[-1][0]) - 1  # every position but the last decided token's
    whole = v(torch.tensor([prompt + g.tokens])).hidden_states[0, : len(rows)]
    h = v.hidden_size
    torch.testing.assert_close(rows, torch.cat([whole[:, :h], whole[:, 2 * h :]], -1), rtol=1e-4, atol=1e-4)
    assert drafter.resets == 1


def random_eagle(verifier, layer_ids, draft_vocab):
    "A drafter with features, a cache of its own and a reduced vocabulary, its weights random."
    layer = LlamaConfig(**SHAPE | dict(num_hidden_layers=1))
    proposal = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=layer_ids,
        speculators_config=proposal,
    )
    model = Eagle3DraftModel(config)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.randperm(VOCAB, generator=g)[:draft_vocab], True)
    model.load_vocab_mappings(kept, kept.nonzero()[:, 0] - torch.arange(draft_vocab))
    return model.drafter()


@pytest.mark.parametrize("layer_ids", [[0, 2, 4], [2]])
def test_a_trained_kind_of_drafter(verifier, layer_ids):
    """Features, a reduced vocabulary, probabilities at temperature 1: greedy output unchanged, sampled output
    reproducible, nothing left over from request to request."""
    drafter, prompt = random_eagle(verifier, layer_ids, 30), PROMPTS[0]
    greedy = generate(verifier, drafter, prompt, max_new_tokens=24, k=4, eos_token_ids=[EOS])
    assert greedy.tokens == hf_greedy(verifier, prompt, 24)
    runs = [
        generate(
            verifier, drafter, prompt, max_new_tokens=24, k=4, sampling=Sampling(1.0, torch.Generator().manual_seed(5))
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert any(s.accepted for s in runs[0].steps) and any(s.accepted < len(s.draft) for s in runs[0].steps)
    assert generate(verifier, drafter, prompt, max_new_tokens=24, k=4, eos_token_ids=[EOS]) == greedy


class Bushy(Scripted):
    """Branches at random, with the truth among them where `oracle` knows it; every node's token is new among its
    siblings."""

    def __init__(self, text, seed, aux_layer_ids=()):
        super().__init__(None, aux_layer_ids)
        self.text, self.g = text, torch.Generator().manual_seed(seed)

    def propose(self, tokens, features, k, sampling):
        self.calls.append((tokens.clone(), features, k))
        truth, nodes, parents, right = self.text[len(tokens) : len(tokens) + k], [], [], -1
        for depth, t in enumerate(truth):
            below = list(
                {
                    t if int(torch.randint(4, (1,), generator=self.g)) else (t + 1) % VOCAB,
                    (t + 2) % VOCAB,
                    int(torch.randint(VOCAB, (1,), generator=self.g)),
                }
            )
            at = len(nodes)
            nodes += below
            parents += [right] * len(below)
            right = at + below.index(t) if t in below else at
        return TokenTree(torch.tensor(nodes, dtype=torch.long), torch.tensor(parents, dtype=torch.long))


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_and_batches_leave_greedy_output_alone(verifiers, family):
    """One pass over a tree, ragged requests together, every rule that is lossless at temperature 0; features are still
    those of one pass over the text."""
    v = verifiers[family]
    truths = [hf_greedy(v, p, 24) for p in PROMPTS]
    for rule in ("greedy", "strict", "standard") if family == "llama" else ("standard",):  # which knows no family
        for prompt, truth in zip(PROMPTS, truths):
            bushy = Bushy(prompt + truth, 3, aux_layer_ids=(0, 4))
            g = generate(v, bushy, prompt, max_new_tokens=24, k=4, eos_token_ids=[EOS], rule=rule)
            assert g.tokens == truth and all(s.accepted == len(s.path) for s in g.steps if s.path is not None)
            assert len(truth) < 9 or any(s.parents for s in g.steps)
            rows = torch.cat([f for _, f, _ in bushy.calls]) if bushy.calls else torch.empty(0, 0)
            whole, h = v(torch.tensor([prompt + g.tokens])).hidden_states[0, : len(rows)], v.hidden_size
            torch.testing.assert_close(
                rows, torch.cat([whole[:, :h], whole[:, 2 * h :]], -1) if bushy.calls else rows, rtol=1e-4, atol=1e-4
            )
    for drafter in (NoDrafter(), NgramDrafter(1, 4)):
        together = generate(v, drafter, PROMPTS, max_new_tokens=24, k=3, eos_token_ids=[EOS])
        assert [g.tokens for g in together] == truths
        alone = [generate(v, drafter, p, max_new_tokens=24, k=3, eos_token_ids=[EOS]) for p in PROMPTS]
        assert together == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_of_every_family(verifiers, family):
    """A random llama, and the verifier itself: the text is the verifier's, and a perfect draft model is never wrong.
    Alone and in a batch."""
    v = verifiers[family]
    truths = [hf_greedy(v, p, 16) for p in PROMPTS]
    for model in {verifiers["llama"].model, v.model}:
        drafter = DraftModel(model, v)
        alone = [generate(v, drafter, p, max_new_tokens=16, k=3, eos_token_ids=[EOS]) for p in PROMPTS]
        assert [g.tokens for g in alone] == truths
        assert model is not v.model or all(s.accepted == len(s.draft) for g in alone for s in g.steps)
        assert generate(v, drafter, PROMPTS, max_new_tokens=16, k=3, eos_token_ids=[EOS]) == alone


def test_a_draft_model_speaks_the_verifiers_words(verifier):
    other = LlamaForCausalLM(LlamaConfig(**SHAPE | dict(vocab_size=VOCAB + 2)))
    with pytest.raises(ValueError, match=f"vocab_size {VOCAB + 2}, the verifier {VOCAB}"):
        DraftModel(other, verifier)


def test_a_batch_of_one_and_a_changing_k(verifier):
    prompt = PROMPTS[0]
    truth = hf_greedy(verifier, prompt, 12)
    assert generate(verifier, NoDrafter(), [prompt], max_new_tokens=12, k=0, eos_token_ids=[EOS])[0].tokens == truth
    asked = []

    def k(steps):
        asked.append(len(steps))
        return (0, 1, 5)[len(steps) % 3]

    g = generate(verifier, Scripted(oracle(prompt + truth)), prompt, max_new_tokens=12, k=k, eos_token_ids=[EOS])
    assert g.tokens == truth and asked == list(range(len(g.steps))) and [s.requested for s in g.steps[:3]] == [0, 1, 5]


def test_steps_of_a_perfect_drafter(verifier):
    """The pass over the prompt gives one token; then every step gives k + 1, and the last one is cut to what is
    left."""
    prompt = PROMPTS[0]
    truth = generate(verifier, NoDrafter(), prompt, max_new_tokens=12, k=0).tokens
    g = generate(verifier, Scripted(oracle(prompt + truth)), prompt, max_new_tokens=12, k=3)
    assert [(s.requested, len(s.draft), s.accepted, len(s.tokens)) for s in g.steps] == [
        (3, 3, 3, 4),
        (3, 3, 3, 4),
        (2, 2, 2, 3),
    ]
    plain = generate(verifier, NoDrafter(), prompt, max_new_tokens=12, k=3)
    assert [(s.requested, len(s.draft), len(s.tokens)) for s in plain.steps] == [(3, 0, 1)] * 8 + [
        (2, 0, 1),
        (1, 0, 1),
        (0, 0, 1),
    ]


def test_a_stop_token_inside_the_accepted_run_ends_the_output(verifier):
    prompt = PROMPTS[0]
    truth = generate(verifier, NoDrafter(), prompt, max_new_tokens=20, k=0).tokens
    stop = next(t for i, t in enumerate(truth[2:], 2) if t not in truth[:i])  # first seen in the middle of a run
    at = truth.index(stop)
    g = generate(verifier, Scripted(oracle(prompt + truth)), prompt, max_new_tokens=20, k=5, eos_token_ids={stop})
    assert g.tokens == truth[: at + 1] and g.finish_reason == "stop"
    assert g.steps[-1].accepted == 5 and len(g.steps[-1].tokens) < 5  # the rule's count, and what reached the output
    first = generate(verifier, NoDrafter(), prompt, max_new_tokens=20, k=5, eos_token_ids={truth[0]})
    assert first.tokens == truth[:1] and first.steps == [] and first.finish_reason == "stop"


def test_the_context_limits_the_output(verifier):
    prompt = [2] * 90  # 96 positions
    g = generate(verifier, NgramDrafter(1, 3), prompt, max_new_tokens=50, k=4)
    assert len(g.tokens) == 6 and g.finish_reason == "length"
    assert g.tokens == hf_greedy(verifier, prompt, 6) or EOS in g.tokens


@pytest.mark.parametrize("kv_cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", TURNING)
def test_a_text_that_outgrows_its_angles_is_read_anew(kind, kv_cache):
    verifier = turning_verifier(kind)
    prompts = [[5, 9, 2] * 6, [3], [30, 31, 8] * 10]
    truth = [read_whole(verifier, prompt, 20) for prompt in prompts]
    plain = generate(verifier, NoDrafter(), prompts, max_new_tokens=20, kv_cache=kv_cache)
    assert [g.tokens for g in plain] == truth
    for prompt, text in zip(prompts, truth):
        kept = generate(verifier, HiddenStates([0, 1]), prompt, max_new_tokens=20, kv_cache=kv_cache)
        whole = verifier(torch.tensor([prompt + text[:-1]]), use_cache=False).hidden_states[0]
        torch.testing.assert_close(kept.hidden_states, whole, rtol=1e-4, atol=1e-4)
        twin = generate(verifier, DraftModel(verifier.model, verifier), prompt, max_new_tokens=20, kv_cache=kv_cache)
        assert all(step.accepted == step.requested for step in twin.steps)
        knows = Scripted(oracle(prompt + text, wrong_every=7), [0, 1])
        g = generate(verifier, knows, prompt, max_new_tokens=20, k=5, kv_cache=kv_cache)
        assert g.tokens == text
        states = [features for _, features, _ in knows.calls if features is not None]
        assert sum(map(len, states)) <= len(prompt) + 20  # none is handed out twice


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", TURNING)
def test_a_draft_ends_where_a_draft_model_would_turn(kind, tree, monkeypatch):
    "Every draft token is the model's own after a text that is read whole; the target has no border."
    target = small_verifier([0, 1], max_position_embeddings=192, initializer_range=1.0)
    model, drafted = turning_verifier(kind), {}
    drafter = DraftModel(model.model, target)
    if tree:
        drafter = TreeDrafter(drafter, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])

    def propose(tokens, *given, propose=drafter.propose):
        draft = propose(tokens, *given)
        drafted[len(tokens)] = len(draft)
        assert draft.tokens.tolist() == read_whole(model, tokens.tolist(), len(draft))
        return draft

    monkeypatch.setattr(drafter, "propose", propose)
    g = generate(target, drafter, [5, 9, 2] * 6, max_new_tokens=20, k=4)
    assert g.tokens == read_whole(target, [5, 9, 2] * 6, 20)
    for n, tokens in drafted.items():
        fits = 24 - n + 1 if n <= 24 else {"longrope": 4, "dynamic": 1}[kind]
        assert tokens == min(4, 37 - n, fits), n
    assert min(drafted) < 24 < max(drafted)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompt_ids=[]), "empty"),
        (dict(prompt_ids=[2] * 96), "context 96"),
        (dict(prompt_ids=[2, VOCAB]), f"verifier has {VOCAB} tokens"),
        (dict(prompt_ids=[-1]), "-1"),
        (dict(prompt_ids=torch.ones(2, 3)), "one request"),
        (dict(k=-1), "k=-1"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(rule="lenient"), "rule='lenient': is not known; choose standard, greedy"),
        (dict(drafter=Scripted(lambda t, k: [VOCAB])), f"outside the vocabulary of {VOCAB}"),
        (
            dict(drafter=Scripted(lambda t, k: [1], aux_layer_ids=(1, 3))),
            r"reads layers \[1, 3\].*aux_layer_ids=\[1, 3\]",
        ),
        (dict(prompt_ids="Hello"), r"prompt_ids is a str: pass token ids, such as tokenizer\(text\)"),
        (dict(prompt_ids=None), "prompt_ids is a NoneType"),
        (dict(prompt_ids=[2.5, 3]), "prompt_ids holds torch.float32"),
        (dict(prompt_ids=[True, False]), "prompt_ids holds torch.bool"),
        (dict(eos_token_ids=2), r"eos_token_ids=2: give a list of token ids, such as \[2\], or \[\]"),
        (dict(eos_token_ids=None), "eos_token_ids=None: give a list"),
        (dict(sampling=0.7), r"sampling=0.7: give a Sampling, such as Sampling\(temperature=0.7\)"),
        (dict(rule=lambda tree, p, generator: ([], 0)), r"rule=<function .*: give a word such as 'standard', or Rule"),
        (dict(drafter=None), "drafter=None: give an object that proposes"),
        (dict(drafter=NoDrafter), "drafter=NoDrafter: give an object that proposes"),
        (dict(k=lambda steps: 2.5), "k=2.5: a function of the steps must give a whole number from 0 on"),
        (dict(k=lambda steps: None), "k=None: a function of the steps"),
        (dict(k=lambda steps: -1), "k=-1: a function of the steps"),
    ],
)
def test_refused_requests(verifier, change, message):
    request = dict(drafter=NoDrafter(), prompt_ids=[2, 3], max_new_tokens=5, k=2) | change
    with pytest.raises(ValueError, match=message):
        generate(verifier, request.pop("drafter"), request.pop("prompt_ids"), **request)


def test_prompts_of_numpy_are_read(verifier):
    "An array, a list of its numbers, and a list of arrays; and a function of the steps that gives a number of numpy."
    ids = np.array([2, 3, 5])
    want = generate(verifier, NoDrafter(), [2, 3, 5], max_new_tokens=5, k=0).tokens
    for prompt in (ids, list(ids), ids.astype(np.uint16)):
        assert generate(verifier, NoDrafter(), prompt, max_new_tokens=5, k=lambda steps: ids[1]).tokens == want
    assert [g.tokens for g in generate(verifier, NoDrafter(), [ids, ids], max_new_tokens=5)] == [want] * 2


def test_refuses_foreign_probabilities(verifier):
    class Bad(Scripted):
        def propose(self, tokens, features, k, sampling):
            return self.guess(tokens, k)

    narrow = Bad(lambda t, k: TokenTree.chain([3], torch.full((1, 8), 1 / 8)))
    with pytest.raises(ValueError, match="over 8 tokens"):
        generate(verifier, narrow, [2], max_new_tokens=5, k=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_refuses_nan_logits(value, temperature):
    torch.manual_seed(0)
    broken = LlamaForCausalLM(LlamaConfig(**SHAPE))
    broken.lm_head.weight.data[3, 3] = value
    with pytest.raises(ValueError, match="NaN or infinite after token"):
        generate(Verifier(broken), NoDrafter(), [2], max_new_tokens=20, k=0, sampling=Sampling(temperature))


def test_refuses_a_draft_model_of_nan(verifier):
    "Greedily its guesses would merely be bad, and its measure a length of 1; neither is a result."
    broken = LlamaForCausalLM(LlamaConfig(**SHAPE))
    broken.lm_head.weight.data[3, 3] = float("nan")
    drafter = DraftModel(broken.eval(), verifier)
    with pytest.raises(ValueError, match="DraftModel: the probabilities to draw a token from are NaN at temperature=1"):
        generate(verifier, drafter, [2], max_new_tokens=8, k=2, sampling=Sampling(1.0))
    with pytest.raises(ValueError, match="DraftModel: the logits to choose a token from are NaN or infinite"):
        generate(verifier, drafter, [2], max_new_tokens=8, k=2)


@pytest.mark.parametrize("proposal", [None, [1, 2], torch.tensor([1])])
def test_refuses_what_is_no_tree(verifier, proposal):
    class Bad(Scripted):
        def propose(self, tokens, features, k, sampling):
            return proposal

    with pytest.raises(TypeError, match=f"proposed a {type(proposal).__name__}: `propose` must return a TokenTree"):
        generate(verifier, Bad(None), [2], max_new_tokens=5, k=2)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
@pytest.mark.parametrize("many", [False, True])
def test_refuses_tokens_out_of_the_vocabulary(verifier, token, many):
    "In the second step, in a batch or alone; ids below 0 too, which an embedding on a GPU would read from somewhere."
    drafter = Scripted(lambda tokens, k: [token if len(tokens) > 4 else 1][:k])
    with pytest.raises(ValueError, match=f"={token} is outside the vocabulary of {VOCAB}"):
        generate(verifier, drafter, [[2, 3], [4]] if many else [2, 3], max_new_tokens=12, k=1)


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[2], []], "empty"),
        ([[]], "empty"),
        ([[2], [3] * 96], "context 96"),
        ([[2], [VOCAB]], f"verifier has {VOCAB} tokens"),
    ],
)
def test_one_bad_request_of_a_batch_is_refused(verifier, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(verifier, NgramDrafter(), prompts, max_new_tokens=5)


def test_a_draft_model_whose_rope_is_stretched_has_the_longer_context(verifier):
    rope = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | dict(rope_parameters=rope)))
    assert DraftModel(model, verifier).context_length == 4 * 96


def test_a_draft_model_with_a_shorter_context(verifier):
    """It drafts as long as it can read the text, chain or tree, and then no more; GPT-2 has no position beyond its
    table, so reading on would raise."""
    torch.manual_seed(1)
    small = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    ).eval()
    drafter = DraftModel(small, verifier)
    plain = generate(verifier, NoDrafter(), [2, 3, 4], max_new_tokens=30, k=0)
    for who in (
        drafter,
        TreeDrafter(drafter, [(0,), (1,), (0, 0), (0, 0, 0)]),
        TreeDrafter(drafter, DynamicTreeTokenProposalConfig(speculative_tokens=5, expansion_factor=2, depth=3)),
    ):
        g = generate(verifier, who, [2, 3, 4], max_new_tokens=30, k=3)
        assert g.tokens == plain.tokens
        at = 4
        for s in g.steps:
            deepest = (
                len(s.draft)
                if s.parents is None
                else int(TokenTree(torch.tensor(s.draft), torch.tensor(s.parents)).depth.max())
            )
            room = max(0, min(s.requested, 16 - at + 1))
            assert deepest == room or (
                isinstance(getattr(who, "method", None), DynamicTreeTokenProposalConfig)
                and min(1, room) <= deepest <= room
            ), (at, s)
            at += len(s.tokens)
        assert at > 20
    assert len(generate(verifier, drafter, [5] * 40, max_new_tokens=5, k=3).steps) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    "The same code: chains and trees, look-up and models, one request and a batch; and drawn tokens."
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().cuda()
    v = Verifier(model, [0, 4])
    small = LlamaForCausalLM(LlamaConfig(**SHAPE | dict(num_hidden_layers=1))).eval().cuda()
    plain = generate(v, NoDrafter(), PROMPTS, max_new_tokens=20, k=0)
    draft = DraftModel(small, v)
    for drafter in (
        NgramDrafter(),
        SuffixDrafter(),
        draft,
        TreeDrafter(draft, [(0,), (1,), (0, 0)]),
        TreeDrafter(draft, DynamicTreeTokenProposalConfig(speculative_tokens=5, depth=3)),
    ):
        assert [g.tokens for g in generate(v, drafter, PROMPTS, max_new_tokens=20, k=3)] == [g.tokens for g in plain]
        for rule in ("standard", "strict"):
            generate(
                v,
                drafter,
                PROMPTS,
                max_new_tokens=20,
                k=3,
                rule=rule,
                sampling=Sampling(1.0, torch.Generator("cuda").manual_seed(0), top_k=5, top_p=0.9, min_p=0.01),
            )


def test_drafting_beyond_the_training_warns(verifier):
    drafter = NgramDrafter()
    drafter.trained_tokens = 3
    with pytest.warns(UserWarning, match="k=4 drafts more than the 3 tokens NgramDrafter was trained for"):
        generate(verifier, drafter, [2], max_new_tokens=3, k=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in (3, lambda steps: 4):  # what a function gives is not known beforehand
            generate(verifier, drafter, [2], max_new_tokens=3, k=k)


def test_trace_shows_every_token_once(verifier):
    prompt = PROMPTS[0]
    truth = generate(verifier, NoDrafter(), prompt, max_new_tokens=12, k=0).tokens
    g = generate(verifier, Scripted(oracle(prompt + truth, 3)), prompt, max_new_tokens=12, k=3)
    trace = Trace(g, lambda t: f"<{t}>")
    assert [t for t, kind in trace.pieces if kind != "rejected"] == g.tokens
    assert [t for t, kind in trace.pieces if kind == "rejected"] == [t for s in g.steps for t in s.draft[s.accepted :]]
    page = trace._repr_html_()
    assert f"<b>&lt;{truth[0]}&gt;</b>" in page and "</s>" in page and f"<{truth[0]}>" not in page  # text is escaped
    assert "~~" in repr(trace) and "**" in repr(trace)


def test_a_draft_model_that_is_the_verifier_is_always_accepted(verifier):
    "Also where it draws."
    drafter = DraftModel(verifier.model, verifier)
    sampling = Sampling(1.0, torch.Generator().manual_seed(0))
    texts = generate(verifier, drafter, [PROMPTS[0]] * 50, max_new_tokens=12, k=2, sampling=sampling)
    assert all(s.accepted == len(s.draft) for g in texts for s in g.steps)


def coins(generation):
    "Chances of the draft tokens that rejection sampling came to, in its order"
    for step, kept in zip(generation.steps, generation.records):
        parents = list(range(-1, len(step.draft) - 1)) if step.parents is None else step.parents
        path = list(range(step.accepted)) if step.path is None else step.path
        for parent, accepted in zip([-1, *path], [*path, None]):
            for node in (i for i, p in enumerate(parents) if p == parent):
                yield kept.chance[node]
                if node == accepted:
                    break


RECORDED = {
    "n-gram": lambda model, v: NgramDrafter(1, 4),
    "chain": DraftModel,
    "drawn tree": lambda model, v: TreeDrafter(DraftModel(model, v), [(0,), (1,), (0, 0), (0, 2)]),
    "grown tree": lambda model, v: TreeDrafter(DraftModel(model, v), DynamicTreeTokenProposalConfig(depth=3)),
}


@pytest.mark.parametrize("kind", RECORDED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_record_changes_nothing_and_agrees_with_the_rule(verifiers, kind, temperature, monkeypatch):
    """The same steps with and without; the chances are those of the rule's coins; p and q are probabilities of the
    draft tokens."""
    v, drafter = verifiers["qwen3"], RECORDED[kind](verifiers["llama"].model, verifiers["qwen3"])

    def run(**options):
        sampling = Sampling(temperature, torch.Generator().manual_seed(3))
        return generate(v, drafter, PROMPTS[0], max_new_tokens=24, k=3, sampling=sampling, **options)

    flips, flip = [], accept.flip
    plain = run()
    monkeypatch.setattr(accept, "flip", lambda chance, g=None: (flips.append(chance.tolist()), flip(chance, g))[1])
    g = run(record=5)
    assert g.tokens == plain.tokens and g.steps == plain.steps and plain.records is None
    assert len(g.records) == len(g.steps)
    chances = [chance for step, kept in zip(g.steps, g.records) if step.draft for chance in kept.chance]
    if temperature and kind in ("chain", "drawn tree"):
        assert chances == pytest.approx([min(1, x) for step in flips for x in step])
    else:  # without the drafter's distributions, or at temperature 0, the verifier's token decides
        assert not flips
    if not temperature:
        assert set(coins(g)) <= {0, 1} and sum(coins(g)) == sum(step.accepted for step in g.steps)
    for step, kept in zip(g.steps, g.records):
        assert len(kept.top_p) == len(step.draft) + 1 and all(len(top) <= 5 for top in kept.top_p)
        parents = list(range(-1, len(step.draft) - 1)) if step.parents is None else step.parents
        for node, token in enumerate(step.draft):
            assert kept.top_p[parents[node] + 1].get(token, kept.p[node]) == pytest.approx(kept.p[node])
            assert kept.top_q[node].get(token, kept.q[node]) == pytest.approx(kept.q[node])
    if kind == "chain":  # at temperature 0 too: of temperature 1
        assert any(q < 0.999 for kept in g.records for q in kept.q)
