"""What NVIDIA ModelOpt's LiLiCorr makes of the cases of tests/modelopt_lilicorr.py: `python
tests/parity/make_lilicorr_cases.py PATH` writes tests/fixtures/modelopt_lilicorr.safetensors again, PATH being a
checkout of https://github.com/NVIDIA/Model-Optimizer that has it. Recorded with a copy by hand of the LiLiCorr of
33d8c76d and 0e4754aa, without comments, checks and most metrics, beside the DFlash of nvidia-modelopt 0.47, the newest
release, which has no LiLiCorr. Its modules run on a CPU in float32, without the rest of the package: loss, gradients,
steps of AdamW, and the path that it selects."""

import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[1]))
from modelopt_lilicorr import (
    CASES,
    EPS,
    FIXTURE,
    LAYER,
    MASK_TOKEN,
    STEPS,
    H,
    V,
    drawn_batch,
    drawn_weights,
    head_fields,
)

from speculators_nb.models.formats_dflash import named_mlps


def modelopt(path):
    "Its two modules, without those that they do not need."
    for name in ("", ".torch", ".torch.speculative", ".torch.speculative.plugins", ".torch.speculative.dflash"):
        package = sys.modules[f"modelopt{name}"] = types.ModuleType(f"modelopt{name}")
        package.__path__ = [str(Path(path, "modelopt", *name.split(".")[1:]))]
    registry = types.SimpleNamespace(register=lambda _: lambda cls: cls)
    stubs = {
        "dflash.conversion": dict(DFlashDMRegistry=registry, LiLiCorrDMRegistry=registry),
        "dflash.dflash_model": dict(DFlashModel=nn.Module),
    }
    for name, values in stubs.items():
        module = sys.modules[f"modelopt.torch.speculative.{name}"] = types.ModuleType(name)
        vars(module).update(values)
    from modelopt.torch.speculative.plugins.hf_dflash import HFDFlashModel
    from modelopt.torch.speculative.plugins.hf_lilicorr import HFLiLiCorrModel
    from modelopt.torch.speculative.plugins.modeling_lilicorr import LiLiCorrModule

    of_dflash = HFDFlashModel._compute_loss
    # the DFlash of 0.47 has no argument for what the base model gave; it is read for distillation alone
    HFDFlashModel._compute_loss = lambda self, *args, base_outputs=None: of_dflash(self, *args)
    return HFLiLiCorrModel, LiLiCorrModule


def trainer_of(case, model_class, module_class, embedding):
    "Its training model around a fresh drafter."
    config = Qwen3Config(
        **LAYER,
        num_hidden_layers=case.num_hidden_layers,
        block_size=case.block_size,
        target_layer_ids=list(range(case.features)),
        **head_fields(case),
    )
    config._attn_implementation = "sdpa"

    class Model(model_class):
        _base_model_embeddings = embedding

    model = Model.__new__(Model)
    nn.Module.__init__(model)
    model.dflash_module = module_class(config)
    model.dflash_module.rotary_emb = Qwen3RotaryEmbedding(config)  # its own call is of older transformers
    fields = dict(
        block_size=case.block_size,
        loss_objective="decay",
        loss_decay_factor=case.loss_decay_factor,
        self_logit_distillation=False,
        draft_attention="causal" if case.causal else "bidirectional",
        lilicorr_w_ce=case.w_ce,
        lilicorr_w_margin=case.w_margin,
        lilicorr_w_pen=case.w_pen,
        lilicorr_margin=case.margin,
    )
    for name, value in fields.items():
        setattr(model, f"dflash_{name}", value)
    model.mask_token_id = MASK_TOKEN
    return model


def record(name, *classes):
    "Results by name."
    case, batch = CASES[name], drawn_batch(name)
    embedding, head = nn.Embedding(V, H).requires_grad_(False), nn.Linear(H, V, bias=False).requires_grad_(False)
    model = trainer_of(case, *classes, embedding)
    drafter = model.dflash_module
    shapes = {named_mlps(n): tuple(p.shape) for n, p in drafter.named_parameters()}
    borrowed = {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H), "target_head.norm.weight": (H,)}
    weights = drawn_weights(name, shapes | borrowed)
    embedding.weight.copy_(weights["embed_tokens.weight"])
    head.weight.copy_(weights["lm_head.weight"])
    drafter.load_state_dict({n: weights[named_mlps(n)] for n, _ in drafter.named_parameters()}, strict=False)
    ids, anchors, mask, target = (batch[n] for n in ("input_ids", "anchors", "loss_mask", "hidden_states"))
    keep, blocks = torch.ones_like(anchors, dtype=torch.bool), anchors.shape[1]
    normed = F.rms_norm(batch["last_hidden"], (H,), weights["target_head.norm.weight"], EPS)
    outputs = types.SimpleNamespace(target_hidden=target, logits=head(normed))

    def step():
        hidden = drafter(
            noise_embedding=model._build_noise_embedding(ids, anchors, keep, blocks),
            target_hidden=target,
            position_ids=model._build_position_ids(ids.shape[1], anchors, ids.device),
            attention_mask=model._build_draft_attention_mask(
                ids.shape[1], anchors, keep, blocks, target.dtype, ids.device, window=case.window
            ),
        )
        return model._compute_loss(head(hidden), ids, anchors, keep, mask, draft_hidden=hidden, base_outputs=outputs)[0]

    step().backward()
    found = model._lilicorr_metrics
    results = {"path": found["selected_ids"], "supervised": found["supervised"]}
    results |= {f"grad.{named_mlps(n)}": p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step()
        loss.backward()
        found = model._lilicorr_metrics
        parts = ("origin_loss", "lilicorr_ce", "lilicorr_margin", "lilicorr_penalty")
        losses.append(torch.stack([loss, *(found[part] for part in parts)]).detach())
        optimizer.step()
    return results | {"losses": torch.stack(losses)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    classes = modelopt(sys.argv[1])
    found = {f"{name}/{key}": tensor for name in CASES for key, tensor in record(name, *classes).items()}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, FIXTURE)
    print(f"{FIXTURE}: {len(CASES)} cases, {FIXTURE.stat().st_size:,} bytes")
    for name in CASES:
        print(name, int(found[f"{name}/supervised"]), found[f"{name}/losses"][0].tolist())
