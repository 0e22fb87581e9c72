"""Hidden states that vLLM passes on through a Mooncake store, read by the client of upstream's `hs-connectors`.
Nothing is written to a disk, and server and client need no common file system."""

import contextlib
import ctypes
import os
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from ..core.http_client import EndpointError
from ..core.option_rules import MooncakeAddress, mooncake_address, shown
from .extraction import FolderStates, ReplyError, request_name
from .feature_rows import FeatureError, decode_row

# pyright: reportMissingImports=false
BUFFER = 64 << 20  # bytes that Mooncake registers for a client; states go past it


def local_host(
    address: MooncakeAddress,  # of a master
) -> str:  # of this machine, as the master sees it
    "Under which address the store reaches this machine. EndpointError: no master answers."
    try:
        with socket.create_connection((address.host, address.port), 10) as connection:
            return connection.getsockname()[0]
    except OSError as e:
        place = f"mooncake://{address.host}:{address.port}"
        raise EndpointError(
            f"storage={shown(place)}: no Mooncake master answers there ({e.strerror or e}); "
            f"start one with mooncake_master --rpc_port={address.port}"
        ) from None


def open_store(
    address: MooncakeAddress,  # of the master
) -> Any:  # an `hs_connectors.MooncakeTransfer` that is connected
    """A client that gives the store no memory. Errors: ImportError without the packages;
    EndpointError where no master answers."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake logs each step of each client
    try:
        import mooncake.store as _  # noqa: F401
        from hs_connectors import MooncakeTransfer
        from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
    except ImportError as e:
        raise ImportError(
            f"storage='mooncake://…': {e}; pip install 'speculators_nb[mooncake]' (on machines "
            "without CUDA: hs-connectors mooncake-transfer-engine-non-cuda; both need "
            "libibverbs1), or name a folder"
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


def manifest_of(
    params: dict,  # kv_transfer_params of a reply
    request: str,  # the request's name
) -> dict[str, Any]:  # handle, version, tensors, metadata
    "The manifest in a reply. ReplyError: there is none, or it is another request's."
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
        self._reset()
        _opened.add(self)

    def _reset(self):
        self.lock, self.transfer, self.readers = threading.Lock(), None, None

    def leave_to_parent(self):
        "In a forked child: the client is the parent's; it is not used here, and never closed."
        for of_parent in (self.transfer, self.readers):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_parent))
        self._reset()

    def __reduce__(self):
        return _connection, (self.address,)

    def open(self) -> tuple[Any, ThreadPoolExecutor]:
        "The client, and the threads that read."
        with self.lock:
            if self.transfer is None:
                self.transfer = open_store(self.address)
            if self.readers is None:
                self.readers = ThreadPoolExecutor(4, "mooncake")
            return self.transfer, self.readers


_opened: weakref.WeakSet[_Connection] = weakref.WeakSet()


@cache
def _connection(address):
    "One for all servers of a store."
    return _Connection(address)


def _leave_to_parent():
    for connection in list(_opened):
        connection.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _in_a_line(error):
    "What hs-connectors says of an error, without the manifest that it adds."
    return " ".join(str(error).partition("Transfer manifest")[0].split())[:300]


class StoredObjects:
    "Objects of requests in a Mooncake store: known by the replies, and deleted."

    late = 10.0  # seconds to wait for an object that is only deleted

    def __init__(
        self,
        address: MooncakeAddress,  # of its master
    ):
        self.where = f"mooncake://{address.host}:{address.port}"
        self.connection = _connection(address)
        # request -> key of each object -> its manifest; None: it was waited for
        self.objects: dict[str, dict[str, dict | None]] = {}
        self.connection.open()

    def note(
        self,
        params: Any,  # kv_transfer_params of a reply, perhaps none
        request: str,  # the request's name
    ) -> None:
        "Remember the object of a reply, so that `delete` deletes it, read or not."
        with contextlib.suppress(ReplyError):
            manifest = manifest_of(params if isinstance(params, dict) else {}, request)
            self.objects.setdefault(request, {})[manifest["handle"]] = manifest

    def delete(
        self,
        request: str,  # the request's name
    ) -> ReplyError | None:  # the error of an object that stays
        "Delete the objects of all replies to one request, and nothing else."
        error = None
        for key, unread in self.objects.pop(request, {}).items():
            try:
                transfer, readers = self.connection.open()
                if unread:
                    wait = readers.submit(transfer.store.get_sample, unread, self.late)
                    wait.exception()  # None: it is there; an error: it does not come
                transfer.delete(key)
            except (RuntimeError, OSError, ImportError) as e:
                reason = f"cannot be deleted ({_in_a_line(e)})"
                error = ReplyError(f"{self.where} {key}", reason)
        return error


class StoredStates(StoredObjects):
    "States of requests in a Mooncake store: read them."

    record = "the server's reply"
    pauses = (4.0, 8.0)  # seconds between attempts for a row

    def collect(
        self,
        params: dict,  # kv_transfer_params of a reply
        request: str,  # the request's name
        token_ids: list[int],  # [seq] of the row
        timeout: float,  # seconds to wait for the server
    ) -> torch.Tensor:  # [seq, A+1, H]
        "States of a request. FeatureError: not there in time, torn, of other tokens."
        manifest = manifest_of(params, request)
        transfer, readers = self.connection.open()
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


class MooncakeStates(StoredStates):
    "States of requests in a Mooncake store, and what its server extracts."

    def served(
        self,
        ask: Callable[[str], dict],  # request of one token by its name -> kv_transfer_params
    ) -> dict | None:  # model, layer_ids; None: the server's connector does not say
        "What the server extracts. Errors: as of `collect`."
        name = request_name()
        params = ask(name)
        try:
            self.collect(params, name, [0], 30.0)
        finally:
            self.delete(name)
        metadata = manifest_of(params, name)["metadata"]
        ids, model = metadata.get("layer_ids"), metadata.get("model")
        is_known = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        return {"model": model, "layer_ids": ids} if is_known else None


def states_in(
    storage,  # a folder that server and client share, or mooncake://HOST:PORT
) -> FolderStates | MooncakeStates:
    """Where a server puts hidden states. Errors: FileNotFoundError for no folder; ValueError
    for a broken address; ImportError, EndpointError: as of `open_store`."""
    address = mooncake_address(storage)
    return MooncakeStates(address) if address else FolderStates(storage)
