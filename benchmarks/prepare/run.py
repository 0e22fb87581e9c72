"""Time from conversations in a JSON Lines file to a prepared folder.

    python benchmarks/prepare/run.py                      # 20 000 conversations on two processors, three templates,
    both kinds of rows
    python benchmarks/prepare/run.py --conversations 500 --out /tmp/prepare.csv

Conversations are made of English-like words by Zipf's law: one to four turns, answers of 20 to 400 words, about 1000
tokens together, as chat data sets have them. The tokenizer is that of the shipped verifier (2048 tokens, hence more
tokens a word than a large one makes). Besides the wall clock, which other work on the machine lengthens, the
processor's own time is recorded (`cpu_s`, children included): on two idle processors the run takes a little over half
of it.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import AutoTokenizer

from speculators_nb.data.prepare import prepare_data

ROOT = Path(__file__).resolve().parents[2]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content "
    "}}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
# reasoning of the last turn only, tools, tool calls: the work that the templates of recent models do
THINKING = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% "
    "endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set content = "
    "m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ "
    "content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% "
    "endif %}<|im_end|>\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
TEMPLATES = {
    "marks": CHATML,
    "prefixes": CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "rewritten history": THINKING,
}


def conversations(n, seed=0):
    "Chats of random words whose frequencies follow Zipf's law."
    rng = np.random.default_rng(seed)
    syllables = [c + v + e for c in "bcdfghklmnprst" for v in "aeiou" for e in ("", "n", "r", "st")]
    words = np.array(["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(5000)])
    for i in range(n):
        turns = rng.integers(1, 5)
        lengths = np.stack([rng.integers(5, 60, turns), rng.integers(20, 400, turns) // 2], 1).ravel()
        text = words[np.minimum(rng.zipf(1.3, lengths.sum()), len(words)) - 1]
        parts = np.split(text, lengths.cumsum()[:-1])
        yield {
            "id": str(i),
            "messages": [
                {"role": ("user", "assistant")[k % 2], "content": " ".join(p) + "."} for k, p in enumerate(parts)
            ],
        }


def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("--templates", nargs="+", default=list(TEMPLATES), choices=list(TEMPLATES))
    parser.add_argument("--rows", nargs="+", default=["conversation", "turn"])
    parser.add_argument("--verifier", default=str(ROOT / "data/tiny-verifier"), help="whose tokenizer is used")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/prepare/results/prepare.csv")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.processors])
    tokenizer, lines = AutoTokenizer.from_pretrained(args.verifier), []
    with tempfile.TemporaryDirectory() as d:
        data = Path(d) / "chats.jsonl"
        with open(data, "w", encoding="utf-8") as f:
            for c in conversations(args.conversations):
                f.write(json.dumps(c) + "\n")
        for name in args.templates:
            tokenizer.chat_template = TEMPLATES[name]
            for rows in args.rows:
                start, used = time.perf_counter(), cpu()
                prepared = prepare_data(
                    data,
                    tokenizer,
                    Path(d) / f"{name} {rows}",
                    rows=rows,
                    num_proc=args.processors,
                    val_fraction=0.0,
                )
                wall = time.perf_counter() - start
                lines.append(
                    {
                        "template": name,
                        "rows_per": rows,
                        "conversations": args.conversations,
                        "MB": round(data.stat().st_size / 1e6, 1),
                        "rows": len(prepared),
                        "tokens": int(prepared.lengths.sum()),
                        "processors": args.processors,
                        "wall_s": round(wall, 1),
                        "cpu_s": round(cpu() - used, 1),
                        "ktokens_per_s": round(prepared.lengths.sum() / wall / 1e3),
                    }
                )
                start = time.perf_counter()
                prepare_data(data, tokenizer, Path(d) / f"{name} {rows}", rows=rows, val_fraction=0.0)
                lines[-1]["again_s"] = round(time.perf_counter() - start, 2)
                print(lines[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(lines).to_csv(args.out, index=False)


if __name__ == "__main__":
    main()
