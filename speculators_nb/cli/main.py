"""The commands of `speculators-nb`, from `regenerate` to `serve`, and those that measure and convert.
Each is a function of the library, and reads what the one before it has written."""

from pathlib import Path
from typing import Any

import typer

from ..core.options import FIRST_CHOICE, check_options
from .command import command, library, new_app, one_line
from .run import run_recipe, stages_of

app = new_app(
    "speculators-nb",
    "Speculative decoding: make features, train a drafter, measure it, serve it with vLLM. The commands are listed in "
    "the order of work; each takes --recipe FILE. Start with: speculators-nb demo",
)


def _table(frame, **options):
    return frame.astype(object).where(frame.notna(), "").to_string(float_format="{:.3f}".format, **options)


def _reported(page):
    return f"{page}: open it in a browser; its tables are beside it."


def _extracted(n):
    failed = f", {n['failed']} FAILED (run the command again)" if n.get("failed") else ""
    return f"{n['rows']} rows, {n['tokens']} tokens: {n['written']} feature files written, {n['kept']} kept{failed}."


def _chosen(n):
    return (
        f"{n['draft_vocab_size']} of {n['vocab_size']} tokens are {n['covered']:.2%} of the "
        f"training answers. They are named in {n['output_dir']}."
    )


regenerate = command(
    library("cli.data_commands", "regenerate"),
    str,
    app,
    group="Data",
    output="output",
    then=lambda report, given: [
        ("prepare", given["output"], "PREPARED", "--verifier", given["verifier"] or "VERIFIER")
    ],
)
prepare = command(
    library("data.prepare", "prepare_data"),
    lambda prepared: prepared.summary(),
    app,
    name="prepare",
    group="Data",
    then=lambda prepared, given: [("features", prepared.folder, "FEATURES", "--verifier", given["verifier"])],
)
features = command(
    library("cli.data_commands", "features"),
    _extracted,
    app,
    group="Data",
    then=lambda counts, given: [("train", given["output_dir"], "DRAFTER")],
)
report = command(library("report.data_report", "report"), _reported, app, group="Data")
vocab = command(library("cli.data_commands", "vocab"), _chosen, app, group="Data")


def _trained(trainer):
    from ..train.live_view import evaluation_table, header_line, row_line

    table, out = evaluation_table(trainer.state.log_history), trainer.args.output_dir
    best = ""
    if "held-out loss" in table:
        row = table.iloc[table["held-out loss"].argmin()].to_dict()
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


train = command(
    library("cli.drafter_commands", "train"),
    _trained,
    app,
    group="Drafters",
    then=lambda trainer, given: [("evaluate", given["output_dir"], "PROMPTS.jsonl"), ("serve", given["output_dir"])],
)
evaluate = command(library("cli.drafter_commands", "evaluate"), _measured, app, group="Drafters")
calibrate = command(
    library("cli.drafter_commands", "calibrate"), lambda table: _table(table, index=False), app, group="Drafters"
)
compare = command(
    library("cli.drafter_commands", "compare"), lambda runs: _table(runs.table(), index=False), app, group="Drafters"
)
check = command(
    library("cli.serving", "check"),
    _verdict,
    app,
    group="Drafters",
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


doctor = command(
    library("doctor.doctor", "examine"),
    _diagnosed,
    app,
    name="doctor",
    group="Drafters",
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


experiment = command(
    library("cli.drafter_commands", "experiment"), _settled, app, group="Drafters", then=_evaluate_longest
)


def _served(words):
    from ..serve.serve_command import as_shell

    return words and as_shell(*words)


serve = command(library("cli.serving", "serve"), _served, app, group="Serving", output=None)

from_gguf = command(
    library("verifier.from_gguf", "save_verifier"),
    str,
    app,
    name="from-gguf",
    group="Data",
    output=None,
    then=lambda folder, given: [("regenerate", "PROMPTS.jsonl", "ANSWERS.jsonl", "--verifier", str(folder))],
)
convert = command(
    library("models.convert", "convert"),
    str,
    app,
    group="Checkpoints",
    then=lambda folder, given: [("evaluate", folder, "PROMPTS.jsonl")],
)
export = command(library("cli.serving", "export"), str, app, group="Checkpoints")
stitch_mtp = command(
    library("models.mtp_native", "stitch_mtp"), str, app, name="stitch-mtp", group="Checkpoints", output=None
)

# they report while they run
demo = command(library("cli.demo", "demo"), lambda evaluation: None, app, group="All of it", output=None)
real = command(library("cli.demo", "real"), lambda evaluation: None, app, group="All of it", output=None)


def perform(name: str, values: dict):
    "Run a command of this program on checked values, as a stage of a run."
    with one_line(app.functions[name]):
        app.perform[name](values)


def run(
    recipe: Path,  # YAML or JSON, with a section for each command to run
    output_dir: Path | None = None,  # for report.html, run.json; default: where the outputs are
    dry_run: bool = False,  # print what is done and what would run, and do nothing
    overwrite: bool = False,  # make again what has changed, with all that follows it
    import_: list[str] | None = None,  # modules or .py files that register drafters
) -> list[str]:  # stages that have run
    """Run a recipe: every section in order, from conversations to a report. Run it again to
    continue: what is done is skipped."""
    return run_recipe(recipe, app.functions, app.outputs, perform, output_dir, dry_run, overwrite, import_)


command(run, lambda ran: None, app, group="All of it", output=None)


def plan(
    recipe: Path,  # YAML or JSON, with sections features and train, or one of them
    verifier: str | None = None,  # folder or hub id of another; only config.json is read
    conversations: int | None = None,  # default: as prepared, else of the recipe, else 50,000
    tokens_each: int = 1000,  # of a conversation, where no prepared folder is there to count
    devices: int = 1,  # that train
    memory: float | None = None,  # GB of one; default: of this machine's, if it has any
    disk: float | None = None,  # GB free for features; default: where the recipe writes them
    tflops: float | None = None,  # of one device in bfloat16; default: an H100's, or measured here
    mfu: float | None = None,  # share of it that is reached; default: as measured with the drafter
    bandwidth: float | None = None,  # of a device's memory, TB/s; default: as tflops
) -> Any:  # plan.requirements.Requirements
    """What a recipe needs: disk, memory of a training step, the time of each stage, servers; what
    does not fit, and the option that makes it fit. No stage is started, no weights are read. Without
    an option that describes a machine it is about this one."""
    check_options(locals(), "plan")
    stages = stages_of(recipe, app.functions, app.outputs)[0]
    # after a wrong recipe is refused: this imports torch
    from ..plan.requirements import GB, machine_of, requirements

    sections = {stage.name: stage.values for stage in stages}
    training = sections.get("train")
    algorithm = (training["algorithm"] or FIRST_CHOICE) if training else ""
    place = None if memory is None else memory * GB
    machine = machine_of(algorithm, devices, place, tflops, mfu, bandwidth)
    free = None if disk is None else disk * GB
    return requirements(sections, verifier, conversations, tokens_each, machine, free)


def _planned(found):
    from ..plan.requirements import requirements_text

    typer.echo(requirements_text(found))
    if found.problems:
        raise typer.Exit(1)


command(
    plan,
    _planned,
    app,
    group="All of it",
    output=None,
    verdict="Something does not fit: each is a line, with the option that makes it fit.",
)
