"""Bytes of features on disk and in flight, and whether they fit. Apart from the rest of a plan, which `features`
does not need: no drafter and nothing of training is imported."""

import math
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from ..features.feature_rows import stored_dtype

HEADER = 400  # bytes of a row's file that are no numbers


def feature_bytes(hidden_size: int, states: int = 4, dtype: torch.dtype = torch.bfloat16) -> int:
    "Bytes of a token's features [states, H] in a dtype, on disk and in flight: the layers that are read, and the last."
    return states * hidden_size * dtype.itemsize


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


def features_on_disk(tokens: int, rows: int, hidden_size: int, states: int, dtype: str, free: float = math.inf) -> Disk:
    "What features [tokens, states, H] of some rows need of the free bytes, stored in a dtype."
    token = feature_bytes(hidden_size, states, stored_dtype(dtype)) + 8  # and its id
    return Disk(tokens * token + rows * HEADER, free, dtype)
