"""Base class of all drafters: borrowed embedding and head, draft vocabulary, checkpoints, loading by name.
A drafter is a few layers between the verifier's embedding and the verifier's head."""

import copy
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ..core.checkpoints import hub_access, model_file, push_errors, read_state, resolve_checkpoint, save_tensors
from ..core.config import SpeculatorModelConfig, SpeculatorsConfig, import_models
from ..core.files import NotSupported, read_object
from ..core.options import REGISTERED, check_options, shown
from ..core.registry import ClassRegistryMixin
from ..nn.draft_vocabulary import check_vocab_mapping, draft_to_verifier
from ..nn.lora import AdapterRecord, load_adapter, merged_state, remove_adapter, save_adapter
from ..nn.losses import parse_loss
from ..nn.supervision import check_batch
from ..nn.target_head import head_of_family, target_head_for, text_config, verifier_config
from ..verifier.parts import load_verifier_tensors
from .draft_network import (
    WrongKind,
    adopt_upstream_names,
    check_kind,
    check_names_and_shapes,
    check_parts,
    check_shape,
    check_values,
    unset,
)
from .drafter_arguments import check_whole_vocabulary
from .formats import Tensors, pickled_tensors
from .quantised import stored_quantization, unquantised_config, whole_weights
from .serving_rules import Rule

_Class = TypeVar("_Class")
log = logging.getLogger(__name__)


class ForwardOutput(NamedTuple):
    "What a drafter's `forward` returns for one packed row."

    tokens: Any  # draft tokens of the dense definition, int64; None on the lean path
    loss: Any  # [] float32, to be minimised; None where there is nothing to score against
    metrics: dict[str, Tensor]  # pairs name_sum and name_total, each [] float


FOREIGN: list[Callable] = []  # reads other projects' checkpoints; `models.convert` enters it


def is_foreign(path: str | os.PathLike) -> bool:
    "Whether a drafter (folder, hub id, or file with its weights) was stored by another project."
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        return False
    return not os.path.isfile(path) and "speculators_model_type" not in read_object(model_file(path))


def stored_config(path: str | os.PathLike | None, config: Any = None) -> SpeculatorModelConfig:
    """The config of a drafter: of its folder or hub id, or the one that is given instead, itself or by the folder or
    file that holds it. Errors: ValueError without any; TypeError for something else."""
    if path is None and config is None:
        raise ValueError("from_pretrained needs a path or a config")
    if isinstance(config, SpeculatorModelConfig):
        return config
    if not isinstance(config, (str, os.PathLike, type(None))):
        raise TypeError(
            f"config is a {type(config).__name__}; give a SpeculatorModelConfig, or the folder or file that holds one"
        )
    if config is not None and os.path.isfile(config):
        return SpeculatorModelConfig.from_dict(read_object(config))
    place: Any = path if config is None else config
    return SpeculatorModelConfig.from_pretrained(place)


def stored_state(
    path: str | os.PathLike,
    use_safetensors: bool | None = None,
    dtype: torch.dtype | None = None,
    quiet: bool = False,
) -> Tensors:
    """The tensors of a drafter (folder or hub id); `use_safetensors=False`: of pytorch_model.bin, read as data.
    Quantised weights are made whole in `dtype`, which is logged unless `quiet` (`whole_weights`). Errors:
    FileNotFoundError, ValueError."""
    if use_safetensors is False:
        return pickled_tensors(model_file(path, "pytorch_model.bin"))
    folder = resolve_checkpoint(path)
    return whole_weights(read_state(folder), stored_quantization(folder), path, dtype, quiet)


def commonest_dtype(state: Tensors) -> torch.dtype | None:
    "Of the floating tensors; None: there are none."
    counts = Counter(w.dtype for w in state.values() if w.is_floating_point())
    return max(counts, key=lambda dtype: (counts[dtype], str(dtype)), default=None)


def requested_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of all floating weights; None: None or "auto", as they are stored. Errors: ValueError for what is no
    floating dtype."""
    if dtype is None or dtype == "auto":
        return None
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(f"dtype={shown(dtype)}: is no floating dtype, e.g. 'bfloat16'")
    return named


def requested_device(device_map: Any) -> torch.device | None:
    """The device of a `device_map`: that device, "auto", or {"": device}; None: where it is. A drafter is small and is
    kept on one. Errors: ValueError."""
    place: Any = device_map
    if isinstance(device_map, dict):
        place = device_map.get("") if len(device_map) == 1 else "several"
    if place == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return None if device_map is None else torch.device(place)
    except (RuntimeError, TypeError) as e:
        raise ValueError(
            f"device_map={shown(device_map)}: a drafter is on one device; give that, e.g. 'cuda:0', or 'auto'"
        ) from e


class NoLayers(AttributeError, ValueError):
    "A drafter without decoder layers."


def verify_training_compatible(model: Any) -> None:
    """Raise ValueError, saying what is missing, unless `model` can be trained: registered, with layers, and with all
    borrowed weights in place. Errors: WrongKind for another class, NoLayers."""
    kind = type(model)
    if not isinstance(model, SpeculatorModel):
        raise WrongKind(f"model is a {kind.__name__}, not a SpeculatorModel; subclass it (see docs/architecture.md)")
    known = SpeculatorModel.registered_classes().get(model.config.speculators_model_type)
    known = known and known.class_of(model.config)
    if kind.__mro__[1].__name__ == "FSDPModule":  # torch made a subclass of it
        kind = kind.__mro__[2]
    # by name: a notebook and its module may both have made the class
    if known is None or known.__qualname__ != kind.__qualname__:
        raise ValueError(f"{kind.__name__} is not registered; decorate it with @SpeculatorModel.register(name)")
    if not hasattr(model, "layers"):
        raise NoLayers(
            f"{kind.__name__} has no attribute 'layers' (an nn.ModuleList); distributed training shards by it"
        )
    weights = (*model.named_parameters(), *model.named_buffers())
    floats = {name: w for name, w in weights if w.is_floating_point()}
    floats = {name: getattr(w, "to_local", lambda w=w: w)() for name, w in floats.items()}
    absent = [name for name, w in floats.items() if w.flatten()[:1].isnan().any()]
    if model.target_head.weight is None and not model.own_heads:
        absent.append("target_head.weight")
    if absent:
        raise ValueError(f"not loaded yet: {', '.join(absent)}; call model.load_verifier_weights(verifier)")


class SpeculatorModel(ClassRegistryMixin, PreTrainedModel):
    """Base of all drafters: the verifier's embedding and head, its final norm, and the draft
    vocabulary; where these come from, how a checkpoint is written, checked and found by name,
    and how a fresh drafter is made of training arguments.

    A subclass registers under its `speculators_model_type`, names its `config_class`, and gives
    `layers`, `forward`, `shift` and `drafter`, and those of the following that differ (the
    contracts of docs/architecture.md)."""

    config_class: type[SpeculatorModelConfig] = SpeculatorModelConfig
    own_heads = False  # True: own heads, and only the verifier's final norm
    several_rows = False  # True: trains on a batch of texts too, not on one packed row alone
    # prefixes of parameters whose matrices are hidden ones to an optimizer, tables among them
    hidden_matrices: tuple[str, ...] = ()
    not_saved = ("target_head.",)  # prefixes of what a checkpoint leaves out
    # needed to draft; may be absent from a checkpoint: the verifier has them
    from_verifier = "embed_tokens.weight", "lm_head.weight"

    # training arguments
    training_forward = "forward"  # the method whose keyword-only parameters are arguments
    forward_names = {"loss_fn": "loss_config"}  # argument -> its name in `forward`
    config_arguments: tuple[str, ...] = ()  # config fields that are arguments
    training_defaults: dict[str, Any] = {}  # those that differ from `forward`'s and the config's
    drafted_by = ""  # the argument that says how many tokens a serving engine drafts
    # fields of a batch that decide shapes: a trainer leaves them on the host, where `forward`
    # reads them without a wait for the device
    read_on_host: tuple[str, ...] = ()
    reads_progress = False  # True: in training `forward` gets `progress`, the share of the steps that are done
    lab_arguments: dict[str, Any] = {}  # what `lab.experiment` gives besides, e.g. sizes
    whole_vocabulary = ""  # why the draft vocabulary is the verifier's; "": it may be smaller
    fixed_layers = ""  # why the draft layers cannot be chosen; "": they can
    single_layer = ""  # why there cannot be more than one; "": there can
    verify_training_compatible = staticmethod(verify_training_compatible)

    adapter: AdapterRecord | None = None  # of `nn.lora`, while there is one on the weights
    served_as: tuple[str, bool]  # vLLM's method, and whether it drafts all tokens in parallel
    serving_rules: tuple[Rule, ...] = ()  # what vLLM would refuse, see `models.serving_rules`
    serving_cautions: tuple[Rule, ...] = ()  # what it does differently on some builds or for some requests alone

    # of transformers
    supports_gradient_checkpointing = True
    base_model_prefix = ""
    main_input_name = "input_ids"

    if TYPE_CHECKING:  # attributes that `__init__` or a subclass makes, for type checkers
        embed_tokens: nn.Embedding  # [V, H]; None with `own_heads`
        lm_head: nn.Linear  # [Vd, H]; None with `own_heads`
        verifier_layers: Any  # int; None: no verifier's weights yet
        t2d: Tensor | None  # [V] bool; None: the whole vocabulary
        d2t: Tensor | None  # [Vd] int64
        shift: Any  # a function of one sample, or None

        def drafter(self, *args: Any, **kwargs: Any) -> Any: ...  # a Drafter

        def to(self, *args: Any, **kwargs: Any) -> Self: ...

    def __init__(self, config: SpeculatorModelConfig):
        check_kind(config)
        super().__init__(config)
        v, h = config.sizes.vocab_size, config.sizes.hidden_size
        vd = getattr(config, "draft_vocab_size", v)
        if vd > v:
            raise ValueError(
                f"draft_vocab_size: {vd} is larger than the verifier's vocabulary of {v}; choose at most {v}"
            )
        self.embed_tokens = self.lm_head = None  # type: ignore[assignment] (see the class)
        if not self.own_heads:
            self.embed_tokens = nn.Embedding(v, h, _weight=torch.full((v, h), float("nan")))
            self.embed_tokens.weight.requires_grad_(bool(getattr(config, "embed_requires_grad", False)))
            self.lm_head = nn.Linear(h, vd, bias=False, device="meta")
            self.lm_head.weight = unset(vd, h)
        reduced = vd < v
        self.register_buffer("t2d", torch.zeros(v, dtype=torch.bool) if reduced else None)
        self.register_buffer("d2t", torch.zeros(vd, dtype=torch.int64) if reduced else None)
        self.target_head = target_head_for(config)
        self.verifier_layers = None  # n; its last state enters "layer n"
        self.register_load_state_dict_pre_hook(adopt_upstream_names)
        self.register_forward_pre_hook(check_batch, with_kwargs=True)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear) and module is not self.lm_head:
            module.weight.data.normal_(0, getattr(self.config.sizes, "initializer_range", 0.02))
            if module.bias is not None:
                module.bias.data.zero_()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """From now on layers are computed again on the way back (1604.06174): a layer keeps what it reads, as
        transformers' layers do; with `gradient_checkpointing_kwargs` of torch's `checkpoint`, and `every_n_layers` and
        `offload` of newer versions of transformers. Errors: ValueError for the reentrant way: keys and values leave a
        layer beside its output, and it would lose their gradients."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "gradient_checkpointing_kwargs: use_reentrant=True loses the gradients of keys "
                "and values that later steps read; leave it out"
            )
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def enable_input_require_grads(self) -> None:
        "Nothing: only the reentrant way needs inputs that require a gradient."

    @property
    def hidden_size(self) -> int:  # H
        "The width of the verifier's hidden states."
        return self.config.sizes.hidden_size

    @property
    def verifier_vocab_size(self) -> int:  # V
        "The verifier's vocabulary size."
        return self.config.target_vocab_size

    target_vocab_size = verifier_vocab_size

    @property
    def draft_vocab_size(self) -> int:  # Vd
        "How many tokens the drafter can draft."
        return getattr(self.config, "draft_vocab_size", self.verifier_vocab_size)

    @property
    def use_draft_vocab(self) -> bool:
        "Whether the draft vocabulary is smaller than the verifier's."
        return self.draft_vocab_size < self.verifier_vocab_size

    @property
    def target_layer_ids(self) -> list[int] | None:  # None: the config does not say
        """The verifier's layers whose hidden states are read; a drafter without such a field
        reads the state before the final norm, which enters layer n."""
        fields = vars(self.config)
        named = [name for name in fields if name.endswith("aux_hidden_state_layer_ids")]
        if named:
            return fields[named[0]]
        return None if self.verifier_layers is None else [self.verifier_layers]

    @property
    def verifier_norm(self) -> nn.Module:
        "The verifier's final norm, of the target head."
        return self.target_head.norm

    @property
    def verifier_lm_head(self) -> nn.Linear | None:  # [Vd, H]; None: no verifier's rows yet
        "The target head's rows as a layer; scale and soft-cap are `target_head.finish`'s."
        rows = self.target_head.weight
        if rows is None:
            return None
        head = nn.Linear(*rows.shape[::-1], bias=False, device="meta")
        head.weight = rows
        return head

    # the verifier's part

    def to_verifier(self, ids: Tensor) -> Tensor:  # draft ids [...] -> verifier ids [...]
        "The verifier's ids of draft ids."
        return draft_to_verifier(ids, self.d2t)

    def load_vocab_mappings(
        self,
        t2d: Tensor | None,  # [V] bool: which verifier ids are in the draft vocabulary
        d2t: Tensor | None,  # [Vd] int64: verifier id minus draft id
    ):
        """Set the draft vocabulary. Both or neither; neither only where the draft vocabulary is
        the verifier's. Errors: ValueError (see `draft_vocabulary.check_vocab_mapping`)."""
        check_vocab_mapping(t2d, d2t, self.target_vocab_size, self.config.draft_vocab_size)
        for own, given in ((self.t2d, t2d), (self.d2t, d2t)):
            if own is not None and given is not None:
                own.copy_(given)

    def load_verifier_weights(self, verifier: str | os.PathLike | None = None):
        """Borrow embedding, head rows and final norm of a verifier (folder or hub id; None: the config's). What a
        checkpoint has loaded already stays. Errors: ValueError for a verifier of another shape, or where none is
        named."""
        source = verifier or self.config.verifier_name
        config = verifier_config(source)
        text = text_config(config)
        check_shape(self, source, text.hidden_size)
        parts = load_verifier_tensors(source, self.t2d)
        check_parts(self, source, parts)
        head = head_of_family(config).to(self.device)
        self._borrow(parts, head)
        self.target_head = head
        self.verifier_layers = text.num_hidden_layers

    def _borrow(self, parts, head):
        "Embedding and head rows where the checkpoint had none; one copy of the head where drafter and verifier agree."
        if self.own_heads:
            return head.load_norm(parts)
        with torch.no_grad():
            for weight, part in ((self.embed_tokens.weight, "embeddings"), (self.lm_head.weight, "head")):
                if weight[0, 0].isnan():
                    weight.copy_(parts[part])
        rows = parts["head"].to(self.lm_head.weight)
        if torch.equal(self.lm_head.weight, rows):
            rows = self.lm_head.weight
        head.load(parts | {"head": rows})

    def _find_verifier(self, path, verifier):
        "Borrow from the verifier: the given one, or where it can be had the config's."
        of = self.config.speculators_config
        named = of.verifier.name_or_path if of else None
        reason = f"config.json names no verifier that is here (name_or_path={named!r})"
        if verifier or (named and (Path(named) / "config.json").is_file()):
            return self.load_verifier_weights(verifier or named)
        if verifier is False:
            reason = "verifier=False does without"
        elif named and not os.path.isabs(named) and not os.path.exists(named):
            try:
                return self.load_verifier_weights(named)
            except FileNotFoundError as e:  # needed for training, and perhaps not for drafting
                reason = str(e)
                log.info("%s: without its verifier: %s", path, reason)
        absent = [name for name in self.from_verifier if self.get_parameter(name).flatten()[0].isnan()]
        if absent:
            raise ValueError(
                f"{str(path)!r} leaves {', '.join(absent)} to the verifier; give verifier=, a "
                f"folder or hub id ({reason})"
            )

    # checkpoints

    def check_state(self, state: Tensors, path: str | os.PathLike | None):
        """Raise ValueError, naming the tensors and the checkpoint (`path`), unless a state dict has all that this model
        needs in the right shapes, finite, with one vocabulary, and nothing else."""
        mine = {n: w for n, w in self.state_dict().items() if not n.startswith(self.not_saved)}
        ignored = ("verifier_", *self.not_saved)
        theirs = {n: w for n, w in state.items() if not n.startswith(ignored)}
        check_names_and_shapes(mine, theirs, self.from_verifier, path)
        check_values(mine, theirs, path)
        if "t2d" in mine:
            try:
                check_vocab_mapping(state["t2d"], state["d2t"], self.target_vocab_size, self.config.draft_vocab_size)
            except ValueError as e:
                raise ValueError(f"checkpoint {str(path)!r}: {e}") from None

    def _fill(self, state, path):
        "Load a state dict, all of it or an error that names what does not fit."
        self.check_state(state, path)
        self.load_state_dict(state, strict=False)

    def saved_state(self, state_dict: Tensors | None = None) -> Tensors:
        "What a checkpoint holds of the model's state, or of this one: all but what `not_saved` names."
        state = merged_state(self, state_dict or self.state_dict())
        return {n: w for n, w in state.items() if not n.startswith(self.not_saved)}

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,  # made if absent
        state_dict: dict | None = None,  # instead of the model's own (gathered by a trainer)
        dtype: torch.dtype | None = None,  # of the stored floating tensors; None: as they are
        **kwargs,  # accepted from transformers.Trainer, without effect
    ):
        """Write model.safetensors, then config.json, each atomically, and nothing else; of a
        drafter with an adapter the merged weights, and the adapter alone in `adapter`."""
        folder = Path(save_directory)
        state = {}
        for name, weight in self.saved_state(state_dict).items():
            if dtype and weight.is_floating_point():
                weight = weight.to(dtype)
            state[name] = weight.detach().cpu().contiguous()
        kind = type(self).__name__.removeprefix("FSDP")  # as torch names sharded models
        if kind not in (self.config.architectures or ()):
            self.config.architectures = [kind]
        self.config.dtype = dtype or self.dtype
        save_tensors(state, folder / "model.safetensors", metadata={"format": "pt"})
        if self.adapter:
            save_adapter(self, folder / "adapter")
        self.config.save_pretrained(folder)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None = None,  # folder or hub id
        *,
        config: SpeculatorModelConfig | str | os.PathLike | None = None,  # None: the stored one
        state_dict: dict | None = None,  # instead of the stored one; needs a config
        t2d: Tensor | None = None,  # [V] bool, where the checkpoint holds none
        d2t: Tensor | None = None,  # [Vd]
        verifier: str | os.PathLike | bool | None = None,  # None: the config's; False: none
        adapter: str | os.PathLike | None = None,  # a LoRA in PEFT's files, merged; or a hub id
        dtype: torch.dtype | str | None = None,  # of all floating weights; None: that of most stored ones
        torch_dtype: torch.dtype | str | None = None,  # older name of dtype
        device_map: Any = None,  # the device, "auto", or {"": device}
        ignore_mismatched_sizes: bool = False,  # such tensors get first weights, with a warning
        use_safetensors: bool | None = None,  # False: pytorch_model.bin, read as data
        weights_only: bool = True,  # of a pickle; anything else would run its code
        cache_dir: str | os.PathLike | None = None,  # of hub ids; so are the next four
        force_download: bool = False,  # fetch again what the cache holds
        local_files_only: bool = False,  # the cache alone
        token: str | bool | None = None,  # None: the stored one
        revision: str | None = None,  # branch, tag or commit of the drafter; None: main
    ) -> Self:  # of the class that the config names, in eval mode
        """Load a drafter; the config's `speculators_model_type` names its class. The
        verifier's embedding, head and norm are read from its folder or hub id; training needs
        them, and a drafter that stores its own drafts without. Where `verifier` is given, a
        checkpoint of another project is converted. Weights in FP8 are made whole, in `dtype`.
        Errors: FileNotFoundError; ValueError naming missing, unexpected or misshapen tensors, or
        an adapter of another drafter."""
        path = pretrained_model_name_or_path
        device = requested_device(device_map)
        wanted = requested_dtype(dtype or torch_dtype)
        if not weights_only:
            raise ValueError("weights_only=False: would run code of the checkpoint; leave it")
        with hub_access(
            cache_dir=cache_dir,
            token=token,
            revision=revision,
            local_files_only=local_files_only or None,
            force_download=force_download or None,
        ):
            given = config is not None or state_dict is not None
            if verifier and path is not None and not given and is_foreign(path):
                import_models()
                drafter_config, state = FOREIGN[0](path, verifier, wanted)
            else:
                drafter_config, state = stored_config(path, config), state_dict
                if state is None:
                    if path is None:
                        raise ValueError(
                            f"from_pretrained got a {type(drafter_config).__name__} alone; give the path or the "
                            "state_dict of a drafter too, or make a fresh one by its class: Class(config)"
                        )
                    state = stored_state(path, use_safetensors, wanted)
            drafter_config = unquantised_config(drafter_config)
            klass = cls.registered_model_class_from_config(drafter_config)
            if not issubclass(klass, cls):
                raise ValueError(
                    f"{str(path)!r} is a {klass.__name__}, not a {cls.__name__}; use SpeculatorModel.from_pretrained"
                )
            reduced = getattr(drafter_config, "draft_vocab_size", None) not in (None, drafter_config.target_vocab_size)
            if reduced and t2d is not None and d2t is not None:
                state = {**state, "t2d": t2d, "d2t": d2t}
            if ignore_mismatched_sizes:
                state = klass(drafter_config)._with_first_weights(state, path)
            with torch.device("meta"):  # checked before memory is taken
                klass(drafter_config).check_state(state, path)
            model = klass(drafter_config)
            model.load_state_dict(dict(state), strict=False)
            if adapter is not None:
                with hub_access(revision="main"):  # it is another model
                    load_adapter(model, adapter)
                remove_adapter(model, merge=True)
            if (found := wanted or commonest_dtype(state)) is not None:
                model.to(found)
            if t2d is not None or d2t is not None:
                model.load_vocab_mappings(t2d, d2t)
            with hub_access(revision="main"):  # the verifier is another model
                model._find_verifier(path, verifier)
        return (model if device is None else model.to(device)).eval()

    def _with_first_weights(self, state, path):
        "What `ignore_mismatched_sizes` makes of a checkpoint: this fresh model's weights where shapes differ."
        mine = self.state_dict()
        other = [n for n, w in state.items() if n in mine and mine[n].shape != w.shape]
        for name in other:
            stored, needed = tuple(state[name].shape), tuple(mine[name].shape)
            log.warning("%s: %s is %s, the model's is %s: made anew", path, name, stored, needed)
        fresh = {n: mine[n] for n in other if n not in self.from_verifier}
        return {n: w for n, w in state.items() if n not in other} | fresh

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload config and weights to owner/model; `kwargs` are transformers': token, private, revision, …; returns
        huggingface_hub's CommitInfo. Errors: OSError in one line: model, reason, remedy."""
        with push_errors(repo_id):
            push: Any = super().push_to_hub
            return push(repo_id, **kwargs)

    # names

    @classmethod
    def registered_classes(cls) -> dict[str, type]:  # name -> class
        "All drafters, the package's own and those of discovered packages."
        import_models()
        return super().registered_classes()

    @classmethod
    def registered_class(cls, name: str) -> type:  # a speculators_model_type
        """Which class registered under a name; the package's own are imported on first
        use. Errors: ValueError listing the known ones."""
        if name not in SpeculatorModel.registry:
            import_models()
        return super().registered_class(name)

    @staticmethod
    def registered_model_class_from_config(config: SpeculatorModelConfig) -> type:
        "Which SpeculatorModel subclass a config belongs to. Errors: WrongKind for what is no drafter's config."
        check_kind(config)
        import_models()
        name, kind = config.speculators_model_type, type(config)
        if name not in SpeculatorModel.registry:
            of_config = (c for c in SpeculatorModel.registry.values() if c.config_class is kind)
            if (found := next(of_config, None)) is not None:  # a model of another name
                return found
        return SpeculatorModel.registered_class(name).class_of(config)

    @classmethod
    def class_of(cls, config: SpeculatorModelConfig) -> type:  # of a registered class
        "This class, or the variant that computes what the config describes."
        return cls

    @classmethod
    def register_decorator(cls, klass: type[_Class], name: str) -> type[_Class]:
        "Enter a drafter; its name is a word of the option `algorithm` from then on."
        REGISTERED.add(name)
        return super().register_decorator(klass, name)

    # training

    @classmethod
    def forward_arguments(cls) -> dict[str, Any]:  # argument -> default
        "The training arguments that `forward` takes, and that of its base where it passes `**kwargs` on."
        argument_of = {parameter: name for name, parameter in cls.forward_names.items()}
        defaults: dict[str, Any] = {}
        for forward in (vars(c)[cls.training_forward] for c in cls.__mro__ if cls.training_forward in vars(c)):
            parameters = inspect.signature(forward).parameters.values()
            own = {argument_of.get(p.name, p.name): p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
            defaults = own | defaults
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return {name: cls.training_defaults.get(name, old) for name, old in defaults.items()}

    @classmethod
    def training_arguments(cls) -> dict[str, Any]:  # argument -> default
        "All training arguments of this drafter."
        fields = {name: getattr(cls.config_class, name) for name in cls.config_arguments}
        return cls.forward_arguments() | fields | cls.training_defaults

    def generator(self, seed: int) -> torch.Generator:
        """What a step draws its rows with. Evaluation always draws the same; training takes its seeds from torch's own
        generator, which a trainer seeds, saves and restores."""
        drawn = int(torch.randint(2**62, ())) if self.training else seed
        return torch.Generator().manual_seed(drawn)

    @classmethod
    def get_trainer_kwargs(cls, **training_args) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `forward` is called with, in training and in evaluation, by a trainer's arguments, those of other parts
        too. An argument that is None takes its default; a switch that is off by default is left to `forward`."""
        defaults = cls.forward_arguments()
        on = {name: value for name, value in defaults.items() if value not in (None, False)}
        given = {name: training_args.get(name) for name in defaults}
        chosen = on | {name: value for name, value in given.items() if value is not None}
        kwargs = {cls.forward_names.get(name, name): value for name, value in chosen.items()}
        if "loss_config" in kwargs:
            kwargs["loss_config"] = parse_loss(kwargs["loss_config"])
        return kwargs, dict(kwargs)

    @classmethod
    def from_training_args(
        cls,
        # of the draft layers, as `layers.draft_layer_config` makes it
        transformer_layer_config: PretrainedConfig | None = None,
        t2d: Tensor | None = None,  # [V] bool, for a reduced draft vocabulary
        d2t: Tensor | None = None,  # [Vd] int64: verifier id minus draft id
        *,
        verifier_config: PretrainedConfig | None = None,  # the first argument's documented name
        verifier_name_or_path: str,  # its folder or hub id
        draft_vocab_size: int | None = None,  # None: as many as t2d selects, or all
        draft_attn_impl: str | None = None,  # default of `attn_impl`, by transformers' name
        **training_args,  # those of `training_arguments`; others are not looked at
    ) -> Self:  # with the verifier's weights, ready to train
        """A fresh drafter. Errors: ValueError for a draft vocabulary that does not fit;
        NotSupported for a class that says nothing about its config."""
        if cls.config_class is SpeculatorModelConfig:
            raise NotSupported(
                f"{cls.__name__} has neither a config_class of its own nor a from_training_args; give it one of them"
            )
        check_options({"draft_attn_impl": draft_attn_impl})
        verifier = verifier_name_or_path
        layer = cls.draft_layers(transformer_layer_config or verifier_config, verifier)
        if draft_attn_impl is not None:
            layer = copy.deepcopy(layer)
            layer._attn_implementation = draft_attn_impl
        arguments = cls.training_arguments()
        arguments |= {name: value for name, value in training_args.items() if value is not None}
        fields: dict[str, Any] = {}
        if cls.whole_vocabulary:
            check_whole_vocabulary(layer, t2d, d2t, draft_vocab_size, cls.whole_vocabulary)
        if hasattr(cls.config_class, "draft_vocab_size"):
            fields["draft_vocab_size"] = draft_vocab_size or (layer.vocab_size if t2d is None else int(t2d.sum()))
        if not cls.own_heads:
            fields["transformer_layer_config"] = layer
        fields |= {name: arguments[name] for name in cls.config_arguments}
        fields |= cls.verifier_fields(layer, verifier, arguments)
        kind, K = cls.config_class.speculators_model_type, cls.tokens_to_draft(arguments)
        config = cls.config_class(speculators_config=SpeculatorsConfig.greedy(kind, K, verifier), **fields)
        return cls.with_first_weights(config, t2d, d2t, arguments)

    # these three a subclass replaces; `arguments` are all training arguments, with defaults where not given

    @classmethod
    def draft_layers(cls, layer: PretrainedConfig | None, verifier: str) -> PretrainedConfig:
        """The config of the draft layers, of that which a trainer made for the verifier (folder or hub id). Errors:
        TypeError where it is needed and missing."""
        if layer is None:
            raise TypeError("verifier_config is missing: the config of the draft layers")
        return layer

    @classmethod
    def verifier_fields(cls, layer: PretrainedConfig, verifier: str, arguments: dict[str, Any]) -> dict[str, Any]:
        "Config fields, name -> value, that depend on the verifier (folder or hub id) and the draft layers."
        return {}

    @classmethod
    def with_first_weights(
        cls, config: SpeculatorModelConfig, t2d: Tensor | None, d2t: Tensor | None, arguments: dict[str, Any]
    ) -> Self:
        "The weights that training starts from: random ones, and the verifier's. t2d [V] bool, d2t [Vd] int64."
        return cls.for_verifier(config, t2d, d2t)

    @classmethod
    def for_verifier(cls, config: SpeculatorModelConfig, t2d: Tensor | None = None, d2t: Tensor | None = None) -> Self:
        """A fresh drafter, with the weights of the verifier that its config names, ready to train; t2d [V] bool and
        d2t [Vd] for a reduced draft vocabulary. Errors: ValueError for a reduced draft vocabulary without its mapping,
        or a verifier of another shape."""
        model = cls(config)
        if t2d is not None or d2t is not None or model.t2d is not None:
            model.load_vocab_mappings(t2d, d2t)
        model.load_verifier_weights()
        return model

    @classmethod
    def tokens_to_draft(cls, arguments: dict[str, Any]) -> int:  # training arguments -> K
        "How many tokens a serving engine shall draft."
        return arguments[cls.drafted_by]

    @classmethod
    def arguments_to_draft(cls, k: int) -> dict[str, Any]:  # K -> training arguments
        "What to train with, so that `tokens_to_draft` is k: k, or one more for an anchor."
        drafted = cls.tokens_to_draft(cls.training_arguments() | {cls.drafted_by: k})
        return {cls.drafted_by: 2 * k - drafted}

    def kept_arguments(self) -> dict[str, Any]:  # argument -> as it is here
        """The training arguments that shape a fresh drafter: here config and weights have
        decided them. One that the config does not say is the default."""
        config, of = self.config, self.config.speculators_config
        layer = getattr(config, "transformer_layer_config", None)
        in_forward = self.forward_arguments()
        fresh = {name: default for name, default in self.training_arguments().items() if name not in in_forward}
        if self.drafted_by in fresh and of is not None and of.speculative_tokens:
            fresh |= self.arguments_to_draft(of.speculative_tokens)
        kept = {n: getattr(config, n, getattr(layer, n, value)) for n, value in fresh.items()}
        if "target_layer_ids" in kept:
            kept["target_layer_ids"] = self.target_layer_ids
        return kept

    # serving

    @classmethod
    def vllm_method(cls) -> tuple[str, bool] | None:  # None: vLLM has no such model
        "How vLLM serves this class; a subclass is another model, and says so for itself."
        return vars(cls).get("served_as")

    @classmethod
    def serving_warnings(cls, raw: dict[str, Any]) -> list[str]:
        """What vLLM does differently with a stored config.json on one of its builds, or for some requests: sentences
        with the remedy."""
        return [sentence for caution in cls.serving_cautions for sentence in caution(raw, None)]

    @classmethod
    def serving_violations(cls, raw: dict[str, Any], verifier: PretrainedConfig | None = None) -> list[str]:
        """What vLLM would refuse, or read differently from what was trained, in a stored config.json: sentences with
        the remedy. `verifier`: the config of its language model, if that is readable."""
        if cls.vllm_method() is None:
            return [
                f"speculators_model_type is {cls.config_class.speculators_model_type!r}, which "
                "vLLM does not serve; draft with `generate` here (the class of a drafter "
                "that vLLM serves says so in `served_as`)"
            ]
        return [sentence for rule in cls.serving_rules for sentence in rule(raw, verifier)]
