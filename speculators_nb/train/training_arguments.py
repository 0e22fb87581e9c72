"""The settings of a training run: transformers' `TrainingArguments` with defaults for drafters.
There are a few fields more, and an error for each field that would have no effect."""

import difflib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainingArguments, optimization
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode

from ..core.options import check_options
from ..distributed.sharded_training import LAUNCHER
from ..distributed.torchrun import torchrun_line

WITHOUT_EFFECT = {  # what decides -> fields that would have no effect
    "optimizer": ("optim", "optim_args", "optim_target_modules", "adam_epsilon"),
    "the model's loss": (
        "label_smoothing_factor",
        "average_tokens_across_devices",
        "use_liger_kernel",
        "liger_kernel_config",
    ),
    "the model's noise": ("neftune_noise_alpha",),
    "packing": ("train_sampling_strategy", "dataloader_drop_last", "length_column_name"),
    "total_seq_len": ("per_device_train_batch_size", "per_device_eval_batch_size", "auto_find_batch_size"),
    "the check of every loss": ("logging_nan_inf_filter",),
    "bf16": ("bf16_full_eval",),
    "fp16": ("fp16_full_eval",),
    "the model's metrics": (
        "prediction_loss_only",
        "batch_eval_metrics",
        "eval_do_concat_batches",
        "eval_accumulation_steps",
    ),
    "the model's forward": ("label_names", "remove_unused_columns"),
}
NOT_SUPPORTED = {  # field -> why, and what to do
    "fsdp_config": (
        "every layer and the rest are sharded, there is nothing else to choose; leave it out, fsdp alone is enough"
    ),
    "deepspeed": LAUNCHER["deepspeed"],
    "fp16": ("drafters are trained in bfloat16 or float32, whose gradients need no loss scaler; use bf16=True"),
    "ignore_data_skip": (
        "rows of an epoch would be trained again, and others not at all; leave it out, a resume finds its place "
        "without reading a row"
    ),
    "save_only_model": ("such a checkpoint cannot be resumed; leave it out, the drafter itself is saved at the end"),
}


def refuse_fields(values: dict, defaults: dict) -> None:
    "ValueError for the first field (its value is not its default) that has no effect here, or that is not supported."
    for instead, names in WITHOUT_EFFECT.items():
        for name in names:
            if values[name] != defaults[name]:
                raise ValueError(f"{name}={values[name]!r} has no effect here: {instead} decides. Leave it out.")
    for name, why in NOT_SUPPORTED.items():
        if values[name] not in (None, False, "", [], {}):
            raise ValueError(f"{name}={values[name]!r} is not supported: {why}.")


def refuse_compilation(values: dict) -> None:
    "ValueError for `torch_compile`, its back end or its mode: there is no accelerator."
    for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        if values[name]:
            raise ValueError(
                f"{name}={values[name]!r}: compiling takes minutes on a CPU and makes no step faster; leave it out"
            )


def check_loggers(names: list[str]) -> None:
    "Errors: ValueError for a logger of `report_to` that is unknown or not installed."
    installed = get_available_reporting_integrations()
    for name in names:
        if name in installed:
            continue
        remedy = f"not installed; pip install {name}" if name in INTEGRATION_TO_CALLBACK else "unknown"
        raise ValueError(f"report_to={name!r}: this logger is {remedy}. Installed: {', '.join(installed) or 'none'}.")


LOGGER_FOLDERS = {  # logger -> variable of the environment that says where it writes, its value
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", "{}/tensorboard"),
    "wandb": ("WANDB_DIR", "{}"),
    "mlflow": ("MLFLOW_TRACKING_URI", "sqlite:///{}/mlflow.db"),
    "trackio": ("TRACKIO_DIR", "{}/trackio"),
}
_placed: dict[str, str] = {}  # variables that were set here, for an earlier run


def _wandb_has_key():
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    login = file.is_file() and "wandb" in file.read_text(errors="replace")
    return bool(os.environ.get("WANDB_API_KEY")) or login


def place_loggers(names: list[str], output_dir: str | os.PathLike) -> None:
    """Let loggers of `report_to` write into the run's folder, and W&B offline where it has no key. Of several runs in
    one process trackio keeps the first's folder, which it reads when it is imported."""
    wanted = {}
    for name in LOGGER_FOLDERS.keys() & set(names):
        variable, place = LOGGER_FOLDERS[name]
        wanted[variable] = place.format(Path(output_dir).absolute())
    if "wandb" in names and not _wandb_has_key():
        wanted["WANDB_MODE"] = "offline"
    for variable, value in wanted.items():
        if os.environ.get(variable) in (None, _placed.get(variable)):
            os.environ[variable] = _placed[variable] = value
    wandb: Any = sys.modules.get("wandb")
    if "wandb" in names and wandb is not None and "WANDB_DIR" in _placed:
        wandb.finish()  # the run before this one, into which this one would be written


READERS = {  # schedule -> what takes all keywords of its function
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "greedy": getattr(optimization, "GreedyLR", None),
}


def check_keywords(values: dict) -> None:
    "ValueError for a key of a training argument that is a mapping, which its reader does not take."
    kind = SchedulerType(values["lr_scheduler_type"])
    scheduler = READERS.get(kind.value) or optimization.TYPE_TO_SCHEDULER_FUNCTION[kind]
    for name, reader in (("accelerator_config", AcceleratorConfig), ("lr_scheduler_kwargs", scheduler)):
        value, takes = values[name], inspect.signature(reader).parameters
        for key in value if isinstance(value, dict) else ():
            if key not in takes:
                similar = difflib.get_close_matches(str(key), takes, 1)
                hint = f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(takes)}"
                raise ValueError(f"{name}={value}: {reader.__name__} takes no {key!r}; {hint}")


def can_shard() -> bool:
    "Whether the installed torch takes `fsdp`."
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def check_sharding(args: Any) -> None:
    "ValueError for sharding without ranks or with a torch that cannot, and for shards of what is not sharded."
    if args.fsdp and not torch.distributed.is_initialized():
        raise ValueError(
            "fsdp=True: there is one process, and nothing to share; start one for each device: "
            "speculators-nb-torchrun --nproc-per-node DEVICES train …, or leave fsdp (--fsdp) out"
        )
    if args.fsdp and not can_shard():
        raise ValueError(
            f"fsdp=True: torch {torch.__version__} stops at a row that reaches fewer weights "
            "on one rank than another; install torch 2.13 or newer, or leave fsdp (--fsdp) out"
        )
    if args.checkpoint_format == "sharded" and not args.fsdp:
        raise ValueError(
            "checkpoint_format='sharded': without fsdp every rank holds all; give fsdp "
            "(--fsdp), or leave checkpoint_format out"
        )


def check_shared_rows(args: Any) -> None:
    "ValueError for ranks that cannot be divided into groups that share a row, and for sharded weights beside it."
    size, ranks = args.context_parallel_size, args.world_size
    if ranks % size:
        raise ValueError(
            f"context_parallel_size={size}: {ranks} ranks are no multiple of it; start as many "
            f"(speculators-nb-torchrun --nproc-per-node {size} train …), or leave it out"
        )
    if size > 1 and args.fsdp:
        raise ValueError(
            f"context_parallel_size={size} with fsdp=True: was never tried together; leave one out "
            "(--context-parallel-size, --fsdp)"
        )


def check_stop_signal(args: Any) -> None:
    "ValueError for a checkpoint on SIGTERM with several ranks, which notice the signal at different steps."
    if args.enable_jit_checkpoint and args.world_size > 1:
        raise ValueError(
            f"enable_jit_checkpoint=True: each of {args.world_size} ranks would stop at a step of its own, and the "
            "others wait for it; leave it out, and save more often (save_strategy='steps', save_steps=100)"
        )


log = logging.getLogger(__name__)


# optimizer -> learning rate where none is given; measured in benchmarks/real/results/UPSTREAM.md
LEARNING_RATES = {"muon": 3e-3, "adamw": 1e-4}


@dataclass
class SpeculatorTrainingArguments(TrainingArguments):
    "transformers' `TrainingArguments`: other defaults, and new fields above the line."

    if TYPE_CHECKING:
        output_dir: str = ""  # what `TrainingArguments` makes of None

    total_seq_len: int = 2048  # positions in a packed row; one row per device and accumulation
    optimizer: str = "muon"  # Muon for hidden matrices, AdamW for the rest; or "adamw" for all
    muon_learning_rate: float | None = None  # Muon's own learning rate; None: learning_rate
    early_stopping_patience: int | None = None  # evaluations without a better one; None: never
    regenerate_every: int | None = None  # epochs from one set of fresh answers to the next
    regenerate_temperature: float = 1.0  # at which the verifier writes them
    save_dtype: str | None = None  # of the saved drafter, e.g. "bfloat16"; None: float32
    overwrite: bool = False  # train anew in a folder that holds a drafter or checkpoints
    fsdp: bool = False  # type: ignore[assignment] # split weights and optimizer over the ranks
    checkpoint_format: str = "full"  # or "sharded": with fsdp, each rank writes its part
    context_parallel_size: int = 1  # ranks that share a row, each with a part of its positions
    # ---
    learning_rate: float | None = None  # type: ignore[assignment] # None: by `LEARNING_RATES`
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.01  # a share of all steps, or a number of steps if >= 1
    weight_decay: float = 0.01
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1
    logging_steps: float = 10
    logging_nan_inf_filter: bool = False
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2  # the best checkpoint and the last one
    load_best_model_at_end: bool = True
    restore_callback_states_from_checkpoint: bool = True  # keep counting patience on resume
    remove_unused_columns: bool = False
    report_to: str | list[str] = "none"
    ddp_broadcast_buffers: bool | None = False  # a drafter's buffers are constants
    # a row without loss reaches no weights; transformers' default waits for them where layers are computed again
    ddp_find_unused_parameters: bool | None = True

    def __post_init__(self):
        defaults = {f.name: f.default for f in fields(type(self))}
        values = {name: getattr(self, name) for name in defaults}
        check_options({name: v for name, v in values.items() if v != defaults[name]})
        refuse_fields(values, defaults)
        check_keywords(values)
        if self.learning_rate is None:
            self.learning_rate = LEARNING_RATES[self.optimizer]
        if self.early_stopping_patience is not None and self.eval_strategy in ("no", None):
            raise ValueError("early_stopping_patience needs evaluations: set eval_strategy to 'epoch' or 'steps'.")
        if self.early_stopping_patience is not None:  # transformers sets it only to load the best at the end
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        if not torch.accelerator.is_available():
            refuse_compilation(values)
            self.use_cpu = True
            self.dataloader_pin_memory = False
        sharded, self.fsdp = self.fsdp, False  # accelerate's own road is not taken
        super().__post_init__()
        self.fsdp, self.fsdp_config = sharded, {}
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.accelerator_config, name):
                raise ValueError(
                    f"accelerator_config: {name}=True: a batch is one packed row, which each rank reads itself; "
                    "leave it out"
                )
        check_sharding(self)
        check_shared_rows(self)
        check_stop_signal(self)
        check_loggers(self.loggers)
        if self.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
            log.warning(
                f"{self._n_gpu} devices are here, and one process trains on one of them. For "
                f"all: {torchrun_line(self._n_gpu, sys.argv)}"
            )
            self._n_gpu = 1  # transformers would take all, with DataParallel

    @property
    def data_ranks(self) -> int:
        "How many rows are read at a time: ranks, or groups of ranks that share one."
        return self.world_size // self.context_parallel_size

    @property
    def data_rank(self) -> int:
        "Which of them this rank reads."
        return self.process_index // self.context_parallel_size

    @property
    def loggers(self) -> list[str]:
        "`report_to`, of which transformers makes a list, though its type allows one name."
        names = self.report_to or []
        return [names] if isinstance(names, str) else names


def check_names(model: Any, arguments: dict) -> None:
    """ValueError for a training argument that is no field of `SpeculatorTrainingArguments`, and that neither the model
    (a drafter or its class) nor the trainer takes."""
    accepted = inspect.signature(model.get_trainer_kwargs).parameters
    names = set(accepted)
    argument_of = {inner: name for name, inner in getattr(model, "forward_names", {}).items()}
    if hasattr(model, "from_training_args"):
        names |= set(inspect.signature(model.from_training_args).parameters)
    if hasattr(model, "training_arguments"):
        names |= model.training_arguments().keys()
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        names |= model.get_trainer_kwargs(**arguments)[0].keys() - argument_of.keys()
    settings = {f.name for f in fields(SpeculatorTrainingArguments)}
    for name in arguments.keys() - names:
        similar = [argument_of[name]] if name in argument_of else None
        similar = similar or difflib.get_close_matches(name, names | settings, 1)
        hint = f" Did you mean {similar[0]}?" if similar else ""
        model_class = model if isinstance(model, type) else type(model)
        raise ValueError(
            f"{name}={arguments[name]!r}: neither {model_class.__name__} nor the trainer takes this name.{hint}"
        )


Measure = Callable[[Any], Mapping[str, float]]  # a drafter -> numbers by name


def check_measure(measure: Measure | None, args: SpeculatorTrainingArguments) -> None:
    "ValueError where a run has no evaluations, or keeps the best by a number that it lacks."
    best = args.metric_for_best_model or ""
    if measure is not None and args.eval_strategy == "no":
        raise ValueError(
            "measure is given and the run has no evaluations (eval_strategy='no', or no "
            "held-out rows): leave it out, or hold rows out (eval_share)"
        )
    if measure is None and best.removeprefix("eval_") == "mean_length":
        raise ValueError(
            f"metric_for_best_model={best!r}: nothing decodes at an evaluation; give measure "
            "(decode_prompts of the command), or keep the best by eval_loss"
        )
