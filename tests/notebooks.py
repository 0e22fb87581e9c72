#!/usr/bin/env python
"""Run the notebooks as JupyterLab runs them: each in a kernel and a working folder of its own. One run checks the
assertions and the figures, and can store the outputs.

    python tests/notebooks.py                                      all notebooks below nbs/; stores nothing
    python tests/notebooks.py nbs/nn/02_attention.ipynb nbs/train    these
    python tests/notebooks.py --flags slow                         with the cells that train for minutes
    python tests/notebooks.py --save                               store what the notebooks that passed have shown
    python tests/notebooks.py --times docs/times.yml --flags slow  store how long they ran, for the site

nbdev decides which cells run (`#| eval`, the test flags, `skip_exec` in the front matter), so `nbdev-test` runs the
same cells. Beyond that, every cell must show as many pictures as it has stored, none of them blank and no figure
twice, and what it shows must be stored. Stored outputs are the same bytes in every run: without execution counts,
standard error, progress bars and memory addresses.
"""

import argparse
import asyncio
import base64
import gc
import io
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import nbformat
import yaml
from fastcore.nbio import read_nb, write_nb
from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
# What takes long to import: kernels are forked from a process that has it; where fork is not safe, each imports its own
WARM = [
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "datasets",
    "transformers.trainer",
    "transformers.models.qwen3.modeling_qwen3",
    "nbclient",
    "nbdev.test",
]
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
KERNEL = ["--InlineBackend.figure_formats={'retina'}", "--HistoryManager.enabled=False"]
PICTURES = ("image/png", "image/jpeg", "image/svg+xml")
BAR = re.compile(r".*\d+%\|.*\|.*\[.*\].*\n?")  # a progress bar of tqdm as text
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # in the traceback of a kernel


# ---- a kernel


def serve_kernel(arguments, folder, log):
    "The kernel's process, from its first to its last line"
    if hasattr(os, "setsid"):
        os.setsid()  # what the notebook starts ends with its kernel
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ["JPY_PARENT_PID"] = str(os.getppid())  # the kernel ends when its parent does
    multiprocessing.set_start_method(None, force=True)  # the platform's own, as in Jupyter
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests"))]
    sys.argv = ["ipykernel_launcher", *arguments]
    from ipykernel.kernelapp import IPKernelApp

    gc.freeze()  # what is imported holds no garbage, and every training looks for some
    IPKernelApp.launch_instance(arguments)


class Process:
    "A process of `multiprocessing` with the interface of `subprocess.Popen`"

    stdin = stdout = stderr = None

    def __init__(self, *arguments):
        self.process = PROCESSES.Process(target=serve_kernel, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.process.kill()

    def terminate(self):
        self.process.terminate()


class Provisioner(LocalProvisioner):
    "Starts the kernel in a `Process`"

    async def launch_kernel(self, command, **kwargs):
        arguments = command[command.index("-f") :]
        self.process = Process(arguments, kwargs["cwd"], self.parent.log_file)
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class Manager(AsyncKernelManager):
    log_file = None  # gets what the kernel's process writes past the kernel

    async def _async_pre_start_kernel(self, **kwargs):
        self.provisioner = Provisioner(kernel_id=self.kernel_id, kernel_spec=self.kernel_spec, parent=self)
        return await super()._async_pre_start_kernel(**kwargs)

    pre_start_kernel = _async_pre_start_kernel


# ---- what a cell has shown


def stable(outputs):
    "Outputs as they are stored: without what differs from run to run"
    kept = [out for out in map(stable_output, joined_streams(outputs)) if out]
    return joined_streams(kept)  # a bar that stood between two prints is gone


def joined_streams(outputs):
    "Outputs without standard error; what was printed in pieces is in one"
    joined = []
    for out in map(nbformat.from_dict, outputs):
        if out.get("name") == "stderr":
            continue
        if out.output_type == "stream" and joined and joined[-1].get("name") == out.name:
            joined[-1].text += out.text
        else:
            joined.append(out)
    return joined


def stable_output(out):
    "One output as it is stored, or None"
    if out.output_type == "stream":
        overwritten = re.compile(r"[^\n]*\r(?!\n)")
        out.text = BAR.sub("", overwritten.sub("", out.text))
        return out if out.text else None
    if "data" not in out:
        return out
    if "snb-widget" in out.data.get("text/html", ""):  # one of ours, frozen; its live view has a random id
        out.data = {kind: text for kind, text in out.data.items() if kind.startswith("text/")}
    if "widget" in " ".join(out.data) or "<progress" in out.data.get("text/html", ""):
        return None
    out.metadata = {}
    if "execution_count" in out:
        out.execution_count = None
    for kind, value in out.data.items():
        if kind == "image/png":
            out.data[kind] = plain_png(value)
        elif kind.startswith("text/"):
            out.data[kind] = ADDRESS.sub("", value)
    return out


def plain_png(text):
    "A PNG in base64 without the chunks that name the program, its version or the time"
    data = base64.b64decode(text)
    at, chunks = 8, [data[:8]]
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
            chunks.append(data[at:end])
        at = end
    return base64.b64encode(b"".join(chunks)).decode()


def pictures(outputs):
    "[(kind, data)] of all pictures among a cell's outputs"
    return [(kind, "".join(out["data"][kind])) for out in outputs for kind in PICTURES if kind in out.get("data", {})]


def is_blank(kind, data):
    "Does the picture have no pixel, or only one colour?"
    if kind == "image/svg+xml":
        return not re.search(r"<(path|text|rect|circle|line|poly\w+|image|use)\b", data)
    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
    return picture.width * picture.height == 0 or len(picture.getcolors(2) or "many") == 1


def named(outputs, output_type):
    "[(text, is there a picture too?)] of the outputs of this type"
    some = [out for out in outputs if out["output_type"] == output_type]
    return [(out["data"].get("text/plain", ""), bool(pictures([out]))) for out in some]


def faults_of(shown, stored, saving):
    "What is wrong with what a cell shows"
    now, before = pictures(shown), pictures(stored)
    if len(now) != len(before) and not saving:
        yield f"shows {len(now)} pictures in a kernel, {len(before)} are stored"
    if stable(shown) and not stored and not saving:
        yield "shows something, and nothing is stored; run tests/notebooks.py --save"
    for i, picture in enumerate(now):
        if is_blank(*picture):
            yield f"picture {i} is blank"
    displayed, results = named(shown, "display_data"), named(shown, "execute_result")
    for name, drawn in displayed + results:
        if name.startswith("<Axes") or (name.startswith("<Figure") and not drawn):
            yield f"shows {name} and no picture"
    for name, drawn in results:
        if drawn and name.startswith("<Figure") and (name, drawn) in displayed:
            yield f"shows {name} twice: as the cell's result, and because it is open"


# ---- a notebook


@dataclass
class Result:
    "What came of a notebook"

    path: Path
    cells: int = 0
    pictures: int = 0
    seconds: float = 0.0
    core: float = 0.0  # seconds of one core, which other work on the machine does not change
    faults: list[str] = field(default_factory=list)


def core_seconds(pid):
    "Seconds of a core that a process and its ended children took; 0 where the system has no /proc"
    file = Path(f"/proc/{pid}/stat")
    ticks = file.read_text().rpartition(")")[2].split()[11:15] if file.exists() else []
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


async def run_notebook(path, skip_flags, run_flags, seconds, save, log):
    "Run one notebook, and store its outputs if that is wanted and nothing is wrong"
    began, nb, result, outputs = time.monotonic(), nbformat.read(path, as_version=4), Result(path), {}
    chosen = {cell.id for cell in nb_test_cells(path, skip_flags, run_flags)}
    cells = [(i, cell) for i, cell in enumerate(nb.cells) if cell.id in chosen and cell.source.strip()]
    manager = Manager()
    manager.log_file = str(log)
    client = NotebookClient(
        nb, km=manager, store_widget_state=False, record_timing=False, startup_timeout=300, extra_arguments=KERNEL
    )
    where = "before the first cell"
    try:
        if cells:
            await client.async_start_new_kernel(cwd=str(path.parent))
            await client.async_start_new_kernel_client()
        deadline = time.monotonic() + seconds
        for i, cell in cells:
            where, stored = f"cell {i} ({cell.id})", cell.outputs
            client.timeout = max(1, int(deadline - time.monotonic()))
            await client.async_execute_cell(cell, i)
            outputs[cell.id] = stable(cell.outputs)
            result.cells += 1
            result.pictures += len(pictures(cell.outputs))
            result.faults += [f"{where} {fault}" for fault in faults_of(cell.outputs, stored, save)]
        if cells:
            result.core = core_seconds(manager.provisioner.pid)
    except CellExecutionError as error:
        result.faults.append(f"{where} failed\n{COLOUR.sub('', error.traceback)}")
    except CellTimeoutError:
        result.faults.append(f"{where} was running when the notebook's {seconds / 60:g} minutes were over")
    except (DeadKernelError, RuntimeError) as error:
        said = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        result.faults.append(f"{where}: the kernel died: {error}\n{said}")
    finally:
        await end(client, manager)
    if save and outputs and not result.faults:
        store(path, outputs)
    result.seconds = time.monotonic() - began
    return result


async def end(client, manager):
    "Let the kernel end, so that temporary folders are removed; then end what the notebook has left running"
    if not manager.has_kernel:
        return
    group = manager.provisioner.pgid
    await manager.shutdown_kernel(now=client.kc is None)
    if client.kc:
        client.kc.stop_channels()
    try:
        os.killpg(group, signal.SIGKILL)
    except (AttributeError, OSError):
        pass  # nothing was left, or the platform has no groups


def store(path, outputs):
    "Write the outputs of the cells that ran into the notebook, as `nbdev-clean` leaves it"
    nb = read_nb(path)
    for cell in nb.cells:
        if cell.get("id") in outputs:
            cell["outputs"] = outputs[cell["id"]]
    clean_nb(nb)
    write_nb(nb, path)


def store_times(file, results):
    "Add the seconds of the notebooks that passed, and the versions that they ran with, to a YAML file"
    versions = [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in ("torch", "transformers"))]
    known = yaml.safe_load(file.read_text()) if file.exists() else {}
    known |= {
        str(shown(r.path)): {"seconds": round(r.core), "versions": ", ".join(versions)}
        for r in results
        if r.cells and not r.faults
    }
    head = "# Seconds of one core, measured by `python tests/notebooks.py --times docs/times.yml --flags slow`.\n"
    file.write_text(head + yaml.safe_dump(known, width=200))


# ---- all of them


async def run_all(files, args, folder):
    "Run the notebooks, as many at a time as there are workers; their results in the order of `files`"
    skip = get_config(files[0]).tst_flags
    skip = skip.split() if isinstance(skip, str) else list(skip)
    places = asyncio.Semaphore(args.workers)

    async def one(i, path):
        async with places:
            log = folder / f"{i}.log"
            r = await run_notebook(path, skip, args.flags.split(), args.minutes * 60, args.save, log)
        verdict = "FAILED" if r.faults else "passed"
        print(f"{verdict}  {r.seconds:6.1f} s  {r.cells:3} cells  {r.pictures:2} pictures  {shown(path)}", flush=True)
        for fault in r.faults:
            print("    " + fault.strip().replace("\n", "\n    "), flush=True)
        return r

    return await asyncio.gather(*(one(i, path) for i, path in enumerate(files)))


def shown(path):
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def find(paths):
    "The notebooks at these places, those that run longest (the tutorials) first"
    files = {Path(f).resolve() for p in paths or [ROOT / "nbs"] for f in ([p] if Path(p).is_file() else nbglob(p))}
    return sorted((f for f in files if not (f.parent / ".notest").exists()), reverse=True)


def prepare(folder):
    "The environment that the kernels inherit"
    os.environ |= {
        "JUPYTER_COLUMNS": "96",  # rich draws its panels as wide as a line of code
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IN_TEST": "1",
        "IPYTHONDIR": f"{folder}/ipython",
        "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the order of sums depends on it
    sys.path.insert(0, str(ROOT))
    if sys.platform == "linux":
        PROCESSES.set_forkserver_preload(WARM)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="*", help="notebooks or folders; all notebooks by default")
    parser.add_argument("--save", action="store_true", help="store the outputs of the notebooks that pass")
    parser.add_argument("--times", type=Path, help="add how long they ran to this YAML file")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time (2)")
    parser.add_argument("--flags", default="", help="test flags whose cells run too")
    parser.add_argument("--minutes", type=float, default=15, help="time limit of a notebook (15)")
    args = parser.parse_args()
    files = find(args.paths)
    if not files:
        parser.error(f"no notebooks in {', '.join(args.paths)}: name notebooks, or folders that hold some")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        results = asyncio.run(run_all(files, args, Path(folder)))
    if args.times:
        store_times(args.times, results)
    failed = [str(shown(r.path)) for r in results if r.faults]
    cells, drawn = sum(r.cells for r in results), sum(r.pictures for r in results)
    print(
        f"{len(results)} notebooks, {cells} cells, {drawn} pictures in {time.monotonic() - began:.0f} s: "
        + (f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "all passed")
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
