#!/usr/bin/env python
"""How large the deliberate differences of docs/differences.md are: our numbers beside upstream's (speculators 0.9.0) on
the same folder and batch.

    .venv/bin/python tests/parity/measure_differences.py                           a minute; the first call also makes
    benchmarks/.venv-upstream
    .venv/bin/python tests/parity/measure_differences.py --upstream-python PATH    an environment that holds upstream
    already

The verifiers are tiny and random (tests/matrix.py), so a size says that the difference is there, not what it costs a
real drafter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]


def there(job):
    """In upstream's environment: loss, loss of a second call, and gradient norms; `none` where upstream cannot load the
    verifier."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    found = {}
    for name, case in json.loads(Path(job).read_text()).items():
        folder = Path(case["folder"])
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "sdpa"
        try:
            model = SpeculatorModel.from_pretrained(folder, config=config)
        except Exception as e:  # a family whose tensors upstream does not know
            found[name] = dict(none=f"{type(e).__name__}: {e}"[:100])
            continue
        batch = load_file(folder / "inputs.safetensors")
        given = {k: batch.pop(k) for k in ("anchor_positions", "cod_anchor_pos", "cod_depth") if k in batch}
        if "cod_depth" in given:
            import_module("speculators.models.peagle.core").generate_cod_sample_indices = lambda *_, g=given, **__: (
                g["cod_anchor_pos"],
                g["cod_depth"],
            )
        if "anchor_positions" in given:
            at = given["anchor_positions"]
            import_module("speculators.models.dflash.core").select_anchors = lambda *_, a=at: (
                a,
                torch.ones_like(a, dtype=torch.bool),
            )
        call, _ = type(model).get_trainer_kwargs(**case["train"] | dict(loss_implementation="eager"))
        model.train()
        torch.manual_seed(0)
        loss = model(**batch, **call)[1]
        loss.backward()
        row = model.embed_tokens.weight.grad
        torch.manual_seed(0)
        with torch.no_grad():
            second = model(**batch, **call)[1].item()
        cosine = in_bf16(model, batch, call) if case["bf16"] else None
        found[name] = dict(
            loss=loss.item(),
            second=second,
            bf16=cosine,
            embed=None if row is None else row.norm().item(),
            row=None if row is None else row[case["row"]].norm().item(),
        )
    Path(job).with_name("there.json").write_text(json.dumps(found))


def in_bf16(model, batch, call):
    "1 - cosine between the gradients in float32 and under autocast to bfloat16."
    grads = []
    for on in (False, True):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = model(**batch, **call)[1]
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double())
    return 1 - torch.nn.functional.cosine_similarity(*grads, 0).item()


def trained(model, batch, train, **kwargs):
    "Our loss, and the gradient of the embedding table."
    model.train().zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = model(**batch, **model.get_trainer_kwargs(**train)[0], **kwargs)[1]
    loss.backward()
    return loss.item(), model.embed_tokens.weight.grad


def main(python):
    from matrix import V, batch_for, drafter, verifier

    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.models.peagle import cod_sample
    from speculators_nb.nn.layers import draft_layer_config

    ttt = dict(ttt_steps=3, ttt_step_loss_decay=0.8, loss_fn="kl_div")
    rollouts = dict(num_depths=4, loss_fn="kl_div")
    blocks = dict(loss_fn="kl_div", per_position_loss_weight="fixed-exp-decay", max_anchors=6)
    tmp, job, ours = Path(tempfile.mkdtemp()), {}, {}

    def add(name, model, batch, train, edit=None, row=0, **kwargs):
        folder = tmp / name.replace(" ", "_")
        model.save_pretrained(folder)
        if edit:
            raw = json.loads((folder / "config.json").read_text())
            raw["transformer_layer_config"].update(edit)
            (folder / "config.json").write_text(json.dumps(raw))
        save_file({k: v.contiguous() for k, v in batch.items()}, folder / "inputs.safetensors")
        bf16 = name.startswith("bfloat16")
        job[name] = dict(folder=str(folder), train=train, row=row, bf16=bf16)
        loss, grad = trained(model, batch, train, **kwargs)
        ours[name] = dict(
            bf16=in_bf16(model, batch, model.get_trainer_kwargs(**train)[0] | kwargs) if bf16 else None,
            loss=loss,
            embed=None if grad is None else grad.norm().item(),
            row=None if grad is None else grad[row].norm().item(),
        )

    for family in ("gemma2", "cohere", "gpt_neox", "qwen3_next"):  # 1: the verifier's own norm, scale, soft-cap
        model = drafter("eagle3", family)
        add(f"target head {family}", model, batch_for(model, family), ttt, cross_document_targets=True)
    for family in ("gemma2", "cohere", "qwen3_next"):
        model = drafter("dflash", family)
        add(
            f"target head {family}, DFlash",
            model,
            batch_for(model, family) | dict(anchor_positions=torch.tensor([6, 9, 15, 26, 40, 51])),
            blocks,
            cross_document_targets=True,
        )
    model = drafter("eagle3", "llama")
    batch = batch_for(model, "llama")
    add("targets across documents", model, batch | dict(loss_mask=batch["document_ids"] >= 0), ttt)
    add("targets across documents, prompts not trained", model, batch, ttt)
    folder, target, _ = verifier("llama")
    torch.manual_seed(1)
    make = dict(verifier_name_or_path=str(folder), target_layer_ids=[1, 2, 3])
    embedding = SpeculatorModel.registered_class("eagle3").from_training_args(
        draft_layer_config(target.config), embed_requires_grad=True, **make
    )
    add("embed_requires_grad", embedding, batch_for(embedding, "llama"), ttt, cross_document_targets=True)
    layer = draft_layer_config(target.config)
    layer.pad_token_id = V - 1
    masked = SpeculatorModel.registered_class("peagle").from_training_args(
        layer, mask_token_id=V - 1, num_depths=4, **make
    )
    row = batch_for(masked, "llama", 61)
    pos, depth = cod_sample(
        row["loss_mask"], row["document_ids"], 4, generator=torch.Generator().manual_seed(0), cross_document=True
    )
    add(
        "mask token is the pad token",
        masked,
        row | dict(cod_anchor_pos=pos, cod_depth=depth),
        rollouts,
        row=V - 1,
        cross_document_targets=True,
    )
    rope = dict(rope_type="dynamic", rope_theta=100.0, factor=3.0)
    add(
        "dynamic RoPE",
        drafter("eagle3", "llama", rope_parameters=rope, max_position_embeddings=16),
        batch,
        ttt,
        cross_document_targets=True,
    )
    half = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)
    add("part of a head", drafter("eagle3", "llama", rope_parameters=half), batch, ttt, cross_document_targets=True)
    add(
        "attention_dropout",
        drafter("eagle3", "llama"),
        batch,
        ttt,
        dict(attention_dropout=0.1),
        cross_document_targets=True,
    )

    for loss in ("kl_div", "ce", "tv"):
        add(
            f"bfloat16, {loss}",
            drafter("eagle3", "qwen3"),
            batch_for(drafter("eagle3", "qwen3"), "qwen3"),
            ttt | dict(loss_fn=loss),
            cross_document_targets=True,
        )

    (tmp / "job.json").write_text(json.dumps(job))
    done = subprocess.run([python, __file__, "--there", tmp / "job.json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-3000:]}\nupstream's process ended with code {done.returncode}")
    theirs = json.loads((tmp / "there.json").read_text())
    print(f"{'difference':48}{'ours':>10}{'upstream':>10}{'apart':>8}  notes")
    for name, a in ours.items():
        b = theirs[name]
        if "none" in b:
            print(f"{name:48}{a['loss']:10.4f}{'':>10}{'':>8}  upstream does not load it: {b['none']}")
            continue
        notes = (
            [f"a second call of the same batch gives {b['second']:.4f} there"]
            if abs(b["second"] / b["loss"] - 1) > 1e-6
            else []
        )
        if a["bf16"] is not None:
            notes.append(
                f"1 - cosine of the gradient in bfloat16 to that in float32: {a['bf16']:.1e} here, {b['bf16']:.1e} "
                "there"
            )
        if a["embed"] is not None:
            notes.append(
                f"gradient of the embedding {a['embed']:.4f} here, {b['embed']} there; of the row in question "
                f"{a['row']:.4f} here, {b['row']} there"
            )
        print(f"{name:48}{a['loss']:10.4f}{b['loss']:10.4f}{abs(b['loss'] / a['loss'] - 1):8.1%}  {'; '.join(notes)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--there", metavar="JOB", help=argparse.SUPPRESS)
    parser.add_argument("--upstream-python", type=Path, help="interpreter of an environment with speculators 0.9.0")
    opt = parser.parse_args()
    if opt.there:
        there(opt.there)
    else:
        from upstream import upstream_python

        main(opt.upstream_python or upstream_python())
