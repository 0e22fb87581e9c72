"""The commands of `speculators-nb`, from `regenerate` to `serve`, and those that measure and convert.
Each is a function of the library, and reads what the one before it has written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from .command import command, library, new_app

app = new_app(
    "speculators-nb",
    "Speculative decoding: make features, train a drafter, measure it, serve it with vLLM. The commands are listed in "
    "the order of work; each takes --recipe FILE. Start with: speculators-nb demo",
)


def enter(function: str, report: Callable, group: str, **options: Any) -> Callable:
    """Enter a function of the package, e.g. "data.prepare.prepare_data", as a command; the rest as of `command`."""
    module, _, name = function.rpartition(".")
    return command(library(module, name), report, app, group=group, **options)


def _nothing(result):
    "What reports while it runs has nothing left to print."


def _table(frame, **options):
    return frame.astype(object).where(frame.notna(), "").to_string(float_format="{:.3f}".format, **options)


def _extracted(n):
    failed = f", {n['failed']} FAILED (run the command again)" if n.get("failed") else ""
    return f"{n['rows']} rows, {n['tokens']} tokens: {n['written']} feature files written, {n['kept']} kept{failed}."


def _chosen(n):
    return (
        f"{n['draft_vocab_size']} of {n['vocab_size']} tokens are {n['covered']:.2%} of the "
        f"training answers. They are named in {n['output_dir']}."
    )


regenerate = enter(
    "cli.data_commands.regenerate",
    str,
    "Data",
    output="output",
    then=lambda report, given: [
        ("prepare", given["output"], "PREPARED", "--verifier", given["verifier"] or "VERIFIER")
    ],
)
prepare = enter(
    "data.prepare.prepare_data",
    lambda prepared: prepared.summary(),
    "Data",
    name="prepare",
    then=lambda prepared, given: [("features", prepared.folder, "FEATURES", "--verifier", given["verifier"])],
)
features = enter(
    "cli.data_commands.features",
    _extracted,
    "Data",
    then=lambda counts, given: [("train", given["output_dir"], "DRAFTER")],
)
report = enter(
    "report.data_report.report",
    lambda page: f"{page}: open it in a browser; its tables are beside it.",
    "Data",
)
vocab = enter("cli.data_commands.vocab", _chosen, "Data")


def _trained(trainer):
    from ..train.live_view import evaluation_table, header_line, row_line

    table, out = evaluation_table(trainer.state.log_history), trainer.args.output_dir
    best = ""
    if "held-out loss" in table:
        kept = table[table.step == trainer.state.best_global_step]  # by metric_for_best_model
        row = (kept if len(kept) else table.nsmallest(1, "held-out loss")).iloc[-1].to_dict()
        best = f"The best evaluation:\n{header_line(row)}\n{row_line(row)}\n"
    return f"{best}Drafter, history and checkpoints are in {out}"


def _measured(evaluation):
    from ..report.run_report import readable

    lengths = "mean_length mean_length_low mean_length_high draft_acceptance requests tokens"
    rates = "drafter temperature k position unconditional conditional"
    ranges = "by range mean_length mean_length_low mean_length_high requests steps"
    times = "tokens_per_second first_token_ms between_tokens_ms"
    times += " speedup speedup_low speedup_high"
    setting = "k concurrency temperature domain"
    tables = [
        (evaluation.performance, f"drafter {setting} tokens_per_step {times}"),
        (evaluation.summary, f"drafter temperature k concurrency domain {lengths}"),
        (evaluation.positions, rates),
        (getattr(evaluation, "compared_ranges", tuple)(), f"drafter temperature {ranges}"),
    ]
    shown = []
    for table, columns in tables:
        if len(table):
            there = [column for column in columns.split() if column in table]
            plain = readable(table[there]).rename(columns=lambda name: name.replace("_", " "))
            shown.append(plain.to_string(index=False))
    for prompt, why in evaluation.skipped.itertuples(index=False):
        shown.append(f"prompt {prompt} was skipped: {why}")
    return "\n\n".join(shown)


def _verdict(found):
    if found.violations:
        typer.echo("\n".join(f"- {v}" for v in found.violations))
        raise typer.Exit(1)
    return f"{found.engine} can serve this drafter."


train = enter(
    "cli.drafter_commands.train",
    _trained,
    "Drafters",
    then=lambda trainer, given: [("evaluate", given["output_dir"], "PROMPTS.jsonl"), ("serve", given["output_dir"])],
)
evaluate = enter("cli.drafter_commands.evaluate", _measured, "Drafters")
calibrate = enter("cli.drafter_commands.calibrate", lambda table: _table(table, index=False), "Drafters")
compare = enter("cli.drafter_commands.compare", lambda runs: _table(runs.table(), index=False), "Drafters")
check = enter(
    "cli.serving.check",
    _verdict,
    "Drafters",
    verdict="The engine cannot serve the drafter: each reason is a line.",
)


def _diagnosed(diagnosis):
    table = diagnosis.table()
    for row in table.itertuples(index=False):
        typer.echo(f"{row.stage:<13} {row.state:<12} {row.number}")
    first = diagnosis.first
    if first is None:
        return f"\n{diagnosis.verdict}"
    typer.echo(f"\n{diagnosis.verdict}\nRead: {first.page}")
    raise typer.Exit(1)


doctor = enter(
    "doctor.doctor.examine",
    _diagnosed,
    "Drafters",
    name="doctor",
    verdict="A stage loses: the first is named, with the page to read.",
)


def _settled(found):
    folder = Path(found.runs.folder.iloc[0]).parent
    failed = "".join(f"\n{run}: FAILED (run the command again): {error}" for run, error in found.failed.items())
    return f"{_table(found.table())}\n{failed}\n{folder}/index.html: all runs, in a browser"


def _evaluate_longest(found, given):
    from .inputs import read_experiment_file

    longest = found.table().index[0]
    folder = found.runs[found.runs.setting == longest].folder.iloc[0]
    modules = [word for name in read_experiment_file(given["file"]).modules for word in ("--import", name)]
    return [("evaluate", f"{folder}/drafter", "shipped", *modules)]


experiment = enter("cli.drafter_commands.experiment", _settled, "Drafters", then=_evaluate_longest)


def _served(words):
    from ..serve.serve_command import as_shell

    return words and as_shell(*words)


serve = enter("cli.serving.serve", _served, "Serving", output=None)
from_gguf = enter(
    "verifier.from_gguf.save_verifier",
    str,
    "Data",
    name="from-gguf",
    then=lambda folder, given: [("regenerate", "PROMPTS.jsonl", "ANSWERS.jsonl", "--verifier", str(folder))],
)
convert = enter(
    "models.convert.convert",
    str,
    "Checkpoints",
    then=lambda folder, given: [("evaluate", folder, "PROMPTS.jsonl")],
)
export = enter("cli.serving.export", str, "Checkpoints")
stitch_mtp = enter("models.mtp_native.stitch_mtp", str, "Checkpoints", name="stitch-mtp", output="out")
demo = enter("cli.demo.demo", _nothing, "All of it", output=None)
real = enter("cli.demo.real", _nothing, "All of it", output=None)
run = enter("cli.run.run", _nothing, "All of it", output=None)


def _planned(found):
    from ..plan.requirements import requirements_text

    typer.echo(requirements_text(found))
    if found.problems:
        raise typer.Exit(1)


plan = enter(
    "cli.run.plan",
    _planned,
    "All of it",
    output=None,
    verdict="Something does not fit: each is a line, with the option that makes it fit.",
)
