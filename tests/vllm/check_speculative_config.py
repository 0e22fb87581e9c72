#!/usr/bin/env python
"""Ask vLLM's own SpeculativeConfig what it accepts, and write the answers down.

    .venv-vllm/bin/python tests/vllm/check_speculative_config.py            compare with the record; fails where vLLM
    answers otherwise
    .venv-vllm/bin/python tests/vllm/check_speculative_config.py --record   write
    tests/fixtures/speculative_config_vllm.json again

`CASES` are dictionaries, right and wrong, and `write_models` makes the folders that they name: a config.json each, no
weights, for vLLM builds no engine here. The record says for each case whether vLLM accepts it, and what it makes of it.
tests/test_speculative_config.py feeds the same dictionaries to our class and compares it with the record, so that it
needs no vLLM. Recorded too: what vLLM makes of every row of our MTP table. Then vLLM is given the JSON that our class
emits for every dictionary that it accepts, and must make the same of it (.venv emits it). The suffix cases need
arctic-inference only to run: here vLLM is told that it is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/fixtures/speculative_config_vllm.json"
VERIFIER = ROOT / "data/tiny-verifier"
FIELDS = (
    "method",
    "num_speculative_tokens",
    "parallel_drafting",
    "synthetic_acceptance_rates",
    "draft_sample_method",
    "max_model_len",
    "quantization",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)

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
}
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
}


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


def emit(folder):
    """Runs inside .venv: {case: what our class writes for vLLM 0.32}, of those it has words for."""
    sys.path.insert(0, str(ROOT))
    from speculators_nb.serve.speculative_config import SpeculativeConfig

    written = {}
    for name, case in CASES.items():
        fields, target, devices = place(case, folder)
        try:
            config = SpeculativeConfig(**fields, target_model_config=target, target_tensor_parallel_size=devices)
            written[name] = json.loads(config.to_json("vllm-0.32"))
        except ValueError:
            continue
    return written


def ask_vllm(folder, dictionaries):
    """{case: what vLLM says to its dictionary}."""
    import vllm.config.speculative as module
    from vllm.config import ModelConfig, ParallelConfig

    module.has_arctic_inference = lambda: True
    targets, said = {}, {}
    for name, fields in dictionaries.items():
        _, target, devices = place(CASES[name], folder)
        try:
            if target not in targets:
                targets[target] = ModelConfig(model=target, tokenizer=str(VERIFIER), dtype="float32")
            parallel = ParallelConfig()
            parallel.tensor_parallel_size = devices
        except Exception as e:
            raise SystemExit(f"{name}: vLLM refuses the target: {e}") from e
        try:
            c = module.SpeculativeConfig(**fields, target_model_config=targets[target], target_parallel_config=parallel)
        except Exception as e:  # vLLM refuses with several classes
            said[name] = dict(accepted=False, error=str(e).replace(folder, "").replace(str(ROOT), "")[:300])
            continue
        lookup = (
            dict(prompt_lookup_min=c.prompt_lookup_min, prompt_lookup_max=c.prompt_lookup_max)
            if c.method == "ngram"
            else {}
        )
        said[name] = dict(
            accepted=True,
            is_target=c.model == target,
            slots=c.max_num_new_slots_for_drafting,
            fields={f: getattr(c, f) for f in FIELDS} | lookup,
        )
    return said


def ask_mtp(words):
    """{word: [MTP type, tokens] or the error}: what vLLM makes of a verifier with such a model_type, or
    architecture."""
    from transformers import PretrainedConfig
    from vllm.config.speculative import SpeculativeConfig

    said = {}
    for word in words:
        kind = (
            dict(model_type="any", architectures=[word])
            if word[0].isupper()
            else dict(model_type=word, architectures=["AnyForCausalLM"])
        )
        config = PretrainedConfig(
            num_nextn_predict_layers=2,
            mtp_num_hidden_layers=3,
            num_mtp_modules=4,
            **{k: v for k, v in kind.items() if k != "model_type"},
        )
        config.model_type = kind["model_type"]
        made = SpeculativeConfig.hf_config_override(config)
        said[word] = [made.model_type, made.n_predict]
    return said


def mtp_words():
    """All words of our table, read from the module's source: this interpreter has none of our requirements."""
    import ast
    import re

    source = (ROOT / "speculators_nb/serve/vllm_methods.py").read_text()
    rows = re.search(r"^MTP_FAMILIES = (\[.*?^\])", source, re.M | re.S)[1]
    return [w for row in ast.parse(rows, mode="eval").body.elts for w in ast.literal_eval(row.args[1])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="write the record again")
    parser.add_argument(
        "--emit", metavar="FOLDER", help="print our class's JSON for the models in FOLDER (this script calls itself so)"
    )
    args = parser.parse_args()
    if args.emit:
        return print(json.dumps(emit(args.emit)))
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        write_models(folder)
        emitted = json.loads(
            subprocess.run(
                [ROOT / ".venv/bin/python", "-W", "ignore", __file__, "--emit", folder], check=True, capture_output=True
            ).stdout
        )
        answer = dict(
            version=vllm.__version__,
            mtp=ask_mtp(mtp_words()),
            cases=ask_vllm(folder, {name: place(case, folder)[0] for name, case in CASES.items()}),
        )
        ours = ask_vllm(folder, emitted)
    for name, said in ours.items():
        if not said["accepted"] or (answer["cases"][name]["accepted"] and said != answer["cases"][name]):
            sys.exit(f"{name}: vLLM makes something else of our {emitted[name]}: {said}")
    answer = json.loads(json.dumps(answer))
    if args.record:
        RECORD.write_text(json.dumps(answer, indent=1, sort_keys=True) + "\n")
    else:
        recorded = json.loads(RECORD.read_text())
        differing = [
            f"{part}: {name}"
            for part in ("cases", "mtp")
            for name in recorded[part] | answer[part]
            if recorded[part].get(name) != answer[part].get(name)
        ]
        if differing:
            sys.exit("vLLM answers otherwise than recorded (--record writes it again): " + "; ".join(differing))
    accepted = sum(c["accepted"] for c in answer["cases"].values())
    print(
        f"vLLM {answer['version']}: {accepted} dictionaries accepted, {len(CASES) - accepted} refused, "
        f"{len(answer['mtp'])} words of the MTP table, "
        f"{len(ours)} dictionaries of ours accepted with the same meaning; "
        f"{'recorded' if args.record else 'as recorded'}"
    )


if __name__ == "__main__":
    os.environ |= dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    main()
