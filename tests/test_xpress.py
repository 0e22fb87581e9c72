"""XPress against upstream's recorded logits, the lean pass against the dense one, Jacobi passes against drafting one
token after the other, and what is drawn against the distribution that training's pass gives."""

import json
import re
from pathlib import Path

import blocks
import pytest
import torch
from recorded import cases, load_case
from safetensors.torch import load_file
from transformers import Qwen3Config

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert
from speculators_nb.models.dflash import BlockStates
from speculators_nb.models.formats import inverse, rename
from speculators_nb.models.formats_dflash import XPRESS_NAMES
from speculators_nb.models.xpress import RefinerHead, XPressDraftModel, XPressSpeculatorConfig
from speculators_nb.nn.anchors import Blocks
from speculators_nb.serve.serve_command import what_to_serve
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.serve.vllm_contract import check_vllm_contract
from speculators_nb.train.optimizers import MuonAdamW, build_optimizer, parameter_groups

CASES = cases("xpress")


# ---- upstream's recorded numbers (loss, metrics, gradients, steps: test_recorded.py)


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    """Base logits of every slot, and those with the bias of the text's own tokens, to 1e-4 absolute; the tokens in
    front that upstream took, of the text and of its first round."""
    model, batch, _, _, folder = load_case(name)
    want = load_file(folder / "outputs.safetensors")
    anchors = batch["anchor_positions"]
    with torch.no_grad():
        x, hidden = blocks.states_of(model, batch)
        states = BlockStates(x["input_ids"], x["document_ids"], Blocks(anchors, anchors, anchors, anchors), hidden)
        text, base = model.text_in_front(states), model.lm_head(hidden)
        cache = model.refiner_head.cache(hidden)
        assert torch.equal(text, want["previous.0"])
        if "previous.1" in want:
            known = text[:, : model.config.first_slot + 1]
            assert torch.equal(model.draft_in_front(known, model.to_verifier(base.argmax(-1))), want["previous.1"])
        bias = model.refiner_head.readout(model.refiner_head(model.refiner_head.token_embed(text), cache))
    torch.testing.assert_close(base.flatten(0, 1), want["lm_head_out.0"][0], rtol=0, atol=1e-4)
    torch.testing.assert_close((base + bias).flatten(0, 1), want["logits"][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [c for c in CASES if "data" in c or "window" in c])
def test_checkpoints_load_again(name, tmp_path, monkeypatch):
    blocks.check_checkpoints(name, tmp_path, monkeypatch)


# ---- random drafters


def random_model(seed, refiner=0.6, **fixed):
    """A drafter of random shape with random weights, and a random packed row with its anchors. With `refiner` 0.6 the
    bias is as large as the base logits."""
    g = torch.Generator().manual_seed(seed)
    pick = blocks.picker(g)
    fields = dict(
        transformer_layer_config=blocks.random_layer(pick),
        draft_vocab_size=pick(20, blocks.V),
        aux_hidden_state_layer_ids=pick([1], [1, 3]),
        block_size=pick(2, 4, 6),
        mask_token_id=29,
        sample_from_anchor=pick(True, False),
        sliding_window_non_causal=pick(True, False),
        xpress_rank=pick(3, 8),
        xpress_mlp_ratio=pick(1, 2),
    )
    config = XPressSpeculatorConfig(**fields | fixed)
    model = blocks.random_drafter(config, g, lambda name: refiner if "refiner" in name else 0.3)
    return model, blocks.random_row(config, g, (13, 3, 20, 4), trained=0.6, anchors=9)  # many holes


@pytest.mark.parametrize("seed", range(12))
def test_lean_is_dense(seed):
    """Over random shapes, windows and packings, with holes in front of trained slots: loss, metrics and gradients of
    the lean pass are those of the dense one, to 1e-5."""
    model, batch = random_model(seed, refiner=0.3)
    options = dict(loss_config={"kl_div": 0.5, "tv": 0.5})
    if seed % 3 == 0:
        options = dict(loss_config="ce", per_position_loss_weight="dpace", base_anchor_full_weight=True)
    if seed % 2 and model.d2t is None:
        options |= dict(ce_from_data=True, base_anchor_weight=0.0)
    tokens, *_ = blocks.check_lean(model, batch, **options, consistency_passes=4)
    assert tokens.shape == (1, 9 * model.config.block_size)


def test_the_defaults_of_the_step():
    "The mixer starts at 0, and rounds of weight 0 are not run."
    model, batch = random_model(4, draft_vocab_size=30)
    _, loss, metrics = model(**batch)
    parts = {name: float(metrics[f"{name}_sum"] / metrics[f"{name}_total"]) for name in ("tf_loss", "base_anchor_loss")}
    rounds = [float(metrics[f"consistency_round{j}_loss_sum"] / metrics["loss_total"]) for j in range(3)]
    want = parts["tf_loss"] + 0.3 * sum(rounds) / 3 + 0.6 * parts["base_anchor_loss"]
    assert loss.item() == pytest.approx(want, rel=1e-5)
    _, alone, metrics = model(**batch, consistency_weight=0.0, base_anchor_weight=0.0)
    assert alone.item() == pytest.approx(parts["tf_loss"], rel=1e-5)
    assert not any(name.startswith(("consistency", "base")) for name in metrics)
    assert not XPressDraftModel(model.config).refiner_head.mix_l.any()


# ---- drafting


def block_distributions(model, row, features, anchor, k=None):
    """The distributions of the first k slots that predict (None: of all), by training's pass on a block whose text is
    that of `row`."""
    first, head = model.config.first_slot, model.refiner_head
    documents, anchors = torch.zeros(len(row), dtype=torch.long), torch.tensor([anchor])
    with torch.no_grad():
        hidden = blocks.served_states(model, row, features, anchor)
        states = BlockStates(row, documents, Blocks(anchors, anchors, anchors, anchors), hidden)
        codes = head(head.token_embed(model.text_in_front(states)), head.cache(hidden))
        return (model.lm_head(hidden) + head.readout(codes))[0, first:][:k].softmax(-1)


@pytest.mark.parametrize("seed", range(8))
def test_drafting_is_what_was_trained(seed):
    """The drafter, fed in two parts, draws each token from the distribution that training's pass gives the slot when
    the drafted tokens stand in the text; fewer tokens are the first of as many as were trained."""
    model, _ = random_model(40 + seed, sample_from_anchor=seed % 2 == 0)
    k = model.config.speculative_tokens
    tokens, features, g = blocks.text_and_features(model, seed=seed)
    drafter = blocks.read_in_two_parts(model.drafter(), tokens, features)
    tree = drafter.propose(tokens, features[6:], k + 3, Sampling(1.0, g))  # the block ends at k
    assert len(tree) == k and tree.parents.tolist() == list(range(-1, k - 1))
    want = block_distributions(model, torch.cat([tokens, tree.tokens]), features, 11)
    torch.testing.assert_close(blocks.of_draft_vocabulary(model, tree.probs), want, rtol=1e-4, atol=1e-6)
    for shorter in range(1, k):
        again = drafter.propose(tokens, features[:0], shorter, Sampling())
        whole = serial_walk(model, drafter, tokens, features, shorter)
        assert again.tokens.tolist() == whole and again.probs is None


def serial_walk(model, drafter, tokens, features, k):
    "One token after the other, each the likeliest of training's pass on the text and what is drafted so far."
    row = tokens
    for j in range(k):
        probs = block_distributions(model, torch.cat([row, row[:1].expand(k)]), features, len(tokens) - 1)
        row = torch.cat([row, model.to_verifier(probs[j].argmax())[None]])
    return row[len(tokens) :].tolist()


@pytest.mark.parametrize("seed", range(8))
def test_after_m_passes_the_first_m_tokens_are_final(seed):
    "Jacobi passes against the serial walk, which is exact with as many passes as tokens; without one it is not."
    model, _ = random_model(60 + seed, block_size=6, sample_from_anchor=seed % 2 == 0)
    k, drafter = model.config.speculative_tokens, model.drafter()
    tokens, features, _ = blocks.text_and_features(model, seed=seed)
    serial = serial_walk(model, drafter, tokens, features, k)
    for m in range(k + 1):
        model.config.num_jacobi_passes = m
        drafter.reset()
        drafted = drafter.propose(tokens, features, k, Sampling()).tokens.tolist()
        assert drafted[:m] == serial[:m]
        assert m or drafted != serial  # the bias is as large as the logits


def test_a_text_of_one_token():
    "The anchor stands in front of itself, as at a document's start."
    model, _ = random_model(3, sample_from_anchor=False, block_size=4)
    tokens, features, g = torch.tensor([5]), torch.zeros(0, model.fc.in_features), torch.Generator().manual_seed(0)
    tree = model.drafter().propose(tokens, features, 3, Sampling(1.0, g))
    want = block_distributions(model, torch.cat([tokens, tree.tokens]), features, 0)
    torch.testing.assert_close(blocks.of_draft_vocabulary(model, tree.probs), want, rtol=1e-4, atol=1e-5)


def fresh_xpress(folder, verifier, **args):
    return blocks.fresh("xpress", folder, verifier, "refiner_head", **dict(xpress_rank=4) | args)


# ---- optimizers, errors, serving


def test_muon_takes_the_refiners_tables_as_upstream():
    "Matrices of the refiner by Muon, its two tables among them; the mixer, of three dimensions, by AdamW."
    model, batch = random_model(1)
    table = parameter_groups(model, "muon")
    by = table.optimizer[[name for name in table.index if name.startswith("refiner_head.")]]
    assert by.pop("refiner_head.mix_l") == "adamw" and set(by) == {"muon"} and len(by) == 8
    optimizer = build_optimizer(model, "muon", lr=1e-2, row_gradients=True)
    assert isinstance(optimizer, MuonAdamW)
    before = model.refiner_head.token_embed.weight.clone()
    model(**batch)[1].backward()
    assert not model.refiner_head.token_embed.weight.grad.is_sparse
    optimizer.step()
    assert (model.refiner_head.token_embed.weight != before).all()  # Muon moves every row


def test_errors_name_the_field():
    layer = Qwen3Config(vocab_size=30)
    ok = dict(transformer_layer_config=layer, draft_vocab_size=30, aux_hidden_state_layer_ids=[1], mask_token_id=29)
    for wrong in ("xpress_rank=0", "xpress_mlp_ratio=0", "num_jacobi_passes=-1", "block_size=1", "mask_token_id=30"):
        name, value = wrong.split("=")
        with pytest.raises(ValueError, match=wrong):
            XPressSpeculatorConfig(**ok | {name: int(value)})
    model, batch = random_model(1, draft_vocab_size=20)
    with pytest.raises(ValueError, match="ce_from_data=True with draft_vocab_size=20.*whole vocabulary"):
        model(**batch, ce_from_data=True)


def serving(tmp_path, **fields):
    "A drafter with shapes that vLLM's kernels have, but for these fields."
    fields = dict(xpress_rank=16, xpress_mlp_ratio=4) | fields
    model = fresh_xpress(tmp_path, blocks.tiny_verifier(tmp_path), **fields)
    model.save_pretrained(tmp_path / "drafter")
    return model


def test_vllm_serves_it_in_a_layout_of_its_own(tmp_path):
    "By 0.33 alone, from what `save_native` writes; it comes back as it was, and drafts the same."
    model = serving(tmp_path)
    (found,) = check_vllm_contract(tmp_path / "drafter", "0.33")
    assert "save_native" in found and "\n" not in found
    assert "only vLLM 0.33 has XPress" in check_vllm_contract(tmp_path / "drafter", "0.32")[0]
    target = tmp_path / "verifier"
    served, words = what_to_serve(tmp_path / "drafter", native=tmp_path / "native", engine_version="0.33")
    assert served == str(target) and words["method"] == "dflash" and words["num_speculative_tokens"] == 3
    native = json.loads((tmp_path / "native/config.json").read_text())
    assert native["architectures"] == ["Qwen3XPressModel"] and native["xpress_mlp_hidden"] == 64
    assert (native["xpress_block_size"], native["xpress_num_passes"], native["xpress_topc"]) == (
        4,
        6,
        native["vocab_size"],
    )
    back = SpeculatorModel.from_pretrained(convert(tmp_path / "native", tmp_path / "back", target))
    assert all(torch.equal(w, back.saved_state()[name]) for name, w in model.saved_state().items())
    assert back.config.num_jacobi_passes == 6 and back.config.aux_hidden_state_layer_ids
    with pytest.raises(ValueError, match="speculators_model_type='xpress': only vLLM 0.33 has XPress"):
        SpeculativeConfig(model=str(tmp_path / "drafter"), engine_version="0.32")


@pytest.mark.parametrize(
    "fields,wrong",
    [
        (dict(xpress_rank=24), "xpress_rank is 24; vLLM's kernel takes a power of two"),
        (dict(xpress_rank=8, xpress_mlp_ratio=8), "xpress_rank is 8"),
        (dict(xpress_mlp_ratio=3), "xpress_mlp_ratio is 48; vLLM's kernel takes a multiple of 64"),
        (dict(sample_from_anchor=True), "sample_from_anchor is True"),
    ],
)
def test_what_vllms_kernels_have_no_shape_for(tmp_path, fields, wrong):
    model = serving(tmp_path, **fields)
    assert any(wrong in line for line in check_vllm_contract(tmp_path / "drafter", "0.33"))
    with pytest.raises(ValueError, match=re.escape(wrong)):
        model.save_native(tmp_path / "native")
    assert not (tmp_path / "native/config.json").exists()


def test_a_reduced_vocabulary_is_not_exported(tmp_path):
    model, _ = random_model(1, draft_vocab_size=20)
    with pytest.raises(ValueError, match="draft_vocab_size is 20, of the verifier's .* train with that"):
        model.save_native(tmp_path / "native")


def test_the_refiner_is_vllms():
    "The bias by vLLM 0.33's own class, loaded by its own loader from the names that we write."
    stored = load_file(Path(__file__).parent / "fixtures/xpress_vllm.safetensors")
    weights = rename({n: w for n, w in stored.items() if n.startswith("xpress_head.")}, inverse(XPRESS_NAMES))
    r, B, _ = weights["refiner_head.mix_l"].shape
    (V, _), (_, H) = weights["refiner_head.token_embed.weight"].shape, weights["refiner_head.down_h.weight"].shape
    head = RefinerHead(V, V, H, B, r, len(weights["refiner_head.mlp_gate.weight"]) // r)
    head.load_state_dict({name.removeprefix("refiner_head."): w for name, w in weights.items()})
    with torch.no_grad():
        codes = head(head.token_embed(stored["in_front"]), head.cache(stored["hidden"]))
        torch.testing.assert_close(head.readout(codes), stored["bias"], rtol=1e-5, atol=1e-5)


def test_defaults_are_the_documented_ones():
    c = XPressSpeculatorConfig()
    assert (c.xpress_rank, c.xpress_mlp_ratio, c.num_jacobi_passes, c.sample_from_anchor) == (256, 2, 6, False)
    assert SpeculatorModel.registered_class("xpress") is XPressDraftModel
    arguments = XPressDraftModel.training_arguments()
    assert (arguments["block_size"], arguments["max_anchors"]) == (16, 512)
    kwargs, evaluation = XPressDraftModel.get_trainer_kwargs()
    assert kwargs == evaluation and kwargs["loss_config"] == {"ce": 0.1, "tv": 0.9}
    assert (kwargs["consistency_weight"], kwargs["consistency_passes"], kwargs["base_anchor_weight"]) == (0.3, 3, 0.6)
    assert (kwargs["gamma"], kwargs["per_position_loss_weight"]) == (4.0, "fixed-exp-decay")
    assert not {"ce_from_data", "base_anchor_full_weight"} & kwargs.keys()  # off
    assert XPressDraftModel.get_trainer_kwargs(ce_from_data=True, consistency_weight=0.0)[0]["ce_from_data"]
