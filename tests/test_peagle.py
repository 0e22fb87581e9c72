"""P-EAGLE against upstream's recorded numbers, and the lean path against the dense definition."""

import json

import pytest
import torch
from blocks import check_lean
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import FIXTURES, cases, load_case
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.peagle import PEagleDrafter, PEagleDraftModel, PEagleSpeculatorConfig, cod_sample
from speculators_nb.nn.attention import rollouts
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.verifier.tapped_model import Verifier

SAMPLE = ("num_depths", "down_sample_ratio", "down_sample_ratio_min")

CASES = cases("peagle")


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    "Draft logits of every row and the targets, to 1e-4 absolute (they reach 30)."
    model, batch, _, _, folder = load_case(name)
    want, x = load_file(folder / "outputs.safetensors"), {k: v[0] if k[:3] != "cod" else v for k, v in batch.items()}
    with torch.no_grad():
        hidden = model.dense_rollouts(
            x["input_ids"], x["hidden_states"], x["document_ids"], x["cod_anchor_pos"], x["cod_depth"]
        )
        torch.testing.assert_close(model.lm_head(hidden), want["lm_head_out.0"][0], rtol=0, atol=1e-4)
        torch.testing.assert_close(
            model.target_head(x["verifier_last_hidden_states"]), want["verifier_lm_head_out.0"][0], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("name", CASES)
def test_the_sample_is_upstreams(name):
    "From the same seed, the rollouts that upstream drew."
    _, batch, kwargs, info, _ = load_case(name)
    names = ("num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_anchors")
    g = torch.Generator().manual_seed(info.get("sample_seed", 1239))
    anchor, depth = cod_sample(
        batch["loss_mask"], batch["document_ids"], **{k: kwargs[k] for k in names}, generator=g, cross_document=True
    )
    assert torch.equal(anchor, batch["cod_anchor_pos"]) and torch.equal(depth, batch["cod_depth"])


def random_row(g, L=50):
    "Packed documents with padding and a loss mask with holes."
    documents = torch.randint(0, 5, (L,), generator=g).sort().values
    documents[L - int(torch.randint(0, 6, (), generator=g)) :] = -1
    return documents, (torch.rand(L, generator=g) < 0.6) & (documents >= 0)


@given(
    seed=st.integers(0, 10**6),
    depths=st.integers(1, 7),
    ratio=st.floats(0.05, 1),
    floor=st.floats(0, 1),
    anchors=st.none() | st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_rollouts_are_nested_and_stay_at_home(seed, depths, ratio, floor, anchors):
    g = torch.Generator().manual_seed(seed)
    documents, mask = random_row(g)
    anchor, depth = cod_sample(mask, documents, depths, ratio, floor, anchors, g)
    pairs = set(zip(anchor.tolist(), depth.tolist()))
    assert len(pairs) == len(anchor) and {(a, 0) for a in range(50)} <= pairs
    trained = int(mask.sum()) if anchors is None else min(anchors, int(mask.sum()))
    for d in range(1, depths):
        assert sum(e == d for _, e in pairs) <= int(max(0, trained - d) * max(ratio**d, floor))
    for a, d in pairs:
        if d:
            assert (a, d - 1) in pairs and mask[a + d] and documents[a] == documents[a + d] >= 0
    again = cod_sample(mask, documents, depths, ratio, floor, anchors, torch.Generator().manual_seed(7))
    assert all(
        torch.equal(x, y)
        for x, y in zip(
            again, cod_sample(mask, documents, depths, ratio, floor, anchors, torch.Generator().manual_seed(7))
        )
    )


def random_model(seed, windows=True, depths=None):
    "A drafter of random shape with random weights, and a random packed row."
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    layers, kv = pick(1, 2, 3), pick(1, 2, 4)
    types = [pick("full_attention", "sliding_attention" if windows else "full_attention") for _ in range(layers)]
    layer = pick(LlamaConfig, Qwen3Config)(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv,
        head_dim=8,
        vocab_size=60,
        layer_types=types,
        sliding_window=pick(2, 5),
        use_sliding_window=True,
    )
    norms, aux = pick({}, {"norm_before_fc": True}, {"fc_norm": True}), pick([1], [1, 2], [1, 2, 4])
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=pick(40, 60),
        eagle_aux_hidden_state_layer_ids=aux,
        mask_token_id=59,
        norm_before_residual=pick(True, False),
        embed_requires_grad=pick(True, False),
        **norms,
    )
    model = PEagleDraftModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    model.target_head.set_rows(torch.randn(config.draft_vocab_size, 32, generator=g))
    documents, mask = random_row(g)
    batch = dict(
        input_ids=torch.randint(60, (1, 50), generator=g),
        hidden_states=torch.randn(1, 50, 32 * len(aux), generator=g),
        document_ids=documents[None],
        loss_mask=mask[None],
        verifier_last_hidden_states=torch.randn(1, 50, 32, generator=g),
    )
    return (
        model,
        batch,
        dict(num_depths=depths or pick(1, 2, 6), down_sample_ratio=pick(0.6, 1.0), max_anchors=pick(None, 10)),
    )


@pytest.mark.parametrize("seed", range(16))
def test_lean_is_dense(seed):
    """Over random shapes, windows, norms and packings: loss, metrics and gradients of the lean path are those of the
    definition, to 1e-5."""
    model, batch, kwargs = random_model(seed)
    check_lean(model, batch, **kwargs, loss_config={"kl_div": 1.0, "tv": 0.5})
    assert (model.embed_tokens.weight.grad is not None) == model.config.embed_requires_grad


@pytest.mark.parametrize("seed", range(4))
def test_the_mask_is_the_papers(seed):
    "`attention.rollouts` against a loop over all pairs of rows."
    g = torch.Generator().manual_seed(seed)
    documents, mask = random_row(g, 20)
    anchor, depth = cod_sample(mask, documents, 4, 1.0, 1.0, None, g)
    window = None if seed % 2 else 3
    got, doc = rollouts(anchor, depth, documents, window).dense(len(anchor), len(anchor)), documents.tolist()
    rows = list(zip(anchor.tolist(), depth.tolist()))
    for i, (a, d) in enumerate(rows):
        for j, (b, e) in enumerate(rows):
            context = e == 0 and b <= a and (window is None or b > a + d - window)
            own = a == b and e <= d
            assert got[i, j] == (doc[a] >= 0 and doc[a] == doc[b] and (context or own))


def test_rollouts_stay_in_their_document():
    "What the next document holds does not matter to the loss of the earlier one; under upstream's rule it does."
    model, batch, _ = random_model(3)
    documents = torch.tensor([0] * 20 + [1] * 30)
    batch |= dict(document_ids=documents[None], loss_mask=torch.zeros(1, 50, dtype=torch.bool))
    batch["loss_mask"][0, 15:23] = True
    given = dict(
        cod_anchor_pos=torch.cat([torch.arange(50), torch.tensor([16, 19, 17, 19])]),
        cod_depth=torch.tensor([0] * 50 + [1, 1, 1, 2]),
        num_depths=3,
    )
    given = {k: v[[*range(50), 50, 52, 51, 53]] if k != "num_depths" else v for k, v in given.items()}
    _, _, inside = model(**batch, **given)
    _, _, across = model(**batch, **given, cross_document_targets=True)
    assert [int(m[f"position_{d}_acc_total"]) for m in (inside, across) for d in range(3)] == [8, 2, 0, 8, 3, 1]
    assert model(**batch, **given, cross_document_targets=True)[1] != model(**batch, **given)[1]


def test_only_read_rows_of_the_table_move():
    model, batch, _ = random_model(5)
    model.embed_tokens.weight.requires_grad_(True)
    model(**batch, num_depths=4)[1].backward()
    used = torch.zeros(60, dtype=torch.bool)
    used[batch["input_ids"][batch["document_ids"] >= 0]] = True
    used[59] = True  # the mask
    moved = model.embed_tokens.weight.grad.abs().sum(-1) > 0
    assert moved[59] and not (moved & ~used).any() and model.mask_hidden.grad.abs().sum() > 0


def test_padding_is_no_nan():
    """Rows that see nothing are what makes upstream's eager attention NaN; here padding changes no loss, by any back
    end."""
    model, batch, _ = random_model(4)
    batch["document_ids"][0, 40:], batch["loss_mask"][0, 40:] = -1, False
    short = {k: v[:, :40] for k, v in batch.items()}
    losses = []
    for b in (batch, short):
        for options in ({}, dict(lean=False), dict(lean=False, attn_impl="eager")):
            model.zero_grad()
            loss = model(**b, num_depths=4, generator=torch.Generator().manual_seed(0), **options)[1]
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5) and losses[0] > 0


def test_bad_input_is_named():
    model, batch, _ = random_model(2)
    for kwargs, words in (
        (dict(num_depths=0), "num_depths=0"),
        (dict(down_sample_ratio=0.0), "down_sample_ratio=0.0"),
        (dict(down_sample_ratio=1.1), "down_sample_ratio=1.1"),
        (dict(down_sample_ratio_min=-0.1), "down_sample_ratio_min=-0.1"),
        (dict(max_anchors=0), "max_anchors=0"),
        (dict(loss_config="hinge"), "hinge"),
        (
            dict(
                cod_anchor_pos=torch.tensor([0, 1, 0]),
                cod_depth=torch.tensor([0, 0, 2]),
                num_depths=4,
                cross_document_targets=True,
            ),
            "lacks a depth",
        ),
        (dict(cod_anchor_pos=torch.arange(50), cod_depth=None), "cod_depth"),
        (dict(cod_anchor_pos=torch.arange(50), cod_depth=torch.ones(50, dtype=torch.long)), "outside the row"),
        (dict(cod_anchor_pos=torch.tensor([0, 0]), cod_depth=torch.tensor([0, 1]), num_depths=1), "num_depths=1"),
    ):
        with pytest.raises(ValueError, match=words):
            model(**batch, **kwargs)
    for token in (60, -1):
        with pytest.raises(ValueError, match=f"mask_token_id={token}"):
            PEagleSpeculatorConfig(
                transformer_layer_config=model.config.transformer_layer_config, draft_vocab_size=40, mask_token_id=token
            )
    model.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id"):
        model(**batch, num_depths=2)
    model(**batch, num_depths=1)


def test_the_same_seed_gives_the_same_step():
    """Training follows torch's generator (which the trainer saves and restores); evaluation always sees the same
    rollouts; an explicit generator decides alone."""
    model, batch, _ = random_model(7)

    def losses(n=3, **kwargs):
        return [model(**batch, num_depths=5, **kwargs)[1].item() for _ in range(n)]

    model.train()
    torch.manual_seed(1)
    first = losses()
    torch.manual_seed(1)
    assert losses() == first and len(set(first)) > 1
    assert losses(1, generator=torch.Generator().manual_seed(3)) == losses(
        1, generator=torch.Generator().manual_seed(3)
    )
    model.eval()
    assert len(set(losses())) == 1 and losses(seed=1) != losses(seed=2)


@pytest.mark.parametrize("seed", range(6))
def test_drafting_is_what_was_trained(seed):
    """One pass with a cache, fed in two parts, gives the laws of the training row whose anchor is the last decided
    token. Windows at least as long as the rollout: the engine's moving window hides a rollout's own first positions,
    training's does not."""
    model, _, _ = random_model(seed, windows=False)
    model.d2t = model.t2d = None
    drafter, config = PEagleDrafter.__new__(PEagleDrafter), model.config
    drafter.model = model.eval()
    drafter.reset()
    g = torch.Generator().manual_seed(seed)
    n, k, vd = 12, 4, config.draft_vocab_size
    tokens, features = torch.randint(vd, (n,), generator=g), torch.randn(n - 1, 32 * config.num_aux, generator=g)
    drafter.propose(tokens[:7], features[:6], 3, Sampling())
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    assert drafter.cache.get_seq_length() == n - 1  # masks are not kept
    anchor = torch.cat([torch.arange(n - 1), torch.full((k - 1,), n - 2)])
    depth = torch.cat([torch.zeros(n - 1, dtype=torch.long), torch.arange(1, k)])
    row, padded = F.pad(tokens[1:], (0, k)), F.pad(features, (0, 0, 0, k))
    with torch.no_grad():
        hidden = model.dense_rollouts(row, padded, torch.zeros(len(row), dtype=torch.long), anchor, depth)
        torch.testing.assert_close(
            tree.probs, model.lm_head(hidden[[n - 2, *range(n - 1, n + k - 2)]]).softmax(-1), rtol=1e-4, atol=1e-5
        )


def test_what_the_engine_would_read_otherwise(tmp_path):
    *_, folder = load_case("peagle")
    raw = json.loads((folder / "saved_pretrained" / "config.json").read_text())
    raw["transformer_layer_config"]["num_aux_hidden_states"] = 3
    assert PEagleDraftModel.serving_violations(raw) == []
    for change, words in (
        ({"mask_token_id": None}, "mask_token_id"),
        ({"fc_norm": True}, "fc_norm"),
        ({"transformer_layer_config": raw["transformer_layer_config"] | {"sliding_window": 3}}, "sliding_window is 3"),
    ):
        found = PEagleDraftModel.serving_violations(raw | change)
        assert len(found) == 1 and words in found[0]


SHAPE = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    "A random verifier with strong opinions, and a random drafter of two layers for half of its words."
    folder = tmp_path_factory.mktemp("verifier")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, initializer_range=0.3)).eval().save_pretrained(folder)
    verifier = Verifier.from_pretrained(folder, [1, 2, 4])
    kept = torch.arange(40) % 2 == 0
    model = PEagleDraftModel.from_training_args(
        draft_layer_config(verifier.model.config, num_layers=2),
        kept,
        kept.nonzero()[:, 0] - torch.arange(20),
        verifier_name_or_path=str(folder),
        target_layer_ids=[1, 2, 4],
        mask_token_id=39,
        num_depths=4,
    )
    return verifier, model


@pytest.mark.parametrize("seed", [0, 4])
def test_flex_is_blocked(seed):
    "The kernel that CUDA trains with, forward on the CPU: the same loss, windows included."
    model, batch, kwargs = random_model(seed, depths=5)
    with torch.no_grad():
        a, b = (model.eval()(**batch, **kwargs, attn_impl=impl)[1].item() for impl in ("blocked", "flex"))
    assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize("name", [n for n in CASES if n != "peagle"])
def test_training_arguments_make_upstreams_config(name, monkeypatch):
    """The arguments that upstream's training takes give the config that it writes; its flag for the embedding table is
    not taken there either."""
    monkeypatch.chdir(FIXTURES)
    model, _, _, info, _ = load_case(name)
    fresh = PEagleDraftModel.from_training_args(
        model.config.transformer_layer_config, model.t2d, model.d2t, **info["training_args"], embed_requires_grad=False
    )
    assert fresh.config.to_dict() == model.config.to_dict() | {
        "architectures": fresh.config.architectures,
        "dtype": fresh.config.to_dict()["dtype"],
        "speculators_version": fresh.config.speculators_version,
        # 0.9.0 no longer writes how it was trained
        **{k: info["training_args"].get(k, d) for k, d in PEagleDraftModel.training_arguments().items() if k in SAMPLE},
    }
    assert fresh.embed_tokens.weight.requires_grad and not fresh.lm_head.weight.requires_grad
    assert torch.equal(
        fresh.embed_tokens.weight,
        load_file(f"{info['training_args']['verifier_name_or_path']}/model.safetensors")["model.embed_tokens.weight"],
    )


def test_how_rollouts_are_drawn_is_in_the_config(tmp_path):
    """num_depths and the two ratios are fields, the defaults of a training step; a config.json without them, of 0.9.0
    or of an earlier version of this library, has the documented values; wrong ones are refused."""
    layer = LlamaConfig(hidden_size=32, num_attention_heads=4, intermediate_size=40, vocab_size=60, num_hidden_layers=1)
    fields = dict(transformer_layer_config=layer, draft_vocab_size=60, mask_token_id=59)
    config = PEagleSpeculatorConfig(**fields, num_depths=3, down_sample_ratio=0.9, down_sample_ratio_min=0.1)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {name: stored[name] for name in SAMPLE} == dict(zip(SAMPLE, (3, 0.9, 0.1)))
    old = {name: value for name, value in stored.items() if name not in SAMPLE}
    read = PEagleSpeculatorConfig.from_dict(old)
    assert [getattr(read, name) for name in SAMPLE] == [8, 0.7, 0.2]
    for wrong in (dict(num_depths=0), dict(down_sample_ratio=1.5), dict(down_sample_ratio_min=-0.1)):
        with pytest.raises(ValueError, match=f"PEagleSpeculatorConfig.{next(iter(wrong))}="):
            PEagleSpeculatorConfig(**fields, **wrong)
    torch.manual_seed(0)
    model = PEagleDraftModel(config).eval()
    torch.nn.init.normal_(model.embed_tokens.weight)
    torch.nn.init.normal_(model.lm_head.weight)
    torch.nn.init.ones_(model.verifier_norm.weight)
    model.target_head.set_rows(torch.randn(60, 32))
    batch = dict(
        input_ids=torch.randint(60, (1, 30)),
        hidden_states=torch.randn(1, 30, 96),
        document_ids=torch.zeros(1, 30, dtype=torch.long),
        loss_mask=torch.ones(1, 30, dtype=torch.bool),
        verifier_last_hidden_states=torch.randn(1, 30, 32),
    )
    _, loss, metrics = model(**batch)
    assert torch.equal(loss, model(**batch, **dict(zip(SAMPLE, (3, 0.9, 0.1))))[1])
    assert not torch.equal(loss, model(**batch, num_depths=2)[1])
    assert "position_2_acc_sum" in metrics and "position_3_acc_sum" not in metrics
    assert model.training_mask(batch).queries == model.training_mask(batch, num_depths=3).queries
