"""Our models against upstream's recorded numbers: loss, metrics, gradients, five optimizer steps, and what a checkpoint
holds."""

import json

import pytest
import torch
from by_day import by_day
from recorded import cases, load_case
from safetensors.torch import load_file

from speculators_nb.core.options import algorithms

CASES = sorted({name for algorithm in algorithms() for name in cases(algorithm)})
# one of each algorithm by day: loss and gradients of all cases are compared by `test_upstream`
FIRST = {min(cases(algorithm), default=None) for algorithm in algorithms()}


@pytest.mark.statement("models-45")
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_upstream(name, lean):
    """Loss and metrics to 1e-5 relative, gradients to 1e-3 relative per tensor norm: the noise between upstream's own
    attention back ends is 1e-6. DSpark's `confidence_cumprod_bias` is a difference of sums that nearly cancel, so it
    gets 1e-5 of those sums."""
    model, batch, kwargs, info, folder = load_case(name)
    if lean and name.startswith("mtp"):  # as upstream has it: positions tell the documents apart
        batch.pop("document_ids")
    model.train()
    _, loss, metrics = model(**batch, **kwargs, cross_document_targets=True, lean=lean)
    assert loss.item() == pytest.approx(info["loss"], rel=1e-5)
    assert metrics.keys() >= info["metrics"].keys()
    for key, value in info["metrics"].items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-5, abs=1e-4 if "cumprod_bias" in key else 0), key
    loss.backward()
    want = load_file(folder / "grads.safetensors")
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    # without a block the lean pass reaches no parameter of the context: no gradient where upstream has zeros
    got |= {n: torch.zeros_like(g) for n, g in want.items() if n not in got and not g.any()}
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        assert (got[key] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5, key


@pytest.mark.parametrize("name", by_day(CASES, FIRST))
def test_five_adamw_steps(name):
    "The recorded optimisation, step by step: [loss before, gradient norm before clipping]."
    model, batch, kwargs, info, _ = load_case(name)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    for loss_want, norm_want in info["adamw_5_steps_loss_gradnorm"]:
        opt.zero_grad()
        _, loss, _ = model(**batch, **kwargs, cross_document_targets=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert (loss.item(), norm.item()) == (pytest.approx(loss_want, rel=1e-4), pytest.approx(norm_want, rel=1e-3))
        opt.step()


def said_once(config):
    "rope_parameters count; the partial_rotary_factor that transformers before 5.20.2 writes beside them does not."
    config = {k: said_once(v) if isinstance(v, dict) else v for k, v in config.items()}
    beside = "partial_rotary_factor" in (config.get("rope_parameters") or {})
    return {k: v for k, v in config.items() if not (beside and k == "partial_rotary_factor")}


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_is_upstreams(name, tmp_path):
    """The same tensors under the same names (a head and its mapping only for a reduced vocabulary), the same config
    keys and values, but for the entry that vLLM's EAGLE-3 needs and upstream leaves out."""
    model, _, _, _, folder = load_case(name)
    model.save_pretrained(tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == json.loads(
        (folder / "saved_pretrained_keys.json").read_text()
    )
    want, got = (json.loads((d / "config.json").read_text()) for d in (folder / "saved_pretrained", tmp_path))
    if name.startswith(("eagle3", "peagle")):
        assert got["transformer_layer_config"].pop("num_aux_hidden_states") == len(
            want["eagle_aux_hidden_state_layer_ids"]
        )
    documented = {}  # fields of the documentation that 0.9.0 does not write
    if "block_size" in want:
        documented = {"max_anchors": 512}
    elif name.startswith("peagle"):
        documented = {"num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
    assert {key: got.pop(key) for key in documented} == documented
    for key in ("auto_map", "transformers_version"):
        want.pop(key, None), got.pop(key, None)
    assert said_once(got) == said_once(want)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
