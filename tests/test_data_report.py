"""The data report: what it counts, what it warns of, and that its page needs nothing else. And the page of a run."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from datasets import Dataset

from speculators_nb.data.prepare import prepare_data
from speculators_nb.data.prepared_folder import load_prepared
from speculators_nb.evaluate.prompts import read_prompts
from speculators_nb.report.data_report import DataReport, Repeats, coverage, plot_domains, report, signature
from speculators_nb.report.page import Headline, Section, image, page_html
from speculators_nb.report.run_report import plot_accuracy, training_section, write_run_report

TINY = Path(__file__).parents[1] / "data/tiny-verifier"


def talk(question, answer="It is 4.", **more):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages} | more


def prepared(folder, rows, **options):
    return prepare_data(rows, TINY, folder, num_proc=1, shuffle=False, **{"max_length": 64} | options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log", ['""\n', "\n"])
def test_a_run_that_logged_nothing_has_no_curve(tmp_path, log):
    "It was shorter than logging_steps, without held-out rows; releases of pandas write an empty table in two ways."
    (tmp_path / "training_log.csv").write_text(log)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 2, "num_train_epochs": 1}))
    section = training_section("train", tmp_path, {})
    assert section.figures == {} and "No loss was logged" in section.text


def test_what_it_warns_of(tmp_path):
    rows = [talk(f"{i} + 2?", f"The answer is {i + 2}.", domain="sums") for i in range(9)]
    rows += [talk("What does <|im_end|> do?", "It ends. " * 40, source="tokens"), {"messages": []}]
    found = DataReport(prepared(tmp_path / "p", [*rows, *rows[:2]], dedup=False, val_fraction=0.0))
    said = "\n".join(found.warnings)
    for words in (
        "8% of the rows end inside an answer, cut at max_length=64",
        "8% of the conversations gave no row: no messages",
        "17% of the rows are there twice",
        "1 conversations spell control tokens",
        "There are no validation rows",
    ):
        assert words in said
    assert found.tables["Domains, before the split"]["rows"].to_dict() == {"sums": 11, "tokens": 1}
    assert plot_domains(pd.DataFrame({"tokens": 4, "trained": 2}, index=[r"$\x_$"])).axes[0].get_title(loc="left")
    assert found.tables["Seen before"]["rows"].tolist() == [2, 2, 2, 0, 0]


def test_a_sound_folder_has_no_warnings(tmp_path):
    rows = [talk(f"{i} + 2?", f"{i} and 2 make {i + 2}.") for i in range(20)]
    assert DataReport(prepared(tmp_path / "p", rows, val_fraction=0.2)).warnings == []


def test_held_out_questions_of_the_training_rows(tmp_path):
    rows = [talk(f"{i} + 2?", f"It is {i + 2}.") for i in range(8)] + [talk("0 + 2?", "Two."), talk("1 + 2?", "Three.")]
    found = DataReport(prepared(tmp_path / "p", rows, val_fraction=0.2))
    assert found.warnings[0].startswith("100% of the validation rows have a question of the training rows")


def trained_ids(rows):
    return np.concatenate([np.asarray(row["input_ids"])[np.asarray(row["loss_mask"])] for row in rows])


def test_coverage_is_counted_on_the_rows(tmp_path):
    "Held-out rows have a token that no training row has."
    rows = [talk(f"{i} + 2?", f"It is {'A' if i < 20 else 'Z'}.") for i in range(40)]
    made = prepared(tmp_path / "p", rows, val_fraction=0.5)
    table = coverage(made)
    expected = np.isin(trained_ids(made.val), trained_ids(made.train)).mean()
    assert 0.5 < expected < 1 and table["held out"].tolist() == pytest.approx([expected] * len(table))
    assert table["train"].tolist() == [1.0] * len(table)


def test_nearly_the_same_answers():
    rng, repeats = np.random.default_rng(0), Repeats()
    mask = np.ones(300, bool)
    for i in range(50):
        repeats.add(rng.integers(3000, size=300), mask, False)
    assert repeats.n["nearly"] == 0
    text = rng.integers(3000, size=300)
    for i in range(10):
        changed = text.copy()
        changed[i * 20] += 1
        repeats.add(changed, mask, False)
    assert repeats.n["nearly"] >= 7 and repeats.n["answers"] == 0
    assert signature(np.arange(7)) is None


def test_the_page_and_its_tables(tmp_path, monkeypatch):
    made = prepared(tmp_path / "p", [talk(f"{i} <b>+</b> 2?") for i in range(5)])
    monkeypatch.chdir(made.folder)
    page = report(".")
    assert page == report(made.folder) == tmp_path / "p-report/report.html"
    text = page.read_text()
    assert text.count("data:image/png") == 2 and "<b>" not in text and "src=" in text
    assert {f.name for f in page.parent.glob("*.csv")} >= {"languages.csv", "share-covered.csv", "seen-before.csv"}
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == sorted(p.name for p in made.folder.iterdir())


def test_a_folder_of_the_upstream_library(tmp_path):
    "It has neither a report nor the name of its verifier."
    Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3, "loss_mask": [[0, 1, 1]] * 3}).save_to_disk(tmp_path / "p")
    found = DataReport(load_prepared(tmp_path / "p"))
    assert "languages are left out" in found.sections[2].text
    assert any("67% of the rows are there twice" in line for line in found.warnings)


def test_questions_that_were_trained_on_are_warned_of(tmp_path, caplog):
    rows = [talk(f"{i} + 2?", f"It is {i + 2}.") for i in range(10)]
    assert len(read_prompts(prepared(tmp_path / "p", rows, val_fraction=0.2).folder)) == 2 and not caplog.text
    assert len(read_prompts(prepared(tmp_path / "q", rows, val_fraction=0.0).folder)) == 10
    assert "no question of it is held out (prepare with val_fraction)" in caplog.text


def test_nothing_is_trained(tmp_path):
    made = prepared(tmp_path / "p", [talk("2 + 2?")])
    Dataset.from_dict({"input_ids": [[5, 6]], "loss_mask": [[0, 0]], "seq_len": [2]}).save_to_disk(tmp_path / "q")
    for recorded in ({}, {"model": made.config["model"]}):  # upstream records nothing
        (tmp_path / "q/data_config.json").write_text(json.dumps(recorded))
        assert DataReport(load_prepared(tmp_path / "q")).warnings[0].startswith("No token is trained")


def test_what_is_first_on_a_page_and_what_is_escaped():
    table = pd.DataFrame({"domain": ["<script>"], "rows": [3]})
    section = Section("Acceptance", "a < b\n\nc", {"<b>domains</b>": table}, {"bars": plt.figure(figsize=(1, 1))})
    numbers = [Headline("<2.9", "tokens a step", "One without a drafter.")]
    page = page_html("A drafter", [section], {"verifier": "tiny"}, ["20 prompts are few"], "Three.", numbers)
    assert "&lt;script&gt;" in page and "&lt;b&gt;" in page and "<p>a &lt; b</p><p>c</p>" in page
    order = [page.index(word) for word in ("Three.", "20 prompts are few", "&lt;2.9</strong>", "verifier", "<h2")]
    assert order == sorted(order) and page.count("<img") == 1 and "http" not in page and "<script" not in page
    with pytest.raises(ValueError, match="'no picture': no PNG"):
        image("no picture", b"GIF89a")


def test_the_page_of_a_run(tmp_path):
    log = pd.DataFrame({"step": [10, 20], "loss": [5.0, 2.5], "eval_loss": [None, 2.8], "eval_full_acc_0": [None, 0.5]})
    log.to_csv(tmp_path / "training_log.csv", index=False)
    state = {"global_step": 30, "num_train_epochs": 3, "best_global_step": 30, "best_metric": 2.8}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    section = training_section("train", tmp_path, {"algorithm": "eagle3"})
    assert section.figures["accuracy"].axes[0].get_title(loc="left") == "Position 1 ends at 50%"
    by_length = dict(algorithm="eagle3", extra=["metric_for_best_model=eval_mean_length"])
    assert "step 30 (mean_length 2.8000)" in training_section("train", tmp_path, by_length).text
    assert "step 30 (loss 2.8000)" in section.text and plot_accuracy(log[["step", "loss"]]) is None
    # a block's slot 0 is no draft token; P-EAGLE has accuracies alone
    block = {"eval_accept_1": [0.5], "eval_accept_2": [0.3], "eval_position_1_acc": [0.2]}
    for metrics in (block, {"eval_position_0_acc": [0.5]}):
        axes = plot_accuracy(pd.DataFrame({"step": [10]} | metrics)).axes[0]
        assert axes.get_title(loc="left") == "Position 1 ends at 50%" and axes.lines[0].get_label() == "position 1"
    read = {"data_dir": {"path": "features", "sha256": "1f2e" * 16}}
    train = dict(command="train", output=str(tmp_path), arguments={}, inputs=read, done=True, seconds=61.2)
    check = {"command": "check", "text": "vLLM can serve this drafter.", "done": True}
    left = {"command": "evaluate", "skipped": "vllm was not found"}
    gone = dict(command="train", output=str(tmp_path / "renamed"), arguments={}, done=True)
    measured = dict(command="evaluate", output=str(tmp_path / "e"), done=True)
    (tmp_path / "e").mkdir()
    made = {"git_commit": "0" * 40, "package_versions": {"torch": "1.0"}}
    (tmp_path / "e/provenance.json").write_text(json.dumps({"reproducibility": made, "inputs": {}}))
    (tmp_path / "e/skipped.csv").write_text("prompt,why\n7,too long\n")
    (tmp_path / "e/summary.csv").write_text("drafter,domain,mean_length\neagle3,NA,2.5\n")
    stages = {"train": train, "gone": gone, "check": check, "e.vllm": left, "e": measured}
    (tmp_path / "run.json").write_text(json.dumps({"stages": stages}))
    page = write_run_report(tmp_path, ["train", "check", "e", "e.vllm"]).read_text()
    for text in ("61.2 s", "1f2e1f2e1f2e1f2e", "vLLM can serve", "e.vllm: vllm was not found"):
        assert text in page
    assert "too long" in page and "<td>NA</td>" in page
    assert "gone" not in page and "0" * 40 in page and "<td>1.0</td>" in page  # the versions of the stage, not today's
