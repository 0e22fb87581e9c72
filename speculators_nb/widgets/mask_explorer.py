"""An attention mask to touch: which clause allows an entry, and what a query attends to.
It shows what leaks when a clause of the predicate is missing, and what a kernel computes for it."""

import base64
import io
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config

from ..core.options import shown
from ..models.base import SpeculatorModel
from ..nn.masks import Mask, MaskSize
from .widget import Widget


def joined_parts(mask: Mask) -> list[Mask]:
    "The parts of a mask, those of parts with the same join in their place: of `a & b & c`: a, b and c."
    return [
        inner for part in mask.parts for inner in (joined_parts(part) if part.join == mask.join != "not" else [part])
    ]


def clauses(mask: Mask) -> list[str]:
    "What a mask is made of, in words, in the order of the definition, each once."
    parts = [mask.clause] if not mask.join else [c for p in mask.parts for c in clauses(p)]
    return list(dict.fromkeys(parts))


def _entries(mask, queries, keys, removed):
    if not mask.join:
        return None if mask.clause in removed else mask.dense(queries, keys)
    parts = [_entries(part, queries, keys, removed) for part in joined_parts(mask)]
    left = [part for part in parts if part is not None]
    if mask.join == "not":
        return ~left[0] if left else None
    entries = torch.full((queries, keys), mask.join == "and")
    for part in left:
        entries = entries & part if mask.join == "and" else entries | part
    return entries


def without(mask: Mask, queries: int, keys: int, removed: Collection[str] = ()) -> Tensor:
    "The entries, [Q, K] bool, that a mask allows when some clauses, by their words, are removed."
    entries = _entries(mask, queries, keys, removed)
    return torch.ones(queries, keys, dtype=torch.bool) if entries is None else entries


def reasons(mask: Mask, q: int, kv: int) -> list[str]:
    "The clauses that decide the entry of a query and a key: those that hold where it is allowed, else those that fail."
    if not mask.join:
        return [mask.clause]

    def allows(part):
        return bool(part.at(torch.tensor(q), torch.tensor(kv)))

    parts = mask.parts
    if mask.join != "not":
        parts = [part for part in joined_parts(mask) if allows(part) == allows(mask)]
    return list(dict.fromkeys(reason for part in parts for reason in reasons(part, q, kv)))


HEAD_DIM = 128  # d


class EntryCounts(NamedTuple):
    "What is allowed, and what a kernel computes that works block by block."

    allowed: int  # entries
    full: int  # blocks in which no mask is needed
    partial: int  # blocks in which the predicate is evaluated
    empty: int  # blocks that are skipped
    useful: float  # allowed entries among those computed
    flops: int  # of the allowed entries, in one head
    block_flops: int  # of the blocks that are not skipped


def entry_counts(mask: Mask, queries: int, keys: int, side: int = 128) -> EntryCounts:
    "The counts of a mask, from its key ranges where they are known; `side`: of a block."
    counts: dict[str, Any] = mask.block_counts(queries, keys, side)
    blocks = mask.blocks(queries, keys, side)
    computed = int(blocks.area[blocks.allowed > 0].sum())
    return EntryCounts(
        **counts,
        flops=4 * HEAD_DIM * counts["allowed"],
        block_flops=4 * HEAD_DIM * computed,
    )


_SIZES: dict[str, Any] = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
_SIZES |= dict(num_attention_heads=1, num_key_value_heads=1, head_dim=16, vocab_size=64)


def drafters_with_mask() -> list[str]:
    "The registered drafters that have attention over a packed row, in alphabetical order."
    kinds = SpeculatorModel.registered_classes()
    return sorted(name for name, kind in kinds.items() if hasattr(kind, "training_mask"))


@lru_cache(None)
def _without_weights(drafter, depth, window):
    kind: Any = SpeculatorModel.registered_class(drafter)
    if not hasattr(kind, "training_mask"):
        names = ", ".join(drafters_with_mask())
        raise ValueError(f"drafter={drafter!r} has no attention mask; choose from {names}")
    layer = Qwen3Config(
        **_SIZES,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["full_attention" if window is None else "sliding_attention"],
    )
    fields = dict(draft_vocab_size=64, block_size=depth, mask_token_id=0)
    fields |= dict(aux_hidden_state_layer_ids=[1])
    config = kind.config_class(
        transformer_layer_config=layer,
        **{name: v for name, v in fields.items() if hasattr(kind.config_class, name)},
    )
    with torch.device("meta"):
        return kind(config).eval()


def drafter_mask(
    drafter: str, documents: Tensor, depth: int = 3, window: int | None = None, anchors: int = 3
) -> MaskSize:
    """The mask that a registered drafter is trained with on a row whose positions are in these documents ([L] int; -1
    is padding). `depth`: steps, depths of a rollout or slots of a block; `window` of a sliding layer (None: full
    attention); `anchors`: blocks, or rollouts' first positions, at most. ValueError: it has none."""
    model = _without_weights(drafter, depth, window)
    row = dict(document_ids=documents[None], loss_mask=(documents >= 0)[None])
    return model.training_mask(row, ttt_steps=depth, num_depths=depth, max_anchors=anchors)


MOST_ENTRIES = 65_536  # of a mask that is drawn


def bits(entries: Tensor) -> str:
    "A bool matrix, row by row, one bit an entry, in base64; the first entry is the highest bit of the first byte."
    return base64.b64encode(np.packbits(entries.numpy()).tobytes()).decode()


def _tree(mask, queries, keys, pool):
    if mask.join:
        parts = [_tree(part, queries, keys, pool) for part in joined_parts(mask)]
        return {"join": mask.join, "parts": parts}
    entry = mask.clause, bits(mask.dense(queries, keys))
    return {"clause": pool.setdefault(entry, f"c{len(pool)}")}


def frozen_mask(size: MaskSize, documents: Iterable[int], pool: dict[tuple[str, str], str]) -> dict:
    """A mask as the widget reads it: sizes, documents of the L positions of the row (the first L keys; -1 is padding)
    and the tree of clauses; `pool`, (words, bits) -> id, gets the clauses that are new. Errors: ValueError for one that
    is too large to draw."""
    mask, queries, keys = size
    if queries * keys > MOST_ENTRIES:
        raise ValueError(
            f"queries={queries}, keys={keys}: too many entries to draw; take a shorter row, at most {MOST_ENTRIES}"
        )
    tree = _tree(mask, queries, keys, pool)
    return dict(queries=queries, keys=keys, documents=list(documents), tree=tree)


def frozen_clauses(pool: dict[tuple[str, str], str]) -> dict[str, dict]:
    "The pool of `frozen_mask` as the widget reads it: id -> words and bits."
    return {key: dict(name=name, bits=entries) for (name, entries), key in pool.items()}


PACKINGS = {
    "three documents": [0] * 6 + [1] * 4 + [2] * 5 + [-1],
    "one document": [0] * 16,
    "two documents": [0] * 8 + [1] * 8,
}
LONGER = 128  # times the positions of a packing, in the counts of a real size
MENUS: dict[str, tuple[str, list]] = {  # name -> label, choices
    "packing": ("packing", list(PACKINGS)),
    "window": ("window", [0, 3, 2, 4, 6]),
    "depth": ("steps, depths or slots", [3, 2, 4, 5, 6, 8]),
    "anchors": ("anchors", [3, 2, 1, 4, 5]),
}
FROZEN = dict(packing=2, window=2, depth=3, anchors=2)  # the first choices are in the page


class Setting(NamedTuple):
    "What is chosen in the menus."

    drafter: str
    packing: str  # of `PACKINGS`
    window: int  # 0: none
    depth: int
    anchors: int


def _longer(setting: Setting) -> dict:
    "The counts of `entry_counts` for a row that is `LONGER` times as long, and its size."
    documents = torch.tensor(PACKINGS[setting.packing]).repeat_interleave(LONGER)
    window, anchors = setting.window * LONGER or None, setting.anchors * 8
    mask, queries, keys = drafter_mask(setting.drafter, documents, setting.depth, window, anchors)
    counts = entry_counts(mask, queries, keys)
    return counts._asdict() | dict(length=len(documents), queries=queries, keys=keys)


class FrozenMasks:
    "Masks of settings, each matrix once."

    def __init__(self):
        self.pool: dict[tuple[str, str], str] = {}
        self.masks: dict[str, dict] = {}  # id -> mask, as from `frozen_mask`
        self.views: dict[str, str] = {}  # setting -> id
        self._ids: dict[tuple, str] = {}

    def add(self, setting: Setting) -> None:
        "Compute the mask of a setting, unless it is there."
        key = "|".join(map(str, setting))
        if key in self.views:
            return
        row, window = PACKINGS[setting.packing], setting.window or None
        size = drafter_mask(setting.drafter, torch.tensor(row), setting.depth, window, setting.anchors)
        mask = frozen_mask(size, row, self.pool)
        same = str(mask), *setting[1:]  # of another drafter with the same mask
        if same not in self._ids:
            self._ids[same] = f"m{len(self._ids)}"
            self.masks[self._ids[same]] = mask | dict(longer=_longer(setting))
        self.views[key] = self._ids[same]

    def state(self) -> dict:
        "What the widget draws from, without the menus. Copies: a later `add` is a change."
        clauses = frozen_clauses(self.pool)
        return dict(masks=dict(self.masks), clauses=clauses, views=dict(self.views))


class MaskExplorer(Widget):
    """A mask, or the masks of drafters with menus; see `explore_mask`. A setting of the menus
    that is not in the page is computed by the kernel."""

    name = "mask_explorer"

    def __init__(self, first: MaskSize, frozen: FrozenMasks, menus: list[dict], chosen: dict[str, Any]):
        self.first, self.frozen = first, frozen
        super().__init__(
            state=frozen.state() | dict(menus=menus, head_dim=HEAD_DIM),
            controls=dict(side=8, removed=[]) | chosen,
        )
        self.observe(self._request, "controls")

    def _request(self, change) -> None:
        chosen = [change["new"].get(menu["name"]) for menu in self.state["menus"]]
        if not all(c in menu["choices"] for c, menu in zip(chosen, self.state["menus"])):
            return
        if "|".join(map(str, chosen)) not in self.frozen.views:
            self.frozen.add(Setting(*chosen))
            self.state = self.state | self.frozen.state()

    def fallback(self) -> str:
        "The picture of the mask that is shown first."
        mask, queries, keys = self.first
        row = next(iter(self.state["masks"].values()))["documents"]
        figure = mask.draw(queries, keys, row if queries == len(row) else None, title="Allowed entries")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=80, bbox_inches="tight")
        plt.close(figure)
        data = base64.b64encode(buffer.getvalue()).decode()
        words = ", ".join(clauses(mask))
        return f'<img alt="mask: {words}" src="data:image/png;base64,{data}">'


def _explore_drafters(drafters: list[str]) -> MaskExplorer:
    frozen = FrozenMasks()
    choices: list[Any] = [drafters, *(MENUS[name][1][:n] for name, n in FROZEN.items())]
    for values in product(*choices):
        frozen.add(Setting(*values))
    chosen = {name: choices[0] for name, (_, choices) in MENUS.items()}
    row = torch.tensor(PACKINGS[chosen["packing"]])
    sizes = {name: drafter_mask(name, row, chosen["depth"]) for name in drafters}
    widest = max(drafters, key=lambda name: sizes[name].keys)
    menus = [dict(name="drafter", label="drafter", choices=drafters)]
    menus += [dict(name=n, label=label, choices=c) for n, (label, c) in MENUS.items()]
    return MaskExplorer(sizes[widest], frozen, menus, dict(drafter=widest) | chosen)


def explore_mask(
    mask: Mask | MaskSize | str | None = None,
    queries: int | None = None,
    keys: int | None = None,
    documents: Tensor | list[int] | None = None,
) -> MaskExplorer:
    """A mask to explore. Give a `Mask` and its size Q x K (`keys` None: as many as queries), what `training_mask`
    returns, or the name of a drafter (None: all); `documents`: [L] of the row, drawn as lines, -1 is padding. Errors:
    ValueError for a size that is missing or too large."""
    if mask is None or isinstance(mask, str):
        if (queries, keys, documents) != (None, None, None):
            raise ValueError("queries, keys and documents belong to a Mask; a drafter's come from its menus")
        if mask is not None:
            drafter_mask(mask, torch.tensor(PACKINGS["one document"]))  # known, and with a mask
        return _explore_drafters(drafters_with_mask() if mask is None else [mask])
    if not isinstance(mask, MaskSize):
        if queries is None or queries < 1:
            raise ValueError(f"queries={shown(queries)}: how many queries does the mask have?")
        mask = MaskSize(mask, queries, keys or queries)
    row = [0] * min(mask.queries, mask.keys) if documents is None else documents
    frozen = FrozenMasks()
    row = torch.as_tensor(row).flatten().tolist()
    frozen.masks["m0"] = frozen_mask(mask, row, frozen.pool)
    frozen.views[""] = "m0"
    return MaskExplorer(mask, frozen, menus=[], chosen={})
