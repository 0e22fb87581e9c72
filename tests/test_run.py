"""`speculators-nb run`: a run that is killed at random and started again has the report of one that was not; a second
call does nothing; a changed value is made again with what follows it."""

import html
import inspect
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
import typer

from speculators_nb.cli import main as cli
from speculators_nb.cli.run import NOT_A_STAGE, RunRecord, StageFailed, depends_on, in_process, plan_of, stages_of
from speculators_nb.lab.experiment import shipped_drafter
from speculators_nb.serve.server import Server, free_port

ROOT = Path(__file__).parents[1]
RECIPE = f"""
verifier: {ROOT}/data/tiny-verifier
regenerate: {{data: {ROOT}/data/corpus/train.jsonl, output: out/answers.jsonl, max_samples: 8,
              max_new_tokens: 16, temperature: 0.7}}
prepare: {{data: out/answers.jsonl, output_dir: out/prepared, max_length: 96, num_proc: 1}}
features: {{data: out/prepared, output_dir: out/features}}
train: {{data_dir: out/features, output_dir: out/drafter, num_train_epochs: 2, total_seq_len: 128, learning_rate: 1e-3,
         eval_share: 0.25, extra: {{ttt_steps: 2}}}}
check: {{folder: out/drafter}}
"""


def begin(folder, recipe=RECIPE, **options):
    "Start a run in a process group of its own, forked from this process, which has imported the library."
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    forked.without_cuda()
    os.chdir(folder)
    code = 1
    try:
        log = os.open("log.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        torch.set_num_threads(1)  # threads do not survive a fork
        cli.run("recipe.yaml", **options)
        code = 0
    finally:
        os._exit(code)


def finish(pid, folder):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, (folder / "log.txt").read_text()[-3000:]


def report(folder):
    "The page without its clocks."
    return re.sub(r"<td>[\d.]+ s</td>", "<td></td>", (folder / "out/report.html").read_text())


def states(folder, monkeypatch, recipe=RECIPE):
    monkeypatch.chdir(folder)
    (folder / "recipe.yaml").write_text(recipe)
    stages, _ = stages_of("recipe.yaml")
    return {p.stage.name: p.state for p in plan_of(stages, RunRecord(Path("out")))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    finish(begin(folder), folder)
    return folder, time.monotonic() - began


def test_what_single_commands_have_made_is_reused(whole, tmp_path, monkeypatch):
    "The plan does not say that it continues what this run has not begun; what is complete is kept to the byte."
    folder = tmp_path / "copy"
    shutil.copytree(whole[0], folder)
    (folder / "out/run.json").unlink()
    reused = ["regenerate", "prepare", "features", "train"]
    assert states(folder, monkeypatch) == dict.fromkeys(reused, "will reuse") | {"check": "will run"}
    files = [folder / "out" / name for name in ("answers.jsonl", "drafter/model.safetensors")]
    before = [file.read_bytes() for file in files]
    finish(begin(folder), folder)
    assert [file.read_bytes() for file in files] == before
    assert set(states(folder, monkeypatch).values()) == {"done"}


@pytest.mark.statement("release-36")
def test_a_run_that_is_killed_has_the_same_report(whole, tmp_path):
    draw, killed = random.Random(0), 0
    for _ in range(2):
        pid = begin(tmp_path)
        time.sleep(draw.uniform(0.1, 0.4) * whole[1])
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed += 1
    finish(begin(tmp_path), tmp_path)
    assert killed
    assert report(tmp_path) == report(whole[0])
    assert (tmp_path / "out/answers.jsonl").read_bytes() == (whole[0] / "out/answers.jsonl").read_bytes()


def test_a_second_run_does_nothing_and_a_change_reaches_what_follows(whole, monkeypatch):
    folder = whole[0]
    assert set(states(folder, monkeypatch).values()) == {"done"}
    kept = report(folder)
    assert cli.run("recipe.yaml") == [] and report(folder) == kept
    how = RECIPE.replace("out/features}", "out/features, patience: 60, device: cpu}", 1)
    how = how.replace("num_proc: 1", "num_proc: 2")
    assert set(states(folder, monkeypatch, how).values()) == {"done"}, "the same comes out"
    other = RECIPE.replace("1e-3", "2e-3")
    again = ["regenerate", "prepare", "features"]
    assert states(folder, monkeypatch, other) == dict.fromkeys(again, "done") | dict.fromkeys(
        ["train", "check"], "will run again"
    )
    with pytest.raises(
        FileExistsError, match="train: out/drafter was made otherwise .learning_rate was 0.001, is 0.002"
    ):
        cli.run("recipe.yaml")
    answers = folder / "out/answers.jsonl"
    before = answers.stat().st_mtime_ns
    finish(begin(folder, other, overwrite=True), folder)
    assert set(states(folder, monkeypatch, other).values()) == {"done"}
    assert answers.stat().st_mtime_ns == before and report(folder) != kept
    answers.write_text(answers.read_text().replace("a", "e"))  # a content, under the same name
    assert states(folder, monkeypatch, other)["prepare"] == "will run again"


def test_an_engine_is_measured_where_its_server_answers_and_named_where_it_does_not(tmp_path, monkeypatch, capsys):
    address = f"http://127.0.0.1:{free_port()}"
    data = {"messages": [{"role": "user", "content": "Why?"}]}
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(data)}\n")
    recipe = f"""
check: {{folder: {shipped_drafter(tmp_path / "drafter")}}}
evaluate.vllm: {{drafter: drafter, data: prompts.jsonl, output_dir: out/engine, engine: vllm, server: "{address}",
                max_new_tokens: 8}}
"""
    (tmp_path / "recipe.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    cli.run("recipe.yaml", dry_run=True)
    (line,) = re.findall(rf"evaluate.vllm: {address}  speculators-nb (.*)", capsys.readouterr().out)
    finish(begin(tmp_path, recipe), tmp_path)
    page = html.unescape((tmp_path / "out/report.html").read_text())
    assert f"does not answer; start it in another terminal (speculators-nb {line})" in page
    assert states(tmp_path, monkeypatch, recipe) == {"check": "done", "evaluate.vllm": "will run"}

    command = shlex.split(line)
    command.remove("--run")
    assert command[:2] == ["serve", "drafter"]
    served, environment = cli.serve(command[1], port=int(command[3]), extra=[c[8:] for c in command[4:]])
    served[0] = str(Path(__file__).with_name("fake_engine.py"))
    with Server([sys.executable, *served], environment):
        finish(begin(tmp_path, recipe), tmp_path)
    assert states(tmp_path, monkeypatch, recipe) == {"check": "done", "evaluate.vllm": "done"}
    page = html.unescape((tmp_path / "out/report.html").read_text())
    assert "Throughput and latency" in page and "does not answer" not in page


def test_a_stage_may_leave_out_the_drafter(tmp_path, monkeypatch):
    "n-gram look-up has none: the stage is `evaluate DATA --method ngram`, and so is the recipe that it leaves."
    monkeypatch.chdir(tmp_path)
    prompt = {"messages": [{"role": "user", "content": "Why?"}]}
    Path("prompts.jsonl").write_text(f"{json.dumps(prompt)}\n")
    stage = f"data: prompts.jsonl, verifier: {ROOT}/data/tiny-verifier, output_dir: out/ngram, max_new_tokens: 8"
    recipe = f"evaluate: {{{stage}, method: ngram}}"
    finish(begin(tmp_path, recipe), tmp_path)
    assert states(tmp_path, monkeypatch, recipe) == {"evaluate": "done"}
    assert "n-gram" in (tmp_path / "out/ngram/summary.csv").read_text()
    again = Path("out/ngram/evaluate.recipe.yaml")
    assert set(states(tmp_path, monkeypatch, again.read_text())) == {"evaluate"}
    with pytest.raises(ValueError, match="recipe.yaml: section evaluate: drafter is missing: write evaluate DRAFTER"):
        states(tmp_path, monkeypatch, f"evaluate: {{{stage}}}")
    with pytest.raises(ValueError, match="recipe.yaml: section evaluate: data is missing; write data: … in it"):
        states(tmp_path, monkeypatch, "evaluate: {method: ngram, verifier: v}")


def test_a_row_that_ranks_share_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE.replace("eval_share", "context_parallel_size: 2, eval_share"))
    with pytest.raises(ValueError, match="train.context_parallel_size=2: a run trains in one process; leave it out"):
        cli.run("recipe.yaml")
    assert not Path("out").exists()


def test_a_stage_that_fails_says_so_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("run: {output_dir: out}\ncheck: {folder: none}\n")
    with pytest.raises(StageFailed, match="check: ended with exit code 2; mend what it says"):
        cli.run("recipe.yaml")
    assert capfd.readouterr().err.strip().startswith("Error: none: neither a local folder nor a model")


def test_a_stage_follows_all_that_it_reads(tmp_path, monkeypatch):
    "Also a vocabulary, which is written beside the rows that it reads, and the evaluations of a diagnosis."
    engine = "evaluate: {drafter: out/drafter, data: prompts.jsonl, output_dir: out/engine}\n"
    engine += "doctor: {drafter: other, evaluation: [out/engine]}\n"
    vocab = "vocab: {data_dir: out/prepared, draft_vocab_size: 64}\nfeatures:"
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("features:", vocab) + engine)
    monkeypatch.chdir(tmp_path)
    stages = {stage.name: stage for stage in stages_of("recipe.yaml")[0]}
    assert depends_on(stages["vocab"], stages["prepare"]) == ["data_dir"]
    assert depends_on(stages["features"], stages["vocab"]) == ["data"]
    assert depends_on(stages["doctor"], stages["evaluate"]) == ["evaluation 1"]


def test_stages_follow_a_verifier_that_another_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = "from-gguf: {gguf: smollm2, output_dir: out/verifier}\n"
    made += "stitch-mtp: {drafter: mtp, verifier: out/verifier, out: out/stitched}\n"
    Path("recipe.yaml").write_text(f"{made}features: {{data: rows, verifier: out/stitched, output_dir: out/features}}")
    *makers, reader = stages_of("recipe.yaml")[0]
    assert [stage.output for stage in makers] == [Path("out/verifier"), Path("out/stitched")]
    assert depends_on(makers[1], makers[0]) == depends_on(reader, makers[1]) == ["verifier"]
    record = RunRecord(Path("out"))
    for stage, *after in (makers, makers[1:]):
        record.begin(stage, after)
        stage.output.mkdir(parents=True)
        (stage.output / "config.json").write_text("{}")
        record.end(stage, 1.0)
        record.stages[stage.name]["output"] = None  # as it was recorded before
    record.write()
    assert [planned.state for planned in plan_of(makers, RunRecord(Path("out")))] == ["done", "done"]
    for name, function in cli.app.functions.items():
        if output := {"output", "output_dir", "out"} & inspect.signature(function).parameters.keys():
            assert name in NOT_A_STAGE or {cli.app.outputs[name]} == output, name


def test_what_a_stage_read_is_recorded_as_it_was_when_it_began(tmp_path, monkeypatch):
    "But for what it writes into itself; and a store through which features go is none of what decides them."
    monkeypatch.chdir(tmp_path)
    for folder in ("rows", "store"):
        Path(folder).mkdir()
        Path(folder, "a").write_text("1")
    Path("out/features").mkdir(parents=True)
    Path("out/features/a").write_text("1")
    features = "features: {data: rows, verifier: v, output_dir: out/features, source: vllm, storage: store}\n"
    recipe = f"{features}vocab: {{data_dir: rows, draft_vocab_size: 8}}\nrun: {{output_dir: out}}"
    assert set(states(tmp_path, monkeypatch, recipe).values()) == {"will reuse"}
    record, stages = RunRecord(Path("out")), stages_of("recipe.yaml")[0]
    features, vocab = stages
    record.begin(vocab, [])
    Path("rows/vocabulary").write_text("3")
    record.end(vocab, 1.0)
    record.begin(features, [])
    Path("store/a").write_text("2")
    record.end(features, 1.0)
    Path("store/a").write_text("3")
    assert states(tmp_path, monkeypatch, recipe) == {"features": "done", "vocab": "done"}
    record.begin(features, [])
    Path("rows/a").write_text("2")
    record.end(features, 1.0)
    assert states(tmp_path, monkeypatch, recipe)["features"] == "will run again"


def test_what_an_engine_measured_is_kept_on_a_machine_without_it(tmp_path, monkeypatch):
    Path(tmp_path / "out/engine").mkdir(parents=True)
    Path(tmp_path / "out/engine/summary.csv").write_text("drafter\n")
    line = "evaluate: {drafter: drafter, data: prompts.jsonl, output_dir: out/engine, engine: vllm, vllm: /no/vllm}\n"
    recipe = "run: {output_dir: out}\n" + line
    assert states(tmp_path, monkeypatch, recipe) == {"evaluate": "skipped"}
    record, (stage,) = RunRecord(Path("out")), stages_of("recipe.yaml")[0]
    record.begin(stage, [])
    record.end(stage, 1.0)
    assert states(tmp_path, monkeypatch, recipe) == {"evaluate": "done"}
    assert states(tmp_path, monkeypatch, recipe.replace("data:", "max_samples: 3, data:")) == {"evaluate": "skipped"}
    record.skip(stage, "no vllm")
    record.file.write_text(json.dumps({"stages": record.stages}))
    monkeypatch.setattr("speculators_nb.cli.run._not_here", lambda stage: None)
    assert states(tmp_path, monkeypatch, recipe) == {"evaluate": "will continue"}, "nothing says that it fits"


def test_a_fault_is_no_verdict(tmp_path, monkeypatch):
    "Exit status 1 of `check` is a verdict, with which a run goes on; a command that breaks off says 1 too, in a shell."
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("run: {output_dir: out}\ncheck: {folder: none}\n")
    (stage,), _ = stages_of("recipe.yaml")

    def outcome(perform):
        monkeypatch.setitem(cli.app.perform, "check", perform)
        return in_process(stage, stage.values)[0]

    def verdict(values):
        raise typer.Exit(1)

    assert outcome(verdict) == 1 and outcome(lambda values: {}["fault"]) == 2 and outcome(lambda values: None) == 0
