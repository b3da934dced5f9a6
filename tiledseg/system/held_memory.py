"""Freed memory is kept as far as a bound allows: what lies free goes back only where the process would hold more.

All of it given back at once costs a step as much again (decision 0012), since the system clears each page that it gives
out. So a thread looks at what the process holds, each millisecond, and has the C library give back the free pages of
its heap where that nears the bound. Blocks that live are never touched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tiledseg.system.freed_memory import give_back_freed, why_not_kept

_LOOKS = 0.001  # seconds between two
_NEAR = 8 << 20  # bytes below the bound: what may be touched between two looks, about
_SHARE = 0.2  # of the time, at most, goes into giving back where that does not help


@contextmanager
def held_below(most: int, environ: Mapping[str, str]) -> Iterator[None]:
    """In the block this process holds at most about so many bytes of its own (`own_bytes`), as long as what lives is
    less. Nothing where freed memory is not kept (`why_not_kept`)."""
    if why_not_kept(environ) is not None or not Path("/proc/self/statm").exists():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_hold, args=(most - _NEAR, ended), name="held memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def resident_bytes() -> int:
    """Of this process, as the system counts them."""
    return _resident_and_shared()[0]


def own_bytes() -> int:
    """Those that no file has: libraries' pages come and go as the system likes."""
    resident, shared = _resident_and_shared()
    return resident - shared


def _resident_and_shared() -> tuple[int, int]:
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(resident) * page, int(shared) * page


def _hold(most: int, ended: threading.Event) -> None:
    wait = _LOOKS
    while not ended.wait(wait):
        wait = _LOOKS
        if own_bytes() > most:
            begun = time.perf_counter()
            give_back_freed()
            if own_bytes() > most:  # for what lives: nothing is left to give
                wait = max(_LOOKS, (time.perf_counter() - begun) * (1 / _SHARE - 1))
