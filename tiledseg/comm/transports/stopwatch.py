"""A watch of a device's computing or waiting: by the clock on a CPU, by events on a GPU, whose work goes on when the
host has left it.

A span on a GPU begins when its stream comes to the first event, and ends when the stream comes to the second. A wait
for NCCL costs the host nothing, and is as long as the stream stands still. The host waits for no event until the
seconds are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_MOST_SPANS = 4096  # kept open; more, and the watch reads what it has, so that a long run holds no more events

CPU = torch.device("cpu")


class Clock(Protocol):
    """Marks moments of a device's work, in its order."""

    def mark(self) -> Any:
        """Return the moment at which the device has done all that it was given so far, without waiting."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time from one mark to a later one; wait until the device has come there."""


class HostClock:
    """The clock of a CPU, which has done what it was given."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class GpuClock:
    """The clock of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else HostClock()


class Stopwatch:
    """A sum of the time of all that runs under `running`; it waits for no device until `seconds` is asked for."""

    def __init__(self, device: torch.device = CPU, clock: Callable[[torch.device], Clock] = clock_of) -> None:
        self._device = device
        self._clock_of = clock
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[Clock, Any, Any]] = []

    @contextmanager
    def running(self, device: torch.device | None = None) -> Iterator[None]:
        """Measure what is started inside, on `device` where that is not the watch's own."""
        clock = self._clock_of(device or self._device)
        begin = clock.mark()
        yield
        self._spans.append((clock, begin, clock.mark()))
        if len(self._spans) >= _MOST_SPANS:
            self.seconds()

    def seconds(self) -> float:
        """Return the seconds so far. Waits for the device."""
        for clock, begin, end in reversed(self._spans):  # the last first: a device that is there has passed the others
            self._seconds += clock.seconds(begin, end)
        self._spans = []
        return self._seconds


def least(device: torch.device, call: Callable[[], object]) -> float:
    """Return seconds of the quickest of some calls."""
    watch, seconds = Stopwatch(device), []
    for _ in range(6):
        watch.reset()
        with watch.running():
            call()
        seconds.append(watch.seconds())
    return min(seconds[1:])
