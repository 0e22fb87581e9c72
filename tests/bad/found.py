"What random bad input (draw.py) has found, one case for each fault and its siblings."

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from speculators_nb.features.feature_rows import read_features

from .harness import GOOD, RELEASE, Case

TALK = json.dumps({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}) + "\n"
HTML = "<!doctype html><title>404</title>Not found\n"
DEMO = (
    "demo --output-dir {here}/out --verifier {here}/new --prompts {here}/talks.jsonl --heldout {here}/held.jsonl "
    "--n-prompts 1 --n-heldout 1 --epochs 1"
)
SUMMARY = (
    "drafter,temperature,domain,mean_length,mean_length_low,mean_length_high,draft_acceptance,k,concurrency,steps\n"
    "eagle3,0.0,all,3.0,2.5,3.5,0.5,2,1,3\n"
)
POSITIONS = (
    "drafter,temperature,position,unconditional,conditional,k,concurrency\neagle3,0.0,1,0.7,0.7,2,1\n"
    "eagle3,0.0,2,0.5,0.7,2,1\n"
)


def memory(path):
    "Any read of it fails, as of a failing disk."
    path.symlink_to("/proc/self/mem")


def zeros(size):
    def write(path):
        path.touch()
        os.truncate(path, size)

    return write


def copied(source, **files):
    "A copy of a folder; names of files (`__` for a dot) get another content."

    def copy(path):
        shutil.copytree(source, path)
        for name, content in files.items():
            file = path / name.replace("__", ".")
            file.unlink(missing_ok=True)
            if callable(content):
                content(file)
            else:
                file.write_text(content)

    return copy


def config(source, **fields):
    return json.dumps(json.loads((source / "config.json").read_text()) | fields)


def evaluation(**tables):
    return {
        "run/settings.json": "{}",
        "run/requests.jsonl": "",
        "run/performance.csv": "\n",
        "run/summary.csv": SUMMARY,
        "run/positions.csv": POSITIONS,
    } | {f"run/{name}.csv": text for name, text in tables.items()}


def feature(**tensors):
    def write(path):
        save_file({"hidden_states": torch.zeros(3, 4, 16), "token_ids": torch.arange(3)} | tensors, path)

    return write


def resumed(spoil):
    "Continue a run whose checkpoint is damaged by `spoil`."

    def resume(folder):
        from speculators_nb.train.train_drafter import train_drafter

        told = json.loads((RELEASE / "eagle3/run.json").read_text())
        shutil.copytree(RELEASE / "eagle3/checkpoint-2", folder / "out/checkpoint-2")
        spoil(folder / "out/checkpoint-2")
        args = dict(optimizer="adamw", lr_scheduler_type="linear") | told["args"]  # the defaults of that release
        train_drafter(GOOD["features"], folder / "out", GOOD["verifier"], "eagle3", resume_from_checkpoint=True, **args)

    return resume


def state(name, change):
    "Change what a file of a checkpoint holds."

    def spoil(checkpoint):
        held = torch.load(checkpoint / name, weights_only=False)
        change(held)
        torch.save(held, checkpoint / name)

    return spoil


def not_finite(held):
    next(iter(held["state"].values()))["exp_avg"].view(-1)[0] = float("nan")


def converted(name):
    "Convert a foreign drafter with one number in the place of a tensor."

    def convert(folder):
        from speculators_nb.models.convert import convert, export_native

        export_native(GOOD["drafter"], folder / "native", verifier=GOOD["verifier"])
        file = folder / "native/model.safetensors"
        save_file(load_file(file) | {name: torch.tensor(1.0)}, file)
        convert(folder / "native", folder / "new", GOOD["verifier"])

    return convert


def unknown(folder):
    from speculators_nb.models.convert import convert, export_native

    export_native(GOOD["drafter"], folder / "native", verifier=GOOD["verifier"])
    convert(folder / "native", folder / "new", GOOD["verifier"], config={"norm_before_residul": True})


def with_weight(value):
    "A verifier with one weight of another value."

    def write(path):
        shutil.copytree(GOOD["tiny"], path)
        file = path / "model.safetensors"
        state = load_file(file)
        name = next(n for n, w in sorted(state.items()) if n.endswith("k_proj.weight") and w.numel() >= 8192)
        state[name].view(-1)[1] = value
        save_file(state, file, {"format": "pt"})

    return write


TEMPLATES = {
    "not closed": ("{% for m in messages %}", "TemplateSyntaxError: Unexpected end"),
    "what is not there": ("{{ nobody(messages) }}", "UndefinedError: 'nobody' is undefined"),
    "a class": ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    "a division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
}
TALKS = {"talks.jsonl": TALK, "held.jsonl": TALK}
CASES = [
    *(
        Case(
            f"a chat template: {name}",
            "prepare {here}/talks.jsonl {here}/out --verifier {here}/new",
            f"no row left of 1 conversations .*the chat template of .*new fails: {said}",
            TALKS | {"new": copied(GOOD["tiny"], chat_template__jinja=text)},
        )
        for name, (text, said) in TEMPLATES.items()
    ),
    *(
        Case(
            f"{line.split()[0]}: a chat template that says nothing of the question",
            line,
            (
                "verifier '.*new': its chat template leaves out what a person says, it renders '{}'; take the "
                "chat_template.jinja"
            ),
            TALKS
            | {
                "drafter": copied(GOOD["tiny"].parent / "tiny-drafter"),
                "new": copied(GOOD["tiny"], chat_template__jinja="{}"),
            },
        )
        for line in (
            "prepare {here}/talks.jsonl {here}/out --verifier {here}/new",
            "regenerate {here}/talks.jsonl {here}/a.jsonl --verifier {here}/new",
            "evaluate {here}/drafter {here}/talks.jsonl --verifier {here}/new --max-new-tokens 2",
        )
    ),
    Case(
        "verifier: a config of 6 GB",
        "regenerate {here}/talks.jsonl {here}/a.jsonl --verifier {here}/new",
        "new/generation_config.json: has 6,442,450,944 bytes",
        TALKS | {"new": copied(GOOD["tiny"], generation_config__json=zeros(6 << 30))},
    ),
    Case(
        "demo: a chat template",
        DEMO,
        "verifier='.*new': answered no conversation of .*talks.jsonl .*ZeroDivisionError",
        TALKS | {"new": copied(GOOD["tiny"], chat_template__jinja="{{ 1 // 0 }}")},
    ),
    *(
        Case(
            f"{name}: a tokenizer of another kind",
            line,
            "new: its tokenizer cannot be read: .*",
            TALKS | {"new": copied(GOOD["tiny"], tokenizer__json='{"model": []}')},
        )
        for name, line in {
            "prepare": "prepare {here}/talks.jsonl {here}/out --verifier {here}/new",
            "demo": DEMO,
        }.items()
    ),
    Case(
        "prepare: 100,000 brackets for a tokenizer",
        "prepare {here}/talks.jsonl {here}/out --verifier {here}/new",
        "new: its tokenizer cannot be read: RecursionError",
        TALKS | {"new": copied(GOOD["tiny"], tokenizer__json='{"a":' * 100_000)},
    ),
    Case(
        "demo: a web page for conversations",
        DEMO,
        "held.jsonl.* not JSON",
        {"talks.jsonl": TALK, "held.jsonl": HTML, "new": copied(GOOD["tiny"])},
    ),
    *(
        Case(f"{line.split()[0]}: a read fails", line, "talks.jsonl: input/output error", {"talks.jsonl": memory})
        for line in (
            "prepare {here}/talks.jsonl {here}/out --verifier {tiny}",
            "features {here}/talks.jsonl {here}/out --verifier {tiny}",
            "regenerate {here}/talks.jsonl {here}/out.jsonl --verifier {tiny}",
        )
    ),
    Case(
        "export: a read of the verifier fails",
        "export {drafter} {here}/out --verifier {here}/new",
        "new/generation_config.json: input/output error",
        {"new": copied(GOOD["verifier"], generation_config__json=memory)},
    ),
    *(
        Case(
            f"{line.split()[0]}: begins with zeros",
            line,
            "talks.jsonl, line 1: begins with zero bytes, expected text",
            {"talks.jsonl": zeros(100 << 20)},
        )
        for line in (
            "prepare {here}/talks.jsonl {here}/out --verifier {tiny}",
            "regenerate {here}/talks.jsonl {here}/out.jsonl --verifier {tiny}",
        )
    ),
    Case(
        "regenerate: no conversation",
        "regenerate {here}/talks.jsonl {here}/out.jsonl --verifier {tiny}",
        "data='.*talks.jsonl': holds no conversation; name a file",
        {"talks.jsonl": "\n"},
    ),
    *(
        Case(
            f"{line.split()[0]}: no conversation",
            line,
            "no row left of 0 conversations \\(there were none in '.*talks.jsonl'",
            {"talks.jsonl": ""},
        )
        for line in (
            "prepare {here}/talks.jsonl {here}/out --verifier {tiny}",
            "features {here}/talks.jsonl {here}/out --verifier {tiny}",
        )
    ),
    Case(
        "evaluate: a huge config",
        "evaluate {here}/new {corpus}",
        "new/config.json: has 6,442,450,944 bytes, and a file of this kind at most",
        {"new": copied(GOOD["drafter"], config__json=zeros(6 << 30))},
    ),
    Case(
        "regenerate: a field of another type",
        "regenerate {here}/talks.jsonl {here}/out.jsonl --verifier {here}/new",
        "verifier '.*new': transformers cannot build it from its config.json .*TypeError",
        TALKS
        | {
            "new": copied(
                GOOD["tiny"],
                config__json=config(GOOD["tiny"], rope_parameters={"rope_type": "default", "rope_theta": {}}),
            )
        },
    ),
    *(
        Case(
            f"read_features: {name}",
            lambda folder: read_features(folder / "hs_0.safetensors"),
            expect,
            {"hs_0.safetensors": feature(token_ids=ids)},
        )
        for name, ids, expect in (
            (
                "one number for the tokens",
                torch.tensor(3),
                "hs_0.safetensors: token_ids \\[\\] of torch.int64, expected whole numbers",
            ),
            ("tokens in two axes", torch.zeros(3, 1, dtype=torch.long), "hs_0.safetensors: token_ids \\[3, 1\\]"),
            (
                "tokens in halves",
                torch.full((3,), 0.5),
                "hs_0.safetensors: token_ids \\[3\\] of torch.float32, expected whole numbers",
            ),
        )
    ),
    *(
        Case(
            f"resume: {name} without {key}",
            resumed(state(name, lambda held, key=key: held.pop(key))),
            (
                f"cannot resume from .*checkpoint-2: .*{name.split('_')[0].split('.')[0]}.* cannot be read, or is of "
                "another run .*resume from an older"
            ),
        )
        for name, key in (("optimizer.pt", "param_groups"), ("rng_state.pth", "numpy"))
    ),
    Case(
        "resume: weights with one tensor less",
        resumed(
            lambda c: save_file(
                {n: w for n, w in load_file(c / "model.safetensors").items() if n != "norm.weight"},
                c / "model.safetensors",
            )
        ),
        "checkpoint '.*checkpoint-2' misses tensors: norm.weight",
    ),
    Case(
        "resume: a weight that is not finite",
        resumed(
            lambda c: save_file(
                load_file(c / "model.safetensors") | {"norm.weight": torch.full((16,), torch.nan)},
                c / "model.safetensors",
            )
        ),
        "checkpoint '.*checkpoint-2': tensor norm.weight holds NaN or infinity",
    ),
    *(
        Case(
            f"resume: a state whose {name} is {value!r}",
            resumed(
                lambda c, name=name, value=value: (c / "trainer_state.json").write_text(
                    json.dumps(json.loads((c / "trainer_state.json").read_text()) | {name: value})
                )
            ),
            f"checkpoint-2/trainer_state.json: {name}=.* is of another type; take an older checkpoint",
        )
        for name, value in (
            ("stateful_callbacks", True),
            ("log_history", {}),
            ("global_step", "2"),
            ("max_steps", True),
        )
    ),
    Case(
        "resume: a state without a step",
        resumed(lambda c: (c / "trainer_state.json").write_text("{}")),
        "checkpoint-2/trainer_state.json: has no global_step",
    ),
    Case(
        "resume: a state that is cut off",
        resumed(lambda c: (c / "trainer_state.json").write_text("{")),
        "checkpoint-2/trainer_state.json: not JSON",
    ),
    Case(
        "resume: weights that are something else",
        resumed(lambda c: (c / "model.safetensors").write_text("{}")),
        "holds a drafter and no complete checkpoint .*model.safetensors: not a complete safetensors file",
    ),
    Case(
        "train: an output that is no UTF-8",
        "train {features} {here}/'bad\udcff' --verifier {verifier}",
        "output_dir='.*bad.udcff': is no UTF-8, .*name another place",
    ),
    Case(
        "resume: an optimizer's state that is not finite",
        resumed(state("optimizer.pt", not_finite)),
        "cannot resume from .*checkpoint-2: optimizer.pt holds values that are not finite; resume from an older",
    ),
    *(
        Case(f"compare: {name}", "compare {here}/run", expect, evaluation(**tables))
        for name, tables, expect in (
            ("no row", {"summary": SUMMARY.splitlines()[0] + "\n"}, "run/summary.csv: has no row; evaluate again"),
            (
                "a short row",
                {"positions": POSITIONS.replace("0.5,0.7,2,1\n", "\n")},
                "run/positions.csv, row 2: (unconditional|k)=nan is no number",
            ),
            (
                "a word for a number",
                {"summary": SUMMARY.replace("3.0", "abc")},
                "run/summary.csv, row 1: mean_length=abc is no number of at least 0",
            ),
            ("a negative length", {"summary": SUMMARY.replace("3.0", "-1")}, "run/summary.csv, row 1: mean_length=-1"),
            (
                "an infinite length",
                {"summary": SUMMARY.replace("3.0", "inf")},
                "run/summary.csv, row 1: mean_length=inf",
            ),
            (
                "no column",
                {"positions": POSITIONS.replace("unconditional,", "x,")},
                "run/positions.csv: has no column unconditional",
            ),
            (
                "no position",
                {"positions": POSITIONS.splitlines()[0] + "\n"},
                "run/positions.csv: has no row; evaluate again",
            ),
            ("an empty table of positions", {"positions": ""}, "run/positions.csv: is no table"),
            ("a run without a drafter", {"summary": "\n"}, "run/summary.csv: nothing was drafted in this run"),
        )
    ),
    Case(
        "compare: requests that are a pipe",
        "compare {here}/run",
        "run/requests.jsonl: no such file; evaluate again",
        evaluation() | {"run/requests.jsonl": os.mkfifo},
    ),
    Case(
        "compare: requests that are cut off",
        "compare {here}/run",
        "run/requests.jsonl: not one request a line .*evaluate again",
        evaluation() | {"run/requests.jsonl": '{"a": 1'},
    ),
    Case(
        "compare: a table without counts",
        "compare {here}/run",
        "run/summary.csv: has no column steps; evaluate again",
        evaluation(summary=SUMMARY.replace(",steps", "").replace(",3\n", "\n")),
    ),
    *(
        Case(
            f"serve: a dtype {name}",
            "serve {here}/drafter --verifier {here}/new",
            said,
            {
                "new": copied(GOOD["tiny"]),
                "drafter": copied(
                    GOOD["drafter"],
                    config__json=lambda file, value=value: file.write_text(
                        json.dumps(json.loads((Path(GOOD["drafter"]) / "config.json").read_text()) | {"dtype": value})
                    ),
                ),
            },
        )
        for name, value, said in (
            ("that is a list", [], "config.json: dtype=\\[\\]: must be text"),
            ("that torch does not know", "float33", "config.json: dtype='float33': is no dtype of torch"),
        )
    ),
    *(
        Case(
            f"prepare: a template that {name}",
            "prepare {here}/talks.jsonl {here}/out --verifier {here}/new",
            f"the chat template of .*new calls itself without end or makes a text without end.*{error}",
            TALKS | {"new": copied(GOOD["tiny"], chat_template__jinja=template)},
        )
        for name, template, error in (
            ("calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
            ("multiplies text", "{{ 'x' * 10**15 }}", "MemoryError"),
        )
    ),
    *(
        Case(
            f"train: {name}",
            "train {here}/features {here}/d --verifier {verifier}",
            expect,
            {"features": copied(GOOD["features"], **{f"rows/{file}": content})},
        )
        for name, file, content, expect in (
            (
                "a table that links to itself",
                "data-00000-of-00001__arrow",
                lambda file: file.symlink_to(file.name),
                "features/rows/data-00000-of-00001.arrow: no such file, and state.json names it",
            ),
            (
                "a table that is a pipe",
                "data-00000-of-00001__arrow",
                os.mkfifo,
                "features/rows/data-00000-of-00001.arrow: no such file, and state.json names it",
            ),
            (
                "a list of the table's files that fails when read",
                "state__json",
                memory,
                "features/rows/state.json: input/output error",
            ),
        )
    ),
    Case(
        "train: nothing is saved, and the best is kept",
        "train {features} {here}/d --verifier {verifier} --eval-share 0.5 --extra save_strategy=no",
        (
            "save_strategy='no': the checkpoint of the best evaluation is kept, with eval_share=0.5 .*save as often "
            "as you evaluate"
        ),
    ),
    Case(
        "evaluate: no conversation, counted as an engine counts",
        "evaluate {here}/drafter {here}/talks.jsonl --verifier {tiny} --as-engine",
        "talks.jsonl: no prompts; is the source empty",
        {"talks.jsonl": "", "drafter": copied(GOOD["tiny"].parent / "tiny-drafter")},
    ),
    Case(
        "features: weights that cannot be mapped",
        "features {here}/talks.jsonl {here}/out --verifier {here}/new",
        "verifier '.*new': its weights cannot be read",
        TALKS | {"new": copied(GOOD["tiny"], model__safetensors=memory)},
    ),
    Case(
        "train: heads that no layer has",
        "train {features} {here}/d --verifier {here}/new",
        "no llama layers fit a verifier of hidden_size=16 and num_attention_heads=32, as in its config.json",
        {
            "new": copied(
                GOOD["verifier"], config__json=config(GOOD["verifier"], num_attention_heads=32, num_key_value_heads=1)
            )
        },
    ),
    Case(
        "serve: a drafter of no algorithm",
        "serve {here}/drafter --verifier {verifier}",
        "config.json: speculators_model_type='': is empty; write something like",
        {"drafter": copied(GOOD["drafter"], config__json=config(GOOD["drafter"], speculators_model_type=""))},
    ),
    Case(
        "evaluate: an end that is no token",
        "evaluate {drafter} {corpus} --verifier {here}/new",
        "config.json: eos_token_id=-10+: must be",
        {"new": copied(GOOD["tiny"], config__json=config(GOOD["tiny"], eos_token_id=-(10**30)))},
    ),
    *(
        Case(
            f"evaluate: a chat template {name}",
            "evaluate {here}/drafter {here}/talks.jsonl --verifier {here}/new --max-new-tokens 2",
            "verifier '.*new': its chat template fails .*give it one",
            TALKS
            | {
                "drafter": copied(GOOD["tiny"].parent / "tiny-drafter"),
                "new": copied(GOOD["tiny"], chat_template__jinja=put),
            },
        )
        for name, put in (("that is a folder", Path.mkdir), ("that divides", "{{ 1 // 0 }}"))
    ),
    Case(
        "resume: a config that is cut off",
        resumed(lambda c: (c / "config.json").write_text('{"a": 1')),
        "checkpoint-2/config.json: ",
    ),
    Case(
        "stitch-mtp: a verifier without tensors",
        "stitch-mtp {here}/drafter {here}/out --verifier {here}/new",
        "new: its weights hold no norm.weight, so this is no language model",
        {
            "drafter": copied(RELEASE / "mtp"),
            "new": lambda path: (copied(GOOD["verifier"])(path), save_file({}, path / "model.safetensors")),
        },
    ),
    Case(
        "convert: a misspelt field",
        unknown,
        "config=.*: eagle3 has no field 'norm_before_residul'. Did you mean norm_before_residual",
    ),
    *(
        Case(
            f"convert: one number for {name}",
            converted(name),
            "a tensor or a field has another shape or type than in the format eagle3.*fetch the checkpoint again",
        )
        for name in ("fc.weight", "t2d", "d2t")
    ),
    *(
        Case(
            f"features: one weight of {value}",
            "features {here}/talks.jsonl {here}/out --verifier {here}/new",
            "verifier '.*new': NaN or infinity in model.layers.0.self_attn.k_proj.weight",
            TALKS | {"new": with_weight(value)},
        )
        for value in (torch.nan, -torch.inf)
    ),
    Case(
        "features: a weight that is too great",
        "features {here}/talks.jsonl {here}/out --verifier {here}/new",
        "hs_0.safetensors: the verifier's states are not finite .*; look for damaged weights in .*new, or",
        TALKS | {"new": with_weight(3e38)},
    ),
    *(
        Case(f"serve: {line}", "serve {drafter} " + line, expect)
        for line, expect in (
            ("--host 1.5", "host='1.5': is no address to listen on; write something like 127.0.0.1"),
            ("--host 300.1.1.1", "host='300.1.1.1': is no address"),
            ("--host ::g", "host='::g': is no address"),
            ("--extra max_num_seqs=8", "extra='max_num_seqs=8': is no argument of vllm serve; write --name=value"),
            ("--extra=--max-num-seqs=8 --extra 9", "extra='9': is no argument of vllm serve"),
        )
    ),
]
