"""Drafters whose weights are stored in FP8: read in every layout, trained on, converted, checked, and written for
vLLM. tests/vllm/check_fp8.py asks compressed-tensors' own code."""

import json
import re
import shutil
from typing import Any

import pytest
import torch
from bad.harness import RELEASE
from safetensors.torch import load_file, save_file
from test_llama_cpp import run, stored

from speculators_nb.core.checkpoints import FP8, to_fp8
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, export_fp8, export_native
from speculators_nb.models.mtp_native import stitch_mtp
from speculators_nb.models.quantised import WRITTEN
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.serve.vllm_contract import check_vllm_contract

DRAFTER, VERIFIER = shipped_data() / "tiny-drafter", shipped_data() / "tiny-verifier"
PLAIN = load_file(DRAFTER / "model.safetensors")


def in_blocks(weight, rows, columns):
    "Codes and scales of blocks, one after the other."
    grid = [[b.abs().max() / 448 for b in part.split(columns, 1)] for part in weight.float().split(rows)]
    codes, meant = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
    for i, j in ((i, j) for i in range(len(grid)) for j in range(len(grid[0]))):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        codes[at] = (weight[at].float() / grid[i][j]).to(FP8)
        meant[at] = codes[at].float() * grid[i][j]
    return codes, torch.tensor(grid), meant


def by_row(weight, dtype=torch.float32):
    codes, scale = to_fp8(weight, (1,))
    scale = scale.to(dtype)
    return codes, scale, codes.float() * scale.float()


def by_tensor(weight):
    codes, scale = to_fp8(weight, (0, 1))
    return codes, scale.reshape(1), codes.float() * scale


def words(strategy, **more):
    "compressed-tensors' config of weights."
    group = dict(targets=["Linear"], weights=dict(num_bits=8, type="float", strategy=strategy, **more))
    return dict(quant_method="compressed-tensors", format="float-quantized", config_groups=dict(group_0=group))


BLOCKS = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[96, 80])
LAYOUTS = {  # quantization_config, name of the scale, weight -> codes, scale, what is meant
    "compressed-tensors, by row": (words("channel"), "weight_scale", by_row),
    "compressed-tensors, scales in bfloat16": (
        words("channel"),
        "weight_scale",
        lambda w: by_row(w, torch.bfloat16),
    ),
    "compressed-tensors, by tensor": (words("tensor"), "weight_scale", by_tensor),
    "compressed-tensors, in blocks": (
        words("block", block_structure=[32, 64]),
        "weight_scale",
        lambda w: in_blocks(w, 32, 64),
    ),
    "fp8, in blocks that do not divide": (BLOCKS, "weight_scale_inv", lambda w: in_blocks(w, 96, 80)),
    "fp8, in blocks that nobody names": (
        dict(quant_method="fp8"),
        "weight_scale_inv",
        lambda w: in_blocks(w, 128, 128),
    ),
    "modelopt": (dict(quant_method="modelopt", quant_algo="FP8"), "weight_scale", by_tensor),
    "modelopt, one number": (
        dict(quant_method="modelopt", quant_algo="FP8"),
        "weight_scale",
        lambda w: (by_tensor(w)[0], by_tensor(w)[1].reshape(()), by_tensor(w)[2]),
    ),
    "modelopt, by row": (
        dict(quant_method="modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
        "weight_scale",
        lambda w: (by_row(w)[0], by_row(w)[1].flatten(), by_row(w)[2]),
    ),
}


def quantised(source, folder, layout, inside=True):
    "A copy of a drafter in a layout, and what its weights mean, in float32."
    quantization, scale_name, how = LAYOUTS[layout]
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    meant = dict(state)
    for name in [n for n in state if n.endswith("_proj.weight") or n == "fc.weight"]:
        scale = name.removesuffix("weight") + scale_name
        state[name], state[scale], meant[name] = how(state[name])
        if layout == "modelopt":  # what an engine rounds activations and its cache by
            state[name.replace(".weight", ".input_scale")] = torch.tensor(0.1)
            if "k_proj" in name:
                state[name.replace(".weight", ".k_scale")] = torch.tensor(1.0)
    save_file({n: w.contiguous() for n, w in state.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if layout == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(dict(quantization=dict(quant_algo="FP8"))))
    else:
        (config["transformer_layer_config"] if inside else config)["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def same(found, meant, dtype=torch.bfloat16):
    assert found.keys() == meant.keys()
    for name, weight in meant.items():
        assert found[name].dtype is dtype and torch.equal(found[name], weight.to(dtype)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout, tmp_path, caplog):
    "To the bit, in the dtype of the other weights or in that which is asked for, and rounded once; it is said once."
    meant = quantised(DRAFTER, tmp_path / "fp8", layout)
    same(SpeculatorModel.from_pretrained(tmp_path / "fp8", verifier=VERIFIER).saved_state(), meant)
    assert [r.message for r in caplog.records] == [
        f"{tmp_path}/fp8: 8 weights are stored quantised, and read as torch.bfloat16"
    ]
    wide = SpeculatorModel.from_pretrained(tmp_path / "fp8", verifier=VERIFIER, dtype="float32")
    same(wide.saved_state(), meant, torch.float32)


@pytest.mark.parametrize("layout", ["compressed-tensors, by row", "fp8, in blocks that do not divide", "modelopt"])
def test_other_projects_layouts_are_read(layout, tmp_path):
    "A research checkpoint in FP8 is converted to whole weights, and loaded as it is."
    native = export_native(DRAFTER, tmp_path / "native", verifier=VERIFIER)
    ours = json.loads((DRAFTER / "config.json").read_text())
    meant = quantised(native, tmp_path / "fp8", layout, inside=False)
    meant = {name.replace("midlayer.", "layers.0."): weight for name, weight in meant.items()}
    convert(tmp_path / "fp8", tmp_path / "ours", VERIFIER)
    same(load_file(tmp_path / "ours/model.safetensors"), meant)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["transformer_layer_config"].keys() == ours["transformer_layer_config"].keys()
    wide = SpeculatorModel.from_pretrained(tmp_path / "fp8", verifier=VERIFIER, dtype="float32")
    same(wide.saved_state(), meant, torch.float32)


def test_an_mtp_head_is_stitched_whole(tmp_path):
    "Into a verifier whose weights are not quantised: the numbers that are meant, and no scales."
    meant = quantised(RELEASE / "mtp", tmp_path / "fp8", "compressed-tensors, by row")
    save_file(meant, tmp_path / "fp8.safetensors")
    shutil.copytree(RELEASE / "mtp", tmp_path / "whole")
    shutil.move(tmp_path / "fp8.safetensors", tmp_path / "whole/model.safetensors")
    found, expected = (
        load_file(stitch_mtp(tmp_path / name, RELEASE / "verifier", tmp_path / f"with {name}") / "model.safetensors")
        for name in ("fp8", "whole")
    )
    same(found, expected, torch.float32)


def test_trained_and_saved_whole(tmp_path):
    "Its gradients exist, and what is saved is a plain drafter, that can be exported."
    quantised(DRAFTER, tmp_path / "fp8", "fp8, in blocks that do not divide")
    model = SpeculatorModel.from_pretrained(tmp_path / "fp8", verifier=VERIFIER, dtype="float32").train()
    L = 12
    batch = dict(
        input_ids=torch.randint(2048, (1, L)),
        hidden_states=torch.randn(1, L, 3 * 128),
        document_ids=torch.zeros(1, L, dtype=torch.long),
        loss_mask=torch.ones(1, L, dtype=torch.bool),
        verifier_last_hidden_states=torch.randn(1, L, 128),
    )
    model(**batch).loss.backward()
    assert model.layers[0].mlp.up_proj.weight.grad.any() and model.fc.weight.grad.any()
    model.save_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert check_vllm_contract(tmp_path / "saved") == []
    for folder in (tmp_path / "saved", export_native(tmp_path / "fp8", tmp_path / "native")):
        assert "quantization_config" not in (tmp_path / folder / "config.json").read_text()
        assert {w.dtype for w in load_file(tmp_path / folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["eagle3 qwen3", "peagle", "dflash", "dspark vanilla", "dflash2"])
def test_export(name, tmp_path, caplog):
    """The matrices of decoder layers and `fc` are rounded, nothing else; the contract holds; what vLLM must leave as it
    is is named, and nothing that is quantised."""
    folder, model = stored(tmp_path, name)
    done = run("export", folder, tmp_path / "fp8", "--to", "fp8")
    assert done.exit_code == 0 and f"Next: speculators-nb serve {tmp_path}/fp8" in done.output, done.output
    state, written = model.saved_state(), load_file(tmp_path / "fp8/model.safetensors")
    layers = [n for n in state if ".self_attn." in n or ".mlp." in n]
    rounded = {n for n, w in state.items() if w.ndim == 2 and (n in layers or n == "fc.weight")}
    assert {n for n, w in written.items() if w.dtype is FP8} == rounded == {n for n in state if WRITTEN.fullmatch(n)}
    assert written.keys() - state.keys() == {f"{n}_scale" for n in rounded}
    assert all(torch.equal(written[n], state[n]) for n in state.keys() - rounded)
    found = SpeculatorModel.from_pretrained(tmp_path / "fp8").saved_state()
    for n in rounded:
        codes, scale = written[n], written[f"{n}_scale"]
        assert scale.shape == (len(codes), 1) and torch.equal(found[n], codes.float() * scale)
        assert ((found[n] - state[n]).abs() <= state[n].abs() / 16 + scale / 2**10).all()  # half a step of e4m3
    caplog.clear()
    assert not [line for line in check_vllm_contract(tmp_path / "fp8") if "quantiz" in line or "tensor" in line]
    assert "read as" not in caplog.text  # they are looked at alone
    config = json.loads((tmp_path / "fp8/config.json").read_text())["transformer_layer_config"]["quantization_config"]
    kept = re.compile("|".join(pattern.removeprefix("re:") for pattern in config["ignore"]))
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for n in linears:
        inside = n if n == "lm_head" else "model." + n.replace("layers.", "layers.3")  # as vLLM numbers them
        assert bool(kept.match(inside)) == (f"{n}.weight" not in rounded), n
    fused = ("model.layers.3.self_attn.qkv_proj", "model.layers.3.mlp.gate_up_proj", "model.fc")
    assert not any(map(kept.match, fused))


def test_export_again(tmp_path):
    "From FP8 to FP8 no number changes any more; a drafter that vLLM reads otherwise is refused, and so are options."
    for source, new in ((DRAFTER, "a"), (tmp_path / "a", "b")):
        export_fp8(source, tmp_path / new)
    first, second = (load_file(tmp_path / new / "model.safetensors") for new in "ab")
    assert (
        max(((first[n].float() - second[n].float()).abs() / 448).max() for n in first if first[n].dtype is FP8) < 0.07
    )
    medusa, _ = stored(tmp_path, "medusa")
    refused = run("export", medusa, tmp_path / "no", "--to", "fp8")
    assert refused.exit_code == 2 and "vLLM does not serve it" in refused.output and not (tmp_path / "no").exists()
    refused = run("export", DRAFTER, tmp_path / "no", "--to", "fp8", "--format", "eagle3")
    assert refused.exit_code == 2 and "format='eagle3': has no effect with to=fp8; leave it out" in refused.output


def test_contract(tmp_path):
    "What vLLM would look for elsewhere, or not find."
    layout, field = "compressed-tensors, by row", "transformer_layer_config.quantization_config"
    quantised(DRAFTER, tmp_path / "outside", layout, inside=False)
    assert check_vllm_contract(tmp_path / "outside") == [
        f"{field} is missing, and weights are quantised; write it there, where alone vLLM looks for it"
    ]
    shutil.copytree(tmp_path / "outside", tmp_path / "plain")
    shutil.copy(DRAFTER / "model.safetensors", tmp_path / "plain/model.safetensors")
    config = json.loads((DRAFTER / "config.json").read_text())
    config["transformer_layer_config"]["quantization_config"] = LAYOUTS[layout][0]
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    assert check_vllm_contract(tmp_path / "plain") == [
        f"{field} is set, and no weight is quantised; remove it, or vLLM expects scales"
    ]
    said: dict[str, Any] = dict(model=str(tmp_path / "plain"), method="eagle3", num_speculative_tokens=4)
    assert SpeculativeConfig(**said, quantization="compressed-tensors").quantization == "compressed-tensors"
    with pytest.raises(ValueError, match="'fp8' contradicts the draft's config.json, which has 'compressed-tensors'"):
        SpeculativeConfig(**said, quantization="fp8")
