"""DFlash2's convolution and its scores of all candidates behind all candidates, by vLLM's own functions.

    .venv-vllm/bin/python tests/vllm/check_dflash2.py             runs them again on the recorded tensors
    .venv-vllm/bin/python tests/vllm/check_dflash2.py --record    writes tests/fixtures/dflash2_vllm.safetensors

`tests/test_dflash2.py` holds our code to the file. vLLM cannot run the whole drafter without Triton; these two
functions it has for processors too.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv, _score_edges

FILE = Path(__file__).resolve().parents[1] / "fixtures/dflash2_vllm.safetensors"
BLOCKS, SLOTS, TAPS, GROUPS, SIZE, V, RANK, TOP_K = 3, 5, 3, 4, 4, 40, 6, 7


def inputs():
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    H = GROUPS * SIZE
    ids = torch.stack([torch.randperm(V, generator=g)[:TOP_K] for _ in range(BLOCKS * SLOTS)])
    return dict(
        x=normal(BLOCKS * SLOTS, H),
        projection=normal(2 * TAPS * GROUPS, H),
        base=normal(2, TAPS, H),
        predecessor_codebook=normal(V, RANK),
        successor_codebook=normal(V, RANK),
        hidden_projection=normal(RANK, H),
        unary=normal(BLOCKS, SLOTS, TOP_K),
        candidates=ids.view(BLOCKS, SLOTS, TOP_K),
        anchors=torch.randint(V, (BLOCKS,), generator=g),
    )


def outputs(t):
    delta = (t["x"] @ t["projection"].T).reshape(len(t["x"]), 2, TAPS, GROUPS)
    front, behind = (
        _grouped_conv(t["x"], delta[:, side], t["base"][side], SLOTS, GROUPS, SIZE, TAPS) for side in (0, 1)
    )
    hidden = (t["x"] @ t["hidden_projection"].T).view(BLOCKS, SLOTS, RANK)
    tables = t["predecessor_codebook"], t["successor_codebook"]
    edges = _score_edges(*tables, t["candidates"], t["unary"], hidden, t["anchors"], TOP_K)
    return dict(front=front, behind=behind, edges=edges)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        given = inputs()
        save_file({k: v.contiguous() for k, v in (given | outputs(given)).items()}, FILE)
    stored = load_file(FILE)
    worst = max((value - stored[name]).abs().max().item() for name, value in outputs(stored).items())
    print(f"largest difference: {worst:.1e}")
    assert worst < 1e-5
