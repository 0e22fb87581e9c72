"""What is loaded from a hub, and how many bytes. `test_hub.py` runs this file in a process of its own, because the
hub's client reads its address once, when it is imported."""

from loopback import HUB, SHAPE, bodies, same, size  # before all that imports the hub's client

# isort: split
import json

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from speculators_nb.cli.main import app
from speculators_nb.core.checkpoints import resolve_checkpoint
from speculators_nb.core.config import SpeculatorModelConfig, VerifierConfig
from speculators_nb.data.messages import normalize
from speculators_nb.data.sources import PRESETS, read_conversations
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, export_native
from speculators_nb.models.eagle import EagleSpeculator, EagleSpeculatorConfig
from speculators_nb.models.eagle3 import Eagle3DraftModel
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.nn.target_head import verifier_config
from speculators_nb.verifier.identity import VerifierInfo
from speculators_nb.verifier.mask_token import resolve_mask_token
from speculators_nb.verifier.parts import load_verifier_tensors

pytest_plugins = ["loopback"]  # its fixtures


@pytest.mark.statement("api-71")
def test_two_fields_of_a_config(big):
    assert VerifierConfig.from_pretrained("org/big").architectures == ["Qwen3ForCausalLM"]
    config = verifier_config("org/big")
    assert (config.hidden_size, config.name_or_path) == (64, "org/big")
    info = VerifierInfo.of("org/big")
    assert (info.text.vocab_size, info.fingerprint) == (4096, None)
    assert HUB.bytes() < 100_000 and len(bodies()) == 1
    print("bytes for two fields:", HUB.bytes())


def test_a_plan_reads_one_config(big, tmp_path):
    "Disk, a training step, servers: of the verifier one file of two kilobytes is fetched."
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "verifier: org/big\nfeatures: {data: rows, output_dir: features}\n"
        "train: {data_dir: features, output_dir: draft, total_seq_len: 256}\n"
    )
    found = CliRunner().invoke(app, ["plan", str(recipe), "--disk", "2000", "--memory", "80"])
    assert found.exit_code == 0 and "GB a device" in found.output, found.output
    assert [path.rsplit("/", 1)[1] for path in bodies()] == ["config.json"]
    assert HUB.bytes() < 10_000 < (big / "model-00001-of-00016.safetensors").stat().st_size


def test_parts_of_a_verifier(big):
    parts = load_verifier_tensors("org/big")
    local = load_verifier_tensors(big)
    assert all(torch.equal(parts[n], local[n]) for n in ("embeddings", "head", "norm_weight"))
    assert HUB.bytes() < 1.05 * size(parts)
    before = len(HUB.sent)
    load_verifier_tensors("org/big")
    assert HUB.bytes(before) == 0 and {s.method for s in HUB.sent[before:]} <= {"HEAD"}


def test_a_new_drafter(big):
    model = Eagle3DraftModel.from_training_args(
        draft_layer_config(Qwen3Config(**SHAPE)), verifier_name_or_path="org/big"
    )
    SpeculatorModel.verify_training_compatible(model)
    wanted = size(load_verifier_tensors(big))
    assert HUB.bytes() < 1.05 * wanted
    print("bytes for a new drafter:", HUB.bytes(), "of", wanted, "and", sum(p.stat().st_size for p in big.iterdir()))


def test_nothing_else_of_a_shard_reaches_the_disk(big, tmp_path):
    wanted = size(load_verifier_tensors("org/big"))
    kept = sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*") if p.is_file() and not p.is_symlink())
    assert kept < 1.1 * wanted


def test_a_storage_without_ranges_sends_the_shards(big):
    HUB.ranges = False
    parts = load_verifier_tensors("org/big")
    assert torch.equal(parts["head"], load_verifier_tensors(big)["head"])
    shards = {p.rsplit("/", 1)[1] for p in bodies() if p.endswith(".safetensors")}
    assert {s for s in shards if "00001-of" not in s and "00016-of" not in s} == set()
    before = len(HUB.sent)
    load_verifier_tensors("org/big")
    assert HUB.bytes(before) == 0


def test_one_file(big, tmp_path):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | dict(num_hidden_layers=4), tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    HUB.add("org/tied", tmp_path / "tied")
    parts = load_verifier_tensors("org/tied")
    assert torch.equal(parts["embeddings"], model.model.embed_tokens.weight) and parts["head"] is parts["embeddings"]
    assert HUB.bytes() < 1.05 * size({"table": parts["embeddings"]})
    before = len(HUB.sent)
    load_verifier_tensors("org/tied")
    assert HUB.bytes(before) == 0


def test_a_model_in_the_cache_is_read_there(big):
    resolve_checkpoint("org/big")
    before = len(HUB.sent)
    load_verifier_tensors("org/big")
    assert VerifierInfo.of("org/big").fingerprint == VerifierInfo.of(big).fingerprint is not None
    assert HUB.bytes(before) == 0


@pytest.mark.statement("api-23")
def test_a_drafter_and_its_verifier(big, draft):
    model = SpeculatorModel.from_pretrained("org/draft")
    assert same(model.saved_state(), draft.saved_state())
    assert torch.equal(model.target_head.norm.weight, load_verifier_tensors(big)["norm_weight"])
    SpeculatorModel.verify_training_compatible(model)
    before = len(HUB.sent)
    SpeculatorModel.from_pretrained("org/draft")
    assert sum(s.size for s in HUB.sent[before:] if "/resolve/" in s.path) == 0


def test_borrowed_weights_come_from_the_hub(big, draft, tmp_path):
    "A checkpoint without embedding and head, whose verifier is a hub id."
    file = tmp_path / "draft/model.safetensors"
    state = {n: w for n, w in load_file(file).items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(state, file)
    model = SpeculatorModel.from_pretrained(tmp_path / "draft")
    assert torch.equal(model.embed_tokens.weight, draft.embed_tokens.weight)
    with pytest.raises(ValueError, match="leaves embed_tokens.weight, lm_head.weight to the verifier.*verifier=False"):
        SpeculatorModel.from_pretrained(tmp_path / "draft", verifier=False)
    with pytest.raises(ValueError, match=r"org/big: .* in the cache .*local_files_only=True"):
        SpeculatorModel.from_pretrained(tmp_path / "draft", local_files_only=True, cache_dir=tmp_path / "empty")


def test_a_tokenizer_is_asked_for_without_the_weights(big):
    assert resolve_mask_token("org/big", 4096) == resolve_mask_token(big, 4096)
    assert not [p for p in bodies() if "safetensors" in p]


def test_without_its_verifier_nothing_is_fetched(draft, tmp_path):
    model = SpeculatorModel.from_pretrained(tmp_path / "draft", verifier=False)
    assert HUB.sent == [] and model.target_head.weight is None


@pytest.mark.statement("api-31")
def test_revision_is_the_drafters_alone(big, draft, tmp_path):
    other = {n: w + 1 if w.is_floating_point() else w for n, w in draft.saved_state().items()}
    draft.save_pretrained(tmp_path / "other", state_dict=other)
    commit = HUB.add("org/draft", tmp_path / "other", revision="v2")
    for revision in ("v2", commit):
        model = SpeculatorModel.from_pretrained("org/draft", revision=revision)
        assert torch.equal(model.fc.weight, draft.fc.weight + 1)
    for main in ({}, dict(revision="main")):
        assert torch.equal(SpeculatorModel.from_pretrained("org/draft", **main).fc.weight, draft.fc.weight)
    with pytest.raises(FileNotFoundError, match="org/draft: revision='v3' is not a branch"):
        SpeculatorModel.from_pretrained("org/draft", revision="v3")
    del HUB.models["org/draft"]["v2"]


@pytest.mark.statement("api-26", "api-28", "api-29")
def test_cache_dir_force_download_local_files_only(big, draft, tmp_path):
    there = dict(cache_dir=tmp_path / "there")
    with pytest.raises(FileNotFoundError, match="org/draft: neither .* local_files_only=True") as e:
        SpeculatorModel.from_pretrained("org/draft", local_files_only=True, **there)
    assert HUB.sent == [] and "\n" not in str(e.value) and "hf download org/draft" in str(e.value)
    SpeculatorModel.from_pretrained("org/draft", **there)
    first = HUB.bytes()
    assert (tmp_path / "there/models--org--draft").is_dir() and not (tmp_path / "cache").exists()
    HUB.sent.clear()
    SpeculatorModel.from_pretrained("org/draft", local_files_only=True, **there)
    assert HUB.sent == []
    SpeculatorModel.from_pretrained("org/draft", force_download=True, **there)
    assert 0.9 * first < HUB.bytes() < 1.1 * first
    HUB.sent.clear()
    assert SpeculatorModelConfig.from_pretrained("org/draft", cache_dir=tmp_path / "new") == draft.config
    assert len(bodies()) == 1


@pytest.mark.statement("api-56")
def test_a_config_alone(draft, tmp_path):
    "By the five words of the hub, in one file each time."
    raw = draft.config.to_dict() | {"norm_before_residual": not draft.config.norm_before_residual}
    files = {"config.json": json.dumps(raw).encode()}
    HUB.add("org/draft", files=files, revision="v2", token="hf_secret")
    given = dict(cache_dir=tmp_path / "there", token="hf_secret")
    for wrong in (dict(token="hf_wrong"), dict(local_files_only=True), dict(revision="v3")):
        with pytest.raises(FileNotFoundError, match="org/draft"):
            SpeculatorModelConfig.from_pretrained("org/draft", **given | wrong)
    HUB.sent.clear()
    assert SpeculatorModelConfig.from_pretrained("org/draft", **given) == draft.config
    assert (tmp_path / "there/models--org--draft").is_dir() and len(bodies()) == 1
    HUB.sent.clear()
    assert SpeculatorModelConfig.from_pretrained("org/draft", local_files_only=True, **given) == draft.config
    assert HUB.sent == []
    assert SpeculatorModelConfig.from_pretrained("org/draft", force_download=True, **given) == draft.config
    assert len(bodies()) == 1
    assert SpeculatorModelConfig.from_pretrained("org/draft", revision="v2", **given).to_dict() == raw
    del HUB.models["org/draft"]["v2"]


@pytest.mark.statement("eagle-24")
def test_a_verifier_is_attached_by_its_hub_id(big):
    config = EagleSpeculatorConfig(transformer_layer_config=draft_layer_config(Qwen3Config(**SHAPE)))
    for mode in ("full", "train_only"):
        model = EagleSpeculator(config, verifier="org/big", verifier_attachment_mode=mode)
        assert torch.equal(model.embed_tokens.weight, load_verifier_tensors(big)["embeddings"])
        assert (model.verifier is not None) == (mode == "full")


@pytest.mark.statement("api-30")
def test_token(big, draft):
    HUB.tokens["org/draft"] = HUB.tokens["org/big"] = "hf_secret"
    for token in (None, False, "hf_wrong"):
        with pytest.raises(FileNotFoundError, match="org/draft: neither a local folder nor a model") as e:
            SpeculatorModel.from_pretrained("org/draft", token=token)
        assert "token=" in str(e.value) and "\n" not in str(e.value) and "hf_wrong" not in str(e.value)
    SpeculatorModel.verify_training_compatible(SpeculatorModel.from_pretrained("org/draft", token="hf_secret"))


def test_gated_unknown_and_misspelt(big, draft):
    HUB.gated.add("org/big")
    with pytest.raises(FileNotFoundError, match="org/big: gated; ask for access .* token=") as e:
        SpeculatorModel.from_pretrained("org/draft", verifier="org/big")
    assert "\n" not in str(e.value)
    model = SpeculatorModel.from_pretrained("org/draft")  # drafts all the same
    assert model.target_head.weight is None
    HUB.add("org/empty", files={"README.md": b"-"})
    for name, words in {
        "org/none": "org/none: neither a local folder nor a model of the hub .*check the spelling",
        "org/empty": "org/empty: has no file config.json",
        "a/b/c": "a/b/c: neither a local folder nor a model of the hub, whose names are owner/model",
    }.items():
        for load in (SpeculatorModel.from_pretrained, verifier_config, VerifierConfig.from_pretrained):
            with pytest.raises(FileNotFoundError, match=words) as e:
                load(name)
            assert "\n" not in str(e.value)
    HUB.add("org/pickles", files={"config.json": b'{"model_type": "llama"}', "pytorch_model.bin": b"-"})
    with pytest.raises(FileNotFoundError, match="org/pickles: has no file model.safetensors"):
        load_verifier_tensors("org/pickles")


def test_offline_and_unreachable(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"org/big: neither .* in the cache .*HF_HUB_OFFLINE=1") as e:
        verifier_config("org/big")
    assert "\n" not in str(e.value)
    monkeypatch.undo()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's attempts
    closed = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", closed)
    with pytest.raises(FileNotFoundError, match="org/big: neither .* cannot be reached") as e:
        verifier_config("org/big")
    assert "\n" not in str(e.value)


def test_a_damaged_index_and_a_damaged_shard(big, draft):
    _, files = HUB.models["org/big"]["main"]
    index = json.loads(files["model.safetensors.index.json"])
    wrong = index["weight_map"] | {"lm_head.weight": "../../secret.safetensors"}
    HUB.add("org/out", files=files | {"model.safetensors.index.json": json.dumps({"weight_map": wrong}).encode()})
    with pytest.raises(ValueError, match="leads out of the folder"):
        load_verifier_tensors("org/out")
    last = "model-00016-of-00016.safetensors"
    HUB.add("org/cut", files=files | {last: files[last][:-100]})
    with pytest.raises(ValueError, match="cut off|sent"):
        load_verifier_tensors("org/cut")
    HUB.add("org/text", files=files | {last: b"not a shard of a model at all"})
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_verifier_tensors("org/text")
    swapped = index["weight_map"] | {"lm_head.weight": "model-00002-of-00016.safetensors"}
    HUB.add("org/swap", files=files | {"model.safetensors.index.json": json.dumps({"weight_map": swapped}).encode()})
    with pytest.raises(ValueError, match="does not hold lm_head.weight"):
        load_verifier_tensors("org/swap")


def test_a_foreign_drafter_is_converted(big, draft, tmp_path):
    export_native(tmp_path / "draft", tmp_path / "native", verifier=big)
    HUB.add("org/native", tmp_path / "native")
    convert("org/native", tmp_path / "ours", "org/big")
    expected = SpeculatorModel.from_pretrained(tmp_path / "ours")
    model = SpeculatorModel.from_pretrained("org/native", verifier="org/big")
    assert type(model) is type(expected) and same(model.state_dict(), expected.state_dict())
    assert model.config.speculators_config.verifier.name_or_path == "org/big"
    local = SpeculatorModel.from_pretrained(tmp_path / "native", verifier=big)
    assert same(local.saved_state(), expected.saved_state())
    with pytest.raises(ValueError, match=r"org/native: is no drafter of this library.*from_pretrained\(verifier="):
        SpeculatorModel.from_pretrained("org/native")


@pytest.mark.statement("api-32")
def test_pickles_are_read_as_data_where_asked(big, draft, tmp_path):
    torch.save(draft.saved_state(), tmp_path / "pytorch_model.bin")
    files = {"config.json": (tmp_path / "draft/config.json").read_bytes()}
    files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    HUB.add("org/pickled", files=files)
    for only in (None, True):
        with pytest.raises(FileNotFoundError, match="no model.safetensors"):
            SpeculatorModel.from_pretrained("org/pickled", use_safetensors=only)
    model = SpeculatorModel.from_pretrained("org/pickled", use_safetensors=False)
    assert same(model.saved_state(), draft.saved_state())
    with pytest.raises(ValueError, match="weights_only=False"):
        SpeculatorModel.from_pretrained("org/pickled", use_safetensors=False, weights_only=False)


@pytest.mark.statement("api-25", "api-27")
def test_sizes_dtype_and_device(big, draft, tmp_path, caplog):
    config = json.loads((tmp_path / "draft/config.json").read_text())
    config["transformer_layer_config"]["intermediate_size"] = 96
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="misshapen tensors"):
        SpeculatorModel.from_pretrained(tmp_path / "draft")
    model = SpeculatorModel.from_pretrained(
        tmp_path / "draft", ignore_mismatched_sizes=True, torch_dtype="bfloat16", device_map="cpu"
    )
    assert "layers.0.mlp.down_proj.weight is (64, 512), the model's is (64, 96): made anew" in caplog.text
    assert torch.equal(model.fc.weight, draft.fc.weight.bfloat16()) and model.device.type == "cpu"
    assert model.layers[0].mlp.down_proj.weight.isfinite().all() and model.dtype == torch.bfloat16
    for wrong, words in {
        "dtype": ("int3", "dtype='int3'"),
        "device_map": ({"a": 0, "b": 1}, "a drafter is on one device"),
        "config": (3, "config is a int"),
    }.items():
        with pytest.raises((ValueError, TypeError), match=words[1]):
            SpeculatorModel.from_pretrained(tmp_path / "draft", **{wrong: words[0]})
    by_file = SpeculatorModel.from_pretrained("org/draft", config=SpeculatorModelConfig.from_pretrained("org/draft"))
    assert same(by_file.saved_state(), draft.saved_state())
    draft.config.save_pretrained(tmp_path / "alone")
    for place in (tmp_path / "alone", str(tmp_path / "alone/config.json"), "org/draft"):
        model = SpeculatorModel.from_pretrained(config=place, state_dict=draft.saved_state())
        assert same(model.saved_state(), draft.saved_state())


@pytest.mark.statement("api-62")
def test_push_to_hub(big, draft):
    draft.push_to_hub("me/mine")
    assert {"config.json", "model.safetensors"} <= set(HUB.models["me/mine"]["main"][1])
    again = SpeculatorModel.from_pretrained("me/mine")
    assert same(again.saved_state(), draft.saved_state()) and again.config == draft.config
    draft.config.push_to_hub("me/config")
    assert SpeculatorModelConfig.from_pretrained("me/config") == draft.config


SAID = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
ROWS = {  # a row as each data set has it: where its file is, columns
    "sharegpt": ("a.json", dict(id="x_0", conversations=TURNS)),
    "ultrachat": ("data/train_sft-0.jsonl", dict(prompt="2 + 2?", prompt_id="1", messages=SAID)),
    "gsm8k": ("main/train-0.jsonl", dict(question="2 + 2?", answer="4")),
    "magpie": ("data/train-0.jsonl", dict(uuid="1", instruction="2 + 2?", response="4", conversations=TURNS)),
    "nemotron": ("SFT/chat/c.jsonl", dict(input=SAID[:1], output="4", category="chat", system_prompt="")),
    "sharegpt4v_coco": ("s.json", dict(id="1", image="coco/train2017/1.jpg", conversations=TURNS)),
    "open-perfectblend": ("data/train-0.jsonl", dict(conversations=TURNS, source="x")),
    "hermes-fc": ("f.json", dict(id="1", conversations=TURNS, tools='[{"name": "add"}]', task="t")),
}


def publish(name, *rows):
    "A data set of the hub with the subset and the split that its name stands for."
    repo, *words = PRESETS[name].removeprefix("hf:").split(":")
    file, _ = ROWS[name]
    split = words[-1] if words and words[-1] in ("chat", "train_sft") else "train"
    subset = words[0] if words and words[0] != split else "default"
    about = f"configs:\n- config_name: {subset}\n  data_files:\n  - split: {split}\n    path: {file}\n"
    content = json.dumps(list(rows)) if file.endswith(".json") else "\n".join(map(json.dumps, rows))
    HUB.add(repo, files={"README.md": f"---\n{about}---\n".encode(), file: content.encode()})
    return repo


def test_data_sets_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ROWS.keys() == PRESETS.keys()
    for name, (_, row) in ROWS.items():
        publish(name, row, row | {"image": "sam/2.jpg"} if "image" in row else row)
        rows = list(read_conversations(name))
        assert len(rows) == (1 if name == "sharegpt4v_coco" else 2)  # with pictures of COCO alone
        assert [normalize(found) for found in rows] == [SAID] * len(rows)


@pytest.mark.statement("release-41")
def test_one_file_of_a_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(json.dumps({"messages": SAID, "id": i}) for i in range(3)).encode()
    HUB.add("org/chats", files={"a/b.jsonl": lines, "README.md": b""})
    for name in ("org/chats:a/b.jsonl", "hf://datasets/org/chats/a/b.jsonl"):
        assert [row["id"] for row in read_conversations(name)] == [0, 1, 2]
    with pytest.raises(ValueError, match="org/chats/c.jsonl: cannot be fetched .*; check the names"):
        list(read_conversations("org/chats:c.jsonl"))
