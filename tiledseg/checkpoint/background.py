"""A copy of a run's tensors, and the thread that writes it while training goes on.

A thread, not a process: safetensors, the digests and the system's calls release the interpreter lock while they work, a
process would import torch and hold the tensors once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Snapshot:
    """Memory on the host for one copy of each tensor, by name, taken anew at each save: fresh memory would cost more
    time than the copy. A GPU's tensors go into pinned memory, all on their way together until `finish`."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `tensor` on the CPU; that of a GPU's tensor is whole after `finish`."""
        source = tensor.detach()
        held = self._held.get(name)
        if held is None or held.shape != source.shape or held.dtype != source.dtype:
            held = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._held[name] = held
        if source.is_cuda:
            self._devices.add(source.device)
        return held.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait until every copy is whole: then the tensors may change."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._devices.clear()


class Background:
    """A thread for one piece of work after the other, never two at once; an error is raised at the next call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Wait for the work before, raise its error if it failed, and start `work`."""
        self.wait()
        # A daemon: a process that must end at once does; what was begun has no name yet.
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last work if it has failed; do not wait."""
        if not self.is_busy(0.0):
            self.wait()

    def is_busy(self, seconds: float) -> bool:
        """Wait at most `seconds`; return True if the work still goes on."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is under way, and raise the error of the last work, once."""
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
