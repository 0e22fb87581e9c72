"""Speed-up playground: acceptance and costs to drag, and the best number of draft tokens.
It is read off at each batch size from the cost of drafting and of verification, with the fields of vLLM's config
for it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..core.options import shown
from ..evaluate.speedup import (
    batch_verify,
    best_gamma,
    draft_schedule,
    lengths,
    speedups,
)
from .widget import Widget


BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


class Drafting(NamedTuple):
    "What is known of a drafter: how much is accepted, and what it costs."

    rates: Sequence[float]  # unconditional acceptance of positions 1, 2, …
    cost: float  # of one draft token, in plain passes; of the whole block where `parallel`
    parallel: bool = False  # one pass makes all draft tokens


class Machine(NamedTuple):
    "What verification costs, as in `pass_cost`."

    ridge: float = 300  # tokens at which computing takes as long as reading the weights
    expert_share: float = 0.0  # of what a pass over one token reads; 0: a dense model
    experts: int = 64  # E of a layer
    active: int = 8  # e of a token


def surface(drafting: Drafting, machine: Machine | Sequence[float]) -> dict[int, list[float]]:
    """Speed-up with 0, 1, 2, … draft tokens, by batch size; costs from a measurement, of 1, 2, … tokens in plain passes
    in place of a machine, are those of batch size 1. A draft token costs the same share of a plain pass at every
    size."""
    rates, cost, parallel = drafting
    costs = {1: machine}
    if isinstance(machine, Machine):
        costs = {batch: batch_verify(len(rates), batch, *machine) for batch in BATCHES}
    return {b: speedups(lengths(rates), cost, v, parallel) for b, v in costs.items()}


class Playground(Widget):
    "Curves with handles; see `playground`."

    name = "playground"

    def drafting(self) -> Drafting:
        "The drafter as the handles are set."
        known = self.state["drafters"][self.controls["drafter"]]
        return Drafting(self.controls["rates"], self.controls["cost"], known["parallel"])

    def machine(self) -> Machine | list[float]:
        "The verification cost as the handles are set."
        if self.controls["source"] == "measured":
            return self.state["verify"]
        return Machine(*(self.controls[name] for name in Machine._fields))

    def vllm_fields(self) -> dict[str, Any]:
        "For vLLM's --speculative-config, as the handles are now; {}: do not draft."
        speeds = surface(self.drafting(), self.machine())
        return draft_schedule({batch: best_gamma(s) for batch, s in speeds.items()})

    def fallback(self) -> str:
        "The surface as a table."
        speeds = surface(self.drafting(), self.machine())
        cells = range(len(self.controls["rates"]) + 1)
        head = "".join(f"<th>K = {k}</th>" for k in cells)
        rows = [
            f"<tr><th>{batch}</th>" + "".join(f"<td>{x:.2f}</td>" for x in row) + "</tr>"
            for batch, row in speeds.items()
        ]
        return f"<table><tr><th>batch</th>{head}</tr>{''.join(rows)}</table>"


EXAMPLE = {"four in five accepted": Drafting([round(0.8**i, 3) for i in range(1, 9)], 0.05)}


def playground(measured: Mapping[str, Drafting] | None = None, verify: Sequence[float] | None = None) -> Playground:
    """The speed-up of drafters by name (None: an example), with handles that begin at measured values; `verify`: costs
    from `verify_costs` (None: a computed machine). Errors: ValueError for rates that are none, and for too few
    costs."""
    drafters = EXAMPLE if measured is None else measured
    if not drafters:
        raise ValueError("measured={}: give at least one drafter, name -> Drafting")
    for name, (rates, cost, _) in drafters.items():
        falling = pairwise([1.0, *rates, 0.0])
        if len(rates) == 0 or any(a < b for a, b in falling):
            raise ValueError(
                f"measured[{name!r}].rates={shown(list(rates))}: must be unconditional rates, "
                "from 1 down to 0, none above the one before"
            )
        if cost < 0:
            raise ValueError(f"measured[{name!r}].cost={cost}: must be 0 or more")
        if verify is not None and len(verify) <= len(rates):
            raise ValueError(
                f"verify has {len(verify)} costs; {name!r} has {len(rates)} rates, so measure "
                f"passes over 1 … {len(rates) + 1} tokens"
            )
    known = {
        name: dict(rates=[float(r) for r in d.rates], cost=d.cost, parallel=d.parallel) for name, d in drafters.items()
    }
    costs = None if verify is None else [float(v) for v in verify]
    first = next(iter(known))
    controls = dict(drafter=first, rates=known[first]["rates"], cost=known[first]["cost"])
    controls |= dict(source="computed" if verify is None else "measured", batch=1)
    return Playground(
        state=dict(drafters=known, verify=costs, batches=BATCHES),
        controls=controls | Machine()._asdict(),
    )
