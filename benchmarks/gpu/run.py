"""Try speculators_nb on an NVIDIA device: what single changes are worth, a train step beside upstream's, and what flex
attention computes there.

    make gpu-bundle                          once, where there is a network
    make gpu                                 on the machine with the device; needs no network and installs nothing
    make gpu ONLY='ab*,step MTP*'            some cells, by glob or a part of their name; --list names all
    make gpu-toy                             the same at toy sizes on a CPU
    python3 benchmarks/gpu/run.py --help     all options

The result is a folder (benchmarks/gpu/results/<device>): results.json, README.md, and log.txt with what the processes
wrote to stderr. It is written anew after every row, so that a run which is cut short leaves what it has; rows of cells
that are not run again stay. Exit status: 0, or 1 where a cell failed.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu.bundle import FOLDER, python_of, unpack  # noqa: E402
from benchmarks.gpu.pool import Pool  # noqa: E402
from benchmarks.gpu.report import Report, slug, stamp  # noqa: E402
from speculators_nb.core.options import algorithms  # noqa: E402

DRAFTERS = [*algorithms(), "hass"]  # hass: EAGLE trained on its own outputs
EAGLE, PEAGLE, DFLASH, MTP, SEVEN = "EAGLE-3 K=3", "P-EAGLE", "DFlash 512x16", "MTP", "EAGLE-3 K=7"
NEEDED = "torch transformers accelerate safetensors pandas pydantic datasets fastcore httpx typer"
SECONDS, FIRST, WORKERS = 540.0, 90.0, 7  # of all; of the device's facts; processes side by side
# of a train step: GiB of the device with CUDA's own, upstream's and ours; seconds with imports and compilation
GIB = {
    (EAGLE, 8192): (19.0, 18.0),
    (EAGLE, 32768): (46.0, 36.0),
    (PEAGLE, 8192): (24.0, 18.0),
    (DFLASH, 8192): (20.0, 13.0),
    (MTP, 8192): (33.0, 21.0),
    (SEVEN, 8192): (30.0, 27.0),
}
NEEDS = dict(upstream=75.0, ours=35.0)


# ------------------------------------------------------------- the cells
def cell(kind, *labels, size, **more):
    """One cell; its name is its kind and the values of its labels."""
    of = dict(zip(LABELS[kind], labels))
    return dict(kind=kind, name=" ".join(map(str, [kind, *labels])), size=size, labels=of, **of, **more)


LABELS = dict(
    ab=("setting", "length"),
    step=("setting", "length", "side"),
    equal=("drafter", "dtype"),
    kernels=("setting",),
    decode=("drafter", "dtype"),
    loop=(),
)


def device_jobs():
    """What a device does, the most important first: lists of cells, each for one process."""

    def steps(length, *settings):
        for setting in settings:
            for side, gib in zip(("upstream", "ours"), GIB[setting, length]):
                yield [cell("step", setting, length, side, size="device", gib=gib, needs=NEEDS[side], limit=300.0)]

    def small(kind, drafter, *dtypes, **more):
        return [cell(kind, drafter, dtype, size="device", gib=2.0, needs=30.0, **more) for dtype in dtypes]

    def kernels(setting):
        return [cell("kernels", setting, size="device", gib=GIB[setting, 8192][1], needs=40.0)]

    def rest(drafter):
        return [each for kind in ("equal", "decode") for each in small(kind, drafter, "fp32", "bf16", filler=True)]

    return [
        [cell("ab", EAGLE, 8192, size="device", gib=18.0, needs=50.0, limit=400.0)],
        *steps(8192, EAGLE),
        small("equal", "eagle3", "fp32"),
        small("equal", "eagle3", "bf16"),
        kernels(EAGLE),
        *steps(8192, PEAGLE, DFLASH),
        *steps(32768, EAGLE),
        *steps(8192, MTP),
        [cell("ab", PEAGLE, 8192, size="device", gib=18.0, needs=50.0, limit=250.0)],
        [cell("loop", size="device", gib=8.0, needs=45.0)],
        small("decode", "eagle3", "fp32", "bf16"),
        *[kernels(setting) for setting in (MTP, PEAGLE, DFLASH)],
        *steps(8192, SEVEN),
        *[rest(name) for name in DRAFTERS if name != "eagle3"],
    ]


def toy_jobs():
    """The same on a CPU. Two processes: most of the time would go into imports, and into compiling the same in each."""
    settings = (EAGLE, DFLASH, PEAGLE, MTP)
    return [
        [cell("equal", name, dtype, size="toy") for name in DRAFTERS for dtype in ("fp32", "bf16")],
        [
            *[cell("decode", name, "fp32", size="toy") for name in DRAFTERS],
            *[cell("step", setting, 256, "ours", size="toy") for setting in settings],
            *[cell("ab", setting, 256, size="toy") for setting in (EAGLE, PEAGLE)],
            cell("kernels", EAGLE, size="toy"),
            cell("loop", size="toy"),
        ],
    ]


def chosen(jobs, only):
    """The cells whose name has one of these parts or fits one of these globs, in their order. None: all."""
    if only is None:
        return jobs
    wanted = [part.strip().lower() for part in only.split(",") if part.strip()]

    def fits(name, part):
        return part in name.lower() or fnmatch(name.lower(), part)

    names = [each["name"] for job in jobs for each in job]
    for part in wanted:
        if not any(fits(name, part) for name in names):
            raise SystemExit(f"--only: no cell is named like {part!r}; `--list` names them")
    kept = [[each for each in job if any(fits(each["name"], part) for part in wanted)] for job in jobs]
    return [job for job in kept if job]


def not_run(size, upstream):
    """Sentences on what this run does not try."""
    found = []
    if size == "toy":
        found += [
            "Flex attention ran uncompiled, its backward pass with torch's check of the device patched: compiling it "
            "for a CPU takes longer than all else here.",
            "The definition under flex attention in bf16, and decoding in bf16, were not run.",
            "Upstream's flex attention and fused losses need a device.",
        ]
    if not upstream:
        found.append("Upstream was not run: the package speculators is not installed.")
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
        PYTHONWARNINGS="ignore",
    )


def work(jobs, on_row, folder, paths, workers, **limits):
    """Do the cells; every row goes to `on_row` at once. Returns names of the cells that were left out."""
    workers = max(1, min(workers, len(jobs)))
    with open(folder / "log.txt", "a") as log:
        pool = Pool(jobs, on_row, log, environment(paths, workers), workers, **limits)
        return [each["name"] for each in pool.run()]


def missing():
    """Names of packages that neither the machine nor the bundle has."""
    return [name for name in NEEDED.split() if importlib.util.find_spec(name) is None]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes, on a CPU")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="cells by a part of their name or a glob")
    parser.add_argument("--list", action="store_true", help="print the names of the cells in their order")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all together ({SECONDS:.0f})")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"processes side by side ({WORKERS})")
    parser.add_argument("--bundle", type=Path, help="folder of `make gpu-bundle`; by default output/gpu-bundle")
    parser.add_argument(
        "--out", type=Path, help="folder of results; by default benchmarks/gpu/results/<device>, or output/gpu-toy"
    )
    parser.add_argument(
        "--merge", type=Path, metavar="FOLDER", help="run nothing; take FOLDER's rows over into those of its device"
    )
    opt = parser.parse_args()
    jobs = chosen(toy_jobs() if opt.toy else device_jobs(), opt.only)
    if opt.list:
        print("\n".join(each["name"] for job in jobs for each in job))
        return
    if opt.merge:
        merge(opt.merge)
        return
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
        raise SystemExit(run(opt, jobs, paths))


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


def merge(folder):
    """Into the folder of results of the same device."""
    found = json.loads((folder / "results.json").read_text())
    report = Report.at(HERE / "results" / slug(found["card"]), dict(card=found["card"]), found["size"])
    report.merge(found)
    print(f"{report.folder}: {len(report.done)} cells of {folder}")


def facts_of_device(opt, paths):
    """Its row."""
    with tempfile.TemporaryDirectory(prefix="gpu-results-") as folder:
        asked, rows = [[dict(kind="device", name="device", toy=opt.toy, limit=FIRST)]], []
        work(asked, rows.append, Path(folder), paths, workers=1, seconds=min(FIRST, opt.seconds))
        row = rows[0] if rows else dict(error="nothing answered in time")
        if "error" in row:
            log = (Path(folder) / "log.txt").read_text()[-3000:]
            raise SystemExit(f"the device cannot be used: {row['error']}\n{log}")
    if row["device"] == "CPU" and not opt.toy:
        raise SystemExit("torch sees no CUDA device; on a CPU run `make gpu-toy`")
    return row


def run(opt, jobs, paths):
    began, upstream = time.monotonic(), importlib.util.find_spec("speculators") is not None
    about, size = facts_of_device(opt, paths), "toy" if opt.toy else "device"
    folder = opt.out or (ROOT / "output/gpu-toy" if opt.toy else HERE / "results" / slug(about["device"]))
    if not upstream:
        jobs = [kept for job in jobs if (kept := [each for each in job if each.get("side") != "upstream"])]
    report = Report.at(folder, stamp(card=about["device"]), size)
    report.begin([each["name"] for job in jobs for each in job], not_run(size, upstream))
    report.add("device", about)
    (folder / "log.txt").unlink(missing_ok=True)
    kinds = {each["name"]: each["kind"] for job in jobs for each in job}
    limits = dict(workers=opt.workers, seconds=opt.seconds - (time.monotonic() - began))
    if "memory_bytes" in about:
        limits["memory"] = about["memory_bytes"] / 2**30 - 2
    left = work(jobs, lambda row: report.add(kinds[row["cell"]], row), folder, paths, **limits)
    report.note(left)
    print((folder / "README.md").read_text())
    print(f"results in {folder}; {report.failed()} failed")
    return int(report.failed() > 0)


if __name__ == "__main__":
    main()
