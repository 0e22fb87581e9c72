"""Attention that counts more than its mask says: ALiBi, windows of slots, the temperature of Llama 4. Batches and trees
write what each request writes alone, or are refused in one line before anything is computed."""

from functools import lru_cache
from itertools import product

import pytest
import torch
from families import CONFIG_MAPPING, FAMILIES, NEW, Knowing, N, V, same, texts
from transformers import AutoModelForCausalLM

from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.features.in_process import states_of
from speculators_nb.regenerate.in_process import answer
from speculators_nb.verifier.tapped_model import Verifier

SMALL = dict(vocab_size=V, hidden_size=32, bos_token_id=0, eos_token_id=1, pad_token_id=0)
NEO = dict(num_layers=N, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=4)
SCALED = dict(floor_scale=3, attn_scale=1.0, no_rope_layers=[1, 0, 1, 0], layer_types=None)
STRETCHED = FAMILIES["llama"] | dict(max_position_embeddings=16)
LONG = dict(short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 5.0], factor=4.0, original_max_position_embeddings=16)
CONFIGS = {  # family and fields
    "dynamic": ("llama", STRETCHED | dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "longrope": ("llama", STRETCHED | dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, **LONG))),
    "bloom": ("bloom", SMALL | dict(n_layer=N, n_head=4)),
    "falcon": ("falcon", SMALL | dict(num_hidden_layers=N, num_attention_heads=4, alibi=True)),
    "mpt": ("mpt", dict(vocab_size=V, d_model=32, n_layers=N, n_heads=4, max_seq_len=128)),
    "gpt_neo": ("gpt_neo", SMALL | NEO | dict(max_position_embeddings=128)),
    "llama4": ("llama4_text", FAMILIES["llama4_text"] | SCALED),
}
NAMED = {  # field and value
    "bloom": "model_type='bloom': an ALiBi bias",
    "falcon": "alibi=True: an ALiBi bias",
    "mpt": "model_type='mpt': an ALiBi bias",
    "gpt_neo": "model_type='gpt_neo': a window",
}


@lru_cache(None)
def verifier(name):
    "Of random weights."
    torch.manual_seed(0)
    family, given = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**given), dtype=torch.float32).eval()
    for p in model.parameters():
        p.data += 0.15 * torch.randn_like(p)
    return Verifier(model, (0, N))


@lru_cache(None)
def written(name):
    "Prompts, and what is written after each of them alone, without a cache."
    prompts = texts((11, 3, 6))
    answers = [list(prompt) for prompt in prompts]
    for ids in answers:
        for _ in range(NEW):
            logits = verifier(name).model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return prompts, answers


def whole(done):
    return [g.prompt + g.tokens for g in done]


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_alibi_reads_a_batch_of_chains(name):
    "Ragged: the cache has empty slots, and a request ends before the others."
    v, (prompts, answers) = verifier(name), written(name)
    assert whole(generate(v, NoDrafter(), prompts, k=0, max_new_tokens=NEW)) == answers
    done = generate(v, Knowing(answers, False), prompts, k=4, max_new_tokens=NEW)
    assert whole(done) == answers and len({len(g.steps) for g in done}) > 1


@pytest.mark.parametrize("name", NAMED)
def test_trees_are_refused(name):
    "And a chain of one request is not."
    v, (prompts, answers) = verifier(name), written(name)
    assert whole([generate(v, Knowing(answers, False), prompts[0], k=4, max_new_tokens=NEW)]) == answers[:1]
    with pytest.raises(ValueError, match=rf"^{NAMED[name]} that depends on .*; draft a chain"):
        generate(v, Knowing(answers, True), prompts[0], k=4, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["mpt", "gpt_neo"])
def test_batches_are_refused_before_anything_is_computed(name, monkeypatch):
    v, (prompts, _) = verifier(name), written(name)
    monkeypatch.setattr(Verifier, "__call__", None)
    with pytest.raises(ValueError, match=rf"^{NAMED[name]} that .*; draft a chain, for one request at a time$"):
        generate(v, NoDrafter(), prompts, k=0, max_new_tokens=NEW)


def test_mpt_has_its_bias_whatever_the_config_says():
    family, given = CONFIGS["mpt"]
    config = CONFIG_MAPPING[family](**given, attn_config=dict(alibi=False))
    v = Verifier(AutoModelForCausalLM.from_config(config), [1])
    for options in (dict(kv_cache="static"), {}):
        with pytest.raises(ValueError, match="model_type='mpt': an ALiBi bias that depends on"):
            generate(v, NoDrafter(), [[5, 6], [7]], **options)


def test_llama_4_scales_by_position():
    "Chains, trees and batches with both KV caches, far beyond the first border of its temperature."
    v, (prompts, answers) = verifier("llama4"), written("llama4")
    assert v.config.floor_scale < len(answers[1]) / 3
    for kv_cache, branches in product(("dynamic", "static"), (False, True)):
        options = dict(k=4, max_new_tokens=NEW, kv_cache=kv_cache)
        assert whole(generate(v, NoDrafter(), prompts, **options | dict(k=0))) == answers
        assert whole(generate(v, Knowing(answers, branches), prompts, **options)) == answers
        assert whole([generate(v, Knowing(answers, branches), prompts[0], **options)]) == answers[:1]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_longer_row_turns_no_other(name):
    "A RoPE that is chosen by the length of a text: neither a row beside it nor one before it decides."
    rows, alone = [torch.arange(n) % V for n in (10, 40, 20)], []
    for row in rows:
        alone += states_of(verifier(name), [row], torch.float32)
        verifier.cache_clear()
    beside = states_of(verifier(name), rows, torch.float32)
    after = [states_of(verifier(name), [row], torch.float32)[0] for row in rows]
    for expected, *others in zip(alone, beside, after):
        for other in others:
            same(other.flatten(1), expected.flatten(1))


def test_llama_4_in_padded_batches():
    "Features of rows of different length, and answers to prompts that are padded on the left."
    v, (prompts, answers) = verifier("llama4"), written("llama4")
    for ours, row in zip(states_of(v, prompts, torch.float32), prompts):
        alone = v(torch.tensor([row]), use_cache=False)
        same(ours.flatten(1), torch.cat([alone.hidden_states, alone.last_hidden_states], -1)[0])
    assert [p + a for p, a in zip(prompts, answer(v, prompts, NEW, [V]))] == answers


def test_llama_4_is_as_it_was_between_calls():
    "Also where a forward pass fails."
    v = verifier("llama4")
    tuned = [layer.self_attn.attn_temperature_tuning for layer in v.layers]
    hooks = [len(layer.self_attn.q_proj._forward_hooks) for layer in v.layers]
    with pytest.raises(IndexError):
        v(torch.tensor([[5, V + 7]]), position_ids=torch.tensor([[0, 1]]))
    assert tuned == [layer.self_attn.attn_temperature_tuning for layer in v.layers] and all(tuned)
    assert hooks == [len(layer.self_attn.q_proj._forward_hooks) for layer in v.layers] and not any(hooks)


def test_a_drafter_that_grows_trees_is_refused_too():
    class Grows(NoDrafter):
        def grow(self, tokens, features, depth):
            from contextlib import nullcontext

            rows = torch.randn(depth, V).log_softmax(-1)
            return nullcontext(lambda nodes, *_: rows[:1].expand(len(nodes), -1))

    with pytest.raises(ValueError, match="^model_type='bloom'"):
        generate(verifier("bloom"), TreeDrafter(Grows(), [(0,), (1,)]), [5, 6, 7], k=2, max_new_tokens=4)
