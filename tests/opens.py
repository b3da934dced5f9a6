"""How often files of a folder are opened, by any process: the kernel counts (inotify)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_OPENED = 0x20  # IN_OPEN
_HEAD = struct.Struct("iIII")  # watch, what, cookie, bytes of the name


def opens(folder: Path, work: Callable[[], object]) -> Counter[str]:
    """Of each file, by its name, while `work` runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(watch, os.fsencode(folder), _OPENED) > 0, os.strerror(ctypes.get_errno())
        work()
        found: Counter[str] = Counter()
        while events := _events(watch):
            found.update(events)
        return found
    finally:
        os.close(watch)


def _events(watch: int) -> list[str]:
    try:
        data = os.read(watch, 1 << 16)
    except BlockingIOError:
        return []
    names, at = [], 0
    while at < len(data):
        length = _HEAD.unpack_from(data, at)[3]
        name = data[at + _HEAD.size :][:length].rstrip(b"\0").decode()
        names += [name] if name else []  # else the folder itself
        at += _HEAD.size + length
    return names
