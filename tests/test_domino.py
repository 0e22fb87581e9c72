"""Domino against SpecForge's recorded numbers, against a definition by loops, the lean pass against the dense one;
drafting against training's pass, and checkpoints of SpecForge's layout."""

import json

import pytest
import torch
from blocks import (
    V,
    check_lean,
    check_pairs,
    dense_states,
    fresh,
    of_draft_vocabulary,
    picker,
    random_drafter,
    random_layer,
    random_row,
    read_in_two_parts,
    served_states,
    states_of,
    text_and_features,
    tiny_verifier,
)
from safetensors.torch import load_file, save_file
from specforge_domino import (
    CASES,
    FIXTURE,
    GRADIENTS_AT,
    MASK_TOKEN,
    STEPS,
    TOTAL_STEPS,
    drawn_batch,
    drawn_weights,
    layer_fields,
)
from specforge_domino import V as RECORDED_V
from torch.nn import functional as F
from transformers import Qwen3Config

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import export_native
from speculators_nb.models.dflash import BlockStates
from speculators_nb.models.domino import DominoDraftModel, DominoSpeculatorConfig, base_weight
from speculators_nb.nn.anchors import Blocks
from speculators_nb.train.trainer import train

# ---- SpecForge's recorded numbers


def recorded_drafter(name):
    "Our drafter with the weights of a case."
    case = CASES[name]
    config = DominoSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**layer_fields(case)),
        draft_vocab_size=RECORDED_V,
        block_size=case.block_size,
        mask_token_id=MASK_TOKEN,
        aux_hidden_state_layer_ids=list(range(1, 1 + case.features)),
        sample_from_anchor=case.shift_label,
        emb_dim=case.emb_dim,
        gru_hidden_dim=case.gru_hidden_dim,
        pure_draft_prefix_len=case.pure_draft_prefix_len,
    )
    model = DominoDraftModel(config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if not n.startswith("target_head")}
    weights = drawn_weights(name, shapes)
    model.load_state_dict(weights, strict=False)
    model.target_head.set_rows(weights["lm_head.weight"])
    for n in ("embed_tokens", "lm_head"):
        model.get_submodule(n).requires_grad_(False)
    return model.train()


def packed(name):
    """The batch of a case as one row. With `shift_label` SpecForge masks the token that a slot predicts, our row the
    place of the slot, one before it."""
    case, batch = CASES[name], drawn_batch(name)
    texts, length = batch["input_ids"].shape
    mask = batch["loss_mask"].bool()
    if case.shift_label:
        mask = F.pad(mask[:, 1:], (0, 1))
    rows = {n: batch[n].flatten(0, 1)[None] for n in ("input_ids", "hidden_states")}
    return rows | dict(
        loss_mask=mask.flatten()[None],
        document_ids=torch.arange(texts).repeat_interleave(length)[None],
        position_ids=torch.arange(length).repeat(texts)[None],
        verifier_last_hidden_states=torch.zeros(1, texts * length, rows["hidden_states"].shape[-1] // case.features),
        anchor_positions=(batch["anchors"] + length * torch.arange(texts)[:, None]).flatten(),
    )


def as_recorded(name):
    "Arguments of `forward` with which a step is SpecForge's."
    case = CASES[name]
    decay = case.loss_decay_gamma
    weights = dict(gamma=decay) if decay else dict(step_weights=[1.0] * case.block_size)
    schedule = dict(lambda_base_start=case.lambda_start, lambda_base_decay_ratio=case.decay_ratio)
    return schedule | weights | dict(loss_config="ce", ce_from_data=True, serving_window=True)


# by day the lean path, which is the dense one (test_lean_is_dense)
@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["lean", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_specforges(name, lean):
    "Gradients on the drawn weights to 1e-3; then five steps of AdamW, whose losses are SpecForge's to 1e-5."
    want = {k.removeprefix(f"{name}/"): v for k, v in load_file(FIXTURE).items() if k.startswith(f"{name}/")}
    model, batch, options = recorded_drafter(name), packed(name), as_recorded(name)
    model(**batch, **options, lean=lean, progress=GRADIENTS_AT / TOTAL_STEPS).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {k.removeprefix("grad.") for k in want if k.startswith("grad.")}
    for n, p in trained.items():
        assert (p.grad - want[f"grad.{n}"]).norm() <= 1e-3 * want[f"grad.{n}"].norm(), n
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        _, loss, metrics = model(**batch, **options, lean=lean, progress=step / TOTAL_STEPS)
        loss.backward()
        optimizer.step()
        for column, part in enumerate(("loss", "final_loss", "base_loss")):
            if part == "base_loss" and not base_weight(step / TOTAL_STEPS, CASES[name].lambda_start):
                continue  # it is not computed where it has no weight
            found = metrics[f"{part}_sum"] / metrics[f"{part}_total"]
            torch.testing.assert_close(found, want["losses"][step, column], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_drafted_tokens_are_specforges(name):
    "Greedy drafts of every block, from training's states: SpecForge drafts one token less than a block has slots."
    model, batch = recorded_drafter(name).eval(), packed(name)
    want = load_file(FIXTURE)[f"{name}/drafted"]
    x = {n: batch[n][0] for n in ("input_ids", "hidden_states", "document_ids", "position_ids")}
    with torch.no_grad():
        hidden = dense_states(
            model,
            x["input_ids"],
            x["hidden_states"],
            batch["anchor_positions"],
            x["document_ids"],
            x["position_ids"],
            serving_window=True,
        )
    for anchor, states, tokens in zip(batch["anchor_positions"], hidden, want, strict=True):
        drafter = model.drafter()
        drafter.read_block = lambda *_, states=states: states
        tree = drafter.propose(x["input_ids"][: anchor + 1], None, len(states) - 1, Sampling())
        assert torch.equal(tree.tokens, tokens)


# ---- training


def random_model(seed, **fixed):
    "A drafter of random shape with random weights, and a random packed row with its anchors."
    g = torch.Generator().manual_seed(seed)
    pick = picker(g)
    fields = dict(
        transformer_layer_config=random_layer(pick),
        draft_vocab_size=pick(20, V),
        aux_hidden_state_layer_ids=pick([1], [1, 3]),
        block_size=pick(3, 4, 5),
        mask_token_id=29,
        sample_from_anchor=pick(True, False),
        sliding_window_non_causal=pick(True, False),
        emb_dim=pick(3, 5),
        gru_hidden_dim=pick(4, 7),
        pure_draft_prefix_len=pick(0, 1),
    )
    config = DominoSpeculatorConfig(**fields | fixed)
    return random_drafter(config, g), random_row(config, g)


@pytest.mark.parametrize("seed", range(12))
def test_lean_is_dense(seed):
    "Loss, metrics and gradients, over random shapes, windows, packings and places in the curriculum."
    model, batch = random_model(100 + seed)
    options = dict(loss_config={"kl_div": 1.0, "tv": 0.5}) if seed % 3 else dict(loss_config="ce")
    check_lean(model, batch, **options, progress=[None, 0.0, 0.3, 0.9][seed % 4], serving_window=seed % 3 == 0)


def correction(model, batch):
    "What is added to the logits of each slot of each block, [A, B, Vd]."
    x, hidden = states_of(model, batch)
    anchors = batch["anchor_positions"]
    states = BlockStates(x["input_ids"], x["document_ids"], Blocks(anchors, anchors, anchors, anchors), hidden)
    bias = model.slot_bias(states)
    return F.linear(bias.codes, bias.weight)


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("pure", [0, 1, 2])
@torch.no_grad()
def test_correction_knows_the_tokens_in_front_alone(from_anchor, pure):
    """Another token in the text changes the corrections of exactly the slots that predict what is behind it, in the
    blocks that have read it and not elsewhere; the first slots have none."""
    fixed = dict(
        block_size=5, sample_from_anchor=from_anchor, pure_draft_prefix_len=pure, aux_hidden_state_layer_ids=[1]
    )
    model, batch = random_model(7, **fixed)
    batch["anchor_positions"] = torch.tensor([3, 12, 20])
    before, first = correction(model, batch), int(not from_anchor)
    assert not before[:, : first + pure].any() and before[:, first + pure :].any(-1).all()
    # the block at 12 reads token 12 as its anchor: what it attends to is kept, so that the correction alone moves
    _, hidden = states_of(model, batch)
    model.block_hidden = lambda *_, **__: hidden
    for distance in range(5):
        ids = batch["input_ids"].clone()
        ids[0, 12 + distance] = (ids[0, 12 + distance] + 1) % V
        changed = (correction(model, batch | dict(input_ids=ids)) != before).any(-1)
        expected = torch.zeros(3, 5, dtype=torch.bool)
        expected[1, max(first + distance, first + pure) :] = True
        assert torch.equal(changed, expected), distance


def test_the_curriculum_is_read_from_the_trainers_steps(tmp_path):
    "Each step's weight of the base loss is that of its place in the run; an evaluation reports both losses, unmixed."
    tiny_verifier(tmp_path)
    model = fresh_domino(tmp_path)
    g, seen = torch.Generator().manual_seed(0), []
    sample = dict(
        input_ids=torch.randint(V - 1, (30,), generator=g),
        loss_mask=torch.ones(30, dtype=torch.bool),
        hidden_states=torch.randn(30, model.fc.in_features, generator=g),
        verifier_last_hidden_states=torch.randn(30, 16, generator=g),
    )
    forward = model.forward
    model.forward = lambda *a, **options: seen.append(options.get("progress")) or forward(*a, **options)
    trainer = train(
        model,
        [sample],
        [sample],
        output_dir=str(tmp_path / "run"),
        total_seq_len=32,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=False,
        disable_tqdm=True,
        max_anchors=6,
    )
    assert seen == [0.0, 0.25, 0.5, 0.75, None]
    log = [row for row in trainer.state.log_history if "final_loss" in row]
    for row, weight in zip(log, (1, 0.5), strict=False):
        mixed = (1 - weight) * row["final_loss"] + weight * row["base_loss"]
        assert row["loss"] == pytest.approx(mixed, rel=1e-4)
    evaluated = next(row for row in trainer.state.log_history if "eval_loss" in row)
    assert evaluated["eval_loss"] == pytest.approx(evaluated["eval_final_loss"], rel=1e-5)
    assert evaluated["eval_base_loss"] != evaluated["eval_final_loss"]


# ---- drafting


@pytest.mark.parametrize("seed", range(8))
def test_drafting_is_what_was_trained(seed):
    """The drafter, fed in two parts, draws each token from the distribution that training's pass gives the slot when
    the drafted tokens are in the text (sliding windows as the engine counts them), however few are wanted."""
    model, _ = random_model(40 + seed, sample_from_anchor=seed % 2 == 0)
    most, n = model.config.speculative_tokens, 12
    k = most - seed % 3 % most
    tokens, features, g = text_and_features(model, n, seed)
    drafter = read_in_two_parts(model.drafter(), tokens, features)
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    assert len(tree) == k and tree.parents.tolist() == list(range(-1, k - 1))
    row, anchors = torch.cat([tokens, tree.tokens, tokens[:most]]), torch.tensor([n - 1])
    with torch.no_grad():
        hidden = served_states(model, row, features, n - 1)
        states = BlockStates(row, torch.zeros(len(row)), Blocks(anchors, anchors, anchors, anchors), hidden)
        bias = model.slot_bias(states)
        logits = model.lm_head(hidden) + F.linear(bias.codes, bias.weight)
    first = model.config.first_slot
    want = logits[0, first : first + k].softmax(-1)
    torch.testing.assert_close(of_draft_vocabulary(model, tree.probs), want, rtol=1e-4, atol=1e-6)
    assert len(drafter.propose(tokens, features[n - 1 :], most + 3, Sampling())) == most


def test_pairs_follow_the_distribution():
    fixed = dict(draft_vocab_size=V, sample_from_anchor=True, pure_draft_prefix_len=1, aux_hidden_state_layer_ids=[1])
    model, _ = random_model(62, **fixed)
    with torch.no_grad():
        for p in (*model.prefix_gru.parameters(), *model.embed_proj.parameters()):
            p.mul_(3)
    tokens, features, _ = text_and_features(model, 6)
    drafter = model.drafter()
    with torch.no_grad():
        states = drafter.read_block(tokens, features, drafter.trained_tokens)
    drafter.read_block = lambda *_: states  # computed once; what is drawn is drawn anew
    check_pairs(lambda g: drafter.propose(tokens, features, 2, Sampling(1.0, g)), 1200, common=3)


def fresh_domino(folder, verifier=None, **args):
    verifier = verifier or tiny_verifier(folder)
    return fresh("domino", folder, verifier, "embed_proj", **dict(emb_dim=5, gru_hidden_dim=6) | args)


# ---- checkpoints, bad input, serving


@pytest.mark.parametrize("early", [False, True])
def test_checkpoints_of_specforge(tmp_path, early):
    """A folder as SpecForge exports it is read, also with the names of its first drafters, and written again; the
    drafter drafts as many tokens as SGLang."""
    hf = tiny_verifier(tmp_path)
    model = fresh_domino(tmp_path, hf, target_layer_ids=[1, 3])
    state = {n: w for n, w in model.saved_state().items() if not n.startswith(("embed_tokens", "lm_head"))}
    heads = "prefix_gru", "embed_proj"
    renamed = {f"logit_head.{n}" if early and n.startswith(heads) else n: w for n, w in state.items()}
    layer = model.config.transformer_layer_config.to_dict()
    raw = {n: v for n, v in layer.items() if n not in ("architectures", "transformers_version")}
    block = dict(mask_token_id=1, target_layer_ids=[0, 2], projector_type="domino", pure_draft_prefix_len=1)
    block |= dict(emb_dim=5, gru_hidden_dim=6, shift_label=True)
    raw |= dict(architectures=["DominoDraftModel"], block_size=4, dflash_config=block, num_target_layers=4)
    (source := tmp_path / "released").mkdir()
    save_file(renamed, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(raw))
    again = SpeculatorModel.from_pretrained(source, verifier=tmp_path / "verifier")
    assert type(again) is DominoDraftModel and again.config.proposed_tokens == 3
    assert (again.config.sample_from_anchor, again.config.aux_hidden_state_layer_ids) == (True, [1, 3])
    assert all(torch.equal(again.state_dict()[n], w) for n, w in state.items())
    again.save_pretrained(tmp_path / "ours")
    exported = export_native(tmp_path / "ours", tmp_path / "exported")
    stored = json.loads((tmp_path / "exported/config.json").read_text())
    assert stored["architectures"] == ["DFlashDraftModel"] and block.items() <= stored["dflash_config"].items()
    assert load_file(tmp_path / "exported/model.safetensors").keys() == state.keys(), exported


def test_errors_name_the_field(tmp_path):
    layer = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=1, vocab_size=30)
    layer = Qwen3Config(hidden_size=16, **layer)
    ok = dict(transformer_layer_config=layer, draft_vocab_size=30, aux_hidden_state_layer_ids=[1], mask_token_id=29)
    for wrong, words in (
        (dict(emb_dim=0), "emb_dim=0"),
        (dict(gru_hidden_dim=0), "gru_hidden_dim=0"),
        (dict(pure_draft_prefix_len=-1), "pure_draft_prefix_len=-1"),
        (dict(block_size=4, pure_draft_prefix_len=4), "pure_draft_prefix_len=4 leaves none of the 4 tokens"),
        (
            dict(block_size=4, pure_draft_prefix_len=3, sample_from_anchor=False),
            "pure_draft_prefix_len=3 leaves none of the 3 tokens",
        ),
        (dict(draft_vocab_size=31), "draft_vocab_size=31"),
    ):
        with pytest.raises(ValueError, match=words):
            DominoSpeculatorConfig(**ok | wrong)
    model, batch = random_model(1, draft_vocab_size=20)
    with pytest.raises(ValueError, match="ce_from_data=True with draft_vocab_size=20.*whole vocabulary"):
        model(**batch, ce_from_data=True)
    hf = tiny_verifier(tmp_path)
    t2d = torch.arange(V) < 20
    small = fresh_domino(tmp_path, hf, t2d=t2d, d2t=torch.zeros(20, dtype=torch.long))
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="draft_vocab_size=20 of 30: the layout has the verifier's whole vocabulary"):
        export_native(tmp_path / "small", tmp_path / "exported")


def test_defaults_are_the_documented_ones():
    c = DominoSpeculatorConfig()
    assert (c.block_size, c.sample_from_anchor, c.speculative_tokens) == (8, True, 8)
    assert (c.emb_dim, c.gru_hidden_dim, c.pure_draft_prefix_len, c.suffix_start) == (256, 1024, 1, 1)
    kwargs, evaluation = DominoDraftModel.get_trainer_kwargs()
    assert kwargs == evaluation and kwargs["loss_config"] == {"ce": 1.0}
    assert (kwargs["lambda_base_start"], kwargs["lambda_base_decay_ratio"]) == (1.0, 0.5)
    assert kwargs["per_position_loss_weight"] == "fixed-exp-decay" and "ce_from_data" not in kwargs
    assert "vLLM does not serve" in DominoDraftModel.serving_violations({})[0]
