"""DFlash against upstream's recorded numbers, the lean path against the dense definition, the drafter against
training."""

import json
from pathlib import Path

import pytest
import torch
from blocks import check_lean
from recorded import FIXTURES, cases, load_case
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, export_native
from speculators_nb.models.dflash import DFlashDrafter, DFlashDraftModel, DFlashSpeculatorConfig
from speculators_nb.nn.anchors import block_supervision
from speculators_nb.nn.attention import anchored_blocks
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.nn.supervision import ScoredRows, dpace
from speculators_nb.serve.vllm_contract import check_vllm_contract

CASES = cases("dflash")


@pytest.mark.parametrize("name", CASES)
def test_cross_document_is_the_only_difference(name):
    """Where upstream scores no slot on another document, the default gives upstream's loss too; where it does, another
    one."""
    model, batch, kwargs, info, _ = load_case(name)
    _, loss, _ = model(**batch, **kwargs)
    assert (loss.item() == pytest.approx(info["loss"], rel=1e-5)) is (not info.get("cross_document_slots"))


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    "Draft logits of every slot of every block, and the targets, to 1e-4 absolute (they reach 30)."
    model, batch, _, _, folder = load_case(name)
    want = load_file(folder / "outputs.safetensors")
    x = {k: v if k.startswith("anchor") else v[0] for k, v in batch.items()}
    anchors = x["anchor_positions"]
    with torch.no_grad():
        hidden = model.block_hidden(
            model.block_tokens(x["input_ids"][anchors]),
            model.context(x["hidden_states"]),
            anchors,
            x["document_ids"],
            x["position_ids"],
            False,
            "sdpa",
        )
        torch.testing.assert_close(model.lm_head(hidden).flatten(0, 1), want["lm_head_out.0"][0], rtol=0, atol=1e-4)
        targets, supervised = block_supervision(
            anchors, x["loss_mask"], x["document_ids"], model.config.block_size, model.config.sample_from_anchor, True
        )
        mine, theirs = model.target_head(x["verifier_last_hidden_states"]), want["verifier_lm_head_out.0"][0]
        if len(theirs) == targets.numel():  # upstream formed targets at the slots alone, else for the whole row
            mine, theirs = mine[targets][supervised], theirs.view(*targets.shape, -1)[supervised]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.statement("models-04", "models-13")
@pytest.mark.parametrize("name", [c for c in CASES if c != "dflash"])
def test_a_checkpoint_comes_back(name, tmp_path, monkeypatch):
    "What a checkpoint leaves out comes from the verifier; without its folder that is an error."
    model, batch, kwargs, info, _ = load_case(name)
    model.save_pretrained(tmp_path)
    verifier = FIXTURES / info["training_args"]["verifier_name_or_path"]
    again = SpeculatorModel.from_pretrained(tmp_path, verifier=verifier)
    assert again(**batch, **kwargs, cross_document_targets=True)[1].item() == pytest.approx(info["loss"], rel=1e-5)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="embed_tokens.weight.* to the verifier"):
        SpeculatorModel.from_pretrained(tmp_path)


def random_model(seed, **fixed):
    "A drafter of random shape with random weights, and a random packed row."
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    layers, kv = pick(1, 2, 3), pick(1, 2, 4)
    types = [pick("full_attention", "sliding_attention") for _ in range(layers)]
    layer = Qwen3Config(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv,
        head_dim=8,
        vocab_size=60,
        layer_types=types,
        sliding_window=pick(3, 9),
        use_sliding_window=True,
        add_swa_attention_sink_bias=bool(seed % 2),
    )
    aux = pick([1], [1, 2], [1, 2, 4])
    fields = (
        dict(
            transformer_layer_config=layer,
            draft_vocab_size=pick(40, 60),
            aux_hidden_state_layer_ids=aux,
            block_size=pick(2, 5, 8),
            mask_token_id=59,
            sliding_window_non_causal=pick(True, False),
            sample_from_anchor=pick(True, False),
            target_hidden_size=pick(None, 24),
        )
        | fixed
    )
    model = DFlashDraftModel(DFlashSpeculatorConfig(**fields))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.ndim > 1 else 0.1) + (p.ndim == 1))
        if model.t2d is not None:
            model.t2d[:40] = True
    model.target_head.set_rows(torch.randn(model.config.draft_vocab_size, 32, generator=g))
    L = 50
    documents = torch.randint(0, 5, (L,), generator=g).sort().values
    documents[L - int(torch.randint(0, 6, (), generator=g)) :] = -1
    starts = torch.searchsorted(documents.unique_consecutive(), documents)
    positions = torch.arange(L) - torch.tensor([int((starts < s).sum()) for s in starts])
    batch = dict(
        input_ids=torch.randint(60, (1, L), generator=g),
        hidden_states=torch.randn(1, L, model.fc.in_features, generator=g),
        document_ids=documents[None],
        loss_mask=((torch.rand(1, L, generator=g) < 0.6) & (documents >= 0)),
        verifier_last_hidden_states=torch.randn(1, L, 32, generator=g),
        position_ids=positions[None],
    )
    return model, batch


@pytest.mark.parametrize("seed", range(20))
def test_lean_is_dense(seed):
    """Over random shapes, windows, blocks and packings: loss, metrics and gradients of the lean path are those of the
    definition, to 1e-5."""
    model, batch = random_model(seed)
    options = (
        dict(loss_config="ce", per_position_loss_weight="dpace")
        if seed % 2
        else dict(loss_config={"kl_div": 1.0, "tv": 0.5}, gamma=3.0)
    )
    options |= dict(max_anchors=(9, 60)[seed % 3 > 0], serving_window=seed % 4 > 1)
    assert check_lean(model, batch, **options).loss > 0


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_given_anchors_does_not_matter(seed):
    "Nor do entries that are not valid."
    model, batch = random_model(seed)
    places = batch["loss_mask"][0, :40].nonzero()[:, 0][:6]
    shuffled = torch.cat([places.flip(0), torch.tensor([0, 3])])
    valid = torch.tensor([True] * len(places) + [False] * 2)
    a, b = (model(**batch, anchor_positions=x, anchor_valid=v)[1] for x, v in ((places, None), (shuffled, valid)))
    torch.testing.assert_close(a, b)


def test_the_mask_is_the_paper():
    """Brute force over random documents with padding: a key of the row must lie in the anchor's document, before it,
    within the window; a slot must be in the same block."""
    g = torch.Generator().manual_seed(0)
    for trial in range(20):
        L, B, A = 24, 2 + trial % 4, 5
        documents = torch.randint(0, 4, (L,), generator=g).sort().values
        documents[L - trial % 5 :] = -1
        anchors = torch.randint(0, L, (A,), generator=g).sort().values
        window, causal = (None, 3, 7)[trial % 3], bool(trial % 2)
        mask = anchored_blocks(anchors, documents, B, window, causal).dense(A * B, L + A * B)
        for q in range(A * B):
            a = int(anchors[q // B])
            for j in range(L + A * B):
                if j < L:
                    want = documents[j] == documents[a] != -1 and j < a and (window is None or j >= a - window)
                else:
                    want = (j - L) // B == q // B and (not causal or j - L <= q)
                assert bool(mask[q, j]) == bool(want), (trial, q, j)


def test_the_serving_window_is_the_engines():
    """Brute force: slot k of a block at a sees what is less than the window behind a + k, and less than it ahead where
    blocks are bidirectional."""
    for seed in range(6):
        model, batch = random_model(seed, block_size=5, sliding_window_non_causal=bool(seed % 2))
        layer, documents = model.layers[0], batch["document_ids"][0]
        layer.window = (3, 7)[seed % 3 > 0]
        anchors = torch.tensor([4, 11, 30])
        mask = model.mask(layer, anchors, documents, serving_window=True).dense(15, 50 + 15)
        for q in range(15):
            at = int(anchors[q // 5]) + q % 5
            for j in range(65):
                if j < 50:
                    want = (
                        documents[j] == documents[anchors[q // 5]]
                        and documents[j] >= 0
                        and j < anchors[q // 5]
                        and j > at - layer.window
                    )
                else:
                    other = (j - 50) % 5
                    want = (
                        (j - 50) // 5 == q // 5
                        and abs(other - q % 5) < layer.window
                        and (seed % 2 == 1 or other <= q % 5)
                    )
                assert bool(mask[q, j]) == bool(want), (seed, q, j)


def test_slot_weights():
    "The decay of the paper, and D-PACE from the drafter's own cross-entropies, block by block."
    model, batch = random_model(4, sample_from_anchor=False, block_size=5)
    supervised = torch.tensor([[False, True, True, True, True], [False, True, False, True, False]])
    weight = model.slot_weight(supervised, model.slot_decay(supervised, 2.0), "fixed-exp-decay")
    torch.testing.assert_close(weight, torch.exp(-torch.tensor([0, 1, 2, 3, 0, 2]) / 2))
    rows = torch.rand(6)
    table = torch.zeros(2, 5).masked_scatter(supervised, rows)
    scored = ScoredRows(losses={"ce": rows}, correct=rows < 0.5)
    torch.testing.assert_close(
        model.slot_weight(supervised, weight, "dpace", dpace_alpha=0.3)(scored),
        dpace(table, supervised, 0.3)[supervised],
    )
    with pytest.raises(ValueError, match="per_position_loss_weight='linear'"):
        model.slot_weight(supervised, weight, "linear")
    with pytest.raises(ValueError, match="confidence from ce, and the mixture is kl_div, tv"):
        model(**batch, per_position_loss_weight="dpace", loss_config={"kl_div": 1.0, "tv": 1.0})


def test_given_slot_weights():
    "The formula's own weights, given as numbers or as a function of the slot, are the same step; others are not."
    model, batch = random_model(4, sample_from_anchor=False, block_size=5)
    model.eval()  # draws the same blocks each time
    loss = model(**batch, max_anchors=9)[1]
    decay = [0.0, *torch.exp(-torch.arange(4) / 4).tolist()]
    for weights in (decay, lambda slot: torch.exp(-(slot - 1) / 4)):
        torch.testing.assert_close(model(**batch, max_anchors=9, step_weights=weights)[1], loss)
    assert model(**batch, max_anchors=9, step_weights=[1.0] * 5)[1] > loss
    with pytest.raises(ValueError, match="step_weights has 4 entries for 5 steps"):
        model(**batch, step_weights=[1.0] * 4)


def test_layers_are_called():
    "A hook of a decoder layer fires once a training step and once a draft."
    model, batch = random_model(3)
    calls = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: calls.append(module))
    for lean in (True, False):
        model(**batch, max_anchors=9, lean=lean)
    drafter = model.drafter()
    drafter.propose(torch.arange(5), torch.randn(4, model.fc.in_features), 1, Sampling())
    assert len(calls) == 3 * len(model.layers)


def test_targets_stay_in_their_document():
    """Changing a later document's last states leaves the loss of blocks in the earlier one alone; upstream's rule lets
    them in."""
    model, batch = random_model(3, sample_from_anchor=False, block_size=6)
    batch |= dict(document_ids=torch.tensor([[0] * 20 + [1] * 30]), loss_mask=torch.ones(1, 50, dtype=torch.bool))
    other = batch | dict(verifier_last_hidden_states=batch["verifier_last_hidden_states"].clone())
    other["verifier_last_hidden_states"][0, 20:] += torch.randn(30, 32)
    for cross in (False, True):
        a, b = (
            model(**x, anchor_positions=torch.tensor([12, 17]), cross_document_targets=cross)[1].item()
            for x in (batch, other)
        )
        assert (a == b) is not cross


def test_random_choices():
    "The same generator gives the same step, evaluation repeats itself, training follows torch's seed."
    model, batch = random_model(6)

    def loss(**kw):
        return model(**batch, max_anchors=3, **kw)[1].item()

    model.train()
    a, b = (loss(generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    assert a != b and a == loss(generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    first, second = loss(), loss()
    torch.manual_seed(0)
    assert first != second and (loss(), loss()) == (first, second)
    model.eval()
    state = torch.get_rng_state()
    assert loss() == loss() != loss(seed=1) and torch.equal(state, torch.get_rng_state())


def test_bad_input():
    layer = Qwen3Config(
        hidden_size=32,
        vocab_size=60,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
    )
    good = dict(transformer_layer_config=layer, draft_vocab_size=60, aux_hidden_state_layer_ids=[1], mask_token_id=59)
    for change, text in (
        (dict(block_size=1), "block_size=1: must be at least 2"),
        (dict(mask_token_id=60), "mask_token_id=60 lies outside"),
        (dict(mask_token_id=-1), "mask_token_id=-1"),
        (dict(aux_hidden_state_layer_ids=[1, 1]), "must be distinct and not negative"),
        (dict(draft_vocab_size=61), "draft_vocab_size=61"),
        (dict(transformer_layer_config=GPT2Config(vocab_size=60)), "model_type is 'gpt2'"),
        (dict(transformer_layer_config=layer.to_dict() | dict(layer_types=["linear_attention"])), "linear_attention"),
    ):
        with pytest.raises(ValueError, match=text.replace("(", r"\(")):
            DFlashSpeculatorConfig(**good | change)
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids is None"):
        DFlashDraftModel(DFlashSpeculatorConfig(**good | dict(aux_hidden_state_layer_ids=None)))
    model, batch = random_model(2, block_size=8)
    short = {k: v[:, :6] for k, v in batch.items()}
    with pytest.raises(ValueError, match="block_size=8 does not fit into a row of 6"):
        model(**short)
    with pytest.raises(ValueError, match="block_size=8 does not fit into a row of 6"):
        model(**short, anchor_positions=torch.tensor([1]))
    with pytest.raises(ValueError, match="anchor_positions go from 3 to 50, the row has 50"):
        model(**batch, anchor_positions=torch.tensor([3, 50]))
    with pytest.raises(ValueError, match="max_anchors=0"):
        model(**batch, max_anchors=0)
    model.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id is not set"):
        model(**batch)


@pytest.mark.parametrize("seed", range(10))
def test_drafting_is_what_was_trained(seed):
    """The cache, fed in parts (one of them twice, after a rejection), gives the laws that training with
    `serving_window` gives to the block at that anchor."""
    model, _ = random_model(seed, draft_vocab_size=60)
    B = model.config.block_size
    k, g = model.config.speculative_tokens, torch.Generator().manual_seed(seed)
    tokens, features = torch.randint(59, (12,), generator=g), torch.randn(11, model.fc.in_features, generator=g)
    drafter = DFlashDrafter(model)
    drafter.propose(tokens[:4], features[:3], 1, Sampling())
    # positions 3..5 with other features: taken back below
    drafter.propose(tokens[:7], torch.randn(3, model.fc.in_features), k, Sampling())
    drafter.propose(tokens[:7], features[3:6], k, Sampling())
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    assert len(tree) == k and all(layer.keys.shape[2] == 11 for layer in drafter.cache.layers)
    row = torch.cat([tokens, torch.zeros(B, dtype=torch.long)])
    with torch.no_grad():
        context = model.context(torch.cat([features, torch.zeros(B + 1, features.shape[1])]))
        anchors = torch.tensor([11])
        hidden = model.block_hidden(
            model.block_tokens(row[anchors]),
            context,
            anchors,
            torch.zeros(len(row), dtype=torch.long),
            torch.arange(len(row)),
            False,
            "sdpa",
            True,
        )[0]
        torch.testing.assert_close(tree.probs, model.lm_head(hidden[-k:]).softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_engines_window(seed):
    "Brute force: slot k at position p sees keys after p - W, and before p + W where blocks are bidirectional."
    model, _ = random_model(
        seed, draft_vocab_size=60, sample_from_anchor=False, block_size=5, sliding_window_non_causal=bool(seed % 2)
    )
    layer, g = model.layers[0], torch.Generator().manual_seed(seed)
    layer.window, model.layers = 4, torch.nn.ModuleList([layer])
    tokens, features = torch.randint(59, (9,), generator=g), torch.randn(8, model.fc.in_features, generator=g)
    drafter = DFlashDrafter(model)
    with torch.no_grad():
        got = drafter.read_block(tokens, features, 4)
        at = torch.arange(13)
        hidden = model.embed_tokens(model.block_tokens(tokens[-1:], 5)[0])
        x, residual = layer.inputs(hidden)
        rope = model.rotary(hidden, at)
        k, v = layer.self_attn.key_value(torch.cat([model.context(features), x]), rope)
        q = layer.self_attn.query(x, [r[8:] for r in rope])
        heads = torch.zeros_like(q)
        for h in range(4):
            for s in range(5):
                p = 8 + s
                seen = [j for j in range(13) if j > p - 4 and (j <= p if seed % 2 == 0 else j < p + 4)]
                kv = h // (4 // len(k))
                w = (k[kv, seen] @ q[h, s] / 8**0.5).exp()
                sinks = layer.self_attn.attention_sink_bias
                heads[h, s] = w @ v[kv, seen] / (w.sum() + (0 if sinks is None else sinks[h].exp()))
        torch.testing.assert_close(got, model.norm(layer.finish(heads, residual)), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    "A random verifier and a fresh drafter for it, half of the vocabulary."
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("verifier")
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=200,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    t2d = torch.arange(40) % 2 == 0
    model = DFlashDraftModel.from_training_args(
        draft_layer_config(config, "qwen3", 2),
        t2d,
        t2d.nonzero()[:, 0] - torch.arange(20),
        verifier_name_or_path=str(folder),
        block_size=5,
        mask_token_id=39,
    )
    return folder, model


def test_sampled_tokens_follow_their_slots_laws(pair):
    """Independent draws: 4000 pairs of the first two slots against the product of their laws, chi-square over the cells
    that expect five."""
    _, model = pair
    drafter, g = model.drafter(), torch.Generator().manual_seed(0)
    tokens, features = torch.arange(6), torch.randn(5, model.fc.in_features, generator=g)
    with torch.no_grad():
        logits = drafter.slots(tokens, features, 2)
    drafter.slots = lambda *_: logits  # computed once; what is drawn is drawn anew
    n = 4000
    trees = [drafter.propose(tokens, features, 2, Sampling(0.7, g)) for _ in range(n)]
    p, q = trees[0].probs
    assert (p[1::2] == 0).all() and p.sum() == pytest.approx(1)  # verifier ids; the draft vocabulary is the even ones
    seen = (
        torch.bincount(torch.tensor([int(t.tokens[0] * 40 + t.tokens[1]) for t in trees]), minlength=1600)
        .view(40, 40)
        .float()
    )
    expected = n * p[:, None] * q
    cells = expected >= 5
    chi2 = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
    dof = int(cells.sum()) - 1
    assert dof > 50 and abs(chi2 - dof) < 4 * (2 * dof) ** 0.5


def test_fresh_checkpoint_keeps_the_contract(pair, tmp_path):
    "What from_training_args makes, vLLM serves; each departure is named."
    _, model = pair
    model.save_pretrained(tmp_path)
    assert check_vllm_contract(tmp_path) == []
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (
        raw["sliding_window_non_causal"] is True
        and raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    )

    def layer(**kw):
        return dict(transformer_layer_config=raw["transformer_layer_config"] | kw)

    (tmp_path / "config.json").write_text(json.dumps(raw | layer(is_causal=True)))
    assert check_vllm_contract(tmp_path) == []
    for change, text in (
        (dict(sliding_window_non_causal=False), "makes every layer causal"),
        (layer(add_swa_attention_sink_bias=True), "layers.0.self_attn.attention_sink_bias"),
        (layer(layer_types=["full_attention", "sliding_attention"]), "V2 runner"),
        (dict(sample_from_anchor=True), "samples the masks alone"),
        (dict(mask_token_id=None), "mask_token_id is not written"),
        (dict(block_size=4), "trained to draft 3"),
        (dict(aux_hidden_state_layer_ids=[1, 2, 9]), "the verifier has 4 layers"),
        (layer(max_position_embeddings=100), "max_position_embeddings is 100"),
        (layer(layer_types=["sliding_attention"] * 2, sliding_window=3), "less than the block of 5"),
        (layer(hidden_act="gelu"), "silu alone"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        assert any(text in line for line in check_vllm_contract(tmp_path)), text
    del raw["sliding_window_non_causal"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert any("sliding_window_non_causal is not written" in line for line in check_vllm_contract(tmp_path))


def test_a_head_of_its_own(pair, tmp_path):
    "Of a drafter with the whole vocabulary: it is loaded, served and saved again, and a copy of the verifier's is not."
    folder, _ = pair
    layers = draft_layer_config(Qwen3Config.from_pretrained(folder), "qwen3", 1)
    options = dict(verifier_name_or_path=str(folder), block_size=5, mask_token_id=39)
    fresh = DFlashDraftModel.from_training_args(layers, **options)
    fresh.save_pretrained(tmp_path / "copy")
    state = load_file(tmp_path / "copy/model.safetensors")
    theirs = load_file(folder / "model.safetensors")
    for name, head in (("copy", theirs["lm_head.weight"]), ("own", -theirs["lm_head.weight"])):
        fresh.config.save_pretrained(tmp_path / name)
        save_file(state | {"lm_head.weight": head}, tmp_path / name / "model.safetensors")
        assert check_vllm_contract(tmp_path / name) == []
        model = SpeculatorModel.from_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / "again")
        assert ("lm_head.weight" in load_file(tmp_path / "again/model.safetensors")) == (name == "own")
        exported = Path(export_native(tmp_path / "again", tmp_path / f"{name} there"))
        assert ("lm_head.weight" in load_file(exported / "model.safetensors")) == (name == "own")
        assert ("has_own_lm_head" in json.loads((exported / "config.json").read_text())) == (name == "own")
        convert(exported, tmp_path / f"{name} back", folder)
        ours, back = (load_file(tmp_path / f / "model.safetensors") for f in ("again", f"{name} back"))
        assert ours.keys() == back.keys() and all(torch.equal(ours[n], back[n]) for n in ours)
        for place in (tmp_path / f"{name} back", exported):
            assert torch.equal(SpeculatorModel.from_pretrained(place, verifier=folder).lm_head.weight, head)
        assert torch.equal(SpeculatorModel.from_pretrained(tmp_path / "again").lm_head.weight, head)
    short = state | {"lm_head.weight": theirs["lm_head.weight"][1:]}
    save_file(short, tmp_path / "own/model.safetensors")
    assert "lm_head.weight has shape" in check_vllm_contract(tmp_path / "own")[0]


def test_anchors_of_the_config():
    "max_anchors is a field, the default of a training step; a config.json without it has 512."
    model, batch = random_model(3)
    old = {name: value for name, value in model.config.to_dict().items() if name != "max_anchors"}
    assert DFlashSpeculatorConfig.from_dict(old).max_anchors == 512
    model.eval()
    model.config.max_anchors = 3
    assert torch.equal(model(**batch)[1], model(**batch, max_anchors=3)[1])
    assert not torch.equal(model(**batch)[1], model(**batch, max_anchors=20)[1])
    with pytest.raises(ValueError, match="DFlashSpeculatorConfig.max_anchors=0"):
        model.config.max_anchors = 0
    assert model.get_trainer_kwargs()[0].get("max_anchors") is None
    assert DFlashDraftModel.training_arguments()["max_anchors"] == 512


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config])
def test_layers_of_other_families_are_qwen3s(family):
    "As upstream: the sizes of any of them, with norms on queries and keys, and stored as what they are."
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40, vocab_size=60)
    rope = dict(rope_type="default", rope_theta=5e5)
    layer = family(**sizes, num_hidden_layers=2, rms_norm_eps=1e-5, rope_parameters=rope)
    fields = dict(draft_vocab_size=60, aux_hidden_state_layer_ids=[1], mask_token_id=59)
    config = DFlashSpeculatorConfig(transformer_layer_config=layer, **fields)
    found = config.transformer_layer_config
    assert type(found) is Qwen3Config and {k: getattr(found, k) for k in sizes} == sizes
    assert (found.head_dim, found.rms_norm_eps, found.rope_parameters["rope_theta"]) == (8, 1e-5, 5e5)
    assert found.layer_types == ["full_attention"] * 2
    model = DFlashDraftModel(config)
    assert model.layers[0].self_attn.q_norm.weight.shape == (8,)
    assert DFlashSpeculatorConfig.from_dict(config.to_dict()) == config
    named = {"model_type": family.model_type} | layer.to_diff_dict()
    assert DFlashSpeculatorConfig(transformer_layer_config=named, **fields) == config


def test_dpace_weights_a_mixture():
    "ce says how confident the drafter is, and weights every term alike; without ce there is no confidence to read."
    model, batch = random_model(2, block_size=5)
    options = dict(anchor_positions=torch.tensor([4, 20, 30]), per_position_loss_weight="dpace")
    alone = {name: model(**batch, **options, loss_config={"ce": 1.0, name: 0.5}) for name in ("tv", "kl_div")}
    dense = model(**batch, **options, loss_config={"ce": 1.0, "tv": 0.5}, lean=False)
    torch.testing.assert_close(alone["tv"].loss, dense.loss, rtol=1e-5, atol=1e-6)
    ce = model(**batch, **options, loss_config={"ce": 1.0}).loss
    double = model(**batch, **options, loss_config={"ce": 2.0, "tv": 0.5}).loss
    torch.testing.assert_close(double - ce, alone["tv"].loss, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="confidence from ce, and the mixture is kl_div, tv"):
        model(**batch, **options, loss_config={"kl_div": 1.0, "tv": 1.0})
