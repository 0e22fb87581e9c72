"""What a recipe needs before it runs: disk of features, memory of a training step, hours, servers.
What does not fit is named, with the option that makes it fit. Of the verifier only config.json is read."""

import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.options import pairs
from ..data.prepared_folder import load_prepared
from ..features.feature_rows import stored_dtype
from ..train.training_arguments import can_shard
from ..verifier.identity import VerifierInfo
from .sizes import DrafterSizes, cache_bytes, drafter_sizes, feature_bytes, forward_flops, empty_drafter, verifier_sizes
from .step_memory import RECOMPUTED, StepCost, StepMemory, predicted_step, step_memory

HEADER = 400  # bytes of a row's file that are no numbers


class Disk(NamedTuple):
    "What features need, and what there is."

    need: int  # bytes
    free: float  # bytes; infinite: unknown
    dtype: str  # of the stored states

    @property
    def fits(self) -> bool:
        return self.need <= self.free

    @property
    def remedy(self) -> str:  # "": it fits
        "The option that makes it fit."
        if self.fits:
            return ""
        wide = stored_dtype(self.dtype).itemsize
        share = self.free / self.need
        cheaper = wide > 1 and share >= 1 / wide
        option = "dtype: float8_e4m3fn" if cheaper else f"max_samples for {share:.0%} of the rows"
        return f"{option}; or train on the prepared folder with a server, which writes nothing"


def free_disk(folder: str | os.PathLike) -> int:
    "Free bytes where a folder will be; it need not exist yet."
    place = Path(folder).absolute()
    place = next(parent for parent in (place, *place.parents) if parent.is_dir())
    return shutil.disk_usage(place).free


def features_on_disk(
    tokens: int,  # of all rows
    rows: int,
    hidden_size: int,  # H
    states: int,  # stored for a token
    dtype: str,  # as stored
    free: float = math.inf,  # bytes
) -> Disk:
    "What the features of some rows need."
    token = feature_bytes(hidden_size, states, stored_dtype(dtype)) + 8  # and its id
    return Disk(tokens * token + rows * HEADER, free, dtype)


GB = 1e9


class Machine(NamedTuple):
    "What a recipe runs on."

    devices: int = 1  # that train
    memory: float = math.inf  # bytes of one
    tflops: float = 989.0  # of one, in bfloat16: H100, dense, by its data sheet
    mfu: float = 0.31  # share of it that is reached: EAGLE-3's step on an H100
    bandwidth: float = 3.0  # of its memory, TB/s: a copy on an H100

    def seconds(self, flops: float, devices: int) -> float:
        return flops / (devices * self.tflops * 1e12 * self.mfu)


def device_memory() -> float:
    "Memory of this machine's accelerator in bytes; infinite: there is none but the CPU."
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return math.inf


class Amount(NamedTuple):
    "How much data."

    rows: int  # conversations
    tokens: int
    known: bool  # counted in a prepared folder; else assumed

    @property
    def each(self) -> int:
        return max(1, round(self.tokens / max(1, self.rows)))


def amount_of_data(
    folder: str | os.PathLike | None,  # a prepared folder or conversations, perhaps not there
    most: int | None = None,  # max_samples of the recipe
    conversations: int | None = None,  # as given; None: those of the folder, else 50,000
    tokens_each: int = 1000,  # assumed where they cannot be counted
) -> Amount:
    "Count the rows of a prepared folder, or assume some."
    place = Path(folder or "")
    if conversations is None and folder and (place / "dataset_info.json").is_file():
        lengths = [int(n) for n in load_prepared(place).rows["seq_len"]][:most]
        return Amount(len(lengths), sum(lengths), True)
    rows = conversations or most or 50_000
    return Amount(rows, rows * tokens_each, False)


STEP = ("num_layers", "draft_arch", "draft_vocab_size")  # of `train`, that shape a drafter


class Training(NamedTuple):
    "A step of training on one device."

    sizes: DrafterSizes
    step: StepCost
    memory: StepMemory
    length: int  # tokens of its row


def training_step(
    info: VerifierInfo,  # of the verifier
    values: Mapping[str, Any],  # arguments of `train`
    each: int = 1000,  # tokens of a conversation
    ranks: int = 1,  # devices that train together
    device: str = "cuda",  # their kind
) -> Training:
    "What a step takes."
    given = pairs(values.get("extra"))
    given |= {n: values[n] for n in STEP if values.get(n) is not None}
    if values.get("aux_layer_ids"):
        given["target_layer_ids"] = values["aux_layer_ids"]
    algorithm, length = values["algorithm"], values["total_seq_len"]
    own = {n: v for n, v in given.items() if n != RECOMPUTED}
    sizes = drafter_sizes(empty_drafter(algorithm, info, **own), info)
    bf16, depth = values["bf16"], info.text.num_hidden_layers
    step = predicted_step(algorithm, sizes.text, sizes.rows, depth, length, each, bf16=bf16, device=device, **given)
    memory = step_memory(sizes, step, length, values["optimizer"], bf16, ranks, bool(values.get("fsdp")))
    return Training(sizes, step, memory, length)


def shorter_row(
    info: VerifierInfo,
    values: Mapping[str, Any],  # arguments of `train`, whose step does not fit
    memory: float,  # bytes of a device
    now: Training,
    ranks: int = 1,
) -> int:  # tokens, a multiple of 128; 0: none was found
    """A shorter row whose step fits: on the line through the step and that of a quarter of its
    row, since logits and anchors are as many in a shorter row. It is predicted before named."""

    def of_row(length):
        return training_step(info, dict(values, total_seq_len=length), ranks=ranks)

    least = max(128, now.length // 512 * 128)
    short = of_row(least) if least < now.length else now
    for _ in range(4):
        if short.length == now.length:
            break
        slope = (now.memory.total - short.memory.total) / (now.length - short.length)
        length = int(now.length - (now.memory.total - memory) / slope)
        length = min(length, now.length - 1) // 128 * 128
        if length < 128:
            break
        now = of_row(length)
        if now.memory.total <= memory:
            return length
    return 0


def smaller_step(
    info: VerifierInfo,
    values: Mapping[str, Any],  # arguments of `train`, whose step does not fit
    memory: float,  # bytes of a device
    now: Training,
    ranks: int = 1,
) -> str:  # the option that makes it fit
    "What to write in the recipe."
    extra, fsdp = pairs(values.get("extra")), bool(values.get("fsdp"))

    def of(**changed):
        return training_step(info, dict(values, **changed), ranks=ranks).memory.total

    def same_step(optimizer=values["optimizer"], fsdp=fsdp):
        return step_memory(now.sizes, now.step, now.length, optimizer, values["bf16"], ranks, fsdp).total

    ways = {
        "bf16: true": lambda: not values["bf16"] and of(bf16=True),
        "extra: {gradient_checkpointing: true}": lambda: (
            not extra.get(RECOMPUTED) and of(extra=extra | {RECOMPUTED: True})
        ),
        "fsdp: true": lambda: ranks > 1 and can_shard() and same_step(fsdp=True),
        "optimizer: muon": lambda: same_step(optimizer="muon"),
    }
    for option, needs in ways.items():
        total = needs()
        if total and total <= memory:
            return f"{option} ({total / GB:.3g} GB)"
    length = shorter_row(info, values, memory, now, ranks)
    if length:
        more = math.ceil(now.length / length) * values["gradient_accumulation_steps"]
        return f"total_seq_len: {length} with gradient_accumulation_steps: {more}"
    return "a smaller draft_vocab_size, fewer num_layers, or a device with more memory"


log = logging.getLogger(__name__)


def check_step_memory(
    verifier: str | os.PathLike,  # folder or hub id
    values: Mapping[str, Any],  # arguments of `train`
    memory: float | None = None,  # bytes of a device; None: this machine's accelerator
    ranks: int | None = None,  # processes that train together; None: as torchrun says
) -> None:
    "Errors: ValueError for a drafter whose weights, gradients and optimizer do not fit."
    memory = device_memory() if memory is None else memory
    ranks = ranks or int(os.environ.get("WORLD_SIZE", 1))
    if math.isinf(memory) or values.get("from_pretrained"):  # which brings its own layers
        return
    info = VerifierInfo.of(verifier)
    now = training_step(info, values, ranks=ranks)
    if now.memory.total <= memory:
        return
    remedy = smaller_step(info, values, memory, now, ranks)
    state, total, has = (n / GB for n in (now.memory.state, now.memory.total, memory))
    if state > has:
        raise ValueError(
            f"algorithm={values['algorithm']!r}: weights, gradients and optimizer take "
            f"{state:.3g} GB, and the device has {has:.3g} GB; write {remedy}"
        )
    log.warning(
        "a step of %d tokens needs about %.3g GB, and the device has %.3g GB: if it runs out of memory, write %s",
        now.length,
        total,
        has,
        remedy,
    )


class Serving(NamedTuple):
    "The verifier on servers."

    weights: float  # bytes, bfloat16
    width: int  # devices of one server: --tensor-parallel-size
    rate: float  # tokens/s of one server, prefill


def serving(info: VerifierInfo, machine: Machine, each: int) -> tuple[Serving, float]:
    "What a server of the verifier takes and makes, and FLOPs of a token, in conversations of `each` tokens."
    sizes = verifier_sizes(info.config)
    flops = forward_flops(sizes, each)
    weights = 2.0 * sizes.weights
    # a tenth is left for the KV cache and what a forward pass holds
    width = 1 if math.isinf(machine.memory) else weights / (0.9 * machine.memory)
    width = 2 ** max(0, math.ceil(math.log2(width)))
    return Serving(weights, width, 1 / machine.seconds(flops, width)), flops


class Answers(NamedTuple):
    "Answers that a server of the verifier writes (`regenerate`)."

    at_once: int  # conversations in one decoding step
    rate: float  # tokens/s of one server, at most


def answering(
    info: VerifierInfo,  # of the verifier
    machine: Machine,
    server: Serving,
    each: int,  # tokens of a conversation
    concurrency: int,  # of the recipe
) -> Answers:
    """An upper bound of the rate. A decoding step reads all weights and every KV cache once,
    and computes one token of each conversation; the slower of both counts. On average half of
    a conversation is in its cache. Memory limits how many are cached at once."""
    sizes = verifier_sizes(info.config)
    cache = cache_bytes(sizes)
    at_once = concurrency
    if not math.isinf(machine.memory):
        free = 0.9 * server.width * machine.memory - server.weights
        at_once = max(1, min(concurrency, int(free / (cache * each))))
    moved = server.weights + at_once * cache * each / 2
    reading = moved / (server.width * machine.bandwidth * 1e12)
    computing = machine.seconds(at_once * forward_flops(sizes, each), server.width)
    return Answers(at_once, at_once / max(reading, computing))


class Requirements(NamedTuple):
    "What a recipe needs."

    verifier: str
    machine: Machine
    data: Amount
    disk: Disk | None  # None: no features are written
    other: Disk | None  # the same in the other of bfloat16 and float8
    serving: Serving
    read_flops: float  # of all tokens, once
    training: Training | None  # None: the recipe trains nothing
    epochs: float
    algorithm: str
    remedy: str  # for the step of training; "": it fits
    answers: Answers | None = None  # None: the recipe has no section regenerate

    @property
    def trained(self) -> float:  # tokens/s of all devices
        if self.training is None:
            return 0.0
        token = self.training.step.flops / self.training.length
        return 1 / self.machine.seconds(token, self.machine.devices)

    @property
    def problems(self) -> list[str]:  # what does not fit, with the option that makes it fit
        found = []
        if self.disk and not self.disk.fits:
            sizes = f"{self.disk.need / GB:.3g} GB, {self.disk.free / GB:.3g} GB are free"
            found.append(f"features do not fit: {sizes}; write {self.disk.remedy}")
        if self.remedy and self.training:
            total = self.training.memory.total / GB
            has = f"a device has {self.machine.memory / GB:.3g} GB"
            found.append(f"the training step does not fit: {total:.3g} GB, {has}; write {self.remedy}")
        return found


def requirements(
    sections: Mapping[str, Mapping[str, Any]],  # of a recipe: command -> every argument
    verifier: str | None = None,  # folder or hub id, in place of the recipe's
    conversations: int | None = None,  # None: as prepared, else max_samples, else 50,000
    tokens_each: int = 1000,  # of a conversation that is not prepared yet
    machine: Machine | None = None,  # None: one H100
    disk: float | None = None,  # bytes; None: what is free where the recipe writes
) -> Requirements:
    """What a recipe needs. Errors: ValueError for a recipe that has neither section;
    FileNotFoundError for a verifier whose config.json is not to be had."""
    write, train = sections.get("features"), sections.get("train")
    if not write and not train:
        raise ValueError("recipe: has no section features or train; there is nothing to plan")
    machine = machine or Machine()
    first = dict(train or {}) | dict(write or {})
    info = VerifierInfo.of(verifier or first.get("verifier") or "")
    source = write["data"] if write else first.get("data_dir")
    most = write.get("max_samples") if write else None
    data = amount_of_data(source, most, conversations, tokens_each)
    need = other = training = None
    if write:
        states, dtype = len(write.get("aux_layer_ids") or range(3)) + 1, write["dtype"]
        free = free_disk(write["output_dir"]) if disk is None else disk
        wide = stored_dtype(dtype).itemsize > 1
        need, other = (
            features_on_disk(data.tokens, data.rows, info.text.hidden_size, states, kind, free)
            for kind in (dtype, "float8_e4m3fn" if wide else "bfloat16")
        )
    server, flops = serving(info, machine, data.each)
    written = sections.get("regenerate")
    answers = answering(info, machine, server, data.each, written["concurrency"]) if written else None
    remedy, epochs, algorithm = "", 0, ""
    if train:
        epochs, algorithm = train["num_train_epochs"], train["algorithm"]
        training = training_step(info, train, data.each, machine.devices)
        if training.memory.total > machine.memory:
            remedy = smaller_step(info, train, machine.memory, training, machine.devices)
    return Requirements(
        verifier=info.name,
        machine=machine,
        data=data,
        disk=need,
        other=other,
        serving=server,
        read_flops=flops * data.tokens,
        training=training,
        epochs=epochs,
        algorithm=algorithm,
        remedy=remedy,
        answers=answers,
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} hours"


def requirements_text(found: Requirements) -> str:
    "What a recipe needs, as lines to be printed."
    data, machine, server = found.data, found.machine, found.serving
    known = "counted" if data.known else "assumed: --conversations, --tokens-each"
    rows = [("data", f"{data.rows:,} rows of {data.each:,} tokens on average ({known})")]
    if found.disk and found.other:
        need, other = found.disk, found.other
        sizes = f"{need.need / GB:,.4g} GB in {need.dtype}"
        rows.append(("features", f"{sizes} ({other.dtype}: {other.need / GB:,.4g} GB)"))
    rate = f"{machine.tflops:g} TFLOPS a device at MFU {machine.mfu:g}"
    rows.append(("rate", f"{rate} (measured on an H100: 0.31; --mfu)"))
    read = _hours(machine.seconds(found.read_flops, server.width))
    width = f"--tensor-parallel-size {server.width}" if server.width > 1 else "one device"
    prefill = f"{server.rate:,.0f} tokens/s prefill"
    weights = f"weights of {server.weights / GB:.3g} GB in bfloat16"
    rows.append(("a server", f"{width}: {weights}, {prefill}, {read} for all rows"))
    if found.answers:
        wrote = f"{found.answers.at_once} at once, {found.answers.rate:,.0f} tokens/s at most"
        least = _hours(data.tokens / found.answers.rate)
        rows.append(("answers", f"{wrote}: {least} on one server, or more"))
    if found.training:
        rows += _training_rows(found)
    lines = [f"{name:<10}{text}" for name, text in rows]
    return "\n".join([*lines, *found.problems])


def _training_rows(found: Requirements) -> list[tuple[str, str]]:
    assert found.training is not None
    sizes, memory = found.training.sizes, found.training.memory
    parts = ", ".join(f"{name} {n / GB:.3g}" for name, n in memory._asdict().items() if n)
    name = f"{found.algorithm}, {sizes.trained / 1e6:,.0f} million trained weights"
    tokens = found.data.tokens * found.epochs
    devices = found.machine.devices
    rate = f"{found.trained:,.0f} tokens/s on {devices} device{'s' * (devices > 1)}"
    server = found.serving
    needed = math.ceil(found.trained / server.rate)
    online = f"{needed} server{'s' * (needed > 1)} more would keep {devices} devices fed"
    whole = f"{memory.gathered / GB:.3g} GB are gathered while they compute"
    split = f"weights, gradients and optimizer are divided over {devices} devices; {whole}"
    return [
        ("drafter", name),
        *([("fsdp", split)] if memory.gathered else []),
        (
            "step",
            f"{memory.total / GB:.3g} GB a device, {found.training.length} tokens: {parts}",
        ),
        ("training", f"{rate}, {_hours(tokens / found.trained)} for {found.epochs:g} epochs"),
        *_side_by_side(found, memory.total),
        *([("online", online)] if devices > 1 else []),
    ]


def _side_by_side(found: Requirements, step: float) -> list[tuple[str, str]]:
    "Whether verifier and training step fit one device at the same time."
    has, weights = found.machine.memory, found.serving.weights / found.serving.width
    if math.isinf(has) or step > has:
        return []
    both = f"{weights / GB:.3g} GB of verifier and {step / GB:.3g} GB of step"
    if weights + step <= has:
        return [("together", f"{both} fit a device of {has / GB:.3g} GB")]
    return [
        (
            "in turn",
            f"{both} do not fit a device of {has / GB:.3g} GB together: stop the server before training",
        )
    ]
