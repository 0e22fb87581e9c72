#!/usr/bin/env python
"""Hidden states through a real Mooncake store over TCP on loopback: `make mooncake-test`, part of `make nightly`. Five
minutes; the first call makes .venv-mooncake (0.15 GB), and .venv-vllm for the real vLLM.

    python tests/mooncake/check_mooncake.py [--only store|vllm]     results in tests/mooncake/results.json

`store`: a server process without an engine (`tests/fake_extraction.py`) puts states as upstream's connector does.
`features`, training, a client and a server that are killed, a store whose memory is full; megabytes a second beside
files in a memory file system. `vllm`: the real vLLM with our connector, every state beside Hugging Face's."""

import argparse
import ctypes.util
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
FOLDER = ROOT / ".venv-mooncake"
PACKAGES = ("hs-connectors>=0.9,<0.10", "mooncake-transfer-engine-non-cuda>=0.3.12")
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")  # what Mooncake's RDMA is linked with
LAYERS = (2, 3, 4, 6)


# ------------------------------------------------------------------------------------------------ packages, a master
def install():
    "Packages in a folder of their own, and Debian's libraries where the machine has none."
    if (FOLDER / ".complete").exists():
        return
    print(f"making {FOLDER.name}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", FOLDER / "packages", "--upgrade", *PACKAGES], check=True)
    (FOLDER / "debian").mkdir(exist_ok=True)
    if not ctypes.util.find_library("ibverbs"):
        subprocess.run(["apt-get", "-q", "download", *LIBRARIES], cwd=FOLDER / "debian", check=True)
        for package in (FOLDER / "debian").glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, FOLDER / "debian"], check=True)
    (FOLDER / ".complete").touch()


def environment():
    "Of a process that uses the store."
    lists = {
        "PYTHONPATH": [ROOT, FOLDER / "packages"],
        "LD_LIBRARY_PATH": [FOLDER / "debian" / place / "x86_64-linux-gnu" for place in ("usr/lib", "lib")],
    }
    joined = {k: os.pathsep.join([*map(str, v), *filter(None, [os.environ.get(k)])]) for k, v in lists.items()}
    return joined | dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1", MC_LOG_LEVEL="ERROR")


def free_ports(n):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    found = [s.getsockname()[1] for s in held]
    [s.close() for s in held]
    return found


@contextmanager
def master():
    "HOST:PORT of a running master, and its log."
    port, metrics = free_ports(2)
    program = FOLDER / "packages/mooncake/mooncake_master"
    given = dict(rpc_port=port, rpc_address="127.0.0.1", metrics_host="127.0.0.1", metrics_port=metrics)
    with tempfile.TemporaryFile() as log:
        command = [str(program), *(f"--{k}={v}" for k, v in given.items())]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(100):
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, "the master did not start"
                time.sleep(0.1)
            yield f"127.0.0.1:{port}", lambda: keys_in(metrics)
        finally:
            process.kill()
            process.wait()


def keys_in(metrics):
    "How many objects the store has."
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("master_key_count "))))


def written_by(process):
    "Bytes that a process has caused to be written to a disk."
    lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


# ------------------------------------------------------------------------------------------------ without an engine
CLIENT = """
import sys, json
from test_features_from_server import make_rows
from speculators_nb.features.from_server import extract_from_server
url, storage, out = sys.argv[1:]
print(json.dumps(extract_from_server(url, make_rows(200), out, storage, concurrency=4, dtype="float32")))
"""


def check_features(work, place, keys):
    "Rows of `features`; the disk that the server wrote to."
    from test_features_from_server import Fake, check, make_rows

    from speculators_nb.features.from_server import extract_from_server

    rows, out, storage = make_rows(40), work / "features", f"mooncake://{place}"
    with Fake(work / "unused", "--mooncake", place, "--layers", "1", "2", "3", "4") as fake:
        before = written_by(fake.process)
        counts = extract_from_server(fake.url, rows, out, storage, dtype="float32")
        wrote = written_by(fake.process) - before
        assert not fake.left(), fake.left()
    check(out, rows, 40)
    assert counts == {"written": 40, "kept": 0, "failed": 0}, counts
    assert keys() == 0, keys()
    return dict(rows=40, counts=counts, bytes_the_server_wrote_to_disk=wrote, objects_left=keys())


def check_killed_client(work, place, keys):
    "A client is killed while it reads; the next one completes, each row once. Objects that it left unread."
    from test_features_from_server import Fake, check, make_rows, wait_for

    rows, out, storage = make_rows(200), work / "killed", f"mooncake://{place}"
    with Fake(work / "unused", "--mooncake", place, "--slow", "0.02", "--layers", "1", "2", "3", "4") as fake:
        command = [sys.executable, "-c", CLIENT, fake.url, storage, str(out)]
        began = subprocess.Popen(command, cwd=ROOT / "tests")
        wait_for(lambda: len(list(out.glob("hs_*"))) >= 20, lambda: began.poll() is None)
        began.kill()
        began.wait()
        time.sleep(0.5)
        left, kept = keys(), len(list(out.glob("hs_*.safetensors")))
        done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
        assert not done.returncode, done.stderr[-2000:]
        counts = json.loads(done.stdout.splitlines()[-1])
    check(out, rows, 200)
    assert counts == {"written": 200 - kept, "kept": kept, "failed": 0}, counts
    return dict(rows=200, kept=kept, written=counts["written"], objects_left_by_the_killed_client=left)


def check_killed_server(work, place, keys):
    "The server is killed and started anew; the client waits, and gets every row."
    from test_features_from_server import Fake, check, make_rows, wait_for

    from speculators_nb.features.from_server import extract_from_server

    rows, out, counts = make_rows(60), work / "again", []
    options = ("--mooncake", place, "--slow", "0.1", "--layers", "1", "2", "3", "4")
    with Fake(work / "unused", *options) as fake:
        given = dict(url=fake.url, rows=rows, output_dir=out, storage=f"mooncake://{place}", dtype="float32")
        thread = threading.Thread(target=lambda: counts.append(extract_from_server(**given, concurrency=4, timeout=3)))
        thread.start()
        wait_for(lambda: len(list(out.glob("hs_*"))) >= 10)
        fake.kill()
        time.sleep(0.5)
        fake.__enter__()
        thread.join(200)
        assert counts, "the client did not end"
        again = extract_from_server(**given) if counts[0]["failed"] else counts[0]
    check(out, rows, 60)
    assert again["failed"] == 0, again
    return dict(rows=60, first=counts[0], then=again)


def check_full(work, place, keys):
    "A thousand objects that nobody reads, in a memory for a hundred: Mooncake evicts them, and rows still come."
    from fake_extraction import open_store
    from test_features_from_server import Fake, check, make_rows

    from speculators_nb.features.from_server import extract_from_server

    rows, out = make_rows(40), work / "full"
    options = ("--mooncake", place, "--segment", str(16 << 20), "--layers", "1", "2", "3", "4")
    with Fake(work / "unused", *options) as fake:
        store, refused = open_store(place, 0)._store, 0
        for i in range(1000):
            refused += store.put(f"orphan-{i}", bytes(160_000)) != 0
            time.sleep(0.005)
        held = keys()
        time.sleep(12)  # an object that was put a moment ago is kept for ten seconds
        counts = extract_from_server(fake.url, rows, out, f"mooncake://{place}", dtype="float32")
        store.remove_all()
    check(out, rows, 40)
    assert counts["failed"] == 0, counts
    return dict(put=1000, refused=refused, held=held, rows=40, counts=counts)


def check_training(work, place, keys):
    "Training on streamed states gives the weights of training on stored ones."
    import torch
    from safetensors.torch import load_file
    from test_features_from_server import TRAIN, Fake, make_rows, make_verifier

    from speculators_nb.data.chat_encoding import save_prepared
    from speculators_nb.features.from_server import extract_from_server
    from speculators_nb.train.train_drafter import train_drafter

    rows, verifier = make_rows(), work / "verifier"
    save_prepared(rows, work / "rows")
    make_verifier(verifier)
    given = dict(verifier=verifier) | TRAIN
    options = ("--mooncake", place, "--root", str(verifier), "--layers", "1", "2", "3", "4")
    with Fake(work / "unused", *options) as fake:
        source = dict(url=fake.url, storage=f"mooncake://{place}")
        train_drafter(data_dir=work / "rows", output_dir=work / "streamed", **source, **given)
        extract_from_server(fake.url, work / "rows", work / "stored", source["storage"])
    train_drafter(data_dir=work / "stored", output_dir=work / "from-files", **given)
    one, other = (load_file(work / name / "model.safetensors") for name in ("streamed", "from-files"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert keys() == 0, keys()
    return dict(rows=len(rows), weights="equal to the last bit", objects_left=keys())


def check_speed(work, place, keys):
    "Megabytes a second of rows of 67 MB, four at a time, beside files in a memory file system."
    import numpy as np
    from test_features_from_server import Fake

    from speculators_nb.core.concurrency import concurrently
    from speculators_nb.features.extraction import open_states

    row, found = np.arange(1024).tolist(), {}
    shape = ("--hidden", "4096", "--layers", "1", "2", "3", "4", "--root", "a verifier")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for name, storage, options in (
            ("mooncake", f"mooncake://{place}", ("--mooncake", place, "--segment", str(1 << 30))),
            ("files in memory", memory, ()),
        ):
            with Fake(Path(memory), *shape, *options) as fake:
                client = open_states(fake.url, storage, [1, 2, 3, 4])
                client.states(row)
                clock = time.monotonic()
                sizes = [s.nbytes for _, s in concurrently(lambda _: client.states(row), range(24), 4)]
                found[name] = round(sum(sizes) / (time.monotonic() - clock) / 1e6)
    return dict(row_mb=round(sizes[0] / 1e6), mb_per_s=found, note="one machine, server and client on two cores")


# ------------------------------------------------------------------------------------------------ the real vLLM
def check_vllm(work, place, keys):
    "States of the real vLLM through the store, beside Hugging Face's."
    sys.path.insert(0, str(ROOT / "tests/vllm"))
    import check_features as vllm
    from check_vllm import VERIFIER

    from speculators_nb.features.from_server import ServerFeatures, extract_from_server
    from speculators_nb.verifier.tapped_model import Verifier

    rows, storage = vllm.make_rows(), f"mooncake://{place}?segment_gb=0.25"
    verifier = Verifier.from_pretrained(str(VERIFIER), list(LAYERS[:-1]))
    with vllm.start(storage, LAYERS, work / "log") as server:
        counts = extract_from_server(server.url, rows, work / "vllm", storage, dtype="float32")
        assert counts == {"written": len(rows), "kept": 0, "failed": 0}, counts
        live = ServerFeatures(server.url, rows, storage)
        assert live.layer_ids == list(LAYERS), live.layer_ids
        assert len(live[0]["input_ids"]) == rows["seq_len"][0]
        left = keys()
        assert left == 0, left
    worst = vllm.compare(work / "vllm", verifier, rows)
    assert max(worst) <= vllm.LIMIT, worst
    return dict(rows=len(rows), largest_relative_difference=[float(f"{x:.1e}") for x in worst], objects_left=left)


PARTS = {
    "store": (check_features, check_killed_client, check_killed_server, check_full, check_training, check_speed),
    "vllm": (check_vllm,),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    given = parser.parse_args()
    install()
    if str(FOLDER / "packages") not in sys.path:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment())
    sys.path.insert(0, str(ROOT / "tests"))
    from importlib.metadata import version

    import forked
    import torch

    torch.set_num_threads(1)
    forked.FORK = multiprocessing.get_context("spawn")  # the store's own threads do not survive a fork
    packages = ("hs-connectors", "mooncake-transfer-engine-non-cuda")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() and given.only else {}
    found["packages"] = {p: version(p) for p in packages}
    for part in [given.only] if given.only else PARTS:
        for check in PARTS[part]:
            with tempfile.TemporaryDirectory() as work, master() as (place, keys):
                clock = time.monotonic()
                name = check.__name__.removeprefix("check_")
                found[name] = check(Path(work), place, keys)
                print(f"{name}: {found[name]} ({time.monotonic() - clock:.0f} s)", flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
