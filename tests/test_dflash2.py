"""DFlash2 against upstream's recorded candidates, against definitions by loops, and the lean pass against the dense
one; drafting's distributions, chains and trees, against training's; serving rules. Loss, metrics, gradients, five
optimizer steps and config.json are held to upstream in test_recorded.py."""

import json

import pytest
import torch
from blocks import (
    V,
    check_checkpoints,
    check_lean,
    check_pairs,
    picker,
    random_drafter,
    random_layer,
    random_row,
    read_in_two_parts,
    served_states,
    states_of,
    text_and_features,
)
from recorded import FIXTURES, cases, load_case
from safetensors.torch import load_file
from transformers import GPT2Config, Qwen3Config

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.dflash import BlockStates, DFlashDraftModel, DFlashSpeculatorConfig
from speculators_nb.models.dflash2 import (
    CandidateSelector,
    DFlash2DraftModel,
    DFlash2SpeculatorConfig,
    SlotConvolution,
    convolve,
)
from speculators_nb.nn.token_loss import candidate_logits, find_candidates

CASES = cases("dflash2")


def blocks_of(model, batch):
    "The packed row, its blocks with their states, and the selector's codes."
    x, hidden = states_of(model, batch)
    drawn = batch["anchor_positions"], batch["anchor_valid"]
    blocks = model.blocks(x["loss_mask"], x["document_ids"], 1, *drawn, cross_document=True, lean=False)
    states = BlockStates(x["input_ids"], x["document_ids"], blocks, hidden)
    return x, states._replace(bias=model.slot_bias(states))


def test_cases_cover_the_corners():
    "The configurations that parity is shown on."
    found = {name: json.loads((FIXTURES / name / "outputs.json").read_text())["training_args"] for name in CASES}
    assert len(CASES) == 10
    assert {args.get("sample_from_anchor", False) for args in found.values()} == {True, False}
    assert {args["per_position_loss_weight"] for args in found.values()} == {"fixed-exp-decay", "dpace"}
    assert {args.get("conv_kernel_size", 2) for args in found.values()} == {1, 2, 3, 8}


@pytest.mark.parametrize("name", CASES)
def test_candidates_are_upstreams(name):
    """Unary logits to 1e-4; of the slots with loss: the same candidate ids in the same places (before any loss, since a
    tie would decide which one the answer replaces), the same tokens in front, scores to 1e-4."""
    model, batch, _, info, folder = load_case(name)
    want = load_file(folder / "outputs.safetensors")
    top_k = info["training_args"]["selector_top_k"]
    with torch.no_grad():
        x, block_states = blocks_of(model, batch)
        blocks, hidden, bias = block_states.blocks, block_states.hidden, block_states.bias
        logits = model.lm_head(hidden)
        torch.testing.assert_close(logits.flatten(0, 1), want["lm_head_out.0"][0], rtol=0, atol=1e-4)
        counted = blocks.supervised.flatten()
        shape = blocks.supervised.shape
        if name == "dflash2_empty_mask":
            assert not counted.any()
            return
        states = hidden[blocks.supervised]
        targets = x["verifier_last_hidden_states"][blocks.targets[blocks.supervised]]
        found = find_candidates(states, model.lm_head.weight, model.target_head, targets, top_k, chunk=5)
        assert torch.equal(found.ids, want["candidates"][0][counted])
        in_front = x["input_ids"][blocks.targets[blocks.supervised]]
        assert torch.equal(in_front, want["predecessors"].view(shape)[blocks.supervised])
        unary = candidate_logits(states, model.lm_head.weight, found.ids, chunk=3)
        scores = model.candidate_selector.scores(unary, bias.codes[blocks.supervised], found.ids)
        torch.testing.assert_close(scores, want["candidate_logits"][0][counted], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_load_again(name, tmp_path, monkeypatch):
    check_checkpoints(name, tmp_path, monkeypatch)


# ---- the definitions, by loops


def test_a_convolution_is_its_sentence():
    """out[t, c] = sum over taps of (base[side, tap, c] + delta[t, side, tap, group of c]) x[t - tap, c], only within a
    block; the projection is read as (side, tap, group)."""
    g = torch.Generator().manual_seed(0)
    for blocks, slots, groups, size, taps in ((3, 4, 2, 3, 2), (2, 3, 1, 5, 3), (1, 5, 4, 1, 5), (2, 2, 3, 2, 1)):
        H = groups * size
        module = SlotConvolution(H, taps, size)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=g))
            x, y = torch.randn(2, blocks, slots, H, generator=g)
            delta = module.kernel_projection(x)
            for side, kernel in enumerate(module(x)):
                out = convolve(y, kernel)
                for b in range(blocks):
                    for t in range(slots):
                        for c in range(H):
                            want = 0.0
                            for tap in range(min(t, taps - 1) + 1):
                                own = delta[b, t, (side * taps + tap) * groups + c // size]
                                want += (module.base_kernel[side, tap, c] + own) * y[b, t - tap, c]
                            assert out[b, t, c] == pytest.approx(float(want), abs=1e-4)


def test_a_score_is_its_sentence():
    "score(b | a, h) = unary(b) + sum over r of P[a] (W h) S[b]."
    torch.manual_seed(0)
    selector = CandidateSelector(9, 5, 3, 1.0)
    hidden, previous, ids, unary = (
        torch.randn(4, 5),
        torch.randint(9, (4,)),
        torch.randint(9, (4, 2)),
        torch.randn(4, 2),
    )
    with torch.no_grad():
        scores = selector.scores(unary, selector(hidden, previous), ids)
        for n in range(4):
            wh = selector.hidden_projection.weight @ hidden[n]
            for c in range(2):
                product = selector.predecessor_codebook[previous[n]] * wh * selector.successor_codebook[ids[n, c]]
                assert scores[n, c] == pytest.approx(float(unary[n, c] + product.sum()), abs=1e-5)


def test_convolution_and_scores_are_vllms():
    """On what vLLM 0.32's own functions computed (tests/vllm/check_dflash2.py): both convolutions, and every candidate
    behind every candidate of the slot before (behind the anchor for the first), to 1e-5."""
    t = load_file(FIXTURES / "dflash2_vllm.safetensors")
    _, taps, H = t["base"].shape
    blocks, slots, top_k = t["unary"].shape
    module = SlotConvolution(H, taps, 4)
    module.load_state_dict({"base_kernel": t["base"], "kernel_projection.weight": t["projection"]})
    x = t["x"].view(blocks, slots, H)
    with torch.no_grad():
        for name, kernel in zip(("front", "behind"), module(x)):
            torch.testing.assert_close(convolve(x, kernel).flatten(0, 1), t[name], rtol=1e-5, atol=1e-5)
        selector = CandidateSelector(40, H, 6, 0.02)
        names = ("predecessor_codebook", "successor_codebook")
        selector.load_state_dict({n: t[n] for n in names} | {"hidden_projection.weight": t["hidden_projection"]})
        first = t["anchors"][:, None, None].expand(-1, 1, top_k)
        previous = torch.cat([first, t["candidates"][:, :-1]], 1)  # [blocks, slots, C]
        codes = selector(x[:, :, None].expand(-1, -1, top_k, -1), previous)
        behind_each = [y[:, :, None].expand(-1, -1, top_k, -1) for y in (t["unary"], t["candidates"])]
        scores = selector.scores(behind_each[0], codes, behind_each[1])
        torch.testing.assert_close(scores, t["edges"], rtol=1e-5, atol=1e-5)


def test_a_fresh_drafter_is_dflash():
    "Convolutions that do nothing: the states are DFlash's, bit for bit, whatever the initialisation drew."
    for seed in range(3):
        model, batch = random_model(seed, moved=False)
        fields = {
            k: v
            for k, v in model.config.to_dict().items()
            if not k.startswith(("conv_", "selector_", "speculators_", "architectures"))
        }
        dflash = DFlashDraftModel(DFlashSpeculatorConfig(**fields))
        dflash.load_state_dict(model.state_dict(), strict=False)
        dflash.target_head = model.target_head
        _, loss, metrics = model(**batch, loss_config="kl_div")
        plain = dflash(**batch, loss_config="kl_div")
        unary = metrics["unary_loss_sum"] / metrics["unary_loss_total"]
        assert unary.item() == pytest.approx(plain.loss.item(), rel=1e-6)
        assert (loss > unary) == (model.config.selector_top_k > 1)  # of one candidate there is no choice


# ---- lean and dense


def random_model(seed, moved=True, **fixed):
    "A drafter of random shape with random weights, and a random packed row with its anchors."
    g = torch.Generator().manual_seed(seed)
    pick = picker(g)
    fields = dict(
        transformer_layer_config=random_layer(pick),
        draft_vocab_size=V,
        aux_hidden_state_layer_ids=pick([1], [1, 3]),
        block_size=pick(2, 4, 5),
        mask_token_id=29,
        sample_from_anchor=pick(True, False),
        sliding_window_non_causal=pick(True, False),
        conv_kernel_size=pick(1, 2),
        conv_group_size=pick(1, 4, 16),
        selector_rank=pick(1, 5),
        selector_top_k=pick(1, 4, 30),
    )
    config = DFlash2SpeculatorConfig(**fields | fixed)
    model = random_drafter(config, g, lambda name: 0.9 if "selector" in name else 0.3)
    if not moved:
        for layer in model.layers:
            layer.attention_conv.reset(), layer.mlp_conv.reset()
    return model, random_row(config, g)


@pytest.mark.parametrize("seed", range(10))
def test_lean_is_dense(seed):
    """Over random shapes, windows and packings: loss, metrics and gradients of the lean pass are those of the dense
    one, to 1e-5; in float64, since these random weights make gradients that float32 has to 2e-5 only."""
    model, batch = random_model(seed)
    model = model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    weights = dict(loss_config={"kl_div": 1.0, "tv": 0.5}, selector_loss_alpha=0.4)
    if seed % 3 == 0:
        weights = dict(loss_config="ce", per_position_loss_weight="dpace")
    assert check_lean(model, batch, **weights, serving_window=seed % 2 == 0).loss > 0


def test_the_selector_trains_the_layers():
    "The unary logits of its candidates are live: with the unary loss taken away the layers still get a gradient."
    model, batch = random_model(3, sample_from_anchor=False, selector_top_k=4)
    grads = []
    for alpha in (0.0, 1.0):
        model.zero_grad()
        model(**batch, selector_loss_alpha=alpha)[1].backward()
        grads.append(model.fc.weight.grad.clone())
        assert model.candidate_selector.successor_codebook.grad.any() == bool(alpha)
    assert (grads[0] - grads[1]).norm() > 1e-3 * grads[0].norm()


# ---- drafting


def block_rows(model, row, features, start, k):
    """Training's rows [k, V] of a block at the last decided token, the drafted tokens in front being those of `row`:
    softmax over the candidates, 0 elsewhere."""
    first = model.config.first_slot
    model.config.block_size = k + first
    with torch.no_grad():
        hidden = served_states(model, row, features, start)[0, first:]
        unary, ids = model.lm_head(hidden).topk(model.config.selector_top_k, -1)
        codes = model.candidate_selector(hidden, row[start : start + k])
        few = model.candidate_selector.scores(unary, codes, ids).softmax(-1)
    return torch.zeros(k, model.config.draft_vocab_size).scatter(-1, ids, few)


def drafting_case(seed, **fixed):
    "(drafter fed in two parts, tokens, features)"
    model, _ = random_model(seed, **fixed)
    tokens, features, _ = text_and_features(model, seed=seed)
    return read_in_two_parts(model.drafter(), tokens, features), tokens, features


@pytest.mark.parametrize("seed", range(8))
def test_chains_are_what_was_trained(seed):
    """The drafter draws each token from the row that training's pass gives the slot when the drafted tokens are the
    text (sliding windows as the engine counts them); greedy takes its argmax."""
    drafter, tokens, features = drafting_case(40 + seed, sample_from_anchor=seed % 2 == 0, selector_top_k=4)
    model, k = drafter.model, drafter.model.config.speculative_tokens
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, torch.Generator().manual_seed(seed)))
    assert len(tree) == k and tree.parents.tolist() == list(range(-1, k - 1))
    want = block_rows(model, torch.cat([tokens, tree.tokens]), features, 11, k)
    torch.testing.assert_close(tree.probs, want, rtol=1e-4, atol=1e-6)
    assert ((tree.probs > 0).sum(-1) <= 4).all() and (tree.probs[range(k), tree.tokens] > 0).all()
    greedy = drafter.propose(tokens, features[11:], k, Sampling())
    rows = block_rows(model, torch.cat([tokens, greedy.tokens]), features, 11, k)
    assert greedy.probs is None and torch.equal(rows.argmax(-1), greedy.tokens)


def test_pairs_follow_the_distribution():
    drafter, tokens, features = drafting_case(
        63, selector_top_k=5, selector_rank=5, sample_from_anchor=True, block_size=2, conv_kernel_size=1
    )
    drafter.propose(tokens, features[6:], 2, Sampling())
    check_pairs(lambda g: drafter.propose(tokens, features[11:], 2, Sampling(1.0, g)), 400, common=2)


# ---- bad input, serving


def test_errors_name_the_field():
    layer = Qwen3Config(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=1, vocab_size=30
    )
    ok = dict(transformer_layer_config=layer, draft_vocab_size=30, aux_hidden_state_layer_ids=[1], mask_token_id=29)
    for wrong, words in (
        (dict(conv_group_size=3), "conv_group_size=3 must divide the hidden size of 16"),
        (dict(conv_group_size=0), "conv_group_size=0: must be at least 1"),
        (dict(conv_kernel_size=9), "conv_kernel_size=9 is more than the 8 slots"),
        (dict(conv_kernel_size=0), "conv_kernel_size=0: must be at least 1"),
        (dict(selector_rank=0), "selector_rank=0: must be at least 1"),
        (dict(selector_top_k=31), "selector_top_k=31 is more than the verifier's vocabulary of 30"),
        (dict(selector_top_k=0), "selector_top_k=0: must be at least 1"),
        (dict(mask_token_id=30), "mask_token_id=30"),
        (dict(transformer_layer_config=GPT2Config(vocab_size=30)), "model_type"),
    ):
        with pytest.raises(ValueError, match=words):
            DFlash2SpeculatorConfig(**ok | wrong)
    DFlash2SpeculatorConfig(**ok)
    with pytest.raises(ValueError, match="draft_vocab_size=20 of 30: candidates are tokens of the verifier's whole"):
        DFlash2DraftModel(DFlash2SpeculatorConfig(**ok | dict(draft_vocab_size=20)))
    model, batch = random_model(1)
    with pytest.raises(ValueError, match="dpace"):
        model(**batch, per_position_loss_weight="dpace", loss_config={"kl_div": 0.5, "tv": 0.5})


def test_serving_violations():
    layer = dict(
        model_type="qwen3",
        layer_types=["full_attention"],
        hidden_act="silu",
        sliding_window=None,
        max_position_embeddings=128,
    )
    good = dict(
        transformer_layer_config=layer,
        mask_token_id=3,
        aux_hidden_state_layer_ids=[1, 2],
        draft_vocab_size=30,
        block_size=4,
        sample_from_anchor=False,
        sliding_window_non_causal=True,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=8,
        selector_top_k=4,
        speculators_config=dict(proposal_methods=[dict(speculative_tokens=3)]),
    )

    def proposing(k):
        return dict(speculators_config=dict(proposal_methods=[dict(speculative_tokens=k)]))

    slides = dict(transformer_layer_config=layer | dict(layer_types=["sliding_attention"], sliding_window=64))
    mixed = dict(
        transformer_layer_config=layer | dict(layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    )
    check = DFlash2DraftModel.serving_violations
    without = {k: v for k, v in good.items() if k != "sliding_window_non_causal"}
    causal = good | slides | dict(sliding_window_non_causal=False)
    # the runner that serves it knows mixed layers; a causal block does not see the masks that are missing
    for fine in (good, good | mixed, without, without | mixed, causal, causal | proposing(2)):
        assert check(fine) == [], fine
    for wrong, words in (
        (dict(sample_from_anchor=True), "sample_from_anchor is True"),
        (proposing(2), "speculative_tokens is 2, but slots were trained to attend to all 3 masks"),
        (proposing(4), "speculative_tokens is 4, but a block of 4 was trained to draft 3"),
        (dict(sliding_window_non_causal=False), "sliding_window_non_causal is False"),
        (mixed | dict(sliding_window_non_causal=False), "sliding_window_non_causal is False"),
        (dict(mask_token_id=None), "mask_token_id"),
        (dict(transformer_layer_config=layer | dict(hidden_act="gelu")), "hidden_act"),
    ):
        found = check(good | wrong)
        assert len(found) == 1 and words in found[0], found
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        assert check({k: v for k, v in good.items() if k != name}) == [f"{name} is not written; vLLM requires it"]
    assert "V2 model runner" in DFlash2DraftModel.serving_warnings(good)[0]
    assert DFlash2DraftModel.vllm_method() == ("dflash", True)


def test_defaults_are_the_documented_ones():
    c = DFlash2SpeculatorConfig()
    assert (c.conv_kernel_size, c.conv_group_size, c.selector_rank, c.selector_top_k) == (2, 16, 256, 16)
    assert (c.block_size, c.sample_from_anchor, c.sliding_window_non_causal) == (8, False, True)
    assert (c.speculators_model_type, c.architectures) == ("dflash2", ["DFlash2DraftModel"])
    assert c.speculative_tokens == 7 and SpeculatorModel.registered_class("dflash2") is DFlash2DraftModel
    kwargs, evaluation = DFlash2DraftModel.get_trainer_kwargs()
    assert kwargs == evaluation and kwargs["loss_config"] == {"kl_div": 1.0}
    assert (kwargs["gamma"], c.max_anchors, kwargs["dpace_alpha"]) == (4.0, 512, 0.5)
    assert (kwargs["per_position_loss_weight"], kwargs["selector_loss_alpha"]) == ("fixed-exp-decay", 1.0)
    assert DFlash2DraftModel.training_arguments()["sliding_window_non_causal"] is True
