#!/usr/bin/env python
"""The Slurm lines of the page "On a cluster" under a Slurm of their own: a controller and two nodes on loopback, from
Debian's packages (installed where this runs as root): `make slurm-test`, part of `make nightly`. Two minutes.

    python tests/cluster/check_slurm.py     results in tests/cluster/slurm.json; exit status 1 where a line fails

`train.sbatch` trains on two nodes. `srun` starts four processes that share one `regenerate`, one of them is killed, and
the same line, once more, makes what is missing.
Only devices, folders, lengths and numbers of processes are other than on the page."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("slurm.json")
PROGRAMS = Path(sys.executable).parent  # of speculators-nb and speculators-nb-torchrun
PACKAGES = ("slurm-wlm", "munge")
PAGE = (ROOT / "docs/on_a_cluster.md").read_text()
VERIFIER = ROOT / "data/tiny-verifier"

CONFIG = """
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def install():
    "Debian's packages, where they are missing. SystemExit: this is not root, who alone can give nodes their names."
    if os.getuid():
        sys.exit("slurm-test needs root, to install Slurm and to give its nodes names: run it as root")
    path = os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if all(shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "munged", "sbatch")):
        return
    print(f"installing {' and '.join(PACKAGES)}", flush=True)
    quiet = dict(stdout=subprocess.DEVNULL, env=os.environ | dict(DEBIAN_FRONTEND="noninteractive"), check=True)
    subprocess.run(["apt-get", "-qq", "update"], **quiet)
    subprocess.run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", *PACKAGES], **quiet)


def free_ports(n):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def wait_until(condition, seconds, what, log):
    "TimeoutError: it does not come; with the end of a log."
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} after {seconds} seconds: {log.read_text()[-2000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def slurm(folder):
    "A controller and two nodes; its programs find it by SLURM_CONF."
    import getpass

    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(user=getpass.getuser(), folder=folder, ports=free_ports(3)))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    os.environ["SLURM_CONF"] = str(config)
    names = dict(key="munge.key", socket="munge.socket", log="munge.log", pid="munge.pid", seed="munge.seed")
    options = [f"--{name}-file={folder / file}" for name, file in names.items() if name != "socket"]
    daemons = [["munged", "--foreground", f"--socket={folder / names['socket']}", *options], ["slurmctld", "-D"]]
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "127.0.0.1 node1 node2\n")
    # a node is known by its host's name: each has a name and a list of names of its own
    node = f"mount --bind {hosts} /etc/hosts && hostname $0 && exec slurmd -D"
    daemons += [["unshare", "--uts", "--mount", "sh", "-c", node, name] for name in ("node1", "node2")]
    with contextlib.ExitStack() as stack:
        for words in daemons:
            log = stack.enter_context((folder / f"{words[0]}.out").open("ab"))
            process = subprocess.Popen(words, stdout=log, stderr=log)
            stack.callback(end, process)
            if words[0] == "munged":
                wait_until((folder / "munge.socket").exists, 20, "no munged", folder / "munged.out")
        states = ["sinfo", "-h", "-N", "-o", "%T"]
        log = folder / "slurmctld.log"
        wait_until(lambda: output(*states).split() == ["idle"] * 2, 90, "no two idle nodes", log)
        yield


def end(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def output(*words):
    "What a program of Slurm prints; nothing where it fails."
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip()


def block(marker):
    "The code block of the page that holds a text, and the one line of it, without line breaks."
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
    (found,) = (b for b in blocks if marker in b)
    return found.replace(" \\\n    ", " ")


def replaced(text, **words):
    "A text with other words; each must occur in it."
    for old, new in words.items():
        assert old in text, f"{old!r} is not on the page"
        text = text.replace(old, str(new))
    return text


def train(folder, features):
    "The page's train.sbatch, on two nodes."
    script = folder / "train.sbatch"
    (port,) = free_ports(1)
    changes = {
        "#SBATCH --gpus-per-node=8\n": f"#SBATCH --output={folder}/train.log\n",
        "--nproc-per-node 8": "--nproc-per-node 1",
        ":29500": f":{port}",
        "train features drafter": f"train {features} {folder}/drafter --verifier {VERIFIER} --max-steps 3",
        "--total-seq-len 8192": "--total-seq-len 256",
    }
    script.write_text(replaced(block("#SBATCH --job-name=drafter"), **changes))
    began = time.monotonic()
    done = subprocess.run(["sbatch", "--wait", script], cwd=folder, capture_output=True, text=True)
    log = (folder / "train.log").read_text() if (folder / "train.log").is_file() else done.stderr
    record = folder / "drafter/provenance.json"
    found = dict(seconds=round(time.monotonic() - began, 1), status=done.returncode)
    if done.returncode or not record.is_file():
        return found | dict(log=log[-2000:])
    record = json.loads(record.read_text())
    return found | dict(world_size=record["results"]["world_size"], steps=record["results"]["steps"])


def regenerate(folder, alone, chats):
    "The page's srun line twice: four tasks on two nodes, one of them killed when it has begun; and what is missing."
    (line,) = (x for x in block("srun --ntasks 16").splitlines() if x.startswith("srun"))
    answers = folder / "answers.jsonl"
    changes = {
        "srun --ntasks 16": "srun --nodes 2 --ntasks 4 --no-kill --wait 0",
        "chats.jsonl": chats,
        "answers.jsonl": answers,
        "Qwen/Qwen3-8B": f"{VERIFIER} --max-new-tokens 24 --temperature 1 --device cpu",
    }
    line = ["bash", "-c", replaced(line, **changes)]
    began = time.monotonic()
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    killed = kill_a_task(answers, process)
    errors = process.communicate(timeout=300)[1]
    found = dict(tasks=4, killed=killed, rows_after_the_kill=rows_in(answers))
    errors += subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=300).stderr
    found |= dict(seconds=round(time.monotonic() - began, 1), rows=rows_in(answers))
    found["equal"] = answers.is_file() and answers.read_text() == alone.read_text()
    found["left"] = sorted(p.name for p in folder.iterdir() if p.name.startswith(".") and p.suffix != ".lock")
    return found if found["equal"] else found | dict(log=errors[-2000:])


def rows_in(answers):
    return len(answers.read_text().splitlines()) if answers.is_file() else 0


def kill_a_task(answers, process):
    "Kill the task that came first, once rows are done; how many were killed."
    while process.poll() is None:
        time.sleep(0.02)
        if rows_in(answers) and (task := first_task()):
            os.kill(task, signal.SIGKILL)
            return 1
    return 0


def first_task():
    "The process id of the task that was started first, by its environment."
    tasks = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environment = file.read_bytes().split(b"\0")
            ours = f"SLURM_CONF={os.environ['SLURM_CONF']}".encode() in environment
            if ours and any(variable.startswith(b"SLURM_PROCID=") for variable in environment):
                tasks.append(int(file.parent.name))
    return min(tasks, default=None)


def main():
    install()
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from speculators_nb.cli.data_commands import features as extract
    from speculators_nb.cli.data_commands import regenerate as answer

    os.environ["PATH"] = f"{PROGRAMS}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o711)  # munge wants its socket to be reached by all
        chats, alone = folder / "chats.jsonl", folder / "alone.jsonl"
        rows = [{"id": i, "messages": [{"role": "user", "content": f"How far is town {i}?"}]} for i in range(200)]
        chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answer(str(chats), alone, str(VERIFIER), max_new_tokens=24, temperature=1.0, device="cpu")
        extract(str(VERIFIER), str(ROOT / "data/answers/train.jsonl"), folder / "features", max_samples=24)
        with slurm(folder):
            found = dict(slurm=output("sinfo", "-V"), nodes=2)
            for name, run in (
                ("train.sbatch", lambda: train(folder, folder / "features")),
                ("srun regenerate", lambda: regenerate(folder, alone, chats)),
            ):
                found[name] = run()
                print(name, found[name], flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    trained, answered = found["train.sbatch"], found["srun regenerate"]
    good = trained.get("world_size") == 2 and trained["steps"] == 3
    return not (good and answered["killed"] and answered["equal"] and not answered["left"])


if __name__ == "__main__":
    sys.exit(main())
