"""One communicator at a time: what makes several communicators safe whose operations run in the order of their start.

An NCCL operation is a kernel that fills a part of the GPU until its peers have run theirs. Each communicator runs its
own in order, but no order is promised between two. CUDA may run operations in flight on both at once, or one after the
other in either order, differently on each GPU (nccl#783; `torch.distributed.new_group` asks to wait for one group's
work before another's is used). Two ranks that choose differently wait for each other forever.

So a rank never has work in flight on two communicators: before it starts an operation on another one than the last, it
waits for the last. On a GPU that holds up the stream, not the host. The operations of a rank are then one sequence, in
the order of its program, whatever the GPU does. Nothing can deadlock, because the sequences of all ranks follow one
common order (docs/explanation/communication.md says which). Operations of one communicator overlap each other's start
and the computation, as before: gradient sums with the backward pass where nothing else communicates in it, messages
between stages with what the stages compute.

`tests/law/test_steps.py` runs all of training on a transport that chooses as badly as a GPU may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiledseg.comm.transports.collectives import Communicator, SerialCommunicator
from tiledseg.comm.transports.point_to_point import Message, PointToPoint
from tiledseg.comm.transports.work import Work


class Turns:
    """The turn of this rank: its owner, and what the owner has in flight."""

    def __init__(self) -> None:
        self._owner: object = None
        self._flying: list[Work] = []

    def take(self, owner: object) -> None:
        """Wait, before `owner` starts something, for what another has in flight."""
        if owner is not self._owner:
            for work in self._flying:
                work.wait()
            self._owner, self._flying = owner, []

    def started(self, work: Work) -> Work:
        """Note what the owner has started, to be waited for by whoever comes first: it, or the next owner."""
        self._flying = [*(each for each in self._flying if not each.is_waited_for), work]
        return work


class TurnCommunicator(Communicator):
    """A communicator that takes turns with the others of its rank: its parts, and its messages.

    Objects and barriers travel between hosts and take no turn.
    """

    def __init__(self, communicator: Communicator, turns: Turns | None = None) -> None:
        self._communicator = communicator
        self._turns = turns or Turns()
        self._messages = object()  # the owner of a turn of messages
        self.rank, self.size = communicator.rank, communicator.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        self._turns.take(self)
        return self._turns.started(self._communicator.all_reduce_sum(tensor))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self._turns.take(self)
        self._communicator.broadcast(tensor, source)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self._communicator.broadcast_object(value, source)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._communicator.gather_objects(value)

    def barrier(self) -> None:
        self._communicator.barrier()

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return a part that takes turns with the whole."""
        self._turns.take(None)
        part = self._communicator.split(groups)
        return part if isinstance(part, SerialCommunicator) else TurnCommunicator(part, self._turns)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        self._turns.take(self._messages)
        return self._turns.started(Work(self._communicator.post(sends, receives))).wait

    def reads(self, tensor: torch.Tensor) -> bool:
        return self._communicator.reads(tensor)

    def point_to_point(self) -> PointToPoint:
        self._turns.take(None)
        self._communicator.point_to_point()
        return PointToPoint(self)

    def close(self) -> None:
        self._turns.take(None)
        self._communicator.close()
