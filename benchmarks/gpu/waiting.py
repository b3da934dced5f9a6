"""Where the host waits for the GPU: the way of the input, and the synchronisations of a production step, counted."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.part import Part, SkippedError, begin_part
from benchmarks.gpu.production import ProductionStep, drawn_sample, finish, median_seconds
from tiledseg.architecture.unet import UNet
from tiledseg.execution.carrying import labels, make_deterministic, network_input, sender
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.samples.dataset import Sample


def main() -> int:
    part = begin_part(__file__)
    small = part.small or part.device.type == "cpu"
    side = 64 if small else 1440
    part.measure("input as float32, pageable", "ms a tile", lambda: pageable(side, part.device))
    part.measure("input as stored, pinned", "ms a tile", lambda: as_stored(side, part.device))
    part.measure("input as stored beside a kernel", "share hidden", lambda: hidden(part, side))
    unet = UNet(3, base_channels=4) if small else UNet(5, base_channels=64)
    dropped, normed = (replace(unet, **more) for more in ({"dropout": 0.2}, {"norm": "batch"}))
    steps = ("step", unet, "read"), ("step with dropout", dropped, "read"), ("step of mode layer", normed, "layer")
    for name, network, mode in steps:
        part.measure(f"{name}: posting and all", "ms", partial(posting, network, side, part.device, mode))
        part.measure(f"{name}: synchronisations", "count", partial(synchronisations, part, network, side, mode))
    part.measure("GPU 0 beside a rank of GPU 1", "bytes", lambda: beside(part))
    return int(part.failed)


def drawn(side: int) -> Sample:
    """A tile of four bands of bytes."""
    tile = make_tiling((side, side), (1, 1), Footprint(1, 0, 0)).tiles[0]
    return drawn_sample(tile, 4, 5, np.random.default_rng(0))


def pageable(side: int, device: torch.device) -> dict[str, float]:
    """As it was before: normalised by the host beforehand, copied as float32 from pageable memory."""
    sample = drawn(side)
    x_CHW, y_HW = sample.x_CHW, sample.y_HW

    def bring() -> None:
        assert y_HW is not None, "it has been drawn"
        torch.from_numpy(x_CHW)[None].to(device).contiguous(memory_format=torch.channels_last)
        torch.from_numpy(y_HW).to(device)

    return {"ms": 1e3 * median_seconds(bring, device, 10), "bytes": x_CHW.nbytes + x_CHW[0].size}


def as_stored(side: int, device: torch.device) -> dict[str, float]:
    """As the trainer brings a tile: copied into pinned memory and sent by `sender`."""
    sample, send = drawn(side), sender(device)

    def bring() -> None:
        there = send(sample)
        network_input(there, device)
        labels(there, device)

    return {"ms": 1e3 * median_seconds(bring, device, 10), "bytes": sample.x_CHW.nbytes + sample.x_CHW[0].size}


def hidden(part: Part, side: int) -> float:
    """The share of a tile's way to the network that a matrix product hides, which was asked for first."""
    part.needs_gpu()
    sample, send = drawn(side), sender(part.device)
    a = torch.randn(8192, 8192, device=part.device, dtype=torch.bfloat16)

    def both() -> None:
        a @ a
        send(sample)

    copy, product, together = (median_seconds(f, part.device, 10) for f in (lambda: send(sample), lambda: a @ a, both))
    return (copy + product - together) / copy


def posting(unet: UNet, side: int, device: torch.device, mode: str) -> dict[str, float]:
    """Milliseconds until `Stepper.run` returns, and until the device is done. Near each other: the host waits."""
    make_deterministic(True)
    step = ProductionStep(unet, side, "bf16", device, spread=Spread(mode))
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


def synchronisations(part: Part, unet: UNet, side: int, mode: str) -> dict[str, Any]:
    """How often a step makes the host wait, by the line that does."""
    part.needs_gpu()
    make_deterministic(True)
    step = ProductionStep(unet, side, "bf16", part.device, spread=Spread(mode))
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
    places = Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    )
    return {"count": sum(places.values()), "places": dict(places)}


SENDS = """
import threading, torch
from benchmarks.gpu.waiting import drawn, sender
torch.cuda.set_device(1)
thread = threading.Thread(target=sender(torch.device("cuda", 1)), args=(drawn(64),))
thread.start(), thread.join(), torch.cuda.synchronize(1)
input("sent\\n")
"""


def beside(part: Part) -> int:
    """Bytes that a process takes of GPU 0 when its thread has sent a tile to GPU 1: about none, or 500 MB of a
    context that nobody wants."""
    part.needs_gpu()
    if torch.cuda.device_count() < 2:
        raise SkippedError("one GPU alone on this machine")
    free = torch.cuda.mem_get_info(0)[0]
    command, pipe = [sys.executable, "-c", SENDS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None, "it has been asked for"
        process.stdout.readline()
        taken = free - torch.cuda.mem_get_info(0)[0]
        process.communicate("\n", timeout=10)
    return taken


if __name__ == "__main__":
    sys.exit(main())
