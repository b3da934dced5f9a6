"""The longest time without progress inside the steps of a run, from which follows when a later one stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST = 2
"""Steps that are not measured: memory is touched, connections are made, kernels are chosen."""
ENOUGH = 10
"""Steps after which the pace is known."""


class Pace:
    """Of one process. Pauses inside a step are not measured, and have no pace."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Another run begins."""
        self._steps = 0
        self._longest = 0.0
        self._inside = False
        self._last: float | None = None  # progress, while it is measured

    def begin(self) -> None:
        self._inside = True
        self._last = self._clock()

    def end(self) -> None:
        self.tick()
        self._steps += 1
        self._inside, self._last = False, None

    def pause(self) -> None:
        self.tick()
        self._last = None

    def go_on(self) -> None:
        if self._inside:
            self._last = self._clock()

    def tick(self) -> None:
        """Progress."""
        last = self._last
        if last is not None:
            self._last = now = self._clock()
            if self._steps >= FIRST and now - last > self._longest:
                self._longest = now - last

    def known(self) -> float | None:
        """The longest time, in seconds; None outside steps, in pauses, and before enough steps."""
        return self._longest if self._last is not None and self._steps >= ENOUGH else None
