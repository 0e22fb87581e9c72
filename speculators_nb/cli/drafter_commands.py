"""The commands `train`, `evaluate`, `calibrate`, `compare` and `experiment` as functions.
They lead from a folder of features to a drafter, and to its acceptance here and in vLLM."""

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch

from ..core.checkpoints import hub_access
from ..core.config import SpeculatorModelConfig
from ..core.files import disk_errors, save_figure, writable_folder, write_object, write_text
from ..core.options import FILTERS, FIRST_CHOICE, NO_WEIGHTS, TRAINER_NAMES, check_options, pairs
from ..core.provenance import provenance_path, write_provenance
from ..data.prepared_folder import read_data_config
from ..decode.ngram import NgramDrafter
from ..decode.tree import Drafter
from ..evaluate.acceptance import Evaluation, measurable
from ..evaluate.acceptance import evaluate as measure
from ..evaluate.comparison import Comparison, compare_runs, evaluate_as_engine
from ..evaluate.engine import EngineEvaluation, drafter_name, evaluate_engine
from ..evaluate.prompts import encode_each, read_prompts
from ..evaluate.shared_prompts import evaluation_job
from ..evaluate.while_training import LENGTH, PROMPTS, decoded_acceptance, draft_length
from ..jobs.servers import one_or_several
from ..jobs.shared_output import one_writer
from ..lab.experiment import settings
from ..models.base import SpeculatorModel
from ..plan.requirements import check_step_memory
from ..regenerate.in_process import eos_ids_of
from ..serve.serve_command import read_config
from ..serve.speculative_config import SpeculativeConfig
from ..serve.vllm_methods import method_of_types
from ..train.train_drafter import train_drafter
from ..train.trainer import Measure, SpeculatorTrainer
from ..verifier.folders import (
    CALIBRATION,
    COMPARISON,
    EVALUATION,
    named_by,
    named_verifier,
    refuse_model,
    refuse_overwriting,
)
from ..verifier.identity import warn_of_other_weights
from ..verifier.tapped_model import Verifier
from .data_commands import device_of, open_verifier
from .inputs import check_confidence_head, check_features, named_runs, read_experiment_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..lab.grid import Experiment
else:
    Figure = Experiment = Any  # matplotlib is imported only to draw

KEPT = "checkpoints that are complete are kept, --resume continues from the newest"


# options of `train` that `train_drafter` does not take by their names, or not at all; and those that the record of a
# drafter names elsewhere, or that leave the drafter as it is. All others are passed on and recorded as they are.
PASSED_AS = TRAINER_NAMES | {"resume": "resume_from_checkpoint"}
NOT_TRAINERS = {"decode_prompts", "trust_remote_code", "extra"}
NOT_RECORDED = {"data_dir", "output_dir", "verifier", "from_pretrained", "storage", "patience", "overwrite"}


def train(
    data_dir: Path,  # features from `speculators-nb features` or upstream, or a prepared folder
    output_dir: Path,  # where the drafter, its history and its checkpoints go
    algorithm: str | None = None,  # dflash2, …; default: eagle3, or as from_pretrained
    verifier: str | None = None,  # folder or hub id; default: the one that made the features
    draft_arch: str | None = None,  # llama, qwen3, deepseek_v3; default: llama or algorithm's
    num_layers: int | None = None,  # how many it has; default: 1
    draft_vocab_size: int | None = None,  # most frequent tokens; default: all of the verifier's
    from_pretrained: Path | None = None,  # start from this drafter's weights, not fresh ones
    lora_rank: int | None = None,  # train an adapter (LoRA) of that rank, and leave its weights
    lora_alpha: float | None = None,  # of the adapter; default: twice its rank
    server: list[str] | str | None = None,  # vLLM making features in training (repeatable)
    storage: str | None = None,  # what serve --hidden-states names: a folder, as mounted here
    patience: float = 120.0,  # seconds to wait while none of several servers answers
    aux_layer_ids: list[int] | None = None,  # verifier layers (repeatable); default: features'
    eval_share: float | None = None,  # held-out share, 0: none; default: `prepare`'s, else 0.05
    on_bad: str = "raise",  # a sample whose features do not check: raise, or skip it
    num_train_epochs: float = 3.0,  # passes over the data
    total_seq_len: int = 2048,  # positions in a packed row; one row is one step on one device
    gradient_accumulation_steps: int = 1,  # rows in one optimizer step
    learning_rate: float | None = None,  # at the peak; default: 3e-3 for muon, 1e-4 for adamw
    optimizer: str = "muon",  # muon for hidden matrices and adamw for the rest, or adamw
    bf16: bool = False,  # compute in bfloat16 above float32 weights
    fsdp: bool = False,  # split weights and optimizer over the ranks (under torchrun)
    checkpoint_format: str = "full",  # or sharded: with --fsdp, each rank writes its part
    context_parallel_size: int = 1,  # ranks that share a row, by position (under torchrun)
    save_dtype: str | None = None,  # of the saved drafter, e.g. bfloat16; default: float32
    early_stopping_patience: int | None = None,  # evaluations without progress; default: never
    regenerate_every: int | None = None,  # epochs until the verifier answers anew; default: never
    decode_prompts: str | None = None,  # decode 8 at each evaluation: shipped, gsm8k, …; a file
    resume: bool = False,  # continue the run in output_dir from its newest complete checkpoint
    overwrite: bool = False,  # train anew in a folder that holds a drafter
    trust_features: bool = False,  # take features whose record does not fit the verifier
    seed: int = 0,  # of the initial weights and of everything random in training
    trust_remote_code: bool = False,  # run code that comes with the verifier
    extra: list[str] | None = None,  # others as name=value, also of own drafters (repeatable)
) -> SpeculatorTrainer:  # has run; its model is the best one, and is saved
    "Train a drafter on features, and keep the best checkpoint."
    options = dict(locals())
    check_features(data_dir, verifier)
    named = not verifier
    verifier = verifier or read_data_config(data_dir).get("model", {}).get("target_model_path")
    if not verifier:
        raise ValueError(f"verifier is missing: {data_dir} does not say which one made it")
    naming = partial(named_by, data_dir, verifier) if named else contextlib.nullcontext
    more = pairs(extra)
    options |= dict(verifier=verifier, aux_layer_ids=aux_layer_ids or None, extra=more)
    options["resume"] = more.pop("resume_from_checkpoint", resume)
    refuse_model(output_dir)  # also the verifier that the features name
    if from_pretrained is None:
        options["algorithm"] = algorithm = algorithm or FIRST_CHOICE
        options["draft_arch"] = draft_arch or settings(algorithm).get("draft_arch")
    with naming():
        check_step_memory(verifier, options)
    with disk_errors(output_dir, KEPT), hub_access(remote_code=trust_remote_code), one_writer(output_dir), naming():
        decoding: Measure | None = None  # acceptance on the first questions, at each evaluation
        if decode_prompts is not None:
            target, tokenizer = open_verifier(verifier)
            prompts = prompts_of(decode_prompts, tokenizer, PROMPTS)[0]
            decoding = decoded_acceptance(target, prompts, eos_token_ids=eos_ids_of(target, tokenizer))
        passed = {PASSED_AS.get(n, n): value for n, value in options.items() if n not in NOT_TRAINERS}
        trainer = train_drafter(**passed | more, measure=decoding)
    args = trainer.args
    # by the first rank; the record of a finished run stays
    if args.should_save and not (trainer.done and provenance_path(output_dir).is_file()):
        trained = dict(algorithm=trainer.model.config.speculators_model_type, learning_rate=args.learning_rate)
        options |= trained | dict(server=one_or_several(server))
        write_provenance(
            output_dir,
            "train",
            {name: value for name, value in options.items() if name not in NOT_RECORDED},
            dict(features=data_dir, verifier=verifier, from_pretrained=from_pretrained),
            steps=trainer.state.global_step,
            world_size=args.world_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )
    return trainer


def prompts_of(data: str | Path, tokenizer, max_samples: int | None = None) -> tuple[list, list[str] | None]:
    "The questions before the first answer, rendered for generation, and their domains; None: none is named."
    prompts = read_prompts(data, first=max_samples)
    domains = [prompt.domain for prompt in prompts]
    return encode_each(prompts, tokenizer), domains if set(domains) != {"all"} else None


class Contender(NamedTuple):
    "A drafter and its verifier, loaded."

    name: str  # in tables
    drafter: Drafter
    k: int  # tokens drafted a step
    verifier: str  # folder or hub id
    target: Verifier
    tokenizer: Any


def _load_checkpoint(drafter, options) -> Contender:
    "A drafter of this library, and the verifier that it was trained for."
    verifier, device = options["verifier"], options["device"]
    model = SpeculatorModel.from_pretrained(drafter, verifier=verifier).to(device_of(device))
    trained = model.drafter()
    named = not verifier
    verifier = verifier or named_verifier(read_config(drafter), drafter)
    k = options["k"][0] if options["k"] else draft_length(trained)
    name = model.config.speculators_model_type
    warn_of_other_weights(drafter, verifier)
    with named_by(drafter) if named else contextlib.nullcontext():
        target, tokenizer = open_verifier(
            verifier, trained.aux_layer_ids, device, attn_implementation=options["attn_implementation"]
        )
    return Contender(name, trained, k, verifier, target, tokenizer)


def _load_method(drafter, options) -> Contender:
    "The drafter of a method of vLLM. Errors: as of `SpeculativeConfig`."
    method, verifier, lengths = options["method"], options["verifier"], options["lengths"]
    config = SpeculativeConfig(
        method=method,
        model=drafter,
        num_speculative_tokens=lengths[0] if lengths else None,
        target_model_config=read_config(verifier) | {"_name_or_path": str(verifier)},
    )
    target, tokenizer = open_verifier(
        verifier, device=options["device"], attn_implementation=options["attn_implementation"]
    )
    trained = config.drafter(target)
    layers = list(trained.aux_layer_ids)
    name = drafter_name(drafter or verifier, dict(method=method))
    target = Verifier(target.model, layers or None)
    return Contender(name, trained, config.depth, verifier, target, tokenizer)


def _evaluate_vllm(drafter, data, options) -> EngineEvaluation:
    "Acceptance, throughput and latency in vLLM, which is started unless it runs."
    started: dict[str, Any] = {name: options[name] for name in ("verifier", "dtype", "max_model_len", "method")}
    started |= dict(extra=options["extra"] or (), k=options["lengths"])
    served = options["server"] or drafter or started.pop("verifier")  # a checkpoint or an address
    if options["server"]:
        started = dict(name=drafter and SpeculatorModelConfig.from_pretrained(drafter).speculators_model_type)
    warn_of_other_weights(drafter, options["verifier"])
    same = ("baseline", "max_new_tokens", "load", "seed", "output_dir", "vllm", *FILTERS)
    return evaluate_engine(
        served,
        read_prompts(data, first=options["max_samples"]),
        concurrency=options["concurrency"] or 1,
        temperatures=options["temperature"],
        **{name: options[name] for name in same},
        **started,
    )


def _evaluate_reference(drafter, data, options) -> Evaluation | EngineEvaluation:
    "Acceptance in the decoder of this library."
    load = _load_checkpoint if options["ours"] else _load_method
    name, trained, k, verifier, target, tokenizer = load(drafter, options)
    prompts, domains = prompts_of(data, tokenizer, options["max_samples"])
    drafters: dict[str, Any] = {name: trained}
    if options["ngram"]:
        drafters.setdefault("n-gram", NgramDrafter())
    sampled = "top_p", "top_k", "min_p", "max_new_tokens", "rule", "seed"
    given: dict[str, Any] = dict(k=k, temperatures=options["temperature"])
    given |= {name: options[name] for name in sampled}
    run = evaluate_as_engine
    if not options["as_engine"]:
        run, given["baseline"] = measure, options["baseline"]
    job = options["job"]
    evaluation = run(
        target,
        drafters,
        prompts,
        domains=domains,
        eos_token_ids=eos_ids_of(target, tokenizer),
        kv_cache=options["kv_cache"],
        decode=job.decode,
        **given,
    )

    def save():
        evaluation.save(output_dir)
        arguments = given | dict(as_engine=options["as_engine"], method=options["method"])
        origin = {"drafter": drafter, "verifier": verifier, "data": data}
        write_provenance(output_dir, "evaluate", arguments, origin, requests=len(prompts))

    if output_dir := options["output_dir"]:
        job.finish(save)
    return evaluation


def evaluate(
    drafter: str | None,  # folder or hub id; may be left out with a method, or a server
    data: str,  # prompts: shipped, mt-bench, gsm8k, …; or conversations: their first questions
    verifier: str | None = None,  # folder or hub id; default: what the drafter was trained for
    method: str | None = None,  # ngram, suffix, mtp, draft_model …; default: the drafter's
    output_dir: Path | None = None,  # for tables and pictures; default: they are only printed
    engine: str = "reference",  # reference, this library; vllm, with throughput and latency
    server: str | None = None,  # vllm: address of a running one; default: started for each k
    k: list[int] | None = None,  # tokens drafted a step (vllm: repeatable); default: as trained
    concurrency: list[int] | None = None,  # vllm: requests at once (repeatable); default: 1
    temperature: list[float] | None = None,  # of sampling (repeatable); default: 0 (greedy)
    top_p: float = 1.0,  # sample from the likeliest tokens that hold this mass; 1: from all
    top_k: int = 0,  # sample from so many likeliest tokens; 0: from all
    min_p: float = 0.0,  # drop tokens less likely than this share of the likeliest; 0: none
    max_samples: int | None = 32,  # prompts to use
    max_new_tokens: int = 64,  # tokens to write for each prompt
    ngram: bool = True,  # with reference: compare with n-gram lookup in the text so far
    as_engine: bool = False,  # with reference: count as vLLM does, comparable to the digit
    rule: str = "standard",  # with reference: acceptance rule
    baseline: bool = True,  # also without a drafter, for the speed-up; not with as_engine
    load: str = "requests",  # with vllm: what sends the load, requests or guidellm
    dtype: str = "auto",  # with vllm: dtype of weights and arithmetic; auto on a CPU: bfloat16
    max_model_len: int | None = None,  # vllm: longest prompt + output; default: model's limit
    vllm: str | None = None,  # the program; default: it is looked for, also in .venv-vllm
    extra: list[str] | None = None,  # vllm: a further argument of vllm serve (repeatable)
    seed: int = 0,  # of sampling and of the intervals
    device: str | None = None,  # with reference; default: the accelerator if there is one
    attn_implementation: str | None = None,  # with reference: eager, …; default: as it fits
    kv_cache: str = "dynamic",  # with reference: static, or graphs: on CUDA as CUDA graphs
    overwrite: bool = False,  # replace the evaluation in output_dir
) -> Evaluation | EngineEvaluation:  # tables, pictures
    "Measure how many drafted tokens the verifier accepts, at each position."
    options = dict(locals())
    check_options(options, "evaluate")
    if output_dir is not None:
        writable_folder(output_dir)
    refuse_overwriting(output_dir, overwrite, EVALUATION)
    kind = None if drafter is None or method is None else read_config(drafter).get("speculators_model_type")
    served = (method_of_types().get(str(kind)) or [None])[0]
    if kind and method != served:
        as_what = f"vLLM serves as method={served}" if served else "vLLM does not serve"
        raise ValueError(f"method={method!r}: {drafter} is a drafter of type {kind}, which {as_what}; leave method out")
    options["ours"] = method is None or kind is not None
    options["k"] = [k] if isinstance(k, int) else list(k or ())
    # None: the checkpoint's own
    options["lengths"] = options["k"] or ([LENGTH] if method in (*NO_WEIGHTS, "draft_model") else None)
    options["temperature"] = tuple(temperature or (0.0,))
    run = _evaluate_vllm if engine == "vllm" else _evaluate_reference
    with evaluation_job(output_dir, options) as options["job"]:
        return run(drafter, data, options)


def _save(path: Path, table: str, figure: Figure):
    "A table and its picture, as path.csv and path.png."
    write_text(path.with_suffix(".csv"), table)
    save_figure(path.with_suffix(".png"), figure)


def calibrate(
    drafter: str,  # folder or hub id, with a confidence head
    data: str,  # prompts that it was not trained on, as of evaluate
    output_dir: Path,  # for calibration.json, which SGLang reads, and calibration.png
    verifier: str | None = None,  # folder or hub id; default: what the drafter was trained for
    temperature: float = 1.0,  # of sampling: that of the requests to be served; 0: greedy
    max_samples: int | None = 100,  # prompts to use
    max_new_tokens: int = 128,  # tokens to write for each prompt
    seed: int = 0,  # of sampling
    device: str | None = None,  # default: the accelerator if there is one
    overwrite: bool = False,  # replace the calibration in output_dir
) -> pd.DataFrame:  # a row for each position
    "Fit temperatures that make the confidences of a drafter's head honest, one for each position."
    options = dict(locals())
    check_options(options, "calibrate")
    check_confidence_head(drafter, read_config(drafter))
    from ..evaluate.calibration import (  # here: matplotlib
        all_accepted,
        calibration_file,
        fit_temperatures,
        plot_reliability,
        record_confidences,
        survival,
        within_text,
    )

    writable_folder(output_dir)
    refuse_overwriting(output_dir, overwrite, CALIBRATION)
    loaded = _load_checkpoint(drafter, options | dict(k=None, attn_implementation=None))
    trained: Any = loaded.drafter
    prompts = prompts_of(data, loaded.tokenizer, max_samples)[0]
    prompts = [prompts[i] for i in measurable(loaded.target, prompts)[0]]
    sampling: dict[str, Any] = dict(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    steps = record_confidences(
        loaded.target,
        trained.model.drafter(confidence_threshold=0.0),
        prompts,
        loaded.k,
        eos_token_ids=eos_ids_of(loaded.target, loaded.tokenizer),
        **sampling,
    )
    temperatures = fit_temperatures(steps.logits, steps.accepted, steps.written)
    found = calibration_file(steps, temperatures, str(data))
    known = within_text(steps.accepted, steps.written, loaded.k)
    forecasts = {
        "uncalibrated": survival(steps.logits, torch.ones_like(temperatures))[known],
        "calibrated": survival(steps.logits, temperatures)[known],
    }
    figure = plot_reliability(forecasts, all_accepted(steps.accepted, loaded.k)[known])
    write_object(Path(output_dir) / "calibration.json", found)
    save_figure(Path(output_dir) / "calibration.png", figure)
    origin = {"drafter": drafter, "verifier": loaded.verifier, "data": data}
    write_provenance(output_dir, "calibrate", sampling, origin, requests=len(prompts))
    columns = {name: found[name] for name in ("temperatures", "ece_before", "ece_after")}
    return pd.DataFrame(columns, pd.RangeIndex(1, loaded.k + 1, name="position")).reset_index()


def compare(
    runs: list[str],  # folders of evaluations, all in process or none; or name=folder
    output_dir: Path | None = None,  # for comparison.csv, comparison.png; default: only printed
    overwrite: bool = False,  # replace the comparison in output_dir
) -> Comparison:  # `table()`, `plot()`
    "Put evaluations side by side: acceptance at each position, length, throughput and latency."
    check_options(locals(), "compare")
    refuse_overwriting(output_dir, overwrite, COMPARISON)
    folders = named_runs(runs)
    found = compare_runs(folders)
    if output_dir is not None:
        _save(Path(output_dir) / "comparison", found.table().to_csv(index=False), found.plot())
        write_provenance(output_dir, "compare", dict(runs=runs), folders)
    return found


def experiment(
    file: Path,  # YAML or JSON: settings or a grid of training options, seeds, features
    output_dir: Path | None,  # for runs, table, picture, page; default: output/, FILE's name
) -> Experiment:  # finished runs
    """Train settings with several seeds, on the shipped data or on features of your own, and compare them:
    differences with intervals, and a page of all runs. Run it again to continue."""
    check_options(locals(), "experiment")
    from ..lab.experiment_page import write_runs_page  # here: matplotlib and ipywidgets
    from ..lab.grid import announce, grid
    from ..lab.grid import experiment as run_all

    what = read_experiment_file(file)
    folder = Path(output_dir or Path("output") / Path(file).stem)
    contenders = what.settings or grid(what.algorithm, **what.factors)
    with disk_errors(folder, "finished runs are kept, the same command continues"):
        found = run_all(folder, contenders, after_each=announce(folder), **what.given, **what.common)
        _save(folder / "experiment", found.table().to_csv(), found.plot())
        write_runs_page(folder, found=found)
    return found
