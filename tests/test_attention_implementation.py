"""The verifier's attention implementation: the same text with each that runs on a CPU; what is not there is refused."""

import pytest
import torch
from families import greedy, same, saved

from benchmarks.gpu.equal import VERIFIER
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.tree import TokenTree
from speculators_nb.features.in_process import states_of
from speculators_nb.verifier.layer_masks import TAKES_MASKS
from speculators_nb.verifier.tapped_model import Verifier

PROMPT = [5, 9, 2, 7, 9, 2, 7, 9]


class Siblings(NoDrafter):
    def propose(self, tokens, features, k, sampling):
        return TokenTree(tokens.new_tensor([5, 6, 7]), tokens.new_tensor([-1, -1, 0]))


def texts(name):
    "Of a chain, a tree and a batch, with both KV caches; and hidden states of padded rows."
    v = Verifier.from_pretrained(str(VERIFIER), attn_implementation=name)
    assert name is None or v.model.config._attn_implementation == name
    found = []
    for kv_cache in ("dynamic", "static"):
        options = dict(k=3, max_new_tokens=6, kv_cache=kv_cache)
        alone = [generate(v, d, PROMPT, **options) for d in (NgramDrafter(), Siblings())]
        found += [g.tokens for g in (*alone, *generate(v, NgramDrafter(), [PROMPT, PROMPT[:3]], **options))]
    return found, states_of(v, [PROMPT, PROMPT[:5]], torch.float32)


def test_texts_and_features_are_equal():
    expected, states = texts(None)
    for name in TAKES_MASKS:
        written, found = texts(name)
        assert written == expected
        for ours, theirs in zip(found, states):
            same(ours, theirs)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_what_is_not_installed_is_refused(name):
    with pytest.raises(ValueError, match=rf"^attn_implementation='{name}': transformers cannot .*tiny-verifier.*sdpa$"):
        Verifier.from_pretrained(str(VERIFIER), attn_implementation=name)


def test_what_the_model_has_not_is_refused():
    "GPT-OSS has sinks, which sdpa does not know."
    with pytest.raises(ValueError, match="^attn_implementation='sdpa': transformers cannot use it .*GptOss"):
        Verifier.from_pretrained(saved("gpt_oss"), attn_implementation="sdpa")
    assert Verifier.from_pretrained(saved("gpt_oss"), attn_implementation="eager")


@pytest.mark.parametrize("name", ["fast", "kernels-community/flash-attn2", ""])
def test_an_unknown_name_is_refused(name):
    "Kernels of a hub would be code from there."
    with pytest.raises(ValueError, match=r"^attn_implementation='.*': .*sdpa"):
        Verifier.from_pretrained(str(VERIFIER), attn_implementation=name)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_without_masks_reads_a_chain_and_refuses_the_rest(name, monkeypatch):
    "One chain needs no mask."
    v = Verifier.from_pretrained(saved("llama"))
    prompts, answers = greedy("llama")
    monkeypatch.setattr(type(v.model), "forward", named(v, name, type(v.model).forward))
    v.model.config._attn_implementation_internal = name  # computed by sdpa all the same
    done = generate(v, NgramDrafter(), prompts[0], k=3, max_new_tokens=12)
    assert done.prompt + done.tokens == answers[0]
    refused = dict(match=rf"^attn_implementation='{name}': cannot take the mask .* load the verifier with")
    for d, ids, kv_cache in (
        (Siblings(), prompts[0], "dynamic"),
        (NgramDrafter(), prompts, "dynamic"),
        (NgramDrafter(), prompts[0], "static"),
    ):
        with pytest.raises(ValueError, **refused):
            generate(v, d, ids, k=3, max_new_tokens=12, kv_cache=kv_cache)


def named(v, name, forward):
    "A forward pass by sdpa under another name."

    def run(*args, **kwargs):
        v.model.config._attn_implementation_internal = "sdpa"
        try:
            return forward(*args, **kwargs)
        finally:
            v.model.config._attn_implementation_internal = name

    return run
