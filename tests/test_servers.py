"""Several servers, one of which is killed, stopped or wrong in the middle: features, answers and training end equal to
the undisturbed run, each row once."""

import json
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from fake_openai import FakeServer
from safetensors.torch import load_file
from sharded import as_torchrun_says, free_port
from test_features_from_server import LAYERS, TRAIN, Fake, check, make_rows, make_verifier, wait_for

from speculators_nb.cli.recipe import read_recipe
from speculators_nb.cli.run import Planned, Stage, serve_line, server_problem, servers_text
from speculators_nb.core.options import check_options
from speculators_nb.data.chat_encoding import save_prepared
from speculators_nb.data.packing import PackedBatchSampler
from speculators_nb.features.from_server import extract_from_server
from speculators_nb.jobs.servers import NoServerLeft
from speculators_nb.regenerate.from_server import regenerate_from_server
from speculators_nb.train.train_drafter import train_drafter


def pair(storage, *options, logs=()):
    "Two servers that write into one folder."
    first, second = logs or (None, None)
    named = lambda log: (*options, "--log", str(log)) if log else options
    return Fake(storage, *named(first)), Fake(storage, *named(second))


def requests(log):
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_features_while_one_of_two_servers_ends(tmp_path, end):
    rows, out = make_rows(), tmp_path / "features"
    one, other = pair(tmp_path / "storage", "--slow", "0.05")
    with one, other:

        def ender():
            wait_for(lambda: len(list(out.glob("hs_*"))) >= 5)
            other.send(end)

        thread = threading.Thread(target=ender)
        thread.start()
        counts = extract_from_server(
            [one.url, other.url], rows, out, one.storage, LAYERS, concurrency=4, dtype="float32", timeout=3
        )
        thread.join()
        assert counts == {"written": 40, "kept": 0, "failed": 0}
        check(out, rows, 40)
        if end == signal.SIGKILL:
            assert one.left() == []


def test_no_server_is_left_and_the_rest_is_done_later(tmp_path):
    rows, out = make_rows(), tmp_path / "features"
    one, other = pair(tmp_path / "storage", "--slow", "0.05")
    given = dict(layer_ids=LAYERS, concurrency=4, dtype="float32")
    with one, other:

        def killer():
            wait_for(lambda: len(list(out.glob("hs_*"))) >= 5)
            one.kill(), other.kill()

        thread = threading.Thread(target=killer)
        thread.start()
        with pytest.raises(NoServerLeft) as e:
            extract_from_server([one.url, other.url], rows, out, one.storage, patience=0.5, **given)
        thread.join()
        message = str(e.value)
        assert "\n" not in message and "for 0.5 s" in message and "run the same command again" in message
        assert all(f"{server.url}: " in message for server in (one, other))
        one.__enter__()  # the other one stays away
        again = extract_from_server([one.url, other.url], rows, out, one.storage, **given)
        assert again["written"] + again["kept"] == 40 and again["kept"] >= 5 and again["failed"] == 0
        check(out, rows, 40)


def test_servers_of_other_weights_are_refused(tmp_path):
    one = Fake(tmp_path / "storage", "--root", "a verifier")
    other = Fake(tmp_path / "storage", "--root", "another")
    with one, other, pytest.raises(ValueError, match="all servers of a job must serve the same"):
        extract_from_server([one.url, other.url], make_rows(), tmp_path / "out", one.storage, LAYERS)
    assert not (tmp_path / "out").exists()


def test_a_wrong_number_of_layers_comes_from_the_other_server(tmp_path):
    rows, out = make_rows(12), tmp_path / "features"
    one, wrong = Fake(tmp_path / "storage"), Fake(tmp_path / "storage", "--slots", "3")
    with one, wrong:
        counts = extract_from_server([wrong.url, one.url], rows, out, one.storage, LAYERS, dtype="float32")
        assert counts["written"] == 12
        check(out, rows, 12)


def test_answers_while_one_of_two_servers_is_killed(tmp_path):
    rows = [
        {
            "id": f"t{i}",
            "messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": ""}],
        }
        for i in range(60)
    ]
    with FakeServer(tokenizer="letters", delay=0.02) as one, FakeServer(tokenizer="letters", delay=0.02) as other:
        servers = [one.url, other.url]
        regenerate_from_server(servers, rows, tmp_path / "whole.jsonl", concurrency=4)
        assert one.seen() and other.seen()  # both had work
        out = tmp_path / "killed.jsonl"

        def killer():
            wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 10)
            other.kill()

        thread = threading.Thread(target=killer)
        thread.start()
        report = regenerate_from_server(servers, rows, out, concurrency=4)
        thread.join()
    assert (report["written"], report["failed"].total()) == (60, 0)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.fixture
def training(tmp_path):
    "Prepared rows, a verifier, and two servers of it with a log each."
    rows = make_rows()
    save_prepared(rows, tmp_path / "rows")
    make_verifier(tmp_path / "verifier")
    logs = tmp_path / "one.log", tmp_path / "other.log"
    servers = pair(tmp_path / "storage", "--slow", "0.02", "--root", str(tmp_path / "verifier"), logs=logs)
    record = {"model": str(tmp_path / "verifier"), "layer_ids": LAYERS, "dtype": "float32"}
    (servers[0].storage / "extraction.json").write_text(json.dumps(record))
    with servers[0], servers[1]:
        yield rows, servers, logs


def test_training_while_one_of_two_servers_is_killed(tmp_path, training):
    """Each row is requested once an epoch, and once more the shortest, at the start; the weights do not depend on
    which server is left."""
    rows, (one, other), logs = training
    given = dict(data_dir=tmp_path / "rows", verifier=tmp_path / "verifier", storage=one.storage) | TRAIN
    whole = train_drafter(output_dir=tmp_path / "whole", url=[one.url, other.url], **given)
    asked = Counter(requests(logs[0]) + requests(logs[1]))
    wanted = Counter({tuple(ids): 3 for ids in rows["input_ids"]})
    assert (asked - wanted).total() == 1 and not wanted - asked
    assert min(len(requests(log)) for log in logs) > 20  # both had work
    before = len(requests(logs[1]))

    def killer():
        wait_for(lambda: len(requests(logs[1])) > before + 25)
        other.kill()

    thread = threading.Thread(target=killer)
    thread.start()
    killed = train_drafter(output_dir=tmp_path / "killed", url=[one.url, other.url], **given)
    thread.join()
    assert killed.state.global_step == whole.state.global_step
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one.left() == ["extraction.json"]


@pytest.mark.nightly
def test_two_ranks_request_each_row_once_an_epoch(tmp_path, training):
    rows, (one, other), logs = training
    packed = PackedBatchSampler([n - 1 for n in rows["seq_len"]], TRAIN["total_seq_len"])
    assert len(packed) % 2 == 0  # else one rank fills its last turn up
    given = TRAIN | dict(url=[one.url, other.url], storage=one.storage, num_train_epochs=2, save_strategy="no")
    port = free_port()

    def one_rank(rank):
        as_torchrun_says(rank, 2, port)
        train_drafter(tmp_path / "rows", tmp_path / "out", tmp_path / "verifier", use_cpu=True, **given)

    ranks = [forked.ask(partial(one_rank, rank)) for rank in (0, 1)]
    for answer in ranks:
        answer()
    asked = Counter(requests(logs[0]) + requests(logs[1]))
    wanted = Counter({tuple(ids): 2 for ids in rows["input_ids"]})
    assert not wanted - asked and (asked - wanted).total() == 2  # each rank tries the shortest row
    assert one.left() == ["extraction.json"]


def test_recipes_and_runs_take_several_servers(tmp_path, capsys):
    from speculators_nb.cli import main as cli

    file = tmp_path / "recipe.yaml"
    two = ["http://127.0.0.1:9", "http://127.0.0.1:11"]
    file.write_text(f"features: {{verifier: v, data: d, output_dir: o, source: vllm, storage: s, server: {two}}}\n")
    values = read_recipe(file, "features", cli.app.functions)
    assert values["server"] == two
    file.write_text("train: {data_dir: d, output_dir: o, storage: s, server: 'http://127.0.0.1:9'}\n")
    training = read_recipe(file, "train", cli.app.functions) | {"extra": ["ttt_steps=4"]}
    assert training["server"] == two[:1]
    line = "serve VERIFIER --hidden-states s --port 9 --run"  # of the server: what is said of training is not
    assert serve_line(Stage("train", "train", training, Path("o"), cli.app.functions["train"]), two[0]).endswith(line)
    file.write_text("evaluate: {drafter: d, data: shipped, engine: vllm, server: ['http://a:1', 'http://b:1']}\n")
    with pytest.raises(ValueError, match=r"evaluate.server=\['http://a:1', 'http://b:1'\]"):
        read_recipe(file, "evaluate", cli.app.functions)
    with pytest.raises(ValueError, match="is no address of a server"):
        check_options({"server": ["http://a:1", "b:1"]}, "train")
    stage = Stage("features", "features", values, Path("o"), cli.app.functions["features"])
    text = servers_text([Planned(stage, "will run", "")])
    assert [line.split()[1] for line in text.splitlines()[2:]] == two
    assert "--port 9 --run" in text and "--port 11 --run" in text
    assert "'http://127.0.0.1:9, http://127.0.0.1:11' does not answer" in server_problem(stage)
    with FakeServer() as up:
        stage.values["server"] = [two[0], up.url]
        assert server_problem(stage) is None
    assert f"server='{two[0]}' does not answer: features begins without it" in capsys.readouterr().out
