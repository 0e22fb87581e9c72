"""Configs of drafters: algorithm, verifier (target model), proposal methods and draft layers.
They are one `config.json`, and a serving engine needs nothing else. Checks of its fields come first."""

import copy
import inspect
import os
import re
from functools import cache, partial
from logging import getLogger
from typing import Annotated, Any, ClassVar, Self, get_origin

import torch
from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError, model_validator
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.activations import ACT2FN

import speculators_nb

from .checkpoints import hub_access, model_file, push_errors
from .files import NotSupported, check_folder, read_object, write_text
from .options import RULES, OptionRule, installed_drafters, mapping, number, path, several, shown, text, whole
from .registry import (
    ClassRegistryMixin,
    FieldError,
    GreedyTokenProposalConfig,
    ReloadableBaseModel,
    TokenProposalConfig,
    explain,
    holds_numbers,
)


def is_dtype(name: Any) -> bool:
    "Whether torch has a dtype of this name."
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)


def _dtype_problem(name: str) -> str | None:
    return None if name == "auto" or is_dtype(name) else "is no dtype of torch, e.g. 'bfloat16'"


BLOCK = mapping({"model_type": "llama"}, none=True)
FIELD_RULES = {  # of the fields of any config.json that are read here
    **dict.fromkeys(("model_type", "speculators_model_type", "proposal_type"), text("llama", none=True)),
    **dict.fromkeys(("dtype", "torch_dtype"), text("bfloat16", none=True, test=_dtype_problem)),
    "name_or_path": path("Qwen/Qwen3-8B", none=True),
    "architectures": several(text("LlamaForCausalLM"), ["LlamaForCausalLM"], none=True),
    "proposal_methods": several(mapping({"proposal_type": "greedy"}), [{"proposal_type": "greedy"}], none=True),
    **dict.fromkeys(("text_config", "transformer_layer_config", "speculators_config"), BLOCK),
    **dict.fromkeys(("quantization_config", "verifier"), BLOCK),
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "hidden_size"), whole(4096, None, None, none=True)),
    **dict.fromkeys(("num_hidden_layers", "max_position_embeddings"), whole(32, None, None, none=True)),
    **dict.fromkeys(("n_predict", "num_nextn_predict_layers", "speculative_tokens"), whole(1, None, None, none=True)),
}


def check_field_types(config: dict[str, Any], where: str = "") -> None:
    """The fields of any model's config.json that this library reads have their types, in the blocks within as well.
    Errors: ValueError naming the field, after `where`, and its value."""
    for name, value in config.items():
        rule = None if (name, value) == ("name_or_path", "") else FIELD_RULES.get(name)  # which names none
        if rule and (problem := rule.problem(value)):
            raise ValueError(f"{where}{name}={shown(value)}: {problem}")
        if rule is BLOCK and value:
            check_field_types(value, f"{where}{name}.")
        elif name == "proposal_methods":
            for i, method in enumerate(value or ()):
                check_field_types(method, f"{where}{name}.{i}.")


LAYER_RULES = {  # of the fields of a decoder's config that are read here
    "hidden_size": whole(4096, 1, 2**20),
    "num_hidden_layers": whole(1, 1, 2**14),
    "vocab_size": whole(32000, 1, 2**26),
    "max_position_embeddings": whole(4096, 1, 2**40),
    "num_attention_heads": several(whole(32, 1, 2**16), 32, alone=True),
    "num_key_value_heads": several(whole(8, 1, 2**16), 8, alone=True, none=True),
    "intermediate_size": several(whole(11008, 1, 2**24), 11008, alone=True, none=True),
    "head_dim": several(whole(128, 1, 2**16), 128, alone=True, none=True),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), whole(512, 1, 2**16, none=True)),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), whole(128, 1, 2**16, none=True)),
    "qk_rope_head_dim": whole(64, 0, 2**16, none=True),
    "rms_norm_eps": number(1e-6, low=0, below=1, none=True),
    "rope_theta": number(10000.0, above=0, none=True),
    "initializer_range": number(0.02, low=0, none=True),
    "attention_dropout": number(0.0, low=0, below=1, none=True),
    "bos_token_id": several(whole(1, -1, 2**26), 1, alone=True, none=True),
    "eos_token_id": several(whole(2, -1, 2**26), 2, alone=True, none=True),
    "sliding_window": several(whole(2048, -1, 2**40), 2048, alone=True, none=True),
    "hidden_act": OptionRule("word", "silu", words=tuple(ACT2FN), none=True),
}

ROPE_SCALES = {  # parameters of RoPE that mean nothing without a rope_type
    *("factor", "attention_factor", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
}


def check_layers(config: dict[str, Any], where: str = "") -> None:
    """Refuse sizes that no decoder layer can have. Errors: ValueError naming the field, after `where`, its value and
    what it may be."""
    for name, rule in LAYER_RULES.items():
        if name in config and (problem := rule.problem(config[name])):
            raise ValueError(f"{where}{name}={shown(config[name])}: {problem}")
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    pad, vocab_size = sizes.get("pad_token_id"), sizes.get("vocab_size")
    if pad is not None and vocab_size is not None and not -vocab_size <= pad < vocab_size:
        raise ValueError(f"{where}pad_token_id={pad}: must be less than {vocab_size=}")
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, dict) or "rope_type" in rope or "type" in rope:
            continue
        if scaled := sorted(ROPE_SCALES & rope.keys()):
            raise ValueError(
                f"{where}{name}={shown(rope)}: has {', '.join(scaled)} and no rope_type, so "
                "that nothing would be scaled; give it, e.g. 'yarn'"
            )
    heads, key_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads and key_heads and heads % key_heads:
        raise ValueError(f"{where}num_key_value_heads={key_heads}: must divide num_attention_heads={heads}")
    hidden_size = sizes.get("hidden_size")
    if heads and hidden_size and not config.get("head_dim") and hidden_size % heads:
        raise ValueError(f"{where}num_attention_heads={heads}: must divide hidden_size={hidden_size}, or give head_dim")


def layer_config_from_dict(config: PretrainedConfig | dict[str, Any], family: str | None = None) -> PretrainedConfig:
    """Make a transformers config of a decoder from a dictionary by its `model_type`, or by `family` where it has none;
    an object is passed through. Errors: ValueError naming the field."""
    if isinstance(config, PretrainedConfig):
        check_layers(vars(config))
        return config
    if not isinstance(config, dict):
        raise ValueError(
            f"is {type(config).__name__}, and must be an object with the decoder's model_type, e.g. llama or qwen3"
        )
    model_type = config.get("model_type", family)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={shown(model_type)} is missing or names no transformers config. "
            "Write the decoder family into it, e.g. 'llama' or 'qwen3'."
        )
    check_layers(config)
    family_class = CONFIG_MAPPING[model_type]
    for name in config:  # which would take the place of a method
        if name == "attribute_map" or callable(getattr(family_class, name, None)):
            raise ValueError(
                f"{name}={shown(config[name])}: is no field of a {model_type} config, but a "
                f"name of transformers' {family_class.__name__}; remove it"
            )
    try:
        # infinity is an object in JSON, e.g. Nemotron-H's time_step_limit
        plain = PretrainedConfig._decode_special_floats(copy.deepcopy(config))
        return family_class.from_dict(plain)
    except Exception as e:  # classes of transformers raise anything for a field of another type
        problem = " ".join(f"{type(e).__name__}: {e}".split())
        raise ValueError(f"transformers refuses this {model_type} config: {problem}") from e


# Any: pydantic cannot read transformers' dataclasses
LayerConfig = Annotated[Any, PlainValidator(layer_config_from_dict)]
# the same, where a dictionary without `model_type` means Llama's layers, or Qwen3's
LlamaLayers = Annotated[Any, PlainValidator(partial(layer_config_from_dict, family="llama"))]
Qwen3Layers = Annotated[Any, PlainValidator(partial(layer_config_from_dict, family="qwen3"))]


class VerifierConfig(ReloadableBaseModel):
    "Which model the drafter was trained for."

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    name_or_path: str | None = Field(
        description="Folder or hub id of the verifier; None: given when the drafter is served."
    )
    architectures: list[str] = Field(description="The verifier's model classes, as its own config.json names them.")

    @classmethod
    def from_config(cls, config: PretrainedConfig, name_or_path: str | None = "UNSET") -> "VerifierConfig":
        "Describe a verifier by its loaded config; `name_or_path` is recorded in place of the name in it."
        if name_or_path == "UNSET":
            name_or_path = config.name_or_path or None
        architectures = config.to_dict().get("architectures") or []
        return cls(name_or_path=name_or_path, architectures=architectures)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike) -> "VerifierConfig":
        "Describe a verifier, a folder or hub id, by its raw config.json; of a hub id nothing else is fetched."
        file = model_file(name_or_path)
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: no such file, so the verifier's architectures are unknown. "
                f"Is {name_or_path!r} a model folder?"
            )
        config = read_object(file)
        check_field_types(config, f"{file}: ")
        architectures = config.get("architectures") or []
        return cls(name_or_path=str(name_or_path), architectures=architectures)


class SpeculatorsConfig(ReloadableBaseModel):
    "The part of the config that is the same for every drafter: algorithm, proposal methods, verifier."

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    algorithm: str = Field(description="The drafting algorithm; the same word as `speculators_model_type`.")
    proposal_methods: list[TokenProposalConfig] = Field(
        min_length=1, description="The ways in which this drafter can be run."
    )
    default_proposal_method: str = Field(description="The `proposal_type` to use when none is requested.")
    verifier: VerifierConfig = Field(description="The model that the drafter was trained for.")

    @model_validator(mode="after")
    def _default_is_listed(self):
        known = [method.proposal_type for method in self.proposal_methods]
        if self.default_proposal_method not in known:
            raise ValueError(
                f"default_proposal_method={self.default_proposal_method!r} is not among "
                f"proposal_methods ({', '.join(known)}). Add that method, or name one of these."
            )
        return self

    @classmethod
    def greedy(cls, algorithm: str, speculative_tokens: int, verifier_name_or_path: str | os.PathLike) -> Self:
        "The config of a freshly trained drafter: a greedy proposal of so many tokens in a step."
        return cls(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=speculative_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(verifier_name_or_path),
        )

    @property
    def speculative_tokens(self) -> int | None:  # None: no method has it
        "How many tokens the first proposal method drafts in a step."
        lengths = [getattr(m, "speculative_tokens", None) for m in self.proposal_methods]
        return next((n for n in lengths if n is not None), None)


def _hints(cls: type) -> dict[str, Any]:
    "The type of each field that `cls` and its bases down from SpeculatorModelConfig declare."
    return {
        name: hint
        for base in reversed(cls.__mro__)
        if issubclass(base, SpeculatorModelConfig)
        for name, hint in inspect.get_annotations(base, eval_str=True).items()
        if get_origin(hint) is not ClassVar
    }


@cache
def _field_types(cls: type) -> dict[str, TypeAdapter]:
    "A pydantic validator for each of them."
    return {name: TypeAdapter(hint) for name, hint in _hints(cls).items()}


# further fields that transformers takes for itself, in any config
OF_TRANSFORMERS = {
    *("name_or_path", "torch_dtype", "output_attentions", "attn_implementation"),
    *("experts_implementation", "_name_or_path", "_commit_hash", "_output_attentions"),
}
# and those that it would check in a drafter's config as in a decoder's, or cannot take
NOT_FOR_TRANSFORMERS = {
    *("rope_parameters", "rope_scaling", "rope_theta", "layer_types", "mlp_layer_types"),
    *("quantization_config", "per_layer_config", "self", "kwargs"),
}
OF_CLASSIFIERS = ("id2label", "label2id", "problem_type")


def import_models():
    "Import `auto_package` and the entry points of other packages: each registers itself."
    SpeculatorModelConfig.auto_populate_registry()
    for drafter in installed_drafters():
        drafter.load()


def _class_of(config_dict) -> "type[SpeculatorModelConfig]":
    "The registered class that `speculators_model_type` names."
    registry = SpeculatorModelConfig.registry
    name = config_dict.get("speculators_model_type")
    name = name if isinstance(name, str | None) else shown(name)
    if name not in registry:
        import_models()
    known = ", ".join(sorted(registry))
    if "speculators_model_type" not in config_dict:
        raise NotSupported(
            "speculators_model_type is missing, so this is not a drafter's config (its model_type is "
            f"{config_dict.get('model_type')!r}). Known types: {known}. Convert a foreign checkpoint first."
        )
    if name not in registry:
        raise ValueError(
            f"speculators_model_type={name!r} is not known. Known types: {known}. "
            "Check the spelling, or import the module that registers it."
        )
    return registry[name]


log = getLogger(__name__)


class SpeculatorModelConfig(ClassRegistryMixin, PretrainedConfig):
    """Base of all drafters' configs. Declared fields are checked whenever they are set; all
    fields are written as config.json, and keys of a file that no field declares are kept. Two
    configs are equal when they would write the same file."""

    speculators_config: SpeculatorsConfig | None = None
    speculators_model_type: str = ""
    speculators_version: str = speculators_nb.__version__
    tie_word_embeddings: bool = False
    has_no_defaults_at_init: ClassVar[bool] = True  # every field is written to the file

    # packages whose modules register drafters; add your own: auto_package += ("mine",)
    auto_package: ClassVar[str | tuple[str, ...] | None] = ("speculators_nb.models",)
    registry_auto_discovery: ClassVar[bool] = True
    schema_discriminator: ClassVar[str] = "speculators_model_type"
    model_type: ClassVar[str] = "speculator_model"  # of transformers; in no config.json

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # the dataclass decorator gives each subclass one that forgets undeclared keys
        cls.__eq__ = SpeculatorModelConfig.__eq__

    @classmethod
    def _checked(cls, name: str, value: Any) -> Any:
        if field_type := _field_types(cls).get(name):
            field = f"{cls.__name__}.{name}"
            if isinstance(value, bool) and holds_numbers(_hints(cls)[name]):
                raise ValueError(f"{field}={value}: is a truth value, and must be a number")
            try:
                value = field_type.validate_python(value)
            except ValidationError as e:
                raise FieldError.of(explain(e, cls.__name__, name)) from None
            rule = LAYER_RULES.get(name) or RULES.get(name)
            if rule and value is not None and (problem := rule.problem(value)):
                raise ValueError(f"{field}={shown(value)}: {problem}")
        return value

    def __setattr__(self, name, value):
        super().__setattr__(name, self._checked(name, value))

    def __eq__(self, other):
        return type(self) is type(other) and self.to_dict() == other.to_dict()

    @classmethod
    def validate_transformer_config(cls, value: Any) -> PretrainedConfig:
        "What the field makes of a dictionary or config. Errors: ValueError."
        return cls._checked("transformer_layer_config", value)

    @staticmethod
    def serialize_transformer_config(value: PretrainedConfig) -> dict[str, Any]:
        "The draft layers as in config.json: `to_diff_dict`, which leaves defaults out."
        plain = value.to_diff_dict()
        plain.pop("transformers_version", None)
        return plain

    validate_transformer_layer_config = validate_transformer_config  # EAGLE's names
    serialize_transformer_layer_config = serialize_transformer_config

    def _plain(self, output: dict[str, Any]) -> dict[str, Any]:
        "With the parts that transformers does not serialize: shared block and layers."
        for name in ("model_type", "_name_or_path", "_only_data", *OF_CLASSIFIERS):
            output.pop(name, None)
        output |= copy.deepcopy(vars(self).get("_only_data", {}))
        for name, value in self.__dict__.items():
            if isinstance(value, PretrainedConfig):
                output[name] = self.serialize_transformer_config(value)
        if self.speculators_config is not None:
            output["speculators_config"] = self.speculators_config.model_dump(mode="json")
        return output

    def to_dict(self) -> dict[str, Any]:  # plain JSON values, keys as in config.json
        "All fields as a plain dictionary, which `from_dict` reads back."
        return self._plain(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:  # plain JSON values, keys as in config.json
        """What config.json holds: all declared and all extra fields, and of transformers' own
        fields those that differ from their default."""
        return self._plain(super().to_diff_dict())

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True):
        "Write the config as JSON, atomically; `use_diff` leaves out transformers' own fields that have their default."
        write_text(json_file_path, self.to_json_string(use_diff=use_diff))

    def __new__(cls, /, **kwargs):
        config = super().__new__(cls)
        if kwargs:  # none where an object is copied
            vars(config)["_given"] = {*kwargs}  # until `__post_init__`
        return config

    def __post_init__(self, **kwargs):
        given_names = vars(self).pop("_given", ())
        kwargs.pop("auto_map", None)  # names Python files to run; this library runs none
        kwargs.pop("model_type", None)
        kwargs |= kwargs.pop("_only_data", {})
        for name, value in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            if not (value is None or isinstance(value, torch.dtype) or is_dtype(value)):
                raise ValueError(f"{type(self).__name__}.{name}={shown(value)}: is no dtype of torch, e.g. 'bfloat16'")
        unknown = {name: value for name, value in kwargs.items() if name not in OF_TRANSFORMERS}
        # nothing that a file holds takes the place of a method, a property or a switch
        data = {
            name: kwargs.pop(name)
            for name in unknown
            if name in NOT_FOR_TRANSFORMERS or name[:1] == "_" or hasattr(type(self), name)
        }
        for name in OF_CLASSIFIERS:
            if getattr(self, name) is not None:
                data[name] = getattr(self, name)
                setattr(self, name, None)
        super().__post_init__(**kwargs)
        data |= {name: value for name, value in unknown.items() if name not in vars(self)}
        if data:
            self._only_data = data
        draft_size = getattr(self, "draft_vocab_size", None)
        if draft_size and "draft_vocab_size" not in given_names:  # a default is no choice
            self.draft_vocab_size = min(draft_size, self.target_vocab_size)
        made_by = self.speculators_version
        major = re.match(r"(\d+)\.\d+", made_by)
        if not major:
            raise ValueError(
                f"{type(self).__name__}.speculators_version={made_by!r}: is no version; write "
                f"that of the library that made it, e.g. {speculators_nb.__version__!r}"
            )
        if int(major[1]) > 0:
            log.warning(
                "speculators_version=%r is newer than the versions 0.x that are read here: "
                "compare a few drafts with those of the library that made it",
                made_by,
            )
        given, own = self.speculators_model_type, type(self).speculators_model_type
        if own and given != own:
            raise FieldError.of(
                f"{type(self).__name__}.speculators_model_type={given!r}: must be {own!r}, or "
                "use SpeculatorModelConfig.from_dict, which finds the class of any type"
            )
        try:
            self.check()
        except ValueError as e:
            raise e if type(e) is not ValueError else FieldError.of(str(e)) from None

    def check(self):
        "Rules between fields, for subclasses: raise ValueError with fields, values, remedy."

    @property
    def sizes(self) -> PretrainedConfig:  # has vocab_size and hidden_size, the verifier's
        "Where the verifier's sizes are written: in the draft layers' config, else in this one."
        return getattr(self, "transformer_layer_config", self)

    @property
    def target_vocab_size(self) -> int:  # V
        "The verifier's vocabulary size."
        return self.sizes.vocab_size

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "SpeculatorModelConfig":
        """Make the config, of the class that `speculators_model_type` names, that the dictionary of a config.json
        describes; `kwargs` are transformers': overrides for fields, return_unused_kwargs. Errors: ValueError."""
        target = _class_of(config_dict)
        if not issubclass(target, cls):
            name = config_dict["speculators_model_type"]
            raise ValueError(
                f"speculators_model_type={name!r} makes a {target.__name__}, which is not a {cls.__name__}. Use "
                f"{target.__name__}.from_dict, or SpeculatorModelConfig.from_dict for any type."
            )
        config = copy.deepcopy(config_dict)
        hidden = {name: config.pop(name) for name in ("self", "_only_data") if name in config}
        if hidden:  # no names of arguments
            config["_only_data"] = hidden
        return super(SpeculatorModelConfig, target).from_dict(config, **kwargs)

    @property
    def verifier_name(self) -> str:
        "Folder or hub id of the verifier that the drafter was trained for. Errors: ValueError where none is named."
        name = self.speculators_config and self.speculators_config.verifier.name_or_path
        if not name:
            raise ValueError(
                "speculators_config.verifier.name_or_path is missing; give the verifier's folder or hub id"
            )
        return name

    @property
    def proposed_tokens(self) -> int | None:  # None: not known
        "How many tokens the first proposal method drafts in a step."
        return self.speculators_config and self.speculators_config.speculative_tokens

    @staticmethod
    def reload_schema() -> None:
        "Accept classes that registered since this module was imported: `reload_schemas`."
        reload_schemas()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        cache_dir: str | os.PathLike | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str | None = None,
        **kwargs,
    ) -> Self:
        """Read a drafter's config.json, and no other file, of a folder or a hub id, which is fetched as `hub_access`
        says; an object of the class that `speculators_model_type` names. `kwargs` are passed on to transformers.
        Errors: FileNotFoundError; ValueError saying what the folder holds instead of a drafter."""
        folder = name = pretrained_model_name_or_path
        if os.path.isfile(name) and str(name).endswith(".json"):
            folder, kwargs["_configuration_file"] = os.path.split(name)
        if not os.path.exists(name):
            with hub_access(
                cache_dir=cache_dir,
                token=token,
                revision=revision,
                local_files_only=local_files_only or None,
                force_download=force_download or None,
            ):
                folder = model_file(name).parent
        check_folder(folder, name)
        return super().from_pretrained(folder, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs) -> Any:  # huggingface_hub's CommitInfo
        """Upload config.json; `kwargs` are transformers': token, private, revision, commit_message, … Errors: OSError
        in one line: model, reason, remedy."""
        with push_errors(repo_id):
            return super().push_to_hub(repo_id, **kwargs)

    # pydantic's names; all values are plain JSON values when dumped
    @classmethod
    def model_validate(cls, obj: Any) -> Any:  # of this class or a registered subclass
        """The config that a dictionary describes; where that has no type, it is this class's. A config of this class is
        passed through. Errors: TypeError for anything else; ValueError for wrong values."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, dict):
            raise TypeError(f"{cls.__name__}.model_validate takes a dictionary, not {type(obj).__name__}")
        own_type = getattr(cls, "speculators_model_type", "")
        return cls.from_dict(({"speculators_model_type": own_type} if own_type else {}) | obj)

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        "All fields as a plain dictionary of JSON values, whichever the mode."
        return self.to_dict()


def reload_schemas():
    "Have the containing models accept proposal methods that registered after this module was imported."
    TokenProposalConfig.reload_schema()
    SpeculatorsConfig.reload_schema()
    _field_types.cache_clear()
