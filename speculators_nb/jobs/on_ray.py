"""A row-wise command on a Ray cluster: its rows in shares, each share a task. Ray gives a task to whatever device is
free and starts one that was killed again; as its output is on the disk, it goes on where it was."""

import importlib
import logging
import os
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.concurrency import plain_progress
from ..core.files import writable_folder
from ..core.options import shown

log = logging.getLogger(__name__)
RETRIES = 3  # starts of a task after its process was killed
SHARES = 4  # for each device, so that a slow one does fewer


def _run(module, name, arguments, sign):
    "In a task: the function, if the output is seen from here."
    if not Path(sign).is_file():
        raise ValueError(
            f"{Path(sign).parent}: the node {os.uname().nodename} does not see this folder of "
            "the driver; name one on a file system that all nodes share"
        )
    with plain_progress():
        return getattr(importlib.import_module(module), name)(**arguments)


def _import_ray() -> Any:
    "ImportError: Ray is not installed."
    if find_spec("ray") is None:
        raise ImportError(
            "engine='ray': Ray is not installed; install it on every node with "
            "pip install 'speculators_nb[ray]', or leave engine out"
        )
    return importlib.import_module("ray")


PLACES = ("data", "verifier", "storage")  # arguments that may name a folder or a file; text of others is a word


def _absolute(name, value):
    "A path as every node reads it: one that is to be made, or text that names what is here."
    is_path = isinstance(value, Path) or (name in PLACES and isinstance(value, str) and Path(value).exists())
    return type(value)(Path(value).absolute()) if is_path else value


def _tasks(ray, function, arguments, sign) -> list:
    "A task for each share. Each needs a GPU, or where there is none a node's processors."
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    world_size = SHARES * (gpus or len(nodes))
    processors = [node["CPU"] for node in nodes if node.get("CPU")]
    needs = dict(num_cpus=1, num_gpus=1) if gpus else dict(num_cpus=min(processors))
    task = ray.remote(_run).options(scheduling_strategy="SPREAD", max_retries=RETRIES, **needs)
    log.info("Ray: %d tasks on %d nodes", world_size, len(nodes))
    given = {name: _absolute(name, value) for name, value in arguments.items()} | dict(world_size=world_size)
    return [
        task.remote(
            module=function.__module__, name=function.__name__, arguments=given | dict(rank=rank), sign=str(sign)
        )
        for rank in range(world_size)
    ]


def _results(ray, tasks) -> list:
    "What the tasks return. Errors: the first task's own, which ends the others."
    try:
        return ray.get(tasks)
    except ray.exceptions.RayTaskError as e:
        raise (e.cause if isinstance(e.cause, Exception) else e) from None
    except ray.exceptions.WorkerCrashedError:
        raise ChildProcessError(
            f"a task of Ray was killed {RETRIES + 1} times, perhaps for want of memory; what "
            "is done is kept: run the same command again"
        ) from None
    finally:
        for task in tasks:
            ray.cancel(task, force=True)  # nothing where it has ended


def on_ray(function: Callable, arguments: dict[str, Any], output: str) -> list:
    """What a function of this library returns for each share, which are all made on a Ray cluster: it takes rank and
    world_size, and `arguments`, of which `output` names what is made. Errors: ImportError without Ray; ConnectionError
    without the cluster of RAY_ADDRESS; those of the function."""
    ray = _import_ray()
    folder = Path(arguments[output]).absolute()
    folder = writable_folder(folder.parent if folder.suffix else folder)
    started = not ray.is_initialized()
    try:
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    except ConnectionError:
        address = shown(os.environ.get("RAY_ADDRESS"))
        raise ConnectionError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there; start one with "
            "ray start --head, or unset RAY_ADDRESS"
        ) from None
    sign = folder / f".{secrets.token_hex(6)}.driver"
    sign.touch()
    try:
        return _results(ray, _tasks(ray, function, arguments, sign))
    finally:
        sign.unlink(missing_ok=True)
        if started:
            ray.shutdown()
