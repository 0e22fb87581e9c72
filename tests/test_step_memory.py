"""Memory of a training step: the formula that `plan` prints beside storages counted while a step runs on the CPU."""

import pytest

from speculators_nb.core.option_rules import pairs
from speculators_nb.lab.experiment import settings
from speculators_nb.plan.step_memory import computed_and_measured
from speculators_nb.plan.twins import RECOMPUTED


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "mtp"])
def test_within_a_tenth_under_gradient_checkpointing(name):
    "Without it: the notebook of the formula. Three widths, other drafters, 32,768 tokens: tests/memory/run.py."
    computed, measured = computed_and_measured(name, 128, **settings(name, 2) | {RECOMPUTED: True})
    assert computed == pytest.approx(measured, rel=0.1)


def test_the_flag_is_read_as_train_reads_it():
    assert pairs(["gradient_checkpointing=true"]) == {RECOMPUTED: True}
