"""The EAGLE pages of the documentation, statement by statement (docs/statements.yml)."""

import copy
import gc
import importlib
import inspect
import warnings
import weakref

import pytest
import torch
from documented import SHAPE, H, V, batch, layer, write_verifier
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers.modeling_outputs import CausalLMOutputWithPast

import speculators_nb.models as models
from speculators_nb import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators_nb.decode.generate import generate
from speculators_nb.models import (
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    EagleSpeculator,
    EagleSpeculatorConfig,
    MLPSpeculatorConfig,
    attached_verifier,
)
from speculators_nb.proposals import (
    DynamicTreeTokenProposalConfig,
    GreedyTokenProposalConfig,
    SamplingTokenProposalConfig,
    StaticTreeTokenProposalConfig,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module")
def verifier(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


def shared(name="verifier"):
    return SpeculatorsConfig(
        algorithm="eagle",
        proposal_methods=[GreedyTokenProposalConfig()],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=str(name), architectures=["LlamaForCausalLM"]),
    )


def eagle(**fields):
    torch.manual_seed(2)
    config = EagleSpeculatorConfig(transformer_layer_config=layer(), speculators_config=shared(), **fields)
    return EagleSpeculator(config).eval()


IDS, STATES = torch.arange(5)[None], torch.randn(1, 5, H, generator=torch.Generator().manual_seed(3))


@pytest.mark.statement("eagle-01")
def test_exports():
    names = "Eagle3DraftModel Eagle3SpeculatorConfig EagleSpeculator EagleSpeculatorConfig MLPSpeculatorConfig"
    for name in names.split():
        assert inspect.isclass(getattr(models, name))


@pytest.mark.statement("eagle-02")
@pytest.mark.parametrize("module", ["base_components", "eagle", "eagle3", "mlp"])
def test_modules(module):
    assert importlib.import_module(f"speculators_nb.models.{module}")


@pytest.mark.statement("eagle-03", "eagle-04", "eagle-05", "eagle-06", "api-13", "release-31")
def test_eagle3_from_training_args(folder):
    t2d = torch.arange(V) % 2 == 0
    d2t = t2d.nonzero()[:, 0] - torch.arange(V // 2)
    model = Eagle3DraftModel.from_training_args(
        layer(layers=2), t2d, d2t, verifier_name_or_path=str(folder), norm_before_residual=True, ttt_steps=4
    )
    config = model.config
    assert type(model) is Eagle3DraftModel and len(model.layers) == 2
    assert config.norm_before_residual and config.draft_vocab_size == V // 2
    assert torch.equal(model.t2d, t2d) and torch.equal(model.d2t, d2t)
    of = config.speculators_config
    assert (of.algorithm, of.default_proposal_method) == ("eagle3", "greedy")
    assert [m.speculative_tokens for m in of.proposal_methods] == [4]
    assert of.verifier.name_or_path == str(folder) and of.verifier.architectures == ["LlamaForCausalLM"]


@pytest.mark.statement("eagle-07", "api-15", "api-40")
def test_eagle3_trainer_kwargs():
    train, val = Eagle3DraftModel.get_trainer_kwargs(ttt_steps=3, ttt_step_loss_decay=0.5, loss_fn="kl_div", seed=1)
    assert train["ttt_steps"] == val["ttt_steps"] == 3 and train["ttt_step_loss_decay"] == 0.5
    assert train["loss_config"] == {"kl_div": 1.0}
    assert set(train) <= set(inspect.signature(Eagle3DraftModel.forward).parameters)


@pytest.mark.statement("eagle-08", "eagle-09", "eagle-11")
def test_eagle3_config():
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer(), draft_vocab_size=12)
    assert (config.draft_vocab_size, config.target_vocab_size) == (12, V)
    assert isinstance(config.transformer_layer_config, LlamaConfig)


@pytest.mark.statement("eagle-12", "eagle-13", "models-22", "models-23", "models-25")
@pytest.mark.parametrize("kind", [Eagle3SpeculatorConfig, models.DFlashSpeculatorConfig])
def test_layer_config_as_a_dictionary(kind):
    plain = kind().serialize_transformer_config(layer())
    assert type(plain) is dict and plain["vocab_size"] == V
    assert kind.validate_transformer_config(plain).to_dict() == layer().to_dict()
    given = layer("qwen3")
    assert kind.validate_transformer_config(given) is given
    assert type(kind.validate_transformer_config(dict(hidden_size=H))) is Qwen3Config
    stored = kind(transformer_layer_config=plain, draft_vocab_size=V).to_dict()["transformer_layer_config"]
    assert stored["vocab_size"] == V and stored == kind.serialize_transformer_config(
        kind.validate_transformer_config(stored)
    )


@pytest.mark.statement("eagle-51", "eagle-52")
def test_eagle_layer_config_as_a_dictionary():
    config = EagleSpeculatorConfig(transformer_layer_config=layer())
    plain = config.serialize_transformer_layer_config(config.transformer_layer_config)
    whole = config.transformer_layer_config.to_dict()
    assert plain["hidden_size"] == H and plain.items() < whole.items()
    assert {"is_encoder_decoder", "output_hidden_states", "transformers_version"} <= whole.keys() - plain.keys()
    found = EagleSpeculatorConfig.validate_transformer_layer_config(plain)
    assert type(found) is LlamaConfig and found.to_dict() == layer().to_dict()
    assert EagleSpeculatorConfig.validate_transformer_layer_config(found) is found
    for wrong in (3, "llama", None, [found]):
        with pytest.raises(ValueError, match=r"EagleSpeculatorConfig\.transformer_layer_config.*model_type") as e:
            EagleSpeculatorConfig.validate_transformer_layer_config(wrong)
        assert "\n" not in str(e.value)


@pytest.mark.statement("eagle-10")
def test_norm_before_residual(folder):
    for on in (True, False):
        args = dict(verifier_name_or_path=str(folder), norm_before_residual=on)
        (first,) = Eagle3DraftModel.from_training_args(layer(), **args).layers
        torch.nn.init.constant_(first.hidden_norm.weight, 2.0)
        for last in (first.self_attn.o_proj, first.mlp.down_proj):
            torch.nn.init.zeros_(last.weight)  # the residual alone passes through the layer
        heads = torch.ones(2, 5, 8)
        out = first(STATES[0], lambda attention, x: heads, STATES[0])
        torch.testing.assert_close(out, first.hidden_norm(STATES[0]) if on else STATES[0])


@pytest.mark.statement("eagle-14", "eagle-18", "eagle-25", "eagle-23")
def test_constructor():
    model = eagle()
    names = list(inspect.signature(EagleSpeculator.__init__).parameters)
    assert names[1:4] == ["config", "verifier", "verifier_attachment_mode"]
    assert isinstance(model, SpeculatorModel) and len(model.layers) == 1
    assert model.embed_tokens is None and model.lm_head is None and model.rotary_emb is None
    config = EagleSpeculatorConfig(transformer_layer_config=layer(layers=3))
    assert len(EagleSpeculator(config).layers) == 1


@pytest.mark.statement("eagle-15", "eagle-29", "eagle-34", "eagle-33", "eagle-32")
def test_attached_in_full(verifier):
    model = eagle()
    assert model.attach_verifier(verifier) is verifier and model.verifier_attachment_mode == "full"
    assert model.embed_tokens.weight.data_ptr() == verifier.get_input_embeddings().weight.data_ptr()
    assert model.lm_head.weight.data_ptr() == verifier.get_output_embeddings().weight.data_ptr()
    positions = torch.arange(5)[None]
    angles, theirs = model.rotary_emb(STATES, positions), verifier.model.rotary_emb(STATES, positions)
    assert all(torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in zip(angles, theirs))


@pytest.mark.statement("eagle-24")
def test_a_folder_is_loaded(folder, verifier):
    model, other = eagle(), eagle()
    held = model.attach_verifier(str(folder))
    other.attach_verifier(verifier)
    assert isinstance(held, LlamaForCausalLM) and torch.equal(model(IDS, STATES).logits, other(IDS, STATES).logits)


@pytest.mark.statement("eagle-16", "eagle-17", "eagle-49")
def test_parts():
    plain, hass = eagle(), eagle(layernorms=True, fusion_bias=True)
    assert plain.fusion_fc.weight.shape == (H, 2 * H)
    assert plain.fusion_fc.bias is None and hass.fusion_fc.bias is not None
    norms = {name for name, _ in hass.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert any("embedding_layernorm" in name for name in norms) and any("pre_lm_head" in name for name in norms)
    config = EagleSpeculatorConfig()
    assert not config.layernorms and not config.fusion_bias


@pytest.mark.statement("eagle-22")
def test_the_documented_example(tmp_path, verifier):
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    from transformers import AutoConfig

    config = EagleSpeculatorConfig(
        transformer_layer_config=AutoConfig.from_pretrained(tmp_path), speculators_config=shared()
    )
    config.transformer_layer_config.num_hidden_layers = 1
    model = EagleSpeculator(config, verifier=verifier, verifier_attachment_mode="full")
    assert model.verifier is verifier and model(IDS, STATES).logits.shape == (1, 5, V)


@pytest.mark.statement("eagle-26")
def test_detached(verifier):
    model = EagleSpeculator(eagle().config, verifier=verifier, verifier_attachment_mode="detached")
    assert model.verifier is None and model.embed_tokens is None


@pytest.mark.statement("eagle-28", "eagle-31")
def test_train_only(verifier, folder):
    for source in (verifier, folder):
        model = eagle()
        model.attach_verifier(source, mode="train_only")
        assert model.verifier is None and model(IDS, STATES).logits.shape == (1, 5, V)
        with pytest.raises((ValueError, RuntimeError), match="full"):
            model.generate(IDS)


@pytest.mark.statement("eagle-27", "eagle-30", "eagle-21", "eagle-19")
def test_generate(verifier):
    model = eagle()
    model.attach_verifier(verifier, mode="full")
    model.train()(**batch(1)).loss.backward()
    assert model.fusion_fc.weight.grad.abs().sum() > 0
    out = model.generate(IDS, max_new_tokens=9)
    assert out.tolist() == verifier.generate(IDS, max_new_tokens=9, do_sample=False, eos_token_id=None).tolist()


@pytest.mark.statement("eagle-20")
@pytest.mark.parametrize(
    "method,parents",
    [
        (GreedyTokenProposalConfig(speculative_tokens=4), [-1, 0, 1, 2]),
        (StaticTreeTokenProposalConfig(initial_branching_factor=3, branching_factor=1, depth=2), [-1, -1, -1, 0, 1, 2]),
        (DynamicTreeTokenProposalConfig(speculative_tokens=6, expansion_factor=2, depth=3), [-1, -1, 0, 0, 1, 1]),
    ],
    ids=["greedy", "static_tree", "dynamic_tree"],
)
def test_candidates_are_made_by_the_proposal_method(verifier, monkeypatch, method, parents):
    "The default one of the config's two, and its first candidates are the drafter's likeliest tokens."
    done = []
    monkeypatch.setattr(
        attached_verifier, "generate", lambda *args, **kwargs: done.extend(generate(*args, **kwargs)) or done
    )
    other = SamplingTokenProposalConfig(speculative_tokens=9)
    speculators_config = SpeculatorsConfig(
        algorithm="eagle",
        proposal_methods=[other, method],
        default_proposal_method=method.proposal_type,
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    torch.manual_seed(2)
    config = EagleSpeculatorConfig(transformer_layer_config=layer(), speculators_config=speculators_config)
    model = EagleSpeculator(config, verifier=verifier).eval()
    text = model.generate(IDS, max_new_tokens=12)
    step = done[0].steps[0]
    found = [-1, *range(len(step.draft) - 1)] if step.parents is None else step.parents
    assert sorted(found) == sorted(parents) if method.proposal_type == "dynamic_tree" else found == parents
    with torch.no_grad():
        states = verifier(IDS, output_hidden_states=True).hidden_states[-1]
        likeliest = model(text[:, 1:6], states).logits[0, -1].topk(parents.count(-1)).indices
    assert {token for token, parent in zip(step.draft, found) if parent == -1} == set(likeliest.tolist())


@pytest.mark.parametrize("shallow_first", [True, False])
def test_a_listed_method_is_no_draft_beyond_the_training(verifier, shallow_first):
    "Whichever method is listed first: the default one draws no warning, and a deeper draft than any does."
    methods = [SamplingTokenProposalConfig(speculative_tokens=2), GreedyTokenProposalConfig(speculative_tokens=4)]
    speculators_config = SpeculatorsConfig(
        algorithm="eagle",
        proposal_methods=methods if shallow_first else methods[::-1],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    config = EagleSpeculatorConfig(transformer_layer_config=layer(), speculators_config=speculators_config)
    model = EagleSpeculator(config, verifier=verifier).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(IDS, max_new_tokens=6)
        model.generate(IDS, max_new_tokens=6, do_sample=True)
    with pytest.warns(UserWarning, match="k=5 drafts more than the 4 tokens"):
        model.generate(IDS, max_new_tokens=6, k=5)


def test_filters_of_generate(verifier, monkeypatch):
    "transformers' arguments: the sampling has them, and the likeliest token alone is greedy decoding."
    model, used = eagle(), []
    model.attach_verifier(verifier)
    monkeypatch.setattr(
        attached_verifier,
        "generate",
        lambda *args, **kwargs: used.append(kwargs["sampling"]) or generate(*args, **kwargs),
    )
    greedy = model.generate(IDS, max_new_tokens=9)
    for filters in (dict(top_p=1e-6), dict(top_k=1), dict(min_p=1.0)):
        assert model.generate(IDS, max_new_tokens=9, do_sample=True, **filters).equal(greedy), filters
    model.generate(IDS, max_new_tokens=2, do_sample=True, temperature=0.7, top_p=0.8, top_k=7, min_p=0.1)
    s = used[-1]
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.7, 0.8, 7, 0.1)


@pytest.mark.statement("eagle-35")
def test_detach(verifier):
    model = eagle()
    held = weakref.ref(model.attach_verifier(copy.deepcopy(verifier)))
    model(IDS, STATES)
    model.detach_verifier()
    gc.collect()
    assert held() is None, "the verifier is still in memory"
    assert model.verifier is None and model.embed_tokens is None and model.lm_head is None
    for call in (lambda: model(IDS, STATES), lambda: model.generate(IDS)):
        with pytest.raises((ValueError, RuntimeError)):
            call()


@pytest.mark.statement("eagle-36", "eagle-43", "eagle-44")
def test_forward(verifier):
    model = eagle()
    model.attach_verifier(verifier)
    names = "input_ids hidden_states attention_mask position_ids past_key_values use_cache output_attentions"
    found = list(inspect.signature(model.forward).parameters)
    assert found[:9] == [*names.split(), "output_hidden_states", "return_dict"]
    ids, states = IDS.expand(2, -1), torch.cat([STATES, -STATES])
    whole, raw = model(ids, states), model(ids, states, return_dict=False)
    raw = raw if torch.is_tensor(raw) else raw[0]
    assert isinstance(whole, CausalLMOutputWithPast) and raw.shape == (2, 5, V) and torch.equal(whole.logits, raw)


@pytest.mark.statement("eagle-37")
def test_attention_masks(verifier):
    model = eagle()
    model.attach_verifier(verifier)
    flat = torch.tensor([[0, 0, 1, 1, 1]])
    square = (torch.ones(5, 5).tril().bool() & flat[0].bool())[None, None]
    got = [model(IDS, STATES, attention_mask=mask, position_ids=IDS).logits[:, 2:] for mask in (flat, square)]
    torch.testing.assert_close(*got)
    assert not torch.allclose(got[0], model(IDS, STATES, position_ids=IDS).logits[:, 2:])


@pytest.mark.statement("eagle-38", "eagle-40")
def test_cache(verifier):
    model = eagle()
    model.attach_verifier(verifier)
    whole = model(IDS, STATES, use_cache=True)
    first = model(IDS[:, :3], STATES[:, :3], use_cache=True)
    rest = model(IDS[:, 3:], STATES[:, 3:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(rest.logits, whole.logits[:, 3:])
    torch.testing.assert_close(model(IDS, STATES, position_ids=IDS).logits, whole.logits)
    assert model(IDS, STATES, use_cache=False).past_key_values is None


@pytest.mark.statement("eagle-39")
def test_past_key_values_as_tuples(verifier):
    model = eagle()
    model.attach_verifier(verifier)
    cache = model(IDS[:, :3], STATES[:, :3], use_cache=True).past_key_values
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    rest = model(IDS[:, 3:], STATES[:, 3:], past_key_values=pairs)
    torch.testing.assert_close(rest.logits, model(IDS, STATES).logits[:, 3:])


@pytest.mark.statement("eagle-41")
def test_output_attentions(verifier):
    model = eagle()
    model.attach_verifier(verifier)
    (weights,) = model(IDS, STATES, output_attentions=True).attentions
    assert weights.shape == (1, 2, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 5))


@pytest.mark.statement("eagle-45")
def test_not_attached():
    with pytest.raises(ValueError, match="attach_verifier"):
        eagle()(IDS, STATES)


@pytest.mark.statement("eagle-46", "eagle-47")
def test_from_training_args(folder):
    model = EagleSpeculator.from_training_args(
        layer(),
        verifier_name_or_path=str(folder),
        layernorms=True,
        fusion_bias=True,
        transformer_layer_architecture="LlamaDecoderLayer",
    )
    assert model.config.layernorms and model.config.fusion_bias
    assert model.config.transformer_layer_architecture == "LlamaDecoderLayer"


@pytest.mark.statement("eagle-53")
def test_mlp_config():
    assert issubclass(MLPSpeculatorConfig, SpeculatorModelConfig)
