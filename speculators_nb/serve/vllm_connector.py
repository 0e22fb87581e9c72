"""A KV connector for vLLM that writes hidden states of prompts to files.
It does so also on a CPU, with atomic files, and with a record of the served layers."""

import fcntl
import json
import os
import re
import stat
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# pyright: reportMissingImports=false
try:
    # vLLM has an environment of its own
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )
except ImportError:  # outside vLLM's environment the class can be read, not used
    ExampleHiddenStatesConnector: Any = object


class Done:
    "In place of a CUDA event: a copy on the CPU is complete when the call returns."

    def synchronize(self):
        pass

    def query(self):
        return True


def cached_rows(cache: torch.Tensor, block_ids: list[int], n: int) -> torch.Tensor:
    """The states [n, A+1, H] of one request of n tokens, a copy out of the paged cache [blocks, A+1, block_size, H].
    `block_ids`: its blocks, in the order of its tokens."""
    size = cache.shape[2]
    slots = (torch.tensor(block_ids)[:, None] * size + torch.arange(size)).flatten()[:n]
    return cache[slots // size, :, slots % size]


def write_whole(tensors: dict, event, filename: str, lock_fd: int | None) -> None:
    """Write hidden_states and token_ids to a temporary name once `event` says that they hold the numbers, then rename;
    the lock is released in any case."""
    path = Path(filename)
    beside = path.with_name(f".{path.name}")
    try:
        event.synchronize()
        beside.touch()
        mode = stat.S_IMODE(beside.stat().st_mode)
        save_file(tensors, beside)
        beside.chmod(mode)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
        if lock_fd is not None:
            os.close(lock_fd)


def file_for(storage: str, request: str) -> str:
    """Where the states of a request go: storage/NAME.safetensors, directly in the folder that client and server share,
    whatever the name holds that its client has chosen."""
    return os.path.join(storage, re.sub(r"[^\w.-]", "_", request)[-200:] + ".safetensors")


def say_what_is_served(storage, model: str, layer_ids: list[int], dtype: str) -> None:
    """Write extraction.json, whole or not at all, in the folder that client and server share: the verifier's name or
    folder, the layers of the slots (last included), the dtype of the states."""
    file = Path(storage) / "extraction.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".extraction.{os.getpid()}.json")
    beside.write_text(json.dumps({"model": model, "layer_ids": [int(i) for i in layer_ids], "dtype": dtype}))
    os.replace(beside, file)


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    "vLLM's file connector: also on a CPU, atomic files, and a record of the layers."

    _write_tensors = staticmethod(write_whole)

    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        for request in meta.new_req_filenames:
            meta.new_req_filenames[request] = self._request_filenames[request] = file_for(self._storage_path, request)
        return meta

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            config = self._vllm_config
            draft = config.speculative_config.draft_model_config.hf_config
            ids = draft.eagle_aux_hidden_state_layer_ids
            dtype = str(self._kv_cache.dtype).removeprefix("torch.")
            say_what_is_served(self._storage_path, config.model_config.model, ids, dtype)

    def _submit_async_write(self, pending):
        if not self._is_tp_rank_zero:
            return
        if self._kv_cache.device.type != "cpu":
            return super()._submit_async_write(pending)
        n = len(pending.token_ids)
        states = cached_rows(self._kv_cache, pending.block_ids, n)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        event = Done()
        if lock_fd is None and self.use_lock:
            lock_fd = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, lock_fd)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
