"""Record what the upstream library `speculators` 0.9.0 computes for P-EAGLE, case by case.

Runs only in an environment that holds upstream (see README.md beside the fixtures); our package is not imported.

    python tests/parity/make_peagle_cases.py                    # write every case into tests/fixtures/
    python tests/parity/make_peagle_cases.py qwen3_full         # one of them
    python tests/parity/make_peagle_cases.py --check tests/fixtures/peagle tests/fixtures/peagle_*
    python tests/parity/make_peagle_cases.py --load FOLDER      # a checkpoint folder with inputs.safetensors and call.json in it

`--check` rebuilds each model from its folder's config and weights, runs it again and prints the largest difference. `--load` lets upstream
read a checkpoint that we wrote and prints its loss and metrics as JSON (`tests/parity/peagle_round_trip.py` compares them).
"""
import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from make_eagle3_cases import CONFIGS, FIXTURES, HIDDEN, SEED, SHAPE, VOCAB, generator, make_batch, write_verifier
from safetensors.torch import load_file, save_file
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

# What differs from case to case, as in make_eagle3_cases.
CASES = {
    "llama_2layers_padding": dict(
        note="two llama layers, the first with a sliding window of 4 that is shorter than the rollouts, five padding rows, six depths, rope_theta 5e5",
        verifier="qwen3", draft="llama", documents=[9, 12, 14], padding=5, layer_types=["sliding_attention", "full_attention"],
        decoder=dict(sliding_window=4, rope_parameters=dict(rope_type="default", rope_theta=5e5)), args=dict(num_depths=6, down_sample_ratio=0.9, down_sample_ratio_min=0.5)),
    "qwen3_full": dict(
        note="full vocabulary (no t2d, d2t), head_dim 16 on hidden 32, 12 anchors, 0.3 ce + 0.7 tv, norm_before_residual off",
        verifier="qwen3", draft="qwen3", documents=[11, 8, 21], vocab=VOCAB, layer_types=["full_attention"], decoder=dict(head_dim=16),
        args=dict(max_anchors=12, num_depths=5, norm_before_residual=False, loss_fn='{"ce": 0.3, "tv": 0.7}')),
    "llama_2aux_norm_before_fc": dict(
        note="norm_before_fc over two auxiliary layers, llama verifier with llama3 rope scaling, lk_hybrid, eight depths",
        verifier="llama", draft="llama", documents=[16, 10, 14], layer_types=["full_attention"],
        decoder=dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
        args=dict(target_layer_ids=[0, 3], norm_before_fc=True, num_depths=8, loss_fn="lk_hybrid")),
    "qwen3_mask_holes": dict(
        note="fc_norm and norm_output; random loss mask with holes that reaches the last rows of documents and of the row; documents of 1, 2 and 3 rows: "
             "rollouts run into the next document, and one begins before the row",
        verifier="qwen3", draft="qwen3", documents=[1, 14, 2, 9, 3, 11], loss="random", layer_types=["sliding_attention"] * 2,
        decoder=dict(sliding_window=5), args=dict(fc_norm=True, norm_output=True, num_depths=4, down_sample_ratio=1.0)),
}
ARGS = dict(target_layer_ids=[1, 2, 3], norm_before_residual=True, norm_before_fc=False, fc_norm=False, norm_output=False, mask_token_id=255,
            num_depths=4, down_sample_ratio=0.7, down_sample_ratio_min=0.2, max_anchors=None, loss_fn="kl_div", loss_implementation="eager", draft_attn_impl="sdpa")


def build_model(case, seed):
    """The draft as upstream's training makes it, every trainable parameter then moved off its initial ones and zeros."""
    vocab = case.get("vocab", VOCAB // 2)
    args = ARGS | case.get("args", {}) | dict(draft_vocab_size=vocab, verifier_name_or_path=f"eagle3_verifier_{case['verifier']}")
    t2d = d2t = None
    if vocab < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator(seed))[:vocab].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        d2t = ids - torch.arange(vocab)
    types = case["layer_types"]
    layer = CONFIGS[case["draft"]](**(SHAPE | dict(num_hidden_layers=len(types), layer_types=types, sliding_window=2048,
                                                   use_sliding_window="sliding_attention" in types) | case.get("decoder", {})))
    torch.manual_seed(SEED + seed + 1)
    model = PEagleDraftModel.from_training_args(layer, t2d=t2d, d2t=d2t, **args)
    g = generator(seed + 2)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=g)
    return model, args


def run(model, batch, call):
    """Forward on given rollouts, with what the two heads saw and said."""
    given = batch["cod_anchor_pos"], batch["cod_depth"]
    batch = {k: v for k, v in batch.items() if not k.startswith("cod_")}
    seen = dict(head_in=[], head_out=[], target=[])
    hooks = [model.lm_head.register_forward_hook(lambda m, i, o: seen["head_in"].append(i[0].detach())),
             model.lm_head.register_forward_hook(lambda m, i, o: seen["head_out"].append(o.detach())),
             model.verifier_lm_head.register_forward_hook(lambda m, i, o: seen["target"].append(o.detach()))]
    model.zero_grad(set_to_none=True)
    sampler, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: given
    try:
        _, loss, metrics = model(**batch, **call)
    finally:
        core.generate_cod_sample_indices = sampler
        for hook in hooks:
            hook.remove()
    return seen | dict(loss=loss, metrics=metrics)


def sample(batch, call, seed):
    """The rollouts that upstream draws after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    names = ("num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_anchors")
    anchor, depth = core.generate_cod_sample_indices(seq_length=batch["input_ids"].shape[1], loss_mask=batch["loss_mask"], **{k: call[k] for k in names})
    return dict(cod_anchor_pos=anchor, cod_depth=depth)


def plant_agreement(model, batch, call, seed):
    """Let the verifier agree with one of the rows that predict a position, more or less, so that accuracies are neither 0 nor 1."""
    rows, at, g = run(model, batch, call)["head_in"][0][0], batch["cod_anchor_pos"] + batch["cod_depth"], generator(seed + 4)
    for n in torch.randperm(len(at), generator=g).tolist():
        noise = 0.5 * torch.rand((), generator=g)
        batch["verifier_last_hidden_states"][0, at[n]] = (rows[n] + noise * torch.randn(HIDDEN, generator=g)) / model.verifier_norm.weight.detach()


def record(model, batch, call):
    """Everything that a fixture holds: (outputs, gradients, numbers)."""
    out = run(model, batch, call)
    out["loss"].backward()
    grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    outputs = {"loss": out["loss"].detach().reshape(1), "verifier_lm_head_out.0": out["target"][0], "lm_head_out.0": out["head_out"][0]}
    numbers = dict(
        algorithm="peagle", loss=out["loss"].item(), metrics={k: float(v) for k, v in out["metrics"].items()},
        grad_norms={n: t.norm().item() for n, t in grads.items()},
        total_grad_norm=torch.cat([t.flatten() for t in grads.values()]).norm().item(),
        trainable_without_grad=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None],
        frozen=[n for n, p in model.named_parameters() if not p.requires_grad])
    return outputs, grads, numbers


def cross_document_rows(batch):
    """How many trained rows of each depth predict a position in another document than their anchor's: what `cross_document_targets` adds."""
    doc, anchor, depth = batch["document_ids"][0], batch["cod_anchor_pos"], batch["cod_depth"]
    other = batch["loss_mask"][0][anchor + depth].bool() & ((doc[anchor] != doc[anchor + depth]) | (anchor < 0))
    return torch.bincount(depth[other], minlength=int(depth.max()) + 1).tolist()


def five_steps(model, batch, call):
    """[loss before the step, gradient norm before clipping] of five AdamW steps on the same batch."""
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
    config = PEagleSpeculatorConfig.from_pretrained(folder / "saved_pretrained")
    config.transformer_layer_config._attn_implementation = attn
    model = PEagleDraftModel(config=config)
    model.load_state_dict(load_file(folder / "state_dict.safetensors"))
    args = json.loads((folder / "outputs.json").read_text())["training_args"]
    return model, PEagleDraftModel.get_trainer_kwargs(**args)[0]


def write_case(name, case, root):
    seed = 100 * (1 + list(CASES).index(name)) + 50000
    model, args = build_model(case, seed)
    call = PEagleDraftModel.get_trainer_kwargs(**args)[0]
    batch = make_batch(case, len(args["target_layer_ids"]), seed)
    batch |= sample(batch, call, SEED + seed + 5)
    plant_agreement(model, batch, call, seed)
    folder = root / f"peagle_{name}"
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
    numbers |= dict(training_args=args, call_kwargs=call | dict(loss_config={k: w for k, (_, w) in call["loss_config"].items()}), case=case,
                    sample_seed=SEED + seed + 5, cross_document_rows=cross_document_rows(batch))
    path = folder / "outputs.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    # the same numbers from the other attention implementation: how far rounding alone takes them; with padding it gives NaN upstream
    other, _, eager = record(restore(folder, "eager")[0], batch, call)
    if not case.get("padding"):
        numbers |= dict(loss_eager=eager["loss"], grad_norm_rel_diff_eager=abs(eager["total_grad_norm"] / numbers["total_grad_norm"] - 1),
                        logits_max_abs_diff_eager=(other["lm_head_out.0"] - outputs["lm_head_out.0"]).abs().max().item())
    numbers |= dict(adamw_5_steps_loss_gradnorm=five_steps(restore(folder, "sdpa")[0], batch, call))
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    m = numbers["metrics"]
    acc = [f"{m[f'position_{k}_acc_sum']:.0f}/{m[f'position_{k}_acc_total']:.0f}" for k in range(args["num_depths"])]
    print(f"{folder.name}: loss {numbers['loss']:.6f} (eager {eager['loss']:.6f}), right by depth {acc}, across documents {numbers['cross_document_rows']}, "
          f"{sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) / 1024:.0f} KiB")


def check(folder):
    """Largest absolute differences between a folder and a fresh run of it."""
    model, call = restore(folder, "sdpa")
    batch = load_file(folder / "inputs.safetensors")
    outputs, grads, numbers = record(model, batch, call)
    stored, want = load_file(folder / "outputs.safetensors"), json.loads((folder / "outputs.json").read_text())
    kept = load_file(folder / "grads.safetensors")
    assert outputs.keys() == stored.keys() and grads.keys() == kept.keys() and numbers["metrics"].keys() == want["metrics"].keys()
    diff = dict(loss=abs(numbers["loss"] - want["loss"]),
                outputs=max((outputs[k].double() - stored[k].double()).abs().max().item() for k in stored),
                grads=max((grads[k] - kept[k]).abs().max().item() for k in kept),
                metrics=max(abs(numbers["metrics"][k] - v) for k, v in want["metrics"].items()),
                steps=(torch.tensor(five_steps(model, batch, call)) - torch.tensor(want["adamw_5_steps_loss_gradnorm"])).abs().max().item())
    print(folder.name, {k: float(f"{v:.2g}") for k, v in diff.items()})
    return max(diff.values())


def load(folder):
    """A checkpoint of ours in upstream's hands: loss and metrics on the inputs beside it, as one line of JSON."""
    args = json.loads((folder / "call.json").read_text())
    config, call = PEagleSpeculatorConfig.from_pretrained(folder), PEagleDraftModel.get_trainer_kwargs(**args)[0]
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = PEagleDraftModel.from_pretrained(folder, config=config)
    with torch.no_grad():
        out = run(model.float(), load_file(folder / "inputs.safetensors"), call)
    print(json.dumps(dict(loss=out["loss"].item(), metrics={k: float(v) for k, v in out["metrics"].items()})))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to write (default: all), or folders with --check or --load")
    parser.add_argument("--check", action="store_true", help="re-run folders instead of writing them")
    parser.add_argument("--load", action="store_true", help="read checkpoints of ours")
    opt = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if opt.load:
        for f in opt.names:
            load(Path(f).resolve())
        sys.exit()
    if opt.check:
        sys.exit(max(check(Path(f).resolve()) for f in opt.names) > 1e-5)
    for arch in CONFIGS:
        write_verifier(FIXTURES, arch)
    os.chdir(FIXTURES)                                                       # configurations name their verifier by its folder
    for name in opt.names or CASES:
        write_case(name, CASES[name], FIXTURES)
