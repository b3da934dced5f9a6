"""Small networks over the ranks of the running job, for what is predicted against what happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.spatial.twins import axes_of
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Axes, Mesh
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, decompose
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.planning.walk.mode_cost import settled
from tiledseg.planning.walk.rank_steps import RankSteps, rank_steps
from tiledseg.spatial.network import SpatialNetwork

UNETS = {
    "padded": UNet(3, base_channels=2),
    "unpadded": UNet(3, base_channels=2, padding="valid"),
    "bilinear": UNet(3, base_channels=2, upsampling="bilinear"),
    "group": UNet(3, base_channels=4, norm="group"),
    "batch": UNet(3, base_channels=4, norm="batch"),
    "pixel": UNet(3, base_channels=4, norm="pixel", dropout=0.2),
}
SHAPES = {2: (1, 2), 3: (1, 3), 4: (2, 2)}  # of the mesh, by ranks of the job


def cut(unet: UNet, shape: tuple[int, int], raster: tuple[int, int] = (58, 126)) -> Decomposition:
    """A raster whose sides divide by nothing, in uneven blocks wider than any halo, over `shape` ranks."""
    grid = shape[0] + 1, shape[1] + 1
    return decompose(make_tiling(raster, grid, network_footprint(unet.graph())), shape)


@dataclass
class Run:
    """One rank's network and place."""

    axes: Axes
    module: GraphNetwork
    network: SpatialNetwork
    rows: Partition
    cols: Partition
    at: tuple[int, int]
    steps: tuple[RankSteps, RankSteps]

    def source(self) -> torch.Tensor:
        """This rank's block of the input. It needs no gradient."""
        shape = self.rows.owned(self.at[0]).size, self.cols.owned(self.at[1]).size
        return torch.randn(1, 4, *shape).contiguous(memory_format=torch.channels_last)

    def __call__(self) -> torch.Tensor:
        return self.network(self.source(), self.rows, self.cols)


def open_run_axes(meshes: dict[str, Mesh]) -> Iterator[Axes]:
    """The axes over all ranks of a job of 2, 3 or 4."""
    mesh = meshes["gloo"]
    if mesh.size not in SHAPES:
        pytest.skip(f"no mesh for {mesh.size} ranks")
    opened = axes_of(mesh, *SHAPES[mesh.size])
    assert opened is not None
    yield opened
    opened.close()


def spread(unet: UNet, axes: Axes, fusion: int, settle: bool = True, overlap: bool = False) -> Run:
    """This rank's part of a network in layer mode, with the steps that the planner predicts."""
    decomposition = cut(unet, (axes.shape.rows, axes.shape.cols))
    assert axes.position is not None
    layers, at = unet.graph(), (axes.position.row, axes.position.col)
    rows, cols = settled(layers, decomposition) if settle else (decomposition.rows, decomposition.cols)
    module = build_modules(unet, seed=1).train().to(memory_format=torch.channels_last)
    steps = rank_steps(layers, rows, fusion)[at[0]], rank_steps(layers, cols, fusion)[at[1]]
    return Run(axes, module, SpatialNetwork(module, axes, fusion, overlap), rows, cols, at, steps)
