"""Checks of a verifier (target model) before training, and fingerprints of its weights.
Its final norm and head are compared with transformers' own."""

# Targets of training are `softcap(scale * (norm(h) W + b))`, through a norm and a head that are read from the
# verifier's checkpoint. Families differ in the norm (the weight or one plus the weight, centred or not), in a scale
# and in a soft-cap, and the checkpoint does not tell which; a wrong one trains a worse drafter without an error. So
# the norm is compared with transformers' own, built on the `meta` device: features on the disk come without logits.

import copy
import hashlib
import logging
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from ..core.checkpoints import checkpoint_index, hub_access
from ..core.files import read_object
from ..nn.losses import FinalNorm, TargetHead
from ..nn.target_head import (
    check_target_head,
    head_of_family,
    norm_eps,
    norm_kind,
    text_config,
    verifier_config,
)
from .tapped_model import Verifier, auto_class, find_taps

log = logging.getLogger(__name__)
HEAD_TOLERANCE = {torch.float32: 1e-3}  # of the largest logit
HALF_TOLERANCE = 5e-2  # a half-precision verifier rounds hidden states and logits


def head_of(verifier: Verifier) -> TargetHead | None:
    """The target head as training reads it, with the norm and head of a verifier in memory; None: it has no output
    embedding."""
    output = verifier.model.get_output_embeddings()
    if output is None:
        return None
    if getattr(verifier.norm, "weight", None) is None:
        raise ValueError(
            f"{type(verifier.model).__name__}: its final norm has no weight, which a drafter's "
            "target head needs; choose another verifier"
        )
    ours = head_of_family(verifier.model.config).to(verifier.device)
    with align_module_device(verifier.norm), align_module_device(output):
        weight, bias = verifier.norm.get_parameter("weight"), getattr(verifier.norm, "bias", None)
        ours.load_norm({"norm_weight": weight.detach(), "norm_bias": bias})
        ours.set_rows(output.get_parameter("weight").detach(), getattr(output, "bias", None))
    return ours


@torch.no_grad()
def check_verifier_head(verifier: Verifier, input_ids: torch.Tensor) -> None:
    """Compare the target head with the verifier's own logits, after the first 64 token ids [n] of any text. Errors:
    ValueError naming the family."""
    ours = head_of(verifier)
    if ours is None:
        log.warning("%s has no output embedding: its target head is not checked", type(verifier.model).__name__)
        return
    row = torch.as_tensor(input_ids, dtype=torch.long, device=verifier.device)[None, :64]
    out = verifier(row, use_cache=False)
    assert out.logits is not None, "logits are wanted"
    if not (out.last_hidden_states.float().abs() <= 1e18).all():
        return  # refused where the features are written, which names the row
    tolerance = HEAD_TOLERANCE.get(verifier.dtype, HALF_TOLERANCE)
    check_target_head(ours, verifier.model, out.last_hidden_states, out.logits, tolerance=tolerance)


def meta_model(config: PretrainedConfig) -> PreTrainedModel | None:
    "The verifier's model with shapes alone; None: transformers cannot build it."
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config)
    except Exception as e:  # a model's code may fail in any way without weights
        log.info("%s cannot be built without weights: %s", type(config).__name__, e)
        return None


@torch.no_grad()
def check_final_norm(config: PretrainedConfig) -> None:
    """Compare `FinalNorm`, as the family of a verifier is read, with transformers' module. Errors: ValueError naming
    the family."""
    model = meta_model(config)
    if model is None:
        return
    try:
        norm = find_taps(model)[2]
    except ValueError:  # a layout that cannot be tapped has no features of ours
        return
    theirs = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for p in theirs.parameters():
        p.copy_(0.5 + 0.1 * torch.randn(p.shape, generator=generator))
    ours = FinalNorm(text_config(config).hidden_size, norm_kind(config), norm_eps(config))
    ours.weight.copy_(theirs.get_parameter("weight"))
    bias = getattr(theirs, "bias", None)
    if ours.bias is not None and bias is not None:
        ours.bias.copy_(bias)
    states = 3 * torch.randn(4, text_config(config).hidden_size, generator=generator)
    wanted = theirs(states)
    gap = ((ours(states) - wanted).abs().max() / wanted.abs().max()).item()
    if not gap <= 1e-4:
        family = text_config(config).model_type
        raise ValueError(
            f"final norm of {family!r} is read as {ours.kind!r}, and differs from transformers' {type(norm).__name__} "
            f"by {gap:.1e}; add the family to OFFSET_NORM or LAYER_NORM of nn.target_head"
        )


def fingerprint(model: torch.nn.Module) -> str:
    "A hash, 16 hex digits, over name, shape and the first 64 values of every parameter."
    h, names = hashlib.sha256(), {name for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        with align_module_device(module):  # what accelerate keeps on a CPU or a disk
            for part, p in module.named_parameters(recurse=False):
                if (name := f"{path}.{part}".removeprefix(".")) in names:
                    values = p.detach().flatten()[:64].float().cpu().numpy().tobytes()
                    h.update(f"{name}{tuple(p.shape)}".encode() + values)
    return h.hexdigest()[:16]


@dataclass(frozen=True)
class VerifierInfo(os.PathLike):
    """A verifier on the disk: config, files and fingerprint are read once. As a path it is the
    verifier's folder or hub id."""

    name: str  # folder or hub id
    config: PretrainedConfig  # of the whole model, multimodal or not

    @classmethod
    def of(cls, verifier: str | os.PathLike) -> "VerifierInfo":
        "Read a verifier's config; a `VerifierInfo` is returned as it is. Errors: as from `verifier_config`."
        if isinstance(verifier, VerifierInfo):
            return verifier
        return cls(os.fspath(verifier), verifier_config(verifier))

    def __fspath__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name

    @property
    def text(self) -> PretrainedConfig:  # of the language model
        return text_config(self.config)

    @cached_property
    def files(self) -> dict[str, Path]:  # tensor name -> safetensors file that is here
        "Of a hub id: what the cache holds; nothing is fetched."
        with hub_access(local_files_only=True):
            index = checkpoint_index(self.name)
        return {name: file for name, file in index.items() if file.is_file()}

    @cached_property
    def fingerprint(self) -> str | None:
        """That of `fingerprint`, of the model that the files would load as; None: they are not here, or name tensors
        otherwise."""
        try:
            return _stored_fingerprint(self)
        except FileNotFoundError:
            if Path(self.name).is_dir():
                raise
            return None  # a hub id whose weights are not in the cache


def _stored_fingerprint(info):
    "The hash of `fingerprint`, computed from the files."
    model = meta_model(info.config)
    if model is None or any(name not in info.files for name, _ in model.named_parameters()):
        return None
    dtype = getattr(info.config, "dtype", None)
    opened, digest = {}, hashlib.sha256()
    for name, p in model.named_parameters():
        file = info.files[name]
        if file not in opened:
            opened[file] = safe_open(file, "pt")
        stored = opened[file].get_slice(name)
        if tuple(stored.get_shape()) != tuple(p.shape):
            return None
        rows = -(-64 // max(1, p[0].numel())) if p.ndim > 1 else 64  # that hold 64 values
        values = stored[:rows].flatten()[:64]
        if isinstance(dtype, torch.dtype) and values.is_floating_point():
            values = values.to(dtype)
        digest.update(f"{name}{tuple(p.shape)}".encode() + values.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def same_weights(recorded: str | None, verifier: str | os.PathLike) -> bool | None:
    """Whether a verifier (folder or hub id) still is the one whose fingerprint a run or features recorded, by either
    fingerprint; None: not recorded, its files are not here, or they name tensors otherwise than the model (experts one
    by one), whose fingerprint may be the recorded one."""
    if recorded is None or not re.fullmatch("[0-9a-f]{16}", str(recorded)):
        return None
    info = VerifierInfo.of(verifier)
    now = [info.fingerprint]
    if (Path(info) / "config.json").is_file():  # a server records this one
        now.append(checkpoint_fingerprint(info))
    return True if recorded in now else None if info.fingerprint is None else False


def trained_for_another(drafter: str | os.PathLike, verifier: str | os.PathLike) -> str | None:
    """What is wrong, and the remedy, where the record of a drafter's run names a verifier of other weights than the
    model (folder or hub id) that it drafts for now; None: nothing, or it is not known, as of a hub id."""
    file = Path(drafter) / "run.json"
    recorded = read_object(file).get("verifier") if file.is_file() else None
    if same_weights(recorded, verifier) is not False:
        return None
    return (
        f"{drafter} was trained for a verifier of other weights than {verifier} has now (fingerprint {recorded} in "
        "run.json): fewer draft tokens are accepted. Name the verifier that it was trained for, or train on features "
        "of this one (speculators-nb features, train --from-pretrained)"
    )


def warn_of_other_weights(drafter: str | os.PathLike | None, verifier: str | os.PathLike | None):
    "Log that a drafter was trained for another verifier than the folder that it now drafts for."
    if drafter and verifier and Path(verifier).is_dir() and (problem := trained_for_another(drafter, verifier)):
        log.warning("warning: %s", problem)


def checkpoint_fingerprint(folder: str | os.PathLike) -> str:
    """A hash, 16 hex digits, over config.json and the name, shape and first values of every tensor in the files of a
    local model folder."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    names_in = {}  # file -> its tensors
    for name, file in sorted(checkpoint_index(folder).items()):
        names_in.setdefault(file, []).append(name)
    for file, names in names_in.items():
        with safe_open(file, "pt") as f:
            for name in names:
                stored = f.get_slice(name)
                shape = stored.get_shape()
                values = stored[:1].flatten()[:64] if shape else f.get_tensor(name)
                values = values.float().contiguous().numpy()
                digest.update(f"{name}{shape}".encode() + values.tobytes())
    return digest.hexdigest()[:16]
