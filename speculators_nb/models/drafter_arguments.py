"""From training arguments to a fresh drafter, and to the keyword arguments of its forward pass."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig

from ..core.config import SpeculatorModelConfig, SpeculatorsConfig
from ..core.files import NotSupported
from ..core.options import check_options
from ..nn.losses import parse_loss
from ..nn.target_head import text_config, verifier_config
from ..verifier.tapped_model import default_aux_layer_ids

# A trainer holds one flat dictionary of arguments, and each part takes what is its own. What is behind the `*` in the
# signature of a drafter's `forward` is a training argument, with its default; so are the fields of its config that it
# names in `config_arguments`. A drafter states only what differs: another default in training, another name in
# `forward`, config fields that depend on the verifier.


def check_whole_vocabulary(
    layer: PretrainedConfig,  # of the draft layers; its vocab_size is the verifier's
    t2d: torch.Tensor | None,  # [V] bool
    d2t: torch.Tensor | None,  # [Vd]
    draft_vocab_size: int | None,
    why: str,  # the draft vocabulary is the verifier's, and what to write
) -> None:
    "Raise NotSupported, a ValueError, for a reduced draft vocabulary."
    if t2d is None and d2t is None and draft_vocab_size in (None, layer.vocab_size):
        return
    size = draft_vocab_size if t2d is None else int(t2d.sum())
    raise NotSupported(f"draft_vocab_size={size} of {layer.vocab_size}: {why}")


class TrainingArguments:
    """What a drafter takes of a trainer's arguments, and a fresh drafter made from them; a base
    of `models.base.SpeculatorModel`."""

    config_class: type[SpeculatorModelConfig]
    training_forward = "forward"  # the method whose keyword-only parameters are arguments
    forward_names = {"loss_fn": "loss_config"}  # argument -> its name in `forward`
    config_arguments: tuple[str, ...] = ()  # config fields that are arguments
    training_defaults: dict[str, Any] = {}  # those that differ from `forward`'s and the config's
    drafted_by = ""  # the argument that says how many tokens a serving engine drafts
    # fields of a batch that decide shapes: a trainer leaves them on the host, where `forward`
    # reads them without a wait for the device
    read_on_host: tuple[str, ...] = ()
    lab_arguments: dict[str, Any] = {}  # what `lab.experiment` gives besides, e.g. sizes
    whole_vocabulary = ""  # why the draft vocabulary is the verifier's; "": it may be smaller
    fixed_layers = ""  # why the draft layers cannot be chosen; "": they can
    for_verifier: ClassVar[Callable[..., Any]]  # of `models.base`

    @classmethod
    def forward_arguments(cls) -> dict[str, Any]:  # argument -> default
        "The training arguments that `forward` takes."
        argument_of = {parameter: name for name, parameter in cls.forward_names.items()}
        parameters = inspect.signature(getattr(cls, cls.training_forward)).parameters.values()
        defaults = {argument_of.get(p.name, p.name): p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {name: cls.training_defaults.get(name, old) for name, old in defaults.items()}

    @classmethod
    def training_arguments(cls) -> dict[str, Any]:  # argument -> default
        "All training arguments of this drafter."
        fields = {name: getattr(cls.config_class, name) for name in cls.config_arguments}
        return cls.forward_arguments() | fields | cls.training_defaults

    @classmethod
    def get_trainer_kwargs(
        cls,
        **training_args,  # a trainer's arguments, those of other parts too
    ) -> tuple[dict[str, Any], dict[str, Any]]:  # of `forward` in training, in evaluation
        """What `forward` is called with. An argument that is None takes its default; a switch
        that is off by default is left to `forward`."""
        defaults = cls.forward_arguments()
        on = {name: value for name, value in defaults.items() if value not in (None, False)}
        given = {name: training_args.get(name) for name in defaults}
        chosen = on | {name: value for name, value in given.items() if value is not None}
        kwargs = {cls.forward_names.get(name, name): value for name, value in chosen.items()}
        if "loss_config" in kwargs:
            kwargs["loss_config"] = parse_loss(kwargs["loss_config"])
        return kwargs, dict(kwargs)

    @classmethod
    def draft_layers(
        cls,
        layer: PretrainedConfig | None,  # as the trainer made it for the verifier
        verifier: str,  # folder or hub id
    ) -> PretrainedConfig:
        "The config of the draft layers. Errors: TypeError where it is needed and missing."
        if layer is None:
            raise TypeError("verifier_config is missing: the config of the draft layers")
        return layer

    @classmethod
    def verifier_fields(
        cls,
        layer: PretrainedConfig,  # of the draft layers
        verifier: str,  # folder or hub id
        arguments: dict[str, Any],  # every training argument, with its default where not given
    ) -> dict[str, Any]:  # config field -> value
        "Config fields that depend on the verifier."
        return {}

    @classmethod
    def with_first_weights(
        cls,
        config: SpeculatorModelConfig,
        t2d: torch.Tensor | None,  # [V] bool
        d2t: torch.Tensor | None,  # [Vd]
        arguments: dict[str, Any],  # every training argument
    ) -> Self:
        "The weights that training starts from: random ones, and the verifier's."
        return cls.for_verifier(config, t2d, d2t)

    @classmethod
    def tokens_to_draft(cls, arguments: dict[str, Any]) -> int:  # training arguments -> K
        "How many tokens a serving engine shall draft."
        return arguments[cls.drafted_by]

    @classmethod
    def arguments_to_draft(cls, k: int) -> dict[str, Any]:  # K -> training arguments
        "What to train with, so that `tokens_to_draft` is k: k, or one more for an anchor."
        drafted = cls.tokens_to_draft(cls.training_arguments() | {cls.drafted_by: k})
        return {cls.drafted_by: 2 * k - drafted}

    @classmethod
    def from_training_args(
        cls,
        # of the draft layers, as `layers.draft_layer_config` makes it
        transformer_layer_config: PretrainedConfig | None = None,
        t2d: torch.Tensor | None = None,  # [V] bool, for a reduced draft vocabulary
        d2t: torch.Tensor | None = None,  # [Vd] int64: verifier id minus draft id
        *,
        verifier_config: PretrainedConfig | None = None,  # the first argument's documented name
        verifier_name_or_path: str,  # its folder or hub id
        draft_vocab_size: int | None = None,  # None: as many as t2d selects, or all
        draft_attn_impl: str | None = None,  # default of `attn_impl`, by transformers' name
        **training_args,  # those of `training_arguments`; others are not looked at
    ) -> Self:  # with the verifier's weights, ready to train
        """A fresh drafter. Errors: ValueError for a draft vocabulary that does not fit;
        NotSupported for a class that says nothing about its config."""
        if cls.config_class is SpeculatorModelConfig:
            raise NotSupported(
                f"{cls.__name__} has neither a config_class of its own nor a from_training_args; give it one of them"
            )
        check_options({"draft_attn_impl": draft_attn_impl})
        verifier = verifier_name_or_path
        layer = cls.draft_layers(transformer_layer_config or verifier_config, verifier)
        if draft_attn_impl is not None:
            layer = copy.deepcopy(layer)
            layer._attn_implementation = draft_attn_impl
        if cls.whole_vocabulary:
            check_whole_vocabulary(layer, t2d, d2t, draft_vocab_size, cls.whole_vocabulary)
            fields: dict[str, Any] = {"transformer_layer_config": layer}
        else:
            selected = layer.vocab_size if t2d is None else int(t2d.sum())
            size = draft_vocab_size or selected
            fields = {"transformer_layer_config": layer, "draft_vocab_size": size}
        arguments = cls.training_arguments()
        arguments |= {name: value for name, value in training_args.items() if value is not None}
        fields |= {name: arguments[name] for name in cls.config_arguments}
        fields |= cls.verifier_fields(layer, verifier, arguments)
        kind, K = cls.config_class.speculators_model_type, cls.tokens_to_draft(arguments)
        shared = SpeculatorsConfig.greedy(kind, K, verifier)
        config = cls.config_class(speculators_config=shared, **fields)
        return cls.with_first_weights(config, t2d, d2t, arguments)


def layers_to_read(
    verifier: str,  # folder or hub id
    target_layer_ids: list[int] | None = None,  # None: a low, a middle and a high one, as vLLM
) -> list[int]:  # ascending
    "The verifier's layers whose hidden states a drafter reads."
    layers = text_config(verifier_config(verifier)).num_hidden_layers
    return list(target_layer_ids or default_aux_layer_ids(layers))


def check_layer_ids(
    field: str,  # of the config
    ids: list[int] | None,  # its value
) -> list[int] | None:  # ascending, as features are stored, whatever the order given (as vLLM)
    "Raise ValueError unless the layers are distinct and not negative."
    if ids is None:
        return None
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0:
        raise ValueError(f"{field}={ids} must be distinct and not negative: ids of the verifier's layers")
    return sorted(ids)


def check_draft_vocab_size(
    config: SpeculatorModelConfig,  # with a draft_vocab_size
) -> None:
    "Raise ValueError for a draft vocabulary larger than the verifier's."
    if config.draft_vocab_size > config.target_vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size} is larger than the verifier's "
            f"vocabulary of {config.target_vocab_size}; choose at most that"
        )


def check_mask_token(
    config: SpeculatorModelConfig,  # with a mask_token_id
) -> None:
    "Raise ValueError for a mask token outside the verifier's vocabulary."
    token, size = config.mask_token_id, config.target_vocab_size
    if token is not None and not 0 <= token < size:
        raise ValueError(
            f"mask_token_id={token} lies outside the verifier's vocabulary of {size}; choose an id from 0 to {size - 1}"
        )
