"""A report of the demo with every section, made in seconds: the shipped verifier, n-gram drafting, and an EAGLE-3 that
was not trained. And the page of an experiment's runs: the shipped drafter beside one that was not trained."""

import json
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoTokenizer

from speculators_nb.core.provenance import write_provenance
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.evaluate.acceptance import evaluate
from speculators_nb.evaluate.prompts import encode_prompts, read_prompts
from speculators_nb.lab import demo_report as parts
from speculators_nb.lab.experiment import settings, shipped_drafter
from speculators_nb.lab.experiment_page import write_runs_page
from speculators_nb.report.page import page_html
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier

DATA = Path(__file__).parents[1] / "data"


def small_report(folder):
    "The page, and the recorded answers that are in it"
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tiny-verifier")
    model = Verifier.from_pretrained(DATA / "tiny-verifier")
    questions = read_prompts(DATA / "corpus/heldout.jsonl", first=2)
    ids, copier = encode_prompts(questions, tokenizer), NgramDrafter()
    drafters = {parts.PLAIN: NoDrafter(), "n-gram": copier}
    measured = evaluate(model, drafters, ids, k=3, max_new_tokens=24, domains=[q.domain for q in questions])
    answers = generate(model, copier, ids, k=3, max_new_tokens=24, record=5)
    answers = {question.messages[-1]["content"]: answer for question, answer in zip(questions, answers)}
    drafter = new_drafter("eagle3", DATA / "tiny-verifier", **settings("eagle3", 3))
    kwargs, _ = drafter.get_trainer_kwargs(**settings("eagle3", 3))
    row = {"document_ids": torch.tensor([[0] * 6 + [1] * 5]), "loss_mask": torch.ones(1, 11, dtype=torch.bool)}
    log = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "eval_loss": [2.1, 1.2], "eval_mean_length": [1.0, 1.5]})
    parts.training_figures(folder, drafter, row, log.set_index("step"), **kwargs)
    budget = parts.Budget(8, 1000, 2, 3000.0, 1e6, 640_000, 2_000_000, {"training": 3.0})
    sections = [
        parts.answers_section(answers, tokenizer, "n-gram"),
        parts.acceptance_section(measured),
        *parts.training_sections(folder, drafter, row, **kwargs),
        parts.budget_section(budget),
        parts.again_section(["make demo"], None),
    ]
    numbers = parts.headlines(measured, "n-gram")
    return page_html("A drafter", sections, {"verifier": "tiny"}, numbers=numbers), list(answers.values())


def small_runs_page(folder):
    "The page's path; its runs have made-up counts"
    for name, steps in (("shipped", 10), ("untrained", 16)):
        run = folder / name
        run.mkdir()
        about = dict(setting=name, seed=0, algorithm="eagle3", arguments={})
        (run / "setting.json").write_text(json.dumps(about))
        rows = dict(k=2, prompt=range(2), domain="free", steps=steps, accepted=12, at_1=9, at_2=3)
        pd.DataFrame(rows).to_csv(run / "counts.csv", index=False)
        write_provenance(run, "experiment", {}, dict(verifier=DATA / "tiny-verifier"))
    shipped_drafter(folder / "shipped/drafter")
    untrained = new_drafter("eagle3", DATA / "tiny-verifier", **settings("eagle3", 2))
    untrained.save_pretrained(folder / "untrained/drafter")
    return write_runs_page(folder)
