"""Decoding, measuring and pricing from Python: draft lengths, temperatures, trees, prompts, proposals and rules that
make no sense; drafters whose guesses are NaN;
records of evaluations that are torn."""

import os

import torch

from speculators_nb.cli.data_commands import device_of
from speculators_nb.cli.drafter_commands import compare
from speculators_nb.cli.drafter_commands import evaluate as evaluate_step
from speculators_nb.cli.serving import serve
from speculators_nb.decode.acceptance_rules import fly, lenient, synthetic, tolerant
from speculators_nb.decode.generate import generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.evaluate.acceptance import acceptance_table, bootstrap, evaluate
from speculators_nb.evaluate.calibration import expected_calibration_error, reliability_table
from speculators_nb.evaluate.comparison import compare_runs, evaluate_as_engine
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
from speculators_nb.models.convert import convert, detect, export_native
from speculators_nb.models.formats import NativeCheckpoint
from speculators_nb.nn.anchors import select_anchors
from speculators_nb.serve.serve_command import serve_command
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier, check_aux_layer_ids, default_aux_layer_ids

from .harness import GOOD, RELEASE, ROOT, Case

INF, NAN = float("inf"), float("nan")
HALF = torch.tensor([0.5])
# 64 tokens, 64 positions
TARGET = Verifier.from_pretrained(str(GOOD["verifier"]), [1, 2, 3])


class Proposes:
    "A drafter that proposes what it is given."

    aux_layer_ids = ()

    def __init__(self, proposal):
        self.proposal = proposal

    def reset(self):
        pass

    def propose(self, tokens, features, k, sampling):
        return self.proposal() if callable(self.proposal) else self.proposal


def gen(drafter=None, prompt=(5, 6, 7), **args):
    return generate(TARGET, drafter or NgramDrafter(), torch.tensor(prompt), **({"max_new_tokens": 6} | args))


def meas(**args):
    return evaluate(
        TARGET, **({"drafters": {"n-gram": NgramDrafter()}, "prompts": [[5, 6, 7]], "max_new_tokens": 8} | args)
    )


def long(*tokens):
    return torch.tensor(tokens, dtype=torch.long)


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


ARGUMENTS = {  # arguments of generate -> what must be answered
    "k: negative": (dict(k=-1), "k=-1: must be at least 0"),
    "k: too many": (dict(k=10**9), "k=1000000000: must be at least 0 and at most 4096"),
    "k: a fraction": (dict(k=1.5), "k=1.5: must be a whole number"),
    "k: true": (dict(k=True), "k=True: must be a whole number"),
    "k: text": (dict(k="3"), "k='3': is text, and must be a whole number"),
    "k: NaN": (dict(k=NAN), "k=nan: must be a whole number"),
    "k: nothing": (dict(k={}), "k={}: must be a whole number"),
    "max_new_tokens: none": (dict(max_new_tokens=0), "max_new_tokens=0: must be at least 1"),
    "max_new_tokens: negative": (dict(max_new_tokens=-5), "max_new_tokens=-5: must be at least 1"),
    "max_new_tokens: a trillion": (dict(max_new_tokens=10**12), "max_new_tokens=1000000000000: must be .*at most"),
    "max_new_tokens: text": (dict(max_new_tokens="9"), "max_new_tokens='9': is text"),
    "max_new_tokens: nothing": (dict(max_new_tokens=None), "max_new_tokens=None: is missing"),
    "rule: unknown": (dict(rule="typcial"), "rule='typcial': is not known; choose standard.*Did you mean typical"),
    "rule: a number": (dict(rule=3), "rule=3: is no word; choose standard"),
    "rule: nothing": (dict(rule=None), "rule=None: is missing"),
    "rule: FLy of one token": (dict(rule="fly", k=1), "rule='fly': looks at .*k=1 drafts none; draft at least 2"),
    "record: negative": (dict(record=-1), "record=-1: must be at least 0"),
    "record: true": (dict(record=True), "record=True: must be a whole number"),
    "prompt: empty": (dict(prompt=[]), "prompt_ids is empty: the verifier needs at least one token|floating"),
    "prompt: two rows": (dict(prompt=[[1, 2], [3, 4]]), "prompt_ids has shape \\(2, 2\\): pass the ids of one request"),
    "prompt: beyond the vocabulary": (
        dict(prompt=[5, 64]),
        "prompt_ids holds 5…64, but the verifier.* has 64 tokens: is this its tokenizer",
    ),
    "prompt: negative": (dict(prompt=[-1, 5]), "prompt_ids holds -1…5, but the verifier.* has 64"),
    "prompt: longer than the context": (
        dict(prompt=[5] * 64),
        "the prompt has 64 tokens and the verifier's context 64: no room is left",
    ),
}
SAMPLING = {
    "temperature: negative": (dict(temperature=-1), "temperature=-1: must be at least 0"),
    "temperature: NaN": (dict(temperature=NAN), "temperature=nan: must be finite"),
    "temperature: infinite": (dict(temperature=INF), "temperature=inf: must be finite"),
    "temperature: text": (dict(temperature="0"), "temperature='0': is text"),
    "temperature: true": (dict(temperature=True), "temperature=True: must be a number"),
    "top_p: none": (dict(top_p=0), "top_p=0: must be greater than 0 and at most 1"),
    "top_p: above 1": (dict(top_p=1.1), "top_p=1.1: must be greater than 0 and at most 1"),
    "top_p: NaN": (dict(top_p=NAN), "top_p=nan: must be finite"),
    "top_k: negative": (dict(top_k=-1), "top_k=-1: must be at least 0"),
    "top_k: a fraction": (dict(top_k=2.5), "top_k=2.5: must be a whole number"),
    "top_k: true": (dict(top_k=True), "top_k=True: must be a whole number"),
    "min_p: above 1": (dict(min_p=2), "min_p=2: must be at least 0 and at most 1"),
    "min_p: text": (dict(min_p="a"), "min_p='a': is text"),
}
TREES = {
    "tokens of fractions": (
        lambda: TokenTree(torch.tensor([1.5]), long(-1)),
        "tokens must be a row of integers, got torch.float32",
    ),
    "tokens in rows": (
        lambda: TokenTree(long(1, 2).view(1, 2), long(-1, 0)),
        "tokens must be a row of integers.*shape \\(1, 2\\)",
    ),
    "a parent too few": (
        lambda: TokenTree(long(1, 2), long(-1)),
        "parents has shape \\(1,\\), but there are 2 tokens: give one parent for each",
    ),
    "a parent behind its child": (
        lambda: TokenTree(long(1, 2), long(1, -1)),
        "parents\\[0\\]=1 must be -1 or smaller than 0: list every parent",
    ),
    "its own parent": (lambda: TokenTree(long(1, 2), long(-1, 1)), "parents\\[1\\]=1 must be -1 or smaller than 1"),
    "a parent below -1": (lambda: TokenTree(long(1), long(-2)), "parents\\[0\\]=-2 must be -1 or smaller"),
    "parents of fractions": (
        lambda: TokenTree(long(1, 2), torch.tensor([-1.0, 0.0])),
        "parents must be a row of integers, got torch.float32",
    ),
    "laws for another number": (
        lambda: TokenTree(long(1, 2), long(-1, 0), torch.ones(1, 8)),
        "probs has shape \\(1, 8\\), but there are 2 tokens",
    ),
    "a law that is a row": (lambda: TokenTree(long(1), long(-1), torch.ones(8)), "probs has shape \\(8,\\)"),
    "a token beyond its law": (
        lambda: TokenTree.chain([9], torch.ones(1, 8)),
        "tokens.0.=9 is outside the vocabulary of 8.*never mapped",
    ),
    "a negative token": (
        lambda: TokenTree.chain([-1]).check_vocabulary(8),
        "tokens.0.=-1 is outside the vocabulary of 8.*never mapped",
    ),
    "a token beyond the vocabulary": (
        lambda: TokenTree.chain([3, 8]).check_vocabulary(8),
        "tokens.1.=8 is outside the vocabulary of 8.*never mapped",
    ),
}
PROPOSALS = {
    "a token beyond the vocabulary": (
        lambda: TokenTree.chain([64]),
        "tokens.0.=64 is outside the vocabulary of 64.*never mapped",
    ),
    "a negative token": (lambda: TokenTree.chain([-1]), "tokens.0.=-1 is outside the vocabulary of 64.*never mapped"),
    "laws over another vocabulary": (
        lambda: TokenTree.chain([1], torch.full((1, 8), 1 / 8)),
        "probabilities over 8 tokens, the verifier has 64",
    ),
    "a list": (lambda: [1, 2], "TypeError: the drafter proposed a list: `propose` must return a TokenTree"),
    "nothing": (lambda: None, "TypeError: the drafter proposed a NoneType: `propose` must return"),
}
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
    "NgramDrafter: none": (lambda: NgramDrafter(0, 3), "min_n=0: must be at least 1"),
    "NgramDrafter: crossed": (lambda: NgramDrafter(5, 3), "min_n=5: must be at most max_n=3; lower it"),
    "NgramDrafter: a fraction": (lambda: NgramDrafter(1.5), "min_n=1.5: must be a whole number, e.g. 1"),
    "NgramDrafter: NaN": (lambda: NgramDrafter(1, NAN), "max_n=nan: must be a whole number, e.g. 5"),
    "SuffixDrafter: no depth": (lambda: SuffixDrafter(1), "depth=1: must be at least 2"),
    "SuffixDrafter: a fraction": (lambda: SuffixDrafter(depth=2.5), "depth=2.5: must be a whole number, e.g. 24"),
    "SuffixDrafter: half a request": (lambda: SuffixDrafter(max_requests=0.5), "max_requests=0.5: must be a whole"),
    "SuffixDrafter: any number of tokens": (lambda: SuffixDrafter(factor=INF), "factor=inf: must be finite"),
    "SuffixDrafter: NaN": (lambda: SuffixDrafter(min_prob=NAN), "min_prob=nan: must be finite"),
    "fly: a fraction": (lambda: fly(1.5), "window_size=1.5: must be a whole number, e.g. 6"),
    "fly: NaN": (lambda: fly(2, NAN), "entropy_threshold=nan: must not be negative"),
    "fly: a fraction of tokens": (lambda: fly(2, 0.3, 2.5), "entropy_top_k=2.5: must be a whole number"),
    "tolerant: a fraction": (lambda: tolerant(1.5), "accept_k=1.5: must be a whole number"),
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
    "lenient: 0": (lambda: lenient(0), "accept_lenience=0 must lie in"),
    "lenient: NaN": (lambda: lenient(NAN), "accept_lenience=nan must lie in"),
    "tolerant: nobody": (lambda: tolerant(0), "accept_k=0: must be at least 1"),
    "tolerant: negative": (lambda: tolerant(1, -1.0), "tolerance=-1.0: must not be negative"),
    "tolerant: NaN": (lambda: tolerant(1, NAN), "tolerance=nan: must not be negative"),
    "synthetic: rising": (
        lambda: synthetic([0.1, 0.5]),
        "rates \\[0.1, 0.5\\] must lie in \\[0, 1\\] and not increase",
    ),
    "synthetic: NaN": (lambda: synthetic([NAN]), "rates \\[nan\\] must lie"),
    "draft_schedule: no sizes": (lambda: draft_schedule({}), "best=\\{\\}: give draft tokens, 0 or more"),
    "draft_schedule: no requests": (lambda: draft_schedule({0: 3}), "best=\\{0: 3\\}: give draft tokens"),
    "draft_schedule: fewer than none": (lambda: draft_schedule({1: -3}), "best=\\{1: -3\\}: give draft tokens"),
    "experts_read: none": (lambda: experts_read(1, 8, 0), "active=0 must be from 1 to experts=8"),
    "experts_read: more than there are": (lambda: experts_read(2, 4, 8), "active=8 must be from 1 to experts=4"),
    "device_of: unknown": (lambda: device_of("foo"), "device='foo': is no device; choose cpu"),
    "device_of: the tenth": (
        lambda: device_of("cuda:9"),
        "device='cuda:9': torch finds .* such device.* on this machine",
    ),
    "device_of: of no memory": (lambda: device_of("meta"), "device='meta': is no device"),
    "device_of: a second processor": (lambda: device_of("cpu:1"), "device='cpu:1': torch finds 1 such device"),
    "check_aux_layer_ids: none": (lambda: check_aux_layer_ids([], 4), "aux_layer_ids=\\[\\]: empty"),
    "check_aux_layer_ids: beyond": (
        lambda: check_aux_layer_ids([5], 4),
        "aux_layer_ids=\\[5\\]: outside \\[0, 4\\]; the verifier has 4 layers",
    ),
    "check_aux_layer_ids: falling": (lambda: check_aux_layer_ids([2, 1], 4), "not ascending"),
    "default_aux_layer_ids: one layer": (
        lambda: default_aux_layer_ids(1),
        "num_hidden_layers=1: three distinct aux layer ids",
    ),
    "select_anchors: no anchors": (
        lambda: select_anchors(torch.ones(8).bool(), torch.zeros(8).long(), 2, 0),
        "max_anchors=0: at least one block is needed",
    ),
    "select_anchors: a block beyond the row": (
        lambda: select_anchors(torch.ones(8).bool(), torch.zeros(8).long(), 9, 2),
        "block_size=9 does not fit into a row of 8 positions",
    ),
    "settings: no tokens": (lambda: settings("eagle3", 10**6), "k=1000000: must be"),
    "measure_heldout: an unknown domain": (
        lambda: at_home(lambda: measure_heldout({}, domains=("fre",))),
        "domains=\\('fre',\\): 'fre' is none of the corpus's. Did you mean free",
    ),
    "measure_heldout: no prompts": (lambda: measure_heldout({}, n_prompts=0), "n_prompts=0: must be at least 1"),
    "train_equally: no budget": (lambda: train_equally("x", budget=0), "budget=0: must be greater than 0"),
    "train_equally: NaN": (lambda: train_equally("x", budget=NAN), "budget=nan: must be finite"),
}
MEASURES = {
    "evaluate: no tokens": (lambda: meas(k=0), "k=0: acceptance needs at least one drafted token"),
    "evaluate: too many": (lambda: meas(k=5000), "k=5000: must be at least 0 and at most 4096"),
    "evaluate: temperature": (lambda: meas(temperatures=(0.0, NAN)), "temperatures=\\(0.0, nan\\): must be finite"),
    "evaluate: no mass": (lambda: meas(temperatures=(1.0,), top_p=0), "top_p=0: must be greater than 0 and at most 1"),
    "evaluate: half a token": (lambda: meas(temperatures=(1.0,), top_k=0.5), "top_k=0.5: must be a whole number"),
    "evaluate: min_p": (lambda: meas(temperatures=(1.0,), min_p=-0.1), "min_p=-0.1: must be at least 0 and at most 1"),
    "evaluate: a filter of greedy decoding": (
        lambda: meas(temperatures=(0.0, 0), top_p=0.9),
        "top_p=0.9: has no effect with temperatures=\\(0.0, 0\\), which is greedy",
    ),
    "evaluate_as_engine: a filter of greedy decoding": (
        lambda: evaluate_as_engine(TARGET, {"n": NgramDrafter()}, [[5]], top_k=3),
        "top_k=3: has no effect with temperatures=\\(0.0,\\), which is greedy",
    ),
    "evaluate: a negative seed": (lambda: meas(seed=-1), "seed=-1: must be at least 0"),
    "evaluate: no drafters": (lambda: meas(drafters={}), "drafters is empty: there is nothing to measure"),
    "evaluate: no prompts": (lambda: meas(prompts=[]), "prompts is empty: there is nothing to measure"),
    "evaluate: a domain too few": (lambda: meas(domains=[]), "0 domains for 1 prompts: give one for each"),
    "evaluate: no room": (
        lambda: meas(k=7, max_new_tokens=3),
        "no step drafted k=7 tokens: raise max_new_tokens above 8",
    ),
    "evaluate: a rule": (lambda: meas(rule="x"), "rule='x': is not known"),
    "evaluate_as_engine: no tokens": (
        lambda: evaluate_as_engine(TARGET, {"n": NgramDrafter()}, [[5]], k=0),
        "k=0: acceptance needs",
    ),
    "evaluate_as_engine: an output of nothing": (
        lambda: evaluate_as_engine(TARGET, {"n": NgramDrafter()}, [[5]], max_new_tokens=0),
        "max_new_tokens=0: must be",
    ),
    "evaluate_engine: load": (
        lambda: evaluate_engine("http://127.0.0.1:9", [], load="wrk"),
        "load='wrk': is not known; choose requests or guidellm",
    ),
    "evaluate_engine: nobody at once": (
        lambda: evaluate_engine("http://127.0.0.1:9", [], concurrency=0),
        "concurrency=0: must be at least 1",
    ),
    "evaluate_engine: a length": (
        lambda: evaluate_engine("http://127.0.0.1:9", [], k=2),
        "k and .* are decided when a server starts, http://127.0.0.1:9 runs already",
    ),
    "evaluate_engine: no prompts": (
        lambda: evaluate_engine("http://127.0.0.1:9", []),
        "no prompts; is the source empty",
    ),
    "acceptance_table: nothing": (lambda: acceptance_table([], 3), "no generations: nothing to measure"),
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
    "draft_cost: negative": (lambda: draft_cost(TARGET, NgramDrafter(), [[5]], k=-1), "k=-1: must be at least 0"),
    "verify_costs: no rounds": (lambda: verify_costs(TARGET, 2, rounds=0), "rounds=0: must be at least 1"),
    "measured_speedup: no prompts": (lambda: measured_speedup(TARGET, NgramDrafter(), []), "prompts is empty"),
    "measured_speedup: hot": (
        lambda: measured_speedup(TARGET, NgramDrafter(), [[5]], temperature=INF),
        "temperature=inf: must be finite",
    ),
    "speedups: costs too few": (lambda: speedups([1, 1.5], 0.1, [1]), "verify has 1 costs for 2 lengths"),
    "serve_command: a port": (lambda: serve_command(GOOD["drafter"], port=0), "port=0: must be at least 1"),
    "serve_command: a host": (lambda: serve_command(GOOD["drafter"], host=""), "host='': is empty"),
    "serve_command: a key for all to read": (
        lambda: serve_command(GOOD["drafter"], extra=["--api-key=abc"]),
        "extra holds --api-key: everybody on the machine can read",
    ),
    "serve_command: no length": (lambda: serve_command(GOOD["drafter"], max_model_len=-1), "max_model_len=-1: must be"),
    "serve_command: a negative length": (lambda: serve_command(GOOD["drafter"], k=-1), "k=-1: must be at least 0"),
    "serve: a number for a path": (lambda: serve(3), "checkpoint=3: must name a file or a folder"),
    "compare: nothing": (lambda: compare_runs({}), "runs is empty: give a name and an evaluation"),
    "compare: two of a name": (lambda: compare(["a/x", "b/x"]), "runs='b/x': another run is called 'x', too"),
    "compare: a number": (lambda: compare(3), "runs=3: must be a list"),
    "evaluate step: a temperature": (
        lambda: evaluate_step(str(GOOD["drafter"]), "x", temperature=[-1.0]),
        "temperature=-1.0: must be",
    ),
    "evaluate step: an engine": (
        lambda: evaluate_step(str(GOOD["drafter"]), "x", engine=3),
        "engine=3: is no word; choose reference or vllm",
    ),
    "convert: an unknown format": (
        lambda: convert(GOOD["drafter"], "x", GOOD["verifier"], "eagle9"),
        "format='eagle9': known are ",
    ),
    "export: an unknown format": (
        lambda: export_native(GOOD["drafter"], "x", "medusa"),
        "format='medusa': a drafter of type 'eagle3' can be written as eagle3",
    ),
    "convert: a billion tokens": (
        lambda: convert(GOOD["drafter"], "x", GOOD["verifier"], speculative_tokens=10**9),
        "speculative_tokens=1000000000: must be",
    ),
    "convert: a config that is a list": (
        lambda: convert(GOOD["drafter"], "x", GOOD["verifier"], config=[1]),
        "config=\\[1\\]: must be a mapping",
    ),
    "detect: a verifier": (lambda: detect(GOOD["verifier"]), "is a drafter of no known format. Looked for"),
}
SETTINGS = {"summary.csv": "drafter,temperature\n", "positions.csv": "", "performance.csv": "", "requests.jsonl": ""}
FILES = {  # files in a folder, what is done with it, what must be answered
    "EngineEvaluation: of our own decoder": (
        {"summary.csv": "drafter\n"},
        EngineEvaluation.read,
        "is an evaluation by our own decoder, which counts otherwise.*--as-engine",
    ),
    "EngineEvaluation: nothing": (
        {},
        EngineEvaluation.read,
        "no settings.json and no summary.csv; name the output of evaluate --output-dir",
    ),
    "EngineEvaluation: cut off": (
        {**SETTINGS, "settings.json": '{"a'},
        EngineEvaluation.read,
        "settings.json: not JSON",
    ),
    "EngineEvaluation: a list": (
        {**SETTINGS, "settings.json": "[]"},
        EngineEvaluation.read,
        "settings.json: holds a list",
    ),
    "read_prompts: nothing in it": (
        {"p.jsonl": ""},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl: no prompts; is the source empty|p.jsonl",
    ),
    "read_prompts: no question": (
        {"p.jsonl": '{"text": "x"}\n'},
        lambda f: read_prompts(f / "p.jsonl"),
        "p.jsonl, row 1: a row has none of messages, conversations, input_ids, turns, question",
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
    "read_prompts: an unknown set": (
        {},
        lambda f: read_prompts("gsm9k"),
        "gsm9k: no such file, folder or set of prompts. Did you mean gsm8k",
    ),
    "NativeCheckpoint: no weights": (
        {"config.json": "{}"},
        NativeCheckpoint,
        "no weights found; looked for .*model.safetensors",
    ),
    "NativeCheckpoint: a config that is a list": (
        {
            "config.json": "[]",
            "model.safetensors": lambda p: p.write_bytes((GOOD["verifier"] / "model.safetensors").read_bytes()),
        },
        NativeCheckpoint,
        "config.json: holds a list",
    ),
    "NativeCheckpoint: a config cut off": (
        {
            "config.json": "{",
            "model.safetensors": lambda p: p.write_bytes((GOOD["verifier"] / "model.safetensors").read_bytes()),
        },
        NativeCheckpoint,
        "config.json: not JSON",
    ),
    "NativeCheckpoint: weights cut off": (
        {"config.json": "{}", "model.safetensors": b"\x10"},
        lambda f: detect(f),
        "model.safetensors: not a complete safetensors file",
    ),
    "evaluate over an evaluation": (
        {"old/summary.csv": "drafter\n"},
        lambda f: evaluate_step(str(GOOD["drafter"]), str(GOOD["corpus"]), output_dir=f / "old"),
        "output_dir='.*old': holds a result already \\(summary.csv\\); name another folder, or pass overwrite=True",
    ),
    "compare over a comparison": (
        {"old/comparison.csv": "run\n"},
        lambda f: compare(["x"], f / "old"),
        "output_dir='.*old': holds a result already \\(comparison.csv\\)",
    ),
}

CASES = [
    *(
        Case(f"generate: {name}", lambda folder, args=args: gen(**args), expect)
        for name, (args, expect) in ARGUMENTS.items()
    ),
    *(
        Case(f"Sampling: {name}", lambda folder, args=args: Sampling(**args), expect)
        for name, (args, expect) in SAMPLING.items()
    ),
    *(Case(f"TokenTree: {name}", lambda folder, make=make: make(), expect) for name, (make, expect) in TREES.items()),
    *(
        Case(f"a proposal: {name}", lambda folder, make=make: gen(Proposes(make), k=2), expect)
        for name, (make, expect) in PROPOSALS.items()
    ),
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
    *(
        Case(
            f"bootstrap: {name}",
            lambda folder, draws=draws: bootstrap(torch.ones(3, 5).numpy(), lambda c: c[..., :1], draws),
            expect,
        )
        for name, draws, expect in (
            ("no draws", 0, "draws=0: must be at least 1"),
            ("negative", -1, "draws=-1: must be"),
        )
    ),
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
