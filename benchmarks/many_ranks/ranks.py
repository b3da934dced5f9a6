"""Many ranks on one machine, as forks of this process: what is imported here is imported once, and lies in memory once.

Each rank finds the environment that torchrun gives, and one thread; nothing of a session is replaced. This process must
have no threads but its own. Linux.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

_GRACE_SECONDS = 15.0  # after the first failure, for the others to say what they saw
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: exit code and words of each. `peak_bytes`: most memory of all together, shared pages counted
    once; `sockets`: most that each rank had open; both looked at once a second."""

    codes: list[int]
    said: list[str]
    seconds: float
    peak_bytes: int
    sockets: list[int]


def import_all() -> None:
    """All of this library, with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import tiledseg

    for module in pkgutil.walk_packages(tiledseg.__path__, "tiledseg."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


def run_ranks(size: int, body: Callable[[], int], folder: Path, limit: float) -> Ended:
    """Calls `body` on `size` ranks, whose exit codes it returns. What they say goes to files in `folder`. After `limit`
    seconds, or soon after one has failed, those that are left are killed."""
    begun = time.monotonic()
    port = free_port()
    logs = [folder / f"rank-{rank}.txt" for rank in range(size)]
    gc.collect()
    gc.freeze()  # a search for garbage would write to shared pages
    ranks = [_fork(partial(_be_rank, rank, size, port, body, logs[rank])) for rank in range(size)]
    gc.unfreeze()
    watched = _Watched(ranks)
    try:
        codes = watched.wait(begun + limit)
    finally:
        watched.kill()
    seconds = time.monotonic() - begun
    said = [log.read_text(errors="replace") for log in logs]
    return Ended(codes, said, seconds, watched.peak_bytes, [watched.sockets[rank] for rank in ranks])


class _Watched:
    """Children until they end."""

    def __init__(self, children: list[int]) -> None:
        self._children = children
        self._left = {os.pidfd_open(child): child for child in children}
        self._codes: dict[int, int] = {}
        self.peak_bytes = 0
        self.sockets = dict.fromkeys(children, 0)

    def wait(self, end: float) -> list[int]:
        """Their exit codes, in order; negative where a signal ended one."""
        look = 0.0
        while self._left and time.monotonic() < end:
            for handle in select.select(list(self._left), [], [], _LOOK_SECONDS / 4)[0]:
                if self._reap(handle):
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > look:
                self._look()
                look = time.monotonic() + _LOOK_SECONDS
        self.kill()
        return [self._codes[child] for child in self._children]

    def kill(self) -> None:
        for handle, child in list(self._left.items()):
            os.kill(child, signal.SIGKILL)
            self._reap(handle)

    def _reap(self, handle: int) -> int:
        child = self._left.pop(handle)
        os.close(handle)
        self._codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return self._codes[child]

    def _look(self) -> None:
        left = list(self._left.values())
        self.peak_bytes = max(self.peak_bytes, sum(map(_own_bytes, [os.getpid(), *left])))
        for child in left:
            self.sockets[child] = max(self.sockets[child], _sockets(child))


def _fork(body: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        body()
    return child


def _be_rank(rank: int, size: int, port: int, body: Callable[[], int], log: Path) -> None:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(torchrun_variables(rank, size, size, port))
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def torchrun_variables(rank: int, size: int, per_node: int, port: int) -> dict[str, str]:
    """What torchrun sets, for ranks of one machine that say they are on nodes of `per_node` ranks each; but no store of
    its own: rank 0 keeps it."""
    on_node = min(per_node, size - rank // per_node * per_node)
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": on_node}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {name: str(value) for name, value in place.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _own_bytes(process: int) -> int:
    """A process's share of the memory, pages that n processes share counted as one n-th; 0 once it has ended."""
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
