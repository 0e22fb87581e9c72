"""A small run for loggers, what they stored of it, read with their own readers, and what the trainer's history says."""

import json
import re
from pathlib import Path

NAMES = "tensorboard", "wandb", "mlflow", "trackio"
NEEDED = "loss", "eval_loss", "learning_rate", "eval_mean_length", "eval_accepted_1", r".*acc.*\d"
ROOT = Path(__file__).parents[2]


def train_line(logger: str, run: Path, folder: Path) -> list[str]:
    "Arguments of `train`: four steps on the shipped answers, and at each of two evaluations two prompts are decoded."
    from speculators_nb.lab.experiment import shipped_features

    with (ROOT / "data/corpus/heldout.jsonl").open() as lines:
        (folder / "prompts.jsonl").write_text("".join(next(lines) for _ in range(2)))
    line = ["train", shipped_features(n=20), run, "--verifier", ROOT / "data/tiny-verifier", "--total-seq-len", "256"]
    line += ["--decode-prompts", folder / "prompts.jsonl"]
    more = dict(max_steps=4, logging_steps=1, eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2)
    for name, value in (more | dict(disable_tqdm="true", report_to=logger)).items():
        line += ["--extra", f"{name}={value}"]
    return [*map(str, line)]


def history(run: Path) -> dict[tuple[str, int], float]:  # (name, step) -> value
    "The trainer's own log, of the last checkpoint."
    last = max(run.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    rows = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {(name, row["step"]): value for row in rows for name, value in row.items() if name != "step"}


def stored_name(logger: str, name: str) -> str:
    "How a logger calls a value of the history."
    if logger == "mlflow":
        return name
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def tensorboard(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def records(data: bytes):
    "The records of a `.wandb` file, a log of LevelDB: blocks of 32 KiB with chunks of checksum, size, kind, content."
    place, record = 7, b""  # behind the file's own header
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield record
            record = b""


def wandb(run: Path):
    "An offline run."
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    found = {}
    for data in records(file.read_bytes()):
        items = {
            "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in Record.FromString(data).history.item
        }
        if "train/global_step" in items:
            found |= {(name, items["train/global_step"]): value for name, value in items.items()}
    return found


def mlflow(run: Path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    (one,) = client.search_runs(["0"])
    return {(n, m.step): m.value for n in one.data.metrics for m in client.get_metric_history(one.info.run_id, n)}


def trackio(run: Path):
    import sqlite3

    found = {}
    for file in (run / "trackio").glob("*.db"):
        with sqlite3.connect(file) as db:
            for (text,) in db.execute("SELECT metrics FROM metrics"):
                row = json.loads(text)
                found |= {(name, row["train/global_step"]): value for name, value in row.items()}
    return found


def problems(logger: str, run: Path) -> list[str]:
    "What a logger lacks, or stored otherwise than the trainer's history has it; empty: nothing."
    readers = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}
    wanted, found, wrong = history(run), readers[logger](run), []
    for (name, step), value in wanted.items():
        stored = found.get((stored_name(logger, name), step))
        if stored is None or abs(stored - value) > 1e-6 * max(1.0, abs(value)):
            wrong.append(f"{logger}: {name} at step {step}: {stored} stored, {value} in the history")
    names = {name for name, _ in wanted}
    for needed in NEEDED:
        if not any(re.fullmatch(needed, name) for name in names):
            wrong.append(f"the history has no {needed}: {sorted(names)}")
    return wrong


def secrets_in(folder: Path, secret: str) -> list[str]:
    "Files that hold a secret."
    return [str(p) for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
