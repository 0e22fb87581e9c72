#!/usr/bin/env python
"""From chats to a measured drafter with nothing but commands and the real vLLM, on a CPU; each stage is killed once and
goes on.

    .venv/bin/python tests/vllm/check_pipeline.py               all of it; the first call also makes .venv-vllm (4
    minutes, 3.4 GB)
    .venv/bin/python tests/vllm/check_pipeline.py --no-kills    without the interruptions
    .venv/bin/python tests/vllm/check_pipeline.py --keep DIR    leave what was made in DIR

The commands are those of the README, on the shipped tiny verifier:

    serve VERIFIER --run                          vLLM on the verifier
    regenerate --server                           its answers to the corpus' questions;   kill -9 of the client: goes on
    where it was
    prepare                                       answers to token ids and loss masks
    serve VERIFIER --hidden-states DIR --run      vLLM with our connector
    features --source vllm                        hidden states over HTTP and files;      kill -9 of the server and of
    the client
    features --source hf                          the same in this process: must differ by at most 1e-3, relative
    train                                         EAGLE-3;                                kill -9 of the trainer:
    --resume gives the drafter that an undisturbed run gives
    check, serve DRAFTER --run                    vLLM with the drafter
    evaluate --engine vllm, --engine reference    acceptance from its /metrics: must be what our decoder finds on the
    same prompts

Everything is asserted, a table of the stages is printed, and all of it must end within 20 minutes (LIMIT_MINUTES), the
environment included where it is made here.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from check_vllm import ROOT, VENV, VERIFIER, install
from safetensors import safe_open

from speculators_nb.core.http_client import Endpoint, EndpointError
from speculators_nb.serve.server import free_port

COMMAND, CORPUS = Path(sys.executable).parent / "speculators-nb", ROOT / "data/corpus"
CHATS, PROMPTS, TOKENS, K = 64, 16, 48, 3
KILLED_CHATS = 160  # a stage lasts until it can be killed
ENVIRONMENT = os.environ | dict(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TQDM_DISABLE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    SPECULATORS_NB_VLLM=str(VENV / "bin/vllm"),
)
STAGES = []


@contextmanager
def stage(name):
    """Time what happens inside, and put down what it found."""
    found, began = {}, time.monotonic()
    print(f"== {name}", flush=True)
    yield found
    STAGES.append(
        dict(
            stage=name,
            seconds=round(time.monotonic() - began, 1),
            found=", ".join(f"{k} {v}" for k, v in found.items()),
        )
    )
    print(f"   {STAGES[-1]['seconds']} s  {STAGES[-1]['found']}", flush=True)


def start(*args, log=subprocess.DEVNULL):
    """A command in a process group of its own."""
    return subprocess.Popen([COMMAND, *map(str, args)], env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)


def run(*args):
    """What a command prints; it must succeed."""
    done = subprocess.run([COMMAND, *map(str, args)], env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"speculators-nb {' '.join(map(str, args))}: exit code {done.returncode}\n"
            f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def kill(process):
    """kill -9 of a command and of all that it started in its group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def killed_when(condition, *args):
    """Start a command and kill it as soon as the condition holds. Whether it was still running."""
    process = start(*args)
    while process.poll() is None and not condition():
        time.sleep(0.02)
    running = process.poll() is None
    if running:
        kill(process)
    return running


class Serving:
    """`speculators-nb serve … --run` in a process group of its own: started at once, ended with a `with` block."""

    def __init__(self, port, folder, *args):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        self.args = args
        self.process = None
        self.start()

    def start(self):
        "Start it, and wait until it answers."
        with self.log.open("ab") as log:
            self.process = start(
                "serve",
                *self.args,
                "--dtype",
                "float32",
                "--max-model-len",
                1024,
                "--port",
                self.port,
                "--run",
                "--extra=--max-num-seqs=8",
                log=log,
            )
        endpoint, began = Endpoint(self.url, timeout=5, tries=1), time.monotonic()
        while True:
            if self.process.poll() is not None or time.monotonic() - began > 600:
                raise SystemExit(
                    f"serve {' '.join(map(str, self.args))}: no server\n{self.log.read_text(errors='replace')[-4000:]}"
                )
            try:
                endpoint.get("/health")
                return
            except EndpointError:
                time.sleep(0.5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)
        self.gone()

    def gone(self):
        "Wait until nobody listens any more."
        endpoint, began = Endpoint(self.url, timeout=2, tries=1), time.monotonic()
        while time.monotonic() - began < 30:
            try:
                endpoint.get("/health")
                time.sleep(0.2)
            except EndpointError:
                return
        raise SystemExit(f"{self.url}: the server outlives its command")


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def states(path):
    with safe_open(path, "np") as f:
        return f.get_tensor("hidden_states"), f.get_tensor("token_ids")


def features_equal(ours, theirs):
    """Largest difference of two feature folders, relative to the size of each layer's states; every row once, none
    torn."""
    names = sorted(p.name for p in ours.glob("hs_*.safetensors"))
    assert names and names == sorted(p.name for p in theirs.glob("hs_*.safetensors")), "the folders hold other rows"
    worst = 0
    for name in names:
        (a, ids), (b, same) = states(ours / name), states(theirs / name)
        assert np.array_equal(ids, same) and a.shape == b.shape, f"{name}: other tokens"
        for layer in range(a.shape[1]):
            worst = max(worst, float(np.abs(a[:, layer] - b[:, layer]).max() / np.abs(b[:, layer]).max()))
    return len(names), worst


def check(folder, kills):
    began, chats = time.monotonic(), KILLED_CHATS if kills else CHATS
    with stage("install vLLM") as found:
        found["already there" if (VENV / ".complete").exists() else "made"] = VENV.name
        install()
    answers, prepared, served, here, drafter = (
        folder / n for n in ("answers.jsonl", "prepared", "features-vllm", "features-hf", "drafter")
    )

    with stage("serve the verifier") as found:
        server = Serving(free_port(), folder, VERIFIER)
    with server, stage("regenerate") as found:
        args = (
            "regenerate",
            CORPUS / "train.jsonl",
            answers,
            "--server",
            server.url,
            "--max-samples",
            chats,
            "--max-new-tokens",
            96,
        )
        if kills:
            assert killed_when(lambda: lines(answers) >= chats // 4, *args), (
                "the client was done before it could be killed"
            )
            found["client killed after"] = f"{lines(answers)} lines"
        run(*args)
        rows = [json.loads(line) for line in answers.open()]
        asked = [row["primary_id"] for row in rows if row["part"][0] == 0]
        assert len(asked) == len(set(asked)) == chats, (
            f"{len(asked)} conversations, {len(set(asked))} different ones, expected {chats}"
        )
        found["conversations"] = len(asked)
    with stage("prepare") as found:
        run("prepare", answers, prepared, "--verifier", VERIFIER, "--max-length", 384, "--num-proc", 1)
        config = json.loads((prepared / "data_config.json").read_text())
        found["rows"], found["tokens"] = config["data"]["num_samples"], config["data"]["num_tokens"]

    with stage("serve the verifier's hidden states"):
        server = Serving(free_port(), folder, VERIFIER, "--hidden-states", folder / "states")
    args = (
        "features",
        prepared,
        served,
        "--verifier",
        VERIFIER,
        "--source",
        "vllm",
        "--storage",
        folder / "states",
        "--server",
        server.url,
        "--dtype",
        "float32",
    )

    def made():
        return len(list(served.glob("hs_*.safetensors")))

    with server, stage("features over HTTP") as found:
        if kills:
            n = config["data"]["num_samples"]
            assert killed_when(lambda: made() >= n // 4, *args), "the client was done before it could be killed"
            found["client killed at"] = made()
            client = start(*args)
            while made() < n // 2:
                assert client.poll() is None, "the client ended by itself"
                time.sleep(0.02)
            kill(server.process)
            server.gone()
            found["server killed at"] = made()
            assert made() < n, "the client was done before the server could be killed"
            server.start()
            code = client.wait(300)
            found["client went on"] = code == 0
        print("  ", run(*args).splitlines()[0])
        left = [p.name for p in (folder / "states").iterdir() if p.name != "extraction.json"]
        assert not left, f"left in the shared folder: {left}"
    with stage("features by Hugging Face") as found:
        run("features", prepared, here, "--verifier", VERIFIER, "--dtype", "float32")
        found["rows"], worst = features_equal(served, here)
        found["largest relative difference"] = f"{worst:.1e}"
        assert worst <= 1e-3, f"the engine's hidden states differ by {worst:.2e}"

    args = (
        "--num-train-epochs",
        4,
        "--total-seq-len",
        512,
        "--extra",
        f"ttt_steps={K}",
        "--extra",
        "report_to=none",
    )
    with stage("train EAGLE-3") as found:
        if kills:
            assert killed_when(
                lambda: any(drafter.glob("checkpoint-*/trainer_state.json")), "train", served, drafter, *args
            ), "the trainer was done before it could be killed"
            found["killed with"] = ", ".join(sorted(p.name for p in drafter.glob("checkpoint-*")))
        run("train", served, drafter, *args, "--resume")
    if kills:
        with stage("train again, undisturbed") as found:
            run("train", served, folder / "undisturbed", *args)
            assert (drafter / "model.safetensors").read_bytes() == (
                folder / "undisturbed/model.safetensors"
            ).read_bytes(), "the resumed drafter is another one"
            found["same drafter"] = "to the bit"
    with stage("check"):
        print("  ", run("check", drafter).strip())

    with stage("serve the drafter"):
        server = Serving(free_port(), folder, drafter)
    common = (drafter, CORPUS / "heldout.jsonl", "--max-samples", PROMPTS, "--max-new-tokens", TOKENS)
    with server, stage("acceptance from /metrics"):
        run("evaluate", *common, "--engine", "vllm", "--server", server.url, "--output-dir", folder / "engine")
    with stage("acceptance in process"):
        run("evaluate", *common, "--as-engine", "--no-ngram", "--k", K, "--output-dir", folder / "reference")
    with stage("compare") as found:
        table = run(
            "compare",
            f"vllm={folder / 'engine'}",
            f"reference={folder / 'reference'}",
            "--output-dir",
            folder / "comparison",
        )
        engine, reference = (
            pd.read_json(folder / name / "requests.jsonl", lines=True) for name in ("engine", "reference")
        )
        assert len(engine) == len(reference) == PROMPTS
        for name in ("steps", "drafts", "proposed", "accepted", "accepted_at"):
            assert engine[name].tolist() == reference[name].tolist(), (
                f"{name}: vLLM {engine[name].tolist()}, here {reference[name].tolist()}"
            )
        a, b = (pd.read_csv(folder / name / "positions.csv").unconditional for name in ("engine", "reference"))
        assert np.allclose(a, b, atol=0)
        assert engine.accepted.sum() > 0, "nothing was accepted, so nothing was compared"
        found["prompts"], found["accepted"] = (
            PROMPTS,
            f"{engine.accepted.sum()} of {engine.proposed.sum()} tokens, the same in each request",
        )
        print(table)
    for output in (answers, prepared, served, here, drafter, folder / "engine", folder / "reference"):
        record = (
            [output.with_name(f"{output.name}.provenance.json")]
            if output.is_file()
            else [output / "provenance.json", output / "data_config.json"]
        )
        assert any(r.is_file() for r in record), f"{output}: no provenance beside it"
    return time.monotonic() - began


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--no-kills", dest="kills", action="store_false", help="leave the interruptions out")
    p.add_argument("--keep", type=Path, help="folder for what is made; default: a temporary one")
    args = p.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="pipeline-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    took, limit = check(folder.resolve(), args.kills), float(os.environ.get("LIMIT_MINUTES", 20))
    print(pd.DataFrame(STAGES).to_string(index=False))
    print(f"{took:.0f} s: chats to a served drafter, every check passed")
    if not args.keep:
        shutil.rmtree(folder)
    if took > 60 * limit:
        raise SystemExit(f"that is more than {limit:g} minutes")


if __name__ == "__main__":
    main()
