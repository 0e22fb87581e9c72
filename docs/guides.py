#!/usr/bin/env python
"""The tables of the guides, made from committed results and from docs/published.yml: `python docs/guides.py` writes
them into the pages, between `<!-- made: NAME -->` and `<!-- end -->`; tests/test_guides.py fails where one is stale.

Nothing is measured or computed here but sums of what a table holds, so that every number has one place."""

import csv
import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("which_drafter", "first_run", "how_much_data", "low_acceptance")
NAMES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "mlp": "MLP speculator",
    "mtp": "MTP",
    "n-gram": "n-gram",
    "peagle": "P-EAGLE",
    "xpress": "XPress",
}
MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", flags=re.S)


def results(folder, name):
    "Rows of a CSV below benchmarks/."
    with open(ROOT / f"benchmarks/{folder}/results/{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def published():
    "What docs/published.yml holds."
    return yaml.safe_load((ROOT / "docs/published.yml").read_text())


def table(head, rows):
    "Markdown."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def cite(entry):
    return f"*published*: [{entry['source']}]({entry['url']})"


def count(number):
    return f"{int(number):,}"


def length_of(drafter, temperature, domain="all"):
    "Measured tokens a step."
    return next(
        float(row["mean_length"])
        for row in results("drafters", "summary")
        if (row["drafter"], float(row["temperature"]), row["domain"]) == (drafter, temperature, domain)
    )


# ---- which drafter


def served(row):
    "How vLLM takes a drafter."
    return f"`{row['method']}`" if row["method"] else "no"


def by_length():
    "Measured rows, the longest first; n-gram last."
    rows = {row["drafter"]: row for row in results("drafters", "comparison")}
    trained = sorted(rows.keys() - {"hass", "n-gram"}, key=lambda name: -float(rows[name]["mean_length"]))
    return {name: rows[name] for name in [*trained, "n-gram"]}


def quality():
    rows = []
    for name, row in by_length().items():
        flops = f"{float(row['mflops_per_token']):.1f}" if row["mflops_per_token"] else "none"
        epochs = f"{float(row['epochs']):.1f}" if row["epochs"] else "–"
        greedy, cost, speed = (f"{float(row[field]):.2f}" for field in ("mean_length", "deep", "speedup_deep"))
        rows.append([NAMES[name], greedy, f"{length_of(name, 1.0):.2f}", cost, speed, flops, epochs])
    head = ["drafter", "tokens a step, greedy", "at temperature 1", "cost of four drafted", "speed-up"]
    return table([*head, "training, MFLOPs a token", "epochs"], rows)


def sizes():
    sized = {row["drafter"]: row for row in results("plan", "drafters")}
    rows = [
        [
            NAMES[name],
            sized[name]["layers"],
            count(sized[name]["trained_millions"]) + " M",
            f"{float(sized[name]['served_gb']):.1f} GB",
            f"{sized[name]['feature_kib']} KiB",
            served(sized[name]),
        ]
        for name in by_length()
        if name in sized
    ]
    rows.append(["n-gram", "none", "none", "none", "none", "`ngram`"])
    return table(["drafter", "layers", "trained weights", "in memory", "features a token", "vLLM 0.32"], rows)


def longer():
    epochs = float(by_length()["eagle3"]["epochs"])
    served = float(engine()[4]["mean_length"])
    return (
        f"EAGLE-3's row is of {epochs:.1f} epochs: it computes much for each token, and the budget ends early. The "
        f"shipped one, trained for three, takes {served:.2f} tokens a step in vLLM with four drafted, on prompts of "
        "the same corpus: more than any row here (*measured here*). So a row says what is learned first, not what is "
        "reached last."
    )


def copying():
    n, best = length_of("n-gram", 0.0, "copying"), length_of("dflash2", 0.0, "copying")
    free = length_of("n-gram", 0.0, "free")
    return (
        f"Where the answer repeats the prompt, n-gram takes {n:.2f} tokens a step and DFlash2 {best:.2f}; where the "
        f"verifier tells a story of its own, n-gram takes {free:.2f} (*measured here*, greedy, four drafted)."
    )


def published_drafters():
    rows = [[e["drafter"], e["number"], e["where"], cite(e)] for e in published()["drafters"]]
    return table(["drafter", "published", "on what", "source"], rows)


def one_gpu():
    rows = {row["verifier"]: row for row in results("plan", "verifiers")}
    return table(
        ["verifier", "its weights, bfloat16", "its KV cache a token", "KV cache of one draft layer"],
        [
            [name, f"{row['weights_gb']} GB", f"{row['cache_kib']} KiB", f"{row['draft_cache_kib']} KiB"]
            for name, row in rows.items()
        ],
    )


# ---- the first run


def interval():
    row = next(row for row in results("drafters", "comparison") if row["drafter"] == "dflash2")
    low, high = float(row["mean_length_low"]), float(row["mean_length_high"])
    return (
        f"- **Acceptance itself, at every epoch** (`speculators-nb evaluate`). 48 prompts of the comparison gave "
        f"{float(row['mean_length']):.2f} tokens a step with a 95 % interval from {low:.2f} to {high:.2f} (*measured "
        "here*): enough to see a fault or a turn, not enough to tell two good drafters apart."
    )


def stages():
    runs = results("plan", "runs")

    def line(title, value, how):
        return [title, *map(value, runs), how]

    rows = [
        line("tokens", lambda r: f"{float(r['tokens_millions']):,.1f} M", "*computed*, 1,024 a conversation"),
        line("features on disk, bfloat16", lambda r: f"{count(r['disk_bf16_gb'])} GB", "*computed*, 32 KiB a token"),
        line("features on disk, float8", lambda r: f"{count(r['disk_fp8_gb'])} GB", "*computed*, 16 KiB a token"),
        line("extraction, GPU-hours", lambda r: r["extraction_device_hours"], "*computed*, H100 at 43 %"),
        line("optimizer steps", lambda r: count(r["steps"]), "*computed*, 3 epochs, rows of 8,192, 2 GPUs"),
        line("training, GPU-hours", lambda r: r["training_device_hours"], "*computed*, H100 at 43 %"),
    ]
    return table(["", *(f"{count(r['conversations'])} conversations" for r in runs), "how we know"], rows)


def by_data():
    rows = [
        [
            count(e["conversations"]) if isinstance(e["conversations"], int) else e["conversations"],
            e["verifier"],
            e["drafter"],
            e["training"],
            e["reached"],
            cite(e),
        ]
        for e in published()["by_data"]
    ]
    return table(["conversations", "verifier", "drafter", "training", "tokens a step", "source"], rows)


def too_long():
    entry = published()["too_long"]
    rows = [[r["epoch"], f"{r['train_loss']:.2f}", f"{r['length']:.2f}"] for r in entry["rows"]]
    return table(["epoch", "training loss", "tokens a step, held out"], rows) + f"\n\n{cite(entry)}"


# ---- how much data


def amounts():
    return table(["who", "trained on", "source"], [[e["what"], e["amount"], cite(e)] for e in published()["amounts"]])


def data_size():
    "Ours: a row for each run, the length with its interval over prompts."
    rows = []
    for row in sorted(results("data_size", "data_size"), key=lambda row: (int(row["conversations"]), row["seed"])):
        losses = [f"{float(row[name]):.2f}" for name in ("train_loss", "held_out_loss", "first_position")]
        length, low, high = (float(row[f"mean_length{end}"]) for end in ("", "_low", "_high"))
        read = [count(row["conversations"]), row["seed"], count(row["tokens"]), f"{float(row['epochs']):.1f}"]
        rows.append([*read, *losses, f"{length:.2f} [{low:.2f}, {high:.2f}]"])
    head = ["conversations", "seed", "tokens", "epochs", "training loss", "held-out loss", "first position"]
    head.append("tokens a step")
    return table(head, rows)


def data_size_said():
    "The smallest and the largest set, of the first seed, which all sizes have."
    found = [row for row in results("data_size", "data_size") if row["seed"] == "0"]

    def of(size, name):
        values = [float(row[name]) for row in found if int(row["conversations"]) == size]
        return f"{sum(values) / len(values):.2f}"

    sizes = [int(row["conversations"]) for row in found]
    few, many = min(sizes), max(sizes)
    length, train, held = "mean_length", "train_loss", "held_out_loss"
    return (
        f"With {count(many)} conversations instead of {few} the same {found[0]['steps']} steps lead to "
        f"{of(many, length)} tokens a step instead of {of(few, length)}. On {few} the training loss ends at "
        f"{of(few, train)} and the held-out loss at {of(few, held)}; on {count(many)} they are {of(many, train)} and "
        f"{of(many, held)}."
    )


# ---- low acceptance


def one_checkpoint():
    rows = [[f"{e['length']:.2f}", e["measured"], cite(e)] for e in published()["one_checkpoint"]]
    return table(["tokens a step", "measured by", "source"], rows)


def by_drafted():
    entry = published()["by_drafted"]
    rows = [[r["drafted"], f"{r['length']:.2f}", f"{r['ms_a_token']:.2f}"] for r in entry["rows"]]
    return table(["drafted", "tokens a step", "ms a token"], rows) + f"\n\n{cite(entry)}"


def engine():
    rows = [row for row in results("engine", "summary") if row["domain"] == "all" and row["concurrency"] == "1"]
    return {int(row["k"]): row for row in rows}


def by_drafted_here():
    rows = [
        [
            k,
            f"{float(row['mean_length']):.2f}",
            f"{float(row['mean_length']) - 1:.2f}",
            f"{100 * float(row['draft_acceptance']):.0f} %",
        ]
        for k, row in engine().items()
    ]
    head = ["drafted", "tokens a step", "accepted tokens, without the verifier's", "share of drafted accepted"]
    return table(head, rows)


def one_drafter_many_numbers():
    "What the same drafter may be reported as."
    one, five = (float(engine()[k]["mean_length"]) for k in (1, 5))
    share = 100 * float(engine()[5]["draft_acceptance"])
    best, worst = length_of("eagle", 0.0, "code"), length_of("eagle", 1.0, "copying")
    return (
        f"The shipped EAGLE-3 in vLLM, greedily, takes {one:.2f} tokens a step with one drafted and {five:.2f} with "
        f"five. Of these {five - 1:.2f} were drafted, and {share:.0f} % of all drafted tokens were accepted. An EAGLE "
        f"of the comparison, four drafted, takes {best:.2f} on code, greedily, and {worst:.2f} on copying at "
        "temperature 1 (*measured here*)."
    )


def spoilt():
    "What the doctor names first in drafters with one fault each."
    found = json.loads((ROOT / "tests/doctor/results.json").read_text())
    rows = [
        [r["fault"].rstrip("."), r["planted"], r["first"] or "**nothing**", r["number"] or "–"]
        for r in found.values()
        if r["planted"]
    ]
    sound = [r for r in found.values() if not r["planted"]]
    named = sum(r["first"] == r["planted"] for r in found.values() if r["planted"])
    quiet = sum(r["first"] is None for r in sound)
    said = (
        f"Of {len(rows)} drafters with one planted fault each the doctor names the fault first in {named}; of "
        f"{len(sound)} sound ones it finds nothing in {quiet} (*measured here*; `make doctor`)."
    )
    return said + "\n\n" + table(["planted fault", "stage", "named first", "the number that shows it"], rows)


BLOCKS = {
    made.__name__: made
    for made in (
        quality,
        sizes,
        longer,
        copying,
        published_drafters,
        one_gpu,
        interval,
        stages,
        by_data,
        too_long,
        amounts,
        data_size,
        data_size_said,
        one_checkpoint,
        by_drafted,
        by_drafted_here,
        one_drafter_many_numbers,
        spoilt,
    )
}


def render(text):
    "A page with its blocks made anew."
    return MADE.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        file = ROOT / f"docs/{page}.md"
        file.write_text(render(file.read_text()))
