"""Files: whole or not at all, whatever goes wrong; clear errors for what was cut off, misnamed, hostile or pickled.
Registries."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.core import files as utils
from speculators_nb.core.checkpoints import (
    checkpoint_index,
    load_tensors,
    read_state,
    resolve_checkpoint,
    save_tensors,
)
from speculators_nb.core.files import atomic_folder, atomic_write, read_object, write_object
from speculators_nb.core.registry import ClassRegistryMixin, PydanticClassRegistryMixin, ReloadableBaseModel
from speculators_nb.models.formats import write_native
from speculators_nb.regenerate.journal import Journal


def names(folder):
    return sorted(p.name for p in folder.iterdir())


# --- atomic writes under faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, OSError(errno.ENOSPC, "No space left on device"), ValueError("bad")]
)
def test_exception_half_way_keeps_the_old_file_and_nothing_else(tmp_path, error):
    (tmp_path / "a.json").write_text("old")
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind), atomic_write(tmp_path / "a.json") as temporary:
        temporary.write_text("ne")
        raise error
    assert (tmp_path / "a.json").read_text() == "old" and names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_full_while_finishing(tmp_path, monkeypatch, call):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr(utils.os, call, full)
    with pytest.raises(OSError, match="No space left"), atomic_write(tmp_path / "a.json") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a.json").read_text() == "old" and names(tmp_path) == ["a.json"]


def test_a_real_limit_on_file_size_hits_save_tensors(tmp_path):
    "The kernel refuses to grow the file past 64 KiB (safetensors writes it itself, in Rust); the old file survives."
    save_tensors({"x": torch.ones(3)}, tmp_path / "w.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(Exception, match="(?i)too large|i/?o"):
            save_tensors({"x": torch.zeros(1_000_000)}, tmp_path / "w.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert load_tensors(tmp_path / "w.safetensors")["x"].tolist() == [1, 1, 1] and names(tmp_path) == ["w.safetensors"]


def test_killed_in_the_middle_of_a_write(tmp_path):
    "SIGKILL leaves no chance to clean up: a hidden neighbour may stay, but the file is the old one, whole."
    (tmp_path / "a.json").write_text('{"step": 1}')
    code = (
        "import os, signal, sys\nfrom speculators_nb.core.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as t:\n    t.write_text('{\"step\": ')\n    os.kill(os.getpid(), "
        "signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.json")], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "a.json").read_text()) == {"step": 1}
    assert [n for n in names(tmp_path) if not n.startswith(".")] == ["a.json"]


def test_an_object_is_read_back(tmp_path):
    "As it is read by a person; a file name that is no text, too."
    content = {"verifier": "modèles/中文", "file": os.fsdecode(b"a\xff"), "layers": [1, None]}
    write_object(tmp_path / "a.json", content)
    assert read_object(tmp_path / "a.json") == content
    assert "modèles/中文" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_atomic_write_makes_parents_keeps_the_suffix_and_ordinary_permissions(tmp_path):
    with atomic_write(tmp_path / "x/y/a.npy") as temporary:
        assert temporary.parent == tmp_path / "x/y" and temporary.suffix == ".npy"
        temporary.write_bytes(b"1")
    (tmp_path / "plain").write_bytes(b"1")
    assert os.stat(tmp_path / "x/y/a.npy").st_mode == os.stat(tmp_path / "plain").st_mode


def test_an_error_in_the_midst_of_a_read_names_its_file(tmp_path):
    with pytest.raises(OSError, match="No data available") as raised, utils.read_errors(tmp_path / "a"):
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
    assert raised.value.filename == str(tmp_path / "a")


def test_a_config_of_a_foreign_format_is_there_whole_or_not(tmp_path, monkeypatch):
    def torn(file, text, **kwargs):
        file.write_bytes(text[:5].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    write_native(tmp_path, {"a": 1}, {})
    before = (tmp_path / "config.json").read_bytes()
    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="No space left"):
        write_native(tmp_path, {"a": 2}, {})
    assert (tmp_path / "config.json").read_bytes() == before


def test_atomic_folder(tmp_path, monkeypatch):
    target = tmp_path / "checkpoint"
    with atomic_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub/a").write_text("1")
    with atomic_folder(target) as folder:
        (folder / "b").write_text("2")
    assert names(target) == ["b"] and names(tmp_path) == ["checkpoint"]  # replaced as a whole, not merged
    with pytest.raises(OSError), atomic_folder(target) as folder:
        (folder / "c").write_text("3")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(target) == ["b"] and names(tmp_path) == ["checkpoint"]

    rename = os.rename

    def fails_second(source, to):
        if str(to) == str(target) and "b" not in os.listdir(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, to)

    monkeypatch.setattr(utils.os, "rename", fails_second)
    with pytest.raises(OSError, match="Input/output"), atomic_folder(target) as folder:
        (folder / "d").write_text("4")
    assert names(target) == ["b"] and names(tmp_path) == ["checkpoint"]  # the old folder is put back


@pytest.mark.parametrize("name", [".", "..", "sub/.."])
def test_the_working_folder_is_not_replaced(name, tmp_path, monkeypatch):
    "Another folder in its place would leave the shell in one that no longer exists; as a file it is refused as any."
    (tmp_path / "here/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with (
        pytest.raises(ValueError, match="in this folder.* name one that is not there"),
        atomic_folder(name),
    ):
        pass
    with pytest.raises(IsADirectoryError, match="Is a directory"), Journal(name, {}):
        pass
    with pytest.raises(OSError, match="Is a directory"), atomic_write(name):
        pass
    assert names(tmp_path) == ["here"] and names(tmp_path / "here") == ["sub"]


# --- tensors ----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8).filter(
            lambda n: n != "__metadata__"
        ),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**31),
)
def test_tensors_round_trip(tmp_path_factory, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: (torch.randn(shape, generator=generator) * 3).to(dtype) for n, (dtype, shape) in shapes.items()}
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    save_tensors(tensors, path)
    loaded = load_tensors(path)
    assert loaded.keys() == tensors.keys()
    for n, t in tensors.items():
        assert loaded[n].dtype == t.dtype and torch.equal(loaded[n], t)


def test_non_contiguous_and_trainable_tensors_are_saved(tmp_path):
    x = torch.arange(6.0).view(2, 3).T.requires_grad_()
    save_tensors({"x": x}, tmp_path / "x.safetensors", {"made by": "a test"})
    assert torch.equal(load_tensors(tmp_path / "x.safetensors")["x"], x)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_file_is_named(tmp_path, keep):
    save_tensors({"x": torch.arange(100.0)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:keep])
    with pytest.raises(ValueError, match="x.safetensors: not a complete safetensors file"):
        load_tensors(tmp_path / "x.safetensors")


def test_missing_names_and_files(tmp_path):
    save_tensors({"x": torch.ones(1), "y": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no tensor named z. The file holds: x, y"):
        load_tensors(tmp_path / "x.safetensors", ["x", "z"])
    with pytest.raises(FileNotFoundError, match="nowhere.safetensors"):
        load_tensors(tmp_path / "nowhere.safetensors")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def sharded(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_and_shards_are_one_checkpoint(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    tensors = {
        "model.embed_tokens.weight": torch.randn(4, 2),
        "model.norm.weight": torch.randn(2),
        "model.layers.0.input_norm.weight": torch.randn(2),
    }
    save_tensors(tensors, one / "model.safetensors")
    save_tensors({"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}, two / "a.safetensors")
    save_tensors({"model.norm.weight": tensors["model.norm.weight"]}, two / "b.safetensors")
    sharded(
        two,
        {
            "model.embed_tokens.weight": "a.safetensors",
            "model.norm.weight": "b.safetensors",
            "model.layers.0.input_norm.weight": "absent.safetensors",
        },
    )
    index = checkpoint_index(two)  # which opens no shard
    assert checkpoint_index(one).keys() == index.keys() and {f.parent for f in index.values()} == {two}
    got = read_state(one)
    assert got.keys() == tensors.keys() and all(torch.equal(got[n], tensors[n]) for n in got)
    with pytest.raises(FileNotFoundError, match="absent.safetensors"):
        read_state(two)


def test_pickles_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin.*save_pretrained"):
        checkpoint_index(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="Is this a model folder"):
        checkpoint_index(tmp_path)


def test_unknown_hub_id_without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no-such-org/no-such-model: neither a local folder"):
        resolve_checkpoint("no-such-org/no-such-model")


# --- registries -------------------------------------------------------------------------------------------------------


def test_registries_are_separate_and_loud():
    class A(ClassRegistryMixin):
        pass

    class B(ClassRegistryMixin):
        pass

    @A.register("one")
    class One(A):
        pass

    assert A.registered_classes() == {"one": One} and B.registered_classes() == {}
    assert One.registered_classes() == {"one": One}  # a subclass shares its base's table

    class Other(A):
        pass

    with pytest.raises(ValueError, match=r"taken by .*One.*Other cannot"):
        A.register_decorator(Other, "one")
    with pytest.raises(ValueError, match="'two' is not registered. Known: one"):
        A.registered_class("two")
    with pytest.raises(ValueError, match="Known: none"):
        B.registered_class("one")
    A.registered_classes()["x"] = Other  # a copy
    assert "x" not in A.registered_classes()


def test_pydantic_registry_is_a_tagged_union():
    class Base(PydanticClassRegistryMixin):
        schema_discriminator: ClassVar[str] = "kind"
        kind: str

    @Base.register("a")
    class A(Base):
        kind: str = "a"
        n: int = 1

    class Holder(ReloadableBaseModel):
        one: Base

    assert Holder.model_validate({"one": {"kind": "a", "n": 2}}).one == A(n=2)
    assert Base.model_validate({"kind": "a"}) == A()
    assert Holder(one=A(n=3)).model_dump() == {"one": {"kind": "a", "n": 3}}
    with pytest.raises(ValueError, match="'b'"):
        Holder.model_validate({"one": {"kind": "b"}})

    @Base.register("b")
    class B(Base):
        kind: str = "b"

    Holder.reload_schema()
    assert isinstance(Holder.model_validate({"one": {"kind": "b"}}).one, B)
    assert isinstance(Base.model_validate({"kind": "b"}), B)  # the base itself reloads on registration
