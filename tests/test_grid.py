"""Experiments: settings × seeds, their key, what is resumed and what fails; paired differences and Student's t."""

import json
import math
import re
import runpy
import shutil
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from speculators_nb.cli.main import app
from speculators_nb.core import options
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.core.options import algorithms, check_options
from speculators_nb.core.provenance import write_provenance
from speculators_nb.lab import grid
from speculators_nb.lab.experiment import HeldoutSetting, shipped_features
from speculators_nb.lab.experiment_page import debug_runs, decoded_runs, write_runs_page
from speculators_nb.lab.grid import (
    Experiment,
    Measured,
    Run,
    Subject,
    experiment,
    planned,
    read_experiment,
    seconds_to_go,
    written_once,
)
from speculators_nb.lab.paired import LENGTH, differences, measures, results_table, t_interval, t_quantile
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models import base
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.verifier.identity import VerifierInfo

# two-sided 95 % and 99 % quantiles of Student's t (Abramowitz and Stegun, table 26.10)
TABLE = {(1, 0.95): 12.706, (2, 0.95): 4.303, (5, 0.95): 2.571, (120, 0.95): 1.980, (1, 0.99): 63.657, (9, 0.99): 3.250}


@pytest.mark.parametrize("df, level", TABLE)
def test_quantiles_of_students_t(df, level):
    assert t_quantile(df, level) == pytest.approx(TABLE[df, level], abs=6e-4)


def test_an_interval_covers_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(3, 2, (400, 5))
    inside = [low < 3 < high for _, low, high in map(t_interval, draws)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    assert t_interval([2.0])[0] == 2 and math.isnan(t_interval([2.0])[1])


def counts(lengths):
    "{setting: [accepted of each seed]} on three prompts of 10, 20 and 30 steps."
    rows = []
    for setting, by_seed in lengths.items():
        for seed, accepted in by_seed.items():
            for prompt, steps in enumerate((10, 20, 30)):
                own = dict(setting=setting, seed=seed, k=1, prompt=prompt, domain="free", steps=steps)
                rows.append(own | dict(accepted=accepted * steps // 10, at_1=accepted * steps // 10))
    return pd.DataFrame(rows)


def test_a_paired_difference_is_that_of_the_seeds():
    found = differences(counts({"a": {0: 2, 1: 6, 2: 4}, "b": {2: 5, 1: 7, 0: 3}}), "a", 1)
    assert found.difference.to_numpy() == pytest.approx(0.1) and found.low.to_numpy() == pytest.approx(0.1)
    assert set(found.seeds) == {3} and set(found.interval) == {"t over 3 seeds"}
    unpaired = measures(counts({"a": {0: 2, 1: 6, 2: 4}}), 1)[LENGTH]
    assert t_interval(unpaired)[2] - t_interval(unpaired)[1] > 0.9  # the seeds differ; the pairs do not


def test_only_common_seeds_are_compared():
    found = differences(counts({"a": {0: 2, 1: 6}, "b": {1: 7, 2: 9}, "c": {3: 1}}), "a", 1)
    assert set(found.setting) == {"b"} and set(found.seeds) == {1}
    assert set(found.interval) == {"bootstrap over 3 prompts, 1 seed"}
    table = results_table(counts({"a": {0: 2}, "c": {3: 1}}), 1)
    assert table.loc["c", "minus a"] == "" and list(table.index) == ["a", "c"]


def run(**changes):
    usual = Run("x", "eagle3", {}, 4, 0, Subject("features"), Measured())
    return usual._replace(**changes)


def test_a_key_is_of_what_is_computed():
    first = run().key
    assert run(setting="other").key == first == run(subject=Subject("elsewhere/features")).key
    changed = [
        run(seed=1),
        run(k=3),
        run(algorithm="dflash"),
        run(arguments={"max_steps": 3}),
        run(subject=Subject("others")),
        run(subject=Subject("features", "a-verifier", "prompts")),
        run(measured=Measured((2,))),
        run(measured=Measured(n_prompts=3)),
        run(arguments={"step_weights": lambda k: 0.5**k}),
        run(arguments={"step_weights": lambda k: 0.6**k}),
    ]
    assert len({first, *(r.key for r in changed)}) == 1 + len(changed)


def test_other_prompts_under_the_same_name_are_other_runs(tmp_path):
    "Else a run that was measured before is compared with one on other prompts."
    keys = []
    for name, text in (("a", "Why?"), ("a", "When?"), ("b", "When?")):
        (tmp_path / name).write_text(text)
        keys.append(run(subject=Subject("features", "a-verifier", str(tmp_path / name))).key)
    assert keys[0] != keys[1] == keys[2]


@pytest.fixture
def done(monkeypatch, tmp_path):
    "Runs that train nothing: (name, how often) of what was done. Their features are the shipped verifier's, by record."
    names = []
    (tmp_path / "features").mkdir()
    verifier = VerifierInfo.of(shipped_data() / "tiny-verifier")
    record = dict(target_model_path="elsewhere", fingerprint=verifier.fingerprint)
    (tmp_path / "features/data_config.json").write_text(json.dumps(dict(model=record)))

    def do_run(run, folder, pace):
        names.append(run.name)
        if run.arguments.get("max_steps") == 13:
            raise FloatingPointError("the loss is not finite")
        folder.mkdir(parents=True)
        about = dict(setting=run.setting, seed=run.seed, algorithm=run.algorithm, arguments=run.arguments)
        (folder / "setting.json").write_text(json.dumps(about))
        counts({run.setting: {run.seed: 1 + run.seed}}).drop(columns=["setting", "seed"]).to_csv(
            folder / "counts.csv", index=False
        )
        (folder / "provenance.json").write_text(json.dumps(dict(results=dict(seconds=60.0 * run.k))))

    monkeypatch.setattr(grid, "do_run", do_run)
    return names


def contenders(*steps):
    return {f"steps {n}": ("eagle3", {"max_steps": n}) for n in steps}


def test_only_what_is_missing_is_done(tmp_path, done):
    given = dict(k=1, features=tmp_path / "features")
    first = experiment(tmp_path, contenders(1, 2), seeds=2, **given)
    assert done == ["steps 1, seed 0", "steps 2, seed 0", "steps 1, seed 1", "steps 2, seed 1"]
    seen = []
    more = experiment(tmp_path, contenders(1, 2, 3), seeds=2, after_each=lambda e: seen.append(len(e.runs)), **given)
    assert done[4:] == ["steps 3, seed 0", "steps 3, seed 1"] and seen == [5, 6]
    assert len(first.runs) == 4 and len(more.runs) == len(read_experiment(tmp_path).runs) == 6
    renamed = {"new": contenders(1)["steps 1"]}
    assert set(experiment(tmp_path, renamed, seeds=2, **given).counts.setting) == {"new"} and len(done) == 6


def test_how_long_it_takes_is_said_before_it_starts(tmp_path, done, capsys):
    "As the runs took that are there: 60 s each at k=1, by two workers; without any, a few steps of the first say it."
    given = dict(seeds=2, k=1, features=tmp_path / "features")
    experiment(tmp_path, contenders(1), **given)
    said = capsys.readouterr().err
    assert said.startswith("2 runs: 0 kept, 2 to do; a few steps of the first say how long") and "60 s to go" in said
    experiment(tmp_path, contenders(1, 2, 3), **given)
    said = capsys.readouterr().err
    assert said.startswith("6 runs: 2 kept, 4 to do in about 4 min") and "about 2 min to go" in said
    runs = planned(contenders(1, 2, 4), 2, 1, Measured((1,)), Subject.of(tmp_path / "features", None), {})
    assert (
        seconds_to_go(runs, tmp_path, {}, 2) == 60 and seconds_to_go(runs, tmp_path, {"steps 4, seed 0": ""}, 1) == 60
    )
    experiment(tmp_path, contenders(1), **given)
    assert capsys.readouterr().err.startswith("2 runs: 2 kept\n")


def test_the_pace_of_the_first_run(capsys, monkeypatch):
    "Steps of 2 s after the first: 100 of them in 6 runs, two at once. It is said once."
    clock = iter((0.0, 2.0, 4.0, 6.0, 8.0))
    monkeypatch.setattr(grid.time, "perf_counter", lambda: next(clock))
    pace = grid.Pace(6, 2)
    for step in range(1, 6):
        pace.on_step_end(None, SimpleNamespace(global_step=step, max_steps=100), None)
    assert capsys.readouterr().err == "training takes about 10 min: 100 steps a run, 2 s each; then measuring\n"


def test_the_verifier_writes_its_answers_once(tmp_path, monkeypatch):
    "For all runs and workers of an experiment; another limit, prompt or verifier, be it of the same name, has its own."
    limits = []
    texts = lambda verifier, prompts, limit, stop: limits.append(limit) or [[limit]] * len(prompts)
    monkeypatch.setattr(grid, "greedy_texts", texts)
    one, other = (SimpleNamespace(model=torch.nn.Linear(2, 1)) for _ in range(2))
    setting, file = HeldoutSetting(one, [[1], [2]], ["", ""], {0}), tmp_path / "answers.json"
    assert written_once(setting, 5, file) == written_once(setting, 5, file) == [[5], [5]]
    assert written_once(setting, 6, file) == [[6], [6]]
    assert written_once(setting._replace(prompts=[[3]]), 6, file) == [[6]]
    written_once(setting._replace(prompts=[[3]], verifier=other), 6, file)
    written_once(setting._replace(prompts=[[3]], verifier=other, eos_token_ids={1}), 6, file)
    assert limits == [5, 6, 6, 6, 6]


def test_answers_too_short_for_a_draft_are_refused_before_anything_is_trained(tmp_path, done):
    for lengths, limit in ((None, 5), ((1, 5), 6)):
        given = dict(k=4, draft_lengths=lengths, max_new_tokens=limit, features=tmp_path / "features")
        with pytest.raises(ValueError, match=f"max_new_tokens={limit}: no step of such an answer drafts"):
            experiment(tmp_path, contenders(1), **given)
    assert done == []


@pytest.mark.parametrize("heldout", [None, "prompts.jsonl"])
def test_features_that_are_not_there_are_named(tmp_path, heldout):
    with pytest.raises(ValueError, match=r"^features='\S+/nowhere': there is no such folder; name one that"):
        experiment(tmp_path, contenders(1), features=tmp_path / "nowhere", heldout=heldout)


def test_runs_of_one_name_with_other_arguments_are_not_pooled(tmp_path, done):
    "A setting's arguments were changed between two calls: both runs are in the folder, each by itself."
    for steps in (1, 2):
        own = {"usual": ("eagle3", {"max_steps": steps}), **contenders(3)}
        experiment(tmp_path, own, seeds=1, k=1, features=tmp_path / "features")
    found = read_experiment(tmp_path)
    usual = {f"usual ({Path(run.folder).name})" for run in found.runs.itertuples() if run.max_steps != 3}
    assert set(found.runs.setting) == set(found.counts.setting) == usual | {"steps 3"} and len(usual) == 2
    page = write_runs_page(tmp_path).read_text()
    assert all(name in page for name in usual)


def test_a_run_is_stepped_through_on_what_it_was_measured_on(tmp_path):
    "Prompts of one's own and their limit, not the shipped ones."
    (tmp_path / "own.jsonl").write_text('{"prompt": "Multiply 3 by 6."}\n{"prompt": "Sort c, a."}\n{"prompt": "No."}\n')
    shutil.copytree(shipped_data() / "tiny-drafter", tmp_path / "run/drafter")
    about = dict(setting="usual", seed=0, algorithm="eagle3", arguments={})
    (tmp_path / "run/setting.json").write_text(json.dumps(about))
    (tmp_path / "run/counts.csv").write_text("k,prompt\n3,0\n3,1\n")
    measured = dict(heldout=str(tmp_path / "own.jsonl"), measured=dict(n_prompts=2, max_new_tokens=9))
    write_provenance(tmp_path / "run", "experiment", measured, dict(verifier=shipped_data() / "tiny-verifier"))
    widget, question = decoded_runs([tmp_path / "run"], 1)
    assert "Sort c, a." in question and len(widget.generations["usual, seed 0"].tokens) == 9
    with pytest.raises(ValueError, match="prompt=2: is not held out; give one of 0 to 1"):
        debug_runs(tmp_path / "run", prompt=2)


def test_a_run_that_fails_is_named_and_tried_again(tmp_path, done, capsys):
    given = dict(k=1, features=tmp_path / "features")
    found = experiment(tmp_path, contenders(1, 13, 2), seeds=1, **given)
    assert found.failed == {"steps 13, seed 0": "FloatingPointError: the loss is not finite"}
    assert list(found.runs.setting) == ["steps 1", "steps 2"]
    assert "steps 13, seed 0: FloatingPointError" in "".join(capsys.readouterr())
    experiment(tmp_path, contenders(1, 13, 2), seeds=1, **given)
    assert done[3:] == ["steps 13, seed 0"]
    with pytest.raises(RuntimeError, match="every run failed; steps 13, seed 0: FloatingPointError"):
        experiment(tmp_path, contenders(13), seeds=1, **given)


def test_a_picture_has_a_dot_for_each_seed(tmp_path, done):
    found = experiment(tmp_path, contenders(1, 2), seeds=3, k=1, features=tmp_path / "features")
    open_before = plt.get_fignums()
    ax = found.plot("max_steps").axes[0]
    assert plt.get_fignums() == open_before, "an open figure is shown twice in JupyterLab"
    assert len(ax.collections[0].get_offsets()) == 6 and ax.get_xlabel() == "max_steps"
    assert "None is ahead" in ax.get_title("left")  # all runs are alike
    more = contenders(1, 2) | {"fast": ("eagle3", {"learning_rate": 1e-3})}
    found = experiment(tmp_path, more, seeds=3, k=1, features=tmp_path / "features")
    ax = found.plot().axes[0]
    assert ax.get_legend() is None and len(ax.get_xticks()) == 3
    ax = found.plot("max_steps").axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1.0", "2.0", "usual"]
    assert [text.get_text() for text in ax.get_legend().texts] == ["usual", "0.001"]


@pytest.mark.parametrize("own, title", [((8, 9, 7), "b is longest: "), ((8, 2, 9), "None is ahead")])
def test_a_picture_names_a_winner_only_beyond_the_intervals(own, title):
    lengths = {"a": {0: 4, 1: 5, 2: 3}, "b": dict(enumerate(own))}
    runs = pd.DataFrame([dict(setting=s, seed=i, algorithm="eagle3") for s in lengths for i in range(3)])
    assert Experiment(runs, counts(lengths)).plot().axes[0].get_title("left").startswith(title)


def test_a_picture_names_no_value_that_is_ahead_only_beside_something_else():
    "The longest setting has learning_rate 1, the longest mean of a learning rate is that of 2."
    lengths = {name: dict.fromkeys(range(3), n) for name, n in zip("abcd", (9, 1, 7, 6))}
    rows = [("a", 1, 1), ("b", 1, 2), ("c", 2, 1), ("d", 2, 2)]
    runs = [
        dict(setting=s, seed=i, algorithm="eagle3", learning_rate=r, max_steps=m) for s, r, m in rows for i in range(3)
    ]
    title = Experiment(pd.DataFrame(runs), counts(lengths)).plot("learning_rate").axes[0].get_title("left")
    assert title.startswith("None is ahead")
    lengths["a"] = dict.fromkeys(range(3), 2)
    title = Experiment(pd.DataFrame(runs), counts(lengths)).plot("learning_rate").axes[0].get_title("left")
    assert title.startswith("2 is longest: ")


OWN = """
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators_nb.nn.attention import sliding_window


@SpeculatorModelConfig.register("near_sighted_twin")
class TwinConfig(Eagle3SpeculatorConfig):
    speculators_model_type: str = "near_sighted_twin"


@SpeculatorModel.register("near_sighted_twin")
class Twin(Eagle3DraftModel):
    config_class = TwinConfig

    def mask(self, window, document_ids):
        return super().mask(window, document_ids) & sliding_window(2)
"""
FILE = """
import: {here}/own_twin.py
seeds: 2
k: 2
n_prompts: 2
max_new_tokens: 24
workers: 2
common: {{max_steps: 2, total_seq_len: 256, draft_vocab_size: 64}}
settings:
  usual:
  own: {{algorithm: near_sighted_twin, learning_rate: 1e-3}}
"""


@pytest.mark.parametrize("begun_by", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_command_in_real_processes(tmp_path, monkeypatch, begun_by):
    """With a drafter of one's own: lines, table, picture, page and what to do next; then nothing is left to do. By
    night in processes that know nothing of it, as users have them."""
    monkeypatch.setattr(grid, "get_context", lambda kind: get_context(begun_by))
    features = shipped_features(n=20)
    monkeypatch.setattr(grid, "shipped_features", lambda: features)
    for registered in (SpeculatorModelConfig.registry, SpeculatorModel.registry):
        monkeypatch.setitem(registered, "near_sighted_twin", None)
        del registered["near_sighted_twin"]  # and after this test it is as before
    monkeypatch.setattr(options, "REGISTERED", set(options.REGISTERED))
    monkeypatch.setattr(base, "REGISTERED", options.REGISTERED)
    (tmp_path / "own_twin.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(FILE.format(here=tmp_path))
    line = ["experiment", str(tmp_path / "own.yaml"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, line, env=dict(COLUMNS="200", NO_COLOR="1", TERM="dumb"))
    assert done.exit_code == 0, done.output
    for name in ("usual", "own"):
        assert all(re.search(rf"^{name}, seed {seed}: 1\.\d\d tokens a step$", done.stdout, re.M) for seed in (0, 1))
    assert "minus usual" in done.stdout and "2 seeds" in done.stdout and "FAILED" not in done.stdout
    assert re.search(rf"Next: speculators-nb evaluate \S+/drafter shipped --import {tmp_path}/own_twin.py", done.stdout)
    left = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert left == {
        ".answers.json.lock",
        "answers.json",
        "experiment.csv",
        "experiment.png",
        "experiment.recipe.yaml",
        "index.html",
    }
    page = (tmp_path / "out/index.html").read_text()
    assert 'data-widget="debugger"><script' in page and page.count(f'debug_runs("{tmp_path}/out/') == 4
    table = pd.read_csv(tmp_path / "out/experiment.csv").set_index("setting")
    assert set(table.index) == {"usual", "own"} and table.seeds.tolist() == [2, 2]
    trained = {path.parent for path in (tmp_path / "out").glob("*/setting.json")}
    again = CliRunner().invoke(app, line, env=dict(COLUMNS="200", NO_COLOR="1", TERM="dumb"))
    assert again.exit_code == 0 and "tokens a step" not in again.stdout and "minus usual" in again.stdout
    assert len(trained) == 4 and trained == {path.parent for path in (tmp_path / "out").glob("*/setting.json")}


@pytest.mark.parametrize("algorithm", algorithms())
def test_a_function_is_a_step_weighting(algorithm):
    "Wherever a drafter has step weights, training takes a function of the steps."
    drafter = SpeculatorModel.registered_class(algorithm)

    def halves(k):
        return 0.5**k

    check_options({"step_weights": halves, "per_position_loss_weight": "fixed-exp-decay"})
    with pytest.raises(ValueError, match="per_position_loss_weight='dpace' weighs every drafted token already"):
        check_options({"step_weights": halves, "per_position_loss_weight": "dpace"})
    if "step_weights" in drafter.forward_arguments():
        kwargs = drafter.get_trainer_kwargs(step_weights=halves, loss_fn="ce")[0]
        assert kwargs["step_weights"] is halves
        assert kwargs.get("per_position_loss_weight") in (None, "fixed-exp-decay"), "a default does not replace them"
    else:
        assert algorithm in ("medusa", "mlp")


def test_the_step_weight_runner_saves_what_is_finished(tmp_path, done):
    "Counts are whole numbers, also where a shorter draft has no later positions."
    runner = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/step_weight_decay/run.py"))
    assert len(runner["contenders"]()) == 13
    for algorithm, arguments in runner["contenders"]().values():
        check_options(dict(algorithm=algorithm) | arguments)
    found = experiment(tmp_path, contenders(1, 2), seeds=2, k=1, features=tmp_path / "features")
    found.counts["at_2"] = float("nan")
    runner["save"].__globals__["HERE"] = tmp_path
    runner["save"](found, contenders(1, 2), 3)
    saved = pd.read_csv(tmp_path / "results/prompts.csv.gz")
    assert differences(saved, "steps 1", 1).difference.tolist() == [0.0, 0.0]
    sums = pd.read_csv(tmp_path / "results/counts.csv")
    assert sums.steps.tolist() == [60] * 4 and sums.at_2.isna().all()
