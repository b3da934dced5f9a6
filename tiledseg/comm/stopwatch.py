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
from typing import Any

import torch

from tiledseg.memory.device import CPU, api, is_gpu

_MOST_SPANS = 4096  # kept open; more, and the watch reads what it has, so that a long run holds no more events

Mark = Any  # seconds of the clock, or an event of a GPU


def mark(device: torch.device) -> Mark:
    """Return the moment at which the device has done all that it was given so far, without waiting."""
    if not is_gpu(device):
        return time.perf_counter()
    return api(device).current_stream(device).record_event(api(device).Event(enable_timing=True))


def between(begin: Mark, end: Mark) -> float:
    """Return the seconds from one mark to a later one; wait until the device has come there."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class Stopwatch:
    """A sum of the time of all that runs under `running`; it waits for no device until `seconds` is asked for."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[Mark, Mark]] = []

    @contextmanager
    def running(self, device: torch.device | None = None) -> Iterator[None]:
        """Measure what is started inside, on `device` where that is not the watch's own."""
        begin = mark(device or self._device)
        yield
        self._spans.append((begin, mark(device or self._device)))
        if len(self._spans) >= _MOST_SPANS:
            self.seconds()

    def seconds(self) -> float:
        """Return the seconds so far. Waits for the device."""
        for begin, end in reversed(self._spans):  # the last first: a device that is there has passed the others
            self._seconds += between(begin, end)
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
