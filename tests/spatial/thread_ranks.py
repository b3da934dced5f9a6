"""Ranks of one image as threads of one process: each operation waits for all of them, and fails where one is missing.

Stricter than any transport: a sum, or an exchange of messages, is done only when every rank is at its own n-th one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tiledseg.comm.collectives import SerialCommunicator, sum_dtype
from tiledseg.comm.mesh import Axes
from tiledseg.comm.point_to_point import Message, PointToPoint, Work
from tiledseg.geometry.sharing.decomposition import MeshPosition, MeshShape

Result = TypeVar("Result")
SECONDS = 100.0


class Meeting:
    """Where `size` ranks meet: each brings something, and sees what all have brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._brought: list[Any] = [None] * size

    def swap(self, rank: int, what: Any) -> list[Any]:
        self._brought[rank] = what
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found

    def give_up(self) -> None:
        self._barrier.abort()


class ThreadCommunicator(SerialCommunicator):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size  # type: ignore[misc]

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        sum_dtype(tensor)
        tensor.copy_(torch.stack(self._meeting.swap(self.rank, tensor.clone())).sum(0))
        return Work()


class ThreadMessages(PointToPoint):
    """What is sent and received must be as much, between the same two."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(SerialCommunicator())
        self._meeting, self._rank = meeting, rank

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        sent = self._meeting.swap(self._rank, {peer: tensor.clone() for peer, tensor in sends})
        assert {peer for peer, _ in receives} == {peer for peer, own in enumerate(sent) if self._rank in own}
        for peer, tensor in receives:
            tensor.copy_(sent[peer][self._rank])
        return Work()


def on_ranks(rows: int, cols: int, work: Callable[[Axes], Result]) -> list[Result]:
    """What `work` gives on each rank of an image; the first error of any."""
    shape = MeshShape(1, rows, cols)
    sums, messages = Meeting(rows * cols), Meeting(rows * cols)
    found: dict[int, Result] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        here = ThreadCommunicator(sums, rank)
        at = MeshPosition(0, *divmod(rank, cols))
        alone = SerialCommunicator()
        axes = Axes(shape, at, here, ThreadMessages(messages, rank), here, alone, alone.point_to_point())
        try:
            found[rank] = work(axes)
        except BaseException as error:
            errors.append(error)
            for meeting in (sums, messages):
                meeting.give_up()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(rows * cols)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in real or errors:
        raise error
    return [found[rank] for rank in range(rows * cols)]
