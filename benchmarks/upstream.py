"""An environment of its own for the upstream library, made once and shared by what is compared with it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / "benchmarks/.venv-upstream"
PACKAGES = ["speculators==0.9.0", "hs-connectors==0.9.0"]
DEPENDENCIES = [
    "accelerate",
    "aiohttp",
    "click",
    "datasets",
    "httpx",
    "loguru",
    "openai",
    "pydantic-settings",
    "psutil",
    "protobuf",
    "rich",
    "typer",
]  # torchvision and torchaudio are never imported here


def upstream_python():
    """The interpreter of benchmarks/.venv-upstream, made on the first call, with our versions of torch and
    transformers."""
    import torch
    import transformers

    python = VENV / "bin" / "python"
    if not (VENV / ".complete").exists():
        print(f"making the upstream environment in {VENV.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [
                *pip,
                f"torch=={torch.__version__.split('+')[0]}",
                f"transformers=={transformers.__version__}",
                *DEPENDENCIES,
            ],
            check=True,
        )
        subprocess.run([*pip, "--no-deps", *PACKAGES], check=True)
        (VENV / ".complete").touch()
    return python
