"""A command under a limit of memory, by a control group of its own where these are to be had, and what it took."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

GROUPS = (  # version 2 and version 1: folder, limit, peak, swap
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak", "memory.swap.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes", ""),
)


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code (negative: the signal), seconds, and the peak of all that counts for it."""

    code: int
    seconds: float
    peak: int
    errors: str


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[tuple[Path, str] | None]:
    """A group of `limit` bytes, with the name of its file that holds the peak; None where none can be made."""
    for parent, bound, peak, swap in GROUPS:
        folder = parent / f"tiledseg-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / bound).exists() and (folder / peak).exists():
                (folder / bound).write_text(str(limit))
                if swap and (folder / swap).exists():
                    (folder / swap).write_text("0")
                yield folder, peak
                return
        finally:
            folder.rmdir()
    yield None


def run_limited(command: Sequence[str], limit: int) -> Done | None:
    """Runs a command in a group of `limit` bytes: beyond them the system kills it. None without control groups."""
    with control_group(limit) as group:
        if group is None:
            return None
        folder, peak = group

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        begun = time.perf_counter()
        done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, check=False)
        return Done(done.returncode, time.perf_counter() - begun, int((folder / peak).read_text()), done.stderr)
