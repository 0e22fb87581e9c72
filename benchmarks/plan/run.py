"""Sizes of drafters and of runs for an 8B verifier, computed from configs: the guides show them.

    python benchmarks/plan/run.py    writes results/*.csv and the plan of a recipe; seconds, nothing is downloaded

A drafter is built on the meta device, where a tensor has a shape and no memory, with as many layers as released
checkpoints have: four for P-EAGLE, five for drafters of blocks, one for the others. What a run needs computes
the package `plan`.
"""

import tempfile
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from speculators_nb.cli.run import stages_of
from speculators_nb.core.config import import_models
from speculators_nb.lab.experiment import settings
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.plan.disk import feature_bytes
from speculators_nb.plan.requirements import GB, Machine, answering, requirements, requirements_text, serving
from speculators_nb.plan.sizes import cache_bytes, empty_drafter, forward_flops, verifier_sizes
from speculators_nb.plan.step_memory import predicted_step
from speculators_nb.serve.vllm_methods import ENGINES, method_of_types
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.identity import VerifierInfo

RESULTS = Path(__file__).parent / "results"
RECIPES = Path(__file__).parents[2] / "data/recipes"
HEADS = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
QWEN3_8B = HEADS | dict(intermediate_size=12288, num_hidden_layers=36, vocab_size=151936)
LLAMA_8B = HEADS | dict(intermediate_size=14336, num_hidden_layers=32, vocab_size=128256)
DRAFT_VOCAB = 32000
WHOLE = ("dflash2", "lilicorr")  # its selector knows every token
LAYERS = dict(peagle=4, dflash=5, dflash2=5, domino=5, dspark=5, lilicorr=5, xpress=5)  # else 1
FOR_GEMMA = {"query_only"}  # served for another family than the table's
SHARED = ("embed_tokens", "lm_head", "verifier_lm_head")  # where frozen: the verifier's, or rows of it
VERSIONS = ("0.32", "0.33")  # of vLLM
CONVERSATIONS = (5_000, 50_000, 500_000)
TOKENS, ROW = 1024, 8192  # of a conversation, of a packed row
AT_ONCE = 128  # answers that a server writes
# hours of devices that published runs of 5,000 conversations and 5 epochs took, as the examples of speculators say
# (docs/published.yml): extraction 143 s and training 327 s on 2 H100; both together 16 min on 4 H100
PUBLISHED = {"Llama-3.1-8B": 2 * (143 + 327) / 3600, "Qwen3-8B": 4 * 16 / 60}
ONLINE = {"Qwen3-8B"}  # its features may have been made again in every epoch


def drafter_sizes(kind, verifier):
    "A row of the table of drafters."
    config = AutoConfig.from_pretrained(verifier)
    layers = LAYERS.get(kind, 1)
    family = "qwen3" if layers == 5 else None  # llama, and heads have none
    drafter = SpeculatorModel.registered_class(kind)
    given = drafter.arguments_to_draft(4) | dict(mask_token_id=config.vocab_size - 1)
    if not (drafter.whole_vocabulary or drafter.fixed_layers or kind in WHOLE):
        given |= dict(draft_vocab_size=DRAFT_VOCAB)
    model = empty_drafter(kind, VerifierInfo.of(verifier), family, layers, **given)
    named = list(model.named_parameters())
    of_verifier = (*SHARED, *model.not_saved)
    own = sum(p.numel() for name, p in named if p.requires_grad or not name.startswith(of_verifier))
    reduced = getattr(model.config, "draft_vocab_size", config.vocab_size) < config.vocab_size
    head = DRAFT_VOCAB * config.hidden_size if reduced else 0
    # which states it reads, and whether it grows trees: the same at every size
    small = new_drafter(kind, shipped_data() / "tiny-verifier", **settings(kind)).drafter()
    last = AutoConfig.from_pretrained(shipped_data() / "tiny-verifier").num_hidden_layers
    states = len({*small.aux_layer_ids, last})
    method = method_of_types().get(kind, ("", None))[0]
    rows = {version: ENGINES[version] for version in VERSIONS}
    unserved = {v: kind in row.unserved or kind in FOR_GEMMA for v, row in rows.items()}
    served = {v: "" if unserved[v] or method not in row.served else method for v, row in rows.items()}
    return dict(
        drafter=kind,
        layers=getattr(model.config, "num_draft_layers", layers),
        trained_millions=round(sum(p.numel() for _, p in named if p.requires_grad) / 1e6),
        served_gb=round(2 * (own + head) / 1e9, 2),
        feature_kib=feature_bytes(config.hidden_size, states) // 1024,
        trees=hasattr(small, "grow"),
        **{f"vllm_{version}": word for version, word in served.items()},
    )


def run_sizes(name, config, step, conversations, epochs=3, devices=2):
    "A row of the table of runs: features in two dtypes, steps and hours of devices."
    tokens, machine, sizes = conversations * TOKENS, Machine(), verifier_sizes(config)
    info = VerifierInfo(name, config)
    answers = answering(info, machine, serving(info, machine, TOKENS)[0], TOKENS, AT_ONCE)
    on_disk = [tokens * feature_bytes(sizes.hidden, dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    return dict(
        verifier=name,
        conversations=conversations,
        tokens_millions=round(tokens / 1e6, 1),
        disk_bf16_gb=round(on_disk[0] / 1e9),
        disk_fp8_gb=round(on_disk[1] / 1e9),
        epochs=epochs,
        devices=devices,
        mfu=machine.mfu,
        at_once=answers.at_once,
        answers_device_hours=round(tokens / answers.rate / 3600, 2),
        extraction_device_hours=round(hours(machine, tokens * forward_flops(sizes, TOKENS)), 2),
        steps=-(-tokens * epochs // (ROW * devices)),
        training_device_hours=round(machine.training_seconds(tokens * epochs * step.flops / ROW) / 3600, 2),
    )


def published_ratio(name, run, epochs=5):
    "How many times as long a published run took as `run` of a table; online, features are made once or in every epoch."
    extraction, training = run["extraction_device_hours"], run["training_device_hours"] / run["epochs"] * epochs
    scale = 5_000 / run["conversations"]
    once, each = (PUBLISHED[name] / (scale * (n * extraction + training)) for n in (1, epochs if name in ONLINE else 1))
    return dict(verifier=name, device_hours=round(PUBLISHED[name], 2), low=round(each, 1), high=round(once, 1))


def hours(machine, flops):
    "Hours of one device."
    return machine.seconds(flops, 1) / 3600


def tables():
    "The two tables."
    import_models()
    with tempfile.TemporaryDirectory() as verifier:
        Qwen3Config(**QWEN3_8B, architectures=["Qwen3ForCausalLM"]).save_pretrained(verifier)
        drafters = [drafter_sizes(kind, verifier) for kind in sorted(SpeculatorModel.registered_classes())]
    configs = {"Llama-3.1-8B": LlamaConfig(**LLAMA_8B), "Qwen3-8B": Qwen3Config(**QWEN3_8B, tie_word_embeddings=False)}
    runs = []
    for name, config in configs.items():
        layer, layers = draft_layer_config(config), config.num_hidden_layers
        step = predicted_step("eagle3", layer, DRAFT_VOCAB, layers, ROW, TOKENS, bf16=True)
        runs += [run_sizes(name, config, step, n) for n in CONVERSATIONS]
    longest = {run["verifier"]: run for run in runs}  # whose hours are rounded least
    verifiers = [
        dict(
            verifier=name,
            weights_gb=round(2 * size.weights / 1e9, 1),
            cache_kib=int(cache_bytes(size) // 1024),
            draft_cache_kib=int(cache_bytes(size._replace(caches=size.caches[:1])) // 1024),
        )
        for name, size in ((name, verifier_sizes(config)) for name, config in configs.items())
    ]
    published = [published_ratio(name, run) for name, run in longest.items()]
    return {"drafters": drafters, "runs": runs, "verifiers": verifiers, "published": published}


def plan_of_recipe(name="qwen3-8b", devices=8, memory=80, disk=2000):
    "What `speculators-nb plan` prints for a shipped recipe on H100s."
    with tempfile.TemporaryDirectory() as verifier:
        Qwen3Config(**QWEN3_8B, tie_word_embeddings=False).save_pretrained(verifier)
        stages = stages_of(RECIPES / f"{name}.yaml")[0]
        sections = {stage.name: stage.values for stage in stages}
        found = requirements(sections, verifier, machine=Machine(devices, memory * GB), disk=disk * GB)
    return requirements_text(found)


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    text = plan_of_recipe()
    (RESULTS / "qwen3-8b.txt").write_text(text + "\n")
    print(text)
    for name, rows in tables().items():
        pd.DataFrame(rows).to_csv(RESULTS / f"{name}.csv", index=False)
        print(pd.DataFrame(rows).to_string(index=False))
