"""What a run is begun or resumed with: folders that hold a drafter, settings and data of another run, checkpoints that
are torn."""

import json
import shutil

from .harness import RELEASE, Case

RUN = (
    "--verifier {verifier} --algorithm eagle3 --total-seq-len 32 --eval-share 0 --draft-vocab-size 40 --seed 3 "
    "--optimizer adamw --learning-rate 1e-2 --extra lr_scheduler_type=linear --extra ttt_steps=2 --extra max_steps=4 "
    "--extra logging_steps=1"
)


def run(path):
    "A run of release 0.1.0 that was interrupted at step 2."
    shutil.copytree(RELEASE / "eagle3/checkpoint-2", path / "checkpoint-2")


def drafter(path):
    shutil.copytree(RELEASE / "eagle3", path)


def torn(name, size):
    "A checkpoint in which a file is cut off."

    def make(path):
        run(path)
        file = path / "checkpoint-2" / name
        file.write_bytes(file.read_bytes()[:size])

    return make


def with_record(content):
    "A checkpoint whose run.json is this."

    def make(path):
        run(path)
        (path / "checkpoint-2/run.json").write_text(content if isinstance(content, str) else json.dumps(content))

    return make


def resume(name, expect, change, made=run):
    return Case(name, f"train {{features}} {{here}}/d {change} --resume", expect, {"d": made})


CASES = [
    Case(
        "a drafter is there",
        "train {features} {here}/d --verifier {verifier}",
        "output_dir='.*/d' holds a drafter.*--overwrite.*--resume",
        {"d": drafter},
    ),
    Case(
        "checkpoints are there",
        "train {features} {here}/d --verifier {verifier}",
        "output_dir='.*/d' holds a drafter or checkpoints.*--overwrite",
        {"d": run},
    ),
    Case(
        "overwrite and resume",
        "train {features} {here}/d --verifier {verifier} --overwrite --resume",
        "overwrite and resume: choose one",
        {"d": drafter},
    ),
    Case(
        "nothing to resume",
        "train {features} {here}/d --verifier {verifier} --resume",
        "holds a drafter and no complete checkpoint.*--overwrite",
        {
            "d/model.safetensors": (RELEASE / "eagle3/model.safetensors").read_bytes(),
            "d/config.json": (RELEASE / "eagle3/config.json").read_text(),
        },
    ),
    resume("another number of steps in the loss", "ttt_steps was 2, is 3", RUN.replace("ttt_steps=2", "ttt_steps=3")),
    resume(
        "another draft vocabulary",
        "draft_vocab_size was 40, is 32",
        RUN.replace("--draft-vocab-size 40", "--draft-vocab-size 32"),
    ),
    resume("more layers", "num_hidden_layers was 1, is 2", RUN + " --num-layers 2"),
    resume("another verifier", "verifier was '0', is", RUN, with_record({"run": "x", "verifier": "0"})),
    resume("run.json is no JSON", "run.json: not JSON", RUN, with_record("{")),
    resume(
        "run.json has a number for its settings",
        "run.json: settings=7 must be an object",
        RUN,
        with_record({"run": "x", "settings": 7}),
    ),
    resume("fsdp", "fsdp=.*has an option of its own.*--fsdp", RUN + " --extra fsdp=full_shard"),
    resume("fsdp in one process", "fsdp=True.*one process.*torchrun", RUN + " --fsdp"),
    *(
        Case(
            f"resume from a torn {name}",
            f"train {{features}} {{here}}/d {RUN} --extra resume_from_checkpoint={{here}}/d/checkpoint-2",
            "(cannot resume|resume_from_checkpoint).*",
            {"d": torn(name, size)},
        )
        for name, size in (
            ("optimizer.pt", 100),
            ("scheduler.pt", 10),
            ("model.safetensors", 200),
            ("trainer_state.json", 20),
        )
    ),
    Case(
        "a loss that is not finite",
        (
            "train {features} {here}/d --verifier {verifier} --total-seq-len 32 --eval-share 0 --learning-rate 1e9 "
            "--extra max_steps=3 --extra lr_scheduler_type=constant --extra warmup_steps=0"
        ),
        "not finite.*learning_rate=1e\\+09",
    ),
    Case(
        "an evaluation that is not finite, with both bars on the screen",
        (
            "train {features} {here}/d --verifier {verifier} --learning-rate 1e9 --extra max_steps=3 --extra "
            "lr_scheduler_type=constant --extra warmup_steps=0"
        ),
        "^Error: the evaluation loss is not finite.*learning_rate=1e\\+09",
    ),
]
