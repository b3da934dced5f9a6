"""Planned peaks of ranks that share an image, layer by layer, some of which is computed once more, beside what PyTorch
allocates.

    mpirun -n 4 python -m benchmarks.planned_memory.peaks_of_ranks

As `peaks`: U-Nets of 2 and 3 levels, all norms, all upsamplings, thin halos and wider ones, at budgets between
what is there whatever is chosen and all that is kept. Each rank compares its own peak with its own plan.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.planned_memory.peaks import (
    budget_at,
    in_channels_last,
    module_by,
    networks,
    step,
    weights_of,
)
from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import detect
from tiledseg.comm.mesh import Axes, open_axes
from tiledseg.comm.session import open_mesh
from tiledseg.config.words import NORMS
from tiledseg.geometry.graph import MemoryPolicy
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.decomposition import MeshShape, Partition
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import make_tiling
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.planning.walk.choice import StepChoices
from tiledseg.planning.walk.cost import rank_walk
from tiledseg.planning.walk.items import Walk, price
from tiledseg.planning.walk.rank_steps import rank_steps
from tiledseg.planning.walk.step_memory import network_walk
from tiledseg.spatial.network import SpatialNetwork

RASTER = 128, 192
SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}  # of the mesh, by ranks
SHARES = 0.2, 0.4, 0.6, 0.8, 1.0
FUSIONS = 1, 2
OFF = 0.02


@dataclass(frozen=True)
class Rank:
    """A rank's part of a network: what it has of the raster, and its plan."""

    unet: UNet
    axes: Axes
    rows: Partition
    cols: Partition
    fusion: int
    walk: Walk

    def allocated(self, policy: MemoryPolicy) -> int:
        """Most bytes of one step, without weights, gradients and the block of the input."""
        module = in_channels_last(module_by(self.unet, policy))
        network, position = SpatialNetwork(module, self.axes, self.fusion), self.axes.position
        assert position is not None
        shape = self.rows.blocks[position.row].size, self.cols.blocks[position.col].size
        source = torch.randn(1, self.unet.bands, *shape).contiguous(memory_format=torch.channels_last)
        with AllocationMeter([*weights_of(module), source]) as meter:
            step(network, source, self.rows, self.cols)
        return meter.peak


def part(unet: UNet, axes: Axes, fusion: int) -> Rank:
    """This rank's, of a raster in even blocks."""
    shape = axes.shape.rows, axes.shape.cols
    graph, position = unet.graph(), axes.position
    assert position is not None
    image = layer_blocks(make_tiling(RASTER, shape, network_footprint(graph)), graph, shape, fusion)
    rows, cols = image.rows, image.cols
    steps = rank_steps(graph, rows, fusion)[position.row], rank_steps(graph, cols, fusion)[position.col]
    walk = rank_walk(graph, unet.bands, *steps, axes.shape.ranks_per_image, 4)
    return Rank(unet, axes, rows, cols, fusion, network_walk(walk))


def errors(rank: Rank, shares: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield, for each share of the way between the least and all, the planned peak over the allocated one, less one, on
    the rank that is off most. The first rank chooses, as one plan is for all. Collective."""
    ranks, walk = rank.axes.image, rank.walk
    for share in shares:
        chosen = StepChoices(walk).choose(budget_at(walk, share))
        policy = ranks.gather_objects(None if chosen is None else chosen.policy)[0]
        if policy is not None:
            planned = price(walk, walk.needed_words(policy)).peak
            every = ranks.gather_objects(planned / rank.allocated(policy) - 1)
            yield share, max(every, key=abs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS)
    parser.add_argument("--fusions", type=int, nargs="+", default=FUSIONS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    mesh = open_mesh(detect(os.environ), os.environ, "mpi")
    axes = open_axes(mesh, MeshShape(1, *SHAPES[mesh.size]))
    found: list[float] = []
    for network in networks(options.levels, options.norms):
        for fusion in options.fusions:
            for share, error in errors(part(network, axes, fusion), SHARES):
                found.append(error)
                if abs(error) > OFF and mesh.rank == 0:
                    print(f"{network}, fusion {fusion}, share {share}: planned {error:+.2%}")
    if mesh.rank == 0:
        within = sum(abs(error) <= OFF for error in found)
        median, worst = statistics.median(map(abs, found)), max(found, key=abs)
        print(f"{within} of {len(found)} within 2 %, half within {median:.3%}, the worst {worst:+.2%} planned")


if __name__ == "__main__":
    main()
