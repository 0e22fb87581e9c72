"""The verifier (target model): a causal or vision-language LM that also returns hidden states.
They are those of chosen layers of the transformers model, caught by forward pre-hooks."""

import inspect
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from ..core.checkpoints import current_hub_access, model_file
from ..core.files import check_length
from ..core.options import check_options
from ..nn.target_head import verifier_config
from .cache import cache_keyword, folded_heads, new_cache, positions_of_mask, scaled_by_position, text_positions
from .row_limits import same_angles_until


def default_aux_layer_ids(n: int) -> list[int]:
    """Three ascending aux layer ids for n decoder layers: vLLM's default `[2, n//2, n-3]` where these ascend (n >= 7),
    else three neighbours around the middle; ValueError below two layers."""
    if n < 2:
        raise ValueError(
            f"num_hidden_layers={n}: three distinct aux layer ids need a verifier of at least "
            "2 layers; pass aux_layer_ids"
        )
    ids = [2, n // 2, n - 3]
    return ids if ids[0] < ids[1] < ids[2] else [(n + 1) // 2 + d for d in (-1, 0, 1)]


def check_aux_layer_ids(ids: Iterable[int], n: int) -> list[int]:
    """The ids as a list: not empty, distinct, ascending and within [0, n], the decoder layers of the verifier.
    ValueError names the rules that are broken."""
    ids = [int(i) for i in ids]
    rules = {
        "empty": not ids,
        "not distinct": len(set(ids)) < len(ids),
        f"outside [0, {n}]": any(not 0 <= i <= n for i in ids),
        "not ascending": ids != sorted(ids),
    }
    broken = [rule for rule, hit in rules.items() if hit]
    if broken:
        raise ValueError(
            f"aux_layer_ids={ids}: {', '.join(broken)}; the verifier has {n} layers, e.g. "
            f"{default_aux_layer_ids(max(n, 2))}"
        )
    return ids


log = logging.getLogger(__name__)
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm")


def find_taps(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The headless decoder of a causal LM, its layers (`num_hidden_layers` of them), its final norm; ValueError when
    the layout is not known."""
    n = model.config.get_text_config().num_hidden_layers
    base: Any = model.get_decoder() or model.base_model
    if hasattr(base, "lm_head"):  # Llama-4's decoder has the head too
        base = base.model
    deeper = [m for k, m in base.named_children() if k == "decoder"]  # OPT's, one level deeper
    for part in (base, *deeper):
        layers = [m for m in part.children() if isinstance(m, nn.ModuleList) and len(m) == n]
        norms = [m for k, m in part.named_children() if k in FINAL_NORMS]
        if len(layers) == len(norms) == 1:
            return base, layers[0], norms[0]
    parts = [k for k, _ in base.named_children()]
    raise ValueError(
        f"{type(model).__name__}: found no list of {n} layers beside a final norm "
        f"({', '.join(FINAL_NORMS)}) in {type(base).__name__}, whose parts are {parts}; "
        "the verifier must be a decoder-only LM with that layout"
    )


@contextmanager
def tapped(
    modules: dict[int, nn.Module],  # layer id -> module whose input is wanted
    stream: int | None = None,  # which of several residual streams, [S, B, L, H]
) -> Iterator[dict[int, torch.Tensor]]:  # layer id -> input of the last call, filled by calls
    "Inside the block, forward pre-hooks store what enters each module."
    taps = {}

    def hook_for(layer_id):
        def hook(module, args, kwargs):
            state = args[0] if args else kwargs["hidden_states"]
            taps[layer_id] = state if state.ndim < 4 else state[stream]

        return hook

    with ExitStack() as stack:
        for layer_id, module in modules.items():
            hook = module.register_forward_pre_hook(hook_for(layer_id), with_kwargs=True)
            stack.enter_context(hook)
        yield taps


def _tensors_beyond(names, config):
    "Of tensors that a language model has no place for, those of layers that its config does not count."
    extra = [
        n for name, n in vars(config).items() if re.search("predict|modules", name) and type(n) is int
    ]  # multi-token-prediction layers follow the last one
    last = config.num_hidden_layers + max(extra, default=0)
    numbered = {k: re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", k) for k in names}
    return [k for k, found in numbered.items() if found and int(found[1]) >= last]


def _head_should_be_tied(model):
    "Whether the config ties head and embeddings, and the loaded ones differ."
    parts = (model.config.get_text_config(), model.config)  # a text part may leave it out
    tie = {getattr(part, "tie_word_embeddings", None) for part in parts}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    differs = head is not None and head.weight is not embeddings.weight
    return differs and True in tie and False not in tie


def loading_problems(model: PreTrainedModel, info: dict[str, Any]) -> list[str]:
    """What is in the weights and not in the config, or the other way round, tensor by tensor; `info` is transformers',
    of `from_pretrained(output_loading_info=True)`."""
    config = model.config.get_text_config()
    found = [f"{k} is missing" for k in sorted(info["missing_keys"])]
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        found.append(f"{name} is {list(stored)}, by the config {list(wanted)}")
    beyond = _tensors_beyond(sorted(info["unexpected_keys"]), config)
    for name in beyond:
        n = config.num_hidden_layers
        found.append(f"{name} is of a layer beyond num_hidden_layers={n}")
    others = sorted(set(info["unexpected_keys"]) - set(beyond))
    if others:
        log.warning(
            "%d tensors of the verifier are no part of a %s and are left out: %s%s",
            len(others),
            type(model).__name__,
            ", ".join(others[:3]),
            " …" if others[3:] else "",
        )
    if _head_should_be_tied(model):
        found.append("the head differs from the embeddings, and by the config (tie_word_embeddings) they are one")
    return found


def not_finite(model: nn.Module) -> list[str]:
    """Names of parameters that hold NaN or infinity. The smallest and the largest value show it, in one fast pass and
    without a copy."""

    def extremes(w):
        # torch has no extremes of 8-bit floats
        return torch.stack((w.bfloat16() if w.itemsize == 1 else w).aminmax())

    return [
        name
        for name, w in model.named_parameters()
        if w.is_floating_point() and w.numel() and not w.is_meta  # what is on the disk
        if not extremes(w.detach()).isfinite().all()
    ]


def auto_class(config: PretrainedConfig) -> Any:
    """The transformers class that builds this verifier, pictures included: AutoModelForCausalLM, or
    AutoModelForImageTextToText for a vision-language model."""
    # the causal class of a vision-language family leaves out the pictures
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _check_folder(path):
    "FileNotFoundError for a folder without config.json or weights."
    folder = Path(path)
    required = {"config.json": "config.json", "*.safetensors": "weights (*.safetensors)"}
    for pattern, what in required.items():
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(
                f"verifier {path!r}: the folder has no {what}; save the model there with save_pretrained"
            )
    for file in folder.glob("*.json"):
        check_length(file)


@contextmanager
def _loading_errors(path, quantised=None):
    "ValueError that names the verifier, for what safetensors and transformers raise."
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (SafetensorError, OSError) as e:
        if isinstance(e, OSError) and (e.filename is not None or str(path) in str(e)):
            raise
        raise ValueError(
            f"verifier {path!r}: its weights cannot be read ({e}); they were probably cut off: fetch or save them again"
        ) from e
    except Exception as e:  # whatever a class of transformers raises for a wrong field
        if isinstance(e, ImportError) and quantised is None:
            raise
        raise _not_built(path, e, quantised) from e


def _not_built(path, error, quantised):
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if quantised is None:
        why = f"transformers cannot build it from its config.json ({what})"
        return ValueError(f"verifier {path!r}: {why}; fetch or save both files again")
    return ValueError(
        f"verifier {path!r}: is quantised ({quantised}), and this machine cannot load it "
        f"({what}); start a server of it (speculators-nb serve) and name that (--source vllm "
        "--server), or take the checkpoint that is not quantised"
    )


@contextmanager
def _attention_errors(path, name):
    "ValueError for an attention that the model has not, or that is not installed."
    try:
        yield
    except (ImportError, ValueError, OSError) as e:
        what = " ".join(str(e.__cause__ or e).split())[:300]
        if name is None or not re.search("attention|attn", what, re.I):
            raise
        raise ValueError(
            f"attn_implementation={name!r}: transformers cannot use it for verifier {path!r} "
            f"here ({what}); leave it out, or name another, e.g. sdpa"
        ) from e


def _quantisation(config) -> str | None:
    "The method by which a checkpoint is quantised; None: it is not."
    found = getattr(config, "quantization_config", None)
    found = found if isinstance(found, dict) else vars(found or object)
    return str(found["quant_method"]) if "quant_method" in found else None


def _unscaled(folder: Path) -> str | None:
    "A tensor of weights whose numbers need a scale that nothing names; None: there is none."
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in sorted(f.keys()):
                kind = f.get_slice(name).get_dtype()
                if name.endswith("weight") and (kind.startswith(("F8", "F4", "I", "U"))):
                    return f"{name} of {file.name} is stored as {kind}"
    return None


def load_model(
    path: str | os.PathLike,  # folder, or hub id
    dtype: str | torch.dtype = "auto",  # "auto": the checkpoint's
    trust_remote_code: bool | None = None,  # run code; None: as `hub_access` says (no)
    attn_implementation: str | None = None,  # e.g. sdpa, eager; None: transformers' choice
    # "auto": over all devices, the rest on the CPU and on the disk; or module -> place
    device_map: str | dict[str, Any] | None = None,
    offload_folder: str | os.PathLike | None = None,  # for what no memory has place for
) -> PreTrainedModel:  # on the CPU, unless `device_map` says otherwise
    """Load from safetensors. FileNotFoundError: no config or no weights in the folder;
    ValueError: they do not belong together, NaN, or quantised as cannot be computed here; an
    attention implementation that there is not, or not for this model."""
    check_options(dict(attn_implementation=attn_implementation))
    path = os.fspath(path)
    if Path(path).is_dir():
        _check_folder(path)
    if trust_remote_code is None:
        trust_remote_code = current_hub_access().remote_code
    config = verifier_config(path, trust_remote_code)
    chosen: dict[str, Any] = dict(device_map=device_map, offload_folder=offload_folder)
    chosen |= dict(attn_implementation=attn_implementation)
    attention = _attention_errors(path, attn_implementation)
    with attention, _loading_errors(path, _quantisation(config)):
        model, info = auto_class(config).from_pretrained(
            path,
            **{name: value for name, value in chosen.items() if value is not None},
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    folder = model_file(path).parent
    if _quantisation(config) is None and (problem := _unscaled(folder)):
        raise ValueError(
            f"verifier {path!r}: {problem}, and config.json has no quantization_config, so its "
            "scale is not known; take both files from one checkpoint"
        )
    if problems := loading_problems(model, info):
        raise ValueError(
            f"verifier {path!r}: config.json and weights do not belong together: "
            f"{'; '.join(problems[:3])}{' …' if problems[3:] else ''} "
            f"({len(problems)} tensors). Take both files from one checkpoint"
        )
    if broken := not_finite(model):
        raise ValueError(
            f"verifier {path!r}: NaN or infinity in "
            f"{', '.join(broken[:3])}{' …' if broken[3:] else ''}; fetch or save the "
            "weights again"
        )
    return model


@dataclass
class VerifierOutput:
    "The result of one forward pass of the verifier."

    logits: torch.Tensor | None  # [B, L, V] or of the last positions that were wanted; or None
    hidden_states: torch.Tensor  # [B, L, A·H] residual stream at aux layers, ascending layer id
    last_hidden_states: torch.Tensor  # [B, L, H] residual stream before the final norm
    past_key_values: DynamicCache | None  # extended by this call; `crop(n)` keeps n positions


class Verifier:
    """An HF causal or vision-language LM (the target model) that returns its residual stream at
    `aux_layer_ids` (vLLM's numbering) and before the final norm."""

    def __init__(
        self,
        model: PreTrainedModel,  # HF causal LM; put into eval mode
        aux_layer_ids: Iterable[int] | None = None,  # ascending, in [0, n]; None: default three
    ):
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.decoder, self.layers, self.norm = find_taps(model)
        self.num_layers = len(self.layers)
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        if aux_layer_ids is None:
            aux_layer_ids = default_aux_layer_ids(self.num_layers)
        self.aux_layer_ids = check_aux_layer_ids(aux_layer_ids, self.num_layers)
        arguments = inspect.signature(self.decoder.forward).parameters
        self._takes_positions = "position_ids" in arguments
        sees = getattr(model.config, "vision_config", None) is not None
        self._stream = getattr(self.config, "altup_active_idx", None)  # Gemma-3n has four
        self.has_vision = sees and model.base_model is not self.decoder  # pictures enter there
        self.static: Any = None  # buffers and graphs of the last request (`static_pass`)
        # tokens of the longest text whose length does not decide its angles
        self.border = same_angles_until(vars(self.config)) or sys.maxsize
        self._dynamic: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == "dynamic"]

    @property
    def device(self):
        return self.model.device

    @property
    def dtype(self):
        return self.model.dtype

    def _tapped_modules(self):
        "Layer id -> module whose input is the residual stream of that id."
        modules = [*self.layers, self.norm]
        return {i: modules[i] for i in {*self.aux_layer_ids, self.num_layers}}

    def _position_ids(self, input_ids, position_ids, attention_mask, cache, with_pictures):
        "None where the model computes its positions itself."
        is_plain_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
        if position_ids is None and is_plain_mask:
            position_ids = positions_of_mask(attention_mask, input_ids.shape[1])
        if self.has_vision and with_pictures:
            return None
        if self.has_vision or (cache is not None and cache.get_seq_length()):
            position_ids = text_positions(input_ids, position_ids, cache)
        return position_ids if self._takes_positions else None

    def until_border(self, n: int) -> int:
        """How many tokens behind n others leave these at their angles. With a RoPE of type longrope or dynamic it is
        those up to the border; beyond it all leave them with the former, none with the latter."""
        if n > self.border:
            return 0 if self._dynamic else sys.maxsize
        return self.border - n

    def _forget_lengths(self):
        "A RoPE of type dynamic keeps the angles of the longest text so far."
        for rotary in self._dynamic:
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            rotary.inv_freq = rotary.original_inv_freq.to(rotary.inv_freq.device)

    def _last_positions(self, n: int) -> int | slice:
        "`logits_to_keep` for the last n positions, such that every layer still reads all."
        # Gemma 4 gives only n positions to the layers that share keys and values, if n is an
        # integer (transformers 5.23)
        shares = getattr(self.config, "num_kv_shared_layers", 0)
        return slice(-n, None) if shares else n

    def _check_lengths(self, taps, length):
        "RuntimeError where a layer was given fewer positions than were read."
        for layer_id, tap in sorted(taps.items()):
            if tap.shape[1] != length:
                raise RuntimeError(
                    f"{type(self.model).__name__}: {tap.shape[1]} of {length} positions enter "
                    f"layer {layer_id} in transformers {transformers.__version__}, so that its "
                    "hidden states are not whole; take another release of transformers"
                )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike,  # folder, or hub id
        aux_layer_ids: Iterable[int] | None = None,  # ascending, in [0, n]; None: default three
        dtype: str | torch.dtype = "auto",  # torch dtype; "auto": the checkpoint's
        device: str | torch.device | None = "cpu",  # torch device
        trust_remote_code: bool | None = None,  # run code; None: as `hub_access` says (no)
        attn_implementation: str | None = None,  # as of `load_model`
        **placed: Any,  # `device_map`, `offload_folder` of `load_model`, in place of `device`
    ) -> "Verifier":  # ready for use
        "Load from safetensors. Errors: as of `load_model`."
        trusted = current_hub_access().remote_code if trust_remote_code is None else trust_remote_code
        if not placed and _quantisation(verifier_config(path, trusted)) is not None:
            placed["device_map"] = {"": device or "cpu"}  # they are not moved afterwards
        model: Any = load_model(path, dtype, trusted, attn_implementation, **placed)
        return cls(model if placed else model.to(device), aux_layer_ids)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,  # [B, L] int64
        attention_mask: torch.Tensor | None = None,  # [B, past + L], 4-D, or one a layer kind
        past_key_values: DynamicCache | None = None,  # cache to extend in place
        want_logits: bool | int = True,  # False: no [H, V] head product; n: last n positions
        position_ids: torch.Tensor | None = None,  # [B, L]; None: from attention mask, cache
        use_cache: bool = True,  # False: no cache is made (one-shot feature extraction)
        inputs: dict | None = None,  # pixel_values, image_grid_thw, mm_token_type_ids, …
    ) -> VerifierOutput:  # logits, aux states, last states, cache
        "One forward pass. Hidden states and logits at padding have no meaning."
        cache: Any = past_key_values
        if cache is None or not cache.get_seq_length():
            self._forget_lengths()
        if cache is None and use_cache:
            cache = new_cache(self.config)
        arguments: dict[str, Any] = dict(attention_mask=attention_mask, use_cache=use_cache)
        arguments |= inputs or {}
        position_ids = self._position_ids(input_ids, position_ids, attention_mask, cache, with_pictures=bool(inputs))
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        if want_logits and want_logits is not True:
            arguments["logits_to_keep"] = self._last_positions(want_logits)
        headless = self.model.base_model if inputs else self.decoder
        reader: Any = self.model if want_logits else headless
        arguments[cache_keyword(type(reader).forward)] = cache
        caught = tapped(self._tapped_modules(), self._stream)
        with caught as taps, scaled_by_position(self.layers, position_ids), folded_heads():
            out = reader(input_ids=input_ids, **arguments)
        self._check_lengths(taps, input_ids.shape[1])
        if inputs and cache is not None:  # text after pictures starts earlier
            cache.position_shift = getattr(self.model.base_model, "rope_deltas", None)
        states = {i: tap.to(input_ids.device) for i, tap in taps.items()}  # of any device
        return VerifierOutput(
            logits=out.logits if want_logits else None,
            hidden_states=torch.cat([states[i] for i in self.aux_layer_ids], -1),
            last_hidden_states=states[self.num_layers],
            past_key_values=cache,
        )


FEW_WEIGHTS = 32e6  # parameters of a verifier that other work than products dominates


def faster_dtype(verifier: Verifier) -> torch.dtype | None:
    """bfloat16 if this CPU multiplies a float32 verifier's matrices, the largest of the first layer, 1.5 times as fast
    in it; None: the verifier's own dtype is as good."""
    if verifier.device.type != "cpu" or verifier.dtype != torch.float32:
        return None
    matrices = [p.detach() for p in verifier.layers[0].parameters() if p.ndim == 2]
    if sum(p.numel() for p in verifier.model.parameters()) < FEW_WEIGHTS or not matrices:
        return None
    weight = max(matrices, key=torch.numel)
    states, seconds = torch.ones(256, weight.shape[1]), {}
    for dtype in (torch.float32, torch.bfloat16):
        factors, times = (states.to(dtype), weight.to(dtype)), []
        for _ in range(5):
            start = time.perf_counter()
            nn.functional.linear(*factors)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return torch.bfloat16 if seconds[torch.bfloat16] * 1.5 < seconds[torch.float32] else None


def computing(verifier: Verifier, dtype: torch.dtype | None) -> torch.autocast:
    "A context: the verifier's products are computed in another number format; None: nothing changes."
    enabled = dtype not in (None, verifier.dtype)
    return torch.autocast(verifier.device.type, dtype, enabled)
