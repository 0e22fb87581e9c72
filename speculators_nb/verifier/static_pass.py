"""Every step is a forward pass of one shape on buffers that never move, which CUDA can replay as one graph.
New tokens are written into slots of the buffers, and a rejected draft token is overwritten by the next one."""

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticLayer
from transformers.cache_utils import DynamicLayer

from .cache import recurrent_kinds
from .layer_masks import attention_masks, counts_keys
from .tapped_model import Verifier, VerifierOutput


class SlotLayer(StaticLayer):
    """Keys and values [B, heads, S, head_dim] of one layer; new ones are written to the slots `at` [B, W] int64, which
    all layers have in common and which are set before each pass."""

    at: Tensor | None = None

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values = self.buffers = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        "Write new keys and values [B, heads, W, head_dim], and return all [B, heads, S, head_dim]."
        assert self.at is not None, "a pass has set the slots"
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            index = self.at.to(buffer.device)[:, None, :, None].expand_as(new)
            buffer.scatter_(2, index, new)
        return self.buffers

    def get_seq_length(self) -> int:
        "All slots: the mask says which of them hold text."
        return self.max_cache_len


def states_of_layers(cache: DynamicCache) -> list[Tensor]:
    """The tensors [B, heads, slots, head_dim] of a cache: keys, values of the first layer, of the second, … Errors:
    ValueError for other than attention layers."""
    layers: Any = cache.layers
    for i, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"kv_cache: layer {i} of the verifier keeps a {type(layer).__name__}, with "
                "no slots that stay; leave kv_cache out"
            )
    return [x for layer in layers for x in (layer.keys, layer.values)]


def _shape(states):
    "What tensors of one stack have in common; a batch and a number of slots are given."
    return states.shape[1], states.shape[3], states.dtype, states.device


def addresses(verifier: Verifier) -> tuple[int, ...]:  # of its parameters
    "Where the weights are: a graph reads them there."
    return tuple(p.data_ptr() for p in verifier.model.parameters())


class StaticBuffers:
    """The KV cache of B requests in S slots each, which begins with their prefill, and the forward passes that use it.
    The tensors of one shape are in one stack. `owner`: the context that uses them; None: they are free."""

    def __init__(self, verifier: Verifier, read: DynamicCache, slots: int, owner: object = None):
        states = states_of_layers(read)
        self.requests, self.slots = len(states[0]), slots
        self.shapes = [_shape(x) for x in states]
        self.stacks: list[Tensor] = []  # each [n, B, heads, S, head_dim]
        self.views: list[Any] = [None] * len(states)  # [B, heads, S, head_dim]
        for shape in dict.fromkeys(self.shapes):
            heads, dim, dtype, device = shape
            places = [i for i, other in enumerate(self.shapes) if other == shape]
            size = len(places), self.requests, heads, slots, dim
            self.stacks.append(torch.zeros(size, dtype=dtype, device=device))
            for i, view in zip(places, self.stacks[-1]):
                self.views[i] = view
        self.verifier, self.weights = verifier, addresses(verifier)
        self.passes: dict[int, StaticPass] = {}  # width -> pass
        pairs = zip(self.views[::2], self.views[1::2])
        layers: Any = [SlotLayer(keys, values) for keys, values in pairs]
        self.cache: Any = Cache(layers=layers)
        if verifier.has_vision:  # text after pictures starts earlier
            shift = torch.zeros(self.requests, 1, dtype=torch.long, device=verifier.device)
            self.cache.position_shift = shift
        self.fill(read, owner)

    def free_for(self, owner: object) -> bool:
        "Whether no other context uses them. One that no longer exists uses nothing."
        return self.owner is None or self.owner() in (None, owner)

    def move(self, sources: Tensor, targets: Tensor):
        "Copy slots [B, T] in every tensor to others, which are all different in a row."
        for stack in self.stacks:
            n, _, heads, _, dim = stack.shape
            source, target = (
                x.to(stack.device)[None, :, None, :, None].expand(n, -1, heads, -1, dim) for x in (sources, targets)
            )
            stack.scatter_(3, target, stack.gather(3, source))

    def fits(self, read: DynamicCache, slots: int) -> bool:
        "Whether these buffers, and what is recorded of them, can take another batch, which needs so many slots."
        states = states_of_layers(read)
        same = [_shape(x) for x in states] == self.shapes and len(states[0]) == self.requests
        return same and slots <= self.slots and self.weights == addresses(self.verifier)

    def fill(self, read: DynamicCache, owner: object = None):
        """Begin with the keys and values of a prefill of B requests, at most S slots; all other slots are zero. From
        now on `owner` uses them."""
        # weak reference to the context that uses them; None: they are free
        self.owner: Any = None if owner is None else weakref.ref(owner)
        for stack in self.stacks:
            stack.zero_()  # what another request left there may be NaN
        for view, states in zip(self.views, states_of_layers(read)):
            view[:, :, : states.shape[2]] = states
        if self.verifier.has_vision:
            shift = getattr(read, "position_shift", None)
            self.cache.position_shift[:] = 0 if shift is None else shift.view(-1, 1)

    def first(self, length: int) -> DynamicCache:
        "The first slots of every layer, to begin larger buffers with."
        read: Any = DynamicCache()
        for i, (keys, values) in enumerate(zip(self.views[::2], self.views[1::2])):
            read.update(keys[:, :, :length], values[:, :, :length], i)
        if self.verifier.has_vision:
            read.position_shift = self.cache.position_shift
        return read


class StaticPass:
    """A forward pass over W (`width`) new tokens of each request, on tensors that stay. It is called, or on CUDA
    recorded once and replayed."""

    out: Any = None  # of the graph
    graph: Any = None  # torch.cuda.CUDAGraph

    def __init__(self, buffers: StaticBuffers, width: int):
        # not the buffers, which keep this pass: a cycle would outlive them
        self.verifier, self.cache = buffers.verifier, buffers.cache
        self.slots, self.width = buffers.slots, width
        B, device = buffers.requests, buffers.verifier.device

        def integers(*shape):
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.ids, self.positions = integers(B, width), integers(B, width)
        self.lengths = integers(B)  # tokens of each text that are in the cache
        self.own = torch.eye(width, dtype=torch.bool, device=device)
        self.among = self.own.repeat(B, 1, 1)  # [B, W, W] query, key among the new tokens

    def forward(self) -> VerifierOutput:
        "Keys and values of the new tokens go into the slots after each text."
        (B, W), S = self.ids.shape, self.slots
        slots = torch.arange(S, device=self.ids.device)
        at = self.lengths[:, None] + slots[:W]
        filled = slots < self.lengths[:, None]
        new = at[:, None].expand(B, W, W)
        attends = filled[:, None].repeat(1, W, 1).scatter(2, new, self.among)
        keys = slots.repeat(B, 1).scatter(1, at, self.positions)
        for layer in self.cache.layers:
            layer.at = at
        return self.verifier(
            self.ids,
            attention_mask=attention_masks(self.verifier, attends, keys, self.positions),
            past_key_values=self.cache,
            position_ids=self.positions,
        )

    @property
    def on_cuda(self) -> bool:
        "Whether there are graphs."
        return self.ids.device.type == "cuda"

    def record(self) -> Any:  # torch.cuda.CUDAGraph
        "Record the pass as a CUDA graph. Errors: ValueError where it cannot be recorded."
        graph, device = torch.cuda.CUDAGraph(), self.ids.device
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(beside):
                self.forward()  # libraries are loaded, workspaces made
            torch.cuda.current_stream(device).wait_stream(beside)
            with torch.cuda.graph(graph):
                self.out = self.forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            name = type(self.verifier.model).__name__
            what = " ".join(str(e).split())[:200]
            raise ValueError(
                f"kv_cache='graphs': {name} cannot be recorded as a CUDA graph ({what}); use kv_cache='static'"
            ) from e
        self.graph = graph
        return graph

    def run(self, as_graph: bool = False) -> VerifierOutput:
        """One forward pass, of [B, W]; on CUDA, if wished, as a graph, recorded the first time, whose output is valid
        until the next replay."""
        if not (as_graph and self.on_cuda):
            return self.forward()
        (self.graph or self.record()).replay()
        return self.out


def check_static(verifier: Verifier, kv_cache: str):
    'Errors: ValueError for a verifier whose cache or devices cannot be fixed (`kv_cache`: "static" or "graphs").'
    name = type(verifier.model).__name__
    if kinds := recurrent_kinds(verifier.config):
        raise ValueError(
            f"kv_cache={kv_cache!r}: {name} has layers of kind {', '.join(kinds)}, whose cache "
            "has no slots; leave kv_cache out"
        )
    if why := counts_keys(verifier.config):
        raise ValueError(
            f"kv_cache={kv_cache!r}: {name} has {why} that depends on the number of keys, "
            "which is that of the slots; leave kv_cache out"
        )
    places = sorted({str(p.device) for p in verifier.model.parameters()})
    if kv_cache == "graphs" and len(places) > 1:
        raise ValueError(
            f"kv_cache='graphs': {name} is on {', '.join(places)}, and a CUDA graph is on one "
            "device; use kv_cache='static'"
        )


def static_buffers(verifier: Verifier, read: DynamicCache, slots: int, owner: object = None) -> StaticBuffers:
    """Buffers of at least so many slots, 64 at a time, that begin with the keys and values of a prefill of B requests.
    The verifier keeps them for its next request: they are those of the last one, if they are free and fit. They belong
    to `owner` while it exists; None: until the next request."""
    slots = -(-slots // 64) * 64
    kept = verifier.static
    if kept is not None and kept.free_for(owner) and kept.fits(read, slots):
        kept.fill(read, owner)
        return kept
    # old ones that no context uses are freed before the new ones are made
    kept = verifier.static = None
    verifier.static = StaticBuffers(verifier, read, slots, owner)
    return verifier.static
