"""The page of vLLM's SpeculativeConfig, statement by statement (docs/statements.yml); the dictionaries of
test_speculative_config.py hold the rest."""

import json
import warnings

import pytest

from speculators_nb.serve.speculative_config import SpeculativeConfig

BOUNDS = {"prompt_lookup_min", "prompt_lookup_max"}
NGRAM = dict(method="ngram", num_speculative_tokens=3)
SUFFIX = dict(method="suffix", num_speculative_tokens=3)
SYNTHETIC = NGRAM | dict(rejection_sample_method="synthetic")
TARGET = dict(
    _name_or_path="org/target",
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=32,
    hidden_size=8,
    max_position_embeddings=64,
)


def config(**fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SpeculativeConfig(**fields)


def head(**fields):
    "Of a target with an MTP head."
    return config(method="mtp", target_model_config=TARGET | fields)


@pytest.mark.statement("vllm-01", "vllm-09", "vllm-10", "vllm-12", "vllm-13", "vllm-14", "vllm-17", "vllm-24")
def test_defaults():
    found = config(**NGRAM)
    for name in ["enforce_eager", "quantization", "moe_backend", "revision", "code_revision", "draft_load_config"]:
        assert getattr(found, name) is None
    # left out for the engine, which then takes the target's
    assert json.loads(found.to_json()).keys() == {"method", "num_speculative_tokens", *BOUNDS}
    assert json.loads(config(**NGRAM, moe_backend="triton").to_json())["moe_backend"] == "triton"
    for name in ["disable_padded_drafter_batch", "use_local_argmax_reduction", "parallel_drafting"]:
        assert getattr(found, name) is False


@pytest.mark.statement("vllm-12", "vllm-04")
def test_versions_of_the_draft():
    found = config(model="org/draft", method="draft_model", num_speculative_tokens=2, revision="a", code_revision="b")
    assert (found.model, found.revision, found.code_revision) == ("org/draft", "a", "b")


@pytest.mark.statement("vllm-20", "vllm-21", "vllm-22", "vllm-23", "vllm-83")
def test_suffix_defaults():
    found = config(method="suffix")
    assert (found.suffix_decoding_max_tree_depth, found.suffix_decoding_max_cached_requests) == (24, 10000)
    assert (found.suffix_decoding_max_spec_factor, found.suffix_decoding_min_token_prob) == (1.0, 0.1)
    assert found.num_speculative_tokens == 24
    assert config(**SUFFIX | dict(suffix_decoding_max_cached_requests=0)).suffix_decoding_max_cached_requests == 0


@pytest.mark.statement("vllm-84")
@pytest.mark.parametrize(
    "field,value",
    [("max_tree_depth", 0), ("max_cached_requests", -1), ("max_spec_factor", -0.1), ("min_token_prob", 1.1)],
)
def test_suffix_values(field, value):
    with pytest.raises(ValueError, match=f"suffix_decoding_{field}"):
        config(**SUFFIX | {f"suffix_decoding_{field}": value})


@pytest.mark.statement("vllm-02", "vllm-11", "vllm-15")
@pytest.mark.parametrize("field", ["num_speculative_tokens", "max_model_len", "prompt_lookup_max", "prompt_lookup_min"])
def test_positive_fields(field):
    with pytest.raises(ValueError, match=field):
        config(**NGRAM | {field: 0})


@pytest.mark.statement("vllm-06", "vllm-57")
@pytest.mark.parametrize("fields", [dict(num_speculative_tokens=3), dict(method="eagle", num_speculative_tokens=3)])
def test_a_model_or_a_method_without_one(fields):
    with pytest.raises(ValueError, match="model|method"):
        config(**fields)


@pytest.mark.statement("vllm-08")
def test_the_wrong_field_is_named():
    with pytest.raises(ValueError, match="draft_tensor_parallel_size"):
        config(**NGRAM | dict(tensor_parallel_size=1))


@pytest.mark.statement("vllm-51")
@pytest.mark.parametrize("fields", [dict(model="ngram"), dict(model="[ngram]")])
def test_words_for_ngram(fields):
    assert config(num_speculative_tokens=3, **fields).method == "ngram"


@pytest.mark.statement("vllm-51", "vllm-69")
def test_any_other_model_is_a_draft_model():
    assert config(model="org/small", num_speculative_tokens=3).method == "draft_model"


@pytest.mark.statement("vllm-59", "vllm-60", "vllm-61")
def test_lookup_bounds():
    def bounds(**fields):
        found = config(**NGRAM | fields)
        return found.prompt_lookup_min, found.prompt_lookup_max

    assert bounds() == (5, 5) and bounds(prompt_lookup_max=4) == (4, 4) and bounds(prompt_lookup_min=2) == (2, 2)
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        bounds(prompt_lookup_min=5, prompt_lookup_max=4)


@pytest.mark.statement("vllm-25", "vllm-26")
def test_sampling_words():
    assert SpeculativeConfig.model_fields["rejection_sample_method"]
    for word in ("strict", "probabilistic"):
        assert config(**NGRAM | dict(rejection_sample_method=word)).rejection_sample_method == word


@pytest.mark.statement("vllm-27", "vllm-28", "vllm-29", "vllm-32")
def test_synthetic():
    rates = config(**SYNTHETIC | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4])).synthetic_acceptance_rates
    assert rates == [0.8, 0.4, 0.4]
    found = config(**SYNTHETIC | dict(synthetic_acceptance_length=2.6))
    assert found.synthetic_acceptance_length is None
    assert found.synthetic_acceptance_rates == pytest.approx([1.0, 0.6, 0.0])


@pytest.mark.statement("vllm-30", "vllm-31", "vllm-32", "vllm-33")
@pytest.mark.parametrize(
    "fields",
    [
        SYNTHETIC,
        SYNTHETIC | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4], synthetic_acceptance_length=2.6),
        SYNTHETIC | dict(synthetic_acceptance_rates=[0.8, 0.4]),
        SYNTHETIC | dict(synthetic_acceptance_rates=[0.4, 0.8, 0.1]),
        SYNTHETIC | dict(synthetic_acceptance_rates=[1.2, 0.8, 0.1]),
        SYNTHETIC | dict(synthetic_acceptance_length=0.9),
        SYNTHETIC | dict(synthetic_acceptance_length=4.1),
        NGRAM | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4]),
        NGRAM | dict(synthetic_acceptance_length=2.0),
    ],
)
def test_synthetic_errors(fields):
    with pytest.raises(ValueError, match="synthetic_acceptance"):
        config(**fields)


@pytest.mark.statement("vllm-56")
@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "extract_hidden_states"])
def test_methods_that_are_their_own_model(method):
    assert config(method=method, num_speculative_tokens=1).model == method


@pytest.mark.statement("vllm-64")
def test_no_lookup_elsewhere():
    found = config(model="org/small", num_speculative_tokens=3)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (0, 0)


@pytest.mark.statement("vllm-16", "vllm-78")
def test_trees():
    draft = dict(model="org/small", method="draft_model")
    tree = config(**draft, num_speculative_tokens=3, speculative_token_tree="[(0, 0), (1,), (0,)]")
    assert tree.speculative_token_tree == "[(0,), (1,), (0, 0)]"


@pytest.mark.statement("vllm-76")
def test_neither_tree_nor_number():
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        config(model="org/small", method="draft_model")


@pytest.mark.statement("vllm-53")
def test_mtp_needs_a_target():
    with pytest.raises(ValueError, match="target_model_config"):
        config(method="mtp", num_speculative_tokens=1)


@pytest.mark.statement("vllm-55", "vllm-52", "vllm-74", "vllm-03")
def test_mtp_is_in_the_target():
    fp8 = dict(quantization_config=dict(quant_method="fp8"))
    found = head(model_type="deepseek_v3", num_nextn_predict_layers=2, **fp8)
    assert (found.model, found.quantization, found.num_speculative_tokens) == ("org/target", "fp8", 2)
    with pytest.warns(match="mtp"):
        old = SpeculativeConfig(
            method="deepseek_mtp",
            target_model_config=TARGET | dict(model_type="deepseek_v3", num_nextn_predict_layers=1),
        )
    assert old.method == "mtp"


@pytest.mark.statement("vllm-75")
def test_a_multiple_of_the_heads():
    target = TARGET | dict(model_type="deepseek_v3", num_nextn_predict_layers=2)
    assert config(method="mtp", target_model_config=target, num_speculative_tokens=4).num_speculative_tokens == 4
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        config(method="mtp", target_model_config=target, num_speculative_tokens=3)


@pytest.mark.statement("vllm-87")
def test_slots():
    draft = dict(model="org/small", method="draft_model", num_speculative_tokens=3)
    assert config(**NGRAM).max_num_new_slots_for_drafting == 0
    assert config(**draft).max_num_new_slots_for_drafting == 1
    assert config(**draft, parallel_drafting=True).max_num_new_slots_for_drafting == 3


@pytest.mark.statement("vllm-88")
def test_predicates():
    ngram = config(**NGRAM)
    names = ["use_eagle", "use_dflash", "uses_draft_model", "uses_extract_hidden_states", "use_ngram_gpu"]
    assert not any(getattr(ngram, name)() for name in names)
    assert config(method="ngram_gpu", num_speculative_tokens=2).use_ngram_gpu()
    assert config(model="org/small", num_speculative_tokens=2).uses_draft_model()
    assert config(method="extract_hidden_states", num_speculative_tokens=1).uses_extract_hidden_states()
    assert config(method="eagle3", model="org/x", num_speculative_tokens=2).use_eagle()
    block = config(method="dflash", model="org/x", num_speculative_tokens=2)
    assert block.use_dflash() and block.use_eagle() and block.parallel_drafting


@pytest.mark.statement("vllm-89")
def test_repr():
    assert repr(config(**NGRAM)) == "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)"


@pytest.mark.statement("vllm-85")
def test_families_that_give_inner_states():
    draft = dict(method="eagle3", model="org/x", num_speculative_tokens=2)
    assert config(**draft, target_model_config=TARGET).to_json("documented")
    other = config(**draft, target_model_config=TARGET | dict(model_type="phi", architectures=["PhiForCausalLM"]))
    with pytest.raises(ValueError, match="phi"):
        other.to_json("documented")


@pytest.mark.statement("vllm-34", "vllm-35")
def test_hash():
    plain = config(**NGRAM).compute_hash()
    inner = config(method="eagle3", model="x", num_speculative_tokens=1)
    assert plain == config(**SUFFIX).compute_hash() != inner.compute_hash()

    def states(ids):
        given = dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=ids))
        return config(method="extract_hidden_states", num_speculative_tokens=1, draft_model_config=given).compute_hash()

    assert states([1, 2]) != states([1, 3]) and states([1, 2]) == states([1, 2])


@pytest.mark.statement("vllm-58")
def test_ngram_in_brackets():
    assert config(method="[ngram]", num_speculative_tokens=3).method == "ngram"
