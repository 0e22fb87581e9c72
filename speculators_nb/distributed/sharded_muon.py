"""Muon needs whole matrices: a sharded one is gathered and updated as in one process.
Each rank keeps its rows. (A sharded AdamW is AdamW.)"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .sharding import part_of


class ShardedMuon(torch.optim.Muon):
    """torch's Muon, for matrices that may be sharded by rows; its momentum is sharded like
    them. Every rank steps at the same time."""

    @torch.no_grad()
    def step(self, closure=None):
        "Update every matrix that has a gradient."
        sharded = any(isinstance(p, DTensor) for g in self.param_groups for p in g["params"])
        if not sharded:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Any, group: dict):
        state: dict[str, Tensor] = self.state[p]
        whole, gradient = p, p.grad
        momentum: Any = state.get("momentum_buffer")
        if isinstance(p, DTensor):
            whole = nn.Parameter(p.full_tensor())
            gradient = gradient.full_tensor()
            momentum = None if momentum is None else momentum.full_tensor()
        whole.grad = gradient
        inner = torch.optim.Muon([{**group, "params": [whole]}])
        if momentum is not None:
            inner.state[whole]["momentum_buffer"] = momentum
        inner.step()
        state["momentum_buffer"] = part_of(inner.state[whole]["momentum_buffer"], p)
        if whole is not p:
            p.copy_(part_of(whole.detach(), p))
