#!/usr/bin/env python
"""Measure our checkpoints with `evaluate_engine` on the real vLLM, on a CPU, and compare every count with our own
decoding.

    .venv/bin/python tests/vllm/check_engine.py                three to eight minutes; the first call also makes
    .venv-vllm (4 minutes, 3.4 GB)
    .venv/bin/python tests/vllm/check_engine.py --only n-gram  the cases whose name begins so

For each case `evaluate_engine` starts `vllm serve` by the command of `serve_command`, sends it twelve held-out prompts,
one at a time and four at once, and reads what it counts for each; before that it measures a server without drafts, by
its address. The script asks that

- every answer is, token for token, what our decoder and vLLM without drafts write;
- the counts of every request (drafts, drafted tokens, accepted at each position) are those of our decoder on that
  prompt, at both loads, and each step of it is a step of ours;
- at both loads there are intervals, and the sums are the same;
- at temperature 1 the filters are kept: the likeliest token alone, by top_k=1 or a small top_p, writes the greedy text
  (without drafts: with them vLLM 0.32 for processors reads the filters from unset memory, see UNSET_SAMPLING);
- of the server no process is left.

EAGLE-3 is the shipped drafter (data/tiny-drafter); Medusa, served from vLLM's own layout, is trained for some steps.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from check_vllm import FEWER_PROCESSES, HELDOUT, VENV, VERIFIER, briefly, install

K, PROMPTS, LIMIT = 4, 12, 64
COMMON = dict(dtype="float32", max_model_len=512, extra=["--max-num-seqs", "8"])


def cases(folder, only):
    """{name: (arguments of evaluate_engine, our drafter for a verifier)}"""
    from speculators_nb.lab.experiment import shipped_drafter
    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.serve.speculative_config import SpeculativeConfig

    found = {}

    def wanted(name):
        return not only or name.startswith(tuple(only))

    if wanted("eagle3"):
        model = SpeculatorModel.from_pretrained(shipped_drafter(folder / "eagle3"))
        found["eagle3"] = dict(checkpoint=folder / "eagle3"), lambda verifier: model.drafter()
    if wanted("medusa"):
        heads = briefly("medusa", folder / "medusa").eval()
        found["medusa"] = (
            dict(checkpoint=folder / "medusa", k=K, native=folder / "native"),
            lambda verifier: heads.drafter(),
        )
    if wanted("n-gram"):
        words = dict(method="ngram", num_speculative_tokens=K, prompt_lookup_min=2, prompt_lookup_max=5)
        found["n-gram"] = (
            dict(checkpoint=VERIFIER, speculative_config=words),
            SpeculativeConfig(**words).drafter,
        )
    return found


def compare(name, theirs, mine, plain):
    """What is wrong, as sentences."""
    wrong = []
    drafted = theirs.requests.set_index(["concurrency", "prompt"])
    for i, ours in mine.requests.set_index("prompt").iterrows():
        for load in (1, 4):
            engine = drafted.loc[load, i]
            for what in ("token_ids", "drafts", "proposed", "accepted", "accepted_at"):
                a, b = engine[what], ours[what]
                if (list(a) != list(b)) if isinstance(b, list) else a != b:
                    wrong.append(f"{name}, {load} at once, prompt {i}: {what} is {a} in vLLM, {b} here")
            if (len(engine.step_accepted), sum(engine.step_accepted)) != (ours.drafts, ours.accepted):
                wrong.append(f"{name}, {load} at once, prompt {i}: steps {engine.step_accepted}")
        if plain[i] != ours["token_ids"]:
            wrong.append(f"{name}, prompt {i}: without drafts vLLM writes another text")
    if theirs.positions.unconditional_low.isna().any():
        wrong.append(f"{name}: not every load has intervals")
    columns = ["domain", "mean_length_drafted", "draft_acceptance", "requests", "tokens", "proposed", "accepted"]
    for n, rows in theirs.summary[[*columns, "concurrency"]].groupby("concurrency"):
        both = rows[columns].merge(mine.summary[columns], on="domain", suffixes=("", "_here"))
        far = both[(abs(both[columns[1:]].values - both[[c + "_here" for c in columns[1:]]].values) > 1e-9).any(1)]
        if len(far):
            wrong.append(f"{name}, {n} at once: the sums differ for {list(far.domain)}\n{far.T}")
    return wrong


def without_drafts(rows, environment):
    """Greedy answers of a server without drafts, {prompt: tokens}, and what is wrong when the likeliest token alone is
    left at temperature 1."""
    from speculators_nb.evaluate.engine import evaluate_engine
    from speculators_nb.serve.serve_command import serve_command
    from speculators_nb.serve.server import Server

    def texts(**more):
        found = evaluate_engine(server.url, rows, max_new_tokens=LIMIT, **more)
        return found.requests.set_index("prompt").token_ids.to_dict()

    wrong = []
    with Server(serve_command(VERIFIER, 0, vllm=str(VENV / "bin/vllm"), **COMMON), environment) as server:
        greedy = texts()
        for filters in (dict(top_k=1), dict(top_p=1e-6)):
            found = texts(temperatures=[1.0], concurrency=4, **filters)
            if other := [i for i in greedy if found[i] != greedy[i]]:
                wrong.append(f"{filters}: prompts {other} are answered by another text than the greedy one")
    return greedy, wrong


def main(only):
    import pandas as pd
    import torch
    from transformers import AutoTokenizer

    from speculators_nb.evaluate.comparison import compare_runs, evaluate_as_engine
    from speculators_nb.evaluate.engine import evaluate_engine
    from speculators_nb.lab.experiment import heldout_prompts
    from speculators_nb.lab.shipped import read_corpus
    from speculators_nb.regenerate.in_process import eos_ids_of
    from speculators_nb.serve.serve_command import serve_environment
    from speculators_nb.verifier.tapped_model import Verifier

    torch.set_num_threads(1)
    install()
    start, problems, runs = time.time(), [], {}
    rows, tokenizer = list(read_corpus(HELDOUT))[:PROMPTS], AutoTokenizer.from_pretrained(VERIFIER)
    prompts, domains = heldout_prompts(rows, tokenizer)
    environment = serve_environment(1) | FEWER_PROCESSES
    environment |= dict(
        HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="WARNING"
    )
    plain, wrong = without_drafts(rows, environment)
    problems += wrong
    with tempfile.TemporaryDirectory() as tmp:
        for name, (arguments, drafter) in cases(Path(tmp), only).items():
            theirs = evaluate_engine(
                data=rows,
                concurrency=[1, 4],
                baseline=False,
                max_new_tokens=LIMIT,
                env=environment,
                vllm=VENV / "bin/vllm",
                output_dir=Path(tmp) / f"run-{name}",
                name=name,
                **arguments,
                **COMMON,
            )
            probe = Verifier.from_pretrained(VERIFIER, dtype=torch.float32)
            drafter = drafter(probe)
            verifier = Verifier.from_pretrained(VERIFIER, list(drafter.aux_layer_ids) or None, dtype=torch.float32)
            mine = evaluate_as_engine(
                verifier,
                {name: drafter},
                prompts,
                k=K,
                max_new_tokens=LIMIT,
                eos_token_ids=eos_ids_of(verifier, tokenizer),
                domains=domains,
            )
            problems += compare(name, theirs, mine, plain)
            if not mine.requests.accepted.sum():
                problems.append(f"{name}: nothing was accepted: the check shows too little")
            runs |= {f"{name} in vLLM": theirs, f"{name} here": mine}
        with pd.option_context(
            "display.width", 250, "display.max_columns", 30, "display.float_format", "{:.3f}".format
        ):
            print(compare_runs(runs).table().drop(columns=["temperature"]).to_string(index=False))
    left = [
        p.parent.name
        for p in Path("/proc").glob("[0-9]*/cmdline")
        if str(VENV).encode() in (p.read_bytes() if os.access(p, os.R_OK) else b"")
        and f"PPid:\t{os.getpid()}\n" in (p.parent / "status").read_text()
    ]
    if left:
        problems.append(f"processes {left} are left")
    print(f"{len(prompts)} prompts, {LIMIT} tokens each, K={K}, float32; {time.time() - start:.0f} s")
    if problems:
        raise SystemExit("\n".join(["", *problems]))
    print("vLLM's counts are our decoder's, request by request, at both loads; its texts are ours.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name begins so")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(parser.parse_args().only))
