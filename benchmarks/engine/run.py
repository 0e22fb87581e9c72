"""The real engine: acceptance, throughput and latency of the shipped EAGLE-3 in vLLM, over the number of drafted tokens
and the load.

    python benchmarks/engine/run.py                       vLLM on this machine; six servers, two minutes on two idle
    cores
    python benchmarks/engine/run.py --ks 1 3 --prompts 6  less of it
    python benchmarks/engine/run.py --out output/engine   elsewhere than benchmarks/engine/results

vLLM is found as `server.find_executable` says (SPECULATORS_NB_VLLM, or .venv-vllm, which `make vllm-test` makes).
Without an accelerator it is the build for processors, one thread, float32. Prompts are the first turns of the held-out
corpus, domains in equal shares; greedy. Each K is a server of its own, and 0 is the server without drafting. Counts do
not depend on the machine; the clock does, and on a shared one it is noisy: compare rows of one run, and read medians. A
verifier this small (2 M parameters) spends its time on everything but the model, so speed here says what the engine
around it costs, not what a drafter brings to a large verifier.
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

from speculators_nb.core.files import atomic_write
from speculators_nb.evaluate.engine import evaluate_engine
from speculators_nb.lab.experiment import shipped_drafter
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.serve.serve_command import accelerated, serve_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="K", help="tokens to draft")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4], help="requests at once")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    env = serve_environment(1) | (
        {} if accelerated() else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    )
    rows = list(read_corpus(ROOT / "data/corpus/heldout.jsonl"))[: opt.prompts]
    with tempfile.TemporaryDirectory() as tmp:
        found = evaluate_engine(
            shipped_drafter(Path(tmp) / "drafter"),
            rows,
            k=opt.ks,
            concurrency=opt.concurrency,
            max_new_tokens=opt.max_new_tokens,
            env=env,
            dtype="float32",
            max_model_len=512,
            extra=["--max-num-seqs", "8"],
        )

        def plain(text):
            return text.replace(f"{tmp}/drafter", "DRAFTER").replace(str(ROOT) + "/", "")

        found.settings = json.loads(plain(json.dumps(found.settings))) | dict(
            machine=f"{platform.machine()}, {os.cpu_count()} cores", date=str(date.today())
        )
    found.requests = found.requests[found.requests.concurrency == 1].drop(columns="text").reset_index(drop=True)
    found.settings["load"] = round(os.getloadavg()[0], 1)
    write(
        found,
        opt.out,
        " ".join(
            [
                "--ks",
                *map(str, opt.ks),
                "--concurrency",
                *map(str, opt.concurrency),
                "--prompts",
                str(opt.prompts),
                "--max-new-tokens",
                str(opt.max_new_tokens),
            ]
        ),
    )


def write(found, out, arguments):
    """Tables, pictures and a page; where other work was on the machine they say that the clock is not to be trusted."""
    found.save(out)
    busy = found.settings["load"] > os.cpu_count()
    note = (
        f"Other work on the machine (load {found.settings['load']:g} on {os.cpu_count()} cores), changing between "
        "servers: the clock says nothing about K"
    )
    if busy:
        with atomic_write(out / "speed.png") as file:
            found.plot_speed(note).savefig(file, format="png", dpi=110)
    shown = ["k", "concurrency", "tokens_per_second", "first_token_ms", "between_tokens_ms", "request_ms", "speedup"]
    table = found.performance[found.performance.domain == "all"][shown].merge(
        found.summary[found.summary.domain == "all"][["k", "concurrency", "mean_length", "draft_acceptance"]],
        how="left",
    )
    with atomic_write(out / "README.md") as file:
        file.write_text(
            f"# The engine, {found.settings['date']}\n\nvLLM on {found.settings['machine']}; "
            f"{found.settings['prompts']} prompts, {found.settings['max_new_tokens']} tokens each, greedy, float32."
            f"{f' {note}; the counts do not depend on it.' if busy else ''} Command:\n\n    python "
            f"benchmarks/engine/run.py {arguments}\n\n"
            f"{table.round(2).to_markdown(index=False)}\n\n![speed](speed.png)\n\n![acceptance](acceptance.png)\n",
            encoding="utf-8",
        )
    print(table.round(2).to_string(index=False))


if __name__ == "__main__":
    main()
