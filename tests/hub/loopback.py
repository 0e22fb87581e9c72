"""A hub on this machine for the files beside this one. Imported first: the client of the hub reads its address once."""

import os
import tempfile

from server import Hub

HUB = Hub()
os.environ.update(HF_ENDPOINT=HUB.url, HF_HOME=tempfile.mkdtemp(), HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")
for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
    os.environ.pop(name, None)

import json  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from speculators_nb.core.checkpoints import hub_access  # noqa: E402
from speculators_nb.models.eagle3 import Eagle3DraftModel  # noqa: E402
from speculators_nb.nn.layers import draft_layer_config  # noqa: E402

SHAPE = dict(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=512,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="session")
def big(tmp_path_factory):
    "A verifier of 16 shards: folder, published as org/big; the head is its own."
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    folder = tmp_path_factory.mktemp("big")
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    state, where = model.state_dict(), {}
    for i in range(16):
        file = f"model-{i + 1:05}-of-00016.safetensors"
        part = {n: w for n, w in state.items() if f"layers.{i}." in n}
        if i == 0:
            part["model.embed_tokens.weight"] = state["model.embed_tokens.weight"]
        if i == 15:
            part |= {n: state[n] for n in ("model.norm.weight", "lm_head.weight")}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    assert where.keys() == state.keys()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    HUB.add("org/big", folder)
    return folder


@pytest.fixture
def draft(big, tmp_path):
    "A drafter for org/big, which was made from the folder; published as org/draft."
    model = Eagle3DraftModel.from_training_args(
        draft_layer_config(Qwen3Config(**SHAPE)), verifier_name_or_path=str(big)
    )
    model.config.speculators_config.verifier.name_or_path = "org/big"
    model.save_pretrained(tmp_path / "draft")
    HUB.add("org/draft", tmp_path / "draft")
    return model


@pytest.fixture(autouse=True)
def clean(tmp_path):
    "Each test has a cache of its own."
    HUB.reset()
    with hub_access(cache_dir=tmp_path / "cache"):
        yield


def size(parts):
    return sum(w.numel() * w.element_size() for w in parts.values() if w is not None)


def bodies():
    return [s.path for s in HUB.sent if s.size and s.status < 300]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
