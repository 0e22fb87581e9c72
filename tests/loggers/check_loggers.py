"""TensorBoard, W&B (offline), MLflow (a local store) and trackio: a training run by the command, with each of them,
and what it stored read back with its own reader and compared with the trainer's history. No file lies in the working
folder, no account is needed, no secret of the environment is stored.

    .venv/bin/python tests/loggers/check_loggers.py           all; the first call makes .venv-loggers (0.7 GB)
    .venv/bin/python tests/loggers/check_loggers.py mlflow    one

Writes tests/loggers/results.json; the exit status is 1 if a value is missing or another."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-loggers"
PYTHON = VENV / "bin/python"
SECRET = "hf_thisIsASecretOfNobody0123456789"
COMMAND = "import sys; sys.argv[0] = 'speculators-nb'; from speculators_nb.cli.main import app; app()"


def install():
    "Make .venv-loggers: the loggers beside what this interpreter has, which stays as it is."
    if (VENV / ".complete").exists():
        return
    import sysconfig

    sys.path.insert(0, str(ROOT / "tests"))
    from loggers.read_back import NAMES

    print(f"making {VENV.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    (site,) = (VENV / "lib").glob("python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", *NAMES], check=True)
    (VENV / ".complete").touch()


def check(logger):
    "One run; returns what is wrong, and how many values agree."
    from loggers.read_back import history, problems, secrets_in, train_line

    with tempfile.TemporaryDirectory() as tmp:
        run, home, here = (Path(tmp) / name for name in ("run", "home", "here"))
        home.mkdir(), here.mkdir()
        line = [PYTHON, "-c", COMMAND, *train_line(logger, run, Path(tmp))]
        taken = {
            name: v for name, v in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO", "TENSOR"))
        }
        secrets = dict(HF_TOKEN=SECRET, OPENAI_API_KEY=SECRET, HOME=str(home), HF_HUB_OFFLINE="1")
        done = subprocess.run(
            line, cwd=here, env=taken | secrets | dict(PYTHONPATH=str(ROOT)), capture_output=True, text=True
        )
        if done.returncode:
            return [f"{logger}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"], 0
        wrong = problems(logger, run) + [f"{logger}: a secret is in {file}" for file in secrets_in(Path(tmp), SECRET)]
        wrong += [f"{logger}: {p} is outside of the run's folder" for p in here.rglob("*") if p.is_file()]
        return wrong, len(history(run))


def main(wanted):
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from loggers.read_back import NAMES, NEEDED

    results = {}
    for logger in wanted or NAMES:
        wrong, n = check(logger)
        results[logger] = dict(version=version(logger), values=n, needed=NEEDED, wrong=wrong)
        print(
            f"{logger} {version(logger)}: " + ("\n".join(wrong) or f"{n} values as in the trainer's history"),
            flush=True,
        )
    if not wanted:
        (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return any(r["wrong"] for r in results.values())


if __name__ == "__main__":
    if Path(sys.prefix) != VENV:
        install()
        os.execv(PYTHON, [str(PYTHON), __file__, *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
