"""Memory of a training step on one device: weights, gradients, optimizer, activations, working memory, row.
What a step computes and stores is a polynomial in widths: five narrow twins on a CPU say what a wide one needs."""

import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from ..evaluate.cost import count_flops
from ..models.base import SpeculatorModel
from ..nn.head_loss import chunk_rows, tile_rows
from ..nn.layers import LAYER_FAMILIES, head_dim
from ..train.train_drafter import LAYER_ARGUMENTS, new_drafter
from ..train.trainer import weights_to_float32
from ..verifier.identity import VerifierInfo
from .sizes import DrafterSizes, drafter_sizes, meta_drafter


# The formula is within 10 % of what is counted for each drafter (tests/memory/run.py). Tensors are counted operation by
# operation, so that no allocator's statistics are needed.
class LiveMemory(TorchDispatchMode):
    "Bytes of the tensors that are made inside the block and still alive."

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),  # made before: their views are not counted
        vocab: int = 0,  # V: an empty [n, V] is a buffer of logits
    ):
        super().__init__()
        self.bytes = self.logits = self.kept = 0  # all; buffers of logits; what others add
        self.trace: list[int] = []  # bytes after each operation
        self.beside: list[tuple[int, int]] = []  # likewise: logits, kept
        self._vocab, self._buffers = vocab, set()
        self._sizes = {t.untyped_storage()._cdata: 0 for t in known}

    @property
    def most(self) -> int:
        "The most bytes after any operation."
        return max(self.trace, default=0)

    def _freed(self, key):
        size = self._sizes.pop(key)
        self.bytes -= size
        if key in self._buffers:
            self._buffers.remove(key)
            self.logits -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
                is_empty = function is torch.ops.aten.new_empty.default
                if is_empty and tensor.shape[1:] == (self._vocab,):
                    self._buffers.add(key)
                    self.logits += storage.nbytes()
        self.trace.append(self.bytes)
        self.beside.append((self.logits, self.kept))
        return out


def keep_gradients(
    model: SpeculatorModel,
    memory: LiveMemory,  # whose `kept` grows
) -> list[Any]:  # handles of hooks
    "Count gradients as FSDP keeps them."
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


class Widths(NamedTuple):
    "Widths of a twin."

    head: int  # width of a head, even
    hidden: int  # H
    intermediate: int  # of the MLP
    vocab: int  # of the verifier and of the drafter


def twin_widths(
    layer: Any,  # config of the draft layers
    head: int,  # width of a twin's head
    vocab: int,  # of the twin
) -> Widths:
    "Widths that are to each other as the drafter's."
    scale = head / head_dim(layer)
    hidden, inner = (round(w * scale) for w in (layer.hidden_size, layer.intermediate_size))
    return Widths(head, max(2, hidden), max(2, inner), vocab)


def write_twin(
    folder: Path,  # to write to
    layer: Any,  # config of the draft layers
    widths: Widths,
    num_layers: int,  # of the verifier
) -> None:
    "Write a verifier that has config, embedding, head and norm."
    heads = layer.num_attention_heads
    Qwen3Config(
        hidden_size=widths.hidden,
        intermediate_size=widths.intermediate,
        num_attention_heads=heads,
        num_key_value_heads=getattr(layer, "num_key_value_heads", None) or heads,
        head_dim=widths.head,
        num_hidden_layers=num_layers,
        vocab_size=widths.vocab,
        max_position_embeddings=2**17,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    g = torch.Generator().manual_seed(0)
    table = torch.randn(widths.vocab, widths.hidden, generator=g)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    tensors["model.norm.weight"] = torch.ones(widths.hidden)
    save_file(tensors, folder / "model.safetensors")


def packed_row(
    length: int,  # L, tokens of the packed row
    each: int,  # tokens of a conversation
    read: int,  # states of a token, the last one left out
    hidden: int,  # H
    dtype: torch.dtype = torch.float32,  # of the states
    supervised: float = 1.0,  # share of a conversation that carries loss: its end
) -> dict[str, torch.Tensor]:
    "A random batch of one packed row (docs/architecture.md, Contracts)."
    position = torch.arange(length) % each
    g = torch.Generator().manual_seed(0)
    states = torch.randn(1, length, (read + 1) * hidden, generator=g).to(dtype)
    return dict(
        input_ids=torch.randint(0, 64, (1, length), generator=g),
        hidden_states=states[..., : read * hidden].contiguous(),
        verifier_last_hidden_states=states[..., read * hidden :].contiguous(),
        loss_mask=(position >= (1 - supervised) * each)[None],
        position_ids=position[None],
        document_ids=(torch.arange(length) // each)[None],
    )


class StepCost(NamedTuple):
    "What a training step of one packed row takes; weights, gradients, optimizer left out."

    held: float  # bytes between the forward and the backward pass: activations
    flops: float  # of both
    backward: float = 0.0  # bytes beside `held` at the peak of the backward pass
    split: float = 0.0  # the same where a layer's gradients are kept until it is done (FSDP)
    network: float = 0.0  # at the peak of the forward pass where no logits are alive
    logits: float = 0.0  # of the buffer of logits, as long as the loss is computed
    ended: float = 0.0  # beside `held` and it: after the last chunk of logits
    states: float = 0.0  # while tiles of logits are scored, tiles left out
    tiles: float = 0.0  # of those: probabilities, gradients
    products: float = 0.0  # in a product of a chunk, beside `states`

    @property
    def loss(self) -> float:  # bytes beside `held` at the peak of the loss
        return self.logits + max(self.ended, self.states + max(self.tiles, self.products))

    @property
    def working(self) -> float:  # bytes beside `held` at the peak of the step
        return max(self.backward, self.network, self.loss)


class TracedStep(NamedTuple):
    "A step that was run; tensors are float64, bytes beside `held` after each operation."

    held: int  # bytes between the forward and the backward pass
    flops: int
    forward: torch.Tensor  # [2, operations]: all, and buffers of logits
    backward: torch.Tensor  # [2, operations]: all, and with the gradients that FSDP keeps


def traced_step(
    model: SpeculatorModel,  # in training mode, on the CPU
    batch: dict[str, torch.Tensor],
    bf16: bool = False,  # under autocast
    vocab: int = 0,  # rows of the head
    **kwargs: Any,  # of the forward pass in training
) -> TracedStep:
    "Run a step, forward and backward, that adds to gradients which are there already."
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    known += [p.grad for p in trained if p.grad is not None]
    memory, between = LiveMemory(known, vocab), []

    def run():
        with memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch, **kwargs)[1]
            between.extend([memory.bytes, len(memory.trace)])
            loss.backward()

    torch.manual_seed(0)
    handles = keep_gradients(model, memory)
    flops = count_flops(run)
    for handle in handles:
        handle.remove()
    held, first = between
    beside = torch.tensor(memory.trace, dtype=torch.float64) - held
    logits, kept = torch.tensor(memory.beside, dtype=torch.float64).T
    forward = torch.stack([beside, logits])[:, :first]
    return TracedStep(held, flops, forward, torch.stack([beside, beside + kept])[:, first:])


def measured_step(
    model: SpeculatorModel,  # in training mode, on the CPU
    batch: dict[str, torch.Tensor],
    bf16: bool = False,  # under autocast
    **kwargs: Any,  # of the forward pass in training
) -> StepCost:  # its `network` is the peak of the whole forward pass
    "What a step took that was run."
    step = traced_step(model, batch, bf16, **kwargs)
    peaks = (float(peak) for peak in (*step.backward.amax(1), step.forward[0].max()))
    return StepCost(step.held, step.flops, *peaks)


HEADS, VOCABS = (2, 4, 8), (2048, 4096)  # widths of a head, vocabularies of the twins
LONGEST = 512  # tokens of a twin's row, where each has its anchor
FEWEST = 8  # anchors of a shorter row than the one that is wanted
RECOMPUTED = "gradient_checkpointing"  # of the trainer, beside the drafter's arguments


class Terms(NamedTuple):
    "e, c w, a w², d v and b w v at a width and a vocabulary; numbers or tensors."

    fixed: Any
    linear: Any
    square: Any
    vocab: Any
    head: Any


class TwinFit(NamedTuple):
    "Values of five twins; tensors are fitted entry by entry."

    width: list[float]  # w, as H of the twin
    at: dict[tuple[int, int], Any]  # (number of the width, number of the vocabulary) -> value

    def __call__(self, width: float, vocab: float) -> Terms:
        "The terms of another width and vocabulary."
        (w0, w1, w2), (v0, v1) = self.width, VOCABS
        d0, d1 = ((self.at[i, 1] - self.at[i, 0]) / (v1 - v0) for i in (0, 1))
        b = (d1 - d0) / (w1 - w0)
        d = d0 - b * w0
        y0, y1, y2 = (self.at[i, 0] - v0 * (d + b * w) for i, w in enumerate(self.width))
        first = (y1 - y0) / (w1 - w0)
        a = ((y2 - y1) / (w2 - w1) - first) / (w2 - w0)
        c = first - a * (w0 + w1)
        e = y0 - c * w0 - a * w0**2
        return Terms(e, c * width, a * width**2, d * vocab, b * width * vocab)


def shorter_rows(
    length: int,  # L wanted
    anchors: int | None,  # at most in a row; None: no end
    supervised: float,  # share of the tokens that carries loss
) -> list[tuple[int, int | None]]:  # (tokens, anchors) of two or three rows
    """Rows of twins for a longer one: with as many anchors for each token, and, where those are
    fewer than tokens that carry loss, one with them all, which fills a chunk of logits."""
    half = LONGEST // 2
    if anchors is None or anchors >= supervised * length:
        return [(half, anchors), (LONGEST, anchors)]
    while half * anchors < FEWEST * length and 4 * half <= length:
        half *= 2
    few = [(n, max(1, round(anchors * n / length))) for n in (half, 2 * half)]
    return [*few, (LONGEST, anchors)]


def extrapolated(
    length: int,  # L wanted
    rows: list[int],  # tokens of two rows
    steps: list[StepCost],  # of them, and perhaps of a row with all anchors
    chunk: float,  # bytes of a chunk of logits
    tile: float,  # bytes of a tile of it
) -> StepCost:
    "A line through two rows; a buffer of logits grows to a chunk, and so does a tile on CUDA."
    (short, long), full = steps[:2], steps[-1]

    def line(y0, y1):
        return y0 + (y1 - y0) * (length - rows[0]) / (rows[1] - rows[0])

    grows = ("held", "flops", "network", "ended", "states")
    lines = {name: line(getattr(short, name), getattr(long, name)) for name in grows}
    logits = min(line(short.logits, long.logits), chunk)
    grown = logits / full.logits if full.logits else 0
    tiles = full.tiles * (grown if tile == chunk else 1)
    return long._replace(**lines, logits=logits, tiles=tiles, products=full.products * grown)


def twin(
    algorithm: str,  # a registered `speculators_model_type`
    layer: Any,  # config of the wide draft layers
    widths: Widths,
    layers: int,  # of the verifier
    length: int,  # L, tokens of the packed row
    each: int,  # tokens of a conversation
    supervised: float,  # share of them that carries loss
    bf16: bool,  # as training's
    given: dict[str, Any],  # training arguments, and perhaps gradient_checkpointing
) -> tuple[SpeculatorModel, dict[str, Any]]:  # and the arguments of `measured_step`
    "One twin, ready for a step."
    with tempfile.TemporaryDirectory() as folder:
        write_twin(Path(folder), layer, widths, layers)
        family = dict(draft_arch=layer.model_type) if layer.model_type in LAYER_FAMILIES else {}
        shape = family | dict(num_layers=given.get("num_layers", 1))
        if given.get("draft_config"):
            shape["num_layers"] = layer.num_hidden_layers
        out = (*shape, *LAYER_ARGUMENTS, "mask_token_id", "draft_vocab_size")
        own = {n: v for n, v in given.items() if n not in out and n != RECOMPUTED}
        model = new_drafter(algorithm, folder, **shape, **own)
    if given.get(RECOMPUTED):
        model.gradient_checkpointing_enable()
    weights_to_float32(model, frozen=not bf16)
    read = len({*model.drafter().aux_layer_ids} - {layers})
    plain = {n: v for n, v in given.items() if n != RECOMPUTED}
    kwargs = model.get_trainer_kwargs(**plain)[0]
    dtype = torch.bfloat16 if bf16 else torch.float32
    batch = packed_row(length, each, max(1, read), widths.hidden, dtype, supervised)
    return model.train(), dict(batch=batch, bf16=bf16) | kwargs


@contextmanager
def chunks_of(
    rows: int,  # V of the wide head
    vocab: int,  # of the twin
    device: str,  # of the wide step
) -> Iterator[None]:
    "Inside the block the losses of a twin cut their rows as those of the wide step."

    def chunk(v, _):
        return chunk_rows(v * rows // vocab, device)

    def tile(v, _, chunk):
        return tile_rows(v * rows // vocab, torch.device(device), chunk)

    with (
        patch.multiple("speculators_nb.nn.head_loss", chunk_rows=chunk, tile_rows=tile),
        patch.multiple("speculators_nb.nn.token_loss", chunk_rows=chunk, tile_rows=tile),
    ):
        yield


def forward_peaks(
    terms: Terms,  # of [2, operations]: bytes beside `held`, and buffers of logits
) -> tuple[float, ...]:  # the last six fields of `StepCost`
    "Peaks of the forward pass: without a buffer of logits, with one, and with a tile of it."
    both: Any = sum(terms)
    total, logits = both
    in_loss = logits > 1
    network = float(total[~in_loss].max())
    tables = terms.vocab[0] - logits  # and tiles
    parts = [(0.0,) * 5]
    turns = torch.nonzero(in_loss.diff()).flatten().tolist()  # a loss begins, a loss ends
    for begin, end in zip(turns[::2], turns[1::2]):
        span = slice(begin + 1, end + 1)
        beside, tiles = (total - logits)[span], tables[span] - tables[begin + 1]
        scored = torch.nonzero(tiles > 1).flatten()  # a byte: the fit is not exact
        at = scored[beside[scored].argmax()]
        last = int(scored[-1]) + 1
        states = beside[at] - tiles[at]
        products = beside[:last][tiles[:last] <= 1].max() - states
        ended = beside[last:].max() if last < len(beside) else states
        found = logits[span].max(), ended, states, tiles[at], products
        parts.append(tuple(float(x) for x in found))
    return network, *max(parts, key=lambda part: StepCost(0, 0, 0, 0, 0, *part).loss)


def most_anchors(
    algorithm: str,  # a registered `speculators_model_type`
    given: dict[str, Any],  # training arguments
) -> int | None:  # None: positions are not drawn
    "Positions of a row at which a training step drafts, at most."
    drafter: Any = SpeculatorModel.registered_class(algorithm)
    most = given.get("max_anchors")
    return drafter.training_arguments().get("max_anchors") if most is None else most


def fitted(
    algorithm: str,  # a registered `speculators_model_type`
    layer: Any,  # config of the wide draft layers
    rows: int,  # of the head over which the loss is taken
    longer: float,  # backward: of a row of so many times as many tokens
    device: str,  # of the wide step
    *row: Any,  # layers, length, each, supervised, bf16, given: as in `twin`
) -> StepCost:
    "What a step of the wide drafter takes on a row of a twin's length."
    steps, width = {}, []
    for i, head in enumerate(HEADS):
        width.append(twin_widths(layer, head, 0).hidden)
        for j, vocab in enumerate(VOCABS[: 1 if i == 2 else 2]):
            model, step = twin(algorithm, layer, twin_widths(layer, head, vocab), *row)
            with chunks_of(rows, vocab, device):
                steps[i, j] = traced_step(model, vocab=vocab, **step)
    held, flops, forward, backward = (TwinFit(width, {k: s[n] for k, s in steps.items()}) for n in range(4))
    at = layer.hidden_size, rows
    # weights that autocast copies, w² of what is held, are counted with the weights
    back, between = backward(*at), held(*at)._replace(square=0)
    peaks = (sum(back) + (longer - 1) * back.linear).amax(1).tolist()
    ahead = forward(*at)
    if between.head < 1:  # frozen; in another dtype, which only a CPU needs under autocast
        ahead = ahead._replace(head=0)
    return StepCost(sum(between), sum(flops(*at)), *peaks, *forward_peaks(ahead))


def predicted_step(
    algorithm: str,  # a registered `speculators_model_type`
    layer: Any,  # config of the draft layers, else of the verifier's language model
    rows: int,  # of the head over which the loss is taken
    depth: int,  # layers of the verifier
    length: int,  # L, tokens of a packed row
    each: int = 1024,  # tokens of a conversation
    supervised: float = 1.0,  # share of them that carries loss
    bf16: bool = False,  # as training's
    device: str = "cuda",  # whose kind decides how large a chunk of logits is
    **given: Any,  # training arguments, and perhaps gradient_checkpointing
) -> StepCost:
    "What a step of the wide drafter will take, from its twins."
    anchors = most_anchors(algorithm, given)
    short = [(length, anchors)]
    if length > LONGEST:
        short = shorter_rows(length, anchors, supervised)
        each = min(each, LONGEST // 2)
    steps = []
    for tokens, drawn in short:
        own = given if drawn is None else given | dict(max_anchors=drawn)
        row = depth, tokens, each, supervised, bf16, own
        steps.append(fitted(algorithm, layer, rows, length / tokens, device, *row))
    if len(steps) == 1:
        return steps[0]
    chunk = chunk_rows(rows, device)
    sizes = (4.0 * rows * n for n in (chunk, tile_rows(rows, torch.device(device), chunk)))
    return extrapolated(length, [tokens for tokens, _ in short], steps, *sizes)


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
    sizes: DrafterSizes,
    step: StepCost,  # of a row of L tokens
    length: int,  # L
    optimizer: str = "adamw",  # or muon
    bf16: bool = False,  # training under autocast
    ranks: int = 1,  # processes that train together
    fsdp: bool = False,  # weights, gradients and optimizer are split over the ranks
) -> StepMemory:
    "Memory of a step of training."
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


def computed_and_measured(
    name: str,  # a registered `speculators_model_type`
    width: int,  # H, a multiple of 16
    length: int = 384,  # L, tokens of the row
    vocab: int = 2048,  # V
    each: int = 128,  # tokens of a conversation
    **given: Any,  # training arguments, and perhaps gradient_checkpointing
) -> tuple[float, float]:  # bytes of gradients, activations and working
    "The peak of a step on the CPU: by the formula, and counted while it runs."
    wide = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        num_hidden_layers=6,
        vocab_size=vocab,
    )
    step = predicted_step(name, wide, vocab, 6, length, each, 0.75, device="cpu", **given)
    widths = Widths(width // 8, width, 3 * width, vocab)
    model, arguments = twin(name, wide, widths, 6, length, each, 0.75, False, given)
    found = measured_step(model, **arguments)
    gradients = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    measured = gradients + found.held + found.working
    with tempfile.TemporaryDirectory() as folder:
        write_twin(Path(folder), wide, widths, 6)
        info = VerifierInfo.of(folder)
        arguments = {n: v for n, v in given.items() if n != RECOMPUTED}
        sizes = drafter_sizes(meta_drafter(name, info, **arguments), info)
    memory = step_memory(sizes, step, length)
    return memory.gradients + memory.activations + memory.working, measured
