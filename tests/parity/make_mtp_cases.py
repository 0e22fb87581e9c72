"""Record what the upstream library `speculators` 0.9.0 computes for MTP, case by case; `record.py` says how."""

import json

import record
import torch
from record import FIXTURES, HIDDEN, LAYERS, VOCAB, Recorder, packed
from safetensors.torch import load_file, save_file
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.data import shift_batch_mtp
from transformers import AutoConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

SEED = 9753
HEADS, KV, HEAD_DIM = 4, 2, 8
SHAPE = record.SHAPE | dict(num_hidden_layers=LAYERS, bos_token_id=0, eos_token_id=1)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
TEXT = {k: v for k, v in SHAPE.items() if k != "intermediate_size"}


def verifier_config(arch):
    """Hybrid families alternate linear and full attention; their MTP head has full attention, gated, with a quarter of
    each head rotated."""
    hybrid = dict(layer_types=["linear_attention", "full_attention"] * 2, **LINEAR)
    rope = dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5)
    if arch == "qwen3":
        return Qwen3Config(**SHAPE), "Qwen3ForCausalLM"
    if arch == "qwen3_next":
        return Qwen3NextConfig(**SHAPE, **MOE, **hybrid, rope_parameters=rope), "Qwen3NextForCausalLM"
    mrope = rope | dict(mrope_section=[1, 1, 0], mrope_interleaved=True)
    if arch == "qwen3_5":
        return Qwen3_5TextConfig(**SHAPE, **hybrid, rope_parameters=mrope), "Qwen3_5ForCausalLM"
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=HIDDEN, num_position_embeddings=16
    )
    text = dict(TEXT, **MOE, **hybrid, rope_parameters=mrope)
    return Qwen3_5MoeConfig(text_config=text, vision_config=vision), "Qwen3_5MoeForConditionalGeneration"


# What differs from case to case. `documents` are lengths; `loss` is "tail" (the first quarter of each document is
# masked out) or "random" (holes anywhere).
CASES = {
    "qwen3_padding_4": dict(
        note="four steps, beta 0.8, five padding rows",
        verifier="qwen3",
        documents=[11, 8, 16],
        padding=5,
        steps=4,
        beta=0.8,
    ),
    "qwen3_holes_2": dict(
        note="two steps; loss mask with holes; documents of one, two and three rows",
        verifier="qwen3",
        documents=[12, 1, 2, 3, 14],
        steps=2,
        loss="random",
    ),
    "qwen3_next_moe": dict(
        note="gated attention, half of each head rotated, experts stored one by one in a sharded checkpoint",
        verifier="qwen3_next",
        documents=[13, 9, 14],
    ),
    "qwen3_5_dense": dict(
        note="text-only Qwen3.5 with a dense MLP, five steps",
        verifier="qwen3_5",
        documents=[10, 17, 9],
        steps=5,
        beta=0.5,
    ),
    "qwen3_5_moe": dict(
        note="multimodal Qwen3.5, fused experts, three padding rows",
        verifier="qwen3_5_moe",
        documents=[15, 12],
        padding=3,
        loss="random",
    ),
}


def mtp_tensors(arch, g):
    """A native MTP head. Norms that store their offset from one are drawn around zero, so that nothing hides in an
    identity."""
    unit = 0.0 if arch != "qwen3" else 1.0
    gated = 1 if arch == "qwen3" else 2

    def w(*shape, std=0.2):
        return std * torch.randn(*shape, generator=g)

    attn = {
        "q_proj": w(gated * HEADS * HEAD_DIM, HIDDEN),
        "k_proj": w(KV * HEAD_DIM, HIDDEN),
        "v_proj": w(KV * HEAD_DIM, HIDDEN),
        "o_proj": w(HIDDEN, HEADS * HEAD_DIM),
        "q_norm": unit + w(HEAD_DIM),
        "k_norm": unit + w(HEAD_DIM),
    }
    layer = {f"self_attn.{k}.weight": v for k, v in attn.items()}
    layer |= {f"{n}_layernorm.weight": unit + w(HIDDEN) for n in ("input", "post_attention")}

    def mlp(prefix, size):
        return {
            f"{prefix}.{n}_proj.weight": w(*(HIDDEN, size) if n == "down" else (size, HIDDEN))
            for n in ("gate", "up", "down")
        }

    if arch in ("qwen3", "qwen3_5"):
        layer |= mlp("mlp", SHAPE["intermediate_size"])
    else:
        n, size = MOE["num_experts"], MOE["moe_intermediate_size"]
        layer |= {"mlp.gate.weight": w(n, HIDDEN, std=0.7), "mlp.shared_expert_gate.weight": w(1, HIDDEN)} | mlp(
            "mlp.shared_expert", MOE["shared_expert_intermediate_size"]
        )
        if arch == "qwen3_next":
            for i in range(n):
                layer |= mlp(f"mlp.experts.{i}", size)
        else:
            layer |= {"mlp.experts.gate_up_proj": w(n, 2 * size, HIDDEN), "mlp.experts.down_proj": w(n, HIDDEN, size)}
    return {f"mtp.layers.0.{k}": v for k, v in layer.items()} | {
        "mtp.fc.weight": w(HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": unit + w(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": unit + w(HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": unit + w(HIDDEN),
    }


def write_verifier(arch, g):
    """A verifier's folder with the tensors that an MTP draft reads from it; that of qwen3_next in two shards, its MTP
    head across both."""
    folder = FIXTURES / f"mtp_verifier_{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    config, name = verifier_config(arch)
    config.architectures = [name]
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() if arch == "qwen3_5_moe" else config.to_diff_dict(), indent=1, sort_keys=True)
        + "\n"
    )
    stem = "model.language_model" if arch == "qwen3_5_moe" else "model"
    tensors = {
        f"{stem}.embed_tokens.weight": 0.3 * torch.randn(VOCAB, HIDDEN, generator=g),
        f"{stem}.norm.weight": (1 if arch == "qwen3" else 0) + 0.1 * torch.randn(HIDDEN, generator=g),
        "lm_head.weight": 0.5 * torch.randn(VOCAB, HIDDEN, generator=g),
    } | mtp_tensors(arch, g)
    if arch != "qwen3_next":
        return save_file(tensors, folder / "model.safetensors")
    names, files = sorted(tensors), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    home = {n: files[i >= len(names) // 2] for i, n in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if home[n] == file}, folder / file)
    size = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(dict(metadata=dict(total_size=size), weight_map=home), indent=1) + "\n"
    )


class MTP(Recorder):
    name, model, config, cases, seed, logits = "mtp", MTPDraftModel, MTPSpeculatorConfig, CASES, SEED, "returned"

    def write_verifiers(self):
        for i, arch in enumerate(("qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe")):
            write_verifier(arch, self.generator(i))

    def build(self, case, seed):
        """The head is the verifier's own, and not moved."""
        name = f"mtp_verifier_{case['verifier']}"
        config = AutoConfig.from_pretrained(name)
        args = dict(
            num_speculative_steps=case.get("steps", 3),
            step_weight_beta=case.get("beta", 0.6),
            verifier_name_or_path=name,
        )
        return MTPDraftModel.from_training_args(getattr(config, "text_config", None) or config, **args), args

    def restore(self, folder, attn):
        model = MTPDraftModel(config=self.saved_config(folder, attn))
        missing, extra = model.load_state_dict(load_file(folder / "state_dict.safetensors"), strict=False)
        assert set(missing) <= {"verifier_lm_head.weight"} and not extra, (missing, extra)
        del model.verifier_lm_head
        return model, json.loads((folder / "outputs.json").read_text())["call_kwargs"]

    def batch(self, model, case, args, call, seed):
        """Some tokens are what the draft says."""
        g, holes, samples = self.generator(seed), case.get("loss") == "random", []
        for n in case["documents"]:  # random numbers in another order than the others'
            mask = (torch.rand(n, generator=g) < 0.6) if holes else torch.arange(n) >= n // 4
            samples.append(
                dict(
                    input_ids=torch.randint(VOCAB, (n,), generator=g),
                    hidden_states=torch.zeros(n, HIDDEN),
                    loss_mask=mask,
                    lengths=torch.tensor([n]),
                    verifier_last_hidden_states=torch.randn(n, HIDDEN, generator=g),
                    position_ids=torch.arange(n),
                )
            )
        batch, g = packed(case, samples, 1, shift_batch_mtp), self.generator(seed + 1)
        batch = {k: v for k, v in batch.items() if torch.is_tensor(v) and k != "lengths"}
        for _ in range(2):
            for s, z in enumerate(model(**batch, **call)[0]):
                for t in range(s, z.shape[1], 5):
                    if torch.rand((), generator=g) < 0.7:
                        batch["input_ids"][0, t + 2 + s] = z[0, t].argmax()
        return batch

    def run(self, model, batch, call):
        logits, loss, metrics = model(**batch, **call)
        return dict(loss=loss, metrics=metrics, outputs={f"returned.{k}": t.detach() for k, t in enumerate(logits)})

    def plain(self, call):
        return call

    def line(self, numbers, batch):
        return f"{len(numbers['grad_norms'])} gradients"


if __name__ == "__main__":
    MTP().main()
