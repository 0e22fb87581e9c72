"""Record what the upstream library `speculators` 0.9.0 computes for EAGLE-3, case by case.

Runs only in an environment that holds upstream (see README.md beside the fixtures); our package is not imported.

    python tests/parity/make_eagle3_cases.py                    # write every case into tests/fixtures/
    python tests/parity/make_eagle3_cases.py qwen3_full         # one of them
    python tests/parity/make_eagle3_cases.py --check tests/fixtures/eagle3 tests/fixtures/eagle3_*

`--check` rebuilds each model from its folder's config and weights, runs it again and prints the largest difference.
"""
import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaConfig, Qwen3Config

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SEED = 4321
HIDDEN, VOCAB, LAYERS = 32, 256, 4
SHAPE = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64,
             max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False)
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}

# What differs from case to case. `documents` are lengths after the shift; `loss` is the share of each document that is masked out at its
# start, or "random" for holes anywhere; `decoder` overrides entries of the draft's decoder configuration.
CASES = {
    "qwen3_full": dict(
        note="qwen3 layer, full vocabulary (no t2d, d2t), no norm before fc, raw output fed back, head_dim 16 on hidden 32",
        verifier="qwen3", draft="qwen3", documents=[11, 8, 21], vocab=VOCAB, layer_types=["full_attention"], decoder=dict(head_dim=16),
        args=dict(norm_before_residual=True, norm_before_fc=False, fc_norm=False, norm_output=False)),
    "llama_2layers_padding": dict(
        note="two llama layers, the first with a sliding window of 6, five padding rows, rope_theta 5e5",
        verifier="qwen3", draft="llama", documents=[9, 12, 14], padding=5, layer_types=["sliding_attention", "full_attention"],
        decoder=dict(sliding_window=6, rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "llama_fc_norm": dict(
        note="norm_before_residual, norm_before_fc and norm_output off; fc_norm on",
        verifier="llama", draft="llama", documents=[13, 10, 17], layer_types=["full_attention"],
        args=dict(norm_before_residual=False, norm_before_fc=False, fc_norm=True, norm_output=False)),
    "qwen3_mixed_ttt4": dict(
        note="two qwen3 layers (full, then a window of 5), 4 TTT steps, decay 0.8, 0.3 ce + 0.7 tv",
        verifier="qwen3", draft="qwen3", documents=[9, 12, 15], vocab=96, layer_types=["full_attention", "sliding_attention"],
        decoder=dict(sliding_window=5), args=dict(ttt_steps=4, ttt_step_loss_decay=0.8, loss_fn='{"ce": 0.3, "tv": 0.7}')),
    "llama_2aux_lk": dict(
        note="two auxiliary layers, llama verifier with llama3 rope scaling, lk_hybrid, 2 TTT steps with decay 0.5",
        verifier="llama", draft="llama", documents=[16, 10, 14], layer_types=["full_attention"],
        decoder=dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                          original_max_position_embeddings=16)),
        args=dict(target_layer_ids=[0, 3], ttt_steps=2, ttt_step_loss_decay=0.5, loss_fn="lk_hybrid")),
    "qwen3_mask_holes": dict(
        note="random loss mask with holes that reaches the last rows of documents and of the row; documents of 1, 2 and 3 rows",
        verifier="qwen3", draft="qwen3", documents=[1, 14, 2, 9, 3, 11], loss="random", layer_types=["sliding_attention"],
        decoder=dict(sliding_window=2048)),
}
ARGS = dict(target_layer_ids=[1, 2, 3], norm_before_residual=True, norm_before_fc=True, fc_norm=False, norm_output=True,
            embed_requires_grad=False, ttt_steps=3, ttt_step_loss_decay=1.0, loss_fn="kl_div", loss_implementation="eager",
            draft_attn_impl="sdpa")


def generator(offset):
    return torch.Generator().manual_seed(SEED + offset)


def write_verifier(root, arch):
    """A verifier's folder with the three tensors that an EAGLE-3 draft reads from it."""
    folder = root / f"eagle3_verifier_{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[arch](num_hidden_layers=LAYERS, **SHAPE)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]]
    (folder / "config.json").write_text(json.dumps(config.to_diff_dict(), indent=1, sort_keys=True) + "\n")
    g = generator(list(CONFIGS).index(arch))
    save_file({"model.embed_tokens.weight": 0.3 * torch.randn(VOCAB, HIDDEN, generator=g),
               "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=g),
               "lm_head.weight": 0.5 * torch.randn(VOCAB, HIDDEN, generator=g)}, folder / "model.safetensors")
    return folder


def build_model(case, seed):
    """The draft as upstream's training makes it, every trainable parameter then moved off its initial ones and zeros."""
    args = ARGS | case.get("args", {})
    vocab = case.get("vocab", VOCAB // 2)
    args |= dict(draft_vocab_size=vocab, verifier_name_or_path=f"eagle3_verifier_{case['verifier']}")
    t2d = d2t = None
    if vocab < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator(seed))[:vocab].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        d2t = ids - torch.arange(vocab)
    types = case["layer_types"]
    layer = CONFIGS[case["draft"]](**(SHAPE | dict(num_hidden_layers=len(types), layer_types=types, sliding_window=2048,
                                                   use_sliding_window="sliding_attention" in types) | case.get("decoder", {})))
    torch.manual_seed(SEED + seed + 1)
    model = Eagle3DraftModel.from_training_args(layer, t2d=t2d, d2t=d2t, **args)
    g = generator(seed + 2)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=g)
    return model, args


def make_batch(case, n_aux, seed):
    """One packed row, built by upstream's shift and collate."""
    g, samples = generator(seed + 3), []
    for n in case["documents"]:
        n += 1                                                               # the shift drops one row of each document
        mask = (torch.rand(n, generator=g) < 0.6) if case.get("loss") == "random" else torch.arange(n) > n // 4
        samples.append(dict(
            input_ids=torch.randint(VOCAB, (n,), generator=g), hidden_states=torch.randn(n, n_aux * HIDDEN, generator=g),
            verifier_last_hidden_states=torch.randn(n, HIDDEN, generator=g), loss_mask=mask, lengths=torch.tensor([n]),
            position_ids=torch.arange(n)))
    if case.get("loss") == "random":
        for s in samples[1::2]:
            s["loss_mask"][-1] = True                                        # some documents are trained up to their last row
    length = sum(case["documents"]) + case.get("padding", 0)
    batch = CollateFn(length, HIDDEN, n_aux, torch.float32, shift_batch)(samples)
    batch.pop("error_records")
    return batch


def plant_agreement(model, batch, call, seed):
    """Let the verifier agree with the draft on some runs of tokens, so that accuracies are neither 0 nor 1."""
    rows = run(model, batch, call)["head_in"]
    y, g = batch["verifier_last_hidden_states"], generator(seed + 4)
    for start in range(0, y.shape[1] - len(rows), len(rows)):
        for k, h in enumerate(rows):
            noise = 0.35 * torch.rand((), generator=g)
            y[0, start + k] = (h[0, start] + noise * torch.randn(HIDDEN, generator=g)) / model.verifier_norm.weight.detach()


def run(model, batch, call):
    """Forward, with what the two heads saw and said."""
    seen = dict(head_in=[], head_out=[], target=[])
    hooks = [model.lm_head.register_forward_hook(lambda m, i, o: seen["head_in"].append(i[0].detach())),
             model.lm_head.register_forward_hook(lambda m, i, o: seen["head_out"].append(o.detach())),
             model.verifier_lm_head.register_forward_hook(lambda m, i, o: seen["target"].append(o.detach()))]
    model.zero_grad(set_to_none=True)
    tokens, loss, metrics = model(**batch, **call)
    for hook in hooks:
        hook.remove()
    return seen | dict(tokens=tokens, loss=loss, metrics=metrics)


def record(model, batch, call):
    """Everything that a fixture holds: (outputs, gradients, numbers)."""
    out = run(model, batch, call)
    out["loss"].backward()
    grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    outputs = {"loss": out["loss"].detach().reshape(1), "verifier_lm_head_out.0": out["target"][0]}
    outputs |= {f"lm_head_out.{k}": t for k, t in enumerate(out["head_out"])}
    outputs |= {f"returned.{k}": t for k, t in enumerate(out["tokens"])}
    numbers = dict(
        algorithm="eagle3", loss=out["loss"].item(), metrics={k: float(v) for k, v in out["metrics"].items()},
        grad_norms={n: t.norm().item() for n, t in grads.items()},
        total_grad_norm=torch.cat([t.flatten() for t in grads.values()]).norm().item(),
        trainable_without_grad=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None],
        frozen=[n for n, p in model.named_parameters() if not p.requires_grad])
    return outputs, grads, numbers


def cross_document_rows(batch, steps):
    """How many loss rows of each TTT step have their target in another document: only `loss_mask` keeps upstream from counting them."""
    doc, mask = batch["document_ids"][0], batch["loss_mask"][0]
    return [int((mask[k:] & (doc[k:] != doc[: len(doc) - k])).sum()) for k in range(steps)]


def five_steps(model, batch, call):
    """[loss before the step, gradient norm before clipping] of five AdamW steps on the same batch."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer, curve = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01), []
    for _ in range(5):
        optimizer.zero_grad()
        _, loss, _ = model(**batch, **call)
        loss.backward()
        curve.append([loss.item(), torch.nn.utils.clip_grad_norm_(params, 1.0).item()])
        optimizer.step()
    return curve


def restore(folder, attn):
    """A model with a folder's configuration and weights, and the forward arguments it was recorded with."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder / "saved_pretrained")
    config.transformer_layer_config._attn_implementation = attn
    model = Eagle3DraftModel(config=config)
    model.load_state_dict(load_file(folder / "state_dict.safetensors"))
    args = json.loads((folder / "outputs.json").read_text())["training_args"]
    return model, Eagle3DraftModel.get_trainer_kwargs(**args)[0]


def write_case(name, case, root):
    seed = 100 * (1 + list(CASES).index(name))
    model, args = build_model(case, seed)
    call = Eagle3DraftModel.get_trainer_kwargs(**args)[0]
    batch = make_batch(case, len(args["target_layer_ids"]), seed)
    plant_agreement(model, batch, call, seed)
    folder = root / f"eagle3_{name}"
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
                    cross_document_rows=cross_document_rows(batch, args["ttt_steps"]))
    path = folder / "outputs.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    # the same numbers from the other attention implementation: how far rounding alone takes them
    other, _, eager = record(restore(folder, "eager")[0], batch, call)
    numbers |= dict(loss_eager=eager["loss"], grad_norm_rel_diff_eager=abs(eager["total_grad_norm"] / numbers["total_grad_norm"] - 1),
                    logits_max_abs_diff_eager=max((other[k] - outputs[k]).abs().max().item() for k in outputs if k.startswith("lm_head")),
                    adamw_5_steps_loss_gradnorm=five_steps(restore(folder, "sdpa")[0], batch, call))
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    m = numbers["metrics"]
    acc = [f"{m[f'cond_acc_{k}_sum']:.0f}/{m[f'cond_acc_{k}_total']:.0f}" for k in range(args["ttt_steps"])]
    print(f"{folder.name}: loss {numbers['loss']:.6f} (eager {numbers['loss_eager']:.6f}), right given right so far {acc}, "
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to write (default: all), or folders with --check")
    parser.add_argument("--check", action="store_true", help="re-run folders instead of writing them")
    opt = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if opt.check:
        sys.exit(max(check(Path(f).resolve()) for f in opt.names) > 1e-5)
    FIXTURES.mkdir(exist_ok=True)
    for arch in CONFIGS:
        write_verifier(FIXTURES, arch)
    os.chdir(FIXTURES)                                                       # configurations name their verifier by its folder
    for name in opt.names or CASES:
        write_case(name, CASES[name], FIXTURES)
