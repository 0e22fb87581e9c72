"""What a recipe needs before it runs: disk of features, memory of a training step, hours, servers.
What does not fit is named, with the option that makes it fit. Of the verifier only config.json is read."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.config import SpeculatorModelConfig
from ..core.options import FIRST_CHOICE, duration, pairs
from ..data.prepared_folder import load_prepared, read_data_config
from ..evaluate.speedup import experts_read
from ..features.feature_rows import stored_dtype
from ..models.base import SpeculatorModel
from ..nn.compiled import product_dtype
from ..train.training_arguments import can_shard
from ..verifier.folders import layout_of, named_by
from ..verifier.identity import VerifierInfo
from .disk import Disk, features_on_disk, free_disk
from .sizes import DrafterSizes, cache_bytes, drafter_sizes, forward_flops, empty_drafter, verifier_sizes
from .step_memory import RECOMPUTED, StepCost, StepMemory, predicted_step, step_memory

GB = 1e9


# share of the data sheet's rate that a training step reaches on an H100, by drafter: the lowest of what is measured
# (benchmarks/gpu/results; a test holds these numbers to it). A drafter that is not there counts as the lowest.
MFU = dict(eagle3=0.3, peagle=0.25, dflash=0.38, mtp=0.51)
H100 = dict(tflops=989.0, bandwidth=3.0)  # bfloat16, dense, by its data sheet; TB/s of a copy, measured
# share of a large product's rate that is reached on a CPU: a train step (benchmarks/train_step), and a verifier's
# forward pass (benchmarks/features; the product's rate from benchmarks/train_step)
CPU_TRAINING, CPU_FORWARD = 0.78, 0.5


class Machine(NamedTuple):
    "What a recipe runs on; an H100, if nothing is said."

    devices: int = 1  # that train
    memory: float = math.inf  # bytes of one
    tflops: float = H100["tflops"]  # of one, in bfloat16, or in float32 where that is faster
    mfu: float = MFU["eagle3"]  # share of it that is reached in training
    bandwidth: float = H100["bandwidth"]  # of its memory, TB/s
    float32: float | None = None  # TFLOPS in float32; None: as in bfloat16
    forward: float | None = None  # share that a forward pass reaches; None: as in training
    kind: str = "cuda"
    source: str = "an H100's"  # of the rates
    doubt: str = ""  # why the rates may be another machine's, and what to write

    def seconds(self, flops: float, devices: int) -> float:
        "Of forward passes."
        return flops / (devices * self.tflops * 1e12 * (self.forward or self.mfu))

    def training_seconds(self, flops: float, bf16: bool = True) -> float:
        "Of training on one device."
        tflops = self.tflops if bf16 else self.float32 or self.tflops
        return flops / (tflops * 1e12 * self.mfu)


def device_memory() -> float:
    "Memory of this machine's accelerator in bytes; infinite: there is none but the CPU."
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return math.inf


def _fastest(device, work) -> float:
    "Seconds of the fastest of some calls; on a CPU those of its threads, which other processes do not count in."

    def now():
        if device == "cpu":
            return time.process_time() / torch.get_num_threads()
        torch.cuda.synchronize()
        return time.perf_counter()

    took, end = [], time.perf_counter() + 0.3
    while len(took) < 4 or time.perf_counter() < end:
        start = now()
        work()
        took.append(now() - start)
    return min(took[1:])


def measured_machine(algorithm: str, devices: int = 1) -> Machine:
    "This machine by the rates of a product and of a copy, timed now in about a second."
    cuda = torch.cuda.is_available()
    device, n = ("cuda", 8192) if cuda else ("cpu", 1024)
    tflops = {}
    for dtype in {torch.float32, product_dtype(torch.device(device))}:
        a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
        tflops[dtype] = 2 * n**3 / _fastest(device, lambda: a @ b) / 1e12
    whole = torch.ones(2**26, device=device)
    copied = 2 * whole.nbytes / _fastest(device, whole.clone) / 1e12
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    return Machine(
        devices=devices,
        memory=device_memory(),
        tflops=max(tflops.values()),
        mfu=MFU.get(algorithm, min(MFU.values())) if cuda else CPU_TRAINING,
        bandwidth=copied,
        float32=tflops[torch.float32],
        forward=None if cuda else CPU_FORWARD,
        kind=device,
        source=f"measured now, {name}",
    )


def machine_of(
    algorithm: str,  # that is trained; "": none
    devices: int = 1,  # that train
    memory: float | None = None,  # bytes of one; None: of this machine's, if it has any
    tflops: float | None = None,  # of one
    mfu: float | None = None,  # share of it that is reached
    bandwidth: float | None = None,  # TB/s
) -> Machine:
    "The machine that options describe, with an H100's rates where they are silent; without any, this machine."
    here = device_memory()
    known = torch.cuda.is_available() and "H100" in torch.cuda.get_device_name()
    if not known and memory is tflops is mfu is bandwidth is None:
        return measured_machine(algorithm, devices)
    memory = here if memory is None else memory
    given = dict(tflops=tflops, bandwidth=bandwidth)
    missing = [f"--{name}" for name, value in given.items() if value is None]
    doubt = ""
    if missing and not math.isinf(memory) and not 70 * GB < memory < 90 * GB:
        doubt = (
            f"a device of {memory / GB:.3g} GB is no H100: write {' and '.join(missing)} of yours, by its data sheet"
        )
    return Machine(
        devices,
        memory,
        tflops=H100["tflops"] if tflops is None else tflops,
        mfu=MFU.get(algorithm, min(MFU.values())) if mfu is None else mfu,
        bandwidth=H100["bandwidth"] if bandwidth is None else bandwidth,
        source="an H100's" if missing else "as given",
        doubt=doubt,
    )


class Amount(NamedTuple):
    "How much data."

    rows: int  # conversations
    tokens: int
    known: bool  # counted in a prepared folder; else assumed
    supervised: float = 1.0  # share of the tokens that carry loss

    @property
    def each(self) -> int:
        return max(1, round(self.tokens / max(1, self.rows)))


def amount_of_data(
    folder: str | os.PathLike | None,
    most: int | None,
    conversations: int | None,
    expected: int | None,
    tokens_each: int,
) -> Amount:
    """Count the rows of a prepared folder or of features, at most so many (a conversation may have several), or assume
    one a conversation where it is not there, or they are given: `conversations`, else `expected`, else 50,000, of
    `tokens_each`."""
    place = Path(folder or "")
    place = place / "rows" if (place / "rows").is_dir() else place
    if conversations is None and folder and (place / "dataset_info.json").is_file():
        prepared = load_prepared(place)
        tokens = int(prepared.lengths[:most].sum())
        return Amount(len(prepared.lengths[:most]), tokens, True, float(prepared.trained[:most].sum() / max(1, tokens)))
    rows = conversations or expected or 50_000
    return Amount(rows, rows * tokens_each, False)


def conversations_of(sections: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How many conversations a recipe takes: those of its first file, at most the least max_samples; None: neither says
    it."""
    chain = [sections[name] for name in ("regenerate", "prepare", "features") if name in sections]
    limits = [part["max_samples"] for part in chain if part.get("max_samples")]
    first = Path(str(chain[0]["data"])) if chain else Path()
    if first.suffix == ".jsonl" and first.is_file():
        with first.open("rb") as lines:
            limits.append(sum(1 for line in lines if line.strip()))
    return min(limits, default=None)


STEP = ("num_layers", "draft_arch", "draft_vocab_size")  # of `train`, that shape a drafter


class Training(NamedTuple):
    "A step of training on one device."

    sizes: DrafterSizes
    step: StepCost
    memory: StepMemory  # where all tokens carry loss
    length: int  # tokens of its row
    flops: float  # of forward and backward, where as many do as in the data
    optimizer_flops: float  # of Muon's update, for each row
    bf16: bool


def _sharing(values) -> int:
    "How many ranks share a row."
    return values.get("context_parallel_size") or 1


def training_step(
    info: VerifierInfo,  # of the verifier
    values: Mapping[str, Any],  # arguments of `train`
    each: int = 1000,  # tokens of a conversation
    ranks: int = 1,  # devices that train together
    device: str = "cuda",  # their kind
    supervised: float = 1.0,  # share of the tokens that carry loss
) -> Training:
    "What a step takes."
    given = pairs(values.get("extra"))
    given |= {n: values[n] for n in STEP if values.get(n) is not None}
    if values.get("aux_layer_ids"):
        given["target_layer_ids"] = values["aux_layer_ids"]
    # of ranks that share a row each one computes about what a row as short as its part takes
    algorithm, length = values["algorithm"], values["total_seq_len"] // _sharing(values)
    own = {n: v for n, v in given.items() if n != RECOMPUTED}
    sizes = drafter_sizes(empty_drafter(algorithm, info, **own), info)
    bf16, depth = values["bf16"], info.text.num_hidden_layers

    def predicted(share):
        layer, rows = sizes.text, sizes.rows
        return predicted_step(algorithm, layer, rows, depth, length, each, share, bf16=bf16, device=device, **given)

    step = predicted(1.0)
    memory = step_memory(sizes, step, length, values["optimizer"], bf16, ranks, bool(values.get("fsdp")))
    update = sizes.muon_flops / values.get("gradient_accumulation_steps", 1) * (values["optimizer"] == "muon")
    flops = step.flops if supervised == 1 else predicted(supervised).flops
    return Training(sizes, step, memory, length, flops, update, bf16)


def shorter_row(info: VerifierInfo, values: Mapping[str, Any], memory: float, now: Training, ranks: int = 1) -> int:
    """Tokens (a multiple of 128) on a device of a shorter row whose step fits its bytes, where that of arguments of
    `train` does not; 0: none was found. On the line through the step and that of a quarter of its row, since logits and
    anchors are as many in a shorter row; it is predicted before named."""

    def of_row(length):
        return training_step(info, dict(values, total_seq_len=length * _sharing(values)), ranks=ranks)

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


def smaller_step(info: VerifierInfo, values: Mapping[str, Any], memory: float, now: Training, ranks: int = 1) -> str:
    "What to write in the recipe whose step does not fit a device, as for `shorter_row`: the option that makes it fit."
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
        "fsdp: true": lambda: ranks > 1 and _sharing(values) == 1 and can_shard() and same_step(fsdp=True),
        "optimizer: muon": lambda: same_step(optimizer="muon"),
    }
    for option, needs in ways.items():
        total = needs()
        if total and total <= memory:
            return f"{option} ({total / GB:.3g} GB)"
    length = shorter_row(info, values, memory, now, ranks)
    if length:
        more = math.ceil(now.length / length) * values["gradient_accumulation_steps"]
        return f"total_seq_len: {length * _sharing(values)} with gradient_accumulation_steps: {more}"
    return "a smaller draft_vocab_size, fewer num_layers, or a device with more memory"


log = logging.getLogger(__name__)


def check_step_memory(verifier: str | os.PathLike, values: Mapping[str, Any], memory: float | None = None) -> None:
    """Errors: ValueError for arguments of `train` whose weights, gradients and optimizer do not fit a device: `memory`
    in bytes (None: of this machine's accelerator), with as many processes together as torchrun says."""
    memory = device_memory() if memory is None else memory
    ranks = int(os.environ.get("WORLD_SIZE", 1))
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
            f"algorithm={values['algorithm']!r}: weights, gradients and optimizer take {state:.3g} GB, and the device "
            f"has {has:.3g} GB; write {remedy}"
        )
    needs = f"a step of {now.length} tokens needs about {total:.3g} GB, and the device has {has:.3g} GB"
    log.warning("%s: if it runs out of memory, write %s", needs, remedy)


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


def answering(info: VerifierInfo, machine: Machine, server: Serving, each: int, concurrency: int) -> Answers:
    """An upper bound of the rate, with conversations of `each` tokens, so many at once. A decoding step reads the
    weights, of experts those that one of its tokens uses, and every KV cache once, and computes one token of each
    conversation; the slower of both counts. On average half of a conversation is in its cache. Memory limits how many
    are cached at once."""
    sizes = verifier_sizes(info.config)
    whole, at_once = cache_bytes(sizes, each), concurrency
    if whole and not math.isinf(machine.memory):
        free = 0.9 * server.width * machine.memory - server.weights
        at_once = max(1, min(concurrency, int(free / whole)))
    unread = 1 - experts_read(at_once, sizes.experts, sizes.experts_used) / sizes.experts
    moved = server.weights - 2 * sizes.expert_weights * unread + at_once * cache_bytes(sizes, each / 2)
    reading = moved / (server.width * machine.bandwidth * 1e12)
    token = forward_flops(sizes, each) + 2 * sizes.vocab * sizes.hidden
    computing = machine.seconds(at_once * token, server.width)
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
    stored: bool = False  # the features are there

    @property
    def trained(self) -> float:  # tokens/s of all devices
        if self.training is None:
            return 0.0
        training = self.training
        row = self.machine.training_seconds(training.flops, training.bf16)
        row += self.machine.training_seconds(training.optimizer_flops)
        return self.machine.devices * training.length / row

    @property
    def stages(self) -> dict[str, float]:  # name -> seconds, each with all devices
        "Answers, features, training, one after the other. Where no features are written or there, training makes them."
        servers = max(1, self.machine.devices // self.serving.width)
        read = self.machine.seconds(self.read_flops, servers * self.serving.width)
        found = {}
        if self.answers:
            found["answers"] = self.data.tokens / (servers * self.answers.rate)
        if self.disk:
            found["features"] = read
        if self.training:
            train = self.epochs * self.data.tokens / self.trained
            found["training"] = train if self.disk or self.stored else train + self.epochs * read
        return found

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


def training_values(values: Mapping[str, Any]) -> dict[str, Any]:
    "Arguments of `train` with what the drafter that it starts from says of itself."
    if not values.get("from_pretrained"):
        return dict(values, algorithm=values["algorithm"] or FIRST_CHOICE)
    config: Any = SpeculatorModelConfig.from_pretrained(values["from_pretrained"])
    algorithm, layers = config.speculators_model_type, getattr(config, "transformer_layer_config", None)
    own = dict(algorithm=algorithm, draft_vocab_size=getattr(config, "draft_vocab_size", None))
    if layers is not None and not SpeculatorModel.registered_class(algorithm).fixed_layers:
        own |= dict(num_layers=layers.num_hidden_layers, draft_arch=layers.model_type)
    return dict(values) | own


def requirements(
    sections: Mapping[str, Mapping[str, Any]],  # of a recipe: command -> every argument
    verifier: str | None = None,  # folder or hub id, in place of the recipe's
    conversations: int | None = None,  # None: as prepared, else `conversations_of`, else 50,000
    tokens_each: int = 1000,  # of a conversation that is not prepared yet
    machine: Machine | None = None,  # None: one H100
    disk: float | None = None,  # bytes; None: what is free where the recipe writes
) -> Requirements:
    """What a recipe needs. Errors: ValueError for a recipe that has neither section;
    FileNotFoundError for a verifier whose config.json is not to be had."""
    write, train = sections.get("features"), sections.get("train")
    if not write and not train:
        raise ValueError("recipe: has no section features or train; there is nothing to plan")
    if train:
        train = training_values(train)
    machine = machine or Machine()
    first = dict(train or {}) | dict(write or {})
    source = write["data"] if write else first["data_dir"]
    made_by = read_data_config(source).get("model", {}).get("target_model_path")
    name = verifier or first.get("verifier") or made_by
    if not name:
        raise ValueError(f"verifier is missing: {source} does not say which one made it; write it into the recipe")
    with contextlib.nullcontext() if name != made_by else named_by(source):
        info = VerifierInfo.of(name)
    stored = not write and Path(source).is_dir() and layout_of(source) != "rows"
    most = write.get("max_samples") if write else None
    data = amount_of_data(source, most, conversations, conversations_of(sections), tokens_each)
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
        training = training_step(info, train, data.each, machine.devices, machine.kind, data.supervised)
        if training.memory.total > machine.memory:
            remedy = smaller_step(info, train, machine.memory, training, machine.devices)
    read = flops * data.tokens
    return Requirements(
        info.name, machine, data, need, other, server, read, training, epochs, algorithm, remedy, answers, stored
    )


def requirements_text(found: Requirements) -> str:
    "What a recipe needs, as lines to be printed."
    data, machine, server = found.data, found.machine, found.serving
    known = "counted" if data.known else "assumed: --conversations, --tokens-each"
    rows = [("data", f"{data.rows:,} rows of {data.each:,} tokens on average ({known})")]
    if found.disk and found.other:
        need, other = found.disk, found.other
        sizes = f"{need.need / GB:,.4g} GB in {need.dtype}"
        rows.append(("features", f"{sizes} ({other.dtype}: {other.need / GB:,.4g} GB)"))
    rows.append(("rates", _rates(found)))
    if machine.doubt:
        rows.append(("", machine.doubt))
    read = duration(machine.seconds(found.read_flops, server.width))
    width = f"--tensor-parallel-size {server.width}" if server.width > 1 else "one device"
    prefill = f"{server.rate:,.0f} tokens/s prefill"
    weights = f"weights of {server.weights / GB:.3g} GB in bfloat16"
    rows.append(("a server", f"{width}: {weights}, {prefill}, {read} for all rows"))
    if found.answers:
        wrote = f"{found.answers.at_once} at once, {found.answers.rate:,.0f} tokens/s at most"
        least = duration(data.tokens / found.answers.rate)
        rows.append(("answers", f"{wrote}: {least} on one server, or more"))
    if found.training:
        rows += _training_rows(found)
    rows.append(("timeline", _timeline(found)))
    if found.training and found.disk:
        rows.append(("online", _online(found)))
    lines = [f"{name:<10}{text}" for name, text in rows]
    return "\n".join([*lines, *found.problems])


def _rates(found: Requirements) -> str:
    "The rates that times follow from, and where they come from."
    machine = found.machine
    if machine.kind == "cpu":
        return (
            f"{machine.tflops:.2g} TFLOPS in the faster dtype, {machine.float32:.2g} in float32, "
            f"{1e3 * machine.bandwidth:.2g} GB/s ({machine.source}); training reaches {machine.mfu:g} of that, a "
            f"forward pass {machine.forward:g} (measured on an AMD EPYC)"
        )
    measured = f"{found.algorithm} was measured at {MFU[found.algorithm]}" if found.algorithm in MFU else ""
    share = measured or f"the lowest measured is {min(MFU.values())}"
    rates = f"{machine.tflops:.4g} TFLOPS and {machine.bandwidth:.3g} TB/s a device ({machine.source})"
    return f"{rates}; MFU {machine.mfu:g}, in forward passes too (on an H100 {share}; --mfu)"


def _training_rows(found: Requirements) -> list[tuple[str, str]]:
    assert found.training is not None
    sizes, memory = found.training.sizes, found.training.memory
    parts = ", ".join(f"{name} {n / GB:.3g}" for name, n in memory._asdict().items() if n)
    name = f"{found.algorithm}, {sizes.trained / 1e6:,.0f} million trained weights"
    tokens = found.data.tokens * found.epochs
    devices = found.machine.devices
    rate = f"{found.trained:,.0f} tokens/s on {devices} device{'s' * (devices > 1)}"
    whole = f"{memory.gathered / GB:.3g} GB are gathered while they compute"
    split = f"weights, gradients and optimizer are divided over {devices} devices; {whole}"
    return [
        ("drafter", name),
        *([("fsdp", split)] if memory.gathered else []),
        ("step", f"{memory.total / GB:.3g} GB a device, {found.training.length} tokens: {parts}"),
        ("training", f"{rate}, {duration(tokens / found.trained)} for {found.epochs:g} epochs"),
        *_side_by_side(found, memory.total),
    ]


def _timeline(found: Requirements) -> str:
    "The stages in their order on all devices, each with what it takes."
    stages, devices = found.stages, found.machine.devices
    parts = ", then ".join(f"{name} {duration(seconds)}" for name, seconds in stages.items())
    where = f"{devices} devices" if devices > 1 else "one device"
    if len(stages) < 2:
        return f"{parts} on {where}"
    return f"{parts}: {duration(sum(stages.values()))} on {where}"


def _online(found: Requirements) -> str:
    "What training costs without files of features: the verifier computes them again in every epoch."
    machine, server = found.machine, found.serving
    if machine.devices > 1:
        more = math.ceil(found.trained / server.rate)
        return f"{more} server{'s' * (more > 1)} more would keep {machine.devices} devices fed"
    assert found.training is not None
    needed = server.weights + found.training.memory.total
    if server.width > 1 or needed > machine.memory:
        return (
            f"verifier and step do not fit one device of {machine.memory / GB:.3g} GB: features need files, or a server"
        )
    stages = found.stages
    both = stages["training"] + found.epochs * stages["features"]
    files = stages["training"] + stages["features"]
    return (
        f"features made while it trains, step by step in turn: {duration(both)} in place of {duration(files)}, no files"
    )


def _side_by_side(found: Requirements, step: float) -> list[tuple[str, str]]:
    "Whether verifier and training step fit one device at the same time."
    has, weights = found.machine.memory, found.serving.weights / found.serving.width
    if math.isinf(has) or step > has:
        return []
    both = f"{weights / GB:.3g} GB of verifier and {step / GB:.3g} GB of step"
    if weights + step <= has:
        return [("together", f"{both} fit a device of {has / GB:.3g} GB")]
    return [("in turn", f"{both} do not fit a device of {has / GB:.3g} GB together: stop the server before training")]
