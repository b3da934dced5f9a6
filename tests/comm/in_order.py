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

import random
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiledseg.comm.collectives import Communicator, SerialCommunicator, check_groups, check_source, sum_dtype
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import Message, MessageMeter, PointToPoint, check_messages
from tiledseg.comm.turns import TurnCommunicator
from tiledseg.comm.work import DoneWork, Work
from tiledseg.errors import CommunicationError

_POLL_SECONDS = 2e-4
_ROW_BYTES = 2048
_SHARED_MEMORY = Path("/dev/shm")


class Order(Enum):
    """How much progress is promised."""

    QUEUES = "a queue a communicator"
    QUEUE = "one queue"
    ANY = "one at a time, in any order"


class Board:
    """What the ranks of an in-order mesh know of each other: numbers and words in files that all have mapped."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._folder = folder
        self._words = self._mapped("words", np.uint8, (size, _ROW_BYTES))
        self._failed = self.counters("failed", (1,))

    def counters(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Whole numbers that all ranks share, from 0."""
        return self._mapped(name, np.int64, shape)

    def say(self, words: str) -> None:
        """What this rank is at."""
        row = np.zeros(_ROW_BYTES, np.uint8)
        text = words.encode()[:_ROW_BYTES]
        row[: len(text)] = np.frombuffer(text, np.uint8)
        self._words[self.rank] = row

    def fail(self) -> None:
        """Gives the mesh up, with what every rank is at; the first to say so is heard."""
        rows = [row.tobytes().rstrip(b"\0").decode() or "nothing" for row in self._words]
        path = self._folder / "fault"
        if not path.exists():
            path.write_text("; ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows)))
        self._failed[0] = 1

    def check(self) -> None:
        """Raises CommunicationError where the mesh was given up."""
        if self._failed[0]:
            raise CommunicationError(f"the ranks wait for each other: {(self._folder / 'fault').read_text()}")

    def _mapped(self, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        path = self._folder / name
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with path.open("ab") as file:
            file.truncate(size)  # zeros, whichever rank comes first
        return np.memmap(path, dtype, "r+", shape=shape)


class Operation:
    """What stands in a queue. Call `reach` once it is at the head, then `advance` until it is true."""

    def __init__(self, queue: str, words: str) -> None:
        self.queue, self.words = queue, words
        self.done = threading.Event()
        self.error: Exception | None = None

    def reach(self) -> None:
        raise NotImplementedError

    def advance(self) -> bool:
        """Does what can be done now; whether that was all."""
        raise NotImplementedError


class Collective(Operation):
    """The `number`-th collective of a communicator."""

    def __init__(
        self, queue: str, words: str, reached: np.ndarray, place: int, number: int, call: Callable[[], None]
    ) -> None:
        super().__init__(queue, words)
        self._reached, self._place, self._number, self._call = reached, place, number, call

    def reach(self) -> None:
        self._reached[self._place] = self._number

    def advance(self) -> bool:
        if (self._reached < self._number).any():
            return False
        self._call()
        return True


@dataclass(frozen=True, eq=False)
class End:
    """One end of a message: where this rank says that it has come to it, where the peer does, and the real start."""

    own: np.ndarray
    others: np.ndarray
    number: int
    start: Callable[[], Work]


class Batch(Operation):
    """Messages that are posted together: done when each of them is."""

    def __init__(self, queue: str, words: str, ends: Sequence[End]) -> None:
        super().__init__(queue, words)
        self._open = list(ends)

    def reach(self) -> None:
        for end in self._open:
            end.own[0] = max(int(end.own[0]), end.number)

    def advance(self) -> bool:
        met = [end for end in self._open if end.others[0] >= end.number]
        self._open = [end for end in self._open if end not in met]
        for work in [end.start() for end in met]:  # all are started before one is waited for
            work.wait()
        return not self._open


class Device:
    """One rank's queues, and the workers that empty them. `limit`: seconds that an operation may stand at a head."""

    def __init__(self, board: Board, order: Order, limit: float) -> None:
        self.board = board
        self._order = order
        self._limit = limit
        self._queues: dict[str, deque[Operation]] = {}
        self._posted: list[Operation] = []  # of all queues, oldest first
        self._waited: Operation | None = None
        self._host = "computes"
        self._changed = threading.Condition()
        self._open = True
        self._workers: list[threading.Thread] = []
        self._coin = random.Random(board.rank)
        self._late = board.rank % 2 == 1
        if order is not Order.QUEUES:
            self._employ(None)

    def post(self, operation: Operation) -> None:
        """Puts an operation at the end of its queue."""
        self.board.check()
        with self._changed:
            if operation.queue not in self._queues:
                self._queues[operation.queue] = deque()
                if self._order is Order.QUEUES:
                    self._employ(operation.queue)
            self._queues[operation.queue].append(operation)
            self._posted.append(operation)
            self._say()
            self._changed.notify_all()

    def wait(self, operation: Operation) -> None:
        """Returns once it is done; CommunicationError where the mesh was given up."""
        with self._hosting(f"waits for {operation.words}", operation):
            while not operation.done.wait(0.05):
                self.board.check()
        if operation.error is not None:
            raise operation.error

    @contextmanager
    def _hosting(self, words: str, operation: Operation | None = None) -> Iterator[None]:
        """While the host waits."""
        with self._changed:
            self._waited, self._host = operation, words
            self._say()
            self._changed.notify_all()
        yield
        with self._changed:
            self._waited, self._host = None, "computes"
            self._say()

    def meet(self, reached: np.ndarray, place: int, words: str) -> None:
        """A meeting of the hosts of some ranks; returns once all have come."""
        self.board.check()
        reached[place] += 1
        number = int(reached[place])
        with self._hosting(words):
            while (reached < number).any():
                self.board.check()
                time.sleep(_POLL_SECONDS)

    def drain(self) -> None:
        """Returns once the queues are empty."""
        for operation in list(self._posted):
            self.wait(operation)

    def close(self) -> None:
        """Ends the workers; what is still in the queues stays undone."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()

    def _employ(self, queue: str | None) -> None:
        self._workers.append(threading.Thread(target=self._work, args=(queue,), daemon=True))
        self._workers[-1].start()

    def _work(self, queue: str | None) -> None:
        while (operation := self._await_next(queue)) is not None:
            try:
                self._run(operation)
            except Exception as error:
                operation.error = error
            with self._changed:
                self._queues[operation.queue].remove(operation)
                self._posted.remove(operation)
                self._say()
                self._late = self._coin.random() < 0.5
                operation.done.set()

    def _await_next(self, queue: str | None) -> Operation | None:
        with self._changed:
            while self._open:
                operation = self._next(queue)
                if operation is not None:
                    return operation
                self._changed.wait()
        return None

    def _next(self, queue: str | None) -> Operation | None:
        """What a worker takes up now."""
        if queue is not None:
            return self._queues[queue][0] if self._queues[queue] else None
        if not self._posted:
            return None
        if self._order is Order.ANY and self._late:
            if self._host == "computes":
                return None
            wanted = self._queues[self._waited.queue] if self._waited else None
            return wanted[0] if wanted else self._posted[0]
        return self._posted[0]

    def _run(self, operation: Operation) -> None:
        self.board.check()
        operation.reach()
        begun = time.monotonic()
        while not operation.advance():
            self.board.check()
            if not self._open:
                raise CommunicationError(f"the mesh was closed before {operation.words}")
            if time.monotonic() - begun > self._limit:
                self.board.fail()
            time.sleep(_POLL_SECONDS)

    def _say(self) -> None:
        heads = [queue[0].words for queue in self._queues.values() if queue]
        if self._order is Order.QUEUE:
            heads = [operation.words for operation in self._posted[:1]]
        self.board.say(f"{', and '.join(heads) or 'nothing'} at the head, the host {self._host}")


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
def in_order(mesh: Mesh, order: Order, turns: bool = False, limit: float = 30.0) -> Iterator[Mesh]:
    """`mesh` with its communication in queues; it stays as it is, and can be used again afterwards. Collective.

    `turns`: communicators take turns, as those of NCCL do (`tiledseg.comm.turns`). `limit`: seconds after which an
    operation that stands at the head of a queue fails the mesh on every rank, with a line that says what each rank is
    at. All ranks on one node.
    """
    communicator = mesh.communicator
    if mesh.size == 1:
        yield mesh
        return
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
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
