"""A stopwatch of a device that lags behind the host, by a fake one; and of the CPU by the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from tiledseg.comm.transports import stopwatch as module
from tiledseg.comm.transports.point_to_point import ExchangeWork, MessageMeter
from tiledseg.comm.transports.stopwatch import Stopwatch

GPU = torch.device("cuda", 0)


@dataclass
class LaggingDevice:
    """A stream of work: a mark is where it stands in the stream; nobody knows when before the device was waited for."""

    given: float = 0.0
    done: float = 0.0
    waits: int = 0
    marks: list[float] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        """Given by the host, which goes on at once."""
        self.given += seconds

    def mark(self) -> float:
        self.marks.append(self.given)
        return self.given

    def seconds(self, begin: float, end: float) -> float:
        if self.done < end:
            self.waits, self.done = self.waits + 1, self.given
        return end - begin


def test_the_devices_time_counts_not_the_hosts() -> None:
    """One wait, when the seconds are asked for: bubbles were negative since the host left before the GPU was done."""
    device = LaggingDevice()
    whole, busy = (Stopwatch(GPU, lambda _: device) for _ in range(2))
    with whole.running():
        for _ in range(3):
            with busy.running():
                device.work(5.0)
            device.work(1.0)  # waits for a message
    assert device.waits == 0
    assert (whole.seconds(), busy.seconds()) == (18.0, 15.0)
    assert device.waits == 1
    busy.reset()
    assert busy.seconds() == 0.0


def test_spans_are_read_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SPANS", 4)
    device = LaggingDevice()
    watch = Stopwatch(GPU, lambda _: device)
    for _ in range(9):
        with watch.running():
            device.work(1.0)
    assert device.waits == 2
    assert watch.seconds() == 9.0


def test_a_wait_of_the_gpu_is_counted_where_the_host_does_not_wait() -> None:
    """As over NCCL: `finish` only gives the stream something to wait for."""
    device = LaggingDevice()
    meter = MessageMeter(waits=Stopwatch(GPU, lambda _: device))
    exchange = ExchangeWork(lambda: device.work(0.25), [], [], meter)
    exchange.wait()
    exchange.wait()
    assert device.waits == 0
    assert meter.seconds == 0.25
    meter.reset()
    assert meter.seconds == 0.0


def test_on_the_cpu_the_clock_counts() -> None:
    watch = Stopwatch()
    begun = time.perf_counter()
    with watch.running():
        time.sleep(0.02)
    assert 0.02 <= watch.seconds() <= time.perf_counter() - begun
