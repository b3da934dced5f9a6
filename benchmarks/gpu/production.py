"""The step that `train` runs, with the image in memory: the trainer's own passes, reducer and optimizer."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import OptimizerConfig
from tiledseg.execution.carrying import sender
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tile, make_tiling
from tiledseg.models.network import build_modules
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization, Normalizer
from tiledseg.training.objective import Objective, PixelTerm
from tiledseg.training.optimizer import build_optimizer
from tiledseg.training.step import Stepper

IGNORED = 255


class ProductionStep:
    """One rank, one image of `size` x `size` pixels, one tile. The image is drawn; nothing is read from a disk."""

    def __init__(
        self,
        unet: UNet,
        size: int,
        precision: str,
        device: torch.device,
        compiles: bool = False,
        spread: Spread | None = None,
    ) -> None:
        mesh = Mesh(SERIAL, Communicator(), device, "serial", platform.node())
        tiling = make_tiling((size, size), (1, 1), network_footprint(unet.graph()))
        network = build_modules(unet, seed=0)
        parallel = ParallelRun(spread or Spread(), network, mesh, precision, compiles=compiles)
        passes = parallel.over([tiling])
        self._parts = passes.mode.share([TileReference(0, 0)])
        draw = np.random.default_rng(1)
        self.sample = drawn_sample(tiling.tiles[0], unet.bands, unet.classes, draw)
        self._send = sender(device)
        optimizer = build_optimizer(network.parameters(), OptimizerConfig())
        self._stepper = Stepper(optimizer, mesh, passes, parallel.axes, Objective((PixelTerm(IGNORED),)), 0)

    def run_ahead(self, steps: int) -> None:
        """So many optimizer steps, the next input on its way while one is computed, as the trainer reads ahead."""
        parts = self._parts
        samples = prefetch([self.sample] * steps, self._send, threads=1, depth=2)
        for step in range(steps):
            self._stepper.run(step, samples, parts, stop=False)

    def run(self) -> None:
        """One optimizer step, its input sent as the trainer's threads send it."""
        self._stepper.run(0, iter([self._send(self.sample)]), self._parts, stop=False)

    def close(self) -> None:
        self._stepper.close()


def drawn_sample(tile: Tile, bands: int, classes: int, draw: np.random.Generator) -> Sample:
    """Bytes, as most rasters hold, with classes, all of them valid."""
    shape = tile.context.shape
    pixels_CHW = draw.integers(0, 256, (bands, *shape), dtype=np.uint8)
    y_HW = draw.integers(0, classes, tile.core.shape, dtype=np.uint8)
    normalize = Normalizer(Normalization((127.5,) * bands, (73.9,) * bands), "uint8", "float32")
    x_CHW = normalize(pixels_CHW, np.ones(shape, dtype=bool))
    return Sample(0, tile, x_CHW, y_HW, np.ones(tile.core.shape, dtype=bool))


def step_flop(unet: UNet, size: int) -> int:
    """Floating-point operations of a step by the planner's count: 2 a multiply-add, backward twice the forward."""
    return 6 * sum(cost.multiply_adds for cost in tile_walk(unet.graph(), unet.bands, (size, size)).costs)


def median_seconds(function: Callable[[], object], device: torch.device, repeats: int, warm: int = 2) -> float:
    """Median seconds of a call, the device's work included, after `warm` calls that are not counted."""
    times = []
    for i in range(warm + repeats):
        finish(device)
        begun = time.perf_counter()
        function()
        finish(device)
        if i >= warm:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def finish(device: torch.device) -> None:
    """Returns once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Gives cached memory back and counts the peak anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors have held since `forget_peak`; None on a CPU, whose allocator does not count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
