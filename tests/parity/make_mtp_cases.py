"""Record what the upstream library `speculators` 0.9.0 computes for MTP, case by case.

Runs only in an environment that holds upstream (see README.md beside the fixtures); our package is not imported.

    python tests/parity/make_mtp_cases.py                    # write every case into tests/fixtures/
    python tests/parity/make_mtp_cases.py qwen3_padding_4    # one of them
    python tests/parity/make_mtp_cases.py --check tests/fixtures/mtp tests/fixtures/mtp_*
    python tests/parity/make_mtp_cases.py --loss FOLDER VERIFIER CASE   # upstream's loss of any checkpoint on a recorded batch

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
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.data import shift_batch_mtp
from speculators.train.data import CollateFn
from transformers import AutoConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SEED = 9753
HIDDEN, VOCAB, LAYERS, HEADS, KV, HEAD_DIM = 32, 256, 4, 4, 2, 8
SHAPE = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=HEAD_DIM,
             intermediate_size=64, max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False,
             bos_token_id=0, eos_token_id=1)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
TEXT = {k: v for k, v in SHAPE.items() if k != "intermediate_size"}


def verifier_config(arch):
    """Hybrid families alternate linear and full attention; their MTP head has full attention, gated, with a quarter of each head rotated."""
    hybrid = dict(layer_types=["linear_attention", "full_attention"] * 2, **LINEAR)
    rope = dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5)
    if arch == "qwen3":
        return Qwen3Config(**SHAPE), "Qwen3ForCausalLM"
    if arch == "qwen3_next":
        return Qwen3NextConfig(**SHAPE, **MOE, **hybrid, rope_parameters=rope), "Qwen3NextForCausalLM"
    mrope = rope | dict(mrope_section=[1, 1, 0], mrope_interleaved=True)
    if arch == "qwen3_5":
        return Qwen3_5TextConfig(**SHAPE, **hybrid, rope_parameters=mrope), "Qwen3_5ForCausalLM"
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=HIDDEN, num_position_embeddings=16)
    text = dict(TEXT, **MOE, **hybrid, rope_parameters=mrope)
    return Qwen3_5MoeConfig(text_config=text, vision_config=vision), "Qwen3_5MoeForConditionalGeneration"


# What differs from case to case. `documents` are lengths; `loss` is "tail" (the first quarter of each document is masked out) or "random" (holes anywhere).
CASES = {
    "qwen3_padding_4": dict(note="four steps, beta 0.8, five padding rows", verifier="qwen3", documents=[11, 8, 16], padding=5, steps=4, beta=0.8),
    "qwen3_holes_2": dict(note="two steps; loss mask with holes; documents of one, two and three rows", verifier="qwen3", documents=[12, 1, 2, 3, 14], steps=2, loss="random"),
    "qwen3_next_moe": dict(note="gated attention, half of each head rotated, experts stored one by one in a sharded checkpoint", verifier="qwen3_next", documents=[13, 9, 14]),
    "qwen3_5_dense": dict(note="text-only Qwen3.5 with a dense MLP, five steps", verifier="qwen3_5", documents=[10, 17, 9], steps=5, beta=0.5),
    "qwen3_5_moe": dict(note="multimodal Qwen3.5, fused experts, three padding rows", verifier="qwen3_5_moe", documents=[15, 12], padding=3, loss="random"),
}


def generator(offset):
    return torch.Generator().manual_seed(SEED + offset)


def mtp_tensors(arch, g):
    """A native MTP head. Norms that store their offset from one are drawn around zero, so that nothing hides in an identity."""
    unit = 0.0 if arch != "qwen3" else 1.0
    gated = 1 if arch == "qwen3" else 2

    def w(*shape, std=0.2):
        return std * torch.randn(*shape, generator=g)

    attn = {"q_proj": w(gated * HEADS * HEAD_DIM, HIDDEN), "k_proj": w(KV * HEAD_DIM, HIDDEN), "v_proj": w(KV * HEAD_DIM, HIDDEN),
            "o_proj": w(HIDDEN, HEADS * HEAD_DIM), "q_norm": unit + w(HEAD_DIM), "k_norm": unit + w(HEAD_DIM)}
    layer = {f"self_attn.{k}.weight": v for k, v in attn.items()}
    layer |= {f"{n}_layernorm.weight": unit + w(HIDDEN) for n in ("input", "post_attention")}

    def mlp(prefix, size):
        return {f"{prefix}.{n}_proj.weight": w(*(HIDDEN, size) if n == "down" else (size, HIDDEN)) for n in ("gate", "up", "down")}

    if arch in ("qwen3", "qwen3_5"):
        layer |= mlp("mlp", SHAPE["intermediate_size"])
    else:
        n, size = MOE["num_experts"], MOE["moe_intermediate_size"]
        layer |= {"mlp.gate.weight": w(n, HIDDEN, std=0.7), "mlp.shared_expert_gate.weight": w(1, HIDDEN)} | mlp("mlp.shared_expert", MOE["shared_expert_intermediate_size"])
        if arch == "qwen3_next":
            for i in range(n):
                layer |= mlp(f"mlp.experts.{i}", size)
        else:
            layer |= {"mlp.experts.gate_up_proj": w(n, 2 * size, HIDDEN), "mlp.experts.down_proj": w(n, HIDDEN, size)}
    return {f"mtp.layers.0.{k}": v for k, v in layer.items()} | {
        "mtp.fc.weight": w(HIDDEN, 2 * HIDDEN), "mtp.norm.weight": unit + w(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": unit + w(HIDDEN), "mtp.pre_fc_norm_embedding.weight": unit + w(HIDDEN)}


def write_verifier(root, arch, offset):
    """A verifier's folder with the tensors that an MTP draft reads from it; that of qwen3_next in two shards, its MTP head across both."""
    folder = root / f"mtp_verifier_{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    config, name = verifier_config(arch)
    config.architectures = [name]
    (folder / "config.json").write_text(json.dumps(config.to_dict() if arch == "qwen3_5_moe" else config.to_diff_dict(), indent=1, sort_keys=True) + "\n")
    g = generator(offset)
    stem = "model.language_model" if arch == "qwen3_5_moe" else "model"
    tensors = {f"{stem}.embed_tokens.weight": 0.3 * torch.randn(VOCAB, HIDDEN, generator=g),
               f"{stem}.norm.weight": (1 if arch == "qwen3" else 0) + 0.1 * torch.randn(HIDDEN, generator=g),
               "lm_head.weight": 0.5 * torch.randn(VOCAB, HIDDEN, generator=g)} | mtp_tensors(arch, g)
    if arch != "qwen3_next":
        return save_file(tensors, folder / "model.safetensors")
    names, files = sorted(tensors), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    home = {n: files[i >= len(names) // 2] for i, n in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if home[n] == file}, folder / file)
    size = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata=dict(total_size=size), weight_map=home), indent=1) + "\n")


def text_config(config):
    return getattr(config, "text_config", None) or config


def build_model(case):
    """The draft as upstream's training makes it: the head is the verifier's own."""
    name = f"mtp_verifier_{case['verifier']}"
    args = dict(num_speculative_steps=case.get("steps", 3), step_weight_beta=case.get("beta", 0.6), verifier_name_or_path=name)
    return MTPDraftModel.from_training_args(text_config(AutoConfig.from_pretrained(name)), **args), args


def make_batch(case, seed):
    """One packed row, built by upstream's collate."""
    g, samples = generator(seed), []
    for n in case["documents"]:
        mask = (torch.rand(n, generator=g) < 0.6) if case.get("loss") == "random" else torch.arange(n) >= n // 4
        samples.append(dict(
            input_ids=torch.randint(VOCAB, (n,), generator=g), hidden_states=torch.zeros(n, HIDDEN), loss_mask=mask, lengths=torch.tensor([n]),
            verifier_last_hidden_states=torch.randn(n, HIDDEN, generator=g), position_ids=torch.arange(n)))
    batch = CollateFn(sum(case["documents"]) + case.get("padding", 0), HIDDEN, 1, torch.float32, shift_batch_mtp)(samples)
    return {k: v for k, v in batch.items() if torch.is_tensor(v) and k not in ("error_records", "lengths")}


def plant_agreement(model, batch, call, seed):
    """Let some tokens be what the draft says, so that accuracies are neither 0 nor 1."""
    g = generator(seed + 1)
    for _ in range(2):
        logits, _, _ = model(**batch, **call)
        for s, z in enumerate(logits):
            for t in range(s, z.shape[1], 5):
                if torch.rand((), generator=g) < 0.7:
                    batch["input_ids"][0, t + 2 + s] = z[0, t].argmax()


def record(model, batch, call):
    """Everything that a fixture holds: (outputs, gradients, numbers)."""
    model.zero_grad(set_to_none=True)
    logits, loss, metrics = model(**batch, **call)
    loss.backward()
    grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    outputs = {"loss": loss.detach().reshape(1)} | {f"returned.{k}": t.detach() for k, t in enumerate(logits)}
    numbers = dict(
        algorithm="mtp", loss=loss.item(), metrics={k: float(v) for k, v in metrics.items()},
        grad_norms={n: t.norm().item() for n, t in grads.items()}, total_grad_norm=torch.cat([t.flatten() for t in grads.values()]).norm().item(),
        trainable_without_grad=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None],
        frozen=[n for n, p in model.named_parameters() if not p.requires_grad])
    return outputs, grads, numbers


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
    config = MTPSpeculatorConfig.from_pretrained(folder / "saved_pretrained")
    config.transformer_layer_config._attn_implementation = attn
    model = MTPDraftModel(config=config)
    missing, extra = model.load_state_dict(load_file(folder / "state_dict.safetensors"), strict=False)
    assert set(missing) <= {"verifier_lm_head.weight"} and not extra, (missing, extra)
    del model.verifier_lm_head
    return model, json.loads((folder / "outputs.json").read_text())["call_kwargs"]


def write_case(name, case, root):
    seed = 100 * (1 + list(CASES).index(name))
    model, args = build_model(case)
    call = MTPDraftModel.get_trainer_kwargs(**args)[0]
    batch = make_batch(case, seed)
    plant_agreement(model, batch, call, seed)
    folder = root / f"mtp_{name}"
    (folder / "saved_pretrained").mkdir(parents=True, exist_ok=True)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    outputs, grads, numbers = record(model, batch, call)
    for file, tensors in dict(state_dict=state, inputs=batch, outputs=outputs, grads=grads).items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{file}.safetensors")
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        keys = sorted(load_file(Path(tmp) / "model.safetensors"))
        config = (Path(tmp) / "config.json").read_text()
    (folder / "saved_pretrained" / "config.json").write_text(config.rstrip() + "\n")
    (folder / "saved_pretrained_keys.json").write_text(json.dumps(keys, indent=1) + "\n")
    numbers |= dict(training_args=args, call_kwargs=call, case=case)
    path = folder / "outputs.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    other, _, eager = record(restore(folder, "eager")[0], batch, call)
    numbers |= dict(loss_eager=eager["loss"], grad_norm_rel_diff_eager=abs(eager["total_grad_norm"] / numbers["total_grad_norm"] - 1),
                    logits_max_abs_diff_eager=max((other[k] - outputs[k]).abs().max().item() for k in outputs if k.startswith("returned")),
                    adamw_5_steps_loss_gradnorm=five_steps(restore(folder, "sdpa")[0], batch, call))
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"{folder.name}: loss {numbers['loss']:.6f} (eager {numbers['loss_eager']:.6f}), logits differ by {numbers['logits_max_abs_diff_eager']:.1e}, "
          f"{sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) / 1024:.0f} KiB")


def check(folder):
    """Largest absolute differences between a folder and a fresh run of it."""
    model, call = restore(folder, "sdpa")
    batch = load_file(folder / "inputs.safetensors")
    outputs, grads, numbers = record(model, batch, call)
    stored, want = load_file(folder / "outputs.safetensors"), json.loads((folder / "outputs.json").read_text())
    kept = load_file(folder / "grads.safetensors")
    diff = dict(loss=abs(numbers["loss"] - want["loss"]), outputs=max((outputs[k].double() - stored[k].double()).abs().max().item() for k in outputs),
                grads=max((grads[k] - kept[k]).abs().max().item() for k in kept),
                metrics=max(abs(numbers["metrics"][k] - v) for k, v in want["metrics"].items()),
                steps=(torch.tensor(five_steps(model, batch, call)) - torch.tensor(want["adamw_5_steps_loss_gradnorm"])).abs().max().item())
    print(folder.name, {k: float(f"{v:.2g}") for k, v in diff.items()})
    return max(diff.values())


def loss_of(folder, verifier, case):
    """Upstream's loss of a checkpoint, loaded as upstream loads one, on a recorded batch."""
    config = MTPSpeculatorConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(verifier)
    model = MTPDraftModel.from_pretrained(folder, config=config)
    with torch.no_grad():
        call = json.loads((case / "outputs.json").read_text())["call_kwargs"]
        _, loss, metrics = model(**load_file(case / "inputs.safetensors"), **call)
    print(json.dumps(dict(loss=loss.item(), metrics={k: float(v) for k, v in metrics.items()})))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases to write (default: all), or folders with --check")
    parser.add_argument("--check", action="store_true", help="re-run folders instead of writing them")
    parser.add_argument("--loss", nargs=3, metavar=("FOLDER", "VERIFIER", "CASE"), help="print upstream's loss of a checkpoint on a case's batch")
    opt = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if opt.loss:
        loss_of(*(Path(p).resolve() for p in opt.loss))
        sys.exit()
    if opt.check:
        sys.exit(max(check(Path(f).resolve()) for f in opt.names) > 1e-5)
    os.chdir(FIXTURES)                                                       # configurations name their verifier by its folder
    for i, arch in enumerate(("qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe")):
        write_verifier(FIXTURES, arch, i)
    for name in opt.names or CASES:
        write_case(name, CASES[name], FIXTURES)
