"""Disks that refuse, made in the process of a case and seen by it alone: full, read-only, closed, with a limit on the
size of a file. Work for root and for an ordinary user."""

import ctypes
import os
import resource
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, RDONLY = 0x00020000, 0x10000000, 1


def mounted(folder: Path, size: str = "64k", flags: int = 0) -> bool:
    "Mount a small file system on `folder` for this process alone; False where that is not permitted."
    folder.mkdir(exist_ok=True)
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    if LIBC.unshare(NEWNS):
        if LIBC.unshare(NEWNS | NEWUSER):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        for file, number in ids.items():
            Path("/proc/self", file).write_text(f"{number} {number} 1")
    LIBC.mount(b"none", b"/", None, 1 << 18 | 16384, None)  # what is mounted from here on is not seen outside
    return LIBC.mount(b"none", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode()) == 0


def small_files(folder: Path, size: int = 8192):
    "No file may grow beyond `size` bytes."
    folder.mkdir(exist_ok=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full(folder: Path):
    "A disk with room for 16 KiB; where nothing may be mounted, files of 8 KiB at most."
    if not mounted(folder, "16k"):
        small_files(folder)


def closed(folder: Path):
    "A folder in which nothing may be made, not by root either."
    folder.mkdir(exist_ok=True)
    folder.chmod(0o555)
    # no capability: root is an ordinary user
    LIBC.capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))


def read_only(folder: Path):
    "A disk that is mounted for reading; where nothing may be mounted, a closed folder."
    if not mounted(folder, flags=RDONLY):
        closed(folder)
