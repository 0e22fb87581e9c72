"""All runs of an experiment's folder on one HTML page.
It has a table to sort, acceptance curves to lay over each other, and the best run beside the worst in the step
debugger. One file, no library, no network."""

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import cast

import pandas as pd

from ..core.provenance import read_provenance
from ..data.chat_template import open_tokenizer
from ..decode.generate import Generation, generate
from ..models.base import SpeculatorModel
from ..report.page import Section, page_html, write_page
from ..widgets.debugger import Debugger, debug
from ..widgets.widget import embed
from .experiment import heldout_setting
from .grid import Experiment, Measured, read_experiment, read_run
from .paired import KEYS, LENGTH, measures, results_table
from .shipped import shipped_data


def debugger_line(*folders: str, prompt: int | None = None) -> str:
    "What opens the runs of these folders in the debugger, in a notebook that imports `debug_runs`."
    given = [json.dumps(folder, ensure_ascii=False) for folder in folders]
    given += [] if prompt is None else [f"prompt={prompt}"]
    return f"debug_runs({', '.join(given)})"


def runs_table(found: Experiment) -> pd.DataFrame:
    """Every run with what it was trained with and its mean acceptance lengths: setting, seed, arguments, "K = 4", …,
    drafter, debugger."""
    table = found.runs.drop(columns="folder").set_index(["setting", "seed"])
    for k in sorted(found.counts.k.unique()):
        table[f"K = {k}"] = measures(found.counts, k)[LENGTH].round(3)
    folders = found.runs.set_index(["setting", "seed"]).folder
    table = table.assign(drafter=folders + "/drafter", debugger=folders.map(debugger_line))
    return table.reset_index()


def curves(found: Experiment) -> list[dict]:
    """Acceptance rates by position of every run at the longest draft length, in the order of `runs`: name, setting,
    rates."""
    rates = measures(found.counts, int(found.counts.k.max())).drop(columns=LENGTH).round(4)
    return [
        dict(name=f"{setting}, seed {seed}", setting=setting, rates=rates.loc[setting, seed].tolist())
        for setting, seed in zip(found.runs.setting, found.runs.seed)
    ]


def decoded_runs(folders: Sequence[str | os.PathLike], prompt: int) -> tuple[Debugger, str]:
    "As `debug_runs`, and the text of the prompt."
    if not folders:
        raise ValueError("folders=(): is empty; name the folder of a run")
    runs = {folder: read_run(Path(folder)) for folder in folders}
    record = read_provenance(folders[0])  # what the runs were measured on
    given = record.get("arguments", {})
    heldout, measured = given.get("heldout"), Measured(**given.get("measured", {}))
    own = record["inputs"]["verifier"]["path"] if heldout else None  # None: the shipped one, where it is now
    verifier = own or shipped_data() / "tiny-verifier"
    drafters, lengths = {}, {}
    for folder, (row, counts) in runs.items():
        name = f"{row['setting']}, seed {row['seed']}"
        name = f"{name} ({Path(folder).name})" if name in drafters else name
        drafters[name] = SpeculatorModel.from_pretrained(Path(folder) / "drafter", verifier=verifier).drafter()
        lengths[name] = int(counts.k.max())
    setting = heldout_setting(drafters, measured.n_prompts if heldout else None, verifier=own, heldout=heldout)
    if not 0 <= prompt < len(setting.prompts):
        raise ValueError(f"prompt={prompt}: is not held out; give one of 0 to {len(setting.prompts) - 1}")
    answers = {}
    for name, drafter in drafters.items():
        answer = generate(
            setting.verifier,
            drafter,
            setting.prompts[prompt],
            max_new_tokens=measured.max_new_tokens,
            k=lengths[name],
            eos_token_ids=setting.eos_token_ids,
            record=5,
        )
        answers[name] = cast(Generation, answer)
    tokenizer = open_tokenizer(verifier)
    return debug(answers, tokenizer), tokenizer.decode(setting.prompts[prompt], skip_special_tokens=True)


def debug_runs(*folders: str | os.PathLike, prompt: int = 0) -> Debugger:
    """Step through what the drafters of finished runs of an experiment write to one held-out prompt, as numbered in
    `counts`, greedily. Errors: FileNotFoundError for a folder without a finished run, ValueError for a prompt that is
    none, and for a drafter of a class that is not imported."""
    return decoded_runs(folders, prompt)[0]


def best_and_worst(found: Experiment) -> tuple[list[tuple[str, int]], int]:
    """The runs (setting, seed) with the longest and the shortest acceptance, which may be one, and the prompt on which
    they are furthest apart."""
    k = int(found.counts.k.max())
    ascending = measures(found.counts, k)[LENGTH].sort_values(kind="stable").index.tolist()
    best, worst = ascending[-1], ascending[0]
    counts = found.counts[found.counts.k == k].set_index([*KEYS, "prompt"])
    steps = counts.steps.sort_index()
    saved = cast(pd.Series, steps[worst] - steps[best])
    return list(dict.fromkeys([best, worst])), int(cast(int, saved.idxmax()))


def debugger_section(found: Experiment) -> Section:
    "The best and the worst run in the debugger, on one held-out prompt; says why, where they cannot be loaded."
    runs, prompt = best_and_worst(found)
    folders = [found.runs.set_index(KEYS).folder[run] for run in runs]
    lengths = measures(found.counts, int(found.counts.k.max()))[LENGTH]
    named = [f"{name}, seed {seed}: {lengths[name, seed]:.2f}" for name, seed in runs]
    heading = "Step by step"
    try:
        widget, question = decoded_runs(folders, prompt)
    except (OSError, ValueError) as e:
        return Section(heading, f"The runs cannot be decoded again here. {e}")
    line = debugger_line(*folders, prompt=prompt)
    html = (
        '<blockquote style="white-space:pre-line">'
        f"{escape(question)}</blockquote>{embed(widget)}"
        f"<p>The same in a notebook:</p><pre tabindex=0>{IMPORT}\n{escape(line)}</pre>"
    )
    return Section(heading, STEPS.format("; ".join(named)), html=html)


IMPORT = "from speculators_nb.lab.experiment_page import debug_runs"
STEPS = (
    "The runs with the longest and the shortest mean acceptance length over all prompts ({}), on the held-out prompt "
    "on which the first saves the most steps. Green tokens were drafted and accepted, struck out ones drafted and "
    "rejected, bold ones are the verifier's. Click a step, or move the slider: p is the verifier's probability of a "
    "draft token, q the drafter's."
)


def write_runs_page(
    folder: str | os.PathLike,
    path: str | os.PathLike | None = None,
    baseline: str | None = None,
    found: Experiment | None = None,
) -> Path:
    """A page of all runs of an experiment's folder, or of those in `found`, at `path` (None: index.html in the folder);
    settings are compared with the baseline (None: the first). Errors: FileNotFoundError where there is no run,
    ValueError for a baseline that is none of the settings."""
    found = found or read_experiment(folder)
    k = int(found.counts.k.max())
    head = (
        "Click a column's head to sort, a row to draw its curve or to take it away. The last "
        f"column opens a run in the debugger, in a notebook after “{IMPORT}”."
    )
    sections = [
        Section(
            "Settings",
            "Mean acceptance length over the seeds, and paired differences: 95 % intervals.",
            {f"{k} draft tokens a step": results_table(found.counts, k, baseline)},
        ),
        Section("Runs", head, {"Every run": runs_table(found)}),
        debugger_section(found),
    ]
    facts = {"folder": os.fspath(folder), "runs": len(found.runs), "held-out prompts": found.counts.prompt.nunique()}
    data = json.dumps(curves(found)).replace("<", "\\u003c")
    script = Path(__file__).with_name("runs.js").read_text(encoding="utf-8")
    html = f'<script type="application/json" id="curves">{data}</script><script>{script}</script>'
    sections[-1] = sections[-1]._replace(html=sections[-1].html + html)
    return write_page(path or Path(folder) / "index.html", page_html("Runs of an experiment", sections, facts))
