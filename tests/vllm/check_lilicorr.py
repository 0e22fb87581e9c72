"""LiLiCorr's scores of a lattice by vLLM 0.32's own class and loader, from tensors under the names that ours have.

    .venv-vllm/bin/python tests/vllm/check_lilicorr.py             runs it again on the recorded tensors
    .venv-vllm/bin/python tests/vllm/check_lilicorr.py --record    writes tests/fixtures/lilicorr_vllm.safetensors

`tests/test_lilicorr.py` holds our code to the file. vLLM cannot run the drafter without Triton; the scorer it can, for
whole blocks and for shorter ones, and for a block without context.
"""

import argparse
import os
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "fixtures/lilicorr_vllm.safetensors"
BLOCKS, SHORT, H = 3, 2, 12
GEOMETRY = dict(candidate_topk=4, hidden_size=8, num_layers=2, num_heads=2, factor_dim=6, mlp_ratio=1.5)
CONFIG = {f"lilicorr_{name}": value for name, value in (GEOMETRY | dict(logit_scale=8.0, vector_eps=1e-4)).items()}
BLOCK_SIZE = 6


def inputs(shapes):
    import torch

    g = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=g) / 3 for name, shape in shapes.items()}
    slots, top_k = BLOCK_SIZE - 1, CONFIG["lilicorr_candidate_topk"]
    logits = torch.randn(BLOCKS, slots, 40, generator=g) * 2
    return weights | dict(
        embeds=torch.randn(BLOCKS, slots, top_k, H, generator=g),
        log_probs=logits.log_softmax(-1).topk(top_k, -1).values,
        hidden=torch.randn(BLOCKS, slots, H, generator=g),
        context=torch.randn(BLOCKS, H, generator=g),
        has_context=torch.tensor([True, False, True]),
    )


def new_head():
    from vllm.model_executor.models.lilicorr import LiLiCorrHead

    return LiLiCorrHead(model_hidden_size=H, block_size=BLOCK_SIZE, rms_norm_eps=1e-6, config=CONFIG)


def outputs(tensors):
    import torch
    from vllm.model_executor.models.utils import AutoWeightsLoader

    head = new_head()
    names = {name for name, _ in head.named_parameters()}
    loaded = AutoWeightsLoader(head).load_weights((name, tensors[name]) for name in names)
    assert loaded == names, names - loaded
    found = {}
    with torch.no_grad():
        head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
        for module in head.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        for name, slots in (("scores", BLOCK_SIZE - 1), ("scores_of_a_short_block", SHORT)):
            cut = {n: tensors[n][:, :slots] for n in ("embeds", "log_probs", "hidden")}
            found[name] = head.forward(*cut.values(), tensors["context"], tensors["has_context"])
    return found


def with_vllm(run):
    "vLLM's layers ask for a process group and a configuration, though the scorer needs neither."
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig(compilation_config=CompilationConfig(mode=0))
    with set_current_vllm_config(config):
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        return run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true")
    record = parser.parse_args().record
    os.environ |= dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from safetensors.torch import load_file, save_file

    def compared():
        if record:
            given = inputs({name: p.shape for name, p in new_head().named_parameters()})
            save_file({k: v.contiguous() for k, v in (given | outputs(given)).items()}, FILE)
        stored = load_file(FILE)
        return max((value - stored[name]).abs().max().item() for name, value in outputs(stored).items())

    worst = with_vllm(compared)
    print(f"largest difference from the record: {worst:.1e}")
    sys.exit(worst > 1e-5)
