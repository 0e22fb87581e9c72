"""Client for vLLM servers that extract hidden states of the verifier (target model), into files or Mooncake.
Which file a reply may name, the writer's lock, what killed clients left; several servers as one."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch

from ..core.files import read_object, writable_folder
from ..core.http_client import Endpoint, EndpointError
from ..core.options import MooncakeAddress, mooncake_address, shown
from ..data.chat_template import common_prefix
from ..jobs.servers import ServerPool, addresses_of, is_servers_fault
from ..verifier.identity import checkpoint_fingerprint
from .feature_rows import FeatureError, decode_row, read_features


class ReplyError(FeatureError):
    "A reply, or a file that it named, that gives no hidden states. `final`: the same request would fail again."

    def __init__(self, where, reason: str, final: bool = False):
        super(FeatureError, self).__init__(f"{where}: {reason}")
        self.path = where
        self.reason = reason
        self.final = final

    def __reduce__(self):
        return type(self), (self.path, self.reason, self.final)


def file_of_reply(storage, handle, request: str) -> Path:
    """The file that a reply names by `handle`: directly in the folder `storage`, *{request}*.safetensors. ReplyError
    for every other place and name; nothing is opened."""
    root = os.path.realpath(storage)
    named = repr(handle)[:200]
    if not isinstance(handle, str) or not handle.isprintable() or len(handle) > 4096:
        raise ReplyError(named, "the server names a file by something that is no path: nothing is read", True)
    folder, name = os.path.split(os.path.join(root, handle))
    if os.path.realpath(folder) != root:
        raise ReplyError(
            named,
            f"the server names a file outside of {root}: nothing is read there. storage= must "
            "be the server's shared_storage_path as it is mounted here",
            True,
        )
    if request not in name or not name.endswith(".safetensors") or len(os.fsencode(name)) > 250:
        raise ReplyError(
            named,
            f"the server names a file that is not this request's (*{request}*.safetensors): nothing is read",
            True,
        )
    return Path(root, name)


def _is_file(path: Path) -> bool:
    "Whether a file is there. ReplyError: something that is no file, such as a link, a folder or a pipe."
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise ReplyError(path, f"is {'a link' if stat.S_ISLNK(mode) else 'no file'}: it is not read", True)
    return True


def _wait_for_lock(lock, deadline):
    """Whether the writer has released its lock; False where the file system has no locks, or
    the lock is gone. ReplyError: it is still held at the deadline, or not readable."""
    import fcntl  # Unix alone has it, as it alone has vLLM; training is imported everywhere

    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as e:
        raise ReplyError(
            lock, f"{e.strerror}: run the server and this client as one user, or with a umask that lets both read", True
        ) from None
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ReplyError(lock, "still locked by its writer") from None
                time.sleep(0.005)
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise
                return False
    finally:
        os.close(fd)


def collect(path: Path, token_ids, timeout: float = 30.0) -> torch.Tensor:
    """Wait for the writer of a file of `file_of_reply`, for so many seconds; read it, and compare its tokens with
    `token_ids` [seq]: hidden_states [seq, A+1, H]. FeatureError: the file is missing, incomplete, or of other
    tokens."""
    deadline = time.monotonic() + timeout
    lock = Path(f"{path}.lock")
    if _is_file(lock) and _wait_for_lock(lock, deadline):
        if not _is_file(path):
            raise ReplyError(
                path, "the server gave the lock back without a file (killed, or its disk is full: see its log)"
            )
        return cast(torch.Tensor, read_features(path, token_ids))
    while True:  # no lock to wait for
        try:
            _is_file(path)
            return cast(torch.Tensor, read_features(path, token_ids))
        except FeatureError as e:
            if getattr(e, "final", False) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_REQUEST_FILE = re.compile(r"\bhs-([0-9a-f]{8})-(\d{1,9})-[0-9a-f]+\b.*\.safetensors(\.lock)?$")


def request_name() -> str:  # unique; contains host and process
    "A name for one request of this process."
    return f"hs-{HOST}-{os.getpid()}-{secrets.token_hex(6)}"


def sweep(storage) -> int:
    """Delete what killed clients have left in the shared folder: requests of ended processes of this host, and those of
    others that are older than an hour. Returns how many files."""
    deleted = 0
    for path in Path(storage).glob("*hs-*"):
        name = _REQUEST_FILE.search(path.name)
        if not name:
            continue
        host, pid = name[1], int(name[2])
        with contextlib.suppress(OSError):  # deleted already, or not ours to delete
            status = path.lstat()
            old = time.time() - status.st_mtime > 3600
            abandoned = old
            if host == HOST:
                try:
                    os.kill(pid, 0)
                    abandoned = False
                except OSError as e:  # of another user: it runs
                    abandoned = not isinstance(e, PermissionError)
            if abandoned and stat.S_ISREG(status.st_mode):
                path.unlink()
                deleted += 1
    return deleted


def _are_layers(ids) -> bool:
    "Whether ids are a list of integers that is not empty."
    return isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)


class FolderStates:
    "States of requests in a folder that server and client share."

    pauses = (0.0, 0.0)  # seconds between attempts for a row

    def __init__(self, storage):
        self.folder = Path(storage).resolve()
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"storage={str(storage)!r}: no such folder; name the server's shared_storage_path as it is mounted here"
            )
        self.record = self.folder / "extraction.json"
        sweep(self.folder)

    def served(self, ask=None) -> dict | None:
        """What the server extracts (model, layer_ids), from extraction.json as `say_what_is_served` writes it; None:
        there is no file. ValueError: it is not so."""
        if not self.record.is_file():
            return None
        record = read_object(self.record)
        ids, model = (record.get(name) if isinstance(record, dict) else None for name in ("layer_ids", "model"))
        if not _are_layers(ids) or not isinstance(model, str):
            raise ValueError(
                f"{self.record}: needs model, a name, and layer_ids, a list of integers; it holds "
                f"{str(record)[:100]!r}. Start the server again: it writes the file"
            )
        return record

    def note(self, params, request):
        "Not needed: `delete` finds the files by the request's name."

    def collect(self, params: dict, request: str, token_ids: list[int], timeout: float) -> torch.Tensor:
        """States [seq, A+1, H] of a request, by kv_transfer_params of its reply. FeatureError: as of `file_of_reply`
        and `collect`."""
        handle = params.get("hidden_states_path") or params.get("handle")
        if isinstance(handle, str) and "tensors" in params:
            reason = "the server keeps states in a Mooncake store, not in files: give storage= "
            reason += "the address of its master, e.g. mooncake://127.0.0.1:50051"
            raise ReplyError(shown(handle), reason, True)
        return collect(file_of_reply(self.folder, handle, request), token_ids, timeout)

    def delete(self, request: str) -> ReplyError | None:
        "Delete the files of one request, and nothing else; the error of a file that stays."
        error = None
        for file in self.folder.glob(f"*{request}*"):
            try:
                file.unlink(missing_ok=True)
            except OSError as e:
                reason = (
                    f"cannot be deleted ({e.strerror}), and the folder would fill up: run the "
                    "server and this client as one user, or as a group that may write there"
                )
                error = ReplyError(e.filename, reason, True)
        return error


# pyright: reportMissingImports=false
BUFFER = 64 << 20  # bytes that Mooncake registers for a client; states go past it


def local_host(address: MooncakeAddress) -> str:
    "Under which address a Mooncake store reaches this machine. EndpointError: no master answers."
    try:
        with socket.create_connection((address.host, address.port), 10) as connection:
            return connection.getsockname()[0]
    except OSError as e:
        place = f"mooncake://{address.host}:{address.port}"
        raise EndpointError(
            f"storage={shown(place)}: no Mooncake master answers there ({e.strerror or e}); "
            f"start one with mooncake_master --rpc_port={address.port}"
        ) from None


def open_store(address: MooncakeAddress) -> Any:
    """A connected `hs_connectors.MooncakeTransfer` that gives the store no memory. Errors: ImportError without the
    packages; EndpointError where no master answers."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake logs each step of each client
    try:
        import mooncake.store as _  # noqa: F401
        from hs_connectors import MooncakeTransfer
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
    except ImportError as e:
        raise ImportError(
            f"storage='mooncake://…': {e}; pip install 'speculators_nb[mooncake]' (on machines without CUDA: "
            "hs-connectors mooncake-transfer-engine-non-cuda; both need libibverbs1), or name a folder"
        ) from None
    config = MooncakeStoreConfig(
        local_hostname=local_host(address),
        master_server_address=f"{address.host}:{address.port}",
        global_segment_size=0,
        local_buffer_size=BUFFER,
    )
    transfer = MooncakeTransfer(MooncakeHiddenStatesStore(config))
    transfer.setup()
    return transfer


TENSORS = "hidden_states", "token_ids"


def manifest_of(params: dict, request: str) -> dict[str, Any]:
    """The manifest (handle, version, tensors, metadata) in kv_transfer_params of a reply. ReplyError: there is none, or
    it is another request's."""
    handle, tensors = params.get("handle"), params.get("tensors")
    named = repr(handle or params.get("hidden_states_path"))[:200]
    if not isinstance(tensors, dict) or not all(isinstance(tensors.get(n), dict) for n in TENSORS):
        raise ReplyError(
            named,
            "the server keeps no states in a Mooncake store: start it by `speculators-nb serve "
            "VERIFIER --hidden-states mooncake://HOST:PORT`, or give storage= its folder",
            True,
        )
    key = handle if isinstance(handle, str) and handle.isprintable() else ""
    if request not in key or len(key) > 250:
        raise ReplyError(named, f"the server names an object that is not this request's ({request})", True)
    metadata = params.get("metadata")
    return {
        "handle": key,
        "version": params.get("version"),
        "tensors": {name: tensors[name] for name in TENSORS},
        "metadata": metadata if isinstance(metadata, dict) else {},
    }


class _Connection:
    "The connection of a process to a store, opened where it is first used."

    def __init__(self, address):
        self.address = address
        self.lock = threading.Lock()
        self.transfer: Any = None
        self.readers = ThreadPoolExecutor(4, "mooncake")

    def open(self) -> tuple[Any, ThreadPoolExecutor]:
        "The client, and the threads that read."
        with self.lock:
            if self.transfer is None:
                self.transfer = open_store(self.address)
            return self.transfer, self.readers


@cache
def _connection(address, process):
    "One for all servers of a store, in each process: a forked child leaves its parent's alone, and open."
    return _Connection(address)


def _in_a_line(error):
    "What hs-connectors says of an error, without the manifest that it adds."
    return " ".join(str(error).partition("Transfer manifest")[0].split())[:300]


class MooncakeStates:
    "States of requests in a Mooncake store, known by the replies: read, and deleted."

    record = "the server's reply"
    pauses = (4.0, 8.0)  # seconds between attempts for a row
    late = 10.0  # seconds to wait for an object that is only deleted

    def __init__(self, address: MooncakeAddress):
        self.where = f"mooncake://{address.host}:{address.port}"
        self.address = address
        # request -> key of each object -> its manifest; None: it was waited for
        self.objects: dict[str, dict[str, dict | None]] = {}
        self._open()

    def _open(self):
        return _connection(self.address, os.getpid()).open()

    def note(self, params: Any, request: str) -> None:
        "Remember the object of a reply, so that `delete` deletes it, read or not."
        with contextlib.suppress(ReplyError):
            manifest = manifest_of(params if isinstance(params, dict) else {}, request)
            self.objects.setdefault(request, {})[manifest["handle"]] = manifest

    def delete(self, request: str) -> ReplyError | None:
        "Delete the objects of all replies to one request, and nothing else; the error of an object that stays."
        error = None
        for key, unread in self.objects.pop(request, {}).items():
            try:
                transfer, readers = self._open()
                if unread:
                    wait = readers.submit(transfer.store.get_sample, unread, self.late)
                    wait.exception()  # None: it is there; an error: it does not come
                transfer.delete(key)
            except (RuntimeError, OSError, ImportError) as e:
                reason = f"cannot be deleted ({_in_a_line(e)})"
                error = ReplyError(f"{self.where} {key}", reason)
        return error

    def collect(self, params: dict, request: str, token_ids: list[int], timeout: float) -> torch.Tensor:
        """States [seq, A+1, H] of a request, by kv_transfer_params of its reply. FeatureError: not there in time, torn,
        of other tokens."""
        manifest = manifest_of(params, request)
        transfer, readers = self._open()
        self.objects.setdefault(request, {})[manifest["handle"]] = None
        where = f"{self.where} {manifest['handle']}"
        try:
            read = readers.submit(transfer.store.get_sample, manifest, timeout).result()
        except (RuntimeError, OSError, LookupError, TypeError, ValueError, MemoryError) as e:
            raise ReplyError(where, _in_a_line(e)) from None
        try:
            return decode_row(where, read, token_ids)
        except FeatureError as e:
            raise ReplyError(where, e.reason) from None

    def served(self, ask: Callable[[str], dict]) -> dict | None:
        """What the server extracts (model, layer_ids), by a request of one token of which `ask` gives
        kv_transfer_params; None: its connector does not say. Errors: as of `collect`."""
        name = request_name()
        params = ask(name)
        try:
            self.collect(params, name, [0], 30.0)
        finally:
            self.delete(name)
        metadata = manifest_of(params, name)["metadata"]
        ids = metadata.get("layer_ids")
        return {"model": metadata.get("model"), "layer_ids": ids} if _are_layers(ids) else None


def states_in(storage) -> FolderStates | MooncakeStates:
    """Where a server puts hidden states: a folder that it shares, or mooncake://HOST:PORT. Errors: FileNotFoundError
    for no folder; ValueError for a broken address; ImportError, EndpointError: as of `open_store`."""
    address = mooncake_address(storage)
    return MooncakeStates(address) if address else FolderStates(storage)


def extraction_options(
    layer_ids: list[int],  # verifier layers, ascending; the last one is the number of layers
    storage,  # folder that client and server share, or mooncake://HOST:PORT
) -> tuple[list[str], dict[str, str]]:  # further `vllm serve VERIFIER` arguments; environment
    """Options with which vLLM passes hidden states on, as in `speculators-nb serve VERIFIER
    --hidden-states FOLDER`."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [int(i) for i in layer_ids]}},
    }
    store = mooncake_address(storage)
    if store:
        module, name = "mooncake_connector", "MooncakeConnector"
        size, master = round(store.segment_gb * 2**30), f"{store.host}:{store.port}"
        to = {"mooncake": dict(master_server_address=master, global_segment_size=size)}
    else:
        module, name = "vllm_connector", "HiddenStatesConnector"
        to = {"shared_storage_path": str(Path(storage).resolve())}
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": f"speculators_nb.serve.{module}",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": to,
    }
    options = ["--speculative-config", json.dumps(speculation)]
    options += ["--kv-transfer-config", json.dumps(transfer)]
    package = str(Path(str(files("speculators_nb"))).parent)
    python_path = [package, os.environ.get("PYTHONPATH")]
    return options, {"PYTHONPATH": os.pathsep.join(filter(None, python_path))}


def writable_storage(storage, starts: bool = True) -> None:
    """See, before a server starts, that it can write to its folder, which is made, or reach its Mooncake master, unless
    that may come later than the command (`starts=False`). DiskError, EndpointError."""
    address = mooncake_address(storage)
    if address is None:
        writable_folder(storage)
    elif starts:
        local_host(address)


def _at(value, *keys):
    "A part of a reply; None where the reply has another form."
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


class RowRefused(ReplyError):
    "A server refuses a row; another server of the same model would refuse it, too."


class HiddenStatesClient:
    """Hidden states of rows, from a vLLM that was started with `extraction_options`. May be
    shared by threads and sent to other processes."""

    def __init__(
        self,
        url: str,  # e.g. http://127.0.0.1:8000
        storage,  # its shared folder, as it is mounted here, or mooncake://HOST:PORT
        layer_ids: list[int] | None = None,  # slots, last included; None: the server's
        model: str | None = None,  # served name; None: the only one
        timeout: float = 600.0,  # seconds that one answer may take
        tries: int = 8,  # requests for one answer, with back-off that outlasts a server restart
    ):
        self.endpoint = Endpoint(url, timeout=timeout, tries=tries)
        self.storage = storage
        self.place = states_in(storage)
        self.timeout = timeout
        served: Any = self.endpoint.served()
        names = [m["id"] for m in served]
        if not names:
            raise EndpointError(f"{self.endpoint.url}: serves no model; is it still starting?")
        if model not in (None, *names):
            raise ValueError(
                f"model={model!r}: {self.endpoint.url} serves {', '.join(names)}; name one of them, or leave model out"
            )
        chosen = next(m for m in served if model in (None, m["id"]))
        self.model, root = chosen["id"], chosen.get("root")
        self.root: str = root if isinstance(root, str) and root.isprintable() and root else self.model
        self.layer_ids = self._checked_layers(layer_ids)

    def _ask(self, name):
        "What the reply to a prompt of one token says of its states."
        body = {"model": self.model, "prompt": [0], "max_tokens": 1, "request_id": name}
        return _at(self.endpoint.post("/v1/completions", body), "kv_transfer_params") or {}

    def _checked_layers(self, layer_ids):
        "The layers that the server writes. ValueError: it writes others, or of another model."
        served = self.place.served(self._ask)
        if served is None:
            if layer_ids is None:
                raise ValueError(
                    f"layer_ids=None: {self.place.record} does not say (another connector?). "
                    "Pass the layer ids that the server was started with"
                )
            return list(layer_ids)
        if served["model"] not in (self.root, self.model):
            raise ValueError(
                f"storage={str(self.storage)!r}: a server of {served['model']!r} writes there, "
                f"but {self.endpoint.url} serves {self.root!r}"
            )
        if layer_ids is not None and list(layer_ids) != served["layer_ids"]:
            raise ValueError(
                f"layer_ids={list(layer_ids)}: the server writes layers {served['layer_ids']}; "
                "start it with these ids, or take its own"
            )
        return list(served["layer_ids"])

    def about(self) -> dict[str, str]:  # the "model" part of data_config.json
        "Name and fingerprint of the server's model."
        fingerprint = f"served as {self.root}"
        if (Path(self.root) / "config.json").is_file():
            fingerprint = checkpoint_fingerprint(self.root)
        return {"target_model_path": self.root, "fingerprint": fingerprint}

    def _post(self, path, body):
        "The reply, and the token ids that the server reports as its prompt."
        reply = self.endpoint.post(path, body)
        self.place.note(_at(reply, "kv_transfer_params"), body["request_id"])
        choice = _at(reply, "choices", 0, "prompt_token_ids")
        return reply, _at(reply, "prompt_token_ids") or choice

    def _post_row(self, name, ids, chat):
        "Post one row, as token ids or as a chat."
        body = {"model": self.model, "max_tokens": 1, "temperature": 0, "return_token_ids": True, "request_id": name}
        if chat is None:
            return self._post("/v1/completions", body | {"prompt": ids})
        body |= chat | {"add_generation_prompt": False}
        reply, prompt_ids = self._post("/v1/chat/completions", body)
        if prompt_ids != ids and isinstance(prompt_ids, list) and prompt_ids[: len(ids)] == ids:
            # this template ends the last turn with a token that the row lacks: leave it open
            return self._post("/v1/chat/completions", body | {"continue_final_message": True})
        return reply, prompt_ids

    def _request(self, name, ids, chat):
        "States of one row, checked. ReplyError, FeatureError, EndpointError."
        reply, prompt_ids = self._post_row(name, ids, chat)
        if not isinstance(prompt_ids, list):
            raise ReplyError(self.endpoint.url, "the reply has no prompt_token_ids; is this vLLM?", True)
        if prompt_ids != ids:
            first = common_prefix(prompt_ids, ids)
            raise ReplyError(
                self.endpoint.url,
                f"the server read other tokens than the row's: {len(prompt_ids)} instead of "
                f"{len(ids)}, first difference at position {first}",
                True,
            )
        params: Any = _at(reply, "kv_transfer_params")
        if not (_at(params, "hidden_states_path") or _at(params, "handle")):
            raise ReplyError(
                self.endpoint.url,
                "the reply names no file (kv_transfer_params is empty): start the server by "
                "`speculators-nb serve VERIFIER --hidden-states FOLDER`",
                True,
            )
        states = self.place.collect(params, name, ids, min(self.timeout, 60))
        if states.shape[1] != len(self.layer_ids):
            reason = f"the server sends {states.shape[1]} layers, expected {self.layer_ids}"
            raise ReplyError(self.endpoint.url, reason, True)
        return states

    def attempt(self, ids: list[int], chat: dict | None = None) -> torch.Tensor:
        """States [seq, A+1, H] of one row, requested once; nothing of it stays in the storage. Errors: as of
        `states`."""
        name = request_name()
        try:
            states = self._request(name, ids, chat)
            if error := self.place.delete(name):
                raise error
            return states
        except EndpointError as e:
            if e.status is None or not 400 <= e.status < 500 or is_servers_fault(e):
                raise
            reason = f"a row of {len(ids)} tokens was refused: {e}"
            raise RowRefused(self.endpoint.url, reason, True) from None
        finally:
            self.place.delete(name)

    def states(self, token_ids, chat: dict | None = None) -> torch.Tensor:
        """States [seq, A+1, H] of one row, by its tokens [seq] or, where it has more than text, by the conversation;
        they are deleted where they were. FeatureError: refused, or three attempts failed; EndpointError: no answer."""
        ids = [int(t) for t in token_ids]
        for seconds in self.place.pauses:
            try:
                return self.attempt(ids, chat)
            except FeatureError as e:
                if getattr(e, "final", False):
                    raise
            time.sleep(seconds)
        return self.attempt(ids, chat)


def storages_of(storage: str | os.PathLike | Iterable, servers: int) -> list:
    """The shared folder of each server, by one place for all of them or one for each. ValueError: another number of
    folders than servers."""
    one = isinstance(storage, (str, os.PathLike))
    folders = [storage] if one else list(storage)
    if len(folders) == 1:
        return folders * servers
    if len(folders) != servers:
        raise ValueError(
            f"storage: {len(folders)} folders for {servers} server{'s' * (servers > 1)}; name "
            "one that all share, or one for each, in the order of the servers"
        )
    return folders


class HiddenStatesPool(ServerPool[HiddenStatesClient]):
    """Hidden states of rows, from several servers of one verifier, by what opens the client of each; a request is tried
    `tries` times, each elsewhere. NoServerLeft: none of them has answered for `patience` seconds."""

    def __init__(self, opens: dict[str, Callable[[], HiddenStatesClient]], tries: int = 8, patience: float = 120.0):
        self.tries = tries
        self.shape: tuple[int, ...] | None = None  # slots, hidden size
        self.models: dict[str, dict] = {}  # model folder or id -> what `about` says of it
        super().__init__(opens, self._identity, patience)
        self.layer_ids, self.origin = self.call(lambda c: (c.layer_ids, self._about(c)))

    def _about(self, client):
        if client.root not in self.models:  # a fingerprint reads the head of every weight file
            self.models[client.root] = client.about()
        return self.models[client.root]

    def _identity(self, client) -> Any:
        what = self._about(client)["fingerprint"]
        return f"{client.model} ({what}) with layers {client.layer_ids}"

    def at_fault(self, error: Exception) -> bool:
        of_reply = isinstance(error, FeatureError) and not isinstance(error, RowRefused)
        return of_reply or is_servers_fault(error)

    def about(self) -> dict[str, str]:  # the "model" part of data_config.json
        "Name and fingerprint of the servers' model."
        return self.origin

    def states(self, token_ids, chat: dict | None = None) -> torch.Tensor:
        "States [seq, A+1, H] of one row. Errors: as of `HiddenStatesClient.states`; NoServerLeft."
        ids = [int(t) for t in token_ids]
        return self.call(partial(self._states, ids=ids, chat=chat))

    def _states(self, client, ids, chat):
        states = client.attempt(ids, chat)
        shape = tuple(states.shape[1:])
        with self.lock:
            self.shape = self.shape or shape
        if shape != self.shape:
            reason = f"states of {list(shape)} for a token, the rows before {list(self.shape)}"
            raise ReplyError(client.endpoint.url, reason)
        return states


def open_states(
    url: str | Iterable[str],
    storage: str | os.PathLike | Iterable,
    layer_ids: list[int] | None = None,
    model: str | None = None,
    timeout: float = 600.0,
    tries: int = 8,
    patience: float = 120.0,
) -> HiddenStatesClient | HiddenStatesPool:
    """The client of one server, or of several, which must all serve the same. Arguments and errors: as of
    `HiddenStatesClient` and `HiddenStatesPool`; storage as in `storages_of`."""
    urls = addresses_of(url)
    folders = storages_of(storage, len(urls))
    if len(urls) == 1:
        return HiddenStatesClient(urls[0], folders[0], layer_ids, model, timeout, tries)
    opens = {
        url: partial(HiddenStatesClient, url, folder, layer_ids, model, timeout, tries=1)
        for url, folder in zip(urls, folders)
    }
    return HiddenStatesPool(opens, tries, patience)
