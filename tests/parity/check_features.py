"""Feature folders across the border: upstream's own data folders read here, ours read by speculators 0.9.0, number for
number.

    python tests/parity/check_features.py                        makes benchmarks/.venv-upstream on the first call (1.7
    GB)
    python tests/parity/check_features.py --upstream-python PATH an environment that holds upstream already

Upstream's classes do upstream's part, in upstream's environment: `FP8HiddenStatesConnector`'s quantisation and
`save_to_disk` write its folders, `ArrowDataset` with `FileTransfer` and `FP8Transfer` read ours, `check_hidden_states`
checks them.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [1, 2, 3, 4]


def write(folder):
    """Upstream's side: two folders in its layout, of the samples in samples.safetensors; fp8 in one of them."""
    from datasets import Dataset
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8

    samples = load_file(folder / "samples.safetensors")
    n = len(samples) // 3
    for name in ("upstream", "upstream-fp8"):
        Dataset.from_list(
            [
                dict(
                    input_ids=samples[f"ids{i}"].tolist(),
                    loss_mask=samples[f"mask{i}"].tolist(),
                    seq_len=len(samples[f"ids{i}"]),
                )
                for i in range(n)
            ]
        ).with_format("torch").save_to_disk(folder / name)
        (folder / name / "hidden_states").mkdir()
        for i in range(n):
            tensors = {"hidden_states": samples[f"states{i}"], "token_ids": samples[f"ids{i}"]}
            if name.endswith("fp8"):
                tensors["hidden_states"], tensors["hidden_states_scales"] = quantize_tensor_to_fp8(
                    samples[f"states{i}"]
                )
            save_file(tensors, folder / name / "hidden_states" / f"hs_{i}.safetensors")


def read(folder):
    """Upstream's side: our folders through its dataset; what it gives goes to a file."""
    from hs_connectors import FileTransfer, FP8Transfer
    from speculators.data_generation.offline import check_hidden_states
    from speculators.train.data import ArrowDataset

    for name, transfer in (("ours", FileTransfer), ("ours-fp8", FP8Transfer)):
        data = ArrowDataset(2048, folder / name / "rows", transfer(folder / name), on_missing="raise")
        for i in range(len(data)):
            check_hidden_states(transfer(folder / name).get_cached(i), data.data[i]["input_ids"].tolist())
        keys = ("input_ids", "loss_mask", "hidden_states", "verifier_last_hidden_states")
        save_file(
            {f"{k}{i}": data[i][k].contiguous().clone() for i in range(len(data)) for k in keys},
            folder / f"{name}.safetensors",
        )


def main(python):
    import numpy as np
    from datasets import Dataset, disable_progress_bars
    from transformers import LlamaConfig, LlamaForCausalLM

    from speculators_nb.features.feature_folder import FeatureDataset
    from speculators_nb.features.feature_rows import from_fp8, to_fp8
    from speculators_nb.features.in_process import extract_features, states_of
    from speculators_nb.train.train_drafter import open_features
    from speculators_nb.verifier.tapped_model import Verifier

    disable_progress_bars()
    torch.manual_seed(0)
    verifier = Verifier(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
    )
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 64, n) for n in range(3, 23)]
    rows = Dataset.from_dict(
        {"input_ids": tokens, "loss_mask": [np.arange(len(t)) > 1 for t in tokens], "seq_len": [len(t) for t in tokens]}
    )
    states = states_of(verifier, tokens)

    def upstream(what, folder):
        subprocess.run([python, __file__, "--side", what, "--folder", folder], check=True)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_file(
            {
                k: v
                for i, t in enumerate(tokens)
                for k, v in {
                    f"ids{i}": torch.as_tensor(t),
                    f"mask{i}": (torch.arange(len(t)) > 1).long(),
                    f"states{i}": states[i].clone(),
                }.items()
            },
            folder / "samples.safetensors",
        )
        upstream("write", folder)
        verifier.model.save_pretrained(folder / "verifier")
        for name in ("upstream", "upstream-fp8"):
            data = open_features(folder / name, folder / "verifier", layers=LAYERS[:-1])
            for i, t in enumerate(tokens):
                wanted = from_fp8(*to_fp8(states[i])) if name.endswith("fp8") else states[i]
                assert data[i]["input_ids"].tolist() == t.tolist() and torch.equal(
                    data[i]["hidden_states"], wanted[:, :-1].flatten(1)
                ), (name, i)
        print("upstream's folders, plain and fp8: the same samples here")
        extract_features(verifier, rows, folder / "ours")
        extract_features(verifier, rows, folder / "ours-fp8", dtype="float8_e4m3fn")
        upstream("read", folder)
        for name in ("ours", "ours-fp8"):
            data, theirs = FeatureDataset(folder / name), load_file(folder / f"{name}.safetensors")
            for i in range(len(rows)):
                for k, v in data[i].items():
                    if name == "ours" or not v.is_floating_point():
                        assert torch.equal(theirs[f"{k}{i}"].to(v.dtype), v), (name, i, k)
                    else:  # upstream multiplies in bfloat16, and rounds the scale as well
                        torch.testing.assert_close(theirs[f"{k}{i}"], v, rtol=2**-7, atol=0)
        print("our folders, plain and fp8: the same samples there")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", type=Path)
    parser.add_argument("--side", choices=["write", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    opt = parser.parse_args()
    if opt.side:
        {"write": write, "read": read}[opt.side](opt.folder)
    else:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from upstream import upstream_python

        main(opt.upstream_python or upstream_python())
