#!/usr/bin/env python
"""SkyPilot reads the file of the page "On a cluster", and its `run` is a command of ours: `make skypilot-test`, part of
`make nightly`. The first call makes .venv-sky (0.5 GB). Nothing is launched, and no account is needed.

    python tests/cluster/check_skypilot.py     results in tests/cluster/skypilot.json; exit status 1 where it is wrong
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("skypilot.json")
VENV = ROOT / ".venv-sky"
PAGE = (ROOT / "docs/on_a_cluster.md").read_text()
READ = """
import json, sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
found = dict(skypilot=sky.__version__, name=task.name, nodes=task.num_nodes, accelerators=resources.accelerators)
print(json.dumps(found | dict(file_mounts=task.file_mounts, setup=task.setup, run=task.run)))
"""


def install():
    if (VENV / ".complete").exists():
        return
    print(f"making {VENV.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    pip = [VENV / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "skypilot>=0.12"], check=True)
    (VENV / ".complete").touch()


def read_by_skypilot(text, folder):
    "What SkyPilot makes of a file; its error, where it refuses it."
    file = folder / "train.sky.yaml"
    file.write_text(text)
    (folder / "features").mkdir(exist_ok=True)
    done = subprocess.run(
        [VENV / "bin/python", "-c", READ, file],
        cwd=folder,
        env=os.environ | dict(HOME=str(folder)),
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1]) if not done.returncode else done.stderr.strip().splitlines()[-1]


def words_of(run):
    "The torchrun line of `run`, with the numbers that SkyPilot gives."
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "7", "HEAD": "10.0.0.1"}
    (line,) = (x for x in run.replace("\\\n", " ").splitlines() if "speculators-nb" in x)
    return shlex.split(re.sub(r"\$(\w+)", lambda m: given[m[1]], line))


def check_command(words):
    "Errors: what torchrun or the program does not take."
    from torch.distributed.run import get_args_parser
    from typer.main import get_command

    from speculators_nb.cli.main import app

    commands = get_command(app).commands
    at = next(i for i, word in enumerate(words) if word in commands)
    get_args_parser().parse_args([*words[1:at], "script"])
    commands[words[at]].make_context(words[at], words[at + 1 :])


def main():
    install()
    (text,) = (b for b in re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.M | re.S) if "num_nodes" in b)
    with tempfile.TemporaryDirectory() as place:
        found = read_by_skypilot(text, Path(place))
        print(found, flush=True)
        if isinstance(found, str):
            return 1
        refused = read_by_skypilot(text.replace("num_nodes: 2", "num_nods: 2"), Path(place))
    check_command(words_of(found.pop("run")))
    found |= dict(a_wrong_field_is_refused=isinstance(refused, str) and "num_nods" in refused)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    wanted = dict(name="drafter", nodes=2, accelerators={"H100": 8}, a_wrong_field_is_refused=True)
    return int(any(found[name] != value for name, value in wanted.items()))


if __name__ == "__main__":
    sys.exit(main())
