#!/usr/bin/env python
"""The tables of the guides, made from committed results and from docs/published.yml: `python docs/guides.py` writes
them into the pages, between `<!-- made: NAME -->` and `<!-- end -->`; tests/test_guides.py fails where one is stale.
Numbers in the prose of a page are in `quotes`: the same test looks for each on its page.

Nothing is measured here: numbers are sums, ratios and differences of what results hold, so that each has one place."""

import csv
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before an installed package

from speculators_nb.lab.paired import LENGTH, as_text, differences  # noqa: E402

PAGES = ("which_drafter", "first_run", "how_much_data", "low_acceptance", "llama_cpp", "measured")
NAMES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "domino": "Domino",
    "dspark": "DSpark",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "hass": "HASS",
    "lilicorr": "LiLiCorr",
    "medusa": "Medusa",
    "mlp": "MLP speculator",
    "mtp": "MTP",
    "n-gram": "n-gram",
    "peagle": "P-EAGLE",
    "query_only": "Query-only",
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
    "How vLLM 0.32 and 0.33 take a drafter."
    return [f"`{word}`" if word else "no" for word in (row["vllm_0.32"], row["vllm_0.33"])]


def by_length():
    "Measured rows, the longest first; n-gram last."
    rows = {row["drafter"]: row for row in results("drafters", "comparison")}
    trained = sorted(rows.keys() - {"n-gram"}, key=lambda name: -float(rows[name]["mean_length"]))
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


def real():
    rows = {name: {} for name in ("real", "toy")}
    for row in results("real", "comparison"):
        rows[row["verifier"]][row["drafter"]] = row

    def line(name, row):
        gap = "" if name == "eagle3" else "{minus_eagle3:+.2f} [{minus_low:+.2f}, {minus_high:+.2f}]"
        numbers = {field: float(row[field] or "nan") for field in row if field not in ("verifier", "drafter")}
        several = row["low"] and "{mean_length:.2f} [{low:.2f}, {high:.2f}]"
        length = (several or "{mean_length:.2f}").format(**numbers)
        return [NAMES[name], length, gap.format(**numbers), row["rank"], rows["toy"][name]["rank"]]

    head = ["drafter", "tokens a step, SmolLM2", "minus EAGLE-3", "rank", "rank with the tiny verifier"]
    return table(head, [line(name, row) for name, row in rows["real"].items()])


def alike():
    (row,) = results("real", "rank_correlation")
    tau, low, high = (float(row[name]) for name in ("tau", "low", "high"))
    pairs = int(row["drafters"]) * (int(row["drafters"]) - 1) // 2
    seeds = "one seed, so that the interval is over questions alone" if row["seeds"] == "1" else f"{row['seeds']} seeds"
    return (
        f"Equal training FLOPs, those that EAGLE-3 needs for {row['rows']} packed rows of 1,024 positions; {seeds}. "
        f"Of {pairs} pairs of drafters {round(pairs * (1 - tau) / 2)} change places: Kendall's tau of the two orders "
        f"is {tau:.2f} [{low:.2f}, {high:.2f}] "
        "(*measured here*, [results](../benchmarks/real/results/README.md))."
    )


class Finding(NamedTuple):
    "What is varied in training, with the tiny verifier and with SmolLM2; the settings are those of the results."

    change: str
    tiny: tuple[str, str, str]  # folder/file of the results, baseline, setting
    real: tuple[str, str]  # baseline, setting
    tutorial: str


DEPTH, DECAY, MASK = "training_choices/ttt_depth", "step_weight_decay/prompts", "wrong_mask/prompts"
LOSSES = "training_choices/losses"
FINDINGS = (
    Finding(
        "two steps of training-time test, not one",
        (DEPTH, "1 steps", "2 steps"),
        ("1 step", "2 steps"),
        "17_depth_of_training_time_test",
    ),
    Finding(
        "four steps, not two", (DEPTH, "2 steps", "4 steps"), ("2 steps", "usual"), "17_depth_of_training_time_test"
    ),
    Finding(
        "step k weighs 0.6^k, not 1",
        (DECAY, "eagle3, decay 1.0", "eagle3, decay 0.6"),
        ("decay 1.0", "usual"),
        "13_step_weight_decay",
    ),
    Finding(
        "step k weighs 1.2^k, not 1",
        (DECAY, "eagle3, decay 1.0", "eagle3, decay 1.2"),
        ("decay 1.0", "decay 1.2"),
        "13_step_weight_decay",
    ),
    Finding("cross-entropy, not KL divergence", (LOSSES, "kl_div", "ce"), ("usual", "ce"), "18_which_loss"),
    Finding(
        "half KL, half total variation",
        (LOSSES, "kl_div", "kl_div + tv"),
        ("usual", "kl_div + tv"),
        "18_which_loss",
    ),
    Finding("total variation alone", (LOSSES, "kl_div", "tv"), ("usual", "tv"), "18_which_loss"),
    Finding(
        "a mask that shows the future",
        (MASK, "right mask", "future visible"),
        ("usual", "future visible"),
        "14_under_the_wrong_mask",
    ),
    Finding(
        "a mask across documents",
        (MASK, "right mask", "across documents"),
        ("usual", "across documents"),
        "14_under_the_wrong_mask",
    ),
    Finding(
        "a mask without the drafter's own tokens",
        (MASK, "right mask", "no diagonal"),
        ("usual", "no diagonal"),
        "14_under_the_wrong_mask",
    ),
)


def gap(file, baseline, setting):
    "The difference in mean acceptance length of four draft tokens, greedily: a row of `differences`."
    folder, name = file.split("/")
    counts = pd.read_csv(ROOT / f"benchmarks/{folder}/results/{name}.csv.gz")
    counts = counts[counts.setting.isin([baseline, setting])]
    if "temperature" in counts:
        counts = counts[counts.temperature == 0]
    return differences(counts, baseline, 4).set_index("measure").loc[LENGTH]


def verdict(tiny, real):
    "What the two intervals say together."
    signs = [int(row.low > 0) - int(row.high < 0) for row in (tiny, real)]
    if signs[0] == signs[1]:
        return "same sign" if signs[0] else "no difference in either"
    if all(signs):
        return "opposite sign"
    return "not seen" if signs[0] else "with SmolLM2 alone"


def findings():
    rows = []
    for finding in FINDINGS:
        both = gap(*finding.tiny), gap("real/findings", *finding.real)
        shown = [as_text(row.difference, row.low, row.high, sign=True) for row in both]
        link = f"[tutorial {int(finding.tutorial[:2])}](../nbs/tutorials/{finding.tutorial}.ipynb#on-a-language-model)"
        rows.append([finding.change, *shown, verdict(*both), link])
    return table(["in training", "the tiny verifier", "SmolLM2", "does it hold?", "where"], rows)


def make_real(table="make_real"):
    "What `make real`, or a longer run of it, measured -> its row of the results."
    return {row["what"]: row for row in results("real", table)}


def interval_in(rows, what):
    return "{:.2f} [{:.2f}, {:.2f}]".format(*(float(rows[what][name]) for name in ("value", "low", "high")))


def real_longer():
    rows = make_real("longer")
    after = [what for what in rows if what.startswith("held-out loss after")]
    held_out = ", ".join(f"{float(rows[what]['value']):.2f}" for what in after)
    at = ", ".join(re.search(r"\d+", what)[0] for what in after)
    lengths = ", ".join(f"{float(rows[what.replace('held-out loss', 'tokens a step')]['value']):.2f}" for what in after)
    return (
        f"Three times as many epochs, six, and {float(rows['held-out questions']['value']):g} held-out questions: "
        f"**{interval_in(rows, 'tokens a step')}** tokens a step. The loss on held-out answers was {held_out} after "
        f"{at} steps, and that of training {float(rows['training loss at the end']['value']):.2f} at the end: the "
        f"answers are all but learned by heart. Tokens a step on eight questions were {lengths}. More answers were not "
        "tried."
    )


def real_demo():
    rows = make_real()

    def number(what):
        return f"{float(rows[what]['value']):g}"

    def interval(what):
        return interval_in(rows, what)

    def minutes_of(what):
        return round(float(rows[f"seconds {what}"]["value"]) / 60)

    def speed(dtype):
        return (
            f"{float(rows[f'tokens a second in {dtype}']['value']):.0f} in {dtype}, against "
            f"{float(rows[f'tokens a second in {dtype} without a drafter']['value']):.0f} without a drafter, "
            f"**{interval(f'speed-up in {dtype}')} times**"
        )

    after = [what for what in rows if what.startswith("tokens a step after")]
    curve = ", ".join(
        f"{float(rows[what]['value']):.2f}{what.removeprefix('tokens a step').replace(' steps', ' training steps')}"
        for what in after
    )
    asked = number("held-out questions")
    return (
        f"`make real`, once, on two cores: {minutes_of('from nothing')} minutes from nothing, of which features "
        f"took {minutes_of('of features')}, training with {len(after)} evaluations {minutes_of('of training')}, and "
        f"decoding {asked} questions {minutes_of('of decoding')}. The drafter is EAGLE-3, and drafts four tokens for "
        "SmolLM2, on whose own answers it was trained.\n\n"
        f"- Tokens a step on {asked} questions that were held out, greedily: **{interval('tokens a step')}**, n-gram "
        f"{interval('tokens a step of n-gram')}.\n"
        f"- Tokens a second: {speed('float32')}; {speed('bfloat16')}.\n"
        f"- In float32 {number('texts equal in float32')} of the {asked} texts are the verifier's own, token for "
        f"token; in bfloat16 {number('texts equal in bfloat16')}: there a forward pass over several tokens rounds "
        "otherwise than passes over one. So `make real` decodes in float32.\n"
        f"- While it trained, on eight questions, tokens a step: {curve}."
    )


def real_engine():
    rows = [row for row in results("real", "engine") if row["dtype"] == "float32"]
    plain, drafted = rows[0], rows[1:]
    best = max(drafted, key=lambda row: float(row["speedup"]))
    asked = len(drafted) * int(plain["requests"])
    texts, counts = (sum(int(float(row[name])) for row in drafted) for name in ("our_text", "our_counts"))
    steps = ", ".join(f"{float(row['tokens_per_step']):.2f}" for row in drafted)
    speedup = "{:.2f} [{:.2f}, {:.2f}]".format(*(float(best[f"speedup{end}"]) for end in ("", "_low", "_high")))
    return (
        f"A drafter of {plain['passes']} passes over the answers in vLLM on two cores, float32, greedily, one request "
        f"at a time, {plain['requests']} questions: {float(plain['tokens_per_second']):.0f} tokens a second without a "
        "drafter, and with "
        f"K={best['k']}, the best of {drafted[0]['k']} to {drafted[-1]['k']}, **{speedup} times** as many. Tokens a "
        f"step by K: {steps}. "
        f"Of {asked} requests {texts} have our decoder's text, and {counts} its counts at every position "
        "([page](../benchmarks/real/results/ENGINE.md))."
    )


def beside_upstream():
    "The rows of a page of results, in a sentence: setting -> what its column says."
    page = (ROOT / "benchmarks/real/results/UPSTREAM.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    length, more = ({row[0]: row[column] for row in rows if len(row) > column} for column in (3, 7))
    ours, equal_time = "ours, default command line", "ours, `make real`, equal time"
    return (
        "Upstream's trainer (`speculators` 0.9.0) beside ours, on the same features and for 48 training steps, three "
        f"seeds: {length['upstream, its defaults']} tokens a step with its defaults, **{length[ours]}** with ours, "
        f"which is {more[ours]} in accepted tokens; the settings of `make real` in the time that upstream takes: "
        f"{length[equal_time]}, {more[equal_time]}. With upstream's settings ours takes "
        "{} ([page](../benchmarks/real/results/UPSTREAM.md)).".format(length["ours, upstream's settings"])
    )


def sizes():
    sized = {row["drafter"]: row for row in results("plan", "drafters")}
    rows = [
        [
            NAMES[name],
            sized[name]["layers"],
            count(sized[name]["trained_millions"]) + " M",
            f"{float(sized[name]['served_gb']):.1f} GB",
            f"{sized[name]['feature_kib']} KiB",
            *served(sized[name]),
        ]
        for name in by_length()
        if name in sized
    ]
    rows.append(["n-gram", "none", "none", "none", "none", "`ngram`", "`ngram`"])
    return table(["drafter", "layers", "trained weights", "in memory", "features a token", "vLLM 0.32", "0.33"], rows)


def longer():
    rows = by_length()
    epochs, most = (float(rows[name]["epochs"]) for name in ("eagle3", "eagle"))
    served = float(engine()[4]["mean_length"])
    return (
        "**The order of the rows is no recommendation.** All had the same training FLOPs, so a drafter that computes "
        f"more for each token has seen fewer tokens: EAGLE-3 {epochs:.1f} epochs, EAGLE {most:.1f}. Longer training "
        f"changes the order: the shipped EAGLE-3, trained for three epochs, takes {served:.2f} tokens a step in vLLM "
        "with four drafted, on prompts of the same corpus, which is more than any row above (*measured here*)."
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
        "here*): enough to see a fault or a change of direction, not enough to tell two good drafters apart."
    )


def stages():
    runs = runs_of("Qwen3-8B")

    rate = f"H100 at {100 * float(runs[0]['mfu']):.0f} % of its peak rate"
    decoded = f"H100, {runs[0]['at_once']} answers at a time: a lower bound"

    def line(title, value, how):
        return [title, *map(value, runs), how]

    rows = [
        line("tokens", lambda r: f"{float(r['tokens_millions']):,.1f} M", "*computed*, 1,024 a conversation"),
        line("features on disk, bfloat16", lambda r: f"{count(r['disk_bf16_gb'])} GB", "*computed*, 32 KiB a token"),
        line("features on disk, float8", lambda r: f"{count(r['disk_fp8_gb'])} GB", "*computed*, 16 KiB a token"),
        line("answers, GPU-hours", lambda r: r["answers_device_hours"], f"*computed*, {decoded}"),
        line("extraction, GPU-hours", lambda r: r["extraction_device_hours"], f"*computed*, {rate}"),
        line("optimizer steps", lambda r: count(r["steps"]), "*computed*, 3 epochs, rows of 8,192, 2 GPUs"),
        line("training, GPU-hours", lambda r: r["training_device_hours"], f"*computed*, {rate}"),
    ]
    return table(["", *(f"{count(r['conversations'])} conversations" for r in runs), "how we know"], rows)


def runs_of(verifier):
    return [row for row in results("plan", "runs") if row["verifier"] == verifier]


def recipe_plan():
    "What `speculators-nb plan` prints for a recipe, in lines that fit."
    lines = (ROOT / "benchmarks/plan/results/qwen3-8b.txt").read_text().splitlines()
    broken = [textwrap.fill(line, 88, subsequent_indent=" " * 10, break_on_hyphens=False) for line in lines]
    return "\n".join(["```text", *broken, "```"])


def longer_than_planned():
    rows = results("plan", "published")
    each = [
        f"{row['low']} to {row['high']} times as long for {row['verifier']}"
        if row["low"] != row["high"]
        else f"{row['low']} times as long for {row['verifier']}"
        for row in rows
    ]
    return (
        "The planner gives lower bounds. Two published runs of 5,000 conversations (the first two rows of "
        f"[the table below](#what-others-reached)) took {' and '.join(each)} (*computed* from *published* times; the "
        "range is with features that are extracted once, and again in every epoch)."
    )


def reached(entry):
    "(tokens a step or None, accepted share of the first position or None) of a published run."
    length = re.match(r"(\d\.\d+) ", str(entry["reached"]))
    first = re.search(r"positions? (?:in training )?(\d\.\d+)|first position (\d\.\d+)", str(entry["reached"]))
    training = "accuracy" in str(entry["reached"])  # on training rows: no acceptance
    return length and length[1], None if training or not first else first[1] or first[2]


def span(values):
    low, high = min(values), max(values)
    return low if low == high else f"{low} to {high}"


def by_amount():
    """What published runs reached, by amount of data: whose answers -> tokens a step, first position. The MTP head is
    left out, which was trained before."""
    runs = [entry for entry in published()["by_data"] if "MTP" not in entry["drafter"]]

    def of(kind):
        found = [reached(entry) for entry in runs if kind(entry)]
        return [span([x[i] for x in found if x[i]]) for i in (0, 1)]

    def amount(entry):
        number = str(entry["conversations"]).replace(",", "")
        return int(number) if number.isdigit() else 0

    return {
        "others": of(lambda e: amount(e) == 5000 and "by the verifier" not in e["training"]),
        "own": of(lambda e: amount(e) == 5000 and "by the verifier" in e["training"]),
        "more": of(lambda e: 50_000 <= amount(e) <= 100_000),
        "released": of(lambda e: e["conversations"] == "released"),
    }


def expect():
    found = by_amount()
    return (
        f"So with **5,000** conversations whose answers another model wrote, {found['others'][0]} tokens a step is a "
        f"success, and {found['own'][0]} where the verifier wrote them. With **50,000 to 100,000** expect "
        f"{found['more'][0]}; the one published acceptance of the first position is {found['more'][1]}. Released "
        f"drafters have {found['released'][0]} of at most four, and {found['released'][1]} at the first position."
    )


def how_much():
    found = by_amount()
    return (
        "**To see that the pipeline works: 5,000 conversations** (the first draft token is accepted with probability "
        f"{found['others'][1]}, or {found['own'][1]} where the verifier wrote the answers). **For a drafter that "
        f"begins to pay off: 50,000 to 100,000** ({found['more'][0]} tokens a step). **For one like those that are "
        f"released** ({found['released'][0]}; first position {found['released'][1]})**: half a million and more.** "
        "These are *published* runs, of verifiers with 7 to 9 billion parameters "
        "([table](first_run.md#what-others-reached))."
    )


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
        f"With {count(many)} conversations instead of {few} the same {found[0]['steps']} training steps lead to "
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


# ---- what is measured


def page_numbers(file, pattern):
    "Numbers of a page of results that has no table of its own: the groups of a pattern that is on it once."
    found = re.findall(pattern, (ROOT / file).read_text(), flags=re.M)
    if len(found) != 1:
        raise ValueError(f"{file}: {pattern!r} is on it {len(found)} times")
    return found[0]


def listed(words):
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def proofs():
    "(combinations measured, of how many, how many differ, texts each, greedy prompts, of proposers, tokens of each)."
    page = "tests/proofs/results/README.md"
    some, every = page_numbers(page, r"(\d+) of (\d+) combinations are measured")
    different = page_numbers(page, r"^\*\*(\d+) fail\*\*")
    with open(ROOT / "tests/proofs/results/text.csv", newline="") as file:
        texts = list(csv.DictReader(file))
    if any(row["identical"] != row["prompts"] for row in texts):
        raise ValueError("tests/proofs/results/text.csv: texts differ, and the pages say that none does")
    (prompts,) = {row["prompts"] for row in texts}
    each = {int(row["tokens"]) // int(row["prompts"]) for row in texts}
    samples = page_numbers(page, r"^([\d,]+) texts of five tokens for each cell")
    proposers = len({row["proposer"] for row in texts})
    return some, every, "none" if different == "0" else different, samples, prompts, proposers, max(each)


def text_proved():
    some, every, different, samples, prompts, proposers, tokens = proofs()
    return (
        f"{samples} texts were sampled for each of {some} combinations of proposer, acceptance rule and temperature, "
        f"of {every} that there are, and compared with their exact distribution: {different} differs. Greedy texts: "
        f"{prompts} of {tokens} tokens by each of {proposers} proposers (chains and trees of a drafter are two), all "
        "equal to the verifier's token for token."
    )


ALGORITHMS = ("eagle3", "peagle", "mtp", "dflash", "dspark")


def train_steps(algorithm, side="ours"):
    found = json.loads((ROOT / "benchmarks/train_step/results/results.json").read_text())
    return [row for row in found["rows"] if (row["algorithm"], row["side"]) == (algorithm, side)]


def ends(values, digits=1, text="{}"):
    low, high = (text.format(f"{value:.{digits}f}") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def step_ratios(algorithm, side="ours"):
    "(speed, memory, time over its arithmetic) beside upstream, each as a span of the cases."
    rows = train_steps(algorithm, side)
    return (
        ends([row["speed_vs_upstream"] for row in rows]),
        ends([1 / row["allocated_vs_upstream"] for row in rows], 0, "1/{}"),
        ends([row["cpu_over_floor"] for row in rows]),
    )


def train_step_cpu():
    rows = []
    for name in ALGORITHMS:
        speed, memory, floor = step_ratios(name)
        again, less, _ = step_ratios(name, "ours-recomputed")
        rows.append([NAMES[name], speed, memory, floor, again, less])
    head = ["drafter", "times as fast", "of its memory", "times its arithmetic"]
    return table([*head, "with gradient checkpointing: times as fast", "of its memory"], rows)


def devices(folder=ROOT / "benchmarks/gpu/results"):
    "What `make gpu` measured: folder -> the rows of its card, by kind. Each row names its commit, torch and date."
    found = {file.parent: json.loads(file.read_text()) for file in sorted(folder.glob("*/results.json"))}
    return {place: run["rows"] for place, run in found.items() if run["size"] != "toy" and sound(run["rows"], "device")}


def sound(rows, kind):
    return [row for row in rows.get(kind, []) if "error" not in row]


def stamp(row):
    return row["date"], row["commit"], row["torch"]


def checked(rows, right):
    "How many of the rows are right."
    return f"{sum(map(right, rows))} of {len(rows)}" if rows else "–"


def step_pairs(rows):
    """Training steps of one card beside upstream's: [setting, positions, speed, memory, MFU, date, commit, torch]. Only
    steps with the same torch are compared."""
    steps, lines = sound(rows, "step"), []
    peak = sound(rows, "device")[0].get("peak_flops")
    for row in steps:
        if row["side"] == "upstream":
            continue
        alike = [
            r for r in steps if (r["setting"], r["length"], r["torch"]) == (row["setting"], row["length"], row["torch"])
        ]
        upstream = next((r for r in alike if r["side"] == "upstream"), None)
        speed = f"{upstream['seconds'] / row['seconds']:.2f}" if upstream else "not measured"
        memory = f"{row['peak_bytes'] / upstream['peak_bytes']:.2f}" if upstream else "not measured"
        mfu = f"{100 * row['flops'] / row['seconds'] / peak:.0f} %" if row.get("flops") and peak else "–"
        lines.append([row["setting"], count(row["length"]), speed, memory, mfu, *stamp(row)])
    return lines


def on_devices(folder=ROOT / "benchmarks/gpu/results"):
    "What was measured on accelerators, or that nothing was."
    found = devices(folder)
    if not found:
        return "Nothing here has been run on an accelerator yet (`make gpu` does)."
    cards = {place: rows["device"][0]["device"] for place, rows in found.items()}
    names = listed(list(cards.values()))
    lines = [
        f"`make gpu` has been run on {names}. Cards, commits and versions of torch differ: compare nothing across the "
        "sections."
    ]
    for place, rows in found.items():
        everything = [row for kind in rows.values() for row in kind]
        equal = checked(sound(rows, "equal"), lambda row: row["ok"])
        texts = checked(sound(rows, "decode"), lambda row: not row["different"])
        dates = listed(sorted({row["date"] for row in everything}))
        lines += [
            f"### {cards[place]}",
            f"Measured on {dates} ([all rows](../benchmarks/gpu/results/{place.name}/README.md)). Losses and gradients "
            f"within tolerance of the definition: {equal}. Sets of greedy texts equal to the verifier's: {texts}.",
        ]
        if steps := step_pairs(rows):
            head = [
                "training step",
                "positions",
                "times as fast as upstream's",
                "of its memory",
                "MFU",
                "date",
                "commit",
            ]
            lines.append(table([*head, "torch"], steps))
    return "\n\n".join(lines)


def decoding():
    number = r"\|\s*([\d.]+) "
    page = (ROOT / "benchmarks/decode/results/README.md").read_text()
    rows = re.findall(rf"^\| (?:plain|n-gram|draft model)\s*{number * 3}", page, re.M)
    ratio, around = ([float(row[i]) for row in rows] for i in (1, 2))
    share = ends([100 * x for x in around], 0)
    return (
        f"Plain decoding, prompt look-up and assisted decoding reach {ends(ratio, 2)} of the tokens a second of "
        f"`transformers`' `generate`. All that is done beside the forward passes takes {share} % of their time (CPU)."
    )


def engine_speed(drafted=5):
    "(tokens a step, times the tokens a second) of the shipped EAGLE-3 in vLLM, one request at a time."
    rows = {(r["k"], r["concurrency"], r["domain"]): r for r in results("engine", "performance")}
    row = rows[str(drafted), "1", "all"]
    return f"{float(engine()[drafted]['mean_length']):.1f}", f"{float(row['speedup']):.1f}"


def served_in_vllm():
    length, speed = engine_speed()
    return (
        f"The shipped EAGLE-3 in vLLM on a CPU, greedily, five tokens drafted: {length} tokens a step, and {speed} "
        "times the tokens a second of the same engine without a drafter."
    )


def waiting():
    walls = [float(row["wall_s"]) for row in results("prepare", "prepare")]
    (file,) = (ROOT / "benchmarks/features/results").glob("features-*.json")
    rows = [row for row in json.loads(file.read_text())["extraction"] if row["side"] != "bare"]
    share = min(row["of_bare_wall"] for row in rows)
    rows_each = {row["conversations"] for row in results("prepare", "prepare")}
    return (
        f"{count(rows_each.pop())} conversations are prepared in {ends(walls, 0)} seconds on two cores; feature "
        f"extraction runs at {100 * share:.0f} % or more of the speed of the verifier's forward pass alone (CPU)."
    )


def answering():
    found = json.loads((ROOT / "benchmarks/generation/results/results.json").read_text())
    rows = {row["side"]: row for row in found["generation"]}
    ours, step = rows["answer"], {side: row["step_ms"] for side, row in rows.items()}
    generate = min(ms for side, ms in step.items() if side.startswith("transformers"))
    return (
        f"SmolLM2 in process, {ours['rows']} prompts of {found['shortest']} to {found['longest']} tokens at once, CPU "
        f"time of one thread: `regenerate` writes {step['padded'] / step['answer']:.1f} times as many tokens a second "
        f"as with left padding, and {generate / step['answer']:.1f} times as many as `generate` of transformers with "
        f"the faster of its two caches; {ours['same_answers']} of {ours['rows']} answers are equal. In bfloat16, on a "
        f"CPU that computes in it, features are {found['features']['times']:.1f} times as fast as in float32. One "
        "round, on a busy machine."
    )


# ---- numbers in prose


def minutes(target, text):
    "A line on `make TARGET`, ended by how long docs/times.yml says that it takes on a bare machine with two cores."
    seconds = yaml.safe_load((ROOT / "docs/times.yml").read_text()).get(f"make {target}", {}).get("seconds")
    return f"make {target}    # {text}{f': {round(seconds / 60)} minutes' if seconds else ''}\n"


def quotes():
    "page -> phrases with numbers that have to be on it: {what it is from: phrase}."
    some, every, different, samples, prompts, proposers, _ = proofs()
    speed, memory, _ = step_ratios("eagle3")
    length, faster = engine_speed()
    (features,) = (ROOT / "benchmarks/features/results").glob("features-*.json")
    errors = json.loads(features.read_text())["fp8"]["relative_rms_error"]["float8_e4m3fn"].values()
    by = by_amount()
    lengths = {entry["measured"]: entry["length"] for entry in published()["one_checkpoint"]}
    tree, chain = (next(n for what, n in lengths.items() if who in what) for who in ("authors", "vLLM"))
    return {
        "README.md": {
            "proofs": f"{samples} sampled texts for each of {some} combinations of drafter, acceptance rule and "
            f"temperature (of {every}; the others with fewer texts): {different} differs measurably from its exact "
            f"distribution. {prompts} greedy texts by each of {proposers} proposers",
            "engine": f"{length} tokens a verification step, {faster} times the tokens a second",
            "demo": minutes("demo", "train a drafter, and measure it"),
            "real": minutes("real", "the same with SmolLM2"),
            "real_length": f"{float(make_real()['tokens a step']['value']):.1f} tokens a *verification step*",
            "test": minutes("test", "lint, types, notebooks, tests"),
            "train_step": f"a training step of EAGLE-3 is {speed} times as fast, in {memory} of the memory",
        },
        "docs/installation.md": {
            "demo": minutes("demo", "train a drafter, and measure it"),
            "real": minutes("real", "the same with SmolLM2"),
            "test": minutes("test", "lint, types, notebooks, tests; not slow cells, browser, vLLM"),
        },
        "docs/first_run.md": {"features": f"an error of {100 * max(errors):.1f} % of a state"},
        "docs/how_much_data.md": {
            "published": f"conversations of other models' answers give {by['others'][0]} tokens a step, the same "
            f"number answered by the verifier {by['own'][0]}",
        },
        "docs/low_acceptance.md": {
            "published": f"The same weights: {tree:.1f} in the paper, {chain:.1f} in vLLM",
        },
    }


def in_llama_cpp():
    found = json.loads((ROOT / "tests/llama_cpp/results.json").read_text())
    rows = {}
    for row in found["rows"]:
        rows.setdefault(row["drafter"], []).append(row)
    counts = [[f"{row['accepted']} / {row['accepted_here']}" for row in of] for of in rows.values()]
    texts = [f"{sum(row['same_texts'] for row in of)} of {len(of) * found['prompts']}" for of in rows.values()]
    files = [of[0]["converter"] for of in rows.values()]
    lengths = [f"accepted there / here, K={row['k']}" for row in found["rows"][: len(counts[0])]]
    head = ["drafter", "same text", *lengths, "llama.cpp's own converter makes"]
    return table(head, [[*row[:2], *row[2], row[3]] for row in zip(rows, texts, counts, files)])


BLOCKS = {
    made.__name__: made
    for made in (
        text_proved,
        train_step_cpu,
        on_devices,
        decoding,
        served_in_vllm,
        waiting,
        answering,
        recipe_plan,
        longer_than_planned,
        expect,
        how_much,
        quality,
        real,
        alike,
        findings,
        real_demo,
        real_longer,
        real_engine,
        beside_upstream,
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
        in_llama_cpp,
    )
}


def render(text):
    "A page with its blocks made anew."
    return MADE.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        file = ROOT / f"docs/{page}.md"
        file.write_text(render(file.read_text()))
