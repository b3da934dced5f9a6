"""Work that a thread does while the program goes on, one piece at a time; what stops it is raised by who asks next.

A thread, not a process: safetensors, the digests and the system's calls let go of the interpreter while they work, a
process would import torch and hold the tensors once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """One piece of work after the other, never two at once. Not for several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Starts `work` once the one before is done; raises what stopped that one, and starts nothing then."""
        self.wait()
        # A daemon: a process that must end at once does; what was begun has no name yet.
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what stopped the last piece of work, where it is done. It does not wait."""
        if not self.is_busy(0.0):
            self.wait()

    def is_busy(self, seconds: float) -> bool:
        """Whether the work still goes on after so many seconds, or less where it ends before."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns once nothing is under way; raises what stopped it, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
