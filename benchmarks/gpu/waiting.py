"""Where the host waits for the GPU: the way of the input, and the synchronisations of a production step, counted."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.part import Part, begin_part
from benchmarks.gpu.production import ProductionStep, finish, median_seconds
from tiledseg.architecture.unet import UNet
from tiledseg.execution.precision import make_deterministic, to_network_input


def main() -> int:
    part = begin_part(__file__)
    small = part.small or part.device.type == "cpu"
    side = 64 if small else 1440
    part.measure("input, pageable", "GB/s", lambda: pageable(side, part.device))
    part.measure("input, pinned", "GB/s", lambda: pinned(part, side))
    part.measure("input, pinned beside a kernel", "share hidden", lambda: hidden(part, side))
    unet = UNet(3, base_channels=4) if small else UNet(5, base_channels=64)
    dropped = UNet(unet.levels, base_channels=unet.base_channels, dropout=0.2)
    for name, network in (("step", unet), ("step with dropout", dropped)):
        part.measure(f"{name}: posting and all", "ms", partial(posting, network, side, part.device))
        part.measure(f"{name}: synchronisations", "count", partial(synchronisations, part, network, side))
    return int(part.failed)


def draw(side: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((4, side, side), dtype=np.float32)


def pageable(side: int, device: torch.device) -> float:
    """As the trainer sends a tile: from the array that the reader has made, channels last on arrival."""
    x_CHW = draw(side)
    return x_CHW.nbytes / median_seconds(lambda: to_network_input(x_CHW, device), device, 10) / 1e9


def pinned(part: Part, side: int) -> float:
    """The same bytes from pinned memory."""
    part.needs_gpu()
    x_CHW = draw(side)
    source = torch.from_numpy(x_CHW).pin_memory()

    def send() -> torch.Tensor:
        return source[None].to(part.device, non_blocking=True).contiguous(memory_format=torch.channels_last)

    return x_CHW.nbytes / median_seconds(send, part.device, 10) / 1e9


def hidden(part: Part, side: int) -> float:
    """The share of a pinned copy, on a stream of its own, that a matrix product hides."""
    part.needs_gpu()
    source, stream = torch.from_numpy(draw(side)).pin_memory(), torch.cuda.Stream()
    a = torch.randn(8192, 8192, device=part.device, dtype=torch.bfloat16)

    def send() -> None:
        with torch.cuda.stream(stream):
            source.to(part.device, non_blocking=True)

    def both() -> None:
        send()
        a @ a

    copy, product, together = (median_seconds(f, part.device, 10) for f in (send, lambda: a @ a, both))
    return (copy + product - together) / copy


def posting(unet: UNet, side: int, device: torch.device) -> dict[str, float]:
    """Milliseconds until `Stepper.run` returns, and until the device is done. Near each other: the host waits."""
    make_deterministic(True)
    step = ProductionStep(unet, side, "bf16", device)
    try:
        posted, done = [], []
        for _ in range(5):
            finish(device)
            begun = time.perf_counter()
            step.run()
            posted.append(time.perf_counter() - begun)
            finish(device)
            done.append(time.perf_counter() - begun)
    finally:
        step.close()
    return {"posted": 1e3 * sorted(posted)[2], "done": 1e3 * sorted(done)[2]}


def synchronisations(part: Part, unet: UNet, side: int) -> dict[str, Any]:
    """How often a step makes the host wait, by the line that does."""
    part.needs_gpu()
    make_deterministic(True)
    step = ProductionStep(unet, side, "bf16", part.device)
    try:
        step.run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        step.close()
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    return {"count": sum(places.values()), "places": dict(places)}


if __name__ == "__main__":
    sys.exit(main())
