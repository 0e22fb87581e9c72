"""One side of the measurement, in a process of its own: loads a prepared case, then makes a train step whenever it is
told to.

    python worker.py prepare CASE_JSON FOLDER          write a case's weights, batch and configuration (torch only)
    python worker.py rates V                           print what this machine's one thread can do; V: rows of the head
    python worker.py SIDE FOLDER                       make steps: a line in, a line of JSON out
    python worker.py profile FOLDER [SIDE]             where the time of a step goes, by operator

Sides: upstream, ours, ours-bf16 (products of the drafter with its head in bfloat16), ours-recomputed (gradient
checkpointing of the draft layers).

The file imports neither library before it knows which side it is, so both interpreters can run it.
"""

import ctypes
import gc
import json
import os
import re
import sys
import tempfile
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, AUX, VOCAB, WINDOW = 256, 4, 2, 64, 704, 3, 32000, 2048
SHAPE = dict(
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate=INTERMEDIATE,
    vocab=VOCAB,
    window=WINDOW,
)
SEED = 7

# What each algorithm trains with here: upstream's command-line defaults, but that the loss is the eager one. `config`
# and `layer` override entries of config.json and of its transformer_layer_config, `ours` adds to our forward arguments;
# `tokens` are drafted at a time.
ALGORITHMS = {
    "eagle3": dict(
        prefix="Eagle3",
        layers=1,
        tokens=3,
        training=dict(ttt_steps=3, ttt_step_loss_decay=1.0, loss_fn="kl_div"),
        config=dict(
            fc_norm=False, norm_before_fc=True, norm_before_residual=True, norm_output=True, embed_requires_grad=False
        ),
        layer=dict(model_type="llama", mlp_bias=False),
    ),
    "peagle": dict(
        prefix="PEagle",
        layers=1,
        tokens=8,
        training=dict(
            num_depths=8, down_sample_ratio=0.7, down_sample_ratio_min=0.2, max_anchors=512, loss_fn="kl_div"
        ),
        config=dict(
            fc_norm=False, norm_before_fc=False, norm_before_residual=True, norm_output=False, embed_requires_grad=True
        ),
    ),
    "dflash": dict(
        prefix="DFlash",
        layers=5,
        tokens=15,
        training=dict(loss_fn="ce", per_position_loss_weight="dpace", dpace_alpha=0.5),
        config=dict(block_size=16, sample_from_anchor=False, sliding_window_non_causal=False),
    ),
    "dspark": dict(
        prefix="DSpark",
        layers=5,
        tokens=8,
        training=dict(
            loss_fn="kl_div",
            per_position_loss_weight="fixed-exp-decay",
            dflash_decay_gamma=4.0,
            confidence_head_alpha=1.0,
        ),
        config=dict(
            block_size=8,
            sample_from_anchor=True,
            sliding_window_non_causal=False,
            markov_rank=256,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
    ),
    "mtp": dict(
        prefix="MTP",
        layers=1,
        tokens=3,
        training=dict(num_speculative_steps=3, step_weight_beta=0.6),
        ours=dict(cross_document_targets=True),  # upstream leaves out the row's last rows
        config=dict(num_nextn_predict_layers=1),
        layer=dict(
            num_hidden_layers=4, layer_types=["full_attention"] * 4, use_sliding_window=False, sliding_window=None
        ),
    ),
}


# ------------------------------------------------------------------------------------------------------------- the case
def shape(case):
    """Sizes of verifier and draft layers, those above or the case's. `window` None: layers see their whole document."""
    return SimpleNamespace(**SHAPE | case.get("shape", {}))


def configuration(case):
    """config.json as a checkpoint holds it."""
    name, size = case["algorithm"], shape(case)
    of = ALGORITHMS[name]
    layers = case.get("layers", of["layers"])
    aux = {"mtp": {}, "eagle3": dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3])}
    aux["peagle"] = aux["eagle3"]
    vocabulary = {} if name == "mtp" else dict(draft_vocab_size=case["draft_vocab"], target_hidden_size=None)
    mask = dict(mask_token_id=size.vocab - 1) if name in ("peagle", "dflash", "dspark") else {}
    sliding = dict(layer_types=["sliding_attention"] * layers, sliding_window=size.window, use_sliding_window=True)
    full = dict(layer_types=["full_attention"] * layers, sliding_window=None, use_sliding_window=False)
    return (
        vocabulary
        | aux.get(name, dict(aux_hidden_state_layer_ids=[1, 2, 3]))
        | mask
        | of["config"]
        | {
            "architectures": [of["prefix"] + "DraftModel"],
            "speculators_model_type": name,
            "speculators_version": "0.9.0",
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": name,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "accept_tolerance": 0.0,
                        "proposal_type": "greedy",
                        "speculative_tokens": of["tokens"],
                        "verifier_accept_k": 1,
                    }
                ],
                "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None},
            },
            "transformer_layer_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "head_dim": size.head_dim,
                "hidden_act": "silu",
                "hidden_size": size.hidden,
                "intermediate_size": size.intermediate,
                "max_position_embeddings": 32768,
                "model_type": "qwen3",
                "num_attention_heads": size.heads,
                "num_hidden_layers": layers,
                "num_key_value_heads": size.kv_heads,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
                "tie_word_embeddings": False,
                "vocab_size": size.vocab,
            }
            | (sliding if size.window else full)
            | of.get("layer", {}),
        }
    )


def weights(case, config, g):
    """Random weights under their checkpoint names, on the device of the generator."""
    name, draft, layer, size = case["algorithm"], case["draft_vocab"], config["transformer_layer_config"], shape(case)
    hidden, dim = size.hidden, size.head_dim

    def w(*shape, std=None):
        return torch.randn(*shape, generator=g, device=g.device) * (shape[-1] ** -0.5 if std is None else std)

    def gain(n):
        return 1 + 0.1 * torch.randn(n, generator=g, device=g.device)

    def decoder(prefix, wide=hidden):
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qk_norms = {f"{attn}.{n}_norm.weight": gain(dim) for n in "qk"} if layer["model_type"] == "qwen3" else {}
        return qk_norms | {
            f"{prefix}.input_layernorm.weight": gain(hidden),
            f"{prefix}.post_attention_layernorm.weight": gain(hidden),
            f"{attn}.q_proj.weight": w(size.heads * dim, wide),
            f"{attn}.k_proj.weight": w(size.kv_heads * dim, wide),
            f"{attn}.v_proj.weight": w(size.kv_heads * dim, wide),
            f"{attn}.o_proj.weight": w(hidden, size.heads * dim),
            f"{mlp}.gate_proj.weight": w(size.intermediate, hidden),
            f"{mlp}.up_proj.weight": w(size.intermediate, hidden),
            f"{mlp}.down_proj.weight": w(hidden, size.intermediate),
        }

    head = w(draft, hidden, std=0.15)
    state = {"embed_tokens.weight": w(size.vocab, hidden, std=0.3), "lm_head.weight": head}
    if name == "mtp":
        prefix = "mtp_layers.0"
        return (
            state
            | decoder(prefix)
            | {f"{prefix}.input_proj.weight": w(hidden, 2 * hidden)}
            | {f"{prefix}.{n}_layernorm.weight": gain(hidden) for n in ("hidden", "token", "final")}
        )
    state |= {
        "verifier_lm_head.weight": head.clone(),
        "verifier_norm.weight": gain(hidden),
        "norm.weight": gain(hidden),
        "fc.weight": w(hidden, AUX * hidden),
    }
    if name in ("eagle3", "peagle"):
        state |= decoder("layers.0", 2 * hidden) | {"layers.0.hidden_norm.weight": gain(hidden)}
        state |= {"input_norm.weight": gain(AUX * hidden)} if config["norm_before_fc"] else {}
        state |= {"mask_hidden": w(1, 1, AUX * hidden, std=1.0)} if name == "peagle" else {}
    else:
        state |= {"hidden_norm.weight": gain(hidden)}
        for i in range(layer["num_hidden_layers"]):
            state |= decoder(f"layers.{i}")
    if name == "dspark":
        rank = config["markov_rank"]
        state |= {
            "markov_head.markov_w1.weight": w(size.vocab, rank, std=0.1),
            "markov_head.markov_w2.weight": w(draft, rank, std=0.1),
            "confidence_head.proj.weight": w(1, hidden + rank),
            "confidence_head.proj.bias": w(1, std=0.1),
        }
    if draft < size.vocab:
        ids = torch.randperm(size.vocab, generator=g, device=g.device)[:draft].sort().values
        known = torch.zeros(size.vocab, dtype=torch.bool, device=g.device)
        state |= {"t2d": known.index_fill_(0, ids, True), "d2t": ids - torch.arange(draft, device=g.device)}
    return state


def anchors(loss_mask, count, block, g):
    """DFlash: `count` positions of the loss mask, not among the last `block` of the row, ascending; and which of them
    are real."""
    valid, on = loss_mask[:-block].nonzero().flatten(), dict(device=g.device)
    chosen = valid[torch.randperm(len(valid), generator=g, **on)[:count]].sort().values
    filler = torch.zeros(count - len(chosen), dtype=torch.int64, **on)
    return {"anchor_positions": torch.cat([chosen, filler]), "anchor_valid": torch.arange(count, **on) < len(chosen)}


def rollouts(loss_mask, training, g):
    """P-EAGLE: every position at depth 0, then nested chains within the loss mask, thinned out by `down_sample_ratio` a
    depth."""
    length, valid, on = len(loss_mask), loss_mask.nonzero().flatten(), dict(device=g.device)
    pool = seeds = valid[torch.randperm(len(valid), generator=g, **on)[: training["max_anchors"]]].sort().values
    anchor, depth = [torch.arange(length, **on)], [torch.zeros(length, dtype=torch.int64, **on)]
    for d in range(1, training["num_depths"]):
        count = int((len(seeds) - d) * max(training["down_sample_ratio"] ** d, training["down_sample_ratio_min"]))
        pool = pool[torch.randperm(len(pool), generator=g, **on)[:count]].sort().values
        anchor, depth = [*anchor, pool - d], [*depth, torch.full_like(pool, d)]
        pool = pool[pool + 1 < length] + 1
        pool = pool[loss_mask[pool]]
    return {"cod_anchor_pos": torch.cat(anchor), "cod_depth": torch.cat(depth)}


def packed_batch(case, config, g):
    """A packed batch as training hands it over, with all random choices made, on the device of the generator."""
    name, docs, size, on = case["algorithm"], case["documents"], shape(case), dict(device=g.device)
    length, training = sum(docs), training_of(case)
    first = 0 if name in ("mtp", "dflash", "dspark") else 1  # these rows are not shifted
    wide = size.hidden if name == "mtp" else AUX * size.hidden
    batch = {
        "input_ids": torch.randint(size.vocab, (1, length), generator=g, **on),
        "hidden_states": torch.randn(1, length, wide, generator=g, **on),
        "loss_mask": torch.cat([torch.arange(n, **on) >= int(n * case["prompt"]) for n in docs])[None],
        "position_ids": torch.cat([torch.arange(first, n + first, **on) for n in docs])[None],
        "document_ids": torch.cat([torch.full((n,), i, **on) for i, n in enumerate(docs)])[None],
    }
    if name != "mtp":
        batch["verifier_last_hidden_states"] = torch.randn(1, length, size.hidden, generator=g, **on)
    if name == "peagle":
        batch |= rollouts(batch["loss_mask"][0], training, g)
    if "anchors" in case:
        batch |= anchors(batch["loss_mask"][0], case["anchors"], config["block_size"], g)
    return batch


def prepare(case, folder):
    """Random weights, a packed batch and the configuration as files."""
    g = torch.Generator().manual_seed(SEED)
    config = configuration(case)
    state = weights(case, config, g)
    batch = packed_batch(case, config, g)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    save_file(batch, folder / "batch.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "case.json").write_text(json.dumps(case))


# ------------------------------------------------------------------------------------------------------------ the sides
CHOICES = {
    "anchor_positions": "anchors",
    "anchor_valid": "anchors",
    "cod_anchor_pos": "rollouts",
    "cod_depth": "rollouts",
}


def training_of(case):
    anchors = {"max_anchors": case["anchors"]} if "anchors" in case else {}
    return ALGORITHMS[case["algorithm"]]["training"] | anchors | case.get("training", {})


def compile_around_fused_losses():
    """torch 2.11 cannot trace upstream's fused losses (an autotuned kernel inside a compiled forward raises "already
    tracked for mutation"): they stay fused, outside of the compiled graphs."""
    fused = import_module("speculators.losses.fused")
    for name in [n for n in vars(fused) if n.startswith("fused_")]:
        setattr(fused, name, torch.compiler.disable(getattr(fused, name)))


def take_choices(batch):
    """The random choices of a batch, taken out of it."""
    return {k: batch.pop(k) for k in CHOICES if k in batch}


def give_choices(given):
    """Upstream's functions that draw return what the dict `given` holds when they are called."""
    if "cod_depth" in given:
        peagle = import_module("speculators.models.peagle.core")
        peagle.generate_cod_sample_indices = lambda *_, **__: (given["cod_anchor_pos"], given["cod_depth"])
    if "anchor_valid" in given:
        dflash = import_module("speculators.models.dflash.core")
        dflash.select_anchors = lambda *_: (given["anchor_positions"], given["anchor_valid"])


def load_upstream(folder, case, batch, attention="sdpa", losses="eager"):
    """Upstream's model, its forward arguments and its batch; random choices replace the functions that make them.
    Its own defaults, flex attention (None) and fused losses, have no backward on a CPU."""
    name, prefix = case["algorithm"], ALGORITHMS[case["algorithm"]]["prefix"]
    core = import_module(f"speculators.models.{name}.core")
    model_class = getattr(core, prefix + "DraftModel")
    config = model_class.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = attention
    model = model_class(config=config)
    if name == "mtp":
        del model.verifier_lm_head  # as loading a verifier does there
    if losses == "fused":
        compile_around_fused_losses()
    call, _ = model_class.get_trainer_kwargs(**training_of(case), loss_implementation=losses)
    give_choices(take_choices(batch))
    return model, call, batch


def load_ours(folder, case, batch):
    from speculators_nb.core.config import SpeculatorModelConfig
    from speculators_nb.models.base import SpeculatorModel

    config = SpeculatorModelConfig.from_pretrained(folder)
    model_class = SpeculatorModel.registered_model_class_from_config(config)
    call, _ = model_class.get_trainer_kwargs(**training_of(case))
    return model_class(config).train(), call | ALGORITHMS[case["algorithm"]].get("ours", {}), batch


def load_ours_bf16(folder, case, batch):
    model, call, batch = load_ours(folder, case, batch)
    return model, call | dict(gemm_dtype=torch.bfloat16), batch


def load_ours_recomputed(folder, case, batch):
    model, call, batch = load_ours(folder, case, batch)
    model.gradient_checkpointing_enable()
    return model, call, batch


SIDES = {
    "upstream": load_upstream,
    "ours": load_ours,
    "ours-bf16": load_ours_bf16,
    "ours-recomputed": load_ours_recomputed,
}


def torch_adamw(model, **options):
    """AdamW and clipping as upstream's trainer makes them."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, **options), torch.nn.utils.clip_grad_norm_


def own_adamw(model):
    """AdamW and clipping as our trainer makes them: fused, with the gradients of an embedding by rows. All weights
    decay, as upstream's do."""
    from speculators_nb.train.optimizers import MuonAdamW, clip_gradients, use_row_gradients

    tables = use_row_gradients(model)
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not table for table in tables)]
    groups = [dict(params=tables, kind="rows")] * bool(tables) + [dict(params=rest, kind="adamw")]
    return MuonAdamW(groups, lr=1e-4, weight_decay=0.01), clip_gradients


def stepper(model, call, batch, optimizer, clip, run=None, autocast=None):
    """A function that makes one train step: forward (by `run`, if it is not the model itself), backward, clip,
    AdamW."""
    params = [p for p in model.parameters() if p.requires_grad]
    forward = model if run is None else run

    def step():
        optimizer.zero_grad()
        with torch.autocast(params[0].device.type, dtype=autocast) if autocast else nullcontext():
            _, loss, _ = forward(**batch, **call)
        loss.backward()
        norm = clip(params, 1.0)
        optimizer.step()
        return dict(loss=loss.detach(), grad_norm=norm)

    return step


def numbers(result):
    """What a step returned, when the device is done with it."""
    return {name: value.item() for name, value in result.items()}


def trainer(side, folder):
    """The step of a prepared case."""
    model, call, batch = SIDES[side](
        folder, json.loads((folder / "case.json").read_text()), load_file(folder / "batch.safetensors")
    )
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return stepper(model, call, batch, *(torch_adamw if side == "upstream" else own_adamw)(model))


# ----------------------------------------------------------------------------------------------------------- the memory
def resident():
    """(resident set now, its highest value since the last reset), MiB."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(key + r":\s+(\d+)", status)[1]) / 1024 for key in ("VmRSS", "VmHWM"))


def settle():
    """Give freed pages back to the system, let the kernel forget the high-water mark so far; returns the resident set,
    MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()[0]


def allocated_peak(step):
    """Most bytes of tensors that a step holds at once beyond those it starts with, MiB, from the profiler's record of
    the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        prof.export_chrome_trace(f.name)
        events = [e for e in json.loads(Path(f.name).read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = [e["args"]["Total Allocated"] for e in sorted(events, key=lambda e: e["ts"])]
    first = min(events, key=lambda e: e["ts"])["args"]
    return (max(held) - (first["Total Allocated"] - first["Bytes"])) / 2**20


# ------------------------------------------------------------------------------------------------------------ the rates
def best(f, seconds=0.4):
    """Least CPU time of one call."""
    f()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        t = time.process_time()
        f()
        times.append(time.process_time() - t)
    return min(times)


def product_rate(a, b):
    """FLOP/s of a @ b, [M, K] and [K, N]."""
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    return 2 * len(a) * b.numel() / best(lambda: torch.mm(a, b, out=out))


def rates(draft_vocab):
    """What one thread reaches on the shapes of the step, in FLOP/s: products with a head of that many rows (the faster
    of logits and their way back), and a layer's products; exponentials per second; bytes copied per second."""
    torch.manual_seed(0)
    out = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        head, rows = torch.randn(draft_vocab, HIDDEN).to(dtype), torch.randn(512, HIDDEN).to(dtype)
        logits = torch.empty(512, draft_vocab, dtype=dtype)
        out[f"head_{name}_{draft_vocab}"] = max(product_rate(rows, head.T), product_rate(logits.normal_(), head))
    up, down = torch.randn(INTERMEDIATE, HIDDEN), torch.randn(HIDDEN, INTERMEDIATE)
    x, inner = torch.randn(2048, HIDDEN), torch.randn(2048, INTERMEDIATE)
    out["layer_fp32"] = max(product_rate(x, up.T), product_rate(inner, down.T), product_rate(inner.T, x))
    x = torch.randn(1 << 15)  # in the first cache levels
    y = torch.empty_like(x)
    out["exp"] = x.numel() / best(lambda: torch.exp(x, out=y), 0.3)
    x = torch.randn(1 << 26)  # far beyond the last one
    y = torch.empty_like(x)
    out["copy"] = 2 * 4 * x.numel() / best(lambda: y.copy_(x))
    return out


# -------------------------------------------------------------------------------------------------------------- running
def versions(side):
    import transformers

    got = dict(
        python=".".join(map(str, sys.version_info[:3])), torch=torch.__version__, transformers=transformers.__version__
    )
    from importlib.metadata import version

    return got | (
        {"speculators": version("speculators")} if side == "upstream" else {"speculators_nb": version("speculators_nb")}
    )


def serve(side, folder):
    """Make one step untimed, then answer each line on stdin with one step; "allocated" asks for the allocator's peak
    instead. Everything else that is printed goes to stderr."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields):
        print(json.dumps(fields), file=reply, flush=True)

    step = trainer(side, folder)
    first = numbers(step())
    base = settle()
    answer(versions=versions(side), base=base, **first)
    for line in sys.stdin:
        if line.strip() == "allocated":
            answer(allocated=allocated_peak(step))
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        result = numbers(step())
        answer(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, peak=resident()[1] - base, **result)


def profile(folder, side="ours"):
    step = trainer(side, folder)
    step()
    base = settle()
    step()
    print(f"peak over the model: resident {resident()[1] - base:.0f} MiB, allocated {allocated_peak(step):.0f} MiB")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as prof:
        step()
    print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))
    rows = sorted(prof.key_averages(group_by_input_shape=True), key=lambda e: -e.self_cpu_time_total)[:25]
    total = sum(e.self_cpu_time_total for e in prof.key_averages())
    for e in rows:
        print(
            f"{100 * e.self_cpu_time_total / total:5.1f} % {e.count:5d} {e.key:40s} {[s for s in e.input_shapes if s]}"
        )


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mode = sys.argv[1]
    if mode == "prepare":
        prepare(json.loads(sys.argv[2]), Path(sys.argv[3]))
    elif mode == "rates":
        print(json.dumps(rates(int(sys.argv[2]))))
    elif mode == "profile":
        profile(Path(sys.argv[2]), *sys.argv[3:])
    else:
        serve(mode, Path(sys.argv[2]))
