"""The pages on configs and the base model, statement by statement (docs/statements.yml)."""

import importlib
import json
import shutil
from importlib.metadata import version
from typing import Literal

import pytest
import torch
from documented import SHAPE, H, V, batch, layer, write_verifier
from safetensors.torch import load_file
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

import speculators_nb
from speculators_nb import (
    SpeculatorModel,
    SpeculatorModelConfig,
    SpeculatorsConfig,
    TokenProposalConfig,
    VerifierConfig,
    reload_schemas,
)
from speculators_nb.models import (
    DFlashDraftModel,
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    EagleSpeculatorConfig,
    MTPDraftModel,
)
from speculators_nb.models.base import REGISTERED
from speculators_nb.nn.attention import attention_back_end
from speculators_nb.utils import ClassRegistryMixin

FLEX = "simple_flex_attention"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def fresh(verifier, **arguments):
    torch.manual_seed(0)
    return Eagle3DraftModel.from_training_args(layer(layers=2), verifier_name_or_path=str(verifier), **arguments)


@pytest.fixture(scope="module")
def saved(verifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    fresh(verifier).save_pretrained(folder)
    return folder


@pytest.mark.statement("api-01")
def test_modules():
    names = "config convert data_generation model models proposals train utils"
    for name in names.split():
        assert importlib.import_module(f"speculators_nb.{name}")


@pytest.mark.statement("api-02")
def test_exports():
    names = "Eagle3DraftModel Eagle3SpeculatorConfig SpeculatorModel SpeculatorModelConfig SpeculatorsConfig"
    for name in [*names.split(), "TokenProposalConfig", "VerifierConfig", "reload_schemas"]:
        assert getattr(speculators_nb, name) and name in speculators_nb.__all__


@pytest.mark.statement("api-04", "models-02", "models-27")
def test_a_model_is_made_of_its_config(verifier, tmp_path):
    other = write_verifier(tmp_path, "qwen3")
    for model in (
        fresh(verifier),
        DFlashDraftModel.from_training_args(
            layer("qwen3"), verifier_name_or_path=str(verifier), mask_token_id=V - 1, block_size=4
        ),
        MTPDraftModel.from_training_args(layer("qwen3"), verifier_name_or_path=str(other), fresh_head=True),
    ):
        again = type(model)(model.config)
        trained = {name for name, _ in model.named_parameters() if not name.startswith("target_head")}
        assert trained == {name for name, _ in again.named_parameters() if not name.startswith("target_head")}


@pytest.mark.statement("api-06", "api-07", "api-08", "api-10", "api-12")
def test_layers(verifier):
    model, normed = fresh(verifier), fresh(verifier, norm_before_fc=True)
    assert model.fc.weight.shape == (H, 3 * H) and model.fc.bias is None
    widths = [layer.self_attn.q_proj.in_features for layer in model.layers]
    assert widths == [2 * H, H]
    assert normed.input_norm.weight.shape == (3 * H,) and getattr(model, "input_norm", None) is None
    assert not model.config.norm_before_fc and not model.config.embed_requires_grad
    norm = model.verifier_norm if hasattr(model, "verifier_norm") else model.target_head.norm
    assert norm.weight.shape == (H,) and not norm.weight.requires_grad


@pytest.mark.statement("api-09", "release-14")
def test_embed_requires_grad(verifier):
    for trains in (False, True):
        assert fresh(verifier, embed_requires_grad=trains).embed_tokens.weight.requires_grad is trains


@pytest.mark.statement("api-11", "eagle-06", "release-48")
def test_layers_to_read(verifier):
    found = fresh(verifier).config.eagle_aux_hidden_state_layer_ids
    assert len(found) == 3 and found == sorted(found)
    given = fresh(verifier, target_layer_ids=[0, 1, 2])
    assert given.config.eagle_aux_hidden_state_layer_ids == [0, 1, 2] and given.drafter().aux_layer_ids == (0, 1, 2)


@pytest.mark.statement("api-14")
def test_off_policy_tokens():
    train, val = Eagle3DraftModel.get_trainer_kwargs(ttt_steps=2, use_off_policy_tokens=True)
    assert train["use_off_policy_tokens"] is True and not val.get("use_off_policy_tokens")


@pytest.mark.statement("api-16", "api-17")
def test_the_base_class(verifier):
    assert issubclass(SpeculatorModel, PreTrainedModel) and issubclass(SpeculatorModel, ClassRegistryMixin)
    assert SpeculatorModel.registry["eagle3"] is Eagle3DraftModel and fresh(verifier)(**batch(), ttt_steps=1)[1] > 0


@pytest.mark.statement("api-18", "api-19")
def test_a_model_needs_a_config():
    with pytest.raises(ValueError):
        Eagle3DraftModel(None)
    with pytest.raises(TypeError):
        Eagle3DraftModel(LlamaConfig(**SHAPE))


@pytest.mark.statement("api-20")
def test_nothing_is_tied(verifier):
    assert fresh(verifier).config.tie_word_embeddings is False


@pytest.mark.statement("api-21", "api-22", "api-37")
def test_the_class_is_found(saved, verifier):
    model = SpeculatorModel.from_pretrained(saved)
    assert type(model) is Eagle3DraftModel
    rows = load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.weight, rows)


@pytest.mark.statement("api-24")
def test_config_and_state_dict(saved):
    config = SpeculatorModelConfig.from_pretrained(saved)
    state = load_file(saved / "model.safetensors")
    model = SpeculatorModel.from_pretrained(None, config=config, state_dict=state)
    assert type(model) is Eagle3DraftModel and torch.equal(model.fc.weight, state["fc.weight"])


@pytest.mark.statement("api-33")
def test_mappings_on_loading(verifier, tmp_path):
    t2d = torch.arange(V) < 12
    d2t = torch.zeros(12, dtype=torch.int64)
    fresh(verifier, t2d=t2d, d2t=d2t).save_pretrained(tmp_path)
    other = torch.arange(V) >= 12
    model = SpeculatorModel.from_pretrained(tmp_path, t2d=other, d2t=d2t + 12)
    assert torch.equal(model.t2d, other) and torch.equal(model.d2t, d2t + 12)


@pytest.mark.statement("api-34", "api-35", "api-36")
def test_nothing_to_load(saved):
    with pytest.raises(ValueError, match="a path or a config"):
        SpeculatorModel.from_pretrained(None)
    for other in (LlamaConfig(**SHAPE), 3):
        for where in (dict(state_dict={}), dict(pretrained_model_name_or_path=saved)):
            with pytest.raises(TypeError, match=f"config is a {type(other).__name__}"):
                SpeculatorModel.from_pretrained(config=other, **where)
    for config in (SpeculatorModelConfig.from_pretrained(saved), saved, str(saved / "config.json")):
        with pytest.raises(ValueError, match="Eagle3SpeculatorConfig alone; give the path or the state_dict"):
            SpeculatorModel.from_pretrained(None, config=config)


@pytest.mark.statement("api-58")
def test_a_config_of_no_drafter(verifier):
    for kind in (NotImplementedError, ValueError):
        with pytest.raises(kind, match="speculators_model_type is missing.*'llama'") as e:
            SpeculatorModelConfig.from_pretrained(verifier)
        assert "\n" not in str(e.value)
        with pytest.raises(kind, match="speculators_model_type is missing.*'llama'"):
            SpeculatorModelConfig.from_dict(dict(model_type="llama"))


@pytest.mark.statement("api-38")
def test_a_class_that_says_nothing():
    class Silent(SpeculatorModel):
        pass

    for kind in (NotImplementedError, ValueError):
        with pytest.raises(kind, match="Silent has neither a config_class of its own nor a from_training_args"):
            Silent.from_training_args(layer(), verifier_name_or_path="org/model")


@pytest.mark.statement("api-05", "models-10", "models-18", "models-26")
@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "peagle", "mtp"])
def test_which_attention(verifier, tmp_path, algorithm):
    "Flex on CUDA; elsewhere, and in a step of training, what the layers' config names."
    if algorithm == "mtp":
        verifier = write_verifier(tmp_path, "qwen3")
    given = dict(verifier_name_or_path=str(verifier), mask_token_id=V - 1, block_size=4, fresh_head=True)
    kind, draft = SpeculatorModel.registered_class(algorithm), layer("qwen3")
    plain, flex = (kind.from_training_args(draft, draft_attn_impl=name, **given) for name in (None, FLEX))
    assert draft._attn_implementation == plain.config.transformer_layer_config._attn_implementation != FLEX
    assert attention_back_end(None, torch.device("cuda"), True, plain.config.transformer_layer_config) == "flex"
    data = batch(1 if algorithm == "mtp" else 3)
    assert plain(**data).loss.isfinite()
    if torch.__version__ >= "2.11":  # before, torch computes it with a matrix of all scores
        with pytest.raises(ValueError, match="attn_impl='flex' has no backward on a CPU"):
            flex(**data)
    assert flex.config == plain.config
    with pytest.raises(ValueError, match="draft_attn_impl='flash'"):
        kind.from_training_args(draft, draft_attn_impl="flash", **given)


@pytest.mark.statement("api-39", "release-04", "release-05", "release-56")
def test_a_class_of_ones_own():
    @SpeculatorModel.register("statement_of_tests")
    class Mine(SpeculatorModel):
        @classmethod
        def from_training_args(cls, verifier_config, **kwargs):
            return (verifier_config, kwargs)

        @staticmethod
        def get_trainer_kwargs(**kwargs):
            return dict(special=True), dict(special=False)

    try:
        found = SpeculatorModel.registry["statement_of_tests"]
        assert found is Mine and found.from_training_args(3, num_layers=1) == (3, dict(num_layers=1))
        assert found.get_trainer_kwargs(seed=1) == (dict(special=True), dict(special=False))
    finally:
        del SpeculatorModel.registry["statement_of_tests"]
        REGISTERED.discard("statement_of_tests")


@pytest.mark.statement("api-41")
def test_class_of_a_config(saved):
    config = SpeculatorModelConfig.from_pretrained(saved)
    assert SpeculatorModel.registered_model_class_from_config(config) is Eagle3DraftModel


def test_class_of_a_config_that_has_another_name():
    class Config(SpeculatorModelConfig):
        speculators_model_type: str = "config_of_names"

    class Model(SpeculatorModel):
        config_class = Config

    try:
        SpeculatorModel.register("model_of_names")(Model)
        assert SpeculatorModel.registered_model_class_from_config(Config()) is Model
    finally:
        SpeculatorModel.registry.pop("model_of_names", None)
        REGISTERED.discard("model_of_names")


@pytest.mark.statement("api-42", "api-43", "api-44")
def test_class_of_no_config():
    for config in (LlamaConfig(), SpeculatorModelConfig()):
        with pytest.raises(TypeError):
            SpeculatorModel.registered_model_class_from_config(config)

    class Other(SpeculatorModelConfig):
        speculators_model_type: str = "nobody"

    with pytest.raises(ValueError, match="eagle3"):
        SpeculatorModel.registered_model_class_from_config(Other())


@pytest.mark.statement("api-46")
def test_an_unregistered_class(verifier):
    class Unregistered(Eagle3DraftModel):
        pass

    with pytest.raises(ValueError, match="Unregistered"):
        SpeculatorModel.verify_training_compatible(Unregistered(fresh(verifier).config))


@pytest.mark.statement("api-45", "api-47")
def test_verify_training_compatible(verifier):
    model = fresh(verifier)
    SpeculatorModel.verify_training_compatible(model)
    with pytest.raises(TypeError):
        SpeculatorModel.verify_training_compatible(torch.nn.Linear(2, 2))
    del model.layers
    with pytest.raises(AttributeError, match="layers"):
        SpeculatorModel.verify_training_compatible(model)


@pytest.mark.statement("api-49", "api-50", "api-51", "api-59", "api-60")
def test_a_config_is_a_pretrained_config(saved):
    config = SpeculatorModelConfig.from_pretrained(saved)
    assert isinstance(config, PretrainedConfig) and issubclass(SpeculatorModelConfig, ClassRegistryMixin)
    written = config.to_dict()
    assert written["speculators_model_type"] == "eagle3" and "norm_before_residual" in written
    assert {"hidden_size", "dtype"} & (written.keys() | written["transformer_layer_config"].keys())
    assert not {"model_type", "registry", "auto_package", "attribute_map"} & written.keys()
    assert json.loads((saved / "config.json").read_text())["transformers_version"] == version("transformers")
    with pytest.raises(ValueError, match="draft_vocab_size"):
        Eagle3SpeculatorConfig(draft_vocab_size="many")
    assert Eagle3SpeculatorConfig().norm_before_residual is False


@pytest.mark.statement("api-52", "api-53", "api-54")
def test_from_dict(saved):
    raw = json.loads((saved / "config.json").read_text())
    assert type(SpeculatorModelConfig.from_dict(raw)) is Eagle3SpeculatorConfig
    assert SpeculatorModelConfig.from_dict(raw, norm_before_residual=True).norm_before_residual
    with pytest.raises(ValueError, match="speculators_model_type"):
        SpeculatorModelConfig.from_dict({k: v for k, v in raw.items() if k != "speculators_model_type"})


@pytest.mark.statement("api-55", "api-57")
def test_config_from_a_folder(saved):
    config = SpeculatorModelConfig.from_pretrained(saved, norm_before_residual=True)
    assert type(config) is Eagle3SpeculatorConfig and config.norm_before_residual


@pytest.mark.statement("api-61")
def test_to_diff_dict():
    short, whole = Eagle3SpeculatorConfig().to_diff_dict(), Eagle3SpeculatorConfig().to_dict()
    declared = Eagle3SpeculatorConfig.__annotations__.keys() - {"architectures"}  # transformers' own
    assert len(declared) > 9 and declared <= short.keys() < whole.keys()
    assert "is_encoder_decoder" in whole.keys() - short.keys()
    assert Eagle3SpeculatorConfig(is_encoder_decoder=True).to_diff_dict()["is_encoder_decoder"] is True


@pytest.mark.statement("api-63", "api-64")
def test_speculators_config():
    fields = dict(
        algorithm="eagle3",
        proposal_methods=[dict(proposal_type="greedy")],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    assert set(SpeculatorsConfig.model_fields) >= fields.keys()
    assert SpeculatorsConfig(**fields).proposal_methods[0].proposal_type == "greedy"
    with pytest.raises(ValueError, match="default_proposal_method"):
        SpeculatorsConfig(**fields | dict(default_proposal_method="tree"))


@pytest.mark.statement("api-03", "api-65", "api-66", "api-73")
def test_a_proposal_method_of_ones_own():
    @TokenProposalConfig.register("of_tests")
    class Mine(TokenProposalConfig):
        proposal_type: Literal["of_tests"] = "of_tests"
        width: int = 2

    try:
        reload_schemas()
        TokenProposalConfig.reload_schema()
        config = SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[Mine(width=5)],
            default_proposal_method="of_tests",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        )
        again = SpeculatorsConfig.model_validate(config.model_dump())
        assert type(again.proposal_methods[0]) is Mine and again.proposal_methods[0].width == 5
    finally:
        del TokenProposalConfig.registry["of_tests"]
        reload_schemas()


@pytest.mark.statement("api-67", "api-68", "api-69", "api-70")
def test_verifier_config():
    config = LlamaConfig(architectures=["LlamaForCausalLM"])
    config._name_or_path = "org/model"
    made = VerifierConfig.from_config(config)
    assert (made.name_or_path, made.architectures) == ("org/model", ["LlamaForCausalLM"])
    assert VerifierConfig.from_config(config, "other").name_or_path == "other"
    assert VerifierConfig.from_config(config, name_or_path=None).name_or_path is None
    assert VerifierConfig.from_config(LlamaConfig()).architectures == []


@pytest.mark.statement("api-71")
def test_verifier_config_of_a_folder(verifier):
    assert VerifierConfig.from_pretrained(verifier).architectures == ["LlamaForCausalLM"]


@pytest.mark.statement("api-72")
def test_pydantic_idioms(saved):
    config = SpeculatorModelConfig.from_pretrained(saved)
    again = SpeculatorModelConfig.model_validate(config.model_dump())
    assert type(again) is Eagle3SpeculatorConfig and again == config
    assert EagleSpeculatorConfig.model_validate(EagleSpeculatorConfig(layernorms=True).model_dump()).layernorms


@pytest.mark.statement("release-51")
def test_a_reduced_vocabulary_is_kept_apart(verifier, tmp_path):
    t2d = torch.arange(V) < 12
    model = fresh(verifier, t2d=t2d, d2t=torch.zeros(12, dtype=torch.int64))
    model.save_pretrained(tmp_path / "draft")
    again = SpeculatorModel.from_pretrained(tmp_path / "draft")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight) and again.lm_head.weight.shape == (12, H)
    assert again.embed_tokens.weight.shape == (V, H)
    shutil.rmtree(tmp_path / "draft")
