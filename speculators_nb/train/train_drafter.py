"""Training of a drafter (speculator, draft model) in one function.
From a folder of features, or with features made during training."""

import inspect
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset
from transformers import PretrainedConfig

from ..core.checkpoints import model_file
from ..core.config import layer_config_from_dict
from ..core.files import read_object
from ..core.options import check_options, shown
from ..core.registry import GreedyTokenProposalConfig
from ..data.chat_encoding import token_frequencies
from ..data.prepared_folder import read_token_freq
from ..features.checks import check_features
from ..features.feature_folder import FeatureDataset, table_of
from ..features.feature_rows import FeatureRows
from ..features.from_server import ServerFeatures
from ..features.in_process import LiveFeatures
from ..models.base import SpeculatorModel
from ..nn.draft_vocabulary import (
    check_vocab_mapping,
    load_vocab_mapping,
    save_vocab_mapping,
    vocab_mapping_from_frequencies,
)
from ..nn.layers import check_layer_config, draft_layer_config
from ..nn.lora import add_adapter
from ..verifier.folders import check_output_dir, layout_of
from ..verifier.identity import VerifierInfo
from ..verifier.tapped_model import Verifier, default_aux_layer_ids
from .live_view import was_interrupted
from .optimizers import parameter_kinds
from .trainer import Measure, SpeculatorTrainer, train

log = logging.getLogger(__name__)
LAYER_ARGUMENTS = ("sliding_window", "full_attention_indices", "draft_hidden_act", "draft_config")


def layer_arguments(arguments: dict) -> tuple[dict, dict]:
    """Take the arguments of training that are given and shape the draft layers, those of `draft_layers`, out of the
    others: both."""
    given = {n: v for n, v in arguments.items() if n in LAYER_ARGUMENTS and v is not None}
    return given, {n: v for n, v in arguments.items() if n not in LAYER_ARGUMENTS}


def refuse_given(given: Mapping[str, Any], why: str) -> None:
    "Raise ValueError for an argument that would have no effect; `why` says what decides instead (empty: all have one)."
    for name, value in given.items() if why else ():
        raise ValueError(f"{name}={value!r}: {why}; leave {name} out")


def check_layers_given(drafter_class: type[SpeculatorModel], given: Mapping[str, Any]) -> None:
    """Errors: ValueError for an argument that shapes the draft layers (None: not given) and that the class decides
    itself."""
    # one layer is what a class makes that has no choice
    given = {name: value for name, value in given.items() if value is not None and (name, value) != ("num_layers", 1)}
    refuse_given(given, drafter_class.fixed_layers)
    if "num_layers" in given:
        refuse_given({"num_layers": given["num_layers"]}, drafter_class.single_layer)


def layers_of_file(draft_config: str | os.PathLike, text: PretrainedConfig) -> PretrainedConfig:
    """Draft layers as a decoder's or a drafter's config (a file, a folder with config.json, or a hub id) describes
    them, for a verifier whose language model has the config `text`. Errors: ValueError for layers that are none of a
    drafter's, or of another width than the verifier."""
    file = Path(draft_config)
    raw = read_object(file if file.is_file() else model_file(draft_config))
    try:
        layers = layer_config_from_dict(raw.get("transformer_layer_config", raw))
        check_layer_config(layers)
    except ValueError as e:
        raise ValueError(f"draft_config={str(draft_config)!r}: {e}") from None
    if layers.hidden_size != text.hidden_size:
        raise ValueError(
            f"draft_config={str(draft_config)!r}: hidden_size is {layers.hidden_size}, the "
            f"verifier's {text.hidden_size}; write the verifier's"
        )
    if layers.vocab_size != text.vocab_size:
        log.warning("%s: vocab_size %d becomes the verifier's, %d", draft_config, layers.vocab_size, text.vocab_size)
        layers.vocab_size = text.vocab_size
    return layers


def draft_layers(
    info: VerifierInfo,
    draft_arch: str = "llama",
    num_layers: int = 1,
    sliding_window: int | None = None,
    full_attention_indices: Sequence[int] | None = None,
    draft_hidden_act: str | None = None,
    draft_config: str | os.PathLike | None = None,
) -> PretrainedConfig:
    """The config of the draft layers for a verifier: their family, how many, positions that a layer attends to (None:
    all before) but those of some indices, the MLP's activation (None: silu, as vLLM has it); or as `draft_config`
    describes them, as of `layers_of_file`. Errors: ValueError naming what does not fit."""
    shape: dict[str, Any] = dict(sliding_window=sliding_window, full_attention_indices=full_attention_indices)
    if draft_config is None:
        act = draft_hidden_act or "silu"
        return draft_layer_config(info.config, draft_arch, num_layers, hidden_act=act, **shape)
    layers = layers_of_file(draft_config, info.text)
    if num_layers not in (1, layers.num_hidden_layers):
        shape["num_layers"] = num_layers
    settings = shape | dict(draft_hidden_act=draft_hidden_act)
    settings = {name: value for name, value in settings.items() if value is not None}
    refuse_given(settings, f"{draft_config} describes the layers")
    return layers


def new_drafter(
    algorithm: str,
    verifier: str | os.PathLike,
    draft_arch: str | None = None,
    num_layers: int | None = None,
    draft_vocab_size: int | None = None,
    mapping: tuple[torch.Tensor, torch.Tensor] | None = None,
    target_layer_ids: list[int] | None = None,
    seed: int = 0,
    **model_args,
) -> SpeculatorModel:
    """A fresh drafter of a registered algorithm for a verifier, a folder or hub id, with the verifier's weights, ready
    to train: the family of its draft layers (None: llama), how many (None: 1), the size of its vocabulary (None: the
    verifier's whole) and `mapping`, t2d [V] bool and d2t [Vd] int64, the verifier layers to read (None: default three),
    the seed of the initial weights; `model_args`: `sliding_window`, `full_attention_indices`, `draft_hidden_act`,
    `draft_config` (see `draft_layers`), and other arguments of the class's `from_training_args`. Errors: ValueError for
    an unknown algorithm or a draft vocabulary that does not fit."""
    drafter_class = SpeculatorModel.registered_class(algorithm)
    info = VerifierInfo.of(verifier)
    vocab_size = info.text.vocab_size
    if mapping is None and draft_vocab_size not in (None, vocab_size):
        raise ValueError(
            f"draft_vocab_size={draft_vocab_size} of {vocab_size} needs mapping, the tokens that the drafter knows"
        )
    t2d, d2t = mapping or (None, None)
    if t2d is not None:
        check_vocab_mapping(t2d, d2t, vocab_size, draft_vocab_size or vocab_size)
    # the checkpoint names it, for an engine that is started in another working directory
    name = str(Path(info).resolve()) if Path(info).is_dir() else info.name
    shape, model_args = layer_arguments(model_args)
    check_layers_given(drafter_class, shape | dict(draft_arch=draft_arch, num_layers=num_layers))
    fixed = bool(drafter_class.fixed_layers)
    layers = info.text if fixed else draft_layers(info, draft_arch or "llama", num_layers or 1, **shape)
    torch.manual_seed(seed)
    return drafter_class.from_training_args(
        layers,
        t2d,
        d2t,
        verifier_name_or_path=name,
        draft_vocab_size=draft_vocab_size or vocab_size,
        target_layer_ids=target_layer_ids,
        **model_args,
    )


def training_split(
    data: FeatureRows, eval_share: float | None = None, seed: int = 0
) -> tuple[Sequence[int], Sequence[int]]:
    """Training and evaluation indices, each ascending: the split that was made when the rows were prepared, else one
    shuffled by seed with a share `eval_share` held out (None: as the data were prepared, else 0.05). At least one row
    is trained on; a share above 0 holds out at least one."""
    if eval_share is None and data.split and data.split["val"]:
        n_train = data.split["train"]
        return range(n_train), range(n_train, len(data))
    n, share = len(data), 0.05 if eval_share is None else eval_share
    held = min(n - 1, max(1, round(n * share))) if share else 0
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[held:]), sorted(order[:held])


def open_features(
    data_dir: str | os.PathLike,
    verifier: str | os.PathLike,
    url: str | Iterable[str] | None = None,
    storage: str | os.PathLike | Iterable | None = None,
    layers: list[int] | None = None,
    on_bad: str = "raise",
    patience: float = 120.0,
) -> FeatureRows:
    """The features of a folder of any layout; else, of prepared rows, those of a running vLLM, or of several (`url`,
    with its `storage`: a folder, mooncake://…); else those of the verifier itself, which then runs beside the training.
    `layers`: verifier layers to read (None: the stored, else three); their last one is in `layer_ids` as well;
    `on_bad`: raise, or skip a sample that is not available; `patience`: seconds to wait while none of several servers
    answers."""
    layout = layout_of(data_dir)
    info = VerifierInfo.of(verifier)
    if layout == "rows":
        if not url:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
            live = Verifier.from_pretrained(info.name, layers, device=device)
            return LiveFeatures(live, table_of(data_dir), on_bad=on_bad)
        if storage is None:
            raise ValueError(f"storage=None: name the folder that the server {url!r} writes to, or its Mooncake store")
        return ServerFeatures(url, Path(data_dir), storage, on_bad=on_bad, patience=patience)
    if url:
        raise ValueError(f"url={url!r}: {data_dir} has features already; name the prepared folder, or leave url out")
    layer_ids = None
    if layout == "upstream":  # which does not record them
        n = info.text.num_hidden_layers
        layer_ids = [*(default_aux_layer_ids(n) if layers is None else layers), n]
    return FeatureDataset(data_dir, on_bad, layer_ids=layer_ids)


def token_counts(data: FeatureRows, data_dir: str | os.PathLike) -> dict[int, int]:
    """Token id -> count in the trained positions, as the folder of the features has stored it; without that the tokens
    are counted."""
    stored = read_token_freq(Path(data_dir) / "rows") or read_token_freq(data_dir)
    if stored:
        return stored
    if getattr(data, "rows", None) is not None:
        return token_frequencies(data.rows)
    counts = Counter()
    for sample in (data[i] for i in range(len(data))):
        counts.update(sample["input_ids"][sample["loss_mask"]].tolist())
    return counts


def draft_vocabulary(
    data: FeatureRows, data_dir: str | os.PathLike, draft_vocab_size: int | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """t2d [V] bool and d2t [Vd] int64 for a draft vocabulary of size Vd (None, or V: all tokens, and there is no
    mapping): as the folder of the features names them (`save_vocab_mapping`), else the most frequent tokens of the
    training answers."""
    if draft_vocab_size in (None, vocab_size):
        return None
    for folder in (Path(data_dir), Path(data_dir) / "rows"):
        if (folder / f"d2t-{draft_vocab_size}.npy").is_file():
            return load_vocab_mapping(folder, draft_vocab_size, vocab_size)
    counts = token_counts(data, data_dir)
    return vocab_mapping_from_frequencies(counts, draft_vocab_size, vocab_size)


def keep_shape(model: SpeculatorModel, place: str | os.PathLike, given: Mapping[str, Any]) -> None:
    """Training arguments (None: not given) of a drafter that is there, at `place`. Its config says which ones of its
    forward pass it is trained with. Errors: ValueError for one that shapes a fresh drafter, and is not as this one
    is."""
    config, layer = model.config, getattr(model.config, "transformer_layer_config", None)
    given = {name: value for name, value in given.items() if value is not None}
    kept = dict.fromkeys(inspect.signature(model.from_training_args).parameters)
    kept |= dict(
        algorithm=config.speculators_model_type,
        draft_arch=getattr(layer, "model_type", None),
        num_layers=getattr(layer, "num_hidden_layers", None),
        target_layer_ids=list(model.drafter().aux_layer_ids),
    )
    kept |= model.kept_arguments() | dict(draft_vocab_size=model.draft_vocab_size)
    in_forward = model.forward_arguments()
    for name, value in given.items():
        if name in in_forward:
            if name in model.config_arguments:
                setattr(config, name, value)
        elif name in kept and value != kept[name]:
            option = " (--aux-layer-ids)" if name == "target_layer_ids" else ""
            raise ValueError(
                f"{name}={shown(value)}: {place} has {shown(kept[name])}, and keeps it; "
                f"leave {name}{option} out, or train anew"
            )
    if model.drafted_by in in_forward and model.drafted_by in given and config.speculators_config:
        drafted = model.tokens_to_draft(model.training_arguments() | given)
        for method in config.speculators_config.proposal_methods:
            if isinstance(method, GreedyTokenProposalConfig):
                method.speculative_tokens = drafted


def hidden_layers(model: SpeculatorModel) -> list[str]:
    "Names of the linear layers that training changes, without those that read or write a vocabulary."
    kinds = parameter_kinds(model)
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if kinds.get(f"{name}.weight") == "hidden"]


def _model_and_features(data_dir, info, from_pretrained, source, args, seed):
    "A fresh drafter, or a trained one to start from; and the features that it reads."
    layers, size = args["target_layer_ids"], args["draft_vocab_size"]
    if from_pretrained is not None:
        model = SpeculatorModel.from_pretrained(from_pretrained, verifier=info.name)
        keep_shape(model, from_pretrained, args)
        wanted = list(model.drafter().aux_layer_ids) or None
        return model, open_features(data_dir, info, layers=wanted, **source)
    data = open_features(data_dir, info, layers=layers, **source)
    stored = list(data.layer_ids or ())[:-1]
    own = {
        "mapping": draft_vocabulary(data, data_dir, size, info.text.vocab_size),
        "target_layer_ids": layers or stored or None,
    }
    return new_drafter(verifier=info, seed=seed, **args | own), data


def train_drafter(
    data_dir: str | os.PathLike,  # features (`extract_features`), or prepared: made in training
    output_dir: str | os.PathLike,  # for checkpoints (final, intermediate) and training_log.csv
    verifier: str | os.PathLike,  # folder or hub id of the model that made the features
    algorithm: str | None,  # a registered `speculators_model_type`; None: `from_pretrained`'s
    draft_arch: str | None = None,  # family of the draft layers; None: llama, or as they are
    num_layers: int | None = None,  # number of draft layers; None: 1, or as many as there are
    draft_vocab_size: int | None = None,  # None: the verifier's whole vocabulary
    from_pretrained: str | os.PathLike | None = None,  # start from its weights, not fresh ones
    lora_rank: int | None = None,  # train an adapter of that rank, and leave its weights
    lora_alpha: float | None = None,  # of the adapter; None: twice its rank
    seed: int = 0,  # of the initial weights, the split and the training
    eval_share: float | None = None,  # held-out share; None: the prepared folder's, else 0.05
    on_bad: str = "raise",  # a feature file that does not check: "raise" or "skip"
    url: str | Iterable[str] | None = None,  # vLLM(s) making the features while training
    storage: str | os.PathLike | Iterable | None = None,  # of the vLLM: folder, mooncake://…
    target_layer_ids: list[int] | None = None,  # layers to read; None: features', else three
    trust_features: bool = False,  # take features whose record does not fit the verifier
    measure: Measure | None = None,  # of the model at each evaluation, as eval_{name}
    patience: float = 120.0,  # of several servers: seconds to wait while none answers
    # SpeculatorTrainingArguments, and those of `draft_layers`, `from_training_args` and
    # `get_trainer_kwargs`
    **training_args,
) -> SpeculatorTrainer:  # has run; its model is the best one and is saved in `output_dir`
    """Train a drafter on features. Errors: ValueError for a name that nothing takes, an argument
    that `from_pretrained` has decided otherwise, a folder that holds a drafter (`overwrite`,
    `resume_from_checkpoint`), features of another verifier or of other layers;
    FloatingPointError for a loss or weights that are not finite; KeyboardInterrupt, once the
    drafter is saved, where an Interrupt stopped the run in a notebook: its next cells do not
    run."""
    drafter = {"draft_arch": draft_arch, "num_layers": num_layers}
    if algorithm is not None or from_pretrained is None:
        drafter["algorithm"] = algorithm
    vocabulary = {"draft_vocab_size": draft_vocab_size, "target_layer_ids": target_layer_ids}
    rows = {"eval_share": eval_share, "on_bad": on_bad, "trust_features": trust_features, "seed": seed}
    adapter = {"from_pretrained": from_pretrained, "lora_rank": lora_rank, "lora_alpha": lora_alpha}
    check_options(drafter | vocabulary | rows | adapter | training_args)
    shape, training_args = layer_arguments(training_args)
    if from_pretrained is not None:
        refuse_given(shape, "from_pretrained brings its own layers")
    overwrite = training_args.get("overwrite", False)
    sharing = training_args.get("context_parallel_size", 1)
    if url and on_bad == "skip" and sharing > 1:  # a request of one rank may fail where another's does not
        raise ValueError(
            f"on_bad='skip' with context_parallel_size={sharing}: ranks that share a row must have the same, and each "
            "asks the server for itself; leave on_bad out (--on-bad raise), or extract the features first"
        )
    output_dir = Path(output_dir).expanduser()  # as transformers' TrainingArguments
    check_output_dir(output_dir, overwrite, training_args.get("resume_from_checkpoint"))
    info = VerifierInfo.of(verifier)
    model, data = _model_and_features(
        data_dir,
        info,
        from_pretrained=from_pretrained,
        source=dict(url=url, storage=storage, on_bad=on_bad, patience=patience),
        args=drafter | vocabulary | shape | training_args,
        seed=seed,
    )
    if lora_rank is not None:
        torch.manual_seed(seed)
        model.float()  # bfloat16 would round a small difference away
        add_adapter(model, hidden_layers(model), lora_rank, lora_alpha, base=str(from_pretrained))
    if isinstance(data, LiveFeatures) and training_args.get("dataloader_num_workers"):
        raise ValueError(
            f"dataloader_num_workers={training_args['dataloader_num_workers']}: the verifier "
            "runs in this process; leave it at 0, or extract the features first"
        )
    check_features(data, info, trust_features)
    data.choose(list(model.drafter().aux_layer_ids))
    train_rows, eval_rows = training_split(data, eval_share, seed)
    train_set, eval_set = Subset(data, train_rows), Subset(data, eval_rows)
    settings = {"output_dir": str(output_dir), "seed": seed, "measure": measure} | training_args
    trainer = train(model, train_set, eval_set if eval_rows else None, **settings)
    t2d, d2t, saves = model.t2d, model.d2t, trainer.args.should_save and not trainer.done
    if t2d is not None and d2t is not None and saves:
        save_vocab_mapping(output_dir, t2d, d2t)
    if was_interrupted(trainer):
        raise KeyboardInterrupt(f"stopped at step {trainer.state.global_step}; {output_dir} has the drafter")
    return trainer
