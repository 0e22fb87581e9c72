"""FSDP2: each rank keeps a part of each weight, of its gradient and of its optimizer state.
A layer is whole only while it computes."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: nn.Module) -> bool:
    "Whether `shard` has split this model's weights over the ranks."
    return isinstance(model, FSDPModule)


def _without_memory(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)


def shard(model: Any) -> None:
    """Split all weights of a drafter on its device by rows over the ranks of the process group, in place; on every
    rank. Its `layers`, if any, are gathered one by one. The model's class becomes a subclass of its class and of
    torch's `FSDPModule`."""
    device = next(model.parameters()).device
    empty = {id(p): _without_memory(p) for p in model.parameters()}
    model._skeleton = (copy.deepcopy(model, empty),)  # in a tuple, so that it is no submodule
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in dict.fromkeys(getattr(model, "layers", ())):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # a row without loss reaches fewer weights, and the ranks must send the same
    model.set_reduce_scatter_unused_params(True)


def split_again(model: nn.Module) -> None:
    "Split the weights that a forward pass without a backward pass, an evaluation, has left whole."
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unsharded_class(model: nn.Module) -> type:
    "The class that a drafter, sharded or not, had before it was sharded."
    return type(model).__mro__[2] if is_sharded(model) else type(model)


def local(tensor: Tensor) -> Tensor:
    "The part of a tensor that is on this rank; all of it where it is not sharded."
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharding_table(model: nn.Module) -> pd.DataFrame:
    """What of a drafter is on this rank, a row for each parameter: group, shape, shape on this rank, whether it is
    trained."""
    split_again(model)
    groups = {name: module for name, module in model.named_modules() if is_sharded(module)}
    rows = []
    for name, p in model.named_parameters():
        inside = [group for group in groups if group and name.startswith(f"{group}.")]
        group = (inside or ["the rest"])[0]
        rows.append((name, group, tuple(p.shape), tuple(local(p).shape), p.requires_grad))
    columns = ["parameter", "group", "shape", "on this rank", "trained"]
    return pd.DataFrame(rows, columns=columns).set_index("parameter")


_Tree = TypeVar("_Tree")


def gather(tree: _Tree, keep: bool = True) -> _Tree:
    """A tree of nested dicts and lists with every sharded tensor whole and on the processor; on every rank at the same
    time. A rank that does not `keep` only takes part, has one whole tensor at a time, and gets None for each."""
    found: Any = tree
    if isinstance(tree, Mapping):
        found = {name: gather(value, keep) for name, value in tree.items()}
    elif isinstance(tree, list):
        found = [gather(value, keep) for value in tree]
    elif isinstance(tree, DTensor):
        full = tree.full_tensor()
        found = full.detach().cpu() if keep else None
    return found


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor, the same on every rank, that belongs on this one: sharded as `like`, a tensor of its
    shape, of its dtype and on its device; without communication."""
    full = full.to(device=like.device, dtype=like.dtype)
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def load_whole(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put whole tensors into a model, sharded or not: each rank takes its rows; names that the state lacks stay as they
    are."""
    with torch.no_grad():
        for name, mine in model.state_dict().items():
            if name in state:
                mine.copy_(part_of(state[name], mine))


def device_memory(model: nn.Module, ranks: int, bf16: bool = False) -> dict[str, float]:
    """Bytes of a training step with AdamW on each of `ranks` devices, without activations: kept, gathered, and `ddp`
    for comparison. The drafter is not sharded, and may be on any device ("meta" will do); `bf16`: frozen weights are in
    bfloat16."""
    found: Any = getattr(model, "layers", ())
    layers = list(dict.fromkeys(found))
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters if not p.requires_grad) * (2 if bf16 else 4)
    rest = sum(p.numel() for p in parameters if p.requires_grad and id(p) not in in_layers)
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    kept = (16 * trained + frozen) / ranks
    gathered = 8 * (rest + largest) + frozen
    return {"kept": kept, "gathered": gathered, "ddp": 20 * trained + frozen}
