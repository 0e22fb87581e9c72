"""Secrets and records, errors of disks and hubs, pauses, workers that end with their parent, progress in a log."""

import contextlib
import errno
import hashlib
import io
import json
import logging
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from tqdm.std import tqdm

from speculators_nb.core import concurrency
from speculators_nb.core import provenance as records
from speculators_nb.core.checkpoints import (
    HubAccess,
    current_hub_access,
    first_cause,
    hub_access,
    hub_problem,
    model_file,
    push_errors,
    tensor_problem,
)
from speculators_nb.core.concurrency import WIDTH, pause, plain_progress, worth_retrying
from speculators_nb.core.files import DiskError, check_folder, disk_errors, not_only_ours, read_object
from speculators_nb.core.provenance import identify, provenance, read_provenance, without_secrets, write_provenance


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("EXAMPLE_API_KEY", "a-very-private/word")
    monkeypatch.setenv("PWD", "/home/me/work")  # every shell sets it to the working folder: no password


def test_secrets_are_hidden_in_records(key):
    arguments = {
        "url": "https://me:letmein@example.org/v1?api_key=abcdef&n=2",
        "api_key": "xyz",
        "api_key_env": "EXAMPLE_API_KEY",
        "max_tokens": 64,
        "eos_token": "<|im_end|>",
        "header": {"Authorization": "Bearer abcdefgh"},
        "note": "called with a-very-private/word",
        "part of an address": "?q=a-very-private%2Fword",
        "hub": "hf_abcdefghijklmnopqrstuv",
        "extra": ["hub_token=abcdef", "warmup_steps=3"],
        "text": "password: 'abcdef', tokens: 3",
    }
    cleaned = without_secrets(arguments)
    assert not any(word in json.dumps(cleaned) for word in ("letmein", "abcdef", "xyz", "private"))
    assert [cleaned[k] for k in ("api_key_env", "max_tokens", "eos_token")] == ["EXAMPLE_API_KEY", 64, "<|im_end|>"]


@pytest.mark.parametrize(
    "text",
    [
        "eos_token=<|im_end|>",
        "max_tokens=64, token 17 of 32",
        "hf_hub_download",
        "http://127.0.0.1:8000/v1/models",
        "key=3",
        "see https://example.org/@somebody/page",
        "monkey: banana",
        "set the environment variable VLLM_API_KEY instead",
        "api_key=None",
        "a keyword: value",
        "vllm serve /home/me/work/drafter",
    ],
)
def test_what_is_no_secret_stays(key, text):
    assert without_secrets(text) == text


def test_secrets_are_hidden_in_what_is_printed(key, monkeypatch, capsys):
    hooks = (sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook"), (warnings, "formatwarning")
    for module, name in hooks:
        monkeypatch.setattr(module, name, getattr(module, name))
    factory = logging.getLogRecordFactory()
    try:
        records.hide_secrets()
        printed, log = io.StringIO(), logging.getLogger("a library")
        log.propagate = False
        log.addHandler(logging.StreamHandler(printed))
        try:
            raise OSError("GET https://me:letmein@example.org/: refused")
        except OSError as e:
            log.exception("with the key %s", "a-very-private/word")
            sys.excepthook(type(e), e, e.__traceback__)
        printed.write(warnings.formatwarning("token=a-very-private/word", UserWarning, "a file", 3))
        text = printed.getvalue() + capsys.readouterr().err
    finally:
        logging.setLogRecordFactory(factory)
    assert "private" not in text and "letmein" not in text and "with the key ***" in text
    assert text.count("Traceback") == 2


def test_an_input_is_known_by_its_content(tmp_path):
    chats, model = tmp_path / "chats.jsonl", tmp_path / "model"
    chats.write_text('{"messages": []}\n')
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = identify(model)["sha256"]
    (model / "config.json").write_text("[]")
    assert identify(model)["sha256"] != before
    assert identify(chats)["sha256"] == hashlib.sha256(chats.read_bytes()).hexdigest()
    assert identify("http://127.0.0.1:8000") == {"path": "http://127.0.0.1:8000"}
    record, found = {"command": "train", "arguments": {"seed": 0, "resume": False}, "generated_at": "now"}, []
    for change in ({}, {"generated_at": "later"}, {"arguments": {"seed": 0, "resume": True}}):
        (model / "provenance.json").write_text(json.dumps(record | change))
        found.append(identify(model)["sha256"])
    assert len(set(found)) == 1  # when it was made, and whether in one go, is no content
    (model / "model.safetensors").write_text("weights")
    found.append(identify(model)["sha256"])
    (model / "config.json").write_text('{"speculative_tokens": 3}')  # as the doctor says
    found.append(identify(model)["sha256"])
    assert len(set(found)) == 3


def test_a_record_keeps_earlier_ones(tmp_path):
    chats, prepared = tmp_path / "chats.jsonl", tmp_path / "prepared"
    chats.write_text("{}\n")
    for length in (2048, 1024):
        write_provenance(prepared, "prepare", {"max_length": length, "api_key": "xyz"}, {"data": chats}, rows=1)
    record = read_provenance(prepared)
    assert record["arguments"] == {"max_length": 1024, "api_key": "***"} and list(record["inputs"]) == ["data"]
    assert [r["arguments"]["max_length"] for r in record["earlier"]] == [2048]
    assert provenance("features", inputs={"rows": prepared})["inputs"]["rows"] == identify(prepared)
    with pytest.raises(Exception, match="unknown what made"):
        read_provenance(chats)


@pytest.mark.parametrize(
    "error,raised,text",
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskError, "Make room"),
        (OSError(errno.EDQUOT, "Quota exceeded"), DiskError, "Make room"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            DiskError,
            "Make room",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "run/model.safetensors"), DiskError, "run/model"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "run"), DiskError, "run/model"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), ConnectionRefusedError, "refused"),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere/x"), PermissionError, "elsewhere"),
        (FileNotFoundError(errno.ENOENT, "No such file", "./config.json"), FileNotFoundError, "config"),
    ],
)
def test_errors_of_a_disk_and_of_others(error, raised, text):
    with pytest.raises(raised, match=text), disk_errors("run/model.safetensors"):
        raise error


def test_what_a_folder_or_file_is_instead(tmp_path):
    (tmp_path / "data_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no config.json, so it is no drafter, but training data"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="is no drafter of this library"):
        check_folder(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_object(tmp_path / "deep.json")
    program = tmp_path / "program"
    program.touch(0o755)
    assert not_only_ours(program) is None
    program.chmod(0o775)
    assert "mode 775" in not_only_ours(program)


def test_errors_of_the_hub(tmp_path):
    with pytest.raises(OSError, match="org/model: not pushed to"), push_errors("org/model"):
        raise hub_errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1")
    busy = hub_errors.LocalEntryNotFoundError("not in the cache")
    busy.__cause__ = hub_errors.FileMetadataError("no header X-Repo-Commit")
    assert first_cause(busy) is busy.__cause__
    with hub_access(local_files_only=True, cache_dir=tmp_path, revision="v2"):
        assert "local_files_only=True allows no download" in str(
            hub_problem(hub_errors.LocalEntryNotFoundError("…"), "org/model", "config.json")
        )
        with pytest.raises(FileNotFoundError, match="org/model: neither a local folder nor a model"):
            model_file("org/model")
        with hub_access(cache_dir=None):  # what is not named stays as it was
            assert current_hub_access().cache_dir == tmp_path
    assert current_hub_access() == HubAccess()


def test_a_tensor_of_another_kind_is_named():
    wanted = torch.zeros(2, 3)
    found = (torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3).long(), wanted / 0)
    assert [bool(tensor_problem("fc.weight", tensor, wanted)) for tensor in found] == [False, True, True, True]


def test_pauses_and_what_is_worth_a_retry():
    assert [s for s in (400, 401, 404, 422, 429, 500, 503) if worth_retrying(s)] == [429, 500, 503]
    assert (pause(1, "7"), pause(1, "3600")) == (7, 60) and pause(1, "Wed, 21 Oct 2026 07:28:00 GMT") <= 0.5


POOL = """
import multiprocessing, os, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from speculators_nb.core.concurrency import end_with_parent
pool = ProcessPoolExecutor(2, multiprocessing.get_context(sys.argv[1]), end_with_parent)
pool.submit(int).result()
for _ in range(4):
    pool.submit(time.sleep, 60)
print("two workers", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_end_with_a_parent_that_is_killed(method):
    "They hold its standard output, so that `run` returns when all have ended."
    ended = subprocess.run([sys.executable, "-c", POOL, method], capture_output=True, text=True, timeout=50)
    assert (ended.stdout, ended.returncode) == ("two workers\n", -9)


def test_progress_is_whole_lines_where_there_is_no_terminal(monkeypatch):
    log, terminal, now = io.StringIO(), io.StringIO(), [0.0]
    monkeypatch.setattr(concurrency.time, "monotonic", lambda: now[0])
    with contextlib.redirect_stderr(log), plain_progress():
        with tqdm(total=1000, desc="prepare", mininterval=0) as bar:
            for _ in range(40):
                now[0] += 3.1
                bar.update(25)
        print("a warning", file=sys.stderr)
        list(tqdm(range(1000), desc="short"))
        print("\nanother", file=sys.stderr)
    lines = log.getvalue().splitlines()
    wanted = ["prepare: 5", "prepare: 30", "prepare: 55", "prepare: 80", "prepare: 100", "a warning", "", "another"]
    assert [line.split("%")[0] for line in lines] == wanted
    assert "\r" not in log.getvalue() and max(map(len, lines)) <= WIDTH and "1000/1000" in lines[4]
    terminal.isatty = lambda: True
    with contextlib.redirect_stderr(terminal), plain_progress():
        list(tqdm(range(1000), desc="short"))
    assert terminal.getvalue().startswith("\r")
