"""Figures of many ranks that are forks of one process (`benchmarks.forks`)."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_LOOK_SECONDS = 1.0


class Looks:
    """Figures of a job's processes, looked at once a second. `peak_bytes`: most memory of all together with this one,
    shared pages counted once; `sockets`: most that each rank had open."""

    def __init__(self) -> None:
        self.peak_bytes, self.sockets, self._next = 0, Counter[int](), 0.0

    def __call__(self, processes: Mapping[int, int]) -> None:
        """Look at the processes that are left, by rank."""
        if time.monotonic() < self._next:
            return
        self.peak_bytes = max(self.peak_bytes, sum(map(_own_bytes, [os.getpid(), *processes.values()])))
        for rank, process in processes.items():
            self.sockets[rank] = max(self.sockets[rank], _sockets(process))
        self._next = time.monotonic() + _LOOK_SECONDS


def _own_bytes(process: int) -> int:
    """Return a process's share of the memory, pages that n processes share counted as one n-th; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _sockets(process: int) -> int:
    found = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/{process}/fd/{name}").startswith("socket:")
    return found
