"""Which images and batches fit a limit of memory, with and without: each tried in a process of its own.

The limit is of the address space beyond what the process has once torch is loaded (RLIMIT_AS): all that is allocated or
mapped counts, touched or not, and what does not fit is an error and no kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.large_model_support.network import make_step
from benchmarks.large_model_support.ways import ours

TIMEOUT = 900
LACKING = ("MemoryLimitError", "can't allocate", "Cannot allocate", "terminate called")
"""What a process without memory says: ours, torch, the system, a library that ends it."""


def tried(
    levels: int, channels: int, size: int, batch: int, limit: int, budget: int | None, store: Path
) -> float | None:
    """Seconds of a step (the last of two) under `limit` bytes; None where it does not fit. `budget`: of our support."""
    arguments = map(str, (levels, channels, size, batch, limit, -1 if budget is None else budget, store))
    module = "benchmarks.large_model_support.fits"
    command = [sys.executable, "-m", module, *arguments]
    # Each thread's own heap would count as 64 MiB, and so would blocks that have been freed.
    own = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=own)
    if ended.returncode == 0:
        return float(json.loads(ended.stdout)["seconds"])
    if any(words in ended.stderr for words in LACKING):
        return None
    raise RuntimeError(ended.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("levels", "channels", "size", "batch", "limit", "budget"):
        parser.add_argument(name, type=int)
    parser.add_argument("store", type=Path)
    a = parser.parse_args()
    make_step(2, 4, 32, 1)()  # libraries and threads are there
    now = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (now + a.limit, resource.RLIM_INFINITY))
    with contextlib.nullcontext() if a.budget < 0 else ours(a.store, a.budget):
        step = make_step(a.levels, a.channels, a.size, a.batch)
        for _ in range(2):
            begun = time.perf_counter()
            step()
        print(json.dumps({"seconds": time.perf_counter() - begun}))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
