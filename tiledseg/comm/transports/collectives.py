"""The operations that the ranks of a mesh do together, whatever carries them.

Every method is collective: every rank of the communicator calls it, in the same order, with tensors of the same shape
and dtype. Under that rule nothing can deadlock. Each call is one operation in which all ranks take part. No rank waits
for an answer to a message that another one has yet to decide on. Asynchronous calls start in the same order everywhere.
A rank that fails breaks the rule for all; `session` then ends the job.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiledseg.comm.transports.point_to_point import Carrier, Message, PointToPoint
from tiledseg.comm.transports.work import Work
from tiledseg.errors import CommunicationError

# Sums of 16-bit floats are taken in float32: a sum over 1000 ranks in bfloat16 would keep no digit, and the transports
# round at different places, so that results would depend on them.
_SUM_DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


class Communicator(Carrier):
    """Collective operations over all ranks of a mesh, and messages between two."""

    @abstractmethod
    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Start the in-place sum of `tensor` over all ranks; leave the tensor alone until `.wait()` returns.

        Any shape, strided or not, on the CPU or a GPU; float32, float64, int32, int64, and bfloat16 and float16, which
        are summed in float32 and rounded once. Afterwards every rank holds the same bits. The operation is its own
        adjoint. Raises CommunicationError for another dtype or a lost peer.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with that of rank `source`, bit for bit, any dtype; return when done."""

    @abstractmethod
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable `value` of rank `source`, on every rank; the values of the others are not used."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks in the order of ranks, on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the group of `groups` that this rank is in, whose ranks count in the group's
        order.

        Collective over all ranks, which pass the same groups: lists of ranks with no rank in two of them. A rank in no
        group, or alone in one, gets a SerialCommunicator. Only the communicator of the whole job can be split, as often
        as wanted; close the parts before the whole. Raises CommunicationError, before any communication, for groups
        that are not so.
        """

    def point_to_point(self) -> PointToPoint:
        """Return messages among the ranks of this communicator. Collective. All that are opened share its order."""
        return PointToPoint(self)

    @abstractmethod
    def close(self) -> None:
        """End the communicator; the last collective call of its ranks. That of a part leaves the whole as it is."""


class SerialCommunicator(Communicator):
    """One rank alone: every operation is the identity and no library is needed."""

    rank = 0
    size = 1

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Do nothing: the tensor is its own sum. Refuse the dtypes that the other communicators refuse."""
        sum_dtype(tensor)
        return Work()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        check_source(source, self.size)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        check_source(source, self.size)
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Return at once."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        check_groups(groups, self.size)
        return SerialCommunicator()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        raise AssertionError("one rank alone has no peer")

    def close(self) -> None:
        """Nothing to end."""


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed; raises CommunicationError where its dtype has no exact rule."""
    if tensor.dtype not in _SUM_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SUM_DTYPES)
        raise CommunicationError(f"cannot sum {str(tensor.dtype).removeprefix('torch.')} over ranks: use {allowed}")
    return _SUM_DTYPES[tensor.dtype]


def check_source(source: int, size: int) -> None:
    """Raise CommunicationError where no rank `source` exists."""
    if not 0 <= source < size:
        raise CommunicationError(f"no rank {source} among {size}: ranks count from 0")


def check_groups(groups: Sequence[Sequence[int]], size: int, is_part: bool = False) -> None:
    """Raise CommunicationError where `groups` are not disjoint, non-empty lists of ranks from 0 to `size` - 1, or are
    to be made of a part: torch's groups are made by all ranks of the job, the same law for every transport."""
    if is_part:
        raise CommunicationError(f"a part of {size} ranks cannot be split: split the whole job's communicator")
    seen: set[int] = set()
    for number, group in enumerate(groups):
        if not group:
            raise CommunicationError(f"group {number} of {len(groups)} has no rank: leave it out")
        for rank in group:
            check_source(rank, size)
            if rank in seen:
                raise CommunicationError(f"rank {rank} stands twice in the groups {list(map(list, groups))}")
            seen.add(rank)
