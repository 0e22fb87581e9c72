"""A stand-in for vLLM with a hidden-states connector, as a process that can be killed: same HTTP, same files and locks,
no engine.

    python tests/fake_extraction.py STORAGE --port 8000 --hidden 16 --slow 0.05

Files are written as vLLM's own connector writes them: under their final name, in two halves with `--slow` seconds
between, while the lock is held. A process that is killed leaves a torn file. The states are a function of the tokens
(`states_for`), so a test knows what every file must hold. Each request is a line in `--log`. With `--mooncake
HOST:PORT` they go into a Mooncake store through the client of `hs-connectors`, as its connector puts them there, and no
file is written.
"""

import argparse
import fcntl
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import save


def states_for(ids, slots=4, hidden=16):
    """[seq, slots, hidden] float32"""
    ids = np.asarray(ids, np.float64)[:, None, None]
    return np.sin(ids * np.arange(1, hidden + 1) + np.arange(slots)[:, None]).astype(np.float32)


made = lru_cache(2)(states_for)  # a row that is asked for again takes no time


def conversation(body):
    "Token ids of messages of numbers; the template closes the last turn with 0 unless it is to be left open."
    ids = [int(t) for message in body["messages"] for t in message["content"].split()]
    return ids if body.get("continue_final_message") else [*ids, 0]


class Handler(BaseHTTPRequestHandler):
    protocol_version, lock = "HTTP/1.1", threading.Lock()

    def log_message(self, *args):
        pass

    def answer(self, data, status=200):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"data": [{"id": "fake", "root": self.server.options.root}]})

    def do_POST(self):
        options = self.server.options
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = body["prompt"] if "prompt" in body else conversation(body)
        if options.longest is not None and len(ids) > options.longest:
            return self.answer({"error": {"message": "longer than max_model_len"}}, 400)
        if options.log:
            with self.lock, open(options.log, "a") as f:
                f.write(json.dumps(ids) + "\n")
        name = f"cmpl-{body['request_id']}-0-{os.urandom(4).hex()}"
        params = self.store(name, ids) if options.mooncake else self.file(f"{name}.safetensors", ids)
        self.answer({"choices": [{"prompt_token_ids": ids}], "kv_transfer_params": params})

    def file(self, name, ids):
        options = self.server.options
        path = Path(options.storage) / name
        fd = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        states = made(tuple(ids), options.slots, options.hidden)
        if options.fp8:
            data = fp8_file(states, ids)
        else:
            data = save({"hidden_states": states, "token_ids": np.asarray(ids, np.int64)})
        threading.Thread(target=write_slowly, args=(path, data, fd, options.slow)).start()
        return {"hidden_states_path": str(path)}

    def store(self, name, ids):
        "The manifest of an object that is put a moment later, by one of four threads."
        import torch
        from hs_connectors.mooncake_store import packed_layout

        options = self.server.options
        states = torch.from_numpy(made(tuple(ids), options.slots, options.hidden))
        tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
        layout, size = packed_layout({k: (list(t.shape), t.dtype) for k, t in tensors.items()})
        metadata = {"num_tokens": len(ids), "total_aligned_bytes": size, "extract_mode": "prompt_only"}
        if options.layers:
            metadata |= {"layer_ids": options.layers, "model": options.root}
        manifest = {"handle": name, "version": 1, "tensors": layout, "metadata": metadata}
        self.server.writers.submit(put_slowly, self.server.store, manifest, tensors, options.slow)
        return manifest


def put_slowly(store, manifest, tensors, slow):
    time.sleep(slow)
    try:
        store.put_sample(manifest, tensors)
    except Exception as e:
        store.put_error(manifest, str(e))


def open_store(master, segment):
    "As upstream's connector opens it inside vLLM."
    from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

    memory = dict(global_segment_size=segment, local_buffer_size=16 << 20)
    config = MooncakeStoreConfig(local_hostname="127.0.0.1", master_server_address=master, **memory)
    return MooncakeHiddenStatesStore(config).setup()


def fp8_file(states, ids):
    "As FP8HiddenStatesConnector of hs-connectors 0.9.0 writes it: one scale for each token."
    import torch
    from safetensors.torch import save

    states = torch.from_numpy(states)
    scales = (states.abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)
    tensors = {"hidden_states": (states / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}
    return save(tensors | {"token_ids": torch.tensor(ids)})


def write_slowly(path, data, fd, slow):
    with open(path, "wb") as f:
        f.write(data[: len(data) // 2])
        f.flush()
        time.sleep(slow)
        f.write(data[len(data) // 2 :])
    os.close(fd)


class Server(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 64, True


def serve(words, started=print):
    "Answer until the process ends; `started` is told the port."
    parser = argparse.ArgumentParser()
    parser.add_argument("storage")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--root", default="a verifier")
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt that is not refused")
    parser.add_argument("--fp8", action="store_true", help="states in fp8, as upstream's FP8 connector writes them")
    parser.add_argument("--mooncake", help="HOST:PORT of a Mooncake master: states go there, and into no file")
    parser.add_argument("--segment", type=int, default=64 << 20, help="bytes of the store's memory, with --mooncake")
    parser.add_argument("--layers", type=int, nargs="+", help="layer ids that replies tell, with --mooncake")
    parser.add_argument("--log")
    options = parser.parse_args(words)
    server = Server(("127.0.0.1", options.port), Handler)
    server.options = options
    if options.mooncake:
        server.store, server.writers = open_store(options.mooncake, options.segment), ThreadPoolExecutor(4)
    started(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    serve(None)
