"""Medusa against a plain re-derivation: Python loops over positions and heads, float64, from the formulas of
2401.10774."""

import json

import pytest
import torch
from safetensors.torch import load_file
from token_heads import LAYERS, H, V, layer, row, write_verifier

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.medusa import MedusaModel, MedusaSpeculatorConfig
from speculators_nb.serve.vllm_contract import check_vllm_contract
from speculators_nb.verifier.tapped_model import Verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def fresh(verifier, heads=3, **options):
    return MedusaModel.from_training_args(layer(), verifier_name_or_path=str(verifier), num_heads=heads, **options)


def moved(model, seed=0, scale=0.3):
    "As after some training: every head another one."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(scale * torch.randn(p.shape, generator=g))
    return model


def plain_logits(w, state, k, depth, norm, eps=1e-6):
    "Logits of head k after one state h (before the verifier's final norm)."
    x = norm * state / torch.sqrt((state * state).mean() + eps)
    for j in range(depth):
        z = w[f"blocks.{k}.layers.{j}.weight"] @ x
        x = x + z / (1 + torch.exp(-z))
    return w[f"lm_heads.{k}.weight"] @ x


@pytest.mark.parametrize(
    "seed,heads,depth,decay,cross", [(0, 3, 1, None, False), (1, 5, 2, 1.0, False), (2, 2, 1, 0.5, True)]
)
def test_loss_gradients_tokens(verifier, seed, heads, depth, decay, cross):
    """Loss to 1e-6 relative, gradients to 1e-5 of their norm, float32 against float64; lean and dense alike. Without a
    word on it, head k weighs 0.8^(k+1)."""
    model, batch = moved(fresh(verifier, heads, num_hidden_layers=depth), seed).train(), row(seed)
    ids, docs, mask, states = (
        batch[k][0] for k in ("input_ids", "document_ids", "loss_mask", "verifier_last_hidden_states")
    )
    w = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    norm = model.target_head.norm.weight.double()
    want, means, right, counts, argmax = 0.0, [], [], [], []
    for k in range(heads):
        total, n, hits, best = torch.zeros((), dtype=torch.float64), 0, 0, []
        for t in range(len(ids)):
            logits, target = plain_logits(w, states[t].double(), k, depth, norm), t + k + 2
            best.append(logits.argmax().item())
            if target >= len(ids) or docs[t] < 0 or not mask[target] or (docs[target] != docs[t] and not cross):
                continue
            total = total + torch.logsumexp(logits, 0) - logits[ids[target]]
            n = n + 1
            hits = hits + int(best[-1] == ids[target])
        means.append(total / (n + 1e-5)), right.append(hits), counts.append(n), argmax.append(best)
        want = want + (0.8 if decay is None else decay) ** (k + 1) * means[-1]
    want.backward()
    kwargs, _ = MedusaModel.get_trainer_kwargs(head_loss_decay=decay, cross_document_targets=cross)
    for lean in (True, False):
        model.zero_grad()
        tokens, loss, metrics = model(**batch, **kwargs, lean=lean)
        loss.backward()
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        for k in range(heads):
            assert (metrics[f"loss_{k}_sum"] / metrics[f"loss_{k}_total"]).item() == pytest.approx(
                means[k].item(), rel=1e-5
            )
            assert (metrics[f"position_{k}_acc_sum"], metrics[f"position_{k}_acc_total"]) == (right[k], counts[k])
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert (p.grad - w[name].grad).norm() <= 1e-5 * w[name].grad.norm() + 1e-7, (name, lean)
    assert [x[0].tolist() for x in tokens] == argmax


def test_starts_as_the_verifiers_own_head(verifier):
    "Zero blocks and the verifier's head: every fresh head says the verifier's own logits."
    model, tapped = fresh(verifier), Verifier.from_pretrained(verifier, [LAYERS])
    out = tapped(torch.arange(10)[None])
    states = model.verifier_states(out.last_hidden_states[0])
    for hidden, head in zip(model.hidden_rows(states, None, [torch.arange(10)] * 3), model.head_weights()):
        torch.testing.assert_close(hidden @ head.T, out.logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_saved_loaded_and_native(verifier, tmp_path, bias):
    """Both formats hold the same tensors, under the names that vLLM's loader has; nothing of the verifier's is among
    them."""
    model = fresh(verifier, num_hidden_layers=2)
    if bias:
        model = moved(
            MedusaModel.for_verifier(MedusaSpeculatorConfig(**model.config.to_dict() | dict(medusa_fc_bias=True)))
        )
    model.save_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    model.save_native(tmp_path / "native", dtype=torch.bfloat16)
    ours, native = (load_file(tmp_path / d / "model.safetensors") for d in ("ours", "native"))
    shapes = {f"blocks.{k}.layers.{j}.weight": (H, H) for k in range(3) for j in range(2)} | {
        f"lm_heads.{k}.weight": (V, H) for k in range(3)
    }
    if bias:
        shapes |= {f"blocks.{k}.layers.{j}.bias": (H,) for k in range(3) for j in range(2)}
    assert {n: tuple(w.shape) for n, w in ours.items()} == shapes
    assert ours.keys() == native.keys() and all(torch.equal(ours[n], native[n]) for n in ours)
    config = json.loads((tmp_path / "native/config.json").read_text())
    assert config == dict(
        model_type="medusa",
        architectures=["MedusaModel"],
        hidden_size=H,
        vocab_size=V,
        num_heads=3,
        num_hidden_layers=2,
        medusa_fc_bias=bias,
        dtype="bfloat16",
    )
    again = SpeculatorModel.from_pretrained(tmp_path / "ours")
    assert (
        type(again) is MedusaModel
        and again.dtype == torch.bfloat16
        and again.config == model.config
        and again.drafter().aux_layer_ids == (LAYERS,)
    )
    assert all(torch.equal(w, again.state_dict()[n]) for n, w in ours.items())
    found = check_vllm_contract(tmp_path / "ours", "0.32")
    assert len(found) == 1 and "save_native" in found[0]
    assert "vLLM 0.33 does not serve method='medusa'" in check_vllm_contract(tmp_path / "ours", "0.33")[0]


def test_a_trained_head_is_kept(verifier, tmp_path):
    "Loading fills only what the checkpoint left out: the heads are its own, not the verifier's."
    model = moved(fresh(verifier))
    model.save_pretrained(tmp_path)
    again = SpeculatorModel.from_pretrained(tmp_path, verifier=verifier)
    assert torch.equal(again.lm_heads[1].weight, model.lm_heads[1].weight) and not torch.equal(
        again.lm_heads[1].weight, fresh(verifier).lm_heads[1].weight
    )


def test_drafting_is_what_was_trained(verifier):
    "One state, all places: the plain logits, whatever the tokens were; no more tokens than heads."
    model, g = moved(fresh(verifier)), torch.Generator().manual_seed(0)
    tokens, features = torch.randint(V, (6,), generator=g), torch.randn(5, H, generator=g)
    w, norm = {n: p.double() for n, p in model.state_dict().items()}, model.target_head.norm.weight.double()
    logits = torch.stack([plain_logits(w, features[-1].double(), k, 1, norm) for k in range(3)])
    tree = model.drafter().propose(tokens, features, 5, Sampling())
    assert tree.probs is None and tree.parents.tolist() == [-1, 0, 1] and torch.equal(tree.tokens, logits.argmax(-1))
    tree = model.drafter().propose(tokens[:2], features[-1:], 2, Sampling(0.7, g))
    torch.testing.assert_close(tree.probs.double(), (logits[:2] / 0.7).softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "change", [dict(num_heads=0), dict(num_hidden_layers=0), dict(vocab_size=0), dict(hidden_size=0)]
)
def test_bad_configs(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}=0: must be at least 1"):
        MedusaSpeculatorConfig(**change)


def test_other_errors(verifier):
    with pytest.raises(ValueError, match="draft_vocab_size=20 of 40: each head has the whole vocabulary"):
        fresh(verifier, draft_vocab_size=20)
    with pytest.raises(ValueError, match="not loaded yet: target_head.norm.weight, lm_heads.0.weight"):
        SpeculatorModel.verify_training_compatible(MedusaModel(fresh(verifier).config))
