"""Features over HTTP with everything that can be killed, killed: the server, the client, the trainer. Each row is there
once, whole, and nothing is left behind."""

import json
import os
import pickle
import signal
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_extraction
import forked
import numpy as np
import pytest
import torch
from datasets import Dataset
from fake_extraction import states_for
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from speculators_nb.cli import data_commands
from speculators_nb.data.chat_encoding import save_prepared
from speculators_nb.features.extraction import (
    HOST,
    HiddenStatesClient,
    collect,
    extraction_options,
    file_of_reply,
    request_name,
    sweep,
)
from speculators_nb.features.feature_rows import FeatureError, feature_path, read_features
from speculators_nb.features.from_server import ServerFeatures, extract_from_server
from speculators_nb.train.train_drafter import train_drafter

HERE, LAYERS = Path(__file__).parent, [1, 2, 3, 4]


def make_rows(n=40, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 48, k) for k in rng.integers(6, 30, n)]
    return Dataset.from_dict(
        {"input_ids": rows, "loss_mask": [np.arange(len(r)) >= 2 for r in rows], "seq_len": [len(r) for r in rows]}
    )


class Fake:
    """The stand-in as a process on a port of its own, which survives it."""

    def __init__(self, storage, *options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.storage, self.options, self.url = Path(storage), options, f"http://127.0.0.1:{self.port}"
        self.storage.mkdir(exist_ok=True)

    def __enter__(self):
        ready, started = forked.FORK.Pipe(duplex=False)
        words = [str(self.storage), "--port", str(self.port), *self.options]
        self.process = forked.begin(fake_extraction.serve, words, started.send)
        started.close()
        assert ready.recv() == self.port
        return self

    def kill(self):
        self.process.kill()
        self.process.join()

    def send(self, number):
        os.kill(self.process.pid, number)

    def writing(self):
        "Hold the server; whether it is in the middle of a file. If not, it goes on."
        self.send(signal.SIGSTOP)
        # the signal takes effect a moment later, when every thread has seen it
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        if self.torn():
            return True
        self.send(signal.SIGCONT)
        return False

    def torn(self):
        "Files that were begun; a whole one the client reads and deletes in its own time."
        begun = []
        for path in self.storage.glob("*.safetensors"):
            try:
                load_file(path)
            except SafetensorError:
                begun.append(path)
            except FileNotFoundError:
                pass
        return begun

    def __exit__(self, *_):
        self.kill()

    def left(self):
        return sorted(p.name for p in self.storage.iterdir())


def check(folder, rows, n=None):
    """Each of the rows that are there is whole and right."""
    found = sorted(int(p.stem[3:]) for p in Path(folder).glob("hs_*"))
    assert n is None or len(found) == n
    for i in found:
        ids = rows[i]["input_ids"]
        assert np.abs(read_features(feature_path(folder, i), ids).numpy() - states_for(ids)).max() < 1e-6
    return found


def wait_for(condition, alive=lambda: True, seconds=240):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end and alive(), "it ended before it could be killed"
        time.sleep(0.005)


def test_server_killed_and_started_anew(tmp_path):
    """The client is not told: it waits, asks again, and every row comes out right, also those whose file the kill
    tore."""
    rows, out = make_rows(), tmp_path / "features"
    with Fake(tmp_path / "storage", "--slow", "0.1") as fake:
        result = []
        client = threading.Thread(
            target=lambda: result.append(
                extract_from_server(fake.url, rows, out, fake.storage, LAYERS, concurrency=4, dtype="float32")
            ),
            daemon=True,
        )
        client.start()
        wait_for(lambda: len(list(out.glob("hs_*"))) >= 5 and fake.writing())
        torn = fake.torn()  # now: the client removes them once the connection is gone
        fake.kill()
        time.sleep(0.5)
        fake.__enter__()
        client.join(240)
        assert result == [{"written": 40, "kept": 0, "failed": 0}]
        check(out, rows, 40)
        assert torn and fake.left() == []


@pytest.mark.statement("release-12")
def test_server_down_for_good_then_resumed(tmp_path):
    rows, out = make_rows(), tmp_path / "features"
    with Fake(tmp_path / "storage", "--slow", "0.05") as fake:
        killer = threading.Thread(target=lambda: (wait_for(lambda: len(list(out.glob("hs_*"))) >= 5), fake.kill()))
        killer.start()
        with pytest.raises(RuntimeError, match="3 failures in a row.*what was finished is kept"):
            extract_from_server(
                fake.url, rows, out, fake.storage, LAYERS, concurrency=4, dtype="float32", tries=1, max_failures=3
            )
        killer.join()
        found = check(out, rows)
        assert 5 <= len(found) < 40
        fake.__enter__()
        again = extract_from_server(fake.url, rows, out, fake.storage, LAYERS, dtype="float32")
        assert again["kept"] >= len(found)  # a thread of the stopped job may have written one more
        assert (again["written"] + again["kept"], again["failed"]) == (40, 0)
        check(out, rows, 40)
        assert fake.left() == []


def client(fake, out, told=None, **share):
    def extract():
        found = extract_from_server(
            fake.url, make_rows(), out, fake.storage, LAYERS, concurrency=4, dtype="float32", **share
        )
        if told:
            told.put(found)

    return forked.begin(extract)


def test_client_killed_then_resumed(tmp_path):
    rows, out = make_rows(), tmp_path / "features"
    with Fake(tmp_path / "storage", "--slow", "0.1") as fake:
        child = client(fake, out)

        def waiting():
            "Hold the client; whether the server writes what it asked for. If not, it goes on."
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(0.5)
            if fake.left():
                return True
            os.kill(child.pid, signal.SIGCONT)
            return False

        try:
            wait_for(lambda: len(list(out.glob("hs_*"))) >= 5 and waiting(), child.is_alive)
        finally:
            child.kill()
            child.join()
        found = check(out, rows)
        assert 5 <= len(found) < 40
        assert fake.left()  # nobody fetches them
        assert extract_from_server(fake.url, rows, out, fake.storage, LAYERS, dtype="float32") == {
            "written": 40 - len(found),
            "kept": len(found),
            "failed": 0,
        }
        check(out, rows, 40)
        assert fake.left() == [] and not list(out.glob(".hs_*"))


@pytest.mark.nightly
def test_two_clients_share_a_folder(tmp_path):
    rows, log = make_rows(), tmp_path / "log"
    with Fake(tmp_path / "storage", "--slow", "0.02", "--log", str(log)) as fake:
        told = forked.FORK.Queue()
        for rank in (0, 1):
            client(fake, tmp_path / "features", told, rank=rank, world_size=2)
        assert [told.get(timeout=240) for _ in range(2)] == [{"written": 20, "kept": 0, "failed": 0}] * 2
        check(tmp_path / "features", rows, 40)
        assert fake.left() == []
    asked = sorted(json.loads(line) for line in log.read_text().splitlines())
    assert asked == sorted(rows["input_ids"])  # each row was asked for once


def test_upstreams_fp8_connector_is_read(tmp_path):
    "Its files have scales beside the codes; what comes is bfloat16, within the rounding of three bits of mantissa."
    rows = make_rows(3)
    with Fake(tmp_path / "storage", "--fp8") as fake:
        live = ServerFeatures(fake.url, rows, fake.storage, LAYERS, layers=LAYERS[:-1])
        for row, sample in zip(rows, live.__getitems__([0, 1, 2])):
            right = torch.from_numpy(states_for(row["input_ids"]))
            found = torch.cat([sample["hidden_states"], sample["verifier_last_hidden_states"]], 1).float()
            assert (found - right.flatten(1)).abs().max() < 1 / 16 and found.abs().max() > 0.9
        assert fake.left() == []


def test_rows_in_shards_that_fail_are_counted_once(tmp_path):
    ids = [*make_rows(11)["input_ids"], [9] * 64]  # the last is longer than the server takes
    columns = dict(input_ids=ids, loss_mask=[[True] * len(row) for row in ids], seq_len=[*map(len, ids)])
    rows = Dataset.from_dict(columns)
    with Fake(tmp_path / "storage", "--longest", "40") as fake:
        given = fake.url, rows, tmp_path / "features", fake.storage, LAYERS
        found = extract_from_server(*given, dtype="float32", shard_gb=1e-5)
        assert found == {"written": 11, "kept": 0, "failed": 1}
        assert extract_from_server(*given, dtype="float32", shard_gb=1e-5) == {"written": 0, "kept": 11, "failed": 1}
    assert len([*(tmp_path / "features/shards").glob("*.safetensors")]) > 1


def make_verifier(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_the_command_asks_for_the_last_layer_too(tmp_path, monkeypatch):
    "`--aux-layer-ids` names the layers that a drafter reads, as everywhere; the server sends the last one beside them."
    make_verifier(tmp_path / "verifier")
    rows = make_rows(3)
    monkeypatch.setattr(data_commands, "open_tokenizer", lambda *_: None)
    monkeypatch.setattr(data_commands, "prepare", lambda *_, **__: rows)
    with Fake(tmp_path / "storage") as fake:
        given = str(tmp_path / "verifier"), "rows", tmp_path / "features", "vllm", fake.url, fake.storage
        found = data_commands.features(*given, aux_layer_ids=LAYERS[:-1], dtype="float32")
    assert (found["written"], found["failed"]) == (3, 0)
    check(tmp_path / "features", rows, 3)


TRAIN = dict(
    algorithm="eagle3",
    draft_vocab_size=40,
    eval_share=0,
    ttt_steps=2,
    total_seq_len=128,
    num_train_epochs=3,
    learning_rate=3e-3,
    save_strategy="steps",
    save_steps=2,
    disable_tqdm=True,
    logging_steps=50,
)


@pytest.mark.nightly
def test_trainer_killed_then_resumed(tmp_path):
    """Online: the run that was killed and resumed ends with the weights of the run that was not, and the shared folder
    is empty."""
    save_prepared(make_rows(), tmp_path / "rows")
    make_verifier(tmp_path / "verifier")
    with Fake(tmp_path / "storage", "--slow", "0.05", "--root", str(tmp_path / "verifier")) as fake:
        (fake.storage / "extraction.json").write_text(
            json.dumps({"model": str(tmp_path / "verifier"), "layer_ids": LAYERS, "dtype": "float32"})
        )
        given = TRAIN | dict(data_dir=tmp_path / "rows", verifier=tmp_path / "verifier", url=fake.url)
        given["storage"] = fake.storage
        child = forked.begin(train_drafter, output_dir=tmp_path / "killed", **given)
        try:
            wait_for(lambda: list((tmp_path / "killed").glob("checkpoint-4")) and len(fake.left()) > 1, child.is_alive)
        finally:
            child.kill()
            child.join()
        assert len(fake.left()) > 1
        time.sleep(0.2)
        resumed = train_drafter(output_dir=tmp_path / "killed", resume_from_checkpoint=True, **given)
        whole = train_drafter(output_dir=tmp_path / "whole", **given)
        assert fake.left() == ["extraction.json"]
    assert resumed.state.global_step == whole.state.global_step
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sent", [lambda data: data, lambda data: pickle.loads(pickle.dumps(data))])
def test_loader_workers_fetch_ahead(tmp_path, sent):
    "Workers that are forked, and those that are spawned, to which the data are sent."
    rows = make_rows(12)
    with Fake(tmp_path / "storage") as fake:
        data = sent(ServerFeatures(fake.url, rows, fake.storage, LAYERS, layers=[2, 4], dtype=torch.float32))
        got = list(DataLoader(data, batch_size=4, collate_fn=list, num_workers=2))
        assert fake.left() == []
    for ids, sample in zip(rows["input_ids"], [s for batch in got for s in batch]):
        assert sample["input_ids"].tolist() == ids
        assert np.abs(sample["hidden_states"].numpy() - states_for(ids)[:, [1, 3]].reshape(len(ids), -1)).max() < 1e-6


SECRET = b"this belongs to somebody else"


@pytest.mark.parametrize(
    "handle",
    [
        "/etc/passwd",
        "../secret-r7.safetensors",
        "link/secret-r7.safetensors",
        "",
        "..",
        "link",
        ".",
        "/",
        "model-r7.safetensors/../../secret-r7.safetensors",
        "extraction.json",
        "other.safetensors",
        "cmpl-r70-0.safetensors.lock",
        "r7",
        "r7.safetensors\0",
        "r7\n.safetensors",
        "r7" + "x" * 300 + ".safetensors",
        "x/" * 3000 + "r7.safetensors",
        "\ud800r7.safetensors",
        None,
        3,
        True,
        ["r7.safetensors"],
        {"a": "r7.safetensors"},
    ],
)
def test_a_server_that_lies_about_paths(tmp_path, handle):
    """Nothing but this request's file, directly in the folder, is read or deleted."""
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "link").symlink_to(tmp_path)
    for path in (tmp_path / "secret-r7.safetensors", storage / "other.safetensors", storage / "extraction.json"):
        path.write_bytes(SECRET)
    with pytest.raises(FeatureError, match="nothing is read") as e:
        file_of_reply(storage, handle, "r7")
    assert "\n" not in str(e.value) and len(str(e.value)) < 900
    assert all(
        p.read_bytes() == SECRET
        for p in (tmp_path / "secret-r7.safetensors", storage / "other.safetensors", storage / "extraction.json")
    )


def test_names_that_are_the_requests_own(tmp_path):
    for handle in (
        "cmpl-r7-0-ab.safetensors",
        str(tmp_path / "chatcmpl-r7-0.safetensors"),
        f"{tmp_path}/x/../r7.safetensors",
    ):
        assert file_of_reply(tmp_path, handle, "r7").parent == tmp_path.resolve()


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "link as lock", "pipe as lock", "dangling link"])
def test_what_is_no_file_is_not_opened(tmp_path, what):
    """A pipe would be waited for without end; a link leads to what is not the server's."""
    (tmp_path / "secret").write_bytes(SECRET)
    path = tmp_path / "r7.safetensors"
    place = Path(f"{path}.lock") if what.endswith("lock") else path
    {
        "link": lambda: place.symlink_to(tmp_path / "secret"),
        "folder": place.mkdir,
        "pipe": lambda: os.mkfifo(place),
        "dangling": lambda: place.symlink_to("nowhere"),
    }[what.split()[0]]()
    start = time.monotonic()
    with pytest.raises(FeatureError, match="is not read"):
        collect(path, [1, 2], timeout=20)
    assert time.monotonic() - start < 5 and (tmp_path / "secret").read_bytes() == SECRET and os.path.lexists(place)


class Lying(BaseHTTPRequestHandler):
    "Answers as vLLM does, but names the file that the test chooses."

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": "fake", "root": "a verifier"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.reply(
            {
                "choices": [{"prompt_token_ids": body["prompt"]}],
                "kv_transfer_params": {"hidden_states_path": self.server.lie(body["request_id"])},
            }
        )

    def reply(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def lying(lie):
    with ThreadingHTTPServer(("127.0.0.1", 0), Lying) as server:
        server.lie = lie
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_client_deletes_nothing_that_it_did_not_ask_for(tmp_path):
    """Over HTTP: the server names other files of the folder, links out of it, and folders; they are all still there,
    and each reply is refused at once."""
    storage, home = tmp_path / "storage", tmp_path / "home"
    storage.mkdir(), home.mkdir()
    (home / "thesis.safetensors").write_bytes(SECRET)
    for name in ("hs_0.safetensors", "cmpl-somebody.safetensors"):
        (storage / name).write_bytes(SECRET)

    def linked(name):
        (storage / f"{name}.safetensors").symlink_to(home / "thesis.safetensors")
        return f"{name}.safetensors"

    def folder(name):
        (storage / f"{name}.safetensors").mkdir()
        return f"{name}.safetensors"

    for lie in (
        lambda name: "hs_0.safetensors",
        lambda name: str(storage / "cmpl-somebody.safetensors"),
        lambda name: str(home / "thesis.safetensors"),
        lambda name: f"../home/thesis.safetensors?{name}.safetensors",
        linked,
        folder,
    ):
        with lying(lie) as url:
            client = HiddenStatesClient(url, storage, LAYERS, tries=1)
            with pytest.raises(FeatureError):
                client.states([1, 2, 3])
        assert (home / "thesis.safetensors").read_bytes() == SECRET
        assert (
            (storage / "hs_0.safetensors").read_bytes()
            == (storage / "cmpl-somebody.safetensors").read_bytes()
            == SECRET
        )


def test_sweep_touches_only_requests_of_the_dead(tmp_path):
    keep = [f"cmpl-{request_name()}-0-a.safetensors", "hs_0.safetensors", "model.safetensors", "extraction.json"]
    for name in [*keep, f"cmpl-{request_name()}-0-a.safetensors".replace(f"-{os.getpid()}-", f"-{2**22 + 7}-")]:
        (tmp_path / name).touch()
    dead = f"hs-{HOST}-{2**22 + 7}-0a"
    odd = [f"hs-{HOST}-{10**40}-0a.safetensors", f"x{dead}.safetensors", f"{dead}.txt", f"hs-{HOST}-²-0a.safetensors"]
    for name in odd:
        (tmp_path / name).touch()
    (tmp_path / f"{dead}.safetensors").mkdir()
    (tmp_path / f"{dead}-1.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert sweep(tmp_path) == 1 and {p.name for p in tmp_path.iterdir()} == {
        *keep,
        *odd,
        f"{dead}.safetensors",
        f"{dead}-1.safetensors",
    }


def test_the_storage_is_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec, kv = map(json.loads, extraction_options((1, 2, 4), "here")[0][1::2])
    assert kv["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path / "here")
    assert spec["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
