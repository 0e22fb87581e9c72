"""FSDP2: two gloo ranks train a drafter as one process does; folders, checkpoints and metrics are the same.
`make distributed` does it with every drafter."""

import json
import shutil

import pytest
import torch
from on_device import PretendCuda, marked, on_cuda
from safetensors.torch import load_file
from sharded import SAVE, STEPS, Job, distance, launch, report_of, run
from torch import distributed as dist
from torch.distributed import fsdp

from speculators_nb.distributed.sharded_training import SHARDS, load_training_shards, save_shards
from speculators_nb.models.base import SpeculatorModel, verify_training_compatible
from speculators_nb.nn.layers import DecoderLayer
from speculators_nb.train.checkpoint import checkpoint_problem, last_checkpoint

pytestmark = pytest.mark.skipif(
    not (
        dist.is_available()
        and dist.is_gloo_available()
        and hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    ),
    reason="torch is built without gloo, or older than 2.13",
)
# trains its embedding, whose gradients and updates are by rows in one process
SAVED, KEPT, HALF = "eagle3 qwen3", dict(save_strategy="steps", save_steps=SAVE), f"checkpoint-{SAVE}"
NAMES = ("peagle", "mtp")  # EAGLE-3 and DFlash2 are among the kinds, all others are run at night
PLAIN = [Job(name, name.replace(" ", "_")) for name in NAMES]
KINDS = [
    Job("eagle3", "bf16", dict(bf16=True)),
    Job("dflash2", "muon", dict(optimizer="muon")),
    Job(SAVED, "full", KEPT | dict(optimizer="muon")),
    # saved straight after an evaluation, whose forward leaves weights whole
    Job(SAVED, "sharded", KEPT | dict(optimizer="muon", checkpoint_format="sharded", eval_steps=SAVE, measure=None)),
]
ONLY_SHARDED = [
    Job(SAVED, f"{kind.folder}_resumed", kind.settings, resume=f"{kind.folder}/{HALF}") for kind in KINDS[2:]
] + [
    Job("eagle3", "diverged", dict(learning_rate=1e9, max_steps=3, save_strategy="steps", save_steps=1), fails="finite")
]


def files_of(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def config_of(folder):
    "Without the place of the verifier."
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"].pop("name_or_path")
    return config


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    "The folders that two ranks leave."
    root = tmp_path_factory.mktemp("sharded")
    launch(root, PLAIN + KINDS + ONLY_SHARDED)
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "A function: the folder that one process leaves."
    root, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()

    def folder_of(job):
        settings = {k: v for k, v in job.settings.items() if k != "checkpoint_format"}
        trainer = run(Job(job.name, job.folder, settings, job.resume), root, 1, False)
        (root / job.folder / "report.json").write_text(json.dumps(report_of(trainer)))
        return root / job.folder

    folder_of.root = root
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayer, "project_embeds", lambda layer, embeds: embeds)  # as where weights are split
        torch.set_num_threads(1)
        yield folder_of
    torch.set_num_threads(threads)


def check_same(folder, expected, but=None):
    "The same drafter, and the same metrics."
    assert config_of(folder) == config_of(expected)
    assert distance(load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")) < 1e-6
    logs, others = (json.loads((f / "report.json").read_text()) for f in (folder, expected))
    assert [log.keys() for log in logs] == [log.keys() for log in others]
    for log, other in zip(logs, others):
        log, other = ({name: x for name, x in found.items() if name != but} for found in (log, other))
        assert log == pytest.approx(other, rel=1e-5, abs=1e-7)


@pytest.mark.statement("api-48")
@pytest.mark.parametrize("job", PLAIN + KINDS, ids=lambda job: job.folder)
def test_sharded_training_equals_one_process(sharded, alone, job):
    "Loss, metrics, what an evaluation measures, files, weights."
    expected = alone(job)
    check_same(sharded / job.folder, expected)
    if "save_steps" not in job.settings:
        assert files_of(sharded / job.folder) == files_of(expected)


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda job: job.folder)
def test_a_resume_is_exact(sharded, kind):
    "On as many ranks as before: to the bit, weights and what the last checkpoint holds."
    whole, resumed = sharded / kind.folder, sharded / f"{kind.folder}_resumed"
    assert files_of(whole) == files_of(resumed)
    for file in files_of(whole):
        if file.endswith(".safetensors"):
            a, b = load_file(whole / file), load_file(resumed / file)
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda job: job.folder)
def test_one_process_resumes_what_two_ranks_began(sharded, alone, kind):
    shutil.copytree(sharded / kind.folder / HALF, alone.root / f"{kind.folder}_two" / HALF)
    job = Job(SAVED, f"{kind.folder}_one", kind.settings, resume=f"{kind.folder}_two/{HALF}")
    check_same(alone(job), sharded / kind.folder, but="train_loss")  # of the steps since the resume


def test_checkpoints_are_complete_or_named(sharded):
    for kind in KINDS[2:]:
        folder = sharded / kind.folder
        assert checkpoint_problem(folder / HALF) is None
        assert last_checkpoint(folder) == str(folder / f"checkpoint-{STEPS}")
    full, shards = (set(files_of(sharded / kind.folder / HALF)) for kind in KINDS[2:])
    assert full - shards == {"model.safetensors", "optimizer.pt"}
    assert len([name for name in shards - full if name.endswith(".safetensors")]) == 2, "a file for each rank"
    torn = sharded / f"sharded/checkpoint-{STEPS}/shards"
    file = next(torn.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert file.name in checkpoint_problem(torn.parent)
    assert last_checkpoint(torn.parents[1]) == str(torn.parents[1] / HALF)


def test_states_are_read_to_the_device_of_their_weights(tmp_path):
    "Also the number of steps, which AdamW's kernel of a device reads there."
    weight, place = torch.nn.Linear(3, 2), tmp_path / SHARDS
    optimizer, rate = torch.optim.AdamW(weight.parameters()), torch.optim.lr_scheduler.ConstantLR
    weight(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_shards(place, weight, optimizer)
    torch.save(rate(optimizer).state_dict(), tmp_path / "scheduler.pt")
    with PretendCuda():
        read = torch.optim.AdamW(on_cuda(torch.nn.Linear(3, 2)).parameters())
        load_training_shards(tmp_path, on_cuda(weight), optimizer, rate(read))
    assert len(optimizer.state) == 2
    assert all(marked(value) for state in optimizer.state.values() for value in state.values())


def test_weights_that_are_not_finite_are_not_saved(sharded):
    assert not (sharded / "diverged/model.safetensors").exists()


def test_the_folder_is_a_drafter(sharded):
    model = SpeculatorModel.from_pretrained(sharded / "full")
    assert model.config.architectures[0] == type(model).__name__
    verify_training_compatible(model)
