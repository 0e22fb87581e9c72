#!/usr/bin/env python
"""The proofs measured anew, whatever was measured before, with a seed of the day; fails where something differs.

    make proofs AGAIN=yes              law and text, hours on two cores
    make proofs AGAIN=yes PART=law     one of the two

What is written stays in output/proofs-again; tests/proofs/results is left alone.
"""

import argparse
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
SEARCHED = 0.01  # the probability that sound rules fail, all of them together


def verdict(law, text, expected, is_wrong):
    "What is wrong with these rows of law.csv and text.csv: sound rules that fail, wrong ones that pass, other texts"
    for row in law:
        p, what = float(row["p"]), f"{row['proposer']}, {row['rule']}, {row['temperature']} {row['filters']}"
        if is_wrong(row["rule"]) and p >= SEARCHED / expected:
            yield f"a wrong rule was not caught: {what}: p {p:g}"
        elif not is_wrong(row["rule"]) and p < SEARCHED / expected:
            yield f"texts are not the verifier's: {what}: p {p:g}"
    for row in text:
        if row["identical"] != row["prompts"]:
            same = f"{row['identical']} of {row['prompts']} texts are the verifier's"
            yield f"{row['proposer']}, batch {row['batch']}: {same}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", default=["law", "text"], help="law, text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--only", default="", help="proposers whose name has this in it")
    args = parser.parse_args()
    if unknown := set(args.parts) - {"law", "text"}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are law and text")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/proofs")]
    import run as proofs

    folder = ROOT / "output/proofs-again"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "output").mkdir(parents=True)
    proofs.ROOT, proofs.RESULTS = folder, folder  # nothing of an earlier run is found there
    given = SimpleNamespace(**vars(args), temperature=None, batch=[8, 1])
    more = [{"law": proofs.run_law, "text": proofs.run_text}[part](given) for part in args.parts]
    law, text = proofs.rows("law.csv"), proofs.rows("text.csv")
    expected = sum(rule not in proofs.WRONG for *_, rule in proofs.combinations())
    faults = list(verdict(law, text, expected, proofs.WRONG.__contains__))
    measured = {"law": law, "text": text}
    faults += [f"no {part} was measured" for part in args.parts if not measured[part]]
    end = ", stopped by --minutes" if any(more) else ""
    print(*faults, sep="\n")
    print(f"{len(law)} laws, {len(text)} sets of greedy texts, seed {args.seed}: {len(faults)} faults{end}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
