"""How a rank comes by the halos of its pixels, as three ways to run one network, with one result.

- `read`: a rank takes any tiles and reads their contexts from the raster;
- `exchange`: a rank owns a block of an image's tiles, reads the block alone, and gets the halo of the input from its
  neighbours once; then it computes tile by tile as in `read`;
- `layer`: the ranks of an image compute every layer together, each its block, and exchange thin halos on the way.

A mode says which parts of a step are a rank's, and turns each loaded part into pieces: outputs on the pixels that the
rank owns. Training, validation and prediction do with the pieces what they must.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from tiledseg.comm.axes import Axes, open_axes, serial_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.blocks import LayerBlocks, exchange_block, layer_blocks
from tiledseg.geometry.box import Box
from tiledseg.geometry.decomposition import Decomposition, decompose, plan_exchange
from tiledseg.geometry.tiling import Tile, Tiling
from tiledseg.models.unet import FlatNetwork
from tiledseg.raster.dataset import Sample
from tiledseg.raster.sampling import TileReference, deal
from tiledseg.spatial.halo_exchange import HaloExchanger
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.training.halo_plan import HaloPlan
from tiledseg.training.precision import autocast, to_network_input


class Part(NamedTuple):
    """What a rank loads at once: a tile of an image, or its block of the image."""

    image: int
    tile: Tile


@dataclass(frozen=True)
class Piece:
    """The network's output on pixels that this rank owns: `core` in raster positions, `in_part` in the part's core."""

    logits_BKHW: torch.Tensor
    core: Box
    in_part: Box


class HaloMode(Protocol):
    """One way to run a network on the images of one list of tilings."""

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        """This rank's parts of a step, the same for all calls with the same step. No communication."""

    def pieces(self, part: Part) -> int:
        """How many pieces `forward` makes of a part."""

    def forward(self, sample: Sample) -> Iterator[Piece]:
        """Runs the network on a loaded part. Collective over the ranks of its image but in mode `read`."""

    def speaks(self, parts: Sequence[Part]) -> bool:
        """Whether this rank's buffers count, after a step in which it had `parts`, where ranks agree on theirs."""


@dataclass(frozen=True)
class HaloModes:
    """Makes the modes of one run; they share the axes and the network. `close()` ends the axes. Collective."""

    plan: HaloPlan
    network: FlatNetwork
    mesh: Mesh
    axes: Axes
    spatial: SpatialNetwork | None
    precision: str

    @staticmethod
    def open(plan: HaloPlan, network: FlatNetwork, mesh: Mesh, precision: str) -> HaloModes:
        """Collective over all ranks of the mesh. Raises ConfigError where a layer cannot be spread."""
        axes = serial_axes() if plan.halo == "read" else open_axes(mesh, plan.mesh)
        spatial = SpatialNetwork(network, axes, plan.fusion, plan.overlap) if plan.halo == "layer" else None
        return HaloModes(plan, network, mesh, axes, spatial, precision)

    def over(self, tilings: Sequence[Tiling]) -> HaloMode:
        """The mode on images that are cut by `tilings`."""
        if self.plan.halo == "read":
            return ReadMode(self.network, self.mesh, tuple(tilings), self.precision)
        if self.spatial is None:
            return ExchangeMode(self.network, self.mesh, self.axes, tuple(tilings), self.precision)
        return LayerMode(self.spatial, self.network, self.mesh, tuple(tilings), self.precision)

    def close(self) -> None:
        """Collective."""
        self.axes.close()


@dataclass(frozen=True)
class ReadMode:
    """Tiles are dealt to ranks by their size, wherever they lie."""

    network: nn.Module
    mesh: Mesh
    tilings: tuple[Tiling, ...]
    precision: str

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        tiles = [Part(r.image, self.tilings[r.image].tiles[r.tile]) for r in step]
        return deal(tiles, self.mesh.size, lambda part: part.tile.context.area)[self.mesh.rank]

    def pieces(self, part: Part) -> int:
        return 1

    def forward(self, sample: Sample) -> Iterator[Piece]:
        x_BCHW = to_network_input(sample.x_CHW, self.mesh.device)
        yield _piece(self.network, x_BCHW, sample.tile, sample.tile, self)

    def speaks(self, parts: Sequence[Part]) -> bool:
        return len(parts) > 0


class ExchangeMode:
    """The input's halo comes from the neighbours; behind that, tile by tile."""

    def __init__(self, network: nn.Module, mesh: Mesh, axes: Axes, tilings: tuple[Tiling, ...], precision: str) -> None:
        self.network, self.mesh, self.axes, self.precision = network, mesh, axes, precision
        self._exchanger = HaloExchanger(axes)
        self._images = tuple(decompose(tiling, (axes.shape.rows, axes.shape.cols)) for tiling in tilings)

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        at = self.axes.position
        if at is None:
            return ()
        return tuple(Part(i, exchange_block(self._images[i], at.row, at.col)) for i in _own_images(step, self.axes))

    def pieces(self, part: Part) -> int:
        return len(self._images[part.image].tiles(*part.tile.position))

    def forward(self, sample: Sample) -> Iterator[Piece]:
        image, (row, col) = self._images[sample.image], sample.tile.position
        x_BCHW = to_network_input(sample.x_CHW, self.mesh.device)
        with torch.no_grad():
            window_BCHW, window = self._exchange(x_BCHW, image, row, col)
        for tile in image.tiles(row, col):
            rows, cols = tile.context.relative_to(window).slices
            context_BCHW = window_BCHW[:, :, rows, cols].contiguous(memory_format=torch.channels_last)
            yield _piece(self.network, context_BCHW, tile, sample.tile, self)

    def speaks(self, parts: Sequence[Part]) -> bool:
        return len(parts) > 0

    def _exchange(self, x_BCHW: torch.Tensor, image: Decomposition, row: int, col: int) -> tuple[torch.Tensor, Box]:
        """The block with the halo of all its tiles, and where that lies in the raster."""
        rows, cols = image.context_windows()
        exchanges = plan_exchange(image.rows, rows, row), plan_exchange(image.cols, cols, col)
        window = Box(rows[row], cols[col]).shift(image.whole.row.start, image.whole.col.start)
        return self._exchanger.exchange(x_BCHW, *exchanges), window


class LayerMode:
    """All ranks of an image run every layer together. Nothing is computed twice (at fusion 1)."""

    def __init__(
        self,
        spatial: SpatialNetwork,
        network: FlatNetwork,
        mesh: Mesh,
        tilings: tuple[Tiling, ...],
        precision: str,
    ) -> None:
        self.spatial, self.mesh, self.precision = spatial, mesh, precision
        shape, layers = self.spatial.axes.shape, network.descriptions
        self._images: tuple[LayerBlocks, ...] = tuple(
            layer_blocks(tiling, layers, (shape.rows, shape.cols), spatial.fusion) for tiling in tilings
        )

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        at = self.spatial.axes.position
        if at is None:
            return ()
        return tuple(Part(i, self._images[i].tile(at.row, at.col)) for i in _own_images(step, self.spatial.axes))

    def pieces(self, part: Part) -> int:
        return 1

    def forward(self, sample: Sample) -> Iterator[Piece]:
        image = self._images[sample.image]
        x_BCHW = to_network_input(sample.x_CHW, self.mesh.device)
        with autocast(self.precision, self.mesh.device):
            logits_BKHW = self.spatial(x_BCHW, image.rows, image.cols)
        yield Piece(_crop(logits_BKHW, sample.tile), sample.tile.core, sample.tile.core.relative_to(sample.tile.core))

    def speaks(self, parts: Sequence[Part]) -> bool:
        """The ranks of an image have taken the same statistics: one of them speaks for all."""
        at = self.spatial.axes.position
        return len(parts) > 0 and at is not None and (at.row, at.col) == (0, 0)


def _own_images(step: Sequence[TileReference], axes: Axes) -> list[int]:
    """The images of a step that this rank's replica takes: every replica-th."""
    assert axes.position is not None, "ranks outside the mesh take no image"
    return sorted({reference.image for reference in step})[axes.position.replica :: axes.shape.replicas]


def _piece(
    network: nn.Module, context_BCHW: torch.Tensor, tile: Tile, part: Tile, mode: ReadMode | ExchangeMode
) -> Piece:
    with autocast(mode.precision, mode.mesh.device):
        logits_BKHW = network(context_BCHW)
    return Piece(_crop(logits_BKHW, tile), tile.core, tile.core.relative_to(part.core))


def _crop(logits_BKHW: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The part of a network's output that the tile owns."""
    rows, cols = tile.core_in_output.slices
    return logits_BKHW[:, :, rows, cols]
