"""The ranks of a job as forks of this process, as in `many_ranks`, whose words come through pipes: cases limit files.

They find each other as under torchrun, each a process with its own exit code and output. Nobody ends the others when
one fails, as under srun by itself: they have to notice, within `grace` seconds.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.many_ranks.ranks import free_port, torchrun_variables
from tests.fuzz.process import Outcome, fork


def run_ranks(
    body: Callable[[], int], ranks: int, folder: Path, limit: float, per_node: int = 0, grace: float = 10.0
) -> list[Outcome]:
    """Calls `body` in `folder` on so many ranks; how each ended. `per_node`: of how many ranks each says that they
    share its node (all). `hung`: a rank was still there after `limit` seconds, or `grace` seconds after one had failed,
    and was killed.

    The parent must have no threads, and must not have opened a process group.
    """
    port, begun = free_port(), time.monotonic()
    jobs = [
        _Rank(body, folder, torchrun_variables(rank, ranks, per_node or ranks, port), begun) for rank in range(ranks)
    ]
    end, left = begun + limit, set(jobs)
    with selectors.DefaultSelector() as ready:
        for job in jobs:
            for file in (job.handle, *job.outputs):
                ready.register(file, selectors.EVENT_READ, job)
        while left:
            events = ready.select(max(0.0, end - time.monotonic()) if end else None)
            if not events:
                for job in left:
                    job.kill()
                end = 0.0
            for key, _ in events:
                job = key.data
                if key.fd != job.handle:
                    over = not job.read(key.fd)
                else:
                    left.remove(job)
                    over = True
                    if job.end() != 0:
                        end = min(end, time.monotonic() + grace)
                if over:
                    ready.unregister(key.fd)
    return [job.outcome() for job in jobs]


class _Rank:
    """One rank: its process, and what it has said so far."""

    def __init__(self, body: Callable[[], int], folder: Path, variables: dict[str, str], begun: float) -> None:
        self._begun, self._seconds, self._code, self._hung = begun, 0.0, 0, False
        self._child, self.outputs = fork(body, folder, variables=variables)
        self.handle = os.pidfd_open(self._child)
        self._said = dict.fromkeys(self.outputs, b"")

    def read(self, output: int) -> int:
        """Bytes that were read; none at the end."""
        piece = os.read(output, 1 << 16)
        self._said[output] += piece
        return len(piece)

    def kill(self) -> None:
        self._hung = True
        os.killpg(self._child, signal.SIGKILL)

    def end(self) -> int:
        """The exit code of the process, which has ended."""
        self._code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._seconds = time.monotonic() - self._begun
        return self._code

    def outcome(self) -> Outcome:
        for output in self.outputs:
            while self.read(output):
                pass
        for file in (self.handle, *self.outputs):
            os.close(file)
        out, err = (self._said[output].decode(errors="replace") for output in self.outputs)
        return Outcome(self._code, out, err, self._seconds, self._hung)
