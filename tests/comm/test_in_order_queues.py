"""The queues that stand for NCCL's: what is posted together starts in its order, whenever the peer comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from tests.comm.in_order_queues import Batch, End
from tiledseg.comm.transports.work import DoneWork, Work


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
