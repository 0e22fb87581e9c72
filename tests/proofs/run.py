"""Speculative decoding leaves the verifier's text alone: shown on the shipped verifier, for every proposer and every
lossless rule.

    make proofs                                             all of it; what is measured already stays
    python tests/proofs/run.py law --minutes 5              chi-square of sampled texts, as far as five minutes reach
    python tests/proofs/run.py text --minutes 5             greedy texts, token for token
    python tests/proofs/run.py page                         the results as a page

`law`: 50 000 texts of five tokens from one prompt, for each proposer, rule and temperature, against the exact law of
all texts that the verifier can write, which is found by plain forward
passes. Two wrong rules must fail. `text`: at temperature 0, 200 held-out prompts, 128 tokens each, by every proposer,
one request at a time and eight at a time, against the verifier alone.
Results: tests/proofs/results/. Each row carries the commit it was measured at.
"""

import argparse
import csv
import functools
import os
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
import torch
import transformers
from filelock import FileLock
from setting import LEARNED, LOOKUPS, ROOT, Sampler, chi_square, exact_law, learned, make, remembered, shipped, stories
from transformers.utils.logging import disable_progress_bar

from speculators_nb.decode import acceptance_rules as accept
from speculators_nb.decode.generate import NoDrafter, generate

RESULTS = Path(__file__).resolve().parent / "results"
CHAINS = [*LEARNED, *LOOKUPS, "draft-model", "eagle argmax", "eagle3 argmax", "draft-model stopping"]
GROWERS = [*LEARNED, "draft-model"]
TOP_P = dict(top_p=0.9)


def unreduced(p, children, tree, generator):
    "Wrong: after a rejection the token is drawn from the verifier's law, not from the residual."
    for i in children:
        q = 1 if tree.probs is None else tree.probs[i, tree.tokens[i]]
        if accept.flip(p[tree.tokens[i]] / q, generator):
            return i, p
    return None, p


WRONG = {
    "wrong: no residual": accept.Rule(
        functools.partial(accept.walk, unreduced), False, "the law itself after a rejection"
    ),
    "wrong: lenient": accept.lenient(0.8),
}


def combinations():
    "(temperature, filters, proposer, rule), the plainest first."
    both = (0.7, 1.0)
    yield from ((t, TOP_P, name, rule) for name in ("eagle", "n-gram") for t in both for rule in WRONG)
    yield from ((t, TOP_P, name, rule) for rule in ("standard", "block", "strict") for name in CHAINS for t in both)
    yield from (
        (t, TOP_P, f"{name} dynamic", rule) for name in GROWERS for t in both for rule in ("standard", "strict")
    )
    yield from (
        (t, TOP_P, name, rule)
        for name in ("medusa Medusa's", "eagle static", "mlp static", "mtp static", "draft-model static")
        for t in both
        for rule in ("standard", "strict")
    )
    yield from (
        (1.0, filters, "eagle", rule)
        for filters in (dict(top_k=4), dict(min_p=0.1), dict(top_k=6, top_p=0.95, min_p=0.05))
        for rule in ("standard", "block", "strict")
    )
    yield from (
        (t, TOP_P, f"{name} static", "standard")
        for name in GROWERS
        if name not in ("eagle", "mlp", "mtp", "draft-model")
        for t in both
    )
    yield from (
        (t, TOP_P, f"draft-model {kind}", rule)
        for kind, rule in (("static", "traversal"), ("greedy+1", "traversal"), ("greedy+1", "standard"))
        for t in both
    )


def stamp():
    "Where a row was measured."
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return dict(commit=commit, torch=torch.__version__, transformers=transformers.__version__, date=str(date.today()))


def rows(name):
    return (
        pd.read_csv(RESULTS / name, dtype=str, keep_default_na=False).to_dict("records")
        if (RESULTS / name).is_file()
        else []
    )


def append(name, row):
    RESULTS.mkdir(exist_ok=True)
    (ROOT / "output").mkdir(exist_ok=True)
    file = RESULTS / name
    with FileLock(ROOT / f"output/proofs-{name}.lock"):
        new = not file.is_file()
        with open(file, "a", newline="") as f:
            writer = csv.DictWriter(f, row, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
    print(row, flush=True)


def run_law(args):
    start = time.monotonic()
    done = {(float(r["temperature"]), r["filters"], r["proposer"], r["rule"]) for r in rows("law.csv")}
    todo = [
        c
        for c in combinations()
        if (c[0], str(c[1]), c[2], c[3]) not in done and args.only in c[2] and args.temperature in (None, c[0])
    ]
    if not todo:
        return False
    drafters = {name: learned(name) for name in LEARNED if any(c[2].split()[0] == name for c in todo)}
    verifier, _, prompts = shipped([2, 3, 4, 6])
    texts, laws, here = stories(verifier, prompts), {}, None
    for temperature, filters, name, rule in todo:
        if time.monotonic() - start > 60 * args.minutes:
            return True
        where = "retold" if name.split()[0] in LOOKUPS else "once"
        if (where, temperature, str(filters)) not in laws:
            laws[where, temperature, str(filters)] = exact_law(verifier.model, texts[where], 5, temperature, **filters)
        law = laws[where, temperature, str(filters)]
        if here != (name, temperature, str(filters)):
            here, sampler = (name, temperature, str(filters)), Sampler(verifier, texts[where])
            drafter = remembered(name, make(name, drafters, verifier), sampler.memory)
        clock, counts, steps = time.process_time(), Counter(), Counter()
        sampling = sampler.memory.sampling(
            temperature, zlib.crc32(repr((args.seed, temperature, filters, name, rule)).encode()), **filters
        )
        for _ in range(args.samples // 1000):
            for g in sampler.draw(drafter, 1000, sampling, WRONG.get(rule, rule)):
                counts[tuple(g.tokens)] += 1
                for s in g.steps:
                    steps.update(passes=1, drafted=len(s.draft), accepted=s.accepted)
        stat, free, p = chi_square(counts, law)
        append(
            "law.csv",
            dict(
                temperature=temperature,
                filters=str(filters),
                proposer=name,
                rule=rule,
                samples=sum(counts.values()),
                texts=len(law),
                chi2=round(stat, 2),
                dof=free,
                p=f"{p:.3g}",
                accepted_per_pass=round(steps["accepted"] / steps["passes"], 3),
                drafted_per_pass=round(steps["drafted"] / steps["passes"], 3),
                contexts=sampler.memory.read_texts,
                cpu_s=round(time.process_time() - clock, 1),
                **stamp(),
            ),
        )
    return False


def run_text(args):
    start, n, new, done = time.monotonic(), 200, 128, {(r["proposer"], r["batch"]) for r in rows("text.csv")}
    names = [
        *(c for c in CHAINS if "argmax" not in c),
        "medusa Medusa's",
        *(f"{g} {kind}" for g in GROWERS for kind in ("dynamic", "static")),
    ]
    todo = [
        (name, batch) for name in names for batch in args.batch if (name, str(batch)) not in done and args.only in name
    ]
    if not todo:
        return False
    drafters = {name: learned(name) for name in LEARNED if any(n.split()[0] == name for n, _ in todo)}
    verifier, tokenizer, prompts = shipped([2, 3, 4, 6])
    prompts = [p for p in prompts if len(p) + new <= 1024]
    # 180 are held out; twenty more are the first ones a word longer
    prompts = (prompts + [p + tokenizer.encode(" Once") for p in prompts])[:n]
    file = ROOT / "output/proofs-plain.pt"
    plain = (
        torch.load(file, weights_only=True)
        if file.is_file()
        else [generate(verifier, NoDrafter(), p, max_new_tokens=new, k=0).tokens for p in prompts]
    )
    if not file.is_file():
        torch.save(plain, file)
    for name, batch in todo:
        part, counts = file.with_name(f"proofs-{name}-{batch}.csv".replace(" ", "-").replace("'", "")), Counter()
        known = [list(map(int, line.split(","))) for line in part.read_text().split()] if part.is_file() else []
        drafter = make(name, drafters, verifier)
        for at in range(0, n, 8):
            if any(k[0] == at for k in known):
                continue
            if time.monotonic() - start > 60 * args.minutes:
                return True
            group, t = prompts[at : at + 8], time.process_time()
            got = (
                generate(verifier, drafter, group, k=4, max_new_tokens=new)
                if batch == 8
                else [generate(verifier, drafter, p, k=4, max_new_tokens=new) for p in group]
            )
            for s in (s for g in got for s in g.steps):
                counts.update(passes=1, accepted=s.accepted)
            same = sum(g.tokens == want for g, want in zip(got, plain[at : at + 8]))
            known.append(
                [at, len(group), same, counts["passes"], counts["accepted"], int(1000 * (time.process_time() - t))]
            )
            counts.clear()
            with open(part, "a") as f:
                f.write(",".join(map(str, known[-1])) + "\n")
        total = [sum(x) for x in zip(*known)]
        append(
            "text.csv",
            dict(
                proposer=name,
                batch=batch,
                prompts=total[1],
                tokens=total[1] * new,
                identical=total[2],
                accepted_per_pass=round(total[4] / total[3], 3),
                cpu_s=round(total[5] / 1000, 1),
                **stamp(),
            ),
        )
    return False


def page():
    "The results so far as a page."
    if not (RESULTS / "law.csv").is_file() or not (RESULTS / "text.csv").is_file():
        return
    law, text = pd.DataFrame(rows("law.csv")), pd.DataFrame(rows("text.csv"))
    law["p"], law["samples"] = law.p.astype(float), law.samples.astype(int)
    wrong, right = law[law.rule.str.startswith("wrong")], law[~law.rule.str.startswith("wrong")]
    expected = sum(1 for c in combinations() if c[3] not in WRONG)
    level = 0.01 / expected

    def who(t):
        return t.proposer + t.filters.where(t.filters != str(TOP_P), "").str.replace(r"[{}']", "", regex=True).radd(
            ", "
        ).where(t.filters != str(TOP_P), "")

    def table(t):
        return (
            t.assign(p=t.p.map("{:.3g}".format), proposer=who(t))
            .pivot_table(index="proposer", columns=["rule", "temperature"], values="p", aggfunc="first", sort=False)
            .fillna("")
        )

    kept = (
        right.assign(a=right.accepted_per_pass.astype(float), proposer=who(right))
        .pivot_table(index="proposer", columns=["rule", "temperature"], values="a", sort=False)
        .round(2)
        .fillna("")
    )

    def flat(t):
        return t.set_axis([" ".join(map(str, c)) for c in t.columns], axis=1).to_markdown()

    failed = right[right.p < level]
    of_whom = ": " + ", ".join(failed.proposer + " " + failed.rule) if len(failed) else ""
    again = "".join(
        (
            f" Drawn again, with other seeds and more texts: {r['proposer']}, {r['rule']} {r['temperature']}, "
            f"{int(r['samples']):,} texts: p {r['p']}."
        )
        for r in rows("again.csv")
    )
    identical = (
        text.pivot_table(index="proposer", columns="batch", values="identical", aggfunc="first", sort=False)
        .fillna("")
        .rename(columns="identical, batch {}".format)
        .rename_axis(columns=None)
    )
    (RESULTS / "README.md").write_text(
        f"""# The text stays the verifier's: what was measured

Written by `make proofs`, which continues where it stopped. Rows, with the commit and the versions of each: `law.csv`
and `text.csv`.

## Sampled texts have the verifier's distribution

{int(right.samples.iloc[0]):,} texts of five tokens for each cell, from one prompt of the shipped verifier, three tokens
drafted in a step, nucleus of 0.9 unless it says otherwise; {min(right.texts.astype(int))} to
{max(right.texts.astype(int))} different texts are possible. `generate`, the proposer's draws and the rule run for every
text; what is a function of the context alone (logits, distributions) is computed once (`memo.py`), and tokens are
drawn by inverting the cumulated distribution, which costs a tenth of `torch.multinomial`. The cell is the p-value of
chi-square against the exact distribution. {len(right)} of {expected} combinations are measured; at the level 0.01 for
all {expected} together (Bonferroni: {level:.2g} each)
**{len(failed)} fail{"s" if len(failed) == 1 else ""}**{of_whom}. The smallest p is {right.p.min():.2g}.{again}

{flat(table(right))}

Draft tokens accepted in a verification step: the drafts were put to the test.

{flat(kept)}

### Wrong rules fail

`no residual` draws from the verifier's own distribution after a rejection, `lenient` accepts at p / (0.8 q). The
largest p is {wrong.p.max():.2g}.

{flat(table(wrong))}

## Greedy texts are the verifier's, token for token

{identical.to_markdown()}

Of {text.prompts.iloc[0]} held-out prompts, 128 tokens each, four drafted in a step;
{int(text.tokens.astype(int).sum()):,} tokens in all.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", nargs="*", default=["law", "text", "page"], help="law, text, page")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many; a later run goes on")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--only", default="", help="proposers whose name has this in it")
    parser.add_argument("--temperature", type=float, help="this one alone")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 1], help="of greedy texts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    torch.set_num_threads(1)
    more = [{"law": run_law, "text": run_text}[what](args) for what in args.what if what != "page"]
    if "page" in args.what:
        page()
    sys.exit(3 if any(more) else 0)
