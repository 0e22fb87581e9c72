"""What a config.json, a proposal method or a `--speculative-config` may not say: refused when it is read or made, by
field and value. Each wrong config.json of a drafter is also given to `check`, which reports it instead."""

import json
import shutil

from speculators_nb.core.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig, layer_config_from_dict
from speculators_nb.core.registry import (
    DynamicTreeTokenProposalConfig,
    GreedyTokenProposalConfig,
    SamplingTokenProposalConfig,
    StaticTreeTokenProposalConfig,
)
from speculators_nb.models import (
    eagle3,  # noqa: F401  so that a case does not pay for the import
)
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.serve.serve_command import what_to_serve
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.serve.vllm_contract import check_vllm_contract

from .harness import GOOD, RELEASE, Case

INF, NAN = float("inf"), float("nan")


def changed(change, source="eagle3"):
    "A copy of a release checkpoint with another config.json: a text, or a function that changes what it says."

    def put(path):
        shutil.copytree(RELEASE / source, path, ignore=lambda *_: ["checkpoint-2"])
        file = path / "config.json"
        if callable(change):
            said = json.loads(file.read_text())
            change(said)
            file.write_text(json.dumps(said))
        else:
            file.write_bytes(change if isinstance(change, bytes) else change.encode())

    return put


def top(**fields):
    return lambda c: c.update(fields)


def layer(**fields):
    return lambda c: c["transformer_layer_config"].update(fields)


def block(**fields):
    return lambda c: c["speculators_config"].update(fields)


def method(**fields):
    return lambda c: c["speculators_config"]["proposal_methods"][0].update(fields)


def verifier(**fields):
    return lambda c: c["speculators_config"]["verifier"].update(fields)


def without(*names):
    return lambda c: [c.pop(n) for n in names]


FILES = {  # config.json of an EAGLE-3 drafter -> what must be answered
    "empty": ("", "config.json: not JSON"),
    "cut off": ('{"speculators_model_type": "eag', "config.json: not JSON .*cut off or overwritten"),
    "null": ("null", "config.json: holds null, and must hold an object"),
    "a list": ("[]", "config.json: holds a list, and must hold an object"),
    "a word": ('"eagle3"', "config.json: holds text"),
    "a number": ("3", "config.json: holds a number"),
    "true": ("true", "config.json: holds a truth value"),
    "not text": (b"\xff\xfe{}", "config.json: not JSON .*codec"),
    "nested without end": ("[" * 100_000, "config.json: not JSON \\(nested too deeply\\)"),
    "a number of 5000 digits": ('{"speculators_model_type": ' + "9" * 5000 + "}", "config.json: not JSON .*digits"),
    "an empty object": ("{}", "speculators_model_type is missing"),
}
FIELDS = {
    "no type": (without("speculators_model_type"), "speculators_model_type is missing"),
    "an unknown type": (
        top(speculators_model_type="eagle9"),
        "speculators_model_type='eagle9' is not known. Known types: .*eagle3",
    ),
    "a type that is a number": (top(speculators_model_type=3), "speculators_model_type='3' is not known|must be text"),
    "a type that is a list": (top(speculators_model_type=["eagle3"]), "speculators_model_type=.*is not known"),
    "no tokens": (top(draft_vocab_size=0), "draft_vocab_size=0: must be at least 1"),
    "more tokens than the verifier's": (top(draft_vocab_size=65), "draft_vocab_size.*65.*64"),
    "tokens as text": (top(draft_vocab_size="all"), "draft_vocab_size='all': (input|must|extra|is)"),
    "tokens as a truth value": (
        top(draft_vocab_size=True),
        "draft_vocab_size=True: is a truth value, and must be a number",
    ),
    "a switch as text": (top(norm_before_fc="maybe"), "norm_before_fc='maybe': (input|must|extra|is)"),
    "layers as text": (
        top(eagle_aux_hidden_state_layer_ids="1,2,3"),
        "eagle_aux_hidden_state_layer_ids='1,2,3': (input|must|extra|is)",
    ),
    "a layer twice": (top(eagle_aux_hidden_state_layer_ids=[1, 1, 3]), "eagle_aux_hidden_state_layer_ids"),
    "a layer that is text": (
        top(eagle_aux_hidden_state_layer_ids=[1, "2b", 3]),
        "eagle_aux_hidden_state_layer_ids.1='2b': (input|must|extra|is)",
    ),
    "a layer config that is text": (
        top(transformer_layer_config="llama"),
        "transformer_layer_config.*is str, and must be an object",
    ),
    "an unknown layer family": (
        layer(model_type="no_such"),
        "transformer_layer_config.model_type='no_such' is missing or names no",
    ),
    "a family that is a list": (
        layer(model_type=["llama"]),
        "transformer_layer_config.model_type=\\['llama'\\] is missing or names no",
    ),
    "no hidden size": (layer(hidden_size=0), "transformer_layer_config.hidden_size=0: must be at least 1"),
    "a huge hidden size": (
        layer(hidden_size=2**40),
        "transformer_layer_config.hidden_size=1099511627776: must be .*at most",
    ),
    "no heads": (layer(num_attention_heads=0), "transformer_layer_config.num_attention_heads=0: must be at least 1"),
    "no key heads": (layer(num_key_value_heads=0), "transformer_layer_config.num_key_value_heads=0: must be"),
    "key heads that do not divide": (
        layer(num_attention_heads=2, num_key_value_heads=3),
        "num_key_value_heads=3: must divide num_attention_heads=2",
    ),
    "heads that do not divide": (
        layer(num_attention_heads=3, num_key_value_heads=1, head_dim=None),
        "num_attention_heads=3: must divide hidden_size=16, or give head_dim|not a multiple",
    ),
    "a head of nothing": (layer(head_dim=0), "transformer_layer_config.head_dim=0: must be"),
    "no layers": (layer(num_hidden_layers=0), "transformer_layer_config.num_hidden_layers=0: must be at least 1"),
    "a million layers": (layer(num_hidden_layers=10**6), "transformer_layer_config.num_hidden_layers=1000000: must be"),
    "no vocabulary": (layer(vocab_size=0), "transformer_layer_config.vocab_size=0: must be"),
    "no intermediate size": (layer(intermediate_size=0), "transformer_layer_config.intermediate_size=0: must be"),
    "no positions": (layer(max_position_embeddings=0), "transformer_layer_config.max_position_embeddings=0: must be"),
    "an unknown activation": (
        layer(hidden_act="slu"),
        "transformer_layer_config.hidden_act='slu': is not known; choose .*silu",
    ),
    "a window of text": (
        layer(sliding_window="2048"),
        "transformer_layer_config.sliding_window='2048': is text, and must be a whole number",
    ),
    "a negative epsilon": (
        layer(rms_norm_eps=-1e-6),
        "transformer_layer_config.rms_norm_eps=-1e-06: must be at least 0",
    ),
    "a dropout of everything": (
        layer(attention_dropout=1.0),
        "transformer_layer_config.attention_dropout=1.0: must be at least 0 and less than 1",
    ),
    "a base of 0": (layer(rope_theta=0), "transformer_layer_config.rope_theta=0: must be greater than 0"),
    "a block that is null, with its name": (top(speculators_config=3), "speculators_config.*=3"),
    "a block of nothing": (top(speculators_config={}), "speculators_config.algorithm=.*field required"),
    "no methods": (block(proposal_methods=[]), "proposal_methods=\\[\\]: list should have at least 1"),
    "a method of nothing": (
        block(proposal_methods=[{}]),
        "proposal_methods.0.proposal_type=\\(missing\\): field required",
    ),
    "an unknown method": (method(proposal_type="guess"), "proposal_methods.0=.*'guess'"),
    "a default that is not listed": (
        block(default_proposal_method="sampling"),
        "default_proposal_method='sampling' is not among",
    ),
    "no tokens to draft": (
        method(speculative_tokens=0),
        "proposal_methods.0.greedy.speculative_tokens=0: input should be greater",
    ),
    "tokens to draft, true": (method(speculative_tokens=True), "speculative_tokens=True: is a truth value"),
    "nobody accepted": (method(verifier_accept_k=0), "verifier_accept_k=0: (input|must|extra|is)"),
    "a field of another method": (method(depth=3), "proposal_methods.0.greedy.depth=3: extra inputs are not permitted"),
    "no verifier": (block(verifier=None), "speculators_config.verifier=None: (input|must|extra|is)"),
    "architectures that are text": (
        verifier(architectures="Qwen3ForCausalLM"),
        "verifier.architectures='Qwen3ForCausalLM': (input|must|extra|is)",
    ),
    "a name that is a number": (verifier(name_or_path=3), "verifier.name_or_path=3: (input|must|extra|is)"),
}
OF_BLOCKS = {  # of a DFlash drafter
    "a block of one": (top(block_size=1), "block_size=1: (input|must|extra|is)"),
    "a mask token beyond the vocabulary": (
        top(mask_token_id=64),
        "mask_token_id=64 lies outside the verifier's vocabulary of 64; choose an id",
    ),
}
LAYERS = {
    "nothing": (None, "is NoneType, and must be an object"),
    "a list": ([], "is list, and must be an object"),
    "no family": ({}, "model_type=None is missing"),
    "a misspelt rope_type": (
        {"model_type": "llama", "rope_parameters": {"rope_typ": "yarn", "factor": 4.0}},
        "rope_parameters=.*: has factor and no rope_type.*give it, e.g. 'yarn'",
    ),
    "a rope of nothing": ({"model_type": "llama", "rope_parameters": 3}, "refuses this llama config"),
    "layer types of another number": (
        {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"]},
        "refuses this qwen3 config.*layer_types",
    ),
}
PROPOSALS = {
    "greedy: a billion": (
        lambda: GreedyTokenProposalConfig(speculative_tokens=10**9),
        "speculative_tokens=1000000000: input should be less than or equal to 4096",
    ),
    "greedy: a misspelt field": (
        lambda: GreedyTokenProposalConfig(sepculative_tokens=3),
        "sepculative_tokens=3: extra inputs are not permitted",
    ),
    "greedy: a tolerance of NaN": (
        lambda: GreedyTokenProposalConfig(accept_tolerance=NAN),
        "accept_tolerance=nan: input should be a finite number",
    ),
    "sampling: lenience 0": (
        lambda: SamplingTokenProposalConfig(accept_lenience=0.0),
        "accept_lenience=0.0: input should be greater than 0",
    ),
    "sampling: lenience 2": (
        lambda: SamplingTokenProposalConfig(accept_lenience=2),
        "accept_lenience=2: input should be less than or equal to 1",
    ),
    "static: no children": (
        lambda: StaticTreeTokenProposalConfig(branching_factor=0),
        "branching_factor=0: input should be greater",
    ),
    "static: too many": (
        lambda: StaticTreeTokenProposalConfig(branching_factor=4, depth=12),
        "depth=12: with branching_factor=4 the tree has more than 4096 tokens; lower one",
    ),
    "static: too wide": (
        lambda: StaticTreeTokenProposalConfig(initial_branching_factor=10**6),
        "initial_branching_factor=1000000: input should be less",
    ),
    "dynamic: no depth": (lambda: DynamicTreeTokenProposalConfig(depth=0), "depth=0: input should be greater"),
    "dynamic: a billion": (
        lambda: DynamicTreeTokenProposalConfig(expansion_factor=10**9),
        "expansion_factor=1000000000: input should be less",
    ),
    "SpeculatorsConfig: no verifier": (
        lambda: SpeculatorsConfig(
            algorithm="x", proposal_methods=[{"proposal_type": "greedy"}], default_proposal_method="greedy"
        ),
        "verifier=.*field required",
    ),
    "VerifierConfig: another field": (
        lambda: VerifierConfig(name_or_path="x", architectures=[], size=3),
        "size=3: extra inputs are not permitted",
    ),
}
NGRAM = dict(method="ngram", num_speculative_tokens=3)
SPECULATIVE = {  # arguments of SpeculativeConfig -> what must be answered
    "nothing": ({}, "method=None and model=None: name a method, or the draft model"),
    "no number": (
        dict(method="ngram"),
        "num_speculative_tokens=None and the config of the draft .* has no number; write how many",
    ),
    "no tokens": (
        dict(method="ngram", num_speculative_tokens=0),
        "num_speculative_tokens=0: input should be greater than 0",
    ),
    "a billion": (
        dict(method="ngram", num_speculative_tokens=10**9),
        "num_speculative_tokens=1000000000: input should be less than or equal to 4096",
    ),
    "true": (dict(method="ngram", num_speculative_tokens=True), "num_speculative_tokens=True: is a truth value"),
    "an unknown method": (
        dict(method="ngrams", num_speculative_tokens=3),
        "method='ngrams' is unknown; write one of ngram",
    ),
    "a misspelt field": (
        dict(NGRAM, prompt_lokup_max=3),
        "prompt_lokup_max=3 is no field of SpeculativeConfig; did you mean prompt_lookup_max",
    ),
    "a field of nobody": (dict(NGRAM, xyzzy=3), "xyzzy=3 is no field of SpeculativeConfig; leave it out"),
    "a lookup of nothing": (dict(NGRAM, prompt_lookup_max=0), "prompt_lookup_max=0: input should be greater"),
    "a lookup without end": (
        dict(NGRAM, prompt_lookup_max=10**12),
        "prompt_lookup_max=1000000000000: input should be less",
    ),
    "a lookup that crosses": (
        dict(NGRAM, prompt_lookup_min=5, prompt_lookup_max=2),
        "prompt_lookup_min=5 is more than prompt_lookup_max=2; lower it",
    ),
    "no depth": (
        dict(method="suffix", num_speculative_tokens=3, suffix_decoding_max_tree_depth=0),
        "suffix_decoding_max_tree_depth=0 is out of range; write a number from 1 to 4096",
    ),
    "a negative cache": (
        dict(method="suffix", num_speculative_tokens=3, suffix_decoding_max_cached_requests=-1),
        "suffix_decoding_max_cached_requests=-1 is out of range; write a number from 0 upwards",
    ),
    "a chance above 1": (
        dict(method="suffix", num_speculative_tokens=3, suffix_decoding_min_token_prob=1.5),
        "suffix_decoding_min_token_prob=1.5 is out of range; write a number from 0 to 1",
    ),
    "an infinite factor": (
        dict(method="suffix", num_speculative_tokens=3, suffix_decoding_max_spec_factor=INF),
        "suffix_decoding_max_spec_factor=inf: input should be a finite",
    ),
    "an unknown verification": (
        dict(NGRAM, rejection_sample_method="lenient"),
        "rejection_sample_method='lenient': input should be 'strict', 'probabilistic'",
    ),
    "an unknown draw": (
        dict(NGRAM, draft_sample_method="beam"),
        "draft_sample_method='beam': input should be 'greedy' or 'probabilistic'",
    ),
    "words that contradict": (
        dict(NGRAM, rejection_sample_method="strict", draft_sample_method="probabilistic"),
        "draft_sample_method='probabilistic' contradicts",
    ),
    "rates without need": (
        dict(NGRAM, synthetic_acceptance_rates=[0.5, 0.4, 0.3]),
        "synthetic_acceptance_rates=.* has no effect without rejection_sample_method='synthetic'",
    ),
    "no rates": (dict(NGRAM, rejection_sample_method="synthetic"), "wants exactly one of synthetic_acceptance_rates"),
    "a rate of NaN": (
        dict(NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5, NAN, 0.1]),
        "synthetic_acceptance_rates.1=nan: input should be a finite",
    ),
    "a length too long": (
        dict(NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_length=9),
        "synthetic_acceptance_length=9.0 must lie in \\[1, 4\\]",
    ),
    "a tree of another size": (
        dict(NGRAM, speculative_token_tree="[(0,), (1,)]"),
        "speculative_token_tree=.* has 2 tokens, num_speculative_tokens=3; make them equal",
    ),
    "a tree that calls": (
        dict(NGRAM, speculative_token_tree="__import__('os').getcwd()"),
        "speculative_token_tree: .*not a list of tuples of numbers",
    ),
    "a tree without end": (
        dict(NGRAM, speculative_token_tree="[" * 5000),
        "speculative_token_tree: .*not a list of tuples",
    ),
    "no devices": (dict(NGRAM, draft_tensor_parallel_size=0), "draft_tensor_parallel_size=0: input should be"),
    "the target's devices": (
        dict(NGRAM, tensor_parallel_size=2),
        "tensor_parallel_size=2 is the target's; write draft_tensor_parallel_size",
    ),
    "no length": (dict(NGRAM, max_model_len=0), "max_model_len=0: input should be"),
    "a load config that is a list": (
        dict(NGRAM, draft_load_config=[1]),
        "draft_load_config=\\[1\\]: (input|must|extra|is)",
    ),
    "a target that is a number": (
        dict(NGRAM, target_model_config=3),
        "target_model_config=3: must be a model's folder",
    ),
    "a target of other types": (dict(NGRAM, target_model_config={"model_type": 3}), "model_type=3: must be text"),
    "a target whose text config is a list": (
        dict(NGRAM, target_model_config={"text_config": []}),
        "text_config=\\[\\]: must be a mapping",
    ),
    "indices of n-grams": (
        dict(NGRAM, index_share_for_mtp_iteration=True),
        "index_share_for_mtp_iteration=True is for method='mtp', this is 'ngram'; leave it out",
    ),
    "other words of n-grams": (
        dict(NGRAM, use_heterogeneous_vocab=True),
        "use_heterogeneous_vocab=True is for method='draft_model', this is 'ngram'; leave it out",
    ),
    "another method than the checkpoint's": (
        dict(model=str(GOOD["drafter"]), method="medusa"),
        "method='medusa' does not fit .*served as 'eagle3'; leave method out",
    ),
    "a verifier without a head as mtp": (
        dict(model=str(GOOD["verifier"]), method="mtp", num_speculative_tokens=1),
        "method='mtp' needs a head that predicts further tokens",
    ),
}
DRAFTS = {  # config.json of a foreign draft
    "cut off": ('{"model_type"', "config.json: not JSON"),
    "a list": ("[]", "config.json: holds a list"),
    "a type that is a number": ('{"model_type": 3}', "config.json: model_type=3: must be text"),
    "methods of numbers": (
        '{"speculators_config": {"proposal_methods": [3]}}',
        r"speculators_config.proposal_methods=\[3\]: must be a mapping",
    ),
    "a verifier that is a list": (
        '{"speculators_model_type": "eagle3", "speculators_config": {"verifier": []}}',
        "speculators_config.verifier=\\[\\]: must be a mapping",
    ),
}

CASES = [
    *(
        Case(
            f"config.json: {name}",
            lambda folder: SpeculatorModelConfig.from_pretrained(folder / "new"),
            expect,
            {"new": changed(how)},
        )
        for name, (how, expect) in (FILES | FIELDS).items()
    ),
    *(
        Case(
            f"config.json of DFlash: {name}",
            lambda folder: SpeculatorModelConfig.from_pretrained(folder / "new"),
            expect,
            {"new": changed(how, "dflash")},
        )
        for name, (how, expect) in OF_BLOCKS.items()
    ),
    *(
        Case(
            f"check reports: {name}",
            lambda folder: "\n".join(check_vllm_contract(folder / "new")),
            expect,
            {"new": changed(how)},
            counted=True,
        )
        for name, (how, expect) in (FILES | FIELDS).items()
    ),
    *(
        Case(
            f"{user.__name__}: a family that drafts nothing",
            lambda folder, user=user: user(folder / "new"),
            "transformer_layer_config.model_type='gpt2' is not a draft layer family; choose from llama",
            {"new": changed(layer(model_type="gpt2"))},
            counted=user is check_vllm_contract,
        )
        for user in (SpeculatorModel.from_pretrained, check_vllm_contract)
    ),
    *(
        Case(f"layers: {name}", lambda folder, given=given: layer_config_from_dict(given), expect)
        for name, (given, expect) in LAYERS.items()
    ),
    *(Case(name, lambda folder, make=make: make(), expect) for name, (make, expect) in PROPOSALS.items()),
    *(
        Case(f"SpeculativeConfig: {name}", lambda folder, given=given: SpeculativeConfig(**given), expect)
        for name, (given, expect) in SPECULATIVE.items()
    ),
    *(
        Case(
            f"SpeculativeConfig, a draft: {name}",
            lambda folder: SpeculativeConfig(model=str(folder), num_speculative_tokens=2),
            expect,
            {"config.json": how},
        )
        for name, (how, expect) in DRAFTS.items()
    ),
    *(
        Case(f"serve, a draft: {name}", lambda folder: what_to_serve(folder), expect, {"config.json": how})
        for name, (how, expect) in DRAFTS.items()
    ),
    Case(
        "VerifierConfig: architectures",
        lambda folder: VerifierConfig.from_pretrained(folder),
        "config.json: architectures='x': must be a list",
        {"config.json": '{"architectures": "x"}'},
    ),
]
