"""EAGLE-3 and P-EAGLE with latent attention (DeepSeek-V3's, Kimi's): trained, drafting, saved, converted from and to
what is released, and held to what vLLM reads. The layer itself is compared in nbs/nn/11_latent_attention.ipynb."""

import json

import pytest
import torch
from matrix import batch_for, drafter, train_step, verifier
from safetensors.torch import load_file
from test_rope import dense, drafted
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, export_native
from speculators_nb.models.llama_cpp import check_llama_cpp
from speculators_nb.nn.layers import LATENT_SIZES, draft_layer_config
from speculators_nb.plan.step_memory import measured_step, predicted_step, step_of
from speculators_nb.serve.vllm_contract import check_vllm_contract
from speculators_nb.train.train_drafter import layers_of_file, new_drafter
from speculators_nb.verifier.tapped_model import Verifier

YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=16,
    mscale=0.7,
    mscale_all_dim=1.0,
)
CHANGES = {
    "plain": {},
    "query latent": dict(q_lora_rank=16),
    "halves": dict(rope_interleave=False),
    "yarn": dict(rope_parameters=YARN),
    "longer values": dict(v_head_dim=16),
}
WINDOW = dict(layer_types=["sliding_attention"] * 2, sliding_window=5)
KINDS = "eagle3 latent", "peagle latent"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("change", [*CHANGES, "window"])
def test_the_lean_path_is_the_definition(name, change):
    model = drafter(name, "llama", **(CHANGES | {"window": WINDOW})[change])
    batch = batch_for(model, "llama")
    (loss, grad), (by_definition, whole) = (train_step(model, batch, name, lean=lean) for lean in (True, False))
    assert loss == pytest.approx(by_definition, rel=1e-6)
    torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item())
    plain = drafter(name, "llama")
    assert change == "plain" or train_step(plain, batch, name)[0] != pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_drafts_are_what_was_trained(name, change, tmp_path):
    "With a cache, also from the stored folder: what the definition says on the whole text."
    model = drafter(name, "qwen3", **CHANGES[change]).eval()
    got, features = drafted(model, 3)
    torch.testing.assert_close(got, dense(model, name.split()[0], features, 3), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(drafted(SpeculatorModel.from_pretrained(tmp_path).eval(), 3)[0], got)


@pytest.fixture(scope="module")
def latent_verifier(tmp_path_factory):
    "A tiny verifier of DeepSeek-V3's kind: a dense layer and one with experts."
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        rope_parameters=dict(YARN),
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_for_a_verifier_with_latent_attention(latent_verifier):
    "Its sizes and its RoPE, dense; the text of a verifier that drafts with it is the verifier's own."
    model = new_drafter("eagle3", latent_verifier, "deepseek_v3", num_layers=2, norm_output=True).eval()
    layer, target = model.config.transformer_layer_config, Verifier.from_pretrained(latent_verifier)
    for name in (*LATENT_SIZES, "intermediate_size", "rope_parameters"):
        assert getattr(layer, name) == getattr(target.model.config, name), name
    assert model.layers[0].mlp.gate_proj.weight.shape == (40, 32)
    assert model.layers[0].self_attn.kv_a_proj_with_mqa.weight.shape == (12, 64)
    prompt = [5, 17, 3, 80, 41]
    plain = generate(target, NoDrafter(), prompt, max_new_tokens=24, k=0).tokens
    assert generate(target, model.drafter(), prompt, max_new_tokens=24, k=3).tokens == plain


def test_the_plan_counts_its_own_step():
    layer = draft_layer_config(verifier("qwen3")[1].model.config, "deepseek_v3")
    layer.q_lora_rank = 24
    shape = dict(rows=96, depth=4, length=64, each=32, ttt_steps=2)
    model, arguments = step_of("eagle3", layer, **shape)
    assert model.layers[0].self_attn.q_a_proj.out_features == 24
    assert predicted_step("eagle3", layer, **shape, device="cpu") == measured_step(model, **arguments)


def test_for_a_verifier_without():
    "DeepSeek-V2's sizes for heads of that size, and no latent of the queries."
    layer = draft_layer_config(verifier("qwen3")[1].model.config, "deepseek_v3", intermediate_size=48)
    assert [getattr(layer, name) for name in LATENT_SIZES] == [None, 32, 8, 4, 8]
    assert (layer.intermediate_size, layer.num_key_value_heads) == (48, 4)


def as_released(folder):
    "A native checkpoint as TorchSpec writes it for Kimi: another model_type, RoPE in two fields, no vLLM names."
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    kept = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act"
    kept += " rms_norm_eps vocab_size draft_vocab_size max_position_embeddings fc_norm norm_output eagle_config"
    raw = {name: raw[name] for name in (*kept.split(), *LATENT_SIZES)}
    yarn = {"type" if name == "rope_type" else name: value for name, value in YARN.items() if name != "rope_theta"}
    more = dict(architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", mla_use_nope=True)
    file.write_text(json.dumps(raw | more | dict(rope_theta=1e4, rope_scaling=yarn)))


def test_what_is_released_is_converted(tmp_path):
    "Both ways the same tensors, and the same drafts; a field that neither trainer nor engine reads is left out."
    options = dict(num_hidden_layers=1, layer_types=["full_attention"], q_lora_rank=16, rope_parameters=YARN)
    model, (target, _, _) = drafter("eagle3 latent", "qwen3", **options), verifier("qwen3")
    model.config.norm_before_residual = model.layers[0].norm_before_residual = False
    model.save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "native", verifier=target)
    raw = json.loads((tmp_path / "native/config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("deepseek_v2", ["Eagle3DeepseekV2ForCausalLM"])
    stored = load_file(tmp_path / "native/model.safetensors")
    assert {"midlayer.self_attn.kv_a_proj_with_mqa.weight", "midlayer.self_attn.q_a_layernorm.weight"} <= {*stored}
    as_released(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "again", target)
    again = SpeculatorModel.from_pretrained(tmp_path / "again").eval()
    assert again.config.transformer_layer_config.model_type == "deepseek_v3"
    assert torch.equal(drafted(again, 3)[0], drafted(model.eval(), 3)[0])


def stored(folder, name="eagle3 latent", **layer):
    drafter(name, "llama", **layer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "change,said",
    [
        ({}, ()),
        (dict(rope_parameters=YARN), ()),
        (dict(rope_interleave=False), ("rope_interleave is False",)),
        (WINDOW, ("has no window",)),
        (dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), ("rope_type is 'linear'",)),
        (dict(rope_parameters=YARN | dict(truncate=False)), ("truncate is False",)),
        (dict(rope_parameters=YARN | dict(mscale=None)), ("mscale=None and mscale_all_dim=1.0",)),
        (dict(rope_parameters=YARN | dict(factor=2.0)), ("factor is 2.0", "train with 4")),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_vllm_reads(change, said, tmp_path):
    "The folder never, the native layout where its latent attention is what was trained."
    layout, *others = check_vllm_contract(stored(tmp_path, **change))
    assert "speculators-nb export" in layout and len(others) == bool(said)
    assert all(part in others[0] for part in said)


def test_who_has_no_place_for_it(tmp_path, latent_verifier):
    "One line with field, value and what to take instead."
    for algorithm, given, said in (
        ("eagle", {}, "model_type='deepseek_v3' is not a draft layer family; choose from llama"),
        ("dflash", dict(mask_token_id=0), "model_type is 'deepseek_v3'; draft layers of blocks are qwen3"),
    ):
        with pytest.raises(ValueError, match=said):
            new_drafter(algorithm, latent_verifier, "deepseek_v3", **given)
    assert "vLLM serves llama and qwen3" in check_vllm_contract(stored(tmp_path / "p", "peagle latent"))[0]
    assert any(
        "kv_b_proj.weight: llama.cpp's eagle3 has no place" in s for s in check_llama_cpp(stored(tmp_path / "e"))
    )


@pytest.mark.parametrize(
    "field,value,said",
    [
        ("kv_lora_rank", 0, "must be at least 1"),
        ("v_head_dim", None, ": deepseek_v3 draft layers need a number above 0"),
        ("head_dim", 8, " is what is rotated; leave it out, or write 4"),
        ("attention_bias", True, ": deepseek_v3 draft layers have no such thing; remove it, or set it to False"),
        ("index_topk", 8, ": deepseek_v3 draft layers have no such thing; remove it, or set it to None"),
    ],
)
def test_fields_that_it_does_not_have(field, value, said, tmp_path):
    layer = draft_layer_config(verifier("llama")[1].model.config, "deepseek_v3").to_dict() | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(layer))
    with pytest.raises(ValueError, match=f"{field}={value}(: )?{said}"):
        layers_of_file(tmp_path, verifier("llama")[1].model.config)
