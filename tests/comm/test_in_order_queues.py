"""The queues that stand for NCCL's: what is posted together starts in its order, whenever the peer comes to it; a slow
rank is waited for, and a hang is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tests.comm.in_order_queues import Batch, Board, Device, End, Operation, Order
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.errors import CommunicationError


class ComesMeanwhile:
    """A peer's counter that is at the first value when it is read once, and at the second from then on."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = list(values)

    def __getitem__(self, _index: int) -> int:
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]


def test_two_messages_of_a_pair_start_in_order_where_the_peer_comes_to_both_between_two_looks() -> None:
    started: list[int] = []

    def end(number: int, others: ComesMeanwhile) -> End:
        def start() -> Work:
            started.append(number)
            return DoneWork()

        return End(np.zeros(1, np.int64), cast("np.ndarray", others), number, start)

    others = ComesMeanwhile([0, 2])
    batch = Batch("messages", "two messages", [end(1, others), end(2, others)])
    while not batch.advance():
        pass
    assert started == [1, 2]


@pytest.mark.parametrize("peer_speaks", [True, False])
def test_the_limit_is_of_silence(peer_speaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that takes far longer than the limit, while its peer says every now and then what it is at."""
    own, peer = (Board(tmp_path, rank, 2) for rank in range(2))
    now = 0.0
    monkeypatch.setattr("tests.comm.in_order_queues.time", Time(lambda: now))

    class Slow(Operation):
        looks = 0

        def reach(self) -> None:
            """Nothing to say."""

        def advance(self) -> bool:
            nonlocal now
            self.looks, now = self.looks + 1, now + 8.0
            if peer_speaks:
                peer.say(f"look {self.looks}")
            return self.looks > 9

    slow, device = Slow("whole", "a sum"), Device(own, Order.QUEUES, 10.0)
    if peer_speaks:
        device._run(slow)
        return
    peer.say("sleeps")
    with pytest.raises(CommunicationError, match="the ranks wait for each other: rank 0: nothing; rank 1: sleeps"):
        device._run(slow)
    assert slow.looks < 5


class Time:
    """The module's clock, which goes by what a test says; nobody sleeps."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic

    def sleep(self, _seconds: float) -> None:
        """Not here."""
