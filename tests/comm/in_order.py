"""A mesh that records the operations of its ranks, and a check that NCCL's queues would run all of them.

The real mesh carries the bytes and promises more order than NCCL. NCCL runs a rank's operations in the order in which
its host has posted them. An operation ends once its peers are at it: all members at a sum or a broadcast, the other
rank of each message at a batch. Between communicators in flight together no order is promised (nccl#783), so a rank
may have operations of one communicator in flight. Objects and barriers are meetings of the hosts, over Gloo.

`standstill` replays the records of all ranks. It is stricter than NCCL: a host that waits posts nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tiledseg.comm.collectives import Communicator, Turns
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import Message, Work


@dataclass(frozen=True)
class Operation:
    """An operation of a rank: what the rank says once it has come to it, and what it must hear before it ends.
    `queue`: the name of its communicator; empty for a meeting of hosts."""

    words: str
    says: frozenset[tuple[Any, ...]]
    hears: frozenset[tuple[Any, ...]]
    queue: str = ""


@dataclass
class Record:
    """The operations that a rank's host has posted, in order. A number stands where the host waits for the operation at
    that place. `faults`: operations posted while another communicator had some in flight."""

    steps: list[Operation | int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    flying: dict[int, str] = field(default_factory=dict)

    def post(self, operation: Operation, finish: Callable[[], object]) -> Callable[[], None]:
        """Record an operation that is under way; return the function that waits for it."""
        place = len(self.steps)
        self.steps.append(operation)
        others = set(self.flying.values()) - {operation.queue}
        self.faults += [f"{operation.words} while {other} is in flight" for other in others]
        self.flying[place] = operation.queue

        def wait() -> None:
            self.wait(place)
            finish()

        return wait

    def wait(self, place: int) -> None:
        """Record that the host waits for an operation."""
        self.steps.append(place)
        self.flying.pop(place, None)


def standstill(records: Sequence[Record]) -> str | None:
    """Return what each rank is at if the queues come to a standstill; None if all operations end."""
    said: set[tuple[Any, ...]] = set()
    hosts = [deque(enumerate(record.steps)) for record in records]
    queues: list[deque[tuple[int, Operation]]] = [deque() for _ in records]
    ended: list[set[int]] = [set() for _ in records]

    def ends(operation: Operation) -> bool:
        said.update(operation.says)
        return operation.hears <= said

    moves, heard = True, 0
    while moves or heard < len(said):
        moves, heard = False, len(said)
        for host, queue, done in zip(hosts, queues, ended, strict=True):
            while host:
                place, step = host[0]
                if not (step in done if isinstance(step, int) else step.queue or ends(step)):
                    break
                moves = True
                host.popleft()
                if isinstance(step, Operation) and step.queue:
                    queue.append((place, step))
            while queue and ends(queue[0][1]):
                moves = True
                done.add(queue.popleft()[0])
    if not any(hosts) and not any(queues):
        return None
    heads = [(queue or host or [(0, "nothing")])[0][1] for host, queue in zip(hosts, queues, strict=True)]
    return "; ".join(f"rank {rank}: {getattr(head, 'words', head)}" for rank, head in enumerate(heads))


class RecordedCommunicator(Communicator):
    """The operations of `real`, over the ranks `members` of the job, recorded under a name."""

    def __init__(self, real: Communicator, record: Record, name: str, members: Sequence[int]) -> None:
        self.rank, self.size = real.rank, real.size
        self._real, self._record, self._name, self._members = real, record, f"{name} of {list(members)}", members
        self._count: Counter[Any] = Counter()

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        words = f"sum of {list(tensor.shape)}"
        return self._record.post(self._collective(words, self._name), self._real.all_reduce_sum(tensor).wait)

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        operation = self._collective("broadcast", self._name)
        self._record.post(operation, lambda: self._real.broadcast(flat, source))()

    def _broadcast_object(self, value: Any, source: int) -> Any:
        self._meet("broadcast of an object")
        return self._real.broadcast_object(value, source)

    def _gather(self, value: Any) -> list[Any]:
        self._meet("gathering of objects")
        return self._real.gather_objects(value)

    def _barrier(self) -> None:
        self._meet("barrier")
        self._real.barrier()

    def point_to_point(self) -> Any:
        self._meet("opening of messages")
        return super().point_to_point()

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        self._meet("split")
        self._count["split"] += 1
        part = self._real.split(groups)
        mine = next((group for group in groups if self.rank in group), ())
        name = f"part {self._count['split']}"
        return RecordedCommunicator(part, self._record, name, mine) if part.size > 1 else None

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        pairs = [(self.rank, peer, "send") for peer, _ in sends] + [(peer, self.rank, "get") for peer, _ in receives]
        says, hears = set(), set()
        for source, target, end in pairs:
            self._count[source, target, end] += 1
            number = self._count[source, target, end]
            says.add((self._name, source, target, end, number))
            hears.add((self._name, source, target, "get" if end == "send" else "send", number))
        words = " + ".join(f"{end} {source}-{target}" for source, target, end in pairs)
        operation = Operation(f"messages {words}", frozenset(says), frozenset(hears), f"messages, {self._name}")
        return self._record.post(operation, self._real.post(sends, receives))

    def _started(self, work: Work) -> Work:
        """Have `Turns` wait in the record alone: the real mesh could hang, without a word, where NCCL would."""
        if self.turns is not None:
            place = max(self._record.flying)
            self.turns.started(Work(lambda: self._record.wait(place)))
        return work

    def _end(self) -> None:
        if self.is_part:
            self._real.close()

    def _collective(self, words: str, queue: str = "") -> Operation:
        """Return the next operation of all members: of the queue, or a meeting of their hosts."""
        kind = "queue" if queue else "hosts"
        self._count[kind] += 1
        here = (self._name, kind, self._count[kind])
        everyone = frozenset((*here, rank) for rank in range(self.size))
        return Operation(f"{words} over {self._name}", frozenset([(*here, self.rank)]), everyone, queue)

    def _meet(self, words: str) -> None:
        self._record.steps.append(self._collective(words))


@contextmanager
def in_order(mesh: Mesh) -> Iterator[Mesh]:
    """Yield `mesh` with its communicators in turns, as those of NCCL; assert at the end that NCCL would run all
    operations of all ranks. Collective."""
    record = Record()
    communicator = RecordedCommunicator(mesh.communicator, record, "the job", range(mesh.size))
    communicator.turns = Turns()
    yield replace(mesh, communicator=communicator)
    records = mesh.communicator.gather_objects(replace(record, flying={}))
    assert not (faults := [fault for each in records for fault in each.faults]), faults[0]
    assert not (words := standstill(records)), f"the ranks wait for each other: {words}"
