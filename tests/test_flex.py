"""Flex attention: its block lists come from the structure of a mask and are those of `create_block_mask`; compiled,
they give the dense output; one BlockMask a batch and window; few compilations; all back ends train alike."""

import warnings
from functools import lru_cache

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import speculators_nb.nn.attention as attention_module
from benchmarks.gpu.equal import DRAFTERS, HEADS, WAYS, batch, differences, drafter, flex_trains, step
from speculators_nb.nn.attention import (
    KeyRange,
    Mask,
    anchored_blocks,
    attention,
    block_attention,
    causal,
    flex_mask,
    prefix_attention,
    rollouts,
    same_document,
    sliding_window,
    slot_window,
    ttt,
)

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
CPU = torch.device("cpu")
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices")
ATTENDING = [name for name in DRAFTERS if name not in HEADS]


def packing(length, generator):
    "[L] ids of contiguous documents, some padding at the end."
    documents = int(torch.randint(1, 6, (), generator=generator))
    ids = torch.randint(0, documents, (length,), generator=generator).sort().values
    padding = int(torch.randint(0, 1 + length // 4, (), generator=generator))
    return torch.cat([ids[: length - padding], ids.new_full((padding,), -1)])


def random_mask(seed, length):
    "A mask that a drafter trains under, its numbers of queries and keys."
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=g))

    length = number(length // 2, length + 1)
    ids = packing(length, g)
    window = [None, number(1, length)][number(0, 2)]
    chosen = (torch.rand(length, generator=g) < number(1, 9) / 10).nonzero()[:, 0]
    kind = seed % 5
    if kind == 0:
        return ttt(ids, length, window), length, number(1, 4) * length
    if kind == 1 and len(chosen):  # what training-time test computes
        return ttt(ids, length, window).of_queries(chosen), len(chosen), length
    if kind == 2 and len(chosen):
        slots = number(1, 9)
        mask = anchored_blocks(chosen, ids, slots, window, number(0, 2) == 1)
        if number(0, 2):
            mask = mask & slot_window(chosen, length, slots, number(1, 12))
        return mask, len(chosen) * slots, length + len(chosen) * slots
    if kind == 3:
        depths = number(1, 5)
        anchors = torch.cat([torch.arange(length), *[chosen] * (depths - 1)])
        depth = torch.cat([torch.zeros(length).long(), torch.arange(1, depths).repeat_interleave(len(chosen))])
        return rollouts(anchors, depth, ids, window), len(anchors), len(anchors)
    mask = causal() & same_document(ids)
    return (mask if window is None else mask & sliding_window(window)), length, length


def assert_same_blocks(mask, queries, keys):
    "The lists of `flex_mask` are those that evaluating the mask for every pair gives."
    made = flex_mask(mask, queries, keys)

    def padded(b, h, q, kv):
        inside = mask(b, h, q.clamp_max(queries - 1), kv.clamp_max(keys - 1))
        return inside & (kv < keys)

    by_pairs = create_block_mask(padded, None, None, *made.seq_lengths, device="cpu", BLOCK_SIZE=made.BLOCK_SIZE)
    for name in LISTS:
        assert torch.equal(getattr(made, name), getattr(by_pairs, name)), name
    zero, (rows, columns) = torch.zeros((), dtype=torch.long), map(torch.arange, made.seq_lengths)
    assert torch.equal(*(by(zero, zero, rows[:, None], columns) for by in (made.mask_mod, padded)))
    return made


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, 10))])
def test_blocks_are_those_of_every_pair(part, monkeypatch):
    "600 random packings, windows, anchors and depths, in blocks of 8."
    monkeypatch.setattr(attention_module, "FLEX_BLOCK", 8)
    kinds = set()
    for seed in range(60 * part, 60 * (part + 1)):
        made = assert_same_blocks(*random_mask(seed, 48))
        kinds.add((bool(made.kv_num_blocks.sum()), bool(made.full_kv_num_blocks.sum())))
    assert (True, True) in kinds


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_128(seed):
    assert_same_blocks(*random_mask(seed, 900))


@pytest.mark.parametrize("by", [(1, 0), (0, 1), (0, -2), (-1, 0)])
def test_a_wrong_list_is_found(by, monkeypatch):
    "Ranges with wrong ends."
    monkeypatch.setattr(attention_module, "FLEX_BLOCK", 8)
    right = causal() & same_document(torch.arange(64) // 16)

    def shifted(q, keys):
        return [KeyRange(r.first + by[0], r.stop + by[1]) for r in right.ranges(q, keys)]

    assert_same_blocks(right, 64, 64)
    with pytest.raises(AssertionError):
        assert_same_blocks(Mask(right.allowed, shifted), 64, 64)


def dense(q, k, v, mask):
    return attention(q, k, v, mask, "eager")


@torch.no_grad()
def test_compiled_flex_gives_the_dense_output(monkeypatch):
    "Two packings through inductor, which reads the lists; a list that lacks a block gives another output."
    monkeypatch.setattr(attention_module, "_compiled_flex", torch.compile(flex_attention, dynamic=True))
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        documents = packing(1000, g)
        mask = ttt(documents, 1000, 300)
        rows = (torch.rand(1000, generator=g) < 0.6).nonzero()[:, 0]
        q, k, v = (torch.randn(1, h, n, 16, generator=g) for h, n in ((4, len(rows)), (2, 1000), (2, 1000)))
        chosen = mask.of_queries(rows)
        expected = dense(q, k, v, chosen)
        assert (attention(q, k, v, chosen, "flex") - expected).abs().max() < 1e-5, seed
    made = chosen.made[len(rows), 1000]
    lists = [getattr(made, name).clone() for name in LISTS[:4]]
    lists[0][..., 1] -= 1  # a partial block of the second block of queries
    chosen.made[len(rows), 1000] = BlockMask.from_kv_blocks(
        *lists, mask_mod=made.mask_mod, seq_lengths=made.seq_lengths
    )
    assert (attention(q, k, v, chosen, "flex") - expected).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["steps", pytest.param("blocks", marks=pytest.mark.nightly)])
def test_few_compilations(kind, monkeypatch):
    "25 packings whose rows, anchors and documents differ: at most two, and one for rows of a single block."
    torch._dynamo.reset()
    counter = CompileCounter()
    function = torch.compile(flex_attention, backend=counter, dynamic=True)
    monkeypatch.setattr(attention_module, "_compiled_flex", function)
    sizes = set()
    for seed in range(25):
        g = torch.Generator().manual_seed(seed)
        L, B = (1536, 1) if kind == "steps" else (384, 4)
        documents = packing(L, g)
        chosen = (torch.rand(L, generator=g) < torch.rand((), generator=g)).nonzero()[:, 0]
        k, v = torch.randn(2, 1, L, 8, generator=g)
        if kind == "steps":
            q, own = torch.randn(2, len(chosen), 8, generator=g), torch.randn(1, len(chosen), 8, generator=g)
            prefix_attention(q, k, v, [(own, own)], chosen, ttt(documents, L), "flex")
        else:
            q, own = (torch.randn(h, len(chosen), B, 8, generator=g) for h in (2, 1))
            block_attention(q, k, v, own, own, anchored_blocks(chosen, documents, B), "flex")
        sizes.add(len(chosen))
    assert len(sizes) > 20
    assert 1 <= counter.frame_count <= 3


@lru_cache(None)
def case(name):
    model, training = drafter(name, CPU)
    return model, batch(model, CPU, "toy"), training


@pytest.fixture
def constructions(monkeypatch):
    "Sizes of the BlockMasks that are made, and no other way to make one."
    made, original = [], BlockMask.from_kv_blocks

    def counted(*lists, **options):
        made.append(options["seq_lengths"])
        return original(*lists, **options)

    monkeypatch.setattr(BlockMask, "from_kv_blocks", counted)
    return made


# by day one for each mask of training
BY_DAY = {"eagle3", "hass", "peagle", "dflash", "query_only"}
MASKS = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in ATTENDING]


@pytest.mark.parametrize("name", MASKS)
def test_back_ends_train_alike(name, constructions):
    """Loss within 1e-6 and gradients within 1e-5 of the definition, in float32; layers, steps and the backward pass
    share one BlockMask a batch and window."""
    model, row, training = case(name)
    results, made = {}, {}
    with flex_trains(CPU):
        for way, options in WAYS.items():
            constructions.clear()
            results[way] = step(model, row, training | options, None, CPU)
            made[way] = len(constructions)
    for way in ("blocked", "flex", "masked"):
        found = differences(results[way], results["dense"])
        assert found["loss"] < 1e-6 and found["gradient"] < 1e-5, (way, found)
    assert len({layer.window for layer in model.layers}) == made["flex"] == 1
    assert made["masked"] <= 1 + (training.get("forward_num_total") or training.get("ttt_steps") or 1)


def test_one_for_each_window(constructions, monkeypatch):
    "Two layers of which one slides."
    model, row, training = case("dflash")
    monkeypatch.setattr(model.layers[1], "window", 5)
    with flex_trains(CPU):
        step(model, row, training | WAYS["flex"], None, CPU)
    assert len(constructions) == 2
