"""Converts drafters between other projects' checkpoint formats and this library's, and to FP8 for vLLM.
Tensors are renamed and nothing is computed, so nothing is lost on the way back; but for quantised weights."""

import inspect
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.checkpoints import hub_access, resolve_checkpoint, save_tensors
from ..core.config import SpeculatorModelConfig, SpeculatorsConfig
from ..core.files import atomic_folder
from ..core.options import check_options, near, shown
from ..core.provenance import write_provenance
from ..verifier.folders import new_folder, refuse_own
from .base import FOREIGN, SpeculatorModel, commonest_dtype, stored_state
from .formats import FieldsAndTensors, NativeCheckpoint, NativeFormat, Target, Tensors, formats, verifier_target
from .quantised import compressed_tensors_config, fp8_weights, unquantised_config


def recognise(native: NativeCheckpoint) -> NativeFormat:
    "The one format that fits a checkpoint. Errors: ValueError for none or several."
    refuse_own(native.config, native.name)
    names = set(native.index)
    fitting = [entry for entry in formats() if entry.recognises(native.config, names)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"{native.name} fits several formats: {', '.join(f.name for f in fitting)}; choose one with format="
        )
    looked = "; ".join(f"{f.name} ({f.about}): {f.looks_for}" for f in formats())
    raise ValueError(
        f"{native.name} is a drafter of no known format. Looked for {looked}. The checkpoint "
        f"has {', '.join(sorted(names)[:6])}{' …' if len(names) > 6 else ''} "
        f"({len(names)} tensors), architectures {native.config.get('architectures')}, "
        f"model_type {native.config.get('model_type')!r}."
    )


def detect(source: str | os.PathLike) -> str:  # -> name of its format
    """Recognise a foreign checkpoint by its config.json and the names of its tensors. Errors:
    ValueError listing what was looked for; FileNotFoundError where there are no weights."""
    return recognise(NativeCheckpoint(source)).name


def choose_format(name: str, known: list[NativeFormat], available: str) -> NativeFormat:
    "One of the known formats. Errors: ValueError listing them."
    for entry in known:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in known) or "no format"
    raise ValueError(f"format={name!r}: {available} {names}")


def json_object(config: dict | str | None) -> dict[str, Any]:
    "A dictionary, or JSON of one. Errors: ValueError."
    reason = ""
    try:
        value = json.loads(config) if isinstance(config, str) else dict(config or {})
    except (ValueError, RecursionError) as e:
        value, reason = None, f" ({e})"
    if isinstance(value, dict):
        return value
    raise ValueError(
        f'config={shown(config)} is not a JSON object{reason}; write for instance {{"norm_before_residual": true}}'
    )


def check_fields(given: dict[str, Any], config_class: type[SpeculatorModelConfig]):  # field -> value
    "Errors: ValueError for a field that the drafter's config does not have."
    known = [*inspect.signature(config_class).parameters, "speculative_tokens"]
    for name in given:
        if name not in known:
            raise ValueError(
                f"config={shown(given)}: {config_class.speculators_model_type} has no field "
                f"{name!r}. {near(name, known)}"
            )


def check_sizes(config: SpeculatorModelConfig, target: Target, source: str):  # source: for messages
    "Errors: ValueError for a verifier of another vocabulary or width."
    sizes = config.sizes
    hidden_size = getattr(config, "target_hidden_size", None) or sizes.hidden_size
    for what, own, theirs in (
        ("vocabulary", sizes.vocab_size, target.config.vocab_size),
        ("hidden_size", hidden_size, target.config.hidden_size),
    ):
        if own != theirs:
            raise ValueError(
                f"{source} is for a verifier with {what} {own}, {target.path!r} has {theirs}; "
                "give the verifier that it was trained for"
            )


def read_foreign(entry: NativeFormat, native: NativeCheckpoint, target: Target) -> FieldsAndTensors:
    "Read a checkpoint. Errors: ValueError, also for tensors and fields of another kind."
    try:
        return entry.read(native, target)
    except (IndexError, TypeError, KeyError, AttributeError, RuntimeError) as e:
        raise ValueError(
            f"{native.name}: a tensor or a field has another shape or type than in the format "
            f"{entry.name} ({type(e).__name__}: {' '.join(str(e).split())[:200]}); fetch the "
            "checkpoint again, or name its format"
        ) from e


class Converted(NamedTuple):
    "A foreign drafter in this library's form."

    config: SpeculatorModelConfig
    state: Tensors  # our name -> tensor
    format: NativeFormat  # that it was stored in
    speculative_tokens: int  # for engines


def converted(
    source: str | os.PathLike,  # the foreign drafter: folder, hub id, or file with its weights
    verifier: str | os.PathLike,  # folder or hub id of the verifier that it was trained for
    format: str | None = None,  # a name that `detect` gives; None: look
    speculative_tokens: int | None = None,  # None: the source's or format's own
    given: dict[str, Any] | None = None,  # config.json fields missing or wrong in source
    trust_remote_code: bool = False,  # run configuration code that comes with the verifier
    dtype: torch.dtype | None = None,  # of weights that are stored quantised; None: of the others
) -> Converted:
    """Read a foreign drafter. Tensors are renamed and keep values and dtype, but for quantised weights, which are made
    whole (`quantised.whole_weights`); names and shapes are checked against the model that the new config describes, and
    its sizes against the verifier. Errors: as from `convert`."""
    native = NativeCheckpoint(source, dtype)
    with hub_access(revision="main"):  # the verifier is another model
        target = verifier_target(verifier, trust_remote_code or None)
        if format is None:
            entry = recognise(native)
        else:
            entry = choose_format(format, formats(), "known are")
        fields, state = read_foreign(entry, native, target)
        model_class = SpeculatorModel.registered_class(entry.model_type)
        check_fields(given or {}, model_class.config_class)
        fields |= given or {}
        own_tokens = fields.pop("speculative_tokens")
        tokens = speculative_tokens or own_tokens
        shared = SpeculatorsConfig.greedy(entry.model_type, tokens, target.path)
        config = model_class.config_class(**fields, speculators_config=shared)
    check_sizes(config, target, native.name)
    with torch.device("meta"):
        model_class.class_of(config)(config).check_state(state, native.name)
    return Converted(config, state, entry, tokens)


def read_drafter(path, verifier, dtype):
    "What `SpeculatorModel.from_pretrained(verifier=)` does with a foreign checkpoint."
    found = converted(path, verifier, dtype=dtype)
    return found.config, found.state


FOREIGN.append(read_drafter)


def convert(
    source: str | os.PathLike,  # the foreign drafter: folder, hub id, or file with its weights
    output_dir: str | os.PathLike,  # the new checkpoint; must not exist
    verifier: str | os.PathLike,  # folder or hub id of the verifier that it was trained for
    format: str | None = None,  # a name that `detect` gives; None: look
    speculative_tokens: int | None = None,  # for engines; None: the source's or format's own
    config: dict | str | None = None,  # config.json fields missing or wrong in source; or JSON
    trust_remote_code: bool = False,  # run configuration code that comes with the verifier
) -> str:  # the new folder
    """Convert a foreign drafter to this library's checkpoint, see `converted`.
    Errors: FileExistsError; ValueError for an unknown format, missing, unexpected or misshapen
    tensors, another verifier, or a pickle that holds more than tensors."""
    options: dict[str, Any] = dict(source=source, output_dir=output_dir, verifier=verifier)
    options |= dict(format=format, speculative_tokens=speculative_tokens)
    if not isinstance(config, str):
        options["config"] = config
    check_options(options, "convert")
    output, given = new_folder(output_dir), json_object(config)
    found = converted(
        source,
        verifier,
        format=format,
        speculative_tokens=speculative_tokens,
        given=given,
        trust_remote_code=trust_remote_code,
    )
    with torch.device("meta"):
        model = SpeculatorModel.registered_model_class_from_config(found.config)(found.config)
    model.not_saved = type(model).not_saved  # a whole head that was read is the drafter's own
    with atomic_folder(output, replace=False) as folder:
        model.to(commonest_dtype(found.state)).save_pretrained(folder, state_dict=found.state)
        settings: dict[str, Any] = dict(format=found.format.name, config=given)
        settings["speculative_tokens"] = found.speculative_tokens
        sources = {"source": source, "verifier": verifier}
        write_provenance(folder, "convert", settings, sources)
    return str(output)


def saved_tensors(config: SpeculatorModelConfig, folder: Path, checkpoint: str | os.PathLike) -> Tensors:
    "A drafter's own tensors, checked against its config; those of the verifier are left out."
    state = stored_state(folder)
    model_class = SpeculatorModel.registered_model_class_from_config(config)
    with torch.device("meta"):
        model = model_class(config)
    model.check_state(state, checkpoint)
    left_out = ("verifier_", *model_class.not_saved)  # a whole head that is stored is its own
    return {name: w for name, w in state.items() if not name.startswith(left_out)}


def export_native(
    checkpoint: str | os.PathLike,  # a drafter of this library or of upstream's
    output_dir: str | os.PathLike,  # the foreign checkpoint; must not exist
    format: str | None = None,  # a name from `detect`; None: the first of the drafter's type
    verifier: str | os.PathLike | None = None,  # folder or hub id; None: the config's, if local
    trust_remote_code: bool = False,  # run configuration code that comes with the verifier
) -> str:  # the new folder
    """The inverse of `convert`: write a drafter as other projects store it. Errors:
    FileExistsError; ValueError for a type without foreign format, a format of another type,
    or a drafter that the format has no place for."""
    options = dict(checkpoint=checkpoint, output_dir=output_dir, format=format)
    check_options(options | dict(verifier=verifier), "export")
    output, folder = new_folder(output_dir), resolve_checkpoint(checkpoint)
    config = SpeculatorModelConfig.from_pretrained(folder)
    kind = config.speculators_model_type
    known = formats(kind)
    if not known:
        raise ValueError(
            f"{str(checkpoint)!r} is of type {kind!r}, which no other project stores in a way of its own; there are "
            f"{', '.join(sorted({entry.model_type for entry in formats()}))}"
        )
    entry = known[0]
    if format is not None:
        entry = choose_format(format, known, f"a drafter of type {kind!r} can be written as")
    named = verifier
    if not named and config.speculators_config:
        named = config.speculators_config.verifier.name_or_path
    target = None
    if named and (verifier or (Path(named) / "config.json").is_file()):
        target = verifier_target(named, trust_remote_code or None)
    state = saved_tensors(config, folder, checkpoint)
    with atomic_folder(output, replace=False) as new:
        entry.write(config, state, new, target)
        sources = {"checkpoint": checkpoint, "verifier": named}
        write_provenance(new, "export_native", dict(format=entry.name), sources)
    return str(output)


def export_fp8(
    checkpoint: str | os.PathLike,  # a drafter of this library or of upstream's
    output_dir: str | os.PathLike,  # the new checkpoint; must not exist
) -> str:  # the new folder
    """A copy of a drafter for vLLM whose decoder layers and `fc` are FP8, in compressed-tensors' form: a scale for each
    row; norms, embeddings and heads as they are. Errors: FileExistsError; ValueError for a drafter that vLLM does not
    serve from such a folder."""
    check_options(dict(checkpoint=checkpoint, output_dir=output_dir, to="fp8"), "export")
    output, folder = new_folder(output_dir), resolve_checkpoint(checkpoint)
    config = unquantised_config(SpeculatorModelConfig.from_pretrained(folder))
    with torch.device("meta"):
        model = SpeculatorModel.registered_model_class_from_config(config)(config)
    if violations := model.serving_violations(config.to_dict()):
        raise ValueError(f"{checkpoint}: vLLM does not serve it: {'; '.join(violations)}")
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    config.transformer_layer_config.quantization_config = compressed_tensors_config(linears)
    with atomic_folder(output, replace=False) as new:
        save_tensors(
            fp8_weights(saved_tensors(config, folder, checkpoint)), new / "model.safetensors", {"format": "pt"}
        )
        config.save_pretrained(new)
        write_provenance(new, "export", dict(to="fp8"), dict(checkpoint=checkpoint))
    return str(output)
