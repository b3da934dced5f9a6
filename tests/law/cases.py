"""Networks, rasters in memory, and a gradient computed twice: on the whole raster by torch alone, and by our tiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import ALONE, Mesh, serial_axes
from tiledseg.execution.carrying import INPUT_DTYPES, PARAMETER_DTYPES
from tiledseg.execution.halo_modes import ReadMode
from tiledseg.execution.part_passes import SerialPasses
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.layers.block import tile_places
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.training.objective import Objective, PixelTerm
from tiledseg.training.step import Stepper

IGNORED = 255
GRIDS = ((1, 1), (2, 2), (3, 2), (4, 4))
KEY = DropoutKey(seed=3, step=0, image=0)


class ArrayReader(RasterReader):
    """A raster that lies in memory."""

    def __init__(self, pixels_CHW: NDArray) -> None:
        self._pixels_CHW = pixels_CHW
        bands, height, width = pixels_CHW.shape
        self.info = RasterInfo("array", height, width, bands, str(pixels_CHW.dtype))

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        return self._pixels_CHW[(slice(None), *box.slices)].copy(), np.ones(box.shape, bool)

    def release(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Case:
    """A network and a raster shape that divides by nothing and is larger than the halo where that can be afforded."""

    unet: UNet
    grid: tuple[int, int]

    @property
    def footprint(self) -> Footprint:
        return footprint_of(self.unet)

    @property
    def raster(self) -> tuple[int, int]:
        """Rows: more than the halo, so that contexts end inside the raster. Columns: as few as four tiles need."""
        unit = self.footprint.alignment
        return min(self.footprint.before, 200) + 4 * unit + 1, 3 * unit + 3

    def tiling(self, grid: tuple[int, int] | None = None) -> Tiling:
        return make_tiling(self.raster, grid or self.grid, self.footprint)

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        network = build_modules(self.unet, seed=1).to(dtype)
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def dataset(self, grid: tuple[int, int] | None = None, dtype: str = "float64") -> Dataset:
        draw = np.random.default_rng(5)
        image_CHW = draw.normal(size=(self.unet.bands, *self.raster))
        labels_HW = draw.integers(0, self.unet.classes, self.raster).astype(np.uint8)
        labels_HW[draw.random(self.raster) < 0.1] = IGNORED
        return Dataset(
            [ArrayReader(image_CHW)],
            [ArrayReader(labels_HW[None])],
            [self.tiling(grid)],
            LabelMap.from_config(self.unet.classes, IGNORED),
            Normalization.identity(self.unet.bands),
            dtype,
        )


@dataclass(frozen=True)
class Strip(Case):
    """A raster of few pixels: as many rows of tiles as nine ranks share."""

    rows: int = 6
    cols: int = 3

    @property
    def raster(self) -> tuple[int, int]:
        unit = self.footprint.alignment
        return self.rows * unit + 1, self.cols * unit + 3


@cache
def footprint_of(network: Network) -> Footprint:
    """Once for each network: a case asks for it a dozen times, and it costs as much as a step of a small one."""
    return network_footprint(network.graph())


def all_cases() -> list[Case]:
    """Levels 2-6, 1-3 convolutions, kernels 3 and 5, padded and valid, three upsamplings; the grids in turn.

    From level 5 on, unpadded networks of kernel 5 come with one convolution only: with three, a context has over a
    thousand pixels a side.
    Every other network drops channels, every fifth small one has a norm (over 4 channels: over 2 it is a sign, whose
    gradient is mere rounding).
    """
    options = itertools.product(
        (2, 3, 4, 5, 6), (1, 2, 3), (3, 5), ("same", "valid"), ("transposed", "nearest", "bilinear")
    )
    affordable = [o for o in options if o[0] < 5 or o[1] * o[2] < 10]
    cases = []
    for i, (levels, convs, kernel, padding, upsampling) in enumerate(affordable):
        normed = i % 5 == 2 and levels < 4
        channels = 4 if normed else 2 if levels < 4 else 1
        norm, dropout = "pixel" if normed else "none", 0.25 * (i % 2)
        unet = UNet(levels, convs, kernel, channels, padding, norm, upsampling, dropout, bands=2, classes=3)
        cases.append(Case(unet, GRIDS[(i + i // 4) % 4]))
    wide = itertools.product((5, 6), (2, 3), ("transposed", "nearest", "bilinear"))
    for i, (levels, convs, upsampling) in enumerate(wide):
        unet = UNet(levels, convs, 5, 1, "same", "none", upsampling, 0.25 * (i % 2), bands=2, classes=3)
        cases.append(Case(unet, GRIDS[1 + i % 3]))
    return cases


@dataclass(frozen=True)
class Undivided:
    """The network on the whole raster, by torch's own loss and autograd: logits of the raster, and mean gradients."""

    logits_KHW: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]


def undivided(case: Case) -> Undivided:
    network = case.network().train()
    set_dropout_key(network, KEY)
    dataset = case.dataset((1, 1))
    sample = dataset.load(0, 0)
    output_BKHW = network(as_batch(sample.x_CHW))
    core_BKHW = output_BKHW[(slice(None), slice(None), *sample.tile.core_in_output.slices)]
    target_BHW = torch.from_numpy(sample.y_HW).long()[None]
    loss = functional.cross_entropy(core_BKHW, target_BHW, ignore_index=IGNORED)
    loss.backward()
    return Undivided(core_BKHW[0].detach(), loss.item(), gradients(network))


def step_gradients(
    case: Case, mesh: Mesh, precision: str = "fp64", grid: tuple[int, int] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and mean gradients of one real optimizer step over the tiles of all ranks."""
    network = case.network(PARAMETER_DTYPES[precision]).to(mesh.device).train()
    dataset = case.dataset(grid, INPUT_DTYPES[precision])
    mode, optimizer = ReadMode(network, mesh, dataset.tilings, precision), torch.optim.SGD(network.parameters(), lr=0.0)
    axes, objective = serial_axes(mesh.communicator), Objective((PixelTerm(IGNORED),))
    stepper = Stepper(optimizer, mesh, SerialPasses(mode), axes, objective, KEY.seed)
    mine = mode.share([TileReference(0, tile) for tile in range(len(dataset.tilings[0]))])
    figures, _ = stepper.run(KEY.step, (dataset.load(0, part.tile) for part in mine), mine, stop=False)
    stepper.close()
    assert figures["loss"] is not None
    return figures["loss"], gradients(network)


def gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in network.named_parameters() if p.grad is not None}


def as_batch(x_CHW: NDArray) -> torch.Tensor:
    return torch.from_numpy(x_CHW)[None].contiguous(memory_format=torch.channels_last)


def tiled_logits(case: Case, dtype: torch.dtype = torch.float64, grid: tuple[int, int] | None = None) -> torch.Tensor:
    """The raster's logits from its tiles, of the case's grid unless given."""
    network = case.network(dtype).train()
    set_dropout_key(network, KEY)
    dataset = case.dataset(grid, str(dtype).removeprefix("torch."))
    logits_KHW = torch.zeros(case.unet.classes, *case.raster, dtype=dtype)
    with torch.no_grad():
        for tile in dataset.tilings[0].tiles:
            places = tile_places(network.graph, dataset.tilings[0].whole, tile.context)
            output_BKHW = network(as_batch(dataset.load(0, tile).x_CHW), places)
            logits_KHW[(slice(None), *tile.core.slices)] = output_BKHW[(0, slice(None), *tile.core_in_output.slices)]
    return logits_KHW


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| in the L2 norm; 0 where both are 0."""
    distance, length = (found - expected).norm().item(), expected.norm().item()
    return distance / length if length else distance


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative difference of all tensors together."""
    assert found.keys() == expected.keys()
    flat = [torch.cat([values[key].cpu().double().reshape(-1) for key in expected]) for values in (found, expected)]
    return relative(*flat)


def one_rank() -> Mesh:
    return ALONE
