"""The real engine: acceptance, throughput and latency of the shipped EAGLE-3 in vLLM, over the number of drafted tokens and the load.

    python benchmarks/engine/run.py                       vLLM on this machine; six servers, ten to thirty minutes on two cores
    python benchmarks/engine/run.py --ks 1 3 --prompts 6  less of it
    python benchmarks/engine/run.py --out output/engine   elsewhere than benchmarks/engine/results

vLLM is found as `serve.find_executable` says (SPECULATORS_NB_VLLM, or .venv-vllm, which `make vllm-test` makes). Without an accelerator it is the build for
processors, one thread, float32. Prompts are the first turns of the held-out corpus, domains in equal shares; greedy. Each K is a server of its own, and 0 is the server without drafting.
Counts do not depend on the machine; the clock does, and on a shared one it is noisy: compare rows of one run, and read medians. A verifier this small (1.9 M parameters) spends its time on everything but
the model, so speed here says what the engine around it costs, not what a drafter brings to a large verifier.
"""
import argparse
import json
import os
import platform
import tempfile
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from speculators_nb.data_generation.corpus import read_corpus
from speculators_nb.evaluate.engine import evaluate_engine
from speculators_nb.experiment import shipped_drafter
from speculators_nb.serve import accelerated, serve_environment
from speculators_nb.utils import atomic_write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="K", help="tokens to draft")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4], help="requests at once")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    env = serve_environment(1) | ({} if accelerated() else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"})
    rows = list(read_corpus(ROOT / "data/corpus/heldout.jsonl"))[:opt.prompts]
    with tempfile.TemporaryDirectory() as tmp:
        found = evaluate_engine(shipped_drafter(Path(tmp) / "drafter"), rows, k=opt.ks, concurrency=opt.concurrency, max_new_tokens=opt.max_new_tokens, env=env,
                                dtype="float32", max_model_len=512, extra=["--max-num-seqs", "8"])
        def plain(text): return text.replace(f"{tmp}/drafter", "DRAFTER").replace(str(ROOT) + "/", "")
        found.settings = json.loads(plain(json.dumps(found.settings))) | dict(machine=f"{platform.machine()}, {os.cpu_count()} cores", date=str(date.today()))
    found.requests = found.requests[found.requests.concurrency == 1].drop(columns="text").reset_index(drop=True)
    found.save(opt.out)
    best = found.performance[found.performance.domain == "all"]
    table = best[["k", "concurrency", "tokens_per_second", "first_token_ms", "between_tokens_ms", "request_ms", "speedup"]].merge(
        found.summary[found.summary.domain == "all"][["k", "concurrency", "mean_length", "draft_acceptance"]], how="left")
    with atomic_write(opt.out / "README.md") as file:
        file.write_text(f"# The engine, {date.today()}\n\nvLLM on {found.settings['machine']}; {len(rows)} prompts, {opt.max_new_tokens} tokens each, greedy, float32. Command:\n\n"
                        f"    python benchmarks/engine/run.py --ks {' '.join(map(str, opt.ks))} --concurrency {' '.join(map(str, opt.concurrency))} --prompts {opt.prompts} "
                        f"--max-new-tokens {opt.max_new_tokens}\n\n{table.round(2).to_markdown(index=False)}\n\n![speed](speed.png)\n\n![acceptance](acceptance.png)\n", encoding="utf-8")
    print(table.round(2).to_string(index=False))


if __name__ == "__main__":
    main()
