"""FP8 drafters by the code that engines read them with: compressed-tensors, and vLLM's reading of our config.json.

    .venv-vllm/bin/python tests/vllm/check_fp8.py          half a minute

- What compressed-tensors makes of a file of `export --to fp8` is what we make of it, to the bit.
- What it quantises, by rows, by tensor and in blocks, scales in float32 and in bfloat16, is read by us as by itself.
- vLLM quantises the layers that we have written, by the names that it gives them, and no others.

`check_vllm.py` serves such a folder.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

import torch  # noqa: E402
from compressed_tensors.compressors.base import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from speculators_nb.models.base import SpeculatorModel  # noqa: E402
from speculators_nb.models.convert import export_fp8  # noqa: E402
from speculators_nb.nn.layers import draft_layer_config  # noqa: E402
from speculators_nb.nn.target_head import verifier_config  # noqa: E402

DRAFTER, VERIFIER = ROOT / "data/tiny-drafter", ROOT / "data/tiny-verifier"
COMPRESSOR = BaseCompressor.get_value_from_registry("float-quantized")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def decompressed(folder, scheme, dtype):
    "The weights of a folder by compressed-tensors."
    stored = load_file(folder / "model.safetensors")
    scales = [name for name in stored if name.endswith(".weight_scale")]
    for module in (name.removesuffix(".weight_scale") for name in scales):
        state = {part: stored.pop(f"{module}.{part}") for part in ("weight", "weight_scale")}
        # its compressor's `decompress` leaves `args` out, and takes a column of blocks for rows
        stored[f"{module}.weight"] = dequantize(state["weight"], state["weight_scale"], args=scheme.weights)
    return {name: weight.to(dtype) for name, weight in stored.items()}, len(scales)


def check_read(name, folder, scheme, dtypes=(torch.float32, torch.bfloat16)):
    "We read what compressed-tensors reads, in dtypes in which it multiplies: that of the scales, and narrower ones."
    for dtype in dtypes:
        theirs, n = decompressed(folder, scheme, dtype)
        ours = SpeculatorModel.from_pretrained(folder, verifier=VERIFIER, dtype=dtype).saved_state()
        assert n and ours.keys() == theirs.keys(), name
        wrong = [n for n in ours if not torch.equal(ours[n], theirs[n])]
        assert not wrong, f"{name}, {dtype}: other numbers in {wrong}"
    print(f"{name}: {n} weights, the same to the bit")


def compress(folder, args, scale_dtype):
    "A copy of the shipped drafter, quantised by compressed-tensors."
    shutil.copytree(DRAFTER, folder)
    state, config = load_file(folder / "model.safetensors"), config_of(folder)
    activations = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    for name in [n for n in state if n.endswith("_proj.weight") or n == "fc.weight"]:
        weight = state.pop(name)
        rows, columns = args.block_structure or (1 if args.strategy == "channel" else len(weight), weight.shape[1])
        blocks = weight.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        scale = scale.flatten() if args.strategy == "tensor" else scale
        made = COMPRESSOR.compress(dict(weight=weight.float(), weight_scale=scale.to(scale_dtype)), scheme)
        state |= {name.removesuffix("weight") + part: value.contiguous() for part, value in made.items()}
    save_file(state, folder / "model.safetensors")
    whole = QuantizationConfig(config_groups=dict(group_0=scheme), format="float-quantized", ignore=["lm_head"])
    config["transformer_layer_config"]["quantization_config"] = json.loads(whole.model_dump_json())
    (folder / "config.json").write_text(json.dumps(config))
    return scheme


def check_names(name, folder, model, quantization):
    "vLLM's choice of layers, by the class and the name of each, for draft layers behind a verifier of 32."
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    read = CompressedTensorsConfig.from_config(json.loads(json.dumps(quantization)))
    read.packed_modules_mapping = dict(qkv_proj=["q_proj", "k_proj", "v_proj"], gate_up_proj=["gate_proj", "up_proj"])
    stored = load_file(folder / "model.safetensors")
    written = {n.removesuffix(".weight_scale") for n in stored if n.endswith(".weight_scale")}
    fused = dict(
        q_proj="qkv_proj", k_proj="qkv_proj", v_proj="qkv_proj", gate_proj="gate_up_proj", up_proj="gate_up_proj"
    )
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for module in linears:
        *path, last = module.split(".")
        if path[:1] == ["layers"]:
            path[1] = str(32 + int(path[1]))
        theirs = ".".join([*(["model"] if module != "lm_head" else []), *path, fused.get(last, last)])
        kind = "ParallelLMHead" if last in ("lm_head", "markov_w2") else "ReplicatedLinear"
        layer = type(kind, (torch.nn.Module,), {})()
        assert (read.get_scheme_dict(layer, theirs) is not None) == (module in written), f"{name}: {module}"
    print(f"{name}: vLLM quantises {len(written)} of {len(linears)} linear layers, those that we wrote")


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        models = {"eagle3": SpeculatorModel.from_pretrained(DRAFTER, verifier=VERIFIER)}
        layers = draft_layer_config(verifier_config(VERIFIER), "qwen3", 2)
        for name in ("peagle", "dflash", "dspark", "dflash2"):
            made = SpeculatorModel.registered_class(name).from_training_args
            models[name] = made(layers, verifier_name_or_path=str(VERIFIER), mask_token_id=0)
        for name, model in models.items():
            model.save_pretrained(tmp / name)
            export_fp8(tmp / name, tmp / f"{name}-fp8")
            quantization = config_of(tmp / f"{name}-fp8")["transformer_layer_config"]["quantization_config"]
            scheme = QuantizationConfig.model_validate(quantization).config_groups["group_0"]
            check_read(f"{name}, ours", tmp / f"{name}-fp8", scheme)
            check_names(name, tmp / f"{name}-fp8", model, quantization)
        common = dict(num_bits=8, type="float", symmetric=True)
        for strategy, more in (("channel", {}), ("tensor", {}), ("block", dict(block_structure=[128, 128]))):
            for dtype in (torch.float32, torch.bfloat16):
                folder = tmp / f"{strategy}-{dtype}"
                scheme = compress(folder, QuantizationArgs(**common, strategy=strategy, **more), dtype)
                name = f"compressed-tensors, {strategy}, scales in {dtype}"
                check_read(name, folder, scheme, {dtype, torch.bfloat16})


if __name__ == "__main__":
    main()
