"""One side of the measurement, in a process of its own: loads a prepared case, then makes a train step whenever it is told to.

    python worker.py prepare CASE_JSON FOLDER          write a case's weights, batch and configuration (torch only)
    python worker.py rates                             print what this machine's one thread can do
    python worker.py upstream|ours|ours-bf16 FOLDER    make steps: a line in, a line of JSON out
    python worker.py profile FOLDER [ours|ours-bf16|upstream]   where the time of a step goes, by operator

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
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, AUX = 256, 4, 2, 64, 704, 3
SEED = 7


# ---------------------------------------------------------------------------------------------------------------- the case
def prepare(case, folder):
    """Random weights under their checkpoint names, a packed batch after the shift, and the configuration as a checkpoint holds it."""
    g = torch.Generator().manual_seed(SEED)
    vocab, draft, docs = case["vocab"], case["draft_vocab"], case["documents"]
    length, wide = sum(docs), 2 * HIDDEN

    def w(*shape, std=None):
        return torch.randn(*shape, generator=g) * (shape[-1] ** -0.5 if std is None else std)

    def gain(n):
        return 1 + 0.1 * torch.randn(n, generator=g)

    head = w(draft, HIDDEN, std=0.15)
    attn, mlp = "layers.0.self_attn", "layers.0.mlp"
    state = {
        "embed_tokens.weight": w(vocab, HIDDEN, std=0.3), "lm_head.weight": head, "verifier_lm_head.weight": head.clone(),
        "fc.weight": w(HIDDEN, AUX * HIDDEN), "input_norm.weight": gain(AUX * HIDDEN), "norm.weight": gain(HIDDEN),
        "verifier_norm.weight": gain(HIDDEN), "layers.0.input_layernorm.weight": gain(HIDDEN),
        "layers.0.hidden_norm.weight": gain(HIDDEN), "layers.0.post_attention_layernorm.weight": gain(HIDDEN),
        f"{attn}.q_proj.weight": w(HEADS * HEAD_DIM, wide), f"{attn}.k_proj.weight": w(KV_HEADS * HEAD_DIM, wide),
        f"{attn}.v_proj.weight": w(KV_HEADS * HEAD_DIM, wide), f"{attn}.o_proj.weight": w(HIDDEN, HEADS * HEAD_DIM),
        f"{mlp}.gate_proj.weight": w(INTERMEDIATE, HIDDEN), f"{mlp}.up_proj.weight": w(INTERMEDIATE, HIDDEN),
        f"{mlp}.down_proj.weight": w(HIDDEN, INTERMEDIATE),
    }
    if draft < vocab:
        ids = torch.randperm(vocab, generator=g)[:draft].sort().values
        state |= {"t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True), "d2t": ids - torch.arange(draft)}
    batch = {
        "input_ids": torch.randint(vocab, (1, length), generator=g), "hidden_states": w(1, length, AUX * HIDDEN, std=1.0),
        "verifier_last_hidden_states": w(1, length, HIDDEN, std=1.0),
        "loss_mask": torch.cat([torch.arange(n) >= n // 2 for n in docs])[None],
        "position_ids": torch.cat([torch.arange(1, n + 1) for n in docs])[None],
        "document_ids": torch.cat([torch.full((n,), i) for i, n in enumerate(docs)])[None],
    }
    config = {
        "architectures": ["Eagle3DraftModel"], "draft_vocab_size": draft, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False, "fc_norm": False, "norm_before_fc": True, "norm_before_residual": True, "norm_output": True,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None}},
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False, "attention_dropout": 0.0, "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE, "layer_types": ["sliding_attention"], "max_position_embeddings": 32768,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": HEADS, "num_hidden_layers": 1,
            "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": 2048, "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": vocab},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    save_file(batch, folder / "batch.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# --------------------------------------------------------------------------------------------------------------- the sides
TRAINING = dict(ttt_steps=3, ttt_step_loss_decay=1.0, loss_fn="kl_div")


def load_upstream(folder):
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"            # its default, flex attention, has no backward on CPU
    model = Eagle3DraftModel(config=config)
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**TRAINING, loss_implementation="eager")   # the fused loss needs Triton
    return model, call


def load_ours(folder):
    from speculators_nb.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    model = Eagle3DraftModel(Eagle3SpeculatorConfig.from_pretrained(folder))
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**TRAINING)
    return model, call


def load_ours_bf16(folder):
    model, call = load_ours(folder)
    return model, call | dict(gemm_dtype=torch.bfloat16)


SIDES = {"upstream": load_upstream, "ours": load_ours, "ours-bf16": load_ours_bf16}


def trainer(side, folder):
    """A function that makes one train step: forward, backward, clip, AdamW."""
    model, call = SIDES[side](folder)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    batch = load_file(folder / "batch.safetensors")
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01)

    def step():
        optimizer.zero_grad()
        _, loss, _ = model(**batch, **call)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return dict(loss=loss.item(), grad_norm=norm.item())
    return step


# -------------------------------------------------------------------------------------------------------------- the memory
def resident():
    """(resident set now, its highest value since the last reset), MiB."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(key + r":\s+(\d+)", status)[1]) / 1024 for key in ("VmRSS", "VmHWM"))


def settle():
    """Give freed pages back to the system, let the kernel forget the high-water mark so far; returns the resident set, MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()[0]


def allocated_peak(step):
    """Most bytes of tensors that a step holds at once beyond those it starts with, MiB, from the profiler's record of the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        prof.export_chrome_trace(f.name)
        events = [e for e in json.loads(Path(f.name).read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = [e["args"]["Total Allocated"] for e in sorted(events, key=lambda e: e["ts"])]
    first = min(events, key=lambda e: e["ts"])["args"]
    return (max(held) - (first["Total Allocated"] - first["Bytes"])) / 2**20


# --------------------------------------------------------------------------------------------------------------- the rates
def best(f, seconds=0.4):
    """Least CPU time of one call."""
    f()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        t = time.process_time()
        f()
        times.append(time.process_time() - t)
    return min(times)


def rates():
    """What one thread reaches on the shapes of the step: GEMM in FLOP/s, exponentials per second, bytes copied per second."""
    torch.manual_seed(0)
    out = {}
    for name, dtype in (("gemm_fp32", torch.float32), ("gemm_bf16", torch.bfloat16)):
        for rows, cols in ((1024, 8000), (128, 32000), (2048, 704)):
            a, b = torch.randn(rows, HIDDEN).to(dtype), torch.randn(cols, HIDDEN).to(dtype)
            c = torch.empty(rows, cols, dtype=dtype)
            rate = 2 * rows * cols * HIDDEN / best(lambda: torch.mm(a, b.t(), out=c))
            out[name] = max(out.get(name, 0.0), rate)
    x = torch.randn(1 << 15)                                                 # in the first cache levels
    y = torch.empty_like(x)
    out["exp"] = x.numel() / best(lambda: torch.exp(x, out=y), 0.3)
    x = torch.randn(1 << 26)                                                 # far beyond the last one
    y = torch.empty_like(x)
    out["copy"] = 2 * 4 * x.numel() / best(lambda: y.copy_(x))
    return out


# ------------------------------------------------------------------------------------------------------------------ running
def versions(side):
    import transformers
    got = dict(python=".".join(map(str, sys.version_info[:3])), torch=torch.__version__, transformers=transformers.__version__)
    from importlib.metadata import version
    return got | ({"speculators": version("speculators")} if side == "upstream" else {"speculators_nb": version("speculators_nb")})


def serve(side, folder):
    """Make one step untimed, then answer each line on stdin with one step; "allocated" asks for the allocator's peak instead.
    Everything else that is printed goes to stderr."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields):
        print(json.dumps(fields), file=reply, flush=True)
    step = trainer(side, folder)
    first = step()
    base = settle()
    answer(versions=versions(side), base=base, **first)
    for line in sys.stdin:
        if line.strip() == "allocated":
            answer(allocated=allocated_peak(step))
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        result = step()
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
        print(f"{100 * e.self_cpu_time_total / total:5.1f} % {e.count:5d} {e.key:40s} {[s for s in e.input_shapes if s]}")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mode = sys.argv[1]
    if mode == "prepare":
        prepare(json.loads(sys.argv[2]), Path(sys.argv[3]))
    elif mode == "rates":
        print(json.dumps(rates()))
    elif mode == "profile":
        profile(Path(sys.argv[2]), *sys.argv[3:])
    else:
        serve(mode, Path(sys.argv[2]))
