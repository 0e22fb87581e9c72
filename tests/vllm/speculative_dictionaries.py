"""Dictionaries for SpeculativeConfig: written ones (`CASES`), a strategy that draws others (`dictionaries`), the models
that they name, and the rows of the table of differences that explain where our class decides otherwise than vLLM
(`ROWS`). Read by tests/test_speculative_config.py, and inside vLLM's environment by check_speculative_config.py: no
import of ours, of vLLM or of hypothesis at the top."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERIFIER = ROOT / "data/tiny-verifier"

LLAMA = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    torch_dtype="float32",
)
LAYER = LLAMA | dict(num_hidden_layers=1)
SPECULATORS = dict(
    proposal_methods=[dict(proposal_type="greedy", speculative_tokens=3)],
    default_proposal_method="greedy",
    verifier=dict(name_or_path=str(VERIFIER), architectures=["Qwen3ForCausalLM"]),
)
MIMO = LLAMA | dict(model_type="qwen2", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
BLOCKS = LLAMA | dict(
    model_type="qwen3",
    architectures=["DFlashDraftModel"],
    draft_vocab_size=2048,
    block_size=4,
    num_target_layers=6,
    dflash_config=dict(mask_token_id=0, target_layer_ids=[0, 2, 4]),
)
SPARKS = LLAMA | dict(
    model_type="qwen3",
    architectures=["Qwen3DSparkModel"],
    draft_vocab_size=1024,
    block_size=4,
    num_target_layers=6,
    mask_token_id=0,
    target_layer_ids=[0, 2, 4],
    markov_rank=8,
    markov_head_type="vanilla",
    sample_from_anchor=True,
)
TRAINED = dict(
    architectures=["Speculator"],
    speculators_config=SPECULATORS,
    speculators_version="0.5.0",
    draft_vocab_size=2048,
    transformer_layer_config=dict(LAYER, model_type="qwen3"),
    torch_dtype="float32",
)
# folder -> config.json
MODELS = {
    "small": LLAMA,
    "small-other-words": LLAMA | dict(vocab_size=1000),
    "EAGLE-small": LLAMA,
    "small_eagle3": LLAMA,
    "small-dflash": BLOCKS,
    "blocks": BLOCKS,
    "heads": dict(
        model_type="medusa",
        architectures=["MedusaModel"],
        hidden_size=128,
        vocab_size=2048,
        num_heads=4,
        num_hidden_layers=1,
    ),
    "trained-eagle3": dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        speculators_config=SPECULATORS | dict(algorithm="eagle3"),
        speculators_version="0.5.0",
        draft_vocab_size=2048,
        transformer_layer_config=LAYER,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        torch_dtype="float32",
    ),
    "mimo": MIMO,
    "two-heads": LLAMA
    | dict(model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], num_nextn_predict_layers=2),
    "phi": dict(LLAMA, model_type="phi3", architectures=["Phi3ForCausalLM"], pad_token_id=0),
    "short": LLAMA | dict(max_position_embeddings=512),
    "narrow": LLAMA | dict(num_attention_heads=2, num_key_value_heads=2),
    "stretched": LLAMA | dict(max_position_embeddings=512, rope_scaling=dict(rope_type="linear", factor=2.0)),
    "yarned": LLAMA
    | dict(
        max_position_embeddings=512,
        rope_scaling=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=256),
    ),
    "mistral": LLAMA | dict(model_type="mistral", architectures=["MistralForCausalLM"]),
    "qwen3": LLAMA | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
    "fp8": LLAMA | dict(quantization_config=dict(quant_method="fp8", activation_scheme="dynamic")),
    "old-heads": dict(hidden_size=128, medusa_num_heads=3, medusa_num_layers=1),
    "mlp": dict(
        model_type="mlp_speculator",
        architectures=["MLPSpeculatorPreTrainedModel"],
        vocab_size=2048,
        emb_dim=128,
        inner_dim=64,
        n_predict=3,
        top_k_tokens_per_head=[5, 4, 3],
    ),
    "latent": dict(
        model_type="deepseek_v3",
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=1024,
        num_nextn_predict_layers=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        torch_dtype="float32",
    ),
    "sparks": SPARKS,
    "sparks-of-ten": SPARKS | dict(dspark_draft_topk=10),
    "sparks-draft": SPARKS | dict(architectures=["DSparkDraftModel"]),
    "muse": BLOCKS | dict(architectures=["MuseGlimmerAssistantModel"]),
    "neutral-eagle3": LLAMA | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=2048),
    "trained-parallel": TRAINED
    | dict(speculators_model_type="peagle", mask_token_id=0, eagle_aux_hidden_state_layer_ids=[1, 3, 5]),
    "trained-blocks": TRAINED
    | dict(speculators_model_type="dflash", mask_token_id=0, aux_hidden_state_layer_ids=[1, 3, 5], block_size=4),
    "trained-sparks": TRAINED
    | dict(
        speculators_model_type="dspark",
        mask_token_id=0,
        aux_hidden_state_layer_ids=[1, 3, 5],
        block_size=4,
        markov_rank=8,
        markov_head_type="vanilla",
    ),
}
XPRESS = BLOCKS | dict(
    architectures=["Qwen3XPressModel"], xpress_block_size=4, xpress_rank=16, xpress_mlp_hidden=64, xpress_topc=512
)
MODELS |= {
    "xpress": XPRESS,
    "xpress-renamed": XPRESS | dict(architectures=["DFlashQwen3XPressModel"]),
    "xpress-of-many": XPRESS | dict(xpress_topc=4096),
    "xpress-by-steps": {n: v for n, v in XPRESS.items() if n[:6] != "xpress"} | dict(num_speculative_steps=3),
    "short-blocks": BLOCKS | dict(max_position_embeddings=512),
    "yarned-blocks": BLOCKS
    | dict(
        max_position_embeddings=512,
        rope_scaling=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=256),
    ),
    "muse-sparks": SPARKS | dict(architectures=["MuseSparkDSparkModel"]),
    # vLLM has a class of its own for the first, and none for the second
    "llama-mtp": LLAMA | dict(num_mtp_layers=2),
    "helium-mtp": LLAMA | dict(model_type="helium", architectures=["HeliumForCausalLM"], num_mtp_layers=2),
}
THINKER = LLAMA | dict(
    model_type="qwen3_omni_moe_text",
    num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
# the class that vLLM would take reads pictures; this one it can look at anywhere
MODELS["omni"] = dict(
    model_type="qwen3_omni_moe",
    architectures=["Qwen3ForCausalLM"],
    thinker_config=dict(model_type="qwen3_omni_moe_thinker", text_config=THINKER),
    torch_dtype="float32",
)
MODELS["omni-sparks"] = SPARKS | dict(
    architectures=["Qwen3OmniDSparkModel"],
    target_layer_ids=[0, 1],
    target_hidden_size=128,
    use_aux_hidden_state=True,
)
OMNI_WRONG = [  # what a DSpark draft for Qwen3-Omni must not have
    dict(architectures=["Qwen3DSparkModel"]),
    dict(block_size=5),
    dict(block_size=None),
    dict(block_size=True),
    dict(dflash_config=dict(block_size=3)),
    dict(target_hidden_size=64),
    dict(hidden_size=64),
    dict(num_attention_heads=8),
    dict(num_key_value_heads=4),
    dict(head_dim=32),
    dict(target_layer_ids=[]),
    dict(target_layer_ids=[1, 0]),
    dict(target_layer_ids=[0, 2]),
    dict(target_layer_ids=[-1, 1]),
    dict(target_layer_ids=[0, True]),
    dict(dflash_config=dict(target_layer_ids=[1, 1])),
    dict(use_aux_hidden_state=False),
    dict(eagle_config=dict(use_aux_hidden_state=False)),
    dict(markov_rank=0),
    dict(markov_head_type="gated"),
    dict(sample_from_anchor=False),
    dict(dspark_bonus_anchor=True),
    dict(draft_vocab_size=4096),
    dict(mask_token_id=2048),
    dict(mask_token_id=None),
    dict(rope_scaling=dict(rope_type="default", mrope_section=[16, 8, 8])),
]
OMNI_RIGHT = [  # other places for the same
    dict(block_size=None, dspark_block_size=4),
    dict(dflash_config=dict(block_size=4, target_layer_ids=[1], mask_token_id=3), block_size=9, mask_token_id=None),
    dict(mask_token_id=None, ptd_token_id=7),
    dict(draft_vocab_size=None),
    dict(target_layer_ids=None, dspark_target_layer_ids=[0, 1]),
]


def _omni_variants(kind, changes):
    for i, fields in enumerate(changes):
        merged = MODELS["omni-sparks"] | fields
        MODELS[f"omni-{kind}-{i}"] = {name: value for name, value in merged.items() if value is not None}


_omni_variants("wrong", OMNI_WRONG)
_omni_variants("right", OMNI_RIGHT)
NGRAM = dict(method="ngram", num_speculative_tokens=3)
DRAFT = dict(model="small", method="draft_model", num_speculative_tokens=3)
SYNTHETIC, SUFFIX = NGRAM | dict(rejection_sample_method="synthetic"), dict(method="suffix", num_speculative_tokens=8)
# name -> dictionary; "target" is a folder (the tiny verifier without it), "target_tp" its devices; `model` is looked
# for among MODELS
CASES = {
    "ngram": NGRAM,
    "ngram by model": dict(model="ngram", num_speculative_tokens=3),
    "ngram in brackets by model": dict(model="[ngram]", num_speculative_tokens=3),
    "ngram, max": NGRAM | dict(prompt_lookup_max=4),
    "ngram, min": NGRAM | dict(prompt_lookup_min=2),
    "ngram, both": NGRAM | dict(prompt_lookup_min=2, prompt_lookup_max=4),
    "ngram, min above max": NGRAM | dict(prompt_lookup_min=5, prompt_lookup_max=4),
    "ngram, min 0": NGRAM | dict(prompt_lookup_min=0),
    "ngram, no length": dict(method="ngram"),
    "ngram, length 0": NGRAM | dict(num_speculative_tokens=0),
    "ngram, length -1": NGRAM | dict(num_speculative_tokens=-1),
    "ngram, length a word": NGRAM | dict(num_speculative_tokens="many"),
    "ngram on GPU": dict(method="ngram_gpu", num_speculative_tokens=3),
    "nothing": {},
    "length only": dict(num_speculative_tokens=3),
    "unknown method": dict(method="oracle", num_speculative_tokens=3),
    "unknown field": NGRAM | dict(ngram_size=3),
    "tensor_parallel_size": NGRAM | dict(tensor_parallel_size=1),
    "suffix": SUFFIX,
    "suffix, no length": dict(method="suffix"),
    "suffix, depth": dict(method="suffix", suffix_decoding_max_tree_depth=12),
    "suffix, depth 0": SUFFIX | dict(suffix_decoding_max_tree_depth=0),
    "suffix, cache off": SUFFIX | dict(suffix_decoding_max_cached_requests=0),
    "suffix, cache -1": SUFFIX | dict(suffix_decoding_max_cached_requests=-1),
    "suffix, factor": SUFFIX | dict(suffix_decoding_max_spec_factor=0.5),
    "suffix, factor -1": SUFFIX | dict(suffix_decoding_max_spec_factor=-1.0),
    "suffix, probability 1.5": SUFFIX | dict(suffix_decoding_min_token_prob=1.5),
    "suffix, probability 1": SUFFIX | dict(suffix_decoding_min_token_prob=1.0),
    "synthetic rates": SYNTHETIC | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4]),
    "synthetic length": SYNTHETIC | dict(synthetic_acceptance_length=2.6),
    "synthetic length 1": SYNTHETIC | dict(synthetic_acceptance_length=1),
    "synthetic length n + 1": SYNTHETIC | dict(synthetic_acceptance_length=4),
    "synthetic length above n + 1": SYNTHETIC | dict(synthetic_acceptance_length=4.5),
    "synthetic length below 1": SYNTHETIC | dict(synthetic_acceptance_length=0.5),
    "synthetic, nothing": SYNTHETIC,
    "synthetic, both": SYNTHETIC | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4], synthetic_acceptance_length=2.6),
    "synthetic rates, two": SYNTHETIC | dict(synthetic_acceptance_rates=[0.8, 0.4]),
    "synthetic rates rise": SYNTHETIC | dict(synthetic_acceptance_rates=[0.4, 0.8, 0.1]),
    "synthetic rates above 1": SYNTHETIC | dict(synthetic_acceptance_rates=[1.2, 0.8, 0.1]),
    "rates without synthetic": NGRAM | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4]),
    "length without synthetic": NGRAM | dict(synthetic_acceptance_length=2.0),
    "standard": NGRAM | dict(rejection_sample_method="standard"),
    "block": NGRAM | dict(rejection_sample_method="block"),
    "block, drawn": DRAFT | dict(rejection_sample_method="block", draft_sample_method="probabilistic"),
    "unknown verification": NGRAM | dict(rejection_sample_method="lax"),
    "unknown drafting": NGRAM | dict(draft_sample_method="lax"),
    "draft model": DRAFT,
    "draft model, found": dict(model="small", num_speculative_tokens=3),
    "draft model, drawn": DRAFT | dict(draft_sample_method="probabilistic"),
    "draft model, no length": dict(model="small", method="draft_model"),
    "draft model, other words": DRAFT | dict(model="small-other-words"),
    "draft model, no model": dict(method="draft_model", num_speculative_tokens=3),
    "draft model, parallel": DRAFT | dict(parallel_drafting=True),
    "draft model, shorter": DRAFT | dict(max_model_len=512),
    "draft model, longer than draft": DRAFT | dict(max_model_len=1500),
    "draft model, max_model_len 0": DRAFT | dict(max_model_len=0),
    "draft model on 1 of 2": DRAFT | dict(draft_tensor_parallel_size=1, target_tp=2),
    "draft model on 2 of 2": DRAFT | dict(draft_tensor_parallel_size=2, target_tp=2),
    "draft model on 3 of 2": DRAFT | dict(draft_tensor_parallel_size=3, target_tp=2),
    "draft model on 0": DRAFT | dict(draft_tensor_parallel_size=0),
    "eager, padded, loaded": DRAFT
    | dict(enforce_eager=True, disable_padded_drafter_batch=True, draft_load_config=dict(load_format="dummy")),
    "eagle by name": dict(model="EAGLE-small", num_speculative_tokens=3),
    "draft model, another word in its name": DRAFT | dict(model="small_eagle3"),
    "eagle3 by name": dict(model="small_eagle3", num_speculative_tokens=3),
    "eagle3": dict(model="small", method="eagle3", num_speculative_tokens=3),
    "eagle3, parallel": dict(model="small", method="eagle3", num_speculative_tokens=3, parallel_drafting=True),
    "eagle, no model": dict(method="eagle", num_speculative_tokens=3),
    "dflash by name": dict(model="small-dflash", num_speculative_tokens=3),
    "dflash": dict(model="blocks", method="dflash", num_speculative_tokens=3),
    "trained checkpoint": dict(model="trained-eagle3", num_speculative_tokens=3),
    "trained checkpoint, no length": dict(model="trained-eagle3", method="eagle3"),
    "medusa": dict(model="heads", method="medusa", num_speculative_tokens=3),
    "medusa by config": dict(model="heads", num_speculative_tokens=3),
    "mlp_speculator on another model": dict(model="small", method="mlp_speculator", num_speculative_tokens=3),
    "mtp of the target": dict(method="mtp", num_speculative_tokens=1, target="mimo"),
    "mtp by its old name": dict(method="mimo_mtp", num_speculative_tokens=1, target="mimo"),
    "mtp, more tokens": dict(method="mtp", num_speculative_tokens=3, target="mimo"),
    "mtp, no length": dict(method="mtp", target="mimo"),
    "mtp of two layers, 4 tokens": dict(method="mtp", num_speculative_tokens=4, target="two-heads"),
    "mtp of two layers, 3 tokens": dict(method="mtp", num_speculative_tokens=3, target="two-heads"),
    "mtp of a target without a head": dict(method="mtp", num_speculative_tokens=1),
    "hidden states": dict(
        method="extract_hidden_states",
        num_speculative_tokens=1,
        draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=[1, 3, 5])),
    ),
    "hidden states, no length": dict(method="extract_hidden_states"),
    "aux states of a foreign family": dict(model="small", method="eagle3", num_speculative_tokens=3, target="phi"),
    "ngram with parallel drafting": NGRAM | dict(parallel_drafting=True),
    "argmax of a drawn draft": DRAFT | dict(use_local_argmax_reduction=True, draft_sample_method="probabilistic"),
    "strict": NGRAM | dict(rejection_sample_method="strict"),
    "probabilistic": NGRAM | dict(rejection_sample_method="probabilistic"),
    "token tree": NGRAM | dict(speculative_token_tree="[(0,), (1,), (0, 0)]"),
    "custom class": dict(model="proposers.Mine", num_speculative_tokens=3),
    # the fields of vLLM 0.32
    "attention backend": DRAFT | dict(attention_backend="flash_attn"),
    "attention backend, auto": DRAFT | dict(attention_backend="AUTO"),
    "attention backend, unknown": DRAFT | dict(attention_backend="flash"),
    "KV cache": DRAFT | dict(kv_cache_dtype="fp8"),
    "KV cache, unknown": DRAFT | dict(kv_cache_dtype="fp7"),
    "KV cache in capitals": DRAFT | dict(kv_cache_dtype="FP8"),
    "MoE backend": DRAFT | dict(moe_backend="triton"),
    "MoE backend, unknown": NGRAM | dict(moe_backend="tritone"),
    "block drop": dict(model="small", method="eagle3", num_speculative_tokens=3, disable_eagle_block_drop=True),
    "block drop, n-gram": NGRAM | dict(disable_eagle_block_drop=True),
    "shared indices": dict(method="mtp", num_speculative_tokens=1, target="mimo", index_share_for_mtp_iteration=True),
    "indices not shared": dict(
        method="mtp", num_speculative_tokens=1, target="mimo", index_share_for_mtp_iteration=False
    ),
    "shared indices, n-gram": NGRAM | dict(index_share_for_mtp_iteration=True),
    "shared indices, found mtp": dict(
        model="two-heads", method="draft_model", num_speculative_tokens=2, index_share_for_mtp_iteration=True
    ),
    "schedule": NGRAM | dict(num_speculative_tokens_per_batch_size=[[1, 4, 3], [5, 64, 1]]),
    "schedule out of order": NGRAM | dict(num_speculative_tokens_per_batch_size=[[5, 64, 1], [1, 4, 3]]),
    "schedule of pairs": NGRAM | dict(num_speculative_tokens_per_batch_size=[[1, 4], [5, 64]]),
    "schedule of words": NGRAM | dict(num_speculative_tokens_per_batch_size=[["one", 4, 3]]),
    "schedule from 2": NGRAM | dict(num_speculative_tokens_per_batch_size=[[2, 4, 3]]),
    "schedule that overlaps": NGRAM | dict(num_speculative_tokens_per_batch_size=[[1, 4, 3], [4, 8, 1]]),
    "other vocabulary": DRAFT | dict(model="small-other-words", use_heterogeneous_vocab=True),
    "other vocabulary, same words": DRAFT | dict(use_heterogeneous_vocab=True),
    "other vocabulary, drawn": DRAFT | dict(use_heterogeneous_vocab=True, draft_sample_method="probabilistic"),
    "other vocabulary, eagle3": dict(
        model="small", method="eagle3", num_speculative_tokens=3, use_heterogeneous_vocab=True
    ),
    "other vocabulary, n-gram": NGRAM | dict(use_heterogeneous_vocab=True),
    "dspark": dict(model="sparks", num_speculative_tokens=3),
    "dspark by its block": dict(model="sparks"),
    "dspark by its draft architecture": dict(model="sparks-draft", num_speculative_tokens=4),
    "dspark of another architecture": dict(model="small", method="dspark", num_speculative_tokens=4),
    "dspark, no block": dict(model="small", method="dspark"),
    "dspark, top 20": dict(model="sparks", num_speculative_tokens=3, dspark_draft_topk=20),
    "dspark, top 0": dict(model="sparks", num_speculative_tokens=3, dspark_draft_topk=0),
    "dspark, top of more than its vocabulary": dict(model="sparks", num_speculative_tokens=3, dspark_draft_topk=1500),
    "dspark, top 20 by its draft architecture": dict(
        model="sparks-draft", num_speculative_tokens=3, dspark_draft_topk=20
    ),
    "dspark, top 10 by its config": dict(model="sparks-of-ten", num_speculative_tokens=3),
    "dspark of another architecture, top 20": dict(
        model="small", method="dspark", num_speculative_tokens=4, dspark_draft_topk=20
    ),
    "top 20 of a draft model": DRAFT | dict(dspark_draft_topk=20),
    "top 20 of n-grams": NGRAM | dict(dspark_draft_topk=20),
    "adaptive dspark": dict(model="sparks", num_speculative_tokens=3, enable_adaptive_verification=True),
    "adaptive dspark with argmax": dict(
        model="sparks", num_speculative_tokens=3, enable_adaptive_verification=True, use_local_argmax_reduction=True
    ),
    "adaptive eagle3": dict(
        model="small", method="eagle3", num_speculative_tokens=3, enable_adaptive_verification=True
    ),
    "adaptive eagle3 with argmax": dict(
        model="small",
        method="eagle3",
        num_speculative_tokens=3,
        enable_adaptive_verification=True,
        use_local_argmax_reduction=True,
    ),
    "argmax": DRAFT | dict(use_local_argmax_reduction=True),
    "muse": dict(model="muse", num_speculative_tokens=3),
    # methods given and found
    "ngram in brackets": NGRAM | dict(method="[ngram]"),
    "ngram with a model": NGRAM | dict(model="small"),
    "ngram with a draft's fields": NGRAM | dict(draft_tensor_parallel_size=3, quantization="fp7", max_model_len=10**6),
    "custom class by its method": dict(model="proposers.Mine", method="custom_class", num_speculative_tokens=3),
    "custom class without a model": dict(method="custom_class", num_speculative_tokens=3),
    "custom class, no length": dict(model="proposers.Mine", method="custom_class"),
    "medusa as a draft model": dict(model="heads", method="draft_model", num_speculative_tokens=3),
    "medusa as mtp": dict(model="heads", method="mtp", num_speculative_tokens=3),
    "medusa as eagle": dict(model="heads", method="eagle", num_speculative_tokens=3),
    "a draft model as medusa": dict(model="small", method="medusa", num_speculative_tokens=3),
    "medusa of the old form": dict(model="old-heads", method="medusa", num_speculative_tokens=3),
    "dspark as medusa": dict(model="sparks", method="medusa", num_speculative_tokens=3),
    "mtp as a draft model": dict(model="mimo", method="draft_model", num_speculative_tokens=1),
    "mtp, found": dict(model="mimo", num_speculative_tokens=1),
    "mtp as an MLP speculator": dict(model="mimo", method="mlp_speculator", num_speculative_tokens=1),
    "mtp as eagle3": dict(model="mimo", method="eagle3", num_speculative_tokens=1),
    "mtp as medusa": dict(model="two-heads", method="medusa", num_speculative_tokens=3),
    "deepseek as eagle": dict(model="latent", method="eagle", num_speculative_tokens=2),
    "deepseek as eagle, no length": dict(model="latent", method="eagle"),
    "deepseek as eagle3": dict(model="latent", method="eagle3", num_speculative_tokens=2),
    "mtp of deepseek": dict(method="mtp", num_speculative_tokens=2, target="latent"),
    "eagle of mistral": dict(model="mistral", method="eagle", num_speculative_tokens=2),
    "eagle3 of mistral": dict(model="mistral", method="eagle3", num_speculative_tokens=2),
    "eagle of qwen3": dict(model="qwen3", method="eagle", num_speculative_tokens=2),
    "eagle3 of qwen3": dict(model="qwen3", method="eagle3", num_speculative_tokens=2),
    "eagle3 of phi": dict(model="phi", method="eagle3", num_speculative_tokens=2),
    "eagle3 that is named so": dict(model="neutral-eagle3", num_speculative_tokens=2),
    "eagle, named eagle3": dict(model="neutral-eagle3", method="eagle", num_speculative_tokens=2),
    "dflash of a llama": dict(model="small", method="dflash", num_speculative_tokens=3),
    "dflash, no length": dict(model="blocks", method="dflash"),
    "MLP speculator": dict(model="mlp", num_speculative_tokens=3),
    "MLP speculator, no length": dict(model="mlp", method="mlp_speculator"),
    "trained blocks, no method": dict(model="trained-blocks", num_speculative_tokens=3),
    "trained parallel, no method": dict(model="trained-parallel", num_speculative_tokens=3),
    "trained parallel as eagle3": dict(
        model="trained-parallel", method="eagle3", num_speculative_tokens=3, parallel_drafting=True
    ),
    "trained sparks, no length": dict(model="trained-sparks"),
    "trained eagle3 as medusa": dict(model="trained-eagle3", method="medusa", num_speculative_tokens=3),
    "eagle3 on the target mimo": dict(model="small", method="eagle3", num_speculative_tokens=3, target="mimo"),
    "hidden states of an unknown family": dict(method="extract_hidden_states", num_speculative_tokens=1, target="phi"),
    "hidden states with a model": dict(method="extract_hidden_states", model="small", num_speculative_tokens=1),
    "draft model config of n-grams": NGRAM | dict(draft_model_config=dict(hf_config={})),
    "suffix with parallel drafting": SUFFIX | dict(parallel_drafting=True),
    "suffix, depth 1": SUFFIX | dict(suffix_decoding_max_tree_depth=1),
    "not on this machine": dict(model="org/not-here", method="eagle3", num_speculative_tokens=3),
    "five thousand tokens": NGRAM | dict(num_speculative_tokens=5000),
    "an infinite factor": SUFFIX | dict(suffix_decoding_max_spec_factor=float("inf")),
    "a truth value": NGRAM | dict(num_speculative_tokens=True),
    # devices, lengths, weights
    "n-gram on 3": NGRAM | dict(target_tp=3),
    "hidden states on 3": dict(method="extract_hidden_states", num_speculative_tokens=1, target_tp=3),
    "suffix on 3": SUFFIX | dict(target_tp=3),
    "draft model on 4 of 4": DRAFT | dict(target_tp=4),
    "narrow draft on 4 of 4": DRAFT | dict(model="narrow", target_tp=4),
    "narrow draft on 1 of 4": DRAFT | dict(model="narrow", target_tp=4, draft_tensor_parallel_size=1),
    "medusa on 3 of 3": dict(model="heads", num_speculative_tokens=3, target_tp=3),
    "short draft": DRAFT | dict(model="short"),
    "short draft, shorter": DRAFT | dict(model="short", max_model_len=100),
    "short draft, longer": DRAFT | dict(model="short", max_model_len=600),
    "stretched draft": DRAFT | dict(model="stretched"),
    "stretched draft, longer": DRAFT | dict(model="stretched", max_model_len=1024),
    "yarned draft": DRAFT | dict(model="yarned"),
    "yarned draft, longer": DRAFT | dict(model="yarned", max_model_len=1024),
    "short eagle": dict(model="short", method="eagle", num_speculative_tokens=3),
    "short target": DRAFT | dict(target="short"),
    "short target, longer": DRAFT | dict(target="short", max_model_len=600),
    "medusa longer than its target": dict(model="heads", num_speculative_tokens=3, max_model_len=3000),
    "quantized draft": DRAFT | dict(model="fp8"),
    "quantized draft, same word": DRAFT | dict(model="fp8", quantization="fp8"),
    "quantized draft, other word": DRAFT | dict(model="fp8", quantization="experts_int8"),
    "quantization, unknown": DRAFT | dict(quantization="fp7"),
    "quantization, given up": DRAFT | dict(quantization="fbgemm_fp8"),
    "load config, unknown field": DRAFT | dict(draft_load_config=dict(load_fromat="dummy")),
    "load config in capitals": DRAFT | dict(draft_load_config=dict(load_format="DUMMY")),
    "revision": DRAFT | dict(revision="main", code_revision="main"),
    "length as text": NGRAM | dict(num_speculative_tokens="3"),
    "half a token": NGRAM | dict(num_speculative_tokens=2.5),
}
OMNI = dict(model="omni-sparks", num_speculative_tokens=4, target="omni")
CASES |= {
    "omni dspark": OMNI,
    "omni dspark, no length": dict(model="omni-sparks", target="omni"),
    "omni dspark, three tokens": OMNI | dict(num_speculative_tokens=3),
    "omni dspark of another draft": OMNI | dict(model="small", method="dspark"),
    "omni dspark on another target": OMNI | dict(target="qwen3"),
    "omni dspark on another target, three tokens": OMNI | dict(target="qwen3", num_speculative_tokens=3),
    "omni dspark, top 20": OMNI | dict(dspark_draft_topk=20),
    "omni, n-grams": NGRAM | dict(target="omni"),
    "omni, draft model": DRAFT | dict(target="omni"),
    "omni, draft model of other words": DRAFT | dict(target="omni", model="small-other-words"),
    "medusa on omni": dict(model="heads", method="medusa", num_speculative_tokens=3, target="omni"),
    "medusa on omni, found": dict(model="heads", num_speculative_tokens=3, target="omni"),
    "sparks as medusa on 3": dict(model="sparks", method="medusa", num_speculative_tokens=3, target_tp=3),
    "eagle as medusa on 3": dict(model="EAGLE-small", method="medusa", num_speculative_tokens=1, target_tp=3),
    "omni as medusa": dict(model="omni", method="medusa", num_speculative_tokens=3),
    "omni as eagle3": dict(model="omni", method="eagle3", num_speculative_tokens=3),
    "omni as a draft model": DRAFT | dict(model="omni"),
    "omni, eagle3": dict(model="small", method="eagle3", num_speculative_tokens=3, target="omni"),
}
CASES |= {name.replace("-", " "): OMNI | dict(model=name) for name in MODELS if name.startswith(("omni-w", "omni-r"))}
CASES |= {  # what ours once decided otherwise
    "custom class in capitals": dict(model="Proposers.Mine", num_speculative_tokens=3, prompt_lookup_max=2),
    "medusa, named eagle3": dict(model="small_eagle3", method="medusa", num_speculative_tokens=2),
    "mtp, named eagle3": dict(model="small_eagle3", method="mtp", num_speculative_tokens=2),
    "mtp, named dflash": dict(model="small-dflash", method="mtp", num_speculative_tokens=2),
    "suffix fields out of range for n-grams": NGRAM
    | dict(suffix_decoding_max_cached_requests=-1, suffix_decoding_min_token_prob=2.0),
    "argmax of drawn n-grams": NGRAM | dict(use_local_argmax_reduction=True, draft_sample_method="probabilistic"),
    "argmax of drawn medusa heads": dict(
        model="heads", num_speculative_tokens=3, use_local_argmax_reduction=True, draft_sample_method="probabilistic"
    ),
    "draft model config of suffixes": SUFFIX | dict(draft_model_config=dict(hf_config={})),
    "draft model config of a draft model": DRAFT | dict(draft_model_config=dict(hf_config={})),
    "medusa with parallel drafting": dict(model="heads", num_speculative_tokens=3, parallel_drafting=True),
    "dflash of phi": dict(model="blocks", method="dflash", num_speculative_tokens=3, target="phi"),
    "parallel sparks as eagle3": dict(model="trained-parallel", method="eagle3", num_speculative_tokens=3),
    "eagle3 as its checkpoint, by its path": dict(model="trained-eagle3", method="mtp", num_speculative_tokens=3),
    "trained blocks as eagle3": dict(model="trained-blocks", method="eagle3", num_speculative_tokens=3),
}
FLY = dict(rejection_sample_method="fly")
EAGLE3 = dict(model="small", method="eagle3", num_speculative_tokens=3)
CASES |= {  # the fields of vLLM 0.33
    "fly": NGRAM | FLY,
    "fly, nine tokens": NGRAM | FLY | dict(num_speculative_tokens=9),
    "fly, one token": NGRAM | FLY | dict(num_speculative_tokens=1),
    "fly, window 2": NGRAM | FLY | dict(fly_window_size=2),
    "fly, window of the draft": NGRAM | FLY | dict(fly_window_size=3),
    "fly, window 0": NGRAM | FLY | dict(fly_window_size=0),
    "fly, its entropy": EAGLE3 | FLY | dict(fly_entropy_threshold=0.5, fly_entropy_top_k=5),
    "fly, drawn": DRAFT | FLY | dict(draft_sample_method="probabilistic"),
    "fly, entropy below 0": NGRAM | FLY | dict(fly_entropy_threshold=-0.1),
    "fly, entropy of no token": NGRAM | FLY | dict(fly_entropy_top_k=0),
    "fly of hidden states": dict(method="extract_hidden_states", num_speculative_tokens=2) | FLY,
    "fly, no method": NGRAM | dict(fly_window_size=2, fly_entropy_threshold=0.5),
    "fly with rates": NGRAM | FLY | dict(synthetic_acceptance_rates=[0.8, 0.4, 0.4]),
    "xpress": dict(model="xpress", method="dflash", num_speculative_tokens=3),
    "xpress, renamed": dict(model="xpress-renamed", method="dflash", num_speculative_tokens=3),
    "xpress, no method": dict(model="xpress", num_speculative_tokens=3),
    "xpress, no length": dict(model="xpress", method="dflash"),
    "xpress, two tokens": dict(model="xpress", method="dflash", num_speculative_tokens=2),
    "xpress, top 20": dict(model="xpress", method="dflash", num_speculative_tokens=3, xpress_topc=20),
    "xpress, exact": dict(model="xpress", method="dflash", num_speculative_tokens=3, xpress_topc=0),
    "xpress, top of more than its vocabulary": dict(
        model="xpress", method="dflash", num_speculative_tokens=3, xpress_topc=2049
    ),
    "xpress, top -1": dict(model="xpress", method="dflash", num_speculative_tokens=3, xpress_topc=-1),
    "xpress, too many by its config": dict(model="xpress-of-many", method="dflash", num_speculative_tokens=3),
    "xpress, too many by its config, top 20": dict(
        model="xpress-of-many", method="dflash", num_speculative_tokens=3, xpress_topc=20
    ),
    "xpress by its steps": dict(model="xpress-by-steps", method="dflash", num_speculative_tokens=3),
    "xpress as eagle3": dict(model="xpress", method="eagle3", num_speculative_tokens=3),
    "xpress top of dflash": dict(model="blocks", method="dflash", num_speculative_tokens=3, xpress_topc=20),
    "xpress top of eagle3": EAGLE3 | dict(xpress_topc=20),
    "xpress top of n-grams": NGRAM | dict(xpress_topc=20),
    "quantized head": EAGLE3 | dict(draft_lm_head_quantization="fp8"),
    "quantized head of 4 bits": dict(model="EAGLE-small", num_speculative_tokens=3, draft_lm_head_quantization="nvfp4"),
    "quantized head of 8 bits": EAGLE3 | dict(draft_lm_head_quantization="int8"),
    "quantized head of an MTP head": dict(
        method="mtp", num_speculative_tokens=1, target="mimo", draft_lm_head_quantization="fp8"
    ),
    "quantized head of n-grams": NGRAM | dict(draft_lm_head_quantization="fp8"),
    "quantized head of a draft model": DRAFT | dict(draft_lm_head_quantization="fp8"),
    "quantized head of dflash": dict(
        model="blocks", method="dflash", num_speculative_tokens=3, draft_lm_head_quantization="fp8"
    ),
    "hashes without lookahead": EAGLE3 | dict(disable_lookahead_block_hashes=True),
    "hashes without lookahead, n-gram": NGRAM | dict(disable_lookahead_block_hashes=True),
    "KV cache of 0.33": DRAFT | dict(kv_cache_dtype="octave_k3v4"),
    "MoE backend of 0.33": DRAFT | dict(moe_backend="aiter_triton_mxfp4_mxfp4"),
    "attention backend of 0.33": DRAFT | dict(attention_backend="rocm_octave"),
    "other vocabulary with argmax": DRAFT
    | dict(model="small-other-words", use_heterogeneous_vocab=True, use_local_argmax_reduction=True),
    "dflash, fewer positions": dict(model="short-blocks", method="dflash", num_speculative_tokens=3),
    "dflash, fewer positions of YaRN": dict(model="yarned-blocks", method="dflash", num_speculative_tokens=3),
    "dflash without block drop": dict(
        model="blocks", method="dflash", num_speculative_tokens=3, disable_eagle_block_drop=True
    ),
    "dspark of muse spark": dict(model="muse-sparks", num_speculative_tokens=3),
    "dspark of muse spark by its method": dict(model="muse-sparks", method="dspark", num_speculative_tokens=3),
    "mtp of a class of vLLM's own": dict(method="mtp", num_speculative_tokens=2, target="llama-mtp"),
    "mtp by the Transformers back end": dict(method="mtp", num_speculative_tokens=2, target="helium-mtp"),
    "mtp by the Transformers back end, four": dict(method="mtp", num_speculative_tokens=4, target="helium-mtp"),
    "mtp by the Transformers back end, three": dict(method="mtp", num_speculative_tokens=3, target="helium-mtp"),
    "a built-in head by the Transformers back end": dict(num_speculative_tokens=2, target="helium-mtp"),
    "mtp layers of a draft": dict(model="llama-mtp", num_speculative_tokens=2),
    "step5 by its old name": dict(method="step5_mtp", num_speculative_tokens=1, target="mimo"),
}
assert len(CASES) >= 150, len(CASES)


def write_models(folder):
    """Make the folders of `MODELS`."""
    for name, config in MODELS.items():
        path = Path(folder) / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))


def place(case, folder):
    """A case's dictionary with real paths, its target's folder and that one's devices."""
    case = dict(case)
    target, devices = case.pop("target", None), case.pop("target_tp", 1)
    if case.get("model") in MODELS:
        case["model"] = str(Path(folder) / case["model"])
    return case, str(Path(folder) / target) if target else str(VERIFIER), devices


def mtp_config(word):
    """A verifier's config.json with this model_type or first architecture, with all numbers that families count by."""
    numbers = dict(
        num_nextn_predict_layers=2,
        mtp_num_hidden_layers=3,
        num_mtp_modules=4,
        layer_types=[],
        hc_count=1,
    )
    config = dict(model_type="any", architectures=["AnyForCausalLM"])
    config |= dict(architectures=[word]) if word[0].isupper() else dict(model_type=word)
    if word.startswith("RadioMBart"):
        return config | dict(decoder=dict(model_type="any", causal_vision_prefix=True))
    if word.startswith("Nemotron"):  # these have it in a part
        return config | dict(text_config=dict(model_type="nemotron_h", architectures=["Any"], **numbers))
    if word in ("interns2_mobius", "intern_s2_preview"):
        experts = dict(mtp_num_experts=4, mtp_num_experts_per_tok=2)
        return config | dict(text_config=dict(model_type="any", architectures=["Any"], **numbers, **experts))
    if word.startswith("inkling"):
        return config | dict(mtp_config=dict(num_nextn_predict_layers=5))
    if word.startswith("BailingMoeV3VL"):
        return config | dict(text_config=dict(model_type="any", architectures=["Any"], **numbers))
    return config | numbers


# where we decide otherwise than vLLM, on purpose. Title: [(what we do, on which dictionaries)]. What we do:
# "accept" what vLLM refuses, "refuse" what it accepts, resolve to other "values". A condition names fields and values
# that decide, and holds for no dictionary on which the two agree. The reasons are in the table of
# nbs/serve/01_speculative_config.ipynb, under the same titles.
MTP_MODELS = ("mimo", "two-heads", "latent")
MTP_WORDS = ("mtp", "mimo_mtp")
SERVED_AS = {"trained-eagle3": "eagle3", "trained-parallel": "eagle3", "trained-blocks": "dflash"}
SERVED_AS |= {"trained-sparks": "dspark"}


def _sampled_in_words(case):
    return case.get("rejection_sample_method") in ("strict", "probabilistic")


def _has_tree(case):
    return "speculative_token_tree" in case


def _is_in_brackets(case):
    return case.get("method") == "[ngram]"


def _is_mtp_without_number(case):
    in_target = case.get("method") in MTP_WORDS and "model" not in case
    found = case.get("model") in MTP_MODELS and case.get("method") in (None, "draft_model", *MTP_WORDS)
    return "num_speculative_tokens" not in case and (in_target or found)


def _has_own_class(case):
    "The target has `num_mtp_layers`, and vLLM does not serve it by the Transformers back end."
    return case.get("target") == "llama-mtp" and case.get("method") == "mtp" and "model" not in case


def _is_of_another_length(case):
    "vLLM's kernel takes an XPress draft's block of 4 slots to be the draft and the anchor."
    xpress = str(case.get("model")).startswith("xpress") and case.get("method") == "dflash"
    return xpress and case.get("num_speculative_tokens") != 3


def _given_or_by_path(case):
    "The method as vLLM has it before it reads a checkpoint of ours; its name has eagle3 in one."
    named = case.get("model") == "trained-eagle3" and case.get("method") not in ("eagle", "dflash", "dspark", "medusa")
    return "eagle3" if named else case.get("method")


def _contradicts_checkpoint(case):
    served, given = SERVED_AS.get(case.get("model")), _given_or_by_path(case)
    return served is not None and given not in (None, served)


def _checkpoint_has_number(case):
    "vLLM takes a number from the block of a DSpark drafter alone."
    served, given = SERVED_AS.get(case.get("model")), _given_or_by_path(case)
    return "num_speculative_tokens" not in case and served not in (None, "dspark") and given in (None, served)


def _checkpoint_has_method(case):
    return case.get("model") in ("trained-blocks", "trained-parallel") and "method" not in case


def _checkpoint_is_parallel(case):
    given = case.get("method") == "eagle3" and not case.get("parallel_drafting")
    return case.get("model") == "trained-parallel" and given


def _checkpoint_proposes_fewer(case):
    fitting = case.get("method") in (None, "dspark")
    return case.get("model") == "trained-sparks" and fitting and "num_speculative_tokens" not in case


def _is_argmax_of_a_sample(case):
    chosen = case.get("use_local_argmax_reduction") and case.get("draft_sample_method") == "probabilistic"
    without = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
    heads = case.get("model") in ("heads", "old-heads") or case.get("method") == "medusa"
    path = case.get("model") in ("small_eagle3", "neutral-eagle3", "EAGLE-small", "small-dflash", "sparks", "muse")
    return bool(chosen and case.get("method") not in without and not (heads and not path))


def _has_odd_schedule(case):
    return case.get("num_speculative_tokens_per_batch_size") in ([[2, 4, 3]], [[1, 4, 3], [4, 8, 1]])


def _is_elsewhere(case):
    return case.get("model") == "org/not-here"


def _has_no_meant_number(case):
    number = case.get("num_speculative_tokens")
    return number is True or (isinstance(number, int) and number > 4096)


def _has_infinite_factor(case):
    return case.get("suffix_decoding_max_spec_factor") == float("inf")


ROWS = {
    "words of the documented line": [
        ("accept", _sampled_in_words),
        ("accept", _has_tree),
        ("accept", _is_in_brackets),
    ],
    "MTP heads": [("accept", _is_mtp_without_number), ("accept", _has_own_class)],
    "a checkpoint of this library": [
        ("refuse", _contradicts_checkpoint),
        ("accept", _checkpoint_has_number),
        ("values", _checkpoint_has_method),
        ("values", _checkpoint_is_parallel),
        ("values", _checkpoint_proposes_fewer),
    ],
    "what fails later": [
        ("refuse", _is_argmax_of_a_sample),
        ("refuse", _has_odd_schedule),
        ("refuse", _is_of_another_length),
    ],
    "models of other machines": [("accept", _is_elsewhere)],
    "numbers that nobody means": [("refuse", _has_no_meant_number), ("refuse", _has_infinite_factor)],
}


def rows_of(case):
    """Titles of the rows that apply to a dictionary."""
    return [title for title, parts in ROWS.items() if any(applies(case) for _, applies in parts)]


def explained(case, disagreement):
    """Whether a row explains that ours decides so: "accept", "refuse" or "values"."""
    parts = [part for parts in ROWS.values() for part in parts]
    return any(how == disagreement and applies(case) for how, applies in parts)


# values that are the rule, and are not recorded
USUAL = dict(
    parallel_drafting=False,
    draft_sample_method="greedy",
    rejection_sample_method="standard",
    prompt_lookup_min=0,
    prompt_lookup_max=0,
    disable_padded_drafter_batch=False,
    disable_eagle_block_drop=False,
    use_local_argmax_reduction=False,
    use_heterogeneous_vocab=False,
    enable_adaptive_verification=False,
    suffix_decoding_max_tree_depth=24,
    suffix_decoding_max_cached_requests=10000,
    suffix_decoding_max_spec_factor=1.0,
    suffix_decoding_min_token_prob=0.1,
    new_slots=0,
    use_eagle_block_drop=False,
    uses_dynamic_speculative_decoding=False,
    use_multi_module_mtp=False,
    use_gemma4_mtp=False,
    use_step3p5_mtp=False,
    disable_lookahead_block_hashes=False,
    fly_entropy_threshold=0.3,
    fly_entropy_top_k=3,
)
FIELDS = [
    "method",
    "num_speculative_tokens",
    "parallel_drafting",
    "draft_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "quantization",
    "moe_backend",
    "attention_backend",
    "kv_cache_dtype",
    "max_model_len",
    "enforce_eager",
    "revision",
    "code_revision",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "disable_padded_drafter_batch",
    "disable_eagle_block_drop",
    "use_local_argmax_reduction",
    "use_heterogeneous_vocab",
    "index_share_for_mtp_iteration",
    "draft_tensor_parallel_size",
    "num_speculative_tokens_per_batch_size",
    "dspark_draft_topk",
    "enable_adaptive_verification",
    "disable_lookahead_block_hashes",
    "draft_lm_head_quantization",
    "xpress_topc",
    "fly_window_size",
    "fly_entropy_threshold",
    "fly_entropy_top_k",
]
QUESTIONS = [
    "use_eagle",
    "use_dflash",
    "use_dspark",
    "uses_draft_model",
    "uses_extract_hidden_states",
    "use_ngram",
    "use_ngram_gpu",
    "uses_draft_kv_cache",
    "use_eagle_block_drop",
    "uses_dynamic_speculative_decoding",
    "use_gemma4_mtp",
    "use_step3p5_mtp",
    "use_multi_module_mtp",
]
QUESTIONS_OF_033 = ["needs_eagle_block_drop", "is_xpress", "draft_shares_target_positions"]
DEVICES = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")


def resolved(config, folder, rejection_sample_method, draft_max_model_len, lookahead, engine_version):
    """What either class made of a dictionary, as JSON has it: what is not usual, and what is not None."""
    questions = QUESTIONS + (QUESTIONS_OF_033 if engine_version == "0.33" else [])
    values = {name: getattr(config, name, USUAL.get(name)) for name in FIELDS}  # vLLM 0.32 does not have all
    values["attention_backend"] = getattr(config.attention_backend, "name", config.attention_backend)
    devices = config.draft_parallel_config
    values |= dict(
        rejection_sample_method=rejection_sample_method,
        new_slots=config.max_num_new_slots_for_drafting,
        draft_max_model_len=draft_max_model_len,
        num_lookahead_tokens=lookahead if config.method == "medusa" else None,
        devices=devices and [getattr(devices, name) for name in DEVICES],
        shown=repr(config).replace(str(folder), "").replace(str(ROOT), ""),
    )
    values |= {name: getattr(config, name)() for name in questions}
    asked = [name for name in questions if values[name] and name not in USUAL]
    values = {n: v for n, v in values.items() if v is not None and (n not in questions or n in USUAL)}
    values = json.loads(json.dumps(values | dict(questions=asked)))
    return {name: value for name, value in values.items() if name not in USUAL or value != USUAL[name]}


NAMES = [name for name in MODELS if name != "mlp" and not name.startswith(("omni-w", "omni-r"))]
RIGHT = {  # field -> values to draw from that are right in some dictionary
    "draft_sample_method": ["greedy", "probabilistic"],
    "draft_tensor_parallel_size": [1, 2, 4],
    "draft_load_config": [{}, dict(load_format="dummy"), dict(load_format="DUMMY")],
    "quantization": ["fp8", "compressed-tensors"],
    "moe_backend": ["auto", "triton", "marlin"],
    "attention_backend": ["FLASH_ATTN", "flex_attention", "auto"],
    "kv_cache_dtype": ["auto", "fp8", "bfloat16"],
    "max_model_len": [1, 64, 512, 513, 1024, 1025, 2048, 2049],
    "enforce_eager": [True, False],
    "revision": ["main"],
    "code_revision": ["main"],
    "index_share_for_mtp_iteration": [True, False],
    "disable_padded_drafter_batch": [True, False],
    "disable_eagle_block_drop": [True, False],
    "use_local_argmax_reduction": [True, True, False],
    "use_heterogeneous_vocab": [True, False],
    "parallel_drafting": [True, False],
    "enable_adaptive_verification": [True, True, False],
    "dspark_draft_topk": [1, 20, 1024, 1025],
    "prompt_lookup_max": [1, 3, 5],
    "prompt_lookup_min": [1, 2, 4, 7],
    "suffix_decoding_max_tree_depth": [2, 12, 40],
    "suffix_decoding_max_cached_requests": [0, 7],
    "suffix_decoding_max_spec_factor": [0.0, 0.5, 2],
    "suffix_decoding_min_token_prob": [0.0, 0.5, 1],
    "num_speculative_tokens_per_batch_size": [[[1, 4, 3], [5, 9, 1]], [[1, 2, 0]]],
    "rejection_sample_method": ["standard", "block", "synthetic"],
}
RIGHT_IN_033 = RIGHT | {
    "rejection_sample_method": ["standard", "block", "synthetic", "fly", "fly"],
    "fly_window_size": [1, 2, 3, 6],
    "fly_entropy_threshold": [0.0, 0.3, 1.5],
    "fly_entropy_top_k": [1, 5],
    "xpress_topc": [0, 20, 2048, 2049],
    "draft_lm_head_quantization": ["fp8", "nvfp4"],
    "disable_lookahead_block_hashes": [True, False],
    "kv_cache_dtype": ["auto", "fp8", "octave_k3v3", "of_a_platform"],
    "moe_backend": ["triton", "aiter_triton_mxfp4_mxfp4"],
    "attention_backend": ["FLASH_ATTN", "step5_dsa"],
}
BELONGS = {  # field -> what is written in a dictionary of its method
    "index_share_for_mtp_iteration": ("mtp",),
    "use_heterogeneous_vocab": ("draft_model",),
    "dspark_draft_topk": ("sparks",),
    "parallel_drafting": ("eagle",),
    "xpress_topc": ("xpress",),
    "draft_lm_head_quantization": ("eagle",),
    "fly_window_size": ("ngram",),
}
WRONG = {  # field -> values that are wrong in every dictionary
    "num_speculative_tokens": [0, -1, "many", 2.5],
    "method": ["oracle"],
    "draft_sample_method": ["lax"],
    "draft_tensor_parallel_size": [0, 3],
    "draft_load_config": [dict(load_fromat="dummy")],
    "quantization": ["fp7"],
    "moe_backend": ["Triton"],
    "attention_backend": ["flash"],
    "kv_cache_dtype": ["fp16"],
    "max_model_len": [0],
    "dspark_draft_topk": [0],
    "prompt_lookup_max": [0],
    "suffix_decoding_max_cached_requests": [-1],
    "suffix_decoding_max_spec_factor": [-0.5],
    "suffix_decoding_min_token_prob": [1.1, -0.1],
    "num_speculative_tokens_per_batch_size": [[[1, 2]]],
    "rejection_sample_method": ["lax"],
    "tensor_parallel_size": [2],
    "no_such_field": [1],
}


def _drawn_rates(draw, st, case):
    """Rates or a mean length, mostly for as many tokens as there are."""
    number = case.get("num_speculative_tokens", 3)
    number = number if isinstance(number, int) and number > 0 else 3
    if draw(st.booleans()):
        return dict(synthetic_acceptance_length=draw(st.integers(2, 4 * number + 5)) / 4)
    rates = draw(st.lists(st.integers(0, 10), min_size=number, max_size=number))
    return dict(synthetic_acceptance_rates=sorted((r / 10 for r in rates), reverse=bool(draw(st.integers(0, 5)))))


def dictionaries(engine_version):
    """A hypothesis strategy over the fields: a way of drafting, up to four fields more, sometimes a wrong one."""
    from hypothesis import strategies as st

    right = RIGHT_IN_033 if engine_version == "0.33" else RIGHT
    without_model = ["ngram", "ngram", "ngram_gpu", "suffix", "suffix", "extract_hidden_states", "mtp", "custom_class"]
    found = [None, None, None, None, "draft_model"]
    of_a_model = [*found, "eagle", "eagle3", "eagle3", "dflash", "dspark", "medusa", "mtp", "mimo_mtp"]

    @st.composite
    def dictionary(draw):
        if draw(st.integers(0, 2)):
            case = dict(model=draw(st.sampled_from(NAMES)), method=draw(st.sampled_from(of_a_model)))
        else:
            case = dict(method=draw(st.sampled_from([*without_model, "eagle3", "mlp_speculator"])))
        if case["method"] == "custom_class":
            case["model"] = "proposers.Mine"
        if draw(st.integers(0, 9)):
            case["num_speculative_tokens"] = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16]))
        if draw(st.integers(0, 5)):  # fields that few methods have, mostly where they belong
            names = [name for name in right if all(part in str(case) for part in BELONGS.get(name, ()))]
        else:
            names = list(right)
        for name in draw(st.lists(st.sampled_from(sorted(names)), max_size=4, unique=True)):
            case[name] = draw(st.sampled_from(right[name]))
        if case.get("rejection_sample_method") == "synthetic" or not draw(st.integers(0, 29)):
            case |= _drawn_rates(draw, st, case)
        if not draw(st.integers(0, 9)):
            name = draw(st.sampled_from(sorted(WRONG)))
            case[name] = draw(st.sampled_from(WRONG[name]))
        case["target"] = draw(
            st.sampled_from([None, None, None, "mimo", "two-heads", "latent", "phi", "short", "omni"])
        )
        case["target_tp"] = draw(st.sampled_from([1, 1, 1, 1, 1, 2, 2, 4, 4, 3]))
        return {name: value for name, value in case.items() if value is not None}

    return dictionary()


def drawn(number, seed, engine_version):
    """That many dictionaries, all different, drawn with a seed (hypothesis, in .venv)."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    found = {}

    @with_seed(seed)
    @settings(
        max_examples=10 * number,  # neighbours are alike: every few of them
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(dictionaries(engine_version))
    def keep(case):
        found.setdefault(json.dumps(case, sort_keys=True), case)

    keep()
    step = len(found) // number
    return list(found.values())[::step][:number]
