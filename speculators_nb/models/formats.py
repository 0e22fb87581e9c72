"""Checkpoint formats of other projects: a table of readers and writers, and what they share.
Most differ from ours in names alone."""

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from ..core.checkpoints import (
    inside,
    load_pickle,
    load_tensors,
    read_index,
    resolve_checkpoint,
    save_tensors,
    tensor_names,
)
from ..core.config import import_models, layer_config_from_dict
from ..core.files import read_object, write_object
from ..nn.layers import ALIKE_FAMILIES, LATENT_FAMILIES, LAYER_FAMILIES, layer_window
from ..nn.target_head import text_config, verifier_config
from ..verifier.parts import load_verifier_tensors
from .quantised import Tensors, stored_quantization, whole_weights

# A foreign checkpoint is a `config.json` and tensors, safetensors or a pickle that `load_pickle` reads as data, in one
# file or in shards that an index names. All of it came from elsewhere, so no file name in it may lead out of its
# folder. Research code keeps the configuration of the draft layers in the top level of `config.json`; what belongs to
# the layers is what their class in transformers declares. Two fields follow the verifier: the longest text, and full
# attention where no kind is given.


Folder = str | os.PathLike  # made if absent
FieldsAndTensors = tuple[dict[str, Any], Tensors]  # fields of our config and `speculative_tokens`; our names


class Target(NamedTuple):
    "The verifier that a drafter is for."

    path: str  # folder or hub id
    config: PretrainedConfig  # of its language model


@dataclass(frozen=True)
class NativeFormat:
    "How another project stores the checkpoints of one algorithm."

    name: str  # what a person calls it
    model_type: str  # `speculators_model_type` of what it becomes
    about: str  # whose it is
    looks_for: str  # what `recognises` asks for, in words
    recognises: Callable[[dict, set[str]], bool]  # of config.json, and the tensors' names
    read: Callable[..., FieldsAndTensors]  # (NativeCheckpoint, Target); errors: ValueError
    # (our config, our names -> tensors, Folder, Target or None); errors: ValueError for what has no place there
    write: Callable
    files: tuple[str, ...] = ()  # names of weight files that no other format has


FORMATS: dict[str, NativeFormat] = {}


def register_format(entry: NativeFormat):  # replaces one with the same name
    "Enter a format in the table."
    FORMATS[entry.name] = entry


def formats(model_type: str | None = None) -> list[NativeFormat]:  # only those of one algorithm
    "All formats, algorithm by algorithm, in the same order whatever was imported first."
    import_models()
    chosen = [f for f in FORMATS.values() if model_type in (None, f.model_type)]
    return sorted(chosen, key=lambda entry: entry.model_type)


def format_named(name: str) -> NativeFormat:  # as `formats` lists it
    "The format of this name. Errors: KeyError."
    import_models()
    return FORMATS[name]


def verifier_target(verifier: str | os.PathLike, trust_remote_code: bool | None = None) -> Target:
    "A verifier's path and configuration. A folder's path is made absolute, because it is written into checkpoints."
    path = Path(verifier).resolve() if Path(verifier).is_dir() else verifier
    return Target(str(path), text_config(verifier_config(verifier, trust_remote_code)))


WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)  # in the order in which they are looked for


def find_weights(source: str | os.PathLike) -> tuple[Path, Path]:  # -> folder; weights, or index of shards
    "Where a foreign checkpoint is. Errors: FileNotFoundError naming the files looked for."
    path = Path(source)
    if path.is_file():
        return path.parent, path
    special = [file for entry in formats() for file in entry.files]
    folder = resolve_checkpoint(source, ("*.json", "*.safetensors", "*.bin", *special))
    known = [*special, *WEIGHTS]
    for name in known:
        if (folder / name).is_file():
            return folder, inside(folder, name)
    raise FileNotFoundError(
        f"{source}: no weights found; looked for {', '.join(known)}. If they have another "
        "name, give that file instead of the folder"
    )


def pickled_tensors(file: Path) -> Tensors:  # name -> tensor
    "Read a pickle of weights. Errors: ValueError for one that contains anything else."
    content = load_pickle(file)
    if isinstance(content, dict):
        wrong = [
            str(name)
            for name, value in content.items()
            if not (isinstance(name, str) and isinstance(value, torch.Tensor))
        ]
    else:
        wrong = [type(content).__name__]
    if wrong:
        raise ValueError(f"{file}: weights are a dictionary of name and tensor; this holds {', '.join(wrong[:3])}")
    return content


def read_tensors(file_of: dict[str, Path], pickle: Callable[[Path], Tensors] = pickled_tensors) -> Tensors:
    """The tensors of some files, safetensors or pickles (read by `pickle`), in the order of their names. Errors:
    ValueError for one that its file lacks."""
    found: Tensors = {}
    for file in sorted(set(file_of.values())):
        names = [name for name in file_of if file_of[name] == file]
        if file.suffix == ".safetensors":
            found |= load_tensors(file, names)
            continue
        content = pickle(file)
        if absent := [name for name in names if name not in content]:
            raise ValueError(f"{file}: no tensor named {', '.join(absent[:3])}, which the index lists")
        found |= {name: content[name].clone() for name in names}  # a pickle's tensors may share memory
    return {name: found[name] for name in file_of}


# computed from the config, stored by old versions
BUFFERS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


class NativeCheckpoint:
    """A drafter's checkpoint as another project wrote it. Errors: FileNotFoundError naming the
    files that were looked for; ValueError for what is not JSON or no tensor."""

    def __init__(
        self,
        source: str | os.PathLike,  # folder, hub id, or the file with the weights
        dtype: torch.dtype | None = None,  # of weights that are stored quantised; None: of the others
    ):
        self.name, self.dtype = str(source), dtype
        self.folder, self.file = find_weights(source)
        config = self.folder / "config.json"
        # {} where there is none
        self.config = read_object(config) if config.is_file() else {}
        self._pickles: dict[Path, Tensors] = {}

    def config_value(self, name: str, default: Any = None, block: str | None = None) -> Any:
        "A field of config.json, of a nested object before the top level; the default where it is absent or null."
        nested = self.config.get(block) or {}
        for fields in (nested, self.config):
            if fields.get(name) is not None:
                return fields[name]
        return default

    def _pickle(self, file):
        if file not in self._pickles:
            self._pickles[file] = pickled_tensors(file)
        return self._pickles[file]

    @cached_property
    def index(self) -> dict[str, Path]:  # tensor name -> file
        "Where each tensor is."
        if self.file.name.endswith(".index.json"):
            file_of = read_index(self.file)
        elif self.file.suffix == ".safetensors":
            file_of = dict.fromkeys(tensor_names(self.file), self.file)
        else:
            file_of = dict.fromkeys(self._pickle(self.file), self.file)
        return {name: file for name, file in file_of.items() if not BUFFERS.fullmatch(name)}

    def tensors(self, prefix: str = "") -> Tensors:  # of the names wanted -> as stored, but for quantised weights
        "Read tensors. Errors: ValueError for one that the index names and its file lacks; as from `whole_weights`."
        stored = read_tensors({n: f for n, f in self.index.items() if n.startswith(prefix)}, self._pickle)
        return whole_weights(stored, stored_quantization(self.folder), self.name, self.dtype)


def rename(tensors: dict[str, Any], table: dict[str, str]) -> dict[str, Any]:  # old prefix -> new; the first that fits
    "Exchange the prefixes of names."

    def new_name(name):
        for old, new in table.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return {new_name(name): tensor for name, tensor in tensors.items()}


def inverse(table: dict[str, str]) -> dict[str, str]:
    "The table of prefixes that renames back."
    return {new: old for old, new in table.items()}


NOT_OF_LAYERS = {"architectures", "dtype", "quantization_config", "transformers_version", "_name_or_path"}
SOMETIMES_UNDECLARED = {
    "rope_theta",
    "rope_scaling",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
# whose angles come from what is beside them in rope_parameters alone, here and in vLLM
LENGTH_FREE = ("default", "linear", "yarn", "llama3", "proportional")
log = logging.getLogger(__name__)


def reaching(layers: PretrainedConfig, length: int) -> PretrainedConfig:  # positions; -> `layers`, changed
    """Raise `max_position_embeddings`, and keep every angle: what transformers derives from
    that field is written first. Types whose angles depend on it all the same keep it."""
    trained = layers.max_position_embeddings
    stored = getattr(layers, "rope_parameters", None) or {}
    ropes = [rope for rope in stored.values() if isinstance(rope, dict)] or [stored]
    kinds = [rope.get("rope_type", "default") for rope in ropes]
    if trained >= length:
        return layers
    if bound := [kind for kind in kinds if kind not in LENGTH_FREE]:
        log.warning(
            "max_position_embeddings stays %d, as trained, and not the verifier's %d: the "
            "angles of rope_type=%r depend on it",
            *(trained, length, bound[0]),
        )
        return layers
    for rope, kind in zip(ropes, kinds):
        if kind in ("yarn", "llama3"):
            original = rope.setdefault("original_max_position_embeddings", trained)
            if kind == "yarn" and rope.get("factor", 1) is None:
                rope["factor"] = trained / original
    layers.max_position_embeddings = length
    return layers


def layer_config(native: NativeCheckpoint, target: Target, names: list[str], **fields) -> PretrainedConfig:
    "The configuration of draft layers from the top level of config.json. Errors: ValueError where there is none."
    if "hidden_size" not in native.config:
        raise ValueError(
            f"{native.name}: no config.json with hidden_size beside {native.file.name}; the "
            "sizes of attention heads do not follow from the tensors"
        )
    stored = {".".join(name.split(".")[-2:]) for name in names}
    family = native.config.get("model_type")
    if "kv_a_proj_with_mqa.weight" in stored:  # deepseek_v2, kimi_k2, …
        family = LATENT_FAMILIES[0]
    elif family not in LAYER_FAMILIES:
        family = "qwen3" if "q_norm.weight" in stored else "llama"
    declared = {*CONFIG_MAPPING[family]().to_dict(), *SOMETIMES_UNDECLARED}
    known = declared - NOT_OF_LAYERS - {"model_type"} - ({"head_dim"} if family in LATENT_FAMILIES else set())
    fields = {name: v for name, v in native.config.items() if name in known} | fields
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name) or {}
        if "mrope" in (rope.get("rope_type"), rope.get("type")):  # Qwen2-VL's word for three coordinates
            fields[name] = rope | dict(rope_type="default", type="default")
    own_kinds = family == "qwen3" and fields.get("use_sliding_window")  # which its class in transformers derives
    if not fields.get("layer_types") and not own_kinds:
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    layers = layer_config_from_dict(fields | dict(model_type=family, tie_word_embeddings=False))
    if family == "llama" and "q_proj.bias" in stored and "o_proj.bias" not in stored:
        slides = "sliding_attention" in (layers.layer_types or ())
        biased = dict(model_type="qwen2", attention_bias=False, use_sliding_window=slides)
        layers = layer_config_from_dict(layers.to_dict() | biased)
    return reaching(layers, target.config.max_position_embeddings)


def flat_config(config: PretrainedConfig, **others) -> dict[str, Any]:  # -> a config.json
    """Draft layers in the top level, as a research checkpoint stores them; RoPE in the words of transformers 5, and in
    those of earlier versions. Layers of Mistral and Qwen2 are Llama's, with a window or with biases on q, k, v."""
    left_out = NOT_OF_LAYERS - {"architectures"}
    fields = {name: v for name, v in config.to_dict().items() if name not in left_out}
    if config.model_type in ALIKE_FAMILIES:
        windows = [layer_window(config, i) for i in range(config.num_hidden_layers)]
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        fields |= dict(model_type="llama", layer_types=kinds, qkv_bias=config.model_type == "qwen2")
    rope = dict(fields.get("rope_parameters") or {})
    if not any(isinstance(value, dict) for value in rope.values()):  # by layer type: new alone
        fields["rope_theta"] = rope.pop("rope_theta", config.default_theta)
        scaled = rope.get("rope_type", "default") != "default"
        fields["rope_scaling"] = rope if scaled else None
    return fields | others


NO_SCALE = {"logit_scale": (None, 1)}  # vLLM (0.32) multiplies the logits of EAGLE-3, P-EAGLE and Medusa by it


def check_neutral(native: NativeCheckpoint, options: dict[str, tuple], block: str | None = None):
    "Errors: ValueError for an option with a value that has an effect: the drafter here does not have it."
    for name, neutral in options.items():
        value = native.config_value(name, block=block)
        if value not in neutral:
            raise ValueError(f"{native.name}: {name} is {value!r}, and a drafter of this kind has no such option here")


def count_layers(names: Iterable[str], pattern: str = r"layers\.(\d+)\.") -> int:
    "How many decoder layers there are, or what else a number in the tensors' names counts: one more than the highest."
    found = [re.match(pattern, name) for name in names]
    return 1 + max((int(match[1]) for match in found if match), default=-1)


BORROWED = {"embed_tokens.weight": "embeddings", "lm_head.weight": "head"}


def without_borrowed(tensors: Tensors, target: Target, source: str) -> Tensors:
    """Leave out copies of the verifier's tensors, rounded ones too. They are compared where its weights are here.
    Errors: ValueError for what is no copy."""
    for name in [name for name in BORROWED if name in tensors]:
        try:
            theirs = load_verifier_tensors(target.path)[BORROWED[name]]
        except FileNotFoundError:
            continue
        own = tensors[name]
        if own.shape != theirs.shape:
            raise ValueError(
                f"{source}: {name} is {tuple(own.shape)}, that of verifier {target.path!r} "
                f"{tuple(theirs.shape)}; the drafter is for another verifier"
            )
        gap = (own.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        if not gap <= 0.01:
            raise ValueError(
                f"{source}: {name} differs from that of verifier {target.path!r} by {gap:.2g} of its largest entry, "
                "and nothing says that it is the drafter's own; is the drafter for another verifier?"
            )
    return {name: w for name, w in tensors.items() if name not in BORROWED}


def vocab_mapping(tensors: Tensors, vocab_size: int, source: str) -> Tensors:  # -> t2d, d2t; {}: all tokens
    "A draft vocabulary in our form. Errors: ValueError for tokens that the verifier lacks."
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if t2d is None:
            return {}
        kept = t2d.bool().nonzero()[:, 0]
        d2t = kept - torch.arange(len(kept))
    kept = torch.arange(len(d2t)) + d2t.long()
    if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < vocab_size:
        raise ValueError(
            f"{source}: d2t leads to tokens {int(kept.min())} to {int(kept.max())}, the verifier has {vocab_size}; "
            "the drafter is for another verifier"
        )
    if t2d is None:
        t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    if len(t2d) == len(d2t) and bool((d2t == 0).all()):
        return {}
    return {"t2d": t2d.bool(), "d2t": d2t.long()}


def save_native(model: Any, folder: Folder, dtype: torch.dtype | None = None):
    "Write the layout that other projects and engines read. Errors: ValueError for what it has no place for."
    state = model.saved_state()
    if dtype is not None:
        state = {name: w.to(dtype) if w.is_floating_point() else w for name, w in state.items()}
    format_named(model.native_format).write(model.config, state, folder)


def write_native(folder: str | os.PathLike, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors"):
    "Write a checkpoint of another project's format: the weights, then config.json, each atomically."
    folder = Path(folder)
    save_tensors(tensors, folder / file, metadata={"format": "pt"})
    dtypes = [w.dtype for w in tensors.values() if w.is_floating_point()]
    dtype = str(dtypes[0]).removeprefix("torch.") if dtypes else None
    write_object(folder / "config.json", config | {"dtype": dtype}, indent=2)
