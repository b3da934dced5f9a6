"""The cost of a pipeline of one stage around the kernels of a plain loop.

Pairs take turns; a ratio of 1.00 means that nothing is added. Pipelines of 2 and 4 stages are in `shared_gpu`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.part import begin_part
from benchmarks.gpu.production import finish
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import serial_axes
from tiledseg.execution.carrying import make_deterministic
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.network import GraphNetwork, Tensors, build_modules
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.pipeline.schedule import Settings
from tiledseg.training.objective import PixelTerm

MICRO_BATCHES = 8


def main() -> int:
    part = begin_part(__file__)
    small = part.small or part.device.type == "cpu"
    make_deterministic(True)
    for size in (32,) if small else (512, 1024):
        part.measure(f"one stage at {size} px", "ratio", partial(one_stage, size, small, part.device), needs=5)
    return int(part.failed)


class Drawn:
    """A micro-batch of random pixels and labels, as the executor takes them."""

    images = 1

    def __init__(self, network: GraphNetwork, size: int, device: torch.device) -> None:
        self.network = network
        self.shapes = tensor_shapes(network.graph, network.bands, size, size)
        classes = self.shapes[-1][0]
        x_BCHW = torch.randn(1, network.bands, size, size, device=device)
        self._x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        self._target_BHW = torch.randint(0, classes, (1, size, size), device=device)

    def source(self) -> torch.Tensor:
        return self._x_BCHW

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        self.network.run_nodes(tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        (output_BKHW,) = outputs_BKHW
        return PixelTerm(255).sums((output_BKHW,), self._target_BHW)[0]


def one_stage(size: int, small: bool, device: torch.device) -> dict[str, float]:
    """The executor with all layers on this rank, over a loop of forward and backward passes."""
    network = build_modules(UNet(3 if small else 5, base_channels=4 if small else 16), seed=0)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layers = len(network.graph)
    split = split_network(network, Settings("1f1b", (layers,), ("never",)), 0, device, torch.float32)
    executor = PipelineExecutor(split, serial_axes())
    drawn = [Drawn(network, size, device) for _ in range(MICRO_BATCHES)]

    def loop() -> None:
        for one in drawn:
            one.loss(network(one.source())).backward()

    ways: tuple[Callable[[], object], ...] = (loop, lambda: executor.train(drawn, lambda parameters: None))
    times: list[list[float]] = [[], []]
    for turn in range(1 if small else 8):
        for way in (0, 1) if turn % 2 else (1, 0):
            finish(device)
            begun = time.perf_counter()
            ways[way]()
            finish(device)
            times[way].append(time.perf_counter() - begun)
    ratio = statistics.median(stage / plain for plain, stage in zip(*times, strict=True))
    return {"ratio": ratio, "loop_ms": 1e3 * statistics.median(times[0])}


if __name__ == "__main__":
    sys.exit(main())
