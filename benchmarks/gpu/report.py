"""The folder of results of one card: results.json after every row, a page of tables.

Every row says which commit, card, torch and date it has. A run replaces the rows of the cells that it does and keeps
all others, so a page can hold rows of several commits; it never holds rows of two cards.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu.bundle import COMMIT, ROOT, name_of

PACKAGES = ("torch", "transformers", "triton", "numpy", "accelerate", "datasets", "pydantic", "speculators")
SIDES = ("upstream", "ours")
LOSS_TOLERANCE = 1e-2  # bf16 on both sides
STAMP = ("commit", "torch", "date")
UNITS = {" ms": 1e3, " GiB": 2**-30, " %": 100}

# heads of columns; what ends in one of UNITS is shown in it. A column that no row has is left out
HEADS = dict(
    length="positions",
    seconds="a step, ms",
    ratio="over as committed",
    launched_seconds="launched after, ms",
    host_seconds="device idle, ms",
    flex_seconds="flex, ms",
    product_seconds="products, ms",
    loss_seconds="loss, ms",
    optimizer_seconds="optimizer, ms",
    other_seconds="other, ms",
    peak_bytes="peak, GiB",
    beyond_bytes="beyond the model, GiB",
    first_seconds="first step, s",
    first_graphs="graphs",
    first_loss="first loss",
    changing_seconds="of changing batches, ms",
    tokens_per_second="tokens/s",
    speed="speed over upstream",
    changing_speed="speed on changing batches",
    memory="peak over upstream",
    mfu="MFU, %",
    compiled="graphs compiled",
    waits="waits a step",
    difference="first loss, rel. difference",
    loss="loss, rel. difference",
    angle="1 - cosine of gradients",
    gradient="gradients, largest rel. difference",
    seconds_first="first call, s",
    seconds_again="again, s",
    group="part",
    calls="calls a step",
    share="share of the step, %",
    kv_cache="KV cache",
    near_ties="parted at a near tie",
    accepted_a_step="accepted a step",
    back_end="back end",
    forward_seconds="forward, ms",
    both_seconds="forward and backward, ms",
    apart="largest difference from flex",
    draft_seconds="draft, ms",
    verification_seconds="verification, ms",
    rule_seconds="rule, ms",
    overhead="overhead, %",
    waits_a_step="waits a step",
)
PARTS = "flex_seconds product_seconds loss_seconds optimizer_seconds other_seconds host_seconds"
TABLES = {  # kind -> title, columns
    "ab": (
        "Single changes",
        f"setting length variant seconds ratio launched_seconds {PARTS} peak_bytes first_seconds first_graphs "
        "first_loss",
    ),
    "step": (
        "Train step",
        "setting length side seconds changing_seconds tokens_per_second speed changing_speed peak_bytes beyond_bytes "
        "memory mfu first_seconds compiled waits difference",
    ),
    "equal": ("Equality", "drafter dtype pair loss angle gradient seconds_first seconds_again"),
    "parts": (
        "Parts of a step",
        "setting flex_seconds product_seconds loss_seconds optimizer_seconds other_seconds host_seconds",
    ),
    "kernels": ("Heaviest kernels", "setting kernel group calls seconds share"),
    "decode": ("Decoding", "drafter dtype kv_cache texts near_ties different accepted_a_step"),
    "attention": ("Back ends of attention", "back_end length forward_seconds both_seconds apart"),
    "loop": (
        "Decode loop",
        "proposal temperature kv_cache seconds draft_seconds verification_seconds rule_seconds overhead waits_a_step "
        "text",
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


def slug(card):
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


class Report:
    """What is known of a card."""

    def __init__(self, folder, about, size, found=None):
        self.folder, self.about, self.size, found = folder, about, size, found or {}
        self.rows, self.runs, self.done = found.get("rows", {}), found.get("runs", []), set()
        self.rows.setdefault("device", [])

    @classmethod
    def at(cls, folder, about, size):
        """Go on with what a folder holds. Errors: it is of another card or of another size."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.json"
        found = json.loads(path.read_text()) if path.is_file() else dict(card=about["card"], size=size)
        if (found["card"], found["size"]) != (about["card"], size):
            raise SystemExit(
                f"{folder} has results of {found['card']} ({found['size']}), this is {about['card']} ({size}); name "
                "another folder by --out"
            )
        return cls(folder, about, size, found)

    def begin(self, names, not_run):
        """A run that is to do these cells; until they are done, they count as left out."""
        about = {key: self.about[key] for key in ("date", "commit", "versions")}
        self.names, self.began = names, time.monotonic()
        self.runs.append(about | dict(not_run=not_run))
        self.note(names)

    def note(self, left_out):
        seconds = round(time.monotonic() - self.began, 1)
        self.runs[-1].update(cells=len(self.done), seconds=seconds, left_out=left_out)
        self.save()

    def add(self, kind, row):
        """A row of this run."""
        row = row | {key: self.about[key] for key in ("commit", "card", "torch", "date")}
        self.put(kind, row)
        print(", ".join(f"{k} {number(v)}" for k, v in row.items()), flush=True)
        self.note([name for name in self.names if name not in self.done])

    def put(self, kind, row):
        """The first row of a cell replaces what was known of it. A train step has one row: later ones complete it."""
        rows, name = self.rows.setdefault(kind, []), row["cell"]
        if name not in self.done:
            rows[:] = [old for old in rows if old["cell"] != name]
        if name in self.done and kind == "step":
            known = next(old for old in rows if old["cell"] == name)
            known.update(dict(later_error=row["error"]) if "error" in row else row)
        else:
            rows.append(row)
        self.done.add(name)

    def merge(self, found):
        """Take over all rows and runs of another results.json of this card."""
        for kind, rows in found["rows"].items():
            for row in rows:
                self.put(kind, row)
        self.runs += [run for run in found["runs"] if run not in self.runs]
        self.save()

    def failed(self):
        """Number of rows of this run with an error or outside their tolerance. What does not fit into the memory is a
        result."""
        shown = [row for rows in tables(self).values() for row in rows if row.get("cell") in self.done]
        return sum(bool(verdict(row)) and row.get("kind") != "memory" for row in shown)

    def device(self):
        return next((row for row in self.rows["device"] if "error" not in row), {})

    def save(self):
        facts = dict(card=self.about["card"], size=self.size, runs=self.runs, rows=self.rows)
        write(self.folder / "results.json", json.dumps(facts, indent=1) + "\n")
        write(self.folder / "README.md", page(self))


# ---------------------------------------------------------------- tables
def page(report):
    about = report.device()
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
            lines += [f"## {TABLES[kind][0]}", "", rows_table(TABLES[kind][1].split(), rows)]
    lines += ["## Runs", ""]
    for run in report.runs:
        known = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
        lines += [f"- {run['date']}, commit {run['commit']}: {run['cells']} cells in {run['seconds']:.0f} s; {known}."]
        lines += [f"  Left out, no time: {', '.join(run['left_out'])}."] if run["left_out"] else []
        lines += [f"  {sentence}" for sentence in run["not_run"]]
    return "\n".join(lines) + "\n"


def tables(report):
    """{kind: rows as the page shows them}, in its order."""
    shown = {kind: report.rows.get(kind, []) for kind in TABLES}
    shown |= dict(ab=against_committed(shown["ab"]), step=with_ratios(report))
    shown["kernels"], shown["parts"] = of_kernels(shown["kernels"])
    return shown


def of_kernels(rows):
    """(ten heaviest of each cell and errors, a row of parts of each cell)."""
    heaviest, parts = {}, {}
    for row in rows:
        if "share_of" in row:
            parts.setdefault(row["cell"], dict(row))[f"{row['share_of']}_seconds"] = row["seconds"]
        else:
            heaviest.setdefault(row["cell"], []).append(row)
    return [row for found in heaviest.values() for row in found[:10]], list(parts.values())


def rows_table(columns, rows):
    columns = [key for key in columns if any(key in row for row in rows)]
    heads = [HEADS.get(key, key) for key in columns]

    def shown(row, key):
        value, head = row.get(key), HEADS.get(key, key)
        scale = next((scale for unit, scale in UNITS.items() if head.endswith(unit)), None)
        return number(value * scale if scale and isinstance(value, (int, float)) else value)

    return table([*heads, *STAMP, ""], [[*[shown(r, key) for key in [*columns, *STAMP]], verdict(r)] for r in rows])


def verdict(row):
    """What is wrong with a row, or nothing."""
    if "error" in row:
        return ("out of memory: " if row.get("kind") == "memory" else "") + row["error"]
    if row.get("differs"):
        return "**losses differ**"
    return "**not within tolerance**" if row.get("ok") is False else row.get("later_error", row.get("flops_error", ""))


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
    rows, peak = report.rows.get("step", []), report.device().get("peak_flops")
    order = list(dict.fromkeys((row["setting"], row["length"]) for row in rows))

    def of(row, side):
        same = ("setting", "length", "torch", "card")
        fits = [r for r in rows if "error" not in r and r["side"] == side and all(r[k] == row[k] for k in same)]
        return fits[-1] if fits else {}

    def more(row):
        """Keys that are added to a row that was measured."""
        yield "beyond_bytes", row["peak_bytes"] - row["held_bytes"]
        if "first_graphs" in row:
            yield "compiled", " + ".join(str(row.get(f"{part}_graphs", "–")) for part in ("first", "other", "last"))
        if peak and (flops := row.get("flops") or of(row, "ours").get("flops")):
            yield "mfu", flops / row["seconds"] / peak
        if other := of(row, "upstream"):
            yield "speed", other["seconds"] / row["seconds"]
            yield "memory", row["peak_bytes"] / other["peak_bytes"]
            if "changing_seconds" in row and "changing_seconds" in other:
                yield "changing_speed", other["changing_seconds"] / row["changing_seconds"]
            difference = abs(row["first_loss"] / other["first_loss"] - 1)
            yield "difference", difference
            yield "differs", not difference <= LOSS_TOLERANCE

    rows = sorted(rows, key=lambda r: (order.index((r["setting"], r["length"])), SIDES.index(r["side"])))
    return [row if "error" in row else row | dict(more(row)) for row in rows]
