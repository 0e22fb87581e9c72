#!/usr/bin/env python
"""Work in JupyterLab as a reader would: open a notebook whose outputs were cleared, run all cells, see numbers at the
prompts and every picture that it had.

    python tests/browser/lab_smoke.py [notebook below nbs/] [screenshot.png]

The repository is copied into a folder of its own with a HOME of its own; nothing here is changed.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from chromium import browser, watch

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("nbs", "speculators_nb", "data", "pyproject.toml", "settings.ini")
MINUTES = 10
# every cell in the page, not only those near the window; no question about news
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# Lab shows an error as it shows standard error; the words tell them apart
ERROR = '[data-mime-type="application/vnd.jupyter.stderr"]:has-text("Traceback (most recent call last)")'
# what Lab asks for and does not get in every installation, without harm to anybody
HARMLESS = re.compile(
    r"404 .*/(lab/api/(workspaces|translations)|api/(contents|me|lsp|sessions)|static/lab/|lsp/|kernelspecs/)|Failed "
    r"to load resource|the server responded with a status of 404"
)


def copy_repository(home, notebook):
    """The repository without outputs in `notebook`; number of its code cells that will show a prompt, and of the
    pictures that it had stored"""
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, home / "work" / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            )
        else:
            shutil.copy(source, home / "work" / name)
    path = home / "work/nbs" / notebook
    nb = json.loads(path.read_text())
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    stored = sum("image/png" in out.get("data", {}) for c in code for out in c["outputs"])
    for c in code:
        c["outputs"], c["execution_count"] = [], None
    path.write_text(json.dumps(nb))
    return sum(bool("".join(c["source"]).strip()) for c in code), stored


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_lab(home, port):
    "JupyterLab on the copy; waits until it answers"
    for name, values in SETTINGS.items():
        path = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    env = {
        **os.environ,
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": str(home / "work"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [
        Path(sys.executable).with_name("jupyter"),
        "lab",
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--IdentityProvider.token=smoke",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *(["--allow-root"] if os.getuid() == 0 else []),
    ]
    log = open(home / "lab.log", "w")  # noqa: SIM115 - the server writes it as long as it runs
    server = subprocess.Popen(command, cwd=home / "work/nbs", env=env, stdout=log, stderr=subprocess.STDOUT)
    for _ in range(120):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=smoke", timeout=2)
            return server
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(1)
    server.kill()
    raise SystemExit("JupyterLab did not start:\n" + (home / "lab.log").read_text()[-3000:])


def numbered(page):
    "How many cells show a number at their prompt"
    return sum(bool(re.fullmatch(r"\[\d+\]:", p.strip())) for p in page.locator(".jp-InputPrompt").all_inner_texts())


def main(notebook="tutorials/02_what_the_mask_lets_a_drafter_see.ipynb", shot=None):
    with tempfile.TemporaryDirectory() as tmp:
        home, problems = Path(tmp), []
        (home / "work").mkdir()
        (n_code, n_stored), port = copy_repository(home, notebook), free_port()
        server = start_lab(home, port)
        try:
            with browser() as b:
                page = b.new_page(viewport={"width": 1400, "height": 1000})
                watch(page, problems)
                page.goto(f"http://127.0.0.1:{port}/lab/tree/{notebook}?token=smoke&reset")
                page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
                # running before the kernel is there opens a dialog instead; the status bar tells when it is
                page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)
                assert page.locator(".jp-OutputArea-output img").count() == 0, "the copy still shows stored outputs"
                page.get_by_role("menuitem", name="Run", exact=True).click()
                page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
                deadline = time.time() + 60 * MINUTES
                while (done := numbered(page)) < n_code:
                    if page.locator(ERROR).count():
                        raise SystemExit(f"{notebook}: {page.locator(ERROR).first.inner_text()[-2000:]}")
                    if dialog := page.locator(".jp-Dialog").all_inner_texts():
                        raise SystemExit(f"JupyterLab asks: {dialog[0]!r}")
                    if time.time() > deadline:
                        page.screenshot(path=shot or "lab_smoke_failed.png")
                        raise SystemExit(f"{notebook}: {done} of {n_code} cells ran in {MINUTES} minutes")
                    time.sleep(1)
                assert not page.locator(ERROR).count()
                pictures = page.locator(".jp-OutputArea-output img")
                n_pictures = pictures.count()
                assert n_stored and n_pictures >= n_stored, (
                    f"{notebook} drew {n_pictures} pictures in JupyterLab, and {n_stored} are stored"
                )
                sizes = pictures.evaluate_all("all => all.map(i => [i.naturalWidth, i.naturalHeight])")
                assert min(map(min, sizes)) > 50, f"{notebook}: pictures of {sizes} pixels"
                pictures.last.scroll_into_view_if_needed()
                if shot:
                    page.screenshot(path=shot)
                page.unroute_all(behavior="ignoreErrors")
        finally:
            server.terminate()
            server.wait(30)
    real = [p for p in problems if not HARMLESS.search(p)]
    assert not real, "\n".join(real)
    print(
        f"Lab: {notebook} ran all {n_code} cells from a cleared copy and drew {n_pictures} pictures; nothing left this "
        "machine"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
