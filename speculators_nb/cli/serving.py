"""The commands `serve`, `check` and `export` as functions: what an engine is started with, and what it can read.
Apart from the other commands on a drafter: nothing of training and evaluation is imported before vLLM starts."""

import contextlib
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ..core.options import check_options
from ..core.provenance import without_secrets
from ..features.extraction import extraction_options, writable_storage
from ..models.convert import export_fp8, export_native
from ..models.llama_cpp import check_llama_cpp, export_llama_cpp
from ..models.serving_rules import WITHOUT_FIRST_STATE
from ..nn.target_head import text_config, verifier_config
from ..serve.serve_command import find_verifier, serve_command, serve_environment
from ..serve.server import Server, print_log
from ..serve.vllm_contract import check_vllm_contract
from ..verifier.identity import warn_of_other_weights
from ..verifier.tapped_model import check_aux_layer_ids, default_aux_layer_ids


def serve(
    checkpoint: str,  # a drafter, or a verifier alone: folder or hub id
    k: int | None = None,  # tokens to draft; default: the checkpoint's; 0: the verifier alone
    method: str | None = None,  # of drafting, e.g. ngram; default: the checkpoint's
    verifier: str | None = None,  # folder or hub id; default: the one that the checkpoint names
    native: Path | None = None,  # drafter in the engine's layout, if vLLM needs it
    engine_version: str | None = None,  # of vLLM: 0.32 or 0.33; default: installed, else newest
    hidden_states: str | None = None,  # give hidden states: to FOLDER or mooncake://HOST:PORT
    aux_layer_ids: list[int] | None = None,  # with hidden_states; ascending; default: three
    host: str = "127.0.0.1",  # address to listen on; 0.0.0.0 lets other machines in
    port: int = 8000,  # to listen on
    dtype: str = "auto",  # of weights and arithmetic; on processors auto means bfloat16
    max_model_len: int | None = None,  # longest prompt + output; default: model's limit
    enforce_eager: bool | None = None,  # starts faster, runs slower; default: if no accelerator
    vllm: str | None = None,  # the program; default: it is looked for, also in .venv-vllm
    extra: list[str] | None = None,  # vllm serve: e.g. --extra=--max-num-seqs=8 (repeatable)
    run: bool = False,  # start it and wait; default: the command is printed
) -> tuple[list[str], dict] | None:  # command and environment; None where it ran
    "Serve a drafter with vLLM."
    check_options(locals(), "serve")
    options: dict[str, Any] = dict(
        host=host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        enforce_eager=enforce_eager,
        extra=extra or (),
        vllm=vllm or "vllm",
        engine_version=engine_version,
    )
    environment = serve_environment()
    warn_of_other_weights(checkpoint, verifier)
    if hidden_states is None:
        command = serve_command(checkpoint, k, method, verifier, native=native, **options)
    else:
        config = text_config(verifier_config(checkpoint, False))
        n = config.num_hidden_layers
        if aux_layer_ids and 0 in aux_layer_ids and config.model_type in WITHOUT_FIRST_STATE:
            raise ValueError(
                f"aux_layer_ids={aux_layer_ids}: vLLM fails at the state that enters layer 0 of a verifier of "
                f"model_type={config.model_type!r}; give layers from 1 on"
            )
        layers = [*check_aux_layer_ids(aux_layer_ids or default_aux_layer_ids(n), n), n]
        writable_storage(hidden_states, run)
        arguments, added = extraction_options(layers, hidden_states)
        command = serve_command(checkpoint, k=0, **options) + arguments
        environment = environment | added
    if not run:
        return command, environment
    find_verifier(checkpoint, verifier)
    with Server(command, environment, vllm=vllm) as server:
        print(without_secrets(f"serving {checkpoint} at {server.url}; Ctrl-C ends it"), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            print_log(server)


class Verdict(NamedTuple):
    "What keeps an engine from drafting with a checkpoint."

    engine: str
    violations: list[str]  # each a sentence with the remedy


def check(
    folder: str,  # a checkpoint
    engine: str = "vllm",  # vllm or llama.cpp
    engine_version: str | None = None,  # of vLLM: 0.32 or 0.33; default: installed, else newest
) -> Verdict:
    """Everything in a checkpoint folder that would keep an engine from serving it, or make it serve another model than
    was trained. What differs for some requests or on some builds alone is a warning."""
    check_options(locals(), "check")
    if engine == "llama.cpp":
        return Verdict(engine, check_llama_cpp(folder))
    return Verdict("vLLM", check_vllm_contract(folder, engine_version))


def export(
    checkpoint: str,  # a drafter of this library or of upstream's
    output_dir: str,  # the new folder; must not exist
    to: str | None = None,  # llama.cpp (a GGUF file), fp8 (for vLLM); default: as another project stores it
    format: str | None = None,  # that project's; default: the first of the drafter's type
    verifier: str | None = None,  # folder or hub id; with --to llama.cpp the GGUF file that it serves
    trust_remote_code: bool = False,  # run configuration code that comes with the verifier
) -> str:  # what to tell the user
    "Write a drafter as other projects store it, the inverse of `convert`, as llama.cpp reads it, or in FP8 for vLLM."
    check_options(locals(), "export")
    if to == "fp8":
        return f"{export_fp8(checkpoint, output_dir)}\nNext: speculators-nb serve {shlex.quote(output_dir)}"
    if to is None:
        return export_native(checkpoint, output_dir, format, verifier, trust_remote_code)
    return f"{output_dir}\nNext: {export_llama_cpp(checkpoint, output_dir, str(verifier))}"
