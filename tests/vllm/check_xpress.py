"""XPress's refiner by vLLM 0.33's own class and loader, from tensors under the names that our writer gives them.

    .venv-vllm/bin/python tests/vllm/check_xpress.py             runs it again on the recorded tensors
    .venv-vllm/bin/python tests/vllm/check_xpress.py --record    writes tests/fixtures/xpress_vllm.safetensors

`tests/test_xpress.py` holds our code to the file. vLLM cannot run the drafter without Triton; the refiner's definition
it has for processors too. The class is read from the wheel, as check_speculative_config.py does.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from check_speculative_config import in_environment_of_wheel

FILE = Path(__file__).resolve().parents[1] / "fixtures/xpress_vllm.safetensors"
BLOCKS, SLOTS, H, V, RANK, WIDE = 3, 5, 12, 40, 16, 64
SHAPES = {
    "w1.weight": (V, RANK),
    "down_h.weight": (RANK, H),
    "down_g.weight": (RANK, H),
    "in_proj.weight": (RANK, 3 * RANK),
    "mix.L": (RANK, SLOTS, SLOTS),
    "mlp.gate_proj.weight": (WIDE, RANK),
    "mlp.up_proj.weight": (WIDE, RANK),
    "mlp.down_proj.weight": (RANK, WIDE),
    "w2.weight": (V, RANK),
}


def inputs():
    import torch

    g = torch.Generator().manual_seed(0)
    weights = {f"xpress_head.{name}": torch.randn(shape, generator=g) / 3 for name, shape in SHAPES.items()}
    hidden = torch.randn(BLOCKS, SLOTS, H, generator=g)
    return weights | dict(hidden=hidden, in_front=torch.randint(V, (BLOCKS, SLOTS), generator=g))


def outputs(tensors):
    import torch
    from vllm.model_executor.models.qwen3_xpress import Qwen3XPressForCausalLM, XPressRefinerHead

    drafter = torch.nn.Module()
    drafter.model = torch.nn.Module()
    drafter.model.xpress_head = head = XPressRefinerHead(V, H, SLOTS, RANK, WIDE)
    drafter.model._build_fused_kv_buffers = lambda: None  # of layers, which are not here
    weights = {name: w for name, w in tensors.items() if name.startswith("xpress_head.")}
    Qwen3XPressForCausalLM.load_weights(drafter, weights.items())
    with torch.no_grad():
        return dict(bias=head.refine_bias(tensors["in_front"], head.hidden_cache(tensors["hidden"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true")
    record = parser.parse_args().record
    os.environ |= dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    in_environment_of_wheel("0.33.0")
    from safetensors.torch import load_file, save_file

    if record:
        given = inputs()
        save_file({k: v.contiguous() for k, v in (given | outputs(given)).items()}, FILE)
    stored = load_file(FILE)
    worst = max((value - stored[name]).abs().max().item() for name, value in outputs(stored).items())
    print(f"largest difference from the record: {worst:.1e}")
    sys.exit(worst > 1e-4)
