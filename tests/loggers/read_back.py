"""What TensorBoard stored of a run, read with its own reader, and what the trainer's history says of it."""

import json
import re
from pathlib import Path


def history(run: Path) -> dict[tuple[str, int], float]:  # (name, step) -> value
    "The trainer's own log, of the last checkpoint."
    last = max(run.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    rows = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {(name, row["step"]): value for row in rows for name, value in row.items() if name != "step"}


def stored_name(name: str) -> str:
    "How TensorBoard calls a value of the history."
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def tensorboard(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def problems(run: Path) -> list[str]:
    "What a logger lacks, or stored otherwise than the trainer's history has it; empty: nothing."
    wanted, found = history(run), tensorboard(run)
    wrong = []
    for (name, step), value in wanted.items():
        stored = found.get((stored_name(name), step))
        if stored is None or abs(stored - value) > 1e-6 * max(1.0, abs(value)):
            wrong.append(f"{name} at step {step}: {stored} stored, {value} in the history")
    names = {name for name, _ in wanted}
    for needed in ("loss", "eval_loss", "learning_rate", r".*acc.*\d"):
        if not any(re.fullmatch(needed, name) for name in names):
            wrong.append(f"the history has no {needed}: {sorted(names)}")
    return wrong
