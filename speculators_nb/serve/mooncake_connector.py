"""A KV connector for vLLM that puts hidden states of prompts into a Mooncake store.
It is upstream's, works also on a CPU, and tells which layers are served."""

import contextlib
import socket
from typing import Any

# pyright: reportMissingImports=false
try:
    # vLLM and hs-connectors are in vLLM's environment
    from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector
except ImportError:  # outside of it the class can be read, not used
    MooncakeHiddenStatesConnector: Any = object


class HostDevice:
    "In place of `torch.cuda`: on a CPU nothing is copied in the background."

    class Stream:
        def wait_event(self, event):
            pass

    class Event:
        def record(self):
            pass

    @staticmethod
    def stream(stream):
        return contextlib.nullcontext()


def address_to(master: str) -> str:
    "The address of this machine on the way to a master (HOST:PORT). ConnectionError: it does not answer."
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 10) as connection:
            return connection.getsockname()[0]
    except OSError as e:
        raise ConnectionError(
            f"mooncake://{master}: no Mooncake master answers there ({e.strerror or e}); "
            f"start one with mooncake_master --rpc_port={port}"
        ) from None


class MooncakeConnector(MooncakeHiddenStatesConnector):
    "Upstream's Mooncake connector: also on a CPU, with a record of the layers in each reply."

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._store.config
        config.local_hostname = address_to(config.master_server_address)

    def _device(self):
        if self._kv_cache is not None and self._kv_cache.device.type == "cpu":
            return HostDevice
        return super()._device()

    def request_finished(self, request, block_ids):
        delayed, manifest = super().request_finished(request, block_ids)
        config = self._vllm_config
        draft = config.speculative_config.draft_model_config.hf_config
        ids = [int(i) for i in draft.eagle_aux_hidden_state_layer_ids]
        manifest["metadata"] |= {"layer_ids": ids, "model": config.model_config.model}
        return delayed, manifest
