"""The `vllm serve` command for a checkpoint.
Which model is named, and the speculative config and environment that go with it."""

import contextlib
import json
import logging
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download

from ..core.checkpoints import resolve_checkpoint
from ..core.config import SpeculatorModelConfig, check_field_types
from ..core.files import model_object, read_object, write_object
from ..core.options import check_options
from ..core.provenance import SECRET_NAME, identify
from ..models.base import SpeculatorModel
from ..verifier.folders import named_by, named_verifier
from .speculative_config import SpeculativeConfig
from .vllm_contract import check_vllm_contract, installed_engine_version
from .vllm_methods import built_in_method, engine_of, method_of_types

log = logging.getLogger(__name__)


def read_config(model: str | os.PathLike) -> dict[str, Any]:
    """The content of a model's config.json, by its folder or hub id, of which only that file is fetched. Errors:
    FileNotFoundError with the remedy."""
    try:
        here = Path(model).is_dir()
        file = Path(model) / "config.json" if here else Path(hf_hub_download(str(model), "config.json"))
    except Exception as e:
        raise FileNotFoundError(
            f"{model}: neither a folder nor a model that could be looked up on the hub "
            f"({type(e).__name__}); check the spelling"
        ) from None
    config = model_object(file.parent, name=model)
    check_field_types(config, f"{file}: ")
    return config


def _model_argument(model):
    "A model as an argument of the engine, which must not take it for one of its options."
    if Path(model).is_dir():
        return os.path.abspath(model)
    if str(model).startswith("-") or not str(model).isprintable():
        raise ValueError(f"the model {str(model)[:80]!r}: neither a folder nor the name of a model")
    return str(model)


MADE_FROM = "made_from.json"  # in a native folder: digests of the files that it was made from


def _class_of(config):
    return SpeculatorModel.registered_model_class_from_config(SpeculatorModelConfig.from_dict(config))


def _native_folder(checkpoint, config, native) -> Path:
    "Errors: ValueError if it was made from another drafter."
    native = Path(native)
    files = [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]
    parts = {file.name: identify(file)["sha256"] for file in files}
    made_from = native / MADE_FROM
    if not (native / "config.json").is_file():  # which is written last
        write_object(made_from, parts)
        _class_of(config).from_pretrained(checkpoint).save_native(native)
    elif not made_from.is_file() or read_object(made_from) != parts:
        raise ValueError(
            f"native={str(native)!r}: holds the layout of another drafter; name another folder, or remove this one"
        )
    return native


class Served(NamedTuple):
    "What the engine is given."

    model: str  # folder or hub id
    speculative_config: dict[str, Any] | None  # None: no such argument


def _check_drafter(checkpoint, config, native, fields, engine_version) -> tuple[Any, dict]:
    "The draft to name, and its speculative fields. Errors: ValueError if refused."
    folder = resolve_checkpoint(checkpoint)
    problems = check_vllm_contract(folder, engine_version)
    if not problems:
        return checkpoint, fields
    method, _ = method_of_types().get(kind := config["speculators_model_type"], ("", False))
    engine = engine_of(engine_version)
    has_native = method in engine.served and kind not in engine.unserved and hasattr(_class_of(config), "save_native")
    if native is None or not has_native:
        hint = ["native=FOLDER (--native) writes its own layout there and serves that"] if has_native else []
        raise ValueError(f"{checkpoint}: vLLM cannot serve it as it is: {'; '.join([*problems, *hint])}")
    proposals = config["speculators_config"]["proposal_methods"] or [{}]
    served = dict(method=method, num_speculative_tokens=proposals[0].get("speculative_tokens"))
    return _native_folder(folder, config, native), served | fields


def _target_config(target):
    "The verifier's config.json; None: it is on another machine, and not checked."
    try:
        config = read_config(target)
    except FileNotFoundError:
        return None
    if kind := config.get("speculators_model_type"):
        raise ValueError(
            f"verifier={str(target)!r}: is a drafter (speculators_model_type={kind!r}); name "
            "the verifier that it was trained for"
        )
    return config | {"_name_or_path": _model_argument(target)}


def what_to_serve(
    checkpoint: str | os.PathLike,
    k: int | None = None,
    verifier: str | os.PathLike | None = None,
    method: str | None = None,
    speculative_config: dict | None = None,
    native: str | os.PathLike | None = None,
    engine_version: str | None = None,
) -> Served:
    """What vLLM is given, by arguments of `serve_command`. Errors: ValueError with the reasons why it would refuse;
    FileNotFoundError."""
    check_options(dict(k=k, method=method, engine_version=engine_version), "serve")
    engine_version = engine_version or installed_engine_version()
    config = read_config(checkpoint)
    fields = dict(speculative_config or {})
    fields |= {name: v for name, v in dict(num_speculative_tokens=k, method=method).items() if v is not None}
    is_drafter = bool(config.get("speculators_model_type"))
    target = verifier or (named_verifier(config, checkpoint) if is_drafter else checkpoint)
    if k == 0:
        return Served(_model_argument(target), None)
    draft = checkpoint if is_drafter or verifier else None
    if is_drafter:
        draft, fields = _check_drafter(checkpoint, config, native, fields, engine_version)
    elif not draft and not fields.keys() & {"method", "model"}:
        if built_in := built_in_method(config):
            fields["method"] = built_in
        elif not fields:
            return Served(_model_argument(target), None)
    given: dict[str, Any] = ({"model": _model_argument(draft)} if draft else {}) | fields
    checked = SpeculativeConfig(**given, target_model_config=_target_config(target), engine_version=engine_version)
    served = json.loads(checked.to_json())
    if is_drafter and draft is checkpoint and not verifier:  # its config.json has the rest
        changed = {n: v for n, v in served.items() if n in fields and n != "method"}
        return Served(_model_argument(checkpoint), changed or None)
    return Served(_model_argument(target), served)


def find_verifier(checkpoint: str | os.PathLike, verifier: str | os.PathLike | None = None) -> str:
    """The verifier (folder or hub id) that a server on this machine would load, by arguments of `serve_command`.
    Errors: FileNotFoundError with the remedy, now and not after the engine's start."""
    target = what_to_serve(checkpoint, 0, verifier).model
    given = verifier or target == str(checkpoint)
    with contextlib.nullcontext() if given else named_by(checkpoint):
        read_config(target)
    return target


def accelerated() -> bool:  # an accelerator that torch can use
    "Whether the engine will find more than processors here."
    return torch.accelerator.is_available()


def _refuse_secrets(extra):
    "Errors: ValueError for a key among the arguments of a command."
    for name in (argument.split("=")[0] for argument in extra):
        if name.startswith("--") and SECRET_NAME.search(name.lstrip("-")):
            variable = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}.get(name, "that vLLM has for it")
            raise ValueError(
                f"extra holds {name}: everybody on the machine can read the arguments of a "
                f"command; set the environment variable {variable} instead"
            )


def serve_command(
    checkpoint: str | os.PathLike,  # a drafter, or a verifier that needs none: folder or hub id
    k: int | None = None,  # tokens to draft; None: the checkpoint's; 0: the verifier alone
    method: str | None = None,  # `vllm_methods.METHODS` key, e.g. ngram; None: the checkpoint's
    verifier: str | os.PathLike | None = None,  # folder or hub id; None: checkpoint's or itself
    speculative_config: dict | None = None,  # further fields of `SpeculativeConfig`
    native: str | os.PathLike | None = None,  # drafter in the engine's layout, if vLLM needs it
    host: str = "127.0.0.1",  # address to listen on; 0.0.0.0 lets other machines in
    port: int | None = None,  # None: vLLM's 8000; a `Server` then takes a free one
    dtype: str = "auto",  # of weights and arithmetic; on processors auto means bfloat16
    max_model_len: int | None = None,  # longest prompt + output; None: model's limit
    enforce_eager: bool | None = None,  # starts faster, runs slower; None: if no accelerator
    extra: Sequence[str] = (),  # further arguments of vllm serve
    vllm: str = "vllm",  # the executable; the bare name is looked up by `Server`
    engine_version: str | None = None,  # of vLLM: 0.32 or 0.33; None: installed, else newest
) -> list[str]:  # arguments, the executable first
    """The command that serves a checkpoint. Errors: as of `what_to_serve`; ValueError for a key among the arguments,
    where everybody on the machine can read it."""
    extra = list(map(str, extra))
    arguments = dict(host=host, port=port, dtype=dtype, max_model_len=max_model_len)
    given = dict(k=k, method=method, enforce_eager=enforce_eager, extra=extra, engine_version=engine_version)
    check_options(given | arguments, "serve")
    _refuse_secrets(extra)
    engine_version = engine_version or installed_engine_version(vllm)
    served = what_to_serve(checkpoint, k, verifier, method, speculative_config, native, engine_version)
    if host not in ("127.0.0.1", "localhost", "::1") and not os.environ.get("VLLM_API_KEY"):
        warnings.warn(
            f"host={host!r} lets everybody who reaches this machine use the server; set VLLM_API_KEY", stacklevel=2
        )
    command = [str(vllm), "serve", served.model]
    for name, value in arguments.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    if served.speculative_config:
        command += ["--speculative-config", json.dumps(served.speculative_config)]
    if enforce_eager or (enforce_eager is None and not accelerated()):
        command.append("--enforce-eager")
    return command + extra


def serve_environment(kv_cache_gib: int | None = None, env: Mapping | None = None) -> dict[str, str]:
    """Variables to add to `env` (None: of this process) for vLLM: no usage reports, and where there is no accelerator
    settings for processors. `kv_cache_gib`: for keys and values there; None: 1/8 of memory, at most 8."""
    env = os.environ if env is None else env
    added = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not accelerated():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        added["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib or max(1, min(8, int(memory // 8))))
        added["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        added["OMP_NUM_THREADS"] = str(max(1, cores - 1))  # one for the server's own loop
    return {name: value for name, value in added.items() if name not in env}


def as_shell(command: Sequence[str], env: Mapping[str, str] = {}) -> str:
    "A command of `serve_command` with variables of `serve_environment`, as a person types it on one line."
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(command)])
