"""LiLiCorr against NVIDIA ModelOpt's recorded steps and vLLM's recorded scores, against definitions by loops, and the
lean pass against the dense one; drafting's distributions, chains and trees, against training's; layouts, bad input."""

import json

import pytest
import torch
from blocks import (
    V,
    check_lean,
    check_pairs,
    fresh,
    picker,
    random_drafter,
    random_layer,
    random_row,
    read_in_two_parts,
    served_states,
    text_and_features,
    tiny_verifier,
)
from modelopt_lilicorr import CASES, FIXTURE, LAYER, MASK_TOKEN, STEPS, drawn_batch, drawn_weights, head_fields
from modelopt_lilicorr import V as RECORDED_V
from recorded import FIXTURES
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import export_native
from speculators_nb.models.formats_dflash import SEQUENTIAL_NAMES
from speculators_nb.models.lilicorr import (
    LatticeScorer,
    LiLiCorrDraftModel,
    LiLiCorrSpeculatorConfig,
    cell_features,
    greedy_path,
    lattice_losses,
    likeliest_tokens,
    scores_behind,
)

# ---- ModelOpt's recorded numbers


def recorded_drafter(name):
    "Our drafter with the weights of a case."
    case = CASES[name]
    kind = "sliding_attention" if case.window else "full_attention"
    layer = Qwen3Config(
        **LAYER,
        num_hidden_layers=case.num_hidden_layers,
        layer_types=[kind] * case.num_hidden_layers,
        use_sliding_window=bool(case.window),
        sliding_window=case.window,
        is_causal=case.causal,
    )
    config = LiLiCorrSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=RECORDED_V,
        block_size=case.block_size,
        mask_token_id=MASK_TOKEN,
        aux_hidden_state_layer_ids=list(range(1, 1 + case.features)),
        **head_fields(case),
    )
    model = LiLiCorrDraftModel(config)
    weights = drawn_weights(name, {n: tuple(p.shape) for n, p in model.named_parameters()})
    model.load_state_dict(weights, strict=False)
    model.target_head.set_rows(weights["lm_head.weight"])
    for n in ("embed_tokens", "lm_head"):
        model.get_submodule(n).requires_grad_(False)
    return model.train()


def packed(name):
    "The batch of a case as one row, with the anchors that were given."
    batch = drawn_batch(name)
    texts, length = batch["input_ids"].shape
    rows = {n: batch[n].flatten(0, 1)[None] for n in ("input_ids", "hidden_states")}
    return rows | dict(
        loss_mask=batch["loss_mask"].bool().flatten()[None],
        document_ids=torch.arange(texts).repeat_interleave(length)[None],
        position_ids=torch.arange(length).repeat(texts)[None],
        verifier_last_hidden_states=batch["last_hidden"].flatten(0, 1)[None],
        anchor_positions=(batch["anchors"] + length * torch.arange(texts)[:, None]).flatten(),
    )


def as_recorded(name):
    "Arguments of `forward` with which a step is ModelOpt's."
    case = CASES[name]
    terms = dict(ce=case.w_ce, margin=case.w_margin, penalty=case.w_pen)
    options = {f"lattice_{term}_weight": weight for term, weight in terms.items()}
    options |= dict(gamma=case.loss_decay_factor, lattice_margin=case.margin)
    return options | dict(loss_config="ce", ce_from_data=True, serving_window=True)


def recorded(name):
    return {k.removeprefix(f"{name}/"): v for k, v in load_file(FIXTURE).items() if k.startswith(f"{name}/")}


# by day the lean path, which is the dense one (test_lean_is_dense)
@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["lean", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_modelopts(name, lean):
    "Gradients on the drawn weights to 1e-3; then steps of AdamW, whose losses are ModelOpt's to 1e-5, part by part."
    want, model = recorded(name), recorded_drafter(name)
    batch, options = packed(name), as_recorded(name)
    model(**batch, **options, lean=lean).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {k for k in want if k.startswith("grad.")} <= {f"grad.{n}" for n in trained}
    for n, p in trained.items():
        grad = want.get(f"grad.{n}", torch.zeros_like(p))  # of a block of one slot nothing leaves a candidate
        assert (p.grad - grad).norm() <= 1e-3 * grad.norm() + 1e-7, n
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.01)
    parts = ["loss", "base_loss", "lattice_ce", "lattice_margin", "lattice_penalty"]
    for step in range(STEPS):
        optimizer.zero_grad()
        _, loss, metrics = model(**batch, **options, lean=lean)
        loss.backward()
        optimizer.step()
        for column, part in enumerate(parts):
            found, of_step = metrics[f"{part}_sum"] / metrics[f"{part}_total"], want["losses"][step, column]
            if of_step or part in ("loss", "base_loss"):  # terms without a weight are not computed there
                torch.testing.assert_close(found, of_step, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_paths_are_modelopts(name):
    "The greedy path of every block."
    model, batch = recorded_drafter(name), packed(name)
    tokens, _, _ = model(**batch, **as_recorded(name), lean=False)
    of_blocks = tokens.view(-1, model.config.block_size)[:, 1:]
    assert torch.equal(of_blocks, recorded(name)["path"])


def test_scores_are_vllms():
    """On what vLLM 0.32's own class and loader made of the same tensors (tests/vllm/check_lilicorr.py): every candidate
    behind every candidate, of whole blocks and of short ones, with and without context."""
    stored = load_file(FIXTURES / "lilicorr_vllm.safetensors")
    sizes = dict(candidate_topk=4, hidden_size=8, num_layers=2, num_heads=2, factor_dim=6, mlp_ratio=1.5)
    config = LiLiCorrSpeculatorConfig(
        transformer_layer_config=Qwen3Config(hidden_size=12, vocab_size=40, rms_norm_eps=1e-6),
        draft_vocab_size=40,
        block_size=6,
        mask_token_id=0,
        **{f"lilicorr_{name}": value for name, value in sizes.items()},
    )
    scorer = LatticeScorer(config)
    scorer.load_state_dict({name: stored[name] for name in scorer.state_dict()})
    for name, slots in (("scores", 5), ("scores_of_a_short_block", 2)):
        cut = [stored[n][:, :slots] for n in ("embeds", "log_probs", "hidden")]
        scores = scorer(*cut, stored["context"], stored["has_context"])
        torch.testing.assert_close(scores, stored[name], rtol=0, atol=1e-5)


# ---- the definitions, by loops


def test_candidates_are_the_likeliest():
    "Whatever the chunk: ids in order, log-probabilities over the whole vocabulary, gradients."
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 4, 6, requires_grad=True), torch.randn(20, 6)
    want = (hidden @ head.T).log_softmax(-1).topk(5, -1)
    weights = torch.randn(3, 4, 5)
    expected = torch.autograd.grad((want.values * weights).sum(), hidden)[0]
    for chunk in (1, 5, None):
        ids, log_probs = likeliest_tokens(hidden, head, 5, chunk)
        assert torch.equal(ids, want.indices)
        torch.testing.assert_close(log_probs, want.values)
        torch.testing.assert_close(torch.autograd.grad((log_probs * weights).sum(), hidden)[0], expected)


def test_features_of_a_cell():
    found = cell_features(torch.tensor([[0.5, 0.25, 0.125]]).log())[0]
    torch.testing.assert_close(found[:, 1], torch.tensor([0.5, 0.25, 0.125]))
    torch.testing.assert_close(found[:, 2].exp(), torch.tensor([1, 0.5, 0.25]))
    assert found[:, 3:].tolist() == [[0, 1], [0.5, 0], [1, 0]]
    assert cell_features(torch.zeros(1, 1)).tolist() == [[[0, 1, 0, 0, 1]]]


def test_paths_and_losses_by_loops():
    g = torch.Generator().manual_seed(0)
    A, S, C = 4, 3, 5
    scores = 3 * torch.randn(A, S, C, C, generator=g)
    place, counted = torch.randint(C, (A, S), generator=g), torch.rand(A, S, generator=g) < 0.7
    gaps = torch.rand(A, S, C, generator=g).scatter(-1, place[..., None], 0)
    rows, path = scores_behind(scores, place), greedy_path(scores)
    sums, n = dict.fromkeys(("lattice_ce", "lattice_margin", "lattice_penalty"), 0.0), 0
    for a in range(A):
        walked = given = 0
        for s in range(S):
            walked = int(scores[a, s, walked].argmax())
            assert path[a, s] == walked
            row = scores[a, s, given]
            assert torch.equal(rows[a, s], row)
            given = int(place[a, s])
            if counted[a, s]:
                probs, others = row.softmax(-1), [float(row[c]) for c in range(C) if c != given]
                sums["lattice_ce"] -= float(probs[given].log())
                sums["lattice_margin"] += max(0.0, 1.5 - (float(row[given]) - max(others)))
                sums["lattice_penalty"] += float((probs * gaps[a, s]).sum())
                n += 1
    found = lattice_losses(rows, place, gaps, counted, margin=1.5)
    assert {name: float(value) for name, value in found.items()} == pytest.approx({k: v / n for k, v in sums.items()})
    assert not any(lattice_losses(rows, place, gaps, counted & False).values())


# ---- training


def random_model(seed, **fixed):
    "A drafter of random shape with random weights, and a random packed row with its anchors."
    g = torch.Generator().manual_seed(seed)
    pick = picker(g)
    fields = dict(
        transformer_layer_config=random_layer(pick),
        draft_vocab_size=V,
        aux_hidden_state_layer_ids=pick([1], [1, 3]),
        block_size=pick(3, 4, 5),
        mask_token_id=29,
        sample_from_anchor=pick(True, False),
        sliding_window_non_causal=pick(True, False),
        lilicorr_candidate_topk=pick(4, 20, 30),
        lilicorr_hidden_size=pick(0, 12),
        lilicorr_factor_dim=pick(3, 8),
        lilicorr_num_heads=pick(1, 4),
        lilicorr_num_layers=pick(1, 2),
        lilicorr_mlp_ratio=pick(1.0, 2.5),
        slot_convolutions=pick(True, False),
        conv_group_size=4,
    )
    config = LiLiCorrSpeculatorConfig(**fields | fixed)
    model = random_drafter(config, g, lambda name: 0.8 if "lilicorr" in name else 0.3)
    with torch.no_grad():
        for name, p in model.lilicorr.named_parameters():
            if name.endswith("bias"):
                p.sub_(p.mean())  # else all vectors are much the same
    return model, random_row(config, g, lengths=[14, 21, 5], trained=0.9)


@pytest.mark.parametrize("seed", range(10))
def test_lean_is_dense(seed):
    "Over random shapes, windows and packings: loss, metrics and gradients, to 1e-5, in float64."
    model, batch = random_model(seed)
    model = model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    options = dict(loss_config={"kl_div": 1.0, "tv": 0.5}, lattice_margin_weight=0.3)
    if seed % 3 == 0:
        options = dict(loss_config="ce", per_position_loss_weight="dpace")
    assert check_lean(model, batch, **options, serving_window=seed % 2 == 0).loss > 0


def test_the_lattice_trains_the_layers():
    "The candidates' log-probabilities are live: without the lattice's terms the layers get another gradient."
    model, batch = random_model(3, sample_from_anchor=False, lilicorr_candidate_topk=30, block_size=4)
    grads = []
    for weight in (0.0, 1.0):
        model.zero_grad()
        model(**batch, lattice_ce_weight=weight, lattice_penalty_weight=0.0)[1].backward()
        grads.append(model.fc.weight.grad.clone())
        assert bool(model.lilicorr.in_head.weight.grad.any()) == bool(weight)
    assert (grads[0] - grads[1]).norm() > 1e-3 * grads[0].norm()


def test_slots_count_up_to_the_first_that_lacks_the_texts_token():
    """And only those of blocks whose slots all carry loss: a lattice of the one likeliest token, and a text that is
    made of the likeliest tokens but for one."""
    model, batch = random_model(5, block_size=4, sample_from_anchor=False, lilicorr_candidate_topk=1)
    batch |= dict(anchor_positions=torch.tensor([3]), anchor_valid=torch.tensor([True]))
    batch["loss_mask"] = torch.ones(1, 40, dtype=torch.bool)
    drafted = model(**batch, lean=False)[0][0, 1:]
    for wrong, length in ((None, 4), (0, 1), (1, 2), (2, 3)):
        ids = batch["input_ids"].clone()
        ids[0, 4:7] = drafted
        if wrong is not None:
            ids[0, 4 + wrong] = (ids[0, 4 + wrong] + 1) % V
        _, _, metrics = model(**batch | dict(input_ids=ids))
        lengths = [metrics[f"{name}eal_sum"] for name in ("", "likeliest_", "lattice_")]
        assert lengths == [length] * 3


# ---- drafting


def block_rows(model, row, features, start, k):
    """Training's rows [k, V] of a block at the last decided token, the drafted tokens in front being those of `row`:
    softmax over the candidates, 0 elsewhere."""
    first = model.config.first_slot
    model.config.block_size = k + first
    with torch.no_grad():
        hidden = served_states(model, row, features, start)[:, first:]
        context = model.context(features[start - 1 : start])
        ids, scores = model.lattice(hidden, context, torch.tensor([True]))
        drafted = row[start + 1 : start + 1 + k]
        place = (ids[0] == drafted[:, None]).int().argmax(-1)
        few = scores_behind(scores, place[None])[0].softmax(-1)
    return torch.zeros(k, model.config.draft_vocab_size).scatter(-1, ids[0], few)


def drafting_case(seed, **fixed):
    "(drafter fed in two parts, tokens, features)"
    model, _ = random_model(seed, **fixed)
    tokens, features, _ = text_and_features(model, seed=seed)
    return read_in_two_parts(model.drafter(), tokens, features), tokens, features


@pytest.mark.parametrize("seed", range(8))
def test_chains_are_what_was_trained(seed):
    """The drafter draws each token from the row that training's pass gives the slot when the drafted tokens are the
    text, in whole blocks and in short ones, which are a prefix; greedy takes its argmax. It drafts no more than it was
    trained to."""
    drafter, tokens, features = drafting_case(40 + seed, sample_from_anchor=seed % 2 == 0, lilicorr_candidate_topk=4)
    model, most = drafter.model, drafter.model.config.speculative_tokens
    k = most - seed % 3 % most
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, torch.Generator().manual_seed(seed)))
    greedy = drafter.propose(tokens, features[11:], k, Sampling())
    assert len(drafter.propose(tokens, features[11:], most + 3, Sampling())) == most
    assert len(tree) == k and tree.parents.tolist() == list(range(-1, k - 1))
    want = block_rows(model, torch.cat([tokens, tree.tokens]), features, 11, k)
    torch.testing.assert_close(tree.probs, want, rtol=1e-4, atol=1e-6)
    assert ((tree.probs > 0).sum(-1) <= 4).all() and (tree.probs[range(k), tree.tokens] > 0).all()
    rows = block_rows(model, torch.cat([tokens, greedy.tokens]), features, 11, k)
    assert greedy.probs is None and torch.equal(rows.argmax(-1), greedy.tokens)


def test_pairs_follow_the_distribution():
    fixed = dict(lilicorr_candidate_topk=5, lilicorr_hidden_size=12, lilicorr_factor_dim=3)
    blocks = dict(sample_from_anchor=True, block_size=2, slot_convolutions=False)
    drafter, tokens, features = drafting_case(73, **fixed | blocks)
    drafter.propose(tokens, features[6:], 2, Sampling())
    check_pairs(lambda g: drafter.propose(tokens, features[11:], 2, Sampling(1.0, g)), 400, common=2)


def test_a_text_of_one_token_has_no_context():
    "The anchor's row is then 0, as in training at the first token of a text."
    model, _ = random_model(7, aux_hidden_state_layer_ids=[1], sample_from_anchor=False)
    tokens = torch.tensor([3])
    tree = model.drafter().propose(tokens, torch.zeros(0, 16), 2, Sampling(1.0, torch.Generator().manual_seed(0)))
    row = torch.cat([tokens, tree.tokens])
    model.config.block_size = 3
    with torch.no_grad():
        hidden = served_states(model, row, torch.zeros(0, 16), 0)[:, 1:]
        ids, scores = model.lattice(hidden, torch.ones(1, 16), torch.tensor([False]))
    want = torch.zeros(V).scatter(-1, ids[0, 0], scores[0, 0, 0].softmax(-1))
    torch.testing.assert_close(tree.probs[0], want)


def fresh_lilicorr(folder, verifier=None, **args):
    sizes = dict(lilicorr_hidden_size=12, lilicorr_factor_dim=6, lilicorr_num_heads=2, lilicorr_candidate_topk=4)
    return fresh("lilicorr", folder, verifier or tiny_verifier(folder), "lilicorr", **sizes | args)


# ---- layouts, bad input, serving


@pytest.mark.parametrize("convolutions", [False, True])
def test_checkpoints_go_both_ways(tmp_path, convolutions):
    "vLLM's layout is written; that, and ModelOpt's names, are read back into the same drafter."
    model = fresh_lilicorr(tmp_path, slot_convolutions=convolutions, conv_group_size=4)
    model.save_pretrained(tmp_path / "ours")
    export_native(tmp_path / "ours", tmp_path / "vllm")
    stored = json.loads((tmp_path / "vllm/config.json").read_text())
    block = stored["dflash_config"]
    assert stored["architectures"] == ["LiLiCorrDraftModel"] and block["lilicorr_enabled"]
    assert block["lilicorr_logit_scale"] == 8 and block["lilicorr_vector_eps"] == 1e-4
    assert ("conv_kernel_size" in block, "conv_group_size" in block) == (convolutions, convolutions)
    tensors = load_file(tmp_path / "vllm/model.safetensors")
    assert "lilicorr.feature_mlp.up_proj.weight" in tensors and "lilicorr.layers.1.attn.in_proj_weight" in tensors
    theirs = tmp_path / "modelopt"
    theirs.mkdir()
    inverse = {new: old for old, new in SEQUENTIAL_NAMES.items()}

    def sequential(name):
        for new, old in inverse.items():
            name = name.replace(new, old) if name.startswith("lilicorr.") else name
        return name

    save_file({sequential(name): w for name, w in tensors.items()}, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(stored))
    assert "lilicorr.feature_mlp.1.weight" in load_file(theirs / "model.safetensors")
    for folder in (tmp_path / "vllm", theirs):
        again = SpeculatorModel.from_pretrained(folder, verifier=tmp_path / "verifier")
        assert type(again) is LiLiCorrDraftModel and again.config.slot_convolutions == convolutions
        state = again.state_dict()
        assert all(torch.equal(state[name], w) for name, w in tensors.items())
    del block["lilicorr_logit_scale"]
    (theirs / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="lilicorr_logit_scale is not in config.json"):
        SpeculatorModel.from_pretrained(theirs, verifier=tmp_path / "verifier")


def test_errors_name_the_field(tmp_path):
    layer = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=1, vocab_size=30)
    layer = Qwen3Config(hidden_size=16, **layer)
    ok = dict(transformer_layer_config=layer, draft_vocab_size=30, aux_hidden_state_layer_ids=[1], mask_token_id=29)
    for wrong, words in (
        (dict(lilicorr_candidate_topk=31), "lilicorr_candidate_topk=31 is more than the verifier's vocabulary of 30"),
        (dict(lilicorr_candidate_topk=0), "lilicorr_candidate_topk=0"),
        (dict(lilicorr_num_heads=3), "lilicorr_num_heads=3 must divide the width of 1024"),
        (dict(lilicorr_hidden_size=0, lilicorr_num_heads=5), "lilicorr_num_heads=5 must divide the width of 16"),
        (dict(lilicorr_vector_eps=0.5), "lilicorr_vector_eps=0.5"),
        (dict(lilicorr_logit_scale=0), "lilicorr_logit_scale=0"),
        (dict(slot_convolutions=True, conv_group_size=5), "conv_group_size=5 must divide the hidden size of 16"),
        (dict(slot_convolutions=True, conv_kernel_size=9), "conv_kernel_size=9 is more than the 8 slots"),
    ):
        with pytest.raises(ValueError, match=words):
            LiLiCorrSpeculatorConfig(**ok | wrong)
    LiLiCorrSpeculatorConfig(**ok, conv_group_size=5)  # not in use
    with pytest.raises(ValueError, match="draft_vocab_size=20 of 30: candidates are tokens of the verifier's whole"):
        LiLiCorrDraftModel(LiLiCorrSpeculatorConfig(**ok | dict(draft_vocab_size=20)))
    for args, words in (
        (dict(lilicorr_candidate_topk=6), "lilicorr_candidate_topk is 6; vLLM's LiLiCorr takes a power of two"),
        (dict(sample_from_anchor=True), "sample_from_anchor is True"),
    ):
        fresh_lilicorr(tmp_path, **args).save_pretrained(tmp_path / "ours")
        with pytest.raises(ValueError, match=words):
            export_native(tmp_path / "ours", tmp_path / "exported")


def test_defaults_are_modelopts_recipe():
    c = LiLiCorrSpeculatorConfig()
    sizes = c.lilicorr_candidate_topk, c.lilicorr_hidden_size, c.lilicorr_factor_dim, c.lilicorr_num_layers
    assert sizes == (8, 1024, 1024, 2) and (c.lilicorr_num_heads, c.lilicorr_mlp_ratio) == (8, 2.0)
    assert (c.lilicorr_logit_scale, c.lilicorr_vector_eps, c.slot_convolutions) == (8.0, 1e-4, False)
    kwargs, _ = LiLiCorrDraftModel.get_trainer_kwargs()
    weights = [kwargs.get(f"lattice_{term}_weight") for term in ("ce", "margin", "penalty")]
    assert weights == [0.25, None, 0.25] and kwargs["lattice_margin"] == 2.0
    assert kwargs["per_position_loss_weight"] == "fixed-exp-decay" and kwargs["loss_config"] == {"ce": 1.0}


def test_serving_says_what_vllm_does(tmp_path):
    fresh_lilicorr(tmp_path).save_pretrained(tmp_path / "ours")
    raw = json.loads((tmp_path / "ours/config.json").read_text())
    (layout,) = LiLiCorrDraftModel.serving_violations(raw)
    assert "own layout" in layout and "V2 model runner" in LiLiCorrDraftModel.serving_warnings(raw)[0]
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2
    assert any("speculative_tokens is 2" in line for line in LiLiCorrDraftModel.serving_violations(raw))
