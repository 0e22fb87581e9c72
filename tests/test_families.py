"""Every verifier family: tap, features, train step, decoding and regeneration, as docs/verifiers.md has it."""

import shutil

import pytest
import torch
import transformers
from families import (
    CHECKS,
    FAMILIES,
    NEW,
    PAGE,
    H,
    Line,
    feature_folder,
    features,
    greedy,
    line_of,
    page,
    same,
    saved,
    texts,
    verifier,
)
from safetensors.torch import load_file, save_file

from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import generate
from speculators_nb.decode.proposal_setup import TreeDrafter
from speculators_nb.models.attached_verifier import borrowed_parts, resolve_verifier
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.verifier.parts import load_verifier_tensors
from speculators_nb.verifier.tapped_model import Verifier

TEXT = PAGE.read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| `")]
ERRORS = [line for line in TEXT.splitlines() if line.startswith("- `")]
BROKEN = {("llama4", "5.24.0"): "every forward pass raises on `image_outputs`"}  # by transformers itself


# one for each kind of layers, and for what experts, pictures and a scaled head change
BY_DAY = {"llama", "gemma3_text", "deepseek_v3", "qwen3_vl_moe", "cohere2", "qwen3_5", "falcon_h1", "lfm2"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in FAMILIES]
)
def test_the_page_is_what_the_checks_find(family):
    if why := BROKEN.get((family, transformers.__version__)):
        pytest.skip(f"{family} in transformers {transformers.__version__}: {why}")
    row, errors = line_of(family)
    assert errors == [error for error in ERRORS if error.startswith(f"- `{family}`")]
    assert row in ROWS


def test_the_page_is_written_by_these_tests():
    "And by hand nowhere."
    lines = [Line(row, ERRORS if row == ROWS[-1] else []) for row in ROWS]
    assert page(TEXT, lines) == TEXT and [row.split("`")[1] for row in ROWS] == [*FAMILIES]
    assert FAMILIES.keys() > BY_DAY


def test_families_with_softmax_attention_do_everything():
    cells = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[3:-1]] for row in ROWS}
    softmax = {f: c[1:] for f, c in cells.items() if {*c[0].split(", ")} <= {"full", "sliding", "chunked"}}
    assert all({*c} <= {"yes", "–"} for c in softmax.values())
    hybrids = {f: c[1:] for f, c in cells.items() if f not in softmax}
    assert all({*c} <= {"yes", "reads again", "–"} for c in hybrids.values())
    assert len(softmax) > 36 and len(hybrids) > 8 and len(CHECKS) == 6
    sees = [f for f, c in cells.items() if c[-1] != "–"]
    assert sees == ["llama4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "qwen3_5"]


@pytest.mark.parametrize("family", ["llama4_text", "qwen3_next", "falcon_h1"])
def test_as_a_draft_model_of_itself(family):
    "Never wrong; what it drafted is forgotten where the text goes on otherwise."
    v, (prompts, answers) = verifier(family), greedy(family)
    drafter = DraftModel(v.model, v)
    for drafts in (drafter, TreeDrafter(drafter, [(0,), (1,), (0, 0), (1, 0)])):
        g = generate(v, drafts, prompts[0], max_new_tokens=NEW, k=2)
        assert g.prompt + g.tokens == answers[0]
        assert all(s.accepted == min(s.requested, 2) for s in g.steps)
    before = drafter.read(torch.tensor([5, 6, 7]))
    drafter.read(torch.tensor([5, 6, 8, 9]))
    same(drafter.read(torch.tensor([5, 6, 7])), before)


def test_bamba_needs_positions():
    "transformers counts positions of Bamba from 0 in every call, where none are given."
    v, ids = verifier("bamba"), torch.tensor(texts([12]))
    cache = v(ids[:, :5]).past_key_values
    same(v(ids[:, 5:], past_key_values=cache).logits, v(ids).logits[:, 5:])


def test_a_bias_is_of_the_same_module():
    "A norm of the vision part has one, the final norm of the text has none."
    assert load_verifier_tensors(saved("qwen3_vl"))["norm_bias"] is None
    assert load_verifier_tensors(saved("phimoe"))["norm_bias"].shape == (H,)


@pytest.mark.parametrize("family", ["qwen3_vl", "llama4", "granite"])
def test_a_verifier_of_any_family_is_attached_by_its_path(family):
    model = resolve_verifier(saved(family))
    parts, stored = borrowed_parts(model), load_verifier_tensors(saved(family))
    assert type(model) is type(verifier(family).model)
    assert all(torch.equal(parts[name], stored[name]) for name in ("head", "embeddings", "norm_weight"))


@pytest.mark.parametrize("head", [torch.int8, torch.float8_e4m3fn, "weight_packed", "qweight"])
def test_a_quantised_head_is_refused(tmp_path, head):
    "Its numbers are no weights; those of a packed one have another name, and the embedding table is no substitute."
    shutil.copytree(saved("llama"), tmp_path / "verifier")
    file = tmp_path / "verifier/model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("lm_head.weight")
    packed = isinstance(head, str)
    tensors[f"lm_head.{head if packed else 'weight'}"] = weight.to(torch.int32 if packed else head)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"^verifier '.*verifier': lm_head\.\w+.* is quantised.*name the checkpoint"):
        load_verifier_tensors(tmp_path / "verifier")


@pytest.mark.parametrize("family", ["phimoe", "granite", "gemma2", "falcon_h1"])
def test_trained_saved_and_decoded(tmp_path, family):
    """The target head of a draft vocabulary is the verifier's at its tokens: bias, scale, soft-cap, multiplier.
    The saved drafter has the same head, and drafts for its verifier."""
    options = dict(eval_share=0, max_steps=1, save_strategy="no", report_to="none", use_cpu=True, ttt_steps=2)
    given = feature_folder(family), tmp_path, saved(family), "eagle3"
    trained = train_drafter(*given, draft_vocab_size=24, **options).model
    loaded = SpeculatorModel.from_pretrained(tmp_path)
    logits = verifier(family)(torch.tensor(texts()[:1]), use_cache=False).logits[0]
    for model in (trained, loaded):
        same(model.target_head(features(family)[0]["verifier_last_hidden_states"]), logits[:, model.t2d])
    drafter, (prompts, answers) = loaded.drafter(), greedy(family)
    target = Verifier(verifier(family).model, drafter.aux_layer_ids)
    g = generate(target, drafter, prompts[0], max_new_tokens=NEW, k=2)
    assert g.prompt + g.tokens == answers[0]
