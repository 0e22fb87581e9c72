"""Random bad input: every command, every kind of file, every option. `python -m bad.draw --seed 5 --n 300`, from
tests/, says where the library disagrees with the oracle below.

A good run of a command is spoilt in one or two places: an option gets a hostile value, a recipe a wrong field, a file
is damaged. No expected text is known, so an answer is judged by itself:
- refused: exit code 2, one line that begins with `Error:` and names the file, the field or the value (`check` may list
  it as a violation); no traceback;
- harmless: exit code 0 and the same result as the good run, or the value is one that the option allows, or the input is
  a good one that says something else;
- counted: exit code 0, and the report counts what was dropped, which that of the good run does not;
- anything else disagrees: another result without a word (silently wrong), a traceback, more than the harness's memory
  or time, an input that was changed, code that was run."""

import argparse
import functools
import hashlib
import inspect
import json
import math
import os
import random
import re
import shlex
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml
from bad.harness import GOOD, MEMORY, RELEASE, Case, Outcome, error_line, run, typed
from bad.mutate import apply, copy_of, said, spoil, spoil_tree

SMALL = "--total-seq-len 32 --eval-share 0 --seed 3 --extra disable_tqdm=true --extra logging_steps=1"
RUNS = {
    "eagle": "speculative_tokens=3",
    "eagle3": "ttt_steps=2",
    "peagle": "num_depths=3 mask_token_id=63",
    "dflash": "block_size=4 max_anchors=4 mask_token_id=63",
    "dflash2": "block_size=4 max_anchors=4 selector_rank=4 selector_top_k=8 mask_token_id=63",
    "domino": "block_size=4 max_anchors=4 emb_dim=4 gru_hidden_dim=4 mask_token_id=63",
    "lilicorr": "block_size=4 max_anchors=4 lilicorr_hidden_size=4 lilicorr_num_heads=2 mask_token_id=63",
    "dspark": "block_size=3 max_anchors=4 markov_rank=4 mask_token_id=63",
    "mtp": "num_speculative_steps=2 fresh_head=true",
    "mlp": "num_heads=2",
    "query_only": "ttt_steps=2",
    "medusa": "num_heads=2",
}


class Scene(NamedTuple):
    "A good run: a command, the files that it reads (name in the case's folder -> source), and what it leaves."

    line: str  # words after `speculators-nb`, run in the folder that holds the files
    files: dict  # name -> a good file or folder: a path below GOOD, or a name of `made`
    result: tuple = ()  # glob patterns of what it leaves; empty: what it prints
    weight: int = 2  # how often it is drawn
    changes: tuple = ()  # inputs that it may change


def _train(algorithm, more=""):
    extra = "".join(f" --extra {x}" for x in RUNS[algorithm].split())
    return (
        f"train ftr out --verifier vrf --algorithm {algorithm} {SMALL} --extra max_steps=2 --extra "
        f"save_strategy=no{extra}{more}"
    )


TRAINED, TABLES = ("out/model.safetensors",), ("out/summary.csv", "out/positions.csv")
LEARN = {"ftr": RELEASE / "features", "vrf": RELEASE / "verifier"}
SCENES = {
    "prepare": Scene(
        "prepare talks.jsonl out --verifier tny --max-length 96 --num-proc 1",
        {"talks.jsonl": "talks", "tny": GOOD["tiny"]},
        ("out/*.arrow", "out/token_freq.json"),
        6,
    ),
    "prepare turns": Scene(
        "prepare talks.jsonl out --verifier tny --rows turn --val-fraction 0.3 --draft-vocab-size 50 --num-proc 2",
        {"talks.jsonl": "talks", "tny": GOOD["tiny"]},
        ("out/*.arrow", "out/token_freq.json", "out/*.npy"),
        3,
    ),
    "regenerate": Scene(
        "regenerate talks.jsonl out.jsonl --verifier tny --max-samples 2 --max-new-tokens 3",
        {"talks.jsonl": "talks", "tny": GOOD["tiny"]},
        ("out.jsonl",),
        4,
    ),
    "features": Scene(
        "features prp out --verifier tny --max-samples 3", {"tny": GOOD["tiny"], "prp": "prepared"}, ("out/hs_*",), 4
    ),
    "features of chats": Scene(
        "features talks.jsonl out --verifier tny --max-length 48",
        {"tny": GOOD["tiny"], "talks.jsonl": "talks"},
        ("out/hs_*",),
        2,
    ),
    "vocab": Scene("vocab prp 40 --output-dir out", {"prp": "prepared"}, ("out/*.npy",), 3, ("prp",)),
    **{
        f"train {a}": Scene(
            _train(a, " --draft-vocab-size 40" if a in ("eagle3", "peagle") else ""),
            LEARN,
            TRAINED,
            3 if a == "eagle3" else 1,
        )
        for a in RUNS
    },
    "train on": Scene(
        _train("eagle3", " --draft-vocab-size 40 --from-pretrained drf"), LEARN | {"drf": "drafter"}, TRAINED, 3
    ),
    "train, vocabulary": Scene(
        _train("eagle3", " --draft-vocab-size 40"),
        {"ftr": "features with vocabulary", "vrf": RELEASE / "verifier"},
        TRAINED,
        1,
    ),
    "resume": Scene(
        (
            f"train ftr out --verifier vrf {SMALL} --extra ttt_steps=2 --extra max_steps=4 --extra save_steps=2 "
            "--extra save_strategy=steps --resume"
        ),
        LEARN | {"out": "run"},
        TRAINED,
        5,
        ("out",),
    ),
    "train on rows": Scene(
        (
            "train prp out --verifier tny --total-seq-len 96 --extra max_steps=2 --extra save_strategy=no --extra "
            "disable_tqdm=true --extra ttt_steps=1 --eval-share 0"
        ),
        {"tny": GOOD["tiny"], "prp": "prepared"},
        TRAINED,
        2,
    ),
    "evaluate": Scene(
        "evaluate drf talks.jsonl --verifier tny --output-dir out --max-samples 2 --max-new-tokens 4 --as-engine",
        {"drf": GOOD["tiny"].parent / "tiny-drafter", "talks.jsonl": "talks", "tny": GOOD["tiny"]},
        TABLES,
        5,
    ),
    "check": Scene("check drf", {"drf": "drafter"}, (), 3),
    "check dflash": Scene("check drf", {"drf": RELEASE / "dflash"}, (), 1),
    "serve": Scene("serve drf --verifier vrf", {"drf": "drafter", "vrf": RELEASE / "verifier"}, (), 3),
    "serve states": Scene("serve vrf --hidden-states out", {"vrf": RELEASE / "verifier"}, (), 1),
    "export": Scene(
        "export drf out --verifier vrf",
        {"drf": "drafter", "vrf": RELEASE / "verifier"},
        ("out/*.safetensors", "out/config.json"),
        2,
    ),
    "export medusa": Scene(
        "export drf out --verifier vrf",
        {"drf": RELEASE / "medusa", "vrf": RELEASE / "verifier"},
        ("out/*.safetensors", "out/*.pt", "out/config.json"),
        1,
    ),
    "convert": Scene(
        "convert ntv out --verifier vrf",
        {"ntv": "native", "vrf": RELEASE / "verifier"},
        ("out/model.safetensors", "out/config.json"),
        4,
    ),
    "stitch": Scene(
        "stitch-mtp drf out --verifier vrf",
        {"drf": RELEASE / "mtp", "vrf": RELEASE / "verifier"},
        ("out/model.safetensors", "out/config.json"),
        2,
    ),
    "compare": Scene("compare evl --output-dir out", {"evl": "evaluation"}, ("out/comparison.csv",), 3),
    "demo": Scene(
        (
            "demo --output-dir out --verifier tny --prompts talks.jsonl --heldout talks.jsonl --n-prompts 2 "
            "--n-heldout 1 --epochs 1"
        ),
        {"tny": GOOD["tiny"], "talks.jsonl": "talks"},
        ("out/summary.csv",),
        2,
    ),
}
MADE = {  # what the scenes read and the repository does not hold: name -> files, command, what is kept
    "prepared": (
        {"talks.jsonl": "talks", "tny": GOOD["tiny"]},
        "prepare talks.jsonl out --verifier tny --max-length 64 --num-proc 1 --no-shuffle",
        "out",
    ),
    "run": (
        LEARN,
        (
            f"train ftr out --verifier vrf {SMALL} --extra ttt_steps=2 --extra max_steps=4 --extra save_steps=2 "
            "--extra save_strategy=steps"
        ),
        "out",
    ),
    "native": ({"drf": "drafter", "vrf": RELEASE / "verifier"}, "export drf out --verifier vrf", "out"),
    "features with vocabulary": ({"ftr": RELEASE / "features"}, "vocab ftr 40 --vocab-size 64", "ftr"),
    "evaluation": (SCENES["evaluate"].files, SCENES["evaluate"].line, "out"),
}


@functools.cache
def _shelf():
    "Where what is made stays as long as this process."
    return tempfile.TemporaryDirectory(prefix="drawn-")


@functools.cache
def made(name: str) -> Path:
    "A good input that is made at its first use."
    place = Path(_shelf().name) / name
    if name == "talks":
        place.write_text(
            "".join(GOOD["corpus"].read_text(encoding="utf-8").splitlines(keepends=True)[:6]), encoding="utf-8"
        )
    elif name == "drafter":  # of this version, trained for the small verifier
        shutil.copytree(
            GOOD["drafter"], place, ignore=shutil.ignore_patterns("checkpoint-*", "run.json", "training*", "*.npy")
        )
    else:
        files, line, kept = MADE[name]
        sources = {at: source_of(source) for at, source in files.items()}

        def make(folder):
            for at, source in sources.items():
                copy_of(source, folder / at)
            code, printed, wrong = typed(shlex.split(line))
            if code:
                raise ValueError(printed + wrong)
            if name == "run":  # as if it had been killed after its second step
                for path in (folder / kept).iterdir():
                    if path.name != "checkpoint-2":
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.move(folder / kept, place)
            return "made"

        if (outcome := run(Case(name, make, ""))).kind != "done":
            raise RuntimeError(f"{name}: {outcome}")
    return place


def source_of(source) -> Path:
    return source if isinstance(source, Path) else made(source)


# --- what an option allows, said here a second time, from its help alone

MANY = 2**31
WHOLE = {
    "max_length": 2,
    "max_samples": 1,
    "min_trained": 1,
    "seed": 0,
    "draft_vocab_size": 1,
    "num_proc": 1,
    "max_new_tokens": 1,
    "batch_size": 1,
    "concurrency": 1,
    "rank": 0,
    "world_size": 1,
    "max_tokens": 1,
    "vocab_size": 1,
    "num_layers": 1,
    "lora_rank": 1,
    "total_seq_len": 2,
    "gradient_accumulation_steps": 1,
    "early_stopping_patience": 1,
    "regenerate_every": 1,
    "k": 0,
    "max_model_len": 1,
    "port": 1,
    "speculative_tokens": 1,
    "n_prompts": 1,
    "n_heldout": 1,
    "aux_layer_ids": 0,
}
REAL = {
    "val_fraction": (0, 0.999),
    "temperature": (0, 100),
    "eval_share": (0, 0.999),
    "num_train_epochs": (1e-9, 1e6),
    "learning_rate": (1e-300, 1e300),
    "lora_alpha": (1e-300, 1e300),
    "epochs": (1e-9, 1e6),
}
WORDS = {
    "rows": ("conversation", "turn"),
    "too_long": ("cut", "drop"),
    "source": ("hf",),
    "algorithm": tuple(RUNS),
    "draft_arch": ("llama", "qwen3"),
    "on_bad": ("raise", "skip"),
    "optimizer": ("adamw", "muon"),
    "engine": ("reference",),
    "rule": ("standard", "greedy", "strict", "block", "traversal", "typical", "fly"),
    "load": ("requests",),
    "host": ("0.0.0.0", "::1", "localhost", "null", "None", "x"),
    "save_dtype": ("float32", "bfloat16", "float16", "float64"),
    "dtype": ("bfloat16", "float16", "float32", "float8_e4m3fn", "auto", "half", "float"),
    "method": ("ngram",),
    "engine_version": ("0.32", "0.33"),
    "device": ("cpu",),
}
OUTPUTS = ("output", "output_dir", "out", "native", "hidden_states")
INPUTS = (
    "data",
    "verifier",
    "data_dir",
    "from_pretrained",
    "storage",
    "drafter",
    "checkpoint",
    "folder",
    "source",
    "image_folder",
    "prompts",
    "heldout",
    "vllm",
    "runs",
)


def allowed(option: str, value) -> bool:
    "Whether a value is one that the option allows, by what its help says. A text is read as a shell gives it."
    if isinstance(value, (list, tuple)):
        return option in ("k", "temperature", "concurrency", "aux_layer_ids") and all(allowed(option, v) for v in value)
    if value is None or isinstance(value, bool):
        return value is None or option not in WHOLE.keys() | REAL.keys() | WORDS.keys()
    try:
        if option in WHOLE:
            return WHOLE[option] <= int(value) <= MANY and not (isinstance(value, float) and value != int(value))
        if option in REAL:
            return math.isfinite(float(value)) and REAL[option][0] <= float(value) <= REAL[option][1]
    except (ValueError, TypeError, OverflowError):
        return False
    return value in WORDS.get(option, ())


NUMBERS = (
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e3",
    "1e999",
    "",
    " ",
    "abc",
    "9" * 30,
    "0x10",
    "None",
    "null",
    "true",
    "-0",
    "2147483648",
    "-9223372036854775809",
    "1_0",
    "٣",
    "³",
    "½",
    "5,6",
    "1 2",
    "{}",
    "[1]",
    "--",
    "\x1b[31m5",
    "1e-400",
    "-1e-9",
    "0.9999999999",
    "4294967296",
    "7\n",
    "%s",
    "1/2",
)
TEXTS = (
    "",
    " ",
    "x",
    "nobody/nothing",
    "Conversation",
    "EAGLE3",
    "eagle-3",
    "е" + "agle3",  # noqa: RUF001 - Cyrillic
    "\udcff",
    "a\nb",
    "a" * 5000,
    "../../x",
    "None",
    "null",
    "0",
    "{}",
    "--help",
    "*",
    "$(touch OWNED)",
    "; touch OWNED",
    "http://",
    "http://user:secret@127.0.0.1:1/",
    "http://127.0.0.1:99999",
    "ftp://x",
    "http://[::1",
    "cuda:99",
    "mps",
    "cpu:7",
    "meta",
    "torch.float32",
    "int8",
    "hf:",
    "hf:nobody/nothing",
)
PLACES = (
    "",
    " ",
    "nowhere",
    "nowhere/at/all",
    "file.txt",
    "file.txt/x",
    "noise.bin",
    "empty",
    "loop",
    "dangling",
    "pipe",
    ".",
    "..",
    "a" * 300,
    "a/" * 2500,
    "bad\udcffname",
    "a\nb",
    "~nobody/x",
    "hf:",
    "-",
    "{other}",
    "[]",
    "*",
    "noise.json",
    "noise.jsonl",
)
READ = (
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/proc",
    "/dev/full",
    "//",
    "http://127.0.0.1:1/x",
    "s3://a/b",
    "/root/../etc/passwd",
)
OBJECTS = (
    "{",
    "[]",
    "null",
    "5",
    '{"a": NaN}',
    '{"": null}',
    "{}" * 2,
    '{"a":' * 2000 + "1" + "}" * 2000,
    '{"temperature": "hot"}',
    '{"top_p": 7}',
    '{"n": -1}',
    '{"messages": 5}',
    "{'a': 1}",
    '{"enable_thinking": []}',
    '{"norm_before_residual": 3}',
    '{"top_p": null}',
    '{"temperature": [[0, -1]]}',
    '{"top_p": [[0.5, 0]]}',
    '{"tokenize": false}',
    '{"add_generation_prompt": true}',
    '{"vocab_size": 5}',
)
EXTRAS = (
    "max_steps=-5",
    "max_steps=abc",
    "=3",
    "foo",
    "nobody_knows=1",
    "learning_rate=1",
    "warmup_steps=-1",
    "max_grad_norm=nan",
    "adam_beta1=2",
    "lr_scheduler_type=zigzag",
    "weight_decay=-1",
    "logging_steps=0",
    "save_steps=0.5x",
    "seed=9",
    "output_dir=elsewhere",
    "ttt_steps=0",
    "ttt_steps=1e9",
    "loss_fn=none",
    'loss_fn={"ce": -1}',
    'loss_fn={"ce": NaN}',
    "fsdp=full_shard",
    "deepspeed=x.json",
    "per_device_train_batch_size=0",
    "noise_std=-1",
    "eval_strategy=steps",
    "metric_for_best_model=nothing",
    "lr_scheduler_kwargs={",
    "lr_scheduler_kwargs=5",
    "save_total_limit=0",
    "dataloader_num_workers=-1",
    "block_size=1",
    "num_heads=0",
    "report_to=nobody",
    "label_smoothing_factor=2",
    "neftune_noise_alpha=-1",
    "optim=nothing",
    "max_steps=1e400",
    "bf16=maybe",
    "gradient_checkpointing=yes",
    "torch_compile_backend=x",
    "",
    "=",
    "a=b=c",
    "mask_token_id=-1",
    "mask_token_id=64",
    "max_anchors=0",
    "markov_rank=-1",
    "num_depths=0",
    "attn_impl=cuda",
    "step_weights=[]",
    "adam_epsilon=0",
    "ddp_backend=x",
    "hub_token=abc",
    'accelerator_config={"a": 1}',
)


def hostile(rng: random.Random, option: str, kind: str, others: list) -> str:
    "A text that somebody might give for an option, by its declared type."
    if option == "extra":
        return rng.choice(EXTRAS)
    if "dict" in kind or option == "config":
        return rng.choice(OBJECTS)
    if "int" in kind or "float" in kind:
        return rng.choice(NUMBERS)
    if option in OUTPUTS:
        return rng.choice(PLACES)
    if option in INPUTS:
        return rng.choice(PLACES + READ)
    return rng.choice(TEXTS)


def place_words(value: str, others: list) -> str:
    return value.replace("{other}", others[0] if others else "nowhere")


def furnish(folder: Path, rng: random.Random):
    "What PLACES name."
    (
        (folder / "file.txt").write_text("some text\n"),
        (folder / "noise.bin").write_bytes(rng.randbytes(500)),
        (folder / "empty").mkdir(),
    )
    (folder / "loop").symlink_to("loop"), (folder / "dangling").symlink_to("gone/away"), os.mkfifo(folder / "pipe")
    (folder / "noise.json").write_bytes(rng.randbytes(99)), (folder / "noise.jsonl").write_bytes(rng.randbytes(99))


class Drawn(NamedTuple):
    "A drawn case."

    name: str  # seed/number
    scene: str  # a key of SCENES
    words: list  # of the command line
    files: tuple = ()  # (path in the case's folder, Spoilt)
    recipe: bytes | None = None
    names: tuple = ()  # an answer must hold one
    story: str = ""
    excuse: str = ""  # why a success is right, whatever its result
    output: str = ""  # a result that lies here is right, too
    printed: str = ""  # a command that is printed with it is right, too


def _options(scene):
    "Option -> declared type, of the scene's command."
    from speculators_nb.cli import main as cli

    return {
        p.name: str(p.annotation)
        for p in inspect.signature(cli.app.functions[scene.line.split()[0]]).parameters.values()
    }


def _said(scene):
    "The scene's command line as values: option -> texts; arguments under their names."
    words = shlex.split(scene.line)
    named = {w[2:].replace("-", "_") for w in words if w.startswith("--")}
    options = [name for name in _options(scene) if name not in named]
    given, at, i = {}, 0, 1
    while i < len(words):
        if words[i].startswith("--"):
            name = words[i][2:].replace("-", "_")
            if i + 1 < len(words) and not words[i + 1].startswith("--"):
                given.setdefault(name, []).append(words[i + 1])
                i += 1
            else:
                given[name.removeprefix("no_")] = [not name.startswith("no_")]
        else:
            given[options[at]] = [words[i]]
            at += 1
        i += 1
    return given


def _elsewhere(scene, option, value):
    "What `serve` prints for another machine: a program and a verifier there."
    return (
        shlex.quote(str(value))
        if scene.line.startswith("serve") and option in ("vllm", "verifier") and str(value).strip()
        else ""
    )


def _spoil_option(rng, scene, drawn):
    options, words = _options(scene), list(drawn.words)
    option = rng.choice(list(options))
    inputs, flag = list(scene.files), "--" + option.replace("_", "-")
    value = place_words(hostile(rng, option, options[option], inputs), inputs)
    given = _said(scene)
    if "bool" in options[option]:
        words.append(f"{flag}={value}" if rng.random() < 0.7 else f"{flag}s")
    else:
        old = given.get(option, [None])[-1]
        at = words.index(flag) if flag in words else None
        if at is not None:
            words[at : at + 2] = []
        elif old is not None and option != "extra":
            words.remove(old)
        words += [f"{flag}={value}"] if rng.random() < 0.5 or value.startswith("-") else [flag, value]
    fine = allowed(option, value)
    name = value.partition("=")[0]
    names = (
        option,
        flag,
        *said(value),
        *([name] if option == "extra" and name else []),
        *([str(Path(value))] if "Path" in options[option] or option == "runs" else []),
    )
    return drawn._replace(
        words=words,
        names=drawn.names + tuple(names),
        story=f"{drawn.story} {option}={value[:60]!r};",
        excuse=drawn.excuse or ("the option allows it" if fine else ""),
        output=value if option in OUTPUTS else drawn.output,
        printed=_elsewhere(scene, option, value),
    )


def _spoil_line(rng, scene, drawn):
    "The words of a command line."
    words, act = list(drawn.words), rng.choice(("more", "less", "twice", "unknown", "cut", "command"))
    if act == "more":
        words.append("surplus")
    elif act == "unknown":
        words += [rng.choice(("--nobody-knows", "--seeds=1", "--max_length=5", "-x", "--", "--recipe"))]
    elif act == "cut":
        words.append(rng.choice([w for w in words if w.startswith("--")] or ["--seed"]))
    elif act == "command":
        words[0] = words[0][:-1] + "x"
    elif act == "less":
        words.pop(1)
    else:
        words += words[1:2]
    missing = next(iter(_options(scene)))
    names = (words[-1], words[0], missing, "missing", *words[1:3])
    return drawn._replace(words=words, names=drawn.names + names, story=f"{drawn.story} {act}: {' '.join(words[-3:])};")


def _spoil_recipe(rng, scene, drawn):
    "The same arguments in a recipe, one of them wrong."
    options = _options(scene)
    command, fields = scene.line.split()[0], {}
    for name, values in _said(scene).items():
        kind = options[name]
        read = (
            (lambda v: v if isinstance(v, bool) else int(v))
            if "int" in kind
            else float
            if "float" in kind
            else (lambda v: v)
        )
        values = [read(v) for v in values]
        fields[name] = values if "list" in kind else values[-1]
    tree, names, excuse = {command: fields}, (), ""
    odd = {
        "is empty": b"",
        "is text": b"train this, please",
        "is a list": b"- a\n- b\n",
        "has a tab": b"a:\n\tb: 1\n",
        "opens brackets": b"a: " + b"[" * 5000,
        "makes an object": b"a: !!python/object/apply:os.mkdir [OWNED]\n",
        "multiplies itself": b"a: &a [1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in range(97, 106)),
        "is no UTF-8": b"\xff\xfe\xfa",
        "has no such command": b"trayn: {seed: 1}\n",
        "is a huge number": b"seed: " + b"9" * 5000,
        "is a date": b"seed: 2020-01-01\n",
        "is twice": b"seed: 1\nseed: 2\n",
        "loops": b"a: &a {b: *a}\n",
    }
    act = rng.random()
    if act < 0.3:
        story = rng.choice(list(odd))
        content, names = odd[story], tuple(options)  # an argument that it does not give is missing
    elif act < 0.6:
        field = rng.choice([n for n in options if n != "extra"])
        value = rng.choice(
            (
                hostile(rng, field, options[field], []),
                -1,
                1.5,
                True,
                None,
                [],
                {},
                [[1]],
                math.inf,
                10**30,
                {"a": 1},
                [None],
                "",
                0,
            )
        )
        fields[field] = value
        content = yaml.safe_dump(tree).encode(errors="surrogatepass")
        story = f"{field} is {value!r}"[:80]
        names = (field, *said(value))
        fine = allowed(field, value) or (value == [] and "list" in options[field])
        # a folder may be called 2026
        fine = fine or (field in OUTPUTS and isinstance(value, int | float) and not isinstance(value, bool))
        excuse = "the option allows it" if fine else ""
        drawn = drawn._replace(printed=_elsewhere(scene, field, value))
    else:
        story, tree, names, _ = spoil_tree(rng, tree)
        content = yaml.safe_dump(tree).encode(errors="surrogatepass")
        changed = (tree.get(command) or {}) if isinstance(tree, dict) else {}
        field = names[1] if len(names) > 1 else ""
        excuse = (
            "the option allows it"
            if field in options
            and isinstance(changed, dict)
            and (field not in changed or allowed(field, changed[field]))
            else ""
        )
        if not changed:  # then each argument is missing
            names = (*names, *options)
        if isinstance(changed, dict):
            drawn = drawn._replace(printed=_elsewhere(scene, field, changed.get(field, "")))
        if field in OUTPUTS and isinstance(changed, dict):
            drawn = drawn._replace(output=str(changed.get(field, "")))
    return drawn._replace(
        words=[command, "--recipe", "recipe.yaml"],
        recipe=content,
        names=(*drawn.names, "recipe.yaml", *names),
        story=f"{drawn.story} the recipe: {story};",
        excuse=drawn.excuse or excuse,
    )


def _spoil_file(rng, scene, drawn):
    "One of the files that the command reads."
    at = rng.choice(list(scene.files))
    source = source_of(scene.files[at])
    inner = (
        sorted(
            p
            for p in source.rglob("*")
            if p.is_file() and p.suffix not in (".md", ".png") and "training_log" not in p.name
        )
        if source.is_dir()
        else [source]
    )
    file = rng.choice(inner)
    spoilt = spoil(rng, file, [p for p in inner if p != file])
    if (
        scene.line.startswith("stitch")
        and at == "vrf"
        and any(spoilt.story.startswith(f"{name}: ") for name in spoilt.names)
    ):
        spoilt = spoilt._replace(excuse="the verifier's own tensors are copied as they are")
    path = f"{at}/{file.relative_to(source)}" if source.is_dir() else at
    folders = {part for part in path.split("/") if part != "out"}
    return drawn._replace(
        files=(*drawn.files, (path, spoilt)),
        names=(*drawn.names, *sorted(folders), *spoilt.names),
        story=f"{drawn.story} {path}: {spoilt.story};",
        excuse=drawn.excuse or spoilt.excuse,
    )


def draw_one(seed: int, i: int) -> Drawn:
    "Case number i of a seed, whatever the others are."
    rng = random.Random(f"{seed}/{i}")
    names = list(SCENES)
    name = rng.choices(names, [SCENES[n].weight for n in names])[0]
    scene = SCENES[name]
    drawn = Drawn(f"{seed}/{i}", name, shlex.split(scene.line))
    for n in range(2 if rng.random() < 0.1 else 1):
        act = rng.choices(
            (_spoil_option, _spoil_file, _spoil_recipe, _spoil_line), (40, 45, 12, 3) if n == 0 else (0, 1, 0, 0)
        )[0]
        drawn = act(rng, scene, drawn)
    return drawn


def draw(seed: int, n: int = 300) -> list[Drawn]:
    "n random bad inputs."
    return [draw_one(seed, i) for i in range(n)]


# --- the run


def _fingerprint(path: Path):
    "What a file or the files of a folder hold."
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {
        str(f): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in files
        if f.is_file() and f.stat().st_size < 1 << 27 and not f.is_symlink()
    }


def _stage(folder: Path, drawn: Drawn, sources: dict):
    "Put everything into the case's folder."
    furnish(folder, random.Random(drawn.name))
    for at, source in sources.items():
        copy_of(source, folder / at)
    for at, spoilt in drawn.files:
        apply(spoilt, folder / at)
    if drawn.recipe is not None:
        (folder / "recipe.yaml").write_bytes(drawn.recipe)


def _result(folder: Path, scene: Scene, printed: str):
    "What the run left, without the names of folders and times."
    if not scene.result:
        return hashlib.sha256(
            "\n".join(line for line in printed.replace(str(folder), "").splitlines()).encode(errors="replace")
        ).hexdigest()
    found = {
        str(p.relative_to(folder)): p.read_bytes().replace(str(folder).encode(), b"")
        for pattern in scene.result
        for p in sorted(folder.glob(pattern))
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def play(drawn: Drawn) -> tuple[Outcome, dict]:
    "Run a drawn case in the harness's child. Returns its outcome, and what it said and left."
    scene = SCENES[drawn.scene]
    sources = {at: source_of(source) for at, source in scene.files.items()}

    def act(folder):
        os.environ.pop("PWD", None)
        _stage(folder, drawn, sources)
        inputs = [folder / at for at in scene.files if at not in scene.changes]
        before = [_fingerprint(path) for path in inputs]
        code, printed, wrong = typed(drawn.words)
        after = [_fingerprint(path) for path in inputs]
        changed = [
            name
            for b, a in zip(before, after)
            for name in b
            if a.get(name) != b[name] and Path(name).name != "provenance.json"
        ]  # it keeps the record that was there
        return json.dumps(
            dict(
                code=code,
                printed=printed,
                wrong=wrong,
                changed=changed,
                owned=(folder / "OWNED").exists(),
                result=_result(folder, scene, printed),
                there=bool(drawn.output.strip()) and os.path.exists(os.path.join(folder, drawn.output)),
            )
        )

    outcome = run(Case(drawn.name, act, ""))
    return outcome, json.loads(outcome.text) if outcome.kind == "done" else {}


@functools.cache
def good(scene: str) -> dict:
    "The run of a scene that nobody spoilt."
    outcome, told = play(Drawn("good", scene, shlex.split(SCENES[scene].line)))
    if outcome.kind != "done" or told["code"] or not told["result"]:
        raise RuntimeError(f"the good run of {scene}: {outcome}")
    return told


COUNT = re.compile(
    r"\b[1-9][\d,]*\b.*\b(conversations?|rows?|samples?|lines?|requests?|files?)|"
    r"\b(drop|fail|skip|refus|cut|without|warning|left out|not used)",
    re.IGNORECASE,
)


def _counts(told: dict, scene: str) -> str | None:
    "A line of the report that counts what was dropped or warns, and that the good run does not have."

    def plain(text):
        return {re.sub(r"\s+", " ", line).strip() for line in text.splitlines()}

    reference = good(scene)
    new = plain(told["printed"] + "\n" + told["wrong"]) - plain(reference["printed"] + "\n" + reference["wrong"])
    telling = [
        line
        for line in sorted(new)
        if re.search(
            r"(?i)\b(drop|fail|skip|refus|without a|left out|not used|unread|in part|warning|leave|is cut|cannot)", line
        )
        and not re.search(r"(?i)dropped: nothing", line)
    ]
    return next((line for line in telling if COUNT.search(line)), None)


def judge(drawn: Drawn, outcome: Outcome, told: dict) -> tuple[str, str]:
    "(refused, counted, harmless or DISAGREES; why)."
    if outcome.kind != "done":
        return "DISAGREES", f"{outcome.kind}: {outcome.text[-3000:]}"
    if outcome.megabytes > MEMORY >> 20:
        return "DISAGREES", f"{outcome.megabytes} MB"
    said_all = told["printed"] + told["wrong"]
    if "Traceback (most recent call last)" in said_all:
        return "DISAGREES", said_all[-3000:]
    if told["owned"]:
        return "DISAGREES", "code in the input was run"
    if told["changed"]:
        return "DISAGREES", f"inputs were changed: {told['changed'][:3]}"
    if told["code"] == 2 or (told["code"] == 1 and drawn.words[0] == "check"):
        line = (
            error_line(told["wrong"])
            if told["code"] == 2
            else " ".join(x for x in told["printed"].splitlines() if x.startswith("- "))
        )
        if not line:
            return "DISAGREES", f"not one line that begins with Error: {said_all[-2000:]}"
        if "not enough memory" in line:
            return "DISAGREES", f"memory ran out: {line}"
        plain = " ".join(line.split()).lower()
        named = [
            n
            for n in drawn.names
            if n.strip() and (" ".join(n.split()).lower() in plain or repr(n)[1:-1].lower() in plain)
        ]
        return ("refused", line) if named else ("DISAGREES", f"names none of {drawn.names}: {line}")
    if told["code"]:
        return "DISAGREES", f"exit code {told['code']}: {said_all[-2000:]}"
    if any(w in ("--help", "-h") for w in drawn.words):
        return "harmless", "help was asked for"
    if told["result"] == good(drawn.scene)["result"]:
        return "harmless", "the same result"
    if drawn.printed and drawn.printed in said_all:
        return "harmless", "the printed command names it, which need not be on this machine"
    if drawn.excuse:
        return "harmless", drawn.excuse
    if drawn.output and told["there"]:
        return "harmless", "the result lies there"
    if line := _counts(told, drawn.scene):
        return "counted", line
    return "DISAGREES", f"silently another result: {said_all[-600:]}"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("--n", type=int, default=300)
    p.add_argument("--only", type=int, nargs="*", help="numbers of cases: only these, at length")
    a = p.parse_args()
    import time

    began, kinds, most = time.monotonic(), Counter(), [0, 0.0]
    for i in a.only if a.only is not None else range(a.n):
        drawn = draw_one(a.seed, i)
        outcome, told = play(drawn)
        kind, why = judge(drawn, outcome, told)
        kinds[kind] += 1
        most = [max(most[0], outcome.megabytes), max(most[1], outcome.seconds)]
        if kind == "DISAGREES" or a.only is not None:
            print(
                f"{kind} {drawn.name} [{drawn.scene}]{drawn.story} ({outcome.seconds:.1f} s, {outcome.megabytes} MB)\n"
                f"  speculators-nb {shlex.join(drawn.words)[:600]}\n  {why[:3000]}\n".encode(
                    errors="backslashreplace"
                ).decode(),
                flush=True,
            )
    print(
        f"seed {a.seed}: {sum(kinds.values())} cases, "
        f"{', '.join(f'{kinds[k]} {k}' for k in ('refused', 'counted', 'harmless', 'DISAGREES'))}; "
        f"at most {most[0]} MB and {most[1]:.0f} s; {time.monotonic() - began:.0f} s in all"
    )
    raise SystemExit(bool(kinds["DISAGREES"]))


if __name__ == "__main__":
    import speculators_nb.cli.data_commands
    import speculators_nb.cli.demo
    import speculators_nb.cli.drafter_commands  # noqa: F401  imported before the first fork, so that a case does not pay for it

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
