"""MTP heads that transformers computes (`transformers.modeling_layers.MtpModel`): any family whose config has
`num_mtp_layers`, with its decoder layers and its names in checkpoints, and no record here."""

import inspect
import os
import re
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import MtpModel

from ..core.files import NotSupported
from ..nn.target_head import text_config, verifier_config
from ..verifier.cache import cache_keyword
from ..verifier.row_limits import context_length, rope_by_length, same_angles_until
from ..verifier.tapped_model import auto_class
from .formats import Tensors


def decoder_of(config: PretrainedConfig) -> PreTrainedModel:  # of a language model
    "Its decoder without memory, from which `MTPStack` takes classes and settings."
    kind: Any = MODEL_MAPPING.get(type(config), None)
    if kind is None:  # the language model of a multimodal one has no entry
        module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        kind = next(c for c in vars(module).values() if getattr(c, "config_class", None) is type(config))
    with torch.device("meta"):
        return kind._from_config(config)


class MTPStack(MtpModel):
    """The layers of transformers' `MtpModel`, one for each token that is drafted; embedding and head are the
    drafter's."""

    def tie_with_main_model(self, main_model: PreTrainedModel) -> None:
        "Rotary embeddings, which have no weights; nothing else is shared."
        decoder: Any = main_model.get_decoder()
        rotary: Any = getattr(decoder, "rotary_emb", None)
        self.rotary_emb = rotary and type(rotary)(config=decoder.config)
        self.by_layer_type = bool(rotary) and "layer_type" in inspect.signature(rotary.forward).parameters

    def _init_weights(self, module):
        "Matrices are drawn; norms and biases are as their class makes them."
        for weight in module.parameters(recurse=False):
            if weight.ndim > 1:
                weight.data.normal_(0, self.config.initializer_range)

    def new_cache(self) -> MtpCache:
        "Keys, values and other states of all layers, which can be cut back."
        cache = MtpCache(config=self.config)
        cache.activate_past_recording()
        return cache

    def run(
        self,
        depth: int,  # the layer, from 0
        embeds: Tensor,  # [B, N, H] of the tokens that follow the states
        hidden: Tensor,  # [B, N, H] the verifier's states after the final norm, or those of the layer before
        positions: Tensor,  # [B, N] of the tokens
        cache: MtpCache,  # extended in place
    ) -> Tensor:  # [B, N, H]
        "One layer, as `MtpModel.forward` calls it."
        rope = None
        if self.rotary_emb is not None:
            by_type = {"layer_type": self.config.layer_types[depth]} if self.by_layer_type else {}
            rope = self.rotary_emb(embeds, position_ids=positions, **by_type)
        arguments = self.create_masks_for_mtp_layer(depth, embeds, cache, positions)
        layer: Any = self.layers[depth]
        arguments[cache_keyword(type(layer).forward)] = cache
        hidden = layer(embeds, hidden, position_embeddings=rope, position_ids=positions, **arguments)
        return self.shared_post_norm(hidden) if self.use_shared_post_norm else hidden


# transformers looks names up by the class
NAMES: Any = get_checkpoint_conversion_mapping(MtpModel.__name__)
register_checkpoint_conversion_mapping(MTPStack.__name__, NAMES, overwrite=True)


def new_stack(config: PretrainedConfig) -> MTPStack:  # of a language model
    """The layers with fresh weights. Errors: NotSupported, in one line, for a config that transformers makes no MTP
    layers of, and for a version of it without caches that can be cut."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18):
        raise NotSupported(
            f"transformers {transformers.__version__}: its caches of sliding layers show too many keys after a second "
            f"drafted token, and it computes the MTP head of this {config.model_type!r}; take 5.18 or later"
        )
    if getattr(config, "unpadded_vocab_size", None) not in (None, config.vocab_size):
        raise NotSupported(
            f"unpadded_vocab_size={config.unpadded_vocab_size} of {config.vocab_size}: a verifier whose head has fewer "
            "rows than its embedding has no drafter here"
        )
    text = vars(config)
    rope, context = rope_by_length(text), context_length(text)
    if rope and not (context and context <= (same_angles_until(text) or 0)):  # else no text is long enough
        raise NotSupported(
            f"rope_type={rope['rope_type']!r} depends on the length of a text; transformers' MTP layers keep their "
            "keys as they were: train another drafter"
        )
    try:
        return MTPStack(decoder_of(config), config.num_mtp_layers)
    except ValueError as e:  # "ambiguous": fields of the MTP layers are missing
        raise NotSupported(f"transformers makes no MTP layers of {config.model_type!r}: {e}") from e


def skeleton(verifier: str | os.PathLike) -> PreTrainedModel:  # on the meta device
    "The verifier without memory; it knows which tensors of its checkpoint are an MTP head, and how they are renamed."
    config = verifier_config(verifier)
    with torch.device("meta"):
        main: Any = auto_class(config).from_config(config)
    text = text_config(config)
    n = text.num_hidden_layers
    # patterns of layers by number name those of released sizes alone
    known = {p for p in main._keys_to_ignore_on_load_unexpected or () if not re.search(r"\.\d", p)}
    behind = {rf"(^|\.)layers\.{i}\." for i in range(n, n + text.num_mtp_layers)}
    main._keys_to_ignore_on_load_unexpected = known | behind
    main._weight_conversions = get_model_conversion_mapping(main)
    return main


def stack_names(verifier: str | os.PathLike, names: Mapping[str, Any]) -> list[str]:
    "Which tensors of a verifier's checkpoint belong to its MTP head."
    pattern = re.compile("|".join(skeleton(verifier)._keys_to_ignore_on_load_unexpected or ()))
    return [name for name in names if pattern.search(name)]


def load_stack(verifier: str | os.PathLike, folder: str | os.PathLike, dtype: torch.dtype) -> Tensors:
    "A verifier's MTP head under our names, as transformers reads it from a folder. Errors: ValueError for a lack."
    main = skeleton(verifier)
    main.config.name_or_path, main.config.dtype = str(folder), dtype
    try:
        stack = MTPStack.from_pretrained(main)
    except RuntimeError as e:  # names what is missing
        raise ValueError(f"verifier {str(verifier)!r}: {' '.join(str(e).split())}") from e
    return {f"mtp_layers.{name}": weight for name, weight in stack.state_dict().items()}


def stored_stack(head: Tensors, native: Tensors, verifier: str | os.PathLike) -> Tensors:
    """The inverse of `load_stack`: a head under our names in the form of the checkpoint's own tensors, whatever
    transformers renames, splits, joins or transposes: numbered elements are read as weights are, and say where each
    came from. A number takes 8 bytes, as the moments of an optimizer do."""
    total, numbered = 0, {}
    for name, weight in native.items():
        numbered[name] = torch.arange(total, total + weight.numel(), dtype=torch.float64).view_as(weight)
        total += weight.numel()
    with tempfile.TemporaryDirectory() as folder:
        save_file(numbered, Path(folder) / "model.safetensors", {"format": "pt"})
        places = load_stack(verifier, folder, torch.float64)
    flat = torch.full((total,), torch.nan)
    for name, place in places.items():
        flat[place.flatten().long()] = head[name].float().flatten()
    parts = zip(native.items(), flat.split([weight.numel() for weight in native.values()]))
    return {name: part.view_as(weight) for (name, weight), part in parts if not part.isnan().all()}
