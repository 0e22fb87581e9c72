"""Memory of a training step, by the formula of `plan` and counted while it runs: four drafters at three widths, without
and with gradient checkpointing, and ten at 32,768 tokens in one row.

    python tests/memory/run.py    continues where it stopped; exit status 1 where the formula is off by over a tenth
"""

import json
import os
import sys
from pathlib import Path

from speculators_nb.core.files import atomic_write
from speculators_nb.lab.experiment import settings
from speculators_nb.plan.step_memory import RECOMPUTED, computed_and_measured

RESULTS = Path(__file__).parent / "results.json"
MOST = 0.1  # share that the formula may be off
LONG = dict(width=64, length=32768, each=256)
CASES = [
    *(
        dict(drafter=name, recomputed=recomputed, **LONG | dict(width=width))
        for width, name in ((64, "dflash"), (64, "peagle"), (256, "dspark"), (256, "xpress"))  # of rank 64
        for recomputed in (True, False)
    ),
    *(dict(drafter=name, recomputed=True, **LONG) for name in ("eagle3", "mtp")),
    *(
        dict(drafter=name, recomputed=recomputed, width=width, length=384, each=128)
        for width in (256, 128, 192)
        for name in ("eagle3", "peagle", "dflash", "mtp")
        for recomputed in (True, False)
    ),
]


def measured(case):
    "The case with its two numbers in MiB, and their ratio."
    name, width, recomputed = case["drafter"], case["width"], case["recomputed"]
    given = settings(name, 2) | {RECOMPUTED: recomputed}
    found = computed_and_measured(name, width, case["length"], each=case["each"], **given)
    computed, counted = (round(n / 2**20, 2) for n in found)
    return case | dict(computed_mib=computed, measured_mib=counted, ratio=round(computed / counted, 3))


def main():
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() and not os.environ.get("CI") else []
    done = [{key: row[key] for key in CASES[0]} for row in rows]
    for case in CASES:
        if case in done:
            continue
        rows.append(measured(case))
        print(rows[-1], flush=True)
        with atomic_write(RESULTS) as file:
            file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    wrong = [row for row in rows if abs(row["ratio"] - 1) > MOST]
    print(f"{len(rows)} cases, {len(wrong)} off by more than {MOST:.0%}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
