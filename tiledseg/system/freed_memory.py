"""Freed memory: the C library keeps it for the next tensor instead of returning it to the system.

The C library maps each large block anew by default and unmaps it when it is freed. The system then clears every page
of every tensor of every step, up to half of all time (decision 0012). Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tiledseg.errors import ConfigError

SWITCH = "TILEDSEG_KEEP_FREED_MEMORY"

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _HEAPS = -1, -3, -4, -8  # options of malloc.h


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Set this process's C library to keep freed memory, unless `why_not_kept` gives a reason against it.

    Called at the start of a command, before tensors are made; idempotent. If the heap cannot grow, the C library still
    maps blocks: no allocation fails that would succeed otherwise.
    """
    if why_not_kept(environ) is None:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)  # no block gets its own mapping
        library.mallopt(_TRIM_THRESHOLD, -1)  # the heap's end is never returned


def keep_no_more(environ: Mapping[str, str]) -> None:
    """Undo `keep_freed_memory`: return free memory to the system now, and blocks of a MiB and more as they are freed.
    The process then holds only its tensors' memory, and a step takes longer (decision 0012)."""
    if why_not_kept(environ) is None:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 65536)  # glibc's default
        library.mallopt(_MMAP_THRESHOLD, 1 << 20)
        library.mallopt(_TRIM_THRESHOLD, 128 << 10)  # glibc's default
        library.mallopt(_HEAPS, 1)  # for all threads: a thread's own heap keeps its free memory
        give_back_freed()


def give_back_freed() -> None:
    """Return the pages of all freed blocks to the system, before tensors of other sizes follow. Does nothing without
    glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def why_not_kept(environ: Mapping[str, str]) -> str | None:
    """Return why freed memory is not kept: the switch, or another C library. None: it is kept.

    Raises ConfigError if TILEDSEG_KEEP_FREED_MEMORY is neither 0 nor 1.
    """
    said = environ.get(SWITCH, "1")
    if said not in ("0", "1"):
        raise ConfigError(f"{SWITCH}={said} is neither 0 nor 1: leave it out, or set 0 to give freed memory back")
    if said == "0":
        return f"{SWITCH}=0"
    return None if hasattr(ctypes.CDLL(None), "gnu_get_libc_version") else "the C library is not glibc"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),  # version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still allocate: the system's available memory, and at most the room under
    the limits of its control groups, by which Slurm and containers limit a job."""
    meminfo = (root / "proc/meminfo").read_text()
    left = [1024 * int(re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)[0])]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in _GROUP_FILES:
            continue
        mount = root / "sys/fs/cgroup" / controllers
        limit, used, of_files = _GROUP_FILES[controllers]
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents) if folder.is_relative_to(mount) else ():
            bytes_of = {name: group / name for name in (limit, used, "memory.stat")}
            if all(file.is_file() for file in bytes_of.values()) and bytes_of[limit].read_text().strip() != "max":
                most, taken = (int(bytes_of[name].read_text()) for name in (limit, used))
                freed = re.findall(rf"^{of_files} (\d+)$", bytes_of["memory.stat"].read_text(), re.MULTILINE)
                left.append(most - taken + sum(map(int, freed)))
    return max(0, min(left))
