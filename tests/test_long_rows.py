"""Long rows: ranks that share a row by position have together the loss, the metrics and the gradient of one process."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from matrix import batch_for, drafter, full_gradient, verifier
from safetensors.torch import load_file
from sharded import ROWS_IN_STEP, SAVE, Job, free_port, launch, report_of, run
from test_sharded import check_same, files_of
from torch import distributed as dist

from benchmarks.long_rows import run as benchmark
from speculators_nb.distributed.long_rows import RowPart
from speculators_nb.train.trainer import SpeculatorTrainer

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo")

SINKS, SLIDES = dict(add_swa_attention_sink_bias=True), dict(sliding_window=5, use_sliding_window=True)
MIXED = dict(layer_types=["sliding_attention", "full_attention"])
ROPE = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=16)
# drafter of the matrix, its layers, what `forward` gets, positions that may carry loss
CASES = {
    "eagle3": ("eagle3", {}, dict(ttt_steps=3, ttt_step_loss_decay=0.8, loss_config="kl_div"), None),
    "one key head": ("eagle3", dict(num_key_value_heads=1), dict(ttt_steps=2, per_position_loss_weight="auf"), None),
    "two layers, own tokens": ("eagle3 qwen3", SLIDES | MIXED, dict(ttt_steps=3, use_off_policy_tokens=False), None),
    "no loss on the last rank": ("eagle3", {}, dict(ttt_steps=3), slice(0, 25)),
    "latent, values shorter than keys": ("eagle3 latent", dict(q_lora_rank=16), dict(ttt_steps=3), None),
    "latent, no loss on the last rank": ("eagle3 latent", {}, dict(ttt_steps=3), slice(0, 25)),
    "rope by length": ("eagle3", ROPE, dict(ttt_steps=3), None),
    "dflash": ("dflash", SINKS | SLIDES | MIXED, dict(max_anchors=9, per_position_loss_weight="dpace"), None),
    "dflash, no block on the last rank": ("dflash", {}, dict(max_anchors=9), slice(0, 25)),
}


def step(case, group=None):
    "(loss, metrics, gradients by name) of the row, or of this rank's part of it; deterministic."
    name, layer, given, trained = CASES[case]
    model = drafter(name, "llama", **layer).train()
    batch = batch_for(model, "llama")
    if trained is not None:
        loss_mask = torch.zeros_like(batch["loss_mask"])
        loss_mask[:, trained] = batch["loss_mask"][:, trained]
        batch["loss_mask"] = loss_mask
    if group is not None:
        part = RowPart(batch["input_ids"].shape[1], group)
        batch = part.of_batch(batch, model.targets_ahead(**given))
    torch.manual_seed(1)
    _, loss, metrics = model(**batch, **given, row_group=group)
    loss.backward()
    grads = {n: full_gradient(p) for n, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), {n: x.detach().float().clone() for n, x in metrics.items()}, grads


def one_rank(rank, ranks, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    found = {}
    for case in CASES:
        loss, metrics, grads = step(case, dist.group.WORLD)
        for x in (loss, *metrics.values(), *grads.values()):
            dist.all_reduce(x)
        found[case] = loss, metrics, grads
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    "What two ranks have together, by case."
    verifier("llama")
    folder = tmp_path_factory.mktemp("ranks")
    given = (2, free_port(), folder)
    for wait in [forked.ask(partial(one_rank, rank, *given)) for rank in range(2)]:
        wait()
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(shared, case):
    loss, metrics, grads = shared[case]
    whole, expected, gradient = step(case)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=1e-4, abs=2e-4), name
    assert any(g.abs().sum() for g in gradient.values()) and grads.keys() == gradient.keys()
    for name, grad in gradient.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm().clamp_min(1e-6), name


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", benchmark.SETTINGS)
def test_a_row_of_131072_on_four_ranks(algorithm):
    "The gradient of one process, and at most 1.2 / 4 of its memory."
    one, four = benchmark.rows(algorithm, 1 << 17, (1, 4))
    assert four["gradient_error"] < 1e-5
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert four["peak_mb"] < 1.2 / 4 * one["peak_mb"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_training_is_that_of_one_process(tmp_path, ranks):
    "Ranks in groups of two, which share each row: logs of training and evaluation, weights, files; a resume is exact."
    settings = dict(optimizer="adamw", context_parallel_size=2, gradient_accumulation_steps=2 * ROWS_IN_STEP // ranks)
    kept = settings | dict(save_strategy="steps", save_steps=SAVE)
    whole, resumed = Job("eagle3", "eagle3", kept), Job("eagle3", "resumed", kept, resume=f"eagle3/checkpoint-{SAVE}")
    plain = Job("dflash", "dflash", settings)
    launch(tmp_path, [whole, resumed, plain], ranks, fsdp=False)
    for job in (whole, plain):
        alone = tmp_path / f"{job.name} alone"
        report = report_of(run(Job(job.name, alone.name, dict(optimizer="adamw")), tmp_path, 1, False))
        (alone / "report.json").write_text(json.dumps(report))
        check_same(tmp_path / job.folder, alone)
    assert files_of(tmp_path / "dflash") == files_of(alone)
    record = json.loads((tmp_path / "dflash/run.json").read_text())
    assert (record["world_size"], record["rows_in_step"]) == (ranks, ROWS_IN_STEP)
    a, b = (load_file(tmp_path / job.folder / "model.safetensors") for job in (whole, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_cannot_share_a_row_is_refused():
    trainer: Any = SimpleNamespace(model=drafter("peagle", "llama"), args=SimpleNamespace(context_parallel_size=2))
    with pytest.raises(ValueError, match="context_parallel_size=2: PEagleDraftModel needs a row"):
        SpeculatorTrainer.share_rows(trainer)
    for name in ("dspark rnn", "dflash2", "xpress", "domino", "lilicorr"):
        with pytest.raises(ValueError, match="DraftModel reads the whole row"):
            drafter(name, "llama").targets_ahead()
