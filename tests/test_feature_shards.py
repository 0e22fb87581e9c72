"""Shards of features: whole or absent after a kill, nothing lost on a full disk, every damage named, and the same
samples as from files of their own."""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_features import N, make_rows, make_verifier

from speculators_nb.core.files import DiskError
from speculators_nb.features import feature_rows
from speculators_nb.features.feature_folder import FeatureDataset, FeatureFolder, origin
from speculators_nb.features.feature_rows import (
    FOLDER,
    FeatureError,
    FeatureShards,
    ShardWriter,
    feature_path,
    remove_unfinished,
    write_features,
)
from speculators_nb.features.in_process import extract_features

SMALL = 1e-5  # GB: a few rows of the tests in a shard


def same(a, b):
    return all(torch.equal(a[i][k], v) for i in range(N) for k, v in b[i].items())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    extract_features(make_verifier(), make_rows(), folder)
    return folder


def shards_of(folder):
    return sorted((Path(folder) / FOLDER).glob("[!.]*"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
def test_the_same_samples_as_from_files(tmp_path, dtype):
    verifier, rows = make_verifier(), make_rows()
    counts = extract_features(verifier, rows, tmp_path / "shards", dtype=dtype, shard_gb=SMALL)
    assert counts == {"written": N, "kept": 0} and len(shards_of(tmp_path / "shards")) > 2
    extract_features(verifier, rows, tmp_path / "files", dtype=dtype)
    a, b = FeatureDataset(tmp_path / "shards"), FeatureDataset(tmp_path / "files")
    assert same(a, b) and (a.shape, a.lengths, a.layer_ids) == (b.shape, b.lengths, b.layer_ids)
    assert extract_features(verifier, rows, tmp_path / "shards", dtype=dtype) == {"written": 0, "kept": N}
    assert not list((tmp_path / "shards").glob("hs_*"))


def test_a_shard_of_the_former_container_is_read(tmp_path):
    "Its header has 4,096 bytes, and the states come first."
    states, ids, starts = torch.randn(5, 2, 8).bfloat16(), torch.arange(5), [0, 2, 5]
    rows = [dict(hidden_states=states[a:b], token_ids=ids[a:b]) for a, b in ((0, 2), (2, 5))]
    sums = [int(feature_rows.checksum_of(row), 16) for row in rows]
    index = {n: torch.tensor(x) for n, x in (("rows", [3, 0]), ("starts", starts), ("checksums", sums))}
    metadata = {"kind": feature_rows.KIND, "index": feature_rows.index_checksum(index)}
    header, content = {"__metadata__": metadata}, b""
    for name, t in {"hidden_states": states, **index, "token_ids": ids}.items():
        data = t.view(torch.uint8).numpy().tobytes()
        code = "I64" if t.dtype == torch.long else "BF16"
        ends = [len(content), len(content) + len(data)]
        header[name], content = dict(dtype=code, shape=[*t.shape], data_offsets=ends), content + data
    (tmp_path / FOLDER).mkdir()
    text = json.dumps(header).encode().ljust(4088)
    (tmp_path / FOLDER / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    shards = FeatureShards(tmp_path, 4)
    assert torch.equal(shards.read(3, range(2)), states[:2]) and torch.equal(shards.read(0, range(2, 5)), states[2:])


def test_files_and_shards_in_one_folder(tmp_path, files):
    "A folder that was begun with files goes on with shards, by two processes, and the other way round."
    verifier, rows = make_verifier(), make_rows()
    extract_features(verifier, rows, tmp_path, indices=range(8))
    for share in (range(8, 16, 2), range(9, 16, 2)):
        assert extract_features(verifier, rows, tmp_path, indices=share, shard_gb=1)["written"] == 4
    assert extract_features(verifier, rows, tmp_path) == {"written": 8, "kept": 16}
    assert len(shards_of(tmp_path)) == 2 and len(list(tmp_path.glob("hs_*"))) == 16
    assert same(FeatureDataset(tmp_path), FeatureDataset(files))


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def test_every_flipped_bit_is_named(tmp_path):
    "In the header, the states, the tokens and the index; nothing damaged is read."
    rows = [np.arange(4 + i) for i in range(5)]
    with ShardWriter(tmp_path, "fp8") as writer:
        for i, ids in enumerate(rows):
            writer.write(i, torch.randn(len(ids), 3, 8), ids)
    (path,) = shards_of(tmp_path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    spots = [*range(0, header, 3), *range(header, len(whole), 5)]
    assert len(spots) > 200
    for at in spots:
        path.write_bytes(flipped(whole, at))
        shards = FeatureShards(tmp_path, 5)
        found = list(shards.damaged)
        for i, ids in enumerate(rows):
            try:
                found += [] if i in shards and shards.read(i, ids) is not None else ["missing"]
            except FeatureError as e:
                found.append(e)
                assert str(path) in str(e)
        assert found, at


@pytest.mark.parametrize("keep", [0, 1, 100, 700, -1])
def test_a_truncated_shard_is_named_and_made_again(tmp_path, files, keep, caplog):
    verifier, rows = make_verifier(), make_rows()
    extract_features(verifier, rows, tmp_path, shard_gb=SMALL)
    victim = shards_of(tmp_path)[1]
    lost = load_file(victim)["rows"].tolist()
    content = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(content[:keep])
    with pytest.raises(FeatureError, match=f"{victim.name}.*cut off"):
        FeatureDataset(tmp_path)[lost[0]]
    data = FeatureDataset(tmp_path, on_bad="skip")
    assert not data[lost[0]]["loss_mask"].any() and data.bad.sum() == 1
    assert extract_features(verifier, rows, tmp_path, shard_gb=SMALL)["written"] == len(lost)
    assert "its rows are made again" in caplog.text
    assert same(FeatureDataset(tmp_path), FeatureDataset(files))


def test_a_file_of_another_table_is_left_alone(tmp_path, caplog):
    extract_features(make_verifier(), make_rows(), tmp_path, shard_gb=1)
    with ShardWriter(tmp_path) as writer:
        writer.write(N + 3, torch.randn(4, 4, 16), range(4))
    save_file({"weights": torch.zeros(2)}, tmp_path / FOLDER / "model.safetensors")
    assert len(FeatureDataset(tmp_path)) == N
    assert "has row 27, the table has 24" in caplog.text and "is no shard of features" in caplog.text
    extract_features(make_verifier(), make_rows(), tmp_path)
    assert len(shards_of(tmp_path)) == 3


def test_a_folder_is_sent_to_processes_and_holds_few_handles(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_rows, "HANDLES", 2)
    extract_features(make_verifier(), make_rows(), tmp_path, shard_gb=SMALL)
    shards = FeatureShards(tmp_path, N)
    for i in np.random.default_rng(0).permutation(N):
        shards.read(int(i))
        assert shards.handle.cache_info().currsize <= 2
    copy = pickle.loads(pickle.dumps(shards))
    assert not copy.handle.cache_info().currsize and torch.equal(copy.read(3), shards.read(3))


FULL = """
import sys, json
from pathlib import Path
sys.path[:0] = [{here!r}]
import torch
from bad.disk import mounted
from speculators_nb.core.files import DiskError
from speculators_nb.features.feature_rows import FeatureShards, ShardWriter
folder = Path({out!r})
assert mounted(folder, "8m")
torch.manual_seed(0)
states = torch.randn(100, 4, 256)  # 205 kB a row: 40 fit
written, said = 0, None
writer = ShardWriter(folder, shard_gb=0.003)
try:
    for i in range(100):
        writer.write(i, states + i, range(100))
        written += 1
except DiskError as e:
    said = str(e)
try:
    writer.close()
except DiskError as e:
    said = said or str(e)
shards = FeatureShards(folder, 100)
kept = [i for i in range(100) if i in shards and torch.equal(shards.read(i, range(100)), (states + i).bfloat16())]
left = [p.name for p in folder.rglob(".*")]
print(json.dumps([said, written, kept, left]))
"""


def can_mount(tmp_path):
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); from pathlib import Path\n"
    code += f"from bad.disk import mounted; sys.exit(not mounted(Path({str(tmp_path / 'try')!r})))"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_full_disk_keeps_what_was_written(tmp_path):
    "8 MB in a file system of its own: the rows before the full disk are readable, and the message names the folder."
    if not can_mount(tmp_path):
        pytest.skip("nothing may be mounted here")
    code = FULL.format(here=os.path.dirname(__file__), out=str(tmp_path / "disk"))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not out.returncode, out.stderr
    said, written, kept, left = json.loads(out.stdout)
    assert str(tmp_path / "disk" / FOLDER) in said and "No space left" in said and "Make room" in said
    assert kept == list(range(28)) and written == 42 and not left  # the third shard, of 14 rows, does not fit


def test_a_read_only_folder_is_named(tmp_path):
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(DiskError, match=FOLDER):
        ShardWriter(tmp_path)


def slow_extraction(folder):
    write = ShardWriter.write

    def slow(*args):
        time.sleep(0.03)
        write(*args)

    ShardWriter.write = slow
    extract_features(make_verifier(), make_rows(), folder, max_tokens=32, writers=1, shard_gb=SMALL)


def test_kill_and_interrupt_then_resume(tmp_path, files):
    "After kill -9 a shard is whole or absent; after Ctrl-C the last one is written with the rows that it has."
    for sent in (signal.SIGKILL, signal.SIGINT):
        before = {i for p in shards_of(tmp_path) for i in load_file(p)["rows"].tolist()}
        child = forked.begin(slow_extraction, tmp_path)
        deadline, n = time.time() + 100, len(shards_of(tmp_path))
        while len(shards_of(tmp_path)) < n + 1:
            assert child.is_alive() and time.time() < deadline
            time.sleep(0.005)
        os.kill(child.pid, sent)
        child.join(60)
        stored = {i for p in shards_of(tmp_path) for i in load_file(p)["rows"].tolist()}
        assert before < stored and (len(stored) < N or sent == signal.SIGINT)  # which may come late
    counts = extract_features(make_verifier(), make_rows(), tmp_path, shard_gb=SMALL)
    assert counts == {"written": N - len(stored), "kept": len(stored)}
    assert not list((tmp_path / FOLDER).glob(".*.safetensors"))
    found = [i for p in shards_of(tmp_path) for i in load_file(p)["rows"].tolist()]
    assert sorted(found) == list(range(N))
    for i in range(N):  # rows are computed in other batches than in `files`
        a, b = (FeatureDataset(f)[i]["hidden_states"].float() for f in (tmp_path, files))
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


def test_what_killed_processes_left_goes_once_nobody_can_be_writing_it(tmp_path):
    fresh, old = tmp_path / ".a.0.safetensors", tmp_path / ".b.0.safetensors"
    fresh.touch(), old.touch()
    os.utime(old, (time.time() - 100_000,) * 2)
    remove_unfinished(tmp_path, alone=False)
    assert fresh.exists() and not old.exists()
    remove_unfinished(tmp_path, alone=True)
    assert not fresh.exists()


def test_what_others_write_is_left_alone(tmp_path):
    "A rank removes half files of its own rows; a file whose row is not in its name, only where nobody else is at work."
    rows = make_rows()
    config = origin({"fingerprint": "x"}, [1, 2], rows, "bfloat16")
    FeatureFolder(tmp_path, rows, config)
    own, others, nameless = (tmp_path / name for name in (".hs_3.a.safetensors", ".hs_4.a.safetensors", ".tmpa1B2c3"))
    for path in (own, others, nameless):
        path.touch()
    FeatureFolder(tmp_path, rows, config, indices=[3], alone=False)
    assert [path.exists() for path in (own, others, nameless)] == [False, True, True]
    FeatureFolder(tmp_path, rows, config)
    assert not others.exists() and not nameless.exists()


SHARED = dict(max_tokens=80, writers=1, shard_gb=3 * SMALL)  # some batches in a shard


def share(out, pause, rank):
    "One of two ranks that fill a folder; slow where it pauses."
    verifier = make_verifier()
    verifier.decoder.register_forward_pre_hook(lambda m, a, k: time.sleep(pause), with_kwargs=True)
    extract_features(verifier, make_rows(60), out, **SHARED, rank=rank, world_size=2)


@pytest.mark.parametrize("killed", [False, True])
def test_ranks_share_a_folder_of_shards(tmp_path, killed):
    """Each has shards of its own. One that is killed after it has closed some loses the rows of the open one, and the
    next run makes these: each row is in one shard, and its states are those of an undisturbed run."""
    torch.set_num_threads(1)  # a forked process would wait for the threads of its parent
    extract_features(make_verifier(), make_rows(60), tmp_path / "alone", **SHARED)
    out = tmp_path / "out"
    first = forked.begin(share, out, 0.2 if killed else 0.0, 0)
    if killed:
        while not shards_of(out):
            assert first.is_alive()
            time.sleep(0.005)
        first.kill()
    second = forked.begin(share, out, 0.0, 1)
    first.join(60), second.join(60)
    assert second.exitcode == 0 and first.exitcode == (-signal.SIGKILL if killed else 0)
    before = sum(len(load_file(path)["rows"]) for path in shards_of(out))
    assert before < 60 if killed else before == 60
    assert extract_features(make_verifier(), make_rows(60), out, **SHARED) == {"written": 60 - before, "kept": before}
    found = [i for path in shards_of(out) for i in load_file(path)["rows"].tolist()]
    assert sorted(found) == list(range(60))
    a, b = (FeatureDataset(f) for f in (out, tmp_path / "alone"))
    assert all(torch.equal(a[i]["hidden_states"], b[i]["hidden_states"]) for i in range(60))
    assert not list((out / FOLDER).glob(".*"))


def test_rows_of_another_size_are_refused(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.write(0, torch.randn(3, 2, 8), range(3))
        with pytest.raises(FeatureError, match=r"row 1: states \[seq, 2, 9\].*has \[seq, 2, 8\]"):
            writer.write(1, torch.randn(3, 2, 9), range(3))
        with pytest.raises(FeatureError, match="row 2: .*not finite"):
            writer.write(2, torch.full((3, 2, 8), torch.nan), range(3))
    assert [i for i in range(3) if i in FeatureShards(tmp_path, 3)] == [0]


def test_opening_a_folder_opens_no_row_file(tmp_path, monkeypatch, caplog):
    "Only the first row's file is opened: a folder of a million files opens as fast as one of ten."
    rows = make_rows()
    config = origin({"fingerprint": "x"}, [1, 2], rows, "bfloat16")
    folder = FeatureFolder(tmp_path, rows, config)
    for i in range(N):
        write_features(feature_path(tmp_path, i), torch.randn(len(rows[i]["input_ids"]), 2, 8), folder.tokens[i])
    opened, real = [], feature_rows.safe_open

    def counted(path, *args):
        opened.append(path)
        return real(path, *args)

    monkeypatch.setattr(feature_rows, "safe_open", counted)
    logging.disable(logging.NOTSET)
    assert FeatureDataset(tmp_path).lengths == rows["seq_len"][:] and len(opened) == 1
