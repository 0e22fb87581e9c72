"""Memory and FLOPs of a training step: counted on tensors without memory, as `plan` does, and while a step computes."""

import pytest
from by_day import by_day
from transformers import Qwen3Config

from speculators_nb.core.options import pairs
from speculators_nb.lab.experiment import settings
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn import losses
from speculators_nb.nn.losses import chunks_as_on
from speculators_nb.plan.step_memory import RECOMPUTED, measured_step, predicted_step, step_of

LAYER = Qwen3Config(
    hidden_size=64,
    intermediate_size=192,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    num_hidden_layers=6,
    vocab_size=512,
)
SHAPE = LAYER, 512, 6, 96, 32, 0.75  # rows of the head, depth, tokens, tokens of a conversation, share with loss


CASES = [(name, True, "cuda") for name in sorted(SpeculatorModel.registered_classes())]


@pytest.mark.parametrize(("name", "recomputed", "device"), [*CASES, ("eagle3", False, "cpu"), ("dflash", False, "cpu")])
def test_a_step_without_memory_is_the_step(name, recomputed, device):
    given = settings(name, 2) | {RECOMPUTED: recomputed}
    model, arguments = step_of(name, *SHAPE, **given)
    with chunks_as_on(device):
        found = measured_step(model, **arguments)
    assert predicted_step(name, *SHAPE, device=device, **given) == found
    assert found.held > 0 < found.working and (found.loss != 0) == (name not in ("medusa", "mlp"))


@pytest.mark.parametrize("name", by_day(["eagle3", "mtp", "lilicorr"], ["eagle3"]))
def test_chunks_of_a_cpu_have_no_part_in_a_step_of_a_device(name, monkeypatch):
    given = settings(name, 2)
    step = predicted_step(name, *SHAPE, device="cuda", **given)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 8)
    monkeypatch.setattr(losses, "TILE_BYTES", 1 << 12)
    assert predicted_step(name, *SHAPE, device="cuda", **given) == step
    assert predicted_step(name, *SHAPE, device="cpu", **given) != step


def test_the_flag_is_read_as_train_reads_it():
    assert pairs(["gradient_checkpointing=true"]) == {RECOMPUTED: True}
