"""A mesh that records the operations of its ranks, and a check that NCCL's queues would run all of them.

The real mesh carries the bytes and promises more order than NCCL. NCCL runs a rank's operations in the order in which
its host has posted them. An operation ends once its peers are at it: all members at a sum or a broadcast, the other
rank of each message at a batch. Objects and barriers are meetings of the hosts, over Gloo.

`standstill` replays the records of all ranks. It is stricter than NCCL: meetings stand in the same queue.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tiledseg.comm.collectives import Communicator, Message
from tiledseg.comm.mesh import Mesh


class Operation(NamedTuple):
    """An operation of a rank: what the rank says once it has come to it, and what it must hear before it ends."""

    words: str
    says: set[tuple[Any, ...]]
    hears: set[tuple[Any, ...]]


def standstill(records: Sequence[Sequence[Operation]]) -> str | None:
    """Return what each rank is at if the queues come to a standstill; None if all operations end."""
    said: set[tuple[Any, ...]] = set()
    queues, moves = [deque(record) for record in records], True
    while moves:
        moves = False
        for queue in queues:
            said.update(queue[0].says if queue else ())
        for queue in queues:
            if queue and queue[0].hears <= said:
                queue.popleft()
                moves = True
    if not any(queues):
        return None
    return "; ".join(f"rank {rank}: {queue[0].words if queue else 'nothing'}" for rank, queue in enumerate(queues))


class RecordedCommunicator(Communicator):
    """The operations of `real`, over the ranks `members` of the job, recorded under a name."""

    def __init__(self, real: Communicator, record: list[Operation], name: str, members: Sequence[int]) -> None:
        self.rank, self.size = real.rank, real.size
        self._real, self._record, self._name = real, record, f"{name} of {list(members)}"
        self._count: Counter[Any] = Counter()

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        self._meet(f"sum of {list(tensor.shape)}")
        return self._real.all_reduce_sum(tensor).wait

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        self._meet("broadcast")
        self._real.broadcast(flat, source)

    def _broadcast_object(self, value: Any, source: int) -> Any:
        self._meet("broadcast of an object")
        return self._real.broadcast_object(value, source)

    def _gather(self, value: Any) -> list[Any]:
        self._meet("gathering of objects")
        return self._real.gather_objects(value)

    def _barrier(self) -> None:
        self._meet("barrier")
        self._real.barrier()

    def connect(self) -> None:
        self._meet("opening of messages")

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        self._meet("split")
        self._count["split"] += 1
        part = self._real.split(groups)
        mine = next((group for group in groups if self.rank in group), ())
        name = f"part {self._count['split']}"
        return RecordedCommunicator(part, self._record, name, mine) if part.size > 1 else None

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        pairs = [(self.rank, peer, "send") for peer, _ in sends] + [(peer, self.rank, "get") for peer, _ in receives]
        says, hears = set(), set()
        for source, target, end in pairs:
            self._count[source, target, end] += 1
            number = self._count[source, target, end]
            says.add((self._name, source, target, end, number))
            hears.add((self._name, source, target, "get" if end == "send" else "send", number))
        words = " + ".join(f"{end} {source}-{target}" for source, target, end in pairs)
        self._record.append(Operation(f"messages {words}", says, hears))
        return self._real.post(sends, receives)

    def _end(self) -> None:
        if self.is_part:
            self._real.close()

    def _meet(self, words: str) -> None:
        """Record the next operation of all members."""
        self._count["all"] += 1
        here = (self._name, self._count["all"], words)
        everyone = {(*here, rank) for rank in range(self.size)}
        self._record.append(Operation(f"{words} over {self._name}", {(*here, self.rank)}, everyone))


@contextmanager
def in_order(mesh: Mesh) -> Iterator[Mesh]:
    """Yield `mesh` with its operations recorded; assert at the end that NCCL would run all of all ranks. Collective."""
    record: list[Operation] = []
    recorded = RecordedCommunicator(mesh.communicator, record, "the job", range(mesh.size))
    yield Mesh(mesh.launch, recorded, mesh.device, mesh.transport, mesh.host, mesh.watch)
    words = standstill(mesh.communicator.gather_objects(record))
    assert not words, f"the ranks wait for each other: {words}"
