"""The commands of docs/from_chats.md as they are written, from questions to a drafter measured on what was held out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def commands():
    "The first block of the page, in the shell's words."
    return re.findall(r"```bash\n(.*?)```", (ROOT / "docs/from_chats.md").read_text(encoding="utf-8"), flags=re.S)[0]


@pytest.mark.nightly
def test_as_written(tmp_path):
    (tmp_path / "data").symlink_to(ROOT / "data")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands()],
        cwd=tmp_path,
        env=os.environ | dict(PATH=path, COLUMNS="160", NO_COLOR="1", TERM="dumb", TQDM_DISABLE="1"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    heldout = [json.loads(line) for line in (tmp_path / "prepared/heldout.jsonl").read_text().splitlines()]
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert 0.03 < len(heldout) / len(answers) < 0.07 and len(answers) > 350
    # the drafter beside n-gram lookup and no drafter, on what was held out
    for name in ("eagle3", "n-gram", "no drafter"):
        assert re.search(rf"^ *{name} .*\d\.\d\d", ran.stdout, re.M), ran.stdout
    assert f"vllm serve {tmp_path}/drafter" in ran.stdout.rstrip().splitlines()[-1]
