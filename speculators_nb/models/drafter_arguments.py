"""From training arguments to a fresh drafter, and to the keyword arguments of its forward pass."""

import torch
from transformers import PretrainedConfig

from ..core.config import SpeculatorModelConfig
from ..core.files import NotSupported
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


def layers_to_read(verifier: str, target_layer_ids: list[int] | None = None) -> list[int]:  # None: as vLLM
    "The verifier's layers whose hidden states a drafter reads; by default a low, a middle and a high one."
    layers = text_config(verifier_config(verifier)).num_hidden_layers
    return list(target_layer_ids or default_aux_layer_ids(layers))


def check_layer_ids(field: str, ids: list[int] | None) -> list[int] | None:  # ascending
    "In ascending order, as features are stored (and vLLM). Errors: ValueError for repeated or negative ones."
    if ids is None:
        return None
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0:
        raise ValueError(f"{field}={ids} must be distinct and not negative: ids of the verifier's layers")
    return sorted(ids)


def check_draft_vocab_size(config: SpeculatorModelConfig) -> None:  # with a draft_vocab_size
    "Raise ValueError for a draft vocabulary larger than the verifier's."
    if config.draft_vocab_size > config.target_vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size} is larger than the verifier's "
            f"vocabulary of {config.target_vocab_size}; choose at most that"
        )


def check_mask_token(config: SpeculatorModelConfig) -> None:  # with a mask_token_id
    "Raise ValueError for a mask token outside the verifier's vocabulary."
    token, size = config.mask_token_id, config.target_vocab_size
    if token is not None and not 0 <= token < size:
        raise ValueError(
            f"mask_token_id={token} lies outside the verifier's vocabulary of {size}; choose an id from 0 to {size - 1}"
        )
