#!/usr/bin/env python
"""Press the button of a training run in JupyterLab while its cell runs: the run must end within five seconds, and save.

python tests/browser/lab_stop.py [screenshot.png]
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from chromium import browser
from lab_smoke import ERROR, NEEDED, ROOT, free_port, start_lab

SECONDS = 5
CELL = """import sys, time
sys.path.insert(0, "tests")
from test_trainer import arguments, samples, toy
from transformers import TrainerCallback
from speculators_nb.train.trainer import train

class Slow(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        time.sleep(0.5)

given = dict(num_train_epochs=1000, disable_tqdm=False)
given |= dict(eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4)
more = dict(callbacks=[Slow()], measure=lambda model: {"mean_length": 1.5})
run = train(toy(), samples(), samples(3, 1), arguments("run", **given), **more)
print("ended at", run.state.global_step)
"""


def main(shot=None):
    with tempfile.TemporaryDirectory() as tmp:
        home = Path(tmp)
        (home / "work/nbs").mkdir(parents=True)
        for name in (*NEEDED, "tests"):
            if name != "nbs":
                (home / "work" / name).symlink_to(ROOT / name)
        (home / "work/nbs/tests").symlink_to(ROOT / "tests")
        cell = dict(cell_type="code", id="a", metadata={}, execution_count=None, outputs=[], source=CELL)
        spec = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        (home / "work/nbs/run.ipynb").write_text(
            json.dumps(dict(cells=[cell], metadata=spec, nbformat=4, nbformat_minor=5))
        )
        port = free_port()
        server = start_lab(home, port)
        try:
            with browser() as b:
                page = b.new_page(viewport={"width": 1200, "height": 900})
                page.goto(f"http://127.0.0.1:{port}/lab/tree/run.ipynb?token=smoke&reset")
                page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=120_000)
                page.get_by_role("menuitem", name="Run", exact=True).click()
                page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
                button = page.get_by_role("button", name="Stop and save")
                button.wait_for(timeout=240_000)
                page.locator("pre:has-text('mean length')").first.wait_for(timeout=120_000)
                if shot:
                    page.wait_for_timeout(1500)
                    page.screenshot(path=shot)
                pressed = time.monotonic()
                button.click()
                page.locator(".jp-OutputArea-output:has-text('ended at')").last.wait_for(timeout=60_000)
                took = time.monotonic() - pressed
                assert not page.locator(ERROR).count()
                saved = {p.name for p in (home / "work/nbs/run").iterdir()}
        finally:
            server.terminate()
            server.wait(30)
    assert {"model.safetensors", "training_log.csv", "run.json"} <= saved, saved
    assert any(name.startswith("checkpoint-") for name in saved), saved
    assert took < SECONDS, f"the run ended {took:.1f} s after the press"
    print(f"Lab: pressed while the cell ran, ended and saved after {took:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
