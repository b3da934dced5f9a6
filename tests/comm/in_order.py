"""A mesh whose ranks communicate as NCCL's kernels do: in queues, each operation only when both sides have come to it.

It wraps a real mesh of Gloo or MPI, which carries the bytes. A rank posts sums, broadcasts and batches of messages to
queues; a worker takes the head of a queue and leaves it only once the operation is done: a collective needs all its
members' workers to be at it, a batch each message's other end. Nothing is handed to the real transport before that, so
that a mesh that hangs can be given up and the processes go on. Three strictnesses:

- `QUEUES`: a queue for each communicator, each with a worker of its own: communicators progress independently.
- `QUEUE`: one queue a rank, in the order in which its host has posted. CUDA promises no more than that.
- `ANY`: a queue for each communicator but one worker a rank, which takes the heads in whatever order suits it: the
  oldest at once, or, once the host waits, what it waits for, as a coin of each rank's own falls. No more is promised
  of several NCCL communicators in flight together (nccl#783).

Messages of a communicator have one queue, whoever has opened them, as they have one NCCL communicator. Objects and
barriers are the host's: they are Gloo's with NCCL too. Where this is not NCCL: `wait()` blocks the host, which NCCL
lets run ahead. What the host posts later then waits for the same operation, as on the stream; but objects do so too,
which is stricter than NCCL. All tensors go through the queues, those too that stay in host memory beside NCCL.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.comm.in_order_queues import Batch, Board, Collective, Device, End, Operation, Order
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import Communicator, SerialCommunicator, check_groups, check_source, sum_dtype
from tiledseg.comm.transports.point_to_point import Message, MessageMeter, PointToPoint, check_messages
from tiledseg.comm.transports.turns import TurnCommunicator
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.errors import CommunicationError

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class InOrderWork:
    """An operation under way."""

    device: Device
    operation: Operation

    def wait(self) -> None:
        self.device.wait(self.operation)


@dataclass(frozen=True)
class Carriers:
    """The real communicators over the same ranks: one that the workers use, and one for the hosts."""

    worker: Communicator
    host: Communicator

    def close(self) -> None:
        self.worker.close()
        self.host.close()


class InOrderCommunicator:
    """Collectives over the ranks `members` of the job through the queues of a device."""

    def __init__(
        self, device: Device, name: str, members: Sequence[int], carriers: Carriers, whole: Communicator | None = None
    ) -> None:
        self.rank, self.size = carriers.host.rank, carriers.host.size
        self._device, self._name, self._members, self._carriers = device, name, list(members), carriers
        self._whole = whole  # the real communicator of the job; None for a part
        self._reached = device.board.counters(f"{name}, {members[0]}, collectives", (self.size,))
        self._met = device.board.counters(f"{name}, {members[0]}, hosts", (self.size,))
        self._count: Counter[str] = Counter()

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        sum_dtype(tensor)
        if not tensor.numel():
            return DoneWork()
        return self._post("all-reduce", tensor, lambda: self._carriers.worker.all_reduce_sum(tensor).wait())

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        check_source(source, self.size)
        if tensor.numel():
            self._post("broadcast", tensor, lambda: self._carriers.worker.broadcast(tensor, source)).wait()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        check_source(source, self.size)
        self._meet("broadcast of an object")
        return self._carriers.host.broadcast_object(value, source)

    def gather_objects(self, value: Any) -> list[Any]:
        self._meet("gathering of objects")
        return self._carriers.host.gather_objects(value)

    def barrier(self) -> None:
        self._meet("barrier")

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        check_groups(groups, self.size)
        if self._whole is None:
            raise CommunicationError(f"a part of {self.size} ranks cannot be split: split the whole job's communicator")
        self._meet("split")
        self._count["part"] += 1
        carriers = Carriers(self._whole.split(groups), self._whole.split(groups))
        if carriers.host.size == 1:
            return SerialCommunicator()
        mine = next(group for group in groups if self.rank in group)
        return InOrderCommunicator(self._device, f"part {self._count['part']}", mine, carriers)

    def point_to_point(self) -> PointToPoint:
        if self._whole is None:
            raise CommunicationError("this mesh opens messages among all ranks only")
        self._meet("opening of messages")
        self._count["channel"] += 1
        return InOrderPointToPoint(self._device, self._count["channel"], self._whole.point_to_point())

    def close(self) -> None:
        self._device.drain()
        self._meet("close")
        if self._whole is None:
            self._carriers.close()

    def _post(self, kind: str, tensor: torch.Tensor, call: Callable[[], None]) -> Work:
        self._count["collective"] += 1
        number, dtype = self._count["collective"], str(tensor.dtype).removeprefix("torch.")
        words = f"{kind} {number} of {dtype}{list(tensor.shape)} over ranks {self._members} ({self._name})"
        operation = Collective(self._name, words, self._reached, self.rank, number, call)
        self._device.post(operation)
        return InOrderWork(self._device, operation)

    def _meet(self, what: str) -> None:
        self._device.meet(self._met, self.rank, f"is in a {what} of {self._name}")


class InOrderPointToPoint:
    """Messages among all ranks through one queue."""

    in_order = True

    def __init__(self, device: Device, channel: int, carrier: PointToPoint) -> None:
        board = device.board
        self.meter = MessageMeter()
        self._device, self._channel, self._carrier = device, channel, carrier
        # Of each sender and receiver: how many sends, and how many receives, have been come to.
        self._sent, self._received = (
            board.counters(f"channel {channel}, {what}", (board.size, board.size)) for what in ("sends", "receives")
        )
        self._count: Counter[tuple[int, int]] = Counter()

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        me, size = self._device.board.rank, self._device.board.size
        check_messages(sends, receives, me, size)
        sends = [message for message in sends if message.tensor.numel()]
        receives = [message for message in receives if message.tensor.numel()]
        if not sends and not receives:
            return DoneWork()
        ends = [self._end((message.peer, me), message, False) for message in receives]
        ends += [self._end((me, message.peer), message, True) for message in sends]
        words = [f"{list(tensor.shape)} to rank {peer}" for peer, tensor in sends]
        words += [f"{list(tensor.shape)} from rank {peer}" for peer, tensor in receives]
        operation = Batch("messages", f"messages {' + '.join(words)} (channel {self._channel})", ends)
        self._device.post(operation)
        self.meter.messages += len(sends)
        self.meter.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        return InOrderWork(self._device, operation)

    def close(self) -> None:
        self._device.drain()
        self._carrier.close()

    def _end(self, pair: tuple[int, int], message: Message, sends: bool) -> End:
        self._count[pair] += 1
        sent, received = (table[pair[0], pair[1] : pair[1] + 1] for table in (self._sent, self._received))
        lists = ([message], []) if sends else ([], [message])
        own, others = (sent, received) if sends else (received, sent)
        return End(own, others, self._count[pair], lambda: self._carrier.start(*lists))


@contextmanager
def in_order(mesh: Mesh, order: Order, turns: bool = False, limit: float = 60.0) -> Iterator[Mesh]:
    """`mesh` with its communication in queues; it stays as it is, and can be used again afterwards. Collective.

    `turns`: communicators take turns, as those of NCCL do (`tiledseg.comm.transports.turns`). `limit`: seconds without
    anything new from any rank after which an operation that stands at the head of a queue fails the mesh on every rank,
    with a line that says what each rank is at. All ranks on one node.
    """
    communicator = mesh.communicator
    if mesh.size == 1:
        yield mesh
        return
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    folder = Path(communicator.broadcast_object(tempfile.mkdtemp(dir=parent) if mesh.is_root else None))
    everyone = list(range(mesh.size))
    device = Device(Board(folder, mesh.rank, mesh.size), order, limit)
    carriers = Carriers(communicator.split([everyone]), communicator.split([everyone]))
    try:
        ordered = InOrderCommunicator(device, "whole", everyone, carriers, communicator)
        yield replace(mesh, communicator=TurnCommunicator(ordered) if turns else ordered)
    finally:
        device.close()
        communicator.barrier()
        carriers.close()
        if mesh.is_root:
            shutil.rmtree(folder)
