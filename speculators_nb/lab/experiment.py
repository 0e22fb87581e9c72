"""Train and compare drafters with the shipped verifier.
Each gets the same answers, hidden states, held-out prompts and training FLOPs."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from filelock import FileLock
from transformers import AutoConfig
from transformers.utils.import_utils import is_in_notebook

from ..core.files import read_object, write_object, write_text
from ..core.options import algorithms, check_options, near, shown
from ..data.chat_template import open_tokenizer
from ..data.packing import collate, pack
from ..data.prepare import prepare
from ..data.prepared_folder import read_data_config
from ..decode.ngram import NgramDrafter
from ..evaluate.acceptance import Evaluation, evaluate
from ..evaluate.cost import draft_cost, expected_speedup, training_flops, verifier_cost
from ..evaluate.prompts import encode_prompts, read_prompts
from ..evaluate.while_training import PROMPTS, decoded_acceptance
from ..features.feature_folder import FeatureDataset
from ..features.in_process import extract_features
from ..models.base import SpeculatorModel
from ..nn.target_head import text_config, verifier_config
from ..regenerate.in_process import eos_ids_of
from ..train.train_drafter import new_drafter, train_drafter
from ..train.trainer import Measure, SpeculatorTrainer
from ..verifier.identity import fingerprint
from ..verifier.tapped_model import Verifier, default_aux_layer_ids
from .paired import as_text
from .shipped import shipped_data


def shipped_features(layers: list[int] | None = None, n: int | None = None) -> Path:
    """The feature folder, below output/, of the verifier's shipped answers (the first `n`; None: all 1000), made at the
    first call; one that was interrupted is continued. `layers` None: `default_aux_layer_ids`; the last state is always
    stored."""
    check_options(dict(aux_layer_ids=layers, max_samples=n))
    data = shipped_data()
    layers = layers or default_aux_layer_ids(AutoConfig.from_pretrained(data / "tiny-verifier").num_hidden_layers)
    verifier = Verifier.from_pretrained(data / "tiny-verifier", layers)
    lines = (data / "answers/train.jsonl").read_bytes().splitlines()[:n]
    answers = hashlib.sha256(b"\n".join(lines)).hexdigest()
    origin = "\n".join([fingerprint(verifier.model), str(list(layers)), answers])
    key = hashlib.sha256(origin.encode()).hexdigest()[:12]
    folder = data.parent / f"output/features-{key}"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            tokenizer = open_tokenizer(data / "tiny-verifier")
            longest = verifier.model.config.max_position_embeddings
            rows = prepare(map(json.loads, lines), tokenizer, longest)
            building = folder.with_name(f"{folder.name}.building")
            extract_features(verifier, rows, building)
            os.rename(building, folder)
    return folder


COMMON = dict(total_seq_len=1024, num_train_epochs=1, logging_steps=20)


def settings(algorithm: str, k: int = 4) -> dict[str, Any]:
    """What this project trains an algorithm, a registered `speculators_model_type`, with on the shipped answers to
    draft k tokens: arguments of `train_drafter`."""
    check_options(dict(algorithm=algorithm, k=k))
    drafter: Any = SpeculatorModel.registered_class(algorithm)
    return COMMON | drafter.arguments_to_draft(k) | drafter.lab_arguments


def train_on_shipped(
    algorithm: str,
    output: str | os.PathLike,
    k: int = 4,
    features: Path | None = None,
    verifier: str | os.PathLike | None = None,
    **args,
) -> SpeculatorTrainer:
    """Train a drafter to draft k tokens, without intermediate checkpoints, on `features` (None: `shipped_features()`)
    of `verifier` (None: the shipped one, with which each evaluation decodes held-out prompts); `args` of
    `train_drafter` go before `settings`. The checkpoint and its log are saved in `output`."""
    once: dict[str, Any] = dict(
        save_strategy="no",
        load_best_model_at_end=False,
        disable_tqdm=not is_in_notebook(),  # a live view there; silence in a script
    )
    evaluates = args.get("eval_strategy") != "no" and args.get("eval_share") != 0
    if evaluates and verifier is None:
        once["measure"] = heldout_acceptance(k)
    return train_drafter(
        features or shipped_features(),
        output,
        verifier or shipped_data() / "tiny-verifier",
        algorithm,
        **(settings(algorithm, k) | once | args),
    )


def shipped_drafter(output: str | os.PathLike) -> Path:
    """The shipped EAGLE-3 as a checkpoint in float32, in the folder `output`, that names the shipped verifier where it
    is, so that an engine finds it."""
    drafter, verifier = (shipped_data() / name for name in ("tiny-drafter", "tiny-verifier"))
    model = SpeculatorModel.from_pretrained(drafter, verifier=verifier, dtype=torch.float32)
    model.config.speculators_config.verifier.name_or_path = str(verifier.resolve())
    model.save_pretrained(output)
    return Path(output)


FREE_CHOICE = "free"  # the domain whose answers are the verifier's to choose


def heldout_prompts(conversations: list, tokenizer, n: int | None = None) -> tuple[list[list[int]], list[str]]:
    """First turns of held-out conversations (the first `n`; None: all), ready to be answered: token ids and domain of
    each."""
    ids = [
        tokenizer.apply_chat_template(c["messages"][:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        for c in conversations[:n]
    ]
    return ids, [c["domain"] for c in conversations[:n]]


class HeldoutSetting(NamedTuple):
    "What is decoded when drafters are measured."

    verifier: Verifier  # tapped where the drafters read
    prompts: list[list[int]]  # token ids of each question
    domains: list[str]  # of each prompt
    eos_token_ids: set[int]  # ids that end an answer


def heldout_setting(
    drafters: dict,
    n_prompts: int | None,
    domains: tuple | None = None,
    verifier: str | os.PathLike | None = None,
    heldout: str | Path | None = None,
) -> HeldoutSetting:
    """What is decoded when drafters, by name, are measured: the first `n_prompts` (None: all) of `heldout`, as of
    `read_prompts`, or of the shipped ones, of some domains (None: all six), with `verifier` (None: the shipped one).
    Errors: ValueError for a domain that the corpus does not have."""
    check_options(dict(n_prompts=n_prompts))
    name = str(verifier or shipped_data() / "tiny-verifier")
    layers = sorted({i for drafter in drafters.values() for i in drafter.aux_layer_ids})
    tapped = Verifier.from_pretrained(name, layers or None, dtype="float32")
    tokenizer = open_tokenizer(name)
    stop = eos_ids_of(tapped, tokenizer)
    # all of them where some are chosen
    found = read_prompts(heldout or shipped_data() / "corpus/heldout.jsonl", first=None if domains else n_prompts)
    known = dict.fromkeys(prompt.domain for prompt in found)
    if unknown := [d for d in domains or () if d not in known]:
        raise ValueError(f"domains={shown(domains)}: {unknown[0]!r} is none of the corpus's. {near(unknown[0], known)}")
    chosen = [prompt for prompt in found if domains is None or prompt.domain in domains][:n_prompts]
    return HeldoutSetting(tapped, encode_prompts(chosen, tokenizer), [prompt.domain for prompt in chosen], stop)


def measure_heldout(
    drafters: dict,
    k: int = 4,
    n_prompts: int | None = 24,
    temperatures: tuple = (0.0,),
    max_new_tokens: int = 160,
    domains: tuple | None = None,
    ngram: bool = True,
    seed: int = 0,
) -> Evaluation:
    """Decode the first `n_prompts` held-out prompts of the shipped corpus (domains in equal shares; None: all 180), or
    those of some domains, e.g. (FREE_CHOICE,), with the shipped verifier: drafters by name, each as from
    `model.drafter()`, and the n-gram drafter beside them, k tokens drafted in a step. The verifier's own answers end
    before `max_new_tokens`; `seed` is of sampling and of the intervals. There is one evaluation for each temperature,
    with rows for each domain."""
    drafters = ({"n-gram": NgramDrafter()} if ngram else {}) | drafters
    verifier, ids, kinds, stop = heldout_setting(drafters, n_prompts, domains)
    return evaluate(
        verifier,
        drafters,
        ids,
        k=k,
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        eos_token_ids=stop,
        domains=kinds,
        seed=seed,
    )


def heldout_acceptance(k: int = 4, n_prompts: int = PROMPTS) -> Measure:
    """What `measure_heldout` says of a model's drafter as numbers at each evaluation: mean_length, accepted_1, …,
    accepted_k."""
    verifier, ids, _, stop = heldout_setting({}, n_prompts)
    return decoded_acceptance(verifier, ids, k, max_new_tokens=160, eos_token_ids=stop)


def with_interval(table: pd.DataFrame, name: str) -> pd.Series:
    """An estimate and its 95 % interval (columns name, name_low, name_high) as text: 0.81 [0.78, 0.83]; nothing where
    there is no estimate."""

    columns = table[[name, f"{name}_low", f"{name}_high"]]
    return columns.apply(lambda row: "" if pd.isna(row[name]) else as_text(*row), axis=1)


def summary_table(evaluation: Evaluation, temperature: float = 0) -> pd.DataFrame:
    """Acceptance of all drafters of `measure_heldout` at a temperature side by side, estimates with their intervals,
    best first: mean length, on free-choice turns, at the first position."""
    summary = evaluation.summary[evaluation.summary.temperature == temperature]
    positions = evaluation.positions[evaluation.positions.temperature == temperature]
    total = summary[summary.domain == "all"].sort_values("mean_length", ascending=False)

    def column(table, name):
        return with_interval(table.set_index("drafter").reindex(total.drafter), name)

    return pd.DataFrame(
        {
            "mean length": column(total, "mean_length"),
            "on free-choice turns": column(summary[summary.domain == FREE_CHOICE], "mean_length"),
            "first position": column(positions[positions.position == 1], "unconditional"),
        }
    )


BUDGET = 2.5e11  # training FLOPs that a core works off in some ten seconds
CONTENDERS = {name: (name, {}) for name in algorithms()} | {
    "hass": ("eagle", dict(forward_num_total=3, fusion_bias=True))
}  # name -> (algorithm, arguments besides `settings`)


def flops_per_token(
    algorithm: str, features: Path, verifier: str | os.PathLike | None = None, **args
) -> tuple[float, int]:
    """What training an algorithm takes, counted on a fresh drafter and one packed row of `features` of `verifier`
    (None: the shipped one): FLOPs for each token, trained parameters. `args` are those of `train_drafter`."""
    stored = read_data_config(features)["hidden_states"]
    verifier = verifier or shipped_data() / "tiny-verifier"
    layers = stored["layer_ids"][:-1]
    size, known = args.get("draft_vocab_size"), text_config(verifier_config(str(verifier))).vocab_size
    if size and size < known:  # which tokens does not matter
        args["mapping"] = torch.arange(known) < size, torch.zeros(size, dtype=torch.long)
    model = new_drafter(algorithm, verifier, target_layer_ids=layers, **args)
    data = FeatureDataset(features, layers=list(model.drafter().aux_layer_ids))
    length = args["total_seq_len"]
    first_row = [data[i] for i in pack(data.lengths, length)[0]]
    batch = collate(first_row, length, model.shift, torch.float32)
    args.pop("mapping", None)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kwargs = model.get_trainer_kwargs(**args)[0]
    # a loss that changes along the training, as Domino's does half-way, is counted at both ends
    ends = [{"progress": p} for p in (0.0, 1.0)] if model.reads_progress else [{}]
    flops = [training_flops(model, batch, **kwargs, **end) for end in ends]
    return sum(flops) / len(flops), parameters


class Share(NamedTuple):
    "What a budget of training FLOPs means for one contender."

    steps: int
    parameters: int  # trained
    mflops_per_token: float
    epochs: float


def steps_within(
    budget: float, algorithm: str, features: Path, verifier: str | os.PathLike | None = None, **args
) -> Share:
    """How many steps of training a budget of FLOPs holds; features, verifier and `args`, which are all, as of
    `flops_per_token`."""
    lengths = FeatureDataset(features).lengths
    flops, parameters = flops_per_token(algorithm, features, verifier, **args)
    tokens_in_step = sum(lengths) / len(pack(lengths, args["total_seq_len"]))
    steps = max(1, round(budget / flops / tokens_in_step))
    return Share(steps, parameters, flops / 1e6, steps * tokens_in_step / sum(lengths))


def _train_one(folder, name, budget, contender, k, features, args) -> dict:
    "Train one contender, or find it trained: its row of the table."
    algorithm, own = contender
    given = settings(algorithm, k) | own | args
    record = Path(folder) / name / "trained.json"
    request = dict(budget=budget, features=features.name, **given)
    requested = json.dumps(request, sort_keys=True, default=str)
    if record.is_file():
        finished = read_object(record)
        if finished.get("requested") == requested:
            return finished["row"]
    share = steps_within(budget, algorithm, features, **given)
    once = own | args | dict(max_steps=share.steps, eval_strategy="no")
    start = time.perf_counter()
    train_on_shipped(algorithm, record.parent, k, features, **once)
    seconds = time.perf_counter() - start
    row = dict(drafter=name) | share._asdict() | dict(seconds=seconds)
    write_object(record, {"requested": requested, "row": row}, indent=None)
    return row


def train_equally(
    folder: Path,
    budget: float = BUDGET,
    contenders: dict = CONTENDERS,
    k: int = 4,
    features: Path | None = None,
    **args,
) -> pd.DataFrame:
    """Train every contender, name -> (algorithm, arguments), to draft k tokens, for the same number of FLOPs, into
    folder/name; `args` of `train_drafter` are for all. One that a run with the same arguments has finished is kept.
    Returns drafter -> parameters, mflops_per_token, steps, epochs, seconds."""
    check_options(dict(budget=budget, k=k) | args)
    features = features or shipped_features()
    rows = [_train_one(folder, name, budget, contender, k, features, args) for name, contender in contenders.items()]
    return pd.DataFrame(rows).set_index("drafter")


def drafting_cost(drafters: dict[str, Any], k: int = 4, n_prompts: int = 3) -> pd.DataFrame:
    """Cost of k draft tokens of each drafter with the shipped verifier, counted on `n_prompts`, as in
    `cost.draft_cost`: in forward passes of the verifier over one token. Columns flops, weights, time; verify: of k+1
    tokens; deep: beside 36 layers."""
    setting = heldout_setting(drafters, n_prompts)
    verifier = setting.verifier
    one_token = verifier_cost(verifier, tokens=1)["time"]
    verification = verifier_cost(verifier, tokens=k + 1)["time"]
    head = verifier.vocab_size * verifier.hidden_size  # weights
    whole = verifier_cost(verifier, repeats=1)["weights"]
    layer = (whole - head) / verifier.num_layers
    costs = {name: draft_cost(verifier, drafter, setting.prompts, k) for name, drafter in drafters.items()}
    table = pd.DataFrame(costs).T.rename_axis("drafter")
    deep = table.weights * (whole / (head + 36 * layer))
    return table.assign(verify=verification / one_token, deep=deep)


def compare(
    folder: Path,
    budget: float = BUDGET,
    contenders: dict = CONTENDERS,
    k: int = 4,
    n_prompts: int | None = 24,
    temperatures: tuple = (0.0,),
    features: Path | None = None,
    **args,
) -> tuple[pd.DataFrame, Evaluation]:
    """Train and measure every contender, and what its drafts cost, with an n-gram drafter; all but the prompts and
    temperatures as of `train_equally` and `measure_heldout`. The folder gets drafters, comparison.csv, summary.csv,
    positions.csv, acceptance.png. Returns a row for each drafter, at the first temperature, and what was measured."""
    folder = Path(folder)
    trained = train_equally(folder, budget, contenders, k, features, **args)
    drafters: dict[str, Any] = {"n-gram": NgramDrafter()}
    for name in contenders:
        drafters[name] = SpeculatorModel.from_pretrained(folder / name).drafter()
    costs = drafting_cost(drafters, k)
    measured = measure_heldout(drafters, k, n_prompts, temperatures)
    summary = measured.summary[measured.summary.temperature == temperatures[0]]
    summary = summary.set_index("drafter")
    free_choice = summary[summary.domain == FREE_CHOICE].mean_length.rename("free_choice")
    total = summary[summary.domain == "all"]
    table = total[["mean_length", "mean_length_low", "mean_length_high"]]
    table = table.join(free_choice).join(costs).join(trained)
    table["speedup"] = expected_speedup(table.mean_length, table.time, table.verify)
    table["speedup_deep"] = expected_speedup(table.mean_length, table.deep)
    measured.save(folder)
    write_text(folder / "comparison.csv", table.to_csv())
    return table, measured
