"""The folder of results of one card: results.json after every row, a page of tables.

Every row says which commit, card, torch and date it has. A run replaces the rows of the cells that it does and keeps
all others, so a page can hold rows of several commits; it never holds rows of two cards.
"""

import json
import os
import platform
import shutil
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu.bundle import COMMIT, ROOT, name_of

PACKAGES = ("torch", "transformers", "triton", "numpy", "accelerate", "datasets", "pydantic", "speculators")
SIDES = ("upstream", "ours")
LOSS_TOLERANCE = 1e-2  # bf16 on both sides
STAMP = {"commit": "commit", "torch": "torch", "date": "date"}
UNITS = {" ms": 1e3, " GiB": 2**-30, " %": 100}

TABLES = {  # kind -> title, {key of a row: head of its column}; of a head that ends in one of UNITS, in that unit
    "ab": (
        "Single changes",
        dict(
            setting="setting",
            length="positions",
            variant="variant",
            seconds="a step, ms",
            ratio="over as committed",
            launch_seconds="launched after, ms",
            host_seconds="device idle, ms",
            flex_seconds="flex, ms",
            product_seconds="products, ms",
            loss_seconds="loss, ms",
            optimizer_seconds="optimizer, ms",
            other_seconds="other, ms",
            peak_bytes="peak, GiB",
            first_seconds="first step, s",
            first_graphs="graphs",
            first_loss="first loss",
        ),
    ),
    "step": (
        "Train step",
        dict(
            setting="setting",
            length="positions",
            side="side",
            seconds="a step, ms",
            changing_seconds="of changing batches, ms",
            tokens_per_second="tokens/s",
            ratio="speed over upstream",
            changing_ratio="of changing batches",
            peak_bytes="peak, GiB",
            beyond_bytes="beyond the model, GiB",
            memory="peak over upstream",
            mfu="MFU, %",
            first_seconds="first step, s",
            compiled="graphs compiled",
            waits="waits a step",
            difference="first loss, rel. difference",
        ),
    ),
    "equal": (
        "Equality",
        dict(
            drafter="drafter",
            dtype="dtype",
            pair="pair",
            loss="loss, rel. difference",
            angle="1 - cosine of gradients",
            gradient="gradients, largest rel. difference",
            seconds_first="first call, s",
            seconds="again, s",
        ),
    ),
    "parts": ("Parts of a step", dict(setting="setting")),
    "kernels": (
        "Heaviest kernels",
        dict(
            setting="setting",
            kernel="kernel",
            group="part",
            calls="calls a step",
            seconds="a step, ms",
            share="share of the step, %",
        ),
    ),
    "decode": (
        "Decoding",
        dict(
            drafter="drafter",
            dtype="dtype",
            kv_cache="KV cache",
            texts="texts",
            near_ties="parted at a near tie",
            different="different",
            accepted_a_step="accepted a step",
        ),
    ),
    "attention": (
        "Back ends of attention",
        dict(
            back_end="back end",
            length="positions",
            forward_seconds="forward, ms",
            seconds="forward and backward, ms",
            apart="largest difference from flex",
        ),
    ),
    "loop": (
        "Decode loop",
        dict(
            proposal="proposal",
            temperature="temperature",
            kv_cache="KV cache",
            seconds="a step, ms",
            draft_seconds="draft, ms",
            verification_seconds="verification, ms",
            rule_seconds="rule, ms",
            overhead="overhead, %",
            waits_a_step="waits a step",
            text="text",
        ),
    ),
}


def commit_of(root):
    """The commit that is measured, "+" behind it where the code differs from it; None where nothing says so."""
    if (root / COMMIT).is_file():
        return (root / COMMIT).read_text().strip()

    def git(*words):
        done = subprocess.run(["git", *words], cwd=root, text=True, capture_output=True)
        return done.stdout.strip() if done.returncode == 0 else None

    if not shutil.which("git") or not (commit := git("rev-parse", "--short=8", "HEAD")):
        return None
    return commit + ("+" if git("status", "--porcelain", "--", "speculators_nb", "benchmarks") else "")


def stamp(card=None):
    """What every row of a run says of it, and the versions of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name_of(name)] = version(name)
        except PackageNotFoundError:
            pass
    return dict(commit=commit_of(ROOT), card=card, torch=found.get("torch"), date=str(date.today()), versions=found)


def write(path, text):
    """The whole file or none of it."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)


def number(x):
    """For a table: three digits, or a dash."""
    if x is None:
        return "–"
    if not isinstance(x, (int, float)):
        return str(x)
    if isinstance(x, int) or abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.2e}" if x and abs(x) < 1e-2 else f"{x:.3g}"


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines) + "\n"


class Report:
    """What is known of a card."""

    def __init__(self, folder, about, size, found=None):
        self.folder, self.about, self.size, self.found = folder, about, size, found or {}
        self.rows, self.done = self.found.get("rows", {}), set()
        self.rows.setdefault("device", [])

    @classmethod
    def at(cls, folder, about, size):
        """Go on with what a folder holds. Errors: it is of another card or of another size."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").unlink(missing_ok=True)
        path = folder / "results.json"
        found = json.loads(path.read_text()) if path.is_file() else dict(card=about["card"], size=size)
        if (found["card"], found["size"]) != (about["card"], size):
            raise SystemExit(
                f"{folder} has results of {found['card']} ({found['size']}), this is {about['card']} ({size}); name "
                "another folder by --out"
            )
        return cls(folder, about, size, found)

    def add(self, kind, row):
        """A row; the first of a cell replaces what was known of it."""
        row = row | {key: self.about[key] for key in ("commit", "card", "torch", "date")}
        rows, name = self.rows.setdefault(kind, []), row["cell"]
        if name not in self.done:
            rows[:] = [old for old in rows if old["cell"] != name]
        self.done.add(name)
        rows.append(row)
        print(", ".join(f"{k} {number(v)}" for k, v in row.items()), flush=True)
        self.save()

    def finish(self, seconds, left_out, not_run):
        """Note what this run did. left_out: names of cells."""
        about = {key: self.about[key] for key in ("date", "commit", "versions")}
        told = dict(seconds=round(seconds, 1), cells=len(self.done), left_out=left_out, not_run=not_run)
        self.found["runs"] = [*self.found.get("runs", []), about | told]
        self.save()

    def failed(self):
        """Number of rows of this run with an error or outside their tolerance. What does not fit into the memory is a
        result."""
        rows = [row for rows in self.rows.values() for row in rows if row["cell"] in self.done]
        different = [row for row in with_ratios(self) if row["cell"] in self.done and row["apart"]]
        return len(different) + sum(
            ("error" in row and row.get("kind") != "memory") or row.get("ok") is False for row in rows
        )

    def save(self):
        facts = dict(card=self.about["card"], size=self.size, runs=self.found.get("runs", []), rows=self.rows)
        write(self.folder / "results.json", json.dumps(facts, indent=1) + "\n")
        write(self.folder / "README.md", page(self))


# ---------------------------------------------------------------- tables
def page(report):
    about = next((row for row in report.rows["device"] if "error" not in row), {})
    lines = [f"# {report.about['card']}" + (" (toy sizes)" if report.size == "toy" else ""), ""]
    if about:
        peak = f"{about['peak_flops'] / 1e12:,.3g} TFLOP/s " if about["peak_flops"] else ""
        lines += [
            f"Peak rate in bf16 {peak}({about['peak_from']}); "
            f"measured product {about['gemm_flops'] / 1e12:,.3g} TFLOP/s, copy {about['copy_bytes'] / 1e9:,.3g} GB/s "
            f"({about['date']}). All rows are of this card; each names its commit, torch and date.",
            "",
        ]
    lines += ["What each number means: [benchmarks/gpu/README.md](../../README.md).", ""]
    for kind, rows in tables(report).items():
        if rows:
            lines += [f"## {TABLES[kind][0]}", "", rows_table(TABLES[kind][1], rows)]
    lines += ["## Runs", ""]
    for run in report.found.get("runs", []):
        known = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        lines += [f"- {run['date']}, commit {run['commit']}: {run['cells']} cells in {run['seconds']:.0f} s; {known}."]
        lines += [f"  Left out, no time: {', '.join(run['left_out'])}."] if run["left_out"] else []
        lines += [f"  {sentence}" for sentence in run["not_run"]]
    return "\n".join(lines) + "\n"


def tables(report):
    """{kind: rows as the page shows them}, in its order."""
    rows, kernels = report.rows, report.rows.get("kernels", [])
    heaviest, parts = {}, {}
    for row in kernels:
        if "kernel" in row or "error" in row:
            heaviest.setdefault(row["cell"], []).append(row)
        else:
            of = parts.setdefault(row["cell"], {key: row[key] for key in ("setting", *STAMP)})
            of[f"{row['share_of']}, ms"] = of.get(row["share_of"], 0.0) + row["seconds"]
    shown = dict(
        ab=against_committed(rows.get("ab", [])),
        step=with_ratios(report),
        parts=list(parts.values()),
        kernels=[row for found in heaviest.values() for row in found[:10]],
    )
    return {kind: shown.get(kind, rows.get(kind, [])) for kind in TABLES}


def rows_table(heads, rows):
    """A table of rows. heads: {key: head}; a key of a row that is its own head (with a unit) has a column too."""
    own = {key: key for row in rows for key in row if any(key.endswith(f",{unit}") for unit in UNITS)}
    columns = {**{key: head for key, head in heads.items() if any(key in row for row in rows)}, **own}

    def shown(row, key, head):
        value = row.get(key)
        scale = next((scale for unit, scale in UNITS.items() if head.endswith(unit)), None)
        return number(value * scale if scale and isinstance(value, (int, float)) else value)

    return table(
        [*columns.values(), *STAMP.values(), ""],
        [[*[shown(row, k, h) for k, h in (columns | STAMP).items()], verdict(row)] for row in rows],
    )


def verdict(row):
    if "error" in row:
        return ("out of memory: " if row.get("kind") == "memory" else "") + row["error"]
    if row.get("apart"):
        return "**losses differ**"
    return "**not within tolerance**" if row.get("ok") is False else row.get("flops_error", "")


def against_committed(rows):
    """With the ratio of each variant's time to that of the code as committed, in the same run."""
    timed = [row for row in rows if "seconds" in row]
    base = {row["cell"]: row["seconds"] for row in timed if row["variant"] == "as committed"}
    return [
        row | (dict(ratio=row["seconds"] / base[row["cell"]]) if "seconds" in row and row["cell"] in base else {})
        for row in rows
    ]


def with_ratios(report):
    """Rows of train steps with what is computed from two of them: speed and memory over upstream's (same card, same
    torch), difference of the first losses; and MFU, by the FLOPs of our step at the device's peak rate."""
    rows = report.rows.get("step", [])
    about = next((row for row in report.rows["device"] if "error" not in row), {})
    order = list(dict.fromkeys((row["setting"], row["length"]) for row in rows))

    def of(row, side):
        same = ("setting", "length", "torch", "card")
        fits = [r for r in rows if "error" not in r and r["side"] == side and all(r[k] == row[k] for k in same)]
        return fits[-1] if fits else {}

    found = []
    for row in sorted(rows, key=lambda r: (order.index((r["setting"], r["length"])), SIDES.index(r["side"]))):
        row, other = row | dict(apart=False), of(row, "upstream")
        if "error" not in row:
            row["beyond_bytes"] = row["peak_bytes"] - row["held_bytes"]
            if "first_graphs" in row:
                row["compiled"] = f"{row['first_graphs']} + {row['other_graphs']} + {row['last_graphs']}"
            flops = row.get("flops") or of(row, "ours").get("flops")
            if flops and about.get("peak_flops"):
                row["mfu"] = flops / row["seconds"] / about["peak_flops"]
        if "error" not in row and other:
            row["ratio"], row["memory"] = other["seconds"] / row["seconds"], row["peak_bytes"] / other["peak_bytes"]
            if "changing_seconds" in row and "changing_seconds" in other:
                row["changing_ratio"] = other["changing_seconds"] / row["changing_seconds"]
            row["difference"] = abs(row["first_loss"] / other["first_loss"] - 1)
            row["apart"] = not row["difference"] <= LOSS_TOLERANCE
        found.append(row)
    return found
