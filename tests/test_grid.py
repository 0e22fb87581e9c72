"""Experiments: settings × seeds, their key, what is resumed and what fails; paired differences and Student's t."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from speculators_nb.core.options import algorithms, check_options
from speculators_nb.lab import grid
from speculators_nb.lab.grid import Measured, Run, experiment, read_experiment
from speculators_nb.lab.paired import LENGTH, differences, measures, results_table, t_interval, t_quantile
from speculators_nb.models.base import SpeculatorModel

# two-sided 95 % and 99 % quantiles of Student's t (Abramowitz and Stegun, table 26.10)
TABLE = {(1, 0.95): 12.706, (2, 0.95): 4.303, (5, 0.95): 2.571, (120, 0.95): 1.980, (1, 0.99): 63.657, (9, 0.99): 3.250}


@pytest.mark.parametrize("df, level", TABLE)
def test_quantiles_of_students_t(df, level):
    assert t_quantile(df, level) == pytest.approx(TABLE[df, level], abs=6e-4)


def test_an_interval_covers_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(3, 2, (4000, 5))
    inside = [low < 3 < high for _, low, high in map(t_interval, draws)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.012)
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
    assert table.loc["c", "less a"] == "" and list(table.index) == ["a", "c"]


def run(**changes):
    usual = Run("x", "eagle3", {}, 4, 0, "features", Measured())
    return usual._replace(**changes)


def test_a_key_is_of_what_is_computed():
    first = run().key
    assert run(setting="other").key == first == run(features="elsewhere/features").key
    changed = [
        run(seed=1),
        run(k=3),
        run(algorithm="dflash"),
        run(arguments={"max_steps": 3}),
        run(features="others"),
        run(measured=Measured((2,))),
        run(measured=Measured(n_prompts=3)),
        run(arguments={"step_weights": lambda k: 0.5**k}),
        run(arguments={"step_weights": lambda k: 0.6**k}),
    ]
    assert len({first, *(r.key for r in changed)}) == 1 + len(changed)


@pytest.fixture
def done(monkeypatch):
    "Runs that train nothing: (name, how often) of what was done."
    names = []

    def do_run(run, folder):
        names.append(run.name)
        if run.arguments.get("max_steps") == 13:
            raise FloatingPointError("the loss is not finite")
        folder.mkdir(parents=True)
        about = dict(setting=run.setting, seed=run.seed, algorithm=run.algorithm, arguments=run.arguments)
        (folder / "setting.json").write_text(json.dumps(about))
        counts({run.setting: {run.seed: 1 + run.seed}}).drop(columns=["setting", "seed"]).to_csv(
            folder / "counts.csv", index=False
        )

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
    ax = found.plot("max_steps").axes[0]
    assert len(ax.collections[0].get_offsets()) == 6 and ax.get_xlabel() == "max_steps"
    assert "is longest" in ax.get_title("left")


@pytest.mark.parametrize("algorithm", algorithms())
def test_a_function_is_a_step_weighting(algorithm):
    "Wherever a drafter has step weights, training takes a function of the steps."
    drafter = SpeculatorModel.registered_class(algorithm)

    def halves(k):
        return 0.5**k

    check_options({"step_weights": halves})
    if "step_weights" in drafter.forward_arguments():
        assert drafter.get_trainer_kwargs(step_weights=halves)[0]["step_weights"] is halves
    else:
        assert algorithm in ("medusa", "mlp")


def test_the_step_weight_runner_saves_what_is_finished(tmp_path, done):
    "Counts are whole numbers, also where a shorter draft has no later positions."
    runner = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/step_weight_decay/run.py"))
    assert len(runner["contenders"]()) == 11
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
