"""One job a file: an unfinished file is locked by the job that writes it, for as long as that job lives.

The lock is `flock` on the unfinished file itself, so nothing is left of it, however the job ends. It also keeps the
file's inode from being given to another file. Where a file system has no locks, the job goes on without. Standard
library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tiledseg.errors import OutputError


def check_unclaimed(part: Path, path: str | Path) -> None:
    """Raise OutputError where a living job writes `part`, the unfinished file of `path`. Writes nothing."""
    with claimed(part, path):
        pass


@contextlib.contextmanager
def claimed(part: Path, path: str | Path) -> Iterator[None]:
    """Hold `part`, the unfinished file of `path`, inside; nothing is held where it is not there.

    Raises OutputError where another job holds it, or has just put its own file there.
    """
    try:
        handle = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        yield
        return
    try:
        _lock(handle, path)
        if not is_at(handle, part):
            raise taken(path)
        yield
    finally:
        os.close(handle)


def taken(path: str | Path) -> OutputError:
    """The one line for a file that another job is writing."""
    return OutputError(f"cannot write {path}: another job is writing it too; give each its own output")


def _lock(handle: int, path: str | Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken(path) from None
    except OSError:
        return  # no locks here


def is_at(handle: int, path: Path) -> bool:
    """Whether the open file `handle` is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
