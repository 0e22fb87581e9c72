"Configs: what upstream wrote is read and written back key for key; wrong values are refused by field name."

import copy
import json
import pickle
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from pydantic import Field, ValidationError
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from speculators_nb.core.config import (
    LayerConfig,
    SpeculatorModelConfig,
    SpeculatorsConfig,
    VerifierConfig,
    layer_config_from_dict,
    reload_schemas,
)
from speculators_nb.core.registry import ClassRegistryMixin, GreedyTokenProposalConfig, TokenProposalConfig
from speculators_nb.models.eagle3 import Eagle3SpeculatorConfig

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {
    "eagle3": FIXTURES / "eagle3/saved_pretrained/config.json",
    **{n: FIXTURES / f"configs/{n}.json" for n in ("peagle", "dflash", "mtp")},
}


@SpeculatorModelConfig.register("toy_config_test")
class Toy(SpeculatorModelConfig):
    speculators_model_type: Literal["toy_config_test"] = "toy_config_test"
    architectures: list[str] = field(default_factory=lambda: ["ToyModel"])
    transformer_layer_config: LayerConfig = field(
        default_factory=lambda: Qwen3Config(hidden_size=16, num_hidden_layers=1)
    )
    draft_vocab_size: Annotated[int, Field(ge=1)] = 32000
    aux_layer_ids: list[int] | None = None
    norm_output: bool = False
    fc_norm: bool = False

    def check(self):
        if self.norm_output and self.fc_norm:
            raise ValueError("norm_output=True and fc_norm=True exclude each other")


@SpeculatorModelConfig.register("toy_config_child")
class Child(Toy):
    speculators_model_type: Literal["toy_config_child"] = "toy_config_child"
    mask_token_id: int = 0


class ToyModel(PreTrainedModel):
    config_class = Toy

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(4, 3)
        self.post_init()


def shared(**kwargs):
    return SpeculatorsConfig(
        **{
            **dict(
                algorithm="toy",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path="v", architectures=["LlamaForCausalLM"]),
            ),
            **kwargs,
        }
    )


@pytest.mark.parametrize("name", FILES)
def test_upstream_files_survive_a_round_trip_key_for_key(tmp_path, name):
    """Read as the toy type (so that all drafters' own fields are undeclared extras), written again: the same keys and
    values, less auto_map."""
    content = json.loads(FILES[name].read_text())
    content["speculators_model_type"] = "toy_config_test"
    config = SpeculatorModelConfig.from_dict(content)
    assert isinstance(config, Toy) and isinstance(config.transformer_layer_config, (LlamaConfig, Qwen3Config))
    assert (
        config.speculators_config.proposal_methods[0].speculative_tokens
        == content["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    )
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    del content["auto_map"]
    content["transformers_version"] = written["transformers_version"]  # of whoever writes
    # declared by the toy, absent in the file
    ours_only = {"aux_layer_ids", "norm_output", "fc_norm", "draft_vocab_size"} - content.keys()
    assert {k: v for k, v in written.items() if k not in ours_only} == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]  # no stray config.py
    assert SpeculatorModelConfig.from_pretrained(tmp_path) == config


def test_input_dictionary_is_left_alone():
    content = json.loads(FILES["eagle3"].read_text()) | {"speculators_model_type": "toy_config_test"}
    before = copy.deepcopy(content)
    SpeculatorModelConfig.from_dict(content, draft_vocab_size=7)
    assert content == before


@settings(max_examples=12, deadline=None)
@given(
    vocab=st.integers(1, 10**6),
    ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(sorted),
    norm=st.booleans(),
    extra=st.dictionaries(
        st.sampled_from(["later_a", "later_b"]),
        st.integers() | st.text(max_size=5) | st.lists(st.booleans(), max_size=3),
    ),
    k=st.integers(1, 64),
)
def test_round_trip_through_dict_json_and_copies(vocab, ids, norm, extra, k):
    config = Toy(
        draft_vocab_size=vocab,
        aux_layer_ids=ids,
        norm_output=norm,
        speculators_config=shared(proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=k)]),
        **extra,
    )
    for again in (
        SpeculatorModelConfig.from_dict(config.to_dict()),
        SpeculatorModelConfig.from_dict(json.loads(config.to_json_string())),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ):
        assert type(again) is Toy and again == config and again.draft_vocab_size == vocab and again.aux_layer_ids == ids
        assert all(getattr(again, key) == value for key, value in extra.items())
    assert Toy(**{**config.to_dict(), "draft_vocab_size": vocab + 1}) != config


def test_a_deep_copy_shares_nothing():
    config = Toy(speculators_config=shared(), aux_layer_ids=[1, 2])
    twin = copy.deepcopy(config)
    twin.aux_layer_ids.append(3)
    twin.speculators_config.verifier.name_or_path = "other"
    twin.transformer_layer_config.hidden_size = 99
    assert (
        config.aux_layer_ids == [1, 2]
        and config.speculators_config.verifier.name_or_path == "v"
        and config.transformer_layer_config.hidden_size == 16
    )


def test_defaults_of_two_objects_are_not_shared():
    Toy().architectures.append("X")
    assert Toy().architectures == ["ToyModel"]


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: SpeculatorModelConfig.from_dict({"model_type": "llama"}),
            r"speculators_model_type is missing.*'llama'.*toy_config_test.*Convert",
        ),
        (
            lambda: SpeculatorModelConfig.from_dict({"speculators_model_type": "eagle99"}),
            r"speculators_model_type='eagle99' is not known. Known types: .*toy_config_test.*import the module",
        ),
        (
            lambda: Toy(transformer_layer_config={"model_type": "llama", "hidden_size": 65}),
            r"Toy.transformer_layer_config: transformers refuses this llama config.*\(65\) is not a multiple",
        ),
        (lambda: Toy(norm_output=True, fc_norm=True), r"exclude each other"),
        (
            lambda: Toy(speculators_config={"algorithm": "toy"}),
            r"Toy.speculators_config.proposal_methods=.*field required",
        ),
    ],
)
def test_errors_name_field_value_and_remedy(make, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make()


def test_fields_are_checked_when_set_later_and_keep_their_value_on_error():
    config = Toy(draft_vocab_size=5)
    with pytest.raises(ValueError, match="Toy.draft_vocab_size=-1"):
        config.draft_vocab_size = -1
    config.transformer_layer_config = {"model_type": "llama", "hidden_size": 64}
    assert config.draft_vocab_size == 5 and isinstance(config.transformer_layer_config, LlamaConfig)
    with pytest.raises(ValueError, match="default_proposal_method"):
        shared().default_proposal_method = "static_tree"


def test_a_child_is_found_through_its_parent_and_through_the_base(tmp_path):
    child = Child(mask_token_id=7, draft_vocab_size=9)
    child.save_pretrained(tmp_path)
    for cls in (SpeculatorModelConfig, Toy, Child):
        assert type(cls.from_pretrained(tmp_path)) is Child and cls.from_pretrained(tmp_path) == child
    assert {
        "toy_config_test": Toy,
        "toy_config_child": Child,
    }.items() <= SpeculatorModelConfig.registered_classes().items()


def test_every_declared_field_is_written_out():
    "A reader's default must never decide: fields at their default value stand in the file too."
    written = json.loads(Toy().to_json_string())
    assert {
        "draft_vocab_size",
        "aux_layer_ids",
        "norm_output",
        "fc_norm",
        "speculators_version",
        "speculators_model_type",
        "tie_word_embeddings",
    } <= written.keys()
    assert "model_type" not in written and "auto_map" not in written and written["architectures"] == ["ToyModel"]


def test_from_pretrained_overrides(tmp_path):
    Toy().save_pretrained(tmp_path)
    config, unused = SpeculatorModelConfig.from_pretrained(
        tmp_path, draft_vocab_size=11, unknown_argument=1, return_unused_kwargs=True
    )
    assert config.draft_vocab_size == 11 and unused == {"unknown_argument": 1}
    with pytest.raises(ValueError, match="Toy.draft_vocab_size=0"):
        SpeculatorModelConfig.from_pretrained(tmp_path, draft_vocab_size=0)


def test_transformers_model_round_trip(tmp_path):
    model = ToyModel(Toy(speculators_config=shared(), draft_vocab_size=3, later={"a": 1}))
    model.save_pretrained(tmp_path)
    again = ToyModel.from_pretrained(tmp_path)
    assert torch.equal(model.head.weight, again.head.weight)
    assert again.config.later == {"a": 1} and again.config.speculators_config == model.config.speculators_config
    assert (
        isinstance(again.config, PretrainedConfig)
        and again.config.transformer_layer_config == model.config.transformer_layer_config
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_failed_write_keeps_the_old_config(tmp_path, monkeypatch):
    Toy(draft_vocab_size=5).save_pretrained(tmp_path)
    monkeypatch.setattr(
        "speculators_nb.core.files.os.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        Toy(draft_vocab_size=6).save_pretrained(tmp_path)
    monkeypatch.undo()
    assert SpeculatorModelConfig.from_pretrained(tmp_path).draft_vocab_size == 5 and len(list(tmp_path.iterdir())) == 1


def test_the_verifier_and_the_draft_length_are_those_of_the_shared_part():
    config = Toy(speculators_config=shared(proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)]))
    assert config.proposed_tokens == 4
    assert config.verifier_name == config.speculators_config.verifier.name_or_path
    config.speculators_config.verifier.name_or_path = None
    for unnamed in (config, Toy()):
        with pytest.raises(ValueError, match="name_or_path is missing; give the verifier's folder or hub id"):
            print(unnamed.verifier_name)
    assert Toy().proposed_tokens is None


def test_verifier_config_reads_the_raw_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    assert VerifierConfig.from_pretrained(tmp_path) == VerifierConfig(
        name_or_path=str(tmp_path), architectures=["Qwen3ForCausalLM"]
    )
    loaded = Qwen3Config.from_pretrained(tmp_path)
    loaded.name_or_path = "org/model"  # as transformers does for a loaded model
    assert VerifierConfig.from_config(loaded).name_or_path == "org/model"
    assert VerifierConfig.from_config(loaded, name_or_path=None) == VerifierConfig(
        name_or_path=None, architectures=["Qwen3ForCausalLM"]
    )
    assert VerifierConfig.from_config(LlamaConfig()) == VerifierConfig(name_or_path=None, architectures=[])
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="architectures are unknown"):
        VerifierConfig.from_pretrained(tmp_path)


def test_layer_config_from_dict():
    made = layer_config_from_dict({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2})
    assert isinstance(made, LlamaConfig) and (made.hidden_size, made.num_hidden_layers) == (64, 2)
    assert layer_config_from_dict(made) is made


def test_proposal_defaults():
    "The values that the public documentation gives."
    fields = {
        name: kind().model_dump(exclude={"proposal_type"})
        for name, kind in TokenProposalConfig.registered_classes().items()
    }
    assert fields == {
        "greedy": dict(speculative_tokens=5, verifier_accept_k=1, accept_tolerance=0.0),
        "sampling": dict(speculative_tokens=5, accept_lenience=1.0),
        "static_tree": dict(initial_branching_factor=4, branching_factor=2, depth=5),
        "dynamic_tree": dict(speculative_tokens=48, expansion_factor=10, depth=6),
    }


def test_pydantic_names():
    "What code written for pydantic calls, beside the names of transformers."
    config = Toy(speculators_config=shared(), draft_vocab_size=128)
    dumped = config.model_dump()
    assert dumped == config.to_dict() == config.model_dump(mode="json")
    for made in (
        Toy.model_validate(dumped),
        SpeculatorModelConfig.model_validate(dumped),
        Toy.model_validate({k: v for k, v in dumped.items() if k != "speculators_model_type"}),
        Toy.model_validate(config),
    ):
        assert type(made) is Toy and made == config
    with pytest.raises(ValueError, match="speculators_model_type='toy_config_test' makes a Toy"):
        Child.model_validate(dumped)
    with pytest.raises(TypeError, match="Toy.model_validate takes a dictionary, not list"):
        Toy.model_validate([])
    assert SpeculatorModelConfig.schema_discriminator == "speculators_model_type"


def test_a_proposal_method_that_registers_later():
    "It is accepted after any of the reloads, and read back from a config."
    reloads = SpeculatorModelConfig.reload_schema, Toy.reload_schema, SpeculatorsConfig.reload_schema, reload_schemas
    try:
        for i, reload in enumerate(reloads):

            @TokenProposalConfig.register(f"late_{i}")
            class Late(TokenProposalConfig):
                proposal_type: str = f"late_{i}"
                width: int = 2

            reload()
            method = {"proposal_type": f"late_{i}", "width": 5}
            late = shared().model_dump() | dict(proposal_methods=[method], default_proposal_method=f"late_{i}")
            assert SpeculatorsConfig(**late).proposal_methods == [Late(proposal_type=f"late_{i}", width=5)]
        config = Toy(speculators_config=late)
        assert SpeculatorModelConfig.from_dict(config.to_dict()) == config
    finally:
        for i in range(len(reloads)):
            TokenProposalConfig.registry.pop(f"late_{i}", None)
        reload_schemas()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "peagle", "dspark", "mtp", "medusa"])
def test_the_wrong_type_is_rejected(kind):
    "Each class has one word; another drafter's is refused in the constructor and from a dictionary."
    cls = SpeculatorModelConfig.registered_classes()[kind]
    other = "mlp" if kind != "mlp" else "eagle"
    with pytest.raises(ValueError, match=f"{cls.__name__}.speculators_model_type='{other}': must be '{kind}'"):
        cls(speculators_model_type=other)
    with pytest.raises(ValueError, match=f"speculators_model_type='{other}' makes a"):
        cls.from_dict({"speculators_model_type": other})
    assert cls(speculators_model_type=kind).speculators_model_type == kind


def test_layers_without_a_model_type():
    "Llama's in EAGLE, Qwen3's in the others, in the constructor and from a file; a word is still honoured."
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    for kind, want in (
        ("eagle", LlamaConfig),
        ("eagle3", Qwen3Config),
        ("peagle", Qwen3Config),
        ("dflash", Qwen3Config),
    ):
        cls = SpeculatorModelConfig.registered_classes()[kind]
        fields = {"draft_vocab_size": 64} if kind != "eagle" else {}
        made = cls(transformer_layer_config=dict(sizes), **fields)
        read = cls.from_dict({"speculators_model_type": kind, "transformer_layer_config": dict(sizes), **fields})
        assert type(made.transformer_layer_config) is type(read.transformer_layer_config) is want
        assert made.transformer_layer_config.hidden_size == 32
    named = SpeculatorModelConfig.registered_classes()["eagle3"](
        transformer_layer_config=sizes | dict(model_type="llama"), draft_vocab_size=64
    )
    assert type(named.transformer_layer_config) is LlamaConfig
    with pytest.raises(ValueError, match="model_type=None is missing"):
        layer_config_from_dict(sizes)


def test_drafters_of_your_own_package_are_found(tmp_path, monkeypatch):
    "A config of a type that only a further package registers, by name of the package alone."
    package = tmp_path / "my_drafters/deeper"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text(
        "from speculators_nb.core.config import SpeculatorModelConfig\n"
        "@SpeculatorModelConfig.register('mine')\n"
        "class Mine(SpeculatorModelConfig):\n    speculators_model_type: str = 'mine'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'mine' is not known"):
        SpeculatorModelConfig.from_dict({"speculators_model_type": "mine"})
    monkeypatch.setattr(SpeculatorModelConfig, "auto_package", ("speculators_nb.models", "my_drafters"))
    try:
        made = SpeculatorModelConfig.from_dict({"speculators_model_type": "mine"})
        assert type(made).__name__ == "Mine" and "mine" in SpeculatorModelConfig.registered_classes()
        monkeypatch.setattr(SpeculatorModelConfig, "auto_package", "no_such_drafters")
        with pytest.raises(ImportError, match="no_such_drafters"):
            SpeculatorModelConfig.registered_classes()
    finally:
        SpeculatorModelConfig.registry.pop("mine", None)


def test_register_without_a_name():
    "Under the class's own name, as documented; what is no class or no name is refused."

    class Base(ClassRegistryMixin):
        pass

    @Base.register()
    class Plain(Base):
        pass

    Base.register_decorator(int)
    assert Base.registered_classes() == {"Plain": Plain, "int": int}
    with pytest.raises(ValueError, match="the name is a string"):
        Base.register(3)
    with pytest.raises(TypeError, match="and 7 is none"):
        Base.register()(7)
    with pytest.raises(TypeError, match="no pydantic model"):
        TokenProposalConfig.register("plain")(Plain)


NAMES = sorted(
    {*dir(Eagle3SpeculatorConfig), *vars(Eagle3SpeculatorConfig()), *GenerationConfig().to_dict()}
    | {"self", "cls", "kwargs", "_only_data", "rope_parameters", "layer_types", "quantization_config", "max_length", ""}
)
DROPPED = {
    "torch_dtype",
    "auto_map",
    "model_type",
    "attn_implementation",
    "name_or_path",
    "_name_or_path",
    "_output_attentions",
    "_commit_hash",  # transformers 5.16 takes it
}
OF_CLASSIFIERS = {"id2label", "label2id", "problem_type"}  # transformers 5.16 checks their types itself
DECLARED = {f.name for f in fields(Eagle3SpeculatorConfig)} - (
    OF_CLASSIFIERS if Version(transformers.__version__) >= Version("5.19") else set()
)


def test_a_field_named_like_an_attribute_stays_data(tmp_path):
    "It is written back, and takes the place of no method, property or switch of the config."
    plain = Eagle3SpeculatorConfig(speculators_config=shared()).to_dict()
    names = [name for name in NAMES if name not in DROPPED | DECLARED]
    assert len(names) > 200
    for name in names:
        config = SpeculatorModelConfig.from_dict(plain | {name: {"a": 1}})
        assert config.to_dict() == plain | {name: {"a": 1}}, name
        assert config.check() is None and config.sizes.vocab_size == config.target_vocab_size, name
    everything = SpeculatorModelConfig.from_dict(plain | dict.fromkeys(names, "x"))
    everything.save_pretrained(tmp_path)
    again = SpeculatorModelConfig.from_pretrained(tmp_path)
    assert again == everything == copy.deepcopy(again)
    assert again.to_dict() == plain | dict.fromkeys(names, "x")
    assert json.loads((tmp_path / "config.json").read_text()).keys() >= {*names}


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["x", "nn", "auto", 3, ["float32"]])
def test_a_dtype_is_torchs(name, value):
    with pytest.raises(ValueError, match=rf"^Eagle3SpeculatorConfig.{name}=.* is no dtype of torch, e.g. 'bfloat16'$"):
        Eagle3SpeculatorConfig(**{name: value})


@pytest.mark.parametrize("name", ["to_dict", "__class__", "from_dict", "validate_rope", "attribute_map"])
def test_a_layers_field_named_like_a_method_is_refused(name):
    with pytest.raises(ValueError, match=rf"transformer_layer_config.{name}={{'a': 1}}: is no field of a llama conf"):
        Eagle3SpeculatorConfig(transformer_layer_config={"model_type": "llama", name: {"a": 1}})


def test_a_default_is_no_choice(tmp_path):
    "The default draft vocabulary is at most the verifier's; one that is given and larger is refused."
    small = LlamaConfig(vocab_size=64)
    for kind in ("eagle3", "peagle", "dflash", "dspark"):
        config_class = SpeculatorModelConfig.registered_class(kind)
        config = config_class(transformer_layer_config=small)
        assert (config.draft_vocab_size, config_class().draft_vocab_size) == (64, 32000)
        assert copy.deepcopy(config) == config == config_class.from_dict(config.to_dict())
        with pytest.raises(ValueError, match="draft_vocab_size=32000 is larger than the verifier's vocabulary of 64"):
            config_class(transformer_layer_config=small, draft_vocab_size=32000)


def test_wrong_values_are_pydantics_error_in_one_line():
    for wrong, line in (
        (TokenProposalConfig, "proposal_type=(missing): field required"),
        (lambda: VerifierConfig(name_or_path="v"), "architectures=(missing): field required"),
        (
            lambda: SpeculatorModelConfig.registered_class("mtp")(num_nextn_predict_layers=2),
            "num_nextn_predict_layers=2:",
        ),
        (lambda: Eagle3SpeculatorConfig(norm_before_fc="x"), "Eagle3SpeculatorConfig.norm_before_fc='x': input should"),
    ):
        with pytest.raises(ValidationError) as caught:
            wrong()
        assert (
            isinstance(caught.value, ValueError)
            and str(caught.value).startswith(line)
            and "\n" not in str(caught.value)
        )


def test_a_path_to_config_json_and_names_of_transformers(tmp_path):
    Eagle3SpeculatorConfig(speculators_config=shared()).save_pretrained(tmp_path)
    config = SpeculatorModelConfig.from_pretrained(tmp_path / "config.json")
    assert config == SpeculatorModelConfig.from_pretrained(tmp_path) and config.model_type == "speculator_model"
    assert "model_type" not in json.loads((tmp_path / "config.json").read_text())
    mtp = SpeculatorModelConfig.registered_class("mtp")(
        transformer_layer_config=Qwen3Config(hidden_size=16, vocab_size=9)
    )
    assert (mtp.hidden_size, mtp.vocab_size) == (16, 9)
