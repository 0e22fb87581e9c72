"""Decoding, measuring and pricing from Python: arguments that make no sense (those of `generate`, of trees and of rules
are refused in test_generate.py, test_tree.py and test_acceptance_rules.py); drafters whose guesses are NaN; records of
evaluations that are torn."""

import os

import torch

from speculators_nb.cli.data_commands import device_of
from speculators_nb.cli.drafter_commands import compare
from speculators_nb.cli.drafter_commands import evaluate as evaluate_step
from speculators_nb.cli.serving import serve
from speculators_nb.decode.acceptance_rules import lenient, synthetic, tolerant
from speculators_nb.decode.generate import generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.evaluate.acceptance import bootstrap, evaluate
from speculators_nb.evaluate.calibration import expected_calibration_error, reliability_table
from speculators_nb.evaluate.comparison import evaluate_as_engine
from speculators_nb.evaluate.cost import draft_cost, expected_speedup, verifier_cost
from speculators_nb.evaluate.engine import EngineEvaluation, evaluate_engine
from speculators_nb.evaluate.prompts import UNFILLED, read_prompts
from speculators_nb.evaluate.speedup import (
    batch_verify,
    best_gamma,
    draft_schedule,
    experts_read,
    measured_speedup,
    pass_cost,
    speedups,
    step_costs,
    verify_costs,
)
from speculators_nb.evaluate.when_to_stop import FixedLength, LengthByConfidence, LengthByRates
from speculators_nb.lab.experiment import measure_heldout, settings, train_equally
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert
from speculators_nb.serve.serve_command import serve_command
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier, default_aux_layer_ids

from .harness import GOOD, RELEASE, ROOT, Case

INF, NAN = float("inf"), float("nan")
HALF = torch.tensor([0.5])
# 64 tokens, 64 positions
TARGET = Verifier.from_pretrained(str(GOOD["verifier"]), [1, 2, 3])


def gen(**args):
    return generate(TARGET, NgramDrafter(), torch.tensor([5, 6, 7]), max_new_tokens=6, **args)


def meas(**args):
    return evaluate(
        TARGET, **({"drafters": {"n-gram": NgramDrafter()}, "prompts": [[5, 6, 7]], "max_new_tokens": 8} | args)
    )


def at_home(do):
    "In the clone, where the corpus is."
    os.chdir(ROOT)
    return do()


def broken(kind, name):
    "A drafter of the release, or a new one, one of whose tensors is NaN: what training that diverges leaves behind."
    if (RELEASE / kind).exists():
        model = SpeculatorModel.from_pretrained(RELEASE / kind, verifier=GOOD["verifier"])
    else:
        model = new_drafter(kind, GOOD["verifier"], block_size=4, target_layer_ids=[1], mask_token_id=3)
    model.get_parameter(name).data.fill_(NAN)
    return model.drafter()


def decoded(drafter, temperature):
    verifier = Verifier(TARGET.model, list(drafter.aux_layer_ids))
    return evaluate(verifier, {"it": drafter}, [[5, 6, 7]], k=2, max_new_tokens=8, temperatures=(temperature,))


OF_NAN = {
    "eagle": "fusion_fc.weight",
    "eagle3": "fc.weight",
    "peagle": "fc.weight",
    "dflash": "norm.weight",
    "dflash2": "norm.weight",
    "dspark": "norm.weight",
    "xpress": "norm.weight",
    "domino": "norm.weight",
    "lilicorr": "norm.weight",
    "medusa": "lm_heads.0.weight",
    "query_only": "norm.weight",
    "mlp": "head.0.weight",
    "mtp": "mtp_layers.0.final_layernorm.weight",
}
MAKERS = {
    "generate: record": (lambda: gen(record=-1), "record=-1: must be at least 0"),
    "Sampling: top_p": (lambda: Sampling(top_p=0), "top_p=0: must be greater than 0 and at most 1"),
    "Sampling: top_k": (lambda: Sampling(top_k=-1), "top_k=-1: must be at least 0"),
    "Sampling: min_p": (lambda: Sampling(min_p=2), "min_p=2: must be at least 0 and at most 1"),
    "TokenTree: parents of fractions": (
        lambda: TokenTree(torch.tensor([1, 2]), torch.tensor([-1.0, 0.0])),
        "parents must be a row of integers, got torch.float32",
    ),
    "best_gamma: no speeds": (lambda: best_gamma([]), "speeds=\\[\\]: give a number for 0, 1, 2"),
    "best_gamma: NaN": (lambda: best_gamma([1, NAN]), "speeds=\\[1, nan\\]: give a number for 0, 1, 2"),
    "speedups: no tokens": (lambda: speedups([1, 0], 0.1), r"lengths=\[1, 0\]: a step gives more than 0 tokens"),
    "speedups: no cost": (lambda: speedups([1, 2], 0, [0, 0]), r"verify=\[0, 0\]: a step costs more than nothing"),
    "expected_speedup: no cost": (lambda: expected_speedup(2, 0, 0), "verify=0 and cost=0: a step costs more than"),
    "speedups: no lengths": (lambda: speedups([], 0.1), "lengths is empty: give tokens a step"),
    "step_costs: a fraction": (lambda: step_costs(1.5, 0.1), "k=1.5: must be a whole number"),
    "batch_verify: a fraction": (lambda: batch_verify(1.5, 1, 10), "k=1.5: must be a whole number"),
    "batch_verify: no requests": (lambda: batch_verify(3, 0, 10), "batch=0: must be at least 1"),
    "pass_cost: no ridge": (lambda: pass_cost(1, 0), "ridge=0: must be greater than 0"),
    "draft_schedule: a fraction": (lambda: draft_schedule({1: 2.5}), "best=\\{1: 2.5\\}: give draft tokens"),
    "FixedLength: a fraction": (lambda: FixedLength(1.5), "k=1.5: must be a whole number"),
    "LengthByRates: no costs": (lambda: LengthByRates([]), "costs=\\[\\]: is empty; give the costs of steps"),
    "LengthByRates: NaN": (lambda: LengthByRates([1, NAN]), "costs=\\[1, nan\\]: must be finite"),
    "LengthByRates: no memory": (lambda: LengthByRates([1, 1.1], 0), "memory=0: must be at least 1"),
    "LengthByConfidence: never": (lambda: LengthByConfidence([1, 1.1], every=0), "every=0: must be at least 1"),
    "reliability_table: no bins": (lambda: reliability_table(HALF, HALF, 0), "bins=0: must be at least 1"),
    "expected_calibration_error: nothing": (
        lambda: expected_calibration_error(HALF[:0], HALF[:0]),
        "forecast is empty: there is nothing to measure",
    ),
    "lenient: NaN": (lambda: lenient(NAN), "accept_lenience=nan must lie in"),
    "tolerant: NaN": (lambda: tolerant(1, NAN), "tolerance=nan: must not be negative"),
    "synthetic: NaN": (lambda: synthetic([NAN]), "rates \\[nan\\] must lie"),
    "draft_schedule: no sizes": (lambda: draft_schedule({}), "best=\\{\\}: give draft tokens, 0 or more"),
    "draft_schedule: no requests": (lambda: draft_schedule({0: 3}), "best=\\{0: 3\\}: give draft tokens"),
    "draft_schedule: fewer than none": (lambda: draft_schedule({1: -3}), "best=\\{1: -3\\}: give draft tokens"),
    "experts_read: none": (lambda: experts_read(1, 8, 0), "active=0 must be from 1 to experts=8"),
    "experts_read: more than there are": (lambda: experts_read(2, 4, 8), "active=8 must be from 1 to experts=4"),
    "device_of: a second processor": (lambda: device_of("cpu:1"), "device='cpu:1': torch finds 1 such device"),
    "default_aux_layer_ids: one layer": (
        lambda: default_aux_layer_ids(1),
        "num_hidden_layers=1: three distinct aux layer ids",
    ),
    "settings: no tokens": (lambda: settings("eagle3", 10**6), "k=1000000: must be"),
    "measure_heldout: an unknown domain": (
        lambda: at_home(lambda: measure_heldout({}, domains=("fre",))),
        "domains=\\('fre',\\): 'fre' is none of the corpus's. Did you mean free",
    ),
    "measure_heldout: no prompts": (lambda: measure_heldout({}, n_prompts=0), "n_prompts=0: must be at least 1"),
    "train_equally: no budget": (lambda: train_equally("x", budget=0), "budget=0: must be greater than 0"),
}
MEASURES = {
    "bootstrap: no draws": (
        lambda: bootstrap(torch.ones(3, 5).numpy(), lambda c: c[..., :1], 0),
        "draws=0: must be at least 1",
    ),
    "evaluate: no tokens": (lambda: meas(k=0), "k=0: acceptance needs at least one drafted token"),
    "evaluate: temperature": (lambda: meas(temperatures=(0.0, NAN)), "temperatures=\\(0.0, nan\\): must be finite"),
    "evaluate: no mass": (lambda: meas(temperatures=(1.0,), top_p=0), "top_p=0: must be greater than 0 and at most 1"),
    "evaluate: a filter of greedy decoding": (
        lambda: meas(temperatures=(0.0,), top_p=0.9),
        "top_p=0.9: has no effect with temperatures=\\(0.0,\\), which is greedy",
    ),
    "evaluate_as_engine: a filter of greedy decoding": (
        lambda: evaluate_as_engine(TARGET, {"n": NgramDrafter()}, [[5]], top_k=3),
        "top_k=3: has no effect with temperatures=\\(0.0,\\), which is greedy",
    ),
    "evaluate: a negative seed": (lambda: meas(seed=-1), "seed=-1: must be at least 0"),
    "evaluate: no drafters": (lambda: meas(drafters={}), "drafters is empty: there is nothing to measure"),
    "evaluate: no prompts": (lambda: meas(prompts=[]), "prompts is empty: there is nothing to measure"),
    "evaluate: no room": (
        lambda: meas(k=7, max_new_tokens=3),
        "no step drafted k=7 tokens: raise max_new_tokens above 8",
    ),
    "evaluate: a rule": (lambda: meas(rule="x"), "rule='x': is not known"),
    "evaluate_as_engine: no tokens": (
        lambda: evaluate_as_engine(TARGET, {"n": NgramDrafter()}, [[5]], k=0),
        "k=0: acceptance needs",
    ),
    "evaluate_engine: nobody at once": (
        lambda: evaluate_engine("http://127.0.0.1:9", [], concurrency=0),
        "concurrency=0: must be at least 1",
    ),
    "verifier_cost: no repeats": (lambda: verifier_cost(TARGET, repeats=0), "repeats=0: must be at least 1"),
    "verifier_cost: no context": (lambda: verifier_cost(TARGET, context=0), "context=0: must be at least 1"),
    "draft_cost: no prompts": (
        lambda: draft_cost(TARGET, NgramDrafter(), []),
        "prompts is empty: there is nothing to measure",
    ),
    "draft_cost: answers shorter than a draft": (
        lambda: draft_cost(TARGET, NgramDrafter(), [[5]], k=4, max_new_tokens=2),
        "max_new_tokens=2: no step of an answer drafts k=4 tokens",
    ),
    "draft_cost: no draft": (
        lambda: draft_cost(TARGET, NgramDrafter(), [[5]], k=0),
        "no step of an answer drafts k=0 tokens.*a k from 1 on",
    ),
    "verify_costs: no rounds": (lambda: verify_costs(TARGET, 2, rounds=0), "rounds=0: must be at least 1"),
    "measured_speedup: no prompts": (lambda: measured_speedup(TARGET, NgramDrafter(), []), "prompts is empty"),
    "measured_speedup: hot": (
        lambda: measured_speedup(TARGET, NgramDrafter(), [[5]], temperature=INF),
        "temperature=inf: must be finite",
    ),
    "speedups: costs too few": (lambda: speedups([1, 1.5], 0.1, [1]), "verify has 1 costs for 2 lengths"),
    "serve_command: a port": (lambda: serve_command(GOOD["drafter"], port=0), "port=0: must be at least 1"),
    "serve_command: no length": (lambda: serve_command(GOOD["drafter"], max_model_len=-1), "max_model_len=-1: must be"),
    "serve: a number for a path": (lambda: serve(3), "checkpoint=3: must name a file or a folder"),
    "compare: two of a name": (lambda: compare(["a/x", "b/x"]), "runs='b/x': another run is called 'x', too"),
    "evaluate step: a temperature": (
        lambda: evaluate_step(str(GOOD["drafter"]), "x", temperature=[-1.0]),
        "temperature=-1.0: must be",
    ),
    "convert: a billion tokens": (
        lambda: convert(GOOD["drafter"], "x", GOOD["verifier"], speculative_tokens=10**9),
        "speculative_tokens=1000000000: must be",
    ),
    "convert: a config that is a list": (
        lambda: convert(GOOD["drafter"], "x", GOOD["verifier"], config=[1]),
        "config=\\[1\\]: must be a mapping",
    ),
}
SETTINGS = {"summary.csv": "drafter,temperature\n", "positions.csv": "", "performance.csv": "", "requests.jsonl": ""}
FILES = {  # files in a folder, what is done with it, what must be answered
    "EngineEvaluation: cut off": (
        {**SETTINGS, "settings.json": '{"a'},
        EngineEvaluation.read,
        "settings.json: not JSON",
    ),
    "read_prompts: no question": (
        {"p.jsonl": '{"text": "x"}\n'},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl, row 1: a row has none of messages, conversations, .*, input_ids, turns, question",
    ),
    "read_prompts: no turn": (
        {"p.jsonl": '{"question_id": 1, "category": "math", "turns": []}\n'},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl, row 1: turns=\\[\\]: expected a list of texts, as rows of MT-Bench have there; mend the row",
    ),
    "read_prompts: turns that are messages": (
        {"p.jsonl": '{"turns": [{"role": "user", "content": "a"}]}\n'},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl, row 1: turns=.*'role'.*: expected a list of texts",
    ),
    "read_prompts: a function that is a list": (
        {"p.jsonl": '{"task_id": "HumanEval/0", "prompt": ["def f():"], "entry_point": "f"}\n'},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl, row 1: prompt=.*: expected a text, as rows of HumanEval have there",
    ),
    "read_prompts: an empty article": (
        {"p.jsonl": '{"article": " ", "highlights": "h"}\n'},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl, row 1: article=' ': expected a text, as rows of CNN/DailyMail have there",
    ),
    "read_prompts: not filled in": (
        {"p.jsonl": {"turns": [UNFILLED], "category": "rag"}},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl: no prompts; is the source empty",
    ),
}

CASES = [
    *(
        Case(
            f"NaN at temperature {t}: {kind}",
            lambda folder, kind=kind, name=name, t=t: decoded(broken(kind, name), t),
            (
                f"Drafter: the {'probabilities' if t else 'logits'} to (draw|choose) a token from (is|are) NaN.*check "
                "weights and dtype"
            ),
        )
        for kind, name in OF_NAN.items()
        for t in (0.0, 1.0)
    ),
    *(Case(name, lambda folder, make=make: make(), expect) for name, (make, expect) in (MAKERS | MEASURES).items()),
    *(Case(name, do, expect, files) for name, (files, do, expect) in FILES.items()),
    Case(
        "evaluate over an evaluation, in the shell",
        "evaluate {drafter} {corpus} --verifier {verifier} --output-dir {here}",
        "output_dir=.*holds a result already .*name another folder, or give --overwrite",
        {"positions.csv": "x\n"},
    ),
    Case(
        "compare over a comparison, in the shell",
        "compare {here} --output-dir {here}",
        "holds a result already .*give --overwrite",
        {"comparison.png": b"x"},
    ),
]
