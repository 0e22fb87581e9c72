"""EAGLE-3 train step: ours beside the upstream library's, on the same weights and the same packed batch, in one run.

    python benchmarks/train_step/run.py                              every case; upstream gets an environment of its own, once
    python benchmarks/train_step/run.py --upstream-python PATH       an environment that holds upstream already
    python benchmarks/train_step/run.py --case 2048/8000 --rounds 2  a part of it
    python benchmarks/train_step/run.py --sides ours ours-bf16       without upstream

Method: each side is a process that waits for a line and makes one whole train step (forward, backward, clipping, AdamW). The sides take
turns, one step each, so that a busy machine slows them alike; the first step of each is not timed. Ratios are medians over rounds.
Memory is counted over what stays between steps (model, batch, gradients, AdamW state, code): as the peak of the resident set (Linux:
/proc/self), and as the most bytes that torch's allocator held at once, which does not depend on how the C library reuses pages.
The floor is the work that no implementation can avoid, divided by what this machine's thread reached in the same run.
Results go to benchmarks/train_step/results/ as Markdown and CSV.
"""
import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

import torch
from worker import AUX, HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, TRAINING

HERE = Path(__file__).resolve().parent
VENV = HERE.parent / ".venv-upstream"
WINDOW = 2048
DOCUMENTS = {2048: [704, 512, 384, 256, 192], 4096: [1024, 768, 640, 512, 448, 320, 256, 128]}
CASES = {f"{length}/{draft}": dict(vocab=32000, draft_vocab=draft, documents=docs)
         for length, docs in DOCUMENTS.items() for draft in (8000, 32000)}
UPSTREAM = ["speculators==0.9.0", "hs-connectors==0.9.0"]
UPSTREAM_DEPENDENCIES = ["accelerate", "aiohttp", "click", "datasets", "httpx", "loguru", "openai", "pydantic-settings", "psutil",
                         "protobuf", "rich", "typer"]                          # torchvision and torchaudio are never imported here


# ------------------------------------------------------------------------------------------------------------ environments
def upstream_python():
    """The interpreter of benchmarks/.venv-upstream, made on the first call, with our versions of torch and transformers."""
    import transformers
    python = VENV / "bin" / "python"
    if not (VENV / ".complete").exists():
        print(f"making the upstream environment in {VENV.relative_to(HERE.parents[1])}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}", f"transformers=={transformers.__version__}",
                        *UPSTREAM_DEPENDENCIES], check=True)
        subprocess.run([*pip, "--no-deps", *UPSTREAM], check=True)
        (VENV / ".complete").touch()
    return python


def environment():
    return os.environ | dict(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


class Side:
    """A worker process, asked for one train step at a time."""
    def __init__(self, name, python, folder, log):
        self.name = name
        self.process = subprocess.Popen([python, HERE / "worker.py", name, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=log, text=True, env=environment())
        self.hello = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.name} side ended with code {self.process.wait()}; its output is above")
        return json.loads(line)

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def worker(*args):
    out = subprocess.run([sys.executable, HERE / "worker.py", *map(str, args)], check=True, text=True, stdout=subprocess.PIPE,
                         env=environment()).stdout
    return json.loads(out) if out.strip() else None


# ------------------------------------------------------------------------------------------------------------------- floor
def needed(case):
    """FLOPs, exponentials, bytes and floats kept for backward that a step cannot do without, from the shapes and the mask alone."""
    steps, draft = TRAINING["ttt_steps"], case["draft_vocab"]
    mask = [[i >= n // 2 for i in range(n)] for n in case["documents"]]
    length, targets = sum(case["documents"]), sum(map(sum, mask))
    loss_rows = [sum(sum(m[k:]) for m in mask) for k in range(steps)]          # row i of step k is scored against target i + k
    live = [[[any(m[i + k:i + steps]) for i in range(len(m))] for m in mask] for k in range(steps)]   # someone reads the row's output
    live_rows = [sum(map(sum, rows)) for rows in live]
    pairs = sum(min(i + 1, WINDOW) + k for k in range(steps) for rows in live[k] for i, on in enumerate(rows) if on)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    kv_rows = length + sum(live_rows[1:])                                      # the first pass feeds everyone's keys and values
    layer = sum(live_rows) * (2 * HIDDEN * q + q * HIDDEN + 3 * HIDDEN * INTERMEDIATE) + kv_rows * 2 * HIDDEN * 2 * kv
    trained = AUX * HIDDEN * HIDDEN + 2 * HIDDEN * (q + 2 * kv) + q * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    saved = (sum(live_rows) * (2 * HIDDEN + q + HIDDEN + 3 * INTERMEDIATE + q) + kv_rows * 2 * kv + length * AUX * HIDDEN
             + sum(loss_rows) * HIDDEN)
    return dict(
        head=2 * HIDDEN * draft * (targets + 2 * sum(loss_rows)),              # targets once; logits and their gradient, no dW: frozen
        rest=3 * 2 * (length * AUX * HIDDEN * HIDDEN + layer) + 12 * pairs * q,
        exp=(targets + sum(loss_rows)) * draft,
        bytes=4 * (draft * HIDDEN + length * (AUX + 2) * HIDDEN + 2 * saved + 8 * trained),
        memory=4 * saved / 2**20)


def floor(case, rates, head):
    """(seconds, GEMM seconds, exponential seconds, memory-traffic seconds) of the needed work at this machine's rates."""
    n = needed(case)
    gemm, exp, traffic = n["head"] / rates[head] + n["rest"] / rates["gemm_fp32"], n["exp"] / rates["exp"], n["bytes"] / rates["copy"]
    return max(gemm + exp, traffic), gemm, exp, traffic


# --------------------------------------------------------------------------------------------------------------------- run
def measure(name, case, pythons, rounds, folder):
    """All sides of one case, step by step in turn; {side: its records}."""
    worker("prepare", json.dumps(case), folder)
    with tempfile.TemporaryFile("w+") as log:
        try:
            sides = [Side(s, p, folder, log) for s, p in pythons.items()]
            records = {s.name: dict(hello=s.hello, steps=[]) for s in sides}
            for i in range(rounds):
                for side in sides[::-1] if i % 2 else sides:
                    got = side.ask("step")
                    records[side.name]["steps"].append(got)
                    print(f"{name:>11} round {i + 1} {side.name:>9} {got['cpu']:7.2f} CPU s {got['wall']:7.2f} s +{got['peak']:5.0f} MiB  "
                          f"loss {got['loss']:.6f}", flush=True)
            for side in sides:
                records[side.name] |= side.ask("allocated")
        except SystemExit:
            log.seek(0)
            print(log.read()[-6000:], file=sys.stderr)
            raise
        for side in sides:
            side.close()
    return records


def summarize(name, case, records, rates):
    """One row per side: medians, ratios to the first side round by round, distance to the floor."""
    length, rows = sum(case["documents"]), []
    reference = records.get("upstream", next(iter(records.values())))
    for side, record in records.items():
        steps, pairs = record["steps"], list(zip(reference["steps"], record["steps"]))
        bound = floor(case, rates, "gemm_bf16" if side.endswith("bf16") else "gemm_fp32")
        cpu = median(s["cpu"] for s in steps)
        peak, other_peak = (max(s["peak"] for s in r["steps"]) for r in (record, reference))
        rows.append(dict(
            case=name, length=length, documents=len(case["documents"]), draft_vocab=case["draft_vocab"], side=side, rounds=len(steps),
            cpu_s=cpu, cpu_s_min=min(s["cpu"] for s in steps), wall_s=median(s["wall"] for s in steps), tokens_per_cpu_s=length / cpu,
            speed_vs_upstream=median(r["cpu"] / s["cpu"] for r, s in pairs),
            wall_speed_vs_upstream=median(r["wall"] / s["wall"] for r, s in pairs),
            peak_resident_mib=peak, resident_vs_upstream=peak / other_peak, peak_allocated_mib=record["allocated"],
            allocated_vs_upstream=record["allocated"] / reference["allocated"], first_loss=record["hello"]["loss"],
            first_loss_rel_diff=abs(record["hello"]["loss"] / reference["hello"]["loss"] - 1),
            first_grad_norm_rel_diff=abs(record["hello"]["grad_norm"] / reference["hello"]["grad_norm"] - 1),
            last_loss_rel_diff=abs(steps[-1]["loss"] / reference["steps"][-1]["loss"] - 1),
            floor_s=bound[0], floor_gemm_s=bound[1], floor_exp_s=bound[2], floor_traffic_s=bound[3], cpu_over_floor=cpu / bound[0],
            floor_saved_mib=needed(case)["memory"]))
    return rows


def report(rows, rates, versions):
    """The Markdown page, and the CPU's name as it goes into file names."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    cpu = cpu[1] if cpu else "unknown CPU"
    sides = "; ".join(f"{side}: " + ", ".join(f"{k} {v}" for k, v in got.items()) for side, got in versions.items())
    lines = [
        f"# EAGLE-3 train step, {date.today()}", "", f"{cpu}, one thread. {sides}.",
        f"Measured rates: fp32 GEMM {rates['gemm_fp32'] / 1e9:.0f} GFLOP/s, bf16 GEMM {rates['gemm_bf16'] / 1e9:.0f} GFLOP/s, "
        f"{rates['exp'] / 1e9:.2f} G exponentials/s, copy {rates['copy'] / 1e9:.0f} GB/s.", "",
        f"Hidden {HIDDEN}, {HEADS} heads / {KV_HEADS} KV heads of {HEAD_DIM}, intermediate {INTERMEDIATE}, {AUX} auxiliary layers, one "
        f"llama layer, verifier vocabulary 32000, {TRAINING['ttt_steps']} TTT steps, {TRAINING['loss_fn']}, float32; the last half of each "
        "document is in the loss mask. Upstream runs its sdpa attention and eager losses, the only ones that train on a CPU. A step is "
        "forward, backward, clipping and AdamW. `ours-bf16` makes the products with the head in bfloat16.", "",
        "| case | side | CPU s/step (min) | wall s/step | tokens/CPU s | speed | peak resident MiB | peak allocated MiB | floor s "
        "| step / floor |",
        "|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r['case']} | {r['side']} | {r['cpu_s']:.2f} ({r['cpu_s_min']:.2f}) | {r['wall_s']:.2f} | {r['tokens_per_cpu_s']:.0f} "
            f"| {r['speed_vs_upstream']:.1f}x | {r['peak_resident_mib']:.0f} (1/{1 / r['resident_vs_upstream']:.1f}) "
            f"| {r['peak_allocated_mib']:.0f} (1/{1 / r['allocated_vs_upstream']:.1f}) | {r['floor_s']:.2f} | {r['cpu_over_floor']:.2f} |")
    saved = ", ".join(f"{m:.0f} MiB at length {n}" for n, m in sorted({r["length"]: r["floor_saved_mib"] for r in rows}.items()))
    docs = ", ".join(f"{len(DOCUMENTS[n])} at {n}" for n in sorted({r["length"] for r in rows}))
    lines += [
        "", f"Cases are packed length / draft vocabulary (documents: {docs}). *Speed* is the median over rounds of upstream's CPU time "
        "over this side's in the same round. *Peaks* are over what stays between steps: model, batch, gradients, AdamW state. The *floor* "
        "is the GEMM and exponential work on the rows that the loss reads, at the rates above (for `ours-bf16` the head's at bf16's), "
        "or the unavoidable memory traffic where that takes longer. Inputs of the needed GEMMs, kept for backward: "
        f"{saved}; less only with recomputation.", "",
        "| case | side | floor: GEMM s | exponentials s | traffic s | first loss | rel. diff. | its gradient norm, rel. diff. "
        "| last loss, rel. diff. |", "|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r['case']} | {r['side']} | {r['floor_gemm_s']:.2f} | {r['floor_exp_s']:.2f} | {r['floor_traffic_s']:.3f} "
            f"| {r['first_loss']:.5f} | {r['first_loss_rel_diff']:.1e} | {r['first_grad_norm_rel_diff']:.1e} "
            f"| {r['last_loss_rel_diff']:.1e} |")
    return "\n".join(lines) + "\n", re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")


def write(folder, rows, rates, versions):
    """Both result files; returns the page."""
    text, cpu = report(rows, rates, versions)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{date.today()}-{cpu}"
    stem.with_suffix(".md").write_text(text)
    with stem.with_suffix(".csv").open("w", newline="") as f:
        table = csv.DictWriter(f, rows[0])
        table.writeheader()
        table.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", type=Path, help="interpreter of an environment with speculators 0.9.0")
    parser.add_argument("--sides", nargs="+", default=["upstream", "ours", "ours-bf16"], choices=["upstream", "ours", "ours-bf16"])
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES), help="packed length/draft vocabulary")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps per side")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    pythons = {s: (opt.upstream_python or upstream_python()) if s == "upstream" else sys.executable for s in opt.sides}
    rates, measured, versions = {}, {}, {}
    with tempfile.TemporaryDirectory() as tmp:
        for name in opt.case:
            rates = {k: max(v, rates.get(k, 0.0)) for k, v in worker("rates").items()}   # before each case: the machine is shared
            measured[name] = records = measure(name, CASES[name], pythons, opt.rounds, Path(tmp) / name.replace("/", "_"))
            versions |= {s: r["hello"]["versions"] for s, r in records.items() if s != "ours-bf16"}
            rows = [row for done, got in measured.items() for row in summarize(done, CASES[done], got, rates)]
            text = write(opt.out, rows, rates, versions)                     # after every case: a run that is cut short leaves what it has
    print("\n" + text)


if __name__ == "__main__":
    main()
