"""What an exchange of halos takes besides its messages: steps in mode `layer` beside those of blocks that need none."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.execution.halos.part import Part
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.network import build_modules
from tiledseg.planning.cost_model.layer_work import graph_work
from tiledseg.planning.cost_model.prices import exchanges_made, summed_bytes, windows_copied
from tiledseg.planning.cost_model.profile import Link
from tiledseg.planning.modes.mode_cost import layer_ranks, settled
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step.halo_traffic import statistic_sums
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.steps.step import Stepper, StepRules

NETWORK = UNet(2, base_channels=12, classes=5)
WIDER = UNet(2, base_channels=16, classes=5)
SIDES = (32, 320)  # px: of a rank's block
_REPEATS = 5
_IGNORED = 255


class Exchange(NamedTuple):
    """Seconds of an exchange, and of each byte of a window that is copied; of each byte of a tensor whose statistics
    are summed, and of each such sum; all besides messages and all-reduces."""

    exchange: float
    window: float
    summed: float
    norm: float


class _Size(NamedTuple):
    """What a rank does in exchanges: how many there are, bytes of windows that are copied, messages."""

    exchanges: int
    bytes: int
    messages: int


def measure_exchanges(mesh: Mesh, ranks: int, link: Link) -> Exchange:
    """By small and large blocks of the first `ranks`, one beside the other, over rows and columns where they are four;
    messages and all-reduces over `link` count by themselves. Collective over all."""
    shape = MeshShape(1, ranks // 2, 2) if ranks > 2 and ranks % 2 == 0 else MeshShape(1, ranks, 1)
    small, large = (_more(mesh, shape, NETWORK, side) for side in SIDES)
    few, many = (_size(shape, side) for side in SIDES)
    byte = max(0.0, large - small) / (many.bytes - few.bytes)
    fixed = max(0.0, small - byte * few.bytes - few.messages * link.latency) / few.exchanges
    norms = replace(NETWORK, norm="instance")
    less, most = (_more(mesh, shape, norms, side) - plain for side, plain in zip(SIDES, (small, large), strict=True))
    first, last = (_summed(norms, side) for side in SIDES)
    summed = max(0.0, most - less) / (last - first)
    calls = statistic_sums(norms.graph(), norms.bands, ranks).step.messages
    rounds = 2 * math.ceil(math.log2(ranks))
    norm = max(0.0, (less - summed * first) / calls - rounds * link.reduce_latency)
    return Exchange(fixed, byte, summed, norm)


def measure_together(mesh: Mesh, few: int, many: int) -> float:
    """How many times longer a step takes while the first `many` ranks compute, each its own, than the first `few`:
    the median of turns, for what two cores take of each other comes and goes. Collective."""
    own = make_tiling((SIDES[1], SIDES[1]), (1, 1), network_footprint(WIDER.graph()))
    alone = replace(mesh, launch=SERIAL, communicator=SerialCommunicator())
    with _stepping(alone, WIDER, (own,), Spread()) as step:
        found = [[_longest(mesh, step, ranks) for ranks in (few, many)] for _ in range(1 + 2 * _REPEATS)]
    return max(1.0, statistics.median(together / alone for alone, together in found[1:]))


def _longest(mesh: Mesh, step: Callable[[], object], ranks: int) -> float:
    """Seconds in which the first `ranks`, which begin together, are all done; a rank that waits for its turn on a core
    begins late, so the first begin of a host counts."""
    mesh.communicator.barrier()
    begun = time.perf_counter()
    if mesh.rank < ranks:
        step()
    spans = mesh.communicator.gather_objects((begun, time.perf_counter()))[:ranks]
    begins, ends = zip(*spans, strict=True)
    return max(ends) - min(begins) if mesh.launch.one_node else max(end - begin for begin, end in spans)


def _more(mesh: Mesh, shape: MeshShape, network: UNet, side: int) -> float:
    """Seconds by which a step in mode `layer` is longer than one in which each rank has an image of its own: the median
    of turns, for the quickest of all has the fewest waits."""
    footprint, parts = network_footprint(network.graph()), (shape.rows, shape.cols)
    shared = make_tiling((side * shape.rows, side * shape.cols), parts, footprint)
    own = make_tiling((side, side), (1, 1), footprint)
    with (
        _stepping(mesh, network, (shared,), Spread("layer", shape)) as spoken,
        _stepping(mesh, network, (own,) * shape.ranks, Spread()) as silent,
    ):
        turns = range(1 + (2 * _REPEATS if shape.ranks == 2 else _REPEATS))
        found = [(_longest(mesh, spoken, mesh.size), _longest(mesh, silent, mesh.size)) for _ in turns]
    return statistics.median(together - apart for together, apart in found[1:])


def _size(shape: MeshShape, side: int) -> _Size:
    """Of the rank that takes part in most."""
    graph, parts = NETWORK.graph(), (shape.rows, shape.cols)
    tiling = make_tiling((side * shape.rows, side * shape.cols), parts, network_footprint(graph))
    found = layer_ranks(graph, *settled(graph, decompose(tiling, parts)), 1, NETWORK.bands, 4)
    exchanges = [exchanges_made(graph, NETWORK.bands, rank.row, rank.col) for rank in found]
    most, rank = max(zip(exchanges, found, strict=True), key=lambda each: each[0])
    copied = windows_copied(graph, NETWORK.bands, 4, rank.row, rank.col)
    size = sum(tensor.pixel_bytes * pixels for tensor, pixels in copied)
    return _Size(most, size, rank.traffic.step.messages)


def _summed(network: UNet, side: int) -> int:
    return summed_bytes(network.graph(), graph_work(network.graph(), network.bands, (side, side), 4))


@contextmanager
def _stepping(mesh: Mesh, of: UNet, tilings: tuple[Tiling, ...], spread: Spread) -> Iterator[Callable[[], object]]:
    """What makes a step of all tiles, as a run would."""
    network = build_modules(of, seed=0).train()
    run = ParallelRun.open(spread, network, mesh, "fp32")
    passes = run.over(tilings)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(_IGNORED, 0))
    tiles = [TileReference(image, tile) for image, tiling in enumerate(tilings) for tile in range(len(tiling))]
    parts = passes.mode.share(tiles)
    samples = [_sample(part) for part in parts]

    yield lambda: stepper.run(0, iter(samples), parts, stop=False)
    stepper.close()
    run.close()


def _sample(part: Part) -> Sample:
    context, core = part.tile.context.shape, part.tile.core.shape
    x_CHW = np.random.default_rng(0).random((NETWORK.bands, *context), np.float32)
    return Sample(part.image, part.tile, x_CHW, np.zeros(core, np.uint8), np.ones(core, np.bool_))
