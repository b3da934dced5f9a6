"""Signals in training: a flag now, a checkpoint at the edge of the step."""

from __future__ import annotations

from contextlib import ExitStack

from tiledseg.signals import STOPPED, deferring, is_met

EXIT_CODE = STOPPED


class StopFlag:
    """Set by SIGUSR1, SIGUSR2 and SIGTERM from the beginning of its block on; no handler does more than set it."""

    @property
    def is_set(self) -> bool:
        return is_met()

    def __enter__(self) -> StopFlag:
        self._stack = ExitStack()
        self._stack.enter_context(deferring())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
