"""Ranks of one image as threads of one process: a sum waits for all of them, a receive for its message, and both fail
where it does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from tiledseg.comm.collectives import Communicator, Message, Work, sum_dtype
from tiledseg.comm.mesh import Axes
from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.geometry.sharing.decomposition import MeshPosition, MeshShape

Result = TypeVar("Result")
SECONDS = 20.0


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


class ThreadCommunicator(Communicator):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size  # type: ignore[misc]

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        sum_dtype(tensor)
        tensor.copy_(torch.stack(self._meeting.swap(self.rank, tensor.clone())).sum(0))
        return Work()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        tensor.copy_(self._meeting.swap(self.rank, tensor.clone())[source])


class ThreadMessages(PointToPoint):
    """Each message lies in the box of its two ranks until it is received."""

    def __init__(self, boxes: dict[tuple[int, int], SimpleQueue[torch.Tensor]], rank: int) -> None:
        super().__init__(Communicator())
        self._boxes, self._rank = boxes, rank

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        for peer, tensor in sends:
            self._boxes[self._rank, peer].put(tensor.clone())
        come = [(tensor, self._boxes[peer, self._rank].get(timeout=SECONDS)) for peer, tensor in receives]

        def finish() -> None:
            for tensor, sent in come:
                assert sent.shape == tensor.shape
                tensor.copy_(sent)

        return Work(finish)  # what is read before the wait is not there yet


def on_ranks(rows: int, cols: int, work: Callable[[Axes], Result]) -> list[Result]:
    """What `work` gives on each rank of an image; the first error of any."""
    shape = MeshShape(1, rows, cols)
    sums, every = Meeting(rows * cols), range(rows * cols)
    boxes: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {each: SimpleQueue() for each in product(every, every)}
    found: dict[int, Result] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        here = ThreadCommunicator(sums, rank)
        at = MeshPosition(0, *divmod(rank, cols))
        alone = Communicator()
        axes = Axes(shape, at, here, ThreadMessages(boxes, rank), here, alone, PointToPoint(alone))
        try:
            found[rank] = work(axes)
        except BaseException as error:
            errors.append(error)
            sums.give_up()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError | Empty)]
    for error in real or errors:
        raise error
    assert all(box.empty() for box in boxes.values()), "a message that nobody has received"
    return [found[rank] for rank in every]
