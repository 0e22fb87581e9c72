"""MLP speculator against a plain re-derivation: Python loops over positions and heads, float64, from the formulas of
2404.19124."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from token_heads import LAYERS, H, V, layer, row, write_verifier

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from speculators_nb.serve.vllm_contract import check_vllm_contract

D = 24


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def fresh(verifier, heads=3, **options):
    torch.manual_seed(1)
    return MLPSpeculator.from_training_args(
        layer(), verifier_name_or_path=str(verifier), num_heads=heads, **dict(intermediate_size=D) | options
    )


def plain_logits(w, state, before, heads, tied, scaled, norm, eps=1e-6):
    """Logits of every head after one state h (before the verifier's final norm): `before[i]` is the token that head i
    is told."""

    def root(x):
        return torch.sqrt((x * x).sum() / len(x) + eps)

    def own(name, i):
        return w[f"{name}.{0 if tied and name != 'proj' else min(i, 1) if tied else i}.weight"]

    s = norm * state / root(state)
    if scaled:
        s = s / root(s) / math.sqrt(2)
    w_s = 2 ** (-1 / (2 * heads))
    w_e = math.sqrt((1 - w_s**2) * D / 2)
    logits = []
    for i in range(heads):
        z = own("proj", i) @ s + w_e / w_s * own("emb", i)[before[i]]
        z = own("ln", i) * z / root(z) + w[f"ln.{0 if tied else i}.bias"]
        s = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
        logits.append(own("head", i) @ s)
    return logits


def plain_loss(w, batch, heads, decay, norm, cross=False, **kind):
    "The summed loss, the heads' mean losses and the number of rows of each."
    ids, docs, mask, states = (
        batch[k][0] for k in ("input_ids", "document_ids", "loss_mask", "verifier_last_hidden_states")
    )
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(heads)], [0] * heads
    for t in range(len(ids)):
        for k in range(heads):
            target = t + 2 + k
            if target >= len(ids) or docs[t] < 0 or not mask[target] or (docs[target] != docs[t] and not cross):
                continue
            logits = plain_logits(
                w,
                states[t].double(),
                [int(ids[t + 1 + i]) for i in range(k + 1)] + [0] * (heads - k - 1),
                heads,
                norm=norm,
                **kind,
            )[k]
            sums[k] = sums[k] - (logits[ids[target]] - torch.logsumexp(logits, 0))
            counts[k] += 1
    means = [s / (n + 1e-5) for s, n in zip(sums, counts)]
    return sum(decay ** (k + 1) * m for k, m in enumerate(means)), means, counts


@pytest.mark.parametrize(
    "seed,heads,tied,scaled,decay,cross",
    [
        (0, 3, True, False, 1.0, False),
        (1, 3, False, True, 0.8, False),
        (2, 2, True, True, 1.0, True),
        (3, 1, False, False, 0.5, False),
    ],
)
def test_loss_and_gradients(verifier, seed, heads, tied, scaled, decay, cross):
    """To 1e-6 relative, float32 weights and a float32 loss against float64; gradients to 1e-5 of their norm. Lean and
    dense alike."""
    model = fresh(verifier, heads, tie_weights=tied, inputs_hidden_states_normalized=scaled).train()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.startswith("ln"):
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    batch = row(seed)
    w = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    norm = model.target_head.norm.weight.double()
    want, means, counts = plain_loss(w, batch, heads, decay, norm, cross, tied=tied, scaled=scaled)
    want.backward()
    for lean in (True, False):
        model.zero_grad()
        tokens, loss, metrics = model(**batch, head_loss_decay=decay, cross_document_targets=cross, lean=lean)
        loss.backward()
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        assert (metrics["loss_sum"] / metrics["loss_total"]).item() == pytest.approx(want.item(), rel=1e-5)
        for k in range(heads):
            assert (metrics[f"loss_{k}_sum"] / metrics[f"loss_{k}_total"]).item() == pytest.approx(
                means[k].item(), rel=1e-5
            )
            assert metrics[f"position_{k}_acc_total"] == counts[k]
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert (p.grad - w[name].grad).norm() <= 1e-5 * w[name].grad.norm() + 1e-7, (name, lean)
        assert (tokens is None) == lean


def test_logits_and_accuracies(verifier):
    "Draft tokens are the argmax of the plain logits, and accuracies count them."
    model, batch = fresh(verifier).eval(), row(5, holes=0.0)
    with torch.no_grad():
        model.head[0].weight.mul_(4)
        tokens, _, metrics = model(**batch, lean=False)
    ids, docs = batch["input_ids"][0], batch["document_ids"][0]
    w, norm = {n: p.double() for n, p in model.state_dict().items()}, model.target_head.norm.weight.double()
    right = [0] * 3
    for t in range(len(ids) - 4):
        logits = plain_logits(
            w, batch["verifier_last_hidden_states"][0, t].double(), ids[t + 1 : t + 4].tolist(), 3, True, False, norm
        )
        assert [x[0, t].item() for x in tokens] == [x.argmax().item() for x in logits]
    for k in range(3):
        for t in range(len(ids) - 2 - k):
            right[k] += int(docs[t] >= 0 and docs[t] == docs[t + 2 + k] and tokens[k][0, t] == ids[t + 2 + k])
        assert metrics[f"position_{k}_acc_sum"] == right[k]


def test_targets_stay_in_their_document(verifier):
    "Other tokens and states in the second document leave the first one's loss alone."
    model, batch = fresh(verifier).eval(), row(6, lengths=(10, 12), padding=0, holes=0.0)
    batch["loss_mask"][0, 10:] = False
    changed = batch | {k: batch[k].clone() for k in ("input_ids", "verifier_last_hidden_states")}
    changed["input_ids"][0, 10:] = 0
    changed["verifier_last_hidden_states"][0, 10:] = 3
    assert model(**batch)[1] == model(**changed)[1]
    batch["loss_mask"][0, 10:12] = changed["loss_mask"][0, 10:12] = (
        True  # within reach of the first document's last rows
    )
    assert model(**batch, cross_document_targets=True)[1] != model(**changed, cross_document_targets=True)[1]
    assert model(**batch)[1] == model(**changed)[1]


@pytest.mark.parametrize("tied", [True, False])
def test_no_logits_of_all_rows(verifier, tied, monkeypatch):
    "The largest tensor that the heads make is one chunk of logits: no matrix of [rows, V] for 200 rows."
    import speculators_nb.nn.token_loss as module

    model, batch, largest = fresh(verifier, tie_weights=tied), row(0, lengths=(200,)), []
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 16)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *shape, **kw: (largest.append(shape), empty(x, *shape, **kw))[1]
    )
    model(**batch)[1].backward()
    assert max(s[0] for s in largest if len(s) == 2 and s[1] == V) == 16


def test_saved_and_loaded(verifier, tmp_path):
    for tied in (True, False):
        model = fresh(verifier, tie_weights=tied)
        model.save_pretrained(tmp_path / "mlp", dtype=torch.bfloat16)
        saved, n = load_file(tmp_path / "mlp/model.safetensors"), 1 if tied else 3
        shapes = (
            {f"emb.{i}.weight": (V, D) for i in range(n)}
            | {f"head.{i}.weight": (V, D) for i in range(n)}
            | {"proj.0.weight": (D, H)}
            | {f"proj.{i}.weight": (D, D) for i in range(1, 2 if tied else 3)}
        )
        shapes |= {f"ln.{i}.{p}": (D,) for i in range(n) for p in ("weight", "bias")}
        assert {k: tuple(w.shape) for k, w in saved.items()} == shapes
        config = json.loads((tmp_path / "mlp/config.json").read_text())
        documented = dict(
            speculators_model_type="mlp",
            inputs=["input_embeddings", "hidden_states[-1]"],
            inputs_hidden_states_normalized=False,
            hidden_size=H,
            intermediate_size=D,
            vocab_size=V,
            num_layers=3,
            tie_weights=tied,
            torch_dtype="bfloat16",
            architectures=["MLPSpeculator"],
        )
        assert documented.items() <= config.items() and "transformer_layer_config" not in config
        again = SpeculatorModel.from_pretrained(tmp_path / "mlp")
        assert type(again) is MLPSpeculator and again.dtype == torch.bfloat16 and again.config == model.config
        assert all(torch.equal(w, again.state_dict()[k]) for k, w in saved.items())
        assert again.target_head.norm.weight.isfinite().all() and again.drafter().aux_layer_ids == (LAYERS,)
        for version in ("0.32", "0.33"):
            found = check_vllm_contract(tmp_path / "mlp", version)
            assert len(found) == 2 and f"vLLM {version} does not serve method='mlp_speculator'" in found[0]


def test_defaults_are_the_documented_ones():
    config = MLPSpeculatorConfig()
    want = dict(
        inputs=["input_embeddings", "hidden_states[-1]"],
        inputs_hidden_states_normalized=False,
        hidden_size=4096,
        intermediate_size=4096,
        vocab_size=128256,
        num_layers=5,
        tie_weights=True,
        torch_dtype="bfloat16",
    )
    assert {k: getattr(config, k) for k in want} == want


@pytest.mark.parametrize("tied", [True, False])
def test_native_format(verifier, tmp_path, tied):
    "The names that vLLM's and the original loader read: a part for each head, tied or not; tied ones are copies."
    model = fresh(verifier, tie_weights=tied, inputs_hidden_states_normalized=True)
    model.save_native(tmp_path, dtype=torch.float16)
    state, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert set(state) == {
        f"speculator.{part}.{i}.weight" for part in ("emb", "proj", "ln", "head") for i in range(3)
    } | {f"speculator.ln.{i}.bias" for i in range(3)}
    assert {w.dtype for w in state.values()} == {torch.float16}
    assert all(
        torch.equal(state[f"speculator.{part}.{i}.weight"], model.at(getattr(model, part), i).weight.half())
        for part in ("emb", "proj", "ln", "head")
        for i in range(3)
    )
    assert config == dict(
        model_type="mlp_speculator",
        architectures=["MLPSpeculatorPreTrainedModel"],
        vocab_size=V,
        emb_dim=H,
        inner_dim=D,
        n_predict=3,
        top_k_tokens_per_head=[1, 1, 1],
        n_candidates=1,
        tie_weights=tied,
        scale_input=True,
        dtype="float16",
    )


def sharp(model):
    "Heads that are sure of something, so that guesses differ from place to place."
    with torch.no_grad():
        for head in model.head:
            head.weight.mul_(5)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_drafting_is_what_was_trained(verifier, tied):
    "The drafter's chain and its laws are the plain logits on the row that it drafts itself; no more tokens than heads."
    model = sharp(fresh(verifier, tie_weights=tied))
    g = torch.Generator().manual_seed(0)
    tokens, features = torch.randint(V, (6,), generator=g), torch.randn(5, H, generator=g)
    w, norm = {n: p.double() for n, p in model.state_dict().items()}, model.target_head.norm.weight.double()
    for sampling in (Sampling(), Sampling(0.7, g)):
        tree = model.drafter().propose(tokens, features, 5, sampling)
        assert tree.parents.tolist() == [-1, 0, 1]
        logits = plain_logits(w, features[-1].double(), [int(tokens[-1]), *tree.tokens.tolist()], 3, tied, False, norm)
        if sampling.temperature:
            torch.testing.assert_close(
                tree.probs.double(), (torch.stack(logits) / 0.7).softmax(-1), rtol=1e-4, atol=1e-6
            )
        else:
            assert tree.probs is None and tree.tokens.tolist() == [x.argmax().item() for x in logits]
    assert len(model.drafter().propose(tokens, features[-1:], 2, Sampling())) == 2


def test_learns_what_it_can_see(verifier):
    """Texts that count upwards: every later token is decided by the one that a head is told. After 40 steps all heads
    say it."""
    starts, L = torch.arange(0, V, 4), 12
    ids = ((starts[:, None] + torch.arange(L)) % V).reshape(1, -1)
    batch = dict(
        input_ids=ids,
        document_ids=torch.arange(len(starts)).repeat_interleave(L)[None],
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        verifier_last_hidden_states=torch.randn(1, ids.shape[1], H, generator=torch.Generator().manual_seed(0)),
    )
    model = fresh(verifier).train()
    kwargs, _ = MLPSpeculator.get_trainer_kwargs()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    for _ in range(40):
        opt.zero_grad()
        _, loss, metrics = model(**batch, **kwargs)
        loss.backward()
        opt.step()
    assert all(metrics[f"position_{k}_acc_sum"] > 0.9 * metrics[f"position_{k}_acc_total"] for k in range(3))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(inputs=["hidden_states[-1]"]), "inputs="),
        (dict(num_layers=1), "ties nothing"),
        (dict(num_layers=0, tie_weights=False), "num_layers=0"),
        (dict(intermediate_size=0), "intermediate_size=0"),
    ],
)
def test_bad_configs(change, message):
    with pytest.raises(ValueError, match=message):
        MLPSpeculatorConfig(**change)


def test_other_errors(verifier, tmp_path):
    with pytest.raises(ValueError, match="of 40: each head has the whole vocabulary"):
        fresh(verifier, draft_vocab_size=20)
    with pytest.raises(ValueError, match="of 40: each head has the whole vocabulary"):
        fresh(verifier, t2d=torch.ones(V, dtype=torch.bool))
    model = fresh(verifier)
    with pytest.raises(ValueError, match="not loaded yet: target_head.norm.weight"):
        SpeculatorModel.verify_training_compatible(MLPSpeculator(model.config))
    model.config.speculators_config.verifier.name_or_path = "/nowhere/at/all"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="leaves target_head.norm.weight to the verifier"):
        SpeculatorModel.from_pretrained(tmp_path)
    assert SpeculatorModel.from_pretrained(tmp_path, verifier=verifier).target_head.norm.weight.isfinite().all()
