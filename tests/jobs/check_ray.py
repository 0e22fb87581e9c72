#!/usr/bin/env python
"""`--engine ray` on a real cluster of two nodes on this machine, 200 rows, a worker killed on the way: `make ray-test`,
part of `make nightly`. The first call makes .venv-ray beside this environment (0.3 GB).

    python tests/jobs/check_ray.py        results in tests/jobs/ray.json; the exit status is 1 where something is wrong
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("ray.json")
VENV = ROOT / ".venv-ray"
ROWS = 200


def install():
    "Make .venv-ray: Ray beside what this interpreter has, which stays as it is."
    if (VENV / ".complete").exists():
        return
    import sysconfig

    print(f"making {VENV.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    (site,) = (VENV / "lib").glob("python*/site-packages")
    (site / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    pip = [VENV / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "ray[default]>=2.40"], check=True)
    (VENV / ".complete").touch()


def chats(path):
    "Two hundred questions."
    rows = [{"id": i, "messages": [{"role": "user", "content": f"How far is it to town {i}?"}]} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kill_one(output, killed):
    "When rows are there, kill a Ray task that is at work: it holds the lock of its share open."
    import psutil

    place = output.parent if output.suffix else output
    while not killed:
        time.sleep(0.02)
        if not (output.is_file() or [*output.glob("hs_*")]):
            continue
        for process in psutil.process_iter(["cmdline"]):
            is_task = "ray::_run" in " ".join(process.info["cmdline"] or [])
            if is_task and any(Path(f.path).parent == place and "-of-" in f.path for f in process.open_files()):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                break


def add_node(cluster, tries=4):
    "A second node; Ray gives one half a minute to start, which a busy machine may need several times."
    for left in reversed(range(tries)):
        try:
            return cluster.add_node(num_cpus=1)
        except Exception as e:
            if not left or "timed out" not in str(e):
                raise


def run():
    import threading

    os.environ |= dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
    import ray
    from ray.cluster_utils import Cluster

    from speculators_nb.cli.data_commands import features, regenerate

    verifier = str(ROOT / "data/tiny-verifier")
    found = dict(ray=ray.__version__, rows=ROWS, nodes=2)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        chats(folder / "chats.jsonl")
        given = dict(verifier=verifier, max_new_tokens=24, temperature=1.0, device="cpu")
        regenerate(str(folder / "chats.jsonl"), folder / "alone.jsonl", **given)
        states = dict(dtype="float32", max_tokens=256, device="cpu")
        features(verifier, str(folder / "alone.jsonl"), folder / "alone", **states)
        cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
        add_node(cluster)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address)
        for name, output, call in (
            (
                "regenerate",
                folder / "out.jsonl",
                lambda out: regenerate(str(folder / "chats.jsonl"), out, engine="ray", **given),
            ),
            (
                "features",
                folder / "features",
                lambda out: features(verifier, str(folder / "alone.jsonl"), out, engine="ray", **states),
            ),
        ):
            killed = []
            thread = threading.Thread(target=kill_one, args=(output, killed), daemon=True)
            thread.start()
            began = time.monotonic()
            counts = call(output)
            found[name] = dict(
                seconds=round(time.monotonic() - began, 1),
                killed=len(killed),
                written=counts["written"],  # by the tasks that were not killed
                rows=counts["written"] + counts["kept"],
                equal=equal(output, folder / ("alone.jsonl" if output.suffix else "alone")),
                left=[p.name for p in folder.rglob(".*") if p.suffix != ".lock"],
            )
            print(name, found[name], flush=True)
        ray.shutdown()
        cluster.shutdown()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    good = [found[n] for n in ("regenerate", "features")]
    return not all(g["killed"] == 1 and g["rows"] == ROWS and g["equal"] and not g["left"] for g in good)


def equal(made, alone):
    "Whether two outputs are the same bytes."
    if made.is_file():
        return made.read_bytes() == alone.read_bytes()
    files = sorted(p.name for p in alone.glob("hs_*"))
    same = all((made / name).read_bytes() == (alone / name).read_bytes() for name in files)
    return same and files == sorted(p.name for p in made.glob("hs_*"))


if __name__ == "__main__":
    if "--inside" not in sys.argv:
        install()
        line = [VENV / "bin/python", __file__, "--inside"]
        sys.exit(subprocess.run(line, env=os.environ | dict(PYTHONPATH=str(ROOT))).returncode)
    sys.exit(run())
