"""docs/differences.md: every difference has a reason, a size and a test that exists; and the tests of those differences
that no other file holds."""

import ast
import re
from pathlib import Path

import pytest
import torch
from matrix import V, batch_for, drafter, verifier

from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.nn.supervision import chain_metrics
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.train.trainer import SpeculatorTrainingArguments

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/differences.md").read_text()
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S))
PARTS = ("Upstream", "Why", "Size", "Held by")


def missing(text):
    "What a section lacks: parts, tests that it names and that are not there."
    found = [part for part in PARTS if not re.search(rf"^- {part}: \S", text, flags=re.M)]
    for path, test in (named := re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)):
        tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).exists() else ast.Module([], [])
        found += (
            [] if any(isinstance(n, ast.FunctionDef) and n.name == test for n in tree.body) else [f"{path}::{test}"]
        )
    return found + ([] if named else ["a test"])


@pytest.mark.parametrize("title", SECTIONS)
def test_every_difference_has_its_parts_and_its_test(title):
    assert missing(SECTIONS[title]) == []


def test_a_missing_test_is_seen():
    "The check can fail."
    assert missing("- Upstream: x\n- Why: x\n- Size: x\n- Held by: `tests/test_differences.py::test_of_nothing`") == [
        "tests/test_differences.py::test_of_nothing"
    ]
    assert missing("- Upstream: x\n- Why: x\n- Held by: `tests/test_nowhere.py::test_x`") == [
        "Size",
        "tests/test_nowhere.py::test_x",
    ]
    assert len(SECTIONS) > 12 and missing("- Upstream: x\n- Why: x\n- Size: x\n- Held by: nobody") == ["a test"]


def test_the_page_is_on_the_site():
    "In the table of contents beside the architecture, and README leads to it."
    build = (ROOT / "docs/web/places.py").read_text()
    assert (
        '"docs/differences.md": "differences.md"' in build
        and "(docs/differences.md)" in (ROOT / "README.md").read_text()
    )


# --------------------------------------------------------------------------------------------- what no other file holds
def test_the_mask_tokens_row_is_trained():
    "P-EAGLE whose mask token is the verifier's pad token: its row has a gradient."
    folder, target, _ = verifier("llama")
    layer = draft_layer_config(target.config)
    layer.pad_token_id = V - 1
    model = SpeculatorModel.registered_class("peagle").from_training_args(
        layer, verifier_name_or_path=str(folder), mask_token_id=V - 1, num_depths=4
    )
    model.train()(**batch_for(model, "llama"), **model.get_trainer_kwargs(num_depths=4)[0])[1].backward()
    assert model.embed_tokens.padding_idx is None and model.embed_tokens.weight.grad[V - 1].norm() > 0


def test_a_drafter_takes_its_config_alone():
    "A further argument is an error, and so is a config without the verifier's sizes."
    model = drafter("eagle3", "llama")
    with pytest.raises(TypeError, match="verifier"):
        type(model)(model.config, verifier=None)

    class WithoutSizes(SpeculatorModelConfig):
        speculators_model_type: str = "without_sizes"

    with pytest.raises(AttributeError, match="vocab_size"):
        SpeculatorModel(WithoutSizes())


def test_runs_are_counted_as_runs():
    """Two runs of three steps; the second leaves the loss mask after its first. Upstream counts a row at which no run
    begins."""
    supervised = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0]]).bool()  # [steps, rows]
    ours, theirs = (chain_metrics(supervised.clone(), supervised, upstream) for upstream in (False, True))
    assert (ours["full_acc_1_sum"], ours["full_acc_1_total"]) == (1, 1) and (
        theirs["full_acc_1_sum"],
        theirs["full_acc_1_total"],
    ) == (1, 2)


@pytest.mark.parametrize(
    "field,value",
    [("attn_logit_softcapping", 30.0), ("clip_qkv", 4.0), ("use_qk_norm", True), ("layer_types", ["linear_attention"])],
)
def test_foreign_fields_are_refused(field, value):
    "The whole table is in tests/bad/numbers.py."
    with pytest.raises(ValueError, match=f"transformer_layer_config.{field}="):
        drafter("eagle3", "llama", **{field: value})


def test_defaults():
    "As the page says."
    folder, _, _ = verifier("llama")
    layer = new_drafter("eagle3", folder).config.transformer_layer_config
    assert (layer.layer_types, layer.num_hidden_layers) == (["full_attention"], 1)
    alone = dict(eval_strategy="no", load_best_model_at_end=False)
    args, adamw = SpeculatorTrainingArguments(**alone), SpeculatorTrainingArguments(**alone, optimizer="adamw")
    assert (args.optimizer, args.learning_rate, adamw.learning_rate, args.lr_scheduler_type) == (
        "muon",
        3e-3,
        1e-4,
        "cosine",
    )
    assert (args.num_train_epochs, args.total_seq_len) == (3, 2048)
    dflash, eagle3 = (SpeculatorModel.registered_class(name).training_arguments() for name in ("dflash", "eagle3"))
    assert (dflash["block_size"], eagle3["norm_before_fc"], eagle3["norm_output"]) == (8, False, False)
