"""One rule for each option of each command, and for what a drafter is trained with; the words in the rules are those
that the code knows."""

import dataclasses
import inspect
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from speculators_nb.cli import main as cli
from speculators_nb.core import options
from speculators_nb.core.config import FIELD_RULES, LAYER_RULES, import_models
from speculators_nb.core.options import IN, RULES, algorithms, check_options, pairs, range_of, rule_of
from speculators_nb.decode.acceptance_rules import RULES as ACCEPTANCE
from speculators_nb.evaluate.engine import GENERATORS
from speculators_nb.features.feature_rows import stored_dtype
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.dspark import MARKOV_HEADS
from speculators_nb.nn.attention import BACK_ENDS
from speculators_nb.nn.layers import LATENT_FAMILIES, LAYER_FAMILIES
from speculators_nb.nn.losses import LOSSES
from speculators_nb.serve.vllm_methods import METHODS
from speculators_nb.train.optimizers import OPTIMIZERS
from speculators_nb.train.trainer import SpeculatorTrainingArguments
from speculators_nb.train.training_arguments import NOT_SUPPORTED, WITHOUT_EFFECT

ROOT = Path(__file__).parents[1]
COMMANDS = cli.app.functions
OPTIONS = [
    (command, p) for command, function in COMMANDS.items() for p in inspect.signature(function).parameters.values()
]
EVERY = [(where, rule) for rules in (RULES, IN, LAYER_RULES, FIELD_RULES) for where, rule in rules.items()]
import_models()


def problem(values, where=""):
    try:
        check_options(values, where)
    except ValueError as e:
        return str(e)


# --- nothing is left out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command,parameter", OPTIONS, ids=[f"{c}.{p.name}" for c, p in OPTIONS])
def test_every_option_has_a_rule(command, parameter):
    rule = rule_of(parameter.name, command)
    assert rule, "give it one in options.RULES"
    optional = parameter.default is None
    assert rule.none == optional or (rule.none and not optional), (
        "None is a value of this option, and the rule refuses it"
    )
    if parameter.default is not parameter.empty:
        assert rule.problem(parameter.default) is None, "its default breaks its rule"
    if parameter.default is parameter.empty:
        assert rule.problem(None) or f"{command}.{parameter.name}" in (
            "regenerate.verifier",
            "evaluate.drafter",
            "experiment.output_dir",
        ), "it must be given, and the rule does without"


@pytest.mark.parametrize("where,rule", EVERY, ids=[w for w, _ in EVERY])
def test_an_example_is_right(where, rule):
    "What a message proposes can be written: as it stands, or, in a list, repeated."
    example = rule.example
    if rule.kind == "list":
        example = [yaml.safe_load(x) for x in str(example).split()] if not isinstance(example, list) else example
    assert rule.problem(example) is None


# what is wrong whatever the range of a rule is
WRONG = {
    "number": (math.nan, math.inf, 10**400, "1", True),
    "whole": (1.5, 2.0, np.float64(2), math.nan, "1", True),
    "switch": (1, "yes"),
    "word": ("xyzzy", 3, True),
    "text": ("", " ", "a\0b", 3),
    "path": ("", "a\0b", 3),
    "resume": ("", 3),
    "list": ([[]],),
    "mapping": (3, [1], "a"),
    "loss": ("xyzzy", {"ce": math.nan}, 3),
}


@pytest.mark.parametrize("where,rule", EVERY, ids=[w for w, _ in EVERY])
def test_a_rule_refuses(where, rule):
    "A rule that lets everything pass is none; what no rule of its kind may let pass."
    assert all(map(rule.problem, WRONG[rule.kind]))
    assert rule.problem(object() if not rule.objects else b"x")


# by hand, since tests/bad/commands.py types what the rules themselves refuse, and so knows no wrong rule
RANGES = {  # what a number may be -> options, and command.option
    "at least 0": """patience warmup_steps weight_decay max_grad_norm eval_delay confidence_head_alpha feature_weight
        noise_std step_weights SuffixDrafter.factor""",
    "at least 0 and at most 1": "down_sample_ratio_min dpace_alpha min_p SuffixDrafter.min_prob",
    "at least 0 and at most 100": "temperature regenerate_temperature temperatures evaluate.temperature",
    "at least 0 and less than 1": "val_fraction adam_beta1 adam_beta2 eval_share",
    "greater than 0": """lora_alpha timeout dflash_decay_gamma budget learning_rate muon_learning_rate memory disk
        tflops bandwidth logging_steps save_steps eval_steps LengthByRates.costs""",
    "greater than 0 and at most 1": "down_sample_ratio top_p mfu",
    "greater than 0 and at most 10": "ttt_step_loss_decay step_weight_beta head_loss_decay",
    "greater than 0 and at most 1000": "shard_gb",
    "greater than 0 and at most 1000000": "num_train_epochs epochs",
    "at least -1 and at most 2147483648": "max_steps",
    "at least 0 and at most 999": "full_attention_indices",
    "at least 0 and at most 1000": "num_hidden_layers",
    "at least 0 and at most 1024": "dataloader_num_workers",
    "at least 0 and at most 4096": "k record serve.k",
    "at least 0 and at most 10000": "aux_layer_ids target_layer_ids",
    "at least 0 and at most 65536": "markov_rank",
    "at least 0 and at most 2147483648": "rank top_k mask_token_id SuffixDrafter.max_requests",
    "at least 0 and at most 4294967295": "seed data_seed",
    "at least 1 and at most 64": "ttt_steps num_depths num_heads forward_num_total num_speculative_steps",
    "at least 1 and at most 1000": "num_layers experiment.seeds",
    "at least 1 and at most 1024": "num_proc dataloader_prefetch_factor context_parallel_size experiment.workers",
    "at least 1 and at most 4096": "speculative_tokens demo.k real.k experiment.k experiment.draft_lengths",
    "at least 1 and at most 65535": "port",
    "at least 1 and at most 65536": "batch_size concurrency lora_rank regenerate.concurrency features.concurrency",
    "at least 1 and at most 1000000": "repeats rounds devices",
    "at least 1 and at most 1048576": "gradient_accumulation_steps intermediate_size",
    "at least 1 and at most 4194304": """max_new_tokens max_tokens min_trained context tokens_each sliding_window
        experiment.max_new_tokens""",
    "at least 1 and at most 10000000": "draws",
    "at least 1 and at most 2147483648": """max_failures world_size ddp_timeout max_samples n_prompts n_heldout
        self_prompts conversations max_model_len vocab_size draft_vocab_size max_anchors early_stopping_patience
        regenerate_every save_total_limit torch_empty_cache_steps ddp_bucket_cap_mb vocab.draft_vocab_size
        experiment.n_prompts NgramDrafter.min_n NgramDrafter.max_n tolerant.accept_k fly.entropy_top_k
        batch_verify.batch reliability_table.bins LengthByRates.memory LengthByConfidence.every fly.window_size""",
    "at least 2 and at most 1024": "block_size",
    "at least 2 and at most 4194304": "max_length total_seq_len",
    "at least 2 and at most 2147483648": "SuffixDrafter.depth",
}
WORDS = {  # that no other table of the code has -> options, and command.option
    "0.32 0.33": "engine_version",
    "auto bfloat16 float32": "compute_dtype",
    "bfloat16 float16 float32": "save_dtype from-gguf.save_dtype",
    "bfloat16 float16 float32 float64": "gemm_dtype",
    "bfloat16 float16 float32 float8_e4m3fn fp8": "dtype",
    "conversation turn": "rows",
    "cut drop": "too_long",
    "dynamic static graphs": "kv_cache",
    "full sharded": "checkpoint_format",
    "hf vllm": "source",
    "llama.cpp fp8": "to",
    "local ray": "regenerate.engine features.engine",
    "raise skip": "on_bad",
    "reference vllm": "engine",
    "sdpa eager flex_attention flash_attention_2 flash_attention_3 flash_attention_4": "attn_implementation",
    "vllm llama.cpp": "check.engine",
}


def test_ranges():
    known = {name: limits for limits, names in RANGES.items() for name in names.split()}
    rules = {name: (RULES | IN)[name] for name in known}
    assert {name: range_of(rule.of or rule) for name, rule in rules.items()} == known
    for command, p in OPTIONS:
        rule = rule_of(p.name, command)
        if (rule.of or rule).kind in ("number", "whole"):
            assert {p.name, f"{command}.{p.name}"} & known.keys(), f"write the range of {p.name} into RANGES"


@pytest.mark.parametrize("words,name", [(w, n) for w, names in WORDS.items() for n in names.split()])
def test_words_of_a_choice(words, name):
    assert (RULES | IN)[name].words == tuple(words.split())


# fields of TrainingArguments whose values transformers itself checks well, or that need another machine than one with
# this library alone
LEFT_ALONE = """output_dir optim optim_args optim_target_modules torch_compile_backend torch_compile_mode
liger_kernel_config
use_cache include_num_input_tokens_seen log_level log_level_replica project trackio_space_id trackio_bucket_id
trackio_static_space_id include_for_metrics hub_token hub_model_id hub_strategy hub_revision
accelerator_config parallelism_config dataloader_multiprocessing_context label_names train_sampling_strategy
length_column_name ddp_backend fsdp_config deepspeed debug local_rank"""
LEFT = {*LEFT_ALONE.split(), *(name for names in WITHOUT_EFFECT.values() for name in names), *NOT_SUPPORTED} - {
    "remove_unused_columns"
}


def test_training_arguments_have_rules():
    fields = {f.name: f for f in dataclasses.fields(SpeculatorTrainingArguments) if f.init}
    assert sorted(fields.keys() - RULES.keys() - LEFT) == []
    assert sorted(LEFT & RULES.keys() - {"output_dir"}) == [] and fields.keys() >= LEFT
    wrong = {
        n: why
        for n, f in fields.items()
        if n in RULES and f.default is not dataclasses.MISSING and (why := RULES[n].problem(f.default))
    }
    assert wrong == {}, "a default that its rule refuses"


# arguments that are objects
MADE_BY_THE_CALLER = {"t2d", "d2t", "transformer_layer_config", "verifier_config", "verifier_name_or_path"}


@pytest.mark.parametrize("name", algorithms())
def test_arguments_of_drafters_have_rules(name):
    klass = SpeculatorModel.registered_class(name)
    for taker in (klass.get_trainer_kwargs, klass.from_training_args):
        for p in inspect.signature(taker).parameters.values():
            if p.name in MADE_BY_THE_CALLER or p.kind is p.VAR_KEYWORD:
                continue
            assert p.name in RULES
            assert p.default is p.empty or RULES[p.name].problem(p.default) is None
    for argument, default in klass.training_arguments().items():
        assert default is None or RULES[argument].problem(default) is None


# --- the words are those of the code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words,known",
    [
        (options.LOSSES, LOSSES),
        (options.METHODS, METHODS),
        (options.SCHEDULES, [s.value for s in SchedulerType]),
        (RULES["optimizer"].words, OPTIMIZERS),
        (RULES["rule"].words, ACCEPTANCE),
        (RULES["load"].words, GENERATORS),
        (RULES["draft_arch"].words, LAYER_FAMILIES + LATENT_FAMILIES),
        (RULES["markov_head_type"].words, MARKOV_HEADS),
        (RULES["attn_impl"].words, {*BACK_ENDS, "blocked"}),
        (RULES["eval_strategy"].words, [s.value for s in IntervalStrategy]),
        (RULES["save_strategy"].words, [s.value for s in SaveStrategy]),
    ],
    ids=[
        *("losses", "methods", "schedules", "optimizers", "acceptance rules", "load", "layers", "markov heads"),
        *("attention", "eval_strategy", "save_strategy"),
    ],
)
def test_words(words, known):
    assert set(words) == set(known)


def test_dtypes():
    for name in options.STORED:
        stored_dtype(name)
    assert all(isinstance(getattr(torch, n), torch.dtype) for n in options.FLOATS)
    assert {w.split()[0] for w in re.findall(r"[a-z]+", "auto half float16")} <= set(options.SERVED) | {"float"}


def test_algorithms_are_read_without_an_import():
    assert set(algorithms()) == set(SpeculatorModel.registry)
    code = (
        "import sys; from speculators_nb.core.options import algorithms; print(*sorted(algorithms()), 'torch' in "
        "sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [*sorted(algorithms()), "False"]


def test_a_registered_drafter_is_known():
    try:

        @SpeculatorModel.register("mine_alone")
        class Mine(SpeculatorModel):
            pass

        check_options({"algorithm": "mine_alone"}, "train")
    finally:
        SpeculatorModel.registry.pop("mine_alone", None)
        options.REGISTERED.discard("mine_alone")
    assert "algorithm='mine_alone'" in problem({"algorithm": "mine_alone"})


# --- what Python gives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"k": 3},
        {"k": [1, 2]},
        {"k": (1, 2)},
        {"k": lambda steps: 3},
        {"temperatures": np.array([0.0, 1.0])},
        {"seed": np.int64(3)},
        {"learning_rate": np.float32(1e-3)},
        {"dtype": torch.bfloat16},
        {"gemm_dtype": torch.float32},
        {"rule": ACCEPTANCE["block"]},
        {"output_dir": Path("x")},
        {"data": [{"messages": []}]},
        {"device": torch.device("cpu")},
        {"dedup": np.bool_(True)},
        {"lr_scheduler_type": SchedulerType.COSINE},
        {"aux_layer_ids": range(1, 3)},
        {"resume_from_checkpoint": None},
        {"loss_fn": {"ce": 0.1, "tv": 1}},
        {"a_name_of_ones_own": object()},
    ],
    ids=lambda v: f"{next(iter(v))}={type(next(iter(v.values()))).__name__}",
)
def test_right_values_of_python(values):
    check_options(values)


def test_a_refusal_passes_from_a_process_to_another():
    with pytest.raises(ValueError) as refused:
        check_options({"engine": "vllm", "rule": "typical"}, "evaluate")
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_a_message_is_short_and_says_no_password():
    assert len(problem({"seed": "x" * 10_000})) < 400
    assert "hidden-word" not in problem({"server": "http://u:hidden-word@h:1"})


@pytest.mark.parametrize(
    "where,values,words",
    [
        (
            "train",
            {"early_stopping_patience": 2, "eval_share": 0},
            ("early_stopping_patience=2: needs evaluations", "raise eval_share"),
        ),
        (
            "train",
            {"from_pretrained": "x", "server": None, "storage": "s"},
            ("storage='s': has no effect without a server", "give server"),
        ),
        (
            "evaluate",
            {"engine": "reference", "k": [1, 2]},
            ("k=[1, 2]: the reference decoder measures one draft length",),
        ),
        ("evaluate", {"engine": "reference", "k": [0]}, ("k=[0]",)),
    ],
)
def test_options_that_depend_on_each_other(where, values, words):
    said = problem(values, where)
    assert said and all(w in said for w in words), said


def test_pairs():
    assert pairs(["warmup-steps=100", 'loss_fn={"ce": 0.1}', "family=qwen3", "a=b=c"]) == {
        "warmup_steps": 100,
        "loss_fn": {"ce": 0.1},
        "family": "qwen3",
        "a": "b=c",
    }
    assert pairs({"a": 1}) == {"a": 1} and pairs(None) == {}


@pytest.mark.parametrize("command,parameter", OPTIONS, ids=[f"{c}.{p.name}" for c, p in OPTIONS])
def test_every_option_is_tried_with_bad_values(command, parameter):
    "In tests/bad/commands.py, where options of one rule share their wrong values."
    from bad.commands import CASES

    tried = any(c.name.startswith(f"{command}: {parameter.name} ") for c in CASES)
    assert tried, f"{parameter.name} has no wrong values; give it some in BAD of tests/bad/commands.py"
