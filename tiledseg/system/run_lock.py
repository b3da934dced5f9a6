"""The lock of a run's folder: one run a folder. Standard library only.

The lock is `flock` on the file `run.lock`, which names the holder. The system releases it when the process ends, also
if it is killed; the file alone locks nothing. `flock` works between nodes on NFS (Linux) and GPFS, and on Lustre
mounted with `flock`. On a file system without locks, `hold` returns a warning and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tiledseg.errors import OutputError
from tiledseg.system.outputs import LOCK_FLAGS

NAME = "run.lock"
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def check_free(folder: Path) -> None:
    """Raise OutputError, with the holder's name, if a process holds the lock of `folder`. Writes nothing."""
    try:
        handle = os.open(folder / NAME, LOCK_FLAGS)
    except OSError:
        return
    try:
        _lock(handle, folder)
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[str | None]:
    """Hold the lock of `folder`, which is created if missing; yield a warning if the file system has no locks, or None.

    Raises OutputError, with the holder's name, if another process holds it.
    """
    path = folder / NAME
    with contextlib.ExitStack() as opened:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, LOCK_FLAGS | os.O_CREAT, 0o666)
            except OSError as error:
                raise OutputError(f"cannot write into {folder}: {error.strerror}; give another run.output") from error
            opened.callback(os.close, handle)
            warning = _lock(handle, folder)
            if is_at(handle, path):  # else the former holder has just removed the file
                break
        with contextlib.suppress(OSError):  # the writes that follow report a full disk
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        try:
            yield warning
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)  # while it is held: a waiting process finds the file gone, and makes its own


def _lock(handle: int, folder: Path) -> str | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.pread(handle, 300, 0).decode(errors="replace") or "another process"
        raise OutputError(f"{folder} is in use by {who}; wait for its end, or give another run.output") from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise OutputError(f"cannot lock {folder / NAME}: {error.strerror}; give another run.output") from error
        return f"{folder}: its file system has no locks, so nothing stops a second job from writing there too"
    return None


def is_at(handle: int, path: Path) -> bool:
    """Return True if the open file `handle` is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
