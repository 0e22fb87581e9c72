"""Try speculators_nb on an NVIDIA device: what flex attention computes there, and a train step beside upstream's.

    make gpu-bundle                          once, where there is a network
    make gpu                                 on the machine with the device; needs no network and installs nothing
    make gpu-toy                             the same at toy sizes on a CPU
    python3 benchmarks/gpu/run.py --help     all options

The result is a folder (benchmarks/gpu/results/<device>): results.json, README.md, equality.png, speed.png,
shares.png, and log.txt with what the processes wrote to stderr. It is written anew after every result, so that a run
which is cut short leaves what it has. Exit status: 0, or 1 where a cell failed.
"""

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu.bundle import FOLDER, python_of, unpack  # noqa: E402
from benchmarks.gpu.notebooks import flagged  # noqa: E402
from benchmarks.gpu.pool import Pool  # noqa: E402
from benchmarks.gpu.report import Report  # noqa: E402
from speculators_nb.core.options import algorithms  # noqa: E402

DRAFTERS = [*algorithms(), "hass"]  # hass: EAGLE trained on its own outputs
SETTINGS = ("EAGLE-3 K=3", "DFlash 512x16", "P-EAGLE", "EAGLE-3 K=7", "MTP")
NEEDED = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "pandas",
    "matplotlib",
    "pydantic",
    "datasets",
    "fastcore",
    "httpx",
    "typer",
)


# ------------------------------------------------------------- the cells
def equality_jobs(size):
    """Lists of cells, each for one process: loss and gradients of a drafter in several ways, and decoding with it."""

    def cell(kind, drafter, dtype):
        labels = dict(drafter=drafter, dtype=dtype)
        return dict(kind=kind, name=f"{kind} {drafter} {dtype}", size=size, labels=labels, **labels)

    kinds = [("equal", "fp32"), ("equal", "bf16"), ("decode", "fp32"), ("decode", "bf16")][: 3 if size == "toy" else 4]
    jobs = [[cell(kind, drafter, dtype) for kind, dtype in kinds] for drafter in DRAFTERS]
    for path in flagged() if size == "device" else ():
        name = str(path.relative_to(ROOT))
        jobs.append([dict(kind="notebooks", name=name, labels=dict(notebook=name))])
    return jobs


def step_cell(size, setting, length, side):
    """A train step."""
    labels = dict(setting=setting, length=length, side=side)
    return dict(kind="step", name=f"{setting}, {length} positions, {side}", size=size, labels=labels, **labels)


def device_jobs(upstream):
    """All jobs of a device in the order in which they begin. Upstream's take longest to compile, and two settings that
    share their fused loss share a process. Not too many train steps at once: the memory is one."""

    def steps(*cells):
        return [[step_cell("device", *cell)] for cell in cells if upstream or cell[-1] != "upstream"]

    eagle, dflash, peagle, seven, mtp = SETTINGS
    first = [[step_cell("device", setting, 8192, "upstream") for setting in (eagle, peagle)]] if upstream else []
    ours = [(setting, 8192, "ours") for setting in SETTINGS]
    longest = [(setting, 32768, side) for setting in (eagle, mtp, dflash, peagle) for side in ("ours", "upstream")]
    short = [(setting, 2048, side) for setting in SETTINGS for side in ("ours", "upstream")]
    equal = equality_jobs("device")
    rest = [(dflash, 8192, "upstream"), ours[2], ours[4], (mtp, 8192, "upstream"), ours[3]]
    last = [*longest, (seven, 8192, "upstream"), (eagle, 8192, "ours-compiled"), *short]
    return first + steps(*ours[:2]) + equal[:9] + steps(*rest) + equal[9:] + steps(*last)


def kernel_cells(size):
    """Cells of the kernels: our steps whose time is to be explained."""
    settings = SETTINGS[:1] if size == "toy" else [s for s in SETTINGS if s != "EAGLE-3 K=7"]
    return [
        dict(kind="kernels", name=f"kernels, {setting}", setting=setting, size=size, labels=dict(setting=setting))
        for setting in settings
    ]


def attention_cell(size, length):
    """The cell of the back ends of attention."""
    name = f"back ends of attention, {length} positions"
    return dict(kind="attention", name=name, size=size, length=length, labels=dict(length=length))


def loop_cell(size):
    """The cell of the decode loop."""
    return dict(kind="loop", name="decode loop", size=size, labels=dict(proposal="all"))


def not_run(size, upstream, notebooks):
    """Sentences on what this run does not try."""
    found = []
    if size == "toy":
        found += [
            "Flex attention ran uncompiled, its backward pass with torch's check of the device patched: compiling it "
            "for a CPU takes longer than all else here.",
            "torch.compile of a model (ours-compiled), the definition under flex attention in bf16, and decoding in "
            "bf16 were not run.",
            "Upstream's flex attention and fused losses need a device.",
        ]
    if not upstream:
        found.append("Upstream was not run: the package speculators is not installed.")
    if not notebooks:
        found.append("No notebook has a cell with the flag cuda.")
    return found


# --------------------------------------------------------------- the run
def environment(paths, workers):
    """Of the worker processes: where the packages are, no network, an even share of the processor's cores."""
    share = str(max(1, (os.cpu_count() or 1) // workers))
    path = os.pathsep.join(map(str, [*paths, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return os.environ | dict(
        PYTHONPATH=path,
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS=share,
        TORCHINDUCTOR_COMPILE_THREADS="4",  # compiling comes in bursts
        MPLBACKEND="Agg",
        PYTHONWARNINGS="ignore",
    )


class Run:
    """Stages one after the other, each with its own limit; every row goes to the report at once."""

    def __init__(self, report, paths, cores):
        self.report, self.paths, self.cores = report, paths, cores

    def stage(self, name, jobs, seconds, workers, cell_seconds):
        began, workers = time.monotonic(), max(1, min(workers, len(jobs)))
        kinds = {cell["name"]: cell["kind"] for job in jobs for cell in job}
        with open(self.report.folder / "log.txt", "a") as log:
            pool = Pool(
                jobs,
                lambda row: self.report.add(kinds[row["cell"]], row),
                log,
                environment(self.paths, workers),
                workers,
                seconds,
                cell_seconds,
            )
            left = pool.run()
        self.report.stage(name, time.monotonic() - began, seconds, [cell["name"] for cell in left])


def missing():
    """Names of packages that neither the machine nor the bundle has."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def slug(device):
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes, on a CPU too")
    parser.add_argument(
        "--bundle",
        type=Path,
        default=None,
        help=f"folder of wheels; by default {FOLDER.relative_to(ROOT)} where it is there, none with --toy",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of results; by default benchmarks/gpu/results/<device>, or output/gpu-toy"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=(330, 120),
        metavar=("STEPS", "KERNELS"),
        help="limits of the two stages",
    )
    parser.add_argument("--workers", type=int, help="processes side by side in the first stage")
    opt = parser.parse_args()
    bundle = opt.bundle or (FOLDER if FOLDER.is_dir() and not opt.toy else None)
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as site:
        paths = [site] if bundle and bundle_fits(bundle) else []
        if paths:
            unpack(bundle, site)
            sys.path.insert(0, site)
        if lacking := missing():
            raise SystemExit(
                f"missing packages: {', '.join(lacking)}; run `make gpu-bundle` where there is a network and bring "
                f"{FOLDER.relative_to(ROOT)} along"
            )
        raise SystemExit(run(opt, paths))


def bundle_fits(folder):
    """Whether the wheels are for this Python; an error if they are not and something is missing without them."""
    made, mine = python_of(folder), ".".join(map(str, sys.version_info[:2]))
    if made in (None, mine):
        return True
    if missing():
        raise SystemExit(
            f"{folder} holds wheels for Python {made}, this is {mine}: make them anew with "
            f"`python benchmarks/gpu/bundle.py fetch {folder} {mine}`"
        )
    return False


def run(opt, paths):
    size, cores = "toy" if opt.toy else "device", os.cpu_count() or 1
    upstream, notebooks = importlib.util.find_spec("speculators") is not None, flagged()
    with tempfile.TemporaryDirectory(prefix="gpu-results-") as first:
        report = Report(Path(first), date=str(date.today()), size=size, not_run=not_run(size, upstream, notebooks))
        Run(report, paths, cores).stage("device", [[dict(kind="device", name="device", toy=opt.toy)]], 90, 1, 80)
        facts = report.device()
        if facts is None:
            raise SystemExit(
                f"the device cannot be used: {report.rows['device'][0].get('error', 'nothing answered in 90 s')}\n"
                + (Path(first) / "log.txt").read_text()[-3000:]
            )
        if facts["device"] == "CPU" and not opt.toy:
            raise SystemExit("torch sees no CUDA device; on a CPU run `make gpu-toy`")
        report.move(opt.out or (ROOT / "output/gpu-toy" if opt.toy else HERE / "results" / slug(facts["device"])))
    going = Run(report, paths, cores)
    lengths = (256,) if size == "toy" else (8192, 2048)
    explained = [*kernel_cells(size), *(attention_cell(size, n) for n in lengths), loop_cell(size)]
    if size == "toy":  # two processes: most of the time would go into imports, and into compiling the same in each
        cells = [cell for job in equality_jobs(size) for cell in job]
        steps = [step_cell(size, setting, 256, "ours") for setting in SETTINGS if setting != "EAGLE-3 K=7"]
        alike = [
            [cell for cell in cells if cell["kind"] == "equal"],
            [cell for cell in cells if cell["kind"] != "equal"] + steps + explained,
        ]
        going.stage("equality, train steps, kernels, decode loop", alike, sum(opt.seconds), 2, 120)
    else:
        workers = opt.workers or max(2, cores - 4)
        going.stage("equality and train steps", device_jobs(upstream), opt.seconds[0], workers, 240)
        going.stage("kernels and decode loop", [[cell] for cell in explained], opt.seconds[1], 7, opt.seconds[1])
    report.finish()
    print((report.folder / "README.md").read_text())
    print(f"results in {report.folder}; {report.failed()} failed")
    return int(report.failed() > 0)


if __name__ == "__main__":
    main()
