"""What moving has cost: counted while it runs, read by whoever wants to know."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tiledseg.records import dataclass


@dataclass
class Figures:
    """`bytes_out`, `bytes_in`: copied, or begun to be; `waited_seconds`: in which the step stood still for a copy;
    `peak_bytes`: the most that autograd alone held in memory, the window's bytes among it; `demanded`: storages that
    were wanted before anybody had begun to bring them; `expected`: those that were on their way, or there;
    `steps`, `known_steps`: begun, and those that went on as an earlier one."""

    bytes_out: int = 0
    bytes_in: int = 0
    waited_seconds: float = 0.0
    peak_bytes: int = 0
    demanded: int = 0
    expected: int = 0
    steps: int = 0
    known_steps: int = 0

    def clear(self) -> None:
        """Count from nothing again."""
        self.__init__()  # type: ignore[misc]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - begun
