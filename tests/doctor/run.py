"""The doctor on every drafter of spoil.py. Writes results.json: the stage that is named first, its number, the remedy.

python tests/doctor/run.py FOLDER [CASE…]     FOLDER keeps the drafters; a case that is not named keeps its result"""

import json
import sys
from pathlib import Path

import torch
from filelock import FileLock
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))

from doctor.spoil import SOUND, SPOILT, make

from speculators_nb.core.files import atomic_write
from speculators_nb.doctor.doctor import examine

RESULTS = Path(__file__).parent / "results.json"
CASES = [*(f"sound-{algorithm}-0" for algorithm in SOUND), *SPOILT]


def diagnose(case, folder):
    "What the doctor says about a case."
    return examine(**make(case, folder))


def result(case, diagnosis):
    first = diagnosis.first
    later = [f.stage for f in diagnosis.findings if f.state == "finding" and f is not first]
    found = dict(
        planted=SPOILT[case][1] if case in SPOILT else None, fault=SPOILT[case][0].__doc__ if case in SPOILT else None
    )
    found |= dict(first=first.stage if first else None, number=first.evidence if first else None)
    return found | dict(remedy=first.remedy if first else None, later=later)


def store(case, found):
    "Enter a result; several processes may share the cases."
    with FileLock(f"{RESULTS}.lock"):
        results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        results[case] = found
        results = {name: results[name] for name in CASES if name in results}
        with atomic_write(RESULTS) as temporary:
            temporary.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    Path(f"{RESULTS}.lock").unlink(missing_ok=True)
    return results


def main(folder, *cases):
    torch.set_num_threads(1)
    disable_progress_bar()
    for case in cases or CASES:
        found = result(case, diagnose(case, folder))
        results = store(case, found)
        print(case, *(f"| {name}: {found[name]}" for name in ("planted", "first", "number", "later")), flush=True)
    missed = [case for case, r in results.items() if r["first"] != r["planted"]]
    print(f"{len(results) - len(missed)} of {len(results)} as planted", *missed)
    return len(missed) > 1 or any(case.startswith("sound") for case in missed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
