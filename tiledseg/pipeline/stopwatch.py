"""How long a rank computes: by the clock on a CPU; by events on a GPU, whose work goes on when the host has left it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time of all that runs under `running`; no synchronisation until `seconds` is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Counts from zero again."""
        self._seconds = 0.0
        self._events = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures what is started inside."""
        if self._device.type != "cuda":
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        yield
        end.record(stream)
        self._events.append((begin, end))

    def seconds(self) -> float:
        """So far. Waits for the GPU."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
            self._events = []
        return self._seconds
