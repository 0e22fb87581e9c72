"""Features: what extraction costs beside the bare forward pass, whether the loader keeps up with training, and what fp8
saves and costs.

    python benchmarks/features/run.py                    about two minutes on an idle core
    python benchmarks/features/run.py --rows 60 --rounds 1

Method: the sides take turns, so that a busy machine slows them alike; every side is one thread, and its seconds are
those of its processor time, all of its threads
together. Ratios are medians over rounds.

- *bare*: the verifier's decoder over the same padded batches, no hooks, no head, no files; *extraction*:
  `extract_features` into an empty folder, in bfloat16 and in fp8. The rows are shipped
  answers. Verifiers: the shipped tiny one, and a random one twenty times as large, nearer to where extraction matters.
- *loader*: `FeatureDataset` and `collate` make packed rows from files (read, checksum, tokens, finiteness, dequantised
  where they are fp8); *training*: forward, backward, clipping and AdamW of a
  one-layer EAGLE-3 drafter for the tiny verifier on the same packed rows.

Results go to benchmarks/features/results/, as a page and a JSON file.
"""

import argparse
import json
import os
import re
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
import datasets
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from speculators_nb.data.packing import PackedBatchSampler, collate
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.features.feature_rows import (
    feature_path,
    read_features,
)
from speculators_nb.features.in_process import extract_features, states_of, token_batches
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).resolve().parent
DATA, MAX_TOKENS, PACKED = HERE.parents[1] / "data", 4096, 2048


def make_rows(n):
    """The first n shipped answers."""
    with open(DATA / "answers/train.jsonl") as file:
        rows = [json.loads(line) for line in file][:n]
    return datasets.Dataset.from_list(
        [
            dict(input_ids=r["input_ids"], loss_mask=[bool(m) for m in r["loss_mask"]], seq_len=len(r["input_ids"]))
            for r in rows
        ]
    )


def wide():
    """A random verifier, wider."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    return Verifier(Qwen3ForCausalLM(Qwen3Config(**shape)))


def bare(verifier, rows):
    """The forward pass that cannot be avoided."""
    tokens, lengths = rows["input_ids"][:], rows["seq_len"][:]
    for batch in token_batches(lengths, range(len(rows)), MAX_TOKENS):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens[i]) for i in batch], batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([lengths[i] for i in batch])[:, None]
        with torch.no_grad():
            verifier.decoder(input_ids=ids, attention_mask=mask.long(), use_cache=False)


def clocked(function, *args):
    """(processor seconds, wall seconds, result)"""
    cpu, wall = time.process_time(), time.perf_counter()
    result = function(*args)
    return time.process_time() - cpu, time.perf_counter() - wall, result


def extraction(name, verifier, rows, rounds, folder):
    """Lines of the table: bare, bfloat16, fp8."""
    name += f", {sum(p.numel() for p in verifier.model.parameters()) / 1e6:.1f} M"
    sides, tokens = {"bare": [], "bfloat16": [], "float8_e4m3fn": []}, sum(rows["seq_len"])
    bare(verifier, rows.select(range(4)))
    for r in range(rounds):
        for side, seconds in sides.items():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                seconds.append(
                    clocked(bare, verifier, rows)
                    if side == "bare"
                    else clocked(lambda: extract_features(verifier, rows, place, dtype=side, max_tokens=MAX_TOKENS))
                )
    return [
        dict(
            verifier=name,
            side=side,
            tokens=tokens,
            cpu_s=median(s[0] for s in seconds),
            wall_s=median(s[1] for s in seconds),
            tokens_per_cpu_s=tokens / median(s[0] for s in seconds),
            of_bare=median(b[0] / s[0] for b, s in zip(sides["bare"], seconds)),
            of_bare_wall=median(b[1] / s[1] for b, s in zip(sides["bare"], seconds)),
        )
        for side, seconds in sides.items()
    ]


def feeding(verifier, rows, rounds, folder):
    """Tokens per processor second of the loader and of training, on the same packed rows; and what fp8 files are
    like."""
    model = new_drafter("eagle3", DATA / "tiny-verifier", ttt_steps=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)
    kwargs = type(model).get_trainer_kwargs(ttt_steps=3)[0]
    data = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        extract_features(verifier, rows, Path(folder) / dtype, dtype=dtype)
        data[dtype] = FeatureDataset(Path(folder) / dtype, layers=list(model.drafter().aux_layer_ids))
    batches = list(PackedBatchSampler([n - 1 for n in data["bfloat16"].lengths], PACKED))

    def load(dtype):
        return [collate([data[dtype][i] for i in batch], PACKED, model.shift, torch.float32) for batch in batches]

    def train(rows):
        for row in rows:
            _, loss, _ = model(**row, **kwargs)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    packed = load("bfloat16")
    tokens = sum(int((row["document_ids"] >= 0).sum()) for row in packed)
    train(packed[:1])
    sides = {
        "training": lambda: train(packed),
        "loader, bfloat16": lambda: load("bfloat16"),
        "loader, float8_e4m3fn": lambda: load("float8_e4m3fn"),
    }
    seconds = {side: [] for side in sides}
    for _ in range(rounds):
        for side, function in sides.items():
            seconds[side].append(clocked(function)[:2])
    lines = [
        dict(
            side=side,
            tokens=tokens,
            cpu_s=median(s[0] for s in got),
            tokens_per_cpu_s=tokens / median(s[0] for s in got),
            of_training=median(t[0] / s[0] for t, s in zip(seconds["training"], got)),
            of_training_wall=median(t[1] / s[1] for t, s in zip(seconds["training"], got)),
        )
        for side, got in seconds.items()
    ]
    return lines, fp8_of(verifier, rows, folder)


def fp8_of(verifier, rows, folder):
    """Size, and the root of the mean squared error over that of the states, for each layer."""
    size = {d: sum(p.stat().st_size for p in (Path(folder) / d).glob("hs_*")) for d in ("bfloat16", "float8_e4m3fn")}
    error, power = 0, 0
    for i in range(min(40, len(rows))):
        (exact,) = states_of(verifier, [rows[i]["input_ids"]], torch.float32)
        error = error + torch.stack(
            [(read_features(feature_path(Path(folder) / d, i)).float() - exact).square().sum((0, 2)) for d in size]
        )
        power = power + exact.square().sum((0, 2))
    layers = [*verifier.aux_layer_ids, verifier.num_layers]
    return dict(
        bytes_per_token={d: n / sum(rows["seq_len"]) for d, n in size.items()},
        size_ratio=size["float8_e4m3fn"] / size["bfloat16"],
        relative_rms_error={d: dict(zip(map(str, layers), e)) for d, e in zip(size, (error / power).sqrt().tolist())},
    )


def report(facts):
    """A page."""
    lines = [
        f"# Features, {facts['date']}",
        "",
        f"{facts['cpu']}, one thread; torch {facts['torch']}, transformers {facts['transformers']}; {facts['rounds']} "
        "rounds, medians. Method: `benchmarks/features/run.py`.",
        "",
        "## Extraction beside the bare forward pass",
        "",
        "| verifier | side | tokens | CPU s | tokens / CPU s | of bare | of bare, wall |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {r['verifier']} | {r['side']} | {r['tokens']} | {r['cpu_s']:.2f} | {r['tokens_per_cpu_s']:.0f} | "
            f"{r['of_bare']:.0%} | {r['of_bare_wall']:.0%} |"
        )
        for r in facts["extraction"]
    ]
    lines += [
        "",
        "## Loader beside training",
        "",
        "| side | tokens | CPU s | tokens / CPU s | times training | times training, wall |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {r['side']} | {r['tokens']} | {r['cpu_s']:.2f} | {r['tokens_per_cpu_s']:.0f} | {r['of_training']:.1f}x "
            f"| {r['of_training_wall']:.1f}x |"
        )
        for r in facts["feeding"]
    ]
    fp8 = facts["fp8"]
    lines += [
        "",
        "## fp8",
        "",
        f"{fp8['size_ratio']:.3f} of the bytes of bfloat16 ({fp8['bytes_per_token']['float8_e4m3fn']:.0f} of "
        f"{fp8['bytes_per_token']['bfloat16']:.0f} per token). "
        "Error beside float32: root of its mean square over that of the states.",
        "",
        "| stored as | " + " | ".join(f"layer {i}" for i in fp8["relative_rms_error"]["bfloat16"]) + " |",
        "|---|" + "---|" * len(fp8["relative_rms_error"]["bfloat16"]),
    ]
    lines += [
        f"| {d} | " + " | ".join(f"{e:.2%}" for e in errors.values()) + " |"
        for d, errors in fp8["relative_rms_error"].items()
    ]
    return "\n".join(lines) + "\n"


def main():
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    opt = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    tiny, rows = Verifier.from_pretrained(str(DATA / "tiny-verifier")), make_rows(opt.rows)
    cpu = (
        re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if Path("/proc/cpuinfo").exists()
        else None
    )
    facts = dict(
        date=str(date.today()),
        cpu=cpu[1] if cpu else "unknown CPU",
        torch=torch.__version__,
        transformers=transformers.__version__,
        rounds=opt.rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        facts["extraction"] = [
            *extraction("tiny", tiny, rows, opt.rounds, folder),
            *extraction("random", wide(), rows.select(range(len(rows) // 2)), opt.rounds, folder),
        ]
        facts["feeding"], facts["fp8"] = feeding(tiny, rows, opt.rounds, folder)
    stem = opt.out / f"features-{facts['date']}-{re.sub(r'[^a-z0-9]+', '-', facts['cpu'].lower()).strip('-')}"
    opt.out.mkdir(parents=True, exist_ok=True)
    Path(f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
    Path(f"{stem}.md").write_text(text := report(facts))
    print(text)


if __name__ == "__main__":
    main()
