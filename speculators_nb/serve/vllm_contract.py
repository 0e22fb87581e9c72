"""Checks of a checkpoint folder against everything that vLLM reads from it: config.json, speculators_config, names,
shapes and values of the tensors; and where vLLM is. nbs/serve/02_vllm_contract.ipynb shows it at work."""

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..core.checkpoints import checkpoint_index, resolve_checkpoint, tensor_problem
from ..core.config import SpeculatorModelConfig
from ..core.files import not_only_ours, read_object
from ..models.base import SpeculatorModel, stored_state
from ..models.serving_rules import LAYER, layer_of
from ..nn.draft_vocabulary import check_vocab_mapping
from ..nn.target_head import text_config, verifier_config
from ..verifier.identity import trained_for_another
from .vllm_methods import ENGINES, NEWEST, engine_of, line_name, lines_with

log = logging.getLogger(__name__)

INSTALL = {
    "vllm": "  python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm         (accelerators; see docs.vllm.ai)\n"
    "  make vllm                                                            (in a clone: for processors, into "
    ".venv-vllm)",
    "guidellm": "  python -m venv .venv-guidellm && .venv-guidellm/bin/pip install guidellm",
}


def _in_working_folder(name: str) -> tuple[str | None, list[str]]:
    "A `.venv-NAME` in the working folder or above: its program, or None, and why others were not taken."
    own_clone = Path(str(files("speculators_nb"))).parent / f".venv-{name}"
    doubts = []
    for folder in (Path.cwd(), *Path.cwd().parents):
        environment = folder / f".venv-{name}"
        program = environment / "bin" / name
        if not os.access(program, os.X_OK):
            continue
        if environment.resolve() == own_clone.resolve():
            return str(program), doubts
        doubt = not_only_ours(environment, program.parent, program)
        if doubt is None:
            return str(program), doubts
        doubts.append(doubt)
    return None, doubts


def find_executable(name: str, given: str | os.PathLike | None = None) -> str:
    """The path of a program that is kept apart from this environment (vllm, guidellm): where the caller expects it
    (`given`), where a variable says, beside this interpreter, on the path, in the working folder or above. Errors:
    FileNotFoundError with the recipe."""
    variable = f"SPECULATORS_NB_{name.upper()}"
    by_caller = given if given and os.sep in str(given) else None
    named = by_caller or os.environ.get(variable)
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            source = "the caller" if by_caller else variable
            raise FileNotFoundError(f"{named}: no program; it was named as {name} by {source}")
        return os.path.abspath(named)
    for place in (str(Path(sys.executable).parent / name), shutil.which(given or name)):
        if place and os.access(place, os.X_OK):
            return place
    program, doubts = _in_working_folder(name)
    if program:
        return program
    not_started = f" (not started: {'; '.join(doubts)})" if doubts else ""
    raise FileNotFoundError(
        f"{name} was not found{not_started}. Install it in an environment of its own and say where it is, by "
        f"{variable}=/path/to/{name}:\n{INSTALL.get(name, f'  pip install {name}')}"
    )


def installed_engine_version(vllm: str | os.PathLike | None = None) -> str:
    """The release line (a key of ENGINES) of the vLLM that a `Server` would start; the newest where there is none.
    `vllm`: the program; None: it is looked for."""
    try:
        environment = Path(find_executable("vllm", vllm)).parent.parent
    except FileNotFoundError:
        return NEWEST
    for folder in environment.glob("lib/python*/site-packages/vllm*.dist-info"):
        if found := re.match(r"vllm(_cpu)?-(\d+)\.(\d+)", folder.name):
            version = int(found[2]), int(found[3])
            numbered = [name for name in ENGINES if name[0].isdigit()]
            not_newer = [n for n in numbered if tuple(map(int, n.split("."))) <= version]
            return [*numbered[:1], *not_newer][-1]
    return NEWEST


def _block(config: Any, name: str) -> dict[str, Any]:  # empty: it is missing, or no object
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _verifier_name(config: dict[str, Any]) -> str | None:
    name = _block(_block(config, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) else None


def _field_problems(config: dict[str, Any]) -> Iterator[str]:
    "What every served drafter's config.json must have."
    if "model_type" in config:
        yield (
            f"config.json has a top-level model_type ({config['model_type']!r}): vLLM then takes the folder for an "
            "ordinary model; remove it"
        )
    if not isinstance(config.get("speculators_config"), dict):
        yield "speculators_config is missing; vLLM finds verifier and number of draft tokens there"
        return
    methods = config["speculators_config"].get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    if not isinstance(tokens, int) or tokens < 1:
        yield (
            f"speculators_config.proposal_methods[0].speculative_tokens is {tokens!r}; give the number of tokens to "
            "draft"
        )
    verifier = _verifier_name(config)
    if not verifier:
        yield "speculators_config.verifier.name_or_path is missing; vLLM serves the verifier from there"
    elif Path(verifier).is_dir() and not Path(verifier).is_absolute():
        yield (
            f"speculators_config.verifier.name_or_path is the relative path {verifier!r}; vLLM looks for it where it "
            "is started, write the absolute path"
        )


def _tensor_problems(folder: Path, model: SpeculatorModel, raw: dict[str, Any]) -> Iterator[str]:
    "Names, shapes, dtypes and values of the stored tensors, against the model that the config describes."
    try:
        state, names = stored_state(folder, quiet=True), checkpoint_index(folder)
    except (FileNotFoundError, ValueError) as e:
        yield str(e)
        return
    quantised, field = len(names) > len(state), f"{LAYER}.quantization_config"  # scales are no tensors of the model
    if quantised and not layer_of(raw).get("quantization_config"):
        yield f"{field} is missing, and weights are quantised; write it there, where alone vLLM looks for it"
    elif layer_of(raw).get("quantization_config") and not quantised:
        yield f"{field} is set, and no weight is quantised; remove it, or vLLM expects scales"
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in model.from_verifier or not name.startswith(model.not_saved)
    }
    optional = set(model.from_verifier)
    if model.t2d is not None:  # vLLM shares the whole head or none of it
        optional -= {"lm_head.weight"}
    yield from (f"tensor {name} is missing" for name in sorted(expected.keys() - state.keys() - optional))
    for name in sorted(state.keys() - expected.keys()):
        yield f"tensor {name} is not part of this model; vLLM refuses unknown names"
    for name in sorted(expected.keys() & state.keys()):
        if problem := tensor_problem(name, state[name], expected[name]):
            yield problem
    if {"t2d", "d2t"} <= expected.keys() & state.keys():
        try:
            check_vocab_mapping(state["t2d"], state["d2t"], model.target_vocab_size, model.config.draft_vocab_size)
        except ValueError as e:  # a mapping that contradicts itself
            yield str(e)


def _rules_of(klass: Any, config: dict[str, Any], verifier: str | None) -> list[str]:
    "Violations that the model class itself knows; its warnings are logged."
    if klass.vllm_method():
        for warning in klass.serving_warnings(config):
            log.warning("warning: %s", warning)
    return list(klass.serving_violations(config, text_config(verifier_config(verifier)) if verifier else None))


def _line_problems(klass: Any, kind: str, engine_version: str) -> Iterator[str]:
    "What the release line does not have, of what the class is served as."
    engine, served_as = engine_of(engine_version), klass.vllm_method()
    if kind in engine.unserved:
        yield f"speculators_model_type is {kind!r}: {engine.unserved[kind]}"
    elif served_as is not None and served_as[0] not in engine.served:
        lines = lines_with(lambda row: served_as[0] in row.served)
        yield (
            f"speculators_model_type is {kind!r}, and {line_name(engine_version)} does not serve "
            f"method={served_as[0]!r}; {lines} did, and `generate` drafts with it here"
        )


def check_vllm_contract(folder: str | os.PathLike, engine_version: str | None = None) -> list[str]:
    """Everything in a checkpoint folder that would keep vLLM (0.32 or 0.33; None: the installed one, else the newest)
    from serving it, or make it serve another model than was trained: sentences with the remedy; none: vLLM will load
    it. What differs on some builds of vLLM or for some requests alone is logged as a warning (`serving_warnings` of the
    model's class), and so is a verifier that is here and has other weights than the drafter was trained for."""
    engine_version = engine_version or installed_engine_version()
    engine_of(engine_version)
    folder = resolve_checkpoint(folder)
    file = folder / "config.json"
    if not file.is_file():
        return [f"{file.name} is missing; the folder is not a complete checkpoint"]
    try:
        raw = read_object(file)
    except ValueError as e:
        return [str(e)]
    found = list(_field_problems(raw))
    try:
        config = SpeculatorModelConfig.from_dict(raw)
    except ValueError as e:
        return [*found, str(e)]  # from here on the fields are of the right types
    if config.sizes is not config and "transformer_layer_config" not in raw:
        found.append("transformer_layer_config is missing; it must describe the draft layers")
    klass = SpeculatorModel.registered_model_class_from_config(config)
    found += _line_problems(klass, raw["speculators_model_type"], engine_version)
    verifier = _verifier_name(raw)
    if verifier and not (Path(verifier) / "config.json").is_file():
        verifier = None  # on another machine: not compared
    if verifier and (problem := trained_for_another(folder, verifier)):
        log.warning("warning: %s", problem)
    try:
        with torch.device("meta"):
            model = klass(config)
    except ValueError as e:
        return [*found, str(e), *_rules_of(klass, raw, verifier)]
    return [*found, *_rules_of(klass, raw, verifier), *_tensor_problems(folder, model, raw)]
