"""Wall-time signals: a flag now, a checkpoint at the edge of the step."""

from __future__ import annotations

import signal
from types import FrameType

EXIT_CODE = 75  # "stopped early, checkpoint written": what a batch script requeues on
_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Set by SIGUSR1 (Slurm's --signal) or SIGUSR2 (LSF's -wa). A handler does no more than set it.

    Use as a context manager: the former handlers come back at its end.
    """

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> StopFlag:
        self._former = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
