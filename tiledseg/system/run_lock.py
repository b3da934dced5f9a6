"""One run a folder: a lock that ends with the process that holds it, however it ends. Standard library only.

The lock is `flock` on the file `run.lock`, which says who holds it; the system lets go of it when the process is gone,
killed or not, and the file alone locks nothing. On NFS (Linux) and GPFS `flock` holds between nodes; on Lustre it does
where that is mounted with `flock`. Where a file system has no locks, `hold` says so and goes on without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tiledseg.errors import OutputError
from tiledseg.system.files import delete

NAME = "run.lock"
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_LONGEST = 120  # characters of a command


def check_free(folder: Path) -> None:
    """Raise OutputError, naming the holder, where a living process holds the lock of `folder`. Writes nothing."""
    try:
        handle = os.open(folder / NAME, _FLAGS)
    except OSError:
        return
    try:
        _lock(handle, folder)
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[str | None]:
    """Hold the lock of `folder`, which is made where it is not there; a warning, where there are no locks, or None.

    Raises OutputError, naming the holder, where another process has it.
    """
    handle, warning = _acquire(folder)
    try:
        yield warning
    finally:
        with contextlib.suppress(OSError):
            os.unlink(folder / NAME)  # while it is held: who waits for it finds that its file is gone, and makes one
        os.close(handle)


def _acquire(folder: Path) -> tuple[int, str | None]:
    path = folder / NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, _FLAGS | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write into {folder}: {error.strerror}; give another run.output") from error
        try:
            warning = _lock(handle, folder)
            if is_at(handle, path):
                since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                command = " ".join(sys.argv)[:_LONGEST]
                words = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "command": command}
                with contextlib.suppress(OSError):  # a full disk is told by the writes that follow
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(words).encode(), 0)
                return handle, warning
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the former holder has just removed the file


def _lock(handle: int, folder: Path) -> str | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = _holder(handle)
        raise OutputError(f"{folder} is in use by {who}; wait for its end, or give another run.output") from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise OutputError(f"cannot lock {folder / NAME}: {error.strerror}; give another run.output") from error
        return f"{folder}: its file system has no locks, so nothing stops a second job from writing there too"
    return None


def _holder(handle: int) -> str:
    try:
        words = json.loads(os.pread(handle, 4096, 0))
        return f"process {words['pid']} on {words['host']} since {words['since']} ({words['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


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
        handle = os.open(part, _FLAGS)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken(path) from None
        except OSError:
            pass  # no locks here
        if not is_at(handle, part):
            raise taken(path)
        yield
    finally:
        os.close(handle)


def taken(path: str | Path) -> OutputError:
    """Return the one line for a file that another job is writing."""
    return OutputError(f"cannot write {path}: another job is writing it too; give each its own output")


@dataclass(frozen=True, eq=False)
class UnfinishedFile:
    """A file under a temporary name until it is whole; `inode` tells it from one that another job has put there."""

    path: Path
    temporary: Path
    inode: int

    @property
    def working_names(self) -> tuple[Path, ...]:
        """Return all names that it may have until it is whole."""
        return (self.temporary,)

    def check_ours(self) -> None:
        """Raise OutputError where another job has replaced it."""
        if self.temporary.stat().st_ino != self.inode:
            raise taken(self.path)

    def discard(self) -> None:
        """Remove it; do nothing where it is gone or another job's."""
        with contextlib.suppress(OSError):
            if self.temporary.stat().st_ino == self.inode:
                for name in self.working_names:
                    delete(name)


def is_at(handle: int, path: Path) -> bool:
    """Return True if the open file `handle` is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
