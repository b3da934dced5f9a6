"""The queues of an in-order mesh (`in_order`): operations, the worker that empties them, and what ranks know of each
other through files that all have mapped.

An operation leaves its queue only once it is done: a collective needs all its members' workers to be at it, a batch
each message's other end. One that stands at a head while no rank says anything new for longer than the limit fails the
mesh on every rank: a rank that is slow, on a machine that others load, is no hang.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from tiledseg.comm.transports.work import Work
from tiledseg.errors import CommunicationError

_POLL_SECONDS = 2e-4
_ROW_BYTES = 2048


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
        self._said = self.counters("said", (size,))
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
        self._said[self.rank] += 1

    def said(self) -> int:
        """How often all ranks have said what they are at."""
        return int(self._said.sum())

    def fail(self) -> None:
        """Gives the mesh up, with what every rank is at; the first to say so is heard."""
        rows = [row.tobytes().rstrip(b"\0").decode() or "nothing" for row in self._words]
        own = self._folder / f"fault of rank {self.rank}, {threading.get_ident()}"
        own.write_text("; ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows)))
        with suppress(FileExistsError):
            os.link(own, self._folder / "fault")  # whole, and one alone: others may give up in the same moment
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
        # The last first: the peer may come to more while this looks, and it comes to the earlier ones first.
        met = [end for end in reversed(self._open) if end.others[0] >= end.number][::-1]
        self._open = [end for end in self._open if end not in met]
        for work in [end.start() for end in met]:  # all are started before one is waited for
            work.wait()
        return not self._open


class Device:
    """One rank's queues, and the workers that empty them. `limit`: seconds that an operation may stand at a head while
    no rank says anything new."""

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
        heads = [queue[0].words for queue in self._queues.values() if queue]
        if self._order is Order.QUEUE:
            heads = [operation.words for operation in self._posted[:1]]
        self.board.say(f"{', and '.join(heads) or 'nothing'} at the head, the host {self._host}")
