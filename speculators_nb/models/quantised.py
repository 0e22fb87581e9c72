"""Weights of a drafter that were stored in eight or four bits, made whole, and FP8 written for vLLM.
Nothing here computes with them: training, decoding and converting take whole weights."""

import copy
import logging
import os
import re
from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import Any

import torch

from ..core.checkpoints import FLOATS, FP8, to_fp8
from ..core.config import SpeculatorModelConfig
from ..core.files import read_object

# A weight [O, I] in FP8 has a scale beside it, that of the tensor, of each row or of each block, and is codes · scale.
# compressed-tensors (`float-quantized`) and NVIDIA ModelOpt call it weight_scale, DeepSeek and Transformers
# (`quant_method: fp8`) weight_scale_inv, and it is no inverse. What is quantised is read off the tensors; config.json
# says how large a block is.

log = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]  # name -> tensor
METHODS = ("compressed-tensors", "fp8", "modelopt")  # whose FP8 is read
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2")
# of activations and of the KV cache, which an engine rounds and nothing here
OF_ENGINES = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale")
BLOCK = [128, 128]  # rows and columns that share a scale, where config.json does not say
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # what three bits mean; a fourth is the sign
WRITTEN = re.compile(r"(layers\.\d+\.(self_attn|mlp)\.\w+_proj|fc)\.weight")  # what is written in FP8


def _object(value):
    return value if isinstance(value, dict) else {}


def stored_quantization(folder: str | os.PathLike) -> dict[str, Any]:
    """How a drafter's weights are quantised, by its config.json, in the draft layers or beside them, or by
    hf_quant_config.json, which older versions of ModelOpt write; {}: nothing says so."""
    config, modelopt = (Path(folder) / name for name in ("config.json", "hf_quant_config.json"))
    fields = read_object(config) if config.is_file() else {}
    for block in (_object(fields.get("transformer_layer_config")), fields):
        if found := _object(block.get("quantization_config")):
            return found
    found = _object(read_object(modelopt).get("quantization")) if modelopt.is_file() else {}
    return found and {"quant_method": "modelopt"} | found


def unquantised_config(config: SpeculatorModelConfig) -> SpeculatorModelConfig:
    "A drafter's config for whole weights: without quantization_config; a copy where it has one."
    if "quantization_config" in vars(config) | vars(getattr(config, "transformer_layer_config", config)):
        config = copy.deepcopy(config)
        for part in (config, getattr(config, "transformer_layer_config", config)):
            vars(part).pop("quantization_config", None)
    return config


def block_size(quantization: dict[str, Any]) -> tuple[int, int]:
    "Rows and columns of a block that shares a scale."
    groups = _object(quantization.get("config_groups")).values()
    sizes = [_object(_object(group).get("weights")).get("block_structure") for group in groups]
    size = next(filter(None, [quantization.get("weight_block_size"), *sizes]), BLOCK)
    if not (isinstance(size, list) and [type(n) for n in size] == [int, int] and min(size) > 0):
        raise ValueError(f"quantization_config: a block of {size!r}; write rows and columns there, e.g. [128, 128]")
    return size[0], size[1]


def from_fp8(name: str, tensors: Tensors, block: tuple[int, int]) -> torch.Tensor:  # [O, I] float32
    "A weight in FP8 times its scale. Errors: ValueError for a scale that is missing, or of another shape."
    codes = tensors[name]
    of = next((n for n in (f"{name}_scale", f"{name}_scale_inv") if n in tensors), None)
    if of is None:
        raise ValueError(
            f"tensor {name} is FP8 and has no {name}_scale; fetch the checkpoint again, with all its files"
        )
    if not tensors[of].is_floating_point():  # exponents of two, of MXFP8
        raise ValueError(
            f"tensor {of} holds {tensors[of].dtype}, no factors; take the checkpoint that is not quantised"
        )
    scale = tensors[of].float()
    blocks = tuple(ceil(n / size) for n, size in zip(codes.shape, block))
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif tuple(scale.shape) in ((len(codes),), (len(codes), 1)):
        scale = scale.reshape(-1, 1)
    elif tuple(scale.shape) == blocks:
        scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        scale = scale[: codes.shape[0], : codes.shape[1]]
    else:
        raise ValueError(
            f"tensor {of} has shape {tuple(scale.shape)}, for a weight of {tuple(codes.shape)}; needed is one number, "
            f"one for each row, or {blocks}, one for each block of {block[0]} x {block[1]} (weight_block_size)"
        )
    return codes.float() * scale


def from_nvfp4(name: str, tensors: Tensors) -> torch.Tensor:  # [O, I] float32
    """A weight that NVIDIA ModelOpt stored in four bits, two in a byte, the lower half first: value times the scale of
    its 16 times the scale of its tensor. weight uint8 [O, I/2], weight_scale float8 [O, I/16], weight_scale_2 [1]."""
    packed, signed = tensors[name], torch.cat([E2M1, -E2M1])
    scale = tensors[f"{name}_scale_2"].float() * tensors[f"{name}_scale"].float()
    values = signed[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
    return (values.unflatten(-1, (-1, 16)) * scale[..., None]).flatten(-2)


def whole_weights(
    tensors: Tensors,  # as stored
    quantization: dict[str, Any],  # of `stored_quantization`
    source: str | os.PathLike,  # for messages
    dtype: torch.dtype | None = None,  # of what was quantised; None: that of what was not
    quiet: bool = False,  # they are looked at and not used: nothing is logged
) -> Tensors:  # without scales
    """Quantised weights multiplied by their scales in float32 and rounded once; all else as it is. Errors: ValueError
    for another quantisation, a scale that is missing, of another shape, or not finite."""
    plain = (*FLOATS, torch.int64, torch.bool)
    odd = [n for n, w in tensors.items() if w.dtype not in plain and not n.endswith(("d2t", "t2d"))]
    if not odd:
        return tensors
    method = quantization.get("quant_method")
    transforms = _object(quantization.get("transform_config")).get("config_groups")
    whole: Tensors = {}
    left = {n: w for n, w in tensors.items() if n.rpartition(".")[2] not in (*SCALES, *OF_ENGINES)}
    dtype = dtype or next((w.dtype for w in left.values() if w.dtype in FLOATS), torch.bfloat16)
    for name, weight in left.items():
        try:
            if weight.dtype is FP8 and weight.ndim == 2:
                wide = from_fp8(name, tensors, block_size(quantization))
            elif {f"{name}_scale", f"{name}_scale_2"} <= tensors.keys():
                wide = from_nvfp4(name, tensors)
            else:
                continue
        except (RuntimeError, ValueError) as e:  # the former of torch, for shapes
            raise ValueError(f"{source}: {e}") from None
        if not wide.isfinite().all():
            raise ValueError(f"{source}: tensor {name} times its scale is NaN or infinity; fetch the checkpoint again")
        whole[name] = wide.to(dtype)
    other = next((name for name in odd if name in left and name not in whole), None)
    if quantization and (method not in (*METHODS, None) or transforms or other or not whole):
        name = other or odd[0]
        rotated = ", and transform_config is set" if transforms else ""
        raise ValueError(
            f"{source}: quantization_config.quant_method={method!r}: {name} holds {tensors[name].dtype}{rotated}; a "
            f"drafter is read in FP8 ({', '.join(METHODS)}), and in ModelOpt's NVFP4; take its checkpoint that is not "
            "quantised"
        )
    if not whole:  # numbers of another kind, which who reads them refuses
        return tensors
    if not quiet:
        log.warning("%s: %d weights are stored quantised, and read as %s", source, len(whole), dtype)
    return left | whole


def fp8_weights(state: Tensors) -> Tensors:  # name -> tensor
    """A drafter's tensors with the matrices of its decoder layers and `fc` in FP8, and a scale [O, 1] float32 for each
    row; all others as they are."""
    written = dict(state)
    for name in filter(WRITTEN.fullmatch, state):
        written[name], written[f"{name}_scale"] = to_fp8(state[name], (1,))
    return written


def compressed_tensors_config(linears: Iterable[str]) -> dict[str, Any]:  # names of all linear layers of a drafter
    """The quantization_config of `fp8_weights`, in the words of compressed-tensors: a scale for each row of a weight,
    activations rounded in the engine with a scale for each token. vLLM numbers draft layers behind the verifier's, so
    what stays as it is is named without numbers."""
    kept = sorted({re.sub(r".*\.\d+\.", "", name) for name in linears if not WRITTEN.fullmatch(f"{name}.weight")})
    common = dict(num_bits=8, type="float", symmetric=True)
    group = dict(
        targets=["Linear"],
        weights=common | dict(strategy="channel", dynamic=False),
        input_activations=common | dict(strategy="token", dynamic=True),
    )
    return dict(
        quant_method="compressed-tensors",
        format="float-quantized",
        quantization_status="compressed",
        config_groups=dict(group_0=group),
        ignore=[rf"re:(.*\.)?{name}$" for name in kept],
    )
