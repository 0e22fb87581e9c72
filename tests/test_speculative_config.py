"""SpeculativeConfig against the record of vLLM's own class, and on our decoder. The record is made by
tests/vllm/check_speculative_config.py."""

import importlib.util
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from speculators_nb.core.config import import_models
from speculators_nb.core.tree import Sampling, TokenTree
from speculators_nb.decode import acceptance_rules as accept
from speculators_nb.decode.generate import HiddenStates, NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.serve.speculative_config import (
    ArgmaxDrafter,
    SpeculativeConfig,
    speculate,
)
from speculators_nb.serve.speculative_fields import (
    DOCUMENTED_SAMPLING,
    ENGINES,
    conditional_rates,
    length_to_rates,
    parse_token_tree,
)
from speculators_nb.serve.vllm_methods import METHOD_OF_TYPE, METHODS, MTP_FAMILIES, mtp_head
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location(
    "check_speculative_config", ROOT / "tests/vllm/check_speculative_config.py"
)
vllm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vllm)
RECORD = json.loads(vllm.RECORD.read_text())
NGRAM = dict(method="ngram", num_speculative_tokens=3)

# where we decide otherwise than vLLM 0.32: (do we accept?, why)
DELIBERATE = {
    "strict": (True, "a word of the documented line"),
    "probabilistic": (True, "a word of the documented line"),
    "token tree": (True, "the documented line has trees"),
    "trained checkpoint, no length": (True, "its config.json says the number, and what we emit names it"),
    "mtp, no length": (True, "n_predict says the number, and what we emit names it"),
    "ngram with parallel drafting": (False, "the field has no effect there, but vLLM sets places aside for it"),
    "argmax of a drawn draft": (False, "vLLM refuses it later, when the drafter is built"),
    "aux states of a foreign family": (
        False,
        "the documented line checks the family; vLLM 0.32 finds out when it loads the target",
    ),
    "custom class": (False, "a Python class of the engine; our decoder takes any Drafter object"),
}
# where both accept, and we make something else of it
OTHERWISE = {
    "draft model, another word in its name": (
        dict(method="draft_model"),
        1,
        "vLLM goes by the path, whatever the method; we warn",
    )
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "m"
    vllm.write_models(folder)
    return folder


def ours(models, name):
    fields, target, devices = vllm.place(vllm.CASES[name], models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SpeculativeConfig(**fields, target_model_config=target, target_tensor_parallel_size=devices)


def test_the_record_is_of_these_cases():
    assert set(RECORD["cases"]) == set(vllm.CASES) and set(RECORD["mtp"]) == {
        w for f in MTP_FAMILIES for w in f.words
    }, "record it again"
    assert set(DELIBERATE) <= set(vllm.CASES) and len(vllm.CASES) > 80
    assert sum(c["accepted"] for c in RECORD["cases"].values()) > 35 and all(
        RECORD["cases"][n]["accepted"] is not ok for n, (ok, _) in DELIBERATE.items()
    )


@pytest.mark.statement(
    "vllm-05",
    "vllm-07",
    "vllm-18",
    "vllm-51",
    "vllm-58",
    "vllm-65",
    "vllm-66",
    "vllm-71",
    "vllm-72",
    "vllm-76",
    "vllm-86",
)
@pytest.mark.parametrize("name", vllm.CASES)
def test_accepts_and_refuses_what_vllm_does(models, name):
    said = RECORD["cases"][name]
    if not DELIBERATE.get(name, (said["accepted"],))[0]:
        with pytest.raises(ValueError) as e:
            ours(models, name)
        words = [
            w for w in re.split(r"\W+", str(e.value)) if w in SpeculativeConfig.model_fields or w in vllm.CASES[name]
        ]
        assert words and "pydantic.dev" not in str(e.value), f"the message names no field: {e.value}"
        return
    config = ours(models, name)
    if said["accepted"]:
        mine = {f: getattr(config, f) for f in said["fields"]}
        fields, slots, _ = OTHERWISE.get(name, ({}, said["slots"], None))
        assert mine == said["fields"] | fields and config.slots == slots
        assert (config.model == vllm.place(vllm.CASES[name], models)[1]) == said["is_target"]


def law(config):
    "(verification, draft, rates): strict is standard on an argmax draft"
    return (
        DOCUMENTED_SAMPLING.get(config.rejection_sample_method, (config.rejection_sample_method,))[0],
        config.draft_sample_method,
        config.synthetic_acceptance_rates,
    )


@pytest.mark.parametrize("name", [n for n in vllm.CASES if DELIBERATE.get(n, (RECORD["cases"][n]["accepted"],))[0]])
@pytest.mark.parametrize("engine", ENGINES)
def test_json_says_the_same_when_read_back(models, name, engine):
    config = ours(models, name)
    try:
        text = config.to_json(engine)
    except ValueError as e:
        assert re.search("no equivalent|chains only|is not served", str(e))
        return
    _, target, devices = vllm.place(vllm.CASES[name], models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = SpeculativeConfig(**json.loads(text), target_model_config=target, target_tensor_parallel_size=devices)
    assert again.to_json(engine) == text and law(again) == law(config) and again.compute_hash() == config.compute_hash()
    assert {"strict", "probabilistic"}.isdisjoint(
        [json.loads(text).get("rejection_sample_method")]
    ) or engine == "documented"
    assert engine != "documented" or "draft_sample_method" not in json.loads(text)


@pytest.mark.statement(
    "vllm-36",
    "vllm-37",
    "vllm-38",
    "vllm-40",
    "vllm-41",
    "vllm-42",
    "vllm-44",
    "vllm-45",
    "vllm-46",
    "vllm-47",
    "vllm-48",
    "vllm-50",
)
@pytest.mark.parametrize("word", RECORD["mtp"])
def test_mtp_table_is_vllms(word):
    kind = (
        dict(model_type="any", architectures=[word])
        if word[0].isupper()
        else dict(model_type=word, architectures=["AnyForCausalLM"])
    )
    numbers = dict(num_nextn_predict_layers=2, mtp_num_hidden_layers=3, num_mtp_modules=4)  # as in ask_mtp
    assert list(mtp_head(kind | numbers)) == RECORD["mtp"][word]
    assert mtp_head(dict(model_type=RECORD["mtp"][word][0]))[0] == RECORD["mtp"][word][0]  # a head's own config


def test_words_of_the_lines():
    drawn = SpeculativeConfig(
        model="org/small", method="draft_model", num_speculative_tokens=2, rejection_sample_method="probabilistic"
    )
    assert json.loads(drawn.to_json()) == dict(
        model="org/small", method="draft_model", num_speculative_tokens=2, draft_sample_method="probabilistic"
    )
    assert json.loads(drawn.to_json("documented"))["rejection_sample_method"] == "probabilistic"
    assert json.loads(SpeculativeConfig(**NGRAM).to_json()).keys() == {
        "method",
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
    }
    with pytest.raises(ValueError, match="engine='vllm-0.1'"):
        drawn.to_json("vllm-0.1")
    for method, engine in (("dspark", "documented"), ("mlp_speculator", "vllm-0.32")):
        with pytest.raises(ValueError, match=f"method='{method}' is not served by the {engine}"):
            SpeculativeConfig(method=method, model="org/x", num_speculative_tokens=3).to_json(engine)


def test_a_checkpoint_of_ours_says_what_it_is(models):
    raw = vllm.MODELS["trained-eagle3"] | dict(speculators_model_type="peagle")
    (models / "EAGLE-neutral").mkdir(exist_ok=True)
    (models / "EAGLE-neutral/config.json").write_text(json.dumps(raw))
    # vLLM would go by the name, and take it for an EAGLE-1
    config = SpeculativeConfig(model=str(models / "EAGLE-neutral"))
    assert (config.method, config.parallel_drafting, config.num_speculative_tokens, config.slots) == (
        "eagle3",
        True,
        3,
        2,
    )
    with pytest.raises(ValueError, match="method='medusa' does not fit"):
        SpeculativeConfig(model=str(models / "EAGLE-neutral"), method="medusa")


def test_every_type_of_ours_is_served_as_something():
    "A key of METHOD_OF_TYPE that no checkpoint carries is a checkpoint that is taken for an ordinary model."
    import_models()
    assert (
        METHOD_OF_TYPE.keys() == SpeculatorModel.registry.keys()
        and {method for method, _ in METHOD_OF_TYPE.values()} <= METHODS.keys()
    )


def test_an_mlp_speculator_of_ours(tmp_path):
    "Its type is `mlp`: recognised, run by our decoder, and refused for vLLM with the reason that it has no such model."
    from speculators_nb.serve.serve_command import serve_command
    from speculators_nb.train.train_drafter import new_drafter

    home = ROOT / "data/tiny-verifier"
    new_drafter("mlp", home, num_heads=2).save_pretrained(tmp_path / "heads")
    config = SpeculativeConfig(model=str(tmp_path / "heads"))
    assert (config.method, config.num_speculative_tokens, config.parallel_drafting) == ("mlp_speculator", 2, False)
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    done = speculate(target, dict(model=str(tmp_path / "heads")), prompt, max_new_tokens=9)
    assert (
        done.tokens == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=9).tokens
        and max(len(s.draft) for s in done.steps) == 2
    )
    with pytest.raises(ValueError, match="(?s)vLLM cannot serve it as it is.*vLLM 0.32 drafts with no MLP speculator"):
        serve_command(tmp_path / "heads")
    with pytest.raises(ValueError, match="method='mlp_speculator' is not served by the vllm-0.32 line"):
        config.to_json("vllm-0.32")
    with pytest.raises(ValueError, match="method='medusa' does not fit .*served as 'mlp_speculator'"):
        SpeculativeConfig(model=str(tmp_path / "heads"), method="medusa")


def test_a_path_that_vllm_reads_otherwise(models):
    with pytest.warns(UserWarning, match="vLLM reads 'eagle3' out of this path and will not use method='draft_model'"):
        SpeculativeConfig(model=str(models / "small_eagle3"), method="draft_model", num_speculative_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpeculativeConfig(model=str(models / "small_eagle3"), num_speculative_tokens=3)
        SpeculativeConfig(model=str(models / "small"), num_speculative_tokens=3)


def test_a_head_in_the_target_is_not_named(models):
    config = SpeculativeConfig(method="mtp", target_model_config=models / "mimo")
    assert config.model == str(models / "mimo") and json.loads(config.to_json()) == dict(
        method="mtp", num_speculative_tokens=1
    )


def test_mtp_takes_the_targets_quantization(models):
    target = vllm.MODELS["mimo"] | dict(_name_or_path="org/mimo", quantization_config=dict(quant_method="fp8"))
    config = SpeculativeConfig(method="mtp", target_model_config=target)
    assert (config.model, config.quantization, config.num_speculative_tokens) == ("org/mimo", "fp8", 1)
    with pytest.warns(DeprecationWarning, match="write 'mtp'"):
        assert SpeculativeConfig(method="mimo_mtp", num_speculative_tokens=1).method == "mtp"


def test_hash_is_of_what_the_target_hands_out():
    def of(ids):
        return SpeculativeConfig(
            method="extract_hidden_states",
            num_speculative_tokens=1,
            draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=ids)),
        ).compute_hash()

    plain = SpeculativeConfig(**NGRAM).compute_hash()
    assert (
        plain
        == SpeculativeConfig(**NGRAM | dict(num_speculative_tokens=7)).compute_hash()
        == SpeculativeConfig(method="medusa", model="x", num_speculative_tokens=3).compute_hash()
    )
    assert (
        len(
            {
                plain,
                of([1, 3]),
                of([1, 4]),
                SpeculativeConfig(method="eagle3", model="x", num_speculative_tokens=3).compute_hash(),
            }
        )
        == 4
    )
    assert of([1, 3]) == of([1, 3])


@given(st.integers(1, 12), st.floats(0, 1))
@settings(deadline=None)
def test_length_schedule(n, share):
    length = 1 + share * n
    rates = length_to_rates(length, n)
    assert len(rates) == n and abs(sum(rates) - (length - 1)) < 1e-9
    # two neighbouring lengths only
    assert all(1 >= a >= b >= 0 for a, b in zip(rates, [*rates[1:], 0])) and sum(0 < r < 1 for r in rates) <= 1
    product = 1.0
    for rate, c in zip(rates, conditional_rates(rates)):
        product *= c
        assert abs(product - rate) < 1e-12


paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


@pytest.mark.statement("vllm-16", "vllm-78")
@given(paths, st.randoms())
@settings(deadline=None)
def test_token_tree_any_order(leaves, random):
    tree = list({p[:i] for p in leaves for i in range(1, len(p) + 1)})
    random.shuffle(tree)
    parsed = parse_token_tree(str(tree))
    assert (
        parsed == parse_token_tree(tree)
        and set(parsed) == set(tree)
        and [len(p) for p in parsed] == sorted(map(len, tree))
    )
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=len(tree), speculative_token_tree=str(tree))
    assert config.is_chain == (len(tree) == max(map(len, tree)) and all(set(p) == {0} for p in tree))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "()",
        "{}",
        "[()]",
        "[(0)]",
        "[(0,), (0,)]",
        "[(0, 0)]",
        "[(0.5,)]",
        "[(True,)]",
        "[('a',)]",
        "open('x')",
        "[" * 10_000,
    ],
)
def test_token_tree_malformed(text):
    with pytest.raises(ValueError, match="speculative_token_tree"):
        parse_token_tree(text)


@pytest.mark.parametrize(
    "rates, message",
    [
        ([0.4, 0.8, 0.1], r"synthetic_acceptance_rates=\[0.4, 0.8, 0.1\] must lie in \[0, 1\] and not increase"),
        (
            [0.8, 0.4],
            r"synthetic_acceptance_rates=\[0.8, 0.4\] must have one rate for each of num_speculative_tokens=3",
        ),
        ([0.8, 0.4, 0.2, 0.1], "must have one rate for each of num_speculative_tokens=3"),
        ([], "must have one rate for each"),
        ([1.1, 0.4, 0.2], "must lie in"),
        ([0.5, float("nan"), 0.1], "should be a finite number"),
        ([0.5, 0.2, -0.1], "must lie in"),
    ],
)
def test_bad_rates_are_named(rates, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)


def test_drafting_beyond_the_trained_depth(tmp_path):
    """A head that predicts two tokens drafts two, or a multiple; heads drafted beyond their number propose what they
    have, and say so."""
    from speculators_nb.train.train_drafter import new_drafter

    (tmp_path / "mlp").mkdir()
    (tmp_path / "mlp/config.json").write_text('{"model_type": "mlp_speculator", "n_predict": 2}')
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens=3 must be at most the 2 tokens that the draft predicts"
    ):
        SpeculativeConfig(model=str(tmp_path / "mlp"), num_speculative_tokens=3)
    home = ROOT / "data/tiny-verifier"
    new_drafter("medusa", home, num_heads=2).save_pretrained(tmp_path / "heads")
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    with pytest.warns(UserWarning, match="k=5 drafts more than the 2 tokens"):
        done = speculate(
            target, dict(model=str(tmp_path / "heads"), num_speculative_tokens=5), prompt, max_new_tokens=9
        )
    assert (
        done.tokens == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=9).tokens
        and max(len(s.draft) for s in done.steps) == 2
    )


def test_token_tree_size_and_use():
    with pytest.raises(ValueError, match="has 2 tokens, num_speculative_tokens=3"):
        SpeculativeConfig(**NGRAM, speculative_token_tree="[(0,), (1,)]")
    with pytest.raises(ValueError, match="has branches, and method='ngram' drafts chains"):
        SpeculativeConfig(**NGRAM, speculative_token_tree="[(0,), (1,), (0, 0)]").drafter(None)
    with pytest.raises(ValueError, match="has branches, and rejection_sample_method='block'"):
        SpeculativeConfig(
            **NGRAM, speculative_token_tree="[(0,), (1,), (0, 0)]", rejection_sample_method="block"
        ).rule()


@pytest.mark.parametrize("word", ["strict", "probabilistic"])
def test_a_tree_by_config(verifier, tmp_path, word):
    """The verifier's own copy drafts it: greedily the likeliest words, under "probabilistic" with drawn siblings that
    carry their laws. The text is the verifier's."""
    verifier.model.save_pretrained(tmp_path / "same")
    config = SpeculativeConfig(
        model=str(tmp_path / "same"),
        num_speculative_tokens=5,
        speculative_token_tree="[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]",
        rejection_sample_method=word,
    )
    assert config.depth == 3
    drafter, tokens = config.drafter(verifier), torch.tensor([1, 2, 3])
    for temperature in (0.0, 1.0):
        tree = drafter.propose(tokens, None, 3, Sampling(temperature, torch.Generator().manual_seed(0)))
        assert tree.parents.tolist() == [-1, -1, 0, 1, 2] and (tree.probs is not None) == (
            word == "probabilistic" and temperature > 0
        )
    done = speculate(verifier, config, [[1, 2, 3], [4]], max_new_tokens=30)
    plain = generate(verifier, NoDrafter(), [[1, 2, 3], [4]], k=0, max_new_tokens=30)
    assert [g.tokens for g in done] == [g.tokens for g in plain] and all(
        s.accepted == min(3, s.requested) for g in done for s in g.steps
    )


def test_a_draft_in_the_engines_own_format(tmp_path):
    from speculators_nb.models.convert import export_native
    from speculators_nb.train.train_drafter import new_drafter

    home = ROOT / "data/tiny-verifier"
    new_drafter("medusa", home).save_pretrained(tmp_path / "heads")
    export_native(tmp_path / "heads", tmp_path / "native", "medusa")
    config = SpeculativeConfig(model=str(tmp_path / "native"), num_speculative_tokens=5, target_model_config=home)
    assert config.method == "medusa"
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    tokens, states = torch.tensor([5, 6, 7, 8]), torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    ours = SpeculativeConfig(model=str(tmp_path / "heads"), target_model_config=home).drafter(target)
    assert torch.equal(
        config.drafter(target).propose(tokens, states, 5, Sampling()).tokens,
        ours.propose(tokens, states, 5, Sampling()).tokens,
    )
    assert (
        speculate(target, config, prompt, max_new_tokens=8).tokens
        == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=8).tokens
    )


@pytest.mark.statement("vllm-63")
def test_hidden_states_are_handed_out(verifier):
    config = SpeculativeConfig(
        method="extract_hidden_states",
        num_speculative_tokens=1,
        draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=[1])),
    )
    tapped = Verifier(verifier.model, [0, 1])
    assert config.drafter(tapped).aux_layer_ids == (1,)
    prompts = [[1, 2, 3], [4], [5, 6]]
    for limit in (1, 6):
        for g in speculate(tapped, config, prompts, max_new_tokens=limit):
            text = torch.tensor([[*g.prompt, *g.tokens[:-1]]])
            torch.testing.assert_close(g.hidden_states, tapped(text).hidden_states[0, :, 32:], rtol=1e-4, atol=1e-5)
    plain = speculate(tapped, NGRAM, prompts, max_new_tokens=6)
    assert all(g.hidden_states is None for g in plain)
    with pytest.raises(ValueError, match=r"reads layers \[5\], the verifier taps \[0, 1\]"):
        speculate(
            tapped,
            dict(
                method="extract_hidden_states",
                num_speculative_tokens=1,
                draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=[5])),
                target_model_config=None,
            ),
            prompts,
        )


@pytest.fixture(scope="module")
def verifier():
    torch.manual_seed(0)
    return Verifier(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=20,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=512,
            )
        ).eval(),
        [0],
    )


def test_drafters(verifier, tmp_path):
    n = SpeculativeConfig(**NGRAM, prompt_lookup_min=2, prompt_lookup_max=4).drafter(verifier)
    assert isinstance(n, NgramDrafter) and (n.min_n, n.max_n) == (2, 4)
    s = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=4,
        suffix_decoding_max_tree_depth=9,
        suffix_decoding_max_cached_requests=5,
        suffix_decoding_max_spec_factor=2,
        suffix_decoding_min_token_prob=0.3,
    ).drafter(verifier)
    assert isinstance(s, SuffixDrafter) and (s.answers.depth, s.max_requests, s.factor, s.min_prob) == (9, 5, 2, 0.3)
    assert isinstance(
        SpeculativeConfig(method="extract_hidden_states", num_speculative_tokens=1).drafter(verifier), HiddenStates
    )
    verifier.model.save_pretrained(tmp_path / "same")
    draft = dict(model=str(tmp_path / "same"), num_speculative_tokens=3)
    sampling = Sampling(1.0, torch.Generator().manual_seed(0))
    tokens = torch.tensor([1, 2, 3])
    for words, drawn in (
        ({}, False),
        (dict(draft_sample_method="probabilistic", rejection_sample_method="standard"), True),
    ):
        d = SpeculativeConfig(**draft, **words).drafter(verifier)
        assert isinstance(d, ArgmaxDrafter) is not drawn
        assert (d.propose(tokens, None, 3, sampling).probs is not None) == drawn
    with pytest.raises(ValueError, match="engine's own format, and the verifier has no folder"):
        SpeculativeConfig(**draft, method="medusa").drafter(verifier)


def test_a_trained_checkpoint_by_config(tmp_path):
    from speculators_nb.train.train_drafter import new_drafter

    home = ROOT / "data/tiny-verifier"
    new_drafter("medusa", home).save_pretrained(tmp_path / "heads")
    config = SpeculativeConfig(model=str(tmp_path / "heads"), target_model_config=home)
    assert config.method == "medusa" and config.num_speculative_tokens
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    assert (
        speculate(target, config, prompt, max_new_tokens=12).tokens
        == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=12).tokens
    )


@pytest.mark.statement("vllm-25", "vllm-26")
@pytest.mark.parametrize("word", ["strict", "probabilistic", "standard", "block"])
def test_lossless_rules_greedy(verifier, word):
    prompts = [[1, 2, 3, 1, 2], [4, 4, 4]]
    plain = generate(verifier, NoDrafter(), prompts, k=0, max_new_tokens=40)
    for fields in (NGRAM | dict(prompt_lookup_min=1), dict(method="suffix", num_speculative_tokens=4)):
        done = speculate(verifier, fields | dict(rejection_sample_method=word), prompts, max_new_tokens=40)
        assert [g.tokens for g in done] == [g.tokens for g in plain] and sum(s.accepted for g in done for s in g.steps)


def test_rules():
    assert {
        SpeculativeConfig(**NGRAM, rejection_sample_method=w).rule() is accept.RULES[r]
        for w, r in (("strict", "strict"), ("standard", "standard"), ("probabilistic", "standard"), ("block", "block"))
    } == {True}
    rule = SpeculativeConfig(**NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5).rule()
    g = torch.Generator().manual_seed(0)
    tree = TokenTree.chain(torch.tensor([0, 1, 2]))
    target = torch.full((4, 5), 0.2)
    kept = [len(rule.decide(tree, target, g)[0]) for _ in range(2000)]
    assert set(kept) == {1, 2} and abs(sum(kept) / 2000 - 1.5) < 4 * 0.5 / 2000**0.5  # four standard errors
    assert not rule.lossless


def test_strict_and_standard_have_one_law():
    # an argmax draft is kept with p(x) by either; the residual of the one is what the other drew
    tree, p, n = TokenTree.chain(torch.tensor([0])), torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), 4000
    law = {}
    for word in ("strict", "standard"):
        rule = SpeculativeConfig(method="ngram", num_speculative_tokens=1, rejection_sample_method=word).rule()
        g = torch.Generator().manual_seed(1)
        first = [0 if path else token for path, token in (rule.decide(tree, p, g) for _ in range(n))]
        law[word] = torch.bincount(torch.tensor(first), minlength=3) / n
    for word in law:
        assert (law[word] - p[0]).abs().max() < 4 * 0.5 / n**0.5  # four standard errors


def test_every_method_makes_something_or_says_why(verifier):
    for method in METHODS:
        assert SpeculativeConfig(method=method, model="org/not-here", num_speculative_tokens=3).slots >= 0
