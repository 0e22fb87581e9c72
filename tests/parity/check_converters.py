#!/usr/bin/env python
"""The same foreign checkpoint through upstream's converter and through ours: the same tensors, bit for bit.

    .venv/bin/python tests/parity/check_converters.py             a minute; the first call also makes
    benchmarks/.venv-upstream
    .venv/bin/python tests/parity/check_converters.py --record    and write what upstream made to
    tests/fixtures/converters.json
    .venv/bin/python tests/parity/check_converters.py --upstream-python PATH     an environment that holds upstream
    already

speculators 0.9.0 converts EAGLE-3, DFlash and native MTP heads. The foreign folders are made here, name by name and
from a seed, without our own exporter. tests/test_convert.py makes them again and holds our converter to the record.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"
RECORD = FIXTURES / "converters.json"
QWEN3 = FIXTURES / "eagle3_verifier_qwen3"
# what upstream says in its config.json, of the fields that both sides write
FIELDS = (
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
    "block_size",
    "mask_token_id",
    "aux_hidden_state_layer_ids",
    "sample_from_anchor",
    "num_nextn_predict_layers",
    "speculators_model_type",
)


def layer(g, prefix, h, inputs, inner, heads, kv, d, normed):
    """The tensors of a decoder layer."""
    shapes = {
        "self_attn.q_proj": (heads * d, inputs),
        "self_attn.k_proj": (kv * d, inputs),
        "self_attn.v_proj": (kv * d, inputs),
        "self_attn.o_proj": (h, heads * d),
        "mlp.gate_proj": (inner, h),
        "mlp.up_proj": (inner, h),
        "mlp.down_proj": (h, inner),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    if normed:
        shapes |= {"self_attn.q_norm": (d,), "self_attn.k_norm": (d,)}
    return {f"{prefix}{name}.weight": torch.randn(shape, generator=g) for name, shape in shapes.items()}


def research_eagle3(folder, seed, dtype=torch.float32, embed=True, binary=False, **config):
    """What SafeAILab's code saves: one layer called midlayer, a part of the vocabulary."""
    g, said = torch.Generator().manual_seed(seed), json.loads((QWEN3 / "config.json").read_text())
    v, h, vd, inner, heads, kv, d = said["vocab_size"], said["hidden_size"], 50, 48, 4, 2, 16
    kept = torch.randperm(v, generator=g)[:vd].sort().values
    state = layer(g, "midlayer.", h, 2 * h, inner, heads, kv, d, False) | {
        "midlayer.hidden_norm.weight": torch.randn(h, generator=g),
        "fc.weight": torch.randn(h, 3 * h, generator=g),
        "norm.weight": torch.randn(h, generator=g),
        "lm_head.weight": torch.randn(vd, h, generator=g),
    }
    if embed:
        state["embed_tokens.weight"] = torch.randn(v, h, generator=g)
    state = {n: w.to(dtype) for n, w in state.items()}
    state |= {"d2t": kept - torch.arange(vd), "t2d": torch.zeros(v, dtype=torch.bool).index_fill(0, kept, True)}
    raw = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=h,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=d,
        num_hidden_layers=1,
        vocab_size=v,
        draft_vocab_size=vd,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        hidden_act="silu",
        rope_theta=500000.0,
        torch_dtype=str(dtype).removeprefix("torch."),
    )
    write(folder, raw | config, state, binary)


def research_dflash(folder, seed, dtype=torch.float32, nested=True):
    """What z-lab publishes: the draft layers, nothing of the verifier's."""
    g, said = torch.Generator().manual_seed(seed), json.loads((QWEN3 / "config.json").read_text())
    v, h, inner, heads, kv, d, ids = said["vocab_size"], said["hidden_size"], 40, 4, 2, 16, [0, 1]
    state = {
        "fc.weight": torch.randn(h, len(ids) * h, generator=g),
        "hidden_norm.weight": torch.randn(h, generator=g),
        "norm.weight": torch.randn(h, generator=g),
    }
    for i in range(2):
        state |= layer(g, f"layers.{i}.", h, h, inner, heads, kv, d, True)
    block = dict(mask_token_id=5, target_layer_ids=ids) | (dict(block_size=6) if nested else {})
    raw = dict(
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        model_type="qwen3",
        hidden_size=h,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=d,
        num_hidden_layers=2,
        vocab_size=v,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        hidden_act="silu",
        layer_types=["full_attention"] * 2,
        dflash_config=block,
        num_target_layers=said["num_hidden_layers"],
        rope_parameters=dict(rope_theta=1e6, rope_type="default"),
    )
    write(folder, raw | ({} if nested else dict(block_size=6)), {n: w.to(dtype) for n, w in state.items()})


def write(folder, config, state, binary=False):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(state, folder / "pytorch_model.bin") if binary else save_file(state, folder / "model.safetensors")


def head(kind):
    return dict(
        make=None,
        verifier=FIXTURES / f"mtp_verifier_{kind}",
        algorithm="mtp",
        upstream=dict(num_speculative_steps=4),
        ours=dict(speculative_tokens=4),
    )


CASES = {
    "eagle3": dict(make=lambda f: research_eagle3(f, 0), verifier=QWEN3, algorithm="eagle3"),
    "eagle3 pickled, half precision, no embedding, norms": dict(
        make=lambda f: research_eagle3(f, 1, torch.float16, embed=False, binary=True, norm_output=True),
        verifier=QWEN3,
        algorithm="eagle3",
        upstream=dict(norm_before_residual=True),
        ours=dict(config=dict(norm_before_residual=True)),
    ),
    "dflash": dict(make=lambda f: research_dflash(f, 2, torch.bfloat16), verifier=QWEN3, algorithm="dflash"),
    "dflash older": dict(make=lambda f: research_dflash(f, 3, nested=False), verifier=QWEN3, algorithm="dflash"),
    **{f"mtp {kind}": head(kind) for kind in ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next")},
}


def digest(folder):
    """Every tensor of a checkpoint, and what its config says."""
    state, raw = load_file(Path(folder) / "model.safetensors"), json.loads((Path(folder) / "config.json").read_text())
    tensors = {
        n: [
            str(w.dtype),
            list(w.shape),
            hashlib.sha256(w.contiguous().view(torch.uint8).numpy().tobytes() if w.numel() else b"").hexdigest(),
        ]
        for n, w in sorted(state.items())
        if not n.startswith("verifier_")
    }  # upstream stores a frozen copy of a verifier's head with MTP
    block = raw["speculators_config"]
    return dict(
        tensors=tensors,
        fields={k: raw[k] for k in FIELDS if k in raw},
        tokens=block["proposal_methods"][0]["speculative_tokens"],
        verifier=block["verifier"]["architectures"],
    )


def source(case, folder):
    """The foreign folder of a case."""
    if case["make"] is None:
        return case["verifier"]
    case["make"](folder)
    return folder


def here(name, folder):
    """Our conversion of a case, digested."""
    from speculators_nb.models.convert import convert, detect

    case = CASES[name]
    native = source(case, folder / "native")
    assert detect(native) == case["algorithm"], (name, detect(native))
    return digest(convert(native, folder / "ours", case["verifier"], **case.get("ours", {})))


def there(out):
    """Runs in upstream's environment: its converter on every case."""
    from speculators.convert import convert_model

    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as tmp:
            convert_model(
                str(source(case, Path(tmp) / "native")),
                str(case["verifier"]),
                case["algorithm"],
                f"{tmp}/theirs",
                **case.get("upstream", {}),
            )
            found[name] = digest(f"{tmp}/theirs")
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


def differences(mine, theirs):
    """What is not the same, in words."""
    found = [f"tensor {n} on one side only" for n in sorted(mine["tensors"].keys() ^ theirs["tensors"].keys())]
    found += [
        f"tensor {n}: {mine['tensors'][n]} and upstream's {w}"
        for n, w in theirs["tensors"].items()
        if mine["tensors"].get(n, w) != w
    ]
    found += [
        f"{k}: {mine['fields'].get(k)!r} and upstream's {v!r}"
        for k, v in theirs["fields"].items()
        if mine["fields"].get(k) != v
    ]
    return found + [
        f"{k}: {mine[k]!r} and upstream's {theirs[k]!r}" for k in ("tokens", "verifier") if mine[k] != theirs[k]
    ]


def main(python, record):
    with tempfile.TemporaryDirectory() as tmp:
        done = subprocess.run([python, __file__, "--there", f"{tmp}/there.json"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"{done.stdout[-2000:]}{done.stderr[-4000:]}\nupstream's process ended with code {done.returncode}"
            )
        theirs = json.loads(Path(tmp, "there.json").read_text())
        if record:
            RECORD.write_text(json.dumps(theirs, indent=1) + "\n")
        problems = []
        for i, name in enumerate(CASES):
            found = differences(here(name, Path(tmp) / str(i)), theirs[name])
            print(
                f"{name}: {len(theirs[name]['tensors'])} tensors, "
                f"{'the same' if not found else f'{len(found)} differences'}"
            )
            problems += [f"{name}: {what}" for what in found]
    if problems:
        raise SystemExit("\n".join(["", *problems]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--there", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    parser.add_argument("--upstream-python", type=Path, help="interpreter of an environment with speculators 0.9.0")
    opt = parser.parse_args()
    if opt.there:
        there(opt.there)
    else:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from upstream import upstream_python

        main(opt.upstream_python or upstream_python(), opt.record)
