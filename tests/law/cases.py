"""Networks, rasters in memory, and how far tensors are apart."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import ALONE, Mesh
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.dropout import DropoutKey
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader

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


def gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in network.named_parameters() if p.grad is not None}


def as_batch(x_CHW: NDArray) -> torch.Tensor:
    return torch.from_numpy(x_CHW)[None].contiguous(memory_format=torch.channels_last)


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
