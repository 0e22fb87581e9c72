"""Record what the upstream library `speculators` 0.9.0 computes for DSpark, case by case.

Runs only in an environment that holds upstream (see README.md beside the fixtures); our package is not imported.

    python tests/parity/make_dspark_cases.py                    # write every case into tests/fixtures/
    python tests/parity/make_dspark_cases.py rnn_full           # one of them
    python tests/parity/make_dspark_cases.py --check tests/fixtures/dspark tests/fixtures/dspark_*
    python tests/parity/make_dspark_cases.py --load FOLDER      # a checkpoint folder with inputs.safetensors and call.json beside it

`--check` rebuilds each model from its folder's config and weights, runs it again and prints the largest difference. `--load` lets upstream
read a checkpoint that we wrote and prints its loss and metrics as JSON (`tests/parity/dflash_round_trip.py` compares them).
"""
import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import speculators.models.dflash.core as dflash
import torch
from make_eagle3_cases import CONFIGS, FIXTURES, HIDDEN, SHAPE, VOCAB
from safetensors.torch import load_file, save_file
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.train.data import CollateFn

SEED = 7654
# What differs from case to case. `documents` are lengths; `loss` is the share of each document that is masked out at its start, or "random" for
# holes anywhere; `decoder` overrides entries of the draft's decoder configuration; `head_alpha` is the weight of the confidence loss.
CASES = {
    "gated_window_padding": dict(
        note="gated head; two layers, a window of 6 (causal in the block), then full; five padding rows; 0.1 ce + 0.9 tv, confidence weight 0.5; 13 anchors wanted, all valid",
        documents=[15, 12, 16], padding=5, layer_types=["sliding_attention", "full_attention"], decoder=dict(sliding_window=6),
        args=dict(markov_head_type="gated", loss_fn='{"ce": 0.1, "tv": 0.9}', max_anchors=13, confidence_head_alpha=0.5)),
    "rnn_full_dpace": dict(
        note="rnn head, full vocabulary (no t2d, d2t), block of 5, D-PACE weights on ce, llama verifier, more anchors than there are places",
        verifier="llama", documents=[20, 9, 19], vocab=VOCAB, layer_types=["full_attention"],
        args=dict(markov_head_type="rnn", block_size=5, loss_fn="ce", per_position_loss_weight="dpace", dpace_alpha=0.3, max_anchors=40)),
    "shifted_plain_confidence": dict(
        note="sample_from_anchor False; confidence head without the Markov embedding; vanilla head; two auxiliary layers; gamma 2",
        documents=[14, 13, 13], layer_types=["full_attention", "full_attention"],
        args=dict(sample_from_anchor=False, confidence_head_with_markov=False, target_layer_ids=[0, 3], dflash_decay_gamma=2.0)),
    "shifted_rnn_holes": dict(
        note="sample_from_anchor False, rnn head, loss mask with holes up to the row's end, documents shorter than a block, window of 4 that sees the whole block",
        documents=[2, 15, 3, 12, 1, 15], loss="random", layer_types=["sliding_attention"], decoder=dict(sliding_window=4),
        args=dict(sample_from_anchor=False, markov_head_type="rnn", sliding_window_non_causal=True, block_size=6, max_anchors=14, loss_fn="rkl")),
    "gated_no_confidence": dict(
        note="no confidence head; gated head; lk_hybrid",
        documents=[18, 12, 18], layer_types=["full_attention"],
        args=dict(markov_head_type="gated", enable_confidence_head=False, confidence_head_with_markov=False, loss_fn="lk_hybrid")),
    "no_markov": dict(
        note="markov_rank 0: a DFlash block with a confidence head alone; 24 padding rows, most anchors not valid",
        documents=[12, 12], padding=24, layer_types=["full_attention"],
        args=dict(markov_rank=0, confidence_head_with_markov=False, max_anchors=20)),
}
ARGS = dict(target_layer_ids=[1, 2, 3], mask_token_id=VOCAB - 1, block_size=4, max_anchors=8, dflash_decay_gamma=4.0, dpace_alpha=0.5,
            per_position_loss_weight="fixed-exp-decay", markov_rank=6, loss_fn="kl_div", loss_implementation="eager", draft_attn_impl="sdpa")


def generator(offset):
    return torch.Generator().manual_seed(SEED + offset)


def build_model(case, seed):
    """The draft as upstream's training makes it, every trainable parameter then moved off its initial ones and zeros."""
    args = ARGS | case.get("args", {})
    vocab = case.get("vocab", VOCAB // 2)
    args |= dict(draft_vocab_size=vocab, verifier_name_or_path=f"eagle3_verifier_{case.get('verifier', 'qwen3')}")
    t2d = d2t = None
    if vocab < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator(seed))[:vocab].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        d2t = ids - torch.arange(vocab)
    types = case["layer_types"]
    layer = CONFIGS["qwen3"](**(SHAPE | dict(num_hidden_layers=len(types), layer_types=types, sliding_window=2048,
                                             use_sliding_window="sliding_attention" in types) | case.get("decoder", {})))
    torch.manual_seed(SEED + seed + 1)
    model = DSparkDraftModel.from_training_args(layer, t2d=t2d, d2t=d2t, **args)
    g = generator(seed + 2)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=g)
        if model.markov_head is not None:    # as large as the base logits' differences, so that a bias at the wrong slot shows
            model.markov_head.markov_w1.weight += torch.randn(model.markov_head.markov_w1.weight.shape, generator=g)
    return model, args


def make_batch(case, n_aux, seed):
    """One packed row, built by upstream's collate."""
    g, samples = generator(seed + 3), []
    for n in case["documents"]:
        mask = (torch.rand(n, generator=g) < 0.7) if case.get("loss") == "random" else torch.arange(n) >= n // 4
        samples.append(dict(
            input_ids=torch.randint(VOCAB, (n,), generator=g), hidden_states=torch.randn(n, n_aux * HIDDEN, generator=g),
            verifier_last_hidden_states=torch.randn(n, HIDDEN, generator=g), loss_mask=mask, lengths=torch.tensor([n]),
            position_ids=torch.arange(n)))
    batch = CollateFn(sum(case["documents"]) + case.get("padding", 0), HIDDEN, n_aux, torch.float32, None)(samples)
    batch.pop("error_records")
    batch.pop("lengths", None)
    return batch


def choose_anchors(batch, args, seed):
    """Upstream's own draw, made once: the fixture hands it over."""
    torch.manual_seed(SEED + seed + 5)
    positions, valid = dflash.select_anchors(batch["loss_mask"], args["max_anchors"], args["block_size"])
    return batch | dict(anchor_positions=positions, anchor_valid=valid)


def plant_agreement(model, batch, call, seed):
    """Let the verifier agree with the draft in some blocks from their start on, so that accuracies and acceptance rates are neither 0 nor 1."""
    logits = run(model, batch, call)["final"]
    size, g, first = model.block_size, generator(seed + 4), 0 if model.config.sample_from_anchor else 1
    y, rows, scale = batch["verifier_last_hidden_states"], model.lm_head.weight.detach(), model.verifier_norm.weight.detach()
    for anchor, block in zip(batch["anchor_positions"].tolist(), logits.view(-1, size, logits.shape[-1])):
        for k in range(first, int(torch.randint(size + 1, (), generator=g))):
            noise = 0.3 * torch.rand((), generator=g) * torch.randn(HIDDEN, generator=g)
            y[0, anchor + k - first] = (rows[block[k].argmax()] + noise) / scale


def run(model, batch, call):
    """Forward with the batch's anchors, with what the heads said."""
    batch, seen = dict(batch), dict(head_out=[], target=[], final=[])
    anchors = batch.pop("anchor_positions"), batch.pop("anchor_valid")
    hooks = [model.lm_head.register_forward_hook(lambda m, i, o: seen["head_out"].append(o.detach())),
             model.verifier_lm_head.register_forward_hook(lambda m, i, o: seen["target"].append(o.detach()))]
    if model.markov_head is not None:
        bias = model.markov_head.block_bias
        model.markov_head.block_bias = lambda **kw: seen["final"].append(bias(**kw)) or seen["final"][-1]
    draw, dflash.select_anchors = dflash.select_anchors, lambda *_: anchors
    model.zero_grad(set_to_none=True)
    try:
        _, loss, metrics = model(**batch, **call)
    finally:
        dflash.select_anchors = draw
        if model.markov_head is not None:
            del model.markov_head.block_bias
        for hook in hooks:
            hook.remove()
    base = seen["head_out"][0]
    final = base + (seen["final"][0].detach().reshape(base.shape) if seen["final"] else 0)
    return dict(head_out=base, target=seen["target"][0], final=final, loss=loss, metrics=metrics)


def record(model, batch, call):
    """Everything that a fixture holds: (outputs, gradients, numbers)."""
    out = run(model, batch, call)
    out["loss"].backward()
    grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    outputs = {"loss": out["loss"].detach().reshape(1), "verifier_lm_head_out.0": out["target"], "lm_head_out.0": out["head_out"], "logits": out["final"]}
    numbers = dict(
        algorithm="dspark", loss=out["loss"].item(), metrics={k: float(v) for k, v in out["metrics"].items()},
        grad_norms={n: t.norm().item() for n, t in grads.items()},
        total_grad_norm=torch.cat([t.flatten() for t in grads.values()]).norm().item(),
        trainable_without_grad=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None],
        frozen=[n for n, p in model.named_parameters() if not p.requires_grad])
    return outputs, grads, numbers


def five_steps(model, batch, call):
    """[loss before the step, gradient norm before clipping] of five AdamW steps on the same batch and anchors."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer, curve = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = run(model, batch, call)["loss"]
        loss.backward()
        curve.append([loss.item(), torch.nn.utils.clip_grad_norm_(params, 1.0).item()])
        optimizer.step()
    return curve


def restore(folder, attn):
    """A model with a folder's configuration and weights, and the forward arguments it was recorded with."""
    config = DSparkSpeculatorConfig.from_pretrained(folder / "saved_pretrained")
    config.transformer_layer_config._attn_implementation = attn
    model = DSparkDraftModel(config=config)
    model.load_state_dict(load_file(folder / "state_dict.safetensors"))
    args = json.loads((folder / "outputs.json").read_text())["training_args"]
    return model, DSparkDraftModel.get_trainer_kwargs(**args)[0]


def plain(call):
    """The forward arguments as JSON."""
    return {k: v for k, v in call.items() if k not in ("loss_config", "tv_loss_fn")} | dict(loss_config={k: w for k, (_, w) in call["loss_config"].items()})


def write_case(name, case, root):
    seed = 100 * (1 + list(CASES).index(name))
    model, args = build_model(case, seed)
    call = DSparkDraftModel.get_trainer_kwargs(**args)[0]
    batch = choose_anchors(make_batch(case, len(args["target_layer_ids"]), seed), args, seed)
    plant_agreement(model, batch, call, seed)
    folder = root / f"dspark_{name}"
    folder.mkdir(exist_ok=True)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    outputs, grads, numbers = record(model, batch, call)
    for file, tensors in dict(state_dict=state, inputs=batch, outputs=outputs, grads=grads).items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{file}.safetensors")
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        keys = sorted(load_file(Path(tmp) / "model.safetensors"))
        config = (Path(tmp) / "config.json").read_text()
    (folder / "saved_pretrained").mkdir(exist_ok=True)
    (folder / "saved_pretrained" / "config.json").write_text(config.rstrip() + "\n")
    (folder / "saved_pretrained_keys.json").write_text(json.dumps(keys, indent=1) + "\n")
    numbers |= dict(training_args=args, call_kwargs=plain(call), case=case)
    path = folder / "outputs.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    # the same numbers from the other attention implementation: how far rounding alone takes them
    other, _, eager = record(restore(folder, "eager")[0], batch, call)
    numbers |= dict(loss_eager=eager["loss"], grad_norm_rel_diff_eager=abs(eager["total_grad_norm"] / numbers["total_grad_norm"] - 1),
                    logits_max_abs_diff_eager=(other["lm_head_out.0"] - outputs["lm_head_out.0"]).abs().max().item(),
                    adamw_5_steps_loss_gradnorm=five_steps(restore(folder, "sdpa")[0], batch, call))
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    m, size = numbers["metrics"], sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1024
    print(f"{folder.name}: loss {numbers['loss']:.6f} (eager {numbers['loss_eager']:.6f}), right {m['full_acc_sum']:.0f}/{m['full_acc_total']:.0f}, "
          f"accept rate {m['accept_rate_sum'] / m['accept_rate_total']:.3f}, anchors {int(batch['anchor_valid'].sum())}/{len(batch['anchor_valid'])}, {size:.0f} KiB")


def check(folder):
    """Largest absolute differences between a folder and a fresh run of it."""
    model, call = restore(folder, "sdpa")
    batch = load_file(folder / "inputs.safetensors")
    outputs, grads, numbers = record(model, batch, call)
    stored, want = load_file(folder / "outputs.safetensors"), json.loads((folder / "outputs.json").read_text())
    kept = load_file(folder / "grads.safetensors")
    assert outputs.keys() >= stored.keys() and grads.keys() == kept.keys() and numbers["metrics"].keys() == want["metrics"].keys()
    diff = dict(loss=abs(numbers["loss"] - want["loss"]),
                outputs=max((outputs[k].double() - stored[k].double()).abs().max().item() for k in stored),
                grads=max((grads[k] - kept[k]).abs().max().item() for k in kept),
                metrics=max(abs(numbers["metrics"][k] - v) for k, v in want["metrics"].items()),
                steps=(torch.tensor(five_steps(model, batch, call)) - torch.tensor(want["adamw_5_steps_loss_gradnorm"])).abs().max().item())
    print(folder.name, {k: float(f"{v:.2g}") for k, v in diff.items()})
    return max(diff.values())


def load(folder):
    """Upstream's own `from_pretrained` on a checkpoint, then one forward pass with the batch and arguments beside it."""
    config = DSparkSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"            # the default one does not train on a CPU
    model = DSparkDraftModel.from_pretrained(folder, config=config)
    args = json.loads((folder / "call.json").read_text())
    out = run(model.train(), load_file(folder / "inputs.safetensors"), DSparkDraftModel.get_trainer_kwargs(**args, loss_implementation="eager")[0])
    print(json.dumps(dict(loss=out["loss"].item(), metrics={k: float(v) for k, v in out["metrics"].items()})))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to write (default: all), or folders with --check and --load")
    parser.add_argument("--check", action="store_true", help="re-run folders instead of writing them")
    parser.add_argument("--load", action="store_true", help="load checkpoints and print their losses")
    opt = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folders = [Path(f).resolve() for f in opt.names]
    os.chdir(FIXTURES)                                                       # configurations name their verifier by its folder
    if opt.load:
        for folder in folders:
            load(folder)
    elif opt.check:
        sys.exit(max(check(f) for f in folders) > 1e-5)
    else:
        for name in opt.names or CASES:
            write_case(name, CASES[name], FIXTURES)
