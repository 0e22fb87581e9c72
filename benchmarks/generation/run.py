"""Generation and extraction of hidden states in this process: tokens a processor second, beside transformers and beside
what a CPU computes in bfloat16.

    python benchmarks/generation/run.py --verifier FOLDER         any verifier in safetensors
    python benchmarks/generation/run.py                           a random one of SmolLM2-135M's sizes

Method: one thread; the sides of a comparison take turns, so that a busy machine slows them alike; seconds are those of
processor time; a step is the median of all steps. Prompts have 300 to 800 random tokens, all of different length
(`--shortest`, `--longest`), greedy, no end token, so that every side generates the same number of tokens.

- *answer*: `regenerate.in_process.answer`, float32; *bfloat16*: the same within `tapped_model.computing`.
- *padded*: what `answer` was before: left padding, a growing cache, a mask for all; *transformers*: `model.generate` on
  the same left-padded batch, with its dynamic cache and with its static one.
- *prefill* is the time until every prompt has its first token; a step follows the one before.
- *features*: `features.in_process.states_of`, float32 and bfloat16, and the cosine between them.

Results go to benchmarks/generation/results/.
"""

import argparse
import json
import os
import re
import time
from contextlib import nullcontext
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from speculators_nb.features.in_process import states_of
from speculators_nb.regenerate.in_process import answer
from speculators_nb.verifier.tapped_model import Verifier, computing

HERE = Path(__file__).resolve().parent
SMOL = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def padded_batch(prompts):
    """Token ids and mask, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    return ids, (torch.arange(width) >= torch.tensor([[width - len(p)] for p in prompts])).long()


@torch.no_grad()
def padded(verifier, prompts, n, tick):
    """Greedy answers as they were generated before: left padding and a growing cache."""
    ids, mask = padded_batch(prompts)
    cache, out = DynamicCache(), []
    for _ in range(n):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        step = verifier.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        ids = step.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out.append(ids)
        tick()
    return torch.cat(out, 1).tolist()


def generated(verifier, prompts, n, tick, cache=None):
    """Greedy answers of transformers."""

    def goes_on(ids, scores, **kwargs):
        tick()
        return torch.zeros(len(ids), dtype=torch.bool)

    ids, mask = padded_batch(prompts)
    whole = verifier.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[goes_on],
        disable_compile=True,
        **({"cache_implementation": cache} if cache else {}),
    )
    return whole[:, ids.shape[1] :].tolist()


def ours(verifier, prompts, n, tick, dtype=None):
    """Greedy answers of `regenerate`."""
    with computing(verifier, dtype):
        return answer(verifier, prompts, n, (), progress=lambda tokens: tick())


SIDES = {
    "answer": ours,
    "answer, bfloat16": partial(ours, dtype=torch.bfloat16),
    "padded": padded,
    "transformers, dynamic": generated,
    "transformers, static": partial(generated, cache="static"),
}


def clocked(function, *args):
    """(processor seconds, result)"""
    start = time.process_time()
    result = function(*args)
    return time.process_time() - start, result


def generation(verifier, opt, rows):
    """A line for each side at a batch size."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(opt.shortest, opt.longest, rows).int().tolist()
    prompts = [torch.randint(100, verifier.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    steps, prefills, texts = {s: [] for s in SIDES}, {s: [] for s in SIDES}, {}
    for _ in range(opt.rounds):
        for side, function in SIDES.items():
            ticks, start = [], time.process_time()
            texts[side] = function(verifier, prompts, 1 + opt.steps, lambda: ticks.append(time.process_time()))
            ticks = ticks[-opt.steps - 1 :]
            prefills[side].append(ticks[0] - start)
            steps[side] += [after - before for before, after in pairwise(ticks)]
            print(
                rows, side, f"prefill {prefills[side][-1]:.1f} s, step {1000 * median(steps[side]):.0f} ms", flush=True
            )
    before = median(steps["padded"])
    return [
        dict(
            rows=rows,
            side=side,
            prefill_s=median(prefills[side]),
            step_ms=1000 * median(steps[side]),
            tokens_per_s=rows / median(steps[side]),
            step_of_padded=before / median(steps[side]),
            same_answers=sum(a == b for a, b in zip(texts["answer"], texts[side])),
        )
        for side in SIDES
    ]


def features(verifier, opt):
    """float32 and bfloat16."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(100, verifier.vocab_size, (n,), generator=generator).tolist() for n in (512, 500, 480, 450)]
    seconds, states = {"float32": [], "bfloat16": []}, {}
    for _ in range(opt.rounds):
        for side, spent in seconds.items():
            with computing(verifier, torch.bfloat16) if side == "bfloat16" else nullcontext():
                s, states[side] = clocked(states_of, verifier, rows, torch.float32)
            spent.append(s)
            print(side, f"{s:.1f} s", flush=True)
    near = torch.cat([torch.cosine_similarity(a, b, dim=-1) for a, b in zip(*states.values())])
    return dict(
        tokens=sum(map(len, rows)),
        tokens_per_s={side: sum(map(len, rows)) / median(spent) for side, spent in seconds.items()},
        times=median(a / b for a, b in zip(*seconds.values())),
        cosine=near.mean().item(),
        lowest_cosine=near.min().item(),
    )


def report(facts):
    """A page."""
    f = facts["features"]
    lines = [
        f"# Generation and features in process, {facts['date']}",
        "",
        f"{facts['cpu']} ({facts['bf16']}), one thread, load average {facts['load']:.1f} on {os.cpu_count()} CPUs; "
        f"torch {facts['torch']}, transformers {facts['transformers']}; {facts['verifier']}; prompts of "
        f"{facts['shortest']} to {facts['longest']} tokens, {facts['steps']} steps, {facts['rounds']} "
        "rounds, medians. Method: `benchmarks/generation/run.py`.",
        "",
        "| rows | side | prefill, CPU s | step, CPU ms | tokens / CPU s | times as fast as padded | answers equal |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['rows']} | {r['side']} | {r['prefill_s']:.1f} | {r['step_ms']:.0f} | {r['tokens_per_s']:.0f} | "
        f"{r['step_of_padded']:.2f} | {r['same_answers']} of {r['rows']} |"
        for r in facts["generation"]
    ]
    lines += [
        "",
        "| features | tokens / CPU s |",
        "|---|---|",
        *(f"| {side} | {speed:.0f} |" for side, speed in f["tokens_per_s"].items()),
        "",
        f"{f['times']:.2f} times as fast in bfloat16; cosine to float32 {f['cosine']:.5f}, lowest "
        f"{f['lowest_cosine']:.5f}.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 48])
    parser.add_argument("--shortest", type=int, default=300)
    parser.add_argument("--longest", type=int, default=800)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    verifier = (
        Verifier.from_pretrained(opt.verifier, dtype="float32")
        if opt.verifier
        else Verifier(LlamaForCausalLM(LlamaConfig(**SMOL)))
    )
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"model name\s*:\s*(.+)", info)
    facts = dict(
        date=str(date.today()),
        cpu=cpu[1] if cpu else "unknown CPU",
        bf16=", ".join(sorted(set(re.findall(r"avx512_bf16|amx_bf16", info)))) or "no bfloat16",
        load=os.getloadavg()[0],
        torch=torch.__version__,
        transformers=transformers.__version__,
        verifier=Path(opt.verifier).name if opt.verifier else "a random Llama of 135 million parameters",
        shortest=opt.shortest,
        longest=opt.longest,
        steps=opt.steps,
        rounds=opt.rounds,
    )
    facts["features"] = features(verifier, opt)
    facts["generation"] = [line for rows in opt.rows for line in generation(verifier, opt, rows)]
    opt.out.mkdir(parents=True, exist_ok=True)
    (opt.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
    (opt.out / "README.md").write_text(text := report(facts))
    print(text)


if __name__ == "__main__":
    main()
