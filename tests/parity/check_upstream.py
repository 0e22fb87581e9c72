#!/usr/bin/env python
"""Our checkpoints in upstream's hands, and upstream's in ours: every family that speculators 0.9.0 has, the same loss
on the same batch.

    .venv/bin/python tests/parity/check_upstream.py                  a minute or two; the first call also makes
    benchmarks/.venv-upstream
    .venv/bin/python tests/parity/check_upstream.py --only dflash    the cases whose name begins so
    .venv/bin/python tests/parity/check_upstream.py --upstream-python PATH     an environment that holds upstream
    already

For each case of the table a small drafter is made here for a verifier of tests/fixtures, moved off its initial values
and saved. Upstream loads the folder (every tensor of it), computes the loss, the metrics and every gradient on our
batch with our random choices, takes one AdamW step, and saves what it then has in a folder of its own. We load that
folder and must get upstream's loss on it; what we save again must hold upstream's tensors, bit for bit, under
upstream's names, and say the same in its config.json.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"
DOCUMENTS, PADDING = [13, 9, 17], 5
QWEN3, LLAMA, MTP = "eagle3_verifier_qwen3", "eagle3_verifier_llama", "mtp_verifier_"
WINDOW = dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2, sliding_window=6, use_sliding_window=True)
MIXED = WINDOW | dict(layer_types=["full_attention", "sliding_attention"])


def rope(kind, **given):
    return dict(max_position_embeddings=12, rope_parameters=dict(rope_type=kind, rope_theta=100.0) | given)


# rows are longer than the 12 positions that these were "trained" for
ROPES = {
    "linear": rope("linear", factor=2.0),
    "dynamic": rope("dynamic", factor=3.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=4),
    "longrope": rope(
        "longrope",
        factor=2.0,
        short_factor=[1.0, 1.5, 2.0, 2.5],
        long_factor=[3.0, 2.0, 4.0, 5.0],
        original_max_position_embeddings=12,
    ),
    "llama3": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8),
    "proportional": rope("proportional", partial_rotary_factor=0.5),
    "by layer type": dict(
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=100.0),
            sliding_attention=dict(rope_type="linear", rope_theta=7.0, factor=2.0),
        )
    ),
}

# `make`: arguments of `new_drafter`, and `layer`: entries of its layers' config; `train`: those of
# `get_trainer_kwargs`, the same on both sides; `padded`: whether the row ends in padding (upstream's P-EAGLE with
# padding is left to its fixtures).
CASES = {
    "eagle3": dict(
        verifier=QWEN3,
        train=dict(ttt_steps=3, ttt_step_loss_decay=1.0, loss_fn="kl_div"),
        make=dict(norm_before_fc=True, norm_output=True, draft_vocab=96),
    ),
    "eagle3 qwen3, fc_norm, whole vocabulary": dict(
        verifier=LLAMA,
        make=dict(draft_arch="qwen3", fc_norm=True, norm_before_residual=False),
        train=dict(ttt_steps=2, ttt_step_loss_decay=0.7, loss_fn='{"ce": 0.4, "tv": 0.6}'),
    ),
    "eagle3 two layers, window": dict(
        verifier=QWEN3,
        layer=MIXED,
        make=dict(num_layers=2),
        train=dict(ttt_steps=4, ttt_step_loss_decay=1.0, loss_fn="lk_hybrid"),
    ),
    "peagle": dict(
        verifier=QWEN3,
        padded=False,
        make=dict(num_depths=4, mask_token_id=255, draft_vocab=96),
        train=dict(num_depths=4, loss_fn="kl_div"),
    ),
    "peagle llama, two layers, window": dict(
        verifier=LLAMA,
        padded=False,
        layer=WINDOW,
        make=dict(num_layers=2, norm_before_fc=True, num_depths=3, mask_token_id=0),
        train=dict(num_depths=3, loss_fn='{"kl_div": 0.5, "jsd": 0.5}', max_anchors=12),
    ),
    "dflash": dict(
        verifier=QWEN3,
        make=dict(draft_arch="qwen3", num_layers=2, block_size=4, mask_token_id=255, draft_vocab=96),
        train=dict(max_anchors=8, loss_fn="ce", per_position_loss_weight="dpace"),
    ),
    "dflash causal window, whole vocabulary": dict(
        verifier=LLAMA,
        layer=WINDOW,
        make=dict(draft_arch="qwen3", num_layers=2, block_size=5, mask_token_id=7, sliding_window_non_causal=False),
        train=dict(max_anchors=6, loss_fn="kl_div", per_position_loss_weight="fixed-exp-decay", dflash_decay_gamma=3.0),
    ),
    "dflash mixed layers, anchors sampled": dict(
        verifier=QWEN3,
        layer=MIXED,
        make=dict(draft_arch="qwen3", num_layers=2, block_size=3, mask_token_id=7, sample_from_anchor=True),
        train=dict(max_anchors=40, loss_fn='{"ce": 0.1, "tv": 0.9}', per_position_loss_weight="fixed-exp-decay"),
    ),
    "dspark": dict(
        verifier=QWEN3,
        train=dict(max_anchors=8, loss_fn="kl_div"),
        make=dict(draft_arch="qwen3", num_layers=2, block_size=4, mask_token_id=255, markov_rank=8, draft_vocab=96),
    ),
    "dspark gated, no confidence": dict(
        verifier=LLAMA,
        layer=WINDOW,
        train=dict(max_anchors=6, loss_fn='{"ce": 0.1, "tv": 0.9}'),
        make=dict(
            draft_arch="qwen3",
            num_layers=2,
            block_size=3,
            mask_token_id=9,
            markov_rank=4,
            markov_head_type="gated",
            enable_confidence_head=False,
        ),
    ),
    "dspark rnn, dpace": dict(
        verifier=QWEN3,
        train=dict(max_anchors=7, loss_fn="ce", per_position_loss_weight="dpace", confidence_head_alpha=0.5),
        make=dict(
            draft_arch="qwen3",
            block_size=4,
            mask_token_id=9,
            markov_rank=8,
            markov_head_type="rnn",
            sample_from_anchor=False,
            confidence_head_with_markov=False,
        ),
    ),
    "dflash2": dict(
        verifier=QWEN3,
        train=dict(max_anchors=8, loss_fn="kl_div"),
        make=dict(
            draft_arch="qwen3", num_layers=2, block_size=4, mask_token_id=255, selector_rank=8, selector_top_k=12
        ),
    ),
    "dflash2 window, anchors sampled, dpace": dict(
        verifier=LLAMA,
        layer=WINDOW,
        train=dict(max_anchors=7, loss_fn="ce", per_position_loss_weight="dpace", selector_loss_alpha=0.5),
        make=dict(
            draft_arch="qwen3",
            num_layers=2,
            block_size=5,
            mask_token_id=9,
            conv_kernel_size=3,
            conv_group_size=4,
            selector_rank=6,
            sample_from_anchor=True,
        ),
    ),
    "xpress": dict(
        verifier=QWEN3,
        train=dict(max_anchors=8, loss_fn='{"ce": 0.1, "tv": 0.9}'),
        make=dict(draft_arch="qwen3", num_layers=2, block_size=4, mask_token_id=255, xpress_rank=8, draft_vocab=96),
    ),
    "xpress data tokens, anchors sampled": dict(
        verifier=LLAMA,
        layer=MIXED,
        train=dict(max_anchors=40, loss_fn="ce", ce_from_data=True, base_anchor_full_weight=True, consistency_passes=2),
        make=dict(
            draft_arch="qwen3",
            num_layers=2,
            block_size=5,
            mask_token_id=9,
            xpress_rank=6,
            xpress_mlp_ratio=3,
            num_jacobi_passes=2,
            sample_from_anchor=True,
        ),
    ),
    **{
        f"eagle3 rope {kind}": dict(
            verifier=LLAMA,
            layer=rope,
            make=dict(num_layers=2, draft_arch=arch),
            train=dict(ttt_steps=3, ttt_step_loss_decay=1.0, loss_fn="kl_div"),
        )
        for (kind, rope), arch in zip(ROPES.items(), ("llama", "qwen3") * 4)
    },
    **{
        f"peagle rope {kind}": dict(
            verifier=QWEN3,
            padded=False,
            layer=ROPES[kind],
            make=dict(num_depths=4, mask_token_id=255),
            train=dict(num_depths=4, loss_fn="kl_div"),
        )
        for kind in ("dynamic", "longrope")
    },
    **{
        f"dflash rope {kind}": dict(
            verifier=QWEN3,
            layer=rope,
            make=dict(draft_arch="qwen3", num_layers=2, block_size=4, mask_token_id=255),
            train=dict(max_anchors=8, loss_fn="kl_div", per_position_loss_weight="fixed-exp-decay"),
        )
        for kind, rope in ROPES.items()
    },
    **{
        f"mtp {kind}": dict(
            verifier=MTP + kind,
            make=dict(num_speculative_steps=steps),
            train=dict(num_speculative_steps=steps, step_weight_beta=beta),
        )
        for kind, steps, beta in (
            ("qwen3", 3, 0.6),
            ("qwen3_5", 2, 0.8),
            ("qwen3_5_moe", 3, 0.6),
            ("qwen3_next", 4, 0.5),
        )
    },
}
TOLERANCE = dict(loss=1e-5, metrics=1e-5, grads=1e-3)  # relative; those of the recorded fixtures


def report(model, batch, call):
    """Loss, metrics and gradient norms of one pass."""
    model.train()
    model.zero_grad(set_to_none=True)
    _, loss, metrics = model(**batch, **call)
    loss.backward()
    grads = {
        n: p.grad.to_dense().norm().item() if p.grad.is_sparse else p.grad.norm().item()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return dict(loss=loss.item(), metrics={k: float(v) for k, v in metrics.items()}, grads=grads)


# ------------------------------------------------------------------------------------------------------ upstream's side
def there(job):
    """Runs in upstream's environment: every folder of the job loaded, measured, moved by one step, saved beside it."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    found = {}
    for name, case in json.loads(Path(job).read_text()).items():
        folder = Path(case["folder"])
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = (
            "sdpa"  # its default, flex attention, has no backward on CPU
        )
        model = SpeculatorModel.from_pretrained(folder, config=config)
        if name.startswith("xpress"):  # no checkpoint holds this buffer, and loading leaves what was in memory there
            model.refiner_head.causal_tril = torch.ones_like(model.refiner_head.causal_tril).tril()
        state = model.state_dict()
        lost = [
            n
            for n, w in load_file(folder / "model.safetensors").items()
            if n not in state or not torch.equal(state[n], w)
        ]
        batch = load_file(folder / "inputs.safetensors")
        given = {
            k: batch.pop(k) for k in ("anchor_positions", "anchor_valid", "cod_anchor_pos", "cod_depth") if k in batch
        }
        if "anchor_valid" in given:
            import_module("speculators.models.dflash.core").select_anchors = lambda *_, g=given: (
                g["anchor_positions"],
                g["anchor_valid"],
            )
        if "cod_depth" in given:
            import_module("speculators.models.peagle.core").generate_cod_sample_indices = lambda *_, g=given, **__: (
                g["cod_anchor_pos"],
                g["cod_depth"],
            )
        call, _ = type(model).get_trainer_kwargs(**case["train"] | dict(loss_implementation="eager"))
        rotary = copy.deepcopy(model.rotary_emb)
        first = report(model, batch, call)
        model.rotary_emb = (
            rotary  # a dynamic one remembers the longest row that it saw: the same batch would give another loss
        )
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
        with torch.no_grad():
            _, loss, _ = model(**batch, **call)
        model.save_pretrained(folder / "there")
        found[name] = first | dict(after=loss.item(), class_name=type(model).__name__, lost=lost)
    Path(job).with_name("there.json").write_text(json.dumps(found))


# ------------------------------------------------------------------------------------------------------------- our side
def make_model(case, seed):
    """A drafter of ours, every trained weight off its initial zeros and ones."""
    from transformers import AutoConfig

    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.nn.draft_vocabulary import vocab_mapping_from_frequencies
    from speculators_nb.nn.layers import draft_layer_config
    from speculators_nb.nn.target_head import text_config

    verifier, make, g = FIXTURES / case["verifier"], dict(case["make"]), torch.Generator().manual_seed(seed)
    config, t2d, d2t = AutoConfig.from_pretrained(verifier), None, None
    v, vd = text_config(config).vocab_size, make.pop("draft_vocab", None)
    if vd:
        t2d, d2t = vocab_mapping_from_frequencies(torch.randperm(v, generator=g), vd, v)
    layer = draft_layer_config(config, make.pop("draft_arch", "llama"), make.pop("num_layers", 1))
    for key, value in case.get("layer", {}).items():
        setattr(layer, key, value)
    torch.manual_seed(seed)
    model = SpeculatorModel.registered_class(case["algorithm"]).from_training_args(
        layer,
        t2d,
        d2t,
        verifier_name_or_path=str(verifier),
        draft_vocab_size=vd or v,
        **make | ({} if case["algorithm"] == "mtp" else dict(target_layer_ids=[1, 2, 3])),
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=g)
    return model


def make_batch(case, model, seed):
    """A packed row as training hands it over, with all random choices made."""
    from speculators_nb.models.peagle import cod_sample
    from speculators_nb.nn.anchors import select_anchors

    g, h = torch.Generator().manual_seed(seed), model.lm_head.in_features
    pad = PADDING if case.get("padded", True) else 0
    docs, length, wide = DOCUMENTS, sum(DOCUMENTS) + pad, 1 if case["algorithm"] == "mtp" else 3
    batch = {
        "input_ids": torch.randint(model.target_vocab_size, (1, length), generator=g),
        "hidden_states": torch.randn(1, length, wide * h, generator=g),
        "verifier_last_hidden_states": torch.randn(1, length, h, generator=g),
        "loss_mask": torch.cat([*(torch.arange(n) > n // 4 for n in docs), torch.zeros(pad, dtype=torch.bool)])[None],
        "position_ids": torch.cat([*(torch.arange(n) for n in docs), torch.zeros(pad, dtype=torch.int64)])[None],
        "document_ids": torch.cat([*(torch.full((n,), i) for i, n in enumerate(docs)), torch.full((pad,), -1)])[None],
    }
    mask, documents, train = batch["loss_mask"][0], batch["document_ids"][0], case["train"]
    if case["algorithm"] == "mtp":
        del batch["verifier_last_hidden_states"]
    if case["algorithm"] == "peagle":
        pos, depth = cod_sample(
            mask, documents, train["num_depths"], max_anchors=train.get("max_anchors"), generator=g, cross_document=True
        )
        batch |= dict(cod_anchor_pos=pos, cod_depth=depth)
    if case["algorithm"] in ("dflash", "dflash2", "dspark", "xpress"):
        pos, valid = select_anchors(
            mask, documents, model.config.block_size, train["max_anchors"], g, model.config.sample_from_anchor, True
        )
        batch |= dict(anchor_positions=pos, anchor_valid=valid)
    return batch


def gaps(mine, theirs):
    """Largest relative differences in loss, metrics and gradient norms; upstream's metrics that we lack, and parameters
    with a gradient on one side."""

    def worst(a, b):
        return max((abs(a[k] - b[k]) / max(abs(b[k]), 1e-2) for k in a.keys() & b.keys()), default=0.0)

    other = sorted(theirs["metrics"].keys() - mine["metrics"].keys()) + sorted(
        mine["grads"].keys() ^ theirs["grads"].keys()
    )
    return dict(
        loss=abs(mine["loss"] / theirs["loss"] - 1),
        metrics=worst(mine["metrics"], theirs["metrics"]),
        grads=worst(mine["grads"], theirs["grads"]),
    ), other


def unlike(folder, again):
    """How our rewriting of upstream's folder differs from it: tensors, and entries of config.json."""
    a, b = (load_file(f / "model.safetensors") for f in (folder, again))
    names = sorted(a.keys() ^ b.keys()) + [n for n in a.keys() & b.keys() if not torch.equal(a[n], b[n])]
    x, y = (json.loads((f / "config.json").read_text()) for f in (folder, again))
    for config in (x, y):  # written by upstream's class loader, which library wrote it, and which transformers
        for key in ("auto_map", "transformers_version", "speculators_version", "max_anchors"):
            config.pop(key, None)
    return names + [
        f"config.json: {k} {x.get(k)!r} there, {y.get(k)!r} here" for k in x.keys() | y.keys() if x.get(k) != y.get(k)
    ]


def main(names, python):
    from speculators_nb.models.base import SpeculatorModel

    torch.set_num_threads(1)
    cases = {n: c | dict(algorithm=n.split()[0]) for n, c in CASES.items() if n.startswith(tuple(names or [""]))}
    problems, rows = [], []
    with tempfile.TemporaryDirectory() as tmp:
        tmp, job, mine = Path(tmp), {}, {}
        for i, (name, case) in enumerate(cases.items()):
            model, folder = make_model(case, i), tmp / name.replace(" ", "_")
            batch = case["batch"] = make_batch(case, model, i)
            case["call"] = type(model).get_trainer_kwargs(**case["train"])[0] | dict(cross_document_targets=True)
            mine[name] = report(model, batch, case["call"])
            model.save_pretrained(folder)
            save_file(batch, folder / "inputs.safetensors")
            job[name] = dict(folder=str(folder), train=case["train"])
        (tmp / "job.json").write_text(json.dumps(job))
        done = subprocess.run([python, __file__, "--there", tmp / "job.json"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"{done.stdout[-2000:]}{done.stderr[-4000:]}\nupstream's process ended with code {done.returncode}"
            )
        theirs = json.loads((tmp / "there.json").read_text())
        for name, case in cases.items():
            gap, other = gaps(mine[name], theirs[name])
            folder = tmp / name.replace(" ", "_")
            model = SpeculatorModel.from_pretrained(folder / "there", verifier=FIXTURES / case["verifier"])
            gap["reverse"] = abs(report(model, case["batch"], case["call"])["loss"] / theirs[name]["after"] - 1)
            model.save_pretrained(folder / "again")
            problems += [
                f"{name}: {what} differs by {gap[what]:.1e}"
                for what in gap
                if gap[what] > TOLERANCE.get(what, TOLERANCE["loss"])
            ]
            problems += [f"{name}: on one side only: {', '.join(other)}"] if other else []
            problems += [f"{name}: upstream did not take {', '.join(lost)}"] if (lost := theirs[name]["lost"]) else []
            problems += [f"{name}, written again: {what}" for what in unlike(folder / "there", folder / "again")]
            rows.append(
                [
                    name,
                    theirs[name]["class_name"],
                    f"{theirs[name]['loss']:.6f}",
                    *(f"{gap[k]:.1e}" for k in ("loss", "metrics", "grads", "reverse")),
                ]
            )
    head = ["case", "upstream's class", "its loss", "ours: loss", "metrics", "gradients", "its checkpoint here: loss"]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(x.ljust(w) for x, w in zip(row, widths)))
    if problems:
        raise SystemExit("\n".join(["", *problems]))
    print(
        "\nEvery checkpoint of ours gives upstream the loss that it gives us, and the other way round; columns are "
        "relative differences."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--there", metavar="JOB", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name begins so")
    parser.add_argument("--upstream-python", type=Path, help="interpreter of an environment with speculators 0.9.0")
    opt = parser.parse_args()
    if opt.there:
        there(opt.there)
    else:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from upstream import upstream_python

        main(opt.only, opt.upstream_python or upstream_python())
