"""The pages of DFlash, MTP and P-EAGLE, statement by statement (docs/statements.yml)."""

import inspect

import pytest
import torch
from documented import SHAPE, H, V, batch, layer, write_verifier
from safetensors.torch import load_file

import speculators_nb.models as models
from speculators_nb.models import (
    DFlashDraftModel,
    DFlashSpeculatorConfig,
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    MTPDraftModel,
    MTPSpeculatorConfig,
    PEagleDraftModel,
    PEagleSpeculatorConfig,
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"), "qwen3")


def dflash(verifier, layers=1, draft=None, **arguments):
    torch.manual_seed(0)
    given = dict(verifier_name_or_path=str(verifier), mask_token_id=V - 1) | arguments
    return DFlashDraftModel.from_training_args(draft or layer("qwen3", layers), **given)


def mtp(verifier, **arguments):
    torch.manual_seed(0)
    given = dict(verifier_name_or_path=str(verifier), fresh_head=True) | arguments
    return MTPDraftModel.from_training_args(layer("qwen3"), **given)


def peagle(verifier, **arguments):
    torch.manual_seed(0)
    given = dict(verifier_name_or_path=str(verifier), mask_token_id=V - 1) | arguments
    return PEagleDraftModel.from_training_args(layer("qwen3"), **given)


def row(steps=9):
    b = batch(1, (steps,))
    return dict(input_ids=b["input_ids"], hidden_states=b["hidden_states"])


@pytest.mark.statement("models-01")
def test_exports():
    for name in ["DFlash", "Eagle3", "MTP", "PEagle"]:
        assert inspect.isclass(getattr(models, f"{name}DraftModel"))
        assert inspect.isclass(getattr(models, f"{name}SpeculatorConfig"))


@pytest.mark.statement("models-03", "models-24", "models-33")
def test_target_layer_ids(verifier):
    assert dflash(verifier, target_layer_ids=[0, 2]).target_layer_ids == [0, 2]
    eagle3 = Eagle3DraftModel.from_training_args(
        layer("qwen3"), verifier_name_or_path=str(verifier), target_layer_ids=[0, 1, 2]
    )
    assert eagle3.target_layer_ids == [0, 1, 2]
    assert mtp(verifier).target_layer_ids == [SHAPE["num_hidden_layers"]]


@pytest.mark.statement("models-04", "models-07", "models-08", "models-09", "models-13", "models-16", "models-17")
def test_dflash_parts(verifier):
    model = dflash(verifier, layers=2)
    config = model.config
    assert len(model.layers) == 2 and config.block_size == model.block_size == 8
    read = len(config.aux_hidden_state_layer_ids)
    assert model.fc.weight.shape == (H, read * H) and model.hidden_norm.weight.shape == (H,)
    states = torch.randn(5, read * H)
    torch.testing.assert_close(model.context(states), model.hidden_norm(model.fc(states)))
    assert not model.verifier_norm.weight.requires_grad
    rows = load_file(verifier / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.verifier_norm.weight, rows)
    assert [m.speculative_tokens for m in config.speculators_config.proposal_methods] == [7]


@pytest.mark.statement("models-05", "models-06")
def test_dflash_windows(verifier):
    kinds = ["full_attention", "sliding_attention"]
    draft = layer("qwen3", 2, layer_types=kinds, sliding_window=3, use_sliding_window=True)
    model = dflash(verifier, draft=draft, block_size=4)
    assert [bool(one.window) for one in model.layers] == [False, True]

    def loss(both_sides):
        found = dflash(verifier, draft=draft, block_size=4, sliding_window_non_causal=both_sides)
        assert found.config.sliding_window_non_causal is both_sides
        data = batch(len(found.config.aux_hidden_state_layer_ids))
        return found(**data, anchor_positions=torch.tensor([2, 12]))[1]

    assert loss(True) != loss(False)


@pytest.mark.statement("models-12", "models-14", "models-15")
def test_dflash_arguments(verifier):
    t2d = torch.arange(V) % 2 == 0
    d2t = t2d.nonzero()[:, 0] - torch.arange(V // 2)
    model = dflash(verifier, t2d=t2d, d2t=d2t, draft_vocab_size=V // 2, block_size=4)
    config = model.config
    assert (config.draft_vocab_size, config.mask_token_id) == (V // 2, V - 1) and torch.equal(model.t2d, t2d)
    train, _ = DFlashDraftModel.get_trainer_kwargs(max_anchors=2)
    data = batch(len(config.aux_hidden_state_layer_ids))
    few, many = (model.train()(**data, **train | dict(max_anchors=n))[2] for n in (2, 9))
    name = "loss_total" if "loss_total" in few else next(n for n in few if n.endswith("_total"))
    assert few[name] < many[name]


@pytest.mark.statement("models-11")
def test_verifier_config_is_a_keyword(verifier):
    given = dict(verifier_name_or_path=str(verifier), mask_token_id=V - 1)
    assert DFlashDraftModel.from_training_args(verifier_config=layer("qwen3"), **given).layers


@pytest.mark.statement("models-19")
def test_dflash_trainer_kwargs():
    train, val = DFlashDraftModel.get_trainer_kwargs(loss_fn="kl_div", dflash_decay_gamma=2.5)
    assert train["gamma"] == val["gamma"] == 2.5 and train["loss_config"] == {"kl_div": 1.0}
    assert DFlashDraftModel.get_trainer_kwargs(loss_fn="kl_div")[0]["gamma"] == 4.0


@pytest.mark.statement("models-20", "models-21")
def test_dflash_config():
    config = DFlashSpeculatorConfig(transformer_layer_config=layer("qwen3"), draft_vocab_size=12)
    assert (config.draft_vocab_size, config.target_vocab_size) == (12, V)


@pytest.mark.statement("models-28", "models-29", "models-32", "models-52")
def test_mtp_parts(verifier):
    model = mtp(verifier)
    assert model.config.num_speculative_steps == 3 and len(model.layers) == 1
    assert [m.speculative_tokens for m in model.config.speculators_config.proposal_methods] == [3]
    assert model.config.target_vocab_size == V and model.layers is model.mtp_layers
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"mtp_layers.{name}" for name, _ in model.mtp_layers.named_parameters()}


@pytest.mark.statement("models-30", "models-51")
def test_mtp_saves_only_its_own(verifier, tmp_path):
    model = mtp(verifier)
    model.save_pretrained(tmp_path)
    assert not [n for n in load_file(tmp_path / "model.safetensors") if n.startswith(("embed_tokens", "lm_head"))]
    with torch.no_grad():
        model.embed_tokens.weight.fill_(torch.nan)
        model.lm_head.weight.fill_(torch.nan)
    model.load_verifier_weights()
    rows = load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.weight, rows) and not model.lm_head.weight.isnan().any()


@pytest.mark.statement("models-31")
def test_mtp_has_the_whole_vocabulary(verifier):
    t2d = torch.arange(V) < 12
    for kind in (NotImplementedError, ValueError):
        with pytest.raises(kind, match=f"draft_vocab_size=12 of {V}: an MTP head uses the verifier's own head"):
            mtp(verifier, t2d=t2d, d2t=torch.zeros(12, dtype=torch.int64))
        with pytest.raises(kind, match=f"draft_vocab_size=12 of {V}"):
            MTPSpeculatorConfig(transformer_layer_config=layer("qwen3"), draft_vocab_size=12)


@pytest.mark.statement("models-44")
def test_mtp_takes_a_batch_of_others(verifier):
    model, data = mtp(verifier), row()
    others = dict(lengths=torch.tensor([9]), verifier_last_hidden_states=torch.full((1, 9, H), torch.nan))
    assert torch.equal(model(**data, **others).loss, model(**data).loss)
    with pytest.raises(TypeError, match="lenghts"):
        model(**data, lenghts=None)


@pytest.mark.statement("models-34", "models-35", "models-36", "models-40")
def test_mtp_steps(verifier):
    "Only what a step reads changes its logits."
    model = mtp(verifier).eval()
    data = row()
    before = model(**data, lean=False)[0]
    assert len(before) == 3 and before[0].shape[-1] == V
    changed = dict(data, input_ids=data["input_ids"].clone())
    changed["input_ids"][0, 3] = (changed["input_ids"][0, 3] + 1) % V
    after = model(**changed, lean=False)[0]
    for step in range(3):
        rows = (before[step] - after[step]).abs().sum(-1)[0].nonzero()[:, 0].tolist()
        first = 3 - (step + 1)  # the row whose step reads token 3
        # later steps read what earlier ones made of it
        assert rows and min(rows) == first
    positions = torch.arange(data["input_ids"].shape[1])[None]
    again = model(**data, position_ids=positions, lean=False)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, again))
    # targets: the loss of step 0 is that of the token after next
    n = before[0].shape[1]
    targets = data["input_ids"][0, 2:]
    own = torch.nn.functional.cross_entropy(before[0][0, : len(targets)], targets[:n])
    weights = [1.0, 0.0, 0.0]
    torch.testing.assert_close(model(**data, step_weights=weights)[1], own)


@pytest.mark.statement("models-37", "models-41", "models-42", "models-47")
def test_mtp_loss(verifier):
    model, data = mtp(verifier), row()
    mask = torch.ones_like(data["input_ids"])
    mask[:, :5] = 0
    assert model(**data, loss_mask=mask)[1] != model(**data)[1]
    torch.testing.assert_close(model(**data)[1], model(**data, step_weights=[1.0, 1.0, 1.0])[1])
    with pytest.raises(ValueError, match="step_weights"):
        model(**data, step_weights=[1.0])
    metrics = model(**data)[2]
    assert {"loss_sum", "loss_total"} <= metrics.keys() and sum("loss" in name for name in metrics) >= 5


@pytest.mark.statement("models-46")
def test_short_rows(verifier):
    model = mtp(verifier)
    assert model(**row(3))[1] > 0 and model(**row(2))[1] == 0


@pytest.mark.statement("models-29", "models-48", "models-49")
def test_mtp_step_weights(verifier):
    model = mtp(verifier)
    train, val = MTPDraftModel.get_trainer_kwargs(num_speculative_steps=3)
    beta = torch.tensor([0.6**k for k in range(3)])
    weights = (beta / beta.sum()).tolist()
    torch.testing.assert_close(model(**row(), **train)[1], model(**row(), step_weights=weights)[1])
    given, _ = MTPDraftModel.get_trainer_kwargs(step_weights=[0.5, 0.3, 0.2], num_speculative_steps=3)
    torch.testing.assert_close(model(**row(), **given)[1], model(**row(), step_weights=[0.5, 0.3, 0.2])[1])
    assert train == val


@pytest.mark.statement("models-53")
def test_one_mtp_layer(verifier):
    assert mtp(verifier).config.num_nextn_predict_layers == 1
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        MTPSpeculatorConfig(transformer_layer_config=layer("qwen3"), num_nextn_predict_layers=2)


@pytest.mark.statement("models-54", "models-56", "models-66", "models-65")
def test_peagle_parts(verifier):
    model = peagle(verifier, num_depths=5)
    assert isinstance(model, Eagle3DraftModel) and issubclass(PEagleSpeculatorConfig, Eagle3SpeculatorConfig)
    assert model.mask_hidden.numel() == 3 * H and model.mask_hidden.requires_grad
    assert [m.speculative_tokens for m in model.config.speculators_config.proposal_methods] == [5]
    t2d = torch.arange(V) % 2 == 0
    d2t = t2d.nonzero()[:, 0] - torch.arange(V // 2)
    less = peagle(verifier, t2d=t2d, d2t=d2t, norm_before_residual=False).config
    assert less.draft_vocab_size == V // 2 and model.config.norm_before_residual and not less.norm_before_residual


@pytest.mark.statement("models-55", "models-64", "models-68")
def test_peagle_config(verifier):
    config = peagle(verifier).config
    found = config.num_depths, config.down_sample_ratio, config.down_sample_ratio_min, config.mask_token_id
    assert found == (8, 0.7, 0.2, V - 1)
    model = peagle(verifier, num_depths=4, down_sample_ratio=0.5, down_sample_ratio_min=0.1)
    assert (model.config.num_depths, model.config.down_sample_ratio, model.config.down_sample_ratio_min) == (
        4,
        0.5,
        0.1,
    )


@pytest.mark.statement("models-57", "models-60", "models-62", "models-63")
def test_peagle_forward(verifier):
    model = peagle(verifier).eval()
    data = batch()
    tokens, loss, metrics = model(**data, seed=1)
    assert tokens is None and loss > 0 and metrics
    padded = {
        name: torch.nn.functional.pad(value, (0, 0, 0, 4) if value.ndim == 3 else (0, 4), value=0)
        for name, value in data.items()
    }
    padded["document_ids"][:, -4:] = -1
    # random states behind the row, which nothing may read
    padded["hidden_states"][:, -4:] = 9.0
    assert model(**padded, seed=1)[1].isfinite()


@pytest.mark.statement("models-58", "models-59")
def test_peagle_with_less(verifier):
    model, data = peagle(verifier).eval(), batch()
    given = model(**data).loss
    del data["loss_mask"]
    assert torch.equal(model(**data).loss, given)  # `batch` trains every position
    del data["verifier_last_hidden_states"]
    with pytest.raises(ValueError, match="verifier_last_hidden_states is missing"):
        model(**data)


@pytest.mark.statement("models-61")
def test_peagle_masks(verifier):
    "With one depth the mask's parameters mean nothing; with more they do."
    model = peagle(verifier)
    for depths in (1, 3):
        before = model(**batch(), num_depths=depths, generator=torch.Generator().manual_seed(0))[1]
        with torch.no_grad():
            model.mask_hidden.add_(1.0)
        after = model(**batch(), num_depths=depths, generator=torch.Generator().manual_seed(0))[1]
        assert (before == after) == (depths == 1)


@pytest.mark.statement("models-67")
def test_peagle_trainer_kwargs():
    train, val = PEagleDraftModel.get_trainer_kwargs(loss_fn="kl_div")
    assert train["loss_config"] == val["loss_config"] == {"kl_div": 1.0}
