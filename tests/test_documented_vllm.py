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
