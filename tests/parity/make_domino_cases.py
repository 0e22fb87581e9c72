"""What SpecForge's Domino makes of the cases of tests/specforge_domino.py: `python tests/parity/make_domino_cases.py
PATH` writes tests/fixtures/specforge_domino.safetensors again, PATH being a checkout of
https://github.com/sgl-project/SpecForge (recorded at a6b6b0230009). Its three modules run on a CPU in float32, without
the rest of the package: loss, gradients, five steps of AdamW, and the tokens that it drafts."""

import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1]))
from specforge_domino import (
    CASES,
    FIXTURE,
    GRADIENTS_AT,
    MASK_TOKEN,
    STEPS,
    TOTAL_STEPS,
    H,
    V,
    drawn_batch,
    drawn_weights,
    layer_fields,
)


def specforge(path):
    "Its modules, without those that they do not need."
    for name in ("", ".core", ".modeling", ".modeling.draft", ".algorithms", ".algorithms.common", ".training"):
        package = sys.modules[f"specforge{name}"] = types.ModuleType(f"specforge{name}")
        package.__path__ = [str(Path(path, "specforge", *name.split(".")[1:]))]
    utils = sys.modules["specforge.utils"] = types.ModuleType("specforge.utils")
    utils.get_device_type = lambda: "cpu"
    from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
    from specforge.modeling.draft.domino import DominoDraftModel

    return DominoDraftModel, OnlineDominoModel


def base_weight(step, case):
    "SpecForge's schedule (`linear_lambda_base` of its training/strategies/base.py)."
    decay_steps = max(1, int(TOTAL_STEPS * case.decay_ratio))
    return case.lambda_start * max(0.0, 1 - step / decay_steps)


def record(name, drafter_class, trainer_class):
    "Results by name."
    case, batch = CASES[name], drawn_batch(name)
    heads = {n: getattr(case, n) for n in ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")}
    reads = dict(target_layer_ids=list(range(case.features)), mask_token_id=MASK_TOKEN, projector_type="domino")
    config = Qwen3Config(
        **layer_fields(case), block_size=case.block_size, num_target_layers=8, dflash_config=heads | reads
    )
    config._attn_implementation = "eager"
    drafter = drafter_class(config)
    shapes = {n: tuple(p.shape) for n, p in drafter.named_parameters()}
    weights = drawn_weights(name, shapes | {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)})
    embedding = nn.Embedding(V, H, _weight=weights.pop("embed_tokens.weight")).requires_grad_(False)
    head = nn.Linear(H, V, bias=False).requires_grad_(False)
    head.weight.copy_(weights.pop("lm_head.weight"))
    drafter.load_state_dict(weights, strict=True)
    model = trainer_class(
        drafter,
        head,
        embedding,
        mask_token_id=MASK_TOKEN,
        block_size=case.block_size,
        attention_backend="eager",
        num_anchors=case.anchors,
        loss_decay_gamma=case.loss_decay_gamma,
        shift_label=case.shift_label,
    )
    anchors = batch.pop("anchors")
    model._sample_anchor_positions = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    target = types.SimpleNamespace(lm_head=head, model=types.SimpleNamespace(embed_tokens=embedding))
    with torch.no_grad():
        _, _, hidden = model._forward_draft_blocks(**batch)
        hidden = hidden.unflatten(1, (-1, case.block_size)).flatten(0, 1)
        block = torch.full(hidden.shape[:2], MASK_TOKEN)
        block[:, 0] = batch["input_ids"].gather(1, anchors).flatten()
        results = {"drafted": drafter._sample_draft_tokens(target, hidden, block).contiguous()}
    model(**batch, lambda_base=base_weight(GRADIENTS_AT, case))[0].backward()
    results |= {f"grad.{n}": p.grad.clone() for n, p in drafter.named_parameters()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _, metrics = model(**batch, lambda_base=base_weight(step, case))
        loss.backward()
        losses.append(torch.stack([loss.detach(), metrics["final_loss"], metrics["base_loss"]]))
        optimizer.step()
    return results | {"losses": torch.stack(losses)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    classes = specforge(sys.argv[1])
    found = {f"{name}/{key}": tensor for name in CASES for key, tensor in record(name, *classes).items()}
    save_file(found, FIXTURE)
    print(f"{FIXTURE}: {len(CASES)} cases, {FIXTURE.stat().st_size:,} bytes")
