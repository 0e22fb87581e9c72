"""vLLM's speculative config as a pydantic model: checked before there is a server, run on our decoder, emitted as
JSON. nbs/serve/01_speculative_config.ipynb shows it at work, and where it decides otherwise than vLLM."""

# `SpeculativeConfig` has the fields, each with its sentence. `_complete` fills in what follows from them, in the
# engine's order, each line a function below the class; then `_problems` is the list of what can be wrong. To add a
# field, write it with type, default and sentence; if its value can be wrong in a way that the type does not say, yield
# a problem. What release lines of vLLM do differently is in `vllm_methods.ENGINES`.

import copy
import difflib
import hashlib
import json
import numbers
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator
from torch import Tensor
from transformers import PretrainedConfig

from ..core.config import check_field_types
from ..core.files import NotSupported, read_object
from ..core.options import MOST_DRAFTED, shown
from ..core.registry import ReloadableBaseModel
from ..decode.acceptance_rules import RULES, Rule, fly, fly_window, synthetic
from ..decode.draft_model import DraftModel
from ..decode.generate import Generation, HiddenStates, generate
from ..decode.ngram import NgramDrafter
from ..decode.proposal_setup import GrowsTrees, TreeDrafter
from ..decode.suffix import SuffixDrafter
from ..decode.tree import Drafter, Sampling, TokenTree
from ..decode.tree_growth import parse_tree
from ..models.base import SpeculatorModel
from ..models.convert import convert
from ..verifier.row_limits import rope_of
from ..verifier.tapped_model import Verifier
from .vllm_methods import DOCUMENTED_SAMPLING, LOAD_FIELDS, METHOD_OF_NAME, METHODS, MTP_FAMILIES, MTP_LAYERS_OF
from .vllm_methods import NEWEST, RUN_ONCE
from .vllm_methods import DraftSampling, Engine, Method, default_length, engine_of, find_field, is_omni, line_name
from .vllm_methods import lines_with, method_in_config, method_in_name, method_of_types, mtp_head, names_python_class
from .vllm_methods import omni_problem, predicted_tokens, quantization_problem, served_architecture, served_length
from .vllm_methods import text_part


class ParallelConfig(BaseModel):
    "How a model is spread over devices. vLLM's own object of this name is taken as well."

    model_config = ConfigDict(extra="forbid", from_attributes=True, use_attribute_docstrings=True)

    tensor_parallel_size: int = Field(1, ge=1)
    "Devices that share each layer."
    pipeline_parallel_size: int = Field(1, ge=1)
    "Groups of devices, each with some of the layers."
    enable_expert_parallel: bool = False
    "Experts are spread over the devices, not cut."
    distributed_executor_backend: Any = None
    "What starts the workers: mp, ray, a class."
    max_parallel_loading_workers: int | None = None
    "Workers that load weights at a time."
    disable_custom_all_reduce: bool = False
    "NCCL's all-reduce only."
    ray_workers_use_nsight: bool = False
    "Profile Ray workers."
    placement_group: Any = None
    "Ray's placement group."


# RoPE types for which the number of positions sizes a table alone (vLLM 0.33)
POSITIONS_SIZE_A_TABLE = ("default", "linear", "llama3", "ntk", "proportional")


class SpeculativeConfig(ReloadableBaseModel):
    """How to speculate: the dictionary of `vllm serve --speculative-config`. Errors: ValueError naming the field, its
    value and what to write."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    engine_version: str | None = Field(default=None, exclude=True)
    """A key of `vllm_methods.ENGINES`: the rules and fields of that release line. None: what any of them has, by the
    newest one's rules."""

    # ---- the draft model, and what only an engine reads

    enforce_eager: bool | None = None
    "No graphs for the drafter. None: as for the target."
    quantization: str | None = None
    "Quantization of the draft's weights. None: the one in its config."
    moe_backend: str | None = None
    "Kernels for the draft's experts. None: as for the target."
    attention_backend: str | None = None
    "Attention kernels for the draft, in any case. None or auto: the engine's choice."
    kv_cache_dtype: str | None = None
    "Numbers in the draft's KV cache. None: as for the target."
    index_share_for_mtp_iteration: bool | None = None
    "MTP: later iterations reuse the first one's sparse indices. None: the draft's config."
    draft_lm_head_quantization: Literal["fp8", "nvfp4"] | None = None
    "eagle, eagle3, mtp: quantize the draft's copy of the target's head. None: share it."
    revision: str | None = None
    "Branch, tag or commit of the draft."
    code_revision: str | None = None
    "Branch, tag or commit of the draft's code."
    draft_load_config: dict[str, Any] | None = None
    "How to load the draft. None: as the target."
    num_speculative_tokens: int | None = Field(default=None, gt=0, le=MOST_DRAFTED)
    "Tokens to draft in a step. None: the number in the draft's config."
    model: str | None = None
    "Folder or hub id of the draft. None with mtp: the target itself."
    method: str | None = None
    "A key of METHODS. None: found by the draft's config and name."
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1)
    "Devices to split the draft over: 1 or the target's number. None: that."
    tensor_parallel_size: int | None = None
    "Refused: write draft_tensor_parallel_size."
    max_model_len: int | None = Field(default=None, ge=1)
    "Longest text that is drafted for; at most the draft's and the target's."
    draft_model_config: dict[str, Any] | None = None
    "For extract_hidden_states: {'hf_config': {'eagle_aux_hidden_state_layer_ids': [...]}}."

    # ---- what vLLM knows from its other arguments

    target_model_config: Any = Field(default=None, exclude=True)
    "The target's folder, config.json or config. None: checks against it are left out."
    target_parallel_config: ParallelConfig | None = Field(default=None, exclude=True)
    "Devices that the target is spread over. None: checks against them are left out."

    # ---- the proposal: a chain or a tree

    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    "Fewer tokens where many requests run: (first size, last size, tokens), both included."
    disable_padded_drafter_batch: bool = False
    "Requests of a batch keep different lengths (some attention backends)."
    disable_eagle_block_drop: bool = False
    "Keep the last block of the prefix cache, which the EAGLE kinds drop (experimental)."
    disable_lookahead_block_hashes: bool = False
    "The EAGLE kinds: hash a block of the prefix cache without the tokens after it."
    use_local_argmax_reduction: bool = False
    "Each device sends its best token, not all logits. Greedy chains only."
    parallel_drafting: bool = False
    "All tokens in one forward pass, by a draft model that was trained for it."
    use_heterogeneous_vocab: bool = False
    "draft_model: it may have another vocabulary; tokens that both have are drafted."
    dspark_draft_topk: int | None = Field(default=None, ge=1)
    "dspark: the Markov bias is computed for the likeliest tokens only. None: its config."
    xpress_topc: int | None = Field(default=None, ge=0)
    "XPress: the refiner scores the likeliest tokens only; 0: all. None: its config."
    speculative_token_tree: str | list[tuple] | None = None
    "Paths of a tree of draft tokens. None: a chain."

    # ---- drafting without a model, by n-grams or by suffix trees

    prompt_lookup_max: int | None = Field(default=None, ge=1, le=2**20)
    "n-gram: longest suffix that is looked up."
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=2**20)
    "n-gram: shortest one. One of both set: both are that. None set: 5."
    suffix_decoding_max_tree_depth: int = 24
    "Suffix: match and continuation together are at most so long."
    suffix_decoding_max_cached_requests: int = 10_000
    "Suffix: finished answers kept, first in, first out; 0: none."
    suffix_decoding_max_spec_factor: float = 1.0
    "Suffix: tokens drafted for each token of the match."
    suffix_decoding_min_token_prob: float = 0.1
    "Suffix: drafts end where they are less likely."

    # ---- how drafts are verified, and how draft tokens are chosen

    rejection_sample_method: Literal["strict", "probabilistic", "synthetic", "standard", "block", "fly"] = "strict"
    "Verification, by its name in any release line."
    draft_sample_method: DraftSampling | None = None
    "Draft tokens: argmax, or sampled. None: as rejection_sample_method implies, else greedy."
    enable_adaptive_verification: bool = False
    "Verify fewer draft tokens where the draft is not confident (made for dspark)."
    fly_window_size: int | None = Field(default=None, ge=1)
    "fly: accepted tokens that must follow a doubtful one. None: all behind the first one, at most 6."
    fly_entropy_threshold: float = Field(default=0.3, ge=0)
    "fly: the verifier's least entropy for a doubtful token to be accepted."
    fly_entropy_top_k: int = Field(default=3, ge=1)
    "fly: the likeliest tokens that this entropy is computed from."
    synthetic_acceptance_rates: list[float] | None = None
    "synthetic: unconditional rate of each position, for measuring an engine."
    synthetic_acceptance_length: float | None = None
    "synthetic: instead of rates, the mean acceptance length; it is replaced by the rates."

    _given: frozenset[str] = PrivateAttr(frozenset())  # names of the fields in the dictionary
    _target: dict[str, Any] = PrivateAttr(default_factory=dict)  # the target's config.json
    _draft: dict[str, Any] = PrivateAttr(default_factory=dict)  # the draft's config.json
    _in_target: bool = PrivateAttr(False)  # the draft is a part of the target
    _as_medusa: bool = PrivateAttr(False)  # vLLM reads the draft's config as Medusa's

    # ---- checks of single fields

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, fields):
        for name in fields:
            if name not in cls.model_fields:
                remedy = _similar(name, cls.model_fields)
                raise ValueError(f"{name}={fields[name]!r} is no field of SpeculativeConfig; {remedy}")
        return fields

    @field_validator("engine_version")
    @classmethod
    def _known_version_only(cls, engine_version):
        engine_of(engine_version)
        return engine_version

    @field_validator("attention_backend", "kv_cache_dtype", "moe_backend")
    @classmethod
    def _known_words_only(cls, word, info):
        engine_version = info.data.get("engine_version")
        engine = engine_of(engine_version)
        known = engine.backends[info.field_name]
        if word is not None and info.field_name == "attention_backend":
            word = None if word.lower() == "auto" else word.upper()
        if word is None or word in known:
            return word
        problem = f"{info.field_name}={word!r} is unknown to {line_name(engine_version)}"
        if info.field_name not in engine.own_words:
            raise ValueError(f"{problem}; {_similar(word, known)}")
        warnings.warn(f"{problem}, unless the platform has it; {_similar(word, known)}", stacklevel=2)
        return word

    @field_validator("draft_load_config")
    @classmethod
    def _known_load_fields_only(cls, fields):
        unknown = sorted(set(fields or ()) - LOAD_FIELDS)
        if unknown:
            raise ValueError(
                f"draft_load_config={fields!r}: {unknown[0]} is no field of it; choose from "
                f"{', '.join(sorted(LOAD_FIELDS))}"
            )
        return fields

    # ---- checks of fields against each other, against the draft and the target

    @model_validator(mode="after")
    def _complete(self):
        "Check all of it and fill in what follows, in the engine's order."
        self._given = frozenset(self.model_fields_set)
        self._target = config_of(self.target_model_config) or {}
        if self.tensor_parallel_size is not None:
            self.refuse("tensor_parallel_size", "is the target's; write draft_tensor_parallel_size for the draft")
        for name in sorted(self._given - {"speculative_token_tree"}):  # a chain is no tree
            _check_field(self, name, self.engine_version)
        _check_verification(self, self.engine_version)
        trained_parallel = _find_method(self)
        if trained_parallel or self.spec.parallel is True:
            self.parallel_drafting = True
        _complete_lookup(self)
        _complete_number(self)
        _complete_sampling(self)
        _complete_tree(self)
        _complete_rates(self)
        _complete_fly(self)
        _complete_devices(self)
        if problem := next(_problems(self), None):
            raise ValueError(problem)
        _warn_of_what_has_no_effect(self)
        self.draft_model_config = _made_draft_config(self)
        return self

    def refuse(self, name: str, why: str, error: type[ValueError] = ValueError) -> NoReturn:
        "Raise an error about a field: its name, its value, and why."
        raise error(f"{name}={getattr(self, name)!r} {why}")

    # ---- what follows from the fields

    @property
    def engine(self) -> Engine:  # the row of ENGINES
        "What the release line has."
        return engine_of(self.engine_version)

    @property
    def spec(self) -> Method:  # the row of METHODS
        "What the method needs."
        return METHODS[self.method or ""]

    @property
    def verification(self) -> str:  # standard, synthetic, block or fly
        "The verification by its name since vLLM 0.32."
        name = self.rejection_sample_method
        return DOCUMENTED_SAMPLING.get(name, (name, None))[0]

    @property
    def is_chain(self) -> bool:  # no node has two children
        "Whether the draft is a chain."
        if self.speculative_token_tree is None:
            return True
        return all(set(path) == {0} for path in parse_token_tree(self.speculative_token_tree))

    @property
    def depth(self) -> int:  # tokens on the longest path
        "How many tokens deep a step drafts: the `k` of `generate`."
        tree = self.speculative_token_tree
        return max(map(len, parse_token_tree(tree))) if tree else self.num_speculative_tokens or 0

    def tokens_for(self, batch_size: int, num_speculative_tokens: int) -> int:
        """How many tokens to draft, at most `num_speculative_tokens`, for so many requests together; between two ranges
        and after the last: as in the one before (vLLM 0.32, v1/spec_decode/dynamic/utils.py)."""
        tokens = num_speculative_tokens
        for first, _, number in sorted(self.num_speculative_tokens_per_batch_size or ()):
            if first <= batch_size:
                tokens = number
        return min(tokens, num_speculative_tokens)

    @property
    def draft_max_model_len(self) -> int | None:  # None: neither model has a limit, as known
        "Longest text that is drafted for: what is given, else the draft's or the target's."
        if not self.spec.weights:
            return None
        lengths = [served_length(self._draft, self._as_medusa), served_length(self._target)]
        return self.max_model_len or min(filter(None, lengths), default=None)

    @property
    def draft_parallel_config(self) -> ParallelConfig | None:  # None: the target's is not known
        """How the drafter is spread over the target's devices: not in stages, and its experts only if it has some (vLLM
        0.32, config/speculative.py); suffix decoding runs on none."""
        target = self.target_parallel_config
        if target is None or self.method == "suffix":
            return None
        if not self.spec.weights:
            return target
        counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        has_experts = not self._draft or any(find_field(self._draft, name) for name in counts)
        changed = dict(pipeline_parallel_size=1, tensor_parallel_size=self.draft_tensor_parallel_size or 1)
        changed["enable_expert_parallel"] = target.enable_expert_parallel and has_experts
        return target.model_copy(update=changed)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:  # empty: the config has none
        "Layers of the target that the draft reads, by its config."
        config = (self.draft_model_config or {}).get("hf_config") or {}
        names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
        return tuple(next((config[name] for name in names if config.get(name)), ()))

    @property
    def max_num_new_slots_for_drafting(self) -> int:  # for each request
        "New places in the drafter's batch, beside the one that each request has."
        if self.method in self.engine.draft_in_own_batch:
            return 0
        drafted = (self.num_speculative_tokens or 1) - 1 if self.parallel_drafting else 0
        return drafted + self.spec.slots

    @property
    def num_lookahead_tokens(self) -> int | None:  # None: the draft has no such number
        "How many heads of a Medusa or MLP draft are used: one for each token."
        heads = self.method in ("medusa", "mlp_speculator")
        counted = heads or "num_lookahead_tokens" in self._draft
        return self.num_speculative_tokens if counted else None

    # ---- the questions by which the engine chooses its code: its names, its answers

    def use_ngram(self) -> bool:
        "Looks n-grams up, on processors or on a GPU."
        return self.method in ("ngram", "ngram_gpu")

    def use_ngram_gpu(self) -> bool:
        "Looks n-grams up on a GPU."
        return self.method == "ngram_gpu"

    def uses_draft_model(self) -> bool:
        "Drafts with a language model of its own."
        return self.method == "draft_model"

    def uses_extract_hidden_states(self) -> bool:
        "Drafts nothing, and returns hidden states."
        return self.method == "extract_hidden_states"

    def use_eagle(self) -> bool:
        "Drafts from the target's hidden states, with a KV cache of its own."
        return self.method in ("eagle", "eagle3", "mtp", "dflash", "dspark")

    def use_dflash(self) -> bool:
        "Drafts a block with DFlash."
        return self.method == "dflash"

    def use_dspark(self) -> bool:
        "Drafts a block with DSpark."
        return self.method == "dspark"

    def is_xpress(self) -> bool:
        "Drafts a block with DFlash and XPress's refiner."
        names = {"Qwen3XPressModel", "DFlashQwen3XPressModel"}  # before and after vLLM renames them
        named = names & {*(self._draft.get("architectures") or [])}
        return self.method == "dflash" and (self._draft.get("speculators_model_type") == "xpress" or bool(named))

    def uses_draft_kv_cache(self) -> bool:
        "Has a KV cache beside the target's."
        return self.uses_draft_model() or self.use_eagle() or self.uses_extract_hidden_states()

    def _mtp_head(self) -> str | None:
        head = mtp_head(self._draft, self.engine_version) if self.method == "mtp" else None
        return head and head[0]

    def use_gemma4_mtp(self) -> bool:
        "Drafts with Gemma 4's assistant."
        return self._mtp_head() == "gemma4_mtp"

    def use_step3p5_mtp(self) -> bool:
        "Drafts with Step 3.5's MTP layers."
        return self._mtp_head() == "step3p5_mtp"

    def use_multi_module_mtp(self) -> bool:
        "Several MTP layers, each for a token of its own, and more than one is drafted."
        if self._mtp_head() is None:
            return False
        layers = find_field(self._draft, "num_nextn_predict_layers", 1)
        layers = 1 if self._mtp_head() == "mimo_v2_mtp" else layers
        return min(layers, self.num_speculative_tokens) > 1

    def needs_eagle_block_drop(self) -> bool:
        "The draft's keys and values at a position depend on the token after it."
        return self.use_eagle() and self.method not in self.engine.no_block_drop

    def use_eagle_block_drop(self) -> bool:
        "The last block of the prefix cache is not reused."
        return self.needs_eagle_block_drop() and not self.disable_eagle_block_drop

    def draft_shares_target_positions(self) -> bool:
        "The draft's table of positions is made as long as the target's."
        config = (self.draft_model_config or {}).get("hf_config")
        if config is None or self.method not in self.engine.raises_positions:
            return False
        kinds = [rope.get("rope_type") or rope.get("type") for rope in rope_of(config)]
        return all((kind or "default") in POSITIONS_SIZE_A_TABLE for kind in kinds)

    def uses_dynamic_speculative_decoding(self) -> bool:
        "The number of tokens depends on the number of requests."
        return self.num_speculative_tokens_per_batch_size is not None

    def compute_hash(self) -> str:  # hex digits
        """The same for configs under which the target computes the same graph: it counts whether hidden states of inner
        layers are returned and of which, adaptive verification of DSpark, and whether MTP shares its indices. (vLLM
        adds a hash of the draft, whose graph it compiles as well.)"""
        share = self.index_share_for_mtp_iteration
        if share is None:
            share = find_field(self._draft, "index_share_for_mtp_iteration", False)
        graph = (
            self.spec.aux,
            self.aux_layer_ids if self.spec.aux else (),
            self.use_dspark() and self.enable_adaptive_verification,
            self.method == "mtp" and share,
        )
        return hashlib.sha256(repr(graph).encode()).hexdigest()

    def __repr__(self) -> str:
        "Method, model and number of tokens, as vLLM prints them."
        model = self.model if self.spec.weights else None
        if self.use_ngram_gpu():  # vLLM asks the target's config for its name
            model = str(self.target_model_config)
        number = self.num_speculative_tokens
        return f"SpeculativeConfig(method={self.method!r}, model={model!r}, num_spec_tokens={number!r})"

    __str__ = __repr__

    # ---- what is made of it

    def to_json(self, engine_version: str | None = None) -> str:
        """This config as JSON for --speculative-config of an engine (a key of ENGINES; None: the config's, else the
        newest); what is at its default is left out. Errors: ValueError naming what that engine cannot be given."""
        return json.dumps(_fields_for(self, engine_version or self.engine_version or NEWEST))

    def rule(self) -> Rule:  # of `decode.acceptance_rules`
        "The acceptance rule. Errors: ValueError for block verification or FLy of a tree with branches."
        if self.verification == "synthetic":
            assert self.synthetic_acceptance_rates is not None  # filled in with the config
            return synthetic(self.synthetic_acceptance_rates)
        if self.verification in ("block", "fly") and not self.is_chain:
            self.refuse(
                "speculative_token_tree",
                f"has branches, and rejection_sample_method={self.verification!r} is defined for chains; write "
                "'standard', or leave the tree out",
            )
        if self.verification == "fly":
            return fly(self.fly_window_size, self.fly_entropy_threshold, self.fly_entropy_top_k)
        return RULES["strict" if self.rejection_sample_method == "strict" else self.verification]

    def drafter(self, verifier: Verifier) -> Drafter:
        """The drafter for `generate`, on the verifier's device: it grows the tree, drafts greedily, and stops, as the
        config says. Errors: ValueError if it cannot be read, or cannot draft the tree."""
        drafter: Drafter = _plain_drafter(self, verifier)
        tree = self.speculative_token_tree
        if tree and not self.is_chain:
            if not isinstance(drafter, GrowsTrees):
                self.refuse(
                    "speculative_token_tree", f"has branches, and method={self.method!r} drafts chains; leave it out"
                )
            drafter = TreeDrafter(drafter, parse_token_tree(tree))
        greedy = self.spec.weights and self.draft_sample_method == "greedy"
        if greedy or self.draft_max_model_len:
            longest = self.draft_max_model_len and self.draft_max_model_len - self.depth
            drafter = ServedDrafter(drafter, greedy, longest)
        return drafter


# ---- what fields hold


def _similar(word: str, known: Iterable[str]) -> str:
    "The remedy for a word that is not known."
    similar = difflib.get_close_matches(word, known, 1)
    return f"did you mean {similar[0]}?" if similar else "leave it out"


def config_of(model: Any) -> dict[str, Any] | None:
    """The config.json of a model, by its folder, that content, or a transformers config; None: no folder of this
    machine; nothing is fetched. Errors: ValueError for any other type, or a malformed config."""
    if isinstance(model, PretrainedConfig):
        return model.to_dict()
    if model is None:
        return None
    if not isinstance(model, (dict, str, os.PathLike)):
        raise ValueError(
            f"target_model_config={shown(model)}: must be a model's folder, the content of its config.json, or its "
            "config"
        )
    if isinstance(model, dict):
        check_field_types(model)
        return model
    file = Path(model) / "config.json"
    if not file.is_file():
        return None
    config = read_object(file)
    check_field_types(config, f"{file}: ")
    return config


def model_name(model: Any, config: dict[str, Any]) -> str | None:
    "What a model is called: its path, or the name in the config that `config_of` found; None: neither."
    return str(model) if isinstance(model, (str, Path)) else config.get("_name_or_path")


def parse_token_tree(text: str | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Read a token tree, "[(0,), (1,), (0, 0)]" or the list itself, breadth first. Errors: ValueError saying which path
    is wrong, and how."""
    try:
        return parse_tree(text if isinstance(text, str) else str([tuple(path) for path in text]))
    except (ValueError, TypeError) as e:
        raise ValueError(f"speculative_token_tree: {e}") from None


def length_to_rates(length: float, n: int) -> list[float]:
    """Unconditional rates [n] of least variance with this mean acceptance length in [1, n + 1], the bonus token
    counted, of n drafted tokens a step: ones, one fraction, zeros; they add up to length - 1."""
    if not 1 <= length <= n + 1:
        raise ValueError(
            f"synthetic_acceptance_length={length} must lie in [1, {n + 1}]: a step writes one token and at most "
            f"num_speculative_tokens={n} more"
        )
    full = int(length - 1)
    rates = [1.0] * full + [length - 1 - full] + [0.0] * n
    return rates[:n]


# ---- checks: each takes a config whose fields have their types, and names a field where it refuses


def _check_field(config: SpeculativeConfig, name: str, engine_version: str | None):
    if name in engine_of(engine_version).missing_fields:
        lines = lines_with(lambda row: name not in row.missing_fields)
        config.refuse(name, f"is a field of {lines}, not of {line_name(engine_version)}")


def _check_verification(config: SpeculativeConfig, engine_version: str | None):
    if config.verification not in engine_of(engine_version).verifications:
        lines = lines_with(lambda row: config.verification in row.verifications)
        config.refuse("rejection_sample_method", f"is of {lines}, not of {line_name(engine_version)}")


def _check_served(method: str | None, engine_version: str | None):
    "Errors: ValueError if that release line has no such method, or cannot load its drafts."
    if method not in engine_of(engine_version).served:
        raise ValueError(
            f"method={method!r} is not served by {line_name(engine_version)}; it is by "
            f"{lines_with(lambda row: method in row.served)}"
        )


def _find_method(config: SpeculativeConfig) -> bool:
    """Set `method` and read the draft's config.json; whether the checkpoint was trained to draft all tokens in one
    forward pass. A checkpoint of this library says what it is; another is known by its path, then by its architecture
    or model_type; what remains is an ordinary language model."""
    _replace_former_names(config)
    _read_draft(config)
    kind = config._draft.get("speculators_model_type")
    methods = method_of_types() if kind else {}
    served, parallel = methods.get(kind or "", (None, False))
    if kind and not served:
        config.refuse(
            "model",
            f"is a drafter with speculators_model_type={kind!r}, which vLLM does not serve; it serves "
            f"{', '.join(methods)}",
        )
    if why := config.engine.unserved.get(kind or ""):
        config.refuse("model", f"is a drafter with speculators_model_type={kind!r}: {why}")
    if config.method != served and not (served and config.method == "medusa"):
        _follow_path(config)
    if served and config.method not in (None, served):
        config.refuse("method", f"does not fit {config.model}, which is served as {served!r}; leave method out")
    found = served or method_in_name(config.model or "") or method_in_config(config._draft, config.engine_version)
    config.method = config.method or found or "draft_model"
    needed = config.spec.weights or config.method == "custom_class"
    if config.model is None and needed and not config._in_target:
        what = "the draft's folder or hub id" if config.spec.weights else "package.Class"
        config.refuse("model", f"and method={config.method!r}: give {what}")
    if config._draft and not served:
        _check_foreign_draft(config)
    _check_served(config.method, config.engine_version)
    return parallel


def _replace_former_names(config: SpeculativeConfig):
    version = config.engine_version
    heads = {family.head for family in MTP_FAMILIES if version is None or version in family.lines}
    if config.method in heads - {"mtp"}:
        warnings.warn(f"method={config.method!r} is the former name; write 'mtp'", DeprecationWarning, stacklevel=2)
        config.method = "mtp"
    if config.method == "[ngram]" or (config.method is None and config.model in ("ngram", "[ngram]")):
        config.method = "ngram"
    config._as_medusa = config.method == "medusa"
    if config.method not in (None, *METHODS):
        config.refuse("method", f"is unknown; write one of {', '.join(METHODS)}, or leave it out")
    if config.method is not None and config.method not in config.engine.methods:
        _check_served(config.method, version)
    if config.method is None and names_python_class(config.model or ""):
        if Path(config.model or "").is_dir():
            warnings.warn(
                f"model={config.model!r} is read as a Python class, though there is such a folder; write "
                f"'./{config.model}'",
                stacklevel=2,
            )
        config.method = "custom_class"
    if config.method is None and config.model is None:
        config.refuse("method", "and model=None: name a method, or the draft model")


def _read_draft(config: SpeculativeConfig):
    "The draft's config.json. A method without a checkpoint has its own name as `model`, as in vLLM."
    if config.model is None and config.method in ("mtp", "dspark"):  # a part of the target
        if config.target_model_config is None:
            config.refuse(
                "method",
                "without a model: the draft is then a part of the target, so target_model_config must be present; "
                "give it, or model",
            )
        config._draft, config._in_target = config._target, True
        config.model = model_name(config.target_model_config, config._draft)
        quantization = find_field(config._draft, "quantization_config") or {}
        config.quantization = config.quantization or quantization.get("quant_method")
    elif config.method is None or config.spec.weights:
        config._draft = config_of(config.model) or {}
    elif config.method != "custom_class" and (config.model is None or config.spec.aux):
        config.model = config.method


def _follow_path(config: SpeculativeConfig):
    "vLLM lets the path decide for every method that is not itself found by a name: so it is here, with a warning."
    found = method_in_name(config.model or "")
    if found is None or config.method is None or not config.spec.weights:
        return
    if config.method not in METHOD_OF_NAME.values():
        warnings.warn(
            f"model={config.model!r}: vLLM reads {found!r} out of this path and does not use "
            f"method={config.method!r}; rename the folder",
            stacklevel=2,
        )
        config.method = found


def _check_foreign_draft(config: SpeculativeConfig):
    "A draft that another project has written: what vLLM finds in it overrules some methods."
    draft, version = config._draft, config.engine_version
    kind = draft.get("model_type")
    if config._as_medusa:
        kind = "medusa"  # old checkpoints have no type, so vLLM takes the method for it
    found = method_in_config(draft | {"model_type": kind}, version)
    if found is None and config.method == "mtp":
        found = _transformers_mtp(config)
    if kind is None:
        config.refuse(
            "model",
            "has a config.json without model_type, so no engine can tell what it is; add it, or write method='medusa' "
            "if the folder has Medusa heads",
        )
    later = config.engine.later_drafts & {*(draft.get("architectures") or [])}
    if later:
        lines = lines_with(lambda row: not later & row.later_drafts)
        config.refuse("model", f"is a {'/'.join(later)}, which {line_name(version)} does not have; {lines} has")
    if found in ("medusa", "mlp_speculator"):
        _check_served(found, version)  # a line without them cannot read their config
    # vLLM looks for these in a draft's config, whichever of them is given
    if config.method in ("draft_model", "mtp", "mlp_speculator", "medusa") and found:
        config.method = found
    elif config.method in ("mtp", "mlp_speculator"):
        needs = "a head that predicts further tokens" if config.method == "mtp" else "an MLP speculator"
        config.refuse(
            "method", f"needs {needs}; {config.model} has model_type={kind!r}; leave method out", NotSupported
        )
    if config.method not in config.engine.architectures:
        return
    if text_part(draft) is not draft and "vocab_size" not in draft:
        config.refuse(
            "model",
            f"is a whole multimodal model, and no draft for method={config.method!r}; give a draft, or leave method "
            "out",
        )
    architecture = served_architecture(config.method, draft, version)
    if architecture not in config.engine.architectures[config.method]:
        config.refuse(
            "method",
            f"makes vLLM serve {config.model} as {architecture}, which it does not have; convert the draft, or leave "
            "method out",
        )


def _transformers_mtp(config: SpeculativeConfig) -> str | None:
    "MTP layers of a target that vLLM has no class for, by the Transformers back end."
    family = str(text_part(config._target).get("model_type"))
    layers = find_field(config._target, MTP_LAYERS_OF.get(family, "num_mtp_layers"))
    if not layers or not config.engine.transformers_mtp:
        return None
    if text_part(config._target) is not config._target:
        config.refuse(
            "method",
            "by the Transformers back end is for text models, and the target has parts; choose another drafter",
            NotSupported,
        )
    config._draft = config._draft | {"n_predict": layers}
    return "mtp"


SUFFIX_BOUNDS = {  # field -> least and largest value; vLLM checks them for this method alone
    "suffix_decoding_max_tree_depth": (1, MOST_DRAFTED),
    "suffix_decoding_max_cached_requests": (0, float("inf")),
    "suffix_decoding_max_spec_factor": (0, float("inf")),
    "suffix_decoding_min_token_prob": (0, 1),
}


def _complete_lookup(config: SpeculativeConfig):
    "The lengths of the n-grams; the numbers of suffix decoding, by which the number of tokens may be found."
    if config.use_ngram():
        low, high = config.prompt_lookup_min, config.prompt_lookup_max
        config.prompt_lookup_min, config.prompt_lookup_max = low or high or 5, high or low or 5
    elif config.method != "suffix":
        config.prompt_lookup_min = config.prompt_lookup_max = 0  # as vLLM has it
    for name, (low, high) in SUFFIX_BOUNDS.items():
        if config.method == "suffix" and not low <= getattr(config, name) <= high:
            end = f"to {high}" if high < float("inf") else "upwards"
            config.refuse(name, f"is out of range; write a number from {low} {end}")


def _complete_number(config: SpeculativeConfig):
    "`num_speculative_tokens`: what is given, else what the draft's config has."
    method, draft = config.method, config._draft
    if config.num_speculative_tokens is None and method == "suffix":
        depth = config.suffix_decoding_max_tree_depth
        warnings.warn(
            f"num_speculative_tokens is not given; suffix decoding drafts up to its tree's depth, {depth}", stacklevel=2
        )
        config.num_speculative_tokens = depth
    predicted = predicted_tokens(method or "", draft, config.engine_version)
    n = config.num_speculative_tokens or predicted
    if not n and (method == "dspark" or "speculators_config" in draft):
        n = default_length(draft)
    config.num_speculative_tokens = n
    if not n:
        config.refuse(
            "num_speculative_tokens",
            f"and the config of the draft ({config.model}) has no number; write how many tokens to draft",
        )
    if predicted and n > predicted and n % predicted:
        config.refuse(
            "num_speculative_tokens",
            f"must be at most the {predicted} tokens that the draft predicts (n_predict), or a multiple of it",
        )
    head = config._mtp_head()
    if head == "mtp" and n > 1:
        config.refuse("num_speculative_tokens", "must be 1: this head has one trained step")
    if head and n > (predicted or 1) and head not in RUN_ONCE:
        warnings.warn(
            f"num_speculative_tokens={n}: {head} has {predicted or 1} layer(s) that predict, which run again for "
            "further tokens; expect fewer to be accepted",
            stacklevel=2,
        )


def _complete_sampling(config: SpeculativeConfig):
    "`draft_sample_method`, which must not contradict `rejection_sample_method`."
    given = config.draft_sample_method
    if given == "probabilistic" and "rejection_sample_method" not in config.model_fields_set:
        config.rejection_sample_method = "probabilistic"  # the lines have different defaults
    name = config.rejection_sample_method
    implied = DOCUMENTED_SAMPLING.get(name, (name, "greedy"))[1]
    if name in ("strict", "probabilistic") and given not in (None, implied):
        config.refuse(
            "draft_sample_method",
            f"contradicts rejection_sample_method={name!r}; write 'standard' there, or leave this out",
        )
    config.draft_sample_method = given or implied


def _complete_tree(config: SpeculativeConfig):
    "The token tree as text, breadth first."
    if config.speculative_token_tree is None:
        return
    paths, n = parse_token_tree(config.speculative_token_tree), config.num_speculative_tokens
    if len(paths) != n:
        config.refuse("speculative_token_tree", f"has {len(paths)} tokens, num_speculative_tokens={n}; make them equal")
    config.speculative_token_tree = str(paths)


def _complete_rates(config: SpeculativeConfig):
    "Synthetic acceptance: rates in place of a length."
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    if config.verification != "synthetic":
        return
    if (rates is None) == (length is None):
        raise ValueError(
            "rejection_sample_method='synthetic' wants exactly one of "
            f"synthetic_acceptance_rates={rates} and synthetic_acceptance_length={length}"
        )
    if length is not None:
        config.synthetic_acceptance_rates = length_to_rates(length, config.num_speculative_tokens or 0)
        config.synthetic_acceptance_length = None


def _complete_fly(config: SpeculativeConfig):
    "FLy's window (arXiv 2511.22972)."
    if config.verification == "fly" and config.fly_window_size is None:
        config.fly_window_size = int(fly_window(config.num_speculative_tokens or 0))


def _complete_devices(config: SpeculativeConfig):
    "`draft_tensor_parallel_size`: the target's, but for an MLP speculator."
    target = config.target_parallel_config
    if target is None or not config.spec.weights or config.draft_tensor_parallel_size is not None:
        return
    size = target.tensor_parallel_size
    config.draft_tensor_parallel_size = 1 if config.method == "mlp_speculator" else size
    if config.draft_tensor_parallel_size < size:
        warnings.warn("draft_tensor_parallel_size=1: an MLP speculator runs on one device", stacklevel=2)


def _problems(config: SpeculativeConfig) -> Iterator[str]:
    "What is wrong in a config that is filled in: each a field, its value, and what to write."
    method, spec, engine, n = config.method, config.spec, config.engine, config.num_speculative_tokens or 0

    def about(name: str) -> str:
        return f"{name}={getattr(config, name)!r}"

    if config.use_ngram() and (config.prompt_lookup_min or 0) > (config.prompt_lookup_max or 0):
        low, high = about("prompt_lookup_min"), about("prompt_lookup_max")
        yield f"{low} is more than {high}; lower it, or raise the other"
    if config.draft_model_config and method == "suffix":
        yield f"{about('draft_model_config')} is of no model; leave it out"

    # ---- the proposal
    if config.num_speculative_tokens_per_batch_size is not None:
        schedule = sorted(config.num_speculative_tokens_per_batch_size)
        ends = [0, *(last for _, last, _ in schedule)]
        fits = all(end < first <= last and tokens >= 0 for end, (first, last, tokens) in zip(ends, schedule))
        if not fits or not schedule or schedule[0][0] != 1:
            yield (
                f"{about('num_speculative_tokens_per_batch_size')} must be ranges (first size, last size, tokens) that "
                "do not overlap, the first one from 1, with 0 or more tokens; e.g. [(1, 8, 4), (9, 64, 2)]"
            )
    for name, reader in (("index_share_for_mtp_iteration", "mtp"), ("use_heterogeneous_vocab", "draft_model")):
        if getattr(config, name) not in (None, type(config).model_fields[name].default) and method != reader:
            yield f"{about(name)} is for method={reader!r}, this is {method!r}; leave it out"
    headless = method not in ("eagle", "eagle3", "mtp") or config.use_gemma4_mtp()
    if config.draft_lm_head_quantization is not None and headless:
        yield (
            f"{about('draft_lm_head_quantization')} is for drafts that share the target's head: eagle, eagle3 and mtp "
            f"(but Gemma 4's); this is {method!r}; leave it out"
        )

    # ---- what needs all logits of the draft, and what needs its best token alone
    sampled = config.draft_sample_method == "probabilistic"
    if config.use_heterogeneous_vocab and sampled:
        yield (
            f"{about('use_heterogeneous_vocab')} matches single tokens, so they must be drafted greedily: "
            "draft_sample_method='greedy'"
        )
    if config.use_local_argmax_reduction:
        local = about("use_local_argmax_reduction")
        if (sampled and spec.weights and method not in ("medusa", "mlp_speculator")) or not config.is_chain:
            yield (
                f"{local} finds the best token only, so the draft must be a greedy chain: "
                "draft_sample_method='greedy', no tree"
            )
        if config.enable_adaptive_verification and method != "dspark":
            yield (
                f"{about('enable_adaptive_verification')} needs all logits of the draft; leave out "
                "use_local_argmax_reduction"
            )
        if config.use_heterogeneous_vocab and not engine.heterogeneous_argmax:
            yield (
                f"{local} finds the best token of the draft's vocabulary, which the target may not have: "
                "use_heterogeneous_vocab needs all logits; leave one of them out"
            )

    # ---- verification
    rates = config.synthetic_acceptance_rates
    if config.verification == "synthetic" and rates is not None:
        if len(rates) != n:
            yield (
                f"{about('synthetic_acceptance_rates')} must have one rate for each of num_speculative_tokens={n} "
                "positions"
            )
        elif not all(0 <= rate <= before for before, rate in zip([1.0, *rates], rates)):
            yield (
                f"{about('synthetic_acceptance_rates')} must lie in [0, 1] and not increase: a position counts only "
                "where all before it were accepted"
            )
    for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
        if getattr(config, name) is not None and config.verification != "synthetic":
            yield (
                f"{about(name)} has no effect without rejection_sample_method='synthetic'; write that, or leave this "
                "out"
            )
    if config.verification == "fly":
        if config.uses_extract_hidden_states() or n < 2:
            yield (
                f"{about('rejection_sample_method')} looks at the tokens after a doubtful one, so a method must draft "
                f"at least 2; num_speculative_tokens={n}; write 'standard'"
            )
        elif (config.fly_window_size or 0) >= n:
            window = about("fly_window_size")
            yield f"{window} must be smaller than num_speculative_tokens={n}; lower it, or leave it out"
    yield from _device_problems(config)
    if spec.weights:
        yield from _draft_problems(config)
    if config._target:
        yield from _target_problems(config)


def _device_problems(config: SpeculativeConfig) -> Iterator[str]:
    "Devices of the draft: one or the target's, and a divisor of the attention heads."
    target, devices, loads = config.target_parallel_config, config.draft_parallel_config, config.spec.weights
    if target is None or devices is None:
        return
    chosen, size = config.draft_tensor_parallel_size, target.tensor_parallel_size
    if loads and chosen not in (1, size):
        yield f"draft_tensor_parallel_size={chosen} must be 1 or the target's {size}"
    owner, model = ("draft", config._draft) if loads else ("target", config._target)
    has_none = config._as_medusa or config.method == "medusa"
    heads = 0 if has_none else find_field(model, "num_attention_heads", 0)
    if heads % devices.tensor_parallel_size:
        yield (
            f"draft_tensor_parallel_size={devices.tensor_parallel_size}: the {owner} has {heads} attention heads, "
            "which cannot be divided by that; use a divisor"
        )


def _draft_problems(config: SpeculativeConfig) -> Iterator[str]:
    "A draft that is loaded: length of the texts, quantization, and fields of a single architecture."
    method, draft, n = config.method, config._draft, config.num_speculative_tokens or 0
    limits = {"draft": served_length(draft, config._as_medusa), "target": served_length(config._target)}
    longest = config.max_model_len or 0
    for owner, limit in limits.items():
        if limit and longest > limit:
            yield f"max_model_len={longest} is longer than the {owner}'s {limit}; lower it, or leave it out"
    if problem := quantization_problem(config.quantization, draft):
        yield f"quantization={config.quantization!r} {problem}"

    vocabulary = find_field(draft, "draft_vocab_size") or find_field(draft, "vocab_size", 0)
    topk = config.dspark_draft_topk
    if topk and method != "dspark":
        yield f"dspark_draft_topk={topk} is for method='dspark', this is {method!r}; leave it out"
    topk = topk or draft.get("dspark_draft_topk")
    if topk and method == "dspark" and draft:
        architecture = (draft.get("architectures") or [""])[0]
        is_qwen = architecture in ("Qwen3DSparkModel", "Qwen3OmniDSparkModel") or (
            architecture == "DSparkDraftModel" and draft.get("model_type") == "qwen3"
        )
        if topk > vocabulary:
            yield f"dspark_draft_topk={topk} is more than the draft's {vocabulary} tokens; lower it"
        if "speculators_model_type" not in draft and not is_qwen:
            yield f"dspark_draft_topk={topk} is for Qwen3 DSpark drafts, this is {architecture}; leave it out"

    topc = config.xpress_topc
    if topc is not None and not config.is_xpress():
        yield f"xpress_topc={topc} is for an XPress draft, and {config.model} is none; leave it out"
    if config.is_xpress():
        topc = draft.get("xpress_topc") if topc is None else topc
        if topc is not None and not 0 <= topc <= vocabulary:
            yield f"xpress_topc={topc} must lie between 0 and the draft's {vocabulary} tokens"
        block = draft.get("xpress_block_size") or draft.get("block_size")
        block = block or draft.get("num_speculative_steps", 15) + 1
        if n + 1 != block:  # vLLM's kernel takes its block to be as long as the draft and the anchor
            yield (
                f"num_speculative_tokens={n} must be {block - 1}: vLLM reads the mixture of an XPress draft's block of "
                f"{block} slots in strides of num_speculative_tokens + 1"
            )


def _target_problems(config: SpeculativeConfig) -> Iterator[str]:
    "Family, parts and vocabulary of a target that is known."
    method, target, draft = config.method, config._target, config._draft
    families, kind = config.engine.aux_families, str(text_part(target).get("model_type"))
    if families and config.spec.aux and not any(name in kind for name in families):
        yield (
            f"method={method!r} reads hidden states of inner layers, and {line_name(config.engine_version)} has none "
            f"of model_type={kind!r}; it can be one of {', '.join(families)}"
        )
    if method == "mtp" and target.get("model_type") == "deepseek_v41":
        yield f"method={method!r} is not what a deepseek_v41 target carries; write 'dspark'"
    has_parts = text_part(target) is not target
    if config._as_medusa and "speculators_model_type" not in draft and has_parts and "vocab_size" not in target:
        yield (
            f"method={method!r} drafts for text models: vLLM asks the whole config of the target for its vocab_size, "
            "which is in a part; choose another drafter"
        )
    drafted, verified = find_field(draft, "vocab_size"), find_field(target, "vocab_size")
    if method == "draft_model" and not config.use_heterogeneous_vocab and drafted not in (None, verified):
        yield (
            f"model={config.model!r} has vocab_size {drafted}, the target {verified}: their token ids have different "
            "meanings; choose a draft with the target's tokenizer"
        )
    if method == "dspark" and draft and is_omni(target):
        problem = omni_problem(draft, text_part(target), config.num_speculative_tokens or 0, config.model)
        yield from [problem] if problem else []


def _warn_of_what_has_no_effect(config: SpeculativeConfig):
    "Warn of fields that vLLM accepts and does not use."
    useless = {}
    if config.parallel_drafting and config.spec.parallel is False:
        useless["parallel_drafting"] = f"is nothing that method={config.method!r} can do"
    if config.method == "suffix" and config.suffix_decoding_max_tree_depth == 1:
        useless["suffix_decoding_max_tree_depth"] = "leaves no place for a token after a match, so nothing is drafted"
    if config.verification != "fly":
        fly_fields = {name for name in config._given if name.startswith("fly_")}
        useless |= dict.fromkeys(sorted(fly_fields), "has no effect without rejection_sample_method='fly'")
    for name, why in useless.items():
        warnings.warn(f"{name}={getattr(config, name)!r} {why}; leave it out", stacklevel=2)


def _made_draft_config(config: SpeculativeConfig) -> dict[str, Any] | None:
    "As vLLM makes it: the draft's config, or the target's where there is no draft; None: neither is known."
    stated = (config.draft_model_config or {}).get("hf_config") or {}
    model, fields = config.model, config._draft
    if not config.spec.weights:
        model = model_name(config.target_model_config, config._target)
        fields = config._target | (stated if config.spec.aux else {})
    if not fields or config.method == "suffix":
        return None
    return dict(model=model, hf_config=fields, max_model_len=config.draft_max_model_len)


# ---- JSON for an engine


def _fields_for(config: SpeculativeConfig, engine_version: str) -> dict[str, Any]:
    "The fields that are not at the engine's default. What the engine has no equivalent for is an error, not a loss."
    engine, line = engine_of(engine_version), line_name(engine_version)
    fields = {name: field for name, field in type(config).model_fields.items() if not field.exclude}
    defaults = {name: field.default for name, field in fields.items()} | engine.defaults
    values = {name: getattr(config, name) for name in fields}
    _check_served(config.method, engine_version)
    if engine_version == "documented":
        values["rejection_sample_method"] = _documented_method(config)
        del values["draft_sample_method"]
        if config._in_target and text_part(config._target).get("model_type") == "deepseek_v32":
            values["enforce_eager"] = True  # that line has no graphs for its MTP head
    else:
        _check_verification(config, engine_version)
        values["rejection_sample_method"] = config.verification
        if not config.is_chain:
            config.refuse("speculative_token_tree", f"has branches, and {line} drafts chains only; leave it out")
        del values["speculative_token_tree"]
    for name in sorted(engine.missing_fields & values.keys()):
        if values.pop(name) != defaults[name]:
            _check_field(config, name, engine_version)
    has_parts = text_part(config._target) is not config._target
    if config._as_medusa:  # whatever it is then served as
        values["method"] = "medusa"
    elif config.method == "medusa" and has_parts:  # vLLM must find the method itself
        values["method"] = None
    values["draft_model_config"] = _stated_draft_config(config)
    named = config.spec.weights or config.method == "custom_class"
    if config._in_target or not named:
        del values["model"]
    if "draft_tensor_parallel_size" not in config._given:
        del values["draft_tensor_parallel_size"]
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        values[name] = values[name] or None  # vLLM's 0 means not used, and is not taken
    emitted = {name: value for name, value in values.items() if value != defaults[name]}
    if engine_version != config.engine_version:  # checked by other rules so far
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            type(config)(
                **emitted,
                target_model_config=config.target_model_config,
                target_parallel_config=config.target_parallel_config,
                engine_version=engine_version,
            )
    return emitted


def _documented_method(config: SpeculativeConfig) -> str:
    "The pair (verification, draft) as the one name that the documented line has for it."
    pair = (config.verification, config.draft_sample_method)
    if found := [name for name, same in DOCUMENTED_SAMPLING.items() if same == pair]:
        return found[0]
    raise ValueError(
        f"rejection_sample_method={pair[0]!r} with draft_sample_method={pair[1]!r} has no equivalent in the documented "
        f"line; it has {', '.join(DOCUMENTED_SAMPLING)}"
    )


def _stated_draft_config(config: SpeculativeConfig) -> dict[str, Any] | None:
    "Of the draft's config that was made, what the engine cannot make itself."
    if config.method != "extract_hidden_states" or config.draft_model_config is None:
        return None
    fields = config.draft_model_config["hf_config"]
    stated = {name: value for name, value in fields.items() if config._target.get(name) != value}
    return dict(hf_config=stated) if stated else None


# ---- the drafter on our decoder


class ServedDrafter:
    """Another drafter as an engine runs it: greedily where its config says so, and only for texts that end within its
    context, draft included; a longer one is decoded without drafts (vLLM 0.32, v1/worker/gpu_model_runner.py)."""

    def __init__(self, drafter: Drafter, greedy: bool = False, longest: int | None = None):
        """greedy: its most likely tokens at every temperature, a point mass and not a sample; longest: a text, in
        tokens, that is still drafted for; None: any."""
        self.drafter, self.greedy, self.longest = drafter, greedy, longest
        self.aux_layer_ids: Sequence[int] = drafter.aux_layer_ids

    def __copy__(self):
        return type(self)(copy.copy(self.drafter), self.greedy, self.longest)

    def __getattr__(self, name):
        if name == "drafter":  # a copy has none yet
            raise AttributeError(name)
        return getattr(self.drafter, name)  # trained length, finish

    def reset(self) -> None:
        "Start a new request."
        self.drafter.reset()

    def propose(self, tokens: Tensor, features: Tensor | None, k: int, sampling: Sampling) -> TokenTree:
        """Draft for tokens [n], which are all decided, with the hidden states [m, A·H] that are new since the last
        call; nothing once the text is too long."""
        if self.longest is not None and len(tokens) > self.longest:
            return TokenTree.chain(tokens[:0])
        if not self.greedy:
            return self.drafter.propose(tokens, features, k, sampling)
        tree = copy.copy(self.drafter.propose(tokens, features, k, Sampling()))
        tree.probs = None
        return tree


def _plain_drafter(config: SpeculativeConfig, verifier: Verifier) -> Any:
    "The drafter of a method, without a tree or a limit."
    if config.use_ngram():
        return NgramDrafter(config.prompt_lookup_min or 0, config.prompt_lookup_max or 0)
    if config.method == "suffix":
        if config.suffix_decoding_max_tree_depth < 2:
            config.refuse("suffix_decoding_max_tree_depth", "drafts nothing; write 2 or more")
        return SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    if config.uses_extract_hidden_states():
        return HiddenStates(config.aux_layer_ids or verifier.aux_layer_ids)
    if config.method == "custom_class":
        config.refuse(
            "method", f"names a Python class of the engine, {config.model}; here give your own Drafter to generate()"
        )
    if config.uses_draft_model():
        if config.use_heterogeneous_vocab:
            config.refuse(
                "use_heterogeneous_vocab",
                "is for the engine: this decoder has no tokens but the verifier's; leave it out",
            )
        return DraftModel.from_pretrained(config.model or "", verifier)
    return _trained_drafter(config, verifier)


def _trained_drafter(config: SpeculativeConfig, verifier: Verifier) -> Drafter:
    "The drafter of a checkpoint, converted first if another project has written it."
    folder = getattr(verifier.model.config, "_name_or_path", None)
    verifier_folder = folder if folder and Path(folder).is_dir() else None

    def load(checkpoint):
        model = SpeculatorModel.from_pretrained(checkpoint, verifier=verifier_folder, dtype=verifier.dtype)
        return model.to(verifier.device).drafter()

    if not config._draft or "speculators_model_type" in config._draft:
        return load(config.model)
    if verifier_folder is None:
        config.refuse(
            "model",
            "is in an engine's own format, and the verifier has no folder here to convert it for; convert it, and "
            "give the new folder",
        )
    assert config.model is not None  # it has a config.json
    with tempfile.TemporaryDirectory() as temporary:
        try:
            return load(convert(config.model, Path(temporary) / "draft", verifier_folder))
        except ValueError as e:
            config.refuse("model", f"is no checkpoint of this library, and cannot be converted: {e}")


def speculate(
    verifier: Verifier, config: SpeculativeConfig | dict, prompt_ids: Tensor | list, **kwargs
) -> Generation | list[Generation]:
    """Decode one request or several as a config describes (a dictionary becomes one for this verifier); prompts and
    further arguments are as for `generate`. A schedule for batch sizes is applied to the number of requests."""
    if isinstance(config, dict):
        fields: dict[str, Any] = {"target_model_config": verifier.config} | config
        config = SpeculativeConfig(**fields)
    listed = isinstance(prompt_ids, (list, tuple)) and bool(prompt_ids)
    requests = len(prompt_ids) if listed and not isinstance(prompt_ids[0], numbers.Real) else 1
    drafter = config.drafter(verifier)
    depth = config.tokens_for(requests, config.depth)
    return generate(verifier, drafter, prompt_ids, k=depth, rule=config.rule(), **kwargs)
