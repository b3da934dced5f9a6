"""A mesh whose ranks communicate as NCCL's kernels do: in queues, each operation only when both sides have come to it.

It wraps a real mesh of Gloo or MPI, which carries the bytes. A rank posts sums, broadcasts and batches of messages to
queues; a worker takes the head of a queue and leaves it only once the operation is done: a collective needs all its
members' workers to be at it, a batch each message's other end. Nothing is handed to the real transport before that, so
that a mesh that hangs can be given up and the processes go on. An operation that stands at a head while no rank says
anything new for longer than a limit fails the mesh on every rank: a slow rank, on a busy machine, is no hang.

- `QUEUE`: one queue a rank, in the order in which its host has posted. CUDA promises no more than that.
- `ANY`: a queue for each communicator but one worker a rank, which takes the heads in whatever order suits it: the
  oldest at once, or, once the host waits, the awaited one, as a coin of each rank's own falls. No more is promised of
  several NCCL communicators in flight together (nccl#783).

Messages have one queue. Objects and barriers are the host's: they are Gloo's with NCCL too. Where this is not NCCL:
`wait()` blocks the host, which NCCL lets run ahead. What the host posts later then waits for the same operation, as on
the stream; but objects do so too, which is stricter than NCCL.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiledseg.comm.collectives import Communicator, Turns
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import Message, PointToPoint, Work
from tiledseg.errors import CommunicationError

_POLL_SECONDS = 2e-4
_ROW_BYTES = 2048
_SHARED_MEMORY = Path("/dev/shm")


class Order(Enum):
    """How much progress is promised."""

    QUEUE = "one queue"
    ANY = "one at a time, in any order"


class Board:
    """The numbers and words that ranks of an in-order mesh share, in files that all have mapped."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._folder = folder
        self._words = self._mapped("words", np.uint8, (size, _ROW_BYTES))
        self._said = self.counters("said", (size,))
        self._failed = self.counters("failed", (1,))

    def counters(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Whole numbers that all ranks share, from 0."""
        return self._mapped(name, np.int64, shape)

    def say(self, words: str) -> None:
        """The operation that this rank is at."""
        row = np.zeros(_ROW_BYTES, np.uint8)
        text = words.encode()[:_ROW_BYTES]
        row[: len(text)] = np.frombuffer(text, np.uint8)
        self._words[self.rank] = row
        self._said[self.rank] += 1

    def said(self) -> int:
        """How often all ranks have said what they are at."""
        return int(self._said.sum())

    def fail(self) -> None:
        """Gives the mesh up, with what every rank is at; the first to say so is heard."""
        own = self._folder / f"fault of rank {self.rank}"
        own.write_text(str(self))
        with suppress(FileExistsError):
            os.link(own, self._folder / "fault")  # whole, and one alone: others may give up in the same moment
        self._failed[0] = 1

    def __str__(self) -> str:
        rows = [row.tobytes().rstrip(b"\0").decode() or "nothing" for row in self._words]
        return "; ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))

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


@dataclass(eq=False)
class End:
    """One of the meetings that an operation is made of: this rank says in `own` that it has come to the `number`-th;
    once `others` say so too, `start` hands it to the real transport."""

    own: np.ndarray
    others: np.ndarray
    number: int
    start: Callable[[], Work]


@dataclass(eq=False)
class Operation:
    """An entry of a queue, done when all its ends are. `reach` at the head of it, then `advance` until it is true."""

    queue: str
    words: str
    ends: list[End]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def reach(self) -> None:
        for end in self.ends:
            end.own[0] = max(int(end.own[0]), end.number)

    def advance(self) -> bool:
        """Does what can be done now; whether that was all."""
        # The last first: the peer may come to more while this looks, and it comes to the earlier ones first.
        met = [end for end in reversed(self.ends) if (np.asarray(end.others[:]) >= end.number).all()][::-1]
        self.ends = [end for end in self.ends if end not in met]
        for work in [end.start() for end in met]:  # all are started before one is waited for
            work.wait()
        return not self.ends


class Device:
    """One rank's queues, and the worker that empties them. `limit`: seconds that an operation may stand at a head while
    no rank says anything new."""

    def __init__(self, board: Board, order: Order, limit: float) -> None:
        self.board, self._order, self._limit = board, order, limit
        self._posted: list[Operation] = []  # of all queues, oldest first
        self._waited: Operation | None = None
        self._host = "computes"
        self._changed = threading.Condition()
        self._open = True
        self._coin = random.Random(board.rank)
        self._late = board.rank % 2 == 1
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def post(self, operation: Operation) -> Work:
        """Puts an operation at the end of its queue."""
        self.board.check()
        with self._changed:
            self._posted.append(operation)
            self._say()
            self._changed.notify_all()
        return Work(lambda: self.wait(operation))

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

    def close(self) -> str:
        """End the worker; what is still in the queues stays undone. Return where it stands if it does not end within
        the limit, else nothing."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._worker.join(self._limit)
        return f"the worker of rank {self.board.rank} has not ended: {self.board}" if self._worker.is_alive() else ""

    def _work(self) -> None:
        while (operation := self._await_next()) is not None:
            try:
                self.run(operation)
            except Exception as error:
                operation.error = error
            with self._changed:
                self._posted.remove(operation)
                self._say()
                self._late = self._coin.random() < 0.5
                operation.done.set()

    def _await_next(self) -> Operation | None:
        with self._changed:
            while self._open:
                if (operation := self._next()) is not None:
                    return operation
                self._changed.wait()
        return None

    def _next(self) -> Operation | None:
        """Return the operation to take up now: the oldest, or late, where any will do, the awaited queue's head."""
        if self._order is Order.QUEUE or not self._late or not self._posted:
            return next(iter(self._posted), None)
        if self._host == "computes":
            return None
        waited = self._waited or self._posted[0]
        return next((one for one in self._posted if one.queue == waited.queue), self._posted[0])

    def run(self, operation: Operation) -> None:
        """Carries an operation out that is at its head."""
        self.board.check()
        operation.reach()
        said, since = self.board.said(), time.monotonic()
        while not operation.advance():
            self.board.check()
            if not self._open:
                raise CommunicationError(f"the mesh was closed before {operation.words}")
            if (now := self.board.said()) != said:
                said, since = now, time.monotonic()
            elif time.monotonic() - since > self._limit:
                self.board.fail()
                self.board.check()
            time.sleep(_POLL_SECONDS)

    def _say(self) -> None:
        heads = {one.queue: one.words for one in reversed(self._posted)} if self._order is Order.ANY else {}
        heads = heads or {one.queue: one.words for one in self._posted[:1]}
        self.board.say(f"{', and '.join(heads.values()) or 'nothing'} at the head, the host {self._host}")


class InOrderCommunicator(Communicator):
    """Operations over the ranks `members` of the job through the queues of a device. `worker`, `host`: the real
    communicators over the same ranks, one for each of the two threads; `whole`: the job's, None for a part."""

    in_order = True

    def __init__(
        self,
        device: Device,
        name: str,
        members: Sequence[int],
        worker: Communicator,
        host: Communicator,
        whole: Communicator | None = None,
    ) -> None:
        self.rank, self.size = host.rank, host.size
        self._device, self._name, self._members = device, name, list(members)
        self._worker, self._hosts, self._whole = worker, host, whole
        self._reached = device.board.counters(f"{name}, {members[0]}, collectives", (self.size,))
        self._met = device.board.counters(f"{name}, {members[0]}, hosts", (self.size,))
        # Of each sender and receiver: how many sends, and how many receives, have been come to.
        self._sent, self._received = (
            device.board.counters(f"{name}, {members[0]}, {what}", (self.size, self.size)) for what in ("sends", "gets")
        )
        self._count: Counter[Any] = Counter()

    def point_to_point(self) -> PointToPoint:
        self._meet("opening of messages")
        return super().point_to_point()

    def _sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return self._queue("all-reduce", tensor, lambda: self._worker.all_reduce_sum(tensor)).wait

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        self._queue("broadcast", flat, lambda: Work(self._worker.broadcast(flat, source))).wait()

    def _broadcast_object(self, value: Any, source: int) -> Any:
        self._meet("broadcast of an object")
        return self._hosts.broadcast_object(value, source)

    def _gather(self, value: Any) -> list[Any]:
        self._meet("gathering of objects")
        return self._hosts.gather_objects(value)

    def _barrier(self) -> None:
        self._meet("barrier")

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        assert self._whole is not None
        self._meet("split")
        self._count["part"] += 1
        worker, host = (_connected(self._whole.split(groups)) for _ in range(2))
        if host.size == 1:
            return None
        mine = next(group for group in groups if self.rank in group)
        return InOrderCommunicator(self._device, f"part {self._count['part']}", mine, worker, host)

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        ends = [self._end_of((message.peer, self.rank), message, False) for message in receives]
        ends += [self._end_of((self.rank, message.peer), message, True) for message in sends]
        words = [f"{tensor.numel()} bytes to rank {peer}" for peer, tensor in sends]
        words += [f"{tensor.numel()} bytes from rank {peer}" for peer, tensor in receives]
        return self._device.post(Operation("messages", f"messages {' + '.join(words)}", ends)).wait

    def _end(self) -> None:
        self._device.drain()
        if self._whole is None:
            self._worker.close()
            self._hosts.close()

    def _queue(self, kind: str, tensor: torch.Tensor, start: Callable[[], Work]) -> Work:
        self._count["collective"] += 1
        number, dtype = self._count["collective"], str(tensor.dtype).removeprefix("torch.")
        words = f"{kind} {number} of {dtype}{list(tensor.shape)} over ranks {self._members} ({self._name})"
        end = End(self._reached[self.rank : self.rank + 1], self._reached, number, start)
        return self._device.post(Operation(self._name, words, [end]))

    def _end_of(self, pair: tuple[int, int], message: Message, sends: bool) -> End:
        self._count[pair] += 1
        sent, received = (table[pair[0], pair[1] : pair[1] + 1] for table in (self._sent, self._received))
        lists = ([message], []) if sends else ([], [message])
        own, others = (sent, received) if sends else (received, sent)
        return End(own, others, self._count[pair], lambda: Work(self._worker.post(*lists)))

    def _meet(self, what: str) -> None:
        self._device.meet(self._met, self.rank, f"is in a {what} of {self._name}")


def _connected(part: Communicator) -> Communicator:
    """Have each two ranks of a part speak once. Gloo connects them at their first words, and two threads of a rank that
    connect at once, each in a group of its own, have stood there."""
    peers = [peer for peer in range(part.size) if peer != part.rank]
    sends, receives = ([Message(peer, torch.zeros(1, dtype=torch.uint8)) for peer in peers] for _ in range(2))
    if peers:
        part.post(sends, receives)()
        part.barrier()
    return part


@contextmanager
def in_order(mesh: Mesh, order: Order, turns: bool = False, limit: float = 60.0) -> Iterator[Mesh]:
    """`mesh` with its communication in queues; it stays as it is, and can be used again afterwards. Collective.

    `turns`: communicators take turns, as those of NCCL do (`Turns`). `limit`: seconds without
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
    worker, host = (_connected(communicator.split([everyone])) for _ in range(2))
    try:
        ordered = InOrderCommunicator(device, "whole", everyone, worker, host, communicator)
        ordered.turns = Turns() if turns else None
        yield replace(mesh, communicator=ordered)
    finally:
        if stood := "; ".join(filter(None, communicator.gather_objects(device.close()))):
            raise CommunicationError(stood)
        worker.close()
        host.close()
        if mesh.is_root:
            shutil.rmtree(folder)
