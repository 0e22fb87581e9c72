#!/usr/bin/env python
"""Run the notebooks as JupyterLab runs them: each in a kernel and a working folder of its own. One run checks the assertions, the figures and the stored outputs.

    python tests/notebooks.py                                      all notebooks below nbs/; stores nothing
    python tests/notebooks.py nbs/core/06_masks.ipynb nbs/train    these
    python tests/notebooks.py --save                               store what the notebooks that passed have shown
    python tests/notebooks.py --flags "slow vllm"                  run cells with these test flags too

nbdev decides which cells run (`#| eval`, the test flags, `skip_exec` in the front matter), so `nbdev-test` runs the same cells. What is asked besides: every cell shows at
least as many pictures as it has stored, each with more than one colour, and none twice. Stored outputs are the same bytes in every run: no execution counts, no standard
error, no progress bars, no memory addresses.
"""
import argparse
import asyncio
import base64
import io
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
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
# A kernel is forked from a process that has imported these: they take longer than most notebooks. Where fork is not safe, every kernel imports them itself.
WARM = ["ipykernel.kernelapp", "matplotlib.pyplot", "nbclient", "nbdev.test", "pandas", "torch.utils.data", "torch.nn.attention.flex_attention", "datasets", "transformers.trainer",
        "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"]
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
INLINE = "module://matplotlib_inline.backend_inline"  # Jupyter's back end of matplotlib
PICTURES = ("image/png", "image/jpeg", "image/svg+xml")
BAR = re.compile(r".*\d+%\|.*\|.*\[.*\].*\n?")  # a progress bar of tqdm as text
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


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
        arguments = command[command.index("-f"):]
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
    joined, kept = [], []
    for out in map(nbformat.from_dict, outputs):
        if out.get("name") == "stderr":
            continue
        if out.output_type == "stream" and joined and joined[-1].get("name") == out.name:
            joined[-1].text += out.text
        else:
            joined.append(out)
    for out in joined:
        if out.output_type == "stream":
            out.text = BAR.sub("", re.sub(r"[^\n]*\r(?!\n)", "", out.text))
            if not out.text:
                continue
        elif out.output_type in ("display_data", "execute_result"):
            out.metadata = {}
            if "application/vnd.jupyter.widget-view+json" in out.data or "<progress" in out.data.get("text/html", ""):
                continue
            for kind, value in out.data.items():
                if kind == "image/png":
                    out.data[kind] = plain_png(value)
                elif kind.startswith("text/"):
                    out.data[kind] = ADDRESS.sub("", value)
            if out.output_type == "execute_result":
                out.execution_count = None
        kept.append(out)
    return kept


def plain_png(text):
    "A PNG in base64 without the chunks that name the program, its version or the time"
    data = base64.b64decode(text)
    at, chunks = 8, [data[:8]]
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at:at + 4], "big")
        if data[at + 4:at + 8] not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
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


def faults_of(shown, stored, saving):
    "What is wrong with the pictures of a cell"
    now, before = pictures(shown), pictures(stored)
    if len(now) < len(before) and not saving:
        yield f"shows {len(now)} pictures in a kernel, {len(before)} are stored"
    for i, picture in enumerate(now):
        if is_blank(*picture):
            yield f"picture {i} is blank"
    named = [(out.output_type, out["data"].get("text/plain", ""), bool(pictures([out]))) for out in shown if "data" in out]
    for kind, name, drawn in named:
        if name.startswith("<Axes") or name.startswith("<Figure") and not drawn:
            yield f"shows {name} and no picture"
        if kind == "execute_result" and name.startswith("<Figure") and ("display_data", name, drawn) in named:
            yield f"shows {name} twice: as the cell's result, and because it is open"


# ---- a notebook

async def run_notebook(path, skip_flags, run_flags, seconds, save, log_file):
    "Run one notebook; what came of it"
    began, nb = time.monotonic(), nbformat.read(path, as_version=4)
    result = SimpleNamespace(path=path, cells=0, pictures=0, faults=[], notes=[], seconds=0.0)
    chosen = {cell.id for cell in nb_test_cells(path, skip_flags, run_flags)}
    outputs = {}
    if chosen:
        manager = Manager()
        manager.log_file = str(log_file)
        client = NotebookClient(nb, km=manager, store_widget_state=False, record_timing=False,
                                extra_arguments=["--InlineBackend.figure_formats={'retina'}", "--HistoryManager.enabled=False"])
        try:
            await client.async_start_new_kernel(cwd=str(path.parent))
            await client.async_start_new_kernel_client()
            for i, cell in enumerate(nb.cells):
                if cell.id not in chosen or not cell.source.strip():
                    continue
                stored = cell.outputs
                client.timeout = max(1, int(seconds - (time.monotonic() - began)))
                await client.async_execute_cell(cell, i)
                outputs[cell.id] = stable(cell.outputs)
                result.cells += 1
                result.pictures += len(pictures(cell.outputs))
                result.faults += [f"cell {i} ({cell.id}) {fault}" for fault in faults_of(cell.outputs, stored, save)]
        except CellExecutionError as error:
            result.faults.append(f"cell {i} ({cell.id}) failed\n{re.sub(chr(27) + r'[[][0-9;]*m', '', error.traceback)}")
        except CellTimeoutError:
            result.faults.append(f"cell {i} ({cell.id}) was running when the notebook's {seconds / 60:g} minutes were over")
        except (DeadKernelError, RuntimeError) as error:
            result.faults.append(f"{f'cell {i} ({cell.id}): ' if client.code_cells_executed else ''}the kernel died: {error}\n{log_file.read_text(errors='replace')[-4000:] if log_file.exists() else ''}")
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
    if client.kc:
        await manager.shutdown_kernel()
        client.kc.stop_channels()
    else:
        await manager.shutdown_kernel(now=True)
    try:
        os.killpg(group, signal.SIGKILL)
    except (AttributeError, OSError):
        pass  # nothing was left


def store(path, outputs):
    "Write the outputs of the cells that ran into the notebook, as `nbdev-clean` leaves it"
    nb = read_nb(path)
    for cell in nb.cells:
        if cell.get("id") in outputs:
            cell["outputs"] = outputs[cell["id"]]
    clean_nb(nb)
    write_nb(nb, path)


# ---- all of them

async def run_all(files, args, folder):
    "Run the notebooks, as many at a time as there are workers; their results in the order of `files`"
    config = get_config(files[0])
    skip = config.tst_flags.split() if isinstance(config.tst_flags, str) else list(config.tst_flags)
    places = asyncio.Semaphore(args.workers)

    async def one(i, path):
        async with places:
            result = await run_notebook(path, skip, args.flags.split(), args.minutes * 60, args.save, folder / f"{i}.log")
        print(f"{'FAILED' if result.faults else 'passed'}  {result.seconds:6.1f} s  {result.cells:3} cells  {result.pictures:2} pictures  {shown(path)}", flush=True)
        for fault in result.faults:
            print("    " + fault.strip().replace("\n", "\n    "), flush=True)
        return result

    return await asyncio.gather(*(one(i, path) for i, path in enumerate(files)))


def shown(path):
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def find(paths):
    "The notebooks at these places, those that run longest (the tutorials) first"
    files = {Path(f).resolve() for p in paths or [ROOT / "nbs"] for f in ([p] if Path(p).is_file() else nbglob(p))}
    return sorted((f for f in files if not (f.parent / ".notest").exists()), reverse=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="notebooks or folders; all notebooks by default")
    parser.add_argument("--save", action="store_true", help="store the outputs of the notebooks that pass")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time")
    parser.add_argument("--flags", default="", help="test flags whose cells run too")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of a notebook")
    args = parser.parse_args()
    files = find(args.paths)
    if not files:
        parser.error(f"no notebooks in {args.paths}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(MPLBACKEND=INLINE, IN_TEST="1", IPYTHONDIR=f"{folder}/ipython", JUPYTER_RUNTIME_DIR=f"{folder}/runtime")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the order of sums depends on it
        sys.path.insert(0, str(ROOT))
        if sys.platform == "linux":
            PROCESSES.set_forkserver_preload(WARM)
        results = asyncio.run(run_all(files, args, Path(folder)))
    failed = [r for r in results if r.faults]
    print(f"{len(results)} notebooks, {sum(r.cells for r in results)} cells, {sum(r.pictures for r in results)} pictures in {time.monotonic() - began:.0f} s: "
          + (f"{len(failed)} FAILED: {', '.join(str(shown(r.path)) for r in failed)}" if failed else "all passed"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
