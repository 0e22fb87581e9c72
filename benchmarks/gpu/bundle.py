"""What a bare machine with PyTorch lacks, as wheels in one folder: the benchmark runs there without a network.

    python benchmarks/gpu/bundle.py fetch [FOLDER] [PYTHON]    where there is a network: output/gpu-bundle, for 3.12
    python benchmarks/gpu/bundle.py size [FOLDER]              what must travel: tree and wheels
    python benchmarks/gpu/bundle.py slim TARGET [FOLDER]       a copy of what `make gpu` reads, with the wheels
    python benchmarks/gpu/bundle.py unpack FOLDER TARGET       a folder for PYTHONPATH

bundle.txt names the versions. After fetching, every requirement of every wheel must be met by another wheel of the
bundle or by EXPECTED.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "output/gpu-bundle"
LIMIT = 15e6  # bytes of the bundle
MIB = 2**20
MOST, MOST_SLIM = 60 * MIB, 45 * MIB  # of tree and wheels, and of a slim copy
NOT_READ = ("tests", "docs/_static")  # a machine with a device does without them
READ = (  # what `make gpu` and `make gpu-toy` read
    "Makefile",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "speculators_nb",
    "benchmarks/gpu",
    "benchmarks/train_step/worker.py",
    "data/tiny-verifier",
    "data/tiny-drafter",
    "data/corpus/heldout.jsonl",
)
COMMIT = "COMMIT"  # file of a slim copy, which has no git: what it is a copy of
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

ANY_VERSION = (
    "aiohttp anyio click filelock httpcore httpx matplotlib packaging pandas pillow protobuf psutil pyarrow pyyaml "
    "rich tqdm typer"
)
# What the machine brings; a version where it is known that this one is enough.
EXPECTED = {
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "triton": "3.6.0",
    "accelerate": "1.15.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.2",
    "huggingface-hub": "1.33.0",
    "numpy": "2.5.2",
    **dict.fromkeys(ANY_VERSION.split()),
}
# Requirements that no training imports: upstream's settings, pictures and sound, and our widgets.
LEFT_OUT = {"anywidget", "ipywidgets", "pydantic-settings", "torchaudio", "torchvision"}


def name_of(requirement):
    """A package's name as the registry compares names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def pins(text):
    """{name: version} of a list of requirements."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return {name_of(line): line.split("==")[1] for line in lines if line}


def metadata(wheel):
    """(name, version, requirements without those of extras) of a wheel."""
    with zipfile.ZipFile(wheel) as z:
        file = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(z.read(file).decode())
    wanted = [r for r in said.get_all("Requires-Dist") or [] if "extra ==" not in r]
    return name_of(said["Name"]), said["Version"], wanted


def unmet(wheels):
    """Sentences on what neither wheels nor machine meet. wheels: of (name, version, requirements)."""
    from packaging.requirements import Requirement

    there = {name: version for name, version, _ in wheels} | {
        n: v for n, v in EXPECTED.items() if n not in {w[0] for w in wheels}
    }
    wrong = []
    for name, _, wanted in wheels:
        for r in map(Requirement, wanted):
            key = name_of(r.name)
            if key in LEFT_OUT or (
                r.marker and not r.marker.evaluate({"python_version": "3.12", "sys_platform": "linux"})
            ):
                continue
            if key not in there:
                wrong.append(f"{name} needs {r}: neither in bundle.txt nor expected on the machine")
            elif there[key] and not r.specifier.contains(there[key], prereleases=True):
                wrong.append(f"{name} needs {r}: there is {there[key]}")
    return wrong


def fetch(folder, python="3.12"):
    """Download the wheels. Errors: one is not there, a requirement is not met, the bundle is too large."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    asked = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    asked += ["--python-version", python, *(part for p in PLATFORMS for part in ("--platform", p))]
    listed = ["-d", folder, "-r", HERE / "bundle.txt"]
    subprocess.run([sys.executable, "-m", "pip", "download", *asked, *listed], check=True)
    wheels = [metadata(w) for w in sorted(folder.glob("*.whl"))]
    if wrong := unmet(wheels):
        raise SystemExit("\n".join(wrong))
    size = sum(w.stat().st_size for w in folder.glob("*.whl"))
    if size > LIMIT:
        raise SystemExit(
            f"{folder} has {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}; take a package out of bundle.txt"
        )
    print(f"{folder}: {len(wheels)} wheels, {size / 1e6:.1f} MB")


def python_of(folder):
    """The Python that compiled wheels of a folder are for, as "3.12"; None where there is none."""
    found = {m[1] for wheel in Path(folder).glob("*.whl") if (m := re.search(r"-cp3(\d+)-", wheel.name))}
    return f"3.{found.pop()}" if found else None


def unpack(folder, target):
    """Unpack the wheels side by side into `target`."""
    for wheel in sorted(Path(folder).glob("*.whl")):
        with zipfile.ZipFile(wheel) as z:
            z.extractall(target)


# -------------------------------------------------------------- what travels
def tracked(*paths):
    """Files of the tree that git tracks, and that are there, below some paths."""
    done = subprocess.run(["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, check=True)
    return [p for name in done.stdout.decode().split("\0") if name and (p := ROOT / name).is_file()]


def bytes_of(files):
    return sum(f.stat().st_size for f in files)


def size(folder=FOLDER):
    """Print the size of tree and wheels. Errors: they are too large to be sent."""
    whole, wheels = bytes_of(tracked()), bytes_of(folder.glob("*.whl"))
    needed = whole - bytes_of(tracked(*NOT_READ))
    print(
        f"tracked files {needed / MIB:.1f} MiB without {' and '.join(NOT_READ)} ({whole / MIB:.1f} with them), "
        f"wheels {wheels / MIB:.1f} MiB: {(needed + wheels) / MIB:.1f} MiB together"
    )
    if needed + wheels > MOST:
        raise SystemExit(
            f"tree and wheels have {(needed + wheels) / MIB:.1f} MiB, more than {MOST / MIB:.0f}; send a slim copy: "
            "`python benchmarks/gpu/bundle.py slim FOLDER`"
        )


def slim(target, folder=FOLDER):
    """Copy what `make gpu` reads into a new folder, with the wheels. Errors: it is there; no wheels; too large."""
    from benchmarks.gpu.report import commit_of

    wheels = sorted(folder.glob("*.whl"))
    if target.exists():
        raise SystemExit(f"{target} is there already; name a new folder")
    if not wheels:
        raise SystemExit(f"no wheels in {folder}; run `make gpu-bundle` first")
    files = [f for f in tracked(*READ) if HERE / "results" not in f.parents or f.name == "results.json"]
    total = bytes_of([*files, *wheels])
    if total > MOST_SLIM:
        raise SystemExit(f"the copy has {total / MIB:.1f} MiB, more than {MOST_SLIM / MIB:.0f}; shorten READ")
    copies = {f: target / f.relative_to(ROOT) for f in files}
    copies |= {f: target / FOLDER.relative_to(ROOT) / f.name for f in wheels}
    for f, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f, copy)
    (target / COMMIT).write_text(f"{commit_of(ROOT)}\n")
    print(f"{target}: {len(copies)} files, {total / MIB:.1f} MiB")


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["help"]
    sys.path.insert(0, str(ROOT))
    folder = Path(rest[0]) if rest else FOLDER
    if what == "fetch":
        fetch(folder, *rest[1:])
        size(folder)
    elif what == "size":
        size(folder)
    elif what == "slim" and rest:
        slim(folder, *map(Path, rest[1:]))
    elif what == "unpack" and len(rest) == 2:
        unpack(*rest)
    else:
        raise SystemExit(__doc__)
