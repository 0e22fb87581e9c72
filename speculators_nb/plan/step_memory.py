"""Memory of a training step on one device: weights, gradients, optimizer, activations, working memory, row. The step
runs on tensors that have a shape and no memory (torch's FakeTensor); what it makes and frees is counted.
nbs/plan/01_step_memory.ipynb shows it beside FLOPs, bytes and time of each term."""

import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper
from transformers import PretrainedConfig, Qwen3Config

from ..evaluate.cost import ALSO_COUNTED
from ..models.base import SpeculatorModel
from ..nn.layers import LATENT_FAMILIES, LATENT_SIZES, LAYER_FAMILIES, first_layer, head_dim
from ..nn.losses import chunks_as_on
from ..train.train_drafter import LAYER_ARGUMENTS
from ..train.trainer import weights_to_float32
from ..verifier.identity import VerifierInfo
from .sizes import DrafterSizes, empty_drafter

FLOPS = flop_registry | {operation: shape_wrapper(flops) for operation, flops in ALSO_COUNTED.items()}
RECOMPUTED = "gradient_checkpointing"  # of the trainer, beside the drafter's arguments


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# Tensors are counted operation by operation, so that no allocator's statistics are needed.
class LiveMemory(TorchDispatchMode):
    "Bytes of the tensors that are made inside the block and still alive, and FLOPs of its products."

    def __init__(self, known: Iterable[torch.Tensor] = (), weights: Iterable[torch.Tensor] = (), vocab: int = 0):
        """known: made before, their views are not counted; weights: nor copies of them in another dtype; vocab: V, an
        empty [n, V] is a buffer of logits."""
        super().__init__()
        self.bytes = self.logits = self.kept = 0  # all; buffers of logits; what others add
        self.flops = 0
        self.trace: list[tuple[int, int, int]] = []  # bytes, logits, kept after each operation
        self._vocab, self._buffers = vocab, set()
        self._weights = {_storage(w) for w in weights}
        self._sizes = dict.fromkeys(map(_storage, known), 0)

    def _freed(self, key):
        size = self._sizes.pop(key)
        self.bytes -= size
        if key in self._buffers:
            self._buffers.remove(key)
            self.logits -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.prim.device.default:
            return out
        count = FLOPS.get(function) or FLOPS.get(function._overloadpacket)
        self.flops += count(*args, **(kwargs or {}), out_val=out) if count else 0
        is_copy = function is torch.ops.aten._to_copy.default and _storage(args[0]) in self._weights
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := _storage(tensor)) not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[key] = 0 if is_copy else storage.nbytes()
                self.bytes += self._sizes[key]
                weakref.finalize(storage, self._freed, key)
                if function is torch.ops.aten.new_empty.default and tensor.shape[1:] == (self._vocab,):
                    self._buffers.add(key)
                    self.logits += storage.nbytes()
        self.trace.append((self.bytes, self.logits, self.kept))
        return out


def keep_gradients(model: SpeculatorModel, memory: LiveMemory) -> list[Any]:
    "Count gradients in `memory.kept` as FSDP keeps them; handles of the hooks that do."
    layers: Any = getattr(model, "layers", ())
    group = {p: i for i, part in enumerate(dict.fromkeys(layers)) for p in part.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    left = Counter(group[p] for p in trained if p in group)
    sizes = Counter()
    for p in trained:
        sizes[group.get(p)] += p.nbytes

    def arrived(p):
        memory.kept += p.nbytes
        if p in group:
            left[group[p]] -= 1
            memory.kept -= sizes[group[p]] * (left[group[p]] == 0)

    return [p.register_post_accumulate_grad_hook(arrived) for p in trained]


class StepCost(NamedTuple):
    "What a training step of one packed row takes; weights, gradients, optimizer left out."

    held: float  # bytes between the forward and the backward pass: activations
    flops: float  # of both
    backward: float = 0.0  # bytes beside `held` at the peak of the backward pass
    split: float = 0.0  # the same where a layer's gradients are kept until it is done (FSDP)
    network: float = 0.0  # at the peak of the forward pass where no logits are alive
    loss: float = 0.0  # at its peak where they are

    @property
    def working(self) -> float:  # bytes beside `held` at the peak of the step
        return max(self.backward, self.network, self.loss)


def measured_step(
    model: SpeculatorModel, batch: dict[str, torch.Tensor], bf16: bool = False, **kwargs: Any
) -> StepCost:
    """Run a step, forward and backward, that adds to gradients which are there already: of a model in training mode on
    the CPU (its tensors may be fake), with arguments of its forward pass. bf16: under autocast; copies of weights are
    not counted then."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    weights, known = [*model.parameters()], [*model.buffers(), *batch.values()]
    known += [*weights, *(p.grad for p in trained if p.grad is not None)]
    head = getattr(model, "lm_head", None)
    memory = LiveMemory(known, weights if bf16 else (), 0 if head is None else head.weight.shape[0])
    handles = keep_gradients(model, memory)
    torch.manual_seed(0)
    with memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch, **kwargs)[1]
        held, first = memory.bytes, len(memory.trace)
        loss.backward()
    for handle in handles:
        handle.remove()
    forward, backward = memory.trace[:first], memory.trace[first:]
    return StepCost(
        held=held,
        flops=memory.flops,
        backward=max(n for n, _, _ in backward) - held,
        split=max(n + kept for n, _, kept in backward) - held,
        network=max(n for n, logits, _ in forward if not logits) - held,
        loss=max((n - held for n, logits, _ in forward if logits), default=0),
    )


def step_of(
    algorithm: str,  # a registered `speculators_model_type`
    layer: Any,  # config of the draft layers, else of the verifier's language model
    rows: int,  # of the head over which the loss is taken
    depth: int,  # layers of the verifier
    length: int,  # L, tokens of a packed row
    each: int = 1024,  # tokens of a conversation
    supervised: float = 1.0,  # share of a conversation that carries loss: its end
    bf16: bool = False,  # as training's
    fake: bool = False,  # without memory
    **given: Any,  # training arguments, and perhaps gradient_checkpointing
) -> tuple[SpeculatorModel, dict[str, Any]]:
    """A drafter in training mode on the CPU whose vocabulary is the verifier's, with random weights, and the arguments
    of `measured_step`: a random batch of one packed row (docs/architecture.md, Contracts), and how to train."""
    plain = {n: v for n, v in given.items() if n != RECOMPUTED}
    num_layers = layer.num_hidden_layers if given.get("draft_config") else given.get("num_layers")
    fixed = SpeculatorModel.registered_class(algorithm).fixed_layers
    known = layer.model_type in LAYER_FAMILIES + LATENT_FAMILIES
    draft_arch = layer.model_type if known and not fixed else None
    left_out = ("draft_arch", "num_layers", *LAYER_ARGUMENTS, "mask_token_id", "draft_vocab_size")
    own = {n: v for n, v in plain.items() if n not in left_out}
    with tempfile.TemporaryDirectory() as folder:
        verifier_like(layer, rows, depth).save_pretrained(folder)
        info, device = VerifierInfo.of(folder), "meta" if fake else "cpu"
        model = empty_drafter(algorithm, info, draft_arch, num_layers, device=device, **own)
    weights_to_float32(model, frozen=not bf16)
    mode = without_memory(model) if fake else nullcontext()
    states = max(1, len(model.drafter().aux_layer_ids))
    with mode, torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
        dtype = torch.bfloat16 if bf16 else torch.float32
        hidden, last = (torch.randn(1, length, n * layer.hidden_size, dtype=dtype) for n in (states, 1))
    if given.get(RECOMPUTED):
        model.gradient_checkpointing_enable()
    position = torch.arange(length) % each
    batch = dict(
        input_ids=torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0)),
        hidden_states=hidden,
        verifier_last_hidden_states=last,
        loss_mask=(position >= (1 - supervised) * each)[None],
        position_ids=position[None],
        document_ids=(torch.arange(length) // each)[None],
    )
    return model.train(), dict(batch=batch, bf16=bf16) | model.get_trainer_kwargs(**plain)[0]


def without_memory(model: nn.Module) -> FakeTensorMode:
    """Put tensors that seem to be on the CPU in the place of a model's tensors on the meta device. Inside the returned
    context more of them are made."""
    mode, made = FakeTensorMode(allow_non_fake_inputs=True), {}

    def fake(tensor):
        if tensor is None or not tensor.is_meta:
            return tensor
        if tensor not in made:
            seeming = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
            is_weight = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(seeming, tensor.requires_grad) if is_weight else seeming
        return made[tensor]

    tensors: Any
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items()})
    return mode


def verifier_like(layer: Any, vocab: int, depth: int) -> PretrainedConfig:
    "The config of a verifier of the draft layers' sizes."
    layer = first_layer(layer)
    latent = LATENT_SIZES if layer.model_type in LATENT_FAMILIES else ()
    return Qwen3Config(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
        head_dim=head_dim(layer),
        num_hidden_layers=depth,
        vocab_size=vocab,
        max_position_embeddings=2**17,
        tie_word_embeddings=False,
        **{name: getattr(layer, name) for name in latent},
    )


def predicted_step(
    algorithm: str,
    layer: Any,
    rows: int,
    depth: int,
    length: int,
    each: int = 1024,
    supervised: float = 1.0,
    bf16: bool = False,
    device: str = "cuda",  # its kind
    **given: Any,
) -> StepCost:
    "What the step of `step_of` takes on a device, counted on tensors without memory."
    model, arguments = step_of(algorithm, layer, rows, depth, length, each, supervised, bf16=bf16, fake=True, **given)
    with chunks_as_on(device):
        return measured_step(model, **arguments)


class StepMemory(NamedTuple):
    "Bytes on one device."

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # at the peak: of the loss, or of a layer's backward pass
    row: float
    gathered: float = 0.0  # under FSDP: weights that are whole beside this rank's part

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def state(self) -> float:  # what no shorter row makes smaller
        return self.weights + self.gradients + self.optimizer + self.gathered


def step_memory(
    sizes: DrafterSizes, step: StepCost, length: int, optimizer: str, bf16=False, ranks: int = 1, fsdp: bool = False
) -> StepMemory:
    """Memory of a step of training on a row of `length` tokens by muon or adamw. bf16: under autocast; ranks: processes
    that train together, fsdp: over which weights, gradients and optimizer are split."""
    trained, hidden = sizes.trained, sizes.text.hidden_size
    muon = sizes.matrices if optimizer == "muon" else 0
    split, layer, working = 1, 0, step.working
    if fsdp and ranks > 1:
        split, layer = ranks, 4 * sizes.layer
        next_layer = layer * (sizes.trained - sizes.rest > sizes.layer)
        working = max(step.split + next_layer, step.network + layer, step.loss)
    return StepMemory(
        weights=4 * (trained + sizes.frozen) / split + 2 * trained * bf16,
        gradients=4 * trained * (1 + (ranks > 1 and split == 1)) / split,
        optimizer=(8 * trained - 4 * muon) / split,
        activations=step.held,
        working=working,
        row=length * sizes.states * hidden * (2 if bf16 else 4),
        gathered=layer + 4 * (sizes.rest + sizes.frozen) * (split > 1),
    )
