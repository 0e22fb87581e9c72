#!/usr/bin/env python
"""Native MTP heads in the real vLLM, on a CPU: a tiny random verifier of each family gets a head of ours, and every
drafted token is compared with our own decoding.

    .venv/bin/python tests/vllm/check_mtp_families.py                  two families, half a minute
    .venv/bin/python tests/vllm/check_mtp_families.py --all            all that vLLM 0.32 serves on a CPU; make nightly
    .venv/bin/python tests/vllm/check_mtp_families.py --only glm4_moe  one of them

The head is stitched into its verifier, as a user would do it, and vLLM loads that folder alone. Texts, chains and
counters must be ours (see check_vllm.py, which has the engine's side and the comparison; Qwen3.5's head is there).
Beside DeepSeek's verifier an EAGLE-3 with latent attention drafts as well: on a CPU vLLM has such layers for verifiers
that have them.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import check_vllm
from check_vllm import VERIFIER, Case, answers, compare, install, moved, ours

H, K = 128, check_vllm.K
QUICK = ("deepseek_v3", "mimo", "deepseek_v3-eagle3")
SMALL = dict(
    hidden_size=H,
    num_hidden_layers=2,
    intermediate_size=256,
    max_position_embeddings=512,
    num_nextn_predict_layers=1,
    tie_word_embeddings=False,
)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
EXPERTS = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
LATENT = dict(  # vLLM's kernel for processors has these sizes of a latent and of what is rotated, and no others
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
# family -> (vLLM's architecture, config of transformers, what else vLLM reads in config.json)
FAMILIES = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SMALL | LATENT | EXPERTS,
        dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
    "mimo": ("MiMoForCausalLM", SMALL | dict(num_attention_heads=2, num_key_value_heads=1), dict(rope_theta=1e4)),
    "glm4_moe": ("Glm4MoeForCausalLM", SMALL | ATTENTION | EXPERTS | dict(use_qk_norm=True), {}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        SMALL | LATENT | EXPERTS | dict(mlp_layer_types=["dense", "sparse"]),
        {},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        SMALL | ATTENTION | dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=64),
        {},
    ),
    "exaone_moe": (
        "ExaoneMoEForCausalLM",
        SMALL
        | ATTENTION
        | dict(
            sliding_window=8,
            sliding_window_pattern="LG",
            layer_types=["sliding_attention", "full_attention"],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            num_shared_experts=1,
        ),
        {},
    ),
}
# its drafter is a checkpoint of its own, which reads the verifier's keys and values: heads of two sizes, and a window
GEMMA = SMALL | dict(
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    global_head_dim=128,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=16,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0,
    num_kv_shared_layers=0,
)
GEMMA.pop("num_nextn_predict_layers")
FAMILIES["gemma4_text"] = ("Gemma4ForCausalLM", GEMMA, {})
FAMILIES["deepseek_v3-eagle3"] = FAMILIES["deepseek_v3"]
# MiMo's checkpoints bring their config's class, and vLLM asks for it
MIMO = """from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
class MiMoConfig(Qwen2Config):
    model_type = 'mimo'
"""


def make_verifier(family, folder):
    """A random verifier whose next token depends mostly on the last one, so that the head is right at times."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import speculators_nb.models.mtp_families  # noqa: F401  (registers MiMo)

    architecture, fields, more = FAMILIES[family]
    tokenizer = AutoTokenizer.from_pretrained(VERIFIER)
    words = dict(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=0, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.removesuffix("-eagle3"), **fields, **words)
    model = moved(AutoModelForCausalLM.from_config(config, dtype=torch.float32), torch.Generator().manual_seed(0))
    with torch.no_grad():
        embed = model.get_input_embeddings().weight.normal_()
        model.lm_head.weight.copy_(embed[torch.randperm(len(embed))])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text()) | more | dict(architectures=[architecture])
    if family == "mimo":
        raw["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
        (folder / "configuration_mimo.py").write_text(MIMO)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return folder


def make_assistant(own, folder):
    """A query-only drafter behind Gemma 4, in front of the engine in its own layout."""
    import torch

    from speculators_nb.train.train_drafter import new_drafter

    drafter = new_drafter("query_only", own, draft_hidden_size=H, ttt_steps=K)
    with torch.no_grad():  # the token counts more than the state
        projection = drafter.pre_projection.weight
        projection[:, :H] = 0.2 * projection[:, H:]
        projection[:, H:] *= 0.5
    moved(drafter, torch.Generator().manual_seed(1)).save_pretrained(folder / "gemma4-drafter")
    drafter.save_native(folder / "gemma4-assistant")
    said = dict(method="mtp", model=str(folder / "gemma4-assistant"), num_speculative_tokens=K)
    run = dict(model=str(own), speculative_config=said)
    return Case(run, folder / "gemma4-drafter", own, contract="save_native")


def make_eagle3(own, folder):
    """EAGLE-3 with latent attention, in its own layout. It attends to the token itself, whose embedding the head reads:
    queries and keys are the same 64 channels of it."""
    import torch

    from speculators_nb.models.convert import export_native
    from speculators_nb.train.train_drafter import new_drafter

    # vLLM's DeepSeek cannot give the state that enters layer 0
    shape = dict(fc_norm=True, norm_output=True, norm_before_residual=False, target_layer_ids=[1])
    drafter = moved(new_drafter("eagle3", own, "deepseek_v3", ttt_steps=K, **shape), torch.Generator().manual_seed(1))
    attention, one = drafter.layers[0].self_attn, torch.eye(H)
    with torch.no_grad():
        attention.q_a_proj.weight[:, :H] += one[:64]
        attention.kv_a_proj_with_mqa.weight[:H, :H] += one
        for head in range(4):
            attention.q_b_proj.weight[192 * head :][:64] += 2 * one[:64, :64]
            attention.kv_b_proj.weight[256 * head :][:64, :H] += one[:64]
            attention.kv_b_proj.weight[256 * head + 128 :][:H, :H] += one
            attention.o_proj.weight[:, 128 * head :][:, :H] += one
    drafter.save_pretrained(folder / "latent-eagle3")
    native = export_native(folder / "latent-eagle3", folder / "latent-eagle3-native")
    said = dict(method="eagle3", model=native, num_speculative_tokens=K)
    return Case(dict(model=str(own), speculative_config=said), folder / "latent-eagle3", own, contract="export")


def make_case(family, folder):
    """A family's verifier with a head of ours, in front of the engine."""
    import torch

    from speculators_nb.models.mtp import MTPDraftModel
    from speculators_nb.models.mtp_native import stitch_mtp

    own = make_verifier(family, folder / f"{family}-verifier")
    if family == "gemma4_text":
        return make_assistant(own, folder)
    if family == "deepseek_v3-eagle3":
        return make_eagle3(own, folder)
    head = MTPDraftModel.from_training_args(
        verifier_name_or_path=str(own), fresh_head=True, verifier_norm=True, num_speculative_steps=K
    )
    g = torch.Generator().manual_seed(1)
    moved(head, g)
    halves = [2 * torch.eye(H), 0.5 * torch.eye(H)]  # the token counts more than the state
    halves = halves[::-1] if head.mtp_layers[0].family.hidden_first else halves
    with torch.no_grad():
        head.mtp_layers[0].input_proj.weight.copy_(torch.cat(halves, 1) + 0.3 * torch.randn(H, 2 * H, generator=g))
    head.save_pretrained(folder / f"{family}-head")
    stitched = stitch_mtp(folder / f"{family}-head", own, folder / f"{family}-stitched")
    said = dict(method="mtp", num_speculative_tokens=K)
    run = dict(model=str(stitched), speculative_config=said, trust_remote_code=family == "mimo")
    return Case(run, folder / f"{family}-head", stitched, contract="stitch_mtp")


def main(families):
    import torch
    from transformers.utils import logging

    from speculators_nb.serve.vllm_contract import check_vllm_contract

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    check_vllm.LIMIT = 32
    python, began, problems = install(), time.time(), []
    prompts = [torch.randint(2, 2000, (9,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        cases = {family: make_case(family, folder) for family in families}
        for family, case in cases.items():
            if not any(case.contract in line for line in check_vllm_contract(case.draft)):
                problems.append(f"{family}: check_vllm_contract does not say {case.contract!r}")
        theirs, version, mine = answers(
            python, cases, prompts, folder, lambda: {family: ours(case, prompts) for family, case in cases.items()}
        )
    for family in cases:
        row, wrong = compare(family, theirs[family], mine[family], mine[family])
        problems += wrong
        print("  ".join(str(cell) for cell in row))
        if "error" not in theirs[family] and not theirs[family]["counts"]["accepted_tokens"]:
            problems.append(f"{family}: nothing was accepted: the test shows too little")
    print(f"{check_vllm.VLLM} {version}: same texts, same chains, drafts, accepted at 1..{K}, mean length")
    print(f"{len(cases)} families in {time.time() - began:.0f} s")
    if problems:
        raise SystemExit("\n".join(["", *problems]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--all", action="store_true", help="every family that vLLM serves on a CPU")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="these families")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(options.only or (FAMILIES if options.all else QUICK))
