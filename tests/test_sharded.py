"""FSDP2: two gloo ranks train every drafter as one process does; folders, checkpoints and metrics are the same."""

import json

import pytest
import torch
from matrix import DRAFTERS
from safetensors.torch import load_file
from sharded import Job, distance, launch, report_of, run
from torch import distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo"
)
JOBS = [Job(name, name.replace(" ", "_")) for name in DRAFTERS]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    "The folders that two ranks leave."
    root = tmp_path_factory.mktemp("sharded")
    launch(root, JOBS)
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "The folders that one process leaves, and its logs."
    root = tmp_path_factory.mktemp("alone")
    for job in JOBS:
        (root / job.folder / "report.json").write_text(json.dumps(report_of(run(job, root, 1, False))))
    return root


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_sharded_training_equals_one_process(sharded, alone, job):
    a, b = sharded / job.folder, alone / job.folder
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())
    assert distance(load_file(a / "model.safetensors"), load_file(b / "model.safetensors")) < 1e-6
    logs, expected = (json.loads((folder / "report.json").read_text()) for folder in (a, b))
    assert [log.keys() for log in logs] == [log.keys() for log in expected]
    for log, other in zip(logs, expected):
        assert log == pytest.approx(other, rel=1e-5, abs=1e-7)
