"""Write the checkpoints that every later version must be able to read: `python tests/compat/make.py`, once for each
release, before anything changes.

One folder below tests/fixtures/compat, named after the version: a tiny verifier, its features, and for each drafter the
checkpoint in the middle of a run of four steps, the drafter at its end, and the losses of the way. tests/test_compat.py
loads the drafters and resumes the runs."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import speculators_nb
from speculators_nb.data.chat_encoding import to_dataset
from speculators_nb.features.in_process import extract_features
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.verifier.tapped_model import Verifier

FOLDER = Path(__file__).parents[1] / "fixtures/compat" / speculators_nb.__version__
VOCAB = 64
COMMON = dict(
    total_seq_len=32,
    learning_rate=1e-2,
    logging_steps=1,
    max_steps=4,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=3,
    eval_share=0.0,
    disable_tqdm=True,
    seed=3,
)
RUNS = {  # name -> algorithm, arguments of train_drafter
    "eagle": ("eagle", dict(speculative_tokens=3)),
    "hass": ("eagle", dict(speculative_tokens=3, forward_num_total=2)),
    "eagle3": ("eagle3", dict(ttt_steps=2, draft_vocab_size=40)),
    "peagle": ("peagle", dict(num_depths=3, draft_vocab_size=40, mask_token_id=63)),
    "dflash": ("dflash", dict(draft_arch="qwen3", block_size=4, max_anchors=4, mask_token_id=63)),
    "dspark": ("dspark", dict(draft_arch="qwen3", block_size=3, max_anchors=4, markov_rank=4, mask_token_id=63)),
    "dflash2": ("dflash2", dict(draft_arch="qwen3", block_size=4, max_anchors=4, selector_rank=4, mask_token_id=63)),
    "domino": ("domino", dict(draft_arch="qwen3", block_size=4, max_anchors=4, emb_dim=4, mask_token_id=63)),
    "xpress": ("xpress", dict(draft_arch="qwen3", block_size=4, max_anchors=4, xpress_rank=4, mask_token_id=63)),
    "mtp": ("mtp", dict(num_speculative_steps=2, fresh_head=True)),
    "mlp": ("mlp", dict(num_heads=2)),
    "medusa": ("medusa", dict(num_heads=2)),
    "eagle3-muon": ("eagle3", dict(ttt_steps=2, optimizer="muon", gradient_accumulation_steps=2, bf16=True)),
}


def make_verifier(folder):
    "Four layers, 64 tokens."
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    ).save_pretrained(folder)


def make_rows(n=8):
    "Random tokens; the first third of each row is not trained."
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(9, 16, (n,), generator=g).tolist()
    return to_dataset(
        [
            (torch.randint(3, VOCAB - 1, (length,), generator=g).numpy(), (torch.arange(length) >= length // 3).numpy())
            for length in lengths
        ]
    )


def main():
    work = Path(tempfile.mkdtemp())
    make_verifier(work / "verifier")
    extract_features(Verifier.from_pretrained(str(work / "verifier")), make_rows(), work / "features")
    for name, (algorithm, args) in RUNS.items():
        trainer = train_drafter(work / "features", work / name, work / "verifier", algorithm, **COMMON | args)
        shutil.rmtree(work / name / "checkpoint-4")
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        (work / name / "run.json").write_text(
            json.dumps({"algorithm": algorithm, "args": COMMON | args, "losses": losses}, indent=1)
        )
    for file in (*work.rglob("*.json"), *work.rglob("*.csv")):
        file.write_text(file.read_text().replace(str(work), "."))  # no path of this machine
    for lock in work.rglob("*.lock"):
        lock.unlink()
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(work, FOLDER)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
