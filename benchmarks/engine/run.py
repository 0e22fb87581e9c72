"""The real engine: acceptance, throughput and latency in vLLM of the shipped EAGLE-3, of n-gram and of a DFlash, over
the number of drafted tokens and the load.

    python benchmarks/engine/run.py                       vLLM on this machine; on two idle cores half an hour, most of
    it starts of servers; 11 GB of memory; trains DFlash for one epoch
    python benchmarks/engine/run.py --ks 1 3 --prompts 6  less of it
    python benchmarks/engine/run.py --out output/engine   elsewhere than benchmarks/engine/results

vLLM is found as `server.find_executable` says (SPECULATORS_NB_VLLM, or .venv-vllm, which `make vllm-test` makes).
Without an accelerator it is the build for processors, one thread, float32. Prompts are the first turns of the held-out
corpus, domains in equal shares; greedy. Each K is a server of its own, and 0 is the server without drafting. Those of
one drafter take turns: all are started, those that do not measure are stopped (SIGSTOP), and in every round each
answers the same prompts, one server after the other. Of each request the median of the rounds counts, so that whatever
else the machine does meets all alike. Counts do not depend on the machine. A verifier this small (2 M parameters)
spends its time on everything but the model, so speed here says what the engine around it costs, not what a drafter
brings to a large verifier.
"""

import argparse
import os
import platform
import signal
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from speculators_nb.core.files import atomic_write
from speculators_nb.core.http_client import Endpoint
from speculators_nb.evaluate.engine import gather, tables_of
from speculators_nb.evaluate.load import run_load
from speculators_nb.evaluate.prompts import read_prompts
from speculators_nb.evaluate.vllm_metrics import PER_REQUEST
from speculators_nb.lab.experiment import shipped_drafter, train_on_shipped
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.serve.serve_command import accelerated, as_shell, serve_command, serve_environment
from speculators_nb.serve.server import Server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VERIFIER = ROOT / "data/tiny-verifier"
# a request needs 32 blocks of 16 tokens; more of them would only be memory
SIZES = ["--max-num-seqs", "8", "--num-gpu-blocks-override", "320"]


def make_drafters(folder):
    "Checkpoints, and further arguments of `serve_command`"
    train_on_shipped("dflash", folder / "dflash", k=5, eval_strategy="no")
    lookup = dict(method="ngram", speculative_config=dict(prompt_lookup_min=1, prompt_lookup_max=5))
    return {
        "eagle3": (shipped_drafter(folder / "eagle3"), {}),
        "n-gram": (VERIFIER, lookup),
        "dflash": (folder / "dflash", {}),
    }


def commands(checkpoint, fields, ks):
    "The command of each server, by K"
    common = dict(dtype="float32", max_model_len=512)
    drafting = {k: serve_command(checkpoint, k, extra=[*SIZES, *PER_REQUEST], **common, **fields) for k in ks}
    return {0: serve_command(VERIFIER, 0, extra=SIZES, **common)} | drafting


def send(server, number):
    "A signal to every process of a server; its guard, which ends the others if this program ends, goes on"
    os.killpg(server.process.pid, number)
    os.kill(server.process.pid, signal.SIGCONT)


def in_turns(servers, prompts, concurrency, opt):
    "What the requests took, by K and requests at once: a `Load` for each round"
    loads = defaultdict(list)
    for _ in range(opt.rounds):
        for k, server in servers.items():
            send(server, signal.SIGCONT)
            for at_once in concurrency:
                loads[k, at_once].append(run_load(Endpoint(server.url), prompts, at_once, opt.max_new_tokens))
            send(server, signal.SIGSTOP)
    return loads


def middle(loads):
    "The first round, with the median of all rounds as the time of each request, and of a domain where several are sent"

    def of(i, name):
        return median(getattr(load.replies[i], name) for load in loads)

    first = loads[0]
    replies = [replace(reply, seconds=of(i, "seconds"), first=of(i, "first")) for i, reply in enumerate(first.replies)]
    seconds = {domain: median(load.seconds[domain] for load in loads) for domain in first.seconds}
    if first.concurrency == 1:
        assert all([r.token_ids for r in load.replies] == [r.token_ids for r in replies] for load in loads)
        seconds = {domain: sum(r.seconds for r in replies if r.domain == domain) for domain in seconds}
    return replace(first, replies=replies, seconds=seconds)


def measured(name, to_start, prompts, env, concurrency, opt):
    "The tables of one drafter"
    servers = {k: Server(command, env) for k, command in to_start.items()}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for server in pool.map(stack.enter_context, servers.values()):
            stack.callback(send, server, signal.SIGCONT)  # one that is stopped does not end
            send(server, signal.SIGSTOP)
        print(f"{name}: {len(servers)} servers", flush=True)
        loads = {key: middle(own) for key, own in in_turns(servers, prompts, concurrency, opt).items()}
    names = {0: "no drafter"}
    tables = [tables_of(load, drafter=names.get(k, name), temperature=0.0) for (k, _), load in loads.items()]
    domains = [p.domain for p in prompts]
    return gather(
        tables,
        dict(
            max_new_tokens=opt.max_new_tokens,
            rounds=opt.rounds,
            commands=[as_shell(command, env) for command in to_start.values()],
            prompts=len(prompts),
            domains={domain: domains.count(domain) for domain in dict.fromkeys(domains)},
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            date=str(date.today()),
            load=round(os.getloadavg()[0], 1),
        ),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="K", help="tokens to draft")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4], help="requests at once, of EAGLE-3")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    env = serve_environment(1) | ({} if accelerated() else {"OMP_NUM_THREADS": "1"})
    prompts = read_prompts(read_corpus(ROOT / "data/corpus/heldout.jsonl")[: opt.prompts])
    with tempfile.TemporaryDirectory() as tmp:
        for name, (checkpoint, fields) in make_drafters(Path(tmp)).items():
            concurrency = opt.concurrency if name == "eagle3" else [1]
            found = measured(name, commands(checkpoint, fields, opt.ks), prompts, env, concurrency, opt)
            plain = [line.replace(f"{tmp}/{name}", "DRAFTER") for line in found.settings["commands"]]
            found.settings["commands"] = [line.replace(f"{ROOT}/", "") for line in plain]
            found.requests = found.requests[found.requests.concurrency == 1].drop(columns="text").reset_index(drop=True)
            write(found, name, opt.out if name == "eagle3" else opt.out / name)


def write(found, name, out):
    "Tables, pictures and a page"
    found.save(out)
    shown = ["k", "concurrency", "tokens_per_second", "first_token_ms", "between_tokens_ms", "request_ms", "speedup"]
    table = found.performance[found.performance.domain == "all"][shown].merge(
        found.summary[found.summary.domain == "all"][["k", "concurrency", "mean_length", "draft_acceptance"]],
        how="left",
    )
    with atomic_write(out / "README.md") as file:
        file.write_text(
            f"# The engine with {name}, {found.settings['date']}\n\nvLLM on {found.settings['machine']}; "
            f"{found.settings['prompts']} prompts, {found.settings['max_new_tokens']} tokens each, greedy, float32; "
            f"servers take turns, median of {found.settings['rounds']} rounds. Written by `python "
            f"benchmarks/engine/run.py`.\n\n{table.round(2).to_markdown(index=False)}\n\n![speed](speed.png)\n\n"
            "![acceptance](acceptance.png)\n",
            encoding="utf-8",
        )
    print(table.round(2).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
