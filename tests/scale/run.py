#!/usr/bin/env python
"""Memory and time at 100,000 rows and more: `make scale`, part of `make nightly`. A quarter of an hour.

    python tests/scale/run.py [--small]        results in tests/scale/results.json; `--small`: a tenth, stored nowhere

Each measurement is a process of its own. `prepare` of 100,000 and 300,000 conversations: its peak of memory, mapped
files included (VmHWM), and that of its largest child; processor time. A feature folder of 100,000 rows in shards: time
and memory of opening it beyond the imports, and the time of a random row beside that of a row in a file of its own."""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
VERIFIER = ROOT / "data/tiny-verifier"
HIDDEN = 64


def memory():
    "Peak and present memory of this process, MB."
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS"))


# ---- in processes of their own


def write_conversations(path, n):
    "Conversations of two to six messages, of 4 to 30 words each."
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvwy", k=draw.randint(2, 9))) for _ in range(5000)]
    with open(path, "w") as file:
        for i in range(n):
            texts = [" ".join(draw.choices(words, k=draw.randint(4, 30))) for _ in range(2 * draw.randint(1, 3))]
            roles = ("user", "assistant") * 3
            messages = [dict(role=role, content=f"{i} {text}") for role, text in zip(roles, texts)]
            file.write(json.dumps({"messages": messages}) + "\n")


def measure_prepare(path, folder):
    from speculators_nb.data.prepare import prepare_data

    imports, began = memory()[0], time.monotonic()
    prepared = prepare_data(path, VERIFIER, folder, val_fraction=0.01, num_proc=2)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "rows": len(prepared),
        "tokens": int(prepared.lengths.sum()),
        "imports_mb": imports,
        "peak_mb": memory()[0],
        "peak_of_a_child_mb": usage[1].ru_maxrss / 1024,
        "seconds": time.monotonic() - began,
        "cpu_seconds": sum(u.ru_utime + u.ru_stime for u in usage),
    }


def measure_writing(folder, n, shard_gb):
    import torch

    from speculators_nb.data.chat_encoding import to_dataset
    from speculators_nb.features.feature_folder import FeatureFolder, origin

    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(8, 33, (n,), generator=draw).tolist():
        rows.append((torch.randint(0, 2048, (length,), generator=draw).numpy(), [True] * length))
    began = time.monotonic()
    table = to_dataset(rows)
    with FeatureFolder(folder, table, origin({}, [1, 2, 4], table, "bfloat16"), shard_gb=shard_gb) as features:
        for i, (ids, _) in enumerate(rows):
            features.write(i, torch.full((len(ids), 3, HIDDEN), i % 256, dtype=torch.bfloat16))
    return {"seconds": time.monotonic() - began, "files": len(list(folder.rglob("*.safetensors")))}


def measure_reading(folder, reads):
    from speculators_nb.features.feature_folder import FeatureDataset

    (peak, now), began = memory(), time.monotonic()
    features = FeatureDataset(folder)
    opened = time.monotonic() - began
    (peak_open, now_open) = memory()
    rows = random.Random(1).sample(range(len(features)), reads)
    times = []
    for i in rows:
        start = time.perf_counter()
        row = features.read(i)
        times.append(time.perf_counter() - start)
        assert (row.states == i % 256).all(), i
    return {
        "rows": len(features),
        "open_seconds": opened,
        "open_mb": max(now_open - now, peak_open - peak),
        "row_microseconds": 1e6 * statistics.median(times),
    }


# ---- what is measured, and what it must be


def apart(name, *arguments):
    "The result of a function of this file, in a process of its own."
    words = [sys.executable, __file__, "--measure", name, *map(str, arguments)]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=quiet).stdout)


def prepare_part(work, sizes):
    found = {}
    for n in sizes:
        write_conversations(work / "chats.jsonl", n)
        found[n] = apart("measure_prepare", work / "chats.jsonl", work / f"prepared-{n}")
        print(n, found[n], flush=True)
    few, many = (found[n] for n in sizes)
    found["peak_ratio"] = many["peak_mb"] / few["peak_mb"]
    found["time_ratio"] = many["cpu_seconds"] / few["cpu_seconds"] / (sizes[1] / sizes[0])
    return found


def features_part(work, n, reads=2000):
    files = max(reads, n // 20)
    found = {
        "shards": apart("measure_writing", work / "shards", n, 0.05),
        "files": apart("measure_writing", work / "files", files, "none"),
    }
    for name in found:
        found[name] |= apart("measure_reading", work / name, reads)
        print(name, found[name], flush=True)
    found["row_ratio"] = found["shards"]["row_microseconds"] / found["files"]["row_microseconds"]
    return found


def problems(prepare, features):
    "What is not as it must be."
    limits = {
        "peak memory of prepare at three times the conversations, relative": (prepare["peak_ratio"], 1.1),
        "time of prepare for a conversation at three times as many, relative": (prepare["time_ratio"], 1.2),
        "seconds to open the shards": (features["shards"]["open_seconds"], 2),
        "MB to open the shards": (features["shards"]["open_mb"], 100),
        "time of a random row in a shard, relative to a file": (features["row_ratio"], 2),
    }
    return [f"{name}: {value:.3g}, at most {most}" for name, (value, most) in limits.items() if value > most]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--measure", nargs="+")
    args = parser.parse_args()
    if args.measure:
        name, *words = args.measure
        words = [None if w == "none" else float(w) if "." in w and "/" not in w else w for w in words]
        words = [int(w) if isinstance(w, str) and w.isdecimal() else w for w in words]
        words = [Path(w) if isinstance(w, str) else w for w in words]
        print(json.dumps(globals()[name](*words)))
        return
    scale = 10 if args.small else 1
    with tempfile.TemporaryDirectory() as work:
        features = features_part(Path(work), 100_000 // scale)
        prepare = prepare_part(Path(work), [100_000 // scale, 300_000 // scale])
    wrong = problems(prepare, features)
    if not args.small:
        where = {"python": platform.python_version(), "machine": platform.machine()}
        text = json.dumps(where | {"prepare": prepare, "features": features, "problems": wrong}, indent=1)
        RESULTS.write_text(text + "\n")
    print(*wrong or ["all as it must be"], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
