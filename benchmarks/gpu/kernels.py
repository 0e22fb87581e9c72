"""Where the time of one train step goes: its heaviest kernels, and the shares of flex attention, matrix
products, loss, optimizer, all else, and the host.

On a device a kernel's time is the device's, and the host's share is the time in which the device had nothing to do. On
a CPU a kernel is an operator, its time is its own without that of operators inside, and nothing is left for the host.
What runs inside the loss or the optimizer is theirs, products too.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu import step as train_step
from benchmarks.gpu.device import pick, wait

LENGTH, STEPS, HEAVIEST = {"device": 8192, "toy": 256}, {"device": 3, "toy": 1}, 30
GROUPS = ("flex", "product", "loss", "optimizer", "other", "host")
LOSS, OPTIMIZER = "speculators_nb.loss", "Optimizer."
FLEX = ("flex", "_prefixown", "scaled_dot_product")
PRODUCT = ("gemm", "cutlass", "nvjet", "xmma", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@contextmanager
def named_loss():
    """The loss of a drafter has a name in the profile."""
    from speculators_nb.models import dflash, eagle, eagle3, mtp, peagle

    def named(original):
        def loss(*args, **kwargs):
            with record_function(LOSS):
                return original(*args, **kwargs)

        return loss

    with ExitStack() as patches:
        for module in (dflash, eagle, eagle3, peagle):
            patches.enter_context(mock.patch.object(module, "head_loss", named(module.head_loss)))
        patches.enter_context(mock.patch.object(mtp, "token_loss", named(mtp.token_loss)))
        yield


def parents(event):
    """Names of an event and of all that it ran in."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


def group(event, kernel):
    """Which of GROUPS a kernel of an operator belongs to."""
    names = [kernel, *parents(event)]
    if any(name.startswith(LOSS) for name in names):
        return "loss"
    if any(name.startswith(OPTIMIZER) for name in names):
        return "optimizer"
    if any(word in name.lower() for name in names for word in FLEX):
        return "flex"
    return "product" if any(word in kernel.lower() for word in PRODUCT) else "other"


def kernels(events, device):
    """(name, group, seconds) of each kernel that ran."""
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        if device.type == "cpu":
            yield event.name, group(event, event.name), event.self_cpu_time_total / 1e6
        for kernel in event.kernels:
            yield kernel.name, group(event, kernel.name), kernel.duration / 1e6


def summed(found, steps, seconds, device):
    """Rows of the heaviest kernels and of the groups, by the time of one step."""
    by_name, by_group = {}, dict.fromkeys(GROUPS, 0.0)
    for name, kind, took in found:
        calls, total = by_name.get((name, kind), (0, 0.0))
        by_name[name, kind] = calls + 1, total + took
        by_group[kind] += took
    busy = sum(by_group.values())
    whole = max(seconds * steps, busy) if device.type == "cuda" else busy
    by_group["host"] = whole - busy
    heaviest = sorted(by_name.items(), key=lambda item: -item[1][1])[:HEAVIEST]
    for (name, kind), (calls, total) in heaviest:
        yield dict(kernel=name[:120], group=kind, calls=calls / steps, seconds=total / steps, share=total / whole)
    for kind, total in by_group.items():
        yield dict(share_of=kind, seconds=total / steps, share=total / whole)


def profiled(step, device, steps):
    """The events of some steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with named_loss(), profile(activities=activities) as found:
        for _ in range(steps):
            step()
        wait(device)
    return found


def run(cell, turn):
    """Rows of one step: {setting, size}."""
    device, size = pick(), cell["size"]
    step, steps = train_step.Setup("ours", cell["setting"], LENGTH[size], size, device).stepper(), STEPS[size]
    for _ in range(train_step.WARM_UP[size]):
        step()
    wait(device)
    with turn():
        seconds, _ = train_step.measure([step] * steps, device, size)  # without the profiler
        found = profiled(step, device, steps)
    for row in summed(kernels(found.events(), device), steps, seconds, device):
        yield cell["labels"] | row
