"""The lock of a run's folder: one run a folder. Standard library only.

The lock is `flock` on the file `run.lock`, which names the holder. The system releases it when the process ends, also
if it is killed; the file alone locks nothing. `flock` works between nodes on NFS (Linux) and GPFS, and on Lustre
mounted with `flock`. On a file system without locks, `hold` yields a warning and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tiledseg.errors import OutputError
from tiledseg.system.outputs import check_unlocked, lock, open_lock

NAME = "run.lock"
_WITHOUT_LOCKS = errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL


def check_free(folder: Path) -> None:
    """Raise OutputError, with the holder's name, if a process holds the lock of `folder`. Writes nothing."""
    check_unlocked(folder / NAME, partial(_in_use, folder))


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
                file = opened.enter_context(open_lock(path, creates=True))
            except OSError as error:
                raise OutputError(f"cannot write into {folder}: {error.strerror}; give another run.output") from error
            failure = lock(file, partial(_in_use, folder))
            if failure is not None and failure.errno not in _WITHOUT_LOCKS:
                raise OutputError(f"cannot lock {path}: {failure.strerror}; give another run.output")
            if is_at(file.fileno(), path):  # else the former holder has just removed the file
                break
        with contextlib.suppress(OSError):  # the writes that follow report a full disk
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            what = "so nothing stops a second job from writing there too"
            yield None if failure is None else f"{folder} cannot be locked ({failure.strerror}), {what}"
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)  # while it is held: a waiting process finds the file gone, and makes its own


def _in_use(folder: Path, holder: str) -> OutputError:
    who = holder or "another process"
    return OutputError(f"{folder} is in use by {who}; wait for its end, or give another run.output")


def is_at(handle: int, path: Path) -> bool:
    """Return True if the open file `handle` is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
