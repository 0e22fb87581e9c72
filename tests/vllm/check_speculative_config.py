#!/usr/bin/env python
"""Ask vLLM's own SpeculativeConfig what it accepts, and write the answers down.

    .venv-vllm/bin/python tests/vllm/check_speculative_config.py            compare with the record; fails where vLLM
    answers otherwise
    .venv-vllm/bin/python tests/vllm/check_speculative_config.py --record   write
    tests/fixtures/speculative_config_vllm_VERSION.json again
    .venv-vllm/bin/python tests/vllm/check_speculative_config.py --wheel 0.33.0   the class of another vLLM: its wheel
    is downloaded (0.3 GB), and its Python files are read without their kernels, beside the packages of .venv-vllm
    .venv-vllm/bin/python tests/vllm/check_speculative_config.py --draw 300 --seed 5   others, once, without a record

`speculative_dictionaries.py` has the dictionaries, right and wrong: written ones, a strategy that draws others, and the
models that they name (a config.json each, no weights, for vLLM builds no engine here). The record holds for each of
them whether vLLM accepts it, and what it makes of it; the drawn ones are kept in it, with their seed.
tests/test_speculative_config.py feeds the same dictionaries to our class and compares it with the record, so that it
needs no vLLM. Recorded too: what vLLM makes of every row of our MTP table, and the words that its fields can have. Then
vLLM is given the JSON that our class emits for every dictionary that it accepts, and must make the same of it (.venv
draws and emits). The suffix cases need arctic-inference only to run: here vLLM is told that it is there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from speculative_dictionaries import (
    CASES,
    ROOT,
    VERIFIER,
    drawn,
    explained,
    mtp_config,
    place,
    resolved,
    rows_of,
    write_models,
)

RECORDS = {version: ROOT / f"tests/fixtures/speculative_config_vllm_{version}.json" for version in ("0.32", "0.33")}


def read_wheel(version):
    """The Python files of a vLLM that cannot be installed here; a folder for PYTHONPATH."""
    folder = ROOT / f".venv-vllm/vllm-{version}"
    if (folder / "vllm").is_dir():
        return folder
    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps", "-d", tmp]
        subprocess.run([*pip, f"vllm=={version}"], check=True)
        with zipfile.ZipFile(next(Path(tmp).glob("vllm-*.whl"))) as wheel:
            wheel.extractall(tmp, [name for name in wheel.namelist() if name.endswith(".py")])
        # vLLM takes the platform from the name of its version
        named = Path(tmp) / f"vllm-{version}+cpu.dist-info"
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        folder.mkdir(exist_ok=True)
        for part in (named, Path(tmp) / "vllm"):  # the package last: it says that all is there
            shutil.move(part, folder / part.name)
    return folder


def in_environment_of_wheel(version):
    """Run this program again, unless it already imports the Python files of that wheel."""
    folder = str(read_wheel(version))
    if os.environ.get("PYTHONPATH") != folder:
        os.environ["PYTHONPATH"] = folder
        os.execv(sys.executable, [sys.executable, *sys.argv])


def ours(case, folder, engine_version):
    """Our class's config of a dictionary."""
    from speculators_nb.serve.speculative_config import SpeculativeConfig

    fields, target, devices = place(case, folder)
    return SpeculativeConfig(
        **fields,
        target_model_config=target,
        target_parallel_config=dict(tensor_parallel_size=devices),
        engine_version=engine_version,
    )


def our_answer(case, folder, engine_version):
    """Runs inside .venv: what our class makes of a dictionary, in the form of the record, and the JSON it emits."""
    try:
        config = ours(case, folder, engine_version)
    except ValueError as e:
        return dict(accepted=False, error=str(e))
    lengths = config.draft_max_model_len, config.num_lookahead_tokens
    values = resolved(config, folder, config.verification, *lengths, engine_version)
    try:
        emitted = json.loads(config.to_json(engine_version))
    except ValueError:
        emitted = None
    return dict(accepted=True, values=values, hash=config.compute_hash()[:8], emitted=emitted)


def disagreement(case, said, answer):
    """None, "accept", "refuse" or "values": how our answer differs from vLLM's."""
    if said["accepted"] != answer["accepted"]:
        return "accept" if answer["accepted"] else "refuse"
    if said["accepted"] and said["values"] != answer["values"]:
        return "values"
    return None


def ask_vllm(folder, cases, given=None):
    """What vLLM makes of each dictionary, or of the fields given in its place, with the case's target and devices."""
    import vllm.config.speculative as module
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.model_executor.models import registry

    module.has_arctic_inference = lambda: True
    registry._run_in_subprocess = lambda inspect: inspect()  # a process for each architecture takes minutes
    targets, graphs, answers = {}, {}, []
    for i, case in enumerate(cases):
        fields, target, devices = place(case, folder)
        fields = fields if given is None else given[i]
        if target not in targets:
            targets[target] = ModelConfig(model=target, tokenizer=str(VERIFIER), dtype="float32")
        parallel = ParallelConfig()
        parallel.tensor_parallel_size = devices
        try:
            c = module.SpeculativeConfig(**fields, target_model_config=targets[target], target_parallel_config=parallel)
        except Exception as e:  # vLLM refuses with several classes
            message = str(e).split(" [type=")[0]  # behind it pydantic repeats the input
            answers.append(dict(accepted=False, error=message.replace(folder, "").replace(str(ROOT), "")[:200]))
            continue
        draft = None if c.method in WITHOUT_DRAFT else c.draft_model_config
        longest = draft and draft.max_model_len
        lookahead = draft and getattr(draft.hf_config, "num_lookahead_tokens", None)
        values = resolved(c, folder, c.rejection_sample_method, longest, lookahead, line_of_vllm())
        # the hash itself is another in every folder: which configs share one is what counts
        graph = graphs.setdefault(c.compute_hash(), len(graphs))
        answers.append(dict(accepted=True, values=values, hash=graph))
    return answers


def line_of_vllm():
    """The release line of the vLLM that is imported, e.g. 0.33."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class")


def ask_mtp(words):
    """{word: [MTP type, tokens], or None where vLLM finds none}: what it makes of a verifier with such a model_type or
    architecture."""
    from transformers import PretrainedConfig
    from vllm.config.speculative import SpeculativeConfig

    def made(fields):
        kind = fields.pop("model_type")
        for part in ("text_config", "decoder"):
            if part in fields:
                fields[part] = made(fields[part])
        config = PretrainedConfig(**fields)
        config.model_type = kind
        return config

    said = {}
    for word in words:
        config = SpeculativeConfig.hf_config_override(made(mtp_config(word)))
        said[word] = [config.model_type, config.n_predict] if hasattr(config, "n_predict") else None
    return said


def ask_words():
    """The words that some fields can have."""
    from typing import get_args

    from vllm.config.cache import CacheDType
    from vllm.config.kernel import MoEBackend
    from vllm.config.load import LoadConfig
    from vllm.model_executor.layers.quantization import DEPRECATED_QUANTIZATION_METHODS, QuantizationMethods
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return dict(
        ATTENTION_BACKENDS=sorted(AttentionBackendEnum.__members__),
        KV_CACHE_DTYPES=sorted(get_args(CacheDType)),
        MOE_BACKENDS=sorted(get_args(MoEBackend)),
        QUANTIZATIONS=sorted({*get_args(QuantizationMethods)} - {*DEPRECATED_QUANTIZATION_METHODS}),
        LOAD_FIELDS=sorted(LoadConfig.__dataclass_fields__),
        drafts=sorted(_SPECULATIVE_DECODING_MODELS),
    )


def mtp_words():
    """All words of our table; runs inside .venv."""
    from speculators_nb.serve.vllm_methods import MTP_FAMILIES

    return [word for family in MTP_FAMILIES for word in family.words]


def in_our_environment(*arguments):
    """What this script prints inside .venv, given these arguments."""
    command = [ROOT / ".venv/bin/python", "-W", "ignore", __file__, *map(str, arguments)]
    environment = os.environ | dict(PYTHONPATH=str(ROOT))  # without the folder of a wheel
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


def compare(folder, cases):
    """vLLM's answers, ours, and where they differ for no reason of the table."""
    dictionaries = Path(folder) / "dictionaries.json"
    dictionaries.write_text(json.dumps(cases))
    ours = in_our_environment("--ours", folder, dictionaries, line_of_vllm())
    theirs = ask_vllm(folder, cases)
    unexplained = []
    for case, said, answer in zip(cases, theirs, ours):
        how = disagreement(case, said, answer)
        if how and not explained(case, how):
            unexplained.append(f"{how} {case}\n  vLLM: {said}\n  ours: {answer}")
    emitting = [(c, s, a) for c, s, a in zip(cases, theirs, ours) if a.get("emitted") and not is_elsewhere(c)]
    again = ask_vllm(folder, [c for c, _, _ in emitting], [a["emitted"] for _, _, a in emitting])
    for (case, said, answer), read in zip(emitting, again):
        same = read["accepted"] and (not said["accepted"] or rows_of(case) or read["values"] == said["values"])
        if not same:
            unexplained.append(f"emitted {case}\n  {answer['emitted']}\n  vLLM makes of it: {read}\n  before: {said}")
    return theirs, ours, unexplained, len(emitting)


def is_elsewhere(case):
    """Whether no JSON helps: the model is on no machine that this one can reach, or vLLM's own class has no head."""
    return "models of other machines" in rows_of(case) or case.get("target") == "llama-mtp"


def as_text(record):
    """The record as JSON, a line for each answer."""
    lines = []
    for part, value in record.items():
        if isinstance(value, dict):
            rows = [f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in value.items()]
            lines.append(f" {json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n }")
        elif isinstance(value, list):
            rows = [f"  {json.dumps(row, sort_keys=True)}" for row in value]
            lines.append(f" {json.dumps(part)}: [\n" + ",\n".join(rows) + "\n ]")
        else:
            lines.append(f" {json.dumps(part)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="write the record again")
    parser.add_argument("--draw", type=int, metavar="N", help="draw N other dictionaries; with --record they are kept")
    parser.add_argument("--seed", type=int, default=0, help="of --draw")
    parser.add_argument("--wheel", metavar="VERSION", help="of this vLLM, whose wheel is downloaded")
    parser.add_argument("--ours", nargs=3, metavar=("FOLDER", "FILE", "VERSION"), help="(it calls itself so)")
    parser.add_argument("--print-words", action="store_true", help="print the words of our MTP table (as above)")
    parser.add_argument("--print-drawn", nargs=3, metavar=("N", "SEED", "VERSION"), help="print them (as above)")
    args = parser.parse_args()
    if args.ours:
        folder, file, version = args.ours
        cases = json.loads(Path(file).read_text())
        return print(json.dumps([our_answer(case, folder, version) for case in cases]))
    if args.print_words:
        return print(json.dumps(mtp_words()))
    if args.print_drawn:
        number, seed, version = args.print_drawn
        return print(json.dumps(drawn(int(number), int(seed), version)))
    if args.wheel:
        in_environment_of_wheel(args.wheel)
    import vllm

    record = RECORDS[line_of_vllm()]
    recorded = json.loads(record.read_text()) if record.exists() else {}
    others, seed = recorded.get("drawn", []), recorded.get("seed")
    if args.draw:
        drawn_cases = in_our_environment("--print-drawn", args.draw, args.seed, line_of_vllm())
        others, seed = [dict(case=c) for c in drawn_cases], args.seed
    written = {} if args.draw and not args.record else CASES
    cases = [*written.values(), *(row["case"] for row in others)]
    with tempfile.TemporaryDirectory() as folder:
        write_models(folder)
        theirs, ours, unexplained, emitted = compare(folder, cases)
    accepted = sum(said["accepted"] for said in theirs)
    differing = sum(bool(disagreement(*row)) for row in zip(cases, theirs, ours))
    print(
        f"vLLM {vllm.__version__}: {accepted} dictionaries accepted, {len(cases) - accepted} refused; ours agrees on "
        f"{len(cases) - differing}, {differing - sum(u[:7] != 'emitted' for u in unexplained)} differ as the table "
        f"says; {emitted} emitted by ours"
    )
    if unexplained:
        sys.exit("not as the table of differences says:\n" + "\n".join(unexplained))
    if args.draw and not args.record:
        return None
    answer = dict(
        version=vllm.__version__,
        seed=seed,
        words=ask_words(),
        mtp=ask_mtp(in_our_environment("--print-words")),
        cases=dict(zip(CASES, theirs)),
        drawn=[dict(case=c["case"], said=said) for c, said in zip(others, theirs[len(CASES) :])],
    )
    answer = json.loads(json.dumps(answer))
    if args.record:
        record.write_text(as_text(answer))
        return print("recorded")
    if answer != recorded:
        parts = [part for part in answer if answer[part] != recorded.get(part)]
        sys.exit(f"vLLM answers otherwise than recorded (--record writes it again): {', '.join(parts)}")
    return print("as recorded")


if __name__ == "__main__":
    os.environ |= dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    main()
