"""A drafter built from its config alone scores by its verifier's conventions: norm, scale, soft-cap; where the config
does not tell them, training is refused."""

import contextlib
import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from by_day import by_day
from matrix import DRAFTERS, batch_for, drafter, fits, train_step, verifier

from speculators_nb.data.chat_encoding import to_dataset
from speculators_nb.features.in_process import LiveFeatures, extract_features
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn import target_head as head_module
from speculators_nb.nn.losses import TargetHead
from speculators_nb.nn.target_head import check_target_head
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.verifier import parts

VERIFIERS_OF = ("llama", "qwen3", "gemma2", "cohere", "gpt_neox", "qwen3_next", "qwen3_5")
# EAGLE attaches a verifier, or says that it must; MTP is below
NAMES = [name for name in DRAFTERS if DRAFTERS[name][0] not in ("eagle", "mtp")]
FITTING = {name: [f for f in ("llama", "gemma2", "cohere", "gpt_neox") if fits(name, f)] for name in NAMES}
# by day each drafter with one family, and in turn with each
BY_DAY = [(name, families[i % len(families)]) for i, (name, families) in enumerate(FITTING.items())]
CELLS = by_day([(name, family) for name, families in FITTING.items() for family in families], BY_DAY)


def bare(model, config=None):
    "The class and the state dict, nothing else."
    fresh = type(model)(copy.deepcopy(config or model.config))
    fresh.load_state_dict(model.state_dict())
    return fresh


@pytest.mark.statement("release-13")
@pytest.mark.parametrize("family", VERIFIERS_OF)
def test_the_head_is_the_verifiers(family):
    """Last states through the target head are the verifier's own logits, norm, bias, scale and soft-cap included; with
    a plain norm alone they are not."""
    _, target, samples = verifier(family)
    model, ids = drafter("eagle3", family), samples[0]["input_ids"]
    out = target(ids[None], use_cache=False)
    mine = model.target_head(out.last_hidden_states[0])
    torch.testing.assert_close(mine, out.logits[0], rtol=1e-4, atol=1e-4)
    check_target_head(model.target_head, target.model, out.last_hidden_states, out.logits, tolerance=1e-5)
    plain = TargetHead(32, eps=model.target_head.norm.eps)
    plain.load_norm(dict(norm_weight=model.target_head.norm.weight, norm_bias=None))
    plain.set_rows(model.target_head.weight)
    assert (family in ("llama", "qwen3")) == torch.allclose(
        plain(out.last_hidden_states[0]), mine, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name,family", CELLS)
def test_config_and_state_dict_are_enough(name, family):
    "The same loss and gradient as the drafter that read its verifier's weights."
    model = drafter(name, family)
    batch = batch_for(model, family)
    fresh = bare(model)
    head, want = fresh.target_head, model.target_head
    assert (head.norm.kind, head.norm.eps, head.scale, head.softcap) == (
        want.norm.kind,
        want.norm.eps,
        want.scale,
        want.softcap,
    )
    (loss, grad), (again, again_grad) = train_step(model, batch, name), train_step(fresh, batch, name)
    assert again == pytest.approx(loss, rel=1e-6) and torch.allclose(grad, again_grad, rtol=1e-5, atol=1e-7)
    if family != "llama" and DRAFTERS[name][0] not in ("mlp", "medusa"):  # and the convention is worth it
        fresh.target_head = TargetHead(32, eps=want.norm.eps)
        fresh.target_head.load_norm(dict(norm_weight=want.norm.weight, norm_bias=None))
        fresh.target_head.set_rows(want.weight)
        assert abs(train_step(fresh, batch, name)[0] / loss - 1) > 1e-4


@pytest.mark.parametrize(
    "family,known",
    [("llama", True), ("qwen3", True), ("gpt_neox", True), ("qwen3_5", True), ("gemma2", False), ("cohere", False)],
)
def test_a_verifier_that_is_not_here(family, known, tmp_path):
    """Its architecture tells the norm; where a scale or soft-cap of its own may be on the logits, scoring is refused
    until its weights are loaded."""
    model = drafter("eagle3", family)
    batch, config = batch_for(model, family), copy.deepcopy(model.config)
    loss = train_step(model, batch, "eagle3")[0]
    config.speculators_config.verifier.name_or_path = "somebody/elsewhere"
    fresh = bare(model, config)
    if known:
        assert fresh.target_head.norm.kind == model.target_head.norm.kind and train_step(fresh, batch, "eagle3")[
            0
        ] == pytest.approx(loss, rel=1e-6)
        return
    with pytest.raises(ValueError, match=r"somebody/elsewhere.*load_verifier_weights"):
        train_step(fresh, batch, "eagle3")
    fresh.load_verifier_weights(verifier(family)[0])
    assert train_step(fresh, batch, "eagle3")[0] == pytest.approx(loss, rel=1e-6)


def test_upstreams_names(tmp_path):
    "A state dict of upstream for a Gemma-like verifier: verifier_norm and verifier_lm_head."
    model = drafter("dflash", "gemma2")
    batch = batch_for(model, "gemma2")
    state = {n: w for n, w in model.state_dict().items() if not n.startswith("target_head.")}
    state |= {
        "verifier_norm.weight": model.target_head.norm.weight,
        "verifier_lm_head.weight": model.target_head.weight,
    }
    fresh = type(model)(copy.deepcopy(model.config))
    fresh.load_state_dict(state)
    assert train_step(fresh, batch, "dflash")[0] == pytest.approx(train_step(model, batch, "dflash")[0], rel=1e-6)


def test_mtp_reads_normed_states_by_the_same_norm():
    "With verifier_norm the head's states go through the verifier's final norm, which is (1 + w) for Qwen3.5."
    folder, _, _ = verifier("qwen3_5")
    model = SpeculatorModel.registered_class("mtp").from_training_args(
        verifier_name_or_path=str(folder), fresh_head=True, verifier_norm=True
    )
    fresh, x = bare(model), torch.randn(5, 32)
    assert model.target_head.norm.kind == "rms+1" and torch.equal(fresh.features(x), model.features(x))


def test_a_folder_that_moved(tmp_path):
    "from_pretrained with the verifier's new place gives the same head."
    folder, _, _ = verifier("gemma2")
    model = drafter("dflash", "gemma2")
    batch = batch_for(model, "gemma2")
    model.config.speculators_config.verifier.name_or_path = "gone"
    model.save_pretrained(tmp_path / "draft")
    shutil.copytree(folder, tmp_path / "verifier")
    moved = SpeculatorModel.from_pretrained(tmp_path / "draft", verifier=tmp_path / "verifier")
    assert train_step(moved, batch, "dflash")[0] == pytest.approx(train_step(model, batch, "dflash")[0], rel=1e-6)


def test_a_convention_that_is_read_wrongly_is_seen_where_features_are_made_and_where_they_are_trained_on(
    tmp_path, monkeypatch
):
    "As for a family that nobody has put into the list of those whose norm is stored as an offset."
    folder, target, samples = verifier("gemma2")
    rows = to_dataset([(s["input_ids"].numpy(), s["loss_mask"].numpy()) for s in samples])
    extract_features(target, rows, tmp_path / "good")
    monkeypatch.setattr(head_module, "OFFSET_NORM", head_module.OFFSET_NORM - {"gemma2"})
    with pytest.raises(ValueError, match="target head of 'gemma2'"):
        extract_features(target, rows, tmp_path / "features")
    assert not list((tmp_path / "features").glob("hs_*"))
    with pytest.raises(ValueError, match="target head of 'gemma2'"):
        LiveFeatures(target, rows)
    with pytest.raises(ValueError, match="final norm of 'gemma2' is read as 'rms'"):
        train_drafter(
            tmp_path / "good",
            tmp_path / "drafter",
            folder,
            "eagle3",
            max_steps=1,
            total_seq_len=64,
            disable_tqdm=True,
            trust_features=True,
        )
    assert not (tmp_path / "drafter/model.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finish_keeps_its_input_and_its_dtype(dtype):
    head = TargetHead(8, scale=0.5, softcap=3.0)
    head.set_rows(torch.zeros(4, 8), torch.arange(4, dtype=dtype))
    raw = torch.randn(2, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    before = raw.clone()
    logits = head.finish(raw)
    assert logits.dtype == dtype and torch.equal(raw, before)
    torch.testing.assert_close(logits, 3 * torch.tanh((before + torch.arange(4, dtype=dtype)) * 0.5 / 3))


@pytest.mark.parametrize("text", [None, "the same"])
@pytest.mark.parametrize(
    "tied, own_head, words",
    [
        (True, True, "its head differs from its embeddings"),
        (False, False, "its weights hold no head"),
        (True, False, None),
        (False, True, None),
        (None, True, None),
    ],
)
def test_a_text_part_that_is_silent_leaves_the_tie_to_the_whole(monkeypatch, tied, own_head, words, text):
    monkeypatch.setattr(parts, "verifier_config", lambda path: SimpleNamespace(tie_word_embeddings=tied))
    monkeypatch.setattr(
        parts,
        "text_config",
        lambda config: SimpleNamespace(tie_word_embeddings=tied) if text else SimpleNamespace(),
    )
    found = {"head": torch.ones(4, 2), "embeddings": torch.zeros(4, 2)}
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        parts._check_tie("v", own_head, found)
