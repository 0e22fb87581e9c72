"""Train steps: ours beside the upstream library's, on the same weights, packed batch and random choices, in one run.

    python benchmarks/train_step/run.py                               every case; upstream gets an environment of its
    own, once
    python benchmarks/train_step/run.py --algorithm peagle mtp        the cases of some algorithms
    python benchmarks/train_step/run.py --case eagle3/2048/8000 --rounds 2     one case
    python benchmarks/train_step/run.py --upstream-python PATH        an environment that holds upstream already
    python benchmarks/train_step/run.py --sides ours ours-bf16        without upstream

Method: each side is a process that waits for a line and makes one whole train step (forward, backward, clipping,
AdamW, the last two as that side's trainer makes them). The sides take turns, one step each, so that a busy machine
slows them alike; the first step of each is not timed. Ratios are medians over rounds. Memory is counted over what
stays between steps (model, batch, gradients, AdamW state, code): as the peak of the resident set (Linux: /proc/self),
and as the most bytes that torch's allocator held at once, which does not depend on how the C library reuses pages.
The floor is the work that no implementation can avoid, divided by what this machine's thread reached in the same run
on products of the same kind: with the head, of that many rows and in that dtype, and within a layer.
Results go to benchmarks/train_step/results/, a page and results.json; cases that are not run keep theirs.
"""

import argparse
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
from safetensors.torch import load_file
from worker import (
    ALGORITHMS,
    AUX,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    VOCAB,
    WINDOW,
    configuration,
    prepare,
    training_of,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from upstream import upstream_python  # noqa: E402

SIDES = ("upstream", "ours", "ours-bf16", "ours-recomputed")
DOCUMENTS = {2048: [704, 512, 384, 256, 192], 4096: [1024, 768, 640, 512, 448, 320, 256, 128]}


def case(algorithm, length, draft_vocab, anchors=None, prompt=0.25):
    """(name, case): length / draft vocabulary / anchors x block; `prompt` is the share of each document outside the
    loss mask."""
    of = dict(algorithm=algorithm, draft_vocab=draft_vocab, documents=DOCUMENTS[length], prompt=prompt)
    block = ALGORITHMS[algorithm]["config"].get("block_size")
    name = f"{algorithm}/{length}/{draft_vocab}" + (f"/{anchors}x{block}" if anchors else "")
    return name, of | ({"anchors": anchors} if anchors else {})


CASES = dict(
    [
        *(case("eagle3", length, draft, prompt=0.5) for length in DOCUMENTS for draft in (8000, VOCAB)),
        case("peagle", 2048, 8000),
        case("peagle", 2048, VOCAB),
        case("mtp", 2048, VOCAB),
        case("dflash", 2048, VOCAB, 128),
        case("dflash", 2048, VOCAB, 512),
        case("dspark", 2048, VOCAB, 128),
        case("dspark", 2048, VOCAB, 512),
    ]
)


# --------------------------------------------------------------------------------------------------------- environments
def environment():
    return os.environ | dict(
        OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )


class Side:
    """A worker process, asked for one train step at a time."""

    def __init__(self, name, python, folder, log):
        self.name = name
        self.process = subprocess.Popen(
            [python, HERE / "worker.py", name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(),
        )
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
    """Whatever worker.py prints for these arguments."""
    out = subprocess.run(
        [sys.executable, HERE / "worker.py", *map(str, args)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env=environment(),
    ).stdout
    return json.loads(out) if out.strip() else None


# ---------------------------------------------------------------------------------------------------------------- floor
# Per algorithm: the rows that the loss reads, from the shapes, the mask and the random choices alone. Each gives `loss`
# rows (scored against a law or a token), `targets` (verifier rows whose law is needed), `out` rows (a layer's output is
# read), `kv` rows (its keys and values are), `pairs` (query, key) that attend, all summed over layers; `own` rows are
# computed before the layers, `fuse` weights multiply them.
def eagle3_rows(case, batch):
    steps = ALGORITHMS["eagle3"]["training"]["ttt_steps"]
    mask = [m.tolist() for m in batch["loss_mask"][0].split(case["documents"])]
    loss = [sum(sum(m[k:]) for m in mask) for k in range(steps)]  # row i of step k is scored against target i + k
    # someone reads the row's output
    live = [[[any(m[i + k : i + steps]) for i in range(len(m))] for m in mask] for k in range(steps)]
    rows = [sum(map(sum, r)) for r in live]
    pairs = sum(min(i + 1, WINDOW) + k for k in range(steps) for r in live[k] for i, on in enumerate(r) if on)
    length = sum(case["documents"])  # the first pass feeds everyone's keys and values
    return dict(
        loss=sum(loss),
        targets=sum(map(sum, mask)),
        out=sum(rows),
        kv=length + sum(rows[1:]),
        pairs=pairs,
        own=length,
        fuse=AUX * HIDDEN * HIDDEN,
        wide=2,
    )


def peagle_rows(case, batch):
    anchor, depth, docs = batch["cod_anchor_pos"], batch["cod_depth"], batch["document_ids"][0]
    start = torch.tensor([0, *case["documents"]]).cumsum(0)
    loss = batch["loss_mask"][0][anchor + depth]
    chain = torch.zeros(len(batch["loss_mask"][0]), int(depth.max()) + 1, dtype=torch.int64)
    chain[anchor, depth] = 1  # a row attends to the shallower rows of its own rollout
    before = chain.cumsum(1)[anchor, depth]
    pairs = (anchor - start[docs[anchor]] + before)[loss].sum()  # the anchor's prefix, and the rollout beyond depth 0
    return dict(
        loss=int(loss.sum()),
        targets=len((anchor + depth)[loss].unique()),
        out=int(loss.sum()),
        kv=len(anchor),
        pairs=int(pairs),
        own=len(docs) + 1,
        fuse=AUX * HIDDEN * HIDDEN,
        wide=2,
        trained=VOCAB * HIDDEN,
    )


def dflash_rows(case, batch):
    config = configuration(case)
    block = config["block_size"]
    layers = config["transformer_layer_config"]["num_hidden_layers"]
    sampled = config["sample_from_anchor"]
    anchor = batch["anchor_positions"][batch["anchor_valid"]]
    start = torch.tensor([0, *case["documents"]]).cumsum(0)
    own = anchor - start[batch["document_ids"][0][anchor]]
    slots = anchor[:, None] + torch.arange(0 if sampled else 1, block)
    loss = batch["loss_mask"][0][slots]
    rows, length = len(anchor) * block, sum(case["documents"])
    causal = block * (block + 1) // 2  # sliding layers are causal within the block
    pairs = layers * int((own * block + causal).sum())
    return dict(
        loss=int(loss.sum()),
        targets=len(slots[loss].unique()),
        out=layers * rows,
        kv=layers * (length + rows),
        pairs=pairs,
        own=length,
        fuse=AUX * HIDDEN * HIDDEN,
        wide=1,
        bias=config.get("markov_rank", 0),
    )


def mtp_rows(case, batch):
    steps = ALGORITHMS["mtp"]["training"]["num_speculative_steps"]
    mask, length = batch["loss_mask"][0], sum(case["documents"])
    loss = sum(int(mask[s + 2 : length - steps + 1 + s].sum()) for s in range(steps))
    rows = sum(n - s - 2 for n in case["documents"] for s in range(steps))  # each step's rows are the next one's keys
    pairs = sum((n - s - 2) * (n - s - 1) // 2 for n in case["documents"] for s in range(steps))
    return dict(loss=loss, targets=0, out=rows, kv=rows, pairs=pairs, own=rows, fuse=2 * HIDDEN * HIDDEN, wide=1)


ROWS = dict(eagle3=eagle3_rows, peagle=peagle_rows, dflash=dflash_rows, dspark=dflash_rows, mtp=mtp_rows)


def needed(case, folder):
    """FLOPs, exponentials, bytes and floats kept for backward that a step cannot do without."""
    n, draft = ROWS[case["algorithm"]](case, load_file(folder / "batch.safetensors")), case["draft_vocab"]
    layers = configuration(case)["transformer_layer_config"]["num_hidden_layers"] if case["algorithm"] != "mtp" else 1
    q, kv, wide, bias = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, n["wide"] * HIDDEN, n.get("bias", 0)
    layer = n["out"] * (wide * q + q * HIDDEN + 3 * HIDDEN * INTERMEDIATE) + n["kv"] * wide * 2 * kv
    trained = (
        n["fuse"]
        + layers * (wide * (q + 2 * kv) + q * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
        + n.get("trained", 0)
        + bias * (VOCAB + draft)
    )
    saved = (
        n["out"] * (wide + q + HIDDEN + 3 * INTERMEDIATE + q)
        + n["kv"] * 2 * kv
        + n["own"] * n["fuse"] // HIDDEN
        + n["loss"] * HIDDEN
    )
    return dict(
        targets=2 * draft * HIDDEN * n["targets"],  # the verifier's logits, in float32 on every side
        head=2 * draft * (2 * HIDDEN + 3 * bias) * n["loss"],  # logits and their gradient; no dW but the bias's
        rest=3 * 2 * (n["own"] * n["fuse"] + layer) + 12 * n["pairs"] * q,
        exp=(n["targets"] + n["loss"]) * draft,
        bytes=4 * (draft * HIDDEN + n["own"] * (AUX + 2) * HIDDEN + 2 * saved + 8 * trained),
        memory=4 * saved / 2**20,
    )


def floor(n, rates, head):
    """(seconds, GEMM seconds, exponential seconds, memory-traffic seconds) of the needed work at this machine's
    rates; `head` names those of the products with the head, in float32 and in the side's dtype."""
    gemm = n["targets"] / rates[head[0]] + n["head"] / rates[head[1]] + n["rest"] / rates["layer_fp32"]
    exp = n["exp"] / rates["exp"]
    traffic = n["bytes"] / rates["copy"]
    return max(gemm + exp, traffic), gemm, exp, traffic


# ------------------------------------------------------------------------------------------------------------------ run
def measure(name, case, pythons, rounds, folder):
    """All sides of one case, step by step in turn; {side: its records}."""
    prepare(case, folder)
    with tempfile.TemporaryFile("w+") as log:
        try:
            sides = [Side(s, p, folder, log) for s, p in pythons.items()]
            records = {s.name: dict(hello=s.hello, steps=[]) for s in sides}
            for i in range(rounds):
                for side in sides[::-1] if i % 2 else sides:
                    got = side.ask("step")
                    records[side.name]["steps"].append(got)
                    print(
                        f"{name:>22} round {i + 1} {side.name:>15} {got['cpu']:7.2f} CPU s {got['wall']:7.2f} s "
                        f"+{got['peak']:5.0f} MiB  loss {got['loss']:.6f}",
                        flush=True,
                    )
            for side in sides:
                records[side.name] |= side.ask("allocated")
        except SystemExit:
            log.seek(0)
            print(log.read()[-6000:], file=sys.stderr)
            raise
        for side in sides:
            side.close()
    return records


def summarize(name, case, records, rates, work):
    """One row per side: medians, ratios to upstream's round by round, distance to the floor."""
    length, rows = sum(case["documents"]), []
    reference = records.get("upstream", next(iter(records.values())))
    for side, record in records.items():
        steps, pairs = record["steps"], list(zip(reference["steps"], record["steps"]))
        head = [f"head_{dtype}_{case['draft_vocab']}" for dtype in ("fp32", "bf16" if "bf16" in side else "fp32")]
        bound = floor(work, rates, head)
        cpu = median(s["cpu"] for s in steps)
        peak, other_peak = (max(s["peak"] for s in r["steps"]) for r in (record, reference))
        rows.append(
            dict(
                algorithm=case["algorithm"],
                case=name,
                length=length,
                documents=len(case["documents"]),
                draft_vocab=case["draft_vocab"],
                anchors=case.get("anchors"),
                outside_loss_mask=case["prompt"],
                side=side,
                rounds=len(steps),
                cpu_s=cpu,
                cpu_s_min=min(s["cpu"] for s in steps),
                wall_s=median(s["wall"] for s in steps),
                tokens_per_cpu_s=length / cpu,
                speed_vs_upstream=median(r["cpu"] / s["cpu"] for r, s in pairs),
                wall_speed_vs_upstream=median(r["wall"] / s["wall"] for r, s in pairs),
                peak_resident_mib=peak,
                resident_vs_upstream=peak / other_peak,
                peak_allocated_mib=record["allocated"],
                allocated_vs_upstream=record["allocated"] / reference["allocated"],
                first_loss=record["hello"]["loss"],
                first_loss_rel_diff=abs(record["hello"]["loss"] / reference["hello"]["loss"] - 1),
                first_grad_norm_rel_diff=abs(record["hello"]["grad_norm"] / reference["hello"]["grad_norm"] - 1),
                last_loss_rel_diff=abs(steps[-1]["loss"] / reference["steps"][-1]["loss"] - 1),
                floor_s=bound[0],
                floor_gemm_s=bound[1],
                floor_exp_s=bound[2],
                floor_traffic_s=bound[3],
                cpu_over_floor=cpu / bound[0],
                floor_saved_mib=work["memory"],
            )
        )
    return rows


def method(facts):
    """What was measured, and how: the page's first paragraphs."""
    rates = facts["rates"]
    sides = "; ".join(
        f"{side}: " + ", ".join(f"{k} {v}" for k, v in got.items()) for side, got in facts["versions"].items()
    )
    products = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items() if "_" in name)
    training = "\n".join(f"- {name}: `{json.dumps(of)}`" for name, of in facts["training"].items())
    return f"""# A train step beside upstream's, {facts["date"]}

{facts["cpu"]}, one thread. {sides}.
Rates: {products}, {rates["exp"] / 1e9:.2f} G exponentials/s, copy {rates["copy"] / 1e9:.0f} GB/s.

Hidden {HIDDEN}, {HEADS} heads / {KV_HEADS} KV heads of {HEAD_DIM}, intermediate {INTERMEDIATE}, verifier vocabulary
{VOCAB}, float32; cases are algorithm / packed length / draft vocabulary / anchors x block. Both libraries get the same
weights, batch and random choices, and these training arguments:

{training}

Upstream runs its sdpa attention and eager losses, the only ones that train on a CPU. A step is forward, backward,
clipping and AdamW, the last two as each side's trainer makes them (ours: fused, embeddings by rows). `ours-bf16` makes
the drafter's products with the head in bfloat16, the verifier's stay float32; `ours-recomputed` computes the layers
again on the way back (gradient checkpointing).

- *Speed*: median over rounds of upstream's CPU time over this side's in the same round.
- *Memory*: peak over what stays between steps (model, batch, gradients, AdamW state), by torch's allocator and by the
  resident set.
- *Floor*: the products and exponentials of the rows that the loss reads, at the rates above for products of that kind,
  or the unavoidable memory traffic where that takes longer. A run measures the rates anew; cases that it leaves out
  keep the floor of their own run.
"""


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def summary(rows):
    """A line a case: speed, memory and distance to the floor of every side of ours."""
    cases = {}
    for r in rows:
        cases.setdefault(r["case"], {})[r["side"]] = r
    ours = [side for side in SIDES if side != "upstream"]
    head = ["case", "upstream s", *(f"{side}: s, speed, memory, step / floor" for side in ours)]
    lines = []
    for name, sides in cases.items():
        cells = [f"{sides['upstream']['cpu_s']:.2f}" if "upstream" in sides else ""]
        for side in ours:
            r = sides.get(side)
            cells.append(
                f"{r['cpu_s']:.2f}, {r['speed_vs_upstream']:.1f}x, 1/{1 / r['allocated_vs_upstream']:.1f}, "
                f"{r['cpu_over_floor']:.2f}"
                if r
                else ""
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return table(head, lines)


def details(rows):
    """Two tables with a line for each case and side: time and memory, floor and equality."""
    times, equal = [], []
    for r in rows:
        who = f"| {r['case']} | {r['side']} "
        times.append(
            f"{who}| {r['cpu_s']:.2f} ({r['cpu_s_min']:.2f}) | {r['wall_s']:.2f} | {r['tokens_per_cpu_s']:.0f} | "
            f"{r['speed_vs_upstream']:.1f}x | {r['peak_resident_mib']:.0f} (1/{1 / r['resident_vs_upstream']:.1f}) | "
            f"{r['peak_allocated_mib']:.0f} (1/{1 / r['allocated_vs_upstream']:.1f}) |"
        )
        equal.append(
            f"{who}| {r['floor_s']:.2f} | {r['floor_gemm_s']:.2f} | {r['floor_exp_s']:.2f} | "
            f"{r['floor_traffic_s']:.3f} | {r['cpu_over_floor']:.2f} | {r['first_loss']:.5f} | "
            f"{r['first_loss_rel_diff']:.1e} | {r['first_grad_norm_rel_diff']:.1e} | {r['last_loss_rel_diff']:.1e} |"
        )
    first = "case | side | CPU s/step (min) | wall s/step | tokens/CPU s | speed | resident MiB | allocated MiB"
    second = "case | side | floor s | products s | exponentials s | traffic s | step / floor | first loss | "
    second += "rel. diff. | its gradient norm, rel. diff. | last loss, rel. diff."
    return table(first.split(" | "), times) + "\n\n" + table(second.split(" | "), equal)


def page(facts):
    """The results as Markdown."""
    saved = {r["case"]: r["floor_saved_mib"] for r in facts["rows"]}
    kept = ", ".join(f"{m:.0f} MiB in {name}" for name, m in saved.items())
    parts = [method(facts), "## Summary\n", summary(facts["rows"]), "\n## Times, memory, equality\n"]
    parts += [details(facts["rows"]), f"\nInputs of the needed products, kept for backward: {kept}; less only with"]
    return "\n".join(parts) + " recomputation.\n"


def write(folder, rows, rates, versions):
    """results.json and its page; cases and rates that were not measured now keep what is there."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    file, measured = folder / "results.json", {r["case"] for r in rows}
    old = json.loads(file.read_text()) if file.is_file() else dict(rows=[], rates={})
    kept = [r for r in old["rows"] if r["case"] not in measured]
    rows = sorted([*rows, *kept], key=lambda r: list(CASES).index(r["case"]))
    algorithms = dict.fromkeys(r["algorithm"] for r in rows)
    facts = dict(
        date=str(date.today()),
        cpu=cpu[1] if cpu else "unknown CPU",
        rates=old["rates"] | rates,
        versions=versions,
        training={name: training_of(dict(algorithm=name)) for name in algorithms},
        rows=rows,
    )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "README.md").write_text(page(facts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", type=Path, help="interpreter of an environment with speculators 0.9.0")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--algorithm", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--case", nargs="+", choices=list(CASES), help="instead of --algorithm")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps per side")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    names = opt.case or [name for name, of in CASES.items() if of["algorithm"] in opt.algorithm]
    pythons = {s: (opt.upstream_python or upstream_python()) if s == "upstream" else sys.executable for s in opt.sides}
    rates, measured, versions = {}, {}, {}
    with tempfile.TemporaryDirectory() as tmp:
        for name in names:
            # before each case: the machine is shared
            folder, of = Path(tmp) / name.replace("/", "_"), CASES[name]
            rates |= {k: max(v, rates.get(k, 0.0)) for k, v in worker("rates", of["draft_vocab"]).items()}
            records = measure(name, of, pythons, opt.rounds, folder)
            measured[name] = (of, records, needed(of, folder))
            versions |= {s: r["hello"]["versions"] for s, r in records.items() if s in ("upstream", "ours")}
            rows = [row for done, (of, got, work) in measured.items() for row in summarize(done, of, got, rates, work)]
            write(opt.out, rows, rates, versions)  # after every case: a run that is cut short leaves what it has
    print(summary(rows))


if __name__ == "__main__":
    main()
