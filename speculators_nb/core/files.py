"""Atomic writes of files and folders, disk errors with a remedy, permissions, and JSON records.
A file is either the old one or the new one, never half of each."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .options import shown

REMEDIES = {  # errno -> what helps
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room and run the same call again"),
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f) and run the same call again",
    errno.EROFS: "Choose a folder on a disk that can be written",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "Choose a folder that you may write to, or change its permissions (chmod, chown)"
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), "A file is in the place of a folder: choose another name, or remove it"
    ),
    errno.EISDIR: "A folder is in the place of a file: choose another name, or remove it",
    errno.ENOTEMPTY: "Something else has written there at the same time: choose another name",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ELOOP: "Remove the link that leads to itself",
    errno.ENOENT: (
        "The folder was removed or its disk is no longer mounted: bring it back and run the same call again"
    ),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),
        "See whether the disk is sound and mounted, and run the same call again",
    ),
}
# `write` names no file
_UNNAMED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}


class DiskError(OSError):
    """What could not be written: `errno`, `strerror` and `filename` as of any OSError, `kept`
    says what is not lost. The text is one line: path, reason, remedy."""

    errno: int  # of any OSError it may be None
    kept = ""

    def __str__(self):
        remedy = REMEDIES.get(self.errno, "Choose another place")
        return f"{self.filename}: {self.strerror}. {remedy}{self.kept and f'; {self.kept}'}"


def _unsaid(path: Path) -> int | None:
    "The errno behind the failure of a writer that gives none: what the disk says to a small file at the same place."
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    probe = folder / f".{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        return e.errno
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _refused(e: Exception, path: Path) -> tuple[int, Path] | None:
    "(errno, file) where it is the disk that stopped the writing of `path`."
    if isinstance(e, OSError) and isinstance(e.filename, (str, bytes, os.PathLike)):
        named = Path(os.fsdecode(e.filename))
        file, place = (Path(os.path.abspath(p)) for p in (named, path))
        if e.errno not in REMEDIES or (e.errno == errno.ENOENT and named.parent.is_dir()):
            return None  # it is a file to read that is missing
        if place in file.parents:
            return e.errno, named
        # itself, its temporary neighbours and the folders above
        beside = file.parent == place.parent and file.name.lstrip(".").startswith(place.stem[:20])
        return (e.errno, path) if file == place or file in place.parents or beside else None
    if isinstance(e, OSError) and e.errno is not None:
        return (e.errno, path) if e.errno in _UNNAMED else None
    if number := re.search(r"while serializing.*os error (\d+)", str(e)):  # safetensors
        return int(number[1]), path
    reason = _unsaid(path)  # torch raises RuntimeError, NumPy and pandas OSError without a number
    return (reason, path) if reason else None


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike, kept: str = "") -> Iterator[None]:
    """Raise `DiskError` for what Python's, safetensors', torch's, NumPy's and Arrow's writers of a file or folder raise
    when the disk refuses; it says what is not lost: "3 of 10 rows are complete and kept". Everything else passes as it
    is."""
    try:
        yield
    except DiskError as e:
        e.kept = e.kept or kept
        raise
    except (OSError, RuntimeError, SafetensorError) as e:
        refused = _refused(e, Path(path))
        if refused is None:
            raise
        error = DiskError(refused[0], os.strerror(refused[0]), str(refused[1]))
        error.kept = kept
        raise error from e


def _neighbour(path: Path) -> Path:
    """A fresh hidden name beside `path` that keeps its suffix (`numpy.save` insists on one),
    and is no longer than a name may be."""
    stem = path.stem
    while stem and len(os.fsencode(f".{stem}.01234567{path.suffix}")) > 255:
        stem = stem[:-1]
    return path.parent / f".{stem}.{secrets.token_hex(4)}{path.suffix}"


def _new_mode(path: Path) -> int:
    "The permissions of a new file at `path`, which is made and removed."
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
        os.unlink(path)


def follow_umask(folder: str | os.PathLike) -> None:
    """Give every file of a folder the permissions that a new one has. Links, also hard ones,
    are other people's files and stay as they are."""
    folder = Path(folder)
    mode = _new_mode(folder / f".{secrets.token_hex(4)}")
    for file in folder.rglob("*"):
        own = file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1
        if own and stat.S_IMODE(file.stat().st_mode) != mode:  # some file systems know no chmod
            file.chmod(mode)


def writable_folder(folder: str | os.PathLike) -> Path:
    """See, before hours of work, that their results can be written to a folder; one that is not there is made.
    DiskError otherwise."""
    folder = Path(folder)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _new_mode(folder / f".{secrets.token_hex(4)}")
    return folder


def _sync(path: Path):
    """Have the kernel write a file, or the names in a folder, through to the disk. Some file systems cannot sync a
    folder, and one may be writable without being readable."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF) or not path.is_dir():
            raise


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Write a file as a whole or not at all, to the temporary path in the same folder that this gives: on an exception
    the old file stays and nothing else is left behind. Missing parent folders are made; the permissions are those of
    any new file. DiskError: the disk is full, read-only or gone, the path is a folder or cannot be made."""
    path = Path(path)
    temporary = _neighbour(path)
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            mode = _new_mode(temporary)
            yield temporary
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                temporary.chmod(mode)
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike, text: str, errors: str = "strict") -> None:
    """Write a file of UTF-8 as a whole or not at all; `errors`: of what UTF-8 does not have, as of `str.encode`.
    DiskError: as of `atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors, newline="")  # lines end as the text has them


def write_object(path: str | os.PathLike, content: Mapping, indent: int | None = 1) -> None:
    "Write a JSON file, for `read_object`, as a whole or not at all. DiskError: as of `atomic_write`."
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    write_text(path, f"{text}\n", "backslashreplace")  # a lone surrogate, as a path may have: \udcff


def save_figure(path: str | os.PathLike, figure: Any, **more: Any) -> None:  # matplotlib's, and its `savefig`'s
    "Write a figure as PNG, as a whole or not at all. DiskError: as of `atomic_write`."
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, **more)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, replace: bool = True) -> Iterator[Path]:
    """Fill a folder as a whole or not at all: on an exception the old folder stays as it was. The new content is
    written to the empty temporary folder beside it that this gives. A link to a folder stays one: what it leads to
    is replaced. `replace=False`: DiskError where another process has made it meanwhile. Permissions and DiskError:
    as of `atomic_write`. Errors: ValueError for `.` and `..`, whose place another folder cannot take."""
    named = Path(path)
    if named.name in ("", ".."):
        raise ValueError(f"{named}: you are in this folder, and it is made as a whole; name one that is not there yet")
    path = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    temporary, aside = _neighbour(path), _neighbour(path)
    try:
        with disk_errors(named):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            temporary.mkdir(parents=True)
            yield temporary
            follow_umask(temporary)
            for entry in [*temporary.rglob("*"), temporary]:
                _sync(entry)
            if replace and path.exists():
                os.rename(path, aside)
            try:
                os.rename(temporary, path)
            except BaseException:
                if aside.exists():
                    os.rename(aside, path)
                raise
            _sync(path.parent)
    except DiskError as e:  # of a file in the folder: by the name that it was to have
        e.filename = str(e.filename).replace(str(temporary), str(named))
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)


MOST_JSON = 1 << 28  # bytes of a config, an index or a record


def check_length(path: Path) -> None:
    "ValueError for one that is longer than any config, before it is read into memory."
    if (size := path.stat().st_size) > MOST_JSON:
        raise ValueError(
            f"{path}: has {size:,} bytes, and a file of this kind at most {MOST_JSON:,}; is this the file?"
        )


@contextlib.contextmanager
def read_errors(path: str | os.PathLike) -> Iterator[None]:
    "Name the file in an OSError of a read, which has none where a disk fails in the midst of it."
    try:
        yield
    except OSError as e:
        if e.filename is None and e.errno is not None and not isinstance(e, DiskError):
            e.filename = os.fspath(path)
        raise


def file_digest(path: str | os.PathLike) -> bytes:
    "SHA-256 of what a file holds. Errors: OSError naming it."
    with read_errors(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def read_object(path: str | os.PathLike) -> dict:  # what it says
    """Read a JSON file that holds an object: a config, an index, a record. Errors:
    FileNotFoundError; ValueError naming the file for anything else than an object."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    check_length(path)
    try:
        with read_errors(path):
            content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:  # also numbers of thousands of digits
        why = "nested too deeply" if isinstance(e, RecursionError) else e
        raise ValueError(
            f"{path}: not JSON ({why}). It was probably cut off or overwritten: make or fetch it again"
        ) from None
    if not isinstance(content, dict):
        kinds = {list: "a list", type(None): "null", str: "text", bool: "a truth value"}
        kind = kinds.get(type(content), "a number")
        raise ValueError(f"{path}: holds {kind}, and must hold an object, {{...}}: make or fetch it again")
    return content


def not_only_ours(*paths: str | os.PathLike) -> str | None:
    """Who else than this user (and root) can have made these files and folders, or can change them; None: nobody. Links
    count, and what they lead to."""
    for path in map(Path, paths):
        for found in (path.lstat(), path.stat()):
            if found.st_uid not in (os.geteuid(), 0):
                return f"{path} belongs to another user (uid {found.st_uid})"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} can be changed by other users (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w)"
    return None


SIGNS = {  # file in a folder -> what the folder is, and what to name instead
    "hs_0.safetensors": "features; train a drafter on them first: speculators-nb train",
    "data_config.json": "training data; make features of it, and train a drafter on them",
    "dataset_info.json": "a data set; name the output of speculators-nb train",
    "summary.csv": "an evaluation; name the drafter that it is of",
    "trainer_state.json": ("a training checkpoint without a drafter; name the output of speculators-nb train"),
}


class NotSupported(ValueError, NotImplementedError):
    "What a format or an algorithm may be, and this library does not do."


def check_folder(path: str | os.PathLike, name: str | os.PathLike | None = None) -> dict[str, Any]:
    """Read a drafter's config.json; messages call the folder `name`. Errors: FileNotFoundError or ValueError saying
    what is there instead."""
    folder = Path(path)
    name = name or path
    if folder.is_file():
        raise ValueError(
            f"{name}: is a file, and a drafter is a folder with config.json and model.safetensors; name that"
        )
    if not (folder / "config.json").is_file():
        signs = (what for name, what in SIGNS.items() if (folder / name).is_file())
        there = next(signs, None)
        raise FileNotFoundError(
            f"{name}: has no config.json, so it is no drafter"
            + (f", but {there}" if there else "; name the output of speculators-nb train")
        )
    config = read_object(folder / "config.json")
    if "speculators_model_type" not in config:
        raise NotSupported(
            f"{name}: is no drafter of this library: speculators_model_type is missing in its config.json (its "
            f"model_type is {shown(config.get('model_type'))}). A verifier goes into --verifier; a foreign drafter is "
            "read by from_pretrained(verifier=…) or speculators-nb convert"
        )
    return config


def check_no_gguf(name: str | os.PathLike) -> None:
    "Errors: ValueError for a GGUF file, or a folder with one and no config.json."
    path = Path(name)
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if found and not (path / "config.json").is_file():
        raise ValueError(
            f"{shown(str(name))}: is GGUF, and a model is read from a folder with config.json and safetensors; make "
            f"one: speculators-nb from-gguf {shlex.quote(str(found[0]))} FOLDER"
        )


def model_object(
    folder: str | os.PathLike, kind: str = "model", name: str | os.PathLike | None = None
) -> dict[str, Any]:
    """Read a model's config.json; messages call it `kind`, and the folder `name`. Errors: FileNotFoundError; ValueError
    for what is no JSON."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        check_no_gguf(folder)
        raise FileNotFoundError(f"{name or folder}: has no config.json; is it a {kind}'s folder?")
    return read_object(file)


def verifier_object(folder: str | os.PathLike) -> dict[str, Any]:  # its config.json
    "Read a verifier's config.json. Errors: also ValueError for a drafter's."
    config = model_object(folder, "verifier")
    if "speculators_model_type" in config:
        raise ValueError(
            f"{folder}: is a drafter (speculators_model_type="
            f"{config['speculators_model_type']!r}); name the verifier that it was trained for"
        )
    return config
