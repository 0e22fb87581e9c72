"""The folder of results: results.json after every row, tables and pictures at the end of each stage."""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu.bundle import name_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "triton", "numpy", "accelerate", "datasets", "pydantic", "speculators")
SIDES = ("upstream", "ours", "ours-compiled")
LOSS_TOLERANCE = 1e-2  # bf16 on both sides
COLORS = dict(upstream="#999999", ours="#0072b2") | {"ours-compiled": "#56b4e9"}


def versions():
    """Of the packages that matter, Python and the commit."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name_of(name)] = version(name)
        except PackageNotFoundError:
            pass
    git = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True)
        if shutil.which("git")
        else None
    )
    return found | ({"commit": git.stdout.strip()} if git and git.returncode == 0 else {})


def write(path, text):
    """The whole file or none of it."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)


def number(x):
    """For a table: three digits, or a dash."""
    return (
        "–"
        if x is None
        else f"{x:.2e}"
        if x and not 1e-2 <= abs(x) < 1e4
        else f"{x:,.0f}"
        if abs(x) >= 100
        else f"{x:.3g}"
    )


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines) + "\n"


class Report:
    """What was found so far."""

    def __init__(self, folder, **facts):
        self.folder, self.facts = folder, facts | dict(versions=versions())
        self.rows = dict(device=[], equal=[], decode=[], notebooks=[], step=[], kernels=[], loop=[], attention=[])
        self.stages, self.not_measured = [], []

    def add(self, kind, row):
        self.rows[kind].append(row)
        print(", ".join(f"{k} {number(v) if isinstance(v, float) else v}" for k, v in row.items()), flush=True)
        self.save()

    def stage(self, name, seconds, limit, left):
        self.stages.append(dict(name=name, seconds=round(seconds, 1), limit=limit))
        self.not_measured += left
        self.save()
        self.finish()

    def move(self, folder):
        """Go on in another folder, whose old results are dropped."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "README.md", "equality.png", "speed.png", "shares.png", "log.txt"):
            (folder / name).unlink(missing_ok=True)
        shutil.copy(self.folder / "log.txt", folder / "log.txt")
        self.folder = folder
        self.save()

    def device(self):
        """Facts of the device, or None where it failed."""
        return next((row for row in self.rows["device"] if "error" not in row), None)

    def failed(self):
        """Number of rows with an error or outside their tolerance. What does not fit into the memory is a result."""
        rows = [row for rows in self.rows.values() for row in rows]
        groups = step_groups(self).values()
        return sum(("error" in r and r.get("kind") != "memory") or r.get("ok") is False for r in rows) + sum(
            apart(r, group) for group in groups for r in group
        )

    def save(self):
        facts = self.facts | dict(
            stages=self.stages, failed=self.failed(), not_measured=self.not_measured, rows=self.rows
        )
        write(self.folder / "results.json", json.dumps(facts, indent=1) + "\n")

    def finish(self):
        """Tables and pictures of all that is there."""
        write(self.folder / "README.md", page(self))
        pictures(self)


# ---------------------------------------------------------------- tables
def page(report):
    about, facts = report.device() or {}, report.facts
    known = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    lines = [
        f"# {about.get('device', 'No device')}, {facts['date']}" + (" (toy sizes)" if facts["size"] == "toy" else ""),
        "",
        f"{known}. " + "; ".join(f"{s['name']} {s['seconds']:.0f} s of {s['limit']:.0f}" for s in report.stages) + ".",
        "",
    ]
    if about:
        peak = f"{about['peak_flops'] / 1e12:,.3g} TFLOP/s " if about["peak_flops"] else ""
        lines += [
            f"Peak rate in bf16 {peak}({about['peak_from']}); "
            f"measured product {about['gemm_flops'] / 1e12:,.3g} TFLOP/s, copy {about['copy_bytes'] / 1e9:,.3g} GB/s.",
            "",
        ]
    lines += [
        f"{report.failed()} failed." if report.failed() else "Nothing failed.",
        "",
        "What each number means: [benchmarks/gpu/README.md](../../README.md).",
        "",
    ]
    for title, body in (
        ("Equality", equality_table(report)),
        ("Decoding", decoding_table(report)),
        ("Notebooks", notebook_table(report)),
        ("Train step", step_table(report)),
        ("Parts of a step", share_table(report)),
        ("Heaviest kernels", kernel_table(report)),
        ("Back ends of attention", attention_table(report)),
        ("Decode loop", loop_table(report)),
    ):
        if body:
            lines += [f"## {title}", "", body]
    lines += [
        "## Not measured",
        "",
        *[f"- {s}" for s in facts["not_run"]],
        *[f"- {name}: no time was left" for name in report.not_measured],
        "",
    ]
    return "\n".join(lines)


def verdict(row):
    return row["error"] if "error" in row else "yes" if row["ok"] else "**no**"


def equality_table(report):
    def line(r):
        found = [number(r.get(k)) for k in ("loss", "angle", "gradient", "seconds_first", "seconds")]
        return [r["drafter"], r["dtype"], r.get("pair", ""), *found, verdict(r)]

    rows = report.rows["equal"]
    return rows and table(
        [
            "drafter",
            "dtype",
            "pair",
            "loss, rel. difference",
            "1 - cosine of gradients",
            "gradients, largest rel. difference",
            "first call, s",
            "again, s",
            "within tolerance",
        ],
        [line(r) for r in rows],
    )


def decoding_table(report):
    rows = report.rows["decode"]
    return rows and table(
        [
            "drafter",
            "dtype",
            "KV cache",
            "texts",
            "parted at a near tie",
            "different",
            "accepted a step",
            "equal to the verifier alone",
        ],
        [
            [
                r["drafter"],
                r["dtype"],
                r.get("kv_cache", ""),
                *[number(r.get(k)) for k in ("texts", "near_ties", "different", "accepted_a_step")],
                verdict(r),
            ]
            for r in rows
        ],
    )


def notebook_table(report):
    rows = report.rows["notebooks"]
    return rows and table(
        ["notebook", "cells", "passed"], [[r["notebook"], r.get("cells", "–"), verdict(r)] for r in rows]
    )


def loss_difference(row, group):
    """Of the first loss from upstream's, relative; None where one is missing."""
    other = of(group, "upstream")
    return abs(row["first_loss"] / other["first_loss"] - 1) if other and "first_loss" in row else None


def apart(row, group):
    """Whether two sides did not compute the same loss."""
    found = loss_difference(row, group)
    return found is not None and not found <= LOSS_TOLERANCE


def of(rows, side):
    return next((r for r in rows if r["side"] == side and "error" not in r), {})


def step_groups(report):
    """{(setting, length): its rows}, in the order of the first of each."""
    groups = {}
    for row in report.rows["step"]:
        groups.setdefault((row["setting"], row["length"]), []).append(row)
    return groups


def step_line(report, row, group):
    """A row of the table. MFU is by the FLOPs of our step at the device's peak rate; ratios are to upstream."""
    label = [row["setting"], row["length"], row["side"]]
    if "error" in row:
        return [*label, *["–"] * 9, ("out of memory: " if row.get("kind") == "memory" else "") + row["error"]]
    flops, about, other = of(group, "ours").get("flops"), report.device(), of(group, "upstream")
    rate = flops / row["seconds"] if flops else None
    ratio = other["seconds"] / row["seconds"] if other else None
    memory = row["peak_bytes"] / other["peak_bytes"] if other else None
    return [
        *label,
        number(1e3 * row["seconds"]),
        number(row["tokens_per_second"]),
        number(ratio),
        number(row["peak_bytes"] / 2**30),
        number(memory),
        number(100 * rate / about["peak_flops"]) if rate and about["peak_flops"] else "–",
        number(row["first_seconds"]),
        number(row.get("waits")),
        number(loss_difference(row, group)),
        "**losses differ**" if apart(row, group) else row.get("flops_error", ""),
    ]


def step_table(report):
    groups = step_groups(report)
    lines = [
        step_line(report, row, group)
        for group in groups.values()
        for row in sorted(group, key=lambda r: SIDES.index(r["side"]))
    ]
    return lines and table(
        [
            "setting",
            "positions",
            "side",
            "ms a step",
            "tokens/s",
            "speed over upstream",
            "peak GiB",
            "memory over upstream",
            "MFU %",
            "first step, s",
            "waits a step",
            "first loss, rel. difference",
            "",
        ],
        lines,
    )


def kernel_table(report):
    """The ten heaviest of each setting."""
    rows = [r for r in report.rows["kernels"] if "kernel" in r]
    of_setting = {
        name: [r for r in rows if r["setting"] == name][:10] for name in dict.fromkeys(r["setting"] for r in rows)
    }
    return rows and table(
        ["setting", "kernel", "part", "calls a step", "ms a step", "share of the step, %"],
        [
            [
                name,
                r["kernel"],
                r["group"],
                number(r["calls"]),
                number(1e3 * r["seconds"]),
                number(100 * r["share"]),
            ]
            for name, heaviest in of_setting.items()
            for r in heaviest
        ],
    )


def share_table(report):
    """What each part of a step takes, in milliseconds."""
    rows = [r for r in report.rows["kernels"] if "share_of" in r]
    parts = list(dict.fromkeys(r["share_of"] for r in rows))
    of_setting = {}
    for r in rows:
        of_setting.setdefault(r["setting"], {})[r["share_of"]] = 1e3 * r["seconds"]
    return rows and table(
        ["setting", *parts, "ms a step"],
        [[name, *[number(of[p]) for p in parts], number(sum(of.values()))] for name, of in of_setting.items()],
    )


def attention_table(report):
    rows = report.rows["attention"]
    return rows and table(
        ["back end", "positions", "forward, ms", "forward and backward, ms", "largest difference from flex", ""],
        [
            [
                r.get("back_end", "all"),
                r["length"],
                *[
                    number(r[k] * x if k in r else None)
                    for k, x in (("forward_seconds", 1e3), ("seconds", 1e3), ("apart", 1))
                ],
                r.get("error", ""),
            ]
            for r in rows
        ],
    )


def loop_line(row):
    if "error" in row:
        return [row["proposal"], *["–"] * 8, row["error"]]
    parts = [number(1e3 * row[f"{name}seconds"]) for name in ("", "draft_", "verification_", "rule_")]
    found = [row["proposal"], number(row["temperature"]), row["kv_cache"], *parts]
    return [*found, number(100 * row["overhead"]), number(row["waits_a_step"]), row["text"]]


def loop_table(report):
    heads = (
        "proposal, temperature, KV cache, ms a step, draft ms, verification ms, rule ms, overhead %, waits a step, text"
    )
    lines = [loop_line(row) for row in report.rows["loop"]]
    return lines and table(heads.split(", "), lines)


# -------------------------------------------------------------- pictures
def pictures(report):
    import matplotlib

    matplotlib.use("Agg")
    if any("loss" in r for r in report.rows["equal"]):
        save(equality_picture(report), report.folder / "equality.png")
    if any("error" not in r for r in report.rows["step"]):
        save(speed_picture(report), report.folder / "speed.png")
    if any("share_of" in r for r in report.rows["kernels"]):
        save(shares_picture(report), report.folder / "shares.png")


def save(figure, path):
    from matplotlib import pyplot as plt

    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=110, metadata={"Software": None})
    os.replace(part, path)
    plt.close(figure)


def equality_picture(report):
    """Largest gradient difference of each pair, over the tolerance."""
    from matplotlib import pyplot as plt

    from benchmarks.gpu.equal import TOLERANCE

    rows = [r for r in report.rows["equal"] if "loss" in r]
    names, pairs = list(dict.fromkeys(r["drafter"] for r in rows)), list(dict.fromkeys(r["pair"] for r in rows))
    figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
    for i, pair in enumerate(pairs):
        for dtype, marker in (("fp32", "o"), ("bf16", "^")):
            mine = [r for r in rows if (r["pair"], r["dtype"]) == (pair, dtype)]
            ax.scatter(
                [names.index(r["drafter"]) + 0.08 * (i - len(pairs) / 2) for r in mine],
                [max(r["gradient"], 1e-9) for r in mine],
                marker=marker,
                color=f"C{i}",
                label=f"{pair}, {dtype}" if mine else None,
                s=24,
            )
    for dtype in TOLERANCE:
        ax.axhline(TOLERANCE[dtype]["gradient"], color="#999999", lw=1, ls="--")
        ax.annotate(
            f"tolerance in {dtype}",
            (len(names) - 0.5, TOLERANCE[dtype]["gradient"]),
            ha="right",
            va="bottom",
            color="#666666",
            fontsize=8,
        )
    ax.set(
        yscale="log", ylabel="largest relative difference of a gradient", xticks=range(len(names)), xticklabels=names
    )
    figure.legend(*ax.get_legend_handles_labels(), fontsize=7, ncols=1, loc="outside right upper")
    return figure


def speed_picture(report):
    """Tokens a second and peak memory of each setting and length."""
    from matplotlib import pyplot as plt

    groups = step_groups(report)
    sides = [s for s in SIDES if any(of(group, s) for group in groups.values())]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(groups) + 1.5), layout="constrained", sharey=True)
    for ax, key, scale, label in (
        (axes[0], "tokens_per_second", 1, "tokens/s"),
        (axes[1], "peak_bytes", 2**30, "peak memory, GiB"),
    ):
        for i, side in enumerate(sides):
            at = [g + 0.8 * ((i + 0.5) / len(sides) - 0.5) for g in range(len(groups))]
            ax.barh(
                at,
                [of(group, side).get(key, 0) / scale for group in groups.values()],
                0.8 / len(sides),
                color=COLORS[side],
                label=side,
            )
        ax.set(
            xlabel=label,
            yticks=range(len(groups)),
            yticklabels=[f"{setting}, {length:,}" for setting, length in groups],
        )
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(sides))
    return figure


def shares_picture(report):
    """What each part of a step takes."""
    from matplotlib import pyplot as plt

    rows = [r for r in report.rows["kernels"] if "share_of" in r]
    settings = list(dict.fromkeys(r["setting"] for r in rows))
    figure, ax = plt.subplots(figsize=(8, 0.5 * len(settings) + 1.8), layout="constrained")
    left = dict.fromkeys(settings, 0.0)
    for part in dict.fromkeys(r["share_of"] for r in rows):
        mine = {r["setting"]: 1e3 * r["seconds"] for r in rows if r["share_of"] == part}
        ax.barh(settings, [mine[s] for s in settings], left=[left[s] for s in settings], label=part)
        left = {s: left[s] + mine[s] for s in settings}
    ax.set(xlabel="ms a step", title="Where a step's time goes")
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure
