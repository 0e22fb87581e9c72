"""What comes from elsewhere is data: no pickle is run, no name leads out of its folder, no model brings code unasked,
and no secret is written down."""

import ast
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from bad.harness import typed
from safetensors.torch import load_file, save_file
from test_trainer import Toy, arguments, samples, toy
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from speculators_nb.core.checkpoints import (
    checkpoint_index,
    hub_access,
    inside,
    load_pickle,
    read_index,
    save_tensors,
)
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.core.provenance import without_secrets
from speculators_nb.data.prepared_folder import read_token_freq
from speculators_nb.features.feature_rows import read_legacy
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, detect, export_native
from speculators_nb.models.mtp_native import extract_mtp, stitch_mtp
from speculators_nb.nn.draft_vocabulary import load_vocab_mapping
from speculators_nb.nn.target_head import verifier_config
from speculators_nb.serve.vllm_contract import check_vllm_contract
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.train.trainer import train
from speculators_nb.verifier.mask_token import resolve_mask_token
from speculators_nb.verifier.parts import load_verifier_tensors
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]
SHAPE = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, num_hidden_layers=8)).save_pretrained(folder / "llama")
    AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, num_hidden_layers=2)).save_pretrained(folder / "qwen3")
    return folder


@pytest.fixture
def trap(tmp_path):
    "An object whose pickle makes a folder when it is read in the usual way; the folder must not be there at the end."
    sprung = tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(sprung),)

    pickle.loads(pickle.dumps(Trap()))
    assert sprung.exists(), "a trap that does not spring proves nothing"
    sprung.rmdir()
    yield Trap()
    assert not sprung.exists(), "a pickle was run"


def raw(content, path):
    path.write_bytes(pickle.dumps(content))


def legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


def tarred(content, path):
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(content)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


WAYS = {"zip": torch.save, "legacy": legacy, "plain pickle": raw, "tar": tarred}


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_load_pickle(way, trap, tmp_path):
    for i, content in enumerate(
        (trap, {"fc.weight": torch.ones(2), "more": trap}, [trap], {"fc.weight": [{"deep": trap}]})
    ):
        WAYS[way](content, tmp_path / f"{i}.bin")
        with pytest.raises(
            ValueError, match=f"{i}.bin: refused, this is not a pickle of plain tensors.*Nothing in it was run"
        ):
            load_pickle(tmp_path / f"{i}.bin")


def test_the_refusal_says_what_was_asked(trap, tmp_path):
    torch.save({"a": trap}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="it asks for posix.mkdir, which could be anything"):
        load_pickle(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="y.pt: refused"):
        load_pickle(tmp_path / "y.pt")
    with pytest.raises(FileNotFoundError, match="z.pt: no such file"):
        load_pickle(tmp_path / "z.pt")
    torch.save({"a": torch.arange(3), "n": 1, "l": ["x", (2.5, None)]}, tmp_path / "good.pt")
    assert load_pickle(tmp_path / "good.pt")["l"] == ["x", (2.5, None)]


def test_a_script_archive_is_refused(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(tmp_path / "script.pt"))
    with pytest.raises(ValueError, match="script.pt: refused"):
        load_pickle(tmp_path / "script.pt")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "weights.pt"])
def test_converters(way, file, trap, verifiers, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(SHAPE))
    WAYS[way]({"fc.weight": torch.ones(16, 48), "midlayer.hidden_norm.weight": trap}, source / file)
    source = source / file if file == "weights.pt" else source
    with pytest.raises(ValueError, match="refused, this is not a pickle of plain tensors"):
        detect(source)
    for name in (None, "eagle3"):
        with pytest.raises(ValueError, match="refused, this is not a pickle of plain tensors"):
            convert(source, tmp_path / "out", verifiers / "llama", format=name)
    assert not (tmp_path / "out").exists()


def test_a_shard_of_several(trap, verifiers, tmp_path):
    torch.save({"midlayer.hidden_norm.weight": torch.ones(16)}, tmp_path / "a.bin")
    torch.save({"fc.weight": trap}, tmp_path / "b.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"midlayer.hidden_norm.weight": "a.bin", "fc.weight": "b.bin"}})
    )
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert detect(tmp_path) == "eagle3"  # by the index alone
    with pytest.raises(ValueError, match="b.bin: refused"):
        convert(tmp_path, tmp_path / "out", verifiers / "llama")


def test_readers_of_models_take_no_pickle(trap, verifiers, tmp_path):
    "A verifier or a drafter of ours is safetensors: with a .bin alone it is not read at all."
    for family in ("llama", "qwen3"):
        shutil.copytree(verifiers / family, tmp_path / family)
        (tmp_path / family / "model.safetensors").unlink()
        torch.save({"model.norm.weight": trap}, tmp_path / family / "pytorch_model.bin")
    for read, family in (
        (checkpoint_index, "llama"),
        (load_verifier_tensors, "llama"),
        (extract_mtp, "qwen3"),
        (lambda f: Verifier.from_pretrained(str(f)), "llama"),
        (lambda f: new_drafter("eagle3", f), "llama"),
    ):
        with pytest.raises((FileNotFoundError, OSError)):
            read(tmp_path / family)
    new_drafter("eagle3", verifiers / "llama").save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter/model.safetensors").unlink()
    torch.save({"fc.weight": trap}, tmp_path / "drafter/pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin: pickles can run code"):
        SpeculatorModel.from_pretrained(tmp_path / "drafter")
    assert any("pickles can run code" in line for line in check_vllm_contract(tmp_path / "drafter"))


def test_data_of_old_versions(trap, tmp_path):
    "The samples and counts that speculators 0.3 and 0.4 wrote."
    torch.save(
        {"input_ids": torch.arange(3), "loss_mask": torch.ones(3), "hidden_states": [trap]}, tmp_path / "data_0.pt"
    )
    with pytest.raises(ValueError, match="data_0.pt.*refused"):
        read_legacy(tmp_path / "data_0.pt")
    torch.save({1: 2, 3: trap}, tmp_path / "token_freq.pt")
    with pytest.raises(ValueError, match="token_freq.pt: refused"):
        read_token_freq(tmp_path)


def test_vocabulary_files(trap, tmp_path):
    np.save(tmp_path / "t2d-4.npy", np.array([trap], dtype=object), allow_pickle=True)
    np.save(tmp_path / "d2t-4.npy", np.zeros(4, dtype=np.int64))
    with pytest.raises(ValueError, match="no array of numbers"):
        load_vocab_mapping(tmp_path, 4, 8)


STEPS = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(toy(), samples(4), samples(3, 1), arguments(folder, num_train_epochs=2, **STEPS))
    return folder


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_training_checkpoints(file, trap, trained, tmp_path):
    "Resuming from somebody else's run."
    shutil.copytree(trained, tmp_path / "run")
    last = max((tmp_path / "run").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    torch.save({"state": {}, "param_groups": [], "python": trap}, last / file)
    again = lambda: train(
        Toy(),
        samples(4),
        samples(3, 1),
        arguments(tmp_path / "run", num_train_epochs=4, **STEPS, resume_from_checkpoint=str(last)),
    )
    if file == "training_args.bin":
        again()  # not looked at
    else:
        with pytest.raises(Exception, match="(?i)weights[_ ]only"):
            again()


# --- names and links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "a/../../b", 3, None]
)
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_names_in_an_index(index, name, verifiers, tmp_path):
    (tmp_path / "model").mkdir()
    save_file({"fc.weight": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "model" / index).write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(ValueError, match="leads out of the folder"):
        read_index(tmp_path / "model" / index)
    with pytest.raises(ValueError, match="leads out of the folder"):
        convert(tmp_path / "model", tmp_path / "out", verifiers / "llama")
    if index.startswith("model"):
        with pytest.raises(ValueError, match="leads out of the folder"):
            checkpoint_index(tmp_path / "model")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}', '{"weight_map": {"a": {}}}']
)
def test_an_index_that_is_none(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="not an index of shards|not JSON|holds a list|leads out"):
        checkpoint_index(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "shard.safetensors"])
def test_links(file, verifiers, tmp_path):
    "A link out of a model's folder is not followed; the hub's cache links into its own blobs, which is."
    save_file({"fc.weight": torch.ones(1)}, tmp_path / "elsewhere")
    model = tmp_path / "model"
    model.mkdir()
    (model / file).symlink_to(tmp_path / "elsewhere")
    if file.startswith("shard"):
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": file}}))
    with pytest.raises(ValueError, match="a link that leads out of the folder, to .*copy the file here"):
        checkpoint_index(model)
    with pytest.raises(ValueError, match="a link that leads out of the folder"):
        detect(model)
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/0123").mkdir(parents=True)
    (cache / "blobs/abc").write_bytes((tmp_path / "elsewhere").read_bytes())
    (cache / "snapshots/0123/model.safetensors").symlink_to(Path("../../blobs/abc"))
    assert checkpoint_index(cache / "snapshots/0123").keys() == {"fc.weight"}
    (cache / "snapshots/0123/other").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="leads out"):
        inside(cache / "snapshots/0123", "other")
    (model / "link").symlink_to(model / file, False)
    (tmp_path / "whole").symlink_to(cache / "snapshots/0123")  # a link to the folder itself is the user's own
    assert checkpoint_index(tmp_path / "whole").keys() == {"fc.weight"}


@pytest.mark.parametrize("where", ["tokenizer.json", "sub/notes.txt"])
def test_stitching_copies_nothing_from_elsewhere(where, verifiers, tmp_path):
    "A copied folder would carry what a link points at."
    (tmp_path / "secret").write_text("private")
    folder = tmp_path / "verifier"
    shutil.copytree(verifiers / "qwen3", folder)
    (folder / where).parent.mkdir(exist_ok=True)
    (folder / where).symlink_to(tmp_path / "secret")
    new_drafter("mtp", verifiers / "qwen3", fresh_head=True).save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="a link that leads out of the folder"):
        stitch_mtp(tmp_path / "head", folder, tmp_path / "out")
    with pytest.raises(ValueError, match="a link that leads out of the folder"):
        export_native(tmp_path / "head", tmp_path / "out", verifier=folder)
    assert not (tmp_path / "out").exists()


# --- code that comes with a model -------------------------------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({marker!r}).mkdir(exist_ok=True)
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own_code"
"""


@pytest.fixture
def own_code(verifiers, tmp_path, monkeypatch):
    "A verifier that says: to read me, run my file. Whoever asks the person at the keyboard gets a yes."
    marker, folder = tmp_path / "ran", tmp_path / "own"
    shutil.copytree(verifiers / "llama", folder)
    (folder / "configuration_own.py").write_text(CODE.format(marker=str(marker)))
    auto = dict.fromkeys(
        ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"), "configuration_own.OwnConfig"
    )
    config = json.loads((folder / "config.json").read_text()) | dict(model_type="own_code", auto_map=auto)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            dict(tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": ["configuration_own.OwnConfig", None]})
        )
    )
    monkeypatch.setattr("builtins.input", lambda *a: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, marker


def test_nothing_runs_unasked(own_code, verifiers, tmp_path):
    folder, marker = own_code
    drafter = new_drafter("eagle3", verifiers / "llama")
    drafter.save_pretrained(tmp_path / "drafter")
    native = export_native(tmp_path / "drafter", tmp_path / "native")
    named = json.loads((tmp_path / "drafter/config.json").read_text())
    named["speculators_config"]["verifier"]["name_or_path"] = str(folder)
    (tmp_path / "named").mkdir()
    shutil.copy(tmp_path / "drafter/model.safetensors", tmp_path / "named")
    (tmp_path / "named/config.json").write_text(json.dumps(named))
    calls = dict(
        config=lambda: verifier_config(folder),
        verifier=lambda: Verifier.from_pretrained(str(folder)),
        fresh=lambda: new_drafter("eagle3", folder),
        block=lambda: new_drafter("dflash", folder, "qwen3"),
        heads=lambda: new_drafter("medusa", folder),
        load=lambda: SpeculatorModel.from_pretrained(tmp_path / "drafter", verifier=folder),
        named=lambda: SpeculatorModel.from_pretrained(tmp_path / "named"),
        contract=lambda: check_vllm_contract(tmp_path / "named"),
        mask=lambda: resolve_mask_token(folder, 32),
        convert=lambda: convert(native, tmp_path / "out", folder),
        export=lambda: export_native(tmp_path / "named", tmp_path / "out"),
    )
    for name, call in calls.items():
        try:
            call()
        except (ValueError, OSError, KeyError) as e:
            assert "trust_remote_code" in str(e) or "tokenizer" in str(e) or "own_code" in str(e), (name, e)
        assert not marker.exists(), f"{name} ran the model's code"


def test_code_runs_where_it_is_asked_for(own_code):
    folder, marker = own_code
    with hub_access(remote_code=True):
        assert verifier_config(folder).model_type == "own_code"
    assert marker.exists()
    marker.rmdir()
    with pytest.raises(ValueError, match="trust_remote_code"):
        verifier_config(folder)


def test_a_drafters_config_runs_nothing(tmp_path):
    "`auto_map` in a checkpoint of ours or upstream's is dropped."
    config = SpeculatorModel.registered_class("eagle3").config_class(
        auto_map={"": "config.Evil", "AutoConfig": "config.Evil"}
    )
    assert (
        not hasattr(config, "auto_map")
        and "auto_map"
        not in SpeculatorModelConfig.from_dict(config.to_dict() | dict(auto_map={"AutoConfig": "x.Y"})).to_dict()
    )


# --- the source itself ------------------------------------------------------------------------------------------------

OWN = {"lab.experiment"}  # reads what this repository ships


def calls():
    for path in sorted((ROOT / "speculators_nb").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "speculators_nb").with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield module, ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}, node


FORBIDDEN = {
    "eval",
    "exec",
    "os.system",
    "pickle.load",
    "pickle.loads",
    "marshal.loads",
    "shelve.open",
    "yaml.unsafe_load",
    "yaml.full_load",
    "joblib.load",
    "dill.load",
}


def test_the_package_calls_nothing_dangerous():
    found = []
    for module, name, given, node in calls():
        if name in FORBIDDEN or name.endswith((".extractall", "read_pickle")):
            found.append((module, node.lineno, name))
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append((module, node.lineno, name))
        if name == "np.load" and given.get("allow_pickle", "False") != "False":
            found.append((module, node.lineno, name))
        if name == "yaml.load" and ast.unparse(node.args[1]) != "_Strict":
            found.append((module, node.lineno, name))
        if given.get("shell") == "True":
            found.append((module, node.lineno, name))
    assert not found


def test_every_automatic_class_says_whether_code_is_trusted():
    missing = [
        (m, n.lineno, name)
        for m, name, given, n in calls()
        if m not in OWN
        and name.startswith("Auto")
        and name.endswith((".from_pretrained", ".from_config"))
        and not {"trust_remote_code", None} & given.keys()
    ]
    assert not missing, "transformers asks the person at the keyboard where trust_remote_code is not given"


def test_servers_listen_to_this_machine_alone():
    found = [
        (p.name, n.lineno, ast.unparse(d))
        for p in (ROOT / "speculators_nb").rglob("*.py")
        for n in ast.walk(ast.parse(p.read_text()))
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        for a, d in [*zip(n.args.args[::-1], n.args.defaults[::-1]), *zip(n.args.kwonlyargs, n.args.kw_defaults)]
        if a.arg == "host" and d is not None
    ]
    assert len(found) >= 2 and {default for *_, default in found} == {"'127.0.0.1'"}, found


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_the_working_directory_is_no_secret(monkeypatch):
    "A shell names it PWD, as others name a password; a printed command must still name its folders."
    monkeypatch.setenv("PWD", "/home/me/project")
    monkeypatch.setenv("DB_PWD", "letmein-letmein")
    assert (
        without_secrets("vllm serve /home/me/project/drafter letmein-letmein")
        == "vllm serve /home/me/project/drafter ***"
    )


def test_no_secret_in_output_logs_or_files(verifiers, tmp_path):
    """A conversion through the command line, one that succeeds and two that fail, with keys in the environment and in
    an argument."""
    new_drafter("eagle3", verifiers / "llama").save_pretrained(tmp_path / "drafter")
    native = export_native(tmp_path / "drafter", tmp_path / "native")
    secrets = dict(
        HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz012345",
        OPENAI_API_KEY="sk-0123456789abcdefghijklmnop",
        WANDB_API_KEY="f" * 40,
    )
    env = {**os.environ, **secrets, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    program, url = Path(sys.executable).with_name("speculators-nb"), f"https://user:{secrets['HF_TOKEN']}@host/x"
    of_llama = "--verifier", str(verifiers / "llama")
    lines = [
        ["convert", native, "made", *of_llama],
        ["convert", native, "no", "--verifier", "somebody/private-model"],
        ["convert", url, "no", *of_llama],
    ]

    def run():
        os.environ |= env
        os.chdir(tmp_path)
        return [typed([*map(str, line)]) for line in lines]

    given = dict(env=env, cwd=tmp_path, capture_output=True, text=True)
    traced = subprocess.run([program, "--traceback", *lines[2]], **given)
    good, *bad = forked.ask(run)()
    assert good[0] == 0, good[2][-2000:]
    bad += [(traced.returncode, traced.stdout, traced.stderr)]
    assert all(code for code, *_ in bad)
    said = "".join(out + err for _, out, err in (good, *bad))
    assert "Traceback" in traced.stderr and all("://***@host/x" in bad[i][2] for i in (1, 2))
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    for secret in secrets.values():
        assert secret not in said
        assert not [p for p in files if secret.encode() in p.read_bytes()]
    assert (
        load_file(tmp_path / "made/model.safetensors").keys()
        == load_file(tmp_path / "drafter/model.safetensors").keys()
    )


def test_the_working_folder_is_no_password(tmp_path):
    "A shell keeps it in PWD, and it begins the path of most files."
    done = subprocess.run(
        [Path(sys.executable).with_name("speculators-nb"), "train", tmp_path / "features", tmp_path / "drafter"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PWD": str(tmp_path), "OLDPWD": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2 and str(tmp_path / "features") in done.stderr and "***" not in done.stderr


# --- who may read -----------------------------------------------------------------------------------------------------


def test_what_is_written_follows_the_umask(tmp_path):
    """safetensors writes 0600 whatever the umask says; another user's server must be able to read features, checkpoints
    and drafters."""
    umask = 0o027  # no program's default
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 1, 1]}\n' * 3)
    train = "train features drafter --total-seq-len 32 --eval-share 0 --extra max_steps=1 --extra save_steps=1"
    lines = "features rows.jsonl features", f"{train} --extra save_strategy=steps", "export drafter native"

    def write():
        os.umask(umask)
        os.chdir(tmp_path)
        save_tensors({"x": torch.zeros(3)}, "one.safetensors")
        return [typed([*line.split(), "--verifier", str(ROOT / "data/tiny-verifier")]) for line in lines]

    assert [(code, wrong[-2000:]) for code, _, wrong in forked.ask(write)() if code] == []
    rows.unlink()
    modes = {str(p.relative_to(tmp_path)): p.stat().st_mode & 0o777 for p in tmp_path.rglob("*") if p.is_file()}
    assert {
        "one.safetensors",
        "features/hs_0.safetensors",
        "drafter/model.safetensors",
        "drafter/checkpoint-1/model.safetensors",
        "native/model.safetensors",
    } <= modes.keys()
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~umask} == {}
