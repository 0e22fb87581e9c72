"""The drafter of `make real` in vLLM on a CPU: tokens a second with and without it, and whether vLLM writes and counts
what our decoder does.

    make real vllm                          once: the drafter, and vLLM for processors
    python benchmarks/real/engine.py        then this: twelve servers, a quarter of an hour on two idle cores

Greedy, one request at a time, the held-out questions of `make real`. Each K is a server of its own, and 0 is the server
without a drafter. In float32 every request is compared with our decoder: its tokens, and what each position accepted;
bfloat16 is faster, and there a forward pass over several tokens rounds otherwise than passes over one. Temperature 1 is
left out: vLLM 0.32 for processors reads the temperature of drafts from memory that was never set (docs/measured.md).
Results: benchmarks/real/results/ENGINE.md and engine.csv.
"""

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pandas as pd
import torch
from transformers import AutoTokenizer

from speculators_nb.evaluate.acceptance import bootstrap
from speculators_nb.evaluate.comparison import evaluate_as_engine
from speculators_nb.evaluate.engine import evaluate_engine
from speculators_nb.evaluate.prompts import encode_prompts, read_prompts
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.serve.serve_command import serve_environment
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REAL = ROOT / "output/real"  # of `make real`
RESULTS = HERE / "results"
COUNTS = ["drafts", "proposed", "accepted", "accepted_at"]


def measured(prompts, ks, limit, dtype):
    "What each request took and counted in vLLM; k=0: no drafter."
    found = evaluate_engine(
        REAL / "drafter",
        REAL / "prepared",
        k=ks,
        max_new_tokens=limit,
        max_samples=prompts,
        env=serve_environment(1),
        dtype=dtype,
        max_model_len=1024,
        extra=["--max-num-seqs", "4"],
    )
    return found.requests


def decoded(prompts, ks, limit):
    "The same requests by our decoder."
    torch.set_num_threads(os.cpu_count())
    drafter = SpeculatorModel.from_pretrained(REAL / "drafter").drafter()
    folder = REAL / "verifier"
    verifier = Verifier.from_pretrained(folder, list(drafter.aux_layer_ids), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = encode_prompts(read_prompts(REAL / "prepared", prompts), tokenizer)
    ends = eos_ids_of(verifier, tokenizer)
    tables = []
    for k in ks:
        found = evaluate_as_engine(
            verifier, {"eagle3": drafter}, questions, k=k, max_new_tokens=limit, eos_token_ids=ends
        )
        tables.append(found.requests.assign(k=k))
    return pd.concat(tables, ignore_index=True)


def compared(engine, ours):
    "One row for each request in vLLM: its speed, and whether its tokens and its counts are those of `ours`."
    ours = ours.set_index(["dtype", "k", "prompt"])
    plain = engine[engine.k == 0].set_index(["dtype", "prompt"])
    rows = []
    for request in engine.itertuples():
        row = dict(dtype=request.dtype, k=request.k, prompt=request.prompt)
        row |= dict(seconds=request.seconds, tokens=request.tokens)
        row["plain_text"] = request.token_ids == plain.token_ids[request.dtype, request.prompt]
        if request.k:
            row |= dict(drafts=request.drafts, accepted=request.accepted)
        if (request.dtype, request.k, request.prompt) in ours.index:
            own = ours.loc[request.dtype, request.k, request.prompt]
            row["our_text"] = request.token_ids == own.token_ids
            row["our_counts"] = all(getattr(request, name) == own[name] for name in COUNTS)
        rows.append(row)
    return pd.DataFrame(rows).round(4)


def times_as_fast(sums):  # [..., 4]: tokens and seconds with a drafter, tokens and seconds without -> [..., 1]
    tokens, seconds, plain_tokens, plain_seconds = np.moveaxis(sums, -1, 0)
    return (tokens / seconds / (plain_tokens / plain_seconds))[..., None]


def tokens_a_step(sums):  # [..., 2]: drafts, accepted -> [..., 1]
    drafts, accepted = np.moveaxis(sums, -1, 0)
    return (1 + accepted / drafts)[..., None]


def summary(requests):
    "One row for each dtype and K: speed and tokens a step with 95 % intervals over requests, and how many agree."
    rows = []
    for (dtype, k), drafted in requests.groupby(["dtype", "k"]):
        drafted = drafted.set_index("prompt")
        row = dict(
            dtype=dtype, k=k, requests=len(drafted), tokens_per_second=drafted.tokens.sum() / drafted.seconds.sum()
        )
        if k:
            plain = requests[(requests.dtype == dtype) & (requests.k == 0)].set_index("prompt")
            both = drafted[["tokens", "seconds"]].join(plain[["tokens", "seconds"]].add_prefix("plain_"))
            faster = bootstrap(both.to_numpy(float), times_as_fast)
            steps = bootstrap(drafted[["drafts", "accepted"]].to_numpy(float), tokens_a_step)
            for name, found in {"speedup": faster, "tokens_per_step": steps}.items():
                row |= {name: found.value[0], f"{name}_low": found.low[0], f"{name}_high": found.high[0]}
            row |= dict(plain_text=drafted.plain_text.sum())
            if dtype == "float32":
                row |= dict(our_text=drafted.our_text.sum(), our_counts=drafted.our_counts.sum())
        rows.append(row)
    return pd.DataFrame(rows).round(3)


def page(table, limit):
    "The summary as a page."

    def interval(row, name):
        return "{:.2f} [{:.2f}, {:.2f}]".format(*(row[name + end] for end in ("", "_low", "_high")))

    def equal(row, name):
        return "" if pd.isna(row[name]) else f"{row[name]:.0f} of {row.requests}"

    lines = []
    for _, row in table.iterrows():
        line = {"dtype": row["dtype"], "K": row.k, "tokens a second": f"{row.tokens_per_second:.1f}"}
        if row.k:
            line["times no drafter"] = interval(row, "speedup")
            line["tokens a step"] = interval(row, "tokens_per_step")
            line["text as without a drafter"] = equal(row, "plain_text")
            line["text as our decoder's"] = equal(row, "our_text")
            line["counts as our decoder's"] = equal(row, "our_counts")
        lines.append(line)
    return f"""# The drafter of `make real` in vLLM, {date.today()}

vLLM for processors on {os.cpu_count()} cores, greedily, one request at a time: {table.requests.max()} held-out
questions of SmolLM2-135M-Instruct, at most {limit} tokens each. The drafter was trained for {table.passes[0]:g} passes
over the answers. Written by `python benchmarks/real/engine.py`.

{pd.DataFrame(lines).fillna("").to_markdown(index=False)}

*Times no drafter*: tokens a second over those of the server without a drafter. *Text* and *counts*: requests whose
tokens, and whose number of accepted tokens at each position, are equal.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="K", help="tokens to draft")
    parser.add_argument("--prompts", type=int, default=16, help="held-out questions")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    args = parser.parse_args()
    os.chdir(ROOT)
    if not (REAL / "drafter" / "model.safetensors").is_file():
        sys.exit(f"{REAL / 'drafter'}: no drafter; run `make real` first")
    size = dict(prompts=args.prompts, ks=args.ks, limit=args.max_new_tokens)
    engine = pd.concat([measured(**size, dtype=dtype).assign(dtype=dtype) for dtype in args.dtypes], ignore_index=True)
    passes = json.loads((REAL / "real.json").read_text())["epochs"]
    table = summary(compared(engine, decoded(**size).assign(dtype="float32"))).assign(passes=passes)
    table.to_csv(RESULTS / "engine.csv", index=False)
    text = page(table, args.max_new_tokens)
    (RESULTS / "ENGINE.md").write_text(text, encoding="utf-8")
    print(text)
