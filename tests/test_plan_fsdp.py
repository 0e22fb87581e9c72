"""`plan` with FSDP: what it says that a device holds, beside the tensors that each of two ranks on gloo holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist
from torch.distributed import fsdp

sys.path.insert(0, str(Path(__file__).parent / "distributed"))
from memory import DEPTH, EACH, LENGTH, VOCAB, wide_verifier

from speculators_nb.lab.experiment import settings
from speculators_nb.plan import requirements as planning
from speculators_nb.plan.requirements import Machine, check_step_memory, requirements, requirements_text
from speculators_nb.plan.sizes import drafter_sizes, empty_drafter
from speculators_nb.plan.step_memory import StepCost, predicted_step, step_memory, verifier_like
from speculators_nb.verifier.identity import VerifierInfo

ROOT, NAMES, WIDTH, RANKS = Path(__file__).parents[1], ("eagle3", "peagle", "dflash", "mtp"), 256, 2
TRAIN = dict(
    algorithm="eagle3", total_seq_len=512, optimizer="adamw", bf16=False, num_train_epochs=1, data_dir="none",
    gradient_accumulation_steps=1, draft_vocab_size=1024, fsdp=True, verifier=str(ROOT / "data/tiny-verifier"),
)  # fmt: skip
needs_gloo = pytest.mark.skipif(
    not (
        dist.is_available()
        and dist.is_gloo_available()
        and hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    ),
    reason="torch is built without gloo, or older than 2.13",
)


def count(width, *names):
    "drafter -> bytes on a rank: at the peak of a step, between steps, of its packed row."
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / "tests/distributed/memory.py"), str(width), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counted():
    return count(WIDTH, *NAMES)


def computed(name, width, folder):
    "Its sizes, the predicted step, and the memory on one of two ranks."
    given = settings(name, 2)
    verifier_like(wide_verifier(width), VOCAB, DEPTH).save_pretrained(folder)
    info = VerifierInfo.of(folder)
    sizes = drafter_sizes(empty_drafter(name, info, **given), info)
    shape = VOCAB, DEPTH, LENGTH, EACH, 0.75
    step = predicted_step(name, wide_verifier(width), *shape, device="cpu", **given)
    return step_memory(sizes, step, LENGTH, "adamw", ranks=RANKS, fsdp=True)


def check(memory, peak, kept, row):
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(kept - row, rel=0.01)
    assert memory.total - memory.row == pytest.approx(peak - row, rel=0.1)


@needs_gloo
@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_what_is_planned(counted, tmp_path, name):
    check(computed(name, WIDTH, tmp_path), *counted[name])


@needs_gloo
@pytest.mark.nightly
def test_a_rank_holds_what_is_planned_where_layers_are_wide(tmp_path):
    "The peak is in a layer: its gradients come while its activations go."
    check(computed("dflash", 512, tmp_path), *count(512, "dflash")["dflash"])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(planning, "predicted_step", lambda *_, **__: StepCost(held=1e6, flops=1e9))


def memory_of(ranks, **given):
    found = requirements({"train": TRAIN | given}, machine=Machine(devices=ranks))
    return found, found.training.memory


def test_states_are_divided_and_one_line_says_so(quick):
    (_, one), (found, two), (_, eight) = memory_of(1), memory_of(2), memory_of(8)
    plain = memory_of(8, fsdp=False)[1]
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(two, part) * 2 == pytest.approx(getattr(one, part))
        assert getattr(eight, part) * 8 == pytest.approx(getattr(one, part))
    assert two.gathered == eight.gathered > 0 == one.gathered == plain.gathered
    assert (plain.weights, plain.gradients) == (one.weights, 2 * one.gradients)
    lines = dict(line.split(maxsplit=1) for line in requirements_text(found).splitlines())
    assert lines["fsdp"].startswith("weights, gradients and optimizer are divided over 2 devices; ")
    assert "gathered" in lines["step"] and "fsdp" not in requirements_text(memory_of(8, fsdp=False)[0])


@pytest.mark.parametrize("is_new", [True, False])
def test_fsdp_is_named_where_it_makes_a_step_fit(quick, monkeypatch, is_new):
    "And where `train` would take it: an older torch cannot."
    monkeypatch.delattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    if is_new:
        monkeypatch.setattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params", None, raising=False)
    whole, split = memory_of(8, fsdp=False, bf16=True)[1].total, memory_of(8, bf16=True)[1].total
    machine = Machine(devices=8, memory=(whole + split) / 2)
    train = TRAIN | dict(fsdp=False, bf16=True, extra={"gradient_checkpointing": True})
    (problem,) = requirements({"train": train}, machine=machine).problems
    assert (f"write fsdp: true ({split / 1e9:.3g} GB)" in problem) == is_new
    assert ("fsdp" in problem) == is_new


def test_train_counts_the_ranks_of_torchrun(quick, monkeypatch):
    for ranks in ("8", "1"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        need = memory_of(int(ranks))[1].state / 1e9
        with pytest.raises(ValueError, match=f"weights, gradients and optimizer take {need:.3g} GB"):
            check_step_memory(TRAIN["verifier"], TRAIN, 1e6)
