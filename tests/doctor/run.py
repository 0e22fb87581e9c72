"""The doctor on every drafter of spoil.py. Writes results.json: the stage that is named first, its number, the remedy.

    python tests/doctor/run.py FOLDER [CASE…]     FOLDER keeps the drafters; a case that is not named keeps its result"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[2]))

from speculators_nb.cli.drafter_commands import prompts_of
from speculators_nb.core.files import atomic_write
from speculators_nb.doctor.doctor import examine
from speculators_nb.lab.shipped import shipped_data
from tests.doctor.spoil import SOUND, SPOILT, make

RESULTS = Path(__file__).parent / "results.json"
CASES = [*(f"sound-{algorithm}-0" for algorithm in SOUND), *SPOILT]


def diagnose(case, folder):
    "What the doctor says about a case."
    given = make(case, folder)
    data = given.pop("data", None)
    if data is not None:
        tokenizer = AutoTokenizer.from_pretrained(shipped_data() / "tiny-verifier")
        given["prompts"], given["domains"] = prompts_of(data, tokenizer)
    return examine(**given)


def result(case, diagnosis):
    first = diagnosis.first
    later = [f.stage for f in diagnosis.findings if f.state == "finding" and f is not first]
    found = dict(planted=SPOILT[case][1] if case in SPOILT else None, fault=SPOILT[case][0].__doc__ if case in SPOILT else None)
    found |= dict(first=first.stage if first else None, number=first.evidence if first else None)
    return found | dict(remedy=first.remedy if first else None, later=later)


def main(folder, *cases):
    torch.set_num_threads(1)
    disable_progress_bar()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for case in cases or CASES:
        diagnosis = diagnose(case, folder)
        results[case] = result(case, diagnosis)
        print(case, "| planted:", results[case]["planted"], "| first:", results[case]["first"], "|", results[case]["number"], "| later:", results[case]["later"], flush=True)
        (Path(folder) / f"{case}.txt").write_text(diagnosis.table().to_string())
    ordered = {case: results[case] for case in CASES if case in results}
    with atomic_write(RESULTS) as temporary:
        temporary.write_text(json.dumps(ordered, indent=1) + "\n")
    missed = [case for case, r in ordered.items() if r["first"] != r["planted"]]
    print(f"{len(ordered) - len(missed)} of {len(ordered)} as planted", *missed)
    return len(missed) > 1 or any(case.startswith("sound") for case in missed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
