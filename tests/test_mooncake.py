"""Hidden states through a Mooncake store, between processes: client and format are those of `hs-connectors`, the store
itself is a stand-in (tests/mooncake/stand_in). `make mooncake-test` does it with the real one."""

import gc
import json
import multiprocessing
import os
import pickle
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_features_from_server import TRAIN, Fake, check, make_rows, make_verifier, wait_for

from speculators_nb.cli import main as cli
from speculators_nb.cli import serving
from speculators_nb.core.http_client import EndpointError
from speculators_nb.core.options import MooncakeAddress
from speculators_nb.data.chat_encoding import save_prepared
from speculators_nb.features import extraction
from speculators_nb.features.extraction import (
    HiddenStatesClient,
    MooncakeStates,
    ReplyError,
    extraction_options,
    open_states,
    states_in,
)
from speculators_nb.features.from_server import ServerFeatures, extract_from_server
from speculators_nb.serve.mooncake_connector import address_to
from speculators_nb.train.train_drafter import train_drafter

STAND_IN = str(Path(__file__).parent / "mooncake/stand_in")
LAYERS = [1, 2, 3, 4]
TELLS = ("--layers", "1", "2", "3", "4")


@pytest.fixture
def store(tmp_path, monkeypatch):
    "Address and folder of a stand-in for a store; something listens at the address, as a master does."
    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv("MOONCAKE_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONPATH", STAND_IN)
    monkeypatch.syspath_prepend(STAND_IN)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield f"127.0.0.1:{master.getsockname()[1]}", folder
    extraction._connection.cache_clear()


def left(folder):
    return sorted(p.name for p in folder.iterdir())


def test_rows_come_through_the_store_and_nothing_stays(tmp_path, store):
    place, folder = store
    rows, out = make_rows(), tmp_path / "features"
    with Fake(tmp_path / "unused", "--mooncake", place, "--slow", "0.01", *TELLS) as fake:
        counts = extract_from_server(fake.url, rows, out, f"mooncake://{place}", concurrency=6, dtype="float32")
        assert fake.left() == left(folder) == []
    assert counts == {"written": 40, "kept": 0, "failed": 0}
    check(out, rows, 40)


def test_training_reads_states_from_the_store(tmp_path, store):
    "The weights are those of training on stored features."
    place, folder = store
    save_prepared(make_rows(12), tmp_path / "rows")
    make_verifier(tmp_path / "verifier")
    given = dict(verifier=tmp_path / "verifier") | TRAIN | dict(num_train_epochs=1)
    with Fake(tmp_path / "unused", "--mooncake", place, "--root", str(tmp_path / "verifier"), *TELLS) as fake:
        source = dict(url=fake.url, storage=f"mooncake://{place}")
        train_drafter(data_dir=tmp_path / "rows", output_dir=tmp_path / "streamed", **source, **given)
        extract_from_server(fake.url, tmp_path / "rows", tmp_path / "stored", source["storage"])
    assert left(folder) == []
    train_drafter(data_dir=tmp_path / "stored", output_dir=tmp_path / "from-files", **given)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "from-files"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_server_started_anew(tmp_path, store, monkeypatch):
    monkeypatch.setattr(MooncakeStates, "pauses", (0.1, 0.1))
    place, _ = store
    rows, out, counts = make_rows(), tmp_path / "features", []
    with Fake(tmp_path / "unused", "--mooncake", place, "--slow", "0.1", *TELLS) as fake:
        given = dict(url=fake.url, rows=rows, output_dir=out, storage=f"mooncake://{place}", dtype="float32")
        more = dict(concurrency=4, timeout=3)
        thread = threading.Thread(target=lambda: counts.append(extract_from_server(**given, **more)))
        thread.start()
        wait_for(lambda: len(list(out.glob("hs_*"))) >= 5)
        fake.kill()  # what it was to put is lost: the client waits three seconds for it, and asks again
        fake.__enter__()
        thread.join(120)
    assert counts[0]["written"] == 40
    check(out, rows, 40)


def fork_reads(client, queue):
    queue.put(client.states([7, 8])[:, 0, 0].tolist())


def test_a_client_goes_to_other_processes_and_threads(tmp_path, store):
    place, folder = store
    with Fake(tmp_path / "unused", "--mooncake", place, *TELLS) as fake:
        client = HiddenStatesClient(fake.url, f"mooncake://{place}")
        assert client.layer_ids == LAYERS
        here = client.states([7, 8])[:, 0, 0].tolist()
        assert pickle.loads(pickle.dumps(client)).states([7, 8])[:, 0, 0].tolist() == here
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        process = fork.Process(target=fork_reads, args=(client, queue))
        process.start()
        assert queue.get(timeout=60) == here
        process.join()
        features = ServerFeatures(fake.url, make_rows(8), f"mooncake://{place}")
        assert [len(s["input_ids"]) for s in features.__getitems__([0, 3])] == features.lengths[:4:3]
    assert left(folder) == []


def test_a_forked_child_leaves_the_client_to_its_parent(tmp_path, store, monkeypatch):
    "It neither uses nor closes it."
    place, folder = store
    client = MooncakeStates(extraction.mooncake_address(f"mooncake://{place}"))
    parent = client._open()
    stand_in = type(parent[0].store._store)
    closed = tmp_path / "closed"
    monkeypatch.setattr(stand_in, "__del__", lambda _: closed.write_text(str(os.getpid())), raising=False)
    child = os.fork()
    if not child:
        try:
            mine = client._open()
            fine = mine[0] is not parent[0] and mine[1] is not parent[1]
            monkeypatch.setattr(mine[0].store, "_store", None)  # its own may be closed
            closed.unlink(missing_ok=True)
            del mine, parent, client
            gc.collect()
            os._exit(0 if fine and not closed.exists() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client._open() == parent and left(folder) == []


def test_layers_that_the_server_does_not_tell(tmp_path, store):
    "Upstream's own connector does not: they are to be given, and counted in each reply."
    place, _ = store
    with Fake(tmp_path / "unused", "--mooncake", place) as fake:
        with pytest.raises(ValueError, match="layer_ids=None: the server's reply does not say"):
            open_states(fake.url, f"mooncake://{place}")
        assert open_states(fake.url, f"mooncake://{place}", LAYERS).states([3]).shape == (1, 4, 16)
        with pytest.raises(ReplyError, match=r"sends 4 layers, expected \[1, 4\]"):
            open_states(fake.url, f"mooncake://{place}", [1, 4]).states([3])
    wrong = pytest.raises(ValueError, match=r"the server writes layers \[1, 2, 3, 4\]")
    with Fake(tmp_path / "unused", "--mooncake", place, *TELLS) as fake, wrong:
        open_states(fake.url, f"mooncake://{place}", [1, 2])


def test_files_where_a_store_is_named_and_the_reverse(tmp_path, store):
    place, _ = store
    wrong = pytest.raises(ReplyError, match="keeps no states in a Mooncake store: start it by")
    with Fake(tmp_path / "storage") as fake, wrong:
        open_states(fake.url, f"mooncake://{place}", LAYERS)
    wrong = pytest.raises(ReplyError, match="in a Mooncake store, not in files: give storage=")
    with Fake(tmp_path / "storage", "--mooncake", place) as fake, wrong:
        open_states(fake.url, fake.storage, LAYERS).states([3, 4])


def test_the_objects_of_every_reply_are_deleted(tmp_path, store):
    "Also of the first of two requests for a row, and of replies that are refused before their states are read."
    place, folder = store
    with Fake(tmp_path / "unused", "--mooncake", place, "--slow", "0.1", *TELLS) as fake:
        client = HiddenStatesClient(fake.url, f"mooncake://{place}")
        for row in ([5, 6], [7], [8, 9, 2]):
            messages = [{"role": "assistant", "content": " ".join(map(str, row))}]
            assert client.states(row, {"messages": messages}).shape == (len(row), 4, 16)
        with pytest.raises(ReplyError, match="the server read other tokens than the row's"):
            client.states([5, 7], {"messages": [{"role": "assistant", "content": "5 6"}]})
        assert left(folder) == []


def test_several_servers_share_a_store(tmp_path, store):
    place, folder = store
    rows, out = make_rows(24), tmp_path / "features"
    options = ("--mooncake", place, "--slow", "0.01", *TELLS)
    with Fake(tmp_path / "a", *options) as one, Fake(tmp_path / "b", *options) as other:
        given = dict(concurrency=4, dtype="float32")
        counts = extract_from_server([one.url, other.url], rows, out, f"mooncake://{place}", **given)
    assert counts["written"] == 24
    check(out, rows, 24)
    assert left(folder) == []


def test_no_master_and_no_package(monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.syspath_prepend(STAND_IN)
    with pytest.raises(
        EndpointError, match=rf"storage='mooncake://127.0.0.1:{port}': no Mooncake master answers there"
    ):
        states_in(f"mooncake://127.0.0.1:{port}")
    extraction._connection.cache_clear()
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"pip install 'speculators_nb\[mooncake\]'.* or name a folder"):
        states_in(f"mooncake://127.0.0.1:{port}")
    extraction._connection.cache_clear()


def test_serve_tries_the_master_before_it_loads_the_model(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ["serve", "data/tiny-verifier", "--hidden-states", f"mooncake://127.0.0.1:{port}", "--vllm", "/bin/false"]
    cli.app(given, standalone_mode=False)  # the command alone: a master may start later
    what = rf"mooncake://127.0.0.1:{port}'?: no Mooncake master answers there .* mooncake_master --rpc_port={port}"
    with pytest.raises(EndpointError, match=what):
        serving.serve("data/tiny-verifier", hidden_states=given[3], vllm="/bin/false", run=True)
    with pytest.raises(ConnectionError, match=what):
        address_to(f"127.0.0.1:{port}")


def test_serve_hands_the_address_to_the_connector(capsys):
    address = "mooncake://10.0.0.2:50051?segment_gb=0.5"
    cli.app(["serve", "data/tiny-verifier", "--hidden-states", address], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "speculators_nb.serve.mooncake_connector" in printed and '"global_segment_size": 536870912' in printed
    transfer = json.loads(extraction_options(LAYERS, address)[0][3])
    assert transfer["kv_connector_extra_config"] == {
        "mooncake": {"master_server_address": "10.0.0.2:50051", "global_segment_size": 2**29}
    }


def test_upstreams_client_reads_the_configuration_that_serve_writes():
    from hs_connectors.mooncake_store import MooncakeStoreConfig

    transfer = json.loads(extraction_options(LAYERS, "mooncake://10.0.0.2:50051")[0][3])
    config = MooncakeStoreConfig.from_dict(transfer["kv_connector_extra_config"]["mooncake"])
    assert (config.master_server_address, config.global_segment_size) == ("10.0.0.2:50051", 4 * 2**30)
    assert MooncakeAddress("10.0.0.2", 50051).segment_gb == 4
