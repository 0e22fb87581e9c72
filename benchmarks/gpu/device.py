"""The device: what it is called, what it holds, and how many products a second it makes."""

import time

import torch

PEAK = {  # dense bf16 FLOP/s by the vendors' data sheets; the longest name that fits counts
    "A100": 312e12,
    "A10": 125e12,
    "A40": 150e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
    "RTX 5090": 210e12,
}


def pick():
    """The device that the benchmark runs on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait(device):
    """Until all that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call, device, repeats):
    """Mean time of a call."""
    call()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - began) / repeats


def table_peak(name):
    """FLOP/s of the table for a device's name, or None."""
    words = name.replace("-", " ").split()
    fits = [known for known in PEAK if all(word in words for word in known.split())]
    return PEAK[max(fits, key=len)] if fits else None


def gemm(device, size, dtype):
    """FLOP/s of a square product of random numbers."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device, 10)


def copy(device, size):
    """Bytes read and written each second by a copy inside of the device's memory."""
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * size / seconds(lambda: y.copy_(x), device, 10)


def run(cell, turn):
    """The facts of the device: one row."""
    device = pick()
    toy = cell["toy"] or device.type != "cuda"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with turn():
        rate = gemm(device, 256 if toy else 8192, torch.bfloat16)
        moved = copy(device, 2**20 if toy else 2**32)
    known = table_peak(name)
    source = "data sheet" if known else "the measured product" if device.type == "cuda" else "not known"
    facts = dict(
        device=name,
        gemm_flops=rate,
        copy_bytes=moved,
        peak_flops=known or (rate if device.type == "cuda" else None),
        peak_from=source,
    )
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        facts |= dict(
            memory_bytes=about.total_memory,
            multiprocessors=about.multi_processor_count,
            capability=f"{about.major}.{about.minor}",
        )
    yield facts
