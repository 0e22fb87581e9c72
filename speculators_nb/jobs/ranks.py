"""Rank and world size of this process, as `torchrun` and Slurm's `srun` announce them.
A command that is started by either needs no flags to know which of many it is."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Ranks(NamedTuple):
    "Which of the processes of a job this one is."

    rank: int = 0  # of this process, from 0
    world_size: int = 1  # processes of the job
    local_rank: int = 0  # among those of this machine: its device


LAUNCHERS = (  # names of rank, of world size and of local rank
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # srun sets all of them. A batch script, which runs once for all tasks, has rank 0 and no number of tasks of a step
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def _number(environ, name):
    "An environment variable as a whole number from 0. ValueError: it is none."
    value = environ[name].strip()
    if not value.isdecimal():
        raise ValueError(
            f"{name}={value!r}: must be a whole number from 0; start the command with torchrun "
            f"or srun, which set it, or unset {name}"
        )
    return int(value)


def ranks_of(environ: Mapping[str, str] | None = None) -> Ranks:
    """Rank, world size and local rank by the variables of torchrun or srun, in the environment of this process; rank 0
    of 1 where nothing is announced. ValueError: they contradict each other."""
    environ = os.environ if environ is None else environ
    for name, size, local in LAUNCHERS:
        missing = [variable for variable in (name, size) if variable not in environ]
        # a Slurm process with another rank than 0 is one of several, of which nothing is known
        if len(missing) == 1 and (name == "RANK" or environ.get(name, "0") != "0"):
            there = size if missing == [name] else name
            raise ValueError(
                f"{there}={environ[there]!r}: {missing[0]} is not set, and both are needed; start "
                f"the command with torchrun or srun, or unset {there}"
            )
        if missing:
            continue
        rank, world_size = _number(environ, name), _number(environ, size)
        if rank >= world_size:
            raise ValueError(
                f"{name}={rank}: must be less than {size}={world_size}; start the command with "
                f"torchrun or srun, or unset both"
            )
        return Ranks(rank, world_size, _number(environ, local) if local in environ else 0)
    return Ranks()


def is_first(environ: Mapping[str, str] | None = None) -> bool:
    "Whether this is rank 0, the one that prints the result of a job."
    return ranks_of(environ).rank == 0


def shard(n: int, rank: int = 0, world_size: int = 1) -> range:
    "Every `world_size`-th of n rows, from `rank`: the shares are disjoint, and differ by one row at most."
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to world_size - 1")
    return range(rank, n, world_size)
