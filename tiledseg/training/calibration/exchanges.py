"""What an exchange of halos takes besides its messages: steps in mode `layer` beside those of blocks that need none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.halo_modes import Part
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.geometry.decomposition import decompose
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.network import build_modules
from tiledseg.planning.cost_model.layer_work import graph_work
from tiledseg.planning.cost_model.prices import summed_bytes, windows_moved
from tiledseg.planning.halo_traffic import TensorAt
from tiledseg.planning.mode_cost import layer_ranks, settled
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.dataset import Sample
from tiledseg.raster.sampling import TileReference
from tiledseg.training.step import Stepper, StepRules

NETWORK = UNet(2, base_channels=12, classes=5)
WIDER = UNet(2, base_channels=16, classes=5)
SIDES = (32, 320)  # px: of a rank's block
_REPEATS = 8
_IGNORED = 255


class Exchange(NamedTuple):
    """Seconds of an exchange, of each byte of its window, and of each byte of a tensor whose statistics are summed."""

    fixed: float
    byte: float
    summed: float


def measure_exchanges(mesh: Mesh, latency: float) -> Exchange:
    """By small and large blocks, a rank beside the other; messages of `latency` count by themselves. Collective."""
    small, large = (_more(mesh, NETWORK, side) for side in SIDES)
    (few, count), (many, _) = (_size(mesh, NETWORK, side) for side in SIDES)
    byte = max(0.0, large - small) / (many - few)
    messages = 2 if mesh.size > 2 else 1  # of a rank, by which the others wait
    fixed = max(0.0, (small - byte * few) / count - messages * latency)
    norms = replace(NETWORK, norm="instance")
    less, most = (_more(mesh, norms, side) for side in SIDES)
    summed = max(0.0, most - less - (large - small)) / (_summed(norms, SIDES[1]) - _summed(norms, SIDES[0]))
    return Exchange(*map(max, zip(*mesh.communicator.gather_objects((fixed, byte, summed)), strict=True)))


def measure_together(mesh: Mesh) -> float:
    """How many times longer a step takes while all ranks compute, each its own, than on rank 0 alone. Collective."""
    alone = replace(mesh, launch=SERIAL, communicator=SerialCommunicator())
    own = make_tiling((SIDES[1], SIDES[1]), (1, 1), network_footprint(WIDER.graph()))
    with _stepping(alone, WIDER, own, Spread()) as step:
        found: dict[int, list[float]] = {1: [], mesh.size: []}
        for turn in range(2 + 2 * _REPEATS):  # by turns: what disturbs the machine disturbs both
            ranks = (1, mesh.size)[turn % 2]
            mesh.communicator.barrier()
            seconds = step() if mesh.rank < ranks else 0.0
            found[ranks].append(max(mesh.communicator.gather_objects(seconds)))
    one, all_of_them = (sorted(times[1:])[_REPEATS // 2] for times in found.values())
    return max(1.0, all_of_them / one)


def _more(mesh: Mesh, network: UNet, side: int) -> float:
    """Seconds by which a step in mode `layer` is longer than one of all ranks by themselves: by turns, the median."""
    alone = replace(mesh, launch=SERIAL, communicator=SerialCommunicator())
    footprint, shape = network_footprint(network.graph()), MeshShape(1, mesh.size, 1)
    shared = make_tiling((side * mesh.size, side), (mesh.size, 1), footprint)
    own = make_tiling((side, side), (1, 1), footprint)
    with (
        _stepping(mesh, network, shared, Spread("layer", shape)) as spoken,
        _stepping(alone, network, own, Spread()) as silent,
    ):
        found = []
        for _ in range(1 + 2 * _REPEATS):
            mesh.communicator.barrier()
            together = spoken()
            mesh.communicator.barrier()
            found.append(together - silent())
    more = sorted(found[1:])[_REPEATS]
    return max(0.0, sum(mesh.communicator.gather_objects(more)) / mesh.size)


def _size(mesh: Mesh, network: UNet, side: int) -> tuple[int, int]:
    """Bytes of windows, and how many."""
    tiling = make_tiling((side * mesh.size, side), (mesh.size, 1), network_footprint(network.graph()))
    windows = _windows(tiling, mesh.size)
    return sum(tensor.pixel_bytes * pixels for tensor, pixels in windows), len(windows)


def _summed(network: UNet, side: int) -> int:
    return summed_bytes(network.graph(), graph_work(network.graph(), network.bands, (side, side), 4))


def _windows(tiling: Tiling, ranks: int) -> list[tuple[TensorAt, int]]:
    graph, decomposition = NETWORK.graph(), decompose(tiling, (ranks, 1))
    found = layer_ranks(graph, *settled(graph, decomposition), 1, NETWORK.bands, 4)
    return max((windows_moved(graph, NETWORK.bands, 4, rank.row, rank.col) for rank in found), key=len)


@contextmanager
def _stepping(mesh: Mesh, of: UNet, tiling: Tiling, spread: Spread) -> Iterator[Callable[[], float]]:
    """What makes a step, as a run would, and says its seconds."""
    network = build_modules(of, seed=0).train()
    run = ParallelRun.open(spread, network, mesh, "fp32")
    passes = run.over((tiling,))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(_IGNORED, 0))
    parts = passes.mode.share([TileReference(0, tile) for tile in range(len(tiling))])
    samples = [_sample(part) for part in parts]

    def step() -> float:
        begun = time.perf_counter()
        stepper.run(0, iter(samples), parts, stop=False)
        return time.perf_counter() - begun

    yield step
    stepper.close()
    run.close()


def _sample(part: Part) -> Sample:
    context, core = part.tile.context.shape, part.tile.core.shape
    x_CHW = np.random.default_rng(0).random((NETWORK.bands, *context), np.float32)
    return Sample(part.image, part.tile, x_CHW, np.zeros(core, np.uint8), np.ones(core, np.bool_))
