"""What a contestant trains, and how it answers: a line of JSON for each line on standard input, until `end`."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling, tiling_efficiency

BANDS, CLASSES, IGNORED = 4, 5, 255
END = "end\n"  # mpirun does not pass on that its standard input is closed
MEAN, STD = 100.0, 50.0  # of each band, as both sides take them


@dataclass(frozen=True)
class Job:
    """`module`: who trains. `tiles`: (rows, cols). `kept`: freed memory stays in the process, as the commands keep it.
    `ranks` and `halo` are ours."""

    module: str
    image: str
    labels: str
    side: int
    tiles: tuple[int, int]
    levels: int
    base_channels: int
    threads: int
    kept: bool
    channels_last: bool
    ranks: int = 1
    halo: str = "read"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))

    @property
    def network(self) -> UNet:
        return UNet(self.levels, base_channels=self.base_channels, classes=CLASSES)

    @property
    def tiling(self) -> Tiling:
        rows, cols = self.tiles
        return make_tiling((self.side,) * 2, (rows, cols), network_footprint(self.network.graph()))

    @property
    def efficiency(self) -> float:
        """Pixels computed over pixels owned."""
        return 1.0 if self.halo == "layer" else tiling_efficiency(self.tiling)


def measured(epoch: Callable[[], float]) -> dict[str, float]:
    """One epoch, which gives its loss: seconds, CPU seconds of this process and those that it started, the kernel's
    among them, and the peak of its memory."""
    begun, used = time.perf_counter(), _used()
    loss = epoch()
    seconds, (cpu, system) = time.perf_counter() - begun, (b - a for a, b in zip(used, _used(), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu_seconds": cpu, "kernel_seconds": system, "loss": loss, "memory_bytes": peak}


def together(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """What processes that worked at once have `measured`: all CPU seconds, the longest, the largest peak; one loss."""
    summed = {key: sum(one[key] for one in each) for key in ("cpu_seconds", "kernel_seconds")}
    largest = {key: max(one[key] for one in each) for key in ("seconds", "memory_bytes")}
    return {**summed, **largest, "loss": each[0]["loss"]}


def _used() -> tuple[float, float]:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    system = sum(part.ru_stime for part in parts)
    return sum(part.ru_utime for part in parts) + system, system
