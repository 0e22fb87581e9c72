"""A training job of several ranks, as a shell starts it, that can be watched, killed and read."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RELEASE = Path(__file__).resolve().parents[1] / "fixtures/compat/0.1.0"
TORCHRUN = "from speculators_nb.distributed.torchrun import main; main()"
PROGRAM = "from speculators_nb.cli.main import app; app()"
GIVEN = (
    "--algorithm eagle3 --total-seq-len 32 --eval-share 0 --draft-vocab-size 40 --extra ttt_steps=2 "
    "--extra save_strategy=steps --extra logging_steps=1"
)


def processes_of(pid):
    "{rank: pid} of the ranks that a launcher has started."
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names = dict(item.split(b"=", 1) for item in (folder / "environ").read_bytes().split(b"\0") if b"=" in item)
        except (OSError, ValueError):
            continue
        if parent == pid and b"RANK" in names:
            found[int(names[b"RANK"])] = int(folder.name)
    return found


def train_words(folder, *more, features=RELEASE / "features", given=GIVEN):
    "What is typed after `speculators-nb` to train on the features of a release."
    return ["train", str(features), str(folder), "--verifier", str(RELEASE / "verifier"), *given.split(), *more]


class Job:
    "`speculators-nb-torchrun train` on the features of a release; `ranks` of 1: `speculators-nb train`."

    def __init__(self, place, *more, ranks=2, features=RELEASE / "features", given=GIVEN):
        self.folder, self.error_file = Path(place) / "drafter", Path(place) / "error.json"
        launched = [TORCHRUN, "--nproc-per-node", str(ranks)] if ranks > 1 else [PROGRAM]
        train = train_words(self.folder, *more, features=features, given=given)
        self.logs = [Path(place) / name for name in ("output", "error")]
        environment = dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHELASTIC_ERROR_FILE=str(self.error_file))
        with self.logs[0].open("ab") as output, self.logs[1].open("ab") as error:
            self.process = subprocess.Popen(
                [sys.executable, "-c", *launched, *train],
                stdout=output,
                stderr=error,
                env=os.environ | environment,
            )

    output = property(lambda self: self.logs[0].read_text())
    error = property(lambda self: self.logs[1].read_text())

    def wait_for(self, name, seconds=300):
        "Until the drafter's folder has this file."
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no {name}: {self.error[-3000:]}")
            time.sleep(0.05)

    def kill(self, rank):
        "SIGKILL for one rank; its process id."
        pid = processes_of(self.process.pid)[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self):
        "SIGKILL for the launcher and its ranks, as when a machine fails."
        for pid in (self.process.pid, *processes_of(self.process.pid).values()):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ends(self, seconds=300):
        "The exit code."
        return self.process.wait(seconds)
