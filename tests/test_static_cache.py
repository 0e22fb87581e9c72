"""A static KV cache changes no text of any drafter, greedy or sampled; what cannot be static is refused.

Every family is decoded with it by tests/families.py: chains, trees, batches of ragged acceptance, pictures.
"""

import gc
import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from families import CONFIG_MAPPING, FAMILIES, NEW, Knowing, greedy, picture, verifier
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.gpu.decode import prompts
from benchmarks.gpu.equal import VERIFIER, drafter
from speculators_nb.core.registry import DynamicTreeTokenProposalConfig
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.decode.verification import StaticContext
from speculators_nb.evaluate import acceptance
from speculators_nb.verifier import static_pass
from speculators_nb.verifier.cache import recurrent_kinds
from speculators_nb.verifier.static_pass import StaticBuffers, StaticPass, check_static
from speculators_nb.verifier.tapped_model import Verifier

CONFIGS = {family: CONFIG_MAPPING[family](**given) for family, given in FAMILIES.items()}
RECURRENT = [family for family, config in CONFIGS.items() if recurrent_kinds(config.get_text_config())]
STATIC = ("static", "graphs")  # on a CPU the second is the first


def test_after_a_picture():
    "Its shift of positions is not that of the next request."
    v, (ids, inputs) = verifier("qwen3_vl"), picture("qwen3_vl")
    (asked, *_), (written, *_) = greedy("qwen3_vl")
    generate(v, NoDrafter(), ids[0], k=0, max_new_tokens=NEW, inputs=inputs, kv_cache="static")
    assert v.static.cache.position_shift != 0
    read = generate(v, Knowing([written], True), asked, max_new_tokens=NEW, k=4, kv_cache="static")
    assert read.prompt + read.tokens == written and v.static.cache.position_shift == 0


@pytest.mark.parametrize("kv_cache", STATIC)
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_refused(family, kv_cache):
    with pytest.raises(ValueError, match=rf"^kv_cache='{kv_cache}': \w+ has layers of kind .*; leave kv_cache out$"):
        generate(verifier(family), NoDrafter(), [5, 6], kv_cache=kv_cache)


def case(name):
    "A drafter and its verifier."
    proposer = drafter(name, torch.device("cpu"))[0].drafter()
    return proposer, Verifier.from_pretrained(str(VERIFIER), list(proposer.aux_layer_ids))


@pytest.mark.parametrize("name", ["eagle3", "dflash", "mtp", "medusa"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafters_take_the_same_steps(name, temperature):
    "Chains and trees of two requests; the draft tokens and what is accepted of them are equal too."
    proposer, v = case(name)
    for d in (proposer, TreeDrafter(proposer, [(0,), (1,), (0, 0)])):
        done = []
        for kv_cache in ("dynamic", "static"):
            sampling = Sampling(temperature, torch.Generator().manual_seed(1))
            answers = generate(v, d, prompts(2), k=3, max_new_tokens=8, sampling=sampling, kv_cache=kv_cache)
            done.append([(g.tokens, g.steps, g.finish_reason) for g in answers])
        assert done[0] == done[1]


def widths(v):
    "Tokens of the passes that were made."
    return sorted(v.static.passes)


def test_a_step_has_one_shape():
    "However many tokens are proposed near the end, and whoever has finished."
    v = verifier("llama")
    asked, answers = greedy("llama")
    v.static = None
    shapes = []
    forward = StaticPass.forward

    def seen(self):
        out = forward(self)
        shapes.append((tuple(self.ids.shape), self.slots))
        return out

    with patch.object(StaticPass, "forward", seen):
        done = generate(v, Knowing(answers, True), asked, max_new_tokens=NEW, k=4, kv_cache="static")
    assert len({*shapes}) == 1 and len({len(g.steps) for g in done}) > 1
    assert [g.prompt + g.tokens for g in done] == answers


@pytest.mark.parametrize("repeats", [[1], [1, 4]])
def test_wider_proposals_find_place(repeats):
    "A prompt lookup proposes nothing, then more and more; the longest text nearly fills the buffers."
    v = verifier("llama")
    v.static = None
    ids = [5, 6, 7, 8, 5, 6]
    asked = [n * ids for n in repeats]

    class Growing(NgramDrafter):
        def propose(self, tokens, features, k, sampling):
            n = 3 * (len(tokens) - len(ids))
            return TokenTree(tokens.new_full((n,), 9), torch.full((n,), -1))

    plain = generate(v, NoDrafter(), asked, k=0, max_new_tokens=50)
    done = generate(v, Growing(), asked, k=4, max_new_tokens=50, kv_cache="static")
    assert [g.tokens for g in done] == [g.tokens for g in plain]
    assert len(widths(v)) < len(done[0].steps) and v.static.slots > 64  # it grew, and began anew


def test_buffers_are_used_again_and_kept_clean():
    "By shorter requests; what an earlier one left, NaN for one, is no part of the next."
    v, (asked, answers) = verifier("llama"), greedy("llama")
    v.static = None

    def write(i):
        g = generate(v, Knowing(answers, False), asked[i], max_new_tokens=NEW, k=4, kv_cache="static")
        assert g.prompt + g.tokens == answers[i]
        return v.static

    first = write(0)
    with torch.inference_mode():
        for stack in first.stacks:
            stack.fill_(torch.nan)
    assert write(1) is first and write(2) is first
    v.model.load_state_dict({k: w.clone() for k, w in v.model.state_dict().items()}, assign=True)
    assert write(0) is not first  # a recorded pass would read the old weights


SMALL = dict(vocab_size=64, hidden_size=32)
NEO = dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4)
BY_KEYS = {  # attention that depends on the number of keys -> family, config, what is named
    "gpt_neo": ("gpt_neo", SMALL | NEO, "model_type='gpt_neo'"),
    "bloom": ("bloom", SMALL | dict(n_layer=2, n_head=4), "model_type='bloom'"),
    "falcon": ("falcon", SMALL | dict(num_hidden_layers=2, num_attention_heads=4, alibi=True), "alibi=True"),
    "mpt": ("mpt", dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4), "model_type='mpt'"),
}


def built(family, given):
    "A verifier of random weights."
    return Verifier(AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**given)), [1])


@pytest.mark.parametrize("kv_cache", STATIC)
@pytest.mark.parametrize("case", BY_KEYS)
def test_attention_that_counts_keys_is_refused(case, kv_cache):
    "Its window or bias would be that of the slots: other text, or an error of a shape."
    family, given, named = BY_KEYS[case]
    with pytest.raises(ValueError, match=rf"^kv_cache='{kv_cache}': \w+ has {named}.*; leave kv_cache out$"):
        generate(built(family, given), NoDrafter(), [5, 6], kv_cache=kv_cache)


@pytest.mark.parametrize(
    "family, given",
    [
        ("llama4_text", FAMILIES["llama4_text"]),
        ("falcon", BY_KEYS["falcon"][1] | dict(alibi=False)),
    ],
)
def test_the_same_without_that_is_not_refused(family, given):
    check_static(built(family, given), "static")


def first_step(v, row):
    "A context that has read a text, and the logits of its first step."
    context = StaticContext(v, 1, 24)
    context.read([torch.tensor(row[:-1])], [TokenTree.chain([])])
    context.keep([[]])
    ((logits, _),) = context.read([torch.tensor(row[-1:])], [TokenTree.chain([])])
    context.keep([[]])
    return context, logits


def test_two_contexts_have_buffers_of_their_own():
    "A dropped one leaves its buffers to the next."
    v = verifier("llama")
    v.static = None
    a, _ = first_step(v, [5, 6, 7, 8])
    b, _ = first_step(v, [20, 21, 22])
    ((logits, _),) = a.read([torch.tensor([9])], [TokenTree.chain([])])
    alone = v(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -1:]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
    assert a.buffers is not b.buffers
    kept = v.static
    del a, b
    c, _ = first_step(v, [30, 31])
    assert c.buffers is kept


def test_a_failed_generation_keeps_no_later_one_from_the_buffers():
    "Its context lives as long as the error; the next ones share those that were made last."
    v = verifier("llama")
    v.static = None

    class Fails(NgramDrafter):
        def propose(self, tokens, features, k, sampling):
            if len(tokens) > 4:
                raise RuntimeError("stopped")
            return TokenTree.chain([])

    with pytest.raises(RuntimeError, match="stopped") as error:
        generate(v, Fails(), [5, 6], max_new_tokens=8, kv_cache="static")
    failed, made = v.static, []
    for _ in range(2):
        generate(v, NoDrafter(), [5, 6], k=0, max_new_tokens=8, kv_cache="static")
        made.append(v.static)
    assert failed is not made[0] and made[0] is made[1] and error.tb is not None


@pytest.mark.parametrize("grown", [False, True])
def test_old_buffers_are_freed_before_new_ones_are_made(grown):
    "Without a garbage collection: of an earlier request, or those that became too small."
    v = verifier("llama")
    v.static = None
    context, _ = first_step(v, [5, 6, 7, 8])
    old = [weakref.ref(stack) for stack in v.static.stacks]
    if not grown:
        del context
    alive = []
    init = StaticBuffers.__init__

    def seen(self, *args):
        alive.append([ref() is not None for ref in old])
        init(self, *args)

    gc.disable()
    try:
        with patch.object(StaticBuffers, "__init__", seen):
            if grown:
                context.read([torch.tensor([9] * 60)], [TokenTree.chain([])])
            else:
                generate(v, NoDrafter(), [5] * 80, k=0, max_new_tokens=4, kv_cache="static")
    finally:
        gc.enable()
    assert alive == [[False]]


def test_a_cache_of_other_layers_is_refused():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    read = DynamicCache()
    read.layers = [DynamicSlidingWindowLayer(4)]
    with pytest.raises(
        ValueError, match="^kv_cache: layer 0 .* keeps a DynamicSlidingWindowLayer.*leave kv_cache out$"
    ):
        StaticBuffers(verifier("llama"), read, 8)


def test_graphs_on_several_devices_are_refused():
    places = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "meta")]
    v = SimpleNamespace(config=verifier("llama").config, model=SimpleNamespace(parameters=lambda: places))
    with pytest.raises(ValueError, match="^kv_cache='graphs': .* is on cpu, meta, .*use kv_cache='static'$"):
        static_pass.check_static(v, "graphs")
    static_pass.check_static(v, "static")


def test_an_unknown_kv_cache_is_refused():
    with pytest.raises(ValueError, match="kv_cache='paged': is not known; choose dynamic, static or graphs"):
        generate(verifier("llama"), NoDrafter(), [5], kv_cache="paged")


class Graph:
    "What torch.cuda does, as far as a pass uses it: it runs what it recorded, and says what it was asked."

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        self.calls.append("replay")


def test_a_pass_that_cannot_be_recorded_is_named(monkeypatch):
    "And one that can is recorded once."
    v = verifier("llama")
    read = DynamicCache()
    v(torch.tensor([[5, 6]]), past_key_values=read)
    buffers = StaticBuffers(v, read, 16)
    step = StaticPass(buffers, 3)
    calls = []

    class Nothing:
        def __init__(self, *args):
            calls.append("capture" if isinstance(args[0] if args else None, Graph) else "stream")

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

        def wait_stream(self, other):
            pass

    fake = dict(CUDAGraph=lambda: Graph(calls), Stream=Nothing, stream=Nothing, current_stream=Nothing, graph=Nothing)
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(StaticPass, "on_cuda", True)
    first, second = step.run(True), step.run(True)
    assert first is second and calls.count("capture") == 1 and calls.count("replay") == 2

    broken = StaticPass(buffers, 3)
    monkeypatch.setattr(StaticPass, "forward", lambda self: (_ for _ in ()).throw(RuntimeError("not permitted\nwhen")))
    with pytest.raises(
        ValueError, match=r"^kv_cache='graphs': LlamaForCausalLM cannot be recorded .*not permitted when"
    ):
        broken.run(True)


class Replays:
    "A graph on a CPU: a replay computes the pass again, into the tensors that were recorded."

    def __init__(self, step):
        self.step = step

    def replay(self):
        for name, now in vars(self.step.forward()).items():
            if isinstance(now, torch.Tensor):
                getattr(self.step.out, name).copy_(now)


GROWN = DynamicTreeTokenProposalConfig(speculative_tokens=12, expansion_factor=4, depth=4)


@pytest.mark.parametrize("method", [GROWN, [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]], ids=["dynamic", "static"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_are_recorded_once(method, temperature, monkeypatch):
    "One shape, one graph: for all steps, also near the end of a text, and for all requests, greedy and sampled."
    proposer, v = case("eagle3")
    recorded = []

    def record(self):
        recorded.append((self.width, self.slots))
        self.out, self.graph = self.forward(), Replays(self)
        return self.graph

    monkeypatch.setattr(StaticPass, "record", record)
    monkeypatch.setattr(StaticPass, "on_cuda", True)
    drafter = TreeDrafter(proposer, method)
    for seed in range(2):
        texts = []
        for kv_cache in ("dynamic", "graphs"):
            sampling = Sampling(temperature, torch.Generator().manual_seed(seed))
            options = dict(k=4, max_new_tokens=12, sampling=sampling, kv_cache=kv_cache)
            texts.append(generate(v, drafter, prompts(1)[0], **options).tokens)
        assert texts[0] == texts[1]
    assert len(recorded) == 1


def test_the_command_takes_it():
    "`evaluate` passes on the KV cache, and the verifier's attention."
    from speculators_nb.cli.drafter_commands import evaluate

    options = dict(verifier=str(VERIFIER), max_samples=2, max_new_tokens=8, ngram=False, baseline=False, device="cpu")
    given = str(VERIFIER.parent / "tiny-drafter"), str(VERIFIER.parent / "corpus/heldout.jsonl")
    asked = []
    generate_ = acceptance.generate

    def seen(v, *args, **kwargs):
        asked.append((kwargs["kv_cache"], v.config._attn_implementation))
        return generate_(v, *args, **kwargs)

    with patch.object(acceptance, "generate", seen):
        plain = evaluate(*given, **options)
        other = evaluate(*given, **options, kv_cache="static", attn_implementation="eager")
    assert {*asked[:2]} == {("dynamic", "sdpa")} and {*asked[2:]} == {("static", "eager")}
    texts = [[g.tokens for g in x.generations["eagle3", 0.0]] for x in (plain, other)]
    assert texts[0] == texts[1] and plain.summary.equals(other.summary)
