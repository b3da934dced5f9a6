"""Collectives and messages over torch.distributed.

Gloo carries CPU tensors and Python objects, NCCL carries GPU tensors where asked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tiledseg.comm.transports.collectives import (
    Communicator,
    SerialCommunicator,
    check_groups,
    check_source,
    sum_dtype,
)
from tiledseg.comm.transports.point_to_point import Message, PointToPoint
from tiledseg.comm.transports.process_groups import ProcessGroups, new_groups, whole_job
from tiledseg.comm.transports.work import Work, as_bytes, copy_back, sum_work
from tiledseg.comm.watching.doing import waiting
from tiledseg.errors import CommunicationError, first_line

_TAGS = 2**30  # a Gloo tag is a whole number of 31 bits


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn torch's RuntimeError of a broken collective into CommunicationError with the first line of its message.

    Without the source file of torch's own that the line may begin with. Out of memory, which is a RuntimeError too,
    passes as itself: no peer has to do with it.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        reason = re.sub(r"^\[[^\]]*\]\s*|\. This is typically caused by.*$", "", first_line(error))
        raise CommunicationError(f"{what} failed, a peer may be lost: {reason}") from error


def _wait(works: Sequence[Any], what: str) -> None:
    with peer_errors(what):
        for work in works:
            work.wait()


class TorchCommunicator(Communicator):
    """All ranks of the process groups; the default group's, without NCCL, unless told otherwise.

    Messages of two ranks are matched in order: NCCL's by its own law, Gloo's by a running number in the tag. `is_part`:
    made by `split`. `is_guest`: of all ranks, in a job whose default group is the program's and stays.
    """

    def __init__(self, groups: ProcessGroups | None = None, is_part: bool = False, is_guest: bool = False) -> None:
        self._groups = groups or whole_job()
        self._is_part, self._is_guest = is_part, is_guest
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self.rank = self._groups.ranks.index(dist.get_rank())
        self.size = len(self._groups.ranks)

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Sum over the ranks. Gloo and NCCL reduce each piece on one rank and copy it to the others: equal bits."""
        staged = tensor.detach().to(sum_dtype(tensor)).contiguous()
        if tensor.numel() == 0:
            return Work()
        with peer_errors("all-reduce"):
            work = dist.all_reduce(staged, group=self._groups.carrier(tensor), async_op=True)
        return sum_work(lambda: _wait([work], "all-reduce"), staged, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        check_source(source, self.size)
        if tensor.numel() == 0:
            return
        staged = tensor.detach().contiguous()
        with waiting("a broadcast from rank %d of %d", source, self.size), peer_errors("broadcast"):
            dist.broadcast(as_bytes(staged), self._groups.ranks[source], self._groups.carrier(tensor))
        copy_back(staged, tensor)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Broadcast over Gloo, always."""
        check_source(source, self.size)
        box = [value if self.rank == source else None]
        with waiting("a broadcast from rank %d of %d", source, self.size), peer_errors("broadcast"):
            dist.broadcast_object_list(box, self._groups.ranks[source], self._groups.host)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather over Gloo, always."""
        values: list[Any] = [None] * self.size
        with waiting("a gather over %d ranks", self.size), peer_errors("gather"):
            dist.all_gather_object(values, value, group=self._groups.host)
        return self._groups.in_order(values)

    def barrier(self) -> None:
        """Sum nothing: a barrier of NCCL's would need a device to be chosen."""
        with waiting("a barrier of %d ranks", self.size), peer_errors("barrier"):
            dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=self._groups.host)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        check_groups(groups, self.size, self._is_part)
        communicator: Communicator = SerialCommunicator()
        for group in groups:
            if len(group) > 1:
                with waiting("a split of %d ranks", self.size), peer_errors("split"):
                    made = new_groups(group, self._groups.with_nccl)
                if made is not None:
                    communicator = TorchCommunicator(made, is_part=True)
        return communicator

    def reads(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_cuda or self._groups.with_nccl

    def point_to_point(self) -> PointToPoint:
        if self._groups.with_nccl:
            # The first operation of a group of NCCL connects its ranks, so all of them must take part in it.
            device = torch.device("cuda", torch.cuda.current_device())
            with peer_errors("opening of messages"):
                dist.all_reduce(torch.zeros(1, device=device), group=self._groups.gpu)
        return super().point_to_point()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        with peer_errors("exchange"):
            works = self._post_to_nccl(sends, receives)
            ranks, host = self._groups.ranks, self._groups.host
            for move, messages, count in (
                (dist.irecv, receives, self._received),
                (dist.isend, sends, self._sent),
            ):
                for peer, tensor in messages:
                    if not tensor.is_cuda:
                        count[peer] += 1
                        works.append(move(tensor, ranks[peer], host, count[peer] % _TAGS))
        return lambda: _wait(works, "exchange")

    def _post_to_nccl(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        """Post one batch, which NCCL starts as a whole, so that the order of its sends and receives cannot matter."""
        kinds = ((dist.irecv, receives), (dist.isend, sends))
        batch = [
            dist.P2POp(kind, tensor, self._groups.ranks[peer], self._groups.gpu)
            for kind, messages in kinds
            for peer, tensor in messages
            if tensor.is_cuda
        ]
        return list(dist.batch_isend_irecv(batch)) if batch else []

    def close(self) -> None:
        """Wait for all ranks, since rank 0 may hold the store that the others still talk to, and end the groups."""
        self.barrier()
        if self._is_part or self._is_guest:
            self._groups.destroy()
        else:
            dist.destroy_process_group()
