"""Tables of the drafting methods that vLLM serves, and of its release lines: what a method needs, which checkpoints
mean it, and what differs between vLLM 0.32 and 0.33."""

# vLLM knows a method by its name, and what follows from the name is spread over its code; here it is `METHODS`. Its
# heads for multi-token prediction are a long function there, and `MTP_FAMILIES` here. `ENGINES` has a row for each
# release line: what differs between them is there and nowhere else.

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeGuard

from ..models.base import SpeculatorModel
from ..verifier.row_limits import context_length, rope_of


def words(text: str) -> frozenset[str]:
    "A set of names, written with spaces between them."
    return frozenset(text.split())


class Method(NamedTuple):
    "What the engine must know about a way of drafting."

    weights: bool = False  # loads a draft checkpoint
    aux: bool = False  # reads auxiliary hidden states of the target
    parallel: bool | None = False  # drafts all tokens in one pass; None: if it was trained so
    slots: int = 0  # places a request needs beside those of parallel drafting


METHODS = {
    "ngram": Method(),
    "ngram_gpu": Method(),
    "suffix": Method(),
    # its input keeps the last token
    "draft_model": Method(weights=True, parallel=None, slots=1),
    "eagle": Method(weights=True, parallel=None),
    "eagle3": Method(weights=True, aux=True, parallel=None),
    # the last decided token, then K masks
    "dflash": Method(weights=True, aux=True, parallel=True, slots=1),
    "dspark": Method(weights=True, aux=True, parallel=True),
    "medusa": Method(weights=True),
    "mlp_speculator": Method(weights=True),
    "mtp": Method(weights=True, parallel=None),
    "extract_hidden_states": Method(aux=True),
    # `model` is the path of a Python class that the engine imports
    "custom_class": Method(),
}


def method_of_types() -> dict[str, tuple[str, bool]]:
    """`speculators_model_type` -> method, parallel_drafting: what the drafters of this library are served as, by some
    release line (a row of ENGINES has those that it does not serve)."""
    found = {kind: klass.vllm_method() for kind, klass in sorted(SpeculatorModel.registered_classes().items())}
    return {kind: method for kind, method in found.items() if method}


# part of a foreign draft's name -> method, in this order
METHOD_OF_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
# parts of the model_type of targets that can return auxiliary hidden states
AUX_FAMILIES = (
    *("llama", "qwen", "minicpm", "gpt_oss", "hunyuan_vl", "hunyuan_v1_dense", "afmoe", "nemotron_h"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "minimax_m2", "gemma4"),
)


class MTPFamily(NamedTuple):
    "Verifiers that carry a multi-token prediction head."

    head: str  # the engine's model_type of the head; formerly a method of its own
    words: tuple[str, ...]  # model_type or first architecture of the verifier
    layers: str | int = "num_nextn_predict_layers"  # config fields, first found counts; or the number
    missing: int | None = None  # the number where that field is absent
    needs: str = ""  # "decoder.causal_vision_prefix": a field without which there is no head
    lines: tuple[str, ...] = ("documented", "0.32", "0.33")  # that know it


MTP_FAMILIES = [
    MTPFamily("deepseek_mtp", ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")),
    MTPFamily("pangu_ultra_moe_mtp", ("pangu_ultra_moe",)),
    MTPFamily("mimo_mtp", ("MiMoForCausalLM",)),
    # the first of its layers only
    MTPFamily("mimo_v2_mtp", ("MiMoV2FlashForCausalLM", "MiMoV2OmniForCausalLM"), 1),
    MTPFamily("mimo_v2_mtp", ("MiMoV2ProForCausalLM",), 1, lines=("documented",)),
    MTPFamily("glm4_moe_mtp", ("Glm4MoeForCausalLM",)),
    MTPFamily("glm4_moe_lite_mtp", ("Glm4MoeLiteForCausalLM",)),
    MTPFamily("glm_ocr_mtp", ("GlmOcrForConditionalGeneration",)),
    MTPFamily("ernie_mtp", ("ernie4_5_moe",)),
    # most of these have no head
    MTPFamily("nemotron_h_mtp", ("nemotron_h", "nemotron_h_puzzle", "NemotronH_Super_Omni_Reasoning_V3"), missing=0),
    MTPFamily("qwen3_next_mtp", ("qwen3_next",)),
    MTPFamily("qwen3_5_mtp", ("qwen3_5", "qwen3_5_moe"), "mtp_num_hidden_layers"),
    MTPFamily("exaone_moe_mtp", ("exaone_moe",)),
    # also as a part of a longer model_type
    MTPFamily("exaone4_5_mtp", ("exaone4_5",)),
    MTPFamily("longcat_flash_mtp", ("longcat_flash",), missing=1),
    MTPFamily("step3p5_mtp", ("step3p5", "Step3p5ForCausalLM"), missing=1),
    MTPFamily("hy_v3_mtp", ("hy_v3",)),
]
QWEN_TEXTS = ("qwen3_5_text", "qwen3_5_moe_text", "intern_s2_preview", "interns2_mobius")
SINCE_032 = [
    MTPFamily("deepseek_mtp", ("deepseek_v4", "deepseek_v41")),
    MTPFamily("mimo_v2_mtp", ("MiMoV2ForCausalLM",), 1),
    MTPFamily("glm5_next_mtp", ("glm5_next",)),
    MTPFamily("nemotron_h_mtp", ("NemotronH_Omni_Reasoning_V3",), missing=0),
    MTPFamily("qwen3_5_mtp", QWEN_TEXTS, "mtp_num_hidden_layers"),
    MTPFamily("qwen4_exp_mtp", ("qwen4_exp", "qwen4_exp_text"), "mtp_num_hidden_layers num_nextn_predict_layers"),
    MTPFamily("step3p5_mtp", ("step3p7", "Step3p7ForConditionalGeneration"), missing=1),
    MTPFamily("hy_v4_mtp", ("hy_v4",)),
    MTPFamily("kimi_k3_mtp", ("kimi_k3",)),
    MTPFamily("bailing_hybrid_v3_mtp", ("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration")),
    MTPFamily("bailing_hybrid_mtp", ("bailing_hybrid", "BailingMoeV2_5ForCausalLM")),
    MTPFamily("dots3_note_mtp", ("dots3_note",), missing=1),
    MTPFamily("inkling_mtp", ("inkling_mm_model", "inkling_model"), missing=0),
    MTPFamily("minimax_m3_mtp", ("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"), "num_mtp_modules", 1),
    MTPFamily("gemma4_mtp", ("gemma4_assistant", "gemma4_unified_assistant"), 1),
]
STEP5 = ("step5", "step5_vl", "Step5ForCausalLM", "Step5ForConditionalGeneration")
SINCE_033 = [
    # Nemotron Parse 3.5, one token
    MTPFamily("mtp", ("RadioMBartPrefixForCausalLM",), 1, needs="decoder.causal_vision_prefix"),
    MTPFamily("step5_mtp", STEP5, missing=1),
]
MTP_FAMILIES += [family._replace(lines=("0.32", "0.33")) for family in SINCE_032]
MTP_FAMILIES += [family._replace(lines=("0.33",)) for family in SINCE_033]
# families that the Transformers back end serves (0.33, with transformers 5.20): what they call num_mtp_layers
MTP_LAYERS_OF = {"mellum": "num_nextn_predict_layers"}


def find_field(config: dict[str, Any], name: str, default: Any = None) -> Any:
    "A field of a model's config.json, or of its text, layer or MTP part; `default`: where none has it."
    parts = ("text_config", "transformer_layer_config", "mtp_config")
    thinker = config.get("thinker_config") or {}  # of Qwen3-Omni
    for fields in (config, *map(config.get, parts), thinker.get("text_config")):
        fields = fields or {}
        if fields.get(name) is not None:
            return fields[name]
    return default


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    "The part of a config.json that describes the language model, or the layers of a checkpoint of this library."
    config = config.get("thinker_config") or config  # of Qwen3-Omni
    return config.get("text_config") or config.get("transformer_layer_config") or config


def first_of(draft: dict[str, Any], *places: str) -> Any:
    'The first of these fields that a draft\'s config.json has, as "dflash_config.block_size"; None: none of them.'
    for place in places:
        part, _, name = place.rpartition(".")
        found = ((draft.get(part) or {}) if part else draft).get(name)
        if found is not None:
            return found
    return None


def mtp_head(config: dict[str, Any], engine_version: str | None = None) -> tuple[str, int | None] | None:
    """model_type of a verifier's MTP head in `MTP_FAMILIES`, and its tokens if known; None: no head. `config`: the
    verifier's config.json, or one that is already a head's; `engine_version`: a key of ENGINES, None: any."""
    kind = str(config.get("model_type"))
    words = {kind, *(config.get("architectures") or [])[:1]}
    if "exaone4_5" in kind:
        words.add("exaone4_5")
    for family in MTP_FAMILIES:
        if engine_version is not None and engine_version not in family.lines:
            continue
        if not words & {family.head, *family.words}:
            continue
        if family.needs and family.head not in words and not first_of(config, family.needs):
            continue
        n = family.layers
        if isinstance(n, str):
            found = [find_field(config, name) for name in n.split()]
            n = next((number for number in found if number is not None), family.missing)
        if n == 0 and family.head not in words:
            return None
        return family.head, n or None
    return None


def built_in_method(config: dict[str, Any]) -> str | None:
    """The method, by its config.json, of a verifier that carries its drafter inside; None: no head, or the number of
    its layers is not known."""
    head = mtp_head(config)
    return "mtp" if head and head[1] else None


OMNI_TARGETS = words("Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration")


def is_omni(target: dict[str, Any]) -> bool:
    "Whether a target is a Qwen3-Omni, by its config.json."
    known = OMNI_TARGETS & {*(target.get("architectures") or [])}
    return target.get("model_type") == "qwen3_omni_moe" or bool(known)


def is_count(value: Any, low: int = 1, high: float = float("inf")) -> TypeGuard[int]:
    "Whether a value is a whole number from low to high; a truth value is none."
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _attention_sizes(config: dict[str, Any]) -> dict[str, Any]:
    "Heads, heads of keys and values, and the size of a head."
    heads = config.get("num_attention_heads")
    hidden, size = config.get("hidden_size"), config.get("head_dim")
    if size is None and is_count(hidden) and is_count(heads) and hidden % heads == 0:
        size = hidden // heads
    key_value = config.get("num_key_value_heads", heads)
    return dict(num_attention_heads=heads, num_key_value_heads=key_value, head_dim=size)


def omni_problem(draft: dict[str, Any], text: dict[str, Any], tokens: int, model: str | None) -> str | None:
    """What vLLM refuses in a DSpark draft for Qwen3-Omni, by the config.json of the draft and of the thinker's text
    model: a field, its value and what is needed; None: it fits. It wants the sizes of the thinker's text model, layers
    of the thinker in order, the vanilla Markov head, a block as long as the draft (`tokens`), and positions of one
    dimension."""

    def of_drafter(*names):  # a field of drafters is in one of two parts, or in none
        return first_of(draft, *(place for n in names for place in (f"dflash_config.{n}", f"eagle_config.{n}", n)))

    architectures = draft.get("architectures") or []
    block = of_drafter("block_size", "dspark_block_size")
    layers = first_of(draft, "dflash_config.target_layer_ids", "dspark_target_layer_ids", "target_layer_ids")
    last = text.get("num_hidden_layers", float("inf")) - 1
    in_order = isinstance(layers, list) and bool(layers) and all(is_count(layer, 0, last) for layer in layers)
    in_order = in_order and layers == sorted(set(layers))
    aux = of_drafter("use_aux_hidden_state")
    rank, head = draft.get("markov_rank"), draft.get("markov_head_type")
    anchor, bonus = draft.get("sample_from_anchor", True), draft.get("dspark_bonus_anchor")
    hidden = text.get("hidden_size")
    needed = dict(target_hidden_size=hidden, hidden_size=hidden) | _attention_sizes(text)
    has = draft | _attention_sizes(draft)
    vocabulary, most = draft.get("vocab_size"), text.get("vocab_size", float("inf"))
    drafted = first_of(draft, "draft_vocab_size", "vocab_size")
    masks = "dflash_config.mask_token_id mask_token_id dspark_noise_token_id pard_token ptd_token_id"
    mask = first_of(draft, *masks.split())
    is_a_token = is_count(vocabulary) and is_count(mask, 0, vocabulary - 1)
    ropes = [draft.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    mrope = any("mrope_section" in part for part in (draft, *ropes))
    omni = "Qwen3OmniDSparkModel"
    rules = [  # field, what the draft has, whether that fits, what vLLM needs
        ("architectures", architectures, omni in architectures, omni),
        ("block_size", block, is_count(block) and block == tokens, f"num_speculative_tokens={tokens}"),
        ("target_layer_ids", layers, in_order, "layers of the thinker, in ascending order"),
        ("use_aux_hidden_state", aux, aux is True, "true"),
        ("markov_rank", rank, is_count(rank), "a positive number"),
        ("markov_head_type", head, head == "vanilla", "vanilla"),
        ("sample_from_anchor", anchor, anchor is True, "true"),
        ("dspark_bonus_anchor", bonus, bonus in (None, False), "false"),
        *((name, has.get(name), has.get(name) == size, f"the thinker's {size}") for name, size in needed.items()),
        ("vocab_size", vocabulary, is_count(vocabulary), "a positive number"),
        ("draft_vocab_size", drafted, is_count(drafted, 1, most), f"1 to {most}"),
        ("mask_token_id", mask, is_a_token, "one of the draft's tokens"),
        ("mrope_section", mrope, not mrope, "positions of one dimension"),
    ]
    for name, value, fits, needs in rules:
        if not fits:
            return (
                f"{name}={value!r} in the config.json of {model}: a DSpark draft for Qwen3-Omni needs {needs}; "
                "use one made for this target"
            )
    return None


# Words of fields that choose kernels, number formats or loaders. They are of no use to our decoder; but a misspelt one
# should not be found out when the server starts. These are vLLM 0.32's.
BACKENDS = {
    "attention_backend": words(
        """FLASH_ATTN FLASH_ATTN_DIFFKV TRITON_ATTN TRITON_ATTN_DIFFKV TRITON_FLASH_ATTN ROCM_ATTN ROCM_SEGMENTED_ATTN
        ROCM_AITER_MLA ROCM_AITER_TRITON_MLA ROCM_AITER_FA ROCM_AITER_MLA_SPARSE XPU_MLA_SPARSE TORCH_SDPA FLASHINFER
        TRITON_FLASHINFER FLASHINFER_MLA TOKENSPEED_MLA FLASHINFER_MLA_SPARSE FLASHINFER_MLA_SPARSE_SM120
        FLASHINFER_MLA_SPARSE_SM90 TRITON_MLA CUTLASS_MLA FLASHMLA FLASHMLA_SPARSE FLASHMLA_SPARSE_DSV4
        FLASHINFER_MLA_SPARSE_DSV4 ROCM_FLASHMLA_SPARSE_DSV4 FLASHMLA_SPARSE_DSV41 FLASHINFER_MLA_SPARSE_DSV41
        FLASHMLA_MEGA_ATTN_DSV41 B12X FLASH_ATTN_MLA FLASH_ATTN_MLA_SPARSE MINIMAX_M3_SPARSE CUTLASS_MSA TRITON_MSA
        NO_ATTENTION FLEX_ATTENTION HPC_ATTN ROCM_AITER_UNIFIED_ATTN CPU_ATTN CPU_MLA AMX_MLA TURBOQUANT ULTRAQUANT
        CUSTOM"""
    ),
    "kv_cache_dtype": words(
        """auto float16 bfloat16 fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4_ds_mla turboquant_k8v4
        turboquant_4bit_nc turboquant_k3v4_nc turboquant_3bit_nc ultraquant_4bit int4_per_token_head
        int8_per_token_head fp8_per_token_head nvfp4 nvfp4_4over6"""
    ),
    "moe_backend": words(
        """auto triton batched_triton deep_gemm deep_gemm_mega_moe cutlass flashinfer_trtllm flashinfer_cutlass
        flashinfer_cutedsl flashinfer_moe_ep_cutedsl flashinfer_b12x b12x flashinfer_moe_ep_mega_deep_gemm marlin
        humming triton_unfused aiter aiter_mega_moe aiter_triton_mxfp4_bf16 flydsl hpc emulation rdna3"""
    ),
}
NEW_BACKENDS = {  # of 0.33
    "attention_backend": words("FLASH_ATTN_MLA_SPARSE_FA4 ROCM_FLASHMLA_SPARSE_DSV41 ROCM_OCTAVE STEP5_DSA"),
    "kv_cache_dtype": words("octave_k3v4 octave_k3v3 octave_k3v3_compact"),
    "moe_backend": words("aiter_triton_mxfp4_mxfp4"),
}
# of vLLM's LoadConfig
LOAD_FIELDS = words(
    """load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size model_loader_extra_config device ignore_patterns use_tqdm_on_load
    pt_load_map_location"""
)
# without the two that vLLM 0.32 has given up: fbgemm_fp8, fp_quant
QUANTIZATIONS = words(
    """awq auto_awq fp8 modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed auto_gptq gptq gptq_marlin awq_marlin
    humming compressed-tensors experts_int8 quark moe_wna16 torchao inc mxfp4 gpt_oss_mxfp4 deepseek_v4_fp8 online
    fp8_per_tensor fp8_per_block fp8_per_channel int8_per_channel_weight_only nvfp4_per_token mxfp8"""
)


@dataclass(frozen=True)
class Engine:
    "What a release line of vLLM has, of what `SpeculativeConfig` can say."

    methods: frozenset[str]  # keys of METHODS that it takes
    without_model: frozenset[str]  # of these, those whose drafts it cannot load
    missing_fields: frozenset[str]  # fields of `SpeculativeConfig` that it does not have
    verifications: frozenset[str]  # rejection_sample_method, by its present names
    architectures: dict[str, frozenset[str]]  # of drafts, by the methods that rename them
    later_drafts: frozenset[str]  # architectures of drafts that only a later line has
    found_by_architecture: dict[str, str]  # architecture of a foreign draft -> method
    defaults: dict[str, str]  # of fields, where they differ from `SpeculativeConfig`'s
    unserved: dict[str, str]  # speculators_model_type with served_as -> why it is not served
    backends: dict[str, frozenset[str]] = field(default_factory=lambda: BACKENDS)  # field -> its words
    own_words: frozenset[str] = words("")  # of these fields, for which a platform can have more
    aux_families: tuple[str, ...] = ()  # whose hidden states can be read; (): the class decides
    draft_in_own_batch: frozenset[str] = words("")  # methods that need no new places
    no_block_drop: frozenset[str] = words("")  # use_eagle methods that keep the last block
    raises_positions: frozenset[str] = words("")  # methods: draft positions up to the target's
    heterogeneous_argmax: bool = True  # local argmax with another vocabulary
    transformers_mtp: bool = False  # MTP layers through the Transformers back end

    @property
    def served(self) -> frozenset[str]:
        "Methods that it serves."
        return self.methods - self.without_model


V032 = Engine(
    methods=frozenset(METHODS),
    without_model=words("mlp_speculator"),
    missing_fields=words(
        """speculative_token_tree xpress_topc draft_lm_head_quantization disable_lookahead_block_hashes fly_window_size
        fly_entropy_threshold fly_entropy_top_k"""
    ),
    verifications=words("standard synthetic block"),
    architectures={
        "eagle": words(
            """EagleCohereForCausalLM EagleLlamaForCausalLM EagleLlama4ForCausalLM EagleMiniCPMForCausalLM
            EagleMistralForCausalLM EagleMistralLarge3ForCausalLM EagleDeepSeekMTPModel"""
        ),
        "eagle3": words(
            """Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM LlamaForCausalLMEagle3 Eagle3Qwen2_5vlForCausalLM
            Eagle3Qwen3vlForCausalLM Eagle3Qwen3ForCausalLM Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM"""
        ),
        "dflash": words(
            """DFlashDraftModel DFlash2DraftModel LiLiCorrDraftModel DFlashMuseGlimmerAssistantModel
            DFlashLagunaForCausalLM"""
        ),
    },
    later_drafts=words("Qwen3XPressModel DFlashQwen3XPressModel DFlash2BeamDraftModel MuseSparkDSparkModel"),
    found_by_architecture={  # DSparkDraftModel too, where the model_type is qwen3
        "MuseGlimmerAssistantModel": "dflash",
        "Qwen3DSparkModel": "dspark",
        "Qwen3OmniDSparkModel": "dspark",
        "Gemma4DSparkModel": "dspark",
    },
    defaults=dict(rejection_sample_method="standard", draft_sample_method="greedy"),
    unserved={"xpress": "only vLLM 0.33 has XPress; serve it with that (engine_version=0.33)"},
    raises_positions=words("eagle eagle3"),  # of drafts with any RoPE
)
ENGINES = {
    "documented": replace(
        V032,
        methods=frozenset(METHODS) - words("dspark custom_class"),
        without_model=words(""),
        missing_fields=V032.missing_fields - words("speculative_token_tree")
        | words(
            """attention_backend kv_cache_dtype index_share_for_mtp_iteration disable_eagle_block_drop
            num_speculative_tokens_per_batch_size use_heterogeneous_vocab dspark_draft_topk
            enable_adaptive_verification"""
        ),
        verifications=words("standard synthetic"),
        defaults=dict(rejection_sample_method="strict"),
        aux_families=AUX_FAMILIES,
    ),
    "0.32": V032,
    "0.33": replace(
        V032,
        methods=V032.methods - words("medusa mlp_speculator"),
        without_model=words(""),
        missing_fields=words("speculative_token_tree"),
        verifications=V032.verifications | {"fly"},
        architectures=V032.architectures
        | {"dflash": V032.architectures["dflash"] | words("DFlashQwen3XPressModel DFlash2BeamDraftModel")},
        later_drafts=words(""),
        found_by_architecture=V032.found_by_architecture | {"MuseSparkDSparkModel": "dspark"},
        unserved={},
        backends={name: known | NEW_BACKENDS[name] for name, known in BACKENDS.items()},
        own_words=words("kv_cache_dtype"),
        draft_in_own_batch=words("dflash dspark"),
        no_block_drop=words("dflash dspark"),
        raises_positions=frozenset(METHODS) - {"draft_model"},
        heterogeneous_argmax=False,
        transformers_mtp=True,
    ),
}
NEWEST = "0.33"
# for our own decoder: the newest line's rules, with whatever any of the lines has
ANY_ENGINE = replace(ENGINES[NEWEST], methods=frozenset(METHODS), missing_fields=words(""))


def line_name(engine_version: str | None) -> str:
    "A release line (a key of ENGINES; None: the newest) in a sentence."
    if engine_version == "documented":
        return "the documented line"
    return f"vLLM {engine_version or NEWEST}"


def lines_with(has: Callable[[Engine], bool]) -> str:
    "The release lines that have something, in a sentence."
    return " and ".join(line_name(version) for version, row in ENGINES.items() if has(row))


def engine_of(engine_version: str | None) -> Engine:
    "A row of ENGINES; None: `ANY_ENGINE`. Errors: ValueError for another version."
    if engine_version is None:
        return ANY_ENGINE
    if engine_version not in ENGINES:
        raise ValueError(f"engine_version={engine_version!r} is unknown; write one of {', '.join(ENGINES)}")
    return ENGINES[engine_version]


DraftSampling = Literal["greedy", "probabilistic"]
# rejection_sample_method of the documented line
# -> (rejection_sample_method, draft_sample_method) since vLLM 0.32
DOCUMENTED_SAMPLING: dict[str, tuple[str, DraftSampling]] = {
    "strict": ("standard", "greedy"),
    "probabilistic": ("standard", "probabilistic"),
    "synthetic": ("synthetic", "greedy"),
}


def method_in_name(name: str) -> str | None:
    "The method that vLLM reads out of a model's name or path; None: it says nothing."
    return next((m for part, m in METHOD_OF_NAME.items() if part in name.lower()), None)


def method_in_config(config: dict[str, Any], engine_version: str | None = None) -> str | None:
    """The method (a key of METHODS) that architecture or model_type in a draft's config.json mean; None: an ordinary
    language model, or the config is empty, since it is not on this machine."""
    kind = config.get("model_type")
    architecture = (config.get("architectures") or [""])[0]
    found = engine_of(engine_version).found_by_architecture
    if architecture in found:
        return found[architecture]
    if architecture == "DSparkDraftModel" and kind == "qwen3":
        return "dspark"
    if kind in ("medusa", "mlp_speculator"):
        return kind
    return "mtp" if mtp_head(config, engine_version) else None


def names_python_class(model: str) -> bool:
    "Whether vLLM imports this as a drafter where no method is given, as my.module.Drafter."
    parts = model.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def served_architecture(method: str, config: dict[str, Any], engine_version: str | None = None) -> str:
    """The architecture that a foreign draft of the EAGLE kinds (eagle, eagle3, dflash) is served as, by its
    config.json: Eagle3LlamaForCausalLM for a Llama (vLLM, transformers_utils/configs/eagle.py)."""
    architecture = (config.get("architectures") or ["None"])[0]
    head = mtp_head(config, engine_version)
    if head:
        architecture = "DeepSeekMTPModel" if head[0] == "deepseek_mtp" else head[0]
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash"}[method]
    named = architecture.startswith(prefix)
    if method != "eagle":
        named = named or architecture.endswith(prefix) or architecture == "LiLiCorrDraftModel"
    return architecture if named else prefix + architecture


# heads with a layer for each token, which vLLM never runs again
RUN_ONCE = ("step3p5_mtp", "step5_mtp", "inkling_mtp")


def predicted_tokens(method: str, draft: dict[str, Any], engine_version: str | None = None) -> int | None:
    """How many tokens a head predicts at once, by its config.json: it can draft up to so many, or a multiple by running
    again. None: any number can be drafted."""
    if method == "dspark":
        return None
    head = None if method == "medusa" else mtp_head(draft, engine_version)
    return head[1] if head else draft.get("n_predict")


def default_length(draft: dict[str, Any]) -> int | None:
    "Tokens to draft by the first proposal method of a draft's config.json, or its block; None: it has no number."
    methods = (draft.get("speculators_config") or {}).get("proposal_methods") or [{}]
    block = draft.get("block_size") or draft.get("dspark_block_size")
    return methods[0].get("speculative_tokens") or block


# layouts that several words mean; the first that is a part of the word counts
LAYOUTS = ("gptq", "awq", "modelopt", "mxfp4", "mxfp8")
ANY_LAYOUT = {"humming", "moe_wna16", "inc"}  # kernels for weights of several layouts


def quantization_problem(word: str | None, config: dict[str, Any]) -> str | None:
    """Why a draft, by its config.json, cannot be served with this quantization; None: it can. vLLM has several kernels
    for some layouts (`gptq`, `gptq_marlin`), so layouts are compared. Whether a device has the kernel is found out
    there."""
    stored = (find_field(config, "quantization_config") or {}).get("quant_method")
    word = word or stored
    if word is None:
        return None
    if word not in QUANTIZATIONS:
        return f"is no quantization of vLLM; choose from {', '.join(sorted(QUANTIZATIONS))}"
    if stored is None or word in ANY_LAYOUT:
        return None
    given, needed = (next((part for part in LAYOUTS if part in w), w) for w in (word, stored))
    if given != needed:
        return f"contradicts the draft's config.json, which has {stored!r}; leave it out"
    return None


def served_length(config: dict[str, Any], flat: bool = False) -> int | None:
    """The longest text in tokens that vLLM serves by a config.json where no other length is given: the whole context,
    but for LongRoPE, whose texts end where its short factors do; None: it has no such field. `flat`: whatever parts it
    has are not read."""
    text = config if flat else text_part(config)
    long = any("longrope" in (r.get("rope_type"), r.get("type")) for r in rope_of(text))
    trained = text.get("original_max_position_embeddings") if long else None
    return int(trained) if trained else context_length(text)
