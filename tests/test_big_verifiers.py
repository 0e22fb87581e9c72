"Verifiers on several places, and quantised ones."

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from speculators_nb.verifier.identity import check_verifier_head, fingerprint
from speculators_nb.verifier.tapped_model import Verifier

TINY = Path(__file__).parents[1] / "data/tiny-verifier"
IDS = torch.arange(3, 40)[None]


def test_layers_on_the_disk_give_the_same_states(tmp_path):
    "A map over CPU and disk, as `auto` makes one where memory is short."
    places = {"model.embed_tokens": "cpu", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    places |= {f"model.layers.{i}": "disk" if i in (2, 3) else "cpu" for i in range(6)}
    loaded = Verifier.from_pretrained(TINY)
    whole = loaded(IDS)
    spread = Verifier.from_pretrained(TINY, device_map=places, offload_folder=tmp_path)
    assert any(p.is_meta for p in spread.model.parameters())
    found = spread(IDS)
    for name in ("logits", "hidden_states", "last_hidden_states"):
        assert torch.equal(getattr(whole, name), getattr(found, name)), name
    assert fingerprint(spread.model) == fingerprint(loaded.model)
    check_verifier_head(spread, IDS[0])


def quantise(folder, method, **more):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quant_method=method, **more)
    (folder / "config.json").write_text(json.dumps(config))


def test_mxfp4_experts_are_read(tmp_path):
    "gpt-oss as it is published: experts in MXFP4, which transformers makes bfloat16 on a CPU."
    config = GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=64, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantise(
        tmp_path, "mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    )
    verifier = Verifier.from_pretrained(tmp_path, [0, 1])
    found = verifier(IDS)
    assert found.logits.isfinite().all() and found.hidden_states.shape == (1, 37, 128)


def test_what_this_machine_cannot_load_is_one_line_that_names_a_server(tmp_path):
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path)
    quantise(tmp_path, "gptq", bits=4, group_size=128)
    with pytest.raises(ValueError, match=r"is quantised \(gptq\).*--source vllm --server") as error:
        Verifier.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
